"""From a graph to a proven strategy, in a process of its own, so that its time and peak memory are its own.

    python -m benchmarks.search_process GRAPH.json --machine=h100 --devices=1024 --repeat=3

Reads the graph, builds its network and searches it. The first round also loads the compiled code; those after it show
what build and search take by themselves. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.commands import told_in_one_line
from pase_mtf.cost.build import build_network
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.machine import Machine
from pase_mtf.search import solve

__all__ = ["main", "peak_bytes"]


def peak_bytes() -> int:
    """The most memory that this process has held. Not ru_maxrss where that can be helped: a process starts out with the
    ru_maxrss of the one that started it."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it and prints what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph")
    parser.add_argument("--machine", default="1080ti")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--repeat", type=int, default=0, help="further rounds, whose median counts as warm")
    flags = parser.parse_args(arguments)
    start = time.perf_counter()
    graph, machine = ComputationGraph.load(flags.graph), Machine.load(flags.machine)
    outcome = {"load_seconds": time.perf_counter() - start, "load_bytes": peak_bytes()}
    build, search = [], []
    for round_ in range(1 + flags.repeat):
        start = time.perf_counter()
        network = build_network(graph, machine, flags.devices).network
        built = time.perf_counter()
        # As find_strategy calls it: no certificate where nobody checks it.
        solution = solve(network, certificate=False, time_limit=flags.limit)
        build.append(built - start)
        search.append(time.perf_counter() - built)
        if round_ == 0:
            outcome |= {
                "layers": len(network.vectors), "edges": len(network.edges), "configurations": sum(network.sizes),
                "build_seconds": build[0], "search_seconds": search[0], "cost": solution.cost,
                "gap": solution.gap, "optimal": solution.optimal, "peak_bytes": peak_bytes()}
        del network
    if flags.repeat:
        outcome |= {"warm_build_seconds": statistics.median(build[1:]),
                    "warm_search_seconds": statistics.median(search[1:]),
                    "warm_seconds": statistics.median(map(sum, zip(build[1:], search[1:], strict=True)))}
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
