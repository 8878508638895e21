"""What a search may use: time by a clock of our own, depth not at all, and numbers at the ends of what there are."""

import functools
import itertools
import math
import sys
import time

import numpy as np
import pytest
from hard_networks import dense, only_branching
from random_networks import random_network
from small_graphs import perceptron

from pase_mtf.errors import InfeasibleError, PaseError, UsageError
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.search import branch_and_bound, certify, check_certificate, memory, part, registry, solve
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.budget import Budget
from pase_mtf.search.messages import message_passes
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import Potentials, pack, reduce
from pase_mtf.search.pass_state import PassState
from pase_mtf.search.peak import minimise_within_peak
from pase_mtf.search.pulls import EXACTLY
from pase_mtf.strategy.find import find_strategy


@pytest.fixture
def clock(monkeypatch):
    """Moves on by a second whenever it is looked at; holds how often that was."""
    looks = itertools.count()
    seen = [0]

    def look():
        seen[0] = next(looks)
        return float(seen[0])
    monkeypatch.setattr(time, "perf_counter", look)
    return seen


def _memory(network):
    rng = np.random.default_rng(0)
    usage = [rng.random(size) * 1e9 for size in network.sizes]
    return {"memory": usage, "memory_limit": 0.6 * sum(entry.max() for entry in usage)}


@pytest.fixture(scope="module")
def compiled():
    """Numba, too, looks at the clock while it compiles, or loads what it has compiled: so that it has. What that takes
    may be all of a search's time: more than one follows."""
    network = dense(0)
    with pytest.MonkeyPatch.context() as patch:
        only_branching(patch)
        for options in 3 * [{}, _memory(network)]:
            solve(network, "exact", time_limit=0.3, **options)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("method", ["exact", "memory", "k_best", "mcmc"])
@pytest.mark.parametrize("limit", [1, 7, 30, 50, 75, 120, 400])
def test_every_step_looks_at_the_clock(method, limit, clock, monkeypatch):
    """Once the time is over, hardly a step follows: normal form, passes, branching and certificate all look."""
    only_branching(monkeypatch)
    network, options = dense(0), {}
    if method == "memory":
        method, options = "exact", _memory(network)
    begin = clock[0]
    try:
        solution = solve(network, method, time_limit=limit, **options)
    except InfeasibleError:
        assert method == "k_best"
    else:
        assert solution.cost == network.cost(solution.assignment)
        assert not solution.optimal or method != "exact" or clock[0] - begin <= limit
    assert clock[0] - begin <= limit + 12


def test_the_clock_of_compiled_code_is_believed(monkeypatch):
    """It went on for ever where Python's stands still, as in these tests on a slow machine."""
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    with pytest.raises(TimeoutError):
        dense(0).normalized(budget=Budget(deadline=5.0))


