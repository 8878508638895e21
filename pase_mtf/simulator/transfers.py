"""Which device sends how much to which when a tensor moves from one partition to another, as it is lowered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pase_mtf.graph.partition import Partition, cover, nearest
from pase_mtf.machine.link import Link

__all__ = ["Transfer", "link_level", "transfers"]


class Transfer(NamedTuple):
    """What one device sends to another.

    Attributes:
      sender, receiver: devices; the same where nothing has to be sent.
      level: index of the link that it crosses.
      elements: how many; 0 where nothing has to be sent.
      messages: in how many pieces.
    """

    sender: int
    receiver: int
    level: int
    elements: int
    messages: int


def link_level(links: Sequence[Link], one: int, other: int) -> int:
    """The index of the innermost link that joins two devices."""
    return next((level for level, link in enumerate(links[:-1]) if one // link.devices == other // link.devices),
                len(links) - 1)


def transfers(source: Partition, target: Partition, shape: Sequence[int], links: Sequence[Link]) -> list[Transfer]:
    """What every device of the target fetches: each piece from the nearest device that holds it.

    Args:
      source, target: partitions of a tensor of this shape.
      shape: its unsplit shape.
      links: of the machine.

    Returns:
      One per pair of devices, by receiver; of which device what it holds itself comes, too, without elements.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for parts, positions in target.holders.items():
        pieces = [(piece.parts, math.prod(piece.size)) for piece in cover(source, target, shape, parts)[1]]
        for position in positions:
            receiver = target.devices[position]
            for block, elements in pieces:
                sender = source.devices[nearest(source.holders[block], source.devices, receiver)]
                entry = found.setdefault((receiver, sender), [0, 0])
                if sender != receiver:
                    entry[0] += elements
                    entry[1] += 1
    return [Transfer(sender, receiver, link_level(links, sender, receiver), elements, messages)
            for (receiver, sender), (elements, messages) in sorted(found.items())]
