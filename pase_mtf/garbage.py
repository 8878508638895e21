"""Python's garbage collector while a large graph is built, read or written."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["uncollected"]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python does not look for cycles of garbage inside.

    A Mesh-TF graph is millions of objects that live until the end, and whoever builds or reads it makes as many. The
    collector goes through all of them again and again, for nothing: that is half of the time. What is made and thrown
    away in between without cycles is freed all the same.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
