"""Do the losses of all arms agree? A strategy changes where work is done, never what is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

__all__ = ["Disagreement", "first_disagreement", "tolerance"]


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """The first step at which an arm leaves the reference.

    Attributes:
      step: counted from the start of the training, not of this run.
      arm, loss: the arm that differs.
      reference, expected: the arm it is compared with.
      allowed: the difference that would have passed.
      start: the reference's first loss.
    """

    step: int
    arm: str
    loss: float
    reference: str
    expected: float
    allowed: float
    start: float = math.inf

    def __str__(self) -> str:
        if math.isfinite(self.loss) and math.isfinite(self.expected):
            how = f"difference {abs(self.loss - self.expected):.1e}, allowed {self.allowed:.1e}"
        else:
            how = "not finite"
        what = (f"losses disagree at step {self.step}: {self.arm} {self.loss:.7g}, {self.reference} "
                f"{self.expected:.7g} ({how}); ")
        if min(self.loss, self.expected) > _DIVERGED * abs(self.start):
            # Then rounding decides where it goes.
            return f"{what}the training diverges, the first loss was {self.start:.7g}: lower --learning_rate"
        return f"{what}this strategy's numbers must not be used, please report it"


_DIVERGED = 2.0  # times the first loss, of both arms


def tolerance(steps: int) -> float:
    """Difference allowed after this many steps from common values, relative to the size of the loss.

    Strict where a wrong result would show, generous where it could not be told from rounding: float32 sums in another
    order differ by 1e-7, and training multiplies that by about two per step until it saturates (a ReLU or a maximum
    that tips over for one device count and not for another). Measured, AlexNet on Fashion-MNIST under three strategies:
    below 2e-7 for five steps, 5e-4 at step 9, never above 1.7e-2 in 200 steps. A wrong gradient shows in steps 1 to 5.
    """
    return min(1e-5 * 2.0 ** min(steps, 60), 5e-2)


def first_disagreement(losses: Mapping[str, Sequence[float]], first_step: int = 0) -> Disagreement | None:
    """Compares every arm with the first one, step by step, over the steps that both have done.

    Differences are measured against the loss or, where that has fallen below it, the loss of the first step: late in a
    training the loss of a single batch may be next to nothing.

    Args:
      losses: arm -> loss per step; the first arm is the reference.
      first_step: number of the first of these steps, for the report.

    Returns:
      None where all agree.
    """
    reference, *others = losses
    for step, expected in enumerate(losses[reference]):
        start = losses[reference][0]
        scale = max([abs(value) for value in (start, expected) if math.isfinite(value)], default=0.0)
        allowed = tolerance(step) * max(scale, 1e-6)
        for arm in others:
            if step < len(losses[arm]) and not agree(losses[arm][step], expected, allowed):
                return Disagreement(first_step + step, arm, losses[arm][step], reference, expected, allowed,
                                    losses[reference][0])
    return None


def agree(loss: float, expected: float, allowed: float) -> bool:
    """Whether two losses are the same up to a difference; two that both diverged (NaN) are."""
    if math.isnan(loss) or math.isnan(expected):
        return math.isnan(loss) and math.isnan(expected)
    if math.isinf(loss) or math.isinf(expected):
        return loss == expected
    return abs(loss - expected) <= allowed
