"""Finding pipelines: blocks, schedules, the best cut, and what a step is predicted to take."""

import dataclasses
import itertools
import json
import math
import random

import harness
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.amounts import needed_text
from pase_mtf.cost.build import build_network
from pase_mtf.errors import FormatError, InfeasibleError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Edge
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition
from pase_mtf.machine.machine import Link
from pase_mtf.pipeline import cutting, find
from pase_mtf.pipeline.blocks import find_blocks, of_microbatch, part_of_graph
from pase_mtf.pipeline.cutting import Cutting, cut_stages
from pase_mtf.pipeline.find import NoPipelineError, evaluate_pipeline, find_pipeline
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.pipeline.prices import RatePrices
from pase_mtf.pipeline.schedule import SCHEDULES, Task, in_flight, order_of_stage, tasks_in_order
from pase_mtf.pipeline.simulate import Laid, simulate_step, stage_seconds
from pase_mtf.pipeline.stage_costs import StageChoice, StageCosts
from pase_mtf.pipeline.stage_memory import StageMemory
from pase_mtf.search import solve
from pase_mtf.strategy.experts import data_parallel

_COUNT = 4


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """One microbatch of a transformer of two and two layers."""
    path = tmp_path_factory.mktemp("preset") / "micro.json"
    path.write_text(json.dumps({**SIZES["transformer"], "layers": 2, "preset": "tiny"}))
    config = models.load_config("transformer", str(path))
    return harness.export_model("transformer", dataclasses.replace(config, batch=config.batch // 2))


def _work(graph):
    return [float(vector.min()) for vector in build_network(graph, harness.MACHINE, 1).network.vectors]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (3, 2), (4, 8)])
def test_tasks_stand_behind_what_they_need_and_keep_few_activations(schedule, stages, count):
    order = tasks_in_order(schedule, stages, count)
    assert len(order) == len(set(order)) == 2 * stages * count
    place = {task: number for number, task in enumerate(order)}
    for task in order:
        before = range(task.stage) if task.phase == "forward" else range(task.stage + 1, stages)
        assert all(place[task._replace(stage=other)] < place[task] for other in before)
        if task.phase == "backward":
            assert place[Task("forward", *task[1:])] < place[task]
    for stage in range(stages):
        kept, most = 0, 0
        for task in order_of_stage(schedule, stage, stages, count):
            kept += 1 if task.phase == "forward" else -1
            most = max(most, kept)
        assert most == in_flight(schedule, stages - stage, count)


class _Costs:
    """Costs of stages, at random, of which a part is known before they are searched."""

    def __init__(self, seed):
        self._seed, self.searched = seed, set()

    def _random(self, *place):
        return random.Random(f"{self._seed}/{place}")

    def least(self, first, stop, devices):
        return self._seconds(first, stop, devices) * self._random(first, stop, devices, "least").uniform(0.9, 1)

    def best(self, first, stop, devices, in_flight):
        self.searched.add((first, stop, devices, in_flight))
        seconds = self._seconds(first, stop, devices)
        return StageChoice(math.inf if seconds * devices > 3 * (stop - first) else seconds, ())

    def _seconds(self, first, stop, devices):
        return self._random(first, stop, devices).uniform(1, 4) * (stop - first) / devices


