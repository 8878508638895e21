"""Measures what is missing of the kernels of strategies or pipelines, and tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.machine.kernels import Kernel

__all__ = ["measure", "measure_again", "missing_of"]


def missing_of(meter: KernelMeter | SavedKernels, counts: Mapping[Kernel, int]) -> list[Kernel]:
    """What is not measured and can be, what is estimated to matter most first.

    Args:
      meter: what is measured.
      counts: how often a step runs each kernel.
    """
    return meter.missing(_by_weight(meter, counts))


def _by_weight(meter: KernelMeter | SavedKernels, counts: Mapping[Kernel, int]) -> list[Kernel]:
    """Kernels, what is estimated to matter most first (`missing_of`)."""
    price = meter.times.estimate
    return sorted(counts, key=lambda kernel: -counts[kernel] * price(kernel))


def measure(meter: KernelMeter | SavedKernels, missing: list[Kernel], end: float, title: str,
            progress: Callable[[str], object]) -> int:
    """Measures kernels.

    Args:
      meter: measures them.
      missing: the most important ones first.
      end: of the time for that, by `time.perf_counter`.
      title: of what they are for; every line begins with it.
      progress: called with what is being done, a line.

    Returns:
      How many were measured.
    """
    done = 0
    progress(f"{title}: {len(missing)} kernels to measure, {len(meter.times)} are known")

    def told(count: int) -> None:
        nonlocal done
        done += count
        progress(f"{title}: {done} of {len(missing)} kernels are measured, {len(missing) - done} are left")

    before = meter.disturbed
    measured = meter.measure(missing, end - time.perf_counter(), told)
    if meter.disturbed > before:
        progress(f"others slow this machine: {meter.disturbed - before} of {measured} kernels were timed meanwhile, "
                 "and may seem to take longer than they do")
    return measured


def measure_again(meter: KernelMeter | SavedKernels, counts: Mapping[Kernel, int], end: float,
                  progress: Callable[[str], object]) -> int:
    """Times those kernels again that were timed while others slowed the machine.

    Args:
      meter: measures them.
      counts: how often a step runs each kernel.
      end: of the time for that, by `time.perf_counter`.
      progress: called with what is being done, a line.

    Returns:
      How many were timed again.
    """
    left = end - time.perf_counter()
    if left <= 0.0:
        return 0
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        progress(f"kernels that were timed while others slowed this machine: {done} are timed again")

    return meter.measure_again(_by_weight(meter, counts), left, told)
