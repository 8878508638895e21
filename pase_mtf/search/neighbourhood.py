"""What assignments cost, all of it or around one vertex: for searches that change one configuration at a time."""

from __future__ import annotations

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed

__all__ = ["cost_at", "total_cost"]


@compiled
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


@compiled
def total_cost(p: Packed, choice: np.ndarray) -> float:  # pragma: no cover (compiled)
    """The cost of a configuration per vertex."""
    cost = p.constant
    for v in range(len(p.first) - 1):
        cost += p.unary[p.first[v] + choice[v]]
    for e in range(len(p.matrix)):
        r = p.classes[p.classes_at[0, e] + choice[p.ends[0, e]]]
        cost += p.values[p.matrix[e] + r * p.extents[1, e] + p.classes[p.classes_at[1, e] + choice[p.ends[1, e]]]]
    return cost
