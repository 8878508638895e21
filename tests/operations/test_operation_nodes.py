"""What an operation of Mesh-TF becomes on a device: nodes and traffic."""

import functools
import types

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.operations import tracing
from pase_mtf.operations.einsum import largest_besides, product_of
from pase_mtf.operations.facts import read_operations
from pase_mtf.operations.nodes import Nodes
from pase_mtf.operations.tracing import MadeEarly, draws_anew, made_early, traced_nodes


@pytest.fixture
def x():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        shape = mtf.Shape([mtf.Dimension("rows", 4), mtf.Dimension("columns", 8)])
        yield mtf.import_tf_tensor(mesh, tf.ones([4, 8]), shape)


def nodes_of(operation):
    (fact,) = [fact for fact in read_operations(operation.mesh.graph) if fact.operation is operation]
    return fact.nodes


def _slicewise(function, x):
    return mtf.slicewise(function, [x], splittable_dims=x.shape.dims)


def test_a_function_of_one_node(x):
    assert nodes_of(_slicewise(tf.nn.relu, x).operation) == Nodes(1, 1.0, 0.0)


def test_a_function_of_many_nodes(x):
    found = nodes_of(_slicewise(lambda x: tf.sigmoid(x) * tf.tanh(x) + tf.reshape(x, [4, 8]), x).operation)
    # Sigmoid, tanh, product and sum work; the reshape is only run.
    assert found.count == 5
    assert found.traffic == (2 + 2 + 3 + 3) / 2


def test_functions_in_equal_wrappers_are_told_apart(x):
    assert tf.math.softplus.__code__ is tf.math.reduce_variance.__code__
    one, other = (_slicewise(function, x).operation for function in (tf.math.softplus, tf.math.reduce_variance))
    assert nodes_of(one).count == 1
    assert nodes_of(other).count > 3


def test_functions_of_one_text_are_traced_once(x):
    known = {}
    for power in (2.0, 3.0):
        traced_nodes(_slicewise(lambda x, power=power: tf.pow(x, power), x).operation, (), known)
    assert len(known) == 1


@pytest.mark.parametrize("made", [
    lambda times: lambda x: tf.sigmoid(tf.tile(x, [1, times])),
    lambda times: lambda x, times=times: tf.tile(x, [1, times]),
    lambda times: functools.partial(lambda times, x: tf.tile(x, [1, times]), times)])
def test_functions_of_one_text_that_hold_other_numbers_are_told_apart(x, made):
    rows, columns = x.shape.dims
    known = {}
    for times in (1, 4):
        operation = mtf.slicewise(made(times), [x], mtf.Shape([rows, mtf.Dimension("more", times * columns.size)]),
                                  x.dtype, [rows]).operation
        again = mtf.ops.SlicewiseOperation(made(times), [x], [operation.outputs[0].shape], [x.dtype], [rows])
        assert traced_nodes(operation, (), known) is traced_nodes(again, (), known)
    assert len(known) == 2


_TIMES = 1


def _several(x):
    return _twice(x) if _TIMES == 2 else tf.sigmoid(x)


def _twice(x):
    return tf.sigmoid(tf.sigmoid(x))


def test_a_function_is_traced_once_whatever_graph_it_is_of(monkeypatch):
    """One that makes something else of the same slices is another, also where only what its module holds has changed;
    of one that holds who knows what nobody can say."""
    traces, trace = [], tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *given: traces.append(given) or trace(*given))
    monkeypatch.setattr(tracing, "_TRACED", {})

    def nodes(function):
        with tf.Graph().as_default():
            rows = mtf.Dimension("rows", 4)
            x = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "mesh"), tf.ones([4]), [rows])
            return traced_nodes(mtf.slicewise(function, [x], splittable_dims=[rows]).operation, (), {}).count

    def powers(times):
        def function(x):
            for _ in range(times):
                x = tf.sigmoid(x)
            return x
        return function
    assert [nodes(powers(times)) for times in (2, 5, 2, 5)] == [2, 5, 2, 5]
    assert len(traces) == 2
    assert [nodes(lambda x: _several(x)) for _ in range(2)] == [1, 1]
    assert len(traces) == 3
    monkeypatch.setitem(globals(), "_TIMES", 2)
    assert nodes(lambda x: _several(x)) == 2
    monkeypatch.setitem(globals(), "_twice", lambda x: tf.sigmoid(tf.sigmoid(tf.sigmoid(x))))
    assert nodes(lambda x: _several(x)) == 3

    held = types.SimpleNamespace(times=2)
    assert nodes(lambda x: powers(held.times)(x)) == 2
    held.times = 3
    assert nodes(lambda x: powers(held.times)(x)) == 3


