"""What TensorBoard reads of an arm: an event per value and step, in a file of TensorFlow's records."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from pase_mtf.compat import tf

__all__ = ["Events"]

_FORMAT = "brain.Event:2"
"""What the first event of a file has to say, or TensorBoard reads none of the others."""


class Events:
    """Writes the events of one arm, each at once.

    Not `tf.summary.FileWriter`: that writes in a thread of its own, where a full disk is a traceback on the standard
    error, and an exception of the run only at some later step.
    """

    def __init__(self, folder: str, goes_on_at: int | None = None):
        """Begins a file beside those of earlier runs.

        Args:
          folder: of the arm; made where it is missing.
          goes_on_at: what earlier files say of this step and of later ones is void.

        Raises:
          OSError, tf.errors.OpError: it cannot be written.
        """
        os.makedirs(folder, exist_ok=True)
        # TensorBoard goes by the first word, and reads files in the order of their names: the digits are of one number.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = tf.io.TFRecordWriter(os.path.join(folder, name))
        self._write(tf.Event(file_version=_FORMAT))
        if goes_on_at is not None:
            self._write(tf.Event(step=goes_on_at, session_log=tf.SessionLog(status=tf.SessionLog.START)))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, by their tags.

        Raises:
          tf.errors.OpError: it cannot be written.
        """
        self._write(tf.Event(step=step, summary=tf.Summary(value=[
            tf.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, event: tf.Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()  # 0.02 ms; whoever looks at a run that goes on sees all of it
