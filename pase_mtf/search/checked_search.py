"""A search among what a certificate leaves open: whether an assignment of it costs less than a limit.

It goes depth first. All costs are at least 0: what is decided, and of every other layer the least that one of its
configurations costs with all that is decided, add up to no more than any assignment with these decisions costs. Nor do
they where every layer hands what its configurations cost on to those before it, in equal shares, with what the two cost
together: to every configuration the least that there is for it. Where that reaches the limit, with a configuration of
another layer or without, there is nothing to be found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["EXHAUSTED", "Remainder", "remainder_of", "search"]

# How a search ends.
EXHAUSTED = 1
_CHEAPER = 0
_TOO_MUCH = -1
# How many sums of the checker's eliminations take as long as keeping and comparing the cost of a configuration does.
_SUMS = 4
# What costs less is not shared out: numbers that small lie so far apart that shares may add up to twice as much.
_LEAST_SHARED = 1e-280
# Entries of what it holds at most: of the tables in both directions, and of costs on all levels.
_MOST_HELD = 1 << 24


class Remainder(NamedTuple):
    """What is left open.

    Attributes:
      first: int64 [layers + 1], where the configurations of a layer begin.
      own: float64 [configurations], what each costs by itself.
      at: int64 [layers, layers], where what two layers cost together begins; -1 where they have nothing to do with each
        other. A row per configuration of the first.
      values: float64.
    """

    first: np.ndarray
    own: np.ndarray
    at: np.ndarray
    values: np.ndarray


def remainder_of(tables: list[tuple[tuple[int, ...], np.ndarray]]) -> Remainder | None:
    """Tables over one or two layers each, laid out for the search; None where that would be too much.

    Args:
      tables: the layers of each, ascending, and float64 of at least 0 with an axis per layer.
    """
    size = {v: length for own, table in tables for v, length in zip(own, table.shape, strict=True)}
    layers = {v: number for number, v in enumerate(sorted(size))}
    pairs = [(own, table) for own, table in tables if len(own) == 2]
    held = max(len(layers) ** 2, sum(2 * table.size for _, table in pairs), (len(layers) + 1) * sum(size.values()))
    if held > _MOST_HELD:
        return None
    first = np.cumsum([0, *(size[v] for v in layers)])
    costs, at, values, used = np.zeros(first[-1]), np.full((len(layers), len(layers)), -1), [np.zeros(0)], 0
    for own, table in tables:
        if len(own) == 1:
            begin = first[layers[own[0]]]
            costs[begin:begin + len(table)] += table
    for (u, v), table in pairs:
        for one, other, turned in ((u, v, table), (v, u, table.T)):
            at[layers[one], layers[other]] = used
            values.append(turned.ravel())
            used += turned.size
    return Remainder(first, costs, at, np.concatenate(values))


@compiled
def _exclude(first: np.ndarray, costs: np.ndarray, active: np.ndarray, decided: np.ndarray, constant: float,
             limit: float, least: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Leaves out what costs the limit with the least of all other layers. Returns the layer to decide next: -1 where
    nothing is left, the number of layers where everything is decided."""
    layers, total = len(least), constant
    for v in range(layers):
        least[v] = 0.0
        if not decided[v]:
            least[v] = np.inf
            for k in range(first[v], first[v + 1]):
                if active[k]:
                    least[v] = min(least[v], costs[k])
            total += least[v]
    if total >= limit:
        return -1
    chosen, fewest, furthest = layers, 0, 0.0
    for v in range(layers):
        if decided[v]:
            continue
        left, apart = 0, 0.0
        for k in range(first[v], first[v + 1]):
            if active[k]:
                if total - least[v] + costs[k] >= limit:
                    active[k] = False
                else:
                    left += 1
                    apart += costs[k] - least[v]
        if chosen == layers or left < fewest or (left == fewest and apart > furthest):
            chosen, fewest, furthest = v, left, apart
    return chosen


