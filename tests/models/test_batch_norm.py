"""Batch normalisation against TensorFlow's formula: statistics of the whole batch, however it is split."""

import types

import numpy as np
import pytest
from slices import mesh_values, plain_values

from pase_mtf.compat import mtf, tf
from pase_mtf.models.batch_norm import batch_norm

CONFIG = types.SimpleNamespace(dtype="float64", seed=0)
LAYOUTS = [("rows:8", "batch:rows"), ("cols:4", "channels:cols"), ("rows:2;cols:4", "batch:rows;channels:cols"),
           ("rows:2", "height:rows"), ("rows:4;cols:2", "batch:rows;width:cols")]


def _inputs(residual, shape=(8, 4, 6, 8), mean=3.0):
    dims = [mtf.Dimension(name, size) for name, size in zip(("batch", "height", "width", "channels"), shape,
                                                            strict=True)]
    generator = np.random.default_rng(1)
    x = generator.standard_normal(shape) * generator.uniform(0.5, 2, shape[-1]) + mean
    # Devices that hold some examples only must not find their mean: every example has another one.
    x += np.arange(shape[0])[:, None, None, None]
    found = {"x": (dims, x), "scale": (dims[-1:], generator.normal(1, 0.5, shape[-1])),
             "offset": (dims[-1:], generator.normal(0, 0.5, shape[-1]))}
    if residual:
        found["residual"] = (dims, generator.standard_normal(shape))
    return found


def _mine(relu, monkeypatch, epsilon=1e-3):
    def function(x, scale, offset, residual=None):
        # The variables are given from outside, so that their gradients are seen and they are no ones and zeros.
        monkeypatch.setattr("pase_mtf.models.layers.ones", lambda *_: scale)
        monkeypatch.setattr("pase_mtf.models.layers.zeros", lambda *_: offset)
        return batch_norm(x, CONFIG, relu=relu, residual=residual, epsilon=epsilon)

    return function


def _plain(relu, epsilon=1e-3):
    def function(x, scale, offset, residual=0.0):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        y = tf.nn.batch_normalization(x, mean, variance, offset, scale, epsilon) + residual
        return tf.nn.relu(y) if relu else y

    return function


def _same(found, wanted):
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert np.abs(theirs).max() > 1e-3
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_equals_tensorflows(relu, residual, monkeypatch):
    inputs = _inputs(residual)
    _same(mesh_values(_mine(relu, monkeypatch), inputs), plain_values(_plain(relu), inputs))


@pytest.mark.parametrize(("mesh_shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("residual", [False, True])
def test_statistics_are_those_of_the_whole_batch(residual, mesh_shape, layout, monkeypatch):
    inputs = _inputs(residual)
    _same(mesh_values(_mine(True, monkeypatch), inputs, mesh_shape, layout), plain_values(_plain(True), inputs))


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_gives_the_same(seed, monkeypatch):
    inputs = _inputs(True)
    _same(mesh_values(_mine(True, monkeypatch), inputs, plan_seed=seed), plain_values(_plain(True), inputs))


def test_a_large_mean_does_not_drown_the_variance(monkeypatch):
    dims, x = _inputs(False, mean=1e3)["x"]
    x = (x - np.arange(8)[:, None, None, None]).astype(np.float32)
    inputs = {"x": (dims, x), "scale": (dims[-1:], np.ones(8, np.float32)),
              "offset": (dims[-1:], np.zeros(8, np.float32))}
    y = mesh_values(_mine(False, monkeypatch, 1e-5), inputs)[0]
    exact = x.astype(np.float64)
    wanted = (exact - exact.mean((0, 1, 2))) / np.sqrt(exact.var((0, 1, 2)) + 1e-5)
    np.testing.assert_allclose(y, wanted, atol=2e-3)


def test_variables_start_as_ones_and_zeros():
    with tf.Graph().as_default(), tf.Session() as session:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims, value = _inputs(False)["x"]
        batch_norm(mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape(dims)), CONFIG, "first")
        masters = {variable.name: variable.get_master() for variable in mesh.graph.trainable_variables}
        session.run(tf.global_variables_initializer())
        values = session.run(masters)
    assert {name: list(value) for name, value in values.items()} == {
        "first/scale": [1.0] * 8, "first/offset": [0.0] * 8}
