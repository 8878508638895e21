"""Loops, functions of slices and constants that lower otherwise than they look: against values worked out by hand."""

import numpy as np
import pytest
from harness import device_names, evaluate, session
from nets import Builder, dim, random_plan

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.operations.flow import all_operations

_DEVICES = device_names(4)
_X, _Y = dim("x", 4), dim("y", 8)


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


def _by(name, parts, devices=None):
    return MeshSpec(((frozenset([name] if name else []), parts),), tuple(devices or range(parts)))


_WHOLE = _by("", 1)


def _random(graph, seed):
    return {**random_plan(graph, 4, seed)} if seed is not None else dict.fromkeys(all_operations(graph), _WHOLE)


def _counter(builder, start=0):
    return mtf.import_tf_tensor(builder.mesh, tf.constant(start), [])


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_input_that_is_there_under_two_names_has_one_gradient(builder, seed):
    """A rename makes no node: both names are one tf.Tensor, of which TensorFlow tells all that comes of it at once."""
    batch, n, m = dim("batch", 8), dim("n", 4), dim("m", 4)
    w = builder.variable("w", [n])
    x = builder.input("x", [batch, n]) * w
    y = mtf.slicewise(lambda a, b: a[:, :, None] * b[:, None, :], [x, mtf.rename_dimension(x, "n", "m")],
                      output_shape=[batch, n, m], splittable_dims=[batch])
    c = builder.input("c", [batch, n, m])
    gradient, = mtf.gradients([mtf.reduce_sum(y * c)], [w])
    values, weights, wanted = (builder.values("x", [8, 4]), 0.5 * builder.values("w", [4]),
                               builder.values("c", [8, 4, 4]))
    by_x = np.einsum("bnm,bm->bn", wanted, values * weights) + np.einsum("bnm,bn->bm", wanted, values * weights)
    found, = evaluate(PlanLowering(builder.graph, _random(builder.graph, seed), _DEVICES), [gradient])
    np.testing.assert_allclose(found, (by_x * values).sum(0), rtol=1e-4)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_same_input_twice(builder, seed):
    x = builder.input("x", [_Y])
    y = mtf.slicewise(lambda a, b: a * a * b, [x, mtf.stop_gradient(x)], splittable_dims=[_Y])
    gradient, = mtf.gradients([mtf.reduce_sum(y)], [x])
    found, = evaluate(PlanLowering(builder.graph, _random(builder.graph, seed), _DEVICES), [gradient])
    np.testing.assert_allclose(found, 2 * builder.values("x", [8]) ** 2, rtol=1e-5)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_loop_over_nothing_but_its_counter(builder, seed):
    last, = mtf.while_loop(lambda i: mtf.less(i, 5), lambda i: [i + 1], [_counter(builder)])
    assert evaluate(PlanLowering(builder.graph, _random(builder.graph, seed), _DEVICES), [last]) == [5]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_array_in_a_constant_goes_in_parts(builder, seed):
    array = np.arange(8.0, dtype=np.float32)
    y = mtf.constant(builder.mesh, array, mtf.Shape([_Y])) * builder.input("y", [_Y])
    plan = dict.fromkeys(all_operations(builder.graph), _by("y", 4)) if seed == 0 else _random(builder.graph, seed)
    found, = evaluate(PlanLowering(builder.graph, plan, _DEVICES), [y])
    np.testing.assert_allclose(found, array * builder.values("y", [8]), rtol=1e-6)


@pytest.mark.parametrize("dependency", [False, True])
def test_a_sum_that_an_inner_loop_begins_with_is_there_outside(builder, dependency):
    """It is summed before the outer loop, not in its body, of whose tensors nobody outside knows."""
    x = builder.input("x", [_X, _Y])
    total = mtf.reduce_sum(x, reduced_dim=_Y)

    def outer(i, state):
        if dependency:
            return [i + 1, state + mtf.tanh(mtf.depend(state, [total]))]
        inner = mtf.while_loop(lambda j, _: mtf.less(j, 2), lambda j, s: [j + 1, mtf.tanh(s)], [i * 0, total])
        return [i + 1, state + inner[1]]

    out = mtf.while_loop(lambda i, _: mtf.less(i, 3), outer, [_counter(builder), mtf.zeros(builder.mesh, [_X])])[1]
    after = mtf.exp(total)
    plan = dict.fromkeys(all_operations(builder.graph), _by("y", 4))
    found = evaluate(PlanLowering(builder.graph, plan, _DEVICES), [out, after])
    sums = builder.values("x", [4, 8]).sum(1)
    np.testing.assert_allclose(found[0], 0 * sums if dependency else 3 * np.tanh(np.tanh(sums)), rtol=1e-5)
    np.testing.assert_allclose(found[1], np.exp(sums), rtol=1e-5)


