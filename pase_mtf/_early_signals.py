"""Ctrl-C and SIGTERM while the launcher's modules are still being imported: a line and the exit code, no traceback.

To import this module is to take them, where the program is `python -m pase_mtf.launch` (or `.calibration`) and not
otherwise. `import pase_mtf` does so before all else; the launcher puts its own handlers in their place once it is
imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["SIGNALS"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PROGRAMS = {"pase_mtf.launch", "pase_mtf.calibration"}


def _end(number: int, frame: FrameType | None) -> None:
    # Nothing is there yet to be closed or removed, and half-imported modules are not to be left by an exception.
    os.write(2, b"interrupted before anything was measured\n")
    os._exit(128 + number)


# Python looks for the module to run, and imports its package.
if sys.argv[:1] == ["-m"] and _PROGRAMS.intersection(sys.orig_argv):
    for _number in SIGNALS:
        signal.signal(_number, _end)
