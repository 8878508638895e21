"""Layers: arithmetic, traffic, overhead and all-reduces, by hand on tiny layers."""

import collections
import dataclasses

import numpy as np
import pytest
from small_graphs import dense

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.roofline import roofline_machine
from pase_mtf.cost.signature import layer_signature
from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.graph.layer_operation import DRAWN, REPEAT, SUM, TOP_K
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing
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


def test_small_products_do_not_reach_the_rate():
    layer = dense("dense", 32, 64, 128)
    product = 2 * 32 * 64 * 128
    machine = _machine(efficiency=((0.0, 0.2), (product / 4, 0.4), (product / 2, 0.8)))
    parts, plain = _parts(layer, [WHOLE, BATCH, Configuration((("batch", 8),))], machine), _parts(
        layer, [WHOLE, BATCH, Configuration((("batch", 8),))], _machine())
    np.testing.assert_allclose(plain["forward"] / parts["forward"], [0.8, 0.4, 0.3])  # of a device's own FLOP
    np.testing.assert_allclose(plain["update"], parts["update"])  # which multiplies no matrices


def test_products_of_narrow_numbers_have_a_rate_of_their_own():
    layer = dense("dense", 32, 64, 128)
    narrow = dataclasses.replace(layer, operations=tuple(dataclasses.replace(
        operation, inputs=tuple(dataclasses.replace(operand, itemsize=2) for operand in operation.inputs))
        for operation in layer.operations))
    plain, faster = _machine(), _machine(rates={**RATES, "matmul bfloat16": 4 * RATES["matmul"]})
    one, same, fourth = (_parts(*case)["forward"][0] for case in (
        (layer, [WHOLE], faster), (narrow, [WHOLE], plain), (narrow, [WHOLE], faster)))
    assert one == same == pytest.approx(4 * fourth)
    # What does not multiply is as fast as ever.
    updates = [_parts(each, [WHOLE], faster)["update"][0] for each in (layer, narrow)]
    assert updates[0] == updates[1]


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
    machine = _machine(overhead=1e-3)
    one, five = (_parts(each, [OUT], machine)["overhead"][0] for each in (layer, many))
    assert five - one == pytest.approx(4 * 4 * 1e-3)


def test_nodes_read_and_write_what_stays_inside_an_operation():
    layer = dense("dense", 32, 64, 128)
    more = dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, traffic=3.0) for operation in layer.operations))
    machine = _machine(memory_bandwidth=1e6)
    once, thrice = (_parts(each, [WHOLE], machine)["forward"][0] for each in (layer, more))
    assert thrice == pytest.approx(3 * once)


def test_allreduces_follow_the_split_dims():
    layer = dense("dense", 32, 64, 128)
    machine = _machine(memory_bandwidth=1e30)  # nothing but links takes time

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


@pytest.mark.parametrize(("devices", "domains"), [
    (32, (2, 8, 64)), (12, (8, 16)), (24, (8, 24)), (24, (2, 8, 24)), (36, (6, 36)), (24, (3, 12, 24)),
    (6, (8, 64)), (3, (8, 64)), (12, (2, 16, 64))])
