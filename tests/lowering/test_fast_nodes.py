"""Nodes made in the short way are those that TensorFlow's functions make; nothing is copied that this would change."""

import collections

import harness
import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.fast_nodes import make_node
from pase_mtf.lowering.new_node import Maker, Pattern

_DEVICES = harness.device_names(4)


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


class _Counted:
    """A function of slices, and how often it was called."""

    def __init__(self, fn):
        self.fn, self.calls = fn, 0

    def __call__(self, device, *row):
        self.calls += 1
        return self.fn(device, *row)


def _inputs(count=4, shape=(2, 3), dtype=tf.float32):
    inputs = []
    for number in range(count):
        with tf.device(_DEVICES[number]):
            inputs.append(tf.identity(tf.constant(np.full(shape, number + 1.0), dtype)))
    return inputs


def _run(tensors):
    with harness.session(4) as run:
        return run.run(tensors)


def _definition(operation):
    definition = operation.node_def
    definition.ClearField("name")
    return definition


# One node

_X = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(("kind", "arguments"), [
    ("Slice", {"input": _X, "begin": [1, 2], "size": [2, 3]}),
    ("Split", {"axis": 1, "value": _X, "num_split": 3}),
    ("Split", {"axis": 0, "value": _X, "num_split": 1}),
    ("SplitV", {"value": _X, "size_splits": [1, 5], "axis": 1, "num_split": 2}),
    ("ConcatV2", {"values": [_X, _X, _X], "axis": 0}),
    ("ConcatV2", {"values": [_X, _X], "axis": 0}),
    ("Reshape", {"tensor": _X, "shape": [6, 4]}),
    ("Transpose", {"x": _X, "perm": [1, 0]}),
    ("BroadcastTo", {"input": _X, "shape": [2, 4, 6]}),
    ("AddN", {"inputs": [_X, _X]}),
    ("Maximum", {"x": _X, "y": -_X}),
    ("Pack", {"values": [_X, _X], "axis": 1}),
    ("Sum", {"input": _X, "axis": [0], "keep_dims": False}),
    ("Sum", {"input": _X, "axis": [0], "keep_dims": True}),
], ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_node_is_what_raw_ops_makes(graph, kind, arguments, dtype):
    def given(name, x):
        if name in ("num_split", "keep_dims") or (kind, name) == ("Pack", "axis"):
            return x
        if isinstance(x, list) and isinstance(x[0], np.ndarray):
            return [tf.constant(entry, dtype) for entry in x]
        return tf.constant(x, dtype if isinstance(x, np.ndarray) else tf.int32)

    arguments = {name: given(name, x) for name, x in arguments.items()}
    wanted = getattr(tf.raw_ops, kind)(**arguments)
    # The second is made by what the first needed.
    for found in (make_node(kind, **arguments), make_node(kind, **arguments)):
        assert isinstance(found, list) == isinstance(wanted, list)
        one, other = ((found, wanted) if isinstance(found, list) else ([found], [wanted]))
        assert _definition(one[0].op) == _definition(other[0].op)
        for x, y in zip(one, other, strict=True):
            assert x.shape == y.shape
            assert x.dtype == y.dtype
        for x, y in zip(_run(one), _run(other), strict=True):
            np.testing.assert_array_equal(x, y)


def test_variables_are_read_and_assigned_as_by_raw_ops(graph):
    variable = tf.get_variable("x", [2], tf.float64, use_resource=True)
    value = tf.constant([1., 2.], tf.float64)
    for kind, arguments in (("AssignVariableOp", {"value": value}), ("AssignAddVariableOp", {"value": value}),
                            ("ReadVariableOp", {"dtype": tf.float64})):
        wanted = getattr(tf.raw_ops, kind)(resource=variable.handle, **arguments)
        for _ in range(2):
            found = make_node(kind, resource=variable.handle, **arguments)
            assert type(found) is type(wanted)
            one, other = ((x if isinstance(x, tf.Operation) else x.op) for x in (found, wanted))
            assert _definition(one) == _definition(other)


@pytest.mark.parametrize("asked", [
    lambda graph, x: tf.device("/device:CPU:1"),
    lambda graph, x: tf.device(lambda node: "/device:CPU:2" if node.type == "Tanh" else ""),
    lambda graph, x: tf.control_dependencies([tf.no_op()]),
    lambda graph, x: tf.colocate_with(x),
    lambda graph, x: graph._attr_scope({"_mine": tf.AttrValue(i=3)}),
    lambda graph, x: graph._kernel_label_map({"Tanh": "mine"}),
    lambda graph, x: graph.gradient_override_map({"Tanh": "Identity"}),
    lambda graph, x: tf.name_scope("mine"),
], ids=["device", "device by node", "wait", "colocate", "attribute", "kernel", "gradient", "name"])
def test_what_a_program_asks_of_nodes_is_asked_of_these(graph, asked):
    with tf.device("/job:localhost"):
        (x,) = _inputs(1)
    make_node("Tanh", x=tf.identity(x))
    made = []
    with tf.device("/job:localhost"), asked(graph, x):
        pattern = Pattern.of(tf.raw_ops.Tanh(x=x).op)
        wanted = tf.raw_ops.Tanh(x=x).op
        with Maker(graph) as maker:
            made += [make_node("Tanh", x=x).op, *(maker.make(pattern, "Tanh", [x]) for _ in range(3))]
    for operation in made:
        assert _definition(operation) == _definition(wanted)
        assert operation.device == wanted.device
        assert operation.control_inputs == wanted.control_inputs
        assert operation.name.rpartition("/")[0] == wanted.name.rpartition("/")[0]
        assert operation.colocation_groups() == ([f"loc:@{operation.name}".encode()] if "_class" not in
                                                 wanted.node_def.attr else wanted.colocation_groups())
        assert tf.gradients(operation.outputs[0], x)[0].op.type == tf.gradients(wanted.outputs[0], x)[0].op.type


def test_what_waits_for_a_node_of_this_kind_waits_once(graph):
    """Of a node and one that it takes, made within one wait, only the first waits, as TensorFlow has it."""
    (x,) = _inputs(1)
    pattern = Pattern.of(tf.raw_ops.Tanh(x=x).op)
    with tf.control_dependencies([tf.no_op()]), Maker(graph) as maker:
        first = maker.make(pattern, "Tanh", [x])
        second = maker.make(pattern, "Tanh", first.outputs)
    assert len(first.control_inputs) == 1
    assert second.control_inputs == []


def test_a_node_knows_where_it_was_made(graph):
    (x,) = _inputs(1)
    make_node("Log", x=x)
    made = make_node("Log", x=x)
    assert any("test_a_node_knows_where_it_was_made" in frame.name for frame in made.op.traceback)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"test_fast_nodes\.py"):
        _run(make_node("CheckNumerics", tensor=make_node("CheckNumerics", tensor=tf.log(-x), message="no"),
                       message="no"))


