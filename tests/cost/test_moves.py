"""What moves inside a layer: renames between dims that are cut differently, and shifts along a split dim."""

import dataclasses

import numpy as np
import pytest
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.moves import move_elements, move_of, move_seconds
from pase_mtf.cost.paper import PAPER_PARTS, paper_parts
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import layer_signature
from pase_mtf.cost.tables import ConfigurationTable, dim_positions
from pase_mtf.export.exporter import export_graph
from pase_mtf.export.layer_marks import one_layer
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import KINDS, Link, Machine

MACHINE = Machine("test", dict.fromkeys(KINDS, 1e12), 1e30, 1e10, 0.0, (Link(4, 1e9, 1e-6), Link(16, 1e8, 1e-5)))
SHARED = dataclasses.replace(MACHINE, shared_cores=True)
DIMS = {"layers": 4, "units": 8, "inputs": 8}


def _layer(role, before, after, **changes):
    operation = LayerOperation(0, "move", "AnyName", "forward", "none" if role == "rename" else "gather", 0.0,
                               (*dict.fromkeys(before + after),), (Operand(before, (4, 8)),),
                               (Operand(after, (4, 8)),), role=role, **changes)
    return Layer("layer", "matmul", DIMS, tuple(DIMS), (operation,), ())


RENAME = _layer("rename", ("layers", "units"), ("layers", "inputs"))
SHIFT = _layer("shift", ("layers", "units"), ("layers", "units"), shift=("layers", 1))


def _move(layer, *axes, machine=MACHINE):
    table = ConfigurationTable.build([Configuration(axes)], dim_positions(layer), len(layer.dims))
    move = move_of(layer.operations[0], dim_positions(layer))
    return (float(move_seconds(move, table, Reshardings(machine))[0]),
            float(move_elements(move, table, Reshardings(machine))[0]))


def test_a_rename_gathers_what_it_leaves_whole():
    assert _move(RENAME, ("layers", 4)) == (0.0, 0.0)
    seconds, elements = _move(RENAME, ("inputs", 4))
    assert (round(seconds, 20), elements) == (0.0, 0.0)  # every device holds everything before: it keeps its part
    seconds, elements = _move(RENAME, ("units", 4))
    assert elements == 4 * 8 * 3 / 4
    assert seconds == pytest.approx(3e-6 + 4 * elements / 1e9)
    assert _move(RENAME, ("units", 2), ("inputs", 2))[1] == 4 * 4  # two of the four hold the other half


def test_a_shift_hands_one_layer_on():
    assert _move(SHIFT, ("units", 4)) == (0.0, 0.0)
    assert _move(SHIFT, ("layers", 4)) == (pytest.approx(1e-6 + 4 * 8 / 1e9), 8)
    assert _move(SHIFT, ("layers", 2)) == (pytest.approx(1e-6 + 4 * 8 / 1e9), 8)  # one layer of the two in a block
    assert _move(SHIFT, ("layers", 2), ("units", 2)) == (pytest.approx(1e-6 + 4 * 4 / 1e9), 4)
    # The neighbour is four devices away, in another node.
    assert _move(SHIFT, ("layers", 2), ("units", 4)) == (pytest.approx(1e-5 + 4 * 2 / 1e8), 2)
    # Rows of six devices, of which some lie across the borders of nodes of eight.
    nodes = dataclasses.replace(MACHINE, links=(Link(8, 1e9, 1e-6), Link(24, 1e8, 1e-5)))
    assert _move(SHIFT, ("layers", 2), ("units", 3), ("", 2), machine=nodes)[0] > 1e-5
    assert _move(SHIFT, ("layers", 2), ("units", 3), machine=nodes)[0] < 2e-6  # six of one node
    # On shared cores a reference is handed to every second device, twice.
    assert _move(SHIFT, ("layers", 2), ("units", 2), machine=SHARED)[0] == pytest.approx(2e-5)


