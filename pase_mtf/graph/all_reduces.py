"""All-reduces: how devices sum what each holds in part, so that all have the sum. Lowering and prices ask one rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["HUB", "ITEMSIZE", "PAIR", "PIECES", "RING", "at_once", "bucket_of", "buckets", "messages_of", "way_of"]

ITEMSIZE = 4
"""Bytes of an element, mostly, for those that count in bytes: how a sum is made follows from elements."""

PAIR, HUB, PIECES, RING = range(4)
"""Two devices give each other all they have. One device sums and the others read it there. All exchange pieces with
all, sum one each, and exchange the sums. Every device adds its piece to what the one before sent, and sends it on."""

# Below this size an all-reduce is dominated by the number of messages. Elements and not bytes, so that a program sends
# the same messages in float64, by which its float32 is judged.
_SMALL = 1 << 14
_PIECE = 1 << 11
"""Elements of a piece that is worth a hop of its own."""
_BUCKET = 1 << 18
"""Elements of sums that are made together, where they can wait for each other: beyond, bytes take longer than messages
(docs/lowering.md has what was measured)."""


def way_of(elements: Any, devices: Any) -> Any:
    """How a tensor is summed.

    Round a ring as many bytes travel as where all exchange pieces with all, but every link carries one stream in either
    direction, and is never shared: streams that share a link wait for each other at their other ends (docs/lowering.md
    has what that costs, and where sums are large enough for it). A hop takes its time, too, so pieces have to be large.

    Args, each an int or an array:
      elements: of what every device holds before and after.
      devices: how many, 2 or more.

    Returns:
      PAIR, HUB, PIECES or RING, or an int64 array of them.
    """
    return np.select([np.equal(devices, 2), np.less(elements, _SMALL), np.less(elements, devices * _PIECE)],
                     [PAIR, HUB, PIECES], RING)


def messages_of(way: Any, devices: Any) -> Any:
    """How many messages follow each other at a device, of `way_of`'s ways.

    A ring has 2 (q - 1) hops (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009); where pieces are
    exchanged every device is sent as many. Of a hub each device gets one and sends one; those that the hub takes in
    arrive together.

    Args, each a number or an array:
      way: as it is summed.
      devices: how many.
    """
    pieces = 2 * (devices - 1)
    return np.choose(way, [1, 2, pieces, pieces])


def buckets(elements: Sequence[int]) -> list[list[int]]:
    """Which sums are made together, of those that can wait for each other: they share their messages.

    As Horovod's tensor fusion (Sergeev and Del Balso, 2018) and DistributedDataParallel (Li et al., 2020) do it: in
    the order in which they are made, so that a bucket is summed while the parts of the next are still computed.

    Args:
      elements: of each sum, in the order in which they are made.

    Returns:
      Their numbers, ascending; one of more elements than a bucket takes is alone, and those around it are not.
    """
    found: list[list[int]] = []
    latest: list[int] = []
    room = 0
    for number, count in enumerate(elements):
        if count > _BUCKET:
            found.append([number])
            continue
        if not latest or count > room:
            latest, room = [], _BUCKET
            found.append(latest)
        latest.append(number)
        room -= count
    return found


def bucket_of(elements: Any) -> Any:
    """How many elements a bucket of a program's sums has, as prices take it: all that one takes, or all there are where
    that is less.

    Args:
      elements: an int or an array: of all sums that wait for each other.
    """
    return np.minimum(_BUCKET, elements)


def at_once(elements: Any) -> Any:
    """Which fraction of the sums that wait for each other may be made at the same time: a bucket of them.

    Args:
      elements: an int or an array: of those that each are no larger than a bucket, together.
    """
    return np.minimum(1.0, _BUCKET / np.maximum(elements, 1))
