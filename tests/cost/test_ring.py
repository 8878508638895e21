"""What Mesh-TF's own collectives cost on shared cores: as many operations as its lowering makes."""

import numpy as np
import pytest

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.machine.machine import Link, Machine

_KINDS = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e9)
# An operation is a second and nothing else costs anything.
COUNTING = Machine("counting", _KINDS, 1e30, 1e30, 1.0, (Link(8, 1e30, 0.0),), shared_cores=True)


@pytest.mark.parametrize("elements", [8, 512, 1024, 4096])
@pytest.mark.parametrize(("mesh_shape", "axes"), [("a:8", [0]), ("a:2;b:4", [0]), ("a:2;b:4", [1]), ("a:4;b:2", [0])])
def test_an_all_reduce_is_priced_by_the_operations_it_makes(mesh_shape, axes, elements):
    shape = mtf.convert_to_shape(mesh_shape)
    group = shape.dims[axes[0]].size
    with tf.Graph().as_default() as graph:
        impl = placement_mesh_impl.PlacementMeshImpl(shape, [], [f"/device:CPU:{number}" for number in range(8)])
        before = {f.name for f in [tf.placeholder(tf.float32, [elements], name=f"x{number}") for number in range(8)]}
        inputs = [graph.get_tensor_by_name(name) for name in sorted(before)]
        impl.allreduce(impl.LaidOutTensor(inputs), axes, "SUM")
        made = [op.type for op in graph.get_operations()]
    # Constants are free: sizes and axes.
    nodes = sum(made.count(kind) for kind in ("AddV2", "Identity", "Reshape", "Split", "ConcatV2"))
    priced = allreduce_seconds(np.array([4.0 * elements]), np.array([[float(group)]]), np.array([8]), COUNTING,
                               stock=True)
    assert priced[0] == pytest.approx(nodes)


def test_our_own_all_reduce_is_cheaper():
    arguments = np.array([4e6]), np.array([[8.0]]), np.array([8]), COUNTING
    assert allreduce_seconds(*arguments) < allreduce_seconds(*arguments, stock=True)
