"""Transformer, encoder and decoder (Vaswani et al. 2017), with layer norm before each sublayer.

Departures, each for a reason: layer norm stands before a sublayer and not after it (trains without warm-up); no biases
(as in Mesh-TF's own Transformer); the embeddings of source and target and the output projection are three variables,
not one (each can be split its own way); no label smoothing. Token 0 is padding, and padding stands at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model, layers
from pase_mtf.models.blocks import block
from pase_mtf.models.dropout import dropout
from pase_mtf.models.presets import TextConfig, TransformerConfig

__all__ = ["MODEL", "features", "loss", "target_words", "words"]


def features(config: TextConfig, batch: int) -> dict[str, tuple[mtf.Shape, tf.DType]]:
    """Token ids: the source, what the decoder sees (the target moved right by one), and what it has to say."""
    batch_dim = mtf.Dimension("batch", batch)
    source = mtf.Shape([batch_dim, mtf.Dimension("length", config.length)])
    target = mtf.Shape([batch_dim, mtf.Dimension("decoder_length", config.length)])
    found = {"source": (source, tf.int32), "decoder_input": (target, tf.int32), "target": (target, tf.int32)}
    if config.dropout:
        found["step"] = (mtf.Shape([]), tf.int32)
    return found


def words(tokens: mtf.Tensor, config: TextConfig) -> mtf.Tensor:
    """1 where there is a word, 0 where there is padding: the sign of a token id."""
    return mtf.cast(mtf.sign(tokens), tf.as_dtype(config.dtype), name="words")


def target_words(features: dict[str, mtf.Tensor], config: TextConfig) -> mtf.Tensor:
    """How many words of the target count in the loss."""
    return mtf.reduce_sum(layers.widened(words(features["target"], config)))


@dataclasses.dataclass(frozen=True)
class _Dims:
    """The named dims of the whole model, and what every sublayer needs."""

    config: TransformerConfig
    step: mtf.Tensor | None
    seeds: Iterator[int]
    d_model: mtf.Dimension
    heads: mtf.Dimension
    d_k: mtf.Dimension
    d_v: mtf.Dimension
    d_ff: mtf.Dimension
    vocab: mtf.Dimension

    def drop(self, x: mtf.Tensor) -> mtf.Tensor:
        """Dropout, where the configuration wants it."""
        return dropout(x, self.config.dropout, self.step, next(self.seeds)) if self.config.dropout else x


def _positions(length: int, channels: int) -> np.ndarray:
    """Sines and cosines of geometrically spaced wavelengths, [length, channels] (Vaswani et al. 2017, 3.5)."""
    half = (channels + 1) // 2
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(half) / half)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :channels]


def _embed(tokens: mtf.Tensor, name: str, dims: _Dims) -> mtf.Tensor:
    """[batch, length] of ids -> [batch, length, d_model]."""
    with tf.variable_scope(name):
        dtype = tf.as_dtype(dims.config.dtype)
        table = layers.variable(tokens.mesh, "table", [dims.vocab, dims.d_model], dims.config,
                                stddev=dims.d_model.size ** -0.5)
        x = mtf.gather(table, tokens, dims.vocab) * math.sqrt(dims.d_model.size)
        length = tokens.shape.dims[1]
        positions = tf.constant(_positions(length.size, dims.d_model.size), dtype)
        return dims.drop(x + mtf.import_tf_tensor(
            tokens.mesh, positions, mtf.Shape([length, dims.d_model]), name="positions"))


def _as_memory(x: mtf.Tensor) -> mtf.Tensor:
    """The second dim under the name that keys and values use: a tensor cannot have one dim twice."""
    batch, length, *rest = x.shape.dims
    return mtf.reshape(x, mtf.Shape([batch, mtf.Dimension("memory_length", length.size), *rest]), name="as_memory")


def _attention(x: mtf.Tensor, memory: mtf.Tensor, visible: mtf.Tensor, name: str, dims: _Dims) -> mtf.Tensor:
    """Multi-head attention of x [batch, length, d_model] to the memory [batch, memory_length, d_model]."""
    config, mesh = dims.config, x.mesh
    batch, length, _ = x.shape.dims
    memory_length = memory.shape.dims[1]
    with tf.variable_scope(name):
        stddev = dims.d_model.size ** -0.5

        def project(y: mtf.Tensor, name: str, channels: mtf.Dimension) -> mtf.Tensor:
            weights = layers.variable(mesh, f"w_{name}", [dims.d_model, dims.heads, channels], config, stddev)
            return mtf.einsum([y, weights], name=name,
                              output_shape=mtf.Shape([*y.shape.dims[:2], dims.heads, channels]))

        query = project(x, "q", dims.d_k)
        key = project(memory, "k", dims.d_k)
        value = project(memory, "v", dims.d_v)
        logits = mtf.einsum([query, key], name="logits",
                            output_shape=mtf.Shape([batch, dims.heads, length, memory_length]))
        weights = layers.masked_softmax(logits, visible, memory_length, dims.d_k.size ** -0.5)
        mixed = mtf.einsum([weights, value], name="mix",
                           output_shape=mtf.Shape([batch, length, dims.heads, dims.d_v]))
        output = layers.variable(mesh, "w_o", [dims.heads, dims.d_v, dims.d_model], config,
                                 (dims.heads.size * dims.d_v.size) ** -0.5)
        return mtf.einsum([mixed, output], output_shape=x.shape, name="o")


def _feed_forward(x: mtf.Tensor, dims: _Dims) -> mtf.Tensor:
    with tf.variable_scope("feed_forward"):
        batch, length, _ = x.shape.dims
        w_in = layers.variable(x.mesh, "w_in", [dims.d_model, dims.d_ff], dims.config,
                               math.sqrt(2 / dims.d_model.size))
        w_out = layers.variable(x.mesh, "w_out", [dims.d_ff, dims.d_model], dims.config, dims.d_ff.size ** -0.5)
        hidden = layers.relu(mtf.einsum([x, w_in], output_shape=mtf.Shape([batch, length, dims.d_ff]), name="in"))
        return mtf.einsum([hidden, w_out], output_shape=x.shape, name="out")


def _encode(source: mtf.Tensor, visible: mtf.Tensor, dims: _Dims) -> mtf.Tensor:
    def layer(x: mtf.Tensor) -> mtf.Tensor:
        y = layers.layer_norm(x, dims.d_model, dims.config, "norm_attention")
        x = x + dims.drop(_attention(y, _as_memory(y), visible, "attention", dims))
        y = layers.layer_norm(x, dims.d_model, dims.config, "norm_feed_forward")
        return x + dims.drop(_feed_forward(y, dims))

    x = _embed(source, "source_embedding", dims)
    for number in range(1, dims.config.layers + 1):
        with tf.variable_scope(f"encoder{number}"):
            x = block(f"encoder{number}", layer, [x])
    return layers.layer_norm(x, dims.d_model, dims.config, "encoder_norm")


def _decode(tokens: mtf.Tensor, memory: mtf.Tensor, visible: mtf.Tensor, dims: _Dims) -> mtf.Tensor:
    length = tokens.shape.dims[1]
    # Position i sees what stands at or before i. Padding stands at the end, so no word ever sees it.
    memory_length = mtf.Dimension("memory_length", length.size)
    causal = mtf.greater_equal(
        mtf.range(tokens.mesh, length, tf.int32), mtf.range(tokens.mesh, memory_length, tf.int32),
        output_shape=mtf.Shape([length, memory_length]))

    def layer(x: mtf.Tensor, memory: mtf.Tensor) -> mtf.Tensor:
        y = layers.layer_norm(x, dims.d_model, dims.config, "norm_self")
        x = x + dims.drop(_attention(y, _as_memory(y), causal, "self", dims))
        y = layers.layer_norm(x, dims.d_model, dims.config, "norm_cross")
        x = x + dims.drop(_attention(y, memory, visible, "cross", dims))
        y = layers.layer_norm(x, dims.d_model, dims.config, "norm_feed_forward")
        return x + dims.drop(_feed_forward(y, dims))

    x = _embed(tokens, "target_embedding", dims)
    for number in range(1, dims.config.layers + 1):
        with tf.variable_scope(f"decoder{number}"):
            x = block(f"decoder{number}", layer, [x, memory])
    return layers.layer_norm(x, dims.d_model, dims.config, "decoder_norm")


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: TransformerConfig) -> mtf.Tensor:
    """Mean cross-entropy of the target's tokens, padding aside, in nats."""
    source, target = features["source"], features["target"]
    dims = _Dims(
        config, features.get("step"), itertools.count(config.seed * 1000),
        mtf.Dimension("d_model", config.d_model), mtf.Dimension("heads", config.heads),
        mtf.Dimension("d_k", config.d_k), mtf.Dimension("d_v", config.d_k), mtf.Dimension("d_ff", config.d_ff),
        mtf.Dimension("vocab", config.vocab))
    visible = mtf.cast(_as_memory(source), tf.bool, name="visible")
    memory = _as_memory(_encode(source, visible, dims))
    x = _decode(features["decoder_input"], memory, visible, dims)
    with tf.variable_scope("output"):
        weights = layers.variable(mesh, "weights", [dims.d_model, dims.vocab], config, dims.d_model.size ** -0.5)
        logits = mtf.einsum([x, weights], output_shape=mtf.Shape([*x.shape.dims[:2], dims.vocab]), name="logits")
    return layers.cross_entropy(logits, target, dims.vocab, words(target, config))


MODEL = Model("transformer", "parallel_text", features, loss, target_words)