@pytest.fixture
def hungry(monkeypatch):
    """Every search takes all of the time that it is given, by a clock that nothing else moves; holds what it shows."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name in ("exact", "k_best"):
        @functools.wraps(registry._METHODS[name])
        def search(network, *, time_limit, plain=registry._METHODS[name], **options):
            now[0] += time_limit
            return plain(network, time_limit=None, **options)
        monkeypatch.setitem(registry._METHODS, name, search)
    return now


@pytest.mark.parametrize("seed", range(8))
def test_all_searches_for_a_peak_share_their_time(seed, hungry):
    rng, network = np.random.default_rng(seed), dense(seed, 6, 6)
    sums = {key: [rng.random(6) for _ in network.sizes] for key in (1, 2, 3)}
    asked, unproven = [], True

    def peak(choice):
        asked.append(choice)
        return max((sum(vector[one] for vector, one in zip(vectors, choice, strict=True)), key)
                   for key, vectors in sums.items())
    try:
        found = minimise_within_peak(network, sums.get, peak, 2.4, time_limit=3.0)
        assert peak(found.assignment)[0] <= 2.4 * (1 + 1e-9)
    except InfeasibleError as refusal:
        unproven = not refusal.proven
    assert unproven
    assert len(asked) > 2
    assert 2.0 < hungry[0] <= 3.0


@pytest.mark.parametrize("simulate", [0, 5])
def test_all_searches_for_a_strategy_share_their_time(simulate, hungry):
    machine = Machine("slow links", dict.fromkeys(
        ("matmul", "convolution", "pointwise", "reduction", "gather"), 1e9), 1e9, 1e12, 1e-6, (Link(64, 1e6, 1e-6),))
    graph = perceptron()
    free = find_strategy(graph, 4, machine, simulate=0, time_limit=1e-3)
    hungry[0] = 0.0
    found = find_strategy(graph, 4, machine, simulate=simulate, memory_limit=0.9 * free.memory_bytes, time_limit=3.0)
    assert found.memory_bytes <= 0.9 * free.memory_bytes
    assert 1.5 <= hungry[0] <= 3.0 + 1e-6
    hungry[0] = 0.0
    find_strategy(graph, 4, machine, simulate=simulate, time_limit=3.0)
    assert hungry[0] == pytest.approx(3.0)


def test_an_assignment_is_brought_within_memory_by_the_clock():
    network = dense(0, 30, 30)
    packed = pack(network.normalized())
    usage = np.random.default_rng(0).random(900)
    start = np.full(30, 29)
    for end, repaired in ((0.0, False), (np.inf, True)):
        choice = start.copy()
        used = memory._repair(packed, usage, 3.0, choice, end)
        assert (used <= 3.0) == repaired == (choice != start).any()


def test_the_least_memory_within_a_budget():
    network = all_but_one_forbidden()
    usage = [np.arange(300.0)] * 2
    assert memory.least_memory(network, usage) == (598.0, (299, 299))
    with pytest.raises(InfeasibleError, match="not found in time") as refusal:
        memory.least_memory(network, usage, Budget(time.perf_counter()))
    assert not refusal.value.proven


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_time_is_a_positive_number(wrong):
    with pytest.raises(UsageError, match="give a positive number, or none"):
        solve(dense(0, 3, 2), time_limit=wrong)
    for much in (10 ** 5000, float("inf")):
        assert solve(dense(0, 3, 2), time_limit=much).optimal


def all_but_one_forbidden():
    """Only the last configuration of every layer, of all 90,000 assignments the last one, is finite."""
    costs = np.where(np.add.outer(np.arange(300), np.arange(300)) < 598, np.inf, 1.0)
    return CostNetwork([np.arange(300.0)] * 2, [NetworkEdge(0, 1, costs, np.arange(300), np.arange(300))])


@pytest.mark.parametrize(("method", "options"), [
    ("k_best", {"time_limit": 1e-9}), ("mcmc", {"proposals": 1}), ("brute_force", {"time_limit": 1e-9}),
    ("exact", {"time_limit": 1e-9})])
def test_none_in_time_is_not_none(method, options):
    """Some count what was merely not found, as long as they are not told that it is proven."""
    network = all_but_one_forbidden()
    with pytest.raises(InfeasibleError) as refusal:
        solve(network, method, **options)
    assert not refusal.value.proven
    assert solve(network, method, **{name: 20.0 for name in options if name == "time_limit"}).cost == 599.0


def test_a_pass_stops_in_the_middle():
    network = dense(1)
    best = solve(network).cost
    p = reduce(pack(network.normalized()), np.ones(sum(network.sizes), bool)).network
    state = PassState.start(p, Potentials.none(p))
    nothing = message_passes(p, EXACTLY, state, np.inf, 0.0, -np.inf, 5, 0.0, 0.0, 2)
    assert nothing.bound == -np.inf
    assert nothing.passes == 0
    assert best <= nothing.cost < np.inf
    assert p.cost(state.best)[0] == pytest.approx(nothing.cost)
    whole = message_passes(p, EXACTLY, state, np.inf, 0.0, -np.inf, 5, 1e9, 0.0, 2)
    assert whole.passes == 5
    assert whole.bound <= best


def test_a_small_network_has_an_answer_however_little_time_there_is(monkeypatch):
    """It is eliminated at once, in few sums; but in as many short rows, which take some milliseconds."""
    network = dense(0, 15, 2)
    best = solve(network).cost

    def late(*given):
        raise TimeoutError
    for limit in (*np.geomspace(2e-4, 2e-2, 60), None):
        if limit is None:
            monkeypatch.setattr(branch_and_bound, "eliminate", late)
        found = solve(network, time_limit=limit)
        assert found.cost == network.cost(found.assignment) < np.inf
        assert found.lower_bound <= best <= found.cost
    assert not found.optimal
    assert np.isfinite(found.lower_bound)


def test_a_bound_without_a_whole_pass():
    """Where not even one pass is finished, what is said is still a bound."""
    looked_at, seeds = 0, range(0, 180, 5)
    for seed in seeds:
        network = random_network(seed, 300)
        try:
            best = solve(network, "brute_force").cost
            search = Minimiser(pack(network.normalized()), budget=Budget(time.perf_counter()), unit=0.0)
        except (InfeasibleError, TimeoutError):
            continue
        looked_at += 1
        search.run()
        assert search.bound <= best + 1e-12 * abs(best), seed
        assert np.isfinite(search.bound), seed
    assert looked_at > len(seeds) / 2


def test_matrices_of_fewer_classes_are_not_copied_beyond_the_time():
    """What they are is known by what they have: the least and the greatest entry, too."""
    p = pack(dense(3).normalized())
    some = np.ones(len(p.unary), bool)
    some[::3] = False
    found = reduce(p, some.copy()).network
    assert len(found.values) < len(p.values)
    assert (found.least, found.most) == (min(found.values.min(), found.unary.min()),
                                         max(found.values.max(), found.unary.max()))
    with pytest.raises(TimeoutError):
        reduce(p, some.copy(), budget=Budget(time.perf_counter()))
    with pytest.raises(MemoryError):
        reduce(p, some.copy(), budget=Budget(memory=8 * len(found.values) - 1))


def test_nothing_calls_itself(monkeypatch):
    """The search among promising configurations met the same part again, and called itself until Python gave up."""
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part, "_READ", 0)
    monkeypatch.setattr(part, "_REREAD", 0)
    only_branching(monkeypatch)
    depth, deepest = [0], [0]
    run = Minimiser.run

    def counted(self, *arguments, **options):
        depth[0] += 1
        deepest[0] = max(deepest[0], depth[0])
        try:
            run(self, *arguments, **options)
        finally:
            depth[0] -= 1
    monkeypatch.setattr(Minimiser, "run", counted)
    assert solve(dense(2, 7, 5), certificate=False).optimal
    assert deepest[0] <= 2


def test_certificates_of_any_depth(monkeypatch):
    """The making of a certificate that splits often needs no more of Python's stack than one that never does."""
    monkeypatch.setattr(certify, "_MOST_SUMS", 0)
    monkeypatch.setattr(certify, "_MOST_LARGE_SUMS", 0)
    monkeypatch.setattr(certify, "_MOST_PASSES", 1)
    network = dense(3, 8, 6)
    solution = solve(network, certificate=False)
    packed = pack(network.normalized())
    frame, used = sys._getframe(), 0
    while frame is not None:
        frame, used = frame.f_back, used + 1
    prove = certify._prove
    deepest = [0]

    def watched(*arguments):
        frame, now = sys._getframe(), 0
        while frame is not None:
            frame, now = frame.f_back, now + 1
        deepest[0] = max(deepest[0], now - used)
        return prove(*arguments)
    monkeypatch.setattr(certify, "_prove", watched)
    proof = certify.certify(packed, solution.cost, 1e-12 * solution.cost, Budget())
    assert deepest[0] <= 3

    def depth(part):
        return 1 + max(map(depth, part.proofs), default=0)
    assert depth(proof) > 4
    assert certify.certify(packed, solution.cost, 1e-12 * solution.cost, Budget(memory=1000)) is None
    assert certify.certify(packed, solution.cost, 1e-12 * solution.cost, Budget(time.perf_counter())) is None


