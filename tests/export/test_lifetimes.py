"""When tensors are there, and where: what is written in the place of something else, and what shares a copy."""

import dataclasses

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.copies import moved
from pase_mtf.cost.memory import strategy_memory
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration

B, D, V = mtf.Dimension("batch", 8), mtf.Dimension("d_model", 16), mtf.Dimension("vocab", 64)


def _exported(build):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D]))
        weights = mtf.get_variable(mesh, "w", mtf.Shape([D, V]), initializer=tf.zeros_initializer())
        build(mesh, mtf.einsum([x, weights], output_shape=[B, V], name="logits"))
        return export_graph(graph)


def _operations(exported):
    return {operation.name: operation for layer in exported.layers for operation in layer.operations}


def test_names_of_one_tensor_share_a_copy():
    def build(mesh, logits):
        mtf.einsum([logits, mtf.stop_gradient(logits)], output_shape=[B], name="squares")

    exported = _exported(build)
    (edge,) = [edge for edge in exported.edges if edge.shape == (8, 64)]
    assert edge.held


def test_a_reduction_multiplies_where_nobody_reads_what_it_read():
    def build(mesh, logits, again=False):
        chosen = mtf.one_hot(mtf.import_tf_tensor(mesh, tf.zeros([8], tf.int32), mtf.Shape([B])), V, name="one_hot")
        mtf.einsum([logits, chosen], output_shape=[B], name="chosen")
        if again:
            mtf.reduce_sum(chosen, output_shape=[B], name="later")

    def products(**options):
        operation = _operations(_exported(lambda mesh, logits: build(mesh, logits, **options)))["chosen"]
        return [held for held in operation.held if held.output < 0]

    assert not products()
    assert products(again=True)


def test_the_last_reader_of_a_copy_writes_in_its_place(monkeypatch):
    def build(mesh, logits):
        shifted = mtf.reduce_sum(logits, reduced_dim=V, name="sum")
        mtf.relu(logits - shifted, name="relu")

    exported = _exported(build)
    copies = [copy for edge in exported.edges if edge.shape == (8, 64) for copy in edge.held]
    assert copies
    assert all(copy.begin <= copy.taken <= copy.end for copy in copies)
    # Split in another way the tensor has to be copied, and the difference lies in the copy: what that is put together
    # from is more, and left out here.
    monkeypatch.setattr("pase_mtf.cost.memory.moved", lambda *given: moved(*given)._replace(meanwhile=0.0))
    chosen = [Configuration((("vocab" if layer.kind == "matmul" else "", 4),)) for layer in exported.layers]
    beside = dataclasses.replace(exported, edges=tuple(dataclasses.replace(
        edge, held=tuple(copy._replace(taken=-1) for copy in edge.held)) for edge in exported.edges))
    assert sum(strategy_memory(exported, chosen).values()) < sum(strategy_memory(beside, chosen).values())


def _largest(build):
    """What one device needs of all, in bytes, by parts, with everything whole."""
    exported = _exported(build)
    return sum(strategy_memory(exported, [Configuration()] * len(exported.layers)).values())


def test_products_that_an_einsum_makes_besides_are_there_while_it_runs():
    """Integers are multiplied over all dims and summed; of three tensors two are multiplied first."""
    rows, places, again, wide = (mtf.Dimension(name, size) for name, size in (
        ("rows", 64), ("places", 256), ("again", 256), ("wide", 4096)))

    def integers(mesh, _):
        ids = mtf.import_tf_tensor(mesh, tf.ones([64, 256], tf.int32), mtf.Shape([rows, places]))
        mtf.cumsum(ids, places)

    def three(mesh, _):
        x = mtf.import_tf_tensor(mesh, tf.ones([64, 256]), mtf.Shape([rows, places]))
        y = mtf.import_tf_tensor(mesh, tf.ones([64, 256]), mtf.Shape([rows, again]))
        w = mtf.import_tf_tensor(mesh, tf.ones([256, 256]), mtf.Shape([places, again]))
        mtf.einsum([x, mtf.relu(y), w], output_shape=[rows])

    def two(mesh, _):
        x = mtf.import_tf_tensor(mesh, tf.ones([64, 256]), mtf.Shape([rows, places]))
        w = mtf.import_tf_tensor(mesh, tf.ones([256, 4096]), mtf.Shape([places, wide]))
        mtf.einsum([x, w], output_shape=[rows, wide])

    least = _largest(lambda mesh, logits: None)
    assert 64 * 256 * 256 * 4 <= _largest(integers) - least < 1.1 * 64 * 256 * 256 * 4
    # Split along what is summed over, every device multiplies its part.
    exported = _exported(integers)
    split = [Configuration((("places" if "places" in layer.splittable else "", 8),)) for layer in exported.layers]
    assert sum(strategy_memory(exported, split).values()) - least < 64 * 256 * 256 * 4 / 4
    besides = {name: [held.times * operation.inputs[-1 - held.output].shape[0] for held in operation.held
                      if held.output < 0] for name, operation in _operations(_exported(three)).items()}
    assert [found for found in besides.values() if found], besides
    assert not [held for operation in _operations(_exported(two)).values() for held in operation.held
                if held.times != 1.0]


