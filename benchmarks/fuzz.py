"""Feeds every reader of files changed and random contents, and counts what comes of it.

    python -m benchmarks.fuzz [--inputs=2000] [--seed=0]    writes docs/benchmarks/fuzz.md and fuzz.json

An input is either refused with one line (PaseError), or taken; then what was read is used as well. Anything else is a
fault, which is printed with the number of its input. The tests marked slow do the same with inputs of hypothesis.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fuzz_data import DATA_TARGETS, data_targets
from benchmarks.fuzz_inputs import Target, csv_of, json_of, lines_of, npz_of
from benchmarks.launching import ROOT, commit
from benchmarks.markdown import table
from pase_mtf.calibration.cache import fingerprint_of_kernels
from pase_mtf.cost.roofline import roofline_machine
from pase_mtf.epochs.curve import EpochCurve
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.files import write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph, _hash
from pase_mtf.launch.checkpoints.checkpoint import _own_hash, find_checkpoint
from pase_mtf.launch.flag_values import parse_arms, parse_mesh
from pase_mtf.launch.run_folder import load_run_config
from pase_mtf.launch.summary import Summary, read_summary, summary_json
from pase_mtf.machine.kernel_file import append_times, load_times
from pase_mtf.machine.kernel_table import save_tables, table_for
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Timing
from pase_mtf.machine.machine import Machine
from pase_mtf.machine.references import REFERENCES
from pase_mtf.models import load_config
from pase_mtf.pipeline.find import find_pipeline
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.runtime import describe_host
from pase_mtf.search import solve
from pase_mtf.search.network import CostNetwork
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import Strategy
from pase_mtf.strategy.warm import small_graph

__all__ = ["TARGETS", "Target", "document", "main"]

_PAGE = ROOT / "docs" / "benchmarks" / "fuzz.md"


def _graph() -> ComputationGraph:
    """A graph whose file is taken as it is: one sum goes over one edge in parts (`small_graph` has more such edges than
    sums)."""
    found = small_graph()
    first, *others = found.layers
    (product,) = first.operations
    first = dataclasses.replace(first, operations=(dataclasses.replace(product, pending_outputs=(0,)),))
    edges = tuple(edge if number == 0 else dataclasses.replace(edge, pending=())
                  for number, edge in enumerate(found.edges))
    return dataclasses.replace(found, layers=(first, *others), edges=edges)


class _Workplace:
    """Originals of all kinds of file, and a folder for those that are changed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.graph = _graph()
        self.strategy = find_strategy(self.graph, devices=4, machine="h100")
        self.graph.save(folder / "graph.json")
        self.strategy.save(folder / "strategy.json")
        Machine.load("h100").save(folder / "machine.json")
        save_tables(folder / "kernels.json", [KernelTimes(
            {**fingerprint_of_kernels(devices), "processor": "none"}, {kernel: Timing(1e-4) for kernel in REFERENCES})
            for devices in (2, 4)])
        pipeline = find_pipeline({1: self.graph, 2: self.graph}, devices=4, machine="h100", stages=2)
        pipeline.save(folder / "pipeline.json")
        append_times(folder / "kernels.jsonl", {kernel: Timing(1e-4) for kernel in REFERENCES},
                     fingerprint_of_kernels(2))
        self.kernel_lines = (folder / "kernels.jsonl").read_text()
        StepTimes(8, {(1, 1): 0.5, (2, 1): 0.6, (1, 2): 0.3}, "measured").save(folder / "steps.json")
        self.data = {name: json.loads((folder / f"{name}.json").read_text())
                     for name in ("graph", "strategy", "machine", "kernels", "pipeline", "steps")}
        instance = ROOT / "tests" / "data" / "instances" / "rnnlm_8.npz"
        CostNetwork.load(instance).save(folder / "network.npz")
        self.networks = [dict(np.load(instance)), dict(np.load(folder / "network.npz"))]

    def path(self, name: str, raw: bytes) -> pathlib.Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        return path

    def read_machine(self, raw: bytes) -> None:
        machine = Machine.load(self.path("read.json", raw))
        find_strategy(self.graph, devices=4, machine=machine)

    def read_strategy(self, raw: bytes) -> None:
        strategy = Strategy.load(self.path("read.json", raw))
        strategy.table()
        Strategy.load(self.path("read.json", raw), self.graph, Machine.load("h100")).explain(0)

    def read_kernels(self, raw: bytes) -> None:
        times = table_for(self.path("read.json", raw), 2)
        KernelTimes(times.on, dict(times.items())).estimate(REFERENCES[-1]._replace(operation="Tanh"))
        roofline_machine(times, 2, float(times.on["memory"]))

    def read_kernel_lines(self, raw: bytes) -> None:
        times = load_times(self.path("read.jsonl", raw))
        times.estimate(REFERENCES[-1]._replace(operation="Tanh"))
        append_times(self.path("read.jsonl", raw), {REFERENCES[0]: Timing(1e-4)}, times.on)

    def read_pipeline(self, raw: bytes) -> None:
        pipeline = Pipeline.load(self.path("read.json", raw))
        pipeline.table()
        pipeline.save(self.folder / "again.json")

    def read_epochs(self, raw: bytes) -> None:
        curve = EpochCurve.load(self.path("read.csv", raw))
        curve.at(48, extrapolate=True)

    def step_times(self, source: random.Random) -> tuple[str, bytes]:
        if source.random() < 0.5:
            return "read.json", json_of(self.data["steps"], source)
        return "read.csv", csv_of("workers,ways,seconds\n1,1,0.5\n2,1,0.6\n1,2,0.3\n", source)

    def read_step_times(self, made: tuple[str, bytes]) -> None:
        steps = StepTimes.load(self.path(*made), None if made[0].endswith(".json") else 8)
        steps.at(2, 2)
        steps.save(self.folder / "again.json")

    def read_graph(self, raw: bytes) -> None:
        graph = ComputationGraph.load(self.path("read.json", raw))
        graph.to_dot()
        find_strategy(graph, devices=4, machine="h100")

    def read_network(self, raw: bytes) -> None:
        solve(CostNetwork.load(self.path("read.npz", raw)), time_limit=10.0)

    def manifest(self, source: random.Random) -> bytes:
        content = b"weights"
        self.path("run/checkpoint/step-5/model.data", content)
        data = {"format": "pase_mtf.checkpoint", "version": 2, "step": 5, "graph_hash": "0" * 16, "next_loss": 1.5,
                "files": {"model.data": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}}
        data["sha256"] = _own_hash(data)
        return json_of(data, source, lambda changed: changed.update(sha256=_own_hash(changed)))

    def read_manifest(self, raw: bytes) -> None:
        self.path("run/checkpoint/step-5/checkpoint.json", raw)
        find_checkpoint(str(self.folder / "run"))

    def run_config(self, source: random.Random) -> bytes:
        return json_of({"format": "pase_mtf.run", "version": 1, "options": {"model": "alexnet", "seed": 0}}, source)

    def read_run_config(self, raw: bytes) -> None:
        self.path("resumed/config.json", raw)
        load_run_config(str(self.folder / "resumed"))

    def summary(self, source: random.Random) -> bytes:
        row = {"predicted_ms": 1.5, "measured_ms": None, "measured_ms_spread": None, "examples_per_second": None,
               "speedup_over_data_parallel": None, "speedup_over_stock": None, "predicted_bytes": 2e9,
               "measured_bytes": None, "final_loss": 0.5, "measured_ms_quartiles": None, "measured_steps": 0,
               "same_as": None}
        return json_of(json.loads(summary_json(Summary(
            status="search only", model="alexnet", preset="tiny", batch=8, mesh="8", devices=8, first_step=0,
            arms={"search": row, "expert": row}, left_out={"mcmc": "why"}, disagreement=None, note=None,  # type: ignore
            search={"seconds": 0.1, "optimal": True}, nodes={"search": 9}, build_seconds={"search": 1.0},
            memory_method="how", facts={"devices": "8"}))), source)

    def read_summary(self, raw: bytes) -> None:
        summary_json(read_summary(self.path("read.json", raw)))

    def preset(self, source: random.Random) -> bytes:
        return json_of({"preset": "tiny", "vocab": 400, "layers": 2, "learning_rate": 0.5, "dropout": 0.1}, source)

    def read_preset(self, raw: bytes) -> None:
        load_config("transformer", str(self.path("read.json", raw)))


