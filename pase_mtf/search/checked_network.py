"""A cost network as the checker of certificates sees it: checked, with one table per pair of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from pase_mtf.errors import PaseError
from pase_mtf.search.checked_bounds import HUGE, MOST, FlatNetwork, SmallTables, add_down, add_table
from pase_mtf.search.network import CostNetwork

__all__ = ["CertificateError", "CheckedNetwork", "Table", "checked"]

class CertificateError(PaseError):
    """A certificate that does not prove what it claims."""


# Entries of the tables of parallel edges, all together: they are added up as they are read, and never held.
_MOST_ENTRIES = 1 << 31
# Entries of such a table that are added up, and looked at, before the next ones: they fit a cache.
_BAND = 1 << 16
# Entries of a table that is read with others, and of all those together: what it takes to get at it would take longer
# than to read it.
_SMALL = 1 << 14
# Parallel edges that are added one after another.
_TOGETHER = 64
_MOST_SMALL = 1 << 22

_Edge = tuple[int, int, int, bool]
"""Numbers of a matrix and of the class vectors of side 0 and side 1; and whether side 0 is that of the columns."""


_Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What one edge adds: its matrix, rows of side 0, and which row and which column (uint64; none: all of them, as they
are) belongs to each group of the two sides."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """At most what the edges of a pair cost together. It is added up as it is read, a few rows at a time: the whole of
    it would be written to memory only to be read once or twice.

    Attributes:
      shape: the groups of side 0, of side 1.
      parts: per edge; of a single one all rows and columns as they are.
    """

    shape: tuple[int, int]
    parts: list[_Part]

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]

    def bands(self, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The numbers (int64) of some rows, of all that are wanted (bool [groups of side 0]) at least, and those rows:
        float64 [rows, groups of side 1], overwritten by the next ones."""
        if len(self.parts) == 1:
            yield np.arange(self.shape[0]), self.parts[0][0]
            return
        rows, width = np.flatnonzero(wanted), self.shape[1]
        room = np.empty((max(1, min(len(rows), _BAND // max(1, width))), width))
        for top in range(0, len(rows), len(room)):
            some = rows[top:top + len(room)]
            yield some, _read_only(self._added(room[:len(some)], some, None))

    def whole(self) -> np.ndarray:
        """float64 [groups of side 0, groups of side 1]: all entries."""
        return self.parts[0][0] if len(self.parts) == 1 else self._added(
            np.empty(self.shape), np.arange(self.shape[0]), None)

    def block(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """float64 [rows, columns]: the entries of these groups."""
        if len(self.parts) == 1:
            costs: np.ndarray = np.minimum(self.parts[0][0][np.ix_(rows, columns)], HUGE)
            return costs
        return self._added(np.empty((len(rows), len(columns))), rows, columns)

    def _added(self, total: np.ndarray, rows: np.ndarray, columns: np.ndarray | None,
               some: list[_Part] | None = None) -> np.ndarray:
        """By halves: of thousands of edges no sum is to be rounded down thousands of times."""
        parts = some or self.parts
        if len(parts) > _TOGETHER:
            self._added(total, rows, columns, parts[:len(parts) // 2])
            other = self._added(np.empty_like(total), rows, columns, parts[len(parts) // 2:])
            add_table(total, _read_only(other), np.arange(len(total), dtype=np.uint64), np.zeros(0, np.uint64), False)
            return total
        for number, (matrix, down, across) in enumerate(parts):
            chosen = across if columns is None else across[columns] if len(across) else columns.astype(np.uint64)
            add_table(total, matrix, down[rows], chosen, number == 0)
        return total


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedNetwork:
    """A network, checked.

    Attributes:
      flat: its layers, and how its pairs group their configurations.
      tables: the distinct ones.
      small: which one every pair has, and those that are small.
    """

    flat: FlatNetwork
    tables: list[Table]
    small: SmallTables


class _Sides:
    """The groups of the sides of pairs, each list of class vectors once."""

    def __init__(self, network: CostNetwork) -> None:
        arrays = network.arrays
        self._vectors, self._sizes = arrays.class_vectors(), network.sizes
        self.groups, self._end = [arrays.classes], len(arrays.classes)
        self._begins: list[int] = arrays.classes_at.tolist()
        self._checked: set[tuple[int, int, int]] = set()
        self._known: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}

    def check(self, layer: int, vector: int, extent: int) -> None:
        """Raises CertificateError unless the vector holds a class below `extent` for every configuration."""
        key, found = (self._sizes[layer], vector, extent), self._vectors[vector]
        if key not in self._checked and (
                len(found) != self._sizes[layer] or found.min(initial=0) < 0 or found.max(initial=0) >= extent):
            raise CertificateError(f"layer {layer}: classes that an edge does not have; the network is damaged")
        self._checked.add(key)

    def joint(self, vectors: tuple[int, ...]) -> tuple[int, np.ndarray]:
        """Where the groups of configurations begin that all these class vectors treat alike, and the classes of the
        groups, [vectors, groups]."""
        if vectors not in self._known:
            found = np.stack([self._vectors[vector] for vector in vectors]).astype(np.int64)
            code = found[0]
            for row in found[1:]:
                code = np.unique(code, return_inverse=True)[1].reshape(-1) * (int(row.max()) + 1) + row
            _, first, groups = np.unique(code, return_index=True, return_inverse=True)
            self.groups.append(groups.reshape(-1).astype(np.int32))
            self._known[vectors] = self._end, found[:, first]
            self._end += len(groups)
        return self._known[vectors]

    def begin(self, vector: int) -> int:
        """Where a class vector begins, whose classes are the groups."""
        return self._begins[vector]


def checked(network: CostNetwork) -> CheckedNetwork:
    """The network for the checker.

    Raises:
      CertificateError: it is damaged, or has costs that the checker cannot add.
    """
    arrays, layers = network.arrays, len(network.vectors)
    matrices, vectors, sides = arrays.matrices(), arrays.class_vectors(), _Sides(network)
    for costs in (arrays.unary, *matrices):
        if not costs.min(initial=0.0) >= -MOST:
            raise CertificateError(f"a cost that is NaN or below {-MOST:g}; nothing is proven of such a network")
    unary = np.minimum(arrays.unary, HUGE)
    pairs: dict[tuple[int, int], list[_Edge]] = {}
    loops: dict[int, list[np.ndarray]] = {}
    for source, target, matrix, rows, columns in arrays.edges():
        if not (0 <= source < layers and 0 <= target < layers):
            raise CertificateError(f"an edge from layer {source} to {target}; the network is damaged")
        sides.check(source, rows, matrices[matrix].shape[0])
        sides.check(target, columns, matrices[matrix].shape[1])
        if source == target:
            loops.setdefault(source, []).append(np.minimum(matrices[matrix][vectors[rows], vectors[columns]], HUGE))
        elif (target, source) in pairs:
            pairs[target, source].append((matrix, columns, rows, True))
        else:
            pairs.setdefault((source, target), []).append((matrix, rows, columns, False))
    for layer, some in loops.items():
        own = slice(arrays.first[layer], arrays.first[layer + 1])
        some = [*some, unary[own]]
        while len(some) > 1:  # two by two: see Table
            some = [add_down(*some[k:k + 2]) if k + 1 < len(some) else some[k] for k in range(0, len(some), 2)]
        unary[own] = np.minimum(some[0], HUGE)
    return _laid_out(arrays.first, unary, sides, matrices, pairs)


def _laid_out(first: np.ndarray, unary: np.ndarray, sides: _Sides, matrices: list[np.ndarray],
              pairs: dict[tuple[int, int], list[_Edge]]) -> CheckedNetwork:
    """The network of its pairs, those of the same edges with the same table. Side 0 is that of the rows of the largest
    matrix; those that lie the other way round are turned once."""
    kinds: dict[tuple[_Edge, ...], tuple[int, int, int]] = {}
    transposed: dict[int, np.ndarray] = {}
    tables: list[Table] = []
    columns, entries = [], 0
    for ends, edges in pairs.items():
        if len(edges) > 1 and max(edges, key=lambda edge: matrices[edge[0]].size)[3]:
            ends, edges = ends[::-1], [(matrix, other, one, not flip) for matrix, one, other, flip in edges]
        kind = tuple(edges)
        if kind not in kinds:
            matrix, one, other, _ = edges[0]
            if len(edges) == 1:
                nothing = np.zeros(0, np.uint64)
                tables.append(Table(matrices[matrix].shape, [(matrices[matrix], nothing, nothing)]))
                kinds[kind] = sides.begin(one), sides.begin(other), len(tables) - 1
            else:
                (rows_at, rows), (columns_at, across) = (sides.joint(tuple(edge[side] for edge in edges))
                                                         for side in (1, 2))
                entries += rows.shape[1] * across.shape[1]
                if entries > _MOST_ENTRIES:
                    raise CertificateError("parallel edges too large to be added up; nothing is proven of them")
                for matrix, *_, flip in edges:
                    if flip and matrix not in transposed:
                        transposed[matrix] = _read_only(np.ascontiguousarray(matrices[matrix].T))
                tables.append(_table([(transposed if edge[3] else matrices)[edge[0]] for edge in edges], rows, across))
                kinds[kind] = rows_at, columns_at, len(tables) - 1
        columns.append((*ends, *kinds[kind][:2], *tables[kinds[kind][2]].shape, kinds[kind][2]))
    found = np.array(columns, np.int64).reshape(-1, 7).T.copy()
    slots = np.cumsum([0, *found[4:6].T.ravel().tolist()])
    first = _read_only(first)  # it may be that; what is compiled differs
    return CheckedNetwork(FlatNetwork(
        first, unary, found[:2], np.concatenate(sides.groups), found[2:4],
        np.stack([slots[::2], np.append(slots[1::2], slots[-1])]), found[4:6]), tables, _small(tables, found[6]))


def _small(tables: list[Table], kinds: np.ndarray) -> SmallTables:
    """The entries of the small ones of some tables."""
    places, parts, end = [], [np.zeros(0)], 0
    for table in tables:
        small = table.size <= min(_SMALL, _MOST_SMALL - end)
        places.append(end if small else -1)
        if small:
            parts.append(table.whole().ravel())
            end += table.size
    return SmallTables(kinds, np.array(places, np.int64), _read_only(np.concatenate(parts)))


def _table(matrices: list[np.ndarray], rows: np.ndarray, columns: np.ndarray) -> Table:
    """The sum of parallel edges, given the classes of the groups of either side under each."""
    as_they_are = np.arange(columns.shape[1])
    return Table((rows.shape[1], columns.shape[1]), [
        (matrix, down.astype(np.uint64), np.zeros(0, np.uint64) if np.array_equal(across, as_they_are)
         else across.astype(np.uint64)) for matrix, down, across in zip(matrices, rows, columns, strict=True)])


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written to. The searches have one like it: the checker takes no code of theirs."""
    view = array.view()
    view.flags.writeable = False
    return view
