"""A placement mesh implementation over any of the devices, with lean collectives and well-ordered variables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pase_mtf.compat import mtf, placement_mesh_impl, resource_variable_ops, tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition, groups, of_mesh, whole
from pase_mtf.lowering.emit import Emitter, scopes
from pase_mtf.lowering.reshard import all_reduce, move

__all__ = ["DeviceMeshImpl", "LazySum", "MeshSpec"]

_VIEWS = frozenset(("ExpandDims", "Identity", "Reshape", "Squeeze"))  # nodes whose output is their input's memory
_COPIED_MEANWHILE = 2**16  # bytes copied in about the time (some microseconds) that one more thing to wait for costs


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """What a mesh implementation is made from; equal specs share one implementation object.

    Attributes:
      axes: (names of the dims laid out on the axis, parts) per mesh axis, outermost first.
      devices: the device number of every processor, row-major over the axes.
    """

    axes: tuple[tuple[frozenset[str], int], ...]
    devices: tuple[int, ...]

    @classmethod
    def of_configuration(cls, configuration: Configuration, aliases: Mapping[str, str] | None = None) -> MeshSpec:
        """The mesh of a layer: an axis per axis of its configuration, on the first devices.

        Args:
          configuration: of the layer.
          aliases: other dim name -> dim of the layer that it is laid out like (`Layer.aliases`).
        """
        axes = []
        for name, parts in configuration.axes:
            others = [other for other, dim in (aliases or {}).items() if dim == name]
            axes.append((frozenset([name, *others] if name else []), parts))
        return cls(tuple(axes), tuple(range(configuration.devices)))

    @classmethod
    def of_layout(cls, mesh_shape: Any, layout: Any, devices: Sequence[int]) -> MeshSpec:
        """What Mesh-TF users write: mesh shape ("rows:2;cols:4") and layout rules ("batch:rows;d_ff:cols").

        Args:
          mesh_shape: anything that converts to a mtf.Shape.
          layout: anything that converts to mtf.LayoutRules.
          devices: the device number of every processor.

        Raises:
          UsageError: the mesh has another number of processors.
        """
        shape, rules = mtf.convert_to_shape(mesh_shape), mtf.convert_to_layout_rules(layout)
        if shape.size != len(devices):
            raise UsageError(f"a mesh of {shape.size} processors on {len(devices)} devices; give as many devices")
        axes = tuple(
            (frozenset(rules.mesh_dimension_name_to_tensor_dimension_names(dim.name)), dim.size) for dim in shape.dims)
        return cls(axes, tuple(devices))

    @classmethod
    def of_mesh_impl(cls, mesh_impl: Any, devices: Sequence[str]) -> MeshSpec:
        """The spec of a placement mesh implementation of anybody's, its devices found by name.

        Raises:
          UsageError: a device of the mesh is not in the list.
        """
        if isinstance(mesh_impl, DeviceMeshImpl):
            return mesh_impl.spec
        numbers = {name: number for number, name in reversed(list(enumerate(devices)))}
        for name in mesh_impl.devices:
            if name not in numbers:
                raise UsageError(f"mesh device {name!r} is not among the devices of the lowering; add it to `devices`")
        used = tuple(numbers[name] for name in mesh_impl.devices)
        if len(set(used)) != len(used):
            used = tuple(range(len(used)))
        return cls.of_layout(mesh_impl.shape, mesh_impl.layout_rules, used)


class LazySum(mtf.ops.LazyAllreduceSum):
    """A sum that is still spread over the devices, seen from another mesh implementation.

    Both see the same parts and the same result: whichever is asked first sums, once.
    """

    def __init__(self, mesh_impl: DeviceMeshImpl, lazy: mtf.ops.LazyAllreduceSum, mesh_axes: Sequence[int]):
        self._lazy = lazy
        super().__init__(mesh_impl, lazy.laid_out_input, list(mesh_axes), lazy.add_counter_fn)

    @property
    def _reduced(self) -> Any:
        return self._lazy._reduced

    @_reduced.setter
    def _reduced(self, value: Any) -> None:
        """The sum is kept where it came from."""

    def to_laid_out_tensor(self) -> Any:
        """The sum itself."""
        return self._lazy.to_laid_out_tensor()


class DeviceMeshImpl(placement_mesh_impl.PlacementMeshImpl):
    """A mesh over some of the devices of an emitter.

    Attributes:
      spec: what it was made from.
      emitter: emits its nodes.
    """

    def __init__(self, spec: MeshSpec, emitter: Emitter):
        shape = mtf.Shape([mtf.Dimension(f"axis{i}", parts) for i, (_, parts) in enumerate(spec.axes)])
        rules = [(name, f"axis{i}") for i, (names, _) in enumerate(spec.axes) for name in names]
        super().__init__(shape, rules, [emitter.devices[number] for number in spec.devices])
        self.spec = spec
        self.emitter = emitter
        self._axis_of = {name: i for i, (names, _) in reversed(list(enumerate(spec.axes))) for name in names}
        self._layouts: dict[tuple, mtf.TensorLayout] = {}
        self._slice_shapes: dict[tuple, tuple[int, ...]] = {}
        self._partitions: dict[tuple, Partition] = {}

    # What is asked for every tensor of every operation is looked up, not worked out again.

    def tensor_dimension_to_mesh_axis(self, tensor_dimension: mtf.Dimension) -> int | None:
        """The mesh axis that a dim is laid out on, or None."""
        return self._axis_of.get(tensor_dimension.name)

    def tensor_layout(self, arg: Any) -> mtf.TensorLayout:
        """The mesh axis of every dim of a Tensor or Shape."""
        shape = arg.shape if isinstance(arg, mtf.Tensor) else arg
        key = tuple(shape.dims)
        if key not in self._layouts:
            self._layouts[key] = super().tensor_layout(shape)
        return self._layouts[key]

    def slice_shape(self, tensor_shape: mtf.Shape) -> list[int]:
        """The shape of every slice of a tensor."""
        key = tuple(tensor_shape.dims)
        if key not in self._slice_shapes:
            self._slice_shapes[key] = tuple(super().slice_shape(tensor_shape))
        return list(self._slice_shapes[key])

    def partition(self, shape: mtf.Shape) -> Partition:
        """Which block of a tensor of this shape each processor holds."""
        key = tuple(shape.dims)
        if key not in self._partitions:
            self._partitions[key] = of_mesh(self, shape, self.spec.devices)
        return self._partitions[key]

    def strides(self, mesh_axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(size, stride over the processors) of mesh axes."""
        sizes = self.shape.to_integer_list
        return tuple((sizes[axis], math.prod(sizes[axis + 1:])) for axis in mesh_axes)

    def axes_with(self, strides: Sequence[tuple[int, int]]) -> list[int] | None:
        """The mesh axes with these (size, stride), ascending; None where the mesh has no such axis."""
        own = {stride: axis for axis, stride in enumerate(self.strides(range(self.ndims)))}
        if any(stride not in own for stride in strides):
            return None
        return sorted(own[stride] for stride in strides)

    def slicewise(self, fn: Callable, *inputs: Any) -> Any:
        """Calls fn once per processor, on its device."""
        columns = []
        for x in inputs:
            if hasattr(x, "to_laid_out_tensor"):
                x = x.to_laid_out_tensor()
            columns.append(x.tensor_list if isinstance(x, self.LaidOutTensor) else [x] * self.size)
        return self.per_device(lambda _, *row: fn(*row), *columns)

    def per_device(self, fn: Callable, *columns: Sequence[Any]) -> Any:
        """Calls fn(device, ...) once per processor, on its device, with its row of the columns."""
        results = []
        for position, device in enumerate(self.devices):
            with tf.device(device):
                results.append(fn(device, *(column[position] for column in columns)))
        if isinstance(results[0], tuple):
            return tuple(self.LaidOutTensor(list(column)) for column in zip(*results, strict=True))
        return self.LaidOutTensor(results)

    def slicewise_delay_allreduce(self, fn: Callable, *inputs: Any) -> Any:
        """Slicewise; where all inputs are sums still spread over the same axes, so is the output."""
        lazy = mtf.ops.LazyAllreduceSum
        if inputs and all(isinstance(x, lazy) and x.mesh_impl is self for x in inputs) and len(
                {frozenset(x.mesh_axes) for x in inputs}) == 1 and all(x._reduced is None for x in inputs):
            return lazy(self, self.slicewise(fn, *(x.laid_out_input for x in inputs)), inputs[0].mesh_axes,
                        add_counter_fn=inputs[0].add_counter_fn)
        return self.slicewise(fn, *inputs)

    def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> Any:
        """Combines over mesh axes: "SUM", "MAX" or "MIN"."""
        if not mesh_axes:
            return x
        members = groups(self.size, self.strides(mesh_axes))
        return self.LaidOutTensor(all_reduce(
            x.to_laid_out_tensor().tensor_list, members, self.devices, self.emitter, reduction_fn_string))

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> Any:
        """Concatenates the slices along a mesh axis, for every processor."""
        tensors = x.to_laid_out_tensor().tensor_list
        result = list(tensors)
        for group in groups(self.size, self.strides([mesh_axis])):
            makers = group[:1] if self.emitter.shared else group
            made = [self.emitter.concat(self.devices[maker], [tensors[k] for k in group], concat_axis)
                    for maker in makers]
            for k, position in enumerate(group):
                result[position] = made[min(k, len(made) - 1)]
        return self.LaidOutTensor(result)

    def allsplit(self, x: Any, mesh_axis: int, split_axis: int, which: Any = None) -> Any:
        """Keeps one part of every slice: the one whose number is the coordinate along the mesh axis."""
        if which is not None:
            return super().allsplit(x, mesh_axis, split_axis, which)
        (size, stride), = self.strides([mesh_axis])
        tensors = x.to_laid_out_tensor().tensor_list

        def part(position: int, tensor: tf.Tensor) -> tf.Tensor:
            extents = tensor.shape.as_list()
            extents[split_axis] //= size
            begin = [0] * len(extents)
            begin[split_axis] = extents[split_axis] * (position // stride % size)
            return self.emitter.slice(self.devices[position], tensor, begin, extents)

        return self.LaidOutTensor([part(position, tensor) for position, tensor in enumerate(tensors)])

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> Any:
        """Splits along one tensor axis and concatenates along another, within groups along a mesh axis."""
        tensors = x.to_laid_out_tensor().tensor_list
        result = list(tensors)
        for group in groups(self.size, self.strides([mesh_axis])):
            pieces = [self.emitter.split(self.devices[k], tensors[k], len(group), split_axis) for k in group]
            for k, position in enumerate(group):
                result[position] = self.emitter.concat(
                    self.devices[position], [piece[k] for piece in pieces], concat_axis)
        return self.LaidOutTensor(result)

    def laid_out_pcoord(self, mesh_axis: int) -> Any:
        """The coordinate of every processor along a mesh axis, as int32 scalars."""
        (size, stride), = self.strides([mesh_axis])
        return self.LaidOutTensor([
            self.emitter.constant(device, position // stride % size) for position, device in enumerate(self.devices)])

    def import_tf_tensor(self, x: Any, tf_x: tf.Tensor) -> Any:
        """Slices of a tf.Tensor, cut where it lies."""
        return self.LaidOutTensor(self.make_slices(tf_x, x.shape))

    def make_slices(self, tf_tensor: tf.Tensor, tensor_shape: mtf.Shape) -> list[tf.Tensor]:
        """A slice of a tf.Tensor per processor."""
        sizes = tensor_shape.to_integer_list
        if not tf_tensor.shape.is_fully_defined():
            tf_tensor = tf.ensure_shape(tf_tensor, sizes)
        emitter, source = self.emitter.with_device(tf_tensor.device)
        return move([tf_tensor], whole(source, len(sizes)), self.partition(tensor_shape), sizes, emitter)

    def combine_slices(self, slices: Sequence[tf.Tensor], tensor_shape: mtf.Shape, device: str | None = None,
                       ) -> tf.Tensor:
        """One tf.Tensor of the slices, on the device named or that of the first processor."""
        source = self.partition(tensor_shape)
        emitter, target = self.emitter.with_device(device) if device else (self.emitter, source.devices[0])
        return move(slices, source, whole(target, len(tensor_shape)), tensor_shape.to_integer_list, emitter)[0]

    def broadcast_impl(self, old_slices: Any, old_shape: mtf.Shape, new_shape: mtf.Shape) -> Any:
        """Repeats a tensor along the dims it lacks."""
        sizes = self.slice_shape(new_shape)
        return self.per_device(
            lambda device, x: self.emitter.broadcast(device, self.expand(device, x, old_shape, new_shape), sizes),
            old_slices.to_laid_out_tensor().tensor_list)

    def expand(self, device: str, x: tf.Tensor, old_shape: mtf.Shape, new_shape: mtf.Shape) -> tf.Tensor:
        """A slice in the order of new_shape, with size 1 where a dim is lacking (left out where it leads)."""
        if old_shape == new_shape or not len(old_shape):
            return x
        old_dims, new_dims = old_shape.dims, new_shape.dims
        x = self.emitter.transpose(device, x, [old_dims.index(dim) for dim in new_dims if dim in old_dims])
        sizes = [size if dim in old_dims else 1
                 for dim, size in zip(new_dims, self.slice_shape(new_shape), strict=True)]
        lead = next(k for k, dim in enumerate(new_dims) if dim in old_dims)
        return self.emitter.reshape(device, x, sizes[lead:])

    class LaidOutVariable:
        """The slices of a variable.

        Every slice is read once per step, and updates follow that read: all uses of a step see the same value. The
        operations that copy from and to the master are made when they are first asked for.
        """

        def __init__(self, variable: mtf.Variable, mesh_impl: DeviceMeshImpl):
            self._variable = variable
            self._mesh_impl = mesh_impl
            self._reads: dict[Any, list[tf.Tensor]] = {}
            self._copy_master_to_slices = self._copy_slices_to_master = None
            self._graph = tf.get_default_graph()
            if self.slice_is_master:
                slices = [variable.get_master()]
            else:
                shape = mesh_impl.slice_shape(variable.shape)
                slices = [
                    _slice_variable(f"{variable.name}_slice_{position}", shape, variable.slice_dtype, device)
                    for position, device in enumerate(mesh_impl.devices)]
            self._laid_out_tensor = mesh_impl.LaidOutTensor(slices)

        @property
        def slice_is_master(self) -> bool:
            """Whether the master itself serves as the only slice."""
            variable, mesh_impl = self._variable, self._mesh_impl
            if (mesh_impl.size != 1 or variable.master_dtype != variable.slice_dtype
                    or isinstance(variable, mtf.ops.StackedVariable)):
                return False
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
                self._reads[scope] = own if usable else self.read_again()
            return self._reads[scope]

        def has_read(self) -> list[tf.Tensor] | None:
            """The value read before in the current scope, if it was."""
            return self._reads.get(next(scopes()))

        def read_again(self) -> list[tf.Tensor]:
            """The value of every slice, read now."""
            values = []
            for device, variable in zip(self._mesh_impl.devices, self.laid_out_tensor.all_slices, strict=True):
                with tf.device(device):
                    values.append(_value(variable))
            return values

        def activation(self, values: Sequence[tf.Tensor]) -> Any:
            """What was read, in the type that the model computes with."""
            dtype = self._variable.activation_dtype
            return self._mesh_impl.per_device(lambda _, value: tf.cast(value, dtype), values)

        def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
            """Assigns to the slices, after they were read where they were.

            Args:
              assign_fn: a function from (mtf.Variable, slice variable, tf.Tensor) to a tf.Operation.
              values: a tensor per slice.
            """
            return tf.group(self.updates(assign_fn, values))

        def updates(self, assign_fn: Callable, values: Sequence[tf.Tensor], idle: Collection[str] = ()) -> list[Any]:
            """The assignments of `assign_to_slices`, for the caller to group with others.

            TensorFlow assigns in place, but where somebody still holds the value it copies the variable first: a large
            one waits for all that uses what was read.

            Args:
              assign_fn, values: of `assign_to_slices`.
              idle: name scopes of nodes not to wait for.
            """
            read = self.has_read() or [None] * len(values)
            result = []
            for device, variable, value, old in zip(
                    self._mesh_impl.devices, self.laid_out_tensor.all_slices, values, read, strict=True):
                with tf.device(device), tf.control_dependencies([] if old is None else [old, *_holders(old, idle)]):
                    result.append(_assign(self._variable, variable, value, assign_fn))
            return result

        @property
        def laid_out_tensor(self) -> Any:
            """The slice variables."""
            return self._laid_out_tensor

        @property
        def copy_master_to_slices(self) -> tf.Operation:
            """Fills the slices from the master."""
            if self._copy_master_to_slices is None:
                self._copy_master_to_slices = tf.group(self.fills())
            return self._copy_master_to_slices

        def fills(self) -> list[Any]:
            """The assignments of `copy_master_to_slices`, for the caller to group with others."""
            with self._graph.as_default(), tf.control_dependencies(None):
                return self._fills()

        def _fills(self) -> list[Any]:
            if self.slice_is_master:
                return []
            variable, mesh_impl = self._variable, self._mesh_impl
            with tf.device(variable.master_device):
                master = tf.convert_to_tensor(variable.get_master())
            result = []
            slices = mesh_impl.make_slices(master, variable.shape)
            for device, target, value in zip(
                    mesh_impl.devices, self.laid_out_tensor.all_slices, slices, strict=True):
                with tf.device(device):
                    result.append(_assign(variable, target, value, mtf.ops.assign_slice))
            return result

        @property
        def copy_slices_to_master(self) -> tf.Operation:
            """Puts the slices together in the master."""
            if self._copy_slices_to_master is None:
                with self._graph.as_default(), tf.control_dependencies(None):
                    self._copy_slices_to_master = self._collect()
            return self._copy_slices_to_master

        def _collect(self) -> tf.Operation:
            if self.slice_is_master:
                return tf.no_op()
            variable, mesh_impl = self._variable, self._mesh_impl
            total = mesh_impl.combine_slices(self.read_again(), variable.shape, device=variable.master_device or None)
            with tf.device(variable.master_device):
                return variable.assign_to_master(tf.cast(total, variable.master_dtype))


def _holders(value: tf.Tensor, idle: Collection[str]) -> list[tf.Operation]:
    """The nodes so far that hold the memory of a value, if copying it takes longer than to wait for so many.

    Those that merely see it in another shape are looked through; those in an idle name scope are none.
    """
    context = value.op._get_control_flow_context()
    found, tensors = {}, [value]
    while tensors:
        for node in tensors.pop().consumers():
            if node.type in _VIEWS:
                tensors.extend(node.outputs)
            # What enters a loop is waited for outside of it by its value alone.
            elif (node.type not in ("Enter", "RefEnter") and node._get_control_flow_context() is context
                  and not _within(node.name, idle)):
                found[node] = None
    nbytes = (value.shape.num_elements() or 0) * value.dtype.size
    return list(found) if nbytes >= _COPIED_MEANWHILE * len(found) else []


def _within(name: str, scopes: Collection[str]) -> bool:
    return any(name[:position + 1] in scopes for position, letter in enumerate(name) if letter == "/")


def _slice_variable(name: str, shape: Sequence[int], dtype: tf.DType, device: str) -> Any:
    """A variable without an initializer: slices are only ever filled from the master."""
    with tf.device(device):
        variable = resource_variable_ops.UninitializedVariable(trainable=False, dtype=dtype, shape=shape, name=name)
    # It enters itself among the variables that are initialised and saved; slices are neither.
    collection = tf.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
    if collection and collection[-1] is variable:
        collection.pop()
    return variable


def _value(variable: Any) -> tf.Tensor:
    """A read of a variable of its own (a fresh node)."""
    if hasattr(variable, "handle"):
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
        read.set_shape(variable.shape)
        return read
    return tf.identity(variable)


def _assign(variable: mtf.Variable, target: Any, value: tf.Tensor, assign_fn: Callable) -> tf.Operation:
    """One node where Mesh-TF's own assignments make three."""
    ops = mtf.ops
    lean = {
        ops.assign_slice: tf.raw_ops.AssignVariableOp,
        ops.assign_add_slice: tf.raw_ops.AssignAddVariableOp,
        ops.assign_sub_slice: tf.raw_ops.AssignSubVariableOp,
    }.get(assign_fn)
    if lean is None or not hasattr(target, "handle"):
        return assign_fn(variable, target, value)
    return lean(resource=target.handle, value=tf.cast(value, variable.slice_dtype))
