"""All that is known of a Mesh-TF operation: one rule per Operation class, looked up by the class of an operation.

The families beside this file (einsum, convolution, ...) hold the rules of Mesh-TF's own classes. `register_operation`
adds one for a class of a user's. Whoever needs to know what an operation computes, costs, holds or lets be split asks
here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pase_mtf.arguments import checked_arguments
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.operations.nodes import Nodes
from pase_mtf.operations.protocols import LaidOut, Lowerable, Lowering, StockDemands, SummedRows
from pase_mtf.operations.stock_sums import PendingSum, ReducedSum
from pase_mtf.operations.trial import Trial, try_operation

__all__ = ["KINDS", "LoopParts", "LoopStage", "LoopVariable", "Rule", "add_rules", "always", "dim_sizes", "elements",
           "is_known", "names_of", "read_by", "register_operation", "rule_of", "splittable_dims", "tensors_of",
           "trial_of"]

KINDS = ("matmul", "convolution", "reduction", "pointwise", "gather", "none")
"""What an operation can be on a device; "none" costs nothing."""

# Dims that import_fully_replicated and anonymize make: unrelated tensors share these names, and the purpose of the
# names is that no layout mentions them.
_ANONYMOUS = "_anonymous_"


_T = TypeVar("_T")


def always(value: _T) -> Callable[..., _T]:
    """A function that returns the value, whatever it is called with."""
    return lambda *_: value


def tensors_of(operation: mtf.Operation) -> list[mtf.Tensor]:
    """Inputs, then outputs."""
    return [*operation.inputs, *operation.outputs]


def names_of(operation: mtf.Operation) -> set[str]:
    """The dim names of an operation's inputs and outputs."""
    return {name for tensor in tensors_of(operation) for name in tensor.shape.dimension_names}


def dim_sizes(tensors: Iterable[mtf.Tensor]) -> dict[str, int]:
    """Dim name -> size over several tensors, in order of appearance; of a name with two sizes the last."""
    return {dim.name: dim.size for tensor in tensors for dim in tensor.shape.dims}


def elements(operation: mtf.Operation) -> float:
    """The elements of the operation's largest tensor: one FLOP for each."""
    return float(max([tensor.size for tensor in tensors_of(operation)], default=0))


def _inputs(operation: mtf.Operation) -> list[mtf.Tensor]:
    return list(operation.inputs)


def _shapes(operation: mtf.Operation) -> list[list[mtf.Dimension]]:
    return [tensor.shape.dims for tensor in tensors_of(operation)]


def _demand_nothing(operation: mtf.Operation, demands: StockDemands) -> None:
    """What most operations demand of a layout: that which holds for all tensors."""


def _itself(operation: mtf.Operation) -> mtf.Operation:
    return operation


class LoopVariable(NamedTuple):
    """What a loop passes from one iteration to the next.

    Attributes:
      start: its value before the first iteration.
      seen: what the condition and the body read it as, in this order.
      next: what an iteration makes of it.
      output: what it is after the loop.
    """

    start: mtf.Tensor
    seen: tuple[mtf.Tensor, ...]
    next: mtf.Tensor
    output: mtf.Tensor


class LoopStage(NamedTuple):
    """The condition of a loop, or its body.

    Attributes:
      inputs: what it reads the variables as.
      operations: what it runs, in order.
      outputs: whether to go on; or the next values of the variables, then what is accumulated.
    """

    inputs: Sequence[mtf.Tensor]
    operations: Sequence[mtf.Operation]
    outputs: Sequence[mtf.Tensor]


