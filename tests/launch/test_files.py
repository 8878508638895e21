"""The files of a run."""

import contextlib
import json
import os
import resource
import signal
from types import SimpleNamespace

import filelock
import pytest

from pase_mtf.compat import tf
from pase_mtf.errors import FormatError, PaseError, UsageError
from pase_mtf.launch import files as run_files
from pase_mtf.launch.files import RunFiles
from pase_mtf.launch.run_folder import check_new_folder, load_run_config
from pase_mtf.launch.training import Record
from pase_mtf.pipeline.pipeline import Pipeline, Stage

_RECORD = Record("search", 3, 0.5, 0.02, True)


def test_metrics_and_events(tmp_path):
    folder = str(tmp_path / "a" / "run")
    with RunFiles(folder, 8) as files:
        files.metric(_RECORD)
        files.memory("search", 3, 2**20)
        files.metric(Record("search", 4, 0.25, 0.02, False))
        files.write("layout.txt", "text")
    lines = [json.loads(line) for line in (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 3, "arm": "search", "loss": 0.5, "ms": 20.0, "timed": True}
    assert [line["step"] for line in lines] == [3, 4]

    (events,) = (tmp_path / "a" / "run" / "events" / "search").iterdir()
    found = {(event.step, value.tag): value.simple_value
             for event in tf.train.summary_iterator(str(events)) for value in event.summary.value}
    assert found == {(3, "loss"): 0.5, (3, "step_ms"): 20.0, (3, "examples_per_second"): 400.0,
                     (3, "memory_bytes"): 2**20, (4, "loss"): 0.25}


def test_never_into_a_folder_that_exists(tmp_path):
    with pytest.raises(UsageError, match="never overwritten"):
        RunFiles(str(tmp_path))


def test_a_folder_whose_name_is_no_utf8_is_refused(tmp_path):
    """TensorFlow cannot open what is in it."""
    folder = tmp_path / "run\udcfc"
    with pytest.raises(UsageError, match="TensorFlow takes paths of UTF-8 only; name another"):
        check_new_folder(str(folder))
    folder.mkdir()
    with pytest.raises(FormatError, match="TensorFlow takes paths of UTF-8 only; rename the folder"):
        load_run_config(str(folder))
    check_new_folder(str(tmp_path / "r\u00fcn"))


def test_nor_where_none_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        RunFiles(str(tmp_path / "file" / "run"))


def test_one_run_at_a_time_in_a_folder(tmp_path):
    folder = str(tmp_path / "run")
    with RunFiles(folder) as files:
        files.metric(_RECORD)
        before = (tmp_path / "run" / "metrics.jsonl").read_text()
        with pytest.raises(UsageError, match="another run is writing there"):
            RunFiles(folder, goes_on_at=2)
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    with RunFiles(folder, goes_on_at=2) as files:
        files.go_on("{}")
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_where_nothing_can_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("filelock.FileLock.acquire", lambda self: (_ for _ in ()).throw(NotImplementedError))
    with RunFiles(str(tmp_path / "run")) as files:
        files.metric(_RECORD)


def test_a_folder_whose_lock_is_of_another_user(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr("filelock.FileLock.acquire",
                        lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UsageError, match=r"cannot be locked \(Permission denied\), so that another run may be"):
        RunFiles(str(run), goes_on_at=2)


def test_what_a_run_does_anew_is_there_until_it_goes_on(tmp_path):
    run = tmp_path / "run"
    with RunFiles(str(run)) as files:
        files.go_on("other")  # a new run: there is nothing
        files.write("config.json", "first")
        for step in (1, 2, 3):
            files.metric(Record("search", step, 0.5, 0.02, True))
    for step in (2, 4):
        (run / "checkpoint" / f"step-{step}").mkdir(parents=True)
    with RunFiles(str(run), goes_on_at=2) as files:
        assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
        assert sorted(os.listdir(run / "checkpoint")) == ["step-2", "step-4"]
        assert (run / "config.json").read_text() == "first"
        files.go_on("second")
        files.metric(Record("search", 2, 0.25, 0.02, True))
        files.go_on("second")  # which it does
    assert (run / "config.json").read_text() == "second"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.5), (2, 0.25)]
    assert os.listdir(run / "checkpoint") == ["step-2"]


def test_events_of_steps_that_are_done_again_are_the_later_ones(tmp_path):
    folder = str(tmp_path / "run")
    for goes_on_at in (None, 3):
        with RunFiles(folder, goes_on_at=goes_on_at) as files:
            files.metric(_RECORD)
    sessions = [event.step for path in sorted((tmp_path / "run" / "events" / "search").iterdir())
                for event in tf.train.summary_iterator(str(path))
                if event.session_log.status == tf.SessionLog.START]
    assert sessions == [3]


@pytest.mark.parametrize("measured", [False, True])
def test_a_run_that_measured_nothing_leaves_nothing(tmp_path, measured):
    def fails():
        with RunFiles(str(tmp_path / "run")) as files:
            files.write("config.json", "{}")
            if measured:
                files.metric(_RECORD)
            raise PaseError("no strategy")
    with pytest.raises(PaseError):
        fails()
    assert (tmp_path / "run").exists() == measured


def test_full_disk(tmp_path, monkeypatch):
    """/dev/full answers every write as a full disk does."""
    monkeypatch.setattr(RunFiles, "path", lambda self, name: "/dev/full" if name == "metrics.jsonl"
                        else os.path.join(self.folder, name))
    with pytest.raises(UsageError, match="No space left on device; free space") as caught, \
            RunFiles(str(tmp_path / "run")) as files:
        files.metric(_RECORD)
    assert "\n" not in str(caught.value)


