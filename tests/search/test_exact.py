"""The exact search against brute force, against itself with every shortcut closed, and on known optima."""

import importlib
import itertools
import pathlib
import time

import numpy as np
import pytest
from random_networks import COSTS, SHAPES, random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import branch_and_bound, check_certificate, part, solve
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import pack
from pase_mtf.search.pulls import EXACTLY, in_steps, pull, pull_steps, step_of
from pase_mtf.search.rounding import rounding

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"
OPTIMA = {
    "alexnet_8": 97098296512, "alexnet_32": 53136349552, "rnnlm_8": 4024963186688, "rnnlm_32": 1491938058240,
    "inception3_8": 782140602432, "inception3_16": 673045949344, "transformer_4": 2189181321216,
    "transformer_8": 1421082828800, "densenet-chain_8": 749464025984, "densenet-direct_8": 749464025984,
    "densenet-direct_16": 722760493120}


def same(network, solution, expected, integer):
    """Equal: to the last digit for integers, else to 1e-12 of the sum of the parts."""
    if integer:
        return solution.cost == expected
    parts = sum(abs(vector[k]) for vector, k in zip(network.vectors, solution.assignment, strict=True))
    parts += sum(abs(edge.matrix[edge.rows[solution.assignment[edge.source]],
                                 edge.columns[solution.assignment[edge.target]]]) for edge in network.edges)
    return abs(solution.cost - expected) <= 1e-12 * parts


def is_integer(seed):
    return COSTS[seed // len(SHAPES) % len(COSTS)] in ("integer", "large_integer", "ties", "zero")


@pytest.mark.parametrize("name", OPTIMA)
def test_known_optima(name):
    solution = solve(CostNetwork.load(INSTANCES / f"{name}.npz"))
    assert solution.cost == OPTIMA[name]
    assert solution.optimal
    assert solution.gap == 0
    assert solution.lower_bound == solution.cost


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))])
def test_against_brute_force(block, monkeypatch):
    """Networks that are eliminated at once, and by passes and what comes after them."""
    infeasible = 0
    for seed in range(block, 2500, 10):  # every tenth: all shapes and kinds of costs in every block
        network = random_network(seed, 3000)
        try:
            expected = solve(network, "brute_force").cost
        except InfeasibleError:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                solve(network)
            continue
        for most in (0, 1 << 16):
            monkeypatch.setattr(part, "_AT_ONCE", most)
            solution = solve(network)
            assert solution.optimal
            assert solution.cost == network.cost(solution.assignment)
            assert same(network, solution, expected, is_integer(seed)), (seed, solution.cost, expected)
    assert infeasible < 50


def dense(seed, layers=7, configurations=5, classes=4):
    rng = np.random.default_rng(seed)

    def draw(shape):
        return rng.integers(0, 60, shape).astype(float) if seed % 2 else rng.random(shape)
    return CostNetwork(
        [draw(configurations) for _ in range(layers)],
        [NetworkEdge(i, j, draw((classes, classes)), rng.integers(0, classes, configurations),
                     rng.integers(0, classes, configurations)) for i in range(layers) for j in range(i + 1, layers)])


@pytest.mark.slow
def test_branch_and_bound_alone(monkeypatch):
    """With elimination and the search depth first closed off, branching must find the same."""
    expected = [solve(dense(seed)) for seed in range(40)]
    monkeypatch.setattr(branch_and_bound.Minimiser, "_descend", lambda self, part, others: False)
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    nodes = 0
    for seed, reference in enumerate(expected):
        solution = solve(dense(seed))
        assert solution.optimal
        assert solution.statistics["eliminations"] == 0
        assert same(dense(seed), solution, reference.cost, seed % 2)
        nodes += solution.statistics["nodes"]
    assert nodes > 60


def test_deterministic():
    network = CostNetwork.load(INSTANCES / "inception3_8.npz")
    first, second = solve(network), solve(network)
    assert first.assignment == second.assignment
    assert first.statistics == second.statistics


def test_gap_and_time_limit_are_honest(monkeypatch):
    network = dense(1, layers=8, configurations=8, classes=8)
    optimum = solve(network)
    assert optimum.optimal
    monkeypatch.setattr(branch_and_bound.Minimiser, "_descend", lambda self, part, others: False)
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    for options in ({"gap": 0.2}, {"time_limit": 1e-6}):
        solution = solve(network, **options)
        assert not solution.optimal
        assert solution.lower_bound <= optimum.cost <= solution.cost == network.cost(solution.assignment)
        assert solution.gap == pytest.approx((solution.cost - solution.lower_bound) / solution.cost)
    assert solve(network, gap=0.2).gap <= 0.2