class LoopParts(NamedTuple):
    """What goes into a loop, round in it, and comes out.

    Attributes:
      stages: its condition and its body.
      condition: whether to go on, made from what the variables are seen as.
      variables: passed from one iteration to the next.
      accumulators: (what an iteration makes, its sum over all iterations after the loop).
      is_plain: whether Mesh-TF's own code lowers it, by a loop of TensorFlow's without options.
      with_operations: a copy of the loop that runs others in place of the operations of its condition and its body.
    """

    stages: tuple[LoopStage, LoopStage]
    condition: mtf.Tensor
    variables: tuple[LoopVariable, ...]
    accumulators: tuple[tuple[mtf.Tensor, mtf.Tensor], ...]
    is_plain: bool
    with_operations: Callable[[Sequence[Lowerable], Sequence[Lowerable]], mtf.Operation]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is known of one Operation class; every field is a function of an operation of that class.

    Attributes:
      kind: one of `KINDS`.
      role: what the cost model must know besides: "convolution", "transposed convolution", "image gradient", "filter
        gradient", "rename" (a reshape), "shift", "top-k", or "".
      flops: floating point operations of the whole, unsplit operation: 2 per multiply-add, 1 per element otherwise.
      reads: the tensors whose values it reads.
      waits_for: further operations and tensors that have to be done before it.
      body: operations within it, which are run once in every iteration.
      loop: of a loop, its variables and accumulators; None of anything else.
      function: of one that stands for a function with a gradient of its own, the operations of that function.
      trips: how many iterations it makes, None where only running the program tells.
      contracted: for every output, the dims whose split leaves a partial sum of it on every device.
      broadcast_after: the numbers of the dims that its output gets after it is summed over the others.
      sum_is_pending: whether such partial sums stay as they are until somebody needs the sum (mtf's LazyAllreduceSum).
      forwards_sums: whether it works on partial sums, and leaves them to be summed after it.
      is_view: whether it returns what it reads as it is, so that a pending sum stays one.
      is_same: whether it returns the very object, so that who finishes the one sum has finished the other.
      splittable: names of the dims that can be split when our lowering lowers it; whether they divide is not asked.
      stock_splittable: those that stock Mesh-TF splits under a layout under which it lowers; None: the same.
      together: of dims that stock Mesh-TF has on one axis, name -> that which stands for both.
      spaces: groups of dims of which no two may be laid out on one mesh axis.
      layer: the kind of layer that it opens ("": as its kind says).
      is_anchor: whether it always opens a layer of its own.
      assigns: (variable, value) for every variable that it sets.
      is_variable: whether it is a variable.
      is_stacked: of a variable, whether it stands for several, each of which has a master of its own.
      is_random: whether it draws random numbers.
      has_effects: whether lowering it does more than to set its outputs.
      holds_others: whether it has a body, or works on variables, operations or tensors that are no inputs of it.
      imported: the TensorFlow tensor that it imports, or None.
      imported_slices: the slices, laid out beforehand, that it imports, or None.
      differentiates: the operation whose very tensors it has TensorFlow differentiate, or None.
      is_constant: whether its value is part of the program, and made in no step.
      shift: the (dim, offset) that it shifts by, or None.
      looks_up: where it sums rows that were looked up, as a product of one-hot vectors, what of; None of anything else.
      nodes: what it becomes on a device, given a dictionary of what was traced already; None: one node, which
        broadcasts inputs of fewer dims where it is elementwise.
      leader: the operation whose mesh implementation it has to share; itself for most.
      lower: lowers it by a PlanLowering; None: by the operation's own `lower`.
      stock_demands: tells what stock mtf.Lowering demands of a layout.
      stock_sums: given which tensors may be pending sums under stock mtf.Lowering, tensor -> pending sum for its
        outputs.
    """

    kind: Callable[[mtf.Operation], str] = always("pointwise")
    role: Callable[[mtf.Operation], str] = always("")
    flops: Callable[[mtf.Operation], float] = elements
    reads: Callable[[mtf.Operation], list[mtf.Tensor]] = _inputs
    waits_for: Callable[[mtf.Operation], Sequence[mtf.Operation | mtf.Tensor]] = always(())
    body: Callable[[mtf.Operation], Sequence[mtf.Operation]] = always(())
    loop: Callable[[mtf.Operation], LoopParts | None] = always(None)
    function: Callable[[mtf.Operation], Sequence[mtf.Operation]] = always(())
    trips: Callable[[mtf.Operation], int | None] = always(1)
    contracted: Callable[[mtf.Operation], Sequence[tuple[str, ...]]] = always(())
    broadcast_after: Callable[[mtf.Operation], tuple[int, ...]] = always(())
    sum_is_pending: Callable[[mtf.Operation], bool] = always(False)
    forwards_sums: bool = False
    is_view: bool = False
    is_same: bool = False
    splittable: Callable[[mtf.Operation], Iterable[str]] = names_of
    stock_splittable: Callable[[mtf.Operation], Iterable[str]] | None = None
    together: Callable[[mtf.Operation], Mapping[str, str]] = always({})
    spaces: Callable[[mtf.Operation], list[list[mtf.Dimension]]] = _shapes
    layer: str = ""
    is_anchor: bool = False
    assigns: Callable[[mtf.Operation], Sequence[tuple[mtf.Operation, mtf.Tensor]]] = always(())
    is_variable: bool = False
    is_stacked: bool = False
    is_random: bool = False
    has_effects: bool = False
    holds_others: bool = False
    imported: Callable[[mtf.Operation], tf.Tensor | None] = always(None)
    imported_slices: Callable[[mtf.Operation], LaidOut | None] = always(None)
    differentiates: Callable[[mtf.Operation], mtf.Operation | None] = always(None)
    is_constant: bool = False
    shift: Callable[[mtf.Operation], tuple[str, int] | None] = always(None)
    looks_up: Callable[[mtf.Operation], SummedRows | None] = always(None)
    nodes: Callable[[mtf.Operation, dict[Hashable, Nodes]], Nodes] | None = None
    leader: Callable[[mtf.Operation], mtf.Operation] = _itself
    lower: Callable[[mtf.Operation, Lowering], None] | None = None
    stock_demands: Callable[[mtf.Operation, StockDemands], None] = _demand_nothing
    stock_sums: Callable[[mtf.Operation, Mapping[mtf.Tensor, PendingSum]], dict[mtf.Tensor, PendingSum]] = always({})


_RULES: dict[type[mtf.Operation], Rule] = {}
_RESOLVED: dict[type[mtf.Operation], Rule] = {}  # what `rule_of` has found for classes, with the rules as they are


def add_rules(rules: Mapping[type, Rule]) -> None:
    """Takes up the rules of a family: Operation class -> its rule."""
    _RULES.update(rules)
    _RESOLVED.clear()


def _nearest(operation_class: type[mtf.Operation]) -> tuple[type[mtf.Operation], Rule] | None:
    for cls in operation_class.__mro__:
        if cls in _RULES:
            return cls, _RULES[cls]
    return None


def is_known(operation: mtf.Operation) -> bool:
    """Whether there is a rule for how the operation is lowered.

    A subclass with a lowering of its own is another operation, whatever it inherits: it is known once it is registered.
    """
    found = _nearest(type(operation))
    return found is not None and type(operation).lower is found[0].lower


def rule_of(operation: mtf.Operation) -> Rule:
    """The rule of an operation: its class's, or the nearest parent's.

    Of an unknown class (see `is_known`) the parent's kind and FLOPs are taken; what it can split is found by trying.
    """
    rule = _RESOLVED.get(type(operation))
    if rule is None:
        found = _nearest(type(operation))
        known = found is not None and type(operation).lower is found[0].lower
        rule = found[1] if found and known else dataclasses.replace(found[1] if found else Rule(), **_AS_TRIED)
        _RESOLVED[type(operation)] = rule
    return rule


def read_by(operation: mtf.Operation) -> list[mtf.Tensor]:
    """What goes into an operation, and what it reads besides, each once. What returns the very object that it reads
    reads nothing else: the inputs of a function with a gradient of its own are read by the function's operations."""
    rule = rule_of(operation)
    return list(dict.fromkeys((*(() if rule.is_same else operation.inputs), *rule.reads(operation))))


def trial_of(operation: mtf.Operation) -> Trial | None:
    """What trying an operation of an unknown class showed; None of a known one."""
    return None if is_known(operation) else try_operation(operation)


def _tried_splits(operation: mtf.Operation) -> tuple[str, ...]:
    return try_operation(operation).splits


def _tried_contracted(operation: mtf.Operation) -> tuple[tuple[str, ...], ...]:
    return try_operation(operation).contracted or tuple(() for _ in operation.outputs)


def _tried_spaces(operation: mtf.Operation) -> list[list[mtf.Dimension]]:
    dims = {dim.name: dim for tensor in tensors_of(operation) for dim in tensor.shape.dims}
    return [*_shapes(operation), *([dims[one], dims[other]] for one, other in try_operation(operation).apart)]


def _tried_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    trial, name = try_operation(operation), type(operation).__name__
    if trial.untried:
        qualified = f"{type(operation).__module__}.{type(operation).__qualname__}"
        demands.keep_whole(operation, names_of(operation), f"{name} is unknown and cannot be tried: {trial.untried}; "
                           f"say what it can split: pase_mtf.register_operation({qualified}, splittable=[])",
                           known=False)
        return
    for dim, reason in trial.whole.items():
        demands.keep_whole(operation, [dim], f"{name}, {reason}", known=dim not in trial.alone)
    for space in _tried_spaces(operation):
        demands.keep_apart(operation, tuple((dim.name, dim.size) for dim in space), f"a {name}")
    for number in trial.reduced:
        demands.need_reduced(operation, operation.inputs[number], f"{name} gives wrong values of a pending sum")


def _tried_sums(operation: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    trial, found = try_operation(operation), {}
    for number, (output, dims) in enumerate(zip(operation.outputs, trial.pending, strict=False)):
        source = operation.inputs[trial.passed[number]] if number in trial.passed else None
        if source in sums:
            found[output] = sums[source]
        elif dims:
            found[output] = ReducedSum(dims)
    return found


def _lower_as_tried(operation: mtf.Operation, lowering: Lowering) -> None:
    """By its own code, which is given no pending sum that it cannot read. What comes from another layout is summed on
    its way here, and stays known by that sum: its gradient differentiates the very tensors that are read here."""
    impl = lowering.mesh_impl(operation)
    reduced = [operation.inputs[number] for number in try_operation(operation).reduced]
    kept = {tensor: lowering.stored(tensor) for tensor in reduced
            if isinstance(lowering.read(tensor, impl), mtf.ops.LazyAllreduceSum)}
    lowering.tensors.update({tensor: laid_out.to_laid_out_tensor() for tensor, laid_out in kept.items()})
    operation.lower(lowering)
    lowering.tensors.update(kept)


_AS_TRIED: dict[str, Any] = {
    "splittable": _tried_splits, "stock_splittable": None, "together": always({}), "contracted": _tried_contracted,
    "broadcast_after": always(()), "sum_is_pending": always(False), "forwards_sums": False, "is_view": False,
    "is_same": False,
    "spaces": _tried_spaces, "stock_demands": _tried_demands, "stock_sums": _tried_sums, "lower": _lower_as_tried,
    "looks_up": always(None)}


def splittable_dims(operation: mtf.Operation, *, stock: bool = False) -> frozenset[str]:
    """The names of the dims that can truly be split when our lowering lowers this operation.

    What an operation declares (`splittable_dims`) and what really lowers to right values differ both ways in Mesh-TF
    0.1.21, see the rules. Not decided here: sizes (the number of a dim's shards divides every size it has in the
    operation) and whether two dims of one tensor share a mesh axis (they must not).

    Args:
      operation: any Mesh-TF operation. One of an unknown class may split what trying it shows.
      stock: those that stock mtf.Lowering splits instead, under a layout under which it lowers; which these are
        `layout.legality` decides.

    Returns:
      A subset of the dim names of its inputs and outputs.
    """
    twice: set[str] = set()
    for tensor in tensors_of(operation):
        names = tensor.shape.dimension_names
        if len(set(names)) < len(names):
            twice |= {name for name in names if names.count(name) > 1}  # would put two dims on one axis
    rule = rule_of(operation)
    found = (stock and rule.stock_splittable) or rule.splittable
    return frozenset(name for name in found(operation)
                     if name not in twice and not name.startswith(_ANONYMOUS))


@checked_arguments
def register_operation(operation_class: type[mtf.Operation], *,
                       splittable: Callable[[mtf.Operation], Iterable[str]] | Sequence[str],
                       kind: str | None = None, flops: Callable[[mtf.Operation], float] | None = None,
                       contracted: Callable[[mtf.Operation], Sequence[tuple[str, ...]]] | None = None,
                       lower: Callable[[mtf.Operation, Lowering], None] | None = None) -> None:
    """Tells all that has to be known of an Operation class of your own.

    What is left out is as for the nearest parent class that is known, mtf.Operation itself counting as an elementwise
    function.

    Args:
      operation_class: a subclass of mtf.Operation; its subclasses that keep its `lower` follow the same rule.
      splittable: names of the dims that may be split, or a function from an operation of that class to them. Splitting
        them must lower to right values under `lower`, and under the class's own `lower` where the program is lowered by
        mtf.Lowering.
      kind: what it is on a device, one of `KINDS`; decides at which rate its FLOPs are costed.
      flops: floating point operations of the whole, unsplit operation.
      contracted: for every output, the dims whose split leaves a partial sum of it on every device, which `lower` sums
        up; their all-reduce is costed.
      lower: lowers it, given the operation and the lowering; by default the class's own `lower` is called.

    Raises:
      UsageError: no Operation class, or an unknown kind.

    Example:
      register_operation(Reversed, splittable=["batch"])
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"register_operation: kind={kind!r} of {operation_class.__name__} is unknown; "
                         f"choose from {', '.join(KINDS)}")
    found = _nearest(operation_class)
    own_lower = found is None or operation_class.lower is not found[0].lower
    rule = found[1] if found else Rule()
    changes: dict[str, Any] = {
        "splittable": splittable if callable(splittable) else always(tuple(splittable)),
        "stock_splittable": None,
        "lower": lower if lower or own_lower else rule.lower}
    if own_lower or lower:
        changes |= {"looks_up": always(None), "broadcast_after": always(())}
    if own_lower:
        changes |= {"stock_demands": _as_registered, "together": always({}),
                    "forwards_sums": False, "is_view": False, "is_same": False}
    if kind is not None:
        changes |= {"kind": always(kind), "layer": ""}
    if flops is not None:
        changes["flops"] = flops
    if contracted is not None:
        changes |= {"contracted": contracted, "sum_is_pending": always(False)}
    add_rules({operation_class: dataclasses.replace(rule, **changes)})


def _as_registered(operation: mtf.Operation, demands: StockDemands) -> None:
    demands.keep_whole(operation, names_of(operation) - splittable_dims(operation),
                       f"{type(operation).__name__} is registered as unable to split it")
