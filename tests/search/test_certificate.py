"""Certificates prove what they claim, and damaged ones are turned away."""

import dataclasses
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from random_networks import frustrated, random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import CertificateError, certificate, check_certificate, checked_network, solve
from pase_mtf.search.checked_bounds import HUGE, alike, at_layers, reparametrised
from pase_mtf.search.checked_network import checked
from pase_mtf.search.checked_search import remainder_of, search
from pase_mtf.search.network import CostNetwork, NetworkEdge

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*.npz")), ids=lambda path: path.stem)
def test_instances(path):
    """Also where a certificate is wrong about whether its bound is proof enough: that takes longer, and no more."""
    network = CostNetwork.load(path)
    solution = solve(network)
    check_certificate(network, solution)
    check_certificate(network, dataclasses.replace(solution, certificate=dataclasses.replace(
        solution.certificate, alone=not solution.certificate.alone)))


@pytest.mark.parametrize("seeds", [range(0, 3000, 31), pytest.param(
    [seed for seed in range(0, 3000, 3) if seed % 31], marks=pytest.mark.slow)])
def test_random_networks(seeds):
    checked = 0
    for seed in seeds:
        network = random_network(seed, 3000)
        try:
            solution = solve(network)
        except InfeasibleError:
            continue
        check_certificate(network, solution)
        checked += 1
    assert checked > 0.9 * len(seeds)


def weaken(proof, rng):
    """Potentials with noise on them: valid as potentials, but their bound is lower."""
    return dataclasses.replace(proof, potentials=tuple(
        dataclasses.replace(entry, rows=entry.rows + rng.random(len(entry.rows)) * 1e13)
        for entry in proof.potentials))


@pytest.mark.parametrize("name", ["transformer_8", "densenet-direct_8"])
def test_damaged_potentials_prove_too_little(name, monkeypatch):
    monkeypatch.setattr(certificate, "_MOST_SUMS", 1000)  # so that the checker does not prove it by itself
    network = CostNetwork.load(INSTANCES / f"{name}.npz")
    solution = solve(network)
    check_certificate(network, solution)
    damaged = weaken(solution.certificate, np.random.default_rng(0))
    with pytest.raises(CertificateError, match="too little"):
        check_certificate(network, dataclasses.replace(solution, certificate=damaged))


def test_wrong_claims_are_rejected():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    solution = solve(network)
    other = (*solution.assignment[:-1], (solution.assignment[-1] + 1) % network.sizes[-1])
    worse = dataclasses.replace(solution, assignment=other, cost=network.cost(other))
    assert worse.cost > solution.cost
    for claim, match in ((worse, "cheaper|little"), (dataclasses.replace(solution, cost=solution.cost - 1), "costs"),
                         (dataclasses.replace(solution, certificate=None), "no certificate")):
        with pytest.raises(CertificateError, match=match):
            check_certificate(network, claim)


def test_foreign_and_broken_certificates_are_rejected():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    solution = solve(network)
    first = solution.certificate.potentials[0]
    for entry in (dataclasses.replace(first, target=13), dataclasses.replace(first, rows=first.rows[:1]),
                  dataclasses.replace(first, rows=first.rows * np.nan),
                  dataclasses.replace(first, row_classes=first.row_classes[1:])):
        broken = dataclasses.replace(solution.certificate, potentials=(entry, *solution.certificate.potentials[1:]))
        with pytest.raises(CertificateError):
            check_certificate(network, dataclasses.replace(solution, certificate=broken))


def test_none_without_proof():
    solution = solve(frustrated(0, layers=16), time_limit=1e-6)
    assert not solution.optimal
    assert solution.certificate is None


@pytest.mark.parametrize("seed", range(8))
def test_parallel_edges_are_summed_from_below(seed):
    """In whichever direction they run, larger than a block and than a band: of each pair of configurations never more
    than the exact sum, and next to nothing less."""
    rng = np.random.default_rng(seed)
    sizes, edges = rng.integers(2, 600, 2), []
    for _ in range(int(rng.integers(2, 5))):
        source = int(rng.integers(2))
        height, width = rng.integers(1, 300, 2)
        matrix = rng.normal(size=(height, width)) * 10.0 ** rng.integers(-8, 9, (height, width))
        matrix[rng.random((height, width)) < 0.01] = np.inf
        edges.append(NetworkEdge(source, 1 - source, matrix, rng.integers(0, height, sizes[source]),
                                 rng.integers(0, width, sizes[1 - source])))
    found = checked(CostNetwork([np.zeros(size) for size in sizes], edges))
    flat, table = found.flat, np.full(found.tables[0].shape, np.nan)
    for rows, band in found.tables[0].bands(np.ones(len(table), bool)):
        table[rows] = band
    some = [np.sort(rng.permutation(extent)[:20]) for extent in table.shape]
    assert np.array_equal(found.tables[0].block(*some), table[np.ix_(*some)])
    one, other = flat.ends[:, 0]
    groups = [flat.groups[begin:][:sizes[layer]]
              for begin, layer in zip(flat.groups_at[:, 0], (one, other), strict=True)]
    pairs = (rng.integers(0, sizes[layer], 500).tolist() for layer in (one, other))
    for i, j in zip(*pairs, strict=True):
        costs = [float(edge.matrix[edge.rows[i], edge.columns[j]] if edge.source == one
                       else edge.matrix[edge.rows[j], edge.columns[i]]) for edge in edges]
        entry = float(table[groups[0][i], groups[1][j]])
        if np.inf in costs:
            assert 0.9 * HUGE < entry < np.inf
            continue
        below = sum(map(Fraction, costs)) - Fraction(entry)
        assert 0 <= below <= 1e-14 * sum(map(abs, costs))