def test_group_levels_by_counting(devices, domains):
    """Where splits and links nest; elsewhere a group is said to share a link with no more than any does."""
    links = tuple(Link(size, 1e9, 0) for size in domains)
    machine = _machine(links=links)
    layer = dense("dense", 72, 72, 72) if devices % 3 == 0 else dense("dense", 64, 64, 64)
    configurations = enumerate_configurations(layer, devices)
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

            together = collections.defaultdict(list)
            for device in range(devices):
                together[coordinates(device, kept)].append(device)
            sharing = np.cumprod(groups[:, number])
            assert sharing[-1] == len(together[coordinates(0, kept)])
            for level, link in enumerate(links):
                counts = [count for members in together.values() for count in collections.Counter(
                    device // link.devices for device in members).values()]
                assert sharing[level] <= min(counts)
                if len(set(counts)) == 1:
                    assert sharing[level] == counts[0]


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


def test_messages_are_those_of_the_lowering_over_the_links_that_they_cross():
    """Of a hub two, of a pair one, over the slowest link; by hand: round a ring of 4 x 4 a piece has 12 hops within
    nodes and 3 across, and where all exchange pieces with all, 3 go within and 12 across; twice each."""
    machine = _machine(links=(Link(4, 1e30, 1.0), Link(64, 1e30, 10.0)))
    sizes = np.array([64.0, 64.0, 64.0, 4e6, 4e6, 4e6, 1e5])
    groups = np.array([[4, 1, 4, 4, 2, 4, 4], [1, 4, 2, 1, 1, 4, 4]])
    seconds = allreduce_seconds(sizes, groups.astype(float), groups.prod(axis=0), machine)
    np.testing.assert_allclose(seconds, [2.0, 20.0, 20.0, 6.0, 1.0, 84.0, 246.0])


def test_trees_take_as_many_messages_as_nodes_are_deep_where_that_is_less():
    """By hand: up and down 3 hops within a node, and log2 of the nodes, rounded up, across."""
    machine = _machine(links=(Link(4, 1e30, 1.0), Link(256, 1e30, 10.0)), sums_by_trees=True)
    rings = dataclasses.replace(machine, sums_by_trees=False)
    groups = np.array([[4, 4, 1, 4, 2], [1, 4, 64, 5, 1]], np.float64)
    arguments = np.full(5, 4e7), groups, groups.prod(axis=0)
    np.testing.assert_allclose(allreduce_seconds(*arguments, machine), [6.0, 46.0, 120.0, 66.0, 1.0])
    np.testing.assert_allclose(allreduce_seconds(*arguments, machine, stock=True), allreduce_seconds(*arguments, rings))
    small = np.full(5, 64.0), *arguments[1:]
    assert np.all(allreduce_seconds(*small, machine) <= allreduce_seconds(*small, rings))


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


def test_transposes_cost_traffic():
    layer = _einsum(("bac", "cd"), "abd", {"a": 4, "b": 8, "c": 16, "d": 32})
    base = _parts(layer, [WHOLE], _machine(memory_bandwidth=1e6))["forward"][0]
    nbytes = 4 * (4 * 8 * 16 + 16 * 32 + 4 * 8 * 32)
    assert base == pytest.approx((nbytes + 2 * 4 * 4 * 8 * 32) / 1e6)


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


def test_products_of_wide_numbers_have_a_rate_of_their_own():
    layer = dense("dense", 32, 64, 128)
    wide = dataclasses.replace(layer, operations=tuple(dataclasses.replace(
        operation, inputs=tuple(dataclasses.replace(operand, itemsize=8) for operand in operation.inputs))
        for operation in layer.operations))
    plain, slower = _machine(), _machine(rates={**RATES, "matmul float64": RATES["matmul"] / 8})
    one, same, eight = (_parts(*case)["forward"][0] for case in (
        (layer, [WHOLE], slower), (wide, [WHOLE], plain), (wide, [WHOLE], slower)))
    assert one == same == pytest.approx(eight / 8)


def test_what_a_device_has_one_element_of_is_passed_on():
    read, made = Operand(("batch", "out"), (4, 64)), Operand(("out",), (64,))
    operation = LayerOperation(0, "sum", "ReduceOperation", "forward", "reduction", 256.0, ("out", "batch"), (read,),
                               (made,), ("batch",), role=SUM)
    layer = Layer("sum", "normalize", {"batch": 4, "out": 64}, ("batch", "out"), (operation,), ())
    parts = _parts(layer, [WHOLE, OUT, BATCH], _machine(overhead=1e-9))
    assert parts["forward"][0] > parts["forward"][1] > 0.0
    assert parts["forward"][2] == 0.0
    assert parts["overhead"][2] == pytest.approx(1e-9)


def test_the_rates_of_whole_kernels_have_transposes_in_them():
    blocks = [Block("float32", shape) for shape in ((8, 4, 16), (16, 32), (4, 8, 32))]
    kernel = Kernel("Einsum", tuple(blocks[:2]), tuple(blocks[2:]), (("equation", "bac,cd->abd"),))
    machine = roofline_machine(KernelTimes(None, {kernel: Timing(1e-3)}), 1, 1e9)
    layer = _einsum(("bac", "cd"), "abd", {"a": 4, "b": 8, "c": 16, "d": 32})
    operation, = layer.operations
    layer = dataclasses.replace(layer, operations=(dataclasses.replace(operation, flops=kernel.flops),))
    assert sum(part[0] for part in _parts(layer, [WHOLE], machine).values()) <= 1e-3 * (1 + 1e-9)


def _alone(role, kind, read, made, sizes):
    operands = [Operand(dims, tuple(sizes[name] for name in dims)) for dims in (read, made)]
    operation = LayerOperation(0, "one", "One", "forward", kind, 2048.0, tuple(sizes), (operands[0],), (operands[1],),
                               role=role)
    return Layer("one", "normalize", sizes, tuple(sizes), (operation,), ())


def test_what_is_repeated_once_is_passed_on():
    sizes, split = {"batch": 8, "heads": 4, "d": 64}, Configuration((("heads", 4),))
    forward = _parts(_alone(REPEAT, "pointwise", ("batch", "d"), ("batch", "heads", "d"), sizes),
                     [WHOLE, split], _machine())["forward"]
    assert forward[0] > forward[1] == 0.0
    # Before all others a dim is repeated by a node of its own.
    leading = _alone(REPEAT, "pointwise", ("d",), ("heads", "d"), {"heads": 4, "d": 64})
    assert _parts(leading, [split], _machine())["forward"][0] > 0.0


def test_what_makes_as_much_as_it_reads_is_computed():
    layer = _alone("", "reduction", ("batch", "out"), ("batch", "out"), {"batch": 4, "out": 64})
    assert (_parts(layer, [WHOLE, BATCH], _machine())["forward"] > 0.0).all()


def test_the_gradient_of_a_filter_that_is_found_again_costs_nothing():
    image, slope = Operand(("batch", "", "", "in"), (4, 8, 8, 16)), Operand(("batch", "", "", "out"), (4, 8, 8, 32))
    filters = Operand(("", "", "in", "out"), (3, 3, 16, 32))
    first = LayerOperation(0, "one", "One", "backward", "convolution", 2048.0, ("batch", "in", "out"), (image, slope),
                           (filters,), ("batch",), role="filter gradient")
    for operation, takes in ((first, True), (dataclasses.replace(first, repeats=True), False)):
        layer = Layer("one", "convolution", {"batch": 4, "in": 16, "out": 32}, ("batch", "in", "out"), (operation,), ())
        parts = _parts(layer, [WHOLE, BATCH], _machine(overhead=1e-3))
        assert bool(parts["backward"].any()) == bool(parts["overhead"].any()) == takes


def test_sums_that_are_transposed_or_repeated_are_not_passed_on():
    sizes, split = {"d": 64, "heads": 4, "batch": 8}, Configuration((("heads", 4),))
    for made, free in ((("d", "batch"), True), (("batch", "d"), False)):
        layer = _alone(SUM, "reduction", ("d", "heads", "batch"), made, sizes)
        assert (_parts(layer, [split], _machine())["forward"][0] == 0.0) == free
    other = _alone(SUM, "reduction", ("batch", "out"), ("batch", "other"), {"batch": 8, "out": 64, "other": 64})
    assert _parts(other, [WHOLE], _machine())["forward"][0] > 0.0


def test_what_brings_single_elements_into_another_order_is_passed_on():
    sizes = {"batch": 4, "length": 16, "out": 64}
    layer = _alone("", "pointwise", ("batch", "length", "out"), ("length", "batch", "out"), sizes)
    forward = _parts(layer, [WHOLE, BATCH, OUT], _machine())["forward"]
    assert forward[0] > forward[2] > forward[1] == 0.0


def test_what_a_top_k_gathers_is_copied_by_elements_of_its_type():
    machine = _machine(shared_cores=True, rates={**RATES, "copy": 1e6})

    def gathered(itemsize):
        x, values = Operand(("batch", "in"), (32, 64), itemsize), Operand(("batch", ""), (32, 4), itemsize)
        chosen = LayerOperation(0, "best", "TopKOperation", "forward", "reduction", 2048.0, x.dims, (x,),
                                (values, Operand(("batch", ""), (32, 4))), ("in",), role=TOP_K)
        layer = Layer("best", "normalize", {"batch": 32, "in": 64}, x.dims, (chosen,), ())
        return _parts(layer, [IN], machine)["all-reduce forward"][0]

    assert gathered(4) > 0.0
    assert gathered(8) == gathered(2) == pytest.approx(gathered(4))


def test_random_numbers_are_drawn_once_where_memory_is_shared():
    made = Operand(("batch", "out"), (32, 64))
    drawn = LayerOperation(0, "noise", "RandomOperation", "forward", "pointwise", 2048.0, made.dims, (), (made,),
                           role=DRAWN)
    layer = Layer("noise", "pointwise", {"batch": 32, "out": 64}, made.dims, (drawn,), ())
    choices = [WHOLE, Configuration((("", 8),)), Configuration((("batch", 4), ("", 2)))]
    shared, own = (_parts(layer, choices, _machine(shared_cores=each, overhead=1e-3)) for each in (True, False))
    np.testing.assert_allclose(shared["forward"], shared["forward"][0])
    np.testing.assert_allclose(shared["overhead"], [1e-3, 1e-3, 4e-3])
    np.testing.assert_allclose(own["forward"], own["forward"][0] / np.array([1, 1, 4]))


def test_a_product_that_is_summed_is_divided_as_the_operation_is():
    """By hand, elements of a device: the product reads two rows and writes one; the sum reads that, and writes one."""
    x, y, made = Operand(("batch", "out"), (8, 64)), Operand(("out",), (64,)), Operand(("batch",), (8,))
    ends = 512 + 64 + 8
    operation = LayerOperation(0, "dot", "EinsumOperation", "forward", "reduction", 1024.0, ("batch", "out"), (x, y),
                               (made,), ("out",), nodes=2, traffic=(ends + 2 * 512) / ends)
    layer = Layer("dot", "normalize", {"batch": 8, "out": 64}, ("batch", "out"), (operation,), ())
    parts = _parts(layer, [Configuration((("batch", 8),))], _machine(memory_bandwidth=1e6))
    assert parts["forward"][0] == pytest.approx(4 * (3 * 64 + 64 + 1) / 1e6)


def test_what_every_device_makes_of_nothing_is_paid_on_every_device():
    made = Operand(("batch", "out"), (32, 64))
    own = LayerOperation(0, "places", "Own", "forward", "pointwise", 2048.0, made.dims, (), (made,))
    layer = Layer("places", "pointwise", {"batch": 32, "out": 64}, made.dims, (own,), ())
    forward = _parts(layer, [WHOLE, Configuration((("", 8),))], _machine(shared_cores=True))["forward"]
    assert forward[1] == pytest.approx(8 * forward[0])
