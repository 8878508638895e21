"""What a collective costs: latency and bytes over the links that its group crosses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pase_mtf.cost.slicing import summing_seconds
from pase_mtf.cost.tables import ConfigurationTable
from pase_mtf.graph.all_reduces import ITEMSIZE, PIECES, RING, bucket_of, messages_of, way_of
from pase_mtf.machine.machine import Machine

__all__ = ["allreduce_seconds", "group_sizes"]

_SEVERAL_RINGS = 1024
"""Elements from which on Mesh-TF sums by several rings, where as many pieces can be made."""


def group_sizes(table: ConfigurationTable, positions: Sequence[int], machine: Machine) -> np.ndarray:
    """Over how many members, at each link level, the group of devices spreads that differ in some dims only.

    Args:
      table: K configurations.
      positions: the columns of those dims.
      machine: its links.

    Returns:
      float64 [levels, K]: at the innermost level the members that share a link of that level, at the next the number of
      such clusters, and so on; the product over the levels is the size of the group. Of the groups that lie across the
      borders of links in different ways, where splits and links do not nest, no more members are told to share a link
      than do in all of them.
    """
    reached = np.ones((len(machine.links) + 1, len(table.devices)))
    for stride, size in _runs(table, sorted({position for position in positions if position >= 0})):
        for level, link in enumerate(machine.links[:-1]):
            # Devices in aligned runs of so many share a link and a run of the group, whichever they are; all of them do
            # where no more are used than the first link of that level joins.
            together = np.where(table.devices <= link.devices, stride * size, np.gcd(link.devices, stride * size))
            reached[level + 1] *= np.clip(together // stride, 1, size)
        reached[-1] *= size
    return reached[1:] / reached[:-1]


def _runs(table: ConfigurationTable, columns: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(stride, members) of what dims split together, each [K]: dims that split neighbouring devices are one run."""
    shards, strides = table.shards[:, columns], table.strides[:, columns]
    innermost_first = np.argsort(np.where(shards > 1, strides, np.iinfo(np.int64).max), axis=1)
    shards, strides = (np.take_along_axis(each, innermost_first, 1) for each in (shards, strides))
    begin, size = np.ones(len(shards), np.int64), np.ones(len(shards), np.int64)
    for more, stride in zip(shards.T, strides.T, strict=True):
        apart = (more > 1) & (stride != begin * size)
        yield begin, np.where(apart, size, 1)
        begin, size = np.where(apart, stride, begin), np.where(apart, more, size * more)
    yield begin, size


