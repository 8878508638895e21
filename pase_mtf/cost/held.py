"""What a layer holds of a device's memory: its tensors, from when until when each is there, and what share of it a
device has under a configuration.

`cost.memory` puts layers together, and adds what depends on two of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.graph.partition import ALIGNED

__all__ = ["ACTIVATIONS", "BUFFERS", "MEMORY_PARTS", "AllItems", "LayerItems", "Shares", "or_rows"]

MEMORY_PARTS = ("weights", "optimizer slots", "gradients", "activations", "communication buffers")
"""What the bytes are for. Gradients: of weights, and what updates make of them. Activations: all else that layers make,
and what is unfolded of it. Communication buffers: copies of tensors that are moved, and what arrives for sums."""
_WEIGHTS, _SLOTS, _GRADIENTS, ACTIVATIONS, BUFFERS = range(len(MEMORY_PARTS))  # by number


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
      rows: unsplit bytes, where devices may give each other rows of a table instead.
      of_row: the number, in the layer, of the dims of a row.
      narrow: whether such rows are added up in a type of twice as many bytes.
      itemsize: bytes per element of what arrives for a sum.
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
    rows: float = 0.0
    of_row: int = 0
    narrow: bool = False
    itemsize: int = 4


class _Pattern(NamedTuple):
    """How configurations divide something.

    Attributes:
      columns: of its dims.
      row: not 0: it is divided only where that leaves a row of so many bytes that is not aligned.
    """

    columns: tuple[int, ...]
    row: float = 0.0


class Shares:
    """What devices hold of tensors with dims at these columns: layers that name and split dims alike have it in common.

    Attributes:
      columns: int64 [patterns, T], the columns of the dims of each in a `ConfigurationTable`, -1 where there are none.
    """

    def __init__(self, position: dict[str, int], width: int, patterns: Sequence[_Pattern]) -> None:
        self._position, self._width = position, width
        longest = max(len(pattern.columns) for pattern in patterns)
        self.columns = np.array([(*pattern.columns, *[-1] * (longest - len(pattern.columns)))
                                 for pattern in patterns], np.int64)
        self._row = np.array([pattern.row for pattern in patterns], np.float64)[:, None]
        self._of: dict[Configuration, np.ndarray] = {}
        self._last: tuple[tuple[Configuration, ...], ConfigurationTable, np.ndarray] | None = None

    def _look(self, configurations: Sequence[Configuration]) -> tuple[ConfigurationTable, np.ndarray]:
        """What was asked last is asked again, by the next layer."""
        asked = tuple(configurations)
        if self._last is None or self._last[0] != asked:
            table = ConfigurationTable.build(asked, self._position, self._width)
            shares = 1.0 / table.shards[:, self.columns].prod(axis=-1).T
            is_shown = (self._row > 0.0) & (self._row * shares % ALIGNED == 0.0)
            self._last = asked, table, np.where(is_shown, 1.0, shares)
        return self._last[1:]

    def table(self, configurations: Sequence[Configuration]) -> ConfigurationTable:
        """The configurations in arrays."""
        return self._look(configurations)[0]

    def under(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Of something of every pattern, under each configuration: float64 [patterns, K]."""
        return self._look(configurations)[1]

    def of(self, configuration: Configuration) -> np.ndarray:
        """Of something of every pattern: float64 [patterns]."""
        if configuration not in self._of:
            self._of[configuration] = self.under((configuration,))[:, 0]
        return self._of[configuration]


