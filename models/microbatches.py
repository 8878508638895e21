"""A batch in pieces, one after the other: gradients are summed before the optimizer sees them, so that the activations
of one piece are there at a time.

A piece (microbatch) is every K-th example, so that the examples of a device stay on it however the batch is split. A
mean over the batch counts every piece by its share of what the mean divides by: of examples, or of words where padding
does not count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.models import Model
from pase_mtf.models.checks import divisors, kept_dtype
from pase_mtf.models.presets import ModelConfig
from pase_mtf.operations.widening import widened

__all__ = ["WrittenOut", "check_microbatches", "import_features", "loss_and_gradients", "write_out"]

_T = TypeVar("_T")


def check_microbatches(model: Model[ModelConfig], batch: int, count: int) -> None:
    """Refuses pieces that would not add up to the batch.

    Args:
      model: to be trained.
      batch: examples of a step.
      count: K, into how many microbatches it is cut.

    Raises:
      UsageError: the batch does not split, or the model looks at more than one example at a time.
    """
    if count < 1 or batch % count:
        raise UsageError(f"microbatches={count}: a batch of {batch} does not split so; take "
                         f"{divisors(batch, max(count, 1))[-1]}")
    if count > 1 and model.batch_statistics:
        raise UsageError(f"microbatches={count}: {model.name} normalises over the batch, so that pieces of it are "
                         "another model; take 1")


def import_features(model: Model[ModelConfig], config: ModelConfig, mesh: mtf.Mesh, batch: int, count: int = 1,
                    ) -> tuple[dict[str, tf.Tensor], dict[str, mtf.Tensor]]:
    """A placeholder per feature of a whole batch, and the same imported into the mesh.

    Args:
      model, config: whose features.
      mesh: of the graph that is being built.
      batch: examples.
      count: K: of the number of the step, which dropout draws by, every microbatch is to have one of its own: it is
        imported as one per example.

    Returns:
      (placeholders to feed, imported tensors), both by the name of the feature.
    """
    placeholders, imported = {}, {}
    for name, (shape, dtype) in model.features(config, batch).items():
        placeholders[name] = fed = tf.placeholder(dtype, shape.to_integer_list, name=name)
        if count > 1 and not shape.dims:
            shape = mtf.Shape([_batch_dim(model, config, batch)])
            fed = fed * count + tf.range(batch, dtype=dtype) % count
        imported[name] = mtf.import_tf_tensor(mesh, fed, shape)
    return placeholders, imported


def loss_and_gradients(model: Model[ModelConfig], config: ModelConfig, mesh: mtf.Mesh, features: dict[str, mtf.Tensor],
                       batch: int, count: int = 1) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Adds a model to a graph, with its gradients: of the whole batch, computed in one go or microbatch by microbatch
    in a loop.

    Args:
      model, config: whose loss.
      mesh: of the graph that is being built.
      features: of `import_features`.
      batch: examples.
      count: K, the number of microbatches.

    Returns:
      The loss of the batch, and its gradient by every trainable variable, in their order.

    Raises:
      UsageError: of `check_microbatches`.
    """
    if count == 1:
        loss = model.loss(mesh, features, config)
        variables = mesh.graph.trainable_variables
        return loss, mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    check_microbatches(model, batch, count)
    total = None if model.weight is None else model.weight(features, config)

    def one(selected: dict[str, mtf.Tensor]) -> mtf.Tensor:
        mine = {name: tensor if model.features(config, batch)[name][0].dims else mtf.reduce_max(tensor)
                for name, tensor in selected.items()}
        loss = model.loss(mesh, mine, config)
        if total is None or model.weight is None:
            return loss * (1 / count)
        return loss * (model.weight(mine, config) / _at_least_one(total))

    return _in_turn(features, one, _batch_dim(model, config, batch), count, config)


