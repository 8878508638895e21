"""The k cheapest assignments, in order.

Lawler's scheme: what is left when the best assignment of a set is taken out of it is cut into sets by the first layer
that differs. Each has a bound from the reduced costs of that layer's other configurations (messages.py), and is
searched only once no set with a lower bound is left: few of them ever are.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.messages import reduced_costs
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import pack, quantum
from pase_mtf.search.registry import Progress, Solution, register, relative_gap

__all__ = ["cheapest", "search_k_best"]


class _Set(NamedTuple):
    """Assignments whose configurations are active: with the best one if `best` is not None, else with a bound only."""

    bound: float
    number: int
    active: np.ndarray
    best: np.ndarray | None


def cheapest(network: CostNetwork, deadline: float = math.inf) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All assignments of finite cost, cheapest first, as (cost, assignment); as far as they are asked for.

    Two whose costs differ by less than 1e-12 of their parts may come in either order (never in a network of integers).

    Raises:
      TimeoutError: the deadline (a time.perf_counter() value) passed before the next one was certain.
    """
    p = pack(network.normalized())
    unit = quantum(p)

    def solve(active: np.ndarray, number: int) -> _Set | None:
        part = p._replace(unary=np.where(active, p.unary, np.inf))
        try:
            search = Minimiser(part, deadline=deadline, unit=unit)
            search.run()
        except InfeasibleError:
            return None
        if not search.proven:
            raise TimeoutError
        return None if search.best is None else _Set(search.cost, number, active, search.best)
    first = solve(np.isfinite(p.unary), 0)
    heap = [] if first is None else [first]
    number = 0
    while heap:
        entry = heapq.heappop(heap)
        if entry.best is None:
            solved = solve(entry.active, entry.number)
            if solved is not None:
                heapq.heappush(heap, solved)
            continue
        assignment = tuple(entry.best.tolist())
        yield network.cost(assignment), assignment
        bound, costs = reduced_costs(p._replace(unary=np.where(entry.active, p.unary, np.inf)))
        # Layers where another configuration is cheapest to take come first: the sets after them are smaller for it.
        places = p.first[:-1] + entry.best
        other = costs.copy()
        other[places] = np.inf
        other[~entry.active] = np.inf
        least = np.minimum.reduceat(other, p.first[:-1]) if p.vertices else np.zeros(0)
        active = entry.active
        for v in np.argsort(least, kind="stable").tolist():
            if least[v] == np.inf:
                break
            part = active.copy()
            part[places[v]] = False
            number += 1
            heapq.heappush(heap, _Set(max(entry.bound, bound + float(least[v])), number, part, None))
            active = active.copy()
            active[p.first[v]:p.first[v + 1]] = False
            active[places[v]] = True


@register("k_best")
def search_k_best(network: CostNetwork, *, time_limit: float | None = None, gap: float = 0.0,
                  progress: Progress | None = None, k: int = 10) -> Solution:
    """The k cheapest distinct assignments.

    Args:
      network: what to minimise.
      time_limit: seconds, after which those found so far are returned (they are the cheapest, in order).
      gap: not used.
      progress: called after each.
      k: how many; fewer come back where fewer are finite.

    Returns:
      the cheapest; all of them in `statistics["strategies"]`: (cost, assignment) in order.

    Raises:
      UsageError: k is below one.
      InfeasibleError: no assignment is finite, or none was found within the time limit.
    """
    if not isinstance(k, (int, np.integer)) or k < 1:
        raise UsageError(f"k of {k}; ask for at least one, and a whole number")
    start = time.perf_counter()
    found: list[tuple[float, tuple[int, ...]]] = []
    finished = True
    try:
        for entry in cheapest(network, start + (time_limit or math.inf)):
            found.append(entry)
            if progress is not None:
                progress(time.perf_counter() - start, found[0][0], found[0][0])
            if len(found) == k:
                break
    except TimeoutError:
        finished = False
    if not found:
        raise InfeasibleError("no finite assignment exists" if finished else
                              f"no assignment found in {time_limit} seconds; raise the time limit")
    cost, assignment = found[0]
    return Solution(assignment, cost, cost, relative_gap(cost, cost), True, time.perf_counter() - start,
                    {"strategies": tuple(found), "complete": finished})
