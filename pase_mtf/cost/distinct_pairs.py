"""Pairs of shardings that are alike: what holds of one of them holds of all, so that few pairs have to be looked at.

Where devices hold and need which shards of a tensor is said dim by dim: into how many shards the dim is split at either
end, and how many consecutive devices hold the same one. Which dim it is makes no difference, nor which tensor, nor a
dim that is whole at the source; and what is said of a device is said in units of the block that it needs. So a pair of
shardings is known by the sum of a number per dim, its code, and most pairs have the code of another: of the same edge,
or of one before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.cost.dim_relations import (
    COUNT_MASK,
    FAR_PLACE,
    UNEVEN_PLACE,
    DimRelations,
    Sharded,
    code_of,
)
from pase_mtf.search.compiled import compiled

__all__ = ["DistinctPairs", "NumberedPairs"]

_FREE = -1
_FIRST_PLACES = 1 << 10


class NumberedPairs(NamedTuple):
    """The pairs of R source and C target shardings, sorted into those that are alike.

    Attributes:
      number: int32 [R, C], which of all distinct pairs each is.
      new: int64 [N, 3], of each that has not come up before, in the order of their numbers, which follow those known:
        the row and the column of one such pair, and how many shards every device needs where some device has nothing of
        them in its largest domain, which is all that is known of such pairs; 0 for others.
      boxes: bool [R, L], whether what the devices of any link domain hold together is a product over the dims.
      source_splits, target_splits: int64 [T, R] and [T, C], the numbers of the dims' splits.
    """

    number: np.ndarray
    new: np.ndarray
    boxes: np.ndarray
    source_splits: np.ndarray
    target_splits: np.ndarray


class DistinctPairs:
    """Numbers pairs of shardings; those that are alike have the same number, on whatever edge they come up.

    Attributes:
      relations: of the dims of all shardings so far.
      count: how many numbers there are.
    """

    def __init__(self, domains: np.ndarray, *, far_alike: bool) -> None:
        """Knows no pair.

        Args:
          domains: int64 [L], devices per link domain, innermost first.
          far_alike: take pairs for alike where some device needs as many shards as any, and has nothing of them in its
            largest domain.
        """
        self.relations = DimRelations(domains)
        self.count = 0
        self._far_alike = far_alike
        # A hash table of codes: its rows are the two sums, and the number of the pair.
        self._places = np.full((_FIRST_PLACES, 3), _FREE, np.int64)

    def number(self, source: Sharded, target: Sharded) -> NumberedPairs:
        """The number of every pair, and which pairs have not come up before.

        Args:
          source: R shardings where a tensor is made.
          target: C shardings of it where it is used.
        """
        relations, boxes = self.relations, _boxes(source, self.relations.domains)
        here, there = relations.numbers(source), relations.numbers(target)
        # Dims that are whole at the source add nothing.
        dims = np.flatnonzero((source.shards > 1).any(axis=0))
        for dim in dims:
            relations.relate(np.unique(here[dim]), np.unique(there[dim]))
        devices, own = np.unique(source.devices, return_inverse=True)
        wanted_devices, wanted = np.unique(target.devices, return_inverse=True)
        self._places, number, new = _number_pairs(
            self._places, self.count, relations.codes, relations.needed, np.ascontiguousarray(here[dims].T),
            there[dims].view(np.uint64), np.asarray(boxes.all(axis=1)),
            *_device_codes(devices, wanted_devices, relations.domains), own, wanted, self._far_alike)
        self.count += len(new)
        return NumberedPairs(number, new, boxes, here, there)


def _boxes(source: Sharded, domains: np.ndarray) -> np.ndarray:
    """Whether what the devices of any link domain hold together is a product over the dims: bool [R, L].

    In a domain, the shard of a dim is the same for all devices where the domain divides the dim's stride, and a dim
    goes through all its shards where its stride times shards divides the domain. If it is neither for more than one
    dim, all shards of the others have to occur beside each shard of that one.
    """
    split = source.shards > 1
    strides = np.where(split, source.strides, 1)[:, :, None]
    tops = np.where(split, source.strides * source.shards, 1)[:, :, None]
    all_devices = source.devices[:, None]
    same, through = (strides % domains == 0) & split[:, :, None], domains % tops == 0
    other = ~same & ~through
    # So many consecutive devices, from a multiple of it on, are in one domain and hold one shard of the other dim.
    run = np.gcd(np.gcd(domains, all_devices), np.gcd.reduce(np.where(other, strides, 0), axis=1))
    product = (other.sum(axis=1) <= 1) & (same | other | (run[:, None, :] % tops == 0)).all(axis=1)
    found: np.ndarray = product | (split.sum(axis=1) <= 1)[:, None] | (domains >= all_devices)
    return found


def _device_codes(source: np.ndarray, target: np.ndarray, domains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the numbers of devices at either end add to a code: two sums, int64 [A, B]."""
    first, second = code_of(source[:, None], target[None, :])
    # The domain of the last device of the target may begin beyond the devices of the source.
    far = (target[None, :] - 1) // domains[-1] * domains[-1] >= source[:, None]
    return first + (far.astype(np.int64) << FAR_PLACE), second


