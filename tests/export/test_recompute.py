"""What `mtf.recompute_grad` computes again in the backward pass is not kept, in the prediction as in TensorFlow."""

import collections
import zlib

import pytest
from harness import stock_lowering

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.memory import strategy_memory
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.operations.facts import read_operations

BATCH, WIDTH, HIDDEN, LAYERS = 1024, 32, 512, 6


def _program(recompute, microbatches=1):
    """Pairs of dense layers, wide in between."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, width, hidden = (mtf.Dimension(*dim) for dim in (("batch", BATCH), ("width", WIDTH), ("hidden", HIDDEN)))
    x = mtf.import_tf_tensor(mesh, tf.zeros([BATCH, WIDTH]), [batch, width])
    weights = [(mtf.get_variable(mesh, f"in{number}", [width, hidden]),
                mtf.get_variable(mesh, f"out{number}", [hidden, width])) for number in range(LAYERS)]

    def model(data):
        state = data["x"]
        for first, second in weights:
            def layer(seen, first=first, second=second):
                return mtf.einsum([mtf.relu(mtf.einsum([seen, first], reduced_dims=[width])), second],
                                  reduced_dims=[hidden])
            state = mtf.recompute_grad(layer, [state]) if recompute else layer(state)
        return {"loss": mtf.reduce_mean(mtf.square(state))}

    variables = graph.trainable_variables
    if microbatches > 1:
        gradients, made = mtf.serialize_training_step({"x": x}, model, batch, microbatches)
    else:
        made = model({"x": x})
        gradients = mtf.gradients([made["loss"]], [variable.outputs[0] for variable in variables])
    return graph, mesh, made["loss"], mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)


def _predicted(*options):
    with tf.Graph().as_default():
        exported = export_graph(_program(*options)[0])
    return strategy_memory(exported, [Configuration()] * len(exported.layers))


def test_only_what_goes_into_a_block_and_one_block_are_there():
    plain, again = (_predicted(recompute)["activations"] for recompute in (False, True))
    wide, narrow = 4 * BATCH * HIDDEN, 4 * BATCH * WIDTH
    assert plain > LAYERS * 2 * wide
    # The states between the blocks; of one block, at its fullest moment, the hidden tensors before and after the
    # activation and the gradient of one, or the activation's input and both gradients.
    assert LAYERS * narrow + 3 * wide <= again < LAYERS * narrow + 4 * wide


def _wide_in_turn(batch, left, right):
    """A block that is first wide in one dim, then in the other; what comes after it asks for gradients."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, width, left, right = (mtf.Dimension(*dim) for dim in (
        ("batch", batch), ("width", 8), ("left", left), ("right", right)))
    x = mtf.import_tf_tensor(mesh, tf.zeros([batch.size, width.size]), [batch, width])
    state = x
    weights = [mtf.get_variable(mesh, f"w{number}", [width, dim]) for number, dim in enumerate([left, right] * 2)]
    for number in range(2):
        def block(seen, ours=weights[2 * number:2 * number + 2]):
            for weight in ours:
                hidden = mtf.tanh(mtf.tanh(mtf.einsum([seen, weight], output_shape=[batch, weight.shape.dims[1]])))
                seen = mtf.einsum([hidden, weight], output_shape=[batch, width])
            return seen
        state = mtf.recompute_grad(block, [state])
    loss = mtf.reduce_mean(mtf.square(state))
    gradients = mtf.gradients([loss], [weight for weight in weights])
    return graph, mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, graph.trainable_variables)


def test_the_fullest_moment_depends_on_the_split():
    """Unsplit, both dims are as wide; split, either of them is what counts."""
    with tf.Graph().as_default():
        graph, _ = _wide_in_turn(64, 1024, 1024)
        exported = export_graph(graph)

    def activations(**splits):
        return strategy_memory(exported, [Configuration(tuple(
            (name, parts) for name, parts in splits.items() if name in layer.splittable))
            for layer in exported.layers])["activations"]
    hidden = 4 * 64 * 1024
    whole, left, right, both = (activations(**splits) for splits in (
        {}, {"left": 8}, {"right": 8}, {"left": 8, "right": 8}))
    assert both < min(left, right)
    assert max(left, right) < whole
    # While the one is differentiated, what was computed of it and a gradient are there.
    for one in (left, right):
        assert one > 2 * hidden


def test_of_gradients_that_a_loop_adds_up_the_sum_and_the_next_are_there():
    once, added = (_predicted(False, count)["gradients"] for count in (1, 4))
    # A gradient is used as soon as it is there; sums of all of them go round in the loop.
    assert once < 4 * WIDTH * HIDDEN * LAYERS <= 4 * WIDTH * HIDDEN * 2 * LAYERS <= added


def test_microbatches_lower_it_besides():
    whole, parts = (_predicted(True, count)["activations"] for count in (1, 4))
    assert parts < 0.4 * whole
    whole, parts = (_predicted(False, count)["activations"] for count in (1, 4))
    assert parts < 0.3 * whole


