"""The default search: a proven optimum, by branch and bound (branch_and_bound.py)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.budget import SEARCH_MEMORY, Budget
from pase_mtf.search.certificate import CertificateError, check_certificate
from pase_mtf.search.certify import certify, potentials_of
from pase_mtf.search.given_bytes import byte_counts
from pase_mtf.search.memory import minimise_within
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Potentials, pack
from pase_mtf.search.proof import Certificate
from pase_mtf.search.registry import Progress, Solution, register, relative_gap
from pase_mtf.search.rounding import as_far_as_sums_tell, rounding, tolerated

__all__ = ["exact"]

# A certificate is given up after so many times what the search took, or so many seconds if that is more.
_TIMES_THE_SEARCH, _LEAST_SECONDS = 30, 10.0


def _sizes(network: CostNetwork) -> dict[str, int]:
    return {"layers": len(network.vectors), "edges": len(network.arrays.edge_matrix),
            "configurations": len(network.arrays.unary)}


def _unsearched(network: CostNetwork, budget: Budget, start: float) -> Solution:
    """Every layer's own cheapest configuration, where the time was over before the network was in its normal form."""
    assignment = tuple(int(np.argmin(vector)) for vector in network.vectors)
    cost = network.cost(assignment)
    if cost == np.inf:
        raise InfeasibleError(f"no finite assignment found {budget.used_up}", proven=False)
    statistics = _sizes(network)
    return Solution(assignment, cost, -np.inf, np.inf, False, time.perf_counter() - start, statistics)


def _is_verified(network: CostNetwork, found: Solution) -> bool:
    """Whether a certificate proves the optimum, which the checker decides by sums that are rounded down."""
    try:
        check_certificate(network, found)
    except CertificateError:
        return False
    return True


@register("exact")
def exact(network: CostNetwork, *, time_limit: float | None = None, gap: float = 0.0,
          progress: Progress | None = None, certificate: bool = True,
          memory: Sequence[np.ndarray] | None = None, memory_limit: float | None = None,
          initial: Sequence[int] | None = None, search_memory: float = SEARCH_MEMORY) -> Solution:
    """The cheapest assignment, proven.

    Args:
      network: what to minimise.
      time_limit, gap: stop early, with an assignment and a proven bound.
      progress: called after every few passes.
      certificate: attach the proof; where the bound of the first passes is not proof enough, that takes about as long
        as the search itself on networks of models, and up to twenty times as long on random ones; after thirty times,
        and ten seconds, it is given up. Only an optimal solution has one, where time and memory are left for it, and
        none under a memory limit. Where costs of both signs cancel to less than sums of them may round off, nothing
        else proves an optimum, and it is checked at once.
      memory, memory_limit, initial: consider only assignments that need at most so many bytes per device, beginning
        with this one; see memory.minimise_within. Without a limit there is none to begin with.
      search_memory: bytes that the search itself may hold beside the network; branching goes on within them, and stops
        where not even one part of the network fits (`statistics["stopped"]` is then "memory").

    Returns:
      the solution; `optimal` unless stopped early. `statistics`: layers, edges, configurations, passes of message
      passing, nodes of the branch and bound, eliminations, largest_table (entries),
      configurations_left (when the root was last looked at).

    Raises:
      InfeasibleError: no assignment is finite or fits the memory limit, or none was found within the time limit.
      UsageError: only one of memory and memory_limit, a limit that is no number, memory that does not fit, or an
        assignment to begin with but no limit.
    """
    if memory is not None or memory_limit is not None:
        if memory is None or memory_limit is None:
            raise UsageError("memory and memory_limit belong together; give both, or none")
        return minimise_within(network, byte_counts(memory), memory_limit, initial=initial, time_limit=time_limit,
                               gap=gap, progress=progress, search_memory=search_memory)
    if initial is not None:
        raise UsageError("initial: only a search within a memory limit begins with an assignment; leave it out, or "
                         "give memory and memory_limit")
    start, budget, doubt = time.perf_counter(), Budget.of(time_limit, search_memory), rounding(network)
    try:
        packed = pack(network.normalized(budget=budget))
        search = Minimiser(packed, budget=budget.less(packed.bytes), gap=gap, progress=progress, doubt=doubt)
    except TimeoutError:
        return _unsearched(network, budget, start)
    search.run()
    statistics = {**_sizes(network), **search.statistics}
    if search.best is None:
        raise InfeasibleError("no finite assignment exists" if search.proven else
                              f"no finite assignment found {budget.used_up}", proven=search.proven)
    assignment = tuple(int(choice) for choice in search.best)
    cost = network.cost(assignment)
    bound = cost if search.proven else min(cost, search.bound)
    proof, now = None, time.perf_counter()
    if certificate and search.proven:
        most = min(budget.deadline, now + max(_LEAST_SECONDS, _TIMES_THE_SEARCH * (now - start)))
        # Where no cost is below 0, the least costs alone prove that nothing is cheaper than 0: other potentials round.
        potentials, slack = search.potentials, tolerated(network, assignment)
        if search.slack > 1.01 * slack:  # whole in the normal form only, not as given
            potentials = None
        if cost == 0.0 and doubt == 0.0:
            potentials = Potentials.none(packed)
        proof = (certify(packed, cost, slack, dataclasses.replace(budget, deadline=most), search.steps)
                 if potentials is None else Certificate(potentials_of(packed, potentials)))
    found = Solution(assignment, cost, bound, relative_gap(cost, bound), search.proven, time.perf_counter() - start,
                     statistics, proof)
    told = as_far_as_sums_tell(network, found, doubt)
    # The checker knows of no clock; it may take about as long as the search with the making of the certificate did.
    checked = told is found or (budget.seconds > found.seconds and _is_verified(network, found))
    return found if checked else told
