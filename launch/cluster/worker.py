"""A process that serves its devices to the one of rank 0: `python -m pase_mtf.launch.cluster.worker`.

The launcher starts it. It ends when the launcher lets go of it: a signal that a scheduler sends to all processes of a
job must not take the devices away under a step that is to be done to its end.
"""

from __future__ import annotations

import signal
import sys

from pase_mtf.exit_codes import exit_code_of
from pase_mtf.launch.cluster.membership import Membership, started_by_launcher
from pase_mtf.launch.console import SMALLER
from pase_mtf.runtime import Devices

__all__ = ["main"]


def main() -> int:
    """Serves until the launcher lets go; returns an exit code only where it cannot serve."""
    membership = started_by_launcher("worker", "python -m pase_mtf.launch --cluster=local:4")
    return 2 if membership is None else exit_code_of(lambda: _serve(membership), smaller=SMALLER)


def _serve(membership: Membership) -> int:
    from pase_mtf.launch.cluster.server import start_server  # TensorFlow takes seconds to import
    devices = Devices.over_tasks(membership.devices, membership.kind, membership.tasks)
    server = start_server(devices, membership.rank)
    while server is not None:
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
