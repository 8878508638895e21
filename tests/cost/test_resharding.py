"""Resharding against a count of elements, device by device."""

import collections
import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from pase_mtf.cost.critical_path import CriticalPaths
from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.distinct_pairs import DistinctPairs
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.tables import ConfigurationTable
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import KINDS, Link, Machine

DIMS = ("a", "b", "c")
POSITION = {name: number for number, name in enumerate(DIMS)}


def _machine(*links, shared=False):
    """One whose devices copy in no time, where they have memory of their own."""
    memory, overhead = (1e9, 1e-6) if shared else (1e30, 0.0)
    return Machine("test", dict.fromkeys(KINDS, 1e9), memory, 1e9, overhead, tuple(links), shared_cores=shared)


def _random_configuration(rng, devices, shape):
    """Random mesh axes on at most `devices` devices, some of which only replicate."""
    axes, names, left = [], ["", *DIMS], devices
    rng.shuffle(names)
    for name in names[:3]:
        options = [n for n in range(2, left + 1)
                   if left % n == 0 and (not name or shape[POSITION[name]] % n == 0)]
        if options and rng.random() < 0.8:
            parts = rng.choice(options)
            axes.append((name, parts))
            left //= parts
    return Configuration(tuple(axes))


def _block(configuration, device, shape):
    """The elements that a device holds, as a set of indices."""
    _, dims = configuration.partition(DIMS)
    ranges = [range(device // stride % parts * (size // parts), (device // stride % parts + 1) * (size // parts))
              for size, (parts, stride) in zip(shape, dims, strict=True)]
    return set(itertools.product(*ranges))


def _blocks(configuration, shape):
    return [_block(configuration, device, shape) for device in range(configuration.devices)]


def _shardings(configurations):
    return ConfigurationTable.build(configurations, POSITION, len(DIMS)).shardings((0, 1, 2))


def _brute_force(source, target, shape, itemsize, links):
    """Seconds of the critical-path device: every element comes from the nearest device that holds it."""
    held, bottleneck = _blocks(source, shape), 0.0
    for device, need in enumerate(_blocks(target, shape)):
        left = need - held[device] if device < len(held) else set(need)
        seconds = 0.0
        for number, link in enumerate(links):
            reach = link.devices if number + 1 < len(links) else max(source.devices, target.devices)
            begin = device // reach * reach
            pieces = {frozenset(left & block) for block in held[begin:begin + reach]} - {frozenset()}
            seconds += sum(map(len, pieces)) * itemsize / link.bandwidth + len(pieces) * link.latency
            left = left.difference(*pieces)
        assert not left
        bottleneck = max(bottleneck, seconds)
    return bottleneck


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 12, 16])
def test_agrees_with_a_count_of_elements(devices):
    rng = random.Random(devices)
    shape = (12, 8, 16) if devices % 3 == 0 else (16, 8, 4)
    for links in ([Link(64, 3e6, 1e-5)], [Link(2, 7e6, 1e-6), Link(64, 3e6, 1e-5)],
                  [Link(2, 9e6, 1e-6), Link(4, 7e6, 3e-6), Link(64, 3e6, 1e-5)]):
        machine = _machine(*links)
        sources = [_random_configuration(rng, devices, shape) for _ in range(8)]
        targets = [_random_configuration(rng, devices, shape) for _ in range(8)]
        rows, columns = _shardings(sources), _shardings(targets)
        priced = Reshardings(machine)
        matrix = priced.seconds(rows, columns, shape, 4)
        moved = priced.elements(rows, columns, shape)
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                expected = _brute_force(source, target, shape, 4, links)
                assert matrix[rows.index[i], columns.index[j]] == pytest.approx(expected, rel=1e-9, abs=1e-15)
                counted = max(len(need - held) for need, held in itertools.zip_longest(
                    _blocks(target, shape), _blocks(source, shape)[:target.devices], fillvalue=set()))
                assert moved[rows.index[i], columns.index[j]] == pytest.approx(counted)


_SIZES = (1.0, 0.03, 40.0)  # messages count for something, for much, for nearly nothing


