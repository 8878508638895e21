"""What memory buys: the cheapest cost over a range of memory limits."""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pase_mtf.arguments import as_float
from pase_mtf.errors import UsageError, shortened
from pase_mtf.files import path_of, write_atomically
from pase_mtf.search.budget import Budget
from pase_mtf.search.given_bytes import byte_counts
from pase_mtf.search.memory import least_memory, minimise_within
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Progress, Solution, relative_gap, solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FrontierPoint", "draw_frontier", "frontier", "plot_frontier"]


class FrontierPoint(NamedTuple):
    """The cheapest assignment within a limit.

    Attributes:
      memory_limit: bytes per device that were allowed.
      memory: bytes that the assignment needs.
      solution: the assignment, with cost, bound and gap.
    """

    memory_limit: float
    memory: float
    solution: Solution


def frontier(network: CostNetwork, memory: Sequence[np.ndarray], points: int = 12, *,
             fractions: Sequence[float] | None = None, time_limit: float | None = None, gap: float = 0.0,
             progress: Progress | None = None) -> tuple[FrontierPoint, ...]:
    """Sweeps the limit from the least memory any assignment needs to what the cheapest of all needs.

    Args:
      network: what to minimise.
      memory: per layer, bytes per device of every configuration.
      points: how many limits, both ends included, in equal steps.
      fractions: instead, where the limits lie between the least (0) and what the cheapest needs (1).
      time_limit: seconds for each of them.
      gap: relative gap at which each may stop.
      progress: called during every search.

    Returns:
      the points by rising limit. An assignment found for a lower limit is kept for a higher one where the search there
      found nothing cheaper, so costs never rise; bound, gap and time are those of the higher limit even so.

    Raises:
      UsageError: fewer than two points, fractions outside of 0 to 1, a gap below 0, any of these that is no number, or
        memory that does not fit the network.
      InfeasibleError: no assignment is finite; or not `proven`, where the least memory was not found in that time.
    """
    if not isinstance(points, (int, np.integer)) or points < 2:
        raise UsageError(f"a frontier of {shortened(points)} points; ask for at least two, and a whole number")
    if not (least_gap := as_float(gap)) >= 0:
        raise UsageError(f"gap of {shortened(gap)}; give 0 or more")
    gap = least_gap
    try:
        steps = np.linspace(0.0, 1.0, points) if fractions is None else np.sort(np.asarray(fractions, np.float64))
    except (TypeError, ValueError):  # no numbers, or only one
        steps = np.zeros(0)
    if steps.ndim != 1 or not len(steps) or not (steps >= 0).all() or not (steps <= 1).all():
        raise UsageError(f"fractions {shortened(fractions)}; give numbers from 0 (least memory) to 1 (that of the "
                         "cheapest)")
    network.validate()
    memory = byte_counts(memory)
    least, lightest = least_memory(network, memory, Budget.of(time_limit))
    cheapest = solve(network, "exact", time_limit=time_limit, certificate=False)
    most = math.fsum(float(np.asarray(entry)[choice]) for entry, choice in zip(
        memory, cheapest.assignment, strict=True))
    found: list[FrontierPoint] = []
    for step in steps.tolist():
        # Both ends to the last digit.
        limit = least if step == 0 else max(least, most) if step == 1 else least + step * (max(least, most) - least)
        # What is known to fit, the search need not find again.
        known = [lightest, *(point.solution.assignment for point in found[-1:]),
                 *([cheapest.assignment] if limit >= most else [])]
        solution = minimise_within(network, memory, limit, time_limit=time_limit, gap=gap, progress=progress,
                                   initial=min(known, key=network.cost))
        used = solution.statistics["memory"]
        if found and found[-1].solution.cost < solution.cost:
            used, kept = found[-1].memory, found[-1].solution
            # Only the assignment: with more memory there may be a cheaper one, so a bound or proof from below is none.
            bound = min(solution.lower_bound, kept.cost)
            solution = dataclasses.replace(
                solution, assignment=kept.assignment, cost=kept.cost, lower_bound=bound,
                gap=relative_gap(kept.cost, bound), optimal=bound >= kept.cost,
                statistics={**solution.statistics, "memory": used})
        found.append(FrontierPoint(limit, used, solution))
    return tuple(found)


def draw_frontier(axes: Axes, points: Sequence[FrontierPoint], label: str = "cheapest found", *,
                  color: str | None = None, unit: float = 1.0) -> None:
    """Draws the cost over the memory limit (GB) into axes of matplotlib; dotted below it, the lower bound.

    Args:
      axes: to draw into.
      points: as `frontier` returns them.
      label: of the costs.
      color: of both lines; matplotlib's next one if not given.
      unit: what costs are divided by.
    """
    limits = [point.memory_limit / 1e9 for point in points]
    line, = axes.step(limits, [point.solution.cost / unit for point in points], where="post", marker="o", markersize=4,
                      color=color, label=label)
    axes.step(limits, [point.solution.lower_bound / unit for point in points], where="post", linestyle=":",
              color=line.get_color())


def plot_frontier(points: Sequence[FrontierPoint], path: str | os.PathLike[str], title: str = "") -> None:
    """Draws cost and lower bound over memory into an image file (type by its ending).

    Raises:
      UsageError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # loaded only to draw
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    draw_frontier(axes, points)
    axes.plot([], [], ":", color="C0", label="lower bound")
    axes.set(xlabel="memory limit per device (GB)", ylabel="cost of a step", title=title)
    axes.legend()
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format=os.path.splitext(os.fspath(path_of(path)))[1].lstrip(".") or "png", dpi=150)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}; end its name in .png, .svg or .pdf") from error
    write_atomically(path, buffer.getvalue())
