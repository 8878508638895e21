"""Branch and bound for the cheapest assignment; exact.py tells the whole search.

1. Bounds by message passing, assignments by greedy decoding and local improvement (messages.py). On most networks of
   real models the two meet within a dozen passes.
2. Configurations that can be in no better assignment are pruned; vertices with one configuration left are folded away.
3. What remains is eliminated exactly (elimination.py) as soon as its tables are small, or searched depth first where
   that is quick (depth_first.py).
4. Where even that is too much, the domain of one vertex is cut in two, best bound first, diving. Parts that wait take
   a share of the memory at most: once they fill it, the newest are explored first, so that they get fewer.

Nothing here calls itself but the search among a few promising configurations, and that one does not do so again.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.budget import Budget
from pase_mtf.search.compiled import compiled
from pase_mtf.search.depth_first import descend, descent_bytes
from pase_mtf.search.elimination import Plan, eliminate, plan_elimination
from pase_mtf.search.messages import PassState, improve, message_passes, prune
from pase_mtf.search.packed import Packed, Reduction, active_domains, lift, quantum, reduce, simple_bound
from pase_mtf.search.pulls import EXACTLY, grain, rounded_down
from pase_mtf.search.registry import Progress, relative_gap
from pase_mtf.search.waiting import Waiting

__all__ = ["Minimiser"]

# What floating point leaves undecided: costs closer than this, relative to the sum of their absolute parts, are equal.
_TOLERANCE = 1e-12
# Sums that may be formed, and table entries kept, where elimination replaces further passes at once ...
_CHEAP_OPERATIONS = 1 << 20
# ... and where it replaces branching.
_MOST_OPERATIONS = 1 << 30
_MOST_ENTRIES = 1 << 25
# Matrix entries that the first search depth first may read; the next one may four times as many.
_FIRST_DESCENT = 1 << 27
# Entries that one node of it may read per second that is left: it looks at the clock once a node.
_READS_PER_LOOK = 2e7
# Of an entry of a table: its value, which configuration attains it, and once more while tables are added up.
_BYTES_PER_ENTRY = 24
# Of the memory, what parts that wait may take.
_WAITING = 0.25
# What elimination manages on a slow core, with many tables to be added up.
_OPERATIONS_PER_SECOND = 5e7
# Matrix entries that a reduced network may have, whatever the network had.
_MOST_COPIED = 1 << 23
# Entries of all edges from where on a network is large: it pays to look for a good assignment before more passes.
_LARGE = 1 << 21
# How often passes read an entry of a matrix on average from where on a copy in single precision pays, which takes as
# long to make as reading everything a dozen times.
_REREAD = 8
# Single precision holds costs between these limits.
_LEAST_COST, _MOST_COST = 1e-25, 1e25
# Configurations per vertex that are looked at for a good assignment, by reduced cost.
_PROMISING = 12
_SWEEPS = 20
# Sweeps of local improvement for what a pass chooses, where nothing better comes after it.
_POLISHING = 2


class _Outcome(NamedTuple):
    """What became of a part of the root that was explored.

    Attributes:
      bound: no assignment of it costs less; inf where none matters any more.
      stopped: the search has to end, as the deadline has passed or the gap is small enough.
      halves: bool [configurations of the root], the active ones of two parts that have to be explored instead; none
        where nothing is left.
    """

    bound: float
    stopped: bool = False
    halves: tuple[np.ndarray, ...] = ()


_NOTHING_LEFT = _Outcome(np.inf)


@dataclasses.dataclass(eq=False)
class _Part:
    """A part of the root while it is explored.

    Attributes:
      p: its network, without what has been pruned and folded away.
      state: of its message passing.
      bound: no assignment of it costs less.
      rough: its matrices in single precision for quick passes, or EXACTLY.
      work: matrix and class entries that a pass reads.
      folded: no edge of `p` ends in a vertex with one configuration.
      plan: how it would be eliminated.
      previous: the bound before the last passes.
      stalled: how often in a row passes have hardly raised the bound.
      descended: how often it was when a search depth first was given up.
    """

    p: Packed
    state: PassState
    bound: float
    rough: np.ndarray
    work: int
    folded: bool
    plan: Plan | None = None
    previous: float = -np.inf
    stalled: int = 0
    descended: int = 0

    @classmethod
    def of(cls, p: Packed, messages: np.ndarray, bound: float, room: float) -> _Part:
        """The whole of a network, with so many bytes of room for a copy of its matrices."""
        return cls(p, PassState.start(p, messages), bound, _rounded_down(p, room), _work(p),
                   not (p.domains == 1)[p.ends].any())

    def domains(self) -> np.ndarray:
        """Active configurations per vertex."""
        return active_domains(self.p.first, self.state.active)

    def elimination(self, domains: np.ndarray, anew: bool) -> Plan:
        """How to eliminate what is undecided; found anew if asked to."""
        if self.plan is None or anew:
            undecided = (domains > 1)[self.p.ends].all(axis=0)
            self.plan = plan_elimination(domains, self.p.ends[:, undecided].T, most_operations=_MOST_OPERATIONS,
                                         most_entries=_MOST_ENTRIES)
        return self.plan

    def notice_progress(self, cost: float) -> None:
        """Counts how often in a row the bound has hardly come nearer to this cost."""
        self.stalled = self.stalled + 1 if self.bound - self.previous < 0.05 * (cost - self.bound) else 0
        self.previous = self.bound

    def worth_reducing(self, domains: np.ndarray, affordable: bool) -> bool:
        """Whether to go on with the active configurations alone, where elimination comes next or not."""
        everything = bool(self.state.active.all())
        return (affordable and not (self.folded and everything)) or (
            not everything and _worth_reducing(self.p, domains))

    def reduce(self, budget: Budget, room: float) -> bool:
        """Goes on with the active configurations alone if they and what there is now fit so many bytes."""
        self.rough = EXACTLY  # may be as large as everything else: let go of it before the next is made
        active = self.state.active
        try:
            self.p, messages, *_ = reduce(self.p, active, self.state.messages,
                                          budget=Budget(budget.deadline, room - self.p.bytes))
        except MemoryError:
            return False
        self.state = PassState(messages, np.ones(len(self.p.unary), bool), self.state.reduced_costs[active],
                               self.state.bounds, self.state.best)
        self.folded, self.work = True, _work(self.p)
        self.rough = _rounded_down(self.p, room - self.p.bytes)
        return True


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

    def __init__(self, packed: Packed, *, budget: Budget | None = None, gap: float = 0.0, cutoff: float = np.inf,
                 unit: float | None = None, progress: Progress | None = None, thorough: bool = True) -> None:
        """Prepares.

        Args:
          packed: the network.
          budget: time, and memory beside the network; the usual memory and no end if not given.
          gap: relative gap at which to stop.
          cutoff: only assignments cheaper than this are of interest; if there is none, `best` stays None.
          unit: what all costs are multiples of, if known (see packed.quantum).
          progress: called after every step.
          thorough: search among a few promising configurations first where the network is large.

        Raises:
          InfeasibleError: no finite assignment can exist.
          TimeoutError: the time is over before anything is known.
          UsageError: the search needs more memory.
        """
        self._packed, self._active = packed, np.ones(len(packed.unary), bool)
        self._budget, self._thorough = budget or Budget(), thorough
        self._reduction = self._reduced()
        self.root = self._reduction.network
        self.cost, self.bound, self.proven = cutoff, -np.inf, False
        self.best: np.ndarray | None = None
        self.statistics: dict[str, Any] = {"passes": 0, "nodes": 0, "descents": 0, "eliminations": 0,
                                           "largest_table": 0, "configurations_left": len(self.root.unary)}
        self._gap, self._progress = gap, progress
        self._unit = quantum(packed, self._budget) if unit is None else unit
        self._scale = 0.0
        self.potentials: np.ndarray | None = None
        self._start = time.perf_counter()
        self._most_read = float(_FIRST_DESCENT)
        self._root_messages = np.zeros(self.root.potentials)
        # Where configuration i of vertex v of the input stands among the root's.
        self._place: np.ndarray | None = None  # where nothing was removed, it stands where it stood
        self._offset = packed.first
        if self.root is not packed:
            self._place = np.full(len(packed.unary), -1, np.int32)
            owner = np.repeat(np.arange(self.root.vertices), self.root.domains)
            self._place[packed.first[owner] + self.root.original] = np.arange(len(self.root.unary))

    def _reduced(self) -> Reduction:
        """The network without what can never be finite; sets what memory is left beside it."""
        packed, budget = self._packed, self._budget
        state = 40 * len(packed.unary) + 16 * packed.potentials  # of the first passes
        budget.require(state)
        try:
            found = reduce(packed, self._active, keep_large=True,
                           budget=budget.less(state))
        except MemoryError:
            budget.require(state + packed.bytes)
            raise
        self._room = budget.memory - state - (found.network.bytes if found.network.values is not packed.values else 0)
        return found

    def run(self, most_nodes: float = np.inf) -> None:
        """Searches until proven, or the deadline or gap is reached, or so many nodes have been looked at."""
        waiting = Waiting(len(self.root.unary), _WAITING * self._room)
        node: tuple[float, np.ndarray | None] | None = (-np.inf, None)
        while node is not None:
            others = waiting.bound
            self.statistics["nodes"] += 1
            outcome = self._explore(*node, others)
            if outcome.stopped:
                self.bound = max(self.bound, min(outcome.bound, others))
                if self.bound == -np.inf:  # not even one pass was finished
                    self.bound = simple_bound(self.root)
                return
            node = None
            if outcome.halves:
                waiting.add(outcome.bound, outcome.halves[1])
                node = outcome.bound, outcome.halves[0]
            if node is None:
                node = waiting.next(self.cost - self._target())
            if node is not None:
                self.bound = max(self.bound, min(node[0], waiting.bound))
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
                return float(self._unit - 2 * doubt)
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

    def _explore(self, bound: float, active: np.ndarray | None, others: float) -> _Outcome:
        """Solves the active part of the root (None: all of it), or cuts it in two.

        Args:
          bound: of that part.
          active: bool [configurations of the root].
          others: the bound of all other parts.
        """
        top, part = active is None, None
        try:
            part = self._part(bound, active)
            passes = 1  # the first pass finds the scale of costs
            while True:
                before = int(part.state.active.sum())
                self._pass(part, passes)
                self._report(min(part.bound, others))
                if self.cost - part.bound <= self._target():
                    self._keep_potentials(part)
                    return _NOTHING_LEFT
                if self._enough(min(part.bound, others)) or self._budget.over:
                    return _Outcome(part.bound, stopped=True)
                domains = part.domains()
                if top:
                    self.statistics["configurations_left"] = int(domains.sum())
                if not domains.all():
                    return _NOTHING_LEFT
                plan = part.elimination(domains, anew=int(domains.sum()) < before)
                part.notice_progress(self.cost)
                affordable = self._affordable(part, plan, domains)
                if part.worth_reducing(domains, affordable):
                    affordable &= part.reduce(self._budget, self._room * (1 - _WAITING))
                if affordable:
                    self._eliminate(part.p, plan)
                    return _NOTHING_LEFT
                if self._descend(part):
                    return _NOTHING_LEFT
                if part.stalled >= 2:
                    if part.rough is EXACTLY:
                        return _Outcome(part.bound, halves=self._halves(part, plan))
                    part.rough, part.stalled = EXACTLY, 0
                passes = max(1, min(4, int(5e7 / max(part.work, 1))))
        except InfeasibleError:
            if top and self.best is None and self.cost == np.inf:
                raise
            return _NOTHING_LEFT
        except TimeoutError:
            return _Outcome(part.bound if part else bound, stopped=True)
        except MemoryError:
            self.statistics["stopped"] = "memory"
            return _Outcome(bound, stopped=True)

    def _part(self, bound: float, active: np.ndarray | None) -> _Part:
        if active is None:
            return _Part.of(self.root, self._root_messages, bound, self._room * (1 - _WAITING))
        room = self._room * (1 - _WAITING)
        p, messages, *_ = reduce(self.root, active, self._root_messages, budget=Budget(self._budget.deadline, room))
        return _Part.of(p, messages, bound, room - p.bytes)

    def _pass(self, part: _Part, passes: int) -> None:
        """Passes messages in a part, and takes the assignments met on the way."""
        p, target = part.p, self._target()
        part.state = part.state._replace(best=np.zeros(p.vertices, np.int64))
        step = grain(p, part.rough, self.cost - part.bound)
        large = part.work >= _LARGE or part.rough is not EXACTLY
        look = large and self._thorough  # what that finds is better than what sweeps over a large network do
        found = message_passes(p, part.rough, part.state, self.cost, -target, target, passes,
                               self._budget.seconds, step, 0 if look else _POLISHING)
        self.statistics["passes"] += found.passes
        self._offer(p, part.state.best, found.cost)
        if look:
            self._look_for_better(p, part.state)
        if large:
            prune(p, part.state, self.cost - self._target(), step != 0.0)
        part.bound = max(part.bound, float(found.bound))

    def _keep_potentials(self, part: _Part) -> None:
        """Keeps the potentials of the whole network if they prove the cost by themselves."""
        if part.p is self.root and part.rough is EXACTLY and self.cost - part.bound <= self.slack / 2:
            self.potentials = lift(self._packed, self._active, np.zeros(self._packed.potentials),
                                   self._reduction._replace(messages=part.state.messages))

    def _affordable(self, part: _Part, plan: Plan, domains: np.ndarray) -> bool:
        """Whether elimination is quicker than what passes, or else branching, would take."""
        cheap = max(_CHEAP_OPERATIONS, 4 * _entries_left(part.p, domains))
        in_time = _OPERATIONS_PER_SECOND * self._budget.seconds
        room = self._room * (1 - _WAITING) - part.p.bytes
        return (plan.complete and plan.entries <= min(_MOST_ENTRIES, room / _BYTES_PER_ENTRY)
                and plan.operations <= min(cheap if part.stalled < 2 else _MOST_OPERATIONS, in_time))

    def _look_for_better(self, p: Packed, state: PassState) -> None:
        """Searches among the configurations of least reduced cost: a good assignment early saves passes over all of
        them."""
        few = _promising(p.first, state.active, state.reduced_costs, _PROMISING)
        try:
            part = reduce(p, few).network
        except InfeasibleError:  # of these few no assignment is finite: that says nothing of the others
            return
        own = part.original
        part = part._replace(original=(np.arange(len(own)) - np.repeat(part.first[:-1], part.domains)).astype(np.int32))
        search = Minimiser(part, budget=Budget(self._budget.deadline, self._room * (1 - _WAITING)), cutoff=self.cost,
                           unit=self._unit, thorough=False)
        try:
            search.run(most_nodes=1)
        except InfeasibleError:
            return
        if search.best is not None:
            choice = np.flatnonzero(few)[part.first[:-1] + search.best] - p.first[:-1]
            self._offer(p, choice, improve(p, choice, _SWEEPS))

    def _eliminate(self, p: Packed, plan: Plan) -> None:
        self.statistics["eliminations"] += 1
        self.statistics["largest_table"] = max(self.statistics["largest_table"], int(plan.largest))
        cost, choice = eliminate(p, plan)
        self._offer(p, choice, cost + p.constant)

    def _descend(self, part: _Part) -> bool:
        """Searches a part depth first once passes bring little, as far as that is quick. Whether it got to the end."""
        if part.stalled <= part.descended or part.rough is not EXACTLY:
            return False
        part.descended = part.stalled
        room = self._room * (1 - _WAITING)
        if not part.state.active.all() and not part.reduce(self._budget, room):
            return False
        entries = 2 * _entries_left(part.p, part.p.domains)
        # Room for one way down at least, once, for the sake of the assignment that it finds.
        most = self._most_read if self.statistics["descents"] else max(
            self._most_read, 2.0 * entries * np.count_nonzero(part.p.domains > 1))
        if (entries > min(most / 16, _READS_PER_LOOK * self._budget.seconds)
                or descent_bytes(part.p) > room - part.p.bytes):
            self._most_read *= 4
            return False
        self.statistics["descents"] += 1
        found = descend(part.p, self.cost, self._target(), most, self._budget.seconds)
        if len(found.choice):
            self._offer(part.p, found.choice, improve(part.p, found.choice, _SWEEPS))
        if not found.complete:
            self._most_read *= 4
        return found.complete

    def _halves(self, part: _Part, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Cuts the domain of one vertex: the one that makes the largest tables. The first half holds the more
        promising configurations. Both as active configurations of the root."""
        p, active = part.p, part.state.active
        v = plan.widest(part.domains())
        owner = np.repeat(np.arange(p.vertices), p.domains)
        place = self._places(self._offset[owner] + p.original)
        first = np.zeros(len(self.root.unary), bool)
        first[place[active]] = True
        second = first.copy()
        own = np.flatnonzero(active[p.first[v]:p.first[v + 1]]) + p.first[v]
        own = own[np.argsort(part.state.reduced_costs[own], kind="stable")]
        half = max(1, len(own) // 2)
        first[place[own[half:]]] = False
        second[place[own[:half]]] = False
        return first, second


@compiled
def _promising(first: np.ndarray, active: np.ndarray, reduced_costs: np.ndarray, count: int
               ) -> np.ndarray:  # pragma: no cover (compiled)
    """bool [configurations]: so many per vertex, those of the least reduced costs, active ones first."""
    found, best, least = np.zeros(len(active), np.bool_), np.empty(count, np.int64), np.empty(count)
    for v in range(len(first) - 1):
        kept = 0
        for position in range(first[v], first[v + 1]):
            value = reduced_costs[position] if active[position] else np.inf
            if kept == count and not value < least[kept - 1]:
                continue
            kept = min(kept + 1, count)
            place = kept - 1
            while place > 0 and value < least[place - 1]:
                best[place], least[place] = best[place - 1], least[place - 1]
                place -= 1
            best[place], least[place] = position, value
        for place in range(kept):
            found[best[place]] = True
    return found


def _rounded_down(p: Packed, room: float) -> np.ndarray:
    """The matrices in single precision where that pays and fits so many bytes, else EXACTLY."""
    work = _work(p)
    if work < _LARGE or work < _REREAD * len(p.values) or p.values.nbytes > room:
        return EXACTLY
    fits = p.least > -_MOST_COST and _LEAST_COST <= p.most < _MOST_COST
    return rounded_down(p) if fits else EXACTLY


def _work(p: Packed) -> int:
    """Matrix and class entries that a pass reads."""
    return 2 * int((p.extents[0] * p.extents[1]).sum()) + 4 * len(p.classes) + len(p.unary)


def _entries_left(p: Packed, domains: np.ndarray) -> int:
    """Matrix entries of all edges, at most, when there are so many configurations per vertex."""
    size = np.minimum(p.extents, domains[p.ends])
    return int((size[0] * size[1]).sum())


def _worth_reducing(p: Packed, domains: np.ndarray) -> bool:
    """Whether the network without the inactive configurations takes so much less work that copying it, some five times
    as dear as a pass over it, pays, and no more memory than now (matrices that were shared may part: those that keep
    differently many classes)."""
    if _entries_left(p, domains) >= 0.3 * int((p.extents[0] * p.extents[1]).sum()) + 1000:
        return False
    matrices = np.unique(np.stack([p.matrix, *np.minimum(p.extents, domains[p.ends])]), axis=1)
    return int((matrices[1] * matrices[2]).sum()) <= max(2 * len(p.values), _MOST_COPIED)
