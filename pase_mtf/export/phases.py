"""In which phase of a training step every operation of an mtf.Graph runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pase_mtf.compat import mtf
from pase_mtf.operations.facts import OperationFacts

__all__ = ["BACKWARD", "FORWARD", "UPDATE", "forward_name", "phases_of"]

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def phases_of(graph: mtf.Graph, facts: Sequence[OperationFacts]) -> list[str]:
    """The phase of every operation: "forward", "backward" or "update".

    Gradient operations carry the name of their forward operation and "/gradients/". What stands between gradients
    (recomputed forward operations) is backward too; what nothing but assignments uses is update.

    Args:
      graph: a Mesh-TF graph.
      facts: of its operations.
    """
    names = {fact.name for fact in facts}
    named = [forward_name(fact.name, names, graph) is not None for fact in facts]
    sources = [sorted({maker for maker in fact.makers if maker >= 0}) for fact in facts]
    consumers: list[list[int]] = [[] for _ in facts]
    after = list(named)  # a gradient leads to it
    for index, inputs in enumerate(sources):
        for source in inputs:
            consumers[source].append(index)
            after[index] |= after[source]
    before = list(named)  # it leads to a gradient
    updates = [bool(fact.assigns) for fact in facts]
    for index in range(len(facts) - 1, -1, -1):
        before[index] |= any(before[consumer] for consumer in consumers[index])
        if consumers[index] and not named[index]:
            updates[index] |= all(updates[consumer] for consumer in consumers[index])
    result = []
    for index, fact in enumerate(facts):
        if named[index] or (after[index] and before[index]):
            phase = BACKWARD
        elif updates[index] or after[index]:
            # A gradient that is added up in another type, by a loop or over the microbatches of a pipeline, is one
            # still: what it is part of is summed after the last.
            passed = after[index] and fact.rule.forwards_sums and len(fact.reads) == 1 and (
                bool(fact.loops) or fact.outputs[0].dtype != fact.reads[0].dtype)
            phase = BACKWARD if passed else UPDATE
        elif not sources[index] and consumers[index] and not fact.rule.is_variable and all(
                named[consumer] for consumer in consumers[index]):
            phase = BACKWARD  # the gradient of the loss with respect to itself
        else:
            phase = FORWARD
        result.append(phase)
    return result


def forward_name(name: str, names: Collection[str], graph: mtf.Graph) -> str | None:
    """The forward operation that a gradient operation was made for, or None if it is no gradient operation.

    Args:
      name: of an operation.
      names: of all operations of the graph.
      graph: knows the variable scope in which gradients were made.
    """
    scope = graph.captured_variable_scope.name
    while "/gradients/" in name:
        name = name.rsplit("/gradients/", 1)[0]
        # Mesh-TF puts the scope in front: with it, the name may be that of another operation, in a scope called alike.
        if scope and name.startswith(scope + "/") and name[len(scope) + 1:] in names:
            return name[len(scope) + 1:]
        if name in names:
            return name
    return None
