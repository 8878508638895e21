"""Which configurations potentials leave to whoever looks at nothing else, such as the checker of certificates.

A configuration is left out if the bound exceeds a limit with what its vertex costs with it, and with every edge there
and the vertex beyond. That is not what a pass counts: its reduced costs are those at the moment of a visit, and the
potentials go on changing.
"""

from __future__ import annotations

import numpy as np

from pase_mtf.search.budget import Budget
from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.packed import Packed, Potentials
from pase_mtf.search.pulls import pull

__all__ = ["flags_left_over", "left_over"]

# Beyond a limit by less than this part of it, a configuration is kept: sums are rounded.
_ROUNDING = 1e-12


@compiled
def _at_vertices(p: Packed, messages: np.ndarray, messages_at: np.ndarray, active: np.ndarray
                 ) -> tuple[float, np.ndarray]:  # pragma: no cover (compiled)
    """What the cheapest active configurations of all vertices cost together, and float64 [configurations], what
    each costs above its vertex's cheapest."""
    theta, total = p.unary.copy(), p.constant
    for e in range(len(p.matrix)):
        for side in range(2):
            v, at, begin = p.ends[side, e], messages_at[side, e], p.classes_at[side, e]
            for k in range(p.first[v + 1] - p.first[v]):
                theta[p.first[v] + k] += messages[at + p.classes[begin + k]]
    for v in range(len(p.first) - 1):
        least = np.inf
        for k in range(p.first[v], p.first[v + 1]):
            if active[k]:
                least = min(least, theta[k])
        total += least
        theta[p.first[v]:p.first[v + 1]] -= least
    return total, theta


@compiled
def _leave_out(p: Packed, messages: np.ndarray, messages_at: np.ndarray, limit: float, active: np.ndarray, end: float
               ) -> bool:  # pragma: no cover (compiled)
    """Clears what is left out by what is active. Returns whether anything was: nothing once the clock shows `end`."""
    bound, theta = _at_vertices(p, messages, messages_at, active)
    above, widest = theta.copy(), 1
    for e in range(len(p.matrix)):
        widest = max(widest, p.extents[0, e], p.extents[1, e])
    given, taken = np.empty(widest), np.empty(widest)
    for e in range(len(p.matrix)):
        if end < np.inf and seconds_now() > end:
            return False
        rows, columns = p.extents[0, e], p.extents[1, e]
        edge, least = p.values[p.matrix[e]:p.matrix[e] + rows * columns], np.inf
        # A vertex beyond counts once, whatever edges lead to it: those between the same two come one after another.
        again = e > 0 and p.ends[0, e] == p.ends[0, e - 1] and p.ends[1, e] == p.ends[1, e - 1]
        # The edge alone; then both ends, with the vertex beyond.
        for turn in range(3):
            side, beyond = max(turn - 1, 0), min(turn, 1)
            other = 1 - side
            u, v = p.ends[other, e], p.ends[side, e]
            own, theirs = messages_at[side, e], messages_at[other, e]
            have, get = given[:p.extents[other, e]], taken[:p.extents[side, e]]
            have[:] = -np.inf
            for k in range(p.first[u + 1] - p.first[u]):
                if active[p.first[u] + k]:
                    c = p.classes[p.classes_at[other, e] + k]
                    have[c] = max(have[c], messages[theirs + c] - (0.0 if again else beyond * theta[p.first[u] + k]))
            pull(edge, have, get, side == 0)
            for k in range(p.first[v + 1] - p.first[v]):
                c = p.classes[p.classes_at[side, e] + k]
                cost = get[c] - messages[own + c]
                if beyond:
                    above[p.first[v] + k] += cost - least
                elif active[p.first[v] + k]:
                    least = min(least, cost)
        bound += least
    most, some = limit - bound + _ROUNDING * max(abs(limit), abs(bound)), False
    for k in range(len(active)):
        if active[k] and above[k] > most:
            active[k], some = False, True
    return some


def flags_left_over(p: Packed, potentials: Potentials, limit: float, rounds: int, active: np.ndarray | None = None,
                    budget: Budget | None = None) -> np.ndarray:
    """Which configurations potentials alone leave.

    Args:
      p: the network.
      potentials: of it.
      limit: a cost; what is only in assignments that cost more is left out, as far as the potentials show it.
      rounds: how often to look again at what is left; one takes about as long as a pass in double precision.
      active: bool [configurations], those to begin with; all if not given.
      budget: time that it may take; no limit if not given.

    Returns:
      bool [configurations].

    Raises:
      TimeoutError: the time is over.
    """
    budget = budget or Budget()
    left, end = np.ones(len(p.unary), bool) if active is None else active.copy(), seconds_now() + budget.seconds
    while rounds and _leave_out(p, potentials.values, potentials.at, limit, left, end):
        rounds -= 1
        if not np.logical_or.reduceat(left, p.first[:-1]).all():
            break
    budget.check_time()
    return left


def left_over(p: Packed, potentials: Potentials, limit: float, rounds: int, budget: Budget | None = None) -> np.ndarray:
    """How many configurations of every vertex potentials alone leave; see flags_left_over.

    Returns:
      int64 [vertices].
    """
    left = flags_left_over(p, potentials, limit, rounds, None, budget)
    return np.add.reduceat(left, p.first[:-1], dtype=np.int64)
