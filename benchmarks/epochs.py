"""Time to a trained model: epochs by global batch, measured, and what they come to beside Pal et al.'s projections.

    python -m benchmarks.epochs                        # everything; measuring takes most of an hour on one core
    python -m benchmarks.epochs --sections=measure     # the curves; interrupted, the same command goes on
    python -m benchmarks.epochs --sections=project     # the projections, minutes; then the page

The curves are CSV files beside the page, docs/benchmarks/epochs.md, as `python -m pase_mtf.epochs measure` writes them;
the step times stand in epochs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.commands import told_in_one_line
from benchmarks.epochs_document import CURVES, MIXES, curves_of, document, is_earlier, settings_of
from benchmarks.epochs_plot import draw_page
from benchmarks.facts import facts
from benchmarks.launching import prepare_data
from benchmarks.paper_numbers import PAL
from benchmarks.search import FOLDER
from benchmarks.search_networks import ROOT
from pase_mtf.compat import tf
from pase_mtf.epochs.predict import predict_steps
from pase_mtf.errors import UsageError, nearest
from pase_mtf.files import read_json, write_atomically
from pase_mtf.launch.epochs.command import main as epochs_command
from pase_mtf.launch.epochs.project_command import graph_exporter
from pase_mtf.machine.machine import Machine
from pase_mtf.models.presets import load_config
from pase_mtf.strategy.find import find_strategy

__all__ = ["FORMAT", "VERSION", "load", "main"]

FORMAT = "pase_mtf.epochs_benchmark"
VERSION = 2
_BATCHES = "16,32,64,128,256,512,1024"
_SEEDS = "0,1,2"
# The sizes stand in files beside this one: the tiny presets narrowed, so that an hour of one core is enough.
_MEASURED = {
    "alexnet": ["--target=0.6", "--learning_rate=0.02"],
    "transformer": ["--target=3.2", "--learning_rate=0.001", "--examples=6144", "--warmup=0.25"],
    "biglstm": ["--target=4.8", "--learning_rate=0.5"]}
_MACHINES = ("h100", "a100")
_PRESET = "big"
_SECTIONS = ("measure", "project")


def load(path: pathlib.Path) -> dict[str, Any]:
    """What was measured and predicted (`document` tells its parts); nothing where there is no file yet.

    Raises:
      FormatError: the file is something else.
    """
    return read_json(path, FORMAT, VERSION) if path.exists() else {
        "format": FORMAT, "version": VERSION, "facts": facts(), "steps": []}


def _measure(output: pathlib.Path) -> int:
    """Measures the curves, each run once, but for those that were begun with examples in another order: these stay as
    they are. Returns the exit code."""
    work = pathlib.Path("build") / "epochs"  # relative: the path stands in the file
    work.mkdir(parents=True, exist_ok=True)
    for model, flags in _MEASURED.items():
        path = output / f"epochs-{model}.csv"
        if path.exists() and is_earlier(settings_of(path)):
            print(f"note: {path}: measured with examples in an earlier order, so that nothing is added to it; move it "
                  "away, and all of its runs are measured again", file=sys.stderr)
            continue
        given, _ = prepare_data(model, str(work))
        code = epochs_command([
            "measure", f"--model={model}", f"--preset=benchmarks/epochs_{model}.json", *given, *flags,
            "--rate_batch=16", "--cap=40", f"--batches={_BATCHES}", f"--seeds={_SEEDS}",
            f"--output={path}"])
        if code:
            return code
    return 0


def _project(results: dict[str, Any], names: Sequence[str]) -> None:
    """Predicts the step times of every model on every machine."""
    kept = [row for row in results["steps"] if row["model"] not in names]
    with tqdm(total=len(names) * len(_MACHINES), desc="pricing", file=sys.stderr, disable=None) as bar:
        for name in names:
            graph_of, batch = graph_exporter(name, _PRESET), load_config(name, _PRESET).batch
            for machine in _MACHINES:
                bar.set_postfix_str(f"{name} on {machine}")
                sheet = Machine.load(machine)
                steps = predict_steps(graph_of, batch, MIXES, sheet)
                alone = find_strategy(graph_of(batch), 1, sheet, simulate=0)
                kept.append({"model": name, "machine": machine, "worker_batch": batch,
                             "fits": alone.memory_bytes <= sheet.memory_bytes,
                             "seconds": [[workers, ways, seconds]
                                         for (workers, ways), seconds in sorted(steps.seconds.items())]})
                bar.update()
    results["steps"] = kept


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, predicts and writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(_SECTIONS), help="of these (default: %(default)s)")
    parser.add_argument("--models", default=",".join(PAL), help="whose steps are predicted (default: %(default)s)")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results (default: %(default)s)")
    flags = parser.parse_args(arguments)
    output, sections = pathlib.Path(flags.output).absolute(), flags.sections.split(",")
    if unknown := set(sections) - {*_SECTIONS, ""}:
        parser.error(f"unknown section {sorted(unknown)[0]!r}; choose from {', '.join(_SECTIONS)}")
    for name in flags.models.split(","):
        if name not in PAL:  # there is no curve that stands for it, and nothing to hold it against
            raise UsageError(f"--models={flags.models}: no projection of {name!r} is known; {nearest(name, PAL)}")
    os.chdir(ROOT)
    path = output / "epochs.json"
    results = load(path)
    if "measure" in sections and (code := _measure(output)):
        return code
    here = facts()
    here["versions"] += f", TensorFlow {tf.__version__}"
    # Before anything is priced: without a curve there is no page.
    results["curves"] = curves_of({name: output / f"epochs-{name}.csv" for name in CURVES}, results.get("curves", {}),
                                  here)
    if "project" in sections:
        for row in results["steps"]:  # those that stay were predicted where the file says so far
            row.setdefault("facts", results["facts"])
        _project(results, list(dict.fromkeys(flags.models.split(","))))
        results["facts"] = here
    write_atomically(path, json.dumps(results, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), document(results))
    draw_page(results, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
