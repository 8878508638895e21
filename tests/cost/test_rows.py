"""Sums of rows that were looked up, priced: against the rule that the lowering asks, and against what devices fetch."""

import dataclasses
import json

import harness
import nets
import numpy as np
import pytest
from prices import price_strategy

from pase_mtf import models
from pase_mtf.compat import mtf, tf
from pase_mtf.cost.build import build_network
from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.memory import MemoryModel
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.rows import row_sum_of, rows_seconds, travel_as_rows
from pase_mtf.cost.signature import layer_signature
from pase_mtf.cost.tables import ConfigurationTable, dim_positions
from pase_mtf.errors import FormatError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.graph.looked_up import summed_as_rows
from pase_mtf.graph.partition import Partition
from pase_mtf.launch.arms.program import variables_by_name
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.pipeline.blocks import of_microbatch
from pase_mtf.pipeline.stage_memory import StageMemory
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.transfers import transfers

_RATES = dict.fromkeys(Machine.load("1080ti").rates, 1e12)
_ONE_LEVEL = Machine("one level", _RATES, 1e11, 1e10, 0.0, (Link(64, 1e9, 0.0),))
# What is copied within a device takes no time.
_LINKS = dataclasses.replace(_ONE_LEVEL, memory_bandwidth=1e30)
_TWO_LINKS = dataclasses.replace(_LINKS, links=(Link(4, 2e10, 3e-6), Link(64, 1e9, 2e-5)))
_WORDS, _LENGTH, _BATCH, _MODEL = 4096, 32, 16, 128  # of the transformer, tiny


def _graph(sharded_updates=False):
    with tf.Graph().as_default(), variables_by_name():
        config = models.load_config("transformer", "tiny")
        return export_graph(harness.model_program("transformer", config).graph, sharded_updates=sharded_updates)


@pytest.fixture(scope="module")
def graph():
    return _graph()


@pytest.fixture(scope="module")
def sharded():
    return _graph(sharded_updates=True)


def _looked_up(graph):
    return [(number, operation) for number, layer in enumerate(graph.layers) for operation in layer.operations
            if operation.looked_up]


def _transferred(held, needed, shape, itemsize, links):
    """Seconds of the device that receives longest."""
    taken = dict.fromkeys(range(len(needed.devices)), 0.0)
    for receiver, level, elements, messages in zip(*transfers(held, needed, shape, links)[1:], strict=True):
        taken[receiver] += elements * itemsize / links[level].bandwidth + messages * links[level].latency
    return max(taken.values())


def _gathered(operation, layer, configuration, links):
    """Seconds in which all indices and rows come to where a table's gradient is summed."""
    names = ["batch", "length" if "length" in layer.dims else "decoder_length"]
    seconds = 0.0
    for dims, shape, itemsize in (([*names, "d_model"], (_BATCH, _LENGTH, _MODEL), 4), (names, (_BATCH, _LENGTH), 4)):
        held = configuration.placed(layer, dims)
        needed = Partition(held.devices, ((1, 1), (1, 1), *held.shards[2:]))
        seconds += _transferred(held, needed, shape, itemsize, links)
    return seconds


def test_what_is_looked_up_is_known(graph):
    found = _looked_up(graph)
    assert len(found) == 2
    for number, operation in found:
        assert operation.looked_up == (_BATCH * _LENGTH, 0, 4)
        assert set(operation.reduced) <= set(graph.layers[number].splittable)
        assert operation.outputs[0].shape == (_WORDS, _MODEL)
        assert operation.phase == "backward"


def test_a_file_keeps_it(graph, tmp_path):
    graph.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == graph


@pytest.mark.parametrize("machine", [_LINKS, _TWO_LINKS], ids=["one", "two"])
def test_all_configurations_are_priced_as_they_are_lowered(graph, machine):
    number, operation = _looked_up(graph)[0]
    layer = graph.layers[number]
    choices, position = enumerate_configurations(layer, 8), dim_positions(layer)
    table = ConfigurationTable.build(choices, position, len(layer.dims))
    row_sum = row_sum_of(operation, position)
    as_rows = travel_as_rows(row_sum, table)
    seconds = rows_seconds(row_sum, table, Reshardings(machine))
    output, kinds = operation.outputs[0], set()
    for choice, found, taken in zip(choices, as_rows.tolist(), seconds.tolist(), strict=True):
        held = choice.placed(layer, output.dims)
        axes = [shard for shard in choice.placed(layer, operation.reduced).shards if shard[0] > 1]
        assert found == summed_as_rows(operation.looked_up, held, axes, held, output.shape), choice
        assert taken == pytest.approx(_gathered(operation, layer, choice, machine.links), rel=1e-9), choice
        kinds.add((found, bool(axes)))
    assert kinds == {(True, True), (False, False)}


