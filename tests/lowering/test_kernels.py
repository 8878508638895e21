"""The kernels that are told of a strategy, against the nodes of the graph that is lowered under it."""

import collections
import math

import numpy as np
import pytest
from harness import device_names
from hypothesis import given, settings
from nets import Builder, build, dim
from random_partitions import partition_pairs

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.build import build_network
from pase_mtf.cost.kernels import KnownKernels
from pase_mtf.cost.roofline import roofline_machine
from pase_mtf.export.exporter import export_graph
from pase_mtf.export.layer_marks import one_layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition, whole
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.equal_nodes import first_of_equal
from pase_mtf.lowering.kernels import GraphKernels
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.nodes import kernel_of, node_of
from pase_mtf.lowering.plans import plan_from_configurations
from pase_mtf.lowering.recorded import recorded_move
from pase_mtf.lowering.reshard import move
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import SENT, Timing, send_kernel, sum_kernel
from pase_mtf.strategy.experts import data_parallel

# Not told: the maximum of partial maxima (told as a sum), the slices of imported tensors, the offset that all but the
# first device subtract from the indices of a one-hot, and reshapes, which copy nothing.
_MISSING = {"Maximum", "Minimum", "Split", "Slice", "ConcatV2", "Sub", "Pack", "Max", "Min", "Reshape"}


def _comparable(kernels):
    """Kernels without where inputs lie and what constants hold (the nets' inputs are some), sums without shape; what is
    sent is no node."""
    found = collections.Counter()
    for kernel, times in kernels.items():
        if kernel.operation == SENT:
            continue
        if kernel.operation == "AddN":
            size = math.prod(kernel.inputs[0].shape)
            kernel = sum_kernel(len(kernel.inputs), size, 4)
        inputs = tuple(block._replace(value=None) for block in kernel.inputs)
        found[kernel._replace(apart=False, again=False, inputs=inputs)] += times
    return found


def _lowered(net, graph, configurations, devices):
    """The kernels that a step of the lowered graph runs."""
    plan = plan_from_configurations(net.graph, graph, configurations, devices)
    lowering = PlanLowering(net.graph, plan, device_names(devices))
    waiting = [lowering.export_to_tf_tensor(net.loss).op, *map(lowering.lowered_operation, net.updates)]
    run = set()
    while waiting:
        node = waiting.pop()
        if node not in run:
            run.add(node)
            waiting += [*(x.op for x in node.inputs), *node.control_inputs]
    nodes = first_of_equal(node for node in tf.get_default_graph().get_operations() if node in run)
    return collections.Counter(kernel for kernel in map(kernel_of, nodes) if kernel is not None)


@pytest.mark.parametrize(("name", "choose"), [
    ("mlp", data_parallel), ("cnn", lambda graph, devices: random_configurations(graph, devices, 1, 0)),
    ("transformer", lambda graph, devices: random_configurations(graph, devices, 3, 0))],
    ids=["mlp data parallel", "cnn random", "transformer random"])
def test_what_is_told_is_what_is_run(name, choose):
    with tf.Graph().as_default():
        net = build(name, "adam", tf.float32)
        graph = export_graph(net.graph)
        configurations = choose(graph, 4)
        source = GraphKernels(net.graph, graph)
        known = KnownKernels(graph, source)
        known.look(configurations)
        told = _comparable(known.kernels(configurations))
        run = _comparable(_lowered(net, graph, configurations, 4))
    assert not source.untraced
    missing = run - told
    assert {kernel.operation for kernel in missing} <= _MISSING
    assert missing.total() <= 0.05 * run.total()
    # Beyond what is run: what devices hold that nobody reads, which TensorFlow leaves out.
    assert (told - run).total() <= 0.15 * run.total()
    assert known.look(configurations) == 0


@settings(deadline=None, max_examples=40)
@given(partition_pairs())
def test_what_a_move_sends_as_it_is(pair):
    """Once for every device that reads it; not what is put together there, whose kernel tells of that."""
    shape, source, target = pair
    devices = device_names(8)
    with tf.Graph().as_default():
        blocks = []
        for number in source.devices:
            with tf.device(devices[number]):
                blocks.append(tf.placeholder(tf.float32, source.block_shape(shape)))
        readers = []
        moved = move(blocks, source, target, shape, Emitter(devices, shared=True))
        for number, block in zip(target.devices, moved, strict=True):
            with tf.device(devices[number]):
                readers.append(tf.identity(block).op)
        joined = {(x, node.device) for node in tf.get_default_graph().get_operations() if node.type == "ConcatV2"
                  for x in node.inputs}
        sent = {(x, reader.device) for reader in readers for x in reader.inputs if x.device != reader.device} - joined
    told = {kernel: times for kernel, times in recorded_move(source, target, shape, 4).items()
            if kernel.operation == SENT}
    assert told == collections.Counter(send_kernel(x.shape.num_elements(), 4) for x, _ in sent)


