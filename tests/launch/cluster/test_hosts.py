"""Launchers of several hosts, here threads and processes of one: they meet, watch each other, and end together."""

import dataclasses
import json
import socket
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from cluster_runs import free_hosts

from pase_mtf.errors import ClusterError, FormatError, UsageError
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.cluster import hosts, wire
from pase_mtf.launch.cluster.hosts import is_cut_off, join_run, meet
from pase_mtf.launch.cluster.launcher import Fault, Outcome, watch
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.process import TaskProcess, end_all
from pase_mtf.launch.cluster.wire import control_address
from pase_mtf.launch.command_line import shared_flags


@pytest.fixture
def members():
    """The members of a run of two, whose launchers find free ports on this computer."""
    tasks = tuple(free_hosts(2))
    assert control_address(tasks) == ("127.0.0.1", int(tasks[1].rpartition(":")[2]) + 1)
    return [Membership(tasks, rank, 2, "cpu") for rank in range(2)]


class _Joining(threading.Thread):
    """The launcher of rank 1, whose worker is a small program."""

    def __init__(self, member, restarts=0):
        super().__init__(daemon=True)
        self.outcome, self.interrupts = None, Interrupts()
        self._member, self._restarts = member, restarts
        self.start()

    def run(self):
        try:
            self.outcome = join_run(self._member, self._restarts, self.interrupts, within=10.0)
        except ClusterError as error:
            self.outcome = error


@pytest.fixture
def worker(monkeypatch):
    """Says what the workers do; all that were started are ended."""
    started = []

    def runs(program):
        def start(membership):
            started.append(TaskProcess(membership.rank, [sys.executable, "-c", program], {}, own_output=False))
            return started[-1]
        monkeypatch.setattr(hosts, "start_worker", start)
        return started
    yield runs
    end_all(started, grace=0.0)


def _fault(task, seconds=10.0):
    end = time.monotonic() + seconds
    while task.fault() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    return task.fault()


def test_a_launcher_that_is_missing_is_named(members):
    with pytest.raises(ClusterError, match=r"no launcher of rank 1 \(127.0.0.1:\d+\) came within 0.3 s"):
        meet(members[0], Interrupts(), within=0.3)
    with pytest.raises(ClusterError, match=r"rank 0 \(127.0.0.1:\d+\): its launcher does not answer"):
        join_run(members[1], 0, Interrupts(), within=0.3)


@pytest.mark.slow
def test_they_wait_for_what_takes_longer_than_they_would(members, worker, monkeypatch):
    """As a look at a large checkpoint does: longer than somebody may be missing, and than one may be silent."""
    monkeypatch.setattr(wire, "SILENT_FOR", 2.0)
    started, ready = worker("import sys; sys.stdin.read()"), Future()
    joining = _Joining(members[1])
    threading.Timer(3.0, lambda: ready.set_result("whole")).start()
    other, = meet(members[0], Interrupts(), within=1.5, ready=ready)
    assert ready.done()
    other.end(end=0)
    joining.join(10)
    assert (joining.outcome, len(started)) == (0, 1)


def test_what_rank_0_finds_wrong_ends_all_at_once(members, worker, monkeypatch, capfd):
    started, ready = worker("import sys; sys.stdin.read()"), Future()
    joining = _Joining(members[1])
    known = hosts._let_in

    def let_in(strangers, came, *others):
        known(strangers, came, *others)
        if came and not ready.done():
            ready.set_exception(FormatError("there is no whole checkpoint"))
    monkeypatch.setattr(hosts, "_let_in", let_in)
    with pytest.raises(FormatError, match="no whole checkpoint"):
        meet(members[0], Interrupts(), ready=ready)
    joining.join(10)
    assert (joining.outcome, started) == (2, [])
    assert "[rank 1] error: there is no whole checkpoint" in capfd.readouterr().err


def test_a_run_from_its_start_to_its_end(members, worker):
    started = worker("import sys; sys.stdin.read()")
    joining = _Joining(members[1])
    other, = meet(members[0], Interrupts())
    end = time.monotonic() + 10
    while not started and time.monotonic() < end:
        assert other.fault() is None
        time.sleep(0.05)
    other.end(end=143)
    joining.join(10)
    assert joining.outcome == 143
    assert started[0].exit_code == 0


