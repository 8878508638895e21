"""A cost network as the checker of certificates sees it: flat arrays, checked, with parallel edges side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from pase_mtf.errors import PaseError
from pase_mtf.search.checked_bounds import HUGE, MOST, FlatNetwork, add_down
from pase_mtf.search.network import CostNetwork

__all__ = ["CertificateError", "flatten"]

class CertificateError(PaseError):
    """A certificate that does not prove what it claims."""


class _Sides:
    """The groups of the sides of pairs, each list of class vectors once."""

    def __init__(self, network: CostNetwork) -> None:
        arrays = network.arrays
        self._vectors, self._sizes = arrays.class_vectors(), network.sizes
        widest = int(arrays.shapes.max(initial=0))
        self.groups, self.classes = [arrays.classes], [np.arange(widest)]
        self._groups_end, self._classes_end = len(arrays.classes), widest
        self._begins = arrays.classes_at.tolist()
        self._known: dict[Any, tuple[int, int, tuple[int, ...]]] = {}

    def add(self, layer: int, vectors: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        """Where the groups of a layer's configurations begin, how many there are, and where the classes of the groups
        begin under every edge, given the class vector of the layer under each and the classes of its matrix."""
        key = self._sizes[layer], vectors, extents
        if key not in self._known:
            given = [self._vectors[vector] for vector in vectors]
            for vector, extent in zip(given, extents, strict=True):
                if vector.shape != (self._sizes[layer],) or vector.min() < 0 or vector.max() >= extent:
                    raise CertificateError(f"layer {layer}: classes that an edge does not have; the network is damaged")
            self._known[key] = self._grouped(given) if len(given) > 1 else (self._begins[vectors[0]], extents[0], (0,))
        return self._known[key]

    def _grouped(self, vectors: list[np.ndarray]) -> tuple[int, int, tuple[int, ...]]:
        classes, groups = np.unique(np.stack(vectors), axis=1, return_inverse=True)
        self.groups.append(groups.reshape(-1).astype(np.int32))
        self.classes += list(classes.astype(np.int64))
        begin, first, count = self._groups_end, self._classes_end, classes.shape[1]
        self._groups_end, self._classes_end = begin + len(self.groups[-1]), first + classes.size
        return begin, count, tuple(range(first, first + classes.size, count))


def flatten(network: CostNetwork) -> FlatNetwork:
    """The network for the checker.

    Raises:
      CertificateError: it is damaged, or has costs that the checker cannot add.
    """
    arrays, layers = network.arrays, len(network.vectors)
    matrices, vectors = arrays.matrices(), arrays.class_vectors()
    for costs in (arrays.unary, *matrices):
        if not costs.min(initial=0.0) >= -MOST:
            raise CertificateError(f"a cost that is NaN or below {-MOST:g}; nothing is proven of such a network")
    unary, sides, shapes = np.minimum(arrays.unary, HUGE), _Sides(network), arrays.shapes.tolist()
    pairs: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
    for source, target, matrix, rows, columns in arrays.edges():
        if not (0 <= source < layers and 0 <= target < layers):
            raise CertificateError(f"an edge from layer {source} to {target}; the network is damaged")
        if source == target:
            for vector, extent in zip((rows, columns), shapes[matrix], strict=True):
                sides.add(source, (vector,), (extent,))
            own = slice(arrays.first[source], arrays.first[source + 1])
            loop = np.minimum(matrices[matrix][vectors[rows], vectors[columns]], HUGE)
            unary[own] = np.minimum(add_down(unary[own], loop), HUGE)
        elif (target, source) in pairs:
            pairs[target, source].append((matrix, columns, rows, True))
        else:
            pairs.setdefault((source, target), []).append((matrix, rows, columns, False))
    return _laid_out(network, unary, sides, pairs)


def _laid_out(network: CostNetwork, unary: np.ndarray, sides: _Sides,
              pairs: dict[tuple[int, int], list[tuple[int, int, int, bool]]]) -> FlatNetwork:
    arrays, kinds = network.arrays, dict[Any, int]()
    starts = np.cumsum([0, *(len(values) for values in arrays.values)])[arrays.matrix_in] + arrays.matrix_at
    begins, shapes = starts.tolist(), arrays.shapes.tolist()
    per_pair, per_edge = [], []
    for ends, edges in pairs.items():
        found = []
        for side in (0, 1):
            extents = tuple(shapes[matrix][side ^ turned] for matrix, _, _, turned in edges)
            found.append(sides.add(ends[side], tuple(edge[1 + side] for edge in edges), extents))
        (rows_at, rows, row_classes), (columns_at, columns, column_classes) = found
        kind = kinds.setdefault((*found, *((edge[0], edge[3]) for edge in edges)), len(kinds))
        per_pair.append((*ends, rows_at, columns_at, rows, columns, len(edges), kind))
        per_edge += [(begins[matrix], *((1, shapes[matrix][1]) if turned else (shapes[matrix][1], 1)), *classes)
                     for (matrix, _, _, turned), *classes in zip(edges, row_classes, column_classes, strict=True)]
    pair = np.array(per_pair, np.int64).reshape(-1, 8).T.copy()
    edge = np.array(per_edge, np.int64).reshape(-1, 5).T.copy()
    slots = np.cumsum([0, *pair[4:6].T.ravel().tolist()])
    values = arrays.values[0] if len(arrays.values) == 1 else np.concatenate([np.zeros(0), *arrays.values])
    first, values = arrays.first.view(), values.view()
    first.flags.writeable = values.flags.writeable = False  # they may be that; what is compiled differs
    return FlatNetwork(
        first, unary, values, pair[:2], np.concatenate(sides.groups), pair[2:4],
        np.stack([slots[::2], np.append(slots[1::2], slots[-1])]), pair[4:6], np.cumsum([0, *pair[6].tolist()]),
        edge[0], edge[1:3], np.concatenate(sides.classes), edge[3:5], pair[7])