def test_a_sum_that_a_loop_returns_as_it_is(builder):
    x = builder.input("x", [_X, _Y])
    total = mtf.reduce_sum(x, reduced_dim=_Y)
    out = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, _: [i + 1, total],
                         [_counter(builder), mtf.zeros(builder.mesh, [_X])])[1]
    after = mtf.exp(total)
    found = evaluate(PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), _by("y", 4)), _DEVICES),
                     [out, after])
    sums = builder.values("x", [4, 8]).sum(1)
    np.testing.assert_allclose(found[0], sums, rtol=1e-5)
    np.testing.assert_allclose(found[1], np.exp(sums), rtol=1e-5)


def test_what_a_loop_prints_of_others_is_summed_before_it(builder):
    """A sum that is made in the loop would be there for nobody after it."""
    x = builder.input("x", [_X, _Y])
    total = mtf.reduce_sum(x, reduced_dim=_Y)
    out = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, s: [i + 1, mtf.Print(s + 1.0, [total], "total")],
                         [_counter(builder), mtf.zeros(builder.mesh, [_X])])[1]
    after = mtf.exp(total)
    found = evaluate(PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), _by("y", 4)), _DEVICES),
                     [out, after])
    np.testing.assert_array_equal(found[0], [3.0] * 4)
    np.testing.assert_allclose(found[1], np.exp(builder.values("x", [4, 8]).sum(1)), rtol=1e-5)


@pytest.mark.parametrize(("turns", "layouts"), [
    (3, (_by("x", 4), _by("x", 4, (3, 2, 1, 0)))), (2, (_by("x", 2), _by("x", 4))), (3, (_by("x", 4), _by("y", 2))),
    (3, (_by("y", 4), _WHOLE))])
def test_loop_variables_that_change_places_start_each_in_a_layout_of_its_own(builder, turns, layouts):
    a, b = (builder.input(name, [_X, _Y]) for name in "ab")
    one, other = a + 1.0, b + 2.0
    last = mtf.while_loop(lambda i, *_: mtf.less(i, turns), lambda i, a, b: [i + 1, b, a],
                          [_counter(builder), one, other])
    plan = dict.fromkeys(all_operations(builder.graph), _WHOLE)
    plan[one.operation], plan[other.operation] = layouts
    found = evaluate(PlanLowering(builder.graph, plan, _DEVICES), last[1:])
    values = [builder.values("a", [4, 8]) + 1, builder.values("b", [4, 8]) + 2]
    for got, wanted in zip(found, values[::-1] if turns % 2 else values, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("newer", [True, False])
def test_loop_variables_held_in_variables(builder, newer):
    """mtf.while_loop(num_loop_vars=...) assigns variables in the body: every iteration reads them anew. In TensorFlow's
    older control flow condition and body share a scope: what the condition has read is there once more."""
    x = builder.input("x", [_Y])
    last = mtf.while_loop(lambda i, *_: mtf.less(i, 5), lambda i, s, t: [i + 1, s + mtf.cast(i, tf.float32), s + t],
                          [_counter(builder), x, x], num_loop_vars=1)
    (tf.enable_control_flow_v2 if newer else tf.disable_control_flow_v2)()
    try:
        lowering = PlanLowering(builder.graph, random_plan(builder.graph, 4, 3), _DEVICES)
    finally:
        tf.enable_control_flow_v2()
    variables = [v for v in builder.graph.all_variables if "loop_var" in v.name]
    out, collect = lowering.export_to_tf_tensor(last[0]), lowering.copy_slices_to_masters()
    with session() as run:
        run.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        run.run(lowering.copy_masters_to_slices())
        assert run.run(out) == 5
        run.run(collect)
        got = run.run([v.get_master() for v in variables])
    state = total = builder.values("x", [8])
    for number in range(5):
        state, total = state + number, state + total
    np.testing.assert_allclose(got, [state, total], rtol=1e-5)


def test_who_reads_outside_what_a_loop_assigns_reads_it_before(builder):
    """Also who reads it once more."""
    v = builder.variable("v", [_Y])
    y = mtf.exp(v)
    again = mtf.read_variable(v.operation)

    def body(i, s):
        return [i + 1, mtf.depend(s, [mtf.assign_add(v.operation, s)])]

    last = mtf.while_loop(lambda i, _: mtf.less(i, 3), body, [_counter(builder), builder.input("s", [_Y])])
    lowering = PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), _by("y", 4)), _DEVICES)
    waiting = [node for node in tf.get_default_graph().get_operations() if node.type == "While"]
    assert len(waiting) == 1
    before = set(waiting)
    while waiting:
        node = waiting.pop()
        new = {*node.control_inputs, *(tensor.op for tensor in node.inputs)} - before
        before |= new
        waiting += new
    assert sum(node.type == "ReadVariableOp" for node in before) == 2 * 4
    out = [lowering.export_to_tf_tensor(t) for t in (y, last[1], again)]
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for step in range(3):
            found = run.run(out)[0]
            np.testing.assert_allclose(found, np.exp(0.5 * builder.values("v", [8])
                                                     + 3 * step * builder.values("s", [8])), rtol=1e-4)


