"""Strategies: found, shown, compared, saved."""

import dataclasses
import functools
import json
import subprocess
import sys

import numpy as np
import pytest
from layer_chains import layer_chain
from prices import price_strategy

from pase_mtf.cost.build import build_network
from pase_mtf.errors import FormatError, InfeasibleError, MismatchError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy import find, strategy, within
from pase_mtf.strategy.experts import data_parallel, start_by_hand
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy
from pase_mtf.strategy.tables import LayerSeconds, layers_table

find_strategy = functools.partial(find.find_strategy, simulate=0)
"""The cheapest by the sum of costs; what simulated steps make of it stands in test_simulated.py."""


@pytest.fixture
def graph():
    return layer_chain()


def test_the_search_beats_the_hand_written_ones_and_is_proven(graph):
    best = find_strategy(graph, 8, "1080ti")
    assert best.search["optimal"]
    for method in ("data_parallel", "expert"):
        assert best.seconds <= find_strategy(graph, 8, "1080ti", method).seconds
    assert best.search["layers"] == 3
    assert sum(best.parts.values()) == pytest.approx(best.seconds)
    assert sum(map(lambda parts: sum(parts.values()), best.layer_parts)) + sum(best.edge_parts) == pytest.approx(
        best.seconds)


def test_data_parallelism_is_taken_where_predictions_do_not_tell_it_apart(graph):
    best, by_hand = (find_strategy(graph, 8, "1080ti", method=method) for method in ("exact", "data_parallel"))
    behind = by_hand.seconds / best.seconds - 1.0
    assert behind > 0.0
    kept = find_strategy(graph, 8, "1080ti", simple_within=0.9 * behind)
    assert kept.configurations == best.configurations
    assert kept.search["optimal"]
    taken = find_strategy(graph, 8, "1080ti", simple_within=1.1 * behind)
    assert taken.configurations == by_hand.configurations
    assert taken.seconds == pytest.approx(by_hand.seconds)
    assert not taken.search["optimal"]
    assert taken.search["gap"] == pytest.approx(behind)
    assert taken.search["simpler"] == "data_parallel"
    assert taken.search["best_seconds"] == pytest.approx(best.seconds)
    # A limit that data parallelism does not keep, and a fraction that is none.
    limit = 0.5 * (best.memory_bytes + by_hand.memory_bytes)
    assert best.memory_bytes < limit < by_hand.memory_bytes
    assert find_strategy(graph, 8, "1080ti", memory_limit=limit, simple_within=10.0).memory_bytes <= limit
    with pytest.raises(UsageError, match="simple_within"):
        find_strategy(graph, 8, "1080ti", simple_within=-1.0)


def test_wide_layers_on_a_slow_network_alternate_their_splits():
    # The paper's finding for AlexNet: no data moves between fully connected layers split n, c, n.
    best = find_strategy(layer_chain(batch=16), 8, "2080ti")
    assert all(configuration.shards("batch") < 8 for configuration in best.configurations)


def test_big_batches_of_narrow_layers_go_data_parallel():
    graph = layer_chain(batch=65536, widths=(64, 64, 64, 64))
    best = find_strategy(graph, 8, "1080ti")
    assert best.configurations == data_parallel(graph, 8)


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16, 32, 64])
def test_every_number_of_devices(graph, devices):
    best = find_strategy(graph, devices, "h100")
    assert best.search["optimal"]
    assert all(configuration.devices == devices for configuration in best.configurations)


def test_the_least_seconds_are_those_of_the_strategy(graph, monkeypatch):
    machine = Machine.load("1080ti")
    found = find_strategy(graph, 8, machine)
    limit = 0.8 * found.memory_bytes
    within = find_strategy(graph, 8, machine, memory_limit=limit)
    # Where only the seconds are asked for, none is put together, and the graph is not hashed.
    monkeypatch.setattr(find, "price_assignment", None)
    assert find.least_seconds(graph, 8, machine) == found.seconds
    assert find.least_seconds(graph, 8, machine, limit) == within.seconds > found.seconds
    assert within.seconds <= find.least_seconds(graph, 8, machine, limit, gap=0.1) <= 1.1 * within.seconds


