"""What it costs to move a tensor from one sharding to another, counted device by device.

A device that needs a block of the target sharding holds a part of it already; it fetches the rest from the nearest
devices that hold it. Where everything is a power of two, the critical-path device is known without looking at all of
them, and a pair of shardings costs a handful of multiplications; otherwise all devices are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pase_mtf.cost.critical_path import critical_path_devices, critical_path_powers
from pase_mtf.cost.tables import DistinctShardings
from pase_mtf.machine.machine import Machine
from pase_mtf.search.compiled import compiled

__all__ = ["elements_moved", "resharding_seconds"]


def resharding_seconds(source: DistinctShardings, target: DistinctShardings, shape: Sequence[int], itemsize: int,
                       machine: Machine) -> np.ndarray:
    """Seconds to move a tensor between two shardings, for every pair of them.

    On real devices: the critical-path device; what it fetches at each link level takes bytes/bandwidth, each message a
    latency. On shared cores: what is sliced or concatenated is copied (read and written) once for all devices that
    need it; every slice and concatenation costs an operation, every block sent (by reference) a latency. Where Mesh-TF
    itself does it there (`machine.ring`), every device concatenates for itself, out of blocks that went round a ring,
    and slices for itself.

    Args:
      source: R shardings of the tensor where it is made.
      target: C shardings of it where it is used.
      shape: unsplit size of its T dims.
      itemsize: bytes per element.
      machine: its links.

    Returns:
      float64 [R, C]; 0 where the shardings are equal.
    """
    nbytes = float(math.prod(shape) * itemsize)
    if machine.shared_cores and machine.ring:
        return _stock_seconds(source, target, nbytes, machine)
    if machine.shared_cores:
        return _shared_memory_seconds(source, target, nbytes, itemsize, machine)
    domains = np.array([1, *(link.devices for link in machine.links[:-1])], np.int64)
    per_tensor = np.array([nbytes / link.bandwidth for link in machine.links])
    per_message = np.array([link.latency for link in machine.links])
    return _critical_path(source, target, domains, per_tensor, per_message)


def elements_moved(source: DistinctShardings, target: DistinctShardings, shape: Sequence[int]) -> np.ndarray:
    """The most elements that a device needs of the target sharding and does not hold, for every pair: the paper's t_x.

    Returns:
      float64 [R, C].
    """
    return _critical_path(source, target, np.ones(1, np.int64), np.array([float(math.prod(shape))]), np.zeros(1))


def _critical_path(source: DistinctShardings, target: DistinctShardings, domains: np.ndarray, per_tensor: np.ndarray,
                   per_message: np.ndarray) -> np.ndarray:
    """What moving costs the critical-path device, float64 [R, C]; arguments as of `critical_path_powers`."""
    arrays = _arrays(source, target)
    powers = _powers_of_two((*arrays, domains))
    kernel: Callable[..., np.ndarray] = critical_path_powers if powers else critical_path_devices
    return kernel(*arrays, domains, per_tensor, per_message)


def _arrays(source: DistinctShardings, target: DistinctShardings,
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return source.devices, source.shards, source.strides, target.devices, target.shards, target.strides


def _powers_of_two(arrays: Sequence[np.ndarray]) -> bool:
    return not any(np.any(array & (array - 1)) for array in arrays)


def _shared_memory_seconds(source: DistinctShardings, target: DistinctShardings, nbytes: float, itemsize: int,
                           machine: Machine) -> np.ndarray:
    """What our lowering takes where devices share memory: [R, C]."""
    arrays = _arrays(source, target)
    copied, nodes, sent = _copies(*arrays, _powers_of_two(arrays))
    # The copies are spread over the nodes that make them.
    each = nbytes * copied / np.maximum(nodes, 1.0)
    seconds = machine.traffic_seconds(2.0 * each)
    if "copy" in machine.rates:
        seconds = np.maximum(seconds, each / (itemsize * machine.rates["copy"]))
    overhead = machine.overhead + machine.overheads.get("copy", 0.0)
    total: np.ndarray = nodes * (seconds + overhead) + sent * machine.links[-1].latency
    return total


def _stock_seconds(source: DistinctShardings, target: DistinctShardings, nbytes: float,
                   machine: Machine) -> np.ndarray:
    """What Mesh-TF's allconcat and allsplit of the dims that are split differently cost on shared cores: [R, C]."""
    shards, wanted = source.shards[:, None, :], target.shards[None, :, :]
    same = (shards == wanted) & ((source.strides[:, None, :] == target.strides[None, :, :]) | (shards == 1))
    joined, cut = np.where(same, 1, shards), np.where(same, 1, wanted)
    joins, cuts = (joined > 1).sum(axis=2), (cut > 1).sum(axis=2)
    copy = machine.overhead + machine.overheads.get("copy", 0.0)
    block = nbytes / np.where(same, shards, 1).prod(axis=2)  # when everything is concatenated
    message = machine.ring_link.latency if machine.ring_link else machine.overhead + machine.links[-1].latency
    seconds = ((joined - 1).sum(axis=2) * message
               + joins * (copy + machine.traffic_seconds(2.0 * block))
               # The place of a shard is computed, then it is sliced.
               + cuts * (3.0 * machine.overhead + copy) + (cuts > 0) * machine.traffic_seconds(
                   2.0 * block / cut.prod(axis=2)))
    total: np.ndarray = np.maximum(source.devices[:, None], target.devices[None, :]) * seconds
    return total


