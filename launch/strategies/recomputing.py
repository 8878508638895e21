"""Which blocks of a model a run computes again in the backward pass: those with which its step is fastest within the
memory limit.

Every set of blocks is a program of its own, with strategies of its own. To compute more again never makes a step
cheaper while memory is no matter: what the cheapest strategy of a set costs without a limit bounds all sets that hold
it. Sets are looked at in the order of that bound, until it is no less than what was found.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence

from pase_mtf.amounts import bytes_text
from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.arms.program import exported
from pase_mtf.launch.console import Stage
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.reports.recomputation import Recomputation
from pase_mtf.launch.strategies.finding import strategy_by_hand
from pase_mtf.machine.machine import Machine
from pase_mtf.models.blocks import blocks_of, choices_of
from pase_mtf.strategy.strategy import Strategy
from pase_mtf.strategy.within import Priced, StrategiesWithin

__all__ = ["cheapest_counts", "fitting_blocks"]

_ROUNDING = 1e-9
"""Of sums of seconds, relative."""

_SECONDS = 60.0
"""After which no further set is looked at; a graph of thousands of operations takes seconds to export."""

_SECONDS_OF_SET = 5.0
"""Of a search within the limit; what it has not proven by then is part of the gap."""


def cheapest_counts(most: Sequence[int], bound_of: Callable[[tuple[int, ...]], float],
                    price: Callable[[tuple[int, ...]], Priced], time_limit: float = math.inf,
                    ) -> tuple[dict[tuple[int, ...], Priced], float]:
    """Looks for the counts whose program is the fastest within a limit.

    Args:
      most: the largest value of every count; all begin at 0.
      bound_of: the seconds that a step of counts takes without a limit, at least; larger counts must not have less.
      price: what it takes within it.
      time_limit: seconds after which nothing more is priced.

    Returns:
      What was priced, and a lower bound of the seconds within the limit of all counts.
    """
    end, start = time.monotonic() + time_limit, (0,) * len(most)
    known = {counts: price(counts) for counts in (start, tuple(most))}  # mostly the other end fits, if anything does
    exact = {start: bound_of(start)}
    left = [(exact[start], start, 0)]
    best = min(priced.seconds for priced in known.values())
    while left and left[0][0] * (1 + _ROUNDING) < best and time.monotonic() < end:
        bound, counts, last = heapq.heappop(left)
        if counts not in exact:
            exact[counts] = max(bound, bound_of(counts))
            heapq.heappush(left, (exact[counts], counts, last))
            continue
        if counts not in known:
            known[counts] = price(counts)
            best = min(best, known[counts].seconds)
        for number in range(last, len(most)):  # counts grow in their order: every set is reached on one way
            if counts[number] < most[number]:
                more = (*counts[:number], counts[number] + 1, *counts[number + 1:])
                heapq.heappush(left, (bound, more, number))
    least = min([*(bound for bound, _, _ in left), *(priced.least for priced in known.values())])
    return known, best if least * (1 + _ROUNDING) >= best else least


def fitting_blocks(plan: Plan, machine: Machine) -> Recomputation:
    """The blocks to compute again: those with which the strategy of --strategy is fastest within --memory_limit.

    Args:
      plan: of the run, its number of microbatches known.
      machine: the devices.

    Raises:
      InfeasibleError: with none of the sets that are offered a strategy keeps to the limit.
    """
    limit = plan.options.bytes_per_device(machine)
    names = blocks_of(exported(plan.recomputing(()))[1])
    choices = choices_of(names)

    def chosen(counts: Sequence[int]) -> tuple[str, ...]:
        return tuple(name for choice, count in zip(choices, counts, strict=True) for name in choice[:count])

    programs = _Programs(plan, machine, limit)
    with Stage("recomputation"):
        known, bound = cheapest_counts(list(map(len, choices)), lambda counts: programs.bound(chosen(counts)),
                                       lambda counts: programs.price(chosen(counts)), _SECONDS)
    tried = {chosen(counts): priced for counts, priced in known.items()}
    best = min(tried, key=lambda names: (tried[names].seconds, len(names)))
    if math.isinf(tried[best].seconds):
        raise InfeasibleError(f"--recompute=auto: no strategy keeps to {bytes_text(limit)} per device, whichever of "
                              f"{len(names)} blocks are computed again; take --microbatches=auto, a smaller --batch, "
                              "more devices, or a larger --memory_limit")
    return Recomputation(best, len(names), tried, bound, tried[best].seconds, limit)


class _Programs:
    """The programs of a run that differ in what is computed again, each exported and searched once."""

    def __init__(self, plan: Plan, machine: Machine, limit: float) -> None:
        self._plan, self._machine, self._limit = plan, machine, limit
        self._known: dict[tuple[str, ...], StrategiesWithin | Strategy] = {}

    def bound(self, blocks: tuple[str, ...]) -> float:
        """Seconds of a step without a limit, at least."""
        found = self._found(blocks)
        return found.seconds if isinstance(found, Strategy) else found.free.least

    def price(self, blocks: tuple[str, ...]) -> Priced:
        """What the strategies take within the limit."""
        found = self._found(blocks)
        if not isinstance(found, Strategy):
            return found.within(self._limit)
        seconds = found.seconds if found.memory_bytes <= self._limit else math.inf
        return Priced(seconds, seconds, found.memory_bytes)

    def _found(self, blocks: tuple[str, ...]) -> StrategiesWithin | Strategy:
        """The strategy, where people have written it, or what is searched."""
        if blocks not in self._known:
            plan = self._plan.recomputing(blocks)
            graph, _ = exported(plan)
            self._known[blocks] = strategy_by_hand(plan, graph, self._machine) or StrategiesWithin(
                graph, self._machine, plan.devices.count, _SECONDS_OF_SET)
        return self._known[blocks]
