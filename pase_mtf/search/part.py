"""A part of a network that branch and bound explores: what is known of it, and what it takes to go on with less of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pase_mtf.search.budget import Budget
from pase_mtf.search.elimination_plan import Plan, plan_elimination
from pase_mtf.search.packed import Packed, Potentials, reduce
from pase_mtf.search.pass_state import PassState, active_domains
from pase_mtf.search.pulls import EXACTLY, Steps, grain, in_steps, step_of
from pase_mtf.search.repeats import share_all, vertex_kinds

__all__ = ["LITTLE", "SETTLED", "Part", "entries_left", "plan_at_once"]

# Sums of an elimination that is quicker than any pass.
_AT_ONCE = 1 << 16
# The work (see Plan) that elimination may be where it replaces further passes at once,
_CHEAP_WORK = 1 << 22
# where it replaces a search depth first, which begins once passes bring little;
_FAIR_WORK = 1 << 24
# and where it replaces branching, with the entries of all its tables.
_MOST_WORK = 1 << 34
_MOST_ENTRIES = 1 << 25
# What a slow core manages of it per second: of 600 random networks the slowest was at 3e9 on a Xeon with AVX-512, half
# of them above 9e9.
_WORK_PER_SECOND = 2e9
# Of a table's entry: its value, and where it is read under every configuration of its vertices.
_BYTES_PER_ENTRY = 16
LITTLE = 0.05
"""Passes that bring the bound nearer to the cost by less than this share of what is left bring little."""
# And by less of it than this, so little that few configurations are looked at first: so many per vertex, each time,
_SLOW = 0.5
SETTLED = 24
# where so many times as many are active: twenty passes over so few take less than one over these,
_MANY = 8
# and the gap is not what steps may round off: so many of them per edge.
_ROUNDED = 2
# Entries of all edges from where on a network is large: it pays to look for a good assignment before more passes.
_LARGE = 1 << 21
# And of one edge, on average, from where on reading them takes longer than visiting it.
_READ = 4096
# How often passes read an entry of a matrix on average from where on it pays to count them all in steps first.
_REREAD = 2
# How many entries passes read in the time that one is counted in.
_COUNTING = 32
# Matrix entries that a reduced network may have, whatever the network had.
_MOST_COPIED = 1 << 23


@dataclasses.dataclass(eq=False)
class Part:
    """A part of the root while it is explored.

    Attributes:
      p: its network, without what has been pruned and folded away.
      taken: bytes of it that whoever says how much room there is does not count already.
      state: of its message passing.
      bound: no assignment of it costs less.
      reached: what its potentials as they are now prove.
      steps: its matrices counted in steps for quick passes, or EXACTLY.
      work: matrix and class entries that a pass reads.
      folded: no edge of `p` ends in a vertex with one configuration.
      plan: how it would be eliminated ...
      planned: ... with so many configurations left.
      previous: the bound before the last passes.
      gap: between it and the best assignment known, when that was last looked at.
      read: matrix entries that one of the last passes read.
      stalled: how often in a row passes have hardly raised the bound.
      descended: how often it was when a search depth first was given up.
      waiting: passes until it is searched among promising configurations once more.
      patience: how many it waited for that the last time.
      slow: whether the last passes left most of the gap.
      settled: whether they went on from potentials that had settled among few configurations.
      few: bool [configurations], all those among which potentials have settled so far (one False: they have not).
    """

    p: Packed
    taken: int
    state: PassState
    bound: float
    steps: Steps
    work: int
    folded: bool
    plan: Plan | None = None
    planned: int = 0
    previous: float = -np.inf
    reached: float = -np.inf
    gap: float = np.inf
    read: float = 0.0
    stalled: int = 0
    descended: int = 0
    waiting: int = 0
    patience: int = 0
    slow: bool = False
    settled: bool = False
    few: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, bool))

    @classmethod
    def of(cls, p: Packed, messages: Potentials, bound: float, room: float, taken: int, steps: Steps | None = None
           ) -> Part:
        """The whole of a network, with so many bytes of room, of which it takes some itself; `steps` if it is counted
        already."""
        return cls(p, taken, PassState.start(p, messages), bound, steps or _counted(p, room - taken), _work(p),
                   not (p.domains == 1)[p.ends].any())

    def domains(self) -> np.ndarray:
        """Active configurations per vertex."""
        return active_domains(self.p.first, self.state.active, self.state.active_at)

    def elimination(self, domains: np.ndarray) -> Plan:
        """How to eliminate what is undecided; found anew where that is not what it was."""
        left = int(domains.sum())
        if self.plan is None or left != self.planned:
            self.planned = left
            undecided = (domains > 1)[self.p.ends].all(axis=0)
            self.plan = plan_elimination(domains, self.p.ends[:, undecided].T, most_operations=_MOST_WORK,
                                         most_entries=_MOST_ENTRIES)
        return self.plan

    def affordable(self, plan: Plan, domains: np.ndarray, room: float, seconds: float) -> bool:
        """Whether elimination is quicker than what passes, or else branching, would take, and fits so many bytes and
        seconds."""
        # Passes in steps look at what is active alone.
        most = max(_FAIR_WORK if self.stalled else _CHEAP_WORK, 2 * self.work if self.steps is EXACTLY else 0)
        return (plan.complete and plan.entries <= min(_MOST_ENTRIES, (room - self.taken) / _BYTES_PER_ENTRY)
                and plan.work <= min(most if self.stalled < 2 else _MOST_WORK, _WORK_PER_SECOND * seconds))

    @property
    def large(self) -> bool:
        """Whether it pays to look for a good assignment before more passes."""
        return self.work >= _LARGE or self.steps is not EXACTLY

    def notice_progress(self, cost: float) -> None:
        """Counts how often in a row the bound has hardly come nearer to this cost, but where potentials had settled
        among too few configurations: the next passes make them fit all."""
        gain, gap = self.bound - self.previous, cost - self.bound
        little = gain < LITTLE * gap
        unsettled = little and self.settled
        self.stalled = self.stalled + (not unsettled) if little else 0
        self.slow, self.settled = gain < _SLOW * gap and not unsettled, False
        self.previous, self.gap = self.bound, gap

    def count_finer(self, room: float) -> None:
        """Counts the matrices in finer steps where the gap has become so small that these tell more, and passes take
        longer than that, or come to a standstill."""
        if self.steps is EXACTLY or not (self.stalled or self.read > _COUNTING * len(self.p.values)):
            return
        step = step_of(self.p, self.gap)
        if 0.0 < step < self.steps.step:
            self.steps, self.stalled = EXACTLY, 0  # let go of what is large before the next is made
            self.steps = in_steps(self.p, step, room - self.taken)

    def worth_settling(self, cost: float, domains: np.ndarray) -> bool:
        """Whether potentials should settle among few configurations before the next pass over all those active."""
        rounded = _ROUNDED * self.steps.step * len(self.p.matrix) if self.steps is not EXACTLY else 0.0
        return (self.large and self.slow and cost - self.bound > rounded
                and int(domains.sum()) >= _MANY * SETTLED * self.p.vertices)

    def worth_reducing(self, domains: np.ndarray, affordable: bool) -> bool:
        """Whether to go on with the active configurations alone, where elimination comes next or not."""
        everything = int(domains.sum()) == len(self.p.unary)
        return (affordable and not (self.folded and everything)) or (
            not everything and _worth_reducing(self.p, domains, self.steps is not EXACTLY))

    def reduce(self, budget: Budget, room: float) -> bool:
        """Goes on with the active configurations alone if they and what there is now fit so many bytes."""
        counted, self.steps = self.steps is not EXACTLY, EXACTLY  # let go of what is large before the next is made
        active = self.state.flags(self.p)
        try:
            p, messages, *_ = reduce(self.p, active, self.state.potentials,
                                     budget=Budget(budget.deadline, room - self.taken))
        except MemoryError:
            if counted:
                self.steps = _counted(self.p, room - self.taken, self.gap)
            return False
        self.state = PassState.start(p, messages, self.state.costs(self.p)[active], self.state.bounds)
        self.few = self.few[active] if len(self.few) > 1 else self.few
        self.p, self.taken = p, p.bytes
        self.folded, self.work = True, _work(self.p)
        self.steps = _counted(self.p, room - self.taken, self.gap)
        return True

    def rounding(self, gap: float) -> float:
        """What to round potentials to (see pulls.grain) for such a gap; if to anything, looks which vertices repeat."""
        found = grain(self.p, self.steps, gap)
        if found and not len(self.state.kinds):
            self.state = self.state._replace(kinds=vertex_kinds(self.p))
            share_all(self.p, self.state)
        return found

    def look_now(self) -> bool:
        """Whether it is time to search among promising configurations: not after every pass, and where that brought
        nothing, less and less often."""
        self.waiting -= 1
        return self.waiting < 0

    def looked(self, again: bool) -> None:
        """Notes whether to look again after the next pass."""
        self.waiting = self.patience = 0 if again else 2 * self.patience + 1


def plan_at_once(p: Packed) -> Plan | None:
    """How to eliminate all vertices of a network, if that takes next to nothing."""
    if int((p.extents[0] * p.extents[1]).sum()) > _AT_ONCE:
        return None
    plan = plan_elimination(p.domains, p.ends.T, most_operations=_AT_ONCE, most_entries=min(_AT_ONCE, _MOST_ENTRIES))
    return plan if plan.complete else None


def _counted(p: Packed, room: float, gap: float = np.inf) -> Steps:
    """The matrices in steps where that pays and fits so many bytes, else EXACTLY; for `gap` see `step_of`."""
    least = max(_LARGE, _READ * len(p.matrix), _REREAD * len(p.values))
    if not len(p.matrix) or _work(p) < least or 2 * len(p.values) > room:
        return EXACTLY
    step = step_of(p, gap)
    return in_steps(p, step, room) if step > 0 else EXACTLY


def _work(p: Packed) -> int:
    """Matrix and class entries that a pass reads."""
    return 2 * int((p.extents[0] * p.extents[1]).sum()) + 4 * len(p.classes) + len(p.unary)


def entries_left(p: Packed, domains: np.ndarray) -> int:
    """Matrix entries of all edges, at most, when there are so many configurations per vertex."""
    size = np.minimum(p.extents, domains[p.ends])
    return int((size[0] * size[1]).sum())


def _worth_reducing(p: Packed, domains: np.ndarray, counted: bool = False) -> bool:
    """Whether the network without the inactive configurations takes so much less work that copying it pays: that costs
    some five passes over it, and what a pass in steps reads of an active row takes a thirtieth of a copied entry.
    Whether it takes no more memory than now, too (matrices that were shared may part: those that keep differently many
    classes)."""
    left, work = entries_left(p, domains), 0.3 * float((p.extents[0] * p.extents[1]).sum())
    if counted:
        work = float((np.minimum(p.extents[0], domains[p.ends[0]]) * p.extents[1]).sum()) / 30 + len(p.unary)
    if left >= work + 1000:
        return False
    if left <= _MOST_COPIED:
        return True
    matrices = np.unique(np.stack([p.matrix, *np.minimum(p.extents, domains[p.ends])]), axis=1)
    return int((matrices[1] * matrices[2]).sum()) <= max(2 * len(p.values), _MOST_COPIED)
