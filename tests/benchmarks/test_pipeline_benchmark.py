"""python -m benchmarks.pipeline."""

import argparse
import json

import pytest
from markdown_cells import rows

from benchmarks import pipeline

_FLAGS = ["--parts=predicted", "--models=transformer", "--machines=2080ti", "--devices=2"]


@pytest.mark.slow
def test_a_case_is_predicted_and_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "_COUNTS", (2, 4))
    monkeypatch.setattr(pipeline, "PREDICTED", {
        "transformer": ("transformer", "tiny", {"layers": 1, "d_model": 16, "d_ff": 32, "vocab": 64, "batch": 8})})
    assert pipeline.main([*_FLAGS, f"--output={tmp_path}"]) == 0
    measured = json.loads((tmp_path / "pipeline.json").read_text())
    row, = measured["predicted"]
    arms = row["arms"]
    assert set(arms) == {"data_parallel", "expert", "exact", "1f1b", "gpipe"}
    assert arms["1f1b"]["seconds"] <= arms["gpipe"]["seconds"]
    assert arms["1f1b"]["devices"] == [1, 1]
    assert arms["exact"]["bytes"] > 0
    page = (tmp_path / "pipeline.md").read_text()
    assert rows(page) == rows(pipeline.document(measured))
    assert f"{1e3 * arms['1f1b']['seconds']:,.1f}" in page
    # What is there is not predicted again.
    capsys.readouterr()
    assert pipeline.main([*_FLAGS, f"--output={tmp_path}"]) == 0
    assert capsys.readouterr().out == ""


def test_the_page_names_every_commit_and_what_is_not_proven():
    results = json.loads((pipeline.FOLDER / "pipeline.json").read_text())
    for number, row in enumerate(results["measured"]):
        row["facts"]["commit"] = f"of row {number}"
    for number, row in enumerate(row for row in results["predicted"] if row["arms"]["gpipe"]):
        row["arms"]["gpipe"]["search"]["optimal"] = number != 0
    page = pipeline.document(results)
    assert [row[-1] for row in rows(page) if row[-1].startswith("of row")] == [
        f"of row {number}" for number in range(len(results["measured"]))]
    first = next(row for row in results["predicted"] if row["arms"]["gpipe"])
    assert f"but for {first['model']} on {first['devices']} of {first['machine']}." in page


@pytest.mark.parametrize(("flag", "said"), [
    ("--models=gnnt", "--models=gnnt: unknown; did you mean 'gnmt'"), ("--parts=measure", "did you mean 'measured'"),
    ("--machines=none", "unknown machine"), ("--devices=many", "many"),
    ("--schedules=1f2b", "did you mean '1f1b'"), ("--clients=rank", "did you mean 'ranks'")])
def test_wrong_flags_are_one_line(tmp_path, capsys, flag, said):
    assert pipeline.main([*_FLAGS, f"--output={tmp_path}", flag]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_page_names_the_processor_of_its_searches():
    results = json.loads((pipeline.FOLDER / "pipeline.json").read_text())
    for row in results["predicted"]:
        row["facts"]["processor"] = "Zilog Z80 (1 core)"
    assert "Searched on Zilog Z80 (1 core), at commit " in pipeline.document(results)


def test_devices_without_a_stage_are_idle(monkeypatch):
    stages = [argparse.Namespace(devices=count, idle=0.2) for count in (4, 2)]
    monkeypatch.setattr(pipeline, "find_pipeline", lambda *given, **named: argparse.Namespace(
        stages=stages, seconds=1.0, memory_bytes=1.0, microbatches=2, search={}))
    found = pipeline._pipeline({}, 8, argparse.Namespace(memory_bytes=1.0), "1f1b")
    assert found["idle"] == pytest.approx(0.4)


def test_a_pipeline_is_held_against_the_simulated_step_of_the_search():
    """The sum of costs, in which nothing overlaps, stood beside the simulated step of the pipeline."""
    results = json.loads((pipeline.FOLDER / "pipeline.json").read_text())
    for row in results["measured"]:
        row["summary"]["arms"]["search"].update(predicted_ms=4321.0, simulated_ms=1234.0)
    page = pipeline.document(results)
    assert "1,234" in page
    assert "4,321" not in page


def test_devices_whose_steps_are_not_simulated_are_told_before_anything_is_searched(tmp_path, monkeypatch, capsys):
    """A row without seconds stood in the file, and every page from then on was a TypeError."""
    monkeypatch.setattr(pipeline, "_predict_all", lambda *given: None)
    assert pipeline.main([*_FLAGS, f"--output={tmp_path}", "--devices=128"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --devices=128: ")
