"""Configurations: what is offered divides, is distinct, and places blocks as Mesh-TensorFlow numbers its devices."""

import itertools

import numpy as np
import pytest

from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import Layer
from pase_mtf.graph.configurations import Configuration, enumerate_configurations


def _layer(**dims):
    return Layer("layer", "matmul", dims, tuple(dims), (), ())


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 16])
@pytest.mark.parametrize(("replicate", "idle"), [(True, False), (False, True), (True, True), (False, False)])
def test_what_is_offered_divides_and_fits(devices, replicate, idle):
    layer = _layer(b=8, n=12, c=6)
    offered = enumerate_configurations(layer, devices, replicate=replicate, idle=idle)
    assert len(set(offered)) == len(offered)
    for configuration in offered:
        assert all(layer.dims[name] % parts == 0 for name, parts in configuration.splits.items())
        assert configuration.devices <= devices
        if replicate and not idle:
            assert configuration.devices == devices
        if not replicate:
            assert all(name for name, _ in configuration.axes)


def test_every_complete_split_is_offered():
    offered = set(enumerate_configurations(_layer(b=8, n=8), 8, replicate=False, idle=True))
    expected = {Configuration()}
    for total in (2, 4, 8):
        expected |= {Configuration(((name, total),)) for name in "bn"}
        for first in (2, 4):
            if total % first == 0 and total // first > 1:
                expected |= {Configuration(((a, first), (b, total // first))) for a, b in ("bn", "nb")}
    assert offered == expected


def test_unsplittable_layer_gets_the_replicated_configuration():
    assert enumerate_configurations(Layer("x", "pointwise", {}, (), (), ()), 8) == (Configuration((("", 8),)),)
    assert enumerate_configurations(Layer("x", "pointwise", {}, (), (), ()), 8, replicate=False) == (Configuration(),)


def test_partition_numbers_devices_row_major():
    axes = (("b", 2), ("", 3), ("n", 4))
    configuration = Configuration(axes)
    devices, places = configuration.partition(("n", "b", "other"))
    assert devices == 24
    for device, (b, _, n) in enumerate(itertools.product(range(2), range(3), range(4))):
        assert [(device // stride) % parts for parts, stride in places] == [n, b, 0]


def test_partition_agrees_with_mesh_tensorflow():
    from pase_mtf.compat import mtf
    axes = (("b", 2), ("n", 4))
    shape = mtf.Shape([mtf.Dimension("n", 8), mtf.Dimension("b", 4), mtf.Dimension("d", 3)])
    implementation = mtf.MeshImpl("a0:2;a1:4", "b:a0;n:a1")
    _, places = Configuration(axes).partition(("n", "b", "d"))
    for device in range(8):
        begin = [(device // stride) % parts * (size // parts)
                 for (parts, stride), size in zip(places, shape.to_integer_list, strict=True)]
        np.testing.assert_array_equal(begin, implementation.slice_begin(shape, device))


def test_equal_placements_have_equal_partitions():
    one = Configuration((("b", 2), ("c", 4)))
    other = Configuration((("b", 2), ("n", 4)))
    assert one.partition(("b", "c")) != other.partition(("b", "c"))
    assert one.partition(("b",)) == other.partition(("b",))
    # A consumer that names the dim otherwise, on the same axis: nothing moves.
    assert one.partition(("b", "c")) == other.partition(("b", "n"))


@pytest.mark.parametrize("axes", [(("b", 2), ("b", 2)), (("b", 1),)])
def test_bad_axes_are_refused(axes):
    with pytest.raises(UsageError, match="b"):
        Configuration(axes)
