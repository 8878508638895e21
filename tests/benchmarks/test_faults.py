"""python -m benchmarks.faults: a row is kept as soon as it is there, and the struck processes are real ones."""

import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from benchmarks import fault_clusters, faults, namespaces
from benchmarks.fault_rows import Fault, Found
from benchmarks.fault_stages import STAGES, stage_faults


def test_a_benchmark_that_was_stopped_goes_on(monkeypatch, tmp_path, capsys):
    tried = []

    def fault(name, found):
        def now():
            tried.append(name)
            if isinstance(found, Exception):
                raise found
            return found
        return Fault(name, now)
    over = fault("local:2, --clients=one: rank 0 is killed, in training", Found(1, 0, "found late", [16.04]))
    page = tmp_path / "faults.md"
    monkeypatch.setattr(faults, "_faults", lambda runs, tries: [
        fault("kill -9", Found(tries, tries, "went on")), over, fault("SIGTERM", RuntimeError("stopped"))])
    with pytest.raises(RuntimeError, match="stopped"):
        faults.main([f"--output={page}", "--tries=3"])
    monkeypatch.setattr(faults, "_faults", lambda runs, tries: [
        fault("kill -9", Found(tries, tries, "went on")), over, fault("SIGTERM", Found(1, 1, "exit code 143"))])
    assert faults.main([f"--output={page}", "--tries=3"]) == 1  # one was not survived
    assert tried == ["kill -9", over.name, "SIGTERM", "SIGTERM"]
    rows = json.loads(page.with_suffix(".json").read_text())["rows"]
    assert [(row["fault"], row["tries"], row["survived"]) for row in rows] == [
        ("kill -9", 3, 3), (over.name, 1, 0), ("SIGTERM", 1, 1)]
    before, after = page.read_text().split("## Over processes")
    assert "kill -9" in before
    assert "SIGTERM" in before
    assert "16.0" in after
    tried.clear()
    assert faults.main([f"--output={page}", "--tries=3", "--only=kill", "--again"]) == 1
    assert tried == ["kill -9", over.name]
    assert faults.main([f"--output={page}", "--only=kil -9"]) == 2
    assert "--only=kil -9" in capsys.readouterr().err


def test_a_run_that_left_no_whole_checkpoint_is_a_row(tmp_path):
    """It ended the benchmark, and the page went on telling what an earlier version had survived."""
    (tmp_path / "run").mkdir()
    assert faults._went_on(faults._Runs(tmp_path), tmp_path / "run") == "no whole checkpoint was left"


@pytest.mark.parametrize(("stage", "survived"), [("in training", 0), ("in the search", 1)])
def test_who_has_trained_and_leaves_nothing_has_not_survived(tmp_path, stage, survived):
    ended = SimpleNamespace(stdout=iter(()), returncode=143, send_signal=lambda number: None,
                            communicate=lambda timeout: ("", ""))
    runs = SimpleNamespace(folder=tmp_path, start=lambda output, *flags: ended)
    fault, = (one for one in faults._ended(runs, signal.SIGTERM, 143) if one.name == f"SIGTERM {stage}")
    assert fault.tried().survived == survived


def test_every_signal_that_ends_a_run_has_rows(tmp_path):
    assert {"SIGTERM", "SIGINT", "SIGHUP"} <= {
        fault.name.split()[0] for fault in faults._faults(faults._Runs(tmp_path), 1)}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_takes_down_what_was_started(monkeypatch, tmp_path, capsys, number, code):
    gone = []

    def tried():
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            gone.append("hosts")
    monkeypatch.setattr(faults, "_faults", lambda runs, tries: [Fault("kill -9", tried)])
    before = signal.getsignal(signal.SIGTERM)
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers do not heed them
    hung = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("not taken"))  # under nohup it is not heeded
    try:
        assert faults.main([f"--output={tmp_path / 'faults.md'}"]) == code
    finally:
        signal.signal(signal.SIGINT, interrupts)
        signal.signal(signal.SIGHUP, hung)
    assert gone == ["hosts"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert "rows that were done are kept" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "said", "problem", "survived", "found"), [
    (2, "warning: no checkpoint\nerror: cannot write; free space or choose another place\n", "", 1,
     "exit code 2, one line; went on from the last whole checkpoint"),
    (2, "Traceback (most recent call last):\nerror: cannot write; free space or choose another place\n", "", 0,
     "exit code 2, a traceback; went on from the last whole checkpoint"),
    (1, "Segmentation fault\n", "", 0,
     "exit code 1, the last line: Segmentation fault; went on from the last whole checkpoint"),
    (2, "error: free space\n", "other losses", 0, "exit code 2, one line; other losses"),
    (0, "", "", 0, "exit code 0, the last line: nothing; went on from the last whole checkpoint")])
def test_what_is_wrong_with_a_full_disk_is_told(code, said, problem, survived, found):
    done = subprocess.CompletedProcess([], code, "", said)
    assert faults._full_disk_found(done, problem) == (1, survived, found, ())


def test_all_stages_and_both_ways_over_processes_are_struck(tmp_path):
    stages = [fault.name for fault in stage_faults(tmp_path, 20)]
    assert all(any(name.endswith(stage) and name.startswith(what) for name in stages)
               for stage in STAGES for what in ("kill -9", "SIGTERM", "SIGINT"))
    over = [fault.name for fault in fault_clusters.cluster_faults(tmp_path)]
    assert len(set(over)) == len(over)
    for what in ("worker is killed", "rank 0 is killed", "worker is stopped", "rank 0 is stopped", "worker's host is",
                 "host of rank 0 is"):
        assert sum(what in name for name in over) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("what", ["SIGTERM at a random moment of calibration",
                                  "3 hosts, --clients=ranks: the host of rank 0 is cut off, in training"])
