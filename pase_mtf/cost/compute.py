"""What a layer costs by itself: one function per term, and `layer_parts`, which adds them up.

Terms that grow with the size of a tensor are first written as sums over tensors, per kernel [(tensor, amount), ...]:
what fraction of each tensor a device holds under a configuration is then worked out once per tensor, not per kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.moves import move_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import FILTER_GRADIENT, PHASES, PRODUCTS, OperationSignature, TensorBytes, counted
from pase_mtf.cost.tables import ConfigurationTable
from pase_mtf.machine.machine import Machine

__all__ = ["PARTS", "layer_parts", "ordering_passes"]

PARTS = (*PHASES, "overhead", *(f"all-reduce {phase}" for phase in PHASES),
         *(f"resharding {phase}" for phase in PHASES))
"""The parts of a layer's cost, in the order of the rows of `layer_parts`: the arithmetic or memory traffic of each
phase, what every operation costs however small, the all-reduces and what is moved within the layer in each phase."""
_OVERHEAD, _ALLREDUCE, _RESHARDING = (PARTS.index(name) for name in (
    "overhead", "all-reduce forward", "resharding forward"))

_Terms = list[tuple[int, float]]
"""A sum over tensors: [(number of the tensor in `_Shares`, amount of the whole tensor), ...]."""


class _Kernel(NamedTuple):
    """Equal operations of a layer.

    Attributes:
      entry: what they are.
      times: how many of them.
      inputs: their tensors, with the bytes that would take as long to read for the first time.
      cached: they read weights that the kernel before this one has read, and may find them in a cache.
    """

    entry: OperationSignature
    times: int
    inputs: tuple[TensorBytes, ...]
    cached: bool = False


class _Shares:
    """Numbers the tensors of a layer: two whose split dims are the same are held in the same share."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, columns: Sequence[int]) -> int:
        """The number of a tensor by the columns of its dims, in any order; -1 among them is left out."""
        return self._numbers.setdefault(
            tuple(sorted(column for column in set(columns) if column >= 0)), len(self._numbers))

    def held(self, table: ConfigurationTable) -> np.ndarray:
        """float64 [tensors, K]: what fraction of each one device holds."""
        return np.stack([table.share(columns) for columns in self._numbers])

    def matrix(self, terms: Sequence[_Terms]) -> np.ndarray:
        """Sums over tensors as the rows of a matrix, float64 [len(terms), tensors]."""
        matrix = np.zeros((len(terms), len(self._numbers)))
        for row, entries in enumerate(terms):
            for column, amount in entries:
                matrix[row, column] += amount
        return matrix


def layer_parts(signature: Sequence[OperationSignature], table: ConfigurationTable,
                reshardings: Reshardings) -> np.ndarray:
    """Seconds per training step of a layer under each of its configurations, by part.

    A kernel takes the longer of its arithmetic and its memory traffic at the sizes one device holds, then the time to
    bring its tensors into its own order (operand packing, layout conversion), that of its broadcast runs or taps, and
    the overhead of its nodes. All-reduces and in-layer resharding come on top.
    Replicated work costs nothing extra on real devices (all replicas are computed at once); where devices share cores,
    every replica is paid.

    Args:
      signature: `layer_signature` of the layer.
      table: its configurations.
      reshardings: price what is moved within the layer, on the machine whose numbers count.

    Returns:
      float64 [len(PARTS), K].
    """
    result, machine = np.zeros((len(PARTS), len(table.devices))), reshardings.machine
    operations = counted(signature)
    kernels = [kernel for entry, times in operations.items() if entry.kind != "none"
               for kernel in _kernels(entry, times, machine)]
    if kernels:
        seconds = _kernel_seconds(kernels, table, machine)
        if any(kernel.cached for kernel in kernels):
            _charge_cache_misses(seconds, kernels, _exceeds_cache(operations, table, machine))
        # The work of all devices together, or that of the critical-path device (they are all alike).
        devices = table.devices if machine.shared_cores else np.ones(len(table.devices))
        for kernel, row in zip(kernels, seconds, strict=True):
            result[PHASES.index(kernel.entry.phase)] += kernel.times * devices * row
            result[_OVERHEAD] += kernel.times * devices * _overhead(kernel.entry, machine)
    for entry, times in operations.items():
        for columns, tensors in entry.sums:
            result[_ALLREDUCE + PHASES.index(entry.phase)] += times * _allreduce(columns, tensors, table, machine)
        if entry.move:
            result[_RESHARDING + PHASES.index(entry.phase)] += times * move_seconds(entry.move, table, reshardings)
    return result


# -- kernels ---------------------------------------------------------------------------------------------------------
def _kernels(entry: OperationSignature, times: int, machine: Machine) -> list[_Kernel]:
    """Equal operations; those that read weights for the first time apart from those that may hit them in a cache."""
    variables = max(_weights(entry), default=0)
    if not variables or not machine.cache_capacity or machine.cache_hit_cost_ratio == 1.0 or times <= variables:
        return [_Kernel(entry, times, entry.inputs)]
    hits = tuple((columns, nbytes * (machine.cache_hit_cost_ratio if weights else 1.0))
                 for (columns, nbytes), weights in zip(entry.inputs, entry.weights, strict=True))
    return [_Kernel(entry, variables, entry.inputs), _Kernel(entry, times - variables, hits, cached=True)]


def _weights(entry: OperationSignature) -> tuple[int, ...]:
    """`OperationSignature.weights` of a matrix product; of other operations nothing: what they read is small."""
    return entry.weights if entry.kind in PRODUCTS else ()


