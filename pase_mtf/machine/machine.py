"""A machine: how fast its devices compute, what they hold, and the links between them.

The numbers stand in configs/machines/*.json; the machine `local` is measured by `pase_mtf.calibration` instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import os
from typing import Any

import numpy as np

from pase_mtf.errors import FormatError, UsageError, shortened
from pase_mtf.machine.files import LOCAL, file_of, names, read_fields, write_fields
from pase_mtf.machine.link import Link

__all__ = ["KINDS", "LOCAL", "NARROW", "WIDE", "Link", "Machine"]

KINDS = ("matmul", "convolution", "pointwise", "reduction", "gather")
"""The kinds of operation that have a rate of their own (`LayerOperation.kind`, but for "none", which costs nothing)."""


NARROW = {"matmul": "matmul bfloat16", "batched matmul": "matmul bfloat16", "convolution": "convolution bfloat16",
          "filter gradient": "convolution bfloat16"}
"""Kinds that multiply -> the name of their rate for numbers of two bytes."""
WIDE = {"matmul": "matmul float64", "batched matmul": "matmul float64", "convolution": "convolution float64",
        "filter gradient": "convolution float64"}
"""And for numbers of eight bytes, which TF32 does not multiply."""
_SINGLE = {kind: f"{kind} float32" for kind in ("matmul", "convolution")}
"""Kinds -> the name of their rate in float32 where TensorFlow is told to leave TF32 alone."""
_RATED = (*KINDS, "batched matmul", "filter gradient", "copy", *dict.fromkeys(NARROW.values()), *_SINGLE.values(),
          *dict.fromkeys(WIDE.values()))
# Far beyond what there is, and far from what cannot be added up: times and rates of any machine lie between.
_LEAST, _MOST = 1e-3, 1e30
_MOST_DEVICES = 2 ** 31 - 1


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices and links, in seconds, bytes and FLOP.

    Attributes:
      name: of the machine.
      rates: kind of operation -> FLOP/s, per device (of all devices together where they share cores). Besides `KINDS`
        there may be a rate for "batched matmul" (many small matrix products in one operation), for "filter gradient"
        (of a convolution) and, in elements/s, for "copy" (slicing a tensor and concatenating it, where devices share
        memory). Those of "matmul" and "convolution" are of float32 as TensorFlow computes it, in TF32 where the device
        has that; without it they may have rates of their own (`without_tf32`), and so may products of numbers of two
        and of eight bytes (`NARROW`, `WIDE`).
      memory_bandwidth: bytes/s read and written, per device (all together where they share cores).
      memory_bytes: what one device can hold.
      overhead: seconds that every operation costs on every device, however small (kernel launch, graph node).
      overhead_within: what an operation takes has that in it: then it takes the longer of the two, not both. So have
        rates of products the transposes of what they multiply.
      links: innermost level first.
      shared_cores: the devices are virtual and share cores and memory. Then the time of a step is the work of all
        devices together at the common rate, replicated work is paid once per replica, a tensor is sent from device to
        device by reference, and what is summed, sliced or concatenated is so once for all devices that need it.
      sums_by_trees: sums between devices go by a library that takes trees where these are faster than rings. A graph
        per rank hands them to NCCL on GPUs (`lowering.ranks`), which does so since version 2.4.
      unfolding_threads: how many threads compute one gradient of a convolution where they unfold its images for it:
        TensorFlow's own kernels for processors, where it does not take oneDNN's (`cost.unfolded`). 0: nothing is.
      efficiency: (FLOP of one product or convolution on a device, what fraction of its rate it reaches), FLOP rising;
        straight lines between them. Small products do not fill a large device. Empty: all reach their rate.
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
    overhead_within: bool = False
    sums_by_trees: bool = False
    unfolding_threads: int = 0
    efficiency: tuple[tuple[float, float], ...] = ()
    source: str = ""
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise FormatError(f"machine {self.name!r}: {problem}; correct the number")

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bandwidth, self.overhead, self.links))

    @property
    def balance(self) -> float:
        """FLOP a device computes in the time in which it sends one byte over the weakest link: the paper's r."""
        return self.rates["matmul"] / min(link.bandwidth for link in self.links)

    @property
    def nodes(self) -> tuple[int, ...]:
        """How many devices each link joins but the outermost, which joins all."""
        return tuple(link.devices for link in self.links[:-1])

    def without_tf32(self) -> Machine:
        """The same where float32 is multiplied as such (`enable_tensor_float_32_execution(False)` of TensorFlow).

        Raises:
          UsageError: it may have TF32, and nobody says how fast it is without.
        """
        found = {kind: self.rates[name] for kind, name in _SINGLE.items() if name in self.rates}
        if len(found) < len(_SINGLE) and any(name in self.rates for name in NARROW.values()):
            raise UsageError(f"machine {self.name!r}: has no rates of {' and '.join(_SINGLE.values())}; add them to "
                             "its file, or take a data sheet that has them")
        return dataclasses.replace(self, rates={**self.rates, **found})

    def with_overhead(self, seconds: np.ndarray | float, nodes: np.ndarray | float = 1.0) -> np.ndarray:
        """Seconds of some nodes of a graph on one device, of those that they compute or move for."""
        overhead = np.asarray(nodes * self.overhead)
        return np.maximum(seconds, overhead) if self.overhead_within else seconds + overhead

    def check_devices(self, devices: int) -> None:
        """Raises UsageError when the machine's links do not join that many devices."""
        if type(devices) is not int or devices < 1:
            raise UsageError(f"{shortened(devices)} devices: at least one is needed")
        if devices > 1 and devices > self.links[-1].devices:
            raise UsageError(f"{shortened(devices)} devices: machine {self.name!r} links at most "
                             f"{self.links[-1].devices}; use fewer devices or another machine")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the machine as JSON, whole or not at all (UsageError: the file cannot be written)."""
        write_fields(path, dataclasses.asdict(self))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The machines that can be named: those of configs/machines, and "local"."""
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
    return _wrong_type(machine) or _wrong_number(machine) or _wrong_links(machine) or _wrong_efficiency(machine)


