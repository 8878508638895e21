"""One function of Mesh-TF tensors, its values and gradients under any lowering, beside the same in plain TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from nets import device_names, random_plan, session

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.lowering.lowering import PlanLowering

DEVICES = 8


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
        loss = mtf.reduce_sum(output * weights)
        gradients = mtf.gradients([loss], list(tensors.values()))
        if plan_seed is None:
            devices = device_names(mtf.convert_to_shape(mesh_shape).size)
            lowering = mtf.Lowering(mesh.graph, {mesh: placement_mesh_impl.PlacementMeshImpl(
                mesh_shape, layout, devices)}, autostack=False)
        else:
            lowering = PlanLowering(mesh.graph, random_plan(mesh.graph, DEVICES, plan_seed), device_names(DEVICES))
        wanted = [lowering.export_to_tf_tensor(tensor) for tensor in (output, *gradients)]
        with session(DEVICES) as run:
            return run.run(wanted)


def plain_values(function: Callable, inputs: Mapping[str, tuple[Sequence[mtf.Dimension], np.ndarray]],
                 ) -> list[np.ndarray]:
    """What `mesh_values` returns, of a function of TensorFlow tensors."""
    with tf.Graph().as_default():
        tensors = {name: tf.constant(value) for name, (_, value) in inputs.items()}
        output = function(**tensors)
        loss = tf.reduce_sum(output * _weights(output.shape.as_list(), output.dtype))
        with session(DEVICES) as run:
            return run.run([output, *tf.gradients(loss, list(tensors.values()))])


def _weights(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Of the sum: with all ones, an error in a gradient might add up to nothing."""
    return tf.constant(np.random.default_rng(9).standard_normal(shape), dtype)
