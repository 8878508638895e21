"""What an edge can give to one of its sides: potentials as large as its matrix allows, given the other side's.

Costs counted in whole steps, 16 bits each, take a quarter of the memory traffic. Where layers repeat, `grain` says how
coarsely potentials may be rounded so that they repeat too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed

__all__ = ["EXACTLY", "Steps", "grain", "in_steps", "pull", "pull_steps", "step_of"]

# How often an entry of a matrix is used on average from where on edges are expected to be pulled alike.
_REPETITIVE = 64
# How far apart bound and cost are taken to be while neither is known, relative to the least costs of all vertices.
_FIRST_GAP = 0.02
# The most steps that a matrix entry, or the difference of two potentials, is counted in: two of them fit 16 bits.
_MOST_STEPS = 32767
# Steps that the least cost of an average vertex is counted in: what is more than 128 times that is not told apart. Four
# times as many cut off what configurations of large vertices cost: these then look cheap and are never pruned.
_STEPS_PER_VERTEX = 256
# And where a gap is known, steps are so fine that all of them come to twice or four times as much,
_TOLD_APART = 4
# but so many times as fine at most: the potentials of an edge differ by about what a vertex costs.
_FINEST = 16
# How many entries that lie side by side take as long as one that lies alone.
_SIDE_BY_SIDE = 32
# How many entries are read in the time in which one is written to a turned matrix.
_TURNING = 4
# Lines of a matrix that are turned at once.
_AT_ONCE = 512
# Smaller steps have no finite reciprocal.
_LEAST_STEP = 1e-290


class Steps(NamedTuple):
    """The matrices of a network in whole steps, rounded down.

    Attributes:
      counts: uint16, as Packed.values: by how many steps an entry is above `least`; at most _MOST_STEPS.
      turned: uint16, the same matrices with rows for columns, each in the same place, once it is worth it; empty where
        there is no room for them.
      kind: int64 [edges], the number of the edge's matrix among those that differ.
      vain: float64 [matrices], entries that were read in vain for want of the turned one; below 0 once it is there.
      least: what no entry is below.
      step: a power of two.
    """

    counts: np.ndarray
    turned: np.ndarray
    kind: np.ndarray
    vain: np.ndarray
    least: float
    step: float

    @property
    def bytes(self) -> int:
        """Memory that they take at most."""
        return self.counts.nbytes + self.turned.nbytes


EXACTLY = Steps(np.zeros(0, np.uint16), np.zeros(0, np.uint16), np.zeros(0, np.int64), np.zeros(0), 0.0, 1.0)
"""In place of `in_steps`: passes in double precision."""


@compiled(fastmath={"nnan", "nsz"}, allocates=False)
def pull(edge: np.ndarray, given: np.ndarray, taken: np.ndarray, rows: bool) -> None:  # pragma: no cover (compiled)
    """The potentials of one side of an edge as large as it allows: taken = min over the other side of edge - given.

    Args:
      edge: float64, its matrix, flat.
      given, taken: the potentials of the other side, and of this one.
      rows: whether this is the side of the rows.
    """
    if rows:
        # Four rows side by side (the last one again where they run out): one minimum would be a chain of waiting.
        width, last = len(given), len(taken) - 1
        for r in range(0, last + 1, 4):
            s, t, u = min(r + 1, last), min(r + 2, last), min(r + 3, last)
            one, two = edge[r * width:(r + 1) * width], edge[s * width:(s + 1) * width]
            three, four = edge[t * width:(t + 1) * width], edge[u * width:(u + 1) * width]
            a = b = c = d = np.inf
            for place in range(width):
                potential = given[place]
                e, f, g, h = (one[place] - potential, two[place] - potential, three[place] - potential,
                              four[place] - potential)
                a, b, c, d = e if e < a else a, f if f < b else b, g if g < c else c, h if h < d else d
            taken[r], taken[s], taken[t], taken[u] = a, b, c, d
    else:
        width = len(taken)
        taken[:] = np.inf
        for r in range(len(given)):
            line = edge[r * width:(r + 1) * width]
            potential = given[r]
            for c in range(width):
                value = line[c] - potential
                taken[c] = value if value < taken[c] else taken[c]


@compiled(allocates=False)
def _along(counts: np.ndarray, lifts: np.ndarray, listed: np.ndarray, sums: np.ndarray
           ) -> None:  # pragma: no cover (compiled)
    """sums[c] = min over the rows listed of what the row counts at c and is lifted by."""
    width = len(sums)
    sums[:] = 65535
    for r in listed:  # one after another, as they lie in memory: several at once take twice as long to come from there
        line, lift = counts[r * width:(r + 1) * width], lifts[r]
        for c in range(width):
            value = np.uint16(line[c] + lift)  # a 16 bit number again: else numba computes in 64
            sums[c] = value if value < sums[c] else sums[c]


@compiled(allocates=False)
def _across(counts: np.ndarray, lifts: np.ndarray, listed: np.ndarray, wanted: np.ndarray, sums: np.ndarray
            ) -> None:  # pragma: no cover (compiled)
    """For the rows wanted, sums[r] = min over the columns listed of what the row counts there and they are lifted by;
    all others are lifted by more than matters."""
    width = len(lifts)
    if len(listed) * _SIDE_BY_SIDE < width:
        for r in wanted:
            least = np.uint16(65535)
            for c in listed:
                value = np.uint16(counts[r * width + c] + lifts[c])
                least = value if value < least else least
            sums[r] = least
        return
    for r in wanted:
        line, least = counts[r * width:(r + 1) * width], np.uint16(65535)
        for c in range(width):
            value = np.uint16(line[c] + lifts[c])
            least = value if value < least else least
        sums[r] = least


@compiled(allocates=False)
def _turn(counts: np.ndarray, width: int, turned: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Copies a matrix of so many columns with rows for columns."""
    height = len(counts) // width
    for begin in range(0, height, _AT_ONCE):
        end = min(begin + _AT_ONCE, height)
        for c in range(width):
            for r in range(begin, end):
                turned[c * height + r] = counts[r * width + c]


