"""What devices of their own copy of a tensor that moves: what they slice for others, concatenate, and add up.

Links carry the pieces; making them, and putting them together, are nodes of the graph, which read and write a device's
memory. Where links are fast that is a good part of a move: NVLink carries a sixth of what memory does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.cost.dim_relations import Sharded, gcd
from pase_mtf.graph.all_reduces import HUB, PAIR, PIECES, RING
from pase_mtf.machine.machine import Machine
from pase_mtf.search.compiled import compiled

__all__ = ["Copying", "copying", "summing_seconds"]


class Copying(NamedTuple):
    """What the busiest device copies, for every pair of shardings: float64 [R, C] each.

    Attributes:
      slicing, joining: the fraction of the tensor that it reads and writes before anything is sent, and after.
      slices, joins: the nodes that do it.
    """

    slicing: np.ndarray
    slices: np.ndarray
    joining: np.ndarray
    joins: np.ndarray

    def seconds(self, nbytes: float, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a device, before anything is sent and after: float64 [R, C] each.

        Args:
          nbytes: of the unsplit tensor.
          machine: whose memory it is.
        """
        before, after = (machine.with_overhead(copied * nbytes / machine.memory_bandwidth, nodes)
                         for copied, nodes in ((self.slicing, self.slices), (self.joining, self.joins)))
        return before, after


def copying(source: Sharded, target: Sharded, parts: int = 0) -> Copying:
    """What lowering copies (`lowering.reshard`), or Mesh-TF itself, which makes the same slices.

    Blocks are sliced one dim after the other; slices of the first dim lie in memory as they are. Where a device slices
    less than all of its block, or pieces that differ, each piece is one node. Blocks are concatenated innermost dim
    first.

    Args:
      source: R shardings of a tensor of T dims where it is made.
      target: C shardings of it where it is used.
      parts: of so many dims, the last ones, the elements are added up: the parts of a sum.

    Returns:
      What the device copies that has most to copy.
    """
    return Copying(*_copied_of_all(source.devices, source.shards, target.devices, target.shards, parts))


@compiled
def _copied_of_all(devices: np.ndarray, shards: np.ndarray, wanted_devices: np.ndarray, wanted: np.ndarray, parts: int,
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """The arrays of `Copying`."""
    rows, columns = len(shards), len(wanted)
    slicing, slices = np.zeros((rows, columns)), np.zeros((rows, columns))
    joining, joins = np.zeros((rows, columns)), np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            slicing[row, column], slices[row, column] = _sliced(
                shards[row], wanted[column], wanted_devices[column] / devices[row])
            joining[row, column], joins[row, column] = _joined(shards[row], wanted[column], parts)
    return slicing, slices, joining, joins


@compiled(inline=True)
def _sliced(shards: np.ndarray, wanted: np.ndarray,
            takers: float) -> tuple[float, float]:  # pragma: no cover (compiled)
    """(Fraction of the tensor that a device reads and writes to slice its block, nodes), of so many devices at the
    target as there is one at the source."""
    blocks, made, pieces, grid = 1.0, 1.0, 1.0, 1.0
    passes, evenly, nodes, alike, even = 0.0, 0.0, 0.0, True, True
    for dim in range(len(shards)):
        blocks *= shards[dim]
        made *= wanted[dim]
        common = gcd(shards[dim], wanted[dim])
        cells = shards[dim] + wanted[dim] - common
        grid *= cells
        if cells > shards[dim]:
            # Of thirds that become halves the one that is cut is cut into halves.
            alike = alike and (common == shards[dim] or wanted[dim] == 2 * common)
            # Of those that become quarters the middle one is, and no other; of quarters that become thirds the outer
            # ones are not cut. A block whose pieces are alike along every dim has most to copy.
            halved = common == shards[dim] or (wanted[dim] // common % 2 == 0 and wanted[dim] < 2 * shards[dim])
            even = even and (halved or wanted[dim] < shards[dim])
            if dim:
                passes += 1.0
                nodes += pieces
                evenly += 1.0 if halved else 0.0
            pieces *= np.ceil(cells / shards[dim])
    # Those that hold the same share what others need, and a device that needs some of its own block slices that.
    share = min(1.0 / blocks, takers / made)
    if passes == 0.0:
        return 0.0, 0.0
    if share < 1.0 / blocks:
        passes, nodes = 1.0, np.ceil(share * grid)
    elif not alike:
        passes, nodes = (max(evenly, 1.0) if even else 1.0), pieces
    return 2.0 * share * passes, nodes


@compiled(inline=True)
def _joined(shards: np.ndarray, wanted: np.ndarray,
            parts: int) -> tuple[float, float]:  # pragma: no cover (compiled)
    """(Fraction of the tensor that a device reads and writes to put its block together, nodes)."""
    own = len(shards) - parts
    made, cells_of_block, passes, nodes = 1.0, 1.0, 0.0, 0.0
    for dim in range(own):
        made *= wanted[dim]
        cells = shards[dim] + wanted[dim] - gcd(shards[dim], wanted[dim])
        if cells > wanted[dim]:
            passes += 1.0
            nodes += cells_of_block
            cells_of_block *= np.ceil(cells / wanted[dim])
    terms = 1.0
    for dim in range(own, len(shards)):
        terms *= shards[dim]
    block = 1.0 / (made * terms)
    if terms > 1.0:
        return (terms + 1.0 + 2.0 * passes) * block, nodes + cells_of_block
    return 2.0 * passes * block, nodes


def summing_seconds(nbytes: np.ndarray, way: np.ndarray, size: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds in which a device adds up and concatenates what an all-reduce of our lowering sends. What it splits is
    counted as lying in memory as it is: that is so of the first dim, which most gradients are split along, and buckets.

    Args:
      nbytes: float64 [K], what each device has before and after.
      way: int64 [K], as it is summed (`graph.all_reduces.way_of`).
      size: float64 [K], over how many devices.
      machine: whose memory it is.

    Returns:
      float64 [K].
    """
    # The concatenation is read and written; the sums read their parts and are written.
    ends, members = 2.0, np.maximum(size, 1.0)
    copied = np.select([way == PAIR, way == HUB, way == PIECES, way == RING],
                       [3.0 * np.ones_like(members), members + 1.0, ends + 1.0 + 1.0 / members,
                        ends + 3.0 * (members - 1.0) / members])
    nodes = np.where(way == PIECES, 2.0, 1.0)  # a ring's hops have their latencies
    seconds = machine.with_overhead(copied * nbytes / machine.memory_bandwidth, nodes)
    return np.where(size > 1, seconds, 0.0)
