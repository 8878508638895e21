"""A source of examples, and the batches drawn from it.

A source only knows how many examples it has and how to load some of them by number; the order, the batches and the
prefetching are done here, once, through tf.data. Example number i of the stream is a pure function of the seed and i
(a keyed permutation of every epoch), so that a resumed run sees exactly what the uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pase_mtf.errors import DataError, PaseError

if TYPE_CHECKING:  # slow to import: see `Data.batches`
    from tokenizers import Tokenizer

    from pase_mtf.compat import tf

__all__ = ["ORDER", "Batch", "Data", "Source", "StepBatch", "are_same", "number_of"]

_KEYS = 3
"""Words of 32 bits that TensorFlow's kernel takes as a key (Simon, a block cipher, as a permutation)."""
ORDER = 3
"""The version of the order of examples, and of those that are made up: losses of runs that saw others, or in another
order, are not those that would come."""
_ROUNDS = 8
"""Of the cipher. After the four that TensorFlow takes by default, orders by keys that differ a little are alike."""

_SAMPLED = 64
"""Examples that tell data apart."""
_SAME = 1e-3
"""Between means of a feature of the same example: a decoder of pictures of another version may round otherwise."""

Batch = dict[str, np.ndarray]
"""Feature name -> values of a batch of examples."""


