"""Simulated steps judge what a search finds, where devices have cores of their own."""

import dataclasses
import json
import math

import harness
import pytest
from small_graphs import perceptron

from pase_mtf import models
from pase_mtf.cost.build import build_network
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.machine.machine import KINDS, Link, Machine
from pase_mtf.search import solve
from pase_mtf.search.budget import Budget
from pase_mtf.simulator.overlap import fitted_overlap
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.simulated import MOST_DEVICES, _Judge, shortest_simulated
from pase_mtf.strategy.strategy import Strategy
from pase_mtf.strategy.within import solve_within

SLOW_LINKS = Machine("slow links", dict.fromkeys(Machine.load("1080ti").rates, 1e11), 1e11, 1e10, 1e-6,
                     (Link(256, 2e9, 3e-6),))
"""Where gradients' all-reduces take long, and are hidden by the backward pass."""


@pytest.fixture(scope="module")
def graph():
    return harness.export_model("gnmt", models.load_config("gnmt", "tiny"))


def test_steps_are_simulated_where_devices_have_cores_of_their_own(graph):
    assert find_strategy(graph, 4, SLOW_LINKS).search["simulated"] > 1
    shared = dataclasses.replace(SLOW_LINKS, shared_cores=True)
    for machine, devices, options in ((shared, 4, {}), (SLOW_LINKS, 1, {}), (SLOW_LINKS, 4, {"simulate": 0}),
                                      (SLOW_LINKS, 4, {"method": "data_parallel"})):
        assert "simulated" not in find_strategy(graph, devices, machine, **options).search
    assert find_strategy(perceptron(), MOST_DEVICES, SLOW_LINKS).search["simulated"] > 1
    assert "simulated" not in find_strategy(perceptron(), 2 * MOST_DEVICES, SLOW_LINKS).search


def test_data_parallelism_that_is_too_long_to_be_simulated_is_not_taken():
    """It sums 32 kB of gradients at a byte a second; what is copied sends nothing."""
    slow = dataclasses.replace(SLOW_LINKS, links=(Link(256, 1.0, 0.0),))
    found = find_strategy(perceptron(), 4, slow, simple_within=0.01)
    assert found.search["simulated"] >= 1
    assert "simpler" not in found.search


def test_where_the_orders_differ_both_are_told(graph, tmp_path):
    found, cheapest = (find_strategy(graph, 4, SLOW_LINKS, simulate=simulate) for simulate in (None, 0))
    told = found.search
    assert told["simulated_rank"] > 1
    assert told["simulated_seconds"] == found.simulated_seconds < cheapest.simulated_seconds
    assert told["cheapest_simulated_seconds"] == cheapest.simulated_seconds
    assert found.seconds > cheapest.seconds
    assert not told["optimal"]
    assert told["gap"] == pytest.approx(found.seconds / cheapest.seconds - 1)
    assert (f"by cost number {told['simulated_rank']}: the cheapest takes {1e3 * cheapest.simulated_seconds:.3f} ms"
            in found.verdict)
    found.save(tmp_path / "strategy.json")
    assert Strategy.load(tmp_path / "strategy.json").verdict == found.verdict
    assert Strategy.load(tmp_path / "strategy.json").simulated_seconds is None


def test_steps_that_take_too_long_are_not_simulated(graph):
    """A machine file with a wrong rate: its costs are sums as ever."""
    slow = dataclasses.replace(Machine.load("a100"), rates=dict.fromkeys(KINDS, 1e-3))
    found = find_strategy(graph, devices=4, machine=slow)
    assert found.seconds > 1e6
    assert found.search["optimal"]
    assert found.simulated_seconds is None
    with pytest.raises(UsageError, match="correct the rates"):
        found.timeline()


def test_the_same_search_finds_the_same(graph):
    first, again = (find_strategy(graph, 8, SLOW_LINKS) for _ in range(2))
    assert first.configurations == again.configurations


