"""Loops in the computation graph: the operations of a body are layers of their own, with the number of iterations."""

import dataclasses
import itertools
import math

import pytest
from nets import Builder, build, dim, microbatches
from prices import price_strategy

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.memory import MemoryModel, strategy_memory
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.space import MeshShape
from pase_mtf.machine.machine import Machine
from pase_mtf.operations.facts import read_operations
from pase_mtf.strategy.experts import configurations_of_layout
from pase_mtf.strategy.find import find_strategy


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


def _start(builder, value=0):
    return mtf.constant(builder.mesh, value, dtype=tf.int32)


def _trips(builder):
    """Per operation of the graph's loops, how often it runs."""
    return {fact.name: fact.trips for fact in read_operations(builder.graph) if fact.loops}


def _relu_in(builder, condition, variables, name="inside"):
    """A loop whose body has an operation of this name."""
    def body(*state):
        mtf.relu(builder.input(f"x_{name}", [dim("a", 4)]), name=name)
        return [entry + 1 for entry in state]
    mtf.while_loop(condition, body, variables)


@pytest.mark.parametrize(("condition", "start", "trips"), [
    (lambda i: mtf.less(i, 7), 0, 7),
    (lambda i: mtf.less_equal(i, 7), 2, 6),
    (lambda i: mtf.logical_and(mtf.less(i, 7), mtf.less(i * 2, 9)), 0, 5),
    (lambda i: mtf.not_equal(i, 3), 0, 3),
    (lambda i: mtf.less(i, 7), 9, 0)])
def test_iterations_are_counted_where_the_condition_can_be_computed(builder, condition, start, trips):
    _relu_in(builder, condition, [_start(builder, start)])
    assert _trips(builder)["inside"] == trips


def test_only_what_the_condition_depends_on_counts(builder):
    _relu_in(builder, lambda i, *_: mtf.less(i, 4), [_start(builder), builder.input("state", [dim("a", 256)])])
    assert _trips(builder)["inside"] == 4


def test_iterations_are_counted_where_the_state_is_kept_in_variables(builder):
    """Mesh-TF's way to keep it there: what counts the iterations waits for the assignments."""
    state = builder.input("state", [dim("a", 4)])
    mtf.while_loop(lambda i, _: mtf.less(i, 6), lambda i, s: [i + 1, mtf.relu(s, name="inside")],
                   [_start(builder), state], num_loop_vars=1)
    assert {trips for name, trips in _trips(builder).items() if name.endswith("inside")} == {6}
    assert "assumed" not in export_graph(builder.graph).meta


@pytest.mark.parametrize(("condition", "most", "trips"), [
    (lambda i: mtf.less(i, 5), lambda: 3, 3), (lambda i: mtf.less(i, 5), lambda: 9, 5),
    (lambda i: mtf.greater_equal(i, 0), lambda: 4, 4),  # never ends by itself
    (lambda i: mtf.less(i, 5), lambda: tf.constant(3), 3),
    (lambda i: mtf.less(i, 5), lambda: tf.placeholder(tf.int32, []), 1)])
def test_a_loop_ends_after_its_maximum_of_iterations(builder, condition, most, trips):
    mtf.while_loop(condition, lambda i: [i + 1], [_start(builder)], maximum_iterations=most())
    assert set(_trips(builder).values()) == {trips}


def test_what_prints_is_passed_by_where_iterations_are_counted(builder, capfd):
    x = builder.input("x", [dim("a", 4)])
    mtf.while_loop(lambda i, _: mtf.less(i, 4), lambda i, s: [
        mtf.Print(i, [s], "iteration") + 1, mtf.Print(mtf.relu(s, name="inside"), [], "state")], [_start(builder), x])
    assert _trips(builder)["inside"] == 4
    assert "assumed" not in export_graph(builder.graph).meta
    assert not capfd.readouterr().err.count("iteration")


def test_what_cannot_be_lowered_by_itself_is_not_known(builder):
    """A number that is a tensor of the program's own graph, say."""
    step = tf.constant(2)
    _relu_in(builder, lambda i: mtf.less(i, 4), [_start(builder)])
    mtf.while_loop(lambda i: mtf.less(i, 4), lambda i: [i + step], [_start(builder)])
    (assumed,) = export_graph(builder.graph).meta["assumed"]
    assert "while_loop_1" in assumed


@pytest.mark.parametrize("condition", [
    lambda b: lambda i, s: mtf.less(mtf.reduce_sum(s), 9.0),  # of data
    lambda b: lambda i, s: mtf.less(mtf.cast(i, tf.float32), b.variable("limit", [])),
    lambda b: lambda i, s: mtf.less(mtf.random_uniform(b.mesh, [], dtype=tf.float32), 0.9),
    lambda b: lambda i, s: mtf.greater_equal(i, 0)])  # never ends
