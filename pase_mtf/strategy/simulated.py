"""The simulator judges: of the strategies of least cost, the one whose simulated step is shortest."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import InfeasibleError
from pase_mtf.search import Solution, solve
from pase_mtf.search.registry import relative_gap
from pase_mtf.simulator.simulate import Simulator

__all__ = ["shortest_simulated"]

_PATIENCE = 10.0
"""Seconds of looking for the next cheapest: in a large network there may be fewer by then than were asked for."""


def shortest_simulated(priced: PricedNetwork, found: Solution, most: int,
                       memory_limit: float | None) -> tuple[Solution, dict[str, Any]]:
    """Simulates the cheapest strategies.

    Args:
      priced: the network.
      found: the cheapest assignment that fits the memory.
      most: how many to simulate; fewer where they are not found in ten seconds.
      memory_limit: bytes per device; what needs more is left out.

    Returns:
      The one whose simulated step is shortest, and what is to be said of it: "simulated" how many, "simulated_seconds"
      the step of the one that is returned, "simulated_rank" its place by the sum of costs, from 1, and
      "cheapest_simulated_seconds" the step of the cheapest by that sum.
    """
    strategies: tuple[tuple[float, tuple[int, ...]], ...] = ()
    with contextlib.suppress(InfeasibleError):  # none in time; one is at hand
        strategies = solve(priced.network, "k_best", k=most, time_limit=_PATIENCE).statistics["strategies"]
    candidates = [(found.cost, found.assignment), *(
        (cost, assignment) for cost, assignment in strategies if assignment != found.assignment and (
            memory_limit is None or priced.peak_memory(assignment)[0] <= memory_limit))][:most]
    simulator = Simulator(priced)
    seconds = [simulator.seconds(assignment) for _, assignment in candidates]
    best = min(range(len(candidates)), key=lambda number: (seconds[number], number))
    cost, assignment = candidates[best]
    told = {"simulated": len(candidates), "simulated_seconds": seconds[best], "simulated_rank": best + 1,
            "cheapest_simulated_seconds": seconds[0]}
    if not best:
        return found, told
    gap = relative_gap(cost, found.lower_bound)
    return dataclasses.replace(found, assignment=assignment, cost=cost, gap=gap, optimal=found.optimal and gap <= 0.0,
                               certificate=None), told