def _least_of_all_cuts(costs, blocks, devices, count, schedule, stages, *, shared=False):
    """Seconds of the best cut into so many stages; every cut is looked at."""
    best = math.inf
    for sizes in itertools.product((1, 2, 4), repeat=stages):
        offsets = [sum(sizes[:number]) for number in range(stages)]
        if sum(sizes) > devices or any(offset % size for offset, size in zip(offsets, sizes, strict=True)):
            continue
        for inner in itertools.combinations(range(1, blocks), stages - 1):
            taken = [costs.best(first, stop, size, in_flight(schedule, stages - number, count)).seconds
                     for number, ((first, stop), size) in enumerate(zip(
                         itertools.pairwise((0, *inner, blocks)), sizes, strict=True))]
            best = min(best, sum(taken) * count if shared else sum(taken) + (count - 1) * max(taken))
    return best


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_best_cut_is_that_of_all_cuts(seed, shared):
    costs, all_costs, blocks, devices, count = _Costs(seed), _Costs(seed), 5, 4, 3
    found = cut_stages(costs, blocks, devices, count, "1f1b", shared_cores=shared)
    for stages in range(1, 5):
        best = _least_of_all_cuts(all_costs, blocks, devices, count, "1f1b", stages, shared=shared)
        assert (found[stages].seconds if stages in found else math.inf) == pytest.approx(best)
        alone = cut_stages(_Costs(seed), blocks, devices, count, "1f1b", numbers=[stages], shared_cores=shared)
        assert alone == {number: cut for number, cut in found.items() if number == stages}
    assert len(costs.searched) < len(all_costs.searched) / 2


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_summed_once_a_step(graph, shared):
    """Not in every microbatch: over links so slow that nothing else counts it is the update that takes longer."""
    fast, slow = (dataclasses.replace(harness.MACHINE, shared_cores=shared, links=(Link(2, bandwidth, 0.0),))
                  for bandwidth in (1e8, 1e4))
    stage = Laid(0, len(graph.layers), 0, 2, tuple(data_parallel(graph, 2)))
    one, other = (stage_seconds(stage, RatePrices(graph, machine)) for machine in (fast, slow))
    assert other.update > 10 * one.update
    assert other.backward < 1.5 * one.backward


@pytest.mark.parametrize(("devices", "nodes"), [
    (12, (8,)), (12, (4,)), (24, (8,)), (10, (8,)), (6, (8,)), (16, (4, 8))])
def test_a_group_lies_in_a_node_or_begins_with_one(devices, nodes):
    """It is priced as the first so many devices: those from 6 on that reach into the next node are not joined so."""
    every, kept = (Cutting(1, devices, 1, shared_cores=False, nodes=given) for given in ((), nodes))
    for offset in range(devices):
        sizes = [place.devices for place in kept.beginning(1, 0, offset)]
        assert sizes == [place.devices for place in every.beginning(1, 0, offset) if all(
            [one // node for one in range(place.devices)] == [one // node - offset // node for one in range(
                offset, offset + place.devices)] for node in nodes)]
        assert 1 in sizes


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_best_cut_within_a_limit_is_that_of_all_cuts(graph, schedule, monkeypatch):
    monkeypatch.setattr("pase_mtf.pipeline.stage_costs._SECONDS", 60.0)  # a busy machine proves less in one
    blocks = find_blocks(graph, _work(graph), 5)

    def costs(limit):
        return StageCosts(blocks, RatePrices(blocks.graph, harness.MACHINE), _COUNT,
                          StageMemory(graph, _COUNT, shared=False), limit)

    free = find_pipeline({_COUNT: graph}, 4, harness.MACHINE, schedule=schedule, blocks=5, stages=2).memory_bytes
    every, found = costs(0.9 * free), cut_stages(costs(0.9 * free), blocks.count, 4, _COUNT, schedule)
    differs = 0
    for stages in range(1, 5):
        best = _least_of_all_cuts(every, blocks.count, 4, _COUNT, schedule, stages)
        assert (found[stages].seconds if stages in found else math.inf) == pytest.approx(best)
        differs += best > 1.001 * _least_of_all_cuts(costs(None), blocks.count, 4, _COUNT, schedule, stages)
    assert differs


def test_what_stages_take_at_least_is_what_they_take_or_less(graph):
    blocks = find_blocks(graph, _work(graph), 6)
    costs = StageCosts(blocks, RatePrices(blocks.graph, harness.MACHINE), _COUNT)
    for first, stop in itertools.combinations(range(blocks.count + 1), 2):
        least, best = costs.least(first, stop, 4), costs.best(first, stop, 4, 1).seconds
        assert 0.0 < least <= best * (1 + 1e-9)
        assert stop > first + 1 or least == pytest.approx(best)


