"""The slices of variables: read once a step, updated in place, filled from and collected into their masters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from pase_mtf.compat import mtf, resource_variable_ops, tf
from pase_mtf.graph.partition import Partition, whole
from pase_mtf.lowering.emit import Emitter, Scope, on, scopes
from pase_mtf.lowering.fast_nodes import make_node
from pase_mtf.lowering.reshard import move
from pase_mtf.operations.protocols import LaidOut
from pase_mtf.operations.registry import rule_of

__all__ = ["LaidOutVariable"]

_VIEWS = frozenset(("ExpandDims", "Identity", "Reshape", "Squeeze"))  # nodes whose output is their input's memory
_COPIED_MEANWHILE = 2**16  # bytes copied in about the time (some microseconds) that one more thing to wait for costs


class _Mesh(Protocol):
    """What a variable asks of the mesh implementation that lays it out (`mesh.DeviceMeshImpl`)."""

    devices: Sequence[str]
    size: int
    LaidOutTensor: type
    emitter: Emitter

    def partition(self, shape: mtf.Shape) -> Partition:
        """Which block of a tensor of this shape each processor holds."""

    def slice_shape(self, tensor_shape: mtf.Shape) -> list[int]:
        """The shape of every slice of a tensor."""

    def make_slices(self, tf_tensor: tf.Tensor, tensor_shape: mtf.Shape) -> list[tf.Tensor]:
        """A slice of a tf.Tensor per processor."""

    def combine_slices(self, slices: Sequence[tf.Tensor], tensor_shape: mtf.Shape, device: str | None = None,
                       ) -> tf.Tensor:
        """One tf.Tensor of the slices."""

    def per_device(self, fn: Callable, *columns: Sequence[object]) -> LaidOut:
        """Calls fn(device, ...) once per processor, with its row of the columns."""


class LaidOutVariable:
    """The slices of a variable.

    Every slice is read once per step, and updates follow that read: all uses of a step see the same value. The
    operations that copy from and to the master are made when they are first asked for.
    """

    def __init__(self, variable: mtf.Variable, mesh_impl: _Mesh):
        self._variable = variable
        self._mesh_impl = mesh_impl
        self._reads: dict[Scope, list[tf.Tensor]] = {}
        self._besides: dict[Scope, list[list[tf.Tensor]]] = {}
        self._held: dict[Scope, list[tf.Tensor]] = {}
        self._updated: set[Scope] = set()
        self._copy_master_to_slices = self._copy_slices_to_master = None
        self._graph = tf.get_default_graph()
        if self.slice_is_master:
            slices = [variable.get_master()]
        else:
            shape = mesh_impl.slice_shape(variable.shape)
            slices = [
                mesh_impl.emitter.held_on(device, functools.partial(
                    _slice_variable, f"{variable.name}_slice_{position}", shape, variable.slice_dtype, device),
                    shape, variable.slice_dtype)
                for position, device in enumerate(mesh_impl.devices)]
        self._laid_out_tensor = mesh_impl.LaidOutTensor(slices)

    @property
    def slice_is_master(self) -> bool:
        """Whether the master itself serves as the only slice."""
        variable, mesh_impl = self._variable, self._mesh_impl
        if (mesh_impl.size != 1 or mesh_impl.emitter.first_devices is not None
                or variable.master_dtype != variable.slice_dtype
                or rule_of(variable).is_stacked):
            return False
        if not hasattr(variable.get_master(), "handle"):
            return False  # an update changes its memory in place, under those who have read it
        device = mesh_impl.devices[0]
        return not device or tf.DeviceSpec.from_string(device) == tf.DeviceSpec.from_string(variable.master_device)

    def read(self) -> list[tf.Tensor]:
        """The value of every slice in the current scope, read once."""
        scope = next(scopes())
        if scope not in self._reads:
            slices = self.laid_out_tensor.all_slices
            own = [getattr(variable, "_graph_element", None) for variable in slices]
            # Every slice variable comes with a read of its own, made outside of any loop.
            usable = scope == (self._graph, None) and not self.slice_is_master and all(x is not None for x in own)
            self._reads[scope] = self._known(own) if usable else self.read_again()
        return self._reads[scope]

    def read_anew(self) -> list[tf.Tensor]:
        """The value of every slice at the beginning of the current scope, also where TensorFlow's older control flow
        has condition and body of a loop in one: what the condition has read is there once more than iterations."""
        values = self._reads[next(scopes())] = self.read_again()
        return values

    def has_read(self) -> list[tf.Tensor] | None:
        """The value read before in the current scope, if it was."""
        return self._reads.get(next(scopes()))

    def read_again(self) -> list[tf.Tensor]:
        """The value of every slice, read now."""
        values = []
        for device, variable in zip(self._mesh_impl.devices, self.laid_out_tensor.all_slices, strict=True):
            with on(device):
                values.append(self._mesh_impl.emitter.held_on(
                    device, functools.partial(_value, variable), variable.shape, variable.dtype))
        return self._known(values)

    def read_besides(self) -> list[tf.Tensor]:
        """The value of every slice, read once more; updates that are made later in this scope follow it."""
        values = self.read_again()
        self._besides.setdefault(next(scopes()), []).append(values)
        return values

    def hold(self, values: list[tf.Tensor]) -> None:
        """Who reads it once more in the current scope reads these: in a loop that does not assign it, what was read as
        the loop began, for an update outside of it waits for nothing in it."""
        self._held[next(scopes())] = values

    def is_updated(self) -> bool:
        """Whether an update was made before in the current scope, or in a loop within it."""
        return next(scopes()) in self._updated

    def held(self) -> list[tf.Tensor] | None:
        """What `hold` was given in the current scope, if it was."""
        return self._held.get(next(scopes()))

    def read_so_far(self) -> list[tf.Tensor]:
        """What `read_besides` has read in the current scope, on all devices."""
        return [value for values in self._besides.get(next(scopes()), ()) for value in values]

    def _known(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [self._mesh_impl.emitter.known(device, value)
                for device, value in zip(self._mesh_impl.devices, values, strict=True)]

    def activation(self, values: Sequence[tf.Tensor]) -> LaidOut:
        """What was read, in the type that the model computes with."""
        dtype = self._variable.activation_dtype
        if all(value.dtype == dtype for value in values):
            return self._mesh_impl.LaidOutTensor(list(values))
        return self._mesh_impl.per_device(lambda _, value: tf.cast(value, dtype), values)

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns to the slices, after they were read where they were.

        Args:
          assign_fn: a function from (mtf.Variable, slice variable, tf.Tensor) to a tf.Operation.
          values: a tensor per slice.
        """
        return self._mesh_impl.emitter.group(self.updates(assign_fn, values))

    def updates(self, assign_fn: Callable, values: Sequence[tf.Tensor], idle: Container[str] = (),
                ) -> list[tf.Operation]:
        """The assignments of `assign_to_slices`, for the caller to group with others.

        TensorFlow assigns in place, but where somebody still holds the value it copies the variable first: a large
        one waits for all that uses what was read.

        Args:
          assign_fn, values: of `assign_to_slices`.
          idle: names of nodes not to wait for.
        """
        self._updated.update(scopes())
        read = self.has_read() or [None] * len(values)
        result, emitter = [], self._mesh_impl.emitter
        values = [emitter.exchange.bring(device, value)
                  for device, value in zip(self._mesh_impl.devices, values, strict=True)]
        besides = self._besides.get(next(scopes()), [])
        # Of all devices: nothing is made of these that would tell what they need.
        earlier = emitter.use([*values, *self.read_so_far()])
        for position, (device, variable, value, old) in enumerate(zip(
                self._mesh_impl.devices, self.laid_out_tensor.all_slices, values, read, strict=True)):
            if not emitter.owns(device):
                continue
            waits = [] if old is None else [old, *_holders(old, idle)]
            with on(device), tf.control_dependencies([*waits, *earlier, *(row[position] for row in besides)]):
                result.append(_assign(self._variable, variable, value, assign_fn))
        return result

    @property
    def laid_out_tensor(self) -> LaidOut:
        """The slice variables."""
        return self._laid_out_tensor

    @property
    def copy_master_to_slices(self) -> tf.Operation:
        """Fills the slices from the master."""
        if self._copy_master_to_slices is None:
            self._copy_master_to_slices = tf.group(self.fills())
        return self._copy_master_to_slices

    def fills(self) -> list[tf.Operation]:
        """The assignments of `copy_master_to_slices`, for the caller to group with others."""
        with self._graph.as_default(), tf.control_dependencies(None):
            return self._fills()

    def _fills(self) -> list[tf.Operation]:
        if self.slice_is_master:
            return []
        variable, mesh_impl = self._variable, self._mesh_impl
        with on(variable.master_device):
            master = tf.convert_to_tensor(variable.get_master())
        result = []
        slices = mesh_impl.make_slices(master, variable.shape)
        for device, target, value in zip(
                mesh_impl.devices, self.laid_out_tensor.all_slices, slices, strict=True):
            if not mesh_impl.emitter.owns(device):
                continue
            with on(device):
                result.append(_assign(variable, target, value, mtf.ops.assign_slice))
        return result

    @property
    def copy_slices_to_master(self) -> tf.Operation:
        """Puts the slices together in the master."""
        if self._copy_slices_to_master is None:
            with self._graph.as_default(), tf.control_dependencies(None), self._mesh_impl.emitter.apart():
                self._copy_slices_to_master = self._collect()
        return self._copy_slices_to_master

    def shards(self) -> list[tuple[list[int], tf.Tensor]]:
        """(where it begins in the variable, value) of the blocks that this process keeps, in the type of the master: of
        every block one process does, and those that several hold take turns.
        """
        variable, partition = self._variable, self._mesh_impl.partition(self._variable.shape)
        block = partition.block_shape(variable.shape.to_integer_list)
        found = []
        with self._graph.as_default(), tf.control_dependencies(None):
            for parts, holders in partition.holders.items():
                position = self._mesh_impl.emitter.turn(holders)
                device = self._mesh_impl.devices[position]
                if self._mesh_impl.emitter.owns(device):
                    with on(device):
                        value = tf.cast(_value(self.laid_out_tensor.all_slices[position]), variable.master_dtype)
                    found.append(([part * size for part, size in zip(parts, block, strict=True)], value))
        return found

    def _collect(self) -> tf.Operation:
        if self.slice_is_master:
            return tf.no_op()
        variable, mesh_impl = self._variable, self._mesh_impl
        if mesh_impl.emitter.first_devices is not None:
            return self._collect_on_first(mesh_impl.emitter)
        total = mesh_impl.combine_slices(self.read_again(), variable.shape, device=variable.master_device or None)
        with on(variable.master_device):
            return variable.assign_to_master(tf.cast(total, variable.master_dtype))

    def _collect_on_first(self, emitter: Emitter) -> tf.Operation:
        """In the master of the first process: those of the others keep what they had."""
        variable, shape = self._variable, self._variable.shape
        total, = move(self.read_again(), self._mesh_impl.partition(shape), whole(0, len(shape)),
                      shape.to_integer_list, emitter)
        if not emitter.owns(emitter.devices[0]):
            return emitter.group_for(total, [])
        with on(variable.master_device):
            return emitter.group_for(total, [variable.assign_to_master(tf.cast(total, variable.master_dtype))])


