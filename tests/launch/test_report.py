import dataclasses
import html
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from small_graphs import perceptron

from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.reports import page
from pase_mtf.launch.reports.graph_picture import graph_picture
from pase_mtf.launch.reports.page import report_html
from pase_mtf.launch.reports.pictures import draw_losses, draw_memory, draw_steps
from pase_mtf.launch.reports.text import final_table, headline, orders_note, search_summary, size
from pase_mtf.launch.summary import arm_rows
from pase_mtf.launch.training import History, Record
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.search.registry import Solution
from pase_mtf.simulator.timeline import Slice, Timeline
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy


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


def test_an_arm_with_the_same_strategy_is_named(rows):
    assert "expert (= search)" in final_table(rows)


def test_nothing_was_measured():
    rows = arm_rows(["search", "stock_data_parallel"], History(0, {}), {"search": _strategy(0.1, 1)}, {}, {}, 10)
    assert "100.0" in final_table(rows)


def test_table_is_aligned(rows):
    lines = final_table(rows).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("arm")
    assert {len(line) for line in lines} == {len(lines[0])}
    assert lines[0].index("over stock") + len("over stock") == lines[2].index("4.00×") + len("4.00×")
    assert "20.0 ± 1.5" in lines[2]
    assert "4.00×" in lines[2]
    assert "2.50×" in lines[2]


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (12, "12 B"), (2**20, "1.0 MiB"), (3 * 2**30, "3.00 GiB"),
                                             (2**41, "2.00 TiB")])
def test_size(value, text):
    assert size(value) == text


def test_where_simulated_steps_order_the_arms_otherwise_it_is_said():
    strategies = {"search": _strategy(0.019, 1, 0.015), "data_parallel": _strategy(0.045, 1, 0.0145),
                  "expert": _strategy(0.050, 1, 0.040)}
    rows = arm_rows([*strategies, "stock_data_parallel"], History(0, {}), strategies, {}, {}, batch=10)
    assert orders_note(rows) == ("search before data_parallel by the sum of costs (19.00, 45.00 ms), after it by "
                                 "simulated steps (15.00, 14.50 ms)")
    head, _, first = final_table(rows).splitlines()[:3]
    assert head.index("simulated ms") + len("simulated ms") == first.index("15.0") + len("15.0")
    rows = arm_rows(["search"], History(0, {}), {"search": _strategy(0.1, 1)}, {}, {}, batch=10)
    assert "simulated" not in final_table(rows)


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


def test_names_of_files_are_no_formulas():
    name, strategy = "$5_to_$", _strategy(0.1, 1)
    history = _history(**{name: [9, 8, 8]})
    rows = arm_rows([name], history, {name: strategy}, {}, {name: 5}, 10)
    points = [FrontierPoint(1e9, 1e9, Solution((0,), 1.0, 1.0, 0.0, True, 0.0, {}))]
    text = report_html(title="net", facts={}, rows=rows, history=history, strategy_table="", layout="", notes={},
                       frontier=points)
    assert text.count("<img") == 3


def test_time_over_memory_has_the_arms_and_the_limit(rows):
    solutions = [Solution((0,), cost, cost, 0.0, True, 0.1, {}) for cost in (0.03, 0.01)]
    points = tuple(FrontierPoint(limit, limit, solution) for limit, solution in zip((2e9, 6e9), solutions, strict=True))

    def legend(limit):
        figure = draw_memory(rows, points, limit, {})
        return [text.get_text() for text in figure.legends[0].get_texts()], figure.axes[0]

    drawn = [arm for arm, row in rows.items() if row["predicted_bytes"] is not None]
    names, axes = legend(8e9)
    assert drawn
    assert [name for name in names if not name.startswith("measured")] == ["fastest within the limit", *drawn,
                                                                           "memory limit"]
    assert axes.lines[0].get_ydata().tolist() == [30.0, 10.0]  # ms
    assert axes.lines[0].get_xdata().tolist() == [2.0, 6.0]  # GB
    assert "memory limit" not in legend(80e9)[0]
    text = report_html(title="net", facts={}, rows=rows, history=None, strategy_table="", layout="", notes={},
                       frontier=points, memory_limit=8e9)
    assert "<h2>Time and memory</h2>" in text


