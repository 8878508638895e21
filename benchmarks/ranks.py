"""Nodes of a graph per rank, beside those of the one graph of all devices, as the number of devices grows.

    python -m benchmarks.ranks

Graphs are built and counted; nothing is trained. Writes docs/benchmarks/ranks.json and ranks.md.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line, whole_numbers
from benchmarks.facts import facts_text, of_rows
from benchmarks.model_rows import ModelRows, flag_parser
from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.arms.program import build_program
from pase_mtf.lowering import collectives
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations
from pase_mtf.lowering.ranks import Rank
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import Devices
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.find import find_strategy

__all__ = ["DEVICES", "document", "main", "measure"]

DEVICES = (2, 4, 8)
_PRESET = "tiny"
ARMS = ("data_parallel", "search")


def measure(model: str, devices: int, machine: Machine) -> dict[str, Any]:
    """Lowers a model for all devices in one graph, and for one device per rank in the graphs of the first and the last.

    Returns:
      Arm -> nodes of the one graph, the most of a rank, the transfers of all ranks, and seconds of processor time of
      either lowering.
    """
    found: dict[str, Any] = {}
    alone = list(Devices.first(devices, "cpu").names)
    names = list(Devices.over_tasks(devices, "cpu", tuple(f"host{rank}:1" for rank in range(devices))).names)
    for arm in ARMS:
        one = _lower(model, arm, alone, machine, None)
        ranks = [_lower(model, arm, names, machine, rank) for rank in sorted({0, devices - 1})]
        found[arm] = {"one": one["nodes"], "rank": max(rank["nodes"] for rank in ranks),
                      "transfers": ranks[0]["transfers"], "one_seconds": one["seconds"],
                      "rank_seconds": max(rank["seconds"] for rank in ranks)}
    return found


def _lower(model: str, arm: str, devices: Sequence[str], machine: Machine, rank: int | None) -> dict[str, float]:
    config = models.load_config(model, _PRESET)
    collectives._KEYS = itertools.count(1)  # a rank is a process of its own
    with tf.Graph().as_default() as tf_graph:
        program = build_program(models.get(model), config, config.batch, config.optimizer, config.learning_rate, 0)
        graph = export_graph(program.graph)
        configurations: Sequence[Configuration] = (
            data_parallel(graph, len(devices)) if arm == "data_parallel"
            else find_strategy(graph, len(devices), machine).configurations)
        plan = plan_from_configurations(program.graph, graph, configurations, len(devices))
        before, start = len(tf_graph.get_operations()), time.process_time()
        lowering = PlanLowering(program.graph, plan, devices, program.global_step.read_value(),
                                rank=None if rank is None else Rank.of(devices, rank))
        lowering.export_to_tf_tensor(program.loss)
        for operation in program.updates:
            lowering.lowered_operation(operation)
        return {"nodes": len(tf_graph.get_operations()) - before, "seconds": time.process_time() - start,
                "transfers": lowering.emitter.ledger.transfers if rank is not None else 0}


def document(results: Mapping[str, Any]) -> str:
    """The page of the results; a number of devices that a model was not lowered for has empty cells."""
    rows = results["rows"]
    devices = sorted({row["devices"] for row in rows})
    head = ["model", "strategy", *(f"one graph, p = {p}" for p in devices), *(f"a rank, p = {p}" for p in devices),
            f"transfers, p = {devices[-1]}", "lowering, one graph", "a rank"]
    by_key = {(row["model"], row["devices"]): row for row in rows}

    def cell(model: str, arm: str, number: int, what: str, form: str = "{:,}") -> str:
        return form.format(by_key[model, number][arm][what]) if (model, number) in by_key else ""
    table = [[model, arm, *(cell(model, arm, p, what) for what in ("one", "rank") for p in devices),
              cell(model, arm, devices[-1], "transfers"),
              *(cell(model, arm, devices[-1], what, "{:.1f} s") for what in ("one_seconds", "rank_seconds"))]
             for model, arm in itertools.product(sorted({row["model"] for row in rows}), ARMS)]
    return "\n".join([
        "# Nodes of a graph per rank", "", markdown.table(head, table, left=(0, 1)), "",
        f"TensorFlow nodes that a lowering makes (preset {_PRESET}, forward, backward and update): of one graph for p "
        "devices, and of the graph of a rank, of the first or the last, whichever has more, where every rank has one "
        "device. `search` is the best strategy on machine "
        f"{results['machine']}, another one for every p. Transfers are those of all ranks. Lowering: seconds of "
        f"processor time at p = {devices[-1]}; every rank takes its own. "
        f"{facts_text(of_rows(results['rows'], results.get('facts')))}. Reproduce with `python -m benchmarks.ranks`.",
        ""])


@told_in_one_line(OSError, ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the graphs of every model and number of devices."""
    flags = flag_parser(__doc__.splitlines()[0], DEVICES, "2080ti").parse_args(arguments)
    machine = Machine.load(flags.machine)
    results = ModelRows(pathlib.Path(flags.output) / "ranks", machine.name, document)
    numbers = whole_numbers("devices", flags.devices)
    for model, number in tqdm([(model, number) for model in flags.models.split(",") for number in numbers],
                              file=sys.stderr):
        results.rows[model, number] = {"model": model, "devices": number, **measure(model, number, machine)}
        results.write()  # what was measured stays where the next one is interrupted
    return 0


if __name__ == "__main__":
    sys.exit(main())
