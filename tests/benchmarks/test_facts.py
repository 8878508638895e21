"""Where rows were measured is kept with them, and told of them."""

import json

from benchmarks import facts, model_rows


def test_every_machine_is_told_with_its_commits():
    chip = {"machine": "Chip", "versions": "Python 9", "commit": "abc"}
    rows = [{"facts": chip}, {}, {"facts": {**chip, "commit": "bcd"}}, {"facts": {**chip, "machine": "Other"}}]
    assert facts.facts_text(facts.of_rows(rows, chip)) == (
        "Chip; Python 9; commits abc, bcd / Other; Python 9; commit abc")
    assert facts.facts_text(facts.of_rows(rows[:2])) == "Chip; Python 9; commit abc"


def test_a_partial_run_says_nothing_of_rows_of_before(tmp_path, monkeypatch):
    stem = tmp_path / "page"
    old = {"machine": "Chip", "versions": "Python 9", "commit": "abc"}
    stem.with_suffix(".json").write_text(json.dumps({
        "facts": old, "machine": "h100", "rows": [{"model": "alexnet", "devices": 4, "seconds": 1.0}]}))
    monkeypatch.setattr(model_rows, "facts", lambda: {"machine": "New", "versions": "Python 10", "commit": "fff"})
    results = model_rows.ModelRows(stem, "h100", lambda results: facts.facts_text(facts.of_rows(results["rows"])))
    results.rows["alexnet", 8] = {"model": "alexnet", "devices": 8, "seconds": 2.0}
    results.write()
    rows = json.loads(stem.with_suffix(".json").read_text())["rows"]
    assert [row["facts"]["machine"] for row in rows] == ["Chip", "New"]
    assert stem.with_suffix(".md").read_text() == "Chip; Python 9; commit abc / New; Python 10; commit fff"
    again = model_rows.ModelRows(stem, "h100", lambda results: "")
    again.write()
    assert json.loads(stem.with_suffix(".json").read_text())["rows"] == rows