def _in_turn(features: Mapping[str, mtf.Tensor], loss_of: Callable[[dict[str, mtf.Tensor]], mtf.Tensor],
             batch_dim: mtf.Dimension, count: int, config: ModelConfig) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """The loss and the gradients of a batch, added up in a loop over its microbatches.

    What mtf.serialize_training_step does, but for the type that gradients are added up in (`_addable`).

    Args:
      features: by name, of the whole batch.
      loss_of: the part of the loss that a microbatch with these features makes up.
      batch_dim: of the features.
      count: of microbatches.
      config: of the model.
    """
    mesh = next(iter(features.values())).mesh
    one, turns = mtf.Dimension(batch_dim.name, batch_dim.size // count), mtf.Dimension("microbatch", count)

    def turn(number: mtf.Tensor) -> list[mtf.Tensor]:
        mine = {name: mtf.gather(mtf.replace_dimensions(tensor, batch_dim, [one, turns]), number, turns)
                for name, tensor in features.items()}
        loss = loss_of(mine)
        weights = [variable.outputs[0] for variable in mesh.graph.trainable_variables]
        return [number + 1, loss, *_addable(mtf.gradients([loss], weights), config)]

    _, loss, *gradients = mtf.while_loop(lambda number: mtf.less(number, count), turn,
                                         [mtf.constant(mesh, 0, dtype=tf.int32)], has_accumulators=True)
    return loss, gradients


def _addable(gradients: Sequence[mtf.Tensor], config: ModelConfig) -> list[mtf.Tensor]:
    """Gradients of one microbatch in the type that variables are kept in: of a long sum in bfloat16 the eight bits
    would swallow what comes last."""
    return [widened(gradient, tf.as_dtype(kept_dtype(config.dtype))) for gradient in gradients]


@dataclasses.dataclass(frozen=True)
class WrittenOut:
    """A model whose microbatches stand in the graph one by one: each can be computed when and where its turn is.

    Attributes:
      placeholders: feature name -> what a whole batch is fed into.
      loss: of the batch, a scalar.
      gradients: of the batch, by every trainable variable.
      imports, forward, backward: per microbatch, its operations, those of all microbatches in the same order (variables
        aside, which the first makes).
      shares: operations that find out what a microbatch counts in the mean.
      added: per microbatch but the first, what adds its gradients to those before, an operation per trainable variable.
      losses: operations that sum up the loss.
    """

    placeholders: dict[str, tf.Tensor]
    loss: mtf.Tensor
    gradients: list[mtf.Tensor]
    imports: list[list[mtf.Operation]]
    forward: list[list[mtf.Operation]]
    backward: list[list[mtf.Operation]]
    shares: list[mtf.Operation]
    added: list[list[mtf.Operation]]
    losses: list[mtf.Operation]


def write_out(model: Model[ModelConfig], config: ModelConfig, mesh: mtf.Mesh, batch: int, count: int) -> WrittenOut:
    """Adds a model to a graph microbatch by microbatch, with its gradients.

    Args:
      model, config: whose loss.
      mesh: of the graph that is being built.
      batch: examples of all microbatches together.
      count: K, the number of microbatches.

    Raises:
      UsageError: of `check_microbatches`.
    """
    check_microbatches(model, batch, count)
    made = _Made(mesh.graph)
    placeholders = {name: tf.placeholder(dtype, shape.to_integer_list, name=name)
                    for name, (shape, dtype) in model.features(config, batch).items()}
    imports, features = _apart([made.by(functools.partial(
        _one_imported, model, config, mesh, placeholders, batch, count, number)) for number in range(count)])
    shares, parts = made.by(functools.partial(_shares, model, config, mesh, features))
    forward, losses = _apart([made.by(functools.partial(model.loss, mesh, mine, config)) for mine in features])
    backward, gradients = _apart([made.by(functools.partial(_gradients, config, *of_one))
                                  for of_one in zip(losses, parts, forward, strict=True)])
    added, total = [], list(gradients[0])
    for more in gradients[1:]:
        operations, total = made.by(functools.partial(_added, total, more))
        added.append(operations)
    summing, loss = made.by(functools.partial(_weighted, losses, parts))
    return WrittenOut(placeholders, loss, total, imports, forward, backward, shares, added, summing)


class _Made:
    """Which operations of a graph functions make."""

    def __init__(self, graph: mtf.Graph) -> None:
        self._graph = graph

    def by(self, function: Callable[[], _T]) -> tuple[list[mtf.Operation], _T]:
        """The operations that a function makes, and what it returns."""
        before = len(self._graph.operations)
        result = function()
        return self._graph.operations[before:], result


def _apart(pairs: Sequence[tuple[list[mtf.Operation], _T]]) -> tuple[list[list[mtf.Operation]], list[_T]]:
    """The first of all pairs, and the second."""
    return [operations for operations, _ in pairs], [result for _, result in pairs]


def _gradients(config: ModelConfig, loss: mtf.Tensor, part: mtf.Tensor,
               forward: list[mtf.Operation]) -> list[mtf.Tensor]:
    """Of a microbatch's part of the loss, by all trainable variables."""
    weights = [variable.outputs[0] for variable in loss.graph.trainable_variables]
    return _addable(mtf.gradients([loss], weights, [mtf.cast(part, loss.dtype)], forward), config)


def _added(total: Sequence[mtf.Tensor], more: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
    return [one + other for one, other in zip(total, more, strict=True)]


def _weighted(losses: Sequence[mtf.Tensor], parts: Sequence[mtf.Tensor]) -> mtf.Tensor:
    return mtf.add_n([loss * part for loss, part in zip(losses, parts, strict=True)])


def _one_imported(model: Model[ModelConfig], config: ModelConfig, mesh: mtf.Mesh, placeholders: dict[str, tf.Tensor],
                  batch: int, count: int, number: int) -> dict[str, mtf.Tensor]:
    """The features of one microbatch."""
    found = {}
    for name, (shape, _) in model.features(config, batch // count).items():
        fed = placeholders[name]
        if shape.dims:
            fed = tf.reshape(fed, [shape.dims[0].size, count, *shape.to_integer_list[1:]])[:, number]
        else:
            fed = fed * count + number
        found[name] = mtf.import_tf_tensor(mesh, fed, shape)
    return found


def _shares(model: Model[ModelConfig], config: ModelConfig, mesh: mtf.Mesh, features: Sequence[dict[str, mtf.Tensor]],
            ) -> list[mtf.Tensor]:
    """What every microbatch counts in the mean, scalars."""
    if model.weight is None:
        return [mtf.constant(mesh, 1 / len(features), dtype=tf.as_dtype(kept_dtype(config.dtype)))] * len(features)
    weights = [model.weight(mine, config) for mine in features]
    total = _at_least_one(mtf.add_n(weights))
    return [weight / total for weight in weights]


def _batch_dim(model: Model[ModelConfig], config: ModelConfig, batch: int) -> mtf.Dimension:
    return next(shape.dims[0] for shape, _ in model.features(config, batch).values() if shape.dims)


def _at_least_one(total: mtf.Tensor) -> mtf.Tensor:
    """Where nothing counts every loss is 0, and stays so."""
    return mtf.maximum(total, mtf.constant(total.mesh, 1.0, dtype=total.dtype))
