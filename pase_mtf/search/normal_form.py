"""Brings the edges of a cost network into the form the searches want; see CostNetwork.normalized."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.network import NetworkEdge

__all__ = ["normalize"]


class _Table(NamedTuple):
    """An edge's matrix and the classes of its two ends. Keyed by identity: tables that share arrays share work.

    Attributes:
      turned: the classes in `rows` are those of the columns of the matrix, and the other way round.
    """

    matrix: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    turned: bool = False

    @property
    def key(self) -> tuple[int, int, int, bool]:
        return id(self.matrix), id(self.rows), id(self.columns), self.turned


@functools.lru_cache(maxsize=64)
def _weights(count: int) -> np.ndarray:
    """Odd numbers."""
    return np.random.default_rng(0).integers(0, 2 ** 63, max(count, 1), np.uint64) | np.uint64(1)


def _distinct(matrix: np.ndarray, classes: np.ndarray, axis: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Which rows (axis 0) or columns of a matrix to keep so that none is unused and none repeats another, and the
    classes then. None: all.

    They are compared by a sum of bits with odd weights, first in a few places; what those do not tell apart is compared
    as a whole, and verified.
    """
    used = np.zeros(matrix.shape[axis], bool)
    used[classes] = True
    kept = None
    if not used.all():
        kept, classes = np.flatnonzero(used), (np.cumsum(used, dtype=np.int32) - np.int32(1))[classes]
    bits, length = matrix.view(np.uint64), matrix.shape[1 - axis]
    places = np.unique(np.linspace(0, length - 1, 24).astype(int))
    some = bits.take(places, 1 - axis).reshape(matrix.shape[0] if axis == 0 else -1, matrix.shape[1] if axis else -1)
    count = matrix.shape[axis]
    weights = _weights(length)
    sums = some @ weights[:len(places)] if axis == 0 else weights[:len(places)] @ some
    if kept is not None:
        sums, count = sums[kept], len(kept)
    _, kind, members = np.unique(sums, return_inverse=True, return_counts=True)
    if len(members) == count:
        return kept, classes
    alike = np.flatnonzero(members[kind] > 1)
    lines = bits.take(alike if kept is None else kept[alike], axis)
    sums[alike] = lines @ weights[:length] if axis == 0 else weights[:length] @ lines
    sums[alike] ^= kind[alike].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    _, keep, kind = np.unique(sums, return_index=True, return_inverse=True)
    same = alike[keep[kind[alike]] != alike]
    for line, other in zip(same.tolist(), keep[kind[same]].tolist(), strict=True):
        one, two = (position if kept is None else int(kept[position]) for position in (line, other))
        if not np.array_equal(bits.take(one, axis), bits.take(two, axis)):
            return kept, classes
    if len(keep) == count:
        return kept, classes
    return keep if kept is None else kept[keep], kind.astype(np.int32)[classes]


@compiled
def _gather(out: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool,
            add: bool) -> None:  # pragma: no cover (compiled)
    """out[r, c] = (or +=) matrix[rows[r], columns[c]], or matrix[columns[c], rows[r]]; in blocks that fit the cache."""
    block = 32
    for top in range(0, len(rows), block):
        for left in range(0, len(columns), block):
            for r in range(top, min(top + block, len(rows))):
                for c in range(left, min(left + block, len(columns))):
                    value = matrix[columns[c], rows[r]] if turned else matrix[rows[r], columns[c]]
                    out[r, c] = out[r, c] + value if add else value


def _put(out: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool, add: bool) -> None:
    """`_gather`, or the quicker copy of everything where that is meant."""
    if not turned and all(len(kept) == size and np.array_equal(kept, np.arange(size))
                          for kept, size in zip((rows, columns), matrix.shape, strict=True)):
        np.add(out, matrix, out=out) if add else np.copyto(out, matrix)
    else:
        _gather(out, matrix, rows, columns, turned, add)


