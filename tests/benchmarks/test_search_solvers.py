"""The page of solvers side by side, its random networks, and the measurement of time and memory."""

import json

import numpy as np
import pytest

from benchmarks import search_budget, search_random, search_solvers


@pytest.mark.parametrize("shape", search_random.SHAPES)
@pytest.mark.parametrize("costs", search_random.COSTS)
def test_random_networks(shape, costs):
    network = search_random.random_network(shape, costs, 12, 5, 3)
    network.validate()
    assert network.sizes == (5,) * 12
    again = search_random.random_network(shape, costs, 12, 5, 3)
    for one, other in zip(network.edges, again.edges, strict=True):
        np.testing.assert_array_equal(one.matrix, other.matrix)
    ends = [(edge.source, edge.target) for edge in network.edges]
    assert len(set(ends)) == len(ends)
    assert all(0 <= source < target < 12 for source, target in ends)
    if len(ends) > 2:
        assert network.distinct_matrices == len(ends)
        assert search_random.random_network(shape, costs, 12, 5, 3, distinct=2).distinct_matrices == 2


def test_budget_of_one_network(capsys, monkeypatch):
    monkeypatch.setattr(search_budget.time, "perf_counter", search_budget.time.perf_counter)  # main replaces it
    assert search_budget.main(["sparse", "noise", "20", "4", "--limit=600"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["optimal"]
    assert outcome["certificate"]
    assert outcome["cpu_seconds"] > 0.0


def test_page():
    def outcome(cost, seconds, optimal=True):
        return {"cost": cost, "optimal": optimal, "solver_cpu_seconds": seconds, "cpu_seconds": seconds}
    results = {
        "facts": {"machine": "a machine", "versions": "versions", "commit": "abc"}, "limit": 10.0,
        "solvers": {
            "one": {"exact": outcome(2.0, 0.1) | {"certified_cpu_seconds": 0.3, "check_cpu_seconds": 0.017},
                    "toulbar2": outcome(2.0, 0.2), "cpsat": outcome(2.2, 10, False),
                    "milp": {"error": "refused: 11 million variables"}},
            "two": {"exact": outcome(3.0, 0.5), "toulbar2": outcome(3.0, 0.25) | {"cpu_seconds": 0.7},
                    "cpsat": outcome(3.0, 4),
                    "milp": outcome(float("inf"), 10, False)}},
        "budgets": [{"name": "dense", "limit": 1.0, "cpu_seconds": 1.25, "network_bytes": 5e6, "search_bytes": 2e6,
                     "optimal": False, "gap": 0.5}, {"name": "star", "error": "no memory"}]}
    text = search_solvers.document(results)
    assert "proves first on 1 of 2;" in text
    assert "on 1 of these a solver was not given its network" in text
    results["solvers"]["two"]["toulbar2"] = {"error": "not installed; pip install pytoulbar2"}
    assert "proves first on 1 of 1 (on 1 others not all solvers were there)" in search_solvers.document(results)
    assert "from the network in memory to the proof, on 2" in text
    one, = (line for line in text.splitlines() if line.startswith("| one "))
    assert [cell.strip() for cell in one.split("|")][-3:] == ["300 ms", "17.0 ms", ""]
    assert "not proven, +10.00%" in text
    assert "refused: 11 million variables" in text
    assert "nothing found" in text
    assert "0.25 s after the limit" in text
    assert "50.00%" in text
    assert "no memory" in text
    assert "All models" not in text
    results["models"] = {"gnmt, p = 12": results["solvers"]["one"]}
    models = search_solvers.document(results).partition("## All models")[2]
    assert "1 of 64 networks were measured; of these `exact` proves first on 1 of 1;" in models
    assert "| gnmt, p = 12 " in models
    for outcomes in results["solvers"].values():
        outcomes["milp"] = {"error": "not installed; pip install scipy"}
    nowhere = search_solvers.document(results)
    assert "So not all solvers were there on any." in nowhere
    one, = (line for line in nowhere.splitlines() if line.startswith("| one "))
    assert [cell.strip() for cell in one.split("|")][6:8] == ["-", "-"]


def test_models_on_many_devices_are_measured_once(tmp_path, monkeypatch, capsys):
    """Beside what is there; what takes longer than there is time for is left to the next run."""
    asked = []
    monkeypatch.setattr(search_solvers.Workshop, "model_network",
                        lambda self, model, preset, machine, devices: asked.append((model, devices)))
    monkeypatch.setattr(search_solvers, "_solved", lambda *given: {"facts": None, **{
        solver: {"cost": 1.0, "optimal": True, "cpu_seconds": 0.1} for solver in search_solvers.SOLVERS}})
    where = ["--networks=models", f"--output={tmp_path}"]
    for more, wanted in ((["--budget=0"], []), (["--models=gnmt", "--devices=12"], [("gnmt", 12)]),
                         (["--models=alexnet,gnmt", "--devices=6,12"],
                          [("alexnet", 6), ("gnmt", 6), ("alexnet", 12)])):
        assert search_solvers.main([*where, *more]) == 0
        assert asked == wanted
        asked.clear()
    rows = [line.split("|")[1].strip() for line in (tmp_path / "solvers.md").read_text().splitlines()
            if ", p = " in line]
    assert rows == ["alexnet, p = 6", "alexnet, p = 12", "gnmt, p = 6", "gnmt, p = 12"]
    for flag in ("--devices=7", "--devices=a", "--models=nobody", "--networks=model"):
        assert search_solvers.main([*where, flag]) == 2
        assert f"{flag}: '{flag.partition('=')[2]}' is not among " in capsys.readouterr().err


def test_a_page_of_budgets_that_all_failed():
    """Its first row had failed, and the page was a ValueError."""
    results = {"facts": {"machine": "a machine", "versions": "versions", "commit": "abc"}, "limit": 10.0,
               "solvers": {}, "budgets": [{"name": "star", "error": "no memory"}]}
    text = search_solvers.document(results)
    assert "no memory" in text
    assert "0.00 s after the limit" in text


def test_memory_is_told_as_it_is_measured(monkeypatch):
    """By peaks: what making the network took before hides what the search takes."""
    monkeypatch.setattr(search_budget, "peak_bytes", lambda: 5_000_000)  # the search stays below an earlier peak
    row = search_budget.run(search_random.random_network("chain", "noise", 4, 3, 0), 60.0)
    assert row["search_bytes"] == 0
    text = search_solvers.document({"facts": {"machine": "a machine", "versions": "versions", "commit": "abc"},
                                    "limit": 10.0, "solvers": {}, "budgets": [
                                        {"name": "chain", "limit": 60.0, "network_bytes": 1e6, **row}]})
    assert "above what it held before the search" not in text
    assert "0 where making the network had taken as much" in text
