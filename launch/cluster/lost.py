"""What a process says when it has lost its connection to another."""

from __future__ import annotations

import time

from pase_mtf.compat import tf
from pase_mtf.errors import ClusterError
from pase_mtf.launch.console import summarize_error

__all__ = ["LOST", "lost_process"]

LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
"""What TensorFlow raises then."""

_LAUNCHER_TELLS_WITHIN = 20.0
"""Seconds."""


def lost_process(error: BaseException, who: str) -> ClusterError:
    """The error to raise: after a while, as the launcher, which sees all processes, knows better whose fault it is, and
    ends this one in a moment.

    Args:
      error: one of LOST.
      who: has lost another.
    """
    time.sleep(_LAUNCHER_TELLS_WITHIN)
    return ClusterError(f"{who}: a process was lost ({summarize_error(error)})")
