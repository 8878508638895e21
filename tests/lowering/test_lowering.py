"""The regression test that matters: random layouts for every operation train as stock Mesh-TF does on one device."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import NETS, build, device_names, random_plan, reference, train

from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import enumerate_configurations
from pase_mtf.lowering.lowering import PlanLowering, lower

# Adam divides by the root of the second moment: a rounding error in a gradient near zero is as large as the gradient,
# and the weight moves by the learning rate either way. The losses do not feel it.
_WEIGHTS = {("adam", tf.float32): 1e-3}
_TOLERANCE = {tf.float64: 1e-9, tf.float32: 1e-5}


def _check(name, optimizer, dtype, plan_seed, devices, shared):
    with tf.Graph().as_default():
        net = build(name, optimizer, dtype)
        operations = list(net.graph.operations)
        names = device_names(devices)
        lowering = PlanLowering(net.graph, random_plan(net.graph, devices, plan_seed), names, shared_memory=shared)
        assert net.graph.operations == operations
        got = train(net, lowering, devices=devices)
    want = reference(name, optimizer, dtype)
    assert len(got) == len(want)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        tolerance = _TOLERANCE[dtype]
        if number > len(net.outputs):
            tolerance = _WEIGHTS.get((optimizer, dtype), tolerance)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=f"value {number} of {name}")


_CASES = {"mlp": 70, "cnn": 50, "transformer": 25, "odd_shapes": 60, "odd_functions": 25}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_random_plans_train_as_one_device_does(name):
    @settings(max_examples=_CASES[name])
    @given(optimizer=st.sampled_from(["sgd", "adam"]), dtype=st.sampled_from([tf.float64, tf.float32]),
           plan_seed=st.integers(0, 10**6), devices=st.sampled_from([4, 4, 2, 8]), shared=st.booleans())
    def check(optimizer, dtype, plan_seed, devices, shared):
        _check(name, optimizer, dtype, plan_seed, devices, shared)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_random_strategies_train_as_one_device_does(name):
    """The same through the whole line: export, a configuration per layer, lower."""
    @settings(max_examples=6)
    @given(seed=st.integers(0, 10**6), devices=st.sampled_from([2, 4, 8]))
    def check(seed, devices):
        rng = np.random.default_rng(seed)
        with tf.Graph().as_default():
            net = build(name, "adam", tf.float64)
            exported = export_graph(net.graph)
            offered = [enumerate_configurations(layer, devices, idle=True) for layer in exported.layers]
            strategy = types.SimpleNamespace(
                graph_hash=exported.hash, configurations=[choice[rng.integers(len(choice))] for choice in offered])
            got = train(net, lower(net.graph, strategy, device_names(8)))
        for one, other in zip(got, reference(name, "adam", tf.float64), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)

    check()


def test_adafactor_trains_as_one_device_does():
    """Like Adam, it scales gradients by their size; the losses do not feel the noise near zero."""
    with tf.Graph().as_default():
        net = build("mlp", "adafactor", tf.float32)
        got = train(net, PlanLowering(net.graph, random_plan(net.graph, 4, 1), device_names(4)), devices=4)
    want = reference("mlp", "adafactor", tf.float32)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-2)
