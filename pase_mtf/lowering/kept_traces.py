"""What operations become on a device, kept on disk: to lower the same operations again is most of what a second search
by measured kernels takes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import sqlite3
import threading
from collections.abc import Hashable

from pase_mtf.lowering.traces import Trace
from pase_mtf.operations.lowering_key import lasting_text

__all__ = ["KeptTraces"]

_MOST = 100_000
"""Traces that a file holds; the oldest ones go."""
_SEAL = 16
"""Characters of the digest that a trace begins with."""
_PATIENCE = 1.0
"""Seconds that another process may write."""


class KeptTraces:
    """Traces of operations in a file of SQLite, which several processes read and write.

    A file that cannot be read or written is no reason to fail: nothing is kept then. One that is damaged is begun anew.
    """

    def __init__(self, path: str | os.PathLike[str], code: str) -> None:
        """Opens the file, or makes it.

        Args:
          path: of the file.
          code: what tells the versions of all packages that lower: what those of others made is not looked at.
        """
        self._path, self._code = pathlib.Path(path), code
        self._file: sqlite3.Connection | None = None
        self._alone = threading.RLock()
        with contextlib.suppress(OSError, sqlite3.Error):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._path.unlink()
                self._open()

    def _open(self) -> None:
        file = sqlite3.connect(self._path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        file.text_factory = bytes  # one text that is none any more is no error of the whole file
        try:
            file.execute("PRAGMA synchronous = OFF")  # what a crash of the computer takes is found out again
            file.execute("CREATE TABLE IF NOT EXISTS traces (key TEXT PRIMARY KEY, trace TEXT NOT NULL)")
            file.execute("DELETE FROM traces WHERE rowid <= (SELECT max(rowid) FROM traces) - ?", (_MOST,))
        except sqlite3.Error:
            file.close()
            raise
        self._file = file

    def close(self) -> None:
        """Closes the file: nothing is kept any more."""
        with self._alone:
            if self._file:
                self._file.close()
            self._file = None

    def get(self, key: Hashable) -> Trace | None:
        """What is kept of an operation.

        Args:
          key: equal for what becomes the same, of what `lasting_text` knows.
        """
        name = self._name(key)
        if name is None or self._file is None:
            return None
        try:
            row = self._run("SELECT trace FROM traces WHERE key = ?", name)
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        found = row[0] if row else None
        if not isinstance(found, bytes) or found != _sealed(name, found[_SEAL:]):
            return None  # somebody changed it; it is found out again
        return Trace.from_json(json.loads(found[_SEAL:]))

    def keep(self, key: Hashable, trace: Trace) -> None:
        """Keeps what an operation becomes, where that is the same in every process."""
        name = self._name(key)
        if name is None or self._file is None or not trace.lasting:
            return
        try:
            text = json.dumps(trace.to_json(), separators=(",", ":")).encode()
            self._run("INSERT OR REPLACE INTO traces VALUES (?, ?)", name, _sealed(name, text).decode())
        except sqlite3.Error as error:
            self._give_up(error)

    def _run(self, statement: str, *values: str) -> tuple[object, ...] | None:
        """The first row of what a statement finds; None where nothing is kept any more, too."""
        with self._alone:
            found: tuple[object, ...] | None = self._file.execute(statement, values).fetchone() if self._file else None
            return found

    def _give_up(self, error: sqlite3.Error) -> None:
        """Keeps nothing any more; the next process begins anew what is damaged."""
        self.close()
        if _is_damage(error):
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _name(self, key: Hashable) -> str | None:
        text = lasting_text(key)
        return text and hashlib.blake2b(f"{self._code} {text}".encode(), digest_size=16).hexdigest()


def _sealed(name: str, text: bytes) -> bytes:
    """A trace behind a digest of its name and itself: SQLite does not tell what a bad disk or another tool has changed,
    and another digit would be priced."""
    return hashlib.blake2b(name.encode() + text, digest_size=_SEAL // 2).hexdigest().encode() + text


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether a file is no database, or not whole; else it is locked, or on a disk that is full or read-only."""
    return any(words in str(error) for words in ("malformed", "not a database"))