def test_what_is_not_proven_is_told_as_a_fraction_of_the_least(graph, monkeypatch):
    """Searches count it as one of the cost: with a half of that, a step may take twice as long as the fastest."""
    asked = []

    def halfway(priced, limit, options, *given, plain=find.solve_within, **others):
        asked.append(options.get("gap", 0.0))
        solution = plain(priced, limit, options, *given, **others)
        return dataclasses.replace(solution, lower_bound=solution.cost / 2, gap=0.5, optimal=False)
    monkeypatch.setattr(find, "solve_within", halfway)
    for gap in (0.0, 1.0, 10 ** 400):
        found = find_strategy(graph, 8, "1080ti", simulate=0, gap=gap)
        assert found.search["gap"] == 1.0
        assert "at most 100 % above the optimum" in str(found)
    find.least_seconds(graph, 8, Machine.load("1080ti"), gap=1.0)
    assert asked == [0.0, 0.5, float("inf"), 0.5]
    with pytest.raises(UsageError, match="gap of -1; give 0 or more"):
        find_strategy(graph, 8, "1080ti", gap=-1)


def test_a_memory_limit_is_kept_and_costs_no_more_than_it_must(graph):
    free = find_strategy(graph, 8, "1080ti")
    priced = build_network(graph, Machine.load("1080ti"), 8)
    first, second, third = priced.memory  # weights alone: nothing is held from moment to moment
    needs = first[:, None, None] + second[:, None] + third
    first, second, third = priced.network.vectors
    costs = first[:, None, None] + second[:, None] + third
    for edge in priced.network.edges:
        matrix = edge.matrix[edge.rows][:, edge.columns]
        if edge.source > edge.target:
            matrix = matrix.T
        costs = costs + (matrix[:, :, None] if {edge.source, edge.target} == {0, 1} else matrix)
    assert free.seconds == pytest.approx(costs.min(), rel=1e-12)
    for share in (0.0, 0.2, 0.5):
        limit = needs.min() + share * (free.memory_bytes - needs.min())
        found = find_strategy(graph, 8, "1080ti", memory_limit=limit, time_limit=600)
        assert found.memory_bytes <= limit * (1 + 1e-12)
        assert found.search["memory_limit"] == limit
        assert found.search["optimal"]
        assert found.seconds == pytest.approx(costs[needs <= limit * (1 + 1e-12)].min(), rel=1e-12)
    with pytest.raises(InfeasibleError):
        find_strategy(graph, 8, "1080ti", memory_limit=0.9 * needs.min())


def test_what_memory_buys_ends_at_the_strategy_found(graph, tmp_path):
    found = find_strategy(graph, devices=8, machine=Machine.load("h100"))
    points = found.memory_frontier(points=5, time_limit=5.0)
    costs = [point.solution.cost for point in points]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(found.seconds)
    assert points[-1].memory == pytest.approx(found.memory_bytes)
    within = find_strategy(graph, devices=8, machine=Machine.load("h100"), memory_limit=points[2].memory_limit)
    assert points[2].solution.cost == pytest.approx(within.seconds)
    found.save(tmp_path / "strategy.json")
    with pytest.raises(UsageError, match="knows no prices"):
        Strategy.load(tmp_path / "strategy.json").memory_frontier()


def test_what_memory_buys_keeps_no_proof_of_less_memory(graph, monkeypatch):
    """Where a search with more memory finds nothing cheaper; and it is told of what is known to fit."""
    told = []

    def hurried(priced, limit, options, cheapest, plain=within.solve_within):
        told.append(options["initial"])
        found = plain(priced, limit, options, cheapest)
        return found if len(told) <= 2 else dataclasses.replace(
            found, cost=2 * found.cost, lower_bound=0.5 * cheapest.cost, gap=0.75, optimal=False)
    monkeypatch.setattr(within, "solve_within", hurried)
    points = find_strategy(graph, devices=8, machine=Machine.load("h100")).memory_frontier(points=4, time_limit=60.0)
    least, first, second, most = (point.solution for point in points)
    assert told[1:] == [least.assignment, first.assignment]
    assert first.optimal
    assert (second.assignment, second.cost, points[2].memory) == (first.assignment, first.cost, points[1].memory)
    assert not second.optimal
    assert second.lower_bound == 0.5 * most.cost
    assert second.gap == pytest.approx(1 - second.lower_bound / second.cost)


