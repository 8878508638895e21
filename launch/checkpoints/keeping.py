"""When a run writes a checkpoint: every so many steps or minutes, and at its end."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pase_mtf.errors import DataError, UsageError
from pase_mtf.launch.checkpoints.checkpoint import FileEntry, save_checkpoint
from pase_mtf.launch.data import ORDER, Batch, Data
from pase_mtf.launch.training import History, Record

__all__ = ["EVERY_SECONDS", "Keeper"]

EVERY_SECONDS = 300.0
"""Between two checkpoints, where --checkpoint_every does not count steps."""


class _Kept(Protocol):
    """What is asked of the arm that is kept (`arms.Arm`)."""

    name: str

    def loss(self, batch: Batch) -> float:
        """The loss of a batch, without a training step."""
        ...

    def save(self, prefix: str) -> Mapping[str, FileEntry] | None:
        """Writes the variables to files that begin with `prefix`; entries of those that it knows."""
        ...


class Keeper:
    """Writes the checkpoints of one arm.

    Beside the variables it keeps the loss of the first step that is not done: a run that goes on from there, on other
    devices perhaps, must find the same.
    """

    def __init__(self, folder: str, arm: _Kept, data: Data, graph_hash: str, *, microbatches: int,
                 recompute: Sequence[str], first_step: int = 0, every: int | None = None,
                 clock: Callable[[], float] = time.monotonic):
        """Writes nothing yet.

        Args:
          folder: of the checkpoints.
          arm: the one that is kept.
          data: what it is trained on.
          graph_hash: of its program.
          microbatches, recompute: of that program, so that who goes on in another one need not guess them.
          first_step: training steps done before this run.
          every: steps between two checkpoints; None: `EVERY_SECONDS` between two.
          clock: seconds.
        """
        self._folder, self._arm, self._data, self._graph_hash = folder, arm, data, graph_hash
        self._microbatches, self._recompute = microbatches, recompute
        self._every, self._clock = every, clock
        self._began, self._done, self._finite = first_step, first_step, True
        self._put_off = False  # whether one was due after the first step
        self._last = clock()

    def watch(self, record: Record) -> None:
        """To be told of every step; writes a checkpoint where one is due.

        One that cannot be written ends no training: a line on stderr, and the next is tried in its turn.
        """
        if record.arm != self._arm.name:
            return
        self._done, self._finite = record.step + 1, math.isfinite(record.loss)
        due = self._put_off or (
            self._done % self._every == 0 if self._every else self._clock() - self._last >= EVERY_SECONDS)
        # The first step is compared, with the other arms and the run before, only after this: what a wrong strategy, or
        # other data by mistake, have made of it must not be what the next run begins with. That of the next step may.
        self._put_off = due and self._began == record.step
        if due and self._finite and not self._put_off:
            try:
                # What looks wrong later on is settled from where the run began, which may lie in this folder.
                why = "" if self.write(self._began) else f"the loss of {self._arm.name} is not finite there"
            except UsageError as error:
                why = str(error)
            if why:
                print(f"warning: no checkpoint at step {self._done}: {why}", file=sys.stderr)
            self._last = self._clock()

    def finish(self, history: History) -> None:
        """Writes the last checkpoint of a run; where there is none its history says why, as there is more to write."""
        if self._done <= self._began + 1 and not history.compared:
            return  # as in `watch`: who goes on next begins where this one did
        try:
            written = self.write()
        except UsageError as error:
            history.unwritten = error
            return
        if not written:
            history.diverged = self._done if self._finite else self._done - 1

    def write(self, spared: int | None = None) -> bool:
        """Writes a checkpoint now; nothing of variables that have diverged, which would drive out an earlier one.

        Args:
          spared: of `save_checkpoint`.

        Returns:
          Whether it was written.

        Raises:
          UsageError: it cannot be written.
        """
        loss: float | None = None
        # Data that cannot be read cost no more than this loss: other processes are told of a batch once it is read.
        with contextlib.suppress(DataError):
            loss = self._arm.loss(next(self._data.batches(self._done)))
        if not self._finite or not (loss is None or math.isfinite(loss)):
            return False
        save_checkpoint(self._folder, self._arm.save, step=self._done, graph_hash=self._graph_hash, next_loss=loss,
                        order=ORDER, microbatches=self._microbatches, recompute=self._recompute, spared=spared)
        return True
