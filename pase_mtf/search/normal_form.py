"""Brings the edges of a cost network into the form the searches want; see CostNetwork.normalized."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.arrays import DistinctArrays, NetworkArrays, offsets, read_only
from pase_mtf.search.budget import Budget
from pase_mtf.search.compiled import compiled

__all__ = ["normalize"]


class _Table(NamedTuple):
    """The costs between two layers, by the numbers of a matrix and of the class vectors of the two.

    Attributes:
      matrix, rows, columns: numbers; `rows` belongs to the first layer, `columns` to the second.
      turned: the first layer's classes are those of the columns of the matrix, and the other way round.
    """

    matrix: int
    rows: int
    columns: int
    turned: bool = False


class _JointClasses(NamedTuple):
    """The classes of pairs.

    Attributes:
      first, second: int64 [joint classes], the class in the first and in the second class vector.
      number: of the vector of joint classes.
    """

    first: np.ndarray
    second: np.ndarray
    number: int


# Entries of a line that are compared before all of it is read.
_SAMPLE = 24


@compiled
def _weight(place: int) -> np.uint64:  # pragma: no cover (compiled)
    """An odd number that is as good as random (splitmix64: Steele, Lea and Flood 2014)."""
    bits = np.uint64(place) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)


@compiled
def _sums(bits: np.ndarray, axis: int, lines: np.ndarray, step: int) -> np.ndarray:  # pragma: no cover (compiled)
    """uint64 per listed row (axis 0) or column: the sum of every step-th entry with odd weights."""
    found = np.zeros(len(lines), np.uint64)
    weights = np.empty(bits.shape[1 - axis], np.uint64)
    for place in range(0, len(weights), step):
        weights[place] = _weight(place)
    if axis == 0:
        for number in range(len(lines)):
            line, total = bits[lines[number]], np.uint64(0)
            for place in range(0, len(weights), step):
                total += weights[place] * line[place]
            found[number] = total
    else:
        for place in range(0, len(weights), step):
            line, weight = bits[place], weights[place]
            for number in range(len(lines)):
                found[number] += weight * line[lines[number]]
    return found


@compiled
def _same(bits: np.ndarray, axis: int, one: int, other: int) -> bool:  # pragma: no cover (compiled)
    for place in range(bits.shape[1 - axis]):
        if (bits[one, place] != bits[other, place]) if axis == 0 else (bits[place, one] != bits[place, other]):
            return False
    return True


@compiled
def _first_alike(bits: np.ndarray, axis: int, lines: np.ndarray, sums: np.ndarray, verify: bool
                 ) -> np.ndarray:  # pragma: no cover (compiled)
    """For every listed line the number of the first with the same sum (and, to be verified, the same entries)."""
    places = 2
    while places < 2 * len(lines):
        places *= 2
    table, found = np.full(places, -1), np.arange(len(lines))  # a hash table: -1 where it is empty
    for number in range(len(lines)):
        place = np.int64((sums[number] * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & (places - 1)
        while table[place] >= 0:
            other = table[place]
            if sums[other] == sums[number] and (not verify or _same(bits, axis, lines[other], lines[number])):
                found[number] = other
                break
            place = (place + 1) & (places - 1)
        else:
            table[place] = number
    return found


@compiled
def _distinct(matrix: np.ndarray, classes: np.ndarray, axis: int
              ) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """Which rows (axis 0) or columns of a matrix to keep, ascending, so that none is unused and none repeats another,
    and the classes then.

    They are compared by a sum of bits with odd weights, first in a few places; what those do not tell apart is compared
    as a whole, and verified.
    """
    bits, number = matrix.view(np.uint64), np.full(matrix.shape[axis], -1)
    for c in classes:
        number[c] = 0
    lines = np.flatnonzero(number == 0)
    some = _first_alike(bits, axis, lines, _sums(bits, axis, lines, max(1, bits.shape[1 - axis] // _SAMPLE)), False)
    repeated = np.zeros(len(lines), np.bool_)
    for position in range(len(lines)):
        if some[position] != position:
            repeated[position] = repeated[some[position]] = True
    doubtful = lines[repeated]
    alike = _first_alike(bits, axis, doubtful, _sums(bits, axis, doubtful, 1), True)
    for position in range(len(doubtful)):
        number[doubtful[position]] = 1 + doubtful[alike[position]]  # 1 + the line it repeats
    kept, count = np.empty(len(lines), np.int64), 0
    for line in lines:
        if number[line] == 0 or number[line] == 1 + line:
            kept[count], number[line] = line, count
            count += 1
        else:
            number[line] = number[number[line] - 1]  # that one came first, and has its class
    new = np.empty(len(classes), np.int32)
    for k in range(len(classes)):
        new[k] = number[classes[k]]
    return kept[:count], new


# Rows and columns of a matrix that are filled in at once: they fit the cache.
_BLOCK = (16, 256)


@compiled
def _fill(out: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool, add: bool,
          left: int) -> None:  # pragma: no cover (compiled)
    """out[r, left + c] = (or +=) matrix[rows[r], columns[c]], or matrix[columns[c], rows[r]]; indices without a sign,
    which is never looked at."""
    for r in range(len(rows)):
        row, target = rows[r], out[r, left:left + len(columns)]
        if not add:
            target[:] = 0.0
        if turned:
            for c in range(len(columns)):
                target[c] += matrix[columns[c], row]
        else:
            for c in range(len(columns)):
                target[c] += matrix[row, columns[c]]


@compiled
def _gather(out: np.ndarray, one: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool, other: np.ndarray,
            other_rows: np.ndarray, other_columns: np.ndarray, other_turned: bool
            ) -> None:  # pragma: no cover (compiled)
    """Fills in the lines of one matrix (see `_fill`), and adds those of another unless that is empty; block by block,
    so that each is written to memory once."""
    height, width = _BLOCK
    for top in range(0, len(rows), height):
        part = out[top:top + height]
        for left in range(0, len(columns), width):
            _fill(part, one, rows[top:top + height], columns[left:left + width], turned, False, left)
            if other.size:
                _fill(part, other, other_rows[top:top + height], other_columns[left:left + width], other_turned, True,
                      left)


_NO_LINES, _NOTHING = np.zeros(0, np.uint64), read_only(np.zeros((0, 0)))


def _put(out: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool) -> None:
    """out[r, c] = matrix[rows[r], columns[c]], or matrix[columns[c], rows[r]], of lines that ascend: of everything, by
    the quicker copy."""
    if turned or out.shape != matrix.shape:
        _gather(out, matrix, rows.view(np.uint64), columns.view(np.uint64), turned, _NOTHING, _NO_LINES, _NO_LINES,
                False)
    else:
        out[...] = matrix


def _numbered(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct entries, ascending, and for every entry (same shape) which of them it is."""
    found = np.unique(array, return_inverse=True)
    return found[0], found[1].reshape(array.shape)


