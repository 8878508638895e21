"""What a process of a run over several is told by the launcher that started it, and how it ends when that is gone."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from pase_mtf.interrupts import SIGNALS

__all__ = ["Membership", "end_with_launcher", "processes_here", "started_by_launcher"]

_VARIABLE = "PASE_MTF_CLUSTER"
_GPUS = "CUDA_VISIBLE_DEVICES"
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Membership:
    """Which process of a run this is.

    Attributes:
      tasks: the address ("host:port") of every process, by rank.
      rank: of this one.
      devices: in all, over all processes.
      kind: of the devices.
      clients: "one", or "ranks": whether every process has a graph of its own (--clients).
      flags: of the command, those that have to be the same on all hosts; for the launchers, processes need not know.
      asked: warm-up and steps of the command, where this start is told what is left of them; None: as its own options.
    """

    tasks: tuple[str, ...]
    rank: int
    devices: int
    kind: str
    clients: str = "one"
    flags: Mapping[str, object] = dataclasses.field(default_factory=dict)
    asked: Sequence[int] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the process finds it in, and what leaves it its own part of the GPUs of its host."""
        told = dataclasses.asdict(dataclasses.replace(self, flags={}))
        return {_VARIABLE: json.dumps(told), **self._own_gpus()}

    def _own_gpus(self) -> dict[str, str]:
        each = self.devices // len(self.tasks)
        here = processes_here(self.tasks, self.rank, each)
        if self.kind != "gpu" or len(here) == 1:
            return {}
        known, first = _given_gpus() or list(map(str, range(each * len(here)))), each * here.index(self.rank)
        return {_GPUS: ",".join(known[first:first + each])}

    @classmethod
    def of_environment(cls) -> Membership | None:
        """What the launcher told this process; None where no launcher has started it."""
        text = os.environ.get(_VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        return cls(**{**fields, "tasks": tuple(fields["tasks"])})


def processes_here(tasks: Sequence[str], rank: int, each: int) -> list[int]:
    """The ranks among which the GPUs that this process sees are shared out: those of its host; itself alone where it
    was given a part of its own (by its user, by Slurm), which is fewer than all of them need.

    Args:
      tasks: the address of every process, by rank.
      rank: of this one.
      each: how many devices a process has.
    """
    host = tasks[rank].rpartition(":")[0]
    here = [other for other, task in enumerate(tasks) if task.rpartition(":")[0] == host]
    return [rank] if 0 < len(_given_gpus()) < each * len(here) else here


def _given_gpus() -> list[str]:
    return [name for name in os.environ.get(_GPUS, "").split(",") if name]


def end_with_launcher(end: Callable[[], object]) -> None:
    """Calls `end`, in a thread, as soon as the launcher lets go of this process or dies: it holds our stdin open.

    On Linux the kernel kills this process besides, when the launcher dies: stopped processes run no threads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def wait() -> None:
        while os.read(0, 4096):
            pass
        end()
    threading.Thread(target=wait, daemon=True, name="end with launcher").start()


def started_by_launcher(what: str, command: str) -> Membership | None:
    """Makes this process end when its launcher lets go of it, and at no signal that a scheduler sends to all processes
    of a job; returns what the launcher told it. None, and a line on the standard error: no launcher started it.

    Args:
      what: this process is, for people.
      command: that starts such processes.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Not through Python's end, nor TensorFlow's: both wait for threads that serve.
    end_with_launcher(lambda: os._exit(0))
    membership = Membership.of_environment()
    if membership is None:
        print(f"error: a {what} is started by the launcher; {command}", file=sys.stderr)
    return membership