def test_arms_are_drawn_as_measured_beside_as_predicted(rows):
    """Nothing where one of the two numbers is not known."""
    solution = Solution((0,), 0.02, 0.02, 0.0, True, 0.1, {})
    rows = {name: dict(rows[name]) for name in ("search", "data_parallel", "stock_data_parallel")}
    rows["search"].update(predicted_bytes=2e9, measured_bytes=3_000_000_000, predicted_ms=19.0, measured_ms=22.0)
    rows["stock_data_parallel"].update(measured_bytes=5_000_000_000, measured_ms=80.0)
    assert rows["data_parallel"]["measured_bytes"] is None
    figure = draw_memory(rows, (FrontierPoint(2e9, 2e9, solution), FrontierPoint(4e9, 4e9, solution)), 80e9, {})
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines]
    assert ([2.0], [19.0]) in drawn
    assert ([3.0], [22.0]) in drawn
    assert ([2.0, 3.0], [19.0, 22.0]) in drawn
    assert ([5.0], [80.0]) in drawn
    assert len(drawn) == 2 + 3 + 1 + 1  # the frontier and its bound, search, data_parallel, stock
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["fastest within the limit", "search", "measured, joined to predicted", "data_parallel",
                     "stock_data_parallel"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_measured_is_not_drawn_among_predictions_of_another_machine(rows, monkeypatch, elsewhere):
    solution, drawn = Solution((0,), 0.02, 0.02, 0.0, True, 0.1, {}), []
    rows = {"search": {**rows["search"], "predicted_bytes": 2e9, "measured_bytes": 3_000_000_000, "predicted_ms": 19.0,
                       "measured_ms": 2200.0, "measured_ms_quartiles": (2100.0, 2300.0)}}
    monkeypatch.setattr(page, "draw_memory", lambda *given, **more: drawn.append(draw_memory(*given, **more))
                        or drawn[-1])
    text = report_html(title="net", facts={}, rows=rows, history=None, strategy_table="", layout="", notes={},
                       frontier=(FrontierPoint(2e9, 2e9, solution), FrontierPoint(4e9, 4e9, solution)),
                       elsewhere=elsewhere)
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["fastest within the limit", "search", *["measured, joined to predicted"] * (not elsewhere)]
    assert (drawn[0].axes[0].get_ylim()[1] > 1000) != elsewhere
    caption = " ".join(text.split())
    assert ("filled; green as measured, joined to what was predicted." in caption) != elsewhere
    assert ("the chosen one filled." in caption) == elsewhere


def test_report_of_a_search_alone(rows):
    text = report_html(title="net", facts={}, rows={}, history=None, strategy_table="table", layout="layout", notes={})
    assert "table" in text
    assert "<img" not in text


def test_what_was_found_is_said_first(rows):
    strategy = SimpleNamespace(search={"optimal": True, "gap": 0.0})
    assert headline(rows, strategy) == "2.50× data parallelism, measured, proven optimal, predicted within 5 %"
    strategy.search["kernels"] = {"of_strategy": 3}
    assert "proven optimal by the kernels that were timed, " in headline(rows, strategy)
    predicted = {name: {**row, "measured_ms": None, "speedup_over_data_parallel": None} for name, row in rows.items()}
    strategy = SimpleNamespace(search={"optimal": False, "gap": 0.02})
    assert headline(predicted, strategy) == "2.37× data parallelism, predicted, at most 2 % above the optimum"
    assert "predicted within" not in headline(rows, strategy, elsewhere=True)  # than what was measured
    strategy.search = {"optimal": False, "gap": 0.2, "simulated": 9, "simulated_seconds": 0.002,
                       "shortest_simulated_seconds": 0.00199}
    assert "at most 0.51 % above the shortest simulated step of 9" in headline(rows, strategy)
    rows["search"]["predicted_ms"] = 18.92  # 20 were measured
    assert "predicted within 6 %" in headline(rows, strategy)
    text = report_html(title="net", facts={}, rows=rows, history=None, strategy_table="", layout="", notes={},
                       headline=headline(rows, strategy))
    assert "2.50× data parallelism" in text


def test_where_steps_are_simulated_these_are_what_is_predicted(rows):
    rows["search"].update(predicted_ms=35.0, simulated_ms=19.0)  # 20 were measured
    strategy = SimpleNamespace(search={"optimal": True, "gap": 0.0, "simulated": 9, "simulated_seconds": 0.019})
    told = headline(rows, strategy)
    assert told.endswith("predicted within 5 %")
    assert "proven optimal by the sum of costs, of 9 simulated steps the best" in told
    strategy.search["shortest_simulated_seconds"] = 0.01899
    assert "of 9 simulated steps within a thousandth of the best" in headline(rows, strategy)


def test_a_pipeline_is_compared_with_the_simulated_step_of_data_parallelism():
    rest = {"measured_ms": None, "speedup_over_data_parallel": None}
    rows = {"pipeline": {"predicted_ms": 8.0, "simulated_ms": 8.0, **rest},
            "data_parallel": {"predicted_ms": 10.0, "simulated_ms": 7.0, **rest}}
    assert headline(rows, SimpleNamespace(search={"gap": 0.02})).startswith("0.88× data parallelism, predicted")


def test_a_predicted_step_is_drawn_by_what_it_consists_of(rows):
    parts = {"search": {"forward": 0.010, "all-reduce backward": 0.004, "overhead": 0.002, "resharding forward": 0.003}}
    axes = draw_steps(rows, parts).axes[0]
    widths = [round(bar.get_width(), 6) for bar in axes.patches if abs(bar.get_y() + 0.37) < 1e-9]
    assert widths == [10.0, 2.0, 4.0, 3.0]
    begins = [round(bar.get_x(), 6) for bar in axes.patches if abs(bar.get_y() + 0.37) < 1e-9]
    assert begins == [0.0, 10.0, 12.0, 16.0]


def test_a_measured_step_is_divided_as_its_traced_step_was(rows):
    def bars(traced):
        axes = draw_steps(rows, {}, traced).axes[0]
        return [(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches
                if abs(bar.get_y() - 0.01) < 1e-9]
    whole = (0.0, 20.0)
    assert bars({}) == [whole]
    slices = tuple(Slice(kind, "backward", "layer", device, device, 0.0, seconds) for kind, device, seconds in (
        ("kernels", 0, 3.0), ("kernels", 1, 2.0), ("gradient all-reduce", 0, 2.0), ("all-reduce", 1, 1.0),
        ("resharding", 1, 1.0), ("copying", 1, 1.0)))
    divided = [(0.0, 10.0), (10.0, 6.0), (16.0, 4.0)]
    assert bars({"search": Timeline("step", 2, 6.0, slices).seconds_by_kind}) == [*divided, whole]


def test_a_strategy_is_drawn_layer_by_layer():
    graph = perceptron()
    strategy = find_strategy(graph, 4, "1080ti")
    picture = graph_picture(graph, strategy)
    root = ElementTree.fromstring(picture)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    for number, layer in enumerate(graph.layers):
        assert any(title.startswith(layer.name) and strategy.explain(number, 4) in title for title in titles)
    split = dataclasses.replace(strategy, configurations=(
        Configuration((("batch", 4),)), Configuration((("width1", 4),)), *strategy.configurations[2:]))
    assert graph_picture(graph, find_strategy(graph, 1, "1080ti")).count("#c1121f") == 0
    assert graph_picture(graph, evaluate_strategy(graph, split.configurations, 4, "1080ti")).count("#c1121f") > 0
    many = dataclasses.replace(graph, layers=graph.layers * 200)
    assert graph_picture(many, strategy) == ""


def test_a_report_holds_the_simulated_step():
    strategy = find_strategy(perceptron(), 4, "1080ti")
    text = report_html(title="net", facts={}, rows={}, history=None, strategy_table="", layout="", notes={},
                       timeline=strategy.timeline(), graph=graph_picture(perceptron(), strategy))
    assert "data:image/png;base64," in text
    assert f"{1e3 * strategy.timeline().seconds:.2f} ms" in text
    assert "<svg" in text


@pytest.mark.parametrize(("search", "said"), [
    ({"optimal": True, "gap": 0.0}, "optimal (proven)"), ({"optimal": False, "gap": 0.02}, "at most 2 % above"),
    ({"optimal": False, "gap": 0.004, "simpler": "data_parallel"}, "data parallelism, predicted at most 0.4 % above"),
    ({"optimal": True, "gap": 0.0, "simpler": "data_parallel"}, "data parallelism, predicted to be optimal: as good"),
    ({"optimal": False, "gap": 0.2, "simulated": 9, "simulated_seconds": 0.002, "simulated_rank": 3,
      "cheapest_simulated_seconds": 0.003}, "simulated 2.000 ms, the shortest of 9, by cost number 3"),
    ({"optimal": False, "gap": 0.2, "simulated": 9, "simulated_seconds": 0.002, "simpler": "data_parallel",
      "shortest_simulated_seconds": 0.00199}, "as good, as far as simulated steps tell"),
    ({"optimal": False, "gap": 0.0, "lower_bound": 0.002, "simpler": "data_parallel"},
     "data parallelism over 6 devices, predicted faster than any strategy over all devices: as good"),
    ({"optimal": False, "gap": 0.0, "lower_bound": 0.001 * (1 + 1e-12), "simpler": "data_parallel"},
     "data parallelism over 6 devices, predicted to be optimal: as good"),
    ({}, "no bound")])
def test_what_the_search_proved_is_said(search, said):
    split = 6 if "lower_bound" in search else 8
    strategy = SimpleNamespace(search=search, devices=8, parts={"forward": 0.001}, seconds=0.001,
                               configurations=[Configuration((("batch", split),))])
    assert said in search_summary(strategy, SimpleNamespace(layers=(1, 2), edges=(1,)))


def test_what_leaves_devices_idle_may_be_faster_than_what_is_bounded(rows):
    """The bound is one of steps over all devices: it says nothing of others that leave some idle."""
    search = {"optimal": False, "gap": 0.0, "lower_bound": 0.021, "simpler": "data_parallel"}  # 19 ms are predicted
    assert headline(rows, SimpleNamespace(search=search)) == (
        "2.50× data parallelism, measured, predicted faster than any strategy over all devices, predicted within 5 %")
    strategy = find_strategy(perceptron(), 4, "1080ti")
    found = {"optimal": False, "gap": 0.0, "lower_bound": 2.0 * strategy.seconds}
    assert dataclasses.replace(strategy, search=found).verdict == "predicted faster than any strategy over all devices"


def test_the_simulated_step_is_marked_on_the_bar_of_the_sum(rows):
    """Costs add up to more than a step takes in which things overlap, and the headline compares the latter."""
    def marked():
        figure = draw_steps(rows, {})
        return ([12.0, 12.0] in [list(line.get_xdata()) for line in figure.axes[0].lines],
                any(text.get_text().startswith("simulated step") for text in figure.legends[0].get_texts()))
    assert marked() == (False, False)
    rows["search"]["simulated_ms"] = 12.0
    assert marked() == (True, True)


def test_an_arm_with_the_same_strategy_is_divided_as_the_one_that_was_trained(rows):
    axes = draw_steps(rows, {}, {"search": {"kernels": 3.0, "resharding": 1.0}}).axes[0]

    def bars(arm):
        lower = list(rows).index(arm) + 0.01
        return [(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches
                if abs(bar.get_y() - lower) < 1e-9]
    assert bars("expert") == bars("search") == [(0.0, 15.0), (15.0, 5.0), (0.0, 20.0)]


def test_a_file_whose_name_begins_with_an_underscore_is_in_the_legend():
    legend = draw_losses(_history(search=[9, 8], _best=[9, 8])).axes[0].get_legend()
    assert [text.get_text().strip() for text in legend.get_texts()] == ["search", "_best"]


def test_a_headline_says_over_how_many_devices_data_parallelism_was(rows):
    """Where the batch does not split over all devices the others idled, and nobody was told."""
    rows = {"data_parallel_4" if name == "data_parallel" else name: row for name, row in rows.items()}
    strategy = SimpleNamespace(search={"optimal": True, "gap": 0.0})
    assert headline(rows, strategy).startswith("2.50× data parallelism over 4 devices, measured, ")
    predicted = {name: {**row, "measured_ms": None, "speedup_over_data_parallel": None} for name, row in rows.items()}
    assert headline(predicted, strategy).startswith("2.37× data parallelism over 4 devices, predicted, ")


def test_the_edges_of_a_graph_are_read_once_for_the_alternatives_of_a_layer():
    """They were read for every configuration: 96 million edges for the picture of the transformer on 64 devices."""
    read = []

    class Counted(tuple):
        __slots__ = ()

        def __iter__(self):
            read.append(1)
            return super().__iter__()

    found = find_strategy(perceptron(), 8, "1080ti")
    graph = found._priced.graph
    priced = dataclasses.replace(found._priced, graph=dataclasses.replace(graph, edges=Counted(graph.edges)))
    read.clear()
    assert dataclasses.replace(found, _priced=priced).explain(1) == found.explain(1)
    assert len(read) == 1
