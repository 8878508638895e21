"""Whole training steps of a small model under several strategies: what the parts of a step do not tell.

In a step the operands of an operation lie further away than where the same operation runs over and over again, and a
block that is handed from device to device wakes another thread and leaves the caches behind. What an operation and
what a handed block cost besides their work is therefore fitted to steps that are made, some of few handed blocks and
some of many.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from pase_mtf.compat import mtf, tf
from pase_mtf.configurations import Configuration, enumerate_configurations
from pase_mtf.cost.build import price_strategy
from pase_mtf.export import export_graph
from pase_mtf.graph import ComputationGraph
from pase_mtf.lowering import PlanLowering, plan_from_configurations
from pase_mtf.machine import Machine
from pase_mtf.sampling import seconds_of, session_config

__all__ = ["Step", "fit_steps", "measure_step", "strategies_to_measure"]

_PRICE_ERROR = 0.1  # how far the price of a step may be off, relatively, for other reasons than latency
_LATENCY = 5e-6  # seconds: about what handing over a block takes beyond its parts


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that was measured: what was trained, how it was split, and how long it took."""

    graph: ComputationGraph
    configurations: tuple[Configuration, ...]
    seconds: float


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


def _program(devices: int) -> tuple[mtf.Graph, list[mtf.Operation]]:
    """A training step with many operations, in the current tf.Graph: (graph, its updates)."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([mtf.Dimension("batch", 2 * devices), mtf.Dimension("length", 32), mtf.Dimension("width", 128)])
    x = mtf.import_tf_tensor(mesh, tf.random.stateless_uniform(shape.to_integer_list, [1, 2]), shape)
    for number in range(2):
        x = _block(x, number)
    loss = mtf.reduce_mean(mtf.square(x))
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in graph.trainable_variables])
    return graph, mtf.optimize.AdamWeightDecayOptimizer(1e-3).apply_grads(gradients, graph.trainable_variables)


def strategies_to_measure(graph: ComputationGraph, devices: int) -> list[tuple[Configuration, ...]]:
    """Strategies of very different steps: data parallelism, and two in which most tensors change hands.

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
    for _ in range(2):
        # Those that split something, where there are any: replicated work tells nothing new.
        offered = [enumerate_configurations(layer, devices, max_axes=2) for layer in graph.layers]
        splitting = [[choice for choice in choices if all(dim for dim, _ in choice.axes)] or list(choices)
                     for choices in offered]
        result.append(tuple(generator.choice(choices) for choices in splitting))
    return result


def measure_step(devices: int, kind: str, number: int) -> Step | None:
    """Measures a training step under one of `strategies_to_measure`.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices) or "gpu".
      number: of the strategy; None is returned where there are fewer.
    """
    names = [f"/device:{kind.upper()}:{number}" for number in range(devices)]
    with tf.Graph().as_default() as tf_graph:
        graph, updates = _program(devices)
        exported = export_graph(graph)
        chosen = strategies_to_measure(exported, devices)
        if number >= len(chosen):
            return None
        lowering = PlanLowering(graph, plan_from_configurations(graph, exported, chosen[number], devices), names)
        step = tf.group([lowering.lowered_operation(update) for update in updates])
        initializer, fill = tf.global_variables_initializer(), lowering.copy_masters_to_slices()
        with tf.Session(graph=tf_graph, config=session_config(devices, kind)) as session:
            session.run(initializer)
            session.run(fill)
            return Step(exported, chosen[number], _wall_seconds(session, step, kind == "cpu"))


def _wall_seconds(session: tf.Session, step: tf.Operation, shared: bool) -> float:
    """Seconds of a step. Between its operations cores wait for each other, which the work of the cores does not show;
    on a machine that others use as well, no more than a third of the work is taken for such waiting."""
    least = seconds_of(session, step, False)
    return min(least, seconds_of(session, step, True) * 4 / 3) if shared else least


def fit_steps(machine: Machine, devices: int, steps: Sequence[Step]) -> Machine:
    """The machine, with the overhead per operation and the latency of a link that explain whole steps best.

    Args:
      machine: fitted to parts of steps; its latency is the least that a message takes.
      devices: how many took part.
      steps: that were measured, the one with the fewest handed blocks first.
    """
    def at(overhead: float, latency: float) -> Machine:
        links = tuple(dataclasses.replace(link, latency=link.latency + latency) for link in machine.links)
        return dataclasses.replace(machine, overhead=overhead, links=links)

    def price(step: Step, overhead: float, latency: float) -> float:
        return price_strategy(step.graph, at(overhead, latency), devices, step.configurations).total

    # The price is linear in both; 1 us stays well within what floating point tells apart.
    small = 1e-6
    # In the first step next to nothing is handed over: what it takes beyond its parts is overhead.
    known = price(steps[0], 0.0, 0.0)
    overhead = max((steps[0].seconds - known) * small / (price(steps[0], small, 0.0) - known), 1e-7)
    # The others then tell what handing over takes: least squares of relative errors, and of a latency that is no more
    # than a few microseconds. Where little is handed over (between two devices, say), what a step takes beyond its
    # price has other reasons; taken for latency, it made searches avoid all-reduces that cost next to nothing.
    latency = 0.0
    if len(steps) > 1:
        seconds = np.array([step.seconds for step in steps[1:]])
        known = np.array([price(step, overhead, 0.0) for step in steps[1:]])
        each = np.array([price(step, overhead, small) for step in steps[1:]]) - known
        column, wanted = each / small / seconds, (seconds - known) / seconds
        latency = max(float(column @ wanted) / float(column @ column + (_PRICE_ERROR / _LATENCY) ** 2), 0.0)
    return at(overhead, latency)
