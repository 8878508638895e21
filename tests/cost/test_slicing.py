"""What devices of their own copy, against the nodes that the lowering makes, device by device."""

import collections
import math
import random

import numpy as np
import pytest
from harness import device_names

from pase_mtf.compat import tf
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.slicing import copying, summing_seconds
from pase_mtf.cost.tables import DistinctShardings
from pase_mtf.graph.all_reduces import HUB, PAIR, PIECES, RING, way_of
from pase_mtf.graph.partition import Partition, scattered_sum, with_partial_sums
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.reshard import all_reduce, move, reduce_and_move
from pase_mtf.machine.machine import KINDS, Link, Machine

# A second is an element that is read or written.
COUNTING = Machine("counting", dict.fromkeys(KINDS, 1e30), 1.0, 1e30, 0.0, (Link(64, 1e30, 0.0),))


def _partition(rng, shape, devices):
    """Random splits; some leave devices the same."""
    cuts, stride, dims = [(1, 1)] * len(shape), 1, list(range(len(shape)))
    while stride < devices:
        factor = rng.choice([n for n in range(2, devices // stride + 1) if devices // stride % n == 0])
        dim = rng.choice([*(dim for dim in dims if shape[dim] % factor == 0), None])
        if dim is not None:
            cuts[dim] = (factor, stride)
            dims.remove(dim)
        stride *= factor
    return Partition(tuple(range(devices)), tuple(cuts))


def _sharded(partition):
    return Sharded(np.array([len(partition.devices)]), *np.array([partition.shards], np.int64).transpose(2, 0, 1))


def _size(tensor):
    return math.prod(tensor.shape.as_list())


def _is_view(node):
    """Whether what it gives lies in memory as it is: of the first dim only."""
    given, (read, *_) = node.outputs[0], [one for one in node.inputs if one.shape.rank == node.outputs[0].shape.rank]
    return read.shape.as_list()[1:] == given.shape.as_list()[1:]


def _copied(shape, partition, build):
    """What the busiest device reads and writes, and in how many nodes: (by slices, by the rest)."""
    names, cells = device_names(len(partition.devices)), [collections.defaultdict(lambda: np.zeros(2)) for _ in "ab"]
    with tf.Graph().as_default() as graph:
        tensors = []
        for name in names:
            with tf.device(name):
                tensors.append(tf.placeholder(tf.float32, partition.block_shape(shape)))
        build(tensors, Emitter(names, False))
        for node in graph.get_operations():
            read = [one for one in node.inputs if one.shape.rank == node.outputs[0].shape.rank]
            if node.type in ("Split", "SplitV", "Slice") and not _is_view(node):
                cells[0][node.device] += 2 * sum(map(_size, node.outputs)), 1
            elif node.type in ("ConcatV2", "AddN"):
                cells[1][node.device] += sum(map(_size, read)) + _size(node.outputs[0]), 1
    return [tuple(np.max([*found.values(), np.zeros(2)], axis=0)) for found in cells]


def _priced(source, target, shape, parts=0):
    found = copying(_sharded(source), _sharded(target), parts)
    size = math.prod(shape)
    return ([(found.slicing[0, 0] * size, found.slices[0, 0]), (found.joining[0, 0] * size, found.joins[0, 0])],
            [float(seconds[0, 0]) for seconds in found.seconds(size, COUNTING)])


def _draws(count):
    rng = random.Random(0)
    for _ in range(count):
        shape = tuple(rng.choice([24, 48]) for _ in range(rng.choice([1, 2, 3])))
        devices = rng.choice([2, 4, 6, 8, 12])
        yield shape, _partition(rng, shape, devices), _partition(rng, shape, devices)


def test_moves_copy_what_is_priced():
    """Who slices for whom is not counted device by device: where not all hold the same share, some slice for others."""
    exact = joined = 0
    for shape, source, target in _draws(150):
        found = _copied(shape, source, lambda tensors, emitter, s=source, t=target, all_of=shape: move(
            tensors, s, t, all_of, emitter))
        priced, seconds = _priced(source, target, shape)
        assert found[1] == pytest.approx(priced[1]), (source, target)
        assert seconds == pytest.approx([priced[0][0], priced[1][0]])
        assert priced[0][0] / 2 <= found[0][0] <= 2 * priced[0][0], (source, target)
        exact += found[0] == pytest.approx(priced[0])
        joined += found[1][1] > 0
    assert exact > 135
    assert joined > 50


def test_sums_that_are_scattered_are_added_up():
    summed = 0
    for shape, source, target in _draws(300):
        replicated = [(len(source.devices), 1)]  # all hold all of it, in parts
        parts = Partition(source.devices, ((1, 1),) * len(shape))
        sums = scattered_sum(parts, target, shape)
        if sums != target:  # else those that need the same give each other pieces
            continue
        found = _copied(shape, parts, lambda tensors, emitter, s=parts, t=target, axes=replicated, all_of=shape: (
            reduce_and_move(tensors, s, axes, t, all_of, emitter)))
        held = with_partial_sums(parts, replicated)
        needed = Partition(target.devices, (*target.shards, (1, 1)))
        priced, _ = _priced(held, needed, (*shape, len(source.devices)), 1)
        assert found == [pytest.approx(one) for one in priced], (shape, target)
        summed += 1
    assert summed > 30


@pytest.mark.parametrize("elements", [1 << 8, 1 << 14, 1 << 18])
@pytest.mark.parametrize("devices", [2, 3, 8, 12])
@pytest.mark.parametrize("first", [True, False])
def test_all_reduces_copy_what_is_priced(elements, devices, first):
    """A hub is anyone's turn, and a ring's hops count their latencies instead of their nodes. Along the first dim
    pieces lie in memory as they are; the price takes them all for such."""
    longer = elements // devices // devices * devices
    shape = (longer, devices) if first else (devices, longer)  # the longer dim is split, the first of two alike
    whole = Partition(tuple(range(devices)), ((1, 1), (1, 1)))
    size = math.prod(shape)
    way = way_of(size, devices)
    if way in (PIECES, RING) and longer <= devices:
        pytest.skip("too few elements for a dim that is split")
    sliced, joined = _copied(shape, whole, lambda tensors, emitter: all_reduce(
        tensors, [tuple(range(devices))], device_names(devices), emitter))
    taken = summing_seconds(np.array([float(size)]), np.array([way]), np.array([float(devices)]), COUNTING)
    assert float(taken[0]) == pytest.approx(joined[0])
    assert joined[1] == {PAIR: 1, HUB: 1, PIECES: 2, RING: 1 + devices - 1}[int(way)]
    assert sliced == ((2 * size, 1) if way in (PIECES, RING) and not first else (0, 0))


def test_what_stays_is_not_copied():
    rows = Partition(tuple(range(4)), ((4, 1), (1, 1)))
    other = Partition(tuple(range(4)), ((1, 1), (4, 1)))
    for source in (rows, other):
        assert _priced(source, source, (24, 24))[1] == [0.0, 0.0]
    # Pieces of columns are sliced out and rows joined; slices of rows lie in memory as they are.
    assert _priced(rows, other, (24, 24))[1] == [2 * 24 * 24 / 4] * 2
    assert _priced(other, rows, (24, 24))[1] == [0.0, 2 * 24 * 24 / 4]


def test_a_library_that_sums_copies_nothing_but_buckets():
    machine = Machine("library", COUNTING.rates, 1.0, 1e30, 0.0, COUNTING.links, sums_by_trees=True)
    groups, devices = np.array([[8.0]]), np.array([8])
    alone, = allreduce_seconds(np.array([1e5]), groups, devices, machine)
    bucketed, = allreduce_seconds(np.array([1e5]), groups, devices, machine, waiting=4e5)
    assert alone < 1e-9
    assert bucketed == pytest.approx(2e5)
    nobody, = allreduce_seconds(np.array([1e5]), np.array([[1.0]]), devices, machine, waiting=4e5)
    assert nobody == 0.0


def test_nodes_have_their_overhead():
    machine = Machine("overheads", COUNTING.rates, 1e30, 1e30, 1.0, COUNTING.links)
    rows, columns = (Partition(tuple(range(4)), cuts) for cuts in (((4, 1), (1, 1)), ((1, 1), (4, 1))))
    found = Reshardings(machine).seconds_apart(_sharded(rows), _sharded(columns), 1.0)
    assert found[0, 0] == pytest.approx(2.0)


def _in_shared_memory(shape, source, target):
    """(Elements read and written, nodes) of a move where memory is shared: as lowered, and as priced."""
    names = device_names(max(len(end.devices) for end in (source, target)))
    with tf.Graph().as_default() as graph:
        tensors = []
        for number in source.devices:
            with tf.device(names[number]):
                tensors.append(tf.placeholder(tf.float32, source.block_shape(shape)))
        move(tensors, source, target, shape, Emitter(names, True))
        made = [node for node in graph.get_operations() if node.type in ("Split", "SplitV", "Slice", "ConcatV2")]
        copied = sum(2 * sum(map(_size, node.outputs)) for node in made
                     if node.type == "ConcatV2" or not _is_view(node))
    ends = [DistinctShardings(*map(np.ascontiguousarray, _sharded(end)), np.zeros(1, np.int32))
            for end in (source, target)]
    priced = [float(Reshardings(Machine("shared", COUNTING.rates, bandwidth, 1e30, overhead, COUNTING.links,
                                        shared_cores=True)).seconds(*ends, shape, 1)[0, 0])
              for bandwidth, overhead in ((1.0, 0.0), (1e30, 1.0))]
    return [copied, len(made)], priced


def test_only_what_is_cut_is_copied_where_memory_is_shared():
    """Of thirds that become halves the middle one is cut; of halves that become thirds the middle one is joined."""
    thirds, halves = (Partition(tuple(range(6)), ((1, 1), cut)) for cut in ((3, 2), (2, 3)))
    for source, target in ((thirds, halves), (halves, thirds)):
        lowered, priced = _in_shared_memory((24, 24), source, target)
        assert lowered[0] == 2 * 24 * 24 * 4 // 3
        assert priced == pytest.approx(lowered)


def test_of_what_all_hold_each_slices_its_own_where_memory_is_shared():
    whole = Partition(tuple(range(8)), ((1, 1),) * 3)
    for cuts in (((8, 1), (1, 1), (1, 1)), ((1, 1), (8, 1), (1, 1)), ((2, 4), (4, 1), (1, 1)),
                 ((2, 4), (2, 2), (2, 1)), ((1, 1), (2, 4), (1, 1)), ((1, 1),) * 3):
        lowered, priced = _in_shared_memory((8, 8, 8), whole, Partition(whole.devices, cuts))
        assert priced == pytest.approx(lowered), cuts


def test_of_a_part_that_several_hold_each_slices_its_own_where_memory_is_shared():
    halves = Partition(tuple(range(8)), ((2, 4), (1, 1), (1, 1)))
    for cuts in (((8, 1), (1, 1), (1, 1)), ((2, 4), (4, 1), (1, 1)), ((2, 4), (2, 2), (2, 1)),
                 ((4, 2), (2, 1), (1, 1)), ((2, 4), (1, 1), (1, 1))):
        lowered, priced = _in_shared_memory((8, 8, 8), halves, Partition(halves.devices, cuts))
        assert priced == pytest.approx(lowered), cuts


@pytest.mark.parametrize(("source", "target"), [
    (((1, 1), (1, 1), (2, 1)), ((1, 1), (2, 3), (3, 1))),  # halves of one dim are cut unevenly along another
    (((3, 2), (2, 1), (1, 1)), ((2, 3), (3, 1), (1, 1))),  # thirds and halves cross
    (((3, 2), (2, 1), (1, 1)), ((2, 3), (1, 1), (1, 1)))])  # one device has the middle third, and halves it
def test_pieces_that_differ_are_sliced_once_where_memory_is_shared(source, target):
    lowered, priced = _in_shared_memory((12, 12, 12), *(Partition(tuple(range(6)), cuts) for cuts in (source, target)))
    assert priced == pytest.approx(lowered)


def test_those_that_hold_the_same_slice_each_piece_once_where_memory_is_shared():
    """Half of them have nothing of what they need."""
    source, target = (Partition(tuple(range(8)), cuts) for cuts in (
        ((2, 4), (1, 1), (1, 1)), ((2, 1), (2, 4), (2, 2))))
    lowered, priced = _in_shared_memory((8, 8, 8), source, target)
    assert priced[0] == pytest.approx(lowered[0])
    assert priced[1] <= lowered[1]


@pytest.mark.parametrize(("devices", "source", "target"), [
    # The middle third is cut into halves, and each of these unevenly.
    (6, ((1, 1), (3, 2), (2, 1)), ((1, 1), (2, 3), (3, 1))),
    # Thirds become quarters: the middle one alone is cut into halves, of the others each piece is a slice of its own.
    (12, ((4, 3), (3, 1), (1, 1)), ((1, 1), (4, 3), (3, 1))),
    # Quarters become thirds: the outer ones are not cut there, and are sliced along both other dims.
    (12, ((4, 3), (3, 1), (1, 1)), ((3, 4), (2, 2), (2, 1)))])
def test_the_block_that_has_most_to_copy_counts(devices, source, target):
    shape = (24, 24, 24)
    source, target = (Partition(tuple(range(devices)), cuts) for cuts in (source, target))
    found = _copied(shape, source, lambda tensors, emitter: move(tensors, source, target, shape, emitter))
    assert found[0] == pytest.approx(_priced(source, target, shape)[0][0])


def test_one_of_those_that_hold_the_same_slices_all_where_memory_is_shared():
    """All who make something of a block are nearest to the same one of its holders: it is sliced dim by dim."""
    source, target = (Partition(tuple(range(8)), cuts) for cuts in (
        ((4, 1), (1, 1), (1, 1)), ((1, 1), (2, 2), (2, 1))))
    lowered, priced = _in_shared_memory((8, 8, 8), source, target)
    assert priced == pytest.approx(lowered)
