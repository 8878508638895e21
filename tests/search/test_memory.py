"""The memory limit against brute force, and the frontier."""

import dataclasses
import itertools
import pathlib
import time

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search import Solution, frontier, memory, solve
from pase_mtf.search.budget import Budget
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import pack

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


def bytes_of(network, seed):
    """Memory per configuration; equal layers need equal memory."""
    per_layer = {}
    for vector in network.vectors:
        if vector.tobytes() not in per_layer:
            rng = np.random.default_rng([seed, len(per_layer)])
            per_layer[vector.tobytes()] = rng.integers(1, 200) * 1e6 * rng.choice([1, 0.5, 0.25, 0.125], len(vector))
    return [per_layer[vector.tobytes()] for vector in network.vectors]


def needed(usage, assignment):
    return sum(entry[choice] for entry, choice in zip(usage, assignment, strict=True))


def test_the_last_of_a_frontier_has_room_for_the_cheapest():
    """Bytes that are no whole numbers are added up as the search does."""
    points = frontier.frontier(CostNetwork([[1.0, 2.0]] * 10, []), [np.array([0.1, 0.0])] * 10, 2)
    assert [point.solution.cost for point in points] == [20.0, 10.0]


@pytest.mark.parametrize("seeds", [range(0, 500, 7), pytest.param(
    [seed for seed in range(500) if seed % 7], marks=pytest.mark.slow)])
def test_against_brute_force(seeds):
    solved = refused = 0
    for seed in seeds:
        network = random_network(seed, 400)
        rng = np.random.default_rng(seed)
        usage = [rng.integers(0, 50, size).astype(float) if seed % 2 else rng.random(size) * 1e9
                 for size in network.sizes]
        every = list(itertools.product(*map(range, network.sizes)))
        needs = np.array([needed(usage, choice) for choice in every])
        costs = np.array([network.cost(choice) for choice in every])
        limit = float(np.quantile(needs, rng.random())) if seed % 5 else float(needs.min() * rng.random() * 1.5)
        allowed = np.isfinite(costs) & (needs <= limit * (1 + 1e-12))
        if not allowed.any():
            with pytest.raises(InfeasibleError):
                solve(network, memory=usage, memory_limit=limit, time_limit=600)
            refused += 1
            continue
        solution = solve(network, memory=usage, memory_limit=limit, time_limit=600)
        best = costs[allowed].min()
        scale = abs(costs[np.isfinite(costs)]).max()
        assert solution.optimal
        assert needed(usage, solution.assignment) <= limit * (1 + 1e-12)
        assert abs(solution.cost - best) <= 1e-10 * scale
        assert solution.lower_bound <= best + 1e-10 * scale
        solved += 1
    assert solved > 0.7 * len(seeds)
    assert refused > 0.1 * len(seeds)


@pytest.mark.parametrize("constant", [0.0, 8e10, 8e10 / 3])
def test_what_every_assignment_needs_makes_no_proof_easier(constant):
    """Charged for, its rounding would be as much as the better assignment saves."""
    network = CostNetwork([np.array([0.]), np.array([0., 7.]), np.array([0., 5.]), np.array([0., 5.])], [])
    usage = [np.array([constant]), np.array([6., 0.]), np.array([5., 0.]), np.array([5., 0.])]
    found = solve(network, memory=usage, memory_limit=constant + 10)
    assert (found.cost, found.assignment, found.optimal) == (7.0, (0, 1, 0, 0), True)


def test_what_is_forbidden_makes_no_proof_easier():
    """A light configuration that goes with none of a neighbour's is not what its layer needs at least."""
    ends = [0, 1]
    network = CostNetwork([np.array([0., 0.]), np.array([0., 7.]), np.array([0., 5.]), np.array([0., 5.])],
                          [NetworkEdge(0, 1, [[0., 0.], [np.inf, np.inf]], ends, ends)])
    usage = [np.array([8e10, 0.]), np.array([6., 0.]), np.array([5., 0.]), np.array([5., 0.])]
    found = solve(network, memory=usage, memory_limit=8e10 + 10)
    assert (found.cost, found.assignment, found.optimal) == (7.0, (0, 1, 0, 0), True)


