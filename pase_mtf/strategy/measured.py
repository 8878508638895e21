"""Strategies priced by measured kernels, of which only those are measured that matter.

A search needs the times of few of the kernels that all configurations together run. Those that are not measured have a
price of which it is known that it is too low; the strategy that is cheapest by such prices tells what to measure next.
Once it consists of measured kernels alone it is the cheapest of all: what was not measured costs more than it seems.
First the prices are estimates, so that a good strategy is found soon; then bounds, which prove it, or tell how far it
is from the best at most.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.cost.kernels import KernelSource, KnownKernels
from pase_mtf.cost.roofline import roofline_machine, still_true
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.search import Solution, solve
from pase_mtf.strategy.choosing import gap_above, outdone, simple_configurations, simpler
from pase_mtf.strategy.devices import fuller_devices, useful_devices
from pase_mtf.strategy.experts import data_parallel, expert
from pase_mtf.strategy.kernels_text import origin_text
from pase_mtf.strategy.measuring import measure, measure_again, missing_of
from pase_mtf.strategy.search_report import KernelsReport, SearchReport
from pase_mtf.strategy.strategy import Strategy, check_configurations, price_assignment, with_configurations
from pase_mtf.strategy.within import solve_within

__all__ = ["MeasuredPrices"]

_CERTAIN = 1e-6
"""A gap, relative, that is rounding."""
_BY_HAND_SHARE = 0.3
"""Of the time for measuring, for the kernels of what people write by hand."""
_WORTH = 0.02
"""Of a step, that estimates have to promise for one more round of measuring: they are not better than that."""
_PATIENCE = 3
"""Rounds in a row that did not find what estimates promised: of many strategies some are always estimated too low."""
_FIRST_TIME = 0.5
"""Of the kernels of the first strategy that is looked at: where more are unknown, nobody measured this program here."""
_WARY = 0.75
"""Of the kernels of an operation, that take no longer than one is taken to that was not measured, where strategies are
weighed against others: by medians, that one is taken of which most is estimated too low."""
_SEARCH_SECONDS = 2.0
"""Of one search, where less is left."""
_SECONDS_WITHIN = 0.5
"""For looking on within a memory limit where nothing is proven at once: once in every round of measuring."""


class _Bound(NamedTuple):
    """What no step takes less than, as was found once.

    Attributes:
      seconds: of the step.
      took: seconds of the search that found it.
      machine: by whose rates configurations were priced of which no kernels were known.
      kernels: that were known.
      times: of those that were measured.
      updates: of these.
    """

    seconds: float
    took: float
    machine: Machine
    kernels: AbstractSet[Kernel]
    times: KernelTimes
    updates: int


class MeasuredPrices:
    """Prices strategies of one graph by kernels that are measured when they are needed.

    Attributes:
      rounds: how often a search was followed by measuring.
    """

    def __init__(self, graph: ComputationGraph, source: KernelSource, meter: KernelMeter | SavedKernels,
                 progress: Callable[[str], object] = lambda text: None) -> None:
        """Measures nothing yet.

        Args:
          graph: whose strategies are priced.
          source: which kernels it runs (`lowering.kernels.GraphKernels`).
          meter: what is measured, and measures more; started. Or what was measured elsewhere, and nothing more.
          progress: called with what is being done, a line.
        """
        self._graph, self._source, self._meter, self._progress = graph, source, meter, progress
        self._known = KnownKernels(graph, source)
        self._base: tuple[int, PricedNetwork] | None = None
        self._prices = dict[bool, Callable[[Kernel], float]]()  # by whether they are bounds; of those times
        self.rounds, self._most_spent = 0, math.inf
        self._again_seconds = math.inf  # that are left for what was timed while others slowed the machine
        self._begin_with: Sequence[Configuration] | None = None
        self._bounds = dict[float | None, _Bound]()  # by memory limit

    @property
    def meter(self) -> KernelMeter | SavedKernels:
        """Where the times of kernels come from."""
        return self._meter

    def find(self, *, seconds: float = math.inf, later_seconds: float | None = None, prove: bool = False,
             memory_limit: float | None = None, simple_within: float = 0.0,
             known: Sequence[Configuration] | None = None) -> Strategy:
        """The cheapest strategy by kernels that are measured, or else estimated; within a gap that it tells.

        Args:
          seconds: how long to look and to measure; what is not measured then keeps its estimate.
          later_seconds: how long to measure at most, where most kernels of what seems the cheapest are known, as they
            are in all runs of a program but the first, and to look for bounds; None: as long as in the first.
          prove: go on to measure until no other strategy can be cheaper, or the seconds are over, also where all
            kernels of what was found are known. That takes most kernels of most configurations.
          memory_limit, simple_within, known: of `find_strategy`.

        Raises:
          InfeasibleError: no strategy satisfies the constraints.
        """
        self._begin_with = known
        if memory_limit == math.inf:  # none: by that `again` looks for what was proven
            memory_limit = None
        if not self._graph.layers:
            raise InfeasibleError(f"{self._graph.name}: the graph has no layers; build the model before searching")
        begin = time.perf_counter()
        end = begin + seconds
        first = self._unknown(memory_limit, end) > _FIRST_TIME
        self._again_seconds = math.inf if first or later_seconds is None else later_seconds
        self._most_spent = self._meter.spent + self._again_seconds
        best, complete = self._explore(begin + (1.0 - _BY_HAND_SHARE) * seconds, memory_limit)
        # After the search: what it has not seen it estimates by what it has, and these may be far from the best.
        by_hand = self._by_hand()
        simple = simple_configurations(self._graph, self._meter.devices) if simple_within > 0.0 else None
        if simple is not None:
            self._known.look(simple)
        self._measure(by_hand if simple is None else [*by_hand, simple], end)
        self._measure_again([best, *by_hand], end)
        # The first run on a machine has to measure, and goes on to prove, for no longer than it took to find something;
        # later ones want the answer at once.
        now = time.perf_counter()
        if complete and (prove or first):
            solution, complete = self._converge(end if prove else min(end, now + (now - begin)), memory_limit)
        else:
            looking = _SEARCH_SECONDS if later_seconds is None else min(_SEARCH_SECONDS, later_seconds)
            solution = self._tighten(min(end, time.perf_counter() + looking), memory_limit)
            # It is a bound, and no strategy costs less: where it consists of what was measured, it is proven again.
            complete = solution.optimal and self._all_measured(self._configurations(solution))
        # Of what is proven, too, a kernel may be unknown, as it cannot be measured: then another may be cheaper.
        others = [best, *by_hand]
        best = self._cheapest([self._configurations(solution), *others] if complete else
                              [*others, self._explore(end, memory_limit)[0]], memory_limit)
        priced, assignment = with_configurations(self._priced(bounds=False), best)
        cost = priced.network.cost(assignment)
        bound = self._bound(memory_limit, cost)
        gap = gap_above(cost, bound)
        found = price_assignment("exact", priced, assignment, {
            "seconds": time.perf_counter() - begin, "build_seconds": 0.0, "optimal": complete and gap <= _CERTAIN,
            "gap": 0.0 if complete and gap <= _CERTAIN else gap, "lower_bound": bound,
            "layers": len(self._graph.layers), "configurations": sum(map(len, priced.configurations)),
            "method": "exact",
            "useful_devices": useful_devices(self._graph, best),
            "suggested_devices": fuller_devices(self._graph, self._meter.devices, best)})
        if memory_limit is not None:
            found.search["memory_limit"] = memory_limit
        # What is estimated counts for more here, too: else that is taken of which most is estimated too low.
        if simple is not None and self.wary_seconds(simple) <= (1.0 + simple_within) * self.wary_seconds(best):
            found = simpler(found, priced, memory_limit, simple_within)
        found.search.update(self._report(found.configurations))
        self._most_spent = math.inf
        return self._explained(found)

    def evaluate(self, configurations: Sequence[Configuration], name: str, *, seconds: float = math.inf) -> Strategy:
        """The strategy of given configurations, its kernels measured as far as the seconds go.

        Raises:
          UsageError: as of `check_configurations`.
        """
        check_configurations(self._graph, configurations, self._meter.devices)
        self._known.look(configurations)
        end = time.perf_counter() + seconds
        self._measure([configurations], end)
        self._measure_again([configurations], end)
        priced, assignment = with_configurations(self._priced(bounds=False), configurations)
        return self._explained(price_assignment(name, priced, assignment, self._report(configurations)))

    def again(self, strategy: Strategy, configurations: Sequence[Configuration] | None = None) -> Strategy:
        """A strategy, and the bound of its search, by what is known now, which may be more than when it was found;
        nothing is measured.

        Args:
          strategy: that was found by these prices.
          configurations: of the strategy that it gives way to, where one turned out to be cheaper.
        """
        chosen = strategy.configurations if configurations is None else tuple(configurations)
        priced, assignment = with_configurations(self._priced(bounds=False), chosen)
        cost, search = priced.network.cost(assignment), strategy.search
        if search.get("lower_bound", -math.inf) > 0.0:
            bound = self._bound(search.get("memory_limit"), cost)
            gap = gap_above(cost, bound)
            proven = search["optimal"] and gap <= _CERTAIN
            search = {**search, "lower_bound": bound, "optimal": proven, "gap": 0.0 if proven else gap}
        if chosen != strategy.configurations:
            search = outdone(search, self._graph, self._meter.devices, chosen, cost)
        told: SearchReport = {**search, **self._report(chosen)}
        # What it took to find it stays: what was looked at for others since is not of this search.
        before = strategy.search["kernels"]
        told["kernels"].update({"seen": before["seen"], "measured": before["measured"], "rounds": before["rounds"],
                                "seconds": before["seconds"]})
        return self._explained(price_assignment(strategy.name, priced, assignment, told))

    def wary_seconds(self, configurations: Sequence[Configuration]) -> float:
        """A step of a strategy in which what was not measured takes longer than it is estimated to."""
        self._known.look(configurations)
        times = self._meter.times
        unknown = [(kernel, count) for kernel, count in self._known.kernels(configurations).items()
                   if kernel not in times]
        return self._cost(configurations) + sum(
            count * (times.estimate(kernel, _WARY) - times.estimate(kernel)) for kernel, count in unknown)

    def shares(self, strategies: Collection[Sequence[Configuration]]) -> dict[Kernel, float]:
        """What share each measured kernel has of what all measured ones take of a step, in the mean of some strategies.

        Args:
          strategies: a configuration per layer each.

        Returns:
          kernel -> its share; together 1 at most.
        """
        found, times = collections.Counter[Kernel](), self._meter.times
        for configurations in strategies:
            self._known.look(configurations)
            seconds = {kernel: count * timing.seconds for kernel, count in self._known.kernels(configurations).items()
                       if (timing := times.get(kernel))}
            step = sum(seconds.values())
            found.update({kernel: part / step for kernel, part in seconds.items()})
        return {kernel: share / len(strategies) for kernel, share in found.items()}

    def improve(self, start: Sequence[Configuration], name: str, *, seconds: float = math.inf, seed: int = 0,
                ) -> Strategy:
        """FlexFlow's search, from a given strategy, by kernels: those of what it finds are measured, and it searches
        again by what is known then, until it finds what is measured, or the time is over.

        Args:
          start: a configuration per layer.
          name: of the strategy.
          seconds: how long to search and to measure.
          seed: of its random numbers.

        Raises:
          UsageError: as of `check_configurations`.
        """
        check_configurations(self._graph, start, self._meter.devices)
        begin = time.perf_counter()
        end = begin + seconds
        self._known.look(start)
        self._measure([start], end)
        while True:
            priced, initial = with_configurations(self._priced(bounds=False), start)
            solution = solve(priced.network, "mcmc", initial=initial, seed=seed)
            self._last = priced
            found = self._configurations(solution)
            new = self._known.look(found)
            missing = self._meter.missing(list(self._known.kernels(found)))
            if not (new or missing) or time.perf_counter() >= end or (missing and not self._measure([found], end)):
                break
        # What was not looked at seems cheap until it is: where the time was over, what it began with may be cheaper.
        found = self._cheapest([found, tuple(start)], None)
        priced, assignment = with_configurations(self._priced(bounds=False), found)
        return self._explained(price_assignment(name, priced, assignment, {
            "seconds": time.perf_counter() - begin, "build_seconds": 0.0, "optimal": False, "gap": math.inf,
            "lower_bound": -math.inf, "layers": len(self._graph.layers),
            "configurations": sum(map(len, priced.configurations)), "method": "mcmc", **self._report(found)}))

    def _explained(self, strategy: Strategy) -> Strategy:
        """The same, which can tell of the alternatives of its layers whether they were measured."""
        # A function and no method: who copies the strategy does not mean all that is measured.
        return dataclasses.replace(strategy, _is_measured=lambda one, other: self._differ_in_measured(one, other))

    def _differ_in_measured(self, one: Sequence[Configuration], other: Sequence[Configuration]) -> bool:
        """Whether all kernels are measured that one strategy runs more often than the other."""
        try:
            ones, others = self._known.kernels(one), self._known.kernels(other)
        except KeyError:  # nobody has looked yet which kernels those are
            return False
        return all(kernel in self._meter.times for kernel in ones.keys() | others.keys()
                   if ones[kernel] != others[kernel])

    def _all_measured(self, configurations: Sequence[Configuration]) -> bool:
        """Whether somebody has looked which kernels a strategy runs, and all of these are measured."""
        try:
            return all(kernel in self._meter.times for kernel in self._known.kernels(configurations))
        except KeyError:  # the time was over before
            return False

    def _report(self, configurations: Sequence[Configuration]) -> SearchReport:
        """What of a strategy's price was measured, for its `search`."""
        run, seen, times = self._known.kernels(configurations), self._known.all_kernels(), self._meter.times
        untraced = [*self._source.untraced, *(f"{kernel}: {why}" for kernel, why in self._meter.failed.items()
                                              if kernel in run)]
        found: KernelsReport = {
            "of_strategy": len(run), "measured_of_strategy": sum(kernel in times for kernel in run), "seen": len(seen),
            "measured": sum(kernel in times for kernel in seen), "rounds": self.rounds,
            "seconds": round(self._meter.spent, 1)}
        if untraced:
            found["untraced"] = untraced
        return {"kernels": found}

    # -- rounds -------------------------------------------------------------------------------------------------------
    def _explore(self, end: float, memory_limit: float | None) -> tuple[tuple[Configuration, ...], bool]:
        """Searches by estimates, looks and measures in turn, until the cheapest strategy consists of measured kernels,
        or no other promises much more than the best so far, or a few that did have not kept it, or the time is over:
        (the best, whether it was not the time)."""
        best, least, idle = tuple[Configuration, ...](), math.inf, 0
        while True:
            solution = self._solve(self._priced(bounds=False), memory_limit, end)
            if idle == _PATIENCE or solution.cost >= (1.0 - _WORTH) * least:
                return best, True
            configurations = self._configurations(solution)
            new, kernels = self._known.look(configurations), list(self._known.kernels(configurations))
            missing = self._meter.missing(kernels)
            stuck = bool(missing) and not self._measure([configurations], end) and bool(self._meter.missing(kernels))
            cost = self._cost(configurations)
            idle = 0 if cost < (1.0 - _WORTH) * least else idle + 1
            if cost < least:
                best, least = configurations, cost
            if not (new or missing):
                return configurations, solution.optimal
            if stuck or time.perf_counter() >= end:
                return best, False

    def _unknown(self, memory_limit: float | None, end: float) -> float:
        """Of the kernels of the strategy that is the cheapest by what is known before anything is measured, those that
        nobody measured here, as a fraction."""
        configurations = self._configurations(self._solve(self._priced(bounds=False), memory_limit, end))
        self._known.look(configurations)
        kernels = self._known.kernels(configurations)
        return len(self._meter.missing(list(kernels))) / max(1, len(kernels))

    def _cost(self, configurations: Sequence[Configuration]) -> float:
        """Seconds of a step by what is known now."""
        priced, assignment = with_configurations(self._priced(bounds=False), configurations)
        return priced.network.cost(assignment)

    def _converge(self, end: float, memory_limit: float | None) -> tuple[Solution, bool]:
        """Searches by bounds, looks and measures in turn until the cheapest strategy consists of measured kernels, or
        the time is over: (the last solution, whether it does)."""
        while True:
            solution = self._solve_by_bounds(memory_limit, end)
            configurations = self._configurations(solution)
            left = max(0.0, end - time.perf_counter())
            self._progress(f"proof: no step takes less than {1e3 * solution.lower_bound:.1f} ms, "
                           f"{len(self._meter.times)} kernels are known" + (
                               f", at most {left:.0f} s are left" if math.isfinite(left) else ""))
            new = self._known.look(configurations)
            kernels = list(self._known.kernels(configurations))
            missing = self._meter.missing(kernels)
            if not new and not missing:
                return solution, solution.optimal
            # Those that turn out not to be measurable are no longer missing.
            if time.perf_counter() >= end or (missing and not self._measure([configurations], end)
                                              and self._meter.missing(kernels)):
                return solution, False

    def _tighten(self, end: float, memory_limit: float | None) -> Solution:
        """Searches by bounds, and looks at what was found: the kernels of a configuration, though none of them is
        measured, bound its cost better than its arithmetic does."""
        while True:
            solution = self._solve_by_bounds(memory_limit, end)
            if time.perf_counter() >= end or not self._known.look(self._configurations(solution)):
                return solution

    def _solve_by_bounds(self, memory_limit: float | None, end: float) -> Solution:
        begin, before, times = time.perf_counter(), self._bounds.get(memory_limit), self._meter.times
        solution = self._solve(self._priced(bounds=True), memory_limit, end)
        found = _Bound(solution.lower_bound, time.perf_counter() - begin, self.machine,
                       self._known.all_kernels(), KernelTimes(times.on, dict(times.items())), times.updates)
        if before is not None and before.seconds > found.seconds and (kept := self._still(before)) > found.seconds:
            found = found._replace(seconds=kept, took=max(before.took, found.took))
        self._bounds[memory_limit] = found
        return solution

    def _still(self, bound: _Bound) -> float:
        """What is left of a bound by all that is known now: all of it where no kernel that it knew has a lower price
        than then and no rate is better, else as much less as the price that has fallen most. No price is lower because
        kernels of more configurations are known: by their rates these cost no more. What a step takes is a sum of
        prices, each some times, and so its bound falls by no more than they do."""
        then = {kernel: _at_least(bound.times, kernel) for kernel in bound.kernels}
        shares = [_at_least(self._meter.times, kernel) / price for kernel, price in then.items() if price > 0.0]
        return bound.seconds * min([still_true(bound.machine, self.machine), *shares])

    def _bound(self, memory_limit: float | None, cost: float) -> float:
        """Seconds that no step within the limit takes less than, by the kernels that are known now; -inf: that was not
        found. What was measured since the last search by bounds may have been faster than anything before: then what
        was not measured may be, too, and the bound is lower. How much of it is left at least is known without a search
        (`_still`). Where that does not prove the cost it is searched anew, and the better of the two counts: no bound
        is lower for want of time. Where kernels were faster that has as long as the search before."""
        before, kept, seconds = self._bounds.get(memory_limit), -math.inf, _SEARCH_SECONDS
        if before is not None:
            if before.updates == self._meter.times.updates:
                return before.seconds
            kept = self._still(before)
            if gap_above(cost, kept) <= _CERTAIN:
                return kept
            if kept < before.seconds:
                seconds = max(seconds, before.took)
        try:
            self._solve_by_bounds(memory_limit, time.perf_counter() + seconds)
            return self._bounds[memory_limit].seconds
        except InfeasibleError as error:  # within the limit nothing was found in that time
            return kept if error.proven else max(kept, error.lower_bound)

    def _measure(self, strategies: Sequence[Sequence[Configuration]], end: float) -> int:
        """Measures what is missing of some strategies, what matters most first."""
        missing = missing_of(self._meter, self._counts(strategies))
        end = min(end, time.perf_counter() + self._most_spent - self._meter.spent)
        if not missing or time.perf_counter() >= end:
            return 0
        self.rounds += 1
        return measure(self._meter, missing, end, f"round {self.rounds}", self._progress)

    def _measure_again(self, strategies: Sequence[Sequence[Configuration]], end: float) -> None:
        """Measures what of some strategies was timed while others slowed the machine, what matters most first."""
        begin = time.perf_counter()
        left = min(self._again_seconds, self._most_spent - self._meter.spent)
        measure_again(self._meter, self._counts(strategies), min(end, begin + left), self._progress)
        self._again_seconds -= time.perf_counter() - begin  # later runs want the answer at once, with however many arms

    def _counts(self, strategies: Sequence[Sequence[Configuration]]) -> dict[Kernel, int]:
        """The kernels of strategies that were looked at, and how often the last that runs one does."""
        counts = dict[Kernel, int]()
        for configurations in strategies:
            counts |= self._known.kernels(configurations)
        return counts

    def _by_hand(self) -> list[tuple[Configuration, ...]]:
        """What people write by hand, looked at: what a search finds among estimates may turn out to cost more."""
        found = []
        for write in (data_parallel, expert):
            with contextlib.suppress(InfeasibleError):
                found.append(write(self._graph, self._meter.devices))
                self._known.look(found[-1])
        return found

    def _cheapest(self, candidates: Sequence[tuple[Configuration, ...]],
                  memory_limit: float | None) -> tuple[Configuration, ...]:
        """The cheapest by what is known now, of those that keep the limit; the first does."""
        base, costs = self._priced(bounds=False), list[float]()
        for configurations in candidates:
            priced, assignment = with_configurations(base, configurations)
            fits = not costs or memory_limit is None or priced.peak_memory(assignment)[0] <= memory_limit
            costs.append(self.wary_seconds(configurations) if fits else math.inf)
        return candidates[costs.index(min(costs))]

    @property
    def machine(self) -> Machine:
        """The devices, at the best rates of all kernels that are known."""
        times = self._meter.times
        return roofline_machine(times, self._meter.devices, self._meter.memory_per_device, origin_text(times.on))

    # -- prices -------------------------------------------------------------------------------------------------------
    def _priced(self, *, bounds: bool) -> PricedNetwork:
        times = self._meter.times
        if self._base is None or self._base[0] != times.updates:
            self._base = times.updates, build_network(self._graph, self.machine, self._meter.devices)
            self._prices = {True: functools.cache(functools.partial(_at_least, times)),
                            False: functools.cache(times.estimate)}
        return self._known.applied(self._base[1], self._prices[bounds], scaled=not bounds)

    def _solve(self, priced: PricedNetwork, memory_limit: float | None, end: float) -> Solution:
        self._last = priced
        left = max(end - time.perf_counter(), _SEARCH_SECONDS)
        found = solve_within(priced, memory_limit, {"certificate": False, "time_limit": min(left, 1e6)},
                             known=self._begin_with, patience=_SECONDS_WITHIN)
        if memory_limit is not None and self._begin_with is None:
            # It keeps the limit whatever the prices: later searches, which may have less time, find that at least.
            self._begin_with = self._configurations(found)
        return found

    def _configurations(self, solution: Solution) -> tuple[Configuration, ...]:
        return tuple(choices[index] for choices, index in zip(
            self._last.configurations, solution.assignment, strict=True))


def _at_least(times: KernelTimes, kernel: Kernel) -> float:
    """Seconds of a kernel: measured, or else bounded."""
    found = times.get(kernel)
    return found.seconds if found else times.bound(kernel)
