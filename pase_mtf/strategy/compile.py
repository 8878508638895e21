"""Compiles all that a search needs, and keeps it, so that no user has to wait for it.

    python -m pase_mtf.strategy.compile
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from pase_mtf.strategy.warm import compile_costs, compile_kernels, compile_searches

__all__ = ["main"]

_SEARCHES = "searches"
"""The argument of the process that is started beside."""


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """Compiles searches in another process meanwhile. What that comes to does not matter: it only saves time."""
    other = subprocess.Popen([sys.executable, "-m", "pase_mtf.strategy.compile", _SEARCHES], stdin=subprocess.PIPE,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    with other:
        yield
        other.wait()


def _end_with_parent() -> None:
    """Ends this process when the one that started it does, however that ends."""
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    """Compiles everything, in two processes as far as that goes. Returns the exit code, 0."""
    if sys.argv[1:] == [_SEARCHES]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        compile_searches()
        return 0
    with _beside():
        compile_costs()
    compile_kernels()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
