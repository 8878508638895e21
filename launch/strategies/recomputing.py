"""Which blocks of a model a run computes again in the backward pass: those with which its step is fastest within the
memory limit.

Every set of blocks is a program of its own, with strategies of its own. To compute more again never makes a step
cheaper while memory is no matter: what the cheapest strategy of a set costs without a limit bounds all sets that hold
it. Sets are looked at in the order of that bound, until it is no less than what was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pase_mtf.amounts import bytes_text
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.arms.program import exported
from pase_mtf.launch.console import Stage
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.strategies.finding import strategy_by_hand
from pase_mtf.machine.machine import Machine
from pase_mtf.models.blocks import blocks_of, choices_of
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.search.memory import least_memory
from pase_mtf.search.registry import relative_gap
from pase_mtf.strategy.within import frontier_of, solve_within

__all__ = ["Priced", "Recomputation", "cheapest_counts", "fitting_blocks"]

_ROUNDING = 1e-9
"""Of sums of seconds, relative."""

_SECONDS = 60.0
"""After which no further set is looked at; a graph of thousands of operations takes seconds to export."""

_SECONDS_OF_SET = 5.0
"""Of a search within the limit; what it has not proven by then is part of the gap."""


class Priced(NamedTuple):
    """What the strategies of a program take.

    Attributes:
      seconds: of a step of the best strategy within a limit; inf: none was found.
      least: seconds that a step within it takes at least; inf: there is none, proven.
      nbytes: that the strategy needs per device.
      network: what was searched; None: nothing was.
    """

    seconds: float
    least: float
    nbytes: float
    network: PricedNetwork | None = None


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """What was chosen to be computed again, and among what.

    Attributes:
      blocks: names.
      of: how many there are.
      tried: names of a set of blocks -> what its strategies take, for all that were looked at.
      lower_bound: seconds of a step within the limit, of whatever set that is offered.
      seconds: predicted, of the best strategy with these blocks.
      limit: bytes per device.
    """

    blocks: tuple[str, ...]
    of: int
    tried: dict[tuple[str, ...], Priced]
    lower_bound: float
    seconds: float
    limit: float

    @property
    def gap(self) -> float:
        """By what fraction another set may be cheaper; 0: proven that none is."""
        return max(0.0, relative_gap(self.seconds, self.lower_bound))

    def text(self) -> str:
        """For people, a line."""
        best = self.tried[self.blocks]
        chosen = ", ".join(self.blocks) or "none"
        proof = "proven to be the fastest" if self.gap <= 0.0 else f"others may be {100 * self.gap:.2g} % faster"
        kept = self.tried.get(())
        beside = "" if not self.blocks or kept is None else (
            "; without, no strategy fits" if math.isinf(kept.seconds) else f"; without, {1e3 * kept.seconds:.2f} ms")
        return (f"computed again: {chosen} of {self.of} blocks: {1e3 * self.seconds:.2f} ms a step in "
                f"{bytes_text(best.nbytes)} per device{beside}; {proof} of {len(self.tried)} sets looked at")

    def frontiers(self, points: int = 8, time_limit: float = 0.5) -> dict[str, tuple[FrontierPoint, ...]]:
        """What memory buys with no block computed again, and with all: the fastest strategies within limits
        (`strategy.within.frontier_of`); without those that cannot be told in a few seconds."""
        ends = {"nothing": min(self.tried, key=len), "all blocks": max(self.tried, key=len)}
        found = {}
        for name, blocks in ends.items():
            if (network := self.tried[blocks].network) is not None and blocks != self.blocks:
                with contextlib.suppress(InfeasibleError):
                    found[f"{name} computed again"] = frontier_of(network, points, time_limit)
        return found

    def to_json(self) -> dict[str, object]:
        """As summary.json has it."""
        return {"blocks": list(self.blocks), "of": self.of, "seconds": self.seconds, "gap": self.gap, "tried": [
            {"blocks": list(names), "seconds": priced.seconds, "bytes": priced.nbytes}
            for names, priced in self.tried.items() if math.isfinite(priced.seconds)]}


def cheapest_counts(most: Sequence[int], bound_of: Callable[[tuple[int, ...]], float],
                    price: Callable[[tuple[int, ...]], Priced], time_limit: float = math.inf,
                    ) -> tuple[dict[tuple[int, ...], Priced], float]:
    """Looks for the counts whose program is the fastest within a limit.

    Args:
      most: the largest value of every count; all begin at 0.
      bound_of: the seconds that a step of counts takes without a limit, at least; larger counts must not have less.
      price: what it takes within it.
      time_limit: seconds after which nothing more is priced.

    Returns:
      What was priced, and a lower bound of the seconds within the limit of all counts.
    """
    end, start = time.monotonic() + time_limit, (0,) * len(most)
    known = {counts: price(counts) for counts in (start, tuple(most))}  # mostly the other end fits, if anything does
    exact = {start: bound_of(start)}
    left = [(exact[start], start, 0)]
    best = min(priced.seconds for priced in known.values())
    while left and left[0][0] * (1 + _ROUNDING) < best and time.monotonic() < end:
        bound, counts, last = heapq.heappop(left)
        if counts not in exact:
            exact[counts] = max(bound, bound_of(counts))
            heapq.heappush(left, (exact[counts], counts, last))
            continue
        if counts not in known:
            known[counts] = price(counts)
            best = min(best, known[counts].seconds)
        for number in range(last, len(most)):  # counts grow in their order: every set is reached on one way
            if counts[number] < most[number]:
                more = (*counts[:number], counts[number] + 1, *counts[number + 1:])
                heapq.heappush(left, (bound, more, number))
    least = min([*(bound for bound, _, _ in left), *(priced.least for priced in known.values())])
    return known, best if least * (1 + _ROUNDING) >= best else least


def fitting_blocks(plan: Plan, machine: Machine) -> Recomputation:
    """The blocks to compute again: those with which the strategy of --strategy is fastest within --memory_limit.

    Args:
      plan: of the run, its number of microbatches known.
      machine: the devices.

    Raises:
      InfeasibleError: with none of the sets that are offered a strategy keeps to the limit.
    """
    limit = plan.options.bytes_per_device(machine)
    names = blocks_of(exported(plan.recomputing(()))[1])
    choices = choices_of(names)

    def chosen(counts: Sequence[int]) -> tuple[str, ...]:
        return tuple(name for choice, count in zip(choices, counts, strict=True) for name in choice[:count])

    programs = _Programs(plan, machine, limit)
    with Stage("recomputation"):
        known, bound = cheapest_counts(list(map(len, choices)), lambda counts: programs.bound(chosen(counts)),
                                       lambda counts: programs.price(chosen(counts)), _SECONDS)
    tried = {chosen(counts): priced for counts, priced in known.items()}
    best = min(tried, key=lambda names: (tried[names].seconds, len(names)))
    if math.isinf(tried[best].seconds):
        raise InfeasibleError(f"--recompute=auto: no strategy keeps to {bytes_text(limit)} per device, whichever of "
                              f"{len(names)} blocks are computed again; take --microbatches=auto, a smaller --batch, "
                              "more devices, or a larger --memory_limit")
    return Recomputation(best, len(names), tried, bound, tried[best].seconds, limit)


class _Programs:
    """The programs of a run that differ in what is computed again, each exported and searched once."""

    def __init__(self, plan: Plan, machine: Machine, limit: float) -> None:
        self._plan, self._machine, self._limit = plan, machine, limit
        self._free: dict[tuple[str, ...], Priced] = {}

    def bound(self, blocks: tuple[str, ...]) -> float:
        """Seconds of a step without a limit, at least."""
        return self._without_limit(blocks).least

    def price(self, blocks: tuple[str, ...]) -> Priced:
        """What the strategies take within the limit."""
        free = self._without_limit(blocks)
        if free.nbytes <= self._limit:
            return free
        nothing = Priced(math.inf, math.inf, math.nan, free.network)
        if free.network is None or _least_bytes(free.network) > self._limit:
            return nothing
        try:
            found = solve_within(free.network, self._limit, {"certificate": False, "time_limit": _SECONDS_OF_SET})
        except InfeasibleError:  # found in that time, or as far as limits at some moments go
            return nothing._replace(least=free.least)
        nbytes, _ = free.network.peak_memory(found.assignment)
        return Priced(found.cost, max(found.lower_bound, free.least), nbytes, free.network)

    def _without_limit(self, blocks: tuple[str, ...]) -> Priced:
        if blocks not in self._free:
            plan = self._plan.recomputing(blocks)
            graph, _ = exported(plan)
            if (strategy := strategy_by_hand(plan, graph, self._machine)) is not None:
                self._free[blocks] = Priced(strategy.seconds, strategy.seconds, strategy.memory_bytes, None)
            else:
                network = build_network(graph, self._machine, plan.devices.count)
                found = solve_within(network, None, {"certificate": False, "time_limit": _SECONDS_OF_SET})
                self._free[blocks] = Priced(found.cost, found.lower_bound, network.peak_memory(found.assignment)[0],
                                            network)
        return self._free[blocks]


def _least_bytes(network: PricedNetwork) -> float:
    """What a device holds at least under any strategy: at each of some moments, from that on at which most is there
    while nothing is split, the least; the next moment is that at which the strategy that needs it holds most."""
    moment, least, seen = network.memory_model.fullest, 0.0, set[int]()
    while moment not in seen:
        seen.add(moment)
        nbytes, lightest = least_memory(network.network, network.memory_with(moment))
        least, moment = max(least, nbytes), network.peak_memory(lightest)[1]
    return least
