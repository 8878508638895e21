"""The other searches against each other, and the registry."""

import itertools
import math
import pathlib
import time

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf import host
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search import Solution, methods, pase, register, registry, solve
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.peak import minimise_within_peak

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


def feasible(seeds, most_assignments=2000):
    """(network, cheapest cost, the size of what costs are rounded to) for the networks that have a finite cost."""
    for seed in seeds:
        network = random_network(seed, most_assignments)
        try:
            solution = solve(network, "brute_force")
        except InfeasibleError:
            continue
        parts = [abs(vector[k]) for vector, k in zip(network.vectors, solution.assignment, strict=True)]
        parts += [abs(edge.matrix[edge.rows[solution.assignment[edge.source]],
                                  edge.columns[solution.assignment[edge.target]]]) for edge in network.edges]
        yield network, solution.cost, 1e-12 * sum(parts)


@pytest.mark.parametrize("step", [37, pytest.param(4, marks=pytest.mark.slow)])
def test_dynamic_program_against_brute_force(step):
    count = 0
    for network, cost, rounding in feasible(range(1, 2000, step)):
        solution = solve(network, "pase")
        assert solution.cost == network.cost(solution.assignment)
        assert abs(solution.cost - cost) <= rounding
        count += 1
    assert count > 0.9 * 2000 / step


@pytest.mark.parametrize("method", ["exact", "pase"])
def test_infeasible(method):
    ends = np.array([0, 1])
    unequal = NetworkEdge(0, 1, [[np.inf, 0], [0, np.inf]], ends, ends)
    equal = NetworkEdge(0, 1, [[0, np.inf], [np.inf, 0]], ends, ends)
    with pytest.raises(InfeasibleError):
        solve(CostNetwork([[0, 0], [0, 0]], [equal, unequal]), method)


@pytest.mark.parametrize("name", ["alexnet_8", "inception3_8", "transformer_8", "rnnlm_32"])
def test_pase_agrees_with_exact(name):
    network = CostNetwork.load(INSTANCES / f"{name}.npz")
    solution = solve(network, "pase")
    assert solution.cost == solve(network).cost
    # "GenerateSeq keeps |D ∪ v| ≤ 3 on Inception-v3"
    assert solution.statistics["largest_dependent_set"] + 1 <= (3 if name != "transformer_8" else 4)


def test_tables_that_do_not_fit_are_refused_at_once():
    network = CostNetwork.load(INSTANCES / "densenet-direct_16.npz")
    with pytest.raises(UsageError, match=r"tables of .* need .* GB"):
        solve(network, "pase")
    with pytest.raises(UsageError, match="tables"):
        solve(CostNetwork.load(INSTANCES / "inception3_8.npz"), "pase", memory=1000)


def test_generate_sequence_by_hand():
    # A star with a tail: leaves first; the centre once it is down to one neighbour.
    assert pase.generate_sequence(5, [(0, 1), (0, 2), (0, 3), (3, 4)]) == [1, 2, 0, 3, 4]
    # Taking a corner of a square joins its neighbours.
    assert pase.generate_sequence(4, [(0, 1), (1, 2), (2, 3), (3, 0)]) == [0, 1, 2, 3]


def test_mcmc_finds_small_optima_and_repeats_itself():
    found = total = 0
    for number, (network, cost, rounding) in enumerate(feasible(range(0, 400, 7), 300)):
        first = solve(network, "mcmc", seed=number, proposals=20000)
        again = solve(network, "mcmc", seed=np.int64(number), proposals=20000)
        assert first.assignment == again.assignment
        assert first.cost == network.cost(first.assignment)
        assert first.cost >= cost - rounding
        assert not first.optimal
        found += abs(first.cost - cost) <= rounding
        total += 1
    assert found > 0.7 * total


def test_mcmc_stops_when_half_its_budget_brings_nothing():
    network = CostNetwork([[1.0, 2.0]], [])
    assert solve(network, "mcmc", proposals=1000).statistics["proposals"] == 500
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    solution = solve(network, "mcmc", proposals=50000)
    assert 25000 < solution.statistics["proposals"] <= 50000
    assert solution.cost < network.cost([int(np.argmin(vector)) for vector in network.vectors])
    costs = [cost for _, cost in solution.statistics["history"]]
    assert costs == sorted(costs, reverse=True)


def test_mcmc_starts_where_told():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    optimum = solve(network)
    assert solve(network, "mcmc", initial=optimum.assignment, proposals=100).cost == optimum.cost
    for options in ({"seed": -1}, {"initial": (0,)}, {"proposals": 0}, {"seed": "a"}, {"proposals": 1.5},
                    {"beta": -1.0}, {"initial": (0.0,) * 14}, {"initial": 5}, {"initial": "a" * 14}):
        with pytest.raises(UsageError):
            solve(network, "mcmc", **options)


