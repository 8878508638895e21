"""The machine whose predictions come nearest to what was measured of operations and collectives. No TensorFlow.

Every fit is of relative errors. Few samples tell each number, and some are disturbed by whoever else uses the machine:
the optimisers get a robust loss (soft L1), so that a single sample that took much too long moves a fit little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize, nnls

from pase_mtf.calibration.samples import CollectiveSample, OperationSample, Samples
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.cost.compute import ordering_passes
from pase_mtf.cost.signature import FILTER_GRADIENT, PRODUCTS
from pase_mtf.machine.machine import KINDS, LOCAL, Link, Machine

__all__ = ["NODE_SECONDS", "fit_machine", "relative_errors"]

NODE_SECONDS = 1e-6
"""What a node costs where the samples do not tell."""

_TOLERANCE = 0.02  # relative error from which on the robust loss grows with the error, not with its square
_NOTHING = 1e-3  # a sum of relative errors that does not count
_RATES = math.log(1e8), math.log(1e15)  # FLOP/s or elements/s
_OVERHEADS = 0.0, 1e-3  # seconds


def fit_machine(samples: Samples, devices: int, shared: bool, memory_bytes: float) -> Machine:
    """Fits the machine "local".

    Args:
      samples: of all that was measured.
      devices: how many took part.
      shared: whether they share cores.
      memory_bytes: what one device can hold.
    """
    operations = samples.operations
    bandwidth, cache_bytes, cache_bandwidth = _fit_traffic(operations["traffic"])
    machine = Machine(LOCAL, dict.fromkeys(KINDS, 1e12), bandwidth, memory_bytes, 0.0,
                      (Link(max(devices, 2), bandwidth, 0.0),), shared, cache_bytes, cache_bandwidth)
    rates = {kind: _fit_kind(operations[kind], machine, kind, start=False).rate
             for kind in ("pointwise", "reduction", "gather")}
    machine, found = _fit_ordered_kinds(operations, machine)
    rates |= {kind: fit.rate for kind, fit in found.items()}
    # An operation of such a kind is a node like any other, and takes the rest of what it needs to start.
    overhead = _fit_node(operations.get("node", ()))
    overheads = {kind: max(fit.overhead - overhead, 0.0) for kind, fit in found.items()}
    machine = dataclasses.replace(machine, rates=rates, overhead=overhead, overheads=overheads)
    ratio, capacity = _fit_cache_hits(operations, overhead + overheads.get("matmul", 0.0), devices if shared else 1)
    machine = dataclasses.replace(
        machine, cache_hit_cost_ratio=ratio, cache_capacity=capacity,
        broadcast_run_seconds=_fit_broadcast_runs(operations.get("broadcast", ()), machine))
    links, ring = machine.links, None
    if samples.collectives.get("all-reduce"):
        links = (_fit_link(samples.collectives["all-reduce"], machine, devices),)
    if samples.collectives.get("ring"):
        # Its operations have no other overhead than what is fitted here.
        ring = _fit_link(samples.collectives["ring"], dataclasses.replace(machine, overhead=0.0, ring=True), devices)
    return dataclasses.replace(machine, links=links, ring_link=ring)


def relative_errors(samples: Samples, machine: Machine) -> dict[str, np.ndarray]:
    """Kind of operation -> log(predicted / measured) of each of its samples."""
    found = {}
    for kind, rate in machine.rates.items():
        predict = _Predictor(samples.operations[kind], kind)
        start = machine.overhead + machine.overheads[kind] if kind in machine.overheads else 0.0
        found[kind] = np.log(predict(machine, rate, start) / predict.seconds)
    return found


def _columns(samples: Sequence[OperationSample], *names: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([getattr(sample, name) for sample in samples], np.float64) for name in names)


def _least_errors(predict: Callable[[np.ndarray], np.ndarray], seconds: np.ndarray, starts: Iterable[Sequence[float]],
                  bounds: Sequence[tuple[float, float]]) -> tuple[np.ndarray, float]:
    """The parameters within bounds whose predictions have the least relative errors.

    Args:
      predict: parameters -> seconds of every sample.
      seconds: that were measured.
      starts: parameters to start from; the errors have kinks and may have several local minima.
      bounds: of every parameter.

    Returns:
      (parameters, sum over the samples of |log(predicted / measured)|).
    """
    lower, upper = np.array(bounds).T

    def errors(shares: np.ndarray) -> np.ndarray:
        """Of parameters as shares of the way from the lower bounds to the upper ones."""
        return np.log(predict(lower + np.clip(shares, 0.0, 1.0) * (upper - lower)) / seconds)

    def total(shares: np.ndarray) -> float:
        return float(np.abs(errors(shares)).sum())

    best = min((least_squares(errors, np.clip((np.array(start) - lower) / (upper - lower), 0.0, 1.0), bounds=(0.0, 1.0),
                              loss="soft_l1", f_scale=_TOLERANCE, xtol=1e-6, ftol=1e-6, max_nfev=100).x
                for start in starts), key=total)
    # From there to the kinks.
    simplex = best + np.vstack([np.zeros(len(best)), np.diag(np.where(best < 0.5, 0.02, -0.02))])
    best = minimize(total, best, method="Nelder-Mead", bounds=[(0.0, 1.0)] * len(best),
                    options={"initial_simplex": simplex, "xatol": 1e-5, "fatol": 1e-5, "maxfev": 500}).x
    return lower + np.clip(best, 0.0, 1.0) * (upper - lower), total(best)


def _fit_traffic(samples: Sequence[OperationSample]) -> tuple[float, float, float]:
    """Memory bandwidth, bytes an operation may move at the cache's bandwidth, and that bandwidth."""
    nbytes, seconds = _columns(samples, "nbytes", "seconds")

    def predict(logs: np.ndarray) -> np.ndarray:
        bandwidth, cache_bytes, times = np.exp(logs)
        return (np.minimum(nbytes, cache_bytes) / times + np.maximum(nbytes - cache_bytes, 0.0)) / bandwidth

    slowest = math.log((nbytes / seconds).min())
    bounds = [(math.log(1e9), math.log(1e13)), (math.log(1 << 19), math.log(1 << 25)), (0.0, math.log(16))]
    starts = [(slowest, math.log(1 << power), math.log(times)) for power in range(19, 26) for times in (1.5, 4)]
    (bandwidth, cache_bytes, times), _ = _least_errors(predict, seconds, starts, bounds)
    return math.exp(bandwidth), math.exp(cache_bytes), math.exp(bandwidth + times)


