"""Which kernels the operations of a layer become on a device, without lowering the whole graph.

Every operation is lowered by itself, by the code that lowers it in a graph, for one of the devices: what comes from
others are placeholders of the size that the device would hold. Devices that split a layer evenly run the same kernels.
What combines partial sums is not told here: `cost.kernels` knows it from the shapes.

Operations of a layer that are alike and read the same tensor, as the time steps of a recurrent layer read its weights,
run soon after each other, and so does what a loop reads from outside of it: all but the first find that tensor in the
caches. Their kernels are others (`Kernel.again`). Of equal nodes in a layer only one is run (`traces.Merging`).
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.export.phases import UPDATE
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.emit import Emitter, on
from pase_mtf.lowering.equal_nodes import doing_of
from pase_mtf.lowering.kept_traces import KeptTraces
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.nodes import kernel_of
from pase_mtf.lowering.plans import legal_spec
from pase_mtf.lowering.recorded import recorded_move
from pase_mtf.lowering.traces import Merging, Place, Trace, TracedNode
from pase_mtf.lowering.variables import LaidOutVariable
from pase_mtf.machine.kernels import Block, Kernel, float_of_size
from pase_mtf.operations.flow import Flow
from pase_mtf.operations.lowering_key import held_by, is_versioned, lowering_key
from pase_mtf.operations.protocols import LaidOut
from pase_mtf.operations.registry import rule_of

__all__ = ["GraphKernels"]

_DEVICE = "/device:CPU:0"
_FIRST = ("", _DEVICE)


class GraphKernels:
    """The kernels of a graph's layers (a `cost.kernels.KernelSource`).

    Attributes:
      untraced: why operations could not be lowered by themselves, a sentence each; additions stand for them.
    """

    def __init__(self, graph: mtf.Graph, computation_graph: ComputationGraph, kept: KeptTraces | None = None, *,
                 turns: bool = False) -> None:
        """Lowers nothing yet.

        Args:
          graph: of Mesh-TF.
          computation_graph: what `export_graph` made of it.
          kept: what its operations became before, and where what they become now is kept.
          turns: it is a microbatch of a pipeline: what the backward pass does waits for the forward pass, and is not
            what that has done; weights are cast once for all microbatches, as updates are made.
        """
        self._kept, self._turns = kept, turns
        self._layers = computation_graph.layers
        # The names of the variables whose new values a layer computes.
        self._updated: dict[str, set[str]] = {layer.name: set() for layer in self._layers}
        for layer in self._layers:
            for variable in layer.variables:
                self._updated[variable.updated_by or layer.name].add(variable.name)
        self._loops_of = Flow(graph).loops_of  # in the order of the exported graph
        self._graph, self._operations = graph, list(self._loops_of)
        self._keys: dict[int, tuple[Hashable, tuple[str, ...], Hashable]] = {}
        self._alike: dict[int, Hashable] = {}
        # Position of an operation -> which of its inputs were just read by one that is alike.
        self._again: dict[int, tuple[int, ...]] = {}
        for layer in self._layers:
            self._again |= self._read_again(layer)
        self._found: dict[Hashable, Trace] = {}
        self.untraced: dict[str, None] = {}

    def layer(self, number: int, configuration: Configuration) -> Mapping[str, Mapping[Kernel, float]]:
        """The kernels of a layer on each of its devices; of what these share in, each has an equal part.

        Args:
          number: of the layer.
          configuration: of the layer.

        Returns:
          Phase -> kernel -> how often a step runs it.
        """
        layer = self._layers[number]
        spec = MeshSpec.of_configuration(configuration, layer.aliases)
        found: dict[str, dict[Kernel, float]] = {}
        merging = Merging()
        for operation in layer.operations:
            if operation.kind == "none" and not self._is_cast(operation):
                continue
            once = self._turns and rule_of(self._operations[operation.index]).is_variable
            counts = found.setdefault(UPDATE if once else operation.phase, {})
            try:
                kernels = self._operation(layer, operation, configuration, spec, merging)
            except _UntracedError as error:
                self.untraced[str(error)] = None
                kernels = {_addition(operation, configuration): operation.nodes}
            for kernel, times in kernels.items():
                counts[kernel] = counts.get(kernel, 0) + times * operation.trips
        return found

    def alike(self, number: int) -> Hashable:
        """Equal for layers that run the same kernels under configurations that split the same places of their dims."""
        if number not in self._alike:
            layer, names = self._layers[number], dict[str, int]()
            keys: list[Hashable] = []
            tensors: dict[mtf.Tensor, int] = {}  # which operations read the same
            loops: dict[tuple[mtf.Operation, ...], int] = {}  # and which are in the same ones
            held: dict[int, int] = {}  # and which hold the same arrays: others are not equal nodes
            for entry in layer.operations:
                operation = self._operations[entry.index]
                assigned = rule_of(operation).assigns(operation)
                again = self._again[entry.index]
                # Who else reads what it makes decides whether parts are added before they are summed, or after.
                sums = tuple((tuple(names.setdefault(name, len(names)) for name in dims),
                              tuple(operand.shape for operand in summed)) for dims, summed in entry.sums)
                around = loops.setdefault(self._loops_of[operation], len(loops))
                keys.append((entry.phase, entry.kind, entry.trips, around, again, sums, (operation.assign_fn, tuple(
                    (tuple(names.setdefault(name, len(names)) for name in value.dims), value.shape, value.itemsize)
                    for value in entry.inputs)) if assigned else (_without_names(lowering_key(operation), names), tuple(
                        tensors.setdefault(tensor, len(tensors))
                        for tensor in (*operation.inputs, *operation.outputs)), tuple(
                        held.setdefault(id(value), len(held)) for value in held_by(operation)))))
            own = tuple((tuple(names.setdefault(name, len(names)) for name in variable.operand.dims),
                         variable.operand.shape, variable.operand.itemsize) for variable in layer.variables)
            dims = tuple((names.setdefault(name, len(names)), size) for name, size in layer.dims.items())
            aliases = tuple(sorted((names.setdefault(name, len(names)), names[dim])
                                   for name, dim in layer.aliases.items() if dim in names))
            self._alike[number] = tuple(keys), own, dims, aliases
        return self._alike[number]

    def move(self, source: Partition, target: Partition, shape: Sequence[int], itemsize: int) -> Mapping[Kernel, int]:
        """The kernels that move a tensor, on all devices together.

        Args:
          source, target: partitions of it over the devices.
          shape, itemsize: its unsplit size, bytes per element.
        """
        return recorded_move(source, target, tuple(shape), itemsize)

    def _is_cast(self, entry: LayerOperation) -> bool:
        """Whether it is a variable, or a read of one, that is kept in another type than a step computes in: every step
        casts it."""
        operation = self._operations[entry.index]
        variable = rule_of(operation).leader(operation)  # what reads it once more casts it once more
        return rule_of(variable).is_variable and variable.slice_dtype != variable.activation_dtype

    def _read_again(self, layer: Layer) -> dict[int, tuple[int, ...]]:
        """Which inputs of its operations one before that is alike has read, or the same one in the iteration before."""
        trips = {self._operations[entry.index]: entry.trips for entry in layer.operations}
        seen, found = set[tuple[str, Hashable, mtf.Tensor]](), dict[int, tuple[int, ...]]()
        for entry in layer.operations:
            operation = self._operations[entry.index]
            if rule_of(operation).assigns(operation):  # it reads every tensor once, and there may be thousands
                found[entry.index] = ()
                continue
            key = lowering_key(operation)
            read = [(entry.phase, key, tensor) for tensor in operation.inputs]
            found[entry.index] = tuple(
                place for place, one in enumerate(read)
                if one in seen or trips.get(operation.inputs[place].operation, 1) < entry.trips)
            seen.update(read)
        return found

    def _operation(self, layer: Layer, entry: LayerOperation, configuration: Configuration, spec: MeshSpec,
                   merging: Merging) -> Mapping[Kernel, float]:
        operation = self._operations[entry.index]
        rule = rule_of(operation)
        if rule.loop(operation):
            return {_addition(entry, configuration): 1}
        legal = legal_spec(spec, rule.leader(operation))
        if rule.assigns(operation):
            return self._assignments(layer, operation, legal)
        if entry.index not in self._keys:
            names: dict[str, int] = {}
            alike = _without_names(lowering_key(operation), names)
            # The trace is of any that is alike, whose arrays may hold other numbers.
            self._keys[entry.index] = alike, tuple(names), tuple(map(id, held_by(operation)))
        alike, numbered, held = self._keys[entry.index]
        parts = {name: count for axis, count in legal.axes for name in axis}
        again = self._again[entry.index]
        # What reads one tensor twice may be equal to other nodes than what reads two.
        places = tuple(map(operation.inputs.index, operation.inputs))
        # Devices share in drawing random numbers: some draw more than others, and what several need is made once.
        sharing = len(legal.devices) if rule.is_random else 0
        key = alike, again, places, tuple(parts.get(name, 1) for name in numbered), sharing
        lower = _SingleOperation.cast if self._is_cast(entry) else _SingleOperation.lower
        trace = self._found_once(operation, key, lambda: self._trace(
            operation, legal, lambda single: lower(single, operation), [operation.inputs[place] for place in again]))
        counts = merging.run(operation, self._loops_of[operation], trace, entry.phase if self._turns else "", held)
        return {kernel: times / sharing for kernel, times in counts.items()} if sharing else counts

    def _found_once(self, operation: mtf.Operation, key: Hashable, find: Callable[[], Trace]) -> Trace:
        """What an operation becomes: in this process, or in one before it."""
        if key not in self._found:
            kept = self._kept if _is_lowered_by_versions(operation) else None
            found = kept.get(key) if kept else None
            if found is None:
                found = find()
                if kept:
                    kept.keep(key, found)
            self._found[key] = found
        return self._found[key]

    def _assignments(self, layer: Layer, operation: mtf.Operation, spec: MeshSpec) -> Mapping[Kernel, int]:
        """Of an assignment, perhaps to the variables of many layers, those whose new values a layer computes.

        What it computes elsewhere than the variable lies is a sum of its own; as many bytes as a sum in place.
        """
        own = self._updated[layer.name]
        parts = {name: count for axis, count in spec.axes for name in axis}
        found: collections.Counter[Kernel] = collections.Counter()
        for variable, value in rule_of(operation).assigns(operation):
            if variable.name in own:
                shape = tuple(dim.size // parts.get(dim.name, 1) for dim in variable.shape.dims)
                key = ("assigned", operation.assign_fn, type(variable), variable.slice_dtype,
                       variable.activation_dtype, value.dtype, shape)
                trace = self._found_once(operation, key, functools.partial(
                    self._trace, operation, spec, functools.partial(
                        _SingleOperation.assign, operation=operation, variable=variable, value=value)))
                found.update(node.kernel for node in trace.nodes if node.kernel)
        return found

    def _trace(self, operation: mtf.Operation, spec: MeshSpec,
               lower: Callable[[_SingleOperation], list[tf.Operation]], again: Sequence[mtf.Tensor] = (),
               ) -> Trace:
        # Few operations look beyond their own device: those are lowered for all of them.
        failure = ""
        # And random numbers: under one name of all devices, the first would draw those of all.
        for everywhere in (True,) if rule_of(operation).is_random else (False, True):
            with tf.Graph().as_default():
                single = _SingleOperation(self._graph, spec, everywhere)
                try:
                    nodes = lower(single)
                except Exception as error:  # whatever a lowering raises: in the graph itself it may be fine
                    told = " ".join(str(error).split())[:150]
                    failure = f"{type(operation).__name__}: {type(error).__name__}, {told}"
                    continue
                return single.trace(operation, nodes, {single.first_slice(tensor).name for tensor in again})
        raise _UntracedError(failure)


def _without_names(key: Hashable, numbers: dict[str, int]) -> Hashable:
    """A `lowering_key` with numbers for the names of dims, in the order in which they appear: blocks of a network that
    are repeated differ in nothing else."""
    if not isinstance(key, tuple):
        return key
    match key:
        case "dim", str(name), int(size):
            return "dim", numbers.setdefault(name, len(numbers)), size
        case "shape", tuple(dims):
            return "shape", tuple((numbers.setdefault(name, len(numbers)), size) for name, size in dims)
        case ("_splittable_dims" | "_unsplittable_dims") as which, (_, frozenset() as dims):  # of the shapes before
            return which, frozenset(numbers.get(name, name) for name in dims)
    return tuple(_without_names(entry, numbers) for entry in key)


def _is_lowered_by_versions(operation: mtf.Operation) -> bool:
    """Whether versions tell the code that lowers an operation: neither it nor its class's rule is a program's own."""
    return all(is_versioned(lower) for one in (operation, rule_of(operation).leader(operation))
               for lower in (type(one).lower, rule_of(one).lower) if lower is not None)


def _digest(doing: Hashable) -> str | None:
    """As short text, in which numbers of a constant take no more room than others."""
    return None if doing is None else hashlib.blake2b(repr(doing).encode(), digest_size=12).hexdigest()


def _calls(node: tf.Operation) -> bool:
    """Whether a node calls a function of its graph."""
    return any(value.HasField("func") or value.list.func for value in node.node_def.attr.values())


def _addition(entry: LayerOperation, configuration: Configuration) -> Kernel:
    """An addition of tensors like the largest of an operation: what a loop does, in every iteration, with what it
    accumulates, and what stands for an operation that could not be lowered by itself."""
    operand = max((*entry.outputs, *entry.inputs), key=lambda operand: math.prod(operand.shape))
    block = Block(float_of_size(operand.itemsize), tuple(
        size // configuration.shards(name) if name else size
        for name, size in zip(operand.dims, operand.shape, strict=True)))
    return Kernel("AddV2", (block, block), (block,))


class _UntracedError(Exception):
    """Why an operation could not be lowered by itself."""


class _DeviceMesh(DeviceMeshImpl):
    """One device of a mesh: it emits its own nodes only, and combines nothing."""

    @property
    def devices(self) -> list[str]:
        """The one."""
        return [_DEVICE]

    def allreduce(self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str) -> LaidOut:
        """What there was."""
        return x


class _WholeMesh(DeviceMeshImpl):
    """A mesh whose devices combine nothing."""

    def allreduce(self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str) -> LaidOut:
        """What there was."""
        return x


class _Slices(LaidOutVariable):
    """The slices of a variable that nobody fills."""

    @property
    def slice_is_master(self) -> bool:
        """Never: there is no master."""
        return False


class _SingleOperation(PlanLowering):
    """Lowers one operation; what it reads are placeholders."""

    def __init__(self, graph: mtf.Graph, spec: MeshSpec, everywhere: bool) -> None:
        # Not super().__init__: it lowers the graph.
        devices = ([f"/device:CPU:{number}" for number in range(max(spec.devices, default=0) + 1)] if everywhere
                   else [_DEVICE] * (max(spec.devices, default=0) + 1))
        self._prepare(graph, Emitter(devices, shared=True), None)
        self._mesh = (_WholeMesh if everywhere else _DeviceMesh)(spec, self.emitter)
        self._impl_of = collections.defaultdict(lambda: self._mesh)

    def lower(self, operation: mtf.Operation) -> list[tf.Operation]:
        """The nodes of an operation on the first device; of random numbers, which devices share in, those on all."""
        leader = rule_of(operation).leader(operation)
        if leader is not operation:
            self.lower_operation(leader)
        before = len(tf.get_default_graph().get_operations())
        self.lower_operation(operation)
        return self._made(before, everywhere=rule_of(operation).is_random)

    def cast(self, operation: mtf.Operation) -> list[tf.Operation]:
        """The nodes that bring a variable, or a read of it, to the type that a step computes in, on the first
        device."""
        slices = _Slices(rule_of(operation).leader(operation), self._mesh)
        values = slices.read()
        before = len(tf.get_default_graph().get_operations())
        self._stored[operation.outputs[0]] = slices.activation(values)
        return self._made(before)

    def assign(self, operation: mtf.Operation, variable: mtf.Variable, value: mtf.Tensor) -> list[tf.Operation]:
        """The nodes of an assignment to one variable on the first device."""
        slices, blocks = _Slices(variable, self._mesh), self.stored(value).all_slices
        slices.read()
        before = len(tf.get_default_graph().get_operations())
        slices.updates(operation.assign_fn, blocks)
        return self._made(before)

    def _made(self, before: int, *, everywhere: bool = False) -> list[tf.Operation]:
        return [node for node in tf.get_default_graph().get_operations()[before:]
                if everywhere or node.device in _FIRST]

    def trace(self, operation: mtf.Operation, nodes: Sequence[tf.Operation], near: set[str]) -> Trace:
        """The nodes of an operation as they are kept. Most of what a kernel reads and writes `again` are tensors that
        lie in the caches.

        Args:
          operation: which was lowered.
          nodes: on the first device, or on all, in an order in which they can run.
          near: names of tensors that lie in its caches.
        """
        places: dict[str, Place] = {}
        for number, tensor in enumerate(operation.inputs):
            for position, block in enumerate(self.stored(tensor).to_laid_out_tensor().all_slices):
                places.setdefault(block.name, (-1 - number, position))
        found, near = list[TracedNode](), set(near)
        for node in nodes:
            kernel, (doing, any_order) = kernel_of(node), doing_of(node)
            if doing is not None and node.device not in _FIRST:
                doing = node.device, doing
            read = [tensor.name in near for tensor in node.inputs]
            if any(read) and (kernel is None or kernel.by_reference):
                near.update(tensor.name for tensor in node.outputs)
            if kernel is not None:
                nbytes = sum(block.nbytes for block, one in zip(kernel.inputs, read, strict=True) if one)
                kernel = kernel._replace(again=2 * nbytes > kernel.nbytes)
            reads = [places.get(tensor.name) for tensor in node.inputs]
            waits = [places.get(f"^{other.name}") for other in node.control_inputs]
            for output, tensor in enumerate(node.outputs):
                places.setdefault(tensor.name, (len(found), output))
            places[f"^{node.name}"] = len(found), -1
            found.append(TracedNode(kernel, _digest(doing), any_order, reads, waits))
        made = [self._stored.get(tensor) for tensor in operation.outputs]
        return Trace(found, [None if x is None or isinstance(x, mtf.LazyAllreduceSum) else
                             places.get(x.all_slices[0].name) for x in made], not any(map(_calls, nodes)))

    def first_slice(self, tensor: mtf.Tensor) -> tf.Tensor:
        """A tensor that was read, on the first device."""
        return self.stored(tensor).all_slices[0]

    def mesh_impl(self, m: object) -> DeviceMeshImpl:
        """The one there is."""
        return self._mesh

    def producer_impl(self, tensor: mtf.Tensor) -> DeviceMeshImpl:
        """The one there is."""
        return self._mesh

    def stored(self, tensor: mtf.Tensor) -> LaidOut:
        """A placeholder, where nothing was lowered to it."""
        if tensor not in self._stored:
            size = self._mesh.slice_shape(tensor.shape)
            blocks = []
            for device in self._mesh.devices:
                with on(device):
                    blocks.append(tf.placeholder(tensor.dtype, size))
            self._stored[tensor] = self._mesh.LaidOutTensor(blocks)
        return self._stored[tensor]

    def read(self, tensor: mtf.Tensor, impl: DeviceMeshImpl) -> LaidOut:
        """As it is stored: everything here has one layout."""
        return self.stored(tensor)
