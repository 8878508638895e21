"""What moving a tensor costs the critical-path device: the one whose transfers take longest, of all pairs of shardings.

A device fetches what it needs and does not hold from the innermost link domain that holds it. Two algorithms say what
that costs the device on which it takes longest: `critical_path_powers`, where all numbers are powers of two, works on
the bits of device numbers and never looks at a device; `critical_path_devices` looks at every one, and serves any
numbers.
"""

from __future__ import annotations

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["critical_path_devices", "critical_path_powers"]

# What a pair of shardings costs follows from a few exponents of two and counts, packed into one integer, its code. A
# code is a sum over the dims of the tensor. Its fields, lowest bits first: the share of the tensor that a device needs,
# the source shards that this touches, and per link domain, outermost first, the share that is held within the domain,
# the shards that this is held in, and how many dims do not match (then nothing that is needed is held there).
_FIELD_BITS = 6
_MISMATCH_BITS = 4
_FIELD_MASK = (1 << _FIELD_BITS) - 1
_MISMATCH_MASK = (1 << _MISMATCH_BITS) - 1
_NEED_BITS = 2 * _FIELD_BITS
_LEVEL_BITS = 2 * _FIELD_BITS + _MISMATCH_BITS
_HELD_BITS = 2 * _FIELD_BITS  # of a level, below its mismatches
# Levels whose fields fit into the 63 bits of a code.
_LEVELS = 3
# One count is left for the devices themselves, see `_code_tables`.
_MOST_DIMS = _MISMATCH_MASK - 1

# The costs of codes are kept in a hash table of 2 ** n places, at most half of them taken (Fibonacci hashing).
_HASH_BITS = 12
_HASH_FACTOR = 0x9E3779B97F4A7C15
_EMPTY = -1

# Less than any true overlap of two shards of a dim, and than any true remainder of a need: rounding errors.
_NO_OVERLAP = 1e-9
_NOTHING_MISSING = 1e-12


def critical_path_powers(source_devices: np.ndarray, source_shards: np.ndarray, source_strides: np.ndarray,
                         target_devices: np.ndarray, target_shards: np.ndarray, target_strides: np.ndarray,
                         domains: np.ndarray, per_tensor: np.ndarray, per_message: np.ndarray) -> np.ndarray:
    """The cost of the critical-path device where all numbers are powers of two.

    Then the number of a device's shard is a run of bits of the device's own number, and its shards at the two ends
    overlap in every dim either wholly (the higher bits of the two shard numbers agree) or not at all. If the compared
    runs are the same bits of the device's number they agree for all devices. If not, there is a device for which they
    differ, and then they differ within the smaller link domains as well, where still more bits are compared: it is the
    critical-path device.

    Args:
      source_devices, target_devices: int64 [R] and [C], on how many devices R and C shardings put the tensor.
      source_shards, source_strides, target_shards, target_strides: int64 [R, T] and [C, T], per dim of the tensor the
        number of shards, and how many consecutive devices hold the same one.
      domains: int64 [L], devices per link domain, innermost first, the first of them 1: what a device needs and no
        device of its own domain of domains[l] holds crosses level l.
      per_tensor: float64 [L], cost of a whole tensor crossing that level.
      per_message: float64 [L], cost of every source shard of which something crosses it.

    Returns:
      float64 [R, C].
    """
    result = np.zeros((len(source_devices), len(target_devices)))
    split = np.flatnonzero((source_shards > 1).any(axis=0) | (target_shards > 1).any(axis=0)).tolist()
    if len(split) > _MOST_DIMS:
        result[:] = critical_path_devices(source_devices, source_shards, source_strides, target_devices, target_shards,
                                          target_strides, domains, per_tensor, per_message)
        return result
    ends = [(_distinct(source_shards[:, dim], source_strides[:, dim]),
             _distinct(target_shards[:, dim], target_strides[:, dim])) for dim in split]
    devices = (np.unique(source_devices, return_inverse=True), np.unique(target_devices, return_inverse=True))
    source_index = np.stack([*(source[1] for source, _ in ends), devices[0][1]]).astype(np.int64)
    target_index = np.stack([*(target[1] for _, target in ends), devices[1][1]]).astype(np.int64)
    top = len(domains) - 1
    while top >= 0:
        # As many levels as fit into a code, outermost first. The level beyond comes along, for what crosses it does not
        # count again further in.
        beyond = int(top < len(domains) - 1)
        levels = np.arange(top, max(-1, top - (_LEVELS - beyond)), -1)
        inside = domains[np.r_[top + 1, levels] if beyond else levels]
        tables = _code_tables([(source[0], target[0]) for source, target in ends],
                              devices[0][0], devices[1][0], inside)
        begin = np.cumsum([0, *(table.size for table in tables[:-1])])
        widths = np.array([table.shape[1] for table in tables])
        _add_costs(np.concatenate([table.ravel() for table in tables]), begin, widths, source_index, target_index,
                   beyond, per_tensor[levels], per_message[levels], result)
        top = int(levels[-1]) - 1
    return result


