"""The times that kernels took on a machine, and what they tell of those that were not measured."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from typing_extensions import TypedDict

from pase_mtf.machine.kernels import Kernel, Timing
from pase_mtf.machine.references import PROBES

__all__ = ["DISTURBED", "Circumstances", "KernelTimes"]

_ALONG_AXES = frozenset({"All", "Any", "ArgMax", "ArgMin", "ConcatV2", "Cumsum", "ExpandDims", "GatherV2", "Max",
                         "Mean", "Min", "Prod", "Split", "SplitV", "Sum", "Transpose"})
"""What their small constants tell are axes; those of others are sizes, and where something begins."""

DISTURBED = 1.25
"""How many times as long as in calm sessions a probe takes in one that others disturb."""
_TELLING = 4
"""Sessions, that tell what is calm."""


def _without_sizes(kernel: Kernel) -> Hashable:
    """Equal for kernels that do the same to tensors of other sizes."""
    axes = kernel.operation in _ALONG_AXES
    return (kernel.operation, kernel.attributes, kernel.apart, kernel.again, tuple(
        (block.dtype, len(block.shape), block.value if axes else block.value is None)
        for block in (*kernel.inputs, *kernel.outputs)))


def _sizes_of(kernel: Kernel) -> tuple[int, ...]:
    return tuple(size for block in (*kernel.inputs, *kernel.outputs) for size in block.shape)


class Circumstances(TypedDict):
    """What kernels were measured on (`calibration.cache.fingerprint_of_kernels`)."""

    version: int
    kind: str
    devices: int
    processor: str
    cores: float
    threads: int
    memory: int
    tensorflow: str | None
    build: str | None
    onednn: bool
    gpus: list[str]
    host: str


class KernelTimes:
    """Kernels and what they took on one machine.

    Attributes:
      on: what they were measured on (processor, devices, threads, TensorFlow, ...).
      damaged: lines of a file that could not be read.
      updates: how often something was taken in: what was known may take another time since.
    """

    def __init__(self, on: Circumstances | None = None, timings: Mapping[Kernel, Timing] | None = None,
                 damaged: int = 0) -> None:
        self.on, self.damaged, self.updates = cast(Circumstances, dict(on or {})), damaged, 0
        self._timings = dict(timings or {})

    def __len__(self) -> int:
        return len(self._timings)

    def __contains__(self, kernel: object) -> bool:
        return kernel in self._timings

    def items(self) -> Iterable[tuple[Kernel, Timing]]:
        """All kernels with their times."""
        return self._timings.items()

    def get(self, kernel: Kernel) -> Timing | None:
        """What a kernel took; None where it was not measured."""
        return self._timings.get(kernel)

    def update(self, timings: Mapping[Kernel, Timing]) -> None:
        """Takes in what was measured; what was known before is replaced."""
        self._timings.update(timings)
        self.updates += 1
        for name in ("_rates", "_sizes", "calm"):
            vars(self).pop(name, None)

    def scaled(self, factor: float) -> KernelTimes:
        """The same kernels, all times multiplied."""
        return KernelTimes(self.on, {kernel: timing.scaled(factor) for kernel, timing in self._timings.items()},
                           self.damaged)

    def disturbed(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """Those that were timed while others slowed the machine, by what the probes of all sessions took that are kept;
        while few are, nobody can tell."""
        return [kernel for kernel in kernels
                if (timing := self._timings.get(kernel)) and self.slowed(timing) > DISTURBED]

    def slowed(self, timing: Timing) -> float:
        """How many times as long as in calm sessions a probe took while a kernel was timed; 1 where nobody knows."""
        if not (self.calm and timing.probed):
            return 1.0
        return max(seconds / self.calm[probe] for probe, seconds in zip(PROBES, timing.probed, strict=True))

    @functools.cached_property
    def calm(self) -> Mapping[Kernel, float]:
        """Seconds that each of the probes takes while nobody slows the machine: as in the best quarter of the sessions
        that are kept, for the best of all is an accident. Empty while few are known."""
        sessions = sorted({timing.probed for timing in self._timings.values() if timing.probed})
        if len(sessions) < _TELLING:
            return {}
        return dict(zip(PROBES, map(float, np.percentile(sessions, 25, axis=0)), strict=True))

    def bound(self, kernel: Kernel) -> float:
        """Seconds that the kernel takes at least, measured or not: its arithmetic at the best rate that any kernel of
        its family has reached here that was about as wide, or less; its traffic at the best rate that any kernel of its
        operation has that moved about as much, or more (where too few of an operation are known: any that copies); what
        the same kernel takes on smaller tensors; and no less than the shortest kernel took, which is all that is known
        of what may forward its tensor. No measured kernel is below its bound; of those that are not, docs/launcher.md
        tells how many were, once they were measured.

        Without any measurement: 0.
        """
        return self._rates.least if kernel.by_reference else self._at_best(kernel)

    def _at_best(self, kernel: Kernel) -> float:
        """Seconds of a kernel that is as good as any, also where it may forward its tensor and need not."""
        smaller = self._sizes.get(_without_sizes(kernel))
        return max(self._rates.seconds(kernel), smaller.bound(kernel) if smaller else 0.0)

    def estimate(self, kernel: Kernel, share: float = 0.5) -> float:
        """Seconds of a kernel: measured, else by the efficiency of its operation: as many times what its arithmetic and
        traffic take at the best rates as the kernels of that operation take in the median (of all operations, where
        none of its own was measured); and no less than the same kernel takes on smaller tensors.

        Args:
          kernel: which.
          share: of the kernels of that operation, that do not take more: half of them for the median.
        """
        found = self._timings.get(kernel)
        if found is not None:
            return found.seconds
        factors = self._rates.factors
        known = factors.get(kernel.operation) or factors.get("") or (1.0,)
        return max(self._at_best(kernel), self._rates.seconds(kernel) * known[int(share * len(known))])

    @functools.cached_property
    def _rates(self) -> _Rates:
        return _Rates.of(self._timings)

    @functools.cached_property
    def _sizes(self) -> dict[Hashable, _Sizes]:
        alike: dict[Hashable, list[tuple[tuple[int, ...], float]]] = {}
        for kernel, timing in self._timings.items():
            alike.setdefault(_without_sizes(kernel), []).append((_sizes_of(kernel), timing.seconds))
        return {key: _Sizes.of(found) for key, found in alike.items()}


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Measured kernels that differ in nothing but the sizes of their tensors.

    Attributes:
      sizes: N x dims.
      floors: the least that a kernel took that is no smaller in any dim, N: clocks err, and so one of larger tensors
        may seem to be shorter.
    """

    sizes: np.ndarray
    floors: np.ndarray

    @classmethod
    def of(cls, measured: Sequence[tuple[tuple[int, ...], float]]) -> _Sizes:
        sizes = np.array([entry for entry, _ in measured], dtype=np.int64).reshape(len(measured), -1)
        seconds = np.array([entry for _, entry in measured])
        return cls(sizes, np.array([seconds[(sizes >= own).all(axis=1)].min() for own in sizes]))

    def bound(self, kernel: Kernel) -> float:
        """What the longest of those takes that are no larger in any dim; 0 where there is none."""
        smaller = (self.sizes <= np.array(_sizes_of(kernel), dtype=np.int64)).all(axis=1)
        return float(self.floors[smaller].max(initial=0.0))


