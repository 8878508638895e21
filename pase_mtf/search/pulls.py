"""What an edge can give to one of its sides: potentials as large as its matrix allows, given the other side's.

In single precision it takes half the memory traffic. Where layers repeat, `grain` says how coarsely potentials may be
rounded so that they repeat too.
"""

from __future__ import annotations

import math

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed

__all__ = ["EXACTLY", "grain", "pull", "pull_rough", "rounded_down"]

# How often an entry of a matrix is used on average from where on edges are expected to be pulled alike.
_REPETITIVE = 64
# How far apart bound and cost are taken to be while neither is known, relative to the least costs of all vertices.
_FIRST_GAP = 0.02
# Rounding to single precision changes a number by half of this, relative to it.
_ULP = 2.0 ** -23

EXACTLY = np.zeros(0, np.float32)
"""In place of `rounded_down`: passes in double precision."""


@compiled(fastmath={"nnan", "nsz"})
def pull(edge: np.ndarray, given: np.ndarray, taken: np.ndarray, rows: bool) -> None:  # pragma: no cover (compiled)
    """The potentials of one side of an edge as large as it allows: taken = min over the other side of edge - given.

    Args:
      edge: float64, its matrix, flat.
      given, taken: the potentials of the other side, and of this one.
      rows: whether this is the side of the rows.
    """
    if rows:
        # Minima side by side: a single running minimum would be a chain that cannot be vectorised.
        width, simd_width = len(given), 32
        partial = np.empty(simd_width)
        for r in range(len(taken)):
            line = edge[r * width:(r + 1) * width]
            partial[:] = np.inf
            c = 0
            while c + simd_width <= width:
                for lane in range(simd_width):
                    value = line[c + lane] - given[c + lane]
                    partial[lane] = value if value < partial[lane] else partial[lane]
                c += simd_width
            for last in range(c, width):
                value = line[last] - given[last]
                partial[last - c] = value if value < partial[last - c] else partial[last - c]
            least = np.inf
            for lane in range(simd_width):
                least = partial[lane] if partial[lane] < least else least
            taken[r] = least
    else:
        width = len(taken)
        taken[:] = np.inf
        for r in range(len(given)):
            line = edge[r * width:(r + 1) * width]
            potential = given[r]
            for c in range(width):
                value = line[c] - potential
                taken[c] = value if value < taken[c] else taken[c]


@compiled(fastmath={"nnan", "nsz"})
def pull_rough(lines: np.ndarray, given: np.ndarray, listed: np.ndarray, taken: np.ndarray, out: np.ndarray
                ) -> None:  # pragma: no cover (compiled)
    """`pull` in single precision, rounded down: never more than the minimum over the lines listed.

    Args:
      lines: float32, the matrix rounded down, a line per class of the other side.
      given: float64, the potentials of the other side.
      listed: int64, the classes of the other side that count.
      taken: float64, filled in.
      out: float32, room for as many.
    """
    width = len(taken)
    for c in range(width):
        out[c] = np.inf
    position = 0
    while position < len(listed):  # four lines at once, the last one again where there are fewer
        a = listed[position]
        b = listed[min(position + 1, len(listed) - 1)]
        d = listed[min(position + 2, len(listed) - 1)]
        e = listed[min(position + 3, len(listed) - 1)]
        first, second = lines[a * width:(a + 1) * width], lines[b * width:(b + 1) * width]
        third, fourth = lines[d * width:(d + 1) * width], lines[e * width:(e + 1) * width]
        one, two = np.float32(given[a] + abs(given[a]) * _ULP), np.float32(given[b] + abs(given[b]) * _ULP)
        three, four = np.float32(given[d] + abs(given[d]) * _ULP), np.float32(given[e] + abs(given[e]) * _ULP)
        for c in range(width):
            out[c] = min(out[c], min(min(first[c] - one, second[c] - two), min(third[c] - three, fourth[c] - four)))
        position += 4
    for c in range(width):
        taken[c] = out[c] - abs(out[c]) * _ULP


@compiled
def _round_down(values: np.ndarray, matrix: np.ndarray, extents: np.ndarray, rough: np.ndarray
                ) -> None:  # pragma: no cover (compiled)
    """Fills in what `rounded_down` returns."""
    for position in range(len(values)):
        rough[position] = np.float32(values[position] - abs(values[position]) * _ULP)
    block = 32
    for e in range(len(matrix)):
        height, width = extents[0, e], extents[1, e]
        begin, turned = matrix[e], len(values) + matrix[e]
        for top in range(0, height, block):
            for left in range(0, width, block):
                for c in range(left, min(left + block, width)):
                    for r in range(top, min(top + block, height)):
                        rough[turned + c * height + r] = rough[begin + r * width + c]


def rounded_down(p: Packed) -> np.ndarray:
    """The matrices of a network in single precision, rounded down, and after them all of them once more transposed:
    half the memory traffic, for passes whose bound need not be exact (see message_passes)."""
    matrix, first = np.unique(p.matrix, return_index=True)
    # NumPy asks for huge pages, numba does not: mapping small ones takes longer than filling them.
    rough = np.empty(2 * len(p.values), np.float32)
    _round_down(p.values, matrix, np.ascontiguousarray(p.extents[:, first]), rough)
    return rough


def grain(p: Packed, rough: np.ndarray, gap: float) -> float:
    """What to round potentials to multiples of (see messages.message_passes): a power of two; 0: not at all.

    Args:
      p: the network.
      rough: as for message_passes; passes in double precision have to come to a bound that is exact.
      gap: between the best known assignment and the bound (inf: not known). The bound falls short by about as much as
        all edges are rounded by together, which may be as much as the gap.
    """
    if len(rough) == 0 or float((p.extents[0] * p.extents[1]).sum()) < _REPETITIVE * len(p.values):
        return 0.0
    if not gap < math.inf:
        gap = _FIRST_GAP * float(np.minimum.reduceat(p.unary, p.first[:-1]).sum())
    return 2.0 ** math.floor(math.log2(gap / len(p.matrix))) if gap > 0 else 0.0
