"""The compiled depth-first search against brute force, and its limits."""

import itertools

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import branch_and_bound, check_certificate, depth_first, part, solve
from pase_mtf.search.depth_first import descend, descent_bytes
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import pack, reduce


def reduced(network):
    packed = pack(network.normalized())
    return reduce(packed, np.ones(len(packed.unary), bool)).network


def cost_of(network, p, choice):
    return network.cost(p.original[p.first[:-1] + choice].tolist())


@pytest.mark.parametrize("seeds", [range(0, 900, 4), pytest.param(
    [seed for seed in range(2500) if seed % 4 or seed >= 900], marks=pytest.mark.slow)])
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


def test_in_slices(monkeypatch):
    """Whoever waits is told on the way; an assignment that is cheaper from elsewhere is made use of."""
    network = noise(1, 12, 6)
    p = reduced(network)
    whole = descend(p, np.inf, 1e-9, np.inf, np.inf)
    monkeypatch.setattr(depth_first, "_SLICE", 2e4)
    costs = []

    def told(cost, choice):
        assert not len(choice) or cost == pytest.approx(cost_of(network, p, choice), rel=1e-12)
        costs.append(cost)
        return cost
    slices = descend(p, np.inf, 1e-9, np.inf, np.inf, told)
    assert (slices.complete, slices.cost, slices.nodes) == (True, whole.cost, whole.nodes)
    np.testing.assert_array_equal(slices.choice, whole.choice)
    assert len(costs) > 5
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 1

    better = descend(p, np.inf, 1e-9, np.inf, np.inf, lambda cost, choice: min(cost, whole.cost + 1e-6))
    assert better.complete
    assert better.nodes < whole.nodes
    assert better.cost == pytest.approx(whole.cost, abs=1e-5)


def test_the_search_is_told_and_can_be_interrupted_on_the_way_down(monkeypatch):
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    monkeypatch.setattr(depth_first, "_SLICE", 1e4)
    calls = []

    def progress(seconds, cost, bound):
        calls.append((cost, bound))
        if len(calls) == 40:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        solve(noise(0, 14, 8), progress=progress)
    assert all(bound <= cost for cost, bound in calls)


@pytest.mark.parametrize("seed", range(4))
def test_as_part_of_the_search(seed, monkeypatch):
    """It proves what branching proves, and the certificate holds."""
    network = noise(seed, 9, 6)
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    quick = solve(network)
    assert quick.optimal
    assert quick.statistics["descents"] > 0
    check_certificate(network, quick)
    monkeypatch.setattr(branch_and_bound.Minimiser, "_descend", lambda self, part, others: False)
    slow = solve(network, certificate=False)
    assert slow.statistics["descents"] == 0
    assert quick.cost == pytest.approx(slow.cost, rel=1e-12)
    assert quick.statistics["nodes"] < slow.statistics["nodes"]


def queens(seed, size, attack=np.inf, scale=1.0):
    """A queen in every row, none of which attacks another: few assignments are finite, and passes hardly meet one."""
    rng, every = np.random.default_rng(seed), np.arange(size)
    apart = abs(every[:, None] - every)
    return CostNetwork([scale * rng.integers(0, 5, size) for _ in range(size)], [
        NetworkEdge(i, j, np.where((apart == 0) | (apart == j - i), attack, 0.0), every, every)
        for i, j in itertools.combinations(range(size), 2)])


def test_whole_numbers_before_any_cost_is_known(monkeypatch):
    """What is cheaper by one than the first that is met is cheaper, though nobody knew a cost when the search began."""
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    placed = [rows for rows in itertools.permutations(range(7)) if all(
        abs(rows[i] - rows[j]) != j - i for i, j in itertools.combinations(range(7), 2))]
    begun = []

    def noted(p, cost, margin, *others):
        begun.append((cost, margin))
        return descend(p, cost, margin, *others)
    monkeypatch.setattr(branch_and_bound, "descend", noted)
    for seed in range(60):
        network = queens(seed, 7)
        solution = solve(network, certificate=False)
        assert solution.optimal
        assert solution.cost == min(map(network.cost, placed)), seed
    margins = [margin for cost, margin in begun if cost == np.inf]
    assert margins  # there were some of which nothing was known
    assert max(margins) < 1.0


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_large_costs_that_stand_for_what_is_forbidden(scale, monkeypatch):
    """What was known first holds 1e14, of which 1e-12 is more than all that others differ by: they are told apart."""
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    placed = [rows for rows in itertools.permutations(range(7)) if all(
        abs(rows[i] - rows[j]) != j - i for i, j in itertools.combinations(range(7), 2))]
    for seed in range(60):
        network = queens(seed, 7, 1e14, scale)
        solution = solve(network, certificate=False)
        assert solution.optimal
        assert solution.cost == pytest.approx(min(map(network.cost, placed)), rel=1e-11), seed