def test_infeasible_by_combination():
    """Every vector and matrix has finite entries, every pair has a way, and yet no assignment is finite."""
    other = np.array([[np.inf, 0.0], [0.0, np.inf]])
    ends = np.array([0, 1])
    network = CostNetwork([np.zeros(2)] * 3, [NetworkEdge(i, j, other, ends, ends) for i, j in
                                              ((0, 1), (1, 2), (0, 2))])
    with pytest.raises(InfeasibleError, match="finite"):
        solve(network)


def shifted(seed, layers, configurations, most=10 ** 10):
    """Small integers, and large ones that edges give to layers: together all assignments cost about the same."""
    rng, every = np.random.default_rng(seed), np.arange(configurations)
    vectors, edges = [rng.integers(0, 4, configurations) for _ in range(layers)], []
    for ends in itertools.combinations(range(layers), 2):
        costs = rng.integers(0, 4, (configurations, configurations))
        given = [rng.integers(0, most, configurations) for _ in ends]
        for layer, amounts in zip(ends, given, strict=True):
            vectors[layer] = vectors[layer] + amounts
        edges.append(NetworkEdge(*ends, costs + 2 * most - given[0][:, None] - given[1], every, every))
    return CostNetwork(vectors, edges)


@pytest.mark.parametrize(("seed", "layers", "configurations"), [
    (239, 4, 3), (396, 4, 5), *((seed, 5, 3) for seed in range(20))])
def test_the_first_pass_allows_for_rounding(seed, layers, configurations, monkeypatch):
    """It removed what is cheaper by a unit and not by what rounds off besides, as no cost was known to tell that by."""
    monkeypatch.setattr(part, "_AT_ONCE", 0)
    network = shifted(seed, layers, configurations)
    found = solve(network)
    assert found.cost == solve(network, "brute_force").cost
    assert found.optimal
    check_certificate(network, found)


@pytest.mark.parametrize("method", ["exact", "pase", "k_best", "memory"])
def test_what_is_left_of_costs_that_cancel_is_not_called_proven(method):
    """Beside 1e20 all other costs are rounded away."""
    network = CostNetwork([[1e20, 0.0], [-1e20, 0.0]], [
        NetworkEdge(0, 1, [[-0.5, np.inf], [np.inf, -0.25]], [0, 1], [0, 1])])
    options = {"memory": [np.zeros(2)] * 2, "memory_limit": 1.0} if method == "memory" else {}
    found = solve(network, "exact" if options else method, **options)
    assert found.lower_bound <= -0.5 == network.cost((0, 0)) == solve(network, "brute_force").cost
    assert found.cost == -0.5 or not found.optimal
    assert (found.certificate is not None) == (found.optimal and method == "exact")
    assert found.gap >= (found.cost - found.lower_bound) / abs(found.cost) * (1 - 1e-12)


def test_what_is_left_of_costs_that_cancel_is_proven_by_a_certificate():
    """The checker rounds what it adds up, not all that could be added up."""
    network = CostNetwork([[1e6, 0.0], [0.0, 1e6]], [
        NetworkEdge(0, 1, [[-0.5, 3.0], [-0.25, 1.0]], [0, 1], [0, 1])])
    found, alone = solve(network), solve(network, certificate=False)
    assert (found.assignment, found.cost, found.lower_bound, found.optimal) == ((1, 0), -0.25, -0.25, True)
    check_certificate(network, found)
    assert (alone.assignment, alone.cost, alone.optimal) == ((1, 0), -0.25, False)
    assert -0.25 - 1e-8 < alone.lower_bound < -0.25


@pytest.mark.parametrize("seed", range(40))
def test_large_integers_of_both_signs(seed, monkeypatch):
    monkeypatch.setattr(part, "_AT_ONCE", 0)
    rng, every = np.random.default_rng(seed), np.arange(4)

    def draw(*shape):
        return rng.integers(-10 ** 11, 10 ** 11, shape).astype(float)
    network = CostNetwork([draw(4) for _ in range(5)], [NetworkEdge(i, j, draw(4, 4), every, every)
                                                        for i, j in itertools.combinations(range(5), 2)])
    found = solve(network, certificate=False)
    assert found.optimal
    assert found.cost == solve(network, "brute_force").cost


def test_progress_is_told():
    calls = []
    solution = solve(dense(3), progress=lambda *arguments: calls.append(arguments))
    assert calls
    for seconds, cost, bound in calls:
        assert seconds >= 0
        assert cost >= solution.cost - 1e-9
        assert bound <= solution.cost + 1e-9