@pytest.mark.parametrize("start", ["data_parallel", "expert"])
def test_flexflows_search_improves_on_its_start(graph, start):
    begin = find_strategy(graph, 8, "1080ti", method=start)
    found = find_strategy(graph, 8, "1080ti", method="mcmc", start_from=start, proposals=20000, seed=1)
    best = find_strategy(graph, 8, "1080ti")
    assert best.seconds * (1 - 1e-9) <= found.seconds <= begin.seconds * (1 + 1e-9)
    with pytest.raises(UsageError, match=r"unknown start 'experts'.*did you mean 'expert'"):
        find_strategy(graph, 8, "1080ti", method="mcmc", start_from="experts")
    with pytest.raises(UsageError, match="method 'exact' begins nowhere"):
        find_strategy(graph, 8, "1080ti", start_from=start, memory_limit=1e9)


@pytest.mark.parametrize("start", ["data_parallel", "expert"])
def test_a_chain_begins_on_as_many_devices_as_its_start_has(graph, start):
    """The batch is 64."""
    begin = start_by_hand(graph, 12, start)
    assert {configuration.devices for configuration in begin} == {8}
    found = find_strategy(graph, 12, "1080ti", method="mcmc", start_from=start, proposals=1000)
    assert found.seconds <= evaluate_strategy(graph, begin, 12, Machine.load("1080ti")).seconds
    with pytest.raises(InfeasibleError, match="no layer of this graph updates"):
        start_by_hand(graph, 12, "zero")


def test_what_a_method_does_not_use_is_refused(graph):
    for method in ("exact", "mcmc", "data_parallel", "zero"):
        with pytest.raises(UsageError, match=rf"is for \"expert\", .* method '{method}' does not use it"):
            find_strategy(graph, 8, "1080ti", method, mesh=[("a", 2)])
    for method, start in (("expert", None), ("mcmc", "expert")):
        with pytest.raises(UsageError, match="'chain' has no attention heads, and other networks no such mesh"):
            find_strategy(graph, 8, "1080ti", method, start_from=start, mesh=[("rows", 4), ("cols", 2)])
    for method in ("expert", "data_parallel", "zero"):
        with pytest.raises(UsageError, match=f"method '{method}' searches nothing and has no option 'foo'"):
            find_strategy(graph, 8, "1080ti", method, foo=1)


@pytest.mark.parametrize("method", ["mcmc", "pase", "expert"])
@pytest.mark.parametrize("prices", ["roofline", "measured"])
def test_methods_that_keep_to_no_limit_say_so(graph, method, prices):
    with pytest.raises(UsageError, match="keeps to no memory limit"):
        find_strategy(graph, 8, "1080ti" if prices == "roofline" else "local", method, memory_limit=1e9, prices=prices)


def test_within_memory_it_may_begin_with_an_assignment(graph):
    free = find_strategy(graph, 8, "1080ti")
    first = [0] * len(graph.layers)
    found = find_strategy(graph, 8, "1080ti", memory_limit=0.9 * free.memory_bytes, initial=first)
    assert found.memory_bytes <= 0.9 * free.memory_bytes
    assert found.seconds >= free.seconds
    for options in ({"known": free.configurations}, {"initial": first}):
        with pytest.raises(UsageError, match=f"{next(iter(options))}: only a search within a memory limit begins with"):
            find_strategy(graph, 8, "1080ti", **options)
    with pytest.raises(UsageError, match="a str is no ComputationGraph"):
        free.check_graph("graph")


def test_table_shows_every_split(graph):
    best = find_strategy(graph, 8, "1080ti")
    text = best.table(group=False)
    assert "proven optimal" in text
    for layer, configuration in zip(graph.layers, best.configurations, strict=True):
        row = next(line for line in text.splitlines() if line.startswith(layer.name))
        assert str(configuration) in row
    assert len(str(best).splitlines()) <= len(text.splitlines())


def test_table_shows_the_parts_of_the_memory(graph):
    found = find_strategy(graph, 8, "1080ti")
    line = str(found).splitlines()[-1]
    assert line.startswith(f"memory on the fullest device: {found.memory_bytes / 1e6:.1f} MB (weights ")
    for part, size in found.memory.items():
        assert f"{part} {size / 1e6:.1f}" in line


def test_a_search_without_a_bound_claims_none(graph):
    found = find_strategy(graph, 8, "1080ti", method="mcmc", proposals=100)
    assert "ms a step, without a bound; 5.5 of 8 devices do useful work" in str(found)


