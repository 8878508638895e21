"""The searches side by side: time, peak memory, and whether the optimum is proven.

    python -m benchmarks.search                              # two hours on two cores: slow solvers get --limit each
    python -m benchmarks.search --methods=exact,pase,mcmc    # minutes
    python -m benchmarks.search --networks=transformer_8 --limit=20

Networks: the paper's graphs (tests/data/instances), the launcher's own graphs on 4 to 64 devices, DenseNet with its
costs shuffled (hard by construction), random variations of all of them, and a deep transformer. Writes
docs/benchmarks/search.md, search.json and search.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.solvers import SOLVERS
from pase_mtf.files import write_atomically
from pase_mtf.network import CostNetwork, NetworkEdge
from pase_mtf.search import solve

__all__ = ["main", "shuffled", "variation"]

ROOT = pathlib.Path(__file__).absolute().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
INSTANCES = ROOT / "tests" / "data" / "instances"
# Seconds to find a strategy on the paper's machine (PaSE, Table I): graph -> devices -> seconds.
TABLE_ONE = {
    "alexnet": {4: 0.226, 8: 0.253, 16: 0.295, 32: 0.361, 64: 0.475},
    "inception3": {4: 14.4, 8: 20.0, 16: 39.8, 32: 86.0, 64: 196.0},
    "rnnlm": {4: 0.057, 8: 0.086, 16: 0.069, 32: 0.131, 64: 0.215},
    "transformer": {4: 9.75, 8: 28.8, 16: 130.9, 32: 553.0, 64: 1883.0}}
TABLE_ONE_FLEXFLOW = {
    "alexnet": {4: 2.54, 8: 2.77, 16: 6.98, 32: 7.92, 64: 257.0},
    "inception3": {4: 69.2, 8: 146.5, 16: 365.8, 32: 938.0, 64: 2237.0},
    "rnnlm": {4: 107.0, 8: 164.0, 16: 432.0, 32: 668.0, 64: 1042.0}}
# A program that does no more than start Python and numba, and call one compiled function.
_EMPTY = """import numpy
from numba import njit
@njit(cache=True)
def add(x):
    return x.sum()
add(numpy.zeros(3))
"""


def shuffled(network: CostNetwork, seed: int = 0) -> CostNetwork:
    """The same graph with every vector and matrix shuffled: nothing is left of what makes real networks easy."""
    rng = np.random.default_rng(seed)
    return CostNetwork(
        [rng.permutation(vector) for vector in network.vectors],
        [NetworkEdge(edge.source, edge.target, rng.permutation(edge.matrix.ravel()).reshape(edge.matrix.shape),
                     edge.rows, edge.columns) for edge in network.edges])


def variation(network: CostNetwork, seed: int) -> CostNetwork:
    """Another bandwidth (all edges scaled), another balance of the kinds of layers, another batch (all vectors scaled),
    each within a factor of sixteen either way; layers and edges that were alike stay alike."""
    rng = np.random.default_rng(seed)
    bandwidth, batch = 2.0 ** rng.uniform(-4, 4, 2)
    factor = {kind: 2.0 ** rng.uniform(-1, 1) for kind in sorted(set(network.kinds))}
    scaled = {id(edge.matrix): edge.matrix * bandwidth for edge in network.edges}
    return CostNetwork(
        [vector * (batch * factor[kind]) for vector, kind in zip(network.vectors, network.kinds, strict=True)],
        [NetworkEdge(edge.source, edge.target, scaled[id(edge.matrix)], edge.rows, edge.columns)
         for edge in network.edges], network.kinds)


def _launcher_networks(folder: str, machine: str) -> Iterator[tuple[str, str]]:
    """The launcher's graphs (big presets) on 4 to 64 devices, priced by our own model; made in a process of its own,
    as it needs TensorFlow."""
    script = f"""
