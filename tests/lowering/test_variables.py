"""What is assigned to variables, and which memory they keep: where stock Mesh-TF goes by place or by luck."""

import types

import numpy as np
import pytest
from harness import device_names, session
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.lowering.lowering import PlanLowering, lower
from pase_mtf.lowering.mesh_spec import MeshSpec

_DEVICES = device_names(4)


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


def _over(axes):
    """A mesh of axes, a dim on each."""
    return MeshSpec(tuple((frozenset([name]), parts) for name, parts in axes.items()),
                    tuple(range(int(np.prod(list(axes.values()))))))


def _after(lowering, steps, variable):
    """The value of a variable after some operations, one after another."""
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for step in steps:
            run.run(step)
        return run.run(variable.operation.get_master())


@pytest.mark.parametrize("assign", [mtf.assign, mtf.assign_add])
@pytest.mark.parametrize(("axes", "updating"), [
    ({"hidden": 4}, None), ({"copy": 4}, None), ({"copy": 2, "hidden": 2}, None), ({"model": 4}, None),
    ({"hidden": 4}, {"copy": 2}), ({"copy": 4}, {"hidden": 4})])
def test_a_value_may_name_its_dims_otherwise_than_the_variable(builder, assign, axes, updating):
    model, hidden, copy = dim("model", 8), dim("hidden", 16), dim("copy", 16)
    x, w = builder.input("x", [dim("batch", 8), model]), builder.variable("w", [model, hidden])
    kept, total = builder.variable("kept", [model, copy]), builder.variable("total", [dim("all", 8), copy])
    given = [w * 2.0, mtf.einsum([x, w], [dim("batch", 8), hidden])]  # the second may be a sum
    updates = [assign(variable.operation, value) for variable, value in zip((kept, total), given, strict=True)]
    lowering = PlanLowering(
        builder.graph, dict.fromkeys(builder.graph.operations, _over(axes)), _DEVICES,
        updates=updating and dict.fromkeys((kept.operation, total.operation), _over(updating)))
    update = tf.group([lowering.lowered_operation(operation) for operation in updates])
    masters, collect = [each.operation.get_master() for each in (kept, total)], lowering.copy_slices_to_masters()
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for step in (update, collect):
            run.run(step)
        found = run.run(masters)
    weights = 0.5 * builder.values("w", [8, 16])
    for name, value, wanted in zip(("kept", "total"), found, (2.0 * weights, builder.values("x", [8, 8]) @ weights),
                                   strict=True):
        before = 0.5 * builder.values(name, [8, 16]) if assign is mtf.assign_add else 0.0
        np.testing.assert_allclose(value, before + wanted, rtol=1e-4, atol=1e-5)


def test_a_master_whose_memory_readers_share_is_no_slice(builder):
    """TensorFlow's older variables, as programs have them that turn off what came with its version 2, are changed in
    place under those who read them."""
    with tf.variable_scope("older", use_resource=False):
        w = builder.variable("w", [dim("a", 64), dim("b", 2**14)])
    x = w
    for _ in range(20):
        x = mtf.sin(x)
    total, update = x + w, mtf.assign_add(w.operation, mtf.ones(builder.mesh, w.shape))
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({})), _DEVICES[:1])
    out, op = lowering.export_to_tf_tensor(total), lowering.lowered_operation(update)
    collect = lowering.copy_slices_to_masters()
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        before = run.run(w.operation.get_master())
        for _ in range(5):
            want = before
            for _ in range(20):
                want = np.sin(want)
            np.testing.assert_allclose(run.run([out, op])[0], want + before, rtol=1e-4, atol=1e-5)
            before = before + 1.0
        run.run(collect)
        np.testing.assert_allclose(run.run(w.operation.get_master()), before, rtol=1e-5)


