"""Elimination of all vertices, beside all assignments and beside products that numpy forms whole."""

import itertools
import math

import numpy as np
import pytest

from pase_mtf.search.elimination import _factors_of, _table, eliminate
from pase_mtf.search.elimination_plan import plan_elimination
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import pack


def eliminated(network, order=None):
    """(the least cost, that of the assignment in the network itself, the plan)."""
    packed = pack(network.normalized())
    plan = plan_elimination(packed.domains, packed.ends.T, order)
    cost, choice = eliminate(packed, plan)
    return cost + packed.constant, network.cost(choice.tolist()), plan


def random_network(rng, sizes, edges, forbidden=0.0):
    """Edges have fewer classes than their ends have configurations; some costs are infinite."""
    def costs(*shape):
        return np.where(rng.random(shape) < forbidden, np.inf, rng.normal(size=shape))
    parts = []
    for u, v in edges:
        shape = [int(rng.integers(1, sizes[end] + 1)) for end in (u, v)]
        parts.append(NetworkEdge(u, v, costs(*shape), rng.integers(shape[0], size=sizes[u]),
                                 rng.integers(shape[1], size=sizes[v])))
    return CostNetwork([rng.normal(size=size) for size in sizes], parts)


def least(network):
    return min(network.cost(choice) for choice in itertools.product(*map(range, network.sizes)))


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_least_of_all_assignments(seed):
    """Any graph, in a random order: tables over many vertices, none of which has costs with the vertex alone."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 8))
    sizes = rng.integers(1, 5, size=layers).tolist()
    pairs = list(itertools.combinations(range(layers), 2))
    edges = [pairs[k] for k in rng.permutation(len(pairs))[:int(rng.integers(0, len(pairs) + 1))]]
    network = random_network(rng, sizes, edges, 0.2 * (seed % 2))
    expected = least(network)
    for order in (None, rng.permutation(layers).tolist()):
        cost, of_choice, _ = eliminated(network, order)
        if expected == math.inf:
            assert cost == math.inf
        else:
            assert cost == pytest.approx(expected, rel=1e-12, abs=1e-12)
            assert of_choice == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("sizes", [(300, 70, 290), (5, 600, 3), (257, 64, 256), (1, 130, 513)])
def test_products_of_many_blocks(sizes):
    """A triangle, whose second vertex is between the others: block by block, the last of them narrower."""
    rng = np.random.default_rng(sum(sizes))
    a, b, c = (rng.normal(size=size) for size in sizes)
    ab, bc, ac = (rng.normal(size=(len(one), len(other))) for one, other in ((a, b), (b, c), (a, c)))
    network = CostNetwork([a, b, c], [
        NetworkEdge(u, v, matrix, np.arange(matrix.shape[0]), np.arange(matrix.shape[1]))
        for u, v, matrix in ((0, 1, ab), (1, 2, bc), (0, 2, ac))])
    expected = min(float(np.min(a[i] + c + ac[i] + (b[:, None] + ab[i][:, None] + bc).min(axis=0)))
                   for i in range(sizes[0]))
    for order in ([1, 0, 2], [1, 2, 0], [0, 1, 2], [2, 1, 0]):
        cost, of_choice, _ = eliminated(network, order)
        assert (cost, of_choice) == (pytest.approx(expected, rel=1e-12), pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize("sizes", [(130, 300, 3, 2), (70, 3, 520, 2), (200, 257, 2, 3), (65, 300, 1, 2)])
def test_blocks_of_tables_over_three(sizes):
    """The last layer is between all others: eliminated first, it leaves a table over them, read block by block."""
    rng = np.random.default_rng(sum(sizes))
    vectors = [rng.normal(size=size) for size in sizes]
    joined = [rng.normal(size=(sizes[3], size)) for size in sizes[:3]]
    every = [np.arange(size) for size in sizes]
    network = CostNetwork(vectors, [NetworkEdge(3, v, joined[v], every[3], every[v]) for v in range(3)])
    total = (vectors[3][:, None, None, None] + joined[0][:, :, None, None] + joined[1][:, None, :, None]
             + joined[2][:, None, None, :]).min(axis=0)
    expected = float((total + vectors[0][:, None, None] + vectors[1][:, None] + vectors[2]).min())
    for order in itertools.permutations(range(3)):
        cost, of_choice, _ = eliminated(network, [3, *order])
        assert (cost, of_choice) == (pytest.approx(expected, rel=1e-12), pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize(("copies", "layers", "size"), [(100, 7, 8), (400, 3, 150), (1, 24, 2)])
def test_ends_when_the_time_is_over_between_small_steps(copies, layers, size):
    """Steps that take next to nothing each, of many parts, and rows of two sums: seconds in all."""
    every, rng = np.arange(size), np.random.default_rng(0)
    matrix = rng.random((size, size))
    network = CostNetwork([np.zeros(size)] * (copies * layers), [
        NetworkEdge(copy * layers + u, copy * layers + v, matrix, every, every) for copy in range(copies)
        for u, v in itertools.combinations(range(layers), 2)])
    packed = pack(network.normalized())
    plan = plan_elimination(packed.domains, packed.ends.T)
    with pytest.raises(TimeoutError):
        eliminate(packed, plan, 1e-4)


def test_ends_when_the_time_is_over():
    """Within one step, which would take seconds."""
    rng = np.random.default_rng(1)
    every = np.arange(1500)
    network = CostNetwork([np.zeros(1500)] * 3, [
        NetworkEdge(u, v, rng.random((1500, 1500)), every, every) for u, v in ((0, 1), (1, 2), (0, 2))])
    packed = pack(network.normalized())
    plan = plan_elimination(packed.domains, packed.ends.T)
    with pytest.raises(TimeoutError):
        eliminate(packed, plan, 1e-4)
    order, scope = np.array(plan.order), np.array(plan.scopes[0])
    factors, table = _factors_of(packed, np.argsort(order), sum(map(len, plan.scopes))), np.empty(1500 * 1500)
    assert _table(packed, factors, table, order[0], scope, table, 0.0, 0.0) == np.inf  # and not only behind it


def test_short_rows_are_more_work():
    """The same sums: in one product of long rows, and in many of short ones."""
    long = plan_elimination([64, 64, 64], [(0, 1), (1, 2), (0, 2)], [0, 1, 2])
    short = plan_elimination([4] * 9, list(itertools.combinations(range(9), 2)), list(range(9)))
    assert long.operations == pytest.approx(short.operations, rel=0.35)
    assert long.operations < long.work < 3 * long.operations
    assert short.work > 10 * short.operations
