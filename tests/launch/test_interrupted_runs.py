"""Runs that a signal or a kill ends: exit codes, what is kept, and what is left behind."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
from cluster_runs import metrics

from pase_mtf.calibration import load
from pase_mtf.files import write_atomically
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch import execution
from pase_mtf.launch.arms import program, recipe
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.checkpoints import keeping
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint

# (number, exit code): the gate sends the one that a scheduler sends, and that of a terminal that is closed. A shell
# without job control has what it starts beside itself ignore SIGINT, and nohup SIGHUP, these tests perhaps included.
_SIGNALS = [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
            pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]


def test_a_picture_that_cannot_be_read_ends_a_run_as_a_signal_does(launch, monkeypatch, tmp_path):
    """What was measured is reported, the last step kept; once pictures can be read again the run goes on."""
    folder, rng, step, whole = tmp_path / "pictures", np.random.default_rng(0), Arm.step, {}
    folder.mkdir()
    for number in range(48):
        PIL.Image.fromarray(rng.integers(256, size=(64, 64), dtype=np.uint8)).save(folder / f"{number}.jpg")
    (folder / "labels.txt").write_text("".join(f"{number}.jpg {number % 10}\n" for number in range(48)))

    def damaging(self, batch, trace=False):
        if not whole:
            for path in folder.glob("*.jpg"):  # behind their headers, which are looked at before
                whole[path] = path.read_bytes()
                write_atomically(path, whole[path][:1500])  # they are read ahead meanwhile
        return step(self, batch, trace)
    monkeypatch.setattr(Arm, "step", damaging)
    code, run, out, err = launch(f"--data={folder}", "--compare=none", "--steps=60")
    assert code == 2
    assert ".jpg: damaged" in err.splitlines()[-1]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < len(steps) < 61
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert "measured ms" in out
    assert find_checkpoint(str(run)).step == len(steps)
    for path, content in whole.items():
        path.write_bytes(content)
    code, again, _, err = launch(f"--resume={run}", "--steps=3", output="again")
    assert code == 0, err
    assert json.loads((again / "summary.json").read_text())["first_step"] == len(steps)


@pytest.mark.slow
@pytest.mark.parametrize(("struck", "level"), [(5, 3), (14, 6)])
def test_a_signal_keeps_what_was_measured(launch, monkeypatch, struck, level):
    """In the turn of five steps after the first, while its first arm has the lead, and while the arm that is kept,
    which is its last, is the only one behind."""
    step, done = Arm.step, []

    def interrupted(self, batch, trace=False):
        done.append(self.name)
        if len(done) == struck:
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch, trace)
    monkeypatch.setattr(Arm, "step", interrupted)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    code, folder, out, _ = launch("--compare=stock_data_parallel,expert", "--steps=20")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert code == 143
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["arms"]["stock_data_parallel"]["measured_steps"] == level - 1
    assert "measured ms" in out
    # Every step of every arm is in one of the two runs' metrics, and in one only.
    monkeypatch.setattr(Arm, "step", step)
    code, second, _, _ = launch(f"--resume={folder}", "--steps=1", "--warmup=1", output="second")
    assert code == 0
    for arm in ("search", "stock_data_parallel", "expert"):
        assert list(metrics(folder, arm)) == list(range(level)), arm
        assert list(metrics(second, arm)) == [level, level + 1], arm


def test_a_signal_that_is_sent_twice_is_one_wish():
    """As `timeout` sends it, to a process and to its group; half a second later it is another."""
    times = iter((7.0, 7.4, 7.5))
    with Interrupts(lambda: next(times)) as interrupts:
        interrupts.hold()
        for insisted in (False, False, True):
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.asked
            assert interrupts.insisted == insisted
    assert interrupts.exit_code == 143


def started(folder, preset, *flags, **streams):
    """A run without end as a user starts it, which can be read from."""
    return subprocess.Popen(
        [sys.executable, "-m", "pase_mtf.launch", "--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu",
         "--machine=a100", "--steps=1000000", "--compare=none", f"--output_dir={folder}", *flags],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams})


@pytest.mark.parametrize(("number", "expected"), _SIGNALS)
def test_a_signal_for_real(tmp_path, preset, number, expected):
    """The signal itself, to the process as a user starts it."""
    folder = tmp_path / "run"
    process = started(folder, preset, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    try:
        while process.poll() is None and not process.stdout.readline().startswith("step    10"):
            pass
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert (process.returncode, err) == (expected, "")
    assert "measured ms" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["arms"]["search"]["measured_steps"] >= 8
    assert (folder / "report.html").exists()
    assert find_checkpoint(str(folder)).step == 1 + max(metrics(folder)) >= 11


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path, preset):
    process = started(tmp_path / "run", preset, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    try:
        for line in ("step    10", "step    20"):
            while not process.stdout.readline().startswith(line):
                assert process.poll() is None
            process.send_signal(signal.SIGHUP)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("stderr", "number", "expected"), [
    (subprocess.PIPE, None, 141), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (subprocess.PIPE, signal.SIGINT, 130), (subprocess.STDOUT, None, 141),
        (subprocess.STDOUT, signal.SIGINT, 130)))])
def test_a_reader_that_goes_away_for_real(tmp_path, preset, stderr, number, expected):
    """As `| head`, and as the `tee` of `| tee log` and `2>&1 | tee log` when Ctrl-C strikes."""
    folder = tmp_path / "run"
    process = started(folder, preset, stderr=stderr)
    try:
        while process.poll() is None and not process.stdout.readline().startswith("step    10"):
            pass
        process.stdout.close()
        if number:
            process.send_signal(number)
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert (process.returncode, err or "") == (expected, "")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert (folder / "report.html").exists()
    assert find_checkpoint(str(folder)).step == 1 + max(metrics(folder)) >= 11


@pytest.fixture
def broken():
    """Kind -> an output that takes nothing."""
    reading, writing = os.pipe()
    os.close(reading)
    found = {"gone": writing, "full": os.open("/dev/full", os.O_WRONLY)}
    yield found
    for number in found.values():
        os.close(number)


@pytest.mark.parametrize(("kind", "signalled", "code", "line"), [
    ("gone", False, 141, ""), ("gone", True, 143, ""),
    ("full", False, 2, "error: disk full (while writing); free space or choose another place\n")])
def test_an_output_that_takes_no_more_ends_a_run_as_a_signal_does(launch, monkeypatch, tmp_path, broken, kind,
                                                                  signalled, code, line):
    step, done = Arm.step, []

    def breaking(self, batch, trace=False):
        done.append(self.name)
        if len(done) == 4:
            os.dup2(broken[kind], output.fileno())
            if signalled:
                signal.raise_signal(signal.SIGTERM)
        return step(self, batch, trace)
    monkeypatch.setattr(Arm, "step", breaking)
    with open(tmp_path / "log", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        found, folder, _, err = launch("--compare=stock_data_parallel", "--steps=20")
    assert (found, err) == (code, line)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps_done"]) == ("interrupted", find_checkpoint(str(folder)).step)
    for arm in summary["arms"]:
        assert list(metrics(folder, arm)) == list(range(summary["steps_done"]))


def struck_process(folder, when, number, *arguments):
    """A program that sends a signal to itself as soon as it opens a file, or asks for a module, of that name."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def strike(event, details):\n"
        f"    if event in ('open', 'import') and str(details[0]).endswith({when!r}):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "sys.addaudithook(strike)\n")
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=folder,
                          env={**os.environ, "PYTHONPATH": paths}, timeout=600,
                          preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("program", ["launch", "calibration", "epochs", "layout", "search", "strategy.compile"])
