"""What Mesh-TF's own collectives cost on shared cores: as many operations as its lowering makes."""

import dataclasses

import numpy as np
import pytest

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import layer_signature
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings, dim_positions
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration
from pase_mtf.lowering.equal_nodes import first_of_equal
from pase_mtf.lowering.nodes import kernel_of
from pase_mtf.machine.machine import Link, Machine

_KINDS = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e9)
# An operation is a second and nothing else costs anything.
COUNTING = Machine("counting", _KINDS, 1e30, 1e30, 1.0, (Link(8, 1e30, 0.0),), shared_cores=True)


@pytest.mark.parametrize("elements", [8, 512, 1024, 4096, 1026, 4095])
@pytest.mark.parametrize(("mesh_shape", "axes"), [("a:8", [0]), ("a:2;b:4", [0]), ("a:2;b:4", [1]), ("a:4;b:2", [0])])
def test_an_all_reduce_is_priced_by_the_operations_it_makes(mesh_shape, axes, elements):
    shape = mtf.convert_to_shape(mesh_shape)
    group = shape.dims[axes[0]].size
    with tf.Graph().as_default() as graph:
        impl = placement_mesh_impl.PlacementMeshImpl(shape, [], [f"/device:CPU:{number}" for number in range(8)])
        before = {f.name for f in [tf.placeholder(tf.float32, [elements], name=f"x{number}") for number in range(8)]}
        inputs = [graph.get_tensor_by_name(name) for name in sorted(before)]
        impl.allreduce(impl.LaidOutTensor(inputs), axes, "SUM")
        made = [op.type for op in graph.get_operations()]
    # Constants are free: sizes and axes.
    nodes = sum(made.count(kind) for kind in ("AddV2", "Identity", "Reshape", "Split", "ConcatV2"))
    priced = allreduce_seconds(np.array([4.0 * elements]), np.array([[float(group)]]), np.array([8]), COUNTING,
                               stock=True)
    assert priced[0] == pytest.approx(nodes)


