"""A machine: how fast its devices compute, what they hold, and the links between them.

The numbers stand in configs/machines/*.json; the machine `local` is measured by `pase_mtf.calibration` instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from pase_mtf.errors import FormatError, UsageError, nearest
from pase_mtf.files import read_json, write_atomically

__all__ = ["KINDS", "LOCAL", "Link", "Machine"]

FORMAT = "pase_mtf.machine"
VERSION = 1

KINDS = ("matmul", "convolution", "pointwise", "reduction", "gather")
"""The kinds of operation that have a rate of their own (`LayerOperation.kind`, but for "none", which costs nothing)."""

LOCAL = "local"
"""The name of the machine that is measured, not read."""


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of the link hierarchy.

    Attributes:
      devices: this level joins aligned groups of this many consecutive devices (8 within a node of 8, then all).
      bandwidth: bytes per second and device, in one direction, when all devices of the group send at once.
      latency: seconds per message.
    """

    devices: int
    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices and links, in seconds, bytes and FLOP.

    Attributes:
      name: of the machine.
      rates: kind of operation -> FLOP/s, per device (of all devices together where they share cores). Besides `KINDS`
        there may be a rate for "batched matmul" (many small matrix products in one operation), for "filter gradient"
        (of a convolution) and, in elements/s, for "copy" (cutting a tensor and putting it together, where devices share
        memory).
      memory_bandwidth: bytes/s read and written, per device (all together where they share cores).
      cache_bytes, cache_bandwidth: what an operation reads and writes up to this many bytes goes at this rate instead
        (none: all at the memory's bandwidth).
      memory_bytes: what one device can hold.
      overhead: seconds that every operation costs on every device, however small (kernel launch, graph node).
      overheads: kind of operation -> seconds that it costs besides, where its kernels take longer to start.
      links: innermost level first.
      shared_cores: the devices are virtual and share cores and memory. Then the time of a step is the work of all
        devices together at the common rate, replicated work is paid once per copy, a tensor is handed from device to
        device by reference, and what is summed, cut or put together is so once for all devices that need it.
      operand_packing: how many times as long as reading its operands a matrix product takes to bring them into its own
        order, besides its arithmetic.
      writeback: how many times as long as writing its output it takes besides to bring that out of its own order.
      simd_width: a convolution computes at least so many of its output channels at a time, however few there are (0: no
        such limit).
      stride_inflation: how far the gradient of a convolution's image takes longer with stride: (image size / output
        size) to this power. 1 where it is computed over all of the image, gaps included, 0 where the gaps are left out.
      layout_conversion: how many times as long as reading and writing its tensors a convolution takes to bring them
        into its own order and out of it, besides its arithmetic.
      tap_seconds: what every pixel that a convolution makes takes besides, for every pixel of its window.
      broadcast_run_seconds: what every broadcast run takes besides, where an elementwise operation spreads a tensor
        over another of more dims (an offset per channel over an image): `LayerOperation.broadcast_runs`.
      cache_hit_cost_ratio: how many times as long as at first a matrix product takes to read (and bring into
        order) weights that another of the same layer has read before, as in a recurrence.
      cache_capacity: of such weights (of all devices together where they share cores), as many as stay in a cache; 0:
        none do.
      ring: all-reduces are Mesh-TF's own, not those of our lowering: rings of many small operations. Matters where the
        devices share cores.
      ring_link: what such a ring costs where it was measured: the latency counts for every operation that hands a block
        on, the operation included (without it, every operation's overhead and the link's latency).
      source: where the numbers come from, for people.
      measured: what it was measured on, and the raw numbers; empty for a machine from a data sheet.
    """

    name: str
    rates: dict[str, float]
    memory_bandwidth: float
    memory_bytes: float
    overhead: float
    links: tuple[Link, ...]
    shared_cores: bool = False
    cache_bytes: float = 0.0
    cache_bandwidth: float = math.inf
    operand_packing: float = 0.0
    writeback: float = 0.0
    overheads: dict[str, float] = dataclasses.field(default_factory=dict)
    simd_width: float = 0.0
    stride_inflation: float = 0.0
    layout_conversion: float = 0.0
    tap_seconds: float = 0.0
    broadcast_run_seconds: float = 0.0
    cache_hit_cost_ratio: float = 1.0
    cache_capacity: float = 0.0
    ring: bool = False
    ring_link: Link | None = None
    source: str = ""
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise FormatError(f"machine {self.name!r}: {problem}; correct the number")

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bandwidth, self.overhead, self.links))

    def traffic_seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """Seconds in which one operation reads and writes so many bytes."""
        if not self.cache_bytes:
            return nbytes / self.memory_bandwidth
        return (np.minimum(nbytes, self.cache_bytes) / self.cache_bandwidth
                + np.maximum(nbytes - self.cache_bytes, 0.0) / self.memory_bandwidth)

    @property
    def balance(self) -> float:
        """FLOP a device computes in the time in which it sends one byte over the weakest link: the paper's r."""
        return self.rates["matmul"] / min(link.bandwidth for link in self.links)

    def check_devices(self, devices: int) -> None:
        """Raises UsageError when the machine's links do not reach that many devices."""
        if devices < 1:
            raise UsageError(f"{devices} devices: at least one is needed")
        if devices > 1 and devices > self.links[-1].devices:
            raise UsageError(f"{devices} devices: machine {self.name!r} links at most {self.links[-1].devices}; "
                             "use fewer devices or another machine")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the machine as JSON, whole or not at all."""
        data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        if not self.cache_bytes:
            del data["cache_bytes"], data["cache_bandwidth"]  # JSON has no infinity
        write_atomically(path, json.dumps(data, indent=2) + "\n")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The machines that can be named: those with a file, and "local"."""
        return (*sorted(path.stem for path in _folder().glob("*.json")), LOCAL)

    @classmethod
    def load(cls, name_or_path: str | os.PathLike) -> Machine:
        """A machine by its name (`names()`) or from a file that `save` wrote.

        Raises:
          UsageError: a name that is not known, or "local", which is measured (`calibration.load.load_machine`).
          FormatError: the file is missing, truncated, something else, or holds numbers that no machine has.
        """
        text = os.fspath(name_or_path)
        if text == LOCAL:
            raise UsageError("machine 'local' is measured, not read; "
                             "call pase_mtf.calibration.load.load_machine('local', devices)")
        path = pathlib.Path(text)
        if path.suffix != ".json" and len(path.parts) == 1:
            path = _folder() / f"{text}.json"
            if not path.is_file():
                raise UsageError(f"unknown machine {text!r}: {nearest(text, cls.names())}")
        data = read_json(path, FORMAT, VERSION)
        del data["format"], data["version"]
        try:
            data["links"] = tuple(map(_link, data["links"]))
            data["ring_link"] = _link(data["ring_link"]) if data.get("ring_link") else None
            for field in ("memory_bandwidth", "memory_bytes", "overhead"):
                data[field] = float(data[field])
            data["rates"] = {kind: float(rate) for kind, rate in data["rates"].items()}
            data["cache_bandwidth"] = float(data.get("cache_bandwidth") or math.inf)
            return cls(**data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"{path}: not a complete machine file ({error}); it is truncated or foreign") from error
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error


