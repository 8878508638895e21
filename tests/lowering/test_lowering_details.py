"""Single facts about the lowering: what stock Mesh-TF gets wrong, what must not depend on the plan, what is refused."""

import types

import numpy as np
import pytest
from harness import device_names, evaluate, session, stock_lowering, train
from nets import Builder, Net, build, cross_entropy, dim, random_plan

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import InfeasibleError, MismatchError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation
from pase_mtf.graph.configurations import Configuration
from pase_mtf.layout.shapes import ShapeMeshImpl
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.lowering import PlanLowering, lower
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.plans import plan_from_configurations, uniform_plan
from pase_mtf.operations.registry import splittable_dims

_DEVICES = device_names(8)


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


def _spec(axes, devices=None):
    """A spec of {"dim": parts} or [(dims, parts)]."""
    pairs = axes.items() if isinstance(axes, dict) else axes
    axes = tuple((frozenset([names] if isinstance(names, str) else names), parts) for names, parts in pairs)
    return MeshSpec(axes, tuple(devices or range(int(np.prod([parts for _, parts in axes])))))


def _plan(graph, default, special=()):
    return {op: dict(special).get(op, default) for op in graph.operations}


def _values(lowering, *tensors):
    return evaluate(lowering, tensors)


def test_a_rename_moves_a_dim_to_another_axis(builder):
    x = mtf.import_tf_tensor(builder.mesh, tf.constant([0., 1., 2., 3.]), [dim("x", 4)])
    y = mtf.reshape(x, [dim("y", 4)])
    spec = _spec({"x": 2, "y": 2})
    lowering = PlanLowering(builder.graph, _plan(builder.graph, spec), _DEVICES[:4])
    np.testing.assert_array_equal(_values(lowering, y)[0], [0, 1, 2, 3])


def test_reshapes_that_every_cut_survives_emit_one_node_per_device(builder):
    x = builder.input("x", [dim("a", 8), dim("b", 4)])
    y = mtf.reshape(x, [dim("c", 4), dim("d", 8)])
    spec = _spec([(("a", "c"), 4)])
    graph = tf.get_default_graph()
    PlanLowering(builder.graph, _plan(builder.graph, spec), _DEVICES[:4])
    assert sum(op.type == "Reshape" for op in graph.get_operations()) == 4
    assert y.shape.size == 32


def test_a_sum_stays_lazy_between_layers_of_one_mesh(builder):
    x, y = builder.input("x", [dim("a", 8), dim("b", 8)]), builder.input("y", [dim("a", 8), dim("b", 8)])
    total = mtf.reduce_sum(x, reduced_dim=dim("a", 8)) + mtf.reduce_sum(y, reduced_dim=dim("a", 8))
    renamed = mtf.rename_dimension(total, "b", "c") * 2.0
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": 4})), _DEVICES[:4])
    assert sum(op.type == "AddN" for op in tf.get_default_graph().get_operations()) == 1
    want = 2 * (builder.values("x", [8, 8]) + builder.values("y", [8, 8])).sum(0)
    np.testing.assert_allclose(_values(lowering, renamed)[0], want, rtol=1e-4, atol=1e-5)


def test_a_variable_is_read_once_per_step_and_updates_follow(builder):
    """Stock Mesh-TF reads at every use: after the update, if it happens to come first."""
    w = builder.variable("w", [dim("a", 64)])
    x = w
    for _ in range(20):
        x = mtf.sin(x)
    total, update = x + w, mtf.assign(w.operation, w + 1.0)
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": 4})), _DEVICES[:4])
    out, op = lowering.export_to_tf_tensor(total), lowering.lowered_operation(update)
    slices = lowering.variables[w.operation].laid_out_tensor.all_slices
    reads = [node for node in tf.get_default_graph().get_operations()
             if node.type == "ReadVariableOp" and node.inputs[0] is slices[0].handle]
    assert len(reads) == 1
    value = builder.values("w", [64]) * 0.5
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for step in range(5):
            want = value + step
            for _ in range(20):
                want = np.sin(want)
            np.testing.assert_allclose(run.run([out, op])[0], want + value + step, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("columns", "waits"), [(2**16, 1), (64, 0)])