@compiled(allocates=False)
def pull_steps(steps: Steps, begin: int, kind: int, given: np.ndarray, listed: np.ndarray, taken: np.ndarray,
               wanted: np.ndarray, rows: bool, lifts: np.ndarray, sums: np.ndarray
               ) -> int:  # pragma: no cover (compiled)
    """`pull` in whole steps, rounded down: never more than the minimum over the classes listed.

    It reads the lines of the classes listed, or those of the classes wanted, whichever are less. Either lie one after
    another in the matrix or in the turned one, which is made once as much has been read in vain as that costs.

    Args:
      steps: all matrices.
      begin, kind: where this one begins, and its number.
      given, taken, rows: as for `pull`.
      listed: int64, the classes of the other side that count.
      wanted: int64, the classes of this side whose potentials are set; the others stay as they are.
      lifts, sums: uint16, room for as many as `given` and `taken` have.

    Returns:
      how many entries were read.
    """
    highest, per_step = -np.inf, 1.0 / steps.step
    for c in listed:
        highest = max(highest, given[c])
    end = begin + len(given) * len(taken)
    along, across = len(listed) * len(taken), len(wanted) * min(len(given), _SIDE_BY_SIDE * len(listed))
    turn = along < across if rows else across < along
    if turn and steps.vain[kind] >= 0.0:
        steps.vain[kind] += abs(across - along)
        if len(steps.turned) and steps.vain[kind] > _TURNING * (end - begin):
            _turn(steps.counts[begin:end], len(given) if rows else len(taken), steps.turned[begin:end])
            steps.vain[kind] = -1.0
        else:
            turn = False
    counts = steps.turned[begin:end] if turn else steps.counts[begin:end]
    wide = rows != turn
    if wide:
        lifts[:] = _MOST_STEPS + 1  # what is not listed: above nothing that matters
    for c in listed:
        lifts[c] = np.uint16(min((highest - given[c]) * per_step, float(_MOST_STEPS)))
    if wide:
        _across(counts, lifts, listed, wanted, sums)
    else:
        _along(counts, lifts, listed, sums)
    for c in wanted:
        taken[c] = (steps.least - highest) + steps.step * sums[c]
    return across if wide else along


@compiled(allocates=False)
def _count(values: np.ndarray, least: float, per_step: float, counts: np.ndarray
           ) -> None:  # pragma: no cover (compiled)
    """Fills in the counts of `in_steps`."""
    for position in range(len(values)):
        count = (values[position] - least) * per_step
        counts[position] = np.uint16(count if count < float(_MOST_STEPS) else float(_MOST_STEPS))


def step_of(p: Packed, gap: float = math.inf) -> float:
    """How large the steps should be that costs are counted in: a power of two; 0 where counting makes no sense.

    With a gap between the best known assignment and the bound, they are finer, as what they round off adds up over all
    edges: so fine that what costs some times the gap more can still be told apart, for what costs more is pruned.
    """
    step = float(np.minimum.reduceat(p.unary, p.first[:-1]).sum()) / (_STEPS_PER_VERTEX * p.vertices)
    whole = (p.most - min(p.least, 0.0)) / _MOST_STEPS  # what can count everything
    if not 0.0 < step < whole:
        coarse = 2.0 ** math.ceil(math.log2(whole)) if _LEAST_STEP < whole < math.inf else 0.0
    else:
        coarse = 2.0 ** math.floor(math.log2(step)) if step > _LEAST_STEP else 0.0
    fine = max(_TOLD_APART * gap / _MOST_STEPS, coarse / _FINEST)
    step = min(coarse, 2.0 ** math.floor(math.log2(fine))) if _LEAST_STEP < fine < math.inf else coarse
    # What is more steps below 0 than a float64 holds cannot be counted.
    return step if step > 0.0 and p.least / step > -math.inf else 0.0


def in_steps(p: Packed, step: float, room: float = math.inf) -> Steps:
    """The matrices of a network counted in such steps (a power of two): a quarter of the memory traffic, for passes
    whose bound need not be exact (see message_passes). They take two bytes per entry, or four where that is at
    most half of the room."""
    least = step * math.floor(min(p.least, 0.0) / step)
    # NumPy asks for huge pages, numba does not: mapping small ones takes longer than filling them.
    counts = np.empty(len(p.values), np.uint16)
    _count(p.values, least, 1.0 / step, counts)
    matrices, kind = np.unique(p.matrix, return_inverse=True)
    turned = np.empty(len(p.values) if 8 * len(p.values) <= room else 0, np.uint16)
    return Steps(counts, turned, kind, np.zeros(len(matrices)), least, step)


def grain(p: Packed, steps: Steps, gap: float) -> float:
    """What to round potentials to multiples of (see messages.message_passes): a power of two; 0: not at all.

    Args:
      p: the network.
      steps: as for message_passes; passes in double precision have to come to a bound that is exact.
      gap: between the best known assignment and the bound (inf: not known). The bound falls short by about as much as
        all edges are rounded by together, which may be as much as the gap.
    """
    if len(steps.counts) == 0 or float((p.extents[0] * p.extents[1]).sum()) < _REPETITIVE * len(p.values):
        return 0.0
    if not gap < math.inf:
        gap = _FIRST_GAP * float(np.minimum.reduceat(p.unary, p.first[:-1]).sum())
    return 2.0 ** math.floor(math.log2(gap / (2 * len(p.matrix)))) if gap > 0 else 0.0
