"""What a run spends before its first step, by what it spends it on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from pase_mtf.calibration.cache import seconds_waited

__all__ = ["Spent"]

_WORDS = {"compiling": "compiling", "reference_kernels": "reference kernels", "kernels": "measuring kernels",
          "search": "searching", "trial_steps": "trial steps", "waiting": "waiting for another run's measuring"}
_TOLD = 0.05


class Spent:
    """Seconds that planning a run has taken.

    Attributes:
      seconds: on "compiling" what searches run (or loading it), "reference_kernels" (where prices are those of rates
        and links, on measuring or reading these), "kernels" (measuring those that the search asks for), "search"
        (without that), "trial_steps"; on "waiting", until another run had measured its kernels, which is in none of the
        others. What it takes to export and to lower a program is none of them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter,
                 waited: Callable[[], float] = seconds_waited) -> None:
        """Nothing yet.

        Args:
          clock: seconds.
          waited: seconds that this process has waited for others, ever.
        """
        self._clock, self._waited = clock, waited
        self.seconds = dict.fromkeys(_WORDS, 0.0)

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """What is done within is spent on that."""
        begin, before = self._clock(), self._waited()
        try:
            yield
        finally:
            self.seconds[what] += self._clock() - begin
            self.of("waiting", self._waited() - before, out_of=what)

    def of(self, what: str, seconds: float, out_of: str) -> None:
        """So many seconds of what was taken for one thing were spent on another."""
        self.seconds[what] += seconds
        self.seconds[out_of] -= seconds

    def text(self) -> str:
        """A line for people, of what took long enough to be told."""
        told = [f"{_WORDS[what]} {seconds:.1f} s" for what, seconds in self.seconds.items() if seconds >= _TOLD]
        return f"planning took {sum(self.seconds.values()):.1f} s" + (f": {', '.join(told)}" if told else "")
