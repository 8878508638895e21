"""Operation classes of a program's own: what the answer says of them, and that what it says runs."""

import types

import harness
import numpy as np
import own_operations as own
import pytest
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.space import parse_mesh_shape, parse_rules
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.operations import registry
from pase_mtf.operations.registry import register_operation

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e9, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))
BATCH, WIDTH, HIDDEN = dim("batch", 16), dim("width", 12), dim("hidden", 32)


def program(*classes, batch=BATCH):
    """A training step with these operations in it."""
    b = Builder(tf.float32)
    h = mtf.einsum([b.input("x", [batch, WIDTH]), b.variable("in", [WIDTH, HIDDEN])], [batch, HIDDEN])
    h = mtf.tanh(h)
    for cls in classes:
        if cls is own.CustomPad:
            h = mtf.slice(cls(h, HIDDEN, (1, 1)).outputs[0], 0, HIDDEN.size, HIDDEN.name)
        elif cls is own.SumOver:
            h -= 0.01 * cls(h, HIDDEN).outputs[0]
        elif cls in (own.FixedSize, own.Centred):
            h += mtf.stop_gradient(cls(h).outputs[0])
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([h, b.variable("out", [HIDDEN, WIDTH])], [batch, WIDTH])))
    if own.ScalarNote in classes:
        loss = own.ScalarNote(loss + 0.0).outputs[0]
    variables = b.graph.trainable_variables
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(
        mtf.gradients([loss], [variable.outputs[0] for variable in variables]), variables)
    return types.SimpleNamespace(graph=b.graph, mesh=b.mesh, loss=loss, updates=updates)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """What a test registers."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_RESOLVED", {})


def losses(classes, rule):
    with tf.Graph().as_default():
        made = program(*classes)
        return harness.train(made, rule(made), [{}] * 2).losses


@pytest.mark.parametrize("cls", [own.CustomPad, own.SumOver, own.Centred])
def test_what_trying_shows_is_used_and_said(cls):
    with tf.Graph().as_default():
        made = program(cls)
        found = find_layout(made.graph, 4, [made.loss], FLAT)
    mesh = parse_mesh_shape(found.mesh_shape)
    assert "batch" in parse_rules(found.layout_rules, mesh)
    assert not found.data_parallel.problem
    assert f"note: {cls.__name__}: splits batch" in str(found)
    assert "found by trying" in str(found)
    want = losses([cls], harness.stock())
    np.testing.assert_allclose(losses([cls], harness.stock(found.mesh_shape, found.layout_rules)), want, rtol=1e-4)
    np.testing.assert_allclose(losses([cls], harness.under_strategy("exact")), want, rtol=1e-4)


def test_a_program_that_takes_its_layout_is_told_the_same():
    def build(mesh_shape, layout):
        made = program(own.Centred)
        return made.graph, [made.loss]
    assert "note: Centred: splits batch, not hidden, found by trying" in find_layout(build, 4, machine=FLAT).notes


def test_a_pending_sum_is_finished_for_what_cannot_read_it():
    """By our own lowering; Mesh-TF's fails, and the layout says so."""
    want = losses([own.ScalarNote], harness.stock())
    np.testing.assert_allclose(losses([own.ScalarNote], harness.under_strategy("exact")), want, rtol=1e-4)


def test_what_cannot_be_tried_is_not_known_to_be_legal():
    with tf.Graph().as_default():
        made = program(own.FixedSize, own.CustomPad, own.SumOver, batch=dim("batch", 2**20))
        noisy = own.Noisy(made.loss)
        found = find_layout(made.graph, 4, [made.loss, *noisy.outputs], FLAT, compare=["all:4;hidden:all"])
        register_operation(own.FixedSize, splittable=["batch"])
        registered = find_layout(made.graph, 4, [made.loss], FLAT)
    text = str(found)
    assert not {"batch", "hidden"} & set(parse_rules(found.layout_rules, parse_mesh_shape(found.mesh_shape)))
    assert "does not lower" not in "\n".join(line for line in text.splitlines() if "hidden:all" not in line)
    assert "not known to be legal: FixedSize (" in text
    assert "Noisy (two runs of it differ" in text
    assert "\n    from own_operations import FixedSize\n" in text
    assert "pase_mtf.register_operation(FixedSize, splittable=[])  # some of: batch, hidden" in text
    assert "warning: data parallel (all:4;batch:all) was kept out: not known to be legal under it: FixedSize" in text
    assert found.data_parallel.row()[3] == "not known to be legal"
    assert "FixedSize" not in str(registered)
    assert "batch" in parse_rules(registered.layout_rules, parse_mesh_shape(registered.mesh_shape))
    # What is known not to lower still is said not to.
    assert found.compared[0].row()[3] == "does not lower"


class _OnEachDevice(own.Same):
    """Goes through the devices by itself."""

    def lower(self, lowering):
        impl, x = lowering.mesh_impl(self), lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        lowering.set_tensor_lowering(self.outputs[0], impl.LaidOutTensor(mtf.parallel(
            impl.devices, lambda t, number: t + 0.0 * number, x.tensor_list, list(range(impl.size)))))


def test_a_lowering_that_goes_through_the_devices_lowers():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        made = _OnEachDevice(mtf.tanh(b.input("x", [BATCH, WIDTH]))).outputs
        found = find_layout(b.graph, 4, made, FLAT, compare=["all:4;batch:all"])
    assert not found.compared[0].problem


def test_a_program_that_takes_its_layout_is_told_of_every_layout_that_was_kept_out():
    def build(mesh_shape, layout):
        made = program(own.FixedSize, batch=dim("batch", 2**20))
        return made.graph, [made.loss]
    notes = "\n".join(find_layout(build, 4, machine=FLAT, compare=["a:2;b:2;batch:a"]).notes)
    why = "was kept out: not known to be legal under it: FixedSize"
    assert f"warning: data parallel (all:4;batch:all) {why}" in notes
    assert f"warning: given 1 (a:2;b:2;batch:a) {why}" in notes


def test_a_class_of_a_function_is_registered_where_it_is_defined():
    class Local(own.Noisy):
        """No import reaches it."""
    with tf.Graph().as_default():
        made = program()
        text = str(find_layout(made.graph, 4, [made.loss, *Local(made.loss).outputs], FLAT))
    assert "\n    pase_mtf.register_operation(Local, splittable=[])" in text
    assert f"of {__name__}, behind the class:\n" in text
    assert f"from {__name__} import" not in text
