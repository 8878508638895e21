"""What a search for a layout is doing, on the standard error, for those who wait for it."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

__all__ = ["Progress"]

_AFTER = 1.0  # seconds until something is shown
_EVERY = 0.5  # seconds; where the standard error is a file, it is not to be filled
_EVERY_IN_A_FILE = 10.0


class Progress:
    """A line on the standard error that appears once a search has taken a second. A context manager.

    A thread shows it: building a graph or exporting one is a single call for seconds, in which nobody would.
    """

    def __init__(self, name: str) -> None:
        self._name, self._text = name, ""
        self._file, self._start, self._done = sys.stderr, time.time(), threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def say(self, text: str) -> None:
        """What is done from now on."""
        self._text = text

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _show(self) -> None:
        if self._done.wait(_AFTER):
            return
        if not self._file.isatty():
            return self._tell()
        with tqdm(bar_format="{desc} [{elapsed}]", file=self._file, leave=False) as bar:
            bar.start_t = self._start
            while True:
                bar.set_description_str(f"{self._name}: {self._text}")
                if self._done.wait(_EVERY):
                    return

    def _tell(self) -> None:
        """Whole lines, for a file: what a bar takes back stays there, and what others say would stand behind it."""
        while True:
            seconds = time.time() - self._start
            print(f"{self._name}: {self._text} [{tqdm.format_interval(seconds)}]", file=self._file, flush=True)
            if self._done.wait(_EVERY_IN_A_FILE):
                return
