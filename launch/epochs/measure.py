"""Epochs to a target, measured: trainings with every batch and seed until the loss of held-out examples is low enough.

All runs see the same stream of examples, cut into batches of their size. Large batches are pieces whose gradients are
summed (`training`), so that one device is enough. A run that is done is a row of a CSV: interrupted, the same command
goes on where it was.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pase_mtf import models
from pase_mtf.errors import DataError, FormatError, UsageError, nearest, shortened
from pase_mtf.files import is_empty, one_at_a_time, write_atomically
from pase_mtf.launch.data import Batch, Data, Source, are_same
from pase_mtf.models.checks import divisors

if TYPE_CHECKING:
    from pase_mtf.launch.epochs.training import Trainer
    from pase_mtf.models.presets import ModelConfig

__all__ = ["RULES", "Measured", "RunFile", "Settings", "measure", "pieces_of", "split"]

FORMAT = "pase_mtf.epochs"
VERSION = 2
_OTHERWISE = 1
"""The version whose runs saw their examples in another order, and were judged by those held-out examples alone that
filled pieces of their batch: they are read, and joined by no run of today."""
RULES = {"linear": 1.0, "sqrt": 0.5, "constant": 0.0}
"""How the learning rate grows with the batch -> the power of the batch that it is proportional to."""
_SPLIT_SEED = 0
_LOOKS = 10
"""At the held-out examples in an epoch at least, if it has as many steps; always after as many whole steps."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs of a curve have in common.

    Attributes:
      model: of the registry.
      sizes: of the model, `dataclasses.asdict` of its configuration (less the seed).
      data: what it trains on, in a line.
      examples: to train on: an epoch.
      held_out: other examples, whose loss is looked at ten to twenty times an epoch, or after every step where an epoch
        has fewer.
      target: the mean loss of these, in nats, that ends a run.
      rate: learning rate of the batch `rate_batch`.
      rate_batch: in examples.
      rule: one of `RULES`: the rate of other batches.
      warmup: epochs over which the rate rises from 0.
      cap: epochs after which a run ends without its target.
      piece: most examples whose gradients are computed at once.
      contents: tells data apart that are described alike (`Data.sample`); None: nobody looked, as in earlier files.
    """

    model: str
    sizes: dict[str, Any]
    data: str
    examples: int
    held_out: int
    target: float
    rate: float
    rate_batch: int
    rule: str
    warmup: float
    cap: float
    piece: int
    contents: list[float] | None = None

    def check(self) -> None:
        """Refuses what makes no sense (UsageError)."""
        if self.rule not in RULES:
            raise UsageError(f"--rule={self.rule}: unknown; {nearest(self.rule, RULES)}")
        if self.sizes["optimizer"] not in ("sgd", "adam"):
            raise UsageError(f"optimizer={self.sizes['optimizer']}: has no rate to scale with the batch; take sgd or "
                             "adam")
        for name in ("examples", "held_out", "target", "rate", "rate_batch", "cap", "piece"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}={getattr(self, name)}: give a number above 0")
        if not 0 <= self.warmup < math.inf:  # the rate would stay 0
            raise UsageError(f"warmup={self.warmup}: give epochs, or 0 for none")
        if self.sizes["dropout"]:
            raise UsageError(f"dropout={self.sizes['dropout']}: held-out examples are looked at without; take a preset "
                             "with dropout 0")

    def rate_of(self, batch: int, seen: int) -> float:
        """The learning rate of a step, after so many examples (those of the step among them)."""
        full = self.rate * (batch / self.rate_batch) ** RULES[self.rule]
        warm = self.warmup * self.examples
        return full * min(1.0, seen / warm) if warm else full


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row of the CSV.

    Attributes:
      batch, seed, epochs, reached: as of `curve.Run`; of a run whose loss is no number any more, `epochs` is the cap.
      loss: of the held-out examples when it ended, in nats.
      steps: of the optimizer.
      rate: the learning rate after the warm-up.
      cpu_seconds: of the process.
    """

    batch: int
    seed: int
    epochs: float
    reached: int
    loss: float
    steps: int
    rate: float
    cpu_seconds: float


