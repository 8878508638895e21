"""The compiled depth-first search against brute force, and its limits."""

import itertools

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import branch_and_bound, check_certificate, part, solve
from pase_mtf.search.depth_first import descend, descent_bytes
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import pack, reduce


def reduced(network):
    packed = pack(network.normalized())
    return reduce(packed, np.ones(len(packed.unary), bool)).network


def cost_of(network, p, choice):
    return network.cost(p.original[p.first[:-1] + choice].tolist())


@pytest.mark.parametrize("seeds", [range(0, 900, 4), pytest.param(range(2500), marks=pytest.mark.slow)])
def test_against_brute_force(seeds):
    """All shapes and kinds of costs."""
    found = impossible = 0
    for seed in seeds:
        network = random_network(seed, 2000)
        try:
            best = solve(network, "brute_force").cost
        except InfeasibleError:
            impossible += 1
            continue
        p = reduced(network)
        scale = 1e-12 * (1e-300 + sum(abs(vector[np.isfinite(vector)]).max() for vector in network.vectors) + sum(
            abs(edge.matrix[np.isfinite(edge.matrix)]).max() for edge in network.edges))
        descent = descend(p, np.inf, scale, np.inf, np.inf)
        assert descent.complete
        assert descent.cost == pytest.approx(cost_of(network, p, descent.choice), rel=1e-9, abs=scale)
        assert abs(descent.cost - best) <= 2 * scale, seed
        # Nothing cheaper than the optimum, and what is as cheap does not matter.
        again = descend(p, best, scale, np.inf, np.inf)
        assert again.complete
        assert not len(again.choice) or again.cost < best
        found += 1
    assert found > 0.9 * len(seeds)
    assert impossible < 0.1 * len(seeds)


def noise(seed, layers, configurations):
    rng, every = np.random.default_rng(seed), np.arange(configurations)
    return CostNetwork([rng.random(configurations) for _ in range(layers)],
                       [NetworkEdge(i, j, rng.random((configurations, configurations)), every, every)
                        for i, j in itertools.combinations(range(layers), 2)])


def test_limits():
    network = noise(0, 12, 6)
    p = reduced(network)
    whole = descend(p, np.inf, 1e-9, np.inf, np.inf)
    assert whole.complete
    assert whole.nodes > 50
    for most, seconds in ((1e4, np.inf), (np.inf, 0.0)):
        short = descend(p, np.inf, 1e-9, most, seconds)
        assert not short.complete
        assert short.nodes < whole.nodes
        assert short.cost >= whole.cost - 1e-9
    assert descent_bytes(p) > 8 * sum(edge.matrix.size for edge in network.edges)


@pytest.mark.parametrize("seed", range(4))
def test_as_part_of_the_search(seed, monkeypatch):
    """It proves what branching proves, and the certificate holds."""
    network = noise(seed, 9, 6)
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    quick = solve(network)
    assert quick.optimal
    assert quick.statistics["descents"] > 0
    check_certificate(network, quick)
    monkeypatch.setattr(branch_and_bound.Minimiser, "_descend", lambda self, part: False)
    slow = solve(network, certificate=False)
    assert slow.statistics["descents"] == 0
    assert quick.cost == pytest.approx(slow.cost, rel=1e-12)
    assert quick.statistics["nodes"] < slow.statistics["nodes"]