def _link(data: dict[str, Any]) -> Link:
    return Link(int(data["devices"]), float(data["bandwidth"]), float(data["latency"]))


def _folder() -> pathlib.Path:
    from pase_mtf import configs
    return pathlib.Path(configs.__file__).parent / "machines"


def _problem(machine: Machine) -> str:
    """What is wrong with the numbers of a machine; empty when nothing is."""
    missing = [kind for kind in KINDS if kind not in machine.rates]
    if missing:
        return f"no rate for {', '.join(missing)}"
    named = {f"rate of {kind}": rate for kind, rate in machine.rates.items()}
    named["memory_bandwidth"], named["memory_bytes"] = machine.memory_bandwidth, machine.memory_bytes
    for link in machine.links:
        named[f"bandwidth of the link of {link.devices} devices"] = link.bandwidth
    if machine.cache_bytes:
        named["cache_bandwidth"] = machine.cache_bandwidth
    if machine.ring_link:
        named["bandwidth of a ring"] = machine.ring_link.bandwidth
    for what, number in named.items():
        if not (number > 0 and math.isfinite(number)):
            return f"{what} is {number}, not a positive number"
    latencies = [("latency", link.latency) for link in (*machine.links, *filter(None, [machine.ring_link]))]
    for what, number in (("overhead", machine.overhead), ("cache_bytes", machine.cache_bytes),
                         *((name, getattr(machine, name)) for name in (
                             "operand_packing", "writeback", "simd_width", "stride_inflation", "layout_conversion",
                             "tap_seconds", "broadcast_run_seconds", "cache_hit_cost_ratio", "cache_capacity")),
                         *latencies,
                         *((f"overhead of {kind}", seconds) for kind, seconds in machine.overheads.items())):
        if not (number >= 0 and math.isfinite(number)):
            return f"{what} is {number}, not a number of at least zero"
    reach = [link.devices for link in machine.links]
    if not reach or reach[0] < 1 or any(a >= b or b % a for a, b in itertools.pairwise(reach)):
        return f"links reach {reach} devices; list them innermost first, each a multiple of the one before"
    return ""
