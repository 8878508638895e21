"""The regression test that matters: random layouts for every operation train as stock Mesh-TF does on one device."""

import itertools

import harness
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import NETS, one_device, random_plan, train_net

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.configurations import enumerate_configurations
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.plans import uniform_plan
from pase_mtf.operations.flow import all_operations

# Adam divides by the root of the second moment: a rounding error in a gradient near zero is as large as the gradient,
# and the weight moves by the learning rate either way. The losses do not feel it.
_WEIGHTS = {("adam", tf.float32): 1e-3}
_TOLERANCE = {tf.float64: 1e-9, tf.float32: 1e-5}


def _check(name, optimizer, dtype, plan_seed, devices, shared):
    def plan_of(graph):
        return random_plan(graph, devices, plan_seed)

    got = train_net(name, optimizer, dtype, harness.planned(plan_of, devices, shared_memory=shared))
    want = one_device(name, optimizer, dtype)
    tolerance = _TOLERANCE[dtype]
    _same([got.losses, *got.outputs], [want.losses, *want.outputs], tolerance)
    assert got.variables.keys() == want.variables.keys()
    _same([got.variables[key] for key in want.variables], want.variables.values(),
          _WEIGHTS.get((optimizer, dtype), tolerance))


def _same(found, wanted, tolerance):
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=f"value {number}")


@pytest.mark.parametrize("name", NETS)
def test_random_plans_train_as_one_device_does(name):
    """A few of the plans of the next test."""
    _check(name, "sgd", tf.float64, plan_seed=0, devices=4, shared=False)
    _check(name, "adam", tf.float32, plan_seed=1, devices=4, shared=True)


_CASES = {"mlp": 24, "cnn": 16, "transformer": 8, "odd_shapes": 20, "odd_functions": 8, "microbatches": 8}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_any_plan_trains_as_one_device_does(name):
    @settings(max_examples=_CASES[name])
    @given(optimizer=st.sampled_from(["sgd", "adam"]), dtype=st.sampled_from([tf.float64, tf.float32]),
           plan_seed=st.integers(0, 10**6), devices=st.sampled_from([4, 4, 2, 8]), shared=st.booleans())
    def check(optimizer, dtype, plan_seed, devices, shared):
        _check(name, optimizer, dtype, plan_seed, devices, shared)

    check()


def _check_strategy(name, seed, devices, *, sharded_updates=False, optimizer="adam"):
    """The whole way: export, a configuration per layer, lower."""
    def choose(graph):
        rng = np.random.default_rng(seed)
        offered = [enumerate_configurations(layer, devices, idle=True) for layer in graph.layers]
        return [choice[rng.integers(len(choice))] for choice in offered]

    got = train_net(name, optimizer, tf.float64, harness.under_strategy(
        choose, devices, sharded_updates=sharded_updates))
    want = one_device(name, optimizer, tf.float64)
    _same([got.losses, *got.outputs], [want.losses, *want.outputs], 1e-9)
    harness.assert_same(got.variables, want.variables)


@pytest.mark.parametrize("name", harness.some_slow(
    ["microbatches", "odd_functions"], [name for name in NETS if name not in ("microbatches", "odd_functions")]))
def test_random_strategies_train_as_one_device_does(name):
    """Without updates of their own; in the gate the nets that have loops."""
    _check_strategy(name, seed=0, devices=4)


@pytest.mark.parametrize(("name", "optimizer"), list(zip(NETS, ["sgd", "adam"] * len(NETS), strict=False)))
def test_random_strategies_with_updates_of_their_own_train_as_one_device_does(name, optimizer):
    _check_strategy(name, seed=1, devices=4, sharded_updates=True, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_any_strategy_trains_as_one_device_does(name):
    @settings(max_examples=6)
    @given(seed=st.integers(0, 10**6), devices=st.sampled_from([2, 4, 8]), sharded_updates=st.booleans(),
           optimizer=st.sampled_from(["sgd", "adam"]))
    def check(seed, devices, sharded_updates, optimizer):
        _check_strategy(name, seed, devices, sharded_updates=sharded_updates, optimizer=optimizer)

    check()


def test_adafactor_trains_as_one_device_does():
    """Its slots are float32, whatever the weights are."""
    got = train_net("wide", "adafactor", tf.float64, harness.planned(lambda graph: random_plan(graph, 4, 1)))
    want = one_device("wide", "adafactor", tf.float64)
    assert {"w1_slot_vr", "w1_slot_vc", "w2_slot_v"} <= want.variables.keys()
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6)
    _same(got.outputs, want.outputs, 1e-5)
    harness.assert_same(got.changes, want.changes, 1e-5)
    harness.assert_same(got.variables, want.variables, 1e-5)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_constant_that_its_type_cannot_hold_is_refused(value):
    """As under stock Mesh-TensorFlow; it is not cut off."""
    with tf.Graph().as_default():
        graph, devices = mtf.Graph(), harness.device_names(2)
        mtf.constant(mtf.Mesh(graph, "mesh"), value, mtf.Shape([mtf.Dimension("a", 4)]), tf.int32)
        with pytest.raises(UsageError, match=f"constant: {value} is no int32"):
            PlanLowering(graph, uniform_plan(graph, "all:2", "a:all", devices), devices)


def _by_turns(graph):
    """One operation in halves of the batch, the next in thirds."""
    specs = [MeshSpec(((frozenset({"batch"}), parts), (frozenset(), 6 // parts)), tuple(range(6))) for parts in (2, 3)]
    return dict(zip(all_operations(graph), itertools.cycle(specs), strict=False))


@pytest.mark.parametrize("shared", [True, False])
def test_halves_and_thirds_train_as_one_device_does(shared):
    """Of a batch of six on six devices: what one operation makes is read by the next in blocks that overlap in part."""
    got = train_net("large_sums", "sgd", tf.float64, harness.planned(_by_turns, 6, shared_memory=shared))
    want = one_device("large_sums", "sgd", tf.float64)
    _same([got.losses, *got.outputs], [want.losses, *want.outputs], 1e-9)
    harness.assert_same(got.variables, want.variables)


@pytest.mark.parametrize(("value", "dtype"), [(1e10, tf.int32), (2 ** 40, tf.int32), (-1, tf.uint8)])
def test_a_constant_that_is_too_large_for_its_type_is_refused(value, dtype):
    with tf.Graph().as_default():
        graph, devices = mtf.Graph(), harness.device_names(2)
        mtf.constant(mtf.Mesh(graph, "mesh"), value, mtf.Shape([mtf.Dimension("a", 4)]), dtype)
        with pytest.raises(UsageError, match=f"constant: {value} is no {dtype.name}"):
            PlanLowering(graph, uniform_plan(graph, "all:2", "a:all", devices), devices)
