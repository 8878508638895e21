"""Programs lowered as pipelines train as on one device; every device takes its turns in the order of the schedule."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import random

import harness
import numpy as np
import pytest
from micro_models import SIZES
from rank_worker import cluster_devices
from ranks import assert_all_ends_or_none, reached

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.cost.build import build_network
from pase_mtf.cost.compute import PARTS
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.launch.arms.arm import rows_read
from pase_mtf.launch.arms.pipelined import build_pipelined, lower_pipeline
from pase_mtf.lowering import collectives
from pase_mtf.lowering import lowering as lowering_module
from pase_mtf.lowering.ranks import Rank
from pase_mtf.lowering.summed_rows import SumOfRows
from pase_mtf.pipeline.blocks import find_blocks, of_microbatch
from pase_mtf.pipeline.find import evaluate_pipeline, find_pipeline
from pase_mtf.pipeline.simulate import Laid, crossings
from pase_mtf.strategy.experts import data_parallel


def _config(name, tmp_path, **changes):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**SIZES[name], "preset": "tiny", **changes}))
    return dataclasses.replace(models.load_config(name, str(path), dtype="float64"), dropout=0.0)


def _program(name, config, batch, count, optimizer):
    return build_pipelined(models.get(name), config, batch, optimizer, config.learning_rate, 3, count)


def _drawn(graph, stages, devices, count, schedule, seed):
    """A pipeline of cuts and configurations at random."""
    draw = random.Random(seed)
    blocks = find_blocks(graph, [1.0] * len(graph.layers), 10)
    inner = sorted(draw.sample(blocks.starts[1:-1], stages - 1))
    size = devices // stages
    laid = tuple(Laid(first, stop, number * size, size, tuple(
        draw.choice(enumerate_configurations(layer, size)) for layer in graph.layers[first:stop]))
        for number, (first, stop) in enumerate(itertools.pairwise((0, *inner, len(graph.layers)))))
    return evaluate_pipeline(graph, laid, count, schedule, harness.MACHINE)


def _found(graph, stages, devices, count, schedule, seed):
    del seed
    return find_pipeline({count: graph}, devices, harness.MACHINE, stages=stages, schedule=schedule, blocks=8)


def _trained(name, config, choose, count, optimizer="sgd", *, sharded=False):
    with tf.Graph().as_default():
        one = _program(name, config, config.batch // count, 1, optimizer)
        pipeline = choose(export_graph(one.graph, sharded_updates=sharded))
    with tf.Graph().as_default():
        program = _program(name, config, config.batch, count, optimizer)
        lowering = lower_pipeline(program, one, pipeline, harness.device_names(pipeline.devices))
        batches = itertools.islice(harness.model_batches(name, config), harness.STEPS)
        return harness.train(program, lowering, batches, values=harness.random_values(program.graph))


@pytest.mark.parametrize(("name", "choose", "stages", "devices", "count", "schedule"), harness.some_slow(
    [("transformer", _found, 2, 4, 2, "1f1b")],
    [("transformer", _drawn, 2, 4, 4, "gpipe"), ("gnmt", _drawn, 2, 2, 2, "1f1b"),
     ("transformer", _drawn, 4, 4, 4, "1f1b"),
     ("transformer", _drawn, 4, 8, 2, "gpipe"), ("transformer", _found, 4, 8, 4, "1f1b"),
     ("transformer", _found, 2, 4, 4, "gpipe"), ("gnmt", _found, 2, 4, 2, "gpipe"), ("gnmt", _found, 4, 4, 4, "1f1b"),
     ("gnmt", _drawn, 4, 8, 4, "1f1b"), ("alexnet", _drawn, 2, 4, 4, "1f1b"), ("alexnet", _drawn, 1, 4, 2, "1f1b")]))
def test_trains_as_on_one_device(name, choose, stages, devices, count, schedule, tmp_path):
    """Of a deep transformer, of gnmt and of alexnet, in stages that were found or drawn at random."""
    config = _config(name, tmp_path, **({"layers": 2} if name == "transformer" else {}))
    found = _trained(name, config, lambda graph: choose(graph, stages, devices, count, schedule, seed=1), count)
    wanted = harness.one_device(name, config)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-8)
    harness.assert_same(found.variables, wanted.variables, 1e-7)
    harness.assert_same(found.changes, wanted.changes, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "seed", "sharded"), [
    ("gnmt", 2, 5, True), *(("transformer", 2, seed, False) for seed in range(2, 5)), ("transformer", 2, 3, True),
    ("gnmt", 4, 6, True)])
def test_cuts_at_random_with_adam(name, stages, seed, sharded, tmp_path):
    """Also with updates that are layers of their own, split as they like, in the stage of the weights."""
    config = _config(name, tmp_path)
    found = _trained(name, config, lambda graph: _drawn(graph, stages, 4, 2, "1f1b", seed), 2, "adam", sharded=sharded)
    wanted = harness.one_device(name, config, "adam")
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-8)
    harness.assert_same(found.variables, wanted.variables, 1e-7)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_widens_a_gradient_is_part_of_the_backward_pass(sharded, tmp_path):
    """It runs in every microbatch, where the gradient is: else each would be summed on its way to an update."""
    config = dataclasses.replace(_config("gnmt", tmp_path), dtype="bfloat16")
    with tf.Graph().as_default():
        graph = export_graph(_program("gnmt", config, 2, 1, "sgd").graph, sharded_updates=sharded)
    found = [(layer.kind, operation.phase) for layer in graph.layers for operation in layer.operations
             if operation.type == "_Widen"]
    assert found
    assert {phase for _, phase in found} == {"backward"}
    assert "update" not in {kind for kind, _ in found}


def test_an_update_is_in_the_stage_of_its_weights(tmp_path):
    with tf.Graph().as_default():
        one = _program("gnmt", _config("gnmt", tmp_path), 2, 1, "adam")
        graph = export_graph(one.graph, sharded_updates=True)
    updates = [number for number, layer in enumerate(graph.layers) if layer.kind == "update"]
    assert all(graph.layers[number].name == f"{graph.layers[number - 1].name}/update" for number in updates)
    assert len(updates) > 4
    blocks = find_blocks(graph, [1.0] * len(graph.layers), len(graph.layers))
    assert blocks.count > 4
    assert set(updates).isdisjoint(blocks.starts)


def _nodes_of(lowering, operations):
    """The nodes that read something and were made for one of these operations."""
    found = set()
    for node in tf.get_default_graph().get_operations():
        scopes = [node.name[:place + 1] for place, letter in enumerate(node.name) if letter == "/"]
        made_for = next((lowering.scopes[scope] for scope in reversed(scopes) if scope in lowering.scopes), None)
        if made_for in operations and node.inputs:
            found.add(node)
    return found


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", True), ("gpipe", False)])
def test_a_device_begins_a_microbatch_when_one_in_flight_is_done(schedule, held, tmp_path):
    """By the graph alone: the third microbatch waits in the first of two stages until the first came back."""
    config = _config("transformer", tmp_path)
    with tf.Graph().as_default():
        one = _program("transformer", config, 2, 1, "sgd")
        pipeline = _drawn(export_graph(one.graph), 2, 2, 4, schedule, 1)
    with tf.Graph().as_default():
        program = _program("transformer", config, 8, 4, "sgd")
        lowering = lower_pipeline(program, one, pipeline, harness.device_names(2))
        third, first_back = ({node for node in _nodes_of(lowering, set(operations)) if node.device.endswith(":0")}
                             for operations in (program.written.forward[2], program.written.backward[0]))
        before = reached(*third)
    assert third
    assert first_back
    assert bool(before & first_back) == held


@pytest.mark.parametrize(("name", "devices", "seed"), [("transformer", 2, 1), ("transformer", 4, 2), ("gnmt", 4, 1)])
def test_turns_do_not_wait_for_what_nobody_needs(name, devices, seed, tmp_path):
    """Nor do steps run it: the gradient of one-hot vectors, as large as a vocabulary."""
    config = _config(name, tmp_path)
    with tf.Graph().as_default():
        one = _program(name, config, 2, 1, "sgd")
        pipeline = _drawn(export_graph(one.graph), 2, devices, 4, "1f1b", seed)
    with tf.Graph().as_default():
        program = _program(name, config, 8, 4, "sgd")
        lowering = lower_pipeline(program, one, pipeline, harness.device_names(devices))
        run = reached(*map(lowering.lowered_operation, program.updates))
        backward = {operation for operations in program.written.backward for operation in operations}
        idle = _nodes_of(lowering, backward & {lowering.scopes[scope] for scope in lowering.idle_scopes})
    assert any("embedding" in node.name for node in idle)
    assert not run & idle


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "each", "stages", "seed"), [(2, 2, 2, 4), (2, 3, 3, 3), (4, 1, 4, 9)])
def test_ranks_of_a_pipeline_run_all_ends_of_a_transfer_or_none(ranks, each, stages, seed, tmp_path, monkeypatch):
    """Also where the loss alone is fetched: microbatches wait for the way back of others, which sends, too."""
    config = _config("gnmt", tmp_path, batch=24)
    with tf.Graph().as_default():
        one = _program("gnmt", config, 6, 1, "sgd")
        graph = export_graph(one.graph)
        pipeline = _drawn(graph, stages, ranks * each, 4, "1f1b", seed)
    devices, lowered = cluster_devices(ranks, each), []
    for number in range(ranks):
        monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
        with tf.Graph().as_default():
            program = _program("gnmt", config, 24, 4, "sgd")
            lowering = lower_pipeline(program, one, pipeline, devices, rank=Rank.of(devices, number), graph=graph)
            lowered.append((lowering, [lowering.export_to_tf_tensor(program.loss).op,
                                       *map(lowering.lowered_operation, program.updates)]))
    assert_all_ends_or_none(lowered)


def test_a_rank_reads_of_every_microbatch_the_rows_of_its_devices(tmp_path):
    """Images are read by the first stage, in halves; labels by the second, whole by both devices."""
    config = _config("alexnet", tmp_path)
    devices = cluster_devices(4, 1)
    with tf.Graph().as_default():
        one = _program("alexnet", config, 4, 1, "sgd")
        graph = export_graph(one.graph)
        last = len(graph.layers) - 1
        laid = (Laid(0, last, 0, 2, (Configuration((("batch", 2),)),) * last),
                Laid(last, last + 1, 2, 2, (Configuration((("classes", 2),)),)))
        pipeline = evaluate_pipeline(graph, laid, 2, "1f1b", harness.MACHINE)
    found = []
    for number in (1, 2):
        with tf.Graph().as_default():
            program = _program("alexnet", config, 8, 2, "sgd")
            found.append(rows_read(program, lower_pipeline(
                program, one, pipeline, devices, rank=Rank.of(devices, number), graph=graph)))
    # The microbatches are rows 0, 2, 4, 6 and rows 1, 3, 5, 7.
    assert found == [{4, 6, 5, 7}, set(range(8))]


@pytest.mark.parametrize(("stages", "devices", "seed"), harness.some_slow([(2, 2, 1)], [(3, 6, 2)]))
def test_what_is_priced_between_stages_is_what_is_sent(stages, devices, seed, tmp_path, monkeypatch):
    """The memory of an encoder once, though keys and values of several layers of the decoder read it."""
    config = _config("transformer", tmp_path, layers=2)
    sent, priced = collections.Counter(), collections.Counter()

    def counted(function, source, target, shape):
        @functools.wraps(function)
        def moved(tensors, *given):
            ends = given[source], given[target]
            if given[shape] and set(ends[0].devices).isdisjoint(ends[1].devices):  # scalars: of the loss
                sent[ends, tuple(given[shape])] += 1
            return function(tensors, *given)
        return moved

    monkeypatch.setattr(lowering_module, "move", counted(lowering_module.move, 0, 1, 2))
    monkeypatch.setattr(lowering_module, "reduce_and_move", counted(lowering_module.reduce_and_move, 0, 2, 3))
    with tf.Graph().as_default():
        one = _program("transformer", config, 4, 1, "sgd")
        graph = export_graph(one.graph)
        pipeline = _drawn(graph, stages, devices, 2, "1f1b", seed)
    with tf.Graph().as_default():
        lower_pipeline(_program("transformer", config, 8, 2, "sgd"), one, pipeline, harness.device_names(devices))
    for crossing in crossings(graph, pipeline.laid()):
        priced[(crossing.held, crossing.needed), crossing.edge.shape] += pipeline.microbatches
    assert sent == priced
    assert sum(priced.values()) < pipeline.microbatches * sum(
        edge.phase != "update" and pipeline.stage_of(edge.source) != pipeline.stage_of(edge.target)
        for edge in graph.edges)


def test_another_program_is_refused(tmp_path):
    config = _config("transformer", tmp_path)
    with tf.Graph().as_default():
        one = _program("transformer", config, 4, 1, "sgd")
        pipeline = _drawn(export_graph(one.graph), 2, 2, 2, "1f1b", 1)
    with tf.Graph().as_default():
        program = _program("transformer", config, 8, 4, "sgd")
        with pytest.raises(MismatchError, match="a pipeline of 2 microbatches for a program of 4"):
            lower_pipeline(program, one, pipeline, harness.device_names(2))
        with pytest.raises(MismatchError, match="search again"):
            lower_pipeline(program, one, dataclasses.replace(pipeline, graph_hash="0" * 16), harness.device_names(2))


def test_rows_of_all_microbatches_are_summed_together(tmp_path, monkeypatch):
    """Of both tables once, where devices have memory of their own."""
    terms, right = [], SumOfRows._summed
    monkeypatch.setattr(SumOfRows, "_summed", lambda self: terms.append(len(self.terms)) or right(self))
    config, devices = _config("gnmt", tmp_path, vocab=256), cluster_devices(2, 1)
    with tf.Graph().as_default():
        one = _program("gnmt", config, 4, 1, "sgd")
        graph = export_graph(one.graph)
        laid = (Laid(0, len(graph.layers), 0, 2, tuple(data_parallel(graph, 2))),)
        pipeline = evaluate_pipeline(graph, laid, 2, "1f1b", harness.MACHINE)
    with tf.Graph().as_default():
        program = _program("gnmt", config, 8, 2, "sgd")
        lower_pipeline(program, one, pipeline, devices, rank=Rank.of(devices, 0), graph=graph)
    assert terms == [2, 2]


def test_new_values_are_computed_where_updates_are_split(tmp_path):
    config = _config("gnmt", tmp_path)
    with tf.Graph().as_default():
        one = _program("gnmt", config, 2, 1, "sgd")
        graph = export_graph(one.graph, sharded_updates=True)
        pipeline = _drawn(graph, 2, 4, 2, "1f1b", 5)
    with tf.Graph().as_default():
        lowering = lower_pipeline(_program("gnmt", config, 4, 2, "sgd"), one, pipeline, harness.device_names(4))
    wanted = {variable.name for layer in graph.layers for variable in layer.variables if variable.updated_by}
    assert wanted
    assert {variable.name for variable in lowering._updating} == wanted


def test_nothing_is_added_to_rows_that_are_kept(tmp_path):
    """Those of all microbatches are added up once: no table is read and written for one more of them."""
    config = _config("gnmt", tmp_path, vocab=256)
    with tf.Graph().as_default():
        graph = export_graph(_program("gnmt", config, 4, 1, "sgd").graph)
    chosen = [[configuration] for configuration in data_parallel(graph, 2)]
    fewer, more = (build_network(of_microbatch(graph, count), harness.MACHINE, 2, chosen).parts for count in (2, 3))
    tables = [number for number, layer in enumerate(graph.layers)
              if any(operation.looked_up for operation in layer.operations)]
    assert tables
    for number in tables:
        nbytes = max(math.prod(variable.operand.shape) * variable.operand.itemsize
                     for variable in graph.layers[number].variables if variable.trainable)
        longer = (more[number] - fewer[number])[PARTS.index("update"), 0]
        assert 0 < longer < 3 * nbytes / harness.MACHINE.memory_bandwidth


def test_a_device_waits_for_its_turn_where_another_stage_slices_what_it_reads(tmp_path):
    """Halves of a batch are sliced where the whole lies, on the device of the first stage, which has other turns."""
    config = _config("alexnet", tmp_path)
    with tf.Graph().as_default():
        one = _program("alexnet", config, 4, 1, "sgd")
        graph = export_graph(one.graph)
        last = len(graph.layers) - 2
        laid = (Laid(0, last, 0, 1, (Configuration(),) * last),
                Laid(last, last + 2, 1, 2, tuple(data_parallel(graph, 2))[last:]))
        machine = dataclasses.replace(harness.MACHINE, links=harness.MACHINE.links[1:])  # no nodes of two devices
        pipeline = evaluate_pipeline(graph, laid, 2, "1f1b", machine)
    with tf.Graph().as_default():
        program = _program("alexnet", config, 8, 2, "sgd")
        lowering = lower_pipeline(program, one, pipeline, harness.device_names(3))
        second, first_back = ({node for node in _nodes_of(lowering, set(operations)) if node.device.endswith(":1")}
                              for operations in (program.written.forward[1], program.written.backward[0]))
        early = [node.name for node in second if not reached(node) & first_back]
    assert second
    assert first_back
    assert not early  # of the last of two stages the second microbatch begins when the first is done