def test_kernels_can_be_made_again():
    with tf.Graph().as_default():
        net = build("cnn", "adam", tf.float32)
        graph = export_graph(net.graph)
        configurations = random_configurations(graph, 4, 1, 0)
        known = KnownKernels(graph, GraphKernels(net.graph, graph))
        known.look(configurations)
    kernels = [kernel for kernel in known.kernels(configurations) if kernel.operation != SENT and not any(
        block.dtype == "resource" for block in kernel.inputs)]
    assert len(kernels) > 20
    definition = tf.GraphDef(versions={"producer": tf.version.GRAPH_DEF_VERSION})
    for number, kernel in enumerate(kernels):
        names = []
        for block in kernel.inputs:
            names.append(f"x{len(definition.node)}")
            dtype = tf.as_dtype(block.dtype)
            if block.value is None:
                definition.node.add(name=names[-1], op="Placeholder", attr={
                    "dtype": tf.AttrValue(type=dtype.as_datatype_enum),
                    "shape": tf.AttrValue(shape=tf.TensorShape(block.shape).as_proto())})
            else:
                value = tf.make_tensor_proto(list(block.value) if block.shape else block.value[0], dtype, block.shape)
                definition.node.add(name=names[-1], op="Const", attr={
                    "dtype": tf.AttrValue(type=dtype.as_datatype_enum), "value": tf.AttrValue(tensor=value)})
        definition.node.append(node_of(kernel, f"kernel{number}", names, ""))
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
        for number, kernel in enumerate(kernels):
            assert kernel_of(graph.get_operation_by_name(f"kernel{number}")) == kernel._replace(apart=False)


def _products(net):
    """Kernels of products under data parallelism over two devices, and how many there are of each."""
    graph = export_graph(net.graph)
    configurations = data_parallel(graph, 2)
    known = KnownKernels(graph, GraphKernels(net.graph, graph))
    known.look(configurations)
    return {kernel: times for kernel, times in known.kernels(configurations).items() if kernel.operation == "Einsum"}


@pytest.mark.parametrize(("batch", "shared", "again"), [(4, True, 6), (64, True, 0), (4, False, 0)],
                         ids=["time steps", "inputs are most of it", "weights of their own"])
def test_time_steps_read_weights_again(batch, shared, again):
    """On each of two devices, all four but the first, where the weights are most of what a product moves."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, old, new = dim("batch", batch), dim("old", 8), dim("new", 8)
        h = net.input("x", [rows, old])
        with one_layer(net.graph):
            weights = [net.variable(f"w{step}", [old, new]) for step in range(1 if shared else 4)]
            for step in range(4):
                h = mtf.rename_dimension(mtf.einsum([h, weights[step % len(weights)]], mtf.Shape([rows, new])),
                                         "new", "old")
        told = _products(net)
    assert sum(told.values()) == 8
    assert sum(times for kernel, times in told.items() if kernel.again) == again


def test_a_loop_reads_from_outside_again():
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, old, new = dim("batch", 2), dim("old", 8), dim("new", 8)
        weights = net.variable("w", [old, new])

        def body(step, h):
            return [step + 1, mtf.rename_dimension(mtf.einsum([h, weights], mtf.Shape([rows, new])), "new", "old")]

        start = mtf.constant(net.mesh, 0, mtf.Shape([]), tf.int32)
        mtf.while_loop(lambda step, _: mtf.less(step, 5), body, [start, net.input("x", [rows, old])])
        told = _products(net)
    assert {(kernel.again, times) for kernel, times in told.items()} == {(True, 10)}


@pytest.mark.parametrize(("again", "sigmoids"), [("x, w", 2), ("w, x", 2), ("x, y", 4), ("x, x", 4)])
def test_equal_nodes_of_a_layer_are_told_once(again, sigmoids):
    """On each of two devices one of two, where both read the same; products are the same in any order."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        dims = [dim("batch", 8), dim("io", 4)]
        with one_layer(net.graph):
            tensors = {name: net.variable(name, dims) for name in "xwy"}
            made = [mtf.slicewise(lambda one, other, number=number: tf.sigmoid(one * other) + number,
                                  [tensors[name] for name in names.split(", ")], mtf.Shape(dims), tf.float32, dims)
                    for number, names in enumerate(("x, w", again))]
            mtf.reduce_sum(made[0] * made[1])
        graph = export_graph(net.graph)
        known = KnownKernels(graph, GraphKernels(net.graph, graph))
        known.look(data_parallel(graph, 2))
        told = known.kernels(data_parallel(graph, 2))
    assert sum(times for kernel, times in told.items() if kernel.operation == "Sigmoid") == sigmoids


