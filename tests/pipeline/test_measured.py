"""Pipelines priced by kernels, on a machine whose kernels take what their text tells."""

import dataclasses
import json
import math

import harness
import pytest
from micro_models import SIZES
from pretended_meter import PretendedMeter

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.cost.kernels import KnownKernels
from pase_mtf.errors import FormatError, InfeasibleError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.pipelined import build_pipelined
from pase_mtf.launch.arms.program import variables_by_name
from pase_mtf.lowering.kernels import GraphKernels
from pase_mtf.machine.kernels import sum_kernel
from pase_mtf.pipeline import find
from pase_mtf.pipeline.find import NoPipelineError, evaluate_pipeline, find_measured_pipeline
from pase_mtf.pipeline.pipeline import Pipeline

_DEVICES = 4


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Number of microbatches -> one of alexnet's training step, and its graph."""
    path = tmp_path_factory.mktemp("preset") / "micro.json"
    path.write_text(json.dumps({**SIZES["alexnet"], "preset": "tiny"}))
    config = models.load_config("alexnet", str(path))
    found = {}
    for count in (1, 2):
        with tf.Graph().as_default(), variables_by_name():
            one = build_pipelined(models.get("alexnet"), config, config.batch // count, "sgd", 0.1, 0, 1)
        graph = export_graph(one.graph)
        found[count] = graph, GraphKernels(one.graph, graph)
    return found


def _find(program, counts, meter, **options):
    return find_measured_pipeline({count: program[count][0] for count in counts},
                                  {count: program[count][1] for count in counts}, meter, **options)


def test_a_step_takes_what_its_kernels_take(program):
    """In one microbatch: devices share cores, and every kernel runs once."""
    graph, source = program[1]
    meter = PretendedMeter()
    found = _find(program, (1,), meter, stages=2)
    assert len(found.stages) == 2
    kernels = found.search["kernels"]
    assert kernels["measured_of_strategy"] == kernels["of_strategy"] > 0
    assert kernels["rounds"] > 0
    assert meter.asked

    def held(layer, dims):
        stage = found.stages[found.stage_of(layer)]
        placed = found.configurations[layer].placed(graph.layers[layer], dims)
        return dataclasses.replace(placed, devices=tuple(device + stage.offset for device in placed.devices))

    # Every layer as it is known, every edge by how its ends hold it; sums are those of the layers.
    known = KnownKernels(graph, source)
    known.look(found.configurations, ())
    counts = known.kernels(found.configurations, ())
    for edge in graph.edges:
        same = found.stage_of(edge.source) == found.stage_of(edge.target)
        if same or edge.phase != "update":
            moved = source.move(held(edge.source, edge.source_dims), held(edge.target, edge.target_dims), edge.shape,
                                edge.itemsize)
            counts.update({kernel: times * edge.trips for kernel, times in moved.items()})
    expected = sum(times * meter.times.get(kernel).seconds for kernel, times in counts.items())
    assert found.seconds == pytest.approx(expected, rel=1e-6)


def test_microbatches_are_weighed_by_kernels(program, tmp_path):
    """And what is not measured is estimated, and said to be."""
    found = _find(program, (1, 2), PretendedMeter())
    each = [_find(program, (count,), PretendedMeter()) for count in (1, 2)]
    assert found.seconds <= min(one.seconds for one in each) * 1.1
    assert "kernels of it measured" in found.table()
    found.save(tmp_path / "pipeline.json")
    assert Pipeline.load(tmp_path / "pipeline.json") == found
    text = (tmp_path / "pipeline.json").read_text().replace('"of_strategy": ', '"of_strategy": "many", "rest": ')
    (tmp_path / "pipeline.json").write_text(text)
    with pytest.raises(FormatError, match=r"search\.kernels\.of_strategy is 'many'"):
        Pipeline.load(tmp_path / "pipeline.json")
    little = _find(program, (2,), PretendedMeter(limit=3)).search["kernels"]
    assert little["measured_of_strategy"] < little["of_strategy"]


def test_gradients_are_added_up_once_less_than_there_are_microbatches(program):
    graph, _ = program[2]
    meter = PretendedMeter()
    found = _find(program, (2,), meter, stages=2)
    weights = {(variable.operand.shape, configuration) for layer, configuration in zip(
        graph.layers, found.configurations, strict=True) for variable in layer.variables if not configuration.axes}
    assert weights
    for shape, _ in weights:
        assert sum_kernel(2, math.prod(shape), 4) in meter.times


def test_one_that_is_given_is_priced_alike(program):
    """With the same kernels measured, of its own graph alone."""
    graph, source = program[2]
    found = _find(program, (2,), PretendedMeter())
    given = evaluate_pipeline(graph, found.laid(), 2, "1f1b", harness.MACHINE, (source, PretendedMeter()))
    assert given.seconds == pytest.approx(found.seconds, rel=1e-6)
    assert given.search["kernels"]["measured_of_strategy"] == given.search["kernels"]["of_strategy"] > 0
    assert given.statement.startswith("given, not searched; prices: ")


def test_what_makes_no_sense_is_refused(program):
    with pytest.raises(UsageError, match="stages=9: give a number from 1 to 4"):
        _find(program, (2,), PretendedMeter(), stages=9)
    with pytest.raises(InfeasibleError, match="within 1000 B each; every one needs at least"):
        _find(program, (2,), PretendedMeter(), memory_limit=1000.0)


def test_what_was_found_stays_though_later_searches_find_nothing(program, monkeypatch):
    """Within a limit each has a second, on a machine that others may slow."""
    right, calls = find._Search.best, []

    def once(self, *given):
        calls.append(given)
        if len(calls) > 1:
            raise NoPipelineError("found no pipeline", "raise the limit", proven=False, limited=True)
        return right(self, *given)

    monkeypatch.setattr(find._Search, "best", once)
    found = _find(program, (2,), PretendedMeter(), memory_limit=1e9)
    assert len(calls) > 1
    assert len(found.stages) > 1
    assert (found.search["optimal"], found.search["gap"]) == (False, math.inf)
    assert "the shortest of those that were searched" in found.table()


def test_a_limit_that_is_none_is_refused(program):
    """One that is less than any number is no other name for no limit."""
    for limit in (-math.inf, -1.0, math.nan):
        with pytest.raises(UsageError, match=r"memory_limit=.*: give a number of bytes, or None"):
            _find(program, (2,), PretendedMeter(), memory_limit=limit)
