"""The cheapest assignment whose peak is within a memory limit, where the peak is the largest of several sums.

Of what the backward pass computes once more, most is there at one of several moments, and which one it is depends on
the assignment. Each sum by itself within the limit is a weaker demand: where nothing satisfies it nothing fits, what it
costs bounds the constrained cost from below, and where its optimum keeps all the others, too, it is the optimum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.budget import SEARCH_MEMORY, Budget
from pase_mtf.search.given_bytes import checked_limit
from pase_mtf.search.looking_on import ROUNDING, LookingOn, Memory, Within, above, unproven
from pase_mtf.search.memory import least_memory
from pase_mtf.search.nearby import Nearby
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Solution, solve

__all__ = ["minimise_within_peak"]

_PATIENCE = 10.0
"""Seconds for all searches within lowered limits, which prove nothing, where the caller sets no time limit."""

_LIGHTENING = 2.0
"""Seconds for finding a light assignment where none is within the limit."""

_HASTY = 0.03
"""Relative gap at which a search within a lowered limit stops: what it finds may not fit, and then the next follows."""

_MOST_AROUND = 20
"""Searches at most around what was found before."""

_MOST_PEAKS = 20_000
"""Peaks that are asked for at most."""

_Copies = Callable[[Sequence[int], int], Sequence[np.ndarray]]
_Peak = Callable[[Sequence[int]], tuple[float, int]]


def minimise_within_peak(network: CostNetwork, memory: Memory, peak: _Peak, memory_limit: float, *,
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
      UsageError: a memory limit that is no number.
      InfeasibleError: nothing fits, or nothing that fits is known: then with what it would cost at least. It names what
        the lightest that was found needs.
    """
    memory_limit = checked_limit(memory_limit)
    # What is forbidden is no strategy, however little it holds.
    known = [choice for choice in known if network.cost(choice) < math.inf]
    initial = None if initial is None or network.cost(initial) == math.inf else initial
    budget = Budget.of(time_limit, options.get("search_memory", SEARCH_MEMORY))

    def search(**within: Any) -> Solution:
        return solve(network, "exact", time_limit=budget.time_limit(0.5), **{**options, **within})

    def within(sums: Sequence[np.ndarray], limit: float, gap: float = 0.0) -> Solution:
        return search(memory=sums, memory_limit=limit, initial=initial, gap=max(gap, options.get("gap", 0.0)))

    nearby, limit = Nearby(network, memory, peak, _MOST_PEAKS, copies), memory_limit * (1 + ROUNDING)
    # Mostly the cheapest of all fits, and then it is the cheapest that fits.
    solution, bound, tried = cheapest or search(), -math.inf, dict[int, Solution]()
    try:
        while True:
            bound = max(bound, solution.lower_bound)
            used, key = nearby.look(solution.assignment)
            if used <= limit:
                # What was found in haste, or to within a gap, may cost more than what was known before.
                return above(_cheaper(network, solution, None if solution.optimal else initial), bound)
            if key in tried:
                break
            try:
                tried[key] = solution = within(memory(key), memory_limit)
            except InfeasibleError as error:
                if not error.proven:
                    raise
                raise _too_low(network, memory, nearby, memory_limit, [*tried, key], known, budget) from None
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
        return LookingOn(network, within, memory, nearby, memory_limit, tried, options.get("gap", 0.0)).search(bound)
    except InfeasibleError as error:
        error.lower_bound = max(error.lower_bound, bound)
        if initial is None:
            raise
        # Limits at single moments leave out copies of what is moved, which may be most of what is there.
        return above(_cheaper(network, dataclasses.replace(solution, cost=math.inf), initial), bound)


def _cheaper(network: CostNetwork, found: Solution, initial: Sequence[int] | None) -> Solution:
    """What was found, or the assignment known before, where that costs less: of which nothing is proven."""
    if initial is None or (cost := network.cost(initial)) >= found.cost:
        return found
    return dataclasses.replace(found, assignment=tuple(map(int, initial)), cost=cost, lower_bound=-math.inf,
                               gap=math.inf, optimal=False, certificate=None)


