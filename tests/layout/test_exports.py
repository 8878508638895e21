"""Layouts are priced with what stock Mesh-TF splits under them, where our lowering would leave dims whole."""

import pytest

from benchmarks import programs
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.kernels import layout_kernels
from pase_mtf.layout.space import parse_layout
from pase_mtf.machine.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))
BATCH, HEIGHT, WIDTH, CHANNELS = (mtf.Dimension(*dim) for dim in (
    ("batch", 8), ("height", 8), ("width", 8), ("channels", 4)))


def _input(shape):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    return mtf.import_tf_tensor(mesh, tf.ones([dim.size for dim in shape]), mtf.Shape(shape))


def _parts(y, *layouts):
    """What each of these layouts costs, by parts."""
    compared = find_layout(y.graph, 4, [y], FLAT, compare=layouts).compared
    assert not any(cost.problem for cost in compared)
    return [cost.parts for cost in compared]


def _moved(parts):
    return sum(seconds for part, seconds in parts.items() if part.startswith("resharding"))


def test_blocks_that_are_joined_where_they_lie_are_not_moved():
    with tf.Graph().as_default():
        program = programs.build("joined_blocks", "reduced")
        own = ";".join(programs.own_layout("joined_blocks", 8))
        found = find_layout(program.graph, 8, program.outputs, FLAT, compare=[own, "all:8"])
        joined, whole = (cost.parts for cost in found.compared)
        kernels = layout_kernels(program.graph, program.outputs, *parse_layout(own)).parts
    assert "resharding" not in kernels
    assert not _moved(joined)
    assert joined["forward"] == pytest.approx(whole["forward"] / 8, rel=0.01)


@pytest.mark.parametrize("gradient", [False, True])
def test_pooling_splits_the_image(gradient):
    with tf.Graph().as_default():
        x = _input([BATCH, HEIGHT, WIDTH, CHANNELS])
        y = mtf.reduce_sum(mtf.ops.PoolOperation(x, (2, 2), (2, 2), "MAX_2D").outputs[0])
        rows, by_batch = _parts(*(mtf.gradients([y], [x]) if gradient else [y]), "all:4;height:all", "all:4;batch:all")
    assert rows == pytest.approx(by_batch)
    assert not _moved(rows)


def test_a_top_k_splits_what_it_searches_however_short():
    with tf.Graph().as_default():
        found, _ = mtf.top_k(_input([BATCH, WIDTH]), WIDTH, mtf.Dimension("best", 6))
        split, whole = _parts(found, "all:4;width:all", "all:4")
    assert split["forward"] < whole["forward"]


def test_slices_that_were_laid_out_beforehand_are_not_moved():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        slices = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.ones([8, 2]) for _ in range(4)])
        x = mtf.import_laid_out_tensor(mesh, slices, mtf.Shape([BATCH, WIDTH]))
        parts, = _parts(mtf.einsum([x, mtf.get_variable(mesh, "w", mtf.Shape([WIDTH, CHANNELS]))],
                                   mtf.Shape([BATCH, CHANNELS])), "all:4;width:all")
    assert not _moved(parts)


def test_what_strategies_are_of_stays_as_it_is(monkeypatch):
    """A search exports nothing into what strategies are of; where stock splits no more, there is one export."""
    with tf.Graph().as_default():
        graph = programs.build("joined_blocks", "reduced").graph
        before = export_graph(graph)
        find_layout(graph, 8, (), FLAT, exported=before)
        assert export_graph(graph).hash == before.hash
    made = []
    monkeypatch.setattr("pase_mtf.layout.exports.export_for_stock", lambda *given, **named: made.append(given))
    with tf.Graph().as_default():
        find_layout(mtf.tanh(_input([BATCH, WIDTH])).graph, 4, (), FLAT)
    assert not made