class RunFile:
    """The CSV of a curve: its settings in the first line, then a row per run."""

    def __init__(self, path: str, settings: Settings):
        """Reads what has been measured.

        Args:
          path: of the CSV; made when the first run is added.
          settings: of all runs.

        Raises:
          FormatError: the file is something else.
          UsageError: its runs have other settings; names the first that differs.
        """
        self.path, self._settings, self._version = path, settings, VERSION
        self._head = json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(settings)})
        self.rows: dict[tuple[int, int], Measured] = {}
        self._read()

    def _read(self) -> None:
        if not os.path.exists(self.path) or is_empty(self.path):
            return
        try:
            with open(self.path, encoding="utf-8", newline="") as file:
                first, *rest = file.read().splitlines()
            if not first:
                raise ValueError("its first line is empty")
            kept = json.loads(first.removeprefix("# "))
            types: dict[str, Any] = {field.name: int if field.type == "int" else float
                                     for field in dataclasses.fields(Measured)}
            rows = [Measured(**{name: types[name](value) for name, value in row.items()})
                    for row in csv.DictReader(rest)]
            if kept["format"] != FORMAT or kept["version"] not in (_OTHERWISE, VERSION):
                raise ValueError(kept["format"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
            raise FormatError(f"{self.path}: not a CSV that this command wrote ({shortened(error)}); choose another "
                              "name") from error
        wanted = json.loads(self._head)
        for name in dataclasses.asdict(self._settings):
            told, before, now = _apart(name, kept.get(name), wanted[name])
            if before != now and not (name == "contents" and _same_contents(before, now)):
                raise UsageError(f"{self.path}: its runs have {told}={shortened(before, 200)}, not "
                                 f"{shortened(now, 200)}; choose another name, or give the same")
        self._version = kept["version"]
        self.rows = {(row.batch, row.seed): row for row in rows}

    def check_more(self) -> None:
        """Raises UsageError where the runs that are there saw other examples than those to come would."""
        if self._version != VERSION:
            raise UsageError(f"{self.path}: an earlier version of this command measured its {len(self.rows)} runs, on "
                             "examples in another order; choose another name, and all are measured")

    def add(self, row: Measured) -> None:
        """Adds a run, and writes the file whole, with what another process has added meanwhile."""
        with one_at_a_time("epochs"):
            self._read()
            self.check_more()
            self.rows[row.batch, row.seed] = row
            text = io.StringIO()
            writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Measured)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(dataclasses.asdict(self.rows[key]) for key in sorted(self.rows))
            write_atomically(self.path, f"# {self._head}\n{text.getvalue()}")


def _same_contents(before: Any, now: Any) -> bool:
    """Whether data are the same as far as anybody looked; `before` is of a file."""
    if before is None or now is None:
        return True
    return isinstance(before, list) and len(before) == len(now) and all(
        isinstance(value, (int, float)) for value in before) and are_same(before, now)


def _apart(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """A setting, as it was and as it is; of several in one, such as sizes, the first that is not what it was."""
    if isinstance(before, dict) and isinstance(now, dict):
        return next(((each, before.get(each), now.get(each)) for each in (*now, *before)
                     if before.get(each) != now.get(each)), (name, before, now))
    return name, before, now


def pieces_of(batch: int, most: int) -> tuple[int, int]:
    """(examples of a piece, pieces of a batch): the largest pieces of at most so many that make the batch."""
    piece = divisors(batch, most)[-1]
    return piece, batch // piece


def split(source: Source, examples: int, held_out: int) -> tuple[Source, Source]:
    """(what is trained on, what is held out): different examples, the same whatever the seed of a run.

    Raises:
      DataError: there are not so many.
    """
    if examples + held_out > source.examples:
        raise DataError(f"{source.description}: {source.examples:,} examples, and {examples:,} to train on and "
                        f"{held_out:,} held out are asked for; ask for fewer")
    order = np.random.default_rng(_SPLIT_SEED).permutation(source.examples)

    def part(numbers: np.ndarray) -> Source:
        return dataclasses.replace(source, examples=len(numbers), load=lambda chosen: source.load(numbers[chosen]))
    return part(order[held_out:held_out + examples]), part(order[:held_out])


def measure(settings: Settings, source: Source, config: ModelConfig, file: RunFile, batches: Sequence[int],
            seeds: Sequence[int], *, threads: int = 1,
            tell: Callable[[int, int, float, float], object] = lambda *_: None) -> Iterator[Measured]:
    """Measures the runs that the file does not hold yet, and adds each.

    Args:
      settings: of all runs, checked.
      source: all examples.
      config: the model's sizes.
      file: what is known.
      batches, seeds: a run of each pair.
      threads: that TensorFlow computes with.
      tell: called with batch, seed, epochs and loss whenever the held-out examples were looked at.

    Yields:
      each run that was added.
    """
    train, held = split(source, settings.examples, settings.held_out)
    for seed in seeds:  # seed by seed: interrupted, there is something of every batch
        for batch in batches:
            if (batch, seed) not in file.rows:
                row = _measure(settings, train, held, config, batch, seed, threads, tell)
                file.add(row)
                yield row


def _measure(settings: Settings, train: Source, held: Source, config: ModelConfig, batch: int, seed: int, threads: int,
             tell: Callable[[int, int, float, float], object]) -> Measured:
    from pase_mtf.launch.epochs.training import Trainer  # brings TensorFlow
    start = time.process_time()
    piece, count = pieces_of(batch, settings.piece)
    stream = Data(train, piece, seed).batches()
    model = models.get(settings.model)
    # Where an example's loss depends on the others of its piece, every batch is judged by the same pieces.
    looked = min(settings.piece, held.examples) if model.batch_statistics else piece
    pieces, rest = _in_pieces(held, looked)
    with Trainer(model, config, piece, seed, threads, looked=looked, rest=held.examples % looked) as trainer:
        epochs, loss, steps = _train(settings, trainer, stream, batch, count, lambda: trainer.loss(pieces, rest),
                                     lambda epochs, loss: tell(batch, seed, epochs, loss))
    reached = loss <= settings.target
    return Measured(batch, seed, epochs if math.isfinite(loss) else settings.cap, int(reached), loss, steps,
                    settings.rate_of(batch, 2 ** 62), round(time.process_time() - start, 2))


def _train(settings: Settings, trainer: Trainer, stream: Iterator[Batch], batch: int, count: int,
           held_out_loss: Callable[[], float], tell: Callable[[float, float], object]) -> tuple[float, float, int]:
    """(epochs, held-out loss, steps) at the end of a run."""
    look = max(1, settings.examples // (_LOOKS * batch))
    epochs, loss, steps = 0.0, math.inf, 0
    while epochs < settings.cap and loss > settings.target:
        steps += 1
        trained = trainer.step(stream, count, settings.rate_of(batch, steps * batch))
        epochs = steps * batch / settings.examples
        if not math.isfinite(trained):
            return epochs, math.nan, steps
        if steps % look == 0 or epochs >= settings.cap:
            loss = held_out_loss()
            tell(epochs, loss)
            if not math.isfinite(loss):
                return epochs, math.nan, steps
    return epochs, loss, steps


def _in_pieces(held: Source, piece: int) -> tuple[list[Batch], Batch | None]:
    """(all pieces of the held-out examples, those that fill none, if there are any): every batch is judged by all."""
    whole = held.examples - held.examples % piece
    pieces = [held.load(np.arange(start, start + piece)) for start in range(0, whole, piece)]
    return pieces, held.load(np.arange(whole, held.examples)) if whole < held.examples else None
