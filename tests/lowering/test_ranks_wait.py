"""What ranks wait for: updates that something depends on, and both ends of what is taken as it is."""

import itertools

import nets
import pytest
from rank_worker import cluster_devices
from ranks import assert_all_ends_or_none, reached

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering import collectives
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.ranks import Rank
from pase_mtf.operations.flow import all_operations


def _on(*devices):
    return MeshSpec(((frozenset(), len(devices)),), devices)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_waits_for_an_update_runs_it_on_all_ranks(rank):
    """Also on those that have no part of what waits."""
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default():
        b = nets.Builder(tf.float32)
        w = b.variable("w", [nets.dim("a", 8)])
        update = mtf.assign(w.operation, w * 0.5)
        loss = mtf.depend(mtf.zeros(b.mesh, []), [update])
        plan = dict.fromkeys(b.graph.operations, MeshSpec(((frozenset(["a"]), 2),), (0, 1)))
        plan[loss.operation] = _on(0)
        lowering = PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
        run = reached(lowering.export_to_tf_tensor(loss).op)
    assert any(node.type == "AssignVariableOp" for node in run)


@pytest.mark.parametrize("loop", [False, True])
def test_what_is_taken_as_it_is_needs_both_ends_of_its_transfers(loop, monkeypatch):
    devices, found = cluster_devices(2, 1), []
    for rank in range(2):
        monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
        with tf.Graph().as_default():
            b = nets.Builder(tf.float32)
            if loop:
                x, start = b.input("x", [nets.dim("a", 8)]), b.input("s", [nets.dim("a", 8)])
                made, count = mtf.tanh(x), mtf.import_tf_tensor(b.mesh, tf.constant(0), [])
                last = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, _, made=made: [i + 1, made],
                                      [count, start])[1]
                plan = {**dict.fromkeys(b.graph.operations, _on(0)), x.operation: _on(1)}
            else:
                w = b.variable("w", [nets.dim("a", 8)])
                new = w * 0.5
                mtf.tanh(new)  # no assignment needs it
                update = mtf.assign(w.operation, new)
                plan = {**dict.fromkeys(b.graph.operations, _on(0, 1)),
                        new.operation: MeshSpec(((frozenset(["a"]), 2),), (0, 1))}
            lowering = PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
            fetch = lowering.export_to_tf_tensor(last).op if loop else lowering.lowered_operation(update)
            found.append((lowering, [fetch]))
    assert_all_ends_or_none(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_waits_for_another_runs_it_on_all_ranks(rank):
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default():
        b = nets.Builder(tf.float32)
        w, v = (b.variable(name, [nets.dim("a", 8)]) for name in "wv")
        new = w * 0.5
        first = mtf.assign(w.operation, new)
        second = mtf.assign(v.operation, mtf.depend(v * 0.5, [first]))
        plan = {**dict.fromkeys(b.graph.operations, _on(0)), **dict.fromkeys(
            (w.operation, new.operation, first), MeshSpec(((frozenset(["a"]), 2),), (0, 1)))}
        lowering = PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
        run = reached(lowering.lowered_operation(second))
    assert sum(node.type == "AssignVariableOp" for node in run) == 2 - rank


def test_what_a_loop_reads_once_more_follows_the_update_on_all_ranks():
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default() as tf_graph:
        b, shape = nets.Builder(tf.float32), mtf.Shape([nets.dim("a", 8)])
        v = b.variable("v", shape.dims)
        begin = mtf.depend(mtf.zeros(b.mesh, shape), [mtf.assign_add(v.operation, mtf.ones(b.mesh, shape))])
        count = mtf.import_tf_tensor(b.mesh, tf.constant(0), [])
        mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, s: [i + 1, s + mtf.read_variable(v.operation)],
                       [count, begin])
        plan = {**dict.fromkeys(all_operations(b.graph), MeshSpec(((frozenset(["a"]), 2),), (0, 1))),
                begin.operation: _on(0)}
        PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, 1))
        loop, = (node for node in tf_graph.get_operations() if node.type in ("While", "StatelessWhile"))
    read, = {t.op for t in loop.inputs if t.op.type == "ReadVariableOp"}
    assert any(node.type == "AssignAddVariableOp" for node in reached(read))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_follows_the_one_that_its_value_waits_for_on_all_ranks(rank):
    """Also where the value comes from another rank."""
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default() as tf_graph:
        b = nets.Builder(tf.float32)
        v, x = b.variable("v", [nets.dim("a", 8)]), b.input("x", [nets.dim("a", 8)])
        value = mtf.depend(x, [mtf.assign(v.operation, v * 0.5)])
        mtf.assign(v.operation, value)
        plan = {**dict.fromkeys(b.graph.operations, MeshSpec(((frozenset(["a"]), 2),), (0, 1))),
                value.operation: _on(0)}
        PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
        first, second = (node for node in tf_graph.get_operations() if node.type == "AssignVariableOp"
                         and "v_slice" in node.inputs[0].op.name)
    assert first in reached(second)