def test_who_fetches_one_of_two_updates_need_not_feed_the_other(builder):
    """Two losses share weights, and each is trained in steps of its own."""
    batch, model, hidden = dim("batch", 8), dim("model", 512), dim("hidden", 512)
    w, fed = builder.variable("w", [model, hidden]), [tf.placeholder(tf.float32, [8, 512]) for _ in range(2)]
    inputs = [mtf.import_tf_tensor(builder.mesh, x, mtf.Shape([batch, model])) for x in fed]
    losses = [mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [batch, hidden]))) for x in inputs]
    gradients = [mtf.gradients([loss], [w])[0] for loss in losses]
    updates = [mtf.assign_sub(w.operation, gradient * 0.1) for gradient in gradients]
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"batch": 4})), _DEVICES)
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for update, x in zip(updates, fed, strict=True):
            run.run(lowering.lowered_operation(update), {x: np.ones([8, 512])})


def test_an_imported_constant_can_still_be_fed(builder):
    """Also one too large for TensorFlow's functions of slices to look at."""
    x = tf.constant(np.zeros([80], np.float32))
    y = mtf.import_tf_tensor(builder.mesh, x, mtf.Shape([dim("y", 80)])) + 1.0
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"y": 4})), _DEVICES)
    out = lowering.export_to_tf_tensor(y)
    with session() as run:
        np.testing.assert_array_equal(run.run(out, {x: np.ones([80])}), np.full([80], 2.0))


def test_who_fetches_one_of_two_updates_need_not_feed_the_weight_of_the_other(builder):
    batch, model, hidden = dim("batch", 8), dim("model", 512), dim("hidden", 512)
    w, x = builder.variable("w", [model, hidden]), builder.input("x", [batch, model])
    scales = [tf.placeholder(tf.float32, []) for _ in range(2)]
    losses = [mtf.reduce_mean(mtf.square(mtf.einsum([x * scale, w], [batch, hidden]))) for scale in scales]
    updates = [mtf.assign_sub(w.operation, mtf.gradients([loss], [w])[0] * 0.1) for loss in losses]
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"batch": 4})), _DEVICES)
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for update, scale in zip(updates, scales, strict=True):
            run.run(lowering.lowered_operation(update), {scale: 1.0})


def test_random_numbers_follow_the_global_step_which_is_a_variable():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        noise = mtf.random_uniform(b.mesh, mtf.Shape([dim("batch", 16)]))
        exported, step = export_graph(b.graph), tf.train.get_or_create_global_step()
        strategy = types.SimpleNamespace(graph_hash=exported.hash,
                                         configurations=[Configuration()] * len(exported.layers))
        out = lower(b.graph, strategy, device_names(2), step=step).export_to_tf_tensor(noise)
        advance = tf.assign_add(step, 1)
        with session() as run:
            run.run(tf.global_variables_initializer())
            first, again = run.run(out), run.run(out)
            run.run(advance)
            second = run.run(out)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("assign", [mtf.assign_sub, mtf.assign])
def test_what_a_weight_was_is_moved_once_to_where_it_is_updated(builder, assign):
    """Its decay is computed there, and reads it, too; what is replaced is not read."""
    w = builder.variable("w", [dim("a", 8), dim("b", 8)])
    decay = w * 0.5
    update = assign(w.operation, decay)
    there = _over({"a": 4})
    plan = dict.fromkeys(builder.graph.operations, _over({"none": 4})) | {decay.operation: there}
    lowering = PlanLowering(builder.graph, plan, _DEVICES, shared_memory=False, updates={w.operation: there})
    slices = [node for node in tf.get_default_graph().get_operations() if node.type == "Slice"]
    assert len(slices) == 4
    steps = [lowering.lowered_operation(update), lowering.copy_slices_to_masters()]
    found = _after(lowering, steps, w)
    np.testing.assert_allclose(found, 0.25 * builder.values("w", [8, 8]), rtol=1e-5)


def test_who_runs_one_of_two_updates_does_not_run_what_the_other_waits_for(builder):
    """What still holds the old value is not waited for where that would run another update."""
    batch, model, hidden = dim("batch", 8), dim("model", 512), dim("hidden", 512)
    w, x = builder.variable("w", [model, hidden]), builder.input("x", [batch, model])
    count = builder.variable("count", [])
    counted = mtf.assign_add(count.operation, mtf.ones(builder.mesh, mtf.Shape([])))
    losses = [mtf.reduce_mean(mtf.square(mtf.einsum([given, w], [batch, hidden])))
              for given in (x, mtf.depend(x, [counted]))]
    updates = [mtf.assign_sub(w.operation, mtf.gradients([loss], [w])[0] * 0.1) for loss in losses]
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"batch": 4})), _DEVICES)
    steps = [lowering.lowered_operation(updates[0]), lowering.copy_slices_to_masters()]
    found = _after(lowering, steps, count)
    np.testing.assert_allclose(found, 0.5 * builder.values("count", []), rtol=1e-6)


