"""A machine: how fast its devices compute, what they hold, and the links between them.

The numbers stand in configs/machines/*.json; the machine `local` is measured by `pase_mtf.calibration` instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pase_mtf.errors import FormatError, UsageError, shortened
from pase_mtf.machine.files import LOCAL, file_of, names, read_fields, write_fields
from pase_mtf.machine.link import Link

__all__ = ["KINDS", "LOCAL", "Link", "Machine"]

KINDS = ("matmul", "convolution", "pointwise", "reduction", "gather")
"""The kinds of operation that have a rate of their own (`LayerOperation.kind`, but for "none", which costs nothing)."""


_RATED = (*KINDS, "batched matmul", "filter gradient", "copy")
# Far beyond what there is, and far from what cannot be added up: times and rates of any machine lie between.
_LEAST, _MOST = 1e-3, 1e30


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices and links, in seconds, bytes and FLOP.

    Attributes:
      name: of the machine.
      rates: kind of operation -> FLOP/s, per device (of all devices together where they share cores). Besides `KINDS`
        there may be a rate for "batched matmul" (many small matrix products in one operation), for "filter gradient"
        (of a convolution) and, in elements/s, for "copy" (slicing a tensor and concatenating it, where devices share
        memory).
      memory_bandwidth: bytes/s read and written, per device (all together where they share cores).
      cache_bytes, cache_bandwidth: what an operation reads and writes up to this many bytes goes at this rate instead
        (none: all at the memory's bandwidth).
      memory_bytes: what one device can hold.
      overhead: seconds that every operation costs on every device, however small (kernel launch, graph node).
      overheads: kind of operation -> seconds that it costs besides, where its kernels take longer to start.
      links: innermost level first.
      shared_cores: the devices are virtual and share cores and memory. Then the time of a step is the work of all
        devices together at the common rate, replicated work is paid once per replica, a tensor is sent from device to
        device by reference, and what is summed, sliced or concatenated is so once for all devices that need it.
      operand_packing: seconds in which a matrix product packs its operands (copies them into the order its kernel
        reads), in units of the time in which they are read.
      writeback: seconds in which it unpacks its output, in units of the time in which that is written.
      simd_width: a convolution computes at least so many of its output channels at a time, however few there are (0: no
        such limit).
      stride_inflation: the gradient of a convolution's image with stride takes (image size / output size) to this power
        times as long. 1: it is computed over the whole image with zeros between the strides; 0: the zeros are skipped.
      layout_conversion: seconds in which a convolution converts the layout of its tensors to its kernel's and back, in
        units of the time in which they are read and written.
      tap_seconds: seconds of a convolution per pixel that it makes and pixel of its window, besides the arithmetic.
      broadcast_run_seconds: seconds per broadcast run, where an elementwise operation broadcasts a tensor over another
        of more dims (an offset per channel over an image): `LayerOperation.broadcast_runs`.
      cache_hit_cost_ratio: seconds in which a matrix product reads and packs weights that another of the same layer has
        read before (as in a recurrence), in units of the time of the first.
      cache_capacity: bytes of such weights that stay in a cache (of all devices together where they share cores); 0:
        none.
      ring: all-reduces are Mesh-TF's own, not those of our lowering: rings of many small operations. Matters where the
        devices share cores.
      ring_link: what such a ring costs where it was measured; the latency is that of one of its messages with the
        operations that send and receive it (without it: every operation's overhead and the link's latency).
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

    def traffic_seconds(self, nbytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
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
        """Raises UsageError when the machine's links do not join that many devices."""
        if type(devices) is not int or devices < 1:
            raise UsageError(f"{shortened(devices)} devices: at least one is needed")
        if devices > 1 and devices > self.links[-1].devices:
            raise UsageError(f"{devices} devices: machine {self.name!r} links at most {self.links[-1].devices}; "
                             "use fewer devices or another machine")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the machine as JSON, whole or not at all."""
        write_fields(path, dataclasses.asdict(self))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The machines that can be named: those with a data sheet, and "local"."""
        return names()

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Machine:
        """A machine by its name (`names()`) or from a file that `save` wrote, in this version or an earlier one.

        Raises:
          UsageError: a name that is not known, or "local", which is measured (`calibration.load.load_machine`).
          FormatError: the file is missing, truncated, something else, or holds numbers that no machine has.
        """
        path = file_of(name_or_path)
        fields = read_fields(path)
        try:
            return cls(**fields)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error


def _problem(machine: Machine) -> str:
    """What is wrong with the fields of a machine; empty when nothing is."""
    return _wrong_type(machine) or _wrong_number(machine) or _wrong_links(machine)


def _wrong_type(machine: Machine) -> str:
    for name in ("name", "source"):
        if not isinstance(getattr(machine, name), str):
            return f"{name} is {shortened(getattr(machine, name))}, not text"
    for name in ("shared_cores", "ring"):
        if not isinstance(getattr(machine, name), (bool, np.bool_)):
            return f"{name} is {shortened(getattr(machine, name))}, not true or false"
    for name in ("rates", "overheads", "measured"):
        if not isinstance(getattr(machine, name), dict):
            return f"{name} is {shortened(getattr(machine, name))}, not a dictionary"
    for name in ("rates", "overheads"):
        for kind in getattr(machine, name):
            if kind not in _RATED:
                return f"{name} of {shortened(kind)}, which is no kind of operation; {', '.join(_RATED)} are"
    if not isinstance(machine.links, tuple) or not all(
            isinstance(link, Link) and type(link.devices) is int
            for link in (*machine.links, machine.ring_link or Link(1, 1.0, 1.0))):
        return "links that are no tuple of Links of whole numbers of devices"
    return ""


def _wrong_number(machine: Machine) -> str:
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
        if not (_is_number(number) and _LEAST <= number <= _MOST):
            return f"{what} is {shortened(number)}, not a number from {_LEAST:g} to {_MOST:g}"
    latencies = [("latency", link.latency) for link in (*machine.links, *filter(None, [machine.ring_link]))]
    for what, number in (("overhead", machine.overhead), ("cache_bytes", machine.cache_bytes),
                         *((name, getattr(machine, name)) for name in (
                             "operand_packing", "writeback", "simd_width", "stride_inflation", "layout_conversion",
                             "tap_seconds", "broadcast_run_seconds", "cache_hit_cost_ratio", "cache_capacity")),
                         *latencies,
                         *((f"overhead of {kind}", seconds) for kind, seconds in machine.overheads.items())):
        if not (_is_number(number) and 0 <= number <= _MOST):
            return f"{what} is {shortened(number)}, not a number from 0 to {_MOST:g}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _wrong_links(machine: Machine) -> str:
    domains = [link.devices for link in machine.links]
    if not domains or domains[0] < 1 or any(a >= b or b % a for a, b in itertools.pairwise(domains)):
        return f"links join {domains} devices; list them innermost first, each a multiple of the one before"
    return ""
