"""Export: which layer an operation is in where names mislead, and what the dims of a layer may be split into."""

import numpy as np
import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import enumerate_configurations
from pase_mtf.graph.partition import translate

B, L, D, F, V = (mtf.Dimension(name, size) for name, size in (
    ("batch", 8), ("length", 4), ("d_model", 16), ("d_ff", 32), ("vocab", 64)))


def _variable(mesh, name, *dims):
    return mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.zeros_initializer())


def _trained(graph, y):
    mtf.gradients([mtf.reduce_sum(mtf.square(y))], [variable.outputs[0] for variable in graph.all_variables])
    return export_graph(graph)


def test_a_reshape_of_dims_without_names_splits_what_divides_them():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        tokens = mtf.Dimension("tokens", B.size * L.size)
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 4, 16]), mtf.Shape([B, L, D]))
        x = mtf.einsum([x, _variable(mesh, "w1", D, F)], output_shape=[B, L, F])
        x = mtf.reshape(mtf.anonymize(x), mtf.Shape([tokens, F]))
        exported = _trained(graph, mtf.einsum([x, _variable(mesh, "w2", F, V)], output_shape=[tokens, V]))
    ends = [(layer, operand.dims, operand.shape) for layer in exported.layers for operation in layer.operations
            for operand in (*operation.inputs, *operation.outputs)]
    for edge in exported.edges:
        ends += [(exported.layers[edge.source], edge.source_dims, edge.shape),
                 (exported.layers[edge.target], edge.target_dims, edge.shape)]
    for layer, dims, shape in ends:
        assert all(size % layer.dims[name] == 0 for name, size in zip(dims, shape, strict=True) if name), layer.name


def test_gradients_follow_their_layer_where_a_scope_within_is_called_alike():
    with tf.Graph().as_default(), tf.variable_scope("net"):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        x = mtf.relu(mtf.einsum([x, _variable(mesh, "w1", D, F)], output_shape=[B, F], name="product"))
        with tf.variable_scope("net"):
            y = mtf.einsum([x, _variable(mesh, "w2", F, V)], output_shape=[B, V], name="product")
        layers = {layer.name: set(layer.dims) for layer in _trained(graph, y).layers}
    assert layers["net/product"] == {"batch", "d_model", "d_ff"}
    assert layers["net/net/product"] == {"batch", "d_ff", "vocab"}


def test_a_reshape_keeps_its_limits_where_a_variable_joins_two_layers():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        d, e, h, k = (mtf.Dimension(name, size) for name, size in (("d", 512), ("e", 16), ("heads", 8), ("k", 64)))
        x, other = (mtf.import_tf_tensor(mesh, tf.zeros([8, of.size]), mtf.Shape([B, of])) for of in (e, d))
        bias = _variable(mesh, "bias", h, k)
        y = mtf.einsum([x, _variable(mesh, "w", e, d)], output_shape=mtf.Shape([B, d]))
        mtf.add(mtf.reshape(y, mtf.Shape([B, h, k])), bias)
        mtf.add(mtf.einsum([other, _variable(mesh, "v", d, h, k)], output_shape=mtf.Shape([B, h, k])), bias)
        exported = export_graph(graph)
    (layer, reshape), = [(layer, operation) for layer in exported.layers for operation in layer.operations
                         if operation.role == "rename"]
    (old,), (new,) = reshape.inputs, reshape.outputs
    assert not {name for name in {*old.dims} ^ {*new.dims} if name in layer.splittable}


def test_a_shift_by_a_number_of_numpy_is_one_by_that_number():
    found = []
    for offset in (1, np.int64(1)):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            mtf.shift(mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D])), offset, D, wrap=True)
            found.append(export_graph(graph).hash)
    assert found[0] == found[1]


def test_what_runs_nothing_costs_nothing():
    """Constants, which no step makes, and what goes by for people to see."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.tanh(mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D])))
        x = mtf.Print(x, [x], "x") + mtf.constant(mesh, 2.0, mtf.Shape([B, D])) * mtf.cast(mtf.range(mesh, D, tf.int32),
                                                                                         tf.float32)
        mtf.scalar_summary("mean", mtf.reduce_mean(x))
        operations = [operation for layer in export_graph(graph).layers for operation in layer.operations]
    kinds = {operation.type: operation.kind for operation in operations}
    assert {name for name, kind in kinds.items() if kind == "none"} >= {
        "PrintOperation", "ScalarSummaryOperation", "Constant", "RangeOperation"}
    assert "pointwise" in kinds.values()


def test_what_is_found_again_is_marked(tmp_path):
    """The gradient of x * x is made of one product, twice; the sums of two loops or of other tensors are not alike."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x, y = (_variable(mesh, name, B, D) for name in "xy")
        mtf.gradients([mtf.reduce_sum(x * x * y)], [x, y])
        found = export_graph(graph)
    again = [operation for layer in found.layers for operation in layer.operations if operation.repeats]
    assert [operation.phase for operation in again] == ["backward"]
    found.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == found


