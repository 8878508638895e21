"""Lowers a Mesh-TF graph to TensorFlow, every operation with a layout of its own.

A *plan* gives every operation of the graph a mesh: its shape, its layout rules, its devices. Where an operation reads a
tensor that another made under another layout, the tensor is moved; nothing is rewritten in the graph or the model.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from pase_mtf.arguments import checked_arguments
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import MismatchError, UsageError
from pase_mtf.export.exporter import export_as
from pase_mtf.export.phases import phases_of
from pase_mtf.garbage import uncollected
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.buckets import Buckets
from pase_mtf.lowering.emit import Emitter, device_specs, on, scopes
from pase_mtf.lowering.mesh import DeviceMeshImpl, PendingSum
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.plans import legal_spec, plan_from_configurations, updates_from_configurations
from pase_mtf.lowering.ranks import Agreement, Rank, RankEmitter
from pase_mtf.lowering.readers import Readers
from pase_mtf.lowering.reshard import ALL_REDUCE, RESHARDING, assemble, move, reduce_and_move
from pase_mtf.lowering.summed_rows import SumOfRows, added_rows, sum_of_rows
from pase_mtf.lowering.turns import Turn, TurnTaking
from pase_mtf.lowering.variables import LaidOutVariable
from pase_mtf.operations.facts import fed_by, read_operations
from pase_mtf.operations.flow import Flow
from pase_mtf.operations.protocols import LaidOut, SummedRows
from pase_mtf.operations.registry import rule_of

__all__ = ["PlanLowering", "lower"]

_ops = mtf.ops
_Mesh: TypeAlias = MeshSpec | placement_mesh_impl.PlacementMeshImpl

# What is assigned, by what was there and what is given.
_COMBINED: dict[Callable[..., tf.Operation], Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    _ops.assign_slice: lambda _, given: given, _ops.assign_add_slice: tf.add, _ops.assign_sub_slice: tf.subtract}


class _NotWaitedFor(Container):
    """Names of nodes that an assignment does not wait for: what no assignment needs, and what is made of something fed
    that the assignment is not made of, so that who runs it alone need not feed that."""

    def __init__(self, lowering: PlanLowering, assignment: mtf.Operation):
        self._lowering, self._given = lowering, lowering._fed.get(assignment, 0)

    def __contains__(self, node: object) -> bool:
        lowering, name = self._lowering, str(node)
        # The innermost scope tells: gradients are named after what they are of, which nobody else may need.
        around = [name[:place + 1] for place, letter in enumerate(name) if letter == "/"]
        scope = next((each for each in reversed(around) if each in lowering.scopes), "")
        operation = lowering.scopes.get(scope)
        return scope in lowering.idle_scopes or (
            operation is not None and bool(lowering._fed.get(operation, 0) & ~self._given))


class _Tensors(MutableMapping):
    """`lowering.tensors`: what is read while an operation is lowered comes in that operation's layout."""

    def __init__(self, lowering: PlanLowering):
        self._lowering = lowering

    def __getitem__(self, tensor: mtf.Tensor) -> LaidOut:
        return self._lowering.read(tensor, self._lowering.current or self._lowering.producer_impl(tensor))

    def __setitem__(self, tensor: mtf.Tensor, laid_out: LaidOut) -> None:
        self._lowering._stored[tensor] = laid_out

    def __delitem__(self, tensor: mtf.Tensor) -> None:
        del self._lowering._stored[tensor]

    def __iter__(self) -> Iterator[mtf.Tensor]:
        return iter(self._lowering._stored)

    def __len__(self) -> int:
        return len(self._lowering._stored)

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._lowering._stored