def test_a_signal_before_the_imports_are_through(tmp_path, program, number, expected):
    """The program sends it to itself when it asks for the first module after `pase_mtf`."""
    ended = struck_process(tmp_path, "pase_mtf.errors", number, f"pase_mtf.{program}", "--help")
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        expected, "", "interrupted\n")


@pytest.mark.parametrize(("number", "expected"), _SIGNALS)
@pytest.mark.parametrize(("program", "file", "line"), [
    ("search", "network.npz", "interrupted; set --time_limit to get the best so far\n"),
    ("layout", "network.py:build", "interrupted; set --time_limit to get the best layout so far\n")])
def test_a_signal_once_they_are_through(tmp_path, program, file, line, number, expected):
    """Commands that measure nothing end by a line as well."""
    name = file.partition(":")[0]
    (tmp_path / name).write_text("")
    flags = [file] if program == "search" else [f"--graph={file}", "--mesh=2"]
    ended = struck_process(tmp_path, name, number, f"pase_mtf.{program}", *flags)
    assert (ended.returncode, ended.stdout, ended.stderr) == (expected, "", line)


@pytest.mark.parametrize("stage", [
    "export_with_program", "load_machine", "find_strategies", "build_arms", "check_memory"])
def test_sigterm_before_the_training_leaves_nothing(launch, monkeypatch, stage):
    module = load if stage == "load_machine" else execution
    work = getattr(module, stage)

    def struck(*arguments, **more):
        signal.raise_signal(signal.SIGTERM)
        return work(*arguments, **more)
    monkeypatch.setattr(module, stage, struck)
    code, folder, _, err = launch("--compare=none")
    assert (code, err) == (143, "interrupted before anything was measured\n")
    assert not folder.exists()