def test_what_holds_other_tensors_or_draws_numbers_is_not_found_again():
    def noisy(t):
        return t + tf.random.uniform(t.shape)

    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        y = mtf.einsum([x, _variable(mesh, "w", D, F)], output_shape=[B, F])
        one, other = (tf.placeholder(tf.float32, []) for _ in range(2))
        for rate in (one, other, one):
            mtf.multiply(y, rate)
        for _ in range(2):
            mtf.slicewise(noisy, [y], splittable_dims=y.shape.dims)
        exported = export_graph(graph)
    found = {}
    for layer in exported.layers:
        for operation in layer.operations:
            found.setdefault(operation.type, []).append(operation.repeats)
    assert found["ScalarMultiplyOperation"] == [False, False, True]
    assert found["SlicewiseOperation"] == [False, False]


@pytest.mark.parametrize("turns", [False, True])
def test_in_turns_the_backward_pass_finds_nothing_of_the_forward_pass_again(turns):
    """The gradient of log(y) makes 1 / y once more; in a pipeline it waits for its turn."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        w = _variable(mesh, "w", D, F)
        y = mtf.einsum([mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D])), w], output_shape=[B, F])
        mtf.gradients([mtf.reduce_sum(mtf.log(y) + mtf.reciprocal(y))], [w])
        exported = export_graph(graph, turns=turns)
    again = [operation.phase for layer in exported.layers for operation in layer.operations if operation.repeats]
    assert again == ([] if turns else ["backward"])


def test_what_is_made_of_two_sums_is_not_found_again():
    """Devices that share a host make each of two equal sums on another of them."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        w = _variable(mesh, "w", D, F)
        for _ in range(2):
            mtf.relu(mtf.einsum([x, w], output_shape=[B, F]))
        operations = [one for layer in export_graph(graph).layers for one in layer.operations]
    assert [one.repeats for one in operations if one.type == "EinsumOperation"] == [False, True]
    assert [one.repeats for one in operations if one.name.startswith("relu")] == [False, False]


@pytest.mark.parametrize("devices", [2, 6, 8, 12])
def test_a_reshape_keeps_in_place_whatever_its_layer_splits(devices):
    """What a reshape to other sizes moves has no price: it may move nothing, of sizes that cross each other, too."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        n, m, p, q = (mtf.Dimension(name, size) for name, size in (("n", 6), ("m", 4), ("p", 4), ("q", 6)))
        x = mtf.import_tf_tensor(mesh, tf.zeros([6, 4, 16]), mtf.Shape([n, m, D]))
        y = mtf.einsum([x, _variable(mesh, "w", D, F)], output_shape=mtf.Shape([n, m, F]))
        mtf.tanh(mtf.reshape(y, mtf.Shape([p, q, F])))
        exported = export_graph(graph)
    ((layer, reshape),) = [(layer, operation) for layer in exported.layers for operation in layer.operations
                           if operation.role == "rename"]
    assert set(layer.splittable) == {"p", "d_ff"}
    (old,), (new,) = reshape.inputs, reshape.outputs
    for configuration in enumerate_configurations(layer, devices):
        before, after = (configuration.placed(layer, operand.dims) for operand in (old, new))
        assert translate(before, old.shape, new.shape) == (before, after), configuration


def test_what_is_made_without_names_is_whole_in_a_layer_that_read_such_dims():
    """Tensors share the names of dims without a name; the lowering splits none of them."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        tokens = mtf.Dimension("tokens", B.size * L.size)
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 4, 16]), mtf.Shape([B, L, D]))
        y = mtf.einsum([x, _variable(mesh, "w", D, F)], output_shape=[B, L, F])
        t = mtf.tanh(mtf.reshape(mtf.anonymize(y), mtf.Shape([tokens, F])))
        last = mtf.anonymize(t).operation.name
        exported = export_graph(graph)
    number, operation = next((number, operation) for number, layer in enumerate(exported.layers)
                             for operation in layer.operations if operation.name == last)
    assert [operand.dims for operand in operation.outputs] == [("", "")]
    (edge,) = [edge for edge in exported.edges if edge.target == number]
    assert (edge.source_dims, edge.target_dims) == (("tokens", "d_ff"), ("", ""))
