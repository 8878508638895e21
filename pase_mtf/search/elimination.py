"""Exact elimination of vertices (bucket elimination, non-serial dynamic programming).

A vertex is removed by minimising, for every combination of its neighbours' configurations, over its own; what it leaves
is one table over its neighbours. The order decides how large tables get: always the vertex whose elimination costs
least at that moment.
"""

from __future__ import annotations

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
    """

    order: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    operations: float
    largest: float
    entries: float


def plan_elimination(domains: Sequence[int], edges: Sequence[tuple[int, int]],
                     order: Sequence[int] | None = None) -> Plan:
    """Simulates an elimination.

    Args:
      domains: configurations per vertex.
      edges: pairs of vertices.
      order: the order to follow; without it, the vertex with the fewest sums next (ties: the lower index).
    """
    import heapq
    neighbours: list[set[int]] = [set() for _ in domains]
    for u, v in edges:
        if u != v:
            neighbours[u].add(v)
            neighbours[v].add(u)
    sizes = [int(size) for size in domains]

    def price(v: int) -> int:
        return math.prod([sizes[u] for u in neighbours[v]]) * sizes[v]
    heap = [(price(v), v) for v in range(len(sizes))] if order is None else []
    heapq.heapify(heap)
    current = [entry for entry, _ in sorted(heap, key=lambda item: item[1])]
    done = [False] * len(sizes)
    sequence, scopes = [], []
    operations = largest = entries = 0.0
    for step in range(len(sizes)):
        if order is not None:
            v = order[step]
        else:
            while True:
                value, v = heapq.heappop(heap)
                if not done[v] and value == current[v]:
                    break
        done[v] = True
        scope = neighbours[v]
        table = math.prod([sizes[u] for u in scope])
        operations += float(table) * sizes[v]
        entries += float(table)
        largest = max(largest, float(table))
        sequence.append(v)
        scopes.append(tuple(sorted(scope)))
        for u in scope:
            neighbours[u] |= scope
            neighbours[u] -= {u, v}
        if order is None:
            for u in scope:
                current[u] = price(u)
                heapq.heappush(heap, (current[u], u))
    return Plan(tuple(sequence), tuple(scopes), operations, largest, entries)


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
