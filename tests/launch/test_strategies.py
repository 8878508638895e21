"""Strategies that are drawn: to see how good predictions are, they have to differ in cost, and be legal."""

import pytest
from small_graphs import perceptron

from pase_mtf.graph.configurations import enumerate_configurations
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies import changed_configurations, find_strategies
from pase_mtf.machine.machine import Machine


@pytest.mark.parametrize(("number", "share"), [(0, 0.9), (1, 0.25), (2, 0.1), (3, 0.5), (6, 0.1)])
def test_a_share_of_the_layers_is_changed(number, share):
    best, other = range(4000), range(4000, 8000)
    found = changed_configurations(best, other, number, seed=3)
    changed = [new for old, new in zip(best, found, strict=True) if old != new]
    assert len(changed) / 4000 == pytest.approx(share, abs=0.03)
    assert all(new - 4000 == place for place, new in enumerate(found) if new >= 4000)
    assert found == changed_configurations(best, other, number, seed=3)
    assert found != changed_configurations(best, other, number, seed=4)


def test_drawn_strategies_are_legal_and_none_is_better_than_the_best():
    graph, machine = perceptron((32, 64, 64, 16), batch=64), Machine.load("h100")
    plan = resolve(Options(model="alexnet", devices="cpu", machine="h100", compare="random:4,changed:4"))
    found = find_strategies(plan, graph, machine)
    assert len({strategy.configurations for strategy in found.values()}) > 4
    for strategy in found.values():
        assert strategy.seconds >= 0.99 * found["search"].seconds
        for layer, configuration in zip(graph.layers, strategy.configurations, strict=True):
            assert configuration in enumerate_configurations(layer, 8)
