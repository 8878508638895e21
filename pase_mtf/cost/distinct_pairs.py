"""Pairs of shardings that are alike: what holds of one of them holds of all, so that few pairs have to be looked at.

Where devices hold and need which shards of a tensor is said dim by dim: into how many shards the dim is split at either
end, and how many consecutive devices hold the same one. Which dim it is makes no difference, nor the stride of a dim
that is whole at the other end of which all devices hold everything. So a pair of shardings is known by the sum of a
number per dim, its code, and most pairs of a large edge have the code of another.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["DimRelations", "DistinctPairs", "Sharded", "distinct_pairs", "gcd", "held_along", "lcm",
           "scattered"]

# A code is two sums of pseudo-random numbers, of 40 and of 63 bits. The first one's higher bits count the dims in which
# some device's link domain holds nothing of what it needs, and the dims of which not every device needs equally many
# shards: two codes agree by accident once in 2 ** 100.
_SUM_BITS = 40
_COUNT_BITS = 8
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_UNEVEN_PLACE = _SUM_BITS + 6 + _COUNT_BITS
_FAR_PLACE = _SUM_BITS + 6  # up to 64 dims
_FREE = -1
_FIRST_PLACES = 1 << 12
# 64-bit odd constants of the mixing function splitmix64 (Steele, Lea, Flood 2014).
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Sharded(NamedTuple):
    """Shardings of a tensor of T dims.

    Attributes:
      devices: int64 [R], how many devices hold a block.
      shards, strides: int64 [R, T]: of each dim, device d holds shard (d // stride) % shards.
    """

    devices: np.ndarray
    shards: np.ndarray
    strides: np.ndarray


class DimRelations(NamedTuple):
    """One dim of a tensor under every way of splitting it at either end, each array [A, B] (or [A, B, L]).

    Attributes:
      first, second: int64, what the dim adds to the code of a pair.
      needed: int64, the most source shards that the block of a device touches.
      least_held: int64 [A, B, L], of what a device needs, the least that its link domain of level l holds; the dim has
        shards at the source x shards at the target units.
      least_shards: int64 [A, B, L], the fewest of the shards it needs that the domain holds.
    """

    first: np.ndarray
    second: np.ndarray
    needed: np.ndarray
    least_held: np.ndarray
    least_shards: np.ndarray


class DistinctPairs(NamedTuple):
    """The pairs of R source and C target shardings, sorted into those that are alike.

    Attributes:
      number: int32 [R, C], which of the N distinct pairs each is.
      rows, columns: int64 [N], one pair of each.
      dims: the dims that are split at either end.
      relations: of each of them.
      source_index, target_index: int64 [dims, R] and [dims, C], the row and column of every sharding in them.
    """

    number: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    dims: list[int]
    relations: list[DimRelations]
    source_index: np.ndarray
    target_index: np.ndarray


def distinct_pairs(source: Sharded, target: Sharded, domains: np.ndarray, *, far_alike: bool) -> DistinctPairs:
    """Sorts pairs of shardings into those that are alike.

    Args:
      source: R shardings where a tensor is made.
      target: C shardings where it is used.
      domains: int64 [L], devices per link domain, innermost first.
      far_alike: take pairs for alike where some device needs as much, as many shards of it, and has nothing of them in
        its largest domain.
    """
    split = np.flatnonzero((source.shards > 1).any(axis=0) | (target.shards > 1).any(axis=0)).tolist()
    relations, source_index, target_index = [], [], []
    for dim in split:
        here, own = _distinct(source, dim)
        there, wanted = _distinct(target, dim)
        relations.append(_relations(here.tobytes(), there.tobytes(), domains.tobytes()))
        source_index.append(own)
        target_index.append(wanted)
    # The last table is that of the numbers of devices.
    here, own = np.unique(source.devices, return_inverse=True)
    there, wanted = np.unique(target.devices, return_inverse=True)
    tables = [*((found.first, found.second, found.needed) for found in relations),
              _device_relations(here, there, domains)]
    every_source = np.stack([*source_index, own]).astype(np.int64)
    every_target = np.stack([*target_index, wanted]).astype(np.int64)
    first, second, needed = (np.concatenate([table[kind].ravel() for table in tables]) for kind in range(3))
    number, rows, columns = _number_pairs(
        first, second, needed, np.cumsum([0, *(table[0].size for table in tables[:-1])]),
        np.array([table[0].shape[1] for table in tables]), every_source, every_target, target.shards.prod(axis=1),
        far_alike)
    return DistinctPairs(number, rows, columns, split, relations, every_source[:-1], every_target[:-1])


def _distinct(sharded: Sharded, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The different (shards, stride, devices) of a dim, int64 [n, 3], and the number of each sharding's."""
    strides = np.where(sharded.shards[:, dim] > 1, sharded.strides[:, dim], 1)
    return np.unique(np.stack([sharded.shards[:, dim], strides, sharded.devices], axis=1), axis=0, return_inverse=True)


def _mixed(*words: np.ndarray) -> np.ndarray:
    """A pseudo-random uint64 for every tuple of the words' entries."""
    state = np.zeros(np.broadcast_shapes(*(word.shape for word in words)), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = state + word.astype(np.uint64) + _MIX[0]
            state = (state ^ (state >> np.uint64(30))) * _MIX[1]
            state = (state ^ (state >> np.uint64(27))) * _MIX[2]
            state = state ^ (state >> np.uint64(31))
    return state


def _code(*words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two numbers by which a tuple of the words' entries is known, int64."""
    return ((_mixed(np.zeros(1), *words) >> np.uint64(64 - _SUM_BITS)).astype(np.int64),
            (_mixed(np.ones(1), *words) >> np.uint64(1)).astype(np.int64))


def _device_relations(source: np.ndarray, target: np.ndarray,
                      domains: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the numbers of devices at either end add to a code; as `DimRelations.first`, `second` and `needed`."""
    first, second = _code(source[:, None], target[None, :])
    # The domain of the last device of the target may begin beyond the devices of the source.
    far = (target[None, :] - 1) // domains[-1] * domains[-1] >= source[:, None]
    return first + (far.astype(np.int64) << _FAR_PLACE), second, np.ones_like(first)


@functools.lru_cache(maxsize=64)
def _relations(source: bytes, target: bytes, domains: bytes) -> DimRelations:
    """One dim under all (shards, stride, devices) at either end, given as the bytes of int64 arrays."""
    here, there = (np.frombuffer(cuts, np.int64).reshape(-1, 3) for cuts in (source, target))
    shards, strides = here[:, None, 0], here[:, None, 1]
    wanted, wanted_strides = there[None, :, 0], there[None, :, 1]
    both = (shards > 1) & (wanted > 1)
    # What a whole dim at the source adds depends on the target alone, and is in the code of all pairs.
    first, second = _code(shards, np.where(shards > 1, strides, 1), wanted, np.where(both, wanted_strides, 1))
    split = (shards > 1) | (wanted > 1)
    first, second = np.where(split, first, 0), np.where(split, second, 0)
    even = (shards % wanted == 0) | (wanted % shards == 0)
    needed, held, held_shards = _extremes(here, there, np.frombuffer(domains, np.int64))
    far = both & (held[:, :, -1] == 0)
    first = first + (far.astype(np.int64) << _FAR_PLACE) + ((~even).astype(np.int64) << _UNEVEN_PLACE)
    return DimRelations(first, second, needed, held, held_shards)


@compiled
def gcd(one: int, other: int) -> int:  # pragma: no cover (compiled)
    """The greatest common divisor."""
    while other:
        one, other = other, one % other
    return one


@compiled
def lcm(one: int, other: int) -> int:  # pragma: no cover (compiled)
    """The least common multiple."""
    return one // gcd(one, other) * other


@compiled
def held_along(begin: int, end: int, shards: int, stride: int, goal: int,
               wanted: int) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Of one shard of a dim, what consecutive devices hold.

    Args:
      begin, end: devices begin to end - 1.
      shards, stride: how the dim is split there.
      goal, wanted: which shard, of how many.

    Returns:
      (how much, of shards x wanted units that the whole dim has; in how many of the devices' different shards).
    """
    low, high = goal * shards, (goal + 1) * shards
    from_shard, to_shard = low // wanted, -(-high // wanted)
    first, count = begin // stride, (end - 1) // stride - begin // stride + 1
    if count >= shards:
        return shards, to_shard - from_shard
    first %= shards
    beyond = max(0, first + count - shards)  # so many at the end begin anew at the first shard
    end_shard = first + count - beyond
    held = max(0, min(high, end_shard * wanted) - max(low, first * wanted)) + max(0, min(high, beyond * wanted) - low)
    return held, max(0, min(to_shard, end_shard) - max(from_shard, first)) + max(0, min(to_shard, beyond) - from_shard)


@compiled
def scattered(count: int) -> int:  # pragma: no cover (compiled)
    """A step by which 0 to count - 1 are visited once each, far apart: i * step % count for every i."""
    step = max(1, int(0.618 * count))
    while gcd(step, count) != 1:
        step += 1
    return step


@compiled
def _most_needed(shards: int, wanted: int) -> int:  # pragma: no cover (compiled)
    """The most shards at the source that one at the target touches."""
    most = 0
    for goal in range(wanted):
        most = max(most, -(-(goal + 1) * shards // wanted) - goal * shards // wanted)
    return most


@compiled
def _extremes(source: np.ndarray, target: np.ndarray, domains: np.ndarray,
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """`DimRelations.needed`, `least_held` and `least_shards` of a dim with these (shards, stride, devices)."""
    levels = len(domains)
    needed = np.ones((len(source), len(target)), np.int64)
    held = np.ones((len(source), len(target), levels), np.int64)
    held_shards = np.ones((len(source), len(target), levels), np.int64)
    for row in range(len(source)):
        shards, stride, holders = source[row]
        if shards == 1:
            continue
        for column in range(len(target)):
            wanted, wanted_stride, devices = target[column]
            needed[row, column] = _most_needed(shards, wanted)
            held[row, column] = shards
            held_shards[row, column] = needed[row, column]
            # Devices in a row that hold the same, need the same and are in the same domains count once.
            run, period = gcd(stride, holders), lcm(domains[levels - 1], stride * shards)
            if wanted > 1:
                run, period = gcd(run, wanted_stride), lcm(period, wanted_stride * wanted)
            for level in range(1, levels):
                run = gcd(run, domains[level])
            if holders % period or devices > holders:
                period = devices  # nothing repeats
            runs = -(-min(period, devices) // run)
            step = scattered(runs)
            for visit in range(runs):
                device = visit * step % runs * run
                goal = device // wanted_stride % wanted
                for level in range(levels - 1, -1, -1):
                    begin = device // domains[level] * domains[level]
                    here, count = 0, 0
                    if begin < holders:
                        here, count = held_along(begin, min(begin + domains[level], holders), shards, stride, goal,
                                                 wanted)
                    held[row, column, level] = min(held[row, column, level], here)
                    held_shards[row, column, level] = min(held_shards[row, column, level], count)
                if held[row, column, levels - 1] == 0:
                    held[row, column], held_shards[row, column] = 0, 0
                    break
    return needed, held, held_shards


@compiled
def _place_of(first: int, second: int, firsts: np.ndarray, seconds: np.ndarray,
              numbers: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Where a code stands in a hash table whose length is a power of two, or the free place where it would."""
    place = (first ^ second) & (len(numbers) - 1)
    while numbers[place] != _FREE and (firsts[place] != first or seconds[place] != second):
        place = (place + 1) & (len(numbers) - 1)
    return place


@compiled
def _grown(firsts: np.ndarray, seconds: np.ndarray, numbers: np.ndarray,
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """The hash table with four times as many places."""
    size = 4 * len(numbers)
    larger, larger_seconds = np.empty(size, np.int64), np.empty(size, np.int64)
    larger_numbers = np.full(size, _FREE, np.int32)
    for old in range(len(numbers)):
        if numbers[old] != _FREE:
            place = _place_of(firsts[old], seconds[old], larger, larger_seconds, larger_numbers)
            larger[place], larger_seconds[place] = firsts[old], seconds[old]
            larger_numbers[place] = numbers[old]
    return larger, larger_seconds, larger_numbers


@compiled
def _add_codes(table: np.ndarray, begin: int, width: int, columns: np.ndarray,
               codes: np.ndarray) -> None:  # pragma: no cover (compiled)
    line = table[begin:begin + width]
    for column in range(len(columns)):
        codes[column] += line[columns[column]]


@compiled
def _number_pairs(first: np.ndarray, second: np.ndarray, needed: np.ndarray, begin: np.ndarray, widths: np.ndarray,
                  source_index: np.ndarray, target_index: np.ndarray, blocks: np.ndarray,
                  far_alike: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """Numbers all pairs by their codes.

    Args:
      first, second, needed: what every table adds to the codes of a pair, and what it multiplies the shards it needs
        by; tables one after the other, row-major.
      begin, widths: where each begins, how wide each is.
      source_index, target_index: int64 [tables, R] and [tables, C], the row and the column of each sharding in each.
      blocks: int64 [C], into how many blocks the target splits the tensor.
      far_alike: as of `distinct_pairs`.

    Returns:
      `DistinctPairs.number`, `rows` and `columns`.
    """
    tables, rows, columns = len(begin), source_index.shape[1], target_index.shape[1]
    number = np.empty((rows, columns), np.int32)
    firsts, seconds = np.empty(_FIRST_PLACES, np.int64), np.empty(_FIRST_PLACES, np.int64)
    numbers = np.full(_FIRST_PLACES, _FREE, np.int32)
    found_rows, found_columns = np.empty(_FIRST_PLACES, np.int64), np.empty(_FIRST_PLACES, np.int64)
    known = 0
    codes, more = np.empty(columns, np.int64), np.empty(columns, np.int64)
    for row in range(rows):
        codes[:], more[:] = 0, 0
        for table in range(tables):
            place = begin[table] + source_index[table, row] * widths[table]
            _add_codes(first, place, widths[table], target_index[table], codes)
            _add_codes(second, place, widths[table], target_index[table], more)
        for column in range(columns):
            code, other = codes[column], more[column]
            if far_alike and code >> _FAR_PLACE & _COUNT_MASK and not code >> _UNEVEN_PLACE:
                code = 1
                for table in range(tables):
                    code *= needed[begin[table] + source_index[table, row] * widths[table]
                                   + target_index[table, column]]
                code, other = -code, blocks[column]
            place = _place_of(code, other, firsts, seconds, numbers)
            if numbers[place] == _FREE:
                firsts[place], seconds[place], numbers[place] = code, other, known
                found_rows[known], found_columns[known] = row, column
                number[row, column] = known
                known += 1
                if 2 * known == len(numbers):
                    firsts, seconds, numbers = _grown(firsts, seconds, numbers)
                    found_rows = np.concatenate((found_rows[:known], np.empty(len(numbers), np.int64)))
                    found_columns = np.concatenate((found_columns[:known], np.empty(len(numbers), np.int64)))
            else:
                number[row, column] = numbers[place]
    return number, found_rows[:known].copy(), found_columns[:known].copy()
