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
- What arrives for a sum, or the sum itself, as large as what is summed, while that is made: of gradients that waited
  for each other, of one at a time, and with what the update makes of the sum while that is still there.
- Where devices share a host, one makes sums and copies for several; the last of these writes what it makes of it in its
  place. What that is lasts, on the device that made the sum or the copy, beside what this device makes of it itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration

__all__ = ["MEMORY_PARTS", "MemoryModel", "layer_memory", "strategy_memory"]

MEMORY_PARTS = ("weights", "optimizer slots", "gradients", "activations", "communication buffers")
"""What the bytes are for. Gradients: of weights, and what updates make of them. Activations: all else that layers make.
Communication buffers: copies of tensors that are moved, and what arrives for sums."""
_Shards: TypeAlias = "tuple[tuple[int, int], ...]"
_WEIGHTS, _SLOTS, _GRADIENTS, _ACTIVATIONS, _BUFFERS = range(len(MEMORY_PARTS))


class _Item(NamedTuple):
    """Something that a layer holds.

    Attributes:
      part: of `MEMORY_PARTS`, by number.
      nbytes: unsplit.
      pattern: the number, in the layer, of the dims whose split divides it.
      begin, end: the moments from which and until which it is there, both included.
      parts_of: the number, in the layer, of the dims whose split makes it a partial sum; -1: there are none.
      waits_until: the moment until which it is there where it is one.
      arrives: whether it is what arrives for the sum of a gradient, which is there of one layer at a time.
      of_sum: whether an update makes it of a gradient: where devices have to sum that it is there at `waits_until`.
      own_until: the moment until which its own layer needs it; -1: until `end`.
    """

    part: int
    nbytes: float
    pattern: int
    begin: int
    end: int
    parts_of: int = -1
    waits_until: int = -1
    arrives: bool = False
    of_sum: bool = False
    own_until: int = -1


class _Held(NamedTuple):
    """What a device holds of a layer.

    Attributes:
      nbytes, begin, end: of every item, its share, and the moments from which and until which it is there.
      arriving: (moment, bytes) of what arrives for the largest sum of a gradient.
      made: bytes of what the update makes of gradients that devices have to sum.
    """

    nbytes: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    arriving: Sequence[tuple[int, float]]
    made: float


