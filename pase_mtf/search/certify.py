"""Makes the certificate of a solution that is known to be optimal; certificate.py says what one is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.budget import Budget
from pase_mtf.search.checked_search import EXHAUSTED, remainder_of, search
from pase_mtf.search.elimination_plan import Plan, plan_elimination
from pase_mtf.search.left_over import flags_left_over, left_over
from pase_mtf.search.messages import message_passes
from pase_mtf.search.packed import Packed, Potentials, lift, reduce
from pase_mtf.search.part import Part
from pase_mtf.search.pass_state import count_below
from pase_mtf.search.proof import Certificate, Potential
from pase_mtf.search.pulls import EXACTLY, Steps

__all__ = ["certify", "potentials_of"]

# The checker is a simple program: leave it little to do, half of what it is willing to, in a proof and in all of the
# larger ones together, and half of the entries that it is willing to hold in all tables together.
_MOST_SUMS = 1 << 21
_MOST_LARGE_SUMS = 1 << 30
_MOST_ENTRIES = 1 << 24
# And half of the entries of what is left open of a pair, and of all pairs.
_MOST_OF_A_PAIR, _MOST_LEFT = 1 << 21, 1 << 27
# Entries of the tables of what is searched.
_MOST_TABLES = 1 << 21
# How many sums take as long as a split does, here and for the checker, per entry of the network's matrices; and how
# many a slow processor forms in a second.
_SUMS_OF_A_SPLIT = 256
_SUMS_PER_SECOND = 4e8
# After how many splits of a part it is tried to search it instead.
_TRIED = frozenset(4 ** power for power in range(16))
_MOST_PASSES = 60
# The checker may have so many times as much to do as reduced costs of a pass say, which the potentials that the pass
# ends with need not show; where that is not little, it is counted, in so many rounds of leaving configurations out.
_DOUBT = 64
_ROUNDS = 3
_PASSES_AT_ONCE = 4


class _Split(NamedTuple):
    """A split of one vertex's domain.

    Attributes:
      vertex: which.
      part: its configurations in the first part.
      parts: bool [configurations], what is active in either part.
      messages: those that were reached before it.
      sums: what the checker would have to do without it; inf if too much.
    """

    vertex: int
    part: tuple[int, ...]
    parts: tuple[np.ndarray, np.ndarray]
    messages: Potentials
    sums: float


@dataclasses.dataclass
class _Allowance:
    """What may still be done without splits, in sums.

    Attributes:
      large: that the checker may be left.
      tries: that searches may be tried for; all splits together cost as much.
    """

    large: float
    tries: float = 0.0


class _Node:
    """A part of the network: proven by itself, or by the proofs of the two parts that it is split into.

    Attributes:
      active: bool [configurations], what is active in it.
      messages: those to begin with.
      above: the part that it is a part of, if any.
      proof: its proof by itself, if there is one.
      split: how it is split, if it is.
      below: its parts.
      splits: of it and of all below it, how many there have been.
    """

    def __init__(self, active: np.ndarray, messages: Potentials, above: _Node | None) -> None:
        self.active, self.messages, self.above = active, messages, above
        self.proof: Certificate | None = None
        self.split: _Split | None = None
        self.below: list[_Node] = []
        self.splits = 0

    def nodes_above(self) -> list[_Node]:
        """Those that it is a part of, the whole network first, and itself."""
        found: list[_Node] = []
        node: _Node | None = self
        while node is not None:
            found.append(node)
            node = node.above
        return found[::-1]

    def do_without(self, packed: Packed, limit: float, a_split: float, allowance: _Allowance, budget: Budget) -> bool:
        """Proves it by itself, instead of by parts, where its splits have cost as much: there may be as many again.

        Args:
          packed: the network.
          limit: what no assignment costs less than.
          a_split: how many sums take as long as a split does.
          allowance: of what is left in all; taken from.
          budget: time and memory.

        Returns:
          whether it is proven so.

        Raises:
          TimeoutError: the time is over.
        """
        assert self.split is not None
        paid = min(allowance.large, self.splits * a_split)
        sums, searched = self.split.sums, self.split.sums > paid
        if searched:
            # What a search takes is not known before: it is tried from time to time, for as long as splits have taken.
            if self.splits not in _TRIED or paid > allowance.tries:
                return False
            allowance.tries -= paid
            sums = _looked(packed, self.active, self.split.messages, limit, paid, budget)
        if sums == math.inf:
            return False
        allowance.large -= sums
        self.proof = Certificate(potentials_of(packed, self.split.messages), alone=False, searched=searched)
        self.split, self.below = None, []
        return True


def certify(packed: Packed, cost: float, slack: float, budget: Budget, steps: Steps | None = None
            ) -> Certificate | None:
    """Proves that no assignment is cheaper than cost - slack, with all the passes and splits that takes.

    Args:
      packed: the network.
      cost: of an optimal assignment.
      slack: how far the bound may stay below it.
      budget: time and memory that it may take; None comes back where they are not enough.
      steps: its matrices in steps, if they are counted already.
    """
    root = _Node(np.ones(len(packed.unary), bool), Potentials.none(packed), None)
    todo, allowance = [root], _Allowance(_MOST_LARGE_SUMS)
    a_split = _SUMS_OF_A_SPLIT * len(packed.values) + _MOST_SUMS
    room = budget.memory - packed.bytes - (steps.bytes if steps else 0)
    while todo:
        node = todo.pop()
        try:
            step = _prove(packed, node.active, node.messages, cost, slack, Budget(budget.deadline, room), steps)
            # What a proof holds, or a split that waits.
            room -= 16 * packed.potentials + (2 * len(packed.unary) if isinstance(step, _Split) else 0)
            if room < 0:
                return None
            if isinstance(step, Certificate):
                node.proof = step
                continue
            node.split, node.below = step, [_Node(half, step.messages, node) for half in step.parts]
            todo += node.below[::-1]
            allowance.tries += a_split
            over = node.nodes_above()
            for above in over:
                above.splits += 1
            for above in over:
                if above.do_without(packed, cost - slack, a_split, allowance, Budget(budget.deadline, room)):
                    todo = [other for other in todo if above not in other.nodes_above()]
                    break
        except (TimeoutError, MemoryError):
            return None
    return _put_together(root)


def _looked(packed: Packed, active: np.ndarray, messages: Potentials, limit: float, most: float, budget: Budget
            ) -> float:
    """How long the checker takes to search what potentials leave open of the active configurations, in sums.

    Args:
      packed: the network.
      active: bool [configurations].
      messages: the potentials.
      limit: what no assignment costs less than.
      most: how many sums it may take.
      budget: time and memory that may be taken here.

    Returns:
      the sums; inf if they are more than `most`, or more than the budget allows to find out.

    Raises:
      TimeoutError: the time is over.
    """
    active = flags_left_over(packed, messages, limit, _ROUNDS, active, budget)
    chosen = [begin + np.flatnonzero(active[begin:end]) for begin, end in itertools.pairwise(packed.first.tolist())]
    counts = np.array([len(own) for own in chosen])
    if not counts.all():
        return 0.0
    entries = counts[packed.ends].prod(axis=0).sum()  # each in a table, in both directions, and in what makes them
    if entries > _MOST_TABLES or 48 * entries + 9 * (len(counts) + 1) * counts.sum() > budget.memory:
        return math.inf
    theta, missing, domains = packed.unary.copy(), limit - packed.constant, packed.domains
    tables: list[tuple[tuple[int, ...], np.ndarray]] = []
    for e, (u, v) in enumerate(packed.ends.T.tolist()):
        given, classes = [], []
        for side, end in enumerate((u, v)):
            place, begin = messages.at[side, e], packed.classes_at[side, e]
            own = packed.classes[begin:begin + domains[end]]
            theta[packed.first[end]:packed.first[end + 1]] += messages.values[place + own]
            classes.append(own[chosen[end] - packed.first[end]])
            given.append(messages.values[place + classes[side]])
        width = packed.extents[1, e]
        table = (packed.values[packed.matrix[e] + classes[0].astype(np.int64)[:, None] * width + classes[1][None, :]]
                 - given[0][:, None] - given[1][None, :])
        missing -= table.min()
        tables.append(((u, v), table - table.min()))
    for v, own in enumerate(chosen):
        missing -= theta[own].min()
        tables.append(((v,), theta[own] - theta[own].min()))
    remainder = remainder_of([(tuple(v for v in own if counts[v] > 1), table.squeeze()) for own, table in tables
                              if (counts[list(own)] > 1).any()])
    if remainder is None or missing <= 0.0:
        return math.inf if missing > 0.0 else 0.0
    ended, looked = search(remainder, missing, int(min(most, _SUMS_PER_SECOND * budget.seconds)))
    return float(looked) if ended == EXHAUSTED else math.inf


def _put_together(root: _Node) -> Certificate:
    """The proof of the whole, of those of its parts; they may be parts of parts to any depth."""
    order, todo = [], [root]
    while todo:
        order.append(todo.pop())
        todo += order[-1].below
    proofs: dict[_Node, Certificate] = {}
    for node in reversed(order):
        parts = tuple(proofs.pop(part) for part in node.below)
        if node.split:
            proofs[node] = Certificate((), node.split.vertex, node.split.part, parts)
        elif node.proof:
            proofs[node] = node.proof
    return proofs[root]


def potentials_of(packed: Packed, messages: Potentials) -> tuple[Potential, ...]:
    """The messages of a packed network, edge by edge."""
    domains, classes, places, extents = (packed.domains.tolist(), packed.classes_at.tolist(),
                                         messages.at.tolist(), packed.extents.tolist())

    def end(side: int, e: int, v: int) -> tuple[np.ndarray, np.ndarray]:
        """The classes of the configurations of one end, and the potentials of its classes."""
        begin, place = classes[side][e], places[side][e]
        return packed.classes[begin:begin + domains[v]], messages.values[place:place + extents[side][e]]
    return tuple(Potential(source, target, *end(0, e, source), *end(1, e, target))
                 for e, (source, target) in enumerate(packed.pairs))


def _planned(domains: np.ndarray, ends: np.ndarray, most: int) -> tuple[Plan, float]:
    """The elimination of what a proof leaves open, and how many sums of tables the checker forms for it; inf where that
    is too much."""
    is_open = domains > 1
    pairs = ends[:, is_open[ends].all(axis=0)].T
    plan = plan_elimination(np.maximum(domains, 1), pairs, most_operations=most, most_entries=_MOST_ENTRIES)
    left = domains[ends].prod(axis=0)
    if not plan.complete or left.max(initial=0) > _MOST_OF_A_PAIR or left.sum() > _MOST_LEFT:
        return plan, math.inf
    sizes = domains.tolist()
    at: list[list[tuple[int, ...]]] = [[(v,)] for v in range(len(domains))]
    for source, target in ends.T.tolist():  # whose other end has one configuration left is of the own end alone
        scope = tuple(sorted(v for v in (source, target) if sizes[v] > 1))
        for v in scope:
            at[v].append(scope)
    sums, gone = 0, set[int]()
    for v, rest in zip(plan.order, plan.scopes, strict=True):
        if sizes[v] > 1:
            parts = sorted((math.prod(sizes[w] for w in scope), scope) for scope in at[v] if gone.isdisjoint(scope))
            union: set[int] = set()
            for _, scope in parts:
                union.update(scope)
                sums += math.prod(sizes[w] for w in union)
            gone.add(v)  # its table stands for all that hold it
            for w in rest:
                at[w].append(rest)
    return plan, sums if sums <= most else math.inf


def _prove(packed: Packed, active: np.ndarray, messages: Potentials, cost: float, slack: float, budget: Budget,
           steps: Steps | None) -> Certificate | _Split:
    """A proof for the active part of a network, or the split that it takes."""
    try:
        reduction = reduce(packed, active, messages, keep=True, budget=budget)
    except InfeasibleError:  # nothing finite is left: the checker finds that by pruning
        return Certificate(potentials_of(packed, messages), alone=False)
    p = reduction.network
    same = p is packed
    part = Part.of(p, reduction.messages, -np.inf, budget.memory, 0 if same else p.bytes, steps if same else None)
    bound, passes, at_once = -np.inf, 0, _PASSES_AT_ONCE
    while True:
        # Nothing is pruned in these passes: the checker sees all configurations, and the potentials of all.
        previous, chunk = bound, 1 if part.steps is not EXACTLY else at_once
        rounding, state = part.rounding(cost - bound), part.state
        bound = message_passes(p, part.steps, state, cost, np.inf, slack / 2, chunk, budget.seconds, rounding, 0).bound
        budget.check_time()
        passes += chunk
        # By the reduced costs of the last pass, not by what could be pruned at any time: the checker sees the
        # potentials as they are in the end.
        domains = count_below(p, state, cost - slack - bound)
        plan, sums = _planned(domains, p.ends, _MOST_SUMS)
        alone = cost - bound <= slack / 2
        if not alone and _MOST_SUMS / _DOUBT < sums < math.inf:
            domains = left_over(p, state.potentials, cost - slack, _ROUNDS, budget)
            plan, sums = _planned(domains, p.ends, _MOST_SUMS)
        done = alone or sums < math.inf
        stalled = bound - previous < 0.02 * (cost - bound)
        # One exact pass often spares the checker all rounds but the first, each of which costs as much; where layers
        # repeat, the checker has less to look at than such a pass.
        enough = done and (part.steps is EXACTLY or rounding > 0.0 or alone)
        if enough or passes >= _MOST_PASSES or (stalled and part.steps is EXACTLY):
            break
        if stalled or done:
            part.steps, at_once = EXACTLY, 1 if done else _PASSES_AT_ONCE
    messages = lift(packed, active, messages, reduction._replace(messages=state.potentials))
    if done:
        return Certificate(potentials_of(packed, messages), alone=alone)
    if _planned(domains, p.ends, _MOST_LARGE_SUMS)[1] < math.inf:
        domains = left_over(p, state.potentials, cost - slack, _ROUNDS, budget)
        plan, sums = _planned(domains, p.ends, _MOST_LARGE_SUMS)
    v = plan.widest(domains)
    rank = np.argsort(state.costs(p)[p.first[v]:p.first[v + 1]], kind="stable")
    chosen = p.original[p.first[v] + rank[:max(1, min(int(domains[v]), len(rank)) // 2)]]
    inside = np.zeros(int(packed.first[v + 1] - packed.first[v]), bool)
    inside[chosen] = True
    halves = active.copy(), active.copy()
    for half, mask in zip(halves, (inside, ~inside), strict=True):
        half[packed.first[v]:packed.first[v + 1]] &= mask
    return _Split(v, tuple(chosen.tolist()), halves, messages, sums)
