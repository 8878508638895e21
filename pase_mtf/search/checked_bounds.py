"""The sums and minima that a certificate is checked by, compiled. Each is at most what it stands for.

Signed numbers are added with `_down`, which is never more than the true sum. What is at least 0 is added as it
comes, and whoever uses it takes off what that can be wrong by: 2**-53 of the sum per addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["HUGE", "MOST", "FlatNetwork", "add_down", "add_potentials", "add_table", "at_layers", "at_pair", "exclude",
           "open_table", "reparametrised"]

HUGE = 1e300
"""Stands for +inf and whatever else is above it."""
MOST = 1e290
"""The largest absolute value of everything else: a million such numbers and HUGE add up to something finite."""


class FlatNetwork(NamedTuple):
    """The network as the checker sees it. A pair is all edges between two layers; side 0 is the source of the first of
    them, side 1 its target. Configurations of a side that all these edges treat alike are one group.

    Attributes:
      first: int64 [layers + 1], where the configurations of a layer begin.
      unary: float64 [configurations], at most their costs, loops included.
      ends: int64 [2, pairs], the layers.
      groups: int32, of every configuration of a side, its group.
      groups_at: int64 [2, pairs], where those of a side begin in `groups`.
      slots: int64 [2, pairs + 1], where numbers per group of a side begin; and, in the last column, their number.
      counts: int64 [2, pairs], how many groups a side has.
    """

    first: np.ndarray
    unary: np.ndarray
    ends: np.ndarray
    groups: np.ndarray
    groups_at: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


@compiled
def _down(total: float) -> float:  # pragma: no cover (compiled)
    """At most the true sum of two numbers whose rounded sum (or difference) this is: that differs from it by at most
    2**-53 of it, and what is subtracted is three times as much, which leaves room for the rounding here."""
    return total - abs(total) * (3 * 2.0 ** -53)


@compiled
def add_down(one: np.ndarray, other: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """At most the sum, entry by entry."""
    total: np.ndarray = one + other
    for k in range(len(total)):
        total[k] = _down(total[k])
    return total


@compiled
def add_table(total: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool
              ) -> None:  # pragma: no cover (compiled)
    """Adds matrix[rows, columns], or with `turned` matrix[columns, rows], rounded down; in blocks that fit a cache."""
    block = 32  # what fits a cache, whichever way it is read
    for top in range(0, len(rows), block):
        for left in range(0, len(columns), block):
            for r in range(top, min(top + block, len(rows))):
                for c in range(left, min(left + block, len(columns))):
                    cost = matrix[columns[c], rows[r]] if turned else matrix[rows[r], columns[c]]
                    total[r, c] = _down(total[r, c] + min(cost, HUGE))


@compiled
def add_potentials(flat: FlatNetwork, pairs: np.ndarray, turned: np.ndarray, sizes: np.ndarray, values: np.ndarray,
                    classes: np.ndarray, given: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Adds to `given`, per group, the largest potential of its configurations: any number will do, and none is better.

    Args:
      flat: the network.
      pairs, turned: of every potential its pair, and whether its source is side 1.
      sizes: [potentials, 2], the lengths of `rows` and `columns`.
      values, classes: all rows and columns, and all their classes, one after another.
      given: float64 per slot, added to.

    Returns:
      the first potential with a class that is out of range or an amount that is too large; or -1.
    """
    value_at, class_at = 0, 0
    for number in range(len(pairs)):
        for end in range(2):
            e, side = pairs[number], end ^ turned[number]
            v = flat.ends[side, e]
            largest = np.full(flat.counts[side, e], -np.inf)
            for k in range(flat.first[v + 1] - flat.first[v]):
                chosen = classes[class_at + k]
                if not 0 <= chosen < sizes[number, end]:
                    return number
                amount = values[value_at + chosen]
                if not -MOST <= amount <= MOST:
                    return number
                g = flat.groups[flat.groups_at[side, e] + k]
                largest[g] = max(largest[g], amount)
            for g in range(len(largest)):
                if largest[g] > -np.inf:
                    given[flat.slots[side, e] + g] += largest[g]
            value_at += sizes[number, end]
            class_at += flat.first[v + 1] - flat.first[v]
    return -1


