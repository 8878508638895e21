"""Which blocks make a stage, on how many devices: dynamic programming over stages (Alpa, Zheng et al. 2022, 5.2).

A step takes what one microbatch takes through all stages, and K - 1 times what it takes in the bottleneck stage. The
stages are cut for every time that this may take, all of them at once.

Stages are searched where they matter; of the others it is known what they take at least. A best cut by what is known
that consists of stages that were searched is the best of all. Until it does, those of its stages that were not are
searched, and the blocks are cut again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.pipeline.schedule import in_flight
from pase_mtf.pipeline.stage_costs import StageChoice, StageCosts

__all__ = ["Cut", "CutStage", "Cutting", "Place", "cut_stages", "least_of_largest"]


class CutStage(NamedTuple):
    """A stage.

    Attributes:
      first, stop: its blocks, the last excluded.
      offset, devices: where its group of devices begins, and how many they are.
      choice: its strategy.
    """

    first: int
    stop: int
    offset: int
    devices: int
    choice: StageChoice


class Cut(NamedTuple):
    """The best cut into a number of stages.

    Attributes:
      seconds: of a step, as the sum says.
      stages: in their order.
    """

    seconds: float
    stages: tuple[CutStage, ...]

    @property
    def placed(self) -> tuple[tuple[Place, int], ...]:
        """Every stage, and where its group of devices begins."""
        return tuple((Place(len(self.stages) - number, stage.first, stage.stop, stage.devices), stage.offset)
                     for number, stage in enumerate(self.stages))


class Place(NamedTuple):
    """A stage that there may be: it is followed by `left` - 1 others."""

    left: int
    first: int
    stop: int
    devices: int


class Cutting:
    """One graph on one machine; stages are numbered from the last, which is 1.

    Attributes:
      blocks: how many are cut.
      devices: p.
      most: stages that there can be.
    """

    def __init__(self, blocks: int, devices: int, microbatches: int, *, shared_cores: bool,
                 nodes: Sequence[int] = ()) -> None:
        """The arguments are those of `cut_stages`."""
        self.blocks, self.devices, self._microbatches, self._shared = blocks, devices, microbatches, shared_cores
        self._nodes = nodes
        self._sizes = [size for size in range(1, devices + 1) if devices % size == 0]
        self.most = min(blocks, devices)

    def places(self) -> set[Place]:
        """All stages that there may be."""
        return {place for left in range(1, self.most + 1) for offset in range(self.devices)
                for first in range(self.blocks) for place in self.beginning(left, first, offset)}

    def beginning(self, left: int, first: int, offset: int) -> list[Place]:
        """Every stage that may begin here and be followed by `left` - 1 others.

        Groups begin at a multiple of their size, and lie in one node or begin with one: within them devices are joined
        as are the first so many.
        """
        return [Place(left, first, stop, size) for size in self._sizes
                if offset % size == 0 and offset + size + left - 1 <= self.devices  # one for each that follows
                and all(offset % node == 0 or offset // node == (offset + size - 1) // node for node in self._nodes)
                for stop in ([self.blocks] if left == 1 else range(first + 1, self.blocks - left + 2))]

    def best(self, seconds: dict[Place, float]) -> dict[int, tuple[float, list[tuple[Place, int]]]]:
        """The best cut into every number of stages.

        Args:
          seconds: what each takes.

        Returns:
          Number of stages -> (the sum, the stages and where their devices begin); only where it is finite.
        """
        limits = np.array(sorted({time for time in seconds.values() if time < math.inf}))
        if self._shared:
            limits = limits[-1:]
        if not len(limits):
            return {}
        worst = np.full(len(limits), math.inf)
        sums: dict[tuple[int, int, int], np.ndarray] = {
            (0, self.blocks, used): np.zeros(len(limits)) for used in range(1, self.devices + 1)}

        def through(place: Place, offset: int) -> np.ndarray:
            """The sum over the stages from here on, for every limit of the bottleneck."""
            after = sums.get((place.left - 1, place.stop, offset + place.devices), worst)
            found: np.ndarray = np.where(limits >= seconds[place], seconds[place] + after, math.inf)
            return found

        result = {}
        for left in range(1, self.most + 1):
            for first in range(self.blocks):
                for offset in range(self.devices):
                    found = [through(place, offset) for place in self.beginning(left, first, offset)]
                    if found:
                        sums[left, first, offset] = np.min(found, axis=0)
            total = sums.get((left, 0, 0), worst)
            steps = self._microbatches * total if self._shared else total + (self._microbatches - 1) * limits
            best = int(np.argmin(steps))
            if steps[best] < math.inf:
                stages, first, offset = list[tuple[Place, int]](), 0, 0
                for number in range(left, 0, -1):
                    place = min(self.beginning(number, first, offset), key=lambda place: through(place, offset)[best])
                    stages.append((place, offset))
                    first, offset = place.stop, offset + place.devices
                result[left] = float(steps[best]), stages
        return result


def least_of_largest(cutting: Cutting, size: Callable[[Place], float], numbers: Container[int],
                     seconds: float) -> tuple[float, float]:
    """The least that the largest stage of a cut can have: as in `cut_stages`, only stages of best cuts are looked at.

    Args:
      cutting: which stages there may be.
      size: of a stage.
      numbers: of stages that are wanted.
      seconds: after which no more stages are looked at.

    Returns:
      What no cut is below, and that of the best cut that was looked at: the same unless the time was over. Both are inf
      where there is no cut.
    """
    best = math.inf
    known: dict[Place, float] = {}
    offered = {(left, first, offset): cutting.beginning(left, first, offset) for left in range(1, cutting.most + 1)
               for first in range(cutting.blocks) for offset in range(cutting.devices)}
    end = time.monotonic() + seconds
    while True:
        least: dict[tuple[int, int, int], tuple[float, Place | None]] = {
            (0, cutting.blocks, used): (0.0, None) for used in range(1, cutting.devices + 1)}
        for (left, first, offset), places in offered.items():
            found = [(max(known.get(place, 0.0), least[after][0]), place) for place in places
                     if (after := (left - 1, place.stop, offset + place.devices)) in least]
            if found:
                least[left, first, offset] = min(found)
        roots = [(least[left, 0, 0][0], left) for left in range(1, cutting.most + 1)
                 if left in numbers and (left, 0, 0) in least]
        if not roots:
            return math.inf, math.inf
        largest, left = min(roots)
        stages, first, offset = list[Place](), 0, 0
        while (place := least[left - len(stages), first, offset][1]) is not None:
            stages.append(place)
            first, offset = place.stop, offset + place.devices
        unknown = [place for place in stages if place not in known]
        known.update((place, size(place)) for place in unknown)
        best = min(best, max(known[place] for place in stages))
        if not unknown or time.monotonic() > end:
            return largest, best


def cut_stages(costs: StageCosts, blocks: int, devices: int, microbatches: int, schedule: str, *,
               numbers: Container[int] | None = None, shared_cores: bool = False,
               nodes: Sequence[int] = ()) -> dict[int, Cut]:
    """The best cut of all blocks, for every number of stages that there can be.

    Args:
      costs: of stages.
      blocks: how many.
      devices: p; the last of them idle where that costs no more.
      microbatches: K.
      schedule: one of `schedule.SCHEDULES`.
      numbers: of stages that are wanted; None: all.
      shared_cores: the devices share their cores, so that no stage computes while another does.
      nodes: of the machine.

    Returns:
      Number of stages -> the least sum; only where one keeps to the memory.
    """
    cutting = Cutting(blocks, devices, microbatches, shared_cores=shared_cores, nodes=nodes)
    seconds = {place: costs.least(place.first, place.stop, place.devices) for place in cutting.places()}
    known: dict[Place, StageChoice] = {}
    while True:
        cuts = {number: cut for number, cut in cutting.best(seconds).items() if numbers is None or number in numbers}
        unknown = {place for _, stages in cuts.values() for place, _ in stages if place not in known}
        if not unknown:
            return {number: Cut(total, tuple(
                CutStage(place.first, place.stop, offset, place.devices, known[place]) for place, offset in stages))
                for number, (total, stages) in cuts.items()}
        for place in sorted(unknown):
            known[place] = costs.best(place.first, place.stop, place.devices,
                                      in_flight(schedule, place.left, microbatches))
            seconds[place] = known[place].seconds
