"""What a program of other people comes down to here: a graph with its training step, and what to feed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pase_mtf.compat import mtf, tf

__all__ = ["Feature", "Inputs", "Program", "gradients_and_updates"]


@dataclasses.dataclass(frozen=True)
class Feature:
    """An input of a program.

    Attributes:
      shape: of a batch.
      dtype: of the placeholder.
      below: integers are drawn from [low, below); None: normally distributed numbers.
      low: see below.
    """

    shape: tuple[int, ...]
    dtype: tf.DType = tf.int32
    below: int | None = None
    low: int = 0


class Inputs:
    """The placeholders of a program, made as it asks for them."""

    def __init__(self) -> None:
        self.features: dict[str, Feature] = {}
        self.placeholders: dict[str, tf.Tensor] = {}

    def placeholder(self, name: str, feature: Feature) -> tf.Tensor:
        """A placeholder for a whole batch."""
        self.features[name] = feature
        self.placeholders[name] = tf.placeholder(feature.dtype, feature.shape, name=name)
        return self.placeholders[name]

    def tensor(self, mesh: mtf.Mesh, name: str, shape: Sequence[mtf.Dimension], *, dtype: tf.DType = tf.int32,
               below: int | None = None, low: int = 0) -> mtf.Tensor:
        """A placeholder imported into a mesh."""
        shape = mtf.Shape(list(shape))
        feature = Feature(tuple(shape.to_integer_list), dtype, below, low)
        return mtf.import_tf_tensor(mesh, self.placeholder(name, feature), shape)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step of a program, not yet lowered. Has what `pase_mtf.launch.arms.arm.Arm` asks of a program.

    Attributes:
      name: of the program and its preset.
      graph, mesh: Mesh-TF's.
      placeholders: feature name -> what a batch is fed into; whatever the mesh, a batch is fed whole.
      features: what the batches hold.
      loss: a scalar mtf.Tensor.
      updates: the operations of a step: optimizer, running means.
      global_step: number of steps done.
    """

    name: str
    graph: mtf.Graph
    mesh: mtf.Mesh
    placeholders: Mapping[str, tf.Tensor]
    features: Mapping[str, Feature]
    loss: mtf.Tensor
    updates: list[mtf.Operation]
    global_step: Any

    @property
    def outputs(self) -> list[mtf.Tensor]:
        """What a run asks for beside the updates."""
        return [self.loss]

    def batches(self, seed: int = 1) -> Iterator[dict[str, np.ndarray]]:
        """Batches without end: feature name -> values."""
        return batches(self.features, seed)


def batches(features: Mapping[str, Feature], seed: int = 1) -> Iterator[dict[str, np.ndarray]]:
    """Random batches without end: feature name -> values."""
    rng = np.random.default_rng(seed)
    while True:
        batch = {}
        for name, feature in features.items():
            dtype = feature.dtype.as_numpy_dtype
            if feature.below is None:
                batch[name] = rng.standard_normal(feature.shape).astype(dtype)
            else:
                batch[name] = rng.integers(feature.low, feature.below, feature.shape).astype(dtype)
        yield batch


def gradients_and_updates(loss: mtf.Tensor, optimizer: mtf.optimize.Optimizer) -> list[mtf.Operation]:
    """The optimizer's operations for all trainable variables."""
    variables = loss.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    return optimizer.apply_grads(gradients, variables)
