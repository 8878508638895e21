"""What a layer does in each phase: its kernels, then the all-reduces of its groups, and what moves within it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import PHASES, layer_signature
from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import Layer, LayerOperation
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import groups

__all__ = ["LayerStages", "Stage", "first_operations", "gradient_seconds", "layer_stages"]

_KERNELS = [number for number, part in enumerate(PARTS) if part in (*PHASES, "overhead")]
_MOVES = [number for number, part in enumerate(PARTS) if part.startswith("resharding")]


class Stage(NamedTuple):
    """What a layer does in one phase under one configuration, on each of its devices.

    Attributes:
      kernels: seconds of its kernels, on each device.
      sums: (groups of devices, seconds of an all-reduce in each of them) of partial sums that what follows waits for.
      moves: seconds in which something moves between all of its devices.
      gradients: like `sums`, of the gradients of weights: only the update waits for them.
    """

    kernels: float
    sums: tuple[tuple[tuple[tuple[int, ...], ...], float], ...]
    moves: float
    gradients: tuple[tuple[tuple[tuple[int, ...], ...], float], ...]


@dataclasses.dataclass(frozen=True)
class LayerStages:
    """What a layer does under one configuration.

    Attributes:
      devices: on how many devices, 0, 1, ....
      stages: one per phase of `PHASES`.
    """

    devices: int
    stages: tuple[Stage, ...]


def first_operations(layer: Layer) -> tuple[int, ...]:
    """Per phase, where in the graph the layer's operations of that phase begin; without any, where those of the next
    phase do."""
    found = []
    for number, _ in enumerate(PHASES):
        later = [operation.index for operation in layer.operations if operation.phase in PHASES[number:]]
        found.append(min(later, default=layer.operations[-1].index if layer.operations else 0))
    return tuple(found)


def layer_stages(layer: Layer, configurations: Sequence[Configuration],
                 reshardings: Reshardings) -> tuple[LayerStages, ...]:
    """What a layer does under each of its configurations. The seconds of all stages add up to what `layer_parts` says.

    Where the devices share cores, every stage takes its share of all devices' work.

    Args:
      layer: of a graph.
      configurations: K of them.
      reshardings: price what is moved within the layer, on the machine whose numbers count.
    """
    machine, position = reshardings.machine, dim_positions(layer)
    table = ConfigurationTable.build(configurations, position, len(layer.dims))
    signature = layer_signature(layer)
    stages = []
    for phase in PHASES:
        parts = layer_parts([entry for entry in signature if entry.phase == phase], table, reshardings)
        kernels = parts[_KERNELS].sum(axis=0) / (table.devices if machine.shared_cores else 1)
        sums = _sums([operation for operation in layer.operations if operation.phase == phase], layer, table, position,
                     reshardings)
        stages.append([Stage(float(kernels[k]), sums[k][0], float(parts[_MOVES, k].sum()), sums[k][1])
                       for k in range(len(configurations))])
    return tuple(LayerStages(int(table.devices[k]), tuple(phase[k] for phase in stages))
                 for k in range(len(configurations)))


_Sums = tuple[tuple[tuple[tuple[int, ...], ...], float], ...]


def gradient_seconds(layer: Layer, configurations: Sequence[Configuration], reshardings: Reshardings) -> np.ndarray:
    """What the all-reduces of a layer's weights' gradients take under each of its configurations, float64 [K]: part of
    what `layer_parts` says, and what the backward pass of other layers may hide.

    Args:
      layer, configurations, reshardings: as of `layer_stages`.
    """
    position = dim_positions(layer)
    table = ConfigurationTable.build(configurations, position, len(layer.dims))
    found = _sum_seconds(layer.operations, layer, table, position, reshardings)
    return sum((taken for (gradient, _), taken in found.items() if gradient), np.zeros(len(configurations)))


def _sums(operations: Sequence[LayerOperation], layer: Layer, table: ConfigurationTable, position: dict[str, int],
          reshardings: Reshardings) -> list[tuple[_Sums, _Sums]]:
    """The all-reduces of some operations, per configuration: (those that what follows waits for, those of weights'
    gradients); those over the same groups as one."""
    seconds = _sum_seconds(operations, layer, table, position, reshardings)
    found = []
    for k, devices in enumerate(table.devices):
        entry: tuple[list[tuple[tuple[tuple[int, ...], ...], float]], ...] = ([], [])
        for (gradient, columns), taken in seconds.items():
            if taken[k] > 0.0:
                members = tuple(groups(int(devices), [(int(table.shards[k, column]), int(table.strides[k, column]))
                                                      for column in columns if column >= 0]))
                share = len(members) if reshardings.machine.shared_cores else 1
                entry[gradient].append((members, float(taken[k]) / share))
        found.append((tuple(entry[0]), tuple(entry[1])))
    return found


def _sum_seconds(operations: Sequence[LayerOperation], layer: Layer, table: ConfigurationTable,
                 position: dict[str, int], reshardings: Reshardings) -> dict[tuple[bool, tuple[int, ...]], np.ndarray]:
    """(whether of weights' gradients, columns of the dims whose split leaves partial sums) -> seconds of all-reduces,
    float64 [K]."""
    machine = reshardings.machine
    weights = {(variable.operand.dims, variable.operand.shape) for variable in layer.variables if variable.trainable}
    seconds: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}
    for operation in operations:
        for dims, outputs in operation.sums:
            columns = positions_of(dims, position)
            nbytes = sum((math.prod(output.shape) * output.itemsize * table.share(positions_of(output.dims, position))
                          for output in outputs), np.zeros(len(table.devices)))
            taken = allreduce_seconds(nbytes, group_sizes(table, columns, machine), table.devices, machine)
            gradient = operation.phase == "backward" and all(
                (output.dims, output.shape) in weights for output in outputs)
            key = gradient, tuple(sorted(set(columns)))
            seconds[key] = seconds.get(key, 0.0) + operation.trips * taken
    return seconds
