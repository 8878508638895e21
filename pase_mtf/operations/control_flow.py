"""Loops, dependencies, and operations that only decide what is differentiated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.nodes import Nodes
from pase_mtf.operations.protocols import Lowerable, Lowering, StockDemands
from pase_mtf.operations.registry import (
    LoopParts,
    LoopStage,
    LoopVariable,
    Rule,
    add_rules,
    always,
    is_known,
    read_by,
    rule_of,
)
from pase_mtf.operations.stock_sums import PendingSum
from pase_mtf.operations.trips import static_trips, value_of

_ops = mtf.ops


def _body(operation: mtf.ops.WhileLoopOperation) -> list[mtf.Operation]:
    return [*operation._cond_ops, *operation._body_ops]


def _loop_parts(op: mtf.ops.WhileLoopOperation) -> LoopParts:
    count = len(op.inputs)
    stages = (LoopStage(op._cond_inputs, op._cond_ops, [op._cond_output]),
              LoopStage(op._body_inputs, op._body_ops, op._body_outputs))
    variables = (LoopVariable(*entry) for entry in zip(
        op.inputs, zip(op._cond_inputs, op._body_inputs, strict=True), op._body_outputs, op.outputs, strict=False))
    return LoopParts(
        stages, op._cond_output, tuple(variables),
        tuple(zip(op._body_outputs[count:], op.outputs[count:], strict=True)),
        is_plain=type(op).lower is _ops.WhileLoopOperation.lower and not op._tf_kwargs,
        with_operations=functools.partial(_with_operations, op))


def _with_operations(op: mtf.ops.WhileLoopOperation, condition: Sequence[Lowerable],
                     body: Sequence[Lowerable]) -> mtf.Operation:
    made = copy.copy(op)
    made._cond_ops, made._body_ops = list(condition), list(body)
    return made


def _loop_trips(op: mtf.ops.WhileLoopOperation) -> int | None:
    most = op._tf_kwargs.get("maximum_iterations")
    if isinstance(most, tf.Tensor):
        most = value_of(most)
        if most is None:
            return None
    return static_trips(_loop_parts(op), *([] if most is None else [int(most)]))


def _loop_reads(op: mtf.ops.WhileLoopOperation) -> list[mtf.Tensor]:
    """What goes round in it; what it accumulates is added up where it is made."""
    return [op._cond_output, *op._body_outputs[:len(op.inputs)]]


def _loop_demands(loop: mtf.Operation, demands: StockDemands) -> None:
    body = _body(loop)
    inner = frozenset((*loop._cond_inputs, *loop._body_inputs,
                       *(tensor for operation in body for tensor in operation.outputs)))
    for operation in body:
        demands.scan(operation, inner)
    for tensor in loop._body_outputs[:len(loop.inputs)]:
        demands.need_reduced(loop, tensor, "a loop variable that is a pending sum in the next iteration")


def _loop_sums(loop: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    """What the body accumulates stays pending after the loop."""
    accumulated = zip(loop.outputs[len(loop.inputs):], loop._body_outputs[len(loop.inputs):], strict=True)
    return {output: sums[tensor] for output, tensor in accumulated if tensor in sums}


_Reader: TypeAlias = "mtf.Operation | mtf.Tensor | None"


def _captured(op: mtf.ops.WhileLoopOperation) -> tuple[list[tuple[mtf.Tensor, _Reader]], set[mtf.Variable]]:
    """(tensor from outside, what in the loop has the layout that it is read in: an operation; of an inner loop that it
    goes into, the output; None: that it was made in), and the variables that the loop assigns."""
    made = {*op._cond_inputs, *op._body_inputs}
    used: list[tuple[mtf.Tensor, _Reader]] = [*zip(op._body_outputs, op.outputs[:len(op.inputs)], strict=False)]
    used += [(tensor, None) for tensor in op._body_outputs[len(op.inputs):]]  # added up where it was made
    assigned = set[mtf.Variable]()
    for inner in _body(op):
        made |= set(inner.outputs)
        if isinstance(inner, _ops.WhileLoopOperation):
            more, variables = _captured(inner)
            used += [*zip(inner.inputs, inner.outputs, strict=False), *more]
            assigned |= variables
        else:
            used += [(tensor, inner) for tensor in read_by(inner)]
            rule = rule_of(inner)
            if rule.role(inner) == "rename" or rule.assigns(inner) or not is_known(inner):
                # They read what is stored, in a layout of their own: its sum has to be there outside.
                used += [(tensor, None) for tensor in read_by(inner)]
            used += [(tensor, None) for tensor in rule.waits_for(inner) if isinstance(tensor, mtf.Tensor)]
            if isinstance(inner, _ops.Assign):
                assigned |= set(inner.variables)
    return [pair for pair in dict.fromkeys(used) if pair[0] not in made], assigned


def _read_besides(op: mtf.ops.WhileLoopOperation) -> list[mtf.Variable]:
    """The variables that a loop reads once more (`mtf.read_variable`), and inner ones do."""
    found: list[mtf.Variable] = []
    for inner in _body(op):
        if isinstance(inner, _ops.WhileLoopOperation):
            found += _read_besides(inner)
        elif isinstance(inner, _ops.ReadVariable):
            found.append(inner._var)
    return list(dict.fromkeys(found))


def _operations_before(op: mtf.ops.WhileLoopOperation, lowering: Lowering) -> list[tf.Operation]:
    """The operations outside of a loop that something in it waits for."""
    found: list[tf.Operation] = []
    for inner in _body(op):
        if isinstance(inner, _ops.WhileLoopOperation):
            found += _operations_before(inner, lowering)
        found += [lowering.operations[other] for other in rule_of(inner).waits_for(inner)
                  if isinstance(other, mtf.Operation) and other in lowering.operations]
    return found


class _LoopLowering:
    """A loop while it is lowered, every operation of its body in a layout of its own.

    What goes round stays in the layout of the operation that makes it, and what is accumulated is added up in
    it (`flow.Flow.owner`).

    Attributes:
      impls: of every output of the loop, the mesh implementation of what it is in the body.
      values: what the variables that the body assigns are read as -> the variable.
      before: what the loop waits for besides its inputs.
      pending: number of the accumulator -> the pending sum that it is in the body.
      begun: variable that the body reads once more, and does not assign -> its slices as the loop begins.
    """

    def __init__(self, op: mtf.ops.WhileLoopOperation, lowering: Lowering) -> None:
        self.op, self.lowering = op, lowering
        self.impls = [lowering.producer_impl(t) for t in op.outputs]
        captured, assigned = _captured(op)
        self.values = {variable.outputs[0]: variable for variable in assigned}
        self.before: list[tf.Tensor | tf.Operation] = []
        for t, reader in captured:
            if t in self.values:
                continue
            # Summed, and moved to where it is read, before the loop starts, once.
            if reader is None:
                laid_out = lowering.stored(t).to_laid_out_tensor()
            else:
                impl = (lowering.producer_impl(reader) if isinstance(reader, mtf.Tensor)
                        else lowering.mesh_impl(reader))
                laid_out = lowering.read(t, impl).to_laid_out_tensor()
            self.before += laid_out.tensor_list
        self.before += _operations_before(op, lowering)
        self.pending: dict[int, mtf.ops.LazyAllreduceSum] = {}
        self.begun: dict[mtf.Variable, list[tf.Tensor]] = {}

    def _enter(self, placeholders: list[mtf.Tensor], tf_inputs: Sequence[Sequence[tf.Tensor]],
               inner: list[mtf.Operation]) -> None:
        lowering = self.lowering
        for t, impl, slices in zip(placeholders, self.impls, tf_inputs, strict=False):
            lowering.tensors[t] = impl.LaidOutTensor(list(slices))
        # Variables that the body assigns have another value in every iteration.
        # In a scope of their own: a process casts its own slices only, and ranks compare the names of later scopes.
        with tf.name_scope("variables"), lowering.emitter.after(x for slices in tf_inputs for x in slices):
            for t, variable in self.values.items():
                laid_out = lowering.variables[variable]
                lowering.tensors[t] = laid_out.activation(laid_out.read_anew())
        for variable, values in self.begun.items():
            lowering.variables[variable].hold(values)
        for operation in inner:
            lowering.lower_operation(operation)

    def tf_cond(self, *tf_inputs: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Sequence[str]]:
        """Whether to go on, on every device that knows, and these devices."""
        self._enter(self.op._cond_inputs, tf_inputs, self.op._cond_ops)
        answer = self.lowering.tensors[self.op._cond_output].to_laid_out_tensor()
        return answer.tensor_list, self.lowering.mesh_impl(self.op).devices

    def tf_body(self, *tf_inputs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The slices of the loop variables and accumulators after an iteration."""
        self._enter(self.op._body_inputs, tf_inputs, self.op._body_ops)
        result = []
        for number, (t, impl) in enumerate(zip(self.op._body_outputs, self.impls, strict=True)):
            laid_out = self.lowering.read(t, impl)
            if number < len(self.op.inputs):
                result.append(laid_out.to_laid_out_tensor().tensor_list)
                continue
            # Accumulators stay spread over the devices until the loop has ended.
            if isinstance(laid_out, _ops.LazyAllreduceSum):
                self.pending[number] = laid_out
                laid_out = laid_out.laid_out_input
            total = impl.per_device(
                lambda _, x, y: tf.add(x, y), laid_out.to_laid_out_tensor().tensor_list, tf_inputs[number])
            result.append(total.tensor_list)
        return result

    def run(self) -> None:
        """Emits the loop and sets its outputs."""
        op, lowering = self.op, self.lowering
        before = {t: lowering.stored(t) for t in self.values}
        starts = [lowering.read(t, impl).to_laid_out_tensor().tensor_list
                  for t, impl in zip(op.inputs, self.impls, strict=False)]
        for t, impl in zip(op._body_outputs[len(op.inputs):], self.impls[len(op.inputs):], strict=True):
            shape = impl.slice_shape(t.shape)
            starts.append(impl.slicewise(lambda shape=shape, t=t: tf.zeros(shape, t.dtype)).tensor_list)
        assigned = set(self.values.values())
        for variable in _read_besides(op):
            if variable not in assigned:
                laid_out = lowering.variables[variable]
                # Updates that follow wait for this: what was not updated before is read without waiting for anything.
                waits = [*(x for slices in starts for x in slices), *self.before] if laid_out.is_updated() else []
                with lowering.emitter.after(waits):
                    self.begun[variable] = laid_out.held() or laid_out.read_besides()
        # One iteration at a time, or the tensors of several are there at once.
        options = {"parallel_iterations": 1, **op._tf_kwargs}
        options.pop("back_prop", None)
        # Who reads outside of the loop what it assigns reads it before, however often.
        again = [x for variable in self.values.values() for x in lowering.variables[variable].read_so_far()]
        # What it captures may wait in another process for an update of what it assigns, a part of which is here.
        captured = [x for x in self.before if not isinstance(x, tf.Operation)] if self.values else []
        with tf.control_dependencies(lowering.emitter.use(captured)), lowering.emitter.after([*again, *(
                x for stored in before.values() for x in stored.to_laid_out_tensor().all_slices)]):
            results = lowering.emitter.while_loop(
                self.tf_cond, self.tf_body, starts, [impl.devices for impl in self.impls], options)
        for t, stored in before.items():
            lowering.tensors[t] = stored
        for number, (slices, t, impl) in enumerate(zip(results, op.outputs, self.impls, strict=True)):
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
    with lowering.emitter.after(control):
        lowering.set_tensor_lowering(op.outputs[0], lowering.mesh_impl(op).slicewise(tf.identity, x))