def test_many_layers_without_edges():
    rng = np.random.default_rng(0)
    vectors = [rng.random(500) for _ in range(5000)]
    solution = solve(CostNetwork(vectors, []))
    assert solution.optimal
    assert solution.cost == pytest.approx(sum(vector.min() for vector in vectors))


@pytest.mark.parametrize("unit", [5e-324, 1e-320, 1e-300, 1e285])
@pytest.mark.parametrize("seed", [0, 3, 13, 31])
def test_costs_at_the_ends_of_float(unit, seed, monkeypatch):
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part, "_READ", 0)
    monkeypatch.setattr(part, "_REREAD", 0)
    rng, every = np.random.default_rng(seed), np.arange(4)

    def draw(*shape):
        return rng.integers(0, 50, shape) * unit
    network = CostNetwork([draw(4) for _ in range(6)], [NetworkEdge(i, j, draw(4, 4), every, every)
                                                       for i, j in itertools.combinations(range(6), 2)])
    expected = solve(network, "brute_force").cost
    for method in ("exact", "pase", "k_best"):
        solution = solve(network, method)
        assert solution.cost == pytest.approx(expected, rel=1e-12, abs=0.0)  # else 1e-12, more than most of these costs
    if unit >= 1e-300:  # below, the checker has no room for rounding, and says so
        check_certificate(network, solve(network))
    assert solve(network, "mcmc", proposals=2000).cost >= expected * (1 - 1e-12)


