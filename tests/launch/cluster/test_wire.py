"""Messages between launchers: whole, in order, and never from nobody."""

import errno
import json
import signal
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from cluster_runs import free_hosts

from pase_mtf.errors import ClusterError, FormatError, UsageError
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.cluster import hosts, wire
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.wire import Connection, control_address


def test_silence_is_a_loss():
    one, other = socket.socketpair()
    now = [0.0]
    connection, peer = Connection(one, lambda: now[0]), Connection(other, lambda: now[0])
    for _ in range(30):  # both look after their ends: each hears the other
        now[0] += 1.0
        connection.messages()
        peer.messages()
    assert connection.lost is None
    now[0] += wire.SILENT_FOR - 0.1
    assert connection.lost is None
    now[0] += 0.2
    assert connection.lost == "said nothing for 10 s"
    peer.close()
    connection.messages()
    assert connection.lost == "closed its connection"
    connection.close()


def test_messages_come_whole_and_in_order():
    one, other = socket.socketpair()
    connection = Connection(one)
    text = b"".join(json.dumps({"number": number}).encode() + b"\n" for number in range(50))
    found = []
    for byte in text:
        other.send(bytes([byte]))
        found += connection.messages()
    assert [message["number"] for message in found] == list(range(50))
    other.sendall(b"[]\n")
    assert connection.messages() == []
    assert connection.closed
    connection.close()
    other.close()


def test_a_line_without_an_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(wire, "_LONGEST", 1000)
    one, other = socket.socketpair()
    connection = Connection(one)
    other.sendall(b"x" * 2000)
    connection.messages()
    assert connection.closed
    connection.close()
    other.close()


def test_there_is_no_port_above_the_last():
    with pytest.raises(UsageError, match="there is none above 65535"):
        control_address(("a:65535", "b:1"))
    assert control_address(("[::1]:5", "b:9", "[::1]:7")) == ("::1", 8)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_a_launcher_whose_host_has_several_addresses_listens_at_all(monkeypatch, capfd):
    made, kind = [], socket.SOCK_STREAM
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [
        (socket.AF_INET6, kind, 6, "", ("fd00::5", 7, 0, 0)), (socket.AF_INET, kind, 6, "", ("10.0.0.5", 7))])
    monkeypatch.setattr(socket, "create_server", lambda address, **how: made.append((address, how["family"])) or
                        SimpleNamespace(setblocking=lambda _: None))
    wire.listen(("alpha", 7), from_elsewhere=True)
    assert made == [(("", 7), socket.AF_INET6)]
    assert "alpha is 10.0.0.5 and fd00::5: its launcher listens on all interfaces" in capfd.readouterr().err


def test_one_who_sends_without_end_is_not_read_without_end():
    given = []

    def recv(size):
        given.append(size)
        assert sum(given) < 1 << 23, "it is read for ever"
        return b"x" * size
    connection = Connection(SimpleNamespace(setblocking=lambda _: None, getpeername=lambda: ("10.0.0.5", 1), send=len,
                                            recv=recv))
    assert connection.messages() == []
    assert connection.closed


def test_more_peers_than_there_are_files_for_wait():
    def accept():
        raise OSError(errno.EMFILE, "Too many open files")
    assert hosts._at(SimpleNamespace(accept=accept)) == []


