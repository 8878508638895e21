"""Sums on the way to the layer that needs them, against what devices fetch one by one."""

import math

import harness
import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.cost.build import build_network
from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.dim_relations import distinct_rows
from pase_mtf.cost.pending import pending_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition, groups, scattered_sum
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.simulator.simulate import Simulator

# What is copied within a device takes no time.
TWO_LEVELS = Machine("two levels", dict.fromkeys(Machine.load("1080ti").rates, 1e12), 1e30, 1e10, 0.0,
                     (Link(4, 2e10, 3e-6), Link(64, 1e9, 2e-5)))
ONE_LEVEL = Machine("one level", TWO_LEVELS.rates, 1e30, 1e10, 0.0, (Link(64, 1e9, 0.0),))


def critical_path(source, parts, target, shape, itemsize, links):
    """Seconds of the device that fetches longest: of what it needs, element by element, of every part of the sum, from
    the innermost link domain that has it."""
    count, size = len(source.devices), math.prod(part for part, _ in parts)
    group_of = {position: group for group in groups(count, parts) for position in group}
    indices = np.indices(shape)

    def block(partition, position):
        begins = zip(partition.block(position), partition.block_shape(shape), strict=True)
        return np.logical_and.reduce([(axis >= part * extent) & (axis < (part + 1) * extent)
                                      for axis, (part, extent) in zip(indices, begins, strict=True)])

    held, taken = [block(source, position) for position in range(count)], []
    for receiver in range(len(target.devices)):
        needed, seconds = block(target, receiver), 0.0
        for number in range(size):
            missing = needed.copy()
            for level, domain in enumerate([1, *(link.devices for link in links)]):
                near = np.zeros(shape, bool)
                for position in range(count):
                    if group_of[position].index(position) == number and position // domain == receiver // domain:
                        near |= held[position]
                fetched = missing & near
                if level:
                    seconds += fetched.sum() * itemsize / links[level - 1].bandwidth
                missing &= ~near
            assert not missing.any()
        taken.append(seconds)
    return max(taken)


@pytest.fixture(scope="module")
def graphs():
    return [harness.export_model(name, models.load_config(name, "tiny")) for name in ("alexnet", "transformer")]


def test_what_is_pending_is_known(graphs):
    for graph in graphs:
        pending = [edge for edge in graph.edges if edge.pending]
        assert {edge.phase for edge in pending} >= {"backward"}
        for edge in pending:
            makers = [operation for operation in graph.layers[edge.source].operations if operation.pending_outputs]
            assert any(edge.pending == dims for operation in makers for (dims, _), left in zip(
                operation.sums, operation.sums_pending, strict=True) if left)
        left = sum(len(operation.pending_outputs) for layer in graph.layers for operation in layer.operations)
        assert left == len(pending) > 0


def ends(graph, edge, source, target):
    """(source partition, (size, stride) of the parts, target partition) of an edge under two configurations."""
    layer = graph.layers[edge.source]
    parts = [cut for cut in source.placed(layer, edge.pending).shards if cut[0] > 1]
    return source.placed(layer, edge.source_dims), parts, target.placed(graph.layers[edge.target], edge.target_dims)


def test_the_critical_path_device_takes_what_the_edge_costs(graphs):
    """A reduce-scatter of what two layers split in any way, on links of one level and of two without latencies."""
    links = tuple(Link(link.devices, link.bandwidth, 0.0) for link in TWO_LEVELS.links)
    machine = Machine("no latency", TWO_LEVELS.rates, 1e30, 1e10, 0.0, links)
    rng, scattered = np.random.default_rng(1), 0
    for graph in graphs:
        priced = build_network(graph, machine, 8)
        edges = [(number, edge) for number, edge in enumerate(graph.edges) if edge.pending]
        for draw in range(60):
            number, edge = edges[draw % len(edges)]
            choices = [int(rng.integers(len(priced.configurations[layer]))) for layer in (edge.source, edge.target)]
            source, parts, target = ends(graph, edge, *(priced.configurations[layer][choice] for layer, choice in zip(
                (edge.source, edge.target), choices, strict=True)))
            sums = scattered_sum(source, target, edge.shape) if parts else None
            if sums is None:
                continue
            # As few elements as show all cuts, each of so many bytes.
            grid = tuple(math.lcm(*(cuts[dim][0] for cuts in (source.shards, sums.shards, target.shards)))
                         for dim in range(len(edge.shape)))
            size = edge.itemsize * math.prod(edge.shape) / math.prod(grid)
            expected = (critical_path(source, parts, sums, grid, size, links)
                        + critical_path(sums, [], target, grid, size, links))
            assert priced.edge_cost(number, *choices) == pytest.approx(edge.trips * expected, rel=1e-9)
            scattered += 1
    assert scattered > 20


