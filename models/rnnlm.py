"""Language model of LSTM layers: embedding, recurrent stack, softmax over the vocabulary (Jozefowicz et al. 2016).

Every sequence starts from a state of zeros.
"""

from __future__ import annotations

import itertools

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model, layers
from pase_mtf.models.blocks import block
from pase_mtf.models.dropout import dropout
from pase_mtf.models.lstm import lstm_stack
from pase_mtf.models.recurrent_presets import BiglstmConfig, RnnlmConfig

__all__ = ["MODEL", "features", "language_model", "loss"]


def features(config: RnnlmConfig | BiglstmConfig, batch: int) -> dict[str, tuple[mtf.Shape, tf.DType]]:
    """Token ids: what the model reads, and what comes next at each place."""
    shape = mtf.Shape([mtf.Dimension("batch", batch), mtf.Dimension("length", config.length)])
    found = {"tokens": (shape, tf.int32), "targets": (shape, tf.int32)}
    if config.dropout:
        found["step"] = (mtf.Shape([]), tf.int32)
    return found


def language_model(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: RnnlmConfig | BiglstmConfig,
                   inputs: mtf.Dimension, projected: bool = False) -> mtf.Tensor:
    """Embedding, LSTM layers, softmax.

    Args:
      mesh: of the graph that is being built.
      features: "tokens" and "targets", [batch, length]; "step" where there is dropout.
      config: sizes.
      inputs: what a layer reads, and a word's embedding.
      projected: what a layer puts out is projected to these inputs; otherwise it is its `config.units` cells.

    Returns:
      The mean cross-entropy of the targets, in nats.
    """
    vocab, units = mtf.Dimension("vocab", config.vocab), mtf.Dimension("units", config.units)
    with tf.variable_scope("embedding"):
        table = layers.variable(mesh, "table", [vocab, inputs], config, stddev=1.0)
        x = mtf.gather(table, features["tokens"], vocab)
    seeds = itertools.count(config.seed * 1000)

    def drop(x: mtf.Tensor) -> mtf.Tensor:
        return dropout(x, config.dropout, features["step"], next(seeds)) if config.dropout else x

    with tf.variable_scope("lstm"):
        x = block("lstm", lambda x: lstm_stack(x, mtf.Dimension("layers", config.layers), units, config,
                                               projected=projected, drop=drop), [x])
    x = drop(x)
    with tf.variable_scope("output"):
        channels = x.shape.dims[-1]
        weights = layers.variable(mesh, "weights", [channels, vocab], config, stddev=channels.size ** -0.5)
        bias = layers.zeros(mesh, "bias", [vocab], config)
        logits = mtf.einsum([x, weights], output_shape=mtf.Shape([*x.shape.dims[:2], vocab]), name="logits") + bias
    return layers.cross_entropy(logits, features["targets"], vocab)


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: RnnlmConfig) -> mtf.Tensor:
    """Mean cross-entropy of the next tokens, in nats."""
    return language_model(mesh, features, config, mtf.Dimension("inputs", config.units))


MODEL = Model("rnnlm", "text", features, loss)
