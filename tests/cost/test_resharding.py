"""Resharding against a count of elements, device by device."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from pase_mtf.cost.critical_path import critical_path_devices, critical_path_powers
from pase_mtf.cost.resharding import elements_moved, resharding_seconds
from pase_mtf.cost.tables import ConfigurationTable
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import KINDS, Link, Machine

DIMS = ("a", "b", "c")
POSITION = {name: number for number, name in enumerate(DIMS)}


def _machine(*links, shared=False):
    return Machine("test", dict.fromkeys(KINDS, 1e9), 1e9, 1e9, 1e-6, tuple(links), shared_cores=shared)


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
    held, slowest = _blocks(source, shape), 0.0
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
        slowest = max(slowest, seconds)
    return slowest


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
        matrix = resharding_seconds(rows, columns, shape, 4, machine)
        moved = elements_moved(rows, columns, shape)
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                expected = _brute_force(source, target, shape, 4, links)
                assert matrix[rows.index[i], columns.index[j]] == pytest.approx(expected, rel=1e-9, abs=1e-15)
                counted = max(len(need - held) for need, held in itertools.zip_longest(
                    _blocks(target, shape), _blocks(source, shape)[:target.devices], fillvalue=set()))
                assert moved[rows.index[i], columns.index[j]] == pytest.approx(counted)


@pytest.mark.parametrize("domains", [[1], [1, 8], [1, 2, 8], [1, 2, 4, 8, 16]])
def test_both_algorithms_agree(domains):
    rng = random.Random(1)
    sources, targets = (_shardings([_random_configuration(rng, most, (64, 64, 64)) for _ in range(40)])
                        for most in (64, 32))
    rng = np.random.default_rng(len(domains))
    # Links further out are slower, as on every machine.
    tensor, message = (np.sort(rng.uniform(low, 5 * low, len(domains))) for low in (1.0, 1e-3))
    for one, other in ((sources, sources), (sources, targets), (targets, sources)):
        arrays = (one.devices, one.shards, one.strides, other.devices, other.shards, other.strides)
        fast = critical_path_powers(*arrays, np.array(domains), tensor, message)
        np.testing.assert_allclose(fast, critical_path_devices(*arrays, np.array(domains), tensor, message), atol=1e-12)
        assert fast.any()


@pytest.mark.parametrize("shared", [False, True])
def test_equal_partitions_cost_nothing(shared):
    rng = random.Random(2)
    configurations = [_random_configuration(rng, 8, (8, 8, 8)) for _ in range(30)]
    shardings = _shardings(configurations)
    matrix = resharding_seconds(shardings, shardings, (8, 8, 8), 4, _machine(Link(64, 1e9, 1e-6), shared=shared))
    assert np.all(np.diagonal(matrix) == 0)
    assert np.all(matrix >= 0)
    assert matrix.max() > 0


@pytest.mark.parametrize("shared", [False, True])
def test_monotone_in_message_size(shared):
    rng = random.Random(3)
    shardings = _shardings([_random_configuration(rng, 8, (64, 64, 64)) for _ in range(30)])
    machine = _machine(Link(4, 1e9, 1e-6), Link(64, 1e8, 1e-5), shared=shared)
    small, large = (resharding_seconds(shardings, shardings, (size, 64, 64), 4, machine) for size in (64, 128))
    assert np.all(large >= small)
    assert np.any(large > small)


def _copied(source, target, shape):
    """(copies of the tensor, nodes, blocks handed over) as the lowering does it where memory is shared."""
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
    matrix = resharding_seconds(rows, columns, shape, 4, machine)
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            copied, nodes, handed = _copied(source, target, shape)
            expected = copied * 8192 / 1e6 + nodes * 5e-2 + handed * 3e-3
            assert matrix[rows.index[i], columns.index[j]] == pytest.approx(expected, rel=1e-9)


def test_counts_of_own_blocks_agree():
    from pase_mtf.cost.resharding import _copies
    rng = random.Random(5)
    shardings = _shardings([_random_configuration(rng, 16, (16, 16, 16)) for _ in range(60)])
    arrays = (shardings.devices, shardings.shards, shardings.strides) * 2
    for fast, general in zip(_copies(*arrays, True), _copies(*arrays, False), strict=True):
        np.testing.assert_array_equal(fast, general)


def test_unsplit_to_split_by_hand():
    whole, halves = Configuration(), Configuration((("a", 2),))
    shardings = _shardings([whole, halves, Configuration((("b", 2),)), Configuration((("", 2),))])
    moved = elements_moved(shardings, shardings, (4, 4, 1))[np.ix_(shardings.index, shardings.index)]
    # Device 1 has nothing of the whole tensor on device 0; from a- to b-halves each device lacks a quarter.
    np.testing.assert_array_equal(moved, [[0, 8, 8, 16], [8, 0, 4, 8], [8, 4, 0, 8], [0, 0, 0, 0]])
