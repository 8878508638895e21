"""Layers: arithmetic, traffic, overhead and all-reduces, by hand on tiny layers."""

import dataclasses

import numpy as np
import pytest
from small_graphs import dense

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.memory import layer_memory
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import layer_signature
from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.machine import KINDS, Link, Machine

RATES = {kind: 1e9 * (number + 1) for number, kind in enumerate(KINDS)}


def _machine(**changes):
    values = {"name": "test", "rates": RATES, "memory_bandwidth": 1e15, "memory_bytes": 1e10, "overhead": 0.0,
              "links": (Link(64, 1e9, 0.0),), **changes}
    return Machine(**values)


def _parts(layer, configurations, machine):
    table = ConfigurationTable.build(configurations, dim_positions(layer), len(layer.dims))
    return dict(zip(PARTS, layer_parts(layer_signature(layer), table, Reshardings(machine)), strict=True))


WHOLE, BATCH, OUT, IN = (Configuration(), Configuration((("batch", 4),)), Configuration((("out", 4),)),
                         Configuration((("in", 4),)))


def test_compute_is_divided_by_the_splits():
    layer = dense("dense", 32, 64, 128)
    parts = _parts(layer, [WHOLE, BATCH, OUT, IN, Configuration((("batch", 2), ("in", 4)))], _machine())
    product = 2 * 32 * 64 * 128 / RATES["matmul"]
    np.testing.assert_allclose(parts["forward"], product / np.array([1, 4, 4, 4, 8]))
    np.testing.assert_allclose(parts["backward"], 2 * product / np.array([1, 4, 4, 4, 8]))
    # The weights have no batch: every part of the batch updates them all.
    np.testing.assert_allclose(parts["update"], 64 * 128 / RATES["pointwise"] / np.array([1, 1, 4, 4, 4]))


def test_replicas_are_free_on_devices_and_paid_on_shared_cores():
    layer = dense("dense", 32, 64, 128)
    copies = Configuration((("", 8),))
    real = _parts(layer, [WHOLE, copies], _machine())
    shared = _parts(layer, [WHOLE, copies, BATCH], _machine(shared_cores=True))
    assert real["forward"][1] == real["forward"][0]
    assert shared["forward"][1] == pytest.approx(8 * shared["forward"][0])
    # Split work is the same work; the update is done by every part of the batch.
    assert shared["forward"][2] == pytest.approx(shared["forward"][0])
    assert shared["update"][2] == pytest.approx(4 * shared["update"][0])


def test_traffic_bound_where_memory_is_slow():
    layer = dense("dense", 32, 64, 128)
    parts = _parts(layer, [WHOLE, OUT], _machine(memory_bandwidth=1e6))
    assert parts["forward"][0] == pytest.approx(4 * (32 * 64 + 64 * 128 + 32 * 128) / 1e6)
    assert parts["forward"][1] == pytest.approx(4 * (32 * 64 + 64 * 32 + 32 * 32) / 1e6)
    assert parts["update"][0] == pytest.approx(4 * 2 * 64 * 128 / 1e6)


def test_overhead_per_operation():
    layer = dense("dense", 32, 64, 128)
    assert _parts(layer, [OUT], _machine(overhead=1e-3))["overhead"][0] == pytest.approx(4e-3)
    assert _parts(layer, [OUT], _machine(overhead=1e-3, shared_cores=True))["overhead"][0] == pytest.approx(16e-3)


def test_every_node_of_an_operation_has_the_overhead():
    layer = dense("dense", 32, 64, 128)
    many = dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, nodes=5) for operation in layer.operations))
    machine = _machine(overhead=1e-3, overheads={"matmul": 1e-2})
    one, five = (_parts(each, [OUT], machine)["overhead"][0] for each in (layer, many))
    assert five - one == pytest.approx(4 * 4 * 1e-3)


def test_nodes_read_and_write_what_stays_inside_an_operation():
    layer = dense("dense", 32, 64, 128)
    more = dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, traffic=3.0) for operation in layer.operations))
    machine = _machine(memory_bandwidth=1e6)
    once, thrice = (_parts(each, [OUT], machine)["forward"][0] for each in (layer, more))
    assert thrice == pytest.approx(3 * once)