@dataclasses.dataclass(frozen=True)
class _KindFit:
    """How fast operations of a kind are: the machine with the fields that were fitted with it, FLOP/s, seconds that an
    operation takes to start, and the error that is left."""

    machine: Machine
    rate: float
    overhead: float
    error: float


class _Predictor:
    """Seconds of operations: the longer of arithmetic and traffic, bringing operands into the kind's own order and out
    of it, and what it takes to start."""

    def __init__(self, samples: Sequence[OperationSample], kind: str) -> None:
        self.kind = kind
        self.flops, self.nbytes, self.read, self.ratio, self.taps, self.seconds, channels = _columns(
            samples, "flops", "nbytes", "read", "image_ratio", "taps", "seconds", "channels")
        self.channels = np.where(channels > 0, channels, np.inf)

    def __call__(self, machine: Machine, rate: float, overhead: float) -> np.ndarray:
        flops = self.flops * self.ratio ** machine.stride_inflation
        flops *= np.maximum(1.0, machine.simd_width / self.channels)
        before, after = ordering_passes(machine, self.kind)
        ordered = before * self.read + after * (self.nbytes - self.read)
        return (np.maximum(flops / rate, machine.traffic_seconds(self.nbytes)) + machine.traffic_seconds(ordered)
                + machine.tap_seconds * self.taps + overhead)


def _fit_kind(samples: Sequence[OperationSample], machine: Machine, kind: str, *, start: bool = True,
              **fields: float) -> _KindFit:
    """Fits the rate of a kind of operation, together with fields of the machine.

    Args:
      samples: of one kind of operation.
      machine: its traffic, and the values of the fields that are not fitted.
      kind: of the operations.
      start: whether the kind may have an overhead of its own.
      **fields: names of fields that are fitted -> the most they can be (0 the least).
    """
    predict = _Predictor(samples, kind)
    seconds = predict.seconds

    def at(values: np.ndarray) -> Machine:
        named: dict[str, Any] = dict(zip(fields, map(float, values), strict=True))
        return dataclasses.replace(machine, **named) if named else machine

    overheads = _OVERHEADS if start else (0.0, 1e-12)  # an optimiser's bounds are apart
    bounds = [_RATES, overheads, *((0.0, most) for most in fields.values())]
    fastest = math.log((predict.flops / seconds).max())
    starts = [(fastest + math.log(faster), 0.5 * seconds.min() * share, *(share * most for most in fields.values()))
              for faster, share in ((1.0, 0.05), (2.0, 0.5))]
    x, error = _least_errors(lambda x: predict(at(x[2:]), math.exp(x[0]), x[1]), seconds, starts, bounds)
    for place in range(2, len(x)):  # of what the samples do not tell, nothing
        without = np.where(np.arange(len(x)) == place, 0.0, x)
        if np.abs(np.log(predict(at(without[2:]), math.exp(x[0]), x[1]) / seconds)).sum() <= error + _NOTHING:
            x = without
    return _KindFit(at(x[2:]), math.exp(x[0]), float(x[1]) if start else 0.0, error)


