"""What is measured of the searches: a section is a list of rows, each a name and a function that measures it.

Every measurement but the random variations is a process of its own: its time and peak memory are its own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.search_densenet import densenet, paper_configurations, paper_machine
from benchmarks.search_memory import FRACTIONS
from benchmarks.search_memory import NETWORKS as MEMORY_NETWORKS
from benchmarks.search_networks import (
    DEEP,
    INSTANCES,
    LAUNCHER,
    MACHINE,
    ROOT,
    Variation,
    Workshop,
    instances,
    price,
    price_densenet,
)
from pase_mtf.cost.build import build_network
from pase_mtf.search import solve
from pase_mtf.search.network import CostNetwork
from pase_mtf.strategy.warm import compile_kernels

__all__ = ["DENSE_DEVICES", "METHODS", "SECTIONS", "Options", "measure", "start_seconds", "warm_up"]

METHODS = ("exact", "pase", "breadth_first", "mcmc (1)", "mcmc (2)", "milp", "toulbar2")
"""The columns of the comparison; mcmc runs from two starts."""
DEVICES = (4, 8, 16, 32, 64)
DENSE_DEVICES = (8, 16, 32, 64, 128, 256)
_SHUFFLED = ("densenet-direct_8", "densenet-direct_16")
# Beyond its limit, what a solver may take to start, read the network, repeat itself and stop.
_GRACE = 30.0
_MOST_POINTS = 40
# A program that does no more than start Python and numba, and call one compiled function.
_EMPTY = """import numpy
from numba import njit
@njit(cache=True)
def add(x):
    return x.sum()
add(numpy.zeros(3))
"""

Row = tuple[str, Callable[[], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line decides.

    Attributes:
      workshop: where graphs and networks are made.
      limit, mcmc_limit: seconds for each solver.
      sweep_limit: seconds for each memory limit.
      repeats: runs of every whole process, of which the median counts.
      variations: how many.
      methods: columns of the comparison.
      networks: words of which a network's name has to hold one; empty: all.
    """

    workshop: Workshop
    limit: float = 60.0
    mcmc_limit: float = 10.0
    sweep_limit: float = 10.0
    repeats: int = 5
    variations: int = 500
    methods: Sequence[str] = METHODS
    networks: Sequence[str] = ()

    def wants(self, name: str) -> bool:
        """Whether a network of that name is measured."""
        return not self.networks or any(word in name for word in self.networks)


def warm_up() -> None:
    """Compiles what is not compiled yet, and loads it into this process, so that no row pays for it."""
    compile_kernels()
    for devices in (4, 6):  # a power of two, and one that is none
        solve(price_densenet(densenet(8, blocks=(2,)), devices).network, certificate=False)


def start_seconds(repeats: int = 5) -> float:
    """What a process needs before it does anything: Python, numpy and numba started, compiled code loaded."""
    times = []
    with tempfile.TemporaryDirectory(prefix="pase_mtf-empty-") as folder:
        script = pathlib.Path(folder) / "empty.py"
        script.write_text(_EMPTY)
        for _ in range(1 + repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, str(script)], check=True)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one compiles


def _run(module: str, *arguments: str, timeout: float) -> tuple[dict[str, Any], float]:
    """A module of ours that prints a JSON object, in a process of its own; the object, and seconds of the process."""
    start = time.perf_counter()
    try:
        run = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False,
                             cwd=ROOT, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout:.0f} s"}, timeout
    seconds = time.perf_counter() - start
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        message = run.stderr.strip().splitlines()
        return {"error": message[-1] if message else f"ended with code {run.returncode}"}, seconds
    return json.loads(lines[-1]), seconds


