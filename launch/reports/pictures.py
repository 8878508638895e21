"""The plots of report.html."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pase_mtf.launch.summary import ArmRow
from pase_mtf.launch.training import History
from pase_mtf.search.frontier import FrontierPoint, draw_frontier
from pase_mtf.simulator.timeline import Timeline

__all__ = ["draw_losses", "draw_memory", "draw_steps", "draw_timeline", "image"]

_KINDS = {"compute": "#8fb8cf", "overhead": "#c9c9c4", "all-reduce": "#d1495b", "resharding": "#8d6a9f"}
"""What a predicted step consists of, and its colour."""
_MEASURED = "#2a6f97"


def image(figure: Figure, form: str = "svg") -> str:
    """The figure as the URL of an image that holds it: "svg", or "png" for what has thousands of parts."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, bbox_inches="tight", dpi=110)
    kind = {"svg": "svg+xml"}.get(form, form)
    return f"data:image/{kind};base64," + base64.b64encode(buffer.getvalue()).decode()


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # The figure class itself, not pyplot: no global state, no display.
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _kind_of(part: str) -> str:
    """What a part of a step's cost is drawn as."""
    return next((kind for kind in _KINDS if part.startswith(kind)), "compute")


def draw_steps(rows: Mapping[str, ArmRow], parts: Mapping[str, Mapping[str, float]]) -> Figure:
    """Predicted and measured time of a step, per arm.

    Args:
      rows: the numbers of every arm.
      parts: arm -> part of the predicted cost -> seconds (`Strategy.parts`); without it the prediction is one bar.
    """
    figure, axes = _figure(8, 0.9 + 0.55 * len(rows))
    labels = {kind: f"{kind}, predicted" for kind in _KINDS}  # each is said once in the legend
    labels["measured"] = "measured (median, quartiles)"
    for position, (arm, row) in enumerate(rows.items()):
        begin = 0.0
        for kind, color in _KINDS.items() if row["predicted_ms"] is not None else ():
            # Where the parts are not known all of it is computation, for the eye.
            length = 1e3 * sum(seconds for part, seconds in parts[arm].items() if _kind_of(part) == kind) if (
                arm in parts) else row["predicted_ms"] if kind == "compute" else 0.0
            if length:
                axes.barh(position - 0.19, length, 0.36, left=begin, color=color, label=labels.pop(kind, None))
                begin += length
        if row["measured_ms"] is not None and row["measured_ms_quartiles"] is not None:
            lower, upper = row["measured_ms_quartiles"]
            axes.barh(position + 0.19, row["measured_ms"], 0.36, color=_MEASURED, label=labels.pop("measured", None),
                      xerr=[[row["measured_ms"] - lower], [upper - row["measured_ms"]]], ecolor="#111")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=3, frameon=False)  # beside the bars, never on them
    return figure


def draw_timeline(timeline: Timeline) -> Figure:
    """What each device does when, in a step."""
    figure, axes = _figure(10, 1.2 + 0.45 * timeline.devices)
    timeline.draw(axes)
    axes.set_title("")
    if (legend := axes.get_legend()) is not None:
        legend.remove()
    figure.legend(loc="outside upper left", ncols=5, frameon=False)
    return figure


def draw_memory(rows: Mapping[str, ArmRow], points: Sequence[FrontierPoint], limit: float,
                others: Mapping[str, Sequence[FrontierPoint]]) -> Figure:
    """Predicted time of a step over the memory of a device: what can be had, also where other blocks are computed
    again, the arms, and the limit."""
    figure, axes = _figure(8, 3.6)
    draw_frontier(axes, points, "fastest within the limit", color="#2a6f97", unit=1e-3)
    ends = [points[0].memory_limit, points[-1].memory_limit]
    for color, (name, beside) in zip(("#8d99ae", "#e09f3e"), others.items(), strict=False):
        draw_frontier(axes, beside, name, color=color, unit=1e-3)
        ends += [beside[0].memory_limit, beside[-1].memory_limit]
    for position, (arm, row) in enumerate(rows.items()):
        if row["predicted_bytes"] is None or row["predicted_ms"] is None:
            continue
        ends.append(row["predicted_bytes"])
        axes.plot(row["predicted_bytes"] / 1e9, row["predicted_ms"], marker="osD^vP*"[position % 7], markersize=9,
                  linestyle="", color="#c1121f", fillstyle="none" if position else "full", label=arm)
    if limit <= 1.5 * max(ends):  # else it is far from everything that is drawn
        axes.axvline(limit / 1e9, color="#111", linewidth=1, label="memory limit")
    axes.set_xlabel("GB on the fullest device")
    axes.set_ylabel("predicted ms per step")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def draw_losses(history: History) -> Figure:
    """Loss per step, per arm."""
    figure, axes = _figure(8, 3.6)
    for number, (arm, records) in enumerate(history.records.items()):
        # Dashed, ever shorter: curves that coincide stay visible.
        axes.plot([record.step for record in records], [record.loss for record in records], label=arm,
                  linestyle=(0, (6, 1 + 2 * number)) if number else "-", linewidth=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if history.records:
        axes.legend(frameon=False)
    return figure
