"""Kernel times in a file: one line of JSON per kernel, appended by as many processes as there are.

The last line of a kernel counts. A line that is damaged (of a process that was killed, or a disk that was full) is
passed over; what it told is measured again.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import filelock

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.machine.kernels import Kernel, KernelTimes, Timing

__all__ = ["append_times", "line_of", "load_times"]

_MOST_SECONDS = 1e6


def line_of(kernel: Kernel, timing: Timing) -> str:
    """A kernel and its time as a line of a file, without its end."""
    return json.dumps({"seconds": float(f"{timing.seconds:.4g}"), "spread": round(timing.spread, 3),
                       "runs": timing.runs, "text": str(kernel), "kernel": kernel.to_json()})


def _read_line(line: str) -> tuple[Kernel, Timing] | None:
    """What a line tells; None where it is damaged."""
    try:
        data = json.loads(line)
        kernel, seconds = Kernel.from_json(data["kernel"]), float(data["seconds"])
        timing = Timing(seconds, float(data.get("spread", 0.0)), int(data.get("runs", 1)))
    except (ValueError, KeyError, TypeError, FormatError, RecursionError):
        return None
    return (kernel, timing) if 0.0 < seconds < _MOST_SECONDS else None


def load_times(path: str | os.PathLike[str], on: Mapping[str, Any] | None = None) -> KernelTimes:
    """The times in a file; none where there is no such file.

    Args:
      path: of the file.
      on: what they were measured on, for people.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return KernelTimes(on)
    timings, damaged = {}, 0
    for line in filter(None, map(str.strip, lines)):
        found = _read_line(line)
        if found is None:
            damaged += 1
        else:
            timings[found[0]] = found[1]
    return KernelTimes(on, timings, damaged)


def append_times(path: str | os.PathLike[str], timings: Mapping[Kernel, Timing]) -> None:
    """Adds kernels to a file, which is made where there is none; processes that do so at once take turns.

    Raises:
      UsageError: the file cannot be written.
    """
    path = pathlib.Path(path)
    data = "".join(line_of(kernel, timing) + "\n" for kernel, timing in timings.items()).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(path.name + ".lock")), open(path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # somebody died in the middle of a line
                    data = b"\n" + data
            file.write(data)
            file.flush()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; free space or choose another place"
                         ) from error
