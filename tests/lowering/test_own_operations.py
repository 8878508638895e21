"""Operation classes as users write them: they know nothing of plans, and are lowered by their own code under any."""

import numpy as np
import own_operations as own
import pytest
from harness import device_names, evaluate
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.operations.registry import register_operation, splittable_dims

_DEVICES = device_names(4)
_A, _B = (MeshSpec(((frozenset([name]), 4),), tuple(range(4))) for name in "ab")


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


def test_operation_classes_of_users(builder):
    class Doubled(mtf.Operation):
        """Knows nothing of plans."""

        def __init__(self, x):
            super().__init__([x], name="doubled")
            self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

        def lower(self, lowering):
            lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
                lambda x: x * 2, lowering.tensors[self.inputs[0]]))

    x = builder.input("x", [dim("a", 8), dim("b", 8)])
    op = Doubled(x)
    assert splittable_dims(op) == {"a", "b"}  # found by trying
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _A), _DEVICES)
    np.testing.assert_allclose(evaluate(lowering, op.outputs)[0], 2 * builder.values("x", [8, 8]), rtol=1e-6)
    register_operation(Doubled, splittable=lambda op: ["a"])
    assert splittable_dims(op) == {"a"}
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _A), _DEVICES)
    assert lowering.mesh_impl(op).slice_shape(x.shape) == [2, 8]
    np.testing.assert_allclose(evaluate(lowering, op.outputs)[0], 2 * builder.values("x", [8, 8]), rtol=1e-6)


def test_own_operations_may_ask_for_the_mesh_of_what_they_read(builder):
    class Sorted(mtf.Operation):
        """Asks by its input, which under stock Mesh-TF is the same as asking by itself."""

        def __init__(self, x, along):
            super().__init__([x], name="sorted")
            self._along = along
            self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

        def lower(self, lowering):
            impl = lowering.mesh_impl(self.inputs[0])
            if impl.tensor_dimension_to_mesh_axis(self._along) is not None:
                raise ValueError("a split dim cannot be sorted")
            lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(
                lambda x: tf.sort(x, axis=-1), lowering.tensors[self.inputs[0]]))

    x = mtf.tanh(builder.input("x", [dim("a", 8), dim("b", 8)]))
    op = Sorted(x, dim("b", 8))
    assert splittable_dims(op) == {"a"}
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, _B) | {op: _A}, _DEVICES)
    np.testing.assert_allclose(evaluate(lowering, op.outputs)[0], np.sort(np.tanh(builder.values("x", [8, 8]))),
                               rtol=1e-5)


def test_the_gradient_of_an_own_operation_that_cannot_read_a_pending_sum(builder):
    class Squared(own.Same):
        """Reads slices, which a pending sum has none of; TensorFlow differentiates it."""

        def gradient(self, grad_ys):
            return mtf.ops.GenericGradOperation(self, grad_ys).outputs

        def lower(self, lowering):
            impl = lowering.mesh_impl(self)
            slices = impl.LaidOutTensor(lowering.tensors[self.inputs[0]].tensor_list)
            lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(tf.square, slices))

    a, b, c = dim("a", 8), dim("b", 8), dim("c", 8)
    x, w = builder.input("x", [a, c]), builder.input("w", [c, b])
    op = Squared(mtf.einsum([x, w], [a, b]))
    gradient, = mtf.gradients([mtf.reduce_sum(op.outputs[0])], [w])
    summed = MeshSpec(((frozenset(["c"]), 4),), tuple(range(4)))
    lowering = PlanLowering(builder.graph, dict.fromkeys(builder.graph.operations, summed) | {op: _A}, _DEVICES)
    x, w = builder.values("x", [8, 8]), builder.values("w", [8, 8])
    np.testing.assert_allclose(evaluate(lowering, [gradient])[0], x.T @ (2.0 * x @ w), rtol=1e-4, atol=1e-4)
