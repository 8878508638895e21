"""Which block of a tensor each device holds, and which pieces have to travel from one such partition to another.

Pure Python: knows neither TensorFlow nor Mesh-TF (a mesh implementation is read by its methods only).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

__all__ = ["ALIGNED", "MeshImpl", "Partition", "Piece", "before_reshape", "cover", "groups", "joined", "nearest",
           "of_mesh", "scattered", "scattered_shards", "scattered_sum", "translate", "volume", "whole",
           "with_partial_sums"]

_Cell = TypeVar("_Cell")

ALIGNED = 64
"""Bytes by which the rows of a tensor have to divide that TensorFlow slices along its first dim without a copy."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """A tensor split evenly along its dims, laid on devices; canonical: equal means placed identically.

    Attributes:
      devices: the device number at every position. Positions count row-major over the axes of the mesh.
      shards: (number of shards, stride) per dim of the tensor: position k holds shard (k // stride) % number of them.
        (1, 1) where whole.
    """

    devices: tuple[int, ...]
    shards: tuple[tuple[int, int], ...]

    def block(self, position: int) -> tuple[int, ...]:
        """Which block a position holds: its shard of every dim."""
        return tuple((position // stride) % number for number, stride in self.shards)

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of every block of a tensor of this shape (evenly divisible)."""
        return tuple(size // number for size, (number, _) in zip(shape, self.shards, strict=True))

    @functools.cached_property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Block (its shard of every dim) -> the positions that hold it, ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for position in range(len(self.devices)):
            found.setdefault(self.block(position), []).append(position)
        return {block: tuple(positions) for block, positions in found.items()}

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether every position holds the whole tensor."""
        return all(number == 1 for number, _ in self.shards)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one block of the source contributes to a block of the target.

    Attributes:
      block: which block of the source.
      begin, size: the region of it that is needed, per dim, relative to that block.
    """

    block: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]

    def without(self, dims: int) -> Piece:
        """The piece without its last dims."""
        left = len(self.block) - dims
        return Piece(self.block[:left], self.begin[:left], self.size[:left])


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
    shards = []
    for axis in mesh_impl.tensor_layout(shape):
        if axis is None or sizes[axis] == 1:
            shards.append((1, 1))
        else:
            shards.append((sizes[axis], math.prod(sizes[axis + 1:])))
    return Partition(tuple(devices), tuple(shards))


def nearest(candidates: Sequence[int], devices: Sequence[int], device: int, nodes: Sequence[int] = ()) -> int:
    """The candidate position whose device is nearest: the device itself, else one that the innermost link joins.

    Devices are numbered node by node. Of several in one node the one that differs in lower bits is taken: where links
    that nobody told of join powers of two, it is behind the innermost of these.

    Args:
      candidates: positions, of which one is chosen.
      devices: the number of the device at every position.
      device: that asks.
      nodes: how many devices the links join that are known, but the one that joins all (`Machine.nodes`).
    """
    return min(candidates, key=lambda position: (
        sum(devices[position] // size != device // size for size in nodes), devices[position] ^ device, position))


def groups(positions: int, axes: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The groups of positions that differ only along mesh axes, each axis given as (size, stride)."""
    found: dict[int, list[int]] = {}
    for position in range(positions):
        root = position
        for size, stride in axes:
            root -= (position // stride) % size * stride
        found.setdefault(root, []).append(position)
    return [tuple(group) for group in found.values()]


def joined(cells: Sequence[_Cell], counts: Sequence[int], join: Callable[[Sequence[_Cell], int], _Cell]) -> _Cell:
    """A row-major grid of cells as one, put together dim by dim, the innermost first.

    Args:
      cells: as many as all counts multiplied.
      counts: per dim, how many stand along it.
      join: neighbours along a dim, and the number of that, as one.
    """
    for dim in reversed(range(len(counts))):
        count = counts[dim]
        if count > 1:
            cells = [join(cells[start:start + count], dim) for start in range(0, len(cells), count)]
    return cells[0]


@functools.lru_cache(maxsize=1 << 16)
def _cover_dim(size: int, source_shards: int, target_shards: int, wanted: int) -> tuple[tuple[int, int, int], ...]:
    """(source shard, begin in it, size) of every source shard that one shard of the target overlaps."""
    if not size:
        return ((0, 0, 0),)  # a piece without elements
    source, target = size // source_shards, size // target_shards
    begin, end = wanted * target, (wanted + 1) * target
    return tuple(
        (shard, max(begin - shard * source, 0), min(end, (shard + 1) * source) - max(begin, shard * source))
        for shard in range(begin // source, -(-end // source)))


def cover(source: Partition, target: Partition, shape: Sequence[int], block: tuple[int, ...],
          ) -> tuple[tuple[int, ...], Iterator[Piece]]:
    """The pieces of source blocks that make up one block of the target.

    Args:
      source, target: partitions of a tensor of this shape.
      shape: its unsplit shape.
      block: which one of the target.

    Returns:
      How many pieces the block has along every dim, and the pieces, row-major.
    """
    along = [
        _cover_dim(size, source_shards, target_shards, wanted)
        for size, (source_shards, _), (target_shards, _), wanted
        in zip(shape, source.shards, target.shards, block, strict=True)]
    pieces = (
        Piece(tuple(item[0] for item in cell), tuple(item[1] for item in cell), tuple(item[2] for item in cell))
        for cell in itertools.product(*along))
    return tuple(len(items) for items in along), pieces


@functools.lru_cache(maxsize=1 << 14)
def volume(source: Partition, target: Partition, shape: tuple[int, ...]) -> int:
    """Number of elements that travel between devices when a tensor goes from one partition to the other."""
    total = 0
    for block, positions in target.holders.items():
        pieces = list(cover(source, target, shape, block)[1])
        for position in positions:
            device = target.devices[position]
            for piece in pieces:
                owner = nearest(source.holders[piece.block], source.devices, device)
                if source.devices[owner] != device:
                    total += math.prod(piece.size)
    return total


def with_partial_sums(partition: Partition, axes: Sequence[tuple[int, int]]) -> Partition:
    """The partition of partial sums: which of them a position holds is told by dims behind those of the tensor.

    Args:
      partition: of the tensor.
      axes: (size, stride) of the mesh axes over which they are to be added up.
    """
    return Partition(partition.devices, (*partition.shards, *sorted(axes, key=lambda axis: -axis[1])))


def scattered_sum(source: Partition, target: Partition, shape: Sequence[int]) -> Partition | None:
    """Where partial sums are added up on their way to another partition: a reduce-scatter, after which those that hold
    a block of the target together give each other what they have of it.

    Args:
      source: of the partial sums.
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


def scattered(partition: Partition, shape: tuple[int, ...]) -> Partition | None:
    """The partition split further, until every position has a block of its own; None where no dim divides so far."""
    shards = scattered_shards(len(partition.devices), partition.shards, shape)
    return None if shards is None else Partition(partition.devices, shards)


@functools.lru_cache(maxsize=1 << 16)
def scattered_shards(positions: int, shards: tuple[tuple[int, int], ...], shape: tuple[int, ...],
                     ) -> tuple[tuple[int, int], ...] | None:
    """`scattered`, of the (number, stride) per dim of a partition of so many positions."""
    found, outer = list(shards), positions
    for number, stride in [*sorted((split for split in found if split[0] > 1), key=lambda split: -split[1]), (1, 1)]:
        if outer % (number * stride):
            return None
        replicas = outer // (number * stride)
        if replicas > 1:
            # A whole dim, the first so that shards are contiguous; else one that is split just outside of the replicas.
            dim = next((dim for dim, (count, inner) in enumerate(found) if shape[dim] % (count * replicas) == 0 and (
                count == 1 or inner == outer)), None)
            if dim is None:
                return None
            found[dim] = found[dim][0] * replicas, number * stride
        outer = stride
    return tuple(found)


def _atoms(old: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[list[int]], list[list[int]]] | None:
    """Factors both shapes are built of: their sizes, and for each dim of either shape its run of factors. Of dims that
    cross each other, as 6 x 4 and 4 x 6 do, those that they begin with; None of tensors without elements."""
    if 0 in old:
        return None
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
        common = math.gcd(*rest)
        if common > 1:
            for side in (0, 1):
                runs[side][at[side]].append(len(sizes))
                rest[side] //= common
            sizes.append(common)
        if min(rest) > 1:
            # Neither dim ends inside the other: no finer grid is common to both until dims of both end together.
            while rest[0] != rest[1]:
                side = int(rest[1] < rest[0])
                at[side] += 1
                rest[side] *= shapes[side][at[side]]
            rest = [1, 1]


def _to_atoms(split: tuple[int, int], run: Sequence[int], sizes: Sequence[int]) -> dict[int, tuple[int, int]] | None:
    """The split of a dim as splits of the factors it consists of, outermost first; None where it cannot be said so."""
    shards, stride = split
    found = {}
    for atom in run:
        if shards == 1:
            break
        here = math.gcd(shards, sizes[atom])
        # A shard must be a contiguous range: before the next factor is split, this one has to be split completely.
        if here not in (shards, sizes[atom]):
            return None
        shards //= here
        found[atom] = (here, stride * shards)
    return found if shards == 1 else None


def _from_atoms(run: Sequence[int], splits: dict[int, tuple[int, int]], sizes: Sequence[int],
                ) -> tuple[int, int] | None:
    """The splits of the factors of a dim as one split of the dim, or None."""
    shards, stride, complete = 1, 1, True
    for atom in run:
        here, here_stride = splits.get(atom, (1, 1))
        if here > 1:
            if not complete or (shards > 1 and stride != here_stride * here):
                return None
            shards, stride = shards * here, here_stride
        complete = complete and here == sizes[atom]
    return shards, stride


@functools.lru_cache(maxsize=1 << 14)
def translate(partition: Partition, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Partition, Partition]:
    """The partition that a reshape of every block by itself produces.

    A reshape keeps the row-major order of the elements: a block can be reshaped where it stands if both shapes can
    express its splits. Those that cannot be expressed in the new shape have to be undone first.

    Args:
      partition: of a tensor of shape `old`.
      old, new: unsplit shapes with the same number of elements.

    Returns:
      (partition of the old shape with only the splits that both shapes express, the same in terms of the new shape);
      the first is `partition` itself where all its splits translate.
    """
    unsplit = (Partition(partition.devices, ((1, 1),) * len(old)), Partition(partition.devices, ((1, 1),) * len(new)))
    if partition.is_whole:
        return partition, unsplit[1]
    factors = _atoms(old, new)
    if factors is None:
        # Leading dims that agree still translate one by one.
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        kept = partition.shards[:same]
        return (Partition(partition.devices, kept + unsplit[0].shards[same:]),
                Partition(partition.devices, kept + unsplit[1].shards[same:]))
    sizes, old_runs, new_runs = factors
    shards = list(partition.shards)
    while True:
        atom_splits: dict[int, tuple[int, int]] = {}
        dim_of_atom = {}
        for dim, run in enumerate(old_runs):
            found = _to_atoms(shards[dim], run, sizes)
            if found is None:
                shards[dim], found = (1, 1), {}
            atom_splits.update(found)
            dim_of_atom.update(dict.fromkeys(run, dim))
        new_shards = []
        for run in new_runs:
            split = _from_atoms(run, atom_splits, sizes)
            if split is None:
                # Undo the innermost of the splits that clash, and look again.
                clash = max(atom for atom in run if atom in atom_splits)
                shards[dim_of_atom[clash]] = (1, 1)
                break
            new_shards.append(split)
        else:
            return Partition(partition.devices, tuple(shards)), Partition(partition.devices, tuple(new_shards))


def before_reshape(source: Partition, target: Partition, old: tuple[int, ...], new: tuple[int, ...],
                   ) -> tuple[Partition, Partition]:
    """How a tensor is split while it is reshaped, block by block: what of that can be is done where less travels.

    Args:
      source, target: partitions before and after.
      old, new: unsplit shapes.

    Returns:
      The partition in which it is read, and the same in terms of the new shape.
    """
    kept, moved = translate(source, old, new)
    wanted, there = translate(target, new, old)
    if wanted == target or volume(source, there, old) <= volume(source, kept, old) + volume(moved, target, new):
        return there, wanted
    return kept, moved
