"""What a run says of how it keeps to the memory: in how many microbatches, and with which blocks computed again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import NamedTuple

from pase_mtf.amounts import bytes_text, gap_text
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.strategy.choosing import gap_above
from pase_mtf.strategy.within import Priced, frontier_of

__all__ = ["Choice", "Fitting"]


class Choice(NamedTuple):
    """What makes one program of a run.

    Attributes:
      microbatches: in how many pieces the batch is computed.
      blocks: names of those that are computed again in the backward pass.
    """

    microbatches: int
    blocks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Fitting:
    """What was chosen so that the memory suffices, and among what.

    Attributes:
      choice: the program.
      in_pieces: whether the number of microbatches was open.
      of: how many blocks might have been computed again; None: that was not open.
      tried: program -> what its strategies take, for all that were looked at.
      lower_bound: seconds of a step within the limit, of whatever program that is offered.
      seconds: predicted, of the best strategy of the choice.
      limit: bytes per device.
      then_measured: whether the strategy of the choice is then searched by measured kernels, which may order programs
        otherwise than the rates of the machine do.
    """

    choice: Choice
    in_pieces: bool
    of: int | None
    tried: dict[Choice, Priced]
    lower_bound: float
    seconds: float
    limit: float
    then_measured: bool = False

    @property
    def configurations(self) -> tuple[Configuration, ...] | None:
        """Of the best strategy of the choice, one per layer; None where it was not searched."""
        return self.tried[self.choice].configurations

    @property
    def gap(self) -> float:
        """By what fraction it takes longer than the fastest program, at most; 0: proven that none is faster."""
        return gap_above(self.seconds, self.lower_bound)

    def text(self) -> str:
        """For people, a line."""
        count, blocks = self.choice
        parts = [f"microbatches: {count}"] * self.in_pieces
        parts += [] if self.of is None else [f"computed again: {', '.join(blocks) or 'none'} of {self.of} blocks"]
        proof = ("proven to be the fastest" if self.gap <= 0.0 else
                 gap_text(self.gap, "the fastest") if math.isfinite(self.gap) else "the fastest")
        return (f"{', '.join(parts)}: {1e3 * self.seconds:.2f} ms a step in "
                f"{bytes_text(self.tried[self.choice].nbytes)} per device{self._beside()}; {proof} of "
                f"{len(self.tried)} programs looked at{', by the rates of the machine' * self.then_measured}")

    def _beside(self) -> str:
        """What the fastest of the others take: that computes nothing again, and those in other microbatches."""
        count, blocks = self.choice
        others = {"nothing computed again": [priced for choice, priced in self.tried.items() if choice == (count, ())]
                  } if blocks and self.of is not None else {}
        for choice, priced in sorted(self.tried.items()):
            if choice.microbatches != count:
                others.setdefault(f"in {choice.microbatches}", []).append(priced)
        seconds = {name: min(priced.seconds for priced in all_of) for name, all_of in others.items() if all_of}
        told = [f"{name}: {'none found' if math.isinf(least) else f'{1e3 * least:.2f} ms'}"
                for name, least in seconds.items()]
        return f" ({', '.join(told)})" if told else ""

    def frontiers(self, points: int = 8, time_limit: float = 0.5) -> dict[str, tuple[FrontierPoint, ...]]:
        """What memory buys in as many microbatches with no block computed again, and with all: the fastest strategies
        within limits (`strategy.within.frontier_of`); without those that cannot be told in a few seconds."""
        if self.then_measured:  # what was chosen is drawn by measured kernels: these, by rates, are no match for it
            return {}
        alike = [choice for choice in self.tried if choice.microbatches == self.choice.microbatches]
        # Where a bound told enough, these two were not looked at: no other is called so.
        named = {0: "nothing", self.of: "all blocks"} if self.of else {}
        ends = {named[len(choice.blocks)]: choice for choice in alike if len(choice.blocks) in named}
        found = {}
        for name, choice in ends.items():
            if (network := self.tried[choice].network) is not None and choice != self.choice:
                with contextlib.suppress(InfeasibleError):
                    found[f"{name} computed again"] = frontier_of(network, points, time_limit)
        return found

    def to_json(self) -> dict[str, object]:
        """As summary.json has it."""
        return {"microbatches": self.choice.microbatches, "blocks": list(self.choice.blocks), "of": self.of,
                "seconds": self.seconds, "gap": self.gap, "tried": [
                    {"microbatches": choice.microbatches, "blocks": list(choice.blocks), "seconds": priced.seconds,
                     "bytes": priced.nbytes}
                    for choice, priced in self.tried.items() if math.isfinite(priced.seconds)]}
