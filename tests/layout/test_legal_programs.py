"""What find_layout says about operations that it cannot know, and about graphs that were laid out beforehand."""

import numpy as np
import pytest
from harness import device_names, session
from nets import Builder, dim

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import InfeasibleError
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.legality import StockLegality
from pase_mtf.layout.space import MeshShape, parse_mesh_shape, parse_rules
from pase_mtf.layout.verify import Verifier
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.operations.registry import register_operation

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))


class Reversed(mtf.Operation):
    """Reverses the last dim: a user's operation."""

    def __init__(self, x):
        super().__init__([x], name="reversed")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            lambda t: tf.reverse(t, [-1]), lowering.tensors[self.inputs[0]]))


class Picky(mtf.Operation):
    """Claims what it cannot do: its lowering fails where rows are split."""

    def __init__(self, x):
        super().__init__([x], name="picky")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        impl = lowering.mesh_impl(self)
        if impl.tensor_dimension_to_mesh_axis(dim("batch", 0)) is not None:
            raise ValueError("no rows")
        lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(tf.identity, lowering.tensors[self.inputs[0]]))


class Hopeless(Picky):

    def lower(self, lowering):
        raise ValueError("never")


class TransposedSquare(mtf.ops.EinsumOperation):
    """Inherits the lowering of an einsum: follows its rule."""


def program(b, operation):
    batch, features, hidden = dim("batch", 64), dim("features", 32), dim("hidden", 64)
    x = b.input("x", [batch, features])
    y = mtf.einsum([x, b.input("w", [features, hidden])], [batch, hidden])
    return mtf.reduce_sum(mtf.tanh(operation(y).outputs[0]))


def rules_of(found):
    return parse_rules(found.layout_rules, parse_mesh_shape(found.mesh_shape))


def test_what_is_registered_of_an_operation_counts_and_not_what_trying_it_shows():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        loss = program(b, Reversed)
        found = find_layout(b.graph, 4, [loss], FLAT)
        assert "batch" in rules_of(found)
        assert "hidden" not in rules_of(found)
        assert not found.data_parallel.problem
        register_operation(Reversed, splittable=lambda operation: [])
        found = find_layout(b.graph, 4, [loss], FLAT)
        assert not {"batch", "hidden"} & set(rules_of(found))
        assert "registered as unable" in found.data_parallel.problem
        register_operation(Reversed, splittable=lambda operation: ["batch"])
        found = find_layout(b.graph, 4, [loss], FLAT)
        assert "batch" in rules_of(found)
        assert not found.data_parallel.problem


def test_what_does_not_lower_after_all_is_left_for_the_next_best():
    register_operation(Picky, splittable=lambda operation: ["batch", "hidden"])
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        loss = program(b, Picky)
        found = find_layout(b.graph, 4, [loss], FLAT)
        assert "batch" not in rules_of(found)
        assert "hidden" in rules_of(found)
        assert any("came first" in note and "operation picky, dim batch" in note and "no rows" in note
                   for note in found.notes)
        assert "no rows" in found.data_parallel.problem


def test_if_nothing_lowers_operation_and_dim_are_named():
    register_operation(Hopeless, splittable=lambda operation: ["batch", "hidden"])
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        loss = program(b, Hopeless)
        with pytest.raises(InfeasibleError, match=(
                r"no layout lowers, not even where nothing is split: operation picky: .*never")):
            find_layout(b.graph, 4, [loss], FLAT)


def test_a_subclass_follows_its_class_if_it_keeps_its_lowering():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = b.input("x", [dim("x", 4), dim("y", 4)])
        made = TransposedSquare([x], mtf.Shape([dim("y", 4), dim("x", 4)])).outputs[0]
        assert StockLegality(b.graph, [made]).dims() == ("x", "y")


@pytest.mark.parametrize(("assigned", "told", "legal"), [
    (None, False, False), (None, True, False), ("weights", False, True), ("weights", True, False),
    ("averages", False, False), ("averages", True, False)])
