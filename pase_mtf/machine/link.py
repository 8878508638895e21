"""One level of the links between devices."""

from __future__ import annotations

import dataclasses

__all__ = ["Link"]


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of the link hierarchy.

    Attributes:
      devices: this level joins aligned groups of this many consecutive devices (8 within a node of 8, then all).
      bandwidth: bytes per second and device, in one direction, when all devices of the group send at once.
      latency: seconds per message.
    """

    devices: int
    bandwidth: float
    latency: float
