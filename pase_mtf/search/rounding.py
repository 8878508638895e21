"""What sums leave undecided where costs of both signs cancel.

Where no cost is negative, whatever is added up on the way to a sum is no more than that sum, and so what rounds off is
a part of it: of that size are the tolerances of the searches. Where costs cancel, little may be left of sums that were
large, and that little may be what was rounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Solution, relative_gap

__all__ = ["MOST_UNDECIDED", "as_far_as_sums_tell", "rounding", "tolerated"]

MOST_UNDECIDED = 1e-6
"""Of the best's cost or parts: a search within a memory limit proves nothing where more than this is undecided, for the
sake of what bytes are charged."""

# What an addition rounds off is 2**-53 of its sum at most. A layer or an edge takes part in one of an elimination, and
# in a few of a pass of message passing, whose potentials may be as large as some costs together: in eight of all.
_PER_TERM = 2.0 ** -50
# Of a solution's parts, and of whole numbers: how far a bound may stay below the cost and still prove it.
_UNDECIDED, _OF_WHOLE = 0.9e-12, 0.4
# Whole numbers that add up to less are told apart exactly.
_MOST_WHOLE = 2e12
# Entries that are looked at at once: what is made of them is to take no memory that counts.
_BLOCK = 1 << 20


def rounding(network: CostNetwork) -> float:
    """How far a search may be wrong about a cost or a bound that it adds up; 0 where no cost is negative.

    Args:
      network: as it was given; in its normal form, costs may have cancelled already.
    """
    least, most = network.extremes
    if not least < 0.0:
        return 0.0
    if most == math.inf:  # something is forbidden
        most = max(float(np.abs(block).max(where=np.isfinite(block), initial=0.0)) for block in _blocks(network))
    terms = len(network.vectors) + len(network.arrays.edge_matrix)
    return terms * _PER_TERM * (terms * max(-least, most))


def as_far_as_sums_tell(network: CostNetwork, solution: Solution, doubt: float) -> Solution:
    """The solution itself, if its bound holds to within its tolerance; else what is left of it: nothing is proven, and
    the bound is lower.

    Args:
      network: as it was given.
      solution: of a search.
      doubt: how far sums may be wrong (`rounding`).
    """
    if doubt <= 0.0 or doubt <= tolerated(network, solution.assignment):
        return solution
    bound = solution.lower_bound - doubt
    return dataclasses.replace(solution, lower_bound=bound, gap=relative_gap(solution.cost, bound), optimal=False,
                               certificate=None)


def tolerated(network: CostNetwork, assignment: tuple[int, ...]) -> float:
    """How far a bound may stay below what an assignment costs and still prove it, of the network as it was given."""
    parts = math.fsum(map(abs, network.arrays.terms(np.array(assignment, np.int64))))
    whole = parts <= _MOST_WHOLE and all(np.array_equal(np.rint(block), block) for block in _blocks(network))
    return _OF_WHOLE if whole else _UNDECIDED * parts


def _blocks(network: CostNetwork) -> Iterator[np.ndarray]:
    """All costs, some at a time."""
    for array in (network.arrays.unary, *network.arrays.values):
        flat = array.reshape(-1)
        for begin in range(0, len(flat), _BLOCK):
            yield flat[begin:begin + _BLOCK]
