"""What a layer costs by itself: its arithmetic, its memory traffic, its operations, and its all-reduces."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph import Layer, Operand
from pase_mtf.machine import Machine

__all__ = ["PARTS", "PHASES", "Collective", "collectives_of", "layer_parts", "layer_signature"]

PHASES = ("forward", "backward", "update")

PARTS = (*PHASES, "overhead", *(f"all-reduce {phase}" for phase in PHASES))
"""The parts of a layer's cost, in the order of the rows of `layer_parts`: the arithmetic or memory traffic of each
phase, what every operation costs however small, and the all-reduces of each phase."""

# (phase, kind, flops, columns of its dims, ((columns, bytes) per tensor), (columns, bytes) per output, reduced columns)
_Signature = tuple


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


def layer_signature(layer: Layer) -> tuple[_Signature, ...]:
    """What the cost of a layer depends on: equal for layers that differ in names only."""
    position = dim_positions(layer)

    def tensor(operand: Operand) -> tuple[tuple[int, ...], int]:
        columns = sorted(column for column in positions_of(operand.dims, position) if column >= 0)
        return tuple(columns), math.prod(operand.shape) * operand.itemsize

    return tuple(
        (operation.phase, operation.kind, operation.flops, positions_of(operation.dims, position),
         tuple(tensor(operand) for operand in operation.inputs),
         tuple(tensor(operand) for operand in operation.outputs), positions_of(operation.reduced, position))
        for operation in layer.operations if operation.kind != "none" or operation.reduced)


def layer_parts(signature: Sequence[_Signature], table: ConfigurationTable, machine: Machine) -> np.ndarray:
    """Seconds per training step of a layer under each of its configurations, by part.

    An operation takes the longer of its FLOP at the rate of its kind and its bytes at the memory's bandwidth, at the
    sizes one device holds, plus the overhead. Replicated work costs nothing extra on real devices (all copies are
    computed at once); where devices share cores, every copy is paid.

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
    computing = [(entry, times) for entry, times in operations.items() if entry[1] != "none"]
    flops = np.array([entry[2] / machine.rates[entry[1]] for entry, _ in computing]).reshape(-1, 1)
    work = [share(entry[3]) for entry, _ in computing]
    traffic = [[(share(columns), nbytes) for columns, nbytes in (*entry[4], *entry[5])] for entry, _ in computing]
    matrix = np.zeros((len(computing), len(shares)))
    for row, tensors in enumerate(traffic):
        for column, nbytes in tensors:
            matrix[row, column] += nbytes / machine.memory_bandwidth
    held = np.stack([table.share(columns) for columns in shares]) if shares else np.zeros((0, count))
    seconds = np.maximum(flops * held[work], matrix @ held) if computing else np.zeros((0, count))
    # The work of all devices together, or that of the slowest (they are all alike).
    devices = table.devices if machine.shared_cores else np.ones(count)
    for (entry, times), row in zip(computing, seconds, strict=True):
        result[PHASES.index(entry[0])] += times * devices * row
        result[len(PHASES)] += times * devices * machine.overhead
    for entry, times in operations.items():
        if entry[6]:
            nbytes = sum(size * table.share(columns) for columns, size in entry[5])
            groups = group_sizes(table, entry[6], machine)
            result[len(PHASES) + 1 + PHASES.index(entry[0])] += times * allreduce_seconds(
                nbytes, groups, table.devices, machine)
    return result


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
