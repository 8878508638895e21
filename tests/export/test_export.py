"""Export: every operation in one layer, gradients and optimizer with their layer, names and sizes right."""

import collections
import contextlib
import dataclasses
import json

import numpy as np
import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.memory import strategy_memory
from pase_mtf.errors import FormatError
from pase_mtf.export.exporter import export_graph
from pase_mtf.export.layer_marks import one_layer
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.layer_operation import REPEAT, SUM
from pase_mtf.operations.flow import all_operations


def _dim(name, size):
    return mtf.Dimension(name, size)


B, L, M, D, H, K, F, V = (_dim("batch", 8), _dim("length", 4), _dim("memory_length", 4), _dim("d_model", 16),
                          _dim("heads", 4), _dim("d_k", 4), _dim("d_ff", 32), _dim("vocab", 64))


def _variable(mesh, name, *dims):
    return mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.zeros_initializer())


def test_a_product_of_several_tensors_is_made_two_at_a_time():
    """As TensorFlow does: of a low rank it is the two thin products, and so are its gradients."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        u, v = _variable(mesh, "u", D, K), _variable(mesh, "v", K, F)
        mtf.gradients([mtf.reduce_sum(mtf.einsum([x, u, v], output_shape=[B, F]))], [u])
        exported = export_graph(graph)
    forward, gradient = (next(operation for layer in exported.layers for operation in layer.operations
                              if operation.type == "EinsumOperation" and operation.phase == phase)
                         for phase in ("forward", "backward"))
    pairs = 2 * (16 * 4 * 32 + 8 * 16 * 32), 2 * (8 * 16 * 4 + 8 * 4 * 32)  # u v first, or x u
    assert forward.flops == min(pairs)
    assert 0 < gradient.flops <= 2 * (8 * 16 * 32 + 16 * 32 * 4)


def _mlp(mesh):
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
    hidden = mtf.relu(mtf.einsum([x, _variable(mesh, "w1", D, F)], output_shape=[B, F]) + _variable(mesh, "b1", F))
    logits = mtf.einsum([hidden, _variable(mesh, "w2", F, V)], output_shape=[B, V])
    return mtf.reduce_mean(mtf.square(logits))


def _attention(mesh):
    ids = mtf.import_tf_tensor(mesh, tf.zeros([8, 4], tf.int32), mtf.Shape([B, L]))
    x = mtf.gather(_variable(mesh, "embedding", V, D), ids, V)
    mask = mtf.rename_dimension(mtf.cast(mtf.equal(ids, 0), tf.float32) * -1e9, "length", "memory_length")
    memory = mtf.rename_dimension(x, "length", "memory_length")
    q = mtf.einsum([x, _variable(mesh, "q", D, H, K)], output_shape=[B, L, H, K])
    k = mtf.einsum([memory, _variable(mesh, "k", D, H, K)], output_shape=[B, M, H, K])
    weights = mtf.softmax(mtf.einsum([q, k], output_shape=[B, H, L, M]) + mask, M)
    context = mtf.einsum([weights, k], output_shape=[B, L, H, K])
    x += mtf.einsum([context, _variable(mesh, "o", H, K, D)], output_shape=[B, L, D])
    x = mtf.layers.layer_norm(x, D)
    logits = mtf.einsum([x, _variable(mesh, "embedding", V, D)], output_shape=[B, L, V])  # tied
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(ids, V), V))


def _convolutional(mesh):
    image = mtf.import_tf_tensor(
        mesh, tf.zeros([8, 8, 8, 2]), mtf.Shape([B, _dim("h", 8), _dim("w", 8), _dim("c0", 2)]))
    kernel = _variable(mesh, "f", _dim("fh", 3), _dim("fw", 3), _dim("c0", 2), _dim("c1", 4))
    x = mtf.relu(mtf.Conv2dOperation(image, kernel, [1, 1, 1, 1], "SAME").outputs[0])
    x = mtf.layers.max_pool2d(x, ksize=(2, 2))
    flat = mtf.reshape(x, mtf.Shape([B, _dim("flat", 64)]))
    return mtf.reduce_sum(mtf.einsum([flat, _variable(mesh, "w", _dim("flat", 64), V)], output_shape=[B, V]))


def _odd(mesh):
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
    y = mtf.recompute_grad(
        lambda z: mtf.relu(mtf.einsum([z, _variable(mesh, "w1", D, F)], output_shape=[B, F])), [x])
    y = mtf.recompute_grad(
        lambda z: mtf.tanh(mtf.einsum([z, _variable(mesh, "w2", F, D)], output_shape=[B, D])), [y])
    y = mtf.concat([y, x], "d_model")
    y = mtf.mtf_slice(y, 4, 16, "d_model")
    steps = mtf.import_tf_tensor(mesh, tf.constant(0), mtf.Shape([]))
    looped = mtf.while_loop(lambda i, z: mtf.less(i, 3), lambda i, z: [i + 1, z * 0.5], [steps, x])[1]
    values, _ = mtf.top_k(mtf.cumsum(y, y.shape.dims[1]) + mtf.reduce_sum(looped), y.shape.dims[1], _dim("k", 2))
    return mtf.reduce_sum(values) + mtf.reduce_sum(
        mtf.einsum([x, _variable(mesh, "w3", D, V)], output_shape=[B, V]))


def _two_gathers(mesh):
    """Encoder and decoder gather from one table, each with positions of its own: the table makes two layers one."""
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 4, 16]), mtf.Shape([B, L, D]))
    table = _variable(mesh, "positions", V, D)
    hidden = mtf.einsum([x + mtf.gather(table, mtf.range(mesh, L, tf.int32), V), _variable(mesh, "w1", D, F)],
                        output_shape=[B, L, F])
    x = mtf.einsum([mtf.relu(hidden), _variable(mesh, "w2", F, D)], output_shape=[B, L, D])
    x += mtf.gather(table, mtf.range(mesh, L, tf.int32), V)
    return mtf.reduce_mean(mtf.square(mtf.einsum([x, _variable(mesh, "w3", D, F)], output_shape=[B, L, F])))


_NETS = {"mlp": _mlp, "attention": _attention, "convolutional": _convolutional, "odd": _odd,
         "two_gathers": _two_gathers}


def _training(build, optimizer="adam", scope=""):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss = build(mesh)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    chosen = (mtf.optimize.AdamWeightDecayOptimizer(0.1) if optimizer == "adam" else
              mtf.optimize.SgdOptimizer(0.1) if optimizer == "sgd" else
              mtf.optimize.AdafactorOptimizer(learning_rate=0.1))
    chosen.apply_grads(gradients, variables)
    return graph


@pytest.fixture(params=[(name, optimizer) for name in _NETS for optimizer in ("sgd", "adam", "adafactor")],
                ids=lambda param: "-".join(param))
def trained(request):
    name, optimizer = request.param
    with tf.Graph().as_default(), tf.variable_scope("scope" if optimizer == "sgd" else ""):
        yield _training(_NETS[name], optimizer)


def _layer_of(exported):
    """Index of the operation in the Mesh-TF graph -> index of its (for a grouped Assign: first) layer."""
    found = {}
    for number, layer in enumerate(exported.layers):
        for operation in layer.operations:
            found.setdefault(operation.index, number)
    return found


def test_every_operation_is_in_one_layer(trained):
    exported = export_graph(trained)
    counts = collections.Counter(op.index for layer in exported.layers for op in layer.operations
                                 if op.type != "Assign")
    operations = all_operations(trained)
    expected = [index for index, op in enumerate(operations) if not isinstance(op, mtf.Assign)]
    assert counts == {index: 1 for index in expected}
    assert set(_layer_of(exported)) == set(range(len(operations)))
    for layer in exported.layers:
        for operation in layer.operations:
            assert operations[operation.index].name == operation.name


def test_gradients_and_updates_follow_their_layer(trained):
    exported = export_graph(trained)
    home = _layer_of(exported)
    by_name = {}
    for index, operation in enumerate(all_operations(trained)):
        by_name.setdefault(operation.name, index)
    seen = 0
    for index, operation in enumerate(all_operations(trained)):
        if "/gradients/" in operation.name:
            forward = operation.name.split("/gradients/")[0].replace("scope/scope/", "scope/")
            if forward in by_name:
                assert home[index] == home[by_name[forward]], operation.name
                seen += 1
        if isinstance(operation, mtf.Variable) and "/" in operation.name:  # a slot stands beside its variable
            owner = by_name.get(operation.name.rsplit("/", 1)[0])
            if owner is not None:
                assert home[index] == home[owner], operation.name
    assert seen > 5


def test_phases_tell_forward_from_backward_from_update(trained):
    exported = export_graph(trained)
    for layer in exported.layers:
        for operation in layer.operations:
            if "/gradients/" in operation.name:
                assert operation.phase == "backward"
            if operation.type == "Assign" or "adam" in operation.name or "slot_v" in operation.name:
                assert operation.phase == "update", operation.name
    trainable = {variable.name for layer in exported.layers for variable in layer.variables if variable.trainable}
    assert trainable == {variable.name for variable in trained.trainable_variables}
    assert exported.parameters == sum(variable.size for variable in trained.trainable_variables)


def test_dims_of_operands_are_the_layers_or_empty(trained):
    for layer in export_graph(trained).layers:
        for operation in layer.operations:
            for operand in (*operation.inputs, *operation.outputs):
                assert len(operand.dims) == len(operand.shape)
                for name, size in zip(operand.dims, operand.shape, strict=True):
                    assert name == "" or (name in layer.splittable and size % layer.dims[name] == 0)
                # No dim may be laid out twice in one tensor.
                named = [name for name in operand.dims if name]
                assert len(set(named)) == len(named)


def test_edges_join_different_layers_and_name_their_dims(trained):
    exported = export_graph(trained)
    keys = set()
    for edge in exported.edges:
        assert edge.source != edge.target
        assert len(edge.shape) == len(edge.source_dims) == len(edge.target_dims)
        for name in edge.source_dims:
            assert name == "" or name in exported.layers[edge.source].splittable
        for name in edge.target_dims:
            assert name == "" or name in exported.layers[edge.target].splittable
        key = (edge.tensor, edge.source, edge.target, edge.target_dims)
        assert key not in keys, key
        keys.add(key)
    assert keys


def test_same_program_same_hash_and_round_trip(trained, tmp_path):
    exported = export_graph(trained, name="net", meta={"batch": 8})
    assert export_graph(trained).hash == exported.hash
    exported.save(tmp_path / "graph.json")
    loaded = ComputationGraph.load(tmp_path / "graph.json")
    assert loaded == exported
    assert loaded.hash == exported.hash
    assert loaded.meta == {"batch": 8}
    dot = dataclasses.replace(exported, name='in "quotes"').to_dot()
    assert dot.startswith('digraph "in \\"quotes\\"" {')
    assert dot.count("->") == sum(edge.phase == "forward" for edge in exported.edges)


def test_another_program_has_another_hash():
    hashes = set()
    for build in _NETS.values():
        for optimizer in ("sgd", "adam"):
            with tf.Graph().as_default():
                hashes.add(export_graph(_training(build, optimizer)).hash)
    assert len(hashes) == 2 * len(_NETS)


def test_roles_are_kept_and_leave_the_hash_alone(tmp_path):
    with tf.Graph().as_default():
        exported = export_graph(_training(_convolutional))
    roles = {operation.role: operation.type for layer in exported.layers for operation in layer.operations
             if operation.role not in ("", SUM, REPEAT)}
    assert roles == {"convolution": "Conv2dOperation", "filter gradient": "Conv2or3dBackpropFilterOperation",
                     "rename": "ReshapeOperation"}  # nothing needs the gradient of images
    layers = tuple(dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, role="") for operation in layer.operations)) for layer in exported.layers)
    plain = dataclasses.replace(exported, layers=layers)
    assert plain != exported
    assert plain.hash == exported.hash
    exported.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == exported


def test_graphs_of_earlier_versions_are_refused_by_name(tmp_path):
    with tf.Graph().as_default():
        exported = export_graph(_training(_mlp))
    path = tmp_path / "graph.json"
    exported.save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "version": 1}))
    with pytest.raises(FormatError, match="written by an earlier version of this program; export the graph again"):
        ComputationGraph.load(path)
    data["layers"][0]["operations"][0]["role"] = "chore"
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="unknown role 'chore'"):
        ComputationGraph.load(path)


def test_variables_are_sized_by_their_own_type_and_gradients_by_the_activations():
    """float32 weights and slots with bfloat16 activations, as Mesh-TF's programs have them on accelerators."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        types = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
        weights = mtf.get_variable(mesh, "w", mtf.Shape([D, F]), initializer=tf.zeros_initializer(), dtype=types)
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16], tf.bfloat16), mtf.Shape([B, D]))
        loss = mtf.reduce_sum(mtf.relu(mtf.einsum([x, weights], output_shape=[B, F])))
        gradient, = mtf.gradients([loss], [weights])
        mtf.optimize.MomentumOptimizer(0.1, 0.9).apply_grads([gradient], graph.trainable_variables)
        exported = export_graph(graph)
    memory = strategy_memory(exported, [Configuration()] * len(exported.layers))
    assert memory["weights"] == memory["optimizer slots"] == 4 * 16 * 32
    # The gradient, or, at the end, what the new values of weights and slots are converted to on the way to these.
    assert memory["gradients"] == 2 * 4 * 16 * 32


