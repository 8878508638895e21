"""Synthetic data that can be learned: without files, a run should still show a loss that falls."""

from __future__ import annotations

from typing import cast

import numpy as np

from pase_mtf.launch.data.batches import Batch, Source
from pase_mtf.launch.data.text import END, RESERVED, next_tokens, pad_pair
from pase_mtf.models.checks import kept_dtype
from pase_mtf.models.presets import ImageConfig, ModelConfig, TextConfig

__all__ = ["synthetic_source"]

_EXAMPLES = 1 << 16
_WORDS = 1 << 24
"""Of a text, at most: a few hundred megabytes while it is made."""


def synthetic_source(kind: str, config: ModelConfig, seed: int) -> Source:
    """Made-up examples for a model of that kind of data.

    Args:
      kind: `Model.data_kind`.
      config: sizes of the model.
      seed: other seeds make other data.
    """
    if kind == "images":
        return _images(cast(ImageConfig, config), seed)
    return (_text if kind == "text" else _translations)(cast(TextConfig, config), seed)


def _images(config: ImageConfig, seed: int) -> Source:
    """A blurred random picture per class, under noise of twice its strength."""
    generator = np.random.default_rng([seed, 1])
    shape = (config.image, config.image, config.image_channels)
    coarse = generator.standard_normal((config.classes, 4, 4, config.image_channels)).astype(np.float32)
    places = np.arange(config.image) * 4 // config.image
    size = int(np.prod(shape))
    # One long strip of noise, cut somewhere else for every example: drawing it anew would take the processor's time
    # from the training that is measured. No two are cut at one place: of equal pictures one might be held out, and the
    # other trained on.
    noise = 2 * generator.standard_normal(size + _EXAMPLES).astype(np.float32)
    labels = generator.integers(config.classes, size=_EXAMPLES).astype(np.int32)
    cuts = generator.permutation(_EXAMPLES)
    dtype = np.dtype(kept_dtype(config.dtype))

    def load(numbers: np.ndarray) -> Batch:
        images = np.stack([noise[cuts[number]:cuts[number] + size].reshape(shape) for number in numbers])
        images += coarse[labels[numbers]][:, places][:, :, places]
        return {"images": images.astype(dtype), "labels": labels[numbers]}

    description = (f"synthetic (no --data): {_EXAMPLES:,} different noisy pictures of {config.image}x{config.image}x"
                   f"{config.image_channels}, {config.classes} classes")
    return Source(description, _EXAMPLES, load, {"images": (dtype, shape), "labels": (np.dtype(np.int32), ())})


def _translations(config: TextConfig, seed: int) -> Source:
    """Sentences of words whose frequencies follow Zipf's law; every word has one translation, the order stays."""
    generator = np.random.default_rng([seed, 2])
    words = config.vocab - RESERVED
    frequency = 1 / np.arange(1, words + 1)
    examples = max(1, min(_EXAMPLES, _WORDS // config.length))
    # Sentences that share nothing, as the windows of `_text`: of some that did, those held out would be trained on.
    drawn = generator.choice(words, size=examples * config.length, p=frequency / frequency.sum())
    translation = generator.permutation(words)
    lengths = generator.integers(max(1, config.length // 2), config.length, size=examples)
    starts = np.arange(examples) * config.length

    def load(numbers: np.ndarray) -> Batch:
        sentences = [drawn[starts[number]:starts[number] + lengths[number]] for number in numbers]
        return pad_pair([np.append(sentence + RESERVED, END) for sentence in sentences],
                        [np.append(translation[sentence] + RESERVED, END) for sentence in sentences], config.length)

    description = (f"synthetic (no --data): {examples:,} separate sentences of at most {config.length} words out of "
                   f"{words:,}, translated word by word")
    shape = (np.dtype(np.int32), (config.length,))
    return Source(description, examples, load, {"source": shape, "decoder_input": shape, "target": shape})


def _text(config: TextConfig, seed: int) -> Source:
    """Words whose frequencies follow Zipf's law; three times out of four, a word is the one that always follows."""
    generator = np.random.default_rng([seed, 3])
    words = config.vocab - RESERVED
    frequency = 1 / np.arange(1, words + 1)
    examples = max(1, min(_EXAMPLES, _WORDS // config.length))
    # Windows that share nothing: of some that did, those held out would be trained on.
    drawn = generator.choice(words, size=examples * config.length + 1, p=frequency / frequency.sum())
    follows = generator.random(len(drawn)) < 0.75
    successor = generator.permutation(words)

    def load(numbers: np.ndarray) -> Batch:
        places = numbers[:, None] * config.length + np.arange(config.length + 1)
        windows = drawn[places]
        for step in range(1, config.length + 1):
            windows[:, step] = np.where(follows[places[:, step]], successor[windows[:, step - 1]], windows[:, step])
        return next_tokens(windows + RESERVED)

    description = (f"synthetic (no --data): {examples:,} windows of {config.length} words out of {words:,}, three "
                   "quarters of them decided by the word before")
    shape = (np.dtype(np.int32), (config.length,))
    return Source(description, examples, load, {"tokens": shape, "targets": shape})
