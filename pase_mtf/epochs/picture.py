"""Pictures of curves and projections; wants matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase_mtf.epochs.curve import EpochCurve
from pase_mtf.epochs.projection import Point, Projection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_curve", "draw_projection", "projection_figure"]


def draw_curve(axes: Axes, curve: EpochCurve, color: str | None = None) -> None:
    """Epochs over the global batch: a point per run (hollow where the target was not reached), a line of medians."""
    found = [curve.at(batch) for batch in curve.batches]
    name = curve.name.replace("$", r"\$")  # that of a file: between two $ matplotlib would read a formula
    line, = axes.plot(curve.batches, [epochs.median for epochs in found if epochs], color=color, label=name)
    for reached in (True, False):
        runs = [run for run in curve.runs if run.reached == reached]
        axes.plot([run.batch for run in runs], [run.epochs for run in runs], "o", color=line.get_color(), markersize=4,
                  markerfacecolor=line.get_color() if reached else "none", linestyle="none")
    axes.set(xscale="log", yscale="log", xlabel="global batch", ylabel="epochs to the target")
    _plain_ticks(axes, curve.batches)


def draw_projection(axes: Axes, projection: Projection) -> None:
    """Speedup over one device against devices, a line per number of devices to a worker; a mark where hybrid begins."""
    base = next((mix for point in projection.points if (mix := point.data_parallel)), None)
    if base is None:
        axes.text(0.5, 0.5, "data parallelism alone is not known", transform=axes.transAxes, ha="center")
        return
    for ways in sorted({mix.ways for point in projection.points for mix in point.mixes}):
        known = [(point.devices, _speedup(point, ways, base.seconds_per_example)) for point in projection.points
                 if any(mix.ways == ways for mix in point.mixes)]
        line, = axes.plot([devices for devices, _ in known], [speedup for _, speedup in known], "o-", markersize=3,
                          label="data parallelism alone" if ways == 1 else f"{ways} devices to a worker")
        # Hollow, as in the curve: the target was not reached, so that it is at most so many times as fast.
        missed = {point.devices for point in projection.points for mix in point.mixes
                  if mix.ways == ways and mix.epochs.at_least}
        if bounds := [pair for pair in known if pair[0] in missed]:
            axes.plot([devices for devices, _ in bounds], [speedup for _, speedup in bounds], "o", markersize=3,
                      color=line.get_color(), markerfacecolor="white")
    if projection.hybrid_from is not None:
        axes.axvline(projection.hybrid_from, color="grey", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="devices",
             ylabel=f"times as fast as data parallelism on {base.workers * base.ways}")
    _plain_ticks(axes, [point.devices for point in projection.points])
    axes.legend(frameon=False, fontsize=8)


def _speedup(point: Point, ways: int, base: float) -> float:
    return base / next(mix for mix in point.mixes if mix.ways == ways).seconds_per_example


def _plain_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Ticks at some of the values, in plain numbers."""
    from matplotlib.ticker import LogLocator  # loaded only to draw
    shown = [value for place, value in enumerate(values) if place % (1 + len(values) // 8) == 0]
    axes.set_xticks(shown, [str(value) for value in shown])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)


def projection_figure(projection: Projection) -> Figure:
    """Both beside each other."""
    from matplotlib.figure import Figure  # loaded only to draw
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_curve(left, projection.curve)
    draw_projection(right, projection)
    return figure
