"""Pipelines beside strategies of the whole step: predicted for clusters of GPUs, measured on hosts with slow links.

    python -m benchmarks.pipeline                    # goes on where it was; measuring needs root
    python -m benchmarks.pipeline --parts=predicted
    python -m benchmarks.pipeline --models=gnmt --devices=4 --again

Predicted are the steps of a deep transformer and of GNMT of the paper's size, simulated: data parallelism, the expert
(for GNMT the pipeline of recurrent layers that there is without stages, in waves of time steps), the best strategy that
the search finds, and pipelines in both orders. Measured are smaller ones by the launcher, a device per host.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import namespaces
from benchmarks.cluster import Cluster, link_of
from benchmarks.commands import kept_when_interrupted, told_in_one_line, whole_numbers
from benchmarks.launching import ROOT, commit
from benchmarks.markdown import table
from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import InfeasibleError, UsageError, nearest
from pase_mtf.export.exporter import export_graph
from pase_mtf.files import write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.pipelined import build_pipelined
from pase_mtf.launch.arms.program import build_program, variables_by_name
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.find import find_pipeline
from pase_mtf.pipeline.pipeline import distance_text
from pase_mtf.pipeline.schedule import SCHEDULES
from pase_mtf.runtime import describe_host
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.simulated import MOST_DEVICES, is_simulated

__all__ = ["document", "main", "predict"]

FOLDER = ROOT / "docs" / "benchmarks"
PREDICTED: dict[str, tuple[str, str, dict[str, int]]] = {
    "gnmt": ("gnmt", "big", {}),
    "gnmt, few words": ("gnmt", "big", {"batch": 32}),
    "transformer, few words": ("transformer", "large", {"layers": 12, "length": 128, "batch": 32}),
    "transformer": ("transformer", "large", {"layers": 12})}
"""Case -> model, the preset whose sizes it has, and those that are other ones."""
MEASURED: dict[str, tuple[str, str, dict[str, int]]] = {
    "transformer": ("transformer", "tiny", {"layers": 4}), "gnmt": ("gnmt", "tiny", {})}
_MACHINES = ("1080ti", "2080ti")
_COUNTS = (4, 8, 16, 32)
_BY_METHOD = ("data_parallel", "expert", "exact")
_ARMS = ("data_parallel", "expert", "pipeline")
_OPEN = 1.25e9
_PARTS = ("predicted", "measured")
_CLIENTS = ("one", "ranks")
_MEASURED_FIRST = {"schedule": "1f1b", "clients": "one"}
"""Which of the ways to train a pipeline are measured where nobody asks for others."""


def _sizes(case: tuple[str, str, dict[str, int]], folder: str) -> str:
    """The file of a case's sizes."""
    model, preset, changes = case
    known = {name: value for name, value in dataclasses.asdict(models.load_config(model, preset)).items()
             if name not in ("seed", "dtype")}
    path = os.path.join(folder, f"{model}.json")
    write_atomically(path, json.dumps({**known, **changes, "preset": preset}))
    return path