def test_an_update_behind_what_an_idle_loop_reads_needs_both_ends_of_its_transfers(monkeypatch):
    devices, found = cluster_devices(2, 1), []
    for rank in range(2):
        monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
        with tf.Graph().as_default():
            b, shape = nets.Builder(tf.float32), mtf.Shape([nets.dim("a", 8)])
            v = b.variable("v", shape.dims)
            begin = mtf.depend(mtf.zeros(b.mesh, shape), [mtf.assign_add(v.operation, mtf.ones(b.mesh, shape))])
            count = mtf.import_tf_tensor(b.mesh, tf.constant(0), [])
            mtf.while_loop(lambda i, _: mtf.less(i, 3),
                           lambda i, s, v=v: [i + 1, s + mtf.read_variable(v.operation)], [count, begin])
            last = mtf.assign_add(v.operation, mtf.ones(b.mesh, shape))
            plan = {**dict.fromkeys(all_operations(b.graph), _on(1)), begin.operation: _on(0)}
            lowering = PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
            found.append((lowering, [lowering.lowered_operation(last)]))
    assert_all_ends_or_none(found)


def test_an_update_that_something_waits_for_is_run_by_all_ranks_or_by_none():
    """Also where another update is fetched, and only what is sent on waits for it."""
    devices, found = cluster_devices(2, 1), []
    for rank in range(2):
        with tf.Graph().as_default():
            b = nets.Builder(tf.float32)
            w, u, v = (b.variable(name, [nets.dim("a", 8)]) for name in "wuv")
            new = w * 0.5
            first = mtf.assign(w.operation, new)
            mtf.assign(u.operation, mtf.depend(v * 0.5, [first]))
            last = mtf.assign(v.operation, v * 2.0)
            plan = {**dict.fromkeys(b.graph.operations, _on(0)), u.operation: _on(1), **dict.fromkeys(
                (w.operation, new.operation, first), MeshSpec(((frozenset(["a"]), 2),), (0, 1)))}
            lowering = PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
            run = reached(lowering.lowered_operation(last))
        found.append(any(node.type == "AssignVariableOp" and "w_slice" in node.inputs[0].op.name for node in run))
    assert found[0] == found[1]


def test_gradients_that_are_one_tensor_are_two_transfers_on_all_ranks(monkeypatch):
    """TensorFlow gives both terms of a sum the very same tensor."""
    devices, found = cluster_devices(2, 1), []
    for rank in range(2):
        monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
        with tf.Graph().as_default():
            b = nets.Builder(tf.float32)
            x, y = (b.input(name, [nets.dim("a", 8)]) for name in "xy")
            made = mtf.slicewise(lambda s, t: s + t, [x, y], splittable_dims=x.shape.dims)
            read = [mtf.tanh(part) for part in mtf.gradients([mtf.reduce_sum(made)], [x, y])]
            plan = {**dict.fromkeys(b.graph.operations, _on(0)), **{one.operation: _on(1) for one in read}}
            found.append(PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank)).emitter.ledger)
    assert [ledger.transfers for ledger in found] == [2, 2]
    assert found[0].digest() == found[1].digest()


