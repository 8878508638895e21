"""What certificates leave open, and the checker eliminates: little in every part, or much where splits cost as much."""

import dataclasses
import itertools
import math
import sys

import numpy as np
import pytest
from random_networks import frustrated, splits

from pase_mtf.search import CertificateError, certificate, certify, check_certificate, checked_search, solve
from pase_mtf.search.budget import Budget
from pase_mtf.search.checked_elimination import LayerTables
from pase_mtf.search.checked_search import EXHAUSTED, remainder_of, search
from pase_mtf.search.elimination_plan import plan_elimination
from pase_mtf.search.packed import Potentials, pack


def _tables(seed):
    """Tables over random layers of one to five configurations, and how many each layer has."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, rng.integers(2, 7))
    ends = np.array(sorted(rng.permutation(list(itertools.combinations(range(len(sizes)), 2)))[
        :rng.integers(1, 2 * len(sizes))].tolist())).T
    tables = [((v,), rng.random(size)) for v, size in enumerate(sizes)]
    tables += [((u, v), rng.random((sizes[u], sizes[v]))) for u, v in ends.T.tolist()]
    return sizes, ends, [(tuple(v for v in own if sizes[v] > 1), table.squeeze()) for own, table in tables]


def _least_sum(tables, most):
    return certificate._surely_least_sum(_laid_out(tables), most)


def _searched(tables, missing, most):
    return certificate._searched(_laid_out(tables), missing, most)


def _laid_out(tables):
    sizes = np.ones(1 + max((v for own, _ in tables for v in own), default=0), np.int64)
    for own, table in tables:
        sizes[list(own)] = table.shape
    return LayerTables(sizes, np.array([[*own, -1, -1][:2] for own, _ in tables]),
                       np.cumsum([0, *(table.size for _, table in tables)]),
                       np.concatenate([table.ravel() for _, table in tables]))


@pytest.mark.parametrize("seed", range(75))
def test_the_least_sum_is_that_of_all_and_takes_what_the_prover_counts(seed):
    sizes, ends, tables = _tables(seed)
    for (own, table), (given, wanted) in zip(_laid_out(tables).listed(), tables, strict=True):
        assert own == given
        assert np.array_equal(table, wanted)
    wanted = min(sum(table[tuple(choice[v] for v in own)] for own, table in tables)
                 for choice in itertools.product(*map(range, sizes)))
    least, sums = _least_sum(tables, 1 << 22)
    assert wanted * (1 - 1e-12) <= least <= wanted
    assert sums == certify._planned(sizes, ends, 1 << 22)[1]
    if sums:
        with pytest.raises(CertificateError, match="too little"):
            _least_sum(tables, sums - 1)
        assert certify._planned(sizes, ends, sums - 1)[1] == math.inf


def test_no_table_is_larger_than_it_may_be(monkeypatch):
    tables = [((u, v), np.ones((9, 9))) for u, v in itertools.combinations(range(5), 2)]
    for most in (9 ** 4, 9 ** 4 - 1):
        monkeypatch.setattr(certificate, "_MOST_ENTRIES", most)
        if most == 9 ** 4:
            assert _least_sum(tables, 1 << 30)[0] == pytest.approx(10.0)
        else:
            with pytest.raises(CertificateError, match="too large"):
                _least_sum(tables, 1 << 30)


@pytest.mark.parametrize("seed", range(40))
def test_a_search_ends_where_nothing_is_cheaper(seed):
    """Costs that are sums of halves, so that nothing is rounded: it is exhausted up to the optimum, and no further."""
    sizes, _, tables = _tables(seed)
    tables = [(own, np.floor(8 * table) / 2) for own, table in tables]
    wanted = min(sum(table[tuple(choice[v] for v in own)] for own, table in tables)
                 for choice in itertools.product(*map(range, sizes)))
    scalars = sum(float(table) for own, table in tables if not own)
    remainder = remainder_of([(own, table) for own, table in tables if own])
    for limit, exhausted in ((wanted - scalars, True), (wanted - scalars + 0.5, False), (wanted - scalars - 0.5, True)):
        ended, looked = search(remainder, limit, 1 << 30)
        assert (ended == EXHAUSTED) == exhausted
        if looked:
            assert search(remainder, limit, looked - 1)[0] not in (EXHAUSTED, ended)


@pytest.mark.parametrize("shape", ["row", "star", "ring"])
def test_a_search_sees_what_layers_cost_together(shape):
    """Of layers that cost nothing by themselves: no decision where nothing goes round, and few where it does."""
    rng, layers = np.random.default_rng(0), 30
    ends = [(0 if shape == "star" else v, v + 1) for v in range(layers - 1)] + [(0, layers - 1)] * (shape == "ring")
    tables = [(own, rng.random((4, 4))) for own in ends]
    least = _least_sum(tables, 1 << 22)[0]
    a_round = 16 * len(tables) + checked_search._SUMS * 4 * layers
    assert _searched(tables, least * (1 - 1e-9), (16 if shape == "ring" else 1) * a_round) > 0


def test_what_is_too_much_to_lay_out_is_not_searched(monkeypatch):
    tables = [((u, v), np.ones((9, 9))) for u, v in itertools.combinations(range(5), 2)]
    assert remainder_of(tables) is not None
    monkeypatch.setattr(checked_search, "_MOST_HELD", 2 * 81 * len(tables) - 1)
    assert remainder_of(tables) is None
    with pytest.raises(CertificateError, match="too large to search"):
        _searched(tables, 1.0, 1 << 30)


def test_a_search_verifies_up_to_the_least_sum_and_no_further():
    tables = _tables(3)[2]
    least = _least_sum(tables, 1 << 22)[0]
    assert _searched(tables, least * (1 - 1e-12), 1 << 30) >= 0
    for missing in (least * (1 + 1e-9), 2 * least, 1e300):
        with pytest.raises(CertificateError, match="does not exclude"):
            _searched(tables, missing, 1 << 30)


def test_parts_that_are_searched_instead(monkeypatch):
    """With the cost of splits such that eliminating never pays, some parts are searched, and checked so."""
    def searched(proof):
        return proof.searched + sum(map(searched, proof.proofs))
    _little(monkeypatch, _SUMS_OF_A_SPLIT=1 << 10, _planned=lambda domains, ends, most: (
        plan_elimination(np.maximum(domains, 1), ends.T), math.inf))
    found = 0
    for network, solution in _proven():
        found += searched(solution.certificate)
        other = ((solution.assignment[0] + 1) % 6, *solution.assignment[1:])
        with pytest.raises(CertificateError, match=r"does not exclude|proves too little"):
            check_certificate(network, dataclasses.replace(solution, assignment=other, cost=network.cost(other)))
    assert found


def _little(monkeypatch, **limits):
    """A prover and a checker that do next to nothing of a part by themselves."""
    monkeypatch.setattr(certificate, "_MOST_SUMS", 100)
    monkeypatch.setattr(certify, "_MOST_SUMS", 50)
    for name, amount in limits.items():
        monkeypatch.setattr(certify, name, amount)


def _proven():
    """Networks that potentials alone do not prove, with solutions whose certificates were checked."""
    for seed in range(12):
        network = frustrated(seed)
        solution = solve(network)
        check_certificate(network, solution)
        yield network, solution


def test_cut_domains(monkeypatch):
    """With a checker and a prover that may eliminate next to nothing, domains have to be split."""
    _little(monkeypatch, _MOST_LARGE_SUMS=0)
    monkeypatch.setattr(certificate, "_MOST_LARGE_SUMS", 0)
    found = 0
    for network, solution in _proven():
        found += splits(solution.certificate)
        if solution.certificate.layer >= 0:  # a proof of one part only is no proof
            halved = dataclasses.replace(solution.certificate, proofs=solution.certificate.proofs[:1])
            with pytest.raises(CertificateError):
                check_certificate(network, dataclasses.replace(solution, certificate=halved))
    assert found > 5


def test_splits_that_cost_as_much_are_done_without(monkeypatch):
    """The dearer a split, the fewer there are; what is proven stays the same."""
    found = []
    for cost in (0, 1, 1 << 20):
        with monkeypatch.context() as patch:
            _little(patch, _SUMS_OF_A_SPLIT=cost)
            found.append([splits(solution.certificate) for _, solution in _proven()])
    assert sum(found[0]) > sum(found[1]) > sum(found[2])
    assert all(np.greater_equal(found[0], found[1]))
    assert any(found[1])  # parts of which some are eliminated at once


def test_searches_keep_to_time_and_memory():
    network = frustrated(0)
    packed = pack(network.normalized())
    active, none = np.ones(len(packed.unary), bool), Potentials.none(packed)
    limit = 0.999 * solve(network, certificate=False).cost
    assert certify._looked(packed, active, none, limit, 1e9, Budget()) < math.inf
    assert certify._looked(packed, active, none, limit, 1e9, Budget(memory=1000)) == math.inf
    with pytest.raises(TimeoutError):
        certify._looked(packed, active, none, limit, 1e9, Budget(deadline=0.0))


def test_all_large_remainders_together_are_limited(monkeypatch):
    """What takes one sum more than the checker is willing to form in all is refused."""
    _little(monkeypatch, _SUMS_OF_A_SPLIT=1)
    network, solution = next(found for found in _proven() if splits(found[1].certificate))
    taken, prove = [], certificate._prove
    monkeypatch.setattr(certificate, "_prove", lambda *arguments: taken.append(prove(*arguments)) or taken[-1])
    check_certificate(network, solution)
    large = sum(sums for sums in taken if sums > 100)
    assert large
    monkeypatch.setattr(certificate, "_MOST_LARGE_SUMS", large)
    check_certificate(network, solution)
    monkeypatch.setattr(certificate, "_MOST_LARGE_SUMS", large - 1)
    with pytest.raises(CertificateError, match="too large to search"):
        check_certificate(network, solution)


def test_the_prover_keeps_to_the_limit_of_all(monkeypatch):
    """Where little may be left in all, domains are split until no more is."""
    _little(monkeypatch, _SUMS_OF_A_SPLIT=1 << 20, _MOST_LARGE_SUMS=400)
    monkeypatch.setattr(certificate, "_MOST_LARGE_SUMS", 800)
    assert sum(splits(solution.certificate) for _, solution in _proven()) > 5


def test_the_checker_is_left_no_tables_that_it_refuses():
    ends = np.stack([np.arange(99), np.arange(1, 100)])
    assert certify._planned(np.full(100, 2000), ends, 1 << 30)[1] == math.inf
    assert certify._planned(np.full(2, 3000), ends[:, :1], 1 << 30)[1] == math.inf
    assert certify._planned(np.full(100, 1000), ends, 1 << 30)[1] < math.inf


def test_a_hub_is_planned_in_steps_that_grow_with_its_neighbours():
    """Of twice as many, twice as many lines are run: not four times."""
    def lines(leaves):
        ends, count = np.array([(0, v) for v in range(1, leaves + 1)] + [(v, v + 1) for v in range(1, leaves, 2)]).T, 0

        def look(frame, event, argument):
            nonlocal count
            count += event == "line"
            return look if frame.f_code.co_filename == certify.__file__ else None
        before = sys.gettrace()
        sys.settrace(look)
        try:
            _, sums = certify._planned(np.full(leaves + 1, 2), ends, 1 << 21)
        finally:
            sys.settrace(before)
        assert sums < math.inf
        return count
    assert lines(800) < 2.5 * lines(400)
