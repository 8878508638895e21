"""What a layer costs by itself: its arithmetic, its memory traffic, its operations, its all-reduces and moves."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.moves import Move, move_of, move_seconds
from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand
from pase_mtf.machine.machine import Machine

__all__ = ["FILTER_GRADIENT", "PARTS", "PHASES", "PRODUCTS", "Collective", "OperationSignature", "collectives_of",
           "layer_parts", "layer_signature", "ordering_passes"]

PHASES = ("forward", "backward", "update")

PARTS = (*PHASES, "overhead", *(f"all-reduce {phase}" for phase in PHASES),
         *(f"resharding {phase}" for phase in PHASES))
"""The parts of a layer's cost, in the order of the rows of `layer_parts`: the arithmetic or memory traffic of each
phase, what every operation costs however small, the all-reduces and what is moved within the layer in each phase."""
PRODUCTS = ("matmul", "batched matmul")
"""Kinds of operation that are matrix products."""
FILTER_GRADIENT = "filter gradient"
"""The kind of the gradient of a convolution's filter, where it has a rate of its own: its kernels start slowly."""


class OperationSignature(NamedTuple):
    """What the cost of an operation depends on; tensors as (columns of the dims that may be split, unsplit bytes).

    `nodes`, `traffic`: of `LayerOperation`. `channels`: of a convolution, the column and the size of the channels that
    it makes (column -1: never split). `gaps`: of the gradient of a convolution's image, how many times larger than the
    output the image is. `rows`: the columns that split them, and how many of them take time of their own: of a
    convolution, the pixels that it makes times those of its window; else `LayerOperation.broadcast_runs`. `weights`:
    for every input, how many variables of the layer look like it; where it reads none of them, 0 (nothing for updates).
    """

    phase: str
    kind: str
    flops: float
    dims: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], int], ...]
    outputs: tuple[tuple[tuple[int, ...], int], ...]
    reduced: tuple[int, ...]
    transposed: tuple[tuple[tuple[int, ...], int], ...]
    move: Move | None = None
    weights: tuple[int, ...] = ()
    nodes: int = 1
    traffic: float = 1.0
    channels: tuple[int, int] = (-1, 0)
    gaps: float = 1.0
    rows: tuple[tuple[int, ...], float] = ((), 0.0)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One all-reduce that a configuration costs.

    Attributes:
      operation: the name of the operation whose partial results it combines.
      phase: of that operation.
      devices: size of the group.
      nbytes: what each device contributes.
      seconds: of this all-reduce, in all groups.
    """

    operation: str
    phase: str
    devices: int
    nbytes: float
    seconds: float


def layer_signature(layer: Layer) -> tuple[OperationSignature, ...]:
    """What the cost of a layer depends on: equal for layers that differ in names only."""
    position = dim_positions(layer)

    def tensor(operand: Operand) -> tuple[tuple[int, ...], int]:
        columns = sorted(column for column in positions_of(operand.dims, position) if column >= 0)
        return tuple(columns), math.prod(operand.shape) * operand.itemsize

    variables = collections.Counter((variable.operand.dims, variable.operand.shape)
                                    for variable in layer.variables if variable.trainable)
    found = []
    for operation in layer.operations:
        move = move_of(operation, position)
        if operation.kind != "none" or operation.reduced or move:
            kind, transposed = operation.kind, ()
            if kind == "matmul" and len(operation.inputs) == 2:
                batched, moved = _product_order(operation)
                kind = "batched matmul" if batched else kind
                transposed = tuple(tensor(operand) for operand in moved)
            elif operation.type == "Conv2or3dBackpropFilterOperation":
                kind = FILTER_GRADIENT
            found.append(OperationSignature(
                operation.phase, kind, operation.flops, positions_of(operation.dims, position),
                tuple(tensor(operand) for operand in operation.inputs),
                tuple(tensor(operand) for operand in operation.outputs),
                positions_of(operation.reduced, position), transposed, move,
                tuple(variables[operand.dims, operand.shape] for operand in operation.inputs)
                if operation.phase != "update" else (), operation.nodes, operation.traffic,
                _lanes(operation, position), _gaps(operation), _rows(operation, kind, position)))
    return tuple(found)


def _lanes(operation: LayerOperation, position: dict[str, int]) -> tuple[int, int]:
    """Of a convolution or one of its gradients: column and size of the channels it makes, its output's last dim."""
    if operation.kind != "convolution" or not operation.outputs:
        return -1, 0
    output = operation.outputs[0]
    return positions_of(output.dims, position)[-1], output.shape[-1]


