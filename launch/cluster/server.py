"""TensorFlow's server of a process, and whether those of the others answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pase_mtf.compat import tf
from pase_mtf.errors import ClusterError
from pase_mtf.launch.cluster.board import Board
from pase_mtf.launch.cluster.wire import connect, split_address
from pase_mtf.launch.console import summarize_error
from pase_mtf.runtime import JOB, Devices, session_config

__all__ = ["ANSWERS_WITHIN", "Joined", "check_servers", "join", "start_server"]

ANSWERS_WITHIN = 20.0
"""Seconds after which a process that does not answer counts as missing."""


def start_server(devices: Devices, rank: int) -> tf.train.Server:
    """Serves the devices of one process to all of them.

    Raises:
      ClusterError: its port is taken.
    """
    try:
        return tf.train.Server({JOB: list(devices.tasks)}, job_name=JOB, task_index=rank,
                               config=session_config(devices))
    except tf.errors.OpError as error:
        raise ClusterError(f"rank {rank}: cannot listen at {devices.tasks[rank]} ({summarize_error(error)}); the port "
                           "is taken, give another") from error


def check_servers(tasks: Sequence[str], within: float = ANSWERS_WITHIN) -> None:
    """Waits until all servers can be reached: a session that is made before waits for ever, and says nothing.

    Args:
      tasks: their addresses, by rank.
      within: seconds.

    Raises:
      ClusterError: names those that cannot.
    """
    missing, end = dict(enumerate(tasks)), time.monotonic() + within
    with ThreadPoolExecutor(len(tasks)) as pool:
        while missing and time.monotonic() < end:
            # All at once: one whose firewall drops what comes takes all of its second.
            there = list(pool.map(_answers, missing.values()))
            missing = {rank: task for (rank, task), found in zip(missing.items(), there, strict=True) if not found}
            time.sleep(0.1 if missing else 0.0)
    if missing:
        named = ", ".join(f"rank {rank} ({task})" for rank, task in missing.items())
        raise ClusterError(f"no answer from {named} within {within:g} s; see whether its process runs and whether its "
                           "port can be reached")


def _answers(task: str) -> bool:
    with contextlib.suppress(OSError), connect(split_address(task), timeout=1.0):  # no connection with itself
        return True
    return False


class Joined(NamedTuple):
    """What a process holds as long as it has sessions over several.

    Attributes:
      server: of its own devices.
      board: on which the ranks tell each other what they do; None: rank 0 has the graph of all.
    """

    server: tf.train.Server
    board: Board | None

    def close(self) -> None:
        """To be called when the last session is closed; the server goes on as long as the process."""
        if self.board:
            self.board.close()


def join(devices: Devices) -> Joined | None:
    """What a process does before its first session: serves its own devices, and waits for those of the others.

    Rank 0 comes when it has read what the run is to do, and the others wait for it as long as that takes; it waits for
    them for `ANSWERS_WITHIN`.

    Returns:
      None where all devices are of this process alone.

    Raises:
      ClusterError: the port is taken, or a process is missing.
    """
    if not devices.tasks:
        return None
    server = start_server(devices, devices.rank or 0)
    if devices.rank:
        check_servers(devices.tasks[:1], within=float("inf"))
    else:
        check_servers(devices.tasks)
    return Joined(server, None if devices.rank is None else Board(devices))
