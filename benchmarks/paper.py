"""The papers' tables, beside ours: time to find a strategy, the strategies, predicted speedups.

    python -m benchmarks.paper                              # a quarter of an hour on two cores
    python -m benchmarks.paper --missing                    # what docs/paper.json does not hold yet
    python -m benchmarks.paper --sections=speedups,scale --models=alexnet,gnmt
    python -m benchmarks.paper --sections=                  # writes the document anew, of what is there

Writes docs/paper.md, docs/paper.json and a plot per machine. Needs no training: graphs are exported once, each by a
process of its own, kept in a folder (delete it when the models have changed), and priced. Every model's part of every
section is written as soon as it is known.
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

import numba
import numpy as np
from tqdm import tqdm

import benchmarks.breadth_first  # noqa: F401  (registers itself)
from benchmarks import paper_numbers, paper_strategies
from benchmarks.launching import commit
from benchmarks.paper_document import document
from benchmarks.paper_plot import plot_speedups
from benchmarks.search_densenet import paper_configurations, paper_machine
from benchmarks.search_networks import INSTANCES, ROOT, Workshop
from pase_mtf.cost.build import build_network
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.files import write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import describe_host
from pase_mtf.search import solve
from pase_mtf.search.network import CostNetwork
from pase_mtf.strategy.find import find_strategy

__all__ = ["main"]

MODELS = {"alexnet": 128, "inception_v3": 128, "rnnlm": 64, "transformer": 64, "resnet101": 128, "densenet121": 128,
          "gnmt": 64, "biglstm": 64}
"""The models of the papers, in the published sizes (preset big), and the paper's batches."""
DEVICES = (4, 8, 16, 32, 64)
MANY_DEVICES = (128, 256, 512, 1024)
MANY_BATCH = 1024
"""Examples per step at scale: one for each of the most devices."""
WORKERS = (1, 2, 4, 8)
_MACHINES = ("1080ti", "2080ti")
_PROPOSALS = 250_000
_TABLES = 4e9
"""Bytes of tables up to which the paper's own search is run."""
_ATTENTION_OR_RECURRENT = ("rnnlm", "transformer", "gnmt", "biglstm")
_INSTANCES = {"alexnet": "alexnet", "inception_v3": "inception3", "rnnlm": "rnnlm", "transformer": "transformer"}
"""Models whose networks, made by the paper's own tool, are held in the project."""

Results = dict[str, dict[str, Any]]


def times(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Table I: seconds to find a strategy, of `exact` and of the paper's own search, on the paper's costs.

    Three networks for every number of devices: our graph with our configurations, our graph with the paper's (parts
    per dim, in one order, on at most p devices), and, where there is one, the network that the paper's tool made.
    """
    least = 1 if model in _ATTENTION_OR_RECURRENT else 4
    rows = {}
    build_network(graph, paper_machine(), DEVICES[0], model="pase")  # loads compiled code, once in a process
    for devices in DEVICES:
        rows[str(devices)] = row = _race(
            lambda devices=devices: build_network(graph, paper_machine(), devices, model="pase").network, limit)
        row["paper_space"] = _race(lambda devices=devices: build_network(
            graph, paper_machine(), devices, [paper_configurations(layer, devices, least=least)
                                              for layer in graph.layers], "pase").network, limit)
        instance = INSTANCES / f"{_INSTANCES.get(model)}_{devices}.npz"
        if instance.exists():
            row["instance"] = _race(lambda path=instance: CostNetwork.load(path), limit)
    return rows


def _race(make: Callable[[], CostNetwork], limit: float) -> dict[str, Any]:
    start = time.perf_counter()
    network = make()
    built = time.perf_counter() - start
    solve(network, certificate=False)  # as above
    solution = solve(network, certificate=False)
    return {"build": built, "exact": solution.seconds, "optimal": solution.optimal, "cost": solution.cost,
            "most": max(map(len, network.vectors)), "pase": _paper_search(network, limit),
            "orders": {method: _tables(network, method) for method in ("pase", "breadth_first")}}


def _tables(network: CostNetwork, method: str) -> dict[str, float]:
    """What a dynamic program in that order would need: GB of tables, and the most layers of one table and its own."""
    try:
        solve(network, method, memory=0.0)
    except UsageError as error:
        found = re.search(r"need (\S+) GB.*layer: (\d+) layers", str(error))
        if found is None:
            raise
        return {"gigabytes": float(found.group(1)), "layers": int(found.group(2))}
    return {"gigabytes": 0.0, "layers": 0}  # nothing is left to decide once the network is in its normal form


def _paper_search(network: CostNetwork, limit: float) -> dict[str, Any]:
    """The paper's search in a process of its own: its seconds, or why there are none."""
    needed = _tables(network, "pase")["gigabytes"]
    if needed > _TABLES / 1e9:
        return {"says": f"needs {needed:.3g} GB"}
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
            return {"says": lines[-1] if lines else "failed"}
        found = json.loads(pathlib.Path(output).read_text(encoding="utf-8"))
        return {"seconds": found["seconds"], "cost": found["cost"]}


