"""Exact elimination of vertices (bucket elimination, non-serial dynamic programming).

A vertex is removed by minimising, for every combination of its neighbours' configurations, over its own; what it leaves
is one table over its neighbours. elimination_plan.py finds the order.

Where a neighbour has costs with the vertex alone, as nearly always, that is a product of matrices in which sums are
minima and products are sums: for every combination of the other neighbours a row of what they cost with the vertex, for
that neighbour a matrix. It is formed in blocks that stay in the cache. Which configuration attains a minimum is not
kept, but found again for the one combination that it is asked for in the end.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.elimination_plan import A_ROW, A_TERM, MIXED, Plan
from pase_mtf.search.packed import Packed

__all__ = ["eliminate"]

# Configurations of the vertex, and of the innermost neighbour, in a block of a product: 128 KiB.
_BLOCK = (64, 256)
# Adding a table for every row takes as long as so many sums for each, where its entries stand side by side, or not.
_SIDE_BY_SIDE, _APART = 2, 8
# The work (see Plan) between two looks at the clock.
_BETWEEN_LOOKS = 1 << 22


class _Factors(NamedTuple):
    """Tables over some vertices each: the value under configurations k is the entry of its array at start + the sum of
    stride * class of k over its vertices.

    Attributes:
      source, start: int64 [factors], which array holds it (_UNARY, _MATRIX or _TABLE), and where it begins there.
      dims_at: int64 [factors + 1], where its vertices begin in the next three.
      vertex: int64.
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


class _Bucket(NamedTuple):
    """The factors that hold a vertex which is eliminated now, and where each is read.

    Attributes:
      factor: int64 [factors], which of `_Factors`.
      maps: int64, maps one after another: what every configuration of a vertex adds to where a factor is read.
      places: int64 [factors, dims + 1], where a factor's map of each dim of the table begins, and last that of the
        vertex eliminated; -1 where the factor does not depend on the dim.
      dense: bool [factors], whether the entries of a factor stand side by side along the innermost dim.
      begin: int64 [factors], where each is read under the present configurations of all dims but the innermost one;
        kept up to date as these change.
    """

    factor: np.ndarray
    maps: np.ndarray
    places: np.ndarray
    dense: np.ndarray
    begin: np.ndarray


@compiled
def _bucket(p: Packed, factors: _Factors, v: int, scope: np.ndarray) -> _Bucket:  # pragma: no cover (compiled)
    """The bucket of v, for a table over `scope`."""
    count, own, f = 0, 0, factors.head[v]
    while f >= 0:
        for position in range(factors.dims_at[f], factors.dims_at[f + 1]):
            u = factors.vertex[position]
            own += p.first[u + 1] - p.first[u]
        count, f = count + 1, factors.link[f]
    found = _Bucket(np.empty(count, np.int64), np.empty(own, np.int64), np.full((count, len(scope) + 1), -1),
                    np.zeros(count, np.bool_), np.empty(count, np.int64))
    number, end, f = 0, 0, factors.head[v]
    while f >= 0:
        found.factor[number], found.begin[number] = f, factors.start[f]
        for position in range(factors.dims_at[f], factors.dims_at[f + 1]):
            u, classes, stride = factors.vertex[position], factors.classes[position], factors.stride[position]
            dim = len(scope)
            if u != v:
                dim = 0
                while scope[dim] != u:
                    dim += 1
            found.places[number, dim] = end
            if dim < len(scope) - 1:  # it starts at the first configuration of every dim
                found.begin[number] += stride * (0 if classes < 0 else p.classes[classes])
            elif dim < len(scope):
                found.dense[number] = classes < 0 and stride == 1
            for k in range(p.first[u + 1] - p.first[u]):
                found.maps[end] = stride * (k if classes < 0 else p.classes[classes + k])
                end += 1
        number, f = number + 1, factors.link[f]
    return found


