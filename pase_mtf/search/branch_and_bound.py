"""Branch and bound for the cheapest assignment; exact.py tells the whole search.

0. A network that takes next to nothing to eliminate is eliminated.
1. Bounds by message passing, assignments by greedy decoding and local improvement (messages.py). On most networks of
   real models the two meet within a dozen passes.
2. Configurations that can be in no better assignment are pruned; vertices with one configuration left are folded away.
3. What remains is eliminated exactly (elimination.py) as soon as its tables are small, or searched depth first where
   that is quick (depth_first.py).
4. Where even that is too much, the domain of one vertex is split in two, best bound first, diving. Parts that wait take
   a share of the memory at most: once they fill it, the newest are explored first, so that they get fewer.

Nothing here calls itself but the search among a few promising configurations, and that one does not do so again.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.budget import Budget, DoesNotFitError
from pase_mtf.search.depth_first import descend, descent_bytes
from pase_mtf.search.elimination import eliminate
from pase_mtf.search.elimination_plan import Plan
from pase_mtf.search.messages import message_passes
from pase_mtf.search.neighbourhood import improve
from pase_mtf.search.packed import Packed, Potentials, Reduction, least_of_each, lift, quantum, reduce, simple_bound
from pase_mtf.search.part import LITTLE, SETTLED, Part, entries_left, plan_at_once
from pase_mtf.search.pass_state import PassState, cheap, promising, prune
from pase_mtf.search.pulls import EXACTLY, Steps
from pase_mtf.search.registry import Progress, relative_gap
from pase_mtf.search.waiting import Waiting

__all__ = ["Minimiser"]

# What floating point leaves undecided: costs closer than this, relative to the sum of their absolute parts, are equal.
_TOLERANCE = 1e-12
# What the parts of a solution in whole units add up to at most where it is told apart from all others (docs/search.md).
_MOST_WHOLE = 2e12
# Matrix entries that the first search depth first may read; the next one may four times as many.
_FIRST_DESCENT = 1 << 27
# Entries that one node of it may read per second that is left: it looks at the clock once a node.
_READS_PER_LOOK = 2e7
# Of the memory, what parts that wait may take.
_WAITING = 0.25
# And what the matrices in steps may that are kept for the certificate.
_KEPT = 0.125
# Configurations per vertex that are looked at for a good assignment, by reduced cost.
_PROMISING = 12
# Passes at most until potentials settle among few configurations, and between two looks at what they bring.
_SETTLING = 20
_BETWEEN_LOOKS = 4
# Bytes per potential of a network that taking over potentials from a part of it needs.
_LIFTED = 40
_SWEEPS = 20
# Configurations that take more than this share of the gap by themselves are not tried in them.
_SHARE = 0.5
# Sweeps of local improvement for what a pass chooses, where nothing better comes after it.
_POLISHING = 2
# Of what passes read, left when what was pruned is left out: with more, passes in the same steps come to no more.
_HARDLY_LESS = 0.75


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


class Minimiser:
    """Branch and bound over one packed network; holds the best assignment and the bound while it runs.

    Attributes:
      root: the network, without what can never be finite.
      cost: of the best assignment known, by the packed network (inf: none yet).
      best: int64 [vertices], that assignment, in original configuration indices; None if none.
      bound: proven lower bound.
      proven: whether the search has ended with a proof.
      statistics: counts.
      potentials: those that prove `cost` by themselves; None if it took more.
      steps: the matrices of the network in steps, for whoever proves its optimum; None if they were not counted, or
        are too large to be kept.
    """

    def __init__(self, packed: Packed, *, budget: Budget | None = None, gap: float = 0.0, cutoff: float = np.inf,
                 unit: float | None = None, progress: Progress | None = None, thorough: bool = True,
                 messages: Potentials | None = None, doubt: float = 0.0) -> None:
        """Prepares.

        Args:
          packed: the network.
          budget: time, and memory beside the network; the usual memory and no end if not given.
          gap: relative gap at which to stop.
          cutoff: only assignments cheaper than this are of interest; if there is none, `best` stays None.
          unit: what all costs are multiples of, if known (see packed.quantum).
          progress: called after every step.
          thorough: search among a few promising configurations first where the network is large.
          messages: potentials to begin with; 0 if not given.
          doubt: how far sums may be wrong where costs of both signs cancel (rounding.py).

        Raises:
          InfeasibleError: no finite assignment can exist.
          TimeoutError: the time is over before anything is known.
          UsageError: the search needs more memory.
        """
        self._packed, self._active = packed, np.ones(len(packed.unary), bool)
        self._budget, self._thorough = budget or Budget(), thorough
        self._reduction = self._reduced(messages)
        self.root = self._reduction.network
        self.cost, self.bound, self.proven = cutoff, -np.inf, False
        self.best: np.ndarray | None = None
        self.statistics: dict[str, Any] = {"passes": 0, "nodes": 0, "descents": 0, "eliminations": 0,
                                           "largest_table": 0, "configurations_left": len(self.root.unary)}
        self._gap, self._progress = gap, progress
        self._unit = quantum(packed, self._budget) if unit is None else unit
        self._scale, self._doubt, self._left_out = 0.0, doubt, np.inf
        self.potentials: Potentials | None = None
        self.steps: Steps | None = None
        self._start = time.perf_counter()
        self._most_read = float(_FIRST_DESCENT)
        self._root_messages = self._reduction.messages
        # Where configuration i of vertex v of the input stands among the root's.
        self._place: np.ndarray | None = None  # where nothing was removed, it stands where it stood
        self._offset = packed.first
        if self.root is not packed:
            self._place = np.full(len(packed.unary), -1, np.int32)
            owner = np.repeat(np.arange(self.root.vertices), self.root.domains)
            self._place[packed.first[owner] + self.root.original] = np.arange(len(self.root.unary))

    def _reduced(self, messages: Potentials | None) -> Reduction:
        """The network without what can never be finite; sets what memory is left beside it."""
        packed, budget = self._packed, self._budget
        state = 40 * len(packed.unary) + 16 * packed.potentials  # of the first passes
        budget.require(state)
        try:
            found = reduce(packed, self._active, messages, keep=True, budget=budget.less(state))
        except DoesNotFitError as error:
            # Edges that share a matrix need one each where each loses other classes. What is infinite at a vertex may
            # stay, as passes never send it; what an edge forbids may not: infinity would be taken from infinity.
            if packed.values.max(initial=-np.inf) == np.inf:
                budget.require(state + error.needed)
                raise
            found = Reduction.nothing(packed, Potentials.none(packed) if messages is None else messages)
        self._room = budget.memory - state - (found.network.bytes if found.network.values is not packed.values else 0)
        return found

    def run(self, most_nodes: float = np.inf) -> None:
        """Searches until proven, or the deadline or gap is reached, or so many nodes have been looked at."""
        ended = self._search(most_nodes)
        # Where costs cancel, what a best of large parts left undecided may be more than all that a later one costs.
        while ended and self._left_out < self.cost - self._target():
            self.bound, self._left_out = self._left_out, np.inf  # of all else it is certain that it costs more
            self._root_messages = self._reduction.messages
            self._room, self.steps = self._room + (self.steps.bytes if self.steps else 0), None
            ended = self._search(most_nodes)
        self.bound, self.proven = (self.cost if ended else min(self.bound, self._left_out)), ended

    def _search(self, most_nodes: float) -> bool:
        """`run`, with what is known of the best as it is on the way. Whether all that matters by that was searched."""
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
                return False
            node = None
            if outcome.halves:
                waiting.add(outcome.bound, outcome.halves[1])
                node = outcome.bound, outcome.halves[0]
            if node is None:
                node = waiting.next(self.cost - self._target())
            if node is not None:
                self.bound = max(self.bound, min(node[0], waiting.bound))
                if self._enough(self.bound) or self.statistics["nodes"] >= most_nodes:
                    return False
        return True

    @property
    def slack(self) -> float:
        """How far a bound may stay below the cost and still prove it (see check_certificate)."""
        return 0.4 if self._unit and self._scale < 2e14 else 0.9 * _TOLERANCE * self._scale

    def _target(self) -> float:
        """An assignment matters only if it is cheaper than the best by more than this."""
        return self._undecided(self._scale)

    def _undecided(self, scale: float) -> float:
        """`_target`, were the absolute parts of the best to add up to this."""
        if self._unit:
            # Rounding of the bound: a few ulp per vertex, of either sign.
            doubt = max(1e-14 * (1 + self.root.vertices ** 0.5 / 10) * scale, self._doubt)
            if doubt < self._unit / 4:
                return float(self._unit - 2 * doubt)
            if scale <= _MOST_WHOLE:  # an optimum is called one to the last unit
                return self._unit / 2
        return _TOLERANCE * scale

    def _margin(self) -> float:
        """`_target` for a search that goes on with it once it has met something better: right for all that is no less
        than half of the best; of less, see `_was_rough`."""
        # While no cost is known, neither is how much rounds off of it: a whole unit would rule out what is cheaper by
        # one.
        return min(self._target(), self._undecided(self._scale / 2)) if self.cost < np.inf else 0.0

    def _was_rough(self, margin: float) -> bool:
        """Whether a search with this margin may have left out what matters: it met something of far less, as where the
        best before held a large cost that stands for what is forbidden."""
        return max(self._target(), self._unit) < margin

    def _enough(self, bound: float) -> bool:
        bound = min(bound, self._left_out)  # as `run` tells it in the end
        return self._gap > 0 and self.best is not None and relative_gap(self.cost, bound) <= self._gap

    def _consider(self, p: Packed, choice: np.ndarray, cost: float) -> None:
        """Takes an assignment of a reduced network if it is the best so far."""
        if not cost < self.cost:
            return
        if self.best is not None:  # what was left out while that was the best may cost as little as this
            self._left_out = min(self._left_out, self.cost - self._target())
        self.cost = cost
        self.best = p.original[p.first[:-1] + choice].astype(np.int64)
        chosen = self._places(self._offset[:-1] + self.best) - self.root.first[:-1]
        self._scale = self.root.cost(chosen)[1]

    def _places(self, configurations: np.ndarray) -> np.ndarray:
        """Where configurations of the input stand among the root's."""
        return configurations if self._place is None else self._place[configurations]

    def _report(self, bound: float) -> None:
        if self._progress is not None:
            self._progress(time.perf_counter() - self._start, self.cost, min(bound, self._left_out))

    def _explore(self, bound: float, active: np.ndarray | None, others: float) -> _Outcome:
        """Solves the active part of the root (None: all of it), or splits it in two.

        Args:
          bound: of that part.
          active: bool [configurations of the root].
          others: the bound of all other parts.
        """
        top, part, room = active is None, None, self._room * (1 - _WAITING)
        try:
            if top and (at_once := plan_at_once(self.root)) is not None:
                self._eliminate(self.root, at_once)
                return _NOTHING_LEFT
            part = self._part(bound, active)
            passes = 1  # the first pass finds the scale of costs
            while True:
                known = self.cost
                self._pass(part, passes)
                self._look(part, room)
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
                plan = part.elimination(domains)
                part.notice_progress(self.cost)
                affordable = part.affordable(plan, domains, room, self._budget.seconds)
                if part.worth_reducing(domains, affordable):
                    affordable &= part.reduce(self._budget, room)
                if affordable:
                    self._eliminate(part.p, plan)
                    return _NOTHING_LEFT
                part.count_finer(room)
                if not self._thorough and passes > 1 and self.cost == known:  # a look, and nothing more is found
                    return _Outcome(part.bound, stopped=True)
                if self._descend(part, others):
                    return _NOTHING_LEFT
                if part.stalled >= 2:
                    if part.steps is EXACTLY:
                        return _Outcome(part.bound, halves=self._halves(part, plan))
                    # Exact passes look at all configurations, and potentials of what was pruned were left behind.
                    step, work = part.steps.step, part.work  # no more of the steps: `reduce` lets go of them
                    if int(domains.sum()) == len(part.p.unary) or not part.reduce(self._budget, room) or (
                            part.work > _HARDLY_LESS * work and part.steps.step > step / 2):
                        part.steps = EXACTLY  # with as many configurations in the same steps passes would stand still
                    part.stalled = 0
                if self._thorough and part.worth_settling(self.cost, domains):
                    self._settle(part, room)
                passes = max(1, min(4, int(5e7 / max(part.work, 1))))
        except InfeasibleError:
            if top and self.best is None and self.cost == np.inf:
                raise
            return _NOTHING_LEFT
        except TimeoutError:
            if part is None and self.best is None:
                self._take_anything()
            return _Outcome(part.bound if part else bound, stopped=True)
        except MemoryError:
            self.statistics["stopped"] = "memory"
            return _Outcome(bound, stopped=True)

    def _take_anything(self) -> None:
        """Takes what every vertex costs least with by itself, improved on once: where the time is over before anything
        else is known."""
        p = self.root
        choice = least_of_each(p.first, p.unary)
        self._consider(p, choice, improve(p, choice, 1, np.ones(len(p.unary), np.bool_)))

    def _part(self, bound: float, active: np.ndarray | None) -> Part:
        if active is None:
            part = Part.of(self.root, self._root_messages, bound, self._room * (1 - _WAITING), 0)
            self._root_messages = part.state.potentials  # as they will be when it is left
            if self.root is self._packed and 0 < part.steps.bytes < _KEPT * self._room:
                self.steps = part.steps
                self._room -= part.steps.bytes
            return part
        room = self._room * (1 - _WAITING)
        p, messages, *_ = reduce(self.root, active, self._root_messages, budget=Budget(self._budget.deadline, room))
        return Part.of(p, messages, bound, room, p.bytes)

    def _pass(self, part: Part, passes: int) -> None:
        """Passes messages in a part, and takes the assignments met on the way."""
        p, margin = part.p, self._margin()
        part.state = part.state._replace(best=np.zeros(p.vertices, np.int64))
        rounding = part.rounding(self.cost - part.bound)
        look = part.large and self._thorough  # what that finds is better than what sweeps over a large network do
        found = message_passes(p, part.steps, part.state, self.cost, -margin, margin, passes,
                               self._budget.seconds, rounding, 0 if look else _POLISHING)
        self.statistics["passes"] += found.passes
        self._consider(p, part.state.best, found.cost)
        if self._was_rough(margin):  # the bound, too, may be that of too few configurations
            part.state.forget_pruned()
            part.reached = -np.inf
            return
        self._prune(part, rounding)
        # Of a sweep that is cut off the bound is told, and the potentials are given up.
        part.reached = p.constant + float(part.state.minimum.sum())
        part.read = found.pulled / max(found.passes, 1)
        part.bound = max(part.bound, float(found.bound))

    def _prune(self, part: Part, rounding: float) -> None:
        if part.large:
            prune(part.p, part.state, self.cost - self._target(), rounding != 0.0)

    def _look(self, part: Part, room: float) -> None:
        """Looks for a better assignment of a large part, unless what is left of it can be eliminated."""
        domains = part.domains()
        if not (part.large and self._thorough and part.look_now()) or part.affordable(
                part.elimination(domains), domains, room, self._budget.seconds):
            return
        before = self.cost
        part.looked(self._look_for_better(part.p, part.state, part.bound, room - part.taken))
        if self.cost < before:
            self._prune(part, part.rounding(before - part.bound))

    def _settle(self, part: Part, room: float) -> None:
        """Where passes over a large part bring little: passes among the configurations of least reduced cost, now or
        earlier, as long as these bring much; the part goes on from there. A pass over so few takes next to nothing, and
        once the bound has come up to the cost among them, only others that stand in its way are still to be found."""
        p, state, before, bound = part.p, part.state, self.cost, -np.inf
        part.few = promising(p, state, SETTLED) | part.few
        few, free = part.few.copy(), room - part.taken - _LIFTED * p.potentials
        try:
            reduction = reduce(p, few, state.potentials, budget=Budget(self._budget.deadline, free))
        except (InfeasibleError, MemoryError):  # see _look_for_better
            return
        settling = PassState.start(reduction.network, reduction.messages)
        for _ in range(0, _SETTLING, _BETWEEN_LOOKS):
            found = message_passes(reduction.network, EXACTLY, settling, self.cost, 0.0, self._target(), _BETWEEN_LOOKS,
                                   self._budget.seconds, 0.0, 2)
            self._consider(reduction.network, settling.best, found.cost)
            if found.bound - bound < LITTLE * (self.cost - found.bound) or self._budget.over:
                break
            bound = found.bound
        state.go_on_from(p, lift(p, few, state.potentials, reduction._replace(messages=settling.potentials)))
        part.settled = True
        if self.cost < before:
            self._prune(part, part.rounding(before - part.bound))

    def _keep_potentials(self, part: Part) -> None:
        """Keeps the potentials of the whole network if they prove the cost by themselves."""
        if part.p is self.root and part.steps is EXACTLY and self.cost - part.reached <= self.slack / 2:
            self.potentials = lift(self._packed, self._active, Potentials.none(self._packed),
                                   self._reduction._replace(messages=part.state.potentials))

    def _look_for_better(self, p: Packed, state: PassState, bound: float, room: float) -> bool:
        """Searches among the configurations of least reduced cost: a good assignment early saves passes over all of
        them. Whether others improve on what is found there, so that it pays to look again soon. No assignment costs
        less than `bound`; it may take `room` bytes."""
        few, budget = promising(p, state, _PROMISING), Budget(self._budget.deadline, room)
        try:
            part, messages, *_ = reduce(p, few, state.potentials, budget=budget)
        except (InfeasibleError, MemoryError):  # of these few no assignment is finite: that says nothing of the others
            return False
        own = part.original
        part = part._replace(original=(np.arange(len(own)) - np.repeat(part.first[:-1], part.domains)).astype(np.int32))
        try:
            search = Minimiser(part, budget=budget.less(part.bytes), cutoff=self.cost, unit=self._unit, thorough=False,
                               messages=messages, doubt=self._doubt)
            search.run(most_nodes=1)
        except (InfeasibleError, UsageError):  # or even of these few too much is forbidden for the memory
            return False
        if search.best is None:
            return False
        choice = np.flatnonzero(few)[part.first[:-1] + search.best] - p.first[:-1]
        cost = improve(p, choice, _SWEEPS, cheap(p, state, _SHARE * (search.cost - bound)))
        self._consider(p, choice, cost)
        return cost < search.cost - self._target()

    def _eliminate(self, p: Packed, plan: Plan) -> None:
        self.statistics["eliminations"] += 1
        self.statistics["largest_table"] = max(self.statistics["largest_table"], int(plan.largest))
        cost, choice = eliminate(p, plan, self._budget.seconds)
        self._consider(p, choice, cost + p.constant)

    def _descend(self, part: Part, others: float) -> bool:
        """Searches a part depth first once passes bring little, as far as that is quick. Whether it got to the end.
        `others` is the bound of all other parts."""
        if part.stalled <= part.descended or part.steps is not EXACTLY:
            return False
        part.descended = part.stalled
        room = self._room * (1 - _WAITING)
        if part.domains().sum() < len(part.p.unary) and not part.reduce(self._budget, room):
            return False
        entries = 2 * entries_left(part.p, part.p.domains)
        # Room for one way down at least, once, for the sake of the assignment that it finds.
        most = self._most_read if self.statistics["descents"] else max(
            self._most_read, 2.0 * entries * np.count_nonzero(part.p.domains > 1))
        if (entries > min(most / 16, _READS_PER_LOOK * self._budget.seconds)
                or descent_bytes(part.p) > room - part.taken):
            self._most_read *= 4
            return False
        self.statistics["descents"] += 1
        everything = np.ones(len(part.p.unary), np.bool_)

        def told(cost: float, choice: np.ndarray) -> float:
            if len(choice):
                self._consider(part.p, choice, improve(part.p, choice, _SWEEPS, everything))
            self._report(min(part.bound, others))
            return min(cost, self.cost)
        while True:
            margin = self._margin()
            found = descend(part.p, self.cost, margin, most, self._budget.seconds, told)
            if not found.complete or not self._was_rough(margin):
                break
        if not found.complete:
            self._most_read *= 4
        return found.complete

    def _halves(self, part: Part, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Splits the domain of one vertex: the one that makes the largest tables. The first half holds the more
        promising configurations. Both as active configurations of the root."""
        p, active, costs = part.p, part.state.flags(part.p), part.state.costs(part.p)
        v = plan.widest(part.domains())
        owner = np.repeat(np.arange(p.vertices), p.domains)
        place = self._places(self._offset[owner] + p.original)
        first = np.zeros(len(self.root.unary), bool)
        first[place[active]] = True
        second = first.copy()
        own = np.flatnonzero(active[p.first[v]:p.first[v + 1]]) + p.first[v]
        own = own[np.argsort(costs[own], kind="stable")]
        half = max(1, len(own) // 2)
        first[place[own[half:]]] = False
        second[place[own[:half]]] = False
        return first, second
