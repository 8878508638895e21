"""Measures the machine this runs on, through the code that training uses, with all devices busy at once.

Virtual CPU devices (the default) share the cores of one process: what is measured there is the rate of all of them
together. It takes one to three minutes; the numbers are kept in the user's cache directory until what they were
measured on changes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from pase_mtf.calibration.cache import check_request, fingerprint, memory_bytes
from pase_mtf.calibration.sampling import (
    Collective,
    Sample,
    benches,
)
from pase_mtf.calibration.training_steps import STEPS, fit_steps, measure_step
from pase_mtf.compat import tf
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.cost.compute import ordering_passes
from pase_mtf.cost.signature import FILTER_GRADIENT, PRODUCTS
from pase_mtf.errors import UsageError
from pase_mtf.machine.machine import KINDS, LOCAL, Link, Machine

__all__ = ["calibrate"]

def calibrate(devices: int = 8, kind: str = "cpu", *, progress: bool = True) -> Machine:
    """Measures the devices of this machine.

    Matrix products, convolutions, memory traffic, reductions, resharding and all-reduces of several sizes, with all
    devices busy at once, and whole training steps for what these leave unexplained; one to three minutes. Of
    virtual devices the work of the cores is measured, so that others who use the same cores disturb it little.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices of one process, which share its cores) or "gpu".
      progress: show a progress bar.

    Returns:
      The machine "local"; `measured` holds what it was measured on and every sample.

    Raises:
      UsageError: not that many devices of that kind.
    """
    check_request(devices, kind)
    if kind == "gpu" and len(tf.config.list_physical_devices("GPU")) < devices:
        raise UsageError(f"{devices} GPUs: this machine has {len(tf.config.list_physical_devices('GPU'))}; "
                         "use fewer, or virtual CPU devices")
    samples, steps = {}, []
    with tqdm(total=STEPS, desc="measuring this machine", disable=None if progress else True, leave=False) as bar:
        for bench in benches(devices, kind):
            bar.total += len(bench)
            bar.refresh()
            samples.update(bench.measure(bar.update))
        for number in range(STEPS):
            steps.append(measure_step(devices, kind, number))
            bar.update()
    return fit_steps(_fit(samples, devices, kind), devices, [step for step in steps if step])


def _fit(samples: dict[str, list], devices: int, kind: str) -> Machine:
    """The machine whose predictions have the least relative errors."""
    shared, measured = kind == "cpu", samples
    memory_bandwidth, cache_bytes, cache_bandwidth = _fit_traffic(samples["traffic"])
    machine = Machine(
        LOCAL, dict.fromkeys(KINDS, 1e12), memory_bandwidth, memory_bytes() / (devices if shared else 1), 0.0,
        (Link(max(devices, 2), memory_bandwidth, 0.0),), shared, cache_bytes, cache_bandwidth)
    rates = {name: _fit_rate(samples[name], machine, name)[0] for name in ("pointwise", "reduction", "gather")}
    overheads = {}
    samples = {**samples, "matmul": [*samples["matmul"], *samples.get("read", ())]}
    machine = _fit_packing(samples["matmul"], _fit_convolution(samples["convolution"], machine))
    for name in ("convolution", FILTER_GRADIENT, "copy", *PRODUCTS):
        if samples.get(name):
            rates[name], overheads[name], _ = _fit_rate(samples[name], machine, name, starts=True)
    # An operation of such a kind is a node like any other, and takes the rest of what it needs to start.
    overhead = float(np.median([sample.seconds for sample in samples["node"]])) if samples.get("node") else 0.0
    machine = dataclasses.replace(machine, overhead=overhead,
                                  broadcast_run_seconds=_fit_rows(
                                      samples.get("spread", ()), machine, rates["pointwise"]))
    overheads = {name: max(seconds - overhead, 0.0) for name, seconds in overheads.items()}
    cache_hit_cost_ratio, cache_capacity = _fit_readings(samples, machine.overhead + overheads.get("matmul", 0.0),
                                           devices if shared else 1)
    machine = dataclasses.replace(machine, cache_hit_cost_ratio=cache_hit_cost_ratio, cache_capacity=cache_capacity)
    links = machine.links
    if samples.get("all-reduce"):
        links = (_fit_link(samples["all-reduce"], machine, devices),)
    ring = None
    if samples.get("ring"):
        # Its operations have no other overhead than what is fitted here.
        ring = _fit_link(samples["ring"], dataclasses.replace(machine, overhead=0.0, ring=True), devices)
    where = fingerprint(devices, kind)
    return dataclasses.replace(
        machine, rates=rates, overheads=overheads, links=links, ring_link=ring,
        source=f"measured here on {where['cores']:g} cores of {where['processor']}, {devices} {kind} devices, "
               f"TensorFlow {where['tensorflow']}",
        measured={"on": where, "samples": {
            name: [dataclasses.asdict(sample) for sample in found] for name, found in measured.items()}})


def _least_relative(rows: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Nonnegative x with the least sum of squares of (rows @ x - seconds) / seconds: (x, that sum)."""
    scaled, unknowns = rows / seconds[:, None], rows.shape[1]
    best = np.zeros(unknowns), np.inf
    # Few unknowns: try every set of those that are not zero.
    for chosen in itertools.product((False, True), repeat=unknowns):
        found = np.zeros(unknowns)
        if any(chosen):
            found[list(chosen)] = np.linalg.lstsq(scaled[:, list(chosen)], np.ones(len(seconds)), rcond=None)[0]
        error = float(np.square(scaled @ found - 1.0).sum())
        if found.min() >= 0 and error < best[1]:
            best = found, error
    return best