@compiled(inline=True)
def _place_of(first: int, second: int, places: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Where a code stands in a hash table whose length is a power of two, or the free place where it would."""
    place = (first ^ second) & (len(places) - 1)
    while places[place, 2] != _FREE and (places[place, 0] != first or places[place, 1] != second):
        place = (place + 1) & (len(places) - 1)
    return place


@compiled
def _grown(places: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """The hash table with four times as many places."""
    larger = np.full((4 * len(places), 3), _FREE, np.int64)
    for old in range(len(places)):
        if places[old, 2] != _FREE:
            larger[_place_of(places[old, 0], places[old, 1], larger)] = places[old]
    return larger


@compiled(allocates=False)
def _add_up(dims: tuple[np.ndarray, np.ndarray, np.ndarray], source: np.ndarray, target_splits: np.ndarray,
            codes: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:  # pragma: no cover (compiled)
    """What the dims of one source add to the codes of its pairs with all targets.

    Args:
      dims: int64 [S, S] each: what a dim adds to the two sums, and how many shards of it a block touches.
      source: int64 [T], its splits.
      target_splits: uint64 [T, C]: without a sign, which is never looked at.
      codes: int64 [C] each: the two sums, added to, and how many shards a block touches in all.
    """
    first, second, touched = codes
    touched[:] = 1
    for dim in range(len(source)):
        split, columns = source[dim], target_splits[dim]
        one, other, needed = dims[0][split], dims[1][split], dims[2][split]
        for column in range(len(columns)):
            first[column] += one[columns[column]]
        for column in range(len(columns)):
            second[column] += other[columns[column]]
        for column in range(len(columns)):
            touched[column] *= needed[columns[column]]


@compiled(allocates=False)
def _number_row(places: np.ndarray, known: int, codes: tuple[np.ndarray, np.ndarray, np.ndarray], far_alike: bool,
                row: int, begin: int, number: np.ndarray, new: np.ndarray
                ) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Numbers the pairs of one source with the targets from one on, by their codes.

    Args:
      places: the hash table, added to; of the codes known.
      known: how many those are.
      codes: of all pairs, see `_add_up`.
      far_alike: as of `DistinctPairs`.
      row: of the source.
      begin: the first target.
      number: int32 [C], filled in.
      new: int64 [N, 3], the row, the column and the shards of pairs that are new, filled in.

    Returns:
      How many codes are known then, and the target to go on with, once the hash table is half full.
    """
    first, second, touched = codes
    added = 0
    for column in range(begin, len(number)):
        code, other, blocks = first[column], second[column], 0
        if far_alike and code >> FAR_PLACE & COUNT_MASK and not code >> UNEVEN_PLACE:
            blocks = touched[column]
            code, other = -blocks, 0
        place = _place_of(code, other, places)
        if places[place, 2] == _FREE:
            if 2 * (known + 1) >= len(places):
                return known, column
            places[place, 0], places[place, 1], places[place, 2] = code, other, known
            new[added, 0], new[added, 1], new[added, 2] = row, column, blocks
            added += 1
            known += 1
        number[column] = places[place, 2]
    return known, len(number)


@compiled
def _number_pairs(places: np.ndarray, known: int, dim_codes: np.ndarray, needed: np.ndarray, source_splits: np.ndarray,
                  target_splits: np.ndarray, all_boxes: np.ndarray, device_first: np.ndarray,
                  device_second: np.ndarray, own: np.ndarray, wanted: np.ndarray, far_alike: bool,
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """Numbers all pairs by their codes.

    Args:
      places: the hash table of all codes known, of which there are `known`.
      dim_codes, needed: `codes` and `needed` of `DimRelations`.
      source_splits, target_splits: int64 [R, T] and uint64 [T, C].
      all_boxes: bool [R], whether what domains hold is a product over the dims at every level.
      device_first, device_second: of `_device_codes`.
      own, wanted: int64 [R] and [C], the row and the column of each sharding in them.
      far_alike: as of `DistinctPairs`.

    Returns:
      The hash table, then `NumberedPairs.number` and `new`.
    """
    rows, columns = len(source_splits), target_splits.shape[1]
    number, before = np.empty((rows, columns), np.int32), known
    new = np.empty((len(places), 3), np.int64)
    codes = np.empty(columns, np.int64), np.empty(columns, np.int64), np.empty(columns, np.int64)
    for row in range(rows):
        first, second = device_first[own[row]], device_second[own[row]]
        for column in range(columns):
            codes[0][column], codes[1][column] = first[wanted[column]], second[wanted[column]]
        kind, column = int(all_boxes[row]), 0
        _add_up((dim_codes[kind, 0], dim_codes[kind, 1], needed), source_splits[row], target_splits, codes)
        while True:
            known, column = _number_row(places, known, codes, far_alike, row, column, number[row], new[known - before:])
            if column == columns:
                break
            places = _grown(places)
            new = np.concatenate((new[:known - before], np.empty((len(places), 3), np.int64)))
    return places, number, new[:known - before].copy()