def _data_parallel(graph, devices):
    return [Configuration((("batch", devices),)) if "batch" in layer.splittable else Configuration((("", devices),))
            for layer in graph.layers]


def _without_rows(graph):
    return dataclasses.replace(graph, layers=tuple(dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, looked_up=()) for operation in layer.operations)) for layer in graph.layers))


def test_data_parallelism_sends_rows(graph):
    """By hand: each of four devices gets the rows of three others, and not twice three quarters of two tables."""
    sent, summed, part, whole = (price_strategy(one, machine, 4, _data_parallel(one, 4)).parts
                                 for machine in (_LINKS, _ONE_LEVEL) for one in (graph, _without_rows(graph)))
    tables = 2 * 2 * 3 / 4 * 4 * _WORDS * _MODEL / 1e9
    rows = 2 * 3 / 4 * _BATCH * _LENGTH * (4 * _MODEL + 4) / 1e9
    assert sent["all-reduce backward"] == pytest.approx(summed["all-reduce backward"] - tables + rows)
    # A device multiplies nothing, and adds up all rows.
    product = 2 * 2 * _WORDS * _MODEL * _BATCH * _LENGTH / 4 / 1e12
    added = 2 * 4 * (_WORDS * _MODEL + 3 * _BATCH * _LENGTH * _MODEL) / 1e11
    assert part["backward"] == pytest.approx(whole["backward"] - product, rel=1e-9)
    assert part["update"] == pytest.approx(whole["update"] + added, rel=1e-9)


def test_rows_of_all_microbatches_are_added_up_once(graph):
    """Behind the last of them: none takes longer in its backward pass for there being others."""
    one, four = (price_strategy(of_microbatch(graph, count), _ONE_LEVEL, 2, _data_parallel(graph, 2)).parts
                 for count in (1, 4))
    assert four["all-reduce backward"] > one["all-reduce backward"]  # rows travel, those of all
    assert four["backward"] == pytest.approx(one["backward"], rel=1e-9)


def _looked_up_twice(**options):
    """A graph with a table of which rows are looked up twice, and the layer of that."""
    with tf.Graph().as_default():
        graph = export_graph(nets.build("embeddings", "sgd", tf.float32).graph, **options)
    return graph, next(layer for layer in graph.layers if [one.name for one in layer.variables] == ["twice"])


def _parts_of(layer, configuration, machine=_ONE_LEVEL):
    table = ConfigurationTable.build([configuration], dim_positions(layer), len(layer.dims))
    return dict(zip(PARTS, layer_parts(layer_signature(layer), table, Reshardings(machine))[:, 0], strict=True))


@pytest.mark.parametrize("split", [(("batch", 4),), (("batch", 2), ("length", 2))])
def test_rows_of_two_gathers_of_one_table_are_one_sum(split):
    """By hand: four devices give each other the rows of both, 32 indices each, and add them up once. Of half a table in
    two parts the parts are less."""
    _, layer = _looked_up_twice()
    summing = [operation for operation in layer.operations if operation.looked_up]
    assert [(operation.type, bool(operation.reduced)) for operation in summing] == [
        ("EinsumOperation", False), ("EinsumOperation", False), ("AddOperation", True)]
    assert {operation.looked_up for operation in summing} == {(2 * 32, 0, 8)}
    bare = dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, looked_up=()) for operation in layer.operations))
    only = dataclasses.replace(bare, operations=tuple(
        operation for operation in bare.operations if operation.index in {one.index for one in summing}))
    found, parts, products = (_parts_of(one, Configuration(split)) for one in (layer, bare, only))
    sent, summed = (_parts_of(one, Configuration(split), _LINKS) for one in (layer, bare))
    assert sent["all-reduce backward"] == pytest.approx(3 / 4 * 64 * (4 * 8 + 8) / 1e9)
    assert summed["all-reduce backward"] == pytest.approx(2 * 3 / 4 * 4 * 64 * 8 / 1e9)
    added = 4 * (64 * 8 + 3 * 64 * 8) / 1e11
    assert found["backward"] == pytest.approx(parts["backward"] - products["backward"], rel=1e-9)
    assert found["update"] == pytest.approx(parts["update"] + added, rel=1e-9)
    halves = Configuration((("batch", 2), ("words", 2)))
    assert _parts_of(layer, halves) == _parts_of(bare, halves)