@pytest.mark.parametrize("proven", [True, False])
def test_that_none_was_found_is_no_proof(graph, proven, monkeypatch):
    def none(*_, **__):
        raise InfeasibleError("none", proven=proven)

    monkeypatch.setattr("pase_mtf.pipeline.stage_costs.minimise_within_peak", none)
    blocks = find_blocks(graph, _work(graph), 2)
    costs = StageCosts(blocks, RatePrices(blocks.graph, harness.MACHINE), _COUNT,
                       StageMemory(graph, _COUNT, shared=False), 1000.0)
    assert costs.best(0, 1, 2, 1).seconds == math.inf
    assert costs.optimal == proven
    with pytest.raises(InfeasibleError, match="no pipeline of 2 stages") as caught:
        find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=2, blocks=2, memory_limit=1e12)
    assert caught.value.proven == proven
    assert "needs at least" not in str(caught.value)  # which is less
    assert ("found no" in str(caught.value)) != proven


def test_blocks_are_cut_where_gradients_come_back_the_way_tensors_went(graph):
    blocks = find_blocks(graph, _work(graph), 6)
    assert 1 < blocks.count <= 6
    for edge in graph.edges:
        source, target = blocks.of_layer(edge.source), blocks.of_layer(edge.target)
        if edge.phase == "forward":
            assert source <= target
        elif edge.phase == "backward":
            assert source >= target
    assert all(not edge.pending for edge in blocks.graph.edges
               if blocks.of_layer(edge.source) != blocks.of_layer(edge.target))
    sums = sum(len(operation.pending_outputs) for layer in blocks.graph.layers for operation in layer.operations)
    assert sums == sum(bool(edge.pending) for edge in blocks.graph.edges)


def test_as_many_blocks_as_asked_of_layers_that_are_alike(graph):
    """Even where fewer blocks than layers would each have to hold twice the mean."""
    for most in (1, 2, len(graph.layers) - 1, len(graph.layers)):
        assert 1 + (most > 1) <= find_blocks(graph, [1.0] * len(graph.layers), most).count <= most


def test_a_stage_of_all_layers_costs_what_the_search_finds(graph):
    blocks = find_blocks(graph, _work(graph), 1)
    costs = StageCosts(blocks, RatePrices(blocks.graph, harness.MACHINE), 1)
    expected = solve(build_network(graph, harness.MACHINE, 4).network)
    assert costs.best(0, 1, 4, 1).seconds == pytest.approx(expected.cost)


def test_repeated_blocks_are_searched_once(graph):
    blocks = find_blocks(graph, _work(graph), 12)
    costs = StageCosts(blocks, RatePrices(blocks.graph, harness.MACHINE), _COUNT)
    for first in range(blocks.count):
        costs.least(first, first + 1, 2)
    assert costs.searched < costs.pairs == blocks.count


def test_a_pipeline_fills_and_then_waits_for_its_bottleneck_stage(graph):
    """At links that take no time. GPipe's order is slower where stages differ in how long they take either way."""
    fast, layers = dataclasses.replace(harness.MACHINE, links=(Link(64, 1e30, 0.0),)), len(graph.layers)
    once = evaluate_pipeline(graph, (Laid(0, layers, 0, 1, _alone(layers)),), _COUNT, "1f1b", fast)
    stage = once.stages[0]
    assert once.seconds == pytest.approx(_COUNT * (stage.forward + stage.backward) + stage.update)
    assert stage.idle == pytest.approx(0.0, abs=1e-9)
    half = layers // 2
    stages = (Laid(0, half, 0, 1, _alone(half)), Laid(half, layers, 1, 1, _alone(layers - half)))
    twice, gpipe = (evaluate_pipeline(graph, stages, _COUNT, schedule, fast) for schedule in SCHEDULES)
    bottleneck = max(one.forward + one.backward for one in twice.stages)
    filling = sum(one.forward + one.backward for one in twice.stages)
    assert filling + (_COUNT - 1) * bottleneck <= twice.seconds * (1 + 1e-9)
    assert twice.seconds <= filling + (_COUNT - 1) * bottleneck + max(one.update for one in twice.stages) * (1 + 1e-9)
    assert gpipe.seconds >= twice.seconds * (1 - 1e-9)