def test_attention_has_the_layers_a_reader_expects():
    with tf.Graph().as_default():
        exported = export_graph(_training(_attention))
    kinds = collections.Counter(layer.kind for layer in exported.layers)
    # embedding tied with the output, q, k, logits, context, o; softmax, layer norm, loss; renames of mask and memory
    assert kinds == {"matmul": 6, "normalize": 3, "pointwise": 2}
    tied = [layer for layer in exported.layers if any(variable.name == "embedding" for variable in layer.variables)]
    assert len(tied) == 1
    assert sum(op.kind == "matmul" and op.phase == "forward" for op in tied[0].operations) == 2
    renames = [layer for layer in exported.layers if layer.aliases]
    assert [layer.aliases for layer in renames] == [{"length": "memory_length"}] * 2
    edge = next(edge for edge in exported.edges if edge.target == exported.layers.index(renames[-1]))
    assert edge.source_dims == ("batch", "length", "d_model")
    assert edge.target_dims == ("batch", "memory_length", "d_model")


def test_convolution_and_pool_keep_space_whole():
    with tf.Graph().as_default():
        exported = export_graph(_training(_convolutional))
    layers = {layer.kind: layer for layer in exported.layers}
    assert set(layers["convolution"].splittable) == {"batch", "c0", "c1"}
    assert set(layers["pool"].splittable) == {"batch", "c1"}
    convolution = next(op for op in layers["convolution"].operations if op.type == "Conv2dOperation")
    assert convolution.flops == 2 * 8 * 8 * 8 * 4 * (3 * 3 * 2)
    gradients = [op for op in layers["convolution"].operations if op.kind == "convolution" and op.phase == "backward"]
    # The gradient of the image is in the graph, but nobody asks for it.
    assert [(op.flops, op.reduced) for op in gradients] == [(convolution.flops, ("batch",))]
    flatten = next(layer for layer in exported.layers if "flat" in layer.dims and layer.kind == "pointwise")
    assert "batch" in flatten.splittable