def _holders(value: tf.Tensor, idle: Container[str]) -> list[tf.Operation]:
    """The nodes so far that hold the memory of a value, if copying it takes longer than to wait for so many.

    Those that merely see it in another shape are looked through; those of an idle name are none.
    """
    context = value.op._get_control_flow_context()
    found: dict[tf.Operation, None] = {}
    tensors = [value]
    while tensors:
        for node in tensors.pop().consumers():
            if node.type in _VIEWS:
                tensors.extend(node.outputs)
            # What enters a loop is waited for outside of it by its value alone.
            elif (node.type not in ("Enter", "RefEnter") and node._get_control_flow_context() is context
                  and node.name not in idle):
                found[node] = None
    nbytes = (value.shape.num_elements() or 0) * value.dtype.size
    return list(found) if nbytes >= _COPIED_MEANWHILE * len(found) else []


def _slice_variable(name: str, shape: Sequence[int], dtype: tf.DType, device: str) -> tf.Variable:
    """A variable without an initializer: slices are only ever filled from the master."""
    with on(device):
        variable = resource_variable_ops.UninitializedVariable(trainable=False, dtype=dtype, shape=shape, name=name)
    # It enters itself among the variables that are initialised and saved; slices are neither.
    collection = tf.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
    if collection and collection[-1] is variable:
        collection.pop()
    return variable


def _value(variable: tf.Variable) -> tf.Tensor:
    """A read of a variable of its own (a fresh node)."""
    if hasattr(variable, "handle"):
        read = make_node("ReadVariableOp", resource=variable.handle, dtype=variable.dtype.base_dtype)
        read.set_shape(variable.shape)
        return read
    return tf.identity(variable)


def _assign(variable: mtf.Variable, target: tf.Variable, value: tf.Tensor, assign_fn: Callable) -> tf.Operation:
    """One node where Mesh-TF's own assignments make three."""
    ops = mtf.ops
    lean = {
        ops.assign_slice: "AssignVariableOp",
        ops.assign_add_slice: "AssignAddVariableOp",
        ops.assign_sub_slice: "AssignSubVariableOp",
    }.get(assign_fn)
    if lean is None or not hasattr(target, "handle"):
        return assign_fn(variable, target, value)
    return make_node(lean, resource=target.handle, value=tf.cast(value, variable.slice_dtype))