def test_updates_of_large_variables_wait_for_all_that_hold_the_value(builder, columns, waits):
    """Else TensorFlow copies the variable before it assigns; a small one is copied sooner than waited for. What no
    update needs is not waited for: TensorFlow would run it for that alone."""
    w = builder.variable("w", [dim("a", 8), dim("b", columns)])
    folded = mtf.reshape(w, [dim("a", 8), dim("c", 2), dim("d", columns // 2)])
    squares, sines = mtf.square(folded), mtf.sin(w)
    mtf.cos(mtf.reshape(w, [dim("e", 8), dim("b", columns)]))
    update = mtf.assign_sub(w.operation, mtf.reshape(squares, w.shape) + sines)
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": 4})), _DEVICES[:4])
    lowering.lowered_operation(update)
    operations = tf.get_default_graph().get_operations()
    assigns = [op for op in operations if op.type == "AssignSubVariableOp"]
    assert len(assigns) == 4
    for kind in ("Square", "Sin"):
        found = {op for op in operations if op.type == kind}
        waited = [found.intersection(assign.control_inputs) for assign in assigns]
        assert [len(nodes) for nodes in waited] == [waits] * 4, kind
        assert set.union(*waited) == (found if waits else set()), kind
    idle = {op for op in operations if op.type == "Cos"}
    assert len(idle) == 4
    assert not any(idle.intersection(assign.control_inputs) for assign in assigns)


def test_grouped_assignments_run_in_the_layout_of_each_variable(builder):
    a, b = builder.variable("a", [dim("x", 8)]), builder.variable("b", [dim("x", 8)])
    update = mtf.ops.Assign([a.operation, b.operation], [b * 1.0, a * 1.0])
    plan = random_plan(builder.graph, 8, 5)
    plan[a.operation], plan[b.operation] = _spec({"x": 8}), _spec({"x": 2}, [7, 3])
    lowering = PlanLowering(builder.graph, plan, _DEVICES)
    op, collect = lowering.lowered_operation(update), lowering.copy_slices_to_masters()
    with session() as run:
        run.run(tf.global_variables_initializer())
        masters = [v.get_master() for v in builder.graph.all_variables]
        before = run.run(masters)
        for command in (lowering.copy_masters_to_slices(), op, collect):
            run.run(command)
        after = run.run(masters)
    np.testing.assert_array_equal(after, before[::-1])


def test_slices_are_neither_initialised_nor_saved(builder):
    builder.variable("w", [dim("x", 8)])
    count = len(tf.global_variables())
    PlanLowering(builder.graph, _plan(builder.graph, _spec({"x": 8})), _DEVICES)
    assert len(tf.global_variables()) == count


def _random_values(plan_seed, devices, shared, stock_seed=7):
    with tf.Graph().as_default():
        tf.set_random_seed(stock_seed)
        b = Builder(tf.float32)
        x = b.input("x", [dim("batch", 16), dim("model", 8)])
        shape = mtf.Shape([dim("batch", 16), dim("model", 8)])
        outputs = [mtf.dropout(x, True, rate=0.5), mtf.random_uniform(b.mesh, shape, minval=-2, maxval=3),
                   mtf.random_normal(b.mesh, mtf.Shape([dim("model", 8)]), stddev=2.0), mtf.random_normal(b.mesh, []),
                   mtf.ops.RandomOperation(b.mesh, shape, tf.random.truncated_normal).outputs[0]]
        names = device_names(devices)
        plan = (random_plan(b.graph, devices, plan_seed) if plan_seed is not None
                else uniform_plan(b.graph, "", "", names))
        lowering = PlanLowering(b.graph, plan, names, shared_memory=shared)
        fetches = [lowering.export_to_tf_tensor(t) for t in outputs]
        with session(devices) as run:
            return [run.run(fetches) for _ in range(3)]


def test_random_numbers_do_not_depend_on_the_plan():
    steps = _random_values(None, 1, True)
    for plan_seed, devices, shared in [(0, 8, True), (1, 8, False), (2, 4, False), (3, 4, True)]:
        for want, got in zip(steps, _random_values(plan_seed, devices, shared), strict=True):
            for one, other in zip(got, want, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
    for one, other in zip(steps[0], steps[1], strict=True):
        assert not np.array_equal(one, other)
    assert np.all((steps[0][1] >= -2) & (steps[0][1] < 3))
    assert not np.array_equal(_random_values(None, 1, True, stock_seed=8)[0][1], steps[0][1])
    # Chunks are made with seeds of their own.
    assert len(np.unique(steps[0][1])) > 120


@pytest.mark.parametrize("axis", [{"batch": 6}, {"units": 8}, {"batch": 2, "units": 4}])
def test_a_device_draws_no_more_of_a_large_random_tensor_than_it_has(builder, axis):
    noise = mtf.random_uniform(builder.mesh, mtf.Shape([dim("batch", 6), dim("length", 512), dim("units", 8192)]))
    PlanLowering(builder.graph, _plan(builder.graph, _spec(axis)), _DEVICES, shared_memory=False)
    drawn = [np.prod(tf.get_static_value(op.inputs[0])) for op in tf.get_default_graph().get_operations()
             if op.type == "StatelessRandomUniform"]
    assert sum(drawn) == noise.shape.size
    assert len(drawn) <= 64


def test_random_numbers_can_follow_the_step():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        noise = mtf.random_uniform(b.mesh, mtf.Shape([dim("batch", 16)]))
        step = tf.placeholder(tf.int64, [])
        out = PlanLowering(b.graph, _plan(b.graph, _spec({"batch": 8})), _DEVICES, step=step).export_to_tf_tensor(noise)
        with session() as run:
            first, second, again = (run.run(out, {step: number}) for number in (3, 4, 3))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(("asked", "wanted"), [({}, 1), ({"parallel_iterations": 3}, 3)])
def test_a_loop_runs_one_iteration_at_a_time(builder, asked, wanted):
    """Unless it is told otherwise: TensorFlow begins up to ten, and holds the activations of ten microbatches."""
    x = builder.input("x", [dim("a", 8)])
    count = mtf.import_tf_tensor(builder.mesh, tf.constant(0), [])
    last = mtf.while_loop(lambda i, *_: mtf.less(i, 5), lambda i, s: [i + 1, s + s], [count, x], **asked)
    lowering = PlanLowering(builder.graph, random_plan(builder.graph, 4, 3), _DEVICES[:4])
    assert {node.get_attr("parallel_iterations") for node in tf.get_default_graph().get_operations()
            if node.type in ("While", "StatelessWhile")} == {wanted}
    np.testing.assert_allclose(_values(lowering, last[1])[0], 32 * builder.values("x", [8]), rtol=1e-5)


def test_the_gradient_of_an_input_that_all_parts_share_is_summed(builder):
    batch = dim("batch", 8)
    x, w = builder.input("x", [batch, dim("f", 4)]), builder.variable("w", [dim("f", 4)])
    y = mtf.slicewise(lambda x, w: x * w, [x, w], output_shape=x.shape, splittable_dims=[batch])
    gradient, = mtf.gradients([mtf.reduce_sum(y)], [w])
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"batch": 8})), _DEVICES)
    np.testing.assert_allclose(_values(lowering, gradient)[0], builder.values("x", [8, 4]).sum(0), rtol=1e-5)