def strategies(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Table II: our optimum under the paper's costs, and the paper's strategy priced by the same costs."""
    return paper_strategies.compare(model, graph)


def speedups(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Figure 6: predicted speedup over data parallelism of every way to find a strategy."""
    return {name: {str(devices): _speedups(graph, name, devices) for devices in DEVICES} for name in _MACHINES}


def scale(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """The same at scale, on nodes of eight H100."""
    return {"h100": {str(devices): _speedups(graph, "h100", devices) for devices in MANY_DEVICES}}


def workers(graph: ComputationGraph, model: str, limit: float) -> dict[str, Any]:
    """Pal et al.'s SU_M: how much faster M devices of a node take the step that one device takes, as one worker."""
    found = {devices: find_strategy(graph, devices, "h100", simulate=0) for devices in WORKERS}
    return {str(devices): {"seconds": strategy.seconds, "speedup": found[1].seconds / strategy.seconds,
                           "optimal": strategy.search["optimal"]} for devices, strategy in found.items()}


def _speedups(graph: ComputationGraph, machine: str, devices: int) -> dict[str, Any]:
    """Predicted seconds of a step and speedups over data parallelism; an arm that is infeasible is left out."""
    def flexflow() -> Any:
        return min((find_strategy(graph, devices, machine, method="mcmc", start_from=start, proposals=_PROPOSALS)
                    for start in ("data_parallel", "expert")), key=lambda strategy: strategy.seconds)

    arms: dict[str, Callable[[], Any]] = {
        "data parallel": lambda: find_strategy(graph, devices, machine, method="data_parallel"),
        "expert": lambda: find_strategy(graph, devices, machine, method="expert"),
        "FlexFlow": flexflow, "ours": lambda: find_strategy(graph, devices, machine, simulate=0)}
    found = {}
    for name, find in arms.items():
        try:
            found[name] = find()
        except InfeasibleError:
            continue
    base, most = found["data parallel"].seconds, Machine.load(machine).memory_bytes
    return {name: {"seconds": strategy.seconds, "speedup": base / strategy.seconds, "memory": strategy.memory_bytes,
                   "fits": strategy.memory_bytes <= most} for name, strategy in found.items()} | {
        "optimal": found["ours"].search["optimal"]}


SECTIONS = {"times": times, "strategies": strategies, "speedups": speedups, "scale": scale, "workers": workers}


def _wanted(section: str, model: str) -> bool:
    return {"strategies": model in paper_numbers.TABLE_2, "workers": model in paper_numbers.PAL}.get(section, True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prices and writes; sections and models that are not asked for keep what an earlier run wrote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--missing", action="store_true", help="only what an earlier run has not written")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the paper's own search, each")
    parser.add_argument("--graphs", default=str(ROOT / "build" / "paper"), help="folder that keeps the exported graphs")
    parser.add_argument("--output", default=str(ROOT / "docs"))
    flags = parser.parse_args(arguments)
    sections, models = ([name for name in given.split(",") if name] for given in (flags.sections, flags.models))
    for given, known in ((sections, SECTIONS), (models, MODELS)):
        for name in given:
            if name not in known:
                parser.error(f"unknown {name!r}; choose from {', '.join(known)}")
    path = pathlib.Path(flags.output, "paper.json")
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    work = [(section, model) for model in models for section in sections if _wanted(section, model)
            and not (flags.missing and model in results.get(section, {}))]
    workshop = Workshop(flags.graphs)
    for section, model in (bar := tqdm(work, desc="pricing")):
        bar.set_postfix_str(f"{model}, {section}")
        batch = MANY_BATCH if section == "scale" else MODELS[model]
        graph = ComputationGraph.load(workshop.graph(model, "big", batch))
        found = SECTIONS[section](graph, model, flags.limit)
        results[section] = _in_order({**results.get(section, {}), model: found})
        results.setdefault("commits", {})[f"{section}, {model}"] = commit() or "unknown"
        here = {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
                "processor": describe_host()}
        results.setdefault("facts", here)  # of models that were timed before these were kept one by one
        if section == "times":  # all others compute, and are the same on every machine
            results.setdefault("timed", {})[model] = here
        write_atomically(path, json.dumps(results, indent=1) + "\n")
    for machine in _MACHINES:
        if "speedups" in results:
            plot_speedups(results["speedups"], machine, os.path.join(flags.output, f"paper-{machine}.svg"))
    if "scale" in results:
        plot_speedups(results["scale"], "h100", os.path.join(flags.output, "paper-h100.svg"))
    write_atomically(os.path.join(flags.output, "paper.md"), document(results))
    return 0


def _in_order(found: dict[str, Any]) -> dict[str, Any]:
    return {model: found[model] for model in (*MODELS, *found) if model in found}


if __name__ == "__main__":
    sys.exit(main())
