"""Strategies that are drawn: to see how good predictions are, they have to differ in cost, and be legal."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
from pretended_meter import PretendedMeter
from small_graphs import perceptron

from pase_mtf.errors import InfeasibleError, MismatchError, OutOfMemoryError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import enumerate_configurations
from pase_mtf.launch.arms.program import export_with_program, exported
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.reports.text import describe_run
from pase_mtf.launch.strategies import finding
from pase_mtf.launch.strategies.finding import changed_configurations, find_strategies, possible_arms
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.by_kernels import kernels_of
from pase_mtf.strategy.experts import data_parallel, expert, zero
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.simulated import MOST_DEVICES
from pase_mtf.strategy.strategy import evaluate_strategy


def _plan(**options):
    return resolve(Options(model="alexnet", devices="cpu", machine="h100", **options))


@pytest.mark.parametrize(("mesh", "parallel"), [("12", 8), ("7", 4), ("a:2;b:3", 4), ("96", 64), ("1000", 64)])
def test_any_number_of_devices(mesh, parallel):
    """The batch is 64; data parallelism runs on as many devices as divide it, and the rest idle."""
    plan, graph = _plan(mesh=mesh), perceptron((32, 64, 64, 16), batch=64)
    assert [arm.name for arm in plan.options.arms] == [
        "search", f"stock_data_parallel_{parallel}", f"data_parallel_{parallel}", "expert"]
    strategies, left_out = find_strategies(plan, graph, Machine.load("h100"))
    assert list(strategies) == ["search", f"data_parallel_{parallel}", f"expert_{parallel}"]
    assert left_out == {}
    for arm in (f"data_parallel_{parallel}", f"expert_{parallel}"):
        assert {configuration.devices for configuration in strategies[arm].configurations} == {parallel}
    assert strategies[f"expert_{parallel}"].configurations == expert(graph, parallel)
    assert [arm.name for arm in possible_arms(plan, graph)] == [
        "search", f"stock_data_parallel_{parallel}", *list(strategies)[1:]]
    assert str(plan.devices.count) in plan.options.uneven


def test_chains_walk_on_simulated_steps_where_devices_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(finding, "_PROPOSALS", 50)
    plan, graph = _plan(mesh="4", compare="mcmc,mcmc_expert"), perceptron((32, 64, 64, 16), batch=64)
    for machine, own in ((Machine.load("h100"), True),
                         (dataclasses.replace(Machine.load("h100"), shared_cores=True), False)):
        strategies, _ = find_strategies(plan, graph, machine)
        for arm in ("mcmc", "mcmc_expert"):
            assert (1 < strategies[arm].search.get("simulated", 0) <= 51) == own
        assert strategies["mcmc"].simulated_seconds == strategies["mcmc"].search.get("simulated_seconds")


@pytest.mark.parametrize(("mesh", "count", "names"), [
    ("8", 16, ["stock_data_parallel_4", "data_parallel_4"]), ("6", 8, ["stock_data_parallel_4", "data_parallel_4"]),
    ("4", 64, [])])
def test_data_parallelism_splits_a_microbatch(mesh, count, names):
    """The batch is 64. Of one example at a time there is none, whatever else its layers could be split by."""
    options = _plan(mesh=mesh, microbatches=str(count)).options
    assert [arm.name for arm in options.arms] == ["search", *names, "expert"]
    assert options.uneven.startswith(f"a microbatch of {64 // count} does not split over {mesh} devices")
    with pytest.raises(UsageError, match=rf"--batch=64 in {count} microbatches does not split over {mesh} devices"):
        _plan(mesh=mesh, microbatches=str(count), strategy="data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [False, True])
def test_what_begins_with_data_parallelism_idles_devices_as_that_does(by_kernels):
    plan = resolve(Options(model="rnnlm", preset="tiny", mesh="4", devices="cpu", machine="h100", batch=10,
                           compare="zero,mcmc", sharded_updates=True))
    graph, program = exported(plan)
    prices = MeasuredPrices(graph, kernels_of(program, graph), PretendedMeter()) if by_kernels else None
    machine = dataclasses.replace(Machine.load("h100"), shared_cores=True)  # a chain by cost
    found = find_strategies(plan, graph, machine, prices, 60.0)
    assert [arm.name for arm in plan.options.arms] == ["search", "zero_2", "mcmc"]
    assert plan.options.uneven == "a batch of 10 does not split over 4 devices: over 2 of them, 2 idle"
    assert found.left_out == {}
    assert found.strategies["zero_2"].configurations == zero(graph, 2)
    start = data_parallel(graph, 2)
    assert found.strategies["mcmc"].seconds <= (prices.evaluate(start, "start") if prices else evaluate_strategy(
        graph, start, 4, machine)).seconds


def test_a_microbatch_that_splits_over_all_devices():
    options = _plan(mesh="4", microbatches="16", strategy="data_parallel").options
    assert [arm.name for arm in options.arms][:2] == ["data_parallel", "stock_data_parallel"]
    assert options.parallel_devices == 4
    assert options.uneven == ""


def test_nothing_to_compare_with():
    plan = _plan(mesh="6", batch=7)
    assert [arm.name for arm in plan.options.arms] == ["search", "expert"]
    assert plan.options.uneven.endswith("left out")
    strategies, left_out = find_strategies(_plan(mesh="6", batch=7), perceptron((32, 64, 64, 16), batch=11),
                                           Machine.load("h100"))
    assert list(strategies) == ["search"]
    assert "batch=11 does not divide" in left_out["expert"]


def test_where_every_process_has_a_graph_there_is_no_stock_arm():
    plan = _plan(mesh="2", cluster="local:2", clients="ranks")
    found = find_strategies(plan, perceptron((32, 64, 64, 16), batch=64), Machine.load("h100"))
    assert list(found.strategies) == ["search", "data_parallel", "expert"]
    assert "--clients=one trains it" in found.left_out["stock_data_parallel"]


def test_a_search_within_a_limit_begins_with_what_is_known(monkeypatch):
    """And finds nothing slower, however little time it has."""
    graph, machine = perceptron((64, 512, 512, 64), batch=64), Machine.load("h100")
    whole = find_strategies(_plan(memory_limit="none"), graph, machine).strategies
    plan = _plan(memory_limit=str(int(0.75 * whole["data_parallel"].memory_bytes)), compare="none")
    best = find_strategies(plan, graph, machine).strategies["search"]
    assert best.memory_bytes <= plan.options.bytes_per_device(machine)
    free = find_strategies(_plan(memory_limit="none", compare="none"), graph, machine, known=best.configurations)
    assert free.strategies["search"].configurations == whole["search"].configurations  # without one it begins nowhere
    monkeypatch.setattr(finding, "find_strategy", functools.partial(find_strategy, time_limit=1e-6, simulate=0))
    assert find_strategies(plan, graph, machine).strategies["search"].seconds > best.seconds
    again = find_strategies(plan, graph, machine, known=best.configurations).strategies["search"]
    assert again.seconds <= best.seconds
    assert again.memory_bytes <= plan.options.bytes_per_device(machine)


def test_what_does_not_fit_is_no_answer_and_not_compared_with():
    graph, machine = perceptron((64, 512, 512, 64), batch=64), Machine.load("h100")
    whole = find_strategies(_plan(memory_limit="none"), graph, machine).strategies
    limit = 0.75 * whole["data_parallel"].memory_bytes
    strategies, left_out = find_strategies(_plan(memory_limit=str(int(limit))), graph, machine)
    assert strategies["search"].memory_bytes <= limit < whole["data_parallel"].memory_bytes
    assert "per device" in left_out["data_parallel"]
    assert "per device" in left_out["stock_data_parallel"]
    alone = find_strategies(_plan(memory_limit=str(int(limit)), compare="stock_data_parallel"), graph, machine)
    assert alone.left_out == {"stock_data_parallel": left_out["data_parallel"]}
    with pytest.raises(InfeasibleError, match="any strategy needs"):
        find_strategies(_plan(memory_limit="100"), graph, machine)
    with pytest.raises(OutOfMemoryError, match="arm data_parallel: needs"):
        find_strategies(_plan(memory_limit="100", strategy="data_parallel"), graph, machine)


@pytest.mark.parametrize(("number", "share"), [(0, 0.9), (1, 0.25), (2, 0.1), (3, 0.5), (6, 0.1)])
def test_a_share_of_the_layers_is_changed(number, share):
    best, other = range(4000), range(4000, 8000)
    found = changed_configurations(best, other, number, seed=3)
    changed = [new for old, new in zip(best, found, strict=True) if old != new]
    assert len(changed) / 4000 == pytest.approx(share, abs=0.03)
    assert all(new - 4000 == place for place, new in enumerate(found) if new >= 4000)
    assert found == changed_configurations(best, other, number, seed=3)
    assert found != changed_configurations(best, other, number, seed=4)


def test_drawn_strategies_are_legal_and_none_is_better_than_the_best():
    graph, machine = perceptron((32, 64, 64, 16), batch=64), Machine.load("h100")
    plan = resolve(Options(model="alexnet", devices="cpu", machine="h100", compare="random:4,changed:4"))
    found = find_strategies(plan, graph, machine).strategies
    assert len({strategy.configurations for strategy in found.values()}) > 4
    # Data parallelism is taken instead where simulated steps are as short, which hide what is added up here.
    best = found["search"].search.get("best_seconds", found["search"].seconds)
    for strategy in found.values():
        assert strategy.seconds >= 0.99 * best
        for layer, configuration in zip(graph.layers, strategy.configurations, strict=True):
            assert configuration in enumerate_configurations(layer, 8)


@pytest.mark.parametrize(("asked", "flags"), [
    ({"dtype": "bfloat16"}, "--dtype=float32"), ({"microbatches": "4"}, "--microbatches=1"),
    ({"sharded_updates": True}, "--nosharded_updates"),
    ({"microbatches": "2", "sharded_updates": True}, "--microbatches=1 --nosharded_updates")])
def test_a_strategy_for_other_flags_names_them(tmp_path, asked, flags):
    path = str(tmp_path / "strategy.json")
    options = Options(model="rnnlm", preset="tiny", mesh="2", devices="cpu", machine="h100", dtype="float32")
    machine, plan = Machine.load("h100"), resolve(options)
    graph, _ = export_with_program(plan)
    evaluate_strategy(graph, data_parallel(graph, 2), 2, machine).save(path)
    assert finding._load(path, plan, graph, machine).devices == 2
    other = resolve(dataclasses.replace(options, **asked))
    with pytest.raises(MismatchError, match=f"is for a run with {flags}; add that"):
        finding._load(path, other, export_with_program(other)[0], machine)


def test_a_strategy_for_another_program_is_told_so(tmp_path):
    path = str(tmp_path / "strategy.json")
    options = Options(model="rnnlm", preset="tiny", mesh="2", devices="cpu", machine="h100")
    graph, _ = export_with_program(resolve(options))
    evaluate_strategy(graph, data_parallel(graph, 2), 2, Machine.load("h100")).save(path)
    smaller = resolve(dataclasses.replace(options, batch=4))
    with pytest.raises(MismatchError, match=r"made for rnnlm.* search again for this one"):
        finding._load(path, smaller, export_with_program(smaller)[0], Machine.load("h100"))


@pytest.mark.parametrize("by_kernels", [False, True])
def test_the_fastest_within_limits_are_arms(by_kernels):
    plan = resolve(Options(model="rnnlm", preset="tiny", mesh="4", devices="cpu", machine="1080ti", compare="within:3"))
    graph, program = exported(plan)
    machine = dataclasses.replace(Machine.load("1080ti"), shared_cores=True)
    prices = MeasuredPrices(graph, kernels_of(program, graph), PretendedMeter()) if by_kernels else None
    found = find_strategies(plan, graph, machine, prices, 60.0)
    assert list(found.strategies) == ["search", "within_0", "within_1", "within_2"]
    if not by_kernels:  # by these all are searched; kernels are still measured after the limits were set
        points = find_strategy(graph, 4, machine).memory_frontier(4)
        assert points[0].memory < points[-1].memory
        for number, point in enumerate(points[:-1]):
            assert found.strategies[f"within_{number}"].memory_bytes <= point.memory_limit * (1 + 1e-9)


def test_the_page_says_up_to_how_many_devices_chains_walk_on_simulated_steps(repository):
    page = (repository / "docs" / "launcher.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `mcmc`"))
    assert f"no more than {MOST_DEVICES}" in row


def test_an_expert_that_fails_on_the_axes_of_the_run_alone_idles_no_devices():
    dims = {"batch": 24, "length": 8, "d_model": 64}
    layers = tuple(Layer(f"l{number}", "matmul", {**dims, **more}, tuple({**dims, **more}), (), ())
                   for number, more in enumerate(({"heads": 8}, {"d_ff": 64}, {"vocab": 128})))
    plan, net = _plan(mesh="rows:2;cols:3", batch=24), ComputationGraph("net", layers, (), 0)
    arms = possible_arms(plan, net)
    assert [(arm.name, arm.argument) for arm in arms if arm.method == "expert"] == [("expert", "6")]
    facts = describe_run(plan, SimpleNamespace(describe=str), Machine.load("h100"), net, arms)
    assert facts["expert"].startswith("has no strategy on the axes of --mesh=rows:2;cols:3:")


def test_an_arm_that_no_device_has_room_for_is_left_out_whatever_the_limit():
    """The run ended by it, with exit code 4, where the default limit leaves it out."""
    graph, machine = perceptron((64, 512, 512, 64), batch=64), Machine.load("h100")
    whole = find_strategies(_plan(memory_limit="none"), graph, machine).strategies
    small = dataclasses.replace(machine, memory_bytes=0.75 * whole["data_parallel"].memory_bytes)
    found = find_strategies(_plan(memory_limit="none"), graph, small)
    for arm in ("data_parallel", "stock_data_parallel"):
        assert "per device" in found.left_out[arm]
    shown = find_strategies(_plan(memory_limit="none", search_only=True), graph, small)
    assert "data_parallel" in shown.strategies
