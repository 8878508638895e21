"""Step times that runs of the launcher measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import UsageError, shortened
from pase_mtf.files import read_json
from pase_mtf.launch.run_folder import CONFIG_FORMAT, CONFIG_VERSION, files_of_run
from pase_mtf.launch.summary import Summary, read_summary

__all__ = ["steps_of_runs"]

_OF_A_RUN = ("preset", "batch", "seed", "learning_rate")
"""Of the sizes of a model, what runs of one model may differ in: a step of so many examples takes no other time for
it, and a rate grows with the batch."""


def steps_of_runs(folders: Sequence[str], worker_batch: int) -> StepTimes:
    """What runs measured: of as many workers as their batch holds those of one, the devices shared out among them.

    A run of one device to a worker tells the step of its arm "data_parallel", one of several that of its first arm.

    Args:
      folders: output folders of the launcher.
      worker_batch: examples of a worker.

    Raises:
      FormatError: a folder holds no summary.json of a run, or its config.json is none.
      UsageError: a run that went wrong, another model, or one of other sizes, than that of the first, a batch or a
        number of devices that workers cannot share, an arm that was not measured, or one mix measured twice.
    """
    seconds: dict[tuple[int, int], float] = {}
    first: tuple[Summary, dict[str, Any] | None] | None = None
    for folder in folders:
        summary, sizes = read_summary(files_of_run(folder)[0]), _sizes(folder)
        first = first or (summary, sizes)
        if (apart := _apart((summary, sizes), first)) is not None:
            raise UsageError(f"--run={folder}: its steps are those of {apart[0]}, those of {folders[0]} of "
                             f"{apart[1]}; leave one out")
        mix, step = _measured(folder, summary, worker_batch)
        if mix in seconds:
            raise UsageError(f"--run={folder}: {mix[0]} workers with {mix[1]} devices each were measured by another "
                             "run, too; leave one out")
        seconds[mix] = step
    return StepTimes(worker_batch, seconds, "measured by the launcher")


def _sizes(folder: str) -> dict[str, Any] | None:
    """The sizes of the model of a run, by config.json; None: that is not there, or does not tell them."""
    path = files_of_run(folder)[1]
    if not os.path.exists(path):
        return None
    sizes = read_json(path, CONFIG_FORMAT, CONFIG_VERSION).get("model_config")
    return {name: size for name, size in sizes.items() if name not in _OF_A_RUN} if isinstance(sizes, dict) else None


def _apart(one: tuple[Summary, dict[str, Any] | None],
           other: tuple[Summary, dict[str, Any] | None]) -> tuple[str, str] | None:
    """What two runs train, in words, where it is not the same; by their presets where sizes are not known: those are
    as they were typed, and two files may be of one name or one file of two."""
    (summary, sizes), (before, sizes_before) = one, other
    if summary["model"] != before["model"] or sizes is None or sizes_before is None:
        what, first = (f"{run['model']}, preset {run['preset']}" for run in (summary, before))
        return None if what == first else (what, first)
    for name in sorted({*sizes, *sizes_before}):
        if sizes.get(name) != sizes_before.get(name):
            return (f"{summary['model']} with {name} {shortened(sizes.get(name))}",
                    f"{before['model']} with {name} {shortened(sizes_before.get(name))}")
    return None


def _measured(folder: str, summary: Summary, worker_batch: int) -> tuple[tuple[int, int], float]:
    if summary["status"] in ("diverged", "losses disagree"):
        raise UsageError(f"--run={folder}: it ended with {summary['status']!r}; leave it out")
    batch, devices = summary["batch"], summary["devices"]
    workers = batch // worker_batch
    if workers < 1 or batch % worker_batch or devices % workers:
        raise UsageError(f"--run={folder}: a batch of {batch} on {devices} devices is not that of workers with "
                         f"{worker_batch} examples each; give --worker_batch, or leave the run out")
    ways = devices // workers
    name = "data_parallel" if ways == 1 and devices > 1 else next(iter(summary["arms"]), "")
    found = summary["arms"][name]["measured_ms"] if name in summary["arms"] else None
    if found is None:
        raise UsageError(f"--run={folder}: its arm {name!r} was not measured; run it again with that arm")
    return (workers, ways), found / 1e3
