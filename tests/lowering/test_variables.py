"""What is assigned to variables, and which memory they keep: where stock Mesh-TF goes by place or by luck."""

import numpy as np
import pytest
from harness import device_names, session
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec

_DEVICES = device_names(4)


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


def _over(axes):
    """A mesh of axes, a dim on each."""
    return MeshSpec(tuple((frozenset([name]), parts) for name, parts in axes.items()),
                    tuple(range(int(np.prod(list(axes.values()))))))


@pytest.mark.parametrize("assign", [mtf.assign, mtf.assign_add])
@pytest.mark.parametrize(("axes", "updating"), [
    ({"hidden": 4}, None), ({"copy": 4}, None), ({"copy": 2, "hidden": 2}, None), ({"model": 4}, None),
    ({"hidden": 4}, {"copy": 2}), ({"copy": 4}, {"hidden": 4})])
def test_a_value_may_name_its_dims_otherwise_than_the_variable(builder, assign, axes, updating):
    model, hidden, copy = dim("model", 8), dim("hidden", 16), dim("copy", 16)
    x, w = builder.input("x", [dim("batch", 8), model]), builder.variable("w", [model, hidden])
    kept, total = builder.variable("kept", [model, copy]), builder.variable("total", [dim("all", 8), copy])
    given = [w * 2.0, mtf.einsum([x, w], [dim("batch", 8), hidden])]  # the second may be a sum
    updates = [assign(variable.operation, value) for variable, value in zip((kept, total), given, strict=True)]
    lowering = PlanLowering(
        builder.graph, dict.fromkeys(builder.graph.operations, _over(axes)), _DEVICES,
        updates=updating and dict.fromkeys((kept.operation, total.operation), _over(updating)))
    update = tf.group([lowering.lowered_operation(operation) for operation in updates])
    masters, collect = [each.operation.get_master() for each in (kept, total)], lowering.copy_slices_to_masters()
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for step in (update, collect):
            run.run(step)
        found = run.run(masters)
    weights = 0.5 * builder.values("w", [8, 16])
    for name, value, wanted in zip(("kept", "total"), found, (2.0 * weights, builder.values("x", [8, 8]) @ weights),
                                   strict=True):
        before = 0.5 * builder.values(name, [8, 16]) if assign is mtf.assign_add else 0.0
        np.testing.assert_allclose(value, before + wanted, rtol=1e-4, atol=1e-5)
