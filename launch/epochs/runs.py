"""Step times that runs of the launcher measured."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import UsageError
from pase_mtf.launch.summary import Summary, read_summary

__all__ = ["steps_of_runs"]


def steps_of_runs(folders: Sequence[str], worker_batch: int) -> StepTimes:
    """What runs measured: of as many workers as their batch holds those of one, the devices shared out among them.

    A run of one device to a worker tells the step of its arm "data_parallel", one of several that of its first arm.

    Args:
      folders: output folders of the launcher.
      worker_batch: examples of a worker.

    Raises:
      FormatError: a folder holds no summary.json of a run.
      UsageError: a run that went wrong, another model or preset than that of the first, a batch or a number of devices
        that workers cannot share, an arm that was not measured, or one mix measured twice.
    """
    seconds: dict[tuple[int, int], float] = {}
    first = ""
    for folder in folders:
        summary = read_summary(os.path.join(folder, "summary.json"))
        what = f"{summary['model']}, preset {summary['preset']}"
        first = first or what
        if what != first:
            raise UsageError(f"--run={folder}: its steps are those of {what}, those of {folders[0]} of {first}; leave "
                             "one out")
        mix, step = _measured(folder, summary, worker_batch)
        if mix in seconds:
            raise UsageError(f"--run={folder}: {mix[0]} workers with {mix[1]} devices each were measured by another "
                             "run, too; leave one out")
        seconds[mix] = step
    return StepTimes(worker_batch, seconds, "measured by the launcher")


def _measured(folder: str, summary: Summary, worker_batch: int) -> tuple[tuple[int, int], float]:
    if summary["status"] in ("diverged", "losses disagree"):
        raise UsageError(f"--run={folder}: it ended with {summary['status']!r}; leave it out")
    batch, devices = summary["batch"], summary["devices"]
    workers = batch // worker_batch
    if batch % worker_batch or devices % max(workers, 1):
        raise UsageError(f"--run={folder}: a batch of {batch} on {devices} devices is not that of workers with "
                         f"{worker_batch} examples each; give --worker_batch, or leave the run out")
    ways = devices // workers
    name = "data_parallel" if ways == 1 and devices > 1 else next(iter(summary["arms"]), "")
    found = summary["arms"][name]["measured_ms"] if name in summary["arms"] else None
    if found is None:
        raise UsageError(f"--run={folder}: its arm {name!r} was not measured; run it again with that arm")
    return (workers, ways), found / 1e3