@compiled
def _hand_on(remainder: Remainder, costs: np.ndarray, active: np.ndarray, decided: np.ndarray, constant: float,
             limit: float, chosen: int, handed: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Has layers hand on what they cost, in the end to the one to decide next, and leaves out of that what costs the
    limit. Returns how many sums it took."""
    first, at = remainder.first, remainder.at
    order, left, total, sums = np.empty(len(decided), np.int64), 1, constant, 0
    order[0] = chosen
    for v in range(len(decided)):
        if not decided[v] and v != chosen:
            order[left] = v
            left += 1
    handed[:] = costs
    for place in range(left - 1, 0, -1):
        w, takers, least = order[place], 0, np.inf
        begin, end = first[w], first[w + 1]
        sums += place  # those before it are looked at twice, whether or not they have to do with it
        for p in order[:place]:
            takers += at[w, p] >= 0
        for k in range(begin, end):
            if active[k]:
                least = min(least, handed[k])
                # Near the least float64 rounding is no small part of a share: such are not handed on.
                handed[k] = 0.0 if 0.0 < handed[k] < _LEAST_SHARED else handed[k] / max(takers, 1)
        if takers == 0:
            total += least
        for p in order[:place]:
            if at[w, p] < 0:  # as at[p, w], which is not beside the one before it in memory
                continue
            for k in range(first[p], first[p + 1]):
                if not active[k]:
                    continue
                row, least = at[p, w] + (k - first[p]) * (end - begin) - begin, np.inf
                for other in range(begin, end):
                    if active[other]:
                        least = min(least, handed[other] + remainder.values[row + other])
                handed[k] += least
            sums += (first[p + 1] - first[p]) * (end - begin)
    for k in range(first[chosen], first[chosen + 1]):
        active[k] &= total + handed[k] < limit
    return sums


@compiled
def search(remainder: Remainder, limit: float, most: int) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Looks for an assignment whose parts add up to less than a limit, as they are rounded.

    Args:
      remainder: what is left open.
      limit: above 0; infinite costs are never below it.
      most: how long to look, in sums of the checker's eliminations.

    Returns:
      (EXHAUSTED where there is none, how long it took: at most one decision more).
    """
    first, at = remainder.first, remainder.at
    layers, configurations = len(first) - 1, first[-1]
    costs, active = np.zeros((layers + 1, configurations)), np.ones((layers + 1, configurations), np.bool_)
    decided, constants = np.zeros((layers + 1, layers), np.bool_), np.zeros(layers + 1)
    layer, least, handed = np.zeros(layers + 1, np.int64), np.zeros(layers), np.zeros(configurations)
    costs[0] = remainder.own
    depth = looked = 0
    layer[0] = _exclude(first, costs[0], active[0], decided[0], 0.0, limit, least)
    if 0 <= layer[0] < layers:
        looked += _hand_on(remainder, costs[0], active[0], decided[0], 0.0, limit, layer[0], handed)
    while depth >= 0 and looked <= most:
        v, k = layer[depth], -1
        if v == layers:
            return _CHEAPER, looked
        if v >= 0:  # the cheapest of its configurations that is left
            for other in range(first[v], first[v + 1]):
                if active[depth, other] and (k < 0 or costs[depth, other] < costs[depth, k]):
                    k = other
        if k < 0:
            depth -= 1
            continue
        looked += _SUMS * configurations
        active[depth, k] = False  # from here on it has been looked at
        depth += 1
        decided[depth] = decided[depth - 1]
        decided[depth, v] = True
        constants[depth] = constants[depth - 1] + costs[depth - 1, k]
        for u in range(layers):
            if decided[depth, u]:
                continue
            begin, end = first[u], first[u + 1]
            active[depth, begin:end] = active[depth - 1, begin:end]
            costs[depth, begin:end] = costs[depth - 1, begin:end]
            if at[v, u] >= 0:
                row = at[v, u] + (k - first[v]) * (end - begin)
                for other in range(end - begin):
                    costs[depth, begin + other] += remainder.values[row + other]
        layer[depth] = _exclude(first, costs[depth], active[depth], decided[depth], constants[depth], limit, least)
        if 0 <= layer[depth] < layers:
            looked += _hand_on(remainder, costs[depth], active[depth], decided[depth], constants[depth], limit,
                               layer[depth], handed)
    return EXHAUSTED if looked <= most else _TOO_MUCH, looked