def test_explain_names_the_reason(graph):
    best = find_strategy(graph, 8, "1080ti")
    text = best.explain("fc1", most=5)
    assert "chosen" in text
    assert "loses on" in text
    rows = [line.split() for line in text.splitlines()[3:]]
    assert len(rows) == 5
    # Of all rows, those without a reason, too: the others as they are, no single change helps, as it is optimal.
    assert min(float(next(cell for cell in row if cell[0] in "+-")) for row in rows) == 0
    assert best.explain(1).splitlines()[0] == best.explain("fc1").splitlines()[0]
    with pytest.raises(UsageError, match="did you mean 'fc1'"):
        best.explain("fc11")
    with pytest.raises(UsageError, match="explain: most='a': is no int"):
        best.explain(0, most="a")
    with pytest.raises(UsageError, match="most=0: give how many"):
        best.explain(0, most=0)


def test_diff_lists_what_differs(graph):
    best = find_strategy(graph, 8, "1080ti")
    other = find_strategy(graph, 8, "1080ti", "data_parallel")
    text = best.diff(other)
    differing = [layer.name for layer, mine, theirs in
                 zip(graph.layers, best.configurations, other.configurations, strict=True) if mine != theirs]
    assert differing
    assert [line.split()[0] for line in text.splitlines()[3:3 + len(differing)]] == differing
    assert "3 of 3 layers are split alike" in best.diff(best)
    with pytest.raises(MismatchError, match="different graphs"):
        best.diff(find_strategy(layer_chain(batch=32), 8, "1080ti"))


def _lopsided():
    """fc0 feeds fc1 feeds fc2, in the forward pass only; the middle one is split so that both its edges cost."""
    graph = layer_chain(batch=64, widths=(64, 128, 128, 64))
    graph = ComputationGraph("lopsided", graph.layers, tuple(edge for edge in graph.edges if edge.phase == "forward"),
                             graph.operations)
    by_batch = Configuration((("batch", 4),))
    return graph, [by_batch, by_batch, by_batch], [by_batch, Configuration((("d2", 4),)), by_batch]


def test_resharding_is_charged_half_to_either_end():
    graph, _, crossed = _lopsided()
    found = evaluate_strategy(graph, crossed, 4, "1080ti")
    first, second = price_strategy(graph, Machine.load("1080ti"), 4, crossed).edges
    assert first > 0
    assert second > 0
    assert found.edge_parts == pytest.approx((first / 2, (first + second) / 2, second / 2))
    assert sum(layer.total for layer in found.layer_seconds) == pytest.approx(found.seconds)


def test_the_rows_of_a_diff_add_up_to_the_difference():
    graph, alike, crossed = _lopsided()
    before, after = (evaluate_strategy(graph, chosen, 4, "1080ti") for chosen in (alike, crossed))
    lines = before.diff(after).splitlines()[3:]
    # What the neighbours of the layer that differs pay is in a row of its own.
    assert [line.split("  ")[0] for line in lines] == ["fc1", "(layers split alike)"]
    differences = [float(line.split()[-1]) for line in lines]
    assert differences[1] > 0
    assert sum(differences) == pytest.approx(1e3 * (after.seconds - before.seconds), abs=2e-3)


def test_what_moves_within_a_layer_is_resharding_in_every_table():
    """A shift along a split dim, and no other communication."""
    x = Operand(("rows", "d"), (64, 256))
    shift = LayerOperation(0, "shift", "AnyName", "forward", "gather", 64.0 * 256, ("rows", "d"), (x,), (x,),
                           shift=("rows", 1), role="shift")
    layer = Layer("shift", "other", {"rows": 64, "d": 256}, ("rows", "d"), (shift,), ())
    graph = ComputationGraph("shifted", (layer,), (), 1)
    found = evaluate_strategy(graph, [Configuration((("rows", 4),))], 4, "1080ti")
    moved = found.parts["resharding forward"]
    assert moved > 0
    cost, = found.layer_seconds
    assert cost == (pytest.approx(found.seconds - moved), 0.0, pytest.approx(moved))
    row = next(line.split() for line in found.table().splitlines() if line.startswith("shift "))
    assert row[-2:] == ["0.000", f"{1e3 * moved:.3f}"]
    chosen = next(line.split() for line in found.explain("shift").splitlines() if line.endswith("chosen"))
    assert chosen[3:5] == ["0.0000", f"{1e3 * moved:.4f}"]


