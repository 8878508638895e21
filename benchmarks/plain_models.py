"""AlexNet and the Transformer as people write them for TensorFlow 2: in Keras, with the variables of ours, and no more.

For tf.distribute, which Mesh-TensorFlow's programs cannot be given to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from pase_mtf.models.presets import AlexnetConfig, ModelConfig, TransformerConfig

__all__ = ["Plain", "plain_model"]

Plain = tuple[tf.keras.Model, Callable[[Any, Any], tf.Tensor], Callable[[int], tuple[Any, Any]]]
"""A model; the sum of the losses of a batch (of its inputs, and of what it has to say); and a batch of so many."""


def plain_model(name: str, config: ModelConfig) -> Plain:
    """A model, its loss, and made-up batches for it.

    Args:
      name: of `distribute.MODELS`.
      config: its sizes; there is no dropout.
    """
    return _MODELS[name](config)


def _alexnet(config: AlexnetConfig) -> Plain:
    layers = tf.keras.layers
    image = (config.image, config.image, config.image_channels)
    model = tf.keras.Sequential([layers.Input(image)])
    for convolution in config.convolutions:
        padding = convolution.padding.lower()
        model.add(layers.Conv2D(convolution.channels, convolution.kernel, convolution.stride, padding,
                                activation="relu"))
        if convolution.pool:
            model.add(layers.MaxPooling2D(convolution.pool, convolution.pool_stride))
    model.add(layers.Flatten())
    for width in config.fully_connected:
        model.add(layers.Dense(width, activation="relu"))
    model.add(layers.Dense(config.classes))

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True)))

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(0)
        return generator.standard_normal((size, *image)).astype(np.float32), generator.integers(
            config.classes, size=size).astype(np.int32)

    return model, loss, batch


def _transformer(config: TransformerConfig) -> Plain:
    layers = tf.keras.layers
    half = (config.d_model + 1) // 2
    angles = np.arange(config.length)[:, None] / 10000 ** (np.arange(half) / half)
    positions = np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :config.d_model].astype(np.float32)

    def embedded(tokens: Any) -> Any:
        return layers.Embedding(config.vocab, config.d_model)(tokens) * config.d_model ** 0.5 + positions

    def normal(x: Any) -> Any:
        return layers.LayerNormalization(center=False, epsilon=1e-6)(x)

    def attended(x: Any, memory: Any, **visible: Any) -> Any:
        attention = layers.MultiHeadAttention(config.heads, config.d_k, use_bias=False)
        return attention(x, memory, **visible)

    def fed_forward(x: Any) -> Any:
        hidden = layers.Dense(config.d_ff, activation="relu", use_bias=False)(x)
        return layers.Dense(config.d_model, use_bias=False)(hidden)

    source, before = (layers.Input((config.length,), dtype="int32") for _ in range(2))
    words = layers.Lambda(lambda tokens: tf.not_equal(tokens, 0)[:, None, :],
                          output_shape=(1, config.length))(source)
    x = embedded(source)
    for _ in range(config.layers):
        y = normal(x)
        x = x + attended(y, y, attention_mask=words)
        x = x + fed_forward(normal(x))
    memory, x = normal(x), embedded(before)
    for _ in range(config.layers):
        y = normal(x)
        x = x + attended(y, y, use_causal_mask=True)
        x = x + attended(normal(x), memory, attention_mask=words)
        x = x + fed_forward(normal(x))
    model = tf.keras.Model([source, before], layers.Dense(config.vocab, use_bias=False)(normal(x)))

    def loss(inputs: tuple[tf.Tensor, tf.Tensor], target: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, model(list(inputs), training=True))
        return tf.reduce_sum(tf.where(target > 0, losses, 0.0)) / config.length

    def batch(size: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        generator = np.random.default_rng(0)
        tokens = generator.integers(4, config.vocab, size=(2, size, config.length)).astype(np.int32)
        moved = np.concatenate([np.ones((size, 1), np.int32), tokens[1][:, :-1]], 1)
        return (tokens[0], moved), tokens[1]

    return model, loss, batch


_MODELS: dict[str, Callable[..., Plain]] = {"alexnet": _alexnet, "transformer": _transformer}
