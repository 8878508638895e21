"""How many epochs training takes to its target, by the global batch: measured runs, and what lies between them.

In a file a curve is a CSV with a row per run: `batch,epochs`, and where they are known `seed` and `reached` (0: the
target was not reached, and `epochs` is how many it takes at least). Other columns, and lines that begin with #, are
for people and programs that know them.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import math
import os
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from pase_mtf.arguments import as_float, checked_arguments
from pase_mtf.errors import DataError, UsageError, shortened
from pase_mtf.files import path_of

__all__ = ["MOST", "EpochCurve", "Epochs", "Run", "is_amount", "is_count", "lines_of", "rows_of"]

MOST = 2 ** 31 - 1
"""Of a batch, and of a number of workers or devices."""

_LEAST, _LARGEST = 1e-30, 1e30
"""Of epochs, and of seconds of a step: within these no product or quotient of them is 0, or has no end."""

_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1 to `MOST`."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 1 <= int(value) <= MOST


def is_amount(value: object) -> bool:
    """Whether it is a number above 0 that can be multiplied with others of its kind (`_LEAST` to `_LARGEST`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return _LEAST <= as_float(value) <= _LARGEST  # integers have no end


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      batch: examples per step, over all workers.
      epochs: passes over the training data until the target was reached.
      reached: whether it was; if not, it takes at least `epochs`.
      seed: of the run.
    """

    batch: int
    epochs: float
    reached: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not (is_count(self.batch) and is_amount(self.epochs)):
            raise UsageError(f"batch={shortened(self.batch)}, epochs={shortened(self.epochs)}: give a whole batch from "
                             f"1 to {MOST} and epochs above 0 ({_LEAST:g} to {_LARGEST:g})")
        for name, value in vars(self).copy().items():
            if isinstance(value, np.generic):  # NumPy's numbers are no JSON
                object.__setattr__(self, name, value.item())
        if type(self.reached) is not bool or type(self.seed) is not int:  # "no" would be true
            raise UsageError(f"reached={shortened(self.reached)}, seed={shortened(self.seed)}: give True or False, and "
                             "a whole number")


@dataclasses.dataclass(frozen=True)
class Epochs:
    """What a curve says of one batch.

    Attributes:
      median: over the runs of a batch; between two batches a straight line over logarithms of both.
      low, high: the least and the most of the runs, in the same way.
      at_least: the target was not reached by half of the runs (of either neighbour): the truth is not below.
      source: "measured", "interpolated" or "extrapolated".
      high_at_least: it was not by one of the runs, so that the most of them is not below `high`.
    """

    median: float
    low: float
    high: float
    at_least: bool = False
    source: str = "measured"
    high_at_least: bool = False


@dataclasses.dataclass(frozen=True)
class EpochCurve:
    """Epochs to the target by global batch.

    Attributes:
      runs: at least one of each batch.
      name: for tables and pictures.
    """

    runs: tuple[Run, ...]
    name: str = "curve"

    def __post_init__(self) -> None:
        if not isinstance(self.runs, tuple) or not self.runs or not all(isinstance(run, Run) for run in self.runs):
            raise UsageError(f"runs={shortened(self.runs)}: give a tuple of at least one Run")

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches that were measured, ascending."""
        return tuple(sorted({run.batch for run in self.runs}))

    @checked_arguments
    def scaled(self, factor: float) -> EpochCurve:
        """The same curve of a model whose batches are so many times as large (rounded to whole examples).

        Raises:
          UsageError: a factor that is not above 0 or far too large, or that makes two batches one.
        """
        if not 0.0 < factor <= MOST:
            raise UsageError(f"a factor of {shortened(factor)} for batches: give one above 0, up to {MOST}")
        runs = tuple(dataclasses.replace(run, batch=max(1, round(run.batch * factor))) for run in self.runs)
        found = EpochCurve(runs, self.name)
        if len(found.batches) < len(self.batches):
            raise UsageError(f"a factor of {factor:g} makes batches of {self.name} equal; give a larger one")
        return found

    @checked_arguments
    def at(self, batch: float, *, extrapolate: bool = False) -> Epochs | None:
        """What a batch takes; None where it lies outside of what was measured, or beyond a batch of which a run
        did not reach the target.

        Args:
          batch: examples per step, over all workers.
          extrapolate: outside of the batches measured, go on with the slope of the outermost two.

        Raises:
          UsageError: a batch that is not above 0, or so far off that no number tells its epochs.
        """
        if not 0.0 < batch < math.inf:
            raise UsageError(f"batch={shortened(batch)}: give examples of a step, above 0")
        batches = self.batches
        place = bisect.bisect_left(batches, batch)
        if place < len(batches) and batches[place] == batch:
            return self._measured(batches[place])
        inside = 0 < place < len(batches)
        if not inside and not (extrapolate and len(batches) > 1):
            return None
        place = min(max(place, 1), len(batches) - 1)
        left, right = batches[place - 1], batches[place]
        below, above = self._measured(left), self._measured(right)
        try:
            share = math.log(batch / left) / math.log(right / left)
            # Beyond the curve the batch that is further off counts the other way round: its most makes the least.
            if (below.high_at_least and share > 1.0) or (above.high_at_least and share < 0.0):
                return None  # of a bound from below nothing is known there
            near = (below.low, below.high) if share <= 1.0 else (below.high, below.low)
            far = (above.low, above.high) if share >= 0.0 else (above.high, above.low)
            median, low, high = (math.exp((1 - share) * math.log(a) + share * math.log(b)) for a, b in (
                (below.median, above.median), *zip(near, far, strict=True)))
            if not inside and not all(map(is_amount, (median, low, high))):
                raise OverflowError("no number of epochs")
        except (OverflowError, ValueError) as error:  # of 0, where the quotient of two batches is none
            raise UsageError(f"batch={shortened(batch)}: too far beyond the batches {batches[0]} to {batches[-1]} that "
                             "were measured; give one that is nearer") from error
        return Epochs(median, low, high, below.at_least or above.at_least,
                      "interpolated" if inside else "extrapolated", below.high_at_least or above.high_at_least)

    def _measured(self, batch: int) -> Epochs:
        # A run that did not reach the target takes longer than any that did.
        runs = sorted((run for run in self.runs if run.batch == batch), key=lambda run: (not run.reached, run.epochs))
        epochs = [run.epochs for run in runs]
        middle = runs[(len(runs) - 1) // 2:len(runs) // 2 + 1]
        return Epochs(statistics.mean(run.epochs for run in middle), min(epochs), max(epochs),
                      not middle[-1].reached, high_at_least=not runs[-1].reached)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EpochCurve:
        """Reads a CSV.

        Raises:
          DataError: it cannot be read, or a row is none; names the line.
          UsageError: what is given is no path.
        """
        numbered = lines_of(path)
        reader = rows_of(path, numbered)
        head = [name.strip() for name in next(reader, [])]
        for name in ("batch", "epochs"):
            if head.count(name) != 1:
                raise DataError(f"{path}: {'no' if name not in head else 'more than one'} column {name!r} in its first "
                                "line; write batch,epochs (and seed, reached where they are known)")
        runs: dict[tuple[int, int], Run] = {}
        for (number, _), row in zip(numbered[1:], reader, strict=False):
            if len(row) != len(head):
                raise DataError(f"{path}: line {number} has {len(row)} values, the first line names {len(head)}; mend "
                                "the line")
            values = dict(zip(head, (value.strip() for value in row), strict=True))
            try:
                run = Run(int(values["batch"]), float(values["epochs"]), _truth(values.get("reached", "1")),
                          int(values.get("seed", number)))
            except (ValueError, KeyError, UsageError) as error:
                raise DataError(f"{path}: line {number}: {shortened(','.join(row))} is no run; write a whole batch "
                                f"from 1 to {MOST}, epochs above 0, a whole seed, and 0 or 1 for reached") from error
            if runs.setdefault((run.batch, run.seed), run) is not run:
                raise DataError(f"{path}: line {number}: batch {run.batch} with seed {run.seed} stands there twice; "
                                "leave one out")
        if not runs:
            raise DataError(f"{path}: holds no runs; write at least one line such as 32,4.5 below batch,epochs")
        return cls(tuple(runs.values()), os.path.splitext(os.path.basename(os.fspath(path)))[0])


def _truth(text: str) -> bool:
    return _TRUTHS[text.lower()]


def lines_of(path: str | os.PathLike[str]) -> Sequence[tuple[int, str]]:
    """The lines of a CSV that are neither empty nor remarks, with their numbers.

    Raises:
      DataError: it cannot be read, is not UTF-8, or has no lines.
      UsageError: what is given is no path.
    """
    try:
        with open(path_of(path), encoding="utf-8-sig") as file:
            found = [(number, line) for number, line in enumerate(file, 1)
                     if line.strip() and not line.lstrip().startswith("#")]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a CSV file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text; give a CSV file") from error
    if not found:
        raise DataError(f"{path}: empty; write a first line with the names of the columns, and values below it")
    return found


def rows_of(path: str | os.PathLike[str], numbered: Sequence[tuple[int, str]]) -> Iterator[list[str]]:
    """The values of every line.

    Args:
      path: of the file, for errors.
      numbered: its lines (`lines_of`).

    Raises:
      DataError: the lines are none of a CSV (a value of more than 128 KiB, a quotation mark that is never closed).
    """
    reader, begun = csv.reader((line for _, line in numbered), strict=True), 0
    try:
        for row in reader:
            yield row
            begun = reader.line_num
    except csv.Error as error:
        raise DataError(f"{path}: line {numbered[begun][0]}: no CSV ({error}); mend the line") from error