def test_rows_of_two_gathers_on_the_way_to_an_update():
    """Where the sum is wanted tells whether rows are added up: products are priced until then."""
    graph, layer = _looked_up_twice(sharded_updates=True)
    edge, = (edge for edge in graph.edges if graph.layers[edge.source] is layer and edge.looked_up)
    assert edge.looked_up == (2 * 32, 0, 8)
    assert [operation.type for operation in layer.operations if operation.looked_up] == ["AddOperation"]


def test_where_few_words_are_known_tables_are_summed(graph):
    """A batch that looks up most of a table."""
    number, operation = _looked_up(graph)[0]
    layer, many = graph.layers[number], operation.looked_up._replace(indices=2 * _WORDS)
    table = ConfigurationTable.build([Configuration((("batch", 4),))], dim_positions(layer), len(layer.dims))
    row_sum = row_sum_of(operation, dim_positions(layer))
    assert travel_as_rows(row_sum, table).all()
    assert not travel_as_rows(row_sum._replace(looked_up=many), table).any()


def test_a_step_is_simulated_with_rows(graph):
    sums = {}
    for name, one in (("rows", graph), ("tables", _without_rows(graph))):
        priced = build_network(one, _LINKS, 4, [[entry] for entry in _data_parallel(one, 4)])
        slices = Simulator(priced).timeline([0] * len(one.layers)).slices
        sums[name] = sum(entry.end - entry.begin for entry in slices
                         if entry.kind == "gradient all-reduce" and entry.device == 0)
    tables = 2 * 2 * 3 / 4 * 4 * _WORDS * _MODEL / 1e9
    rows = 2 * 3 / 4 * _BATCH * _LENGTH * (4 * _MODEL + 4) / 1e9
    assert sums["rows"] == pytest.approx(sums["tables"] - tables + rows, rel=1e-6)


def test_shared_cores_and_stock_mesh_tensorflow_add_up_tables(graph):
    fields = {field.name: getattr(_ONE_LEVEL, field.name) for field in dataclasses.fields(_ONE_LEVEL)}
    shared = Machine(**{**fields, "name": "shared", "shared_cores": True})
    costs = [price_strategy(one, shared, 4, _data_parallel(one, 4)).total for one in (graph, _without_rows(graph))]
    assert costs[0] == costs[1]


def _edge_cost(edge, operation, layers, ends, links):
    """Of rows that travel, and of the sum that is moved then."""
    source, target = layers
    held, wanted = ends[0].placed(source, edge.source_dims), ends[1].placed(target, edge.target_dims)
    return (_gathered(operation, source, ends[0], links)
            + _transferred(held, wanted, edge.shape, edge.itemsize, links))


def test_sums_on_the_way_to_an_update_are_rows_where_these_are_less(sharded):
    """Both kinds of configuration pairs, drawn at random, on links of one level without latency."""
    # And with so many indices that rows are always more: priced as if nobody knew that they are rows.
    many, unknown = (dataclasses.replace(sharded, edges=tuple(dataclasses.replace(
        edge, looked_up=edge.looked_up and change(edge.looked_up)) for edge in sharded.edges))
        for change in (lambda rows: rows._replace(indices=2 * _WORDS), lambda rows: ()))
    priced, more, plain = (build_network(one, _LINKS, 8) for one in (sharded, many, unknown))
    rng, counts = np.random.default_rng(0), {True: 0, False: 0}
    for number, edge in enumerate(sharded.edges):
        if not edge.looked_up:
            continue
        layers = sharded.layers[edge.source], sharded.layers[edge.target]
        operation = next(entry for entry in layers[0].operations if entry.looked_up)
        for _ in range(60):
            choices = [int(rng.integers(len(priced.configurations[layer]))) for layer in (edge.source, edge.target)]
            ends = [priced.configurations[layer][choice] for layer, choice in zip(
                (edge.source, edge.target), choices, strict=True)]
            parts = [shard for shard in ends[0].placed(layers[0], edge.pending).shards if shard[0] > 1]
            held, wanted = ends[0].placed(layers[0], edge.source_dims), ends[1].placed(layers[1], edge.target_dims)
            as_rows = summed_as_rows(edge.looked_up, held, parts, wanted, edge.shape)
            if as_rows:
                assert priced.edge_cost(number, *choices) == pytest.approx(_edge_cost(
                    edge, operation, layers, ends, _LINKS.links), rel=1e-9)
            counts[True] += as_rows
            if not summed_as_rows(many.edges[number].looked_up, held, parts, wanted, edge.shape):
                assert more.edge_cost(number, *choices) == plain.edge_cost(number, *choices)
                counts[False] += bool(parts)
    assert counts[True] > 10
    assert counts[False] > 10


