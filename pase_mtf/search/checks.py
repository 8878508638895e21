"""What every search relies on in a cost network: looked at in one go; who finds something wrong looks where it is."""

from __future__ import annotations

import math

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.arrays import NetworkArrays
from pase_mtf.search.compiled import compiled
from pase_mtf.search.matrices import Matrices, matrix

__all__ = ["check"]

# Sums of so many of them stay far from where float64 ends.
_MOST_COST = 1e290


def check(arrays: NetworkArrays) -> None:
    """Checks a network.

    Raises:
      UsageError: an empty domain, a NaN, -inf or a cost too large to add up, an index out of range, arrays that do
        not fit each other.
      InfeasibleError: a layer or an edge that has no finite entry, so that no assignment is finite.
    """
    matrices = Matrices.of(arrays.values, arrays.matrix_in, arrays.matrix_at, arrays.shapes)
    if not _sound(arrays.first, arrays.unary, matrices, arrays.classes, arrays.classes_at, arrays.ends,
                  arrays.edge_matrix, arrays.edge_classes):
        _check_vectors(arrays)
        _check_edges(arrays)


@compiled
def _finite(costs: np.ndarray) -> bool:  # pragma: no cover (compiled)
    """Whether all costs can be added up, or are infinite, and at least one, unless there are none, is not."""
    count = 0
    for cost in costs:
        if not cost >= -_MOST_COST or _MOST_COST < cost < np.inf:
            return False
        count += cost < np.inf
    return count > 0 or len(costs) == 0


@compiled
def _fits(classes: np.ndarray, count: int, bound: int) -> bool:  # pragma: no cover (compiled)
    """Whether there is a class from 0 up to a bound for so many configurations."""
    for c in classes:
        if not 0 <= c < bound:
            return False
    return len(classes) == count


@compiled
def _sound(first: np.ndarray, unary: np.ndarray, matrices: Matrices, classes: np.ndarray, classes_at: np.ndarray,
           ends: np.ndarray, edge_matrix: np.ndarray, edge_classes: np.ndarray) -> bool:  # pragma: no cover (compiled)
    """Whether there is nothing for `check` to say; for the arguments see `NetworkArrays`."""
    layers, known = len(first) - 1, np.full((2, len(classes_at)), -1)
    for v in range(layers):
        if first[v + 1] <= first[v] or not _finite(unary[first[v]:first[v + 1]]):
            return False
    for m in range(len(matrices.at)):  # of no edge, too: the least of all costs tells how far sums may be wrong
        if not _finite(matrix(matrices, m).reshape(-1)):
            return False
    for e in range(len(edge_matrix)):
        m = edge_matrix[e]
        for side in range(2):
            v, vector = ends[side, e], edge_classes[side, e]
            if not 0 <= v < layers:
                return False
            count, bound = first[v + 1] - first[v], matrices.shapes[m, side]
            if known[0, vector] != count or known[1, vector] != bound:  # not what was looked at the last time
                if not _fits(classes[classes_at[vector]:classes_at[vector + 1]], count, bound):
                    return False
                known[0, vector], known[1, vector] = count, bound
    return True


def _check_vectors(arrays: NetworkArrays) -> None:
    for layer, vector in enumerate(arrays.vectors()):
        where = f"layer {layer}"
        if not len(vector):
            raise UsageError(f"{where}: cost vector of shape {vector.shape}; every layer needs a configuration")
        if _least_cost(vector, where) == math.inf:
            raise InfeasibleError(f"{where}: every configuration is infinite; allow at least one")


def _check_edges(arrays: NetworkArrays) -> None:
    """Every distinct array once."""
    vectors, matrices, classes = arrays.vectors(), arrays.matrices(), arrays.class_vectors()
    checked_matrices: set[int] = set()
    checked_classes: set[tuple[int, int]] = set()
    for number, (source, target, held, rows, columns) in enumerate(arrays.edges()):
        where = f"edge {number} ({source} -> {target})"
        for end in (source, target):
            if not 0 <= end < len(vectors):
                raise UsageError(f"{where}: no layer {end}; layers are 0 to {len(vectors) - 1}")
        costs = matrices[held]
        if held not in checked_matrices:
            if _least_cost(costs, where) == math.inf and costs.size:
                raise InfeasibleError(f"{where}: every pair of configurations is infinite; allow at least one")
            checked_matrices.add(held)
        for name, vector, end, bound in (("rows", rows, source, costs.shape[0]),
                                         ("columns", columns, target, costs.shape[1])):
            if classes[vector].shape != vectors[end].shape:
                raise UsageError(f"{where}: {name} of shape {classes[vector].shape} for the "
                                 f"{len(vectors[end])} configurations of layer {end}; "
                                 "give one class per configuration")
            if (vector, bound) not in checked_classes:
                least, most = classes[vector].min(), classes[vector].max()
                if least < 0 or most >= bound:
                    raise UsageError(f"{where}: {name} has class {least if least < 0 else most}; "
                                     f"the matrix has 0 to {bound - 1}")
                checked_classes.add((vector, bound))
    for held, costs in enumerate(matrices):
        if held not in checked_matrices:
            _least_cost(costs, f"matrix {held}, of no edge")


def _least_cost(array: np.ndarray, where: str) -> float:
    """The least of some costs (+inf of none), each of which has to be one that can be added up."""
    least, most = float(array.min(initial=math.inf)), float(array.max(initial=-math.inf))
    if least >= -_MOST_COST and most <= _MOST_COST:  # NaN propagates through both
        return least
    if not least > -math.inf:
        wrong = "NaN" if np.isnan(array).any() else "-inf"
        raise UsageError(f"{where}: a cost is {wrong}; costs are numbers, or +inf for what is forbidden")
    largest = max(-least, array.max(where=array < math.inf, initial=0.0))
    if largest > _MOST_COST:
        raise UsageError(f"{where}: a cost of {largest:.4g}: costs that large add up to more than a float64 holds; "
                         f"count in a larger unit (at most {_MOST_COST:.0e} each), and forbid with +inf")
    return least