@compiled
def _find(root: np.ndarray, number: int) -> int:  # pragma: no cover (compiled)
    """The number that stands for a set of equals."""
    while root[number] != number:
        number = root[number]
    return number


@compiled
def _bit_of(power: int, bits: int) -> int:  # pragma: no cover (compiled)
    """Which of the lowest bits a power of two is; `bits` where it is none of them."""
    for bit in range(bits):
        if power == 1 << bit:
            return bit
    return bits


@compiled
def _count_own_powers(source_devices: int, shards: np.ndarray, strides: np.ndarray, target_devices: int,
                      wanted: np.ndarray, wanted_strides: np.ndarray) -> int:  # pragma: no cover (compiled)
    """How many devices hold some of what they need, where all numbers are powers of two.

    For those devices some bits of their number agree with others, and the bits beyond the smaller number of devices are
    zero: halve the number of devices for every such condition that does not follow from the ones before.
    """
    devices = min(source_devices, target_devices)
    bits = 0
    while 1 << bits < devices:
        bits += 1
    root = np.arange(bits + 1)  # the bits, and zero, in sets of equals
    for dim in range(len(shards)):
        top, wanted_top = shards[dim] * strides[dim], wanted[dim] * wanted_strides[dim]
        if top == wanted_top:
            continue
        while top > strides[dim] and wanted_top > wanted_strides[dim]:
            top //= 2
            wanted_top //= 2
            one, other = _find(root, _bit_of(top, bits)), _find(root, _bit_of(wanted_top, bits))
            if one != other:
                devices //= 2
                root[min(one, other)] = max(one, other)
    return devices


@compiled
def _count_own_devices(source_devices: int, shards: np.ndarray, strides: np.ndarray, target_devices: int,
                       wanted: np.ndarray, wanted_strides: np.ndarray) -> int:  # pragma: no cover (compiled)
    """How many devices hold some of what they need, in general."""
    count = 0
    for device in range(min(source_devices, target_devices)):
        own = True
        for dim in range(len(shards)):
            shard = device // wanted_strides[dim] % wanted[dim]
            mine = device // strides[dim] % shards[dim]
            own = (own and shard * shards[dim] < (mine + 1) * wanted[dim]
                   and mine * wanted[dim] < (shard + 1) * shards[dim])
        count += own
    return count


@compiled
def _gcd(one: int, other: int) -> int:  # pragma: no cover (compiled)
    while other:
        one, other = other, one % other
    return one


@compiled
def _slices_and_concatenations(shards: np.ndarray, wanted: np.ndarray,
                               ) -> tuple[float, float, float]:  # pragma: no cover (compiled)
    """How one pair of shardings is lowered: (how many times the tensor is copied, nodes, blocks that are concatenated
    beyond the first of each).

    Blocks are sliced one dim after the other, and concatenated one dim after the other; each time the whole tensor is
    copied, but for slices of the first dim, which lie in memory as they are.
    """
    blocks, made, pieces = 1.0, 1.0, 1.0
    for dim in range(len(shards)):
        blocks *= shards[dim]
        made *= wanted[dim]
    copied, nodes, slicing, joining = 0.0, 0.0, blocks, made
    for dim in range(len(shards)):
        cells = shards[dim] + wanted[dim] - _gcd(shards[dim], wanted[dim])
        if cells > shards[dim]:
            copied += 1.0 if dim else 0.0
            nodes += slicing
            slicing *= cells / shards[dim]
        if cells > wanted[dim]:
            copied += 1.0
            nodes += joining
            joining *= cells / wanted[dim]
            pieces *= cells / wanted[dim]
    return copied, nodes, made * (pieces - 1.0)


@compiled
def _copies(source_devices: np.ndarray, source_shards: np.ndarray, source_strides: np.ndarray,
            target_devices: np.ndarray, target_shards: np.ndarray, target_strides: np.ndarray,
            powers: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """What is copied where memory is shared, as the lowering moves a tensor: every block of the target once.

    Args:
      source_devices, source_shards, source_strides: of R shardings where the tensor is made.
      target_devices, target_shards, target_strides: of C shardings where it is used.
      powers: all numbers are powers of two.

    Returns:
      (copied, nodes, sent), each float64 [R, C]: how many times the tensor is copied, the nodes that slice and
      concatenate, and how often a block is sent to another device.
    """
    rows, columns = len(source_devices), len(target_devices)
    copied = np.zeros((rows, columns))
    nodes = np.zeros((rows, columns))
    sent = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            copied[row, column], nodes[row, column], joined = _slices_and_concatenations(
                source_shards[row], target_shards[column])
            arguments = (source_devices[row], source_shards[row], source_strides[row],
                         target_devices[column], target_shards[column], target_strides[column])
            own = _count_own_powers(*arguments) if powers else _count_own_devices(*arguments)
            sent[row, column] = target_devices[column] - own + joined
    return copied, nodes, sent
