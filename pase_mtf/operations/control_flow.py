"""Loops, dependencies, and operations that only decide what is differentiated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.nodes import Nodes
from pase_mtf.operations.protocols import Lowering, StockDemands
from pase_mtf.operations.registry import Rule, add_rules, always, names_of, rule_of, splittable_dims
from pase_mtf.operations.stock_sums import PendingSum

_ops = mtf.ops


def _body(operation: mtf.ops.WhileLoopOperation) -> list[mtf.Operation]:
    return [*operation._cond_ops, *operation._body_ops]


def _loop_flops(operation: mtf.Operation) -> float:
    """The number of iterations is not in the graph: one of them."""
    rules = ((rule_of(inner), inner) for inner in operation._body_ops)
    return float(sum(rule.flops(inner) for rule, inner in rules if rule.kind(inner) != "none"))


def _loop_captures(operation: mtf.Operation) -> list[mtf.Tensor]:
    return [tensor for inner in _body(operation) for tensor in inner.inputs]


def _loop_splittable(operation: mtf.Operation) -> set[str]:
    """The body shares the layout of the loop: what one of its operations cannot split, the loop cannot."""
    names, whole = names_of(operation), set()
    for inner in _body(operation):
        inner_names = names_of(inner)
        names |= inner_names
        whole |= inner_names - splittable_dims(inner)
    return names - whole


def _loop_spaces(operation: mtf.Operation) -> list[list[mtf.Dimension]]:
    inner = itertools.chain.from_iterable(rule_of(inner).spaces(inner) for inner in _body(operation))
    return [*inner, *(tensor.shape.dims for tensor in operation.inputs)]


def _loop_demands(loop: mtf.Operation, demands: StockDemands) -> None:
    inner = {tensor for operation in _body(loop) for tensor in operation.outputs}
    inner |= {*loop._cond_inputs, *loop._body_inputs}
    for operation in _body(loop):
        demands.scan(operation, frozenset(inner))
    for tensor in loop._body_outputs[:len(loop.inputs)]:
        demands.need_reduced(loop, tensor, "a loop variable that is a pending sum in the next iteration")


def _loop_sums(loop: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    """What the body accumulates stays pending after the loop."""
    accumulated = zip(loop.outputs[len(loop.inputs):], loop._body_outputs[len(loop.inputs):], strict=True)
    return {output: sums[tensor] for output, tensor in accumulated if tensor in sums}


def _captured(op: mtf.ops.WhileLoopOperation) -> tuple[list[mtf.Tensor], set[mtf.Variable]]:
    """Tensors from outside that the loop uses, and the variables that it assigns."""
    made = {*op._cond_inputs, *op._body_inputs}
    used, assigned = [op._cond_output, *op._body_outputs], set()
    for inner in _body(op):
        used += inner.inputs
        made |= set(inner.outputs)
        if isinstance(inner, _ops.WhileLoopOperation):
            more, variables = _captured(inner)
            used += more
            assigned |= variables
        elif isinstance(inner, _ops.Assign):
            assigned |= set(inner.variables)
    return [t for t in dict.fromkeys(used) if t not in made], assigned


class _LoopLowering:
    """A loop while it is lowered, its body in the loop's own layout.

    Attributes:
      values: what the variables that the body assigns are read as -> the variable.
      pending: number of the accumulator -> the pending sum that it is in the body.
    """

    def __init__(self, op: mtf.ops.WhileLoopOperation, lowering: Lowering) -> None:
        self.op, self.lowering, self.impl = op, lowering, lowering.mesh_impl(op)
        captured, assigned = _captured(op)
        self.values = {variable.outputs[0]: variable for variable in assigned}
        for t in captured:
            if t not in self.values:
                lowering.tensors[t].to_laid_out_tensor()  # moved into the loop's layout before it starts
        self.pending: dict[int, mtf.ops.LazyAllreduceSum] = {}

    def _enter(self, placeholders: list[mtf.Tensor], tf_inputs: Sequence[Sequence[tf.Tensor]],
               inner: list[mtf.Operation]) -> None:
        lowering = self.lowering
        for t, slices in zip(placeholders, tf_inputs, strict=False):
            lowering.tensors[t] = self.impl.LaidOutTensor(list(slices))
        # Variables that the body assigns have another value in every iteration.
        with tf.control_dependencies([x for slices in tf_inputs for x in slices]):
            for t, variable in self.values.items():
                laid_out = lowering.variables[variable]
                lowering.tensors[t] = laid_out.activation(laid_out.read())
        for operation in inner:
            lowering.lower_operation(operation)

    def tf_cond(self, *tf_inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Whether to go on, as a TensorFlow tensor."""
        self._enter(self.op._cond_inputs, tf_inputs, self.op._cond_ops)
        return self.lowering.tensors[self.op._cond_output].to_laid_out_tensor().tensor_list[0]

    def tf_body(self, *tf_inputs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The slices of the loop variables and accumulators after an iteration."""
        self._enter(self.op._body_inputs, tf_inputs, self.op._body_ops)
        result = []
        for number, t in enumerate(self.op._body_outputs):
            laid_out = self.lowering.tensors[t]
            if number < len(self.op.inputs):
                result.append(laid_out.to_laid_out_tensor().tensor_list)
                continue
            # Accumulators stay spread over the devices until the loop has ended.
            if isinstance(laid_out, _ops.LazyAllreduceSum):
                self.pending[number] = laid_out
                laid_out = laid_out.laid_out_input
            total = self.impl.per_device(
                lambda _, x, y: tf.add(x, y), laid_out.to_laid_out_tensor().tensor_list, tf_inputs[number])
            result.append(total.tensor_list)
        return result

    def run(self) -> None:
        """Emits the loop and sets its outputs."""
        op, lowering, impl = self.op, self.lowering, self.impl
        before = {t: lowering.stored(t) for t in self.values}
        starts = [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in op.inputs]
        for t in op._body_outputs[len(op.inputs):]:
            shape = impl.slice_shape(t.shape)
            starts.append(impl.slicewise(lambda shape=shape, t=t: tf.zeros(shape, t.dtype)).tensor_list)
        results = tf.while_loop(self.tf_cond, self.tf_body, starts, back_prop=False, **{
            key: value for key, value in op._tf_kwargs.items() if key != "back_prop"})
        for t, stored in before.items():
            lowering.tensors[t] = stored
        for number, (slices, t) in enumerate(zip(results, op.outputs, strict=True)):
            laid_out = impl.LaidOutTensor(list(slices))
            if number in self.pending:
                inside = self.pending[number]
                laid_out = _ops.LazyAllreduceSum(impl, laid_out, inside.mesh_axes, inside.add_counter_fn)
            lowering.set_tensor_lowering(t, laid_out)


def _lower_loop(op: mtf.ops.WhileLoopOperation, lowering: Lowering) -> None:
    _LoopLowering(op, lowering).run()


def _depends_on(operation: mtf.Operation) -> list[mtf.Operation | mtf.Tensor]:
    return list(operation._dependencies)


def _depend_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    for tensor in operation._dependencies:
        if isinstance(tensor, mtf.Tensor):
            demands.need_reduced(operation, tensor, "a dependency on a pending sum")


def _lower_depend(op: mtf.ops.Depend, lowering: Lowering) -> None:
    control = []
    for dependency in op._dependencies:
        if isinstance(dependency, mtf.Operation):
            control.append(lowering.operations[dependency])
        else:
            control.extend(lowering.stored(dependency).to_laid_out_tensor().tensor_list)
    # What is resharded for x is shared with others, who do not wait.
    x = lowering.tensors[op.inputs[0]].to_laid_out_tensor()
    with tf.control_dependencies(control):
        lowering.set_tensor_lowering(op.outputs[0], lowering.mesh_impl(op).slicewise(tf.identity, x))


def _function_outputs(operation: mtf.Operation) -> list[mtf.Tensor]:
    """A custom gradient lists the inputs of its whole function, and reads what came out of it."""
    return list(operation._fn_outputs)


def _same_sums(operation: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    source = rule_of(operation).reads(operation)
    return {made: sums[tensor] for made, tensor in zip(operation.outputs, source, strict=True) if tensor in sums}


add_rules({
    _ops.WhileLoopOperation: Rule(
        flops=_loop_flops, captures=_loop_captures, body=_body, splittable=_loop_splittable, spaces=_loop_spaces,
        layer="loop", is_anchor=True, nodes=always(Nodes()), lower=_lower_loop, stock_demands=_loop_demands,
        stock_sums=_loop_sums),
    _ops.Depend: Rule(kind=always("none"), waits_for=_depends_on, lower=_lower_depend, stock_demands=_depend_demands),
    _ops.StopGradient: Rule(kind=always("none"), is_view=True, stock_sums=_same_sums),
    _ops.CustomGradientOperation: Rule(kind=always("none"), reads=_function_outputs, is_view=True, forwards_sums=True,
                                       stock_sums=_same_sums),
})
