"""The cheapest assignment that fits into a memory limit.

Lagrangian relaxation: with every byte charged at a multiplier the problem is an ordinary one, whose optimum less the
charge for the limit bounds the constrained cost from below. The best multiplier is found by cutting planes (Kelley).
Assignments are repaired and improved within the limit. The gap that is left is closed by branch and bound: the layer in
which the two best assignments at that multiplier, one within and one above the limit, differ most in memory has its
configurations split into light and heavy ones.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.budget import SEARCH_MEMORY, Budget
from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.given_bytes import MOST_BYTES, bytes_of_all, checked_limit
from pase_mtf.search.messages import reduced_costs
from pase_mtf.search.neighbourhood import cost_at
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Packed, least_of_each, pack, quantum, reduce
from pase_mtf.search.registry import Progress, Solution, relative_gap
from pase_mtf.search.rounding import MOST_UNDECIDED, as_far_as_sums_tell, rounding

__all__ = ["least_memory", "minimise_within"]

# Seconds of branching where the caller sets no time limit.
_PATIENCE = 10.0
# The constrained optimum is known to this, relative to what is added up: charges for bytes are rounded as well. And a
# bound at one multiplier to that part of what is charged there, which below the root may be far more than at it.
_TOLERANCE, _ROUNDED = 1e-10, 4e-12
# Assignments that are remembered, as lines that bound what multipliers can reach.
_MOST_POINTS = 100
# Nodes that the search at one multiplier may look at: where that does not prove its optimum, cutting memory is quicker.
_MOST_NODES = 8
# Of the memory, what nodes that wait may take; and what one takes besides its bits.
_WAITING = 0.25
_BYTES_PER_NODE = 256


@compiled
def _repair(p: Packed, memory: np.ndarray, limit: float, choice: np.ndarray, end: float
            ) -> float:  # pragma: no cover (compiled)
    """Brings an assignment within the limit, always by the change that costs least per byte saved, then improves it
    there until no single change helps, or the clock shows `end`. Returns its memory (above the limit if it found no
    way)."""
    first = p.first
    vertices = len(first) - 1
    used = 0.0
    for v in range(vertices):
        used += memory[first[v] + choice[v]]
    while used > limit:
        best_rate, best_v, best_k = np.inf, -1, -1
        for v in range(vertices):
            if end < np.inf and seconds_now() > end:
                return used
            own = memory[first[v] + choice[v]]
            now = cost_at(p, v, choice[v], choice)
            for k in range(first[v + 1] - first[v]):
                saved = min(own - memory[first[v] + k], used - limit)
                if saved > 0 and p.unary[first[v] + k] < np.inf:
                    rate = (cost_at(p, v, k, choice) - now) / saved
                    if rate < best_rate:
                        best_rate, best_v, best_k = rate, v, k
        if best_v < 0:
            return used
        used += memory[first[best_v] + best_k] - memory[first[best_v] + choice[best_v]]
        choice[best_v] = best_k
    for _ in range(50):
        changed = False
        for v in range(vertices):
            if end < np.inf and seconds_now() > end:
                return used
            own = memory[first[v] + choice[v]]
            best_k = choice[v]
            best = cost_at(p, v, best_k, choice)
            for k in range(first[v + 1] - first[v]):
                if used - own + memory[first[v] + k] <= limit and p.unary[first[v] + k] < np.inf:
                    cost = cost_at(p, v, k, choice)
                    if cost < best:
                        best, best_k = cost, k
            if best_k != choice[v]:
                used += memory[first[v] + best_k] - own
                choice[v] = best_k
                changed = True
        if not changed:
            break
    return used


class _Point(NamedTuple):
    """An assignment with its cost and its memory."""

    cost: float
    memory: float
    choice: np.ndarray


class _Node(NamedTuple):
    """A part of the search space, ordered by its bound: the configurations that are active in it, as bits."""

    bound: float
    number: int
    bits: np.ndarray
    multiplier: float


class _Search:
    """Counts memory beyond what every layer needs in any case: a charge for that says nothing of an assignment, and
    what rounds off of so large a number would be as much as some assignments differ by."""

    def __init__(self, packed: Packed, memory: np.ndarray, limit: float, budget: Budget, gap: float,
                 progress: Progress | None, patience: float = math.inf, doubt: float = 0.0) -> None:
        """`patience` is how many seconds it may go on once the first bound is known; `doubt`, how far sums may be wrong
        where costs of both signs cancel."""
        least = _least_per_layer(packed, memory, budget)
        self.needed, self.whole = (-least).tolist(), memory
        # What no finite assignment holds may be lighter than that; nobody is ever charged for it.
        self.packed, self.memory = packed, np.maximum(memory - np.repeat(least, packed.domains), 0.0)
        self.limit, self.most = max(math.fsum([limit, *self.needed]), 0.0), limit
        self.budget, self.gap, self.progress, self.patience = budget, gap, progress, patience
        self.search_budget = budget.less(_WAITING * budget.memory)
        self.start = time.perf_counter()
        self.unit = quantum(packed, budget)
        self.best: _Point | None = None
        self.points: deque[_Point] = deque(maxlen=_MOST_POINTS)  # the last that were met
        self.solves, self.nodes, self.doubt = 0, 0, doubt
        self.multiplier, self.left_out, self.narrowed = 0.0, math.inf, False

    def point(self, choice: np.ndarray) -> _Point:
        used = self.whole[self.packed.first[:-1] + choice].tolist()
        beyond = math.fsum([*used, *self.needed])
        # On which side it lies says the sum of its bytes as they are, and the limit as it was given.
        beyond = (min(beyond, self.limit) if math.fsum(used) <= self.most
                  else max(beyond, math.nextafter(self.limit, math.inf)))
        return _Point(self.packed.cost(choice)[0], beyond, choice)

    def relaxed(self, active: np.ndarray, multiplier: float) -> tuple[float, _Point | None]:
        """A lower bound at this multiplier (inf: nothing better than the best is active), and the assignment that
        attains it, or nearly does (None: none was met)."""
        self.solves += 1
        if multiplier > 0.0 and not multiplier * (self.limit + self.memory.max(initial=0.0)) <= MOST_BYTES:
            return -math.inf, None  # charges that no float64 holds tell nothing
        unary = np.where(active, self.packed.unary + multiplier * self.memory, np.inf)
        charge, doubt = multiplier * self.limit, _ROUNDED * multiplier * self.limit
        # What is no cheaper at this multiplier is no better. (Without one, costs may be integers: then the search asks
        # for a whole unit less, and has to know the scale of what it compares with to allow for rounding.)
        cutoff = math.inf if self.best is None or multiplier == 0 else self.best.cost + charge + doubt
        try:
            # Half of the gap: the other half is for what the limit costs beyond what multipliers tell.
            search = Minimiser(self.packed._replace(unary=unary), budget=self.search_budget, cutoff=cutoff,
                               gap=self.gap / 2, unit=self.unit if multiplier == 0 else 0.0, doubt=self.doubt)
            search.run(_MOST_NODES)
        except InfeasibleError:
            return math.inf, None
        except TimeoutError:
            return -math.inf, None
        except UsageError:  # what is said of the first node holds for the network; a later one may need more
            if self.nodes <= 1:
                raise
            return -math.inf, None
        finally:
            if self.patience < math.inf:
                self.budget, self.search_budget = (budget.until(time.perf_counter() + self.patience)
                                                   for budget in (self.budget, self.search_budget))
                self.patience = math.inf
        if search.best is None:
            return (math.inf if search.proven else search.bound - charge - doubt), None
        point = self.point(search.best)
        self.points.append(point)
        return search.bound - charge - doubt, point

    def consider(self, point: _Point) -> None:
        """Takes what can be made of an assignment within the limit, if it is the best so far."""
        choice = point.choice.copy()
        _repair(self.packed, self.memory, self.limit, choice, seconds_now() + self.budget.seconds)
        for candidate in (point, self.point(choice)):
            if candidate.memory <= self.limit and candidate.cost < (self.best.cost if self.best else math.inf):
                # What was left out while that was the best may cost as little as this; at the first node nothing is
                # until configurations are ruled out.
                if self.best and (self.nodes > 1 or self.narrowed):
                    self.left_out = min(self.left_out, self.best.cost - self.target)
                self.best = candidate

    def within_gap(self, bound: float) -> bool:
        """Whether a best that nothing below this bound can beat is good enough for the caller."""
        return self.best is not None and self.gap > 0 and relative_gap(self.best.cost, bound) <= self.gap

    @property
    def target(self) -> float:
        """Assignments that are not cheaper than the best by more than this do not matter."""
        if self.best is None:
            return 0.0
        scale = self.packed.cost(self.best.choice)[1] + self.multiplier * self.limit
        doubt = max(_TOLERANCE * scale, self.doubt)
        return max(_TOLERANCE * scale, self.unit - 2 * doubt if self.unit else 0.0)

    def ends(self, active: np.ndarray, multiplier: float | None) -> tuple[float, _Point | None, _Point | None]:
        """The multiplier at which the bound is highest as far as the assignments met so far tell (each is a line that
        the bound stays below), and the two that tell it: within the limit, and above it. With a multiplier given, the
        two lowest there."""
        first = self.packed.first[:-1]
        met = [point for point in self.points if active[first + point.choice].all()]
        light = [point for point in met if point.memory <= self.limit]
        heavy = [point for point in met if point.memory > self.limit]

        def lowest(points: list[_Point], at: float) -> _Point | None:
            return min(points, key=lambda point: point.cost + at * (point.memory - self.limit), default=None)
        now = multiplier or 0.0
        one, other = lowest(light, now), lowest(heavy, now)
        if one is None or other is None or multiplier is not None:
            return now, one, other
        for _ in met:
            now = max((one.cost - other.cost) / (other.memory - one.memory), 0.0)
            line = one.cost + now * (one.memory - self.limit)
            below = line - 1e-12 * abs(line)
            lower, upper = lowest(light, now), lowest(heavy, now)
            if lower is not None and lower.cost + now * (lower.memory - self.limit) < below:
                one = lower
            elif upper is not None and upper.cost + now * (upper.memory - self.limit) < below:
                other = upper
            else:
                break
        return now, one, other

    def dual(self, active: np.ndarray, multiplier: float | None, rounds: int) -> tuple[float, float]:
        """The best bound by multipliers, and the multiplier that reaches it; inf where nothing better is active."""
        bound, best_multiplier = -math.inf, multiplier or 0.0
        tried: set[float] = set()
        for number in range(rounds):
            now, light, heavy = self.ends(active, None)
            if light is None or heavy is None:
                now = self.guess(multiplier, number, tried, light, heavy)
            if now in tried:
                break
            tried.add(now)
            value, point = self.relaxed(active, now)
            if value == math.inf:
                return math.inf, now
            if value > bound:
                bound, best_multiplier = value, now
            if point is None:
                break
            self.consider(point)
            if self.best is not None and (bound >= self.best.cost - self.target or self.within_gap(bound)):
                break
            if light is not None and heavy is not None:
                line = light.cost + now * (light.memory - self.limit)
                # No assignment was met below the lines known: the bound is as high as multipliers make it.
                if point.cost + now * (point.memory - self.limit) >= line - 1e-12 * abs(line):
                    break
            if self.budget.over:
                break
        return bound, best_multiplier

    @staticmethod
    def guess(start: float | None, number: int, tried: set[float], light: _Point | None, heavy: _Point | None) -> float:
        """The multiplier to try next while no two assignments tell it.

        Args:
          start: the best multiplier of the node above; None at the root.
          number: of this try.
          tried: the multipliers tried so far.
          light, heavy: the lowest assignment met within the limit, and above it.
        """
        if not tried or (start is None and number == 0):
            return start or 0.0
        if light is not None:  # fits at every multiplier so far: cheaper at a lower one?
            return min(tried) / 4 if number < 3 else 0.0
        if heavy is None:
            return max(tried)
        return 4 * max(tried) or (abs(heavy.cost) or 1.0) / max(heavy.memory, 1e-300)  # does not fit yet

    def run(self) -> tuple[float, bool]:
        """Returns the lower bound and whether the best is proven optimal."""
        packed, number = self.packed, 0
        room = _WAITING * self.budget.memory  # for nodes that wait
        heap = [_Node(-math.inf, 0, np.packbits(np.isfinite(packed.unary)), math.nan)]
        while heap:
            node = heapq.heappop(heap)
            if self.best is not None and node.bound >= self.best.cost - self.target:
                break
            self.nodes += 1
            root = math.isnan(node.multiplier)
            active = np.unpackbits(node.bits, count=len(packed.unary)).astype(bool)
            active &= self.memory <= self.limit + math.ulp(self.most)  # or it fits with no other layer's lightest
            value, multiplier = self.dual(active, None if root else node.multiplier, 40 if root else 4)
            bound = max(node.bound, value)
            if root:
                self.multiplier = multiplier
            if self.progress is not None:
                cost = self.best.cost if self.best else math.inf
                # Where nothing better is left the best is its own bound; as `minimise_within` tells it in the end.
                self.progress(time.perf_counter() - self.start, cost,
                              min(bound, heap[0].bound if heap else math.inf, self.left_out, cost))
            pruned = bound == math.inf or (self.best is not None and bound >= self.best.cost - self.target)
            if pruned and not heap:
                break
            others = min(math.inf if pruned else bound, heap[0].bound if heap else math.inf)
            if self.within_gap(others):
                return others, False
            if self.budget.over or len(heap) * (node.bits.nbytes + _BYTES_PER_NODE) > room:
                return others, False
            if pruned:
                continue
            if self.best is not None:
                try:
                    base, extra = reduced_costs(packed._replace(unary=np.where(
                        active, packed.unary + multiplier * self.memory, np.inf)), budget=self.search_budget)
                except MemoryError:
                    return others, False
                except TimeoutError:  # or its passes ended early, and tell nothing
                    if self.budget.over:
                        return others, False
                else:
                    active = active & (base - (1 + _ROUNDED) * multiplier * self.limit + extra
                                       < self.best.cost - self.target)
                    self.narrowed = True
                if not np.logical_or.reduceat(active, packed.first[:-1]).all():
                    continue
            if np.count_nonzero(active) == packed.vertices:  # one assignment is left
                self.consider(self.point(np.flatnonzero(active) - packed.first[:-1]))
                continue
            for part in self.halves(active, *self.ends(active, multiplier)[1:]):
                number += 1
                heapq.heappush(heap, _Node(bound, number, np.packbits(part), multiplier))
        if self.best is None or self.target <= self.unit or (
                self.target <= MOST_UNDECIDED * self.packed.cost(self.best.choice)[1]):
            return (self.best.cost if self.best else math.inf), True
        return self.best.cost - self.target, False  # what charges round off is more than costs differ by

    def halves(self, active: np.ndarray, light: _Point | None, heavy: _Point | None) -> list[np.ndarray]:
        """Splits the domain of one layer into configurations of less and of more memory."""
        packed = self.packed
        first = packed.first[:-1]
        low = np.minimum.reduceat(np.where(active, self.memory, np.inf), first)
        high = np.maximum.reduceat(np.where(active, self.memory, -np.inf), first)
        if light is not None and heavy is not None:
            ends = np.sort(np.stack([self.memory[first + light.choice], self.memory[first + heavy.choice]]), axis=0)
            ends = np.clip(ends, low, high)
            if (ends[1] > ends[0]).any():
                low, high = ends
        v = int(np.argmax(high - low))
        begin, end = int(packed.first[v]), int(packed.first[v + 1])
        if high[v] > low[v]:
            lighter = self.memory[begin:end] <= min((low[v] + high[v]) / 2, np.nextafter(high[v], 0.0))
        else:  # no layer's memory is open any more: split by number
            sizes = np.add.reduceat(active, first, dtype=np.int64)
            v = int(np.argmax(sizes))
            begin, end = int(packed.first[v]), int(packed.first[v + 1])
            lighter = np.cumsum(active[begin:end]) <= sizes[v] // 2
        parts = []
        for mask in (lighter, ~lighter):
            part = active.copy()
            part[begin:end] &= mask
            if part[begin:end].any():
                parts.append(part)
        return parts


def _least_per_layer(packed: Packed, memory: np.ndarray, budget: Budget) -> np.ndarray:
    """What every layer needs in any case: the least of those of its configurations that no edge rules out."""
    if not packed.vertices:
        return np.zeros(0)
    possible = np.isfinite(packed.unary)
    if packed.most == math.inf:
        with contextlib.suppress(MemoryError):  # what is impossible is cleared first: no room for a copy, so none
            reduce(packed, possible, budget=Budget(budget.deadline, 0.0))
    return np.minimum.reduceat(np.where(possible, memory, np.inf), packed.first[:-1])


def least_memory(network: CostNetwork, memory: Sequence[np.ndarray], budget: Budget | None = None,
                 ) -> tuple[float, tuple[int, ...]]:
    """The least memory any assignment of finite cost needs, and one that needs no more.

    Args:
      network: which assignments are finite.
      memory: per layer, bytes per device of every configuration; they add up over the layers.
      budget: of the search; the usual memory and no end if not given.

    Raises:
      UsageError: memory does not fit the network.
      InfeasibleError: no assignment is finite; or not `proven`, where the least was not found within the budget.
    """
    budget = budget or Budget()
    with contextlib.suppress(TimeoutError):
        least, choice, proven = _lightest(network, bytes_of_all(network, memory), budget)
        if proven:
            return least, tuple(choice.tolist())
    raise InfeasibleError(f"the least memory that a strategy needs: not found {budget.used_up}", proven=False)


def _lightest(network: CostNetwork, memory: np.ndarray, budget: Budget) -> tuple[float, np.ndarray, bool]:
    """The memory of the lightest assignment of finite cost that was found in time, the assignment, and whether there is
    none lighter.

    Raises:
      InfeasibleError: none is finite.
      TimeoutError: none was found in time, or within the memory.
    """
    first = network.arrays.first
    allowed = np.where(np.isfinite(network.arrays.unary), memory, np.inf)
    choice = least_of_each(first, allowed)
    if network.cost(choice.tolist()) < math.inf:  # every layer has its lightest, and none forbids that of another
        return math.fsum(memory[first[:-1] + choice].tolist()), choice, True
    packed = pack(network.normalized(budget=budget))
    search = Minimiser(packed._replace(unary=np.where(np.isfinite(packed.unary), memory, np.inf),
                                       values=np.where(np.isfinite(packed.values), 0.0, np.inf)),
                       budget=budget.less(packed.bytes + packed.values.nbytes))
    search.run()
    if search.best is None:
        if not search.proven:
            raise TimeoutError
        raise InfeasibleError("no finite assignment exists")
    return math.fsum(memory[packed.first[:-1] + search.best].tolist()), search.best, search.proven


def minimise_within(network: CostNetwork, memory: Sequence[np.ndarray], memory_limit: float, *,
                    initial: Sequence[int] | None = None, time_limit: float | None = None, gap: float = 0.0,
                    progress: Progress | None = None, search_memory: float = SEARCH_MEMORY) -> Solution:
    """The cheapest assignment whose memory does not exceed a limit.

    Args:
      network: what to minimise.
      memory: per layer, bytes per device of every configuration; they add up over the layers.
      memory_limit: bytes per device.
      initial: an assignment to begin with, if it does not exceed the limit: what is found costs no more.
      time_limit: seconds; without it, ten seconds of branching after the first bound.
      gap: relative gap at which to stop.
      progress: called after every node of the branch and bound.
      search_memory: bytes that the search itself may hold beside the network; it stops where they are used up.

    Returns:
      the solution; `optimal` where the gap is closed (to 1e-10 of what is added up). `statistics`: memory (of the
      assignment), memory_limit; least_memory where that is proven; multiplier (cost per byte), nodes, solves where it
      came to them.

    Raises:
      UsageError: memory does not fit the network.
      InfeasibleError: no assignment fits; names the least memory any needs. Or none was found in time.
    """
    start, budget, doubt = time.perf_counter(), Budget.of(time_limit, search_memory), rounding(network)
    memory_limit = checked_limit(memory_limit)
    flat = bytes_of_all(network, memory)
    begun = None
    if initial is not None and network.cost(initial) < math.inf and math.fsum(
            entry[choice] for entry, choice in zip(memory, initial, strict=True)) <= memory_limit:
        begun = np.array(initial, np.int64)
    try:
        least, lightest, proven = _lightest(network, flat, budget)
        if least > memory_limit and not proven:
            raise TimeoutError
    except TimeoutError:
        if begun is None:
            raise InfeasibleError(f"no assignment within {memory_limit:.0f} bytes per device found {budget.used_up}",
                                  proven=False) from None
        least, lightest, proven = 0.0, begun, False  # nobody knows what the lightest needs
    if least > memory_limit:
        # Rounded so that the number named is enough where bytes are no whole numbers.
        raise InfeasibleError(f"memory limit of {math.floor(memory_limit)} bytes per device: the least any strategy "
                              f"needs is {math.ceil(least)}; raise the limit or use more devices")
    known: list[list[int]] = [lightest.tolist(), *([] if begun is None else [begun.tolist()])]
    # No assignment needs more than `most`, and infinity cannot be charged for.
    most = math.fsum(float(np.max(entry)) for entry in memory) * (1 + 1e-9)
    statistics = {"layers": len(network.vectors), "edges": len(network.edges), "configurations": sum(network.sizes),
                  "memory_limit": memory_limit, **({"least_memory": least} if proven else {})}
    try:
        packed = pack(network.normalized(budget=budget))
        search = _Search(packed, flat, min(memory_limit, most),
                         budget.less(packed.bytes), gap, progress, _PATIENCE if time_limit is None else math.inf, doubt)
    except TimeoutError:  # all that is known
        first: list[int] = min(known, key=network.cost)
        assignment, bound, proven = tuple(first), -math.inf, False
    else:
        for choice in known:
            search.consider(search.point(np.array(choice, np.int64)))
        bound, proven = search.run()
        best = search.best
        assert best is not None  # the lightest assignment fits
        # By what larger parts of a best before left undecided, more may have been left out than this one costs.
        bound, proven = min(bound, search.left_out), proven and search.left_out >= best.cost - search.target
        assignment = tuple(best.choice.tolist())
        statistics |= {"multiplier": search.multiplier, "nodes": search.nodes, "solves": search.solves}
    used = math.fsum(entry[choice] for entry, choice in zip(memory, assignment, strict=True))
    cost = network.cost(assignment)
    bound = cost if proven else min(cost, bound)
    found = Solution(assignment, cost, bound, relative_gap(cost, bound), proven, time.perf_counter() - start,
                     {**statistics, "memory": used})
    return as_far_as_sums_tell(network, found, doubt)