def test_a_lost_worker_is_told_to_rank_0_and_started_again(members, worker, capfd):
    started = worker("import os; os.kill(os.getpid(), 9)")
    joining = _Joining(members[1], restarts=1)
    other, = meet(members[0], Interrupts())
    assert _fault(other) == f"({members[1].tasks[1]}) was killed by SIGKILL"
    other.end(end=7, error="rank 1 was killed", again=True)
    other, = meet(members[0], Interrupts())
    assert "was killed by SIGKILL" in _fault(other)
    other.end(end=7, error="rank 1 was killed again", again=False)
    joining.join(10)
    assert (joining.outcome, len(started)) == (7, 2)
    assert "[rank 1] error: rank 1 was killed again" in capfd.readouterr().err


def test_what_a_worker_finds_wrong_on_its_host_is_the_exit_code_of_all(members, worker):
    worker("raise SystemExit(2)")
    main = TaskProcess(0, [sys.executable, "-c", "import sys; sys.stdin.read()"], {}, own_output=False)
    joining = _Joining(members[1], restarts=3)
    other, = meet(members[0], Interrupts())
    outcome = watch([main, other], Interrupts())
    assert outcome == Outcome(2)
    other.end(end=outcome.exit_code)
    joining.join(10)
    assert joining.outcome == 2
    end_all([main], grace=0.0)


def test_the_launcher_of_rank_0_is_lost(members, worker, capfd):
    started = worker("import sys; sys.stdin.read()")
    joining = _Joining(members[1])
    other, = meet(members[0], Interrupts())
    other._connection.close()
    joining.join(10)
    assert joining.outcome == 7
    assert f"[rank 1] error: rank 0 ({members[0].tasks[0]}): its launcher closed its connection" in (
        capfd.readouterr().err)
    assert [task.exit_code for task in started] in ([], [0])


def test_the_launcher_of_a_worker_is_lost(members, worker):
    worker("import sys; sys.stdin.read()")
    main = TaskProcess(0, [sys.executable, "-c", "import sys; sys.stdin.read()"], {}, own_output=False)
    joining = _Joining(members[1])
    other, = meet(members[0], Interrupts())
    joining.interrupts._asked += [2, 2, 2]  # Ctrl-C three times
    joining.interrupts._later += 2
    assert watch([main, other], Interrupts()).fault == Fault(1, f"({members[1].tasks[1]}) closed its connection")
    joining.join(10)
    assert joining.outcome == 130
    end_all([main], grace=0.0)


def test_a_signal_of_one_host_is_for_rank_0(members, worker):
    worker("import sys; sys.stdin.read()")
    main = TaskProcess(0, [sys.executable, "-c", "import time; time.sleep(100)"], {}, own_output=False)
    joining, interrupts = _Joining(members[1]), Interrupts()
    other, = meet(members[0], interrupts)
    end = time.monotonic() + 10
    joining.interrupts._asked.append(15)
    while not interrupts.asked and time.monotonic() < end:
        other.fault()
        time.sleep(0.05)
    # The same from its own scheduler is no second request.
    interrupts._asked.append(15)
    assert watch([main, other], interrupts).fault == Fault(0, "was killed by SIGTERM")
    assert interrupts.exit_code == 143
    other.end(end=143)
    joining.join(10)
    assert joining.outcome == 143
    end_all([main])


def test_launchers_that_were_started_with_other_flags(members, worker):
    worker("")
    member = Membership(members[1].tasks, 1, 4, "cpu")
    joining = _Joining(member)
    with pytest.raises(ClusterError, match=r"rank 1 \(.*\) was started with devices=4, rank 0 with devices=2; st"):
        meet(members[0], Interrupts())
    joining.join(10)
    assert joining.outcome == 7