def test_layers_that_are_alike_are_looked_at_once(monkeypatch):
    """Those of a stack, whose dims have names of their own."""
    looked, look = [], GraphKernels.layer
    monkeypatch.setattr(GraphKernels, "layer", lambda self, number, configuration: (
        looked.append(number), look(self, number, configuration))[1])
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, old = dim("batch", 8), dim("width0", 16)
        h = net.input("x", [rows, old])
        for number in range(1, 5):
            new = dim(f"width{number}", 16)
            h, old = mtf.tanh(mtf.einsum([h, net.variable(f"w{number}", [old, new])], mtf.Shape([rows, new]))), new
        graph = export_graph(net.graph)
        source = GraphKernels(net.graph, graph)
        keys = [source.alike(number) for number in range(len(graph.layers))]
        KnownKernels(graph, source).look(data_parallel(graph, 2))
    assert len(looked) == len(set(keys)) < len(keys)
    for number, layer in enumerate(graph.layers):
        for other in range(number):
            if keys[number] == keys[other]:
                assert [entry.type for entry in layer.operations] == [
                    entry.type for entry in graph.layers[other].operations]


def test_what_prints_is_no_kernel():
    """Timed, it would print on every device, run after run."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [8])
        tf.Print(x, [x], "by Mesh-TensorFlow")
        tf.print("by a function of slices", x)
        nodes = {node.type: kernel_of(node) for node in graph.get_operations()}
    assert nodes.keys() >= {"Print", "PrintV2", "StringFormat"}
    assert set(nodes.values()) == {None}


def test_a_roofline_prices_equal_operations_once():
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        dims = [dim("batch", 8), dim("io", 4096)]
        with one_layer(net.graph):
            x, y = net.variable("x", dims), net.variable("y", dims)
            mtf.reduce_sum((x * y) + (x * y) * (x * y))
        graph = export_graph(net.graph)
        known, parallel = KnownKernels(graph, GraphKernels(net.graph, graph)), data_parallel(graph, 2)
        known.look(parallel)
        told = known.kernels(parallel)
    times = KernelTimes(None, {kernel: Timing(1e-6 + 1e-9 * kernel.nbytes) for kernel in told})
    priced = build_network(graph, roofline_machine(times, 2, 1e12), 2, [(choice,) for choice in parallel])
    assert priced.network.cost([0] * len(graph.layers)) <= sum(
        count * times.get(kernel).seconds for kernel, count in told.items()) * (1 + 1e-9)


def test_weights_are_cast_on_every_device():
    """What is kept in float32 and computed with in bfloat16: once in a step."""
    with tf.Graph().as_default():
        net = Builder(tf.bfloat16)
        rows, old, new = dim("batch", 4), dim("old", 8), dim("new", 8)
        mtf.einsum([net.input("x", [rows, old]), net.variable("w", [old, new])], mtf.Shape([rows, new]))
        graph = export_graph(net.graph)
        known, parallel = KnownKernels(graph, GraphKernels(net.graph, graph)), data_parallel(graph, 2)
        known.look(parallel)
        told = known.kernels(parallel)
    assert {(kernel.inputs[0].dtype, kernel.outputs[0].dtype, kernel.outputs[0].shape): times
            for kernel, times in told.items() if kernel.operation == "Cast"} == {("float32", "bfloat16", (8, 8)): 2}


def test_layers_that_sum_otherwise_are_not_alike():
    """Of two products that are added one sum is made, but two where somebody else reads one of them."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, first, old, new, last = (dim(name, 8) for name in ("batch", "first", "old", "new", "last"))
        x = mtf.einsum([net.input("x", [rows, first]), net.variable("w", [first, old])], mtf.Shape([rows, old]))
        for number in range(2):
            with one_layer(net.graph):
                one, other = (mtf.einsum([x, net.variable(f"w{number}{which}", [old, new])], mtf.Shape([rows, new]))
                              for which in "ab")
                mtf.add(one, other)
        mtf.einsum([one, net.variable("v", [new, last])], mtf.Shape([rows, last]))
        graph = export_graph(net.graph)
        known = KnownKernels(graph, GraphKernels(net.graph, graph))
        pairs = [sum(entry.type == "EinsumOperation" for entry in layer.operations) == 2 for layer in graph.layers]
        configurations = [Configuration((("old" if pair else "", 2),)) for pair in pairs]
        known.look(configurations)
        told = known.kernels(configurations)
    assert sum(pairs) == 2
    assert told[sum_kernel(2, 64, 4)] == 3


