"""A run that searches and trains nothing."""

import json
import os

from pase_mtf.strategy.strategy import Strategy


def test_search_only(launch):
    code, folder, out, _ = launch("--search_only", "--mesh=4")
    assert code == 0
    assert set(os.listdir(folder)) == {".running.lock", "config.json", "graph.json", "strategy.json", "layout.txt",
                                       "metrics.jsonl",
                                       "summary.json", "report.html", "timeline-predicted.json"}
    assert Strategy.load(folder / "strategy.json").table() in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "search only"
    assert summary["arms"]["search"]["predicted_ms"] > 0
    assert summary["arms"]["search"]["measured_ms"] is None
    spent = summary["spent"]
    assert spent["search"] > 0.0
    assert spent["compiling"] > 0.0
    assert spent["kernels"] == spent["trial_steps"] == 0.0
    assert f"planning took {sum(spent.values()):.1f} s" in out
    report = (folder / "report.html").read_text()
    assert "<h2>Arms</h2>" in report
    assert "Losses" not in report
    assert "<h2>Time and memory</h2>" in report


def test_a_limit_that_no_strategy_keeps_to(launch):
    code, folder, out, err = launch("--search_only", "--mesh=4", "--memory_limit=1kB")
    assert code == 3
    assert "memory limit of 1000 bytes per device" in err
    assert err.count("\n") == 1
    for told in ("layer", "predicted step", "optimal"):
        assert told not in out
    assert not folder.exists()


def test_compiling_for_what_fits_is_no_searching(launch):
    code, folder, _, err = launch("--search_only", "--compare=none", "--recompute=auto", "--memory_limit=1GB")
    assert code == 0, err
    assert json.loads((folder / "summary.json").read_text())["spent"]["compiling"] > 0.0