def test_one_layer_and_none():
    assert solve(CostNetwork([[3.0, 1.0]], [])).assignment == (1,)
    empty = solve(CostNetwork([], []))
    assert empty.assignment == ()
    assert empty.cost == 0
    assert empty.optimal


def _large_ring(seed, classes=600, layers=5):
    rng = np.random.default_rng(seed)
    matrices = [rng.integers(0, 40, (classes, classes)) * rng.uniform(0.5, 1.5) for _ in range(2)]
    every = np.arange(classes)
    return CostNetwork([rng.uniform(0, 30, classes) for _ in range(layers)],
                       [NetworkEdge(layer, (layer + 1) % layers, matrices[layer % 2], every, every)
                        for layer in range(layers)])


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_large_networks_change_nothing(seed, monkeypatch):
    network = _large_ring(seed)
    monkeypatch.setattr(part, "_REREAD", 0)
    quick = solve(network, certificate=False)
    calls = []
    monkeypatch.setattr(part, "in_steps", lambda *given: calls.append(given) or in_steps(*given))
    again = solve(network)
    assert calls
    assert again.optimal
    assert again.assignment == quick.assignment
    check_certificate(network, again)
    monkeypatch.setattr(part, "_REREAD", 1 << 62)
    calls.clear()
    slow = solve(network, certificate=False)
    assert not calls
    assert quick.optimal
    assert slow.optimal
    assert quick.cost == pytest.approx(slow.cost, rel=1e-12)