def _digest(path: str) -> str:
    """Tells a network from the same one with other prices."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:12]


def measure(method: str, path: str, options: Options) -> dict[str, Any]:
    """One solver of `METHODS` on one network."""
    solver, _, start = method.partition(" ")
    limit = options.mcmc_limit if solver == "mcmc" else options.limit
    flags = [f"--start={start.strip('()')}"] if start else []
    outcome, seconds = _run("benchmarks.solvers", solver, path, f"--limit={limit}", *flags, timeout=limit + _GRACE)
    history = outcome.get("history", [])
    if len(history) > _MOST_POINTS:
        chosen = np.unique(np.geomspace(1, len(history), _MOST_POINTS).astype(int)) - 1
        outcome["history"] = [history[point] for point in chosen]
    return {"limit": limit, "process_seconds": seconds, "network": _digest(path), **outcome}


def _network_process(path: str, repeats: int) -> dict[str, Any]:
    """The search's own command on a file, as a user starts it."""
    times, searches = [], []
    with tempfile.TemporaryDirectory(prefix="pase_mtf-solution-") as folder:
        output = pathlib.Path(folder) / "solution.json"
        for _ in range(1 + repeats):
            start = time.perf_counter()
            run = subprocess.run([sys.executable, "-m", "pase_mtf.search", path, f"--output={output}"], check=False,
                                 cwd=ROOT, capture_output=True, text=True)
            times.append(time.perf_counter() - start)
            if run.returncode:
                return {"error": run.stderr.strip().rpartition("\n")[2]}
            solution = json.loads(output.read_text())
            searches.append(solution["seconds"])
            output.unlink()
    return {"process_seconds": statistics.median(times[1:]), "search_seconds": statistics.median(searches[1:]),
            "optimal": solution["optimal"], "cost": solution["cost"]}


def _graph_process(path: str, machine: str, devices: int, repeats: int) -> dict[str, Any]:
    """From an exported graph: read, build, search."""
    runs = [_run("benchmarks.search_process", path, f"--machine={machine}", f"--devices={devices}", timeout=300)
            for _ in range(1 + repeats)][1:]
    outcome = sorted(runs, key=lambda run: run[1])[len(runs) // 2]
    return {**outcome[0], "process_seconds": outcome[1]}


def instance_rows(options: Options) -> list[Row]:
    """Whole processes: every network of the project, and the launcher's graphs on 4 to 64 devices; each with what a
    process took to start on the computer that it was measured on."""
    @functools.cache
    def start() -> float:
        return start_seconds(options.repeats)

    rows: list[Row] = [(name, lambda path=path: _network_process(path, options.repeats)) for name, path in instances()]
    for model in LAUNCHER:
        for devices in DEVICES:
            name = f"{model}-{LAUNCHER[model][0]}_{devices}"
            rows.append((name, lambda model=model, devices=devices: _network_process(
                options.workshop.launcher_network(model, devices), options.repeats)))
            rows.append((f"{name}, from its graph", lambda model=model, devices=devices: _graph_process(
                options.workshop.graph(model, *LAUNCHER[model]), MACHINE, devices, options.repeats)))
    return [(name, lambda run=run: {"start_seconds": start(), **run()}) for name, run in rows if options.wants(name)]


def scale_rows(options: Options) -> list[Row]:
    """The transformer on 64 and on 1024 devices, a deep one, and the export of that."""
    def process(machine: str, devices: int, repeat: int, layers: int | None = None) -> dict[str, Any]:
        graph = options.workshop.graph("transformer", *LAUNCHER["transformer"], layers)
        outcome, seconds = _run("benchmarks.search_process", graph, f"--machine={machine}", f"--devices={devices}",
                                f"--repeat={repeat}", timeout=600)
        return {**outcome, "process_seconds": seconds}

    def export() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="pase_mtf-export-") as folder:
            outcome, seconds = _run("benchmarks.search_export", "transformer", *map(str, LAUNCHER["transformer"]),
                                    str(pathlib.Path(folder) / "graph.json"), f"--layers={DEEP}", timeout=600)
        return {**outcome, "process_seconds": seconds}
    deep = f"transformer-big-{DEEP}+{DEEP}"
    return [("transformer-big_64", lambda: process(MACHINE, 64, options.repeats)),
            ("transformer-big_1024", lambda: process("h100", 1024, options.repeats)),
            (f"{deep}_1024", lambda: process("h100", 1024, 0, DEEP)), (f"{deep}, exported", export)]


