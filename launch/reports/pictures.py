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
"""What a step consists of, and its colour."""
_MEASURED = "#2a6f97"
_MEASURED_ARM = "#2b9348"
"""Where predicted lines are of the other colour."""


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


_DRAWN_AS = {"copying": "resharding", "transfer": "resharding"}
"""What a step that was simulated or traced tells apart, and prices count as one."""


def _by_kind(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of a step, predicted or traced, by what they are drawn as."""
    found = dict.fromkeys(_KINDS, 0.0)
    for part, value in parts.items():
        found[_DRAWN_AS.get(part) or next((kind for kind in _KINDS if kind in part), "compute")] += value
    return found


def _stack(axes: Axes, position: float, lengths: Mapping[str, float], labels: dict[str, str]) -> None:
    """A bar of several kinds; what is labelled is taken out of the labels: each is said once in the legend."""
    begin = 0.0
    for kind, length in lengths.items():
        if length:
            axes.barh(position, length, 0.36, left=begin, color=_KINDS[kind], label=labels.pop(kind, None))
            begin += length


def draw_steps(rows: Mapping[str, ArmRow], parts: Mapping[str, Mapping[str, float]],
               traced: Mapping[str, Mapping[str, float]] | None = None) -> Figure:
    """Predicted and measured time of a step, per arm: two bars, the upper one predicted.

    Args:
      rows: the numbers of every arm.
      parts: arm -> part of the predicted cost -> seconds (`Strategy.parts`); without it the prediction is one bar.
      traced: arm -> kind -> seconds of its devices in a traced step (`Timeline.seconds_by_kind`), in whose proportions
        the bar of its measured step is divided; without it that is of one colour.
    """
    figure, axes = _figure(8, 0.9 + 0.55 * len(rows))
    labels = {kind: kind for kind in _KINDS}
    labels |= {"traced": "measured (median, quartiles), divided as a traced step", "whole": "measured, undivided"}
    labels["simulated"] = "simulated step, in which what overlaps counts once"
    for position, (arm, row) in enumerate(rows.items()):
        if row["predicted_ms"] is not None:
            # Where the parts are not known all of it is computation, for the eye.
            found = _by_kind(parts.get(arm, {"compute": 1e-3 * row["predicted_ms"]}))
            _stack(axes, position - 0.19, {kind: 1e3 * seconds for kind, seconds in found.items()}, labels)
            if (simulated := row.get("simulated_ms")) is not None:  # this is what the headline compares
                axes.plot([simulated, simulated], [position - 0.37, position - 0.01], color="#111", linewidth=2,
                          label=labels.pop("simulated", None))
        if row["measured_ms"] is not None and row["measured_ms_quartiles"] is not None:
            did = _by_kind((traced or {}).get(row["same_as"] or arm, {}))
            busy = sum(did.values())
            if busy:
                _stack(axes, position + 0.19, {kind: row["measured_ms"] * seconds / busy for kind, seconds in
                                               did.items()}, labels)
            lower, upper = row["measured_ms_quartiles"]
            axes.barh(position + 0.19, row["measured_ms"], 0.36, facecolor="none" if busy else _MEASURED,
                      edgecolor=_MEASURED, label=labels.pop("traced" if busy else "whole", None),
                      xerr=[[row["measured_ms"] - lower], [upper - row["measured_ms"]]], ecolor="#111")
    axes.set_yticks(range(len(rows)), list(map(_label, rows)))
    axes.invert_yaxis()
    axes.set_xlabel("ms per step; upper bars predicted, lower ones measured")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=3, frameon=False)  # beside the bars, never on them
    return figure


def _label(arm: str) -> str:
    """The name of an arm, as files may have it, for matplotlib: between two $ it would read a formula, and what begins
    with _ it leaves out of legends."""
    text = arm.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


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
                others: Mapping[str, Sequence[FrontierPoint]], *, measured: bool = True) -> Figure:
    """Time of a step over the memory of a device: what can be had by prediction, also where other blocks are computed
    again, the arms as predicted and as measured, and the limit.

    Args:
      rows: the numbers of every arm.
      points: what memory buys.
      limit: bytes that a device may hold.
      others: what it buys where other blocks are computed again, by what to call that.
      measured: draw also what was measured; not where predictions are of another machine, which no line joins to it.
    """
    figure, axes = _figure(8, 3.6)
    draw_frontier(axes, points, "fastest within the limit", color="#2a6f97", unit=1e-3)
    ends = [points[0].memory_limit, points[-1].memory_limit]
    for color, (name, beside) in zip(("#8d99ae", "#e09f3e"), others.items(), strict=False):
        draw_frontier(axes, beside, name, color=color, unit=1e-3)
        ends += [beside[0].memory_limit, beside[-1].memory_limit]
    joined: str | None = "measured, joined to predicted"
    for position, (arm, row) in enumerate(rows.items()):
        marker = "osD^vP*"[position % 7]
        predicted = _point(row["predicted_bytes"], row["predicted_ms"])
        found = _point(row["measured_bytes"], row["measured_ms"]) if measured else None
        if predicted:
            ends.append(1e9 * predicted[0])
            axes.plot(*predicted, marker=marker, markersize=9, linestyle="", color="#c1121f",
                      fillstyle="none" if position else "full", label=_label(arm))
        if found:
            ends.append(1e9 * found[0])
            # Nothing is predicted of stock Mesh-TensorFlow, which is named by this point alone.
            axes.plot(*found, marker=marker, markersize=6, linestyle="", color=_MEASURED_ARM,
                      label=None if predicted else _label(arm))
        if predicted and found:
            axes.plot(*zip(predicted, found, strict=True), color=_MEASURED_ARM, linewidth=0.8, zorder=1,
                      label=joined)
            joined = None
    if limit <= 1.5 * max(ends):  # else it is far from everything that is drawn
        axes.axvline(limit / 1e9, color="#111", linewidth=1, label="memory limit")
    axes.set_xlabel("GB on the fullest device")
    axes.set_ylabel("ms per step")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def _point(nbytes: float | None, milliseconds: float | None) -> tuple[float, float] | None:
    """Where something lies in GB and milliseconds; None where one of them is not known."""
    return None if nbytes is None or milliseconds is None else (nbytes / 1e9, milliseconds)


def draw_losses(history: History) -> Figure:
    """Loss per step, per arm."""
    figure, axes = _figure(8, 3.6)
    for number, (arm, records) in enumerate(history.records.items()):
        # Dashed, ever shorter: curves that coincide stay visible.
        axes.plot([record.step for record in records], [record.loss for record in records], label=_label(arm),
                  linestyle=(0, (6, 1 + 2 * number)) if number else "-", linewidth=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if history.records:
        axes.legend(frameon=False)
    return figure
