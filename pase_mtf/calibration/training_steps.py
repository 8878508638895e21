"""Whole training steps of small models under several strategies: what the parts of a step do not tell (fit_steps)."""

from __future__ import annotations

import random
import time

import numpy as np

from pase_mtf.calibration.samples import Step
from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.lowering.lowering import PlanLowering, plan_from_configurations
from pase_mtf.runtime import Devices, cores, session_config

__all__ = ["STEPS", "measure_step", "strategies_to_measure"]

_RUNS, _SECONDS = 10, 0.4  # of a step, at least


def _block(x: mtf.Tensor, number: int) -> mtf.Tensor:
    """Attention and a feed-forward layer, as in a small transformer."""
    mesh, (batch, length, width) = x.mesh, x.shape.dims
    heads, channels, hidden = mtf.Dimension("heads", 8), mtf.Dimension("channels", 16), mtf.Dimension("hidden", 2048)
    memory = mtf.Dimension("memory", length.size)

    def weights(name: str, *dims: mtf.Dimension) -> mtf.Tensor:
        return mtf.get_variable(mesh, f"{name}{number}", mtf.Shape(dims),
                                initializer=tf.random_uniform_initializer(-0.1, 0.1))

    y = mtf.layers.layer_norm(x, width, name=f"norm_a{number}")
    z = mtf.rename_dimension(y, "length", "memory")
    query = mtf.einsum([y, weights("q", width, heads, channels)], output_shape=[batch, length, heads, channels])
    key, value = (mtf.einsum([z, weights(name, width, heads, channels)], output_shape=[batch, memory, heads, channels])
                  for name in "kv")
    scores = mtf.softmax(mtf.einsum([query, key], output_shape=[batch, heads, length, memory]), memory)
    seen = mtf.einsum([scores, value], output_shape=[batch, length, heads, channels])
    x += mtf.einsum([seen, weights("o", heads, channels, width)], output_shape=[batch, length, width])
    y = mtf.layers.layer_norm(x, width, name=f"norm_b{number}")
    y = mtf.relu(mtf.einsum([y, weights("in", width, hidden)], output_shape=[batch, length, hidden])
                 + weights("bias", hidden))
    return x + mtf.einsum([y, weights("out", hidden, width)], output_shape=[batch, length, width])


def _attention(mesh: mtf.Mesh, devices: int) -> mtf.Tensor:
    """The last activation of a small transformer: large matrix products, large optimizer operations."""
    shape = mtf.Shape([mtf.Dimension("batch", 2 * devices), mtf.Dimension("length", 32), mtf.Dimension("width", 128)])
    x = mtf.import_tf_tensor(mesh, tf.random.stateless_uniform(shape.to_integer_list, [1, 2]), shape)
    for number in range(2):
        x = _block(x, number)
    return x


def _unit(x: mtf.Tensor, channels: mtf.Dimension, window: int) -> mtf.Tensor:
    """A convolution, its outputs normalized over the batch, scaled and cut at zero."""
    y = mtf.layers.conv2d(x, channels, filter_size=(window, window), name=f"convolution_{channels.name}")
    y -= mtf.reduce_mean(y, output_shape=[channels])
    y *= mtf.rsqrt(mtf.reduce_mean(mtf.square(y), output_shape=[channels]) + 1e-3)
    scale, bias = (mtf.get_variable(x.mesh, f"{name}_{channels.name}", mtf.Shape([channels]),
                                    initializer=tf.ones_initializer()) for name in ("scale", "bias"))
    return mtf.relu(y * scale + bias)


def _images(mesh: mtf.Mesh, devices: int) -> mtf.Tensor:
    """The last activation of a small residual network: convolutions between many operations of little work."""
    shape = mtf.Shape([mtf.Dimension("batch", 2 * devices), mtf.Dimension("height", 14), mtf.Dimension("width", 14),
                       mtf.Dimension("channels0", 32)])
    x = mtf.import_tf_tensor(mesh, tf.random.stateless_uniform(shape.to_integer_list, [1, 2]), shape)
    for number in range(3):
        outer = mtf.Dimension(f"channels{number + 1}", 32)
        y = _unit(_unit(x, mtf.Dimension(f"inner{number}", 16), 3), outer, 1)
        x = y + mtf.rename_dimension(x, x.shape.dims[-1].name, outer.name)
    return x


