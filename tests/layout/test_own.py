"""The layout that the program itself names is an arm, wherever it names it."""

import pytest

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import UsageError
from pase_mtf.layout.capture import capture_graph
from pase_mtf.layout.find import find_layout
from pase_mtf.machine.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))


class Noted(mtf.Operation):
    """An operation class that nobody knows: it passes on what it is given."""

    def __init__(self, x):
        super().__init__([x], name="noted")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        return grad_ys

    def lower(self, lowering):
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            tf.identity, lowering.tensors[self.inputs[0]]))


def graph_of(unknown=False):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, width, hidden = (mtf.Dimension(*dim) for dim in (("batch", 64), ("width", 8), ("hidden", 16)))
    x = mtf.import_tf_tensor(mesh, tf.ones([64, 8]), [batch, width])
    w = mtf.get_variable(mesh, "w", [width, hidden])
    y = mtf.einsum([x, w], [batch, hidden])
    loss = mtf.reduce_sum(mtf.square(Noted(y).outputs[0] if unknown else y))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], [w]), [w.operation])
    return graph, mesh, loss


def program(mesh_shape="a:2;b:2", layout="batch:a;hidden:b;nothing:b"):
    graph, mesh, loss = graph_of()
    shape = mtf.convert_to_shape(mesh_shape)
    impl = placement_mesh_impl.PlacementMeshImpl(shape, layout, [f"/device:CPU:{n}" for n in range(shape.size)])
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(loss)


def from_flags(mesh_shape=None, layout=None):
    return program(mesh_shape or "a:2;b:2", layout or "batch:a;hidden:b")


@pytest.mark.parametrize("build", [program, from_flags, lambda: program()])
def test_it_is_taken_from_the_program(build):
    found = find_layout(build, 4, machine=FLAT)
    assert (found.own.mesh_shape, found.own.layout_rules) == ("a:2;b:2", "batch:a;hidden:b")
    assert not found.own.problem
    assert found.seconds <= found.own.seconds
    assert "own " in str(found)


def test_it_is_taken_from_a_captured_graph():
    with tf.Graph().as_default():
        with capture_graph() as captured:
            program()
        found = find_layout(captured.graph, 4, machine=FLAT)
    assert found.own.layout_rules == "batch:a;hidden:b"


def test_that_it_is_read_is_no_question_of_the_programs():
    """The program looks at how many devices there are, and lowers: one graph is that of every layout."""
    found = find_layout(program, 4, machine=FLAT)
    assert found.search["builds"] == 1
    assert found.search["optimal"]
    assert (found.own.mesh_shape, found.own.layout_rules) == ("a:2;b:2", "batch:a;hidden:b")


@pytest.mark.parametrize("build", [lambda: graph_of()[0], lambda mesh_shape, layout: graph_of()[0],
                                   lambda mesh_shape="", layout="": graph_of()[0]])
def test_a_program_that_names_none_has_none(build):
    assert find_layout(build, 4, machine=FLAT).own is None


def test_one_for_other_devices_is_told():
    found = find_layout(program, 8, machine=FLAT)
    assert found.own is None
    assert any("a:2;b:2 is for 4 devices" in note for note in found.notes)


def test_one_that_no_string_says_is_told():
    def build():
        graph, mesh, _ = graph_of()
        impl = placement_mesh_impl.PlacementMeshImpl(
            mtf.Shape([mtf.Dimension("pod.x", 4)]), mtf.LayoutRules([("batch", "pod.x")]), [""] * 4)
        return mtf.Lowering(graph, {mesh: impl})
    found = find_layout(build, 4, machine=FLAT)
    assert found.own is None
    assert found.layout_rules
    assert any("own layout pod.x:4 has names that no string can give" in note for note in found.notes)


def lowered_by_itself(mesh_shape="all:4", layout="batch:all"):
    graph, mesh, loss = graph_of(unknown=True)
    impl = placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * 4)
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(loss)


@pytest.mark.parametrize("build", [lowered_by_itself, lambda: lowered_by_itself()])
def test_what_lowers_is_never_called_illegal_and_the_answer_is_never_dearer(build):
    found = find_layout(build, 4, machine=FLAT)
    assert not found.own.problem
    assert found.seconds <= found.own.seconds
    assert found.layout_rules


def wrong(mesh_shape="a:2;b:2", layout="batch:a;hidden:a"):
    return program(mesh_shape, layout)


def test_what_does_not_lower_is_told():
    found = find_layout(wrong, 4, machine=FLAT)
    assert "batch and hidden" in found.own.problem
    assert "does not lower" in str(found)


def test_rules_for_axes_that_the_mesh_lacks_are_left_out_as_mesh_tensorflow_does():
    def build(mesh_shape="all:4", layout="batch:all,vocab:model,heads:model"):
        return graph_of()[0]
    found = find_layout(build, 4, machine=FLAT)
    assert (found.own.mesh_shape, found.own.layout_rules) == ("all:4", "batch:all")
    assert found.seconds <= found.own.seconds


def test_what_the_caller_wants_of_two_dims_says_nothing_of_values():
    found = find_layout(program, 4, machine=FLAT, together=[("batch", "width")])
    assert found.own.problem == "dim batch and width: they are to share an axis"


def test_rules_in_a_dict_split_nothing_as_in_mesh_tensorflow():
    """It makes a set of the keys, none of which is a pair."""
    def build():
        graph, mesh, loss = graph_of()
        impl = placement_mesh_impl.PlacementMeshImpl("all:4", {"batch": "all"}, [""] * 4)
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(loss)
    found = find_layout(build, 4, machine=FLAT)
    assert (found.own.mesh_shape, found.own.layout_rules, found.own.problem) == ("all:4", "", "")


def test_a_mesh_with_two_axes_of_one_name():
    """Mesh-TF makes one, and refuses it at the first tensor with a rule for that axis."""
    shape = mtf.Shape([mtf.Dimension("a", 2), mtf.Dimension("a", 4)])
    with pytest.raises(UsageError, match="an axis stands twice"):
        find_layout(lambda: graph_of()[0], 8, machine=FLAT, mesh_shape=shape)

    def build():
        graph, mesh, _ = graph_of()
        return mtf.Lowering(graph, {mesh: placement_mesh_impl.PlacementMeshImpl(shape, "batch:a", [""] * 8)})
    assert find_layout(build, 8, machine=FLAT).own is None