def test_plans_accept_mesh_implementations_and_other_devices(builder):
    net = mtf.reduce_sum(builder.input("x", [dim("a", 8)]))
    impl = placement_mesh_impl.PlacementMeshImpl("m:2", "a:m", [_DEVICES[5], _DEVICES[2]])
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, impl), _DEVICES)
    assert lowering.mesh_impl(net).devices == [_DEVICES[5], _DEVICES[2]]
    np.testing.assert_allclose(_values(lowering, net)[0], builder.values("x", [8]).sum(), rtol=1e-5)
    with pytest.raises(UsageError, match=r"CPU:5.*add it"):
        PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, impl), _DEVICES[:4])
    with pytest.raises(UsageError, match="no mesh for operation"):
        PlanLowering(builder.graph, {}, _DEVICES)
    with pytest.raises(UsageError, match=r"device 7.*only 4"):
        PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": 8})), _DEVICES[:4])


@pytest.mark.parametrize("given", [list, tuple, mtf.Shape])
def test_shapes_may_be_lists_of_dims_as_in_stock(given):
    dims = [dim("a", 8), dim("b", 4), dim("c", 3)]
    stock = placement_mesh_impl.PlacementMeshImpl("rows:2;cols:2", "a:rows;b:cols", _DEVICES[:4])
    spec = MeshSpec.of_layout("rows:2;cols:2", "a:rows;b:cols", range(4))
    for ours in (DeviceMeshImpl(spec, Emitter(_DEVICES[:4])), ShapeMeshImpl(stock.shape, stock.layout_rules)):
        assert ours.slice_shape(given(dims)) == stock.slice_shape(given(dims)) == [4, 2, 3]
        assert ours.tensor_layout(given(dims)) == stock.tensor_layout(given(dims))
        assert ours.laid_out_size(given(dims)) == stock.laid_out_size(given(dims))


