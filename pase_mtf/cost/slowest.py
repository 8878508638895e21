"""What moving a tensor costs the device that is worst off, for all pairs of partitions at once (compiled).

A pair's cost depends on little: for every dim, on the parts and strides at the two ends. There are few different ones
however many partitions there are, so everything about them is worked out beforehand and only looked up per pair.
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["slowest_devices", "slowest_powers"]

# Fields of a code, in bits: what is needed, in how many source blocks, and per link level what is held near by, in how
# many blocks, and how many dims do not match. All but the last are exponents of two.
_FIELD = 6
_MISMATCHES = 4
_PER_LEVEL = 2 * _FIELD + _MISMATCHES
# Levels whose fields fit into 63 bits.
_LEVELS = 3
_MOST_DIMS = (1 << _MISMATCHES) - 2


def slowest_powers(source_devices: np.ndarray, source_parts: np.ndarray, source_strides: np.ndarray,
                   target_devices: np.ndarray, target_parts: np.ndarray, target_strides: np.ndarray,
                   reach: np.ndarray, per_tensor: np.ndarray, per_message: np.ndarray) -> np.ndarray:
    """The cost of the slowest device where all numbers are powers of two.

    Then a device's part number is a run of bits of its own number, and its blocks at the two ends overlap in every dim
    either wholly (the higher bits of the two part numbers agree) or not at all. If the compared runs are the same bits
    of the device's number they agree for all devices. If not, there is a device for which they differ, and then they
    differ at the levels further in as well, where still more bits are compared: it is the one worst off.

    Args:
      source_devices, target_devices: int64 [R] and [C].
      source_parts, source_strides, target_parts, target_strides: int64 [R, T] and [C, T].
      reach: int64 [L]; what a device needs and no device of its group of reach[l] holds crosses level l.
      per_tensor: float64 [L], cost of a whole tensor crossing that level.
      per_message: float64 [L], cost of every source block of which something crosses it.

    Returns:
      float64 [R, C].
    """
    result = np.zeros((len(source_devices), len(target_devices)))
    split = np.flatnonzero((source_parts > 1).any(axis=0) | (target_parts > 1).any(axis=0))
    if len(split) > _MOST_DIMS:
        return slowest_devices(source_devices, source_parts, source_strides, target_devices, target_parts,
                               target_strides, reach, per_tensor, per_message)
    top = len(reach) - 1
    while top >= 0:
        # The level further out, whose part of a message is not this one's, comes along but for the outermost.
        outer = top < len(reach) - 1
        levels = np.arange(top, max(-1, top - (_LEVELS - outer)), -1)
        near = reach[np.r_[top + 1, levels] if outer else levels]
        tables, source_index, target_index = [], [], []
        for d in split.tolist():
            (own, own_index), (wanted, wanted_index) = (
                _distinct(parts[:, d], strides[:, d])
                for parts, strides in ((source_parts, source_strides), (target_parts, target_strides)))
            tables.append(_codes(own, wanted, near))
            source_index.append(own_index)
            target_index.append(wanted_index)
        devices = [np.unique(entry, return_inverse=True) for entry in (source_devices, target_devices)]
        # The last device of the target may have no device of the source in its group: a mismatch.
        far = devices[1][0][None, :, None] > np.maximum(near, devices[0][0][:, None, None])
        tables.append((far * (np.int64(1) << _mismatch_at(np.arange(len(near))))).sum(axis=2))
        source_index.append(devices[0][1])
        target_index.append(devices[1][1])
        begin = np.cumsum([0, *(table.size for table in tables[:-1])])
        _add_costs(np.concatenate([table.ravel() for table in tables]), begin,
                   np.array([table.shape[1] for table in tables]), np.stack(source_index).astype(np.int64),
                   np.stack(target_index).astype(np.int64), outer, per_tensor[levels], per_message[levels], result)
        top = int(levels[-1]) - 1
    return result


def _mismatch_at(level: int | np.ndarray) -> int | np.ndarray:
    """The bit at which the number of dims that do not match begins."""
    return 2 * _FIELD + _PER_LEVEL * level + 2 * _FIELD


def _distinct(parts: np.ndarray, strides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different (parts, stride), int64 [n, 2], and the number of each in the given order."""
    code, index = np.unique(parts << 32 | strides, return_inverse=True)
    return np.stack([code >> 32, code & (1 << 32) - 1], axis=1), index