def test_what_a_function_of_slices_makes_besides_is_there_while_it_runs():
    """The logits of an attention; its gradient takes what came of them, which is there until then."""
    batch, length, key = (mtf.Dimension(name, size) for name, size in (("batch", 4), ("length", 512), ("key", 8)))
    logits = 4 * 512 * 512 * 4

    def attention(mesh, _, gradient=False):
        q, k, v = (mtf.import_tf_tensor(mesh, tf.ones([4, 512, 8]), mtf.Shape([batch, length, key])) for _ in range(3))
        y = mtf.slicewise(lambda q, k, v: tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v), [q, k, v],
                          splittable_dims=[batch])
        if gradient:
            mtf.gradients([mtf.reduce_sum(y)], [q, k, v])

    least = _largest(lambda mesh, logits: None)
    assert logits <= _largest(attention) - least < 1.1 * logits
    assert 2 * logits <= _largest(lambda mesh, x: attention(mesh, x, gradient=True)) - least < 2.2 * logits
    exported = _exported(attention)
    split = [Configuration((("batch" if "batch" in layer.splittable else "", 4),)) for layer in exported.layers]
    assert sum(strategy_memory(exported, split).values()) - least < 1.1 * logits / 4


def test_constants_are_there_all_the_time():
    def build(mesh, logits):
        mtf.reduce_sum(logits + mtf.zeros(mesh, mtf.Shape([B, mtf.Dimension("memory", 1 << 16), V])))

    exported = _exported(build)
    constant = next(operation for operation in _operations(exported).values() if operation.type == "Constant")
    (held,) = constant.held
    assert held.begin == 0
    assert held.end >= max(other.end for layer in exported.layers for operation in layer.operations
                           for other in operation.held)


