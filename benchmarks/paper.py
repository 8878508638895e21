"""The papers' tables, beside ours: time to find a strategy, the strategies, predicted speedups.

    python -m benchmarks.paper                              # some minutes on two cores
    python -m benchmarks.paper --sections=speedups --models=alexnet

Writes docs/paper.md, docs/paper.json and a plot per machine. Needs no training: graphs are exported once, by a process
of their own, and priced.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import paper_numbers
from benchmarks.paper_document import document, plot_speedups
from benchmarks.search_densenet import paper_machine
from benchmarks.search_networks import ROOT, Workshop
from pase_mtf.cost.build import build_network, price_strategy
from pase_mtf.errors import InfeasibleError
from pase_mtf.files import write_atomically
from pase_mtf.graph import ComputationGraph
from pase_mtf.machine import Machine
from pase_mtf.search import solve
from pase_mtf.strategy import find_strategy

__all__ = ["main"]

MODELS = {"alexnet": 128, "transformer": 64}
"""The models of the tables, in the paper's sizes (preset big), and the paper's batches."""
DEVICES = (4, 8, 16, 32, 64)
MANY_DEVICES = (128, 256, 512, 1024)
MANY_BATCH = 1024
"""Examples per step at scale: one for each of the most devices."""
_MACHINES = ("1080ti", "2080ti")
_TABLE_DEVICES = 32
_PROPOSALS = 250_000

Results = dict[str, dict[str, Any]]


def times(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Table I: seconds to find a strategy, of `exact` and of the paper's own search, on the paper's costs."""
    rows = {}
    for devices in DEVICES:
        start = time.perf_counter()
        network = build_network(graph, paper_machine(), devices, model="pase").network
        built = time.perf_counter() - start
        solve(network, certificate=False)  # the first search of a process loads compiled code
        solution = solve(network, certificate=False)
        rows[str(devices)] = {"build": built, "exact": solution.seconds, "optimal": solution.optimal,
                              "cost": solution.cost, "pase": _paper_search(network, limit)}
    return rows


def _paper_search(network: Any, limit: float) -> dict[str, Any]:
    """The paper's search in a process of its own: its seconds, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="pase_mtf-network-") as folder:
        path = os.path.join(folder, "network.npz")
        output = os.path.join(folder, "solution.json")
        network.save(path)
        command = [sys.executable, "-m", "pase_mtf.search", path, "--method=pase", f"--output={output}"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"says": f"over {limit:.0f} s"}
        if run.returncode:
            lines = run.stderr.strip().splitlines()
            needed = re.search(r"need (\S+ GB)", run.stderr)
            return {"says": f"needs {needed.group(1)}" if needed else lines[-1] if lines else "failed"}
        found = json.loads(pathlib.Path(output).read_text(encoding="utf-8"))
        return {"seconds": found["seconds"], "cost": found["cost"]}


def strategies(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Table II: our optimum under the paper's costs, and the paper's strategy priced by the same costs."""
    machine = Machine.load("1080ti")
    priced = build_network(graph, paper_machine(), _TABLE_DEVICES, model="pase")
    solution = solve(priced.network, certificate=False)
    ours = [choices[index] for choices, index in zip(priced.configurations, solution.assignment, strict=True)]
    theirs = paper_numbers.paper_strategy(model, graph)

    def seconds(chosen: Sequence[Any]) -> float:
        return price_strategy(graph, machine, _TABLE_DEVICES, chosen).total

    rows: dict[tuple[str, str, str], int] = {}
    for layer, mine, paper in zip(graph.layers, ours, theirs, strict=True):
        name = "".join("*" if character.isdigit() else character for character in layer.name) \
            if model == "transformer" else layer.name
        key = name, str(mine), str(paper)
        rows[key] = rows.get(key, 0) + 1
    return {"rows": [[*key, count] for key, count in rows.items()], "optimal": solution.optimal,
            "ours": solution.cost,
            "theirs": price_strategy(graph, paper_machine(), _TABLE_DEVICES, theirs, "pase").total,
            "ours_seconds": seconds(ours), "theirs_seconds": seconds(theirs),
            "best_seconds": find_strategy(graph, _TABLE_DEVICES, machine).seconds}


def speedups(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Figure 6: predicted speedup over data parallelism of every way to find a strategy."""
    return {name: {str(devices): _speedups(graph, name, devices) for devices in DEVICES} for name in _MACHINES}


def scale(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """The same at scale, on nodes of eight H100."""
    return {str(devices): _speedups(graph, "h100", devices) for devices in MANY_DEVICES}


def _speedups(graph: ComputationGraph, machine: str, devices: int) -> dict[str, Any]:
    """Predicted seconds of a step and speedups over data parallelism; an arm that is infeasible is left out."""
    def flexflow() -> Any:
        return min((find_strategy(graph, devices, machine, method="mcmc", start_from=start, proposals=_PROPOSALS)
                    for start in ("data_parallel", "expert")), key=lambda strategy: strategy.seconds)

    arms: dict[str, Callable[[], Any]] = {
        "data parallel": lambda: find_strategy(graph, devices, machine, method="data_parallel"),
        "expert": lambda: find_strategy(graph, devices, machine, method="expert"),
        "FlexFlow": flexflow, "ours": lambda: find_strategy(graph, devices, machine)}
    found = {}
    for name, find in arms.items():
        try:
            found[name] = find()
        except InfeasibleError:
            continue
    base = found["data parallel"].seconds
    return {name: {"seconds": strategy.seconds, "speedup": base / strategy.seconds,
                   "memory": strategy.memory_bytes} for name, strategy in found.items()} | {
        "optimal": found["ours"].search["optimal"]}


SECTIONS = {"times": times, "strategies": strategies, "speedups": speedups, "scale": scale}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prices and writes; sections and models that are not asked for keep what an earlier run wrote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the paper's own search, each")
    parser.add_argument("--graphs", default="", help="folder that keeps the exported graphs; empty: none")
    parser.add_argument("--output", default=str(ROOT / "docs"))
    flags = parser.parse_args(arguments)
    path = pathlib.Path(flags.output, "paper.json")
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    work = [(section, model) for model in flags.models.split(",") for section in flags.sections.split(",")]
    with tempfile.TemporaryDirectory(prefix="pase_mtf-graphs-") as temporary:
        workshop = Workshop(flags.graphs or temporary)
        for section, model in tqdm(work, desc="pricing"):
            batch = MANY_BATCH if section == "scale" else MODELS[model]
            graph = ComputationGraph.load(workshop.graph(model, "big", batch))
            results.setdefault(section, {})[model] = SECTIONS[section](graph, model, flags.limit)
            results["facts"] = {"python": platform.python_version(), "processor": _processor()}
            write_atomically(path, json.dumps(results, indent=1) + "\n")
    for machine in _MACHINES:
        if "speedups" in results:
            plot_speedups(results["speedups"], machine, os.path.join(flags.output, f"paper-{machine}.svg"))
    write_atomically(os.path.join(flags.output, "paper.md"), document(results))
    return 0


def _processor() -> str:
    from pase_mtf.launch.devices import describe_host
    return describe_host()


if __name__ == "__main__":
    sys.exit(main())
