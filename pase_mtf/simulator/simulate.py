"""Simulates steps of the strategies of one priced network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import UsageError
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.simulator.changing import ChangingTasks
from pase_mtf.simulator.schedule import PICOSECONDS, schedule
from pase_mtf.simulator.slots import KINDS, TaskNames, join
from pase_mtf.simulator.step import Step
from pase_mtf.simulator.timeline import Slice, Timeline

__all__ = ["Simulator"]


class Simulator:
    """Simulates a step under one strategy after the other.

    Where devices have cores of their own, kernels of one overlap with what others do, and with what is sent; two that
    send over one link wait for each other, which the sum of all costs does not know. Where devices share cores the
    simulated step is that sum.
    """

    def __init__(self, priced: PricedNetwork, *, gradients: bool = True) -> None:
        """Has simulated nothing.

        Args:
          priced: in seconds, of the graph, on the machine.
          gradients: whether devices sum them up; not after a microbatch that others follow.

        Raises:
          UsageError: priced in anything but seconds.
        """
        if priced.model != "seconds":
            raise UsageError(f"a simulation of prices in {priced.model!r}; price the graph in seconds")
        self._priced, self._step = priced, Step(priced, gradients=gradients)
        self._ends = [(edge.source, edge.target) for edge in priced.graph.edges]
        self._assignment: list[int] = []
        self._tasks: ChangingTasks | None = None

    def tasks(self, assignment: Sequence[int]) -> int:
        """How many tasks a step has.

        Raises:
          UsageError: not one configuration per layer.
        """
        self._check(assignment)
        return sum(len(slot.duration) for slot in self._step.slots(assignment))

    def _check(self, assignment: Sequence[int]) -> None:
        if len(assignment) != len(self._priced.configurations):
            raise UsageError(f"a strategy of {len(assignment)} layers for a graph of "
                             f"{len(self._priced.configurations)}; give one configuration per layer")

    def seconds(self, assignment: Sequence[int]) -> float:
        """Simulates a step from scratch; returns how long it takes.

        Args:
          assignment: the index of every layer's configuration.

        Raises:
          UsageError: not one per layer.
        """
        self._check(assignment)
        self._assignment = list(assignment)
        self._tasks = ChangingTasks(self._step.slots(assignment), self._ends, self._step.resources)
        return self._tasks.schedule.seconds

    def change(self, layer: int, choice: int) -> float:
        """Simulates the step anew after one layer was given another configuration: equal to `seconds` of all of it, but
        what happens before anything that this changes is not simulated again (FlexFlow's delta simulation).

        Args:
          layer: which.
          choice: the index of its configuration.

        Raises:
          UsageError: nothing was simulated yet; there is no such layer; a task that is too long to be simulated, and
            then nothing has changed.
        """
        if self._tasks is None:
            raise UsageError("nothing to change; simulate a whole strategy first")
        if not 0 <= layer < len(self._assignment):
            raise UsageError(f"layer {layer}: the graph has layers 0 to {len(self._assignment) - 1}")
        if choice != self._assignment[layer]:
            changed = [*self._assignment]
            changed[layer] = choice
            slots = self._step.changed_slots(changed, layer)
            self._assignment = changed
            self._tasks.replace(slots)
        return self._tasks.schedule.seconds

    def timeline(self, assignment: Sequence[int], name: str = "") -> Timeline:
        """What each device does when.

        Args:
          assignment: the index of every layer's configuration.
          name: what to call it.

        Raises:
          UsageError: not one per layer.
        """
        self._check(assignment)
        slots = self._step.slots(assignment)
        names = TaskNames(*np.concatenate([slot.names for slot in slots], axis=1))
        times = schedule(join(slots, self._ends, self._step.resources)[0])
        devices = [*itertools.chain.from_iterable(slot.devices for slot in slots)]
        slices = [Slice(KINDS[names.kind[task]], PHASES[names.phase[task]],
                        self._priced.graph.layers[names.layer[task]].name, device,
                        int(names.receiver[task]) if names.receiver[task] >= 0 else device,
                        times.start[task] / PICOSECONDS, times.end[task] / PICOSECONDS)
                  for task in np.argsort(times.start, kind="stable") if times.end[task] > times.start[task]
                  for device in devices[task]]
        return Timeline(name or self._priced.graph.name, self._priced.devices, times.seconds, tuple(slices))