@contextlib.contextmanager
def _no_file_longer_than(nbytes):
    """Stands in for a full disk: it too takes what fits of a write, and then no more."""
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_is_full_in_the_middle_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFiles, "_events", lambda *_: None)
    path = tmp_path / "run" / "metrics.jsonl"
    with RunFiles(str(tmp_path / "run")) as files:
        files.metric(_RECORD)
        with _no_file_longer_than(path.stat().st_size + 20), pytest.raises(UsageError, match="cannot write"):
            files.metric(_RECORD)
    line, = path.read_text().splitlines()
    assert json.loads(line)["step"] == 3


def test_a_disk_that_is_full_of_events(tmp_path, capfd):
    """The step whose events cannot be written says so, and nobody else: no thread of TensorFlow's with a traceback."""
    run = tmp_path / "run"
    with RunFiles(str(run)) as files:
        files.metric(_RECORD)
        events, = (run / "events" / "search").iterdir()
        # TensorFlow's buffers would hide what is not yet there.
        assert events.stat().st_size > (run / "metrics.jsonl").stat().st_size
        with _no_file_longer_than(events.stat().st_size + 20):
            with pytest.raises(UsageError, match="File too large; free space or choose another --output_dir") as caught:
                files.metric(_RECORD)
            with pytest.raises(UsageError, match="cannot write into"):
                files.memory("search", 3, 2**20)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    with RunFiles(str(run), goes_on_at=3):  # nothing of the first is left open
        pass


def test_a_pipeline_has_a_heading_of_its_own(monkeypatch):
    """Whatever the file is called that it is from."""
    monkeypatch.setattr(Pipeline, "table", lambda self: "stages")
    stage = Stage(0, 1, 0, 1, 1.0, 1.0, 0.0, 0.0, 1, {})
    piped = Pipeline("net", "", 1, "cpu", 2, "1f1b", ("a",), (), (stage,), 1.0, {})
    history = SimpleNamespace(disagreement="", note="", slowness=[], records={})
    chosen = {"search": object(), "memory": piped, "Memory": piped, "pipeline": piped}
    notes = run_files._notes(None, None, None, chosen, history, {}, SimpleNamespace(text=lambda: "fitted"))
    assert notes == {"Memory": "fitted", "Pipeline memory": "stages", "Pipeline Memory": "stages", "Pipeline": "stages"}


@pytest.mark.parametrize("line", ['{"step": 1e999}', "[" * 100_000], ids=["infinite", "nested"])
def test_going_on_drops_lines_that_tell_no_step(tmp_path, line):
    metrics = tmp_path / "run" / "metrics.jsonl"
    with RunFiles(str(tmp_path / "run")) as files:
        files.metric(Record("search", 1, 0.5, 0.02, True))
    with open(metrics, "a") as file:
        file.write(line + "\n")
    with RunFiles(str(tmp_path / "run"), goes_on_at=2) as files:
        files.go_on("{}")
    assert [json.loads(kept)["step"] for kept in metrics.read_text().splitlines()] == [1]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_null_in_the_metrics(tmp_path, loss):
    with RunFiles(str(tmp_path / "run")) as files:
        files.metric(Record("search", 3, loss, 0.02, True))
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line == {"step": 3, "arm": "search", "loss": None, "ms": 20.0, "timed": True}


def test_a_folder_that_goes_is_out_of_the_way_before_others_may_take_it(tmp_path, monkeypatch):
    folder, known, there = tmp_path / "run", filelock.FileLock.release, []

    def release(self, *given, **named):
        known(self, *given, **named)
        there.append(folder.exists())

    def fails():
        with RunFiles(str(folder)):
            monkeypatch.setattr("filelock.FileLock.release", release)
            raise PaseError("no strategy")
    with pytest.raises(PaseError):
        fails()
    assert not there[0]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_renamed_goes_all_the_same(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(24, "Too many open files")

    def fails():
        with RunFiles(str(tmp_path / "run")):
            monkeypatch.setattr("pase_mtf.launch.files.os.rename", refuses)
            raise PaseError("no strategy")
    with pytest.raises(PaseError):
        fails()
    assert os.listdir(tmp_path) == []


def test_timelines_are_those_of_the_run_that_the_report_is_of(launch, monkeypatch):
    code, folder, _, _ = launch("--compare=none", "--steps=2")
    files = [folder / f"timeline-{kind}.json" for kind in ("predicted", "measured")]
    assert code == 0
    assert all(path.exists() for path in files)
    monkeypatch.setattr(run_files, "_MOST_DRAWN", 1)  # as of a run over more devices than are drawn
    assert launch(f"--resume={folder}", "--steps=1")[0] == 0
    assert not any(path.exists() for path in files)


@pytest.mark.parametrize(("where", "error"), [
    ("filelock.FileLock.acquire", OSError(28, "No space left on device")),
    ("filelock.FileLock.acquire", KeyboardInterrupt()),
    ("pase_mtf.launch.files.RunFiles._opened_metrics", OSError(28, "No space left on device"))])
def test_a_folder_that_was_only_just_made_is_not_left_behind(tmp_path, monkeypatch, where, error):
    """The next try may have the name."""
    def fails(self):
        raise error
    with monkeypatch.context() as patch:
        patch.setattr(where, fails)
        with pytest.raises((UsageError, KeyboardInterrupt)):
            RunFiles(str(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


def test_an_arm_whose_name_is_longer_than_that_of_a_folder(tmp_path):
    """As that of the second of two files of one name, which is called by its path."""
    with RunFiles(str(tmp_path / "run")) as files:
        for letter in "ab":
            files.metric(Record("/".join([letter * 60] * 6), 0, 1.0, 0.1, True))
    assert len(os.listdir(tmp_path / "run" / "events")) == 2