from pase_mtf import models
from pase_mtf.compat import mtf, tf
from pase_mtf.cost.build import build_network
from pase_mtf.export import export_graph
from pase_mtf.machine import Machine
for name, batch in (("alexnet", 128), ("transformer", 64)):
    config, model = models.load_config(name, "big"), models.get(name)
    with tf.Graph().as_default():
        graph = mtf.Graph()
        _, features = models.placeholders(mtf.Mesh(graph, "mesh"), model.features(config, batch))
        loss = model.loss(next(iter(features.values())).mesh, features, config)
        weights = graph.trainable_variables
        gradients = mtf.gradients([loss], [weight.outputs[0] for weight in weights])
        mtf.optimize.SgdOptimizer(0.01).apply_grads(gradients, weights)
        exported = export_graph(graph, name=name)
    for devices in (4, 8, 16, 32, 64):
        priced = build_network(exported, Machine.load({machine!r}), devices)
        path = {folder!r} + f"/{{name}}-big_{{devices}}.npz"
        priced.network.save(path)
        print(f"{{name}}-big_{{devices}}", path)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    if run.returncode:
        print(f"error: no networks of the launcher's graphs: {run.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    for line in run.stdout.splitlines():
        name, _, path = line.partition(" ")
        yield name, path


def measure(method: str, path: str, limit: float) -> dict[str, Any]:
    """One solver in a process of its own; `process_seconds` is the whole of it."""
    start = time.perf_counter()
    try:
        run = subprocess.run([sys.executable, "-m", "benchmarks.solvers", method, path, f"--limit={limit}"],
                             capture_output=True, text=True, check=False, cwd=ROOT, timeout=3 * limit + 60)
    except subprocess.TimeoutExpired:
        return {"error": f"did not stop within {3 * limit + 60:.0f} s"}
    seconds = time.perf_counter() - start
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        message = run.stderr.strip().splitlines()
        return {"error": message[-1] if message else f"ended with code {run.returncode}"}
    outcome = json.loads(lines[-1])
    return {**outcome, "process_seconds": seconds - outcome.get("warm_seconds", 0.0)}


def start_seconds() -> float:
    """What a process needs before it does anything: Python, numpy and numba started, compiled code loaded."""
    times = []
    with tempfile.TemporaryDirectory(prefix="pase_mtf-empty-") as folder:
        script = pathlib.Path(folder) / "empty.py"
        script.write_text(_EMPTY)
        for _ in range(4):
            start = time.perf_counter()
            subprocess.run([sys.executable, str(script)], check=True)
            times.append(time.perf_counter() - start)
    return sorted(times[1:])[1]  # the first one compiles


def _cell(result: dict[str, Any], best: float) -> str:
    if "error" in result:
        text = result["error"].split(";")[0].split(" (")[0]
        return text if len(text) < 60 else text[:57] + "..."
    if not math.isfinite(result["cost"]):
        verdict = "nothing found"
    elif result["optimal"]:
        verdict = "proven" if result["cost"] <= best * (1 + 1e-9) else f"WRONG: {result['cost'] / best - 1:+.2%}"
    else:
        verdict = f"{result['cost'] / best - 1:+.2%}"
        if math.isfinite(result["lower_bound"]):
            verdict += f", gap {(result['cost'] - result['lower_bound']) / abs(result['cost']):.2%}"
    return f"{_seconds(result.get('warm_seconds', result['seconds']))}, {result['peak_bytes'] / 1e6:.0f} MB, {verdict}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def table(results: dict[str, dict[str, dict[str, Any]]], methods: Sequence[str]) -> str:
    """Results by network and method, as Markdown."""
    lines = ["| network | layers, edges, configurations | whole process (exact) | " + " | ".join(methods) + " |",
             "|---|---|--:|" + "---|" * len(methods)]
    for name, row in results.items():
        best = min((row[method]["cost"] for method in methods if "cost" in row.get(method, {})), default=math.nan)
        process = row.get("exact", {}).get("process_seconds")
        lines.append(f"| {name} | {row['size']['layers']}, {row['size']['edges']}, {row['size']['configurations']} | "
                     f"{_seconds(process) if process else ''} | "
                     + " | ".join(_cell(row[method], best) for method in methods) + " |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, dict[str, Any]]], methods: Sequence[str], path: pathlib.Path) -> None:
    """Time against devices, the paper's Table I beside ours; and what mcmc reaches over time."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    marks = dict(zip(methods, "os^vDP*", strict=False))
    colours = {}
    for name, row in results.items():
        graph, _, devices = name.rpartition("_")
        if not devices.isdigit():
            continue
        colour = colours.setdefault(graph, f"C{len(colours)}")
        for method in methods:
            result = row[method]
            if "error" not in result and (result["optimal"] or method == "mcmc"):
                left.plot(int(devices), result.get("warm_seconds", result["seconds"]), marks.get(method, "x"),
                          color=colour)
    for graph, times in TABLE_ONE.items():
        left.plot(list(times), list(times.values()), "--", color=colours.get(graph, "grey"), linewidth=1)
    for graph, times in TABLE_ONE_FLEXFLOW.items():
        left.plot(list(times), list(times.values()), ":", color=colours.get(graph, "grey"), linewidth=1)
    for graph, colour in colours.items():
        left.plot([], [], "-", color=colour, label=graph)
    for method in methods:
        left.plot([], [], marks.get(method, "x"), color="black", label=method)
    left.plot([], [], "--", color="black", label="paper: PaSE")
    left.plot([], [], ":", color="black", label="paper: FlexFlow")
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="seconds to the result")
    left.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    for name, row in results.items():
        history, best = row.get("mcmc", {}).get("history"), row.get("exact", {}).get("cost")
        if history and best:
            right.step([max(seconds, 1e-3) for seconds, _ in history], [cost / best for _, cost in history],
                       where="post", label=name)
    right.set(xscale="log", yscale="log", xlabel="seconds", ylabel="cost / optimum", title="mcmc over time")
    if right.get_legend_handles_labels()[1]:
        right.legend(fontsize=6)
    figure.savefig(path, dpi=130)


def vary(paths: Sequence[tuple[str, str]], count: int) -> dict[str, Any]:
    """Exact search on random variations: how many are proven, and the slowest."""
    networks = [(name, CostNetwork.load(path)) for name, path in paths]
    times, unproven = [], []
    for seed in range(count):
        name, network = networks[seed % len(networks)]
        solution = solve(variation(network, seed), certificate=False, time_limit=60)
        times.append((solution.seconds, name, seed))
        if not solution.optimal:
            unproven.append((name, seed, solution.gap))
    times.sort(reverse=True)
    return {"count": count, "proven": count - len(unproven), "unproven": unproven, "slowest": times[:5],
            "median_seconds": times[len(times) // 2][0] if times else 0.0}


def document(results: dict[str, dict[str, dict[str, Any]]], methods: Sequence[str], limit: float, started: float,
             variations: dict[str, Any]) -> str:
    """The page with the table and what it was measured on."""
    import numba
    slowest = variations["slowest"][0] if variations["slowest"] else (0.0, "none", 0)
    return f"""# Searches side by side

{table(results, methods)}

Each cell: time of the search (of the dynamic programs and `exact` with their compiled code loaded), peak memory of the
process, and whether the optimum was proven, or how far above the best known cost the result was. Every search ran in a
process of its own with a limit of {limit:.0f} s. The whole process includes starting Python and numba, which alone
takes {_seconds(started)}, and reading the file. `milp`: HiGHS with a one-hot variable per layer and edge (Alpa's
formulation).

{variations['count']} random variations (costs of links, batch and kinds of layers scaled at random): \
{variations['proven']} proven, median {_seconds(variations['median_seconds'])}, slowest {_seconds(slowest[0])} \
({slowest[1]}).

![time against devices](search.png)

{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, \
numba {numba.__version__}. Reproduce with `python -m benchmarks.search`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a result contradicts another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(SOLVERS))
    parser.add_argument("--networks", default="", help="only those whose names hold one of these words")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each")
    parser.add_argument("--variations", type=int, default=500)
    parser.add_argument("--machine", default="1080ti", help="for the launcher's own graphs")
    parser.add_argument("--output", default=str(FOLDER))
    flags = parser.parse_args(arguments)
    methods = [method for method in flags.methods.split(",") if method]
    words = [word for word in flags.networks.split(",") if word]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="pase_mtf-search-") as folder:
        paths = [(path.stem, str(path)) for path in sorted(INSTANCES.glob("*.npz"))]
        if not words or any("big" in word for word in words):  # they take a minute to make
            paths += _launcher_networks(folder, flags.machine)
        hard = os.path.join(folder, "shuffled.npz")
        shuffled(CostNetwork.load(INSTANCES / "densenet-direct_8.npz")).save(hard)
        varied = list(paths)
        paths.append(("densenet-direct_8 shuffled", hard))
        if words:
            paths = [(name, path) for name, path in paths if any(word in name for word in words)]
        started = start_seconds()
        for name, path in paths:
            network = CostNetwork.load(path)
            results[name] = {"size": {"layers": len(network.vectors), "edges": len(network.edges),
                                      "configurations": sum(network.sizes)}}
            for method in methods:
                results[name][method] = measure(method, path, flags.limit)
                print(f"{name}: {method}: {_cell(results[name][method], results[name][method].get('cost', 1.0))}",
                      flush=True)
        variations = vary(varied, flags.variations)
    os.makedirs(flags.output, exist_ok=True)
    folder = pathlib.Path(flags.output)
    text = document(results, methods, flags.limit, started, variations)
    write_atomically(folder / "search.md", text)
    write_atomically(folder / "search.json", json.dumps(
        {"start_seconds": started, "variations": variations, "results": results}, indent=1) + "\n")
    plot(results, methods, folder / "search.png")
    return int("WRONG" in text)


if __name__ == "__main__":
    sys.exit(main())
