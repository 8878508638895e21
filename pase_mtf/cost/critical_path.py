"""What moving a tensor costs the critical-path device: the one whose transfers take longest, of all pairs of shardings.

A device fetches what it needs and does not hold from the innermost link domain that holds it. What the devices of a
domain hold together is in most shardings a product of what they hold along each dim (`_boxes`); where it is not, their
blocks are counted one by one. Devices are looked at until one is found whose domains hold as little of what it needs as
any can, seen along each dim by itself: mostly one of the first few.
"""

from __future__ import annotations

import numpy as np

from pase_mtf.cost.distinct_pairs import Sharded, distinct_pairs, gcd, held_along, lcm, scattered
from pase_mtf.search.compiled import compiled

__all__ = ["critical_path"]

# A cost this close to what no device can exceed is not looked beyond: rounding errors.
_CLOSE = 1.0 - 1e-12


def critical_path(source: Sharded, target: Sharded, domains: np.ndarray, per_tensor: np.ndarray,
                  per_message: np.ndarray) -> np.ndarray:
    """The cost of the critical-path device.

    Args:
      source: R shardings of the tensor where it is made.
      target: C shardings of it where it is used.
      domains: int64 [L], devices per link domain, innermost first, the first of them 1, each a divisor of the next:
        what a device needs and no device of its own domain of domains[l] holds crosses level l.
      per_tensor: float64 [L], cost of a whole tensor crossing that level.
      per_message: float64 [L], cost of every source shard of which something crosses it.

    Returns:
      float64 [R, C].
    """
    # Only then nothing costs more than fetching all of it over the outermost links.
    ordered = bool(np.all(np.diff(per_tensor) >= 0) and np.all(np.diff(per_message) >= 0))
    pairs = distinct_pairs(source, target, domains, far_alike=ordered)
    if not pairs.dims:  # whole at both ends
        tables = np.ones((0, len(domains)), np.int64), np.ones((0, len(domains)), np.int64), np.ones(0, np.int64)
    else:
        tables = (np.concatenate([table.least_held.reshape(-1, len(domains)) for table in pairs.relations]),
                  np.concatenate([table.least_shards.reshape(-1, len(domains)) for table in pairs.relations]),
                  np.concatenate([table.needed.ravel() for table in pairs.relations]))
    begin = np.cumsum([0, *(table.needed.size for table in pairs.relations)])
    widths = np.array([table.needed.shape[1] for table in pairs.relations], np.int64)
    ends = (source.devices, np.ascontiguousarray(source.shards[:, pairs.dims]),
            np.ascontiguousarray(source.strides[:, pairs.dims]), target.devices,
            np.ascontiguousarray(target.shards[:, pairs.dims]), np.ascontiguousarray(target.strides[:, pairs.dims]))
    limits = _limits(*tables, begin, widths, pairs.source_index, pairs.target_index, pairs.rows, pairs.columns, *ends,
                     boxes := _boxes(source, domains), per_tensor, per_message)
    if not ordered:
        limits[:] = np.inf
    costs = _pair_costs(pairs.rows, pairs.columns, *ends, boxes, limits, domains, per_tensor, per_message)
    found: np.ndarray = costs[pairs.number]
    return found


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


@compiled
def _crossing_cost(held: np.ndarray, shards: np.ndarray, needed: float, needed_shards: float, share: float,
                   per_tensor: np.ndarray, per_message: np.ndarray) -> float:  # pragma: no cover (compiled)
    """What it costs a device to fetch what its domains do not hold.

    Args:
      held, shards: float64 [L], of what it needs: how much its domain of each level holds, in how many shards.
      needed, needed_shards: all that it needs.
      share: of the tensor, that one unit of `held` and `needed` is.
      per_tensor, per_message: as of `critical_path`.
    """
    cost, away, away_shards = 0.0, 0.0, 0.0  # away: what crosses the levels further out
    for level in range(len(held) - 1, -1, -1):
        missing, missing_shards = needed - held[level], needed_shards - shards[level]
        cost += ((missing - away) * share * per_tensor[level]
                 + (missing_shards - away_shards) * per_message[level])
        away, away_shards = missing, missing_shards
    return cost


