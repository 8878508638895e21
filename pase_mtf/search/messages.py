"""Bounds by sequential tree-reweighted message passing (Kolmogorov 2006), on classes instead of configurations.

Every edge has a potential per row class and per column class, taken from the edge and given to its ends; whatever they
are, the sum of the minima of what is left at every vertex and edge bounds every assignment from below. A pass visits
the vertices in order: a vertex takes all it can from the edges behind it, then hands its surplus on in equal parts to
the edges ahead. What a vertex holds above its minimum when it has taken all is a bound as well: a configuration whose
surplus exceeds the distance to the best known assignment is in no better one.
"""

from __future__ import annotations

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed, reduce

__all__ = ["improve", "message_passes", "surplus_of"]


@compiled(fastmath={"nnan", "nsz"})
def _pull(edge: np.ndarray, given: np.ndarray, taken: np.ndarray, rows: bool) -> None:  # pragma: no cover (compiled)
    """The potentials of one side of an edge as large as it allows: taken = min over the other side of edge - given.

    Args:
      edge: float64, its matrix, flat.
      given, taken: the potentials of the other side, and of this one.
      rows: whether this is the side of the rows.
    """
    if rows:
        # Minima side by side: a single running minimum would be a chain that cannot be vectorised.
        width, lanes = len(given), 32
        partial = np.empty(lanes)
        for r in range(len(taken)):
            line = edge[r * width:(r + 1) * width]
            partial[:] = np.inf
            c = 0
            while c + lanes <= width:
                for lane in range(lanes):
                    value = line[c + lane] - given[c + lane]
                    partial[lane] = value if value < partial[lane] else partial[lane]
                c += lanes
            for last in range(c, width):
                value = line[last] - given[last]
                partial[last - c] = value if value < partial[last - c] else partial[last - c]
            least = np.inf
            for lane in range(lanes):
                least = partial[lane] if partial[lane] < least else least
            taken[r] = least
    else:
        width = len(taken)
        taken[:] = np.inf
        for r in range(len(given)):
            line = edge[r * width:(r + 1) * width]
            potential = given[r]
            for c in range(width):
                value = line[c] - potential
                taken[c] = value if value < taken[c] else taken[c]


