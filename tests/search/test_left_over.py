"""What potentials leave open: never less than what is in an assignment below the limit, and what the checker finds."""

import itertools

import numpy as np
import pytest
from random_networks import random_network

from benchmarks.search_random import random_network as benchmark_network
from pase_mtf.errors import InfeasibleError
from pase_mtf.search import certificate, certify, check_certificate, solve
from pase_mtf.search.budget import Budget
from pase_mtf.search.left_over import left_over
from pase_mtf.search.messages import message_passes
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import Potentials, pack, reduce
from pase_mtf.search.pass_state import PassState
from pase_mtf.search.pulls import EXACTLY


def _in_cheap_ones(p, limit):
    """How many configurations of every vertex are in an assignment that costs at most so much; all are looked at."""
    found = [set() for _ in p.domains]
    for choice in itertools.product(*map(range, p.domains)):
        if p.cost(np.array(choice))[0] <= limit:
            for seen, k in zip(found, choice, strict=True):
                seen.add(k)
    return np.array([len(seen) for seen in found])


def test_nothing_is_left_out_that_is_in_an_assignment_below_the_limit():
    some = 0
    for seed in range(120):
        network, rng = random_network(seed, 120), np.random.default_rng(seed)
        if np.prod(network.sizes) > 3000:
            continue
        try:
            packed = pack(network.normalized())
            p, messages, *_ = reduce(packed, np.ones(len(packed.unary), bool))
        except InfeasibleError:
            continue
        if not p.vertices:
            continue
        state = PassState.start(p, messages)
        found = message_passes(p, EXACTLY, state, np.inf, 0.0, -np.inf, seed % 4 + 1, np.inf, 0.0, 2)
        noise = rng.random(p.potentials) * (seed % 3) * 0.1 * found.cost
        potentials = Potentials(state.potentials.laid_out(p) + noise, p.potentials_at)
        limit = found.cost * rng.choice([1.0, 1.1, 1.5])
        left = left_over(p, potentials, limit, 3)
        assert (left >= _in_cheap_ones(p, limit)).all(), seed
        assert (left <= left_over(p, potentials, limit, 1)).all()
        some += (left < p.domains).any()
    assert some > 20


def test_it_ends_with_the_time():
    packed = pack(random_network(5, 120).normalized())
    assert left_over(packed, Potentials.none(packed), np.inf, 3, Budget.of(60.0)).tolist() == packed.domains.tolist()
    with pytest.raises(TimeoutError):
        left_over(packed, Potentials.none(packed), np.inf, 3, Budget(deadline=0.0))


@pytest.mark.parametrize("seed", [10, 3])
def test_what_is_left_is_what_the_checker_finds(seed, monkeypatch):
    """A prover that believed the reduced costs of its last pass made certificates that left too much open."""
    monkeypatch.setattr(certify, "_MOST_SUMS", 1 << 6)
    monkeypatch.setattr(certificate, "_MOST_SUMS", 1 << 7)
    for module in (certificate, certify):
        monkeypatch.setattr(module, "_MOST_LARGE_SUMS", 0)
    network = benchmark_network("grid", "noise", 9, 5, seed)
    check_certificate(network, solve(network))


def test_a_vertex_beyond_parallel_edges_counts_once():
    """Edges between the same two layers that are not summed, as their sum would be larger than both."""
    every, costs = np.arange(128), np.full(128, 6.0)
    costs[0] = 0.0
    one, other = 1e-3 * np.arange(64.0).reshape(8, 8), 1e-4 * np.arange(256.0).reshape(16, 16)
    one[0, 0] += 10.0
    other[0, 0] += 10.0
    p = pack(CostNetwork([costs, np.zeros(128)], [
        NetworkEdge(0, 1, one, every // 16, every // 16),
        NetworkEdge(0, 1, other, every % 16, every % 16)]).normalized())
    assert len(p.matrix) == 2
    assert (left_over(p, Potentials.none(p), 9.0, 3) >= _in_cheap_ones(p, 9.0)).all()
