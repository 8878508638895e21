"""The files of a run, in a folder that did not exist before."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

from pase_mtf.errors import UsageError
from pase_mtf.files import write_atomically
from pase_mtf.launch.error_text import what_happened
from pase_mtf.launch.training import Record

__all__ = ["RunFiles"]


class RunFiles:
    """Writes into the output directory; every failure to write is one line for the user.

    A context: on its end all files are closed, and a run that failed before its first step takes its folder with it, so
    that the next try may have the name.

    Attributes:
      folder: the output directory.
    """

    def __init__(self, folder: str):
        """Makes the folder.

        Raises:
          UsageError: it exists, or cannot be made.
        """
        self.folder = folder
        self._writers: dict[str, Any] = {}
        self._keep = False
        try:
            os.makedirs(folder)
            self._metrics = open(self.path("metrics.jsonl"), "a", encoding="utf-8")  # noqa: SIM115 - closed in close
        except FileExistsError as error:
            raise UsageError(f"--output_dir={folder}: exists and is never overwritten; name a new one") from error
        except OSError as error:
            raise UsageError(f"--output_dir={folder}: cannot be made ({error.strerror}); name another place") from error

    def path(self, name: str) -> str:
        """Where a file of that name lies."""
        return os.path.join(self.folder, name)

    def keep(self) -> None:
        """From here on the folder stays, whatever happens."""
        self._keep = True

    def write(self, name: str, text: str) -> None:
        """Writes a whole file."""
        write_atomically(self.path(name), text)

    def metric(self, record: Record) -> None:
        """Appends a step to metrics.jsonl and to the arm's TensorBoard events."""
        self.keep()
        line = {"step": record.step, "arm": record.arm, "loss": record.loss, "ms": record.seconds * 1e3,
                "timed": record.timed}
        with self._plain_errors():
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()
            self._events(record)

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: Any) -> None:
        with self._plain_errors() if kind is None else contextlib.suppress(Exception):
            for writer in self._writers.values():
                writer.close()
            self._metrics.close()
        if kind is not None and not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _events(self, record: Record) -> None:
        from pase_mtf.compat import tf
        if record.arm not in self._writers:
            with tf.Graph().as_default():  # the v1 writer refuses to be made while TensorFlow is eager
                self._writers[record.arm] = tf.summary.FileWriter(os.path.join(self.folder, "events", record.arm))
        value = [tf.Summary.Value(tag="loss", simple_value=record.loss)]
        if record.timed:
            value.append(tf.Summary.Value(tag="step_ms", simple_value=record.seconds * 1e3))
        self._writers[record.arm].add_summary(tf.Summary(value=value), record.step)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"cannot write into {self.folder}: {error.strerror}; free space or choose another "
                             "--output_dir") from error
        except Exception as error:
            if type(error).__module__.startswith("tensorflow"):
                raise UsageError(f"cannot write into {self.folder}: {what_happened(error)}; free space or choose "
                                 "another --output_dir") from error
            raise