def test_gradients_without_elements_are_exported():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh, none = mtf.Mesh(graph, "mesh"), mtf.Dimension("none", 0)
        x = mtf.import_tf_tensor(mesh, tf.zeros([0, 16]), mtf.Shape([none, D]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([D, V]), initializer=tf.zeros_initializer())
        mtf.gradients([mtf.reduce_sum(mtf.softplus(mtf.einsum([x, w], [none, V])))], [w])
        assert export_graph(graph).layers


def _inputs_and_weights(kept):
    """A graph with inputs, and weights that are kept in a type; a step computes in bfloat16."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16], tf.bfloat16), mtf.Shape([B, D]))
    return graph, x, mtf.get_variable(mesh, "w", mtf.Shape([D, V]), mtf.VariableDType(kept, kept, tf.bfloat16),
                                      initializer=tf.zeros_initializer())


def test_what_a_value_is_converted_to_for_its_variable_is_there():
    """A gradient in bfloat16 is cast on its way to weights in float32."""
    def assigned(kept):
        with tf.Graph().as_default():
            graph, x, w = _inputs_and_weights(kept)
            gradients = mtf.gradients([mtf.reduce_sum(mtf.einsum([x, w], output_shape=[B, V]))], [w])
            mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, graph.trainable_variables)
            found, = (one for layer in export_graph(graph).layers for one in layer.operations if one.type == "Assign")
        return found

    assert {(held.output, held.times) for held in assigned(tf.float32).held} == {(-1, 2.0)}
    assert not assigned(tf.bfloat16).held


def test_a_sum_of_its_own_is_there_though_its_parts_were_made_before():
    """x w is added to z w in parts, and is a sum of its own once more."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x, z = (mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([B, D])) for _ in range(2))
        w = mtf.get_variable(mesh, "w", mtf.Shape([D, V]), initializer=tf.zeros_initializer())
        first, other, again = (mtf.einsum([one, w], output_shape=[B, V]) for one in (x, z, x))
        mtf.relu(first + other)
        mtf.relu(again)
        operations = [one for layer in export_graph(graph).layers for one in layer.operations]
    einsums = [one for one in operations if one.type == "EinsumOperation"]
    assert [one.repeats for one in einsums] == [False, False, True]
    assert einsums[-1].reduced
    assert einsums[-1].held


def test_what_reads_a_weight_once_more_holds_what_it_casts():
    def held(kept):
        with tf.Graph().as_default():
            graph, x, w = _inputs_and_weights(kept)
            for weight in (w, mtf.read_variable(w.operation)):
                mtf.einsum([x, weight], output_shape=[B, V])
            found, = (one for layer in export_graph(graph).layers for one in layer.operations
                      if one.type == "ReadVariable")
        return found.held

    assert held(tf.float32)
    assert not held(tf.bfloat16)


def test_what_a_rename_gathers_within_a_layer_is_there():
    """Split along what it is renamed from, every device is given all of it; else it lies where it was made."""
    batch, a, b = (mtf.Dimension(name, 64) for name in ("batch", "a", "b"))
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([64, 64]), mtf.Shape([batch, a]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([a, b]), initializer=tf.zeros_initializer())
        mtf.relu(mtf.rename_dimension(mtf.einsum([x, w], output_shape=[batch, b]), "b", "a"))
        exported = export_graph(graph)
    layer, = exported.layers

    def buffers(name):
        return strategy_memory(exported, [Configuration(((name, 4),))])["communication buffers"]

    assert {"batch", "a", "b"} <= set(layer.splittable)
    assert buffers("b") == 4 * 64 * 64  # 0 while it counts as shown
    assert buffers("batch") == 0


def _shown_until_later(mesh, logits):
    """The logits in another shape are read again when what was made of them first takes most."""
    rows, columns, wide, wider = (mtf.Dimension(name, size) for name, size in (
        ("rows", 8), ("columns", 8), ("wide", 512), ("wider", 4096)))
    shown = mtf.reshape(logits, mtf.Shape([B, rows, columns]))
    first, second = (mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.zeros_initializer())
                     for name, dims in (("first", [columns, wide]), ("second", [wide, wider])))
    made = mtf.einsum([shown, first], output_shape=[B, rows, wide])
    most = mtf.einsum([made, second], output_shape=[B, rows, wider])
    mtf.einsum([shown, mtf.reduce_sum(most, output_shape=[B, rows])], output_shape=[B, columns])


def test_what_shows_a_copy_keeps_it():
    """A reshape in another layout shows the copy that it reads: who gathers that holds no less than who has it."""
    exported = _exported(_shown_until_later)
    whole, gathered = (sum(strategy_memory(exported, [
        Configuration(((dim if "vocab" in layer.dims else "", 4),)) for layer in exported.layers]).values())
        for dim in ("", "batch"))
    assert gathered >= whole  # while the copy ended with the reshape it took 1536 bytes less


def test_what_is_shown_is_there_though_it_was_written_over_something_else():
    """A bias is added in the place of the logits; in another shape they are read again when most is there."""
    def with_bias(mesh, logits):
        bias = mtf.get_variable(mesh, "bias", mtf.Shape([V]), initializer=tf.zeros_initializer())
        _shown_until_later(mesh, logits + bias)

    assert _largest(with_bias) >= _largest(_shown_until_later)  # it took 2048 - 256 bytes less


