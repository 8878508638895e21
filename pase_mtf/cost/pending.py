"""What it costs that partial sums are summed on the way to the layer that needs them: a reduce-scatter, as lowered.

What devices hold in part is a tensor of more dims: behind its own, a dim for each of those whose split leaves partial
sums, of as many elements as there are parts. To sum is to need all of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.dim_relations import Sharded, distinct_rows
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.rows import gathering_seconds, held_elements
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings
from pase_mtf.graph.looked_up import LookedUp, fewer_as_rows
from pase_mtf.graph.partition import scattered_shards
from pase_mtf.search.compiled import compiled

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
        wholly, like = _of_dims(target, rank)
        summed = pending_seconds(source, wholly, shape, itemsize, reshardings, looked_up, waits=waits)
        added: np.ndarray = np.take(summed, like, axis=1)
        added[_same_parts(source, target, rank)] = 0.0
        return added
    whole, like = _of_dims(source, rank)
    moved = reshardings.seconds(whole, target, shape, itemsize)
    seconds: np.ndarray = moved[like]
    seconds += _allreduced(source, rank, nbytes, reshardings, 0.0, itemsize)[:, None]
    blocks, wanted = source.shards[:, :rank].prod(axis=1), target.shards.prod(axis=1)
    if waits:
        in_place = (moved == 0.0)[like] & (blocks[:, None] == wanted) & (source.devices[:, None] == target.devices)
        together = _allreduced(source, rank, nbytes, reshardings, reshardings.waiting, itemsize)
        seconds = np.where(in_place, together[:, None], seconds)
    if not reshardings.sums_on_edges:
        return seconds
    parts = source.shards[:, rank:].prod(axis=1)
    pieces = _pieces(target, shape)
    here = ((parts > 1)[:, None] & pieces.able & (wanted > blocks[:, None])
            & (target.devices >= source.devices[:, None]))
    _scatter(seconds, here, source, target, pieces, reshardings, nbytes)
    if not looked_up:
        return seconds
    rows, block = held_elements(looked_up, shape, source.shards[:, :rank], parts)
    summed = math.prod(shape) // pieces.shards.prod(axis=1)
    as_rows = np.where(here, fewer_as_rows(rows[:, None], parts[:, None], block[:, None], summed,
                                           math.prod(shape) // wanted),
                       fewer_as_rows(rows, parts, block)[:, None])
    gathered = _rows(source, rank, shape, itemsize, looked_up, reshardings)
    cheaper: np.ndarray = np.where(as_rows, moved[like] + gathered[:, None], seconds)
    return cheaper


class _Pieces(NamedTuple):
    """How C shardings are split further, until every device has a block of its own (`graph.partition.scattered`).

    Attributes:
      able: bool [C], whether some dim divides so far.
      shards, strides: int64 [C, T]; as they are where none does.
    """

    able: np.ndarray
    shards: np.ndarray
    strides: np.ndarray


def _pieces(target: DistinctShardings, shape: Sequence[int]) -> _Pieces:
    """The pieces that devices sum of what they need."""
    given = _shards_of(target)
    found = [scattered_shards(devices, shards, tuple(shape))
             for devices, shards in zip(target.devices.tolist(), given, strict=True)]
    both = np.array([old if new is None else new for old, new in zip(given, found, strict=True)], np.int64)
    both = both.reshape(*target.shards.shape, 2)
    return _Pieces(np.array([new is not None for new in found], bool), both[:, :, 0], both[:, :, 1])


def _scatter(seconds: np.ndarray, here: np.ndarray, source: DistinctShardings, target: DistinctShardings,
             pieces: _Pieces, reshardings: Reshardings, nbytes: float) -> None:
    """Puts what a reduce-scatter takes into `seconds` [R, C], for those pairs that are `here`."""
    columns, (rank, width) = np.flatnonzero(here.any(axis=0)), (target.shards.shape[1], source.shards.shape[1])
    held, needed = (_widened(target.devices[columns], split.shards[columns], split.strides[columns], width)
                    for split in (pieces, target))
    gathered = np.zeros(len(columns))
    apart = np.flatnonzero((held.shards != needed.shards).any(axis=1) | (held.strides != needed.strides).any(axis=1))
    # Those that need a block give each other their pieces of it.
    before, after = (Sharded(*(array[apart] for array in end)) for end in (held, needed))
    gathered[apart] = reshardings.paired_seconds(before, after, nbytes)
    parts, some = source.shards[:, rank:].prod(axis=1), here.any(axis=1)
    for count in np.unique(parts[some]).tolist():
        rows = np.flatnonzero((parts == count) & some)
        scattered = reshardings.seconds_apart(Sharded(source.devices[rows], source.shards[rows], source.strides[rows]),
                                              held, nbytes * count, width - rank)
        _put(seconds, here, rows, columns, scattered, gathered)


@compiled
def _put(seconds: np.ndarray, here: np.ndarray, rows: np.ndarray, columns: np.ndarray, scattered: np.ndarray,
         gathered: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Puts the sums of both into those of these rows and columns that are `here`."""
    for i in range(len(rows)):
        line, wanted = seconds[rows[i]], here[rows[i]]
        for j in range(len(columns)):
            if wanted[columns[j]]:
                line[columns[j]] = scattered[i, j] + gathered[j]