def test_what_layers_need_is_found_without_a_copy_of_the_network(monkeypatch):
    every, costs, copied, reduce = np.arange(3), np.arange(9.0).reshape(3, 3), [], memory.reduce
    costs[2] = np.inf

    def noted(*given, **options):
        copied.append(reduce(*given, **options))
    monkeypatch.setattr(memory, "reduce", noted)
    packed = pack(CostNetwork([np.zeros(3)] * 2, [NetworkEdge(0, 1, costs, every, every)]).normalized())
    least = memory._least_per_layer(packed, np.array([5.0, 4.0, 1.0, 3.0, 2.0, 6.0]), Budget())
    assert least.tolist() == [4.0, 2.0]
    assert not copied


def test_patience_begins_once_the_first_bound_is_known(monkeypatch):
    """What it takes to get there, compiling included, says nothing of the network."""
    rng = np.random.default_rng(5)
    network = CostNetwork(list(rng.random((40, 6))), [])
    usage = list(rng.random((40, 6)))
    monkeypatch.setattr(memory, "_PATIENCE", 1e-9)
    hasty = solve(network, memory=usage, memory_limit=12.0)
    assert hasty.statistics["solves"] >= 1
    assert 0 < hasty.lower_bound <= hasty.cost
    assert not hasty.optimal
    monkeypatch.undo()
    patient = solve(network, memory=usage, memory_limit=12.0)
    assert patient.optimal
    assert hasty.lower_bound <= patient.cost <= hasty.cost


def test_a_limit_that_was_rounded_down():
    """The least of all is the sum of the least ones, rounded: it fits within itself."""
    network, usage = CostNetwork([np.array([0., 1.])] * 2, []), [np.array([0.1, 5.]), np.array([0.7, 5.])]
    found = solve(network, memory=usage, memory_limit=0.7999999999999999)
    assert (found.assignment, found.optimal) == ((0, 0), True)
    for seed in range(40):
        numbers = np.random.default_rng(seed).random((6, 3))
        network = CostNetwork(list(np.random.default_rng(seed + 99).random((6, 3))), [])
        first = solve(network, memory=list(numbers), memory_limit=0.6 * numbers.max(axis=1).sum())
        again = solve(network, memory=list(numbers), memory_limit=first.statistics["memory"])
        assert again.cost <= first.cost * (1 + 1e-9)


@pytest.mark.parametrize("initial", [(0,), (0, 9, 0, 0), (0.0, 0.0, 0.0, 0.0), (0, -1, 0, 0)])
def test_an_assignment_to_begin_with_is_one(initial):
    network = CostNetwork([np.array([0., 1.])] * 4, [])
    with pytest.raises(UsageError, match="configuration"):
        solve(network, memory=[np.array([1., 0.])] * 4, memory_limit=2.0, initial=initial)


def test_without_a_limit_nothing_is_begun_with():
    network = CostNetwork([np.array([0., 1.])] * 4, [])
    with pytest.raises(UsageError, match="initial: only a search within a memory limit begins with an assignment"):
        solve(network, initial=(0, 0, 0, 0))


def test_infeasible_limits_name_the_least():
    network = CostNetwork([[1, 9], [1, 9]], [])
    usage = [np.array([80, 30]), np.array([70, 40])]
    assert memory.least_memory(network, usage) == (70, (1, 1))
    with pytest.raises(InfeasibleError, match="least any strategy needs is 70"):
        solve(network, memory=usage, memory_limit=69)
    assert solve(network, memory=usage, memory_limit=70).assignment == (1, 1)
    # Light configurations that forbid each other do not count.
    ends = [0, 1]
    network = CostNetwork([[1, 9], [1, 9]], [NetworkEdge(0, 1, [[0, 0], [0, np.inf]], ends, ends)])
    assert memory.least_memory(network, usage)[0] == 100
    with pytest.raises(InfeasibleError, match="100"):
        solve(network, memory=usage, memory_limit=99)


def test_what_is_not_proven_is_not_called_the_least(monkeypatch):
    network, usage = CostNetwork([[1, 9], [1, 9]], []), [np.array([80, 30]), np.array([70, 40])]
    assert solve(network, memory=usage, memory_limit=150).statistics["least_memory"] == 70
    monkeypatch.setattr(memory, "_lightest", lambda *_: (100.0, np.array([1, 0]), False))  # cut off
    found = solve(network, memory=usage, memory_limit=150)
    assert (found.cost, found.optimal) == (2.0, True)
    assert "least_memory" not in found.statistics


