"""A process of a run, seen from the launcher that started it: its output, what became of it, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from pase_mtf.errors import ClusterError
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.network import Network

__all__ = ["SAID_WHY", "STOPPED_FOR", "TaskProcess", "Watched", "end_all", "start_worker"]

_WORKERS = {"one": "pase_mtf.launch.cluster.worker", "ranks": "pase_mtf.launch.cluster.follower"}
"""What the processes of the other ranks run, by --clients."""

SAID_WHY = range(2, ClusterError.exit_code)
"""Exit codes of a process that has said, in a line, what its user has to mend: started again, it would say the same."""

STOPPED_FOR = 5.0
"""Seconds after which a process that is stopped (SIGSTOP) is given up: Ctrl-Z and `fg` are no fault."""

_LAPSE = 2.0
"""Seconds between two looks after which the launcher was not running itself."""

_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")
"""TensorFlow's channels would go through them, and nothing says so."""


class Watched(Protocol):
    """What a launcher asks of a process of a run, here or on another host.

    Attributes:
      rank: of the process.
    """

    rank: int

    @property
    def exit_code(self) -> int | None:
        """What it ended with by itself; None while it runs, and where it was killed."""
        ...

    def fault(self) -> str | None:
        """What is wrong with it, in words that follow its name; None while nothing is."""
        ...

    def send(self, number: int) -> None:
        """Sends it a signal."""
        ...


class TaskProcess:
    """A process that was started; it is in a session of its own, so that Ctrl-C reaches the launcher alone.

    Attributes:
      rank: of the process.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], *, own_output: bool,
                 network: Network | None = None, clock: Callable[[], float] = time.monotonic):
        """Starts it.

        Args:
          rank: of the process.
          command: with its arguments.
          environment: variables besides those of the launcher.
          own_output: it writes where the launcher does; else to the launcher's stderr, line by line, under its rank.
          network: that it is to be in; None: that of the launcher.
          clock: seconds.
        """
        self.rank, self._clock = rank, clock
        self._looked = clock()
        self._stopped_since: float | None = None
        mine = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        self._process = subprocess.Popen(
            network.inside(command) if network else [*command], env={**mine, **environment}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=None if own_output else subprocess.PIPE,
            stderr=None if own_output else subprocess.STDOUT)
        self._relay = None
        if self._process.stdout is not None:
            self._relay = threading.Thread(target=_relay, args=(self._process.stdout, rank), daemon=True)
            self._relay.start()

    @property
    def exit_code(self) -> int | None:
        """What it ended with by itself; None while it runs, and where it was killed."""
        code = self._process.poll()
        return None if code is None or code < 0 else code

    def fault(self) -> str | None:
        """What is wrong with it, in words that follow its name; None while it runs, and where it ended by itself."""
        code = self._process.poll()
        if code is not None:
            return f"was killed by {_signal_name(-code)}" if code < 0 else None
        now, since = self._clock(), self._looked
        self._looked = now
        if not self._is_stopped() or now - since > _LAPSE:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since >= STOPPED_FOR:
            return f"was stopped, and not continued for {STOPPED_FOR:g} s"
        return None

    def _is_stopped(self) -> bool:
        state = None
        with contextlib.suppress(ChildProcessError):
            state = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return state is not None

    def send(self, number: int) -> None:
        """Sends it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def let_go(self) -> None:
        """Tells it that it is not needed any more: it ends by that. One that is stopped hears nothing: it is killed."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._is_stopped():
            self._process.kill()

    def wait(self, seconds: float) -> None:
        """Waits for its end, and kills it where that takes longer."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._relay is not None:
            self._relay.join(1.0)


def start_worker(membership: Membership, network: Network | None = None) -> TaskProcess:
    """Starts the process of a rank other than 0.

    Args:
      membership: of that process.
      network: that it is to be in; None: that of the launcher.
    """
    return TaskProcess(membership.rank, [sys.executable, "-m", _WORKERS[membership.clients]],
                       membership.environment, own_output=False, network=network)


def end_all(processes: Sequence[TaskProcess], grace: float = 5.0) -> None:
    """Ends processes, those that do not by themselves within so many seconds by SIGKILL; none is left afterwards."""
    for process in processes:
        process.let_go()
    end = time.monotonic() + grace
    for process in processes:
        process.wait(end - time.monotonic())


def _relay(lines: IO[bytes], rank: int) -> None:
    for line in lines:
        with contextlib.suppress(OSError):  # nobody reads it; the process must not wait for somebody who does
            sys.stderr.write(f"[rank {rank}] {line.decode(errors='replace').rstrip()}\n")
            sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
