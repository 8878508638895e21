"""Kernel times taken from one machine to another: one file of JSON, written whole, that holds a table for each number
of devices that was measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable

from typing_extensions import TypedDict

from pase_mtf.errors import FormatError, UsageError, shortened
from pase_mtf.files import check_schema, is_empty, one_at_a_time, path_of, read_json, says_format, write_atomically
from pase_mtf.machine.kernel_file import line_of, read_entry
from pase_mtf.machine.kernel_times import Circumstances, KernelTimes

__all__ = ["check_target", "is_table", "load_tables", "save_tables", "table_for"]

_FORMAT = "pase_mtf.kernels"
_VERSION = 1
_MOST_BYTES = 1 << 60
_ONE_EACH = ("devices", "threads")
"""What differs between the tables of one machine."""


class _Entry(TypedDict):
    seconds: float
    spread: float
    runs: int
    text: str
    kernel: dict[str, object]


class _Table(TypedDict):
    on: Circumstances
    kernels: list[_Entry]


class _File(TypedDict):
    """What a file holds."""

    tables: list[_Table]


def is_table(path: object) -> bool:
    """Whether a file says of itself that it holds kernel times, whatever else is wrong with it."""
    return says_format(path, _FORMAT)


def load_tables(path: str | os.PathLike[str]) -> tuple[KernelTimes, ...]:
    """The tables of a file that `save_tables` wrote, one for each number of devices.

    Raises:
      FormatError: the file is missing, truncated, something else, or holds what no kernel is or takes.
    """
    data = read_json(path, _FORMAT, _VERSION)
    content = {name: value for name, value in data.items() if name not in ("format", "version")}
    check_schema(path, content, _File)
    tables: dict[int, KernelTimes] = {}
    for table in content["tables"]:
        on = table["on"]
        if on["devices"] < 1 or not 1 <= on["memory"] <= _MOST_BYTES or not on["cores"] > 0.0:
            raise FormatError(f"{path}: measured on {shortened(on)}; it was changed or is foreign")
        if on["devices"] in tables:
            raise FormatError(f"{path}: two tables for {on['devices']} devices; it was changed or is foreign")
        timings = {}
        for entry in table["kernels"]:
            try:
                kernel, timing = read_entry(entry)
            except FormatError as error:
                raise FormatError(f"{path}: {error}") from error
            timings[kernel] = timing
        if not timings:
            raise FormatError(f"{path}: no kernels for {on['devices']} devices; measure some first")
        tables[on["devices"]] = KernelTimes(on, timings)
    if not tables:
        raise FormatError(f"{path}: holds no kernels; measure some first")
    return tuple(tables.values())


def table_for(path: str | os.PathLike[str], devices: int) -> KernelTimes:
    """The kernel times of a file for one number of devices: what devices that share cores take depends on that.

    Raises:
      FormatError: as `load_tables`.
      UsageError: none were measured for so many devices, or they are of GPUs.
    """
    tables = {times.on["devices"]: times for times in load_tables(path)}
    if devices not in tables:
        raise UsageError(f"{path}: holds kernels of {' and of '.join(map(str, sorted(tables)))} devices, not of "
                         f"{devices}; measure them there (python -m pase_mtf.calibration --model=NAME --mesh={devices} "
                         f"--save={os.fspath(path)}; --graph=MODULE:FUNCTION of your own program), or take as many")
    if tables[devices].on["kind"] != "cpu":
        raise UsageError(f"{path}: holds kernels of {tables[devices].on['kind'].upper()}s, and only those of devices "
                         "that share cores price a step; take a data sheet")
    return tables[devices]


def check_target(path: str | os.PathLike[str], on: Circumstances) -> tuple[KernelTimes, ...]:
    """What a file holds that kernel times are to be written to: nothing, or those of the same machine.

    Args:
      path: of the file.
      on: what the times were measured on, for any number of devices.

    Raises:
      UsageError: the file is something else, or of another machine.
    """
    if not os.path.lexists(path_of(path)) or is_empty(path):
        return ()
    try:
        before = load_tables(path)
    except FormatError as error:
        raise UsageError(f"{path} exists and holds no kernel times that can be read; choose another name") from error
    for times in before:
        held = _machine(times.on)
        # Their names may be the same: what is not, is said.
        if other := [name for name, value in _machine(on).items() if held.get(name) != value]:
            raise UsageError(f"{path} exists and holds kernel times of {_name(times.on)}, these are of {_name(on)} "
                             f"(another {', '.join(other)}); choose another name")
    return before


def save_tables(path: str | os.PathLike[str], tables: Iterable[KernelTimes]) -> None:
    """Writes kernel times, whole or not at all; tables of the same machine for other numbers of devices, which the file
    held before, stay.

    Args:
      path: of a new file, or of one that holds kernel times of the same machine.
      tables: each for another number of devices.

    Raises:
      UsageError: the file is something else, or of another machine; or it cannot be written.
    """
    merged = {times.on["devices"]: times for times in tables}
    with one_at_a_time("saving"):
        for times in check_target(path, next(iter(merged.values())).on):
            merged.setdefault(times.on["devices"], times)
        text = ",\n".join(_table_text(merged[devices]) for devices in sorted(merged))
        write_atomically(path, f'{{"format": "{_FORMAT}", "version": {_VERSION}, "tables": [\n{text}\n]}}\n')


def _table_text(times: KernelTimes) -> str:
    """A line per kernel, those of one operation together: people look at it, and compare two of them."""
    # Where it is taken nothing is timed again, whatever disturbed it here.
    entries = sorted((line_of(kernel, dataclasses.replace(timing, probed=())) for kernel, timing in times.items()),
                     key=lambda line: json.loads(line)["text"])
    return f'{{"on": {json.dumps(times.on)},\n "kernels": [\n  ' + ",\n  ".join(entries) + "\n]}"


def _machine(on: Circumstances) -> dict[str, object]:
    return {name: value for name, value in on.items() if name not in _ONE_EACH}


def _name(on: Circumstances) -> str:
    return f"{on['processor']} ({on['cores']:g} cores, {on['host']}, TensorFlow {on['tensorflow']})"