def test_a_sum_that_is_split_then_costs_half_an_all_reduce(graphs):
    """By hand: q devices hold parts, each needs a q-th of the sum; where all need all of it, it is an all-reduce."""
    graph = graphs[0]
    number, edge = next((number, edge) for number, edge in enumerate(graph.edges)
                        if edge.pending and edge.phase == "backward" and len(edge.shape) == 2
                        and graph.layers[edge.source].dims[edge.pending[0]] % 8 == 0)
    (name,) = edge.pending
    source = Configuration(((name, 8),))
    split, whole = Configuration(((edge.target_dims[0], 8),)), Configuration((("", 8),))
    offered = [[source] if layer == edge.source else [split, whole] if layer == edge.target else [Configuration()]
               for layer in range(len(graph.layers))]
    priced = build_network(graph, ONE_LEVEL, 8, offered)
    nbytes = math.prod(edge.shape) * edge.itemsize
    assert priced.edge_cost(number, 0, 0) == pytest.approx(7 / 8 * nbytes / 1e9)
    assert priced.edge_cost(number, 0, 1) == pytest.approx(2 * 7 / 8 * nbytes / 1e9)
    table = ConfigurationTable(np.array([8]), np.array([[8, 1]]), np.array([[1, 1]]))
    full = allreduce_seconds(np.array([float(nbytes)]), group_sizes(table, [0], ONE_LEVEL), table.devices, ONE_LEVEL)
    assert priced.edge_cost(number, 0, 1) == pytest.approx(full[0])


def test_where_a_sum_is_scattered():
    replicated, rows = (Partition(tuple(range(8)), cuts) for cuts in (((1, 1), (1, 1)), ((8, 1), (1, 1))))
    pairs = Partition(tuple(range(8)), ((4, 2), (1, 1)))
    assert scattered_sum(replicated, rows, (8, 8)) == rows
    assert scattered_sum(replicated, pairs, (8, 8)) == rows
    assert scattered_sum(replicated, pairs, (4, 8)) == Partition(tuple(range(8)), ((4, 2), (2, 1)))
    assert scattered_sum(replicated, pairs, (4, 3)) is None
    assert scattered_sum(pairs, pairs, (8, 8)) is None  # an all-reduce
    assert scattered_sum(pairs, replicated, (8, 8)) is None
    assert scattered_sum(replicated, Partition((0, 1), ((2, 1), (1, 1))), (8, 8)) is None


def test_simulated_devices_send_what_the_edge_costs(graphs):
    """Every receiver is sent to for as long as the edge is priced, where it is a reduce-scatter and where an all-reduce
    comes first."""
    graph = graphs[0]
    number, edge = next((number, edge) for number, edge in enumerate(graph.edges)
                        if edge.pending and edge.phase == "backward" and len(edge.shape) == 2
                        and graph.layers[edge.source].dims[edge.pending[0]] % 8 == 0)
    (name,) = edge.pending
    offered = [[Configuration(((name, 4),))] if layer == edge.source else
               [Configuration(((edge.target_dims[0], 4),)), Configuration((("", 4),))] if layer == edge.target else
               [Configuration()] for layer in range(len(graph.layers))]
    priced = build_network(graph, ONE_LEVEL, 4, offered)
    for choice in range(2):
        assignment = [choice if layer == edge.target else 0 for layer in range(len(graph.layers))]
        found = [one for one in Simulator(priced).timeline(assignment).slices
                 if one.kind == "all-reduce" and one.layer == graph.layers[edge.target].name
                 and one.phase == edge.phase and (one.receiver != one.device) == (choice == 0)]
        assert len(found) == (12 if choice == 0 else 4)
        for device in range(4):
            assert sum(one.end - one.begin for one in found if one.receiver == device) == pytest.approx(
                priced.edge_cost(number, 0, choice), rel=1e-6)


def test_rows_that_repeat_another_are_kept_once():
    rng = np.random.default_rng(3)
    for _ in range(50):
        one, more = rng.integers(1, 4, 40), rng.integers(1, 4, (40, int(rng.integers(1, 4))))
        first, number = distinct_rows(one, more)
        table = np.column_stack((one, more))
        assert len({tuple(row) for row in table.tolist()}) == len(first)
        assert (table[first][number] == table).all()
        assert (np.diff(first) > 0).all()


def test_parts_are_the_same_in_whichever_order_their_dims_are():
    """Two dims that leave parts, split by two and by four: named the other way round at the other end."""
    def held(shards, strides):
        return DistinctShardings(np.full(len(shards), 8), np.array(shards), np.array(strides),
                                 np.arange(len(shards), dtype=np.int32))
    source = held([[1, 2, 4], [1, 4, 2], [2, 4, 1]], [[1, 4, 1], [1, 1, 4], [4, 1, 1]])
    target = held([[1, 4, 2], [2, 1, 4], [8, 1, 1]], [[1, 1, 4], [4, 1, 1], [1, 1, 1]])
    shape, reshardings = (64,), Reshardings(TWO_LEVELS)
    found = pending_seconds(source, target, shape, 4, reshardings)
    assert (found == 0.0).tolist() == [[True, False, False], [True, False, False], [False, True, False]]
    # What else is needed of the sum costs the same, whichever parts it is added to.
    wholly = held([[1], [2], [8]], [[1], [4], [1]])
    summed = pending_seconds(source, wholly, shape, 4, reshardings)
    assert np.where(found == 0.0, 0.0, summed).tolist() == found.tolist()