def _graphs(model: str, config: Any) -> tuple[ComputationGraph, dict[int, ComputationGraph]]:
    """The graph of the whole step, and of a microbatch by how many there are."""
    built = models.get(model), config
    rest = config.optimizer, config.learning_rate, 0

    def exported(make: Any, *, turns: bool = False) -> ComputationGraph:
        with tf.Graph().as_default(), variables_by_name():
            return export_graph(make().graph, name=model, turns=turns)

    return exported(lambda: build_program(*built, config.batch, *rest)), {
        count: exported(lambda count=count: build_pipelined(*built, config.batch // count, *rest, 1), turns=True)
        for count in _COUNTS if config.batch % count == 0}


def _strategy(graph: ComputationGraph, devices: int, machine: Machine, method: str) -> dict[str, Any]:
    limit = machine.memory_bytes if method == "exact" else None
    strategy = find_strategy(graph, devices, machine, method, memory_limit=limit)
    return {"seconds": strategy.simulated_seconds, "bytes": strategy.memory_bytes}


def _pipeline(microbatches: dict[int, ComputationGraph], devices: int, machine: Machine, schedule: str,
              ) -> dict[str, Any]:
    found = find_pipeline(microbatches, devices, machine, schedule=schedule, memory_limit=machine.memory_bytes)
    return {"seconds": found.seconds, "bytes": found.memory_bytes, "microbatches": found.microbatches,
            "devices": [stage.devices for stage in found.stages],
            "idle": 1.0 - sum((1.0 - stage.idle) * stage.devices for stage in found.stages) / devices,
            "search": {name: value for name, value in found.search.items() if name != "seconds"}}


def predict(graph: ComputationGraph, microbatches: dict[int, ComputationGraph], devices: int, machine: Machine,
            ) -> dict[str, Any]:
    """Simulated steps of one model on one machine.

    Args:
      graph: of the whole step.
      microbatches: number of microbatches -> the graph of one.
      devices: p.
      machine: with devices of their own.

    Returns:
      Arm -> "seconds" of a simulated step, "bytes" on the fullest device, "search_seconds" of the processor, and of
      pipelines what they are; None where none keeps to the memory of a device.
    """
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        **{method: functools.partial(_strategy, graph, devices, machine, method) for method in _BY_METHOD},
        **{schedule: functools.partial(_pipeline, microbatches, devices, machine, schedule) for schedule in SCHEDULES}}
    found: dict[str, Any] = {}
    for name, make in makers.items():
        begin = time.process_time()
        try:
            found[name] = make()
        except InfeasibleError:
            found[name] = None
        else:
            found[name]["search_seconds"] = time.process_time() - begin
    return found


class _Results:
    """pipeline.json, written after every row."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.rows: dict[str, list[dict[str, Any]]] = {part: [] for part in _PARTS}
        if path.exists():
            self.rows |= json.loads(path.read_text(encoding="utf-8"))

    def has(self, part: str, key: dict[str, Any]) -> bool:
        return any(key.items() <= row.items() for row in self.rows[part])

    def add(self, part: str, key: dict[str, Any], row: dict[str, Any]) -> None:
        kept = [other for other in self.rows[part] if not key.items() <= other.items()]
        facts = {"processor": describe_host(), "commit": commit() or "unknown"}
        self.rows[part] = sorted([*kept, {**key, **row, "facts": facts}],
                                 key=lambda row: tuple(row[name] for name in key))
        write_atomically(str(self._path), json.dumps(self.rows, indent=1) + "\n")
        write_atomically(str(self._path.with_suffix(".md")), document(self.rows))


def _keys(flags: argparse.Namespace, results: _Results, part: str) -> Iterator[dict[str, Any]]:
    cases = [case for case, (model, *_) in (PREDICTED if part == "predicted" else MEASURED).items()
             if model in flags.models.split(",")]
    named: dict[str, Sequence[Any]] = {"model": cases, "machine": flags.machines.split(","),
                                       "devices": [int(word) for word in flags.devices.split(",")]}
    if part == "measured":
        named |= {"schedule": flags.schedules.split(","), "clients": flags.clients.split(",")}
    for values in itertools.product(*named.values()):
        key = dict(zip(named, values, strict=True))
        if flags.again or not results.has(part, key):
            yield key


def _predict_all(flags: argparse.Namespace, results: _Results, folder: str) -> None:
    graphs: dict[str, Any] = {}
    for key in _keys(flags, results, "predicted"):
        case = key["model"]
        if case not in graphs:
            model = PREDICTED[case][0]
            config = models.load_config(model, _sizes(PREDICTED[case], folder))
            graphs[case] = *_graphs(model, config), config.batch
        graph, microbatches, batch = graphs[case]
        found = predict(graph, microbatches, key["devices"], Machine.load(key["machine"]))
        results.add("predicted", key, {"batch": batch, "parameters": graph.parameters, "layers": len(graph.layers),
                                       "arms": found})
        print(_line(key, {name: arm and 1e3 * arm["seconds"] for name, arm in found.items()}), flush=True)


def _measure_all(flags: argparse.Namespace, results: _Results, folder: str) -> None:
    """Trains on hosts whose links are held, as `benchmarks.cluster` does.

    Raises:
      RuntimeError: a run failed.
    """
    keys = list(_keys(flags, results, "measured"))
    for devices in dict.fromkeys(key["devices"] for key in keys):
        with namespaces.hosts(devices) as hosts, tempfile.TemporaryDirectory(prefix="pase_mtf-pipeline-") as runs:
            cluster = Cluster(hosts, runs)
            cluster.limit("open", _OPEN)
            cluster.launch(["--model=alexnet", "--steps=1", "--warmup=1", "--strategy=data_parallel", "--compare=none"])
            flops = cluster.machine().rates["matmul"]
            for key in (key for key in keys if key["devices"] == devices):
                link = link_of(key["machine"], devices, flops)
                cluster.limit(key["machine"], link.rate)
                before = os.getloadavg()[0]
                preset = _sizes(MEASURED[key["model"]], folder)
                summary = cluster.launch([
                    f"--model={MEASURED[key['model']][0]}", f"--preset={preset}", f"--steps={flags.steps}",
                    "--warmup=1", f"--compare={','.join(_ARMS)}", f"--schedule={key['schedule']}",
                    f"--clients={key['clients']}"])
                for name in ("output", "model"):  # they name folders that are gone
                    summary["facts"].pop(name, None)
                summary.pop("preset", None)
                results.add("measured", key, {"rate": link.rate, "load": [before, os.getloadavg()[0]],
                                              "summary": summary})
                print(_line(key, {name: row["measured_ms"] for name, row in summary["arms"].items()}), flush=True)


def _line(key: dict[str, Any], milliseconds: dict[str, float | None]) -> str:
    rest = "".join(f", {key[name]}" for name in _MEASURED_FIRST if name in key)
    return f"{key['model']} on {key['devices']} of {key['machine']}{rest}: " + ", ".join(
        f"{name} {value:,.1f} ms" for name, value in milliseconds.items() if value)


# -- the page ---------------------------------------------------------------------------------------------------------
_HEAD = """# Pipelines

A [pipeline](../pipelines.md) beside the strategies that give all devices to every layer. *Expert*: what people write by
hand; of GNMT the pipeline that there is without stages, in which devices have layers of the recurrent stack, and time
steps go through them in waves ([recurrent.md](../recurrent.md)). *Searched*: the best strategy without stages: of those
of least cost the one whose simulated step is shortest."""


def document(results: dict[str, Any]) -> str:
    """The page.

    Args:
      results: of pipeline.json.
    """
    parts = [_HEAD, *_predicted(results["predicted"]), *(_measured(results["measured"]) if results["measured"] else []),
             "Reproduce with `python -m benchmarks.pipeline` (Linux, root, iproute2; with `--parts=predicted` without "
             "them)."]
    return "\n\n".join(parts) + "\n"


def _predicted(rows: Sequence[dict[str, Any]]) -> list[str]:
    sizes = "; ".join(dict.fromkeys(
        f"{row['model']}: preset {_text(PREDICTED[row['model']])}, {row['parameters'] / 1e6:.0f} M parameters, batch "
        f"{row['batch']}, {row['layers']} layers in the graph" for row in rows))
    lines = []
    for row in rows:
        arms = row["arms"]
        piped = [arms[schedule] for schedule in SCHEDULES if arms[schedule]]
        best = min(piped, key=lambda arm: arm["seconds"], default=None)
        lines.append([
            row["model"], row["machine"], str(row["devices"]),
            *(_simulated(arms[name]) for name in (*_BY_METHOD, *SCHEDULES)),
            f"{arms['exact']['seconds'] / best['seconds']:.2f}×" if best and arms["exact"] else "-",
            f"{best['microbatches']} through {' + '.join(map(str, best['devices']))}" if best else "-",
            f"{100 * best['idle']:.0f} %" if best else "-",
            " / ".join(f"{arms[name]['search_seconds']:.0f}" if arms[name] else "-" for name in ("exact", "1f1b"))])
    searched = "; ".join(
        f"{_case(row)} {found['pairs']:,} stages on groups, "
        f"{found['searched']:,} exact searches, {'all' if found['optimal'] else 'not all'} proven optimal, "
        f"{found['simulated']} pipelines simulated{distance_text(found)}" for row in rows if row["arms"]["1f1b"]
        for found in [row["arms"]["1f1b"]["search"]])
    unproven = ", ".join(_case(row) for row in rows if row["arms"]["gpipe"]
                         and not row["arms"]["gpipe"]["search"]["optimal"])
    counts = next((row["arms"]["1f1b"]["search"]["microbatches"] for row in rows if row["arms"]["1f1b"]), [])
    return ["## Predicted", f"Milliseconds of a simulated step, and GB on the fullest device. {sizes[:1].upper()}"
            f"{sizes[1:]}. What is searched keeps to the memory of a device; data parallelism and the expert may not. "
            "*Over searched*: how many times as fast the better pipeline is as the best strategy without stages. "
            "*Microbatches*: how many, through stages of so many devices. *Idle*: of the time of all devices.",
            table(["case", "machine", "devices", "data parallel", "expert", "searched", *SCHEDULES, "over searched",
                   "microbatches", "idle", "search s: searched / 1f1b"], lines, left=(0, 1)),
            f"What was searched for 1F1B ({', '.join(map(str, counts))} microbatches, every number of stages): "
            f"{searched}. For GPipe all searches are proven optimal{' but for ' * bool(unproven)}{unproven}. "
            f"Searched on {' / '.join(sorted({row['facts']['processor'] for row in rows}))}, at commit "
            f"{', '.join(sorted({row['facts']['commit'] for row in rows}))}."]


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']} on {row['devices']} of {row['machine']}"


def _simulated(arm: dict[str, Any] | None) -> str:
    return f"{1e3 * arm['seconds']:,.1f} ({arm['bytes'] / 1e9:.1f} GB)" if arm else "none fits"


def _measured(rows: Sequence[dict[str, Any]]) -> list[str]:
    sizes = "; ".join(f"{case}: preset {_text(MEASURED[case])}" for case in dict.fromkeys(row["model"] for row in rows))
    lines = []
    for row in rows:
        arms = row["summary"]["arms"]
        pipeline = arms.get("pipeline")
        best = arms["search"]["measured_ms"]
        lines.append([
            row["model"], row["machine"], str(row["devices"]), row["schedule"], row["clients"],
            f"{row['rate'] / 1e6:.2f}",
            *(_milliseconds(arms, name) for name in ("data_parallel", "expert", "search", "pipeline")),
            f"{best / pipeline['measured_ms']:.2f}×" if pipeline else "-",
            f"{pipeline['microbatches']} through {pipeline['stages']}" if pipeline else
            row["summary"]["left_out"].get("pipeline", "-"),
            *(f"{_predicted_ms(arms[name]):,.0f}" if name in arms else "-" for name in ("search", "pipeline")),
            "differ" if row["summary"]["disagreement"] else "equal", row["facts"]["commit"]])
    processors = ", ".join(dict.fromkeys(row["facts"]["processor"] for row in rows))
    return ["## Measured over slow links", "Hosts of one computer, a device each, whose links are held to the rate at "
            "which a worker has as many FLOP a byte as a GPU of the cluster, as in [cluster.md](cluster.md). "
            f"*Clients*: one of all, or a graph per rank. {sizes[:1].upper()}{sizes[1:]}. Milliseconds of a "
            "step, median ± half the distance of the "
            f"quartiles, of {max(row['summary']['arms']['search']['measured_steps'] for row in rows)} steps at most. "
            f"All hosts of a row share the cores of one computer ({processors}; load over a "
            f"minute {min(min(row['load']) for row in rows):.1f} to {max(max(row['load']) for row in rows):.1f}, of "
            "which the workers are a part).",
            table(["case", "cluster", "hosts", "order", "clients", "MB/s of a link", "data parallel", "expert",
                   "searched", "pipeline", "over searched", "microbatches, stages", "predicted: searched",
                   "predicted: pipeline", "losses", "commit"],
                  lines, left=(0, 1, 3, 4))]


def _predicted_ms(row: dict[str, Any]) -> float:
    """Of a pipeline only the simulated step is known: that of others stands beside it, where there is one."""
    return float(row.get("simulated_ms") or row["predicted_ms"])


def _milliseconds(arms: dict[str, Any], name: str) -> str:
    row = arms.get(name)
    if row is None or row["measured_ms"] is None:
        return "-"
    same = f" (= {row['same_as']})" if row["same_as"] else ""
    return f"{row['measured_ms']:,.0f} ± {row['measured_ms_spread']:.0f}{same}"


def _text(case: tuple[str, str, dict[str, int]]) -> str:
    _, preset, changes = case
    return preset + (" with " if changes else "") + ", ".join(f"{value} {name}" for name, value in changes.items())


@told_in_one_line(RuntimeError, ValueError)
@kept_when_interrupted
def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts and measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MEASURED), help="names separated by commas")
    parser.add_argument("--machines", default=",".join(_MACHINES), help="whose GPUs and links")
    parser.add_argument("--devices", default="4,8", help="numbers of devices")
    parser.add_argument("--parts", default=",".join(_PARTS), help="predicted (by simulation), measured (on hosts with "
                        "slow links)")
    parser.add_argument("--schedules", default=_MEASURED_FIRST["schedule"], help="orders of microbatches that are "
                        f"measured, of {', '.join(SCHEDULES)} (default: %(default)s)")
    parser.add_argument("--clients", default=_MEASURED_FIRST["clients"], help="that are measured, of "
                        f"{', '.join(_CLIENTS)} (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="measured of every arm")
    parser.add_argument("--again", action="store_true", help="rows that are there already, too")
    parser.add_argument("--output", default=str(FOLDER))
    flags = parser.parse_args(arguments)
    for name, known in (("models", tuple(MEASURED)), ("parts", _PARTS), ("schedules", SCHEDULES),
                        ("clients", _CLIENTS)):
        if wrong := next((one for one in getattr(flags, name).split(",") if one not in known), None):
            raise UsageError(f"--{name}={wrong}: unknown; {nearest(wrong, known)}")
    for machine in flags.machines.split(","):
        for devices in whole_numbers("devices", flags.devices):
            Machine.load(machine).check_devices(devices)
            if "predicted" in flags.parts.split(",") and not is_simulated(Machine.load(machine), devices):
                raise UsageError(f"--devices={devices}: steps are simulated of 2 to {MOST_DEVICES} devices with cores "
                                 "of their own; name such, or --parts=measured")
    os.makedirs(flags.output, exist_ok=True)
    results = _Results(pathlib.Path(flags.output) / "pipeline.json")
    with tempfile.TemporaryDirectory(prefix="pase_mtf-pipeline-") as folder:
        if "predicted" in flags.parts.split(","):
            _predict_all(flags, results, folder)
        if "measured" in flags.parts.split(","):
            if why := namespaces.missing():
                print(f"nothing is measured: {why}", file=sys.stderr)
            else:
                _measure_all(flags, results, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
