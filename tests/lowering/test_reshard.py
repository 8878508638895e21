import collections
import itertools
import math

import numpy as np
import pytest
from harness import device_names, session
from hypothesis import given, settings
from hypothesis import strategies as st
from random_partitions import block, partition_pairs

from pase_mtf.compat import tf
from pase_mtf.graph.all_reduces import HUB, PAIR, PIECES, RING, messages_of, way_of
from pase_mtf.graph.partition import Partition, groups, whole
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.reshard import all_reduce, move, reduce_and_move

_DEVICES = device_names(8)
_MORE_DEVICES = device_names(12)  # where pieces that all exchange with all are too small for a ring


def _place(values, partition, emitter):
    """Every position's block as a tensor on its device."""
    tensors = []
    for position, number in enumerate(partition.devices):
        with tf.device(emitter.devices[number]):
            tensors.append(tf.constant(block(values, partition, position)))
    return tensors


def _check_moves(cases, shared):
    with tf.Graph().as_default():
        emitter = Emitter(_DEVICES, shared)
        moved, expected = [], []
        for shape, source, target in cases:
            values = np.arange(math.prod(shape)).reshape(shape)
            moved.append(move(_place(values, source, emitter), source, target, shape, emitter))
            expected.append([block(values, target, position) for position in range(len(target.devices))])
        with session() as run:
            for got, want in zip(run.run(moved), expected, strict=True):
                for one, other in zip(got, want, strict=True):
                    np.testing.assert_array_equal(one, other)