def test_what_is_put_together_of_rows_is_sent_once():
    told = recorded_move(Partition((0, 1, 2, 3), ((2, 2), (2, 1))), whole(0, 2), (8, 6), 4)
    assert {(kernel.apart, kernel.outputs[0].shape): times for kernel, times in told.items()
            if kernel.operation == "ConcatV2"} == {(True, (4, 6)): 2, (False, (8, 6)): 1}


@pytest.mark.parametrize("turns", [False, True])
def test_in_turns_the_backward_pass_runs_what_the_forward_pass_has_run(turns):
    """The gradient of log(y) makes 1 / y once more; in a pipeline it waits for its turn."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, old, new = dim("batch", 4), dim("old", 8), dim("new", 8)
        w = net.variable("w", [old, new])
        y = mtf.einsum([net.input("x", [rows, old]), w], mtf.Shape([rows, new]))
        mtf.gradients([mtf.reduce_sum(mtf.log(y) + mtf.reciprocal(y))], [w])
        graph = export_graph(net.graph, turns=turns)
        known, parallel = KnownKernels(graph, GraphKernels(net.graph, graph, turns=turns)), data_parallel(graph, 2)
        known.look(parallel)
        told = known.kernels(parallel)
    assert sum(times for kernel, times in told.items() if kernel.operation == "Reciprocal") == (4 if turns else 2)


def test_in_turns_weights_are_cast_once_for_all_microbatches():
    with tf.Graph().as_default():
        net = Builder(tf.bfloat16)
        rows, old, new = dim("batch", 4), dim("old", 8), dim("new", 8)
        mtf.einsum([net.input("x", [rows, old]), net.variable("w", [old, new])], mtf.Shape([rows, new]))
        graph = export_graph(net.graph, turns=True)
        source = GraphKernels(net.graph, graph, turns=True)
        cast = [phase for number, chosen in enumerate(data_parallel(graph, 2))
                for phase, kernels in source.layer(number, chosen).items()
                if any(kernel.operation == "Cast" for kernel in kernels)]
    assert cast == ["update"]


def test_what_reads_a_weight_once_more_casts_it_once_more():
    with tf.Graph().as_default():
        net = Builder(tf.bfloat16)
        rows, old, new = dim("batch", 4), dim("old", 8), dim("new", 8)
        x, w = net.input("x", [rows, old]), net.variable("w", [old, new])
        for weight in (w, mtf.ops.read_variable(w.operation)):
            mtf.einsum([x, weight], mtf.Shape([rows, new]))
        graph = export_graph(net.graph)
        known, parallel = KnownKernels(graph, GraphKernels(net.graph, graph)), data_parallel(graph, 2)
        known.look(parallel)
        told = known.kernels(parallel)
    assert sum(times for kernel, times in told.items() if kernel.operation == "Cast") == 4


@pytest.mark.parametrize("offset", [4, -4])
def test_a_roofline_prices_no_blocks_that_are_handed_on(offset):
    """A shift by whole blocks: devices take those of others as they are."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        batch, io = dim("batch", 8), dim("io", 4096)
        with one_layer(net.graph):
            x, y = net.variable("x", [batch, io]), net.variable("y", [batch, io])
            mtf.reduce_sum(mtf.shift(x * y, offset, batch, wrap=True))
        graph = export_graph(net.graph)
        source, parallel = GraphKernels(net.graph, graph), data_parallel(graph, 2)
        known = KnownKernels(graph, source)
        known.look(parallel)
        told = known.kernels(parallel)
    assert not source.untraced
    times = KernelTimes(None, {kernel: Timing(1e-6 + 1e-9 * kernel.nbytes) for kernel in told})
    priced = build_network(graph, roofline_machine(times, 2, 1e12), 2, [(choice,) for choice in parallel])
    assert priced.network.cost([0] * len(graph.layers)) <= sum(
        count * times.get(kernel).seconds for kernel, count in told.items()) * (1 + 1e-9)


