"""The Mesh-TensorFlow program that every arm trains: the model, its loss, and Mesh-TF's own optimizer.

Nothing here knows of a strategy; all arms build it alike, with the same seeds, and so start from the same values.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from pase_mtf.compat import mtf, tf

__all__ = ["Program", "build_program"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step, not yet lowered.

    Attributes:
      graph, mesh: Mesh-TF's.
      placeholders: feature name -> what a batch is fed into.
      loss: a scalar mtf.Tensor.
      updates: the optimizer's operations.
      global_step: number of steps done; Adafactor's schedules read it.
    """

    graph: Any
    mesh: Any
    placeholders: dict[str, Any]
    loss: Any
    updates: list[Any]
    global_step: Any


def build_program(model: Any, config: Any, batch: int, optimizer: str, learning_rate: float | None,
                  seed: int) -> Program:
    """Builds the training step in the current tf.Graph (which must be new, so that seeds agree).

    Args:
      model: of `pase_mtf.models`.
      config: its sizes.
      batch: examples per step.
      optimizer: "sgd", "adam" or "adafactor".
      learning_rate: None: Adafactor's own schedule.
      seed: of initial values and dropout.
    """
    tf.set_random_seed(seed)
    random.seed(seed)  # Mesh-TF draws from it while lowering
    global_step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    placeholders, features = {}, {}
    for name, (shape, dtype) in model.features(config, batch).items():
        placeholders[name] = tf.placeholder(dtype, shape.to_integer_list, name=name)
        features[name] = mtf.import_tf_tensor(mesh, placeholders[name], shape)
    loss = model.loss(mesh, features, config)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    updates = _optimizer(optimizer, learning_rate).apply_grads(gradients, variables)
    return Program(graph, mesh, placeholders, loss, updates, global_step)


def _optimizer(name: str, learning_rate: float | None) -> Any:
    if name == "sgd":
        return mtf.optimize.SgdOptimizer(learning_rate)
    if name == "adam":
        return mtf.optimize.AdamWeightDecayOptimizer(learning_rate)
    return mtf.optimize.AdafactorOptimizer(learning_rate=learning_rate)
