"""Makes the certificate of a solution that is known to be optimal; certificate.py says what one is."""

from __future__ import annotations

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.certificate import Certificate, Potential
from pase_mtf.search.elimination import plan_elimination
from pase_mtf.search.messages import EXACTLY, PassState, message_passes
from pase_mtf.search.packed import Packed, lift, reduce

__all__ = ["certify", "potentials_of"]

# The checker is a simple program: leave it little to do.
_MOST_OPERATIONS = 1 << 20
_MOST_PASSES = 60


def certify(packed: Packed, cost: float, slack: float) -> Certificate:
    """Proves that no assignment is cheaper than cost - slack, with all the passes and cuts that takes.

    Args:
      packed: the network.
      cost: of an optimal assignment.
      slack: how far the bound may stay below it.
    """
    active = np.ones(len(packed.unary), bool)
    return _prove(packed, active, np.zeros(packed.potentials), cost, slack)


def potentials_of(packed: Packed, messages: np.ndarray) -> tuple[Potential, ...]:
    """The messages of a packed network, edge by edge."""
    domains, classes, places, extents = (packed.domains.tolist(), packed.classes_at.tolist(),
                                         packed.potentials_at.tolist(), packed.extents.tolist())

    def end(side: int, e: int, v: int) -> tuple[np.ndarray, np.ndarray]:
        """The classes of the configurations of one end, and the potentials of its classes."""
        begin, place = classes[side][e], places[side][e]
        return packed.classes[begin:begin + domains[v]], messages[place:place + extents[side][e]]
    return tuple(Potential(source, target, *end(0, e, source), *end(1, e, target))
                 for e, (source, target) in enumerate(packed.pairs))


def _prove(packed: Packed, active: np.ndarray, messages: np.ndarray, cost: float, slack: float) -> Certificate:
    try:
        reduction = reduce(packed, active, messages)
    except InfeasibleError:  # nothing finite is left: the checker finds that by pruning
        return Certificate(potentials_of(packed, messages))
    p = reduction.network
    state = PassState.start(p, reduction.messages)
    previous, passes, chunk = -np.inf, 0, 4
    while True:
        bound = message_passes(p, EXACTLY, state, cost, -slack, slack / 2, chunk).bound
        passes += chunk
        # By the reduced costs of the last pass, not by what could be pruned at any time: the checker sees the
        # potentials as they are in the end.
        undecided = state.reduced_costs < cost - slack - bound
        domains = np.add.reduceat(undecided, p.first[:-1], dtype=np.int64)
        pairs = p.ends[:, (domains > 1)[p.ends].all(axis=0)].T.tolist()
        plan = plan_elimination(np.maximum(domains, 1).tolist(), pairs)
        done = cost - bound <= slack / 2 or plan.operations <= _MOST_OPERATIONS
        stalled = bound - previous < 0.02 * (cost - bound)
        if done or stalled or passes >= _MOST_PASSES:
            break
        previous = bound
    messages = lift(packed, active, messages, reduction)
    if done:
        return Certificate(potentials_of(packed, messages))
    weight = np.zeros(p.vertices)
    for vertex, scope in zip(plan.order, plan.scopes, strict=True):
        members = [*scope, vertex]
        weight[members] += float(np.prod(domains[members].astype(float)))
    weight[p.domains < 2] = -1
    v = int(np.argmax(weight))
    rank = np.argsort(state.reduced_costs[p.first[v]:p.first[v + 1]], kind="stable")
    part = p.original[p.first[v] + rank[:max(1, min(int(domains[v]), len(rank)) // 2)]]
    inside = np.zeros(int(packed.first[v + 1] - packed.first[v]), bool)
    inside[part] = True
    proofs = []
    for mask in (inside, ~inside):
        half = active.copy()
        half[packed.first[v]:packed.first[v + 1]] &= mask
        proofs.append(_prove(packed, half, messages, cost, slack))
    return Certificate((), v, tuple(part.tolist()), tuple(proofs))
