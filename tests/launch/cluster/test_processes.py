"""Processes that are watched from outside: small ones, which do nothing but wait, and what becomes of them."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from cluster_runs import is_running

from pase_mtf import runtime
from pase_mtf.errors import ClusterError, UsageError
from pase_mtf.exit_codes import let_go
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.cluster import launcher, process
from pase_mtf.launch.cluster.launcher import Fault, Outcome, local_addresses, watch
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.process import TaskProcess, end_all
from pase_mtf.launch.files import RunFiles
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import member_of, resolve

_WAIT = "import sys; sys.stdin.read()"
_WAIT_FOR_EVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
_END_WITH_LAUNCHER = ("import os, time; from pase_mtf.launch.cluster.membership import end_with_launcher; "
                      "end_with_launcher(lambda: os._exit(0)); print(os.getpid(), flush=True); time.sleep(1000)")


@pytest.fixture
def start(monkeypatch):
    """Starts Python programs as the processes of a run; all are ended with the test."""
    monkeypatch.setattr(process, "STOPPED_FOR", 0.5)
    started = []

    def run(*programs):
        for program in programs:
            started.append(TaskProcess(len(started), [sys.executable, "-c", program], {}, own_output=False))
        return started
    yield run
    end_all(started, grace=0.0)


def _pid(task):
    return task._process.pid


@pytest.mark.parametrize(("rank", "number", "what"), [
    (1, signal.SIGKILL, "was killed by SIGKILL"),
    (0, signal.SIGKILL, "was killed by SIGKILL"),
    *(pytest.param(rank, signal.SIGSTOP, "was stopped, and not continued", marks=pytest.mark.slow) for rank in (0, 1)),
])
def test_a_lost_process_is_found_and_named(start, rank, number, what):
    tasks = start(_WAIT, _WAIT, _WAIT)
    os.kill(_pid(tasks[rank]), number)
    outcome = watch(tasks, Interrupts())
    assert outcome.exit_code == ClusterError.exit_code
    assert outcome.fault.rank == rank
    assert outcome.fault.what.startswith(what)
    end_all(tasks)
    assert not any(map(is_running, map(_pid, tasks)))


def test_one_that_was_stopped_and_continued_is_no_fault(start):
    tasks = start(_WAIT, "import time; time.sleep(1.5)")
    os.kill(_pid(tasks[1]), signal.SIGSTOP)
    assert tasks[1].fault() is None
    time.sleep(0.2)
    os.kill(_pid(tasks[1]), signal.SIGCONT)
    # Found to be over, and not before: nothing of the stop is left.
    assert watch(tasks, Interrupts()).fault == Fault(1, "ended with exit code 0")


def test_a_launcher_that_was_stopped_itself_accuses_nobody(start):
    now = [0.0]
    task = TaskProcess(1, [sys.executable, "-c", _WAIT], {}, own_output=False, clock=lambda: now[0])
    os.kill(_pid(task), signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 10
        while not task._is_stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert task.fault() is None
        now[0] += 100.0  # between two looks
        assert task.fault() is None
        now[0] += 0.4
        assert task.fault() is None
        now[0] += 0.2
        assert task.fault() is None
        now[0] += 0.4
        assert "was stopped" in task.fault()
    finally:
        end_all([task], grace=0.0)


def test_the_exit_code_is_that_of_rank_0(start):
    assert watch(start("raise SystemExit(5)", _WAIT), Interrupts()) == Outcome(5)


def test_a_worker_that_ends_by_itself_is_a_fault(start, capfd):
    tasks = start(_WAIT, "print('no room'); raise SystemExit(1)")
    assert watch(tasks, Interrupts()).fault == Fault(1, "ended with exit code 1")
    end_all(tasks)
    assert "[rank 1] no room" in capfd.readouterr().err


@pytest.mark.parametrize(("code", "restarted"), [(1, True), (3, False), (6, False), (0, False), (143, False)])
def test_rank_0_that_crashes_is_a_fault_as_any_other_rank(start, code, restarted):
    """Not one that has said what its user has to mend, nor one that a signal has ended."""
    tasks = start(f"raise SystemExit({code})", _WAIT)
    assert watch(tasks, Interrupts()) == (
        Outcome(7, Fault(0, f"ended with exit code {code}")) if restarted else Outcome(code))
    end_all(tasks)


def test_rank_0_that_crashes_when_it_was_to_end_is_a_fault_too(start):
    tasks = start("raise SystemExit(1)", _WAIT)
    tasks[0].wait(10)
    with Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGTERM)
        assert watch(tasks, interrupts) == Outcome(7, Fault(0, "ended with exit code 1"))


@pytest.mark.parametrize("code", [2, 5])
def test_what_a_worker_finds_wrong_is_for_its_user_and_no_fault(start, code):
    """Nothing is started again for it; rank 0 may have lost its connection by then."""
    assert watch(start(_WAIT, f"raise SystemExit({code})"), Interrupts()) == Outcome(code)
    assert watch(start("raise SystemExit(7)", "import time; time.sleep(0.5); raise SystemExit(2)")[-2:],
                 Interrupts()) == Outcome(2)


def test_whose_fault_it_is_that_rank_0_lost_a_connection(start):
    tasks = start("raise SystemExit(7)", "import time, os; time.sleep(0.5); os.kill(os.getpid(), 9)")
    assert watch(tasks, Interrupts()).fault == Fault(1, "was killed by SIGKILL")


_COUNTS_SIGNALS = """
import itertools, pathlib, signal, time
file, times = pathlib.Path({path!r}), []
def strike(*unused):
    times.append(time.monotonic())
    file.write_text(" ".join(map(str, times)))
    if len(times) == {ends_at}:
        exit(143)