def test_dims_that_cannot_be_split_stay_whole(builder):
    x = builder.input("x", [dim("a", 6), dim("b", 8)])
    y = mtf.concat([x, x], "b")
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec([(("a", "b"), 4)])), _DEVICES[:4])
    assert lowering.mesh_impl(x).slice_shape(x.shape) == [6, 2]
    assert lowering.mesh_impl(y).slice_shape(y.shape) == [6, 16]
    assert _values(lowering, y)[0].shape == (6, 16)


def test_counters_and_exports_are_those_of_stock():
    """One mesh and layout for everything: the same element counts as mtf.Lowering has."""
    shape, layout, names = "rows:2;cols:2", "batch:rows;hidden:cols", _DEVICES[:4]

    def counters(ours):
        with tf.Graph().as_default():
            net = build("mlp", "sgd", tf.float32)
            if ours:
                lowering = PlanLowering(net.graph, uniform_plan(net.graph, shape, layout, names), names)
            else:
                impl = placement_mesh_impl.PlacementMeshImpl(shape, layout, names)
                lowering = mtf.Lowering(net.graph, {net.mesh: impl}, autostack=False)
            train(net, lowering, [{}])
            return sorted((key, value) for key, value in lowering.counters if "allreduce" not in key)

    assert counters(True) == counters(False)


@pytest.mark.parametrize(("name", "layout"), [
    ("mlp", "batch:all"), ("mlp", "hidden:all"), ("cnn", "batch:all"),
    pytest.param("transformer", "batch:all", marks=pytest.mark.slow),
    ("transformer", "heads:all;ff:all;vocabulary:all"), ("odd_functions", "batch:all")])
def test_no_more_nodes_than_stock(name, layout):
    names = _DEVICES[:4]

    def nodes(ours):
        with tf.Graph().as_default() as tf_graph:
            net = build(name, "adam", tf.float32)
            before = len(tf_graph.get_operations())
            if ours:
                lowering = PlanLowering(net.graph, uniform_plan(net.graph, "all:4", layout, names), names)
            else:
                impl = placement_mesh_impl.PlacementMeshImpl("all:4", layout, names)
                lowering = mtf.Lowering(net.graph, {net.mesh: impl})
            lowering.copy_masters_to_slices()
            lowering.copy_slices_to_masters()
            return len(tf_graph.get_operations()) - before

    assert nodes(True) <= nodes(False)


def _one_layer(graph, splittable=("batch", "features")):
    operations = tuple(
        LayerOperation(number, op.name, type(op).__name__, "forward", "pointwise", 0.0, (), (), ())
        for number, op in enumerate(graph.operations))
    layer = Layer("only", "matmul", {"batch": 8, "features": 8}, splittable, operations, ())
    return ComputationGraph("net", (layer,), (), len(operations))


def test_configurations_become_meshes():
    with tf.Graph().as_default():
        graph = build("mlp", "sgd", tf.float32).graph
        exported = _one_layer(graph)
        plan = plan_from_configurations(graph, exported, [Configuration((("batch", 2), ("", 2)))], 8)
        assert set(plan) == set(graph.operations)
        assert set(plan.values()) == {_spec([("batch", 2), ((), 2)])}
        for configurations, devices, error, match in [
                ([], 8, MismatchError, "0 configurations for 1 layers"),
                ([Configuration((("batch", 8),))], 4, InfeasibleError, "8 devices, there are 4"),
                ([Configuration((("hidden", 2),))], 4, InfeasibleError, "cannot split dim 'hidden'"),
                ([Configuration((("batch", 3),))], 4, InfeasibleError, "does not split into 3 shards")]:
            with pytest.raises(error, match=match):
                plan_from_configurations(graph, exported, configurations, devices)
        graph.operations.pop()
        with pytest.raises(MismatchError, match="export it again"):
            plan_from_configurations(graph, exported, [Configuration()], 4)


