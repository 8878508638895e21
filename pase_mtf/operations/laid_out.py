"""Tensors that are imported as slices, laid out beforehand for one mesh and one layout (`mtf.import_laid_out_tensor`).

Stock Mesh-TF takes the slices as they are. Under a plan the tensor that they are slices of is imported instead. They
do not say for which mesh they were laid out: it is found from the nodes that cut them, or told by their shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.operations.protocols import Lowering, StockDemands
from pase_mtf.operations.registry import Rule, add_rules, always

_ops = mtf.ops


def _counts(slices: Sequence[tf.Tensor], shape: mtf.Shape) -> list[int] | None:
    """Into how many slices every dim goes; None where one does not go into slices of this size."""
    extents = slices[0].shape.as_list()
    if len(extents) != len(shape) or any(not extent or dim.size % extent
                                         for dim, extent in zip(shape.dims, extents, strict=True)):
        return None
    return [dim.size // extent for dim, extent in zip(shape.dims, extents, strict=True)]


def _cut(tensor: tf.Tensor) -> tuple[tf.Tensor, tuple[int, ...]] | None:
    """(what a slice was cut from, where it begins); None where its node does not tell."""
    node = tensor.op
    while node.type == "Identity":
        node = node.inputs[0].op
    begin = tf.get_static_value(node.inputs[1]) if node.type == "Slice" else None
    return None if begin is None else (node.inputs[0], tuple(int(place) for place in begin))


def _source(slices: Sequence[tf.Tensor], counts: Sequence[int], shape: mtf.Shape) -> tf.Tensor | None:
    """The one tensor that the slices were cut from, as Mesh-TF's `make_slices` does: all of it is in them."""
    cuts = [_cut(tensor) for tensor in slices]
    known = [cut for cut in cuts if cut is not None]
    if len(known) < len(cuts) or len({id(source) for source, _ in known}) > 1:
        return None
    steps = [range(0, dim.size, dim.size // count) for dim, count in zip(shape.dims, counts, strict=True)]
    source = known[0][0]
    whole = source.shape.is_compatible_with(shape.to_integer_list)
    return source if whole and {begin for _, begin in known} == set(itertools.product(*steps)) else None


def _lower(op: mtf.ops.ImportLaidOutTensorOperation, lowering: Lowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    slices = op._laid_out_tensor.to_laid_out_tensor().tensor_list
    counts = _counts(slices, output.shape)
    if counts is not None and set(counts) <= {1} and len(slices) == impl.size:  # a copy on every device
        lowering.set_tensor_lowering(output, impl.LaidOutTensor(list(slices)))
        return
    whole = None
    if counts is not None:
        whole = _source(slices, counts, output.shape)
        # Where one dim is split, a slice for every device, only one mesh has such slices.
        if whole is None and (set(counts) <= {1} or sorted(counts)[-2:] in ([len(slices)], [1, len(slices)])):
            whole = lowering.assemble(slices, counts, slices[0].device)
    if whole is None:
        raise UsageError(f"{op.name}: {len(slices)} slices of shape {slices[0].shape} do not say which part of "
                         f"{output.shape.to_string} each is; cut them by tf.slice from one tensor (as make_slices "
                         "does), or use mtf.import_tf_tensor")
    lowering.set_tensor_lowering(output, impl.import_tf_tensor(output, whole))


def _demands(operation: mtf.ops.ImportLaidOutTensorOperation, demands: StockDemands) -> None:
    if demands.rebuilt:
        return
    slices, output = operation._laid_out_tensor, operation.outputs[0]
    if demands.devices and len(slices.tensor_list) != demands.devices and "simd" not in type(slices).__module__:
        demands.refuse(operation, output.shape.dimension_names or ["(none)"],
                       f"it imports {len(slices.tensor_list)} slices, the mesh has {demands.devices} devices")
    for dim, size in zip(output.shape.dims, slices.slice_shape, strict=True):
        if size is None or size == dim.size:
            demands.keep_whole(operation, [dim.name], "its slices, laid out beforehand, are whole there")
        elif dim.size % size:
            demands.refuse(operation, [dim.name], f"slices of {size} do not make {dim}")
        else:
            demands.need_parts(operation, dim.name, dim.size // size)


add_rules({_ops.ImportLaidOutTensorOperation: Rule(
    kind=always("none"), splittable=always(()), lower=_lower, stock_demands=_demands,
    imported_slices=lambda operation: operation._laid_out_tensor)})