def test_a_function_with_a_gradient_of_its_own_is_kept():
    """custom_gradient computes nothing again."""
    def program():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        a = mtf.Dimension("a", 64)
        x = mtf.get_variable(mesh, "x", [a])
        y = mtf.tanh(x)

        def gradient(explicit_inputs, output_grads, **_):
            return [2.0 * explicit_inputs[0] * output_grads[0]]
        mtf.gradients([mtf.reduce_sum(mtf.custom_gradient(lambda t: t * t, gradient, [y]))], [x])
        return graph
    with tf.Graph().as_default():
        exported = export_graph(program())
    assert strategy_memory(exported, [Configuration()] * len(exported.layers))["activations"] >= 4 * 64


_HANDED_ON = ("Identity", "Reshape", "StopGradient")
_KEPT_ANYWAY = ("Const", "VarHandleOp", "Placeholder", "ReadVariableOp")


def _needed(graph, operations):
    """What has to run for these operations, in the order in which the graph was made."""
    stack, needed = list(operations), set()
    while stack:
        operation = stack.pop()
        if operation not in needed:
            needed.add(operation)
            stack += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return [operation for operation in graph.get_operations() if operation in needed]


def _live(graph, operations, results=()):
    """The most bytes of tensors that are there at once while operations run in the order in which they were made, each
    until its last reader is done; variables and constants not counted, of a loop one iteration."""
    order = _needed(graph, operations)
    owner = {}
    for operation in order:
        for tensor in operation.outputs:
            owner[tensor.name] = owner[operation.inputs[0].name] if operation.type in _HANDED_ON else tensor.name
    last = {owner[tensor.name]: step for step, operation in enumerate(order) for tensor in operation.inputs}
    last.update((owner[tensor.name], len(order)) for tensor in results)
    most = now = 0
    freed = collections.Counter()
    for step, operation in enumerate(order):
        inside = 0
        if operation.type == "While":
            body = graph._get_function(operation.get_attr("body").name).graph
            inside = _live(body, [tensor.op for tensor in body.outputs], body.outputs)
        else:
            for tensor in operation.outputs:
                if operation.type not in (*_HANDED_ON, *_KEPT_ANYWAY) and tensor.name in last:
                    size = tensor.dtype.size * tensor.shape.num_elements()
                    now += size
                    freed[last[tensor.name]] += size
        most = max(most, now + inside)
        now -= freed[step]
    return most


def _in_tensorflow(*options):
    with tf.Graph().as_default() as made:
        _, mesh, loss, updates = _program(*options)
        lowering = stock_lowering(mesh)
        return _live(made, [lowering.export_to_tf_tensor(loss).op, *map(lowering.lowered_operation, updates)])


def _both(*options):
    """Bytes beside the weights: (counted in the TensorFlow graph, predicted)."""
    return _in_tensorflow(*options), sum(size for part, size in _predicted(*options).items() if part != "weights")


@pytest.mark.parametrize("microbatches", [1, 4])
def test_it_is_what_tensorflow_needs_and_saves(microbatches):
    plain, again = (_both(recompute, microbatches) for recompute in (False, True))
    for live, predicted in (plain, again):
        # What a loop in TensorFlow is given is there beside what goes round in it.
        assert (1.0 if microbatches == 1 else 0.85) * live <= predicted < 1.1 * live
    assert again[0] < 0.6 * plain[0]
    assert plain[1] - again[1] > 0.6 * (plain[0] - again[0])


def test_blocks_that_share_weights_are_one_graph_in_every_process(monkeypatch):
    """Mesh-TensorFlow finds what they read from outside by sets, which are ordered by addresses."""
    hashes = set()
    for salt in range(16):  # stands for addresses
        monkeypatch.setattr(mtf.Tensor, "__hash__", lambda self, salt=salt: zlib.crc32(f"{salt} {self.name}".encode()))
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh, dims = mtf.Mesh(graph, "mesh"), [mtf.Dimension("batch", 8), mtf.Dimension("width", 4)]
            y = mtf.import_tf_tensor(mesh, tf.zeros([8, 4]), mtf.Shape(dims))
            scale, shift = mtf.get_variable(mesh, "scale", dims[1:]), mtf.get_variable(mesh, "shift", dims)
            for _ in range(3):
                y = mtf.recompute_grad(lambda t, a=scale, b=shift: mtf.tanh(t * a + b), [y])
            gradients = mtf.gradients([mtf.reduce_mean(y)], [scale, shift])
            mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, graph.trainable_variables)
            hashes.add(export_graph(graph).hash)
    assert len(hashes) == 1


def test_what_a_function_with_a_gradient_of_its_own_would_compute_again_is_not_needed():
    """In a block that is computed again it still hands on what it computed in the forward pass."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh, a = mtf.Mesh(graph, "mesh"), mtf.Dimension("a", 4)
        weight = mtf.get_variable(mesh, "weight", [a])

        def block(seen):
            return mtf.sin(mtf.custom_gradient(mtf.tanh, lambda output_grads, **_: output_grads,
                                               [mtf.exp(seen * weight)]))
        x = mtf.import_tf_tensor(mesh, tf.ones([4]), mtf.Shape([a]))
        gradients = mtf.gradients([mtf.reduce_sum(mtf.recompute_grad(block, [x]))], [weight])
        mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, graph.trainable_variables)
        needed = [fact.is_needed for fact in read_operations(graph) if fact.name == "tanh"]
    assert needed == [True, False]
