"""The simulator judges: of the strategies that promise most, the one whose simulated step is shortest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search import Solution, solve
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import relative_gap
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.stages import gradient_seconds
from pase_mtf.strategy.experts import data_parallel

__all__ = ["shortest_simulated"]

_PATIENCE = 10.0
"""Seconds of looking for the next cheapest: in a large network there may be fewer by then than were asked for."""
_HIDDEN = (0.5, 0.8, 0.95)
"""What fraction of gradients' all-reduces the backward pass may hide: the cheapest under each is simulated, too."""


def shortest_simulated(priced: PricedNetwork, found: Solution, most: int,
                       memory_limit: float | None) -> tuple[Solution, dict[str, Any]]:
    """Simulates the cheapest strategies by the sum of costs, those that are cheapest where the backward pass hides some
    of the gradients' all-reduces, and data parallelism.

    Args:
      priced: the network.
      found: the cheapest assignment that fits the memory.
      most: how many to simulate of the first kind; fewer where they are not found in ten seconds.
      memory_limit: bytes per device; what needs more is left out.

    Returns:
      The one whose simulated step is shortest, and what is to be said of it: "simulated" how many, "simulated_seconds"
      the step of the one that is returned, "simulated_rank" its place among them by the sum of costs, from 1, and
      "cheapest_simulated_seconds" the step of the cheapest by that sum.
    """
    others = [assignment for assignment in _promising(priced, most) if assignment != found.assignment and (
        memory_limit is None or priced.peak_memory(assignment)[0] <= memory_limit)]
    candidates = [found.assignment, *sorted(dict.fromkeys(others), key=priced.network.cost)]
    simulator = Simulator(priced)
    seconds = [simulator.seconds(assignment) for assignment in candidates]
    best = min(range(len(candidates)), key=lambda number: (seconds[number], number))
    told = {"simulated": len(candidates), "simulated_seconds": seconds[best], "simulated_rank": best + 1,
            "cheapest_simulated_seconds": seconds[0]}
    if not best:
        return found, told
    cost = priced.network.cost(candidates[best])
    gap = relative_gap(cost, found.lower_bound)
    return dataclasses.replace(found, assignment=candidates[best], cost=cost, gap=gap, certificate=None,
                               optimal=found.optimal and gap <= 0.0), told


def _promising(priced: PricedNetwork, most: int) -> Iterator[tuple[int, ...]]:
    """The assignments to simulate; some may come twice."""
    with contextlib.suppress(InfeasibleError):  # none in time; one is at hand
        found = solve(priced.network, "k_best", k=most, time_limit=_PATIENCE).statistics["strategies"]
        yield from (assignment for _, assignment in found)
    with contextlib.suppress(InfeasibleError, UsageError):  # the batch does not split so, or not as it is offered
        parallel = data_parallel(priced.graph, priced.devices)
        yield tuple(priced.index(layer, configuration) for layer, configuration in enumerate(parallel))
    if priced.machine.shared_cores:
        return  # nothing is hidden
    reshardings = Reshardings(priced.machine)
    hidden = [gradient_seconds(layer, choices, reshardings)
              for layer, choices in zip(priced.graph.layers, priced.configurations, strict=True)]
    for fraction in _HIDDEN:
        vectors = [vector - fraction * seconds
                   for vector, seconds in zip(priced.network.vectors, hidden, strict=True)]
        lighter = CostNetwork(vectors, priced.network.edges, priced.network.kinds)
        yield solve(lighter, "exact", certificate=False, time_limit=_PATIENCE).assignment
