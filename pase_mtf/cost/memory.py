"""Bytes a device holds under a strategy, by what they are for.

Every layer runs on devices 0, 1, ..., all of which hold equal shares: device 0 is always among the fullest, and the
bytes of the layers add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, Operand, Variable
from pase_mtf.graph.configurations import Configuration

__all__ = ["MEMORY_PARTS", "layer_memory", "strategy_memory"]

MEMORY_PARTS = ("weights", "optimizer slots", "gradients", "activations", "communication buffers")
"""What the bytes are for, in the order of the rows of `layer_memory`."""
_WEIGHTS, _SLOTS, _GRADIENTS, _ACTIVATIONS, _BUFFERS = range(len(MEMORY_PARTS))


def layer_memory(layer: Layer, configurations: Sequence[Configuration]) -> np.ndarray:
    """Bytes of a layer on each of its devices, under each configuration.

    Weights and optimizer slots: the variables of the layer. Gradients: one per weight that is updated, of the type of
    the backward pass. Activations:
    what the forward pass computes, where a backward pass will read it (it may not read all of it: an upper bound);
    otherwise the largest tensor that is computed. Communication buffers: what arrives for the largest all-reduce.

    Args:
      layer: of a graph.
      configurations: K of its configurations.

    Returns:
      float64 [len(MEMORY_PARTS), K]; the parts, and the layers, add up.
    """
    position = dim_positions(layer)
    table = ConfigurationTable.build(configurations, position, len(layer.dims))
    shares: dict[tuple[int, ...], np.ndarray] = {}

    def local(operand: Operand) -> np.ndarray:
        columns = tuple(sorted(column for column in positions_of(operand.dims, position) if column >= 0))
        if columns not in shares:
            shares[columns] = table.share(columns)
        return math.prod(operand.shape) * operand.itemsize * shares[columns]

    result = np.zeros((len(MEMORY_PARTS), len(configurations)))
    phases = {operation.phase for operation in layer.operations}
    for variable in layer.variables:
        nbytes = local(variable.operand)
        result[_WEIGHTS if variable.trainable else _SLOTS] += nbytes
        if variable.trainable and "update" in phases:
            result[_GRADIENTS] += local(_gradient_of(variable, layer))
    for operation in layer.operations:
        nbytes = sum((local(operand) for operand in operation.outputs), np.zeros(len(configurations)))
        if operation.phase == "forward" and operation.kind != "none":
            kept = result[_ACTIVATIONS]
            result[_ACTIVATIONS] = kept + nbytes if "backward" in phases else np.maximum(kept, nbytes)
        for dims, outputs in operation.sums:
            group = 1.0 / table.share(positions_of(dict.fromkeys(dims), position))
            # The partial sums of the others arrive in pieces, as large together as the device's own.
            reduced = sum(map(local, outputs), np.zeros(len(configurations)))
            result[_BUFFERS] = np.maximum(result[_BUFFERS], np.where(group > 1, reduced, 0.0))
    return result


def _gradient_of(variable: Variable, layer: Layer) -> Operand:
    """The gradient of a weight: the weight, of the type in which the backward pass computes what looks like it."""
    looks = variable.operand.dims, variable.operand.shape
    found = [operand for operation in layer.operations if operation.phase == "backward"
             for operand in operation.outputs if (operand.dims, operand.shape) == looks]
    return found[0] if found else variable.operand


def strategy_memory(graph: ComputationGraph, configurations: Sequence[Configuration]) -> dict[str, float]:
    """Bytes on the fullest device under a strategy.

    Args:
      graph: of the model.
      configurations: one per layer.

    Returns:
      Part -> bytes, for all `MEMORY_PARTS`.
    """
    total = np.zeros(len(MEMORY_PARTS))
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        total += layer_memory(layer, [configuration])[:, 0]
    return dict(zip(MEMORY_PARTS, map(float, total), strict=True))
