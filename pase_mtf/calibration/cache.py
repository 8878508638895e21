"""Where is kept what was measured of a machine, and what operations become on it; and what these depend on. No
TensorFlow: what is kept is read without it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import filelock
import platformdirs

from pase_mtf.errors import FormatError, UsageError, nearest, shortened
from pase_mtf.host import memory_bytes
from pase_mtf.machine.kernel_times import Circumstances
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import (
    MAX_DEVICES,
    Devices,
    cores,
    gpu_names,
    operation_threads,
    processor_name,
    uses_onednn,
)

__all__ = ["BACKENDS", "KERNEL_VERSION", "PROCESSES", "VERSION", "cache_path", "check_request", "code_version",
           "fingerprint", "fingerprint_of_kernels", "kernel_tables", "kernels_path", "measuring_alone", "read_cached",
           "seconds_waited", "tensorflow_build", "tensorflow_version", "traces_path", "write_cached"]

VERSION = 19
"""Of the way of measuring; cached numbers of another version are measured again."""

PROCESSES = "processes on"
"""Of a measurement through several processes: their hosts, by rank (`fingerprint`)."""

BACKENDS = ("cpu", "gpu")
"""Kinds of device that can be measured: virtual devices of one process, which share its cores, and GPUs."""


def check_request(devices: int, kind: str) -> None:
    """Raises UsageError for fewer than one device and for an unknown kind of device."""
    if devices < 1:
        raise UsageError(f"{devices} devices: at least one is needed")
    if kind not in BACKENDS:
        raise UsageError(f"unknown kind of device {kind!r}; {nearest(kind, BACKENDS)}")
    if kind == "cpu" and devices > MAX_DEVICES:  # a slip of the finger
        raise UsageError(f"{shortened(devices)} devices: at most {MAX_DEVICES} virtual ones can be driven; take fewer, "
                         "or name a data sheet, such as h100")


_BUILDS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm", "tensorflow-macos")
"""Packages that hold TensorFlow, in builds with other kernels."""


def _tensorflow() -> tuple[str, str] | tuple[None, None]:
    for package in _BUILDS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return package, importlib.metadata.version(package)
    return None, None


def tensorflow_build() -> str | None:
    """The package that holds the installed TensorFlow, which is not imported; None where there is none."""
    return _tensorflow()[0]


def tensorflow_version() -> str | None:
    """The version of the installed TensorFlow, which is not imported; None where there is none."""
    return _tensorflow()[1]


def fingerprint(devices: int, kind: str = "cpu", over: Devices | None = None) -> dict[str, object]:
    """What a measurement depends on: measured again when any of it changes.

    Args:
      devices: how many.
      kind: of device.
      over: the same devices, where they belong to several processes; None: to one.
    """
    together = over.on_one_host if over else devices
    # A machine's rates are those of kernels: where these are timed in another way it is measured again.
    return {"version": f"{VERSION}.{KERNEL_VERSION}", "kind": kind, "devices": devices,
            "processor": processor_name(), "cores": cores(), "threads": operation_threads(together),
            "memory": memory_bytes(), "tensorflow": tensorflow_version(), "build": tensorflow_build(),
            "onednn": uses_onednn(), "host": platform.node(),
            **({"gpus": _gpus(devices, over)} if kind == "gpu" else {}),
            **({PROCESSES: list(over.hosts)} if over and over.tasks else {})}


def _gpus(devices: int, over: Devices | None) -> list[str]:
    """What the GPUs are: those of a list, or the first."""
    known = gpu_names()
    if over is None or over.tasks:
        return known[:devices]
    return [known[int(name.rpartition(":")[2])] for name in over.names]


KERNEL_VERSION = 13
"""Of the way of timing kernels; times of another version are not read."""


def fingerprint_of_kernels(devices: int, kind: str = "cpu") -> Circumstances:
    """What the time of a kernel depends on besides itself: the machine, how many share its cores, and whose code it is:
    builds of one version of TensorFlow, with oneDNN or without it, have kernels of their own."""
    found = {**fingerprint(devices, kind), "version": KERNEL_VERSION,
            "gpus": gpu_names()[:devices] if kind == "gpu" else []}  # of every kind: a schema asks for it
    return cast(Circumstances, found)


def _folder() -> pathlib.Path:
    """The user's cache folder, which need not be there (UsageError: nobody knows where it would be)."""
    try:
        return platformdirs.user_cache_path("pase_mtf", appauthor=False)
    except RuntimeError as error:  # a user without a home, as in a container that does not know who runs it
        raise UsageError("there is no home folder, and so no place for what is measured; set HOME, or XDG_CACHE_HOME"
                         ) from error


