"""Bytes a device holds under a strategy, by what they are for.

Every layer runs on devices 0, 1, ..., all of which hold equal shares: device 0 is always among the fullest, and the
bytes of the layers add up. Only what the backward pass computes once more (`mtf.recompute_grad`) is not there all the
time: the moment at which most of it is there counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.configurations import Configuration

__all__ = ["MEMORY_PARTS", "add_recomputed", "fullest_moment", "layer_memory", "recomputed_memory",
           "strategy_memory"]

MEMORY_PARTS = ("weights", "optimizer slots", "gradients", "activations", "communication buffers")
"""What the bytes are for, in the order of the rows of `layer_memory`."""
_WEIGHTS, _SLOTS, _GRADIENTS, _ACTIVATIONS, _BUFFERS = range(len(MEMORY_PARTS))


def layer_memory(layer: Layer, configurations: Sequence[Configuration]) -> np.ndarray:
    """Bytes of a layer on each of its devices, under each configuration.

    Weights and optimizer slots: the variables of the layer. Gradients: one per weight that is updated, of the type of
    the backward pass; two where a loop adds them up. Activations: what the forward pass computes, where a backward pass
    will read it (it may not read all of it: an upper bound); otherwise the largest tensor that is computed; of what is
    computed again, what others than that read (`recomputed_memory` is the rest). In a loop, of one iteration.
    Communication buffers: what arrives for the largest all-reduce.

    Args:
      layer: of a graph.
      configurations: K of its configurations.

    Returns:
      float64 [len(MEMORY_PARTS), K]; the parts, and the layers, add up.
    """
    position = dim_positions(layer)
    table = ConfigurationTable.build(configurations, position, len(layer.dims))
    local = _Local(table, position)
    result = np.zeros((len(MEMORY_PARTS), len(configurations)))
    phases = {operation.phase for operation in layer.operations}
    for variable in layer.variables:
        nbytes = local(variable.operand)
        result[_WEIGHTS if variable.trainable else _SLOTS] += nbytes
        if variable.trainable and ("update" in phases or variable.updated_by):
            gradient, count = _gradient_of(variable, layer)
            result[_GRADIENTS] += count * local(gradient)
    for operation in layer.operations:
        if operation.phase == "forward" and operation.kind != "none":
            nbytes = sum(map(local, _kept(operation)), np.zeros(len(configurations)))
            kept = result[_ACTIVATIONS]
            result[_ACTIVATIONS] = kept + nbytes if "backward" in phases else np.maximum(kept, nbytes)
        for dims, outputs in operation.sums:
            group = 1.0 / table.share(positions_of(dict.fromkeys(dims), position))
            # The partial sums of the others arrive in pieces, as large together as the device's own.
            reduced = sum(map(local, outputs), np.zeros(len(configurations)))
            result[_BUFFERS] = np.maximum(result[_BUFFERS], np.where(group > 1, reduced, 0.0))
    return result


class _Local:
    """The bytes of a tensor that a device holds, under each configuration."""

    def __init__(self, table: ConfigurationTable, position: dict[str, int]) -> None:
        self._table, self._position = table, position
        self._shares: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, operand: Operand) -> np.ndarray:
        columns = tuple(sorted(column for column in positions_of(operand.dims, self._position) if column >= 0))
        if columns not in self._shares:
            self._shares[columns] = self._table.share(columns)
        nbytes: np.ndarray = math.prod(operand.shape) * operand.itemsize * self._shares[columns]
        return nbytes


def _kept(operation: LayerOperation) -> list[Operand]:
    return [operand for number, operand in enumerate(operation.outputs) if number not in operation.unread]


def recomputed_memory(layer: Layer, configurations: Sequence[Configuration]) -> dict[int, np.ndarray]:
    """Bytes of what the backward pass computes again, with its gradients, at the moments at which a device holds most.

    Args:
      layer: of a graph.
      configurations: K of its configurations.

    Returns:
      Moment -> float64 [K], on each of the layer's devices. The layers add up.
    """
    found: dict[int, np.ndarray] = {}
    again = [operation for operation in layer.operations if operation.moments and operation.kind != "none"]
    if again:
        position = dim_positions(layer)
        local = _Local(ConfigurationTable.build(configurations, position, len(layer.dims)), position)
        for operation in again:
            for operand, moments in zip(operation.outputs, operation.moments, strict=True):
                for moment in moments:
                    found[moment] = found.get(moment, 0.0) + local(operand)
    return found


def fullest_moment(graph: ComputationGraph) -> int:
    """The moment at which most of what is computed again is there while nothing is split; 0 where nothing is."""
    total: dict[int, float] = {}
    for layer in graph.layers:
        for moment, nbytes in recomputed_memory(layer, [Configuration()]).items():
            total[moment] = total.get(moment, 0.0) + float(nbytes[0])
    return max(total, key=total.__getitem__, default=0)


def add_recomputed(parts: np.ndarray, moments: Iterable[float]) -> dict[str, float]:
    """Part -> bytes, the most of what is computed again among the activations.

    Args:
      parts: float64 [len(MEMORY_PARTS)], of all layers.
      moments: bytes of what is computed again, at every moment.
    """
    found = dict(zip(MEMORY_PARTS, map(float, parts), strict=True))
    found[MEMORY_PARTS[_ACTIVATIONS]] += max(moments, default=0.0)
    return found


def _gradient_of(variable: Variable, layer: Layer) -> tuple[Operand, int]:
    """The gradient of a weight: the weight, of the type in which the backward pass computes what looks like it. And how
    many of it are there: of what a loop adds up, the sum and what an iteration adds to it."""
    looks = variable.operand.dims, variable.operand.shape
    for operation in layer.operations:
        if operation.phase == "backward":
            for operand in operation.outputs:
                if (operand.dims, operand.shape) == looks:
                    return operand, 2 if operation.trips > 1 else 1
    return variable.operand, 1


def strategy_memory(graph: ComputationGraph, configurations: Sequence[Configuration]) -> dict[str, float]:
    """Bytes on the fullest device under a strategy.

    Args:
      graph: of the model.
      configurations: one per layer.

    Returns:
      Part -> bytes, for all `MEMORY_PARTS`.
    """
    total = np.zeros(len(MEMORY_PARTS))
    moments: dict[int, float] = {}
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        total += layer_memory(layer, [configuration])[:, 0]
        for moment, nbytes in recomputed_memory(layer, [configuration]).items():
            moments[moment] = moments.get(moment, 0.0) + float(nbytes[0])
    return add_recomputed(total, moments.values())
