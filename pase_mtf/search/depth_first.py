"""Depth-first branch and bound over small networks, compiled: the bound of every node comes from a pass of message
passing (messages.py) that goes on from where its parent's ended.

What has been decided is folded into its neighbours at once, and a configuration whose reduced cost closes the gap is
removed, so nodes get smaller on the way down. A node takes microseconds, where a part of the branch and bound in
branch_and_bound.py takes a millisecond and more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.packed import Packed

__all__ = ["Descent", "descend", "descent_bytes"]

# Matrix entries that are read before the caller is told: a fraction of a second, in which nothing can interrupt it.
_SLICE = float(1 << 27)


class _Network(NamedTuple):
    """A network with a matrix over configurations per edge.

    Attributes:
      first, unary: as in Packed.
      ends, matrix: int64 [2, edges], int64 [edges]: as in Packed.
      values: float64, the matrices.
      potentials_at: int64 [2, edges], where the potentials of an end's configurations begin.
      near_at, near: int64: where the edges of a vertex begin, and twice their number, plus its side.
    """

    first: np.ndarray
    unary: np.ndarray
    ends: np.ndarray
    matrix: np.ndarray
    values: np.ndarray
    potentials_at: np.ndarray
    near_at: np.ndarray
    near: np.ndarray


class _Levels(NamedTuple):
    """What is known on every level of the way down; a row per level.

    Attributes:
      active: bool [levels, configurations].
      unary: float64 [levels, configurations], with all that has been decided folded in.
      potentials: float64 [levels, potentials].
      folded: bool [levels, vertices]: decided.
      constant: float64 [levels], cost of what has been decided.
    """

    active: np.ndarray
    unary: np.ndarray
    potentials: np.ndarray
    folded: np.ndarray
    constant: np.ndarray


class Descent(NamedTuple):
    """What came of it.

    Attributes:
      complete: nothing cheaper is left.
      cost: of the best assignment known.
      choice: int64 [vertices], that assignment if it is a new one; else empty.
      nodes: how many were looked at.
    """

    complete: bool
    cost: float
    choice: np.ndarray
    nodes: int


@compiled
def _expanded(p: Packed, at: np.ndarray, size: int) -> np.ndarray:  # pragma: no cover (compiled)
    """The matrices over configurations."""
    values = np.empty(size)
    for e in range(len(p.matrix)):
        u, v = p.ends[0, e], p.ends[1, e]
        place = at[e]
        for i in range(p.first[u + 1] - p.first[u]):
            line = p.matrix[e] + p.classes[p.classes_at[0, e] + i] * p.extents[1, e]
            for j in range(p.first[v + 1] - p.first[v]):
                values[place] = p.values[line + p.classes[p.classes_at[1, e] + j]]
                place += 1
    return values


@compiled(allocates=False)
def _pull(n: _Network, e: int, side: int, given: np.ndarray, other_active: np.ndarray, active: np.ndarray,
          taken: np.ndarray) -> None:  # pragma: no cover (compiled)
    """The potentials of one side of an edge as large as the active configurations of the other allow."""
    height, width = (len(taken), len(given)) if side == 0 else (len(given), len(taken))
    edge = n.values[n.matrix[e]:n.matrix[e] + height * width]
    if side == 0:
        for i in range(height):
            if active[i]:
                least = np.inf
                for j in range(width):
                    if other_active[j]:
                        least = min(least, edge[i * width + j] - given[j])
                taken[i] = least
        return
    taken[:] = np.inf
    for i in range(height):
        if other_active[i]:
            for j in range(width):
                taken[j] = min(taken[j], edge[i * width + j] - given[i])


@compiled(allocates=False)
def _sweep(n: _Network, s: _Levels, d: int, forward: bool, known: bool, limit: float, minimum: np.ndarray,
           reduced: np.ndarray) -> float:  # pragma: no cover (compiled)
    """Half a pass over what is undecided on a level, as messages.py makes it. Returns the bound: inf where nothing
    below the limit is left. Once minima are known, configurations are removed that only costs above the limit have."""
    vertices, running, rest = len(n.first) - 1, s.constant[d], 0.0
    if known:
        for v in range(vertices):
            if not s.folded[d, v]:
                rest += minimum[v]
    for step in range(vertices):
        v = step if forward else vertices - 1 - step
        if s.folded[d, v]:
            continue
        begin, end = n.first[v], n.first[v + 1]
        active, theta = s.active[d, begin:end], reduced[begin:end]
        for k in range(end - begin):
            theta[k] = s.unary[d, begin + k]
        behind = ahead = 0
        for place in range(n.near_at[v], n.near_at[v + 1]):
            e, side = n.near[place] // 2, n.near[place] % 2
            u = n.ends[1 - side, e]
            if s.folded[d, u]:
                continue
            at, other = n.potentials_at[side, e], n.potentials_at[1 - side, e]
            taken = s.potentials[d, at:at + end - begin]
            if (u < v) == forward:
                behind += 1
                _pull(n, e, side, s.potentials[d, other:other + n.first[u + 1] - n.first[u]],
                      s.active[d, n.first[u]:n.first[u + 1]], active, taken)
            else:
                ahead += 1
            for k in range(end - begin):
                theta[k] += taken[k]
        delta = np.inf
        for k in range(end - begin):
            if active[k]:
                delta = min(delta, theta[k])
        if delta == np.inf:
            return np.inf
        running += delta
        rest -= minimum[v] if known else 0.0
        minimum[v] = delta
        room = limit - running - rest if known else np.inf
        if room <= 0.0:
            return np.inf
        for k in range(end - begin):
            theta[k] -= delta
            if active[k] and (theta[k] == np.inf or theta[k] >= room):
                active[k] = False
        share = 1.0 / max(behind, ahead, 1)
        for place in range(n.near_at[v], n.near_at[v + 1]):
            e, side = n.near[place] // 2, n.near[place] % 2
            u = n.ends[1 - side, e]
            if not s.folded[d, u] and (u < v) != forward:
                at = n.potentials_at[side, e]
                for k in range(end - begin):
                    if active[k]:
                        s.potentials[d, at + k] -= share * theta[k]
    return running if running < limit else np.inf


@compiled(allocates=False)
def _fold(n: _Network, s: _Levels, d: int) -> int:  # pragma: no cover (compiled)
    """Adds what vertices with one configuration left cost to a level. Returns how many there were."""
    found = 0
    for v in range(len(n.first) - 1):
        if s.folded[d, v]:
            continue
        begin, count, chosen = n.first[v], 0, 0
        for position in range(begin, n.first[v + 1]):
            if s.active[d, position]:
                count, chosen = count + 1, position - begin
        if count > 1:
            continue
        found += 1
        s.folded[d, v] = True
        s.constant[d] += s.unary[d, begin + chosen]
        for place in range(n.near_at[v], n.near_at[v + 1]):
            e, side = n.near[place] // 2, n.near[place] % 2
            u = n.ends[1 - side, e]
            if s.folded[d, u]:
                continue
            width = n.first[n.ends[1, e] + 1] - n.first[n.ends[1, e]]
            for k in range(n.first[u + 1] - n.first[u]):
                entry = chosen * width + k if side == 0 else k * width + chosen
                s.unary[d, n.first[u] + k] += n.values[n.matrix[e] + entry]
    return found


@compiled(allocates=False)
def _branch(n: _Network, s: _Levels, d: int, reduced: np.ndarray, room: float) -> tuple[int, int]:  # pragma: no cover
    """The vertex whose decision raises the bound most, on average, for its number of configurations and with regard to
    its edges, and its configuration of least reduced cost; -1 where all are decided."""
    best, pick, kept = -1.0, -1, 0
    for v in range(len(n.first) - 1):
        if s.folded[d, v]:
            continue
        total, count, least, chosen = 0.0, 0, np.inf, 0
        for position in range(n.first[v], n.first[v + 1]):
            if s.active[d, position]:
                count += 1
                total += min(reduced[position], room)
                if reduced[position] < least:
                    least, chosen = reduced[position], position - n.first[v]
        score = total / count * (1 + n.near_at[v + 1] - n.near_at[v]) / count
        if score > best:
            best, pick, kept = score, v, chosen
    return pick, kept


@compiled
def _search(n: _Network, s: _Levels, d: int, cost: float, margin: float, most: float, end: float
            ) -> tuple[int, float, float, np.ndarray, int]:  # pragma: no cover (compiled)
    """A slice of `descend` in arrays, from a level on (0 holds the whole network). Returns the level it came to (-1:
    all is done), the entries that it read, and cost, choice and nodes as in Descent."""
    vertices = len(n.first) - 1
    minimum, reduced, best = np.zeros(vertices), np.zeros(len(n.unary)), np.empty(0, np.int64)
    nodes, work = 0, 0.0
    while d >= 0:
        if work > most or (end < np.inf and seconds_now() > end):
            return d, work, cost, best, nodes
        nodes += 1
        _fold(n, s, d)
        bound, folded = s.constant[d], 1
        while folded and bound < np.inf:
            for half in range(2):
                if bound < np.inf:
                    bound = _sweep(n, s, d, half == 0, half > 0, cost - margin, minimum, reduced)
            for e in range(len(n.matrix)):
                u, v = n.ends[0, e], n.ends[1, e]
                if not s.folded[d, u] and not s.folded[d, v]:
                    work += 2 * (n.first[u + 1] - n.first[u]) * (n.first[v + 1] - n.first[v])
            work += 8 * len(n.unary)
            folded = _fold(n, s, d) if bound < np.inf else 0
        if bound == np.inf:
            d -= 1
            continue
        v, k = _branch(n, s, d, reduced, cost - margin - bound)
        if v < 0:
            cost = s.constant[d]
            best = np.empty(vertices, np.int64)
            for u in range(vertices):
                best[u] = np.argmax(s.active[d, n.first[u]:n.first[u + 1]])
            d -= 1
            continue
        s.active[d + 1], s.unary[d + 1], s.potentials[d + 1] = s.active[d], s.unary[d], s.potentials[d]
        s.folded[d + 1], s.constant[d + 1] = s.folded[d], s.constant[d]
        s.active[d + 1, n.first[v]:n.first[v + 1]] = False
        s.active[d + 1, n.first[v] + k] = True
        s.active[d, n.first[v] + k] = False  # what is left of this level once the next is done
        d += 1
    return d, work, cost, best, nodes


def _potentials(p: Packed) -> int:
    return int(p.domains[p.ends].sum())


def descent_bytes(p: Packed) -> float:
    """Memory that `descend` takes."""
    undecided = np.count_nonzero(p.domains > 1)
    level = 9 * len(p.unary) + 8 * _potentials(p) + p.vertices
    return float((undecided + 2) * level + 8 * np.prod(p.domains[p.ends].astype(float), axis=0).sum())


def descend(p: Packed, cost: float, margin: float, most: float, seconds: float,
            told: Callable[[float, np.ndarray], float] | None = None) -> Descent:
    """Searches a network depth first.

    Args:
      p: a network that has been reduced (see packed.reduce).
      cost: of the best assignment known (inf: none).
      margin: how much cheaper an assignment must be to matter.
      most: matrix entries that may be read.
      seconds: that it may take.
      told: called every fraction of a second, and at the end, with the cost of the best assignment known and with that
        assignment if it is a new one (else empty). Returns the cost that assignments have to stay below from there on.
    """
    domains, undecided = p.domains, int(np.count_nonzero(p.domains > 1))
    sizes = domains[p.ends].prod(axis=0)
    at = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=at[1:])
    places = np.zeros(2 * len(sizes) + 1, np.int64)
    np.cumsum(domains[p.ends].T.ravel(), out=places[1:])
    ends = p.ends.astype(np.int64)
    near_at = np.zeros(p.vertices + 1, np.int64)
    np.cumsum(np.bincount(ends.ravel(), minlength=p.vertices), out=near_at[1:])
    near = np.argsort(ends.T.ravel(), kind="stable").astype(np.int64)
    network = _Network(p.first, p.unary, ends, at[:-1], _expanded(p, at, int(at[-1])),
                       np.ascontiguousarray(places[:-1].reshape(-1, 2).T), near_at, near)
    levels = _Levels(np.ones((undecided + 2, len(p.unary)), bool), np.zeros((undecided + 2, len(p.unary))),
                     np.zeros((undecided + 2, int(places[-1]))), np.zeros((undecided + 2, p.vertices), bool),
                     np.full(undecided + 2, p.constant))
    levels.unary[0] = p.unary
    end, read, best, nodes, level, ended = seconds_now() + seconds, 0.0, np.empty(0, np.int64), 0, 0, False
    while not ended:
        level, entries, cost, choice, count = _search(network, levels, level, cost, margin, min(most - read, _SLICE),
                                                      end)
        read, nodes = read + entries, nodes + count
        best = choice if len(choice) else best
        ended = level < 0 or read > most or seconds_now() > end
        cost = told(cost, choice) if told is not None else cost
    return Descent(level < 0, cost, best, nodes)
