"""Pulls of edges with equal matrices and equal potentials are made once, with the results that all of them have."""

import numpy as np
import pytest

from pase_mtf.search import check_certificate, packed, part, pulls, solve
from pase_mtf.search.messages import message_passes
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import Potentials, pack
from pase_mtf.search.pass_state import PassState, active_domains, count_below, promising, prune
from pase_mtf.search.pulls import EXACTLY, grain, in_steps, step_of
from pase_mtf.search.repeats import vertex_kinds


def _blocks(seed, repeats, size=72, kind="float"):
    """The same few layers again and again, each block joined to the next, between a first and a last layer of their
    own; an edge from the first layer to every block."""
    rng = np.random.default_rng(seed)
    block = int(rng.integers(1, 4))
    spread = 1000 if kind == "integer" else 1.0

    def draw(*shape):
        return rng.integers(0, spread, shape).astype(float) if kind == "integer" else rng.random(shape)
    inner = [draw(size) for _ in range(block)]
    vectors = [draw(size), *inner * repeats, draw(size)]
    matrices = [draw(size, size) for _ in range(block)]
    first = draw(size, size)
    every = np.arange(size)
    edges = [NetworkEdge(layer, layer + 1, matrices[layer % block], every, every) for layer in range(len(vectors) - 1)]
    edges += [NetworkEdge(0, 1 + block * number, first, every, every) for number in range(1, repeats)]
    return CostNetwork(vectors, edges)


