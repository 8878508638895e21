"""Runs whose prices are those of kernels; a clock that tells what it is asked to stands for the machine's."""

import dataclasses
import json
import types

import pytest
from small_graphs import perceptron

from pase_mtf.calibration import load
from pase_mtf.calibration.cache import kernels_path
from pase_mtf.compat import tf
from pase_mtf.errors import ClusterError
from pase_mtf.launch.__main__ import main
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.resumption import resumed
from pase_mtf.launch.run_folder import CONFIG_FORMAT, CONFIG_VERSION
from pase_mtf.launch.strategies import pricing
from pase_mtf.launch.strategies.finding import find_strategies
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.machine import Machine
from pase_mtf.machine.references import REFERENCES
from pase_mtf.strategy.experts import data_parallel, expert

_RUN = ["--model=rnnlm", "--preset=tiny", "--mesh=2", "--devices=cpu", "--prices=measured", "--search_only",
        "--compare=data_parallel,search"]


@pytest.mark.slow
def test_a_run_by_measured_kernels(cache_dir, timed_kernels, tmp_path, capsys):
    assert main([*_RUN, f"--output_dir={tmp_path / 'first'}"]) == 0
    captured = capsys.readouterr()
    assert "round 1: " in captured.err
    assert "kernels measured on" in captured.out
    summary = json.loads((tmp_path / "first" / "summary.json").read_text(encoding="utf-8"))
    strategy = json.loads((tmp_path / "first" / "strategy.json").read_text(encoding="utf-8"))
    kernels = strategy["search"]["kernels"]
    assert kernels["of_strategy"] == kernels["measured_of_strategy"] > 20
    times = load_times(kernels_path(2))
    assert times.damaged == 0
    assert len(times) == len(set(timed_kernels))
    # A second run measures nothing but the reference kernels, and finds the same.
    timed_kernels.clear()
    assert main([*_RUN, f"--output_dir={tmp_path / 'second'}"]) == 0
    assert "round 1: " not in capsys.readouterr().err
    assert set(timed_kernels) == set(REFERENCES)
    again = json.loads((tmp_path / "second" / "summary.json").read_text(encoding="utf-8"))
    for name, arm in again["arms"].items():  # what is kept has four digits
        if arm["predicted_ms"] is not None:  # as of stock Mesh-TensorFlow
            assert arm["predicted_ms"] == pytest.approx(summary["arms"][name]["predicted_ms"], rel=1e-3)


@pytest.mark.slow
def test_a_pipeline_is_priced_by_measured_kernels(cache_dir, timed_kernels, tmp_path):
    assert main([*_RUN, "--strategy=pipeline", f"--output_dir={tmp_path / 'run'}"]) == 0
    arms = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["arms"]
    assert next(iter(arms)) == "pipeline"
    kernels = json.loads((tmp_path / "run" / "pipeline.json").read_text(encoding="utf-8"))["search"]["kernels"]
    assert kernels["of_strategy"] == kernels["measured_of_strategy"] > 20
    # Devices share cores here: stages gain nothing, and microbatches have overhead.
    assert arms["pipeline"]["predicted_ms"] > 0.5 * arms["search"]["predicted_ms"]


@pytest.mark.parametrize(("flags", "gpus", "expected"), [
    ({}, 0, "measured"), ({"prices": "roofline"}, 0, "roofline"), ({}, 2, "roofline"),
    ({"machine": "a100"}, 0, "roofline"), ({"cluster": "local:2"}, 0, "roofline")])
def test_the_machine_at_hand_is_priced_by_its_kernels_where_they_can_be_measured(monkeypatch, flags, gpus, expected):
    monkeypatch.setattr("pase_mtf.runtime.gpu_names", lambda: ["a GPU"] * gpus)
    plan = resolve(Options(model="rnnlm", preset="tiny", mesh="2", **flags))
    assert plan.options.prices == expected


@pytest.mark.parametrize(("joined", "kept", "over"), [(True, False, True), (False, True, True), (False, False, False)])
def test_processes_are_measured_together_where_they_answer(monkeypatch, joined, kept, over):
    """Through the server of rank 0, also where every rank has a graph of its own; a search alone, which starts none,
    takes what is kept of such a measurement, or the numbers of one process."""
    asked = []
    plan = resolve(Options(model="rnnlm", preset="tiny", mesh="4", cluster="local:2", devices="cpu", clients="ranks"))
    plan = dataclasses.replace(plan, devices=dataclasses.replace(plan.devices, rank=0))
    monkeypatch.setattr(pricing, "read_cached", lambda *_: Machine.load("a100") if kept else None)
    monkeypatch.setattr(load, "load_machine", lambda machine, devices, kind, **more: (
        asked.append((devices, kind, more)) or Machine.load("a100")))
    assert pricing.machine_of(plan, None, joined=joined).name == "a100"
    alone = dataclasses.replace(plan.devices, rank=None)
    assert asked == [(4, "cpu", {"again": False, "over": alone if over else None})]


def test_a_process_that_is_lost_while_all_are_measured(monkeypatch):
    plan = resolve(Options(model="rnnlm", preset="tiny", mesh="4", cluster="local:2", devices="cpu"))

    def measures(*_, **__):
        raise tf.errors.UnavailableError(None, None, "connection reset")
    monkeypatch.setattr(load, "load_machine", measures)
    monkeypatch.setattr("pase_mtf.launch.cluster.lost._LAUNCHER_TELLS_WITHIN", 0.0)
    with pytest.raises(ClusterError, match="rank 0: a process was lost"):
        pricing.machine_of(plan, None, joined=True)


