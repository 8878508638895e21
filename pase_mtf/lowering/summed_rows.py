"""Sums of rows that were looked up: devices give each other indices and rows, and add all of these up themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.looked_up import summed_as_rows
from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.reshard import ALL_REDUCE, move
from pase_mtf.operations.protocols import LaidOut, SummedRows

__all__ = ["SumOfRows", "sum_of_rows"]

# Types in which a sum of many small numbers stops growing: a product of matrices adds up in float32, too.
_ADDED_AS = {tf.bfloat16: tf.float32, tf.float16: tf.float32}


def sum_of_rows(mesh_impl: DeviceMeshImpl, found: SummedRows, mesh_axes: Sequence[int],
                read: Callable[[mtf.Tensor], LaidOut], make_parts: Callable[[], LaidOut],
                counts: tuple[Callable[[], None], Callable[[int], None]]) -> SumOfRows | None:
    """A pending sum for which devices give each other rows; None where parts of the sum are less, or where memory is
    shared: there nothing travels.

    Args:
      mesh_impl: of the operation that makes the sum.
      found: what it sums.
      mesh_axes: over which it is to be summed.
      read: gives a tensor in the layout of `mesh_impl`.
      make_parts: makes the parts of the sum, for those that add something to it first.
      counts: the one is called where parts are added up, the other told how many elements are gathered else.
    """
    shape = found.output.shape
    if mesh_impl.emitter.shared or not summed_as_rows(
            found.looked_up, mesh_impl.partition(shape), mesh_impl.strides(mesh_axes), mesh_impl.partition(shape),
            shape.to_integer_list):
        return None
    return SumOfRows(mesh_impl, found, mesh_axes, read, make_parts, counts)


class SumOfRows(mtf.ops.LazyAllreduceSum):
    """A sum that is still spread over the devices. Whoever needs it makes them give each other rows; whoever adds to it
    before, or wants so little of it that the parts of that are less, has parts as of any other sum."""

    def __init__(self, mesh_impl: DeviceMeshImpl, found: SummedRows, mesh_axes: Sequence[int],
                 read: Callable[[mtf.Tensor], LaidOut], make_parts: Callable[[], LaidOut],
                 counts: tuple[Callable[[], None], Callable[[int], None]]) -> None:
        """See `sum_of_rows`."""
        # Not super().__init__: it takes the parts.
        self.mesh_impl, self.mesh_axes = mesh_impl, list(mesh_axes)
        self.add_counter_fn, self._count = counts
        self._found, self._make_parts = found, make_parts
        # Read at once, where and when the operation reads what it multiplies.
        self._indices, self._rows = (read(tensor).to_laid_out_tensor() for tensor in (found.indices, found.rows))
        self._scope = tf.get_default_graph().get_name_scope()
        self._parts: LaidOut | None = None
        self._reduced: LaidOut | None = None

    @property
    def laid_out_input(self) -> LaidOut:
        """The parts, made when they are first asked for."""
        if self._parts is None:
            with tf.name_scope(f"{self._scope}/" if self._scope else None):
                self._parts = self._make_parts()
        return self._parts

    @property
    def slice_shape(self) -> list[int]:
        """Of every part."""
        return self.mesh_impl.slice_shape(self._found.output.shape)

    def travels_as_rows(self, target: Partition) -> bool:
        """Whether it is summed by rows where it is wanted in that partition."""
        shape = self._found.output.shape
        return summed_as_rows(self._found.looked_up, self.mesh_impl.partition(shape),
                              self.mesh_impl.strides(self.mesh_axes), target, shape.to_integer_list)

    def to_laid_out_tensor(self) -> LaidOut:
        """The sum, on every device."""
        if self._reduced is None:
            with tf.name_scope(ALL_REDUCE):
                self._reduced = self._summed()
        return self._reduced

    def _summed(self) -> LaidOut:
        impl, found = self.mesh_impl, self._found
        partition = impl.partition(found.output.shape)
        depth = partition.block_shape(found.output.shape.to_integer_list)[found.looked_up.dim]
        begins = [partition.block(position)[found.looked_up.dim] * depth for position in range(impl.size)]
        indices, rows = (self._gathered(*entry) for entry in (
            (found.indices, self._indices), (found.rows, self._rows)))
        return impl.per_device(_adding(found, depth, impl.emitter), indices, rows, begins)

    def _gathered(self, tensor: mtf.Tensor, laid_out: LaidOut) -> list[tf.Tensor]:
        """A tensor on every device, in no part along the dims of the indices."""
        impl, sizes = self.mesh_impl, tensor.shape.to_integer_list
        source = impl.partition(tensor.shape)
        target = Partition(source.devices, tuple(
            (1, 1) if dim in self._found.indices.shape.dims else shard
            for dim, shard in zip(tensor.shape.dims, source.shards, strict=True)))
        self._count(impl.size * (math.prod(target.block_shape(sizes)) - math.prod(source.block_shape(sizes))))
        return move(laid_out.tensor_list, source, target, sizes, impl.emitter)


def _adding(found: SummedRows, depth: int, emitter: Emitter) -> Callable[..., tf.Tensor]:
    """A function (device, indices, rows, where the device's part of the sum begins) that adds up rows.

    Args:
      found: what is summed.
      depth: of the sum, how much a device holds along the dim of the positions.
      emitter: makes the nodes.
    """
    indexed, row = found.indices.shape.dims, [dim for dim in found.output.shape.dims if dim != found.dim]
    inward = [found.rows.shape.dims.index(dim) for dim in (*indexed, *row)]
    outward = [[found.dim, *row].index(dim) for dim in found.output.shape.dims]

    def add(device: str, indices: tf.Tensor, rows: tf.Tensor, begin: int) -> tf.Tensor:
        rows = emitter.transpose(device, rows, inward)
        rows = emitter.reshape(device, rows, [found.looked_up.indices, *rows.shape.as_list()[len(indexed):]])
        indices = emitter.reshape(device, indices, [found.looked_up.indices])
        if indices.dtype not in (tf.int32, tf.int64):
            indices = tf.cast(indices, tf.int64)
        if begin:
            indices = tf.subtract(indices, emitter.constant(device, begin, indices.dtype))
        # What is beyond the part is left out, as is what is below 0: a one-hot vector of it is zero.
        inside = tf.less(indices, emitter.constant(device, depth, indices.dtype))
        total = tf.raw_ops.UnsortedSegmentSum(
            data=tf.cast(rows, _ADDED_AS.get(rows.dtype, rows.dtype)),
            segment_ids=tf.where_v2(inside, indices, emitter.constant(device, -1, indices.dtype)),
            num_segments=emitter.constant(device, depth))
        return emitter.transpose(device, tf.cast(total, rows.dtype), outward)

    return add