def test_a_signal_that_comes_with_the_first_word_ends_all():
    tasks, interrupts = tuple(free_hosts(2)), Interrupts()
    here, there = (Membership(tasks, rank, 2, "cpu") for rank in range(2))

    def come_and_go():
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                connection = Connection(wire.connect(control_address(tasks), timeout=2.0))
            except OSError:
                time.sleep(0.02)
                continue
            connection.say(rank=1, passport=hosts._passport(there))
            connection.say(signal=15, wish=1)
            connection.close()
            return
    threading.Thread(target=come_and_go, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        hosts.meet(here, interrupts, within=3.0, ready=Future())
    assert interrupts.exit_code == 143


def test_a_launcher_whose_own_name_is_not_known_just_now_waits_for_the_others(monkeypatch, capfd):
    """It ended a run that had restarts left, and a pod that was not in the DNS yet."""
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match="Temporary failure"):  # nobody is to come from elsewhere
        wire.listen(("alpha", 0))
    with wire.listen(("alpha", 0), from_elsewhere=True) as everywhere, socket.socket() as peer:
        peer.connect(("127.0.0.1", everywhere.getsockname()[1]))
    assert "note: alpha is not known on this host now (Temporary failure" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "theirs", "mine", "remedy"), [
    ("kind", "cpu", "gpu", "give --devices=cpu everywhere"),
    ("tensorflow", "2.20.0", "2.21.0", "install the same packages everywhere"),
    ("--batch", 8, 16, "start the same command everywhere")])
def test_what_to_do_about_hosts_that_differ(name, theirs, mine, remedy):
    says = f"rank 1 \\(b:1\\) was started with {name}={theirs}, rank 0 with {name}={mine}; {remedy}"
    with pytest.raises(ClusterError, match=says):
        hosts._take(1, None, {name: theirs}, {}, {name: mine}, ("a:1", "b:1"))


def test_what_rank_0_finds_wrong_at_once_is_told_to_those_who_are_on_their_way(monkeypatch):
    """As after a fault: they were told to come again, and end their workers first."""
    monkeypatch.setattr(hosts, "_TOLD_WITHIN", 30.0, raising=False)
    tasks, ready, known, outcomes = tuple(free_hosts(2)), Future(), hosts._at, []
    here, there = (Membership(tasks, rank, 2, "cpu") for rank in range(2))
    ready.set_exception(FormatError("there is no whole checkpoint"))

    def join():
        try:
            outcomes.append(hosts.join_run(there, 0, Interrupts(), within=5.0))
        except ClusterError as error:
            outcomes.append(error)
    joining = threading.Thread(target=join, daemon=True)

    def at(door):
        found = known(door)
        if joining.ident is None:  # it comes after the first look
            joining.start()
        return found
    monkeypatch.setattr(hosts, "_at", at)
    with pytest.raises(FormatError, match="no whole checkpoint"):
        hosts.meet(here, Interrupts(), ready=ready)
    joining.join(30)
    assert outcomes == [2]


def test_a_signal_before_a_host_comes_again_ends_the_run_of_rank_0_too(monkeypatch):
    """It waited 20 s for a launcher that had gone."""
    tasks, outcomes = tuple(free_hosts(2)), []
    here, there = (Membership(tasks, rank, 2, "cpu") for rank in range(2))
    again = {"end": 7, "error": "rank 0 was killed", "again": True}
    wires = [SimpleNamespace(messages=lambda: [again], lost=None, close=lambda: None)]

    def knock(*_):
        if wires:
            return wires.pop()
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt  # as it does where somebody has asked
    monkeypatch.setattr(hosts, "_knock", knock)

    def meet():
        try:
            hosts.meet(here, Interrupts(), within=5.0)
        except (ClusterError, KeyboardInterrupt) as error:
            outcomes.append(type(error))
    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    with Interrupts() as interrupts:
        interrupts.hold()
        assert hosts.join_run(there, 3, interrupts) == 143
    meeting.join(30)
    assert outcomes == [KeyboardInterrupt]


def test_a_launcher_that_was_stopped_itself_loses_nobody():
    """As all of a job that is suspended: whoever runs first again has heard nothing yet."""
    one, other = socket.socketpair()
    now = [0.0]
    connection = Connection(one, lambda: now[0])

    def look(times):
        for _ in range(times):
            now[0] += 0.5
            connection.messages()
    look(3)
    now[0] += 100.0  # between two looks
    connection.messages()
    assert connection.lost is None
    look(19)
    assert connection.lost is None
    look(2)
    assert connection.lost == "said nothing for 10 s"
    connection.close()
    other.close()
