"""What a tensor that is moved takes of a device's memory, by how lowering makes the block that is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from pase_mtf.graph.computation_graph import Edge
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import ALIGNED

__all__ = ["Moved", "Shards", "moved", "until_taken", "whole_bytes"]

Shards: TypeAlias = "tuple[tuple[int, int], ...]"

class Moved(NamedTuple):
    """What a device holds of a tensor as another layer reads it.

    Attributes:
      nbytes: of the copy; 0 where it is read where it lies.
      shards: of the copy.
      alone: whether one reader alone uses this memory, and may write what it makes in its place.
      meanwhile: bytes of what the copy is put together from, while it is made.
    """

    nbytes: float
    shards: Shards
    alone: bool
    meanwhile: float


def whole_bytes(edge: Edge) -> float:
    """Bytes of the tensor, unsplit."""
    return float(math.prod(edge.shape)) * edge.itemsize


def moved(edge: Edge, source: Configuration, target: Configuration, shared: bool, in_place: bool) -> Moved:
    """What moving a tensor takes of the fullest device.

    A block that is needed is sliced out of those that it overlaps, and concatenated, dim by dim, of several. Who has a
    block slices it for all that have none of it. TensorFlow slices the first dim without a copy where rows are aligned:
    the slices show the block.

    Args:
      edge: the tensor, and how its layers name its dims; without a source's where the devices hold nothing of it.
      source, target: the configurations of the two layers.
      shared: whether the devices are processors of one host: what one holds, all can read.
      in_place: whether it is known until when the tensor itself is there.
    """
    held, needed = source.partition(edge.source_dims)[1], target.partition(edge.target_dims)[1]
    if held == needed:
        return Moved(0.0, needed, not shared or target.devices <= source.devices, 0.0)
    if len(held) < len(needed):
        return Moved(whole_bytes(edge) / math.prod(count for count, _ in needed), needed, True, 0.0)
    counts = [(of_held, of_needed) for (of_held, _), (of_needed, _) in zip(held, needed, strict=True)]
    blocks = math.prod(of_held for of_held, _ in counts)
    pieces = math.prod(max(of_needed // of_held, 1) for of_held, of_needed in counts)
    block, nbytes = whole_bytes(edge) / blocks, whole_bytes(edge) / math.prod(of_needed for _, of_needed in counts)
    # Thirds that become halves: the middle one is cut, too. Rows that are not aligned TensorFlow copies all the same.
    row = edge.itemsize * math.prod(size // of_held for size, (of_held, _) in zip(
        edge.shape[1:], counts[1:], strict=True))
    shown = not any(of_held % of_needed for of_held, of_needed in (counts if row % ALIGNED else counts[1:]))
    sliced = 0.0 if shown else block / pieces * math.ceil(pieces * blocks / source.devices)
    # The middle one of three lies in two halves; on one host the others are shown.
    if concats := sum(of_needed < of_held or (not shared and of_needed % of_held > 0)
                      for of_held, of_needed in counts):
        # From devices with memory of their own the pieces arrive, and lie beside what is put together of them.
        arrived = sliced if shared else max(sliced, nbytes)
        return Moved(nbytes, needed, True, sliced + nbytes if concats > 1 else arrived)
    if not shared:
        # What is shown keeps the block; of a sum every device makes its own piece.
        if in_place and shown and pieces > 1 and all(source.shards(name) == 1 for name in edge.pending):
            # Where devices need parts of others' blocks these arrive beside their own.
            own = all(of_held == 1 or stride == of_needed // of_held * finer for (of_held, stride), (of_needed, finer)
                      in zip(held, needed, strict=True))
            return Moved(0.0 if own else block, needed, False, 0.0)
        return Moved(nbytes, needed, True, sliced)
    if not shown:  # the middle third of halves is put together, beside its pieces and what is cut for others
        joined = nbytes if any(of_needed % of_held for of_held, of_needed in counts) else 0.0
        return Moved(max(nbytes, sliced), needed, sliced <= nbytes, joined)
    return Moved(0.0 if in_place and pieces > 1 else nbytes, needed, False, 0.0)


def until_taken(edges: Sequence[Edge]) -> list[list[int]]:
    """Until when what is read over each edge is there for it, in every order, if its reader alone uses it: from the
    moment on at which that writes in its place, what it writes counts instead. One thing is written in one place."""
    taken: set[tuple[int, int, int]] = set()
    found = []
    for edge in edges:
        found.append([copy.end for copy in edge.held])
        for order, copy in enumerate(edge.held):
            written = edge.target, order, copy.taken
            if copy.taken >= 0 and written not in taken:
                taken.add(written)
                found[-1][order] = copy.taken - 1
    return found
