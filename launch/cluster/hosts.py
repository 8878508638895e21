"""The launchers of several hosts, one per process: they meet, start at once, watch each other, and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pase_mtf.errors import ClusterError, UsageError, shortened
from pase_mtf.interrupts import LAST_WISH, Interrupts
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.process import SAID_WHY, TaskProcess, end_all, start_worker
from pase_mtf.launch.cluster.wire import (
    SAYS_EVERY,
    Connection,
    connect,
    control_address,
    is_taken,
    listen,
    split_address,
)
from pase_mtf.launch.console import output_that_may_go

__all__ = ["JOINS_WITHIN", "RemoteTask", "is_cut_off", "join_run", "meet"]

JOINS_WITHIN = 20.0
"""Seconds after which a launcher that did not come counts as missing."""

_LOOK_EVERY = 0.1
_TOLD_WITHIN = 3.0
"""Seconds in which launchers that come yet are told why there is no run."""
_PACKAGES = ("pase_mtf", "tensorflow", "tensorflow-cpu", "mesh-tensorflow")


class RemoteTask:
    """A process of another host, as the launcher of rank 0 sees it: by what the launcher there says.

    Attributes:
      rank: of the process.
      exit_code: of one that has said there what its user has to mend; else None: that it ended is a fault, and told as
        one.
    """

    def __init__(self, rank: int, address: str, connection: Connection, interrupts: Interrupts):
        """Takes the connection to the launcher of that rank."""
        self.rank, self._address, self._connection, self._interrupts = rank, address, connection, interrupts
        self.exit_code: int | None = None
        self._told: str | None = None

    def fault(self) -> str | None:
        """What is wrong with it, in words that follow its name; None while nothing is."""
        for message in self._connection.messages():
            if isinstance(message.get("fault"), str):
                self._told = shortened(message["fault"], 300, quoted=False)
            elif message.get("ended") in SAID_WHY:
                self.exit_code = int(message["ended"])
            elif type(message.get("signal")) is int:
                wish = message.get("wish")
                self._interrupts.take(message["signal"], wish if type(wish) is int else 1)
        found = self._told or self._connection.lost
        return f"({self._address}) {found}" if found else None

    @property
    def silent(self) -> bool:
        """Whether nothing is heard of it any more."""
        return self._connection.silent

    def say(self, **message: object) -> None:
        """Tells the launcher there."""
        self._connection.say(**message)

    def send(self, number: int) -> None:
        """Nothing: only rank 0 is sent signals."""

    def end(self, **message: object) -> None:
        """Tells how the run ended, and closes the connection."""
        self._connection.say(**message)
        self._connection.close()


def is_cut_off(others: Sequence[RemoteTask], wait: float = 2.0 * SAYS_EVERY) -> bool:
    """Whether this host has lost all of several others at once: then it is its own network that is to blame.

    Args:
      others: one of which, perhaps, has just been found to be lost.
      wait: seconds, if so, in which what the others have said last grows old, too.
    """
    end = time.monotonic() + wait
    while len(others) > 1 and any(other.silent for other in others):
        if all(other.silent for other in others) or time.monotonic() >= end:
            return all(other.silent for other in others)
        time.sleep(_LOOK_EVERY)
        for other in others:
            other.fault()  # reads what it says
    return False


def _passport(membership: Membership) -> dict[str, object]:
    """What has to be the same everywhere: first what explains that the rest is not."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    flags = {f"--{name}": value for name, value in membership.flags.items()}
    return {**versions, **flags, "processes": list(membership.tasks), "devices": membership.devices,
            "kind": membership.kind}