def _gaps(operation: LayerOperation) -> float:
    """Of the gradient of a convolution's image: the image's size over the output's, without batch and channels."""
    if operation.type != "Conv2or3dBackpropInputOperation" or operation.kind == "none":
        return 1.0
    image, gradient = operation.outputs[0].shape[1:-1], operation.inputs[0].shape[1:-1]
    return max(math.prod(image) / math.prod(gradient), 1.0)


def _rows(operation: LayerOperation, kind: str, position: dict[str, int]) -> tuple[tuple[int, ...], float]:
    """Columns and number of what takes time of its own in an operation: pixels of windows, or rows."""
    if kind == "convolution" and operation.outputs and operation.type != "Conv2or3dBackpropFilterOperation":
        # Filters are [window..., in, out], the second input of a convolution and of the gradient of its image.
        made, window = operation.outputs[0], operation.inputs[1].shape[:-2]
        count = math.prod(made.shape[:-1]) * math.prod(window)
    elif operation.broadcast_runs:
        made = max((*operation.outputs, *operation.inputs), key=lambda operand: math.prod(operand.shape))
        count = operation.broadcast_runs
    else:
        return (), 0.0
    return tuple(column for column in positions_of(made.dims[:-1], position) if column >= 0), float(count)


def _product_order(operation: LayerOperation) -> tuple[bool, list[Operand]]:
    """Whether an einsum is many matrix products, and which of its tensors have to be transposed for (or after) it.

    A matrix product takes its operands as [batch, free, contracted] or [batch, contracted, free] dims, and makes
    [batch, free of the first, free of the second].
    """
    # A dim without a name is known by its size.
    first, second, output = ([name or str(size) for name, size in zip(operand.dims, operand.shape, strict=True)]
                             for operand in (*operation.inputs, operation.outputs[0]))
    lead = next((name for name in output if (name in first) != (name in second)), None)
    operands = [(first, operation.inputs[0]), (second, operation.inputs[1])]
    if lead in second:
        operands.reverse()
    (first, _), (second, _) = operands
    batch = [name for name in first if name in second and name in output]
    contracted = [name for name in first if name in second and name not in output]
    moved, made = [], list(batch)
    for names, operand in operands:
        free = [name for name in names if name not in batch and name not in contracted]
        made += free
        if names not in ([*batch, *free, *contracted], [*batch, *contracted, *free]):
            moved.append(operand)
    if output != made:
        moved.append(operation.outputs[0])
    return bool(batch), moved