@compiled(allocates=False)
def _put_innermost(p: Packed, factors: _Factors, v: int, scope: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Puts last in the scope, which is what is innermost in the table, the vertex for which rows take least: long ones
    are best, and every table over it and others besides v is added anew for each of them."""
    best, least = 0, np.inf
    for dim in range(len(scope)):
        size, mixed, f = p.first[scope[dim] + 1] - p.first[scope[dim]], 0, factors.head[v]
        while f >= 0:
            begin, end = factors.dims_at[f], factors.dims_at[f + 1]
            if end - begin > 2:
                for position in range(begin, end):
                    if factors.vertex[position] == scope[dim]:
                        mixed += _SIDE_BY_SIDE if factors.stride[position] == 1 else _APART
            f = factors.link[f]
        cost = 1.0 + mixed + (A_TERM + A_ROW / (p.first[v + 1] - p.first[v])) / size
        if cost < least:
            best, least = dim, cost
    if len(scope):
        scope[best], scope[-1] = scope[-1], scope[best]


@compiled(allocates=False)
def _advance(index: np.ndarray, shape: np.ndarray, bucket: _Bucket) -> None:  # pragma: no cover (compiled)
    """The next combination of all dims but the innermost (after the last the first), and where every factor is read
    then."""
    maps, places, begin = bucket.maps, bucket.places, bucket.begin
    for d in range(len(shape) - 2, -1, -1):
        before = index[d]
        index[d] = before + 1 if before + 1 < shape[d] else 0
        for f in range(len(begin)):
            if places[f, d] >= 0:
                begin[f] += maps[places[f, d] + index[d]] - maps[places[f, d] + before]
        if index[d] > 0:
            break


@compiled(allocates=False)
def _add_row(out: np.ndarray, values: np.ndarray, start: int, own: np.ndarray) -> None:  # pragma: no cover (compiled)
    for k in range(len(out)):
        out[k] += values[start + own[k]]


@compiled(allocates=False)
def _add_matrix(out: np.ndarray, values: np.ndarray, start: int, own: np.ndarray, inner: np.ndarray, dense: bool
                ) -> None:  # pragma: no cover (compiled)
    for k in range(len(own)):
        row, line = out[k], start + own[k]
        if dense:
            entries = values[line + inner[0]:line + inner[0] + len(inner)]
            for j in range(len(inner)):
                row[j] += entries[j]
        else:
            for j in range(len(inner)):
                row[j] += values[line + inner[j]]


@compiled(allocates=False)
def _fixed(p: Packed, factors: _Factors, tables: np.ndarray, bucket: _Bucket, inner: int, first: int, out: np.ndarray
           ) -> None:  # pragma: no cover (compiled)
    """out[k] = the sum of all factors that do not depend on the innermost dim, as they are read now, under the
    configurations of the vertex from `first` on."""
    out[:] = 0.0
    for number in range(len(bucket.factor)):
        if inner >= 0 and bucket.places[number, inner] >= 0:
            continue
        source, start = factors.source[bucket.factor[number]], bucket.begin[number]
        place = bucket.places[number, -1] + first
        own = bucket.maps[place:place + len(out)]
        if source == _UNARY:
            _add_row(out, p.unary, start, own)
        elif source == _MATRIX:
            _add_row(out, p.values, start, own)
        else:
            _add_row(out, tables, start, own)


@compiled(allocates=False)
def _varying(p: Packed, factors: _Factors, tables: np.ndarray, bucket: _Bucket, inner: int, first: int, left: int,
             mixed: bool, out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds to out[k, j] the factors that depend on the innermost dim, under its configurations from `left` on and those
    of the vertex from `first` on: those that depend on other dims besides, or (not `mixed`) the others."""
    for number in range(len(bucket.factor)):
        f = bucket.factor[number]
        if bucket.places[number, inner] < 0 or (factors.dims_at[f + 1] - factors.dims_at[f] > 2) != mixed:
            continue
        start, place, at = bucket.begin[number], bucket.places[number, -1] + first, bucket.places[number, inner] + left
        own, across = bucket.maps[place:place + out.shape[0]], bucket.maps[at:at + out.shape[1]]
        if factors.source[f] == _MATRIX:
            _add_matrix(out, p.values, start, own, across, False)
        else:
            _add_matrix(out, tables, start, own, across, bucket.dense[number])


@compiled(allocates=False)
def _lower(out: np.ndarray, fixed: np.ndarray, rows: np.ndarray) -> None:  # pragma: no cover (compiled)
    """out[j] = min(out[j], the least fixed[k] + rows[k, j])."""
    even = len(fixed) - len(fixed) % 4
    for k in range(0, even, 4):
        a, b, c, d = fixed[k], fixed[k + 1], fixed[k + 2], fixed[k + 3]
        one, two, three, four = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
        for j in range(len(out)):
            left, right = a + one[j], b + two[j]
            left = left if left < right else right
            right, last = c + three[j], d + four[j]
            right = right if right < last else last
            left = left if left < right else right
            out[j] = left if left < out[j] else out[j]
    for k in range(even, len(fixed)):
        a, one = fixed[k], rows[k]
        for j in range(len(out)):
            value = a + one[j]
            out[j] = value if value < out[j] else out[j]


@compiled
def _table(p: Packed, factors: _Factors, tables: np.ndarray, v: int, scope: np.ndarray, out: np.ndarray, end: float,
           spent: float) -> float:  # pragma: no cover (compiled)
    """Fills in the table over `scope`, whose order it may change, that the factors in the bucket of v leave without it.

    Args:
      end: what the clock shows when the time is over.
      spent: work since somebody looked at it.

    Returns:
      The work since then; inf: the time is over.
    """
    _put_innermost(p, factors, v, scope)
    bucket, dims, size = _bucket(p, factors, v, scope), len(scope), p.first[v + 1] - p.first[v]
    shape, index = np.empty(dims, np.int64), np.zeros(max(dims, 1), np.int64)
    for d in range(dims):
        shape[d] = p.first[scope[d] + 1] - p.first[scope[d]]
    inner = shape[dims - 1] if dims else 1
    mixed = False
    for number in range(len(bucket.factor)):
        f = bucket.factor[number]
        mixed |= dims > 1 and bucket.places[number, dims - 1] >= 0 and factors.dims_at[f + 1] - factors.dims_at[f] > 2
    out[:] = np.inf
    lines = out.reshape(len(out) // inner, inner)
    height, width = min(_BLOCK[0], size), min(_BLOCK[1], inner)
    fixed = np.empty(height)
    block, total = np.empty(height * width), np.empty(height * width if mixed else 0)
    for first in range(0, size, height):
        for left in range(0, inner, width):
            some, across = fixed[:size - first], min(width, inner - left)
            rows = block[:len(some) * across].reshape(len(some), across)  # without gaps, for the sake of vectors
            rows[:] = 0.0
            if dims:
                _varying(p, factors, tables, bucket, dims - 1, first, left, False, rows)
            for t in range(len(lines)):
                _fixed(p, factors, tables, bucket, dims - 1, first, some)
                if mixed:
                    sums = total[:rows.size].reshape(rows.shape)
                    sums[:] = rows
                    _varying(p, factors, tables, bucket, dims - 1, first, left, True, sums)
                    _lower(lines[t, left:left + width], some, sums)
                else:
                    _lower(lines[t, left:left + width], some, rows)
                _advance(index, shape, bucket)
                spent += rows.size * (MIXED if mixed else 1.0) + A_ROW + A_TERM * len(some)
                if spent >= _BETWEEN_LOOKS:
                    if end < np.inf and seconds_now() > end:
                        return np.inf
                    spent = 0.0
    return spent


@compiled
def _cheapest(p: Packed, factors: _Factors, tables: np.ndarray, v: int, assignment: np.ndarray
              ) -> int:  # pragma: no cover (compiled)
    """The configuration of v that costs least in its bucket, under an assignment of the others there."""
    sums, f = np.zeros(p.first[v + 1] - p.first[v]), factors.head[v]
    while f >= 0:
        start, own, stride = factors.start[f], -1, 0
        for position in range(factors.dims_at[f], factors.dims_at[f + 1]):
            u, classes = factors.vertex[position], factors.classes[position]
            if u == v:
                own, stride = classes, factors.stride[position]
            else:
                k = assignment[u]
                start += factors.stride[position] * (k if classes < 0 else p.classes[classes + k])
        for k in range(len(sums)):
            place = start + stride * (k if own < 0 else p.classes[own + k])
            if factors.source[f] == _UNARY:
                sums[k] += p.unary[place]
            elif factors.source[f] == _MATRIX:
                sums[k] += p.values[place]
            else:
                sums[k] += tables[place]
        f = factors.link[f]
    return int(np.argmin(sums))


@compiled
def _eliminate(p: Packed, order: np.ndarray, scopes_at: np.ndarray, scopes: np.ndarray, entries: int, end: float
               ) -> tuple[bool, float, np.ndarray]:  # pragma: no cover (compiled)
    """`eliminate`, with the scope of order[step] at scopes_at[step] in `scopes`, whose order it may change, and so many
    entries in all tables. Whether that was done before the clock showed `end`, and what it returns then."""
    vertices, edges = len(p.first) - 1, len(p.matrix)
    rank = np.empty(vertices, np.int64)
    rank[order] = np.arange(vertices)
    factors = _factors_of(p, rank, len(scopes))
    tables, begin, spent = np.empty(entries), 0, 0.0
    total, assignment = 0.0, np.zeros(vertices, np.int64)
    for step in range(vertices):
        scope = scopes[scopes_at[step]:scopes_at[step + 1]]
        size = np.int64(1)
        for u in scope:
            size *= p.first[u + 1] - p.first[u]
        spent = _table(p, factors, tables, order[step], scope, tables[begin:begin + size], end, spent)
        if spent == np.inf:
            return False, np.inf, assignment
        f, place = vertices + edges + step, factors.dims_at[vertices + edges + step]
        if len(scope) == 0:
            total += tables[begin]
        after = begin + size
        for u in scope:
            size //= p.first[u + 1] - p.first[u]
            place = _dim(factors, place, u, -1, size)
        factors.dims_at[f + 1] = place
        if len(scope):
            _file(factors, f, _TABLE, begin, rank)
        begin = int(after)
    for step in range(vertices - 1, -1, -1):
        assignment[order[step]] = _cheapest(p, factors, tables, order[step], assignment)
    return True, total, assignment


def eliminate(packed: Packed, plan: Plan, seconds: float = math.inf) -> tuple[float, np.ndarray]:
    """The least cost, without the network's constant, and an assignment that has it.

    Args:
      packed: the network.
      plan: of all its vertices.
      seconds: that it may take.

    Returns:
      (the least sum; inf if no combination is finite, the configuration of each vertex).

    Raises:
      TimeoutError: it would take longer.
    """
    scopes_at = np.zeros(len(plan.scopes) + 1, np.int64)
    np.cumsum([len(scope) for scope in plan.scopes], out=scopes_at[1:])
    done, cost, assignment = _eliminate(
        packed, np.array(plan.order, np.int64), scopes_at,
        np.fromiter(itertools.chain.from_iterable(plan.scopes), np.int64, int(scopes_at[-1])), int(plan.entries),
        seconds_now() + seconds if seconds < math.inf else math.inf)
    if not done:
        raise TimeoutError
    return cost, assignment
