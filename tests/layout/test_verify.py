"""The lowering for shapes: what it lowers, what it remembers, and what it sees in loops."""

import pytest
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.layout import verify
from pase_mtf.layout.space import parse_mesh_shape, parse_rules
from pase_mtf.layout.verify import Memo, Verifier

BATCH, WIDTH, HIDDEN = dim("batch", 16), dim("width", 16), dim("hidden", 32)


def stack(layers, microbatches=1):
    """A training step of so many equal layers, in a microbatch loop or not."""
    b = Builder(tf.float32)
    x = b.input("x", [BATCH, WIDTH])

    def model(features):
        y = features["x"]
        for number in range(layers):
            w1, w2 = b.variable(f"in_{number}", [WIDTH, HIDDEN]), b.variable(f"out_{number}", [HIDDEN, WIDTH])
            h = mtf.rsqrt(mtf.square(mtf.einsum([y, w1], reduced_dims=[WIDTH])) + 1.0)
            y += mtf.einsum([h, w2], reduced_dims=[HIDDEN])
        return {"loss": mtf.reduce_mean(mtf.square(y))}

    if microbatches > 1:
        gradients, made = mtf.serialize_training_step({"x": x}, model, BATCH, microbatches)
    else:
        made = model({"x": x})
        gradients = mtf.gradients([made["loss"]], [v.outputs[0] for v in b.graph.trainable_variables])
    mtf.optimize.AdafactorOptimizer(1e-2).apply_grads(gradients, b.graph.trainable_variables)
    return b.graph, made["loss"]


@pytest.fixture
def lowered(monkeypatch):
    """The operations that are lowered by their own code; those that always are left out."""
    found = []

    def spy(self, operation, original=verify._ShapeLowering._lower_anew):
        if Memo().number(operation) is not None:
            found.append(operation.name)
        return original(self, operation)
    monkeypatch.setattr(verify._ShapeLowering, "_lower_anew", spy)
    return found


def problem(verifier, mesh, rules):
    shape = parse_mesh_shape(mesh)
    return verifier.problem(shape, parse_rules(rules, shape))


def test_only_what_has_to_be_is_lowered_every_time():
    with tf.Graph().as_default():
        x = Builder(tf.float32).input("x", [BATCH, WIDTH])
        folded = mtf.reshape(x, [dim("all", 256)]).operation
        passed = mtf.stop_gradient(x).operation
        memo = Memo()
        assert memo.number(folded) is not None
        assert memo.number(passed) is None


@pytest.mark.parametrize("microbatches", [1, 4])
def test_equal_layers_are_lowered_once(lowered, microbatches):
    counts = []
    for layers in (3, 8):
        with tf.Graph().as_default():
            graph, loss = stack(layers, microbatches)
            del lowered[:]
            assert problem(Verifier(graph, [loss]), "a:2;b:2", "batch:a;hidden:b") is None
            counts.append(len(lowered))
    # The first and the last layer have neighbours of their own.
    assert counts[0] == counts[1]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_was_lowered_is_remembered_across_layouts_and_graphs(lowered, microbatches):
    memo = Memo()
    with tf.Graph().as_default():
        graph, loss = stack(3, microbatches)
        verifier = Verifier(graph, [loss], memo)
        assert problem(verifier, "a:4;b:2", "batch:a") is None
        del lowered[:]
        assert problem(verifier, "all:4", "batch:all") is None  # the same, but for an axis that nothing is on
        assert lowered == []
        assert problem(verifier, "all:4", "hidden:all") is None
        assert lowered
    with tf.Graph().as_default():
        graph, loss = stack(5, microbatches)
        del lowered[:]
        assert problem(Verifier(graph, [loss], memo), "rows:4", "batch:rows") is None
        assert lowered == []


def test_a_failure_in_a_loop_names_the_operation_in_it():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x, count = b.input("x", [BATCH, WIDTH]), mtf.constant(b.mesh, 0, dtype=tf.int32)

        def body(number, t):
            return [number + 1, mtf.slicewise(lambda u: tf.cumsum(u, 1), [t], splittable_dims=[BATCH], name="inner")]
        made = mtf.while_loop(lambda number, t: mtf.less(number, 3), body, [count, x])
        verifier = Verifier(b.graph, made)
        assert problem(verifier, "a:2", "batch:a") is None
        found = problem(verifier, "a:2;b:2", "batch:a;width:b")
        assert (found.operation, found.dims) == ("inner", ("width",))


def test_functions_that_declare_other_dims_are_told_apart():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = b.input("x", [BATCH, WIDTH])
        made = [mtf.slicewise(tf.tanh, [x], splittable_dims=dims) for dims in ([BATCH, WIDTH], [BATCH])]
        found = problem(Verifier(b.graph, made), "a:2", "width:a")
        assert found.operation == "slicewise_1"


def test_a_sum_that_a_loop_finishes_does_not_lower_after_it():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        total = mtf.einsum([b.input("x", [BATCH, WIDTH]), b.input("y", [BATCH, HIDDEN])], [WIDTH, HIDDEN])
        count, start = mtf.constant(b.mesh, 0, dtype=tf.int32), b.input("z", [WIDTH, HIDDEN])
        looped = mtf.while_loop(lambda number, t: mtf.less(number, 3),
                                lambda number, t: [number + 1, t * total], [count, start])
        verifier = Verifier(b.graph, [*looped, mtf.exp(total)])
        assert problem(verifier, "a:2", "hidden:a") is None
        for _ in range(2):
            found = problem(verifier, "a:2", "batch:a")
            assert found is not None
            assert "cannot be used after it" in found.reason
            assert found.dims == ("batch",)


def test_a_feed_of_unknown_batch_lowers_only_where_it_is_split():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = mtf.import_tf_tensor(b.mesh, tf.placeholder(tf.float32, [None, 16]), mtf.Shape([BATCH, WIDTH]))
        verifier = Verifier(b.graph, [mtf.einsum([x, b.input("w", [WIDTH, HIDDEN])], [BATCH, HIDDEN])])
        assert problem(verifier, "a:2", "batch:a") is None
        assert problem(verifier, "a:2;b:2", "batch:a;hidden:b") is None
        found = problem(verifier, "a:2", "hidden:a")
        assert found is not None
        assert "(None, 16)" in found.reason
        assert found.depends


def test_a_sum_that_a_loop_finishes_is_no_output_after_it():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        total = mtf.einsum([b.input("x", [BATCH, WIDTH]), b.input("y", [BATCH, HIDDEN])], [WIDTH, HIDDEN])
        count, start = mtf.constant(b.mesh, 0, dtype=tf.int32), b.input("z", [WIDTH, HIDDEN])
        looped = mtf.while_loop(lambda number, t: mtf.less(number, 3),
                                lambda number, t: [number + 1, t * total], [count, start])
        found = problem(Verifier(b.graph, [*looped, total]), "a:2", "batch:a")
        assert "cannot be used after it" in found.reason
        assert (found.operation, found.dims) == (total.operation.name, ("batch",))