class PlanLowering(mtf.Lowering):
    """A lowering in which every operation has its own mesh implementation.

    Used like mtf.Lowering: `tensors`, `variables`, `lowered_operation`, `export_to_tf_tensor`,
    `copy_masters_to_slices`, `copy_slices_to_masters`, `counters`. The graph is left as it is.

    Example:
      lowering = PlanLowering(graph, uniform_plan(graph, "all:8", "batch:all", devices), devices)
      loss = lowering.export_to_tf_tensor(mtf_loss)
      train = [lowering.lowered_operation(op) for op in updates]

    Attributes:
      emitter: emits the nodes; knows the devices.
      current: the mesh implementation of the operation that is being lowered, None between operations.
      idle_scopes: name scopes of the nodes that no assignment needs: nothing should wait for them, TensorFlow would run
        them for that alone.
      scopes: name scopes of nodes, and what they were lowered from.
    """

    _buckets: Buckets | None = None
    _readers: Readers | None = None

    @uncollected()
    def __init__(self, graph: mtf.Graph, plan: Mapping[mtf.Operation, _Mesh], devices: Sequence[str],
                 step: tf.Tensor | None = None, shared_memory: bool | None = None, rank: Rank | None = None,
                 updates: Mapping[mtf.Variable, _Mesh] | None = None, turns: Sequence[Turn] | None = None):
        """Lowers the graph.

        Args:
          graph: any Mesh-TF graph.
          plan: for every operation of graph.operations a MeshSpec or a placement mesh implementation over some of the
            devices. Dims that an operation cannot split (see legality) or not evenly stay whole in it. Operations in a
            loop that have no plan of their own follow the loop; a generic gradient follows its forward operation, a
            read and an assignment their variable.
          devices: names of all devices, such as "/device:CPU:0".
          step: an integer scalar that differs from step to step, on which random numbers then depend (so that a run
            that is resumed goes on with the same numbers): those of uniform and normal distributions, outside of
            loops. By default, and all others, they follow a stateful generator, seeded by the graph's seed.
          shared_memory: whether the devices share one memory: then blocks and sums that several of them need are made
            once. By default: whether they all are CPUs of one process.
          rank: lower for this process's devices alone; every other process lowers the same program for its own.
          updates: for variables whose new value is to be computed in another layout than their own, that layout.
          turns: all operations in another order than the graph's, and which devices compute one after the other.

        Raises:
          UsageError: an operation without a plan, or a device that is not in the list.
        """
        # Not super().__init__: it rewrites the graph (autostack) and assumes one layout.
        self._prepare(graph, Emitter(devices, shared_memory) if rank is None else RankEmitter(devices, rank), step)
        flow = Flow(graph)
        self._owner_of = {tensor: flow.owner(tensor).operation for tensor in flow.carried()}
        facts = read_operations(graph, flow)
        self._fed.update(fed_by(facts, step))
        phases = phases_of(graph, facts)
        self._idle.update(fact.operation for fact in facts if not fact.is_needed)
        everywhere = self._impl(MeshSpec(((frozenset(), len(devices)),), tuple(range(len(devices)))))
        self.mesh_to_impl: dict[mtf.Mesh, DeviceMeshImpl] = collections.defaultdict(lambda: everywhere)
        self._assign_impls(plan)
        self._updating.update({variable: self._impl(legal_spec(self._spec(mesh), variable))
                               for variable, mesh in (updates or {}).items()})
        self._readers = Readers(facts, phases, self._impl_of.__getitem__, self._updating)
        if not self.emitter.shared:  # else nothing is sent, and sums are made once
            self._buckets = Buckets(facts, phases, self._impl_of.__getitem__, self._readers, self._fed)
        taking = TurnTaking()
        for turn in turns or [Turn(graph.operations)]:
            with taking.turn(turn), self.emitter.behind_turns(turn.after):
                for operation in turn.operations:
                    self._lower_and_count(operation)

    def _lower_and_count(self, operation: mtf.Operation) -> None:
        self.lower_operation(operation)
        kind = type(operation).__name__
        for output in operation.outputs:
            if self._buckets is not None and operation not in self._idle:
                self._buckets.add(output, self._stored[output])
            self.add_counter(f"output/{kind}", self.laid_out_size(output))
            self.add_counter(f"output_unique/{kind}", output.size)

    def _prepare(self, graph: mtf.Graph, emitter: Emitter, step: tf.Tensor | None) -> None:
        """What a lowering has before it lowered anything."""
        self.graph, self.emitter = graph, emitter
        self.current: DeviceMeshImpl | None = None
        self._inputs: Sequence[mtf.Tensor] = ()
        self.variables: dict[mtf.Variable, LaidOutVariable] = {}
        self.operations: dict[mtf.Operation, tf.Operation] = {}
        self.tensors = _Tensors(self)
        self.idle_scopes: set[str] = set()
        self.scopes: dict[str, mtf.Operation] = {}
        self._idle: set[mtf.Operation] = set()
        self._fed: dict[mtf.Operation, int] = {}
        self._counters: list[tuple[str, float]] = []
        self._step = step
        self._filled: tf.Operation | None = None
        self._stored: dict[mtf.Tensor, LaidOut] = {}
        self._impls: dict[MeshSpec, DeviceMeshImpl] = {}
        self._impl_of: dict[mtf.Operation, DeviceMeshImpl] = {}
        self._updating: dict[mtf.Variable, DeviceMeshImpl] = {}
        self._moved: dict[Hashable, tuple[object, list[tf.Tensor]]] = {}
        self._seeds: dict[Hashable, tf.Tensor] = {}

    def _impl(self, spec: MeshSpec) -> DeviceMeshImpl:
        """One implementation per spec: pending sums are compatible only within one."""
        if spec not in self._impls:
            if spec.devices and max(spec.devices) >= len(self.emitter.devices):
                raise UsageError(f"the plan uses device {max(spec.devices)}, but only {len(self.emitter.devices)} "
                                 "devices are given; give more devices or another plan")
            self._impls[spec] = DeviceMeshImpl(spec, self.emitter)
        return self._impls[spec]

    def not_waited_for(self, assignment: mtf.Operation) -> Container[str]:
        """Names of the nodes that an assignment does not wait for, though they hold what it changes."""
        return _NotWaitedFor(self, assignment)

    def _spec(self, mesh: _Mesh) -> MeshSpec:
        return mesh if isinstance(mesh, MeshSpec) else MeshSpec.of_mesh_impl(mesh, self.emitter.devices)

    def _assign_impls(self, plan: Mapping[mtf.Operation, _Mesh]) -> None:
        later: list[tuple[mtf.Operation, mtf.Operation]] = []

        def assign(operation: mtf.Operation, default: MeshSpec | None) -> None:
            leader = rule_of(operation).leader(operation)
            if leader is not operation:
                later.append((operation, leader))
                return
            spec = plan.get(operation, default)
            if spec is None:
                raise UsageError(f"the plan has no mesh for operation {operation.name!r}; plan every operation of "
                                 "the graph")
            spec = self._spec(spec)
            self._impl_of[operation] = self._impl(legal_spec(spec, operation))
            for inside in rule_of(operation).body(operation):
                assign(inside, spec)

        for operation in self.graph.operations:
            assign(operation, None)
        for operation, leader in later:
            self._impl_of[operation] = self._impl_of[leader]

    def mesh_impl(self, m: mtf.Mesh | mtf.Operation | mtf.Tensor) -> DeviceMeshImpl:
        """The mesh implementation of an operation, or of a tensor as `tensors` has it.

        What is read while an operation is lowered comes in that operation's layout: the implementation of its inputs is
        its own, for an operation's code may ask for either. For a Mesh: that of the operation being lowered, otherwise
        one that splits nothing.
        """
        if isinstance(m, mtf.Tensor):
            own = self.current if any(m is tensor for tensor in self._inputs) else None
            return own or self.producer_impl(m)
        if isinstance(m, mtf.Operation):
            return self._impl_of[m]
        return self.current or self.mesh_to_impl[m]

    def producer_impl(self, tensor: mtf.Tensor) -> DeviceMeshImpl:
        """The mesh implementation of the operation that makes a tensor (in the iteration before)."""
        return self._impl_of[self._owner_of.get(tensor, tensor.operation)]

    def lower_operation(self, operation: mtf.Operation) -> None:
        """Lowers one operation (and, for a loop, those in it)."""
        lower_by_rule, before, idle = rule_of(operation).lower, (self.current, self._inputs), self.emitter.idle
        self.current, self._inputs = self._impl_of[operation], operation.inputs
        self.emitter.idle = idle or operation in self._idle
        try:
            with tf.name_scope(operation.name) as scope:
                self.scopes[scope] = operation
                if operation in self._idle:
                    self.idle_scopes.add(scope)
                elif self._buckets is not None:
                    self._buckets.before(operation)
                if lower_by_rule is None:
                    operation.lower(self)
                else:
                    lower_by_rule(operation, self)
        finally:
            (self.current, self._inputs), self.emitter.idle = before, idle

    def stored(self, tensor: mtf.Tensor) -> LaidOut:
        """A tensor as it was made, in the layout of the operation that made it: a sum that several need is made now."""
        stored = self._stored[tensor]
        if (isinstance(stored, _ops.LazyAllreduceSum) and stored._reduced is None and self._readers is not None
                and self._readers.need_whole(tensor, self.producer_impl(tensor).partition(tensor.shape))):
            stored.to_laid_out_tensor()
        return stored

    def read(self, tensor: mtf.Tensor, impl: DeviceMeshImpl) -> LaidOut:
        """A tensor in the layout of a mesh implementation; a sum that nobody needed yet stays lazy if it can.

        Args:
          tensor: one that was lowered before.
          impl: an implementation of this lowering.

        Returns:
          A LaidOutTensor, or a LazyAllreduceSum of `impl`.
        """
        stored, source = self.stored(tensor), self.producer_impl(tensor)
        if source is impl:
            return stored
        target = impl.partition(tensor.shape)
        if isinstance(stored, _ops.LazyAllreduceSum) and stored._reduced is None and (
                source.partition(tensor.shape) == target):
            axes = impl.axes_with(source.strides(stored.mesh_axes))
            if axes is not None:
                return PendingSum(impl, stored, axes)
        return impl.LaidOutTensor(self.read_partition(tensor, target))

    def read_partition(self, tensor: mtf.Tensor, target: Partition) -> list[tf.Tensor]:
        """A tensor moved to a partition, once per scope of control flow.

        Args:
          tensor: one that was lowered before.
          target: a partition over the devices of this lowering.

        Returns:
          The block at every position of the partition.
        """
        stored, source = self.stored(tensor), self.producer_impl(tensor).partition(tensor.shape)
        if source == target:
            return stored.to_laid_out_tensor().tensor_list
        here = list(scopes())
        for scope in here:
            found = self._moved.get((scope, id(stored), target))
            if found is not None:
                return found[1]
        shape, result = tensor.shape.to_integer_list, None
        if isinstance(stored, _ops.LazyAllreduceSum) and stored._reduced is None and not (
                isinstance(stored, SumOfRows) and stored.travels_as_rows(target)):
            with tf.name_scope(ALL_REDUCE):
                result = reduce_and_move(stored.laid_out_input.tensor_list, source,
                                         stored.mesh_impl.strides(stored.mesh_axes), target, shape, self.emitter)
            if result is not None and stored.add_counter_fn:
                stored.add_counter_fn()
        if result is None:
            blocks = stored.to_laid_out_tensor().tensor_list
            with tf.name_scope(RESHARDING):
                result = move(blocks, source, target, shape, self.emitter)
        # The entry holds on to `stored`: its id stays its own.
        self._moved[here[0], id(stored), target] = stored, result
        return result

    def sum_of_rows(self, found: SummedRows, mesh_axes: Sequence[int], make_parts: Callable[[], LaidOut],
                    count: Callable[[], None]) -> SumOfRows | None:
        """A pending sum of the operation that is being lowered, for which devices give each other rows.

        Args:
          found: what it sums.
          mesh_axes: over which it is to be summed.
          make_parts: makes the parts of the sum.
          count: is called where these are added up.

        Returns:
          None where parts of the sum are less than rows.
        """
        impl = self.mesh_impl(found.output)
        return sum_of_rows(impl, found, mesh_axes, lambda tensor: self.read(tensor, impl), make_parts, (
            count, lambda elements: self.add_counter(f"allgather/{mesh_axes}/einsum_op", elements)))

    def added_rows(self, one: LaidOut, other: LaidOut) -> SumOfRows | None:
        """The sum of two pending sums of rows as one of all their rows; None where they are others, or parts of it are
        less."""
        return added_rows(one, other)

    def added_parts(self, addition: mtf.Operation, xs: Sequence[LaidOut]) -> mtf.ops.LazyAllreduceSum | None:
        """The sum of two tensors as a pending sum, where one is pending in the layout of the addition, and nobody needs
        that before: the other one, which comes from another layer or is pending over other axes, is added to one of its
        parts. So a sum over all is made once, where it is needed. None elsewhere.

        Args:
          addition: that is being lowered.
          xs: what it adds, in its layout.
        """
        if self._buckets is None or not self._buckets.leave_parts(addition):
            return None
        impl, lazy = self.mesh_impl(addition), _ops.LazyAllreduceSum
        pending = [type(x) is lazy and x.mesh_impl is impl and x._reduced is None for x in xs]
        if not any(pending) or len({frozenset(x.mesh_axes) if isinstance(x, lazy) else None for x in xs}) == 1:
            return None  # both are, over the same axes
        one = pending.index(True)
        return impl.added_to_parts(xs[one], xs[1 - one])

    def new_value(self, variable: mtf.Variable, value: mtf.Tensor, assign_fn: Callable[..., tf.Operation],
                  ) -> tuple[Callable[..., tf.Operation], Sequence[tf.Tensor]]:
        """How the slices of a variable are assigned, and to what.

        Where the new value is computed in a layout of its own, a sum with the old one is made there, and the new value
        comes back as a whole.

        Args:
          variable: one that was lowered before.
          value: what is assigned, or added, as `assign_fn` does it.
          assign_fn: a function from (mtf.Variable, slice variable, tf.Tensor) to a tf.Operation.
        """
        own, shape = self.mesh_impl(variable), variable.shape.to_integer_list
        there, combine = self._updating.get(variable, own), _COMBINED.get(assign_fn)
        source, target = there.partition(variable.shape), own.partition(variable.shape)
        # The value may name its dims otherwise than the variable: its places count.
        if source == target or combine is None:
            return assign_fn, self.read_partition(value, target)
        given = self.read_partition(value, source)
        if assign_fn is _ops.assign_slice:
            old = given  # nobody reads what is replaced
        elif variable.activation_dtype == variable.slice_dtype:
            old = self.read_partition(variable.outputs[0], source)  # its decay, say, may have read it there
        else:
            with tf.name_scope(RESHARDING):
                old = self.move(self.variables[variable].read(), target, source, shape)
        new = self.emitter.per_device(
            there.devices, lambda _, old, given: combine(old, tf.cast(given, variable.slice_dtype)),
            [old, given])
        with tf.name_scope(RESHARDING):
            return _ops.assign_slice, self.move(new, source, target, shape)

    def move(self, tensors: Sequence[tf.Tensor], source: Partition, target: Partition, shape: Sequence[int],
             ) -> list[tf.Tensor]:
        """Blocks of a tensor of this unsplit shape moved from one partition to another."""
        return move(tensors, source, target, shape, self.emitter)

    def assemble(self, cells: Sequence[tf.Tensor], counts: Sequence[int], device: str) -> tf.Tensor:
        """A row-major grid of cells, so many along every dim, put together on a device."""
        return assemble(cells, counts, device, self.emitter)

    def random_seed(self) -> tf.Tensor:
        """Two int32 numbers that differ from step to step (and from iteration to iteration of a loop)."""
        scope = next(scopes())
        if scope not in self._seeds:
            graph_seed = (tf.get_default_graph().seed or 0) & 0x7fffffff
            top = scope[1] is None and not hasattr(scope[0], "outer_graph")
            with tf.control_dependencies(None) if top else tf.name_scope("seed"), on(self.emitter.first_own):
                if self._step is not None and top:  # every process has the step
                    self._seeds[scope] = tf.stack([graph_seed, tf.cast(self._step, tf.int32)])
                else:
                    self._seeds[scope] = self.emitter.run_on(self.emitter.devices[0], lambda: tf.random.uniform(
                        [2], 0, 0x7fffffff, tf.int32, seed=graph_seed + 1))
        return self._seeds[scope]

    def export_to_tf_tensor(self, x: mtf.Tensor) -> tf.Tensor:
        """A tensor as one tf.Tensor."""
        return self.producer_impl(x).export_to_tf_tensor(x, self._stored[x].to_laid_out_tensor())

    def regions(self, tensor: mtf.Tensor) -> set[tuple[tuple[int, int], ...]]:
        """The regions of a tensor that devices of this process hold where it is made: (begin, size) per dim."""
        impl = self.producer_impl(tensor)
        partition = impl.partition(tensor.shape)
        block = partition.block_shape(tensor.shape.to_integer_list)
        return {tuple((part * size, size) for part, size in zip(partition.block(position), block, strict=True))
                for position, device in enumerate(impl.devices) if self.emitter.owns(device)}

    def copy_masters_to_slices(self) -> tf.Operation:
        """Fills the slice variables from the master variables: run it after initialising or restoring these."""
        if self._filled is None:
            self._filled = tf.group([fill for variable in self.variables.values() for fill in variable.fills()])
        return self._filled

    def agreement(self) -> Agreement | None:
        """The nodes by which ranks compare what they lowered; None in one process. To be called last, on all ranks."""
        return self.emitter.agreement() if isinstance(self.emitter, RankEmitter) else None

    def autostack(self) -> None:
        """Does nothing: the graph is not rewritten."""


