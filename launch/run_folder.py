"""The output directory of a run: whether it is new or one that an earlier run has left, and who holds its locks."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from pase_mtf.errors import FormatError, UsageError, shortened
from pase_mtf.files import read_json

__all__ = ["AUTO", "CONFIG_FORMAT", "CONFIG_VERSION", "LOCK", "MANIFEST", "METRICS", "NOT_KEPT",
           "check_can_be_written", "check_folder_taken_up", "check_new_folder", "check_no_training", "check_whole_path",
           "checkpoint_steps", "files_of_run", "has_checkpoint", "has_ended", "has_results", "load_run_config",
           "names_in", "newest_checkpoint", "steps_done", "went_well"]

CONFIG_FORMAT = "pase_mtf.run"
CONFIG_VERSION = 1

AUTO = "auto"
"""Value of --resume: begin in the output directory, or go on there."""

MANIFEST = "checkpoint.json"
"""What tells of the files of a checkpoint, beside them."""

NOT_KEPT = "not kept"
"""Status of a run that has done its steps, or was to end, and could not write its last checkpoint: what it trained is
lost."""

_PATTERN = "[\\"
"""What no path of a checkpoint may hold: TensorFlow writes there, and looks for a pattern when it reads."""

_CONFIG = "config.json"
_SUMMARY = "summary.json"
LOCK = ".running.lock"
"""What a run holds as long as it writes there."""

METRICS = "metrics.jsonl"
"""What a run has measured, a line per step and arm."""
_BEFORE_THAT = (METRICS, LOCK)
"""What a run may have made before it wrote its configuration."""


def check_whole_path(flag: str, path: str) -> None:
    """Raises UsageError where ranks would not find a checkpoint, which they are told by its whole path: they may work
    in other folders."""
    _check_name(os.path.abspath(path), flag)


def _check_name(path: str, flag: str = "--output_dir") -> None:
    """Raises UsageError where TensorFlow would not take, or not find, what lies in a folder of that name."""
    told = f"{flag}={shortened(path, quoted=False)}: TensorFlow takes"
    if _is_pattern(path):
        raise UsageError(f"{told} [ and \\ for a pattern, and would not find its checkpoints again; leave them out")
    if not _is_utf8(path):
        raise UsageError(f"{told} paths of UTF-8 only; name another")


def check_new_folder(path: str | None) -> None:
    """Raises UsageError where no new folder can be made there; None: outputs/, whose name comes later."""
    if path is not None and not path.strip():
        raise UsageError("--output_dir is empty; name a new folder, or leave the flag out")
    if path and path.startswith("--"):  # which absl takes for a value, whatever it is
        raise UsageError(f"--output_dir={shortened(path, quoted=False)}: is a flag, and the folder is missing before "
                         "it; name a folder, or leave the flag out")
    if path:
        _check_name(path)
    if path and ("\0" in path or os.path.lexists(path)):
        raise UsageError(f"--output_dir={shortened(path, quoted=False)}: exists and is never overwritten; name a new "
                         "one")
    parent = os.path.dirname(os.path.abspath(path or os.path.join("outputs", "run")))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        reason = "is not a folder" if not os.path.isdir(parent) else "cannot be written to"
        raise UsageError(f"--output_dir={path or 'outputs'}: {parent} {reason}; name another place")


def _is_pattern(path: str) -> bool:
    return any(mark in path for mark in _PATTERN)


def _is_utf8(path: str) -> bool:
    return path == path.encode(errors="replace").decode()


def files_of_run(folder: str) -> tuple[str, str]:
    """The files that tell what a run measured, and of what: summary.json and config.json."""
    return os.path.join(folder, _SUMMARY), os.path.join(folder, _CONFIG)


def load_run_config(folder: str) -> dict[str, Any]:
    """Reads config.json of an earlier run.

    Raises:
      FormatError: there is none, or it is none of ours.
    """
    if not os.path.isdir(folder):
        raise FormatError(f"--resume={folder}: no such folder; name the output directory of an earlier run")
    if _is_pattern(folder):
        raise FormatError(f"--resume={folder}: TensorFlow takes [ and \\ for a pattern, and does not find its "
                          "checkpoint; rename the folder")
    if not _is_utf8(folder):
        raise FormatError(f"--resume={folder}: TensorFlow takes paths of UTF-8 only; rename the folder")
    data = read_json(os.path.join(folder, "config.json"), CONFIG_FORMAT, CONFIG_VERSION)
    if not isinstance(data.get("options"), dict):
        raise FormatError(f"{folder}/config.json: has no options; it is truncated or foreign")
    return data


def check_can_be_written(folder: str) -> None:
    """Raises UsageError where a run cannot go on in a folder, as nothing can be written there."""
    if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output_dir={shortened(folder, quoted=False)}: cannot be written to; name another place")


def check_folder_taken_up(path: str | None) -> None:
    """Raises UsageError where --resume=auto can neither begin nor go on: no folder is named, or what is there is not of
    a run."""
    if not path:
        raise UsageError(f"--resume={AUTO}: in which folder? Give --output_dir")
    if not os.path.isdir(path):
        check_new_folder(path)
    elif not os.path.isfile(os.path.join(path, _CONFIG)):
        _check_name(path)
        check_can_be_written(path)
        foreign = [name for name in names_in(path) if name not in _BEFORE_THAT and not name.startswith(f".{_CONFIG}")]
        if foreign:
            raise UsageError(f"--output_dir={shortened(path, quoted=False)}: holds {shortened(min(foreign))}, and no "
                             "run to go on with; name another")
    else:
        load_run_config(path)


def check_no_training(path: str | None) -> None:
    """Raises UsageError where a folder holds a training, whose files a search alone would replace by its own."""
    if path and (has_checkpoint(path) or _has_steps(path)):
        raise UsageError(f"--search_only: {path} holds a training; give another --output_dir")


def _has_steps(folder: str) -> bool:
    """Whether a run has trained in a folder, and told of a step."""
    metrics = os.path.join(folder, METRICS)
    return os.path.isfile(metrics) and os.path.getsize(metrics) > 0


def names_in(folder: str) -> list[str]:
    """What lies in a folder; nothing where there is none.

    Raises:
      FormatError: it cannot be looked into, which is no sign that nothing lies there.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:  # of a name that none can have
        why = getattr(error, "strerror", None) or error
        raise FormatError(f"{folder}: cannot be read ({why}); see to it, or name another folder") from error