def layer_parts(signature: Sequence[OperationSignature], table: ConfigurationTable, machine: Machine) -> np.ndarray:
    """Seconds per training step of a layer under each of its configurations, by part.

    An operation takes the longer of its FLOP at the rate of its kind and its bytes at the memory's bandwidth, at the
    sizes one device holds, plus the overhead of its nodes; a matrix product also the time to bring its tensors into
    order. A convolution computes `Machine.simd_width` output channels at a time, however few there are, and may compute
    the gradient of its image over the gaps that its stride leaves (`Machine.stride_inflation`); its tensors are brought
    into order
    as well, and every pixel that it makes takes a little time, as does every row over which an elementwise operation
    spreads a smaller tensor.
    Of products that read the same weights (a recurrence), the later ones find them in a cache
    (`Machine.cache_hit_cost_ratio`).
    Replicated work costs nothing extra on real devices (all copies are computed at once); where devices share cores,
    every copy is paid.

    Args:
      signature: `layer_signature` of the layer.
      table: its configurations.
      machine: its numbers.

    Returns:
      float64 [len(PARTS), K].
    """
    count = len(table.devices)
    result = np.zeros((len(PARTS), count))
    if not signature:
        return result
    shares: dict[tuple[int, ...], int] = {}

    def share(columns: tuple[int, ...]) -> int:
        return shares.setdefault(tuple(sorted(column for column in set(columns) if column >= 0)), len(shares))

    operations = collections.Counter(signature)
    computing = [turn for entry, times in operations.items() if entry.kind != "none"
                 for turn in _turns(entry, times, machine)]
    flops = np.array([entry.flops / _rate(machine, entry.kind) for entry, _, _ in computing]).reshape(-1, 1)
    work = [share(entry.dims) for entry, _, _ in computing]
    moved = [[(share(columns), entry.traffic * nbytes) for columns, nbytes in (*inputs, *entry.outputs)]
             for entry, _, inputs in computing]
    # Read and written once more, per transposed tensor; the operands of a matrix product packed, its output stored.
    ordered = [[(share(columns), 2.0 * nbytes) for columns, nbytes in entry.transposed]
               + [(share(columns), passes * nbytes) for passes, tensors in zip(
                   ordering_passes(machine, entry.kind), (inputs, entry.outputs), strict=True)
                  for columns, nbytes in tensors if passes] for entry, _, inputs in computing]
    rows = [[(share(entry.rows[0]), entry.rows[1] * (
        machine.tap_seconds if entry.kind == "convolution" else machine.broadcast_run_seconds))]
        for entry, _, _ in computing]
    seconds = np.zeros((0, count))
    if computing:
        held = np.stack([table.share(columns) for columns in shares])
        wasted = np.stack([_wasted(entry, table, machine) for entry, _, _ in computing])
        seconds = np.maximum(flops * held[work] * wasted,
                             machine.traffic_seconds(_combine(moved, len(shares)) @ held))
        if any(ordered):
            seconds = seconds + machine.traffic_seconds(_combine(ordered, len(shares)) @ held)
        if machine.tap_seconds or machine.broadcast_run_seconds:
            seconds = seconds + _combine(rows, len(shares)) @ held
        again = [number for number, (entry, _, inputs) in enumerate(computing) if inputs is not entry.inputs]
        if again:
            # The row before each is that of the first time.
            lost = _too_large_to_stay(operations, table, machine)
            seconds[again] = np.where(lost, seconds[np.array(again) - 1], seconds[again])
    # The work of all devices together, or that of the slowest (they are all alike).
    devices = table.devices if machine.shared_cores else np.ones(count)
    for (entry, times, _), row in zip(computing, seconds, strict=True):
        result[PHASES.index(entry.phase)] += times * devices * row
        overhead = machine.overhead + machine.overheads.get(entry.kind, 0.0)
        result[len(PHASES)] += times * devices * (overhead + (entry.nodes - 1) * machine.overhead)
    for entry, times in operations.items():
        if entry.reduced:
            nbytes = sum(size * table.share(columns) for columns, size in entry.outputs)
            groups = group_sizes(table, entry.reduced, machine)
            result[len(PHASES) + 1 + PHASES.index(entry.phase)] += times * allreduce_seconds(
                nbytes, groups, table.devices, machine)
        if entry.move:
            result[len(PARTS) - len(PHASES) + PHASES.index(entry.phase)] += times * move_seconds(
                entry.move, table, machine)
    return result


