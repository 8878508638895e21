"""Sums of several layers that are added: what is whole, or in other parts, is added to one of the parts."""

import random

import harness
import pytest
from nets import Builder, Net, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations

BATCH, INPUTS, HIDDEN, HEADS, WIDE = (dim(name, 8) for name in ("batch", "inputs", "hidden", "heads", "wide"))


def _net():
    """Three layers beside each other: what they make is added, and so are the gradients of what they read."""
    b = Builder(tf.float64)
    x = mtf.tanh(mtf.einsum([b.input("x", [BATCH, INPUTS]), b.variable("first", [INPUTS, HIDDEN])], [BATCH, HIDDEN]))
    made = []
    for number, inner in enumerate((HEADS, WIDE, HEADS)):
        y = mtf.tanh(mtf.einsum([x, b.variable(f"in{number}", [HIDDEN, inner])], [BATCH, inner]))
        made.append(mtf.einsum([y, b.variable(f"out{number}", [inner, HIDDEN])], [BATCH, HIDDEN]))
    z = mtf.tanh(mtf.add_n(made))
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([z, b.variable("last", [HIDDEN, WIDE])], [BATCH, WIDE])))
    variables = b.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    return Net(b.graph, b.mesh, loss, [z], list(mtf.optimize.SgdOptimizer(0.5).apply_grads(gradients, variables)))


def _trained(rule):
    with tf.Graph().as_default():
        net = _net()
        return harness.train(net, rule(net), [{}] * harness.STEPS, outputs=net.outputs)


def _lowered(choose, devices):
    def rule(net):
        graph = export_graph(net.graph)
        plan = plan_from_configurations(net.graph, graph, choose(graph), devices)
        return PlanLowering(net.graph, plan, harness.device_names(devices), shared_memory=False)

    return rule


def _random(seed, devices):
    def choose(graph):
        rng, found = random.Random(seed), []
        for layer in graph.layers:
            offered = enumerate_configurations(layer, devices)
            in_parts = [each for each in offered if any(name in (HEADS.name, WIDE.name) for name, _ in each.axes)]
            found.append(rng.choice(in_parts or offered))
        return found

    return choose


@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_of_one_device(seed):
    found, one = _trained(_lowered(_random(seed, 8), 8)), _trained(harness.stock())
    harness.assert_same(found.variables, one.variables)
    harness.assert_same({"outputs": found.outputs[0]}, {"outputs": one.outputs[0]})


def test_what_is_whole_is_added_to_one_of_the_parts():
    """Of three sums that are added two are in parts over other axes: one of them is added to a part of the other. The
    third is whole, in a layer that splits nothing, which needs the sum."""
    axes = {"out0": (("heads", 2), ("", 2)), "out1": (("", 2), ("wide", 2)), "out2": (("", 4),)}

    def choose(graph):
        weights = [next((name for name in axes for variable in layer.variables if variable.name == name), "")
                   for layer in graph.layers]
        return [Configuration(axes.get(name, (("", 4),))) for name in weights]

    with tf.Graph().as_default():
        net = _net()
        lowering = _lowered(choose, 4)(net)
        additions = [operation for operation in net.graph.operations if type(operation).__name__ == "AddOperation"]
        pending = [isinstance(lowering.stored(operation.outputs[0]), mtf.ops.LazyAllreduceSum)
                   for operation in additions]
    assert pending[:2] == [True, False]
