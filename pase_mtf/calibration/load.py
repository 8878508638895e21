"""The machine that a user asks for: given, named, in a file, or this one, measured. Every entry point asks here.

Imports no TensorFlow: only measuring needs it.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import TypeAlias, TypeGuard

from pase_mtf.calibration.cache import (
    cache_path,
    check_request,
    measuring_alone,
    read_cached,
    tensorflow_version,
    write_cached,
)
from pase_mtf.errors import UsageError, nearest, shortened
from pase_mtf.machine.kernel_table import is_table
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.runtime import Devices

__all__ = ["PRICES", "GivenMachine", "are_measured", "is_kernel_file", "is_local", "load_machine"]

GivenMachine: TypeAlias = Machine | str | os.PathLike[str] | None
"""What a caller may name as the machine: a Machine, the name of one, the path of its file, or "local" (None is the
same), which is measured. Where programs are priced, also the path of a file of kernel times."""

PRICES = ("roofline", "measured")
"""Where predicted times come from: the rates and links of a machine, or its kernels, each measured."""

_announced: set[str] = set()
"""What was said already: a search in a loop says it once."""


def is_local(machine: GivenMachine) -> bool:
    """Whether what a caller names as the machine is the one at hand, which is measured."""
    return machine is None or (isinstance(machine, (str, os.PathLike)) and os.fspath(machine) == LOCAL)


def is_kernel_file(machine: GivenMachine) -> TypeGuard[str | os.PathLike[str]]:
    """Whether what a caller names as the machine is a file of kernel times, which is no Machine."""
    return isinstance(machine, (str, os.PathLike)) and not is_local(machine) and is_table(machine)


def are_measured(prices: str | None, machine: GivenMachine, called: str = "prices") -> bool:
    """Whether prices are those of measured kernels.

    Args:
      prices: one of `PRICES`; None: what there is of the machine.
      machine: as of `load_machine`, or a file of kernel times.
      called: how the caller calls the prices: "prices" or "--prices".

    Raises:
      UsageError: no such prices, or rates of a machine of which a file knows the kernels only.
    """
    if prices is not None and prices not in PRICES:
        raise UsageError(f"{called}={shortened(prices, quoted=called == 'prices')}: unknown; {nearest(prices, PRICES)}")
    of_kernels = is_kernel_file(machine)
    if prices == "roofline" and of_kernels:
        dashes = "--" * called.startswith("--")
        raise UsageError(f"{called}={prices}: {dashes}machine={machine} holds the times of kernels, and no rates; "
                         "leave it out, or name a machine with rates, such as h100")
    return of_kernels or prices == "measured"


def load_machine(machine: GivenMachine = LOCAL, devices: int = 8, kind: str = "cpu", *,
                 again: bool = False, progress: bool = True, over: Devices | None = None) -> Machine:
    """The machine whose numbers a search takes.

    Where that is "local", one line on stderr says where its numbers come from: a measurement that was kept, or one that
    is made now (some seconds, once). Two runs on one host never measure at once, each other's load: one waits.

    Args:
      machine: a Machine; a name of configs/machines; the path of a file that `Machine.save` wrote; or "local" (None is
        the same): the devices at hand, from the cache or measured now.
      devices: how many devices "local" is measured for.
      kind: of these devices: "cpu" (virtual devices of one process) or "gpu".
      again: measure "local" even if there are numbers in the cache.
      progress: while measuring, show a progress bar, or, where the output is no terminal, say now and then how far it
        is.
      over: the same devices, where they belong to several processes: those are measured together, through their
        servers, which have to answer by then.

    Raises:
      UsageError: an unknown name; a file of kernel times; or "local" cannot be measured here: TensorFlow is not
        installed, or there are fewer devices.
      FormatError: a file that is missing, truncated, something else, or holds numbers that no machine has.
    """
    if isinstance(machine, Machine):
        return machine
    if is_kernel_file(machine):
        raise UsageError(f"{os.fspath(machine)}: holds kernel times, by which launcher, find_strategy and "
                         "find_layout price an mtf.Graph, and nothing else; take a machine")
    if machine is not None and not is_local(machine):
        return Machine.load(machine)
    check_request(devices, kind)
    if over is not None and len(over.tasks) < 2 and (
            over.tasks or kind != "gpu" or over.names == Devices.first(devices, kind).names):
        over = None  # else GPUs of a list, which are others than the first
    cached = None if again else _kept(devices, kind, over)
    if cached is not None:
        return cached
    if tensorflow_version() is None:
        sheets = ", ".join(name for name in Machine.names() if name != LOCAL)
        raise UsageError("machine 'local' is measured, which needs TensorFlow, and it is not installed; "
                         f"install it, or choose a data sheet: {sheets}")
    with measuring_alone(lambda: _announce("machine: local is measured by another run, which is waited for")) as waited:
        found = _kept(devices, kind, over) if waited and not again else None  # the other measured the same, perhaps
        return found or _measure(devices, kind, progress, over)


def _kept(devices: int, kind: str, over: Devices | None) -> Machine | None:
    cached = read_cached(devices, kind, over)
    if cached is not None:
        _announce(f"machine: local, {cached.source}, kept in {_short(cache_path(devices, kind, over))}")
    return cached


def _measure(devices: int, kind: str, progress: bool, over: Devices | None) -> Machine:
    # Measuring runs TensorFlow, which takes seconds to import.
    from pase_mtf.calibration.calibrate import calibrate, calibrate_processes
    what = f"{devices} {kind} devices" + (f" of {len(over.tasks)} processes" if over and over.tasks else "")
    _announce(f"machine: local is measured first, for {what} (some seconds, once)")
    if over and over.tasks:
        measured = calibrate_processes(over, progress=progress)
    else:
        measured = calibrate(devices, kind, progress=progress, **({"over": over} if over else {}))
    kept = write_cached(measured, devices, kind, over)
    where = f"kept in {_short(kept)}" if kept else f"cannot be kept in {_short(cache_path(devices, kind, over).parent)}"
    _announce(f"machine: local, {measured.source}, {where}")
    return measured


def _announce(line: str) -> None:
    if line not in _announced:
        _announced.add(line)
        print(line, file=sys.stderr, flush=True)


def _short(path: pathlib.Path) -> str:
    """The path, with ~ for the home folder."""
    try:
        return f"~/{path.relative_to(pathlib.Path.home())}"
    except (ValueError, RuntimeError):  # elsewhere, or no home
        return str(path)
