"""What memory buys: the cheapest cost over a range of memory limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import UsageError
from pase_mtf.network import CostNetwork
from pase_mtf.search.memory import least_memory, minimise_within
from pase_mtf.search.registry import Progress, Solution, solve

__all__ = ["FrontierPoint", "frontier", "plot_frontier"]


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
             time_limit: float | None = None, gap: float = 0.0, progress: Progress | None = None
             ) -> tuple[FrontierPoint, ...]:
    """Sweeps the limit from the least memory any assignment needs to what the cheapest of all needs, in equal steps.

    Args:
      network: what to minimise.
      memory: per layer, bytes per device of every configuration.
      points: how many limits, both ends included.
      time_limit: seconds for each of them.
      gap: relative gap at which each may stop.
      progress: called during every search.

    Returns:
      the points by rising limit. An assignment found for a lower limit is kept for a higher one where the search there
      found nothing cheaper, so costs never rise.

    Raises:
      UsageError: fewer than two points, or memory that does not fit the network.
      InfeasibleError: no assignment is finite.
    """
    if points < 2:
        raise UsageError(f"a frontier of {points} points; ask for at least two")
    least, _ = least_memory(network, memory)
    cheapest = solve(network, "exact", time_limit=time_limit, certificate=False)
    most = sum(float(np.asarray(entry)[choice]) for entry, choice in zip(memory, cheapest.assignment, strict=True))
    found: list[FrontierPoint] = []
    for limit in np.linspace(least, max(least, most), points):
        solution = minimise_within(network, memory, float(limit), time_limit=time_limit, gap=gap, progress=progress)
        used = solution.statistics["memory"]
        if found and found[-1].solution.cost < solution.cost:
            used = found[-1].memory
            solution = found[-1].solution
        found.append(FrontierPoint(float(limit), used, solution))
    return tuple(found)


def plot_frontier(points: Sequence[FrontierPoint], path: str | os.PathLike, title: str = "") -> None:
    """Draws cost and lower bound over memory into an image file (type by its ending).

    Raises:
      UsageError: the file cannot be written.
    """
    import io

    from matplotlib.figure import Figure

    from pase_mtf.files import write_atomically
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    limits = [point.memory_limit / 1e9 for point in points]
    axes.step(limits, [point.solution.cost for point in points], where="post", marker="o", label="cheapest found")
    axes.step(limits, [point.solution.lower_bound for point in points], where="post", linestyle=":",
              label="lower bound")
    axes.set(xlabel="memory limit per device (GB)", ylabel="cost of a step", title=title)
    axes.legend()
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format=os.path.splitext(os.fspath(path))[1].lstrip(".") or "png", dpi=150)
    except ValueError as error:
        raise UsageError(f"cannot draw {path}: {error}; end its name in .png, .svg or .pdf") from error
    write_atomically(path, buffer.getvalue())
