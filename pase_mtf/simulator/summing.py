"""The tasks of an edge that sums on the way: what devices send each other, one exchange after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pase_mtf.simulator.slots import Slot, SlotBuilder
from pase_mtf.simulator.transfers import Transfers

__all__ = ["SummingTasks"]


class SummingTasks:
    """Collects the tasks of an edge; knows what every device has to wait for before it goes on."""

    def __init__(self, made: Sequence[int], names: tuple[int, int]) -> None:
        """Has no task.

        Args:
          made: per device, the task of the source layer that makes what it has.
          names: phase and layer of the tasks.
        """
        self._made, self._names, self._slot = made, names, SlotBuilder()
        self._begins: list[tuple[int, int]] = []
        # Own tasks after which a device has what it has now; a device without any has it by the source layer's.
        self._after: dict[int, tuple[int, ...]] = {}
        self._source: dict[int, tuple[int, ...]] = {device: (device,) for device in range(len(made))}

    def _add(self, kind: int, seconds: float, resources: Sequence[int], devices: Sequence[int], receiver: int) -> int:
        before = [task for device in devices for task in self._after.get(device, ())]
        number = self._slot.add(seconds, resources, devices, (kind, *self._names, receiver), before)
        self._begins += [(self._made[one], number) for device in devices for one in self._source.get(device, ())]
        return number

    def reduce(self, kind: int, group: Sequence[int], seconds: float, resources: Sequence[int]) -> None:
        """An all-reduce of a group."""
        number = self._add(kind, seconds, resources, group, -1)
        for device in group:
            self._after[device], self._source[device] = (number,), ()

    def copy(self, kind: int, seconds: float, streams: Sequence[int]) -> None:
        """What every device slices, adds up or concatenates of what it has; nothing where that takes no time."""
        if seconds > 0.0:
            for device in sorted({*self._after, *self._source}):
                number = self._add(kind, seconds, [streams[device]], [device], -1)
                self._after[device], self._source[device] = (number,), ()

    def send(self, kind: int, moved: Transfers, seconds: np.ndarray, ports: np.ndarray) -> None:
        """What devices send each other; a device goes on when it has all that it receives, and what it holds itself.

        Args:
          kind: index into `KINDS`.
          moved: what they send.
          seconds: how long each takes.
          ports: int64 [N, ...], what each needs all of at once.
        """
        after: dict[int, list[int]] = {}
        source: dict[int, list[int]] = {}
        for number, (sender, receiver) in enumerate(zip(moved.sender.tolist(), moved.receiver.tolist(), strict=True)):
            tasks, made = after.setdefault(receiver, []), source.setdefault(receiver, [])
            if seconds[number] > 0.0:
                tasks.append(self._add(kind, float(seconds[number]), ports[number].tolist(), [sender], receiver))
            else:
                tasks += self._after.get(sender, ())
                made += self._source.get(sender, ())
        self._after = {device: tuple(dict.fromkeys(tasks)) for device, tasks in after.items()}
        self._source = {device: tuple(dict.fromkeys(made)) for device, made in source.items()}

    def build(self, wanted: Sequence[int] | None) -> Slot:
        """The slot.

        Args:
          wanted: per device, the task of the target layer that waits for what it has at last; None: none does.
        """
        ends = [] if wanted is None else [
            (task, wanted[device]) for device, tasks in self._after.items() for task in tasks]
        direct = [] if wanted is None else [
            (self._made[one], wanted[device]) for device, made in self._source.items() for one in made
            if device < len(wanted)]
        return self._slot.build_edge(self._begins, ends, direct)
