"""A projection for people: a table, and what it comes to in a few lines."""

from __future__ import annotations

from tabulate import tabulate

from pase_mtf.epochs.curve import Epochs
from pase_mtf.epochs.projection import Mix, Point, Projection, Ratio

__all__ = ["HEAD", "epochs_text", "projection_rows", "projection_text", "range_text", "ratio_text", "spread_text",
           "summary_lines"]

HEAD = ("devices", "best mix", "batch", "epochs", "ms a step", "data parallel: epochs", "ms a step", "ahead", "spread")
"""Titles of the columns of `projection_rows`."""


def epochs_text(epochs: Epochs) -> str:
    """A number of epochs, with ~ where it was extrapolated and > where the target was not reached."""
    return f"{'~' if epochs.source == 'extrapolated' else ''}{'> ' if epochs.at_least else ''}{epochs.median:.2f}"


def ratio_text(ratio: Ratio) -> str:
    """How many times as fast, with the side on which the truth may lie where a target was not reached."""
    if not ratio.is_known:
        return "unknown"
    return f"{'> ' if ratio.at_least else '< ' if ratio.at_most else ''}{ratio.value:.2f}"


def range_text(epochs: Epochs) -> str:
    """The least and the most epochs of the runs, with > where one did not reach the target: it takes more than that."""
    return f"{epochs.low:.2f} to {'> ' if epochs.high_at_least else ''}{epochs.high:.2f}"


def spread_text(ratio: Ratio) -> str:
    """How many times as fast at worst and at best; empty where nothing is known.

    < and > say on which side the truth may lie, where a run did not reach the target.
    """
    if not ratio.is_known:
        return ""
    return (f"{'< ' if ratio.low_at_most else ''}{ratio.low:.2f} to "
            f"{'> ' if ratio.high_at_least else ''}{ratio.high:.2f}")


def _mix_text(mix: Mix) -> str:
    return f"{mix.workers} x {mix.ways}" + ("" if mix.ways > 1 else " (data parallel)")


def projection_rows(projection: Projection) -> list[list[str]]:
    """A row per number of devices, under `HEAD`."""
    return [_row(point) for point in projection.points]


def _row(point: Point) -> list[str]:
    best, alone, gain = point.best, point.data_parallel, point.gain
    theirs = [epochs_text(alone.epochs), f"{1e3 * alone.step.seconds:.2f}"] if alone else ["unknown", ""]
    if best is None:
        return [str(point.devices), "unknown", "", "", "", *theirs, "", ""]
    return [str(point.devices), _mix_text(best), str(best.batch), epochs_text(best.epochs),
            f"{1e3 * best.step.seconds:.2f}", *theirs, ratio_text(gain) if gain else "",
            spread_text(gain) if gain else ""]


def summary_lines(projection: Projection, examples: int | None = None) -> list[str]:
    """What a projection comes to, and what it rests on.

    Args:
      projection: of a range of devices.
      examples: of an epoch: then the shortest training is told in hours.
    """
    lines = []
    if (start := projection.hybrid_from) is not None:
        lines.append(f"hybrid is ahead of data parallelism alone from {start} devices on")
    elif several := [point.devices for point in projection.decided if point.devices > 1]:  # one has no hybrid
        lines.append(f"hybrid is not ahead of data parallelism alone on {several[-1]} devices")
    alone, best, gain = projection.best_alone, projection.best_of_all, projection.gain_at_scale
    if alone and best and best.best and gain:
        end = " (as far as is known: more devices might do better)" if projection.alone_still_gains else ""
        lines.append(f"at scale: data parallelism alone is done first on {alone.devices} devices{end}; "
                     f"{_mix_text(best.best)} on {best.devices} is done {ratio_text(gain)} times as fast")
    if examples is not None and best and best.best:
        # Of all mixes that reach the target it is the shortest: what takes less has missed it so far.
        least = min(mix.seconds_per_example for point in projection.points for mix in point.mixes)
        end = " (one that missed the target might take less)" if least < best.best.seconds_per_example else ""
        lines.append(f"the shortest training: {best.best.seconds_per_example * examples / 3600:.3g} hours on "
                     f"{best.devices} devices{end}")
    return lines + _notes(projection)


def _notes(projection: Projection) -> list[str]:
    """What is assumed, and what is not known."""
    notes, mixes = [], [mix for point in projection.points for mix in point.mixes]
    batches = projection.curve.batches
    outside = [(point.devices, batch) for point in projection.points for batch in point.outside.values()]
    below = [f"of smaller ones, on up to {devices} devices" for devices, batch in outside if batch < batches[0]]
    above = [f"of larger ones, from {devices} devices on" for devices, batch in outside if batch > batches[-1]]
    if outside:
        why = "no slope tells them, as where a run missed the target" if projection.extrapolate else "--extrapolate"
        notes.append(f"note: epochs are known of batches {batches[0]} to {batches[-1]}; mixes "
                     f"{', and '.join([*below[-1:], *above[:1]])}, are left out ({why})")
    unknown = {reason: point.devices for point in reversed(projection.points)
               for ways, reason in point.unknown.items() if ways not in point.outside}
    if missing := [f"{reason} ({devices} devices)" for reason, devices in unknown.items()]:
        notes.append(f"note: {missing[0]}" + (f", and {len(missing) - 1} more mixes are not known"
                                              if len(missing) > 1 else ""))
    if any(mix.epochs.source == "extrapolated" for mix in mixes):
        notes.append(f"note: ~ goes beyond the batches {batches[0]} to {batches[-1]} that were measured, with the "
                     "slope of the outermost two")
    if any(mix.epochs.at_least for mix in mixes):
        notes.append("note: > the target was not reached by half of the runs; it takes at least that")
    if any(point.gain and point.gain.is_known and (point.gain.low_at_most or point.gain.high_at_least)
           for point in projection.points):
        notes.append("note: < and > in a spread: a run did not reach the target, so that the truth may lie beyond")
    if sources := {mix.step.source for mix in mixes} - {"given"}:
        notes.append(f"note: some steps are {' and '.join(sorted(sources))} from those that are given")
    return notes


def projection_text(projection: Projection, examples: int | None = None) -> str:
    """The table, and below it what it comes to."""
    table = tabulate(projection_rows(projection), HEAD, disable_numparse=True,
                     colalign=("right", "left", *["right"] * 7))
    return "\n".join([f"epochs: {projection.curve.name}; steps: {projection.steps.source}, "
                      f"{projection.steps.worker_batch} examples to a worker", "", table, "",
                      *summary_lines(projection, examples)])
