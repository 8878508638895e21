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
def lines(p: Packed, v: int, side: int, choice: np.ndarray, some: np.ndarray, out: np.ndarray
          ) -> None:  # pragma: no cover (compiled)
    """Adds what the edges that have v at this side cost with some of its configurations, given the choice at their
    other ends."""
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
            out[k] += values[start + step * classes[begin + some[k]]]


@compiled
def improve(p: Packed, choice: np.ndarray, sweeps: int, among: np.ndarray) -> float:  # pragma: no cover (compiled)
    """Gives every vertex the best configuration for its neighbours', until nothing improves, in so many sweeps at most.
    Configurations that are not `among` those that matter (bool [configurations]) are not tried. Returns the cost."""
    first, unary = p.first, p.unary
    vertices, most = len(first) - 1, 0
    for v in range(vertices):
        most = max(most, first[v + 1] - first[v])
    some, theta = np.empty(most + 1, np.int64), np.empty(most + 1)
    fresh = np.zeros(vertices, np.bool_)  # has the best for its neighbours as they are
    for _ in range(sweeps):
        changed = False
        for v in range(vertices):
            if fresh[v] or first[v + 1] - first[v] == 1:
                continue
            fresh[v] = True
            count = 1
            some[0], theta[0] = choice[v], unary[first[v] + choice[v]]
            for k in range(first[v + 1] - first[v]):
                if among[first[v] + k]:
                    some[count], theta[count] = k, unary[first[v] + k]
                    count += 1
            for side in range(2):
                lines(p, v, side, choice, some[:count], theta[:count])
            least = 0
            for k in range(count):
                if theta[k] < theta[least]:
                    least = k
            best = some[least]
            if best != choice[v]:
                choice[v] = best
                changed = True
                for side in range(2):
                    for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
                        fresh[p.ends[1 - side, p.adjacent[side, position]]] = False
        if not changed:
            break
    return total_cost(p, choice)
