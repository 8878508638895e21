"""The default search: a proven optimum.

1. Bounds by message passing, assignments by greedy decoding and local improvement (messages.py). On most networks of
   real models the two meet within a dozen passes.
2. Configurations that can be in no better assignment are removed; vertices with one configuration left are folded away.
3. What remains is eliminated exactly (elimination.py) as soon as its tables are small.
4. Where even that is too large, branch and bound: the domain of one vertex is cut in two, best bound first, diving.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.certificate import Certificate
from pase_mtf.search.certify import certify, potentials_of
from pase_mtf.search.elimination import Plan, eliminate, factors_of, plan_elimination
from pase_mtf.search.messages import EXACTLY, improve, message_passes, rounded_down
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Packed, lift, pack, quantum, reduce
from pase_mtf.search.registry import Progress, Solution, register, relative_gap

__all__ = ["Minimiser", "exact"]

# What floating point leaves undecided: costs closer than this, relative to the sum of their absolute parts, are equal.
_TOLERANCE = 1e-12
# Sums that may be formed, and table entries kept, where elimination replaces further passes at once ...
_CHEAP_OPERATIONS = 1 << 20
# ... and where it replaces branching. An entry takes 12 bytes.
_MOST_OPERATIONS = 1 << 30
_MOST_ENTRIES = 1 << 25
# What elimination manages on a slow core, with many tables to be added up.
_OPERATIONS_PER_SECOND = 5e7
# Matrix entries that a reduced network may have, whatever the network had.
_MOST_COPIED = 1 << 23
# Entries of all edges from where on the first passes are in single precision: below, the others are as quick.
_LARGE = 1 << 21
# Single precision holds costs between these limits.
_LEAST_COST, _MOST_COST = 1e-25, 1e25
# Configurations per vertex that are looked at for a good assignment, by surplus.
_PROMISING = 12
_SWEEPS = 20


class Minimiser:
    """Branch and bound over one packed network; holds the best assignment and the bound while it runs.

    Attributes:
      root: the network, without what can never be finite.
      cost: of the best assignment known, by the packed network (inf: none yet).
      best: int64 [vertices], that assignment, in original configuration indices; None if none.
      bound: proven lower bound.
      proven: whether the search has ended with a proof.
      statistics: counts.
      potentials: float64 [packed.potentials], those that prove `cost` by themselves; None if it took more.
    """

    def __init__(self, packed: Packed, *, deadline: float = np.inf, gap: float = 0.0, cutoff: float = np.inf,
                 unit: float | None = None, progress: Progress | None = None) -> None:
        """Prepares.

        Args:
          packed: the network.
          deadline: time.perf_counter() value at which to stop.
          gap: relative gap at which to stop.
          cutoff: only assignments cheaper than this are of interest; if there is none, `best` stays None.
          unit: what all costs are multiples of, if known (see packed.quantum).
          progress: called after every step.

        Raises:
          InfeasibleError: no finite assignment can exist.
        """
        self._packed, self._alive = packed, np.ones(len(packed.unary), bool)
        self._reduction = reduce(packed, self._alive, keep_large=True)
        self.root = self._reduction.network
        self.cost, self.best, self.bound, self.proven = cutoff, None, -np.inf, False
        self.statistics: dict[str, Any] = {"passes": 0, "nodes": 0, "eliminations": 0, "largest_table": 0,
                                           "configurations_left": len(self.root.unary)}
        self._deadline, self._gap, self._progress = deadline, gap, progress
        self._unit = quantum(packed) if unit is None else unit
        self._scale = 0.0
        self.potentials: np.ndarray | None = None
        self._start = time.perf_counter()
        self._root_messages = np.zeros(self.root.potentials)
        # Where configuration i of vertex v of the input stands among the root's.
        self._place: np.ndarray | None = None  # where nothing was removed, it stands where it stood
        self._offset = packed.first
        if self.root is not packed:
            self._place = np.full(len(packed.unary), -1, np.int32)
            owner = np.repeat(np.arange(self.root.vertices), self.root.domains)
            self._place[packed.first[owner] + self.root.original] = np.arange(len(self.root.unary))

    def run(self, most_nodes: float = np.inf) -> None:
        """Searches until proven, or the deadline or gap is reached, or so many nodes have been looked at."""
        # (bound, number, alive configurations of the root as bits); the number makes the order definite.
        open_nodes: list[tuple[float, int, np.ndarray]] = []
        node: tuple[float, np.ndarray | None] | None = (-np.inf, None)
        number = 0
        while node is not None:
            bound, alive = node
            others = open_nodes[0][0] if open_nodes else np.inf
            self.statistics["nodes"] += 1
            outcome = self._explore(bound, alive, others)
            if isinstance(outcome, float):  # stopped early
                self.bound = max(self.bound, min(outcome, others))
                return
            node = None
            if outcome is not None:
                bound, first, second = outcome
                number += 1
                heapq.heappush(open_nodes, (bound, number, np.packbits(second)))
                node = bound, first
            else:
                while open_nodes and node is None:
                    bound, _, bits = heapq.heappop(open_nodes)
                    if bound < self.cost - self._target():
                        node = bound, np.unpackbits(bits, count=len(self.root.unary)).astype(bool)
            if node is not None:
                self.bound = max(self.bound, min(node[0], open_nodes[0][0] if open_nodes else np.inf))
                if self._enough(self.bound) or self.statistics["nodes"] >= most_nodes:
                    return
        self.bound, self.proven = self.cost, True

    @property
    def slack(self) -> float:
        """How far a bound may stay below the cost and still prove it (see check_certificate)."""
        return 0.4 if self._unit and self._scale < 2e14 else 0.9 * _TOLERANCE * self._scale

    def _target(self) -> float:
        """An assignment matters only if it is cheaper than the best by more than this."""
        if self._unit:
            # Rounding of the bound: a few ulp per vertex, of either sign.
            doubt = 1e-14 * (1 + self.root.vertices ** 0.5 / 10) * self._scale
            if doubt < self._unit / 4:
                return self._unit - 2 * doubt
        return _TOLERANCE * self._scale

    def _enough(self, bound: float) -> bool:
        return self._gap > 0 and self.best is not None and relative_gap(self.cost, bound) <= self._gap

    def _offer(self, p: Packed, choice: np.ndarray, cost: float) -> None:
        """Takes an assignment of a reduced network if it is the best so far."""
        if not cost < self.cost:
            return
        self.cost = cost
        self.best = p.original[p.first[:-1] + choice].astype(np.int64)
        chosen = self._places(self._offset[:-1] + self.best) - self.root.first[:-1]
        self._scale = self.root.cost(chosen)[1]

    def _places(self, configurations: np.ndarray) -> np.ndarray:
        """Where configurations of the input stand among the root's."""
        return configurations if self._place is None else self._place[configurations]

    def _report(self, bound: float) -> None:
        if self._progress is not None:
            self._progress(time.perf_counter() - self._start, self.cost, bound)

    def _explore(self, bound: float, alive: np.ndarray | None, others: float
                 ) -> float | tuple[float, np.ndarray, np.ndarray] | None:
        """Solves the part of the root that is alive, or cuts it in two.

        Returns:
          None if nothing better is left in it; its bound if the search must stop; else its bound and two halves.
        """
        top = alive is None
        p, messages = self.root, self._root_messages
        try:
            if not top:
                p, messages, *_ = reduce(p, alive, messages)
            work, folded = _work(p), not (p.domains == 1)[p.ends].any()
            chunk = 1  # the first pass finds the scale of costs
            plan, stalled, previous = None, 0, -np.inf
            keep = np.ones(len(p.unary), bool)
            surplus, level = np.zeros(len(p.unary)), np.zeros(p.vertices)
            rough = self._rounded_down(p, work)
            while True:
                choice = np.zeros(p.vertices, np.int64)
                target, left = self._target(), keep.sum()
                reached, cost, made = message_passes(p, rough, messages, keep, surplus, level, choice, self.cost,
                                                     -target, target, chunk)
                self.statistics["passes"] += made
                self._offer(p, choice, cost)
                if rough is not EXACTLY:
                    self._look_for_better(p, keep, surplus)
                    room = self.cost - self._target() - level
                    for v, (begin, end) in enumerate(itertools.pairwise(p.first.tolist())):  # there may be millions
                        keep[begin:end] &= surplus[begin:end] <= room[v]
                bound = max(bound, reached)
                self._report(min(bound, others))
                if self.cost - bound <= self._target():
                    if p is self.root and rough is EXACTLY and self.cost - bound <= self.slack / 2:
                        self.potentials = lift(self._packed, self._alive, np.zeros(self._packed.potentials),
                                               self._reduction._replace(messages=messages))
                    return None
                if self._enough(min(bound, others)) or time.perf_counter() > self._deadline:
                    return float(bound)
                # One by one: summed in one call, millions of configurations would be copied as integers first.
                domains = np.array([np.count_nonzero(keep[begin:end])
                                    for begin, end in itertools.pairwise(p.first.tolist())], np.int64)
                if top:
                    self.statistics["configurations_left"] = int(keep.sum())
                if not domains.all():
                    return None
                if plan is None or keep.sum() < left:
                    undecided = (domains > 1)[p.ends].all(axis=0)
                    plan = plan_elimination(domains, p.ends[:, undecided].T.tolist())
                stalled = stalled + 1 if bound - previous < 0.05 * (self.cost - bound) else 0
                previous = bound
                most = max(_CHEAP_OPERATIONS, 4 * _entries_left(p, domains)) if stalled < 2 else _MOST_OPERATIONS
                in_time = _OPERATIONS_PER_SECOND * (self._deadline - time.perf_counter())
                affordable = plan.entries <= _MOST_ENTRIES and plan.operations <= min(most, in_time)
                if (not (folded and keep.all()) and affordable) or (not keep.all() and _worth_reducing(p, domains)):
                    rough = EXACTLY  # may be as large as everything else: let go of it before the next is made
                    p, messages, *_ = reduce(p, keep, messages)
                    surplus, keep = surplus[keep], np.ones(len(p.unary), bool)
                    folded, work = True, _work(p)
                    rough = self._rounded_down(p, work)
                if affordable:
                    self._eliminate(p, plan)
                    return None
                if stalled >= 2:
                    if rough is EXACTLY:
                        break
                    rough, stalled = EXACTLY, 0
                chunk = max(1, min(4, int(5e7 / max(work, 1))))
        except InfeasibleError:
            if top and self.best is None and self.cost == np.inf:
                raise
            return None
        return (float(bound), *self._halves(p, keep, plan, surplus))

    def _rounded_down(self, p: Packed, work: int) -> np.ndarray:
        if work < _LARGE or not all(array.max(initial=0.0) < _MOST_COST and array.min(initial=0.0) > -_MOST_COST
                                    for array in (p.unary, p.values)) or p.values.max() < _LEAST_COST:
            return EXACTLY
        return rounded_down(p)

    def _look_for_better(self, p: Packed, keep: np.ndarray, surplus: np.ndarray) -> None:
        """Searches among the configurations of least surplus: a good assignment early saves passes over all of them."""
        few = np.zeros(len(keep), bool)
        for begin, end in itertools.pairwise(p.first.tolist()):
            if end - begin <= _PROMISING:
                few[begin:end] = True
            else:
                value = np.where(keep[begin:end], surplus[begin:end], np.inf)
                few[begin + np.argpartition(value, _PROMISING)[:_PROMISING]] = True
        part = reduce(p, few).network
        own = part.original
        part = part._replace(original=(np.arange(len(own)) - np.repeat(part.first[:-1], part.domains)).astype(np.int32))
        search = Minimiser(part, deadline=self._deadline, cutoff=self.cost, unit=self._unit)
        search.run(most_nodes=1)
        if search.best is not None:
            choice = np.flatnonzero(few)[part.first[:-1] + search.best] - p.first[:-1]
            self._offer(p, choice, improve(p, choice, _SWEEPS))

    def _eliminate(self, p: Packed, plan: Plan) -> None:
        self.statistics["eliminations"] += 1
        self.statistics["largest_table"] = max(self.statistics["largest_table"], int(plan.largest))
        cost, choice = eliminate(factors_of(p), p.domains, plan)
        self._offer(p, choice, cost + p.constant)

    def _halves(self, p: Packed, keep: np.ndarray, plan: Plan, surplus: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cuts the domain of one vertex: the one that makes the largest tables. The first half holds the more
        promising configurations. Both as configurations alive of the root."""
        domains = np.add.reduceat(keep, p.first[:-1], dtype=np.int64)
        weight = np.zeros(p.vertices)
        for vertex, scope in zip(plan.order, plan.scopes, strict=True):
            members = [*scope, vertex]
            weight[members] += float(np.prod(domains[members].astype(float)))
        weight[domains < 2] = -1
        v = int(np.argmax(weight))
        owner = np.repeat(np.arange(p.vertices), p.domains)
        place = self._places(self._offset[owner] + p.original)
        first = np.zeros(len(self.root.unary), bool)
        first[place[keep]] = True
        second = first.copy()
        own = np.flatnonzero(keep[p.first[v]:p.first[v + 1]]) + p.first[v]
        own = own[np.argsort(surplus[own], kind="stable")]
        half = max(1, len(own) // 2)
        first[place[own[half:]]] = False
        second[place[own[:half]]] = False
        return first, second


def _work(p: Packed) -> int:
    """What a pass takes."""
    return 2 * int((p.extents[0] * p.extents[1]).sum()) + 4 * len(p.classes) + len(p.unary)


def _entries_left(p: Packed, domains: np.ndarray) -> int:
    """Matrix entries of all edges, at most, when there are so many configurations per vertex."""
    size = np.minimum(p.extents, domains[p.ends])
    return int((size[0] * size[1]).sum())


def _worth_reducing(p: Packed, domains: np.ndarray) -> bool:
    """Whether the network without the configurations that are not alive takes clearly less work, and no more memory
    than now (matrices that were shared may part)."""
    work = _entries_left(p, domains)
    before = int((p.extents[0] * p.extents[1]).sum())
    return work < 0.7 * before + 1000 and work <= max(2 * len(p.values), _MOST_COPIED)


@register("exact")
def exact(network: CostNetwork, *, time_limit: float | None = None, gap: float = 0.0,
          progress: Progress | None = None, certificate: bool = True,
          memory: Sequence[np.ndarray] | None = None, memory_limit: float | None = None) -> Solution:
    """The cheapest assignment, proven.

    Args:
      network: what to minimise.
      time_limit, gap: stop early, with an assignment and a proven bound.
      progress: called after every few passes.
      certificate: attach the proof; where the bound of the first passes is not proof enough, that takes about as long
        as the search itself. Only an optimal solution has one, and none under a memory limit.
      memory, memory_limit: consider only assignments that need at most so many bytes per device; see
        memory.minimise_within.

    Returns:
      the solution; `optimal` unless stopped early. `statistics`: layers, edges, configurations, passes of message
      passing, nodes of the branch and bound, eliminations, largest_table (entries),
      configurations_left (when the root was last looked at).

    Raises:
      InfeasibleError: no assignment is finite or fits the memory limit, or none was found within the time limit.
      UsageError: only one of memory and memory_limit, or memory that does not fit the network.
    """
    if memory is not None or memory_limit is not None:
        if memory is None or memory_limit is None:
            raise UsageError("memory and memory_limit belong together; give both, or none")
        from pase_mtf.search.memory import minimise_within
        return minimise_within(network, memory, memory_limit, time_limit=time_limit, gap=gap, progress=progress)
    start = time.perf_counter()
    normal = network.normalized()
    packed = pack(normal)
    search = Minimiser(packed, deadline=start + (time_limit or np.inf), gap=gap, progress=progress)
    search.run()
    statistics = {"layers": len(network.vectors), "edges": len(network.edges),
                  "configurations": sum(network.sizes), **search.statistics}
    if search.best is None:
        raise InfeasibleError("no finite assignment exists" if search.proven else
                              f"no finite assignment found in {time_limit} seconds; raise the time limit")
    assignment = tuple(int(choice) for choice in search.best)
    cost = network.cost(assignment)
    bound = cost if search.proven else min(cost, search.bound)
    proof = None
    if certificate and search.proven:
        proof = (certify(normal, cost, search.slack) if search.potentials is None
                 else Certificate(potentials_of(normal, packed, search.potentials)))
    return Solution(assignment, cost, bound, relative_gap(cost, bound), search.proven, time.perf_counter() - start,
                    statistics, proof)
