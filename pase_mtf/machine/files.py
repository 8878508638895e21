"""Machines in files: where the data sheets are, and the JSON of a machine in each version of the format."""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from typing_extensions import NotRequired, TypedDict

from pase_mtf.errors import UsageError, nearest, shortened
from pase_mtf.files import check_schema, read_json, write_atomically
from pase_mtf.machine.link import Link

__all__ = ["LOCAL", "file_of", "names", "read_fields", "write_fields"]

LOCAL = "local"
"""The name of the machine that is measured, not read."""

_FORMAT = "pase_mtf.machine"
_VERSION = 2
_FIRST_NAMES = {
    "packing": "operand_packing", "storing": "writeback", "lanes": "simd_width", "dilation": "stride_inflation",
    "reordering": "layout_conversion", "row_seconds": "broadcast_run_seconds", "reread": "cache_hit_cost_ratio",
    "reread_bytes": "cache_capacity"}
"""What fields were called in version 1 of the format -> what they are called now."""


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
    cache_bytes: NotRequired[float]
    cache_bandwidth: NotRequired[float | None]
    operand_packing: NotRequired[float]
    writeback: NotRequired[float]
    overheads: NotRequired[dict[str, float]]
    simd_width: NotRequired[float]
    stride_inflation: NotRequired[float]
    layout_conversion: NotRequired[float]
    tap_seconds: NotRequired[float]
    broadcast_run_seconds: NotRequired[float]
    cache_hit_cost_ratio: NotRequired[float]
    cache_capacity: NotRequired[float]
    ring: NotRequired[bool]
    ring_link: NotRequired[_LinkFields | None]
    source: NotRequired[str]
    measured: NotRequired[dict[str, Any]]


def _folder() -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("pase_mtf.configs"))) / "machines"


def names() -> tuple[str, ...]:
    """The machines that can be named: those with a data sheet in configs/machines, and "local"."""
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
    if not sheet.is_file():
        raise UsageError(f"unknown machine {text!r}; {nearest(text, names())}")
    return sheet


def read_fields(path: pathlib.Path) -> dict[str, Any]:
    """The fields of the machine in a file, by the names they have now.

    Raises:
      FormatError: the file is missing, truncated or something else.
    """
    data = read_json(path, _FORMAT, _VERSION)
    version = data.pop("version")
    del data["format"]
    if version == 1:
        data = {_FIRST_NAMES.get(name, name): value for name, value in data.items()}
    if path.parent != _folder():  # a test checks those: a search should not have to wait for it
        check_schema(path, data, _MachineFields)
    data["links"] = tuple(map(_link, data["links"]))
    data["ring_link"] = _link(data["ring_link"]) if data.get("ring_link") else None
    for field in ("memory_bandwidth", "memory_bytes", "overhead"):
        data[field] = float(data[field])
    data["rates"] = {kind: float(rate) for kind, rate in data["rates"].items()}
    data["cache_bandwidth"] = float(data.get("cache_bandwidth") or math.inf)
    return data


def write_fields(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Writes the fields of a machine (plain values, as `dataclasses.asdict` gives them), whole or not at all."""
    data = {"format": _FORMAT, "version": _VERSION, **fields}
    if not data["cache_bytes"]:
        del data["cache_bytes"], data["cache_bandwidth"]  # JSON has no infinity
    write_atomically(path, json.dumps(data, indent=2) + "\n")


def _link(data: Mapping[str, Any]) -> Link:
    return Link(data["devices"], float(data["bandwidth"]), float(data["latency"]))
