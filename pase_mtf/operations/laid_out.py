"""Tensors that are imported as slices, laid out beforehand for one mesh and one layout (`mtf.import_laid_out_tensor`).

Stock Mesh-TF takes the slices as they are. Under a plan the tensor that they are slices of is imported instead. They
do not say for which mesh they were laid out: it is found from the nodes that slice it, or told by their shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.partition import joined
from pase_mtf.operations.protocols import Lowering, StockDemands
from pase_mtf.operations.registry import Rule, add_rules, always, names_of

_ops = mtf.ops


class _Source(NamedTuple):
    """What slices were taken from: the tensor, and for every slice which block along every dim it is."""

    tensor: tf.Tensor
    blocks: list[tuple[int, ...]]


def _counts(slices: Sequence[tf.Tensor], shape: mtf.Shape) -> list[int] | None:
    """Into how many slices every dim goes; None where one does not go into slices of this size."""
    extents = slices[0].shape.as_list() if slices[0].shape.rank is not None else []
    if len(extents) != len(shape) or any(not extent or dim.size % extent
                                         for dim, extent in zip(shape.dims, extents, strict=True)):
        return None
    return [dim.size // extent for dim, extent in zip(shape.dims, extents, strict=True)]


def _taken_from(tensor: tf.Tensor) -> tuple[tf.Tensor, tuple[int, ...]] | None:
    """(what a slice was taken from, where it begins); None where its node does not tell."""
    node = tensor.op
    while node.type == "Identity":
        node = node.inputs[0].op
    begin = tf.get_static_value(node.inputs[1]) if node.type == "Slice" else None
    return None if begin is None else (node.inputs[0], tuple(int(place) for place in begin))


def _source(slices: Sequence[tf.Tensor], counts: Sequence[int], shape: mtf.Shape) -> _Source | None:
    """The one tensor that the slices were taken from, as Mesh-TF's `make_slices` does: all of it is in them."""
    found = [_taken_from(tensor) for tensor in slices]
    known = [entry for entry in found if entry is not None]
    if len(known) < len(found) or len({id(source) for source, _ in known}) > 1:
        return None
    extents = [dim.size // count for dim, count in zip(shape.dims, counts, strict=True)]
    blocks = [tuple(place // extent for place, extent in zip(begin, extents, strict=True)) for _, begin in known]
    whole = known[0][0].shape.is_compatible_with(shape.to_integer_list)
    complete = set(blocks) == set(itertools.product(*map(range, counts)))
    return _Source(known[0][0], blocks) if whole and complete else None


def _in_order(slices: Sequence[tf.Tensor], counts: Sequence[int]) -> bool:
    """Whether one dim is split over all devices: only one mesh has such slices, one after the other."""
    return sorted(counts)[-2:] in ([len(slices)], [1, len(slices)])


def _lower(op: mtf.ops.ImportLaidOutTensorOperation, lowering: Lowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    slices = op._laid_out_tensor.to_laid_out_tensor().tensor_list
    counts = _counts(slices, output.shape)
    if counts is not None and set(counts) <= {1} and len(slices) == impl.size:  # a copy on every device
        lowering.set_tensor_lowering(output, impl.LaidOutTensor(list(slices)))
        return
    whole = None
    if counts is not None:
        source = _source(slices, counts, output.shape)
        if source is not None:
            whole = source.tensor
        elif set(counts) <= {1} or _in_order(slices, counts):
            # Every process has all of them: this is no node of the lowering's.
            with tf.device(slices[0].device):
                whole = joined(slices, counts, tf.concat)
    if whole is None:
        raise UsageError(f"{op.name}: {len(slices)} slices of shape {slices[0].shape} do not say which part of "
                         f"{output.shape.to_string} each is; take them by tf.slice from one tensor (as make_slices "
                         "does), or use mtf.import_tf_tensor")
    lowering.set_tensor_lowering(output, impl.import_tf_tensor(output, whole))


def _strides(slices: Sequence[tf.Tensor], counts: Sequence[int], shape: mtf.Shape) -> list[int | None]:
    """For every dim that is split, how many devices lie between a block of it and the next; None where nobody knows, 0
    where the blocks are those of no mesh."""
    source = _source(slices, counts, shape)
    if source is None:
        return [1 if _in_order(slices, counts) else None] * len(counts)
    found: list[int | None] = []
    for dim, count in enumerate(counts):
        blocks = [block[dim] for block in source.blocks]
        stride = max(1, blocks.index(1)) if count > 1 else len(blocks)
        found.append(stride if blocks == [device // stride % count for device in range(len(blocks))] else 0)
    return found


def _demands(operation: mtf.ops.ImportLaidOutTensorOperation, demands: StockDemands) -> None:
    if demands.rebuilt:
        return
    laid_out, output = operation._laid_out_tensor, operation.outputs[0]
    slices = laid_out.tensor_list
    one_for_all = "simd" in type(laid_out).__module__
    if demands.devices and len(slices) != demands.devices and not one_for_all:
        demands.refuse(operation, output.shape.dimension_names or ["(none)"],
                       f"it imports {len(slices)} slices, the mesh has {demands.devices} devices")
    if slices[0].shape.rank != len(output.shape):
        demands.refuse(operation, output.shape.dimension_names or ["(none)"],
                       f"slices of shape {slices[0].shape} are none of {output.shape.to_string}")
        return
    counts = None if one_for_all else _counts(slices, output.shape)
    strides = [None] * len(output.shape) if counts is None else _strides(slices, counts, output.shape)
    for dim, size, stride in zip(output.shape.dims, laid_out.slice_shape, strides, strict=True):
        if size is None or size == dim.size:
            demands.keep_whole(operation, [dim.name], "its slices, laid out beforehand, are whole there")
        elif dim.size % size:
            demands.refuse(operation, [dim.name], f"slices of {size} do not make {dim}")
        elif stride == 0:
            demands.refuse(operation, [dim.name], "its slices, laid out beforehand, are in the order of no mesh")
        else:
            demands.need_shards(operation, dim.name, dim.size // size, stride)


add_rules({_ops.ImportLaidOutTensorOperation: Rule(
    kind=always("none"), splittable=always(()), stock_splittable=names_of, lower=_lower, stock_demands=_demands,
    imported_slices=lambda operation: operation._laid_out_tensor)})