def test_inputs_that_do_not_fit_are_refused(graph):
    (x,) = _inputs(1)
    pattern = Pattern.of(tf.raw_ops.MatMul(a=x, b=x, transpose_b=True).op)
    with Maker(graph) as maker, pytest.raises(ValueError, match="must be equal"):
        maker.make(pattern, "MatMul", [x, tf.identity(tf.zeros((4, 5)))])
    graph.finalize()
    with pytest.raises(RuntimeError, match="finalized"), Maker(graph) as maker:
        maker.make(pattern, "MatMul", [x, x])


# What is copied

def test_a_function_is_called_once_for_what_is_alike(graph):
    emitter, scope = Emitter(_DEVICES), "outer"
    fn = _Counted(lambda device, x, y, factor: (
        tf.multiply(tf.matmul(x, y, transpose_b=True), emitter.constant(device, float(factor), tf.float32)), y))
    xs, ys = _inputs(), _inputs()
    with tf.name_scope(scope):
        made = emitter.of_slices(_DEVICES, fn, [xs, ys, [3, 3, 3, 3]])
    assert fn.calls == 1
    for number, (product, same) in enumerate(made):
        assert same is ys[number]
        assert product.op.name.startswith("outer/Mul")
        assert product.op.inputs[0].op.type == "MatMul"
        for operation in (product.op, product.op.inputs[0].op, product.op.inputs[1].op):
            assert tf.DeviceSpec.from_string(operation.device) == tf.DeviceSpec.from_string(_DEVICES[number])
        assert product.shape.as_list() == [2, 2]
    for number, value in enumerate(_run([product for product, _ in made])):
        np.testing.assert_array_equal(value, np.full((2, 2), 9.0 * (number + 1) ** 2))