@compiled
def _add(out: np.ndarray, values: np.ndarray, classes: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds to every configuration the value of its class."""
    for k in range(len(out)):
        out[k] += values[classes[k]]


@compiled
def _hand_on(theta: np.ndarray, delta: float, share: float, classes: np.ndarray, potentials: np.ndarray,
             least: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Moves a share of the surplus of a vertex (theta - delta) to an edge."""
    for r in range(len(potentials)):
        least[r] = np.inf
    for k in range(len(theta)):
        if theta[k] < least[classes[k]]:
            least[classes[k]] = theta[k]
    for r in range(len(potentials)):
        potentials[r] -= share * (least[r] - delta)


@compiled
def _lines(p: Packed, v: int, side: int, choice: np.ndarray, out: np.ndarray) -> None:  # pragma: no cover (compiled)
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
    for _ in range(sweeps):
        changed = False
        for v in range(vertices):
            if first[v + 1] - first[v] == 1:
                continue
            theta = unary[first[v]:first[v + 1]].copy()
            for side in range(2):
                _lines(p, v, side, choice, theta)
            best = choice[v]
            for k in range(len(theta)):
                if theta[k] < theta[best]:
                    best = k
            if best != choice[v]:
                choice[v] = best
                changed = True
        if not changed:
            break
    cost = p.constant
    for v in range(vertices):
        cost += unary[first[v] + choice[v]]
    for e in range(len(p.matrix)):
        r = p.classes[p.classes_at[0, e] + choice[p.ends[0, e]]]
        cost += p.values[p.matrix[e] + r * p.extents[1, e] + p.classes[p.classes_at[1, e] + choice[p.ends[1, e]]]]
    return cost


@compiled
def message_passes(p: Packed, messages: np.ndarray, alive: np.ndarray, surplus: np.ndarray, best: np.ndarray,
                   best_cost: float, margin: float, enough: float, passes: int):  # pragma: no cover (compiled)
    """Runs passes there and back.

    Args:
      p: the network; every entry of every domain can be part of a finite assignment of each edge (see packed.reduce).
      messages: float64 [p.potentials], changed in place.
      alive: bool [configurations]: cleared where a configuration cannot be part of an assignment cheaper than
        best_cost + margin.
      surplus: float64 [configurations], filled in: how much more than the bound every assignment costs that holds the
        configuration.
      best: int64 [vertices], the best assignment known; replaced in place when a cheaper one is found.
      best_cost: its cost (inf: none known).
      margin: how much cheaper than best_cost an assignment must be to matter: negative, or 0.
      enough: stop once best_cost - bound is at most this.
      passes: at most so many.

    Returns:
      (lower bound, cost of `best`, passes made).
    """
    first, unary, matrix, extents, values = p.first, p.unary, p.matrix, p.extents, p.values
    classes, classes_at, potentials_at = p.classes, p.classes_at, p.potentials_at
    adjacent_at, adjacent = p.adjacent_at, p.adjacent
    vertices = len(first) - 1
    widest = 1
    for e in range(len(matrix)):
        widest = max(widest, extents[0, e], extents[1, e])
    least = np.empty(widest)
    minimum, level = np.zeros(vertices), np.zeros(vertices)
    choice = np.zeros(vertices, np.int64)
    bound, known = -np.inf, False
    made = 0
    for half in range(2 * passes):
        # The side at which a vertex stands on the edges behind it, and on those ahead.
        behind, ahead = 1 - half % 2, half % 2
        running, rest = p.constant, minimum.sum()
        for step in range(vertices):
            v = step if behind == 1 else vertices - 1 - step
            size = first[v + 1] - first[v]
            theta = unary[first[v]:first[v + 1]].copy()
            score = theta.copy()
            _lines(p, v, behind, choice, score)
            for side in range(2):
                for position in range(adjacent_at[side, v], adjacent_at[side, v + 1]):
                    e = adjacent[side, position]
                    place, other = potentials_at[side, e], potentials_at[1 - side, e]
                    if side == behind:
                        _pull(values[matrix[e]:matrix[e] + extents[0, e] * extents[1, e]],
                              messages[other:other + extents[1 - side, e]],
                              messages[place:place + extents[side, e]], side == 0)
                    own = classes[classes_at[side, e]:classes_at[side, e] + size]
                    _add(theta, messages[place:place + extents[side, e]], own)
                    if side == ahead:
                        _add(score, messages[place:place + extents[side, e]], own)
            delta, pick = np.inf, 0
            for k in range(size):
                delta = min(delta, theta[k])
                if score[k] < score[pick]:
                    pick = k
            choice[v] = pick
            running += delta
            rest -= minimum[v]
            minimum[v] = delta
            level[v] = running + rest  # the bound at this moment
            for k in range(size):
                surplus[first[v] + k] = theta[k] - delta
            degree = (adjacent_at[0, v + 1] - adjacent_at[0, v], adjacent_at[1, v + 1] - adjacent_at[1, v])
            share = 1.0 / max(degree[0], degree[1], 1)
            for position in range(adjacent_at[ahead, v], adjacent_at[ahead, v + 1]):
                e = adjacent[ahead, position]
                place = potentials_at[ahead, e]
                _hand_on(theta, delta, share, classes[classes_at[ahead, e]:classes_at[ahead, e] + size],
                         messages[place:place + extents[ahead, e]], least)
        cost = improve(p, choice, 2 * ahead)
        if cost < best_cost:
            best_cost = cost
            best[:] = choice
        if known:
            for v in range(vertices):
                room = best_cost + margin - level[v]
                for position in range(first[v], first[v + 1]):
                    if surplus[position] > room:
                        alive[position] = False
        bound, known = max(bound, running), True
        made += ahead
        if best_cost - bound <= enough:
            break
    return bound, best_cost, made


def surplus_of(p: Packed, passes: int = 6) -> tuple[float, np.ndarray]:
    """How expensive every configuration makes an assignment.

    Args:
      p: the network.
      passes: of message passing.

    Returns:
      a lower bound, and float64 [configurations], how much more than it every assignment costs that holds the
      configuration (inf: it is in no finite one).

    Raises:
      InfeasibleError: no finite assignment can exist.
    """
    network, messages, *_ = reduce(p, np.ones(len(p.unary), bool))
    keep, own = np.ones(len(network.unary), bool), np.zeros(len(network.unary))
    nobody = np.zeros(network.vertices, np.int64)
    bound, *_ = message_passes(network, messages, keep, own, nobody, -np.inf, 0.0, -np.inf, passes)
    # The surplus of a pass is counted from a bound at least as good as that before it.
    message_passes(network, messages, keep, own, nobody, -np.inf, 0.0, -np.inf, 1)
    surplus = np.full(len(p.unary), np.inf)
    owner = np.repeat(np.arange(network.vertices), network.domains)
    surplus[p.first[owner] + network.original] = own
    return bound, surplus
