"""Visits of vertices that are alike: where layers repeat, what one visit came to is copied instead of computed anew.

A visit (see messages.py) depends on the costs and the edges of a vertex, on the potentials that it finds there, and on
what is active at it and behind it. Costs and edges stay: which vertices have the same is found once. The rest is
compared visit by visit, with those of the same sweep.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed

__all__ = ["Visits", "copy_visit", "no_visits", "vertex_kinds", "visited_alike"]

# Entries by which arrays are told apart before they are compared as a whole.
_SAMPLE = 32


class Visits(NamedTuple):
    """What is remembered of the visits of one sweep.

    Attributes:
      kinds: int64 [vertices], see `vertex_kinds`; empty: nothing is remembered.
      table: int64 [a power of two, at least twice the vertices], a hash table of those visited; -1 where it is empty.
      messages: float64 [potentials]; on the edges ahead of a vertex in the table, what the visit began with.
      active: bool [configurations], of a vertex in the table what was active when it was visited.
    """

    kinds: np.ndarray
    table: np.ndarray
    messages: np.ndarray
    active: np.ndarray


@compiled
def no_visits(p: Packed, kinds: np.ndarray) -> Visits:  # pragma: no cover (compiled)
    """Room for those of a sweep. Memory that is never written to costs nothing."""
    places = 2
    while places < 2 * len(kinds):
        places *= 2
    some = min(len(kinds), 1)
    return Visits(kinds, np.full(places, -1), np.empty(some * p.potentials), np.empty(some * len(p.unary), np.bool_))


@compiled
def _mixed(found: np.uint64, bits: np.ndarray) -> np.uint64:  # pragma: no cover (compiled)
    """A hash, and now of some of these numbers too."""
    for place in range(0, len(bits), max(1, len(bits) // _SAMPLE)):
        found = (found ^ bits[place]) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


@compiled
def _equal(one: np.ndarray, other: np.ndarray) -> bool:  # pragma: no cover (compiled)
    place, size = 0, len(one)
    while place < size and size == len(other) and one[place] == other[place]:
        place += 1
    return place == len(other)


@compiled
def _same_end(p: Packed, e: int, f: int, side: int) -> bool:  # pragma: no cover (compiled)
    """Whether two edges give the configurations of this end the same classes."""
    v, u = p.ends[side, e], p.ends[side, f]
    size = p.first[v + 1] - p.first[v]
    if p.extents[side, e] != p.extents[side, f] or size != p.first[u + 1] - p.first[u]:
        return False
    begin, other = p.classes_at[side, e], p.classes_at[side, f]
    return begin == other or _equal(p.classes[begin:begin + size], p.classes[other:other + size])


@compiled
def _same_kind(p: Packed, v: int, u: int) -> bool:  # pragma: no cover (compiled)
    for side in range(2):
        if p.adjacent_at[side, v + 1] - p.adjacent_at[side, v] != p.adjacent_at[side, u + 1] - p.adjacent_at[side, u]:
            return False
    if not _equal(p.unary[p.first[v]:p.first[v + 1]], p.unary[p.first[u]:p.first[u + 1]]):
        return False
    for side in range(2):
        for number in range(p.adjacent_at[side, v + 1] - p.adjacent_at[side, v]):
            e = p.adjacent[side, p.adjacent_at[side, v] + number]
            f = p.adjacent[side, p.adjacent_at[side, u] + number]
            if p.matrix[e] != p.matrix[f] or not _same_end(p, e, f, 0) or not _same_end(p, e, f, 1):
                return False
    return True


@compiled
def vertex_kinds(p: Packed) -> np.ndarray:  # pragma: no cover (compiled)
    """int64 [vertices]: of each the first vertex that has the same costs and the same edges, in their order: as many at
    either side, with the same matrices and the same classes at both ends."""
    vertices, bits = len(p.first) - 1, p.unary.view(np.uint64)
    places = 2
    while places < 2 * vertices:
        places *= 2
    table, found = np.full(places, -1), np.empty(vertices, np.int64)
    for v in range(vertices):
        mixed = _mixed(np.uint64(p.first[v + 1] - p.first[v]), bits[p.first[v]:p.first[v + 1]])
        for side in range(2):
            for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
                mixed = (mixed ^ np.uint64(p.matrix[p.adjacent[side, position]])) * np.uint64(0x9E3779B97F4A7C15)
        place = np.int64(mixed >> np.uint64(20)) & (places - 1)
        found[v] = v
        while table[place] >= 0:
            if _same_kind(p, v, table[place]):
                found[v] = table[place]
                break
            place = (place + 1) & (places - 1)
        else:
            table[place] = v
    return found


@compiled
def _same_visit(p: Packed, visits: Visits, messages: np.ndarray, active: np.ndarray, v: int, u: int, behind: int,
                exactly: bool) -> bool:  # pragma: no cover (compiled)
    """Whether vertex v is found as u was."""
    if visits.kinds[v] != visits.kinds[u]:
        return False
    for side in range(2):
        far = 1 - side
        for number in range(p.adjacent_at[side, v + 1] - p.adjacent_at[side, v]):
            e = p.adjacent[side, p.adjacent_at[side, v] + number]
            f = p.adjacent[side, p.adjacent_at[side, u] + number]
            if side == behind:
                mine, other, size = p.potentials_at[far, e], p.potentials_at[far, f], p.extents[far, e]
                if not _equal(messages[mine:mine + size], messages[other:other + size]):
                    return False
                x, y = p.ends[far, e], p.ends[far, f]
                if not exactly and not _equal(active[p.first[x]:p.first[x + 1]], active[p.first[y]:p.first[y + 1]]):
                    return False
            else:
                mine, other, size = p.potentials_at[side, e], p.potentials_at[side, f], p.extents[side, e]
                if not _equal(messages[mine:mine + size], visits.messages[other:other + size]):
                    return False
    return exactly or _equal(active[p.first[v]:p.first[v + 1]], visits.active[p.first[u]:p.first[u + 1]])


@compiled
def visited_alike(p: Packed, visits: Visits, messages: np.ndarray, active: np.ndarray, v: int, behind: int,
                  exactly: bool) -> np.int64:  # pragma: no cover (compiled)
    """A vertex that this sweep found as it now finds v, or -1; then v is remembered.

    Args:
      p: the network.
      visits: of this sweep.
      messages, active: as they are now.
      v: the vertex.
      behind: the side at which it stands on the edges that the sweep comes from.
      exactly: what is active does not matter.
    """
    bits, mixed = messages.view(np.uint64), np.uint64(visits.kinds[v])
    for side in range(2):
        for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
            e, end = p.adjacent[side, position], 1 - side if side == behind else side
            begin = p.potentials_at[end, e]
            mixed = _mixed(mixed, bits[begin:begin + p.extents[end, e]])
    mask = len(visits.table) - 1
    place = np.int64(mixed >> np.uint64(20)) & mask
    while visits.table[place] >= 0:
        if _same_visit(p, visits, messages, active, v, visits.table[place], behind, exactly):
            return np.int64(visits.table[place])
        place = (place + 1) & mask
    visits.table[place] = v
    for position in range(p.adjacent_at[1 - behind, v], p.adjacent_at[1 - behind, v + 1]):
        e = p.adjacent[1 - behind, position]
        begin, end = p.potentials_at[1 - behind, e], p.potentials_at[1 - behind, e] + p.extents[1 - behind, e]
        visits.messages[begin:end] = messages[begin:end]
    visits.active[p.first[v]:p.first[v + 1]] = active[p.first[v]:p.first[v + 1]]
    return np.int64(-1)


@compiled
def copy_visit(p: Packed, messages: np.ndarray, active: np.ndarray, reduced_costs: np.ndarray, v: int, u: np.int64,
               exactly: bool) -> None:  # pragma: no cover (compiled)
    """Makes of vertex v what the visit of u in this sweep made of that: nothing else has changed it since. Exact visits
    leave what is active alone."""
    for side in range(2):
        for number in range(p.adjacent_at[side, v + 1] - p.adjacent_at[side, v]):
            mine = p.potentials_at[side, p.adjacent[side, p.adjacent_at[side, v] + number]]
            e = p.adjacent[side, p.adjacent_at[side, u] + number]
            other = p.potentials_at[side, e]
            messages[mine:mine + p.extents[side, e]] = messages[other:other + p.extents[side, e]]
    if not exactly:
        active[p.first[v]:p.first[v + 1]] = active[p.first[u]:p.first[u + 1]]
    reduced_costs[p.first[v]:p.first[v + 1]] = reduced_costs[p.first[u]:p.first[u + 1]]