@compiled
def _limits(least_held: np.ndarray, least_shards: np.ndarray, needed: np.ndarray, begin: np.ndarray,
            widths: np.ndarray, source_index: np.ndarray, target_index: np.ndarray, rows: np.ndarray,
            columns: np.ndarray, devices: np.ndarray, shards: np.ndarray, strides: np.ndarray, wanted_devices:
            np.ndarray, wanted: np.ndarray, wanted_strides: np.ndarray, boxes: np.ndarray, per_tensor: np.ndarray,
            per_message: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """What the critical-path device of each pair costs at most, float64 [N], where costs per level do not fall.

    Args:
      least_held, least_shards, needed: of the relations of all dims, one table after the other; [.., L], [.., L], [..].
      begin, widths, source_index, target_index: where each table begins, how wide it is, and where shardings stand.
      rows, columns: int64 [N], the pairs.
      devices to wanted_strides: the shardings, of the dims that have a table.
      boxes: of `_boxes`.
      per_tensor, per_message: as of `critical_path`.
    """
    levels = len(per_tensor)
    limits = np.empty(len(rows))
    held, held_shards = np.empty(levels), np.empty(levels)
    for pair in range(len(rows)):
        row, column = rows[pair], columns[pair]
        all_needed, needed_shards, units = 1.0, 1.0, 1.0
        held[:], held_shards[:] = 1.0, 1.0
        for dim in range(len(widths)):
            place = begin[dim] + source_index[dim, row] * widths[dim] + target_index[dim, column]
            all_needed *= shards[row, dim]
            units *= shards[row, dim] * wanted[column, dim]
            needed_shards *= needed[place]
            for level in range(levels):
                held[level] *= least_held[place, level]
                held_shards[level] *= least_shards[place, level]
        for level in range(levels):
            if wanted_devices[column] > devices[row]:
                held[level], held_shards[level] = 0.0, 0.0
            elif not boxes[row, level]:  # at least what each device holds itself
                held[level], held_shards[level] = held[0], held_shards[0]
        limits[pair] = _crossing_cost(held, held_shards, all_needed, needed_shards, 1.0 / units, per_tensor,
                                      per_message)
    return limits


@compiled
def _mark_first(devices: int, shards: np.ndarray, strides: np.ndarray, domain: int, seen: np.ndarray,
                first: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Marks in `first` every device that is the first of its link domain to hold its block."""
    seen[:] = -1
    for device in range(devices):
        block = 0
        for dim in range(len(shards)):
            block = block * shards[dim] + device // strides[dim] % shards[dim]
        first[device] = seen[block] != device // domain
        seen[block] = device // domain


@compiled
def _held_blocks(begin: int, end: int, first: np.ndarray, shards: np.ndarray, strides: np.ndarray, goals: np.ndarray,
                 wanted: np.ndarray) -> tuple[float, float]:  # pragma: no cover (compiled)
    """Of the block `goals`, what the different blocks of devices begin to end - 1 hold: (how much, in how many)."""
    held, count = 0.0, 0.0
    for device in range(begin, end):
        if first[device]:
            common = 1
            for dim in range(len(shards)):
                common *= held_along(device, device + 1, shards[dim], strides[dim], goals[dim], wanted[dim])[0]
                if common == 0:
                    break
            if common:
                held += common
                count += 1.0
    return held, count


@compiled
def _device_cost(device: int, devices: int, shards: np.ndarray, strides: np.ndarray, wanted: np.ndarray,
                 wanted_strides: np.ndarray, goals: np.ndarray, boxes: np.ndarray, first: np.ndarray,
                 domains: np.ndarray, held: np.ndarray, held_shards: np.ndarray, per_tensor: np.ndarray,
                 per_message: np.ndarray) -> float:  # pragma: no cover (compiled)
    """What fetching its block costs one device; `goals`, `held` and `held_shards` are room to work in."""
    needed, needed_shards, units = 1.0, 1.0, 1.0
    for dim in range(len(shards)):
        goal = device // wanted_strides[dim] % wanted[dim]
        goals[dim] = goal
        needed *= shards[dim]
        units *= shards[dim] * wanted[dim]
        needed_shards *= -(-(goal + 1) * shards[dim] // wanted[dim]) - goal * shards[dim] // wanted[dim]
    for level in range(len(domains) - 1, -1, -1):
        begin = device // domains[level] * domains[level]
        end = min(begin + domains[level], devices)
        held[level], held_shards[level] = 0.0, 0.0
        if begin >= devices or (level + 1 < len(domains) and held[level + 1] == 0.0):
            continue
        if boxes[level]:
            held[level], held_shards[level] = 1.0, 1.0
            for dim in range(len(shards)):
                here, count = held_along(begin, end, shards[dim], strides[dim], goals[dim], wanted[dim])
                held[level] *= here
                held_shards[level] *= count
        else:
            held[level], held_shards[level] = _held_blocks(begin, end, first[level], shards, strides, goals, wanted)
    return _crossing_cost(held, held_shards, needed, needed_shards, 1.0 / units, per_tensor, per_message)


@compiled
def _split_dims(shards: np.ndarray, wanted: np.ndarray, dims: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Puts the dims that are split at either end first in `dims`; returns how many there are."""
    count = 0
    for dim in range(len(shards)):
        if shards[dim] > 1 or wanted[dim] > 1:
            dims[count] = dim
            count += 1
    return count


@compiled
def _pair_costs(rows: np.ndarray, columns: np.ndarray, devices: np.ndarray, shards: np.ndarray, strides: np.ndarray,
                wanted_devices: np.ndarray, wanted: np.ndarray, wanted_strides: np.ndarray, boxes: np.ndarray,
                limits: np.ndarray, domains: np.ndarray, per_tensor: np.ndarray,
                per_message: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """The cost of the critical-path device of each pair, float64 [N].

    Args:
      rows, columns: int64 [N], the pairs, rows ascending.
      devices to wanted_strides: the shardings.
      boxes: of `_boxes`.
      limits: float64 [N], what no device's cost exceeds.
      domains, per_tensor, per_message: as of `critical_path`.
    """
    levels = len(domains)
    costs = np.zeros(len(rows))
    most = devices.max()
    first, seen = np.zeros((levels, most), np.bool_), np.empty(most, np.int64)
    goals, dims = np.empty(shards.shape[1], np.int64), np.empty(shards.shape[1], np.int64)
    held, held_shards = np.empty(levels), np.empty(levels)
    marked = -1
    for pair in range(len(rows)):
        row, column = rows[pair], columns[pair]
        if marked != row:
            marked = row
            for level in range(levels):
                if not boxes[row, level]:
                    _mark_first(devices[row], shards[row], strides[row], domains[level], seen, first[level])
        own = dims[:_split_dims(shards[row], wanted[column], dims)]
        here, there = shards[row][own], wanted[column][own]
        here_strides, there_strides = strides[row][own], wanted_strides[column][own]
        # Devices in a row that hold the same, need the same and are in the same domains count once.
        run, period = devices[row], domains[levels - 1]
        for level in range(1, levels):
            run = gcd(run, domains[level])
        for dim in range(len(own)):
            if here[dim] > 1:
                run, period = gcd(run, here_strides[dim]), lcm(period, here[dim] * here_strides[dim])
            if there[dim] > 1:
                run, period = gcd(run, there_strides[dim]), lcm(period, there[dim] * there_strides[dim])
        if devices[row] % period or wanted_devices[column] > devices[row]:
            period = wanted_devices[column]  # nothing repeats
        runs = -(-min(period, wanted_devices[column]) // run)
        step = scattered(runs)
        for visit in range(runs):
            # Not device 0 first, which in most pairs has what it needs.
            device = (visit + 1) * step % runs * run
            cost = _device_cost(device, devices[row], here, here_strides, there, there_strides, goals, boxes[row],
                                first, domains, held, held_shards, per_tensor, per_message)
            costs[pair] = max(costs[pair], cost)
            if costs[pair] >= limits[pair] * _CLOSE:
                break
    return costs