@compiled
def reparametrised(flat: FlatNetwork, given: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """At most the cost of every configuration with the potentials that its layer is given."""
    theta = flat.unary.copy()
    for e in range(flat.ends.shape[1]):
        for side in range(2):
            v = flat.ends[side, e]
            for k in range(flat.first[v + 1] - flat.first[v]):
                amount = given[flat.slots[side, e] + flat.groups[flat.groups_at[side, e] + k]]
                theta[flat.first[v] + k] = _down(theta[flat.first[v] + k] + amount)
    return theta


@compiled
def at_layers(flat: FlatNetwork, theta: np.ndarray, active: np.ndarray, reduced: np.ndarray, near: np.ndarray
               ) -> np.ndarray:  # pragma: no cover (compiled)
    """The least theta of every layer's active configurations. Fills in by how much every active configuration exceeds
    it, at least; and the least such number of every group, -1 for one without active configurations."""
    least = np.full(len(flat.first) - 1, np.inf)
    for v in range(len(least)):
        for k in range(flat.first[v], flat.first[v + 1]):
            if active[k]:
                least[v] = min(least[v], theta[k])
        for k in range(flat.first[v], flat.first[v + 1]):
            reduced[k] = max(0.0, _down(theta[k] - least[v]))
    near[:] = -1.0
    for e in range(flat.ends.shape[1]):
        for side in range(2):
            v = flat.ends[side, e]
            for k in range(flat.first[v], flat.first[v + 1]):
                slot = flat.slots[side, e] + flat.groups[flat.groups_at[side, e] + k - flat.first[v]]
                if active[k] and (near[slot] < 0 or reduced[k] < near[slot]):
                    near[slot] = reduced[k]
    return least


@compiled(fastmath={"nnan", "nsz"})
def _left(costs: np.ndarray, amount: float, given: np.ndarray, out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """At most what is left of these costs of one group of side 0, without its potential and those of side 1."""
    for c in range(len(out)):
        out[c] = _down(_down(min(costs[c], HUGE) - amount) - given[c])


@compiled(fastmath={"nnan", "nsz"})
def at_pair(table: np.ndarray, given: tuple[np.ndarray, np.ndarray], near: tuple[np.ndarray, np.ndarray],
            beyond: tuple[np.ndarray, np.ndarray], least_only: bool) -> float:  # pragma: no cover (compiled)
    """The least that is left on a pair, over its active groups.

    Args:
      table: float64 [groups of side 0, of side 1], what the pair costs.
      given, near: of the groups of either side; see `at_layers`.
      beyond: filled in: by how much that rises with this group, at least, what the layer at the other end then costs
        above its least included.
      least_only: leave `beyond` as it is.
    """
    others = np.flatnonzero(near[1] >= 0)
    taken, ahead, whole = given[1][others], near[1][others], len(others) == len(near[1])
    costs, line = np.empty(len(others)), np.empty(len(others))
    least, back = np.inf, np.full(len(others), np.inf)
    for group in range(len(near[0])):
        if near[0][group] < 0:
            continue
        if whole:
            _left(table[group], given[0][group], taken, line)
        else:
            for c in range(len(others)):
                costs[c] = table[group, others[c]]
            _left(costs, given[0][group], taken, line)
        if least_only:
            for c in range(len(others)):
                back[c] = min(back[c], line[c])
            continue
        own, lowest, with_ahead = near[0][group], np.inf, np.inf
        for c in range(len(others)):
            lowest = min(lowest, line[c])
            with_ahead = min(with_ahead, line[c] + ahead[c])
            back[c] = min(back[c], line[c] + own)
        least = min(least, lowest)
        beyond[0][group] = with_ahead
    if least_only:
        for c in range(len(others)):
            least = min(least, back[c])
        return least
    for group in range(len(near[0])):
        if near[0][group] >= 0:
            beyond[0][group] = max(0.0, _down(_down(beyond[0][group]) - least))
    for c in range(len(others)):
        beyond[1][others[c]] = max(0.0, _down(_down(back[c]) - least))
    return least


@compiled
def exclude(flat: FlatNetwork, reduced: np.ndarray, beyond: np.ndarray, above: float, active: np.ndarray
             ) -> int:  # pragma: no cover (compiled)
    """Clears the active configurations that raise the bound of layer, pairs and the layers next to it together by at
    least `above`. How many."""
    rise = reduced.copy()
    for e in range(flat.ends.shape[1]):
        for side in range(2):
            v = flat.ends[side, e]
            for k in range(flat.first[v + 1] - flat.first[v]):
                rise[flat.first[v] + k] += beyond[flat.slots[side, e] + flat.groups[flat.groups_at[side, e] + k]]
    count = 0
    for k in range(len(rise)):
        if active[k] and rise[k] >= above:
            active[k] = False
            count += 1
    return count


@compiled
def open_table(table: np.ndarray, given: tuple[np.ndarray, np.ndarray], rows: np.ndarray, columns: np.ndarray,
               least: float, out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """By how much what is left on a pair exceeds its least, at least, for these groups of either side."""
    costs, taken = np.empty(len(columns)), given[1][columns]
    for r in range(len(rows)):
        for c in range(len(columns)):
            costs[c] = table[rows[r], columns[c]]
        _left(costs, given[0][rows[r]], taken, out[r])
        for c in range(len(columns)):
            out[r, c] = max(0.0, _down(out[r, c] - least))
