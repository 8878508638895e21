"""The time-memory frontier of one network, in a process of its own.

    python -m benchmarks.search_memory transformer-big_32 --limit=10

The cheapest strategy under several memory limits, from the least that any strategy needs to what the cheapest of all
needs, and one byte below the least, which has to be refused. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.commands import told_in_one_line
from benchmarks.search_densenet import densenet
from benchmarks.search_networks import LAUNCHER, MACHINE, ROOT, Workshop, price_densenet
from benchmarks.search_process import peak_bytes
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import InfeasibleError, UsageError, nearest
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.machine import Machine
from pase_mtf.search import solve
from pase_mtf.search.frontier import FrontierPoint, frontier
from pase_mtf.search.memory import least_memory
from pase_mtf.search.registry import Solution, relative_gap

__all__ = ["FRACTIONS", "NETWORKS", "largest_gap", "main", "points_of", "priced", "sweep"]

NETWORKS = (*(f"{model}-{preset}_{devices}" for model, (preset, _) in LAUNCHER.items() for devices in (8, 32, 64)),
            "densenet-layer_8", "densenet-layer_32")
"""Those whose graphs are at hand: the networks of the paper do not say how much memory a configuration takes."""
FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the way from the least memory that any strategy needs to what the cheapest of all needs."""


def priced(name: str, workshop: Workshop) -> PricedNetwork:
    """One of `NETWORKS`, priced.

    Raises:
      UsageError: another name.
    """
    if name not in NETWORKS:
        raise UsageError(f"unknown network {name!r}; {nearest(name, NETWORKS)}")
    base, _, devices = name.rpartition("_")
    model, _, variant = base.partition("-")
    if model == "densenet":
        return price_densenet(densenet(normalization=variant), int(devices))
    graph = ComputationGraph.load(workshop.graph(model, *LAUNCHER[model]))
    return build_network(graph, Machine.load(MACHINE), int(devices))


def sweep(network: PricedNetwork, limit: float, fractions: Sequence[float] = FRACTIONS) -> dict[str, Any]:
    """The frontier, and what is said of a limit below it.

    Args:
      network: priced.
      limit: seconds for each memory limit.
      fractions: see `FRACTIONS`.
    """
    memory = network.memory
    free = solve(network.network, certificate=False)
    least, _ = least_memory(network.network, memory)
    below = float(math.ceil(least) - 1)
    start = time.perf_counter()
    try:
        solve(network.network, memory=memory, memory_limit=below)
        said = ""
    except InfeasibleError as error:
        said = str(error)
    refusal = {"limit_bytes": below, "seconds": time.perf_counter() - start, "said": said,
               "right": f"the least any strategy needs is {math.ceil(least)};" in said}
    solve(network.network, memory=memory, memory_limit=math.inf)  # loads what is compiled
    points = frontier(network.network, memory, fractions=fractions, time_limit=limit)
    return {"limit": limit, "cost": free.cost, "least_bytes": least, "below": refusal, "points": [
        {"limit_bytes": point.memory_limit, "bytes": point.memory, "cost": point.solution.cost,
         "lower_bound": point.solution.lower_bound, "optimal": point.solution.optimal,
         "seconds": point.solution.seconds, "nodes": point.solution.statistics["nodes"]} for point in points],
            "median_seconds": statistics.median(point.solution.seconds for point in points)}


def points_of(row: dict[str, Any]) -> list[FrontierPoint]:
    """The frontier of a row that `sweep` made; without its assignments."""
    return [FrontierPoint(point["limit_bytes"], point["bytes"], Solution(
        (), point["cost"], point["lower_bound"], relative_gap(point["cost"], point["lower_bound"]), point["optimal"],
        point["seconds"], {"nodes": point["nodes"]})) for point in row["points"]]


def largest_gap(row: dict[str, Any]) -> float:
    """Of the points of a row."""
    return max(point.solution.gap for point in points_of(row))


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Sweeps one network and prints what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", help=f"one of {', '.join(NETWORKS)}")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for each memory limit")
    parser.add_argument("--work", default=str(ROOT / "build" / "search"), help="folder of the graphs")
    flags = parser.parse_args(arguments)
    outcome = sweep(priced(flags.network, Workshop(flags.work)), flags.limit)
    print(json.dumps({**outcome, "peak_bytes": peak_bytes()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
