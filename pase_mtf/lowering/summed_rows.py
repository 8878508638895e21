"""Sums of rows that were looked up: devices give each other indices and rows, and add all of these up themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.looked_up import LookedUp, summed_as_rows, together
from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.reshard import ALL_REDUCE, move
from pase_mtf.operations.protocols import LaidOut, SummedRows

__all__ = ["SumOfRows", "added_rows", "sum_of_rows"]

# Types in which a sum of many small numbers stops growing: a product of matrices adds up in float32, too.
_ADDED_AS = {tf.bfloat16: tf.float32, tf.float16: tf.float32}


class _Rows(NamedTuple):
    """Rows that a sum consists of.

    Attributes:
      found: what they are.
      indices, rows: in the layout of the operation that would make their sum.
    """

    found: SummedRows
    indices: LaidOut
    rows: LaidOut


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
      make_parts: makes the parts of the sum, for those that add something else to it first.
      counts: the one is called where parts are added up, the other told how many elements are gathered else.
    """
    if mesh_impl.emitter.shared or not _travel(mesh_impl, found.output.shape, found.looked_up, mesh_axes):
        return None
    # Read at once, where and when the operation reads what it multiplies.
    rows = _Rows(found, *(read(tensor).to_laid_out_tensor() for tensor in (found.indices, found.rows)))
    return SumOfRows(mesh_impl, [rows], found.looked_up, mesh_axes, make_parts, counts)


def added_rows(one: LaidOut, other: LaidOut) -> SumOfRows | None:
    """The sum of two pending sums of rows, as one of all their rows.

    Returns:
      None where they are not such sums over the same devices, where one is summed already, or where parts of both
      together are less than their rows.
    """
    if not (isinstance(one, SumOfRows) and isinstance(other, SumOfRows)) or one._reduced or other._reduced:
        return None
    impl, looked_up = one.mesh_impl, together(one.looked_up, other.looked_up)
    if other.mesh_impl is not impl or set(other.mesh_axes) != set(one.mesh_axes) or looked_up is None or (
            other.shape != one.shape or not _travel(impl, one.shape, looked_up, one.mesh_axes)):
        return None
    return SumOfRows(impl, [*one.terms, *other.terms], looked_up, one.mesh_axes,
                     lambda: impl.slicewise(tf.add, one.laid_out_input, other.laid_out_input), one.counts)


def _travel(impl: DeviceMeshImpl, shape: mtf.Shape, looked_up: LookedUp, mesh_axes: Sequence[int],
            target: Partition | None = None) -> bool:
    """Whether it is summed by rows where it is wanted in a partition, by default its own."""
    source = impl.partition(shape)
    return summed_as_rows(looked_up, source, impl.strides(mesh_axes), target or source, shape.to_integer_list)


class SumOfRows(mtf.ops.LazyAllreduceSum):
    """A sum that is still spread over the devices. Whoever needs it makes them give each other rows; whoever adds
    something else to it before, or wants so little of it that the parts of that are less, has parts as of any other.

    Attributes:
      terms: the rows that it consists of.
      looked_up: all of these.
      shape: its own, unsplit.
      counts: see `sum_of_rows`.
    """

    def __init__(self, mesh_impl: DeviceMeshImpl, terms: Sequence[_Rows], looked_up: LookedUp,
                 mesh_axes: Sequence[int], make_parts: Callable[[], LaidOut],
                 counts: tuple[Callable[[], None], Callable[[int], None]]) -> None:
        """See `sum_of_rows`."""
        # Not super().__init__: it takes the parts.
        self.mesh_impl, self.mesh_axes = mesh_impl, list(mesh_axes)
        self.terms, self.looked_up, self.shape = list(terms), looked_up, terms[0].found.output.shape
        self.counts, self.add_counter_fn = counts, counts[0]
        self._make_parts = make_parts
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
        return self.mesh_impl.slice_shape(self.shape)

    def travels_as_rows(self, target: Partition) -> bool:
        """Whether it is summed by rows where it is wanted in that partition."""
        return _travel(self.mesh_impl, self.shape, self.looked_up, self.mesh_axes, target)

    def to_laid_out_tensor(self) -> LaidOut:
        """The sum, on every device."""
        if self._reduced is None:
            with tf.name_scope(ALL_REDUCE):
                self._reduced = self._summed()
        return self._reduced

    def _summed(self) -> LaidOut:
        impl, dim = self.mesh_impl, self.looked_up.dim
        partition = impl.partition(self.shape)
        depth = partition.block_shape(self.shape.to_integer_list)[dim]
        begins = [partition.block(position)[dim] * depth for position in range(impl.size)]
        indices, rows = zip(*((self._gathered(term, term.found.indices, term.indices),
                               self._gathered(term, term.found.rows, term.rows)) for term in self.terms), strict=True)
        return impl.per_device(_adding([term.found for term in self.terms], depth, impl.emitter),
                               list(zip(*indices, strict=True)), list(zip(*rows, strict=True)), begins)

    def _gathered(self, term: _Rows, tensor: mtf.Tensor, laid_out: LaidOut) -> list[tf.Tensor]:
        """A tensor on every device, in no part along the dims of the indices."""
        impl, sizes = self.mesh_impl, tensor.shape.to_integer_list
        source = impl.partition(tensor.shape)
        target = Partition(source.devices, tuple(
            (1, 1) if dim in term.found.indices.shape.dims else shard
            for dim, shard in zip(tensor.shape.dims, source.shards, strict=True)))
        self.counts[1](impl.size * (math.prod(target.block_shape(sizes)) - math.prod(source.block_shape(sizes))))
        return move(laid_out.tensor_list, source, target, sizes, impl.emitter)


def _adding(sums: Sequence[SummedRows], depth: int, emitter: Emitter) -> Callable[..., tf.Tensor]:
    """A function (device, indices, rows, where the device's part of the sum begins) that adds up rows, given those of
    every entry of `sums`.

    Args:
      sums: what is summed.
      depth: of the sum, how much a device holds along the dim of the positions.
      emitter: makes the nodes.
    """
    output, along = sums[0].output.shape.dims, sums[0].dim
    row = [dim for dim in output if dim != along]
    outward = [[along, *row].index(dim) for dim in output]
    types = {found.indices.dtype for found in sums}
    counted_in = types.pop() if len(types) == 1 and types <= {tf.int32, tf.int64} else tf.int64

    def in_a_list(device: str, found: SummedRows, indices: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        indexed, count = found.indices.shape.dims, found.looked_up.indices
        inward = [found.rows.shape.dims.index(dim) for dim in (*indexed, *row)]
        rows = emitter.transpose(device, rows, inward)
        rows = emitter.reshape(device, rows, [count, *rows.shape.as_list()[len(indexed):]])
        return tf.cast(emitter.reshape(device, indices, [count]), counted_in), rows

    def add(device: str, indices_of: Sequence[tf.Tensor], rows_of: Sequence[tf.Tensor], begin: int) -> tf.Tensor:
        indices, rows = (emitter.concat(device, column, 0) for column in zip(*(
            in_a_list(device, *entry) for entry in zip(sums, indices_of, rows_of, strict=True)), strict=True))
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
