"""The simulator judges: of the strategies that promise most, the one whose simulated step is shortest."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.machine.machine import Machine
from pase_mtf.search import Solution, solve
from pase_mtf.search.budget import Budget
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import relative_gap
from pase_mtf.simulator.mcmc import search_simulated
from pase_mtf.simulator.overlap import fitted_overlap
from pase_mtf.simulator.schedule import LONGEST
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.stages import gradient_seconds
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.search_report import SearchReport
from pase_mtf.strategy.within import solve_within

__all__ = ["MOST_DEVICES", "is_simulated", "shortest_simulated", "walk_simulated",
           "worth_simulating"]

MOST_DEVICES = 64
"""A step has a task per layer and device, and where all send to all one per pair of devices: of more devices none is
simulated unless it is asked for."""
_PATIENCE = 10.0
"""Seconds of looking for the next cheapest: in a large network there may be fewer by then than were asked for."""
_ALIKE = 1e-3
"""Of a step, by which another has to be shorter for the proof to be given up that its strategy is the cheapest."""
_OVERLAPS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""What fraction of gradients' all-reduces the backward pass might hide: the cheapest under each is simulated, so that
the fraction is learned from steps that differ in it."""
_A_LOOK = 0.5
"""Seconds for each of these to be looked for on within a memory limit, once the first that fits it is known."""
_FITS = 3
"""How often, at most, it is learned anew after the cheapest under the last one was simulated, too."""
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
                       memory_limit: float | None, budget: Budget | None = None,
                       ) -> tuple[Solution, SearchReport]:
    """Simulates the cheapest strategies by the sum of costs, data parallelism, and those that are cheapest where the
    backward pass hides some of the gradients' all-reduces: how much of them it does is learned from all these steps.

    Args:
      priced: the network.
      found: the cheapest assignment that fits the memory.
      most: how many to simulate of the first kind; fewer where they are not found in ten seconds.
      memory_limit: bytes per device; what needs more is left out.
      budget: time for all of it; where that is over, nothing more is looked for or simulated.

    Returns:
      The one whose simulated step is shortest, or of those whose steps are longer by a thousandth at most the cheapest
      by the sum of costs, which is what is proven; and what is to be said of it: "simulated" how many,
      "simulated_seconds" the step of the one that is returned, "shortest_simulated_seconds" the shortest where that is
      another's, "simulated_rank" its place among them by the sum of costs, from 1, "cheapest_simulated_seconds" the
      step of the cheapest by that sum, and, where there is something to hide, "overlap", the fraction of gradients'
      all-reduces that these steps hide. Nothing where steps are too long to be simulated, or no time is left.
    """
    budget = budget or Budget()
    if found.cost > LONGEST or budget.over:
        return found, {}
    judge = _Judge(priced, found.assignment, memory_limit, budget)
    judge.add_cheapest(most)
    overlap = None if priced.machine.shared_cores else judge.learn_overlap()
    candidates, seconds = judge.ordered(proven=found.optimal)
    best = next(number for number, step in enumerate(seconds) if step <= (1.0 + _ALIKE) * min(seconds))
    told: SearchReport = {"simulated": len(candidates), "simulated_seconds": seconds[best], "simulated_rank": best + 1,
                          "cheapest_simulated_seconds": seconds[0]}
    if seconds[best] > min(seconds):
        told["shortest_simulated_seconds"] = min(seconds)
    if overlap is not None:
        told["overlap"] = overlap
    if candidates[best] == found.assignment:
        return found, told
    cost = priced.network.cost(candidates[best])
    gap = relative_gap(cost, found.lower_bound)
    return dataclasses.replace(found, assignment=candidates[best], cost=cost, gap=gap, certificate=None,
                               optimal=found.optimal and gap <= 0.0), told


