"""What a first run spends: every row has a cache of its own, which its later runs find as the first one left it."""

import json
import os
import pathlib

import pytest
from markdown_cells import rows

from benchmarks import first_launch


@pytest.fixture
def launched(monkeypatch):
    """The flags and caches of what was launched; each run leaves something in its cache."""
    found = []

    def run(flags, environment):
        cache = pathlib.Path(environment["XDG_CACHE_HOME"])
        before = sorted(path.name for path in cache.iterdir()) if cache.exists() else []
        cache.mkdir(exist_ok=True)
        (cache / str(len(before))).touch()
        found.append((flags[:2], before))
        later = len(before)
        where = {"devices": f"8 virtual CPU devices on {os.environ['CHIP']}", "versions": "Python 9"}
        return {"facts": where, "wall_seconds": 90.0,
                "spent": {"reference_kernels": 2.0, "kernels": 40.0 / (later + 1), "search": 3.0, "trial_steps": 4.0},
                "search": {"gap": 0.5 / (later + 1),
                           "kernels": {"of_strategy": 1200, "measured_of_strategy": 1100 + later}}}

    monkeypatch.setattr(first_launch, "run_launcher", run)
    return found


def test_rows_of_other_processors_stay(launched, monkeypatch, tmp_path):
    for chip, flags in (("A", ["--mesh=8,12"]), ("B", []), ("A", [])):
        monkeypatch.setenv("CHIP", chip)
        assert first_launch.main([*flags, f"--output={tmp_path}"]) == 0
    assert launched[:8] == [
        (["--model=transformer", f"--mesh={devices}"], list(map(str, range(run))))
        for devices in (8, 12) for run in range(4)]
    assert len(launched) == 16
    kept = json.loads((tmp_path / "first_launch.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["devices"], row["processor"]) for row in kept] == [(8, "A"), (8, "B"), (12, "A")]
    page = rows((tmp_path / "first_launch.md").read_text(encoding="utf-8"))
    assert page[1:3] == [
        ["transformer", "8", "A", "first", "42.0 s", "3.0 s", "4.0 s", "49.0 s", "50 %", "1,100 of 1,200"],
        ["", "", "A", "2.", "22.0 s", "3.0 s", "4.0 s", "29.0 s", "25 %", "1,101 of 1,200"]]
    assert len(page) == 13


def test_what_cannot_be_measured_is_a_line(launched, tmp_path, capsys):
    assert first_launch.main(["--models=transformr", f"--output={tmp_path}"]) == 2
    assert "did you mean 'transformer'" in capsys.readouterr().err
    assert not launched
    assert not list(tmp_path.iterdir())
