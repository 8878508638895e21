"""Programs whose graph depends on mesh and layout."""

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.layout import find_layout
from pase_mtf.layout_space import parse_mesh_shape, parse_rules
from pase_mtf.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))


def dense(batch=8, hidden=16):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = mtf.Dimension("batch", batch), mtf.Dimension("features", 8), mtf.Dimension("hidden", hidden)
    x = mtf.import_tf_tensor(mesh, tf.ones([batch, 8]), dims[:2])
    w = mtf.get_variable(mesh, "w", dims[1:], initializer=tf.ones_initializer())
    loss = mtf.reduce_sum(mtf.einsum([x, w], [dims[0], dims[2]]))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], [w]), [w.operation])
    return graph, [loss]


def test_a_function_that_takes_nothing_is_called_once():
    calls = []

    def build_graph():
        calls.append(1)
        return dense()
    found = find_layout(build_graph, 4, machine=FLAT)
    assert len(calls) == 1
    assert mtf.convert_to_shape(found.mesh_shape).size == 4


def test_a_graph_alone_will_do():
    assert find_layout(lambda: dense()[0], 4, machine=FLAT).devices == 4


def test_rebuilt_until_stable():
    """The number of experts is the number of parts of the batch."""
    seen = []

    def build_graph(mesh_shape, layout):
        seen.append((mesh_shape, layout))
        mesh = parse_mesh_shape(mesh_shape)
        rules = parse_rules(layout, mesh)
        parts = dict(mesh.axes).get(rules.get("batch"), 1)
        return dense(hidden=16 * parts)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert seen[-1] == (found.mesh_shape, found.layout_rules)
    assert len(seen) >= 2
    assert not found.notes


def test_what_never_is_stable_is_priced_on_its_own_graph():
    """Whichever dim the layout splits, the next graph has it indivisible."""
    seen = []

    def build_graph(mesh_shape="", layout=""):
        seen.append(layout)
        return dense(batch=6 if "batch" in layout else 8, hidden=9 if "hidden" in layout else 16)
    with pytest.raises(InfeasibleError, match=r"changes the graph|no dim can be split|no layout lowers"):
        find_layout(build_graph, 4, machine=FLAT, fixed={"features": None}, mesh_shape="all:4")
    assert 2 <= len(seen) <= 12


def test_the_best_of_unstable_choices_is_taken():
    """Whichever dim the layout splits, the other one looks better in the next graph."""
    def build_graph(mesh_shape="", layout=""):
        return dense(batch=64, hidden=16) if "hidden" in layout else dense(batch=8, hidden=64)
    found = find_layout(build_graph, 4, machine=FLAT, mesh_shape="all:4")
    rules = parse_rules(found.layout_rules, parse_mesh_shape(found.mesh_shape))
    assert rules
    if found.notes:
        assert "would rather have another" in found.notes[-1]


def test_a_function_that_lowers_is_stopped_there():
    def build_graph():
        graph, _ = dense()
        mtf.Lowering(graph, {})
        raise AssertionError("went on")
    assert find_layout(build_graph, 4, machine=FLAT).devices == 4


def test_wrong_functions_are_told():
    with pytest.raises(UsageError, match="returned int; return an"):
        find_layout(lambda: 3, 4, machine=FLAT)
    with pytest.raises(UsageError, match="needs arguments"):
        find_layout(lambda params: dense(), 4, machine=FLAT)
