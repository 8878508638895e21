"""A cost network as flat arrays, for compiled code, and its reduction to the configurations that are still alive."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from pase_mtf.errors import InfeasibleError
from pase_mtf.network import CostNetwork

__all__ = ["Packed", "pack", "quantum", "reduce"]


class Packed(NamedTuple):
    """A normalized network in flat arrays. Edge e runs from a lower to a higher vertex.

    Attributes:
      first: int64 [vertices + 1], where the configurations of a vertex begin.
      unary: float64 [configurations], their cost.
      original: int32 [configurations], their index in the vertex's original domain.
      source, target: int32 [edges].
      values: float64, all matrices, row-major, one after another; edges that are alike point to the same one.
      matrix: int64 [edges], where the edge's matrix begins in `values`.
      height, width: int32 [edges], its shape.
      classes: int32, all class arrays; rows, columns: int64 [edges], where those of the edge's two ends begin.
      above, below: int64 [edges], where the edge's row and column potentials begin in the message array.
      messages: number of potentials.
      incoming_start, incoming, outgoing_start, outgoing: the edges that end and begin at a vertex (CSR).
      constant: cost of what has been decided already.
    """

    first: np.ndarray
    unary: np.ndarray
    original: np.ndarray
    source: np.ndarray
    target: np.ndarray
    values: np.ndarray
    matrix: np.ndarray
    height: np.ndarray
    width: np.ndarray
    classes: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    above: np.ndarray
    below: np.ndarray
    messages: int
    incoming_start: np.ndarray
    incoming: np.ndarray
    outgoing_start: np.ndarray
    outgoing: np.ndarray
    constant: float

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return len(self.first) - 1

    @property
    def domains(self) -> np.ndarray:
        """Configurations per vertex."""
        return np.diff(self.first)


def _adjacency(ends: np.ndarray, vertices: int) -> tuple[np.ndarray, np.ndarray]:
    start = np.zeros(vertices + 1, np.int64)
    np.cumsum(np.bincount(ends, minlength=vertices), out=start[1:])
    return start, np.argsort(ends, kind="stable").astype(np.int32)


def _assemble(first: np.ndarray, unary: np.ndarray, original: np.ndarray, source: np.ndarray, target: np.ndarray,
              values: np.ndarray, matrix: np.ndarray, height: np.ndarray, width: np.ndarray, classes: np.ndarray,
              rows: np.ndarray, columns: np.ndarray, constant: float) -> Packed:
    vertices = len(first) - 1
    sizes = np.zeros(2 * len(source) + 1, np.int64)
    sizes[1::2], sizes[2::2] = height, width
    offsets = np.cumsum(sizes)
    return Packed(first, unary, original, source, target, values, matrix, height, width, classes, rows, columns,
                  np.ascontiguousarray(offsets[:-1:2]), np.ascontiguousarray(offsets[1::2]), int(offsets[-1]),
                  *_adjacency(target, vertices), *_adjacency(source, vertices), float(constant))


def pack(network: CostNetwork) -> Packed:
    """Lays a normalized network out flat. Arrays that edges share are stored once."""
    def join(arrays: list[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
        place: dict[int, int] = {}
        parts, starts, end = [], np.zeros(len(arrays), np.int64), 0
        for number, array in enumerate(arrays):
            if id(array) not in place:
                place[id(array)] = end
                parts.append(array.reshape(-1))
                end += array.size
            starts[number] = place[id(array)]
        return (np.concatenate(parts) if parts else np.zeros(0, dtype)), starts
    edges = network.edges
    values, matrix = join([edge.matrix for edge in edges], np.float64)
    classes, starts = join([edge.rows for edge in edges] + [edge.columns for edge in edges], np.int32)
    first = np.zeros(len(network.vectors) + 1, np.int64)
    np.cumsum(network.sizes, out=first[1:])
    return _assemble(
        first, np.concatenate(network.vectors) if network.vectors else np.zeros(0),
        np.concatenate([np.arange(size, dtype=np.int32) for size in network.sizes] or [np.zeros(0, np.int32)]),
        np.array([edge.source for edge in edges], np.int32), np.array([edge.target for edge in edges], np.int32),
        values, matrix, np.array([edge.matrix.shape[0] for edge in edges], np.int32),
        np.array([edge.matrix.shape[1] for edge in edges], np.int32), classes,
        starts[:len(edges)].copy(), starts[len(edges):].copy(), 0.0)


@njit(cache=True)
def _make_consistent(p: Packed, alive: np.ndarray) -> bool:  # pragma: no cover (compiled)
    """Clears every configuration that some edge forbids with all configurations of its other end, until none is left.
    False: a vertex has nothing left."""
    vertices, edges = len(p.first) - 1, len(p.source)
    for position in range(len(alive)):
        if p.unary[position] == np.inf:
            alive[position] = False
    changed = True
    while changed:
        changed = False
        for e in range(edges):
            height, width = p.height[e], p.width[e]
            row, column = np.zeros(height, np.bool_), np.zeros(width, np.bool_)
            u, v = p.source[e], p.target[e]
            for k in range(p.first[u + 1] - p.first[u]):
                if alive[p.first[u] + k]:
                    row[p.classes[p.rows[e] + k]] = True
            for k in range(p.first[v + 1] - p.first[v]):
                if alive[p.first[v] + k]:
                    column[p.classes[p.columns[e] + k]] = True
            row_ok, column_ok = np.zeros(height, np.bool_), np.zeros(width, np.bool_)
            for r in range(height):
                if row[r]:
                    for c in range(width):
                        if column[c] and p.values[p.matrix[e] + r * width + c] < np.inf:
                            row_ok[r] = True
                            column_ok[c] = True
            for k in range(p.first[u + 1] - p.first[u]):
                if alive[p.first[u] + k] and not row_ok[p.classes[p.rows[e] + k]]:
                    alive[p.first[u] + k] = False
                    changed = True
            for k in range(p.first[v + 1] - p.first[v]):
                if alive[p.first[v] + k] and not column_ok[p.classes[p.columns[e] + k]]:
                    alive[p.first[v] + k] = False
                    changed = True
    for v in range(vertices):  # noqa: SIM110 (generators do not compile)
        if not alive[p.first[v]:p.first[v + 1]].any():
            return False
    return True


@njit(cache=True)
def _restrict(p: Packed, alive: np.ndarray, messages: np.ndarray):  # pragma: no cover (compiled)
    """The arrays of the network with the configurations alive only; edges of a vertex with one configuration left are
    folded into their other end. Potentials of classes that remain are carried over."""
    vertices, edges = len(p.first) - 1, len(p.source)
    first = np.zeros(vertices + 1, np.int64)
    for v in range(vertices):
        first[v + 1] = first[v] + alive[p.first[v]:p.first[v + 1]].sum()
    unary, original = np.empty(first[-1]), np.empty(first[-1], np.int32)
    # The only configuration of a vertex, counted from its first in p; -1 where it has several.
    only = np.full(vertices, -1, np.int64)
    for v in range(vertices):
        position = first[v]
        for k in range(p.first[v], p.first[v + 1]):
            if alive[k]:
                unary[position], original[position] = p.unary[k], p.original[k]
                position += 1
                if first[v + 1] - first[v] == 1:
                    only[v] = k - p.first[v]
    constant = p.constant
    kept = np.zeros(edges, np.int64)
    count, room, class_room = 0, 0, 0
    for e in range(edges):
        u, v = p.source[e], p.target[e]
        width = p.width[e]
        if only[u] >= 0 or only[v] >= 0:
            into = u if only[v] >= 0 else v
            if only[u] >= 0 and only[v] >= 0:
                into = -1
                constant += p.values[p.matrix[e] + p.classes[p.rows[e] + only[u]] * width
                                     + p.classes[p.columns[e] + only[v]]]
            if into >= 0:
                position = first[into]
                for k in range(p.first[into + 1] - p.first[into]):
                    if alive[p.first[into] + k]:
                        r = p.classes[p.rows[e] + (k if into == u else only[u])]
                        c = p.classes[p.columns[e] + (k if into == v else only[v])]
                        unary[position] += p.values[p.matrix[e] + r * width + c]
                        position += 1
        else:
            kept[count] = e
            count += 1
            room += min(np.int64(p.height[e]), first[u + 1] - first[u]) * min(np.int64(width), first[v + 1] - first[v])
            class_room += first[u + 1] - first[u] + first[v + 1] - first[v]
    for v in range(vertices):
        if only[v] >= 0:  # its cost is decided: one place for it, so that no bound counts it per pass
            constant += unary[first[v]]
            unary[first[v]] = 0.0
    kept = kept[:count]
    values, classes = np.empty(room), np.empty(class_room, np.int32)
    matrix, rows, columns = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    height, width = np.empty(count, np.int32), np.empty(count, np.int32)
    potentials = np.empty(len(messages))
    end, class_end, potential_end = 0, 0, 0
    for number in range(count):
        e = kept[number]
        u, v = p.source[e], p.target[e]
        rows[number], columns[number] = class_end, class_end + first[u + 1] - first[u]
        row, column = np.full(p.height[e], -1, np.int32), np.full(p.width[e], -1, np.int32)
        for side in range(2):
            vertex, begin, potential = (u, p.rows[e], p.above[e]) if side == 0 else (v, p.columns[e], p.below[e])
            renumber = row if side == 0 else column
            seen = 0
            for k in range(p.first[vertex + 1] - p.first[vertex]):
                if alive[p.first[vertex] + k]:
                    old = p.classes[begin + k]
                    if renumber[old] < 0:
                        renumber[old] = seen
                        potentials[potential_end + seen] = messages[potential + old]
                        seen += 1
                    classes[class_end] = renumber[old]
                    class_end += 1
            potential_end += seen
            if side == 0:
                height[number] = seen
            else:
                width[number] = seen
        matrix[number] = end
        for r in range(p.height[e]):
            if row[r] >= 0:
                for c in range(p.width[e]):
                    if column[c] >= 0:
                        values[end + row[r] * width[number] + column[c]] = p.values[p.matrix[e] + r * p.width[e] + c]
        end += height[number] * width[number]
    return (first, unary, original, p.source[kept], p.target[kept], values[:end].copy(), matrix, height, width,
            classes, rows, columns, constant, potentials[:potential_end].copy())


def reduce(packed: Packed, alive: np.ndarray, messages: np.ndarray | None = None) -> tuple[Packed, np.ndarray]:
    """Removes what is not alive, and all that can then have no finite cost.

    Args:
      packed: the network.
      alive: bool [configurations]; changed in place.
      messages: potentials of `packed`; zero if not given.

    Returns:
      the smaller network, and its potentials.

    Raises:
      InfeasibleError: a vertex has no configuration left.
    """
    if messages is None:
        messages = np.zeros(packed.messages)
    if not _make_consistent(packed, alive):
        raise InfeasibleError("no assignment has a finite cost; allow more configurations")
    *arrays, constant, messages = _restrict(packed, alive, messages)
    return _assemble(*arrays, constant), messages


def quantum(packed: Packed) -> float:
    """The number that every cost is a multiple of, where all are integers (0 where they are not, or are too large to
    add without rounding). No two assignments can differ by less."""
    divisor = 0
    for array in (packed.unary, packed.values):
        finite = array[np.isfinite(array)]
        if finite.size and (np.abs(finite).max() > 2.0 ** 50 or not np.array_equal(finite, np.rint(finite))):
            return 0.0
        divisor = math.gcd(divisor, int(np.gcd.reduce(finite.astype(np.int64)))) if finite.size else divisor
    return float(divisor)
