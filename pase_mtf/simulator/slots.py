"""The tasks of a layer or of an edge, and of a whole step, which is made of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.simulator.schedule import PICOSECONDS, Tasks, picoseconds
from pase_mtf.simulator.transfers import Transfers

__all__ = ["KINDS", "Copies", "Slot", "SlotBuilder", "TaskNames", "join", "order_in_slot", "transfer_slot",
           "waits_of_edge"]

KINDS = ("kernels", "all-reduce", "gradient all-reduce", "resharding", "transfer", "copying")
"""What a task is; copying is what slices, adds up and concatenates what is sent."""


class TaskNames(NamedTuple):
    """What the tasks are, for people: arrays of N.

    Attributes:
      kind: index into `KINDS`.
      phase: index into `PHASES`.
      layer: whose it is; of what an edge sends the layer that it goes to.
      receiver: of what one device sends to another; else -1.
    """

    kind: np.ndarray
    phase: np.ndarray
    layer: np.ndarray
    receiver: np.ndarray


class Slot(NamedTuple):
    """The tasks of a layer or of an edge, numbered from 0.

    Attributes:
      duration, resource_at, resource: as of `Tasks`.
      names: int64 [4, N], the rows of `TaskNames`.
      devices: per task, which do it: of an all-reduce its group, of what one device sends to another the sender.
      inner: int64 [2, M], (before, after) among its own.
      first, last: of a layer, per phase and device the task that begins and the one that ends it: int64 [3, devices].
      begins, ends, direct: of an edge: int64 [2, M] each: (task of the source layer, own), (own, task of the target
        layer), (task of the source layer, task of the target layer).
    """

    duration: np.ndarray
    resource_at: np.ndarray
    resource: np.ndarray
    names: np.ndarray
    devices: tuple[tuple[int, ...], ...]
    inner: np.ndarray
    first: np.ndarray
    last: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    direct: np.ndarray

    def of_layer(self, layer: int) -> Slot:
        """The same tasks, of another layer."""
        names = self.names.copy()
        names[TaskNames._fields.index("layer")] = layer
        return self._replace(names=names)


class SlotBuilder:
    """Collects the tasks of a slot.

    Attributes:
      seconds, rows, devices, resources: of each.
      inner: (before, after) among them.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rows: list[tuple[int, int, int, int]] = []  # what it is
        self.devices: list[tuple[int, ...]] = []
        self.resources: list[Sequence[int]] = []
        self.inner: list[tuple[int, int]] = []

    def add(self, seconds: float, resources: Sequence[int], devices: Sequence[int], names: tuple[int, int, int, int],
            after: Sequence[int] = ()) -> int:
        """Adds a task that waits for others of this slot; returns its number. One that takes no time needs nothing."""
        number = len(self.rows)
        self.seconds.append(seconds)
        self.rows.append(names)
        self.devices.append(tuple(devices))
        self.resources.append(resources if seconds * PICOSECONDS > 0.5 else ())
        self.inner += [(other, number) for other in after]
        return number

    def build(self, first: Sequence[Sequence[int]], last: Sequence[Sequence[int]]) -> Slot:
        """The slot of a layer."""
        duration, rows = picoseconds(np.array(self.seconds)), np.array(self.rows, np.int64).reshape(-1, 4)
        at = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(entry) for entry in self.resources], out=at[1:])
        resource = np.fromiter(itertools.chain.from_iterable(self.resources), np.int64, int(at[-1]))
        inner = np.array(self.inner, np.int64).reshape(-1, 2).T
        return Slot(duration, at, resource, rows.T, tuple(self.devices), inner, np.array(first, np.int64),
                    np.array(last, np.int64), _NOBODY, _NOBODY, _NOBODY)

    def build_edge(self, begins: Sequence[tuple[int, int]], ends: Sequence[tuple[int, int]],
                   direct: Sequence[tuple[int, int]]) -> Slot:
        """The slot of an edge; arguments as of `Slot`, in pairs."""
        pairs = [np.array(found, np.int64).reshape(-1, 2).T for found in (begins, ends, direct)]
        return self.build((), ())._replace(begins=pairs[0], ends=pairs[1], direct=pairs[2])


_NOBODY = np.zeros((2, 0), np.int64)


class Copies(NamedTuple):
    """What devices do to what they send each other: a task of each, where it takes any time.

    Attributes:
      kind: index into `KINDS`.
      slicing, joining: seconds of a device, before it sends and after it has received.
      streams: int64 [devices], the resource of each device that it takes.
    """

    kind: int
    slicing: float
    joining: float
    streams: np.ndarray


