"""A machine file of what kernels reached on a GPU by the clock, in place of what its data sheet promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from pase_mtf.errors import UsageError
from pase_mtf.machine.kernels import Kernel
from pase_mtf.machine.machine import Machine

__all__ = ["counted", "fitted", "held_out", "kind_of", "rooflines"]

_GREAT = 2e8
"""Bytes from which on a kernel is limited by memory and by nothing else."""
_POINTS = (0.0, 1e8, 1e9, 1e10, 1e11)
_TINY = 1e4


def kind_of(kernel: Kernel) -> str:
    """The name of the rate of its arithmetic in a machine file."""
    narrow = kernel.family != "pointwise" and any(block.dtype == "bfloat16" for block in kernel.inputs)
    family = "convolution" if narrow and kernel.family == "filter gradient" else kernel.family
    return f"{family} bfloat16" if narrow else family


def rooflines(kernels: Sequence[Kernel], machine: Machine) -> np.ndarray:
    """Seconds of kernels at a machine's rates, float64 [kernels], as `cost.compute` has them for operations."""
    flops = np.array([kernel.flops for kernel in kernels])
    rates = np.array([machine.rates.get(kind) or machine.rates[kind.replace("filter gradient", "convolution")]
                      for kind in map(kind_of, kernels)])
    if machine.efficiency:
        multiplies = np.array([kernel.family != "pointwise" for kernel in kernels])
        rates = rates * np.where(multiplies, np.interp(flops, *np.transpose(machine.efficiency)), 1.0)
    result: np.ndarray = np.maximum(
        flops / rates, np.array([kernel.nbytes for kernel in kernels]) / machine.memory_bandwidth)
    return result


def fitted(kernels: Sequence[Kernel], seconds: np.ndarray, counts: np.ndarray, machine: Machine) -> Machine:
    """The rates, the curve of small products and the bandwidth with which rooflines are closest to the clock.

    Bandwidth is what half of the large pointwise kernels of float32 reach. Then all products and convolutions are
    fitted at once: a rate for each kind, no higher than the data sheet's, and one curve that all have in common, so
    that the logarithm of clock over roofline (and over what the shortest kernels take) is least in the square, each
    kernel as heavy as its part of the steps.

    Args:
      kernels: of many strategies.
      seconds: float64 [kernels], by the clock; nan: not known.
      counts: float64 [kernels], how often a step runs each.
      machine: of the data sheet; what is not fitted (links, overhead, other rates) is taken from it.

    Returns:
      The machine, its rates in FLOP/s, bytes/s and parts of a rate.
    """
    nbytes = np.array([float(kernel.nbytes) for kernel in kernels])
    flops = np.array([kernel.flops for kernel in kernels])
    kinds = np.array([kind_of(kernel) for kernel in kernels])
    wide = np.array([all(block.dtype != "bfloat16" for block in kernel.inputs) for kernel in kernels])
    pointwise, known = kinds == "pointwise", (seconds > 0) & (counts > 0)
    copying = np.array([not kernel.by_reference for kernel in kernels])
    large = known & pointwise & wide & copying & (nbytes > _GREAT)
    tiny = known & pointwise & (nbytes < _TINY)
    if not (large.any() and tiny.any()):  # the clock begins with those that take longest
        raise UsageError(f"{np.count_nonzero(~np.isnan(seconds))} of {len(seconds)} kernels were timed, and of the "
                         f"{'smallest' if large.any() else 'largest'} none that a step runs; give "
                         "benchmarks/gpu_clock.py more --seconds, or write the kernels of more --models")
    bandwidth = float(np.median(nbytes[large] / seconds[large]))
    floor = float(np.median(seconds[tiny]))
    used = known & ~pointwise
    rated = sorted({str(kind) for kind in kinds[used]})
    place = np.array([rated.index(str(kind)) for kind in kinds[used]])
    sheet = np.array([machine.rates.get(kind) or machine.rates["convolution"] for kind in rated])
    weights = np.sqrt(counts[used] * seconds[used])

    def predicted(free: np.ndarray) -> np.ndarray:
        curve = np.cumsum(free[:len(_POINTS)]) / np.sum(free[:len(_POINTS)])
        rates = (sheet * free[len(_POINTS):])[place] * np.interp(flops[used], _POINTS, curve)
        return np.maximum(flops[used] / rates, nbytes[used] / bandwidth) + floor

    found = least_squares(
        lambda free: weights * np.log(predicted(free) / seconds[used]),
        np.concatenate([np.diff(_POINTS, prepend=-1e8) ** 0.3 / 1e4, np.full(len(rated), 0.7)]),
        bounds=(1e-6, np.concatenate([np.full(len(_POINTS), 1e3), np.ones(len(rated))]))).x
    curve = np.cumsum(found[:len(_POINTS)]) / np.sum(found[:len(_POINTS)])
    rates = machine.rates | {kind: float(f"{rate:.4g}") for kind, rate in zip(
        rated, sheet * found[len(_POINTS):], strict=True)}
    return dataclasses.replace(
        machine, rates=rates, memory_bandwidth=float(f"{bandwidth:.4g}"),
        efficiency=tuple((point, float(f"{part:.3g}")) for point, part in zip(_POINTS, curve, strict=True)))


def held_out(kernels: Sequence[Kernel], seconds: np.ndarray, rows: Sequence[Mapping[str, Any]],
             machine: Machine) -> dict[str, np.ndarray]:
    """Model -> seconds of all kernels at the rates that those of all other models told, float64 [kernels].

    Args:
      kernels, seconds, machine: as in `fitted`.
      rows: strategies, with "model" and "counts" (number of a kernel -> how often).
    """
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        others = [row for row in rows if row["model"] != model]
        found[model] = rooflines(kernels, fitted(kernels, seconds, counted(others, len(kernels)), machine)
                                 if others else machine)
    return found


def counted(rows: Sequence[Mapping[str, Any]], number: int) -> np.ndarray:
    """float64 [number]: how often the strategies run each kernel, on one device in a step.

    Args:
      rows: strategies, with "counts" (number of a kernel -> how often).
      number: of kernels.
    """
    counts = np.zeros(number)
    for row in rows:
        for kernel, times in row["counts"].items():
            counts[int(kernel)] += times
    return counts