def test_files_of_the_first_version_load(graph, tmp_path):
    best = find_strategy(graph, 8, "1080ti")
    best.save(tmp_path / "strategy.json")
    data = json.loads((tmp_path / "strategy.json").read_text())
    assert data["version"] == 2
    (tmp_path / "strategy.json").write_text(json.dumps({**data, "version": 1}))
    assert Strategy.load(tmp_path / "strategy.json", graph) == best


def test_round_trip(graph, tmp_path):
    best = find_strategy(graph, 8, "1080ti")
    best.save(tmp_path / "strategy.json")
    loaded = Strategy.load(tmp_path / "strategy.json", graph)
    assert loaded == best
    assert {best: 1, find_strategy(graph, 8, "h100"): 2}[loaded] == 1
    with pytest.raises(UsageError, match="knows no prices"):
        loaded.explain(0)
    priced = Strategy.load(tmp_path / "strategy.json", graph, Machine.load("1080ti"))
    assert priced.explain(0) == best.explain(0)
    assert priced.seconds == pytest.approx(best.seconds)


def test_what_was_proven_is_of_the_prices_that_it_was_proven_by(graph, tmp_path):
    find_strategy(graph, 8, "1080ti").save(tmp_path / "strategy.json")
    same, other = (Strategy.load(tmp_path / "strategy.json", graph, Machine.load(name)) for name in ("1080ti", "h100"))
    assert "proven optimal" in same.verdict
    assert other.verdict == "given"
    assert set(other.search) <= {"useful_devices", "suggested_devices", "assumed"}
    assert other.search["useful_devices"] == same.search["useful_devices"]


def test_useful_devices_of_files_that_rounding_has_raised(graph, tmp_path):
    path = tmp_path / "strategy.json"
    find_strategy(graph, 8, "1080ti").save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "search": {**data["search"], "useful_devices": 8.000000000000002}}))
    assert Strategy.load(path).devices == 8


def test_another_graph_is_refused(graph, tmp_path):
    find_strategy(graph, 8, "1080ti").save(tmp_path / "strategy.json")
    with pytest.raises(MismatchError, match="search again"):
        Strategy.load(tmp_path / "strategy.json", layer_chain(batch=32))


def test_a_machine_prices_nothing_without_a_graph(graph, tmp_path):
    find_strategy(graph, 8, "1080ti").save(tmp_path / "strategy.json")
    with pytest.raises(UsageError, match="machine='h100': a strategy is priced with its graph; give that, too"):
        Strategy.load(tmp_path / "strategy.json", machine="h100")


def test_broken_files_are_refused(graph, tmp_path):
    path = tmp_path / "strategy.json"
    find_strategy(graph, 8, "1080ti").save(path)
    text = path.read_text()
    path.write_text(text[:-40])
    with pytest.raises(FormatError, match="truncated"):
        Strategy.load(path)
    path.write_text('{"format": "something else", "version": 1}')
    with pytest.raises(FormatError, match="foreign"):
        Strategy.load(path)
    data = json.loads(text)
    for change in ({"configurations": [[["batch", 1]]] * 3}, {"configurations": data["configurations"][:1]},
                   {"version": 99}, {"seconds": None, "layer_parts": 3}, {"edge_parts": data["edge_parts"][:1]}):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(FormatError):
            Strategy.load(path)
    del data["parts"]
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="parts"):
        Strategy.load(path)


def test_without_a_name_the_machine_is_the_one_at_hand(graph, monkeypatch):
    asked = []

    def load(machine, devices):
        asked.append((machine, devices))
        return machine if isinstance(machine, Machine) else Machine.load("h100")

    monkeypatch.setattr(find, "load_machine", load)
    monkeypatch.setattr(strategy, "load_machine", load)
    assert find_strategy(graph, 8).machine_name == "h100"
    assert evaluate_strategy(graph, data_parallel(graph, 4), 4).machine_name == "h100"
    assert asked == [("local", 8), ("local", 4)]


