"""What gradients of convolutions unfold, against what TensorFlow's own kernels say that they take."""

import dataclasses
import json
import os
import subprocess
import sys

import harness
import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.compat import mtf, tf
from pase_mtf.cost.memory import MemoryModel, strategy_memory
from pase_mtf.cost.unfolded import unfolded_bytes
from pase_mtf.errors import FormatError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph, Held, Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy

# Images, pixels on a side, channels, pixels of the filter on a side, channels that are made.
_CONVOLUTIONS = ((8, 14, 16, 3, 16), (4, 14, 4, 1, 16), (1, 14, 16, 3, 16), (2, 7, 64, 3, 128), (16, 28, 1, 5, 6))

_TRACED = """
import json, sys
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
found = []
for images, side, channels, taps, made in json.load(sys.stdin):
    with tf.Graph().as_default(), tf.device("CPU:0"):
        image, filters = tf.ones([images, side, side, channels]), tf.ones([taps, taps, channels, made])
        gradient = tf.ones([images, side, side, made])
        both = [tf.raw_ops.Conv2DBackpropFilter(input=image, filter_sizes=filters.shape, out_backprop=gradient,
                                                strides=[1] * 4, padding="SAME", name="filter"),
                tf.raw_ops.Conv2DBackpropInput(input_sizes=image.shape, filter=filters, out_backprop=gradient,
                                               strides=[1] * 4, padding="SAME", name="image")]
        config = tf.ConfigProto(intra_op_parallelism_threads=1, use_per_session_threads=True)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1
        with tf.Session(config=config) as session:
            metadata = tf.RunMetadata()
            session.run([made.op for made in both], None, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
        took = {node.node_name: node.memory_stats.temp_memory_size for device in metadata.step_stats.dev_stats
                for node in device.node_stats}
        found.append([took["filter"], took["image"]])
print(json.dumps(found))
"""


def _of(images, side, channels, taps, made, threads):
    each = (np.array([number]) for number in (images, taps * taps * channels, made))
    images, weights, made = each
    return int(unfolded_bytes(images, side * side, weights, made, 4, threads)[0])