class _LayerItems:
    """What a layer holds, as arrays; its dims are those at the columns of its `ConfigurationTable`."""

    def __init__(self, layer: Layer, last: int, shared: bool = False) -> None:
        self._shared = shared
        self._position, self._width = dim_positions(layer), len(layer.dims)
        self._patterns: dict[tuple[int, ...], int] = {(): 0}
        items = list(self._items(layer, last))
        self.part, self.pattern, self.begin, self.end, self.parts_of, self.waits_until, self.own_until = (
            np.array([getattr(item, name) for item in items], np.int64)
            for name in ("part", "pattern", "begin", "end", "parts_of", "waits_until", "own_until"))
        self.arrives, self.of_sum = (np.array([getattr(item, name) for item in items], bool)
                                     for name in ("arrives", "of_sum"))
        self._is_update = layer.kind == "update"
        self.nbytes = np.array([item.nbytes for item in items], np.float64)
        self._held: dict[tuple[Configuration, bool], _Held] = {}

    def _pattern(self, dims: Sequence[str]) -> int:
        columns = tuple(sorted({column for column in positions_of(dims, self._position) if column >= 0}))
        return self._patterns.setdefault(columns, len(self._patterns))

    def _items(self, layer: Layer, last: int) -> Iterator[_Item]:
        def size(operand: Operand) -> float:
            return float(math.prod(operand.shape)) * operand.itemsize

        for variable in layer.variables:
            yield _Item(_WEIGHTS if variable.trainable else _SLOTS, size(variable.operand),
                        self._pattern(variable.operand.dims), 0, last)
        for operation in layer.operations:
            partial = _partial_sums(operation)
            for held in operation.held:
                operand = operation.inputs[-1 - held.output] if held.output < 0 else operation.outputs[held.output]
                dims = partial.get(held.output)
                parts_of = -1 if dims is None else self._pattern(dims)
                part = _GRADIENTS if held.waits_until >= 0 or operation.phase == "update" else _ACTIVATIONS
                of_sum = operation.phase == "update" and held.waits_until >= 0
                yield _Item(part, held.times * size(operand), self._pattern(operand.dims), held.begin, held.end,
                            parts_of, max(held.waits_until, held.end), of_sum=of_sum, own_until=held.own_until)
                if parts_of >= 0:
                    arrives = held.waits_until >= 0 and not of_sum
                    until = max(held.begin, held.shared_until if self._shared else -1)
                    yield _Item(_BUFFERS, size(operand), self._pattern(operand.dims), held.begin, held.begin - 1,
                                parts_of, held.waits_until if arrives else until, arrives)

    def shares_of(self, dims: Sequence[str], configurations: Sequence[Configuration]) -> np.ndarray:
        """What fraction of a tensor of these dims a device holds, under each configuration: float64 [K]."""
        table = ConfigurationTable.build(configurations, self._position, self._width)
        columns = tuple(sorted({column for column in positions_of(dims, self._position) if column >= 0}))
        held: np.ndarray = table.share(columns)
        return held

    def shares(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """What a device holds of something of every pattern, under each configuration: float64 [patterns, K]."""
        table = ConfigurationTable.build(configurations, self._position, self._width)
        return np.stack([table.share(columns) for columns in self._patterns])

    def sums_gradients(self, configuration: Configuration) -> bool:
        """Whether devices have to sum a gradient that the layer makes, before it is used."""
        return self._awaits_own(self.shares([configuration])[:, 0])

    def _awaits_own(self, shares: np.ndarray) -> bool:
        return bool((self.arrives & (shares[self.parts_of] < 1.0)).any())

    def held(self, configuration: Configuration, awaits: bool = False) -> _Held:
        """What a device holds.

        Args:
          configuration: of the layer.
          awaits: whether the layer updates by a gradient of another layer that devices have to sum.
        """
        key = configuration, awaits
        if key not in self._held:
            shares = self.shares([configuration])[:, 0]
            waits = (self.parts_of >= 0) & (shares[self.parts_of] < 1.0) & ~self.of_sum
            after = self.of_sum & (awaits or self._awaits_own(shares))
            nbytes = self.nbytes * shares[self.pattern]
            arriving = [(int(moment), float(nbytes[waits & self.arrives & (self.waits_until == moment)].max()))
                        for moment in np.unique(self.waits_until[waits & self.arrives])]
            made = float(nbytes[after].sum()) / max(len(np.unique(self.waits_until[after])), 1)
            begin = np.where(after, self.waits_until, self.begin)
            end = np.where(after | (waits & ~self.arrives), self.waits_until, self.end)
            self._held[key] = _Held(nbytes, begin, end, arriving, made)
        return self._held[key]

    def at(self, moment: int, configurations: Sequence[Configuration]) -> np.ndarray:
        """Bytes at a moment under each configuration, float64 [K]: those that are there whatever other layers do."""
        shares, shown = self.shares(configurations), self.own_until >= 0
        until = np.where(shown, self.own_until, self.end)
        there = (self.begin <= moment) & (moment <= until) & ~(self.of_sum & self._is_update)
        total: np.ndarray = np.bincount(self.pattern[there], self.nbytes[there], len(shares)) @ shares
        for item in np.flatnonzero((self.end < moment) & (self.begin <= moment) & (moment <= self.waits_until)
                                   & (self.parts_of >= 0) & ~self.arrives & ~self.of_sum & ~shown):
            waits = shares[self.parts_of[item]] < 1.0
            total = total + np.where(waits, self.nbytes[item] * shares[self.pattern[item]], 0.0)
        for item in np.flatnonzero(there & self.of_sum):  # where its gradient waits it comes later
            waits = (self.arrives[:, None] & (shares[self.parts_of] < 1.0)).any(axis=0)
            total = total - np.where(waits, self.nbytes[item] * shares[self.pattern[item]], 0.0)
        return total

    def arriving(self, moment: int) -> float:
        """Unsplit bytes of the largest gradient whose sum may be made at a moment."""
        return float(self.nbytes[self.arrives & (self.waits_until == moment)].max(initial=0.0))

    def arriving_at(self, moment: int, configurations: Sequence[Configuration]) -> np.ndarray:
        """What arrives at a moment for the largest sum of a gradient, and what the layer's update makes of it
        meanwhile, under each configuration: float64 [K]."""
        shares, mine = self.shares(configurations), self.arrives & (self.waits_until == moment)
        waits = shares[self.parts_of[mine]] < 1.0
        arrives = np.where(waits, self.nbytes[mine, None] * shares[self.pattern[mine]], 0.0).max(axis=0, initial=0.0)
        made = self.nbytes[self.of_sum] @ shares[self.pattern[self.of_sum]]
        made /= max(len(np.unique(self.waits_until[self.of_sum])), 1)
        total: np.ndarray = arrives + np.where(waits.any(axis=0), made, 0.0)
        return total

    def most(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """The most bytes of every part at any moment, under each configuration: float64 [len(MEMORY_PARTS), K]."""
        shares = self.shares(configurations)
        sizes = self.nbytes[:, None] * shares[self.pattern]
        waits = (self.parts_of >= 0)[:, None] & (shares[self.parts_of] < 1.0)
        until = np.where(waits, self.waits_until[:, None], self.end[:, None])
        found = np.zeros((len(MEMORY_PARTS), len(configurations)))
        for part in np.unique(self.part):
            mine = self.part == part
            begin, end, held = self.begin[mine], until[mine], sizes[mine]
            for moment in np.unique(begin):
                there = (begin <= moment)[:, None] & (moment <= end)
                found[part] = np.maximum(found[part], np.where(there, held, 0.0).sum(axis=0))
        return found


def _partial_sums(operation: LayerOperation) -> dict[int, tuple[str, ...]]:
    """Output -> the dims whose split makes it a partial sum."""
    if operation.partial_sums:
        return {number: dims for number, dims in enumerate(operation.partial_sums) if dims}
    return dict.fromkeys(range(len(operation.outputs)), operation.reduced) if operation.reduced else {}


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

    def __init__(self, graph: ComputationGraph, shared: bool = False) -> None:
        """Looks at the graph.

        Args:
          graph: of the model.
          shared: whether the devices are processors of one host: then one of them makes a sum or a copy for all.
        """
        held = [held for layer in graph.layers for operation in layer.operations for held in operation.held]
        self._shared = shared
        ends = [max(copy[1:3]) for edge in graph.edges for copy in edge.held]
        self._last = max([0, *ends, *(max(entry.begin, entry.end, entry.waits_until, entry.shared_until)
                                      for entry in held)])
        self.moments = self._last + 1
        self._layers = [_LayerItems(layer, self._last, shared) for layer in graph.layers]
        self._moved = [edge for edge in graph.edges if edge.held]
        self._graph = graph
        self._settling = sorted({held.waits_until for layer in graph.layers for operation in layer.operations
                                 if operation.phase == "update" for held in operation.held if held.waits_until >= 0})
        self._copied: dict[tuple[int, Configuration, Configuration], tuple[float, _Shards]] = {}
        self._read: dict[int, tuple[dict[int, list[Edge]], int]] = {}
        self._fullest: int | None = None
        self._own_until = np.concatenate([np.zeros(0, np.int64), *(items.own_until for items in self._layers)])
        self._shown = np.flatnonzero(self._own_until >= 0)
        number, self._made = 0, dict[tuple[int, int, float], list[int]]()
        for layer, items in enumerate(self._layers):
            for position in np.flatnonzero(items.own_until >= 0):
                self._made.setdefault((layer, int(items.begin[position]), float(items.nbytes[position])),
                                      []).append(number + int(position))
            number += len(items.own_until)

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
        for edge in reads.get(number, ()):
            needed = items.shares_of(edge.target_dims, configurations)
            total = total + float(math.prod(edge.shape)) * edge.itemsize * needed
        return total

    def _read_at(self, moment: int) -> tuple[dict[int, list[Edge]], int]:
        """What layers are counted with at a moment besides what they make: layer -> the edges over which it reads what
        would not be there otherwise, each tensor of one reader; and the layer with the largest gradient to sum."""
        if moment not in self._read:
            found: dict[int, list[Edge]] = {}
            taken: set[tuple[object, ...]] = set()
            for edge in self._moved:
                if "update" in (self._graph.layers[edge.source].kind, self._graph.layers[edge.target].kind):
                    continue  # when that is there depends on whether a gradient waits
                nbytes = float(math.prod(edge.shape)) * edge.itemsize
                for order, copy in enumerate(edge.held):
                    made = self._made.get((edge.source, copy.made, nbytes), ())
                    keys = {(edge.source, copy.made, nbytes), (edge.source, edge.tensor, edge.shape, order)}
                    gone = made and all(self._own_until[position] < moment for position in made)
                    if gone and max(copy.begin, copy.made) <= moment <= copy.end and not keys & taken:
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
        awaiting = self._awaiting(configurations)
        held = [items.held(configuration, number in awaiting) for number, (items, configuration) in enumerate(zip(
            self._layers, configurations, strict=True))]
        copies = [*self._copies(configurations, awaiting), *self._arriving(held, awaiting)]
        sizes = np.concatenate([*(each.nbytes for each in held), [copy.nbytes for copy in copies]])
        begin = np.concatenate([*(each.begin for each in held), [copy.begin for copy in copies]])
        end = np.concatenate([*(each.end for each in held), [copy.end for copy in copies]]).astype(np.int64)
        self._needed_until(configurations, end)
        part = np.concatenate([*(items.part for items in self._layers), [_BUFFERS] * len(copies)]).astype(np.int64)
        begin = begin.astype(np.int64)
        there = begin <= end
        change = (np.bincount(begin[there], sizes[there], self.moments + 1)
                  - np.bincount(end[there] + 1, sizes[there], self.moments + 1))
        moment = int(np.cumsum(change)[:self.moments].argmax())
        counted = (begin <= moment) & (moment <= end)
        total = np.bincount(part[counted], sizes[counted], len(MEMORY_PARTS))
        return dict(zip(MEMORY_PARTS, map(float, total), strict=True)), moment

    def _needed_until(self, configurations: Sequence[Configuration], end: np.ndarray) -> None:
        """Sets until when tensors are there: until their own layer, or one that reads them as they lie, has done so."""
        end[self._shown] = self._own_until[self._shown]
        for number, edge in enumerate(self._moved):
            if not self._copied_of(number, configurations[edge.source], configurations[edge.target])[0]:
                nbytes = float(math.prod(edge.shape)) * edge.itemsize
                for copy in edge.held:
                    for position in self._made.get((edge.source, copy.made, nbytes), ()):
                        end[position] = max(end[position], copy.end)

    def _awaiting(self, configurations: Sequence[Configuration]) -> dict[int, int]:
        """Layer -> the layer whose gradient it updates by, which devices have to sum."""
        return {edge.target: edge.source for edge in self._graph.edges
                if edge.pending and self._graph.layers[edge.target].kind == "update"
                and self._layers[edge.source].sums_gradients(configurations[edge.source])}

    def _arriving(self, held: Sequence[_Held], awaiting: Mapping[int, int]) -> Iterator[_Copy]:
        """What arrives for the sum of a gradient, and what the update makes of the sum while it is there: at the end of
        the backward pass, of the layer of which that is most."""
        made: dict[int, float] = {}
        for target, source in awaiting.items():
            made[source] = max(made.get(source, 0.0), held[target].made)
        most: dict[int, float] = {}
        for number, each in enumerate(held):
            for moment, nbytes in each.arriving:
                # Another layer takes its part of a sum when all has arrived.
                most[moment] = max(most.get(moment, 0.0), nbytes + each.made, made.get(number, 0.0))
        return (_Copy(nbytes, moment, moment) for moment, nbytes in most.items())

    def _copies(self, configurations: Sequence[Configuration], awaiting: Collection[int]) -> Sequence[_Copy]:
        """What a device holds of tensors that it needs otherwise than they lie: one copy for all layers that need the
        same block."""
        found: dict[tuple[object, ...], _Copy] = {}
        for number, edge in enumerate(self._moved):
            nbytes, shards = self._copied_of(number, configurations[edge.source], configurations[edge.target])
            shares = self._shared and math.prod(count for count, _ in shards) < configurations[edge.target].devices
            late = edge.source in awaiting or (edge.target in awaiting and edge.pending)
            for order, (begin, end, shared_until, _) in enumerate(edge.held if nbytes else ()):
                if shares:
                    end = max(end, shared_until)
                if late:  # what is made of a gradient that waited
                    begin = end = self._settled(begin)
                key = edge.source, edge.tensor, edge.shape, shards, order
                other = found.get(key, _Copy(nbytes, begin, end))
                found[key] = _Copy(nbytes, min(begin, other.begin), max(end, other.end))
        return list(found.values())

    def _settled(self, moment: int) -> int:
        """The moment after that in which all gradients that waited have been used."""
        return next((settled for settled in self._settling if settled >= moment), moment)

    def _copied_of(self, number: int, source: Configuration, target: Configuration) -> tuple[float, _Shards]:
        """Bytes of the copy on a device of the target, 0 where it holds the same as at the source; and its shards."""
        key = number, source, target
        if key not in self._copied:
            edge = self._moved[number]
            held, needed = source.partition(edge.source_dims)[1], target.partition(edge.target_dims)[1]
            whole = float(math.prod(edge.shape)) * edge.itemsize
            self._copied[key] = 0.0 if held == needed else whole / math.prod(shards for shards, _ in needed), needed
        return self._copied[key]


def layer_memory(layer: Layer, configurations: Sequence[Configuration]) -> np.ndarray:
    """The most that a layer holds on each of its devices, part by part, at any moments.

    Args:
      layer: of a graph.
      configurations: K of its configurations.

    Returns:
      float64 [len(MEMORY_PARTS), K]. Added up over layers, a bound of what a device holds, but for copies of what is
      moved between them.
    """
    last = max((max(held.begin, held.end, held.waits_until) for operation in layer.operations
                for held in operation.held), default=0)
    return _LayerItems(layer, last).most(configurations)


def strategy_memory(graph: ComputationGraph, configurations: Sequence[Configuration], shared: bool = False,
                    ) -> dict[str, float]:
    """Bytes on the fullest device under a strategy, at the moment at which it holds most.

    Args:
      graph: of the model.
      configurations: one per layer.
      shared: of `MemoryModel`.

    Returns:
      Part -> bytes, for all `MEMORY_PARTS`.
    """
    return MemoryModel(graph, shared).peak(configurations)[0]
