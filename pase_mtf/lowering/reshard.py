"""Moves a tensor from one partition to another, and sums what devices hold in parts. Only data that is needed travels.

A tensor here is a list of TensorFlow tensors, one per position of its partition. Pieces are sliced where they lie and
put together where they are needed; where a block is needed as it is, nothing is emitted: TensorFlow sends a tensor to
the device of its consumer by itself, once per device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pase_mtf.compat import tf
from pase_mtf.graph.all_reduces import HUB, PAIR, RING, way_of
from pase_mtf.graph.partition import Partition, Piece, cover, joined, nearest, scattered_sum, with_partial_sums
from pase_mtf.lowering.emit import Emitter

__all__ = ["ALL_REDUCE", "RESHARDING", "all_reduce", "assemble", "move", "reduce_and_move"]

ALL_REDUCE, RESHARDING = "all_reduce", "resharding"
"""Name scopes of the nodes that combine partial sums, and of those that move a tensor to another partition."""


def _rectangles(pieces: Iterable[Piece], block: Sequence[int]) -> list[int] | None:
    """Parts per dim if the pieces are exactly the cells of an even grid over the whole block, else None."""
    distinct = {(piece.begin, piece.size) for piece in pieces}
    parts = []
    for dim, extent in enumerate(block):
        spans = {(begin[dim], size[dim]) for begin, size in distinct}
        sizes = {size for _, size in spans}
        if len(sizes) != 1 or len(spans) * sizes.pop() != extent:
            return None
        parts.append(len(spans))
    return parts if math.prod(parts) == len(distinct) else None


class _Slicer:
    """Slices the pieces out of the blocks of a tensor, each once, on the device where the block lies."""

    def __init__(self, tensors: Sequence[tf.Tensor], source: Partition, shape: Sequence[int], emitter: Emitter):
        self._tensors = tensors
        self._source = source
        self._block = source.block_shape(shape)
        self._emitter = emitter
        self._wanted: dict[int, set[Piece]] = {}
        self._sliced: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tf.Tensor] = {}

    def want(self, position: int, piece: Piece) -> None:
        """Announces a piece, so that all pieces of a block can be sliced by one node."""
        if piece.size != self._block:
            self._wanted.setdefault(position, set()).add(piece)

    def get(self, position: int, piece: Piece) -> tf.Tensor:
        """The piece of the block at this position."""
        if piece.size == self._block:
            return self._tensors[position]
        key = (position, piece.begin, piece.size)
        if key not in self._sliced:
            self._slice_block(position)
        return self._sliced[key]

    def _slice_block(self, position: int) -> None:
        device = self._emitter.devices[self._source.devices[position]]
        pieces = self._wanted[position]
        parts = _rectangles(pieces, self._block)
        if parts is None:
            for piece in sorted(pieces, key=lambda piece: piece.begin):
                self._sliced[position, piece.begin, piece.size] = self._emitter.slice(
                    device, self._tensors[position], piece.begin, piece.size)
            return
        size = tuple(extent // count for extent, count in zip(self._block, parts, strict=True))
        cells = [self._tensors[position]]
        for dim, count in enumerate(parts):
            cells = [part for cell in cells for part in self._emitter.split(device, cell, count, dim)]
        for cell, index in zip(cells, itertools.product(*(range(count) for count in parts)), strict=True):
            begin = tuple(number * extent for number, extent in zip(index, size, strict=True))
            self._sliced[position, begin, size] = cell


class _Order(NamedTuple):
    """What a device is to be given of a tensor.

    Attributes:
      device: its number.
      pieces: (position of the source that it comes from, piece) of each.
    """

    device: int
    pieces: Sequence[tuple[int, Piece]]


def _deliver(orders: Sequence[_Order], source: Partition, slicer: _Slicer, emitter: Emitter) -> list[list[tf.Tensor]]:
    """The pieces of every order. Between processes each lies on its device, by one collective where every device of a
    group gets one piece of each of them; else it lies where it is sliced, and travels by itself.
    """
    groups = {} if emitter.exchange.has_hubs else _groups(orders, source)
    found: list[list[tf.Tensor]] = [[] for _ in orders]
    done = set()
    for number, order in enumerate(orders):
        members = groups.get(order.device)
        if members is None:
            found[number] = [slicer.get(position, piece) for position, piece in order.pieces]
        elif members not in done:
            done.add(members)
            mine = [next(k for k in range(len(orders)) if orders[k].device == device) for device in members]
            for k, received in zip(mine, _exchange([orders[k] for k in mine], members, source, slicer, emitter),
                                   strict=True):
                found[k] = received
    return found


def _groups(orders: Sequence[_Order], source: Partition) -> dict[int, tuple[int, ...]]:
    """Device -> the group in which all devices get one piece of each, all of one size; nothing of other devices, among
    them those that have no piece themselves: these are given theirs one by one.

    In groups of two there is nothing to be saved: a piece each way.
    """
    wanted: dict[int, list[_Order]] = {}
    for order in orders:
        wanted.setdefault(order.device, []).append(order)
    froms = {device: tuple(sorted(source.devices[position] for position, _ in mine[0].pieces))
             for device, mine in wanted.items() if len(mine) == 1}
    sizes = {device: {piece.size for _, piece in mine[0].pieces} for device, mine in wanted.items()}
    return {device: members for device, members in froms.items()
            if device in members and len(members) > 2 and len(set(members)) == len(members)
            and all(froms.get(other) == members for other in members)
            and len(set().union(*(sizes[other] for other in members))) == 1}


def _exchange(orders: Sequence[_Order], members: Sequence[int], source: Partition, slicer: _Slicer,
              emitter: Emitter) -> list[list[tf.Tensor]]:
    """The pieces of every order of a group, whose devices get one piece of each."""
    names = [emitter.devices[device] for device in members]
    of_source: dict[int, list[tuple[int, Piece]]] = {device: [] for device in members}
    for order in orders:
        for position, piece in order.pieces:
            of_source[source.devices[position]].append((position, piece))
    rows = [[slicer.get(position, piece) for position, piece in of_source[device]] for device in members]
    if all(len(set(of_source[device])) == 1 for device in members):
        columns = emitter.exchange.all_gather(names, [row[0] for row in rows])
    else:
        columns = emitter.exchange.all_to_all(names, rows)
    return [[column[members.index(source.devices[position])] for position, _ in order.pieces]
            for order, column in zip(orders, columns, strict=True)]


def assemble(cells: Sequence[tf.Tensor], counts: Sequence[int], device: str, emitter: Emitter) -> tf.Tensor:
    """Puts a row-major grid of cells together on a device."""
    return joined(cells, counts, lambda row, dim: emitter.concat(device, row, dim))


def move(tensors: Sequence[tf.Tensor], source: Partition, target: Partition, shape: Sequence[int],
         emitter: Emitter) -> list[tf.Tensor]:
    """Moves a tensor to another partition.

    Each block is put together from the blocks it overlaps: from the device's own, else from the nearest device that
    has them. Devices that share their memory share the result as well.

    Args:
      tensors: the block at every position of `source`.
      source, target: partitions whose device numbers index `emitter.devices`.
      shape: the unsplit shape of the tensor.
      emitter: emits the nodes.

    Returns:
      The block at every position of `target`.
    """
    if source == target:
        return list(tensors)
    shape = tuple(shape)
    slicer = _Slicer(tensors, source, shape, emitter)
    orders = []
    for parts, positions in target.holders.items():
        counts, covering = cover(source, target, shape, parts)
        pieces = list(covering)
        # Sharing memory, the block is made once, by a device that has some of it.
        makers = positions[:1] if emitter.shared else positions
        for maker in makers:
            device = target.devices[maker]
            found = [(nearest(source.holders[piece.block], source.devices, device, emitter.nodes), piece)
                     for piece in pieces]
            for position, piece in found:
                slicer.want(position, piece)
            orders.append((positions if emitter.shared else (maker,), device, counts, found))
    result: list[tf.Tensor | None] = [None] * len(target.devices)
    delivered = _deliver([_Order(device, found) for _, device, _, found in orders], source, slicer, emitter)
    for (positions, device, counts, _), cells in zip(orders, delivered, strict=True):
        block = assemble(cells, counts, emitter.devices[device], emitter)
        for position in positions:
            result[position] = emitter.exchange.bring(emitter.devices[target.devices[position]], block)
    return result


def all_reduce(tensors: Sequence[tf.Tensor], members: Sequence[Sequence[int]], devices: Sequence[str],
               emitter: Emitter, kind: str = "SUM") -> list[tf.Tensor]:
    """Combines tensors elementwise within groups and gives every member the result.

    Args:
      tensors: one per position.
      members: disjoint groups of positions; within a group all tensors have one shape.
      devices: the name of the device at every position.
      emitter: emits the nodes.
      kind: "SUM", "MAX" or "MIN".

    Returns:
      One tensor per position.
    """
    result = list(tensors)
    for group in members:
        size = len(group)
        if size == 1:
            continue
        names, xs = [devices[position] for position in group], [tensors[position] for position in group]
        shape: list[int] = xs[0].shape.as_list() if xs[0].shape.is_fully_defined() else []
        elements = math.prod(shape) if xs[0].shape.is_fully_defined() else 0
        way, done = way_of(elements, size), emitter.exchange.all_reduce(names, xs, kind)
        if done is None and (emitter.shared or (way == HUB and emitter.exchange.has_hubs)):
            # Summed once; who needs it reads it there.
            done = [emitter.combine(devices[emitter.turn(group)], xs, kind)] * size
        elif done is None and way in (PAIR, HUB):
            # Each sends all it has: of two at once, where a hub would send the sum back.
            done = [emitter.combine(name, gathered, kind)
                    for name, gathered in zip(names, emitter.exchange.all_gather(names, xs), strict=True)]
        elif done is None:
            axis = max(range(len(shape)), key=lambda dim: (shape[dim] % size == 0, shape[dim]))
            sizes = [shape[axis] * (k + 1) // size - shape[axis] * k // size for k in range(size)]
            pieces = [emitter.split_sizes(name, x, sizes, axis) for name, x in zip(names, xs, strict=True)]
            if emitter.exchange.has_hubs and way == RING:
                gathered_by = _ring_all_reduce(names, pieces, kind, emitter)
            else:
                sums = [emitter.combine(name, parts, kind) for name, parts in zip(
                    names, emitter.exchange.all_to_all(names, pieces), strict=True)]
                gathered_by = emitter.exchange.all_gather(names, sums)
            done = [emitter.concat(name, gathered, axis) for name, gathered in zip(names, gathered_by, strict=True)]
        for position, total in zip(group, done, strict=True):
            result[position] = total
    return result


def _ring_all_reduce(names: Sequence[str], pieces: Sequence[Sequence[tf.Tensor]], kind: str, emitter: Emitter,
                     ) -> list[list[tf.Tensor]]:
    """Sums pieces round a ring, every device sending to the next one only, and takes the sums round it once more.

    Piece number k is summed from device k on, so that its order of summation is another one than that of the others
    (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).

    Args:
      names: of the q devices.
      pieces: per device its q pieces of what is to be combined; pieces of one number have one shape.
      kind, emitter: see `all_reduce`.

    Returns:
      Per device the q combined pieces.
    """
    size = len(names)
    held: list[list[tf.Tensor]] = [list(row) for row in pieces]
    for number in range(size):
        total = pieces[number][number]
        for hop in range(1, size):
            at = (number + hop) % size
            total = emitter.combine(names[at], [total, pieces[at][number]], kind)
        held[at][number] = total
        for hop in range(size, 2 * size - 1):
            at = (number + hop) % size
            total = held[at][number] = emitter.run_on(names[at], tf.identity, total)
    return held


def reduce_and_move(tensors: Sequence[tf.Tensor], source: Partition, axes: Sequence[tuple[int, int]],
                    target: Partition, shape: Sequence[int], emitter: Emitter) -> list[tf.Tensor] | None:
    """Sums over mesh axes and moves the sum, as a reduce-scatter: every device sums one piece of what is needed, and
    gives it to the others that need it.

    Args:
      tensors: a partial sum per position of `source`.
      source: the partition of the partial sums.
      axes: (size, stride) of the mesh axes over which the parts are to be summed.
      target: where the sum is wanted.
      shape: the unsplit shape of the tensor.
      emitter: emits the nodes.

    Returns:
      The block at every position of `target`; or None where an all-reduce, followed by a `move`, is as good.
    """
    shape = tuple(shape)
    # Where memory is shared nothing travels: whole blocks are summed once, and the sums are sliced.
    sums = None if emitter.shared else scattered_sum(source, target, shape)
    if sums is None:
        return None
    held = with_partial_sums(source, axes)
    sizes = [count for count, _ in held.shards[len(shape):]]
    needed = Partition(sums.devices, (*sums.shards, *[(1, 1)] * len(axes)))
    slicer, orders, counts_of = _Slicer(tensors, source, shape, emitter), [], []
    for position, device in enumerate(sums.devices):
        counts, pieces = cover(held, needed, (*shape, *sizes), needed.block(position))
        found = [(nearest(held.holders[piece.block], source.devices, device, emitter.nodes), piece.without(len(sizes)))
                 for piece in pieces]
        for holder, piece in found:
            slicer.want(holder, piece)
        orders.append(_Order(device, found))
        counts_of.append(counts[:len(shape)])
    size, result = math.prod(sizes), []
    for order, counts, parts_of in zip(orders, counts_of, _deliver(orders, source, slicer, emitter), strict=True):
        name = emitter.devices[order.device]
        cells = [emitter.combine(name, parts_of[begin:begin + size], "SUM") for begin in range(0, len(parts_of), size)]
        result.append(assemble(cells, counts, name, emitter))
    return move(result, sums, target, shape, emitter)