def test_a_sum_that_a_loop_renames_is_there_outside(builder):
    """The body reads it in a layout of its own, and whoever reads it after the loop as it was."""
    a = dim("a", 8)
    total = mtf.reduce_sum(builder.input("x", [a, _Y]), reduced_dim=_Y)
    out = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, s: [i + 1, s + mtf.reshape(total, [dim("b", 8)])],
                         [_counter(builder), mtf.zeros(builder.mesh, [dim("b", 8)])])[1]
    plan = dict.fromkeys(all_operations(builder.graph), _WHOLE)
    plan[total.operation] = _by("y", 4)
    rename = next(op for op in plan if isinstance(op, mtf.ops.ReshapeOperation))
    plan[rename] = MeshSpec(((frozenset(["a"]), 2), (frozenset(), 2)), (0, 1, 2, 3))
    found = evaluate(PlanLowering(builder.graph, plan, _DEVICES, shared_memory=False), [out, total])
    sums = builder.values("x", [8, 8]).sum(1)
    np.testing.assert_allclose(found[0], 3 * sums, rtol=1e-5)
    np.testing.assert_allclose(found[1], sums, rtol=1e-5)


@pytest.mark.parametrize("later", [False, True])
def test_what_a_loop_reads_once_more_is_the_value_as_it_begins(builder, later):
    """Who is handed the variable itself would read it before or after an update that does not wait for the loop. One
    that the loop waits for (`later`) comes before."""
    v = builder.variable("v", [_Y])
    updates = []
    if later:
        updates.append(mtf.assign_add(v.operation, mtf.ones(builder.mesh, mtf.Shape([_Y]))))
    begin = mtf.depend(mtf.zeros(builder.mesh, [_Y]), updates) if later else mtf.zeros(builder.mesh, [_Y])
    out = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, s: [i + 1, s + mtf.read_variable(v.operation)],
                         [_counter(builder), begin])[1]
    if not later:
        updates.append(mtf.assign_add(v.operation, mtf.ones(builder.mesh, mtf.Shape([_Y]))))
    plan = dict.fromkeys(all_operations(builder.graph), _by("y", 4))
    lowering = PlanLowering(builder.graph, plan, _DEVICES)
    loops = [node for node in tf.get_default_graph().get_operations() if node.type in ("While", "StatelessWhile")]
    assert len(loops) == 1
    assert not any(tensor.dtype == tf.resource for tensor in loops[0].inputs)
    fetches = [lowering.export_to_tf_tensor(out), lowering.lowered_operation(updates[0])]
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        for step in range(3):
            np.testing.assert_allclose(run.run(fetches)[0], 3 * (0.5 * builder.values("v", [8]) + step + later),
                                       rtol=1e-5)