def _kernel_seconds(kernels: Sequence[_Kernel], table: ConfigurationTable, machine: Machine) -> np.ndarray:
    """What one operation of each kernel takes on one device without its overhead, float64 [kernels, K]."""
    shares = _Shares()
    work = [shares.number(kernel.entry.dims) for kernel in kernels]
    traffic = [_traffic(kernel, shares) for kernel in kernels]
    conversion = [_conversion(kernel, machine, shares) for kernel in kernels]
    runs = [_runs(kernel.entry, machine, shares) for kernel in kernels]
    held = shares.held(table)
    flops = np.array([kernel.entry.flops / _rate(machine, kernel.entry.kind) for kernel in kernels]).reshape(-1, 1)
    inflation = np.stack([_inflation(kernel.entry, table, machine) for kernel in kernels])
    seconds: np.ndarray = np.maximum(flops * held[work] * inflation,
                                     machine.traffic_seconds(shares.matrix(traffic) @ held))
    if any(conversion):
        seconds = seconds + machine.traffic_seconds(shares.matrix(conversion) @ held)
    if machine.tap_seconds or machine.broadcast_run_seconds:
        seconds = seconds + shares.matrix(runs) @ held
    return seconds


# -- arithmetic ------------------------------------------------------------------------------------------------------
def _rate(machine: Machine, kind: str) -> float:
    """FLOP/s of a kind of operation."""
    if kind == FILTER_GRADIENT and kind not in machine.rates:
        kind = "convolution"
    return machine.rates.get(kind) or machine.rates["matmul"]


def _inflation(entry: OperationSignature, table: ConfigurationTable, machine: Machine) -> np.ndarray:
    """How many times its own arithmetic a convolution computes, float64 [K], at least 1.

    It computes `Machine.simd_width` output channels at a time, however few there are, and may compute the gradient of
    its image over the zeros that its stride puts into the output (`Machine.stride_inflation`).
    """
    column, size = entry.channels
    inflation = entry.stride_inflation ** machine.stride_inflation
    if not size or machine.simd_width <= 1:
        return np.full(len(table.devices), inflation)
    channels = size * table.share((column,)) if column >= 0 else np.full(len(table.devices), float(size))
    total: np.ndarray = inflation * np.maximum(1.0, machine.simd_width / channels)
    return total


# -- memory ----------------------------------------------------------------------------------------------------------
def _traffic(kernel: _Kernel, shares: _Shares) -> _Terms:
    """Bytes that are read and written."""
    return [(shares.number(columns), kernel.entry.traffic * nbytes)
            for columns, nbytes in (*kernel.inputs, *kernel.entry.outputs)]


def _conversion(kernel: _Kernel, machine: Machine, shares: _Shares) -> _Terms:
    """Bytes that are read and written to bring tensors into the order of the kernel, and out of it.

    A tensor that has to be transposed is read and written once more; the operands of a matrix product are packed and
    its output written back, a convolution's layout is converted (`ordering_passes`).
    """
    terms = [(shares.number(columns), 2.0 * nbytes) for columns, nbytes in kernel.entry.transposed]
    before, after = ordering_passes(machine, kernel.entry.kind)
    for passes, tensors in ((before, kernel.inputs), (after, kernel.entry.outputs)):
        if passes:
            terms += [(shares.number(columns), passes * nbytes) for columns, nbytes in tensors]
    return terms


def ordering_passes(machine: Machine, kind: str) -> tuple[float, float]:
    """How many times an operation's inputs are read, and its outputs written, to bring them into its kind's own order
    and out of it; besides the once that all operations read and write."""
    if kind in PRODUCTS:
        return machine.operand_packing, machine.writeback
    if kind in ("convolution", FILTER_GRADIENT):
        return machine.layout_conversion, machine.layout_conversion
    return 0.0, 0.0


def _runs(entry: OperationSignature, machine: Machine, shares: _Shares) -> _Terms:
    """Seconds of a convolution's taps, or of the broadcast runs over which a smaller tensor is spread."""
    columns, count = entry.runs
    each = machine.tap_seconds if entry.kind == "convolution" else machine.broadcast_run_seconds
    return [(shares.number(columns), count * each)]


def _exceeds_cache(operations: Mapping[OperationSignature, int], table: ConfigurationTable,
                   machine: Machine) -> np.ndarray:
    """Whether the weights that are read again are more than a cache holds, bool [K]."""
    kept = {(tensor, count) for entry, times in operations.items()
            for tensor, count in zip(entry.inputs, _weights(entry), strict=False) if count and times > count}
    devices = table.devices if machine.shared_cores else 1
    held = sum((count * nbytes * table.share(columns) for (columns, nbytes), count in kept),
               np.zeros(len(table.devices)))
    exceeds: np.ndarray = held * devices > machine.cache_capacity
    return exceeds


def _charge_cache_misses(seconds: np.ndarray, kernels: Sequence[_Kernel], missed: np.ndarray) -> None:
    """Where the weights do not stay in the cache, those that read them again take as long as those that read first."""
    again = np.flatnonzero([kernel.cached for kernel in kernels])
    seconds[again] = np.where(missed, seconds[again - 1], seconds[again])


# -- what does not depend on sizes, and what crosses between devices --------------------------------------------------
def _overhead(entry: OperationSignature, machine: Machine) -> float:
    """What the nodes of an operation cost on every device, however small: the first starts its kernel."""
    first = machine.overhead + machine.overheads.get(entry.kind, 0.0)
    return first + (entry.nodes - 1) * machine.overhead


def _allreduce(reduced: Sequence[int], tensors: Sequence[TensorBytes], table: ConfigurationTable,
               machine: Machine) -> np.ndarray:
    """Combining the partial sums of some tensors over the split of the dims at some columns, float64 [K]."""
    nbytes = np.asarray(sum(size * table.share(columns) for columns, size in tensors))
    return allreduce_seconds(nbytes, group_sizes(table, reduced, machine), table.devices, machine)
