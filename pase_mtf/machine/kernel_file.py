"""Kernel times in a file: one line of JSON per kernel, appended by as many processes as there are.

The first line says what they were measured on, and when the file was begun. The last line of a kernel counts. A line
that is damaged (of a process that was killed, or a disk that was full) is passed over; what it told is measured again.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from pase_mtf.errors import FormatError, UsageError, shortened
from pase_mtf.files import locked
from pase_mtf.machine.kernel_times import Circumstances, KernelTimes
from pase_mtf.machine.kernels import Kernel, Timing
from pase_mtf.machine.references import PROBES

__all__ = ["append_times", "begun", "line_of", "load_times", "read_entry"]

_MOST_SECONDS = 1e6
_MOST_ELEMENTS = 1 << 60
_MOST_BLOCKS = 1 << 16
_MOST_LINE = 1 << 16  # characters of the first one
_MOST_WORK = 1e30  # FLOP or bytes


def line_of(kernel: Kernel, timing: Timing) -> str:
    """A kernel and its time as a line of a file, without its end."""
    probed = {"probed": [float(f"{seconds:.4g}") for seconds in timing.probed]} if timing.probed else {}
    return json.dumps({"seconds": float(f"{timing.seconds:.4g}"), "spread": round(timing.spread, 3),
                       "runs": timing.runs, **probed, "text": str(kernel), "kernel": kernel.to_json()})


def read_entry(data: Any) -> tuple[Kernel, Timing]:
    """What `line_of` wrote, as JSON gives it.

    Raises:
      FormatError: no kernel, or a time that none takes.
    """
    try:
        kernel, seconds = Kernel.from_json(data["kernel"]), float(data["seconds"])
        timing = Timing(seconds, float(data.get("spread", 0.0)), int(data.get("runs", 1)),
                        tuple(map(float, data.get("probed", ()))))
        blocks = (*kernel.inputs, *kernel.outputs)
        if len(blocks) > _MOST_BLOCKS or any(
                min(block.shape, default=0) < 0 or max(block.elements, *block.shape, 0) > _MOST_ELEMENTS
                for block in blocks):  # also beside a dim of none
            raise FormatError(f"tensors that there are not in {shortened(kernel, quoted=False)}; leave it out")
        # What it computes and moves is asked for at every price: it must not fail then.
        hash((kernel, kernel.by_reference))
        if not (kernel.flops <= _MOST_WORK and kernel.nbytes <= _MOST_WORK and kernel.width >= 0):
            raise FormatError(f"work that nobody does in {shortened(kernel, quoted=False)}; leave it out")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"no time of a kernel: {shortened(data)}; leave it out") from error
    for taken in (seconds, *timing.probed):
        if not 0.0 < taken < _MOST_SECONDS:
            raise FormatError(f"{shortened(kernel, quoted=False)} took {taken:g} seconds; leave it out")
    if len(timing.probed) not in (0, len(PROBES)):
        raise FormatError(f"no times of {len(PROBES)} probes: {shortened(timing.probed)}; leave them out")
    return kernel, timing


def load_times(path: str | os.PathLike[str], on: Circumstances | None = None) -> KernelTimes:
    """The times in a file; none where there is no such file.

    Args:
      path: of the file.
      on: what they were measured on, where the file does not say it.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return KernelTimes(on)
    timings, damaged = {}, 0
    for line in filter(None, map(str.strip, lines)):
        try:
            data = json.loads(line)
            if isinstance(data, dict) and isinstance(data.get("on"), dict):
                on = data["on"]
                continue
            kernel, timing = read_entry(data)
            timings[kernel] = timing
        except (ValueError, RecursionError, FormatError):
            damaged += 1
    return KernelTimes(on, timings, damaged)


def begun(path: str | os.PathLike[str]) -> float | None:
    """When the file was begun, in seconds of the epoch: what tells it from one that was begun anew in its place; None
    where there is none, or none that says it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = json.loads(file.readline(_MOST_LINE)).get("begun")
        return float(found) if isinstance(found, (int, float)) else None
    except (OSError, ValueError, RecursionError, AttributeError, OverflowError):
        return None


def append_times(path: str | os.PathLike[str], timings: Mapping[Kernel, Timing],
                 on: Circumstances | None = None, *, anew: bool = False) -> None:
    """Adds kernels to a file, which is made where there is none; processes that do so at once take turns.

    Args:
      path: of the file.
      timings: what is added.
      on: what they were measured on: the first line of a file that is made.
      anew: begin a new file; one that there was is renamed (".old"), unless what has that name already holds more: of
        a file that was begun anew before, and not finished.

    Raises:
      UsageError: the file cannot be written.
    """
    path = pathlib.Path(path)
    data = "".join(line_of(kernel, timing) + "\n" for kernel, timing in timings.items()).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock")):
            if anew and path.exists():
                old = path.with_name(path.name + ".old")
                if old.exists() and old.stat().st_size > path.stat().st_size:
                    path.unlink()
                else:
                    path.replace(old)
            with open(path, "a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # somebody died in the middle of a line
                        data = b"\n" + data
                elif on:
                    data = json.dumps({"on": dict(on), "begun": time.time()}).encode() + b"\n" + data
                file.write(data)
                file.flush()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; free space or choose another place"
                         ) from error
