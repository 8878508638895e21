"""The layouts that are found, lowered by stock Mesh-TF on devices: the loss and the outputs of one device."""

import numpy as np
import pytest
from harness import device_names, session
from nets import NETS, build, one_device

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.layout.find import find_layout
from pase_mtf.machine.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
STEEP = Machine("steep", _RATES, 1e7, 1e12, 1e-6, (Link(2, 1e8, 1e-8), Link(64, 1e6, 1e-6)))


# Between them the others use every kind of operation; these two are quick.
_QUICK = ("mlp", "odd_shapes")


@pytest.mark.parametrize("name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow)
                                  for name in NETS])
def test_found_layouts_give_the_values_of_one_device(name):
    want = one_device(name, "sgd", tf.float64, steps=1)
    with tf.Graph().as_default():
        net = build(name, "sgd", tf.float64)
        found = find_layout(net.graph, 4, [net.loss, *net.outputs], STEEP)
    tried = 0
    for layout in (found.best, *found.alternatives):
        with tf.Graph().as_default():
            net = build(name, "sgd", tf.float64)
            impl = placement_mesh_impl.PlacementMeshImpl(layout.mesh_shape, layout.layout_rules, device_names(4))
            lowering = mtf.Lowering(net.graph, {net.mesh: impl})
            tensors = [lowering.export_to_tf_tensor(tensor) for tensor in (net.loss, *net.outputs)]
            fill = lowering.copy_masters_to_slices()
            with session(4) as run:
                run.run(tf.global_variables_initializer())
                run.run(fill)
                # Not together with the updates: stock Mesh-TF may read a variable after it is updated.
                got = run.run(tensors)
            tried += bool(layout.layout_rules)
            for one, other in zip(got, [want.losses[0], *want.outputs], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=str(layout))
    assert tried
