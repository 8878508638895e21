"""What the launchers of several hosts tell each other: lines of JSON over TCP, and that they are there.

No tensor goes this way. As TensorFlow's own connections these have no authentication; all that a line can do is to end
a run.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pase_mtf.errors import UsageError

__all__ = ["SAYS_EVERY", "SILENT_FOR", "Connection", "connect", "control_address", "is_taken", "listen",
           "split_address"]

SILENT_FOR = 10.0
"""Seconds after which a launcher that says nothing counts as lost: its host, or the network between."""

SAYS_EVERY = 1.0
"""Seconds between two words of a launcher that has nothing to say."""

_LAPSE = 2.0
"""Seconds between two looks after which this launcher was not running itself, as where a whole job was suspended."""
_LONGEST = 1 << 20


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def control_address(tasks: Sequence[str]) -> tuple[str, int]:
    """Where the launcher of rank 0 listens: on its host, at the port above all that the processes have there.

    Raises:
      UsageError: there is no such port.
    """
    host = tasks[0].rpartition(":")[0]
    port = 1 + max(int(task.rpartition(":")[2]) for task in tasks if task.rpartition(":")[0] == host)
    if port > 65535:
        raise UsageError(f"--cluster: the launchers meet at the port above those of {host}, and there is none above "
                         "65535; take lower ones")
    return host.strip("[]"), port


def listen(address: tuple[str, int], from_elsewhere: bool = False) -> socket.socket:
    """A socket that listens at a host's own address; on all interfaces, which a line tells, where the name is that of
    something before it, as of a service in a cluster of containers, or, while others are to come from elsewhere, leads
    back to the host itself, as a host's own name does on Debian (127.0.1.1 in /etc/hosts), or has several addresses.

    Args:
      address: host and port.
      from_elsewhere: whether some of those who are to come are on other hosts.

    Raises:
      UsageError: the port is taken, or the name is not known.
    """
    (host, port), unknown = address, ""
    try:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if not from_elsewhere:
                raise
            # Not yet, as of a pod that has just begun, or not just now: those of other hosts go on asking, too.
            entries, unknown = [], str(error.strerror)
        anywhere = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        family, reached = (entries[0][0], str(entries[0][-1][0])) if entries else (anywhere, "")
        several = sorted({str(entry[-1][0]) for entry in entries})
        note = None
        if unknown:
            note = f"{host} is not known on this host now ({unknown})"
        elif from_elsewhere and len(several) > 1 and host != "localhost":
            # Others may know it by one of these alone.
            if socket.has_dualstack_ipv6() and any(entry[0] == socket.AF_INET6 for entry in entries):
                family = socket.AF_INET6
            note = f"{host} is {' and '.join(several)}"
        elif from_elsewhere and host not in (reached, "localhost") and ipaddress.ip_address(reached).is_loopback:
            note = f"{host} is {reached} on this host"
        else:
            try:
                found = socket.create_server((reached, port), family=family)
            except OSError:
                note = f"{host} is no address of this host"
        if note:
            # Else Python keeps those out who come by IPv4.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            found = socket.create_server(("", port), family=family, dualstack_ipv6=both)
            print(f"note: {note}: its launcher listens on all interfaces, at port {port}", file=sys.stderr, flush=True)
    except OSError as error:
        advice = "is rank 0 running already? Else take others" if error.errno == errno.EADDRINUSE else "take others"
        raise UsageError(f"--cluster: cannot listen at {host}:{port} ({error.strerror}), where the launchers meet: the "
                         f"port above those of the first host; {advice}") from error
    found.setblocking(False)
    return found


def connect(address: tuple[str, int], timeout: float) -> socket.socket:
    """A connection to somebody who listens: to a port that is free, the system may give a connection that very port for
    its own end, and so connect it with itself.

    Raises:
      OSError: nobody listens there, or none that is reached in so many seconds.
    """
    wire = socket.create_connection(address, timeout=timeout)
    if wire.getsockname() == wire.getpeername():
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # else it holds the port a minute
        wire.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return wire


def is_taken(port: int) -> bool:
    """Whether something listens at a port of this host: TensorFlow's servers do, on all interfaces."""
    try:
        connect(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _origin(wire: socket.socket) -> str:
    try:
        return str(wire.getpeername()[0])
    except (OSError, IndexError):  # it is gone again; it has no address
        return "nowhere"


class Connection:
    """One end of a connection; it is looked after by whoever calls `messages` a few times a second.

    Attributes:
      closed: whether the other end is gone, or talks nonsense.
      origin: the address of the host that the other end is on.
    """

    def __init__(self, wire: socket.socket, clock: Callable[[], float] = time.monotonic):
        """Takes a connected socket."""
        wire.setblocking(False)
        self.origin = _origin(wire)
        self._wire, self._clock, self.closed = wire, clock, False
        self._held, self._ahead = b"", b""
        self._heard = clock()
        self._said = float("-inf")
        self._looked, self._back = clock(), float("-inf")

    @property
    def lost(self) -> str | None:
        """Why the other end counts as lost, in words that follow its name; None while it does not."""
        if self.closed:
            return "closed its connection"
        return f"said nothing for {SILENT_FOR:g} s" if self.silent else None

    @property
    def heard(self) -> float:
        """When the other end has said something last, by the clock."""
        return self._heard

    @property
    def silent(self) -> bool:
        """Whether the other end has said nothing for so long that it counts as lost."""
        return self._clock() - max(self._heard, self._back) >= SILENT_FOR

    def say(self, **message: object) -> None:
        """Sends a message, as far as the other end takes it."""
        self._ahead += json.dumps(message).encode() + b"\n"
        self._said = self._clock()
        self._push()

    def messages(self) -> list[dict[str, Any]]:
        """What has come since the last call; lets the other end know, besides, that this one is there."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > _LAPSE:
            self._back = now  # who did not run has heard nobody
        if self._clock() - self._said >= SAYS_EVERY:
            self.say()
        self._push()
        while not self.closed and len(self._held) <= _LONGEST:  # who sends without end is not read without end
            try:
                read = self._wire.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                read = b""
            self.closed = not read
            self._held += read
            self._heard = self._clock() if read else self._heard
        *lines, self._held = self._held.split(b"\n")
        found = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            found.append(message)
        self.closed = self.closed or len(self._held) > _LONGEST
        return [message for message in found if message]

    def close(self) -> None:
        """Sends what there is to send, and closes."""
        end = self._clock() + 1.0
        while self._ahead and not self.closed and self._clock() < end:
            self._push()
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_WR)
        self._wire.close()

    def _push(self) -> None:
        while self._ahead and not self.closed:
            try:
                self._ahead = self._ahead[self._wire.send(self._ahead):]
            except BlockingIOError:
                break
            except OSError:
                self.closed = True
        if len(self._ahead) > _LONGEST:
            self.closed = True
