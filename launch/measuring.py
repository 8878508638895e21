"""What was measured: the time of a step, and the memory of a device."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["MEMORY_METHOD", "Timing", "peak_bytes_per_device"]

MEMORY_METHOD = ("slice variables held + peak of the tensors live during one traced step (TensorFlow's allocation "
                 "records, per device; the largest device counts)")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Step times of one arm, in seconds.

    Attributes:
      median: of the measured steps.
      lower, upper: quartiles.
      steps: how many were measured.
    """

    median: float
    lower: float
    upper: float
    steps: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles: the "±" of a table."""
        return (self.upper - self.lower) / 2

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing | None:
        """The statistics of these step times; None where there are none."""
        if not len(seconds):
            return None
        lower, median, upper = np.percentile(seconds, (25, 50, 75))
        return cls(float(median), float(lower), float(upper), len(seconds))


def peak_bytes_per_device(step_stats: Any, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """The largest number of bytes each device held at one time during a traced step.

    On virtual CPU devices the process's memory is one pool and its resident size tells nothing about a device, but
    TensorFlow records every allocation and release with the device of the operation that made it.

    Args:
      step_stats: `tf.RunMetadata().step_stats` of a run with FULL_TRACE.
      held: bytes that live through the step without being allocated in it (variables), per device.

    Returns:
      Device name, as in "CPU:3", -> bytes.
    """
    records: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for device in step_stats.dev_stats:
        name = short_device(device.device)
        for node in device.node_stats:
            for memory in node.memory:
                records[name].extend((entry.alloc_micros, entry.alloc_bytes) for entry in memory.allocation_records)
    peaks = dict.fromkeys(map(short_device, held or {}), 0)
    for name, entries in records.items():
        peaks[name] = _peak(entries)
    for name, size in (held or {}).items():
        peaks[short_device(name)] += size
    return peaks


def _peak(entries: Iterable[tuple[int, int]]) -> int:
    # Within one microsecond releases first: the clock is too coarse to tell, and a forwarded buffer is not held twice.
    live = peak = 0
    for _, size in sorted(entries):
        live += size
        peak = max(peak, live)
    return peak


def short_device(name: str) -> str:
    """"/job:localhost/replica:0/task:0/device:CPU:3" -> "CPU:3"; stream traces of GPUs keep their own name."""
    return name.split("device:")[-1].split("/")[-1]
