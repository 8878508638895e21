"""What it costs to move a tensor from one partition to another, counted device by device.

A device that needs a block of the target partition holds a part of it already; it fetches the rest from the nearest
devices that hold it. Where everything is a power of two, the device that is worst off is known without looking at all
of them, and a pair of partitions costs a handful of multiplications; otherwise all devices are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numba
import numpy as np

from pase_mtf.cost.tables import PartitionClasses
from pase_mtf.machine import Machine

__all__ = ["elements_moved", "resharding_seconds"]


def resharding_seconds(source: PartitionClasses, target: PartitionClasses, shape: Sequence[int], itemsize: int,
                       machine: Machine) -> np.ndarray:
    """Seconds to move a tensor between two partitions, for every pair of them.

    On real devices: the slowest device; what it fetches at each link level takes bytes/bandwidth, each message a
    latency. On shared cores: what is cut out or put together is copied (read and written) once for all devices that
    need it; every cutting and putting together costs an operation, every handing over of a block (by reference) a
    latency.

    Args:
      source: R partitions of the tensor where it is made.
      target: C partitions of it where it is used.
      shape: unsplit size of its T dims.
      itemsize: bytes per element.
      machine: its links.

    Returns:
      float64 [R, C]; 0 where the partitions are equal.
    """
    if machine.shared_cores:
        arrays = (source.devices, source.parts, source.strides, target.devices, target.parts, target.strides)
        copied, nodes, handed = _copies(*arrays, all(map(_powers_of_two, arrays)))
        nbytes = float(math.prod(shape) * itemsize)
        link = machine.links[-1]
        # The copies are spread over the nodes that make them.
        each = nbytes * copied / np.maximum(nodes, 1.0)
        seconds = machine.traffic_seconds(2.0 * each)
        if "copy" in machine.rates:
            seconds = np.maximum(seconds, each / (itemsize * machine.rates["copy"]))
        overhead = machine.overhead + machine.overheads.get("copy", 0.0)
        return nodes * (seconds + overhead) + handed * link.latency
    nbytes = float(math.prod(shape) * itemsize)
    reach = np.array([1, *(link.devices for link in machine.links[:-1])], np.int64)
    per_tensor = np.array([nbytes / link.bandwidth for link in machine.links])
    per_message = np.array([link.latency for link in machine.links])
    return _slowest(source, target, reach, per_tensor, per_message)


def elements_moved(source: PartitionClasses, target: PartitionClasses, shape: Sequence[int]) -> np.ndarray:
    """The most elements that a device needs of the target partition and does not hold, for every pair: the paper's t_x.

    Returns:
      float64 [R, C].
    """
    return _slowest(source, target, np.ones(1, np.int64), np.array([float(math.prod(shape))]), np.zeros(1))


def _slowest(source: PartitionClasses, target: PartitionClasses, reach: np.ndarray, per_tensor: np.ndarray,
             per_message: np.ndarray) -> np.ndarray:
    """What moving costs the device that is worst off.

    Args:
      source, target: R and C partitions.
      reach: int64 [L]; what a device needs and no device of its group of reach[l] holds crosses level l.
      per_tensor: float64 [L], cost of a whole tensor crossing that level.
      per_message: float64 [L], cost of every source block of which something crosses it.

    Returns:
      float64 [R, C].
    """
    arrays = (source.devices, source.parts, source.strides, target.devices, target.parts, target.strides)
    kernel = _slowest_powers if all(_powers_of_two(array) for array in (*arrays, reach)) else _slowest_devices
    return kernel(*arrays, reach, per_tensor, per_message)


def _powers_of_two(array: np.ndarray) -> bool:
    return not np.any(array & (array - 1))


@numba.njit(cache=True)
def _slowest_powers(source_devices, source_parts, source_strides, target_devices, target_parts, target_strides, reach,
                    per_tensor, per_message):
    """`_slowest` where all numbers are powers of two.

    Then a device's part number is a run of bits of its own number, and its blocks at the two ends overlap in every dim
    either wholly (the higher bits of the two part numbers agree) or not at all. If the compared runs are the same bits
    of the device's number they agree for all devices. If not, there is a device for which they differ, and then they
    differ at the levels further in as well, where still more bits are compared: it is the one worst off.
    """
    rows, columns, dims = len(source_devices), len(target_devices), source_parts.shape[1]
    result = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            need, needed_blocks = 1.0, 1.0
            for dim in range(dims):
                need /= target_parts[column, dim]
                needed_blocks *= max(1.0, source_parts[row, dim] / target_parts[column, dim])
            outer, outer_blocks = 0.0, 0.0  # what crosses the levels further out
            for level in range(len(reach) - 1, -1, -1):
                near = reach[level]
                held, blocks = 1.0, 1.0
                if target_devices[column] > max(near, source_devices[row]):
                    held = blocks = 0.0  # the last device has no device of the source in its group
                for dim in range(dims):
                    parts, stride = source_parts[row, dim], source_strides[row, dim]
                    wanted = target_parts[column, dim]
                    # The devices of a group differ in the low bits of their number: together they hold larger blocks.
                    coarse = parts // (min(max(stride, near), parts * stride) // stride)
                    if coarse > 1 and wanted > 1 and parts * stride != wanted * target_strides[column, dim]:
                        held = blocks = 0.0
                        break
                    held /= max(coarse, wanted)
                    blocks *= max(1.0, parts / max(coarse, wanted))
                missing, missing_blocks = need - held, needed_blocks - blocks
                result[row, column] += ((missing - outer) * per_tensor[level]
                                        + (missing_blocks - outer_blocks) * per_message[level])
                outer, outer_blocks = missing, missing_blocks
    return result


@numba.njit(cache=True)
def _overlap(part, parts, wanted_part, wanted):
    """What part of a dim two of its blocks share."""
    begin = max(part / parts, wanted_part / wanted)
    end = min((part + 1) / parts, (wanted_part + 1) / wanted)
    # Less than any true overlap of two grids: a rounding error.
    return end - begin if end - begin > 1e-9 else 0.0


@numba.njit(cache=True)
def _mark_first(parts, strides, devices, near, first):
    """Marks every device that is the first of its group of `near` devices to hold its block."""
    for device in range(devices):
        first[device] = True
        for earlier in range(device // near * near, device):
            same = True
            for dim in range(len(parts)):
                if device // strides[dim] % parts[dim] != earlier // strides[dim] % parts[dim]:
                    same = False
                    break
            if same:
                first[device] = False
                break


@numba.njit(cache=True)
def _held(device, begin, end, first, parts, strides, wanted, wanted_strides):
    """What devices begin..end-1 hold together of the block a device needs: (share of the tensor, number of blocks)."""
    held, blocks = 0.0, 0.0
    for other in range(begin, end):
        if first[other]:
            common = 1.0
            for dim in range(len(parts)):
                common *= _overlap(other // strides[dim] % parts[dim], parts[dim],
                                   device // wanted_strides[dim] % wanted[dim], wanted[dim])
                if common == 0.0:
                    break
            if common > 0.0:
                held += common
                blocks += 1.0
    return held, blocks


@numba.njit(cache=True)
def _slowest_devices(source_devices, source_parts, source_strides, target_devices, target_parts, target_strides, reach,
                     per_tensor, per_message):
    """`_slowest` in general: every device, and everything the devices near it hold."""
    rows, columns, dims = len(source_devices), len(target_devices), source_parts.shape[1]
    result = np.zeros((rows, columns))
    for row in range(rows):
        parts, strides, devices = source_parts[row], source_strides[row], source_devices[row]
        first = np.zeros((len(reach), devices), np.bool_)
        for level in range(len(reach)):
            _mark_first(parts, strides, devices, reach[level], first[level])
        for column in range(columns):
            wanted, wanted_strides = target_parts[column], target_strides[column]
            need = 1.0
            for dim in range(dims):
                need /= wanted[dim]
            for device in range(target_devices[column]):
                needed_blocks = 1.0
                for dim in range(dims):
                    part = device // wanted_strides[dim] % wanted[dim]
                    needed_blocks *= (-(-(part + 1) * parts[dim] // wanted[dim])) - part * parts[dim] // wanted[dim]
                cost, outer, outer_blocks = 0.0, 0.0, 0.0
                for level in range(len(reach) - 1, -1, -1):
                    begin = device // reach[level] * reach[level]
                    held, blocks = _held(device, begin, min(begin + reach[level], devices), first[level], parts,
                                         strides, wanted, wanted_strides)
                    missing = need - held if need - held > 1e-12 else 0.0
                    missing_blocks = needed_blocks - blocks
                    cost += ((missing - outer) * per_tensor[level]
                             + (missing_blocks - outer_blocks) * per_message[level])
                    outer, outer_blocks = missing, missing_blocks
                    if blocks == 0.0:
                        break  # nothing is held further in either
                result[row, column] = max(result[row, column], cost)
    return result


@numba.njit(cache=True)
def _count_own(source_devices, parts, strides, target_devices, wanted, wanted_strides):
    """How many devices hold some of what they need, where all numbers are powers of two.

    For those devices some bits of their number agree with others, and the bits beyond the smaller number of devices are
    zero: halve the number of devices for every such condition that does not follow from the ones before.
    """
    devices = min(source_devices, target_devices)
    bits = 0
    while 1 << bits < devices:
        bits += 1
    root = np.arange(bits + 1)  # the bits, and zero, in sets of equals
    for dim in range(len(parts)):
        top, wanted_top = parts[dim] * strides[dim], wanted[dim] * wanted_strides[dim]
        if top == wanted_top:
            continue
        while top > strides[dim] and wanted_top > wanted_strides[dim]:
            top //= 2
            wanted_top //= 2
            one = other = bits
            for bit in range(bits):
                if top == 1 << bit:
                    one = bit
                if wanted_top == 1 << bit:
                    other = bit
            while root[one] != one:
                one = root[one]
            while root[other] != other:
                other = root[other]
            if one != other:
                devices //= 2
                root[min(one, other)] = max(one, other)
    return devices


@numba.njit(cache=True)
def _count_own_devices(source_devices, parts, strides, target_devices, wanted, wanted_strides):
    """How many devices hold some of what they need, in general."""
    count = 0
    for device in range(min(source_devices, target_devices)):
        own = True
        for dim in range(len(parts)):
            part = device // wanted_strides[dim] % wanted[dim]
            mine = device // strides[dim] % parts[dim]
            own = own and part * parts[dim] < (mine + 1) * wanted[dim] and mine * wanted[dim] < (part + 1) * parts[dim]
        count += own
    return count


@numba.njit(cache=True)
def _gcd(one, other):
    while other:
        one, other = other, one % other
    return one


@numba.njit(cache=True)
def _copies(source_devices, source_parts, source_strides, target_devices, target_parts, target_strides, powers):
    """What is copied where memory is shared, as the lowering moves a tensor: every block of the target once.

    Blocks are cut one dim after the other, and put together one dim after the other; each time the whole tensor is
    copied, but for a cut of the first dim, whose parts lie in memory as they are.

    Args:
      powers: all numbers are powers of two.

    Returns:
      (copied, nodes, handed), each float64 [R, C]: how many times the tensor is copied, the nodes that cut and put
      together, and how often a block is handed to another device.
    """
    rows, columns, dims = len(source_devices), len(target_devices), source_parts.shape[1]
    copied = np.zeros((rows, columns))
    nodes = np.zeros((rows, columns))
    handed = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            blocks, made, pieces = 1.0, 1.0, 1.0
            for dim in range(dims):
                blocks *= source_parts[row, dim]
                made *= target_parts[column, dim]
            cutting, joining = blocks, made
            for dim in range(dims):
                parts, wanted = source_parts[row, dim], target_parts[column, dim]
                cells = parts + wanted - _gcd(parts, wanted)
                if cells > parts:
                    copied[row, column] += 1.0 if dim else 0.0
                    nodes[row, column] += cutting
                    cutting *= cells / parts
                if cells > wanted:
                    copied[row, column] += 1.0
                    nodes[row, column] += joining
                    joining *= cells / wanted
                    pieces *= cells / wanted
            arguments = (source_devices[row], source_parts[row], source_strides[row],
                         target_devices[column], target_parts[column], target_strides[column])
            own = _count_own(*arguments) if powers else _count_own_devices(*arguments)
            handed[row, column] = target_devices[column] - own + made * (pieces - 1.0)
    return copied, nodes, handed
