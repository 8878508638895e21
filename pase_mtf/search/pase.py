"""The search of the PaSE paper: an order of the layers (GenerateSeq), and the dynamic program over it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from pase_mtf.arguments import as_float
from pase_mtf.errors import InfeasibleError, UsageError, shortened
from pase_mtf.host import available_bytes, memory_bytes
from pase_mtf.search.elimination import eliminate
from pase_mtf.search.elimination_plan import Plan, plan_elimination
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Packed, pack
from pase_mtf.search.registry import Solution, register
from pase_mtf.search.rounding import as_far_as_sums_tell, rounding

__all__ = ["generate_sequence", "search_pase", "solve_by_plan"]

# A value, and where it is read under every configuration of its layers.
_BYTES_PER_ENTRY = 16
# No array has more, whatever somebody allows.
_MOST_BYTES = 2.0 ** 62


def generate_sequence(layers: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The paper's GenerateSeq: again and again the layer with the smallest dependent set (ties: the lower index).

    A layer's dependent set starts as its neighbours; when a layer is taken, those in its set take over the others of
    it. Sizes of domains play no part.
    """
    dependent: list[set[int]] = [set() for _ in range(layers)]
    for u, v in edges:
        if u != v:
            dependent[u].add(v)
            dependent[v].add(u)
    left, sequence = set(range(layers)), []
    while left:
        v = min(left, key=lambda u: (len(dependent[u]), u))
        left.discard(v)
        sequence.append(v)
        for u in dependent[v]:
            dependent[u] = (dependent[u] | dependent[v]) - {u, v}
    return sequence


def solve_by_plan(network: CostNetwork, packed: Packed, plan: Plan, name: str, memory: float | None = None) -> Solution:
    """The dynamic program over the tables of a plan.

    Args:
      network, packed: what to minimise, and its normal form laid out.
      plan: of every vertex.
      name: of the search, for messages.
      memory: bytes the tables may take; what is free if not given.

    Raises:
      UsageError, InfeasibleError: as `search_pase`.
    """
    start = time.perf_counter()
    known = available_bytes() if memory is None else as_float(memory)
    free = memory_bytes() / 2 if known is None else min(known, _MOST_BYTES)  # NaN stays what it is
    if not free >= 0:
        raise UsageError(f"{name}: memory of {shortened(memory)}; give a number of bytes for the tables")
    needed = plan.entries * _BYTES_PER_ENTRY
    widest = max((len(scope) + 1 for scope in plan.scopes), default=0)
    if needed > free:
        raise UsageError(f"{name}: tables of {plan.entries:.3g} entries need {needed / 1e9:.3g} GB, "
                         f"{free / 1e9:.3g} GB are free (largest dependent set and layer: {widest} "
                         "layers); use method exact")
    cost, choice = eliminate(packed, plan)
    if cost == math.inf:
        raise InfeasibleError("no finite assignment exists")
    assignment = tuple(choice.tolist())
    total = network.cost(assignment)
    found = Solution(assignment, total, total, 0.0, True, time.perf_counter() - start, {
        "layers": packed.vertices, "edges": len(network.edges), "configurations": len(packed.unary),
        "largest_dependent_set": widest - 1, "largest_table": int(plan.largest), "table_entries": int(plan.entries),
        "table_bytes": int(needed), "operations": int(plan.operations), "order": plan.order,
        "dependent_sets": plan.scopes})
    return as_far_as_sums_tell(network, found, rounding(network))


@register("pase")
def search_pase(network: CostNetwork, *, memory: float | None = None) -> Solution:
    """PaSE's dynamic program in the order of GenerateSeq. It cannot stop early, nor tell how far it is.

    Args:
      network: what to minimise.
      memory: bytes the tables may take; what is free if not given.

    Returns:
      the optimum, as far as sums tell it where costs of both signs cancel. `statistics`: order, dependent_sets,
      largest_dependent_set, largest_table, table_entries, table_bytes, operations.

    Raises:
      UsageError: the tables would not fit; found out before the search starts.
      InfeasibleError: no assignment is finite.
    """
    start = time.perf_counter()
    packed = pack(network.normalized())
    plan = plan_elimination(packed.domains, packed.ends.T, generate_sequence(packed.vertices, packed.pairs))
    return dataclasses.replace(solve_by_plan(network, packed, plan, "pase", memory),
                               seconds=time.perf_counter() - start)