def test_an_update_needs_no_feed_of_a_loop_that_reads_before_it(builder):
    v, x = builder.variable("v", [_Y]), tf.placeholder(tf.float32, [8])
    mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, s: [i + 1, s + mtf.read_variable(v.operation)],
                   [_counter(builder), mtf.import_tf_tensor(builder.mesh, x, mtf.Shape([_Y]))])
    update = mtf.assign_add(v.operation, mtf.ones(builder.mesh, mtf.Shape([_Y])))
    lowering = PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), _by("y", 4)), _DEVICES)
    with session() as run:
        run.run(tf.global_variables_initializer())
        run.run(lowering.copy_masters_to_slices())
        run.run(lowering.lowered_operation(update))


@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_that_waits_for_an_update_by_what_it_captures_reads_after_it(builder, inside):
    v = builder.variable("v", [_Y])
    ones = mtf.ones(builder.mesh, mtf.Shape([_Y]))
    update = mtf.assign_add(v.operation, ones)
    one = ones if inside else mtf.depend(ones, [update])

    def body(i, s):
        return [i + 1, (mtf.depend(s, [update]) if inside else s) + one * mtf.read_variable(v.operation)]
    mtf.while_loop(lambda i, _: mtf.less(i, 3), body, [_counter(builder), mtf.zeros(builder.mesh, [_Y])])
    PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), _by("y", 4)), _DEVICES)
    loop, = (node for node in tf.get_default_graph().get_operations() if node.type in ("While", "StatelessWhile"))
    reads = {t.op for t in loop.inputs if t.op.type == "ReadVariableOp"}
    assert len(reads) == 4
    for read in reads:
        waiting, before = [read], set()
        while waiting:
            node = waiting.pop()
            new = {*node.control_inputs, *(t.op for t in node.inputs)} - before
            before |= new
            waiting += new
        assert any(node.type == "AssignAddVariableOp" for node in before)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("seed", [None, 0])
def test_random_numbers_differ_from_iteration_to_iteration(builder, seed, stepped):
    shape = mtf.Shape([_Y])
    last = mtf.while_loop(lambda i, *_: mtf.less(i, 2),
                          lambda i, _, drawn: [i + 1, drawn, mtf.random_uniform(builder.mesh, shape)],
                          [_counter(builder), mtf.zeros(builder.mesh, shape), mtf.zeros(builder.mesh, shape)])
    lowering = PlanLowering(builder.graph, _random(builder.graph, seed), _DEVICES,
                            step=tf.constant(3) if stepped else None)
    first, second = evaluate(lowering, last[1:])
    assert first.any()
    assert not np.array_equal(first, second)


def test_a_sum_from_outside_that_a_loop_adds_up_is_there_outside(builder):
    """Several read it after the loop: it is made for all of them, before the loop and not in its body."""
    x = builder.input("x", [_X, _Y])
    total = mtf.reduce_sum(x, reduced_dim=_Y)
    added = mtf.while_loop(lambda i: mtf.less(i, 3), lambda i: [i + 1, total], [_counter(builder)],
                           has_accumulators=True)[1]
    after = [mtf.exp(total), mtf.tanh(total)]
    plan = dict.fromkeys(all_operations(builder.graph), _by("y", 4))
    found = evaluate(PlanLowering(builder.graph, plan, _DEVICES), [added, *after])
    sums = builder.values("x", [4, 8]).sum(1)
    for value, wanted in zip(found, (3 * sums, np.exp(sums), np.tanh(sums)), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4)


def test_a_constant_that_ends_a_loop_can_still_be_fed(builder):
    """How many iterations it makes is asked for prices alone."""
    limit = tf.constant(3)
    most = mtf.import_tf_tensor(builder.mesh, limit, [])
    last, = mtf.while_loop(lambda i: mtf.less(i, most), lambda i: [i + 1], [_counter(builder)])
    lowering = PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), _WHOLE), _DEVICES)
    found, = evaluate(lowering, [last], {limit: 5})
    assert found == 5
