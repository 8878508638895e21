"""Operations that slice, join, shift, rename or look up: the numbers stay what they are."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Hashable, Mapping

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.computation_graph import TOP_K
from pase_mtf.graph.partition import ALIGNED, Partition, before_reshape, translate
from pase_mtf.operations.nodes import Nodes
from pase_mtf.operations.protocols import Lowering, StockDemands, dims_of
from pase_mtf.operations.registry import Rule, add_rules, always, elements, names_of
from pase_mtf.operations.stock_sums import PendingSum, ReshapedSum

_ops = mtf.ops

_FEWEST_PARTS = 4
"""How many times as large as what is found a dim has to be that is split for a top-k."""


def _but_resized(operation: mtf.Operation) -> set[str]:
    """Concat, split, slice, pad, stack, unstack: all but the dim along which they work, which they declare."""
    return names_of(operation) - set(operation.unsplittable_dims)


def _resizing_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    demands.keep_whole(operation, operation.unsplittable_dims, f"{type(operation).__name__} works along it")


def _top_k_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    demands.keep_whole(operation, [operation._k_dim.name], "top-k makes it")


def _top_k_splittable(operation: mtf.Operation) -> set[str]:
    """Of a split dim every device finds the largest of its part and gives them to the others, each of which chooses
    among all of these: where that is most of the dim, nothing is gained."""
    reduced, found = operation._reduced_dim, operation._k_dim
    few = _FEWEST_PARTS * found.size <= reduced.size
    return names_of(operation) - {found.name, *([] if few else [reduced.name])}


def _top_k_stock_splittable(operation: mtf.Operation) -> set[str]:
    """Whether anything is gained, the layout decides."""
    return names_of(operation) - {operation._k_dim.name}


def _top_k_contracted(operation: mtf.Operation) -> tuple[tuple[str, ...], ...]:
    """Not summed, but every device gets what the others have found, of both outputs."""
    return ((operation._reduced_dim.name,),) * len(operation.outputs)


def _one_hot_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    if operation.inputs[0].dtype.name != "int32":
        demands.keep_whole(operation, [operation._output_dim.name],
                           f"one-hot of {operation.inputs[0].dtype.name} indices makes it")


def _lower_one_hot(op: mtf.ops.OneHotOperation, lowering: Lowering) -> None:
    """Mesh-TF subtracts an int32 offset, which fails for int64 indices; here the offset is a number. Differences of
    narrow indices would wrap round, into the rows of another device."""
    impl, output, indices = lowering.mesh_impl(op), op.outputs[0], op.inputs[0]
    depth = impl.slice_shape(output.shape)[-1]
    partition = impl.partition(output.shape)
    offsets = [partition.block(position)[-1] * depth for position in range(impl.size)]
    emitter, counted_in = lowering.emitter, indices.dtype if indices.dtype.size >= 4 else tf.int32

    def tf_fn(device: str, value: tf.Tensor, offset: int) -> tf.Tensor:
        if offset:
            value = tf.subtract(tf.cast(value, counted_in), emitter.constant(device, offset, counted_in))
        return tf.raw_ops.OneHot(
            indices=value, depth=emitter.constant(device, depth), on_value=scalar(device, op._on_value),
            off_value=scalar(device, op._off_value), axis=-1)

    def scalar(device: str, value: float) -> tf.Tensor:
        if isinstance(value, (numbers.Real, bool)):
            return emitter.constant(device, value, op._dtype)
        return tf.cast(value, op._dtype)

    laid_out = lowering.tensors[indices].to_laid_out_tensor()
    lowering.set_tensor_lowering(output, impl.per_device(tf_fn, laid_out.tensor_list, offsets))


def _lower_reshape(op: mtf.ops.ReshapeOperation, lowering: Lowering) -> None:
    """Moves to shards that exist on both sides, reshapes locally, splits further.

    Mesh-TF's own lowering gives wrong values where a rename moves a dim from one mesh axis to another.
    """
    x, y = op.inputs[0], op.outputs[0]
    source_impl, impl = lowering.producer_impl(x), lowering.mesh_impl(op)
    old, new = tuple(x.shape.to_integer_list), tuple(y.shape.to_integer_list)
    source, target = source_impl.partition(x.shape), impl.partition(y.shape)
    kept, moved = translate(source, old, new)
    stored = lowering.stored(x)
    if isinstance(stored, _ops.LazyAllreduceSum) and stored._reduced is None and kept == source and moved == target:
        axes = impl.axes_with(source_impl.strides(stored.mesh_axes))
        if axes is not None:
            blocks = _reshape_blocks(stored.laid_out_input.tensor_list, target, new, lowering)
            lowering.set_tensor_lowering(y, _ops.LazyAllreduceSum(
                impl, impl.LaidOutTensor(blocks), axes, stored.add_counter_fn))
            return
    there, between = before_reshape(source, target, old, new)
    blocks = _reshape_blocks(lowering.read_partition(x, there), between, new, lowering)
    tensors = lowering.move(blocks, between, target, new)
    lowering.set_tensor_lowering(y, impl.LaidOutTensor(tensors))


def _reshape_blocks(tensors: list[tf.Tensor], partition: Partition, new: tuple[int, ...], lowering: Lowering,
                    ) -> list[tf.Tensor]:
    """The block at every position of the partition in its new shape; one that several share is reshaped once."""
    emitter, shape, made = lowering.emitter, partition.block_shape(new), {}
    result = []
    for tensor, number in zip(tensors, partition.devices, strict=True):
        key = tensor.ref() if emitter.shared else (tensor.ref(), number)
        if key not in made:
            made[key] = emitter.reshape(emitter.devices[number], tensor, shape)
        result.append(made[key])
    return result


def _reshape_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    demands.reshape(operation, dims_of(operation.inputs[0].shape), dims_of(operation.outputs[0].shape))


def _reshaped_sums(operation: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    source, output = operation.inputs[0], operation.outputs[0]
    if source not in sums:
        return {}
    return {output: ReshapedSum(sums[source], dims_of(source.shape), dims_of(output.shape))}


def _slice_nodes(operation: mtf.Operation, _: dict[Hashable, Nodes]) -> Nodes:
    """It reads no more than it makes."""
    if _is_cut_in_place(operation):
        return Nodes(1, 0.0)
    (x,), (made,) = operation.inputs, operation.outputs
    return Nodes(1, 2.0 * made.size / max(x.size + made.size, 1))


def _is_cut_in_place(operation: mtf.Operation) -> bool:
    """Whether it cuts along the first dim: there parts lie in memory as they are, and TensorFlow copies nothing."""
    x = operation.inputs[0]
    row = math.prod(dim.size for dim in x.shape.dims[1:]) * x.dtype.size
    if isinstance(operation, _ops.SliceOperation) and len(x.shape.dims) == 1:  # aligned where both of its ends are
        row *= math.gcd(operation._begin, operation._slice_dim.size)
    # Parts that are not aligned TensorFlow copies all the same.
    return x.shape.dims[0].name in operation.unsplittable_dims and row % ALIGNED == 0


def _cut_flops(operation: mtf.Operation) -> float:
    return 0.0 if _is_cut_in_place(operation) else elements(operation)


def _cut_nodes(operation: mtf.Operation, _: dict[Hashable, Nodes]) -> Nodes:
    return Nodes(1, 0.0) if _is_cut_in_place(operation) else Nodes()


def _shifted(operation: mtf.Operation) -> tuple[str, int]:
    """By nothing, too, where all goes round and comes back, or nothing is left but zeros."""
    offset, size = operation._offset, operation._dim.size
    if abs(offset) >= size:
        offset = offset % max(size, 1) if operation._wrap else 0
    return operation._dim.name, offset


_RESIZING = Rule(kind=always("gather"), splittable=_but_resized, stock_demands=_resizing_demands)
_CUTTING = dataclasses.replace(_RESIZING, flops=_cut_flops, nodes=_cut_nodes)

add_rules({
    **dict.fromkeys((_ops.ConcatOperation, _ops.StackOperation, _ops.PadOperation), _RESIZING),
    **dict.fromkeys((_ops.SplitOperation, _ops.UnstackOperation), _CUTTING),
    _ops.SliceOperation: dataclasses.replace(
        _RESIZING, nodes=_slice_nodes,
        flops=lambda operation: 0.0 if _is_cut_in_place(operation) else float(operation.outputs[0].size)),
    _ops.ShiftOperation: Rule(kind=always("gather"), role=always("shift"),
                              shift=_shifted),
    _ops.OneHotOperation: Rule(kind=always("gather"), lower=_lower_one_hot, stock_demands=_one_hot_demands),
    _ops.TopKOperation: Rule(
        kind=always("reduction"), role=always(TOP_K), splittable=_top_k_splittable,
        stock_splittable=_top_k_stock_splittable, contracted=_top_k_contracted, layer="gather", is_anchor=True,
        stock_demands=_top_k_demands),
    _ops.ReshapeOperation: Rule(
        kind=always("none"), role=always("rename"), forwards_sums=True, is_view=True, lower=_lower_reshape,
        stock_demands=_reshape_demands, stock_sums=_reshaped_sums),
})
