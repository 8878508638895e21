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
      allowed: the relative difference that would have passed.
    """

    step: int
    arm: str
    loss: float
    reference: str
    expected: float
    allowed: float

    def __str__(self) -> str:
        if math.isfinite(self.loss) and math.isfinite(self.expected):
            difference = abs(self.loss - self.expected) / max(abs(self.expected), 1e-6)
            how = f"relative difference {difference:.1e}, allowed {self.allowed:.1e}"
        else:
            how = "not finite"
        return (f"losses disagree at step {self.step}: {self.arm} {self.loss:.7g}, {self.reference} "
                f"{self.expected:.7g} ({how}); this strategy's numbers must not be used, please report it")


def tolerance(steps: int) -> float:
    """Relative difference allowed after this many steps from common values.

    float32 sums in another order differ by about 1e-6; every update hands the difference on and training amplifies
    it. 1e-3 lets no wrong gradient pass on the first steps, and grows by a tenth of itself per step up to 5 %.
    """
    return min(1e-3 * (1 + steps / 10), 5e-2)


def first_disagreement(losses: Mapping[str, Sequence[float]], first_step: int = 0) -> Disagreement | None:
    """Compares every arm with the first one, step by step, over the steps that both have done.

    Args:
      losses: arm -> loss per step; the first arm is the reference.
      first_step: number of the first of these steps, for the report.

    Returns:
      None where all agree.
    """
    reference, *others = losses
    for step, expected in enumerate(losses[reference]):
        for arm in others:
            if step >= len(losses[arm]):
                continue
            loss = losses[arm][step]
            allowed = tolerance(step)
            if not agree(loss, expected, allowed):
                return Disagreement(first_step + step, arm, loss, reference, expected, allowed)
    return None


def agree(loss: float, expected: float, allowed: float) -> bool:
    """Whether two losses are the same up to a relative difference; two that both diverged (NaN) are."""
    if math.isnan(loss) or math.isnan(expected):
        return math.isnan(loss) and math.isnan(expected)
    if math.isinf(loss) or math.isinf(expected):
        return loss == expected
    return abs(loss - expected) <= allowed * max(abs(expected), 1e-6)