def test_gradients_that_may_be_exported_are_read(assigned, told, legal):
    """A program that comes to mtf.Lowering tells no outputs; one that assigns nothing there, or nothing that is
    trained, is for what it exports."""
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        batch, features = dim("batch", 8), dim("features", 8)
        w, x = b.variable("w", [features]), b.input("x", [batch, features])
        y = mtf.slicewise(lambda x, w: x * w, [x, w], mtf.Shape([batch, features]), tf.float32, [batch])
        gradients = mtf.gradients([mtf.reduce_sum(y)], [w])
        if assigned:
            kept = mtf.get_variable(b.mesh, "kept", mtf.Shape([]), trainable=assigned == "weights")
            mtf.assign(kept.operation, kept + 1.0)
        problem = StockLegality(b.graph, gradients if told else []).problem({"batch": 0}, (4,))
        assert (problem is None) == legal, problem


def laid_out(b, devices, shape):
    slices = [tf.ones(shape, tf.float32) for _ in range(devices)]
    tensor = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor(slices)
    return mtf.import_laid_out_tensor(b.mesh, tensor, mtf.Shape([dim("batch", 64), dim("features", 32)]))


def test_imported_slices_keep_their_layout():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = laid_out(b, 4, [32, 32])
        w = b.input("w", [dim("features", 32), dim("hidden", 64)])
        y = mtf.einsum([x, w], [dim("batch", 64), dim("hidden", 64)])
        found = find_layout(b.graph, 4, [y], FLAT)
        mesh, rules = parse_mesh_shape(found.mesh_shape), rules_of(found)
        assert dict(mesh.axes)[rules["batch"]] == 2
        assert "features" not in rules
        with pytest.raises(InfeasibleError, match=r"operation import, dim batch.*imports 4 slices.*8 devices"):
            find_layout(b.graph, 8, [y], FLAT)
        with pytest.raises(InfeasibleError, match=r"operation import, dim batch.*in 2 shards"):
            find_layout(b.graph, outputs=[y], machine=FLAT, mesh_shape="all:4")


def _cut_for(b, mesh_shape, rules):
    """Slices of one tensor, cut for a layout; where every one begins, by device."""
    shape = mtf.Shape([dim("batch", 12), dim("features", 12)])
    mesh = mtf.convert_to_shape(mesh_shape)
    impl = placement_mesh_impl.PlacementMeshImpl(mesh, mtf.convert_to_layout_rules(rules), [""] * mesh.size)
    slices = impl.LaidOutTensor(impl.make_slices(tf.ones([12, 12]), shape))
    begins = [impl.slice_begin(shape, device) for device in range(mesh.size)]
    return mtf.import_laid_out_tensor(b.mesh, slices, shape), begins


@pytest.mark.parametrize(("mesh_shape", "rules"), [
    ("a:3;c:4", "batch:a;features:c"), ("a:4;c:3", "features:a;batch:c"), ("a:6;c:2", "batch:c")])
def test_imported_slices_keep_their_order(mesh_shape, rules):
    """Slices of the same shapes lie in another order where the axes do: then devices would hold another's slice."""
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x, wanted = _cut_for(b, mesh_shape, rules)
        found = find_layout(b.graph, 12, [mtf.reduce_sum(mtf.square(x))], FLAT)
        for layout in (found.best, *found.alternatives):
            mesh = mtf.convert_to_shape(layout.mesh_shape)
            impl = placement_mesh_impl.PlacementMeshImpl(
                mesh, mtf.convert_to_layout_rules(layout.layout_rules), [""] * mesh.size)
            assert [impl.slice_begin(x.shape, device) for device in range(12)] == wanted


def test_imported_slices_of_two_meshes_are_refused():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x, _ = _cut_for(b, "a:3;c:4", "batch:a")
        y, _ = _cut_for(b, "c:4;a:3", "batch:a")
        with pytest.raises(InfeasibleError, match=r"dim batch.*1 device from one to the next; those of import, 4"):
            find_layout(b.graph, 12, [mtf.reduce_sum(x * y)], FLAT)


def test_imported_slices_in_the_order_of_no_mesh_are_refused():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        whole, shape = tf.ones([12, 12]), mtf.Shape([dim("batch", 12), dim("features", 12)])
        slices = [tf.slice(whole, [3 * place, 0], [3, 12]) for place in (1, 0, 2, 3)]
        x = mtf.import_laid_out_tensor(
            b.mesh, placement_mesh_impl.PlacementMeshImpl.LaidOutTensor(slices), shape)
        with pytest.raises(InfeasibleError, match="in the order of no mesh"):
            find_layout(b.graph, 4, [mtf.reduce_sum(x)], FLAT)


