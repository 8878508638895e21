"""What it costs that partial sums are summed on the way to the layer that needs them: a reduce-scatter, as lowered.

What devices hold in part is a tensor of more dims: behind its own, a dim for each of those whose split leaves partial
sums, of as many elements as there are parts. To sum is to need all of these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.rows import gathering_seconds, held_elements
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings
from pase_mtf.graph.looked_up import LookedUp, fewer_as_rows
from pase_mtf.graph.partition import Partition, scattered

__all__ = ["pending_seconds"]

_Shards = tuple[tuple[int, int], ...]
"""Shards and stride of every dim."""


def pending_seconds(source: DistinctShardings, target: DistinctShardings, shape: Sequence[int], itemsize: int,
                    reshardings: Reshardings, looked_up: LookedUp | tuple[()] = (), *,
                    waits: bool = False) -> np.ndarray:
    """Seconds to sum a tensor that is held in part, and to move it, on devices of their own.

    Args:
      source: R shardings where the parts are made: of the tensor's T dims, then of those whose split leaves the parts.
      target: C shardings of the sum where it is used, of T dims; then of those whose split leaves parts of what it is
        added to there.
      shape: unsplit size of the tensor's dims.
      itemsize: bytes per element.
      reshardings: of a machine whose devices are their own, or of stock Mesh-TensorFlow.
      looked_up: what the sum consists of, where it is of rows that were looked up.
      waits: it is the gradient of a weight: where its parts are, it is summed in a bucket.

    Returns:
      float64 [R, C]. Where it is added to the same parts, nothing; where fewer elements travel as rows, that of these
      and of a move; where a device needs less than it holds a part of, that of a reduce-scatter
      (`graph.partition.scattered_sum` tells when; stock Mesh-TensorFlow makes none); else that of an all-reduce and a
      move. Where nothing is held in part, that of the move.
    """
    rank, nbytes = len(shape), float(math.prod(shape) * itemsize)
    if target.shards.shape[1] > rank:
        wholly = DistinctShardings(target.devices, target.shards[:, :rank], target.strides[:, :rank], target.index)
        summed = pending_seconds(source, wholly, shape, itemsize, reshardings, looked_up, waits=waits)
        summed[_same_parts(source, target, rank)] = 0.0
        return summed
    # Many differ in nothing but the dims whose split leaves the parts.
    own = np.column_stack((source.devices, source.shards[:, :rank], source.strides[:, :rank]))
    _, first, like = np.unique(own, axis=0, return_index=True, return_inverse=True)
    like = like.reshape(-1)
    whole = DistinctShardings(source.devices[first], source.shards[first, :rank], source.strides[first, :rank],
                              like[source.index].astype(np.int32))
    moved: np.ndarray = reshardings.seconds(whole, target, shape, itemsize)[like]
    parts = source.shards[:, rank:].prod(axis=1)
    blocks, wanted = source.shards[:, :rank].prod(axis=1), target.shards.prod(axis=1)
    in_place = waits & (moved == 0.0) & (blocks[:, None] == wanted) & (source.devices[:, None] == target.devices)
    alone, together = (_allreduced(source, rank, nbytes, reshardings, waiting)[:, None]
                       for waiting in (0.0, reshardings.waiting))
    seconds: np.ndarray = moved + np.where(in_place, together, alone)
    if not reshardings.sums_on_edges:
        return seconds
    pieces = {column: piece.shards for column, (devices, shards) in enumerate(zip(
        target.devices.tolist(), _shards_of(target), strict=True))
        if (piece := scattered(Partition(tuple(range(devices)), shards), tuple(shape))) is not None}
    able = np.array([column in pieces for column in range(len(target.devices))], bool)
    here = (parts > 1)[:, None] & able & (wanted > blocks[:, None]) & (target.devices >= source.devices[:, None])
    columns = np.flatnonzero(here.any(axis=0))
    if len(columns):
        held = [pieces[column] for column in columns.tolist()]
        gathered = _gathered(reshardings, target.devices[columns], held, _shards_of(target, columns), nbytes)
        for count in np.unique(parts[here.any(axis=1)]).tolist():
            rows = np.flatnonzero((parts == count) & here.any(axis=1))
            needed = _sharded(target.devices[columns], held, source.shards.shape[1])
            scatter = reshardings.seconds_apart(
                Sharded(source.devices[rows], source.shards[rows], source.strides[rows]), needed, nbytes * count,
                source.shards.shape[1] - rank)
            place = np.ix_(rows, columns)
            seconds[place] = np.where(here[place], scatter + gathered, seconds[place])
    if not looked_up:
        return seconds
    summed = np.array([math.prod(shape) // math.prod(count for count, _ in pieces[column]) if column in pieces else 0
                       for column in range(len(wanted))], np.int64)
    rows, block = held_elements(looked_up, shape, source.shards[:, :rank], parts)
    as_rows = np.where(here, fewer_as_rows(rows[:, None], parts[:, None], block[:, None], summed,
                                           math.prod(shape) // wanted),
                       fewer_as_rows(rows, parts, block)[:, None])
    gathered = _rows(source, rank, shape, itemsize, looked_up, reshardings)
    return np.where(as_rows, moved + gathered[:, None], seconds)


def _same_parts(source: DistinctShardings, target: DistinctShardings, rank: int) -> np.ndarray:
    """Whether devices hold the same parts of tensors of so many dims at both ends: bool [R, C]."""
    width = max(source.shards.shape[1], target.shards.shape[1])
    numbers: dict[Hashable, int] = {}
    (here, parts), (there, _) = (_numbered(end, rank, width, numbers) for end in (source, target))
    same: np.ndarray = (here[:, None] == there) & parts[:, None]
    return same


def _numbered(shardings: DistinctShardings, rank: int, width: int, numbers: dict[Hashable, int],
              ) -> tuple[np.ndarray, np.ndarray]:
    """A number of each, the same for those under which devices hold the same parts of a tensor of so many dims, in
    whichever order the dims that leave these are; and whether they are parts: int64 and bool [R]."""
    found, parts = [], []
    for devices, cuts in zip(shardings.devices.tolist(), _shards_of(shardings), strict=True):
        split = sorted(cut for cut in cuts[rank:] if cut[0] > 1)
        key = devices, *cuts[:rank], *split, *[(1, 1)] * (width - rank - len(split))
        found.append(numbers.setdefault(key, len(numbers)))
        parts.append(bool(split))
    return np.array(found, np.int64), np.array(parts, bool)


def _rows(source: DistinctShardings, rank: int, shape: Sequence[int], itemsize: int, looked_up: LookedUp,
          reshardings: Reshardings) -> np.ndarray:
    """Seconds in which devices give each other indices and rows, float64 [R]."""
    row = [dim for dim in range(rank) if dim != looked_up.dim]
    columns = [*range(rank, source.shards.shape[1]), *row]
    held = Sharded(source.devices, source.shards[:, columns], source.strides[:, columns])
    return gathering_seconds(held, len(columns) - len(row), looked_up,
                             float(math.prod(shape[dim] for dim in row) * itemsize), reshardings)


def _allreduced(source: DistinctShardings, rank: int, nbytes: float, reshardings: Reshardings,
                waiting: float) -> np.ndarray:
    """Seconds of the all-reduces where the parts are made, float64 [R]; so many bytes of others wait, unsplit."""
    table = ConfigurationTable(source.devices, source.shards, source.strides)
    groups = group_sizes(table, range(rank, source.shards.shape[1]), reshardings.machine)
    blocks = source.shards[:, :rank].prod(axis=1)
    return allreduce_seconds(nbytes / blocks, groups, source.devices, reshardings.machine,
                             stock=reshardings.stock, waiting=waiting / blocks)


def _gathered(reshardings: Reshardings, devices: np.ndarray, pieces: list[_Shards], wanted: list[_Shards], nbytes: float
              ) -> np.ndarray:
    """Seconds in which those that need a block give each other their pieces of it, for each of some shardings."""
    width = len(wanted[0])
    seconds = reshardings.paired_seconds(_sharded(devices, pieces, width), _sharded(devices, wanted, width), nbytes)
    seconds[[held == needed for held, needed in zip(pieces, wanted, strict=True)]] = 0.0
    return seconds


def _shards_of(shardings: DistinctShardings, rows: Sequence[int] | np.ndarray | None = None,
          ) -> list[_Shards]:
    """(shards, stride) per dim of shardings: of all, or of some."""
    rows = range(len(shardings.devices)) if rows is None else rows
    return [tuple(zip(shardings.shards[row].tolist(), shardings.strides[row].tolist(), strict=True)) for row in rows]


def _sharded(devices: np.ndarray, shards: Sequence[_Shards], width: int) -> Sharded:
    """Shardings of tensors of so many dims, of which those without any are whole."""
    both = np.ones((2, len(shards), width), np.int64)
    for row, entries in enumerate(shards):
        both[:, row, :len(entries)] = np.array(entries, np.int64).reshape(-1, 2).T
    return Sharded(devices, both[0], both[1])
