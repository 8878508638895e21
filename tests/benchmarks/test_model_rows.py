"""Pages of a row for every model and number of devices: some of them measured, for one machine, with several limits."""

import dataclasses
import json

import pytest
from markdown_cells import rows

from benchmarks import bfloat16, memory, model_rows, ranks, search_devices, simulator
from pase_mtf.errors import UsageError
from pase_mtf.machine.machine import Machine

_FACTS = {"machine": "Chip", "versions": "Python 9", "commit": "abc"}


def _ranks_row(model, devices):
    arm = {"one": 1000 * devices, "rank": 500, "transfers": 70, "one_seconds": 2.0, "rank_seconds": 1.0}
    return {"model": model, "devices": devices, "facts": _FACTS, "data_parallel": arm, "search": arm}


def _devices_row(model, devices):
    return {"model": model, "devices": devices, "facts": _FACTS, "build_seconds": 1.0, "search_seconds": 0.5,
            "optimal": True, "rounds": 3}


def test_a_number_of_devices_that_one_model_alone_has(tmp_path):
    """As where a pair was measured by itself: its cells of the others are empty; it was a KeyError."""
    few = [("alexnet", 2), ("alexnet", 8), ("rnnlm", 2)]
    text = ranks.document({"machine": "2080ti", "rows": [_ranks_row(*key) for key in few]})
    assert [cells for cells in rows(text) if cells[1] == "search"] == [
        ["alexnet", "search", "2,000", "8,000", "500", "500", "70", "2.0 s", "1.0 s"],
        ["rnnlm", "search", "2,000", "", "500", "", "", "", ""]]
    text = search_devices.document({"machine": "h100", "rows": [
        _devices_row(*key) for key in (("alexnet", 6), ("alexnet", 8), ("rnnlm", 6))]})
    assert rows(text)[:3] == [["model", "6", "8"], ["alexnet", "1.00 s (1.00)", "1.00 s"], ["rnnlm", "1.00 s", ""]]
    assert "3 of 3 optima are proven" in text


def test_a_page_that_cannot_be_made_changes_no_file(tmp_path):
    stem = tmp_path / "page"
    results = model_rows.ModelRows(stem, "h100", lambda results: results["nothing"])
    results.rows["alexnet", 8] = {"model": "alexnet", "devices": 8}
    with pytest.raises(KeyError):
        results.write()
    assert not list(tmp_path.iterdir())


def test_rows_for_another_machine_are_not_replaced(tmp_path):
    """A row for it took the place of the whole page."""
    stem = tmp_path / "ranks"
    for _ in range(2):
        results = model_rows.ModelRows(stem, "2080ti", ranks.document)
        results.rows["alexnet", 2] = _ranks_row("alexnet", 2)
        results.write()
    with pytest.raises(UsageError, match=r"--machine=h100: the rows of .*ranks\.json are for 2080ti; choose another"):
        model_rows.ModelRows(stem, "h100", ranks.document)
    assert len(json.loads(stem.with_suffix(".json").read_text())["rows"]) == 1


def test_all_limits_and_numbers_of_devices_are_told():
    chain = {"sum": 1.0, "simulated": 1.0, "found": 1.0, "parallel_sum": 1.0, "parallel_simulated": 1.0, "chain": 1.0,
             "place": 1, "judged": 2, "proposals": 3, "tasks": 4, "whole_seconds": 1.0, "change_seconds": 1.0,
             "equal": True, "devices": 4, "facts": _FACTS}
    text = simulator.document({"machine": "1080ti", "rows": [
        {**chain, "model": "alexnet", "chain_limit": 20.0}, {**chain, "model": "rnnlm", "chain_limit": 10.0}]})
    assert "on, 10 or 20 s each" in text
    assert "with `python -m benchmarks.simulator` or `python -m benchmarks.simulator --seconds=20`" in text
    both = {"seconds": 1.0, "bytes": 1e9}
    row = {"model": "alexnet", "facts": _FACTS, "predicted": {"float32": both, "bfloat16": both}, "measured": {
        "data": "pictures", "losses": {"float32": [2.0, 1.0], "bfloat16": [2.0, 1.0]}, "apart": 0.1}}
    text = bfloat16.document({"machine": "h100", "rows": [{**row, "devices": devices} for devices in (16, 8)]})
    assert "on 8 or 16 devices of machine h100" in text


