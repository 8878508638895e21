"""What a search may hold: parts that wait, plans of elimination, strategies and copies of the network."""

import dataclasses
import itertools

import numpy as np
import pytest
from hard_networks import dense, only_branching

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search import branch_and_bound, part, solve
from pase_mtf.search import waiting as waiting_parts
from pase_mtf.search.budget import Budget
from pase_mtf.search.elimination_plan import plan_elimination
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import Potentials, pack


def test_parts_that_wait_stay_within_their_memory():
    waiting = waiting_parts.Waiting(80, 10 * (80 / 8 + waiting_parts._BYTES_PER_NODE))
    rng = np.random.default_rng(0)
    parts = [(float(bound), rng.random(80) < 0.5) for bound in rng.permutation(30)]
    for bound, active in parts:
        waiting.add(bound, active)
    assert waiting.bound == 0
    # Those that found no room come first, the newest before the others; then the best bound.
    order = [waiting.next(np.inf) for _ in parts]
    expected = parts[:9:-1] + sorted(parts[:10], key=lambda part: part[0])
    assert [bound for bound, _ in order] == [bound for bound, _ in expected]
    for (_, found), (_, active) in zip(order, expected, strict=True):
        np.testing.assert_array_equal(found, active)
    assert waiting.next(np.inf) is None
    assert waiting.bound == np.inf


def test_little_room_for_what_waits_changes_nothing(monkeypatch):
    only_branching(monkeypatch)
    expected = solve(dense(4, 7, 6), certificate=False)
    monkeypatch.setattr(branch_and_bound, "_WAITING", 0.0)
    found = solve(dense(4, 7, 6), certificate=False)
    assert found.optimal
    assert found.cost == expected.cost


@pytest.mark.parametrize("method", ["exact", "k_best"])
def test_too_little_memory_is_said(method):
    network = dense(5)
    with pytest.raises(UsageError, match=r"search memory of 5000 bytes.* raise"):
        solve(network, method, search_memory=5000)
    for wrong in (0, -1, float("nan"), "2GB", True):
        with pytest.raises(UsageError, match="search memory of"):
            solve(network, method, search_memory=wrong)


def test_stops_where_no_part_fits(monkeypatch):
    """Enough for the passes, not for the parts: an honest gap, and the reason."""
    only_branching(monkeypatch)
    network = dense(6)
    best = solve(network, certificate=False)
    packed = pack(network.normalized())
    found = solve(network, search_memory=packed.bytes + 40 * len(packed.unary) + 16 * packed.potentials + 3000)
    assert found.statistics["stopped"] == "memory"
    assert not found.optimal
    assert found.lower_bound <= best.cost <= found.cost
    assert 0 < found.gap < 1


def test_memory_that_is_used_up_before_anything_was_found(monkeypatch):
    only_branching(monkeypatch)
    rng, every = np.random.default_rng(0), np.arange(8)
    network = CostNetwork([rng.random(8) for _ in range(9)], [
        NetworkEdge(i, j, np.where(rng.random((8, 8)) < 0.5, np.inf, rng.random((8, 8))), every, every)
        for i, j in itertools.combinations(range(9), 2)])
    with pytest.raises(InfeasibleError, match=r"found within 5.6e\+04 bytes; raise search_memory") as refusal:
        solve(network, search_memory=56_000)
    assert not refusal.value.proven


def test_plans_end_at_their_limits():
    sizes, pairs = [3] * 8, list(itertools.combinations(range(8), 2))
    plan = plan_elimination(sizes, pairs)
    assert plan.complete
    assert plan.order == tuple(range(8))
    assert plan.entries == sum(3 ** count for count in range(8))
    assert plan.operations == 3 * plan.entries
    assert plan.largest == 3 ** 7
    for limits in ({"most_operations": plan.operations - 1}, {"most_entries": plan.entries - 1}):
        assert not plan_elimination(sizes, pairs, **limits).complete
    short = plan_elimination(sizes, pairs, most_entries=100)
    assert short.order == (0,)
    assert short.scopes == (tuple(range(1, 8)),)
    wide = plan_elimination([50] * 200, list(itertools.combinations(range(200), 2)))
    assert wide.entries == np.inf


def forbidden_in_turn(layers=20, configurations=300):
    """A chain whose layers share a matrix, and each of which forbids another of its configurations."""
    rng, every = np.random.default_rng(0), np.arange(configurations)
    costs, vectors = rng.random((configurations, configurations)), [rng.random(configurations) for _ in range(layers)]
    for layer, vector in enumerate(vectors):
        vector[layer] = np.inf
    return CostNetwork(vectors, [NetworkEdge(layer, layer + 1, costs, every, every) for layer in range(layers - 1)])


