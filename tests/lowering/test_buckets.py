"""Gradients of several layers are summed together, on devices of their own, and train as one device does."""

import harness
import nets
import numpy as np
import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph import all_reduces
from pase_mtf.graph.all_reduces import bucket_of
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering import buckets, reshard
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations, uniform_plan

_DEVICES = harness.device_names(4)


@pytest.fixture
def together(monkeypatch):
    """How many sums every bucket has, in order."""
    found, make = [], buckets._make_together
    monkeypatch.setattr(buckets, "_make_together", lambda sums: (found.append(len(sums)), make(sums)))
    return found


@pytest.fixture
def all_reduced(monkeypatch):
    """The elements of every all-reduce of the lowering, in order."""
    found, make = [], reshard.all_reduce

    def counting(tensors, members, *rest):
        if any(len(group) > 1 for group in members):
            found.append(int(np.prod(tensors[0].shape.as_list())))
        return make(tensors, members, *rest)

    for module in ("mesh", "buckets"):
        monkeypatch.setattr(f"pase_mtf.lowering.{module}.all_reduce", counting)
    return found


def _lowered(layout, mesh="a:4", shared_memory=False):
    return lambda net: PlanLowering(net.graph, uniform_plan(net.graph, mesh, layout, _DEVICES), _DEVICES,
                                    shared_memory=shared_memory)


def _same(found, wanted):
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.variables, wanted.variables)


@pytest.mark.parametrize("optimizer", ["sgd", "assign", "adam"])
def test_all_gradients_of_data_parallelism_are_one_sum(optimizer, together, all_reduced):
    found = nets.train_net("mlp", optimizer, tf.float64, _lowered("batch:a"))
    _same(found, nets.one_device("mlp", optimizer, tf.float64))
    weights = 8 * 16 + 16 + 16 * 16 + 16 * 8
    assert together == [4]
    assert all_reduced.count(weights) == 1
    assert max(all_reduced) == weights


def test_where_memory_is_shared_nothing_is_put_together(together):
    _same(nets.train_net("mlp", "sgd", tf.float64, _lowered("batch:a", shared_memory=True)),
          nets.one_device("mlp", "sgd", tf.float64))
    assert not together


def test_of_split_weights_a_device_sums_its_part(together, all_reduced):
    found = nets.train_net("mlp", "sgd", tf.float64, _lowered("batch:a;hidden2:b", "a:2;b:2"))
    _same(found, nets.one_device("mlp", "sgd", tf.float64))
    # Whole weights of two layers, and half of those of two.
    assert together == [4]
    assert all_reduced.count(8 * 16 + 16 + 16 * 8 + 8 * 8) == 1


def _split_by(configurations):
    """Every layer by the first of these that it can be split by."""
    def lowered(net):
        exported = export_graph(net.graph)
        chosen = [next((Configuration(splits) for splits in configurations
                        if {dim for dim, _ in splits if dim} <= set(layer.splittable)), Configuration((("", 4),)))
                  for layer in exported.layers]
        return PlanLowering(net.graph, plan_from_configurations(net.graph, exported, chosen, 4), _DEVICES,
                            shared_memory=False)
    return lowered


@pytest.mark.parametrize(("configurations", "expected"), [
    ([(("batch", 2), ("hidden", 2)), (("batch", 2), ("classes", 2))], [4]),  # pairs of devices 0 and 2, 1 and 3
    ([(("hidden", 2), ("batch", 2)), (("classes", 2), ("batch", 2))], [4]),
    ([(("hidden", 2), ("batch", 2)), (("batch", 2), ("classes", 2))], [3]),  # w3 over others than w1, b1 and w2
])
def test_what_else_layers_split_makes_no_difference(configurations, expected, together):
    found = nets.train_net("mlp", "sgd", tf.float64, _split_by(configurations))
    _same(found, nets.one_device("mlp", "sgd", tf.float64))
    assert together == expected