def test_rows_stay_where_the_next_one_is_interrupted(tmp_path, monkeypatch):
    known = iter([_ranks_row("alexnet", 2)])

    def measure(*given):
        for row in known:
            return {arm: row[arm] for arm in ranks.ARMS}
        raise KeyboardInterrupt
    monkeypatch.setattr(ranks, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        ranks.main(["--models=alexnet", "--devices=2,4", f"--output={tmp_path}"])
    kept, = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    assert (kept["model"], kept["devices"]) == ("alexnet", 2)


def test_a_chain_is_not_ahead_of_a_step_that_the_search_has_simulated():
    row = {"model": "alexnet", "devices": 4, "facts": _FACTS, "sum": 1.0, "simulated": 1.0005, "found": 1.0005,
           "shortest": 1.0, "parallel_sum": 2.0, "parallel_simulated": 1.0, "chain": 1.0, "place": 1, "judged": 2,
           "proposals": 3, "tasks": 4, "whole_seconds": 1.0, "change_seconds": 1.0, "equal": True, "chain_limit": 10.0}
    text = simulator.document({"machine": "1080ti", "rows": [row]})
    assert "in 0 of 1 rows." in text
    assert "longer by a thousandth at most" in text


@pytest.mark.parametrize(("module", "flag"), [(bfloat16, "--devices=four"), (memory, "--devices=four"),
                                              (memory, "--random=x")])
def test_numbers_that_are_none_are_named(tmp_path, capsys, module, flag):
    assert module.main(["--models=alexnet", f"--output={tmp_path}", flag]) == 2
    assert f"error: {flag}: give whole numbers" in capsys.readouterr().err


def test_a_training_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(flags):
        raise RuntimeError("launcher exited with 6")

    monkeypatch.setattr(bfloat16, "predict", lambda *given: {})
    monkeypatch.setattr(bfloat16, "prepare_data", lambda *given: ([], "synthetic"))
    monkeypatch.setattr(bfloat16, "run_launcher", fail)
    assert bfloat16.main(["--models=alexnet", f"--output={tmp_path}"]) == 2
    assert "error: launcher exited with 6" in capsys.readouterr().err


@pytest.mark.parametrize("module", [ranks, search_devices, simulator])
def test_devices_that_are_no_numbers_are_named(tmp_path, capsys, module):
    assert module.main(["--models=alexnet", f"--output={tmp_path}", f"--work={tmp_path}", "--devices=four"]) == 2
    assert "error: --devices=four: give whole numbers" in capsys.readouterr().err


def test_memory_is_priced_for_this_machine_where_that_is_named(monkeypatch):
    here = dataclasses.replace(Machine.load("a100"), name="local")
    monkeypatch.setattr(memory, "load_machine", lambda name, devices: here)
    found = memory.on_this_host("local", 4)
    assert (found.rates, found.shared_cores) == (here.rates, True)
    arm = {"predicted": 2e6, "measured": 1e6, "least": 1e6, "predicted_seconds": 0.1, "measured_seconds": 0.1}
    row = {"model": "alexnet", "devices": 4, "facts": _FACTS, "arms": {"search": arm},
           "frontier": [{"limit": 2e6, **arm}], "again": {}, "pieces": {}}
    pages = {name: memory.document({"machine": name, "rows": [row]}) for name in ("1080ti", "local")}
    assert ["another machine" in page for page in pages.values()] == [True, False]
