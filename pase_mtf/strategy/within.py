"""The cheapest assignments of a priced network within limits on what a device holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import UsageError
from pase_mtf.search import Solution, solve
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.search.memory import least_memory
from pase_mtf.search.peak import minimise_within_peak

__all__ = ["frontier_of", "solve_within"]


def solve_within(priced: PricedNetwork, memory_limit: float | None, options: dict[str, Any]) -> Solution:
    """The cheapest assignment that needs no more than so many bytes per device (None: however many)."""
    if memory_limit is None:
        return solve(priced.network, "exact", **options)
    return minimise_within_peak(priced.network, functools.cache(priced.memory_with), priced.peak_memory, memory_limit,
                                **options)


def frontier_of(priced: PricedNetwork, points: int, time_limit: float | None = None) -> tuple[FrontierPoint, ...]:
    """The cheapest assignments within limits in equal steps: from what the lightest needs that is found, at the moment
    at which most is there while nothing is split, to what the cheapest of all needs.

    Args:
      priced: where the costs are.
      points: how many limits, both ends included.
      time_limit: seconds for each of them.

    Raises:
      UsageError: fewer than two points.
      InfeasibleError: no assignment is finite, or none was found in that time.
    """
    if points < 2:
        raise UsageError(f"a frontier of {points} points; ask for at least two")
    options: dict[str, Any] = {"time_limit": time_limit, "certificate": False}
    cheapest = solve(priced.network, "exact", **options)
    lightest = least_memory(priced.network, priced.memory)[1]
    most, least = (priced.peak_memory(assignment)[0] for assignment in (cheapest.assignment, lightest))
    found: list[FrontierPoint] = []
    for limit in np.linspace(min(least, most), most, points).tolist():
        solution = cheapest if limit == most else solve_within(priced, limit, options)
        if found and found[-1].solution.cost < solution.cost:
            solution = dataclasses.replace(found[-1].solution, lower_bound=solution.lower_bound)
        found.append(FrontierPoint(limit, priced.peak_memory(solution.assignment)[0], solution))
    return tuple(found)
