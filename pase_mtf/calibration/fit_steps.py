"""What whole training steps tell of a machine beyond their parts. No TensorFlow.

In a step the operands of an operation (and its code) lie further away than where the same operation runs over and over
again, and a block that is sent from device to device wakes another thread and leaves the caches behind. How much slower
all of it is in a step, and what a message costs besides its bytes, is therefore fitted to steps that were made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import lsq_linear

from pase_mtf.calibration.samples import Step
from pase_mtf.cost.build import price_strategy
from pase_mtf.machine.machine import Machine

__all__ = ["fit_steps", "slow_down"]

_PRICE_ERROR = 0.1  # how far the price of a step may be off, relatively, for other reasons than latency
_LATENCY = 5e-6  # seconds: about what sending a block takes beyond its parts
_OVERHEAD = 3e-6  # seconds: about what a node costs beyond one in a row of them
_MOST = 2.0  # times as long as its parts, a step at most


def fit_steps(machine: Machine, devices: int, steps: Sequence[Step]) -> Machine:
    """The machine, slower by what whole steps take longer than their parts, with the overhead of an operation and the
    latency of a link that explain them best.

    Args:
      machine: fitted to parts of steps; its overhead and latency are the least that an operation and a message take.
      devices: how many took part.
      steps: that were measured.
    """
    def at(slowdown: float, overhead: float, latency: float) -> Machine:
        links = tuple(dataclasses.replace(link, latency=link.latency + latency) for link in machine.links)
        return dataclasses.replace(slow_down(machine, slowdown), overhead=machine.overhead + overhead, links=links)

    def price(slowdown: float, overhead: float, latency: float) -> np.ndarray:
        found = at(slowdown, overhead, latency)
        return np.array([price_strategy(step.graph, found, devices, step.configurations).total for step in steps])

    if not steps:
        return machine
    # The price is linear in all three; 1 us stays well within what floating point tells apart.
    small = 1e-6
    seconds, known = np.array([step.seconds for step in steps]), price(1.0, 0.0, 0.0)
    per_unit = np.column_stack([price(2.0, 0.0, 0.0) - known, (price(1.0, small, 0.0) - known) / small,
                                (price(1.0, 0.0, small) - known) / small])
    # Least squares of relative errors, and of an overhead and a latency that are no more than a few microseconds. Where
    # little is sent (between two devices, say), what a step takes beyond its price has other reasons; taken for
    # latency, it made searches avoid all-reduces that cost next to nothing.
    held = np.diag([0.0, _PRICE_ERROR / _OVERHEAD, _PRICE_ERROR / _LATENCY])[1:]
    # Microseconds, so that the unknowns are of like size.
    units = np.array([1.0, small, small])
    found = lsq_linear(np.vstack([per_unit / seconds[:, None], held]) * units,
                       np.append((seconds - known) / seconds, [0.0, 0.0]),
                       bounds=([0.0, 0.0, 0.0], [_MOST - 1.0, np.inf, np.inf]), method="bvls").x * units
    return at(1.0 + float(found[0]), float(found[1]), float(found[2]))


def slow_down(machine: Machine, times: float) -> Machine:
    """The machine, so many times slower in everything but its links and what a node costs by itself."""
    return dataclasses.replace(
        machine, rates={kind: rate / times for kind, rate in machine.rates.items()},
        overheads={kind: seconds * times for kind, seconds in machine.overheads.items()},
        memory_bandwidth=machine.memory_bandwidth / times, cache_bandwidth=machine.cache_bandwidth / times,
        tap_seconds=machine.tap_seconds * times, broadcast_run_seconds=machine.broadcast_run_seconds * times)
