"""The cheapest assignment within limits on several sums, sought on where no proof was found at once (peak.py).

From all that was looked at: what is near it, what is cheapest within lowered limits, assignments in the order of their
costs with a charge for bytes, which also lifts the bound, and random changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.k_best import cheapest as in_order
from pase_mtf.search.nearby import Nearby
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Solution, relative_gap
from pase_mtf.search.rounding import MOST_UNDECIDED, rounding

__all__ = ["ROUNDING", "LookingOn", "Memory", "Within", "above", "unproven"]

ROUNDING = 1e-12
"""Of sums of bytes, relative: what exceeds a limit by no more keeps it. Of a terabyte it is one byte: of what devices
hold, no whole one."""

_TOLERANCE = 1e-10
"""Of costs, relative, with what bytes are charged: an optimum is known to this (as within the limit of one sum)."""

_LESS_HASTY = 0.01
"""Relative gap at which a search within a lowered limit stops whose result others are sought from."""

_SHORTEST = 1e-3
"""Seconds in which nothing can be looked at."""

_MOST_IN_ORDER = 2_000
"""Assignments at most that are looked at in the order of charged costs."""

_IN_ORDER = 0.4
"""Part of the time that is left for these."""

_STEP = 1.0 / 64.0
"""By how much, relative, a lowered limit is below the one before."""

_IDLE = 40
"""Random changes in vain after which no more are tried."""

Memory = Callable[[int], Sequence[np.ndarray]]
"""Key of a sum -> what it adds up: per layer, bytes per device of every configuration."""

Within = Callable[[Sequence[np.ndarray], float, float], Solution]
"""(what is added up, limit, relative gap) -> the cheapest within that limit, to within that gap."""


def above(solution: Solution, bound: float) -> Solution:
    """A solution, with the best of the lower bounds that hold for whatever fits."""
    if solution.optimal and solution.lower_bound >= bound:
        return solution
    gap = relative_gap(solution.cost, bound)
    optimal = solution.optimal or gap <= 0.0
    return dataclasses.replace(solution, lower_bound=bound, gap=gap, optimal=optimal,
                               certificate=solution.certificate if optimal else None)


def unproven(found: Solution) -> Solution:
    """A solution of which nothing is proven."""
    return dataclasses.replace(found, optimal=False, lower_bound=-math.inf)


class LookingOn:
    """What is known of a search within limits, while it looks on."""

    def __init__(self, network: CostNetwork, within: Within, memory: Memory, nearby: Nearby, memory_limit: float,
                 tried: Mapping[int, Solution], gap: float) -> None:
        """Takes what `minimise_within_peak` has, with key -> what was found within the limit of that sum."""
        self._network, self._within, self._memory, self._nearby = network, within, memory, nearby
        self._memory_limit, self._limit = memory_limit, memory_limit * (1 + ROUNDING)
        self._tried, self._gap = tried, gap
        self._best: tuple[int, ...] | None = None
        self._cost, self._bound, self._complete = math.inf, -math.inf, False
        self._others = math.inf  # bytes that those hold at least that one of the sums ruled out

    def search(self, bound: float) -> Solution:
        """The cheapest that is found; no assignment that fits costs less than the bound.

        Raises:
          InfeasibleError: none fits, or none was found.
        """
        self._bound = bound
        first = sorted(self._nearby.peaks, key=lambda choice: self._nearby.peaks[choice])
        self._take(first)
        for choice in first if self._best is None else ():
            if self._nearby.over or self._brought_within(choice):
                break
        self._improve()
        for step in (self._lower_limits, self._in_order, self._kicks):
            if not self._done:
                step()
        if self._best is None:
            raise self._refusal()
        key, best = self._tightest
        used = math.fsum(vector[choice] for vector, choice in zip(self._memory(key), self._best, strict=True))
        found = dataclasses.replace(unproven(best), assignment=self._best, cost=self._cost,
                                    statistics={**best.statistics, "memory": used})
        close = relative_gap(self._cost, self._bound) <= _TOLERANCE
        return above(found, self._cost if self._complete or close else self._bound)

    @property
    def _done(self) -> bool:
        """Whether there is nothing better to find, or no time for it."""
        return self._complete or self._nearby.over or (
            self._best is not None and relative_gap(self._cost, self._bound) <= max(self._gap, _TOLERANCE))

    @property
    def _tightest(self) -> tuple[int, Solution]:
        """The sum within whose limit assignments cost most, and what was found within it."""
        return max(self._tried.items(), key=lambda entry: entry[1].lower_bound)

    def _take(self, choices: Iterable[tuple[int, ...]]) -> bool:
        """Keeps the cheapest of those that fit; returns whether it is another one."""
        before = self._best
        for choice in choices:
            if self._nearby.look(choice)[0] <= self._limit and (cost := self._network.cost(choice)) < self._cost:
                self._best, self._cost = choice, cost
        return self._best != before

    def _brought_within(self, choice: tuple[int, ...]) -> bool:
        """Changes an assignment until it fits, and then while that makes it cheaper; whether it is the best then."""
        found = self._nearby.within(choice, self._limit)
        return found is not None and self._take([self._nearby.cheaper(found, self._limit)])

    def _improve(self) -> None:
        if self._best is not None and not self._done:
            self._take([self._nearby.cheaper(self._best, self._limit)])

    def _lower_limits(self) -> None:
        """Begins with what is cheapest within lowered limits, until that costs more. They are the same whatever the
        limit: what is found at one of them fits all that are higher."""
        step, before = math.floor(math.log(max(self._memory_limit, 1.0)) / _STEP), dict[int, Solution]()
        for number in itertools.count():
            limit, least = math.exp((step - number) * _STEP), -math.inf
            for key in self._tried:
                if self._done:
                    return
                # What is cheapest within a limit still is within a lower one that it keeps to.
                if key not in before or before[key].statistics["memory"] > limit:
                    try:
                        before[key] = self._within(self._memory(key), limit, _LESS_HASTY)
                    except InfeasibleError:
                        return
                    self._brought_within(before[key].assignment)
                least = max(least, before[key].lower_bound)
            # Below what holds nothing there is no lower limit.
            if least >= self._cost or not any(found.statistics["memory"] > 0.0 for found in before.values()):
                return

    def _in_order(self) -> None:
        """Looks at assignments in the order of their costs with a charge for one of the sums, which bounds what those
        cost that are still to come."""
        key, best = self._tightest
        charge = float(best.statistics.get("multiplier", 0.0))
        charged = CostNetwork([seconds + charge * nbytes for seconds, nbytes in zip(
            self._network.vectors, self._memory(key), strict=True)], self._network.edges)
        budget = self._nearby.budget
        if budget.deadline < math.inf:
            budget = budget.until(time.perf_counter() + _IN_ORDER * budget.seconds)
        if budget.seconds < _SHORTEST:
            return
        doubt = rounding(charged)  # by as much the order is uncertain where costs of both signs cancel
        # The order takes more memory than what was searched before: where there is too little, that stands as it is.
        with contextlib.suppress(TimeoutError, MemoryError, UsageError):
            for number, (cost, choice) in enumerate(in_order(charged, budget)):
                bound, tolerance = cost - charge * self._limit - doubt, _TOLERANCE * (abs(cost) + charge * self._limit)
                self._bound = max(self._bound, min(bound - tolerance, self._cost))
                # Where charges dwarf costs, what is rounded off of them is more than costs differ by.
                margin = tolerance if tolerance <= MOST_UNDECIDED * abs(self._cost) else -tolerance
                self._complete = bound + margin >= self._cost
                if self._done or number >= _MOST_IN_ORDER:
                    return
                if self._network.cost(choice) < self._cost:
                    if self._nearby.keeps(choice, self._limit):
                        self._take([choice])
                    else:
                        self._others = min(self._others, self._nearby.at_least(choice))
            self._complete = True

    def _kicks(self) -> None:
        """Begins with random changes: of the best, or of the lightest, where none fits."""
        idle = 0
        while idle < _IDLE and not self._done:
            start = self._best or min(self._nearby.peaks, key=lambda choice: self._nearby.peaks[choice])
            least = self._nearby.peaks[start][0]
            better = self._brought_within(self._nearby.kicked(start))
            lighter = self._best is None and min(used for used, _ in self._nearby.peaks.values()) < least
            idle = 0 if better or lighter else idle + 1

    def _refusal(self) -> InfeasibleError:
        least = math.ceil(min(used for used, _ in self._nearby.peaks.values()))
        # What one of the sums ruled out may still hold less at its peak than the lightest that was looked at.
        needs = (f"found nothing that needs less than {least}" if not self._complete else
                 f"the least any strategy needs is {least}" if self._others >= least else
                 f"any strategy needs at least {math.ceil(self._others)}, the lightest that was found {least}")
        return InfeasibleError(f"memory limit of {math.floor(self._memory_limit)} bytes per device: {needs}; raise the "
                               "limit or use more devices", proven=self._complete)
