"""What ends of processes leave behind: no folder that a run begins anew in, no process that nobody watches."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pase_mtf.errors import ClusterError, FormatError, UsageError
from pase_mtf.exit_codes import exit_code_of
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.cluster import hosts, launcher
from pase_mtf.launch.cluster.launcher import Fault, Outcome
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.files import RunFiles
from pase_mtf.launch.plan import resolve


def test_a_folder_goes_where_what_is_open_is_kept(tmp_path, monkeypatch):
    """NFS keeps a file that is open, and its folder with it, until it is closed."""
    folder, known = tmp_path / "run", shutil.rmtree
    with RunFiles(str(folder)) as files:
        files.keep()

    def as_on_nfs(path, **how):
        held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        if not any(name.startswith(f"{os.path.realpath(path)}/") for name in held):
            known(path, **how)
    monkeypatch.setattr(launcher.shutil, "rmtree", as_on_nfs)
    launcher._clear_up(SimpleNamespace(output_dir=str(folder), in_place=False))
    assert os.listdir(tmp_path) == []


def test_a_follower_that_fails_is_kept_by_no_thread():
    """As TensorFlow's would: a process that stays is no fault that a launcher finds."""
    program = ("import runpy, threading, time\n"
               "from pase_mtf.launch.cluster import membership\n"
               "def fails(*_): raise RuntimeError('NCCL')\n"
               "membership.started_by_launcher = fails\n"
               "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
               "runpy.run_module('pase_mtf.launch.cluster.follower', run_name='__main__')\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "RuntimeError: NCCL" in done.stderr


def test_a_restart_is_told_what_was_asked_for(monkeypatch, tmp_path):
    options = SimpleNamespace(output_dir=str(tmp_path), in_place=False, to_arguments=list, clients="one",
                              max_restarts=1, warmup=1, steps=6)
    left = SimpleNamespace(**{**vars(options), "resume": str(tmp_path), "in_place": True, "steps": 0})
    plan = SimpleNamespace(devices=SimpleNamespace(tasks=("a:1",), count=1, kind="cpu"), options=options,
                           asked=options, first_step=0)
    told, outcomes = [], iter([Outcome(7, Fault(0, "was killed by SIGKILL")), Outcome(0)])
    monkeypatch.setattr(launcher, "TaskProcess", lambda rank, command, environment, **_: told.append(
        json.loads(environment["PASE_MTF_CLUSTER"]).get("asked")) or SimpleNamespace(exit_code=0))
    monkeypatch.setattr(launcher, "end_all", lambda tasks: None)
    monkeypatch.setattr(launcher, "watch", lambda *_: next(outcomes))
    monkeypatch.setattr(launcher, "options_after", lambda _: left)
    assert launcher._with_restarts(plan, Membership((), 0, 1, "cpu"), [], Interrupts(), None) == 0
    assert told == [None, [1, 6]]


def test_what_another_run_has_found_meanwhile_stays(tmp_path):
    """A search of that name was faster, and has ended: rank 0 had not come to its folder yet."""
    folder = tmp_path / "run"
    with RunFiles(str(folder)) as files:
        files.write("summary.json", "{}")
        files.keep()
    for anew in (False, True):
        launcher._clear_up(SimpleNamespace(output_dir=str(folder), in_place=False), anew=anew)
        assert (folder / "summary.json").exists()


def test_a_run_that_has_told_what_came_of_it_is_not_begun_anew(tmp_path):
    folder = tmp_path / "run"
    with RunFiles(str(folder)) as files:
        files.write("summary.json", '{"status": "losses disagree"}')
        files.keep()
    options = SimpleNamespace(output_dir=str(folder), in_place=False, resume=None)
    with pytest.raises(ClusterError, match="a run has ended there"):
        launcher.options_after(SimpleNamespace(options=options, first_step=0))
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize("anew", [False, True])
def test_a_folder_that_cannot_be_renamed_goes_all_the_same(tmp_path, monkeypatch, anew):
    folder = tmp_path / "run"
    with RunFiles(str(folder)) as files:
        files.keep()

    def refuses(*_):
        raise OSError(39, "Directory not empty")
    monkeypatch.setattr(launcher.os, "rename", refuses)
    launcher._clear_up(SimpleNamespace(output_dir=str(folder), in_place=False), anew=anew)
    assert os.listdir(tmp_path) == []


def test_what_was_measured_stays_where_no_restart_comes_to_be(monkeypatch, tmp_path):
    """The host of rank 1 is gone for good, and there is no checkpoint yet."""
    folder = tmp_path / "run"
    with RunFiles(str(folder)) as files:
        files.keep()
    (folder / "metrics.jsonl").write_text("{}\n")
    options = SimpleNamespace(output_dir=str(folder), in_place=False, resume=None, max_restarts=1)
    plan = SimpleNamespace(options=options, asked=options, first_step=0)

    def nobody(member, interrupts, ready):
        ready.result(10)
        raise ClusterError("no launcher of rank 1 came")
    monkeypatch.setattr(launcher, "_attempt", lambda *_, **__: Outcome(7, Fault(1, "closed its connection")))
    monkeypatch.setattr(launcher, "meet", nobody)
    with pytest.raises(ClusterError, match="no launcher of rank 1 came"):
        launcher._with_restarts(plan, Membership(("a:1", "b:1"), 0, 2, "cpu"), [], Interrupts(), None)
    assert (folder / "metrics.jsonl").read_text() == "{}\n"


def test_a_folder_that_rank_0_has_not_made_stays(tmp_path):
    """Somebody made one of that name before rank 0 came to it, and a process was lost: rank 0 will refuse it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    launcher._clear_up(SimpleNamespace(output_dir=str(folder), in_place=False), anew=True)
    assert (folder / "thesis.tex").read_text() == "mine"


def test_what_rank_0_finds_wrong_is_told_on_other_hosts(monkeypatch, tmp_path, capsys):
    """Its own line is on its host alone, which says no more."""
    told, tasks = [], ("a:1", "b:1")
    other = SimpleNamespace(rank=1, exit_code=None, fault=lambda: None, end=lambda **message: told.append(message))
    options = SimpleNamespace(output_dir=str(tmp_path / "run"), in_place=False, to_arguments=list, clients="one",
                              max_restarts=3)
    plan = SimpleNamespace(devices=SimpleNamespace(tasks=tasks, count=2, kind="cpu"), options=options, asked=options,
                           first_step=0)
    monkeypatch.setattr(launcher, "TaskProcess", lambda *_, **__: SimpleNamespace(
        rank=0, exit_code=4, fault=lambda: None))
    monkeypatch.setattr(launcher, "end_all", lambda tasks: None)
    assert launcher._with_restarts(plan, Membership(tasks, 0, 2, "cpu"), [other], Interrupts(), None) == 4
    assert told == [{"end": 4, "error": "rank 0 (a:1) has found what is to be mended, and says it on its own host "
                                        "(exit code 4)"}]
    assert capsys.readouterr().err == ""


def test_another_host_says_that_rank_0_was_lost_when_the_run_was_to_end(monkeypatch, capsys):
    """Its files may never have been written: that is no end by the signal. Nor is anything begun anew."""
    said = []
    wire = SimpleNamespace(messages=lambda: [{"start": True}], lost="closed its connection", close=lambda: None,
                           say=lambda **message: said.append(message))
    monkeypatch.setattr(hosts, "_check_alone", lambda member: None)
    monkeypatch.setattr(hosts, "_knock", lambda *_: wire)
    monkeypatch.setattr(hosts, "start_worker", lambda member: SimpleNamespace(fault=lambda: None, exit_code=None))
    monkeypatch.setattr(hosts, "end_all", lambda processes: None)
    with Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGTERM)
        code = hosts.join_run(Membership(("a:1", "b:1"), 1, 2, "cpu"), 3, interrupts)
    assert (code, said) == (7, [{"signal": 15, "wish": 1}])
    assert capsys.readouterr().err == "[rank 1] error: rank 0 (a:1): its launcher closed its connection\n"


def test_a_preset_that_was_edited_since_is_not_begun_anew_in_the_place_of_the_run(tmp_path, preset):
    """Before the first checkpoint: the folder would be cleared, and hold another model."""
    mine, folder = tmp_path / "mine.json", tmp_path / "run"
    shutil.copy(preset, mine)
    plan = resolve(parse_command_line(["--model=alexnet", f"--preset={mine}", "--mesh=2", "--devices=cpu",
                                       "--machine=h100", "--cluster=local:2", f"--output_dir={folder}"]))
    folder.mkdir()
    (folder / "config.json").write_text(plan.config_json())
    (folder / "metrics.jsonl").write_text("{}\n")
    assert launcher.options_after(plan) is plan.options
    mine.write_text(json.dumps({**json.loads(mine.read_text()), "dropout": 0.5}))
    with pytest.raises(UsageError, match=r"was started with other sizes in --preset=.*mine\.json"):
        launcher.options_after(plan)


def test_what_ended_a_run_is_told_where_it_cannot_be_started_again(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoint" / "step-4").mkdir(parents=True)
    plan = SimpleNamespace(options=SimpleNamespace(output_dir=str(folder), in_place=False, resume=None), first_step=0)
    with pytest.raises(FormatError, match=r"^rank 1 was killed by SIGKILL; .*there is no whole checkpoint"):
        launcher._again(plan, "rank 1 was killed by SIGKILL", "restart 1 of 3")


def test_another_host_that_is_to_end_before_a_run_starts_again_does_not_say_that_nothing_was_measured(
        monkeypatch, capsys):
    again = {"end": 7, "error": "rank 2 was killed", "again": True}
    wires = [SimpleNamespace(messages=lambda: [{"start": True}, again], lost=None, close=lambda: None)]

    def knock(*_):
        if wires:
            return wires.pop()
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt  # as it does where somebody has asked
    monkeypatch.setattr(hosts, "_check_alone", lambda member: None)
    monkeypatch.setattr(hosts, "_knock", knock)
    monkeypatch.setattr(hosts, "start_worker", lambda member: None)
    monkeypatch.setattr(hosts, "end_all", lambda processes: None)
    monkeypatch.setattr(hosts, "_pass_on", lambda *given: None)
    member = Membership(("a:1", "b:1"), 1, 2, "cpu")
    with Interrupts(at_once=False) as interrupts:
        code = exit_code_of(lambda: interrupts.hold() or hosts.join_run(member, 3, interrupts), interrupts, smaller="")
    assert code == 143
    assert capsys.readouterr().err.splitlines() == [
        "[rank 1] rank 2 was killed; starting again",
        "[rank 1] interrupted before the run was started again; nothing was written after its last checkpoint"]


def test_a_host_whose_output_nobody_reads_serves_its_devices_all_the_same(monkeypatch):
    """At a restart its line broke the pipe: its launcher ended, and the run with it."""
    told = iter([[{"start": True}], [{"end": 0}]])
    wire = SimpleNamespace(messages=lambda: next(told), lost=None, close=lambda: None)
    monkeypatch.setattr(hosts, "_check_alone", lambda member: None)
    monkeypatch.setattr(hosts, "_knock", lambda *_: wire)
    monkeypatch.setattr(hosts, "start_worker", lambda member: SimpleNamespace(fault=lambda: None, exit_code=None))
    monkeypatch.setattr(hosts, "end_all", lambda processes: None)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, contextlib.redirect_stdout(gone):
        assert hosts.join_run(Membership(("a:1", "b:1"), 1, 2, "cpu"), 3, Interrupts()) == 0


def test_a_signal_does_not_wait_for_a_look_at_a_large_checkpoint(monkeypatch, tmp_path):
    """Before a restart on one computer; the third was not heeded either."""
    over = threading.Event()

    def taking_long(plan):
        signal.raise_signal(signal.SIGTERM)
        over.wait(20.0)
        return plan.options
    options = SimpleNamespace(output_dir=str(tmp_path), in_place=True, resume="auto", max_restarts=1)
    plan = SimpleNamespace(options=options, asked=options, first_step=0)
    monkeypatch.setattr(launcher, "_attempt", lambda *_, **__: Outcome(7, Fault(1, "was killed by SIGKILL")))
    monkeypatch.setattr(launcher, "options_after", taking_long)
    begin = time.monotonic()
    with Interrupts() as interrupts:
        interrupts.hold()
        try:
            assert launcher._with_restarts(plan, Membership((), 0, 2, "cpu"), [], interrupts, None) == 143
        finally:
            over.set()
    assert time.monotonic() - begin < 10.0
