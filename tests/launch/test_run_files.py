import json
import os

import pytest

from pase_mtf.errors import PaseError, UsageError
from pase_mtf.launch.run_files import RunFiles
from pase_mtf.launch.training import Record

_RECORD = Record("search", 3, 0.5, 0.02, True)


def test_metrics_and_events(tmp_path):
    folder = str(tmp_path / "a" / "run")
    with RunFiles(folder) as files:
        files.metric(_RECORD)
        files.metric(Record("search", 4, 0.25, 0.02, False))
        files.write("layout.txt", "text")
    lines = [json.loads(line) for line in (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 3, "arm": "search", "loss": 0.5, "ms": 20.0, "timed": True}
    assert [line["step"] for line in lines] == [3, 4]

    from pase_mtf.compat import tf
    (events,) = (tmp_path / "a" / "run" / "events" / "search").iterdir()
    found = {(event.step, value.tag): value.simple_value
             for event in tf.train.summary_iterator(str(events)) for value in event.summary.value}
    assert found == {(3, "loss"): 0.5, (3, "step_ms"): 20.0, (4, "loss"): 0.25}


def test_never_into_a_folder_that_exists(tmp_path):
    with pytest.raises(UsageError, match="never overwritten"):
        RunFiles(str(tmp_path))


def test_nor_where_none_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        RunFiles(str(tmp_path / "file" / "run"))


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