def walk_simulated(priced: PricedNetwork, *, initial: Sequence[int] | None = None, proposals: int | None = None,
                   time_limit: float | None = None, seed: int = 0, beta: float = 2000.0, **others: object,
                   ) -> tuple[Solution, SearchReport]:
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
      UsageError: no positive budget, an option that it does not know, or one of a wrong type.
    """
    for name in others:
        raise UsageError(f"{name}: a chain on simulated steps takes initial, proposals, time_limit, seed and beta; "
                         "leave it out")
    start = time.perf_counter()
    if proposals is None and time_limit is None:
        time_limit = _PATIENCE
    if initial is None:
        initial = [int(vector.argmin()) for vector in priced.network.vectors]
    priced.network.cost(initial)  # says what is wrong with it
    first = tuple(map(int, initial))
    found = search_simulated(priced, first, proposals=proposals, time_limit=time_limit, seed=seed, beta=beta)
    cost = priced.network.cost(found.assignment)
    return (Solution(found.assignment, cost, -math.inf, math.inf, False, time.perf_counter() - start,
                     {"proposals": found.proposals}),
            {"simulated": found.proposals + 1, "simulated_seconds": found.seconds,
             "first_simulated_seconds": found.first_seconds})


class _Judge:
    """Simulates strategies of one network, each once."""

    def __init__(self, priced: PricedNetwork, first: tuple[int, ...], memory_limit: float | None,
                 budget: Budget) -> None:
        """Has simulated the first.

        Args:
          priced: the network.
          first: the cheapest that fits the memory.
          memory_limit: bytes per device; what needs more is left out.
          budget: time for all of it.
        """
        self._priced, self._memory_limit, self._budget = priced, memory_limit, budget
        self._simulator = Simulator(priced)
        self._seconds = {first: self._simulator.seconds(first)}

    def add(self, assignment: tuple[int, ...]) -> bool:
        """Simulates a strategy, if there is time; returns whether that told anything: it is another one, fits, and is
        not too slow."""
        if self._budget.over or assignment in self._seconds or self._priced.network.cost(assignment) > LONGEST or (
                self._memory_limit is not None and self._priced.peak_memory(assignment)[0] > self._memory_limit):
            return False
        self._seconds[assignment] = self._simulator.seconds(assignment)
        return True

    def add_cheapest(self, most: int) -> None:
        """Simulates so many of the cheapest, and data parallelism."""
        if most > 1:
            with contextlib.suppress(InfeasibleError, UsageError):  # none in time, or in the memory; one is at hand
                # Half of the time, for what comes after it.
                found = solve(self._priced.network, "k_best", k=most, search_memory=self._budget.memory,
                              time_limit=min(_PATIENCE, self._budget.time_limit(0.5) or _PATIENCE))
                for _, assignment in found.statistics["strategies"]:
                    self.add(assignment)
        with contextlib.suppress(InfeasibleError, UsageError):  # the batch does not split so, or not as it is offered
            parallel = data_parallel(self._priced.graph, self._priced.devices)
            self.add(tuple(self._priced.index(layer, configuration) for layer, configuration in enumerate(parallel)))

    def learn_overlap(self) -> float | None:
        """Simulates the cheapest strategies under several overlaps, and under that which all simulated steps tell, as
        long as that is another one, a few times; returns the overlap, None where there is nothing to hide."""
        hideable = gradient_seconds(self._priced)
        budget = self._budget.until(min(time.perf_counter() + _PATIENCE, self._budget.deadline))
        for fraction in _OVERLAPS:
            self._add_cheapest_under(fraction, hideable, budget)
        overlap = self._overlap(hideable)
        for _ in range(_FITS):
            if overlap is None or not self._add_cheapest_under(overlap, hideable, budget):
                break
            overlap = self._overlap(hideable)
        return overlap

    def _add_cheapest_under(self, overlap: float, hideable: list[np.ndarray], budget: Budget) -> bool:
        if budget.over:
            return False
        hiding = dataclasses.replace(self._priced, network=_hiding(self._priced, hideable, overlap))
        if self._memory_limit is not None:
            vars(hiding)["memory_model"] = self._priced.memory_model  # the same, and made once
        with contextlib.suppress(InfeasibleError, UsageError):  # none in time, or in the memory
            return self.add(solve_within(hiding, self._memory_limit, {
                "certificate": False, "time_limit": budget.time_limit(), "search_memory": budget.memory},
                patience=_A_LOOK).assignment)
        return False

    def _overlap(self, hideable: list[np.ndarray]) -> float | None:
        """Of all that were simulated."""
        sums = [self._priced.network.cost(assignment) for assignment in self._seconds]
        hidden = [sum(float(vector[choice]) for vector, choice in zip(hideable, assignment, strict=True))
                  for assignment in self._seconds]
        return fitted_overlap(sums, hidden, [*self._seconds.values()])

    def ordered(self, *, proven: bool = True) -> tuple[list[tuple[int, ...]], list[float]]:
        """All that were simulated, by the sum of costs, and their seconds; the first stays in front where it is proven
        to be the cheapest: then others are below it by rounding alone."""
        first, *others = self._seconds
        cost = self._priced.network.cost
        assignments = [first, *sorted(others, key=cost)] if proven else sorted(self._seconds, key=cost)
        return assignments, [self._seconds[assignment] for assignment in assignments]


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
