"""Which blocks make a stage, on how many devices: dynamic programming over stages (Alpa, Zheng et al. 2022, 5.2).

A step takes what one microbatch takes through all stages, and K - 1 times what it takes in the bottleneck stage. The
stages are cut for every time that this may take, all of them at once.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from pase_mtf.pipeline.schedule import in_flight
from pase_mtf.pipeline.stage_costs import StageChoice, StageCosts

__all__ = ["Cut", "CutStage", "cut_stages"]


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


class _Cutting:
    """One graph on one machine; stages are numbered from the last, which is 1."""

    def __init__(self, costs: StageCosts, blocks: int, devices: int, microbatches: int, schedule: str) -> None:
        self._costs, self._blocks, self._devices = costs, blocks, devices
        self._microbatches, self._schedule = microbatches, schedule
        self._sizes = [size for size in range(1, devices + 1) if devices % size == 0]
        self._most = 0  # stages

    def choice(self, left: int, first: int, stop: int, devices: int) -> StageChoice:
        """The strategy of a stage that is followed by `left` - 1 others."""
        flying = in_flight(self._schedule, left, self._microbatches)
        return self._costs.best(first, stop, devices, flying)

    def stages(self, left: int, first: int, offset: int) -> list[tuple[int, int]]:
        """(where it stops, its devices) for every stage that may begin here and be followed by `left` - 1 others.

        Groups begin at a multiple of their size: within them devices are joined as are the first so many.
        """
        return [(stop, size) for size in self._sizes if offset % size == 0 and offset + size <= self._devices
                for stop in ([self._blocks] if left == 1 else range(first + 1, self._blocks - left + 2))]


def cut_stages(costs: StageCosts, blocks: int, devices: int, microbatches: int, schedule: str, *,
               shared_cores: bool = False) -> dict[int, Cut]:
    """The best cut of all blocks, for every number of stages that there can be.

    Args:
      costs: of stages.
      blocks: how many.
      devices: p; the last of them idle where that costs no more.
      microbatches: K.
      schedule: one of `schedule.SCHEDULES`.
      shared_cores: the devices share their cores, so that no stage computes while another does.

    Returns:
      Number of stages -> the least sum; only where one keeps to the memory.
    """
    cutting = _Cutting(costs, blocks, devices, microbatches, schedule)
    choice = functools.cache(cutting.choice)
    most = min(blocks, devices)
    known = {choice(left, first, stop, size).seconds
             for left in range(1, most + 1) for offset in range(devices) for first in range(blocks)
             for stop, size in cutting.stages(left, first, offset)}
    limits = np.array(sorted(seconds for seconds in known if seconds < math.inf))
    if shared_cores:
        limits = limits[-1:]
    if not len(limits):
        return {}
    worst = np.full(len(limits), math.inf)
    sums: dict[tuple[int, int, int], np.ndarray] = {
        (0, blocks, used): np.zeros(len(limits)) for used in range(1, devices + 1)}

    def through(left: int, first: int, offset: int, stop: int, size: int) -> np.ndarray:
        """The sum over the stages from here on, for every limit of the bottleneck."""
        seconds = choice(left, first, stop, size).seconds
        after = sums.get((left - 1, stop, offset + size), worst)
        found: np.ndarray = np.where(limits >= seconds, seconds + after, math.inf)
        return found

    result = {}
    for left in range(1, most + 1):
        for first in range(blocks):
            for offset in range(devices):
                found = [through(left, first, offset, *stage) for stage in cutting.stages(left, first, offset)]
                if found:
                    sums[left, first, offset] = np.min(found, axis=0)
        total = sums.get((left, 0, 0), worst)
        steps = microbatches * total if shared_cores else total + (microbatches - 1) * limits
        best = int(np.argmin(steps))
        if steps[best] < math.inf:
            stages, first, offset = [], 0, 0
            for number in range(left, 0, -1):
                stop, size = min(cutting.stages(number, first, offset),
                                 key=lambda stage: through(number, first, offset, *stage)[best])
                stages.append(CutStage(first, stop, offset, size, choice(number, first, stop, size)))
                first, offset = stop, offset + size
            result[left] = Cut(float(steps[best]), tuple(stages))
    return result
