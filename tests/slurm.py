"""A Slurm of its own on this computer, for as long as a test lasts: Debian's slurm-wlm and munge, one node.

    python tests/slurm.py COMMAND...     runs a command in it, as in: python tests/slurm.py srun --ntasks=2 hostname
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CPUS = 4
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=60
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:8
"""


def missing() -> str:
    """Why there can be no Slurm here, in words; empty where there can."""
    gone = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if gone:
        return f"needs {', '.join(gone)} (Debian: slurm-wlm, munge)"
    if os.geteuid():
        return "needs root, as slurmd does"
    return ""


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Starts munged, slurmctld and slurmd, and ends them.

    Yields:
      The environment in which `srun` and its like find them.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for inner in ("state", "spool"):
            (folder / inner).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        folder.chmod(0o755)
        node = socket.gethostname().partition(".")[0]
        ports = [_free_port() for _ in range(2)]
        configuration = folder / "slurm.conf"
        configuration.write_text(_CONFIGURATION.format(
            node=node, controller=ports[0], daemon=ports[1], folder=folder, cpus=_CPUS))
        environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(configuration)}

        def start(*command: str) -> None:
            with open(folder / f"{command[0]}.out", "wb") as log:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            stack.callback(_end, process)

        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
              f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed")
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", node)
        _wait(lambda: "idle" in _states(environment), folder)
        yield environment


def _states(environment: dict[str, str]) -> str:
    return subprocess.run(["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True,
                          check=False).stdout


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _wait(ready, folder: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            told = {path.name: path.read_text(errors="replace")[-2000:] for path in
                    (*folder.glob("*.log"), *folder.glob("*.out"))}
            raise AssertionError(f"Slurm does not start: {told}")
        time.sleep(0.2)


def _end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """Runs the command of the command line."""
    if reason := missing():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    with slurm() as environment:
        return subprocess.run(sys.argv[1:], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