@pytest.mark.parametrize("step", [31, pytest.param(5, marks=pytest.mark.slow)])
def test_k_best_against_enumeration(step):
    count = 0
    for network, _, rounding in feasible(range(0, 1200, step), 300):
        costs = sorted(network.cost(choice) for choice in itertools.product(*map(range, network.sizes)))
        costs = [cost for cost in costs if cost < np.inf][:7]
        found = solve(network, "k_best", k=7).statistics["strategies"]
        assert len(found) == len(costs)
        assert len({assignment for _, assignment in found}) == len(found)
        rounding = max(rounding, 1e-12 * max(abs(cost) for cost in costs))
        for (cost, assignment), expected in zip(found, costs, strict=True):
            assert cost == network.cost(assignment)
            assert abs(cost - expected) <= 2 * rounding
        count += 1
    assert count > 0.8 * 1200 / step


def test_k_best_is_exact_on_integers():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    found = solve(network, "k_best", k=20).statistics["strategies"]
    assert found[0][0] == 97098296512
    assert [cost for cost, _ in found] == sorted(cost for cost, _ in found)
    neighbours = []  # no strategy that differs in one layer may have been passed over
    for layer, size in enumerate(network.sizes):
        for choice in range(size):
            other = list(found[0][1])
            other[layer] = choice
            neighbours.append(tuple(other))
    listed = {assignment for _, assignment in found}
    for other in neighbours:
        assert other in listed or network.cost(other) >= found[-1][0]


def _small():
    rng, every = np.random.default_rng(0), np.arange(3)
    return CostNetwork([rng.random(3) for _ in range(4)],
                       [NetworkEdge(layer, layer + 1, rng.random((3, 3)), every, every) for layer in range(3)])


@pytest.mark.parametrize("much", [10 ** 400, float("inf")])
def test_numbers_larger_than_any_float_are_without_limit(much):
    network, usage = _small(), [np.ones(3)] * 4
    best = solve(network, "brute_force").cost
    for method, options in (
            ("exact", {"search_memory": much}), ("exact", {"memory": usage, "memory_limit": much}),
            ("pase", {"memory": much}), ("k_best", {"search_memory": much, "time_limit": much})):
        assert solve(network, method, **options).cost == pytest.approx(best, rel=1e-12)
    for method, options in (("exact", {"gap": much}), ("exact", {"memory": usage, "memory_limit": 99, "gap": much}),
                            ("mcmc", {"beta": much, "proposals": 1000})):
        assert solve(network, method, **options).cost >= best * (1 - 1e-12)
    found = minimise_within_peak(network, {0: usage}.get, lambda choice: (float(len(choice)), 0), much)
    assert found.cost == pytest.approx(best, rel=1e-12)


def test_counts_larger_than_any_float():
    network = _small()
    every = solve(network, "k_best", k=10 ** 400).statistics
    assert every["complete"]
    assert len(every["strategies"]) == math.prod(network.sizes)
    assert solve(network, "mcmc", proposals=10 ** 400, time_limit=0.05).statistics["proposals"] > 0


@pytest.mark.parametrize("wrong", ["1GB", float("nan"), True, [1], -1])
def test_options_that_are_no_numbers_are_said(wrong):
    network = CostNetwork([[1.0, 2.0]], [])
    for method, options in (
            ("pase", {"memory": wrong}), ("mcmc", {"beta": wrong}), ("exact", {"search_memory": wrong}),
            ("exact", {"memory": [[1.0, 1.0]], "memory_limit": wrong}), ("k_best", {"k": wrong})):
        with pytest.raises(UsageError, match=r"give|ask for") as caught:
            solve(network, method, **options)
        assert "\n" not in str(caught.value)


def test_unknown_names_offer_the_nearest():
    network = random_network(0)
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        solve(network, "exat")
    with pytest.raises(UsageError, match="no option 'seeed'; did you mean 'seed'"):
        solve(network, "mcmc", seeed=1)
    for options in ({"time_limit": 0}, {"gap": -1}, {"time_limit": float("nan")}, {"time_limit": "3"}, {"gap": None},
                    {"method": "k_best", "k": 2.5}):
        with pytest.raises(UsageError):
            solve(network, **options)
    with pytest.raises(UsageError, match=r"network='x\.npz': is no CostNetwork"):
        solve("x.npz")


@pytest.mark.parametrize("method", methods())
def test_a_network_of_nothing(method):
    solution = solve(CostNetwork([], []), method)
    assert (solution.cost, solution.assignment) == (0, ())