def test_simulated_devices_send_rows_on_the_way_to_an_update(sharded):
    number, edge = next((number, edge) for number, edge in enumerate(sharded.edges) if edge.looked_up)
    offered = [[Configuration((("batch", 4),))] if layer == edge.source else
               [Configuration(((edge.target_dims[1], 4),))] if layer == edge.target else [Configuration()]
               for layer in range(len(sharded.layers))]
    priced = build_network(sharded, _LINKS, 4, offered)
    found = [one for one in Simulator(priced).timeline([0] * len(sharded.layers)).slices
             if one.kind == "all-reduce" and one.layer == sharded.layers[edge.target].name and one.phase == edge.phase]
    assert len(found) == 2 * 4 * 3
    rows = 3 / 4 * _BATCH * _LENGTH * (4 * _MODEL + 4) / 1e9
    assert priced.edge_cost(number, 0, 0) == pytest.approx(rows)
    for device in range(4):
        assert sum(one.end - one.begin for one in found if one.receiver == device) == pytest.approx(rows, rel=1e-6)


@pytest.mark.parametrize("wrong", [[512, 5, 4], [512, 0], [-1, 0, 4], [512, -1, 4]])
@pytest.mark.parametrize("place", ["operation", "edge"])
def test_rows_that_cannot_be_are_refused(sharded, place, wrong, tmp_path):
    sharded.save(tmp_path / "graph.json")
    data = json.loads((tmp_path / "graph.json").read_text())
    entries = data["edges"] if place == "edge" else [
        operation for layer in data["layers"] for operation in layer["operations"]]
    next(entry for entry in entries if entry.get("looked_up"))["looked_up"] = wrong
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match="not a graph"):
        ComputationGraph.load(tmp_path / "graph.json")


def _looks_up(examples, dtype=tf.float32):
    """A table of 64 rows of 16, of which a program of one layer reads as many."""
    batch, words, width = mtf.Dimension("batch", examples), mtf.Dimension("words", 64), mtf.Dimension("width", 16)
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ids = mtf.import_tf_tensor(mesh, tf.zeros([examples], tf.int32), mtf.Shape([batch]))
        table = mtf.get_variable(mesh, "table", mtf.Shape([words, width]), mtf.VariableDType(
            tf.float32, tf.float32, dtype), initializer=tf.zeros_initializer())
        loss = mtf.reduce_mean(mtf.square(mtf.gather(table, ids, words)))
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [one.outputs[0] for one in variables])
        graph.updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
        return export_graph(graph)


def _split(graph, **shards):
    return [Configuration(tuple((name if name in layer.splittable else "", count) for name, count in shards.items()))
            for layer in graph.layers]


def test_rows_that_arrive_are_in_memory():
    """All rows of the batch, as they arrive and put together: more than the table here."""
    exported = _looks_up(120)
    assert _looked_up(exported)
    chosen, rows = _split(exported, batch=4), 2 * 120 * 16 * 4
    assert MemoryModel(exported).peak(chosen)[0]["communication buffers"] >= rows
    assert MemoryModel(exported, shared=True).peak(chosen)[0]["communication buffers"] < rows


def test_all_rows_arrive_whatever_the_words_are_split_into():
    exported = _looks_up(60)
    held = MemoryModel(exported).peak(_split(exported, batch=2, words=2))[0]
    assert held["communication buffers"] >= 2 * 60 * 16 * 4


def test_rows_of_all_microbatches_arrive_together():
    exported = _looks_up(30)
    model = StageMemory(exported, 4, shared=False).model(0, len(exported.layers), 1)
    assert model.peak(_split(exported, batch=2))[0]["communication buffers"] >= 2 * 4 * 30 * 16 * 4


def test_rows_of_two_bytes_are_added_up_in_four():
    exported = _looks_up(8, tf.bfloat16)
    rows, parts = (MemoryModel(graph).peak(_split(graph, batch=4))[0]["communication buffers"]
                   for graph in (exported, _without_rows(exported)))
    assert rows >= parts + 64 * 16 * 2