def test_a_loop_of_unknown_length_is_taken_to_run_once(builder, condition):
    placeholder = mtf.import_tf_tensor(builder.mesh, tf.placeholder(tf.float32, [4]), [dim("a", 4)])
    _relu_in(builder, condition(builder), [_start(builder), placeholder])
    assert _trips(builder)["inside"] == 1
    (assumed,) = export_graph(builder.graph).meta["assumed"]
    assert "while_loop" in assumed
    assert "1 iteration" in assumed


def test_answers_say_what_they_assume(builder):
    a, b = dim("a", 8), dim("b", 8)
    state, w = builder.input("state", [a, b]), builder.variable("w", [b, dim("c", 8)])
    looped = mtf.while_loop(lambda _, t: mtf.less(mtf.reduce_sum(t), 9.0), lambda i, t: [
        i + 1, mtf.rename_dimension(mtf.einsum([t, w], [a, dim("c", 8)]), "c", "b")], [_start(builder), state])[1]
    strategy = find_strategy(export_graph(builder.graph), devices=2, machine="h100")
    assert "note: how often loop while_loop runs" in str(strategy)
    assert "note: how often loop while_loop runs" in str(find_layout(builder.graph, 2, [looped], "h100"))


def test_loops_in_loops_multiply(builder):
    def outer(i):
        _relu_in(builder, lambda j: mtf.less(j, 3), [_start(builder)])
        return [i + 1]
    mtf.while_loop(lambda i: mtf.less(i, 5), outer, [_start(builder)])
    assert _trips(builder)["inside"] == 15


def test_a_loop_is_saved_and_loaded(builder, tmp_path):
    net = microbatches(builder)
    graph = export_graph(net.graph)
    graph.save(tmp_path / "graph.json")
    loaded = ComputationGraph.load(tmp_path / "graph.json")
    assert loaded == graph
    assert {operation.trips for layer in loaded.layers for operation in layer.operations} == {1, 2}
    assert {edge.trips for edge in loaded.edges} == {2}


def test_what_goes_round_is_moved_where_it_is_used(builder):
    """In: once; from layer to layer: in every iteration; out: once; what the loop reads from outside: once."""
    a, b, c = dim("a", 8), dim("b", 8), dim("c", 8)
    x, outside = mtf.relu(builder.input("x", [a, b])), builder.input("outside", [a, c])
    w, v, u = (builder.variable(name, dims) for name, dims in (("w", [b, c]), ("v", [c, b]), ("u", [b, c])))
    x = mtf.einsum([mtf.einsum([x, u], [a, c]), builder.variable("t", [c, b])], [a, b])
    beside = mtf.einsum([outside, builder.variable("s", [c, b])], [a, b])

    def body(i, state):
        return [i + 1, mtf.einsum([mtf.einsum([state, w], [a, c]), v], [a, b]) + beside]
    looped = mtf.while_loop(lambda i, _: mtf.less(i, 5), body, [_start(builder), x])[1]
    mtf.einsum([looped, builder.variable("r", [b, c])], [a, c])
    graph = export_graph(builder.graph)
    owner = {variable.name: number for number, layer in enumerate(graph.layers) for variable in layer.variables}
    trips = {(edge.source, edge.target): edge.trips for edge in graph.edges}
    assert trips == {
        (owner["u"], owner["t"]): 1, (owner["t"], owner["v"]): 1,  # laid out as the body makes it
        (owner["v"], owner["w"]): 5, (owner["w"], owner["v"]): 5, (owner["s"], owner["v"]): 1,
        (owner["v"], owner["r"]): 1}


def _parts(what):
    return [f"{what} {phase}" for phase in ("forward", "backward", "update")]


def _without_the_loop(graph: ComputationGraph) -> ComputationGraph:
    """The graph less what no unrolled program has: counting, and adding the first part to zeros."""
    layers = []
    for layer in graph.layers:
        operations = [dataclasses.replace(operation, trips=operation.trips - 1)
                      if operation.type == "WhileLoopOperation" and operation.kind == "pointwise" else operation
                      for operation in layer.operations
                      if operation.type not in ("Constant", "ScalarAddOperation") or operation.flops > 1.0]
        # Unrolled, microbatches find some of what others have computed.
        operations = [dataclasses.replace(operation, repeats=False) for operation in operations]
        layers.append(dataclasses.replace(layer, operations=() if layer.kind == "loop" else tuple(operations)))
    return dataclasses.replace(graph, layers=tuple(layers))