def test_the_least_named_is_enough_where_bytes_are_no_whole_numbers():
    network = CostNetwork([[1, 9], [1, 9]], [])
    usage = [np.array([3.0, 0.7]), np.array([3.0, 0.6])]
    with pytest.raises(InfeasibleError, match="limit of 1 bytes per device: the least any strategy needs is 2;"):
        solve(network, memory=usage, memory_limit=1.25)
    assert solve(network, memory=usage, memory_limit=2).assignment == (1, 1)


def test_no_limit_at_all():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    solution = solve(network, memory=bytes_of(network, 0), memory_limit=float("inf"))
    assert solution.optimal
    assert solution.cost == solve(network).cost


def test_wrong_memory():
    network = CostNetwork([[1, 9], [1]], [])
    good = [np.zeros(2), np.zeros(1)]
    for usage, limit in ((None, 5), (good, None), (good[:1], 5), ([np.zeros(3), np.zeros(1)], 5),
                         ([np.array([0, -1]), np.zeros(1)], 5), ([np.array([0, np.nan]), np.zeros(1)], 5), (good, -1)):
        with pytest.raises(UsageError):
            solve(network, memory=usage, memory_limit=limit)


def test_bytes_at_the_ends_of_float():
    with pytest.raises(UsageError, match="memory of layer 0"):
        solve(CostNetwork([[1.0], [1.0]], []), memory=[[1e308]] * 2, memory_limit=1e9)
    every = np.arange(3)
    network = CostNetwork([[1e10] * 3] * 2, [
        NetworkEdge(0, 1, [[0, 0, 0], [0, 5e9, 1e11], [0, 1e11, 1]], every, every)])
    found = solve(network, memory=[np.array([1e-305, 0, 0])] * 2, memory_limit=0.0, time_limit=5)
    assert found.assignment == (2, 2) or not found.optimal


@pytest.mark.parametrize(("options", "says"), [
    ({"memory": 5, "memory_limit": 5}, "memory of 5; give one vector of bytes per layer"),
    ({"memory": [np.zeros(2), "abc"], "memory_limit": 5}, "memory of layer 1: 'abc'; give a number of bytes"),
    ({"memory": [[0, 0], [{}]], "memory_limit": 5}, r"memory of layer 1: \[{}\]; give a number of bytes"),
    ({"memory": [np.zeros(2), np.zeros(1)], "memory_limit": "a"}, "memory limit of 'a'; give a number of bytes"),
    ({"memory": [np.zeros(2), np.zeros(1)], "memory_limit": 5, "initial": 5}, "assignment of '5'; give one")])
def test_what_is_no_memory_is_said(options, says):
    with pytest.raises(UsageError, match=says):
        solve(CostNetwork([[1, 9], [1]], []), **options)


def test_generous_limit_changes_nothing():
    network = CostNetwork.load(INSTANCES / "transformer_8.npz")
    free = solve(network)
    solution = solve(network, memory=bytes_of(network, 0), memory_limit=1e15, time_limit=600)
    assert solution.optimal
    assert solution.cost == free.cost


@pytest.mark.parametrize("name", ["alexnet_32", pytest.param("transformer_4", marks=pytest.mark.slow)])
def test_ends_at_the_gap_asked_for(name):
    """Also while the multiplier is looked for, which is most of the work where a few per mille are enough."""
    network = CostNetwork.load(INSTANCES / f"{name}.npz")
    usage = bytes_of(network, 1)
    limit = (memory.least_memory(network, usage)[0] + needed(usage, solve(network).assignment)) / 2
    exact = memory.minimise_within(network, usage, limit, time_limit=600)
    near = memory.minimise_within(network, usage, limit, time_limit=600, gap=0.2)
    assert exact.optimal
    assert near.gap <= 0.2
    assert near.lower_bound <= exact.cost * (1 + 1e-10)
    assert needed(usage, near.assignment) <= limit
    assert exact.cost * (1 - 1e-10) <= near.cost <= exact.cost * 1.2 * (1 + 1e-10)
    assert near.statistics["solves"] <= 2


