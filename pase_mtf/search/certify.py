"""Makes the certificate of a solution that is known to be optimal; certificate.py says what one is."""

from __future__ import annotations

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.certificate import Certificate, Potential
from pase_mtf.search.elimination import plan_elimination
from pase_mtf.search.messages import EXACTLY, message_passes
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Packed, lift, pack, reduce

__all__ = ["certify", "potentials_of"]

# The checker is a simple program: leave it little to do.
_MOST_OPERATIONS = 1 << 20
_MOST_PASSES = 60


def certify(network: CostNetwork, cost: float, slack: float) -> Certificate:
    """Proves that no assignment is cheaper than cost - slack, with all the passes and cuts that takes.

    Args:
      network: normalized.
      cost: of an optimal assignment.
      slack: how far the bound may stay below it.
    """
    packed = pack(network)
    alive = np.ones(len(packed.unary), bool)
    return _prove(network, packed, alive, np.zeros(packed.potentials), cost, slack)


def potentials_of(network: CostNetwork, packed: Packed, messages: np.ndarray) -> tuple[Potential, ...]:
    """The messages of a packed network, edge by edge."""
    result = []
    for e, edge in enumerate(network.edges):
        above, below = packed.potentials_at[:, e].tolist()
        height, width = edge.matrix.shape
        result.append(Potential(edge.source, edge.target, edge.rows, messages[above:above + height], edge.columns,
                                messages[below:below + width]))
    return tuple(result)


def _prove(network: CostNetwork, packed: Packed, alive: np.ndarray, messages: np.ndarray, cost: float, slack: float
           ) -> Certificate:
    try:
        reduction = reduce(packed, alive, messages)
    except InfeasibleError:  # nothing finite is left: the checker finds that by striking out
        return Certificate(potentials_of(network, packed, messages))
    p = reduction.network
    keep, surplus = np.ones(len(p.unary), bool), np.zeros(len(p.unary))
    nobody, level = np.zeros(p.vertices, np.int64), np.zeros(p.vertices)
    previous, passes, chunk = -np.inf, 0, 4
    while True:
        bound, _, _ = message_passes(p, EXACTLY, reduction.messages, keep, surplus, level, nobody, cost, -slack,
                                     slack / 2, chunk)
        passes += chunk
        # What a configuration's surplus was during the pass, not what could be struck out at any time of it: the
        # checker sees the potentials as they are in the end.
        open_left = surplus < cost - slack - bound
        domains = np.add.reduceat(open_left, p.first[:-1], dtype=np.int64)
        pairs = p.ends[:, (domains > 1)[p.ends].all(axis=0)].T.tolist()
        plan = plan_elimination(np.maximum(domains, 1), pairs)
        done = cost - bound <= slack / 2 or plan.operations <= _MOST_OPERATIONS
        stalled = bound - previous < 0.02 * (cost - bound)
        if done or stalled or passes >= _MOST_PASSES:
            break
        previous = bound
    messages = lift(packed, alive, messages, reduction)
    if done:
        return Certificate(potentials_of(network, packed, messages))
    weight = np.zeros(p.vertices)
    for vertex, scope in zip(plan.order, plan.scopes, strict=True):
        members = [*scope, vertex]
        weight[members] += float(np.prod(domains[members].astype(float)))
    weight[p.domains < 2] = -1
    v = int(np.argmax(weight))
    rank = np.argsort(surplus[p.first[v]:p.first[v + 1]], kind="stable")
    part = p.original[p.first[v] + rank[:max(1, min(int(domains[v]), len(rank)) // 2)]]
    inside = np.zeros(int(packed.first[v + 1] - packed.first[v]), bool)
    inside[part] = True
    proofs = []
    for mask in (inside, ~inside):
        half = alive.copy()
        half[packed.first[v]:packed.first[v + 1]] &= mask
        proofs.append(_prove(network, packed, half, messages, cost, slack))
    return Certificate((), v, tuple(part.tolist()), tuple(proofs))
