"""The paper's formulas, by hand."""

import dataclasses

import numpy as np
import pytest
from prices import price_strategy
from small_graphs import perceptron

from pase_mtf.cost.build import build_network
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine

MACHINE = Machine.load("1080ti")
R = 11.3e12 / 1.5e9


@pytest.mark.parametrize(("splits", "m", "n", "k"), [
    ((), 1, 1, 1), ((("batch", 8),), 8, 1, 1), ((("width1", 8),), 1, 8, 1), ((("width0", 8),), 1, 1, 8),
    ((("batch", 2), ("width1", 2), ("width0", 2)), 2, 2, 2), ((("width0", 4), ("batch", 2)), 2, 1, 4)])
def test_matrix_product(splits, m, n, k):
    graph = perceptron([64, 128])
    priced = build_network(graph, MACHINE, 8, [[Configuration(splits)]], model="pase")
    rows, columns, inner = 32 / m, 128 / n, 64 / k

    def allreduce(words, group):
        return 2 * (group - 1) * words / group

    parts = priced.layer_parts(0, 0)
    assert parts["compute"] == pytest.approx(3 * rows * columns * inner)
    assert parts["all-reduce output"] == pytest.approx(R * allreduce(rows * columns, k))
    assert parts["all-reduce gradients"] == pytest.approx(
        R * (allreduce(rows * inner, n) + allreduce(inner * columns, m)))


def test_edge_counts_both_ways():
    graph = perceptron([64, 64, 64])
    chosen = [Configuration((("batch", 8),)), Configuration((("width1", 8),))]
    # Each device needs an eighth of the columns of all rows and holds an eighth of those; the gradient likewise.
    words = 32 * 64 / 8 * 7 / 8
    assert price_strategy(graph, MACHINE, 8, chosen, model="pase").edges == pytest.approx((2 * R * words, 0))


def test_backward_operations_are_not_charged_twice():
    with_training = build_network(perceptron(), MACHINE, 8, model="pase")
    without = build_network(perceptron(training=False), MACHINE, 8, model="pase")
    for one, other in zip(with_training.network.vectors, without.network.vectors, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(with_training.network.edges) == len(without.network.edges)


def test_weights_read_at_every_time_step_are_reduced_once():
    graph = perceptron([64, 128])
    layer, = graph.layers
    product = layer.operations[0]
    steps = [dataclasses.replace(product, index=10 + number) for number in range(5)]
    unrolled = dataclasses.replace(graph, layers=(dataclasses.replace(
        layer, operations=(*steps, *layer.operations[1:])),))
    for axes, part, times in (((("batch", 8),), "all-reduce gradients", 1), ((("batch", 8),), "compute", 5),
                              ((("width1", 8),), "all-reduce gradients", 5)):  # of the activations, at every step
        once, often = (build_network(one, MACHINE, 8, [[Configuration(axes)]], model="pase").layer_parts(0, 0)[part]
                       for one in (graph, unrolled))
        assert often == pytest.approx(times * once)
        assert once > 0


def test_gradients_of_scale_and_bias():
    x, entries = Operand(("batch", "width"), (32, 64)), Operand(("width",), (64,))
    operations = [
        LayerOperation(0, "mean", "ReduceOperation", "forward", "reduction", 2048.0, x.dims, (x,), (entries,),
                       ("batch",)),
        LayerOperation(1, "centre", "BinaryOp", "forward", "pointwise", 2048.0, x.dims, (x, entries), (x,)),
        LayerOperation(2, "scale", "BinaryOp", "forward", "pointwise", 4096.0, x.dims, (x, entries, entries), (x,))]
    layer = Layer("norm", "normalize", {"batch": 32, "width": 64}, x.dims, tuple(operations),
                  (Variable("scale", entries, True), Variable("bias", entries, True)))
    graph = ComputationGraph("norm", (layer,), (), 3)

    def parts(*axes):
        return build_network(graph, MACHINE, 8, [[Configuration(axes)]], model="pase").layer_parts(0, 0)

    assert parts(("batch", 8))["all-reduce gradients"] == pytest.approx(R * 2 * (2 * 7 / 8 * 64))
    assert parts(("batch", 2), ("width", 4))["all-reduce gradients"] == pytest.approx(R * 2 * (2 * 1 / 2 * 16))
    assert parts(("width", 8))["all-reduce gradients"] == 0


def test_what_is_found_again_is_computed_once():
    graph = perceptron([64, 128])
    layer, = graph.layers
    product = layer.operations[0]
    twice = dataclasses.replace(graph, layers=(dataclasses.replace(layer, operations=(
        product, dataclasses.replace(product, index=10, repeats=True), *layer.operations[1:])),))
    one, other = (build_network(each, MACHINE, 8, [[Configuration((("batch", 8),))]], model="pase").layer_parts(0, 0)
                  for each in (graph, twice))
    assert one["compute"] == pytest.approx(other["compute"])


@pytest.mark.parametrize("itemsize", [2, 8])
def test_a_word_is_an_element_of_any_type(itemsize):
    def sized(operand):
        return dataclasses.replace(operand, itemsize=itemsize)

    graph = perceptron([64, 128, 64])
    layers = tuple(dataclasses.replace(
        layer, variables=tuple(dataclasses.replace(one, operand=sized(one.operand)) for one in layer.variables),
        operations=tuple(dataclasses.replace(one, inputs=tuple(map(sized, one.inputs)),
                                             outputs=tuple(map(sized, one.outputs))) for one in layer.operations))
        for layer in graph.layers)
    other = dataclasses.replace(graph, layers=layers, edges=tuple(
        dataclasses.replace(edge, itemsize=itemsize) for edge in graph.edges))
    expected, found = (build_network(each, MACHINE, 8, model="pase") for each in (graph, other))
    for mine, theirs in zip(expected.parts, found.parts, strict=True):
        np.testing.assert_allclose(theirs, mine)