@pytest.mark.parametrize("layer", [RENAME, SHIFT], ids=["rename", "shift"])
def test_layers_are_charged(layer):
    configuration = Configuration((("layers", 2), ("units", 2)))
    table = ConfigurationTable.build([configuration], dim_positions(layer), len(layer.dims))
    seconds, elements = _move(layer, *configuration.axes)
    parts = dict(zip(PARTS, layer_parts(layer_signature(layer), table, Reshardings(MACHINE))[:, 0], strict=True))
    assert parts["resharding forward"] == seconds > 0
    paper = dict(zip(PAPER_PARTS, paper_parts(layer_signature(layer), table, Reshardings(MACHINE))[:, 0], strict=True))
    assert paper["moves"] == pytest.approx(2 * MACHINE.balance * elements)


def test_nothing_else_moves():
    position = dim_positions(RENAME)
    same = _layer("rename", ("layers", "units"), ("layers", "units"))
    assert move_of(same.operations[0], position) is None
    whole = _layer("shift", ("layers", "units"), ("layers", "units"))  # its dim is never split
    assert move_of(whole.operations[0], position) is None
    assert np.all(layer_parts(layer_signature(same), ConfigurationTable.build(
        [Configuration((("units", 8),))], position, len(DIMS)), Reshardings(MACHINE))[-3:] == 0)


def test_a_shift_by_nearly_all_hands_on_what_is_left():
    nearly = _layer("shift", ("layers", "units"), ("layers", "units"), shift=("layers", 3))
    assert _move(nearly, ("layers", 2)) == (pytest.approx(1e-6 + 4 * 8 / 1e9), 8)


def test_a_shift_by_nothing_sends_nothing():
    still = _layer("shift", ("layers", "units"), ("layers", "units"), shift=("layers", 0))
    assert _move(still, ("layers", 4)) == (0.0, 0.0)
    assert _move(still, ("layers", 4), machine=SHARED) == (0.0, 0.0)


def test_mesh_tensorflow_itself_has_a_node_for_every_block_that_it_hands_on():
    """Its `receive` is an Identity on each device; ours are references."""
    machine = dataclasses.replace(SHARED, overhead=1.0, links=(Link(16, 1e30, 0.0),))
    table = ConfigurationTable.build([Configuration((("layers", 4),))], dim_positions(SHIFT), len(SHIFT.dims))
    stock, own = (layer_parts(layer_signature(SHIFT), table, Reshardings(machine, stock=stock)).sum()
                  for stock in (True, False))
    assert stock == pytest.approx(4.0)
    assert own == pytest.approx(0.0)


@pytest.mark.parametrize(("offset", "messages"), [(2, 1), (3, 2), (4, 1), (5, 2), (6, 1)])
def test_a_shift_by_more_than_a_block_takes_of_two_devices(offset, messages):
    """Blocks of two: by three, one element is of the next device and one of the one after it."""
    layer = _layer("shift", ("layers", "units"), ("layers", "units"), shift=("units", offset))
    assert _move(layer, ("units", 4)) == (pytest.approx(messages * 1e-6 + 4 * 8 / 1e9), 8)
    assert _move(layer, ("units", 4), machine=SHARED)[0] == pytest.approx(messages * 3e-5)


def test_what_never_runs_moves_nothing():
    """The gradient of a state that is made of a weight without an update."""
    with tf.Graph().as_default():
        net = Builder(tf.float32)
        rows, old, new = dim("batch", 8), dim("old", 8), dim("new", 8)
        x, made = net.input("x", [rows, old]), mtf.Shape([rows, new])
        with one_layer(net.graph):
            first, second = net.variable("first", [old, new]), net.variable("second", [old, new])
            h = mtf.rename_dimension(mtf.einsum([x, first], made), "new", "old")
            y = mtf.einsum([h, second], made)
        gradients = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [first, second])
        mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients[1:], [second.operation])
        graph = export_graph(net.graph)
    moved = [operation.phase for layer in graph.layers for operation in layer.operations
             if move_of(operation, dim_positions(layer))]
    assert moved == ["forward"]  # and not ["forward", "backward"]
