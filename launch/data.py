"""Training data: what a run trains on, as endless batches that can be resumed at any step.

A source only knows how many examples it has and how to load some of them by number; the order, the batches and the
prefetching are done here, once, through tf.data. Example number i of the stream is a pure function of the seed and i
(a keyed permutation of every epoch), so that a resumed run sees exactly what the uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pase_mtf.errors import DataError, PaseError

__all__ = ["Data", "Source", "open_data"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Examples by number.

    Attributes:
      description: one line for people: how many, of what, from where, and what was done to them.
      examples: how many there are.
      load: numbers of examples, int64 [n] -> feature name -> array whose first axis has n elements. May be called
        from another thread.
      types: feature name -> NumPy type and shape of one example.
      vocabulary: the tokenizer, where there is one (a `tokenizers.Tokenizer`).
    """

    description: str
    examples: int
    load: Callable[[np.ndarray], dict[str, np.ndarray]]
    types: dict[str, tuple[np.dtype, tuple[int, ...]]]
    vocabulary: Any = None


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches of a source.

    Attributes:
      source: where the examples come from.
      batch: examples per batch.
      seed: of the order.
      counts_steps: the model wants the number of the step as a feature, "step".
    """

    source: Source
    batch: int
    seed: int
    counts_steps: bool = False

    def describe(self) -> str:
        """One line: what the run trains on."""
        return self.source.description

    @property
    def vocabulary(self) -> Any:
        """The tokenizer of a text, None for other data."""
        return self.source.vocabulary

    def batches(self, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Endless batches, shuffled anew every epoch, from that step on; they depend on the seed and the step only.

        Args:
          start_step: number of the first batch.

        Yields:
          feature name -> array with the batch in front (but "step", a scalar).

        Raises:
          DataError: an example cannot be read after all.
        """
        from pase_mtf.compat import tf  # bad data is answered before TensorFlow is even imported
        source, names = self.source, sorted(self.source.types)
        failures: list[PaseError] = []

        def load(numbers: np.ndarray) -> list[np.ndarray]:
            try:
                loaded = source.load(numbers)
            except PaseError as error:  # tf.data would wrap it in a page of text
                failures.append(error)
                raise
            return [np.ascontiguousarray(loaded[name], source.types[name][0]) for name in names]

        @tf.autograph.experimental.do_not_convert
        def features(places: Any) -> dict[str, Any]:
            size = tf.constant(source.examples, tf.int64)
            epochs = places // size
            # The public index_shuffle pads a matrix of keys on the wrong side (TensorFlow 2.21); its kernel is fine.
            keys = tf.stack([tf.zeros_like(epochs), tf.fill([self.batch], tf.constant(self.seed, tf.int64)), epochs], 1)
            numbers = tf.raw_ops.RandomIndexShuffle(
                index=places % size, seed=tf.cast(keys, tf.uint32), max_index=size - 1, rounds=4)
            arrays = tf.numpy_function(load, [numbers], [tf.as_dtype(source.types[name][0]) for name in names])
            for name, array in zip(names, arrays, strict=True):
                array.set_shape([self.batch, *source.types[name][1]])
            return dict(zip(names, arrays, strict=True))

        # A graph and a session of its own: neither the caller's graph nor TensorFlow's eager mode (which would take
        # the GPUs' memory) has to do with reading files.
        with tf.Graph().as_default() as graph, tf.device("/device:CPU:0"):
            places = tf.data.Dataset.range(start_step * self.batch, np.iinfo(np.int64).max)
            dataset = places.batch(self.batch, drop_remainder=True).map(features).prefetch(2)
            iterator = tf.data.make_initializable_iterator(dataset)
            element = iterator.get_next()
        session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={"GPU": 0}))
        try:
            session.run(iterator.initializer)
            step = start_step
            while True:
                try:
                    batch = session.run(element)
                except tf.errors.OpError as error:
                    raise failures[0] if failures else DataError(
                        f"cannot read the data: {error.message.splitlines()[0]}") from None
                if self.counts_steps:
                    batch["step"] = np.asarray(step, np.int32)
                yield batch
                step += 1
        finally:
            session.close()


def open_data(spec: str | None, model: Any, config: Any, batch: int, seed: int) -> Data:
    """Opens and checks what a run is to train on.

    Args:
      spec: for a model of images: an IDX file of images, a folder of IDX files, "images,labels" (two IDX files), or a
        folder of JPEG and PNG files with labels.txt or labels.csv. For a model of parallel text:
        "source.txt,target.txt", two files with a sentence and its translation on lines of the same number, or one plain
        text. For a model of text: one plain text. None: synthetic data.
      model: a `pase_mtf.models.Model`.
      config: its sizes.
      batch: examples per batch.
      seed: of the order and of synthetic data.

    Raises:
      DataError: a file is missing, malformed, or does not fit the model; names the file and the place in it.
    """
    if spec is None:
        from pase_mtf.launch.data_synthetic import synthetic_source
        source = synthetic_source(model.data_kind, config, seed)
    elif model.data_kind == "images":
        from pase_mtf.launch.data_images import image_source
        source = image_source(_paths(spec), config)
    else:
        from pase_mtf.launch.data_text import language_source, text_source
        source = (language_source if model.data_kind == "text" else text_source)(_paths(spec), config)
    return Data(source, batch, seed, counts_steps=config.dropout > 0)


def _paths(spec: str) -> list[str]:
    """The one or two paths of a specification, which exist. A comma may be part of a single path that exists."""
    paths = [spec] if os.path.exists(spec) else [os.path.expanduser(part.strip()) for part in spec.split(",")]
    if len(paths) > 2:
        raise DataError(f"--data={spec}: {len(paths)} paths; give one, or two separated by a comma")
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"--data={spec}: no such file or folder {path!r}; check the path, or leave --data out to "
                            "train on synthetic data")
    return paths