@pytest.mark.parametrize(("theirs", "mine", "says"), [
    (["--batch=24"], [], "with --batch=24, rank 0 without --batch"),
    ([], ["--batch=24"], "without --batch, rank 0 with --batch=24"),
    (["--model=rnnlm"], [], "with --model=rnnlm, rank 0 with --model=alexnet"),
    (["--seed=3"], [], "with --seed=3, rank 0 with --seed=0"),
    (["--max_restarts=1"], [], "with --max_restarts=1, rank 0 with --max_restarts=0"),
    (["--dtype=bfloat16"], ["--dtype=float32"], "with --dtype=bfloat16, rank 0 with --dtype=float32"),
    (["--clients=ranks"], [], "with --clients=ranks, rank 0 with --clients=one"),
    (["--nocheckpoint"], [], "with --checkpoint=False, rank 0 with --checkpoint=True"),
    (["--strategy=/home/u/s.json"], [], "with --strategy=FILE, rank 0 with --strategy=search"),
    (["--preset=tiny"], ["--preset=sizes.json"], "with --preset=tiny, rank 0 with --preset=FILE"),
    (["--compare=zero"], ["--compare="], "with --compare=zero, rank 0 with --compare=none"),
    (["--compare=a.json,b.json"], ["--compare=a.json"], "with --compare=FILE,FILE, rank 0 with --compare=FILE"),
    (["--mesh=a:2;b:1"], ["--mesh=b:1;a:2"], "with --mesh=a:2;b:1, rank 0 with --mesh=b:1;a:2"),
])
def test_a_command_with_other_flags_is_refused_on_both_hosts(members, worker, capfd, theirs, mine, says):
    worker("")
    own, other = (dataclasses.replace(member, flags=shared_flags(["--model=alexnet", "--mesh=2", *flags]))
                  for member, flags in zip(members, (mine, theirs), strict=True))
    joining = _Joining(other)
    with pytest.raises(ClusterError) as caught:
        meet(own, Interrupts())
    joining.join(10)
    said = f"rank 1 ({own.tasks[1]}) was started {says}; start the same command everywhere"
    assert (str(caught.value), joining.outcome) == (said, 7)
    assert f"[rank 1] error: {said}" in capfd.readouterr().err


def test_flags_that_may_differ_from_host_to_host():
    """And those that say what is the default; what a run that is continued was started with is not looked at."""
    command = ["--model=alexnet", "--mesh=2"]
    assert shared_flags(command) == shared_flags([
        *command, "--task=1", "--cluster=a:1,b:1", "--devices=cpu", "--output_dir=there", "--data=there.txt",
        "--resume=nowhere", "--steps=30"])


@pytest.mark.parametrize(("theirs", "mine"), [
    ("--strategy=/home/u/s.json", "--strategy=/mnt/u/s.json"), ("--machine=/home/u/m.json", "--machine=m.json"),
    ("--preset=a/tiny.json", "--preset=/mnt/a/tiny.json"), ("--compare=none", "--compare="),
    ("--mesh=2", "--mesh=all:2"), ("--mesh=rows:2;cols:4", "--mesh= rows:2, cols:4"),
    ("--compare=search,zero,here/a.json", "--compare=there/a.json, zero"), ("--log_every=1", "--log_every=5")])
def test_flags_that_mean_the_same(theirs, mine):
    assert shared_flags(["--model=alexnet", theirs]) == shared_flags(["--model=alexnet", mine])


def test_what_processes_are_told_has_no_flags(members):
    member = dataclasses.replace(members[1], flags=shared_flags(["--model=alexnet"]))
    assert member.environment == members[1].environment


def test_a_second_command_of_a_rank_is_turned_away(members, worker, capfd):
    """Both hosts say so, and the first goes on; where it is gone, as after a fault, the next is welcome."""
    worker("import sys; sys.stdin.read()")
    ready, found = Future(), []
    meeting = threading.Thread(target=lambda: found.extend(meet(members[0], Interrupts(), ready=ready)))
    meeting.start()
    gone = _knocks(members[1])
    gone.close()
    first = _knocks(members[1])
    time.sleep(0.5)
    second, said = _Joining(members[1], restarts=1), []
    end = time.monotonic() + 10
    while second.is_alive() and time.monotonic() < end:
        said += first.messages()
        time.sleep(0.05)
    assert second.outcome == 2
    ready.set_result("whole")
    meeting.join(10)
    assert {"start": True} in said + first.messages()
    assert found[0].fault() is None
    found[0].end(end=0)
    first.close()
    task = members[1].tasks[1]
    assert sorted(capfd.readouterr().err.splitlines()) == [  # of two threads, in either order
        f"[rank 1] error: another command is rank 1 ({task}), started at 127.0.0.1; is --task right?",
        f"note: a second command came as rank 1 ({task}), from 127.0.0.1, beside that from 127.0.0.1, and was turned "
        "away; is --task right?"]


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_whose_host_was_lost_comes_again(worker, monkeypatch, capfd, waits):
    """Its first connection is not closed, as the host went down, but nothing is heard of it."""
    monkeypatch.setattr(wire, "SILENT_FOR", 3.0)
    started, found, ready = worker("import sys; sys.stdin.read()"), [], Future()
    threading.Timer(1.0, lambda: ready.set_result("whole")).start()
    three = tuple(free_hosts(3))
    rank_0, rank_1, rank_2 = (Membership(three, rank, 3, "cpu") for rank in range(3))
    meeting = threading.Thread(target=lambda: found.extend(meet(rank_0, Interrupts(), ready=ready if waits else None)))
    meeting.start()
    lost = _knocks(rank_1)
    time.sleep(0.5)
    again = _Joining(rank_1)
    time.sleep(0.5)
    last = _Joining(rank_2)  # all are there, and one of them is not
    meeting.join(10)
    assert [task.rank for task in found] == [1, 2]
    end = time.monotonic() + 10
    while len(started) < 2 and time.monotonic() < end:
        assert [task.fault() for task in found] == [None, None]
        time.sleep(0.05)
    for task in found:
        task.end(end=0)
    for one in (again, last):
        one.join(10)
    assert (again.outcome, last.outcome, len(started)) == (0, 0, 2)
    assert "turned away" not in capfd.readouterr().err
    lost.close()