def test_the_gradient_that_tensorflow_makes(x):
    y = _slicewise(tf.square, x)
    gradient, = mtf.gradients([mtf.reduce_sum(y)], [x])
    operation = next(operation for operation in gradient.mesh.graph.operations
                     if isinstance(operation, mtf.ops.GenericGradOperation))
    found = nodes_of(operation)
    assert found.count >= 2
    assert found.traffic > 1


@pytest.mark.parametrize(("function", "runs"), [
    (lambda x: x * tf.ones([8]), 4),  # one number per column, for each of the rows
    (lambda x: x * tf.ones([4, 1]) - tf.ones([8]), 8),
    (lambda x: tf.nn.relu(x * 2.0 + x), 0)])
def test_runs_over_which_a_function_broadcasts_less(x, function, runs):
    assert nodes_of(_slicewise(function, x).operation).broadcast_runs == runs


def test_elements_of_a_run_lie_side_by_side():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        a, b, c, d = (mtf.Dimension(name, size) for name, size in zip("abcd", (2, 3, 5, 7), strict=True))
        x = mtf.zeros(mesh, [a, b, c, d])
        for dims, runs in (([c, d], 6), ([a, b], 6), ([d], 30), ([a, d], 30), ([b, c], 30), ([a, b, c, d], 0), ([], 0)):
            other = mtf.zeros(mesh, dims)
            for y in (x + other, mtf.einsum([x, other], output_shape=[a, b, c, d])):
                assert nodes_of(y.operation).broadcast_runs == runs, (y, dims)


@pytest.mark.parametrize(("function", "kind", "flops"), [
    (lambda x: tf.matmul(x, tf.ones([8, 3])), "matmul", 2 * 4 * 8 * 3),
    (lambda x: tf.matmul(tf.ones([5, 3, 4]), tf.tile(x[None], [5, 1, 1])), "matmul", 2 * 5 * 3 * 4 * 8),
    (lambda x: tf.matmul(x, tf.ones([4, 6]), transpose_a=True), "matmul", 2 * 4 * 8 * 6),
    (lambda x: tf.einsum("ab,bcd->dac", x, tf.ones([8, 2, 3])), "matmul", 2 * 4 * 8 * 6),
    (lambda x: tf.einsum("...b,b->...", x, tf.ones([8])), "matmul", 2 * 4 * 8),
    (lambda x: tf.nn.conv2d(x[None, ..., None], tf.ones([3, 3, 1, 5]), 1, "SAME"), "convolution", 2 * 4 * 8 * 9 * 5),
    (lambda x: tf.nn.depthwise_conv2d(tf.reshape(x, [1, 4, 4, 2]), tf.ones([3, 3, 2, 3]), [1] * 4, "SAME"),
     "convolution", 2 * 4 * 4 * 6 * 9),
    (lambda x: tf.einsum("ab->ba", x) + 1.0, "", 0)])
def test_products_within_a_function_are_counted(x, function, kind, flops):
    """Two FLOPs per multiply-add; what is only transposed is no product."""
    found = nodes_of(_slicewise(function, x).operation)
    assert (found.flops, found.multiplies) == (flops, kind)


