"""The paper's baseline: its dynamic program in breadth-first order, every table over the whole frontier.

To import this module makes it known to `pase_mtf.search.solve` as "breadth_first".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from pase_mtf.search.elimination_plan import Plan
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import pack
from pase_mtf.search.pase import solve_by_plan
from pase_mtf.search.registry import Solution, register

__all__ = ["breadth_first_order", "search_breadth_first"]


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
    return Plan(tuple(order), tuple(scopes), operations, operations, largest, entries, True)


@register("breadth_first")
def search_breadth_first(network: CostNetwork, *, memory: float | None = None) -> Solution:
    """Arguments, result and errors as for `search_pase`."""
    packed = pack(network.normalized())
    edges = sorted(set(packed.pairs))
    plan = _frontier_plan(packed.domains.tolist(), edges, breadth_first_order(packed.vertices, edges))
    return solve_by_plan(network, packed, plan, "breadth_first", memory)
