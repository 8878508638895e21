"""Whether devices that hold the same part of a variable hold the same, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from pase_mtf.compat import tf

__all__ = ["Sketch", "differ", "sketch", "sketched", "sketches_differ"]

Sketch: TypeAlias = list[float]
"""Numbers that tell two arrays apart: how far rounding may move the others, and these, sums with random weights."""

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

    Sums with random weights, the same for all who have so many elements: of n elements that are off by d, a sum is off
    by d times the root of n, as likely as not; and so are sums of n roundings. The array is folded, and the weights are
    products of one for the row and one for the column: few are drawn.
    """
    rows, columns = _fold(value.size)
    generator = np.random.default_rng(value.size)
    of_rows, of_columns = (generator.standard_normal((_SUMS, number)) for number in (rows, columns))
    sums = (of_rows @ np.asarray(value, np.float64).reshape(rows, columns) * of_columns).sum(1)
    return [_allowed(value) * math.sqrt(value.size), *sums.tolist()]


def sketched(value: tf.Tensor) -> tf.Tensor:
    """The sketch of an array, made on the device that holds it, so that nothing else travels to the client; with other
    weights than those of `sketch`.

    Args:
      value: of a shape that is known.
    """
    elements = value.shape.num_elements()
    rows, columns = _fold(elements)
    exact = value.dtype if value.dtype == tf.float64 else tf.float32
    allowed = _ROUNDINGS * float(np.finfo(value.dtype.as_numpy_dtype).eps) * math.sqrt(elements)
    with tf.device(value.device):
        of_rows, of_columns = (tf.raw_ops.StatelessRandomNormal(shape=[_SUMS, number], seed=[elements, seed],
                                                                dtype=exact)
                               for seed, number in enumerate((rows, columns)))
        folded = tf.reshape(tf.cast(value, exact), [rows, columns])
        sums = tf.reduce_sum(tf.matmul(of_rows, folded) * of_columns, 1)
        return tf.concat([[allowed * tf.reduce_max(tf.abs(folded))], sums], 0)


def _fold(elements: int) -> tuple[int, int]:
    """Rows and columns, no more than rows, of so many elements."""
    columns = next((number for number in range(math.isqrt(elements), 0, -1) if elements % number == 0), 1)
    return elements // columns, columns


def sketches_differ(sketches: Sequence[Sketch | np.ndarray]) -> bool:
    """Whether one of the arrays that these were made of differs from the first, in many elements or by much."""
    if not sketches:
        return False
    allowed, *sums = sketches[0]
    differences = [abs(mine - theirs) for _, *others in sketches[1:] for mine, theirs in zip(sums, others, strict=True)]
    return any(math.isfinite(difference) and difference > allowed for difference in differences)
