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

from pase_mtf.cost.slowest import slowest_devices, slowest_powers
from pase_mtf.cost.tables import DistinctShardings
from pase_mtf.machine.machine import Machine

__all__ = ["elements_moved", "resharding_seconds"]


def resharding_seconds(source: DistinctShardings, target: DistinctShardings, shape: Sequence[int], itemsize: int,
                       machine: Machine) -> np.ndarray:
    """Seconds to move a tensor between two partitions, for every pair of them.

    On real devices: the slowest device; what it fetches at each link level takes bytes/bandwidth, each message a
    latency. On shared cores: what is cut out or put together is copied (read and written) once for all devices that
    need it; every cutting and putting together costs an operation, every handing over of a block (by reference) a
    latency. Where Mesh-TF itself does it there (`machine.ring`), every device puts together for itself, out of blocks
    that went round a ring, and cuts for itself.

    Args:
      source: R partitions of the tensor where it is made.
      target: C partitions of it where it is used.
      shape: unsplit size of its T dims.
      itemsize: bytes per element.
      machine: its links.

    Returns:
      float64 [R, C]; 0 where the partitions are equal.
    """
    if machine.shared_cores and machine.ring:
        return _stock(source, target, float(math.prod(shape) * itemsize), machine)
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


def _stock(source: DistinctShardings, target: DistinctShardings, nbytes: float, machine: Machine) -> np.ndarray:
    """What Mesh-TF's allconcat and allsplit of the dims that are cut differently cost on shared cores: [R, C]."""
    parts, wanted = source.parts[:, None, :], target.parts[None, :, :]
    same = (parts == wanted) & ((source.strides[:, None, :] == target.strides[None, :, :]) | (parts == 1))
    joined, cut = np.where(same, 1, parts), np.where(same, 1, wanted)
    joins, cuts = (joined > 1).sum(axis=2), (cut > 1).sum(axis=2)
    copy = machine.overhead + machine.overheads.get("copy", 0.0)
    block = nbytes / np.where(same, parts, 1).prod(axis=2)  # when everything is put together
    message = machine.ring_link.latency if machine.ring_link else machine.overhead + machine.links[-1].latency
    seconds = ((joined - 1).sum(axis=2) * message
               + joins * (copy + machine.traffic_seconds(2.0 * block))
               # The place of a part is computed, then it is cut.
               + cuts * (3.0 * machine.overhead + copy) + (cuts > 0) * machine.traffic_seconds(
                   2.0 * block / cut.prod(axis=2)))
    return np.maximum(source.devices[:, None], target.devices[None, :]) * seconds


def elements_moved(source: DistinctShardings, target: DistinctShardings, shape: Sequence[int]) -> np.ndarray:
    """The most elements that a device needs of the target partition and does not hold, for every pair: the paper's t_x.

    Returns:
      float64 [R, C].
    """
    return _slowest(source, target, np.ones(1, np.int64), np.array([float(math.prod(shape))]), np.zeros(1))


def _slowest(source: DistinctShardings, target: DistinctShardings, reach: np.ndarray, per_tensor: np.ndarray,
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
    kernel = slowest_powers if all(_powers_of_two(array) for array in (*arrays, reach)) else slowest_devices
    return kernel(*arrays, reach, per_tensor, per_message)


def _powers_of_two(array: np.ndarray) -> bool:
    return not np.any(array & (array - 1))


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
