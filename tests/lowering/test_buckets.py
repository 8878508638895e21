"""Gradients of several layers are summed together, on devices of their own, and train as one device does."""

import types

import harness
import nets
import numpy as np
import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph import all_reduces
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering import buckets, reshard
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations, uniform_plan, updates_from_configurations
from pase_mtf.lowering.ranks import Rank
from pase_mtf.models.batch_norm import batch_norm

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


def _normalized(b):
    """Three layers with batch normalization between them, as networks of convolutions have it."""
    batch, config = nets.dim("batch", 8), types.SimpleNamespace(dtype="float64", seed=0)
    x, classes = b.input("x", [batch, nets.dim("c0", 8)]), nets.dim("c3", 8)
    for number in range(3):
        inputs, outputs = nets.dim(f"c{number}", 8), nets.dim(f"c{number + 1}", 8)
        x = mtf.einsum([x, b.variable(f"w{number}", [inputs, outputs])], [batch, outputs])
        x = batch_norm(x, config, name=f"n{number}", relu=True)
    return nets.Net(b.graph, b.mesh, nets.cross_entropy(x, b.labels("y", [batch], 8), classes))


def _decayed(b):
    """Weights that decay, by an addition to every gradient."""
    net = nets.mlp(b)
    variables = b.graph.trainable_variables
    gradients = mtf.gradients([net.loss], [variable.outputs[0] for variable in variables])
    net.gradients = [gradient + 0.01 * variable.value for gradient, variable in zip(gradients, variables, strict=True)]
    return net


def test_a_gradient_makes_no_sum_late_that_others_wait_for(together, all_reduced, monkeypatch):
    """What normalizations sum in the backward pass is summed by itself, gradients when that is over."""
    monkeypatch.setitem(nets.OTHERS, "normalized", _normalized)
    nets.train_net("normalized", "sgd", tf.float64, _lowered("batch:a"))
    # Of the weights alone: what is an offset's gradient the backward pass needs, too.
    assert together == [3]
    assert all_reduced[-1] == 3 * 64


def test_an_addition_of_something_whole_needs_the_sum(together, monkeypatch):
    monkeypatch.setitem(nets.OTHERS, "decayed", _decayed)
    found = nets.train_net("decayed", "sgd", tf.float64, _lowered("batch:a"))
    _same(found, nets.one_device("decayed", "sgd", tf.float64))
    assert together == [4]


def test_what_was_summed_long_ago_makes_no_others(together):
    """w3's gradient reads a sum of the forward pass, when other gradients wait."""
    def lowered(net):
        return _split_by([(("features", 4),), (("classes", 4),), (("batch", 4),)])(net)
    found = nets.train_net("mlp", "sgd", tf.float64, lowered)
    _same(found, nets.one_device("mlp", "sgd", tf.float64))
    assert len(together) <= 1


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_are_clipped(sharded, together):
    """Their norm needs them where they are, also where updates are shards elsewhere."""
    def trained(devices):
        with tf.Graph().as_default():
            net = nets.NETS["mlp"](nets.Builder(tf.float64))
            variables = net.graph.trainable_variables
            gradients = mtf.gradients([net.loss], [variable.outputs[0] for variable in variables])
            norm = mtf.add_n([mtf.reduce_sum(mtf.square(gradient)) for gradient in gradients])
            net.updates = mtf.optimize.SgdOptimizer(0.05).apply_grads(
                [gradient * mtf.rsqrt(norm + 1.0) for gradient in gradients], variables)
            if not devices:
                return harness.train(net, harness.stock()(net), [{}] * 2)
            graph = export_graph(net.graph, sharded_updates=sharded)
            chosen = [Configuration((("batch" if "batch" in layer.splittable else layer.splittable[-1], 4),))
                      if layer.splittable and (sharded or "batch" in layer.splittable) else Configuration((("", 4),))
                      for layer in graph.layers]
            return harness.train(net, PlanLowering(
                net.graph, plan_from_configurations(net.graph, graph, chosen, 4), _DEVICES, shared_memory=False,
                updates=updates_from_configurations(net.graph, graph, chosen)), [{}] * 2)

    _same(trained(True), trained(False))
    assert together == [4]


def test_a_scalar_among_them_costs_many_ranks_no_message_more(monkeypatch):
    """Of 16 ranks: equal pieces are one collective, unequal ones would be sent one by one."""
    names = [f"/job:worker/replica:0/task:{number}/device:CPU:0" for number in range(16)]
    found = []
    for scalar in (False, True):
        with tf.Graph().as_default():
            b = nets.Builder(tf.float32)
            batch, one, two, three = (nets.dim(*entry) for entry in (
                ("batch", 16), ("one", 128), ("two", 128), ("three", 8)))
            x = mtf.einsum([b.input("x", [batch, one]), b.variable("w1", [one, two])], [batch, two])
            x = mtf.einsum([x * b.variable("scale", []) if scalar else x, b.variable("w2", [two, three])],
                           [batch, three])
            variables = b.graph.trainable_variables
            gradients = mtf.gradients([mtf.reduce_mean(mtf.square(x))], [each.outputs[0] for each in variables])
            updates = mtf.optimize.SgdOptimizer(0.05).apply_grads(gradients, variables)
            lowering = PlanLowering(b.graph, uniform_plan(b.graph, "a:16", "batch:a", names), names,
                                    rank=Rank.of(names, 0))
            assert [lowering.lowered_operation(update) for update in updates]
            found.append(lowering.emitter.ledger.transfers)
    assert found[0] == found[1]


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
    assert all_reduces.bucket_of(sum(filled)) == min(100, sum(filled))