class LayerItems:
    """What a layer holds, as arrays; its dims are those at the columns of its `ConfigurationTable`.

    Attributes:
      position: column of every dim name of the layer there.
    """

    def __init__(self, layer: Layer, last: int, shared: bool, known: dict[Hashable, Shares]) -> None:
        """Reads a layer.

        Args:
          layer: of a graph.
          last: the last moment of a step.
          shared: of `MemoryModel`.
          known: shares that layers have in common; it is added to.
        """
        self._shared = shared
        self.position, width = dim_positions(layer), len(layer.dims)
        self._patterns = {_Pattern(()): 0}
        self._known: dict[tuple[tuple[str, ...], float], int] = {}  # dims, bytes of a row -> the pattern
        columns = dict(zip(_Item._fields, zip(*self._items(layer, last), strict=True), strict=False))
        self.part, self.pattern, self.begin, self.end, self.parts_of, self.waits_until, self.own_until = (
            np.array(columns.get(name, ()), np.int64)
            for name in ("part", "pattern", "begin", "end", "parts_of", "waits_until", "own_until"))
        self.arrives, self.of_sum, self.narrow = (
            np.array(columns.get(name, ()), bool) for name in ("arrives", "of_sum", "narrow"))
        self.nbytes, self.rows = (np.array(columns.get(name, ()), np.float64) for name in ("nbytes", "rows"))
        self.of_row, self.itemsize = (np.array(columns.get(name, ()), np.int64) for name in ("of_row", "itemsize"))
        self._is_update = layer.kind == "update"
        key = tuple(self.position.items()), width, tuple(self._patterns)
        if key not in known:
            known[key] = Shares(self.position, width, tuple(self._patterns))
        self.shares = known[key]

    def _columns(self, dims: Sequence[str]) -> tuple[int, ...]:
        return tuple(sorted({column for column in positions_of(dims, self.position) if column >= 0}))

    def _pattern(self, dims: tuple[str, ...], row: float = 0.0) -> int:
        pattern = self._known.get((dims, row))
        if pattern is None:
            pattern = self._known[dims, row] = self._patterns.setdefault(
                _Pattern(self._columns(dims), row), len(self._patterns))
        return pattern

    def _items(self, layer: Layer, last: int) -> Iterator[_Item]:
        def size(operand: Operand) -> float:
            return float(math.prod(operand.shape)) * operand.itemsize

        for variable in layer.variables:
            yield _Item(_WEIGHTS if variable.trainable else _SLOTS, size(variable.operand),
                        self._pattern(variable.operand.dims), 0, last)
        for operation in layer.operations:
            if operation.role == "rename":
                yield from self._renamed(operation)
                continue
            if operation.kind == "gather" and not operation.traffic:
                yield from self._cut(operation)
                continue
            partial = _partial_sums(operation)
            for held in operation.held:
                operand = operation.inputs[-1 - held.output] if held.output < 0 else operation.outputs[held.output]
                dims, summed = partial.get(held.output, (None, operand))
                parts_of = -1 if dims is None else self._pattern(dims)
                part = _GRADIENTS if held.waits_until >= 0 or operation.phase == "update" else ACTIVATIONS
                of_sum = operation.phase == "update" and held.waits_until >= 0
                yield _Item(part, held.times * size(operand), self._pattern(operand.dims), held.begin, held.end,
                            parts_of, max(held.waits_until, held.end), of_sum=of_sum, own_until=held.own_until)
                if parts_of >= 0:
                    arrives = held.waits_until >= 0 and not of_sum
                    # One device adds up in the place of what it, or another, has: that takes more where it is read by
                    # several, the last of which writes over it. A reduction may be to the largest, of all together.
                    in_place = self._shared and operation.kind != "reduction"
                    begin = max(held.begin, held.shared_from) if in_place else held.begin
                    until = max(-1 if in_place else begin, held.shared_until if self._shared else -1)
                    nbytes = 0.0 if arrives and in_place and held.shared_until < 0 else size(summed)
                    rows, of_row = 0.0, 0
                    if arrives and not self._shared and operation.looked_up:
                        dim = operation.looked_up.dim
                        rows = _rows_bytes(operation.looked_up, summed)
                        of_row = self._pattern((*summed.dims[:dim], *summed.dims[dim + 1:]))
                    yield _Item(BUFFERS, nbytes, self._pattern(summed.dims), begin, begin - 1,
                                parts_of, held.waits_until if arrives else until, arrives, rows=rows, of_row=of_row,
                                narrow=rows > 0.0 and summed.itemsize == 2, itemsize=summed.itemsize)

    def _renamed(self, operation: LayerOperation) -> Iterator[_Item]:
        """What a rename makes: it shows what it reads, but where a dim that it renames, or makes, is split: then every
        device is given a block of its own (`cost.moves`)."""
        (x,), (y,) = operation.inputs, operation.outputs
        changed = {name for pair in zip(x.dims, y.dims, strict=False) if pair[0] != pair[1] for name in pair} - {""}
        for held in operation.held if x.shape == y.shape and changed else ():
            yield _Item(BUFFERS, float(math.prod(y.shape)) * y.itemsize, self._pattern(y.dims), held.begin,
                        held.begin - 1, self._pattern(tuple(sorted(changed))), held.end)

    def _cut(self, operation: LayerOperation) -> Iterator[_Item]:
        """What rows take that are cut out in place: nothing, but where those of a device are no longer aligned."""
        x = operation.inputs[0]
        row = float(math.prod(x.shape[1:])) * x.itemsize
        for held in operation.held if len(x.shape) > 1 else ():
            y = operation.outputs[held.output]
            yield _Item(ACTIVATIONS, float(math.prod(y.shape)) * y.itemsize, self._pattern(y.dims), held.begin,
                        held.begin - 1, self._pattern(x.dims[1:], row), held.end)

    def shares_of(self, dims: Sequence[str], configurations: Sequence[Configuration]) -> np.ndarray:
        """What fraction of a tensor of these dims a device holds, under each configuration: float64 [K]."""
        return self.shares.table(configurations).share(self._columns(dims))

    def at(self, moment: int, configurations: Sequence[Configuration]) -> np.ndarray:
        """Bytes at a moment under each configuration, float64 [K]: those that are there whatever other layers do."""
        shares, shown = self.shares.under(configurations), self.own_until >= 0
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
        mine = self.arrives & (self.waits_until == moment)
        return float(or_rows(self.nbytes[mine], self.rows[mine], self.narrow[mine]).max(initial=0.0))

    def arriving_at(self, moment: int, configurations: Sequence[Configuration]) -> np.ndarray:
        """What arrives at a moment for the largest sum of a gradient, and what the layer's update makes of it
        meanwhile, under each configuration: float64 [K]."""
        shares, mine = self.shares.under(configurations), self.arrives & (self.waits_until == moment)
        waits = shares[self.parts_of[mine]] < 1.0
        held = or_rows(self.nbytes[mine, None] * shares[self.pattern[mine]],
                       self.rows[mine, None] * shares[self.of_row[mine]], self.narrow[mine, None])
        arrives = np.where(waits, held, 0.0).max(axis=0, initial=0.0)
        made = self.nbytes[self.of_sum] @ shares[self.pattern[self.of_sum]]
        made /= max(len(np.unique(self.waits_until[self.of_sum])), 1)
        total: np.ndarray = arrives + np.where(waits.any(axis=0), made, 0.0)
        return total


