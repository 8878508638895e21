"""Passes in whole steps: every random network goes through them here, however small, against brute force."""

import itertools

import pytest
from random_networks import COSTS, SHAPES, random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import branch_and_bound, check_certificate, part, solve
from pase_mtf.search.branch_and_bound import Minimiser


@pytest.fixture
def counted(monkeypatch):
    """However small the network, in steps first, and nothing else before that; counts the networks."""
    calls, in_steps = [0], part.in_steps

    def noted(*given):
        calls[0] += 1
        return in_steps(*given)
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part, "_REREAD", 0)
    monkeypatch.setattr(part, "_CHEAP_WORK", 0)
    monkeypatch.setattr(part, "in_steps", noted)
    monkeypatch.setattr(Minimiser, "_descend", lambda self, part, others: False)
    return calls


@pytest.fixture
def settled(counted, monkeypatch):
    """Potentials settle among two configurations per layer before every other pass over all; counts that."""
    calls, settle, turns = [0], Minimiser._settle, itertools.cycle([True, False])

    def noted(self, *given):
        calls[0] += 1
        settle(self, *given)
    monkeypatch.setattr(part, "_AT_ONCE", 0)
    monkeypatch.setattr(part, "_FAIR_WORK", 0)
    monkeypatch.setattr(branch_and_bound, "SETTLED", 2)
    monkeypatch.setattr(part.Part, "worth_settling", lambda self, cost, domains: next(turns))
    monkeypatch.setattr(Minimiser, "_settle", noted)
    return calls


def test_settled_potentials_change_nothing(settled):
    for seed in range(7, 2500, 13):
        network = random_network(seed, 10_000)
        try:
            expected = solve(network, "brute_force").cost
        except InfeasibleError:
            continue
        solution = solve(network)
        assert solution.optimal
        assert abs(solution.cost - expected) <= 1e-9 * max(1.0, abs(expected)), seed
        check_certificate(network, solution)
    assert settled[0] > 50


@pytest.mark.parametrize("seeds", [range(0, 2500, 29), pytest.param(range(0, 3000, 2), marks=pytest.mark.slow)])
def test_against_brute_force(seeds, counted):
    solved = 0
    for seed in seeds:
        network = random_network(seed, 1000)
        try:
            expected = solve(network, "brute_force").cost
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve(network)
            continue
        solution = solve(network)
        parts = sum(abs(vector[k]) for vector, k in zip(network.vectors, solution.assignment, strict=True))
        parts += sum(abs(edge.matrix[edge.rows[solution.assignment[edge.source]],
                                     edge.columns[solution.assignment[edge.target]]]) for edge in network.edges)
        assert solution.optimal
        assert abs(solution.cost - expected) <= 2e-12 * parts, (seed, solution.cost, expected)
        if COSTS[seed // len(SHAPES) % len(COSTS)] in ("integer", "ties", "zero"):
            assert solution.cost == expected
        check_certificate(network, solution)
        solved += 1
    assert solved > 0.9 * len(seeds)
    assert counted[0] > 0.3 * len(seeds)