def meet(membership: Membership, interrupts: Interrupts, within: float = JOINS_WITHIN,
         ready: Future[Any] | None = None) -> list[RemoteTask]:
    """The launcher of rank 0: waits for those of all others, and lets them start.

    Args:
      membership: of rank 0.
      interrupts: of this process.
      within: seconds in which they have to come.
      ready: what they wait for once they are there, such as a look at all of a checkpoint; its error ends the run.

    Raises:
      ClusterError: names who is missing, or was started with something else.
      KeyboardInterrupt: somebody wants it to end.
      UsageError: the port of the process is taken, or there is none to meet at.
    """
    _check_alone(membership)
    tasks, mine = membership.tasks, _passport(membership)
    came: dict[int, Connection] = {}
    strangers: list[Connection] = []
    seconds: list[_Second] = []
    end, failed = time.monotonic() + within, math.inf
    from_elsewhere = len({split_address(task)[0] for task in tasks}) > 1
    with listen(control_address(tasks), from_elsewhere) as door:
        try:
            while len(came) < len(tasks) - 1 or seconds or not (ready is None or ready.done()):
                if interrupts.asked:
                    raise KeyboardInterrupt
                if ready is not None and ready.done() and ready.exception() is not None:
                    # Those who are on their way, as they are after a fault, would wait for nobody: they are told.
                    failed = min(failed, time.monotonic())
                    if len(came) == len(tasks) - 1 or time.monotonic() >= failed + _TOLD_WITHIN:
                        ready.result()
                elif len(came) == len(tasks) - 1:
                    end = time.monotonic() + within
                elif time.monotonic() >= end:
                    missing = [f"rank {rank} ({task})" for rank, task in enumerate(tasks) if rank and rank not in came]
                    raise ClusterError(f"no launcher of {', '.join(missing)} came within {within:g} s; start the same "
                                       "command there, and see whether it can connect to "
                                       f"{':'.join(map(str, control_address(tasks)))}")
                arrived = _at(door)
                if not arrived:
                    time.sleep(_LOOK_EVERY)
                strangers += arrived
                _forget_lost(came, interrupts)
                _look_at_seconds(seconds, came, mine, tasks)
                _let_in(strangers, came, seconds, mine, tasks, interrupts)
            if ready is not None:
                ready.result()
        except BaseException as error:
            for connection in (*came.values(), *(second.connection for second in seconds), *strangers, *_at(door)):
                connection.say(end=getattr(error, "exit_code", interrupts.exit_code or ClusterError.exit_code),
                               error=str(error) or "rank 0 was interrupted")
                connection.close()
            raise
        strangers += _at(door)
    # Who came at the same moment, and has said already who it is.
    _let_in(strangers, came, seconds, mine, tasks, interrupts)
    for second in seconds:
        _turn_away(second, came[second.rank], tasks)
    for connection in strangers:
        connection.say(end=UsageError.exit_code, error="other commands are all ranks already; is --task right?")
        connection.close()
    found = [RemoteTask(rank, tasks[rank], came[rank], interrupts) for rank in sorted(came)]
    for task in found:
        task.say(start=True)
    return found


def _at(door: socket.socket) -> list[Connection]:
    """Those who have connected since the last look."""
    found = []
    with contextlib.suppress(OSError):  # nobody, or more than there are files for: they wait until the silent are lost
        while True:
            found.append(Connection(door.accept()[0]))
    return found


def _forget_lost(came: dict[int, Connection], interrupts: Interrupts) -> None:
    """Takes the signals of those who have come: each is the last that one says before it goes."""
    for rank in list(came):
        _take_signals(came[rank].messages(), interrupts)
        if came[rank].lost:
            came.pop(rank).close()


def _take_signals(messages: Sequence[Mapping[str, Any]], interrupts: Interrupts) -> None:
    for message in messages:
        if type(message.get("signal")) is int:
            interrupts.take(message["signal"])


@dataclasses.dataclass(frozen=True)
class _Second:
    """Another command of a rank that has come already.

    Attributes:
      connection: to it.
      rank: of both.
      passport: what it was started with.
      heard: when the first had said something last, as this one came.
    """

    connection: Connection
    rank: int
    passport: Mapping[str, object]
    heard: float


