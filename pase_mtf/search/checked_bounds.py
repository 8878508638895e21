"""The sums and minima that a certificate is checked by, compiled. Each is at most what it stands for.

Signed numbers are added with `_down`, which is never more than the true sum, or what is rounded off is added up, too.
What is at least 0 is added as it comes, and whoever uses it takes off what that can be wrong by: 2**-53 of the sum
per addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["HUGE", "MOST", "FlatNetwork", "Minima", "SmallTables", "add_down", "add_potentials", "add_table",
           "alike", "at_layers", "at_small_pairs", "exclude", "least_left", "nothing_read", "open_small", "open_table",
           "read", "reparametrised", "take_over"]

HUGE = 1e300
"""Stands for +inf and whatever else is above it."""
MOST = 1e290
"""The largest absolute value of everything else: a million such numbers and HUGE add up to something finite."""
_MOST_GIVEN = 1e296
"""And of a potential, which may be the sum of such costs of a million layers."""


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


class SmallTables(NamedTuple):
    """What pairs cost, of those where that is little to read.

    Attributes:
      kinds: int64 [pairs], of large ones too: which pairs have equal costs, those of one number.
      at: int64 [kinds], where the table of a kind begins in `values`; -1 where it is large, and elsewhere.
      values: float64, row-major.
    """

    kinds: np.ndarray
    at: np.ndarray
    values: np.ndarray


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
def add_table(total: np.ndarray, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray, first: bool
              ) -> None:  # pragma: no cover (compiled)
    """Adds matrix[rows, columns] (without columns: as many as there are, as they are), rounded down; the first table is
    put in place of what is there, as it is. Lines are listed without a sign, which would be looked at for every entry.
    """
    line = np.empty(total.shape[1])
    for r in range(len(rows)):
        sums, costs = total[r], matrix[rows[r]]
        if len(columns):
            for c in range(len(sums)):
                line[c] = costs[columns[c]]
            costs = line
        if first:
            for c in range(len(sums)):
                sums[c] = min(costs[c], HUGE)
        else:
            for c in range(len(sums)):
                sums[c] = _down(sums[c] + min(costs[c], HUGE))


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
                if not -_MOST_GIVEN <= amount <= _MOST_GIVEN:
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
    """At most the cost of every configuration with the potentials that its layer is given. What additions round off is
    added up as well: rounded down one by one, those of thousands of edges would take more than is tolerated."""
    theta, lost = flat.unary.copy(), np.zeros(len(flat.unary))
    for e in range(flat.ends.shape[1]):
        for side in range(2):
            v = flat.ends[side, e]
            for k in range(flat.first[v], flat.first[v + 1]):
                amount = given[flat.slots[side, e] + flat.groups[flat.groups_at[side, e] + k - flat.first[v]]]
                before, total = theta[k], theta[k] + amount
                part = total - before
                # The second summand is exactly what this addition rounds off (Knuth's sum of two numbers).
                lost[k] = _down(lost[k] + ((before - (total - part)) + (amount - part)))
                theta[k] = total
    for k in range(len(theta)):
        if lost[k] != 0.0:  # else nothing was rounded, or no more than down
            theta[k] = _down(theta[k] + lost[k])
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
def _least_of_two(one: np.ndarray, other: np.ndarray, line: np.ndarray) -> float:  # pragma: no cover (compiled)
    """The least sum of an entry of each of two vectors, at the same place. A single running minimum would be a chain:
    the four quarters of the vectors (they may overlap) come down to one, in `line`, and halves of that to one, again
    and again, which a processor does several at a time."""
    size = (len(one) + 3) // 4
    second, third, last = min(size, len(one) - size), min(2 * size, len(one) - size), len(one) - size
    a, b, c, d = one[:size], one[second:second + size], one[third:third + size], one[last:]
    e, f, g, h = other[:size], other[second:second + size], other[third:third + size], other[last:]
    for k in range(size):
        line[k] = min(min(a[k] + e[k], b[k] + f[k]), min(c[k] + g[k], d[k] + h[k]))
    while size > 1:
        half = (size + 1) // 2
        low, high = line[:size - half], line[half:size]
        for k in range(len(high)):
            low[k] = min(low[k], high[k])
        size = half
    least: float = line[0]
    return least


_Four = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@compiled(fastmath={"nnan", "nsz"})
def _lower_alone(costs: _Four, taken: np.ndarray, alone: np.ndarray) -> None:  # pragma: no cover (compiled)
    """`_lower` where nobody asks what is raised: half the work."""
    a, b, c, d = costs
    for k in range(len(alone)):
        alone[k] = min(alone[k], min(min(a[k] - taken[0], b[k] - taken[1]), min(c[k] - taken[2], d[k] - taken[3])))


@compiled(fastmath={"nnan", "nsz"})
def _lower(costs: _Four, taken: np.ndarray, own: np.ndarray, alone: np.ndarray, raised: np.ndarray
           ) -> None:  # pragma: no cover (compiled)
    """Lowers `alone` to each of four rows of costs, of which so much is taken, and `raised` to it with what is its
    own added: four at once, so that what is lowered is loaded and stored a quarter as often."""
    a, b, c, d = costs
    for k in range(len(alone)):
        e, f, g, h = a[k], b[k], c[k], d[k]
        alone[k] = min(alone[k], min(min(e - taken[0], f - taken[1]), min(g - taken[2], h - taken[3])))
        raised[k] = min(raised[k], min(min(e + own[0], f + own[1]), min(g + own[2], h + own[3])))


class Minima(NamedTuple):
    """What is left on some pairs of equal costs, as far as their table is read: float64 [pairs, groups of side 1].
    What is the same for all entries of a row or a column is subtracted from the least of them.

    Attributes:
      alone: the least of every column, without the potentials of side 0.
      raised: likewise, with what the layer at side 0 then costs above its least included.
      ahead: what the layer at side 1 costs above its least included, without the potentials of that side.
    """

    alone: np.ndarray
    raised: np.ndarray
    ahead: np.ndarray


@compiled
def nothing_read(shape: tuple[int, int], slots: np.ndarray, given: np.ndarray, near: np.ndarray, beyond: np.ndarray,
                 least_only: bool) -> Minima:  # pragma: no cover (compiled)
    """Before the table of some pairs is read; see `read`."""
    (height, width), pairs = shape, len(slots)
    found = Minima(np.full((pairs, width), np.inf), np.full((pairs, width), np.inf), np.full((pairs, width), np.inf))
    for k in range(pairs):
        for c in range(width):
            if near[slots[k, 1] + c] >= 0:
                found.ahead[k, c] = _down(near[slots[k, 1] + c] - given[slots[k, 1] + c])
        if not least_only:
            beyond[slots[k, 0]:slots[k, 0] + height] = np.inf
    return found


# Rows and columns of a table that are looked at for one pair after another, while they are in a cache.
_TILE = (32, 1024)


@compiled
def read(found: Minima, rows: np.ndarray, band: np.ndarray, slots: np.ndarray, given: np.ndarray, near: np.ndarray,
         beyond: np.ndarray, least_only: bool) -> None:  # pragma: no cover (compiled)
    """Reads some rows of the table of some pairs.

    Args:
      found: what is known of the pairs.
      rows, band: int64, the rows, and float64 [rows, groups of side 1], what each of the pairs costs.
      slots: int64 [pairs, 2], where numbers per group of the two sides begin.
      given, near: per slot, the potentials, and see `at_layers`.
      beyond: filled in, for side 0 here, for side 1 by `least_left`: by how much that rises with this group, at least,
        what the layer at the other end then costs above its least included.
      least_only: leave `beyond` as it is, and `found.raised`.
    """
    height, width = band.shape
    line, chosen, taken, own = np.empty(_TILE[1]), np.empty(_TILE[0] + 3, np.int64), np.empty(4), np.empty(4)
    for top in range(0, height, _TILE[0]):
        for left in range(0, width, _TILE[1]):
            right = min(left + _TILE[1], width)
            for k in range(len(slots)):
                count = 0
                for r in range(top, min(top + _TILE[0], height)):
                    if near[slots[k, 0] + rows[r]] >= 0:
                        chosen[count:count + 4] = r  # the last one is taken up to four times: that changes no minimum
                        count += 1
                for first in range(0, count, 4):
                    for number in range(4):
                        slot = slots[k, 0] + rows[chosen[first + number]]
                        taken[number], own[number] = given[slot], _down(near[slot] - given[slot])
                    a, b, c, d = chosen[first:first + 4]
                    costs, alone = (band[a, left:right], band[b, left:right], band[c, left:right],
                                    band[d, left:right]), found.alone[k, left:right]
                    if least_only:
                        _lower_alone(costs, taken, alone)
                    else:
                        _lower(costs, taken, own, alone, found.raised[k, left:right])
                for r in chosen[:0 if least_only else count]:
                    slot = slots[k, 0] + rows[r]
                    least = _least_of_two(band[r, left:right], found.ahead[k, left:right], line)
                    beyond[slot] = min(beyond[slot], least)


@compiled
def least_left(found: Minima, height: int, slots: np.ndarray, given: np.ndarray, near: np.ndarray, beyond: np.ndarray,
               least_only: bool) -> np.ndarray:  # pragma: no cover (compiled)
    """The least that is left on each of some pairs over its active groups, once all rows are read; see `read`."""
    least = np.full(len(slots), np.inf)
    for k in range(len(slots)):
        one, other = slots[k]
        for c in range(found.alone.shape[1]):
            if near[other + c] >= 0:
                least[k] = min(least[k], _down(_under(found.alone[k, c]) - given[other + c]))
        if least_only:
            continue
        for slot in range(one, one + height):
            if near[slot] >= 0:
                beyond[slot] = max(0.0, _down(_down(_under(beyond[slot]) - given[slot]) - least[k]))
        for c in range(found.alone.shape[1]):
            if near[other + c] >= 0:
                beyond[other + c] = max(0.0, _down(_down(_under(found.raised[k, c]) - given[other + c]) - least[k]))
    return least


@compiled
def _equal(one: np.ndarray, other: np.ndarray, signs: bool) -> bool:  # pragma: no cover (compiled)
    """Whether numbers are equal, or all have equal signs."""
    equal = True
    for k in range(len(one)):
        equal &= one[k] == other[k] or (signs and (one[k] >= 0) == (other[k] >= 0))
    return equal


@compiled
def alike(flat: FlatNetwork, kinds: np.ndarray, given: np.ndarray, near: np.ndarray, least_only: bool
          ) -> np.ndarray:  # pragma: no cover (compiled)
    """int64 [pairs]: the first pair with equal costs, potentials and neighbours (repeated layers), as far as `read`
    looks at those."""
    pairs, room = len(kinds), 4
    while room < 2 * len(kinds):
        room *= 2
    found, places = np.empty(pairs, np.int64), np.full(room, -1)
    for e in range(pairs):
        code = kinds[e]
        for side in range(2):
            for k in range(flat.slots[side, e], flat.slots[side, e] + flat.counts[side, e]):
                code = (code ^ hash(given[k])) * 0x100000001B3
                code = (code ^ (near[k] >= 0 if least_only else hash(near[k]))) * 0x100000001B3
        place = (code ^ (code >> 32)) & (room - 1)
        while places[place] >= 0:
            other, same = places[place], kinds[places[place]] == kinds[e]
            for side in range(2):
                if same:
                    one, two, count = flat.slots[side, e], flat.slots[side, other], flat.counts[side, e]
                    same = (_equal(given[one:one + count], given[two:two + count], False)
                            and _equal(near[one:one + count], near[two:two + count], least_only))
            if same:
                break
            place = (place + 1) & (room - 1)
        if places[place] < 0:
            places[place] = e
        found[e] = places[place]
    return found


@compiled
def at_small_pairs(flat: FlatNetwork, small: SmallTables, firsts: np.ndarray, given: np.ndarray, near: np.ndarray,
                   beyond: np.ndarray, least_only: bool, least: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Fills in the least that is left (see `least_left`) on every pair with a small table that is the first of those
    alike."""
    for e in range(len(firsts)):
        begin = small.at[small.kinds[e]]
        if firsts[e] != e or begin < 0:
            continue
        height, width = flat.counts[0, e], flat.counts[1, e]
        slots = flat.slots[:, e:e + 1].T.copy()
        found = nothing_read((height, width), slots, given, near, beyond, least_only)
        table = small.values[begin:begin + height * width].reshape(height, width)
        read(found, np.arange(height), table, slots, given, near, beyond, least_only)
        least[e] = least_left(found, height, slots, given, near, beyond, least_only)[0]