def test_the_users_graph_is_left_as_it_is():
    with tf.Graph().as_default() as tf_graph:
        b = Builder(tf.float32)
        batch, features = dim("batch", 8), dim("features", 8)
        rate = tf.constant(0.5)
        w = b.variable("w", [features, dim("hidden", 8)])
        x = b.input("x", [batch, features]) * rate
        y = mtf.slicewise(lambda t: t * rate, [mtf.einsum([x, w], [batch, dim("hidden", 8)])],
                          splittable_dims=[batch, dim("hidden", 8)])
        mtf.assign(w.operation, w * 2.0)
        names = [operation.name for operation in tf_graph.get_operations()]
        operations, inputs = list(b.graph.operations), [op.inputs for op in b.graph.operations]
        with pytest.warns(UserWarning, match="cannot be traced"):  # it reads a tensor of the user's own graph
            find_layout(b.graph, 4, [y], FLAT)
        assert [operation.name for operation in tf_graph.get_operations()] == names
        assert b.graph.operations == operations
        assert [op.inputs for op in b.graph.operations] == inputs
        impl = placement_mesh_impl.PlacementMeshImpl("a:2", "batch:a", device_names(2))
        lowering = mtf.Lowering(b.graph, {b.mesh: impl})
        value = lowering.export_to_tf_tensor(y)
        with session(2) as run:
            run.run(tf.global_variables_initializer())
            run.run(lowering.copy_masters_to_slices())
            assert np.isfinite(run.run(value)).all()


def test_alike_operations_are_told_apart():
    """The cache of the lowering for shapes: equal shapes, different functions."""
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = b.input("x", [dim("x", 4), dim("y", 4)])

        def made(size):
            return mtf.slicewise(lambda t: t[:, :size], [x], mtf.Shape([dim("x", 4), dim("z", 2)]), x.dtype,
                                 splittable_dims=[dim("x", 4)])
        outputs = [made(2), made(2)]
        verifier = Verifier(b.graph, outputs)
        assert verifier.problem(MeshShape((("a", 2),)), {"x": "a"}) is None
        outputs.append(made(3))  # its shape is not what it says
        problem = Verifier(b.graph, outputs).problem(MeshShape((("a", 2),)), {"x": "a"})
        assert problem.operation == "slicewise_2"
        assert "Wrong slice shape" in problem.reason


def test_operations_that_hold_what_cannot_be_compared_are_like_no_other():
    class Holder:
        """Equal to every other, and without a hash."""

        def __init__(self, size):
            self.size = size

        def __eq__(self, other):
            return True

        __hash__ = None

    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = b.input("x", [dim("x", 4), dim("y", 4)])
        outputs = [mtf.slicewise(lambda t, holder=holder: t[:, :holder.size], [x],
                                 mtf.Shape([dim("x", 4), dim("z", 2)]), x.dtype, splittable_dims=[dim("x", 4)])
                   for holder in (Holder(2), Holder(3))]
        problem = Verifier(b.graph, outputs).problem(MeshShape((("a", 2),)), {"x": "a"})
        assert problem.operation == "slicewise_1"


def test_names_that_rules_cannot_express_stay_whole():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        x = b.input("x", [dim("my batch", 64), dim("stacked", 64), dim("fine", 64)])
        found = find_layout(b.graph, 4, [mtf.tanh(x)], FLAT)
        assert set(rules_of(found)) == {"fine"}


@pytest.mark.parametrize("shape", [[32], None])
def test_imported_slices_of_another_rank_are_refused(shape):
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        slices = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.placeholder(tf.float32, shape)] * 4)
        x = mtf.import_laid_out_tensor(b.mesh, slices, mtf.Shape([dim("batch", 64), dim("features", 32)]))
        with pytest.raises(InfeasibleError, match=r"operation import, .*slices of shape"):
            find_layout(b.graph, 4, [mtf.reduce_sum(x)], FLAT)
