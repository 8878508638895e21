"""Brings the edges of a cost network into the form the searches want; see CostNetwork.normalized."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pase_mtf.search.arrays import DistinctArrays, NetworkArrays, offsets
from pase_mtf.search.budget import Budget
from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.matrices import Matrices, matrix

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
# Entries by which arrays are told apart before they are compared as a whole.
_HASHED = 256


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


def _numbered(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct entries, ascending, and for every entry (same shape) which of them it is."""
    found = np.unique(array, return_inverse=True)
    return found[0], found[1].reshape(array.shape)


@compiled
def _sum(matrices: Matrices, tables: np.ndarray, rows: np.ndarray, columns: np.ndarray, out: np.ndarray
         ) -> None:  # pragma: no cover (compiled)
    """The sum of two tables, whose lines are listed (uint64 [2, lines])."""
    one, other = matrix(matrices, tables[0, 0]), matrix(matrices, tables[1, 0])
    _gather(out, one, rows[0], columns[0], tables[0, 3] != 0, other, rows[1], columns[1], tables[1, 3] != 0)


class _Tables(NamedTuple):
    """Tables that are tightened one after another, and what became of them: of each kind once.

    Attributes:
      given: int64 [tables, 4]: matrix, rows, columns, turned (see `_Table`).
      matrix: int64 [tables], the number of the new matrix.
      lines: int64 [2, tables], the numbers of the new class vectors.
      matrices_at, shapes: int64 [tables], [tables, 2], where the new matrices begin, and their shapes.
      classes: int32, the new class vectors, one after another.
      classes_at, lengths: int64 [2 * tables], [2 * tables, 2], where they begin, and 1 beside their lengths.
      tables_seen, matrices_seen, classes_seen: int64, numbers by the hash of what has that number; -1: empty.
      counts: int64 [4], how many tables are done, how many matrices and class vectors are new, and how many entries the
        next matrix has if there was no room for it.
    """

    given: np.ndarray
    matrix: np.ndarray
    lines: np.ndarray
    matrices_at: np.ndarray
    shapes: np.ndarray
    classes: np.ndarray
    classes_at: np.ndarray
    lengths: np.ndarray
    tables_seen: np.ndarray
    matrices_seen: np.ndarray
    classes_seen: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, given: np.ndarray, class_lengths: np.ndarray) -> _Tables:
        """None of them done; the class vectors have these lengths."""
        count = len(given)
        places = 2 << (2 * count).bit_length()
        seen = np.full((3, places), -1)
        return cls(given, np.empty(count, np.int64), np.empty((2, count), np.int64), np.zeros(count + 1, np.int64),
                   np.empty((count, 2), np.int64), np.empty(int(class_lengths[given[:, 1:3]].sum()), np.int32),
                   np.zeros(2 * count + 1, np.int64), np.ones((2 * count, 2), np.int64), seen[0], seen[1], seen[2],
                   np.zeros(4, np.int64))


