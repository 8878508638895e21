"""Memory of a device, by hand on tiny layers."""

import dataclasses
import itertools

import numpy as np
import pytest
from small_graphs import dense, perceptron

from pase_mtf.cost.copies import moved
from pase_mtf.cost.held import MEMORY_PARTS
from pase_mtf.cost.memory import MemoryModel, strategy_memory
from pase_mtf.graph.computation_graph import (
    ComputationGraph,
    Edge,
    Held,
    HeldCopy,
    Layer,
    LayerOperation,
    Operand,
    Variable,
)
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.strategy.find import find_strategy


def _memory(layer, *axes):
    return strategy_memory(ComputationGraph("one", (layer,), (), 4), [Configuration(axes)])


def test_weights_gradients_activations():
    layer = dense("dense", 32, 64, 128)
    weights, made, gradient = 4 * 64 * 128, 4 * 32 * 128, 4 * 32 * 64
    assert _memory(layer) == {"weights": weights, "optimizer slots": 0, "gradients": weights,
                              "activations": made + gradient, "communication buffers": 0}
    assert _memory(layer, ("batch", 4)) == {
        "weights": weights, "optimizer slots": 0, "gradients": weights, "activations": (made + gradient) / 4,
        "communication buffers": weights}
    assert _memory(layer, ("out", 4))["weights"] == weights / 4
    assert _memory(layer, ("out", 4))["communication buffers"] == gradient
    assert _memory(layer, ("", 4)) == _memory(layer)


def test_slots():
    layer = dense("dense", 32, 64, 128)
    slots = tuple(Variable(f"dense/w_{name}", Operand(("in", "out"), (64, 128)), False) for name in "mv")
    layer = dataclasses.replace(layer, variables=layer.variables + slots)
    assert _memory(layer, ("in", 2))["optimizer slots"] == 2 * 4 * 64 * 128 / 2


def test_without_training_there_are_no_gradients():
    found = _memory(dense("dense", 32, 64, 128, training=False))
    assert found["gradients"] == 0
    assert found["activations"] == 4 * 32 * 128


def test_layers_add_up_at_every_moment():
    """And what arrives for sums of gradients comes on top, of one layer at a time."""
    graph = dataclasses.replace(perceptron(), edges=())
    model, rng = MemoryModel(graph), np.random.default_rng(1)
    summed = 0
    for _ in range(10):
        choices = [enumerate_configurations(layer, 8) for layer in graph.layers]
        chosen = [int(rng.integers(len(each))) for each in choices]
        configurations = [each[index] for each, index in zip(choices, chosen, strict=True)]
        parts, moment = model.peak(configurations)
        assert parts.keys() == set(MEMORY_PARTS)
        added = [sum(model.layer(number, each, when)[index] for number, (each, index) in enumerate(zip(
            choices, chosen, strict=True))) for when in range(2)]
        arrives = max(_memory(layer, *configuration.axes)["communication buffers"] for layer, configuration in zip(
            graph.layers, configurations, strict=True))
        assert max(added) <= sum(parts.values()) <= max(added) + arrives * (1 + 1e-9)
        assert sum(parts.values()) - parts["communication buffers"] <= added[moment] * (1 + 1e-9)
        summed += arrives > 0
    assert summed


def test_layers_that_hold_most_at_different_moments_hold_less_together():
    graph = ComputationGraph("blocks", (_at("large", 1, 64), _at("small", 2, 32)), (), 2)
    alone = [_memory(layer) for layer in graph.layers]
    assert [each["activations"] for each in alone] == [4 * 32 * 64, 4 * 32 * 32]
    together = strategy_memory(graph, [Configuration()] * 2)
    assert sum(together.values()) < sum(sum(each.values()) for each in alone)


def test_more_splits_never_need_more_weights():
    layer = dense("dense", 64, 64, 64)
    for choice in enumerate_configurations(layer, 16):
        split, whole = _memory(layer, *choice.axes), _memory(layer)
        assert all(split[part] <= whole[part] for part in MEMORY_PARTS[:4])