def test_costs_that_cannot_be_added_up():
    """They were "cost inf" for ever."""
    for cost in (1.7e308, -1.7e308, 2e290):
        for network in (CostNetwork([[cost, 1.0], [1.0, 2.0]], []), CostNetwork([[1.0], [1.0]], [NetworkEdge(
                0, 1, [[cost, np.inf]], [0], [0])])):
            with pytest.raises(UsageError, match="larger unit"):
                solve(network)
    assert solve(CostNetwork([[1e290, np.inf]], [])).cost == 1e290


def test_brute_force_on_a_large_network():
    with pytest.raises(PaseError, match="about 1e1505 assignments"):
        solve(CostNetwork([np.arange(32.0)] * 1000, []), "brute_force")




def test_a_pass_that_nobody_looks_at_stops_in_the_middle():
    """It is improved on among all configurations, as where somebody looks: nothing beyond an array is read."""
    p, found = pack(dense(1, 12, 60).normalized()), []
    for sweeps in (2, 0):
        state = PassState.start(p, Potentials.none(p))
        stopped = message_passes(p, EXACTLY, state, np.inf, 0.0, -np.inf, 5, 0.0, 0.0, sweeps)
        found.append((stopped.cost, state.best.tolist()))
    assert found[0] == found[1]


def test_what_a_search_begins_with_is_kept_however_little_time_there_is():
    found = solve(all_but_one_forbidden(), memory=[np.arange(300.0)] * 2, memory_limit=598.0, initial=(299, 299),
                  time_limit=1e-9)
    assert found.assignment == (299, 299)
    assert not found.optimal


def test_brute_force_looks_at_the_clock_however_many_layers_there_are():
    network = CostNetwork([np.arange(2.0)] * 20 + [np.zeros(1)] * 1000, [])
    found = solve(network, "brute_force", time_limit=1e-9)
    assert not found.optimal
    assert found.statistics["assignments"] < 1 << 12  # 65,536 before


def test_a_part_of_memory_without_limit_leaves_as_much():
    whole = Budget(memory=math.inf)
    assert whole.less(0.5 * whole.memory).memory == math.inf
    assert Budget(memory=100.0).less(30.0).less(20.0).memory == 50.0


@pytest.mark.usefixtures("compiled")
def test_the_normal_form_and_every_node_look_at_the_clock(clock, monkeypatch):
    """A clock that moves only where it is looked at cannot tell of a step that does not look: so looks are counted."""
    only_branching(monkeypatch)
    network = dense(0)
    begin = clock[0]
    network.normalized(budget=Budget(1e9))
    assert clock[0] - begin >= len(network.edges)
    begin = clock[0]
    found = solve(network, certificate=False, time_limit=1e9)
    assert found.optimal
    assert clock[0] - begin >= found.statistics["nodes"]
