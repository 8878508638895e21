"""Draws predicted speedups over data parallelism beside what the PaSE paper measured."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.paper_numbers import DEVICES, FIGURE_6

__all__ = ["ARMS", "plot_speedups"]

ARMS = (("expert", "#7fa8c9"), ("FlexFlow", "#c9a67f"), ("ours", "#2a6f97"))
"""(name, colour) of what is compared with data parallelism."""
_COLUMNS = 4


def plot_speedups(found: dict[str, Any], machine: str, path: str) -> None:
    """A panel per model: bars for the predicted speedups, black marks for the paper's measured ones.

    Args:
      found: model -> machine -> number of devices -> arm -> {"speedup"}.
      machine: which to draw.
      path: of the picture.
    """
    rows = -(-len(found) // _COLUMNS)
    figure = Figure(figsize=(3.4 * min(len(found), _COLUMNS), 2.7 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, min(len(found), _COLUMNS), squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, (model, machines) in zip(panels, found.items(), strict=False):
        by_devices = machines[machine]
        for number, (arm, color) in enumerate(ARMS):
            places = [place + 0.27 * (number - 1) for place in range(len(by_devices))]
            heights = [row.get(arm, {}).get("speedup", 0) for row in by_devices.values()]
            handles[f"{arm}, predicted"] = axes.bar(places, heights, 0.25, color=color)
            measured = FIGURE_6.get(machine, {}).get(model, {}).get("PaSE" if arm == "ours" else arm)
            if measured:
                shown = [measured[DEVICES.index(int(devices))] for devices in by_devices]
                handles["measured in the paper"], = axes.plot(places, shown, "_", color="black", markersize=8,
                                                              markeredgewidth=1.8)
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_xticks(range(len(by_devices)), list(by_devices))
        axes.set(title=model, xlabel="devices")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(found):]:
        axes.set_visible(False)
    for axes in panels[::_COLUMNS]:
        axes.set_ylabel("times data parallelism")
    names = sorted(handles, key=lambda name: "measured" in name)
    figure.legend([handles[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False)
    with rc_context({"svg.hashsalt": machine}):  # the same numbers give the same file
        figure.savefig(path, metadata={"Date": None})
