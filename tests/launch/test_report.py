import html
import re
from types import SimpleNamespace

import pytest

from pase_mtf.launch.report import _memory, final_table, report_html, search_summary, size
from pase_mtf.launch.summary import arm_rows
from pase_mtf.launch.training import History, Record
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.search.registry import Solution


def _history(**milliseconds):
    records = {arm: [Record(arm, step, 1 / (step + 1), value / 1e3, step > 0) for step, value in enumerate(values)]
               for arm, values in milliseconds.items()}
    return History(0, records)


def _strategy(seconds, memory):
    return SimpleNamespace(seconds=seconds, memory_bytes=memory)


@pytest.fixture
def rows():
    history = _history(stock_data_parallel=[999, 80, 80, 80], data_parallel=[999, 40, 50, 60], search=[999, 20, 20, 26])
    strategies = {"search": _strategy(0.019, 2**20), "data_parallel": _strategy(0.045, 2**21),
                  "expert": _strategy(0.019, 2**20)}
    names = ["search", "stock_data_parallel", "data_parallel", "expert"]
    return arm_rows(names, history, strategies, {"expert": "search"}, {"search": 3 * 2**20}, batch=10)


def test_an_arm_with_the_same_strategy_is_named(rows):
    assert "expert (= search)" in final_table(rows)


def test_nothing_was_measured():
    rows = arm_rows(["search", "stock_data_parallel"], History(0, {}), {"search": _strategy(0.1, 1)}, {}, {}, 10)
    assert "100.0" in final_table(rows)


def test_table_is_aligned(rows):
    lines = final_table(rows).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("arm")
    assert "20.0 ± 1.5" in lines[2]
    assert "4.00×" in lines[2]
    assert "2.50×" in lines[2]


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (12, "12 B"), (2**20, "1.0 MiB"), (3 * 2**30, "3.00 GiB"),
                                             (2**41, "2.00 TiB")])
def test_size(value, text):
    assert size(value) == text


def test_report_is_one_self_contained_file(rows):
    history = _history(data_parallel=[9, 40], search=[9, 20])
    text = report_html(title="net <8>", facts={"devices": "8 & more"}, rows=rows, history=history,
                       strategy_table="layer | split <a>", layout="mesh_shape = all:8", notes={"Search": "3 layers"})
    assert "net &lt;8&gt;" in text
    assert "8 &amp; more" in text
    assert "layer | split &lt;a&gt;" in text
    assert final_table(rows) in html.unescape(text)
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(sources) == 2
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "<script" not in text


def test_time_over_memory_has_the_arms_and_the_limit(rows):
    solutions = [Solution((0,), cost, cost, 0.0, True, 0.1, {}) for cost in (0.03, 0.01)]
    points = tuple(FrontierPoint(limit, limit, solution) for limit, solution in zip((2e9, 6e9), solutions, strict=True))

    def legend(limit):
        figure = _memory(rows, points, limit)
        return [text.get_text() for text in figure.legends[0].get_texts()], figure.axes[0]

    drawn = [arm for arm, row in rows.items() if row["predicted_bytes"] is not None]
    names, axes = legend(8e9)
    assert drawn
    assert names == ["fastest within the limit", *drawn, "memory limit"]
    assert axes.lines[0].get_ydata().tolist() == [30.0, 10.0]  # ms
    assert axes.lines[0].get_xdata().tolist() == [2.0, 6.0]  # GB
    assert "memory limit" not in legend(80e9)[0]
    text = report_html(title="net", facts={}, rows=rows, history=None, strategy_table="", layout="", notes={},
                       frontier=points, memory_limit=8e9)
    assert "<h2>Time and memory</h2>" in text


def test_report_of_a_search_alone(rows):
    text = report_html(title="net", facts={}, rows={}, history=None, strategy_table="table", layout="layout", notes={})
    assert "table" in text
    assert "<img" not in text


@pytest.mark.parametrize(("search", "said"), [
    ({"optimal": True, "gap": 0.0}, "optimal (proven)"), ({"optimal": False, "gap": 0.02}, "at most 2 % above"),
    ({"optimal": False, "gap": 0.004, "simpler": "data_parallel"}, "data parallelism, predicted 0.4 % above"),
    ({}, "no bound")])
def test_what_the_search_proved_is_said(search, said):
    strategy = SimpleNamespace(search=search, devices=8, parts={"forward": 0.001}, seconds=0.001)
    assert said in search_summary(strategy, SimpleNamespace(layers=(1, 2), edges=(1,)))
