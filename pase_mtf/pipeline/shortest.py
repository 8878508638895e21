"""The cut whose simulated step is shortest, of all cuts of some blocks whose stages have their cheapest strategies.

Branch and bound, the least bound first: stages are added from the first to the last. A stage of which nothing is known
takes what the kernels of its layers take at least, each in the configuration in which they are fastest: a device
computes them one after the other, whatever else a simulation overlaps. Stages of the cut with the least bound are
searched and simulated, then the cut is; until no bound is less than the shortest step.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.pipeline.blocks import Blocks
from pase_mtf.pipeline.cutting import Cutting, Place
from pase_mtf.pipeline.prices import StagePrices
from pase_mtf.pipeline.schedule import in_flight
from pase_mtf.pipeline.simulate import Laid, StageSeconds, Step, simulate_step, stage_seconds
from pase_mtf.pipeline.stage_costs import Quickest, StageCosts

__all__ = ["Cuts", "Placed", "Simulated", "shortest_steps"]

_ROUNDING = 1e-6
"""Of sums of seconds, relative: simulated tasks take whole picoseconds."""

Placed = tuple[tuple[Place, int], ...]
"""Stages in their order, and where their devices begin."""


class Simulated(NamedTuple):
    """A cut that was simulated.

    Attributes:
      microbatches: K.
      stages: with their strategies.
      step: what it takes.
    """

    microbatches: int
    stages: tuple[Laid, ...]
    step: Step


class _Rest(NamedTuple):
    """What the stages from one on take at least, from when the first of them begins.

    Attributes:
      through: a microbatch forward through all of them, and back.
      back: until the first of them is done with all microbatches.
      done: until all of them are done with their updates.
      apart: seconds of the step, whenever the first of them begins: the longest that stages take which wait for each
        other, those behind a cut that nothing crosses among them.
    """

    through: float
    back: float
    done: float
    apart: float


_NONE = _Rest(0.0, 0.0, 0.0, 0.0)
_NEVER = _Rest(math.inf, math.inf, math.inf, math.inf)


class Cuts:
    """The cuts of the blocks of a graph, for one number of microbatches.

    Attributes:
      microbatches: K.
    """

    def __init__(self, blocks: Blocks, costs: StageCosts, prices: StagePrices, microbatches: int, devices: int,
                 schedule: str) -> None:
        """Has looked at no stage.

        Args:
          blocks: of one microbatch.
          costs: of their stages.
          prices: of their graph.
          microbatches: K.
          devices: p.
          schedule: one of `schedule.SCHEDULES`.
        """
        self.microbatches, self._blocks, self._costs, self._prices = microbatches, blocks, costs, prices
        self._schedule, self._linked = schedule, blocks.linked()
        self._shared = prices.machine.shared_cores
        self._cutting = Cutting(blocks.count, devices, microbatches, shared_cores=self._shared,
                                nodes=prices.machine.nodes)
        self._known: dict[Place, tuple[Laid, StageSeconds] | None] = {}
        self._unproven: set[Place] = set()
        self._taken: dict[Place, Quickest] = {}
        self._simulated: dict[Placed, Simulated] = {}
        self._rests: dict[tuple[int, int, int], _Rest] = {(0, blocks.count, used): _NONE for used in range(devices + 1)}

    def roots(self, numbers: Iterable[int]) -> list[int]:
        """Those numbers of stages that there can be, once what follows a stage is bounded for up to as many."""
        possible = [number for number in numbers if number <= self._cutting.most]
        for left in range(1, max(possible, default=0) + 1):
            for first in range(self._blocks.count):
                for offset in range(self._cutting.devices):
                    rests = [self._with(place, self._rests[after]) for place, after in self._next(left, first, offset)]
                    if rests:
                        self._rests[left, first, offset] = _Rest(*map(min, zip(*rests, strict=True)))
        return [number for number in possible if (number, 0, 0) in self._rests]

    def longer(self, stages: Placed, number: int) -> list[Placed]:
        """The same with one stage more, of so many in all; none where it is complete."""
        left, first, offset = self._after(stages, number)
        return [(*stages, (place, offset)) for place, _ in self._next(left, first, offset)] if left else []

    def bound(self, stages: Placed, number: int) -> float:
        """Seconds that every cut into so many stages takes at least that begins with some, by what is known of them."""
        rest = self._rests[self._after(stages, number)]
        for place, _ in reversed(stages):
            rest = self._with(place, rest)
        least = max(rest.done, rest.apart)
        if not stages:
            return least
        forward_and_back, whole = self._quickest(stages[0][0])[1:]
        return least if self._shared or math.isinf(whole) else max(least, rest.back + whole - forward_and_back)

    def look(self, stages: Placed) -> bool:
        """Searches and simulates a stage of which that was not done; False: there is none."""
        unknown = [place for place, _ in stages if place not in self._known]
        if unknown:
            self._look(max(unknown, key=lambda place: (place.devices, place.stop - place.first)))
        return bool(unknown)

    def simulate(self, stages: Placed) -> Simulated | None:
        """The step of a complete cut; None: a stage does not fit."""
        if stages not in self._simulated:
            while self.look(stages):
                pass
            found = [self._known[place] for place, _ in stages]
            known = [entry for entry in found if entry is not None]
            if len(known) < len(found):
                return None
            laid = tuple(stage._replace(offset=offset) for (stage, _), (_, offset) in zip(known, stages, strict=True))
            step = simulate_step(self._blocks.graph, laid, self.microbatches, self._schedule, self._prices,
                                 [taken for _, taken in known])
            self._simulated[stages] = Simulated(self.microbatches, laid, step)
        return self._simulated[stages]

    def is_proven(self, stages: Placed) -> bool:
        """Whether every stage that was searched has its cheapest strategy, or is known to have none."""
        return self._unproven.isdisjoint(place for place, _ in stages)

    @property
    def simulated(self) -> int:
        """How many cuts were."""
        return len(self._simulated)

    def _after(self, stages: Placed, number: int) -> tuple[int, int, int]:
        """How many stages are to follow, from which block and device on."""
        if not stages:
            return number, 0, 0
        place, offset = stages[-1]
        return number - len(stages), place.stop, offset + place.devices

    def _next(self, left: int, first: int, offset: int) -> list[tuple[Place, tuple[int, int, int]]]:
        """Every stage that may follow, and what is to follow it."""
        found = [(place, (left - 1, place.stop, offset + place.devices))
                 for place in self._cutting.beginning(left, first, offset)]
        return [(place, after) for place, after in found if after in self._rests]

    def _with(self, place: Place, rest: _Rest) -> _Rest:
        """What the stages from one on take at least, by what those behind it do."""
        forward, both, whole = self._quickest(place)
        if math.isinf(both) or math.isinf(rest.through):
            return _NEVER
        if self._shared:  # everything takes its turn
            total = self.microbatches * both + whole - both + rest.done
            return _Rest(total, total, total, total)
        if place.stop not in self._linked:  # what follows need not wait for it
            rest = _NONE._replace(apart=max(rest.done, rest.apart))
        count = self.microbatches
        ahead = in_flight(self._schedule, place.left, count)
        # The first microbatch, and the last, go through all that follows before they are back. Between them the stage
        # computes; or it computes what is ahead meanwhile.
        if ahead < count:
            busy = (count - ahead) * both + max(ahead * both, both + 2.0 * rest.through)
        else:  # one of the two is behind, or before, all of the other direction
            busy = max(count * both, 0.5 * (count + 1) * both + rest.through)
        return _Rest(both + rest.through, max(busy, both + rest.back),
                     max(busy + whole - both, forward + rest.done), rest.apart)

    def _quickest(self, place: Place) -> Quickest:
        if place not in self._taken:
            self._taken[place] = self._costs.quickest(place.first, place.stop, place.devices)
        return self._taken[place]

    def _look(self, place: Place) -> None:
        choice = self._costs.best(place.first, place.stop, place.devices,
                                  in_flight(self._schedule, place.left, self.microbatches))
        if not choice.proven:  # another strategy may take less, though not less than is known of all
            self._unproven.add(place)
            if self._shared:  # what is priced is what is simulated
                self._taken[place] = Quickest(*(max(least, choice.lower_bound) for least in self._quickest(place)))
        if math.isinf(choice.seconds):
            self._known[place] = None
            if choice.proven:
                self._taken[place] = Quickest(math.inf, math.inf, math.inf)
            return
        starts = self._blocks.starts
        laid = Laid(starts[place.first], starts[place.stop], 0, place.devices, choice.configurations)
        alike = (known for known in self._known.values() if known is not None and known[0] == laid)
        forward, backward, update = taken = next((taken for _, taken in alike), None) or stage_seconds(
            laid, self._prices)
        self._known[place] = laid, taken
        if choice.proven:
            self._taken[place] = Quickest(forward, forward + backward, forward + backward + update)


def shortest_steps(all_cuts: Mapping[int, Cuts], numbers: Sequence[int], best: float, seconds: float,
                   ) -> tuple[list[Simulated], float]:
    """Looks for cuts whose steps are shorter than one that is known.

    Args:
      all_cuts: number of microbatches -> the cuts of one.
      numbers: of stages that are wanted.
      best: seconds of the shortest step that is known.
      seconds: how long to look.

    Returns:
      Every cut that was shorter than all before, and seconds that no cut's step is shorter than: the shortest of all
      that is known where the time sufficed, and every search of a stage that matters is proven.
    """
    end, order, found = time.perf_counter() + seconds, itertools.count(), list[Simulated]()
    unproven = math.inf  # what cuts take at least of which more is not known
    heap = [(cuts.bound((), number), next(order), count, number, Placed())
            for count, cuts in all_cuts.items() for number in cuts.roots(numbers)]
    heapq.heapify(heap)
    while heap:
        bound, _, count, number, stages = heapq.heappop(heap)
        if bound * (1.0 + _ROUNDING) >= best:
            break
        if time.perf_counter() > end:
            return found, min(bound, unproven)
        cuts = all_cuts[count]
        again = max(bound, cuts.bound(stages, number))
        if again > bound or (len(stages) == number and cuts.look(stages)):
            heapq.heappush(heap, (again, next(order), count, number, stages))
            continue
        for more in cuts.longer(stages, number):
            if (least := max(bound, cuts.bound(more, number))) < best:
                heapq.heappush(heap, (least, next(order), count, number, more))
        if len(stages) == number and (simulated := cuts.simulate(stages)) and simulated.step.seconds < best:
            best = simulated.step.seconds
            found.append(simulated)
        if len(stages) == number and not cuts.is_proven(stages):
            unproven = min(unproven, bound)
    return found, min(best, unproven)
