"""Sizes of the recurrent models."""

from __future__ import annotations

import dataclasses

from pase_mtf.errors import UsageError
from pase_mtf.models.checks import check_run, positive

__all__ = ["BiglstmConfig", "GnmtConfig", "RnnlmConfig"]


@dataclasses.dataclass(frozen=True)
class RnnlmConfig:
    """Sizes of `rnnlm`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      layers: LSTM layers.
      units: cells per layer, and channels of the embedding.
      length: tokens of a sequence, over which the layers are unrolled.
      vocab: tokens of the vocabulary.
      dropout: rate on the input of every layer and on the output of the last, not on the recurrence.
      batch, optimizer, learning_rate: defaults of a run; the batch counts sequences.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    layers: int
    units: int
    length: int
    vocab: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "layers", "units", "length")
        _check_vocab(self)
        check_run(self)


@dataclasses.dataclass(frozen=True)
class BiglstmConfig:
    """Sizes of `biglstm`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      layers: LSTM layers.
      units: cells per layer.
      projection: channels that a layer puts out, and of the embedding.
      length: tokens of a sequence, over which the layers are unrolled.
      vocab: tokens of the vocabulary.
      dropout: rate on the input of every layer and on the output of the last, not on the recurrence.
      batch, optimizer, learning_rate: defaults of a run; the batch counts sequences.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    layers: int
    units: int
    projection: int
    length: int
    vocab: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "layers", "units", "projection", "length")
        _check_vocab(self)
        check_run(self)


@dataclasses.dataclass(frozen=True)
class GnmtConfig:
    """Sizes of `gnmt`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      layers: LSTM layers of the encoder (the first of which runs in both directions), and of the decoder.
      units: cells per layer, channels of the embeddings and of the attention.
      length: tokens of a source and of a target sequence.
      vocab: tokens of the vocabulary, which source and target share.
      dropout: rate on the input of every layer, not on the recurrence.
      batch, optimizer, learning_rate: defaults of a run; the batch counts sequences.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    layers: int
    units: int
    length: int
    vocab: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "layers", "units", "length")
        if self.layers < 2:
            raise UsageError(f"layers={self.layers}: it has to be at least 2 (one in both directions, and one above)")
        if self.length < 2:
            raise UsageError(f"length={self.length}: it has to be at least 2 (a word and the end of the sentence)")
        _check_vocab(self)
        check_run(self)


def _check_vocab(config: RnnlmConfig | BiglstmConfig | GnmtConfig) -> None:
    if config.vocab < 8:
        raise UsageError(f"vocab={config.vocab}: it has to be at least 8 (four tokens are reserved)")
    positive(config, "vocab")