def test_a_strategy_of_another_graph_is_refused():
    with tf.Graph().as_default():
        graph = build("mlp", "sgd", tf.float32).graph
        strategy = types.SimpleNamespace(graph_hash="0" * 16, configurations=())
        with pytest.raises(MismatchError, match=r"0000000000000000.*search again"):
            lower(graph, strategy, _DEVICES)


def test_what_can_be_split(builder):
    image = builder.input("x", [dim("batch", 4), dim("h", 8), dim("w", 8), dim("c", 4)])
    kernel = builder.variable("f", [dim("fh", 3), dim("fw", 3), dim("c", 4), dim("d", 4)])
    y = mtf.ops.Conv2dOperation(image, kernel, [1, 1, 1, 1], "SAME").outputs[0]
    pooled = mtf.ops.PoolOperation(y, (2, 2), (2, 2), "MAX_2D").outputs[0]
    mtf.gradients([mtf.reduce_sum(pooled)], [image, kernel])
    kinds = {type(op).__name__: splittable_dims(op) for op in builder.graph.operations}
    for kind in ("Conv2dOperation", "Conv2or3dBackpropInputOperation", "Conv2or3dBackpropFilterOperation"):
        assert kinds[kind] == {"batch", "c", "d"}
    assert kinds["PoolOperation"] == kinds["PoolBackPropOperation"] == {"batch", "d"}
    up = mtf.ops.Conv2dTransposeOperation(y, kernel, [1, 2, 2, 1], "SAME")
    assert splittable_dims(up) == {"batch", "d"}
    anonymous = mtf.anonymize(y).operation
    assert splittable_dims(anonymous) == {"batch", "h", "w", "d"}
    twice = mtf.einsum([builder.input("a", [dim("n", 4), dim("k", 4)]), builder.input("b", [dim("k", 4), dim("n", 8)])],
                       [dim("n", 4), dim("n", 8)])
    assert splittable_dims(twice.operation) == {"k"}


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int8, tf.int64])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_one_hot_of_narrow_indices(builder, dtype, parts):
    """The difference of an index and where a shard begins is another index in eight bits: 5 - 192 is 69."""
    places, rows = dim("places", 128), dim("rows", 384)
    indices = np.arange(128) * (2 if dtype == tf.uint8 else 1)
    hot = mtf.one_hot(mtf.import_tf_tensor(builder.mesh, tf.constant(indices, dtype), mtf.Shape([places])), rows)
    spec = _spec({"rows": parts})
    (got,) = _values(PlanLowering(builder.graph, _plan(builder.graph, spec), _DEVICES, shared_memory=False), hot)
    np.testing.assert_array_equal(got, np.eye(384)[indices])


def test_bfloat16_activations_and_integer_einsums(builder):
    a, b = dim("a", 8), dim("b", 8)
    w = mtf.get_variable(builder.mesh, "w", mtf.Shape([a, b]), initializer=tf.ones_initializer(),
                         dtype=mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16))
    x = mtf.import_tf_tensor(builder.mesh, tf.ones([8], tf.bfloat16), mtf.Shape([a]))
    y = mtf.cast(mtf.einsum([x, w], [b]), tf.float32)
    ints = mtf.import_tf_tensor(builder.mesh, tf.ones([8, 8], tf.int32), mtf.Shape([a, b]))
    z = mtf.einsum([ints, mtf.range(builder.mesh, a, tf.int32)], [b])
    update = mtf.assign_sub(w.operation, w)
    got = _values(PlanLowering(builder.graph, random_plan(builder.graph, 8, 2), _DEVICES), y, z)
    np.testing.assert_array_equal(got[0], np.full(8, 8.0))
    np.testing.assert_array_equal(got[1], np.full(8, 28))
    program = Net(builder.graph, builder.mesh, mtf.reduce_sum(y), updates=[update])
    trained = train(program, PlanLowering(builder.graph, random_plan(builder.graph, 8, 2), _DEVICES), [{}, {}])
    assert trained.losses.tolist() == [64.0, 0.0]
    np.testing.assert_array_equal(trained.variables["w"], np.zeros((8, 8)))


