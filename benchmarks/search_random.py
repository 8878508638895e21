"""Random networks, hard and held out: drawn anew from a seed, never looked at while the search is written.

Families of shapes and of costs. `noise` has nothing that helps; `structured` costs are sums of a cost per pair of tags
that configurations carry, as those of layers are that shard the same tensors; `close` ones differ by little.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from pase_mtf.search.network import CostNetwork, NetworkEdge

__all__ = ["COSTS", "SHAPES", "pairs", "random_network"]


def _sparse(layers: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """A random tree, and one and a half times as many further pairs."""
    found = {(int(rng.integers(j)), j) for j in range(1, layers)}
    wanted = min(layers * (layers - 1) // 2, int(2.5 * layers))
    while len(found) < wanted:
        one, other = sorted(rng.integers(0, layers, 2).tolist())
        if one != other:
            found.add((one, other))
    return sorted(found)


def _grid(layers: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    width = max(2, round(layers ** 0.5))
    return [(i, i + 1) for i in range(layers - 1) if (i + 1) % width] + [(i, i + width) for i in range(layers - width)]


def _ladder(layers: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """A chain with skips over a few layers: what most models look like."""
    skips = {(j - int(rng.integers(2, 6)), j) for j in range(6, layers) if rng.random() < 0.6}
    return sorted({(j - 1, j) for j in range(1, layers)} | skips)


SHAPES: dict[str, Callable[[int, np.random.Generator], list[tuple[int, int]]]] = {
    "none": lambda layers, rng: [],
    "chain": lambda layers, rng: [(j - 1, j) for j in range(1, layers)],
    "tree": lambda layers, rng: [(int(rng.integers(j)), j) for j in range(1, layers)],
    "star": lambda layers, rng: [(0, j) for j in range(1, layers)],
    "ladder": _ladder, "grid": _grid, "sparse": _sparse,
    "dense": lambda layers, rng: list(itertools.combinations(range(layers), 2))}
"""By name: the pairs of layers that an edge joins."""

COSTS = ("noise", "integer", "structured", "close")
"""Kinds of costs."""


def pairs(shape: str, layers: int, seed: int) -> list[tuple[int, int]]:
    """The edges of a network of that shape."""
    return SHAPES[shape](layers, np.random.default_rng([seed, layers]))


def random_network(shape: str, costs: str, layers: int, configurations: int, seed: int, distinct: int | None = None
                   ) -> CostNetwork:
    """A network of a shape, with so many configurations per layer.

    Args:
      shape, costs: of `SHAPES` and `COSTS`.
      layers, configurations: how many.
      seed: of everything random.
      distinct: how many different matrices the edges share; every edge has its own if not given.
    """
    rng, every = np.random.default_rng([seed, layers, configurations]), np.arange(configurations)
    tags = rng.integers(0, max(2, configurations // 3), (layers, configurations))
    between = rng.gamma(0.5, 1.0, (int(tags.max()) + 1, int(tags.max()) + 1))

    def matrix(source: int, target: int) -> np.ndarray:
        shape_ = (configurations, configurations)
        if costs == "integer":
            return rng.integers(0, 1000, shape_).astype(float)
        if costs == "structured":
            return between[np.ix_(tags[source], tags[target])] * rng.uniform(0.5, 2)
        if costs == "close":
            return 1 + 1e-3 * rng.random(shape_)
        return rng.random(shape_)
    shared: dict[int, np.ndarray] = {}
    edges = []
    for number, (source, target) in enumerate(pairs(shape, layers, seed)):
        kind = number if distinct is None else number % distinct
        if distinct is None or kind not in shared:
            shared[kind] = matrix(source, target)
        edges.append(NetworkEdge(source, target, shared[kind] if distinct else shared.pop(kind), every, every))
    vectors = [rng.integers(0, 1000, configurations).astype(float) if costs == "integer" else rng.random(configurations)
               for _ in range(layers)]
    return CostNetwork(vectors, edges)
