"""While loops: the body shares the layout of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pase_mtf.compat import mtf, tf

if TYPE_CHECKING:
    from pase_mtf.lowering.lowering import PlanLowering

__all__ = ["lower_while"]

_ops = mtf.ops


def _captured(op: mtf.ops.WhileLoopOperation) -> tuple[list[mtf.Tensor], set[mtf.Variable]]:
    """Tensors from outside that the loop uses, and the variables that it assigns."""
    made = {*op._cond_inputs, *op._body_inputs}
    used, assigned = [op._cond_output, *op._body_outputs], set()
    for inner in (*op._cond_ops, *op._body_ops):
        used += inner.inputs
        made |= set(inner.outputs)
        if isinstance(inner, _ops.WhileLoopOperation):
            more, variables = _captured(inner)
            used += more
            assigned |= variables
        elif isinstance(inner, _ops.Assign):
            assigned |= set(inner.variables)
    return [t for t in dict.fromkeys(used) if t not in made], assigned


def lower_while(op: mtf.ops.WhileLoopOperation, lowering: PlanLowering) -> None:
    """A loop, its body in the loop's own layout. What it captures is moved into that layout before it starts."""
    impl = lowering.mesh_impl(op)
    captured, assigned = _captured(op)
    values = {variable.outputs[0]: variable for variable in assigned}
    for t in captured:
        if t not in values:
            lowering.tensors[t].to_laid_out_tensor()
    before = {t: lowering.stored(t) for t in values}
    lazy: dict[int, Any] = {}

    def enter(placeholders: list[mtf.Tensor], tf_inputs: Any, inner: list[mtf.Operation]) -> None:
        for t, slices in zip(placeholders, tf_inputs, strict=False):
            lowering.tensors[t] = impl.LaidOutTensor(list(slices))
        # Variables that the body assigns have another value in every iteration.
        with tf.control_dependencies([x for slices in tf_inputs for x in slices]):
            for t, variable in values.items():
                lowering.tensors[t] = lowering.variables[variable].activation(
                    lowering.variables[variable].read())
        for operation in inner:
            lowering.lower_operation(operation)

    def tf_cond(*tf_inputs: Any) -> tf.Tensor:
        enter(op._cond_inputs, tf_inputs, op._cond_ops)
        return lowering.tensors[op._cond_output].to_laid_out_tensor().tensor_list[0]

    def tf_body(*tf_inputs: Any) -> list[list[tf.Tensor]]:
        enter(op._body_inputs, tf_inputs, op._body_ops)
        result = []
        for number, t in enumerate(op._body_outputs):
            laid_out = lowering.tensors[t]
            if number < len(op.inputs):
                result.append(laid_out.to_laid_out_tensor().tensor_list)
                continue
            # Accumulators stay spread over the devices until the loop has ended.
            if isinstance(laid_out, _ops.LazyAllreduceSum):
                lazy[number] = laid_out
                laid_out = laid_out.laid_out_input
            total = impl.per_device(
                lambda _, x, y: tf.add(x, y), laid_out.to_laid_out_tensor().tensor_list, tf_inputs[number])
            result.append(total.tensor_list)
        return result

    starts = [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in op.inputs]
    for t in op._body_outputs[len(op.inputs):]:
        shape = impl.slice_shape(t.shape)
        starts.append(impl.slicewise(lambda shape=shape, t=t: tf.zeros(shape, t.dtype)).tensor_list)
    results = tf.while_loop(tf_cond, tf_body, starts, back_prop=False, **{
        key: value for key, value in op._tf_kwargs.items() if key != "back_prop"})
    for t, stored in before.items():
        lowering.tensors[t] = stored
    for number, (slices, t) in enumerate(zip(results, op.outputs, strict=True)):
        laid_out = impl.LaidOutTensor(list(slices))
        if number in lazy:
            laid_out = _ops.LazyAllreduceSum(impl, laid_out, lazy[number].mesh_axes, lazy[number].add_counter_fn)
        lowering.set_tensor_lowering(t, laid_out)