class _Normalizer:
    """Memoises every step by the identity of its arguments; `_alive` keeps those from being collected and reused."""

    def __init__(self, entries: int) -> None:
        self._memo: dict[tuple, object] = {}
        self._alive: list[object] = []
        # New matrices lie one after another in one array, so that the searches can take them as they are (see pack).
        # Memory that is never written to costs nothing.
        self._buffer, self._end = np.empty(entries), 0

    def _room(self, height: int, width: int) -> np.ndarray:
        if self._end + height * width > len(self._buffer):
            return np.empty((height, width))
        self._end += height * width
        return self._buffer[self._end - height * width:self._end].reshape(height, width)

    def _filled(self, matrix: np.ndarray) -> np.ndarray:
        """The first new matrix with this content; the room of the newest one is given back if it is not that."""
        same = self._one(matrix, "new")
        if same is not matrix and matrix.base is self._buffer:
            self._end -= matrix.size
        return same

    def _remember(self, key: tuple, arguments: object, result: object) -> object:
        self._memo[key] = result
        self._alive.append(arguments)
        return result

    def shared(self, matrix: np.ndarray) -> np.ndarray:
        """The first array with this content."""
        key = "shared", id(matrix)
        if key not in self._memo:
            self._remember(key, matrix, self._one(matrix))
        return self._memo[key]

    def tightened(self, table: _Table) -> _Table:
        """The table without unused or equal classes, not turned."""
        key = "tighten", *table.key
        if key in self._memo:
            return self._memo[key]
        columns_axis = 0 if table.turned else 1
        keep_rows, rows = _distinct(table.matrix, table.rows, 1 - columns_axis)
        keep_columns, columns = _distinct(table.matrix, table.columns, columns_axis)
        matrix = table.matrix
        if matrix.base is not self._buffer or keep_rows is not None or keep_columns is not None:
            height, width = matrix.shape[::-1] if table.turned else matrix.shape
            keep_rows = np.arange(height) if keep_rows is None else keep_rows
            keep_columns = np.arange(width) if keep_columns is None else keep_columns
            matrix = self._room(len(keep_rows), len(keep_columns))
            _put(matrix, table.matrix, keep_rows, keep_columns, table.turned, False)
        # Different class arrays may leave the same matrix: one object for all of them.
        return self._remember(key, table, _Table(self._filled(matrix), self._one(rows), self._one(columns)))

    def _one(self, array: np.ndarray, among: str = "given") -> np.ndarray:
        flat = array.reshape(-1)
        sample = flat[::max(1, len(flat) // 256)].tobytes()
        known = self._memo.setdefault((among, array.shape, array.dtype, sample), [])
        for other in known:
            if np.array_equal(other, array):
                return other
        known.append(array)
        return array

    def _joint(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The classes of pairs: (class in first, class in second) per joint class, and the joint class arrays."""
        key = "joint", id(first), id(second)
        if key not in self._memo:
            if first is second:
                used = np.zeros(int(first.max()) + 1, bool)
                used[first] = True
                pairs = np.flatnonzero(used)
                joint = first if used.all() else (np.cumsum(used, dtype=np.int32) - np.int32(1))[first]
                self._remember(key, (first, second), (pairs, pairs, joint))
            else:
                width = int(second.max()) + 1
                pairs, inverse = np.unique(first.astype(np.int64) * width + second, return_inverse=True)
                self._remember(key, (first, second), (pairs // width, pairs % width, inverse.astype(np.int32)))
        return self._memo[key]

    def summed(self, first: _Table, second: _Table) -> _Table | None:
        """One table for both, or None where it would be larger than the two."""
        key = "sum", *first.key, *second.key
        if key in self._memo:
            return self._memo[key]
        rows_first, rows_second, rows = self._joint(first.rows, second.rows)
        columns_first, columns_second, columns = self._joint(first.columns, second.columns)
        result = None
        if len(rows_first) * len(columns_first) <= 2 * (first.matrix.size + second.matrix.size) + 4096:
            matrix = self._room(len(rows_first), len(columns_first))
            _put(matrix, first.matrix, rows_first, columns_first, first.turned, False)
            _put(matrix, second.matrix, rows_second, columns_second, second.turned, True)
            result = _Table(self._filled(matrix), rows, columns)
        return self._remember(key, (first, second), result)


def normalize(vectors: Sequence[np.ndarray], edges: Sequence[NetworkEdge]
              ) -> tuple[list[np.ndarray], list[NetworkEdge]]:
    """Vectors and edges of an equal network: edges ascend, none is a loop, parallel ones are summed where that pays."""
    work = _Normalizer(4 * sum({id(edge.matrix): edge.matrix.size for edge in edges}.values()))
    vectors = list(vectors)
    between: dict[tuple[int, int], list[_Table]] = {}
    for edge in edges:
        if edge.source == edge.target:
            vectors[edge.source] = vectors[edge.source] + edge.matrix[edge.rows, edge.columns]
            continue
        table = _Table(work.shared(edge.matrix), work.shared(edge.rows), work.shared(edge.columns))
        ends = edge.source, edge.target
        if edge.source > edge.target:
            table = _Table(table.matrix, table.columns, table.rows, True)
            ends = edge.target, edge.source
        tables = between.setdefault(ends, [])
        for position, other in enumerate(tables):
            total = work.summed(other, table)
            if total is not None:
                tables[position] = total
                break
        else:
            tables.append(table)
    return vectors, [NetworkEdge(source, target, *work.tightened(table)[:3])
                     for (source, target), tables in sorted(between.items(), key=lambda item: item[0])
                     for table in tables]
