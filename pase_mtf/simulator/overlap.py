"""The one factor that brings sums of costs nearest to simulated steps: how much of what may be hidden is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["fitted_overlap"]


def fitted_overlap(sums: Sequence[float], hideable: Sequence[float], simulated: Sequence[float]) -> float | None:
    """Fits `simulated = sum - overlap * hideable` over some strategies, by least squares of relative errors.

    Args:
      sums: seconds of a step of each, everything one after the other.
      hideable: of these, what the backward pass may hide: the all-reduces of weights' gradients.
      simulated: seconds of a step of each, as it was simulated; of 0 s they tell nothing.

    Returns:
      From 0 to 1; None where there is nothing to hide.
    """
    steps = np.asarray(simulated)
    taken = steps > 0.0
    fractions, excess = (np.asarray(seconds)[taken] / steps[taken] for seconds in (hideable, np.subtract(sums, steps)))
    if not fractions.any():
        return None
    (overlap,), *_ = np.linalg.lstsq(fractions[:, None], excess, rcond=None)
    return float(np.clip(overlap, 0.0, 1.0))