@pytest.mark.parametrize("held_together", [False, True])
def test_a_reshape_that_cannot_keep_a_split_is_in_no_layer_that_has_it(held_together):
    """The einsum knows all dims of both sides; split by heads, its output would have to be gathered for the reshape
    within the layer, at no price."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        d, h, k = _dim("d", 512), _dim("heads", 8), _dim("k", 64)
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 512]), mtf.Shape([B, d]))
        with one_layer(graph) if held_together else contextlib.nullcontext():
            y = mtf.einsum([x, _variable(mesh, "w", d, h, k)], output_shape=mtf.Shape([B, h, k]))
            z = mtf.reshape(y, mtf.Shape([B, d]))
        mtf.gradients([mtf.reduce_mean(mtf.square(z))], [variable.outputs[0] for variable in graph.all_variables])
        exported = export_graph(graph)
    reshapes = [(layer, operation) for layer in exported.layers for operation in layer.operations
                if operation.role == "rename"]
    assert {operation.phase for _, operation in reshapes} == {"forward", "backward"}
    for layer, operation in reshapes:
        (old,), (new,) = operation.inputs, operation.outputs
        assert B.name in layer.splittable
        assert not {name for name in {*old.dims} ^ {*new.dims} if name in layer.splittable}
    assert any({"heads", "d"} <= set(layer.splittable) for layer in exported.layers) != held_together


@pytest.mark.parametrize("trains", [False, True])
def test_gradients_are_needed_where_no_assignment_trains(trains):
    """A program that applies them itself may keep moving averages in the graph all the same."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        w = _variable(mesh, "w", D, F)
        average = mtf.get_variable(mesh, "average", mtf.Shape([F]), trainable=False)
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        y = mtf.einsum([x, w], output_shape=mtf.Shape([B, F]), name="product")
        gradient, _ = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w, x])
        mtf.assign(average, mtf.reduce_mean(y, output_shape=mtf.Shape([F])))
        if trains:
            mtf.assign_sub(w, gradient)
        backward = [operation.name for layer in export_graph(graph).layers for operation in layer.operations
                    if operation.phase == "backward" and operation.name.startswith("product") and operation.flops]
    assert len(backward) == (1 if trains else 2)