def checkpoint_steps(folder: str) -> list[int]:
    """Steps of the checkpoints in a folder of checkpoints, the last one first.

    Raises:
      FormatError: see `names_in`.
    """
    found = (re.fullmatch(r"step-(\d{1,12})", name) for name in names_in(folder))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def has_checkpoint(folder: str) -> bool:
    """Whether an earlier run in this folder has written a checkpoint, damaged or not.

    Raises:
      FormatError: see `names_in`.
    """
    inside = os.path.join(folder, "checkpoint")
    return newest_checkpoint(folder) is not None or MANIFEST in names_in(inside)  # the latter of version 1


def newest_checkpoint(folder: str) -> int | None:
    """The step of the newest checkpoint in the folder of a run, whole or damaged; None: there is none.

    Raises:
      FormatError: see `names_in`.
    """
    return next(iter(checkpoint_steps(os.path.join(folder, "checkpoint"))), None)


def has_results(folder: str) -> bool:
    """Whether a run in this folder has left what another one would replace: steps of a training, or what came of it."""
    summary, config = files_of_run(folder)
    return os.path.isfile(config) and (_has_steps(folder) or os.path.exists(summary))


def has_ended(folder: str) -> bool:
    """Whether the last run in a folder has trained to an end of its own, and written down what came of it, the last
    checkpoint too where it was to write one."""
    return _summary(folder).get("status") not in (None, "interrupted", "search only", NOT_KEPT)


def went_well(folder: str) -> bool:
    """Whether the last run in a folder has written what came of it, and nothing of that is wrong or lost."""
    return _summary(folder).get("status") in ("done", "interrupted", "search only")


def steps_done(folder: str) -> int:
    """After how many steps of training the last run in a folder has come to its end and told it; 0: it has not.

    Files of earlier versions tell where it began and how many steps it was to do, which a run that is done has done.

    Raises:
      FormatError: see `load_run_config`.
    """
    summary = _summary(folder)
    if summary.get("status") != "done":
        return 0
    if "steps_done" in summary:
        parts = [summary["steps_done"]]
    else:
        options = load_run_config(folder)["options"]
        parts = [summary.get("first_step", 0), options.get("warmup"), options.get("steps")]
    return sum(parts) if all(type(part) is int for part in parts) else 0


def _summary(folder: str) -> dict[str, Any]:
    """What summary.json says; nothing where there is none, or something else."""
    try:
        with open(os.path.join(folder, _SUMMARY), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