def _check_sums(cases, shared, data):
    with tf.Graph().as_default():
        emitter = Emitter(_DEVICES, shared)
        moved, expected = [], []
        for shape, source, target in cases:
            # Axes along which the source replicates hold parts of a sum.
            axes, used, stride = [], sorted((s, p) for p, s in source.shards if p > 1), 1
            for start, parts in [*used, (len(source.devices), 1)]:
                if start > stride and data.draw(st.booleans()):
                    axes.append((start // stride, stride))
                stride = start * parts
            values = np.arange(math.prod(shape)).reshape(shape).astype(np.float64)
            members = groups(len(source.devices), axes)
            scale = {position: k + 1 for group in members for k, position in enumerate(group)}
            parts = [tensor * scale[position] for position, tensor in enumerate(_place(values, source, emitter))]
            total = values * sum(range(1, len(members[0]) + 1))
            result = reduce_and_move(parts, source, axes, target, shape, emitter) if axes else None
            if result is None:
                devices = [emitter.devices[number] for number in source.devices]
                result = move(all_reduce(parts, members, devices, emitter), source, target, shape, emitter)
            moved.append(result)
            expected.append([block(total, target, position) for position in range(len(target.devices))])
        with session() as run:
            for got, want in zip(run.run(moved), expected, strict=True):
                for one, other in zip(got, want, strict=True):
                    np.testing.assert_allclose(one, other)


# Many cases share a graph: a session takes longer than what it runs.
_SOME = st.lists(partition_pairs(), min_size=12, max_size=12)


@settings(max_examples=6)
@given(_SOME, st.booleans())
def test_any_partition_to_any_other(cases, shared):
    _check_moves(cases, shared)


@settings(max_examples=6)
@given(_SOME, st.booleans(), st.data())
def test_partial_sums_to_any_partition(cases, shared, data):
    _check_sums(cases, shared, data)


@pytest.mark.slow
@settings(max_examples=60)
@given(_SOME, st.booleans(), st.data())
def test_many_partitions(cases, shared, data):
    _check_moves(cases, shared)
    _check_sums(cases, shared, data)


@pytest.mark.parametrize("shared", [True, False])
def test_all_reduce(shared):
    """All kinds, sizes and groups in one graph: a session each would take longer than what it runs."""
    cases = list(itertools.product(("SUM", "MAX", "MIN"), [(3,), (128, 160), (1, 20000), (1001, 33)], (2, 3, 8, 12)))
    rng = np.random.default_rng(0)
    with tf.Graph().as_default():
        results, expected = [], []
        for kind, shape, size in cases:
            values = rng.normal(size=(size, *shape)).astype(np.float32)
            devices = _MORE_DEVICES[:size]
            results.append(all_reduce([tf.constant(value) for value in values], [tuple(range(size))], devices,
                                      Emitter(devices, shared), kind))
            expected.append({"SUM": np.sum, "MAX": np.max, "MIN": np.min}[kind](values, axis=0))
        with session(len(_MORE_DEVICES)) as run:
            found = run.run(results)
    for case, got, want in zip(cases, found, expected, strict=True):
        for one in got:
            np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-5, err_msg=str(case))


@pytest.mark.parametrize("group", [(0, 1, 2, 3), (1, 3, 6)])
def test_a_large_sum_goes_round_a_ring(group):
    """Every device sends to the next one only, also in what TensorFlow makes of the graph, and a fair part of it."""
    size, metadata = len(group), tf.RunMetadata()
    with tf.Graph().as_default():
        xs = []
        for device in _DEVICES:
            with tf.device(device):
                xs.append(tf.random.uniform((96, 256)))
        sums = all_reduce(xs, [group], _DEVICES, Emitter(_DEVICES, False))
        with session() as run:
            run.run([sums[k].op for k in group], options=tf.RunOptions(output_partition_graphs=True),
                    run_metadata=metadata)
    sent = collections.Counter()
    for part in metadata.partition_graphs:
        for node in part.node:
            if node.op == "_Send":
                sent[tuple(int(node.attr[end].s.decode().rsplit(":", 1)[1])
                           for end in ("send_device", "recv_device"))] += 1
    assert sent == {(group[k], group[(k + 1) % size]): 2 * (size - 1) for k in range(size)}


@pytest.mark.parametrize(("elements", "size", "way"), [
    (64, 2, PAIR), (1 << 20, 2, PAIR), (64, 3, HUB), (16380, 4, HUB), (16384, 12, PIECES),
    (16384, 4, RING), (16384, 8, RING), (1 << 20, 8, RING)])
def test_it_takes_as_many_messages_as_it_is_priced_at(elements, size, way):
    """One after the other; where all exchange pieces with all, those that a device is sent."""
    devices = _MORE_DEVICES[:size]
    assert way_of(elements, size) == way
    with tf.Graph().as_default():
        xs = []
        for device in devices:
            with tf.device(device):
                xs.append(tf.placeholder(tf.float32, (elements,)))
        sums = all_reduce(xs, [tuple(range(size))], devices, Emitter(devices, False))
        hops, sent = {}, set()
        for node in tf.get_default_graph().get_operations():  # each stands behind what it reads
            across = {tensor for tensor in node.inputs if tensor.device != node.device}
            sent |= {(tensor.name, node.device) for tensor in across}
            hops[node] = max((hops[tensor.op] + (tensor in across) for tensor in node.inputs), default=0)
    # The sum of a hub is read where it is.
    longest = max(hops[total.op] + (total.device != device) for total, device in zip(sums, devices, strict=True))
    to_each = collections.Counter(device for _, device in sent)
    assert messages_of(way, size) == (to_each[devices[0]] if way == PIECES else longest)


def _kinds(build):
    """The kinds of nodes, but for constants, that a function emits."""
    with tf.Graph().as_default() as graph:
        inputs = build()
        return sorted(op.type for op in graph.get_operations() if op.type not in ("Const", "Placeholder")), inputs


def _placeholders(partition, shape):
    tensors = []
    for number in partition.devices:
        with tf.device(_MORE_DEVICES[number]):
            tensors.append(tf.placeholder(tf.float32, partition.block_shape(shape)))
    return tensors


def test_what_is_there_is_not_moved():
    replicated = Partition(tuple(range(8)), ((1, 1), (1, 1)))
    rows = Partition(tuple(range(8)), ((8, 1), (1, 1)))

    def to_one_of_them():
        tensors = _placeholders(replicated, (8, 8))
        assert move(tensors, replicated, whole(5, 2), (8, 8), Emitter(_DEVICES, False)) == [tensors[5]]

    assert _kinds(to_one_of_them)[0] == []

    def own_rows():
        result = move(_placeholders(replicated, (8, 8)), replicated, rows, (8, 8), Emitter(_DEVICES, False))
        assert [x.device for x in result] == _DEVICES

    assert _kinds(own_rows)[0] == ["Slice"] * 8


def test_nodes_of_the_collectives():
    rows, columns = (Partition(tuple(range(8)), cuts) for cuts in (((8, 1), (1, 1)), ((1, 1), (8, 1))))
    replicated = Partition(tuple(range(8)), ((1, 1), (1, 1)))
    shape = (1024, 1024)

    def all_to_all():
        move(_placeholders(rows, shape), rows, columns, shape, Emitter(_DEVICES, False))

    assert _kinds(all_to_all)[0] == ["ConcatV2"] * 8 + ["Split"] * 8

    def reduction():
        all_reduce(_placeholders(replicated, shape), [tuple(range(8))], _DEVICES, Emitter(_DEVICES, False))

    # Eight pieces go round: each is added to at seven devices, and its sum taken on by the seven others.
    assert _kinds(reduction)[0] == ["AddN"] * 56 + ["ConcatV2"] * 8 + ["Identity"] * 56 + ["Split"] * 8

    def reduction_of_few():
        devices = tuple(range(len(_MORE_DEVICES)))
        all_reduce(_placeholders(Partition(devices, ((1, 1), (1, 1))), (128, 144)), [devices], _MORE_DEVICES,
                   Emitter(_MORE_DEVICES, False))

    assert _kinds(reduction_of_few)[0] == ["AddN"] * 12 + ["ConcatV2"] * 12 + ["Split"] * 12

    def reduce_scatter():
        assert reduce_and_move(_placeholders(replicated, shape), replicated, [(8, 1)], rows, shape,
                               Emitter(_DEVICES, False)) is not None

    assert _kinds(reduce_scatter)[0] == ["AddN"] * 8 + ["Split"] * 8

    def shared():
        all_reduce(_placeholders(replicated, shape), [tuple(range(8))], _DEVICES, Emitter(_DEVICES))

    assert _kinds(shared)[0] == ["AddN"]


def test_memory_is_shared_by_the_processors_of_one_host_only():
    assert Emitter(_DEVICES).shared
    assert not Emitter(["/device:GPU:0", "/device:GPU:1"]).shared
    assert not Emitter(["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]).shared


@pytest.mark.parametrize(("shape", "axis", "parts", "kinds"), [
    ((64, 8, 8, 6), 3, 3, {"Transpose", "Split"}), ((1024, 8), 1, 4, {"Transpose", "Split"}),  # many short rows
    ((4096, 6), 0, 2, {"Split"}), ((16, 6), 1, 2, {"Split"}), ((4096, 96), 1, 2, {"Split"})])
def test_split_of_many_short_rows_is_one_pass(shape, axis, parts, kinds):
    x = np.random.default_rng(0).standard_normal(shape)
    with tf.Graph().as_default() as graph:
        pieces = Emitter(["/cpu:0"], True).split("/cpu:0", tf.constant(x), parts, axis)
        assert {node.type for node in graph.get_operations()} - {"Const", "Reshape"} == kinds
        with tf.Session(graph=graph) as session:
            for found, expected in zip(session.run(pieces), np.split(x, parts, axis), strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_thirds_and_halves_are_moved_into_each_other(shared):
    """Blocks that overlap in part, which splits by two, four and eight never make."""
    cuts = (((3, 2), (1, 1)), ((2, 3), (1, 1)), ((3, 2), (2, 1)), ((2, 1), (3, 2)), ((1, 1), (6, 1)))
    _check_moves([((12, 6), Partition((5, 0, 3, 1, 7, 2), source), Partition(tuple(range(6)), target))
                  for source, target in itertools.permutations(cuts, 2)], shared)