def _alone(layers):
    return (Configuration(),) * layers


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_found_uses_all_layers(graph, schedule, tmp_path):
    found = find_pipeline({_COUNT: graph}, 4, harness.MACHINE, schedule=schedule, blocks=6)
    assert len(found.stages) > 1
    assert [stage.first for stage in found.stages] == [0, *(stage.stop for stage in found.stages[:-1])]
    assert found.stages[-1].stop == len(graph.layers) == len(found.configurations)
    assert sum(stage.devices for stage in found.stages) <= 4
    assert found.search["optimal"]
    assert found.seconds > 0
    if schedule == "gpipe":
        assert all(stage.in_flight == _COUNT for stage in found.stages)
    else:
        assert found.stages[-1].in_flight == 1
    found.save(tmp_path / "pipeline.json")
    assert Pipeline.load(tmp_path / "pipeline.json") == found
    assert "stages" in found.table()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shared", [False, True])
def test_a_pipeline_tells_what_each_device_does_when(graph, schedule, shared, tmp_path):
    found = find_pipeline({_COUNT: graph}, 4, dataclasses.replace(harness.MACHINE, shared_cores=shared), stages=2,
                          schedule=schedule, blocks=6)
    found.save(tmp_path / "pipeline.json")
    timeline = Pipeline.load(tmp_path / "pipeline.json").timeline()
    assert (timeline.devices, timeline.seconds) == (4, found.seconds)
    assert max(one.end for one in timeline.slices) == pytest.approx(found.seconds)
    for stage in found.stages:
        for device in range(stage.offset, stage.offset + stage.devices):
            assert timeline.busy[device] == pytest.approx(1.0 - stage.idle, rel=1e-6)
            done = [one for one in timeline.slices if one.device == device and one.kind == "kernels"]
            assert [(one.phase, one.layer) for one in done[:-1]] == [
                (task.phase, f"microbatch {task.microbatch + 1}") for task in order_of_stage(
                    schedule, found.stages.index(stage), 2, _COUNT)]
            assert (done[-1].phase, done[-1].layer) == ("update", "update")
    sent = [one for one in timeline.slices if one.kind == "transfer"]
    assert {one.phase for one in sent} == {"forward", "backward"}
    groups = [range(stage.offset, stage.offset + stage.devices) for stage in found.stages]
    for one in sent:
        sender, receiver = groups if one.phase == "forward" else groups[::-1]
        assert one.device in sender
        assert one.receiver in receiver
    if shared:  # one thing after the other: a slice of every stage, whatever its devices
        spans = sorted({(one.begin, one.end) for one in timeline.slices})
        assert all(first[1] <= second[0] + 1e-12 for first, second in itertools.pairwise(spans))


def test_a_file_of_an_earlier_version_has_no_timeline(graph, tmp_path):
    path = tmp_path / "pipeline.json"
    find_pipeline({_COUNT: graph}, 2, harness.MACHINE, blocks=4).save(path)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in fields.items() if name not in ("sent", "shared_cores")}))
    with pytest.raises(UsageError, match="does not say what its stages send; evaluate it again"):
        Pipeline.load(path).timeline()


