"""Bounds by sequential tree-reweighted message passing (Kolmogorov 2006), on classes instead of configurations.

Every edge has a potential per row class and per column class, taken from the edge and given to its ends; whatever they
are, the sum of the minima of what is left at every vertex and edge bounds every assignment from below. A pass visits
the vertices in order: a vertex takes all it can from the edges behind it, then hands its surplus on in equal parts to
the edges ahead. What a vertex holds above its minimum when it has taken all is a bound as well: a configuration whose
surplus exceeds the distance to the best known assignment is in no better one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pase_mtf.search.packed import Packed

__all__ = ["improve", "message_passes"]


@njit(cache=True, fastmath={"nnan", "nsz"})
def _pull_columns(p: Packed, e: int, messages: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Column potentials as large as the edge allows."""
    height, width, above, below, start = p.height[e], p.width[e], p.above[e], p.below[e], p.matrix[e]
    for c in range(width):
        messages[below + c] = np.inf
    out = messages[below:below + width]
    for r in range(height):
        taken = messages[above + r]
        line = p.values[start + r * width:start + (r + 1) * width]
        for c in range(width):
            value = line[c] - taken
            out[c] = value if value < out[c] else out[c]


@njit(cache=True, fastmath={"nnan", "nsz"})
def _pull_rows(p: Packed, e: int, messages: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Row potentials as large as the edge allows."""
    height, width, above, below, start = p.height[e], p.width[e], p.above[e], p.below[e], p.matrix[e]
    given = messages[below:below + width]
    for r in range(height):
        least = np.inf
        line = p.values[start + r * width:start + (r + 1) * width]
        for c in range(width):
            value = line[c] - given[c]
            least = value if value < least else least
        messages[above + r] = least


@njit(cache=True)
def improve(p: Packed, choice: np.ndarray, sweeps: int, theta: np.ndarray) -> float:  # pragma: no cover (compiled)
    """Gives every vertex the best configuration for its neighbours', until nothing improves. Returns the cost."""
    vertices = len(p.first) - 1
    for _sweep in range(sweeps):
        changed = False
        for v in range(vertices):
            start, size = p.first[v], p.first[v + 1] - p.first[v]
            if size == 1:
                continue
            for k in range(size):
                theta[k] = p.unary[start + k]
            for position in range(p.incoming_start[v], p.incoming_start[v + 1]):
                e = p.incoming[position]
                line = p.matrix[e] + p.classes[p.rows[e] + choice[p.source[e]]] * np.int64(p.width[e])
                for k in range(size):
                    theta[k] += p.values[line + p.classes[p.columns[e] + k]]
            for position in range(p.outgoing_start[v], p.outgoing_start[v + 1]):
                e = p.outgoing[position]
                line = p.matrix[e] + p.classes[p.columns[e] + choice[p.target[e]]]
                for k in range(size):
                    theta[k] += p.values[line + p.classes[p.rows[e] + k] * np.int64(p.width[e])]
            best = choice[v]
            for k in range(size):
                if theta[k] < theta[best]:
                    best = k
            if best != choice[v]:
                choice[v] = best
                changed = True
        if not changed:
            break
    cost = p.constant
    for v in range(vertices):
        cost += p.unary[p.first[v] + choice[v]]
    for e in range(len(p.source)):
        cost += p.values[p.matrix[e] + p.classes[p.rows[e] + choice[p.source[e]]] * np.int64(p.width[e])
                         + p.classes[p.columns[e] + choice[p.target[e]]]]
    return cost


@njit(cache=True)
def message_passes(p: Packed, messages: np.ndarray, alive: np.ndarray, surplus: np.ndarray, best: np.ndarray,
                   best_cost: float, margin: float, target: float, passes: int):  # pragma: no cover (compiled)
    """Runs passes there and back.

    Args:
      p: the network; every entry of every domain can be part of a finite assignment of each edge (see packed.reduce).
      messages: float64 [p.messages], changed in place.
      alive: bool [configurations]: cleared where a configuration cannot be part of an assignment cheaper than
        best_cost + margin.
      surplus: float64 [configurations], filled in: how much more than the bound every assignment costs that holds the
        configuration.
      best: int64 [vertices], the best assignment known; replaced in place when a cheaper one is found.
      best_cost: its cost (inf: none known).
      margin: how much cheaper than best_cost an assignment must be to matter: negative, or 0.
      target: stop once best_cost - bound is at most this.
      passes: at most so many.

    Returns:
      (lower bound, cost of `best`, passes made).
    """
    vertices = len(p.first) - 1
    largest, widest = 0, 0
    for v in range(vertices):
        largest = max(largest, p.first[v + 1] - p.first[v])
    for e in range(len(p.source)):
        widest = max(widest, p.height[e], p.width[e])
    theta, score, least = np.empty(largest), np.empty(largest), np.empty(widest)
    minimum = np.zeros(vertices)
    choice = np.zeros(vertices, np.int64)
    bound, known = -np.inf, False
    made = 0
    for half in range(2 * passes):
        forward = half % 2 == 0
        running = p.constant
        ahead = 0.0
        if known:
            for v in range(vertices):
                ahead += minimum[v]
        for step in range(vertices):
            v = step if forward else vertices - 1 - step
            start, size = p.first[v], p.first[v + 1] - p.first[v]
            incoming, outgoing = p.incoming_start[v], p.outgoing_start[v]
            incoming_end, outgoing_end = p.incoming_start[v + 1], p.outgoing_start[v + 1]
            for k in range(size):
                theta[k] = score[k] = p.unary[start + k]
            for position in range(incoming, incoming_end):
                e = p.incoming[position]
                if forward:
                    _pull_columns(p, e, messages)
                    line = p.matrix[e] + p.classes[p.rows[e] + choice[p.source[e]]] * np.int64(p.width[e])
                for k in range(size):
                    c = p.classes[p.columns[e] + k]
                    theta[k] += messages[p.below[e] + c]
                    score[k] += p.values[line + c] if forward else messages[p.below[e] + c]
            for position in range(outgoing, outgoing_end):
                e = p.outgoing[position]
                if not forward:
                    _pull_rows(p, e, messages)
                    line = p.matrix[e] + p.classes[p.columns[e] + choice[p.target[e]]]
                for k in range(size):
                    r = p.classes[p.rows[e] + k]
                    theta[k] += messages[p.above[e] + r]
                    score[k] += messages[p.above[e] + r] if forward else p.values[line + r * np.int64(p.width[e])]
            delta, pick = np.inf, 0
            for k in range(size):
                delta = min(delta, theta[k])
                if score[k] < score[pick]:
                    pick = k
            choice[v] = pick
            running += delta
            ahead -= minimum[v]
            minimum[v] = delta
            for k in range(size):
                surplus[start + k] = theta[k] - delta
            if known:
                room = best_cost + margin - (running + ahead)
                for k in range(size):
                    if surplus[start + k] > room:
                        alive[start + k] = False
            share = 1.0 / max(incoming_end - incoming, outgoing_end - outgoing, 1)
            for position in range(outgoing if forward else incoming, outgoing_end if forward else incoming_end):
                e = p.outgoing[position] if forward else p.incoming[position]
                begin = p.rows[e] if forward else p.columns[e]
                potential = p.above[e] if forward else p.below[e]
                count = p.height[e] if forward else p.width[e]
                for r in range(count):
                    least[r] = np.inf
                for k in range(size):
                    r = p.classes[begin + k]
                    least[r] = min(least[r], theta[k])
                for r in range(count):
                    messages[potential + r] -= share * (least[r] - delta)
        bound, known = max(bound, running), True
        cost = improve(p, choice, 2, theta)
        if cost < best_cost:
            best_cost = cost
            best[:] = choice
        if not forward:
            made += 1
        if best_cost - bound <= target:
            break
    return bound, best_cost, made