def _seeds_of_ranks(draw):
    """The seeds of the one node that a function of slices draws by, on each of two ranks of a graph with a seed."""
    devices, seeds = cluster_devices(2, 1), []
    for rank in range(2):
        with tf.Graph().as_default() as tf_graph:
            tf.set_random_seed(1)
            b = nets.Builder(tf.float32)
            x = b.input("x", [nets.dim("a", 8)])
            mtf.slicewise(lambda t: t * draw(t.shape), [x], splittable_dims=x.shape.dims)
            plan = dict.fromkeys(b.graph.operations, MeshSpec(((frozenset(["a"]), 2),), (0, 1)))
            PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
            drawing, = (node for node in tf_graph.get_operations() if node.type == "RandomUniform")
            seeds.append((drawing.get_attr("seed"), drawing.get_attr("seed2")))
            assert tf_graph.seed == 1
    return seeds


def test_ranks_draw_numbers_of_their_own_in_functions_of_slices():
    """Every rank's graph counts its random nodes by itself: by that alone all ranks would draw the same."""
    one, other = _seeds_of_ranks(tf.random.uniform)
    assert one != other


def test_numbers_with_a_seed_of_their_own_are_those_of_one_process_on_all_ranks():
    """Only what TensorFlow counts is told apart: copies of a block that are given a seed have to stay equal."""
    assert _seeds_of_ranks(lambda shape: tf.random.uniform(shape, seed=7)) == [(1, 7), (1, 7)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_that_assigns_follows_the_update_that_what_it_captures_waits_for_on_all_ranks(rank):
    """Also where what it captures comes from another rank."""
    devices = cluster_devices(2, 1)
    with tf.Graph().as_default() as tf_graph:
        b = nets.Builder(tf.float32)
        v = b.variable("v", [nets.dim("a", 8)])
        x, start = (b.input(name, [nets.dim("a", 8)]) for name in "xs")
        value = mtf.depend(x, [mtf.assign(v.operation, v * 0.5)])
        count = mtf.import_tf_tensor(b.mesh, tf.constant(0), [])
        mtf.while_loop(lambda i, _: mtf.less(i, 3),
                       lambda i, s: [i + 1, mtf.depend(s, [mtf.assign_add(v.operation, value)])], [count, start])
        plan = {**dict.fromkeys(all_operations(b.graph), MeshSpec(((frozenset(["a"]), 2),), (0, 1))),
                value.operation: _on(0)}
        PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank))
        loop, = (node for node in tf_graph.get_operations() if node.type in ("While", "StatelessWhile"))
    assert any(node.type == "AssignVariableOp" and "v_slice" in node.inputs[0].op.name for node in reached(loop))


def test_what_one_rank_casts_of_a_variable_renames_nothing_in_a_loop(monkeypatch):
    """TensorFlow takes no notice of case: a node "Cast" at the top of the body would make "cast" a "cast_1"."""
    devices, found = cluster_devices(2, 1), []
    for rank in range(2):
        monkeypatch.setattr(collectives, "_KEYS", itertools.count(1))
        with tf.Graph().as_default():
            b = nets.Builder(tf.bfloat16)
            v, start = b.variable("v", [nets.dim("a", 8)]), b.input("s", [nets.dim("a", 8)])
            count = mtf.import_tf_tensor(b.mesh, tf.constant(0), [])

            def body(i, s, v=v):
                value = mtf.cast(mtf.cast(s, tf.float32), tf.bfloat16)
                return [i + 1, mtf.depend(value, [mtf.assign_add(v.operation, s)])]

            mtf.while_loop(lambda i, _: mtf.less(i, 3), body, [count, start])
            operations = all_operations(b.graph)
            (cast,) = (operation for operation in operations if operation.name == "cast")
            plan = {**dict.fromkeys(operations, _on(0)), cast: _on(1)}
            found.append(PlanLowering(b.graph, plan, devices, rank=Rank.of(devices, rank)).emitter.ledger)
    assert found[0].transfers == found[1].transfers
    assert found[0].digest() == found[1].digest()