def dense_rows(options: Options) -> list[Row]:
    """densenet-direct on 8 to 256 devices, and how it compares with the networks of the project."""
    def solve_dense(normalization: str, devices: int) -> dict[str, Any]:
        path = options.workshop.densenet_network(normalization, devices)
        graph = densenet(normalization=normalization)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            network = price_densenet(graph, devices).network
            times.append(time.perf_counter() - start)
        return {"layers": len(network.vectors), "edges": len(network.edges), "configurations": sum(network.sizes),
                "build_seconds": statistics.median(times), **measure("exact", path, options)}

    def compare(devices: int) -> dict[str, Any]:
        theirs = CostNetwork.load(INSTANCES / f"densenet-direct_{devices}.npz")
        graph = densenet(normalization="layer")
        offered = [paper_configurations(layer, devices, every_divisor=True) for layer in graph.layers]
        ours = build_network(graph, paper_machine(), devices, offered, "pase").network
        mine, other = solve(ours, certificate=False), solve(theirs, certificate=False)
        return {"optimum": mine.cost, "instance": other.cost, "ours_in_instance": theirs.cost(mine.assignment),
                "same_vectors": sum(np.allclose(a, b) for a, b in zip(ours.vectors, theirs.vectors, strict=True)),
                "different_layers": [graph.layers[number].name for number, (a, b) in enumerate(
                    zip(mine.assignment, other.assignment, strict=True)) if a != b],
                "layers": len(theirs.vectors)}
    rows: list[Row] = [(f"densenet-{normalization}_{devices}", lambda n=normalization, p=devices: solve_dense(n, p))
                       for normalization in ("layer", "batch") for devices in DENSE_DEVICES]
    return rows + [(f"instance_{devices}", lambda p=devices: compare(p)) for devices in (8, 16)]


def variation_rows(options: Options) -> list[Row]:
    """Random variations of graph, devices, bandwidth and batch."""
    def run(seed: int) -> dict[str, Any]:
        drawn = Variation.draw(seed)
        network, build = price(drawn, options.workshop)
        solution = solve(network, certificate=False, time_limit=options.limit)
        return {"what": str(drawn), "build_seconds": build, "search_seconds": solution.seconds,
                "optimal": solution.optimal, "gap": solution.gap, "passes": solution.statistics["passes"],
                "nodes": solution.statistics["nodes"]}
    return [(str(seed), lambda seed=seed: run(seed)) for seed in range(options.variations)]


def shuffled_rows(options: Options) -> list[Row]:
    """densenet-direct with its costs shuffled: hard by construction."""
    return [(f"{name} shuffled", lambda name=name: measure(
        "exact", options.workshop.shuffled_network(name), options)) for name in _SHUFFLED]


def memory_rows(options: Options) -> list[Row]:
    """The time-memory frontier of every network whose graph is at hand."""
    def run(name: str) -> dict[str, Any]:
        outcome, seconds = _run("benchmarks.search_memory", name, f"--limit={options.sweep_limit}",
                                f"--work={options.workshop.folder}",
                                timeout=len(FRACTIONS) * options.sweep_limit + 2 * _GRACE)
        return {**outcome, "process_seconds": seconds}
    return [(name, lambda name=name: run(name)) for name in MEMORY_NETWORKS if options.wants(name)]


def rival_rows(options: Options) -> list[Row]:
    """Every method on every network."""
    networks: list[tuple[str, Callable[[], str]]] = [(name, lambda path=path: path) for name, path in instances()]
    networks += [(f"{model}-{LAUNCHER[model][0]}_{devices}",
                  lambda model=model, devices=devices: options.workshop.launcher_network(model, devices))
                 for model in LAUNCHER for devices in DEVICES]
    networks += [(f"densenet-layer_{devices}", lambda devices=devices: options.workshop.densenet_network(
        "layer", devices)) for devices in DENSE_DEVICES]
    networks.append((f"{_SHUFFLED[0]} shuffled", lambda: options.workshop.shuffled_network(_SHUFFLED[0])))

    def size(path: str) -> dict[str, Any]:
        network = CostNetwork.load(path)
        return {"layers": len(network.vectors), "edges": len(network.edges), "configurations": sum(network.sizes),
                "network": _digest(path)}
    rows: list[Row] = []
    for name, make in networks:
        if options.wants(name):
            rows.append((f"{name} | size", lambda make=make: size(make())))
            rows += [(f"{name} | {method}", lambda make=make, method=method: measure(method, make(), options))
                     for method in options.methods]
    return rows


SECTIONS: dict[str, Callable[[Options], list[Row]]] = {
    "instances": instance_rows, "scale": scale_rows, "dense": dense_rows, "variations": variation_rows,
    "shuffled": shuffled_rows, "memory": memory_rows, "rivals": rival_rows}
"""By name, in the order in which they are measured."""
