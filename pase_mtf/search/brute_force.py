"""Every assignment, one after another: for small networks, and to test the other searches against."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Progress, Solution, register, relative_gap
from pase_mtf.search.rounding import rounding

__all__ = ["brute_force"]

_MOST_ASSIGNMENTS = 10_000_000
_BLOCK = 1 << 16
# Configurations in them that are looked at between two looks at the clock.
_ENTRIES = 1 << 18


@register("brute_force")
def brute_force(network: CostNetwork, *, time_limit: float | None = None, progress: Progress | None = None) -> Solution:
    """Tries everything. Looks at the network as it stands: shares no code with the other searches.

    Args:
      network: what to minimise.
      time_limit: seconds after which it stops with the best so far.
      progress: called after every block of assignments.

    Returns:
      the solution; of equally cheap assignments the first in lexicographic order.

    Raises:
      UsageError: more than ten million assignments.
      InfeasibleError: none is finite.
    """
    start, doubt = time.perf_counter(), rounding(network)
    total = math.prod(network.sizes)
    if total > _MOST_ASSIGNMENTS:
        # In powers of ten: there may be more than a float can say.
        raise UsageError(f"brute_force: about 1e{math.log10(total):.0f} assignments, at most "
                         f"{_MOST_ASSIGNMENTS:.0e}; use method exact")
    best, best_cost, done = None, math.inf, 0
    assignments = itertools.product(*map(range, network.sizes))
    most = max(1, min(_BLOCK, _ENTRIES // max(1, len(network.sizes))))
    while done < total:
        block = np.array(list(itertools.islice(assignments, most)), np.int64)
        block = block.reshape(min(most, total - done), len(network.sizes))  # of no layer, too
        costs = np.zeros(len(block))
        for layer, vector in enumerate(network.vectors):
            costs += vector[block[:, layer]]
        for edge in network.edges:
            costs += edge.matrix[edge.rows[block[:, edge.source]], edge.columns[block[:, edge.target]]]
        # Sums in another order round differently: among the near-equal ones, the exact sum decides.
        least = min(best_cost, costs.min())
        near = costs <= least + 1e-9 * abs(least) + 2 * doubt
        for row in np.flatnonzero(near & np.isfinite(costs)):
            cost = network.cost(block[row].tolist())
            if cost < best_cost:
                best, best_cost = tuple(block[row].tolist()), cost
        done += len(block)
        if progress is not None:
            progress(time.perf_counter() - start, best_cost, -math.inf)
        if time_limit is not None and time.perf_counter() - start > time_limit:
            break
    if best is None:
        raise InfeasibleError("no finite assignment exists" if done >= total else
                              f"no finite assignment found in {time_limit:.3g} seconds; raise the time limit",
                              proven=done >= total)
    bound = best_cost if done >= total else -math.inf
    return Solution(best, best_cost, bound, relative_gap(best_cost, bound), done >= total,
                    time.perf_counter() - start, {"assignments": done})