def test_what_pools_or_turns_round_is_made_beside_what_it_reads():
    """As large as it is: TensorFlow's kernels for these write over nothing."""
    rows, columns = mtf.Dimension("rows", 16), mtf.Dimension("columns", 16)

    def largest(function):
        def build(mesh, logits):
            image = mtf.broadcast(logits, mtf.Shape([B, rows, columns, V]))
            made = mtf.slicewise(function, [image], splittable_dims=[B])
            mtf.reduce_sum(made, output_shape=[B])
        return _largest(build)

    whole = 4 * 8 * 16 * 16 * 64
    assert whole <= largest(tf.nn.relu) < 1.5 * whole
    assert largest(lambda x: tf.raw_ops.AvgPool(
        value=x, ksize=[1, 3, 3, 1], strides=[1] * 4, padding="SAME")) >= 2 * whole
    assert largest(lambda x: tf.reverse(x, [1])) >= 2 * whole


def test_rows_that_are_cut_out_keep_what_they_are_of():
    """Aligned rows are shown, as prices know; columns are copied."""
    rows, more = mtf.Dimension("rows", 1024), mtf.Dimension("more", 1024)

    def largest(name):
        def build(mesh, logits):
            few = mtf.slice(mtf.broadcast(logits, mtf.Shape([rows, B, V])), 0, 16, name)
            later = mtf.broadcast(mtf.reduce_sum(few, output_shape=[B]), mtf.Shape([more, B, V]))
            mtf.einsum([few, mtf.reduce_sum(later, output_shape=[B])], output_shape=[B])
        return _largest(build)

    whole = 4 * 1024 * 8 * 64
    assert largest("vocab") < 1.8 * whole
    assert largest("rows") >= 2 * whole


def test_rows_that_are_no_longer_aligned_once_split_are_copied():
    """Whole rows of 3,200 bytes, and halves, are shown; of eighths, 400 bytes, TensorFlow makes copies."""
    time, width = mtf.Dimension("time", 64), mtf.Dimension("width", 100)

    def build(mesh, logits, unread=False):
        image = mtf.import_tf_tensor(mesh, tf.zeros([64, 8, 100]), mtf.Shape([time, B, width]))
        rows = mtf.unstack(mtf.relu(image), time)
        total = rows[0]
        for row in rows[:1] if unread else rows:
            total = mtf.maximum(total, row)
        mtf.reduce_sum(total, output_shape=[B])

    def needed(splits, **options):
        exported = _exported(lambda mesh, logits: build(mesh, logits, **options))
        configuration = Configuration((("batch", splits),)) if splits > 1 else Configuration()
        return sum(strategy_memory(exported, [configuration] * len(exported.layers)).values())

    rows = 64 * 8 * 100 * 4
    assert needed(8) >= needed(8, unread=True) + 0.9 * rows / 8
    for splits in (1, 2):
        assert needed(splits) < needed(splits, unread=True) + 0.1 * rows / splits


def test_nothing_is_written_over_what_a_row_is_cut_out_of():
    """As large as the whole, but TensorFlow has the row alone to write over."""
    rows = mtf.Dimension("rows", 64)

    def build(mesh, logits):
        shape = mtf.Shape([rows, B, V])
        other = mtf.broadcast(mtf.relu(logits), shape)
        image = mtf.slicewise(lambda x: tf.tile(tf.expand_dims(x, 0), [64, 1, 1]), [logits], output_shape=shape,
                              splittable_dims=[B])
        made = mtf.unstack(image, rows)[0] + other
        mtf.reduce_sum(made, output_shape=[B])
        mtf.reduce_sum(other, output_shape=[B])

    assert _largest(build) >= 3 * 4 * 64 * 8 * 64


def test_what_finds_maxima_or_rolls_is_made_beside_what_it_reads_too():
    rows, columns = mtf.Dimension("rows", 16), mtf.Dimension("columns", 16)

    def largest(function):
        def build(mesh, logits):
            image = mtf.broadcast(logits, mtf.Shape([B, rows, columns, V]))
            mtf.reduce_sum(mtf.slicewise(function, [image], splittable_dims=[B]), output_shape=[B])
        return _largest(build)

    for function in (lambda x: tf.raw_ops.MaxPool(input=x, ksize=[1, 3, 3, 1], strides=[1] * 4, padding="SAME"),
                     lambda x: tf.roll(x, 1, 1)):
        assert largest(function) >= 2 * 4 * 8 * 16 * 16 * 64
