"""Ctrl-C, SIGTERM and SIGHUP (a terminal was closed): at once while nothing is measured, between two steps afterwards,
and never in the middle of a file."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from pase_mtf._early_signals import SIGNALS

__all__ = ["LAST_WISH", "ONE_WISH", "SIGNALS", "Interrupts"]

ONE_WISH = 0.5
"""Seconds within which signals are one wish: `timeout` and schedulers send one to a process and to its group."""

_AGAIN = 0.01
"""Seconds after which a KeyboardInterrupt that was dropped is raised once more."""

LAST_WISH = 2
"""The wish after which a run still writes its files; over processes a launcher ends all of them at the next."""


class Interrupts:
    """Takes these signals while it is entered (in the main thread; others are never interrupted).

    The first signal raises KeyboardInterrupt; after `hold` it is only remembered. Python drops a KeyboardInterrupt that
    strikes within a destructor or a callback (of the library that loads compiled code, say): such a one is raised once
    more a moment later, until it arrives. What fails in a destructor because something was interrupted is not shown.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, at_once: bool = True) -> None:
        """Takes none yet.

        Args:
          clock: seconds.
          at_once: whether the first raises from the beginning, and not only after `listen`.
        """
        self._clock = clock
        self._last_wish, self._later, self._elsewhere = 0.0, 0, 0
        self._asked: list[int] = []
        self._told: list[int] = []
        self._held, self._dropped, self._raised = not at_once, False, False
        self._before: list[object] = []
        self._hook = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = [signal.signal(number, self._strike) for number in SIGNALS]
            self._hook, sys.unraisablehook = sys.unraisablehook, self._drop
        return self

    def __exit__(self, *unused: object) -> None:
        if self._before:
            sys.unraisablehook = self._hook
        for number, handler in zip(SIGNALS, self._before, strict=False):
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def asked(self) -> bool:
        """Whether somebody wants the run to end."""
        return bool(self._asked or self._told)

    @property
    def insisted(self) -> bool:
        """Whether somebody wants that at once: another signal came a while after the first."""
        return self.wishes > 1

    @property
    def wishes(self) -> int:
        """How often somebody wanted the run to end: signals within half a second are one wish, as are those that came
        to several processes."""
        return max(bool(self._asked) + self._later, self._elsewhere)

    def take(self, number: int, wish: int = 1) -> None:
        """Takes what came to another process of the run; a scheduler sends one signal to all of them.

        Args:
          number: of the signal.
          wish: which of those there.
        """
        if number == signal.SIGHUP and number not in SIGNALS:
            number = signal.SIGTERM  # nohup is for the terminal here, and the processes here do not heed SIGHUP
        if number in SIGNALS:
            self._told.append(number)
            self._elsewhere = max(self._elsewhere, wish)

    @property
    def exit_code(self) -> int | None:
        """What a shell expects of a process that the first of the signals ended: 130, 143 or 129; None without any."""
        return 128 + (self._asked or self._told)[0] if self.asked else None

    @property
    def unanswered(self) -> bool:
        """Whether KeyboardInterrupt was raised, and nobody has answered it: what fails now fails for that."""
        return self._raised

    def answer(self) -> int:
        """The exit code, for whoever catches the KeyboardInterrupt and has something to do yet, which may fail."""
        self._raised = False
        return self.exit_code or 128 + signal.SIGINT

    def listen(self) -> None:
        """From here on the first signal raises.

        Raises:
          KeyboardInterrupt: there was one already.
        """
        self._held = False
        if self._asked:
            self._held = self._raised = True
            raise KeyboardInterrupt

    def only_remember(self) -> None:
        """From here on no signal raises: whoever looks at none any more is about to end."""
        self._held, self._dropped = True, False

    def hold(self) -> None:
        """From here on a signal is only remembered: whoever holds looks at `asked` between two steps.

        Raises:
          KeyboardInterrupt: there was one already, and it was dropped.
        """
        self._held, self._dropped = True, False
        if self._asked:
            raise KeyboardInterrupt

    def _drop(self, dropped: sys.UnraisableHookArgs) -> None:
        """Takes what Python is about to drop; shows what is not ours."""
        if not issubclass(dropped.exc_type, KeyboardInterrupt) or not self._asked:
            if not self._raised:
                self._hook(dropped)
        elif not self._dropped:
            self._dropped = True
            # From another thread: raised here and now, it would be dropped again.
            again = threading.Timer(_AGAIN, signal.pthread_kill, (threading.main_thread().ident, self._asked[0]))
            again.daemon = True
            again.start()

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self._dropped:
            self._dropped = False
            raise KeyboardInterrupt
        now = self._clock()
        if not self._asked:
            self._last_wish = now
        elif now - self._last_wish >= ONE_WISH:
            self._last_wish = now
            self._later += 1
        self._asked.append(number)
        if not self._held:
            self._held = self._raised = True  # the next must not strike while this one cleans up
            raise KeyboardInterrupt
