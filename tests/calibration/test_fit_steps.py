"""Whole steps: how much slower than their parts they are, and what an operation and a message cost."""

import dataclasses
import itertools

import numpy as np
import pytest
from small_graphs import perceptron

from pase_mtf.calibration import fit_steps as module
from pase_mtf.calibration.fit_steps import fit_steps, slow_down
from pase_mtf.calibration.samples import Step
from pase_mtf.cost.build import price_strategy
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import KINDS, Link, Machine

MACHINE = Machine("parts", {**dict.fromkeys(KINDS, 2e10), "matmul": 3e11}, 3e10, 1e9, 2e-6, (Link(8, 2e10, 5e-6),),
                  shared_cores=True, cache_bytes=2.0**21, cache_bandwidth=1.2e11, overheads={"matmul": 2e-5})
GRAPH = perceptron((512, 1024, 512, 512), batch=512)
SPLIT = [Configuration((("batch", 8),))] * 3
SENT = [SPLIT[0], Configuration((("width2", 8),)), SPLIT[2]]


def _price(machine, configurations):
    return price_strategy(GRAPH, machine, 8, configurations).total


def _steps(machine, *noise):
    """Steps that send little and much, as long as they take on another machine, but for noise."""
    return [Step(GRAPH, tuple(chosen), _price(machine, chosen) * times)
            for chosen, times in zip((SPLIT, SENT), noise or (1.0, 1.0), strict=True)]


def _errors(machine, steps):
    return [abs(_price(machine, step.configurations) / step.seconds - 1.0) for step in steps]


def test_steps_of_a_slower_machine():
    # Not the slowdown that is fitted: what each kind of operation and the memory lose differs.
    slower = dataclasses.replace(MACHINE, memory_bandwidth=1.9e10, cache_bandwidth=8e10, rates={
        kind: rate / factor for (kind, rate), factor in zip(MACHINE.rates.items(), (1.7, 1.3, 1.5, 1.4, 1.6),
                                                            strict=True)})
    steps = _steps(slower, 1.03, 0.97)
    before, after = _errors(MACHINE, steps), _errors(fit_steps(MACHINE, 8, steps), steps)
    assert min(before) > 0.2
    assert max(after) < 0.08
    assert fit_steps(MACHINE, 8, steps).rates["matmul"] < MACHINE.rates["matmul"]


def test_nothing_becomes_negative():
    fast = [dataclasses.replace(step, seconds=0.0001 * step.seconds) for step in _steps(MACHINE)]
    assert fit_steps(MACHINE, 8, fast) == MACHINE
    assert fit_steps(MACHINE, 8, []) == MACHINE


def test_overhead_and_latency(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 1.0 + 1e-9)
    dear = dataclasses.replace(MACHINE, overhead=MACHINE.overhead + 4e-6, links=(Link(8, 2e10, 3.5e-5),))
    # Next to nothing is sent in so small a network: the latency would have to be much larger to be believed.
    found = fit_steps(MACHINE, 8, _steps(dear))
    assert 5e-6 <= found.links[-1].latency < 2.5e-5
    monkeypatch.setattr(module, "_PRICE_ERROR", 1e-6)
    found = fit_steps(MACHINE, 8, _steps(dear))
    assert found.overhead == pytest.approx(dear.overhead, rel=0.1)
    assert found.links[-1].latency == pytest.approx(3.5e-5, rel=0.1)


@pytest.mark.parametrize("noise", [(1.1, 1.4), (1.6, 1.2), (2.5, 2.2)])
def test_no_other_values_explain_the_steps_better(noise):
    steps = _steps(MACHINE, *noise)
    found = fit_steps(MACHINE, 8, steps)

    def badness(slowdown, overhead, latency):
        """Relative errors of the prices, and of an overhead of 3 us and a latency of 5 us, which are a tenth each."""
        machine = dataclasses.replace(slow_down(MACHINE, slowdown), overhead=MACHINE.overhead + overhead,
                                      links=(Link(8, 2e10, 5e-6 + latency),))
        return sum(np.square(_errors(machine, steps))) + (0.1 * overhead / 3e-6) ** 2 + (0.1 * latency / 5e-6) ** 2

    slowdown = MACHINE.rates["matmul"] / found.rates["matmul"]
    best = badness(slowdown, found.overhead - MACHINE.overhead, found.links[0].latency - 5e-6)
    tried = [badness(*values) for values in itertools.product(
        np.linspace(1.0, 2.0, 11), np.linspace(0.0, 2e-5, 4), np.linspace(0.0, 2e-5, 4))]
    assert best <= min(tried) + 1e-6
