"""In which order to eliminate the vertices of a network (elimination.py), and what that takes.

The order decides how large tables get: always the vertex whose elimination costs least at that moment.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["A_ROW", "A_TERM", "MIXED", "Plan", "plan_elimination"]

A_ROW, A_TERM = 800.0, 25.0
"""What a row of a step's product (see elimination.py) takes besides its sums, and what every configuration of the
vertex that is eliminated takes in it, both counted in sums: measured, of rows with 4 to 700 sums for each."""
MIXED = 4.0
"""How many times as long a sum takes where a table over more than two of the layers is added anew for every row."""
# What an entry of a table that is made takes, in sums; and how many neighbours a step has that mostly has such tables.
_AN_ENTRY, _MANY = 8.0, 3


class Plan(NamedTuple):
    """An order of elimination and what it takes.

    Attributes:
      order: the vertices, first eliminated first.
      scopes: per vertex of `order`, the vertices its table is over (ascending).
      operations: sums to be formed in all.
      work: how long that takes, in the time of a sum in a long row of them: in short rows they take longer.
      largest: entries of the largest table.
      entries: entries of all tables together (they are all kept for reading off the solution).
      complete: all vertices are in `order`; else the last of them is the first whose table asks for too much.
    """

    order: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    operations: float
    work: float
    largest: float
    entries: float
    complete: bool

    def widest(self, domains: np.ndarray) -> int:
        """The vertex that makes the largest tables, with more than one configuration.

        Args:
          domains: int [vertices], configurations of each, as the plan was made for.
        """
        weight = np.zeros(len(domains))
        with np.errstate(over="ignore"):
            for vertex, scope in zip(self.order, self.scopes, strict=True):
                members = [*scope, vertex]
                weight[members] += float(np.prod(domains[members].astype(float)))
        weight[domains < 2] = -1
        return int(np.argmax(weight))


def plan_elimination(domains: Sequence[int] | np.ndarray, edges: Sequence[tuple[int, int]] | np.ndarray,
                     order: Sequence[int] | None = None, *, most_operations: float = math.inf,
                     most_entries: float = math.inf) -> Plan:
    """Simulates an elimination, as far as it stays within limits.

    Args:
      domains: configurations per vertex.
      edges: pairs of vertices.
      order: the order to follow; without it, the vertex with the fewest sums next (ties: the lower index).
      most_operations, most_entries: where it would take more in all, the plan ends there.
    """
    sizes = np.asarray(domains, np.int64)
    ends = np.sort(np.asarray(edges, np.int64).reshape(-1, 2), axis=1)
    keys = np.unique(ends[:, 0] * len(sizes) + ends[:, 1])
    ends = np.stack([keys // max(len(sizes), 1), keys % max(len(sizes), 1)])
    sequence, scopes_at, scopes, totals = _simulate(
        sizes, np.ascontiguousarray(ends[:, ends[0] < ends[1]]), np.asarray(() if order is None else order, np.int64),
        float(most_operations), float(most_entries))
    places, flat = scopes_at.tolist(), scopes.tolist()
    operations, work, largest, entries = totals.tolist()
    return Plan(tuple(sequence.tolist()), tuple(tuple(flat[begin:end]) for begin, end in itertools.pairwise(places)),
                operations, work, largest, entries,
                len(sequence) == len(sizes) and operations <= most_operations and entries <= most_entries)


@compiled
def _grown(array: np.ndarray, size: int) -> np.ndarray:  # pragma: no cover (compiled)
    """The array with room for so many entries."""
    if size <= len(array):
        return array
    larger = np.empty(2 * size, array.dtype)
    larger[:len(array)] = array
    return larger


@compiled
def _neighbours(ends: np.ndarray, vertices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover
    """The neighbours of every vertex in linked lists: (the first place of each list, the next place, the neighbour that
    a place holds). Side 0 of edge e is at place 2 e, side 1 after it. Those eliminated are taken out when a list is
    walked."""
    edges = ends.shape[1]
    head, link, target = np.full(vertices, -1), np.empty(2 * edges + 64, np.int64), np.empty(2 * edges + 64, np.int64)
    for place in range(2 * edges):
        u = ends[place % 2, place // 2]
        link[place], target[place], head[u] = head[u], ends[1 - place % 2, place // 2], place
    return head, link, target


@compiled
def _make_neighbours(u: int, scope: np.ndarray, done: np.ndarray, seen: np.ndarray, head: np.ndarray, link: np.ndarray,
                     target: np.ndarray, used: int, work: np.ndarray, share: np.ndarray
                     ) -> int:  # pragma: no cover (compiled)
    """Lists the others of a scope as neighbours of u, and takes those eliminated out of its list. Returns how much of
    the lists' room is used. (What was seen in an earlier step is eliminated or still a neighbour.)"""
    before, place = -1, head[u]
    while place >= 0:
        if not done[target[place]]:
            seen[target[place]] = u
            before = place
        elif before < 0:
            head[u] = link[place]
        else:
            link[before] = link[place]
        place = link[place]
    for w in scope:
        if w != u and seen[w] != u:
            link[used], target[used], head[u] = head[u], w, used
            used += 1
            work[u] += share[w]
    return used


