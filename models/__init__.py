"""Models written with named dims: no strategy, mesh shape or device appears in them.

The registry knows the models by name and imports a model's file (and with it TensorFlow) only when it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from pase_mtf.errors import UsageError, nearest
from pase_mtf.models.presets import BATCH_STATISTICS, CONFIGS, ModelConfig, load_config, presets

if TYPE_CHECKING:
    from pase_mtf.compat import mtf, tf

__all__ = ["Model", "get", "load_config", "names", "placeholders", "presets"]

_Config = TypeVar("_Config")


@dataclasses.dataclass(frozen=True)
class Model(Generic[_Config]):
    """A model of the registry.

    Attributes:
      name: in the registry.
      data_kind: what it trains on: "images", "text", or "parallel_text" (which plain text is turned into as well).
      features: `features(config, batch)` says what a batch holds: name -> (shape with named dims, type). The scalar
        "step", where there is one, is the number of the training step (dropout draws by it).
      loss: `loss(mesh, features, config)` adds the forward pass to the graph of the mesh, given the imported features,
        and returns the scalar to minimise. Variables are made by `mtf.get_variable`.
      weight: `weight(features, config)` is the scalar that the mean in the loss divides by, where that is not the
        number of examples: the number of words. None: it is.
    """

    name: str
    data_kind: str
    features: Callable[[_Config, int], dict[str, tuple[mtf.Shape, tf.DType]]]
    loss: Callable[[mtf.Mesh, dict[str, mtf.Tensor], _Config], mtf.Tensor]
    weight: Callable[[dict[str, mtf.Tensor], _Config], mtf.Tensor] | None = None

    @property
    def batch_statistics(self) -> bool:
        """Whether an example's loss depends on the others of its batch."""
        return self.name in BATCH_STATISTICS


def names() -> list[str]:
    """Names of all models, in alphabetical order."""
    return sorted(CONFIGS)


def get(name: str) -> Model[ModelConfig]:
    """The model of that name.

    Raises:
      UsageError: there is none; offers the nearest name.
    """
    if name not in CONFIGS:
        raise UsageError(f"unknown model {name!r}; {nearest(name, CONFIGS)}")
    return importlib.import_module(f"pase_mtf.models.{name}").MODEL


def placeholders(mesh: mtf.Mesh, features: dict[str, tuple[mtf.Shape, tf.DType]],
                 ) -> tuple[dict[str, tf.Tensor], dict[str, mtf.Tensor]]:
    """A placeholder per feature, and the same imported into the mesh.

    Args:
      mesh: of the graph that is being built.
      features: what `Model.features` returns.

    Returns:
      (placeholders to feed, tensors to give to `Model.loss`), both by the name of the feature.
    """
    from pase_mtf.compat import mtf, tf  # TensorFlow takes seconds to import
    fed = {name: tf.placeholder(dtype, shape.to_integer_list, name=name) for name, (shape, dtype) in features.items()}
    imported = {name: mtf.import_tf_tensor(mesh, fed[name], shape, name=f"import_{name}")
                for name, (shape, _) in features.items()}
    return fed, imported