def test_what_is_found_is_priced_as_one_that_is_given(graph):
    """Blocks of a stage may hand each other sums, which the search does not know."""
    found = find_pipeline({_COUNT: graph}, 8, harness.MACHINE, stages=2)
    blocks = find_blocks(of_microbatch(graph, _COUNT), _work(graph))
    searched = simulate_step(blocks.graph, found.laid(), _COUNT, "1f1b", RatePrices(blocks.graph, harness.MACHINE))
    given = evaluate_pipeline(graph, found.laid(), _COUNT, "1f1b", harness.MACHINE)
    assert searched.seconds != pytest.approx(given.seconds, rel=1e-5)
    assert found.seconds == pytest.approx(given.seconds, rel=1e-9)


@pytest.mark.slow
def test_devices_that_bring_nothing_idle(graph):
    """Five devices make groups of one: a stage more has to be worth what predictions cannot tell."""
    found = find_pipeline({_COUNT: graph}, 5, harness.MACHINE, blocks=6)
    by_stages = {number: find_pipeline({_COUNT: graph}, 5, harness.MACHINE, blocks=6, stages=number).seconds
                 for number in range(2, 6)}
    assert found.seconds <= 1.02 * min(by_stages.values())
    assert len(found.stages) == min(number for number, seconds in by_stages.items()
                                    if seconds <= 1.02 * min(by_stages.values()))
    alone = find_pipeline({_COUNT: graph}, 5, dataclasses.replace(harness.MACHINE, shared_cores=True), blocks=6)
    assert (len(alone.stages), sum(stage.devices for stage in alone.stages)) == (2, 2)


def test_memory_of_microbatches_in_flight_is_kept_to(graph):
    free = find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=2, blocks=6)
    limit = 0.9 * free.memory_bytes
    tight = find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=2, blocks=6, memory_limit=limit)
    assert tight.memory_bytes <= limit


@pytest.mark.parametrize(("needed", "helps"), [
    ({2: 40.0, 4: 25.0}, True), ({2: 40.0, 4: 32.0}, False), ({2: 10.0, 4: 40.0, 6: 30.0}, True), ({4: 12.0}, False),
    ({4: 18.4, 8: 16.9}, False), ({2: math.inf, 4: math.inf}, False), ({2: 12.0, 4: 12.0}, False)])
def test_more_microbatches_are_advised_where_they_may_fit(needed, helps):
    """What a device holds falls with them, but for its weights: 10 and 60 / microbatches in the first case."""
    assert find._falls_to(needed, 11.0) == helps


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, None])
def test_what_every_pipeline_needs_at_least_is_told_where_none_fits(graph, stages, monkeypatch):
    """And that is no more than any holds, and not far from it."""
    def refused(limit):
        with pytest.raises(NoPipelineError) as caught:
            find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=stages, blocks=6, memory_limit=limit)
        return caught.value
    least, told = [], cutting.least_of_largest

    def seen(*given):
        found = told(*given)
        least.append(found[0])
        return found
    monkeypatch.setattr(find, "least_of_largest", seen)
    error = refused(1000.0)
    assert (error.limited, error.proven) == (True, True)
    assert str(error) == (
        f"{graph.name}: no pipeline of {stages or 'two or more'} stages on 4 devices within 1000 B each; every one "
        f"needs at least {needed_text(least[0])}; raise the limit, or take more devices")
    assert refused(least[0] - 1.0).proven
    found = find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=stages, blocks=6, memory_limit=1.3 * least[0])
    assert least[0] <= found.memory_bytes <= 1.3 * least[0]
    monkeypatch.setattr(find, "_SECONDS_OF_LEAST", -1.0)
    assert "1000 B each; the lightest that was looked at needs at least " in str(refused(1000.0))


