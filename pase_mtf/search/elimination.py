"""Exact elimination of vertices (bucket elimination, non-serial dynamic programming).

A vertex is removed by minimising, for every combination of its neighbours' configurations, over its own; what it leaves
is one table over its neighbours. The order decides how large tables get: always the vertex whose elimination costs
least at that moment.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed

__all__ = ["Plan", "eliminate", "plan_elimination"]


class Plan(NamedTuple):
    """An order of elimination and what it takes.

    Attributes:
      order: the vertices, first eliminated first.
      scopes: per vertex of `order`, the vertices its table is over (ascending).
      operations: sums to be formed in all.
      largest: entries of the largest table.
      entries: entries of all tables together (they are all kept for reading off the solution).
      complete: all vertices are in `order`; else the last of them is the first whose table asks for too much.
    """

    order: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    operations: float
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
    operations, largest, entries = totals.tolist()
    return Plan(tuple(sequence.tolist()), tuple(tuple(flat[begin:end]) for begin, end in itertools.pairwise(places)),
                operations, largest, entries,
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
      (the order, where the scope of each of it begins among the scopes, the scopes, [operations, largest, entries]).
    """
    vertices = len(sizes)
    # What eliminating a vertex takes, as a logarithm to base 2 in fixed point: sums and differences stay exact.
    share = np.empty(vertices, np.int64)
    for v in range(vertices):
        share[v] = np.int64(np.rint(np.log2(float(sizes[v])) * 2.0 ** 32))
    work = share.copy()
    (head, link, target), used = _neighbours(ends, vertices), 2 * ends.shape[1]
    for place in range(used):
        work[ends[place % 2, place // 2]] += share[target[place]]
    heap = [(work[v], v) for v in range(vertices)]
    heapq.heapify(heap)
    done, seen = np.zeros(vertices, np.bool_), np.full(vertices, -1, np.int64)
    order, scopes_at = np.empty(vertices, np.int64), np.zeros(vertices + 1, np.int64)
    scopes, end = np.empty(64, np.int64), 0
    operations, largest, entries, steps = 0.0, 0.0, 0.0, 0
    while steps < vertices and operations <= most_operations and entries <= most_entries:
        if len(given):
            v = given[steps]
        else:
            value, v = heapq.heappop(heap)
            while done[v] or value != work[v]:
                value, v = heapq.heappop(heap)
        done[v] = True
        begin, table, place = end, 1.0, head[v]
        while place >= 0:
            u = target[place]
            if not done[u]:
                scopes = _grown(scopes, end + 1)
                scopes[end] = u
                table *= sizes[u]
                end += 1
            place = link[place]
        scopes[begin:end].sort()
        order[steps] = v
        steps += 1
        scopes_at[steps] = end
        operations += table * sizes[v]
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
    return order[:steps], scopes_at[:steps + 1], scopes[:end], np.array([operations, largest, entries])


class _Factors(NamedTuple):
    """Tables over some vertices each: the value under configurations k is the entry of its array at start + the sum of
    stride * class of k over its vertices.

    Attributes:
      source, start: int64 [factors], which array holds it (_UNARY, _MATRIX or _TABLE), and where it begins there.
      dims_at: int64 [factors + 1], where its vertices begin in the next three.
      vertex: int64, ascending for every factor.
      classes: int64, where the classes of the vertex's configurations begin in packed.classes; -1: each its own.
      stride: int64.
      link: int64 [factors], the next factor in the same bucket, or -1.
      head, tail: int64 [vertices], the first and the last factor in the bucket of a vertex: those that hold no vertex
        that is eliminated before it.
    """

    source: np.ndarray
    start: np.ndarray
    dims_at: np.ndarray
    vertex: np.ndarray
    classes: np.ndarray
    stride: np.ndarray
    link: np.ndarray
    head: np.ndarray
    tail: np.ndarray


_UNARY, _MATRIX, _TABLE = 0, 1, 2


@compiled(allocates=False)
def _file(factors: _Factors, f: int, source: int, start: int, rank: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Puts a factor whose vertices are filled in into its bucket."""
    factors.source[f], factors.start[f], factors.link[f] = source, start, -1
    begin, end = factors.dims_at[f], factors.dims_at[f + 1]
    bucket = factors.vertex[begin]
    for position in range(begin + 1, end):
        if rank[factors.vertex[position]] < rank[bucket]:
            bucket = factors.vertex[position]
    if factors.head[bucket] < 0:
        factors.head[bucket] = f
    else:
        factors.link[factors.tail[bucket]] = f
    factors.tail[bucket] = f


@compiled(allocates=False)
def _dim(factors: _Factors, end: int, v: int, classes: int, stride: int) -> int:  # pragma: no cover (compiled)
    """Fills in one vertex of a factor. Returns where the next one belongs."""
    factors.vertex[end], factors.classes[end], factors.stride[end] = v, classes, stride
    return end + 1


@compiled
def _factors_of(p: Packed, rank: np.ndarray, dims: int) -> _Factors:  # pragma: no cover (compiled)
    """The vertices and edges of a network, with room for a table per vertex, over so many vertices together."""
    vertices, edges = len(p.first) - 1, len(p.matrix)
    count, end = 2 * vertices + edges, 0
    dims += vertices + 2 * edges
    factors = _Factors(np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count + 1, np.int64),
                       np.empty(dims, np.int64), np.empty(dims, np.int64), np.empty(dims, np.int64),
                       np.empty(count, np.int64), np.full(vertices, -1), np.empty(vertices, np.int64))
    for v in range(vertices):
        end = _dim(factors, end, v, -1, 1)
        factors.dims_at[v + 1] = end
        _file(factors, v, _UNARY, p.first[v], rank)
    for e in range(edges):
        end = _dim(factors, end, p.ends[0, e], p.classes_at[0, e], p.extents[1, e])
        end = _dim(factors, end, p.ends[1, e], p.classes_at[1, e], 1)
        factors.dims_at[vertices + e + 1] = end
        _file(factors, vertices + e, _MATRIX, p.matrix[e], rank)
    return factors


@compiled(allocates=False)
def _advance(index: np.ndarray, shape: np.ndarray, maps: np.ndarray, places: np.ndarray, begin: np.ndarray
             ) -> None:  # pragma: no cover (compiled)
    """The next combination of all dims but the innermost, and where every factor is read then."""
    for d in range(len(shape) - 2, -1, -1):
        before = index[d]
        index[d] = before + 1 if before + 1 < shape[d] else 0
        for f in range(len(begin)):
            if places[f, d] >= 0:
                begin[f] += maps[places[f, d] + index[d]] - maps[places[f, d] + before]
        if index[d] > 0:
            break


@compiled(allocates=False)
def _sum_fixed(values: np.ndarray, begin: np.ndarray, maps: np.ndarray, places: np.ndarray, sums: np.ndarray
               ) -> None:  # pragma: no cover (compiled)
    """Adds up, for every configuration of the vertex eliminated, the factors that do not depend on the innermost
    dim."""
    dims = places.shape[1] - 1
    sums[:] = 0.0
    for f in range(len(begin)):
        if dims == 0 or places[f, dims - 1] < 0:
            for k in range(len(sums)):
                sums[k] += values[begin[f] + (maps[places[f, dims] + k] if places[f, dims] >= 0 else 0)]


@compiled
def _minimise(values: np.ndarray, starts: np.ndarray, maps: np.ndarray, places: np.ndarray, shape: np.ndarray,
              size: int, out: np.ndarray, choice: np.ndarray) -> None:  # pragma: no cover (compiled)
    """out[t] = min over k of the sum of all factors under t and k, and choice[t] the first such k.

    Args:
      values: all factors' values, one after another.
      starts: int64 [factors].
      maps: all maps, one after another.
      places: int64 [factors, dims + 1], where a factor's map of each output dim begins, and last that of the vertex
        eliminated; -1 where the factor does not depend on the dim.
      shape: int64 [dims] of the output.
      size: configurations of the vertex eliminated.
    """
    dims, factors = len(shape), len(starts)
    inner = shape[dims - 1] if dims else 1
    outer = 1
    for d in range(dims - 1):
        outer *= shape[d]
    index = np.zeros(max(dims, 1), np.int64)
    partial = np.empty(size)
    varying = np.empty(factors, np.int64)  # the factors that depend on the innermost dim
    count = 0
    for f in range(factors):
        if dims and places[f, dims - 1] >= 0:
            varying[count] = f
            count += 1
    begin = starts.copy()  # where each factor is read, kept up to date as the index moves: one of many dims at a time
    for f in range(factors):
        for d in range(dims - 1):
            if places[f, d] >= 0:
                begin[f] += maps[places[f, d]]
    for t in range(outer):
        _sum_fixed(values, begin, maps, places, partial)
        for j in range(inner):
            least, pick = np.inf, 0
            if count == 1:
                f = varying[0]
                offset = begin[f] + maps[places[f, dims - 1] + j]
                own = places[f, dims]
                for k in range(size):
                    value = partial[k] + values[offset + maps[own + k]]
                    if value < least:
                        least, pick = value, k
            else:
                for k in range(size):
                    value = partial[k]
                    for position in range(count):
                        f = varying[position]
                        value += values[begin[f] + maps[places[f, dims - 1] + j] + maps[places[f, dims] + k]]
                    if value < least:
                        least, pick = value, k
            out[t * inner + j] = least
            choice[t * inner + j] = pick
        _advance(index, shape, maps, places, begin)


@compiled(allocates=False)
def _entries(p: Packed, factors: _Factors, f: int) -> tuple[int, int]:  # pragma: no cover (compiled)
    """How many entries a factor has, and its vertices together."""
    begin, end = factors.dims_at[f], factors.dims_at[f + 1]
    count, own = 1, 0
    for position in range(begin, end):
        u = factors.vertex[position]
        own += p.first[u + 1] - p.first[u]
        if factors.source[f] != _MATRIX:
            count *= p.first[u + 1] - p.first[u]
    if factors.source[f] == _MATRIX:
        e = f - (len(p.first) - 1)
        count = p.extents[0, e] * p.extents[1, e]
    return count, own


@compiled
def _table(p: Packed, factors: _Factors, tables: np.ndarray, v: int, scope: np.ndarray, out: np.ndarray,
           choice: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Fills in the table over `scope` that the factors in the bucket of v leave without it."""
    count, entries, own, f = 0, 0, 0, factors.head[v]
    while f >= 0:
        more = _entries(p, factors, f)
        count, entries, own, f = count + 1, entries + more[0], own + more[1], factors.link[f]
    values, starts, maps = np.empty(entries), np.empty(count, np.int64), np.empty(own, np.int64)
    places = np.full((count, len(scope) + 1), -1)
    number, end, map_end, f = 0, 0, 0, factors.head[v]
    while f >= 0:
        size, start = _entries(p, factors, f)[0], factors.start[f]
        starts[number] = end
        if factors.source[f] == _UNARY:
            values[end:end + size] = p.unary[start:start + size]
        elif factors.source[f] == _MATRIX:
            values[end:end + size] = p.values[start:start + size]
        else:
            values[end:end + size] = tables[start:start + size]
        end += size
        for position in range(factors.dims_at[f], factors.dims_at[f + 1]):
            u, classes, stride = factors.vertex[position], factors.classes[position], factors.stride[position]
            places[number, len(scope) if u == v else np.searchsorted(scope, u)] = map_end
            for k in range(p.first[u + 1] - p.first[u]):
                maps[map_end] = stride * (k if classes < 0 else p.classes[classes + k])
                map_end += 1
        number, f = number + 1, factors.link[f]
    shape = np.empty(len(scope), np.int64)
    for d in range(len(scope)):
        shape[d] = p.first[scope[d] + 1] - p.first[scope[d]]
    _minimise(values, starts, maps, places, shape, p.first[v + 1] - p.first[v], out, choice)


@compiled
def _eliminate(p: Packed, order: np.ndarray, scopes_at: np.ndarray, scopes: np.ndarray, entries: int
               ) -> tuple[float, np.ndarray]:  # pragma: no cover (compiled)
    """`eliminate`, with the scope of order[step] at scopes_at[step] in `scopes`, and so many entries in all tables."""
    vertices, edges = len(p.first) - 1, len(p.matrix)
    rank = np.empty(vertices, np.int64)
    rank[order] = np.arange(vertices)
    factors = _factors_of(p, rank, len(scopes))
    tables, choices, table_at = np.empty(entries), np.empty(entries, np.int32), np.zeros(vertices + 1, np.int64)
    total = 0.0
    for step in range(vertices):
        scope = scopes[scopes_at[step]:scopes_at[step + 1]]
        begin, size = table_at[step], np.int64(1)
        for u in scope:
            size *= p.first[u + 1] - p.first[u]
        _table(p, factors, tables, order[step], scope, tables[begin:begin + size], choices[begin:begin + size])
        table_at[step + 1] = begin + size
        f = vertices + edges + step
        place = factors.dims_at[f]
        for u in scope:
            size //= p.first[u + 1] - p.first[u]
            place = _dim(factors, place, u, -1, size)
        factors.dims_at[f + 1] = place
        if len(scope):
            _file(factors, f, _TABLE, begin, rank)
        else:
            total += tables[begin]
    assignment = np.zeros(vertices, np.int64)
    for step in range(vertices - 1, -1, -1):
        place = 0
        for u in scopes[scopes_at[step]:scopes_at[step + 1]]:
            place = place * (p.first[u + 1] - p.first[u]) + assignment[u]
        assignment[order[step]] = choices[table_at[step] + place]
    return total, assignment


def eliminate(packed: Packed, plan: Plan) -> tuple[float, np.ndarray]:
    """The least cost, without the network's constant, and an assignment that has it.

    Args:
      packed: the network.
      plan: of all its vertices.

    Returns:
      (the least sum; inf if no combination is finite, the configuration of each vertex).
    """
    scopes_at = np.zeros(len(plan.scopes) + 1, np.int64)
    np.cumsum([len(scope) for scope in plan.scopes], out=scopes_at[1:])
    return _eliminate(packed, np.array(plan.order, np.int64), scopes_at,
                      np.fromiter(itertools.chain.from_iterable(plan.scopes), np.int64, int(scopes_at[-1])),
                      int(plan.entries))
