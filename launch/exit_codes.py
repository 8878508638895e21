"""Exit codes, and how every error that a user can cause becomes one line on stderr and one of them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from pase_mtf.errors import OutOfMemoryError, PaseError, UsageError
from pase_mtf.launch.command_line import HelpRequested

__all__ = ["BROKEN_PIPE", "INTERRUPTED", "LOSSES_DISAGREE", "exit_code_of"]

# 2 to 5 stand with the errors in pase_mtf.errors.
LOSSES_DISAGREE = 6
INTERRUPTED = 130
BROKEN_PIPE = 141


def exit_code_of(run: Callable[[], int]) -> int:
    """Calls `run` and returns its exit code, or that of the error it ended with."""
    try:
        return run()
    except HelpRequested as text:
        print(text)
        return 0
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output went away (`| head`); Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError:
        error: PaseError = OutOfMemoryError("out of memory; take a smaller --batch or --preset, or fewer arms")
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        error = UsageError(f"disk full ({problem.filename or 'while writing'}); free space or choose another place")
    except PaseError as problem:
        error = problem
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code
