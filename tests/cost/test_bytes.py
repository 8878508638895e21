"""Memory of a device, by hand on tiny layers."""

import dataclasses
import itertools

import numpy as np
import pytest
from small_graphs import dense, perceptron

from pase_mtf.cost.memory import MEMORY_PARTS, fullest_moment, layer_memory, strategy_memory
from pase_mtf.graph.computation_graph import ComputationGraph, Operand, Variable
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.strategy.find import find_strategy


def _memory(layer, *axes):
    return dict(zip(MEMORY_PARTS, layer_memory(layer, [Configuration(axes)])[:, 0], strict=True))


def test_weights_gradients_activations():
    layer = dense("dense", 32, 64, 128)
    assert _memory(layer) == {"weights": 4 * 64 * 128, "optimizer slots": 0, "gradients": 4 * 64 * 128,
                              "activations": 4 * 32 * 128, "communication buffers": 0}
    assert _memory(layer, ("batch", 4)) == {
        "weights": 4 * 64 * 128, "optimizer slots": 0, "gradients": 4 * 64 * 128, "activations": 32 * 128,
        "communication buffers": 4 * 64 * 128}
    assert _memory(layer, ("out", 4))["weights"] == 64 * 128
    assert _memory(layer, ("out", 4))["communication buffers"] == 4 * 32 * 64
    assert _memory(layer, ("", 4)) == _memory(layer)


def test_slots():
    layer = dense("dense", 32, 64, 128)
    slots = tuple(Variable(f"dense/w_{name}", Operand(("in", "out"), (64, 128)), False) for name in "mv")
    layer = dataclasses.replace(layer, variables=layer.variables + slots)
    assert _memory(layer, ("in", 2))["optimizer slots"] == 2 * 4 * 64 * 128 / 2


def test_without_training_the_largest_tensor_counts():
    layer = dense("dense", 32, 64, 128, training=False)
    found = _memory(layer)
    assert found["gradients"] == 0
    assert found["activations"] == 4 * 32 * 128


def test_strategy_is_the_sum_of_its_layers():
    graph = perceptron()
    rng = np.random.default_rng(1)
    for _ in range(10):
        chosen = []
        total = np.zeros(len(MEMORY_PARTS))
        for layer in graph.layers:
            choices = enumerate_configurations(layer, 8)
            index = int(rng.integers(len(choices)))
            chosen.append(choices[index])
            total += layer_memory(layer, choices)[:, index]
        assert list(strategy_memory(graph, chosen).values()) == pytest.approx(list(total))


def test_more_splits_never_need_more_weights():
    layer = dense("dense", 64, 64, 64)
    whole = layer_memory(layer, [Configuration()])[:4, 0]
    split = layer_memory(layer, enumerate_configurations(layer, 16))[:4]
    assert np.all(split <= whole[:, None])


def _again(name, moment, hidden=64):
    """A dense layer that is computed again in the backward pass: what it makes first is not kept."""
    layer = dense(name, 32, 16, hidden)
    forward = next(operation for operation in layer.operations if operation.phase == "forward")
    once = dataclasses.replace(forward, block=moment, unread=(0,))
    more = dataclasses.replace(forward, phase="backward", block=moment, moments=((moment,),))
    rest = [operation for operation in layer.operations if operation is not forward]
    return dataclasses.replace(layer, operations=(once, more, *rest))


def test_of_what_is_computed_again_the_fullest_moment_counts():
    large, small = _again("large", 1, 64), _again("small", 2, 32)
    plain = dense("plain", 32, 16, 64)
    graph = ComputationGraph("blocks", (plain, large, small), (), 9)
    whole = [Configuration()] * 3
    assert strategy_memory(graph, whole)["activations"] == 4 * 32 * (64 + 64)
    # The larger is split: the other one is what counts.
    split = [Configuration(), Configuration((("batch", 8),)), Configuration()]
    assert strategy_memory(graph, split)["activations"] == 4 * 32 * (64 + 32)
    assert fullest_moment(graph) == 1
    assert fullest_moment(perceptron()) == 0


def test_a_limit_is_kept_where_another_moment_is_the_fullest():
    """What adds up for the search is the moment of the most bytes unsplit; the answer is checked in full."""
    graph = ComputationGraph("blocks", (_again("large", 1, 64), _again("small", 2, 60)), (), 6)
    needs = sorted({sum(strategy_memory(graph, chosen).values()) for chosen in itertools.product(
        *(enumerate_configurations(layer, 4) for layer in graph.layers))})
    free = find_strategy(graph, 4, "h100", simulate=0)
    for limit in needs[len(needs) // 2:]:
        found = find_strategy(graph, 4, "h100", memory_limit=limit, simulate=0)
        assert found.memory_bytes <= limit * (1 + 1e-9)
        assert found.seconds >= free.seconds * (1 - 1e-9)