@runtime_checkable
class _Strategy(Protocol):
    """What the lowering asks of a `strategy.Strategy`, which stands beside it."""

    @property
    def graph_hash(self) -> str:
        """Of the computation graph that it was found for."""

    @property
    def configurations(self) -> Sequence[Configuration]:
        """One per layer."""


@runtime_checkable
class _Variable(Protocol):
    """A variable of TensorFlow's: those of different kinds have no class in common with tensors, or with each other."""

    def read_value(self) -> tf.Tensor:
        """What it holds."""


@checked_arguments
def lower(graph: mtf.Graph, strategy: _Strategy, devices: Sequence[str], step: tf.Tensor | _Variable | None = None,
          rank: Rank | None = None) -> PlanLowering:
    """Lowers a graph under a strategy, in place of `mtf.Lowering(graph, {mesh: mesh_impl})`.

    Args:
      graph: the graph the strategy was found for (built by the same program), with updates as layers or without.
      strategy: its `configurations`, one per layer, and the `graph_hash` of its graph.
      devices: names of the devices, at least as many as the strategy uses.
      step, rank: see PlanLowering; of a variable, such as the global step, the value.

    Raises:
      MismatchError: the strategy was made for another graph, or has not one configuration per layer.
      InfeasibleError: a configuration that a layer does not support, or that uses more devices than there are.
      UsageError: one of `devices` is no name of a device, or there is an operation that cannot be lowered: a function
        of slices that draws random numbers and is computed once more (`mtf.recompute_grad`), imported slices that do
        not say which part of their tensor each is.
    """
    device_specs(devices)  # before all the rest, which takes long
    exported = export_as(graph, strategy.graph_hash)
    if exported.hash != strategy.graph_hash:
        raise MismatchError(f"the strategy was found for graph {strategy.graph_hash}, this one is {exported.hash}; "
                            "search again for this model, its sizes and its optimizer")
    plan = plan_from_configurations(graph, exported, strategy.configurations, len(devices))
    updates = updates_from_configurations(graph, exported, strategy.configurations)
    value = step.read_value() if isinstance(step, _Variable) else step
    return PlanLowering(graph, plan, devices, value, rank=rank, updates=updates)