def test_bad_arguments(graph):
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        find_strategy(graph, 8, "1080ti", "exakt")
    with pytest.raises(UsageError, match="at least one device"):
        find_strategy(graph, 0, "1080ti")
    with pytest.raises(UsageError, match="1080ti"):
        find_strategy(graph, 8, "1080")
    with pytest.raises(InfeasibleError, match="does not divide by 7"):
        find_strategy(graph, 7, "1080ti", "data_parallel")
    with pytest.raises(UsageError, match="cannot be split into 3"):
        evaluate_strategy(graph, [Configuration((("batch", 3),))] * 3, 3, Machine.load("1080ti"))
    with pytest.raises(UsageError, match="needs 8 devices"):
        evaluate_strategy(graph, [Configuration((("batch", 8),))] * 3, 4, Machine.load("1080ti"))


def test_numbers_larger_than_any_float_are_without_limit(graph):
    free = find_strategy(graph, 8, "1080ti")
    found = find_strategy(graph, 8, "1080ti", memory_limit=10 ** 400, time_limit=10 ** 400, measure_seconds=10 ** 400)
    assert found.configurations == free.configurations
    simple = find_strategy(graph, 8, "1080ti", simple_within=10 ** 400)
    assert simple.configurations == data_parallel(graph, 8)
    options = {"simulate": 1, "beta": 10 ** 400, "proposals": 10 ** 400}
    assert find_strategy(graph, 8, "1080ti", "mcmc", time_limit=0.2, **options).search["simulated"] > 1
    with pytest.raises(UsageError, match="a chain without end"):
        find_strategy(graph, 8, "1080ti", "mcmc", simulate=1, time_limit=10 ** 400)


def test_any_split_can_be_priced(graph):
    rng = np.random.default_rng(0)
    machine = Machine.load("h100")
    best = find_strategy(graph, 8, machine)
    for _ in range(20):
        chosen = [rng.permutation(["batch", f"d{number}", f"d{number + 1}"])[:2] for number in range(3)]
        configurations = [Configuration(((str(a), 2), (str(b), 4))) for a, b in chosen]
        assert evaluate_strategy(graph, configurations, 8, machine).seconds >= best.seconds * (1 - 1e-9)


@pytest.mark.slow
def test_searching_never_imports_tensorflow():
    code = ("import sys, pase_mtf; pase_mtf.find_strategy; pase_mtf.solve; pase_mtf.CostNetwork; pase_mtf.Machine; "
            "assert 'tensorflow' not in sys.modules; pase_mtf.export_graph; assert 'tensorflow' in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("search", [{"optimal": False}, {"optimal": True, "gap": "none"}, {"simulated": 3}])
def test_what_no_search_tells_is_refused(graph, search):
    best = find_strategy(graph, 8, "1080ti")
    with pytest.raises(UsageError, match=r"evaluate_strategy: search=.*is nothing that a search tells"):
        evaluate_strategy(graph, best.configurations, 8, "1080ti", search=search)
    assert str(evaluate_strategy(graph, best.configurations, 8, "1080ti", search=best.search))


def test_layers_of_one_block_are_one_row_however_long_their_numbers():
    names = [f"block{number}/fc" for number in (8, 9, 10, 11)]
    splits = [Configuration((("batch", 4),))] * 3 + [Configuration((("d", 4),))]
    rows = layers_table(names, splits, [LayerSeconds(1e-3, 0.0, 0.0)] * 4, group=True).splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [["block*/fc", "3"], ["block11/fc", "d:4"]]


def test_a_chain_begins_on_the_mesh_that_is_named_or_nowhere():
    """8 heads do not split by 3."""
    dims = {"batch": 24, "d_model": 64}
    layers = tuple(Layer(f"l{number}", "matmul", {**dims, name: size}, (*dims, name), (), ())
                   for number, (name, size) in enumerate((("heads", 8), ("d_ff", 64))))
    net = ComputationGraph("net", layers, (), 0)
    assert start_by_hand(net, 6, "expert", [("rows", 3), ("columns", 2)]) == start_by_hand(net, 6, "expert")
    with pytest.raises(InfeasibleError, match="by 3; take another mesh"):
        start_by_hand(net, 6, "expert", [("rows", 2), ("columns", 3)])


def test_more_devices_than_are_linked_are_told_at_once(graph):
    for method in ("exact", "data_parallel", "expert"):
        for devices in (10 ** 20, 10 ** 5000):
            with pytest.raises(UsageError, match="devices: machine '1080ti' links at most 1048576"):
                find_strategy(graph, devices, "1080ti", method)