@compiled
def take_over(flat: FlatNetwork, firsts: np.ndarray, beyond: np.ndarray, least: np.ndarray
              ) -> None:  # pragma: no cover (compiled)
    """Gives every pair what was found for the first of those alike."""
    for e in range(len(firsts)):
        least[e] = least[firsts[e]]
        for side in range(2):
            for k in range(flat.counts[side, e]):
                beyond[flat.slots[side, e] + k] = beyond[flat.slots[side, firsts[e]] + k]


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
def _above(cost: float, row: float, column: float, least: float) -> float:  # pragma: no cover (compiled)
    """By how much an entry of a table, less the potentials of its row and its column, exceeds the least, at least."""
    return max(0.0, _down(_down(_down(min(cost, HUGE) - row) - column) - least))


@compiled
def open_table(table: np.ndarray, rows: np.ndarray, columns: np.ndarray, least: float
               ) -> None:  # pragma: no cover (compiled)
    """Makes of what some groups of a pair cost, given the potentials of its rows and columns, by how much that exceeds
    the least that is left on the pair, at least."""
    for r in range(len(rows)):
        for c in range(len(columns)):
            table[r, c] = _above(table[r, c], rows[r], columns[c], least)


@compiled
def open_small(flat: FlatNetwork, small: SmallTables, chosen: np.ndarray, first: np.ndarray, given: np.ndarray,
               least: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Fills in what some configurations cost above the least that is left on every pair with a small table.

    Args:
      flat, small: the network.
      chosen, first: int64, those configurations, and [layers + 1], where those of a layer begin.
      given, least: potentials per slot, and what is left per pair.
      at, values: int64 [pairs], where the table of a pair begins, and float64, filled in.
    """
    for e in range(len(least)):
        begin = small.at[small.kinds[e]]
        if begin < 0:
            continue
        u, v = flat.ends[:, e]
        width, place = flat.counts[1, e], at[e]
        for one in chosen[first[u]:first[u + 1]]:
            r = flat.groups[flat.groups_at[0, e] + one - flat.first[u]]
            for other in chosen[first[v]:first[v + 1]]:
                c = flat.groups[flat.groups_at[1, e] + other - flat.first[v]]
                values[place] = _above(small.values[begin + r * width + c], given[flat.slots[0, e] + r],
                                       given[flat.slots[1, e] + c], least[e])
                place += 1
