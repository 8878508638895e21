"""In which order the devices of a stage compute microbatches: GPipe's, all forward and then all backward, or 1F1B, in
which a stage keeps the activations of no more microbatches than there are stages from it to the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pase_mtf.errors import UsageError, nearest

__all__ = ["SCHEDULES", "Task", "check_schedule", "in_flight", "order_of_stage", "tasks_in_order"]

SCHEDULES = ("1f1b", "gpipe")


class Task(NamedTuple):
    """What a stage does with one microbatch.

    Attributes:
      phase: "forward" or "backward".
      stage, microbatch: from 0.
    """

    phase: str
    stage: int
    microbatch: int


def check_schedule(schedule: str) -> None:
    """Raises UsageError where there is no such schedule."""
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; {nearest(schedule, SCHEDULES)}")


def in_flight(schedule: str, stages_left: int, microbatches: int) -> int:
    """Of how many microbatches a stage keeps the activations at most.

    Args:
      schedule: one of `SCHEDULES`.
      stages_left: how many stages there are from this to the last, both counted.
      microbatches: K.
    """
    return microbatches if schedule == "gpipe" else min(microbatches, stages_left)


def order_of_stage(schedule: str, stage: int, stages: int, microbatches: int) -> list[Task]:
    """The tasks of a stage, one after the other."""
    ahead = in_flight(schedule, stages - stage, microbatches)
    order = [Task("forward", stage, number) for number in range(ahead)]
    for number in range(microbatches):
        order.append(Task("backward", stage, number))
        if number + ahead < microbatches:
            order.append(Task("forward", stage, number + ahead))
    return order


def tasks_in_order(schedule: str, stages: int, microbatches: int) -> list[Task]:
    """The tasks of all stages, so that each stands behind all that it needs: those before it in its stage, the same
    microbatch forward in earlier stages, and backward in later ones.
    """
    return list(_in_order([order_of_stage(schedule, stage, stages, microbatches) for stage in range(stages)]))


def _in_order(orders: list[list[Task]]) -> Iterator[Task]:
    done: set[Task] = set()
    places = [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            task = order[places[stage]]
            before = range(stage) if task.phase == "forward" else range(stage + 1, len(orders))
            if all(Task(task.phase, other, task.microbatch) in done for other in before):
                done.add(task)
                places[stage] += 1
                yield task
