"""What moving a tensor costs the critical-path device: the one whose transfers take longest, of all pairs of shardings.

A device fetches what it needs and does not hold from the innermost link domain that holds it. What the devices of a
domain hold together is in most shardings a product of what they hold along each dim (`NumberedPairs.boxes`); where it
is not, their blocks are counted one by one. What a device's transfers take is a line over the size of the tensor: the
highest lines of a pair of shardings are found once, whatever the size. Devices are looked at until they reach what none
can exceed, seen along each dim by itself: mostly none has to be, or the first few.
"""

from __future__ import annotations

import numpy as np

from pase_mtf.cost.dim_relations import (
    KIND_ALIKE,
    KIND_MERGED,
    Fronts,
    Sharded,
    domain_shards,
    gcd,
    held_along,
    lcm,
    quotient,
    scattered,
)
from pase_mtf.cost.distinct_pairs import DistinctPairs
from pase_mtf.search.compiled import compiled

__all__ = ["CriticalPaths"]

# A cost this close to what no device can exceed is not looked beyond: rounding errors.
_CLOSE = 1.0 - 1e-12
_MOST_VECTORS = 16


class CriticalPaths:
    """Costs of critical-path devices; every pair of shardings, and all that are like it, is looked at once."""

    def __init__(self, domains: np.ndarray, per_size: np.ndarray, per_message: np.ndarray) -> None:
        """Knows no pair.

        Args:
          domains: int64 [L], devices per link domain, innermost first, the first of them 1, each a divisor of the next:
            what a device needs and no device of its own domain of domains[l] holds crosses level l.
          per_size: float64 [L], cost of a unit of the tensor's size crossing that level.
          per_message: float64 [L], cost of every source shard of which something crosses it.
        """
        self._domains, self._per_size, self._per_message = domains, per_size, per_message
        # Only then nothing costs more than fetching all of it over the outermost links.
        self._ordered = bool(np.all(np.diff(per_size) >= 0) and np.all(np.diff(per_message) >= 0))
        self._pairs = DistinctPairs(domains, far_alike=self._ordered)
        # The lines of pair n are those from begin[n] to begin[n + 1]: (cost per size of what a device needs, cost).
        self._begin, self._lines = np.zeros(1, np.int64), np.empty((0, 2))
        self._numbers: dict[tuple[bytes, ...], np.ndarray] = {}

    def costs(self, source: Sharded, target: Sharded, size: float) -> np.ndarray:
        """The cost of the critical-path device, for every pair of shardings.

        Args:
          source: R shardings of a tensor where it is made.
          target: C shardings of it where it is used.
          size: of the tensor, in any unit.

        Returns:
          float64 [R, C].
        """
        key = tuple(array.tobytes() for array in (*source, *target))
        if key not in self._numbers:
            self._numbers[key] = self._number(source, target)
        return _costs(self._numbers[key], self._begin, self._lines, size / target.shards.prod(axis=1))

    def _number(self, source: Sharded, target: Sharded) -> np.ndarray:
        """`NumberedPairs.number`; finds the lines of pairs that are new."""
        pairs = self._pairs.number(source, target)
        if len(pairs.new):
            relations = self._pairs.relations
            begin, lines = _pair_lines(
                pairs.new, source, target, pairs.source_splits, pairs.target_splits, pairs.boxes, relations.front,
                relations.fronts, self._domains, self._per_size, self._per_message, self._ordered)
            self._begin = np.concatenate((self._begin, self._begin[-1] + begin[1:]))
            self._lines = np.concatenate((self._lines, lines))
        return pairs.number


