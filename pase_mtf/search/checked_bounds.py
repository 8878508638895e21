"""The sums and minima that a certificate is checked by, compiled. Each is at most what it stands for.

Signed numbers are added with `_down`, which is never more than the true sum. What is at least 0 is added as it
comes, and whoever uses it takes off what that can be wrong by: 2**-53 of the sum per addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["HUGE", "MOST", "FlatNetwork", "add_down", "add_potentials", "add_table", "at_layers", "at_pairs", "exclude",
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


# Rows and columns of a sum of tables that are added up at once: they, and what is read for them, fit a cache.
_BLOCK = (16, 256)


@compiled
def _add_line(sums: np.ndarray, costs: np.ndarray, places: np.ndarray, first: bool
              ) -> None:  # pragma: no cover (compiled)
    if first:
        for c in range(len(sums)):
            sums[c] = min(costs[places[c]], HUGE)
    else:
        for c in range(len(sums)):
            sums[c] = _down(sums[c] + min(costs[places[c]], HUGE))


@compiled
def add_table(total: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, turned: bool, first: bool
              ) -> None:  # pragma: no cover (compiled)
    """Adds matrix[rows, columns], or with `turned` matrix[columns, rows], rounded down; the first table is put in place
    of what is there, as it is. Lines are listed without a sign, which would be looked at for every entry."""
    height, width = _BLOCK
    for top in range(0, len(rows), height):
        for left in range(0, len(columns), width):
            places = columns[left:left + width]
            for r in range(top, min(top + height, len(rows))):
                sums = total[r, left:left + width]
                if turned:
                    _add_line(sums, matrix[:, rows[r]], places, first)
                else:
                    _add_line(sums, matrix[rows[r]], places, first)


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


@compiled
def _under(least: float) -> float:  # pragma: no cover (compiled)
    """At most every true difference of numbers whose least rounded difference this is: rounding keeps their order, so
    none of them can be below a float64 that is below that. What is forbidden stays HUGE, whatever was subtracted."""
    return _down(min(least, 0.5 * HUGE))


@compiled(fastmath={"nnan", "nsz"})
def _least(line: np.ndarray) -> float:  # pragma: no cover (compiled)
    """The least of some numbers (they are overwritten): one half beside the other, again and again, which a processor
    does several at a time."""
    size = len(line)
    while size > 1:
        half = (size + 1) // 2
        low, high = line[:size - half], line[half:size]
        for c in range(len(high)):
            low[c] = min(low[c], high[c])
        size = half
    return line[0] if size else np.inf


@compiled(fastmath={"nnan", "nsz"})
def _least_sums(costs: np.ndarray, amount: float, sums: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Lowers each of the sums to its cost and the amount."""
    for c in range(len(sums)):
        sums[c] = min(sums[c], costs[c] + amount)


@compiled(fastmath={"nnan", "nsz"})
def _look_ahead(costs: np.ndarray, own: float, ahead: np.ndarray, raised: np.ndarray, line: np.ndarray
                ) -> float:  # pragma: no cover (compiled)
    """Lowers `raised` to these costs of one group and `own`. The least sum of a cost and what is ahead of it."""
    for c in range(len(line)):
        raised[c] = min(raised[c], costs[c] + own)
        line[c] = costs[c] + ahead[c]
    return _least(line)


# Rows and columns of a table that are looked at for one pair after another, while they are in a cache.
_TILE = (32, 1024)


@compiled
def at_pairs(table: np.ndarray, slots: np.ndarray, given: np.ndarray, near: np.ndarray, beyond: np.ndarray,
             least_only: bool) -> np.ndarray:  # pragma: no cover (compiled)
    """The least that is left on each of some pairs of equal costs, over its active groups. What is the same for all
    entries of a row or a column is subtracted from the least of them.

    Args:
      table: float64 [groups of side 0, of side 1], what each of the pairs costs.
      slots: int64 [pairs, 2], where numbers per group of the two sides begin.
      given, near: per slot, the potentials, and see `at_layers`.
      beyond: filled in: by how much that rises with this group, at least, what the layer at the other end then costs
        above its least included.
      least_only: leave `beyond` as it is.
    """
    (height, width), pairs = table.shape, len(slots)
    alone = np.full((pairs, width), np.inf)
    raised, ahead, line = alone.copy(), alone.copy(), np.empty(width)
    for k in range(pairs):
        for c in range(width):
            if near[slots[k, 1] + c] >= 0:
                ahead[k, c] = _down(near[slots[k, 1] + c] - given[slots[k, 1] + c])
        if not least_only:
            beyond[slots[k, 0]:slots[k, 0] + height] = np.inf
    for top in range(0, height, _TILE[0]):
        for left in range(0, width, _TILE[1]):
            right = min(left + _TILE[1], width)
            for k in range(pairs):
                for r in range(top, min(top + _TILE[0], height)):
                    slot = slots[k, 0] + r
                    if near[slot] < 0:
                        continue
                    costs = table[r, left:right]
                    _least_sums(costs, -given[slot], alone[k, left:right])
                    if not least_only:
                        own = _down(near[slot] - given[slot])
                        beyond[slot] = min(beyond[slot], _look_ahead(
                            costs, own, ahead[k, left:right], raised[k, left:right], line[:right - left]))
    least = np.full(pairs, np.inf)
    for k in range(pairs):
        one, other = slots[k]
        for c in range(width):
            if near[other + c] >= 0:
                least[k] = min(least[k], _down(_under(alone[k, c]) - given[other + c]))
        if least_only:
            continue
        for slot in range(one, one + height):
            if near[slot] >= 0:
                beyond[slot] = max(0.0, _down(_down(_under(beyond[slot]) - given[slot]) - least[k]))
        for c in range(width):
            if near[other + c] >= 0:
                beyond[other + c] = max(0.0, _down(_down(_under(raised[k, c]) - given[other + c]) - least[k]))
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
    """By how much the remainder on a pair exceeds its least, at least, for these groups of either side."""
    for r in range(len(rows)):
        for c in range(len(columns)):
            left = _down(_down(min(table[rows[r], columns[c]], HUGE) - given[0][rows[r]]) - given[1][columns[c]])
            out[r, c] = max(0.0, _down(left - least))
