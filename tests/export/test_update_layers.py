"""The optimizer's updates as layers of their own: what they hold, what they cost, what devices keep."""

import dataclasses

import harness
import nets
import numpy as np
import pytest
from prices import price_strategy

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.build import build_network
from pase_mtf.cost.memory import strategy_memory
from pase_mtf.errors import FormatError, InfeasibleError, MismatchError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.lowering.lowering import lower
from pase_mtf.strategy.experts import data_parallel, expert, zero
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy

_DEVICES = 4
_SHARED = dataclasses.replace(harness.MACHINE, shared_cores=True)


def _exported(name="mlp", optimizer="adam"):
    """Without and with updates as layers."""
    with tf.Graph().as_default():
        net = nets.build(name, optimizer, tf.float32)
        return [export_graph(net.graph, sharded_updates=sharded) for sharded in (False, True)]


def _updates(graph):
    return {layer.name: layer for layer in graph.layers if layer.kind == "update"}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adafactor"])
def test_what_an_update_layer_holds(optimizer):
    plain, graph = _exported(optimizer=optimizer)
    updates = _updates(graph)
    assert updates.keys() == {variable.updated_by for layer in graph.layers for variable in layer.variables
                              if variable.updated_by}
    assert not _updates(plain)
    for layer in graph.layers:
        for variable in layer.variables:
            assert bool(variable.updated_by) == variable.trainable
            assert variable.trainable != (layer.name in updates)
    # Every operation is in one layer, as without; the work is the same.
    assert graph.flops == plain.flops
    of_each = [sorted(entry.index for layer in exported.layers for entry in layer.operations if entry.type != "Assign")
               for exported in (plain, graph)]
    assert of_each[0] == of_each[1]
    for layer in updates.values():
        assert {entry.phase for entry in layer.operations} == {"update"}


def test_gradients_go_to_the_update_as_partial_sums_and_weights_there_and_back():
    _, graph = _exported(optimizer="sgd")
    for number, layer in enumerate(graph.layers):
        for variable in layer.variables:
            updating = [other.name for other in graph.layers].index(variable.updated_by)
            there = [edge for edge in graph.edges if (edge.source, edge.target) == (number, updating)
                     and edge.shape == variable.operand.shape]
            assert sorted(edge.pending for edge in there) == [(), ("batch",)]
            back = [edge for edge in graph.edges if (edge.source, edge.target) == (updating, number)
                    and edge.shape == variable.operand.shape]
            assert [edge.phase for edge in back] == ["update"]


@pytest.mark.parametrize("machine", [harness.MACHINE, _SHARED])
@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn"])
def test_updates_in_place_cost_and_hold_what_they_do_without_a_layer(name, machine):
    plain, graph = _exported(name)
    for by_hand in (data_parallel, expert):
        one, other = (evaluate_strategy(exported, by_hand(exported, _DEVICES), _DEVICES, machine)
                      for exported in (plain, graph))
        # Over an edge the product that makes a sum is priced, also where its rows are added up.
        more = 0.0 if machine.shared_cores or not any(edge.looked_up for edge in graph.edges) else 0.03
        assert one.seconds * (1 - 1e-12) <= other.seconds <= (1 + more + 1e-12) * one.seconds
        # Between two layers nothing is written in place.
        assert one.memory_bytes <= other.memory_bytes * (1 + 1e-12) <= 1.25 * one.memory_bytes
        if not machine.shared_cores:
            assert other.simulated_seconds == pytest.approx(one.simulated_seconds, rel=more + 1e-9)


@pytest.mark.parametrize("machine", [harness.MACHINE, _SHARED])
def test_shards_take_less_and_the_search_finds_them(machine):
    plain, graph = _exported()
    whole, sharded = (evaluate_strategy(exported, by_hand(exported, _DEVICES), _DEVICES, machine)
                      for exported, by_hand in ((plain, data_parallel), (graph, zero)))
    assert sharded.parts["update"] == pytest.approx(whole.parts["update"] / _DEVICES)
    assert sharded.memory["optimizer slots"] == pytest.approx(whole.memory["optimizer slots"] / _DEVICES)
    assert sharded.memory["weights"] == whole.memory["weights"]
    assert sharded.seconds < whole.seconds
    best, found = (find_strategy(exported, _DEVICES, machine, simulate=0) for exported in (plain, graph))
    assert found.search["optimal"]
    assert found.seconds <= min(best.seconds, sharded.seconds) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["mlp", "microbatches"])
def test_it_moves_no_more_than_an_all_reduce(name):
    """Without latencies: a reduce-scatter and an all-gather are the two halves of one. What microbatches add up is
    summed once, after all of them."""
    links = tuple(dataclasses.replace(link, latency=0.0) for link in harness.MACHINE.links[:1])
    machine = dataclasses.replace(harness.MACHINE, links=(dataclasses.replace(links[0], devices=64),))
    plain, graph = _exported(name, "sgd")
    whole, sharded = (price_strategy(exported, machine, _DEVICES, by_hand(exported, _DEVICES)).parts
                      for exported, by_hand in ((plain, data_parallel), (graph, zero)))

    def moved(parts):
        return sum(seconds for name, seconds in parts.items() if name.startswith(("all-reduce", "resharding")))

    assert moved(sharded) <= moved(whole) * (1 + 1e-9)


