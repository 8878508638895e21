"""The least sum of an entry of each of some tables over layers, by eliminating one layer after another.

Nothing clever: the layer whose elimination takes the fewest sums comes next. All entries are at least 0 and added as
they come; whoever uses a sum takes off what that can be wrong by.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["LayerTables", "least_sum"]


class LayerTables(NamedTuple):
    """Tables over one or two layers each, or over none.

    Attributes:
      sizes: int64 [layers], configurations of each.
      scopes: int64 [tables, 2], the layers of a table; -1 where it has fewer.
      at: int64 [tables + 1], where the entries of a table begin in `values`.
      values: float64 of at least 0, row-major.
    """

    sizes: np.ndarray
    scopes: np.ndarray
    at: np.ndarray
    values: np.ndarray

    def listed(self) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """The layers of every table, and the table with an axis for each of them."""
        sizes, places = self.sizes.tolist(), self.at.tolist()
        found = []
        for number, scope in enumerate(self.scopes.tolist()):
            own = tuple(v for v in scope if v >= 0)
            found.append((own, self.values[places[number]:places[number + 1]].reshape([sizes[v] for v in own])))
        return found


@compiled
def _comes_before(one: np.ndarray, other: np.ndarray, sizes: np.ndarray) -> bool:  # pragma: no cover (compiled)
    """Whether a table over some layers is added before one over others: the smaller one, so that few sums are as large
    as the result."""
    here = there = 1.0
    for v in one:
        here *= sizes[v]
    for v in other:
        there *= sizes[v]
    if here != there:
        return here < there
    for k in range(min(len(one), len(other))):
        if one[k] != other[k]:
            return bool(one[k] < other[k])
    return len(one) < len(other)


@compiled
def _stride(scope: np.ndarray, sizes: np.ndarray, layer: int) -> int:  # pragma: no cover (compiled)
    """By how much the place of an entry grows with the configuration of a layer; 0 where that is not of the table."""
    stride, found = 1, 0
    for k in range(len(scope) - 1, -1, -1):
        if scope[k] == layer:
            found = stride
        stride *= sizes[scope[k]]
    return found


@compiled
def _add(out: np.ndarray, shape: np.ndarray, one: np.ndarray, by_one: np.ndarray, other: np.ndarray,
         by_other: np.ndarray, begin: int) -> None:  # pragma: no cover (compiled)
    """Sums of an entry of each of two tables, laid out over the axes of `shape`, the second from `begin` on."""
    if len(shape) == 0:
        out[0] = one[0] + other[begin]
        return
    last = len(shape) - 1
    width, a, b, index = shape[last], 0, begin, np.zeros(len(shape), np.int64)
    for place in range(0, len(out), width):
        for k in range(width):
            out[place + k] = one[a + k * by_one[last]] + other[b + k * by_other[last]]
        for axis in range(last - 1, -1, -1):
            index[axis] += 1
            a += by_one[axis]
            b += by_other[axis]
            if index[axis] < shape[axis]:
                break
            a -= by_one[axis] * shape[axis]
            b -= by_other[axis] * shape[axis]
            index[axis] = 0


@compiled
def _eliminated(layer: int, scopes: list[np.ndarray], values: list[np.ndarray], sizes: np.ndarray, rest: np.ndarray
                ) -> np.ndarray:  # pragma: no cover (compiled)
    """The least sum, over the configurations of a layer, of tables that all have it, added in this order: for all
    configurations of the `rest` of their layers."""
    number, names, length = len(scopes), rest[:0], 1
    shapes, by_sum, by_table = [rest] * number, [rest] * number, [rest] * number
    for k in range(number):
        joined = np.array([w for w in rest if (names == w).any() or (scopes[k] == w).any()], np.int64)
        shapes[k] = sizes[joined]
        by_sum[k] = np.array([_stride(names, sizes, w) for w in joined], np.int64)
        by_table[k] = np.array([_stride(scopes[k], sizes, w) for w in joined], np.int64)
        names = joined
    for w in rest:
        length *= sizes[w]
    least = np.full(length, np.inf)
    for choice in range(sizes[layer]):
        total = np.zeros(1)
        for k in range(number):
            length = 1
            for extent in shapes[k]:
                length *= extent
            out = np.empty(length)
            _add(out, shapes[k], total, by_sum[k], values[k], by_table[k], choice * _stride(scopes[k], sizes, layer))
            total = out
        for k in range(len(least)):
            least[k] = min(least[k], total[k])
    return least


@compiled
def _price(link: int, following: list[int], table_of: list[int], alive: list[bool], scopes: list[np.ndarray],
           sizes: np.ndarray, mark: np.ndarray, stamp: int) -> float:  # pragma: no cover (compiled)
    """How many entries the sum of the tables of a chain has, of those that are left: `link` is its first place in
    `following` and `table_of`. Layers are told apart by a stamp in `mark` that was not there before."""
    entries = 1.0
    while link >= 0:
        if alive[table_of[link]]:
            for w in scopes[table_of[link]]:
                if mark[w] != stamp:
                    mark[w] = stamp
                    entries *= sizes[w]
        link = following[link]
    return entries


@compiled
def least_sum(tables: LayerTables, most: float, most_entries: float
              ) -> tuple[float, float]:  # pragma: no cover (compiled)
    """The least sum of an entry of each table.

    Args:
      tables: those.
      most: sums of two entries that may be formed.
      most_entries: how many entries the tables that come from eliminating may have at a time.

    Returns:
      (the least sum, as it is rounded, how many sums it took); (0, inf) where that would be too much. On its way to
      it an entry is rounded at most twice per table.
    """
    sizes, (number, layers) = tables.sizes, (len(tables.scopes), len(tables.sizes))
    scopes = [own[own >= 0] for own in tables.scopes]
    values = [tables.values[tables.at[k]:tables.at[k + 1]] for k in range(number)]
    alive, mark, head = [True for _ in range(number)], np.full(layers, -1), np.full(layers, -1)
    table_of, following, total = [0 for _ in range(0)], [0 for _ in range(0)], 0.0  # chains: the tables of every layer
    for k in range(number):
        if len(scopes[k]) == 0:
            total += values[k][0]
        for v in scopes[k]:
            table_of.append(k)
            following.append(head[v])
            head[v] = len(following) - 1
    queue, sums, held, stamp = [(1.0, 0) for _ in range(0)], 0.0, 0.0, 0
    again, price = [v for v in range(layers) if head[v] >= 0], np.zeros(layers)
    while True:
        for v in again:
            stamp += 1
            price[v] = _price(head[v], following, table_of, alive, scopes, sizes, mark, stamp)
            heapq.heappush(queue, (price[v], v))
        while queue and queue[0][0] != price[queue[0][1]]:
            heapq.heappop(queue)  # eliminated already, or there is a later entry
        if not queue:
            return total, sums
        product, v = heapq.heappop(queue)
        price[v], link = -1.0, head[v]
        parts, stamp, size, smaller = [0 for _ in range(0)], stamp + 1, 1.0, 0.0
        while link >= 0:
            k = table_of[link]
            if alive[k]:
                place = len(parts)
                parts.append(k)
                while place and _comes_before(scopes[k], scopes[parts[place - 1]], sizes):
                    parts[place] = parts[place - 1]
                    place -= 1
                parts[place] = k
                alive[k] = False
                smaller += len(values[k]) if k >= number else 0
            link = following[link]
        others = [0 for _ in range(0)]
        for k in parts:
            for w in scopes[k]:
                if mark[w] != stamp:
                    mark[w] = stamp
                    size *= sizes[w]
                    if w != v:
                        others.append(w)
            sums += size
        held += product / sizes[v] - smaller
        if sums > most or held > most_entries:
            return 0.0, math.inf
        rest = np.sort(np.array(others, np.int64))
        least = _eliminated(v, [scopes[k] for k in parts], [values[k] for k in parts], sizes, rest)
        for k in parts:
            values[k] = tables.values[:0]
        if len(rest) == 0:
            total += least[0]
        for w in rest:
            table_of.append(len(values))
            following.append(head[w])
            head[w] = len(following) - 1
        scopes.append(rest)
        values.append(least)
        alive.append(len(rest) > 0)
        again = others