def _cached(name: str, on: Mapping[str, object]) -> pathlib.Path:
    key = hashlib.sha256(json.dumps(on, sort_keys=True).encode()).hexdigest()[:12]
    return _folder() / name.format(key)


def kernels_path(devices: int, kind: str = "cpu") -> pathlib.Path:
    """The file of kernel times in the user's cache folder, a line of JSON per kernel."""
    return _cached(f"kernels-{kind}-{devices}-{{}}.jsonl", fingerprint_of_kernels(devices, kind))


def kernel_tables() -> list[pathlib.Path]:
    """All files of kernel times that are kept, those of other circumstances, too."""
    return sorted(_folder().glob("kernels-*.jsonl"))


def traces_path() -> pathlib.Path:
    """The file in the user's cache folder that keeps what operations become (`lowering.kept_traces`)."""
    return _folder() / "traces.sqlite"


def code_version() -> str | None:
    """What tells the code that lowers operations: the versions of what it is made with, and a digest of its own files,
    models' among them. None where these cannot be read."""
    digest = hashlib.sha256()
    try:
        for package in ("pase_mtf", "pase_mtf.models"):
            spec = importlib.util.find_spec(package)
            for folder in map(pathlib.Path, spec.submodule_search_locations or () if spec else ()):
                for path in sorted(filter(pathlib.Path.is_file, folder.rglob("*.py"))):
                    content = path.read_bytes()
                    digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
        versions = [f"{package} {importlib.metadata.version(package)}" for package in ("mesh-tensorflow", "numpy")]
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    return f"Python {platform.python_version()}, {' '.join(map(str, _tensorflow()))}, {', '.join(versions)}, " \
           f"{digest.hexdigest()[:16]}"


def cache_path(devices: int, kind: str = "cpu", over: Devices | None = None) -> pathlib.Path:
    """The file of a measured machine in the user's cache folder ($XDG_CACHE_HOME/pase_mtf, ~/.cache/pase_mtf)."""
    return _cached(f"machine-{kind}-{devices}-{{}}.json", fingerprint(devices, kind, over))


def read_cached(devices: int, kind: str = "cpu", over: Devices | None = None) -> Machine | None:
    """The machine that was measured under today's circumstances; None if there is none or its file is damaged."""
    path = cache_path(devices, kind, over)
    try:
        machine = Machine.load(path) if path.is_file() else None
    except (FormatError, OSError):
        return None  # a damaged cache is no reason to fail: it is measured again
    return machine if machine and machine.measured.get("on") == fingerprint(devices, kind, over) else None


_WAITED: list[float] = []
"""Seconds of every time that this process waited for another to have measured."""


def seconds_waited() -> float:
    """How long this process has waited for others to have measured (`measuring_alone`), all times together."""
    return sum(_WAITED)


@contextlib.contextmanager
def measuring_alone(wait: Callable[[], object]) -> Iterator[bool]:
    """Within the block no other process of this user measures this host, for however many devices.

    The system takes the lock from a process that dies. Where nothing can be locked, the block is entered all the same.

    Args:
      wait: called once if another process measures and has to be waited for.

    Yields:
      whether one had to wait.
    """
    path = _folder() / f"measuring-{platform.node()}.lock"
    lock, waited = filelock.FileLock(path), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            waited = True
            wait()
            begin = time.perf_counter()
            try:
                lock.acquire(poll_interval=0.2)
            finally:
                _WAITED.append(time.perf_counter() - begin)
    except (OSError, NotImplementedError):
        pass  # a cache that cannot be written to, or a file system without locks
    try:
        yield waited
    finally:
        lock.release()


def write_cached(machine: Machine, devices: int, kind: str = "cpu", over: Devices | None = None) -> pathlib.Path | None:
    """Keeps a measured machine: the path of its file, None where nothing can be written."""
    path = cache_path(devices, kind, over)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except (OSError, UsageError):
        return None  # not being able to keep the numbers does not make them wrong
    return path
