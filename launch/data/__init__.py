"""Training data: images, text and synthetic examples, as endless batches that can be resumed at any step."""

from __future__ import annotations

import os
from typing import cast, get_args

from pase_mtf.errors import DataError
from pase_mtf.launch.data.batches import ORDER, Batch, Data, Source, StepBatch, are_same, number_of
from pase_mtf.launch.data.images import image_source
from pase_mtf.launch.data.synthetic import synthetic_source
from pase_mtf.launch.data.text import check_text, language_source, text_source
from pase_mtf.models import Model
from pase_mtf.models.presets import ImageConfig, ModelConfig, TextConfig

__all__ = ["ORDER", "Batch", "Data", "Source", "StepBatch", "are_same", "check_data", "number_of", "open_data"]


def open_data(spec: str | None, model: Model, config: ModelConfig, batch: int, seed: int) -> Data:
    """Opens and checks what a run is to train on.

    Args:
      spec: for a model of images: an IDX file of images, a folder of IDX files, "images,labels" (two IDX files), or a
        folder of JPEG and PNG files with labels.txt or labels.csv. For a model of parallel text:
        "source.txt,target.txt", two files with a sentence and its translation on lines of the same number, or one plain
        text. For a model of text: one plain text. None: synthetic data.
      model: says what kind of data it trains on.
      config: its sizes.
      batch: examples per batch.
      seed: of the order and of synthetic data.

    Raises:
      DataError: a file is missing, malformed, or does not fit the model; names the file and the place in it.
    """
    if spec is None:
        source = synthetic_source(model.data_kind, config, seed)
    elif model.data_kind == "images":
        source = image_source(_paths(spec), cast(ImageConfig, config))
    elif model.data_kind == "text":
        source = language_source(_paths(spec), cast(TextConfig, config))
    else:
        source = text_source(_paths(spec), cast(TextConfig, config))
    return Data(source, batch, seed, counts_steps=config.dropout > 0)


def check_data(spec: str, config: ModelConfig, if_missing: str | None = None) -> None:
    """Checks what a run is to train on, as far as that goes without the model (and TensorFlow).

    Args:
      spec: as in `open_data`.
      config: the model's sizes.
      if_missing: what to do where a file is not there; None: look for it, or do without.

    Raises:
      DataError: as `open_data`.
    """
    paths = _paths(spec, if_missing)
    if isinstance(config, get_args(ImageConfig)):
        image_source(paths, cast(ImageConfig, config))
    else:
        check_text(paths, cast(TextConfig, config))


def _paths(spec: str, if_missing: str | None = None) -> list[str]:
    """The one or two paths of a specification, which exist. A comma may be part of a single path that exists."""
    paths = [spec] if os.path.exists(spec) else [os.path.expanduser(part.strip()) for part in spec.split(",")]
    if len(paths) > 2:
        raise DataError(f"--data={spec}: {len(paths)} paths; give one, or two separated by a comma")
    for path in paths:
        if not os.path.exists(path):
            told = if_missing or "check the path, or leave --data out to train on synthetic data"
            raise DataError(f"--data={spec}: no such file or folder {path!r}; {told}")
        if not (os.path.isfile(path) or os.path.isdir(path)):  # it may have no end, and nobody can read it twice
            raise DataError(f"--data={spec}: {path!r} is a device or a pipe; name a file or a folder")
    return paths
