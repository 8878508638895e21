"""What the commands of the benchmarks have in common."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from pase_mtf.errors import PaseError

__all__ = ["told_in_one_line"]

_Arguments = ParamSpec("_Arguments")


def told_in_one_line(*others: type[Exception]) -> Callable[[Callable[_Arguments, int]], Callable[_Arguments, int]]:
    """Decorates a command so that what a user can cause is one line on the standard error, and the exit code of it.

    Args:
      others: further exceptions that are told so, with exit code 2.
    """
    def decorated(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
        @functools.wraps(main)
        def command(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
            try:
                return main(*arguments, **named)
            except (PaseError, *others) as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code if isinstance(error, PaseError) else 2
        return command
    return decorated