@pytest.mark.parametrize("machine", ["1080ti", pytest.param("h100", marks=pytest.mark.slow)])
@pytest.mark.parametrize("splits", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_microbatches_cost_what_they_cost_one_by_one(splits, machine):
    graphs = []
    for unrolled in (False, True):
        with tf.Graph().as_default():
            net = microbatches(Builder(tf.float32), splits, unrolled=unrolled, errors=False)
            mtf.optimize.SgdOptimizer(0.1).apply_grads(net.gradients, net.graph.trainable_variables)
            graphs.append(export_graph(net.graph))
    graphs = list(map(_without_the_loop, graphs))
    machine, dims = Machine.load(machine), ("batch", "features", "hidden", "classes")
    for mesh in (MeshShape((("a", 4),)), MeshShape((("a", 2), ("b", 2)))):
        for axes in itertools.product(("", *mesh.names), repeat=len(dims)):  # every layout there is
            rules = {name: axis for name, axis in zip(dims, axes, strict=True) if axis}
            looped, plain = (price_strategy(graph, machine, 4, configurations_of_layout(graph, mesh.axes, rules)).parts
                             for graph in graphs)
            # Outside of a loop, adding up gradients is no part of the backward pass.
            for parts in (("forward", "backward", "update"), ("overhead",), _parts("all-reduce"), _parts("resharding")):
                assert sum(looped.get(part, 0.0) for part in parts) == pytest.approx(
                    sum(plain.get(part, 0.0) for part in parts), rel=1e-9, abs=1e-18), (parts, mesh, rules)


def test_the_batch_divides_the_work_of_a_loop():
    with tf.Graph().as_default():
        graph = export_graph(build("microbatches", "sgd", tf.float32).graph)
    machine = dataclasses.replace(Machine.load("h100"), overhead=0.0)
    whole, split = (price_strategy(graph, machine, 4, configurations_of_layout(graph, [("all", 4)], rules)).parts
                    for rules in ({}, {"batch": "all"}))
    assert split["forward"] < 0.5 * whole["forward"]
    assert split["all-reduce backward"] > 0.0 == whole["all-reduce backward"]


def _trained_in_microbatches():
    """The graph, the operations that make gradients of its weights, and those that stand for the sums of these."""
    with tf.Graph().as_default():
        net = microbatches(Builder(tf.float32), 2, errors=False)
        mtf.optimize.SgdOptimizer(0.1).apply_grads(net.gradients, net.graph.trainable_variables)
        graph = export_graph(net.graph)
    backward = [operation for layer in graph.layers for operation in layer.operations if operation.phase == "backward"]
    sums = [operation for operation in backward if operation.type == "WhileLoopOperation" and operation.reduced]
    gradients = [operation for operation in backward if any(held.waits_until >= 0 for held in operation.held)
                 and operation not in sums]
    assert len(gradients) == len(sums) == 3
    return graph, gradients, sums


def test_what_an_iteration_adds_is_there_until_that_has_ended():
    """All of it, for additions may be left until then; and no longer."""
    _, gradients, _ = _trained_in_microbatches()
    for order in range(2):
        ends = {operation.held[order].end for operation in gradients}
        assert len(ends) == 1
        assert max(operation.held[order].waits_until for operation in gradients) <= min(ends)


def test_the_sums_of_a_loop_are_there_while_it_turns_and_wait_for_other_devices_after_it():
    graph, gradients, sums = _trained_in_microbatches()
    assert [len(operation.held) for operation in sums] == [2, 2, 2]
    for order in range(2):
        for total in (operation.held[order] for operation in sums):
            assert total.begin < min(operation.held[order].begin for operation in gradients)
            assert total.waits_until > max(operation.held[order].end for operation in gradients)
    # On devices of their own, what arrives for the largest counts, when what the last iteration added has gone.
    split = configurations_of_layout(graph, [("all", 4)], {"batch": "all"})
    moment = sums[0].held[0].waits_until
    largest = max(4 * math.prod(operation.outputs[0].shape) for operation in sums)

    def bytes_at(graph):
        return sum(float(MemoryModel(graph).layer(number, [one], moment)[0]) for number, one in enumerate(split))

    summed_before = dataclasses.replace(graph, layers=tuple(dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, reduced=()) if operation in sums else operation
        for operation in layer.operations)) for layer in graph.layers))
    assert bytes_at(graph) >= bytes_at(summed_before) + largest