def test_what_is_not_alike_is_made_by_the_function(graph):
    emitter = Emitter(_DEVICES)
    by_shape = _Counted(lambda _, x: tf.reshape(x, [x.shape.as_list()[0] * 3]))
    xs = [*_inputs(2), *_inputs(2, (4, 3))]
    assert [x.shape.as_list() for x in emitter.of_slices(_DEVICES, by_shape, [xs])] == [[6], [6], [12], [12]]
    assert by_shape.calls == 2
    by_type = _Counted(lambda _, x: x + 1)
    emitter.of_slices(_DEVICES, by_type, [[*_inputs(2), *_inputs(2, dtype=tf.float64)]])
    assert by_type.calls == 2
    by_value = _Counted(lambda _, x, begin: x[int(begin):])
    xs = _inputs()
    assert [x.shape.as_list()[0] for x in emitter.of_slices(_DEVICES, by_value, [xs, [0, 1, 0, True]])] == [2, 1, 2, 1]
    assert by_value.calls == 3  # True is no 1
    by_place = _Counted(lambda _, pair: pair[0] if pair[0] is pair[1] else pair[0] - pair[1])
    pairs = [(xs[0], xs[0]), (xs[1], xs[2]), (xs[2], xs[2]), (xs[0], xs[3])]
    values = _run(emitter.of_slices(_DEVICES, by_place, [pairs]))
    assert [value[0, 0] for value in values] == [1, -1, 3, -3]
    assert by_place.calls == 2


def _drawn(_, x):
    return x + tf.random.uniform(x.shape)


def _one_beside(_, x):
    tf.identity(x, name="beside")
    return x + 1


def _waits_within(_, x):
    with tf.control_dependencies([tf.print(x)]):
        return tf.identity(x)


def _with_gradient(_, x):
    @tf.custom_gradient
    def squared(x):
        return x * x, lambda dy: dy * x

    return squared(x)


def _in_a_list(_, x):
    return [x + 1]


def _elsewhere(_, x):
    with tf.device(_DEVICES[3]):
        return x + 1


@pytest.mark.parametrize("fn", [_drawn, _one_beside, _waits_within, _with_gradient, _in_a_list, _elsewhere])
def test_what_could_tell_copies_apart_is_not_copied(graph, fn):
    fn = _Counted(fn)
    Emitter(_DEVICES).of_slices(_DEVICES, fn, [_inputs()])
    assert fn.calls == 4


def test_what_was_made_for_one_device_is_not_taken_for_another(graph):
    xs = _inputs()
    own = dict(zip(_DEVICES, [x * 10 for x in xs], strict=True))
    made = Emitter(_DEVICES).of_slices(_DEVICES, lambda device, x: x + own[device], [xs])
    assert [value[0, 0] for value in _run(made)] == [11, 22, 33, 44]


def test_what_is_asked_of_a_constant_is_asked_of_each(graph):
    fn = _Counted(lambda _, x, parts: x[int(tf.get_static_value(parts)):])
    parts = [tf.constant(number) for number in (0, 1, 1, 0)]
    made = Emitter(_DEVICES).of_slices(_DEVICES, fn, [_inputs(), parts])
    assert [x.shape.as_list()[0] for x in made] == [2, 1, 1, 2]
    assert fn.calls == 2
    many = [tf.constant(np.arange(100)) for _ in _DEVICES]
    fn = _Counted(lambda _, x: x + 1)
    Emitter(_DEVICES).of_slices(_DEVICES, fn, [many])
    assert fn.calls == 4
    fn.calls = 0
    Emitter(_DEVICES).of_slices(_DEVICES, fn, [many[:1] * 4])
    assert fn.calls == 1