def _words(source: random.Random) -> str:
    """What somebody might write for a mesh or for arms."""
    pieces = ("8", "rows", "cols", ":", ";", ",", "2", "-1", " ", "0", "99999999999", "a:2", "random:3", "search",
              "file", "é", "=", "none", "data_parallel", "1e3", ".json", "/", "9" * 5000)
    return "".join(source.choice(pieces) for _ in range(source.randrange(1, 7)))


def targets(folder: pathlib.Path) -> list[Target]:
    """All kinds of input; what they need lies in the folder."""
    place = _Workplace(folder)

    def seal(data: dict[str, Any]) -> None:
        data["hash"] = _hash(data)
    return [
        Target("machine", lambda source: json_of(place.data["machine"], source), place.read_machine),
        Target("strategy", lambda source: json_of(place.data["strategy"], source), place.read_strategy),
        Target("kernel times", lambda source: json_of(place.data["kernels"], source), place.read_kernels),
        Target("kernel lines", lambda source: lines_of(place.kernel_lines, source), place.read_kernel_lines),
        Target("pipeline", lambda source: json_of(place.data["pipeline"], source), place.read_pipeline),
        Target("epochs", lambda source: csv_of("batch,epochs,seed,reached\n32,4.5,0,1\n64,5,0,1\n128,9,0,0\n", source),
               place.read_epochs),
        Target("step times", place.step_times, place.read_step_times),
        Target("graph", lambda source: json_of(place.data["graph"], source, seal), place.read_graph),
        Target("network", lambda source: npz_of(source.choice(place.networks), source), place.read_network),
        Target("checkpoint", place.manifest, place.read_manifest),
        Target("run configuration", place.run_config, place.read_run_config),
        Target("summary", place.summary, place.read_summary),
        Target("preset", place.preset, place.read_preset),
        *data_targets(folder),
        Target("mesh flag", _words, parse_mesh),
        Target("arms flags", lambda source: (_words(source), _words(source)), lambda words: parse_arms(*words))]


