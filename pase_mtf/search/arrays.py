"""The arrays that a cost network consists of: costs and classes that edges share are held once, and named by number."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["DistinctArrays", "NetworkArrays", "NetworkEdge", "are_no_numbers", "collect", "offsets", "read_only"]

# Entries by which arrays are told apart before they are compared as a whole.
_SAMPLE = 256


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkEdge:
    """The cost between two layers: under configurations i and j it is matrix[rows[i], columns[j]].

    Attributes:
      source, target: indices of the layers (they may be equal).
      matrix: float64 [R, C], cost per pair of classes; +inf forbids a pair.
      rows: int32 [configurations of the source], its class of every configuration, below R.
      columns: int32 [configurations of the target], likewise, below C.
    """

    source: int
    target: int
    matrix: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


class NetworkArrays(NamedTuple):
    """A cost network as arrays.

    Attributes:
      first: int64 [layers + 1], where the configurations of a layer begin in `unary`.
      unary: float64 [configurations], their costs.
      values: float64 arrays that hold the entries of all matrices, row-major, and nothing else. A normalized network
        has one such array.
      matrix_in, matrix_at: int64 [matrices], in which of those arrays a matrix lies, and where it begins there.
      shapes: int64 [matrices, 2].
      classes: int32, the entries of all class vectors, one vector after another.
      classes_at: int64 [class vectors + 1], where a class vector begins in `classes`.
      ends: int32 [2, edges], the source and the target of an edge.
      edge_matrix: int64 [edges], the number of its matrix.
      edge_classes: int64 [2, edges], the number of the class vector of its source (the rows of the matrix) and of its
        target (the columns).
    """

    first: np.ndarray
    unary: np.ndarray
    values: tuple[np.ndarray, ...]
    matrix_in: np.ndarray
    matrix_at: np.ndarray
    shapes: np.ndarray
    classes: np.ndarray
    classes_at: np.ndarray
    ends: np.ndarray
    edge_matrix: np.ndarray
    edge_classes: np.ndarray

    def matrices(self) -> list[np.ndarray]:
        """The distinct matrices, read-only."""
        return [read_only(self.values[number][begin:begin + height * width].reshape(height, width))
                for number, begin, (height, width)
                in zip(self.matrix_in.tolist(), self.matrix_at.tolist(), self.shapes.tolist(), strict=True)]

    def class_vectors(self) -> list[np.ndarray]:
        """The distinct class vectors, read-only."""
        return _split(self.classes, self.classes_at)

    def vectors(self) -> list[np.ndarray]:
        """The cost vector of every layer, read-only."""
        return _split(self.unary, self.first)

    def terms(self, assignment: np.ndarray) -> list[float]:
        """What an assignment costs at every layer and at every edge.

        Args:
          assignment: int64 [layers], a configuration each, within range.
        """
        rows, columns = (self.classes[self.classes_at[self.edge_classes[side]] + assignment[self.ends[side]]]
                         for side in (0, 1))
        places = self.matrix_at[self.edge_matrix] + rows * self.shapes[self.edge_matrix, 1] + columns
        found: list[float] = self.unary[self.first[:-1] + assignment].tolist()
        return found + [float(self.values[number][place]) for number, place in zip(
            self.matrix_in[self.edge_matrix].tolist(), places.tolist(), strict=True)]

    def edges(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Per edge: source, target, and the numbers of its matrix and of its two class vectors."""
        return zip(*self.ends.tolist(), self.edge_matrix.tolist(), *self.edge_classes.tolist(), strict=True)


def offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [arrays + 1]: where arrays of these sizes begin if they lie one after another, and where the last ends."""
    found = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def read_only(array: np.ndarray) -> np.ndarray:
    """A view of an array that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def _split(values: np.ndarray, begins: np.ndarray) -> list[np.ndarray]:
    values, places = read_only(values), begins.tolist()
    return [values[begin:end] for begin, end in itertools.pairwise(places)]


