"""Hosts of a network that is not there: network namespaces of this computer, joined by a bridge."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

__all__ = ["Hosts", "hosts", "missing"]

_TAG = "pase"
_BURST_SECONDS = 0.01
"""What a link may send at once, after it was idle: as much as in this time, and no less than a segment of TCP."""
_SEGMENT = 1 << 17


def missing() -> str:
    """Why there can be no namespaces here, in words; empty where there can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"needs {command} (Debian: iproute2)"
    if os.geteuid():
        return "needs root, to make network namespaces"
    # Root of a container or of a sandbox may have no right to.
    name = f"pase{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"cannot make network namespaces ({' '.join(tried.stderr.split())[:100]})"
    _run("ip", "netns", "delete", name)
    return ""


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: " + (
            " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"))
    return done.stdout


class Hosts:
    """Network namespaces with an address each.

    Attributes:
      addresses: of the hosts.
    """

    def __init__(self, names: Sequence[str], hub: str):
        """Makes them, and a bridge in one more namespace.

        Args:
          names: of their namespaces.
          hub: of that of the bridge.
        """
        self._names, self._hub = names, hub
        self.addresses = [f"10.83.0.{number + 1}" for number in range(len(names))]
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "hub", "up")
        for number, name in enumerate(names):
            _run("ip", "link", "add", "wire", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns",
                 hub)
            _run("ip", "-n", hub, "link", "set", f"port{number}", "master", "hub", "up")
            _run("ip", "-n", name, "address", "add", f"{self.addresses[number]}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _run("ip", "-n", name, "link", "set", device, "up")

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a host; its process is the same."""
        return ["ip", "netns", "exec", self._names[host], *command]

    @property
    def congestion_control(self) -> str:
        """How TCP shares a link among connections on the hosts, as Linux names it; they have it from this computer."""
        return _run("ip", "netns", "exec", self._names[0], "cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip()

    def cut(self, host: int) -> None:
        """Takes the cable of a host out of the hub: nothing that it sends arrives, and nobody tells it so."""
        _run("ip", "-n", self._hub, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Puts the cable of a host back."""
        _run("ip", "-n", self._hub, "link", "set", f"port{host}", "master", "hub")

    def limit(self, rate: float) -> None:
        """Holds every link to so many bytes/s, in either direction: what a host sends, and what is sent to it."""
        burst = int(max(_SEGMENT, rate * _BURST_SECONDS))
        shape = ("root", "tbf", "rate", f"{int(8 * rate)}bit", "burst", str(burst), "latency", "100ms")
        for number, name in enumerate(self._names):
            _run("tc", "-n", name, "qdisc", "replace", "dev", "wire", *shape)
            _run("tc", "-n", self._hub, "qdisc", "replace", "dev", f"port{number}", *shape)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts, for as long as the context lasts; those of a process that was killed within it go first."""
    _sweep()
    tag = f"{_TAG}{os.getpid()}"
    names = [f"{tag}-{number}" for number in range(count)]
    try:
        yield Hosts(names, f"{tag}-hub")
    finally:
        _remove([*names, f"{tag}-hub"])


def _remove(names: Sequence[str]) -> None:
    for name in names:
        _run("ip", "netns", "delete", name, check=False)


def _sweep() -> None:
    """Removes namespaces of ours whose process is gone."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]
    ours = {name: int(match[1]) for name in names if (match := re.fullmatch(rf"{_TAG}(\d+)-\w+", name))}
    _remove([name for name, process in ours.items() if not os.path.exists(f"/proc/{process}")])
