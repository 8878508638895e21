"""Training with batches of any size on one device: the gradients of the pieces of a batch are summed before the
optimizer sees them, so that memory stays that of one piece. A piece counts by what the mean in its loss divides by, as
a microbatch does (`models.microbatches`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pase_mtf.compat import mtf, tf
from pase_mtf.launch.data import Batch
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import uniform_plan
from pase_mtf.models import Model
from pase_mtf.models.checks import kept_dtype
from pase_mtf.models.presets import ModelConfig

__all__ = ["Trainer"]

_DEVICE = "/device:CPU:0"
_OPTIMIZERS = {"sgd": mtf.optimize.SgdOptimizer, "adam": mtf.optimize.AdamWeightDecayOptimizer}


@dataclasses.dataclass(frozen=True)
class _Step:
    """A lowered program: what a piece is fed into and what comes of it, and the update that sums are fed into. The loss
    of a piece and its gradients are times its weight."""

    features: dict[str, tf.Tensor]
    weight: tf.Tensor
    loss: tf.Tensor
    gradients: list[tf.Tensor]
    rate: tf.Tensor
    sums: list[tf.Tensor]
    update: tf.Operation
    start: tf.Operation


class Trainer:
    """A model whose batch is one or more pieces. A context: on its end the session is closed."""

    def __init__(self, model: Model[ModelConfig], config: ModelConfig, piece: int, seed: int, threads: int = 1):
        """Builds and lowers the program for one device, and sets the initial values.

        Args:
          model: whose loss is minimised.
          config: its sizes, and its optimizer ("sgd" or "adam").
          piece: examples whose gradients are computed at once.
          seed: of the initial values.
          threads: that TensorFlow computes with.
        """
        with tf.Graph().as_default() as graph:
            tf.set_random_seed(seed)
            self._step = _lowered(model, dataclasses.replace(config, seed=seed), piece)
        graph.finalize()
        self._session = tf.Session(graph=graph, config=tf.ConfigProto(
            device_count={"GPU": 0}, intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads))
        self._session.run(self._step.start)

    def step(self, pieces: Iterator[Batch], count: int, rate: float) -> float:
        """One step of the optimizer; returns the mean loss of its batch, in nats.

        Args:
          pieces: of which the batch takes the next.
          count: how many make a batch.
          rate: the learning rate.
        """
        loss, *gradients = self._mean(itertools.islice(pieces, count), [self._step.loss, *self._step.gradients])
        self._session.run(self._step.update, {**dict(zip(self._step.sums, gradients, strict=True)),
                                              self._step.rate: rate})
        return float(loss)

    def loss(self, pieces: Iterable[Batch]) -> float:
        """The mean loss over these pieces, in nats; nothing is learned from them."""
        return float(self._mean(pieces, [self._step.loss])[0])

    def _mean(self, pieces: Iterable[Batch], fetched: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """The mean over pieces of what is weighed."""
        runs = (self._session.run([self._step.weight, *fetched], {
            self._step.features[name]: values for name, values in piece.items()}) for piece in pieces)
        weight, *total = functools.reduce(lambda before, found: [
            mine + more for mine, more in zip(before, found, strict=True)], runs)
        return [values / max(weight, 1.0) for values in total]

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *unused: object) -> None:
        self._session.close()


def _lowered(model: Model[ModelConfig], config: ModelConfig, piece: int) -> _Step:
    """The program in the current tf.Graph."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer([_DEVICE]))

    def fed(name: str, shape: mtf.Shape, dtype: tf.DType) -> tuple[tf.Tensor, mtf.Tensor]:
        placeholder = tf.placeholder(dtype, shape.to_integer_list, name=name)
        return placeholder, mtf.import_tf_tensor(mesh, placeholder, shape)

    features = {name: fed(name, shape, dtype) for name, (shape, dtype) in model.features(config, piece).items()}
    given = {name: imported for name, (_, imported) in features.items()}
    loss, variables = model.loss(mesh, given, config), graph.trainable_variables
    weight = mtf.constant(mesh, 1.0, dtype=loss.dtype) if model.weight is None else mtf.cast(
        model.weight(given, config), loss.dtype)
    # Added up over many pieces: in the type that variables are kept in.
    gradients = [mtf.cast(gradient, tf.as_dtype(kept_dtype(config.dtype))) for gradient in mtf.gradients(
        [loss], [variable.outputs[0] for variable in variables], [weight])]
    weighed = [weight, loss * weight, *gradients]
    # Mesh-TF's Adam computes in float32, its SGD multiplies gradients by the rate.
    rate, imported_rate = fed("rate", mtf.Shape([]), gradients[0].dtype if config.optimizer == "sgd" else tf.float32)
    sums = [fed(f"sum{number}", gradient.shape, gradient.dtype) for number, gradient in enumerate(gradients)]
    updates = _OPTIMIZERS[config.optimizer](imported_rate).apply_grads([imported for _, imported in sums], variables)
    # Ours and not mtf.Lowering: variables are read once a step, and updates follow that read.
    lowering = PlanLowering(graph, uniform_plan(graph, "all:1", "", [_DEVICE]), [_DEVICE])
    exported = [lowering.export_to_tf_tensor(tensor) for tensor in weighed]
    update = tf.group([lowering.lowered_operation(operation) for operation in updates])
    initialize = tf.global_variables_initializer()
    with tf.control_dependencies([initialize]):
        start = lowering.copy_masters_to_slices()
    return _Step({name: placeholder for name, (placeholder, _) in features.items()}, exported[0], exported[1],
                 exported[2:], rate, [placeholder for placeholder, _ in sums], update, tf.group(initialize, start))