def _codes(own: np.ndarray, wanted: np.ndarray, near: np.ndarray) -> np.ndarray:
    """What one dim adds to the code, int64 [source, target]."""
    parts, strides = own[:, 0, None], own[:, 1, None]
    goal, goal_strides = wanted[None, :, 0], wanted[None, :, 1]

    def exponent(number: np.ndarray) -> np.ndarray:
        return np.rint(np.log2(number)).astype(np.int64)
    code = exponent(goal) + (exponent(np.maximum(parts // goal, 1)) << _FIELD)
    for level, reach in enumerate(near):
        # The devices of a group differ in the low bits of their number: together they hold larger blocks.
        coarse = parts // (np.minimum(np.maximum(strides, reach), parts * strides) // strides)
        finer = np.maximum(coarse, goal)
        match = (coarse == 1) | (goal == 1) | (parts * strides == goal * goal_strides)
        held = exponent(finer) + (exponent(np.maximum(parts // finer, 1)) << _FIELD)
        code = code + np.where(match, held << 2 * _FIELD + _PER_LEVEL * level, np.int64(1) << _mismatch_at(level))
    return code


@numba.njit(cache=True)
def _cost_of(code, outer, per_tensor, per_message):
    """What the exponents and mismatches of a code cost at some levels, outermost first."""
    mask = (1 << 6) - 1
    need, needed_blocks = 2.0 ** -float(code & mask), 2.0 ** float(code >> 6 & mask)
    cost, away, away_blocks = 0.0, 0.0, 0.0  # what crosses the levels further out
    place = 12
    for level in range(len(per_tensor) + outer):
        held, blocks = 0.0, 0.0
        if code >> (place + 12) & 15 == 0:
            held, blocks = 2.0 ** -float(code >> place & mask), 2.0 ** float(code >> (place + 6) & mask)
        missing, missing_blocks = need - held, needed_blocks - blocks
        if level >= outer:
            cost += ((missing - away) * per_tensor[level - outer]
                     + (missing_blocks - away_blocks) * per_message[level - outer])
        away, away_blocks = missing, missing_blocks
        place += 16
    return cost


@numba.njit(cache=True)
def _add_costs(tables, begin, widths, source_index, target_index, outer, per_tensor, per_message, result):
    """Adds the cost of every pair. A code is a sum over the dims; what it costs is worked out once, and kept hashed."""
    rows, columns = result.shape
    dims = len(begin)
    bits = 12
    keys, costs, known = np.full(1 << bits, -1, np.int64), np.empty(1 << bits), 0
    codes = np.empty(columns, np.int64)
    for row in range(rows):
        codes[:] = 0
        for d in range(dims):
            line = tables[begin[d] + source_index[d, row] * widths[d]:]
            own = target_index[d]
            for column in range(columns):
                codes[column] += line[own[column]]
        for column in range(columns):
            code = codes[column]
            mixed = np.uint64(code) * np.uint64(0x9E3779B97F4A7C15)
            place = np.int64(mixed >> np.uint64(64 - bits))
            while keys[place] != code and keys[place] != -1:
                place = (place + 1) & (len(keys) - 1)
            if keys[place] == -1:
                keys[place] = code
                costs[place] = _cost_of(code, outer, per_tensor, per_message)
                known += 1
                if 2 * known > len(keys):
                    old_keys, old_costs, bits = keys, costs, bits + 1
                    keys, costs = np.full(1 << bits, -1, np.int64), np.empty(1 << bits)
                    for old in range(len(old_keys)):
                        if old_keys[old] != -1:
                            mixed = np.uint64(old_keys[old]) * np.uint64(0x9E3779B97F4A7C15)
                            place = np.int64(mixed >> np.uint64(64 - bits))
                            while keys[place] != -1:
                                place = (place + 1) & (len(keys) - 1)
                            keys[place], costs[place] = old_keys[old], old_costs[old]
                result[row, column] += _cost_of(code, outer, per_tensor, per_message)
            else:
                result[row, column] += costs[place]


@numba.njit(cache=True)
def _mark_first(part, near, devices, first):
    """Marks every device that is the first of its group of `near` devices to hold its block."""
    for device in range(devices):
        first[device] = True
        for earlier in range(device // near * near, device):
            same = True
            for dim in range(part.shape[1]):
                if part[device, dim] != part[earlier, dim]:
                    same = False
                    break
            if same:
                first[device] = False
                break


@numba.njit(cache=True)
def _parts_of(devices, parts, strides):
    """Which part of every dim each device holds, int64 [devices, T]."""
    result = np.empty((devices, len(parts)), np.int64)
    for device in range(devices):
        for dim in range(len(parts)):
            result[device, dim] = device // strides[dim] % parts[dim]
    return result


@numba.njit(cache=True)
def slowest_devices(source_devices, source_parts, source_strides, target_devices, target_parts, target_strides, reach,
                    per_tensor, per_message):
    """`slowest_powers` for any numbers: looks at every device, and at everything the devices near it hold."""
    rows, columns, dims = len(source_devices), len(target_devices), source_parts.shape[1]
    result = np.zeros((rows, columns))
    most = source_devices.max()
    first = np.zeros((len(reach), most), np.bool_)
    begins, ends = np.empty((most, dims)), np.empty((most, dims))
    for row in range(rows):
        parts, devices = source_parts[row], source_devices[row]
        part = _parts_of(devices, parts, source_strides[row])
        for level in range(len(reach)):
            _mark_first(part, reach[level], devices, first[level])
        for device in range(devices):
            for dim in range(dims):
                begins[device, dim] = part[device, dim] / parts[dim]
                ends[device, dim] = (part[device, dim] + 1) / parts[dim]
        for column in range(columns):
            wanted, wanted_strides = target_parts[column], target_strides[column]
            need = 1.0
            for dim in range(dims):
                need /= wanted[dim]
            for device in range(target_devices[column]):
                needed_blocks = 1.0
                goal_begins, goal_ends = np.empty(dims), np.empty(dims)
                for dim in range(dims):
                    goal = device // wanted_strides[dim] % wanted[dim]
                    needed_blocks *= (-(-(goal + 1) * parts[dim] // wanted[dim])) - goal * parts[dim] // wanted[dim]
                    goal_begins[dim], goal_ends[dim] = goal / wanted[dim], (goal + 1) / wanted[dim]
                cost, outer, outer_blocks = 0.0, 0.0, 0.0
                for level in range(len(reach) - 1, -1, -1):
                    begin = device // reach[level] * reach[level]
                    held, blocks = 0.0, 0.0
                    for other in range(begin, min(begin + reach[level], devices)):
                        if first[level, other]:
                            common = 1.0
                            for dim in range(dims):
                                overlap = (min(ends[other, dim], goal_ends[dim])
                                           - max(begins[other, dim], goal_begins[dim]))
                                # Less than any true overlap of two grids: a rounding error.
                                common *= overlap if overlap > 1e-9 else 0.0
                                if common == 0.0:
                                    break
                            if common > 0.0:
                                held += common
                                blocks += 1.0
                    missing = need - held if need - held > 1e-12 else 0.0
                    missing_blocks = needed_blocks - blocks
                    cost += ((missing - outer) * per_tensor[level]
                             + (missing_blocks - outer_blocks) * per_message[level])
                    outer, outer_blocks = missing, missing_blocks
                    if blocks == 0.0:
                        break  # nothing is held further in either
                result[row, column] = max(result[row, column], cost)
    return result
