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

__all__ = ["Factor", "Plan", "eliminate", "factors_of", "plan_elimination"]


class Factor(NamedTuple):
    """A table over some vertices, read through a map per vertex: its value under configurations k is
    values[sum(map[k])] over its vertices.

    Attributes:
      vertices: which, ascending.
      values: float64, flat.
      maps: per vertex, int64 [configurations], what a configuration adds to the place in `values`.
    """

    vertices: tuple[int, ...]
    values: np.ndarray
    maps: tuple[np.ndarray, ...]


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
def _make_neighbours(u: int, scope: np.ndarray, done: np.ndarray, seen: np.ndarray, head: np.ndarray, link: np.ndarray,
                     target: np.ndarray, used: int, price: np.ndarray, share: np.ndarray
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
            price[u] += share[w]
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
    price = share.copy()
    # The neighbours of every vertex, a linked list; those eliminated are taken out when a list is walked.
    head, link, target, used = np.full(vertices, -1, np.int64), np.empty(64, np.int64), np.empty(64, np.int64), 0
    link, target = _grown(link, 2 * ends.shape[1]), _grown(target, 2 * ends.shape[1])
    for e in range(ends.shape[1]):
        for side in range(2):
            u, v = ends[side, e], ends[1 - side, e]
            link[used], target[used], head[u] = head[u], v, used
            price[u] += share[v]
            used += 1
    heap = [(price[v], v) for v in range(vertices)]
    heapq.heapify(heap)
    done, seen = np.zeros(vertices, np.bool_), np.full(vertices, -1, np.int64)
    order, scopes_at = np.empty(vertices, np.int64), np.zeros(vertices + 1, np.int64)
    scopes, end = np.empty(64, np.int64), 0
    operations = largest = entries = 0.0
    steps = 0
    while steps < vertices and operations <= most_operations and entries <= most_entries:
        if len(given):
            v = given[steps]
        else:
            value, v = heapq.heappop(heap)
            while done[v] or value != price[v]:
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
            price[u] -= share[v]
            if end - begin > 1:
                link, target = _grown(link, used + end - begin), _grown(target, used + end - begin)
                used = _make_neighbours(u, scopes[begin:end], done, seen, head, link, target, used, price, share)
            if not len(given):
                heapq.heappush(heap, (price[u], u))
    return order[:steps], scopes_at[:steps + 1], scopes[:end], np.array([operations, largest, entries])


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
        partial[:] = 0.0
        for f in range(factors):
            offset = begin[f]
            if dims == 0 or places[f, dims - 1] < 0:
                if places[f, dims] >= 0:
                    for k in range(size):
                        partial[k] += values[offset + maps[places[f, dims] + k]]
                else:
                    for k in range(size):
                        partial[k] += values[offset]
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
        for d in range(dims - 2, -1, -1):
            before = index[d]
            index[d] = before + 1 if before + 1 < shape[d] else 0
            for f in range(factors):
                if places[f, d] >= 0:
                    begin[f] += maps[places[f, d] + index[d]] - maps[places[f, d] + before]
            if index[d] > 0:
                break


def factors_of(packed: Packed) -> list[Factor]:
    """The vertices and edges of a network as factors."""
    factors = []
    for v in range(packed.vertices):
        own = packed.unary[packed.first[v]:packed.first[v + 1]]
        factors.append(Factor((v,), own, (np.arange(len(own), dtype=np.int64),)))
    for e, (u, v) in enumerate(packed.pairs):
        start, (height, width) = int(packed.matrix[e]), packed.extents[:, e].tolist()
        rows, columns = (packed.classes[place:place + packed.first[end + 1] - packed.first[end]].astype(np.int64)
                         for place, end in zip(packed.classes_at[:, e], (u, v), strict=True))
        factors.append(Factor((u, v), packed.values[start:start + height * width], (rows * width, columns)))
    return factors


def _join(factor_list: list[Factor], v: int, scope: tuple[int, ...], sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Calls the kernel on the factors of one vertex."""
    starts: list[int] = []
    places: list[list[int]] = []
    maps: list[np.ndarray] = []
    end = map_end = 0
    for factor in factor_list:
        starts.append(end)
        end += factor.values.size
        line = []
        for u in (*scope, v):
            if u in factor.vertices:
                line.append(map_end)
                maps.append(factor.maps[factor.vertices.index(u)])
                map_end += maps[-1].size
            else:
                line.append(-1)
        places.append(line)
    shape = np.array([sizes[u] for u in scope], np.int64)
    entries = int(np.prod(shape)) if len(shape) else 1
    out, choice = np.empty(entries), np.empty(entries, np.int32)
    values = factor_list[0].values if len(factor_list) == 1 else np.concatenate([
        factor.values for factor in factor_list])
    _minimise(values, np.array(starts, np.int64),
              np.concatenate(maps), np.array(places, np.int64), shape, int(sizes[v]), out, choice)
    return out, choice, shape


def eliminate(factors: Sequence[Factor], sizes: np.ndarray, plan: Plan) -> tuple[float, np.ndarray]:
    """The least sum of the factors, and a minimiser.

    Args:
      factors: at least one that holds each vertex.
      sizes: int [vertices], configurations of each.
      plan: from plan_elimination, of the pairs of vertices that share a factor.

    Returns:
      (the least sum; inf if no combination is finite, the configuration of each vertex).
    """
    buckets: list[list[Factor]] = [[] for _ in sizes]
    rank = np.empty(len(sizes), np.int64)
    rank[list(plan.order)] = np.arange(len(sizes))

    def file(factor: Factor) -> None:
        buckets[min(factor.vertices, key=lambda u: rank[u])].append(factor)
    for factor in factors:
        file(factor)
    total = 0.0
    choices = []
    for v, scope in zip(plan.order, plan.scopes, strict=True):
        out, choice, shape = _join(buckets[v], v, scope, sizes)
        buckets[v] = []
        choices.append(choice)
        if scope:
            strides = np.ones(len(shape), np.int64)
            strides[:-1] = np.cumprod(shape[:0:-1])[::-1]
            file(Factor(scope, out, tuple(
                np.arange(extent, dtype=np.int64) * stride for extent, stride in zip(shape, strides, strict=True))))
        else:
            total += float(out[0])
    assignment = np.zeros(len(sizes), np.int64)
    for v, scope, choice in zip(reversed(plan.order), reversed(plan.scopes), reversed(choices), strict=True):
        place = 0
        for u in scope:
            place = place * int(sizes[u]) + int(assignment[u])
        assignment[v] = choice[place]
    return total, assignment
