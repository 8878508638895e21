"""Operations that are alike: read once, and known as well as if each had been read by itself."""

import dataclasses

import pytest
from nets import NETS, Builder, build, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.compute import layer_parts
from pase_mtf.cost.signature import layer_signature, layer_signatures, nameless
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import enumerate_configurations
from pase_mtf.layout import costs
from pase_mtf.layout.legality import StockLegality
from pase_mtf.layout.space import MeshShape
from pase_mtf.layout.verify import Memo, Verifier
from pase_mtf.machine.machine import Machine
from pase_mtf.operations import alike, facts
from pase_mtf.operations.alike import Alike

BATCH, WIDTH, HIDDEN = dim("batch", 16), dim("width", 16), dim("hidden", 32)


def stack(layers):
    """A training step of so many equal layers."""
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        y = b.input("x", [BATCH, WIDTH])
        for number in range(layers):
            w1, w2 = b.variable(f"in_{number}", [WIDTH, HIDDEN]), b.variable(f"out_{number}", [HIDDEN, WIDTH])
            h = mtf.slicewise(tf.tanh, [mtf.einsum([y, w1], reduced_dims=[WIDTH])], splittable_dims=[BATCH, HIDDEN])
            y += mtf.einsum([h, w2], reduced_dims=[HIDDEN]) * 0.5
        loss = mtf.reduce_mean(mtf.square(y))
        variables = b.graph.trainable_variables
        mtf.optimize.AdafactorOptimizer(1e-2).apply_grads(
            mtf.gradients([loss], [variable.outputs[0] for variable in variables]), variables)
        return b.graph


@pytest.mark.parametrize("name", NETS)
def test_what_is_shared_is_what_each_is_by_itself(name, monkeypatch):
    with tf.Graph().as_default():
        graph = build(name, "adafactor", tf.float32).graph
        shared = export_graph(graph)
        monkeypatch.setattr(Alike, "number", lambda self, operation: None)
        alone = export_graph(graph)
    # Which of them are found again is not told without it.
    layers = tuple(dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, repeats=False) for operation in layer.operations)) for layer in shared.layers)
    assert alone == dataclasses.replace(shared, layers=layers)


def test_the_layers_of_a_stack_are_read_once(monkeypatch):
    counts = []
    monkeypatch.setattr(facts, "_common", lambda *given, read=facts._common: counts.append(given) or read(*given))
    found = []
    for layers in (3, 8):
        del counts[:]
        export_graph(stack(layers))
        found.append(len([given for given in counts if not isinstance(given[0], mtf.Assign)]))
    assert found[0] == found[1]


def test_operations_that_differ_are_told_apart():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x, other = b.input("x", [BATCH, WIDTH]), b.input("y", [BATCH, HIDDEN])
        made = [mtf.relu(x), mtf.relu(other), x * 2.0, x * 3.0, mtf.cast(x, tf.bfloat16),
                *(mtf.shift(x, offset, WIDTH, wrap=True) for offset in (1, 2)),
                *(mtf.slicewise(tf.tanh, [x], splittable_dims=[name]) for name in (BATCH, WIDTH))]
        again = [mtf.relu(b.input("z", [BATCH, WIDTH])), mtf.shift(x, 2, WIDTH, wrap=True)]
        known = Alike()
        numbers = [known.number(tensor.operation) for tensor in made]
        assert None not in numbers
        assert len(set(numbers)) == len(numbers)
        assert [known.number(tensor.operation) for tensor in again] == [numbers[0], numbers[6]]


def test_an_operation_of_several_graphs_is_looked_at_once(monkeypatch):
    looked_at = []
    monkeypatch.setattr(alike, "lowering_key",
                        lambda operation, key=alike.lowering_key: looked_at.append(operation) or key(operation))
    memo, graphs = Memo(), [stack(2), stack(4)]
    numbers = memo.alike
    for graph in graphs:
        export_graph(graph, alike=numbers)
        assert Verifier(graph, memo=memo).problem(MeshShape((("all", 2),)), {"batch": "all"}) is None
    assert len(looked_at) == len(set(looked_at))
    found = [{numbers.lowering(operation) for operation in graph.operations if type(operation).__name__ != "Assign"}
             for graph in graphs]
    assert found[0] <= found[1]


@pytest.mark.parametrize("name", NETS)
def test_layers_that_differ_in_names_only_cost_the_same(name):
    with tf.Graph().as_default():
        exported = export_graph(build(name, "adafactor", tf.float32).graph)
    assert layer_signatures(exported.layers) == list(map(layer_signature, exported.layers))
    first = {}
    for layer in exported.layers:
        other = first.setdefault(nameless(layer), layer)
        if other is layer:
            continue
        choices = list(enumerate_configurations(layer, 4))
        assert choices == list(enumerate_configurations(other, 4))


def test_the_layers_of_a_stack_are_priced_once_for_layouts(monkeypatch):
    priced = []
    monkeypatch.setattr(costs, "layer_parts",
                        lambda signature, *others, price=layer_parts: priced.append(signature) or price(
                            signature, *others))
    found = []
    for layers in (3, 8):
        del priced[:]
        graph = stack(layers)
        mesh = MeshShape((("rows", 2), ("cols", 4)))
        costs.LayoutCosts(export_graph(graph), Machine.load("h100"), StockLegality(graph)).total(
            mesh, {"batch": 0, "hidden": 1})
        found.append(len(priced))
    assert found[0] == found[1] > 0
