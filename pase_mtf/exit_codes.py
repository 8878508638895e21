"""How a command ends: every error a user can cause is one line and an exit code, whatever becomes of its output."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from pase_mtf.errors import OutOfMemoryError, PaseError, UsageError
from pase_mtf.interrupts import Interrupts

__all__ = ["BROKEN_PIPE", "INTERRUPTED", "HelpRequested", "Output", "exit_code_of", "let_go"]

# 2 to 5, and 7, stand with the errors in pase_mtf.errors.
INTERRUPTED = 130
BROKEN_PIPE = 141

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOLD = (errno.EPIPE, *_FULL)
"""Errors of an output that `exit_code_of` knows; others are of a terminal that was closed, say (EIO)."""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """--help was given; the text is the message."""


class Output:
    """Stands for a stream that may go away: from the first write that fails on, all is dropped.

    Attributes:
      lost: what the command is to end with, as that write failed; None while none has.
    """

    def __init__(self, stream: TextIO):
        """Takes the stream."""
        self._stream = stream
        self.lost: OSError | UsageError | None = None

    def __getattr__(self, name: str) -> Any:  # whether it is a terminal, say
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Writes what was held back, or drops it."""
        self._try(self._stream.flush)

    def _try(self, do: Callable[..., object], *arguments: str) -> None:
        if self.lost is None:
            try:
                do(*arguments)
            except OSError as error:
                self.lost = error if error.errno in _TOLD else UsageError(
                    f"what it prints cannot be written ({error.strerror}); see to where its output goes")
                let_go(self._stream)


def exit_code_of(run: Callable[[], int], interrupts: Interrupts | None = None, *, smaller: str,
                 interrupted: str = "interrupted before anything was measured") -> int:
    """Calls `run` and returns its exit code, or that of the error it ended with.

    Args:
      run: the command.
      interrupts: of this process; they know which signal ended it. They raise while `run` does what it does, and
        neither before nor after.
      smaller: what to do where memory runs out, in the words of the command's flags.
      interrupted: what to say where a signal ends it.
    """
    with _none_is_missing(), _errors_that_may_go():
        try:
            code, line = _ended(run, interrupts, smaller, interrupted)
        finally:
            let_go(sys.stdout)
        if line:
            print(line, file=sys.stderr)
        let_go(sys.stderr)
    # Python counts a KeyboardInterrupt that left an `exec` (of numba's) as not caught until the next `exec`, and would
    # end by SIGINT.
    exec("")
    return code


@contextlib.contextmanager
def _none_is_missing() -> Iterator[None]:
    """Python has None in the place of a stream that was closed before it began: progress bars fail there, and errors
    would be printed to the standard output. In this context such a stream takes all and keeps nothing."""
    with contextlib.ExitStack() as stack:
        # In the order of their file descriptors, which these get where nobody has them: what C++ says goes there, too.
        for stream, redirect in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if stream is None:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect(nowhere))
        yield


@contextlib.contextmanager
def _errors_that_may_go() -> Iterator[None]:
    """No write to the standard error fails in this context: exit codes tell it, too, and a launcher has others to look
    after."""
    with contextlib.redirect_stderr(cast(TextIO, Output(sys.stderr))):
        yield


def _ended(run: Callable[[], int], interrupts: Interrupts | None, smaller: str, interrupted: str) -> tuple[int, str]:
    """(the exit code, what to say)."""
    try:
        if interrupts:
            interrupts.listen()
        code = _written(run)
        if interrupts:
            interrupts.only_remember()
        return code, ""
    except (KeyboardInterrupt, Exception) as problem:
        if interrupts:
            interrupts.only_remember()
        # A library that is interrupted may say that it failed, whatever is told of that.
        if isinstance(problem, KeyboardInterrupt) or (interrupts and interrupts.unanswered):
            return interrupts.answer() if interrupts else INTERRUPTED, interrupted
        if isinstance(problem, BrokenPipeError):  # whoever read our output went away (`| head`)
            return BROKEN_PIPE, ""
        error = _error_of(problem, smaller)
        if error is None:
            raise
        return error.exit_code, f"error: {error}"


def _error_of(problem: BaseException, smaller: str) -> PaseError | None:
    """What is told of a problem in one line; None: no user causes it."""
    if isinstance(problem, MemoryError):
        return OutOfMemoryError(f"out of memory; {smaller}")
    if isinstance(problem, OSError) and problem.errno in _FULL:
        return UsageError(f"disk full ({problem.filename or 'while writing'}); free space or choose another place")
    return problem if isinstance(problem, PaseError) else None


def _written(run: Callable[[], int]) -> int:
    """Runs the command until all that it prints is where it belongs: a pipe or a file is written late."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be UTF-8
    try:
        code = run()
    except HelpRequested as text:
        print(text)
        code = 0
    except SystemExit:  # argparse's, when it has shown its help
        print(end="", flush=True)
        raise
    print(end="", flush=True)
    return code


def let_go(stream: TextIO) -> None:
    """Drops what could not be written to a stream: Python would try once more at its end, and complain."""
    try:
        print(end="", file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