def allreduce_seconds(nbytes: np.ndarray, groups: np.ndarray, devices: np.ndarray, machine: Machine, *,
                      stock: bool = False, waiting: Any = 0.0, itemsize: int = ITEMSIZE) -> np.ndarray:
    """Seconds of an all-reduce, done by all groups of devices at the same time.

    On real devices: the messages one after the other that the lowering makes of it (`_latency`), or where a library
    sums along trees (`Machine.sums_by_trees`) those of a tree, where they take less. Bytes as of a reduce-scatter at
    each level, innermost first, so that less is left for the next, and back: 2 (q - 1) / q of the remainder. A ring in
    the order of the devices crosses a level as rarely, while others pass those within: an upper bound. Through a hub's
    own link go q - 1 blocks either way, but members take turns as hubs. Where no library does it, devices split, add up
    and concatenate (`cost.slicing`); what is summed in a bucket is concatenated first. On shared cores each group of q
    sums once, for all: q blocks are read and one is written, and 2 (q - 1) times one is sent. Where Mesh-TF itself does
    it there (mesh_tensorflow/placement_mesh_impl.py), every member flattens and splits its block, q rings of 2 q - 2
    operations sum a q-th each, and every member puts them together; blocks that are small, or do not divide by q, go
    round one: on devices of their own all of them, q - 1 times one after the other.

    Args:
      nbytes: float64 [K], what each device has before and after.
      groups: float64 [levels, K], from `group_sizes`.
      devices: int64 [K], devices that take part, in all groups together.
      machine: its links.
      stock: Mesh-TF lowers it, not we.
      waiting: bytes of all that may be summed together with it, itself among them, as what each device has of them; a
        number, or one for each. Of the latency of a bucket (`graph.all_reduces.bucket_of`) it takes its part. By
        default, and where it has more than a bucket takes, it is alone.
      itemsize: bytes per element, of what waits, too: how it is summed follows from elements.

    Returns:
      float64 [K]; 0 where the group is one device.
    """
    if machine.shared_cores:
        size = groups.prod(axis=0)
        link = machine.links[-1]
        nodes, messages, blocks = np.ones(1), 2.0 * (size - 1.0), size + 1.0
        if stock:
            # What does not divide by the members goes round one ring, however large it is.
            elements = np.rint(nbytes / itemsize)
            large = (elements >= _SEVERAL_RINGS) & (elements % size == 0)
            rings = np.where(large, size, 1.0)
            nodes = rings * (2.0 * size - 2.0) + np.where(large, 4.0 * size, 0.0)
            messages = rings * (2.0 * size - 2.0)
            # Sums meet at the two in the middle of a ring, which both add; of an odd number at one.
            blocks = np.where(large, 7.0, 3.0) * size - 3.0 * (size % 2)
        each = machine.with_overhead(blocks * nbytes / link.bandwidth, nodes) + messages * link.latency
        return np.where(size > 1, each * devices / size, 0.0)
    left: np.ndarray = np.asarray(nbytes, np.float64)
    together: np.ndarray = np.maximum(left, itemsize * bucket_of(np.asarray(waiting) / itemsize))
    size = groups.prod(axis=0)
    # Mesh-TF itself sums round rings, however small the pieces are.
    counted = np.full_like(together, np.inf) if stock else together / itemsize
    seconds = _latency(counted, groups, machine)
    if machine.sums_by_trees and not stock:
        seconds = np.minimum(seconds, _latency_of_trees(groups, machine))
    else:
        seconds += summing_seconds(together, way_of(counted, size), size, machine)
    # What is summed in a bucket is read and written to make that; slices of it lie in memory as they are.
    made = machine.with_overhead(2.0 * together / machine.memory_bandwidth)
    seconds += np.where((size > 1) & (together > left), made, 0.0)
    seconds *= np.divide(left, together, out=np.ones_like(together), where=together > 0.0)
    for link, across in zip(machine.links, groups, strict=True):
        seconds += 2.0 * (across - 1.0) / across * left / link.bandwidth
        left = left / across
    if not stock:
        return seconds
    elements = np.rint(np.asarray(nbytes) / itemsize)
    cut = (elements >= _SEVERAL_RINGS) & (elements % size == 0)
    return np.where(cut, seconds, _along_a_row(np.asarray(nbytes, np.float64), groups, machine))


def _along_a_row(nbytes: np.ndarray, groups: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds in which Mesh-TF sums, on devices of their own, what it does not cut into pieces: all of it goes from
    device to device, from both ends of a row of them, is added up until it meets in the middle, and goes back."""
    size: np.ndarray = groups.prod(axis=0)
    added = machine.with_overhead(3.0 * nbytes / machine.memory_bandwidth)
    seconds: np.ndarray = np.where(size > 1, np.ceil(size / 2.0) * added, 0.0)
    outer = size
    for link, across in zip(machine.links, groups, strict=True):
        outer = outer / across
        seconds = seconds + (across - 1.0) * outer * (link.latency + nbytes / link.bandwidth)
    return seconds


def _latency(elements: np.ndarray, groups: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds of latency of an all-reduce that the lowering makes of messages; see `allreduce_seconds`.

    A piece goes round a ring in the order of the devices, so that most of its hops are within a node; where all
    exchange pieces with all, most are sent to other nodes. Else the few messages are over the slowest link.
    """
    size = groups.prod(axis=0)
    way = way_of(elements, size)
    slowest, round_a_ring, to_all = np.zeros_like(size), np.zeros_like(size), np.zeros_like(size)
    inner, outer = np.ones_like(size), size
    for link, across in zip(machine.links, groups, strict=True):
        outer = outer / across
        slowest = np.maximum(slowest, np.where(across > 1, link.latency, 0.0))
        round_a_ring += 2.0 * (across - 1.0) * outer * link.latency
        to_all += 2.0 * (across - 1.0) * inner * link.latency
        inner = inner * across
    few: np.ndarray = messages_of(way, size) * slowest
    return np.where(way == RING, round_a_ring, np.where(way == PIECES, to_all, few))


def _latency_of_trees(groups: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds of latency where the devices of a node are a chain and nodes are a binary tree of those of a level, up
    and down: NCCL since 2.4 (Jeaugey, Massively scale your deep learning training with NCCL 2.4, 2019)."""
    seconds: np.ndarray = 2.0 * (groups[0] - 1.0) * machine.links[0].latency
    for link, across in zip(machine.links[1:], groups[1:], strict=True):
        seconds = seconds + 2.0 * np.ceil(np.log2(across)) * link.latency
    return seconds
