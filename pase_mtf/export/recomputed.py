"""What the backward pass computes once more (`mtf.recompute_grad`), and what is kept for it besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.export.phases import BACKWARD, FORWARD, forward_name
from pase_mtf.operations.facts import OperationFacts

__all__ = ["Recomputed", "recomputed"]


class Recomputed(NamedTuple):
    """`block` and `unread` of `graph.LayerOperation`."""

    block: int
    unread: tuple[int, ...]


def recomputed(graph: mtf.Graph, facts: Sequence[OperationFacts], phases: Sequence[str]) -> dict[int, Recomputed]:
    """The operations of functions that the backward pass computes again, those that do so, and the gradients of these,
    by index.

    Args:
      graph: of Mesh-TF.
      facts: of all operations.
      phases: of all operations.
    """
    block_of: dict[mtf.Operation, int] = {}
    for number, fact in enumerate((fact for fact in facts if fact.rule.function(fact.operation)), 1):
        block_of.update(dict.fromkeys(fact.rule.function(fact.operation), number))  # the outermost stands last
    # What computes an operation again carries its name, as nothing else does.
    block_named = {fact.name: block_of[fact.operation] for fact in facts
                   if fact.operation in block_of and phases[fact.index] == FORWARD}
    again = {fact.index: block_named[fact.name] for fact in facts
             if phases[fact.index] == BACKWARD and fact.name in block_named and fact.operation not in block_of}
    done = set(again.values())
    if not done:
        return {}
    names = {fact.name for fact in facts}
    for fact in facts:
        if phases[fact.index] == FORWARD and block_of.get(fact.operation) in done:
            again[fact.index] = block_of[fact.operation]
        elif phases[fact.index] == BACKWARD and fact.index not in again:
            block = block_named.get(forward_name(fact.name, names, graph) or "")
            if block in done:
                again[fact.index] = block
    read = _read_by([fact for fact in facts if fact.is_needed and phases[fact.index] == BACKWARD], facts)
    return {index: Recomputed(block, tuple(
        number for number, tensor in enumerate(facts[index].operation.outputs) if tensor not in read))
        for index, block in again.items()}


def _read_by(readers: Sequence[OperationFacts], facts: Sequence[OperationFacts]) -> set[mtf.Tensor]:
    """What some operations read, by the tensor that it is a view of, too."""
    found = {tensor for fact in readers for tensor in fact.sources}
    for fact in reversed(facts):
        if fact.rule.is_view:
            found |= {seen for seen, output in zip(fact.sources, fact.operation.outputs, strict=True)
                      if output in found}
    return found
