"""The cheapest assignment whose peak is within a memory limit, where the peak is the largest of several sums.

Of what the backward pass computes once more, most is there at one of several moments, and which one it is depends on
the assignment. Each sum by itself within the limit is a weaker demand: where nothing satisfies it nothing fits, what it
costs bounds the constrained cost from below, and where its optimum keeps all the others, too, it is the optimum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.budget import SEARCH_MEMORY, Budget
from pase_mtf.search.k_best import cheapest as in_order
from pase_mtf.search.memory import least_memory
from pase_mtf.search.nearby import Nearby
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Solution, relative_gap, solve

__all__ = ["minimise_within_peak"]

_ROUNDING = 1e-9
"""Of sums of bytes, relative: what exceeds a limit by no more keeps it."""

_TOLERANCE = 1e-10
"""Of costs, relative, with what bytes are charged: an optimum is known to this (as within the limit of one sum)."""

_PATIENCE = 10.0
"""Seconds for all searches within lowered limits, which prove nothing, where the caller sets no time limit."""

_HASTY = 0.03
"""Relative gap at which a search within a lowered limit stops: what it finds may not fit, and then the next follows."""

_LESS_HASTY = 0.01
"""The same, of searches within lowered limits whose results others are sought from."""

_MOST_AROUND = 20
"""Searches at most around what was found before."""

_SHORTEST = 1e-3
"""Seconds in which nothing can be looked at."""

_MOST_PEAKS, _MOST_IN_ORDER = 20_000, 2_000
"""Peaks that are asked for at most, and assignments at most that are looked at in the order of charged costs."""

_IN_ORDER = 0.4
"""Part of the time that is left for these."""

_STEP = 1.0 / 64.0
"""By how much, relative, a lowered limit is below the one before."""

_IDLE = 40
"""Random changes in vain after which no more are tried."""

_Memory = Callable[[int], Sequence[np.ndarray]]
_Copies = Callable[[Sequence[int], int], Sequence[np.ndarray]]
_Within = Callable[[Sequence[np.ndarray], float, float], Solution]
_Peak = Callable[[Sequence[int]], tuple[float, int]]


def minimise_within_peak(network: CostNetwork, memory: _Memory, peak: _Peak, memory_limit: float, *,
                         copies: _Copies | None = None, cheapest: Solution | None = None,
                         initial: Sequence[int] | None = None, known: Sequence[Sequence[int]] = (),
                         time_limit: float | None = None, patience: float | None = None, **options: Any) -> Solution:
    """Finds the cheapest assignment whose peak is within the limit.

    Args:
      network: what to minimise.
      memory: key of a sum -> what it adds up: per layer, bytes per device of every configuration.
      peak: assignment -> (its peak in bytes, the key of the sum that is largest).
      memory_limit: bytes per device.
      copies: (assignment, key of a sum) -> what the peak holds beside that sum, estimated: per layer, bytes of every
        configuration were all other layers to stay; nothing is known of it if not given.
      cheapest: what the exact search found without a limit; it is searched for if not given.
      initial: an assignment whose peak is within the limit, known before: what is found costs no more.
      known: other assignments, which may not fit: searches begin with them as well.
      time_limit: seconds; every one of the searches takes half of what is left at most, so that others may follow.
        Without it each proves what it can, but for those that follow where no proof was found at once: they have ten
        seconds together.
      patience: seconds for those of them that look on once one that fits was found within limits lowered by as much as
        others were too high, or none; what is left if not given.
      **options: of the exact search.

    Returns:
      The best that was found; `optimal` where it is proven that none that fits costs less.

    Raises:
      InfeasibleError: nothing fits, or nothing that fits is known: then with what it would cost at least. It names what
        the lightest that was found needs.
    """
    budget = Budget.of(time_limit, options.get("search_memory", SEARCH_MEMORY))

    def search(**within: Any) -> Solution:
        return solve(network, "exact", time_limit=budget.time_limit(0.5), **{**options, **within})

    def within(sums: Sequence[np.ndarray], limit: float, gap: float = 0.0) -> Solution:
        return search(memory=sums, memory_limit=limit, initial=initial, gap=max(gap, options.get("gap", 0.0)))

    nearby, limit = Nearby(network, memory, peak, _MOST_PEAKS, copies), memory_limit * (1 + _ROUNDING)
    # Mostly the cheapest of all fits, and then it is the cheapest that fits.
    solution, bound, tried = cheapest or search(), -math.inf, dict[int, Solution]()
    try:
        while True:
            bound = max(bound, solution.lower_bound)
            used, key = nearby.look(solution.assignment)
            if used <= limit:
                return _above(solution, bound)
            if key in tried:
                break
            try:
                tried[key] = solution = within(memory(key), memory_limit)
            except InfeasibleError as error:
                if not error.proven:
                    raise
                raise _too_low(network, memory, peak, memory_limit, [*tried, key], known, budget) from None
        if budget.time_limit() is None:
            budget = Budget.of(_PATIENCE, budget.memory)
        for choice in (*known, *([] if initial is None else [initial])):
            nearby.look(choice)
        found = (_around(solution, within, memory, copies, nearby, memory_limit, budget) if copies else None
                 ) or _tightened(solution, within, memory, nearby, memory_limit, budget)
        for _, choice in [] if found else _lightest(network, memory, [*tried], budget):
            nearby.look(choice)
        if patience is not None:
            budget = budget.until(min(budget.deadline, time.perf_counter() + patience))
        nearby.budget = budget
        return _Further(network, within, memory, nearby, memory_limit, tried, options.get("gap", 0.0)).search(bound)
    except InfeasibleError as error:
        error.lower_bound = max(error.lower_bound, bound)
        if initial is None:
            raise
        # Limits at single moments leave out copies of what is moved, which may be most of what is there.
        return _above(_cheaper(network, dataclasses.replace(solution, cost=math.inf), initial), bound)


def _cheaper(network: CostNetwork, found: Solution, initial: Sequence[int] | None) -> Solution:
    """What was found, or the assignment known before, where that costs less: of which nothing is proven."""
    if initial is None or (cost := network.cost(initial)) >= found.cost:
        return found
    return dataclasses.replace(found, assignment=tuple(map(int, initial)), cost=cost, lower_bound=-math.inf,
                               gap=math.inf, optimal=False, certificate=None)


def _above(solution: Solution, bound: float) -> Solution:
    """The solution, with the best of the lower bounds that hold for whatever fits."""
    if solution.optimal and solution.lower_bound >= bound:
        return solution
    gap = relative_gap(solution.cost, bound)
    optimal = solution.optimal or gap <= 0.0
    return dataclasses.replace(solution, lower_bound=bound, gap=gap, optimal=optimal,
                               certificate=solution.certificate if optimal else None)


def _unproven(found: Solution) -> Solution:
    return dataclasses.replace(found, optimal=False, lower_bound=-math.inf)


def _around(solution: Solution, within: _Within, memory: _Memory, copies: _Copies, nearby: Nearby,
            memory_limit: float, budget: Budget) -> Solution | None:
    """The cheapest assignment that fits of those that searches find which know what there is beside the largest sum, as
    it would be around the one found before; None where none fits. What is estimated wrongly of that one is taken from
    the limit."""
    best, seen = None, set[tuple[int, ...]]()
    with contextlib.suppress(InfeasibleError):
        while len(seen) < _MOST_AROUND and solution.assignment not in seen and not budget.over:
            seen.add(solution.assignment)
            used, key = nearby.look(solution.assignment)
            if used <= memory_limit * (1 + _ROUNDING) and (best is None or solution.cost < best.cost):
                best = solution
            sums = [one + other for one, other in zip(memory(key), copies(solution.assignment, key), strict=True)]
            known = math.fsum(vector[choice] for vector, choice in zip(sums, solution.assignment, strict=True))
            solution = within(sums, max(memory_limit - (used - known), 0.0), _HASTY)
    return None if best is None else _unproven(best)


def _tightened(solution: Solution, within: _Within, memory: _Memory, nearby: Nearby, memory_limit: float,
               budget: Budget) -> Solution | None:
    """An assignment that fits, where one sum's optimum breaks another's limit and the other way round: the limit of the
    one that is largest is lowered by as much as the peak is too high. What is found in haste may be improved on within
    the limit at which it was found. None where none fits."""
    limit, lowered = memory_limit, (-1, memory_limit)
    with contextlib.suppress(InfeasibleError):
        while limit >= 0 and not budget.over:
            used, key = nearby.look(solution.assignment)
            if used <= memory_limit * (1 + _ROUNDING):
                return _unproven(_improved(solution, within, memory, nearby, memory_limit, lowered))
            added = math.fsum(vector[choice] for vector, choice in zip(memory(key), solution.assignment, strict=True))
            limit = min(limit, added) - max(used - memory_limit, _ROUNDING * memory_limit)
            lowered = key, max(limit, 0.0)
            solution = within(memory(key), lowered[1], _HASTY)
    return None


def _lightest(network: CostNetwork, memory: _Memory, keys: Sequence[int],
              budget: Budget) -> list[tuple[float, tuple[int, ...]]]:
    """The least of each of some sums, and an assignment that needs no more of it; without those not found in time."""
    found = []
    for key in keys:
        with contextlib.suppress(InfeasibleError):
            found.append(least_memory(network, memory(key), budget))
    return found


def _too_low(network: CostNetwork, memory: _Memory, peak: _Peak, memory_limit: float, tried: Sequence[int],
             known: Sequence[Sequence[int]], budget: Budget) -> InfeasibleError:
    """What is said of a limit that one sum is above under every assignment: the least of a sum bounds what any needs,
    but the assignment that attains it may need more at its peak."""
    lightest = _lightest(network, memory, tried, budget)
    least = math.ceil(max((nbytes for nbytes, _ in lightest), default=0.0))
    peaks = [math.ceil(peak(choice)[0]) for choice in (*known, *(choice for _, choice in lightest))]
    if least <= memory_limit:  # that of the last sum was not found in time
        needs = "any strategy needs more"
    elif min(peaks) <= least:
        needs = f"the least any strategy needs is {least}"
    else:
        needs = f"any strategy needs at least {least}, the lightest that was found {min(peaks)}"
    return InfeasibleError(f"memory limit of {math.floor(memory_limit)} bytes per device: {needs}; raise the limit or "
                           "use more devices")


def _improved(solution: Solution, within: _Within, memory: _Memory, nearby: Nearby, memory_limit: float,
              lowered: tuple[int, float]) -> Solution:
    """What fits, or what a search finds that is not in haste, within the limit at which that was found: the cheaper one
    that fits."""
    if lowered[0] < 0:
        return solution
    with contextlib.suppress(InfeasibleError):
        found = within(memory(lowered[0]), lowered[1], 0.0)
        if found.cost < solution.cost and nearby.look(found.assignment)[0] <= memory_limit * (1 + _ROUNDING):
            return found
    return solution


class _Further:
    """Looks on where no proof was found at once, from all that was looked at."""

    def __init__(self, network: CostNetwork, within: _Within, memory: _Memory, nearby: Nearby, memory_limit: float,
                 tried: Mapping[int, Solution], gap: float) -> None:
        """Takes what `minimise_within_peak` has, with key -> what was found within the limit of that sum."""
        self._network, self._within, self._memory, self._nearby = network, within, memory, nearby
        self._memory_limit, self._limit = memory_limit, memory_limit * (1 + _ROUNDING)
        self._tried, self._gap = tried, gap
        self._best: tuple[int, ...] | None = None
        self._cost, self._bound, self._complete = math.inf, -math.inf, False

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
        found = dataclasses.replace(_unproven(best), assignment=self._best, cost=self._cost,
                                    statistics={**best.statistics, "memory": used})
        close = relative_gap(self._cost, self._bound) <= _TOLERANCE
        return _above(found, self._cost if self._complete or close else self._bound)

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
            if least >= self._cost:
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
        with contextlib.suppress(TimeoutError, MemoryError):
            for number, (cost, choice) in enumerate(in_order(charged, budget)):
                bound, rounding = cost - charge * self._limit, _TOLERANCE * (abs(cost) + charge * self._limit)
                self._bound = max(self._bound, min(bound - rounding, self._cost))
                self._complete = bound + rounding >= self._cost
                if self._done or number >= _MOST_IN_ORDER:
                    return
                if self._network.cost(choice) < self._cost and self._nearby.keeps(choice, self._limit):
                    self._take([choice])
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
        needs = (f"the least any strategy needs is {least}" if self._complete else
                 f"found nothing that needs less than {least}")
        return InfeasibleError(f"memory limit of {math.floor(self._memory_limit)} bytes per device: {needs}; raise the "
                               "limit or use more devices", proven=self._complete)