def _turns(entry: OperationSignature, times: int, machine: Machine,
           ) -> list[tuple[OperationSignature, int, tuple[tuple[tuple[int, ...], float], ...]]]:
    """Operations of one kind, those that read weights for the first time apart from those that read them again:
    [(signature, how many, inputs as (columns, bytes that would take as long at first))]."""
    variables = max(_weights(entry), default=0)
    if not variables or not machine.cache_capacity or machine.cache_hit_cost_ratio == 1.0 or times <= variables:
        return [(entry, times, entry.inputs)]
    again = tuple((columns, nbytes * (machine.cache_hit_cost_ratio if alike else 1.0))
                  for (columns, nbytes), alike in zip(entry.inputs, entry.weights, strict=True))
    return [(entry, variables, entry.inputs), (entry, times - variables, again)]


def _weights(entry: OperationSignature) -> tuple[int, ...]:
    """`OperationSignature.weights` of a matrix product; of other operations nothing: what they read is small."""
    return entry.weights if entry.kind in PRODUCTS else ()


def _too_large_to_stay(operations: Mapping[OperationSignature, int], table: ConfigurationTable,
                       machine: Machine) -> np.ndarray:
    """Whether the weights that are read again are more than a cache holds: [K]."""
    kept = {(tensor, alike) for entry, times in operations.items()
            for tensor, alike in zip(entry.inputs, _weights(entry), strict=False) if alike and times > alike}
    devices = table.devices if machine.shared_cores else 1
    held = sum((alike * nbytes * table.share(columns) for (columns, nbytes), alike in kept),
               np.zeros(len(table.devices)))
    return held * devices > machine.cache_capacity


def _wasted(entry: OperationSignature, table: ConfigurationTable, machine: Machine) -> np.ndarray:
    """How many times its arithmetic a convolution takes because its channels do not fill the SIMD width, and because of
    the gaps that a stride leaves: [K], at least 1."""
    column, size = entry.channels
    gaps = entry.gaps ** machine.stride_inflation
    if not size or machine.simd_width <= 1:
        return np.full(len(table.devices), gaps)
    channels = size * table.share((column,)) if column >= 0 else np.full(len(table.devices), float(size))
    return gaps * np.maximum(1.0, machine.simd_width / channels)


def ordering_passes(machine: Machine, kind: str) -> tuple[float, float]:
    """How many times an operation's inputs are read, and its outputs written, to bring them into its kind's own order
    and out of it; besides the once that all operations read and write."""
    if kind in PRODUCTS:
        return machine.operand_packing, machine.writeback
    if kind in ("convolution", FILTER_GRADIENT):
        return machine.layout_conversion, machine.layout_conversion
    return 0.0, 0.0


def _rate(machine: Machine, kind: str) -> float:
    if kind == FILTER_GRADIENT and kind not in machine.rates:
        kind = "convolution"
    return machine.rates.get(kind) or machine.rates["matmul"]


def _combine(terms: list[list[tuple[int, float]]], width: int) -> np.ndarray:
    """A matrix of the sums of sparse rows [(column, value), ...]."""
    matrix = np.zeros((len(terms), width))
    for row, entries in enumerate(terms):
        for column, value in entries:
            matrix[row, column] += value
    return matrix


def collectives_of(layer: Layer, table: ConfigurationTable, machine: Machine) -> list[Collective]:
    """Every all-reduce of a layer under one configuration (the table's first), in graph order."""
    position = dim_positions(layer)
    found = []
    for operation in layer.operations:
        columns = positions_of(operation.reduced, position)
        groups = group_sizes(table, columns, machine)
        size = round(float(groups[:, 0].prod()))
        if size > 1:
            nbytes = sum(_local_bytes(operand, table, position) for operand in operation.outputs)
            seconds = allreduce_seconds(nbytes, groups, table.devices, machine)
            found.append(Collective(operation.name, operation.phase, size, float(nbytes[0]), float(seconds[0])))
    return found


def _local_bytes(operand: Operand, table: ConfigurationTable, position: dict[str, int]) -> np.ndarray:
    return (math.prod(operand.shape) * operand.itemsize) * table.share(positions_of(operand.dims, position))