_ABOUT = 2.0
"""Times as easy, at most."""
_ENOUGH = 16
"""Kernels: fewer do not tell what is the best that such can reach."""


@dataclasses.dataclass(frozen=True)
class _Reached:
    """Rates that kernels reached, and how easy it was for them.

    Attributes:
      ease: N, ascending.
      rates: N, in FLOP/s or bytes/s: the best of those that had it no easier.
    """

    ease: np.ndarray
    rates: np.ndarray

    @classmethod
    def of(cls, reached: Sequence[tuple[float, float]]) -> _Reached:
        ease, rates = np.array(sorted(reached)).T
        return cls(ease, np.maximum.accumulate(rates))

    @property
    def highest(self) -> float:
        """The best rate of all."""
        return float(self.rates[-1])

    def best(self, ease: float) -> float | None:
        """The best rate of those that had it harder, of those that had it up to twice as easy, and of a few that had it
        easier in any case; None where these are too few to tell."""
        count = max(int(np.searchsorted(self.ease, _ABOUT * ease, side="right")),
                    int(np.searchsorted(self.ease, ease)) + _ENOUGH)
        return float(self.rates[count - 1]) if count <= len(self.rates) else None


@dataclasses.dataclass(frozen=True)
class _Rates:
    """What was reached: FLOP/s by family, which is easy for wide kernels; bytes/s by operation, and over all that copy
    (""), which is easy for those that are small enough for the caches; the shortest kernel; how far the others are from
    the best rates, per operation and over all (""), from the nearest to the farthest."""

    flops: Mapping[str, _Reached]
    nbytes: Mapping[str, _Reached]
    least: float
    factors: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, timings: Mapping[Kernel, Timing]) -> _Rates:
        flops = collections.defaultdict[str, list[tuple[float, float]]](list)
        nbytes = collections.defaultdict[str, list[tuple[float, float]]](list)
        for kernel, timing in timings.items():
            for name in (kernel.family, ""):
                flops[name].append((float(kernel.width), kernel.flops / timing.seconds))
            for name in _groups(kernel):
                nbytes[name].append((_ease_of_traffic(kernel), kernel.nbytes / timing.seconds))
        best = cls({name: _Reached.of(found) for name, found in flops.items()},
                   {name: _Reached.of(found) for name, found in nbytes.items()},
                   min((timing.seconds for timing in timings.values()), default=0.0), {})
        times: dict[str, list[float]] = {}
        for kernel, timing in timings.items():
            for name in (kernel.operation, ""):
                times.setdefault(name, []).append(timing.seconds / best.seconds(kernel))
        return dataclasses.replace(best, factors={name: sorted(found) for name, found in times.items()})

    def seconds(self, kernel: Kernel) -> float:
        """What a kernel takes at the best rates of those that have it no easier; 0 where nothing was measured that
        computes or moves anything. What may forward its tensor is not held to the rate of a few: they tell what a node
        takes, whatever its size."""
        known = self.flops.get(kernel.family) or self.flops.get("")
        flops = (known.best(kernel.width) or known.highest or math.inf) if known else math.inf
        groups = [self.nbytes[name] for name in _groups(kernel) if name in self.nbytes]
        nbytes = next((rate for group in groups if (rate := group.best(_ease_of_traffic(kernel)))),
                      groups[-1].highest or math.inf if groups and not kernel.by_reference else math.inf)
        return max(kernel.flops / flops, kernel.nbytes / nbytes, self.least)


def _groups(kernel: Kernel) -> tuple[str, ...]:
    """Which kernels move bytes as it does: those of its operation, where that does little else; else all that copy
    ("")."""
    if kernel.by_reference:
        return (kernel.operation,)
    return (kernel.operation, "") if kernel.family == "pointwise" else ("",)


def _ease_of_traffic(kernel: Kernel) -> float:
    return 1.0 / max(kernel.nbytes, 1)