def transfer_slot(moved: Transfers, seconds: np.ndarray, ports: np.ndarray, names: tuple[int, int, int],
                  made: np.ndarray, wanted: np.ndarray | None, copies: Copies) -> Slot:
    """The slot of an edge.

    Args:
      moved: what devices send to each other.
      seconds: how long that takes, each; what takes no time is no task.
      ports: int64 [N, ...], what each needs all of at once.
      names: kind, phase and layer of the tasks.
      made: the task of the source layer that makes what a device sends.
      wanted: the task of the target layer that waits for what a device receives; None: none does.
      copies: what they do before, and after.
    """
    sent = seconds > 0.0
    slicers = np.unique(moved.sender) if copies.slicing > 0.0 else _NONE
    joiners = np.unique(moved.receiver) if copies.joining > 0.0 else _NONE
    sliced, own, joined = np.split(np.arange(len(slicers) + sent.sum() + len(joiners)),
                                   [len(slicers), len(slicers) + sent.sum()])
    # The task of this slot, or of the layer, by which a device has what it sends, and at which it has it all.
    has = made if copies.slicing <= 0.0 else _at(slicers, sliced)
    needs = wanted if copies.joining <= 0.0 else _at(joiners, joined)
    inner, begins, ends, direct = [_NOBODY], [_NOBODY], [_NOBODY], [_NOBODY]
    to_own, to_needs = (inner if len(slicers) else begins), (inner if len(joiners) else ends)
    to_own.append(np.stack((has[moved.sender[sent]], own)))
    begins.append(np.stack((made[slicers], sliced)))
    if needs is not None:
        to_needs.append(np.stack((own, needs[moved.receiver[sent]])))
        kept = {(True, True): inner, (True, False): ends, (False, True): begins, (False, False): direct}[
            len(slicers) > 0, len(joiners) > 0]
        kept.append(np.stack((has[moved.sender[~sent]], needs[moved.receiver[~sent]])))
    if wanted is not None:
        ends.append(np.stack((joined, wanted[joiners])))
    duration = picoseconds(np.concatenate((np.full(len(slicers), copies.slicing), seconds[sent],
                                           np.full(len(joiners), copies.joining))))
    busy = np.split(duration > 0, [len(slicers), len(slicers) + len(own)])
    resources = [copies.streams[slicers][busy[0]], ports[sent][busy[1]].reshape(-1), copies.streams[joiners][busy[2]]]
    each = np.concatenate((np.ones(len(slicers), np.int64), np.full(len(own), ports.shape[1]),
                           np.ones(len(joiners), np.int64)))
    kind, phase, layer = names
    told = np.stack((np.full_like(duration, copies.kind), np.full_like(duration, phase), np.full_like(duration, layer),
                     np.full_like(duration, -1)))
    told[0, own], told[3, own] = kind, moved.receiver[sent]
    devices = np.concatenate((slicers, moved.sender[sent], joiners))
    return Slot(duration, np.concatenate((np.zeros(1, np.int64), np.cumsum(np.where(duration > 0, each, 0)))),
                np.concatenate(resources), told, tuple((device,) for device in devices.tolist()),
                np.concatenate(inner, axis=1), _NOBODY, _NOBODY,
                *(np.concatenate(pairs, axis=1) for pairs in (begins, ends, direct)))


_NONE = np.zeros(0, np.int64)


def _at(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """An array that has these values at these places."""
    found = np.zeros(places.max(initial=-1) + 1, np.int64)
    found[places] = values
    return found


_MOST_IN_SLOT = 1 << 24


def order_in_slot(number: int, count: int) -> np.ndarray:
    """`Tasks.order` of the tasks of a slot: by slot, then as they stand in it."""
    return number * _MOST_IN_SLOT + np.arange(count)


def waits_of_edge(slot: Slot, source: int, own: int, target: int) -> np.ndarray:
    """Who waits for whom because of an edge, int64 [2, M], given where the tasks of three slots begin."""
    return np.concatenate((slot.begins + np.array([[source], [own]]), slot.ends + np.array([[own], [target]]),
                           slot.direct + np.array([[source], [target]])), axis=1)


def join(slots: Sequence[Slot], ends: Sequence[tuple[int, int]], resources: int) -> tuple[Tasks, np.ndarray]:
    """Puts a step together.

    Args:
      slots: of every layer, then of every edge.
      ends: per edge, its source and its target layer.
      resources: how many there are.

    Returns:
      The tasks, and where those of every slot begin, int64 [S].
    """
    at = np.zeros(len(slots) + 1, np.int64)
    np.cumsum([len(slot.duration) for slot in slots], out=at[1:])
    needs = np.zeros(len(slots) + 1, np.int64)
    np.cumsum([len(slot.resource) for slot in slots], out=needs[1:])
    layers = len(slots) - len(ends)
    waits = [slot.inner + begin for slot, begin in zip(slots, at, strict=False)]
    waits += [waits_of_edge(slot, at[source], own, at[target])
              for slot, own, (source, target) in zip(slots[layers:], at[layers:], ends, strict=False)]
    before, after = np.concatenate(waits, axis=1) if waits else np.zeros((2, 0), np.int64)
    none = np.zeros(0, np.int64)
    resource_at = np.concatenate([np.zeros(1, np.int64), *(
        slot.resource_at[1:] + begin for slot, begin in zip(slots, needs, strict=False))])
    return Tasks(np.concatenate([none, *(slot.duration for slot in slots)]),
                 np.concatenate([none, *(order_in_slot(number, len(slot.duration))
                                         for number, slot in enumerate(slots))]),
                 resource_at, np.concatenate([none, *(slot.resource for slot in slots)]), before, after,
                 resources), at[:-1]
