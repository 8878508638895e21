"""When every task of a step runs: each resource serves what waits for it in the order in which it became ready.

FlexFlow's simulation algorithm (Jia et al. 2019, algorithm 1): tasks leave one queue by the time at which all they
depend on is done. Times are whole picoseconds: no rounding, so that a schedule that was only partly made anew is equal
to one made from scratch.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import UsageError
from pase_mtf.search.compiled import compiled

__all__ = ["LONGEST", "PICOSECONDS", "Schedule", "Tasks", "picoseconds", "reschedule", "schedule"]

PICOSECONDS = 1e12
"""In a second."""
LONGEST = 1000.0
"""Seconds of a task: thousands of longer ones, one after the other, are more picoseconds than an integer holds."""


def picoseconds(seconds: np.ndarray) -> np.ndarray:
    """Durations of tasks, int64, of as many seconds.

    Raises:
      UsageError: one that is longer than `LONGEST`.
    """
    longest = float(np.max(seconds, initial=0.0))
    if not longest <= LONGEST:
        raise UsageError(f"a task of {longest:.3g} s: steps are simulated whose tasks take at most {LONGEST:g} s; "
                         "correct the rates of the machine, or take strategies by the sum of costs (simulate=0)")
    found: np.ndarray = np.rint(seconds * PICOSECONDS).astype(np.int64)
    return found


class Tasks(NamedTuple):
    """N tasks.

    Attributes:
      duration: int64 [N], picoseconds.
      order: int64 [N]: of those that become ready at once, the one with the smaller number comes first; all differ. -1:
        the task is gone, and so is what waits for it or it for.
      resource_at, resource: int64 [N + 1] and [...]: task n needs resource[resource_at[n]:resource_at[n + 1]], all of
        them at once.
      before, after: int64 [M]: task after[m] waits for task before[m].
      resources: how many there are.
    """

    duration: np.ndarray
    order: np.ndarray
    resource_at: np.ndarray
    resource: np.ndarray
    before: np.ndarray
    after: np.ndarray
    resources: int


class Schedule(NamedTuple):
    """When N tasks run.

    Attributes:
      ready, start, end: int64 [N], picoseconds: when all that it waits for is done, when it begins, when it is done.
    """

    ready: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def seconds(self) -> float:
        """When the last is done."""
        return float(self.end.max(initial=0)) / PICOSECONDS


@compiled
def _successors(before: np.ndarray, after: np.ndarray, order: np.ndarray,
                ) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """For every task, those that wait for it: (where they begin, int64 [N + 1]; they, int64 [M])."""
    at = np.zeros(len(order) + 1, np.int64)
    for number in range(len(before)):
        if order[before[number]] >= 0 and order[after[number]] >= 0:
            at[before[number] + 1] += 1
    for task in range(len(order)):
        at[task + 1] += at[task]
    place, following = at[:-1].copy(), np.empty(at[-1], np.int64)
    for number in range(len(before)):
        if order[before[number]] >= 0 and order[after[number]] >= 0:
            following[place[before[number]]] = after[number]
            place[before[number]] += 1
    return at, following


@compiled
def _run(duration: np.ndarray, order: np.ndarray, resource_at: np.ndarray, resource: np.ndarray, before: np.ndarray,
         after: np.ndarray, resources: int, kept: np.ndarray, ready: np.ndarray, start: np.ndarray,
         end: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Schedules the tasks that are not `kept`, whose times are known, into `ready`, `start`, `end`, which hold 0 for
    them; returns how many it could not."""
    at, following = _successors(before, after, order)
    free, waits_for = np.zeros(resources, np.int64), np.zeros(len(order), np.int64)
    left = 0
    for task in range(len(order)):
        left += order[task] >= 0 and not kept[task]
        for place in range(at[task], at[task + 1]):
            other = following[place]
            if not kept[task]:
                waits_for[other] += 1
            elif not kept[other]:
                ready[other] = max(ready[other], end[task])
        if kept[task]:
            for place in range(resource_at[task], resource_at[task + 1]):
                free[resource[place]] = max(free[resource[place]], end[task])
    queue = [(np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    for task in range(len(order)):
        if order[task] >= 0 and not kept[task] and not waits_for[task]:
            heapq.heappush(queue, (ready[task], order[task], np.int64(task)))
    while len(queue):
        now, _, number = heapq.heappop(queue)
        begin, task = int(now), int(number)
        for place in range(resource_at[task], resource_at[task + 1]):
            begin = max(begin, int(free[resource[place]]))
        start[task], end[task] = begin, begin + duration[task]
        for place in range(resource_at[task], resource_at[task + 1]):
            free[resource[place]] = end[task]
        left -= 1
        for place in range(at[task], at[task + 1]):
            other = following[place]
            ready[other] = max(ready[other], end[task])
            waits_for[other] -= 1
            if not waits_for[other]:
                heapq.heappush(queue, (ready[other], order[other], np.int64(other)))
    return left


def schedule(tasks: Tasks) -> Schedule:
    """Schedules all tasks from scratch.

    Raises:
      ValueError: tasks wait for each other in a circle.
    """
    count = len(tasks.duration)
    times = Schedule(*(np.zeros(count, np.int64) for _ in range(3)))
    if _run(*tasks, np.zeros(count, np.bool_), *times):
        raise ValueError("tasks wait for each other in a circle")
    return times


@compiled
def _first_change(before: np.ndarray, after: np.ndarray, order: np.ndarray, end: np.ndarray, known: int,
                  first_wait: int, latest: int) -> int:  # pragma: no cover (compiled)
    """The earliest time at which a new task may become ready, where that is before `latest`."""
    ready, last = np.zeros(len(order) - known, np.int64), np.zeros(len(order) - known, np.bool_)
    for number in range(first_wait, len(before)):
        task, other = after[number], before[number]
        if task >= known and order[other] >= 0:
            if other >= known:
                last[task - known] = True  # after another new one
            else:
                ready[task - known] = max(ready[task - known], end[other])
    for task in range(len(ready)):
        if not last[task]:
            latest = min(latest, ready[task])
    return latest


def reschedule(tasks: Tasks, previous: Schedule, first_wait: int, gone_from: int) -> Schedule:
    """The schedule of tasks some of which are new: what became ready before anything that is new, or that is gone,
    stays as it was. Equal to `schedule(tasks)`.

    Args:
      tasks: the tasks now: first those that were there before, with their numbers; some may be gone. Only new ones, and
        such as waited for those that are gone, wait for new ones.
      previous: when those that were there before ran.
      first_wait: who waits for new ones, or is new and waits, stands from here on in `before` and `after`.
      gone_from: the earliest time at which anything that is gone became ready, picoseconds.

    Raises:
      ValueError: tasks wait for each other in a circle.
    """
    known, count = len(previous.ready), len(tasks.duration)
    first = _first_change(tasks.before, tasks.after, tasks.order, previous.end, known, first_wait, gone_from)
    kept = np.zeros(count, np.bool_)
    kept[:known] = (tasks.order[:known] >= 0) & (previous.ready < first)
    times = Schedule(*(np.zeros(count, np.int64) for _ in range(3)))
    for now, then in zip(times, previous, strict=True):
        now[:known] = np.where(kept[:known], then, 0)
    if _run(*tasks, kept, *times):
        raise ValueError("tasks wait for each other in a circle")
    return times
