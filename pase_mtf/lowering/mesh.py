"""A placement mesh implementation over any of the devices, with lean collectives and well-ordered variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.graph.partition import Partition, groups, of_mesh, whole
from pase_mtf.lowering.emit import Emitter, on
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.reshard import ALL_REDUCE, all_reduce, move
from pase_mtf.lowering.variables import LaidOutVariable
from pase_mtf.operations.protocols import HasDims, LaidOut, dims_in

__all__ = ["DeviceMeshImpl", "PendingSum"]

_Input: TypeAlias = LaidOut | tf.Tensor | float
_Output: TypeAlias = LaidOut | tuple[LaidOut, ...]  # where the function returns several tensors


class PendingSum(mtf.ops.LazyAllreduceSum):
    """A sum that is still spread over the devices, seen from another mesh implementation.

    Both see the same partial sums and the same result: whichever is asked first sums, once.
    """

    def __init__(self, mesh_impl: DeviceMeshImpl, lazy: mtf.ops.LazyAllreduceSum, mesh_axes: Sequence[int]):
        # Not super().__init__: it takes the parts, which may be made when they are first asked for.
        self.mesh_impl, self.mesh_axes, self.add_counter_fn = mesh_impl, list(mesh_axes), lazy.add_counter_fn
        self._lazy = lazy

    @property
    def laid_out_input(self) -> LaidOut:
        """The parts."""
        return self._lazy.laid_out_input

    @property
    def _reduced(self) -> LaidOut | None:
        return self._lazy._reduced

    def to_laid_out_tensor(self) -> LaidOut:
        """The sum itself."""
        return self._lazy.to_laid_out_tensor()


class DeviceMeshImpl(placement_mesh_impl.PlacementMeshImpl):
    """A mesh over some of the devices of an emitter.

    Attributes:
      spec: what it was made from.
      emitter: emits its nodes.
    """

    LaidOutVariable = LaidOutVariable

    def __init__(self, spec: MeshSpec, emitter: Emitter):
        shape = mtf.Shape([mtf.Dimension(f"axis{i}", size) for i, (_, size) in enumerate(spec.axes)])
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

    def tensor_layout(self, arg: HasDims) -> mtf.TensorLayout:
        """The mesh axis of every dim of a tensor, a shape, or a list of dims."""
        key = dims_in(arg)
        if key not in self._layouts:
            self._layouts[key] = super().tensor_layout(arg)
        return self._layouts[key]

    def slice_shape(self, tensor_shape: HasDims) -> list[int]:
        """The shape of every slice of a tensor, given its shape or a list of its dims."""
        key = dims_in(tensor_shape)
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

    def slicewise(self, fn: Callable, *inputs: _Input) -> _Output:
        """Calls fn once per processor, on its device."""
        columns = []
        for x in inputs:
            if hasattr(x, "to_laid_out_tensor"):
                x = x.to_laid_out_tensor()
            columns.append(x.tensor_list if isinstance(x, self.LaidOutTensor) else [x] * self.size)
        return self.per_device(lambda _, *row: fn(*row), *columns)

    def per_device(self, fn: Callable, *columns: Sequence[object]) -> _Output:
        """Calls fn(device, ...) once per processor, on its device, with its row of the columns."""
        results = self.emitter.of_slices(self.devices, fn, columns)
        if isinstance(results[0], tuple):
            return tuple(self.LaidOutTensor(list(column)) for column in zip(*results, strict=True))
        return self.LaidOutTensor(results)

    def slicewise_delay_allreduce(self, fn: Callable, *inputs: LaidOut) -> _Output:
        """Slicewise; where all inputs are sums still spread over the same axes, so is the output."""
        lazy = mtf.ops.LazyAllreduceSum
        if inputs and all(isinstance(x, lazy) and x.mesh_impl is self for x in inputs) and len(
                {frozenset(x.mesh_axes) for x in inputs}) == 1 and all(x._reduced is None for x in inputs):
            return lazy(self, self.slicewise(fn, *(x.laid_out_input for x in inputs)), inputs[0].mesh_axes,
                        add_counter_fn=inputs[0].add_counter_fn)
        return self.slicewise(fn, *inputs)

    def added_to_parts(self, parts: mtf.ops.LazyAllreduceSum, other: LaidOut) -> mtf.ops.LazyAllreduceSum:
        """The sum of a pending sum and another tensor, pending: the other one is added to one of the parts."""
        strides, blocks = self.strides(parts.mesh_axes), zip(
            self.devices, parts.laid_out_input.tensor_list, other.to_laid_out_tensor().tensor_list, strict=True)
        added = [part if any(position // stride % size for size, stride in strides) else
                 self.emitter.combine(device, [part, whole], "SUM")
                 for position, (device, part, whole) in enumerate(blocks)]
        return mtf.ops.LazyAllreduceSum(self, self.LaidOutTensor(added), parts.mesh_axes, parts.add_counter_fn)

    def allreduce(self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str) -> LaidOut:
        """Combines over mesh axes: "SUM", "MAX" or "MIN"."""
        if not mesh_axes:
            return x
        members, blocks = groups(self.size, self.strides(mesh_axes)), x.to_laid_out_tensor().tensor_list
        with tf.name_scope(ALL_REDUCE):
            return self.LaidOutTensor(all_reduce(blocks, members, self.devices, self.emitter, reduction_fn_string))

    def allconcat(self, x: LaidOut, mesh_axis: int, concat_axis: int) -> LaidOut:
        """Concatenates the slices along a mesh axis, for every processor."""
        tensors = x.to_laid_out_tensor().tensor_list
        result = list(tensors)
        for group in groups(self.size, self.strides([mesh_axis])):
            makers = group[:1] if self.emitter.shared else group
            names = [self.devices[k] for k in group]
            gathered = self.emitter.exchange.all_gather(names, [tensors[k] for k in group])
            made = [self.emitter.concat(self.devices[maker], parts, concat_axis)
                    for maker, parts in zip(makers, gathered, strict=False)]
            for k, position in enumerate(group):
                result[position] = made[min(k, len(made) - 1)]
        return self.LaidOutTensor(result)

    def allsplit(self, x: LaidOut, mesh_axis: int, split_axis: int, which: LaidOut | None = None) -> LaidOut:
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

    def alltoall(self, x: LaidOut, mesh_axis: int, split_axis: int, concat_axis: int) -> LaidOut:
        """Splits along one tensor axis and concatenates along another, within groups along a mesh axis."""
        tensors = x.to_laid_out_tensor().tensor_list
        result = list(tensors)
        for group in groups(self.size, self.strides([mesh_axis])):
            names = [self.devices[k] for k in group]
            pieces = [self.emitter.split(self.devices[k], tensors[k], len(group), split_axis) for k in group]
            for position, parts in zip(group, self.emitter.exchange.all_to_all(names, pieces), strict=True):
                result[position] = self.emitter.concat(self.devices[position], parts, concat_axis)
        return self.LaidOutTensor(result)

    def receive(self, x: LaidOut, mesh_axis: int, source_pcoord: Sequence[int | None]) -> LaidOut:
        """For every processor the slice of the one with a coordinate along a mesh axis; zeros where that is None."""
        tensors = x.to_laid_out_tensor().tensor_list
        result = list(tensors)
        for group in groups(self.size, self.strides([mesh_axis])):
            for position, source in zip(group, source_pcoord, strict=True):
                if source is None:
                    result[position] = self.emitter.run_on(
                        self.devices[position], lambda: tf.zeros(tensors[0].shape, tensors[0].dtype))
                else:
                    result[position] = self.emitter.run_on(
                        self.devices[position], tf.identity, tensors[group[source]])
        return self.LaidOutTensor(result)

    def Print(self, x: LaidOut, data: Sequence[LaidOut], message: str, **options: object) -> LaidOut:  # noqa: N802
        """Prints the slices of tensors when the first processor's slice of x is computed."""
        tensors = list(x.to_laid_out_tensor().tensor_list)
        tensors[0] = self.emitter.run_on(
            self.devices[0], lambda first, *rest: tf.Print(first, list(rest), message, **options),
            tensors[0], *(tensor for entry in data for tensor in entry.tensor_list))
        return self.LaidOutTensor(tensors)

    def laid_out_pcoord(self, mesh_axis: int) -> LaidOut:
        """The coordinate of every processor along a mesh axis, as int32 scalars."""
        (size, stride), = self.strides([mesh_axis])
        return self.LaidOutTensor([
            self.emitter.constant(device, position // stride % size) for position, device in enumerate(self.devices)])

    def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor) -> LaidOut:
        """Slices of a tf.Tensor, taken where it lies."""
        return self.LaidOutTensor(self.make_slices(tf_x, x.shape))

    def make_slices(self, tf_tensor: tf.Tensor, tensor_shape: mtf.Shape) -> list[tf.Tensor]:
        """A slice of a tf.Tensor per processor."""
        sizes = tensor_shape.to_integer_list
        if not tf_tensor.shape.is_fully_defined():
            with on(self._host_of(tf_tensor)):
                tf_tensor = tf.ensure_shape(tf_tensor, sizes)
        if self.emitter.first_devices is not None:
            return self._cut_own(tf_tensor, tensor_shape)
        emitter, source = self.emitter.with_device(self._host_of(tf_tensor) or tf_tensor.device)
        return move([tf_tensor], whole(source, len(sizes)), self.partition(tensor_shape), sizes, emitter)

    def _host_of(self, x: tf.Tensor) -> str:
        """Where a whole tensor is cut for GPUs: on their host, unless it lies on one of them. TensorFlow would cut it
        on a GPU, which need not have room for all of it. Empty where the devices are none."""
        spec = tf.DeviceSpec.from_string(x.device)
        if spec.device_type == "GPU" or "GPU" not in self.devices[0].upper():
            return ""
        return spec.replace(device_type="CPU", device_index=spec.device_index or 0).to_string()

    def _cut_own(self, tf_tensor: tf.Tensor, tensor_shape: mtf.Shape) -> list[tf.Tensor]:
        """The slices of a tensor that every process has whole: each takes its own."""
        partition, sizes = self.partition(tensor_shape), tensor_shape.to_integer_list
        block, host = partition.block_shape(sizes), self._host_of(tf_tensor)

        def take(device: str, begin: tuple[int, ...]) -> tf.Tensor:
            return tf_tensor if partition.is_whole else self.emitter.slice(host or device, tf_tensor, begin, block)

        begins = [tuple(part * extent for part, extent in zip(partition.block(position), block, strict=True))
                  for position in range(self.size)]
        return self.emitter.per_device(self.devices, take, [begins])

    def combine_slices(self, slices: Sequence[tf.Tensor], tensor_shape: mtf.Shape, device: str | None = None,
                       ) -> tf.Tensor:
        """One tf.Tensor of the slices, on the device named or that of the first processor.

        Where every process has a graph of its own, each gets all of it on its first device.
        """
        source = self.partition(tensor_shape)
        if self.emitter.first_devices is not None:
            everywhere = Partition(self.emitter.first_devices, ((1, 1),) * len(tensor_shape))
            return self.emitter.fetchable(
                move(slices, source, everywhere, tensor_shape.to_integer_list, self.emitter))
        emitter, target = self.emitter.with_device(device) if device else (self.emitter, source.devices[0])
        return move(slices, source, whole(target, len(tensor_shape)), tensor_shape.to_integer_list, emitter)[0]

    def broadcast_impl(self, old_slices: LaidOut, old_shape: mtf.Shape, new_shape: mtf.Shape) -> LaidOut:
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