def _wrong_type(machine: Machine) -> str:
    for name in ("name", "source"):
        if not isinstance(getattr(machine, name), str):
            return f"{name} is {shortened(getattr(machine, name))}, not text"
    for name in ("shared_cores", "overhead_within", "sums_by_trees"):
        if not isinstance(getattr(machine, name), (bool, np.bool_)):
            return f"{name} is {shortened(getattr(machine, name))}, not true or false"
    if type(machine.unfolding_threads) is not int or machine.unfolding_threads < 0:
        return f"unfolding_threads is {shortened(machine.unfolding_threads)}, not 0 or more"
    if machine.unfolding_threads > _MOST_DEVICES:
        return f"unfolding_threads is {shortened(machine.unfolding_threads)}; at most {_MOST_DEVICES} can be told apart"
    for name in ("rates", "measured"):
        if not isinstance(getattr(machine, name), dict):
            return f"{name} is {shortened(getattr(machine, name))}, not a dictionary"
    for kind in machine.rates:
        if kind not in _RATED:
            return f"rates of {shortened(kind)}, which is no kind of operation; {', '.join(_RATED)} are"
    if not isinstance(machine.links, tuple) or not all(
            isinstance(link, Link) and type(link.devices) is int for link in machine.links):
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
    for what, number in named.items():
        if not (_is_number(number) and _LEAST <= number <= _MOST):
            return f"{what} is {shortened(number)}, not a number from {_LEAST:g} to {_MOST:g}"
    for what, number in (("overhead", machine.overhead), *(("latency", link.latency) for link in machine.links)):
        if not (_is_number(number) and 0 <= number <= _MOST):
            return f"{what} is {shortened(number)}, not a number from 0 to {_MOST:g}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _wrong_links(machine: Machine) -> str:
    domains = [link.devices for link in machine.links]
    if not domains or domains[0] < 1 or any(a >= b or b % a for a, b in itertools.pairwise(domains)):
        return (f"links join {shortened(domains)} devices; list them innermost first, each a multiple of the one "
                "before")
    if domains[-1] > _MOST_DEVICES:
        return f"links join {shortened(domains)} devices; at most {_MOST_DEVICES} can be told apart"
    return ""


def _wrong_efficiency(machine: Machine) -> str:
    points = machine.efficiency
    if not isinstance(points, tuple) or not all(
            isinstance(point, tuple) and len(point) == 2 and all(map(_is_number, point)) for point in points):
        return f"efficiency {shortened(points)}, not pairs of FLOP and a fraction"
    flops, fractions = [point[0] for point in points], [point[1] for point in points]
    if any(a >= b for a, b in itertools.pairwise(flops)) or any(a > b for a, b in itertools.pairwise(fractions)) or (
            not all(0.0 <= amount <= _MOST for amount in flops) or not all(0.0 < part <= 1.0 for part in fractions)):
        return (f"efficiency {shortened(points)}: list rising FLOP, each with a fraction above 0, at most 1, that does "
                "not fall")
    return ""