def test_a_copy_is_there_where_another_layer_reads_other_parts():
    graph = perceptron(widths=(64, 128, 32), training=False)
    edges = tuple(dataclasses.replace(edge, held=(HeldCopy(1, 1),)) for edge in graph.edges if edge.phase == "forward")
    graph = dataclasses.replace(graph, edges=edges)
    split, whole = Configuration((("batch", 4),)), Configuration((("", 4),))
    alike, moved, gathered = (strategy_memory(graph, [split, target])["communication buffers"] for target in (
        split, Configuration((("batch", 2),)), whole))
    # The copy, and the pieces that arrive for it.
    assert [alike, moved, gathered] == [0, 4 * 32 * 128, 2 * 4 * 32 * 128]
    # One copy serves all that read the same block of a tensor.
    twice = dataclasses.replace(graph, layers=(*graph.layers, dataclasses.replace(graph.layers[1], name="twin")),
                                edges=(*edges, dataclasses.replace(edges[0], target=2)))
    assert strategy_memory(twice, [split, whole, whole])["communication buffers"] == gathered


def _at(name, moment, hidden=64):
    """A dense layer whose output is there at one moment only."""
    layer = dense(name, 32, 16, hidden, training=False)
    forward, = layer.operations
    return dataclasses.replace(layer, operations=(dataclasses.replace(forward, held=(Held(0, moment, moment),)),))


def test_the_fullest_moment_counts():
    large, small = _at("large", 1, 64), _at("small", 2, 32)
    graph = ComputationGraph("blocks", (large, small), (), 2)
    assert strategy_memory(graph, [Configuration()] * 2)["activations"] == 4 * 32 * 64
    # The larger is split: the other one is what counts.
    split = [Configuration((("batch", 8),)), Configuration()]
    assert strategy_memory(graph, split)["activations"] == 4 * 32 * 32
    assert MemoryModel(graph).fullest == 1


def test_a_gradient_that_is_summed_over_devices_waits():
    layer = dense("dense", 32, 64, 128)
    *others, gradient, update = layer.operations
    gradient = dataclasses.replace(gradient, held=(Held(0, 1, 1, waits_until=2),))
    later = _at("later", 2, 4096)
    layer = dataclasses.replace(layer, operations=(*others, gradient, update))
    graph = ComputationGraph("waits", (layer, later), (), 5)
    done, waits = (strategy_memory(graph, [Configuration(((dim, 4),)), Configuration()])
                   for dim in ("out", "batch"))
    assert done["gradients"] == 0
    assert waits["gradients"] == 4 * 64 * 128


def test_what_an_update_makes_of_a_gradient_that_waits_comes_after_it():
    """The share of an update layer of its own, and the new value, which comes back whole."""
    layer, weights = dense("dense", 32, 64, 128), Operand(("in", "out"), (64, 128))
    *others, gradient, _ = layer.operations
    gradient = dataclasses.replace(gradient, held=(Held(0, 1, 1, waits_until=1),), pending_outputs=(0,))
    scaled = LayerOperation(3, "scaled", "ScalarMultiplyOperation", "update", "pointwise", 1.0, ("in", "out"),
                            (weights,), (weights,), held=(Held(0, 1, 1, waits_until=2),))
    update = Layer("update", "update", {"in": 64, "out": 128}, ("in", "out"), (scaled,), ())
    ends = {"phase": "update", "shape": (64, 128), "itemsize": 4, "source_dims": ("in", "out"),
            "target_dims": ("in", "out")}
    graph = ComputationGraph("zero", (dataclasses.replace(layer, operations=(*others, gradient)), update), (
        Edge(0, 1, "gradient", **ends, pending=("batch",)),
        Edge(1, 0, "updated", **ends, held=(HeldCopy(1, 1),))), 4)
    shards = Configuration((("in", 4),))
    waits, alone = (sum(strategy_memory(graph, [Configuration(((dim, 4),)), shards]).values())
                    for dim in ("batch", "out"))
    whole, batch = 4 * 64 * 128, 4 * 32 * (128 + 64) / 4
    # The weights, their new value, what it is put together from, and a quarter that was made of the gradient: more than
    # the weights, the gradient, and what arrives for it, the moment before.
    assert waits == 3 * whole + whole / 4 > 3 * whole + batch
    # Without a sum all is there at once: a quarter of the weights, of their gradient, of what is made of it, of what
    # comes back, and of the pieces that this is put together from; of what is made forward; and a gradient of the input
    # that is still to be summed, twice.
    assert alone == 5 * whole / 4 + 4 * 32 * 128 / 4 + 2 * 4 * 32 * 64


def test_the_last_of_several_devices_writes_over_what_one_made_for_all():
    graph = perceptron(widths=(64, 128, 32), training=False)
    edge = dataclasses.replace(graph.edges[0], held=(HeldCopy(1, 1, shared_until=2),))
    graph = ComputationGraph("shared", (*graph.layers, _at("later", 2, 4096)), (edge,), 3)
    split, whole = Configuration((("batch", 4),)), Configuration((("", 4),))

    def buffers(target, shared):
        return strategy_memory(graph, [split, target, whole], shared)["communication buffers"]

    assert buffers(whole, shared=True) == 4 * 32 * 128
    assert buffers(whole, shared=False) == 0  # each has a copy, and writes over its own
    assert buffers(Configuration((("width1", 4),)), shared=True) == 0  # each has another part