def test_what_the_largest_stage_has_at_least_is_that_of_the_best_cut_of_all():
    """Beside all cuts; and where no more stages may be looked at it is no more than that."""
    generator = random.Random(1)
    cuts = Cutting(5, 4, 2, shared_cores=False)
    size = {place: generator.random() for place in sorted(cuts.places())}

    def largest(left, first, offset):
        if left == 0:
            return 0.0 if first == 5 and offset <= 4 else math.inf
        return min((max(size[place], largest(left - 1, place.stop, offset + place.devices))
                    for place in cuts.beginning(left, first, offset)), default=math.inf)
    for numbers in ([2], [3], [4], range(2, 5)):
        least = min(largest(number, 0, 0) for number in numbers)
        assert cutting.least_of_largest(cuts, size.__getitem__, numbers, math.inf) == (least, least)
        below, above = cutting.least_of_largest(cuts, size.__getitem__, numbers, -1.0)
        assert below <= least <= above < math.inf
    assert cutting.least_of_largest(cuts, size.__getitem__, [5], math.inf) == (math.inf, math.inf)


@pytest.mark.parametrize(("stages", "says"), [
    (4, "no pipeline of 4 stages on 4 devices; the layers make 3 blocks; take fewer stages"),
    (None, "no pipeline of two or more stages on 4 devices; the layers make 1 block; leave them in one piece")])
def test_that_layers_cannot_be_cut_so_often_is_told_whatever_the_limit(graph, stages, says):
    for limit in (None, 1000.0):
        with pytest.raises(NoPipelineError) as caught:
            find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=stages, blocks=3 if stages else 1,
                          memory_limit=limit)
        assert str(caught.value).endswith(says)
        assert (caught.value.limited, caught.value.proven) == (False, True)


def test_parts_of_a_graph_are_graphs(graph):
    part = part_of_graph(graph, 3, 9)
    assert part.layers == graph.layers[3:9]
    assert all(0 <= edge.source < 6 and 0 <= edge.target < 6 for edge in part.edges)
    assert build_network(part, harness.MACHINE, 2).network.sizes


@pytest.mark.parametrize(("given", "message"), [
    ({"schedule": "2f2b"}, "unknown schedule '2f2b'"), ({"stages": 9}, "stages=9: give a number from 1 to 4"),
    ({"blocks": 0}, "blocks=0"), ({"devices": 1}, "devices=1: two stages or more need a device each; give more")])
def test_what_makes_no_sense_is_refused(graph, given, message):
    with pytest.raises(UsageError, match=message):
        find_pipeline({_COUNT: graph}, machine=harness.MACHINE, **{"devices": 4, **given})


@pytest.mark.parametrize(("field", "value"), [
    ("schedule", "other"), ("stages", []), ("configurations", []), ("microbatches", 0), ("search", {}),
    ("sent", [{"phase": "forward", "source": 0, "target": 2, "seconds": 1.0}]),
    ("sent", [{"phase": "update", "source": 0, "target": 1, "seconds": 1.0}]),
    ("sent", [{"phase": "forward", "source": 0, "target": 1, "seconds": -1.0}])])
def test_a_damaged_file_is_told(graph, field, value, tmp_path):
    path = tmp_path / "pipeline.json"
    find_pipeline({_COUNT: graph}, 2, harness.MACHINE, blocks=4).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(FormatError, match="not a complete pipeline"):
        Pipeline.load(path)


def test_rows_of_all_microbatches_are_priced_as_one_sum():
    """As they are lowered: a sum of sums of rows consists of the rows of all."""
    text = harness.export_model("transformer", models.load_config("transformer", "tiny"))

    def looked_up(graph):
        return [operation.looked_up for layer in graph.layers for operation in layer.operations if operation.looked_up]

    assert looked_up(text)
    assert of_microbatch(text, 1) is text
    assert looked_up(of_microbatch(text, 4)) == [one._replace(indices=4 * one.indices) for one in looked_up(text)]


