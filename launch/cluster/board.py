"""What the processes of a run tell each other where every one of them has a graph of its own: through TensorFlow's
collectives, as everything that crosses processes."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pase_mtf.compat import tf
from pase_mtf.launch.cluster.lost import LOST, lost_process
from pase_mtf.lowering.ranks import run_options
from pase_mtf.runtime import Devices, session_config

__all__ = ["Board"]

_SHORT, _LONG = 1 << 7, 1 << 18
"""Words of 32 bits: of the first piece of a message, and of every other."""

_ENDS_WITHIN = 2.0
"""Seconds in which those that still hear have heard that a run has ended."""

_HEAD = 2
"""Words of the first piece that say how many bytes the message has, and which rank's it is."""


class Board:
    """Tells what rank 0 is about to do, and gathers what the ranks have found.

    All ranks make one, and take part in everything alike: where rank 0 tells, the others hear; all gather at once.

    Attributes:
      rank: of this process.
      leads: whether that is 0.
      arms: the numbers that arms get, in the order in which all ranks build them.
    """

    def __init__(self, devices: Devices):
        """Opens it, once TensorFlow's servers answer.

        Args:
          devices: of the run, as this rank sees them.
        """
        assert devices.rank is not None
        self.leads = devices.rank == 0
        self.arms = itertools.count()
        self.ranks, self.rank = len(devices.tasks), devices.rank
        self._session: tf.Session | None = None
        self._unheard = False  # whether a message was given up: those who heard it count otherwise than the rest
        if self.ranks == 1:
            return
        with tf.Graph().as_default() as graph, tf.device(f"{devices.client}/device:CPU:0"):
            self._channels = {size: self._channel(devices, number, size) for number, size in enumerate((_SHORT, _LONG))}
        self._session = tf.Session(devices.target, graph=graph, config=session_config(devices))

    def _channel(self, devices: Devices, number: int,
                 size: int) -> tuple[tf.Tensor, tf.Operation | tf.Tensor, tf.Tensor]:
        """(what is fed, the broadcast, the gathering) of pieces of so many words."""
        # Groups are known by their devices, which are those of the lowering's: it is another one all the same.
        group = zlib.crc32("|".join(("board", *devices.tasks)).encode()) & 0x7fffffff
        keys = {"group_size": self.ranks, "group_key": group}
        piece = tf.placeholder(tf.int32, [size])
        if self.leads:
            cast = tf.raw_ops.CollectiveBcastSendV2(input=piece, instance_key=2 * number + 1, **keys)
        else:
            cast = tf.raw_ops.CollectiveBcastRecvV2(T=tf.int32, shape=[size], instance_key=2 * number + 1, **keys)
        gathered = tf.raw_ops.CollectiveGatherV2(input=piece[None], ordering_token=[], instance_key=2 * number + 2,
                                                 **keys)
        return piece, cast, gathered

    def tell(self, *, within: float | None = None, **message: object) -> None:
        """Rank 0 tells the others something (that JSON can say); on these it does nothing: they hear it.

        Args:
          within: seconds, for what they need not hear any more where they do not; None: they will.
          message: what is told.

        Raises:
          ClusterError: a process was lost.
        """
        if not self.leads or self._session is None or self._unheard:
            return
        for size, words in _pieces(json.dumps(message)):
            piece, cast, _ = self._channels[size]
            self._run(cast, {piece: words}, within)

    def hear(self) -> dict[str, Any]:
        """Waits for what rank 0 tells, however long that takes.

        Raises:
          ClusterError: a process was lost.
        """
        held = [self._run(self._channels[_SHORT][1])]
        for _ in range(_more(held[0])):
            held.append(self._run(self._channels[_LONG][1]))
        return json.loads(_text(held))

    def gather(self, found: object) -> list[Any]:
        """What all ranks have found, by rank; every rank gives something (that JSON can say), and gets all.

        Raises:
          ClusterError: a process was lost.
        """
        if self._session is None:
            return [found]
        mine = [words for _, words in _pieces(json.dumps(found), self.rank)]
        piece, _, gathered = self._channels[_SHORT]
        held = [[first] for first in self._run(gathered, {piece: mine[0]})]
        piece, _, gathered = self._channels[_LONG]
        for number in range(1, 1 + max(_more(first) for first, in held)):
            words = mine[number] if number < len(mine) else np.zeros(_LONG, np.int32)
            for of_rank, more in zip(held, self._run(gathered, {piece: words}), strict=True):
                of_rank.append(more)
        # In which order TensorFlow counts the ranks is its own affair.
        return [json.loads(_text(pieces)) for pieces in sorted(held, key=lambda pieces: int(pieces[0][1]))]

    def close(self) -> None:
        """Lets the others know that nothing follows, where they still hear, and takes no further part."""
        if self._session is None:
            return
        self.tell(within=_ENDS_WITHIN, do="end")
        self._session.close()

    def _run(self, fetch: Any, feed: dict[Any, np.ndarray] | None = None, within: float | None = None) -> Any:
        assert self._session is not None
        try:
            return self._session.run(fetch, feed, options=run_options(
                **{} if within is None else {"timeout_in_ms": int(1e3 * within)}))
        except LOST as error:
            if within is None:
                raise lost_process(error, f"rank {self.rank}") from error
        except tf.errors.DeadlineExceededError:
            pass
        self._unheard = True
        return None


def _more(first: np.ndarray) -> int:
    """How many pieces follow the first of a message."""
    return -(-max(0, int(first[0]) - 4 * (_SHORT - _HEAD)) // (4 * _LONG))


def _pieces(text: str, rank: int = 0) -> list[tuple[int, np.ndarray]]:
    """A message as (words, piece)."""
    data = text.encode()
    room = 4 * (_SHORT - _HEAD)
    first = np.frombuffer(data[:room].ljust(room, b"\0"), np.int32)
    pieces = [(_SHORT, np.concatenate([np.asarray([len(data), rank], np.int32), first]))]
    for begin in range(room, len(data), 4 * _LONG):
        pieces.append((_LONG, np.frombuffer(data[begin:begin + 4 * _LONG].ljust(4 * _LONG, b"\0"), np.int32)))
    return pieces


def _text(pieces: Sequence[np.ndarray]) -> str:
    """The message that consists of these pieces."""
    return b"".join([pieces[0][_HEAD:].tobytes(), *(piece.tobytes() for piece in pieces[1:])])[:pieces[0][0]].decode()