def _let_in(strangers: list[Connection], came: dict[int, Connection], seconds: list[_Second],
            mine: Mapping[str, object], tasks: Sequence[str], interrupts: Interrupts) -> None:
    """Takes those who say who they are from the strangers: of one rank the first; others are put among the seconds.
    A signal may have come with the first word of one, who is gone again.

    Raises:
      ClusterError: one was started with something else.
    """
    for connection in list(strangers):
        said = connection.messages()
        hello = next(iter(said), None)
        rank = None if hello is None else hello.get("rank")
        if type(rank) is int and 0 < rank < len(tasks) and rank not in came:
            _take_signals(said[1:], interrupts)
        if connection.lost:
            strangers.remove(connection)
            connection.close()
        elif hello is not None:
            strangers.remove(connection)
            rank, theirs = hello.get("rank"), hello.get("passport")
            if type(rank) is not int or not 0 < rank < len(tasks) or not isinstance(theirs, dict):
                connection.close()
            elif rank in came:
                seconds.append(_Second(connection, rank, theirs, came[rank].heard))
            else:
                _take(rank, connection, theirs, came, mine, tasks)


def _look_at_seconds(seconds: list[_Second], came: dict[int, Connection], mine: Mapping[str, object],
                     tasks: Sequence[str]) -> None:
    """Turns those away whose first is heard again, and takes those whose first is lost: that of a host that went down
    and is there again has closed no connection.

    Raises:
      ClusterError: one was started with something else.
    """
    for second in list(seconds):
        second.connection.messages()
        first = came.get(second.rank)
        if not second.connection.lost and first is not None and first.heard == second.heard:
            continue
        seconds.remove(second)
        if second.connection.lost:
            second.connection.close()
        elif first is None:
            _take(second.rank, second.connection, second.passport, came, mine, tasks)
        else:
            _turn_away(second, first, tasks)


def _turn_away(second: _Second, first: Connection, tasks: Sequence[str]) -> None:
    """Tells both sides. It ends no run, for the second may be the one that is not meant."""
    here = f"rank {second.rank} ({tasks[second.rank]})"
    second.connection.say(end=UsageError.exit_code,
                          error=f"another command is {here}, started at {first.origin}; is --task right?")
    second.connection.close()
    print(f"note: a second command came as {here}, from {second.connection.origin}, beside that from {first.origin}, "
          "and was turned away; is --task right?", file=sys.stderr, flush=True)


def _take(rank: int, connection: Connection, theirs: Mapping[str, object], came: dict[int, Connection],
          mine: Mapping[str, object], tasks: Sequence[str]) -> None:
    came[rank] = connection
    for name in {**mine, **theirs}:
        if theirs.get(name) != mine.get(name):
            # The command may be the same already, and the hosts not.
            remedy = ("install the same packages everywhere" if name in _PACKAGES else
                      "give --devices=cpu everywhere, or every process as many GPUs" if name == "kind" else
                      "start the same command everywhere")
            raise ClusterError(f"rank {rank} ({tasks[rank]}) was started {_with(name, theirs.get(name))}, "
                               f"rank 0 {_with(name, mine.get(name))}; {remedy}")


def _with(name: str, value: object) -> str:
    return f"without {name}" if value is None else f"with {name}={shortened(value, quoted=False)}"


def join_run(membership: Membership, restarts: int, interrupts: Interrupts, within: float = JOINS_WITHIN) -> int:
    """The launcher of any other rank: joins that of rank 0, starts its worker when told to, until the run has ended.

    Args:
      membership: of the process that it starts.
      restarts: how often the run may be started again.
      interrupts: of this process; signals are passed on to rank 0.
      within: seconds in which that of rank 0 has to answer.

    Returns:
      The exit code of the run; where a process was lost, and no restart is left, a line says so.

    Raises:
      ClusterError: rank 0 is missing.
      KeyboardInterrupt: somebody wants it to end, and there is no run yet.
      UsageError: the port of the process is taken.
    """
    _check_alone(membership)
    begun = False
    while True:
        try:
            connection = _knock(membership, interrupts, within)
        except KeyboardInterrupt:
            if not begun:
                raise
            _pass_on(membership, interrupts)
            print(f"[rank {membership.rank}] interrupted before the run was started again; nothing was written after "
                  "its last checkpoint", file=sys.stderr, flush=True)
            return interrupts.answer()
        started: list[TaskProcess] = []
        try:
            message = _serve(membership, connection, started, interrupts)
        finally:
            connection.close()
            end_all(started)
        # Rank 0 that is lost when it was to end may have written nothing: no end by the signal, nor one to begin anew.
        again = message.get("again", restarts > 0 and "end" not in message and not interrupts.asked)
        if not again:
            break
        restarts, begun = restarts - 1, True
        print(f"[rank {membership.rank}] {message.get('error')}; starting again", file=sys.stderr, flush=True)
    if message.get("error"):
        print(f"[rank {membership.rank}] error: {shortened(message['error'], 300, quoted=False)}", file=sys.stderr,
              flush=True)
    return int(message.get("end", ClusterError.exit_code))