def test_an_imported_scalar_that_is_a_constant_can_still_be_fed(builder):
    """Functions of slices are given it as it is."""
    rate = tf.constant(2.0)
    y = builder.input("y", [dim("y", 8)]) * mtf.import_tf_tensor(builder.mesh, rate, mtf.Shape([]))
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"y": 4})), _DEVICES)
    out = lowering.export_to_tf_tensor(y)
    with session() as run:
        np.testing.assert_allclose(run.run(out, {rate: 3.0}), 3.0 * builder.values("y", [8]), rtol=1e-5)


def test_a_sum_that_one_assignment_gives_to_two_variables_is_made_once():
    """As it is where each of them has an assignment of its own."""
    def additions(grouped):
        with tf.Graph().as_default():
            b = Builder(tf.float32)
            batch, hidden = dim("batch", 8), dim("hidden", 16)
            total = mtf.reduce_sum(b.input("x", [batch, hidden]), output_shape=mtf.Shape([hidden]))
            split, whole = (b.variable(name, [hidden]) for name in ("split", "whole"))
            updates = [mtf.assign(variable.operation, total) for variable in (split, whole)]
            if grouped:
                b.graph.combine_assignments(updates)
            plan = dict.fromkeys(b.graph.operations, _over({"batch": 4})) | {split.operation: _over({"hidden": 4})}
            PlanLowering(b.graph, plan, _DEVICES, shared_memory=False)
            return sum(node.type == "AddN" for node in tf.get_default_graph().get_operations())

    assert additions(True) == additions(False)


def test_an_update_waits_for_the_gradient_of_what_no_update_needs(builder):
    """It is named after that, and holds the weight."""
    batch, model, hidden, out = dim("batch", 8), dim("model", 8), dim("hidden", 512), dim("out", 512)
    x, first = builder.input("x", [batch, model]), builder.variable("first", [model, hidden])
    last = builder.variable("last", [hidden, out])
    product = mtf.einsum([mtf.einsum([x, first], [batch, hidden]), last], [batch, out])
    gradients = mtf.gradients([mtf.reduce_mean(product)], [first, last])
    for variable, gradient in zip((first, last), gradients, strict=True):
        mtf.assign_sub(variable.operation, gradient)
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"batch": 4})), _DEVICES)
    for piece in lowering.variables[last.operation].laid_out_tensor.all_slices:
        assign, = (node for node in piece.handle.consumers() if node.type == "AssignSubVariableOp")
        waited = [node.name for node in assign.control_inputs if node.type == "Einsum"]
        assert len(waited) == 1
        assert "/gradients/" in waited[0]


@pytest.mark.parametrize("kind", ["step", "one-hot", "deviation"])
def test_who_fetches_one_of_two_updates_need_not_feed_what_the_other_draws_or_looks_up_by(builder, kind):
    batch, model, hidden = dim("batch", 8), dim("model", 512), dim("hidden", 512)
    w, x = builder.variable("w", [model, hidden]), builder.input("x", [batch, model])
    fed = tf.placeholder(tf.int32 if kind == "step" else tf.float32, [])
    if kind == "step":
        factor = mtf.random_uniform(builder.mesh, x.shape)
    elif kind == "deviation":
        factor = mtf.random_normal(builder.mesh, x.shape, stddev=fed)
    else:
        factor = mtf.one_hot(builder.labels("labels", [batch], 512), model, on_value=fed, dtype=tf.float32)
    losses = [mtf.reduce_mean(mtf.square(mtf.einsum([given, w], [batch, hidden]))) for given in (x * factor, x)]
    updates = [mtf.assign_sub(w.operation, mtf.gradients([loss], [w])[0] * 0.1) for loss in losses]
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _over({"batch": 4})), _DEVICES,
                            step=fed if kind == "step" else None)
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        run.run(lowering.lowered_operation(updates[1]))
