"""What assignments cost, all of it or around one vertex: for searches that change one configuration at a time."""

from __future__ import annotations

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed

__all__ = ["cost_at", "improve", "lines", "total_cost"]


@compiled(allocates=False)
def cost_at(p: Packed, v: int, k: int, choice: np.ndarray) -> float:  # pragma: no cover (compiled)
    """What depends on the configuration of one vertex.

    Args:
      p: the network.
      v, k: the vertex, and the configuration that it is to have.
      choice: int64 [vertices], the configurations of all others.
    """
    cost: float = p.unary[p.first[v] + k]
    for side in range(2):
        for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
            e = p.adjacent[side, position]
            own = p.classes[p.classes_at[side, e] + k]
            other = p.classes[p.classes_at[1 - side, e] + choice[p.ends[1 - side, e]]]
            r, c = (own, other) if side == 0 else (other, own)
            cost += p.values[p.matrix[e] + r * p.extents[1, e] + c]
    return cost


@compiled(allocates=False)
def total_cost(p: Packed, choice: np.ndarray) -> float:  # pragma: no cover (compiled)
    """The cost of a configuration per vertex."""
    cost = p.constant
    for v in range(len(p.first) - 1):
        cost += p.unary[p.first[v] + choice[v]]
    for e in range(len(p.matrix)):
        r = p.classes[p.classes_at[0, e] + choice[p.ends[0, e]]]
        cost += p.values[p.matrix[e] + r * p.extents[1, e] + p.classes[p.classes_at[1, e] + choice[p.ends[1, e]]]]
    return cost


@compiled(allocates=False)
def lines(p: Packed, v: int, side: int, choice: np.ndarray, out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds what the edges that have v at this side cost, given the choice at their other ends."""
    matrix, ends, extents, classes, classes_at = p.matrix, p.ends, p.extents, p.classes, p.classes_at
    adjacent, values = p.adjacent, p.values
    for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
        e = adjacent[side, position]
        fixed = classes[classes_at[1 - side, e] + choice[ends[1 - side, e]]]
        begin = classes_at[side, e]
        start, step = matrix[e] + fixed, extents[1, e]
        if side == 1:
            start, step = matrix[e] + fixed * extents[1, e], np.int64(1)
        for k in range(len(out)):
            out[k] += values[start + step * classes[begin + k]]


@compiled
def improve(p: Packed, choice: np.ndarray, sweeps: int) -> float:  # pragma: no cover (compiled)
    """Gives every vertex the best configuration for its neighbours', until nothing improves. Returns the cost."""
    first, unary = p.first, p.unary
    vertices = len(first) - 1
    fresh = np.zeros(vertices, np.bool_)  # has the best for its neighbours as they are
    for _ in range(sweeps):
        changed = False
        for v in range(vertices):
            if fresh[v] or first[v + 1] - first[v] == 1:
                continue
            fresh[v] = True
            theta = unary[first[v]:first[v + 1]].copy()
            for side in range(2):
                lines(p, v, side, choice, theta)
            best = choice[v]
            for k in range(len(theta)):
                if theta[k] < theta[best]:
                    best = k
            if best != choice[v]:
                choice[v] = best
                changed = True
                for side in range(2):
                    for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
                        fresh[p.ends[1 - side, p.adjacent[side, position]]] = False
        if not changed:
            break
    return total_cost(p, choice)