signal.signal(signal.SIGTERM, strike)
file.touch()
# In naps: Python sleeps through a signal that strikes just before it falls asleep.
[time.sleep(0.1) for _ in itertools.repeat(0, 10000)]
"""


@pytest.fixture
def counting(start, tmp_path):
    """Rank 0 that ends with a signal, and another; when the first has taken signals stands in the file."""
    file = tmp_path / "signals"

    def run(ends_at):
        tasks = start(_COUNTS_SIGNALS.format(path=str(file), ends_at=ends_at), _WAIT)
        while not file.exists():
            assert is_running(_pid(tasks[0]))
            time.sleep(0.01)
        return tasks, lambda: list(map(float, file.read_text().split()))
    return run


def _watched(tasks, *moments):
    """What becomes of processes whose launcher is sent a signal at each of some moments."""
    now = iter(moments)
    with Interrupts(lambda: next(now)) as interrupts:
        interrupts.hold()
        for _ in moments:
            signal.raise_signal(signal.SIGTERM)
        return watch(tasks, interrupts)


def test_a_signal_is_rank_0s(counting):
    tasks, taken = counting(1)
    assert _watched(tasks, 0.0) == Outcome(143)
    assert len(taken()) == 1


def test_the_second_signal_is_rank_0s_too_half_a_second_later(counting):
    """So that it ends with the step that it does, and writes its files; it looks at the time between the two, too."""
    tasks, taken = counting(2)
    assert _watched(tasks, 0.0, 0.1, 0.5) == Outcome(143)
    first, second = taken()
    assert second - first >= 0.5


def test_the_third_signal_ends_all(start):
    begin = time.monotonic()
    assert _watched(start(_WAIT_FOR_EVER, _WAIT), 0.0, 0.6, 1.2) == Outcome(143)
    assert time.monotonic() - begin < 60.0  # not when rank 0 ends, which takes a thousand seconds


def test_signals_of_another_host_are_the_same_wishes():
    interrupts = Interrupts()
    interrupts.take(signal.SIGTERM)
    interrupts.take(signal.SIGTERM)  # of a third host, by the same scheduler
    assert (interrupts.wishes, interrupts.insisted, interrupts.exit_code) == (1, False, 143)
    interrupts.take(signal.SIGTERM, 2)
    assert (interrupts.wishes, interrupts.insisted) == (2, True)


def test_one_that_does_not_let_go_is_killed(start):
    tasks = start(_WAIT, _WAIT_FOR_EVER)
    os.kill(_pid(tasks[0]), signal.SIGSTOP)
    end_all(tasks, grace=0.2)
    assert not any(map(is_running, map(_pid, tasks)))


def test_one_that_is_stopped_is_not_waited_for(start):
    """It cannot use the time that others have to end by themselves: it is ended when it is given up."""
    tasks = start(_WAIT, _WAIT)
    os.kill(_pid(tasks[1]), signal.SIGSTOP)
    assert watch(tasks, Interrupts()).fault.rank == 1
    begin = time.monotonic()
    end_all(tasks, grace=200.0)
    assert time.monotonic() - begin < 100.0
    assert tasks[0].exit_code == 0
    assert not any(map(is_running, map(_pid, tasks)))


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    """One of them stopped."""
    program = tmp_path / "launcher.py"
    program.write_text(
        "import sys, time\n"
        "from pase_mtf.launch.cluster.process import TaskProcess\n"
        f"held = [TaskProcess(rank, [sys.executable, '-c', {_END_WITH_LAUNCHER!r}], {{}}, own_output=True)\n"
        "        for rank in range(2)]\n"
        "time.sleep(1000)\n")
    launcher = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        os.kill(pids[1], signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_a_process_does_not_wait_for_somebody_who_reads_what_it_says(start, monkeypatch):
    """More of it than a pipe holds."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(os.devnull, "w") as gone:
        os.dup2(writing, gone.fileno())
        os.close(writing)
        monkeypatch.setattr(sys, "stderr", gone)
        tasks = start("for _ in range(10000): print('x' * 100)")
        tasks[0].wait(30)
        tasks[0]._relay.join(30)  # which would else write to what has been closed
        let_go(gone)
    assert tasks[0].exit_code == 0


