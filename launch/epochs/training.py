"""Training with batches of any size on one device: the gradients of the pieces of a batch are summed before the
optimizer sees them, so that memory stays that of one piece. A piece counts by what the mean in its loss divides by, as
a microbatch does (`models.microbatches`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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
class _Piece:
    """What examples are fed into, and what comes of them: what they count by, and their mean loss times that."""

    features: dict[str, tf.Tensor]
    weight: tf.Tensor
    loss: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Step:
    """A lowered program: a piece and its gradients, times its weight, a piece that is only looked at, what fills none,
    and the update that sums of gradients are fed into."""

    piece: _Piece
    looked: _Piece
    rest: _Piece | None
    gradients: list[tf.Tensor]
    rate: tf.Tensor
    sums: list[tf.Tensor]
    update: tf.Operation
    start: tf.Operation


class Trainer:
    """A model whose batch is one or more pieces. A context: on its end the session is closed."""

    def __init__(self, model: Model[ModelConfig], config: ModelConfig, piece: int, seed: int, threads: int = 1, *,
                 looked: int | None = None, rest: int = 0):
        """Builds and lowers the program for one device, and sets the initial values.

        Args:
          model: whose loss is minimised.
          config: its sizes, and its optimizer ("sgd" or "adam").
          piece: examples whose gradients are computed at once.
          seed: of the initial values.
          threads: that TensorFlow computes with.
          looked: examples of a piece whose loss is asked for; None: as many as of the others.
          rest: examples that fill no such piece, whose loss is asked for; 0: there are none.
        """
        with tf.Graph().as_default() as graph:
            tf.set_random_seed(seed)
            self._step = _lowered(model, dataclasses.replace(config, seed=seed), piece, looked or piece, rest)
        graph.finalize()
        self._session = tf.Session(graph=graph, config=tf.ConfigProto(
            device_count={"GPU": 0}, intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads))
        self._run(self._step.start)

    def step(self, pieces: Iterator[Batch], count: int, rate: float) -> float:
        """One step of the optimizer; returns the mean loss of its batch, in nats.

        Args:
          pieces: of which the batch takes the next.
          count: how many make a batch.
          rate: the learning rate.
        """
        step = self._step
        taken = ((step.piece, piece) for piece in itertools.islice(pieces, count))
        loss, *gradients = self._mean(taken, step.gradients)
        self._run(step.update, {**dict(zip(step.sums, gradients, strict=True)), step.rate: rate})
        return float(loss)

    def loss(self, pieces: Iterable[Batch], rest: Batch | None = None) -> float:
        """The mean loss over these examples, in nats; nothing is learned from them.

        Args:
          pieces: of them.
          rest: those that fill no piece, as many as were announced; None: there are none.
        """
        step = self._step
        fed = [(step.looked, piece) for piece in pieces]
        if rest is not None:
            assert step.rest is not None
            fed.append((step.rest, rest))
        return float(self._mean(fed)[0])

    def _mean(self, fed: Iterable[tuple[_Piece, Batch]], fetched: Sequence[tf.Tensor] = ()) -> list[np.ndarray]:
        """The mean loss, and the mean of what else is weighed."""
        runs = (self._run([piece.weight, piece.loss, *fetched], {
            piece.features[name]: values for name, values in examples.items()}) for piece, examples in fed)
        weight, *total = functools.reduce(lambda before, found: [
            mine + more for mine, more in zip(before, found, strict=True)], runs)
        return [values / (weight or 1.0) for values in total]  # where nothing counts all are 0, and stay so

    def _run(self, fetches: Any, feed: Mapping[tf.Tensor, Any] | None = None) -> Any:
        """Runs the graph (MemoryError: there is too little memory, of which TensorFlow has an error of its own)."""
        try:
            return self._session.run(fetches, feed)
        except tf.errors.ResourceExhaustedError as error:
            raise MemoryError(str(error).partition("\n")[0]) from error

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *unused: object) -> None:
        self._session.close()


def _fed(mesh: mtf.Mesh, name: str, shape: mtf.Shape, dtype: tf.DType) -> tuple[tf.Tensor, mtf.Tensor]:
    placeholder = tf.placeholder(dtype, shape.to_integer_list, name=name)
    return placeholder, mtf.import_tf_tensor(mesh, placeholder, shape)


def _forward(mesh: mtf.Mesh, model: Model[ModelConfig], config: ModelConfig, examples: int, piece: int,
             ) -> tuple[dict[str, tf.Tensor], mtf.Tensor, mtf.Tensor]:
    """(what so many examples are fed into, what they count by, their mean loss): of a piece, or of what fills none."""
    features = {name: _fed(mesh, name, *kind) for name, kind in model.features(config, examples).items()}
    given = {name: imported for name, (_, imported) in features.items()}
    loss = model.loss(mesh, given, config)
    weight = mtf.constant(mesh, examples / piece, dtype=loss.dtype) if model.weight is None else mtf.cast(
        model.weight(given, config), loss.dtype)
    return {name: placeholder for name, (placeholder, _) in features.items()}, weight, loss


def _lowered(model: Model[ModelConfig], config: ModelConfig, piece: int, looked: int, rest: int) -> _Step:
    """The program in the current tf.Graph."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer([_DEVICE]))
    features, weight, loss = _forward(mesh, model, config, piece, piece)
    variables = graph.trainable_variables
    # Added up over many pieces: in the type that variables are kept in.
    gradients = [mtf.cast(gradient, tf.as_dtype(kept_dtype(config.dtype))) for gradient in mtf.gradients(
        [loss], [variable.outputs[0] for variable in variables], [weight])]
    more = [looked] * (looked != piece) + [rest] * (rest > 0)
    parts = [(features, weight, loss), *(_forward(mesh, model, config, examples, piece) for examples in more)]
    parts = [(fed, mine, mine * mean) for fed, mine, mean in parts]
    # Mesh-TF's Adam computes in float32, its SGD multiplies gradients by the rate.
    of_rate = gradients[0].dtype if config.optimizer == "sgd" else tf.float32
    rate, imported_rate = _fed(mesh, "rate", mtf.Shape([]), of_rate)
    sums = [_fed(mesh, f"sum{number}", gradient.shape, gradient.dtype) for number, gradient in enumerate(gradients)]
    updates = _OPTIMIZERS[config.optimizer](imported_rate).apply_grads([imported for _, imported in sums], variables)
    # Ours and not mtf.Lowering: variables are read once a step, and updates follow that read.
    lowering = PlanLowering(graph, uniform_plan(graph, "all:1", "", [_DEVICE]), [_DEVICE])
    export = lowering.export_to_tf_tensor
    pieces = [_Piece(fed, export(mine), export(weighed)) for fed, mine, weighed in parts]
    update = tf.group([lowering.lowered_operation(operation) for operation in updates])
    initialize = tf.global_variables_initializer()
    with tf.control_dependencies([initialize]):
        start = lowering.copy_masters_to_slices()
    return _Step(pieces[0], pieces[looked != piece], pieces[-1] if rest else None, list(map(export, gradients)), rate,
                 [placeholder for placeholder, _ in sums], update, tf.group(initialize, start))