def test_few_channels_do_not_fill_the_simd_width():
    x, f, y = Operand(("batch", "in"), (32, 64)), Operand(("in", "out"), (64, 32)), Operand(("batch", "out"), (32, 32))

    def convolution(inputs, output):
        operation = LayerOperation(0, "conv", "Conv2dOperation", "forward", "convolution", 1e9, ("batch", "in", "out"),
                                   inputs, (output,))
        return Layer("conv", "convolution", {"batch": 32, "in": 64, "out": 32}, ("batch", "in", "out"), (operation,),
                     ())

    quarters = [WHOLE, BATCH, OUT, IN, Configuration((("out", 8),))]
    wide, narrow = _machine(), _machine(simd_width=16)
    seconds = 1e9 / RATES["convolution"]
    for machine, waste in ((wide, (1, 1, 1, 1, 1)), (narrow, (1, 1, 2, 1, 4))):
        found = _parts(convolution((x, f), y), quarters, machine)["forward"]
        np.testing.assert_allclose(found, seconds / np.array([1, 4, 4, 4, 8]) * waste)
    # The gradient for the input makes its channels.
    found = _parts(convolution((y, f), x), quarters, narrow)["forward"]
    np.testing.assert_allclose(found, seconds / np.array([1, 4, 4, 4, 8]))


def test_broadcast_runs_take_time_however_short():
    x, offset = Operand(("batch", "out"), (32, 64)), Operand(("out",), (64,))
    operation = LayerOperation(0, "add", "AddOperation", "forward", "pointwise", 2048.0, ("batch", "out"), (x, offset),
                               (x,), broadcast_runs=32.0)
    layer = Layer("add", "pointwise", {"batch": 32, "out": 64}, ("batch", "out"), (operation,), ())
    configurations = [WHOLE, BATCH, OUT]
    known, found = (_parts(layer, configurations, _machine(broadcast_run_seconds=seconds))["forward"]
                    for seconds in (0.0, 1e-3))
    np.testing.assert_allclose(found - known, 32e-3 / np.array([1, 4, 1]))


def _image_operation(role, size):
    """A convolution (or one of its gradients) of window 3 x 3 with stride 2, as in a layer."""
    image, gradient = (Operand(("batch", "", "", channels), (16, extent, extent, count))
                       for channels, extent, count in (("in", 2 * size, 8), ("out", size, 4)))
    filters = Operand(("", "", "in", "out"), (3, 3, 8, 4))
    inputs, output = {"convolution": ((image, filters), gradient), "image gradient": ((gradient, filters), image),
                      "filter gradient": ((image, gradient), filters)}[role]
    operation = LayerOperation(0, "convolution", "AnyName", "forward", "convolution", 1e9, ("batch", "in", "out"),
                               inputs, (output,), role=role)
    dims = {"batch": 16, "in": 8, "out": 4}
    return Layer("convolution", "convolution", dims, tuple(dims), (operation,), ())


@pytest.mark.parametrize(("role", "taps"), [
    ("convolution", 16 * 5 * 5 * 9), ("image gradient", 16 * 10 * 10 * 9), ("filter gradient", 0)])
def test_taps_take_time_however_few_the_channels(role, taps):
    layer, configurations = _image_operation(role, 5), [WHOLE, BATCH, OUT, IN]
    known, found = (_parts(layer, configurations, _machine(tap_seconds=seconds))["forward"] for seconds in (0.0, 1e-3))
    np.testing.assert_allclose(found - known, 1e-3 * taps / np.array([1, 4, 1, 1]))


def test_a_convolution_brings_its_tensors_into_order():
    layer = _image_operation("convolution", 5)
    nbytes = 4 * 16 * (10 * 10 * 8 + 5 * 5 * 4) + 4 * 9 * 8 * 4
    known, found = (_parts(layer, [WHOLE], _machine(memory_bandwidth=1e9, layout_conversion=passes))["forward"]
                    for passes in (0.0, 1.5))
    assert found - known == pytest.approx(1.5 * nbytes / 1e9)


def _recurrence(steps):
    """A product of the same weights at every step, forward and backward."""
    weights = Operand(("in", "out"), (64, 128))
    ends = {"forward": (Operand(("batch", "in"), (32, 64)), Operand(("batch", "out"), (32, 128))),
            "backward": (Operand(("batch", "out"), (32, 128)), Operand(("batch", "in"), (32, 64)))}
    operations = tuple(
        LayerOperation(number, f"{phase}{number}", "EinsumOperation", phase, "matmul", 1e3, ("batch", "in", "out"),
                       (source, weights), (target,))
        for phase, (source, target) in ends.items() for number in range(steps))
    variable = Variable("weights", weights, True)
    return Layer("recurrence", "matmul", {"batch": 32, "in": 64, "out": 128}, ("batch", "in", "out"), operations,
                 (variable,))