@pytest.mark.parametrize("name", ["alexnet_8", "alexnet_32", "rnnlm_8"])
def test_frontier(name, tmp_path):
    network = CostNetwork.load(INSTANCES / f"{name}.npz")
    usage = bytes_of(network, 1)
    points = frontier.frontier(network, usage, 6, time_limit=600)
    costs = [point.solution.cost for point in points]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == solve(network).cost
    assert costs[0] > costs[-1]
    assert points[0].memory == pytest.approx(memory.least_memory(network, usage)[0])
    for point in points:
        assert point.solution.optimal
        assert needed(usage, point.solution.assignment) == pytest.approx(point.memory)
        assert point.memory <= point.memory_limit
    frontier.plot_frontier(points, tmp_path / "frontier.png", name)
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UsageError, match="end its name"):
        frontier.plot_frontier(points, tmp_path / "frontier.docx")


def test_the_least_of_a_frontier_is_sought_within_the_time(monkeypatch):
    network, budgets = CostNetwork.load(INSTANCES / "alexnet_8.npz"), []

    def noted(network_, usage, budget=None):
        budgets.append(budget)
        return memory.least_memory(network_, usage, budget)
    monkeypatch.setattr(frontier, "least_memory", noted)
    frontier.frontier(network, bytes_of(network, 1), 2, time_limit=600)
    (budget,) = budgets
    assert time.perf_counter() < budget.deadline <= time.perf_counter() + 600


def test_limits_of_a_frontier():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    usage = bytes_of(network, 1)
    points = frontier.frontier(network, usage, fractions=(1, 0, 0.5), time_limit=600)
    ends = memory.least_memory(network, usage)[0], needed(usage, solve(network).assignment)
    assert [point.memory_limit for point in points] == pytest.approx([ends[0], sum(ends) / 2, ends[1]])
    for wrong in ((), (0, 1.5), (-0.1,), (float("nan"),)):
        with pytest.raises(UsageError, match="from 0"):
            frontier.frontier(network, usage, fractions=wrong)
    with pytest.raises(UsageError, match="at least two"):
        frontier.frontier(network, usage, 1)


def test_a_bound_for_less_memory_is_none_for_more(monkeypatch):
    """Where a search with more memory finds nothing cheaper in its time, the frontier keeps what it has, but nothing
    of its proof."""
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    usage = bytes_of(network, 1)

    def hurried(network, memory_, limit, **options):
        solution = memory.minimise_within(network, memory_, limit, **options)
        if limit == least:
            return solution
        worst = tuple(int(np.argmax(vector)) for vector in network.vectors)
        return dataclasses.replace(solution, assignment=worst, cost=network.cost(worst), lower_bound=1.0, gap=1.0,
                                   optimal=False)
    least = memory.least_memory(network, usage)[0]
    monkeypatch.setattr(frontier, "minimise_within", hurried)
    first, second = frontier.frontier(network, usage, 2, time_limit=600)
    assert first.solution.optimal
    assert (second.solution.cost, second.solution.assignment) == (first.solution.cost, first.solution.assignment)
    assert second.memory == first.memory
    assert not second.solution.optimal
    assert second.solution.lower_bound == 1
    assert second.solution.gap == pytest.approx(1)


def test_time_limit_is_honest(monkeypatch):
    """However early it strikes: by a clock that moves on by a second whenever it is looked at."""
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    usage = bytes_of(network, 2)
    least, _ = memory.least_memory(network, usage)
    limit = least + 0.5 * (needed(usage, solve(network).assignment) - least)
    optimum = solve(network, memory=usage, memory_limit=limit, time_limit=600)
    assert optimum.optimal
    looks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(looks)))
    bounds, proven = [], []
    for seconds in (1, 10, 20, 40, 80, 1000):
        solution = solve(network, memory=usage, memory_limit=limit, time_limit=seconds)
        assert needed(usage, solution.assignment) <= limit
        assert solution.cost == network.cost(solution.assignment)
        assert solution.lower_bound <= optimum.cost * (1 + 1e-12)
        assert solution.cost >= optimum.cost * (1 - 1e-12)
        assert solution.optimal == (solution.gap == 0)
        assert solution.gap == pytest.approx((solution.cost - solution.lower_bound) / solution.cost)
        bounds.append(solution.lower_bound)
        proven.append(solution.optimal)
    assert bounds[0] < bounds[-1] == optimum.lower_bound
    assert not proven[0]
    assert proven[-1]


