"""Brings the edges of a cost network into the form the searches want; see CostNetwork.normalized."""

from __future__ import annotations

import hashlib
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


def _tighten_side(matrix: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drops unused classes (rows of the matrix), joins equal ones."""
    used = np.zeros(len(matrix), bool)
    used[classes] = True
    seen: dict[bytes, int] = {}
    renumber = np.zeros(len(matrix), np.int32)
    keep = []
    for index in np.flatnonzero(used).tolist():
        content = matrix[index].tobytes()
        if content not in seen:
            seen[content] = len(keep)
            keep.append(index)
        renumber[index] = seen[content]
    if len(keep) == len(matrix):
        return matrix, classes
    return np.ascontiguousarray(matrix[keep]), renumber[classes]


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
        matrix, rows = _tighten_side(table.matrix, table.rows)
        flipped, columns = _tighten_side(np.ascontiguousarray(matrix.T), table.columns)
        if flipped.shape != matrix.shape[::-1]:
            matrix = np.ascontiguousarray(flipped.T)
        # Different class arrays may leave the same matrix: one object for all of them.
        return self._remember(key, table, _Table(self._one(matrix), self._one(rows), self._one(columns)))

    def _one(self, array: np.ndarray) -> np.ndarray:
        digest = hashlib.blake2b(array, digest_size=16).digest()
        return self._memo.setdefault(("content", array.shape, digest), array)

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
            matrix = (first.matrix[np.ix_(rows_first, columns_first)]
                      + second.matrix[np.ix_(rows_second, columns_second)])
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
