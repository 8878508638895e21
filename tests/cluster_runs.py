"""Runs over processes, started by their command line as a user starts them, and what is left of them afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


def free_hosts(count: int) -> list[str]:
    """Addresses of this computer, each above the one before; nobody listens there, nor at the port above them, where
    launchers meet."""
    while True:
        with contextlib.ExitStack() as held:
            ports: list[int] = []
            try:
                for _ in range(count + 1):
                    one = held.enter_context(socket.socket())
                    # As TensorFlow does, which listens on all interfaces.
                    one.bind(("", ports[-1] + 1 if ports else 0))
                    ports.append(one.getsockname()[1])
            except (OSError, OverflowError):  # taken, or above the last
                continue
        return [f"127.0.0.1:{port}" for port in ports[:-1]]


def no_network() -> bool:
    """Whether the system gives no network to whoever asks for one by hand: what is tested does not decide that."""
    return shutil.which("unshare") is None or all(
        subprocess.run(["unshare", *way, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode
        for way in (("--net",), ("--user", "--map-current-user", "--keep-caps", "--net")))


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


def is_running(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Listening(NamedTuple):
    """A TCP socket that listens.

    Attributes:
      inode: which it is, for as long as the system runs.
      address: as /proc/net/tcp writes it, without the port.
      networked: whether its network namespace has an interface besides the loopback one.
    """

    inode: str
    address: str
    networked: bool

    @property
    def reached_from_outside(self) -> bool:
        """Whether another computer could connect to it."""
        loopback = self.address in ("0100007F", "00000000000000000000000001000000")
        return self.networked and not loopback


def listening(pid: int | str) -> set[Listening]:
    """Whatever listens in the network namespace of a process."""
    interfaces = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    networked = {line.split(":")[0].strip() for line in interfaces} != {"lo"}
    rows = [line.split() for name in ("tcp", "tcp6") if os.path.exists(f"/proc/{pid}/net/{name}")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {Listening(row[9], row[1].split(":")[0], networked) for row in rows if row[3] == "0A"}


def _own(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    return {link[len("socket:["):-1] for link in links if link.startswith("socket:[")}


def metrics(folder: Path, arm: str = "search") -> dict[int, float]:
    """Step -> loss of an arm, of which every step was written once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["arm"] == arm]
    assert steps == sorted(set(steps))  # every step once
    return {line["step"]: line["loss"] for line in lines if line["arm"] == arm}


def _networks() -> Iterator[str]:
    """The network namespaces of all processes."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/ns/net")


class Run:
    """A run that was started by its command line; `end` says what it came to, and that nothing of it is left.

    Attributes:
      held: all that listened in its processes, as far as it was seen.
      networks: the network namespaces that it made.
    """

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
        self.held: set[Listening] = set()
        self.networks: set[str] = set()
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
                self._look()
                return
            time.sleep(0.02)
        raise AssertionError(self.process.communicate())

    def pid(self, rank: int) -> int:
        """Of the process of a rank."""
        what = f"pase_mtf.launch.cluster.{self._worker}" if rank else "--output_dir"
        pid, = (pid for pid in processes(self._mark, what) if pid != self.process.pid)
        return pid

    def _look(self) -> None:
        """What its processes listen at, and in which networks."""
        for pid in processes(self._mark):
            with contextlib.suppress(OSError):
                network = os.readlink(f"/proc/{pid}/ns/net")
                if network != os.readlink(f"/proc/{self.process.pid}/ns/net"):
                    self.networks.add(network)
                own = _own(pid)
                self.held |= {one for one in listening(pid) if one.inode in own}

    def _communicate(self, seconds: float = 600.0) -> tuple[str, str]:
        end = time.monotonic() + seconds
        while True:
            self._look()
            try:
                return self.process.communicate(timeout=2.0)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        try:
            out, err = self._communicate()
            assert processes(self._mark) == []
            assert os.listdir(self._temporary) == []
            assert not self.held & listening("self")
            # A process that is ending has given its environment back before its network.
            end = time.monotonic() + 10
            while self.networks & set(_networks()):
                assert time.monotonic() < end
                time.sleep(0.1)
        finally:
            self.process.kill()
            for pid in processes(self._mark):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode, out, err