def test_two_commands_of_a_rank_that_come_at_one_moment(members, worker, capfd, monkeypatch):
    """Both wait for rank 0, which goes on as soon as one of them is there."""
    worker("import sys; sys.stdin.read()")
    known, came = hosts._at, []

    def at(door):
        """Nobody, or both."""
        arrived, end = known(door), time.monotonic() + 10
        while len(came) + len(arrived) == 1 and time.monotonic() < end:
            arrived += known(door)
            time.sleep(0.01)
        came.extend(arrived)
        return arrived
    monkeypatch.setattr(hosts, "_at", at)
    both = [_Joining(members[1], restarts=1) for _ in range(2)]
    found, = meet(members[0], Interrupts())
    end = time.monotonic() + 10
    while all(one.is_alive() for one in both) and time.monotonic() < end:
        assert found.fault() is None
        time.sleep(0.05)
    found.end(end=0)
    for one in both:
        one.join(10)
    assert sorted(one.outcome for one in both) == [0, 2]
    assert "is --task right?" in capfd.readouterr().err


def test_who_comes_too_late_to_say_its_rank_is_told(members, monkeypatch):
    """As where its words are under way when all are there."""
    ready, late = Future(), []
    known = hosts._at

    def at(door):
        if ready.done() and not late:
            late.append(socket.create_connection(control_address(members[0].tasks)))
            time.sleep(0.1)
        return known(door)
    monkeypatch.setattr(hosts, "_at", at)
    first = []
    threading.Thread(target=lambda: first.append(_knocks(members[1]))).start()
    threading.Timer(0.5, lambda: ready.set_result("whole")).start()
    found, = meet(members[0], Interrupts(), ready=ready)
    found.end(end=0)
    said = json.loads(late[0].recv(1000).splitlines()[-1])
    assert said == {"end": 2, "error": "other commands are all ranks already; is --task right?"}
    late[0].close()
    first[0].close()


def _knocks(member):
    return hosts._knock(member, Interrupts(), 10.0)


def test_a_second_command_of_a_rank_when_the_run_is_under_way(members):
    rank_0 = members[0].tasks[0]
    with pytest.raises(ClusterError, match=rf"rank 0 \({rank_0}\): its launcher does not.*under way, is --task right"):
        join_run(members[1], 0, Interrupts(), within=0.1)
    for rank, comes in enumerate((lambda: meet(members[0], Interrupts(), within=0.1),
                                  lambda: join_run(members[1], 0, Interrupts(), within=0.1))):
        with socket.create_server(wire.split_address(members[rank].tasks[rank])), pytest.raises(
                UsageError, match=rf"rank {rank} \(.*\): its port is taken.*is rank {rank} running already"):
            comes()


@pytest.mark.parametrize(("heard", "expected"), [
    ((0, 0, 0), True), ((0, 3, 3), True),  # the last words of some are a little older
    ((0, 9, 9), False), ((9, 9, 9), False), ((0,), False)])
def test_one_that_hears_nobody_is_cut_off_itself(heard, expected):
    """One of three who is silent is lost; where all are, it is not they who are."""
    class Other:
        def __init__(self, looks):
            self._left = looks

        @property
        def silent(self):
            return self._left <= 0

        def fault(self):
            self._left -= 1
    assert is_cut_off([Other(looks) for looks in heard], wait=0.5) == expected


