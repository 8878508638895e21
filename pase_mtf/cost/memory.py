"""Bytes a device holds under a strategy, by what they are for.

Every layer runs on devices 0, 1, ..., all of which hold equal shares: device 0 is always among the fullest. Weights and
slots of the optimizer are there all the time, all else from one moment of the step to another (`export.lifetimes` tells
which, and what order of the operations that assumes): a device holds most at one moment, and which that is depends on
the strategy.

- A tensor that a layer makes: the share that the layer's configuration leaves to a device.
- A copy of it, where another layer reads other parts: while that layer reads it.
- A gradient that devices have to sum: until the backward pass is over, for one device may be ahead of the others.
- What arrives for a sum, or the sum itself, as large as what is summed, while that is made. Where devices share their
  memory TensorFlow mostly sums in place, but not always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration

__all__ = ["MEMORY_PARTS", "MemoryModel", "layer_memory", "strategy_memory"]

MEMORY_PARTS = ("weights", "optimizer slots", "gradients", "activations", "communication buffers")
"""What the bytes are for. Gradients: of weights, and what updates make of them. Activations: all else that layers make.
Communication buffers: copies of tensors that are moved, and what arrives for sums."""
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
    """

    part: int
    nbytes: float
    pattern: int
    begin: int
    end: int
    parts_of: int = -1
    waits_until: int = -1


class _LayerItems:
    """What a layer holds, as arrays; its dims are those at the columns of its `ConfigurationTable`."""

    def __init__(self, layer: Layer, last: int) -> None:
        self._position, self._width = dim_positions(layer), len(layer.dims)
        self._patterns: dict[tuple[int, ...], int] = {(): 0}
        items = list(self._items(layer, last))
        self.part, self.pattern, self.begin, self.end, self.parts_of, self.waits_until = (
            np.array([getattr(item, name) for item in items], np.int64)
            for name in ("part", "pattern", "begin", "end", "parts_of", "waits_until"))
        self.nbytes = np.array([item.nbytes for item in items], np.float64)
        self._held: dict[Configuration, tuple[np.ndarray, np.ndarray]] = {}

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
                operand, dims = operation.outputs[held.output], partial.get(held.output)
                parts_of = -1 if dims is None else self._pattern(dims)
                part = _GRADIENTS if held.waits_until >= 0 or operation.phase == "update" else _ACTIVATIONS
                yield _Item(part, held.times * size(operand), self._pattern(operand.dims), held.begin, held.end,
                            parts_of, max(held.waits_until, held.end))
                if parts_of >= 0:
                    yield _Item(_BUFFERS, size(operand), self._pattern(operand.dims), held.begin, held.begin - 1,
                                parts_of, held.begin)

    def shares(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """What a device holds of something of every pattern, under each configuration: float64 [patterns, K]."""
        table = ConfigurationTable.build(configurations, self._position, self._width)
        return np.stack([table.share(columns) for columns in self._patterns])

    def held(self, configuration: Configuration) -> tuple[np.ndarray, np.ndarray]:
        """Of every item, what a device holds of it, and the moment until which."""
        if configuration not in self._held:
            shares = self.shares([configuration])[:, 0]
            waits = (self.parts_of >= 0) & (shares[self.parts_of] < 1.0)
            self._held[configuration] = (self.nbytes * shares[self.pattern],
                                         np.where(waits, self.waits_until, self.end))
        return self._held[configuration]

    def at(self, moment: int, configurations: Sequence[Configuration]) -> np.ndarray:
        """Bytes at a moment under each configuration, float64 [K]."""
        shares = self.shares(configurations)
        there = (self.begin <= moment) & (moment <= self.end)
        total: np.ndarray = np.bincount(self.pattern[there], self.nbytes[there], len(shares)) @ shares
        for item in np.flatnonzero((self.end < moment) & (self.begin <= moment) & (moment <= self.waits_until)
                                   & (self.parts_of >= 0)):
            waits = shares[self.parts_of[item]] < 1.0
            total = total + np.where(waits, self.nbytes[item] * shares[self.pattern[item]], 0.0)
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

    def __init__(self, graph: ComputationGraph) -> None:
        """Looks at the graph.

        Args:
          graph: of the model.
        """
        held = [held for layer in graph.layers for operation in layer.operations for held in operation.held]
        ends = [end for edge in graph.edges for _, end in edge.held]
        self._last = max([0, *ends, *(max(entry.begin, entry.end, entry.waits_until) for entry in held)])
        self.moments = self._last + 1
        self._layers = [_LayerItems(layer, self._last) for layer in graph.layers]
        self._moved = [edge for edge in graph.edges if edge.held]
        self._copied: dict[tuple[int, Configuration, Configuration], tuple[float, object]] = {}
        self._fullest: int | None = None

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
          float64 [K]. The layers add up; copies of what is moved between them come on top.
        """
        return self._layers[number].at(moment, configurations)

    def peak(self, configurations: Sequence[Configuration]) -> tuple[dict[str, float], int]:
        """The most that a device holds at one moment under a strategy.

        Args:
          configurations: one per layer.

        Returns:
          Part -> bytes, for all `MEMORY_PARTS`; and the moment.
        """
        nbytes, until = zip(*(items.held(configuration) for items, configuration in zip(
            self._layers, configurations, strict=True)), strict=True) if self._layers else ((), ())
        copies = self._copies(configurations)
        sizes = np.concatenate([*nbytes, [copy.nbytes for copy in copies]])
        begin = np.concatenate([*(items.begin for items in self._layers), [copy.begin for copy in copies]])
        end = np.concatenate([*until, [copy.end for copy in copies]]).astype(np.int64)
        part = np.concatenate([*(items.part for items in self._layers), [_BUFFERS] * len(copies)]).astype(np.int64)
        begin = begin.astype(np.int64)
        there = begin <= end
        change = (np.bincount(begin[there], sizes[there], self.moments + 1)
                  - np.bincount(end[there] + 1, sizes[there], self.moments + 1))
        moment = int(np.cumsum(change)[:self.moments].argmax())
        counted = (begin <= moment) & (moment <= end)
        total = np.bincount(part[counted], sizes[counted], len(MEMORY_PARTS))
        return dict(zip(MEMORY_PARTS, map(float, total), strict=True)), moment

    def _copies(self, configurations: Sequence[Configuration]) -> Sequence[_Copy]:
        """What a device holds of tensors that it needs otherwise than they lie: one copy for all layers that need the
        same block."""
        found: dict[tuple[object, ...], _Copy] = {}
        for number, edge in enumerate(self._moved):
            nbytes, shards = self._copied_of(number, configurations[edge.source], configurations[edge.target])
            for order, (begin, end) in enumerate(edge.held if nbytes else ()):
                key = edge.source, edge.tensor, edge.shape, shards, order
                other = found.get(key, _Copy(nbytes, begin, end))
                found[key] = _Copy(nbytes, min(begin, other.begin), max(end, other.end))
        return list(found.values())

    def _copied_of(self, number: int, source: Configuration, target: Configuration) -> tuple[float, object]:
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


def strategy_memory(graph: ComputationGraph, configurations: Sequence[Configuration]) -> dict[str, float]:
    """Bytes on the fullest device under a strategy, at the moment at which it holds most.

    Args:
      graph: of the model.
      configurations: one per layer.

    Returns:
      Part -> bytes, for all `MEMORY_PARTS`.
    """
    return MemoryModel(graph).peak(configurations)[0]