def test_a_row(tmp_path, what):
    if "hosts" in what and namespaces.missing():
        pytest.skip(namespaces.missing())
    every = {fault.name: fault for fault in (*stage_faults(tmp_path, 1), *fault_clusters.cluster_faults(tmp_path))}
    found = every[what].tried()
    assert found.survived == found.tries == 1, found.found


def test_what_could_not_be_tried_is_tried_where_it_can_be(monkeypatch, tmp_path):
    """With root it was passed over; and without, --again took the place of what had been found with it."""
    found, page = [], tmp_path / "faults.md"
    monkeypatch.setattr(faults, "_faults", lambda runs, tries: [
        Fault("3 hosts, --clients=one: cut off, in training", lambda: found.pop())])
    untried = Found(0, 0, "not tried: needs root")
    for now, more, kept in ((untried, [], 0), (Found(1, 1, "went on"), [], 1), (untried, ["--again"], 1)):
        found.append(now)
        assert faults.main([f"--output={page}", *more]) == 0
        assert not found
        row, = json.loads(page.with_suffix(".json").read_text())["rows"]
        assert row["tries"] == kept


def test_hosts_that_cannot_be_joined_are_a_row(monkeypatch, tmp_path):
    """Namespaces can be had, and bridges not: it ended the benchmark, every time anew."""
    def run(*command, check=True):
        if "bridge" in command:
            raise RuntimeError("type bridge: Operation not supported")
        return ""

    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(namespaces, "_run", run)
    fault = fault_clusters._fault(tmp_path, "3 hosts: cut off", "training", "one", 3, lambda run: None, "rank 1 (",
                                  {1: 0.5}, over_hosts=True)
    assert fault.tried() == Found(0, 0, "not tried: type bridge: Operation not supported")


@pytest.mark.parametrize(("steps", "wrong"), [
    ((0, 1, 2, 3), ""), ((0, 1, 2, 1, 2, 3), "a step stands there twice"), ((0, 2, 3), "a step is missing")])
def test_every_step_stands_there_once(tmp_path, steps, wrong):
    """A run that went on below the lines of steps after its checkpoint had survived."""
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "arm": "data_parallel", "loss": 0.5}) + "\n" for step in steps))
    run = object.__new__(fault_clusters._Run)
    run.output = tmp_path
    assert fault_clusters._unlike(run, dict.fromkeys(range(4), 0.5)) == wrong


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_does_not_strike_the_cleaning_up(monkeypatch, tmp_path, number):
    """It ended half way: processes were left, and were said to be gone."""
    gone = []

    def tried():
        try:
            signal.raise_signal(signal.SIGINT)
            time.sleep(60)
        finally:
            signal.raise_signal(number)
            time.sleep(0)
            gone.append("hosts")
    monkeypatch.setattr(faults, "_faults", lambda runs, tries: [Fault("kill -9", tried)])
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers do not heed them
    try:
        assert faults.main([f"--output={tmp_path / 'faults.md'}"]) == 130
    finally:
        signal.signal(signal.SIGINT, interrupts)
    assert gone == ["hosts"]


@pytest.mark.parametrize(("said", "survived"), [
    ("warning: {}: damaged; going on from step 4", 1), ("warning: damaged", 0)])
def test_the_damaged_file_has_to_be_named(monkeypatch, tmp_path, said, survived):
    """It was told of every checkpoint that was passed over, whatever was said of it."""
    for step in (4, 5):
        folder = tmp_path / "flipped-False" / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "model.data").write_bytes(b"weights")

    def find(run):
        if not run.endswith("damaged"):
            return SimpleNamespace(step=5)
        print(said.format(f"{run}/checkpoint/step-5/model.data"), file=faults.sys.stderr)
        return SimpleNamespace(step=4)
    monkeypatch.setattr(faults, "find_checkpoint", find)
    ended = SimpleNamespace(stdout=iter(()), send_signal=lambda number: None, communicate=lambda timeout: ("", ""))
    runs = SimpleNamespace(folder=tmp_path, start=lambda output: ended)
    assert faults._flipped(runs, 1, both=False).survived == survived


def test_a_run_ends_with_the_benchmark(monkeypatch, tmp_path):
    """SIGTERM, which does not come to it, left it there, in a folder that was gone."""
    started = []
    monkeypatch.setattr(faults._Runs, "command", lambda self, output: ["sleep", "600"])

    def tries_one(runs, tries):
        def tried():
            started.append(runs.start(tmp_path))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return [Fault("kill -9", tried)]
    monkeypatch.setattr(faults, "_faults", tries_one)
    try:
        assert faults.main([f"--output={tmp_path / 'faults.md'}"]) == 143
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].communicate()


def test_the_page_says_which_runs_wrote_a_checkpoint_how_often():
    """It said "every step" of runs over processes, and of those with everything at its default."""
    row = {"fault": "kill -9", "tries": 1, "survived": 1, "found": "went on", "where": "here"}
    text = faults.document({"rows": [row]})
    assert f"a checkpoint every {fault_clusters._EVERY} steps" in text
    assert "losses were not compared" in text
