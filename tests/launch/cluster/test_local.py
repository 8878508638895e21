"""Whole runs over processes of this computer: `--cluster=local:N`, as a user starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from pase_mtf.launch.__main__ import main
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint

_MARK = "PASE_MTF_TEST_RUN"


def _processes(mark, what=""):
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



def _metrics(folder, arm="search"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["arm"] == arm]
    assert steps == sorted(set(steps))  # every step once
    return {line["step"]: line["loss"] for line in lines if line["arm"] == arm}


class _Run:
    """A run that was started by its command line; `end` says what it came to, and that nothing of it is left."""

    def __init__(self, preset, folder, *flags):
        self.folder, self._mark = folder, str(folder)
        self._temporary = folder.parent / "tmp"
        self._temporary.mkdir(exist_ok=True)
        given = {flag.split("=")[0] for flag in flags}
        defaults = ("--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100",
                    "--steps=2", "--warmup=1", "--log_every=1", "--compare=none", "--cluster=local:2")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pase_mtf.launch", *(flag for flag in defaults if flag.split("=")[0] not in given),
             f"--output_dir={folder}", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, _MARK: self._mark, "TMPDIR": str(self._temporary)})

    def reach(self, step):
        """Waits until a step was done."""
        path = self.folder / "metrics.jsonl"
        while self.process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") > step:
                return
            time.sleep(0.02)
        raise AssertionError(self.process.communicate())

    def pid(self, rank):
        """Of the process of a rank."""
        what = "pase_mtf.launch.cluster.worker" if rank else "--output_dir"
        pid, = (pid for pid in _processes(self._mark, what) if pid != self.process.pid)
        return pid

    def end(self):
        """(exit code, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=600)
            assert _processes(self._mark) == []
            assert os.listdir(self._temporary) == []
        finally:
            self.process.kill()
            for pid in _processes(self._mark):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode, out, err