def test_the_folder_that_another_run_has_taken_is_not_cleared_up(tmp_path):
    """Of the same name, by a command that was faster."""
    folder = tmp_path / "run"
    options = SimpleNamespace(output_dir=str(folder), in_place=False)
    launcher._clear_up(options)
    assert not folder.exists()
    with RunFiles(str(folder)) as files:
        (folder / "checkpoint" / ".partial-abc").mkdir(parents=True)
        launcher._clear_up(options)
        assert (folder / "checkpoint" / ".partial-abc").exists()
        files.keep()
    launcher._clear_up(options)
    assert not folder.exists()


def test_proxies_are_not_for_the_processes_of_a_run(start, monkeypatch, capfd):
    monkeypatch.setenv("HTTPS_PROXY", "http://nowhere")
    monkeypatch.setenv("http_proxy", "http://nowhere")
    tasks = start("import os; print([name for name in os.environ if name.lower() in ('http_proxy', 'https_proxy')])")
    end_all(tasks)
    assert "[rank 0] []" in capfd.readouterr().err


def test_addresses_of_this_computer_differ():
    addresses = local_addresses(5)
    assert len(set(addresses)) == 5
    assert all(address.startswith("127.0.0.1:") for address in addresses)


@pytest.mark.parametrize(("given", "hosts", "expected"), [
    (None, "aa", ["0,1", "2,3"]), ("4,5,6,7", "aa", ["4,5", "6,7"]), ("GPU-a,GPU-b,GPU-c,GPU-d", "aaaa", [
        "GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
    (None, "abba", ["0", "0", "1", "1"]), ("7,5", "abba", ["7", "7", "5", "5"]),
    (None, "ab", [None, None]), ("2,3", "aa", [None, None]), ("3", "abba", [None] * 4)])
def test_processes_share_the_gpus_of_a_host_evenly(monkeypatch, given, hosts, expected):
    """Those that are alone there, or were given less than all need, keep what they see."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    member = Membership(tuple(f"{host}:{2222 + rank}" for rank, host in enumerate(hosts)), 0, 4, "gpu")
    members = [dataclasses.replace(member, rank=rank) for rank in range(len(hosts))]
    assert [one.environment.get("CUDA_VISIBLE_DEVICES") for one in members] == expected
    assert "CUDA_VISIBLE_DEVICES" not in dataclasses.replace(member, kind="cpu").environment


def test_a_worker_of_a_listed_host_sees_its_own_part(monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(process, "_WORKERS", {"one": "code"})  # which waits for lines
    worker = process.start_worker(Membership(("a:1", "a:2"), 1, 2, "gpu"))
    with open(f"/proc/{worker._process.pid}/environ", encoding="utf-8") as file:
        assert "CUDA_VISIBLE_DEVICES=5" in file.read().split("\0")
    end_all([worker])


@pytest.mark.parametrize(("present", "kind"), [(4, "gpu"), (2, "cpu")])
def test_all_processes_of_a_host_need_gpus(monkeypatch, present, kind):
    """Or none has one: they are devices of one kind."""
    monkeypatch.setattr(runtime, "gpu_names", lambda: ["A100"] * present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = Options(model="alexnet", mesh="4", cluster="a:1,a:2", task=1)
    assert member_of(options) == Membership(("a:1", "a:2"), 1, 4, kind)


@pytest.mark.parametrize(("present", "kind"), [(4, "gpu"), (2, "cpu")])
def test_rank_0_has_devices_of_the_kind_that_its_launcher_has_chosen(monkeypatch, present, kind):
    """Also where there are GPUs for one process, and not for all."""
    monkeypatch.setattr(runtime, "gpu_names", lambda: ["A100"] * present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = Options(model="alexnet", mesh="4", cluster="a:1,a:2", task=0, machine="h100")
    for name, value in member_of(options).environment.items():
        monkeypatch.setenv(name, value)
    devices = resolve(options).devices
    assert (devices.kind, devices.count, devices.tasks) == (kind, 4, ("a:1", "a:2"))


@pytest.mark.parametrize("cluster", ["local:2", "a:1,a:2"])
def test_one_gpu_per_process_is_asked_for_where_they_are_gpus(monkeypatch, cluster):
    """Not where there are too few for all, and CPUs are taken."""
    present = 4
    monkeypatch.setattr(runtime, "gpu_names", lambda: ["A100"] * present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = Options(model="alexnet", mesh="8", cluster=cluster, task=0 if ":1" in cluster else None, clients="ranks")
    assert member_of(options).kind == "cpu"
    present = 8
    with pytest.raises(UsageError, match="NCCL takes one GPU per process, and there are 2 processes; take --mesh=2"):
        member_of(options)


@pytest.mark.parametrize(("tasks", "network", "notes"), [
    (("alpha:1", "beta:1"), None, ["note: TensorFlow's servers listen on all interfaces while the run lasts, without "
                                   "authentication (docs/cluster.md#who-can-connect)"]),
    ((), None, ["note: this system gives the processes no network of their own: TensorFlow's servers listen on all "
                "interfaces while the run lasts, without authentication (docs/cluster.md#who-can-connect)"]),
    ((), object(), [])])
def test_servers_that_others_can_reach_are_told(monkeypatch, capfd, tasks, network, notes):
    monkeypatch.setattr(launcher, "_met", lambda *_: ([], SimpleNamespace(done=False)))
    monkeypatch.setattr(launcher, "own_network", lambda: contextlib.nullcontext(network))
    monkeypatch.setattr(launcher, "_with_restarts", lambda *_: 0)
    assert launcher.launch(lambda: None, Membership(tasks, 0, 2, "cpu"), Interrupts()) == 0
    assert capfd.readouterr().err.splitlines() == notes


@pytest.fixture
def run_of_one(monkeypatch, tmp_path):
    """A run whose rank 0 has begun to write a checkpoint when it has an outcome, and is ended; somebody has wanted it
    to end with so many signals. Nothing is left of what rank 0 was writing."""
    def run(outcome, wishes=0, restarts=0, wrote=""):
        options = SimpleNamespace(output_dir=str(tmp_path), in_place=False, to_arguments=list, clients="one",
                                  max_restarts=restarts, warmup=1, steps=6)

        def watched(*_):
            (tmp_path / "checkpoint" / ".partial-abc").mkdir(parents=True)
            (tmp_path / "checkpoint" / ".writing.lock").touch()
            (tmp_path / "metrics.jsonl").write_text("{}\n")
            if wrote:
                (tmp_path / "summary.json").write_text(wrote)
            return outcome
        monkeypatch.setattr(launcher, "TaskProcess", lambda *_, **__: SimpleNamespace(exit_code=None))
        monkeypatch.setattr(launcher, "end_all", lambda tasks: None)
        monkeypatch.setattr(launcher, "watch", watched)
        plan = SimpleNamespace(devices=SimpleNamespace(tasks=("a:1",), count=1, kind="cpu"), options=options,
                               asked=options, first_step=0)
        moments = iter([0.0, 0.6, 1.2])
        with Interrupts(lambda: next(moments)) as interrupts:
            interrupts.hold()
            for _ in range(wishes):
                signal.raise_signal(signal.SIGTERM)
            try:
                return launcher._with_restarts(plan, Membership((), 0, 1, "cpu"), [], interrupts, None)
            finally:
                assert os.listdir(tmp_path / "checkpoint") == []
    return run


def test_a_fault_after_a_signal_is_told(run_of_one):
    """Nothing of what was measured is written then: it did not end as it should."""
    with pytest.raises(ClusterError, match=r"^rank 1 was killed by SIGKILL when the run was to end; all processes were "
                                           "ended, and nothing was written after the last checkpoint$"):
        run_of_one(Outcome(7, Fault(1, "was killed by SIGKILL")), wishes=1, restarts=3)


@pytest.mark.parametrize(("outcome", "wishes"), [
    (Outcome(7, Fault(0, "was killed by SIGTERM")), 1), (Outcome(7, Fault(1, "(b:1) was killed by SIGTERM")), 1),
    (Outcome(143), 3), (Outcome(7, Fault(1, "(b:1) closed its connection")), 3)])
def test_a_fault_that_is_the_signal_itself_is_none(run_of_one, outcome, wishes):
    assert run_of_one(outcome, wishes) == 143


def test_what_rank_0_was_writing_is_removed_when_no_restart_is_left(run_of_one):
    with pytest.raises(ClusterError, match="was stopped; all processes were ended; --max_restarts=3"):
        run_of_one(Outcome(7, Fault(0, "was stopped")))


def test_a_signal_before_a_run_is_started_again(run_of_one, monkeypatch, capsys):
    """What was measured before the fault is there: it is not said that nothing was."""
    def taking_long(plan):
        signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(resume=plan.options.output_dir)
    monkeypatch.setattr(launcher, "options_after", taking_long)
    assert run_of_one(Outcome(7, Fault(1, "was killed by SIGKILL")), restarts=1) == 143
    assert capsys.readouterr().err.splitlines()[1:] == [
        "interrupted before the run was started again; nothing was written after its last checkpoint"]


def test_a_signal_while_the_network_is_made_starts_nothing(monkeypatch, capfd):
    @contextlib.contextmanager
    def struck():
        signal.raise_signal(signal.SIGINT)
        yield None
    monkeypatch.setattr(launcher, "_met", lambda *_: ([], SimpleNamespace(done=False)))
    monkeypatch.setattr(launcher, "own_network", struck)
    monkeypatch.setattr(launcher, "_with_restarts", lambda *_: pytest.fail("started"))
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        launcher.launch(lambda: None, Membership((), 0, 2, "cpu"), interrupts)
    assert (interrupts.exit_code, capfd.readouterr().err) == (130, "")


def test_what_another_host_finds_wrong_is_told_on_all(monkeypatch, tmp_path, capsys):
    """Its own line is on that host alone."""
    told, tasks = [], ("a:1", "b:1")
    other = SimpleNamespace(rank=1, exit_code=2, fault=lambda: None, end=lambda **message: told.append(message))
    options = SimpleNamespace(output_dir=str(tmp_path / "run"), in_place=False, to_arguments=list, clients="ranks",
                              max_restarts=3)
    plan = SimpleNamespace(devices=SimpleNamespace(tasks=tasks, count=2, kind="cpu"), options=options, asked=options,
                           first_step=0)
    monkeypatch.setattr(launcher, "TaskProcess", lambda *_, **__: SimpleNamespace(
        rank=0, exit_code=None, fault=lambda: None))
    monkeypatch.setattr(launcher, "end_all", lambda tasks: None)
    member = Membership(tasks, 0, 2, "cpu", "ranks")
    assert launcher._with_restarts(plan, member, [other], Interrupts(), None) == 2
    line = "rank 1 (b:1) has found what is to be mended, and says it on its own host (exit code 2)"
    assert told == [{"end": 2, "error": line}]
    assert capsys.readouterr().err == f"error: {line}\n"


_DONE = '{"status": "done", "steps_done": 7}'


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_process_that_is_lost_once_all_is_written_is_no_fault(run_of_one, tmp_path, restarts):
    assert run_of_one(Outcome(7, Fault(1, "was killed by SIGKILL")), restarts=restarts, wrote=_DONE) == 0
    assert (tmp_path / "metrics.jsonl").exists()


def test_the_summary_of_a_run_before_ends_no_other(run_of_one, tmp_path):
    """Its last checkpoint was damaged: a run goes on from the one before, beside a summary of all steps."""
    (tmp_path / "summary.json").write_text(_DONE)
    with pytest.raises(ClusterError, match="rank 1 was killed by SIGKILL; all processes were ended"):
        run_of_one(Outcome(7, Fault(1, "was killed by SIGKILL")))


def test_a_process_that_is_lost_once_an_interrupted_run_is_written_is_no_fault(run_of_one):
    assert run_of_one(Outcome(7, Fault(1, "was killed by SIGKILL")), wishes=1, wrote='{"status": "interrupted"}') == 143


@pytest.mark.parametrize("status", ["losses disagree", "diverged", "not kept"])
def test_an_interrupted_run_that_went_wrong_does_not_end_as_if_it_had_not(run_of_one, status):
    with pytest.raises(ClusterError, match=r"summary.json tells what came of the run$"):
        run_of_one(Outcome(7, Fault(1, "was killed by SIGKILL")), wishes=1, wrote=f'{{"status": "{status}"}}')


@pytest.mark.parametrize(("cluster", "mesh", "present", "says"), [
    ("a:1,b:1", "8", 2, r"--mesh=8: more GPUs than there are \(2\); use --mesh=4 or less"),
    ("a:1,a:2,b:1,b:2", "4", 1, r"--mesh=4: more GPUs than there are \(1\); use --devices=cpu"),
    ("local:4", "8", 6, r"--mesh=8: more GPUs than there are \(6\); use --mesh=4 or less")])
def test_how_many_gpus_a_run_may_have(monkeypatch, cluster, mesh, present, says):
    monkeypatch.setattr(runtime, "gpu_names", lambda: ["A100"] * present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    task = None if cluster.startswith("local") else 0
    with pytest.raises(UsageError, match=says):
        member_of(Options(model="alexnet", mesh=mesh, devices="gpu", cluster=cluster, task=task))
