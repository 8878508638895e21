"""What is asked of a search for a layout: looked at before it begins, and shown beside what it found."""

import math

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.graph import GraphSearch
from pase_mtf.layout.space import rules_text
from pase_mtf.machine.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e9, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))


def perceptron():
    """Two dense layers, trained."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, narrow, wide = (mtf.Dimension(name, size) for name, size in (("batch", 8), ("narrow", 8), ("wide", 16)))
    x = mtf.import_tf_tensor(mesh, tf.ones([8, 8]), [batch, narrow])
    w = [mtf.get_variable(mesh, f"w{number}", dims, initializer=tf.ones_initializer())
         for number, dims in enumerate(([narrow, wide], [wide, narrow]))]
    y = mtf.relu(mtf.einsum([x, w[0]], [batch, wide]))
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([y, w[1]], [batch, narrow])))
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(
        mtf.gradients([loss], w), [variable.operation for variable in w])
    return graph, loss, updates


def test_what_is_to_be_compared_with_is_looked_at_before_the_search(monkeypatch):
    monkeypatch.setattr(GraphSearch, "candidates", lambda *_: pytest.fail("goes on to search"))
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        with pytest.raises(UsageError, match="layout all:4;bacth:all: 'bacth' is no dim of the graph; did you mean"):
            find_layout(graph, 4, [loss], FLAT, compare=["all:4;bacth:all"])


def test_a_wrong_limit_is_told_before_the_machine_is_measured(monkeypatch):
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        much = find_layout(graph, 4, [loss], FLAT, memory_limit=10 ** 400, time_limit=10 ** 400,
                           measure_seconds=10 ** 400)
        assert much.best == find_layout(graph, 4, [loss], FLAT, memory_limit=None).best
    monkeypatch.setattr("pase_mtf.layout.find.load_machine", lambda *_: pytest.fail("measures a machine"))
    for limit in (-1, 0.0, math.nan):
        with pytest.raises(UsageError, match=r"find_layout: memory_limit=.*: give a positive number of bytes"):
            find_layout(graph, 4, [loss], "local", memory_limit=limit)


def test_what_a_search_found_is_shown_beside_a_better_one_that_is_given(monkeypatch):
    candidates, found = GraphSearch.candidates, []

    def but_the_best(self, count):
        every = candidates(self, count + 9)
        found[:] = [one for one in every if one.cost > every[0].cost * (1 + 1e-9)][:count]
        return list(found)
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        best = find_layout(graph, 4, [loss], FLAT).best
        monkeypatch.setattr(GraphSearch, "candidates", but_the_best)
        layout = find_layout(graph, 4, [loss], FLAT, compare=[f"{best.mesh_shape};{best.layout_rules}"], alternatives=2)
    assert layout.seconds == pytest.approx(best.seconds)
    assert [(one.mesh_shape, one.layout_rules) for one in layout.alternatives] == [
        (str(one.mesh), rules_text(one.rules)) for one in found[:2]]


def test_what_is_explained_is_one_name():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 4, [loss], FLAT)
        for wrong in (["batch", "wide"], {"batch"}, None, 3, mtf.Dimension("batch", 8)):
            with pytest.raises(UsageError, match=r"^explain: dim=.*is no str"):
                found.explain(wrong)
    with pytest.raises(UsageError, match=r"^format: style=.*is no str"):
        found.format(["flags"])


def test_a_byte_above_the_limit_is_no_rounding(monkeypatch):
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        search = find_layout(graph, 4, [loss], FLAT)._search
    monkeypatch.setattr(search.costs, "peak_memory", lambda *layout: (2e9, 0))
    for limit, fits in ((2e9, True), (2e9 - 1, False)):
        search.memory_limit = limit
        assert search.fits(search.meshes[0], {}) is fits


def test_what_is_given_with_more_axes_than_are_searched_is_not_proven():
    """Of five dims of size 2 over 16 devices four can be split: those that were given, or better ones."""
    def build():
        graph = mtf.Graph()
        mesh, dims = mtf.Mesh(graph, "mesh"), [mtf.Dimension(name, 2) for name in "abcde"]
        small, large = (mtf.import_tf_tensor(mesh, tf.zeros([2, 2, 2, 2, odd.size]), mtf.Shape([*four, odd]))
                        for four, odd in ((dims[:4], mtf.Dimension("few", 15)),
                                          (dims[1:], mtf.Dimension("many", 1501))))
        return graph, [mtf.square(small), mtf.square(large)]
    given = find_layout(build, 16, machine=FLAT, compare=["w:2;x:2;y:2;z:2;a:w;b:x;c:y;d:z"])
    assert given.layout_rules == "a:w;b:x;c:y;d:z"
    better = find_layout(build, 16, machine=FLAT, mesh_shape="w:2;x:2;y:2;z:2")
    assert better.search["optimal"]
    assert better.seconds < given.seconds
    assert not given.search["optimal"]
    assert "proven optimal" not in str(given)


def test_a_dim_that_no_rule_can_mention_costs_no_program_the_answer():
    def build(mesh_shape, layout):
        graph = mtf.Graph()
        x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones([8, 8]),
                                 mtf.Shape([mtf.Dimension("my batch", 8), mtf.Dimension("narrow", 8)]))
        return graph, [mtf.reduce_sum(mtf.square(x))]
    found = find_layout(build, 4, machine=FLAT, compare=[("all:4", {"my batch": "all"})])
    assert "layout rules cannot mention" in found.compared[0].problem
    assert not found.best.problem


def test_a_dim_of_another_model_that_no_rule_can_mention_is_a_note():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 4, [loss], FLAT, compare=[("all:4", {"batch": "all", "their dim": "all"})])
    assert (found.compared[0].layout_rules, found.compared[0].problem) == ("batch:all", "")
    assert any("'their dim' is no dim of the graph" in note for note in found.notes)


def test_axes_over_which_nothing_is_split_are_one_wherever_they_stand():
    def build(mesh_shape, layout):
        graph = mtf.Graph()
        shape = mtf.Shape([mtf.Dimension(name, size) for name, size in (("a", 2), ("b", 2), ("odd", 1501))])
        return graph, [mtf.square(mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.zeros([2, 2, 1501]), shape))]
    found = find_layout(build, 16, machine=FLAT, compare=["w:2;x:2;y:2;z:2;a:x;b:z"])
    assert found.layout_rules == "a:x;b:z"
    assert found.search["optimal"]
