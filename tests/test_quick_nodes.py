"""Graphs whose nodes tests make quickly are those that TensorFlow makes, node by node."""

import functools
import json
import math
import re

import harness
import layout_operations
import numpy as np
import pytest
import quick_nodes
from layout_operations import FLOAT32
from micro_models import SIZES
from nets import Builder
from programs import training

from pase_mtf import models
from pase_mtf.compat import mtf, placement_mesh_impl, tf


@pytest.fixture(autouse=True)
def as_before():
    yield
    quick_nodes.install(True)


def _definition(build, quick):
    """Every node and function as text, in which functions have no numbers: those count in a process."""
    quick_nodes.install(quick)
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        build()
        definition = graph.as_graph_def()
    nodes, functions = ([re.sub(r"((?:while|cond)_\w+?)_\d+", r"\1", str(part)) for part in parts]
                        for parts in (definition.node, definition.library.function))
    return nodes + sorted(functions)


def assert_same(build):
    """Made twice quickly, as only what was made before is made quickly."""
    wanted = _definition(build, quick=False)
    for _ in range(2):
        found = _definition(build, quick=True)
        for one, other in zip(found, wanted, strict=True):
            assert one == other


def _lowered(name, preset, rule, optimizer):
    config = models.load_config(name, preset)
    program = harness.model_program(name, config, optimizer)
    lowering = rule(program)
    with tf.control_dependencies([lowering.lowered_operation(update) for update in program.updates]):
        tf.identity(lowering.export_to_tf_tensor(program.loss))


@pytest.mark.parametrize(("name", "optimizer"), harness.some_slow(
    [("alexnet", "adam")], [("rnnlm", "adafactor"), ("biglstm", "sgd")]))
@pytest.mark.parametrize("rule", harness.some_slow([harness.stock("a:2;b:2", "batch:a;vocab:b;fc1:b")],
                                                   [harness.under_strategy("random0")]))
def test_models(tmp_path, name, optimizer, rule):
    preset = tmp_path / f"{name}.json"
    preset.write_text(json.dumps({"preset": "tiny", **SIZES[name]}))
    assert_same(functools.partial(_lowered, name, str(preset), rule, optimizer))


@pytest.mark.parametrize("name", harness.some_slow(["toy"], ["lm", "digits"]))
def test_programs(name):
    def build():
        with training.built(name) as program:
            for rule in (training.stock(), training.stock("all:2", "batch:all")):
                rule(program).export_to_tf_tensor(program.loss)
    assert_same(build)


@pytest.mark.parametrize("name", harness.some_slow(
    ["one_hot", "loop"], [name for name in layout_operations.CASES if name not in ("one_hot", "loop")]))
def test_operations(name):
    def build():
        builder = Builder(tf.float32 if name in FLOAT32 else tf.float64)
        outputs = layout_operations.CASES[name](builder)
        mesh = placement_mesh_impl.PlacementMeshImpl("a:2;b:2", [], harness.device_names(4))
        lowering = mtf.Lowering(builder.graph, dict.fromkeys([op.mesh for op in builder.graph.operations], mesh))
        for output in outputs:
            lowering.export_to_tf_tensor(output)
    assert_same(build)


def _constants(x):
    for value in (0.0, -0.0, 1, True, math.nan, -math.nan, math.inf, np.float64(1), np.float32(1), np.int64(1), [1, 2],
                  (1, 2), [1.0, 2], [True, False], np.arange(3), np.arange(3.0), np.zeros((0, 2)), np.arange(200), "a",
                  b"a", ["a", "b"], np.asarray(["a"]), np.zeros((2, 2)), np.zeros(4)):
        tf.constant(value)
        tf.constant(value, name="named")
        tf.identity(value)
    tf.constant(1, tf.float64)
    tf.constant(1, tf.int64, [2, 3])
    tf.constant([1, 2], shape=[2, 1])
    tf.constant(1.5, tf.bfloat16)