def test_sigterm_while_lowering_leaves_nothing(launch, monkeypatch):
    """In the midst of it, and once more while the first cleans up."""
    def struck(*arguments, **more):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(recipe, "lower", struck)
    code, folder, _, err = launch("--compare=none")
    assert (code, err) == (143, "interrupted before anything was measured\n")
    assert not folder.exists()


def test_sigterm_while_the_files_are_written(launch, monkeypatch):
    """All are written to the end."""
    def struck(*arguments, **more):
        signal.raise_signal(signal.SIGTERM)
        return save(*arguments, **more)
    save = keeping.save_checkpoint
    monkeypatch.setattr(keeping, "save_checkpoint", struck)
    code, folder, _, err = launch("--compare=none")
    assert (code, err) == (0, "")
    assert find_checkpoint(str(folder)).step == 5
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_killed_in_training(tmp_path, preset, launch):
    """kill -9: the next run goes on from the last checkpoint, with the losses that would have come."""
    folder = tmp_path / "killed"
    process = started(folder, preset, "--checkpoint_every=4")
    try:
        while process.poll() is None and not process.stdout.readline().startswith("step    15"):
            pass
    finally:
        process.kill()
    process.communicate()
    code, second, _, err = launch(f"--resume={folder}", "--steps=3", "--warmup=1", "--compare=none", output="second")
    assert (code, err) == (0, "")
    first, then = metrics(folder), metrics(second)
    assert min(then) >= 12
    assert min(then) % 4 == 0
    assert min(then) <= max(first) + 1
    both = first.keys() & then.keys()
    assert {step: then[step] for step in both} == pytest.approx({step: first[step] for step in both}, rel=1e-6)


def test_ctrl_c_before_anything_was_measured(launch, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt
    monkeypatch.setattr(program, "build_program", interrupted)
    code, folder, _, err = launch()
    assert (code, err.count("\n")) == (130, 1)
    assert not folder.exists()


@pytest.mark.parametrize(("kind", "code", "line"), [
    ("gone", 141, ""), ("full", 2, "error: disk full (while writing); free space or choose another place\n")])
def test_an_output_that_takes_no_more_before_the_first_step_is_no_signal(launch, monkeypatch, tmp_path, broken, kind,
                                                                         code, line):
    known = execution.Judge

    def noting(*given):
        os.dup2(broken[kind], output.fileno())
        print("note: the data lie elsewhere", flush=True)
        return known(*given)
    monkeypatch.setattr(execution, "Judge", noting)
    with open(tmp_path / "log", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        found, folder, _, err = launch("--compare=none")
    assert (found, err) == (code, line)
    assert not folder.exists()