def test_adding_up_gradients_takes_time(graph):
    """Once less than there are microbatches: two tensors as large as the weights are read, and one is written."""
    layers = len(graph.layers)
    updates = [evaluate_pipeline(graph, (Laid(0, layers, 0, 1, _alone(layers)),), count, "1f1b",
                                 harness.MACHINE).stages[0].update for count in (1, 2, 3, 4)]
    once = updates[1] - updates[0]
    assert [later - update for update, later in itertools.pairwise(updates)] == pytest.approx([once] * 3)
    nbytes = sum(3 * 4 * math.prod(variable.operand.shape) for layer in graph.layers for variable in layer.variables
                 if variable.trainable)
    assert once >= nbytes / harness.MACHINE.memory_bandwidth > 0.0


def test_what_is_sliced_and_put_together_between_stages_takes_time():
    """As within a stage: links that take no time do not tell."""
    machine = dataclasses.replace(harness.MACHINE, links=(Link(64, 1e30, 0.0),))
    edge = Edge(0, 1, "x", "forward", (8, 8), 4, ("a", "b"), ("a", "b"))
    prices = RatePrices(ComputationGraph("none", (), (), 0), machine)
    held, needed = Partition((0, 1), ((2, 1), (1, 1))), Partition((2, 3), ((1, 1), (2, 1)))
    # Either device slices half of the tensor, and puts half of it together: each is read and written.
    assert prices.between(edge, held, needed) >= 2 * 256 / machine.memory_bandwidth
    assert prices.between(edge, held, Partition((2, 3), held.shards)) == pytest.approx(0.0, abs=1e-12)


def test_a_number_of_stages_that_was_asked_for_is_told(graph):
    assert "4 microbatches and 2 stages, " in find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=2,
                                                            blocks=4).table()
    assert "every number of stages" in find_pipeline({_COUNT: graph}, 2, harness.MACHINE, blocks=4).table()


def test_a_stage_counts_once_however_many_follow_it(graph):
    blocks = find_blocks(graph, _work(graph), 5)
    costs = StageCosts(blocks, RatePrices(blocks.graph, harness.MACHINE), _COUNT)
    cut_stages(costs, blocks.count, 4, _COUNT, "1f1b")
    # On one device or two every run; on all four those that nothing follows.
    assert costs.pairs == 2 * math.comb(blocks.count + 1, 2) + blocks.count


def test_a_stage_that_reaches_into_another_node_is_refused(graph):
    layers = len(graph.layers)
    stages = (Laid(0, 1, 0, 1, _alone(1)), Laid(1, layers, 1, 2, _alone(layers - 1)))  # nodes of two devices
    with pytest.raises(UsageError, match="devices 1 to 2: they reach into another node"):
        evaluate_pipeline(graph, stages, _COUNT, "1f1b", harness.MACHINE)


def test_on_shared_cores_every_device_of_the_next_stage_is_sent_its_block_once():
    machine = dataclasses.replace(harness.MACHINE, shared_cores=True, links=(Link(64, 1e30, 1.0),))
    edge = Edge(0, 1, "x", "forward", (8, 8), 4, ("a", "b"), ("a", "b"))
    prices, whole = RatePrices(ComputationGraph("none", (), (), 0), machine), ((1, 1), (1, 1))
    for source, target in (((0,), (1, 2, 3, 4)), ((0, 1, 2, 3), (4,)), ((0, 1), (2, 3))):
        assert prices.between(edge, Partition(source, whole), Partition(target, whole)) == pytest.approx(len(target))


def test_a_limit_larger_than_any_float_is_none(graph):
    free, found = (find_pipeline({_COUNT: graph}, 4, harness.MACHINE, stages=2, blocks=2, memory_limit=limit)
                   for limit in (None, 10 ** 400))
    assert (found.stages, found.configurations) == (free.stages, free.configurations)


def test_more_devices_than_are_linked_are_told_before_they_are_cut(graph, monkeypatch):
    monkeypatch.setattr(find, "find_blocks", lambda *_: pytest.fail("cuts layers"))
    with pytest.raises(UsageError, match="links at most"):
        find_pipeline({_COUNT: graph}, 10 ** 20, harness.MACHINE)