def _check_alone(membership: Membership) -> None:
    """Refuses to be a rank whose process runs on this host already, where nobody would come or answer for 20 s.

    Raises:
      UsageError: its port is taken.
    """
    rank, task = membership.rank, membership.tasks[membership.rank]
    if is_taken(split_address(task)[1]):
        raise UsageError(f"rank {rank} ({task}): its port is taken on this host; is rank {rank} running already, and "
                         "--task right? Else take another port")


def _knock(membership: Membership, interrupts: Interrupts, within: float) -> Connection:
    """Connects to the launcher of rank 0, and says who this is."""
    address, end = control_address(membership.tasks), time.monotonic() + within
    while True:
        if interrupts.asked:
            raise KeyboardInterrupt
        try:
            connection = Connection(connect(address, timeout=2.0))
        except OSError as error:
            if time.monotonic() >= end:
                raise ClusterError(f"rank 0 ({membership.tasks[0]}): its launcher does not answer at "
                                   f"{address[0]}:{address[1]} within {within:g} s ({error.strerror or error}); start "
                                   "the same command there; where the run is under way, is --task right?") from error
            time.sleep(_LOOK_EVERY)
            continue
        connection.say(rank=membership.rank, passport=_passport(membership))
        return connection


def _pass_on(membership: Membership, interrupts: Interrupts) -> None:
    """Tells rank 0, as soon as it listens, of a signal that came before the run was started again: it would wait."""
    end = time.monotonic() + _TOLD_WITHIN
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            connection = Connection(connect(control_address(membership.tasks), timeout=1.0))
            connection.say(rank=membership.rank, passport=_passport(membership))
            connection.say(signal=interrupts.answer() - 128, wish=1)
            connection.close()
            return
        time.sleep(_LOOK_EVERY)


def _serve(membership: Membership, connection: Connection, started: list[TaskProcess],
           interrupts: Interrupts) -> dict[str, Any]:
    """Until rank 0 says how the run ended, or is lost: its last message, or what there is to say instead."""
    passed_on, told = 0, False
    while True:
        for message in connection.messages():
            if message.get("start") and not started:
                started.append(start_worker(membership))
                does = "trains on" if membership.clients == "ranks" else "serves"
                with output_that_may_go():  # who read it may have gone away, and the run needs these devices
                    print(f"[rank {membership.rank}] {does} {membership.devices // len(membership.tasks)} devices at "
                          f"{membership.tasks[membership.rank]}", flush=True)
            if type(message.get("end")) is int:
                return message
        while passed_on < interrupts.wishes and interrupts.exit_code is not None:
            passed_on += 1
            connection.say(signal=interrupts.exit_code - 128, wish=passed_on)
            if passed_on > LAST_WISH or not started:
                return {"end": interrupts.exit_code}
        if connection.lost:
            return {"error": f"rank 0 ({membership.tasks[0]}): its launcher {connection.lost}"}
        for process in started if not told else ():
            fault = process.fault()
            ended = process.exit_code
            if fault is None and ended is not None:
                fault = f"ended with exit code {ended}"
            if fault is not None:
                connection.say(**({"ended": ended} if ended in SAID_WHY else {"fault": fault}))
                told = True
        time.sleep(_LOOK_EVERY)
