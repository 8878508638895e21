"""Runs over processes, started by their command line as a user starts them, and what is left of them afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pase_mtf.launch.cluster.launcher import local_addresses
from pase_mtf.launch.cluster.server import check_servers, start_server
from pase_mtf.runtime import Devices

_MARK = "PASE_MTF_TEST_RUN"


def two_servers() -> Iterator[Devices]:
    """Four devices of two servers, which live as long as this process does."""
    devices = Devices.over_tasks(4, "cpu", local_addresses(2))
    servers = [start_server(devices, rank) for rank in range(2)]
    check_servers(devices.tasks)
    yield devices
    assert len(servers) == 2


def processes(mark: str, what: str = "") -> list[int]:
    """Processes of a run that are left, or running: those that have its mark in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                ours = f"{_MARK}={mark}".encode() in file.read().split(b"\0")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if ours and what.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


def metrics(folder: Path, arm: str = "search") -> dict[int, float]:
    """Step -> loss of an arm, of which every step was written once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["arm"] == arm]
    assert steps == sorted(set(steps))  # every step once
    return {line["step"]: line["loss"] for line in lines if line["arm"] == arm}


class Run:
    """A run that was started by its command line; `end` says what it came to, and that nothing of it is left."""

    def __init__(self, preset: str, folder: Path, *flags: str, prefix: Sequence[str] = (),
                 environment: Mapping[str, str] | None = None):
        """Starts it.

        Args:
          preset: sizes of alexnet.
          folder: for its files; must not exist.
          flags: besides the usual ones, or in place of them.
          prefix: of the command, such as what enters a network namespace.
          environment: variables besides.
        """
        self.folder, self._mark = folder, str(folder)
        self._worker = "follower" if "--clients=ranks" in flags else "worker"
        self._temporary = folder.parent / "tmp"
        self._temporary.mkdir(exist_ok=True)
        given = {flag.split("=")[0] for flag in flags}
        defaults = ("--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100",
                    "--steps=2", "--warmup=1", "--log_every=1", "--compare=none", "--cluster=local:2")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "pase_mtf.launch", f"--output_dir={folder}",
             *(flag for flag in defaults if flag.split("=")[0] not in given), *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
                **os.environ, _MARK: self._mark, "TMPDIR": str(self._temporary), **(environment or {})})

    def reach(self, step: int) -> None:
        """Waits until a step was done."""
        path = self.folder / "metrics.jsonl"
        while self.process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") > step:
                return
            time.sleep(0.02)
        raise AssertionError(self.process.communicate())

    def pid(self, rank: int) -> int:
        """Of the process of a rank."""
        what = f"pase_mtf.launch.cluster.{self._worker}" if rank else "--output_dir"
        pid, = (pid for pid in processes(self._mark, what) if pid != self.process.pid)
        return pid

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=600)
            assert processes(self._mark) == []
            assert os.listdir(self._temporary) == []
        finally:
            self.process.kill()
            for pid in processes(self._mark):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode, out, err
