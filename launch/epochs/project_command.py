"""`python -m pase_mtf.epochs project`: what its flags ask for, and where the answer goes."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable

from tqdm import tqdm

from pase_mtf import models
from pase_mtf.calibration.load import load_machine
from pase_mtf.epochs.curve import EpochCurve
from pase_mtf.epochs.projection import Projection, project_training
from pase_mtf.epochs.report import projection_text
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import UsageError, nearest
from pase_mtf.files import check_outputs, write_atomically
from pase_mtf.flag_text import check_not_empty
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.run_folder import files_of_run
from pase_mtf.models.presets import load_config

__all__ = ["graph_exporter", "picture_of", "run"]

FORMAT = "pase_mtf.projection"
VERSION = 1
_PICTURES = ("pdf", "png", "svg")


def run(flags: argparse.Namespace, interrupts: Interrupts) -> int:
    """Projects what is asked for, prints it and writes the files; returns the exit code.

    Args:
      flags: of the command.
      interrupts: end it at once: nothing is written before all is known.

    Raises:
      PaseError: what a user can cause.
    """
    check_not_empty("--steps", flags.steps, "name a file")
    check_not_empty("--model", flags.model, "name one")
    check_not_empty("--machine", flags.machine, "name one or a file")
    for folder in flags.run:
        check_not_empty("--run", folder, "name a folder")
    check_outputs({f"--{name}": getattr(flags, name) for name in ("json", "plot", "save_steps")},
                  [*((f"--{name}", getattr(flags, name)) for name in ("curve", "steps", "preset", "machine")),
                   *(("--run", file) for folder in flags.run for file in files_of_run(folder))],
                  may_replace=lambda path: flags.overwrite, otherwise=", or add --overwrite")
    if flags.plot is not None:
        _check_picture(flags.plot)
    curve = EpochCurve.load(flags.curve)
    if flags.batch_scale != 1.0:
        curve = curve.scaled(flags.batch_scale)
    if flags.extrapolate and len(curve.batches) < 2:
        raise UsageError(f"--extrapolate: {flags.curve} has runs of one batch, and a slope takes two; measure another, "
                         "or leave it out")
    projection = project_training(curve, _steps(flags), flags.devices, flags.ways, extrapolate=flags.extrapolate)
    try:
        if flags.save_steps is not None:
            projection.steps.save(flags.save_steps)
        if flags.json is not None:
            write_atomically(flags.json, json.dumps(
                {"format": FORMAT, "version": VERSION, **projection.to_json(flags.examples)}, indent=1) + "\n")
        if flags.plot is not None:
            write_atomically(flags.plot, picture_of(projection, flags.plot))
    finally:  # what was found is there though it cannot be written
        print(projection_text(projection, flags.examples))
    return 0


def _check_picture(path: str) -> None:
    kind = os.path.splitext(path)[1].removeprefix(".")
    if kind not in _PICTURES:
        raise UsageError(f"--plot={path}: unknown kind of picture {kind!r}; {nearest(kind, _PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; pip install 'pase_mtf[launch]', or leave --plot out")


def picture_of(projection: Projection, path: str) -> bytes:
    """The picture as the bytes of a file of that name; the same for the same numbers."""
    import matplotlib  # loaded only to draw

    from pase_mtf.epochs.picture import projection_figure
    drawn, kind = io.BytesIO(), os.path.splitext(path)[1].removeprefix(".")
    with matplotlib.rc_context({"svg.hashsalt": "pase_mtf"}):
        projection_figure(projection).savefig(drawn, format=kind,
                                              metadata={"Date": None} if kind == "svg" else None)
    return drawn.getvalue()


def _steps(flags: argparse.Namespace) -> StepTimes:
    sources = [name for name in ("steps", "run", "model") if getattr(flags, name)]
    if not sources:
        raise UsageError("no step times; give a file of them with --steps, measured ones with --run, or predict them "
                         "with --model")
    if len(sources) > 1:
        raise UsageError(f"--{sources[0]} and --{sources[1]}: step times come from one place; leave one out")
    if flags.steps:
        return StepTimes.load(flags.steps, flags.worker_batch)
    if flags.run:
        if flags.worker_batch is None:
            raise UsageError("--run: say how many examples a worker takes; add --worker_batch")
        from pase_mtf.launch.epochs.runs import steps_of_runs  # loads numba
        return steps_of_runs(flags.run, flags.worker_batch)
    return _predicted(flags)


def _predicted(flags: argparse.Namespace) -> StepTimes:
    config = load_config(flags.model, flags.preset)  # a mistyped name does not wait for a measurement
    machine = load_machine(flags.machine, max(flags.devices))
    machine.check_devices(max(flags.devices))  # before those of fewer are priced
    from pase_mtf.epochs.predict import predict_steps  # loads numba
    mixes = [(number // ways, ways) for number in flags.devices for ways in {1, *flags.ways} if number % ways == 0]
    with tqdm(total=len(mixes), desc="pricing", file=sys.stderr, disable=None) as bar:
        def tell(text: str) -> None:
            bar.set_postfix_str(text)
            bar.update()
        return predict_steps(graph_exporter(flags.model, flags.preset), flags.worker_batch or config.batch, mixes,
                             machine, tell)


def graph_exporter(model: str, preset: str) -> Callable[[int], ComputationGraph]:
    """batch -> the graph of a model's training step, exported once for every batch."""
    @functools.cache
    def export(batch: int) -> ComputationGraph:
        # TensorFlow takes seconds to import, and step times may come from a file.
        from pase_mtf.compat import tf
        from pase_mtf.export.exporter import export_graph
        from pase_mtf.launch.arms.program import build_program, variables_by_name
        config = load_config(model, preset, batch=batch)
        with tf.Graph().as_default(), variables_by_name():
            program = build_program(models.get(model), config, batch, config.optimizer, config.learning_rate, 0)
            return export_graph(program.graph, name=f"{model}-{preset}")
    return export