def _copied_until_later():
    """A perceptron whose hidden tensor its layer needs at moment 1, its reader until 3, when another is there too."""
    plain = perceptron(widths=(64, 128, 32), training=False)
    first, second = plain.layers
    first = dataclasses.replace(first, operations=(dataclasses.replace(
        first.operations[0], held=(Held(0, 1, 3, own_until=1),)),))
    edge = dataclasses.replace(plain.edges[0], held=(HeldCopy(1, 3, made=1),))
    return ComputationGraph("copies", (first, second, _at("later", 3, 4096)), (edge,), 3)


def test_what_others_have_as_copies_is_there_until_its_own_layer_is_done():
    graph = _copied_until_later()
    split, whole, later = Configuration((("batch", 4),)), Configuration((("", 4),)), 4 * 32 * 4096
    alike, copied = (strategy_memory(graph, [split, target, whole]) for target in (split, whole))
    assert (alike["activations"], alike["communication buffers"]) == (later + 4 * 32 * 128 / 4, 0)
    assert (copied["activations"], copied["communication buffers"]) == (later, 4 * 32 * 128)
    # What a search adds up counts it as its reader needs it, however its maker holds it.
    model = MemoryModel(graph)
    for source, target in itertools.product((split, whole), repeat=2):
        chosen = [source, target, whole]
        added = sum(model.layer(number, [each], 3)[0] for number, each in enumerate(chosen))
        # Slices of the first dim show the block of which they are, all of it.
        assert added <= sum(model.peak(chosen)[0].values())