def test_what_is_prohibitively_dear_makes_no_proof_easier():
    network = CostNetwork([np.array([0., 1e13]), np.array([0., 8.5]), np.array([0., 6.25]), np.array([0., 6.25])], [])
    usage = [np.array([1e12, 0.]), np.array([6., 0.]), np.array([5., 0.]), np.array([5., 0.])]
    found = solve(network, memory=usage, memory_limit=1e12 + 10)
    assert found.cost == 8.5 or not found.optimal
    assert found.lower_bound <= 8.5


def test_neighbouring_floats_are_told_apart():
    packed = pack(CostNetwork([np.zeros(3)], []).normalized())
    search = memory._Search(packed, np.array([0.0, 1 + 2.0 ** -52, 1 + 2.0 ** -51]), 2.0, Budget(), 0.0, None)
    parts = search.halves(np.array([False, True, True]), None, None)
    assert [part.tolist() for part in parts] == [[False, True, False], [False, False, True]]


def test_a_frontier_of_a_network_that_is_not_valid():
    network = CostNetwork([[0.0, 0.0]] * 2, [NetworkEdge(0, 1, [[0.0]], [0, 1], [0, 1])])
    with pytest.raises(UsageError, match="class"):
        frontier.frontier(network, [np.array([1.0, 0.0])] * 2, 2)


def test_what_a_best_of_cancelling_parts_left_out_is_not_proven(monkeypatch):
    """Nodes are left out by a margin of 1e-10 of the parts of the best so far, which may be more than all that a later
    best costs: 5 is in the one that is left out while 10 is the best."""
    every, apart = np.arange(3), np.where(np.eye(3) > 0, 0.0, np.inf)
    network = CostNetwork([np.array([1e11, 5.0, 9.0]), np.array([10 - 1e11, 0.0, 0.0])],
                          [NetworkEdge(0, 1, apart, every, every)])

    def dual(self, active, multiplier, rounds):  # bounds that hold, and what is met on the way
        if active[:3].all():
            return -30.0, 0.0
        if active[1]:
            return 4.0, 0.0
        self.consider(self.point(np.array([2, 2])))
        return 9.0, 0.0
    monkeypatch.setattr(memory._Search, "dual", dual)
    monkeypatch.setattr(memory, "reduced_costs", lambda packed, budget: (-np.inf, np.zeros(6)))
    found = memory.minimise_within(network, [np.array([0.0, 1.0, 2.0]), np.zeros(3)], 2.0)
    assert found.cost == 9.0
    assert not found.optimal
    assert found.lower_bound <= 5.0


def test_what_was_the_best_before_anything_was_left_out_spoils_no_proof(monkeypatch):
    """The lightest has parts that cancel, and the first node meets what is cheaper and proves it."""
    every, apart = np.arange(3), np.where(np.eye(3) > 0, 0.0, np.inf)
    network = CostNetwork([np.array([1e11, 5.0, 9.0]), np.array([10 - 1e11, 0.0, 0.0])],
                          [NetworkEdge(0, 1, apart, every, every)])

    def dual(self, active, multiplier, rounds):
        self.consider(self.point(np.array([1, 1])))
        return 5.0, 0.0
    monkeypatch.setattr(memory._Search, "dual", dual)
    found = memory.minimise_within(network, [np.array([0.0, 1.0, 2.0]), np.zeros(3)], 2.0)
    assert (found.cost, found.optimal, found.lower_bound) == (5.0, True, 5.0)


def test_progress_tells_no_bound_above_the_best():
    """A part in which nothing fits has none below infinity."""
    told, network = [], CostNetwork([np.array([0.0, 2.5]), np.array([0.0, 5.5])], [])
    found = solve(network, memory=[np.array([6.0, 0.0]), np.array([5.0, 0.0])], memory_limit=6.0,
                  progress=lambda *known: told.append(known))
    assert (found.cost, found.optimal) == (2.5, True)
    assert told
    assert all(bound <= cost for _, cost, bound in told)


