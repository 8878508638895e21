"""A batch in pieces, one after the other: gradients are summed before the optimizer sees them, so that the activations
of one piece are there at a time.

A piece (microbatch) is every K-th example, so that the examples of a device stay on it however the batch is split. A
mean over the batch counts every piece by its share of what the mean divides by: of examples, or of words where padding
does not count.
"""

from __future__ import annotations

from typing import Any

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.models import Model
from pase_mtf.models.presets import ModelConfig

__all__ = ["check_microbatches", "import_features", "loss_and_gradients"]


def check_microbatches(model: Model[Any], batch: int, count: int) -> None:
    """Refuses pieces that would not add up to the batch.

    Args:
      model: to be trained.
      batch: examples of a step.
      count: K, into how many microbatches it is cut.

    Raises:
      UsageError: the batch does not split, or the model looks at more than one example at a time.
    """
    if count < 1 or batch % count:
        near = max(divisor for divisor in range(1, min(max(count, 1), batch) + 1) if batch % divisor == 0)
        raise UsageError(f"microbatches={count}: a batch of {batch} does not split so; take {near}")
    if count > 1 and model.batch_statistics:
        raise UsageError(f"microbatches={count}: {model.name} normalises over the batch, so that pieces of it are "
                         "another model; take 1")


def import_features(model: Model[Any], config: ModelConfig, mesh: mtf.Mesh, batch: int, count: int = 1,
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


def loss_and_gradients(model: Model[Any], config: ModelConfig, mesh: mtf.Mesh, features: dict[str, mtf.Tensor],
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

    def one(selected: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        mine = {name: tensor if model.features(config, batch)[name][0].dims else mtf.reduce_max(tensor)
                for name, tensor in selected.items()}
        loss = model.loss(mesh, mine, config)
        if total is None or model.weight is None:
            return {"loss": loss * (1 / count)}
        return {"loss": loss * (model.weight(mine, config) / _at_least_one(total))}

    gradients, outputs = mtf.serialize_training_step(features, one, _batch_dim(model, config, batch), count)
    return outputs["loss"], gradients


def _batch_dim(model: Model[Any], config: ModelConfig, batch: int) -> mtf.Dimension:
    return next(shape.dims[0] for shape, _ in model.features(config, batch).values() if shape.dims)


def _at_least_one(total: mtf.Tensor) -> mtf.Tensor:
    """Where nothing counts every loss is 0, and stays so."""
    return mtf.maximum(total, mtf.constant(total.mesh, 1.0, dtype=total.dtype))