def _of_dims(shardings: DistinctShardings, rank: int) -> tuple[DistinctShardings, np.ndarray]:
    """The different shardings of the first dims, and which of them each has: many differ in nothing but the dims whose
    split leaves the parts."""
    first, like = distinct_rows(shardings.devices, shardings.shards[:, :rank], shardings.strides[:, :rank])
    return DistinctShardings(shardings.devices[first], shardings.shards[first, :rank], shardings.strides[first, :rank],
                             like[shardings.index].astype(np.int32)), like


def _same_parts(source: DistinctShardings, target: DistinctShardings, rank: int) -> np.ndarray:
    """Whether devices hold the same parts of tensors of so many dims at both ends, in whichever order the dims that
    leave these are: bool [R, C]."""
    width = max(source.shards.shape[1], target.shards.shape[1]) - rank
    _, number = distinct_rows(np.concatenate([_held_in_part(end, rank, width) for end in (source, target)]))
    here, there = np.split(number, [len(source.devices)])
    parts = source.shards[:, rank:].prod(axis=1) > 1
    same: np.ndarray = (here[:, None] == there) & parts[:, None]
    return same


def _held_in_part(shardings: DistinctShardings, rank: int, width: int) -> np.ndarray:
    """What devices hold of tensors of so many dims, behind which there are so many more at most: int64 [R, ..]."""
    shards, strides = shardings.shards[:, rank:], shardings.strides[:, rank:]
    splits = np.zeros((len(shards), width), np.int64)
    splits[:, :shards.shape[1]] = np.where(shards > 1, (shards << 32) + strides, 0)
    return np.column_stack((shardings.devices, shardings.shards[:, :rank], shardings.strides[:, :rank],
                            np.sort(splits, axis=1)))


def _rows(source: DistinctShardings, rank: int, shape: Sequence[int], itemsize: int, looked_up: LookedUp,
          reshardings: Reshardings) -> np.ndarray:
    """Seconds in which devices give each other indices and rows, float64 [R]."""
    row = [dim for dim in range(rank) if dim != looked_up.dim]
    columns = [*range(rank, source.shards.shape[1]), *row]
    held = Sharded(source.devices, source.shards[:, columns], source.strides[:, columns])
    return gathering_seconds(held, len(columns) - len(row), looked_up,
                             float(math.prod(shape[dim] for dim in row) * itemsize), reshardings)


def _allreduced(source: DistinctShardings, rank: int, nbytes: float, reshardings: Reshardings,
                waiting: float, itemsize: int) -> np.ndarray:
    """Seconds of the all-reduces where the parts are made, float64 [R]; so many bytes of others wait, unsplit."""
    table = ConfigurationTable(source.devices, source.shards, source.strides)
    groups = group_sizes(table, range(rank, source.shards.shape[1]), reshardings.machine)
    blocks = source.shards[:, :rank].prod(axis=1)
    return allreduce_seconds(nbytes / blocks, groups, source.devices, reshardings.machine,
                             stock=reshardings.stock, waiting=waiting / blocks, itemsize=itemsize)


def _shards_of(shardings: DistinctShardings) -> list[_Shards]:
    """(shards, stride) per dim of every sharding."""
    both = np.stack((shardings.shards, shardings.strides), axis=2).tolist()
    return [tuple(map(tuple, row)) for row in both]


def _widened(devices: np.ndarray, shards: np.ndarray, strides: np.ndarray, width: int) -> Sharded:
    """Shardings of tensors of so many dims, of which those without any are whole."""
    both = np.ones((2, len(devices), width), np.int64)
    both[0, :, :shards.shape[1]], both[1, :, :shards.shape[1]] = shards, strides
    return Sharded(devices, both[0], both[1])