@compiled
def _first_equal(seen: np.ndarray, entries: np.ndarray, at: np.ndarray, extents: np.ndarray, number: int
                 ) -> int:  # pragma: no cover (compiled)
    """The number of the array seen that has the same extents and entries as this one; if there is none, this one's,
    which is now seen."""
    begin, size = at[number], extents[number, 0] * extents[number, 1]
    mixed = np.uint64(size)
    for place in range(begin, begin + size, max(1, size // _HASHED)):
        mixed = (mixed ^ np.uint64(entries[place])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    mask = len(seen) - 1
    slot = np.int64(mixed >> np.uint64(20)) & mask
    while seen[slot] >= 0:
        other = seen[slot]
        if extents[other, 0] == extents[number, 0] and extents[other, 1] == extents[number, 1]:
            place, ahead = begin, at[other] - begin
            while place < begin + size and entries[place] == entries[place + ahead]:
                place += 1
            if place == begin + size:
                return int(other)
        slot = (slot + 1) & mask
    seen[slot] = number
    return number


@compiled
def _new_classes(tables: _Tables, classes: np.ndarray) -> int:  # pragma: no cover (compiled)
    """The number of the new class vector with these contents."""
    number = tables.counts[2]
    begin = tables.classes_at[number]
    tables.classes[begin:begin + len(classes)] = classes
    tables.lengths[number, 1] = len(classes)
    found = _first_equal(tables.classes_seen, tables.classes, tables.classes_at, tables.lengths, number)
    if found == number:
        tables.classes_at[number + 1] = begin + len(classes)
        tables.counts[2] += 1
    return found


@compiled
def _tighten(matrices: Matrices, classes: np.ndarray, classes_at: np.ndarray, tables: _Tables, values: np.ndarray,
             end: float) -> None:  # pragma: no cover (compiled)
    """Makes of every table one that is not turned and has no unused and no equal classes; goes on with the first that
    is not done, and ends where `values` has no room for the next matrix, or the clock shows `end`.

    Args:
      matrices, classes, classes_at: what the tables name by number.
      tables: what to do and what was done.
      values: the new matrices, one after another.
      end: of the time.
    """
    entries, fours, nothing = values.view(np.uint64), np.full((len(tables.given), 2), 2), np.zeros((0, 0))
    given, given_at = tables.given.reshape(-1), np.arange(len(tables.given)) * 4
    for number in range(tables.counts[0], len(tables.given)):
        if end < np.inf and seconds_now() > end:
            return
        like = _first_equal(tables.tables_seen, given, given_at, fours, number)
        if like < number:
            tables.matrix[number], tables.lines[:, number] = tables.matrix[like], tables.lines[:, like]
            tables.counts[0] += 1
            continue
        costs, turned = matrix(matrices, tables.given[number, 0]), tables.given[number, 3] != 0
        r, c = tables.given[number, 1], tables.given[number, 2]
        rows, row_classes = _distinct(costs, classes[classes_at[r]:classes_at[r + 1]], 1 if turned else 0)
        columns, column_classes = _distinct(costs, classes[classes_at[c]:classes_at[c + 1]], 0 if turned else 1)
        new = tables.counts[1]
        begin, size = tables.matrices_at[new], len(rows) * len(columns)
        if begin + size > len(values):
            tables.counts[3] = size
            return
        _gather(values[begin:begin + size].reshape(len(rows), len(columns)), costs, rows.view(np.uint64),
                columns.view(np.uint64), turned, nothing, rows[:0].view(np.uint64), rows[:0].view(np.uint64), False)
        tables.shapes[new, 0], tables.shapes[new, 1] = len(rows), len(columns)
        found = _first_equal(tables.matrices_seen, entries, tables.matrices_at, tables.shapes, new)
        if found == new:
            tables.matrices_at[new + 1] = begin + size
            tables.counts[1] += 1
        tables.matrix[number] = found
        tables.lines[0, number] = _new_classes(tables, row_classes)
        tables.lines[1, number] = _new_classes(tables, column_classes)
        tables.counts[0] += 1


class _Sums:
    """Sums of tables, each made once: what is equal has the same number.

    Attributes:
      matrices: those of the network, then those of sums.
      entries: of the latter.
    """

    def __init__(self, arrays: NetworkArrays, budget: Budget) -> None:
        self._arrays, self._budget = arrays, budget
        self.matrices = Matrices.of(arrays.values, arrays.matrix_in, arrays.matrix_at, arrays.shapes)
        self.entries = 0
        self._made: list[np.ndarray] = []  # what `matrices` names beside those of the network
        self._class_vectors: DistinctArrays | None = None
        self._joints: dict[tuple[int, int], _JointClasses] = {}
        self._sums: dict[tuple[_Table, _Table], _Table | None] = {}

    def _joint(self, first: int, second: int) -> _JointClasses:
        known = self._joints.get((first, second))
        if known is not None:
            return known
        if self._class_vectors is None:
            self._class_vectors = DistinctArrays(self._arrays.class_vectors())
        one, other = self._class_vectors.arrays[first], self._class_vectors.arrays[second]
        if first == second:
            used = np.zeros(int(one.max()) + 1, bool)
            used[one] = True
            pairs = np.flatnonzero(used)
            number = first
            if not used.all():
                number = self._class_vectors.add((np.cumsum(used, dtype=np.int32) - np.int32(1))[one])
            known = _JointClasses(pairs, pairs, number)
        else:
            width = int(other.max()) + 1
            pairs, inverse = _numbered(one.astype(np.int64) * width + other)
            known = _JointClasses(pairs // width, pairs % width, self._class_vectors.add(inverse.astype(np.int32)))
        self._joints[first, second] = known
        return known

    def summed(self, first: _Table, second: _Table) -> _Table | None:
        """One table for both, or None where it would be larger than the two."""
        if (first, second) in self._sums:
            return self._sums[first, second]
        rows, columns = self._joint(first.rows, second.rows), self._joint(first.columns, second.columns)
        height, width = len(rows.first), len(columns.first)
        result = None
        if height * width <= 2 * int(self.matrices.shapes[[first.matrix, second.matrix]].prod(axis=1).sum()) + 4096:
            self._budget.require(8 * (self.entries + height * width))
            self.entries += height * width
            total = np.empty((height, width))
            _sum(self.matrices, np.array([first, second], np.int64), np.stack(rows[:2]).view(np.uint64),
                 np.stack(columns[:2]).view(np.uint64), total)
            result = _Table(len(self.matrices.at), rows.number, columns.number)
            self._made.append(total)
            self.matrices = self.matrices.with_another(total)
        self._sums[first, second] = result
        return result

    def class_vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """All class vectors, those of sums too: the entries, and where each begins."""
        if self._class_vectors is None:
            return self._arrays.classes, self._arrays.classes_at
        vectors = self._class_vectors.arrays
        return np.concatenate(vectors), offsets([len(vector) for vector in vectors])


def _merged(arrays: NetworkArrays, sums: _Sums, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """The cost vectors with the loops added, and the tables between two layers each: int64 [tables, 6], lower layer,
    higher layer, and what `_Table` holds."""
    unary, vectors = arrays.unary, list[np.ndarray]()
    between: dict[tuple[int, int], list[_Table]] = {}
    for source, target, number, rows, columns in arrays.edges():
        budget.check_time()
        if source == target:
            if not vectors:  # changed, so no longer those of the network given
                unary = arrays.unary.copy()
                vectors, classes, matrices = (np.split(unary, arrays.first[1:-1]), arrays.class_vectors(),
                                              arrays.matrices())
            vectors[source] += matrices[number][classes[rows], classes[columns]]
            continue
        ends, table = (source, target), _Table(number, rows, columns)
        if source > target:
            ends, table = (target, source), _Table(number, columns, rows, True)
        tables = between.setdefault(ends, [])
        for position, other in enumerate(tables):
            total = sums.summed(other, table)
            if total is not None:
                tables[position] = total
                break
        else:
            tables.append(table)
    found = [(*ends, *table) for ends in sorted(between) for table in between[ends]]
    return unary, np.array(found, np.int64).reshape(-1, 6)


def _tightened(matrices: Matrices, classes: np.ndarray, classes_at: np.ndarray, tables: _Tables, budget: Budget,
               held: int) -> np.ndarray:
    """Tightens all tables. Returns the new matrices, one after another; `held` entries are held besides."""
    count = len(tables.given)
    most = int(matrices.shapes[tables.given[:, 0]].prod(axis=1).sum())
    # Memory that is never written to costs nothing.
    values = np.empty(min(most, 4 * int(matrices.shapes.prod(axis=1).sum())))
    end = seconds_now() + budget.seconds if budget.deadline < math.inf else math.inf
    while True:
        tables.counts[3] = 0
        _tighten(matrices, classes, classes_at, tables, values, end)
        size = int(tables.matrices_at[tables.counts[1]])
        budget.require(8 * (held + size + int(tables.counts[3])))
        if tables.counts[0] == count:
            return values[:size]
        budget.check_time()
        if not tables.counts[3]:  # the time is over, by the clock of what is compiled
            raise TimeoutError
        larger = np.empty(2 * (size + int(tables.counts[3])))
        larger[:size] = values[:size]
        values = larger


def normalize(arrays: NetworkArrays, budget: Budget) -> NetworkArrays:
    """An equal network: edges ascend, none is a loop, parallel ones are summed where that pays.

    Args:
      arrays: of the network, whose indices have to be valid.
      budget: time and memory that it may take.

    Raises:
      TimeoutError: the time is over.
      UsageError: the result is larger than the memory.
    """
    sums = _Sums(arrays, budget)
    unary, found = _merged(arrays, sums, budget)
    classes, classes_at = sums.class_vectors()
    tables = _Tables.of(np.ascontiguousarray(found[:, 2:]), np.diff(classes_at))
    values = _tightened(sums.matrices, classes, classes_at, tables, budget, sums.entries)
    _, matrices, vectors, _ = tables.counts.tolist()
    return NetworkArrays(
        arrays.first, unary, (values,), np.zeros(matrices, np.int64), tables.matrices_at[:matrices],
        tables.shapes[:matrices], tables.classes[:tables.classes_at[vectors]], tables.classes_at[:vectors + 1],
        np.ascontiguousarray(found[:, :2].T, np.int32), tables.matrix, tables.lines)
