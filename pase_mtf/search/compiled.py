"""Compiles the inner loops with numba, and keeps the compiled code on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compiled"]


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Decorator: compiles a function on its first call.

    The compiled code is kept beside the module, or in the user's cache directory where that cannot be written
    (NUMBA_CACHE_DIR names another). Where neither can, it is compiled anew in every process instead of failing.

    Args:
      function: what to compile.
      **options: of numba.njit.
    """
    if function is None:
        return lambda inner: compiled(inner, **options)
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return njit(**options)(function)
