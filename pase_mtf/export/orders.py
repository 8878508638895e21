"""Orders in which TensorFlow may run the operations of a step."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Collection, Sequence

from pase_mtf.compat import mtf
from pase_mtf.export.phases import BACKWARD, UPDATE
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.flow import Flow

__all__ = ["awaited_by", "in_turns", "late_sums", "ordered", "runs_at_once"]


def awaited_by(fact: OperationFacts, maker: dict[mtf.Tensor, int], flow: Flow) -> set[int]:
    """What an operation waits for.

    Args:
      fact: of the operation.
      maker: tensor -> the index of the operation that makes it.
      flow: of the graph.

    Returns:
      Indices of operations, its own not among them.
    """
    found = set(fact.makers)
    if flow.sums:  # a loop has added up when it has ended
        found.update([maker[made] for made in map(flow.made, fact.reads) if made in flow.sums])
        if fact.operation in flow.parts:
            found.update([maker.get(flow.origin(inside), -1) for inside, _ in flow.parts[fact.operation].accumulators])
    for dependency in fact.rule.waits_for(fact.operation):
        outputs = dependency.outputs if isinstance(dependency, mtf.Operation) else [dependency]
        found.update([maker.get(flow.origin(tensor), -1) for tensor in outputs])
    return found - {-1, fact.index}


def ordered(running: Sequence[OperationFacts], awaited: dict[int, set[int]],
            at_once: Collection[int] | None, late: Collection[int] = ()) -> list[OperationFacts]:
    """The operations in an order in which they can run.

    Args:
      running: in the order of the program.
      awaited: index -> those that it waits for.
      at_once: those that run as soon as they can, the others in the order of the program; None: first come, first
        served.
      late: those that are left until nothing else can run.
    """
    of_index = {fact.index: fact for fact in running}
    left = {index: len(others & of_index.keys()) for index, others in awaited.items()}
    waiting: dict[int, list[int]] = collections.defaultdict(list)
    for index, others in awaited.items():
        for other in others:
            waiting[other].append(index)
    turns = itertools.count()

    def turn(index: int) -> tuple[bool, int, int]:
        return index in late, next(turns) if at_once is None else int(index not in at_once), index

    ready = [turn(index) for index, count in left.items() if not count]
    heapq.heapify(ready)
    found: dict[int, OperationFacts] = {}
    while ready:
        *_, index = heapq.heappop(ready)
        found[index] = of_index[index]
        for other in waiting[index]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, turn(other))
    # Two loop variables that change places wait for each other.
    return [*found.values(), *(fact for fact in running if fact.index not in found)]


def runs_at_once(running: Sequence[OperationFacts], awaited: dict[int, set[int]], phases: Sequence[str]) -> set[int]:
    """What runs as soon as it can in the order of the program, too: what needs no weights, and updates.

    Args:
      running: in the order of the program.
      awaited: index -> those that it waits for.
      phases: of all operations of the graph, by index.

    Returns:
      Indices of operations.
    """
    with_weights: set[int] = set()
    for fact in running:  # what an operation waits for stands before it, but for loops
        if fact.rule.is_variable or awaited[fact.index] & with_weights:
            with_weights.add(fact.index)
    return {fact.index for fact in running if fact.index not in with_weights or phases[fact.index] == UPDATE}


def late_sums(running: Sequence[OperationFacts], awaited: dict[int, set[int]], phases: Sequence[str]) -> set[int]:
    """Sums of the backward pass that nothing but updates, or the end of a loop, wait for, such as biases' gradients: of
    those that read the same they come first, and what comes last is run first.

    Args:
      running, awaited, phases: of `runs_at_once`.

    Returns:
      Indices of operations.
    """
    awaited_before = {other for fact in running if phases[fact.index] != UPDATE
                      and not fact.rule.body(fact.operation) for other in awaited[fact.index]}
    sums = {fact.index for fact in running if phases[fact.index] == BACKWARD and fact.kind == "reduction"}
    return sums - awaited_before


def in_turns(order: Sequence[OperationFacts], awaited: dict[int, set[int]],
             phases: Sequence[str]) -> list[OperationFacts]:
    """An order, as a stage of a pipeline keeps to it: the backward pass begins when the forward pass is over, and what
    updates compute without gradients, one after the other, when the backward pass is.

    Args:
      order: in which the operations can run.
      awaited: index -> those that it waits for.
      phases: of all operations of the graph, by index.
    """
    turns: dict[int, int] = {}
    for fact in order:
        after = max((turns.get(index, 0) for index in awaited[fact.index]), default=0)
        mine = {BACKWARD: 1, UPDATE: 1 if after else 2}.get(phases[fact.index], 0)
        turns[fact.index] = max(after, mine)
    return sorted(order, key=lambda fact: (turns[fact.index], fact.index if turns[fact.index] == 2 else 0))