def test_what_the_first_node_ruled_out_is_not_proven(monkeypatch):
    """By the margin of the best so far, 20, all but one are ruled out at once: also what costs 5, of a bound of -5."""
    every, apart = np.arange(3), np.where(np.eye(3) > 0, 0.0, np.inf)
    network = CostNetwork([np.array([1e11, 5.0, 9.0]), np.array([10 - 1e11, 0.0, 0.0])],
                          [NetworkEdge(0, 1, apart, every, every)])
    monkeypatch.setattr(memory._Search, "dual", lambda self, active, multiplier, rounds: (-30.0, 0.0))
    monkeypatch.setattr(memory, "reduced_costs", lambda packed, budget: (
        0.0, np.array([0.0, -5.0, -30.0, 0.0, -5.0, -30.0])))
    found = memory.minimise_within(network, [np.array([0.0, 1.0, 2.0]), np.zeros(3)], 2.0)
    assert found.cost == 9.0
    assert not found.optimal
    assert found.lower_bound <= 5.0


def test_a_frontier_keeps_what_its_ends_were_found_by(monkeypatch):
    """Searches within limits that have no time know the lightest of all, and what they are told."""
    network = CostNetwork([np.array([0.0, 1.0]), np.array([0.0, 2.0])], [])
    usage = [np.array([4.0, 1.0]), np.array([6.0, 1.0])]

    def without_time(network_, usage_, limit, *, initial=None, **_):
        best = min([(1, 1), *([] if initial is None else [tuple(initial)])], key=network.cost)
        assert needed(usage, best) <= limit
        return Solution(best, network.cost(best), -np.inf, np.inf, False, 0.0, {"memory": needed(usage, best)})
    monkeypatch.setattr(frontier, "minimise_within", without_time)
    points = frontier.frontier(network, usage, 2, time_limit=600)
    assert [(point.memory, point.solution.cost) for point in points] == [(2.0, 3.0), (10.0, 0.0)]


@pytest.mark.parametrize("given", [["7", "2"], [b"7", b"2"]])
def test_words_of_digits_are_no_bytes(given):
    with pytest.raises(UsageError, match=r"memory of layer 0: .*; give a number of bytes"):
        solve(CostNetwork([[1.0, 9.0]], []), memory=[given], memory_limit=5)


@pytest.mark.parametrize("word", ["2", b"2"])
def test_words_of_digits_among_objects_are_no_bytes(word):
    with pytest.raises(UsageError, match=r"memory of layer 0: .*; give a number of bytes"):
        solve(CostNetwork([[1.0, 9.0]], []), memory=[np.array([7.0, word], object)], memory_limit=5)


@pytest.mark.parametrize("usage", [None, 5, [["7", "2"]], [[{}, 1]]])
def test_what_is_no_memory_of_a_frontier_is_said(usage):
    with pytest.raises(UsageError, match=r"memory of .*; give "):
        frontier.frontier(CostNetwork([[1.0, 9.0]], []), usage, 2, time_limit=600)


@pytest.mark.parametrize("wrong", [{"points": "3"}, {"points": 2.5}, {"fractions": "ab"}, {"fractions": 0.5},
                                   {"fractions": ("x",)}, {"gap": "x"}, {"gap": -1.0}])
def test_what_is_no_frontier_is_said(wrong):
    with pytest.raises(UsageError):
        frontier.frontier(CostNetwork([[1.0, 9.0]], []), [np.array([2.0, 1.0])], **wrong)


def test_what_is_charged_below_the_root_makes_no_proof_easier():
    """Multipliers grow from part to part, until what they charge is rounded by more than costs differ by."""
    large, ones = 2.0 ** 52, 60
    network = CostNetwork([[3.2, 0.0], *[[5.0, 0.0]] * ones, [1.0, 0.0], [0.8, 0.0], [0.8, 0.0],
                           *[[0.0, 1.45]] * 7], [])
    usage = [np.array(entry) for entry in ([0.0, large], *[[0.0, 1.0]] * ones, [0.0, 6.0], [0.0, 5.0], [0.0, 5.0],
                                           *[[0.0, 11.0]] * 7)]
    best, limit = (1, *[1] * ones, 0, 1, 1, *[0] * 7), large + ones + 10
    assert (network.cost(best), needed(usage, best)) == (1.0, limit)
    found = solve(network, memory=usage, memory_limit=limit, time_limit=600)
    assert found.cost == 1.0 or not found.optimal
    assert found.lower_bound <= 1.0


@pytest.mark.parametrize("path", [5, b"frontier.png", None])
def test_what_is_no_path_of_a_picture_is_said(path):
    with pytest.raises(UsageError, match="is no path"):
        frontier.plot_frontier([], path)
