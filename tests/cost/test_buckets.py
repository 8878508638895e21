"""Gradients that are summed together share their messages, in prices and in the simulator as in the lowering."""

import nets
import numpy as np
import pytest
from prices import price_strategy

from pase_mtf.compat import tf
from pase_mtf.cost.build import build_network
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.cost.memory import MemoryModel
from pase_mtf.cost.signature import waiting_bytes
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph import all_reduces
from pase_mtf.graph.all_reduces import messages_of, way_of
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.simulator.simulate import Simulator

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e30)
# A message is a second and nothing else costs anything.
COUNTING = Machine("counting", _RATES, 1e30, 1e30, 0.0, (Link(8, 1e30, 1.0),))
_WEIGHTS = 8 * 16 + 16 + 16 * 16 + 16 * 8


def _exported(**options):
    return export_graph(nets.build("mlp", "sgd", tf.float32).graph, **options)


def _by_batch(graph, devices):
    return [Configuration((("batch", devices),)) if "batch" in layer.splittable else Configuration((("", devices),))
            for layer in graph.layers]


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("sharded_updates", [False, True])
def test_the_gradients_of_a_program_take_the_messages_of_one_sum(devices, sharded_updates):
    graph = _exported(sharded_updates=sharded_updates)
    assert waiting_bytes(graph.layers) == 4 * _WEIGHTS
    priced = price_strategy(graph, COUNTING, devices, _by_batch(graph, devices))
    messages = float(messages_of(way_of(_WEIGHTS, devices), devices))
    summed = sum(seconds for part, seconds in priced.parts.items()
                 if part in ("all-reduce backward", "resharding backward", "resharding update", "all-reduce update"))
    assert summed == pytest.approx(messages)


@pytest.mark.parametrize("sharded_updates", [False, True])
def test_simulated_sums_share_their_messages(sharded_updates):
    graph = _exported(sharded_updates=sharded_updates)
    priced = build_network(graph, COUNTING, 4, [(one,) for one in _by_batch(graph, 4)])
    strategy = [0] * len(graph.layers)
    messages = float(messages_of(way_of(_WEIGHTS, 4), 4))
    forward = priced.breakdown(strategy).parts["all-reduce forward"]
    # All take the same links, one after the other.
    assert Simulator(priced).seconds(strategy) == pytest.approx(forward + messages)


def test_messages_are_of_elements_of_any_size():
    graph = export_graph(nets.build("mlp", "sgd", tf.bfloat16).graph)
    priced = price_strategy(graph, COUNTING, 4, _by_batch(graph, 4))
    assert priced.parts["all-reduce backward"] == pytest.approx(float(messages_of(way_of(_WEIGHTS, 4), 4)))


def test_split_weights_take_the_messages_of_one_sum(monkeypatch):
    """Gradients of half of each, over pairs of devices; what is summed besides takes whole messages, too."""
    graph, chosen = _exported(), []
    for layer in graph.layers:
        dim = next((dim for dim in ("hidden", "hidden2", "classes") if dim in layer.splittable), None)
        chosen.append(Configuration((("batch", 2), (dim, 2)) if dim and "batch" in layer.splittable else (("", 4),)))
    summed = price_strategy(graph, COUNTING, 4, chosen).parts["all-reduce backward"]
    assert summed == pytest.approx(round(summed))
    # One message for all four gradients; where each is summed by itself, four.
    monkeypatch.setattr(all_reduces, "_BUCKET", 0)
    alone = price_strategy(graph, COUNTING, 4, chosen).parts["all-reduce backward"]
    assert alone - summed == pytest.approx(3.0)


@pytest.mark.parametrize("trees", [False, True])
def test_equal_parts_of_a_bucket_cost_what_it_costs(trees):
    machine = Machine("real", _RATES, 1e30, 1e30, 0.0, (Link(4, 1e9, 1e-5), Link(64, 1e8, 1e-4)), sums_by_trees=trees)
    groups, devices = np.array([[4.0], [8.0]]), np.array([32])
    whole, = allreduce_seconds(np.array([4e5]), groups, devices, machine)
    part, = allreduce_seconds(np.array([1e5]), groups, devices, machine, waiting=4e5)
    alone, = allreduce_seconds(np.array([1e5]), groups, devices, machine)
    assert 4 * part == pytest.approx(whole)
    assert alone > part
    # What is larger than all that waits, or than a bucket takes, is alone.
    for nbytes, waiting in ((8e5, 4e5), (2e6, 1e9)):
        assert allreduce_seconds(np.array([nbytes]), groups, devices, machine, waiting=waiting)[0] == (
            allreduce_seconds(np.array([nbytes]), groups, devices, machine)[0])


def test_without_gradients_nothing_is_divided():
    assert allreduce_seconds(np.zeros(1), np.array([[4.0]]), np.array([4]), COUNTING)[0] == messages_of(
        way_of(0, 4), 4)


@pytest.mark.parametrize(("net", "optimizer", "part"), [
    ("mlp", "sgd", "all-reduce forward"),  # is read before others are made
    ("wide", "adafactor", "all-reduce update")])  # means, of the shapes of biases, each read before the next is made
def test_what_is_read_at_once_is_alone(net, optimizer, part, monkeypatch):
    graph = export_graph(nets.build(net, optimizer, tf.float32).graph)
    split = [Configuration((("features", 4),)) if "features" in layer.splittable else Configuration((("", 4),))
             for layer in graph.layers]
    found = price_strategy(graph, COUNTING, 4, split).parts[part]
    monkeypatch.setattr(all_reduces, "_BUCKET", 0)
    assert price_strategy(graph, COUNTING, 4, split).parts[part] == found > 0


@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_what_is_summed_at_once(shared, monkeypatch):
    """What arrives of all gradients of a bucket is there together; of one at a time where each is alone."""
    graph = _exported()
    strategy = _by_batch(graph, 4)
    whole = MemoryModel(graph, shared).peak(strategy)[0]
    monkeypatch.setattr(all_reduces, "_BUCKET", 8 * 16 + 16)
    some = MemoryModel(graph, shared).peak(strategy)[0]
    monkeypatch.setattr(all_reduces, "_BUCKET", 0)
    alone = MemoryModel(graph, shared).peak(strategy)[0]
    largest = 4 * 16 * 16
    assert alone["communication buffers"] == some["communication buffers"] == largest
    assert whole["communication buffers"] == (largest if shared else 4 * _WEIGHTS)
    assert {part: held for part, held in whole.items() if part != "communication buffers"} == {
        part: held for part, held in alone.items() if part != "communication buffers"}


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32, tf.float64])
def test_what_is_larger_than_a_bucket_waits_for_none_whatever_its_type(dtype, monkeypatch):
    """The lowering counts elements."""
    graph = export_graph(nets.build("mlp", "sgd", dtype).graph)
    whole = waiting_bytes(graph.layers)
    monkeypatch.setattr(all_reduces, "_BUCKET", 200)
    assert waiting_bytes(graph.layers) / whole == pytest.approx((_WEIGHTS - 16 * 16) / _WEIGHTS)


def test_memory_of_a_bucket_is_of_elements_of_any_size(monkeypatch):
    graph = export_graph(nets.build("mlp", "sgd", tf.float64).graph)
    monkeypatch.setattr(all_reduces, "_BUCKET", _WEIGHTS)
    held = MemoryModel(graph, False).peak(_by_batch(graph, 4))[0]
    assert held["communication buffers"] == 8 * _WEIGHTS
