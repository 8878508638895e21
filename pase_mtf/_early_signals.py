"""Ctrl-C, SIGTERM and SIGHUP while a program's modules are still being imported: a line and the exit code, and no
traceback.

To import this module is to take them, where the program is one of `python -m pase_mtf....` and not otherwise. `import
pase_mtf` does so before all else. Once they are imported, commands put `pase_mtf.interrupts` in their place.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["SIGNALS"]

SIGNALS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
    SIGNALS = (*SIGNALS, signal.SIGHUP)
_PROGRAMS = {f"pase_mtf.{name}" for name in ("launch", "calibration", "epochs", "layout", "search", "strategy.compile")}


def _end(number: int, frame: FrameType | None) -> None:
    # Nothing is there yet to be closed or removed, and half-imported modules are not to be left by an exception.
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


_WORDS = [word.partition("m")[2] if word[:1] == "-" else word for word in sys.orig_argv]  # "-mpase_mtf.launch", too
if sys.argv[:1] == ["-m"] and _PROGRAMS.intersection(_WORDS):  # Python looks for the module to run
    for _number in SIGNALS:
        signal.signal(_number, _end)