def _distinct(shards: np.ndarray, strides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different (shards, stride), int64 [n, 2], and the number of each in the given order."""
    code, index = np.unique(shards << 32 | strides, return_inverse=True)
    return np.stack([code >> 32, code & (1 << 32) - 1], axis=1), index


def _code_tables(ends: list[tuple[np.ndarray, np.ndarray]], source_devices: np.ndarray, target_devices: np.ndarray,
                 domains: np.ndarray) -> list[np.ndarray]:
    """What each dim, and last the numbers of devices, add to the code of a pair: int64 [source, target] each."""
    tables = [_dim_codes(source, target, domains) for source, target in ends]
    # The last device of the target may have no device of the source in its domain: a mismatch.
    far = target_devices[None, :, None] > np.maximum(domains, source_devices[:, None, None])
    return [*tables, (far * _one_mismatch(np.arange(len(domains)))).sum(axis=2)]


def _one_mismatch(levels: np.ndarray) -> np.ndarray:
    """What one dim that does not match at a level adds to a code, for every level."""
    one: np.ndarray = np.int64(1) << _NEED_BITS + _LEVEL_BITS * levels + _HELD_BITS
    return one


def _exponent(number: np.ndarray) -> np.ndarray:
    exponent: np.ndarray = np.rint(np.log2(number)).astype(np.int64)
    return exponent


def _dim_codes(source: np.ndarray, target: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """What one dim adds to the code, int64 [source, target], of its (shards, stride) at either end."""
    shards, strides = source[:, 0, None], source[:, 1, None]
    wanted, wanted_strides = target[None, :, 0], target[None, :, 1]
    code: np.ndarray = _exponent(wanted) + (_exponent(np.maximum(shards // wanted, 1)) << _FIELD_BITS)
    mismatches = _one_mismatch(np.arange(len(domains)))
    for level, domain in enumerate(domains):
        # The devices of a link domain differ in the low bits of their number: together they hold larger blocks.
        coarse = shards // (np.minimum(np.maximum(strides, domain), shards * strides) // strides)
        finer = np.maximum(coarse, wanted)
        match = (coarse == 1) | (wanted == 1) | (shards * strides == wanted * wanted_strides)
        held = _exponent(finer) + (_exponent(np.maximum(shards // finer, 1)) << _FIELD_BITS)
        code = code + np.where(match, held << _NEED_BITS + _LEVEL_BITS * level, mismatches[level])
    return code


@compiled
def _cost_of(code: int, beyond: int, per_tensor: np.ndarray,
             per_message: np.ndarray) -> float:  # pragma: no cover (compiled)
    """What the exponents and mismatches of a code cost at some levels, outermost first.

    Args:
      code: see `_FIELD_BITS`.
      beyond: 1 where the code's first level is not to be charged, only what crosses it taken off the others; else 0.
      per_tensor, per_message: float64 [L], of the levels that are charged.
    """
    need = 2.0 ** -float(code & _FIELD_MASK)
    needed_shards = 2.0 ** float(code >> _FIELD_BITS & _FIELD_MASK)
    cost, away, away_shards = 0.0, 0.0, 0.0  # away: what crosses the levels further out
    place = _NEED_BITS
    for level in range(len(per_tensor) + beyond):
        held, held_shards = 0.0, 0.0
        if code >> (place + _HELD_BITS) & _MISMATCH_MASK == 0:
            held = 2.0 ** -float(code >> place & _FIELD_MASK)
            held_shards = 2.0 ** float(code >> (place + _FIELD_BITS) & _FIELD_MASK)
        missing, missing_shards = need - held, needed_shards - held_shards
        if level >= beyond:
            cost += ((missing - away) * per_tensor[level - beyond]
                     + (missing_shards - away_shards) * per_message[level - beyond])
        away, away_shards = missing, missing_shards
        place += _LEVEL_BITS
    return cost


@compiled
def _place_of(code: int, keys: np.ndarray, bits: int) -> np.int64:  # pragma: no cover (compiled)
    """Where a code stands in a hash table of 2 ** bits places, or the empty place where it would."""
    place = np.int64(np.uint64(code) * np.uint64(_HASH_FACTOR) >> np.uint64(64 - bits))
    while keys[place] != code and keys[place] != _EMPTY:
        place = (place + 1) & (len(keys) - 1)
    return place


@compiled
def _grown(keys: np.ndarray, costs: np.ndarray,
           bits: int) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """The hash table with 2 ** bits places."""
    larger, their_costs = np.full(1 << bits, _EMPTY, np.int64), np.empty(1 << bits)
    for number in range(len(keys)):
        if keys[number] != _EMPTY:
            place = _place_of(keys[number], larger, bits)
            larger[place], their_costs[place] = keys[number], costs[number]
    return larger, their_costs


@compiled
def _add_costs(tables: np.ndarray, begin: np.ndarray, widths: np.ndarray, source_index: np.ndarray,
               target_index: np.ndarray, beyond: int, per_tensor: np.ndarray, per_message: np.ndarray,
               result: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds the cost of every pair to `result`. What a code costs is worked out once, and kept in a hash table.

    Args:
      tables, begin, widths: `_code_tables` one after the other, where each begins, how wide each is.
      source_index, target_index: int64 [tables, R] and [tables, C], the row and the column of each sharding in each.
      beyond, per_tensor, per_message: as in `_cost_of`.
      result: float64 [R, C].
    """
    rows, columns = result.shape
    bits, known = _HASH_BITS, 0
    keys, costs = np.full(1 << bits, _EMPTY, np.int64), np.empty(1 << bits)
    codes = np.empty(columns, np.int64)
    for row in range(rows):
        codes[:] = 0
        for table in range(len(begin)):
            line = tables[begin[table] + source_index[table, row] * widths[table]:]
            own = target_index[table]
            for column in range(columns):
                codes[column] += line[own[column]]
        for column in range(columns):
            code = codes[column]
            place = _place_of(code, keys, bits)
            if keys[place] == _EMPTY:
                keys[place] = code
                costs[place] = _cost_of(code, beyond, per_tensor, per_message)
                result[row, column] += costs[place]
                known += 1
                if 2 * known > len(keys):
                    bits += 1
                    keys, costs = _grown(keys, costs, bits)
            else:
                result[row, column] += costs[place]


@compiled
def _mark_first(shard: np.ndarray, domain: int, devices: int,
                first: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Marks every device that is the first of its link domain to hold its block."""
    for device in range(devices):
        first[device] = True
        for earlier in range(device // domain * domain, device):
            same = True
            for dim in range(shard.shape[1]):
                if shard[device, dim] != shard[earlier, dim]:
                    same = False
                    break
            if same:
                first[device] = False
                break


@compiled
def _shards_of(devices: int, shards: np.ndarray,
               strides: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """Which shard of every dim each device holds, int64 [devices, T]."""
    result = np.empty((devices, len(shards)), np.int64)
    for device in range(devices):
        for dim in range(len(shards)):
            result[device, dim] = device // strides[dim] % shards[dim]
    return result


@compiled
def _held_within(begins: np.ndarray, ends: np.ndarray, first: np.ndarray, begin: int, end: int, goal_begins: np.ndarray,
                 goal_ends: np.ndarray) -> tuple[float, float]:  # pragma: no cover (compiled)
    """Of a block, what devices begin to end - 1 hold: (share of the tensor, in how many shards).

    Args:
      begins, ends: float64 [devices, T], the block that each device holds, as fractions of the tensor.
      first: whether a device is the first of its link domain to hold its block; others are left out.
      begin, end: the devices.
      goal_begins, goal_ends: float64 [T], the block that is looked for.
    """
    held, shards = 0.0, 0.0
    for device in range(begin, end):
        if first[device]:
            common = 1.0
            for dim in range(len(goal_begins)):
                overlap = min(ends[device, dim], goal_ends[dim]) - max(begins[device, dim], goal_begins[dim])
                common *= overlap if overlap > _NO_OVERLAP else 0.0
                if common == 0.0:
                    break
            if common > 0.0:
                held += common
                shards += 1.0
    return held, shards


@compiled
def _device_cost(need: float, needed_shards: float, device: int, devices: int, begins: np.ndarray, ends: np.ndarray,
                 first: np.ndarray, goal_begins: np.ndarray, goal_ends: np.ndarray, domains: np.ndarray,
                 per_tensor: np.ndarray, per_message: np.ndarray) -> float:  # pragma: no cover (compiled)
    """What fetching its block costs one device, level by level, outermost first."""
    cost, away, away_shards = 0.0, 0.0, 0.0  # away: what crosses the levels further out
    for level in range(len(domains) - 1, -1, -1):
        begin = device // domains[level] * domains[level]
        held, shards = _held_within(begins, ends, first[level], begin, min(begin + domains[level], devices),
                                    goal_begins, goal_ends)
        missing = need - held if need - held > _NOTHING_MISSING else 0.0
        missing_shards = needed_shards - shards
        cost += (missing - away) * per_tensor[level] + (missing_shards - away_shards) * per_message[level]
        away, away_shards = missing, missing_shards
        if shards == 0.0:
            break  # nothing is held further in either
    return cost


@compiled
def critical_path_devices(
        source_devices: np.ndarray, source_shards: np.ndarray, source_strides: np.ndarray, target_devices: np.ndarray,
        target_shards: np.ndarray, target_strides: np.ndarray, domains: np.ndarray, per_tensor: np.ndarray,
        per_message: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """`critical_path_powers` for any numbers: looks at every device, and at everything that its link domains hold."""
    rows, columns, dims = len(source_devices), len(target_devices), source_shards.shape[1]
    result = np.zeros((rows, columns))
    most = source_devices.max()
    first = np.zeros((len(domains), most), np.bool_)
    begins, ends = np.empty((most, dims)), np.empty((most, dims))
    goal_begins, goal_ends = np.empty(dims), np.empty(dims)
    for row in range(rows):
        shards, devices = source_shards[row], source_devices[row]
        shard = _shards_of(devices, shards, source_strides[row])
        for level in range(len(domains)):
            _mark_first(shard, domains[level], devices, first[level])
        for device in range(devices):
            for dim in range(dims):
                begins[device, dim] = shard[device, dim] / shards[dim]
                ends[device, dim] = (shard[device, dim] + 1) / shards[dim]
        for column in range(columns):
            wanted, wanted_strides = target_shards[column], target_strides[column]
            need = 1.0
            for dim in range(dims):
                need /= wanted[dim]
            for device in range(target_devices[column]):
                needed_shards = 1.0
                for dim in range(dims):
                    goal = device // wanted_strides[dim] % wanted[dim]
                    needed_shards *= (-(-(goal + 1) * shards[dim] // wanted[dim])) - goal * shards[dim] // wanted[dim]
                    goal_begins[dim], goal_ends[dim] = goal / wanted[dim], (goal + 1) / wanted[dim]
                cost = _device_cost(need, needed_shards, device, devices, begins, ends, first, goal_begins, goal_ends,
                                    domains, per_tensor, per_message)
                result[row, column] = max(result[row, column], cost)
    return result