def or_rows(block: np.ndarray, rows: np.ndarray, narrow: np.ndarray) -> np.ndarray:
    """Bytes of a device's block of a sum, or of all rows where these travel instead: they are in no part of the words.

    Rows arrive and are put together, so that there are two of each; they travel where one is less than two blocks.
    """
    # Those of two bytes an element are added up in four: the sum in both types, or rows and the sum in the wider one.
    there = np.maximum(block, rows) + np.where(narrow, block, 0.0)
    found: np.ndarray = np.where(rows < 4.0 * block, there, block)
    return found


def _rows_bytes(found: LookedUp, table: Operand) -> float:
    """Bytes of all rows of a table's gradient, as they arrive and as they are put together, where devices give each
    other rows (`graph.looked_up`; told of the whole table); 0 where they do not."""
    elements = math.prod(table.shape)
    row = elements // table.shape[found.dim]
    return 2.0 * found.indices * row * table.itemsize if found.indices * (row + 1) < 2 * elements else 0.0


def _partial_sums(operation: LayerOperation) -> dict[int, tuple[tuple[str, ...], Operand]]:
    """Output -> the dims whose split leaves partial sums to be added up for it, and the tensor that these are of."""
    sums = operation.partial_sums or (operation.reduced,) * len(operation.outputs)
    return {number: (dims, tensor)
            for number, (dims, tensor) in enumerate(zip(sums, operation.summed, strict=False)) if dims}


class AllItems(NamedTuple):
    """What all layers hold, one after another: as in `_Item`, patterns numbered through; and `layer`, whose it is."""

    layer: np.ndarray
    part: np.ndarray
    nbytes: np.ndarray
    pattern: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    parts_of: np.ndarray
    waits_until: np.ndarray
    arrives: np.ndarray
    of_sum: np.ndarray
    own_until: np.ndarray
    rows: np.ndarray
    of_row: np.ndarray
    narrow: np.ndarray
    itemsize: np.ndarray

    @classmethod
    def of(cls, layers: Sequence[LayerItems]) -> AllItems:
        """Puts the layers together."""
        count = np.array([len(each.nbytes) for each in layers], np.int64)
        patterns = np.array([len(each.shares.columns) for each in layers], np.int64)
        first = np.repeat(np.cumsum(patterns) - patterns, count)
        columns = {name: np.concatenate([np.zeros(0, np.int64), *(getattr(each, name) for each in layers)])
                   for name in cls._fields if name != "layer"}
        columns |= {name: columns[name].astype(bool) for name in ("arrives", "of_sum", "narrow")}
        columns["parts_of"] = np.where(columns["parts_of"] >= 0, columns["parts_of"] + first, -1)
        columns["pattern"] += first
        columns["of_row"] += first
        return cls(np.repeat(np.arange(len(layers)), count), **columns)