def test_a_sum_from_outside_of_a_loop_is_made_once(builder):
    a, b, c, one = dim("a", 8), dim("b", 8), dim("c", 8), dim("one", 1)
    z = mtf.einsum([builder.input("x", [a, b]), builder.variable("w", [b, one, c])], [a, one, c])
    mtf.while_loop(lambda i, _: mtf.less(i, 5),
                   lambda i, state: [i + 1, mtf.tanh(state + mtf.reshape(z, mtf.Shape([a, c])))],
                   [_start(builder), builder.input("start", [a, c])])
    assert [operation.trips for layer in export_graph(builder.graph).layers for operation in layer.operations
            if "b" in operation.reduced] == [1]


def test_a_loop_around_a_loop_that_assigns_is_needed(builder):
    v = builder.variable("v", [dim("a", 4)])

    def step(j):
        return [mtf.depend(j + 1, [mtf.assign_add(v.operation, v)])]

    def epoch(i):
        return [mtf.depend(i + 1, mtf.while_loop(lambda j: mtf.less(j, 2), step, [_start(builder)]))]
    mtf.while_loop(lambda i: mtf.less(i, 3), epoch, [_start(builder)])
    assert [fact.is_needed for fact in read_operations(builder.graph) if fact.rule.loop(fact.operation)] == [True] * 2


def test_what_goes_round_is_there_twice_where_it_is_written_over_something_else_too():
    def predicted(last):
        with tf.Graph().as_default():
            made = Builder(tf.float32)
            a, b, c = dim("a", 1024), dim("b", 8), dim("c", 8)
            w, v = made.variable("w", [b, c]), made.variable("v", [c, b])

            def body(i, state):
                return [i + 1, last(mtf.einsum([mtf.einsum([state, w], [a, c]), v], [a, b]))]
            mtf.while_loop(lambda i, _: mtf.less(i, 5), body, [_start(made), made.input("x", [a, b])])
            graph = export_graph(made.graph)
        return sum(strategy_memory(graph, [Configuration()] * len(graph.layers)).values())
    # The last operation writes in the place of what it reads: it takes nothing, and saves nothing.
    assert predicted(mtf.tanh) > 0.99 * predicted(lambda x: x)


def test_a_sum_that_is_added_up_twice_is_made_after_the_loop_alone(builder):
    a, b, c = dim("a", 8), dim("b", 8), dim("c", 8)
    x, w = builder.input("x", [a, b]), builder.variable("w", [b, c])

    def body(i):
        made = mtf.einsum([x, w], [a, c])
        return [i + 1, made, made]
    mtf.while_loop(lambda i: mtf.less(i, 5), body, [_start(builder)], has_accumulators=True)
    assert [operation.trips for layer in export_graph(builder.graph).layers for operation in layer.operations
            if "b" in operation.reduced] == [1, 1]


def test_what_layouts_per_layer_gain_is_told_of_loops_of_unknown_length_too(builder):
    a, b, c = dim("a", 8), dim("b", 8), dim("c", 8)
    state, w = builder.input("state", [a, b]), builder.variable("w", [b, c])
    looped = mtf.while_loop(lambda _, t: mtf.less(mtf.reduce_sum(t), 9.0), lambda i, t: [
        i + 1, mtf.rename_dimension(mtf.einsum([t, w], [a, c]), "c", "b")], [_start(builder), state])[1]
    assert "gives the body of a loop one layout" in str(find_layout(builder.graph, 2, [looped], "h100"))


def test_a_function_of_slices_that_draws_numbers_tells_no_iterations(builder):
    state = builder.input("state", [dim("a", 4)])
    _relu_in(builder, lambda i, _: mtf.slicewise(
        lambda t: tf.less(tf.random.uniform([]), 0.9), [i], mtf.Shape([]), tf.bool, []), [_start(builder), state])
    assert _trips(builder)["inside"] == 1
    (assumed,) = export_graph(builder.graph).meta["assumed"]
    assert "while_loop" in assumed


def test_a_sum_that_one_loop_alone_reads_is_made_by_stock_in_every_iteration(builder):
    a, b, c = dim("a", 8), dim("b", 8), dim("c", 8)
    z = mtf.einsum([builder.input("x", [a, b]), builder.variable("w", [b, c])], [a, c])
    mtf.while_loop(lambda i, _: mtf.less(i, 5), lambda i, state: [i + 1, state + mtf.tanh(z)],
                   [_start(builder), builder.input("start", [a, c])])
    assert [operation.summed_again for layer in export_graph(builder.graph).layers for operation in layer.operations
            if "b" in operation.reduced] == [4]
