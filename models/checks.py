"""What is checked of the sizes of every model: one line that names the value and says what to do; and what these divide
by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from pase_mtf.errors import UsageError, nearest, shortened

__all__ = ["DTYPES", "OPTIMIZERS", "among", "check_run", "divisors", "kept_dtype", "positive"]

OPTIMIZERS = ("adafactor", "adam", "sgd")
DTYPES = ("bfloat16", "float32", "float64")
_NARROW = {"bfloat16": "float32"}
# Mesh-TF feeds indices as 32-bit integers.
_MOST = 2 ** 31 - 1


class _RunConfig(Protocol):
    """What is read here of the sizes of every model."""

    @property
    def learning_rate(self) -> float:
        """Of the optimizer."""

    @property
    def dropout(self) -> float:
        """A rate; 0: none."""


def positive(config: object, *names: str) -> None:
    """Refuses attributes that are no size of a dim; of a tuple, any element (UsageError)."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, tuple):
            if not value:
                raise UsageError(f"{name}=[]: give at least one")
            if min(value) < 1:
                raise UsageError(f"{name}={shortened(list(value))}: every one has to be at least 1")
        elif value < 1:
            raise UsageError(f"{name}={shortened(value)}: it has to be at least 1")
        if (max(value) if isinstance(value, tuple) else value) > _MOST:
            raise UsageError(f"{name}={shortened(value)}: no size may exceed {_MOST}")


def divisors(size: int, most: int) -> list[int]:
    """The numbers from 1 up to `most` that a size divides by, ascending."""
    below = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    return sorted({number for pair in ((one, size // one) for one in below) for number in pair if number <= most})


def kept_dtype(dtype: str) -> str:
    """The type of what is kept from step to step, for a type of activations: eight bits would swallow most updates.

    Args:
      dtype: of DTYPES.

    Returns:
      The type of variables, optimizer slots, images and the loss (Micikevicius et al. 2018, "Mixed Precision Training",
      3.1, for float16).
    """
    return _NARROW.get(dtype, dtype)


def among(config: object, name: str, choices: Sequence[str]) -> None:
    """Refuses an attribute that is none of the choices (UsageError)."""
    if getattr(config, name) not in choices:
        raise UsageError(f"{name}={getattr(config, name)!r}; {nearest(getattr(config, name), choices)}")


def check_run(config: _RunConfig) -> None:
    """Checks what every model has: batch, optimizer, learning rate, type and dropout (UsageError)."""
    positive(config, "batch")
    among(config, "optimizer", OPTIMIZERS)
    among(config, "dtype", DTYPES)
    if not 0 < config.learning_rate < math.inf:
        raise UsageError(f"learning_rate={config.learning_rate}: give a finite number greater than 0")
    if not 0 <= config.dropout < 1:
        raise UsageError(f"dropout={config.dropout}: give a rate of at least 0 and less than 1")