@pytest.mark.parametrize("method", ["exact", "memory", "k_best"])
def test_what_is_forbidden_need_not_be_left_out(method):
    """Without it layers would no longer share their matrix: 13.6 MB of copies."""
    network, options = forbidden_in_turn(), {}
    if method == "memory":
        method, options = "exact", {"memory": [np.ones(300)] * 20, "memory_limit": 20.0}
    found = solve(network, method, search_memory=1e7, **options)
    assert found.optimal
    assert found.cost == solve(network, certificate=False).cost
    if method == "k_best":
        assert found.statistics["complete"]
        assert found.statistics["strategies"] == solve(network, method).statistics["strategies"]


@pytest.mark.parametrize("method", ["exact", "memory", "k_best"])
def test_what_has_to_be_left_out_and_does_not_fit_is_refused_with_the_bytes_that_it_takes(method):
    """A pair that an edge forbids."""
    network, options = forbidden_in_turn(), {}
    costs = network.edges[0].matrix.copy()
    costs[5, 7] = np.inf
    network = CostNetwork(network.vectors, [dataclasses.replace(edge, matrix=costs) for edge in network.edges])
    if method == "memory":
        method, options = "exact", {"memory": [np.ones(300)] * 20, "memory_limit": 20.0}
    with pytest.raises(UsageError, match=r"of 1e\+07 bytes: this network needs 1\.\d+e\+07 at least; raise"):
        solve(network, method, search_memory=1e7, **options)
    assert solve(network, method, search_memory=1e8, **options).optimal


def test_more_strategies_than_fit():
    network = dense(7)
    with pytest.raises(UsageError, match=r"k of 100000000.*ask for fewer"):
        solve(network, "k_best", k=10 ** 8)
    few = CostNetwork([[1.0, 2.0], [3.0, 4.0]], [])
    assert len(solve(few, "k_best", k=10 ** 8).statistics["strategies"]) == 4
    every = solve(network, "k_best", k=40)
    some = solve(network, "k_best", k=40, search_memory=130_000)
    assert every.statistics["complete"]
    assert not some.statistics["complete"]
    found = some.statistics["strategies"]
    assert 0 < len(found) < 40
    assert found == every.statistics["strategies"][:len(found)]


def test_a_network_counts_once_against_the_memory():
    """A part that is not copied is no part of the room; of one that is, what takes its place has to fit beside it."""
    costs, every = np.random.default_rng(0).random((60, 60)), np.arange(60)
    packed = pack(CostNetwork([costs[0], costs[1]], [NetworkEdge(0, 1, costs, every, every)]).normalized())
    few = np.zeros(120, bool)
    few[[0, 1, 60, 61]] = True
    for taken, fits in ((0, True), (packed.bytes, False)):
        whole = part.Part.of(packed, Potentials.none(packed), -np.inf, packed.bytes, taken)
        whole.state = whole.state._replace(active=few, active_at=packed.first[:-1].copy())
        assert whole.reduce(Budget(), packed.bytes) == fits
        assert len(whole.p.unary) == (4 if fits else 120)
        assert whole.taken == (whole.p.bytes if fits else packed.bytes)


def test_what_does_not_fit_is_searched_as_it_was(monkeypatch):
    """Exact passes over all of a large network cost much, and look at what has been pruned as well."""
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part, "_READ", 0)
    monkeypatch.setattr(part, "_REREAD", 0)
    costs, every = np.random.default_rng(0).random((60, 60)), np.arange(60)
    packed = pack(CostNetwork([costs[0], costs[1]], [NetworkEdge(0, 1, costs, every, every)]).normalized())
    most = np.ones(120, bool)
    most[[0, 60]] = False
    whole = part.Part.of(packed, Potentials.none(packed), -np.inf, 2 * packed.bytes, packed.bytes)
    whole.state = whole.state._replace(active=most, active_at=packed.first[:-1].copy())
    assert len(whole.steps.counts) == len(packed.values)
    assert not whole.reduce(Budget(), packed.bytes + 2 * len(packed.values))
    assert len(whole.steps.counts) == len(packed.values)
    assert whole.p is packed


def test_a_look_among_the_promising_has_what_the_part_leaves(monkeypatch):
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part.Part, "affordable", lambda *_: False)
    search, asked = branch_and_bound.Minimiser(pack(dense(6).normalized())), []
    own = search._part(-np.inf, np.ones(len(search.root.unary), bool))
    search._pass(own, 1)

    def noted(few, *, budget, **_):
        asked.append(budget.memory)
        raise UsageError("no room")
    monkeypatch.setattr(branch_and_bound, "Minimiser", noted)
    room = search._room * (1 - branch_and_bound._WAITING)
    search._look(own, room)
    assert own.taken > 0
    assert asked[0] <= room - own.taken
