"""What a collective costs: latency and bytes over the links that its group crosses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.tables import ConfigurationTable
from pase_mtf.machine.machine import Machine

__all__ = ["allreduce_seconds", "group_sizes"]

# Bytes from which on Mesh-TF sums by several rings: 1024 elements, of four bytes, mostly.
_SEVERAL_RINGS = 4096


def group_sizes(table: ConfigurationTable, positions: Sequence[int], machine: Machine) -> np.ndarray:
    """Over how many members, at each link level, the group of devices spreads that differ in some dims only.

    Args:
      table: K configurations.
      positions: the columns of those dims.
      machine: its links.

    Returns:
      float64 [levels, K]: at the innermost level the members that share a link of that level, at the next the number of
      such clusters, and so on; the product over the levels is the size of the group.
    """
    reached = np.ones((len(machine.links) + 1, len(table.devices)))
    for position in set(positions):
        if position < 0:
            continue
        shards, strides = table.shards[:, position], table.strides[:, position]
        for level, link in enumerate(machine.links[:-1]):
            # Of an aligned run of link.devices devices, how many hold different shards of this dim.
            reached[level + 1] *= np.clip(-(-link.devices // strides), 1, shards)
        reached[-1] *= shards
    return reached[1:] / reached[:-1]


def allreduce_seconds(nbytes: np.ndarray, groups: np.ndarray, devices: np.ndarray, machine: Machine, *,
                      stock: bool = False) -> np.ndarray:
    """Seconds of an all-reduce, done by all groups of devices at the same time.

    On real devices: reduce-scatter at each level, innermost first, so that less is left for the next, and back; each
    level moves 2 (q - 1) / q of the remainder and takes 2 log2(q) messages. On shared cores each group of q sums once,
    for all: q blocks are read and one is written, and 2 (q - 1) times one is sent. Where Mesh-TF itself does it there
    (mesh_tensorflow/placement_mesh_impl.py), every member flattens and splits its block, q rings of 2 q - 2 operations
    sum a q-th each, and every member puts them together; small blocks go round a single ring.

    Args:
      nbytes: float64 [K], what each device has before and after.
      groups: float64 [levels, K], from `group_sizes`.
      devices: int64 [K], devices that take part, in all groups together.
      machine: its links.
      stock: Mesh-TF lowers it, not we.

    Returns:
      float64 [K]; 0 where the group is one device.
    """
    if machine.shared_cores:
        size = groups.prod(axis=0)
        link = machine.links[-1]
        overhead, nodes, messages, blocks = machine.overhead, 1.0, 2.0 * (size - 1.0), size + 1.0
        if stock:
            large = nbytes >= _SEVERAL_RINGS
            rings = np.where(large, size, 1.0)
            nodes = rings * (2.0 * size - 2.0) + np.where(large, 4.0 * size, 0.0)
            messages = rings * (2.0 * size - 2.0)
            blocks = np.where(large, 7.0, 3.0) * size
        each = nodes * overhead + messages * link.latency + blocks * nbytes / link.bandwidth
        return np.where(size > 1, each * devices / size, 0.0)
    seconds = np.zeros(len(devices))
    left = np.asarray(nbytes, np.float64)
    for link, size in zip(machine.links, groups, strict=True):
        seconds += np.where(size > 1, 2.0 * np.ceil(np.log2(size)) * link.latency
                            + 2.0 * (size - 1.0) / size * left / link.bandwidth, 0.0)
        left = left / size
    return seconds