def _apart(p):
    """The same network in which every edge has a matrix of its own, so that there is nothing to share."""
    sizes = (p.extents[0] * p.extents[1]).tolist()
    values = np.concatenate([
        p.values[begin:begin + size] for begin, size in zip(p.matrix.tolist(), sizes, strict=True)])
    return p._replace(values=values, matrix=np.cumsum([0, *sizes[:-1]]))


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("step", [0.0, 2.0 ** -5])
@pytest.mark.parametrize("seed", range(6))
def test_sharing_changes_nothing(seed, rough, step, sweeps):
    """Bit for bit, exactly and in steps, pruning as it goes: with one matrix for all edges that are alike or one for
    each, and copied visits or none, where potentials are not rounded to what was sent along others."""
    found = []
    for p in (pack(_blocks(seed, 30).normalized()), _apart(pack(_blocks(seed, 30).normalized()))):
        state = PassState.start(p, Potentials.none(p))
        if not step or sweeps:
            state = state._replace(kinds=vertex_kinds(p))
        matrices = in_steps(p, 2.0 ** -14) if rough else EXACTLY
        best, bounds, pulled = np.inf, [], 0
        for _ in range(4):
            result = message_passes(p, matrices, state, best, 0.0, 0.0, 1, np.inf, step, sweeps)
            best = min(best, result.cost)
            bounds.append(result.bound)
            pulled += result.pulled
        found.append((bounds, best, pulled, state.potentials.laid_out(p), state.flags(p), state.costs(p), state.bounds,
                      state.best))
    (bounds, best, shared, *arrays), (others, other_best, all_of_them, *other_arrays) = found
    assert bounds == others
    assert best == other_best
    for one, other in zip(arrays, other_arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    assert shared <= all_of_them


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_passes_go_on_where_others_ended(seed, rough):
    """Bit for bit, and reading as much: what passes prune from their first sweep on does not depend on who called."""
    network, found = _blocks(seed, 30), []
    optimum, p = solve(network, "pase").cost, pack(network.normalized())
    for calls in (1, 3):
        state, pulled = PassState.start(p, Potentials.none(p)), 0
        matrices = in_steps(p, 2.0 ** -14) if rough else EXACTLY
        for _ in range(calls):
            result = message_passes(p, matrices, state, optimum, 1e-9, -np.inf, 3 // calls, np.inf, 0.0, 0)
            pulled += result.pulled
        found.append((result.bound, pulled, state.potentials.laid_out(p), state.flags(p), state.costs(p),
                      state.minimum))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[0][0] == pytest.approx(p.constant + found[0][-1].sum())


def _bound_of(p, potentials, active):
    """The sum of the least of what is left at every vertex and edge, over active configurations, added up anew; nothing
    is left below 0 at an edge."""
    total, theta = p.constant, p.unary.copy()
    for e, (u, v) in enumerate(p.pairs):
        height, width = p.extents[:, e]
        left = p.values[p.matrix[e]:p.matrix[e] + height * width].reshape(height, width)
        for side, layer in enumerate((u, v)):
            given = potentials[p.potentials_at[side, e]:][:p.extents[side, e]]
            own = slice(p.first[layer], p.first[layer + 1])
            classes = p.classes[p.classes_at[side, e]:][:own.stop - own.start]
            theta[own] += given[classes]
            left = left - (given[:, None] if side == 0 else given)
            left = left[np.unique(classes[active[own]])] if side == 0 else left[:, np.unique(classes[active[own]])]
        assert left.min() > -1e-9
        total += left.min()
    return total + np.minimum.reduceat(np.where(active, theta, np.inf), p.first[:-1]).sum()


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("step", [2.0 ** -4, 2.0 ** -7])
@pytest.mark.parametrize("seed", range(6))
def test_what_repeats_is_visited_once_and_bounds_the_rest(seed, step, rough):
    """Pointing to the potentials and reduced costs of others, every vertex and edge has numbers that are right for it:
    they add up to the bound, as far as they are rounded."""
    network, pulled = _blocks(seed, 30), []
    optimum = solve(network, "pase").cost
    for p in (pack(network.normalized()), _apart(pack(network.normalized()))):
        state = PassState.start(p, Potentials.none(p))._replace(kinds=vertex_kinds(p))
        matrices, read = in_steps(p, 2.0 ** -14) if rough else EXACTLY, 0
        for _ in range(4):
            result = message_passes(p, matrices, state, optimum, 1e-9, -np.inf, 1, np.inf, step, 0)
            if rough:
                prune(p, state, optimum + 1e-9, True)
            read += result.pulled
            active, costs = state.flags(p), state.costs(p)
            assert _bound_of(p, state.potentials.laid_out(p), active) >= result.bound - 4 * step * len(p.matrix)
            assert result.bound <= optimum + 1e-9
            domains = active_domains(p.first, state.active, state.active_at)
            np.testing.assert_array_equal(domains, np.add.reduceat(active, p.first[:-1], dtype=int))
            np.testing.assert_array_equal(count_below(p, state, 0.5), np.add.reduceat(
                costs < 0.5, p.first[:-1], dtype=int))
            few, order = promising(p, state, 5), np.where(active, costs, np.inf)
            for begin, end in zip(p.first[:-1], p.first[1:], strict=True):
                assert few[begin:end].sum() == 5
                assert np.sort(order[begin:end])[4] == order[begin:end][few[begin:end]].max()
        pulled.append(read)
    assert pulled[0] < 0.5 * pulled[1]  # everything but the ends repeats


@pytest.mark.parametrize("kind", ["float", "integer"])
@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_of_what_repeats(seed, kind, monkeypatch):
    """Rounded potentials and costs in whole steps lead to the optimum of the dynamic program, and to its proof."""
    steps = []

    def noted(*arguments):
        steps.append(grain(*arguments))
        return steps[-1]
    monkeypatch.setattr(packed, "_LARGE", 0)
    monkeypatch.setattr(part, "_LARGE", 0)
    monkeypatch.setattr(part, "_READ", 0)
    monkeypatch.setattr(part, "_REREAD", 0)
    monkeypatch.setattr(pulls, "_REPETITIVE", 2)
    monkeypatch.setattr(part, "grain", noted)
    network = _blocks(seed, 10, 68, kind)
    solution = solve(network)
    assert any(steps)
    assert solution.optimal
    assert solution.cost == pytest.approx(solve(network, method="pase").cost, rel=1e-13)
    check_certificate(network, solution)


@pytest.mark.parametrize(("step", "rough"), [(2.0 ** -5, True), *(pytest.param(
    *case, marks=pytest.mark.slow) for case in ((2.0 ** -2, False), (2.0 ** -2, True), (2.0 ** -5, False)))])
def test_rounded_potentials_never_bound_from_above(rough, step):
    """However coarse they are, the dynamic program's optimum is no less than the bound."""
    for seed in range(20):
        network = _blocks(seed, 2, 6)
        p = pack(network.normalized())
        steps = in_steps(p, step_of(p)) if rough else EXACTLY
        found = message_passes(p, steps, PassState.start(p, Potentials.none(p)), np.inf, 0.0, -np.inf, 3, np.inf,
                               step, 2)
        assert found.bound <= solve(network, method="pase").cost * (1 + 1e-13), seed


def test_matrices_that_stay_shared_are_counted_once(monkeypatch):
    """A network whose layers repeat is reduced although all its edges together have more entries than its matrices."""
    monkeypatch.setattr(part, "_MOST_COPIED", 0)
    p = pack(_blocks(0, 60).normalized())
    few = np.full(p.vertices, 30)
    assert 30 * 30 * len(p.matrix) > 2 * len(p.values)
    assert part._worth_reducing(p, few)
    assert not part._worth_reducing(_apart(p), p.domains)
    rng = np.random.default_rng(0)
    assert not part._worth_reducing(p, rng.integers(20, 41, p.vertices))  # nothing stays alike


def test_kinds():
    """Vertices are alike where their costs, their matrices and their classes are."""
    network = _blocks(0, 20)
    kinds = vertex_kinds(pack(network.normalized()))
    block = (len(network.vectors) - 2) // 20
    for layer in range(1 + 2 * block, len(network.vectors) - 1 - block):
        place = (layer - 1) % block
        assert kinds[layer] == 1 + (place or block)  # the first block lacks the edge that comes from the first layer
    assert (vertex_kinds(_apart(pack(network.normalized()))) == np.arange(len(kinds))).all()
    changed = list(network.vectors)
    changed[1 + 5 * block] = changed[1 + 5 * block] + 1.0
    turned = [NetworkEdge(edge.source, edge.target, edge.matrix, edge.rows, edge.columns[::-1]
                          if edge.source == 7 * block else edge.columns) for edge in network.edges]
    again = vertex_kinds(pack(CostNetwork(changed, turned).normalized()))
    assert set(np.flatnonzero(again != kinds).tolist()) >= {1 + 5 * block, 7 * block, 7 * block + 1}


def test_grain():
    p = pack(_blocks(0, 70).normalized())
    rough = in_steps(p, step_of(p))
    assert grain(p, EXACTLY, 1.0) == 0.0
    assert grain(_apart(p), rough, 1.0) == 0.0  # nothing repeats
    assert grain(p, rough, 0.0) == 0.0
    for gap in (1.0, 1e-9):
        step = grain(p, rough, gap)
        assert step == 2.0 ** np.round(np.log2(step))
        assert gap / 4 < step * len(p.matrix) <= gap / 2
    assert 0.0 < grain(p, rough, np.inf) < p.unary.max()