def _common_elements(source, target):
    """How many elements every block of the source shares with every block of the target, counted one by one, and the
    block of every device at either end."""
    (_, own), (_, goal) = (configuration.partition(DIMS) for configuration in (source, target))
    sizes = [math.lcm(shards, wanted) for (shards, _), (wanted, _) in zip(own, goal, strict=True)]
    index = np.indices(sizes).reshape(len(sizes), -1)
    blocks, counts, held = [], [], []
    for cuts, devices in ((own, source.devices), (goal, target.devices)):
        parts = [shards for shards, _ in cuts]
        blocks.append(np.ravel_multi_index([index[dim] * shards // sizes[dim] for dim, shards in enumerate(parts)],
                                           parts))
        held.append(np.ravel_multi_index([np.arange(devices) // stride % shards for shards, stride in cuts], parts))
        counts.append(math.prod(parts))
    return np.bincount(blocks[0] * counts[1] + blocks[1], minlength=math.prod(counts)).reshape(counts), *held


def _element_costs(common, block, wanted, domains, per_tensor, per_message):
    """Cost of the critical-path device, which is looked for among all of them, for tensors of all `_SIZES`."""
    needed = common.sum(axis=0)[wanted], (common > 0).sum(axis=0)[wanted]
    moved, messages, crossed = np.zeros(len(wanted)), np.zeros(len(wanted)), (0, 0)
    for domain, tensor, message in [*zip(domains, per_tensor, per_message, strict=True)][::-1]:
        own = np.zeros(len(wanted) + domain + len(block), bool)  # a block that two near devices hold counts once
        own[np.unique(np.arange(len(block)) // domain * len(common) + block, return_index=True)[1]] = True
        near = (np.arange(len(wanted)) // domain * domain)[:, None] + np.arange(domain)
        shared = own[near] * common[block[np.minimum(near, len(block) - 1)], wanted[:, None]]
        held, held_blocks = shared.sum(axis=1), (shared > 0).sum(axis=1)
        missing = needed[0] - held, needed[1] - held_blocks
        moved += (missing[0] - crossed[0]) * tensor / common.sum()
        messages += (missing[1] - crossed[1]) * message
        crossed = missing
    return [(size * moved + messages).max() for size in _SIZES]


def _agrees_on_pairs(devices, sources, targets):
    rng = random.Random(devices)
    ends = [[_random_configuration(rng, devices // (1 + (idle and rng.random() < 0.1)), (devices,) * 3)
             for _ in range(count)] for idle, count in ((False, sources), (True, targets))]
    rows, columns = (_shardings(configurations) for configurations in ends)
    arrays = [Sharded(found.devices, found.shards, found.strides) for found in (rows, columns)]
    # The last machine's outer links are the faster ones.
    prices = (([1, 8], [1.0, 9.0], [0.01, 0.02]), ([1, 6, 24], [1.0, 2.0, 5.0], [0.3, 0.3, 0.7]),
              ([1, 4], [3.0, 1.0], [0.1, 0.2]))
    paths = [CriticalPaths(*map(np.array, price)) for price in prices]
    # The others are priced when these are known. Copied: for arrays with gaps kernels would be compiled anew.
    half = [Sharded(*(array[::2].copy() for array in end)) for end in arrays]
    matrices = []
    for path in paths:
        path.costs(*half, 1.0)
        matrices.append([path.costs(*arrays, size) for size in _SIZES])
    for i, source in enumerate(ends[0]):
        for j, target in enumerate(ends[1]):
            counted = _common_elements(source, target)
            for price, found in zip(prices, matrices, strict=True):
                assert [matrix[rows.index[i], columns.index[j]] for matrix in found] == pytest.approx(
                    _element_costs(*counted, *price), rel=1e-9, abs=1e-9), f"{source} to {target}, domains {price[0]}"


@pytest.mark.parametrize("devices", [6, 8, 12, 24, 48, 72, 96, 144, 1000])
def test_critical_path_agrees_with_a_count_of_elements(devices):
    _agrees_on_pairs(devices, *((6, 5) if devices < 1000 else (4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [6, 12, 24, 48, 64, 72, 96, 144, 1000])
def test_critical_path_of_2000_pairs(devices):
    _agrees_on_pairs(devices, 50, 40)


def test_pairs_that_are_alike_are_one():
    rng = random.Random(7)
    configurations = [_random_configuration(rng, 96, (96, 96, 96)) for _ in range(150)]
    found = _shardings(configurations)
    shardings = Sharded(found.devices, found.shards, found.strides)
    known = DistinctPairs(np.array([1, 8]), far_alike=True)
    pairs = known.number(shardings, shardings)
    assert len(pairs.new) == known.count < 0.4 * pairs.number.size
    assert (pairs.number[pairs.new[:, 0], pairs.new[:, 1]] == np.arange(len(pairs.new))).all()
    # Which dim it is makes no difference, nor which tensor.
    swapped = Sharded(found.devices, found.shards[:, ::-1], found.strides[:, ::-1])
    same = known.number(swapped, swapped)
    np.testing.assert_array_equal(pairs.number, same.number)
    assert len(same.new) == 0


def test_a_finer_split_is_a_split_within_each_shard_of_the_coarser():
    """Eight rows to two is two rows to two beside a dim of four that becomes whole."""
    known = DistinctPairs(np.array([1, 8]), far_alike=False)
    devices = np.full(1, 96)
    one = known.number(Sharded(devices, np.array([[8, 1]]), np.array([[3, 1]])),
                       Sharded(devices, np.array([[2, 1]]), np.array([[6, 1]])))
    two = known.number(Sharded(devices, np.array([[2, 4]]), np.array([[12, 3]])),
                       Sharded(devices, np.array([[2, 1]]), np.array([[6, 1]])))
    other = known.number(Sharded(devices, np.array([[2, 4]]), np.array([[12, 3]])),
                         Sharded(devices, np.array([[2, 1]]), np.array([[12, 1]])))
    assert one.number[0, 0] == two.number[0, 0] != other.number[0, 0]


@pytest.mark.parametrize("shared", [False, True])
def test_equal_partitions_cost_nothing(shared):
    rng = random.Random(2)
    configurations = [_random_configuration(rng, 8, (8, 8, 8)) for _ in range(30)]
    shardings = _shardings(configurations)
    matrix = Reshardings(_machine(Link(64, 1e9, 1e-6), shared=shared)).seconds(shardings, shardings, (8, 8, 8), 4)
    assert np.all(np.diagonal(matrix) == 0)
    assert np.all(matrix >= 0)
    assert matrix.max() > 0


@pytest.mark.parametrize("shared", [False, True])
def test_monotone_in_message_size(shared):
    rng = random.Random(3)
    shardings = _shardings([_random_configuration(rng, 8, (64, 64, 64)) for _ in range(30)])
    machine = _machine(Link(4, 1e9, 1e-6), Link(64, 1e8, 1e-5), shared=shared)
    small, large = (Reshardings(machine).seconds(shardings, shardings, (size, 64, 64), 4) for size in (64, 128))
    assert np.all(large >= small)
    assert np.any(large > small)


def _copied(source, target, shape):
    """(copies of the tensor, nodes, blocks sent) as the lowering does it where memory is shared."""
    _, source_dims = source.partition(DIMS)
    _, target_dims = target.partition(DIMS)
    copied = nodes = 0
    cells = {frozenset(block) for block in _blocks(source, shape)}
    splits = [max(1, wanted // parts) for (parts, _), (wanted, _) in zip(source_dims, target_dims, strict=True)]
    count = len(cells)
    for dim, split in enumerate(splits):
        if split > 1:
            nodes += count
            count *= split
            copied += dim > 0
    ends = _blocks(source, shape), _blocks(target, shape)
    holders, slicers = collections.defaultdict(list), collections.defaultdict(set)
    for device, block in enumerate(ends[0]):
        holders[frozenset(block)].append(device)
    for maker in {ends[1].index(need) for need in ends[1]}:
        for block, those in holders.items():
            if ends[1][maker] & block:
                slicers[block].add(min(those, key=maker.__xor__))
    if any(len(found) > 1 for found in slicers.values()):  # they share its pieces, which each are sliced once
        copied = min(copied, 1)
    if len(ends[1]) <= len(ends[0]) and all(need <= have for have, need in zip(*ends, strict=False)):
        # Each maker slices what it needs out of what it has, by one node.
        copied, nodes = min(copied, 1), len({*map(frozenset, ends[1])}) if math.prod(splits) > 1 else 0
    joins = [max(1, parts // wanted) for (parts, _), (wanted, _) in zip(source_dims, target_dims, strict=True)]
    count = len({frozenset(block) for block in _blocks(target, shape)})
    for join in joins:
        if join > 1:
            nodes += count
            count *= join
            copied += 1
    held, handed = _blocks(source, shape), 0
    made = set()
    for device, need in enumerate(_blocks(target, shape)):
        handed += not (device < len(held) and need & held[device])
        if frozenset(need) not in made:
            made.add(frozenset(need))
            handed += len({frozenset(need & block) for block in held if need & block}) - 1
    return copied, nodes, handed


@pytest.mark.parametrize("devices", [2, 8, 16])
def test_shared_cores_count_copies(devices):
    rng = random.Random(devices)
    machine = dataclasses.replace(_machine(Link(64, 1e9, 3e-3), shared=True), memory_bandwidth=1e6, overhead=5e-2)
    shape = (8, 8, 16)
    sources = [_random_configuration(rng, devices, shape) for _ in range(15)]
    targets = [_random_configuration(rng, devices, shape) for _ in range(15)]
    rows, columns = _shardings(sources), _shardings(targets)
    matrix = Reshardings(machine).seconds(rows, columns, shape, 4)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            copied, nodes, handed = _copied(source, target, shape)
            expected = copied * 8192 / 1e6 + nodes * 5e-2 + handed * 3e-3
            assert matrix[rows.index[i], columns.index[j]] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("devices", [6, 12])
def test_devices_with_a_block_of_their_own_are_counted(devices):
    from pase_mtf.cost.resharding import _Copies
    rng = random.Random(devices)
    shape, whole = (devices,) * 3, Configuration((("", devices),))
    configurations = [whole, *(_random_configuration(rng, devices, shape) for _ in range(12))]
    found = _shardings(configurations)
    shardings = Sharded(found.devices, found.shards, found.strides)
    sent = _Copies().of(shardings, shardings)[2][np.ix_(found.index, found.index)]
    blocks = [_blocks(configuration, shape) for configuration in configurations]
    for i, held in enumerate(blocks):
        for j, needed in enumerate(blocks):
            pieces = sum(sum(1 for block in {*map(frozenset, held)} if block & need) - 1
                         for need in {*map(frozenset, needed)})
            own = sum(1 for have, need in zip(held, needed, strict=False) if have & need)
            assert sent[i, j] == pytest.approx(len(needed) - own + pieces)


def test_unsplit_to_split_by_hand():
    whole, halves = Configuration(), Configuration((("a", 2),))
    shardings = _shardings([whole, halves, Configuration((("b", 2),)), Configuration((("", 2),))])
    priced = Reshardings(_machine(Link(64, 1e9, 1e-6)))
    moved = priced.elements(shardings, shardings, (4, 4, 1))[np.ix_(shardings.index, shardings.index)]
    # Device 1 has nothing of the whole tensor on device 0; from a- to b-halves each device lacks a quarter.
    np.testing.assert_array_equal(moved, [[0, 8, 8, 16], [8, 0, 4, 8], [8, 4, 0, 8], [0, 0, 0, 0]])


def test_devices_beyond_the_source_need_what_their_domain_may_not_hold():
    """Device 4 needs the first half, of which its domain, devices 3 to 5, holds nothing: device 3 has the second."""
    sources = [Configuration((("", 4),)), Configuration((("", 2), ("a", 2)))]
    rows, columns = _shardings(sources), _shardings([Configuration((("", 3), ("a", 2)))])
    path = CriticalPaths(np.array([1, 3, 6]), np.array([1.0, 2.0, 5.0]), np.zeros(3))
    found = path.costs(*(Sharded(end.devices, end.shards, end.strides) for end in (rows, columns)), 1.0)
    assert found[rows.index, 0].tolist() == pytest.approx([0.5, 1.0])