def _rounds(network, active):
    """What is left on every pair, by how much groups raise it, and what is open, for two rounds of leaving out."""
    found = checked(network)
    flat = found.flat
    given = np.concatenate([0.1 * (np.arange(count) * 7 % 5 - 2 * (e > 9))
                            for e, counts in enumerate(flat.counts.T) for count in counts])
    theta = reparametrised(flat, given)
    for least_only in (True, False):
        near, beyond, reduced = np.empty(len(given)), np.zeros(len(given)), np.empty(len(theta))
        at_layers(flat, theta, active, reduced, near)
        least = certificate._at_pairs(found, given, near, beyond, least_only)
        yield least
        yield beyond
    tables = certificate._tables(found, given, active, reduced, least, 1 << 22)
    yield tables.values
    for own, table in tables.listed():
        assert table.shape == tuple(np.add.reduceat(active, flat.first[:-1], dtype=int)[list(own)])


@pytest.mark.parametrize("seed", range(30))
def test_small_tables_and_repeated_pairs_are_read_like_any_other(seed, monkeypatch):
    """All of them together, compiled, as one table after another and every pair by itself."""
    rng, layers = np.random.default_rng(seed), 12
    matrices = [rng.integers(0, 9, (4, 5)).astype(float) for _ in range(2)]
    matrices[0][2, 3] = np.inf
    ends = [(v, v + 1) for v in range(layers - 1)] + [(0, 2), (1, 3), (3, 1)]
    edges = [NetworkEdge(u, v, matrices[rng.integers(2)], np.arange(6) % 4, np.arange(6) % 5) for u, v in ends]
    costs = rng.integers(0, 3, 6).astype(float)
    network = CostNetwork([costs if rng.random() < 0.7 else 2 * costs for _ in range(layers)], edges)
    active = np.tile(rng.random(6) < 0.7, layers)
    active[::6], active[-3:] = True, False
    together = list(_rounds(network, active))
    firsts = []
    monkeypatch.setattr(certificate, "alike", lambda flat, *given: firsts.append(alike(flat, *given)) or np.arange(
        flat.ends.shape[1]))
    by_themselves = list(_rounds(network, active))
    assert any((found < np.arange(len(found))).any() for found in firsts)  # there are some alike
    for most in ("_SMALL", "_MOST_SMALL"):
        monkeypatch.setattr(checked_network, most, 20)
        for one, other, another in zip(together, by_themselves, _rounds(network, active), strict=True):
            assert np.array_equal(one, other)
            assert np.array_equal(one, another)


def test_more_than_may_be_added_up_is_refused_before_there_is_room(monkeypatch):
    network = CostNetwork([np.zeros(9)] * 5, [NetworkEdge(v, v + 1, np.zeros((9, 9)), np.arange(9), np.arange(9))
                                              for v in range(4)])
    found, every = checked(network), np.ones(45, bool)
    given, least = np.zeros(found.flat.slots[-1, -1]), np.zeros(4)
    assert certificate._tables(found, given, every, np.zeros(45), least, 4 * 81).at[-1] == 45 + 4 * 81
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(CertificateError, match="too large to search"):
        certificate._tables(found, given, every, np.zeros(45), least, 4 * 81 - 5)


def test_what_there_is_no_room_for_is_no_proof(monkeypatch):
    def no_room(*given):
        raise MemoryError
    network = frustrated(0)
    solution = solve(network)
    check_certificate(network, solution)
    monkeypatch.setattr(certificate, "at_layers", no_room)
    with pytest.raises(CertificateError, match="too large to search"):
        check_certificate(network, solution)


def test_what_is_left_is_searched_once_it_is_small(monkeypatch):
    """Not after all that can be left out has been: rounds that leave out little read as much as the first."""
    rounds, exclude = [0], certificate.exclude

    def noted(*given):
        rounds[0] += 1
        return exclude(*given)
    monkeypatch.setattr(certificate, "exclude", noted)
    solved = [(network, solve(network)) for network in (frustrated(seed, 4, 50) for seed in range(8))]
    for network, solution in solved:
        check_certificate(network, solution)
    few, rounds[0] = rounds[0], 0
    monkeypatch.setattr(certificate, "_SMALLER", np.inf)
    for network, solution in solved:
        check_certificate(network, solution)
    assert few < rounds[0]