def test_random_numbers_are_told_once():
    """Devices that share a memory draw every chunk once; told exactly where they divide the chunks."""
    with tf.Graph().as_default() as lowered:
        net = Builder(tf.float32)
        rows, old, new = dim("batch", 24), dim("old", 8), dim("new", 8)
        x = mtf.dropout(net.input("x", [rows, old]), True, rate=0.5)
        mtf.einsum([x, net.variable("w", [old, new])], mtf.Shape([rows, new]))
        graph = export_graph(net.graph)
        known, parallel = KnownKernels(graph, GraphKernels(net.graph, graph)), data_parallel(graph, 4)
        known.look(parallel)
        told = known.kernels(parallel)
        PlanLowering(net.graph, plan_from_configurations(net.graph, graph, parallel, 4), device_names(4))
        run = sum(node.type == "StatelessRandomUniform" for node in lowered.get_operations())
    assert sum(times for kernel, times in told.items() if kernel.operation == "StatelessRandomUniform") == run == 24


def test_loops_that_turn_as_often_run_nodes_of_their_own():
    """On each of two devices, in three iterations of either loop."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, old, new = dim("batch", 2), dim("old", 8), dim("new", 8)
        x = mtf.einsum([net.input("x", [rows, old]), net.variable("w", [old, new])], mtf.Shape([rows, new]))
        for _ in range(2):
            mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, state: [i + 1, state + mtf.tanh(x)],
                           [mtf.constant(net.mesh, 0, mtf.Shape([]), tf.int32), x])
        graph = export_graph(net.graph)
        known = KnownKernels(graph, GraphKernels(net.graph, graph))
        known.look(data_parallel(graph, 2))
        told = known.kernels(data_parallel(graph, 2))
    assert sum(times for kernel, times in told.items() if kernel.operation == "Tanh") == 2 * 2 * 3


def test_functions_that_hold_other_arrays_are_not_equal():
    """Of one text, and of the same tensor: on each of two devices the layer that holds one array divides once, that
    which holds two does so twice; what both do before is done once in each."""
    def divided(by):
        return lambda one: tf.sigmoid(one) / by

    with tf.Graph().as_default():
        net = Builder(tf.float32)
        dims = [dim("batch", 8), dim("io", 4)]
        twos, threes = np.full(4, 2, np.float32), np.full(4, 3, np.float32)
        for name, other in (("x", twos), ("y", threes)):
            with one_layer(net.graph):
                tensor = net.variable(name, dims)
                made = [mtf.slicewise(divided(by), [tensor], mtf.Shape(dims), tf.float32, dims[:1])
                        for by in (twos, other)]
                mtf.reduce_sum(made[0] * made[1])
        graph = export_graph(net.graph)
        known = KnownKernels(graph, GraphKernels(net.graph, graph))
        known.look(data_parallel(graph, 2))
        told = known.kernels(data_parallel(graph, 2))
    counts = collections.Counter()
    for kernel, times in told.items():
        counts[kernel.operation] += times
    assert (counts["RealDiv"], counts["Sigmoid"]) == (6, 4)


@pytest.mark.parametrize(("batch", "devices", "split"), [(24, 8, False), (24, 5, False), (16, 16, True)])
def test_random_numbers_are_told_as_often_as_they_are_made(batch, devices, split):
    """What all devices need is put together once; some devices draw more chunks than others, or none."""
    with tf.Graph().as_default() as lowered:
        net = Builder(tf.float32)
        rows, old, new = dim("batch", batch), dim("old", 8), dim("new", 8)
        x = mtf.dropout(net.input("x", [rows, old]), True, rate=0.5)
        mtf.einsum([x, net.variable("w", [old, new])], mtf.Shape([rows, new]))
        graph = export_graph(net.graph)
        chosen = data_parallel(graph, devices) if split else [Configuration((("", devices),))] * len(graph.layers)
        known = KnownKernels(graph, GraphKernels(net.graph, graph))
        known.look(chosen)
        told = known.kernels(chosen)
        PlanLowering(net.graph, plan_from_configurations(net.graph, graph, chosen, devices), device_names(devices))
        run = collections.Counter(node.type for node in lowered.get_operations())
    for kind in ("StatelessRandomUniform", "ConcatV2"):
        assert sum(times for kernel, times in told.items() if kernel.operation == kind) == run[kind]
