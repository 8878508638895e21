"""Memory of a device, by hand on tiny layers."""

import dataclasses

import numpy as np
import pytest
from small_graphs import dense, perceptron

from pase_mtf.cost.memory import MEMORY_PARTS, layer_memory, strategy_memory
from pase_mtf.graph.computation_graph import Operand, Variable
from pase_mtf.graph.configurations import Configuration, enumerate_configurations


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
