"""Sums that go to another layer as they are: exactly one edge takes each, and sums it."""

import json
from collections import Counter

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import FormatError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph

BATCH, INPUTS, HIDDEN, OUT = (mtf.Dimension(name, 16) for name in ("batch", "inputs", "hidden", "out"))


def _perceptron(mesh):
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, INPUTS]))
    weights = [mtf.get_variable(mesh, name, mtf.Shape(dims))
               for name, dims in (("first", [INPUTS, HIDDEN]), ("second", [HIDDEN, OUT]))]
    y = mtf.einsum([mtf.relu(mtf.einsum([x, weights[0]], [BATCH, HIDDEN])), weights[1]], [BATCH, OUT])
    return weights, mtf.gradients([mtf.reduce_mean(mtf.square(y))], weights)


def _clipped(mesh):
    """By the norm of all gradients: a sum of one element goes from layer to layer, over no edge."""
    weights, gradients = _perceptron(mesh)
    squares = [mtf.reduce_sum(mtf.square(gradient)) for gradient in gradients]
    norm = mtf.sqrt(squares[0] + squares[1])
    for weight, gradient in zip(weights, gradients, strict=True):
        mtf.assign(weight.operation, gradient / norm)


@pytest.mark.parametrize(("dims", "sums"), [([BATCH, INPUTS], 1), ([INPUTS], 2)])
def test_sums_of_one_shape_are_added_before_they_are_summed_over_devices(dims, sums):
    """Of two shapes each is summed by itself: one is broadcast."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        weights = mtf.get_variable(mesh, "weights", mtf.Shape([INPUTS, OUT]))
        one, other = (mtf.import_tf_tensor(mesh, tf.zeros([16] * len(of)), mtf.Shape(of))
                      for of in ([BATCH, INPUTS], dims))
        products = [mtf.einsum([x, weights], mtf.Shape([*x.shape.dims[:-1], OUT])) for x in (one, other)]
        mtf.reduce_sum(mtf.square(mtf.add(*products, output_shape=mtf.Shape([BATCH, OUT]))))
        exported = export_graph(mesh.graph)
    found = [operation for layer in exported.layers for operation in layer.operations
             if INPUTS.name in operation.reduced]
    assert len(found) == sums


def _grouped(mesh):
    """One assignment for the variables of all layers."""
    weights, gradients = _perceptron(mesh)
    mesh.graph.combine_assignments([mtf.assign(weight.operation, gradient)
                                    for weight, gradient in zip(weights, gradients, strict=True)])


def _looped(mesh):
    """A loop starts with what another layer reads, too."""
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, INPUTS]))
    again = mtf.Dimension("again", 16)
    first, inside, last = (mtf.get_variable(mesh, name, mtf.Shape(dims)) for name, dims in (
        ("first", [INPUTS, HIDDEN]), ("inside", [HIDDEN, again]), ("last", [HIDDEN, OUT])))
    z = mtf.einsum([x, first], [BATCH, HIDDEN])
    _, state = mtf.while_loop(
        lambda count, state: mtf.less(count, 5),
        lambda count, state: (count + 1, mtf.relu(mtf.rename_dimension(
            mtf.einsum([state, inside], [BATCH, again]), "again", "hidden"))),
        [mtf.constant(mesh, 0, mtf.Shape([]), tf.int32), z])
    mtf.reduce_mean(mtf.einsum([z, last], [BATCH, OUT])) + mtf.reduce_mean(state)


def _accumulated(mesh):
    """A loop adds up what another layer reads after it."""
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, INPUTS]))
    y = mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, HIDDEN]))
    last = mtf.get_variable(mesh, "last", mtf.Shape([HIDDEN, OUT]))
    _, total = mtf.while_loop(
        lambda count: mtf.less(count, 5), lambda count: (count + 1, mtf.einsum([x, y], [INPUTS, HIDDEN])),
        [mtf.constant(mesh, 0, mtf.Shape([]), tf.int32)], has_accumulators=True)
    mtf.reduce_mean(mtf.einsum([total, last], [INPUTS, OUT]))


def _exported(program):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        program(mtf.Mesh(graph, "mesh"))
        return export_graph(graph)


@pytest.mark.parametrize("program", [_clipped, _grouped, _looped, _accumulated])
def test_one_edge_takes_each(program):
    graph = _exported(program)
    left = Counter((number, dims) for number, layer in enumerate(graph.layers) for operation in layer.operations
                   for (dims, _), on in zip(operation.sums, operation.sums_pending, strict=True) if on)
    assert left == Counter((edge.source, edge.pending) for edge in graph.edges if edge.pending)
    assert all(count == 1 for count in Counter(
        (edge.source, edge.tensor) for edge in graph.edges if edge.pending).values())


def test_what_is_read_at_home_or_twice_is_summed_there():
    for program, tensors in ((_clipped, {"reduce:0", "reduce_1:0"}), (_looped, {"einsum:0"})):
        assert not tensors & {edge.tensor for edge in _exported(program).edges if edge.pending}


def test_what_a_loop_adds_up_is_summed_on_the_way():
    edge = _exported(_accumulated).edges[0]
    assert (edge.tensor, edge.pending, edge.trips) == ("output:1", ("batch",), 1)


@pytest.mark.parametrize("pending", [[], ["nope"], [""], ["batch", "out"]])
def test_a_file_in_which_a_sum_is_nobodys_is_refused(tmp_path, pending):
    path = tmp_path / "graph.json"
    _exported(_grouped).save(path)
    data = json.loads(path.read_text())
    edges = [edge for edge in data["edges"] if edge.get("pending")]
    assert edges
    edges[0]["pending"] = pending
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="sum"):
        ComputationGraph.load(path)


def _added(mesh):
    """The gradients of what two layers read are added in one of them."""
    x = mtf.get_variable(mesh, "x", mtf.Shape([BATCH, INPUTS]))
    read = mtf.tanh(x)
    made = [mtf.einsum([read, mtf.get_variable(mesh, name, mtf.Shape([INPUTS, HIDDEN]))], [BATCH, HIDDEN])
            for name in ("one", "other")]
    loss = mtf.reduce_mean(mtf.tanh(made[0]) * mtf.tanh(made[1]))
    mtf.assign(x.operation, mtf.gradients([loss], [x])[0])


def test_sums_of_two_layers_are_added_before_they_are_summed(tmp_path):
    graph = _exported(_added)
    (edge,) = [edge for edge in graph.edges if edge.added_to]
    assert edge.pending == edge.added_to == ("hidden",)
    assert sum(operation.added_outputs == (0,) for operation in graph.layers[edge.source].operations) == 1
    graph.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == graph


@pytest.mark.parametrize("added_to", [[], ["nope"], [""], ["batch"]])
def test_a_file_in_which_a_sum_is_added_to_what_is_none_is_refused(tmp_path, added_to):
    path = tmp_path / "graph.json"
    _exported(_added).save(path)
    data = json.loads(path.read_text())
    next(edge for edge in data["edges"] if edge.get("added_to"))["added_to"] = added_to
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="sum"):
        ComputationGraph.load(path)


def _broadcast(mesh):
    """An einsum that makes a dim: what it sums is broadcast along it, and is not in parts after that."""
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, INPUTS]))
    mtf.tanh(mtf.einsum([x, mtf.get_variable(mesh, "weights", mtf.Shape([INPUTS, OUT]))], [BATCH, HIDDEN, OUT]))


def test_what_is_broadcast_is_summed_by_who_makes_it(tmp_path):
    graph = _exported(_broadcast)
    (operation,) = [operation for layer in graph.layers for operation in layer.operations if operation.reduced]
    ((dims, (summed,)),) = operation.sums
    assert (dims, summed.dims, summed.shape) == (("inputs",), ("batch", "out"), (16, 16))
    assert operation.sums_pending == (False,)
    graph.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == graph


@pytest.mark.parametrize("numbers", [[3], [-1], [0, 9]])
def test_a_file_in_which_dims_are_broadcast_that_are_not_there_is_refused(tmp_path, numbers):
    path = tmp_path / "graph.json"
    _exported(_broadcast).save(path)
    data = json.loads(path.read_text())
    for layer in data["layers"]:
        for operation in layer["operations"]:
            operation.update({"broadcast_after": numbers} if "broadcast_after" in operation else {})
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="broadcast"):
        ComputationGraph.load(path)


def _awaited(mesh):
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, INPUTS]))
    first, second = (mtf.get_variable(mesh, name, mtf.Shape(dims))
                     for name, dims in (("first", [INPUTS, HIDDEN]), ("second", [HIDDEN, OUT])))
    y = mtf.einsum([x, first], [BATCH, HIDDEN])
    mtf.depend(mtf.einsum([y, second], [BATCH, OUT]), [y])


def test_what_somebody_waits_for_is_summed_where_it_is_made():
    graph = _exported(_awaited)
    assert not any(edge.pending for edge in graph.edges)
    assert any("inputs" in operation.reduced for layer in graph.layers for operation in layer.operations)


def test_a_sum_that_a_loop_starts_with_is_summed_by_itself():
    """The loop needs it whole, whoever adds it to others before they are summed."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        weights = mtf.get_variable(mesh, "weights", mtf.Shape([INPUTS, OUT]))
        products = [mtf.einsum([mtf.import_tf_tensor(mesh, tf.zeros([16, 16]), mtf.Shape([BATCH, INPUTS])), weights],
                               [BATCH, OUT]) for _ in range(2)]
        mtf.reduce_sum(mtf.square(mtf.add(*products)))
        mtf.while_loop(lambda count, _: mtf.less(count, 5), lambda count, state: [count + 1, mtf.tanh(state)],
                       [mtf.constant(mesh, 0, mtf.Shape([]), tf.int32), products[0]])
        exported = export_graph(mesh.graph)
    found = [operation for layer in exported.layers for operation in layer.operations
             if INPUTS.name in operation.reduced]
    assert [operation.summed_again for operation in found] == [0, 0]
