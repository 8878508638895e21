"""Whether devices that hold the same part of a variable hold the same, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

__all__ = ["Sketch", "differ", "sketch", "sketches_differ"]

Sketch: TypeAlias = list[float]
"""A few numbers that tell two arrays apart: how far rounding may move the others, and these, sums over random signs."""

_ROUNDINGS = 1e3
"""So many times the rounding of the largest element may be between two replicas."""

_SUMS = 4


def differ(replicas: Sequence[np.ndarray]) -> bool:
    """Whether one of the replicas has an element that differs from the first's."""
    return any(_differ(replicas[0], other) for other in replicas[1:])


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    difference = np.abs(other - one).max(initial=0.0)
    return bool(np.isfinite(difference) and difference > _allowed(one))


def _allowed(one: np.ndarray) -> float:
    return float(_ROUNDINGS * np.finfo(one.dtype).eps * np.abs(one).max(initial=0.0))


def sketch(value: np.ndarray) -> Sketch:
    """What a process tells others of an array, so that they can compare theirs without having it.

    Sums over random signs, the same on all of them: of n elements that are off by d, a sum is off by d times the root
    of n, as likely as not; and so are sums of n roundings.
    """
    flat = np.asarray(value, np.float64).ravel()
    generator = np.random.default_rng(flat.size)
    sums = [float(np.where(generator.random(flat.size, np.float32) < 0.5, -flat, flat).sum()) for _ in range(_SUMS)]
    return [_allowed(value) * math.sqrt(flat.size), *sums]


def sketches_differ(sketches: Sequence[Sketch]) -> bool:
    """Whether one of the arrays that these were made of differs from the first, in many elements or by much."""
    if not sketches:
        return False
    allowed, *sums = sketches[0]
    differences = [abs(mine - theirs) for _, *others in sketches[1:] for mine, theirs in zip(sums, others, strict=True)]
    return any(math.isfinite(difference) and difference > allowed for difference in differences)