TARGETS = ("machine", "strategy", "kernel times", "kernel lines", "pipeline", "epochs", "step times", "graph",
           "network", "checkpoint", "run configuration", "summary", "preset", *DATA_TARGETS, "mesh flag", "arms flags")
"""The names of `targets`, for those who need them before there is a folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code is 1 where there are faults."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000, help="of every kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes")
    parser.add_argument("--only", choices=TARGETS, help="one kind of input; its counts are printed, the page is left")
    parser.add_argument("--output", type=pathlib.Path, default=_PAGE, help="the page; its numbers lie beside it")
    flags = parser.parse_args(arguments)
    rows, faults = [], 0
    with tempfile.TemporaryDirectory(prefix="pase_mtf-fuzz-") as name:
        for target in targets(pathlib.Path(name)):
            if flags.only not in (None, target.name):
                continue
            counts = {"refused": 0, "taken": 0, "faults": 0}
            for number in range(flags.inputs):
                try:
                    counts["refused" if target.refuses(random.Random(f"{flags.seed} {number}")) else "taken"] += 1
                except Exception as error:
                    counts["faults"] += 1
                    print(f"{target.name} {number}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            faults += counts["faults"]
            rows.append([target.name, flags.inputs, *counts.values()])
    where = f"{describe_host()}; Python {sys.version.split()[0]}, commit {commit()}"
    measured = {"where": where, "seed": flags.seed, "rows": rows}
    print(document(measured))
    if flags.only is None:
        write_atomically(flags.output.with_suffix(".json"), json.dumps(measured, indent=1) + "\n")
        write_atomically(flags.output, document(measured))
    return 1 if faults else 0


def document(measured: dict[str, Any]) -> str:
    """The page."""
    body = table(["kind of input", "inputs", "refused in one line", "taken and used", "faults"], measured["rows"])
    return (f"# Changed and random inputs\n\n{body}\n\nFiles with values changed, missing, added, damaged or nested, "
            "and flags of random words. What is taken is used: a graph is searched, a network solved. A fault is "
            f"anything but a result or one line of refusal. Seed {measured['seed']}; {measured['where']}. "
            "Reproduce with `python -m benchmarks.fuzz`.\n")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
