"""What sums of rows that were looked up cost, where devices give each other rows instead of parts of the sum.

Which of the two it is `graph.looked_up` tells, here for all configurations at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.tables import ConfigurationTable, positions_of
from pase_mtf.graph.computation_graph import LayerOperation
from pase_mtf.graph.looked_up import LookedUp, fewer_as_rows

__all__ = ["RowSum", "adding_bytes", "gathering_seconds", "held_elements", "row_sum_of", "rows_seconds",
           "travel_as_rows"]


class RowSum(NamedTuple):
    """A sum of rows that a layer makes.

    Attributes:
      looked_up: what it consists of.
      reduced: columns of the dims whose split leaves parts of it.
      is_last: whether the rows are added up here; else their sum is added into another, which consists of all of them.
      columns: column of every dim of the sum.
      shape, itemsize: its unsplit size, bytes per element.
    """

    looked_up: LookedUp
    reduced: tuple[int, ...]
    is_last: bool
    columns: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int


def row_sum_of(operation: LayerOperation, position: dict[str, int]) -> RowSum | None:
    """The sum of rows that an operation makes, or adds something to, or None.

    Args:
      operation: of a layer.
      position: column of every dim name of the layer (`dim_positions`).
    """
    if not operation.looked_up:
        return None
    output = operation.outputs[0]
    summed = operation.reduced or [name for name in operation.dims if name not in output.dims]
    reduced = tuple(sorted(set(positions_of(summed, position))))
    return RowSum(operation.looked_up, reduced, bool(operation.reduced), positions_of(output.dims, position),
                  output.shape, output.itemsize)


def held_elements(looked_up: LookedUp, shape: Sequence[int], shards: np.ndarray, parts: np.ndarray,
                  ) -> tuple[np.ndarray, np.ndarray]:
    """What a device has of the indices and rows, and of the sum.

    Args:
      looked_up: what the sum consists of.
      shape: unsplit size of its T dims.
      shards: int64 [R, T], into how many shards each is split.
      parts: int64 [R], of the sum.

    Returns:
      Elements, int64 [R] each.
    """
    row, block = _row_and_block(looked_up, shape, shards)
    return looked_up.indices // parts * (row + 1), block


def _row_and_block(looked_up: LookedUp, shape: Sequence[int], shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements that a device has of a row and of the sum, int64 [R] each."""
    held = np.array(shape, np.int64) // shards
    block = held.prod(axis=1)
    return block // held[:, looked_up.dim], block


def travel_as_rows(found: RowSum, table: ConfigurationTable) -> np.ndarray:
    """Whether rows travel where all devices of the layer need the sum, bool [K]."""
    parts = table.shards[:, found.reduced].prod(axis=1)
    rows, block = held_elements(found.looked_up, found.shape, table.shards[:, found.columns], parts)
    result: np.ndarray = fewer_as_rows(rows, parts, block)
    return result


def rows_seconds(found: RowSum, table: ConfigurationTable, reshardings: Reshardings) -> np.ndarray:
    """Seconds in which devices give each other indices and rows, under each of K configurations: float64 [K]."""
    row = _of_row(found.columns, found.looked_up)
    shardings = table.shardings((*found.reduced, *row))
    seconds = gathering_seconds(
        Sharded(shardings.devices, shardings.shards, shardings.strides), len(found.reduced), found.looked_up,
        math.prod(_of_row(found.shape, found.looked_up)) * found.itemsize, reshardings)
    result: np.ndarray = seconds[shardings.index]
    return result


def gathering_seconds(held: Sharded, indexed: int, looked_up: LookedUp, row_bytes: float, reshardings: Reshardings,
                      ) -> np.ndarray:
    """Seconds in which devices give each other indices and rows, on devices of their own.

    Args:
      held: R shardings of the rows: so many dims of the indices, whose split leaves parts of the sum, then those of a
        row.
      indexed: how many.
      looked_up: what the sum consists of.
      row_bytes: of an unsplit row.
      reshardings: price the moves.

    Returns:
      float64 [R].
    """
    seconds = np.zeros(len(held.devices))
    for dims, nbytes in ((held.shards.shape[1], row_bytes), (indexed, float(looked_up.itemsize))):
        source = Sharded(held.devices, held.shards[:, :dims], held.strides[:, :dims])
        target = Sharded(held.devices, source.shards.copy(), source.strides.copy())
        target.shards[:, :indexed] = target.strides[:, :indexed] = 1
        seconds += reshardings.paired_seconds(source, target, looked_up.indices * nbytes)
    return seconds


def adding_bytes(found: RowSum, table: ConfigurationTable) -> np.ndarray:
    """Bytes that a device reads and writes to add up all rows, under each of K configurations: float64 [K].

    It fills its block of the sum with zeros; every row is read, and added to one of the sum, read and written.
    """
    row, block = _row_and_block(found.looked_up, found.shape, table.shards[:, found.columns])
    result: np.ndarray = found.itemsize * (block + 3.0 * found.looked_up.indices * row)
    return result


def _of_row(entries: Sequence[int], looked_up: LookedUp) -> tuple[int, ...]:
    """Of one entry per dim of the sum, those of the dims of a row."""
    return tuple(entry for dim, entry in enumerate(entries) if dim != looked_up.dim)