class DistinctArrays:
    """A list of arrays (of one dtype) without two of equal contents.

    Attributes:
      arrays: in the order in which they came.
    """

    def __init__(self, arrays: Sequence[np.ndarray] = ()) -> None:
        """Starts with these; they are taken to differ."""
        self.arrays: list[np.ndarray] = []
        self._alike: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
        for array in arrays:
            self._append(self._key(array), array)

    @staticmethod
    def _key(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
        flat = array.reshape(-1)
        return array.shape, flat[::max(1, len(flat) // _SAMPLE)].tobytes()

    def _append(self, key: tuple[tuple[int, ...], bytes], array: np.ndarray) -> int:
        self._alike.setdefault(key, []).append(len(self.arrays))
        self.arrays.append(array)
        return len(self.arrays) - 1

    def add(self, array: np.ndarray) -> int:
        """The number of the array with these contents; one that is new becomes the last."""
        key = self._key(array)
        for number in self._alike.get(key, ()):
            if np.array_equal(self.arrays[number], array):
                return number
        return self._append(key, array)


class _Collector:
    """Numbers the distinct arrays among those of many edges. An object that many edges hold is converted and compared
    once: it is kept here meanwhile, so that its identity stays its own."""

    def __init__(self, dtype: type[np.generic], dims: int, what: str) -> None:
        self._dtype, self._dims, self._what = dtype, dims, what
        self._seen: dict[int, tuple[npt.ArrayLike, int]] = {}
        self.distinct = DistinctArrays()

    def number(self, given: npt.ArrayLike) -> int:
        known = self._seen.get(id(given))
        if known is None:
            array = _converted(given, self._dtype)
            if array.ndim != self._dims:
                raise ValueError(f"{self._what} of shape {array.shape}; it needs {_DIMS[self._dims]}")
            known = self._seen[id(given)] = given, self.distinct.add(array)
        return known[1]


_DIMS = {1: "one dimension", 2: "two dimensions"}


def are_no_numbers(given: np.ndarray) -> bool:
    """Whether an array of any shape holds words, dates or complex numbers: NumPy would make numbers of the first two,
    and drop a part of the last."""
    words = given.dtype.kind == "O" and any(isinstance(entry, (str, bytes)) for entry in given.flat)
    return words or given.dtype.kind in "cSUmM"


def _converted(given: npt.ArrayLike, dtype: type[np.generic]) -> np.ndarray:
    found = np.asarray(given)
    if dtype is np.int32 and found.dtype != dtype and found.size:
        # Converted as they are, 1.5 would become 1, and 2**32 class 0.
        with np.errstate(invalid="ignore"):
            whole = found.astype(np.int64) if found.dtype.kind in "iufb" else None
        most = np.iinfo(np.int32).max
        if whole is None or (whole != found).any() or whole.max() > most or whole.min() < -most:
            raise ValueError("a class that is not an integer below 2**31")
    if are_no_numbers(found):
        raise ValueError(f"costs of type {found.dtype}")
    return np.ascontiguousarray(found, dtype)


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(array.reshape(-1) for array in arrays)])


def collect(vectors: Sequence[np.ndarray], edges: Sequence[NetworkEdge]) -> NetworkArrays:
    """The arrays of a network that is given in parts; equal matrices and equal class vectors become one.

    Vectors and classes are copied. Matrices can be large, and are not where they are float64 and contiguous: they must
    not be changed from then on.

    Raises:
      ValueError, TypeError, AttributeError: a part is not an array of numbers, or has another number of dimensions.
    """
    costs = []
    for layer, given in enumerate(vectors):
        vector = np.asarray(given)
        if vector.ndim != 1:
            raise ValueError(f"layer {layer}: cost vector of shape {vector.shape}; it needs one dimension")
        costs.append(_converted(vector, np.float64))
    matrices = _Collector(np.float64, 2, "matrix")
    classes = _Collector(np.int32, 1, "class vector")
    found: list[tuple[int, int, int, int, int]] = []
    for number, edge in enumerate(edges):
        try:
            found.append((operator.index(edge.source), operator.index(edge.target), matrices.number(edge.matrix),
                          classes.number(edge.rows), classes.number(edge.columns)))
        except ValueError as error:
            raise ValueError(f"edge {number} ({edge.source} -> {edge.target}): {error}") from error
    table = np.array(found, np.int64).reshape(-1, 5).T
    shapes = np.array([matrix.shape for matrix in matrices.distinct.arrays], np.int64).reshape(-1, 2)
    return NetworkArrays(
        offsets([len(vector) for vector in costs]), _joined(costs, np.float64),
        tuple(matrix.reshape(-1) for matrix in matrices.distinct.arrays), np.arange(len(shapes)),
        np.zeros(len(shapes), np.int64), shapes,
        _joined(classes.distinct.arrays, np.int32), offsets([len(entry) for entry in classes.distinct.arrays]),
        _as_int32(table[:2]), np.ascontiguousarray(table[2]), np.ascontiguousarray(table[3:]))


def _as_int32(numbers: np.ndarray) -> np.ndarray:
    if numbers.size and max(numbers.max(), -1 - numbers.min()) > np.iinfo(np.int32).max:
        raise ValueError("a layer's index that is not below 2**31")
    return np.ascontiguousarray(numbers, np.int32)
