import json
import re
from types import SimpleNamespace

import pytest

from pase_mtf.errors import FormatError
from pase_mtf.launch.summary import ArmRow, Summary, arm_rows, read_summary, summary_json
from pase_mtf.launch.training import History, Record


def _history(**milliseconds):
    records = {arm: [Record(arm, step, 1 / (step + 1), value / 1e3, step > 0) for step, value in enumerate(values)]
               for arm, values in milliseconds.items()}
    return History(0, records)


def _strategy(seconds, memory, simulated=None):
    return SimpleNamespace(seconds=seconds, memory_bytes=memory, simulated_seconds=simulated)


@pytest.fixture
def rows():
    history = _history(stock_data_parallel=[999, 80, 80, 80], data_parallel=[999, 40, 50, 60], search=[999, 20, 20, 26])
    strategies = {"search": _strategy(0.019, 2**20), "data_parallel": _strategy(0.045, 2**21),
                  "expert": _strategy(0.019, 2**20)}
    names = ["search", "stock_data_parallel", "data_parallel", "expert"]
    return arm_rows(names, history, strategies, {"expert": "search"}, {"search": 3 * 2**20}, batch=10)


def test_numbers(rows):
    search = rows["search"]
    assert set(search) == set(ArmRow.__annotations__)
    assert search["measured_ms"] == pytest.approx(20)
    assert search["measured_ms_spread"] == pytest.approx(1.5)
    assert search["examples_per_second"] == pytest.approx(500)
    assert search["speedup_over_data_parallel"] == pytest.approx(2.5)
    assert search["speedup_over_stock"] == pytest.approx(4)
    assert search["predicted_ms"] == pytest.approx(19)
    assert search["predicted_bytes"] == 2**20
    assert search["measured_bytes"] == 3 * 2**20
    assert search["final_loss"] == pytest.approx(0.25)
    assert rows["stock_data_parallel"]["predicted_ms"] is None
    assert rows["data_parallel"]["speedup_over_data_parallel"] == pytest.approx(1)


def test_an_arm_with_the_same_strategy_shares_the_measurement(rows):
    assert rows["expert"]["same_as"] == "search"
    assert rows["expert"]["measured_ms"] == rows["search"]["measured_ms"]
    assert rows["expert"]["measured_bytes"] == rows["search"]["measured_bytes"]


def test_without_baselines():
    rows = arm_rows(["search"], _history(search=[999, 20]), {"search": _strategy(0.1, 1)}, {}, {}, 10)
    assert rows["search"]["speedup_over_stock"] is None
    assert rows["search"]["speedup_over_data_parallel"] is None


def test_nothing_was_measured():
    rows = arm_rows(["search", "stock_data_parallel"], History(0, {}), {"search": _strategy(0.1, 1)}, {}, {}, 10)
    assert rows["search"]["measured_ms"] is None
    assert rows["search"]["predicted_ms"] == pytest.approx(100)
    assert rows["search"]["final_loss"] is None


@pytest.fixture
def summary(rows):
    return Summary(status="done", model="alexnet", preset="tiny", batch=10, mesh="2", devices=2, first_step=0,
                   arms=rows, left_out={"mcmc": "not asked for"}, disagreement=None, note=None,
                   search={"seconds": 0.1, "optimal": True, "gap": float("inf")}, nodes={"search": 9},
                   build_seconds={"search": 0.5}, memory_method="of the allocator", facts={"devices": "2"})


def test_json_has_no_nan(summary):
    summary["arms"]["search"]["final_loss"] = float("nan")
    data = json.loads(summary_json(summary), parse_constant=lambda name: pytest.fail(name))
    assert data["arms"]["search"]["final_loss"] is None
    assert data["search"] == {"seconds": 0.1, "optimal": True, "gap": None}


def test_what_was_written_is_read(summary, tmp_path):
    (tmp_path / "summary.json").write_text(summary_json(summary))
    summary["search"]["gap"] = None
    assert read_summary(tmp_path / "summary.json") == summary


@pytest.mark.parametrize(("entry", "value", "message"), [
    ("batch", "8", "batch is '8': input should be a valid integer"),
    ("batch", None, "batch is None"),
    ("arms", {"search": {"measured_ms": 1.0}}, "arms.search.predicted_ms is missing"),
    ("left_out", ["mcmc"], "left_out is ['mcmc']"),
    ("colour", "red", "colour is not known")])
def test_what_is_no_summary_is_refused_in_a_line(summary, tmp_path, entry, value, message):
    data = {**json.loads(summary_json(summary)), entry: value}
    (tmp_path / "summary.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=re.escape(message)):
        read_summary(tmp_path / "summary.json")


@pytest.mark.parametrize("name", ["data_parallel-tuned", "data_parallelism", "data_parallel_8/strategy.json"])
def test_a_file_that_is_called_alike_is_no_data_parallelism(name):
    history = _history(**{name: [999, 20, 20], "data_parallel_4": [999, 40, 40], "search": [999, 10, 10]})
    rows = arm_rows([name, "data_parallel_4", "search"], history, {}, {}, {}, 10)
    assert rows["search"]["speedup_over_data_parallel"] == pytest.approx(4)
    rows = arm_rows(["search", name], history, {}, {}, {}, 10)
    assert rows["search"]["speedup_over_data_parallel"] is None