def test_memory_of_slots_is_that_of_the_update_layer_under_a_limit():
    _, graph = _exported()
    priced = build_network(graph, harness.MACHINE, _DEVICES)
    for configurations in (data_parallel(graph, _DEVICES), zero(graph, _DEVICES)):
        assignment = [priced.index(number, configuration) for number, configuration in enumerate(configurations)]
        assert priced.peak_memory(assignment)[0] == pytest.approx(
            sum(strategy_memory(graph, configurations).values()))
    least = sum(strategy_memory(graph, zero(graph, _DEVICES)).values())
    found = find_strategy(graph, _DEVICES, harness.MACHINE, simulate=0, memory_limit=least)
    assert found.memory_bytes <= least


def test_what_leads_to_all_weights_is_in_no_update():
    """Gradients that are clipped by their norm have two readers: they are summed where they are made."""
    with tf.Graph().as_default():
        net = nets.NETS["mlp"](nets.Builder(tf.float32))
        variables = net.graph.trainable_variables
        gradients = mtf.gradients([net.loss], [variable.outputs[0] for variable in variables])
        norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(gradient)) for gradient in gradients]))
        scale = mtf.reciprocal(mtf.maximum(norm, 1.0))
        updates = mtf.optimize.SgdOptimizer(0.05).apply_grads([gradient * scale for gradient in gradients], variables)
        graph = export_graph(net.graph, sharded_updates=True)
    assert updates
    assert len(_updates(graph)) == len({variable.updated_by for layer in graph.layers for variable in layer.variables})
    assert not any(edge.pending for edge in graph.edges if graph.layers[edge.target].kind == "update")
    assert any(entry.type == "SlicewiseOperation" and entry.phase == "update"
               for layer in graph.layers if layer.kind != "update" for entry in layer.operations)


def test_weights_that_two_assignments_change_keep_both():
    """A gradient's step and a decay in one step: neither undoes the other."""
    def trained(sharded):
        with tf.Graph().as_default():
            net = nets.NETS["mlp"](nets.Builder(tf.float64))
            variables = net.graph.trainable_variables
            gradients = mtf.gradients([net.loss], [variable.outputs[0] for variable in variables])
            decayed = variables[0]
            net.updates = [*mtf.optimize.SgdOptimizer(0.05).apply_grads(gradients, variables),
                           mtf.assign_sub(decayed, decayed.value * 0.5)]
            graph = export_graph(net.graph, sharded_updates=sharded)
            beside = {variable.name for layer in graph.layers for variable in layer.variables if variable.updated_by}
            assert beside == ({variable.name for variable in variables[1:]} if sharded else set())
            strategy = evaluate_strategy(graph, (zero if sharded else data_parallel)(graph, _DEVICES), _DEVICES,
                                         harness.MACHINE)
            return harness.train(net, lower(net.graph, strategy, harness.device_names(_DEVICES)), [{}, {}])

    found, wanted = trained(True), trained(False)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.variables, wanted.variables)


@pytest.mark.parametrize("optimizer", harness.some_slow(["adam", "assign", "assign_add"], ["sgd"]))
def test_sharded_data_parallelism_trains_as_one_device_does(optimizer):
    kept = []

    def rule(program):
        graph = export_graph(program.graph, sharded_updates=True)
        strategy = evaluate_strategy(graph, zero(graph, _DEVICES), _DEVICES, harness.MACHINE)
        lowering = lower(program.graph, strategy, harness.device_names(_DEVICES))
        kept.append({variable.name: (variable.shape.size, laid_out.laid_out_tensor.all_slices[0].shape.num_elements())
                     for variable, laid_out in lowering.variables.items()})
        return lowering

    found = nets.train_net("mlp", optimizer, tf.float64, rule)
    wanted = nets.one_device("mlp", optimizer, tf.float64)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.variables, wanted.variables)
    for name, (size, here) in kept[0].items():
        assert here * (_DEVICES if name not in found.changes else 1) == size


def test_file_keeps_it_and_a_foreign_one_is_refused_in_one_line(tmp_path):
    plain, graph = _exported()
    graph.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == graph
    assert plain.hash != graph.hash
    with pytest.raises(MismatchError):
        find_strategy(graph, _DEVICES, harness.MACHINE, "zero").check_graph(plain, "strategy.json")
    layers = [dataclasses.replace(layer, variables=tuple(
        dataclasses.replace(variable, updated_by=variable.updated_by and "nobody") for variable in layer.variables))
        for layer in graph.layers]
    dataclasses.replace(graph, layers=tuple(layers)).save(tmp_path / "foreign.json")
    with pytest.raises(FormatError, match="updated by layer 'nobody'"):
        ComputationGraph.load(tmp_path / "foreign.json")


def test_errors_say_what_to_do():
    plain, _ = _exported()
    with pytest.raises(InfeasibleError, match="sharded_updates=True"):
        zero(plain, _DEVICES)
    with pytest.raises(UsageError, match="exported already"):
        find_strategy(plain, _DEVICES, harness.MACHINE, sharded_updates=True)


def test_search_takes_the_program():
    with tf.Graph().as_default():
        net = nets.build("mlp", "adam", tf.float32)
        found = find_strategy(net.graph, _DEVICES, harness.MACHINE, "zero", sharded_updates=True)
        assert Configuration((("", _DEVICES),)) not in found.configurations
        assert lower(net.graph, found, harness.device_names(_DEVICES)).variables


def test_what_a_weight_was_goes_to_its_update_once():
    """Adafactor reads it there for its scale, too."""
    _, graph = _exported(optimizer="adafactor")
    moved = [(edge.source, edge.tensor, edge.target, edge.target_dims) for edge in graph.edges]
    assert len(set(moved)) == len(moved)
