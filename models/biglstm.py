"""The largest language model of Jozefowicz et al. 2016: LSTM layers with a projection, softmax over the vocabulary.

A layer of 8192 cells puts out 1024 channels, which the next layer and its own next step read. The softmax is the full
one. Every sequence starts from a state of zeros. (The original reads words by their characters.)
"""

from __future__ import annotations

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model, rnnlm
from pase_mtf.models.recurrent_presets import BiglstmConfig

__all__ = ["MODEL", "features", "loss"]


def features(config: BiglstmConfig, batch: int) -> dict[str, tuple[mtf.Shape, tf.DType]]:
    """Token ids: what the model reads, and what comes next at each place."""
    return rnnlm.features(config, batch)


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: BiglstmConfig) -> mtf.Tensor:
    """Mean cross-entropy of the next tokens, in nats."""
    return rnnlm.language_model(mesh, features, config, mtf.Dimension("inputs", config.projection), projected=True)


MODEL = Model("biglstm", "text", features, loss)