def test_two_processes_train_as_one_does(preset, finished, tmp_path):
    code, out, err = _Run(preset, tmp_path / "run", "--strategy=data_parallel").end()
    assert (code, err) == (0, "")
    assert "2 virtual CPU devices in 2 processes on" in out
    assert "measured ms" in out
    assert _metrics(tmp_path / "run", "data_parallel") == pytest.approx(_metrics(finished), rel=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["arms"]["data_parallel"]["measured_bytes"] > 0
    assert find_checkpoint(str(tmp_path / "run")).step == 3


@pytest.mark.slow
def test_sigterm_ends_all(preset, tmp_path):
    run = _Run(preset, tmp_path / "run", "--steps=100000")
    run.reach(3)
    run.process.terminate()
    code, out, err = run.end()
    assert (code, err) == (143, "")
    assert "measured ms" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert find_checkpoint(str(tmp_path / "run")).step == 1 + max(_metrics(tmp_path / "run"))


@pytest.mark.slow
def test_an_error_of_rank_0_ends_all(preset, tmp_path):
    code, _, err = _Run(preset, tmp_path / "run", "--batch=7", "--strategy=expert").end()
    assert code == 3
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(preset, tmp_path):
    run = _Run(preset, tmp_path / "run", "--steps=100000")
    run.reach(3)
    os.kill(run.pid(1), signal.SIGSTOP)
    run.process.kill()
    deadline = time.monotonic() + 15
    while _processes(str(tmp_path / "run")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.end()[0] == -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(preset, tmp_path_factory):
    """The losses of 150 steps in one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=149",
                 "--warmup=1", "--compare=none", "--strategy=data_parallel", f"--output_dir={folder}"]) == 0
    losses = _metrics(folder, "data_parallel")
    assert list(losses) == list(range(150))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_process_costs_no_step(preset, undisturbed, tmp_path, rank, number):
    """Started again from the last checkpoint, in the same folder; the curve is that of a run that was left alone."""
    run = _Run(preset, tmp_path / "run", "--strategy=data_parallel", "--steps=149", "--checkpoint_every=20",
               "--max_restarts=1")
    run.reach(50)
    os.kill(run.pid(rank), number)
    start = time.monotonic()
    line = run.process.stderr.readline()
    while line and "starting again" not in line:  # TensorFlow may say of rank 0 that its connection was reset
        line = run.process.stderr.readline()
    assert time.monotonic() - start < 15
    assert f"rank {rank} was {'killed by SIGKILL' if number == signal.SIGKILL else 'stopped'}" in line
    assert "starting again from the checkpoint" in line
    code, _, err = run.end()
    assert (code, err) == (0, "")
    assert _metrics(tmp_path / "run", "data_parallel") == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_when_no_restart_is_left(preset, tmp_path):
    run = _Run(preset, tmp_path / "run", "--steps=100000", "--checkpoint_every=10")
    run.reach(30)
    os.kill(run.pid(1), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 7
    # TensorFlow may say of rank 0, before, that its connection was reset.
    assert err.splitlines()[-1] == ("error: rank 1 was killed by SIGKILL; all processes were ended; --max_restarts=3 "
                                    "starts again from the last checkpoint")
    assert find_checkpoint(str(tmp_path / "run")).step >= 10


@pytest.mark.slow
def test_a_fault_before_the_first_checkpoint(preset, tmp_path):
    run = _Run(preset, tmp_path / "run", "--steps=299", "--max_restarts=2")
    run.reach(5)
    os.kill(run.pid(0), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 0
    assert "starting again from the first step (restart 1 of 2)" in err
    assert list(_metrics(tmp_path / "run")) == list(range(300))


def _hosts(count):
    """Addresses of this computer with a free port above them, where the launchers meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [f"127.0.0.1:{port - number}" for number in range(count, 0, -1)]


@pytest.mark.slow
def test_two_launchers_with_tf_config(preset, undisturbed, tmp_path, monkeypatch):
    """As operators of Kubernetes start them; the worker of the second is lost once."""
    tasks, runs = _hosts(2), []
    for rank in range(2):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": tasks},
                                                    "task": {"type": "worker", "index": rank}}))
        runs.append(_Run(preset, tmp_path / f"rank{rank}", "--strategy=data_parallel", "--steps=149",
                         "--checkpoint_every=20", "--max_restarts=1", "--cluster=tf_config"))
    runs[0].reach(50)
    os.kill(runs[1].pid(1), signal.SIGKILL)
    (code, _, err), (other_code, other_out, other_err) = runs[0].end(), runs[1].end()
    assert (code, other_code) == (0, 0)
    lost = f"rank 1 ({tasks[1]}) was killed by SIGKILL; starting again"
    assert lost in err
    assert f"[rank 1] {lost}" in other_err
    assert other_out == f"[rank 1] serves 1 devices at {tasks[1]}\n" * 2
    assert not (tmp_path / "rank1").exists()
    assert _metrics(tmp_path / "rank0", "data_parallel") == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_a_host_that_is_lost(preset, tmp_path):
    """Its launcher is stopped, as if its network were cut: both sides end, in time."""
    tasks = ",".join(_hosts(2))
    runs = [_Run(preset, tmp_path / f"rank{rank}", "--steps=100000", f"--cluster={tasks}", f"--task={rank}")
            for rank in range(2)]
    runs[0].reach(5)
    start = time.monotonic()
    runs[1].process.send_signal(signal.SIGSTOP)
    code, _, err = runs[0].end()
    assert time.monotonic() - start < 20  # 15, and what the end takes
    assert code == 7
    assert f"error: rank 1 ({tasks.split(',')[1]}) said nothing for 10 s; all processes were ended" in err
    runs[1].process.send_signal(signal.SIGCONT)
    code, _, err = runs[1].end()
    assert code == 7
    assert "[rank 1] error: " in err
