"""Dims of one name and other sizes, and dims of a filter that are called as those of the image: what counts is which
dims they are, as for Mesh-TensorFlow."""

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph


@pytest.fixture
def mesh():
    with tf.Graph().as_default():
        yield mtf.Mesh(mtf.Graph(), "mesh")


def _tensor(mesh, *dims):
    return mtf.import_tf_tensor(mesh, tf.zeros([size for _, size in dims]), mtf.Shape([mtf.Dimension(*dim)
                                                                                      for dim in dims]))


def _weights(mesh, *dims):
    return mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension(*dim) for dim in dims]))


def _operations(mesh):
    return [operation for layer in export_graph(mesh.graph).layers for operation in layer.operations]


def test_a_name_of_two_sizes_is_two_dims_of_a_product(mesh):
    """As a dense layer has them whose input and output are both called hidden."""
    x, w = _tensor(mesh, ("batch", 8), ("hidden", 16)), _weights(mesh, ("hidden", 16), ("hidden", 32))
    y = mtf.einsum([x, w], output_shape=mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("hidden", 32)]))
    mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w, x])
    products = [operation.flops for operation in _operations(mesh) if operation.kind == "matmul"]
    assert products == [2 * 8 * 16 * 32] * 3


@pytest.mark.parametrize("filter_dims", [
    [("fh", 3), ("fw", 3), ("c", 3), ("d", 16)], [("h", 3), ("w", 3), ("c", 3), ("c", 16)]])
def test_a_filter_may_call_its_dims_as_the_image_does(mesh, filter_dims):
    x = _tensor(mesh, ("batch", 8), ("h", 8), ("w", 8), ("c", 3))
    f = _weights(mesh, *filter_dims)
    y = mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "SAME").outputs[0]
    mtf.gradients([mtf.reduce_sum(mtf.square(y))], [f])
    found = [operation.flops for operation in _operations(mesh) if operation.kind == "convolution"]
    assert found
    assert set(found) == {2 * 8 * 8 * 8 * 16 * 3 * 3 * 3}


def test_a_tensor_of_no_elements_is_reshaped(mesh):
    x = _tensor(mesh, ("a", 0), ("b", 6))
    mtf.reshape(mtf.relu(x), mtf.Shape([mtf.Dimension("a", 0), mtf.Dimension("d", 3)]))
    assert {operation.type for operation in _operations(mesh)} >= {"ReshapeOperation"}
