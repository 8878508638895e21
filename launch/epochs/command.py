"""Time to a trained model: epochs to a target by global batch, and the best mix of workers and strategies.

  python -m pase_mtf.epochs measure --model=alexnet --data=/usr/share/datasets/fashion-mnist --target=0.8 --output=a.csv
  python -m pase_mtf.epochs project --curve=a.csv --model=inception_v3 --machine=h100 --devices=1,2,4,8,16,32,64
  python -m pase_mtf.epochs project --curve=a.csv --steps=steps.csv --worker_batch=32 --devices=1-64 --plot=a.svg

A larger batch takes more epochs, so that data parallelism on ever more devices trains ever less faster. `project` says
which mix of N/M workers with M devices each is done first, how far ahead of data parallelism alone it is, and from how
many devices on. `measure` measures the epochs; interrupted, the same command goes on where it was.

Exit codes: 0 done; 2 bad usage or files; 3 no feasible strategy; 4 out of memory; 130 (Ctrl-C), 143 (SIGTERM), 129
(SIGHUP) and 141 (nobody reads the output) interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pase_mtf.exit_codes import exit_code_of
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.epochs.options import parser

__all__ = ["main"]


_PATHS = ("preset", "output", "curve", "steps", "machine", "json", "plot", "save_steps")


def _run(flags: argparse.Namespace, interrupts: Interrupts) -> int:
    for name in _PATHS:
        if (given := getattr(flags, name, None)) is not None:
            setattr(flags, name, os.path.expanduser(given))  # as the launcher does: no shell does behind "="
    if flags.command == "project":
        flags.run = list(map(os.path.expanduser, flags.run))
    if flags.command == "measure":
        from pase_mtf.launch.epochs.measure_command import run  # --help and a mistyped flag do not wait for it
    else:
        from pase_mtf.launch.epochs.project_command import run  # likewise
    return run(flags, interrupts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: every error a user can cause is one line on stderr."""
    with Interrupts(at_once=False) as interrupts:
        return exit_code_of(lambda: _run(parser(__doc__).parse_args(arguments), interrupts), interrupts,
                            smaller="take a smaller --preset, and for `measure` also a smaller --piece")


if __name__ == "__main__":
    sys.exit(main())
