"""What the backward pass computes once more (`mtf.recompute_grad`), when it is there, and what is kept for it besides.

What is computed again is held until the last gradient has read it, and the gradients until they have been read: a
device holds most of it at a few moments, and the one at which it is most decides. Which one that is depends on how
tensors are split, so the export tells all that may be it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.export.phases import BACKWARD, FORWARD, forward_name
from pase_mtf.operations.facts import OperationFacts

__all__ = ["Recomputed", "recomputed"]

# Moments that follow each other are taken for one at which all is there that is there at any of them, if that adds no
# more than this to the largest.
_JOINED = 0.05


class Recomputed(NamedTuple):
    """`block`, `unread` and `moments` of `graph.LayerOperation`."""

    block: int
    unread: tuple[int, ...] = ()
    moments: tuple[tuple[int, ...], ...] = ()


def recomputed(graph: mtf.Graph, facts: Sequence[OperationFacts], phases: Sequence[str],
               layer_of: Callable[[mtf.Operation], int]) -> dict[int, Recomputed]:
    """The operations of functions that the backward pass computes again, those that do so, and the gradients of these,
    by index.

    Args:
      graph: of Mesh-TF.
      facts: of all operations.
      phases: of all operations.
      layer_of: the number of the layer that an operation is in.
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
    backward = [fact for fact in facts if fact.is_needed and phases[fact.index] == BACKWARD]
    read = _read_by(backward, facts)
    moments = _moments(backward, again, layer_of)
    found = {}
    for index, block in again.items():
        outputs = facts[index].operation.outputs
        held = tuple([moments.get(tensor, ()) for tensor in outputs])
        found[index] = Recomputed(block, tuple(number for number, tensor in enumerate(outputs) if tensor not in read),
                                  held if any(held) else ())
    return found


def _read_by(readers: Sequence[OperationFacts], facts: Sequence[OperationFacts]) -> set[mtf.Tensor]:
    """What some operations read, by the tensor that it is a view of, too."""
    found = {tensor for fact in readers for tensor in fact.sources}
    for fact in reversed(facts):
        if fact.rule.is_view:
            found |= {seen for seen, output in zip(fact.sources, fact.operation.outputs, strict=True)
                      if output in found}
    return found


# -- moments ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class _Moment:
    """What is there at once.

    Attributes:
      tensors: what is there; of moments that were joined, at any of them.
      nbytes: the most that is there at one of them, unsplit.
    """

    tensors: frozenset[mtf.Tensor]
    nbytes: int


def _size(tensor: mtf.Tensor) -> int:
    return int(tensor.size) * int(tensor.dtype.size)


def _moments(backward: Sequence[OperationFacts], block_of: Mapping[int, int],
             layer_of: Callable[[mtf.Operation], int]) -> dict[mtf.Tensor, tuple[int, ...]]:
    """The moments at which what the blocks make in the backward pass is there, as far as one of them may be that of the
    most bytes under some split.

    Args:
      backward: what runs in the backward pass, in the order in which it does.
      block_of: index of an operation -> its block.
      layer_of: the number of the layer that an operation is in.
    """
    found: dict[mtf.Tensor, list[int]] = collections.defaultdict(list)
    numbers = itertools.count(1)
    by_block: dict[int, list[frozenset[mtf.Tensor]]] = {}
    for block, held in _fullest(backward, block_of):
        by_block.setdefault(block, []).append(held)
    for moments in by_block.values():
        for held in _that_may_be_largest(_joined(moments), layer_of):
            number = next(numbers)
            for tensor in held:
                found[tensor].append(number)
    return {tensor: tuple(moments) for tensor, moments in found.items()}


def _fullest(backward: Sequence[OperationFacts],
             block_of: Mapping[int, int]) -> Iterator[tuple[int, frozenset[mtf.Tensor]]]:
    """(block, what is there of all that the blocks make) whenever something is given up after something was made."""
    origin: dict[mtf.Tensor, mtf.Tensor] = {}  # of what costs nothing: what it hands on
    last: dict[mtf.Tensor, int] = {}  # who reads it last
    for fact in backward:
        sources = [origin.get(tensor, tensor) for tensor in fact.sources]
        last.update(dict.fromkeys(sources, fact.index))
        if fact.kind == "none" and fact.rule.loop(fact.operation) is None:
            origin.update(zip(fact.operation.outputs, sources, strict=False))
    ends: dict[int, list[mtf.Tensor]] = collections.defaultdict(list)
    for tensor, index in last.items():
        ends[index].append(tensor)
    there: dict[mtf.Tensor, None] = {}
    block, grown = 0, False
    for fact in backward:
        if fact.index in block_of and fact.kind != "none":
            made = [tensor for tensor in fact.operation.outputs if tensor in last]
            if made:
                there.update(dict.fromkeys(made))
                block, grown = block_of[fact.index], True
        ended = [tensor for tensor in ends.get(fact.index, ()) if tensor in there]
        if ended and grown:
            yield block, frozenset(there)
            grown = False
        for tensor in ended:
            del there[tensor]


def _joined(moments: Iterable[frozenset[mtf.Tensor]]) -> list[_Moment]:
    """Fewer moments, at none of which less is there."""
    found: list[_Moment] = []
    for held in moments:
        nbytes = sum(map(_size, held))
        if found:
            before = found[-1]
            together, largest = before.tensors | held, max(before.nbytes, nbytes)
            if sum(map(_size, together)) <= (1 + _JOINED) * largest:
                found[-1] = _Moment(together, largest)
                continue
        found.append(_Moment(held, nbytes))
    return found


def _that_may_be_largest(moments: Sequence[_Moment],
                         layer_of: Callable[[mtf.Operation], int]) -> list[frozenset[mtf.Tensor]]:
    """Without those at which, of the tensors that are split alike, never more is there than at another one."""
    kept: list[tuple[collections.Counter[tuple[int, frozenset[str]]], _Moment]] = []
    for moment in sorted(moments, key=lambda moment: -sum(map(_size, moment.tensors))):
        nbytes: collections.Counter[tuple[int, frozenset[str]]] = collections.Counter()
        for tensor in moment.tensors:
            nbytes[layer_of(tensor.operation), frozenset(tensor.shape.dimension_names)] += _size(tensor)
        if not any(nbytes <= other for other, _ in kept):
            kept.append((nbytes, moment))
    return [moment.tensors for _, moment in kept]
