"""Elementwise operations, broadcasts and constants."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.layer_operation import REPEAT
from pase_mtf.operations.protocols import Lowering, StockDemands
from pase_mtf.operations.registry import Rule, add_rules, always, names_of
from pase_mtf.operations.stock_sums import AddedSum, PendingSum

_ops = mtf.ops


def _lower_binary(op: mtf.ops.BinaryOpWithBroadcasting, lowering: Lowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    xs, whole = [], []
    for x in op.inputs:
        laid_out = lowering.tensors[x]
        if x.shape != output.shape:
            whole.append(x.shape)
            laid_out = impl.per_device(
                lambda device, value, shape=x.shape: impl.expand(device, value, shape, output.shape),
                laid_out.to_laid_out_tensor().tensor_list)
        xs.append(laid_out)
    if op._tf_fn is tf.add and not whole:
        result = (lowering.added_rows(*xs) or lowering.added_parts(op, xs)
                  or impl.slicewise_delay_allreduce(op._tf_fn, *xs))
    else:
        result = impl.slicewise(op._tf_fn, *xs)
        if len(whole) == 2:
            # Neither had all dims: leading dims that were left out may still be lacking.
            sizes = impl.slice_shape(output.shape)
            result = impl.per_device(
                lambda device, value: lowering.emitter.broadcast(device, value, sizes), result.tensor_list)
    lowering.set_tensor_lowering(output, result)


def _lower_scalar(op: mtf.Operation, lowering: Lowering) -> None:
    """Multiplies by or adds a scalar."""
    impl, x = lowering.mesh_impl(op), lowering.tensors[op.inputs[0]].to_laid_out_tensor()
    dtype, scalar = op.inputs[0].dtype, op._scalar
    known = isinstance(scalar, numbers.Real) and dtype.is_floating
    emit = tf.multiply if isinstance(op, _ops.ScalarMultiplyOperation) else tf.add

    def tf_fn(device: str, value: tf.Tensor) -> tf.Tensor:
        return emit(value, lowering.emitter.constant(device, float(scalar), dtype) if known else scalar)

    lowering.set_tensor_lowering(op.outputs[0], impl.per_device(tf_fn, x.tensor_list))


def _lower_constant(op: mtf.ops.Constant, lowering: Lowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    if not isinstance(op._value, (numbers.Real, bool)):  # an array: every device has a part of its own
        whole = tf.constant(op._value, output.dtype, output.shape.to_integer_list)
        lowering.set_tensor_lowering(output, impl.import_tf_tensor(output, whole))
        return
    # NumPy would cut off what does not fit; stock lowering stops there, too.
    if output.dtype.is_integer and (op._value % 1 or not output.dtype.min <= op._value <= output.dtype.max):
        raise UsageError(f"operation {op.name}: {op._value} is no {output.dtype.name}; give a whole number that it "
                         "holds, or make the constant of a floating type")
    shape = tuple(impl.slice_shape(output.shape))
    lowering.set_tensor_lowering(output, impl.per_device(
        lambda device: lowering.emitter.constant(device, op._value, output.dtype, shape)))


def _lower_range(op: mtf.ops.RangeOperation, lowering: Lowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    partition = impl.partition(output.shape)
    (size,) = partition.block_shape(output.shape.to_integer_list)
    lowering.set_tensor_lowering(output, impl.LaidOutTensor([
        lowering.emitter.constant(
            device, tuple(range(size * partition.block(position)[0], size * (partition.block(position)[0] + 1))),
            output.dtype)
        for position, device in enumerate(impl.devices)]))


def _constant_demands(operation: mtf.ops.Constant, demands: StockDemands) -> None:
    if getattr(operation._value, "shape", None) or isinstance(operation._value, (list, tuple)):
        demands.keep_whole(operation, names_of(operation), "its constant is one tensor")


def _added_sums(operation: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    output, (one, other) = operation.outputs[0], operation.inputs
    if one not in sums or other not in sums or not one.shape == other.shape == output.shape:
        return {}
    return {output: sums[one] if sums[one] == sums[other] else AddedSum(sums[one], sums[other])}


def _lower_summary(op: mtf.ops.ScalarSummaryOperation, lowering: Lowering) -> None:
    """Where every process has a graph of its own, each gets the number on its first device, with what that needs."""
    impl, x = lowering.mesh_impl(op), lowering.tensors[op.inputs[0]].to_laid_out_tensor()
    value = x.tensor_list[0]
    if lowering.emitter.first_devices is not None:
        value = impl.combine_slices(x.tensor_list, op.inputs[0].shape)
    tf.add_to_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY, (op.name, value))
    lowering.set_tensor_lowering(op.outputs[0], x)


_BINARY = Rule(lower=_lower_binary)
_SCALAR = Rule(lower=_lower_scalar)

add_rules({
    _ops.BinaryOpWithBroadcasting: _BINARY,
    _ops.MinMaxOperation: _BINARY,
    _ops.AddOperation: Rule(forwards_sums=True, lower=_lower_binary, stock_sums=_added_sums),
    _ops.ScalarMultiplyOperation: _SCALAR,
    _ops.ScalarAddOperation: _SCALAR,
    _ops.BroadcastOperation: Rule(role=always(REPEAT)),
    # No step makes constants.
    _ops.Constant: Rule(kind=always("none"), lower=_lower_constant, is_constant=True, stock_demands=_constant_demands),
    _ops.RangeOperation: Rule(kind=always("none"), lower=_lower_range, is_constant=True),
    # People see what goes through these.
    _ops.PrintOperation: Rule(
        kind=always("none"),
        reads=lambda operation: [*operation.inputs, *operation._data],
        # What is printed comes in the layout of the operation, too.
        spaces=lambda operation: [x.shape.dims for x in (*operation.inputs, *operation.outputs, *operation._data)]),
    _ops.ScalarSummaryOperation: Rule(kind=always("none"), has_effects=True, lower=_lower_summary),
})
