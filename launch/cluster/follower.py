"""A process that trains in step with that of rank 0, with a graph of its own devices: `python -m
pase_mtf.launch.cluster.follower`.

The launcher starts it, where --clients=ranks. It does what rank 0 tells on the board: builds arms, steps them, writes
what it keeps of their variables into checkpoints. It prints nothing; it ends when the launcher lets go of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pase_mtf import models
from pase_mtf.errors import DataError, FormatError, MismatchError, UsageError, shortened
from pase_mtf.exit_codes import exit_code_of
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo
from pase_mtf.launch.cluster.membership import Membership, started_by_launcher
from pase_mtf.launch.console import SMALLER
from pase_mtf.launch.data import Data, StepBatch, are_same, open_data
from pase_mtf.launch.options import ResolvedOptions
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.training import BLOCK
from pase_mtf.models.presets import config_of
from pase_mtf.runtime import Devices

if TYPE_CHECKING:  # loads TensorFlow
    from pase_mtf.launch.arms.arm import Arm
    from pase_mtf.launch.cluster.board import Board

__all__ = ["follow", "main", "tell_run"]

def tell_run(board: Board, plan: Plan, data: Data) -> None:
    """Rank 0 tells the others what the run is to do.

    Args:
      board: of the run.
      plan: of the run.
      data: what it trains on.
    """
    board.tell(**_told(plan, data))


def _told(plan: Plan, data: Data) -> dict[str, Any]:
    found = plan.checkpoint
    checkpoint = {**dataclasses.asdict(found), "folder": os.path.abspath(found.folder)} if found else None
    return {"do": "run", "options": plan.options.to_json(), "config": dataclasses.asdict(plan.config),
            "data": data.describe(), "sample": data.sample(), "checkpoint": checkpoint, "keeps": _keeps(plan)}


def _keeps(plan: Plan) -> str | None:
    """The folder of a run in which every rank writes its part of a checkpoint; None: none is written."""
    folder = os.path.abspath(plan.options.output_dir)
    return folder if plan.options.checkpoint and os.path.isdir(folder) else None


def follow(board: Board, devices: Devices) -> None:
    """Does what rank 0 tells, until it has ended the run.

    Args:
      board: of the run.
      devices: of the run, as this rank sees them.

    Raises:
      PaseError: what cannot be done here.
    """
    from pase_mtf.launch.arms.arm import build_arm, rows_of  # TensorFlow takes seconds to import
    from pase_mtf.launch.arms.recipe import Recipe
    arms: dict[int, Arm] = {}
    numbers = itertools.count()
    while (told := board.hear())["do"] != "end":
        match told["do"]:
            case "run":
                plan, feed = _run(told, devices)
            case "build":
                arms[next(numbers)] = build_arm(plan, Recipe.of_json(told["recipe"]), board)
                feed.read(rows_of(arms.values()))
            case "step":
                arms[told["arm"]].step(feed.batch(told["batch"]), told["trace"])
            case "restart":
                arms[told["arm"]].restart()
            case "loss":
                batch = None  # of data that cannot be read all ranks hear: it costs no more than this loss
                with contextlib.suppress(DataError):
                    batch = feed.batch(told["batch"])
                with contextlib.suppress(DataError):
                    arms[told["arm"]].loss(batch)
            case "collect":
                arms[told["arm"]].collect()
            case "save":
                arms[told["arm"]].save(told["prefix"])
            case "differing_replicas":
                arms[told["arm"]].differing_replicas()
            case "close":
                arms.pop(told["arm"]).close()
                feed.read(rows_of(arms.values()))  # of what only this one has read nothing is read any more


def _run(told: Mapping[str, Any], devices: Devices) -> tuple[Plan, _Feed]:
    """The plan of a run as rank 0 tells it, and its batches.

    Raises:
      MismatchError: this rank has other data.
      DataError: it has none.
      FormatError: it does not see the checkpoint.
      UsageError: it does not see the folder in which it is to write its part of the next.
    """
    options = ResolvedOptions(**told["options"])
    checkpoint = told["checkpoint"] and CheckpointInfo(**told["checkpoint"])
    if checkpoint and not os.path.isdir(checkpoint.folder):
        raise FormatError(f"{checkpoint.folder}: is not there for rank {devices.rank}; with --clients=ranks a run is "
                          "resumed from a file system that all hosts share")
    if told["keeps"] and not os.path.isdir(told["keeps"]):
        raise UsageError(f"--output_dir={told['keeps']}: is not there for rank {devices.rank}; with --clients=ranks "
                         "name a folder on a file system that all hosts share, or give --nocheckpoint")
    plan = Plan(options, devices, config_of(options.model, told["config"]), None, checkpoint)
    data = open_data(options.data, models.get(options.model), plan.config, options.batch, options.seed)
    if data.describe() != told["data"]:
        raise MismatchError(f"--data={options.data}: rank {devices.rank} finds {shortened(data.describe())}, rank 0 "
                            f"{shortened(told['data'])}; give every host the same files under the same name")
    if not are_same(data.sample(), told["sample"]):
        raise MismatchError(f"--data={options.data}: rank {devices.rank} finds other examples there than rank 0, as "
                            "many of the same size; give every host the same files, and the same versions of packages")
    return plan, _Feed(data, BLOCK + 1)


class _Feed:
    """The batches of a run, by their steps: arms take turns on them, so that the last ones are kept."""

    def __init__(self, data: Data, kept: int):
        self._data, self._kept = data, kept
        self._held: dict[int, StepBatch] = {}
        self._batches: Iterator[StepBatch] | None = None
        self._next = 0

    def read(self, rows: tuple[int, ...] | None) -> None:
        """The rows of every batch that are needed from here on."""
        if rows != self._data.rows:
            self._data, self._batches = dataclasses.replace(self._data, rows=rows), None
            self._held = {}

    def batch(self, step: int) -> StepBatch:
        """That of a step."""
        while step not in self._held:
            if self._batches is None or not self._next <= step <= self._next + self._kept:
                self._batches, self._next, self._held = self._data.batches(step, ahead=BLOCK), step, {}
            try:
                self._held[self._next] = next(self._batches)
            except DataError:
                self._batches = None  # which has ended by that
                raise
            self._next += 1
            for old in sorted(self._held)[:-self._kept]:
                del self._held[old]
        return self._held[step]


def main() -> int:
    """Follows until the launcher lets go; returns an exit code only where it cannot."""
    membership = started_by_launcher("follower", "python -m pase_mtf.launch --cluster=local:4 --clients=ranks")
    return 2 if membership is None else exit_code_of(lambda: _join(membership), smaller=SMALLER)


def _join(membership: Membership) -> int:
    from pase_mtf.launch.cluster.server import join  # TensorFlow takes seconds to import
    devices = Devices.over_tasks(membership.devices, membership.kind, membership.tasks, rank=membership.rank)
    joined = join(devices)
    assert joined is not None
    assert joined.board is not None
    follow(joined.board, devices)
    while joined.server is not None:  # the launcher lets go of all at once
        signal.pause()
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()  # what no user causes; the launcher sees the exit code, and starts again
    finally:
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
        os._exit(code)  # TensorFlow's threads would keep the process
