"""Which device sends how much to which when a tensor moves from one partition to another, as it is lowered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.graph.partition import Partition, cover, nearest
from pase_mtf.machine.link import Link

__all__ = ["Transfers", "link_level", "transfers"]


class Transfers(NamedTuple):
    """What devices send to each other: int64 [N] each, one entry per pair of devices; first every device's to the next
    one of its node, then to the one after that, and so on, then to the same places of the next node: where all send to
    all, nobody has to wait for another's port, of whichever level.

    Attributes:
      sender, receiver: devices; the same where nothing has to be sent.
      level: index of the link that it crosses.
      elements: how many; 0 where nothing has to be sent.
      messages: in how many pieces.
    """

    sender: np.ndarray
    receiver: np.ndarray
    level: np.ndarray
    elements: np.ndarray
    messages: np.ndarray


def link_level(links: Sequence[Link], one: int, other: int) -> int:
    """The index of the innermost link that joins two devices."""
    return next((level for level, link in enumerate(links[:-1]) if one // link.devices == other // link.devices),
                len(links) - 1)


def transfers(source: Partition, target: Partition, shape: Sequence[int], links: Sequence[Link]) -> Transfers:
    """What every device of the target fetches: each piece from the nearest device that holds it. Of which device what
    it holds itself comes, too, without elements.

    Args:
      source, target: partitions of a tensor of this shape.
      shape: its unsplit shape.
      links: of the machine.
    """
    found: dict[tuple[int, int], list[int]] = {}
    nodes = [link.devices for link in links[:-1]]
    if source == target:
        found = {(device, device): [0, 0] for device in source.devices}
    for parts, positions in target.holders.items() if source != target else ():
        pieces = [(piece.block, math.prod(piece.size)) for piece in cover(source, target, shape, parts)[1]]
        for position in positions:
            receiver = target.devices[position]
            for block, elements in pieces:
                sender = source.devices[nearest(source.holders[block], source.devices, receiver, nodes)]
                entry = found.setdefault((receiver, sender), [0, 0])
                if sender != receiver:
                    entry[0] += elements
                    entry[1] += 1
    sizes = (1, *nodes, max((*source.devices, *target.devices)) + 1)
    in_turn = sorted(found.items(), key=lambda pair: (_turn(sizes, *pair[0]), pair[0]))
    rows = [(sender, receiver, link_level(links, sender, receiver), elements, messages)
            for (receiver, sender), (elements, messages) in in_turn]
    return Transfers(*np.array(rows, np.int64).reshape(-1, 5).T)


def _turn(sizes: Sequence[int], receiver: int, sender: int) -> tuple[int, ...]:
    """By how many nodes of every level, outermost first, and by how many devices within one the receiver is beyond the
    sender, in circles. No two pairs that are equally far have a sender or a receiver in common.

    Args:
      sizes: 1, how many devices each link joins but the outermost, and how many there are.
      receiver, sender: devices.
    """
    found = []
    for inner, outer in itertools.pairwise(sizes):
        count = -(-min(outer, sizes[-1]) // inner)  # of a node that is not full, those that are there
        found.append((receiver // inner - sender // inner) % count)
    return tuple(reversed(found))
