"""The cheapest assignments of a priced network within limits on what a device holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.search import Solution, solve
from pase_mtf.search.budget import Budget
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.search.looking_on import above, unproven
from pase_mtf.search.memory import least_memory
from pase_mtf.search.peak import minimise_within_peak
from pase_mtf.strategy.experts import data_parallel

__all__ = ["Priced", "StrategiesWithin", "frontier_of", "solve_within"]

_ROOM = (1.05, 1.3)
"""How much more than the lightest, at one moment, strategies may need that are looked at for the peak."""

_PATIENCE = 0.5
"""Seconds to look on for within one limit, where many programs are searched before one of them is run."""


def solve_within(priced: PricedNetwork, memory_limit: float | None, options: dict[str, Any],
                 cheapest: Solution | None = None, known: Sequence[Configuration] | None = None,
                 patience: float | None = None) -> Solution:
    """The cheapest assignment that needs no more than so many bytes per device (None: however many).

    Args:
      priced: where the costs are.
      memory_limit: bytes per device.
      options: of the exact search; `time_limit` is for all of it.
      cheapest: of all; it is searched for if not given.
      known: a strategy, a configuration per layer: where it is offered and fits, what is found costs no more.
      patience: seconds to look on for where nothing is proven at once, as of `minimise_within_peak`.

    Raises:
      InfeasibleError: nothing fits, or nothing that fits was found.
    """
    if memory_limit is None:
        return cheapest or solve(priced.network, "exact", **options)
    options, given = dict(options), options.get("initial")
    options.pop("initial", None)
    budget = Budget.of(options.get("time_limit"))
    if cheapest is None:  # half of the time, for what may have to follow
        cheapest = solve(priced.network, "exact", **{**options, "time_limit": budget.time_limit(0.5)})
    first = [] if given is None else [_given(priced, given)]
    at_hand = [*first, *_by_hand(priced), *_offered(priced, known)]
    fitting = [one for one in at_hand if priced.peak_memory(one.assignment)[0] <= memory_limit]
    initial = min(fitting, key=lambda one: one.cost).assignment if fitting else None
    return minimise_within_peak(priced.network, functools.cache(priced.memory_with), priced.peak_memory, memory_limit,
                                copies=priced.copies_at, cheapest=cheapest, initial=initial,
                                known=[one.assignment for one in at_hand], patience=patience,
                                **{**options, "time_limit": budget.time_limit()})


def frontier_of(priced: PricedNetwork, points: int, time_limit: float | None = None) -> tuple[FrontierPoint, ...]:
    """The cheapest assignments within limits in equal steps: from what the lightest needs that is found, to what the
    cheapest of all needs.

    Args:
      priced: where the costs are.
      points: how many limits, both ends included.
      time_limit: seconds for each of them.

    Returns:
      the points by rising limit. What was found for a lower limit is kept where the search finds nothing cheaper, so
      costs never rise; bound, gap and proof are those of the higher limit even so.

    Raises:
      UsageError: fewer than two points.
      InfeasibleError: no assignment is finite, or none was found in that time.
    """
    if points < 2:
        raise UsageError(f"a frontier of {points} points; ask for at least two")
    options: dict[str, Any] = {"time_limit": time_limit, "certificate": False}
    cheapest = solve(priced.network, "exact", **options)
    most = priced.peak_memory(cheapest.assignment)[0]
    # Of those that need as little, the cheapest: the very lightest was found by its bytes alone.
    lightest = min((cheapest, *_light(priced, options)),
                   key=lambda one: (priced.peak_memory(one.assignment)[0], one.cost))
    least = priced.peak_memory(lightest.assignment)[0]
    found: list[FrontierPoint] = []
    for limit in np.linspace(least, most, points).tolist():
        # What was found for a lower limit keeps this one as well.
        kept = found[-1].solution if found else lightest
        # At the lowest limit, too: what was found by its bytes may not be the cheapest that needs as little.
        solution = cheapest if limit == most else solve_within(
            priced, limit, {**options, "initial": kept.assignment}, cheapest)
        if kept.cost < solution.cost:
            # Only the assignment: with more memory there may be a cheaper one, so a bound or proof from below is none.
            solution = above(unproven(kept), min(solution.lower_bound, kept.cost))
        found.append(FrontierPoint(limit, priced.peak_memory(solution.assignment)[0], solution))
    return tuple(found)


def _given(priced: PricedNetwork, assignment: Sequence[int]) -> Solution:
    """An assignment of which nothing is proven."""
    cost = priced.network.cost(assignment)  # first, as it says what is wrong with it
    return Solution(tuple(assignment), cost, -math.inf, math.inf, False, 0.0, {})


def _by_hand(priced: PricedNetwork) -> list[Solution]:
    """Data parallelism, where the graph has a batch that splits, and it is offered."""
    try:
        return _offered(priced, data_parallel(priced.graph, priced.devices))
    except InfeasibleError:
        return []


def _offered(priced: PricedNetwork, configurations: Sequence[Configuration] | None) -> list[Solution]:
    """A strategy, where there is one and it is offered."""
    if configurations is None:
        return []
    if len(configurations) != len(priced.configurations):
        raise UsageError(f"known: {len(configurations)} configurations for {len(priced.configurations)} layers; give "
                         "one per layer")
    known = [priced.find(layer, configuration) for layer, configuration in enumerate(configurations)]
    choices = [choice for choice in known if choice is not None]
    return [_given(priced, choices)] if len(choices) == len(known) else []


def _light(priced: PricedNetwork, options: dict[str, Any]) -> list[Solution]:
    """Assignments that need little: data parallelism; at the moment at which most is there while nothing is split,
    and at that at which the one found for it holds most, the lightest; and the cheapest that need hardly more, for
    copies of what the lightest moves may be more than it saves."""
    found, budget = _by_hand(priced), Budget.of(options["time_limit"])
    moments = [priced.memory_model.fullest]
    for moment in moments:
        memory = priced.memory_with(moment)
        try:
            least, lightest = least_memory(priced.network, memory, budget)
        except InfeasibleError:  # not found in time
            break
        found.append(_given(priced, lightest))
        for room in _ROOM:
            with contextlib.suppress(InfeasibleError):
                found.append(dataclasses.replace(solve(
                    priced.network, "exact", memory=memory, memory_limit=room * least,
                    **{**options, "time_limit": budget.time_limit(0.5)}),
                    lower_bound=-math.inf, gap=math.inf, optimal=False))
        fullest = priced.peak_memory(lightest)[1]
        if fullest not in moments and len(moments) < 2:
            moments.append(fullest)
    return found


class Priced(NamedTuple):
    """What the strategies of a program take.

    Attributes:
      seconds: of a step of the best strategy within a limit; inf: none was found.
      least: seconds that a step within it takes at least; inf: there is none, proven.
      nbytes: that the strategy needs per device.
      network: what was searched; None: nothing was.
      configurations: of the strategy, one per layer; None: there is none, or it was not searched.
    """

    seconds: float
    least: float
    nbytes: float
    network: PricedNetwork | None = None
    configurations: tuple[Configuration, ...] | None = None


class StrategiesWithin:
    """The strategies of one graph, searched within several limits.

    Attributes:
      free: without a limit.
    """

    def __init__(self, graph: ComputationGraph, machine: Machine, devices: int, time_limit: float) -> None:
        """Prices the graph, and searches without a limit.

        Args:
          graph, machine, devices: as of `find_strategy`.
          time_limit: seconds of every search.
        """
        self._network = build_network(graph, machine, devices)
        self._options = {"certificate": False, "time_limit": time_limit}
        self._cheapest = solve_within(self._network, None, self._options)
        self.free = self._priced(self._cheapest)

    def within(self, limit: float) -> Priced:
        """The fastest that needs no more than so many bytes per device."""
        if self.free.nbytes <= limit:
            return self.free
        nothing = Priced(math.inf, math.inf, math.nan, self._network)
        if self._least_bytes() > limit:
            return nothing
        try:
            found = self._priced(solve_within(self._network, limit, self._options, self._cheapest,
                                              patience=_PATIENCE))
        except InfeasibleError as error:  # proven, or not found in that time or as far as limits at some moments go
            return nothing._replace(least=max(error.lower_bound, self.free.least))
        return found._replace(least=max(found.least, self.free.least))

    def _priced(self, solution: Solution) -> Priced:
        configurations = tuple(choices[choice] for choices, choice in zip(
            self._network.configurations, solution.assignment, strict=True))
        return Priced(solution.cost, solution.lower_bound, self._network.peak_memory(solution.assignment)[0],
                      self._network, configurations)

    def _least_bytes(self) -> float:
        """What a device holds at least under any strategy: the least at each of some moments, the first of them that at
        which most is there while nothing is split, the next that at which the strategy that needs it holds most."""
        network, least, seen = self._network, 0.0, set[int]()
        moment, budget = network.memory_model.fullest, Budget.of(self._options["time_limit"])
        while moment not in seen:
            seen.add(moment)
            try:
                nbytes, lightest = least_memory(network.network, network.memory_with(moment), budget)
            except InfeasibleError:  # not found in time
                break
            least, moment = max(least, nbytes), network.peak_memory(lightest)[1]
        return least
