"""One function of Mesh-TF tensors, its values and gradients under any lowering, beside the same in plain TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from harness import DEVICES, device_names, evaluate, session, stock_lowering
from nets import random_plan

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering.lowering import PlanLowering


def mesh_values(function: Callable, inputs: Mapping[str, tuple[Sequence[mtf.Dimension], np.ndarray]],
                mesh_shape: str = "one:1", layout: str = "", plan_seed: int | None = None) -> list[np.ndarray]:
    """The function's output, and the gradient of a weighted sum of it for every input.

    Args:
      function: takes the inputs by name as Mesh-TF tensors, returns one.
      inputs: name -> (dims, value).
      mesh_shape, layout: of Mesh-TF's own lowering.
      plan_seed: instead of these, our lowering with a random mesh and layout for every operation.
    """
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        tensors = {name: mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape(list(dims)))
                   for name, (dims, value) in inputs.items()}
        output = function(**tensors)
        weights = mtf.import_tf_tensor(mesh, _weights(output.shape.to_integer_list, output.dtype), output.shape)
        gradients = mtf.gradients([mtf.reduce_sum(output * weights)], list(tensors.values()))
        if plan_seed is None:
            lowering = stock_lowering(mesh, mesh_shape, layout)
        else:
            lowering = PlanLowering(mesh.graph, random_plan(mesh.graph, DEVICES, plan_seed), device_names())
        return evaluate(lowering, [output, *gradients])


def plain_values(function: Callable, inputs: Mapping[str, tuple[Sequence[mtf.Dimension], np.ndarray]],
                 ) -> list[np.ndarray]:
    """What `mesh_values` returns, of a function of TensorFlow tensors."""
    with tf.Graph().as_default():
        tensors = {name: tf.constant(value) for name, (_, value) in inputs.items()}
        output = function(**tensors)
        loss = tf.reduce_sum(output * _weights(output.shape.as_list(), output.dtype))
        with session() as run:
            return run.run([output, *tf.gradients(loss, list(tensors.values()))])


def _weights(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Of the sum: with all ones, an error in a gradient might add up to nothing."""
    return tf.constant(np.random.default_rng(9).standard_normal(shape), dtype)
