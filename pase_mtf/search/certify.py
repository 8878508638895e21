"""Makes the certificate of a solution that is known to be optimal; certificate.py says what one is."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.budget import Budget
from pase_mtf.search.elimination import Plan, plan_elimination
from pase_mtf.search.left_over import left_over
from pase_mtf.search.messages import message_passes
from pase_mtf.search.packed import Packed, Potentials, lift, reduce
from pase_mtf.search.part import Part
from pase_mtf.search.pass_state import count_below
from pase_mtf.search.proof import Certificate, Potential
from pase_mtf.search.pulls import EXACTLY, Steps

__all__ = ["certify", "potentials_of"]

# The checker is a simple program: leave it little to do, half of what it is willing to.
_MOST_SUMS = 1 << 21
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
    """

    vertex: int
    part: tuple[int, ...]
    parts: tuple[np.ndarray, np.ndarray]
    messages: Potentials


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
    # Splits and proofs by number; the two parts of a split come after it, and are put together from the last on.
    found: list[Certificate | _Split] = []
    parts: list[tuple[int, int]] = []
    todo = [(np.ones(len(packed.unary), bool), Potentials.none(packed), -1)]
    room = budget.memory - packed.bytes - (steps.bytes if steps else 0)
    while todo:
        active, messages, above = todo.pop()
        try:
            step = _prove(packed, active, messages, cost, slack, Budget(budget.deadline, room), steps)
        except (TimeoutError, MemoryError):
            return None
        # What a proof holds, or a split that waits.
        room -= 16 * packed.potentials + (2 * len(packed.unary) if isinstance(step, _Split) else 0)
        if room < 0:
            return None
        if above >= 0:
            parts.append((above, len(found)))
        if isinstance(step, _Split):
            todo += [(half, step.messages, len(found)) for half in reversed(step.parts)]
        found.append(step)
    proofs: dict[int, Certificate] = {}
    below: dict[int, list[int]] = {}
    for above, number in parts:
        below.setdefault(above, []).append(number)
    for number in range(len(found) - 1, -1, -1):
        step = found[number]
        proofs[number] = step if isinstance(step, Certificate) else Certificate(
            (), step.vertex, step.part, tuple(proofs.pop(part) for part in below[number]))
    return proofs[0]


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


def _planned(domains: np.ndarray, ends: np.ndarray) -> tuple[Plan, float]:
    """The elimination of what a proof leaves open, and what the checker counts of it: a sum per table that it adds up;
    inf where that is too much."""
    pairs = ends[:, (domains > 1)[ends].all(axis=0)].T
    plan = plan_elimination(np.maximum(domains, 1), pairs, most_operations=_MOST_SUMS)
    if not plan.complete:
        return plan, math.inf
    rank = {v: step for step, v in enumerate(plan.order)}
    tables = [1] * len(domains)  # a vertex's own costs, and whatever nothing that it holds is eliminated before
    for scope in [*pairs.tolist(), *filter(None, plan.scopes)]:
        tables[min(scope, key=rank.__getitem__)] += 1
    sums = sum(tables[v] * math.prod(int(domains[u]) for u in (v, *scope))
               for v, scope in zip(plan.order, plan.scopes, strict=True) if domains[v] > 1)
    return plan, sums if sums <= _MOST_SUMS else math.inf


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
        plan, sums = _planned(domains, p.ends)
        alone = cost - bound <= slack / 2
        if not alone and _MOST_SUMS / _DOUBT < sums < math.inf:
            domains = left_over(p, state.potentials, cost - slack, _ROUNDS, budget)
            plan, sums = _planned(domains, p.ends)
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
    v = plan.widest(domains)
    rank = np.argsort(state.costs(p)[p.first[v]:p.first[v + 1]], kind="stable")
    chosen = p.original[p.first[v] + rank[:max(1, min(int(domains[v]), len(rank)) // 2)]]
    inside = np.zeros(int(packed.first[v + 1] - packed.first[v]), bool)
    inside[chosen] = True
    halves = active.copy(), active.copy()
    for half, mask in zip(halves, (inside, ~inside), strict=True):
        half[packed.first[v]:packed.first[v + 1]] &= mask
    return _Split(v, tuple(chosen.tolist()), halves, messages)
