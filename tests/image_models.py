"""The networks of convolutions: loss and gradients, beside a plain TensorFlow formulation and under strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from nets import device_names, session

from pase_mtf import models
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.strategies import random_configurations
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

DEVICES = 8
KINDS = ("data_parallel", "expert", "exact", "random0", "random3")


def find(kind: str, graph: ComputationGraph) -> Strategy:
    """The strategy of that kind for 8 devices."""
    machine = Machine.load("2080ti")
    if kind.startswith("random"):
        drawn = random_configurations(graph, DEVICES, int(kind.removeprefix("random")), seed=5)
        return evaluate_strategy(graph, drawn, DEVICES, machine)
    return find_strategy(graph, DEVICES, machine, kind)


def program(name: str, config: Any) -> tuple[dict[str, tf.Tensor], mtf.Mesh, mtf.Tensor, list[mtf.Tensor]]:
    """Placeholders, mesh, loss and gradients of a training step, in the current tf.Graph."""
    model = models.get(name)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    fed, features = models.placeholders(mesh, model.features(config, config.batch))
    loss = model.loss(mesh, features, config)
    variables = mesh.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    mtf.optimize.SgdOptimizer(config.learning_rate).apply_grads(gradients, variables)
    return fed, mesh, loss, gradients


def export(name: str, config: Any) -> ComputationGraph:
    """The computation graph of a training step."""
    with tf.Graph().as_default():
        return export_graph(program(name, config)[1].graph, name=name)


def parameters(name: str, config: Any) -> int:
    """How many trainable numbers the model has."""
    with tf.Graph().as_default():
        return sum(variable.size for variable in program(name, config)[1].graph.trainable_variables)


def values(name: str, config: Any, kind: str | tuple[str, str] = ("one:1", ""), reference: Callable | None = None,
           ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loss and gradients by the name of the variable, of random parameters: zeros and ones would hide what they touch.

    Args:
      name: of the model.
      config: its sizes.
      kind: of the strategy, for our lowering on 8 devices; or mesh shape and layout for Mesh-TF's own.
      reference: `reference(features, parameters, config)`, the loss in plain TensorFlow.

    Returns:
      (those of the model, those of the reference).
    """
    with tf.Graph().as_default():
        fed, mesh, loss, gradients = program(name, config)
        masters = {variable.name: variable.get_master() for variable in mesh.graph.trainable_variables}
        if isinstance(kind, tuple):
            lowering = mtf.Lowering(mesh.graph, {mesh: placement_mesh_impl.PlacementMeshImpl(
                *kind, device_names(mtf.convert_to_shape(kind[0]).size))}, autostack=False)
        else:
            lowering = lower(mesh.graph, find(kind, export_graph(mesh.graph)), device_names(DEVICES))
        generator = np.random.default_rng(1)
        assigned = [master.assign(generator.normal(0.1, 0.3, master.shape)) for master in masters.values()]
        found = dict(zip(["loss", *masters], map(lowering.export_to_tf_tensor, (loss, *gradients)), strict=True))
        wanted = {}
        if reference is not None:
            value = reference(fed, masters, config)
            wanted = dict(zip(["loss", *masters], [value, *tf.gradients(value, list(masters.values()))], strict=True))
        feed = {fed["images"]: generator.standard_normal(fed["images"].shape),
                fed["labels"]: generator.integers(config.classes, size=config.batch)}
        if "step" in fed:
            feed[fed["step"]] = 3
        with session(DEVICES) as run:
            run.run(tf.global_variables_initializer())
            run.run(assigned)
            run.run(lowering.copy_masters_to_slices())
            return run.run([found, wanted], feed)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Asserts that two results of `values` agree to double precision and say something."""
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        largest = np.abs(theirs).max()
        assert largest > 1e-6, f"{name}: the gradient is zero, which shows nothing"
        np.testing.assert_allclose(found[name], theirs, rtol=1e-7, atol=1e-9 * largest, err_msg=name)


def convolution(x: tf.Tensor, filters: tf.Tensor, stride: int = 1, padding: str = "SAME") -> tf.Tensor:
    """In plain TensorFlow."""
    return tf.nn.conv2d(x, filters, stride, padding)


def normalization(x: tf.Tensor, parameters: dict[str, tf.Tensor], name: str, epsilon: float = 1e-5) -> tf.Tensor:
    """Batch normalisation in plain TensorFlow, with the parameters `name`/scale and `name`/offset."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(
        x, mean, variance, parameters[f"{name}/offset"], parameters[f"{name}/scale"], epsilon)


def classification(x: tf.Tensor, parameters: dict[str, tf.Tensor], labels: tf.Tensor,
                   scope: str = "classifier") -> tf.Tensor:
    """The end of the networks in plain TensorFlow: mean over the image, logits, mean cross-entropy."""
    logits = tf.reduce_mean(x, [1, 2]) @ parameters[f"{scope}/weights"] + parameters[f"{scope}/bias"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels))