@pytest.mark.parametrize("turned", ["never", "in time", "at once"])
@pytest.mark.parametrize("offset", [0.0, -7.0])
def test_pulls_in_steps_are_never_more(offset, turned):
    """And less by two steps at most, where nothing is further away than can be counted. Whether they read a matrix or
    the turned one makes no difference."""
    network = _large_ring(9, 50)
    p = pack(CostNetwork(network.vectors, [
        NetworkEdge(edge.source, edge.target, edge.matrix + offset, edge.rows, edge.columns)
        for edge in network.edges]).normalized())
    rng = np.random.default_rng(3)
    for step, counts_all in ((2.0 ** -8, True), (2.0 ** -16, False)):
        steps = in_steps(p, step, room=0 if turned == "never" else np.inf)
        steps.vain[:] = {"never": 0.0, "in time": 5e3, "at once": 1e9}[turned]
        for e, rows in itertools.product(range(len(p.matrix)), (False, True)):
            height, width = p.extents[:, e]
            taken, given = (height, width) if rows else (width, height)
            begin, potentials = p.matrix[e], rng.normal(0, 5, given)
            where = begin, steps.kind[e]
            exactly, roughly = np.empty(taken), np.empty(taken)
            pull(p.values[begin:begin + height * width], potentials, exactly, rows)
            room = np.empty(given, np.uint16), np.empty(taken, np.uint16)
            pull_steps(steps, *where, potentials, np.arange(given), roughly, np.arange(taken), rows, *room)
            assert (roughly <= exactly + 1e-13).all()
            assert (roughly > exactly - 2 * step - 1e-13).all() == counts_all
            for count in (given // 3, 1):  # of one, entries are looked at one by one
                some = np.sort(rng.choice(given, count, replace=False))
                least = np.full(given, -1e6)  # what is not listed gives nothing
                least[some] = potentials[some]
                pull(p.values[begin:begin + height * width], least, exactly, rows)
                pull_steps(steps, *where, potentials, some, roughly, np.arange(taken), rows, *room)
                assert (roughly <= exactly + 1e-13).all()
                assert (roughly > exactly - 2 * step - 1e-13).all() >= counts_all
                before, few = roughly.copy(), np.arange(0, taken, 3)
                roughly[:] = 7.0
                pull_steps(steps, *where, potentials, some, roughly, few, rows, *room)
                np.testing.assert_array_equal(roughly, np.where(np.isin(np.arange(taken), few), before, 7.0))
        assert (steps.vain < 0).any() == (turned != "never")
        assert (steps.vain < 0).all() == (turned == "at once") or turned == "in time"


def test_a_matrix_is_turned_once_that_has_cost_as_much():
    p = pack(_large_ring(9, 50).normalized())
    steps, (height, width) = in_steps(p, 2.0 ** -8), p.extents[:, 0].tolist()
    room = np.empty(width, np.uint16), np.empty(height, np.uint16)
    taken, one, read = np.empty(height), np.array([1]), []
    while steps.vain[steps.kind[0]] >= 0:
        read.append(pull_steps(steps, p.matrix[0], steps.kind[0], np.zeros(width), one, taken, np.arange(height), True,
                               *room))
    # Of every line of the matrix what takes as long as 32 entries side by side; then one line of the turned one.
    assert len(read) > 1
    assert set(read[:-1]) == {height * min(width, 32)}
    assert read[-1] == height
    matrix = steps.counts[p.matrix[0]:p.matrix[0] + height * width].reshape(height, width)
    assert (steps.turned[p.matrix[0]:p.matrix[0] + height * width].reshape(width, height) == matrix.T).all()


def test_step():
    p = pack(_large_ring(9, 50).normalized())
    least = sum(vector.min() for vector in _large_ring(9, 50).vectors)
    assert step_of(p) <= least / 5 / 256 < 2 * step_of(p)
    assert 2.0 ** np.round(np.log2(step_of(p))) == step_of(p)
    idle = p._replace(unary=np.zeros_like(p.unary))
    assert p.most <= step_of(idle) * 32767 < 2 * p.most  # everything is told apart
    assert step_of(idle._replace(most=np.inf)) == 0.0
    assert step_of(p._replace(unary=p.unary * 1e-305)) == 0.0
    for gap in (least / 10, least / 100, least / 1000):
        assert step_of(p, gap) <= max(4 * gap / 32767, step_of(p) / 16) < 2 * step_of(p, gap)
    assert step_of(p, 32 * least) == step_of(p, np.inf) == step_of(p)
    assert step_of(p, 0.0) == step_of(p, least * 1e-9) == step_of(p) / 16
    assert in_steps(p, 2.0 ** -4).counts.dtype == EXACTLY.counts.dtype


def test_a_certificate_is_given_up_in_the_end(monkeypatch):
    """The optimum stays proven, though nobody but the search can tell."""
    every, rng = np.arange(8), np.random.default_rng(0)
    network = CostNetwork([rng.random(8) for _ in range(7)], [
        NetworkEdge(i, j, rng.random((8, 8)), every, every) for i, j in itertools.combinations(range(7), 2)])
    assert solve(network).certificate is not None
    searches = importlib.import_module("pase_mtf.search.exact")
    monkeypatch.setattr(searches, "_TIMES_THE_SEARCH", 0)
    monkeypatch.setattr(searches, "_LEAST_SECONDS", 0.0)
    given_up = solve(network)
    assert given_up.optimal
    assert given_up.certificate is None


def test_integers_of_many_layers_are_told_apart():
    """Also where their sums may round off by more than a quarter of a unit."""
    search = branch_and_bound.Minimiser(pack(CostNetwork([[1e8, 1e8 + 1]] * 20_000, []).normalized()))
    search.run()
    assert search._scale == 2e12
    assert search._target() < 1.0


def test_integers_beside_one_that_stands_for_what_is_forbidden():
    """However large that is, whole numbers of a small sum are told apart: here the first pass meets what costs one more
    than its bound, which is the optimum."""
    ends, every, same = np.arange(2), np.arange(300), [[0.0, 10.0], [10.0, 0.0]]
    network = CostNetwork([[1.5e12] * 2, [0.0] * 2, [0.0] * 2, [*[0.0] * 299, 2.0 ** 51], [0.0] * 300], [
        NetworkEdge(0, 1, same, ends, ends), NetworkEdge(1, 2, same, ends, ends),
        NetworkEdge(0, 2, [[1.0, 0.0], [0.0, 0.0]], ends, ends),
        NetworkEdge(3, 4, np.add.outer(every, every).astype(float), every, every)])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (1.5e12, True)
    assert check_certificate(network, solution) == 0.0


@pytest.fixture
def slacks(monkeypatch):
    """For which slack each certificate is asked."""
    searches, asked = importlib.import_module("pase_mtf.search.exact"), []
    certify = searches.certify

    def noted(packed, cost, slack, *others):
        asked.append(slack)
        return certify(packed, cost, slack, *others)
    monkeypatch.setattr(searches, "certify", noted)
    return asked


def test_costs_that_are_whole_in_the_normal_form_only(slacks):
    """Their certificate is made for what the checker tolerates of the costs as they were given."""
    ends = np.arange(2)
    half = NetworkEdge(0, 1, [[0.5, 1.5], [1.0, 0.5]], ends, ends)
    network = CostNetwork([[1.0, 2.0]] * 2, [half, half])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (3.0, True)
    slack, = slacks
    assert 0.0 < slack < check_certificate(network, solution)


def test_whole_costs_of_a_large_sum_are_certified_for_what_is_tolerated_of_them(slacks):
    """Above 2e12 a search proves them to 1e-12 of their sum: that none is cheaper by less need not be so."""
    ends = np.arange(2)
    network = CostNetwork([[5e13, 5e13 + 3]] * 2, [NetworkEdge(0, 1, [[0.0, 1.0], [2.0, 0.0]], ends, ends)])
    solution = solve(network)
    assert (solution.cost, solution.optimal) == (1e14, True)
    slack, = slacks
    assert 1.0 < slack < check_certificate(network, solution)


def _cancelling():
    """The first that is met costs 5 by parts of 2e13, of which 1e-12 is 24: what was left out for that costs less (-3)
    than what is found among the rest (4), which has small parts."""
    large = 1.2e13
    plain = np.array([*np.arange(200) % 2, 2, 3])
    marked = plain.copy()
    marked[198] = 4
    between = np.full((5, 5), 1000.0)  # all pairs of two edges are easy, of all three none but a hidden one
    between[[0, 1, 4, 1, 2, 3], [1, 0, 1, 4, 2, 3]] = 0.0
    cancels, hidden = between[:4, :4].copy(), between.copy()
    cancels[2, 2], hidden[4, 4] = -large, 104.0
    return CostNetwork([[*[-40.0] * 200, -200.0, -1.0], [*[-30.0] * 200, large + 60.0, -1.0],
                        [*[-30.0] * 200, 145.0, -1.0]], [
        NetworkEdge(0, 1, cancels, plain, plain), NetworkEdge(1, 2, between[:4, :4], plain, plain),
        NetworkEdge(0, 2, hidden, marked, marked)])


def test_what_is_left_out_beside_costs_that_cancel():
    network = _cancelling()
    assert network.cost((200, 200, 200)) == 5.0
    assert network.cost((198, 1, 198)) == 4.0
    solution = solve(network, certificate=False)
    assert (solution.cost, solution.lower_bound, solution.optimal) == (-3.0, -3.0, True)


def test_what_an_ended_search_proves_is_told_where_no_time_is_left_for_another(monkeypatch):
    network, searches, search = _cancelling(), [], branch_and_bound.Minimiser._search
    monkeypatch.setattr(branch_and_bound.Minimiser, "_search", lambda self, most: (
        searches.append(self) or (len(searches) == 1 and search(self, most))))
    found = branch_and_bound.Minimiser(pack(network.normalized()), doubt=rounding(network))
    found.run()
    assert len(searches) == 2
    assert (found.proven, -100 < found.bound <= -3.0) == (False, True)  # -inf before
    found._gap, found._left_out = 0.5, -19.0
    assert not found._enough(found.cost - 0.1)


def test_progress_tells_no_bound_above_what_was_left_out():
    told = []
    search = branch_and_bound.Minimiser(pack(CostNetwork([[4.0, 5.0]], []).normalized()),
                                        progress=lambda *known: told.append(known))
    search._left_out = -19.0
    search._report(3.2)
    assert told[0][2] == -19.0


def test_costs_too_far_below_zero_to_be_counted_in_steps():
    """Steps as fine as what layers cost: matrices were more of them below 0 than a float64 holds."""
    every, matrix = np.arange(1024), np.random.default_rng(0).uniform(-1e290, 1e290, (1024, 1024))
    network = CostNetwork([np.full(1024, 1e-20)] * 2, [NetworkEdge(0, 1, matrix, every, every)])
    p = pack(network.normalized())
    assert step_of(p) == step_of(p, 1e-15) == 0.0
    solution = solve(network)
    assert solution.optimal
    assert solution.assignment == tuple(map(int, np.unravel_index(matrix.argmin(), matrix.shape)))


def test_what_there_is_no_time_left_to_check_is_not_called_proven(monkeypatch):
    """The checker does not look at the clock: it took as long again as the search, beyond the limit."""
    searches, clock, late = importlib.import_module("pase_mtf.search.exact"), time.perf_counter, [0.0]
    told = searches.as_far_as_sums_tell

    def slow(*of):
        late[0] = 1e6
        return told(*of)
    network = CostNetwork([[1e6, 0.0], [0.0, 1e6]], [
        NetworkEdge(0, 1, [[-0.5, 3.0], [-0.25, 1.0]], [0, 1], [0, 1])])
    assert solve(network, time_limit=1e5).optimal
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(searches, "as_far_as_sums_tell", slow)
    found = solve(network, time_limit=1e5)
    assert (found.cost, found.optimal, found.certificate) == (-0.25, False, None)