def _wide(mesh: mtf.Mesh, devices: int) -> mtf.Tensor:
    """The last activation of two wide layers: weights that no cache holds, for few examples."""
    batch, width = mtf.Dimension("batch", 2 * devices), mtf.Dimension("width", 1024)
    hidden = mtf.Dimension("hidden", min(4096, 1 << (_WIDE // devices).bit_length() - 1))
    x = mtf.import_tf_tensor(mesh, tf.random.stateless_uniform([batch.size, width.size], [1, 2]),
                             mtf.Shape([batch, width]))
    first, second = (mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.random_uniform_initializer(-0.1, 0.1))
                     for name, dims in (("first", [width, hidden]), ("second", [hidden, width])))
    y = mtf.relu(mtf.einsum([x, first], output_shape=[batch, hidden]))
    return mtf.einsum([y, second], output_shape=[batch, width])


_PROGRAMS = ((_attention, mtf.optimize.AdamWeightDecayOptimizer), (_images, mtf.optimize.AdamWeightDecayOptimizer),
             (_wide, mtf.optimize.SgdOptimizer))
_STRATEGIES = 2
STEPS = _STRATEGIES * len(_PROGRAMS)
"""How many training steps can be measured: every program under so many strategies."""
_WIDE = 1 << 15  # hidden units, over all devices: their copies of the weights take 256 MiB


def _program(number: int, devices: int) -> tuple[mtf.Graph, list[mtf.Operation]]:
    """A training step, in the current tf.Graph: (graph, its updates)."""
    graph = mtf.Graph()
    build, optimizer = _PROGRAMS[number]
    loss = mtf.reduce_mean(mtf.square(build(mtf.Mesh(graph, "mesh"), devices)))
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in graph.trainable_variables])
    return graph, optimizer(1e-3).apply_grads(gradients, graph.trainable_variables)


def strategies_to_measure(graph: ComputationGraph, devices: int) -> list[tuple[Configuration, ...]]:
    """Strategies of very different steps: data parallelism, and one in which most tensors are sent.

    Args:
      graph: of `_program`.
      devices: p.
    """
    batch = tuple(Configuration((("batch" if "batch" in layer.splittable else "", devices),) if devices > 1 else ())
                  for layer in graph.layers)
    if devices == 1:
        return [batch]
    generator = random.Random(0)
    result = [batch]
    for _ in range(_STRATEGIES - 1):
        # Those that split something, where there are any: replicated work tells nothing new.
        offered = [enumerate_configurations(layer, devices, max_axes=2) for layer in graph.layers]
        splitting = [[choice for choice in choices if all(dim for dim, _ in choice.axes)] or list(choices)
                     for choices in offered]
        result.append(tuple(generator.choice(choices) for choices in splitting))
    return result


def measure_step(devices: int, kind: str, number: int) -> Step | None:
    """Measures a training step of one of the programs under one of `strategies_to_measure`.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices) or "gpu".
      number: below `STEPS`; None is returned where the program has fewer strategies.
    """
    program, number = divmod(number, _STRATEGIES)
    used = Devices.first(devices, kind)
    with tf.Graph().as_default() as tf_graph:
        graph, updates = _program(program, devices)
        exported = export_graph(graph)
        chosen = strategies_to_measure(exported, devices)
        if number >= len(chosen):
            return None
        plan = plan_from_configurations(graph, exported, chosen[number], devices)
        lowering = PlanLowering(graph, plan, list(used.names))
        step = tf.group([lowering.lowered_operation(update) for update in updates])
        initializer, fill = tf.global_variables_initializer(), lowering.copy_masters_to_slices()
        with tf.Session(graph=tf_graph, config=session_config(used)) as session:
            session.run(initializer)
            session.run(fill)
            return Step(exported, chosen[number], _wall_seconds(session, step, kind == "cpu"))


def _wall_seconds(session: tf.Session, step: tf.Operation, shared: bool) -> float:
    """Seconds of a step, the median. Between its operations cores wait for each other, which the work of the cores does
    not show; on a machine that others use as well, no more than a third of the work is taken for such waiting."""
    run, walls = session.make_callable(step), list[float]()
    run()
    begin, work = time.perf_counter(), time.process_time()
    while len(walls) < _RUNS or time.perf_counter() - begin < _SECONDS:
        started = time.perf_counter()
        run()
        walls.append(time.perf_counter() - started)
    middle = float(np.median(walls))
    if not shared:
        return middle
    return min(middle, (time.process_time() - work) / len(walls) / cores() * 4 / 3)