@pytest.mark.slow
def test_kernels_take_what_they_say_they_do():
    """Those of oneDNN are turned off, whatever processor this runs on."""
    done = subprocess.run([sys.executable, "-c", _TRACED], input=json.dumps(_CONVOLUTIONS), text=True,
                          capture_output=True, check=True, env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"})
    traced = json.loads(done.stdout.splitlines()[-1])
    for shape, (of_filter, of_image) in zip(_CONVOLUTIONS, traced, strict=True):
        # Rounded up to what the allocator gives out.
        assert 0 <= of_filter - _of(*shape, 0) < 256, shape
        assert 0 <= of_image - _of(*shape, 1) < 256, shape
    assert traced[0][0] > 20e6 > traced[2][1] > 0


def test_they_are_in_the_memory_of_a_step():
    """Of machines whose kernels unfold."""
    graph = harness.export_model("alexnet", models.load_config("alexnet", "tiny"))
    whole = [Configuration() for _ in graph.layers]
    plain, model = MemoryModel(graph), MemoryModel(graph, unfolding_threads=1)
    rng = np.random.default_rng(0)
    gradients = {number: [operation for operation in layer.operations if operation.held
                          and operation.role in ("filter gradient", "image gradient")]
                 for number, layer in enumerate(graph.layers)}
    number, kernels = next((number, found) for number, found in gradients.items() if len(found) == 2)
    moment = kernels[0].held[0].begin
    choices = [Configuration(), *enumerate_configurations(graph.layers[number], 8)]
    more = model.layer(number, choices, moment) - plain.layer(number, choices, moment)
    assert (more > 0).all()
    image, filters = next(kernel.inputs for kernel in kernels if kernel.role == "image gradient")
    side, taps = image.shape[1], filters.shape[0]
    expected = sum(_of(image.shape[0], side, filters.shape[2], taps, filters.shape[3],
                       int(kernel.role == "image gradient"))
                   for kernel in kernels)
    assert more[0] == expected > 0
    assert model.layer(number, choices, 0) == pytest.approx(plain.layer(number, choices, 0))
    # No more than is there by all layers together; and it counts where a strategy is looked for.
    for _ in range(5):
        drawn = [each[int(rng.integers(len(each)))] for each in (enumerate_configurations(layer, 8)
                                                                 for layer in graph.layers)]
        total = sum(float(model.layer(layer, [one], moment)[0]) for layer, one in enumerate(drawn))
        assert total <= sum(model.peak(drawn)[0].values()) * (1 + 1e-12)
    held = [sum(strategy_memory(graph, whole, unfolding_threads=threads).values()) for threads in (0, 1)]
    assert held[0] <= held[1]
    machine = Machine.load("1080ti")
    found = [find_strategy(graph, 4, one, simulate=0)
             for one in (machine, dataclasses.replace(machine, unfolding_threads=1))]
    assert found[0].seconds == found[1].seconds
    assert found[0].memory_bytes <= found[1].memory_bytes


def test_a_machine_keeps_its_threads_and_refuses_fewer_than_none(tmp_path):
    machine = dataclasses.replace(Machine.load("1080ti"), unfolding_threads=2)
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    with pytest.raises(FormatError, match=r"unfolding_threads is -1, not 0 or more"):
        dataclasses.replace(machine, unfolding_threads=-1)


def test_both_gradients_of_a_convolution_unfold_at_once():
    """Though they stand at two moments, one after the other."""
    sizes = {"batch": 8, "h": 7, "w": 7, "kh": 3, "kw": 3, "in": 32, "out": 64}

    def operand(*dims):
        return Operand(dims, tuple(sizes[dim] for dim in dims))

    image, made = operand("batch", "h", "w", "in"), operand("batch", "h", "w", "out")
    filters = operand("kh", "kw", "in", "out")
    operations = tuple(
        LayerOperation(number, role, "Gradient", "backward", "convolution", 1.0, tuple(sizes), inputs, (output,),
                       role=role, held=(Held(0, number, number),))
        for number, role, inputs, output in ((1, "image gradient", (made, filters), image),
                                             (2, "filter gradient", (image, made), filters)))
    layer = Layer("convolution", "convolution", sizes, ("batch", "in", "out"), operations, ())
    graph = ComputationGraph("convolution", (layer,), (), 3)
    plain, unfolds = (sum(strategy_memory(graph, [Configuration()], unfolding_threads=threads).values())
                      for threads in (0, 1))
    assert unfolds - plain == pytest.approx(_of(8, 7, 32, 3, 64, 0) + _of(8, 7, 32, 3, 64, 1))


def test_the_gradients_of_a_transposed_convolution_unfold_what_goes_into_it():
    """That of its image is a convolution, for which nothing is unfolded."""
    def variable(name, **sizes):
        return mtf.get_variable(mesh, name, mtf.Shape([mtf.Dimension(*dim) for dim in sizes.items()]),
                                initializer=tf.zeros_initializer())

    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ends = variable("image", batch=8, h=16, w=16, inner=64), variable("filters", fh=4, fw=4, outer=32, inner=64)
        made = mtf.ops.Conv2dTransposeOperation(*ends, [1, 2, 2, 1], "SAME").outputs[0]
        for end, gradient in zip(ends, mtf.gradients([mtf.reduce_sum(mtf.square(made))], list(ends)), strict=True):
            mtf.assign_sub(end.operation, gradient)
        exported = export_graph(graph)
    (number, kernel), = [(number, operation) for number, layer in enumerate(exported.layers)
                         for operation in layer.operations if operation.role == "filter gradient"]
    held = [MemoryModel(exported, unfolding_threads=threads).layer(number, [Configuration()], kernel.held[0].begin)[0]
            for threads in (0, 1)]
    assert held[1] - held[0] == _of(8, 16, 32, 4, 64, 0)


def test_convolutions_one_after_the_other_do_not_unfold_at_once():
    """Though what they make is little beside what is there all the time."""
    image = [mtf.Dimension(*dim) for dim in (("batch", 8), ("h", 14), ("w", 14))]
    first, inner, last = (mtf.Dimension(name, 16) for name in ("first", "inner", "last"))
    deep, high, wide = (mtf.Dimension(*dim) for dim in (("deep", 4096), ("kh", 3), ("kw", 3)))
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        large = mtf.import_tf_tensor(mesh, tf.placeholder(tf.float32, [4096, 8, 14, 14, 16]),
                                     mtf.Shape([deep, *image, first]))
        ends = [mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.zeros_initializer())
                for name, dims in (("deep", [deep]), ("one", [high, wide, first, inner]),
                                   ("other", [high, wide, inner, last]))]
        x = mtf.einsum([large, ends[0]], output_shape=[*image, first])
        for filters in ends[1:]:
            x = mtf.ops.Conv2dOperation(x, filters, [1] * 4, "SAME").outputs[0]
        for end, gradient in zip(ends, mtf.gradients([mtf.reduce_sum(mtf.square(x))], ends), strict=True):
            mtf.assign_sub(end.operation, gradient)
        exported = export_graph(graph)
    plain, model = MemoryModel(exported), MemoryModel(exported, unfolding_threads=1)
    held, without = ([[float(of.layer(number, [Configuration()], moment)[0]) for number in range(len(exported.layers))]
                      for moment in range(of.moments)] for of in (model, plain))
    unfolding = [sum(map(float.__gt__, *pair)) for pair in zip(held, without, strict=True)]
    assert sum(unfolding) >= 2
    assert max(unfolding) == 1
