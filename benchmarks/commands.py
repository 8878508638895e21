"""What the commands of the benchmarks have in common."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec

from pase_mtf.errors import PaseError, UsageError
from pase_mtf.files import write_atomically

__all__ = ["check_results", "kept_when_interrupted", "told_in_one_line", "whole_numbers"]

_Arguments = ParamSpec("_Arguments")


def check_results(path: str | os.PathLike[str], nothing: str) -> None:
    """Writes a file of results as it is, before anything is measured for it: a row takes minutes.

    Args:
      path: of the file; its folder is made.
      nothing: what it holds where there is none yet.

    Raises:
      UsageError: it cannot be written.
    """
    file = pathlib.Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes() if file.exists() else nothing
    except OSError as error:
        raise UsageError(f"--output={file.parent}: cannot write {file.name} there: {error.strerror}; choose another "
                         "folder") from error
    write_atomically(file, content)


def whole_numbers(flag: str, text: str) -> list[int]:
    """The numbers of a flag (UsageError: they are none)."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--{flag}={text}: give whole numbers separated by commas, such as 8,16") from None


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


def kept_when_interrupted(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """Decorates a command that keeps its rows as they come: Ctrl-C, SIGTERM and SIGHUP end it in a line, with exit
    code 130, 143 or 129, once all that it has started is gone: who has a session of its own hears of none of them."""
    @functools.wraps(main)
    def command(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
        received: int | None = None

        def interrupted(number: int, frame: FrameType | None) -> None:
            nonlocal received
            if received is None:  # the next must not strike while this one cleans up
                received = number
                raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupted)
                  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                  if signal.getsignal(number) != signal.SIG_IGN}  # under nohup nobody is to hear of it
        try:
            return main(*arguments, **named)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("interrupted: hosts and processes are gone, rows that were done are kept", file=sys.stderr)
            return 128 + (received or signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return command
