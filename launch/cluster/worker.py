"""A process that serves its devices to the one of rank 0: `python -m pase_mtf.launch.cluster.worker`.

The launcher starts it. It ends when the launcher lets go of it: a signal that a scheduler sends to all processes of a
job must not take the devices away under a step that is to be done to its end.
"""

from __future__ import annotations

import os
import signal
import sys

from pase_mtf.launch.cluster.membership import Membership, end_with_launcher
from pase_mtf.launch.console import exit_code_of
from pase_mtf.runtime import Devices

__all__ = ["main"]


def main() -> int:
    """Serves until the launcher lets go; returns an exit code only where it cannot serve."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Not through Python's end, nor TensorFlow's: both wait for threads that serve.
    end_with_launcher(lambda: os._exit(0))
    membership = Membership.of_environment()
    if membership is None:
        print("error: a worker is started by the launcher; python -m pase_mtf.launch --cluster=local:4",
              file=sys.stderr)
        return 2
    return exit_code_of(lambda: _serve(membership))


def _serve(membership: Membership) -> int:
    from pase_mtf.launch.cluster.server import start_server  # TensorFlow takes seconds to import
    devices = Devices.over_tasks(membership.devices, membership.kind, membership.tasks)
    server = start_server(devices, membership.rank)
    while server is not None:
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
