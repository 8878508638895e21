"""What a run shows on the terminal: header, stages, progress, and the line of an error that says most."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TextIO, cast

from tqdm import tqdm

from pase_mtf.exit_codes import Output
from pase_mtf.launch.options import ResolvedOptions
from pase_mtf.launch.training import Record

__all__ = ["LOSSES_DISAGREE", "SMALLER", "Progress", "Stage", "output_that_may_go", "print_header", "summarize_error"]

LOSSES_DISAGREE = 6
"""An exit code; the others stand in pase_mtf.exit_codes."""
SMALLER = "take a smaller --batch or --preset, or fewer arms"
"""What to do where a run has no memory left."""

_INFORMATIVE = ("OOM when allocating", "No space left", "Permission denied", "Disk quota", "not found in checkpoint")
_PREAMBLE = ("Graph execution error", "Detected at node", "During handling", "Traceback")


def print_header(facts: Mapping[str, str]) -> None:
    """Prints the facts of a run, one per line, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
    print(flush=True)


@contextlib.contextmanager
def output_that_may_go() -> Iterator[Output]:
    """No write to the standard output fails in this context, in which there is something to lose: who reads it may go
    away (Ctrl-C ends the `tee` behind a run, too), and the disk of a log be full. To the standard error none does in
    any command (`exit_codes.exit_code_of`).

    Yields:
      The standard output.
    """
    output = Output(sys.stdout)
    with contextlib.redirect_stdout(cast(TextIO, output)):
        yield output


class Stage:
    """Prints what is being done, and then how long it took: `with Stage("lowering"): ...`."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> Stage:
        self._start = time.perf_counter()
        if sys.stderr.isatty():
            print(f"{self._what} ...", end="\r", file=sys.stderr, flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        seconds = time.perf_counter() - self._start
        ended = "interrupted" if kind is KeyboardInterrupt else "failed" if kind else f"{seconds:.1f} s"
        print(f"{self._what}: {ended}", flush=True)


class Progress:
    """A progress bar over the steps of all arms, and a line per logged step above it."""

    def __init__(self, options: ResolvedOptions, arms: int, first_step: int):
        """Starts the bar.

        Args:
          options: of the run.
          arms: how many arms are trained.
          first_step: number of the first training step.
        """
        # `disable=None`: no bar where nobody watches (a file, a pipe).
        self._bar = tqdm(total=arms * (options.warmup + options.steps), unit="step", desc="training", leave=False,
                         dynamic_ncols=True, mininterval=0.3, disable=None)
        self._batch, self._every, self._first = options.batch, options.log_every, first_step

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.close()

    def step(self, record: Record) -> None:
        """Counts a step."""
        self._bar.update(1)
        if (record.step - self._first) % self._every == 0:
            note = "" if record.timed else "  (warm-up)"
            tqdm.write(f"step {record.step:5d}  {record.arm:20s}  loss {record.loss:9.5f}  "
                       f"{self._batch / record.seconds:9.1f} examples/s  {1e3 * record.seconds:8.1f} ms{note}",
                       file=sys.stdout)
            sys.stdout.flush()


def summarize_error(error: BaseException, most: int = 160) -> str:
    """The most informative line of an error's message, at most that many characters: TensorFlow's fill a page."""
    lines = [line.strip() for line in str(getattr(error, "message", error)).splitlines() if line.strip()]
    informative = [line for line in lines if any(word in line for word in _INFORMATIVE)]
    other = [line for line in lines if not line.startswith(_PREAMBLE)]
    return (informative or other or lines or [type(error).__name__])[0][:most]
