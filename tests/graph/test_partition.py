import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_partitions import block, partition_pairs, partitions

from pase_mtf.compat import mtf, placement_mesh_impl
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition, cover, groups, nearest, of_mesh, translate, volume, whole

_PROPERTY = settings(max_examples=200)


@_PROPERTY
@given(partition_pairs())
def test_cover_puts_every_block_together(case):
    shape, source, target = case
    values = np.arange(math.prod(shape)).reshape(shape)
    for parts, positions in target.holders.items():
        counts, pieces = cover(source, target, shape, parts)
        pieces = list(pieces)
        assert math.prod(counts) == len(pieces)
        cells = []
        for piece in pieces:
            found = block(values, source, source.holders[piece.block][-1])
            cells.append(found[tuple(slice(b, b + s) for b, s in zip(piece.begin, piece.size, strict=True))])
        for dim in reversed(range(len(shape))):
            cells = [np.concatenate(cells[k:k + counts[dim]], dim) for k in range(0, len(cells), counts[dim])]
        for position in positions:
            np.testing.assert_array_equal(cells[0], block(values, target, position))


@_PROPERTY
@given(partition_pairs())
def test_volume_counts_the_elements_a_device_lacks(case):
    shape, source, target = case
    values = np.arange(math.prod(shape)).reshape(shape)
    owned = {}
    for position, device in enumerate(source.devices):
        owned.setdefault(device, set()).update(block(values, source, position).ravel().tolist())
    expected = sum(
        len(set(block(values, target, position).ravel().tolist()) - owned.get(device, set()))
        for position, device in enumerate(target.devices))
    assert volume(source, target, shape) == expected


@st.composite
def _reshapes(draw):
    atoms = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))

    def grouped():
        shape, rest = [], list(atoms)
        while rest:
            count = draw(st.integers(1, len(rest)))
            shape.append(math.prod(rest[:count]))
            rest = rest[count:]
        return tuple(shape)

    old = grouped()
    return old, grouped(), draw(partitions(old))


@_PROPERTY
@given(_reshapes())
def test_translated_partitions_hold_the_same_elements(case):
    old, new, partition = case
    kept, moved = translate(partition, old, new)
    before = np.arange(math.prod(old)).reshape(old)
    after = before.reshape(new)
    assert all(cut in ((1, 1), original) for cut, original in zip(kept.shards, partition.shards, strict=True))
    for position in range(len(partition.devices)):
        np.testing.assert_array_equal(block(before, kept, position).ravel(), block(after, moved, position).ravel())


@pytest.mark.parametrize(("old", "new", "cuts", "expected"), [
    ((4,), (4,), ((2, 1),), ((2, 1),)),                                 # a rename
    ((8, 4), (32,), ((4, 1), (1, 1)), ((4, 1),)),                        # merge: the outer dim stays cut
    ((8, 4), (32,), ((8, 2), (2, 1)), ((16, 1),)),                       # both cut, outer completely: one cut
    ((32,), (8, 4), ((16, 1),), ((8, 2), (2, 1))),                       # and back
    ((8, 4), (32,), ((4, 1), (2, 4)), ((4, 1),)),                        # the inner cut cannot be said
    ((8, 4), (32,), ((8, 1), (2, 8)), ((8, 1),)),                        # nor two cuts in the wrong order of devices
    ((6, 4), (4, 6), ((2, 1), (1, 1)), ((2, 1), (1, 1))),                # halves are halves
    ((6, 4), (4, 6), ((3, 1), (1, 1)), ((1, 1), (1, 1))),                # thirds cannot be said
    ((8, 6, 4), (8, 4, 6), ((8, 1), (2, 8), (1, 1)), ((8, 1), (2, 8), (1, 1))),
    ((6, 4, 8), (4, 6, 8), ((1, 1), (1, 1), (8, 1)), ((1, 1), (1, 1), (8, 1))),  # what follows stays cut
])
def test_translate(old, new, cuts, expected):
    devices = tuple(range(16))
    assert translate(Partition(devices, cuts), old, new)[1] == Partition(devices, expected)


def test_a_configuration_and_its_mesh_agree():
    configuration = Configuration((("b", 2), ("", 2), ("c", 2)))
    impl = placement_mesh_impl.PlacementMeshImpl("x:2;y:2;z:2", "b:x;c:z", [""] * 8)
    shape = mtf.Shape([mtf.Dimension("c", 4), mtf.Dimension("a", 3), mtf.Dimension("b", 2)])
    devices, cuts = configuration.partition(["c", "a", "b"])
    assert of_mesh(impl, shape, range(8)) == Partition(tuple(range(devices)), cuts)
    for position in range(8):
        begin = impl.slice_begin(shape, position)
        assert [b * p // s for b, p, s in zip(begin, (2, 1, 2), (4, 3, 2), strict=True)] == list(
            of_mesh(impl, shape, range(8)).block(position))


def test_nearest_stays_in_the_node():
    devices = (0, 7, 8, 15)
    assert nearest(range(4), devices, 15) == 3
    assert nearest(range(4), devices, 9) == 2
    assert nearest((0, 2), devices, 7) == 0
    assert nearest((0, 1), devices, 8) == 0


def test_nearest_stays_in_nodes_of_any_size():
    """Device 5 of a node of six differs from the first of the next by two bits only."""
    assert nearest((0, 3, 6), range(12), 5, nodes=(6,)) == 0
    assert nearest((0, 6), range(12), 5) == 6
    assert nearest((0, 4, 6), range(24), 5, nodes=(3, 6)) == 4
    assert nearest((0, 6), range(24), 5, nodes=(3, 6)) == 0


def test_groups_differ_along_the_axes_only():
    assert groups(8, [(2, 2)]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(4, [(2, 2), (2, 1)]) == [(0, 1, 2, 3)]
    assert whole(3, 2) == Partition((3,), ((1, 1), (1, 1)))


def test_tensors_without_elements_have_pieces_without_elements():
    source, target = whole(0, 2), Partition((0, 1), ((2, 1), (1, 1)))
    assert [piece.size for piece in cover(source, target, (4, 0), (1, 0))[1]] == [(2, 0)]
    assert volume(source, target, (4, 0)) == 0
    assert translate(target, (4, 0), (4, 0)) == (target, target)
