"""Bytes a device holds under a strategy, by what they are for.

Every layer runs on devices 0, 1, ..., all of which hold equal shares: device 0 is always among the fullest. Weights and
slots of the optimizer are there all the time, all else from one moment of the step to another (`export.lifetimes` tells
which, and what order of the operations that assumes): a device holds most at one moment, and which that is depends on
the strategy.

- A tensor that a layer makes: the share that the layer's configuration leaves to a device.
- A copy of it, where another layer reads other parts: from when the tensor is made until that layer has read it. The
  tensor itself is there until all have read it that read it as it lies.
- A gradient that devices have to sum: until the backward pass is over, for one device may be ahead of the others. What
  the update makes of it comes after that, in its place.
- What a loop adds up: the sum, from the first iteration on, which is summed over devices when the loop has ended; and
  what an iteration adds beside it, until that has ended, for an addition may be left until then.
- What a copy is put together from, while it is made (`cost.copies`).
- What the last reader of a tensor or a copy writes in its place, which counts instead of it from then on.
- What arrives for a sum, or the sum itself, as large as what is summed, while that is made: of gradients that waited
  for each other, of one at a time, or on devices of their own of a bucket of them (`graph.all_reduces.buckets`), and
  with what the update makes of the sums while they are still there.
- Where devices share a host, one makes sums and copies for several; the last of these writes what it makes of it in its
  place. What that is lasts, on the device that made the sum or the copy, beside what this device makes of it itself.
  The sum lies in the place of one of its parts: nothing arrives.
- Images that a kernel unfolds, where the machine's do (`cost.unfolded`).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.copies import Moved, moved, until_taken, whole_bytes
from pase_mtf.cost.held import ACTIVATIONS, BUFFERS, MEMORY_PARTS, AllItems, LayerItems, Shares, or_rows
from pase_mtf.cost.unfolded import Unfolded
from pase_mtf.graph.all_reduces import at_once
from pase_mtf.graph.computation_graph import ComputationGraph, Edge
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition

__all__ = ["MemoryModel", "strategy_memory"]


class _Copy(NamedTuple):
    """Bytes of a copy, and the moments from which and until which it is there."""

    nbytes: float
    begin: int
    end: int


class MemoryModel:
    """What a device holds in a step of a graph, moment by moment.

    Attributes:
      moments: how many there are.
    """

    def __init__(self, graph: ComputationGraph, shared: bool = False, unfolding_threads: int = 0) -> None:
        """Looks at the graph.

        Args:
          graph: of the model.
          shared: whether the devices are processors of one host: then one of them makes a sum or a copy for all.
          unfolding_threads: of the machine.
        """
        held = [held for layer in graph.layers for operation in layer.operations for held in operation.held]
        self._shared = shared
        ends = [max(copy[1:3]) for edge in graph.edges for copy in edge.held]
        last = max([0, *ends, *(max(entry.begin, entry.end, entry.waits_until, entry.shared_until) for entry in held)])
        self.moments = last + 1
        known: dict[Hashable, Shares] = {}
        self._layers = [LayerItems(layer, last, shared, known) for layer in graph.layers]
        self._items = AllItems.of(self._layers)
        unfolded = [Unfolded(layer, items, unfolding_threads)
                    for layer, items in zip(graph.layers, self._layers, strict=True)]
        self._unfolded = {number: found for number, found in enumerate(unfolded) if found.there}
        self._graph, self._moved = graph, [edge for edge in graph.edges if edge.held]
        self._updates = [edge for edge in graph.edges if graph.waits(edge)]
        self._settling = sorted({held.waits_until for layer in graph.layers for operation in layer.operations
                                 if operation.phase == "update" for held in operation.held if held.waits_until >= 0})
        self._until = until_taken(self._moved)
        self._known: dict[tuple[int, Configuration, Configuration], Moved] = {}
        self._read: dict[int, tuple[dict[int, list[Edge]], int]] = {}
        self._fullest: int | None = None
        # (layer, moment at which it is made, bytes) -> items of which it is known until when they are needed.
        self._made = collections.defaultdict[tuple[int, int, float], list[int]](list)
        needed = np.flatnonzero(self._items.own_until >= 0)
        for item, *key in zip(*(column[needed].tolist() for column in (np.arange(
                len(self._items.layer)), self._items.layer, self._items.begin, self._items.nbytes)), strict=True):
            self._made[tuple(key)].append(item)
        # (edge, item, moment, moment): until when an item is there where an edge makes no copy of it, and where one
        # device alone reads it there.
        self._read_as_made = np.array([
            (number, item, copy.end, self._until[number][order]) for number, edge in enumerate(self._moved)
            for order, copy in enumerate(edge.held)
            for item in self._made.get((edge.source, copy.made, whole_bytes(edge)), ())], np.int64).reshape(-1, 4).T
        self._as_made = frozenset(self._read_as_made[0].tolist())

    @property
    def fullest(self) -> int:
        """The moment at which most is there while nothing is split."""
        if self._fullest is None:
            self._fullest = self.peak([Configuration()] * len(self._layers))[1]
        return self._fullest

    def layer(self, number: int, configurations: Sequence[Configuration], moment: int) -> np.ndarray:
        """Bytes of a layer on each of its devices, at a moment.

        Args:
          number: of the layer.
          configurations: K of its configurations.
          moment: of the step.

        Returns:
          float64 [K]. The layers add up to no more than is there at that moment. In it are, besides what the layer
          makes, the tensors of others that it reads later than all that need them as they lie (in parts of theirs or
          its own, they are as large as it needs them), and what arrives for the sum of the largest gradient. What
          depends on two layers comes on top: copies beside what they are copies of, and other sums.
        """
        items = self._layers[number]
        total = items.at(moment, configurations)
        reads, summed = self._read_at(moment)
        if number == summed:
            total = total + items.arriving_at(moment, configurations)
        if number in self._unfolded:
            total = total + self._unfolded[number].at(moment, configurations)
        for edge in reads.get(number, ()):
            needed = items.shares_of(edge.target_dims, configurations)
            total = total + whole_bytes(edge) * needed
        return total

    def _read_at(self, moment: int) -> tuple[dict[int, list[Edge]], int]:
        """What layers are counted with at a moment besides what they make: layer -> the edges over which it reads what
        would not be there otherwise, each tensor of one reader; and the layer with the largest gradient to sum."""
        if moment not in self._read:
            found: dict[int, list[Edge]] = {}
            taken: set[tuple[object, ...]] = set()
            for number, edge in enumerate(self._moved):
                if "update" in (self._graph.layers[edge.source].kind, self._graph.layers[edge.target].kind):
                    continue  # when that is there depends on whether a gradient waits
                nbytes = whole_bytes(edge)
                for order, copy in enumerate(edge.held):
                    made = self._made.get((edge.source, copy.made, nbytes), ())
                    keys = {(edge.source, copy.made, nbytes), (edge.source, edge.tensor, edge.shape, order)}
                    gone = made and all(self._items.own_until[position] < moment for position in made)
                    there = max(copy.begin, copy.made) <= moment <= self._until[number][order]
                    if gone and there and not keys & taken:
                        taken |= keys
                        found.setdefault(edge.target, []).append(edge)
            arriving = [items.arriving(moment) for items in self._layers]
            largest = max(arriving, default=0.0)
            self._read[moment] = found, arriving.index(largest) if largest else -1
        return self._read[moment]

    def peak(self, configurations: Sequence[Configuration]) -> tuple[dict[str, float], int]:
        """The most that a device holds at one moment under a strategy.

        Args:
          configurations: one per layer.

        Returns:
          Part -> bytes, for all `MEMORY_PARTS`; and the moment.
        """
        items, settles = self._items, np.zeros(len(self._layers), bool)
        shares = np.concatenate([each.shares.of(configuration) for each, configuration
                                 in zip(self._layers, configurations, strict=True)])
        nbytes = or_rows(items.nbytes * shares[items.pattern], items.rows * shares[items.of_row], items.narrow)
        is_part = (items.parts_of >= 0) & (shares[items.parts_of] < 1.0)
        settles[items.layer[is_part & items.arrives]] = True
        awaiting = {edge.target: edge.source for edge in self._updates if settles[edge.source]}
        settles[list(awaiting)] = True
        waits, after = is_part & ~items.of_sum, items.of_sum & settles[items.layer]
        begin = np.where(after, items.waits_until, items.begin)
        end = np.where(after | (waits & ~items.arrives), items.waits_until, items.end)
        by_edge = [self._moved_by(number, configurations[edge.source], configurations[edge.target])
                   for number, edge in enumerate(self._moved)]
        self._until_read(by_edge, end)
        made = self._made_of_sums(after, nbytes)
        arriving = self._arriving(np.flatnonzero(waits & items.arrives), nbytes, made, awaiting,
                                  self._summed_elsewhere(configurations))
        unfolded = [_Copy(nbytes, when, when) for number, found in self._unfolded.items()
                    for nbytes, when in found.under(configurations[number])]
        copies = [*unfolded, *self._copies(configurations, by_edge, awaiting), *arriving]
        sizes, begin, end = (np.concatenate([of_items, of_copies]) for of_items, of_copies in zip(
            (nbytes, begin, end), np.array(copies, np.float64).reshape(-1, 3).T, strict=True))
        begin, end = begin.astype(np.int64), end.astype(np.int64)
        part = np.concatenate([items.part, np.repeat(
            [ACTIVATIONS, BUFFERS], [len(unfolded), len(copies) - len(unfolded)])])
        there = begin <= end
        change = (np.bincount(begin[there], sizes[there], self.moments + 1)
                  - np.bincount(end[there] + 1, sizes[there], self.moments + 1))
        moment = int(np.cumsum(change)[:self.moments].argmax())
        counted = (begin <= moment) & (moment <= end)
        total = np.bincount(part[counted], sizes[counted], len(MEMORY_PARTS))
        return dict(zip(MEMORY_PARTS, map(float, total), strict=True)), moment

    def _until_read(self, by_edge: Sequence[Moved], end: np.ndarray) -> None:
        """Sets until when tensors are there: until their own layer, or one that reads them as they lie, has done so."""
        shown = self._items.own_until >= 0
        end[shown] = self._items.own_until[shown]
        edge, item, moment, moment_alone = self._read_as_made
        as_made, alone = (np.array(column, bool)[edge] for column in (
            [not each.nbytes for each in by_edge], [each.alone for each in by_edge]))
        np.maximum.at(end, item[as_made], np.where(alone, moment_alone, moment)[as_made])

    def _made_of_sums(self, after: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Of each layer, bytes of what the update makes of gradients that devices have to sum, of one sum at a time."""
        items, count = self._items, len(self._layers)
        pairs = np.unique(items.layer[after] * self.moments + items.waits_until[after])
        sums = np.bincount(pairs // self.moments, minlength=count)
        made: np.ndarray = np.bincount(items.layer[after], nbytes[after], count) / np.maximum(sums, 1)
        return made

    def _summed_elsewhere(self, configurations: Sequence[Configuration]) -> list[int]:
        """The layers whose gradients are needed in other parts than they lie: these are in no bucket."""
        def at(layer: int, dims: Sequence[str]) -> Partition:
            return configurations[layer].placed(self._graph.layers[layer], dims)

        return [edge.source for edge in self._updates
                if at(edge.source, edge.source_dims) != at(edge.target, edge.target_dims)]

    def _arriving(self, arriving: np.ndarray, nbytes: np.ndarray, made: np.ndarray, awaiting: Mapping[int, int],
                  alone: Sequence[int]) -> Iterator[_Copy]:
        """What arrives for the sum of a gradient, and what the update makes of the sum while it is there: at the end of
        the backward pass, of the layer of which that is most, or of a bucket of those that are not `alone`."""
        items, elsewhere = self._items, np.zeros(len(made))
        for target, source in awaiting.items():
            elsewhere[source] = max(elsewhere[source], made[target])
        layer, moments, most = items.layer[arriving], items.waits_until[arriving], np.zeros(self.moments)
        # Another layer takes its part of a sum when all has arrived.
        np.maximum.at(most, moments, np.maximum(nbytes[arriving] + made[layer], elsewhere[layer]))
        if not self._shared:  # some of a bucket are used while others still lie in what has arrived
            count = nbytes[arriving] / items.itemsize[arriving]
            waiting = ~np.isin(layer, alone) & (at_once(count) == 1.0)
            used = nbytes[arriving] + np.maximum(made, elsewhere)[layer]
            elements, together = (np.bincount(moments[waiting], column[waiting], self.moments)
                                  for column in (count, used))
            most = np.maximum(most, together * at_once(elements))
        return (_Copy(float(most[moment]), moment, moment) for moment in np.unique(moments).tolist())

    def _copies(self, configurations: Sequence[Configuration], by_edge: Sequence[Moved],
                awaiting: Collection[int]) -> Sequence[_Copy]:
        """What a device holds of tensors that it needs otherwise than they lie: one copy for all layers that need the
        same block; and what that is put together from."""
        found: dict[tuple[object, ...], _Copy] = {}
        meanwhiles: list[_Copy] = []
        settled: dict[int, float] = {}  # of what waited for sums, one at a time
        for number, (edge, (nbytes, shards, alone, meanwhile)) in enumerate(zip(self._moved, by_edge, strict=True)):
            if not nbytes:
                continue
            shares = self._shared and math.prod(count for count, _ in shards) < configurations[edge.target].devices
            late = edge.source in awaiting or (edge.target in awaiting and edge.pending)
            for order, (begin, end, shared_until, _, _) in enumerate(edge.held):
                if end < begin:  # it is never there
                    continue
                if shares:
                    end = max(end, shared_until)
                elif alone:
                    end = self._until[number][order]
                if late:  # what is made of a gradient that waited
                    begin = end = self._settled(begin)
                key = edge.source, edge.tensor, edge.shape, shards, order
                if meanwhile and key not in found:
                    if late:
                        settled[begin] = max(settled.get(begin, 0.0), meanwhile)
                    else:
                        meanwhiles.append(_Copy(meanwhile, begin, begin))
                other = found.get(key, _Copy(nbytes, begin, end))
                found[key] = _Copy(nbytes, min(begin, other.begin), max(end, other.end))
        return [*found.values(), *meanwhiles, *(_Copy(most, when, when) for when, most in settled.items())]

    def copies_at(self, configurations: Sequence[Configuration], moment: int,
                  offered: Sequence[Sequence[Configuration]]) -> list[np.ndarray]:
        """What layers hold at a moment of tensors that they need otherwise than they lie, were all others to stay.

        Args:
          configurations: one per layer: those that stay.
          moment: of the step.
          offered: per layer, those that it may have instead.

        Returns:
          Per layer float64 [its offered configurations], bytes of copies. An estimate, rather too high: what several
          layers share counts for each of them.
        """
        found = [np.zeros(len(choices)) for choices in offered]
        for number, edge in enumerate(self._moved):
            there = sum(copy.begin <= copy.end and copy.begin <= moment <= max(copy.end, until)
                        for copy, until in zip(edge.held, self._until[number], strict=True))
            if there:
                source = configurations[edge.source]
                begun = sum(copy.begin == moment <= copy.end for copy in edge.held)
                taken = (self._moved_by(number, source, target) for target in offered[edge.target])
                found[edge.target] += [there * one.nbytes + begun * one.meanwhile for one in taken]
        return found

    def _settled(self, moment: int) -> int:
        """The moment after that in which all gradients that waited have been used."""
        return next((settled for settled in self._settling if settled >= moment), moment)

    def _moved_by(self, number: int, source: Configuration, target: Configuration) -> Moved:
        """What moving over an edge takes of a device of the target."""
        key = number, source, target
        if key not in self._known:
            self._known[key] = moved(self._moved[number], source, target, self._shared, number in self._as_made)
        return self._known[key]


def strategy_memory(graph: ComputationGraph, configurations: Sequence[Configuration], shared: bool = False,
                    unfolding_threads: int = 0) -> dict[str, float]:
    """Bytes on the fullest device under a strategy, at the moment at which it holds most.

    Args:
      graph: of the model.
      configurations: one per layer.
      shared, unfolding_threads: of `MemoryModel`.

    Returns:
      Part -> bytes, for all `MEMORY_PARTS`.
    """
    return MemoryModel(graph, shared, unfolding_threads).peak(configurations)[0]