def test_a_value_is_assigned_by_places():
    """Of a variable that names its dims otherwise: what moves is what the lowering moves."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        value = mtf.einsum([x, _variable(mesh, "w", D, F)], output_shape=mtf.Shape([B, F]), name="value")
        kept = mtf.get_variable(mesh, "kept", mtf.Shape([_dim("all", 8), _dim("copy", 32)]), trainable=False)
        mtf.square(kept, name="read")
        mtf.assign(kept, value)
        exported = export_graph(graph)
    (edge,) = [edge for edge in exported.edges if edge.tensor.startswith("value")]
    assert (edge.source_dims, edge.target_dims) == (("batch", "d_ff"), ("all", "copy"))
    (assign,) = [operation for layer in exported.layers for operation in layer.operations
                 if operation.type == "Assign"]
    assert [operand.dims for operand in assign.inputs] == [("all", "copy")]


def test_what_is_printed_is_read():
    """Moved to where it is printed, and kept until then."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        shown = mtf.einsum([x, _variable(mesh, "w", D, F)], output_shape=mtf.Shape([B, F]), name="shown")
        other = mtf.einsum([x, _variable(mesh, "v", D, K)], output_shape=mtf.Shape([B, K]), name="other")
        mtf.Print(other, [shown], "shown", name="print")
        exported = export_graph(graph)
    edges = [edge for edge in exported.edges if edge.tensor.startswith("shown")]
    assert [exported.layers[edge.target].name for edge in edges] == ["print"]