def test_data_parallelism_is_taken_where_its_simulated_step_is_as_short(graph):
    best, parallel = find_strategy(graph, 8, SLOW_LINKS), find_strategy(graph, 8, SLOW_LINKS, "data_parallel")
    behind = parallel.simulated_seconds / best.simulated_seconds - 1
    assert behind > 0.01
    assert find_strategy(graph, 8, SLOW_LINKS, simple_within=0.99 * behind).configurations == best.configurations
    taken = find_strategy(graph, 8, SLOW_LINKS, simple_within=1.01 * behind)
    assert taken.configurations == parallel.configurations
    assert taken.search["simulated_seconds"] == parallel.simulated_seconds
    least = taken.search["shortest_simulated_seconds"]
    assert least == best.search.get("shortest_simulated_seconds", best.simulated_seconds)
    assert "simulated_rank" not in taken.search  # which was that of another
    assert f"takes {1e3 * least:.3f} ms" in taken.verdict


def test_a_chain_walks_on_simulated_steps(graph):
    options = {"start_from": "data_parallel", "proposals": 100, "seed": 1}
    found = find_strategy(graph, 4, SLOW_LINKS, "mcmc", simulate=1, **options)
    told = found.search
    assert 1 < told["simulated"] <= 101
    assert told["simulated_seconds"] == found.simulated_seconds < told["first_simulated_seconds"]
    assert told["first_simulated_seconds"] == find_strategy(
        graph, 4, SLOW_LINKS, "data_parallel").simulated_seconds
    assert "of which the first took" in found.verdict
    assert "simulated" not in find_strategy(graph, 4, SLOW_LINKS, "mcmc", **options).search


@pytest.mark.parametrize(("options", "says"), [
    ({"beta": "a"}, "beta='a': give a number, 0 or more"), ({"beta": -1e9}, "beta=-1000000000.0: give a number"),
    ({"proposals": "a"}, "proposals='a': give a positive whole number"), ({"proposals": 1.5}, "proposals=1.5: give"),
    ({"time_limit": "5"}, "time_limit='5': give a positive number"), ({"time_limit": math.inf}, "without end"),
    ({"gap": 0.1}, "gap: a chain on simulated steps takes"), ({"progress": True}, "progress: a chain on simulated"),
    ({"seed": [1]}, r"seed=\[1\]: give a whole number"), ({"initial": 5}, "assignment of '5'; give one")])
def test_a_chain_says_what_is_no_option(graph, options, says):
    with pytest.raises(UsageError, match=says):
        find_strategy(graph, 4, SLOW_LINKS, "mcmc", simulate=1, **options)


@pytest.mark.parametrize("wrong", [
    {"simulated": 2}, {"simulated": True, "simulated_seconds": 1.0}, {"simulated": 2, "simulated_seconds": "1"},
    {"simulated": 2, "simulated_seconds": 1.0, "simulated_rank": 2}, {"simulated_seconds": 1.0},
    {"simulated": 2, "simulated_seconds": 1.0, "simulated_rank": 0, "cheapest_simulated_seconds": 1.0},
    {"overlap": 0.5}, {"simulated": 2, "simulated_seconds": 1.0, "overlap": 1.5},
    {"simulated": 2, "simulated_seconds": 1.0, "overlap": True}])
def test_what_a_file_says_of_simulated_steps_is_checked(wrong, tmp_path):
    path = tmp_path / "strategy.json"
    find_strategy(perceptron(), 4, SLOW_LINKS, simulate=0).save(path)
    data = json.loads(path.read_text())
    data["search"].update(wrong)
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="simulated steps"):
        Strategy.load(path)