class _Normalizer:
    """Sums and tightens tables, each kind of table once: what is equal has the same number."""

    def __init__(self, arrays: NetworkArrays, budget: Budget) -> None:
        self._given, self._budget = arrays.matrices(), budget
        # New matrices lie one after another in one array. Memory that is never written to costs nothing.
        self._buffer, self._end = np.empty(4 * sum(matrix.size for matrix in self._given)), 0
        self._new, self._places = DistinctArrays(), list[int]()  # numbered after the given ones
        self._classes = DistinctArrays(arrays.class_vectors())
        self._tightened: dict[_Table, _Table] = {}
        self._joints: dict[tuple[int, int], _JointClasses] = {}
        self._sums: dict[tuple[_Table, _Table], _Table | None] = {}

    def _matrix(self, number: int) -> np.ndarray:
        given = len(self._given)
        return self._given[number] if number < given else self._new.arrays[number - given]

    def _room(self, height: int, width: int) -> np.ndarray:
        """A new matrix at the end of the buffer, still to be filled in and to be added."""
        end = self._end + height * width
        self._budget.require(8 * end)
        if end > len(self._buffer):  # matrices made before stay where they are, as views of the former buffer
            larger = np.empty(2 * end)
            larger[:self._end] = self._buffer[:self._end]
            self._buffer = larger
        return self._buffer[self._end:end].reshape(height, width)

    def _added(self, matrix: np.ndarray) -> int:
        """The number of the new matrix with these contents: of the one that was just filled in if it is the first."""
        number = self._new.add(read_only(matrix))
        if number == len(self._places):
            self._places.append(self._end)
            self._end += matrix.size
        return len(self._given) + number

    def tightened(self, table: _Table) -> _Table:
        """The table without unused or equal classes, not turned, with a new matrix."""
        known = self._tightened.get(table)
        if known is not None:
            return known
        matrix, columns_axis = self._matrix(table.matrix), 0 if table.turned else 1
        keep_rows, rows = _distinct(matrix, self._classes.arrays[table.rows], 1 - columns_axis)
        keep_columns, columns = _distinct(matrix, self._classes.arrays[table.columns], columns_axis)
        number = table.matrix
        if number < len(self._given) or len(keep_rows) * len(keep_columns) < matrix.size:
            tight = self._room(len(keep_rows), len(keep_columns))
            _put(tight, matrix, keep_rows, keep_columns, table.turned)
            number = self._added(tight)
        known = self._tightened[table] = _Table(number, self._classes.add(rows), self._classes.add(columns))
        return known

    def _joint(self, first: int, second: int) -> _JointClasses:
        known = self._joints.get((first, second))
        if known is not None:
            return known
        one, other = self._classes.arrays[first], self._classes.arrays[second]
        if first == second:
            used = np.zeros(int(one.max()) + 1, bool)
            used[one] = True
            pairs = np.flatnonzero(used)
            number = first
            if not used.all():
                number = self._classes.add((np.cumsum(used, dtype=np.int32) - np.int32(1))[one])
            known = _JointClasses(pairs, pairs, number)
        else:
            width = int(other.max()) + 1
            pairs, inverse = _numbered(one.astype(np.int64) * width + other)
            known = _JointClasses(pairs // width, pairs % width, self._classes.add(inverse.astype(np.int32)))
        self._joints[first, second] = known
        return known

    def summed(self, first: _Table, second: _Table) -> _Table | None:
        """One table for both, or None where it would be larger than the two."""
        if (first, second) in self._sums:
            return self._sums[first, second]
        rows, columns = self._joint(first.rows, second.rows), self._joint(first.columns, second.columns)
        one, other = self._matrix(first.matrix), self._matrix(second.matrix)
        result = None
        if len(rows.first) * len(columns.first) <= 2 * (one.size + other.size) + 4096:
            total = self._room(len(rows.first), len(columns.first))
            _gather(total, one, rows.first.view(np.uint64), columns.first.view(np.uint64), first.turned, other,
                    rows.second.view(np.uint64), columns.second.view(np.uint64), second.turned)
            result = _Table(self._added(total), rows.number, columns.number)
        self._sums[first, second] = result
        return result

    def arrays(self, first: np.ndarray, unary: np.ndarray, edges: list[tuple[int, int, _Table]]) -> NetworkArrays:
        """The network of these tightened tables."""
        table = np.array([(source, target, *tight[:3]) for source, target, tight in edges], np.int64).reshape(-1, 5).T
        used, edge_matrix = _numbered(table[2])
        used_classes, edge_classes = _numbered(table[3:])
        matrices = [self._matrix(number) for number in used.tolist()]
        classes = [self._classes.arrays[number] for number in used_classes.tolist()]
        shapes = np.array([matrix.shape for matrix in matrices], np.int64).reshape(-1, 2)
        places = np.array([self._places[number - len(self._given)] for number in used.tolist()], np.int64)
        return NetworkArrays(
            first, unary, (self._buffer[:int((places + shapes.prod(axis=1)).max(initial=0))],),
            np.zeros(len(places), np.int64), places, shapes,
            np.concatenate([np.zeros(0, np.int32), *classes]), offsets([len(entry) for entry in classes]),
            np.ascontiguousarray(table[:2], np.int32), edge_matrix, np.ascontiguousarray(edge_classes))


def normalize(arrays: NetworkArrays, budget: Budget) -> NetworkArrays:
    """An equal network: edges ascend, none is a loop, parallel ones are summed where that pays.

    Args:
      arrays: of the network, whose indices have to be valid.
      budget: time and memory that it may take.

    Raises:
      TimeoutError: the time is over.
      UsageError: the result is larger than the memory.
    """
    work, unary = _Normalizer(arrays, budget), arrays.unary
    vectors: list[np.ndarray] | None = None
    matrices, classes = arrays.matrices(), arrays.class_vectors()
    between: dict[tuple[int, int], list[_Table]] = {}
    for source, target, matrix, rows, columns in arrays.edges():
        budget.check_time()
        if source == target:
            if vectors is None:  # changed, so no longer those of the network given
                unary = arrays.unary.copy()
                vectors = np.split(unary, arrays.first[1:-1])
            vectors[source] += matrices[matrix][classes[rows], classes[columns]]
            continue
        ends, table = (source, target), _Table(matrix, rows, columns)
        if source > target:
            ends, table = (target, source), _Table(matrix, columns, rows, True)
        tables = between.setdefault(ends, [])
        for position, other in enumerate(tables):
            total = work.summed(other, table)
            if total is not None:
                tables[position] = total
                break
        else:
            tables.append(table)
    edges = []
    for (source, target), tables in sorted(between.items(), key=lambda item: item[0]):
        budget.check_time()
        edges += [(source, target, work.tightened(table)) for table in tables]
    return work.arrays(arrays.first, unary, edges)