@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_read_again_from_a_cache_that_holds_them(shared):
    weights, ends = 4 * 64 * 128, 4 * 32 * (64 + 128)
    configurations = [WHOLE, BATCH, OUT]
    parts = {name: _parts(_recurrence(5), configurations, _machine(
        memory_bandwidth=1e6, shared_cores=shared, **changes)) for name, changes in {
            "never": {}, "cached": {"cache_hit_cost_ratio": 0.25, "cache_capacity": 1e9},
            "split": {"cache_hit_cost_ratio": 0.25, "cache_capacity": weights},
            "lost": {"cache_hit_cost_ratio": 0.25, "cache_capacity": 9.0}}.items()}
    for phase in ("forward", "backward"):
        assert parts["never"][phase][0] == pytest.approx(5 * (weights + ends) / 1e6)
        assert parts["cached"][phase][0] == pytest.approx((5 * ends + weights + 4 * 0.25 * weights) / 1e6)
        np.testing.assert_allclose(parts["lost"][phase], parts["never"][phase])
        # Four copies of the weights, one for every part of the batch, are too many for what devices share.
        expected = [parts[name][phase][number] for number, name in enumerate(
            ("cached", "never" if shared else "cached", "cached"))]
        np.testing.assert_allclose(parts["split"][phase], expected)
    # What is read once is read for the first time.
    once = [_parts(_recurrence(1), configurations, _machine(memory_bandwidth=1e6, cache_hit_cost_ratio=times,
                                                               cache_capacity=1e9))
            for times in (1.0, 0.25)]
    np.testing.assert_allclose(once[0]["forward"], once[1]["forward"])


def test_allreduces_follow_the_split_dims():
    layer = dense("dense", 32, 64, 128)
    machine = _machine()

    def moved(elements, group):
        return 2 * (group - 1) / group * 4 * elements / 1e9

    names = [f"all-reduce {phase}" for phase in ("forward", "backward", "update")]
    expected = {BATCH: (0, moved(64 * 128, 4), 0), OUT: (0, moved(32 * 64, 4), 0), IN: (moved(32 * 128, 4), 0, 0),
                WHOLE: (0, 0, 0), Configuration((("batch", 2), ("in", 4))): (
                    moved(16 * 128, 4), moved(16 * 128, 2), 0)}
    parts = _parts(layer, list(expected), machine)
    for number, values in enumerate(expected.values()):
        np.testing.assert_allclose([parts[name][number] for name in names], values)


def test_partial_sums_that_differ_are_reduced_each_over_its_own_dims():
    """One operation that makes both gradients of a product, as a GenericGrad does."""
    layer = dense("dense", 32, 64, 128)
    forward, image, weights, update = layer.operations
    both = dataclasses.replace(image, outputs=(*image.outputs, *weights.outputs), reduced=(),
                               partial_sums=(image.reduced, weights.reduced))
    joined = dataclasses.replace(layer, operations=(forward, both, update))
    configurations = [WHOLE, BATCH, OUT, Configuration((("batch", 2), ("out", 4)))]
    machine = _machine(links=(Link(4, 1e9, 1e-6), Link(64, 1e8, 1e-5)))
    apart, together = (_parts(each, configurations, machine)["all-reduce backward"] for each in (layer, joined))
    assert apart.any()
    np.testing.assert_allclose(together, apart)
    buffers = [layer_memory(each, configurations)[-1] for each in (layer, joined)]
    np.testing.assert_array_equal(*buffers)


def test_group_levels_by_counting():
    links = (Link(2, 1e9, 0), Link(8, 1e9, 0), Link(64, 1e9, 0))
    machine = _machine(links=links)
    layer = dense("dense", 64, 64, 64)
    configurations = enumerate_configurations(layer, 32)
    position = dim_positions(layer)
    table = ConfigurationTable.build(configurations, position, 3)
    for dims in (("batch",), ("batch", "out"), ("in",)):
        groups = group_sizes(table, positions_of(dims, position), machine)
        for number, configuration in enumerate(configurations):
            kept = [name for name in ("batch", "in", "out", "") if name not in dims]

            def coordinates(device, names, configuration=configuration):
                found, stride = [], 1
                for name, parts in reversed(configuration.axes):
                    if name in names:
                        found.append(device // stride % parts)
                    stride *= parts
                return tuple(found)

            members = [device for device in range(32) if coordinates(device, kept) == coordinates(0, kept)]
            expected, clusters = [], members
            for link in links:
                reached = {device // link.devices for device in members}
                expected.append(len(clusters) / len(reached))
                clusters = sorted(reached)
            np.testing.assert_allclose(groups[:, number], expected)


@pytest.mark.parametrize("shared", [False, True])
def test_allreduce_is_monotone(shared):
    machine = _machine(shared_cores=shared, links=(Link(4, 1e9, 1e-6), Link(64, 1e8, 1e-5)))
    sizes, devices = np.geomspace(1, 1e9, 20), np.full(20, 16)
    before = np.zeros(20)
    for inside, across in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4)):
        groups = np.stack([np.full(20, float(inside)), np.full(20, float(across))])
        seconds = allreduce_seconds(sizes, groups, devices, machine)
        assert np.all(np.diff(seconds) >= 0)
        assert np.all(seconds[1:] >= before[1:] * (0.5 if shared else 1))
        assert (seconds.max() == 0) == (inside * across == 1)
        before = seconds


