"""What each device does when, in a step that was simulated: as a trace that browsers show, and as a picture."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from pase_mtf.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Slice", "Timeline"]

_MICROSECONDS = 1e6
_COLORS = {"kernels": "tab:blue", "all-reduce": "tab:red", "gradient all-reduce": "tab:orange",
           "resharding": "tab:purple", "transfer": "tab:green"}


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
            if one.kind == "kernels":
                total[one.device] += one.end - one.begin
        return tuple(seconds / self.seconds if self.seconds else 0.0 for seconds in total)

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """Kind -> seconds of all devices together."""
        found: dict[str, float] = {}
        for one in self.slices:
            found[one.kind] = found.get(one.kind, 0.0) + one.end - one.begin
        return found

    def trace(self) -> dict[str, object]:
        """The step as Chrome's trace events: a process per device, in it a row for kernels and one for what is sent."""
        events: list[dict[str, object]] = []
        for device in range(self.devices):
            events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}})
            events += [{"ph": "M", "name": "thread_name", "pid": device, "tid": row, "args": {"name": name}}
                       for row, name in enumerate(("kernels", "communication"))]
        for one in self.slices:
            to = f" to device {one.receiver}" if one.receiver != one.device else ""
            events.append({"ph": "X", "name": f"{one.layer} {one.phase}", "cat": one.kind, "pid": one.device,
                           "tid": int(one.kind != "kernels"), "ts": _MICROSECONDS * one.begin,
                           "dur": _MICROSECONDS * (one.end - one.begin), "args": {"what": f"{one.kind}{to}"}})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": self.name}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON, whole or not at all; Perfetto (ui.perfetto.dev) and chrome://tracing open it."""
        write_atomically(path, json.dumps(self.trace()))

    def draw(self, axes: Axes) -> None:
        """Draws the step: two rows per device, kernels above what is sent.

        Args:
          axes: to draw into.
        """
        for kind, color in _COLORS.items():
            of_kind = [one for one in self.slices if one.kind == kind]
            for row in sorted({2 * one.device + (kind != "kernels") for one in of_kind}):
                spans = [(1e3 * one.begin, 1e3 * (one.end - one.begin)) for one in of_kind
                         if 2 * one.device + (kind != "kernels") == row]
                axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color)
            if of_kind:
                axes.plot([], [], color=color, linewidth=6, label=kind)
        axes.set_yticks([2 * device + 0.5 for device in range(self.devices)],
                        [f"device {device}" for device in range(self.devices)])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(self.name)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(_COLORS), frameon=False)