def test_an_optimum_of_nothing():
    """Its tolerance is 0: no sum on the way to it may be rounded, and none has to be."""
    ends = np.arange(2)
    edges = [NetworkEdge(0, 1, [[0.0, 0.3], [0.7, 0.1]], ends, ends), NetworkEdge(1, 0, [[0.0, 0.1]] * 2, ends, ends),
             NetworkEdge(1, 1, [[0.0, np.inf], [0.2, 0.1]], ends, ends)]
    for network in (CostNetwork([[0.0, 0.5]], []), CostNetwork([[0.0, 0.1], [0.0, 0.2]], edges)):
        solution = solve(network)
        assert (solution.cost, solution.optimal) == (0.0, True)
        assert check_certificate(network, solution) == 0.0
    cheaper = CostNetwork([[0.0, -1e-9]], [])
    claim = dataclasses.replace(solve(CostNetwork([[0.0, 0.5]], [])), assignment=(0,))
    with pytest.raises(CertificateError, match="cheaper"):
        check_certificate(cheaper, claim)


def test_a_layer_of_thousands_of_edges():
    """What is rounded down at each of them must not add up to what is tolerated."""
    both, one = [0, 1], [0, 0]
    nothing = [[0.0], [0.0]]
    network = CostNetwork([[0.0, 0.0], *([[0.0, 0.5]] * 4000)], [
        NetworkEdge(0, 1, [[1.0], [0.0]], both, one), NetworkEdge(0, 2, [[0.0], [3.0]], both, one),
        *(NetworkEdge(0, leaf, nothing, both, one) for leaf in range(3, 4001))])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (1.0, True)
    assert check_certificate(network, solution) == 1e-12


def test_layers_that_are_only_looked_at_count():
    remainder = remainder_of([((v,), np.array([0.0, 1.0])) for v in range(300)])
    _, looked = search(remainder, 0.5, 1 << 31)
    assert looked > 300 ** 3 // 8


def test_what_an_edge_forbids_reaches_the_far_end_of_a_chain(monkeypatch):
    """Small limits stand for large domains."""
    size, layers = 64, 40
    cheap, every = np.arange(size) < size // 2, np.arange(size)
    costs = np.where(cheap, 0.0, 1.5)
    costs[-1] = 1.0
    same = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
    network = CostNetwork([costs] * (layers - 1) + [np.where(cheap, np.inf, costs)],
                          [NetworkEdge(v, v + 1, same, every, every) for v in range(layers - 1)])
    for name in ("_MOST_SUMS", "_MOST_LARGE_SUMS"):
        monkeypatch.setattr(certificate, name, 1000)
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (40.0, True)
    check_certificate(network, solution)


def test_potentials_may_be_sums_of_the_largest_costs():
    same, both = [[0.0, np.inf], [np.inf, 0.0]], [0, 1]
    network = CostNetwork([[1.0, 1e290]] * 3, [NetworkEdge(v, v + 1, same, both, both) for v in range(2)])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (3.0, True)
    assert check_certificate(network, solution) == 0.0


@pytest.mark.parametrize("end", [0, 1])
def test_thousands_of_parallel_edges_and_of_loops(end):
    both, nothing = [0, 1], np.zeros((2, 2))
    network = CostNetwork([[0.0, 0.5]] * 2, [NetworkEdge(0, end, [[1.0, 2.0], [2.0, 2.0]], both, both),
                                             *[NetworkEdge(0, end, nothing, both, both)] * 5000])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (1.0, True)
    assert check_certificate(network, solution) == 1e-12


@pytest.mark.parametrize("costs", [(1e-320, 2e-320), (5e-324, 1e-323)])
def test_costs_so_small_that_no_sum_is_rounded(costs):
    network = CostNetwork([list(costs)], [])
    solution = solve(network)
    assert check_certificate(network, solution) == 0.0
    with pytest.raises(CertificateError):
        check_certificate(network, dataclasses.replace(solution, assignment=(1,), cost=costs[1]))


def test_what_edges_forbid_goes_around_a_ring_many_times():
    """All but the first configuration of every layer is ruled out, but only one after another."""
    layers, size = 8, 31
    every, others = np.arange(size), np.full((size, size), np.inf)
    others[0, 0] = 0.0
    same, after = others.copy(), others.copy()
    same[every, every] = 0.0
    after[every[2:], every[1:-1]] = 0.0  # of the first layer, and of the last
    others[1:, 1:] = 0.0
    network = CostNetwork([np.where(every == 0, 100.0, 0.0)] * layers, [
        NetworkEdge(u, v, same if v == u + 1 else after if v - u == layers - 1 else others, every, every)
        for u in range(layers) for v in range(u + 1, layers)])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (800.0, True)
    assert check_certificate(network, solution) == 0.0


def test_parallel_edges_between_layers_of_many_configurations():
    size, classes = 17_000, 131
    coarse, fine, nothing = np.arange(size) // classes, np.arange(size) % classes, np.zeros((classes, classes))
    network = CostNetwork([np.arange(1.0, size + 1)] * 2, [
        NetworkEdge(0, 1, nothing, coarse, coarse), NetworkEdge(0, 1, nothing, fine, fine)])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (2.0, True)
    assert check_certificate(network, solution) == 0.0
