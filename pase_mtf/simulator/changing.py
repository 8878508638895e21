"""A step whose layers change one at a time: new tasks are put behind the others, and old ones are marked as gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pase_mtf.simulator.schedule import Tasks, reschedule, schedule
from pase_mtf.simulator.slots import Slot, join, order_in_slot, waits_of_edge

__all__ = ["ChangingTasks"]

_GROWTH = 2
"""How many times as many tasks as at the start are kept, those that are gone among them, before all are put together
anew."""


class _Growing:
    """An int64 array of one or more rows that grows to the right."""

    def __init__(self, array: np.ndarray) -> None:
        self._room, self.length = np.concatenate((array, np.empty_like(array)), axis=-1), array.shape[-1]

    @property
    def array(self) -> np.ndarray:
        """What there is: a view."""
        found: np.ndarray = self._room[..., :self.length]
        return found

    def append(self, array: np.ndarray) -> None:
        """Adds to the right."""
        end = self.length + array.shape[-1]
        if end > self._room.shape[-1]:
            self._room = np.concatenate((self.array, array, np.empty_like(self._room)), axis=-1)
        else:
            self._room[..., self.length:end] = array
        self.length = end


class ChangingTasks:
    """The tasks of a step and their times, kept up to date.

    Attributes:
      schedule: the times now; of tasks that are gone, anything.
    """

    def __init__(self, slots: Sequence[Slot], ends: Sequence[tuple[int, int]], resources: int) -> None:
        """Schedules a step from scratch; arguments as of `join`."""
        self._slots, self._ends, self._resources = list(slots), ends, resources
        self._join()

    @property
    def tasks(self) -> Tasks:
        """The tasks now."""
        waits = self._waits.array
        return Tasks(self._duration.array, self._order.array, self._resource_at.array, self._resource.array, waits[0],
                     waits[1], self._resources)

    def _join(self) -> None:
        tasks, self._begin = join(self._slots, self._ends, self._resources)
        self._duration, self._order, self._resource_at, self._resource, self._waits = map(_Growing, (
            tasks.duration, tasks.order, tasks.resource_at, tasks.resource, np.stack((tasks.before, tasks.after))))
        self._most = _GROWTH * len(tasks.duration)
        self.schedule = schedule(tasks)

    def replace(self, changed: Mapping[int, Slot]) -> None:
        """Puts other slots in the place of some, and schedules what that changes.

        Args:
          changed: number -> slot: of layers, and all edges from them and to them.
        """
        first_wait, gone_from = self._waits.length, np.iinfo(np.int64).max
        for number, slot in changed.items():
            begin, count = self._begin[number], len(self._slots[number].duration)
            gone_from = min(gone_from, int(self.schedule.ready[begin:begin + count].min(initial=gone_from)))
            self._order.array[begin:begin + count] = -1
            self._slots[number] = slot
        if self._duration.length > self._most:
            self._join()
            return
        for number, slot in changed.items():
            self._append(number, slot)
        layers = len(self._slots) - len(self._ends)
        for number, slot in changed.items():
            if number >= layers:
                source, target = self._ends[number - layers]
                self._waits.append(waits_of_edge(slot, self._begin[source], self._begin[number], self._begin[target]))
        self.schedule = reschedule(self.tasks, self.schedule, first_wait, gone_from)

    def _append(self, number: int, slot: Slot) -> None:
        self._begin[number] = self._duration.length
        self._waits.append(slot.inner + self._duration.length)
        self._duration.append(slot.duration)
        self._order.append(order_in_slot(number, len(slot.duration)))
        self._resource_at.append(slot.resource_at[1:] + self._resource.length)
        self._resource.append(slot.resource)
