"""Variables, what reads and sets them, and tensors that are imported whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from pase_mtf.compat import mtf
from pase_mtf.operations.nodes import Nodes
from pase_mtf.operations.protocols import Lowering, StockDemands, dims_of
from pase_mtf.operations.registry import Rule, add_rules, always

_ops = mtf.ops


def _takes_over(operation: mtf.Operation) -> bool:
    """Whether the variable becomes the value as it is: nothing is computed or copied."""
    return operation.assign_fn is _ops.assign_slice


def _assign_flops(operation: mtf.Operation) -> float:
    return 0.0 if _takes_over(operation) else float(sum(value.size for value in operation.inputs))


def _assign_nodes(operation: mtf.Operation, _: dict[Hashable, Nodes]) -> Nodes:
    # A value becomes the variable as it is; what is added is added in place: the variable is read and written, too.
    # (The traffic is a multiple of the value's bytes: an Assign has no output.)
    return Nodes(1, 0.0 if _takes_over(operation) else 3.0)


def _assign_pairs(operation: mtf.Operation) -> list[tuple[mtf.Operation, mtf.Tensor]]:
    return list(zip(operation.variables, operation.inputs, strict=True))


def _assign_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    for variable, value in _assign_pairs(operation):
        for one, other in zip(dims_of(variable.shape), dims_of(value.shape), strict=False):
            if one != other:
                demands.keep_whole(operation, {one[0], other[0]}, "variable and value name it differently")


def _lower_variable(op: mtf.Variable, lowering: Lowering) -> None:
    impl = lowering.mesh_impl(op)
    laid_out = impl.LaidOutVariable(op, impl)
    lowering.variables[op] = laid_out
    lowering.set_tensor_lowering(op.outputs[0], laid_out.activation(laid_out.read()))
    kind = "trainable" if op.trainable else "untrainable"
    lowering.add_counter(f"variables/{kind}", op.outputs[0].size)


def _lower_read(op: mtf.ops.ReadVariable, lowering: Lowering) -> None:
    laid_out = lowering.variables[op._var]
    lowering.set_tensor_lowering(op.outputs[0], laid_out.activation(laid_out.held() or laid_out.read_besides()))


def _lower_assign(op: mtf.ops.Assign, lowering: Lowering) -> None:
    """Every pair in the layout of its variable: there the slices are."""
    updates = []
    for variable, value in _assign_pairs(op):
        assign_fn, slices = lowering.new_value(variable, value, op.assign_fn)
        updates += lowering.variables[variable].updates(assign_fn, slices, lowering.not_waited_for(op))
    lowering.operations[op] = lowering.emitter.group(updates)


_VARIABLE = Rule(kind=always("none"), flops=always(0.0), is_variable=True, lower=_lower_variable)

add_rules({
    _ops.Variable: _VARIABLE,
    _ops.StackedVariable: dataclasses.replace(_VARIABLE, is_stacked=True),
    _ops.ReadVariable: Rule(kind=always("none"), leader=lambda operation: operation._var, lower=_lower_read,
                            holds_others=True),
    _ops.Assign: Rule(flops=_assign_flops, assigns=_assign_pairs, nodes=_assign_nodes, lower=_lower_assign,
                      stock_demands=_assign_demands, holds_others=True),
    _ops.ImportOperation: Rule(kind=always("none"), imported=lambda operation: operation._tf_tensor),
})
