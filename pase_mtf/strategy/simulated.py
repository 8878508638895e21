"""The simulator judges: of the strategies that promise most, the one whose simulated step is shortest."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.machine.machine import Machine
from pase_mtf.search import Solution, solve
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import relative_gap
from pase_mtf.simulator.mcmc import search_simulated
from pase_mtf.simulator.schedule import LONGEST
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.stages import gradient_seconds
from pase_mtf.strategy.experts import data_parallel

__all__ = ["MOST_DEVICES", "is_simulated", "shortest_simulated", "walk_simulated",
           "worth_simulating"]

MOST_DEVICES = 64
"""A step has a task per layer and device, and where all send to all one per pair of devices: of more devices none is
simulated unless it is asked for."""
_PATIENCE = 10.0
"""Seconds of looking for the next cheapest: in a large network there may be fewer by then than were asked for."""
_HIDDEN = (0.5, 0.8, 0.95)
"""What fraction of gradients' all-reduces the backward pass may hide: the cheapest under each is simulated, too."""
_MOST, _CONFIGURATIONS = 10, 30_000
"""How many of the cheapest are simulated unless more are asked for, and over how many configurations of all layers they
may be looked for: every further one takes about as long as the first, and a search should not take many times as long
for being judged. A number and no time limit: what is found must not depend on how busy a computer is."""


def is_simulated(machine: Machine, devices: int) -> bool:
    """Whether steps are simulated unless somebody asks for something else: where devices have cores of their own, and
    are no more than can be simulated while a person waits."""
    return not machine.shared_cores and 1 < devices <= MOST_DEVICES


def worth_simulating(priced: PricedNetwork) -> int:
    """How many of the cheapest strategies are simulated unless somebody says how many; 0: none, and nothing else."""
    if not is_simulated(priced.machine, priced.devices):
        return 0
    return max(1, min(_MOST, _CONFIGURATIONS // max(1, sum(map(len, priced.configurations)))))


def shortest_simulated(priced: PricedNetwork, found: Solution, most: int,
                       memory_limit: float | None, time_limit: float | None = None,
                       ) -> tuple[Solution, dict[str, Any]]:
    """Simulates the cheapest strategies by the sum of costs, those that are cheapest where the backward pass hides some
    of the gradients' all-reduces, and data parallelism.

    Args:
      priced: the network.
      found: the cheapest assignment that fits the memory.
      most: how many to simulate of the first kind; fewer where they are not found in ten seconds.
      memory_limit: bytes per device; what needs more is left out.
      time_limit: seconds that each of the searches for them may take, where that is less than ten.

    Returns:
      The one whose simulated step is shortest, and what is to be said of it: "simulated" how many, "simulated_seconds"
      the step of the one that is returned, "simulated_rank" its place among them by the sum of costs, from 1, and
      "cheapest_simulated_seconds" the step of the cheapest by that sum. Nothing where steps are too long to be
      simulated.
    """
    if found.cost > LONGEST:
        return found, {}
    patience = _PATIENCE if time_limit is None else min(_PATIENCE, time_limit)
    others = [assignment for assignment in _promising(priced, most, patience) if assignment != found.assignment and (
        memory_limit is None or priced.peak_memory(assignment)[0] <= memory_limit)
        and priced.network.cost(assignment) <= LONGEST]
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


def walk_simulated(priced: PricedNetwork, *, initial: Sequence[int] | None = None, proposals: int | None = None,
                   time_limit: float | None = None, seed: int = 0, beta: float = 2000.0, **others: Any,
                   ) -> tuple[Solution, dict[str, Any]]:
    """FlexFlow's chain on simulated steps.

    Args:
      priced: the network.
      initial: the assignment to start from; without it, every layer's own cheapest.
      proposals, time_limit: budget, in seconds the second; without either, ten seconds.
      seed, beta: of `search_simulated`.
      **others: are none.

    Returns:
      The one whose simulated step is shortest of those it met, without a bound, and what is to be said of it:
      "simulated" how many, "simulated_seconds" its step, "first_simulated_seconds" that of the start.

    Raises:
      UsageError: no positive budget, or an option that it does not know.
    """
    for name in others:
        raise UsageError(f"{name}: a chain on simulated steps takes initial, proposals, time_limit, seed and beta; "
                         "leave it out")
    start = time.perf_counter()
    if proposals is None and time_limit is None:
        time_limit = _PATIENCE
    first = tuple(initial) if initial is not None else tuple(int(vector.argmin()) for vector in priced.network.vectors)
    found = search_simulated(priced, first, proposals=proposals, time_limit=time_limit, seed=seed, beta=beta)
    cost = priced.network.cost(found.assignment)
    return (Solution(found.assignment, cost, -math.inf, math.inf, False, time.perf_counter() - start,
                     {"proposals": found.proposals}),
            {"simulated": found.proposals + 1, "simulated_seconds": found.seconds,
             "first_simulated_seconds": found.first_seconds})


def _promising(priced: PricedNetwork, most: int, patience: float) -> Iterator[tuple[int, ...]]:
    """The assignments to simulate; some may come twice."""
    if most > 1:
        with contextlib.suppress(InfeasibleError):  # none in time; one is at hand
            found = solve(priced.network, "k_best", k=most, time_limit=patience).statistics["strategies"]
            yield from (assignment for _, assignment in found)
    with contextlib.suppress(InfeasibleError, UsageError):  # the batch does not split so, or not as it is offered
        parallel = data_parallel(priced.graph, priced.devices)
        yield tuple(priced.index(layer, configuration) for layer, configuration in enumerate(parallel))
    if priced.machine.shared_cores:
        return  # nothing is hidden
    hidden = gradient_seconds(priced)
    for fraction in _HIDDEN:
        with contextlib.suppress(InfeasibleError):  # none in time
            yield solve(_hiding(priced, hidden, fraction), "exact", certificate=False, time_limit=patience).assignment


def _hiding(priced: PricedNetwork, seconds: list[np.ndarray], fraction: float) -> CostNetwork:
    """The network in which a fraction of these seconds of every layer costs nothing."""
    made: dict[tuple[int, int], np.ndarray] = {}  # what layers share they go on sharing, for the searches' sake
    vectors = []
    for vector, less in zip(priced.network.vectors, seconds, strict=True):
        key = id(vector), id(less)
        if key not in made:
            made[key] = vector - fraction * less
        vectors.append(made[key])
    return CostNetwork(vectors, priced.network.edges, priced.network.kinds)