def test_who_trains_one_of_two_models_need_not_feed_the_other(together):
    with tf.Graph().as_default():
        b, (batch, one, two) = nets.Builder(tf.float64), (nets.dim(name, 8) for name in ("batch", "one", "two"))
        fed, weights = [tf.placeholder(tf.float64, [8, 8]) for _ in range(2)], [
            b.variable(f"w{number}", [one, two]) for number in range(2)]
        losses = [mtf.reduce_mean(mtf.square(mtf.einsum(
            [mtf.import_tf_tensor(b.mesh, x, mtf.Shape([batch, one])), weight], [batch, two])))
            for x, weight in zip(fed, weights, strict=True)]
        gradients = [mtf.gradients([loss], [weight])[0] for loss, weight in zip(losses, weights, strict=True)]
        updates = [mtf.assign_sub(weight.operation, gradient * 0.1)
                   for weight, gradient in zip(weights, gradients, strict=True)]
        lowering = _lowered("batch:a")(b)
        with harness.session(4) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            session.run(lowering.lowered_operation(updates[0]), {fed[0]: np.ones([8, 8])})
    assert together == []


def test_a_scalar_that_is_fed_is_one_whoever_multiplies_by_it(together):
    """The backward pass does so once more in every layer."""
    with tf.Graph().as_default():
        b, batch, scale = nets.Builder(tf.float64), nets.dim("batch", 8), tf.placeholder(tf.float64, [])
        x = b.input("x", [batch, nets.dim("c0", 8)])
        for number in range(3):
            inputs, outputs = nets.dim(f"c{number}", 8), nets.dim(f"c{number + 1}", 8)
            x = mtf.einsum([x, b.variable(f"w{number}", [inputs, outputs])], [batch, outputs]) * scale
        variables = b.graph.trainable_variables
        gradients = mtf.gradients([mtf.reduce_mean(mtf.square(x))], [each.outputs[0] for each in variables])
        mtf.optimize.SgdOptimizer(0.05).apply_grads(gradients, variables)
        _lowered("batch:a")(b)
    assert together == [3]


def test_a_chain_of_additions_longer_than_pythons_stack():
    with tf.Graph().as_default():
        builder = nets.Builder(tf.float64)
        x = total = builder.input("x", [nets.dim("batch", 8), nets.dim("one", 8)])
        for _ in range(1200):
            total = total + x
        plan = uniform_plan(builder.graph, "a:2", "batch:a", _DEVICES[:2])
        lowering = PlanLowering(builder.graph, plan, _DEVICES[:2], shared_memory=False)
        found, = harness.evaluate(lowering, [total])
    np.testing.assert_allclose(found, 1201 * builder.values("x", [8, 8]), rtol=1e-9)


def test_who_runs_one_of_two_updates_does_not_run_what_the_other_waits_for(together):
    with tf.Graph().as_default():
        b, (batch, one, two) = nets.Builder(tf.float64), (nets.dim(name, 8) for name in ("batch", "one", "two"))
        weights, x = [b.variable(f"w{number}", [one, two]) for number in range(2)], b.input("x", [batch, one])
        count = b.variable("count", [])
        counted = mtf.assign_add(count.operation, mtf.ones(b.mesh, mtf.Shape([]), tf.float64))
        losses = [mtf.reduce_mean(mtf.square(mtf.einsum([given, weight], [batch, two])))
                  for given, weight in zip((x, mtf.depend(x, [counted])), weights, strict=True)]
        gradients = [mtf.gradients([loss], [weight])[0] for loss, weight in zip(losses, weights, strict=True)]
        updates = [mtf.assign_sub(weight.operation, gradient * 0.1)
                   for weight, gradient in zip(weights, gradients, strict=True)]
        lowering = _lowered("batch:a")(b)
        steps = [lowering.lowered_operation(updates[0]), lowering.copy_slices_to_masters()]
        with harness.session(4) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            for step in steps:
                session.run(step)
            found = session.run(count.operation.get_master())
    np.testing.assert_allclose(found, 0.5 * b.values("count", []), rtol=1e-12)
    assert together == []


def test_a_block_with_a_gradient_of_its_own_reads_nothing_but_what_it_returns(all_reduced):
    """What goes into it is read by its operations: a sum is made where these need it."""
    with tf.Graph().as_default():
        b, (batch, inner, hidden) = nets.Builder(tf.float64), (nets.dim(name, 8) for name in (
            "batch", "inner", "hidden"))
        y = mtf.einsum([b.input("x", [batch, inner]), b.input("w", [inner, hidden])], [batch, hidden])
        block = mtf.recompute_grad(mtf.tanh, [y]).operation
        inside = block.inputs[-1].operation
        plan, by_batch, by_hidden = (uniform_plan(b.graph, "a:4", f"{name}:a", _DEVICES)
                                     for name in ("inner", "batch", "hidden"))
        plan |= {inside: by_batch[inside], block: by_hidden[block]}
        lowering = PlanLowering(b.graph, plan, _DEVICES, shared_memory=False)
        found, = harness.evaluate(lowering, block.outputs)
    np.testing.assert_allclose(found, np.tanh(b.values("x", [8, 8]) @ b.values("w", [8, 8])), rtol=1e-9)
    assert all_reduced == []
