"""In-layer resharding: what moves although all of a layer has one configuration, in renames and shifts.

A recurrence feeds what it puts out (one dim of the layer) back as what it reads (another): where the two are sharded
differently, every step moves the state. A shift along a split dim sends the halo of every block to the next device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.pending import pending_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.tables import ConfigurationTable, positions_of
from pase_mtf.graph.computation_graph import LayerOperation

__all__ = ["Move", "handed_on", "move_elements", "move_of", "move_seconds"]


class Move(NamedTuple):
    """What an operation moves between devices.

    Attributes:
      source, target: the column of every dim of the tensor, before and after.
      shape, itemsize: its unsplit size, bytes per element.
      shifted: (place of the dim in the tensor, by how many elements) of a shift; empty for a rename.
      summed: columns of the dims whose split leaves what is moved as partial sums, which are summed on the way.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    shifted: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()


def move_of(operation: LayerOperation, position: dict[str, int]) -> Move | None:
    """What the operation moves under some configuration, or None.

    Args:
      operation: of a layer.
      position: column of every dim name of the layer (`dim_positions`).
    """
    if operation.role not in ("rename", "shift"):
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
    summed = tuple(sorted(set(positions_of(operation.reduced, position)))) if operation.sums_inputs else ()
    return Move(source, target, x.shape, x.itemsize, summed=summed)


def handed_on(move: Move, table: ConfigurationTable) -> np.ndarray:
    """Whether it is a shift by whole blocks: devices take those of others as they are, and copy nothing. bool [K]."""
    if not move.shifted:
        return np.zeros(len(table.devices), bool)
    place, offset = move.shifted
    shards = table.shards[:, move.source[place]]
    found: np.ndarray = (shards > 1) & (offset % np.maximum(move.shape[place] // shards, 1) == 0)
    return found


def _halo(move: Move, table: ConfigurationTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(elements a device sends in a shift, shards, strides of the shifted dim), each [K]; 0 where it is whole."""
    place, offset = move.shifted
    column = move.source[place]
    shards = table.shards[:, column]
    block = move.shape[place] / shards
    elements = math.prod(move.shape) * table.share([c for c in move.source if c >= 0])
    # Of a shift by nearly all of the dim a device has most itself (in circles), or nobody has it.
    across = min(offset, move.shape[place] - offset) if offset < move.shape[place] else offset
    return np.where(shards > 1, elements * np.minimum(1.0, across / block), 0.0), shards, table.strides[:, column]


def move_seconds(move: Move, table: ConfigurationTable, reshardings: Reshardings) -> np.ndarray:
    """Seconds of the move, and of the sum where that is made on the way, under each of K configurations: float64 [K], 0
    where everything is in its place."""
    machine = reshardings.machine
    if not move.shifted:
        summed = move.summed if reshardings.sums_on_edges else ()
        source, target = table.shardings((*move.source, *summed)), table.shardings(move.target)
        if summed:
            pairs = pending_seconds(source, target, move.shape, move.itemsize, reshardings)
        else:
            pairs = reshardings.seconds(source, target, move.shape, move.itemsize)
        seconds: np.ndarray = pairs[source.index, target.index]
        return seconds
    elements, shards, strides = _halo(move, table)
    if not move.shifted[1]:  # by nothing: everything stays where it is
        return np.zeros(len(shards))
    size, offset = move.shape[move.shifted[0]], move.shifted[1]
    across, block = min(offset, size - offset), np.maximum(size // shards, 1)
    # By more than a block, and by no whole ones: what a device needs is of two others.
    messages = np.where((across > block) & (across % block > 0), 2.0, 1.0)
    if machine.shared_cores:
        # Sent by reference, to all but the first of a row; slicing and concatenating is the operation's own work.
        sent = messages * table.devices * (shards - 1) / shards
        return np.where(shards > 1, sent * machine.links[-1].latency, 0.0)
    # Some device has its neighbour beyond every link domain that does not consist of whole rows of shards.
    seconds = np.zeros(len(shards))
    below = np.ones(len(shards), bool)
    for link in machine.links:
        here = below & ((link.devices % (shards * strides) == 0) | (table.devices <= link.devices)
                        | (link is machine.links[-1]))
        seconds = np.where(here, messages * link.latency + elements * move.itemsize / link.bandwidth, seconds)
        below &= ~here
    return np.where(shards > 1, seconds, 0.0)


def move_elements(move: Move, table: ConfigurationTable, reshardings: Reshardings) -> np.ndarray:
    """The most elements that a device fetches in the move, under each of K configurations."""
    if move.shifted:
        return _halo(move, table)[0]
    source, target = table.shardings(move.source), table.shardings(move.target)
    elements: np.ndarray = reshardings.elements(source, target, move.shape)[source.index, target.index]
    return elements