def test_an_einsum_that_broadcasts_works_on_its_inputs_dims():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        mtf.einsum([x, _variable(mesh, "w", D, F)], output_shape=mtf.Shape([B, L, F]), name="product")
        product = next(operation for layer in export_graph(graph).layers for operation in layer.operations
                       if operation.name == "product")
    assert product.flops == 2 * B.size * D.size * F.size


def test_a_dim_of_one_is_no_split_that_a_reshape_could_lose():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        one = _dim("one", 1)
        wide = mtf.einsum([x, _variable(mesh, "w", D, one, F)], output_shape=mtf.Shape([B, one, F]), name="product")
        mtf.reduce_sum(mtf.reshape(mtf.relu(wide), mtf.Shape([B, F]), name="squeeze"), name="sum")
        layers = [layer.name for layer in export_graph(graph).layers]
    assert layers == ["product", "sum"]


def _renamed(mesh, both_read_a_variable):
    x = mtf.einsum([mtf.import_tf_tensor(mesh, tf.zeros([8, 4, 16]), mtf.Shape([B, L, D])), _variable(mesh, "w", D, F)],
                   output_shape=[B, L, F])
    renamed = mtf.rename_dimension(x, "length", "memory_length")
    if both_read_a_variable:  # so that they are of one layer, whatever their dims
        bias = _variable(mesh, "bias", F)
        renamed += bias
        x = mtf.einsum([x, _variable(mesh, "w_2", D, F)], output_shape=[B, L, F]) + bias
    return mtf.reduce_sum(mtf.square(mtf.add(renamed, x, output_shape=mtf.Shape([B, L, M, F]))))