def test_strangers_are_let_stand(members, worker):
    worker("import sys; sys.stdin.read()")
    found = []
    meeting = threading.Thread(target=lambda: found.extend(meet(members[0], Interrupts())))
    meeting.start()
    strangers = []
    for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 7, "passport": {}}\n', b'[1]\n', b'{"rank": "x"}\n', b""):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                strangers.append(socket.create_connection(control_address(members[0].tasks), timeout=1))
                break
            except OSError:
                time.sleep(0.05)
        strangers[-1].sendall(text)
    joining = _Joining(members[1])
    meeting.join(10)
    found[0].end(end=0)
    joining.join(10)
    assert joining.outcome == 0
    for stranger in strangers:
        stranger.close()


def test_a_port_where_launchers_cannot_meet(members):
    with socket.create_server(control_address(members[0].tasks)), \
            pytest.raises(UsageError, match=r"where the launchers meet.*is rank 0 running already"):
        meet(members[0], Interrupts())


def test_a_connection_with_itself_is_no_sign_of_anybody(members, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert wire.is_taken(port)
    assert not wire.is_taken(port)
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: connect(
        address, timeout, source_address=address))  # as the system happens to choose it
    assert not wire.is_taken(port)
    with pytest.raises(ClusterError, match=r"its launcher does not answer at .* \(Connection refused\)"):
        join_run(members[1], 0, Interrupts(), within=0.3)
    for free in (("127.0.0.1", port), control_address(members[0].tasks)):
        socket.create_server(free).close()  # it is free for who is meant to listen there


def test_a_launcher_that_has_to_listen_everywhere_says_so(capfd):
    """The address of its host leads to something before it: 192.0.2.1 is nobody's."""
    with wire.listen(("127.0.0.1", 0)) as own:
        assert own.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UsageError, match="cannot listen at"):
            wire.listen(own.getsockname())
    assert capfd.readouterr().err == ""
    with wire.listen(("192.0.2.1", 0)) as everywhere:
        assert everywhere.getsockname()[0] == "0.0.0.0"
    assert capfd.readouterr().err == ("note: 192.0.2.1 is no address of this host: its launcher listens on all "
                                      "interfaces, at port 0\n")


def test_a_launcher_whose_host_has_a_loopback_address_of_its_own(monkeypatch, capfd):
    """As /etc/hosts on Debian has it: those of other hosts could not come."""
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **how: known(
        "127.0.1.1" if host == "alpha" else host, *rest, **how))
    with wire.listen(("alpha", 0)) as own:
        assert own.getsockname()[0] == "127.0.1.1"
    with wire.listen(("127.0.1.1", 0), from_elsewhere=True) as own:  # what somebody asked for
        assert own.getsockname()[0] == "127.0.1.1"
    assert capfd.readouterr().err == ""
    with wire.listen(("alpha", 0), from_elsewhere=True) as everywhere:
        assert everywhere.getsockname()[0] == "0.0.0.0"
    assert capfd.readouterr().err == ("note: alpha is 127.0.1.1 on this host: its launcher listens on all interfaces, "
                                      "at port 0\n")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_a_launcher_whose_own_name_is_one_of_ipv6_is_reached_by_both(monkeypatch):
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **how: known(
        "::1" if host == "alpha" else host, *rest, **how))
    with wire.listen(("alpha", 0), from_elsewhere=True) as everywhere:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, everywhere.getsockname()[1]), timeout=5).close()


def test_a_signal_at_rank_0_before_the_start_is_the_exit_code_of_all(members, worker):
    started, interrupts = worker("import sys; sys.stdin.read()"), Interrupts()
    joining = _Joining(members[1])
    threading.Timer(1.0, lambda: interrupts._asked.append(15)).start()
    with pytest.raises(KeyboardInterrupt):
        meet(members[0], interrupts, ready=Future())
    joining.join(10)
    assert (joining.outcome, started) == (143, [])


def test_a_signal_at_another_rank_before_the_start_ends_all(members, worker):
    worker("import sys; sys.stdin.read()")
    joining, interrupts = _Joining(members[1]), Interrupts()
    threading.Timer(1.0, lambda: joining.interrupts._asked.append(15)).start()
    with pytest.raises(KeyboardInterrupt):
        meet(members[0], interrupts, within=3.0, ready=Future())
    joining.join(10)
    assert (joining.outcome, interrupts.exit_code) == (143, 143)
