"""What moves inside a layer although all of it is cut alike: renames and shifts.

A recurrence feeds what it puts out (one dim of the layer) back as what it reads (another): where the two are cut
differently, every step moves the state. A shift along a split dim hands the rim of every block to the next device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.resharding import elements_moved, resharding_seconds
from pase_mtf.cost.tables import ConfigurationTable, positions_of
from pase_mtf.graph.computation_graph import LayerOperation
from pase_mtf.machine.machine import Machine

__all__ = ["Move", "move_elements", "move_of", "move_seconds"]


class Move(NamedTuple):
    """What an operation moves between devices.

    Attributes:
      source, target: the column of every dim of the tensor, before and after.
      shape, itemsize: its unsplit size, bytes per element.
      shifted: (place of the dim in the tensor, by how many elements) of a shift; empty for a rename.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    shifted: tuple[int, ...] = ()


def move_of(operation: LayerOperation, position: dict[str, int]) -> Move | None:
    """What the operation moves under some configuration, or None.

    Args:
      operation: of a layer.
      position: column of every dim name of the layer (`dim_positions`).
    """
    if operation.type not in ("ReshapeOperation", "ShiftOperation"):
        return None
    (x,), (y,) = operation.inputs, operation.outputs
    source, target = positions_of(x.dims, position), positions_of(y.dims, position)
    if operation.shift:
        name, offset = operation.shift
        if name not in x.dims:
            return None
        return Move(source, target, x.shape, x.itemsize, (x.dims.index(name), abs(offset)))
    if x.shape != y.shape or source == target:
        return None  # a reshape that is more than a rename keeps what is split where it is, or it would not be here
    return Move(source, target, x.shape, x.itemsize)


def _rim(move: Move, table: ConfigurationTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(elements a device hands on in a shift, parts, strides of the shifted dim), each [K]; 0 where it is whole."""
    place, offset = move.shifted
    column = move.source[place]
    parts = table.parts[:, column]
    block = move.shape[place] / parts
    elements = math.prod(move.shape) * table.share([c for c in move.source if c >= 0])
    return np.where(parts > 1, elements * np.minimum(1.0, offset / block), 0.0), parts, table.strides[:, column]


def move_seconds(move: Move, table: ConfigurationTable, machine: Machine) -> np.ndarray:
    """Seconds of the move under each of K configurations: float64 [K], 0 where everything is in its place."""
    if not move.shifted:
        ends = table.classes(move.source), table.classes(move.target)
        return resharding_seconds(*ends, move.shape, move.itemsize, machine)[ends[0].index, ends[1].index]
    elements, parts, strides = _rim(move, table)
    if machine.shared_cores:
        # Handed over by reference, to all but the first of a row; cutting and joining is the operation's own work.
        return np.where(parts > 1, table.devices * (parts - 1) / parts * machine.links[-1].latency, 0.0)
    # Some device has its neighbour beyond every group that is smaller than the row of parts.
    seconds = np.zeros(len(parts))
    below = np.ones(len(parts), bool)
    for link in machine.links:
        here = below & ((parts * strides <= link.devices) | (link is machine.links[-1]))
        seconds = np.where(here, link.latency + elements * move.itemsize / link.bandwidth, seconds)
        below &= ~here
    return np.where(parts > 1, seconds, 0.0)


def move_elements(move: Move, table: ConfigurationTable) -> np.ndarray:
    """The most elements that a device fetches in the move, under each of K configurations."""
    if move.shifted:
        return _rim(move, table)[0]
    ends = table.classes(move.source), table.classes(move.target)
    return elements_moved(*ends, move.shape)[ends[0].index, ends[1].index]