def test_our_own_all_reduce_is_cheaper():
    arguments = np.array([4e6]), np.array([[8.0]]), np.array([8]), COUNTING
    assert allreduce_seconds(*arguments) < allreduce_seconds(*arguments, stock=True)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_an_exchange_is_priced_by_the_operations_it_makes(devices):
    """An axis that splits one dim before and another after."""
    with tf.Graph().as_default() as graph:
        impl = placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(f"a:{devices}"), [], [f"/device:CPU:{number}" for number in range(devices)])
        inputs = [tf.placeholder(tf.float32, [64, 64 // devices]) for _ in range(devices)]
        impl.alltoall(impl.LaidOutTensor(inputs), 0, 0, 1)
        made = [op.type for op in graph.get_operations()]
    # Sizes of pieces are constants once the graph is optimized.
    nodes = sum(made.count(kind) for kind in ("SplitV", "ConcatV2"))
    before, after = (DistinctShardings(np.array([devices]), np.array([shards]), np.array([[1, 1]]),
                                       np.zeros(1, np.int32)) for shards in ([1, devices], [devices, 1]))
    priced = Reshardings(COUNTING, stock=True).seconds(before, after, (64, 64), 4)
    assert priced[0, 0] == pytest.approx(nodes)


def test_what_is_split_is_so_before_an_exchange_and_what_is_joined_after_it():
    """The reshapes of a mixture of experts on rows:2;cols:4, there and back."""
    machine = dataclasses.replace(COUNTING, memory_bandwidth=1e3)
    batch, both, experts = (
        DistinctShardings(np.array([8]), np.array([shards]), np.array([strides]), np.zeros(1, np.int32))
        for shards, strides in (([1, 2, 1], [1, 4, 1]), ([1, 2, 4], [1, 4, 1]), ([2, 1, 4], [4, 1, 1])))

    def seconds(before, after):
        return Reshardings(machine, stock=True).seconds(before, after, (8, 8, 16), 4)[0, 0]
    assert seconds(batch, experts) == pytest.approx(seconds(batch, both) + seconds(both, experts))
    assert seconds(experts, batch) == pytest.approx(seconds(experts, both) + seconds(both, batch))


def _summed(elements, itemsize, reshardings):
    """Seconds of the sum of what eight devices hold in part."""
    operation = LayerOperation(
        0, "sum", "AnyName", "forward", "none", 0.0, ("batch",), (Operand(("batch", ""), (8, elements), itemsize),),
        (Operand(("",), (elements,), itemsize),), reduced=("batch",))
    layer = Layer("layer", "matmul", {"batch": 8}, ("batch",), (operation,), ())
    table = ConfigurationTable.build([Configuration((("batch", 8),))], dim_positions(layer), len(layer.dims))
    parts = layer_parts(layer_signature(layer), table, reshardings)[:, 0]
    return dict(zip(PARTS, parts, strict=True))["all-reduce forward"]


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_sums_are_made_by_elements_of_any_size(itemsize):
    """Mesh-TF counts elements, and so does our lowering, of whatever type they are."""
    stock = Reshardings(COUNTING, stock=True)
    for elements, operations in ((512, 14), (1024, 144), (1028, 14), (2056, 144)):
        assert _summed(elements, itemsize, stock) == pytest.approx(operations)
    messages = dataclasses.replace(COUNTING, overhead=0.0, links=(Link(8, 1e30, 1.0),), shared_cores=False)
    assert _summed(20_000, itemsize, Reshardings(messages)) == pytest.approx(14)


@pytest.mark.parametrize("elements", [8, 1026, 2048, 4095])
@pytest.mark.parametrize("group", [2, 3, 4, 5, 7, 8])
def test_an_all_reduce_is_priced_by_what_its_operations_read_and_write(group, elements):
    """Of an odd number of devices one in the middle adds, of an even number two do."""
    with tf.Graph().as_default() as graph:
        impl = placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(f"a:{group}"), [], [f"/device:CPU:{number}" for number in range(group)])
        impl.allreduce(impl.LaidOutTensor([tf.placeholder(tf.float32, [elements]) for _ in range(group)]), [0], "SUM")
        copied = sum(tensor.shape.num_elements() for node in graph.get_operations()
                     if node.type in ("AddV2", "Split", "ConcatV2")
                     for tensor in (*node.inputs, *node.outputs) if tensor.shape.rank)
    machine = dataclasses.replace(COUNTING, overhead=0.0, links=(Link(8, 4.0, 0.0),))  # a second is an element
    priced = allreduce_seconds(np.array([4.0 * elements]), np.array([[float(group)]]), np.array([group]), machine,
                               stock=True)
    assert priced[0] == pytest.approx(copied)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_split_is_priced_by_what_it_slices(dim):
    """The place of a shard is computed once for all that are split alike; slices of the first dim are no copies."""
    run = []
    with tf.Graph().as_default() as graph:
        impl = placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape("a:3"), [], [f"/device:CPU:{number}" for number in range(3)])
        for _ in range(2):
            impl.allsplit(impl.LaidOutTensor([tf.placeholder(tf.float32, [48, 48]) for _ in range(3)]), 0, dim)
            run.append(sum(kernel_of(node) is not None for node in first_of_equal(graph.get_operations())))
    ends = [DistinctShardings(np.array([3]), np.array([shards]), np.array([[1, 1]]), np.zeros(1, np.int32))
            for shards in ([1, 1], [3, 1] if dim == 0 else [1, 3])]
    priced = Reshardings(COUNTING, stock=True).seconds(*ends, (48, 48), 1)
    assert priced[0, 0] == pytest.approx(run[1] - run[0])
    copying = dataclasses.replace(COUNTING, memory_bandwidth=1.0, overhead=0.0)
    copied = Reshardings(copying, stock=True).seconds(*ends, (48, 48), 1)
    assert copied[0, 0] == pytest.approx(2 * 48 * 48 if dim else 0.0)


def _longest_way(group, elements, length):
    """From device to device in the sum that Mesh-TF itself makes, where a tensor that is sent is of this length."""
    with tf.Graph().as_default() as graph:
        devices = [f"/device:CPU:{number}" for number in range(group)]
        impl = placement_mesh_impl.PlacementMeshImpl(mtf.convert_to_shape(f"a:{group}"), [], devices)
        parts = []
        for device in devices:
            with tf.device(device):
                parts.append(tf.placeholder(tf.float32, [elements]))
        impl.allreduce(impl.LaidOutTensor(parts), [0], "SUM")
        end = {}
        for node in graph.get_operations():
            end[node] = max((end[x.op] + (x.op.device != node.device) * length(x) for x in node.inputs), default=0)
    return max(end.values())


@pytest.mark.parametrize("elements", [512, 4097])
@pytest.mark.parametrize("group", [3, 5, 6, 8])
def test_what_does_not_divide_goes_whole_from_device_to_device(group, elements):
    """The longest way of elements from device to device in what Mesh-TF itself makes; a second is an element."""
    machine = dataclasses.replace(COUNTING, overhead=0.0, links=(Link(64, 4.0, 0.0),), shared_cores=False)
    priced = allreduce_seconds(np.array([4.0 * elements]), np.array([[float(group)]]), np.array([group]), machine,
                               stock=True)
    assert priced[0] == pytest.approx(_longest_way(group, elements, lambda x: x.shape.num_elements()))


@pytest.mark.parametrize(("devices", "pieces"), [(2, 1), (4, 4), (8, 16)])
def test_an_exchange_hands_pieces_on_from_device_to_device(devices, pieces):
    """By hand: of eight devices three pieces go one way and four the other: 3 + 2 + 1 and 4 + 3 + 2 + 1 are sent."""
    machine = dataclasses.replace(COUNTING, overhead=0.0, links=(Link(8, 1.0, 0.0),), shared_cores=False)
    before, after = (DistinctShardings(np.array([devices]), np.array([shards]), np.array([[1, 1]]),
                                       np.zeros(1, np.int32)) for shards in ([1, devices], [devices, 1]))
    priced = Reshardings(machine, stock=True).seconds(before, after, (64, 64), 4)
    assert priced[0, 0] == pytest.approx(pieces * 64 * 64 * 4 / devices ** 2)


@pytest.mark.parametrize("elements", [1024, 16_000, 32_768])
@pytest.mark.parametrize("group", [4, 8, 16])
def test_what_divides_goes_round_rings_however_small(group, elements):
    """No fewer hops than the longest way from device to device in what Mesh-TF itself makes; at most there and back."""
    hops = _longest_way(group, elements, lambda x: 1)
    machine = dataclasses.replace(COUNTING, overhead=0.0, links=(Link(64, 1e30, 1.0),), shared_cores=False)
    priced = allreduce_seconds(np.array([4.0 * elements]), np.array([[float(group)]]), np.array([group]), machine,
                               stock=True)
    assert group - 1 == hops <= priced[0] * (1 + 1e-9)
    assert priced[0] <= 2 * hops * (1 + 1e-9)


@pytest.mark.parametrize(("before", "after", "slow", "fast"), [
    (([2, 8, 1], [8, 1, 1]), ([1, 1, 1], [1, 1, 1]), 1.0, 14.0),  # both axes are joined
    (([2, 1, 8], [8, 1, 1]), ([1, 2, 1], [1, 8, 1]), 0.5, 7.0)])  # as the gradient of a mixture of experts
def test_outer_axes_move_while_blocks_are_small(before, after, slow, fast):
    """By hand, in blocks as they lie on two nodes of eight: what comes from the other node, and from within."""
    machine = dataclasses.replace(COUNTING, overhead=0.0, links=(Link(8, 4.0, 0.0), Link(64, 1.0, 0.0)),
                                  shared_cores=False)
    ends = (DistinctShardings(np.array([16]), np.array([shards]), np.array([strides]), np.zeros(1, np.int32))
            for shards, strides in (before, after))
    block = 8 * 8 * 16 / 16  # of one byte an element
    priced = Reshardings(machine, stock=True).seconds(*ends, (8, 8, 16), 1)
    assert priced[0, 0] == pytest.approx(block * (slow + fast / 4.0))
