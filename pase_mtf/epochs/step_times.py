"""Seconds of a step for every mix of workers and devices to a worker: given, measured, predicted, or put together."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping

import numpy as np
from typing_extensions import TypedDict

from pase_mtf.arguments import checked_arguments
from pase_mtf.epochs.curve import MOST, is_amount, is_count, lines_of, rows_of
from pase_mtf.errors import DataError, FormatError, UsageError, shortened
from pase_mtf.files import check_schema, path_of, read_json, says_format, write_atomically

__all__ = ["StepTime", "StepTimes"]

FORMAT = "pase_mtf.step_times"
VERSION = 1


class _Row(TypedDict):
    workers: int
    ways: int
    seconds: float


class _File(TypedDict):
    worker_batch: int
    source: str
    steps: list[_Row]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """What is known of one mix.

    Attributes:
      seconds: of a step.
      source: "given", "interpolated" (between numbers of workers) or "composed" (of what M devices do for one worker
        and what so many workers cost data parallelism: Pal et al.'s SU_M and SE_N).
    """

    seconds: float
    source: str


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Step times of workers that each take the same number of examples.

    Attributes:
      worker_batch: examples of one worker per step.
      seconds: (workers, ways) -> seconds of a step; ways is how many devices a worker has.
      source: where they come from, for people.
    """

    worker_batch: int
    seconds: Mapping[tuple[int, int], float]
    source: str = "given"

    def __post_init__(self) -> None:
        if type(self.worker_batch) is not int or self.worker_batch < 1:
            raise UsageError(f"worker_batch={shortened(self.worker_batch)}: give examples of a worker, at least 1")
        if not isinstance(self.seconds, Mapping):
            raise UsageError(f"seconds={shortened(self.seconds)}: give a dict of (workers, ways) -> seconds of a step")
        if not isinstance(self.source, str):
            raise UsageError(f"source={shortened(self.source)}: say in words where the step times come from")
        for mix, seconds in self.seconds.items():
            if not (isinstance(mix, tuple) and len(mix) == 2 and all(map(is_count, mix)) and is_amount(seconds)):
                raise UsageError(f"a step of {shortened(seconds)} s for {shortened(mix)}: give seconds above 0 for "
                                 f"(workers, ways), both from 1 to {MOST}")
        if not self.seconds:
            raise UsageError("no step times; give at least those of one worker")
        if any(isinstance(seconds, np.generic) for seconds in self.seconds.values()):  # they are no JSON
            object.__setattr__(self, "seconds", {mix: float(seconds) for mix, seconds in self.seconds.items()})

    @checked_arguments
    def at(self, workers: int, ways: int) -> StepTime | None:
        """The step of so many workers with so many devices each; None where nothing tells.

        What is given is taken as it is. Else it is a straight line (over logarithms) between two numbers of workers of
        the same ways; nothing is assumed beyond the most workers. Else T(1, M) * T(N, 1) / T(1, 1), as Pal et al. have
        it: M devices speed up the step of every worker as they do that of one alone, and more workers slow it down by
        as much as without.
        """
        if (workers, ways) in self.seconds:
            return StepTime(self.seconds[workers, ways], "given")
        if (between := self._between(workers, ways)) is not None:
            return StepTime(between, "interpolated")
        alone, whole = self.seconds.get((1, 1)), self.seconds.get((1, ways))
        many = self.seconds.get((workers, 1), self._between(workers, 1))
        if ways == 1 or alone is None or whole is None or many is None:
            return None
        return StepTime(whole * many / alone, "composed")

    def _between(self, workers: int, ways: int) -> float | None:
        known = sorted(count for count, mine in self.seconds if mine == ways)
        below, above = [n for n in known if n < workers], [n for n in known if n > workers]
        if not below or not above:
            return None
        left, right = below[-1], above[0]
        share = math.log(workers / left) / math.log(right / left)
        return math.exp((1 - share) * math.log(self.seconds[left, ways]) + share * math.log(self.seconds[right, ways]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what `load` reads (UsageError: the file cannot be written)."""
        # NumPy's numbers are no JSON.
        steps = [{"workers": int(workers), "ways": int(ways), "seconds": float(seconds)}
                 for (workers, ways), seconds in sorted(self.seconds.items())]
        write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, "worker_batch": self.worker_batch,
                                           "source": self.source, "steps": steps}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], worker_batch: int | None = None) -> StepTimes:
        """Reads a JSON file that `save` wrote, or a CSV with the columns workers,ways,seconds.

        Args:
          path: of the file; one that ends in .json, or says that it is one of ours, is JSON.
          worker_batch: examples of a worker; a JSON file says so itself.

        Raises:
          DataError: a CSV that cannot be read, or a row that is none; names the line.
          FormatError: a JSON file that is something else.
          UsageError: `worker_batch` is missing, or another than that of the file; what is given is no path.
        """
        path = path_of(path)
        if os.fspath(path).endswith(".json") or says_format(path, FORMAT):
            data = read_json(path, FORMAT, VERSION)
            held = {name: value for name, value in data.items() if name not in ("format", "version")}
            check_schema(path, held, _File)
            if worker_batch not in (None, data["worker_batch"]):
                raise UsageError(f"worker_batch={worker_batch}: {path} holds steps of {data['worker_batch']} examples "
                                 "to a worker; leave it out")
            seconds: dict[tuple[int, int], float] = {}
            for row in data["steps"]:
                mix = row["workers"], row["ways"]
                if seconds.setdefault(mix, row["seconds"]) != row["seconds"]:
                    raise FormatError(f"{path}: {_twice(mix)}")
            try:
                return cls(data["worker_batch"], seconds, data["source"])
            except UsageError as error:
                raise FormatError(f"{path}: {error}") from error
        if worker_batch is None:
            raise UsageError(f"{path} does not say how many examples a worker takes; give worker_batch (on the command "
                             "line --worker_batch)")
        return cls(worker_batch, _rows(path), os.path.basename(os.fspath(path)))


def _twice(mix: tuple[int, int]) -> str:
    return f"{mix[0]} workers with {mix[1]} devices each stand there twice; leave one out"


def _rows(path: str | os.PathLike[str]) -> dict[tuple[int, int], float]:
    """Of a CSV."""
    numbered = lines_of(path)
    reader = rows_of(path, numbered)
    head = [name.strip() for name in next(reader)]
    if sorted(head) != ["seconds", "ways", "workers"]:
        raise DataError(f"{path}: its first line is {shortened(','.join(head))}; write workers,ways,seconds")
    found: dict[tuple[int, int], float] = {}
    for (number, _), row in zip(numbered[1:], reader, strict=False):
        try:
            values = dict(zip(head, row, strict=True))
            mix, seconds = (int(values["workers"]), int(values["ways"])), float(values["seconds"])
            if not (all(map(is_count, mix)) and is_amount(seconds)):
                raise ValueError(row)
        except ValueError as error:
            raise DataError(f"{path}: line {number}: {shortened(','.join(row))} is no step; write workers and ways "
                            f"from 1 to {MOST} and seconds above 0") from error
        if found.setdefault(mix, seconds) != seconds:
            raise DataError(f"{path}: line {number}: {_twice(mix)}")
    if not found:
        raise DataError(f"{path}: holds no steps; write at least one line such as 1,1,0.25")
    return found