def test_slow_link_is_paid_for_what_the_fast_one_has_summed():
    machine = _machine(links=(Link(4, 1e9, 0.0), Link(64, 1e6, 0.0)))
    seconds = allreduce_seconds(np.array([8e6]), np.array([[4.0], [2.0]]), np.array([8]), machine)
    assert seconds[0] == pytest.approx(2 * 3 / 4 * 8e6 / 1e9 + 2 * 1 / 2 * 2e6 / 1e6)


def _einsum(inputs, output, sizes):
    operands = [Operand(tuple(dims), tuple(sizes[name] for name in dims)) for dims in (*inputs, output)]
    operation = LayerOperation(0, "einsum", "EinsumOperation", "forward", "matmul", 1.0, tuple(sizes),
                               tuple(operands[:2]), tuple(operands[2:]))
    return Layer("einsum", "matmul", sizes, tuple(sizes), (operation,), ())


@pytest.mark.parametrize(("inputs", "output", "kind", "transposed"), [
    (("ab", "bc"), "ac", "matmul", 0), (("ab", "cb"), "ac", "matmul", 0), (("ab", "ac"), "cb", "matmul", 0),
    (("abc", "cd"), "abd", "matmul", 0), (("abc", "dab"), "cd", "matmul", 0), (("bac", "cd"), "abd", "matmul", 1),
    (("abc", "abd"), "acd", "batched matmul", 0), (("abcd", "aecd"), "acbe", "batched matmul", 2),
    (("abcd", "acbe"), "aecd", "batched matmul", 2)])
def test_einsum_order(inputs, output, kind, transposed):
    signature, = layer_signature(_einsum(inputs, output, {name: 8 for name in "abcde"}))
    assert signature.kind == kind
    assert len(signature.transposed) == transposed


@pytest.mark.parametrize(("size", "times"), [(7, 4.0), (14, 1.0)])
def test_stride_inflates_the_gradient_of_the_image(size, times):
    image, gradient = Operand(("batch", "", "", ""), (4, 14, 14, 8)), Operand(("batch", "", "", ""), (4, size, size, 8))
    operation = LayerOperation(0, "gradient", "AnyName", "backward", "convolution", 1e6, ("batch",),
                               (gradient, Operand(("", "", "", ""), (3, 3, 8, 8))), (image,), role="image gradient")
    layer = Layer("gradient", "convolution", {"batch": 4}, ("batch",), (operation,), ())
    seconds = {stride_inflation: _parts(layer, [WHOLE], _machine(stride_inflation=stride_inflation))["backward"][0]
               for stride_inflation in (0.0, 0.5, 1.0)}
    assert seconds[1.0] == pytest.approx(times * seconds[0.0])
    assert seconds[0.5] == pytest.approx(times**0.5 * seconds[0.0])


def test_transposes_and_packing_cost_traffic():
    layer = _einsum(("bac", "cd"), "abd", {"a": 4, "b": 8, "c": 16, "d": 32})
    plain = _machine(memory_bandwidth=1e6)
    base = _parts(layer, [WHOLE], plain)["forward"][0]
    nbytes = 4 * (4 * 8 * 16 + 16 * 32 + 4 * 8 * 32)
    assert base == pytest.approx((nbytes + 2 * 4 * 4 * 8 * 32) / 1e6)
    packed = _parts(layer, [WHOLE], dataclasses.replace(plain, operand_packing=3.0))["forward"][0]
    assert packed - base == pytest.approx(3 * 4 * (4 * 8 * 16 + 16 * 32) / 1e6)
    stored = _parts(layer, [WHOLE], dataclasses.replace(plain, writeback=2.0))["forward"][0]
    assert stored - base == pytest.approx(2 * 4 * 4 * 8 * 32 / 1e6)


def test_aliases_are_laid_out_like_their_dim():
    layer = dense("dense", 32, 64, 128)
    renamed = dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, dims=tuple("memory" if name == "batch" else name for name in operation.dims))
        for operation in layer.operations), aliases={"memory": "batch"})
    machine = _machine()
    np.testing.assert_array_equal(_parts(layer, [BATCH], machine)["forward"],
                                  _parts(renamed, [BATCH], machine)["forward"])


def test_nothing_costs_nothing():
    free = LayerOperation(0, "import", "ImportOperation", "forward", "none", 0.0, ("batch",), (),
                          (Operand(("batch",), (32,)),))
    layer = Layer("import", "other", {"batch": 32}, ("batch",), (free,), ())
    assert not any(part.any() for part in _parts(layer, [WHOLE, BATCH], _machine(overhead=1.0)).values())
