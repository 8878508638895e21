"""The search of the PaSE paper: an order of the layers (GenerateSeq), and the dynamic program over it.

Also its baseline, the same program in breadth-first order.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Sequence

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.elimination import Plan, eliminate, factors_of, plan_elimination
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import pack
from pase_mtf.search.registry import Progress, Solution, register

__all__ = ["breadth_first_order", "generate_sequence", "search_breadth_first", "search_pase"]

# A float64 and the int32 index of the configuration that attains it.
_BYTES_PER_ENTRY = 12


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


def breadth_first_order(layers: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Layers by breadth-first traversal from the first layer of every connected part."""
    neighbours: list[list[int]] = [[] for _ in range(layers)]
    for u, v in edges:
        neighbours[u].append(v)
        neighbours[v].append(u)
    order, seen = [], [False] * layers
    for root in range(layers):
        queue = deque([] if seen[root] else [root])
        seen[root] = True
        while queue:
            v = queue.popleft()
            order.append(v)
            for u in sorted(set(neighbours[v])):
                if not seen[u]:
                    seen[u] = True
                    queue.append(u)
    return order


def _frontier_plan(domains: Sequence[int], edges: Sequence[tuple[int, int]], order: Sequence[int]) -> Plan:
    """The baseline's tables: at every step, over all layers still to come that have an edge to one already taken."""
    neighbours: list[set[int]] = [set() for _ in domains]
    for u, v in edges:
        neighbours[u].add(v)
        neighbours[v].add(u)
    frontier: set[int] = set()
    taken: set[int] = set()
    scopes, operations, largest, entries = [], 0.0, 0.0, 0.0
    for v in order:
        taken.add(v)
        frontier = (frontier | neighbours[v]) - taken
        table = math.prod(float(domains[u]) for u in frontier)
        scopes.append(tuple(sorted(frontier)))
        operations += table * domains[v]
        entries += table
        largest = max(largest, table)
    return Plan(tuple(order), tuple(scopes), operations, largest, entries, True)


def _free_memory() -> int:
    """Bytes that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _run(network: CostNetwork, name: str, memory: float | None) -> Solution:
    start = time.perf_counter()
    packed = pack(network.normalized())
    edges, domains = sorted(set(packed.pairs)), packed.domains.tolist()
    if name == "pase":
        plan = plan_elimination(domains, edges, generate_sequence(packed.vertices, edges))
    else:
        plan = _frontier_plan(domains, edges, breadth_first_order(packed.vertices, edges))
    free = _free_memory() if memory is None else memory
    needed = plan.entries * _BYTES_PER_ENTRY
    widest = max((len(scope) + 1 for scope in plan.scopes), default=0)
    if needed > free:
        raise UsageError(f"{name}: tables of {plan.entries:.3g} entries need {needed / 1e9:.3g} GB, "
                         f"{free / 1e9:.3g} GB are free (largest dependent set and layer: {widest} "
                         "layers); use method exact")
    cost, choice = eliminate(factors_of(packed), packed.domains, plan)
    if cost == math.inf:
        raise InfeasibleError("no finite assignment exists")
    assignment = tuple(choice.tolist())
    total = network.cost(assignment)
    return Solution(assignment, total, total, 0.0, True, time.perf_counter() - start, {
        "layers": packed.vertices, "edges": len(network.edges), "configurations": len(packed.unary),
        "largest_dependent_set": widest - 1, "largest_table": int(plan.largest), "table_entries": int(plan.entries),
        "table_bytes": int(needed), "operations": int(plan.operations), "order": plan.order,
        "dependent_sets": plan.scopes})


@register("pase")
def search_pase(network: CostNetwork, *, time_limit: float | None = None, gap: float = 0.0,
                progress: Progress | None = None, memory: float | None = None) -> Solution:
    """PaSE's dynamic program in the order of GenerateSeq.

    It cannot stop early: time_limit, gap and progress have no effect.

    Args:
      network: what to minimise.
      time_limit, gap, progress: not used.
      memory: bytes the tables may take; what is free if not given.

    Returns:
      the optimum. `statistics`: order, dependent_sets, largest_dependent_set, largest_table, table_entries,
      table_bytes, operations.

    Raises:
      UsageError: the tables would not fit; found out before the search starts.
      InfeasibleError: no assignment is finite.
    """
    return _run(network, "pase", memory)


@register("breadth_first")
def search_breadth_first(network: CostNetwork, *, time_limit: float | None = None, gap: float = 0.0,
                         progress: Progress | None = None, memory: float | None = None) -> Solution:
    """The paper's baseline: the dynamic program in breadth-first order, every table over the whole frontier.

    Arguments, result and errors as for `search_pase`.
    """
    return _run(network, "breadth_first", memory)