def _arguments(x):
    for other in (2, 2.0, np.float32(2), [2.0, 3.0], np.ones(2, np.float32), x, tf.constant(2.0)):
        _ = x * other, other + x
    for axis in (0, [0], (0, 1), [], None, np.int64(1), tf.constant([0])):
        tf.reduce_sum(x, axis)
        tf.reduce_sum(x, axis, keepdims=True)
    for shape in ([4], (4,), [-1, 1], [2, tf.constant(2)], tf.TensorShape([4]), np.asarray([4]), tf.shape(x)):
        tf.reshape(x, shape)
        tf.reshape(x, [tf.constant(4)])
        tf.slice(x, [tf.constant(0), tf.constant(1)], [1, 1])
        tf.slice(tf.reshape(x, [4]), [tf.constant(1)], [2])
    for value in (1, 2 ** 40, [1], [1, 2 ** 40], -2 ** 31):
        tf.identity(value)
    tf.stack([1.0, 2.0])
    tf.concat([[1.0], [2.0]], 0)
    tf.concat([x, x], 0)
    tf.concat([x, np.ones((2, 2))], 0)
    tf.stack([x, x])
    tf.cast(x, tf.int64)
    tf.cast(tf.cast(x, tf.int32), tf.float64)
    tf.nn.conv2d(tf.reshape(x, [1, 2, 2, 1]), tf.ones([1, 1, 1, 1]), [1, 1, 1, 1], "SAME")
    tf.nn.conv2d(tf.reshape(x, [1, 2, 2, 1]), tf.ones([1, 1, 1, 1]), [1, 2, 2, 1], "VALID")
    tf.split(x, 2)
    tf.split(x, [1, 1])
    tf.where(x > 0, x, tf.zeros_like(x))
    tf.one_hot([0, 1], 3)
    tf.random.uniform([2])
    tf.random.uniform([2], seed=3)
    tf.gradients(tf.reduce_mean(tf.nn.softmax(x) ** 2), x)


def _places(x):
    for _ in range(2):
        with tf.device("/device:CPU:0"), tf.name_scope("inner"):
            tf.add(x, 1.0, name="sum")
            with tf.name_scope("inner/"):
                tf.add(x, x)
            with tf.device(lambda node: "/device:CPU:1"):
                tf.add(x, x)
            with tf.device(None):
                tf.add(x, x)
        with tf.control_dependencies([tf.add(x, 3.0)]):
            tf.multiply(x, 3.0)
            with tf.control_dependencies(None):
                tf.multiply(x, 3.0)
        with tf.colocate_with(x.op):
            tf.multiply(x, 4.0)
        tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2.0), [0, x])
        tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x + 1.0)
        with tf.get_default_graph()._attr_scope({"_mark": tf.AttrValue(s=b"here")}):
            tf.add(x, x)
        with tf.get_default_graph().gradient_override_map({"Relu": "Identity"}):
            tf.nn.relu(x)
        with tf.variable_scope(None, "variables"):
            variable = tf.get_variable("v", [2, 2], use_resource=True)
            old = tf.get_variable("old", [2, 2], use_resource=False)
        _ = variable * x, old * x, tf.matmul(variable, x), variable.assign_add(x), old.assign_add(x)
        tf.scatter_add(old, [0], [[1.0, 1.0]])


@pytest.mark.parametrize("make", [_constants, _arguments, _places])
def test_functions(make):
    assert_same(lambda: make(tf.placeholder(tf.float32, [2, 2])))


@pytest.mark.parametrize("wrong", [
    lambda x: tf.add(x, tf.constant(1)), lambda x: tf.matmul(x, tf.ones([3, 3])), lambda x: tf.reshape(x, [5]),
    lambda x: tf.concat([x, tf.ones([2, 2], tf.int32)], 0), lambda x: tf.add(x, np.ones(3)),
    lambda x: tf.reduce_sum(x, 7)])
def test_what_is_wrong_is_told_as_before(wrong):
    told = []
    for quick in (False, True, True):
        quick_nodes.install(quick)
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [2, 2])
            with pytest.raises((TypeError, ValueError)) as raised:
                wrong(x)
        told.append((type(raised.value), str(raised.value).splitlines()[0][:60]))
    assert told[0] == told[1] == told[2]