def _function_outputs(operation: mtf.Operation) -> list[mtf.Tensor]:
    """A custom gradient lists the inputs of its whole function, and reads what came out of it."""
    return list(operation._fn_outputs)


def _function(operation: mtf.Operation) -> list[mtf.Operation]:
    return list(operation._forward_operations)


def _same_sums(operation: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    source = rule_of(operation).reads(operation)
    return {made: sums[tensor] for made, tensor in zip(operation.outputs, source, strict=True) if tensor in sums}


add_rules({
    _ops.WhileLoopOperation: Rule(
        kind=always("none"), reads=_loop_reads, body=_body, loop=_loop_parts, trips=_loop_trips, layer="loop",
        is_anchor=True, nodes=always(Nodes()), lower=_lower_loop, stock_demands=_loop_demands, stock_sums=_loop_sums,
        holds_others=True),
    _ops.Depend: Rule(kind=always("none"), waits_for=_depends_on, lower=_lower_depend, stock_demands=_depend_demands,
                      holds_others=True),
    _ops.StopGradient: Rule(kind=always("none"), is_view=True, is_same=True, forwards_sums=True, stock_sums=_same_sums),
    _ops.CustomGradientOperation: Rule(kind=always("none"), reads=_function_outputs, is_view=True, is_same=True,
                                       forwards_sums=True, function=_function, stock_sums=_same_sums,
                                       holds_others=True),
})