def test_a_run_that_goes_on_takes_what_is_known_best_where_it_is(tmp_path):
    """Its own prices may be of another machine, or a model that was fitted, which there is no longer."""
    for prices in ("fitted", "measured", "roofline"):
        (tmp_path / "config.json").write_text(json.dumps({
            "format": CONFIG_FORMAT, "version": CONFIG_VERSION,
            "options": {**dataclasses.asdict(Options(model="rnnlm")), "prices": prices}}))
        assert resumed(Options(resume=str(tmp_path)), set()).prices is None


@pytest.mark.parametrize(("compare", "expected"), [
    ("none", [60.0]), ("data_parallel,random:1,search", [40.0, 10.0, 10.0]), ("changed:1", [40.0, 20.0, 0.0])])
def test_all_arms_share_the_seconds_for_measuring(monkeypatch, compare, expected):
    """Each may take of what is left; what is trained two thirds, if others are to follow. One that takes some layers of
    the best strategy has no second share for these."""
    given, now, graph = [], [100.0], perceptron((32, 64, 64, 16), batch=64)
    monkeypatch.setattr("pase_mtf.launch.strategies.finding.time.monotonic", lambda: now[0])

    class Prices:
        def find(self, *, seconds, **_):
            return self.evaluate((), "search", seconds=seconds)

        def evaluate(self, configurations, name, *, seconds):
            given.append(seconds)
            now[0] += seconds
            return types.SimpleNamespace(memory_bytes=0.0, configurations=graph.layers, seconds=1.0, devices=8)

        def again(self, strategy):
            return strategy

        def wary_seconds(self, configurations):
            return 1.0

    plan = resolve(Options(model="alexnet", devices="cpu", prices="measured", measure_seconds=60,
                           compare=compare))
    find_strategies(plan, graph, Machine.load("h100"), Prices())
    assert given == pytest.approx(expected)


class _Fixed:
    """Prices that are known beforehand, of a search that finds what it is told to."""

    def __init__(self, found, seconds):
        self._found, self._seconds = found, seconds

    def find(self, **_):
        return self.evaluate(self._found, "search")

    def evaluate(self, configurations, name, **_):
        return types.SimpleNamespace(memory_bytes=0.0, configurations=tuple(configurations), name=name)

    def again(self, strategy, configurations=None):
        return self.evaluate(configurations or strategy.configurations, strategy.name)

    def wary_seconds(self, configurations):
        return self._seconds[configurations]


@pytest.mark.parametrize(("strategy", "compare"), [
    ("search", "data_parallel,expert"), ("data_parallel", "search,expert"), ("expert", "data_parallel,search"),
    ("data_parallel", "expert")])
def test_the_search_takes_what_turned_out_to_be_cheaper(strategy, compare):
    """Whether it is trained or compared with; what people ask for by name stays what it is."""
    graph = perceptron((32, 64, 64, 16), batch=64)
    by_hand = {"data_parallel": data_parallel(graph, 8), "expert": expert(graph, 8)}
    at_first = tuple(reversed(by_hand["expert"]))
    costs = {at_first: 3.0, by_hand["data_parallel"]: 2.0, by_hand["expert"]: 1.0}
    assert len(costs) == 3

    plan = resolve(Options(model="alexnet", devices="cpu", prices="measured", strategy=strategy, compare=compare))
    found = find_strategies(plan, graph, Machine.load("h100"), _Fixed(at_first, costs)).strategies
    assert {name: costs[strategy.configurations] for name, strategy in found.items()} == {
        name: {"data_parallel": 2.0}.get(name, 1.0) for name in (strategy, *compare.split(","))}
    assert [strategy.name for strategy in found.values()] == list(found)


@pytest.mark.parametrize(("first", "costs", "compare", "taken"), [
    ("parallel", {"parallel": 1.005, "expert": 1.0}, "expert", 1.005),
    ("found", {"parallel": 1.008, "expert": 1.0, "found": 1.004}, "data_parallel,expert", 1.008),
    ("found", {"parallel": 1.02, "expert": 1.0, "found": 1.004}, "data_parallel,expert", 1.0)])
def test_data_parallelism_that_is_hardly_behind_is_taken(first, costs, compare, taken):
    """As by the search itself, though what people write by hand is cheaper by less than a hundredth."""
    graph = perceptron((32, 64, 64, 16), batch=64)
    found = {"parallel": data_parallel(graph, 8), "expert": expert(graph, 8),
             "found": tuple(reversed(expert(graph, 8)))}
    seconds = {found[name]: cost for name, cost in costs.items()}

    plan = resolve(Options(model="alexnet", devices="cpu", prices="measured", strategy="search", compare=compare))
    chosen = find_strategies(plan, graph, Machine.load("h100"), _Fixed(found[first], seconds)).strategies
    assert seconds[chosen["search"].configurations] == taken
    assert seconds[chosen["expert"].configurations] == 1.0


def test_not_for_gpus(monkeypatch, capsys):
    monkeypatch.setattr("pase_mtf.runtime.gpu_names", lambda: ["a GPU"] * 2)
    assert main([*_RUN, "--devices=gpu"]) == 2
    assert "--prices=measured: prices the kernels of CPUs only" in capsys.readouterr().err


def test_the_gpus_of_a_list_are_those_that_are_measured(monkeypatch):
    monkeypatch.setattr("pase_mtf.runtime.gpu_names", lambda: ["T4", "A100"])
    asked = []
    monkeypatch.setattr(load, "load_machine", lambda machine, devices, kind, **more: (
        asked.append((devices, kind, more["over"])) or Machine.load("a100")))
    plan = resolve(Options(model="rnnlm", preset="tiny", mesh="1", devices="/device:GPU:1"))
    pricing.machine_of(plan, None)
    assert asked == [(1, "gpu", plan.devices)]
