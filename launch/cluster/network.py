"""A network of its own for the processes of a run on one computer: nothing in it but the loopback interface.

TensorFlow's server listens on all interfaces, whatever address it is given, and asks nobody who they are. In a network
namespace there is only one interface, which nobody outside of it reaches.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

__all__ = ["Network", "own_network"]

_ALONE = "import sys; sys.stdin.read()"
_UP = """
import fcntl, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    name, flags = struct.unpack("16sh", fcntl.ioctl(control, 0x8913, struct.pack("16sh", b"lo", 0)))  # SIOCGIFFLAGS
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP
print("up", flush=True)
sys.stdin.read()
"""
_WAYS = (("--net",), ("--user", "--map-current-user", "--keep-caps", "--net"),
         ("--user", "--map-current-user", "--net"))
"""What unshare is asked for: an administrator needs no user namespace, and others are not given a network without; nor
may they bring its interface up where what is run there keeps no capabilities."""

_WITHIN = 10.0


class Network:
    """A network namespace, held by a process of its own."""

    def __init__(self, holder: subprocess.Popen[str], way: Sequence[str]) -> None:
        """Takes the process that holds it, and how that was made."""
        self._holder = holder
        self._entering = ["nsenter", "--target", str(holder.pid), "--net"]
        if "--user" in way:
            self._entering += ["--user", "--preserve-credentials"]

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs a command in this network; its process is the same."""
        return [*self._entering, *command]

    def close(self) -> None:
        """Lets go of it; it ends with the last process in it."""
        _end(self._holder)


@contextlib.contextmanager
def own_network() -> Iterator[Network | None]:
    """A network for the time of this context; None where the system gives none (no Linux, or no right to)."""
    network = _made()
    try:
        yield network
    finally:
        if network is not None:
            network.close()


def _made() -> Network | None:
    for way in _WAYS:
        try:
            # It ends when its standard input does, which it does with us, however we end.
            holder = subprocess.Popen(["unshare", *way, sys.executable, "-I", "-c", _UP], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                      start_new_session=True)
        except OSError:
            return None  # there is no such program
        assert holder.stdout is not None
        network = Network(holder, way)
        if holder.stdout.readline() == "up\n" and _can_enter(network):
            return network
        _end(holder)
    return None


def _can_enter(network: Network) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(network.inside([sys.executable, "-I", "-c", _ALONE]), stdin=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, timeout=_WITHIN, check=False).returncode == 0
    return False


def _end(holder: subprocess.Popen[str]) -> None:
    try:
        holder.communicate(timeout=1.0)
    except (OSError, subprocess.TimeoutExpired):
        holder.kill()
        holder.wait()
