"""The k cheapest assignments, in order.

Lawler's scheme: the remainder of a set without its best assignment is split into sets by the first layer that differs.
Each has a bound from the reduced costs of that layer's other configurations (messages.py), and is searched only once no
set with a lower bound is left: few of them ever are.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError, shortened
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.budget import SEARCH_MEMORY, Budget
from pase_mtf.search.messages import reduced_costs
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import pack, quantum
from pase_mtf.search.registry import Progress, Solution, register
from pase_mtf.search.rounding import as_far_as_sums_tell, rounding

__all__ = ["cheapest", "search_k_best"]

# Of the memory: what the assignments that are returned may take, and of the rest the sets that wait.
_RESULTS = 0.5
_WAITING = 0.5
# Of a set, besides its arrays.
_BYTES_PER_SET = 1000
# More assignments than fit any memory: a number that a float holds.
_COUNTABLE = 10 ** 18


class _Solved(NamedTuple):
    """A set of assignments, and the best of them.

    Attributes:
      active: bool [configurations] as bits: those that its assignments may hold.
      best: int32 [vertices], the best one.
      order: int32 [vertices]: by which of them the remainder of the set is split.
      bounds: float64, per entry of `order` with a configuration to change to, what every assignment costs at least
        that differs from the best one there; ascending.
    """

    active: np.ndarray
    best: np.ndarray
    order: np.ndarray
    bounds: np.ndarray


class _Set(NamedTuple):
    """Assignments still to come: the best one of a set, or what differs from it first at one place of its order."""

    bound: float
    number: int
    of: _Solved
    place: int


class _Sets:
    """Splits the assignments of a network into sets, and searches them."""

    def __init__(self, network: CostNetwork, budget: Budget) -> None:
        self._p = pack(network.normalized(budget=budget))
        self._waiting = _WAITING * (budget.memory - self._p.bytes)
        self._search_budget = budget.less(self._p.bytes + self._waiting)
        self._unit, self._doubt = quantum(self._p, budget), rounding(network)
        self._numbers = itertools.count()
        self._held = 0.0

    def solve(self, active: np.ndarray) -> _Set | None:
        """The best of the assignments whose configurations are active; None if none is finite.

        Raises:
          TimeoutError, MemoryError: the time is over, or the memory used up.
        """
        p = self._p
        if self._held > self._waiting:
            raise MemoryError
        part = p._replace(unary=np.where(active, p.unary, np.inf))
        try:
            search = Minimiser(part, budget=self._search_budget, unit=self._unit, doubt=self._doubt)
            search.run()
        except InfeasibleError:
            return None
        except UsageError as error:  # what is said of the first set holds for the network
            if not self._held:
                raise
            raise MemoryError from error
        if not search.proven:
            raise MemoryError if "stopped" in search.statistics else TimeoutError
        if search.best is None:
            return None
        nothing = np.zeros(0)
        solved = _Solved(np.packbits(active), search.best.astype(np.int32), nothing, nothing)
        self._held += solved.active.nbytes + 16 * p.vertices + _BYTES_PER_SET
        return _Set(search.cost, next(self._numbers), solved, -1)

    def first_left(self, entry: _Set) -> _Set | None:
        """The remainder of a set without its best assignment, up to the first place of an order made for it."""
        p, best = self._p, entry.of.best
        active = self._active(entry.of)
        bound, costs = reduced_costs(p._replace(unary=np.where(active, p.unary, np.inf)), budget=self._search_budget)
        costs[p.first[:-1] + best] = np.inf
        costs[~active] = np.inf
        # Layers where another configuration is cheapest to take come first: the sets after them are smaller for it.
        least = np.minimum.reduceat(costs, p.first[:-1]) if p.vertices else np.zeros(0)
        order = np.argsort(least, kind="stable")[:np.count_nonzero(least < np.inf)]
        return self.at(entry.of._replace(order=order.astype(np.int32),
                                         bounds=np.maximum(entry.bound, bound + least[order])), 0)

    def at(self, solved: _Solved, place: int) -> _Set | None:
        """The set at one place of the order; None behind its end."""
        if place >= len(solved.order):
            return None
        return _Set(float(solved.bounds[place]), next(self._numbers), solved, place)

    def search(self, entry: _Set) -> _Set | None:
        """The best of a set at a place: as the best one before that place, different from it there."""
        p, best, active = self._p, entry.of.best, self._active(entry.of)
        for v in entry.of.order[:entry.place].tolist():
            active[p.first[v]:p.first[v + 1]] = False
            active[p.first[v] + best[v]] = True
        v = entry.of.order[entry.place]
        active[p.first[v] + best[v]] = False
        return self.solve(active)

    def everything(self) -> np.ndarray:
        """Every configuration that is not forbidden: bool."""
        return np.asarray(np.isfinite(self._p.unary))

    def _active(self, solved: _Solved) -> np.ndarray:
        return np.unpackbits(solved.active, count=len(self._p.unary)).astype(bool)


def cheapest(network: CostNetwork, budget: Budget | None = None) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All assignments of finite cost, cheapest first, as (cost, assignment); as far as they are asked for.

    Two whose costs differ by less than 1e-12 of their parts may come in either order (never in a network of integers);
    and so may those whose costs of both signs cancel to less than sums may round off (rounding.py).

    Raises:
      TimeoutError: the time was over before the next one was certain.
      MemoryError: the sets that are left take more than the memory.
    """
    sets = _Sets(network, budget or Budget())
    heap: list[_Set] = []

    def add(entry: _Set | None) -> None:
        if entry is not None:
            heapq.heappush(heap, entry)
    add(sets.solve(sets.everything()))
    while heap:
        entry = heapq.heappop(heap)
        if entry.place < 0:
            assignment = tuple(entry.of.best.tolist())
            yield network.cost(assignment), assignment
            add(sets.first_left(entry))
        else:
            add(sets.at(entry.of, entry.place + 1))
            add(sets.search(entry))


