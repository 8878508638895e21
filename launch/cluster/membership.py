"""What a process of a run over several is told by the launcher that started it, and how it ends when that is gone."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable

__all__ = ["Membership", "end_with_launcher"]

_VARIABLE = "PASE_MTF_CLUSTER"
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
    """

    tasks: tuple[str, ...]
    rank: int
    devices: int
    kind: str
    clients: str = "one"

    @property
    def environment(self) -> dict[str, str]:
        """What the process finds it in."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def of_environment(cls) -> Membership | None:
        """What the launcher told this process; None where no launcher has started it."""
        text = os.environ.get(_VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        return cls(**{**fields, "tasks": tuple(fields["tasks"])})


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