def _around(solution: Solution, within: Within, memory: Memory, copies: _Copies, nearby: Nearby,
            memory_limit: float, budget: Budget) -> Solution | None:
    """The cheapest assignment that fits of those that searches find which know what there is beside the largest sum, as
    it would be around the one found before; None where none fits. What is estimated wrongly of that one is taken from
    the limit."""
    best, seen = None, set[tuple[int, ...]]()
    with contextlib.suppress(InfeasibleError):
        while len(seen) < _MOST_AROUND and solution.assignment not in seen and not budget.over:
            seen.add(solution.assignment)
            used, key = nearby.look(solution.assignment)
            if used <= memory_limit * (1 + ROUNDING) and (best is None or solution.cost < best.cost):
                best = solution
            sums = [one + other for one, other in zip(memory(key), copies(solution.assignment, key), strict=True)]
            known = math.fsum(vector[choice] for vector, choice in zip(sums, solution.assignment, strict=True))
            solution = within(sums, max(memory_limit - (used - known), 0.0), _HASTY)
    return None if best is None else unproven(best)


def _tightened(solution: Solution, within: Within, memory: Memory, nearby: Nearby, memory_limit: float,
               budget: Budget) -> Solution | None:
    """An assignment that fits, where one sum's optimum breaks another's limit and the other way round: the limit of the
    one that is largest is lowered by as much as the peak is too high. What is found in haste may be improved on within
    the limit at which it was found. None where none fits."""
    limit, lowered = memory_limit, (-1, memory_limit)
    with contextlib.suppress(InfeasibleError):
        while limit >= 0 and not budget.over:
            used, key = nearby.look(solution.assignment)
            if used <= memory_limit * (1 + ROUNDING):
                return unproven(_improved(solution, within, memory, nearby, memory_limit, lowered))
            added = math.fsum(vector[choice] for vector, choice in zip(memory(key), solution.assignment, strict=True))
            limit = min(limit, added) - max(used - memory_limit, ROUNDING * memory_limit)
            lowered = key, max(limit, 0.0)
            solution = within(memory(key), lowered[1], _HASTY)
    return None


def _lightest(network: CostNetwork, memory: Memory, keys: Sequence[int],
              budget: Budget) -> list[tuple[float, tuple[int, ...]]]:
    """The least of each of some sums, and an assignment that needs no more of it; without those not found in time."""
    found = []
    for key in keys:
        with contextlib.suppress(InfeasibleError):
            found.append(least_memory(network, memory(key), budget))
    return found


def _too_low(network: CostNetwork, memory: Memory, nearby: Nearby, memory_limit: float, tried: Sequence[int],
             known: Sequence[Sequence[int]], budget: Budget) -> InfeasibleError:
    """What is said of a limit that one sum is above under every assignment: the least of a sum bounds what any needs,
    but the assignment that attains it may need more at its peak, which changes to it may lower."""
    lightest = _lightest(network, memory, tried, budget)
    least = max((nbytes for nbytes, _ in lightest), default=0.0)
    start = min((*known, *(choice for _, choice in lightest)), key=lambda choice: nearby.look(choice)[0], default=None)
    if start is not None and least > memory_limit:
        nearby.budget = budget.until(min(budget.deadline, time.perf_counter() + _LIGHTENING))
        nearby.within(tuple(map(int, start)), least * (1 + ROUNDING))
    needed, found = math.ceil(least), math.ceil(min(used for used, _ in nearby.peaks.values()))
    if least <= memory_limit:  # that of the last sum was not found in time
        needs = "any strategy needs more"
    elif found <= needed:
        needs = f"the least any strategy needs is {needed}"
    else:
        needs = f"any strategy needs at least {needed}, the lightest that was found {found}"
    return InfeasibleError(f"memory limit of {math.floor(memory_limit)} bytes per device: {needs}; raise the limit or "
                           "use more devices")


def _improved(solution: Solution, within: Within, memory: Memory, nearby: Nearby, memory_limit: float,
              lowered: tuple[int, float]) -> Solution:
    """What fits, or what a search finds that is not in haste, within the limit at which that was found: the cheaper one
    that fits."""
    if lowered[0] < 0:
        return solution
    with contextlib.suppress(InfeasibleError):
        found = within(memory(lowered[0]), lowered[1], 0.0)
        if found.cost < solution.cost and nearby.look(found.assignment)[0] <= memory_limit * (1 + ROUNDING):
            return found
    return solution
