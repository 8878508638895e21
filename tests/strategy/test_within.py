"""Limits on what a device holds where copies of what is moved are most of it."""

import dataclasses

import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.program import build_program, variables_by_name
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy
from pase_mtf.strategy.within import StrategiesWithin

DEVICES = 4


@pytest.fixture(scope="module")
def densenet():
    config = models.load_config("densenet121", "tiny")
    with tf.Graph().as_default(), variables_by_name():
        program = build_program(models.get("densenet121"), config, config.batch, "sgd", 0.1, 0)
        return export_graph(program.graph)


@pytest.fixture(scope="module")
def machine():
    return dataclasses.replace(Machine.load("1080ti"), shared_cores=True)


def test_what_data_parallelism_keeps_to_is_kept_to(densenet, machine):
    """The sums at single moments find nothing here that needs less than twice as much."""
    by_hand = evaluate_strategy(densenet, data_parallel(densenet, DEVICES), DEVICES, machine)
    limit = 1.01 * by_hand.memory_bytes
    found = find_strategy(densenet, DEVICES, machine, memory_limit=limit, time_limit=2.0)
    assert found.memory_bytes <= limit
    assert found.seconds <= by_hand.seconds * (1 + 1e-9)
    assert not found.search["optimal"]
    assert found.search["lower_bound"] <= found.seconds
    free = find_strategy(densenet, DEVICES, machine)
    points = free.memory_frontier(3)
    assert free.memory_bytes == points[-1].memory > points[0].memory == pytest.approx(by_hand.memory_bytes)


def test_the_strategies_of_one_graph_within_several_limits(densenet, machine):
    found = StrategiesWithin(densenet, machine, DEVICES, time_limit=2.0)
    free = find_strategy(densenet, DEVICES, machine)
    assert found.free.seconds == found.free.least == pytest.approx(free.seconds)
    assert found.within(found.free.nbytes) == found.free
    tight = found.within(0.5 * found.free.nbytes)
    assert found.free.seconds < tight.seconds
    assert found.free.least <= tight.least <= tight.seconds
    assert tight.nbytes <= 0.5 * found.free.nbytes
    nothing = found.within(1e3)
    assert nothing.seconds == nothing.least == float("inf")  # proven
    with pytest.raises(InfeasibleError):
        find_strategy(densenet, DEVICES, machine, memory_limit=1e3)


def test_what_is_known_is_kept_to_however_little_time_there_is(densenet, machine):
    tight = StrategiesWithin(densenet, machine, DEVICES, time_limit=2.0)
    limit = 0.5 * tight.free.nbytes
    known = tight.within(limit)
    assert evaluate_strategy(densenet, known.configurations, DEVICES, machine).memory_bytes == known.nbytes <= limit
    for seconds in (1e-6, 1.0):
        found = find_strategy(densenet, DEVICES, machine, memory_limit=limit, time_limit=seconds,
                              known=known.configurations)
        assert found.memory_bytes <= limit
        assert found.search["lower_bound"] <= found.seconds <= known.seconds * (1 + 1e-9)
    with pytest.raises(UsageError, match=r"known: 1 configurations for \d+ layers"):
        find_strategy(densenet, DEVICES, machine, memory_limit=limit, known=known.configurations[:1])
    with pytest.raises(InfeasibleError):  # in such a time nothing is found
        find_strategy(densenet, DEVICES, machine, memory_limit=0.9 * known.nbytes, time_limit=1e-6,
                      known=known.configurations)
