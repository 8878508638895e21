"""`python -m pase_mtf.epochs measure`: what its flags ask for, its progress, and its table."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from tabulate import tabulate
from tqdm import tqdm

from pase_mtf import models
from pase_mtf.epochs.curve import EpochCurve
from pase_mtf.epochs.report import epochs_text, range_text
from pase_mtf.files import check_outputs
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.data import check_data, open_data
from pase_mtf.launch.epochs.measure import RunFile, Settings, measure
from pase_mtf.launch.options import learning_rate_of
from pase_mtf.launch.plan import check_packages
from pase_mtf.models.presets import load_config

__all__ = ["curve_table", "run"]


def run(flags: argparse.Namespace, interrupts: Interrupts) -> int:
    """Measures what is asked for and not known yet, and prints the curve; returns the exit code.

    Args:
      flags: of the command.
      interrupts: end the run that is being made; those that were are kept.

    Raises:
      PaseError: what a user can cause.
    """
    check_packages()
    check_outputs({"--output": flags.output}, [("--data", flags.data), ("--preset", flags.preset)],
                  may_replace=lambda path: True)  # or refused by `RunFile`, which adds to what is there
    config = load_config(flags.model, flags.preset, optimizer=flags.optimizer)
    sizes = dataclasses.asdict(config)
    sizes.pop("seed")
    own = learning_rate_of(config.optimizer, load_config(flags.model, flags.preset))
    if flags.data is not None:  # what is wrong with it does not wait for TensorFlow
        check_data(flags.data, config)
    settings = Settings(
        flags.model, sizes, "", flags.examples, flags.held_out, flags.target,
        flags.learning_rate or own or 0.0,  # what has none is refused
        flags.rate_batch or config.batch, flags.rule, flags.warmup, flags.cap, flags.piece)
    settings.check()
    data = open_data(flags.data, models.get(flags.model), config, 1, 0)
    settings = dataclasses.replace(settings, data=data.describe(),
                                   contents=[round(value, 4) for value in data.sample()])
    file = RunFile(flags.output, settings)
    todo = [(batch, seed) for batch in flags.batches for seed in flags.seeds if (batch, seed) not in file.rows]
    if todo:
        file.check_more()
    if len(todo) < len(flags.batches) * len(flags.seeds):
        print(f"{len(file.rows)} runs are in {flags.output} already; {len(todo)} to go", file=sys.stderr)
    with tqdm(total=len(todo), unit="run", file=sys.stderr, dynamic_ncols=True, disable=None) as bar:
        def tell(batch: int, seed: int, epochs: float, loss: float) -> None:
            bar.set_postfix_str(f"batch {batch}, seed {seed}: {epochs:.2f} epochs, held-out loss {loss:.3f}")
        try:
            for _ in measure(settings, data.source, config, file, flags.batches, flags.seeds, threads=flags.threads,
                             tell=tell):
                bar.update()
        except KeyboardInterrupt:
            if not file.rows:
                raise
            print(f"interrupted; {len(file.rows)} runs are kept in {flags.output}, and the same command goes on from "
                  "there", file=sys.stderr)
            return interrupts.answer()
    print(f"{data.describe()}\nheld-out loss {flags.target:g} of {flags.model}, epochs of {flags.examples:,} examples")
    print(curve_table(EpochCurve.load(flags.output)))
    return 0


def curve_table(curve: EpochCurve) -> str:
    """Epochs by batch, with their spread over the runs."""
    rows = []
    for batch in curve.batches:
        mine = [run for run in curve.runs if run.batch == batch]
        epochs, missed = curve.at(batch), sum(not run.reached for run in mine)
        assert epochs is not None
        rows.append([batch, epochs_text(epochs), range_text(epochs),
                     f"{len(mine)} ({missed} not reached)" if missed else len(mine)])
    return tabulate(rows, ["batch", "epochs", "spread", "runs"], disable_numparse=True,
                    colalign=("right", "right", "left", "left"))