def _fit_traffic(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Memory bandwidth, bytes an operation may move at the cache's bandwidth, and that bandwidth."""
    nbytes = np.array([sample.nbytes for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    cache_bytes, bandwidth, times = (axis.ravel() for axis in np.meshgrid(
        np.geomspace(1 << 19, 1 << 25, 13), np.geomspace(1e9, 1e13, 121), np.geomspace(1, 16, 33)))
    # Few samples, some of them disturbed: the least sum of relative errors, not of their squares.
    errors = np.zeros(len(bandwidth))
    for moved, measured in zip(nbytes, seconds, strict=True):
        predicted = (np.minimum(moved, cache_bytes) / times + np.maximum(moved - cache_bytes, 0)) / bandwidth
        errors += np.abs(np.log(predicted / measured))
    best = int(np.argmin(errors))
    return float(bandwidth[best]), float(cache_bytes[best]), float(bandwidth[best] * times[best])


_OVERHEADS = np.concatenate([[0.0], np.geomspace(1e-6, 1e-4, 25)])


def _fit_rate(samples: Sequence[Sample], machine: Machine, kind: str, *, starts: bool = False,
              ) -> tuple[float, float, float]:
    """What fits best to the longer of arithmetic and traffic, and the ordering of what is read and written.

    Args:
      samples: of one kind of operation.
      machine: its traffic, operand_packing and writeback, and what makes a convolution slow.
      kind: of the operations.
      starts: whether the kind may have an overhead of its own.

    Returns:
      (FLOP/s, overhead, the error that is left).
    """
    flops, nbytes, read, seconds = (np.array([getattr(sample, name) for sample in samples])
                                    for name in ("flops", "nbytes", "read", "seconds"))
    flops = flops * [
        sample.gaps ** machine.stride_inflation * max(1.0, machine.simd_width / (sample.channels or np.inf))
        for sample in samples]
    traffic = machine.traffic_seconds(nbytes)
    before, after = ordering_passes(machine, kind)
    ordering = machine.traffic_seconds(before * read + after * (nbytes - read))
    ordering = ordering + machine.tap_seconds * np.array([sample.rows for sample in samples])
    rates = np.geomspace(1e8, 1e15, 701)
    best = np.inf, 0.0, 0.0
    for overhead in _OVERHEADS if starts else _OVERHEADS[:1]:
        predicted = np.maximum(flops / rates[:, None], traffic) + ordering + overhead
        errors = np.abs(np.log(predicted / seconds)).sum(axis=1)
        index = int(np.argmin(errors))
        if errors[index] < best[0]:
            best = float(errors[index]), float(rates[index]), float(overhead)
    return best[1], best[2], best[0]


def _best(samples: Sequence[Sample], machine: Machine, kind: str, **choices: Sequence[float]) -> Machine:
    """The machine with the values of some fields (all combinations of these are tried) that fit best, each at the rate
    and overhead that fit best with them."""
    machines = [dataclasses.replace(machine, **dict(zip(choices, map(float, values), strict=True)))
                for values in itertools.product(*choices.values())]
    return min(machines, key=lambda each: _fit_rate(samples, each, kind, starts=True)[2])


def _fit_packing(samples: Sequence[Sample], machine: Machine) -> Machine:
    """How often the operands of a matrix product are read again, and how often its output is written."""
    return _best(samples, machine, "matmul", operand_packing=np.linspace(0.0, 8.0, 17),
                 writeback=np.linspace(0.0, 8.0, 17))


_ROUNDS = 3  # of a fit of two pairs of fields in turn


def _fit_convolution(samples: Sequence[Sample], machine: Machine) -> Machine:
    """How many channels a convolution computes at a time, how far it computes over the gaps that a stride leaves, how
    often its tensors are read and written again, and what a pixel takes besides."""
    for _ in range(_ROUNDS):
        before = machine
        machine = _best(samples, machine, "convolution", simd_width=(0, 2, 4, 8, 12, 16, 24, 32),
                        stride_inflation=np.linspace(0.0, 1.5, 7))
        machine = _best(samples, machine, "convolution", layout_conversion=np.linspace(0.0, 4.0, 9),
                        tap_seconds=[0.0, *np.geomspace(1e-10, 1e-8, 11)])
        if machine == before:
            break
    return machine


def _fit_rows(samples: Sequence[Sample], machine: Machine, rate: float) -> float:
    """What a row takes, over which an elementwise operation spreads a smaller tensor: the median of what such samples
    take longer than their arithmetic, traffic and node."""
    if not samples:
        return 0.0
    flops, nbytes, rows, seconds = (np.array([getattr(sample, name) for sample in samples])
                                    for name in ("flops", "nbytes", "rows", "seconds"))
    known = np.maximum(flops / rate, machine.traffic_seconds(nbytes)) + machine.overhead
    return max(float(np.median((seconds - known) / rows)), 0.0)


def _fit_readings(samples: dict[str, list], overhead: float, devices: int) -> tuple[float, float]:
    """How many times as long as at first it takes to read weights again, and how many bytes stay in a cache for that:
    what fits best to products whose time is that of reading their weights; (1, 0) where nothing is gained.

    Args:
      samples: "read" and "cached read", of the same products.
      overhead: of a product, however small.
      devices: how many share the caches.
    """
    first = {sample.nbytes: sample.seconds - overhead for sample in samples.get("read", ())}
    found = [(sample.read * devices, (sample.seconds - overhead) / first[sample.nbytes])
             for sample in samples.get("cached read", ())
             if min(first.get(sample.nbytes, 0.0), sample.seconds - overhead) > 0.0]
    best, least = (1.0, 0.0), sum(abs(math.log(ratio)) for _, ratio in found)
    for most, _ in found:
        for cache_hit_cost_ratio in _COST_RATIOS:
            error = sum(abs(math.log(ratio / (cache_hit_cost_ratio if nbytes <= most else 1.0)))
                        for nbytes, ratio in found)
            if error < least:
                best, least = (float(cache_hit_cost_ratio), float(most)), error
    return best


_COST_RATIOS = np.linspace(0.1, 0.95, 18)


def _fit_link(samples: Sequence[Collective], machine: Machine, devices: int) -> Link:
    """Latency and bandwidth with which `allreduce_seconds` comes nearest to what was measured."""
    seconds = np.array([sample.seconds for sample in samples])
    rows = []
    for sample in samples:
        groups = np.array([[float(sample.group)]])
        count, nbytes = np.array([devices]), np.array([sample.nbytes])

        def price(latency: float, inverse_bandwidth: float, groups: Any = groups, count: Any = count,
                  nbytes: Any = nbytes) -> float:
            link = Link(max(devices, 2), 1.0 / inverse_bandwidth, latency)
            priced = dataclasses.replace(machine, links=(link,), ring_link=link if machine.ring else None)
            return float(allreduce_seconds(nbytes, groups, count, priced)[0])

        # The price is linear in both.
        base = price(0.0, 1e-30)
        rows.append([price(1.0, 1e-30) - base, price(0.0, 1.0) - base, base])
    rows = np.array(rows)
    found, _ = _least_relative(rows[:, :2], np.maximum(seconds - rows[:, 2], 0.2 * seconds))
    return Link(max(devices, 2), float(1.0 / max(found[1], 1e-13)), float(found[0]))
