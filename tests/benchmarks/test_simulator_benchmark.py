"""python -m benchmarks.simulator."""

import json

import pytest
from markdown_cells import rows

from benchmarks import simulator


@pytest.mark.slow
def test_a_model_is_measured_drawn_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(simulator, "_PRESET", "tiny")
    monkeypatch.setattr(simulator, "_CHANGES", 10)
    flags = ["--models=alexnet", "--devices=2,4", "--seconds=0.2", f"--output={tmp_path}",
             f"--work={tmp_path / 'work'}"]
    assert simulator.main(flags) == 0
    measured = json.loads((tmp_path / "simulator.json").read_text())
    assert [(row["model"], row["devices"], row["equal"]) for row in measured["rows"]] == [
        ("alexnet", 2, True), ("alexnet", 4, True)]
    for row in measured["rows"]:
        assert row["found"] <= 1.001 * min(row["simulated"], row["parallel_simulated"])
        assert 1 <= row["place"] <= row["judged"]
        assert row["chain"] <= row["parallel_simulated"]
        assert row["parallel_sum"] >= row["sum"]
    page = (tmp_path / "simulator.md").read_text()
    assert "benchmarks.simulator --seconds=0.2`" in page
    (row, _), facts = measured["rows"], {"machine": "1080ti"}
    earlier = {name: value for name, value in row.items() if name not in ("found", "judged")} | {
        "shortest": 2 * row["parallel_simulated"]}  # as earlier versions wrote it
    assert rows(simulator.document({**facts, "rows": [earlier]}))[1][6:8] == [
        f"{1e3 * row['parallel_simulated']:.3f}", "data parallel"]
    assert rows(page) == rows(simulator.document(measured))
    assert "<svg" in (tmp_path / "simulator.svg").read_text()
    # Rows that are not measured again stay.
    assert simulator.main([*flags[2:], "--models=alexnet", "--devices=8"]) == 0
    assert len(json.loads((tmp_path / "simulator.json").read_text())["rows"]) == 3


def test_a_machine_that_is_none(tmp_path, capsys):
    assert simulator.main(["--machine=none", f"--output={tmp_path}", f"--work={tmp_path}"]) == 2
    assert "unknown machine" in capsys.readouterr().err