def are_same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two samples (`Data.sample`), as many numbers each, are of the same data."""
    return all(math.isclose(mine, theirs, rel_tol=0.0, abs_tol=_SAME) for mine, theirs in zip(one, other, strict=True))


class StepBatch(Batch):
    """The batch of a step.

    Attributes:
      number: of the step.
    """

    number: int

    def __init__(self, values: Batch, number: int):
        """Takes the values, and says of which step they are."""
        super().__init__(values)
        self.number = number


def number_of(batch: Batch) -> int | None:
    """The step that a batch is of; None where it is of none."""
    return batch.number if isinstance(batch, StepBatch) else None


@dataclasses.dataclass(frozen=True)
class Source:
    """Examples by number.

    Attributes:
      description: one line for people: how many, of what, from where, and what was done to them.
      examples: how many there are.
      load: numbers of examples, int64 [n] -> feature name -> array whose first axis has n elements. May be called
        from another thread.
      types: feature name -> NumPy type and shape of one example.
      vocabulary: the tokenizer, where there is one.
    """

    description: str
    examples: int
    load: Callable[[np.ndarray], Batch]
    types: dict[str, tuple[np.dtype, tuple[int, ...]]]
    vocabulary: Tokenizer | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches of a source.

    Attributes:
      source: where the examples come from.
      batch: examples per batch.
      seed: of the order.
      counts_steps: the model wants the number of the step as a feature, "step".
      rows: the only rows of every batch that are read, ascending: those that a process of several needs; the others are
        zeros. None: all.
    """

    source: Source
    batch: int
    seed: int
    counts_steps: bool = False
    rows: tuple[int, ...] | None = None

    def describe(self) -> str:
        """One line: what the run trains on."""
        return self.source.description

    def sample(self) -> list[float]:
        """What tells these data from others that are as many and as large: of some examples, one by one, for they may
        be large, the mean of every feature, by name."""
        numbers = np.unique(np.linspace(0, self.source.examples - 1, _SAMPLED).astype(np.int64))
        return [float(np.mean(loaded[name], dtype=np.float64)) for loaded in map(self.source.load, numbers[:, None])
                for name in sorted(self.source.types)]

    @property
    def vocabulary(self) -> Tokenizer | None:
        """The tokenizer of a text, None for other data."""
        return self.source.vocabulary

    def batches(self, start_step: int = 0, ahead: int = 2) -> Iterator[StepBatch]:
        """Endless batches, shuffled anew every epoch, from that step on; they depend on the seed and the step only.

        Args:
          start_step: number of the first batch.
          ahead: how many batches are read before they are asked for: as many as whoever asks takes at once.

        Yields:
          feature name -> array with the batch in front (but "step", a scalar).

        Raises:
          DataError: an example cannot be read after all.
        """
        from pase_mtf.compat import tf  # here, as the command line imports this module before TensorFlow is wanted
        failures: list[Exception] = []
        # A graph and a session of its own: neither the caller's graph nor TensorFlow's eager mode (which would take
        # the GPUs' memory) has to do with reading files.
        with tf.Graph().as_default() as graph, tf.device("/device:CPU:0"):
            iterator = tf.data.make_initializable_iterator(self._dataset(start_step, ahead, failures))
            element = iterator.get_next()
        session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={"GPU": 0}))
        try:
            session.run(iterator.initializer)
            step = start_step
            while True:
                try:
                    batch = StepBatch(self._whole(session.run(element)), step)
                except tf.errors.OpError as error:
                    cause = failures[0] if failures else error
                    raise cause if isinstance(cause, PaseError) else DataError(
                        f"cannot read the data: {_first_line(cause)}") from None
                if self.counts_steps:
                    batch["step"] = np.asarray(step, np.int32)
                yield batch
                step += 1
        finally:
            session.close()

    def _whole(self, read: Batch) -> Batch:
        """The batch of which these rows were read: memory that nobody writes to takes no time."""
        if self.rows is None:
            return read
        whole = {name: np.zeros((self.batch, *values.shape[1:]), values.dtype) for name, values in read.items()}
        for name, values in read.items():
            whole[name][list(self.rows)] = values
        return whole

    def _dataset(self, start_step: int, ahead: int, failures: list[Exception]) -> tf.data.Dataset:
        """The batches as a dataset in the current graph.

        Args:
          start_step, ahead: as in `batches`.
          failures: filled with what `Source.load` raised: tf.data would wrap it in a page of text.
        """
        from pase_mtf.compat import tf  # as in `batches`
        source, names = self.source, sorted(self.source.types)
        rows = np.asarray(range(self.batch) if self.rows is None else self.rows, np.int64)

        def load(numbers: np.ndarray) -> list[np.ndarray]:
            try:
                loaded = source.load(numbers)
            except Exception as error:
                failures.append(error)
                raise
            return [np.ascontiguousarray(loaded[name], source.types[name][0]) for name in names]

        @tf.autograph.experimental.do_not_convert
        def features(places: tf.Tensor) -> dict[str, tf.Tensor]:
            places = places if self.rows is None else tf.gather(places, rows)
            size = tf.constant(source.examples, tf.int64)
            epochs = places // size
            # The public index_shuffle pads a matrix of keys on the wrong side (TensorFlow 2.21); its kernel is fine.
            keys = tf.ensure_shape(tf.numpy_function(self._keys, [epochs], tf.uint32), [len(rows), _KEYS])
            numbers = tf.raw_ops.RandomIndexShuffle(
                index=places % size, seed=keys, max_index=size - 1, rounds=_ROUNDS)
            arrays = tf.numpy_function(load, [numbers], [tf.as_dtype(source.types[name][0]) for name in names])
            for name, array in zip(names, arrays, strict=True):
                array.set_shape([len(rows), *source.types[name][1]])
            return dict(zip(names, arrays, strict=True))

        places = tf.data.Dataset.range(start_step * self.batch, np.iinfo(np.int64).max)
        return places.batch(self.batch, drop_remainder=True).map(features).prefetch(ahead)

    def _keys(self, epochs: np.ndarray) -> np.ndarray:
        """The keys of the permutations of these epochs, uint32 [n, 3]: nothing of one is in another."""
        different, place = np.unique(epochs, return_inverse=True)
        return np.stack([np.random.SeedSequence([self.seed, int(epoch)]).generate_state(_KEYS)
                         for epoch in different])[place]


def _first_line(error: Exception) -> str:
    """Of its message, or what it is where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
