"""The variables of a checkpoint, written by every process of a run for itself: TensorFlow's own format of shards.

Whoever reads it, another number of processes, another strategy, one process, TensorFlow itself, reads one checkpoint of
whole variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pase_mtf.compat import tf
from pase_mtf.errors import UsageError

__all__ = ["ShardWriter", "data_file", "merge_shards", "shard_prefix"]


def shard_prefix(prefix: str, rank: int) -> str:
    """What the files of a rank begin with, before they are merged."""
    return f"{prefix}_rank-{rank:05d}"


class ShardWriter:
    """Writes what a process keeps of the variables. To be made while its graph is; every value by one process.

    Attributes:
      write: the operation.
      prefix: to be fed with what the files are to begin with.
      empty: whether there is nothing to write.
    """

    def __init__(self, whole: Mapping[str, tf.Tensor],
                 parts: Mapping[str, tuple[Sequence[int], Sequence[tuple[Sequence[int], tf.Tensor]]]]):
        """Makes the nodes.

        Args:
          whole: name -> value.
          parts: name -> its whole shape, and (where it begins, value) of every part of it.
        """
        entries = [(name, "", value) for name, value in whole.items()]
        for name, (shape, blocks) in parts.items():
            for begin, value in blocks:
                sizes = value.shape.as_list()
                place = ":".join(f"{start},{size}" for start, size in zip(begin, sizes, strict=True))
                entries.append((name, "" if sizes == list(shape) else f"{' '.join(map(str, shape))} {place}", value))
        self.prefix = tf.placeholder(tf.string, [])
        self.write: tf.Operation = tf.no_op()
        if entries:
            names, places, values = zip(*entries, strict=True)
            with tf.device("/device:CPU:0"):
                self.write = tf.raw_ops.SaveV2(prefix=self.prefix, tensor_names=list(names),
                                               shape_and_slices=list(places), tensors=list(values))
        self.empty = not entries


def data_file(prefix: str, number: int = 0, count: int = 1) -> str:
    """The file of values of a checkpoint, or one of several: TensorFlow's name for it."""
    return f"{prefix}.data-{number:05d}-of-{count:05d}"


def merge_shards(prefix: str, ranks: Sequence[int]) -> list[str]:
    """Makes one checkpoint of what the ranks have written: an index of all, and their own files of values, renamed.

    Args:
      prefix: of its files.
      ranks: those that have written.

    Returns:
      The names of those files, in the order of the ranks.

    Raises:
      UsageError: what one has written is not there.
      tf.errors.OpError: they cannot be merged, or the disk is full.
    """
    shards = [shard_prefix(prefix, rank) for rank in ranks]
    for rank, shard in zip(ranks, shards, strict=True):
        if not os.path.exists(f"{shard}.index"):
            raise UsageError(f"{shard}: what rank {rank} wrote is not there; with --clients=ranks the output directory "
                             "has to be on a file system that all hosts share")
    with tf.Graph().as_default(), tf.device("/device:CPU:0"):
        merge = tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shards, destination_prefix=prefix,
                                              delete_old_dirs=False)
        with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as session:
            session.run(merge)
    return [os.path.basename(data_file(prefix, number, len(ranks))) for number in range(len(ranks))]
