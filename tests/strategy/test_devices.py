"""How many devices do work of their own."""

import dataclasses
import functools

import pytest
from small_graphs import perceptron

from pase_mtf.cost.build import build_network
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.choosing import simpler
from pase_mtf.strategy.devices import devices_text, fuller_devices, useful_devices
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

GRAPH = perceptron((64, 128, 32, 64), batch=32)


def test_what_is_copied_is_no_useful_work():
    layers = len(GRAPH.layers)
    assert useful_devices(GRAPH, [Configuration((("batch", 4),))] * layers) == pytest.approx(4)
    assert useful_devices(GRAPH, [Configuration((("", 8),))] * layers) == pytest.approx(1)
    half = useful_devices(GRAPH, [Configuration((("batch", 4), ("", 2)))] * layers)
    assert half == pytest.approx(4)
    mixed = useful_devices(GRAPH, [Configuration((("batch", 8),))] * (layers - 1) + [Configuration((("", 8),))])
    assert 1 < mixed < 8


@pytest.mark.parametrize(("devices", "sizes"), [(3, [11.0] * 7), (6, [11.0] * 7), (7, [17.0]), (12, [11.0] * 7)])
def test_rounding_makes_no_more_devices_than_there_are(devices, sizes):
    graph = dataclasses.replace(GRAPH, layers=tuple(dataclasses.replace(
        GRAPH.layers[0], operations=(dataclasses.replace(GRAPH.layers[0].operations[0], flops=flops, trips=1),))
        for flops in sizes))
    assert useful_devices(graph, [Configuration((("batch", devices),))] * len(sizes)) == devices


def test_no_dim_divides_by_the_devices():
    found = find_strategy(GRAPH, devices=7, machine=Machine.load("h100"), simulate=0)
    assert found.search["optimal"]
    assert found.search["useful_devices"] == pytest.approx(1)
    assert found.search["suggested_devices"] == 4
    assert "1 of 7 devices do useful work (the others repeat it or idle); leave some idle: try --mesh=4" in str(found)


def test_what_is_left_whole_by_choice_asks_for_no_other_devices():
    """Of 6 and of 8 devices a part could split every layer; whole they are faster, as they would be over 4."""
    whole = [Configuration((("", 6),))] * len(GRAPH.layers)
    assert fuller_devices(GRAPH, 6, whole) is None
    assert fuller_devices(GRAPH, 8, [Configuration((("", 8),))] * len(GRAPH.layers)) is None
    assert fuller_devices(GRAPH, 6, [Configuration((("batch", 2), ("", 3)))] * len(GRAPH.layers)) == 4


def test_all_devices_work(tmp_path):
    found = find_strategy(GRAPH, devices=8, machine=Machine.load("h100"), method="exact")
    split = [Configuration((("batch", 8),))] * len(GRAPH.layers)
    assert fuller_devices(GRAPH, 8, split) is None
    assert devices_text(8, useful_devices(GRAPH, split), None) == ""
    found.save(tmp_path / "strategy.json")
    assert Strategy.load(tmp_path / "strategy.json").search["useful_devices"] == found.search["useful_devices"]


def test_data_parallelism_that_is_taken_instead_has_devices_of_its_own():
    machine = Machine.load("h100")
    found = evaluate_strategy(GRAPH, [Configuration((("batch", 4), ("", 2)))] * len(GRAPH.layers), 8, machine, search={
        "lower_bound": 1e-9, "useful_devices": 4.0, "suggested_devices": 7})
    taken = simpler(found, build_network(GRAPH, machine, 8), None, 1e9)
    assert taken.search["simpler"] == "data_parallel"
    assert (taken.search["useful_devices"], taken.search["suggested_devices"]) == (pytest.approx(8), None)


@pytest.mark.parametrize(("devices", "parallel"), [(12, 8), (7, 4)])
def test_data_parallelism_over_what_divides_the_batch_is_taken_instead(devices, parallel):
    """It idles devices, where all others repeat work or split no batch."""
    machine = Machine.load("h100")
    found = find_strategy(GRAPH, devices=devices, machine=machine, simulate=0)
    simple = evaluate_strategy(GRAPH, data_parallel(GRAPH, parallel), devices, machine)
    behind = simple.seconds / found.seconds - 1.0
    find = functools.partial(find_strategy, GRAPH, devices=devices, machine=machine, simulate=0)
    if behind > 0.0:
        assert "simpler" not in find(simple_within=0.99 * behind).search
    taken = find(simple_within=max(1.01 * behind, 1e-3))
    assert taken.search["simpler"] == "data_parallel"
    assert taken.configurations == simple.configurations
    assert taken.search["useful_devices"] == pytest.approx(parallel)
    assert f"{parallel} of {devices} devices do useful work" in str(taken)
    assert find(simple_within=1e3, memory_limit=0.999 * simple.memory_bytes).memory_bytes < simple.memory_bytes


def test_data_parallelism_is_not_asked_where_it_cannot_be():
    """Of one device there is none."""
    graph = perceptron((64, 128, 32, 64), batch=31)
    found = find_strategy(graph, devices=12, machine=Machine.load("h100"), simple_within=1e3)
    assert "simpler" not in found.search


def test_memory_limit_is_kept_and_costs_nothing_where_it_is_not_reached():
    machine = Machine.load("h100")
    free = find_strategy(GRAPH, devices=8, machine=machine, simulate=0)
    roomy = find_strategy(GRAPH, devices=8, machine=machine, memory_limit=2 * free.memory_bytes, simulate=0)
    assert roomy.configurations == free.configurations
    tight = find_strategy(GRAPH, devices=8, machine=machine, memory_limit=0.9 * free.memory_bytes, simulate=0)
    assert tight.memory_bytes <= 0.9 * free.memory_bytes
    assert tight.seconds >= free.seconds
