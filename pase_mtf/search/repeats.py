"""Visits of vertices that are alike, and pulls of edges that are: where layers repeat, they are made once.

A visit (see messages.py) depends on the costs and the edges of a vertex, on the potentials that it finds there, and on
what is active at it and behind it. Costs and edges stay: which vertices have the same is found once. What is equal of
the rest is in one place (see pass_state.py): to compare it is to compare places, and nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed
from pase_mtf.search.pass_state import PassState

__all__ = ["Seen", "copy_visit", "forget", "nothing_seen", "pulled_alike", "share_all", "share_flags",
           "share_messages", "undo", "vertex_kinds", "visited_alike"]

# Entries by which arrays are told apart before they are compared as a whole.
_SAMPLE = 32


class Seen(NamedTuple):
    """What one sweep has seen, by hash tables of a power of two of places, -1 where they are
    empty.

    Attributes:
      kinds: int64 [vertices], see `vertex_kinds`; empty: nobody looks which visits are alike.
      visits: int64, the vertices visited.
      pulls: int64, the edges pulled.
      messages: int64, the ends of edges (2 * edge + side) that have the potentials of their own.
      flags: int64, the vertices that have active flags of their own.
      latest: int64 [edges], for the edges ahead of the first vertex of every kind: the edge whose potentials were the
        last that were sent along an edge like it; -1: none.
      messages_at, active_at, reduced_at, bounds, minimum: those of the state before the sweep.
    """

    kinds: np.ndarray
    visits: np.ndarray
    pulls: np.ndarray
    messages: np.ndarray
    flags: np.ndarray
    latest: np.ndarray
    messages_at: np.ndarray
    active_at: np.ndarray
    reduced_at: np.ndarray
    bounds: np.ndarray
    minimum: np.ndarray


@compiled
def _table(count: int) -> np.ndarray:  # pragma: no cover (compiled)
    places = 2
    while places < 2 * count:
        places *= 2
    return np.full(places, -1)


@compiled
def nothing_seen(p: Packed, kinds: np.ndarray) -> Seen:  # pragma: no cover (compiled)
    """Room for what a sweep sees."""
    vertices, edges = len(p.first) - 1, len(p.matrix)
    return Seen(kinds, _table(vertices), _table(edges), _table(2 * edges), _table(vertices), np.full(edges, -1),
                np.empty((2, edges), np.int64), np.empty(vertices, np.int64), np.empty(vertices, np.int64),
                np.empty(vertices), np.empty(vertices))


@compiled
def forget(seen: Seen, state: PassState) -> None:  # pragma: no cover (compiled)
    """Before a sweep: nothing is seen."""
    seen.visits[:] = -1
    seen.pulls[:] = -1
    seen.messages[:] = -1
    seen.flags[:] = -1
    seen.latest[:] = -1
    seen.messages_at[:] = state.messages_at
    seen.active_at[:] = state.active_at
    seen.reduced_at[:] = state.reduced_at
    seen.bounds[:] = state.bounds
    seen.minimum[:] = state.minimum


@compiled
def undo(seen: Seen, state: PassState) -> None:  # pragma: no cover (compiled)
    """Leaves the state as it was before a sweep that has not come to its end."""
    state.messages_at[:] = seen.messages_at
    state.active_at[:] = seen.active_at
    state.reduced_at[:] = seen.reduced_at
    state.bounds[:] = seen.bounds
    state.minimum[:] = seen.minimum


@compiled(allocates=False)
def _stirred(found: np.uint64, number: int) -> np.uint64:  # pragma: no cover (compiled)
    """A hash, and now of this number too."""
    found = (found ^ np.uint64(number)) * np.uint64(0x9E3779B97F4A7C15)
    return found ^ (found >> np.uint64(29))


@compiled(allocates=False)
def _mixed(found: np.uint64, bits: np.ndarray) -> np.uint64:  # pragma: no cover (compiled)
    """A hash, and now of some of these numbers too."""
    for place in range(0, len(bits), max(1, len(bits) // _SAMPLE)):
        found = (found ^ bits[place]) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


@compiled(allocates=False)
def _equal(one: np.ndarray, other: np.ndarray) -> bool:  # pragma: no cover (compiled)
    place, size = 0, len(one)
    while place < size and size == len(other) and one[place] == other[place]:
        place += 1
    return place == len(other)


@compiled(allocates=False)
def _same_end(p: Packed, e: int, f: int, side: int) -> bool:  # pragma: no cover (compiled)
    """Whether two edges give the configurations of this end the same classes."""
    v, u = p.ends[side, e], p.ends[side, f]
    size = p.first[v + 1] - p.first[v]
    if p.extents[side, e] != p.extents[side, f] or size != p.first[u + 1] - p.first[u]:
        return False
    begin, other = p.classes_at[side, e], p.classes_at[side, f]
    return begin == other or _equal(p.classes[begin:begin + size], p.classes[other:other + size])


@compiled(allocates=False)
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


@compiled(allocates=False)
def share_messages(p: Packed, state: PassState, seen: Seen, e: int, side: int) -> None:  # pragma: no cover (compiled)
    """Points an end of an edge to equal potentials that this sweep has seen before."""
    begin, size = state.messages_at[side, e], p.extents[side, e]
    mixed = _mixed(np.uint64(size), state.messages[begin:begin + size].view(np.uint64))
    mask = len(seen.messages) - 1
    place = np.int64(mixed >> np.uint64(20)) & mask
    while seen.messages[place] >= 0:
        end, f = seen.messages[place] & 1, seen.messages[place] >> 1
        other = state.messages_at[end, f]
        if p.extents[end, f] == size and (other == begin or _equal(
                state.messages[begin:begin + size], state.messages[other:other + size])):
            state.messages_at[side, e] = other
            return
        place = (place + 1) & mask
    seen.messages[place] = 2 * e + side


@compiled(allocates=False)
def share_flags(p: Packed, state: PassState, seen: Seen, v: int) -> None:  # pragma: no cover (compiled)
    """Points a vertex to equal active flags that this sweep has seen before."""
    begin, size = state.active_at[v], p.first[v + 1] - p.first[v]
    if begin == 0:
        return
    mixed = np.uint64(size)
    for k in range(size):  # few are told apart by a sample
        mixed = (mixed ^ np.uint64(state.active[begin + k])) * np.uint64(0x9E3779B97F4A7C15)
    mask = len(seen.flags) - 1
    place = np.int64(mixed >> np.uint64(20)) & mask
    while seen.flags[place] >= 0:
        u = seen.flags[place]
        other = state.active_at[u]
        if p.first[u + 1] - p.first[u] == size and _equal(
                state.active[begin:begin + size], state.active[other:other + size]):
            state.active_at[v] = other
            return
        place = (place + 1) & mask
    seen.flags[place] = v


@compiled
def share_all(p: Packed, state: PassState) -> None:  # pragma: no cover (compiled)
    """Points whatever is equal to the same place."""
    seen = nothing_seen(p, state.kinds)
    for e in range(len(p.matrix)):
        for side in range(2):
            share_messages(p, state, seen, e, side)
    for v in range(len(p.first) - 1):
        share_flags(p, state, seen, v)


@compiled(allocates=False)
def pulled_alike(p: Packed, state: PassState, seen: Seen, e: int, side: int, exactly: bool
                 ) -> np.int64:  # pragma: no cover (compiled)
    """An edge that this sweep has pulled as it would now pull e to this side, or -1; then e is remembered. With
    `exactly`, what is active does not matter."""
    far = 1 - side
    at, v = state.messages_at[far, e], p.ends[far, e]
    flags = 0 if exactly else state.active_at[v]
    mask = len(seen.pulls) - 1
    place = np.int64(_stirred(_stirred(_stirred(np.uint64(p.matrix[e]), at), flags), p.extents[far, e])
                     >> np.uint64(20)) & mask
    while seen.pulls[place] >= 0:
        f = seen.pulls[place]
        if (p.matrix[f] == p.matrix[e] and p.extents[0, f] == p.extents[0, e] and p.extents[1, f] == p.extents[1, e]
                and state.messages_at[far, f] == at and (exactly or state.active_at[p.ends[far, f]] == flags)
                and (flags == 0 or _same_end(p, e, f, far))):
            return np.int64(f)
        place = (place + 1) & mask
    seen.pulls[place] = e
    return np.int64(-1)


@compiled(allocates=False)
def _same_visit(p: Packed, state: PassState, seen: Seen, v: int, u: int, behind: int, exactly: bool
                ) -> bool:  # pragma: no cover (compiled)
    """Whether vertex v is found as u was."""
    if seen.kinds[v] != seen.kinds[u] or not (exactly or seen.active_at[v] == seen.active_at[u]):
        return False
    far, ahead = 1 - behind, 1 - behind
    for number in range(p.adjacent_at[behind, v + 1] - p.adjacent_at[behind, v]):
        e = p.adjacent[behind, p.adjacent_at[behind, v] + number]
        f = p.adjacent[behind, p.adjacent_at[behind, u] + number]
        if state.messages_at[far, e] != state.messages_at[far, f]:
            return False
        if not exactly and state.active_at[p.ends[far, e]] != state.active_at[p.ends[far, f]]:
            return False
    for number in range(p.adjacent_at[ahead, v + 1] - p.adjacent_at[ahead, v]):
        e = p.adjacent[ahead, p.adjacent_at[ahead, v] + number]
        f = p.adjacent[ahead, p.adjacent_at[ahead, u] + number]
        if seen.messages_at[ahead, e] != seen.messages_at[ahead, f]:
            return False
    return True


@compiled(allocates=False)
def visited_alike(p: Packed, state: PassState, seen: Seen, v: int, behind: int, exactly: bool
                  ) -> np.int64:  # pragma: no cover (compiled)
    """A vertex that this sweep found as it now finds v, or -1; then v is remembered.

    Args:
      p: the network.
      state: as it is now.
      seen: in this sweep.
      v: the vertex.
      behind: the side at which it stands on the edges that the sweep comes from.
      exactly: what is active does not matter.
    """
    mixed = np.uint64(seen.kinds[v])
    if not exactly:
        mixed = _stirred(mixed, state.active_at[v])
    for side in range(2):
        end = 1 - behind  # of edges behind the other one, of those ahead its own
        for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
            mixed = _stirred(mixed, state.messages_at[end, p.adjacent[side, position]])
    mask = len(seen.visits) - 1
    place = np.int64(mixed >> np.uint64(20)) & mask
    while seen.visits[place] >= 0:
        if _same_visit(p, state, seen, v, seen.visits[place], behind, exactly):
            return np.int64(seen.visits[place])
        place = (place + 1) & mask
    seen.visits[place] = v
    return np.int64(-1)


@compiled(allocates=False)
def copy_visit(p: Packed, state: PassState, v: int, u: np.int64, exactly: bool
               ) -> None:  # pragma: no cover (compiled)
    """Makes of vertex v what the visit of u in this sweep made of that: nothing else has changed it since. Exact visits
    leave what is active alone."""
    for side in range(2):
        for number in range(p.adjacent_at[side, v + 1] - p.adjacent_at[side, v]):
            e = p.adjacent[side, p.adjacent_at[side, v] + number]
            state.messages_at[side, e] = state.messages_at[side, p.adjacent[side, p.adjacent_at[side, u] + number]]
    if not exactly:
        state.active_at[v] = state.active_at[u]
    state.reduced_at[v] = state.reduced_at[u]
