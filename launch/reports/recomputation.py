"""What a run says of the blocks that it has chosen to compute again in the backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from pase_mtf.amounts import bytes_text
from pase_mtf.errors import InfeasibleError
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.search.registry import relative_gap
from pase_mtf.strategy.within import Priced, frontier_of

__all__ = ["Recomputation"]


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """What was chosen to be computed again, and among what.

    Attributes:
      blocks: names.
      of: how many there are.
      tried: names of a set of blocks -> what its strategies take, for all that were looked at.
      lower_bound: seconds of a step within the limit, of whatever set that is offered.
      seconds: predicted, of the best strategy with these blocks.
      limit: bytes per device.
    """

    blocks: tuple[str, ...]
    of: int
    tried: dict[tuple[str, ...], Priced]
    lower_bound: float
    seconds: float
    limit: float

    @property
    def gap(self) -> float:
        """By what fraction another set may be cheaper; 0: proven that none is."""
        return max(0.0, relative_gap(self.seconds, self.lower_bound))

    def text(self) -> str:
        """For people, a line."""
        best = self.tried[self.blocks]
        chosen = ", ".join(self.blocks) or "none"
        proof = "proven to be the fastest" if self.gap <= 0.0 else f"others may be {100 * self.gap:.2g} % faster"
        kept = self.tried.get(())
        beside = "" if not self.blocks or kept is None else (
            "; without, no strategy fits" if math.isinf(kept.seconds) else f"; without, {1e3 * kept.seconds:.2f} ms")
        return (f"computed again: {chosen} of {self.of} blocks: {1e3 * self.seconds:.2f} ms a step in "
                f"{bytes_text(best.nbytes)} per device{beside}; {proof} of {len(self.tried)} sets looked at")

    def frontiers(self, points: int = 8, time_limit: float = 0.5) -> dict[str, tuple[FrontierPoint, ...]]:
        """What memory buys with no block computed again, and with all: the fastest strategies within limits
        (`strategy.within.frontier_of`); without those that cannot be told in a few seconds."""
        ends = {"nothing": min(self.tried, key=len), "all blocks": max(self.tried, key=len)}
        found = {}
        for name, blocks in ends.items():
            if (network := self.tried[blocks].network) is not None and blocks != self.blocks:
                with contextlib.suppress(InfeasibleError):
                    found[f"{name} computed again"] = frontier_of(network, points, time_limit)
        return found

    def to_json(self) -> dict[str, object]:
        """As summary.json has it."""
        return {"blocks": list(self.blocks), "of": self.of, "seconds": self.seconds, "gap": self.gap, "tried": [
            {"blocks": list(names), "seconds": priced.seconds, "bytes": priced.nbytes}
            for names, priced in self.tried.items() if math.isfinite(priced.seconds)]}
