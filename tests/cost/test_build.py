"""The cost network: sums of parts, each shape priced once, errors."""

import dataclasses

import numpy as np
import pytest
from prices import price_strategy
from small_graphs import dense, perceptron

from pase_mtf.cost import build as build_module
from pase_mtf.cost.build import build_network
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Edge
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.machine import KINDS, Link, Machine
from pase_mtf.search import check_certificate, solve
from pase_mtf.search.network import CostNetwork

REAL = Machine.load("1080ti")
SHARED = Machine("shared", dict.fromkeys(KINDS, 1e11), 1e10, 1e9, 1e-6, (Link(64, 1e10, 1e-6),), shared_cores=True)


@pytest.mark.parametrize("machine", [REAL, SHARED])
@pytest.mark.parametrize("model", ["seconds", "pase"])
def test_network_is_the_sum_of_its_parts(machine, model):
    graph = perceptron()
    priced = build_network(graph, machine, 8, model=model)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assignment = [int(rng.integers(len(choices))) for choices in priced.configurations]
        breakdown = priced.breakdown(assignment)
        assert breakdown.total == pytest.approx(priced.network.cost(assignment))
        assert sum(breakdown.parts.values()) == pytest.approx(breakdown.total)
        chosen = [choices[index] for choices, index in zip(priced.configurations, assignment, strict=True)]
        assert price_strategy(graph, machine, 8, chosen, model).total == pytest.approx(breakdown.total)
        assert [priced.index(layer, choice) for layer, choice in enumerate(chosen)] == assignment


def test_default_configurations():
    graph = perceptron()
    for machine in (REAL, SHARED):
        priced = build_network(graph, machine, 8)
        for layer, choices in zip(graph.layers, priced.configurations, strict=True):
            assert choices == enumerate_configurations(layer, 8)
        idle = build_network(graph, machine, 8, idle=True)
        assert any(choice.devices < 8 for choice in idle.configurations[0])


def test_equal_layers_and_edges_are_priced_once(monkeypatch):
    calls = {"layer": 0, "edge": 0}

    def counted(name, function):
        def wrapped(*args):
            calls[name] += 1
            return function(*args)
        return wrapped

    monkeypatch.setattr(build_module, "layer_parts", counted("layer", build_module.layer_parts))
    monkeypatch.setattr(Reshardings, "seconds", counted("edge", Reshardings.seconds))
    graph = perceptron([64] * 50)
    priced = build_network(graph, REAL, 8)
    # Names differ from layer to layer; shapes do not. Forward and backward edges cut the same tensor in the same ways.
    assert calls == {"layer": 1, "edge": 1}
    assert priced.network.distinct_matrices == 1
    assert len({id(parts) for parts in priced.parts}) == 1


def test_only_sizes_that_matter_are_distinguished():
    graph = perceptron([64, 128, 64, 128, 64])
    priced = build_network(graph, REAL, 8)
    assert len({id(parts) for parts in priced.parts}) == 2


def test_data_parallelism_moves_nothing_between_layers():
    graph = perceptron()
    breakdown = price_strategy(graph, REAL, 8, [Configuration((("batch", 8),))] * 3)
    assert set(breakdown.edges) == {0.0}
    assert breakdown.parts["all-reduce backward"] > 0


def test_alternating_splits_move_nothing():
    """The paper's observation: out-channels, then in-channels."""
    graph = perceptron([64, 64, 64])
    chosen = [Configuration((("width1", 8),)), Configuration((("width1", 8),))]
    assert price_strategy(graph, REAL, 8, chosen).edges == (0.0, 0.0)
    other = [Configuration((("width1", 8),)), Configuration((("width2", 8),))]
    assert price_strategy(graph, REAL, 8, other).edges[0] > 0


def test_renamed_dims_are_followed():
    layers = (dense("a", 32, 64, 64, dims=("batch", "in", "out")), dense("b", 32, 64, 64, dims=("rows", "in", "out")))
    edge = Edge(0, 1, "x", "forward", (32, 64), 4, ("batch", "out"), ("rows", "in"))
    graph = ComputationGraph("renamed", layers, (edge,), 8)
    same = price_strategy(graph, REAL, 8, [Configuration((("batch", 8),)), Configuration((("rows", 8),))])
    assert same.edges == (0.0,)
    crossed = price_strategy(graph, REAL, 8, [Configuration((("batch", 8),)), Configuration((("in", 8),))])
    assert crossed.edges[0] > 0


def test_bandwidth_and_speed_scale_costs():
    graph = perceptron()
    fast = dataclasses.replace(REAL, memory_bandwidth=2 * REAL.memory_bandwidth, overhead=REAL.overhead / 2)
    fast = dataclasses.replace(fast, links=tuple(
        dataclasses.replace(link, bandwidth=2 * link.bandwidth, latency=link.latency / 2) for link in REAL.links))
    slow, quick = build_network(graph, REAL, 16), build_network(graph, fast, 16)
    for one, other in zip(slow.edge_matrices, quick.edge_matrices, strict=True):
        np.testing.assert_allclose(one.matrix, 2 * other.matrix)


def test_errors():
    graph = perceptron()
    with pytest.raises(UsageError, match="did you mean 'seconds'"):
        build_network(graph, REAL, 8, model="second")
    with pytest.raises(UsageError, match="links at most 64"):
        build_network(graph, SHARED, 128)
    with pytest.raises(UsageError, match="configurations for 1 layers, the graph has 3"):
        build_network(graph, REAL, 8, [[Configuration()]])
    with pytest.raises(UsageError, match="needs 32 devices, there are 4"):
        build_network(graph, REAL, 4, [[Configuration((("batch", 32),))]] * 3)
    with pytest.raises(UsageError, match=r"dense1.*no dim 'heads'"):
        price_strategy(graph, REAL, 8, [Configuration(), Configuration((("heads", 2),)), Configuration()])
    priced = build_network(graph, REAL, 8)
    with pytest.raises(UsageError, match="cannot be split as"):
        priced.index(0, Configuration((("batch", 4),)))
    with pytest.raises(UsageError, match="a strategy of 2 layers"):
        priced.breakdown([0, 0])
    edge = graph.edges[0]
    twice = dataclasses.replace(edge, source_dims=(edge.source_dims[0],) * len(edge.source_dims))
    with pytest.raises(UsageError, match="one of its layer's dims twice"):
        build_network(dataclasses.replace(graph, edges=(twice, *graph.edges[1:])), REAL, 8)


def test_the_kept_normal_form_changes_no_result():
    network = build_network(perceptron(), REAL, 8).network
    anew = CostNetwork(network.vectors, network.edges, network.kinds)
    assert network.normalized() is network.normalized()
    assert anew.normalized() is not anew.normalized()
    kept, fresh = solve(network), solve(anew)
    assert (kept.assignment, kept.cost, kept.lower_bound) == (fresh.assignment, fresh.cost, fresh.lower_bound)
    check_certificate(anew, kept)
