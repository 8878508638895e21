"""A model's word that operations are one layer, and what the export makes of it."""

import contextlib

import numpy as np
import pytest
from harness import device_names, evaluate

import pase_mtf
from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations

STEPS = 4


def _recurrence(graph, mark):
    """A plain recurrence as anybody would write it: h = tanh(x_t W + h U), a loss, gradients and updates."""
    mesh = mtf.Mesh(graph, "mesh")
    batch, old, new = mtf.Dimension("batch", 8), mtf.Dimension("old", 4), mtf.Dimension("new", 4)
    shape = mtf.Shape([batch, new])
    xs = [mtf.import_tf_tensor(mesh, tf.constant(np.random.default_rng(step).normal(size=(8, 4))),
                               mtf.Shape([batch, old])) for step in range(STEPS)]
    with mark(graph):
        w, u = (mtf.get_variable(mesh, name, mtf.Shape([old, new]), dtype=tf.float64,
                                 initializer=tf.random_normal_initializer(seed=number))
                for number, name in enumerate("wu"))
        h = mtf.zeros(mesh, shape, tf.float64)
        for x in xs:
            h = mtf.reshape(h, x.shape)
            h = mtf.tanh(mtf.einsum([x, w], output_shape=shape) + mtf.einsum([h, u], output_shape=shape))
    loss = mtf.reduce_mean(h * h)
    return loss, mtf.gradients([loss], [w, u])


def _exported(mark):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        _recurrence(graph, mark)
        return export_graph(graph)


def test_a_recurrence_is_one_layer():
    marked, unmarked = _exported(pase_mtf.one_layer), _exported(lambda graph: contextlib.nullcontext())
    assert len([layer for layer in unmarked.layers if layer.variables]) == 2
    layer, = [layer for layer in marked.layers if layer.variables]
    assert [variable.name for variable in layer.variables] == ["w", "u"]
    assert layer.kind == "matmul"
    assert layer.name == "einsum"  # of the first operation that would have been a layer anyway
    assert set(layer.splittable) == {"batch", "old", "new"}
    # The same operations, each once, in whatever layers.
    assert [sorted(operation.index for layer in graph.layers for operation in layer.operations)
            for graph in (marked, unmarked)] == [list(range(marked.operations))] * 2


def test_contexts_within_one_another():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        with pase_mtf.one_layer(graph):
            _recurrence(graph, pase_mtf.one_layer)
        # Of all that is made, the outer context leaves one layer.
        assert len([layer for layer in export_graph(graph).layers if layer.operations[0].phase == "forward"]) == 1


@pytest.mark.parametrize("axes", [(("batch", 4),), (("old", 2), ("new", 4)), (("new", 2), ("batch", 2), ("old", 2))])
def test_it_is_lowered_as_one(axes):
    results = []
    for configuration in (Configuration(), Configuration(axes)):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            loss, gradients = _recurrence(graph, pase_mtf.one_layer)
            exported = export_graph(graph)
            chosen = [configuration if layer.variables else Configuration() for layer in exported.layers]
            plan = plan_from_configurations(graph, exported, chosen, 8)
            results.append(evaluate(PlanLowering(graph, plan, device_names(8)), [loss, *gradients]))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12)


def test_a_shift_survives_a_file(tmp_path):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        dim = mtf.Dimension("row", 8)
        x = mtf.import_tf_tensor(mesh, tf.zeros([8]), mtf.Shape([dim]))
        mtf.shift(x, -3, dim, wrap=False)
        exported = export_graph(graph)
    exported.save(tmp_path / "graph.json")
    shifts = [operation.shift for layer in ComputationGraph.load(tmp_path / "graph.json").layers
              for operation in layer.operations if operation.type == "ShiftOperation"]
    assert shifts == [("row", -3)]