def test_own_search_can_be_registered(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))

    @register("first")
    def first(network, *, time_limit=None, gap=0.0, progress=None):
        """The first configuration of every layer."""
        assignment = (0,) * len(network.vectors)
        return Solution(assignment, network.cost(assignment), -np.inf, np.inf, False, 0.0, {})
    assert "first" in methods()
    network = random_network(3)
    solution = solve(network, "first")
    assert solution.cost == network.cost(solution.assignment)
    assert solution.seconds > 0

    @register("second")
    def second(network, *, start=0, **options):
        """Takes whatever there is."""
        assert options == {"time_limit": None, "gap": 0.5, "progress": None}
        return first(network)
    assert solve(network, "second", gap=0.5, start=1).cost == solution.cost

    @register("plain")
    def plain(network, time_limit=None, gap=0.0, progress=None, start=0):
        """What is called by keyword may be taken by place, too."""
        assert (time_limit is not None, gap, progress, start) == (True, 0.5, None, 1)
        return first(network)
    assert solve(network, "plain", time_limit=5, gap=0.5, start=1).cost == solution.cost
    with pytest.raises(UsageError, match="search 'plain' has no option 'seed'"):
        solve(network, "plain", **{"seed": 1})

    @register("third")
    def third(network):
        """Counts nothing: what is set all the same is refused."""
        return first(network)
    assert solve(network, "third", progress=True).cost == solution.cost
    for option in ({"time_limit": 5.0}, {"gap": 0.1}, {"seed": 1}):
        with pytest.raises(UsageError, match=f"'third' has no option '{next(iter(option))}'"):
            solve(network, "third", **option)
    with pytest.raises(UsageError, match="exists already"):
        register("first")(first)


def test_progress_bar_appears_after_a_second(capsys, monkeypatch):
    def slow(network, *, time_limit=None, gap=0.0, progress=None):
        for seconds, cost, bound in ((0.5, 9.0, 1.0), (1.5, np.inf, -np.inf), (2.0, 5.0, 4.0)):
            if progress is not None:
                progress(seconds, cost, bound)
        return Solution((0,), 1.0, 1.0, 0.0, True, 0.0, {})
    register("slow")(slow)
    network = CostNetwork([[1.0]], [])
    try:
        for silent in (None, False):
            solve(network, "slow", progress=silent)
            assert capsys.readouterr().err == ""
        solve(network, "slow", progress=True)
        shown = capsys.readouterr().err
        assert "cost 5, bound 4, gap 20.00%" in shown
        assert "cost 9" not in shown  # after half a second
    finally:
        del registry._METHODS["slow"]
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # a machine on which no search takes any time
    solve(network, progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", ["cgroup", "cgroup/jobs"])
def test_tables_that_do_not_fit_a_container_are_refused(place, tmp_path, monkeypatch):
    """The computer has more, but the kernel ends a process whose control group has not."""
    for name, path in (("PROC", "proc"), ("CONTROL_GROUPS", "cgroup")):
        monkeypatch.setattr(host, name, tmp_path / path)
    for name, text in (("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"),
                       ("proc/self/cgroup", "0::/jobs/this\n"), (f"{place}/memory.current", "1500\n"),
                       (f"{place}/memory.stat", "anon 1000\ninactive_file 500\n"), (f"{place}/memory.max", "1100\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="tables of 10 entries"):
        solve(_small(), "pase")
    (tmp_path / place / "memory.max").write_text("max\n")
    assert solve(_small(), "pase").optimal


def test_mcmc_has_no_limit_of_memory_that_nobody_can_raise(monkeypatch):
    budgets, normalized = [], CostNetwork.normalized
    monkeypatch.setattr(CostNetwork, "normalized", lambda network, **options: (
        budgets.append(options["budget"]), normalized(network, **options))[1])
    solve(CostNetwork.load(INSTANCES / "alexnet_8.npz"), "mcmc", proposals=10)
    assert [budget.memory for budget in budgets] == [math.inf]


def test_mcmc_keeps_the_best_beside_costs_that_round_it_away():
    """Sums that had held 1e17 had lost the rest: what costs far more than the start looked cheaper."""
    network = CostNetwork([[0.0, 1e17], *[[0.0, 5.0]] * 20], [])
    found = solve(network, "mcmc", initial=(0,) * 21, beta=0.0, proposals=200_000)
    assert (found.cost, found.assignment) == (0.0, (0,) * 21)
    costs = [cost for _, cost in found.statistics["history"]]
    assert costs == sorted(costs, reverse=True)


def test_tables_that_nothing_can_count_are_refused_without_a_limit():
    every, costs = np.arange(64), np.zeros((64, 64))
    network = CostNetwork([np.zeros(64)] * 12, [NetworkEdge(one, other, costs, every, every)
                                                for one, other in itertools.combinations(range(12), 2)])
    with pytest.raises(UsageError, match=r"pase: tables of .* entries need"):
        solve(network, "pase", memory=float("inf"))