@pytest.mark.parametrize("kind", ["MAX_3D", "AVG_3D"])
def test_volumes(builder, kind):
    """Convolution, transposed convolution and pooling in three dimensions, and their gradients."""
    batch, spatial = dim("batch", 4), [dim(name, 4) for name in ("d", "h", "w")]
    x, y, z = dim("x", 4), dim("y", 4), dim("z", 4)
    taps = [dim(name, 3) for name in ("fd", "fh", "fw")]
    weights = [builder.variable("f", [*taps, x, y]), builder.variable("g", [*taps, z, y])]
    image = builder.input("image", [batch, *spatial, x])
    out = mtf.ops.Conv3dOperation(image, weights[0], [1, 1, 1, 1, 1], "SAME").outputs[0]
    out = mtf.ops.Conv3dTransposeOperation(out, weights[1], [1, 2, 2, 2, 1], "SAME").outputs[0]
    out = mtf.ops.PoolOperation(out, (2, 2, 2), (2, 2, 2), kind).outputs[0]
    results = [out, *mtf.gradients([mtf.reduce_mean(mtf.square(out))], [image, *weights])]
    want = _values(stock_lowering(builder.mesh), *results)
    for seed in range(2):
        lowering = PlanLowering(builder.graph, random_plan(builder.graph, 8, seed), _DEVICES)
        for one, other in zip(_values(lowering, *results), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_prints_summaries_and_imported_slices(builder, capfd):
    x = builder.input("x", [dim("a", 8)])
    total = mtf.Print(mtf.reduce_sum(x), [x], "the whole input", summarize=8)
    mtf.scalar_summary("total", total)
    laid_out = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.range(8.0)] * 2)
    copies = mtf.import_laid_out_tensor(builder.mesh, laid_out, mtf.Shape([dim("a", 8)]))
    lowering = PlanLowering(builder.graph, random_plan(builder.graph, 8, 1), _DEVICES)
    got = _values(lowering, total, copies)
    np.testing.assert_allclose(got[0], builder.values("x", [8]).sum(), rtol=1e-5)
    np.testing.assert_array_equal(got[1], np.arange(8))
    assert "the whole input" in capfd.readouterr().err


@pytest.mark.parametrize("shape", [("a", "b"), ("b",)])
def test_what_is_printed_fits_no_layout_and_is_whole(builder, shape):
    """Two dims of it are on one axis, or one does not divide."""
    x = builder.input("x", [dim("a", 8)])
    y = builder.input("y", [dim(name, 8 if len(shape) > 1 else 6) for name in shape])
    shown = mtf.Print(x, [y], "y")
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec([(("a", "b"), 4)])), _DEVICES[:4])
    np.testing.assert_allclose(_values(lowering, shown)[0], builder.values("x", [8]), rtol=1e-6)


@pytest.mark.parametrize(("mesh_shape", "rules"), [
    ("rows:2;cols:4", "a:cols;b:rows"), ("rows:2;cols:2", "b:cols"), ("all:4", "a:all"), ("all:2", "")])
def test_slices_laid_out_for_a_mesh_follow_any_plan(builder, mesh_shape, rules):
    """What `make_slices` cut is known by its nodes, in whatever order the mesh holds it, copies and all."""
    shape, size = mtf.Shape([dim("a", 8), dim("b", 4)]), mtf.convert_to_shape(mesh_shape).size
    impl = placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape(mesh_shape), mtf.convert_to_layout_rules(rules), [""] * size)
    whole = tf.reshape(tf.range(32.0), [8, 4])
    x = mtf.import_laid_out_tensor(builder.mesh, impl.LaidOutTensor(impl.make_slices(whole, shape)), shape)
    doubled = 2.0 * x
    lowering = PlanLowering(builder.graph, random_plan(builder.graph, 8, 1), _DEVICES)
    got = _values(lowering, doubled)
    np.testing.assert_array_equal(got[0], 2 * np.arange(32.0).reshape(8, 4))