@compiled
def _simulate(sizes: np.ndarray, ends: np.ndarray, given: np.ndarray, most_operations: float, most_entries: float
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """plan_elimination in arrays.

    Args:
      ends: int64 [2, edges], every pair of vertices once.
      given: the order to follow; empty: the cheapest vertex next.

    Returns:
      (the order, where the scope of each of it begins among the scopes, the scopes,
      [operations, work, largest, entries]).
    """
    vertices = len(sizes)
    # What eliminating a vertex takes, as a logarithm to base 2 in fixed point: sums and differences stay exact.
    share = np.empty(vertices, np.int64)
    for v in range(vertices):
        share[v] = np.int64(np.rint(np.log2(max(float(sizes[v]), 1.0)) * 2.0 ** 32))
    work = share.copy()
    (head, link, target), used = _neighbours(ends, vertices), 2 * ends.shape[1]
    for place in range(used):
        work[ends[place % 2, place // 2]] += share[target[place]]
    heap = [(work[v], v) for v in range(vertices)]
    heapq.heapify(heap)
    done, seen = np.zeros(vertices, np.bool_), np.full(vertices, -1, np.int64)
    order, scopes_at = np.empty(vertices, np.int64), np.zeros(vertices + 1, np.int64)
    scopes, end = np.empty(64, np.int64), 0
    operations, spent, largest, entries, steps = 0.0, 0.0, 0.0, 0.0, 0
    while steps < vertices and operations <= most_operations and entries <= most_entries:
        if len(given):
            v = given[steps]
        else:
            value, v = heapq.heappop(heap)
            while done[v] or value != work[v]:
                value, v = heapq.heappop(heap)
        done[v] = True
        begin, table, longest, place = end, 1.0, 1, head[v]
        while place >= 0:
            u = target[place]
            if not done[u]:
                scopes = _grown(scopes, end + 1)
                scopes[end] = u
                table *= sizes[u]
                longest = max(longest, sizes[u])
                end += 1
            place = link[place]
        scopes[begin:end].sort()
        order[steps] = v
        steps += 1
        scopes_at[steps] = end
        operations += table * sizes[v]
        spent += (table * sizes[v] * (1.0 if end - begin < _MANY else MIXED) + table * _AN_ENTRY
                  + table / longest * (A_ROW + A_TERM * sizes[v]))
        entries += table
        largest = max(largest, table)
        for position in range(begin, end):
            u = scopes[position]
            work[u] -= share[v]
            if end - begin > 1:
                link, target = _grown(link, used + end - begin), _grown(target, used + end - begin)
                used = _make_neighbours(u, scopes[begin:end], done, seen, head, link, target, used, work, share)
            if not len(given):
                heapq.heappush(heap, (work[u], u))
    return order[:steps], scopes_at[:steps + 1], scopes[:end], np.array([operations, spent, largest, entries])