def test_the_overlap_is_learned_from_simulated_steps(graph):
    """One that all steps agree on is found; the search's own lies between nothing and all, and both are told."""
    sums, hideable = [4.0, 6.0, 5.0], [1.0, 4.0, 0.0]
    assert fitted_overlap(sums, hideable, [3.25, 3.0, 5.0]) == pytest.approx(0.75)
    assert fitted_overlap(sums, hideable, [1.0, 1.0, 1.0]) == 1.0  # more is hidden than gradients
    assert fitted_overlap(sums, hideable, [9.0, 9.0, 9.0]) == 0.0  # links are contended for
    assert fitted_overlap(sums, [0.0] * 3, sums) is fitted_overlap([0.0], [0.0], [0.0]) is None
    found = find_strategy(graph, 4, SLOW_LINKS)
    assert 0.0 < found.search["overlap"] < 1.0
    assert f"; {100 * found.search['overlap']:.0f} % of what gradients' all-reduces take is hidden" in found.verdict
    alone = dataclasses.replace(SLOW_LINKS, links=(Link(256, 1e15, 0.0),))
    assert find_strategy(graph, 4, alone).search["overlap"] != found.search["overlap"]


@pytest.mark.slow
def test_within_a_memory_limit_what_fits_is_simulated(graph):
    """The cheapest while all-reduces are hidden replicate weights, which does not fit."""
    limit = find_strategy(graph, 4, SLOW_LINKS, simulate=0).memory_frontier(8)[1].memory_limit
    priced = build_network(graph, SLOW_LINKS, 4)
    first = solve_within(priced, limit, {"certificate": False, "time_limit": 5.0}, patience=0.5)
    judge = _Judge(priced, first.assignment, limit, Budget())
    judge.learn_overlap()
    simulated = judge.ordered()[0]
    assert len(simulated) > 1
    assert all(priced.peak_memory(assignment)[0] <= limit for assignment in simulated)


def test_the_overlap_is_fitted_as_the_page_says(repository):
    assert fitted_overlap([10.0, 110.0], [5.0, 20.0], [10.0, 100.0]) == pytest.approx(0.02 / 0.29)
    text = " ".join((repository / "docs" / "search.md").read_text(encoding="utf-8").split())
    assert "gradients' all-reduces`, each divided by its simulated step; 0 to 1)" in text


def test_no_simulated_step_is_called_the_shortest_that_is_longer_than_the_one_taken():
    """Over 7 devices every layer is whole; over 4 of them the batch is split."""
    slow = dataclasses.replace(SLOW_LINKS, rates=dict.fromkeys(SLOW_LINKS.rates, 1e8), links=(Link(256, 1e12, 0.0),))
    told = find_strategy(perceptron(), 7, slow, simple_within=0.01).search
    assert told["simpler"] == "data_parallel"
    assert told["shortest_simulated_seconds"] <= told["simulated_seconds"]


def test_what_is_cheaper_than_a_find_without_a_proof_comes_before_it():
    graph = perceptron()
    priced = build_network(graph, SLOW_LINKS, 4)
    cheapest = solve_within(priced, None, {"certificate": False})
    dearest = tuple(int(vector.argmax()) for vector in priced.network.vectors)
    cost = priced.network.cost(dearest)
    assert cost > cheapest.cost
    found = dataclasses.replace(cheapest, assignment=dearest, cost=cost, optimal=False)
    told = shortest_simulated(priced, found, 4, None)[1]
    assert told["cheapest_simulated_seconds"] != Simulator(priced).seconds(dearest)


def test_searches_for_what_is_simulated_keep_to_the_memory_that_was_given(monkeypatch):
    given = []

    def recorded_solve(network, method, **options):
        given.append(options.get("search_memory"))
        return solve(network, method, **options)

    def recorded_within(priced, memory_limit, options, **others):
        given.append(options.get("search_memory"))
        return solve_within(priced, memory_limit, options, **others)

    monkeypatch.setattr("pase_mtf.strategy.simulated.solve", recorded_solve)
    monkeypatch.setattr("pase_mtf.strategy.simulated.solve_within", recorded_within)
    assert find_strategy(perceptron(), 4, SLOW_LINKS, search_memory=3 << 30).search["simulated"] > 0
    assert len(given) > 1
    assert set(given) == {3 << 30}