def test_a_copy_has_the_shape_that_the_function_knew(graph):
    def known(_, x):
        result = tf.boolean_mask(x, x[:, 0] > 0)
        result.set_shape([2, 3])
        return result

    fn = _Counted(known)
    made = Emitter(_DEVICES).of_slices(_DEVICES, fn, [_inputs()])
    assert [x.shape.as_list() for x in made] == [[2, 3]] * 4
    assert fn.calls == 1


def test_gradients_are_those_of_every_copy(graph):
    xs, emitter = _inputs(), Emitter(_DEVICES)
    ys = emitter.of_slices(_DEVICES, lambda _, x: tf.square(tf.nn.sigmoid(x)), [xs])
    fn = _Counted(lambda _, y, x: tf.gradients(y, x)[0])
    made = emitter.of_slices(_DEVICES, fn, [ys, xs])
    sigmoid = 1 / (1 + np.exp(-np.arange(1, 5)))
    np.testing.assert_allclose([value[0, 0] for value in _run(made)], 2 * sigmoid ** 2 * (1 - sigmoid), rtol=1e-5)


def test_copies_wait_for_what_the_original_waits_for(graph):
    xs = _inputs()
    first = tf.no_op()
    fn = _Counted(lambda _, x: tf.tanh(tf.square(x)))
    with tf.control_dependencies([first]):
        made = Emitter(_DEVICES).of_slices(_DEVICES, fn, [xs])
    assert fn.calls == 1
    assert [x.op.inputs[0].op.control_inputs for x in made] == [[first]] * 4


def test_names_from_outside_of_the_scope(graph):
    def elsewhere(_, x):
        with tf.name_scope("there/"):
            return x * 2

    fn = _Counted(elsewhere)
    with tf.name_scope("here_and_now"):
        made = Emitter(_DEVICES).of_slices(_DEVICES, fn, [_inputs()])
    assert fn.calls == 1
    assert [value[0, 0] for value in _run(made)] == [2, 4, 6, 8]
    assert len({x.op.name for x in made}) == 4


def test_within_a_loop(graph):
    xs, fn = _inputs(), _Counted(lambda _, x: x * 2 + 1)
    emitter = Emitter(_DEVICES)
    looped = tf.while_loop(lambda i, *_: i < 3, lambda i, *ys: [i + 1, *emitter.of_slices(_DEVICES, fn, [ys])],
                           [tf.constant(0), *xs])
    assert [value[0, 0] for value in _run(looped[1:])] == [15, 23, 31, 39]
    fn = _Counted(lambda _, x: x * 2 + 1)  # of what is from outside
    looped = tf.while_loop(lambda i, *_: i < 3, lambda i, *_: [i + 1, *emitter.of_slices(_DEVICES, fn, [xs])],
                           [tf.constant(0), *xs])
    assert [value[0, 0] for value in _run(looped[1:])] == [3, 5, 7, 9]


@pytest.mark.parametrize("name", ["alexnet", "transformer"])
def test_a_model_has_the_nodes_that_it_has_when_every_function_is_called(name, monkeypatch):
    """Types, attributes, places and the kinds of what is read of every node, in one graph and in the other."""
    config = models.load_config(name, "tiny")

    def nodes():
        with tf.Graph().as_default() as graph:
            harness.under_strategy("random0", 2)(harness.model_program(name, config))
            found = collections.Counter()
            kinds = {}
            for operation in graph.get_operations():
                definition = _definition(operation)
                definition.ClearField("input")
                kinds[operation.name] = (definition.SerializeToString(deterministic=True), tuple(
                    kinds.get(x.op.name, (x.op.type,))[0] for x in operation.inputs),
                    tuple(sorted(x.type for x in operation.control_inputs)))
                found[kinds[operation.name]] += 1
            return found

    short = nodes()
    monkeypatch.setattr(Emitter, "of_slices", Emitter.per_device)
    for user in ("emit", "variables"):
        monkeypatch.setattr(f"pase_mtf.lowering.{user}.make_node",
                            lambda kind, **arguments: getattr(tf.raw_ops, kind)(**arguments))
    assert short == nodes()
