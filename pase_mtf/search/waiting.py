"""The parts of a branch and bound that wait to be explored."""

from __future__ import annotations

import heapq

import numpy as np

__all__ = ["Waiting"]

# What a part takes besides its bits.
_BYTES_PER_NODE = 256


class Waiting:
    """Parts that wait to be explored: the one with the lowest bound comes first, or once they fill their room the one
    that came last, so that there are never more than that and those along one path."""

    def __init__(self, configurations: int, room: float) -> None:
        """Takes parts of a network with so many configurations, and keeps as many in order as fit so many bytes."""
        self._configurations = configurations
        self._most = room / (configurations / 8 + _BYTES_PER_NODE)
        self._ordered: list[tuple[float, int, np.ndarray]] = []  # a heap; the number makes the order definite
        self._last: list[tuple[float, np.ndarray]] = []
        self._number = 0

    @property
    def bound(self) -> float:
        """The lowest of them; inf if there are none."""
        return min(self._ordered[0][0] if self._ordered else np.inf,
                   min((bound for bound, _ in self._last), default=np.inf))

    def add(self, bound: float, active: np.ndarray) -> None:
        """Takes a part: bool [configurations]."""
        bits = np.packbits(active)
        if len(self._ordered) < self._most:
            self._number += 1
            heapq.heappush(self._ordered, (bound, self._number, bits))
        else:
            self._last.append((bound, bits))

    def next(self, below: float) -> tuple[float, np.ndarray] | None:
        """Takes out the next one whose bound is below that; None if there is none."""
        while self._last or self._ordered:
            bound, *_, bits = self._last.pop() if self._last else heapq.heappop(self._ordered)
            if bound < below:
                return bound, np.unpackbits(bits, count=self._configurations).astype(bool)
        return None