_SIMD_WIDTHS = (0.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0)


def _fit_ordered_kinds(operations: dict[str, list[OperationSample]],
                       machine: Machine) -> tuple[Machine, dict[str, _KindFit]]:
    """Kinds that bring their operands into an order of their own: the machine with what that takes, and each kind."""
    found = {}
    # Processors have one of a few widths; one that no sample is narrower than changes nothing.
    narrowest = min(sample.channels for sample in operations["convolution"])
    best = min((_fit_kind(operations["convolution"], dataclasses.replace(machine, simd_width=width), "convolution",
                          stride_inflation=1.5, layout_conversion=4.0, tap_seconds=1e-8)
                for width in _SIMD_WIDTHS if not 0.0 < width <= narrowest), key=lambda fit: fit.error)
    machine, found["convolution"] = best.machine, best
    best = _fit_kind([*operations["matmul"], *operations.get("read", ())], machine, "matmul",
                     operand_packing=8.0, writeback=8.0)
    machine, found["matmul"] = best.machine, best
    for kind in (FILTER_GRADIENT, "copy", *PRODUCTS):
        if kind not in found and operations.get(kind):
            found[kind] = _fit_kind(operations[kind], machine, kind)
    return machine, found


def _fit_node(samples: Sequence[OperationSample]) -> float:
    """What a node costs, however little it does: the median of samples of next to no work."""
    seconds = [sample.seconds for sample in samples if sample.seconds > 0.0]
    return float(np.median(seconds)) if seconds else NODE_SECONDS


def _fit_broadcast_runs(samples: Sequence[OperationSample], machine: Machine) -> float:
    """What a broadcast run takes: the median of what such samples take longer than their arithmetic, traffic and
    node."""
    if not samples:
        return 0.0
    runs, seconds = _columns(samples, "broadcast_runs", "seconds")
    known = _Predictor(samples, "pointwise")(machine, machine.rates["pointwise"], machine.overhead)
    return max(float(np.median((seconds - known) / runs)), 0.0)


def _fit_cache_hits(operations: dict[str, list[OperationSample]], overhead: float,
                    devices: int) -> tuple[float, float]:
    """How many times as long as at first it takes to read weights again, and how many bytes stay in a cache for that:
    what fits best to products whose time is that of reading their weights; (1, 0) where nothing is gained.

    Args:
      operations: "read" and "cached read", of the same products.
      overhead: of a product, however small.
      devices: how many share the caches.
    """
    first = {sample.nbytes: sample.seconds - overhead for sample in operations.get("read", ())}
    again = [(sample.read * devices, sample.seconds - overhead, first.get(sample.nbytes, 0.0))
             for sample in operations.get("cached read", ())]
    nbytes, logs = np.array([(size, math.log(seconds / before)) for size, seconds, before in again
                             if min(seconds, before) > 0.0]).reshape(-1, 2).T
    best, least = (1.0, 0.0), float(np.abs(logs).sum())
    for capacity in nbytes:
        fits = nbytes <= capacity
        ratio = float(np.clip(np.exp(np.median(logs[fits])), 0.1, 0.95))  # the median has the least absolute errors
        error = float(np.abs(logs - np.where(fits, math.log(ratio), 0.0)).sum())
        if error < least:
            best, least = (ratio, float(capacity)), error
    return best


def _fit_link(samples: Sequence[CollectiveSample], machine: Machine, devices: int) -> Link:
    """Latency and bandwidth with which `allreduce_seconds` comes nearest to what was measured."""
    nbytes = np.array([sample.nbytes for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    groups, count = np.array([[float(sample.group) for sample in samples]]), np.full(len(samples), devices)

    def price(latency: float, inverse_bandwidth: float) -> np.ndarray:
        link = Link(max(devices, 2), 1.0 / inverse_bandwidth, latency)
        priced = dataclasses.replace(machine, links=(link,), ring_link=link if machine.ring else None)
        return allreduce_seconds(nbytes, groups, count, priced)

    # The price is linear in both.
    free = price(0.0, 1e-30)
    per_unit = np.column_stack([price(1.0, 1e-30) - free, price(0.0, 1.0) - free])
    wanted = np.maximum(seconds - free, 0.2 * seconds)
    (latency, inverse_bandwidth), _ = nnls(per_unit / wanted[:, None], np.ones(len(wanted)))
    return Link(max(devices, 2), float(1.0 / max(inverse_bandwidth, 1e-13)), float(latency))
