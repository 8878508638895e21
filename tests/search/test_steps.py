"""Passes in whole steps: every random network goes through them here, however small, against brute force."""

import itertools
import weakref

import numpy as np
import pytest
from hard_networks import dense
from random_networks import COSTS, SHAPES, random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import branch_and_bound, check_certificate, messages, part, solve
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Potentials, pack
from pase_mtf.search.pulls import EXACTLY


@pytest.fixture
def counted(monkeypatch):
    """However small the network, in steps first, and nothing else before that; counts the networks."""
    calls, part_of = [0], Minimiser._part

    def noted(self, *given):
        found = part_of(self, *given)
        calls[0] += found.steps is not EXACTLY
        return found
    monkeypatch.setattr(part, "_AT_ONCE", 0)
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part, "_READ", 0)
    monkeypatch.setattr(part, "_COUNTING", 0)
    monkeypatch.setattr(part, "_REREAD", 0)
    monkeypatch.setattr(part, "_CHEAP_WORK", 0)
    monkeypatch.setattr(Minimiser, "_part", noted)
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


def test_potentials_are_kept_only_where_they_prove_the_cost():
    """Passes that go on from others may come to less than those before them."""
    behind = 0
    for seed in range(400):
        try:
            search = Minimiser(pack(random_network(seed, 10_000).normalized()))
        except InfeasibleError:
            continue
        whole = search._part(-np.inf, None)
        search._pass(whole, 60)
        if not len(whole.p.matrix) or search.cost - whole.bound > search.slack / 2:
            continue
        whole.state.go_on_from(whole.p, Potentials(np.zeros(whole.p.potentials), whole.p.potentials_at))
        search._pass(whole, 1)
        now = whole.p.constant + whole.state.minimum.sum()
        behind += now < search.cost - search.slack
        search._keep_potentials(whole)
        assert search.potentials is None or now >= search.cost - search.slack, seed
    assert behind


@pytest.mark.usefixtures("counted")
def test_steps_become_finer_with_the_gap():
    """What steps round off adds up over all edges: matrices are counted anew as the gap becomes smaller, down to a
    sixteenth of the first steps; not where that takes longer than passes, unless these come to a standstill."""
    network = dense(0, 12, 30)
    whole = Minimiser(pack(network.normalized()))._part(-np.inf, None)
    assert whole.steps is not EXACTLY
    coarse, found = whole.steps.step, []
    most = coarse * 32767 / 4  # the gap of which all first steps are four times as much
    for gap, read, stalled in ((np.inf, 1, 0), (most / 2, 0, 0), (most / 2, 0, 1), (most / 4, 1, 0), (0.0, 1, 0)):
        whole.gap, whole.read, whole.stalled = gap, read, stalled
        whole.count_finer(1e9)
        found.append(coarse / whole.steps.step)
        assert whole.stalled == 0
    assert found == [1, 1, 2, 4, 16]


def test_potentials_of_a_sweep_that_was_cut_off_are_not_kept(monkeypatch):
    """Its bound is that of potentials which were given up with it."""
    search = Minimiser(pack(dense(0, 6, 5).normalized()))
    whole = search._part(-np.inf, None)
    search._pass(whole, 1)
    assert whole.p.constant + whole.state.minimum.sum() < search.cost - search.slack
    monkeypatch.setattr(branch_and_bound, "message_passes",
                        lambda *_: messages.PassResult(search.cost, search.cost, 0, 0))
    search._pass(whole, 1)
    search._keep_potentials(whole)
    assert search.potentials is None


@pytest.mark.usefixtures("counted")
def test_steps_are_let_go_of_where_passes_stand_still(monkeypatch):
    """What is left is copied, and counted anew, in the room that they took."""
    freed, reduce = [], part.Part.reduce

    def noted(self, budget, room):
        before = None if self.steps is EXACTLY else weakref.ref(self.steps.counts)
        found = reduce(self, budget, room)
        if before is not None:
            freed.append(before() is None)
        return found
    monkeypatch.setattr(branch_and_bound, "_KEPT", 0.0)
    monkeypatch.setattr(part.Part, "reduce", noted)
    monkeypatch.setattr(part.Part, "affordable", lambda self, *_: False)
    monkeypatch.setattr(part.Part, "worth_reducing", lambda self, *_: False)
    monkeypatch.setattr(part.Part, "notice_progress", lambda self, cost: setattr(self, "stalled", 2))
    network = dense(0, 12, 30)
    dear = [np.append(vector[:-1], 1e3) for vector in network.vectors]  # pruned in the first pass
    Minimiser(pack(CostNetwork(dear, network.edges).normalized())).run(most_nodes=1)
    assert freed
    assert all(freed)
