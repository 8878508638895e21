"""Whether a search keeps to its time and memory, on one random network, in a process of its own.

    python -m benchmarks.search_budget dense noise 100 50 --limit=1

Prints one JSON object. Time is that of the processor: on a busy machine the clock on the wall says more about others.
So that the search is held to the same, its clock is the processor's as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from benchmarks.search_process import peak_bytes
from benchmarks.search_random import COSTS, SHAPES, random_network
from pase_mtf.errors import PaseError
from pase_mtf.search import solve
from pase_mtf.search.network import CostNetwork

__all__ = ["NETWORKS", "main"]

NETWORKS: tuple[tuple[str, str, int, int, int | None, float], ...] = (
    ("none", "noise", 5000, 500, None, 1),
    ("chain", "noise", 5000, 20, None, 2),
    ("chain", "noise", 1000, 200, 8, 2),
    ("tree", "noise", 5000, 12, None, 2),
    ("tree", "noise", 2000, 500, 4, 3),
    ("star", "noise", 5000, 12, None, 2),
    ("star", "noise", 3000, 500, 4, 2),
    ("ladder", "structured", 1000, 50, None, 3),
    ("ladder", "noise", 5000, 500, 4, 5),
    ("grid", "noise", 5000, 12, None, 3),
    ("grid", "noise", 900, 500, 8, 3),
    ("sparse", "noise", 2600, 12, None, 5),
    ("sparse", "noise", 5000, 12, None, 10),
    ("sparse", "integer", 2000, 100, 16, 3),
    ("sparse", "noise", 300, 100, None, 2),
    ("dense", "noise", 100, 50, None, 1),
    ("dense", "noise", 30, 500, None, 3),
    ("dense", "noise", 30, 500, 4, 1),
    ("dense", "integer", 18, 6, None, 1),
    ("dense", "close", 60, 30, None, 1),
    ("dense", "structured", 300, 10, None, 2),
    ("sparse", "noise", 60, 8, None, 1),
    ("dense", "noise", 2, 500, None, 1),
    ("none", "noise", 1, 1, None, 1))
"""(shape, costs, layers, configurations, distinct matrices, time limit in seconds): from none to far too large."""


def run(network: CostNetwork, limit: float) -> dict[str, float | bool | str]:
    """Searches with a time limit."""
    before, wall, cpu = peak_bytes(), time.time(), time.process_time()
    solution = solve(network, time_limit=limit)
    return {"seconds": time.time() - wall, "cpu_seconds": time.process_time() - cpu,
            "search_bytes": max(0, peak_bytes() - before), "optimal": solution.optimal,
            "gap": min(solution.gap, 1e9), "certificate": solution.certificate is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the network, searches it, and prints what that took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("costs", choices=COSTS)
    parser.add_argument("layers", type=int)
    parser.add_argument("configurations", type=int)
    parser.add_argument("--distinct", type=int, help="different matrices (default: one per edge)")
    parser.add_argument("--limit", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    network = random_network(flags.shape, flags.costs, flags.layers, flags.configurations, flags.seed, flags.distinct)
    for shape in ("dense", "sparse"):  # loads the compiled code
        solve(random_network(shape, "noise", 9, 6, 1), time_limit=60)
    time.perf_counter = time.process_time
    try:
        print(json.dumps({"network_bytes": sum(matrix.nbytes for matrix in network.arrays.matrices()),
                          "edges": len(network.arrays.edge_matrix), "limit": flags.limit, **run(network, flags.limit)}))
    except PaseError as error:
        print(json.dumps({"error": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
