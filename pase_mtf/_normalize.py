"""Brings the edges of a cost network into the form the searches want; see CostNetwork.normalized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.network import NetworkEdge

__all__ = ["normalize"]


class _Table(NamedTuple):
    """An edge's matrix and the classes of its two ends. Keyed by identity: tables that share arrays share work."""

    matrix: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @property
    def key(self) -> tuple[int, int, int]:
        return id(self.matrix), id(self.rows), id(self.columns)


def _tighten(matrix: np.ndarray, classes: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Drops unused classes (rows of the matrix if axis is 0, else columns), joins equal ones.

    They are compared by a sum of their bits with odd weights, which is verified.
    """
    used = np.zeros(matrix.shape[axis], bool)
    used[classes] = True
    if not used.all():
        matrix, classes = matrix.compress(used, axis), (np.cumsum(used, dtype=np.int32) - np.int32(1))[classes]
    bits = matrix.view(np.uint64)
    length = matrix.shape[1 - axis]
    # A few places tell most apart: nothing more is looked at where they tell all apart.
    for places in (np.unique(np.linspace(0, length - 1, 24).astype(int)), np.arange(length)):
        weights = np.random.default_rng(0).integers(0, 2 ** 63, len(places), np.uint64) | np.uint64(1)
        some = bits if len(places) == length else bits.take(places, 1 - axis)
        _, keep, kind = np.unique(some @ weights if axis == 0 else weights @ some, return_index=True,
                                  return_inverse=True)
        if len(keep) == matrix.shape[axis]:
            return matrix, classes
    smaller = bits.take(keep, axis)
    if np.array_equal(smaller.take(kind, axis), bits):
        matrix, classes = smaller.view(np.float64), kind.astype(np.int32)[classes]
    return matrix, classes


def _pick(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """matrix[rows][:, columns], without a copy where that is the matrix."""
    if all(len(kept) == size and np.array_equal(kept, np.arange(size))
           for kept, size in zip((rows, columns), matrix.shape, strict=True)):
        return matrix
    return matrix[np.ix_(rows, columns)]


class _Normalizer:
    """Memoises every step by the identity of its arguments; `_alive` keeps those from being collected and reused."""

    def __init__(self) -> None:
        self._memo: dict[tuple, object] = {}
        self._alive: list[object] = []

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

    def transposed(self, matrix: np.ndarray) -> np.ndarray:
        key = "transpose", id(matrix)
        if key not in self._memo:
            self._remember(key, matrix, self._one(np.ascontiguousarray(matrix.T)))
        return self._memo[key]

    def tightened(self, table: _Table) -> _Table:
        key = "tighten", *table.key
        if key in self._memo:
            return self._memo[key]
        matrix, rows = _tighten(table.matrix, table.rows, 0)
        matrix, columns = _tighten(matrix, table.columns, 1)
        matrix = np.ascontiguousarray(matrix)
        # Different class arrays may leave the same matrix: one object for all of them.
        return self._remember(key, table, _Table(self._one(matrix), self._one(rows), self._one(columns)))

    def _one(self, array: np.ndarray) -> np.ndarray:
        flat = array.reshape(-1)
        sample = flat[::max(1, len(flat) // 256)].tobytes()
        for other in self._memo.setdefault(("content", array.shape, array.dtype, sample), []):
            if np.array_equal(other, array):
                return other
        self._memo["content", array.shape, array.dtype, sample].append(array)
        return array

    def _joint(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The classes of pairs: (class in first, class in second) per joint class, and the joint class arrays."""
        key = "joint", id(first), id(second)
        if key not in self._memo:
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
            matrix = (_pick(first.matrix, rows_first, columns_first)
                      + _pick(second.matrix, rows_second, columns_second))
            result = self.tightened(_Table(matrix, rows, columns))
        return self._remember(key, (first, second), result)


def normalize(vectors: Sequence[np.ndarray], edges: Sequence[NetworkEdge]
              ) -> tuple[list[np.ndarray], list[NetworkEdge]]:
    """Vectors and edges of an equal network: edges ascend, none is a loop, parallel ones are summed where that pays."""
    work = _Normalizer()
    vectors = list(vectors)
    between: dict[tuple[int, int], list[_Table]] = {}
    for edge in edges:
        if edge.source == edge.target:
            vectors[edge.source] = vectors[edge.source] + edge.matrix[edge.rows, edge.columns]
            continue
        table = _Table(work.shared(edge.matrix), work.shared(edge.rows), work.shared(edge.columns))
        ends = edge.source, edge.target
        if edge.source > edge.target:
            table = _Table(work.transposed(table.matrix), table.columns, table.rows)
            ends = edge.target, edge.source
        table = work.tightened(table)
        tables = between.setdefault(ends, [])
        for position, other in enumerate(tables):
            total = work.summed(other, table)
            if total is not None:
                tables[position] = total
                break
        else:
            tables.append(table)
    return vectors, [NetworkEdge(source, target, *table)
                     for (source, target), tables in sorted(between.items(), key=lambda item: item[0])
                     for table in tables]
