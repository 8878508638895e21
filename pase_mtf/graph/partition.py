"""Which block of a tensor each device holds, and which pieces have to travel from one such partition to another.

Pure Python: knows neither TensorFlow nor Mesh-TF (a mesh implementation is read by its methods only).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

__all__ = ["MeshImpl", "Partition", "Piece", "cover", "groups", "nearest", "of_mesh", "scattered", "scattered_sum",
           "translate", "volume", "whole", "with_parts"]


@dataclasses.dataclass(frozen=True)
class Partition:
    """A tensor cut evenly along its dims, laid on devices; canonical: equal means placed identically.

    Attributes:
      devices: the device number at every position. Positions count row-major over the axes of the mesh.
      cuts: (parts, stride) per dim of the tensor: position k holds part (k // stride) % parts. (1, 1) where whole.
    """

    devices: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]

    def parts(self, position: int) -> tuple[int, ...]:
        """The part of every dim that a position holds."""
        return tuple((position // stride) % parts for parts, stride in self.cuts)

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of every block of a tensor of this shape (evenly divisible)."""
        return tuple(size // parts for size, (parts, _) in zip(shape, self.cuts, strict=True))

    @functools.cached_property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Block (its part of every dim) -> the positions that hold it, ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for position in range(len(self.devices)):
            found.setdefault(self.parts(position), []).append(position)
        return {parts: tuple(positions) for parts, positions in found.items()}

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether every position holds the whole tensor."""
        return all(parts == 1 for parts, _ in self.cuts)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one block of the source contributes to a block of the target.

    Attributes:
      parts: which block of the source.
      begin, size: the region of it that is needed, per dim, relative to that block.
    """

    parts: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]

    def without(self, dims: int) -> Piece:
        """The piece without its last dims."""
        left = len(self.parts) - dims
        return Piece(self.parts[:left], self.begin[:left], self.size[:left])


class _MeshShape(Protocol):
    to_integer_list: list[int]


class MeshImpl(Protocol):
    """What is read of an mtf.MeshImpl.

    Attributes:
      shape: of the mesh.
    """

    shape: _MeshShape

    def tensor_layout(self, arg: object, /) -> Iterable[int | None]:
        """The mesh axis of every dim of a tensor or a shape; None: it is whole."""


def whole(device: int, rank: int) -> Partition:
    """The partition of a tensor that one device holds completely."""
    return Partition((device,), ((1, 1),) * rank)


def of_mesh(mesh_impl: MeshImpl, shape: object, devices: Sequence[int]) -> Partition:
    """The partition that a Mesh-TF mesh implementation gives a tensor.

    Args:
      mesh_impl: an mtf.MeshImpl.
      shape: the mtf.Shape of the tensor.
      devices: the device number of every processor of the mesh.
    """
    sizes = mesh_impl.shape.to_integer_list
    cuts = []
    for axis in mesh_impl.tensor_layout(shape):
        if axis is None or sizes[axis] == 1:
            cuts.append((1, 1))
        else:
            cuts.append((sizes[axis], math.prod(sizes[axis + 1:])))
    return Partition(tuple(devices), tuple(cuts))


def nearest(candidates: Sequence[int], devices: Sequence[int], device: int) -> int:
    """The candidate position whose device is nearest: the device itself, else the one in the smallest common block.

    Devices are numbered node by node, so the highest bit in which two numbers differ says how far apart they are.
    """
    return min(candidates, key=lambda position: (devices[position] ^ device, position))


def groups(positions: int, axes: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The groups of positions that differ only along mesh axes, each axis given as (size, stride)."""
    found: dict[int, list[int]] = {}
    for position in range(positions):
        root = position
        for size, stride in axes:
            root -= (position // stride) % size * stride
        found.setdefault(root, []).append(position)
    return [tuple(group) for group in found.values()]


@functools.lru_cache(maxsize=1 << 16)
def _cover_dim(size: int, source_parts: int, target_parts: int, target_part: int) -> tuple[tuple[int, int, int], ...]:
    """(source part, begin in it, size) of every source part that one part of the target overlaps."""
    source, target = size // source_parts, size // target_parts
    begin, end = target_part * target, (target_part + 1) * target
    return tuple(
        (part, max(begin - part * source, 0), min(end, (part + 1) * source) - max(begin, part * source))
        for part in range(begin // source, -(-end // source)))


def cover(source: Partition, target: Partition, shape: Sequence[int], parts: tuple[int, ...],
          ) -> tuple[tuple[int, ...], Iterator[Piece]]:
    """The pieces of source blocks that make up one block of the target.

    Args:
      source, target: partitions of a tensor of this shape.
      shape: its unsplit shape.
      parts: which block of the target.

    Returns:
      How many pieces the block has along every dim, and the pieces, row-major.
    """
    along = [
        _cover_dim(size, source_parts, target_parts, part)
        for size, (source_parts, _), (target_parts, _), part
        in zip(shape, source.cuts, target.cuts, parts, strict=True)]
    pieces = (
        Piece(tuple(item[0] for item in cell), tuple(item[1] for item in cell), tuple(item[2] for item in cell))
        for cell in itertools.product(*along))
    return tuple(len(items) for items in along), pieces


@functools.lru_cache(maxsize=1 << 14)
def volume(source: Partition, target: Partition, shape: tuple[int, ...]) -> int:
    """Number of elements that travel between devices when a tensor goes from one partition to the other."""
    total = 0
    for parts, positions in target.holders.items():
        pieces = list(cover(source, target, shape, parts)[1])
        for position in positions:
            device = target.devices[position]
            for piece in pieces:
                owner = nearest(source.holders[piece.parts], source.devices, device)
                if source.devices[owner] != device:
                    total += math.prod(piece.size)
    return total


def with_parts(partition: Partition, axes: Sequence[tuple[int, int]]) -> Partition:
    """The partition of the parts of a sum: which of them a position holds is told by dims behind those of the tensor.

    Args:
      partition: of the tensor.
      axes: (size, stride) of the mesh axes over which the parts are to be summed.
    """
    return Partition(partition.devices, (*partition.cuts, *sorted(axes, key=lambda axis: -axis[1])))


def scattered_sum(source: Partition, target: Partition, shape: Sequence[int]) -> Partition | None:
    """Where parts of a sum are summed on their way to another partition: a reduce-scatter, after which those that hold
    a block of the target together give each other what they have of it.

    Args:
      source: of the parts.
      target: where the sum is wanted.
      shape: the unsplit shape of the tensor.

    Returns:
      A partition finer than the target, or it itself, in which every position has a block of its own. None where an
      all-reduce comes first: a block of the target is no smaller than one of the source, the target is on fewer
      devices, or no dim divides so far.
    """
    if len(target.devices) < len(source.devices) or (
            math.prod(target.block_shape(shape)) >= math.prod(source.block_shape(shape))):
        return None
    return scattered(target, tuple(shape))


@functools.lru_cache(maxsize=1 << 14)
def scattered(partition: Partition, shape: tuple[int, ...]) -> Partition | None:
    """The partition cut further, until every position has a block of its own; None where no dim divides so far."""
    cuts, outer = list(partition.cuts), len(partition.devices)
    for parts, stride in [*sorted((cut for cut in cuts if cut[0] > 1), key=lambda cut: -cut[1]), (1, 1)]:
        if outer % (parts * stride):
            return None
        copies = outer // (parts * stride)
        if copies > 1:
            # A whole dim, the first so that what is cut lies together; else one that is cut just outside of the copies.
            dim = next((dim for dim, (count, inner) in enumerate(cuts) if shape[dim] % (count * copies) == 0 and (
                count == 1 or inner == outer)), None)
            if dim is None:
                return None
            cuts[dim] = cuts[dim][0] * copies, parts * stride
        outer = stride
    return Partition(partition.devices, tuple(cuts))


def _atoms(old: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[list[int]], list[list[int]]] | None:
    """Factors both shapes are built of: their sizes, and for each dim of either shape its run of factors."""
    sizes: list[int] = []
    runs: tuple[list[list[int]], list[list[int]]] = ([[] for _ in old], [[] for _ in new])
    shapes = (list(old), list(new))
    at = [-1, -1]
    rest = [1, 1]
    while True:
        for side in (0, 1):
            while rest[side] == 1 and at[side] + 1 < len(shapes[side]):
                at[side] += 1
                rest[side] = shapes[side][at[side]]
        if rest == [1, 1]:
            return sizes, *runs
        small = min(rest)
        # One of the two dims ends inside the other; where it does not divide it, no finer grid is common to both.
        if small == 1 or max(rest) % small:
            return None
        for side in (0, 1):
            runs[side][at[side]].append(len(sizes))
            rest[side] //= small
        sizes.append(small)


def _to_atoms(cut: tuple[int, int], run: Sequence[int], sizes: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """The cut of a dim as cuts of the factors it consists of, outermost first; None where it cannot be said so."""
    parts, stride = cut
    found = {}
    for atom in run:
        if parts == 1:
            break
        here = math.gcd(parts, sizes[atom])
        # A part must be a contiguous range: before the next factor is cut, this one has to be cut completely.
        if here not in (parts, sizes[atom]):
            return None
        parts //= here
        found[atom] = (here, stride * parts)
    return found if parts == 1 else None


def _from_atoms(run: Sequence[int], cuts: dict[int, tuple[int, int]], sizes: Sequence[int]) -> tuple[int, int] | None:
    """The cuts of the factors of a dim as one cut of the dim, or None."""
    parts, stride, complete = 1, 1, True
    for atom in run:
        here, here_stride = cuts.get(atom, (1, 1))
        if here > 1:
            if not complete or (parts > 1 and stride != here_stride * here):
                return None
            parts, stride = parts * here, here_stride
        complete = complete and here == sizes[atom]
    return parts, stride


@functools.lru_cache(maxsize=1 << 14)
def translate(partition: Partition, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Partition, Partition]:
    """The partition that a reshape of every block by itself produces.

    A reshape keeps the row-major order of the elements: a block can be reshaped where it stands if both shapes can
    express its cuts. Cuts that cannot be expressed in the new shape have to be undone first.

    Args:
      partition: of a tensor of shape `old`.
      old, new: unsplit shapes with the same number of elements.

    Returns:
      (partition of the old shape with only the cuts that both shapes express, the same in terms of the new shape);
      the first is `partition` itself where all its cuts translate.
    """
    uncut = (Partition(partition.devices, ((1, 1),) * len(old)), Partition(partition.devices, ((1, 1),) * len(new)))
    if partition.is_whole:
        return partition, uncut[1]
    factors = _atoms(old, new)
    if factors is None:
        # Leading dims that agree still translate one by one.
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        kept = partition.cuts[:same]
        return (Partition(partition.devices, kept + uncut[0].cuts[same:]),
                Partition(partition.devices, kept + uncut[1].cuts[same:]))
    sizes, old_runs, new_runs = factors
    cuts = list(partition.cuts)
    while True:
        atom_cuts: dict[int, tuple[int, int]] = {}
        dim_of_atom = {}
        for dim, run in enumerate(old_runs):
            found = _to_atoms(cuts[dim], run, sizes)
            if found is None:
                cuts[dim], found = (1, 1), {}
            atom_cuts.update(found)
            dim_of_atom.update(dict.fromkeys(run, dim))
        new_cuts = []
        for run in new_runs:
            cut = _from_atoms(run, atom_cuts, sizes)
            if cut is None:
                # Undo the innermost of the cuts that clash, and look again.
                clash = max(atom for atom in run if atom in atom_cuts)
                cuts[dim_of_atom[clash]] = (1, 1)
                break
            new_cuts.append(cut)
        else:
            return Partition(partition.devices, tuple(cuts)), Partition(partition.devices, tuple(new_cuts))