def test_a_function_that_multiplies_is_costed_by_its_products():
    """Attention, with its logits: larger than all that goes into it and comes out. Its gradient has twice as many
    products: both operands of each have one."""
    batch, length, key = (mtf.Dimension(name, size) for name, size in (("batch", 2), ("length", 64), ("key", 8)))
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        q, k, v = (mtf.get_variable(mesh, name, mtf.Shape([batch, length, key])) for name in "qkv")
        y = mtf.slicewise(lambda q, k, v: tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v), [q, k, v],
                          splittable_dims=[batch])
        mtf.gradients([mtf.reduce_sum(y)], [q, k, v])
        exported = export_graph(mesh.graph)
    operations = {operation.type: operation for layer in exported.layers for operation in layer.operations}
    forward, backward = operations["SlicewiseOperation"], operations["GenericGradOperation"]
    assert (forward.kind, backward.kind) == ("matmul", "matmul")
    products = 2 * 2 * (2 * 64 * 64 * 8)
    assert (forward.flops, backward.flops) == (products + q.shape.size, 2 * products + q.shape.size)
    assert traced_nodes(y.operation, (), {}).besides == 2 * 64 * 64 * 4


def test_a_product_that_is_summed_is_two_nodes(x):
    column = mtf.reduce_sum(x, output_shape=x.shape.dims[:1])
    product = mtf.einsum([x, column], output_shape=x.shape.dims[1:])
    assert nodes_of(product.operation) == Nodes(2, (32 + 4 + 8 + 64) / (32 + 4 + 8), 4.0)


@pytest.mark.parametrize(("assign", "traffic"), [(mtf.assign, 0.0), (mtf.assign_add, 3.0), (mtf.assign_sub, 3.0)])
def test_what_is_added_to_a_variable_is_added_in_place(x, assign, traffic):
    variable = mtf.get_variable(x.mesh, "v", x.shape)
    update = assign(variable.operation, x)
    assert nodes_of(update) == Nodes(1, traffic, 0.0)
    exported = [operation for layer in export_graph(x.mesh.graph).layers for operation in layer.operations
                if operation.type == "Assign"]
    assert [operation.flops for operation in exported] == [32.0 if traffic else 0.0]


def test_functions_that_cannot_be_traced_count_once(x):
    outside = tf.constant(1.0)

    def fails(x):
        if x.graph is not outside.graph:
            raise ValueError("another graph")
        return x * outside

    operation = _slicewise(fails, x).operation
    with pytest.warns(UserWarning, match=r"operation slicewise.*cannot be traced \(ValueError: another graph\)"):
        assert nodes_of(operation) == Nodes(is_stateful=True)


def test_export_tells_nodes(x):
    y = _slicewise(lambda x: tf.sigmoid(x) * x, x)
    graph = export_graph(mtf.gradients([mtf.reduce_sum(y)], [x])[0].mesh.graph)
    found = [operation for layer in graph.layers for operation in layer.operations if operation.nodes > 1]
    assert found
    assert all(operation.traffic > 1 for operation in found)