@pytest.mark.parametrize("both_read_a_variable", [False, True])
def test_two_dims_of_one_tensor_are_not_taken_for_one(both_read_a_variable):
    graph = mtf.Graph()
    loss = _renamed(mtf.Mesh(graph, "mesh"), both_read_a_variable)
    mtf.gradients([loss], [variable.outputs[0] for variable in graph.trainable_variables])
    for layer in export_graph(graph).layers:
        assert layer.aliases.keys().isdisjoint(layer.dims), layer.name
        for operation in layer.operations:
            for operand in (*operation.inputs, *operation.outputs):
                names = [name for name in operand.dims if name]
                assert len(set(names)) == len(names), (operation.name, operand)


def test_arithmetic_of_a_fully_connected_layer():
    with tf.Graph().as_default():
        exported = export_graph(_training(_mlp, "sgd"))
    layer = exported.layers[0]
    assert layer.dims == {"batch": 8, "d_ff": 32, "d_model": 16}
    products = [op for op in layer.operations if op.kind == "matmul"]
    assert [op.phase for op in products] == ["forward", "backward"]  # nobody asks for the gradient of the input
    assert all(op.flops == 2 * 8 * 16 * 32 for op in products)
    assert products[0].reduced == ("d_model",)
    assert products[1].reduced == ("batch",)
    np.testing.assert_array_equal(products[0].outputs[0].shape, (8, 32))


def test_a_chain_of_lazy_sums_is_reduced_once():
    def build(mesh):
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        w = _variable(mesh, "w", D, F)
        both = mtf.einsum([x, w], output_shape=[B, F]) + mtf.einsum([x * 2.0, w], output_shape=[B, F])
        return mtf.reduce_sum(mtf.square(both))

    with tf.Graph().as_default():
        exported = export_graph(_training(build, "sgd"))
    layer = next(layer for layer in exported.layers if layer.kind == "matmul")
    forward = [op for op in layer.operations if op.phase == "forward" and op.reduced]
    assert [op.type for op in forward] == ["AddOperation"]
    assert forward[0].reduced == ("d_model",)


def test_truncated_and_changed_files_are_refused(tmp_path):
    with tf.Graph().as_default():
        exported = export_graph(_training(_mlp))
    path = tmp_path / "graph.json"
    exported.save(path)
    text = path.read_text()
    path.write_text(text[:len(text) // 2])
    with pytest.raises(FormatError, match="truncated"):
        ComputationGraph.load(path)
    data = json.loads(text)
    data["layers"][0]["dims"]["batch"] = 16
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="changed"):
        ComputationGraph.load(path)
    layer = next(place for place, layer in enumerate(exported.layers) if len(layer.splittable) > 1)
    one, other = exported.layers[layer].splittable[:2]
    dataclasses.replace(exported, layers=tuple(
        dataclasses.replace(made, operations=tuple(
            dataclasses.replace(operation, outputs=tuple(
                dataclasses.replace(operand, dims=tuple(one if name == other else name for name in operand.dims))
                for operand in operation.outputs)) for operation in made.operations)) if number == layer else made
        for number, made in enumerate(exported.layers))).save(path)
    with pytest.raises(FormatError, match="one of them twice"):
        ComputationGraph.load(path)
    del data["layers"]
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="layers"):
        ComputationGraph.load(path)
    with pytest.raises(FormatError, match=r"missing\.json"):
        ComputationGraph.load(tmp_path / "missing.json")
