"""Machines in files: where the data sheets are, and the JSON of a machine in each version of the format."""

from __future__ import annotations

import importlib.resources
import json
import numbers
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import NotRequired, TypedDict

from pase_mtf.errors import FormatError, UsageError, nearest, shortened
from pase_mtf.files import check_schema, read_json, write_atomically
from pase_mtf.machine.link import Link

__all__ = ["LOCAL", "file_of", "names", "read_fields", "write_fields"]

LOCAL = "local"
"""The name of the machine that is measured, not read."""

_FORMAT = "pase_mtf.machine"
_VERSION = 3
_FITTED = frozenset({
    "cache_bytes", "cache_bandwidth", "operand_packing", "writeback", "overheads", "simd_width", "stride_inflation",
    "layout_conversion", "tap_seconds", "broadcast_run_seconds", "cache_hit_cost_ratio", "cache_capacity", "ring",
    "ring_link", "packing", "storing", "lanes", "dilation", "reordering", "row_seconds", "reread", "reread_bytes"})
"""Fields of versions 1 and 2 that a fit to one processor filled in; data sheets left them at what means nothing."""
_RATIOS = ("cache_hit_cost_ratio", "reread")
"""Those of which 1 means nothing, where others are 0."""


class _LinkFields(TypedDict):
    devices: int
    bandwidth: float
    latency: float


class _MachineFields(TypedDict):
    """What a file holds, by the names of today; see Machine."""

    name: str
    rates: dict[str, float]
    memory_bandwidth: float
    memory_bytes: float
    overhead: float
    links: list[_LinkFields]
    shared_cores: NotRequired[bool]
    overhead_within: NotRequired[bool]
    sums_by_trees: NotRequired[bool]
    unfolding_threads: NotRequired[int]
    efficiency: NotRequired[list[list[float]]]
    source: NotRequired[str]
    measured: NotRequired[dict[str, object]]


def _folder() -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("pase_mtf.configs"))) / "machines"


def names() -> tuple[str, ...]:
    """The machines that can be named: those of configs/machines (data sheets, and what was measured), and "local"."""
    return (*sorted(path.stem for path in _folder().glob("*.json")), LOCAL)


def file_of(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
    """The file of a machine that is named, or the path itself.

    Raises:
      UsageError: a name that is not known, or "local", which is measured (`calibration.load.load_machine`).
    """
    text = os.fspath(name_or_path) if isinstance(name_or_path, (str, os.PathLike)) else name_or_path
    if not isinstance(text, str):
        raise UsageError(f"machine {shortened(name_or_path)}: give a Machine, its name, or the path of its file")
    if text == LOCAL:
        raise UsageError("machine 'local' is measured, not read; "
                         "call pase_mtf.calibration.load.load_machine('local', devices)")
    path = pathlib.Path(text)
    if path.suffix == ".json" or len(path.parts) != 1:
        return path
    sheet = _folder() / f"{text}.json"
    if not os.path.isfile(sheet):  # pathlib raises where no file can have the name
        raise UsageError(f"unknown machine {shortened(text)}; {nearest(text, names())}")
    return sheet


def read_fields(path: pathlib.Path) -> dict[str, Any]:
    """The fields of the machine in a file, by the names they have now.

    Raises:
      FormatError: the file is missing, truncated or something else.
    """
    data = read_json(path, _FORMAT, _VERSION)
    version = data.pop("version")
    del data["format"]
    if version < _VERSION:
        data = _without_fit(path, data)
    if path.parent != _folder():  # a test checks those: a search should not have to wait for it
        check_schema(path, data, _MachineFields)
    data["links"] = tuple(map(_link, data["links"]))
    data["efficiency"] = tuple(tuple(map(float, point)) for point in data.get("efficiency", ()))
    for field in ("memory_bandwidth", "memory_bytes", "overhead"):
        data[field] = float(data[field])
    data["rates"] = {kind: float(rate) for kind, rate in data["rates"].items()}
    return data


def _without_fit(path: pathlib.Path, data: Mapping[str, object]) -> dict[str, object]:
    """The fields of a machine of an earlier version, which may have been fitted: its rates mean nothing without the
    corrections that were fitted with them."""
    for name in sorted(_FITTED & set(data)):
        if data[name] and not (name in _RATIOS and data[name] == 1.0):
            raise FormatError(f"{path}: an earlier version fitted this machine ({name}), which is no longer done; "
                              "leave the file out, which measures it again")
    return {name: value for name, value in data.items() if name not in _FITTED}


def write_fields(path: str | os.PathLike[str], fields: Mapping[str, object]) -> None:
    """Writes the fields of a machine (plain values, as `dataclasses.asdict` gives them), whole or not at all."""
    data = {"format": _FORMAT, "version": _VERSION, **fields}
    write_atomically(path, json.dumps(data, indent=2, default=_plain) + "\n")


def _plain(value: object) -> object:
    """A number of NumPy's, or a fraction, as JSON has it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON holds")


def _link(data: _LinkFields) -> Link:
    return Link(data["devices"], float(data["bandwidth"]), float(data["latency"]))