def test_what_a_gradient_is_done_with_before_gradients_come():
    """Of a product's factors each is read with the gradient of the other; of an exponential, its value."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        shape = mtf.Shape([mtf.Dimension("batch", 8)])
        x, y, dz = (mtf.import_tf_tensor(mtf.Mesh(graph, name), tf.zeros([8]), shape) for name in "xyz")
        for function, still_read, nbytes in (
                (lambda x, y: x * y, (True, True, False, True), 0),
                (lambda x, y: tf.exp(x) + y, (False, False, False, True), 4 * 8),
                (lambda x, y: tf.sin(x) * y, (False, True, False, True), 2 * 4 * 8)):
            z = mtf.slicewise(function, [x, y], shape, tf.float32, [])
            gradient = mtf.ops.GenericGradOperation(z.operation, [dz])
            assert made_early(gradient, [False, False, False, True], {}) == MadeEarly(nbytes, still_read)


def test_a_function_with_a_loop_is_told_to_be_costed_as_one_pass(x):
    def turned(x):
        return tf.while_loop(lambda i, _: i < 9, lambda i, s: (i + 1, tf.matmul(s, tf.ones([8, 8]))),
                             (tf.constant(0), x))[1]
    with pytest.warns(UserWarning, match=r"cannot be traced .*loop"):
        assert nodes_of(_slicewise(turned, x).operation) == Nodes(is_stateful=True)


def test_a_slice_reads_no_more_than_it_makes(x):
    part = mtf.slice(x, 2, 1, "columns").operation
    (fact,) = [fact for fact in read_operations(x.mesh.graph) if fact.operation is part]
    assert (fact.flops, fact.nodes) == (4.0, Nodes(1, 2 * 4 / (32 + 4)))


def test_a_sum_of_one_tensor_makes_no_product(x):
    total = mtf.einsum([x], output_shape=x.shape.dims[1:]).operation
    assert nodes_of(total) == Nodes()
    assert (product_of(total), largest_besides(total)) == (-1, 0)


@pytest.mark.parametrize("cut", [
    lambda x, dim: mtf.unstack(x, dim)[0], lambda x, dim: mtf.split(x, dim, 2)[0],
    lambda x, dim: mtf.slice(x, 0, 2, dim.name)], ids=["unstack", "split", "slice"])
def test_what_is_cut_along_the_first_dim_is_not_copied(x, cut):
    """Where rows are aligned: here of 64 bytes; of 32 they are copied."""
    rows = x.shape.dims[0]
    wide = mtf.import_tf_tensor(x.mesh, tf.ones([4, 16]), mtf.Shape([rows, mtf.Dimension("columns", 16)]))
    assert nodes_of(cut(wide, rows).operation) == Nodes(1, 0.0)
    assert nodes_of(cut(wide, wide.shape.dims[1]).operation).traffic > 0.0
    assert nodes_of(cut(x, rows).operation).traffic > 0.0


def test_a_slice_of_one_dim_is_in_place_where_its_ends_are_aligned(x):
    flat = mtf.import_tf_tensor(x.mesh, tf.ones([64]), mtf.Shape([mtf.Dimension("flat", 64)]))
    assert nodes_of(mtf.slice(flat, 16, 32, "flat").operation) == Nodes(1, 0.0)
    assert nodes_of(mtf.slice(flat, 8, 32, "flat").operation).traffic > 0.0


@pytest.mark.parametrize("handed_on", [mtf.identity, lambda x: _slicewise(lambda x: tf.reshape(x, [4, 8]), x)],
                         ids=["identity", "reshape"])
def test_a_function_that_hands_on_what_it_is_given_copies_nothing(x, handed_on):
    assert nodes_of(handed_on(x).operation) == Nodes(1, 0.0)
    exported = [operation for layer in export_graph(x.mesh.graph).layers for operation in layer.operations
                if operation.type == "SlicewiseOperation"]
    assert [(operation.flops, operation.traffic) for operation in exported] == [(0.0, 0.0)]


def _noisy(seed):
    return tf.function(lambda x: x + tf.random.uniform([4, 8], seed=seed))


def test_numbers_that_functions_and_branches_of_tensorflow_draw_are_seen(x):
    def branched(x):
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: x + tf.random.uniform([4, 8]), lambda: x)
    assert [draws_anew(_slicewise(function, x).operation) for function in (_noisy(None), branched, _noisy(3))] == [
        True, True, False]


def test_the_gradient_of_a_maximum_finds_the_maxima_once_more():
    """Their places in 64 bits, and themselves: that is less than what it returns, and there beside it."""
    batch, row, column, channel = (mtf.Dimension(name, size) for name, size in (
        ("batch", 2), ("row", 16), ("column", 16), ("channel", 16)))
    halves = [mtf.Dimension("row", 8), mtf.Dimension("column", 8)]
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, tf.ones([2, 16, 16, 16]), mtf.Shape([batch, row, column, channel]))
        y, dy = (mtf.import_tf_tensor(mesh, tf.ones([2, 8, 8, 16]), mtf.Shape([batch, *halves, channel]))
                 for _ in range(2))
        dx = mtf.slicewise(lambda x, y, dy: tf.raw_ops.MaxPoolGrad(
            orig_input=x, orig_output=y, grad=dy, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID"),
            [x, y, dy], splittable_dims=[batch, channel])
        assert nodes_of(dx.operation).besides == 2 * 8 * 8 * 16 * (8 + 4)