@compiled
def _costs(number: np.ndarray, begin: np.ndarray, lines: np.ndarray,
           sizes: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """The highest line of every pair at the size of the block that a device needs, `sizes` [C]: float64 [R, C]."""
    rows, columns = number.shape
    costs = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            pair, size = number[row, column], sizes[column]
            cost = 0.0
            for place in range(begin[pair], begin[pair + 1]):
                cost = max(cost, lines[place, 0] * size + lines[place, 1])
            costs[row, column] = cost
    return costs


@compiled(inline=True)
def _line(held: np.ndarray, needed: float, needed_shards: float, per_size: np.ndarray,
          per_message: np.ndarray) -> tuple[float, float]:  # pragma: no cover (compiled)
    """What it costs a device to fetch what its domains do not hold: (per size of what it needs, besides).

    Args:
      held: float64 [2 L or more], of what it needs: how much its domain of each level holds, then in how many shards.
      needed, needed_shards: all that it needs.
      per_size, per_message: as of `CriticalPaths`.
    """
    slope, offset, away, away_shards = 0.0, 0.0, 0.0, 0.0  # away: what crosses the levels further out
    levels = len(per_size)
    for level in range(levels - 1, -1, -1):
        missing, missing_shards = needed - held[level], needed_shards - held[levels + level]
        slope += (missing - away) / needed * per_size[level]
        offset += (missing_shards - away_shards) * per_message[level]
        away, away_shards = missing, missing_shards
    return slope, offset


@compiled
def _reached(lines: np.ndarray, count: int, slope: float, offset: float) -> bool:  # pragma: no cover (compiled)
    """Whether one of the first `count` lines is nowhere below this one."""
    reached = False
    for place in range(count):
        reached = reached or (lines[place, 0] >= slope * _CLOSE and lines[place, 1] >= offset * _CLOSE)
    return reached


@compiled
def _add_line(lines: np.ndarray, count: int, slope: float,
              offset: float) -> tuple[np.ndarray, int]:  # pragma: no cover (compiled)
    """Adds a line to the first `count`, none of which is nowhere above another; returns the lines and their count."""
    if _reached(lines, count, slope, offset):
        return lines, count
    kept = 0
    for place in range(count):
        if not (slope >= lines[place, 0] and offset >= lines[place, 1]):
            lines[kept] = lines[place]
            kept += 1
    if kept == len(lines):
        lines = np.concatenate((lines, np.empty_like(lines)))
    lines[kept, 0], lines[kept, 1] = slope, offset
    return lines, kept + 1


@compiled
def _worst_vectors(row: int, column: int, source_splits: np.ndarray, target_splits: np.ndarray, shards: np.ndarray,
                   front: np.ndarray, fronts: Fronts, vectors: np.ndarray, room: np.ndarray,
                   ) -> tuple[int, bool]:  # pragma: no cover (compiled)
    """What no device of a pair is worse than: the fronts of all dims multiplied.

    Args:
      row, column: the pair.
      source_splits, target_splits: of `NumberedPairs`.
      shards: int64 [T], of the source.
      front, fronts: of `DimRelations`.
      vectors: float64 [_MOST_VECTORS, 2 L + 1], to put them into; `room` is as large.

    Returns:
      (how many; whether there is a device that is as each of them says).
    """
    width = vectors.shape[1]
    count, varying, met = 1, 0, True
    vectors[0] = 1.0
    for dim in range(len(shards)):
        if shards[dim] == 1:
            continue
        number = front[source_splits[dim, row], target_splits[dim, column]]
        begin, end = fronts.begin[number], fronts.begin[number + 1]
        varying += fronts.kind[number] != KIND_ALIKE
        met = met and fronts.kind[number] != KIND_MERGED
        if count * (end - begin) > _MOST_VECTORS:
            met = False
            for entry in range(width):
                least = fronts.vectors[begin:end, entry].min()
                for place in range(count):
                    vectors[place, entry] *= abs(least)
            continue
        made = 0
        for place in range(count):
            for other in range(begin, end):
                for entry in range(width):
                    room[made, entry] = vectors[place, entry] * abs(fronts.vectors[other, entry])
                made += 1
        vectors[:made] = room[:made]
        count = made
    return count, met and varying <= 1


@compiled
def _limits(vectors: np.ndarray, needed: float, boxes: np.ndarray, beyond: bool, per_size: np.ndarray,
            per_message: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """Lines that no device of a pair is above, where costs per level do not fall: float64 [.., 2].

    Args:
      vectors: float64 [.., 2 L + 1], of `_worst_vectors`; changed.
      needed: how much a device needs, in their units.
      boxes: bool [L], of the source.
      beyond: some device is none of the source's.
      per_size, per_message: as of `CriticalPaths`.
    """
    levels = len(boxes)
    lines, known = np.empty((len(vectors), 2)), 0
    for vector in vectors:
        for level in range(levels):
            if not boxes[level]:  # at least what each device holds itself
                vector[level], vector[levels + level] = vector[0], vector[levels]
        if beyond:
            vector[:2 * levels] = 0.0
        slope, offset = _line(vector, needed, vector[2 * levels], per_size, per_message)
        lines, known = _add_line(lines, known, slope, offset)
    return lines[:known]


@compiled
def _mark_first(devices: int, shards: np.ndarray, strides: np.ndarray, domain: int, seen: np.ndarray,
                first: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Marks in `first` every device that is the first of its link domain to hold its block."""
    seen[:] = -1
    per_stride, per_shard = 1.0 / strides, 1.0 / shards
    for begin in range(0, devices, domain):
        for device in range(begin, min(begin + domain, devices)):
            block = 0
            for dim in range(len(shards)):
                shard = quotient(device, per_stride[dim])
                block = block * shards[dim] + shard - quotient(shard, per_shard[dim]) * shards[dim]
            first[device] = seen[block] != begin
            seen[block] = begin


@compiled(inline=True)
def _blocks_of(begin: int, end: int, level: int, first: np.ndarray, splits: np.ndarray, per: np.ndarray,
               blocks: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Puts the different blocks that devices begin to end - 1 hold into `blocks[level]`: of each dim, where the block
    begins, in the units of `held_along`. Returns how many; arguments as of `_device_line`."""
    count = 0
    for device in range(begin, end):
        if first[level, device]:
            for dim in range(len(splits)):
                shard = quotient(device, per[dim, 1])
                blocks[level, count, dim] = (shard - quotient(shard, per[dim, 0]) * splits[dim, 0]) * splits[dim, 2]
            count += 1
    return count


@compiled(inline=True)
def _held_blocks(level: int, blocks: np.ndarray, count: int, splits: np.ndarray,
                 goals: np.ndarray) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Of the block that a device needs, what the first `count` blocks hold together: (how much, in how many)."""
    held, touched = 0, 0
    for block in range(count):
        common = 1
        for dim in range(len(splits)):
            low, needed = blocks[level, block, dim], goals[dim, 0] * splits[dim, 0]
            common *= max(0, min(needed + splits[dim, 0], low + splits[dim, 2]) - max(needed, low))
        held += common
        touched += common > 0
    return held, touched


@compiled(inline=True)
def _needed_by(device: int, devices: int, splits: np.ndarray, per: np.ndarray,
               goals: np.ndarray) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Which block one device needs: (its number, how much of it the device holds itself).

    Args:
      device: which.
      devices: how many hold a block of the source.
      splits: int64 [D, 4], of the dims that are split at the source: shards and stride there, and at the target.
      per: float64 [D, 4], 1 / splits.
      goals: int64 [D, 3], to put the needed shard of each dim into, and which shards of the source touch it: the first,
        and that after the last.
    """
    number, own = 0, 1
    for dim in range(len(splits)):
        shards, wanted = splits[dim, 0], splits[dim, 2]
        goal, shard = quotient(device, per[dim, 3]), quotient(device, per[dim, 1])
        goal -= quotient(goal, per[dim, 2]) * wanted
        shard -= quotient(shard, per[dim, 0]) * shards
        number = number * wanted + goal
        goals[dim, 0] = goal
        goals[dim, 1] = quotient(goal * shards, per[dim, 2])
        goals[dim, 2] = quotient((goal + 1) * shards - 1, per[dim, 2]) + 1
        own *= max(0, min((goal + 1) * shards, (shard + 1) * wanted) - max(goal * shards, shard * wanted))
    return number, own if device < devices else 0


@compiled(inline=True)
def _device_line(device: int, devices: int, own: int, splits: np.ndarray, per: np.ndarray, goals: np.ndarray,
                 boxes: np.ndarray, first: np.ndarray, blocks: np.ndarray, last: np.ndarray, domains: np.ndarray,
                 per_domain: np.ndarray, held: np.ndarray, per_size: np.ndarray,
                 per_message: np.ndarray) -> tuple[float, float]:  # pragma: no cover (compiled)
    """What fetching its block costs one device, as of `_line`.

    Args:
      device, devices, splits, per: as of `_needed_by`.
      own, goals: what that found.
      boxes: bool [L], of the source.
      first: bool [L, devices], of `_mark_first`, where `boxes` is false.
      blocks, last: the blocks of the domain of each level that was looked at last, int64 [L, .., D]; where it begins,
        and how many they are, int64 [L, 2].
      domains, per_size, per_message: as of `CriticalPaths`; per_domain is 1 / domains.
      held: float64 [2 L], room to work in.
    """
    needed, needed_shards, levels = 1, 1, len(domains)
    for dim in range(len(splits)):
        needed *= splits[dim, 0]
        needed_shards *= goals[dim, 2] - goals[dim, 1]
    held[0], held[levels] = own, min(own, 1)
    for level in range(1, levels):
        begin = quotient(device, per_domain[level]) * domains[level]
        end = min(begin + domains[level], devices)
        here, touched = 0, 0
        if begin >= devices:
            pass
        elif boxes[level]:
            here, touched = 1, 1
            for dim in range(len(splits)):
                start, count = domain_shards(begin, end, splits[dim, 0], per[dim, 0], per[dim, 1])
                along, shards = held_along(start, count, splits[dim, 0], goals[dim, 0], splits[dim, 2], goals[dim, 1],
                                           goals[dim, 2])
                here *= along
                touched *= shards
        else:
            if last[level, 0] != begin:
                last[level, 0] = begin
                last[level, 1] = _blocks_of(begin, end, level, first, splits, per, blocks)
            here, touched = _held_blocks(level, blocks, last[level, 1], splits, goals)
        held[level], held[levels + level] = here, touched
    return _line(held, needed, needed_shards, per_size, per_message)


@compiled
def _device_lines(devices: int, wanted_devices: int, splits: np.ndarray, boxes: np.ndarray, first: np.ndarray,
                  blocks: np.ndarray, limits: np.ndarray, domains: np.ndarray, per_size: np.ndarray,
                  per_message: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """The highest lines of the devices of a pair, found by looking at one after the other.

    Args:
      devices, wanted_devices: how many there are at either end.
      limits: float64 [.., 2], of `_limits`; empty: unknown.
      splits, boxes, first, blocks: as of `_device_line`.
      domains, per_size, per_message: as of `CriticalPaths`.
    """
    levels, per, per_domain = len(domains), 1.0 / splits, 1.0 / domains
    goals, held, last = np.empty((len(splits), 3), np.int64), np.empty(2 * levels), np.full((levels, 2), -1)
    # Devices in a row that hold the same, need the same and are in the same domains count once. Of a dim of which all
    # is needed it makes no difference which shard a device holds, only which other devices hold the same.
    run, period = devices, domains[levels - 1]
    for level in range(1, levels):
        run = gcd(run, domains[level])
    for dim in range(len(splits)):
        shards, stride, wanted, wanted_stride = splits[dim]
        if wanted % shards == 0 or shards % wanted == 0:
            # All of what is finer there than here is needed, or held.
            if shards > wanted:
                period = lcm(period, stride)
            common = min(shards, wanted)
            stride, wanted_stride = stride * (shards // common), wanted_stride * (wanted // common)
            shards, wanted = common, common
            if stride == wanted_stride and stride % domains[levels - 1] == 0:
                continue  # every device of a domain holds the part that it needs
        if wanted > 1:
            run, period = gcd(gcd(run, stride), wanted_stride), lcm(lcm(period, shards * stride),
                                                                    wanted * wanted_stride)
    if devices % period or wanted_devices > devices:
        period = wanted_devices  # nothing repeats
    runs = -(-min(period, wanted_devices) // run)
    # Far apart, as neighbours mostly are alike; but those of a domain together where its blocks have to be found.
    together = 1 if boxes.all() else max(1, domains[levels - 1] // run)
    groups = -(-runs // together)
    lines, count, step, group = np.empty((4, 2)), 0, scattered(groups), 0
    innermost, seen, least = domains[min(1, levels - 1)], -1, 0
    for _ in range(groups):
        group = group + step if group + step < groups else group + step - groups
        for place in range(group * together, min((group + 1) * together, runs)):
            device = place * run
            number, own = _needed_by(device, devices, splits, per, goals)
            # Beside a device of its domain that needs the same block and holds no more of it, a device pays no more.
            number = number * wanted_devices + device // innermost
            if number == seen and own >= least:
                continue
            seen, least = number, own
            slope, offset = _device_line(device, devices, own, splits, per, goals, boxes, first, blocks, last, domains,
                                         per_domain, held, per_size, per_message)
            if not _reached(lines, count, slope, offset):
                lines, count = _add_line(lines, count, slope, offset)
        missed = len(limits) == 0
        for limit in range(len(limits)):
            missed = missed or not _reached(lines, count, limits[limit, 0], limits[limit, 1])
        if not missed:
            break
    return lines[:count]


@compiled
def _pair_lines(new: np.ndarray, source: Sharded, target: Sharded, source_splits: np.ndarray,
                target_splits: np.ndarray, boxes: np.ndarray, front: np.ndarray, fronts: Fronts, domains: np.ndarray,
                per_size: np.ndarray, per_message: np.ndarray,
                ordered: bool) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """The highest lines of pairs of shardings: (where those of each of N begin, int64 [N + 1]; float64 [.., 2]).

    Args:
      new, source_splits, target_splits, boxes: of `NumberedPairs`.
      source, target: the shardings.
      front, fronts: of `DimRelations`.
      domains, per_size, per_message: as of `CriticalPaths`.
      ordered: costs per level do not fall.
    """
    levels, dims = len(domains), source.shards.shape[1]
    begin, found = np.zeros(len(new) + 1, np.int64), np.empty((len(new) + 1, 2))
    vectors, room = np.empty((_MOST_VECTORS, 2 * levels + 1)), np.empty((_MOST_VECTORS, 2 * levels + 1))
    most, marked = source.devices.max(), -1
    first, seen = np.zeros((levels, most), np.bool_), np.empty(most, np.int64)
    blocks = np.empty((levels, min(most, domains[levels - 1]), dims), np.int64)
    splits, lines = np.empty((dims, 4), np.int64), np.empty((1, 2))
    for pair in range(len(new)):
        row, column, touched = new[pair]
        devices, wanted_devices = source.devices[row], target.devices[column]
        if touched:
            lines[0, 0], lines[0, 1] = per_size[levels - 1], touched * per_message[levels - 1]
            pair_lines = lines
        else:
            split = 0
            for dim in range(dims):
                if source.shards[row, dim] > 1:
                    splits[split, 0], splits[split, 1] = source.shards[row, dim], source.strides[row, dim]
                    splits[split, 2], splits[split, 3] = target.shards[column, dim], target.strides[column, dim]
                    split += 1
            limits, met = np.empty((0, 2)), False
            if ordered:
                count, met = _worst_vectors(row, column, source_splits, target_splits, source.shards[row], front,
                                            fronts, vectors, room)
                limits = _limits(vectors[:count], source.shards[row].prod(), boxes[row], wanted_devices > devices,
                                 per_size, per_message)
            if met and boxes[row].all() and wanted_devices <= devices:
                pair_lines = limits
            else:
                if marked != row:
                    marked = row
                    for level in range(levels):
                        if not boxes[row, level]:
                            _mark_first(devices, source.shards[row], source.strides[row], domains[level], seen,
                                        first[level])
                pair_lines = _device_lines(devices, wanted_devices, splits[:split], boxes[row], first, blocks, limits,
                                           domains, per_size, per_message)
        begin[pair + 1] = begin[pair] + len(pair_lines)
        while begin[pair + 1] > len(found):
            found = np.concatenate((found, np.empty_like(found)))
        found[begin[pair]:begin[pair + 1]] = pair_lines
    return begin, found[:begin[len(new)]].copy()
