"""Pooling as Mesh-TF operations against TensorFlow's, whole and split."""

import numpy as np
import pytest
from slices import mesh_values, plain_values

from pase_mtf.compat import mtf, tf
from pase_mtf.models import pooling
from pase_mtf.operations.registry import splittable_dims

# (size of the image, window, stride, padding): windows that tile, overlap, leave out a border, reach over it.
SHAPES = [(8, 2, 2, "VALID"), (9, 3, 2, "VALID"), (8, 3, 2, "VALID"), (8, 3, 1, "SAME"), (7, 3, 2, "SAME"),
          (8, 3, 2, "SAME"), (9, 5, 3, "VALID"), (5, 5, 1, "VALID"), (6, 5, 3, "SAME")]
LAYOUTS = [("rows:4", "batch:rows"), ("cols:4", "channels:cols"), ("rows:2;cols:4", "batch:rows;channels:cols")]
_FUNCTIONS = {
    "max": (pooling.max_pool, lambda x, window, stride, padding: tf.nn.max_pool2d(x, window, stride, padding)),
    "average": (pooling.average_pool,
                lambda x, window, stride, padding: tf.nn.avg_pool2d(x, window, stride, padding))}


def _image(size):
    dims = [mtf.Dimension("batch", 4), mtf.Dimension("height", size), mtf.Dimension("width", size + 1),
            mtf.Dimension("channels", 8)]
    return {"x": (dims, np.random.default_rng(size).standard_normal([dim.size for dim in dims]))}


def _same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("size", "window", "stride", "padding"), SHAPES)
@pytest.mark.parametrize("kind", _FUNCTIONS)
def test_pooling_equals_tensorflows(kind, size, window, stride, padding):
    mine, theirs = _FUNCTIONS[kind]
    image = _image(size)
    wanted = plain_values(lambda x: theirs(x, window, stride, padding), image)
    assert np.abs(wanted[1]).max() > 0.01
    _same(mesh_values(lambda x: mine(x, window, stride, padding), image), wanted)


@pytest.mark.parametrize(("size", "window", "stride", "padding"), [(9, 3, 2, "VALID"), (7, 3, 2, "SAME")])
@pytest.mark.parametrize(("mesh_shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("kind", _FUNCTIONS)
def test_batch_and_channels_can_be_split(kind, mesh_shape, layout, size, window, stride, padding):
    mine, theirs = _FUNCTIONS[kind]
    image = _image(size)
    _same(mesh_values(lambda x: mine(x, window, stride, padding), image, mesh_shape, layout),
          plain_values(lambda x: theirs(x, window, stride, padding), image))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", _FUNCTIONS)
def test_any_plan_gives_the_same(kind, seed):
    mine, theirs = _FUNCTIONS[kind]
    _same(mesh_values(lambda x: mine(x, 3, 2, "SAME"), _image(7), plan_seed=seed),
          plain_values(lambda x: theirs(x, 3, 2, "SAME"), _image(7)))


@pytest.mark.parametrize("kind", _FUNCTIONS)
def test_height_and_width_stay_whole(kind):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims, value = _image(8)["x"]
        x = mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape(dims))
        y = _FUNCTIONS[kind][0](x, 3, 2)
        dx = mtf.gradients([y], [x])[0]
        for tensor in (y, dx):
            assert splittable_dims(tensor.operation) == {"batch", "channels"}


@pytest.mark.parametrize("arguments", [{}, *({"mesh_shape": mesh, "layout": layout} for mesh, layout in LAYOUTS),
                                       {"plan_seed": 0}, {"plan_seed": 1}])
def test_global_pooling_is_the_mean_over_the_image(arguments):
    _same(mesh_values(pooling.global_average_pool, _image(6), **arguments),
          plain_values(lambda x: tf.reduce_mean(x, [1, 2]), _image(6)))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_windows_are_counted_as_tensorflow_counts(window, stride, padding):
    for size in range(window, 12):
        with tf.Graph().as_default():
            shape = tf.nn.max_pool2d(tf.zeros([1, size, size, 1]), window, stride, padding).shape
        assert pooling.windows(size, window, stride, padding) == shape[1]
