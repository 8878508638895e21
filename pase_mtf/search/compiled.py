"""Compiles the inner loops with numba, and keeps the compiled code on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast, overload

import numpy as np
from numba import njit, types

__all__ = ["compiled", "seconds_now"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def compiled(function: _Function) -> _Function: ...


@overload
def compiled(*, fastmath: bool | Collection[str] = False, inline: bool = False,
             ) -> Callable[[_Function], _Function]: ...


def compiled(function: Callable[..., Any] | None = None, *, fastmath: bool | Collection[str] = False,
             inline: bool = False) -> Callable[..., Any]:
    """Decorator: compiles a function on its first call.

    The compiled code is kept beside the module, or in the user's cache directory where that cannot be written
    (NUMBA_CACHE_DIR names another). Where neither can, it is compiled anew in every process instead of failing.

    Args:
      function: what to compile.
      fastmath: which of IEEE 754's rules need not be kept; as of numba.njit.
      inline: copy it into whatever compiled function calls it: handing over a dozen arrays takes a tenth of a
        microsecond. For small functions that are called in the innermost loops.
    """
    options = {"fastmath": fastmath, "inline": "always" if inline else "never"}

    def compile_(inner: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return cast(Callable[..., Any], njit(cache=True, **options)(inner))
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return cast(Callable[..., Any], njit(**options)(inner))
    return compile_ if function is None else compile_(function)


# The C library's; POSIX.
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
_MONOTONIC = time.CLOCK_MONOTONIC


@compiled
def seconds_now() -> float:  # pragma: no cover (compiled)
    """Seconds on a clock that never goes back, for compiled code that has to stop in time."""
    found = np.empty(2, np.int64)
    _clock_gettime(_MONOTONIC, found.ctypes)
    return float(found[0]) + 1e-9 * float(found[1])