def test_a_full_bucket_is_followed_by_another(together, monkeypatch):
    monkeypatch.setattr(all_reduces, "_BUCKET", 16 * 16 + 16)
    found = nets.train_net("mlp", "sgd", tf.float64, _lowered("batch:a"))
    _same(found, nets.one_device("mlp", "sgd", tf.float64))
    assert together == [2]  # w3 and w2 do not fit together, nor w1 with w2


def _with_readers(read):
    """A net of two products whose gradients `read` is given, and the loss."""
    def make(builder):
        batch, one, two = nets.dim("batch", 8), nets.dim("one", 8), nets.dim("two", 8)
        weights = builder.variable("w1", [one, two]), builder.variable("w2", [one, two])
        products = [mtf.einsum([builder.input(f"x{number}", [batch, one]), weight], [batch, two])
                    for number, weight in enumerate(weights)]
        loss = mtf.reduce_mean(mtf.square(mtf.add(*products)))
        return builder, loss, read(*mtf.gradients([loss], weights))
    return make


def _values(make, plan, shared_memory):
    with tf.Graph().as_default():
        builder, loss, results = make(nets.Builder(tf.float64))
        lowering = PlanLowering(builder.graph, uniform_plan(builder.graph, "a:4", plan, _DEVICES), _DEVICES,
                                shared_memory=shared_memory)
        fetched = [lowering.export_to_tf_tensor(x) for x in (loss, *results)]
        with harness.session(4) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            return session.run(fetched)


@pytest.mark.parametrize(("read", "expected"), [
    (lambda one, other: [mtf.square(one), mtf.square(other)], [2]),
    (lambda one, other: [mtf.square(one), one + other], []),  # the sum of both is made once
    (lambda one, other: [mtf.square(one), mtf.stop_gradient(other)], []),
    (lambda one, other: [mtf.square(one), other], []),
    (lambda one, other: [mtf.square(one), mtf.einsum([other, other], reduced_dims=[])], [2]),
])
def test_whatever_reads_them(read, expected, together):
    make = _with_readers(read)
    for value, wanted in zip(_values(make, "batch:a", False), _values(make, "", True), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-9)
    assert together == expected


@pytest.mark.parametrize("name", [name for name in nets.NETS if name != "mlp"])
def test_random_strategies_train_as_one_device_does(name, together):
    def lowered(net):
        exported = export_graph(net.graph)
        drawn = random_configurations(exported, 4, 1, 7)
        return PlanLowering(net.graph, plan_from_configurations(net.graph, exported, drawn, 4), _DEVICES,
                            shared_memory=False)
    _same(nets.train_net(name, "adam", tf.float64, lowered), nets.one_device(name, "adam", tf.float64))


def _wrong_parts(sums, right=buckets._make_together):
    """What is taken apart goes to the wrong tensors, where they are alike."""
    right(sums)
    sums[0]._reduced, sums[-1]._reduced = sums[-1]._reduced, sums[0]._reduced


def test_wrong_buckets_are_noticed(monkeypatch):
    monkeypatch.setattr(buckets, "_make_together", _wrong_parts)
    make = _with_readers(lambda one, other: [mtf.square(one), mtf.square(other)])
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(_values(make, "batch:a", False)[1], _values(make, "", True)[1], rtol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_buckets_take_all_in_order(seed, monkeypatch):
    monkeypatch.setattr(all_reduces, "_BUCKET", 100)
    drawn = np.random.default_rng(seed)
    elements = drawn.choice([0, 1, 10, 40, 60, 100, 101, 300], size=drawn.integers(12)).tolist()
    found = all_reduces.buckets(elements)
    assert sorted(number for bucket in found for number in bucket) == list(range(len(elements)))
    small = [bucket for bucket in found if elements[bucket[0]] <= 100]
    assert all(len(bucket) == 1 for bucket in found if bucket not in small)
    assert [number for bucket in small for number in bucket] == sorted(number for bucket in small for number in bucket)
    filled = [sum(elements[number] for number in bucket) for bucket in small]
    assert all(count <= 100 for count in filled)
    # None is opened while there is room in the one before.
    assert all(count + elements[later[0]] > 100 for count, later in zip(filled, small[1:], strict=False))
    assert bucket_of(elements) == min(100, sum(filled))