def test_slices_that_only_one_mesh_has_follow_any_plan(builder):
    """One dim over all devices: the slices are its blocks in order, whatever made them."""
    made = [tf.fill([2, 4], float(number)) for number in range(4)]
    slices = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor(made)
    x = mtf.import_laid_out_tensor(builder.mesh, slices, mtf.Shape([dim("a", 8), dim("b", 4)]))
    lowering = PlanLowering(builder.graph, random_plan(builder.graph, 8, 1), _DEVICES)
    np.testing.assert_array_equal(_values(lowering, x)[0], np.repeat(np.arange(4.0), 2)[:, None] * np.ones(4))


@pytest.mark.parametrize("sizes", [(4, 2), (8, 2), (3, 4)])
def test_slices_that_several_meshes_have_are_refused(builder, sizes):
    """Four of a quarter, of a half with copies, of a size that does not fit: nobody knows which lies where."""
    slices = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.zeros(sizes)] * 4)
    mtf.import_laid_out_tensor(builder.mesh, slices, mtf.Shape([dim("a", 8), dim("b", 4)]))
    with pytest.raises(UsageError, match=r"4 slices of shape .* use mtf\.import_tf_tensor"):
        PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": 2})), _DEVICES)


def test_feeds_of_unknown_batch(builder):
    feed = tf.placeholder(tf.float32, [None, 4])
    x = mtf.import_tf_tensor(builder.mesh, feed, mtf.Shape([dim("batch", 8), dim("f", 4)]))
    labels = mtf.import_tf_tensor(builder.mesh, tf.zeros([8], tf.int32), mtf.Shape([dim("batch", 8)]))
    loss = cross_entropy(x, labels, dim("f", 4))
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"batch": 8})), _DEVICES)
    with session() as run:
        got = run.run(lowering.export_to_tf_tensor(loss), {feed: np.zeros([8, 4])})
    np.testing.assert_allclose(got, np.log(4), rtol=1e-6)


def test_updates_follow_every_read_before_them(builder):
    """An update that depends on nothing that was read would else be of the value before or after, as it comes."""
    w = builder.variable("w", [dim("a", 64)])
    mtf.reduce_sum(mtf.read_variable(w.operation))
    update = mtf.assign_sub(w.operation, builder.input("x", [dim("a", 64)]))
    PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": 4})), _DEVICES[:4]).lowered_operation(update)
    nodes = tf.get_default_graph().get_operations()
    assigns = [node for node in nodes if node.type == "AssignSubVariableOp"]
    assert len(assigns) == 4
    for assign in assigns:
        reads = {node for node in nodes if node.type == "ReadVariableOp" and node.inputs[0] is assign.inputs[0]}
        assert len(reads) == 2
        assert reads <= set(assign.control_inputs)


@pytest.mark.parametrize("kind", [float, np.float32])
@pytest.mark.parametrize("parts", [1, 4])
def test_zeros_keep_their_sign(builder, parts, kind):
    shape = mtf.Shape([dim("a", 8)])
    zeros = [mtf.constant(builder.mesh, kind(value), shape) for value in (0.0, -0.0)]
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"a": parts})), _DEVICES[:4])
    for value, negative in zip(evaluate(lowering, zeros), (False, True), strict=True):
        assert (np.signbit(value) == negative).all()


@pytest.mark.parametrize("filled", [False, True])
def test_tensors_without_elements_are_moved_and_renamed(builder, filled):
    batch, last = dim("batch", 8), dim("d", 4)
    shape = mtf.Shape([batch, dim("memory", 0), last])
    empty = mtf.zeros(builder.mesh, shape) if filled else mtf.import_tf_tensor(builder.mesh, tf.zeros([8, 0, 4]), shape)
    x = builder.input("x", [batch, dim("length", 6), last])
    y = mtf.concat([mtf.rename_dimension(mtf.tanh(empty), "memory", "length"), x], "length")
    lowering = PlanLowering(builder.graph, _plan(builder.graph, _spec({"batch": 4})), _DEVICES[:4])
    np.testing.assert_array_equal(*_values(lowering, y, x))
