"""The flags of `python -m pase_mtf.epochs`, and what their values have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from pase_mtf.epochs.curve import MOST
from pase_mtf.errors import shortened
from pase_mtf.flag_text import FlagParser
from pase_mtf.machine.machine import LOCAL

__all__ = ["numbers", "parser"]

_MOST_NUMBERS = 100_000
_T = TypeVar("_T", int, float)


def _positive(kind: Callable[[str], _T]) -> Callable[[str], _T]:
    def read(text: str) -> _T:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} has no end; give a number")
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        if kind is int and value > MOST:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is above {MOST}")
        return value
    return read


def numbers(text: str) -> list[int]:
    """Whole numbers from a list with ranges, `1,2,4-8`, ascending and each once.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is no number and no range; write such as 1,2,4-8")
        low, high = int(first), int(last) if dash else int(first)
        if not 1 <= low <= high <= MOST or high - low >= _MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{shortened(part)}: a range goes up from at least 1 to at most {MOST}, "
                                             f"over at most {_MOST_NUMBERS} numbers")
        found.update(range(low, high + 1))
    return sorted(found)


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < 2 ** 31 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers such as 0,1,2")
    return list(dict.fromkeys(map(int, parts)))


def parser(description: str) -> argparse.ArgumentParser:
    """The flags of both commands."""
    found = FlagParser(prog="python -m pase_mtf.epochs", description=description,
                       formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = found.add_subparsers(dest="command", required=True)
    _measure(commands.add_parser("measure", help="epochs to a target for every batch, by training"))
    _project(commands.add_parser("project", help="the best mix of workers and strategies for every number of devices"))
    return found


def _measure(flags: argparse.ArgumentParser) -> None:
    number, whole = _positive(float), _positive(int)
    flags.add_argument("--model", required=True, help="which model is trained, as of the launcher")
    flags.add_argument("--preset", default="tiny", help="its sizes: a preset or a .json file (default: %(default)s)")
    flags.add_argument("--data", help="what it trains on, as of the launcher; default: synthetic")
    flags.add_argument("--output", required=True, help="the CSV, a row per run; runs that it holds are not run again")
    flags.add_argument("--target", type=number, required=True, help="held-out loss that ends a run, in nats")
    flags.add_argument("--batches", type=numbers, default="16,32,64,128,256,512", help="default: %(default)s")
    flags.add_argument("--seeds", type=_seeds, default="0,1,2", help="default: %(default)s")
    flags.add_argument("--examples", type=whole, default=8192, help="of an epoch (default: %(default)s)")
    flags.add_argument("--held_out", type=whole, default=512, help="examples whose loss counts (default: %(default)s)")
    flags.add_argument("--optimizer", choices=["sgd", "adam"], help="default: the preset's")
    flags.add_argument("--learning_rate", type=number, help="of the batch --rate_batch; default: the preset's, "
                       "of another optimizer the launcher's")
    flags.add_argument("--rate_batch", type=whole, help="default: the preset's batch")
    flags.add_argument("--rule", default="sqrt", help="how the rate grows with the batch: linear, sqrt or constant "
                       "(default: %(default)s)")
    flags.add_argument("--warmup", type=float, default=0.5, help="epochs over which the rate rises from 0 (default: "
                       "%(default)s)")
    flags.add_argument("--cap", type=number, default=30.0, help="epochs after which a run ends, target not reached "
                       "(default: %(default)s)")
    flags.add_argument("--piece", type=whole, default=64, help="most examples whose gradients are computed at once; "
                       "larger batches sum those of several pieces (default: %(default)s)")
    flags.add_argument("--threads", type=whole, default=1, help="that TensorFlow computes with (default: %(default)s)")


def _project(flags: argparse.ArgumentParser) -> None:
    number, whole = _positive(float), _positive(int)
    flags.add_argument("--curve", required=True, help="CSV of epochs by global batch (columns batch,epochs; also seed "
                       "and reached)")
    flags.add_argument("--steps", help="CSV (columns workers,ways,seconds) or JSON of step times; default: predicted "
                       "for --model on --machine")
    flags.add_argument("--run", action="append", default=[], help="output folder of a run of the launcher, whose step "
                       "time was measured; one for every mix (may be repeated)")
    flags.add_argument("--model", help="whose steps are predicted")
    flags.add_argument("--preset", default="big", help="its sizes (default: %(default)s)")
    flags.add_argument("--machine", default=LOCAL, help="whose numbers count: a name, a file, or local, measured "
                       "(default: %(default)s)")
    flags.add_argument("--worker_batch", type=whole, help="examples of a worker per step; default: the preset's batch, "
                       "or what the JSON says")
    flags.add_argument("--devices", type=numbers, default="1,2,4,8,16,32,64", help="numbers of devices, such as "
                       "8,16 or 1-64 (default: %(default)s)")
    flags.add_argument("--ways", type=numbers, default="1,2,4,8", help="devices to a worker (default: %(default)s)")
    flags.add_argument("--batch_scale", type=number, default=1.0, help="multiplies the batches of the curve, where it "
                       "is that of a smaller model (default: %(default)s)")
    flags.add_argument("--examples", type=whole, help="of an epoch: then times are told in hours, too")
    flags.add_argument("--extrapolate", action="store_true", help="go on beyond the batches of the curve with the "
                       "slope of the last two, marked by ~; default: such batches are left out")
    flags.add_argument("--json", help="write what was found to this file")
    flags.add_argument("--plot", help="draw it into this file (.svg, .png or .pdf)")
    flags.add_argument("--save_steps", help="write the predicted step times to this JSON file")
    flags.add_argument("--overwrite", action="store_true", help="replace files that exist")