def test_a_limit_is_kept_where_another_moment_is_the_fullest():
    """What adds up for the search is the moment of the most bytes unsplit; the answer is checked in full."""
    graph = ComputationGraph("blocks", (_at("large", 1, 64), _at("small", 2, 60)), (), 2)
    needs = sorted({sum(strategy_memory(graph, chosen).values()) for chosen in itertools.product(
        *(enumerate_configurations(layer, 4) for layer in graph.layers))})
    free = find_strategy(graph, 4, "h100", simulate=0)
    for limit in needs[len(needs) // 2:]:
        found = find_strategy(graph, 4, "h100", memory_limit=limit, simulate=0)
        assert found.memory_bytes <= limit * (1 + 1e-9)
        assert found.seconds >= free.seconds * (1 - 1e-9)


def test_devices_of_one_host_add_up_where_a_part_lies():
    """And that takes more only where what is made of the sum lies beside it."""
    layer = dense("dense", 32, 64, 128, training=False)

    def buffers(shared, **held):
        operation = dataclasses.replace(layer.operations[0], held=(Held(0, 1, 2, **held),))
        graph = ComputationGraph("sum", (dataclasses.replace(layer, operations=(operation,)), _at("later", 2, 4096)),
                                 (), 2)
        return strategy_memory(graph, [Configuration((("in", 4),)), Configuration((("", 4),))], shared)

    made, later = 4 * 32 * 128, 4 * 32 * 4096
    assert buffers(False)["communication buffers"] == 0  # when most is there what arrived is gone
    assert buffers(True, shared_until=2, shared_from=2) == {
        "weights": 4 * (64 * 128 / 4 + 16 * 4096), "optimizer slots": 0, "gradients": 0,
        "activations": made + later, "communication buffers": made}
    assert buffers(True, shared_until=1, shared_from=1)["communication buffers"] == 0


def test_what_the_last_reader_writes_in_a_copys_place_counts_instead():
    graph = perceptron(widths=(64, 128, 128), training=False)
    first, second = graph.layers
    split = Configuration((("batch", 4),))

    def buffers(taken, target):
        edge = dataclasses.replace(graph.edges[0], held=(HeldCopy(1, 1, taken=taken),))
        return strategy_memory(ComputationGraph("taken", (first, second), (edge,), 2),
                               [split, target])["communication buffers"]

    whole = Configuration((("", 4),))
    assert buffers(-1, whole) == 2 * 4 * 32 * 128  # with the pieces that it is put together from
    assert buffers(1, whole) == 4 * 32 * 128


def test_what_a_copy_is_put_together_from():
    edge, whole = perceptron(widths=(64, 128, 32), training=False).edges[0], 4 * 32 * 128

    def found(source, target, **shared):
        one = moved(edge, Configuration(source), Configuration(target), **{"shared": True, "in_place": True, **shared})
        return one.nbytes, one.meanwhile, one.alone

    rows, columns, both = (("batch", 4),), (("width1", 4),), (("batch", 2), ("width1", 2))
    assert found(rows, columns) == (whole / 4, whole / 4, True)  # a piece of every device's block
    assert found(columns, rows) == (whole / 4, 0, True)  # rows of it are shown
    assert found(both, (("", 4),)) == (whole, whole, True)  # concatenated along one dim, then along the other
    # Devices with memory of their own are sent the pieces; those of one host read them where they lie.
    assert found(rows, (("", 4),)) == (whole, 0, True)
    assert found(rows, (("", 4),), shared=False) == (whole, whole, True)
    # The middle third lies in two halves: both pieces arrive.
    assert found((("batch", 2),), (("batch", 3),), shared=False) == (whole / 3, whole / 3, True)
    assert found((("batch", 2),), (("batch", 4),), shared=False) == (whole / 2, 0, False)
    # Of thirds that become halves the middle one is sliced.
    assert found((("width1", 3),), (("width1", 2),)) == (whole / 2, whole / 3, True)
    assert found((("width1", 4),), (("width1", 2),)) == (whole / 2, 0, True)
    assert found(rows, rows) == (0, 0, True)
    # One device slices for all: what it has made for them is there as long as its own slice.
    assert found((), columns) == (whole, 0, False)
    assert found((), columns, shared=False) == (whole / 4, whole, True)
    assert found(rows, (("batch", 8),)) == (0, 0, False)
    assert found(rows, (("batch", 8),), in_place=False) == (whole / 8, 0, False)


def test_slices_of_the_first_dim_show_the_tensor():
    """They keep it, whole, where it is known until when it is there otherwise: on every device that slices its own."""
    graph = _copied_until_later()
    whole, rows, later = Configuration((("", 4),)), Configuration((("batch", 4),)), 4 * 32 * 4096
    for shared in (True, False):
        found = strategy_memory(graph, [whole, rows, whole], shared)
        assert (found["activations"], found["communication buffers"]) == (later + 4 * 32 * 128, 0)
    # Of a sum each has made its piece.
    (edge,) = graph.edges
    summed = dataclasses.replace(edge, pending=("width0",))
    parts = Configuration((("width0", 4),))
    assert moved(summed, parts, rows, shared=False, in_place=True).nbytes == 4 * 32 * 128 / 4


def test_the_middle_third_of_two_halves_lies_beside_its_pieces_on_one_host():
    edge, whole = perceptron(widths=(64, 128, 32), training=False).edges[0], 4 * 32 * 128
    for name, held in (("width1", whole / 2 + whole / 3), ("batch", whole / 3)):  # of the first dim pieces are shown
        one = moved(edge, Configuration(((name, 2),)), Configuration(((name, 3),)), shared=True, in_place=True)
        assert one.nbytes + one.meanwhile == pytest.approx(held)


def test_slices_of_the_first_dim_are_copies_where_rows_are_not_aligned():
    """Rows of 200 bytes: one device cuts all four, as it cuts columns."""
    edge, whole = perceptron(widths=(64, 50, 32), training=False).edges[0], 4 * 32 * 50
    for shared, held in ((True, (whole, 0.0)), (False, (whole / 4, whole))):
        one = moved(edge, Configuration(), Configuration((("batch", 4),)), shared=shared, in_place=True)
        assert (one.nbytes, one.meanwhile) == held


def test_rows_of_anothers_block_arrive():
    """Device 1 has the second half of the batch, and needs the second quarter."""
    edge, whole = perceptron(widths=(64, 128, 32), training=False).edges[0], 4 * 32 * 128
    quarters = Configuration((("batch", 4),))
    for axes, least in (((("batch", 2), ("", 2)), 0.0), ((("", 2), ("batch", 2)), whole / 4)):
        one = moved(edge, Configuration(axes), quarters, shared=False, in_place=True)
        assert one.nbytes >= least
        assert (one.nbytes > 0) == (least > 0)


def test_what_is_no_sum_as_its_dims_are_whole_is_shown():
    edge = dataclasses.replace(perceptron(widths=(64, 128, 32), training=False).edges[0], pending=("width0",))
    one = moved(edge, Configuration((("", 4),)), Configuration((("batch", 4),)), shared=False, in_place=True)
    assert one.nbytes == 0.0
