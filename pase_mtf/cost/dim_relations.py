"""How one dim of a tensor may be split, and what holds of any two ways of splitting it at the ends of an edge.

Dims are looked at one by one: whatever holds of a pair of splits is found out once for all dims, tensors and edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled

__all__ = ["FRONT", "KIND_ALIKE", "KIND_EXACT", "KIND_MERGED", "DimRelations", "Fronts", "Sharded", "add_to_front",
           "distinct_rows", "domain_shards", "gcd", "held_along", "lcm", "quotient", "scattered"]

FRONT = 4
"""Vectors that the front of a pair of splits may have."""
KIND_ALIKE, KIND_EXACT, KIND_MERGED = range(3)
"""Of a front: all devices are alike; some device is as every vector says; its one vector is worse than any device."""

# 64-bit odd constants of the mixing function splitmix64 (Steele, Lea, Flood 2014).
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# A code is two sums of pseudo-random numbers, of 40 and of 63 bits. The first one's higher bits count the dims in which
# some device's link domain holds nothing of what it needs, and the dims of which not every device needs equally many
# shards: two codes agree by accident once in 2 ** 100.
_SUM_BITS = 40
_COUNT_BITS = 8
FAR_PLACE = _SUM_BITS + 6  # up to 64 dims
UNEVEN_PLACE = FAR_PLACE + _COUNT_BITS
COUNT_MASK = (1 << _COUNT_BITS) - 1
_UNKNOWN = -1


class Sharded(NamedTuple):
    """Shardings of a tensor of T dims.

    Attributes:
      devices: int64 [R], how many devices hold a block.
      shards, strides: int64 [R, T]: of each dim, device d holds shard (d // stride) % shards.
    """

    devices: np.ndarray
    shards: np.ndarray
    strides: np.ndarray


class Fronts(NamedTuple):
    """Of F pairs of splits, the devices that hold least of what they need; none holds less in every respect.

    A vector is, of the shard that a device needs, how much its link domains hold (of shards at the source x shards at
    the target units that the whole dim has), in how many source shards, and minus how many it touches.

    Attributes:
      begin: int64 [F + 1], where the vectors of each begin.
      kind: int8 [F], one of `KIND_ALIKE`, `KIND_EXACT`, `KIND_MERGED`.
      vectors: int64 [.., 2 L + 1].
    """

    begin: np.ndarray
    kind: np.ndarray
    vectors: np.ndarray


class DimRelations:
    """The splits of dims that have come up, numbered, and all that holds of pairs of them.

    Attributes:
      domains: int64 [L], devices per link domain, innermost first.
      codes: int64 [2, 2, S, S], what a dim with such a split at the source and such at the target adds to the two sums
        of the code of a pair of shardings; [1] where what domains hold is a product over the dims, else [0].
      needed: int64 [S, S], the most source shards that the block of a device touches.
      front: int32 [S, S], its place in `fronts`.
      fronts: of the pairs that have come up.
    """

    def __init__(self, domains: np.ndarray) -> None:
        self.domains = domains
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._splits = np.empty((0, 3), np.int64)  # (shards, stride, devices)
        self.codes, self.needed = np.zeros((2, 2, 0, 0), np.int64), np.zeros((0, 0), np.int64)
        self.front = np.zeros((0, 0), np.int32)
        self.fronts = Fronts(np.zeros(1, np.int64), np.empty(0, np.int8), np.empty((0, 2 * len(domains) + 1), np.int64))

    def numbers(self, sharded: Sharded) -> np.ndarray:
        """The number of the split of every dim of R shardings: int64 [T, R]."""
        rows, dims = sharded.shards.shape
        found = np.empty((dims, rows), np.int64)
        for dim in range(dims):
            shards = sharded.shards[:, dim]
            splits = np.column_stack((shards, np.where(shards > 1, sharded.strides[:, dim], 1), sharded.devices))
            first, index = distinct_rows(splits)
            numbers = [self._numbers.setdefault((a, b, c), len(self._numbers)) for a, b, c in splits[first].tolist()]
            found[dim] = np.array(numbers, np.int64)[index]
        if len(self._numbers) > len(self._splits):
            self._grow()
        return found

    def relate(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Looks at all pairs of these splits that have not been looked at."""
        block = np.ix_(sources, targets)
        unknown = self.front[block] == _UNKNOWN
        if not unknown.any():
            return
        rows, columns = np.nonzero(unknown)
        rows, columns = sources[rows], targets[columns]
        here, there = self._splits[rows], self._splits[columns]
        needed, fronts = _fronts(here, there, self.domains)
        # The last domain's share of what is held, in no unit: only whether it is nothing counts.
        far = np.minimum.reduceat(fronts.vectors[:, len(self.domains) - 1], fronts.begin[:-1]) == 0
        for boxes in (0, 1):
            self.codes[boxes][:, rows, columns] = _codes(here, there, far, self.domains if boxes else None)
        self.needed[rows, columns] = needed
        self.front[rows, columns] = np.arange(len(self.fronts.kind), len(self.fronts.kind) + len(rows))
        self.fronts = Fronts(np.concatenate((self.fronts.begin, self.fronts.begin[-1] + fronts.begin[1:])),
                             np.concatenate((self.fronts.kind, fronts.kind)),
                             np.concatenate((self.fronts.vectors, fronts.vectors)))

    def _grow(self) -> None:
        """Makes room for pairs with all splits that have a number."""
        old, new = len(self._splits), len(self._numbers)
        self._splits = np.array(list(self._numbers), np.int64).reshape(-1, 3)
        for name, empty in (("codes", 0), ("needed", 1), ("front", _UNKNOWN)):
            smaller = getattr(self, name)
            larger = np.full((*smaller.shape[:-2], new, new), empty, smaller.dtype)
            larger[..., :old, :old] = smaller
            setattr(self, name, larger)


def distinct_rows(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a table to keep so that none repeats another, in the order in which they stand there.

    Args:
      columns: int64 [R] or [R, n], side by side.

    Returns:
      int64 [distinct], the first of those that are equal, and int64 [R], for every row the number of the one kept.
    """
    found: tuple[np.ndarray, np.ndarray] = _distinct_rows(np.ascontiguousarray(np.column_stack(columns), np.int64))
    return found


@compiled
def _distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """`distinct_rows` of one table, by a hash table whose length is a power of two, and which is half full at most."""
    rows, width = table.shape
    places = 4
    while places < 2 * rows:
        places *= 2
    numbers, first, number, count = np.full(places, -1), np.empty(rows, np.int64), np.empty(rows, np.int64), 0
    for row in range(rows):
        mixed = np.uint64(0)
        for column in range(width):
            mixed = (mixed ^ np.uint64(table[row, column])) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        place = np.int64(mixed >> np.uint64(20)) & (places - 1)
        while numbers[place] >= 0:
            like, column = first[numbers[place]], 0
            while column < width and table[like, column] == table[row, column]:
                column += 1
            if column == width:
                break
            place = (place + 1) & (places - 1)
        if numbers[place] < 0:
            numbers[place], first[count] = count, row
            count += 1
        number[row] = numbers[place]
    return first[:count].copy(), number


def _mixed(*words: np.ndarray) -> np.ndarray:
    """A pseudo-random uint64 for every tuple of the words' entries."""
    state = np.zeros(np.broadcast_shapes(*(word.shape for word in words)), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = state + word.astype(np.uint64) + _MIX[0]
            state = (state ^ (state >> np.uint64(30))) * _MIX[1]
            state = (state ^ (state >> np.uint64(27))) * _MIX[2]
            state = state ^ (state >> np.uint64(31))
    return state


def code_of(*words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two numbers by which a tuple of the words' entries is known, int64."""
    return ((_mixed(np.zeros(1), *words) >> np.uint64(64 - _SUM_BITS)).astype(np.int64),
            (_mixed(np.ones(1), *words) >> np.uint64(1)).astype(np.int64))


def _codes(source: np.ndarray, target: np.ndarray, far: np.ndarray, domains: np.ndarray | None) -> np.ndarray:
    """What pairs of splits, each int64 [N, 3], add to the code of a pair of shardings: two sums, int64 [2, N].

    Where one number of shards divides the other, the finer split is that of the coarser and, within each of its shards,
    another of a dim that is whole at the other end; whole at the source, it makes no difference: every device holds all
    of it. What such a dim adds is the sum of what the two parts add.

    Args:
      source, target: (shards, stride, devices) of each.
      far: bool [N], whether some device has nothing of what it needs in its largest domain.
      domains: devices per link domain, where what they hold is a product over the dims: then a dim that is split alike
        at both ends adds nothing, as every device of the source has what it needs. None: it may not be.
    """
    (shards, stride, holders), (wanted, wanted_stride, devices) = source.T, target.T
    even = (shards % wanted == 0) | (wanted % shards == 0)
    common = np.where(even, np.minimum(shards, wanted), 1)
    here, there = stride * (shards // common), wanted_stride * (wanted // common)
    total = np.zeros((2, len(source)), np.int64)
    uneven = np.stack(code_of(shards, stride, wanted, wanted_stride))
    coarse, fine = np.stack(code_of(common, here, common, there)), shards // common
    within = np.stack(code_of(fine, stride, np.ones_like(fine)))
    if domains is not None:
        # Devices beyond those of the source hold nothing: their domain has to hold the part that they need.
        own = (fine == 1) & (devices <= holders)
        alike = (here == there) & (own | (here[:, None] % domains == 0).all(axis=1))
        coarse = np.where(alike, 0, coarse)
    total += np.where(even, np.where(common > 1, coarse, 0) + np.where(fine > 1, within, 0), uneven)
    total[0] += (far.astype(np.int64) << FAR_PLACE) + ((~even).astype(np.int64) << UNEVEN_PLACE)
    return np.where(shards > 1, total, 0)


@compiled
def gcd(one: int, other: int) -> int:  # pragma: no cover (compiled)
    """The greatest common divisor."""
    while other:
        one, other = other, one % other
    return one


@compiled
def lcm(one: int, other: int) -> int:  # pragma: no cover (compiled)
    """The least common multiple."""
    return one // gcd(one, other) * other


@compiled(inline=True)
def quotient(number: int, reciprocal: float) -> int:  # pragma: no cover (compiled)
    """number // divisor by 1 / divisor, several times as quick; exact for numbers up to 2 ** 50.

    The half keeps the product further from any whole number than it can be rounded."""
    return int((number + 0.5) * reciprocal)


@compiled(inline=True)
def domain_shards(begin: int, end: int, shards: int, per_shard: float, per_stride: float,
                  ) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Which shards of a dim consecutive devices hold: (the first one's, how many from there on, in circles).

    Args:
      begin, end: devices begin to end - 1.
      shards: of the dim.
      per_shard, per_stride: 1 / shards, 1 / stride.
    """
    first = quotient(begin, per_stride)
    count = quotient(end - 1, per_stride) - first + 1
    return first - quotient(first, per_shard) * shards, count


@compiled(inline=True)
def held_along(first: int, count: int, shards: int, goal: int, wanted: int, from_shard: int,
               to_shard: int) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Of one shard of a dim, what consecutive source shards hold.

    Args:
      first, count: of `domain_shards`.
      shards: at the source.
      goal, wanted: which shard, of how many.
      from_shard, to_shard: the source shards from_shard to to_shard - 1 touch it.

    Returns:
      (how much, of shards x wanted units that the whole dim has; in how many of the source shards).
    """
    if count >= shards:
        return shards, to_shard - from_shard
    low, high = goal * shards, (goal + 1) * shards
    beyond = max(0, first + count - shards)  # so many at the end begin anew at the first shard
    end_shard = first + count - beyond
    held = max(0, min(high, end_shard * wanted) - max(low, first * wanted)) + max(0, min(high, beyond * wanted) - low)
    return held, max(0, min(to_shard, end_shard) - max(from_shard, first)) + max(0, min(to_shard, beyond) - from_shard)


@compiled
def scattered(count: int) -> int:  # pragma: no cover (compiled)
    """A step by which 0 to count - 1 are visited once each, far apart: i * step % count for every i."""
    step = max(1, int(0.618 * count))
    while gcd(step, count) != 1:
        step += 1
    return step


@compiled(inline=True)
def add_to_front(front: np.ndarray, count: int, vector: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Adds a vector to the `count` of a front unless one of them is nowhere larger; drops those that then are not
    needed. Returns how many there are then."""
    kept = 0
    for place in range(count):
        below, above = True, True
        for entry in range(len(vector)):
            below = below and front[place, entry] <= vector[entry]
            above = above and front[place, entry] >= vector[entry]
        if below:
            return count
        if not above:
            front[kept] = front[place]
            kept += 1
    front[kept] = vector
    return kept + 1


@compiled
def _most_needed(shards: int, wanted: int) -> int:  # pragma: no cover (compiled)
    """The most shards at the source that one at the target touches."""
    if shards % wanted == 0 or wanted % shards == 0:
        return max(1, shards // wanted)
    most = 0
    for goal in range(wanted):
        most = max(most, -(-(goal + 1) * shards // wanted) - goal * shards // wanted)
    return most


@compiled
def _dim_front(source: np.ndarray, target: np.ndarray, domains: np.ndarray, most: int,
               front: np.ndarray) -> tuple[int, int]:  # pragma: no cover (compiled)
    """Puts the front of one pair of splits into `front`: (how many vectors, their kind).

    Args:
      source, target: int64 [3], (shards, stride, devices); the dim is split at the source.
      domains: as of `DimRelations`.
      most: of `_most_needed`.
      front: int64 [FRONT + 1, 2 L + 1].
    """
    (shards, stride, holders), (wanted, wanted_stride, devices), levels = source, target, len(domains)
    # Devices in a row that hold the same, need the same and are in the same domains count once.
    run, period = gcd(stride, holders), lcm(domains[levels - 1], stride * shards)
    if wanted > 1:
        run, period = gcd(run, wanted_stride), lcm(period, wanted_stride * wanted)
    for level in range(1, levels):
        run = gcd(run, domains[level])
    if holders % period or devices > holders:
        period = devices  # nothing repeats
    runs = -(-min(period, devices) // run)
    step, place, count, kind = scattered(runs), 0, 0, KIND_ALIKE
    per_shard, per_stride, per_wanted, per_wanted_stride = 1.0 / shards, 1.0 / stride, 1.0 / wanted, 1.0 / wanted_stride
    vector, per_domain = np.zeros(2 * levels + 1, np.int64), 1.0 / domains
    for _ in range(runs):
        device = place * run
        place = place + step if place + step < runs else place + step - runs
        goal = quotient(device, per_wanted_stride)
        goal -= quotient(goal, per_wanted) * wanted
        from_shard, to_shard = quotient(goal * shards, per_wanted), quotient((goal + 1) * shards - 1, per_wanted) + 1
        vector[2 * levels] = from_shard - to_shard
        for level in range(levels):
            begin = quotient(device, per_domain[level]) * domains[level]
            vector[level], vector[levels + level] = 0, 0
            if begin < holders:
                first, held = domain_shards(begin, min(begin + domains[level], holders), shards, per_shard, per_stride)
                vector[level], vector[levels + level] = held_along(first, held, shards, goal, wanted, from_shard,
                                                                   to_shard)
        if kind == KIND_ALIKE and count:
            for entry in range(2 * levels + 1):
                if vector[entry] != front[0, entry]:
                    kind = KIND_EXACT
        count = add_to_front(front, count, vector)
        if vector[levels - 1] == 0 and vector[2 * levels] == -most:
            # Nothing is worse.
            return count, KIND_ALIKE if runs == 1 else KIND_EXACT
        if count > FRONT:
            kind = KIND_MERGED
        if kind == KIND_MERGED:
            for other in range(1, count):
                front[0] = np.minimum(front[0], front[other])
            count = 1
    return count, kind


@compiled
def _fronts(source: np.ndarray, target: np.ndarray,
            domains: np.ndarray) -> tuple[np.ndarray, Fronts]:  # pragma: no cover (compiled)
    """What holds of N pairs of splits, each int64 [N, 3]: (`DimRelations.needed`, int64 [N]; their fronts)."""
    pairs, width = len(source), 2 * len(domains) + 1
    needed, kinds = np.ones(pairs, np.int64), np.zeros(pairs, np.int8)
    begin, vectors = np.zeros(pairs + 1, np.int64), np.ones((pairs * FRONT, width), np.int64)
    front = np.empty((FRONT + 1, width), np.int64)
    for pair in range(pairs):
        if source[pair, 0] == 1:  # every device holds everything
            count = 1
            vectors[begin[pair], width - 1] = -1
        else:
            needed[pair] = _most_needed(source[pair, 0], target[pair, 0])
            count, kinds[pair] = _dim_front(source[pair], target[pair], domains, needed[pair], front)
            vectors[begin[pair]:begin[pair] + count] = front[:count]
        begin[pair + 1] = begin[pair] + count
    return needed, Fronts(begin, kinds, vectors[:begin[pairs]].copy())