@register("k_best")
def search_k_best(network: CostNetwork, *, time_limit: float | None = None, progress: Progress | None = None,
                  k: int = 10, search_memory: float = SEARCH_MEMORY) -> Solution:
    """The k cheapest distinct assignments.

    Args:
      network: what to minimise.
      time_limit: seconds, after which those found so far are returned (they are the cheapest, in order).
      progress: called after each.
      k: how many; fewer come back where fewer are finite.
      search_memory: bytes for the search and what it returns; once they are used up, those found so far are returned.

    Returns:
      the cheapest; all of them in `statistics["strategies"]`: (cost, assignment) in order. `statistics["complete"]`:
      whether they are as many as asked for, or all there are.

    Raises:
      UsageError: k is below one, or so many do not fit the memory.
      InfeasibleError: no assignment is finite, or none was found within the time limit.
    """
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1:
        raise UsageError(f"k of {shortened(k)}; ask for at least one, and a whole number")
    start, budget = time.perf_counter(), Budget.of(time_limit, search_memory)
    results = float(_result_bytes(network)) * min(k, math.prod(network.sizes), _COUNTABLE)
    if results > _RESULTS * budget.memory:
        raise UsageError(f"k of {shortened(k)}: that many strategies take {results:.3g} bytes, and {_RESULTS:.0%} of "
                         f"the search memory of {budget.memory:.4g} are for them; ask for fewer, or raise "
                         "search_memory")
    found: list[tuple[float, tuple[int, ...]]] = []
    complete, left = True, budget.less(results)
    try:
        for entry in cheapest(network, left):
            found.append(entry)
            if progress is not None:
                progress(time.perf_counter() - start, found[0][0], found[0][0])
            if len(found) == k:
                break
    except (TimeoutError, MemoryError):
        complete = False
    if not found:
        raise InfeasibleError("no finite assignment exists" if complete else f"no assignment found {left.used_up}",
                              proven=complete)
    cost, assignment = found[0]
    best = Solution(assignment, cost, cost, 0.0, True, time.perf_counter() - start,
                    {"strategies": tuple(found), "complete": complete})
    return as_far_as_sums_tell(network, best, rounding(network))


def _result_bytes(network: CostNetwork) -> int:
    """What an assignment takes that is returned: a tuple, its integers where they are not small, and its cost."""
    return 160 + sum(8 if size <= 256 else 40 for size in network.sizes)
