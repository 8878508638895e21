"""Training with activations in bfloat16 beside float32: losses of two hundred steps, predicted memory and time.

    python -m benchmarks.bfloat16

The presets `tiny` are trained on one device by the launcher, on the same batches from the same values. Memory and time
are predicted, of the presets `big` on eight devices of a machine that multiplies bfloat16 faster. Writes
docs/benchmarks/bfloat16.json and bfloat16.md.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line, whole_numbers
from benchmarks.facts import facts_text, of_rows
from benchmarks.launching import prepare_data, run_launcher
from benchmarks.model_rows import ModelRows, flag_parser
from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.program import build_program
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy

__all__ = ["DTYPES", "document", "main", "measure", "predict"]

DTYPES = ("float32", "bfloat16")
STEPS = 200
_LAST = 20
_DEVICES = (8,)


def measure(model: str, folder: str) -> dict[str, Any]:
    """Trains the tiny preset in both types, on one device.

    Args:
      model: of the registry.
      folder: for text that is collected.

    Returns:
      "data"; "losses": type -> mean of the first steps, mean of the last; "apart": the largest difference between the
      two types of means over that many steps, relative to the first loss.
    """
    data, described = prepare_data(model, folder)
    courses = {}
    for dtype in DTYPES:
        summary = run_launcher([
            f"--model={model}", "--preset=tiny", "--mesh=1", "--devices=cpu", "--machine=h100", f"--dtype={dtype}",
            f"--steps={STEPS - 1}", "--warmup=1", "--strategy=data_parallel", "--compare=none", *data])
        losses = next(iter(summary["losses"].values()))
        courses[dtype] = [statistics.fmean(losses[start:start + _LAST]) for start in range(0, len(losses), _LAST)]
    wide, narrow = (courses[dtype] for dtype in DTYPES)
    return {"data": described, "losses": {dtype: (course[0], course[-1]) for dtype, course in courses.items()},
            "apart": max(abs(one - other) for one, other in zip(wide, narrow, strict=True)) / wide[0]}


def predict(model: str, devices: int, machine: Machine) -> dict[str, Any]:
    """What the best strategies of the big preset need.

    Returns:
      Type -> "seconds" a step and "bytes" per device.
    """
    found = {}
    for dtype in DTYPES:
        config = models.load_config(model, "big", dtype=dtype)
        with tf.Graph().as_default():
            program = build_program(models.get(model), config, config.batch, config.optimizer, config.learning_rate, 0)
            graph = export_graph(program.graph)
        strategy = find_strategy(graph, devices, machine, memory_limit=None)
        found[dtype] = {"seconds": strategy.seconds, "bytes": strategy.memory_bytes}
    return found


def document(results: Mapping[str, Any]) -> str:
    """The page of the results."""
    table = []
    for row in results["rows"]:
        losses, predicted = row["measured"]["losses"], row["predicted"]
        seconds, sizes = ([predicted[dtype][key] for dtype in DTYPES] for key in ("seconds", "bytes"))
        table.append([
            row["model"], row["measured"]["data"], *(f"{value:.3f}" for dtype in DTYPES for value in losses[dtype]),
            f"{100 * row['measured']['apart']:.1f} %", *(f"{size / 1e9:.2f} GB" for size in sizes),
            *(f"{1e3 * value:.2f} ms" for value in seconds), f"{seconds[0] / seconds[1]:.2f}×"])
    devices = " or ".join(map(str, sorted({row["devices"] for row in results["rows"]})))
    head = ["model", "data", f"float32: steps 1 to {_LAST}", f"the last {_LAST}", f"bfloat16: steps 1 to {_LAST}",
            f"the last {_LAST}", "most apart", "memory, float32", "bfloat16", "step, float32", "bfloat16", "faster"]
    return "\n".join([
        "# Activations in bfloat16", "", markdown.table(head, table, left=(0, 1)), "",
        f"Losses: preset `tiny`, {STEPS} steps on one device from the same values on the same batches; means over "
        f"{_LAST} steps, and the most that two such means of the two types are apart, of the first. With "
        "`--dtype=bfloat16` activations and their gradients have eight bits of precision; variables, the optimizer's "
        "slots and the "
        f"loss are float32. Memory per device and step: preset `big`, predicted, of the best strategy on {devices} "
        f"devices of machine {results['machine']}. {facts_text(of_rows(results['rows'], results.get('facts')))}. "
        "Reproduce with `python -m benchmarks.bfloat16`.", ""])


@told_in_one_line(RuntimeError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and predicts every model."""
    flags = flag_parser(__doc__.splitlines()[0], _DEVICES, "h100").parse_args(arguments)
    machine = Machine.load(flags.machine)
    results = ModelRows(pathlib.Path(flags.output) / "bfloat16", machine.name, document)
    with tempfile.TemporaryDirectory(prefix="pase_mtf-benchmark-") as folder:
        for model in tqdm(flags.models.split(","), unit="model"):
            for devices in whole_numbers("devices", flags.devices):
                results.rows[model, devices] = {
                    "model": model, "devices": devices, "predicted": predict(model, devices, machine),
                    "measured": measure(model, folder)}
            results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
