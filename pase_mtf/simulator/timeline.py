"""What each device does when, in a step that was simulated: as a trace that browsers show, and as a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pase_mtf.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Slice", "Timeline"]

_NANOSECONDS = 1e9
_ROWS = ("kernels", "communication")
_OF_KERNELS = ("kernels", "copying")
"""What a device's kernels do."""
_COLORS = {"forward kernels": "#8ec1e6", "backward kernels": "tab:blue", "update kernels": "#0b3c5d",
           "all-reduce": "tab:red", "gradient all-reduce": "tab:orange", "resharding": "tab:purple",
           "transfer": "tab:green", "copying": "tab:cyan"}
"""What is drawn, and its colour."""


class Slice(NamedTuple):
    """Something that happens.

    Attributes:
      kind: one of `simulator.step.KINDS`.
      phase: "forward", "backward" or "update".
      layer: name of the layer; of what is sent between layers, of the layer that it goes to.
      device: which does it; of what one device sends to another the sender. Each device of an all-reduce that is one
        task has a slice of its own.
      receiver: the device that something is sent to; else the same as `device`.
      begin, end: seconds from the start of the step.
    """

    kind: str
    phase: str
    layer: str
    device: int
    receiver: int
    begin: float
    end: float


def _drawn_as(one: Slice) -> str:
    """What a slice is in a picture: of kernels one wants to see which pass they belong to."""
    return f"{one.phase} kernels" if one.kind == "kernels" else one.kind


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices in as few lanes as hold them one after the other: each goes to the first that is free when it begins."""
    lanes: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: (one.begin, one.end)):
        lane = next((lane for lane in lanes if lane[-1].end <= one.begin), None)
        if lane is None:
            lanes.append([one])
        else:
            lane.append(one)
    return lanes


def _event(one: Slice, row: int) -> dict[str, object]:
    """A slice as one of Chrome's trace events, in a row of its device."""
    # Whole nanoseconds, as Perfetto counts: two that meet would else overlap by what is cut off.
    begin, end = round(_NANOSECONDS * one.begin), round(_NANOSECONDS * one.end)
    to = f" to device {one.receiver}" if one.receiver != one.device else ""
    return {"ph": "X", "name": f"{one.layer} {one.phase}", "cat": one.kind, "pid": one.device, "tid": row,
            "ts": _microseconds(begin), "dur": _microseconds(end - begin), "args": {"what": f"{one.kind}{to}"}}


def _microseconds(nanoseconds: int) -> float:
    """The number that makes so many nanoseconds for who multiplies it by 1000 and cuts off what is no whole one."""
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


class Timeline(NamedTuple):
    """A step.

    Attributes:
      name: of the strategy and what it is for.
      devices: how many.
      seconds: when everything is done.
      slices: what happens, by when it begins.
    """

    name: str
    devices: int
    seconds: float
    slices: tuple[Slice, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Per device, the fraction of the step in which its kernels run."""
        total = [0.0] * self.devices
        for one in self.slices:
            if one.kind in _OF_KERNELS:
                total[one.device] += one.end - one.begin
        return tuple(seconds / self.seconds if self.seconds else 0.0 for seconds in total)

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """Kind -> seconds of all devices together."""
        found: dict[str, float] = {}
        for one in self.slices:
            found[one.kind] = found.get(one.kind, 0.0) + one.end - one.begin
        return found

    def _rows(self) -> Iterator[tuple[int, str, list[list[Slice]]]]:
        """(device, what the row is of, its lanes) of every row: what a device does at once is in lanes of its own."""
        rows: dict[tuple[int, str], list[Slice]] = {
            (device, name): [] for device in range(self.devices) for name in _ROWS}
        for one in self.slices:
            rows[one.device, _ROWS[one.kind not in _OF_KERNELS]].append(one)
        for (device, name), slices in rows.items():
            yield device, name, _lanes(slices)

    def trace(self) -> dict[str, object]:
        """The step as Chrome's trace events: a process per device, with a row for kernels and one for what is sent, and
        more of them where several go on at once, as viewers drop events that overlap in part in one row."""
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}
            for device in range(self.devices)]
        rows = dict.fromkeys(range(self.devices), 0)
        for device, name, lanes in self._rows():
            for number, lane in enumerate(lanes or [[]], 1):
                named = name if number == 1 else f"{name} ({number})"
                events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": rows[device],
                               "args": {"name": named}})
                events += [_event(one, rows[device]) for one in lane]
                rows[device] += 1
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": self.name}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON, whole or not at all; Perfetto (ui.perfetto.dev) and chrome://tracing open it."""
        write_atomically(path, json.dumps(self.trace()))

    def draw(self, axes: Axes) -> None:
        """Draws the step: two rows per device, kernels above what is sent; what goes on at once shares a row's height.

        Args:
          axes: to draw into.
        """
        for row, (_, _, lanes) in enumerate(self._rows()):
            for number, lane in enumerate(lanes):
                height = 0.8 / len(lanes)
                for kind in dict.fromkeys(map(_drawn_as, lane)):
                    axes.broken_barh([(1e3 * one.begin, 1e3 * (one.end - one.begin)) for one in lane
                                      if _drawn_as(one) == kind], (row - 0.4 + number * height, height),
                                     facecolors=_COLORS[kind])
        drawn = set(map(_drawn_as, self.slices))
        for kind, color in _COLORS.items():
            if kind in drawn:
                axes.plot([], [], color=color, linewidth=6, label=kind)
        axes.set_yticks([2 * device + 0.5 for device in range(self.devices)],
                        [f"device {device}" for device in range(self.devices)])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(self.name)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(_COLORS), frameon=False)
