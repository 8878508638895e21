"""Measuring: what is measured, not how fast it is; no number here depends on the machine or on who else uses it."""

import dataclasses
import math

import pytest
from small_graphs import perceptron

from pase_mtf.calibration import sampling, training_steps
from pase_mtf.calibration.cache import fingerprint
from pase_mtf.calibration.calibrate import calibrate
from pase_mtf.calibration.samples import OperationSample
from pase_mtf.compat import tf
from pase_mtf.cost.build import price_strategy
from pase_mtf.errors import UsageError
from pase_mtf.machine.machine import KINDS, Link, Machine


@pytest.fixture
def short(monkeypatch):
    """As few nodes and runs as there can be."""
    monkeypatch.setattr(sampling, "_SECONDS", 1e-3)
    monkeypatch.setattr(sampling, "_NODES", 2)
    monkeypatch.setattr(sampling, "_LONG", 2e-3)


def _plausible(sample):
    return all(math.isfinite(value) and value >= 0 for value in dataclasses.astuple(sample)) and sample.seconds > 0


def test_nodes_and_traffic_are_measured(short):
    bench = sampling.Bench(1, "cpu")
    with bench.graph.as_default():
        sampling._add_nodes(bench)
        sampling._add_traffic(bench)
    done = []
    found = bench.measure(lambda: done.append(1)).operations
    assert found.keys() == {"node", "traffic"}
    assert len(done) == len(bench) == 10
    assert all(_plausible(sample) for samples in found.values() for sample in samples)


def test_samples_that_a_run_hides_are_bounded(monkeypatch):
    """Where all of a kind take less than starting a run, their half is taken; else they are left out."""
    seconds = iter([5e-4, 4e-4,  # starting a run, twice: the lesser counts
                    6e-4, 2e-3, 6e-4, 7e-4])
    monkeypatch.setattr(sampling, "seconds_of", lambda *_: next(seconds))
    bench = sampling.Bench(1, "cpu")
    with bench.graph.as_default():
        for name in ("long", "long", "short", "short"):
            bench.add(name, [tf.no_op()], lambda measured: OperationSample(1.0, 1.0, 1.0, measured))
    found = {name: [sample.seconds for sample in samples] for name, samples in bench.measure(int).operations.items()}
    assert found == {"long": [pytest.approx(1.6e-3)], "short": [3e-4, 3.5e-4]}


def test_rows_of_nodes_take_longer_than_starting_a_run(monkeypatch):
    """However few devices and repetitions there are: on one device they were left out, and a node was free."""
    counted = []
    monkeypatch.setattr(sampling.Bench, "add", lambda bench, *_: counted.append(sum(
        operation.type == "AddV2" for operation in bench.graph.get_operations())))
    for devices, most in ((1, 2), (1, 16), (8, 16)):
        monkeypatch.setattr(sampling, "_NODES", most)
        bench = sampling.Bench(devices, "cpu")
        with bench.graph.as_default():
            sampling._add_nodes(bench)
        assert counted[-1] >= 3 * sampling._NODES_IN_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_everything_is_measured(short, tmp_path, devices):
    machine = calibrate(devices, progress=False)
    assert machine.name == "local"
    assert machine.shared_cores
    assert set(machine.rates) == {*KINDS, "batched matmul", "filter gradient"} | ({"copy"} if devices > 1 else set())
    machine.check_devices(devices)
    assert machine.overhead > 0  # that the other numbers are positive and finite, a Machine checks
    assert machine.measured["on"] == fingerprint(devices)
    samples = machine.measured["samples"]
    assert {*KINDS, "batched matmul", "filter gradient", "traffic", "node", "broadcast", "read"} <= set(samples)
    assert ("all-reduce" in samples) == ("ring" in samples) == (devices > 1)
    assert all(sample["seconds"] > 0 for found in samples.values() for sample in found)
    machine.save(tmp_path / "local.json")
    assert Machine.load(tmp_path / "local.json") == machine


def test_measured_strategies_differ_in_what_they_send():
    graph = perceptron()
    machine = Machine("any", dict.fromkeys(KINDS, 2e10), 3e10, 1e9, 2e-6, (Link(8, 2e10, 5e-6),), shared_cores=True)
    assert len(training_steps.strategies_to_measure(graph, 1)) == 1
    strategies = training_steps.strategies_to_measure(graph, 8)
    assert len(strategies) == len(set(strategies)) == 2
    sent = [sum(price_strategy(graph, machine, 8, chosen).edges) for chosen in strategies]
    assert sent[0] < min(sent[1:])


def test_errors():
    with pytest.raises(UsageError, match="at least one"):
        calibrate(0)
    with pytest.raises(UsageError, match="did you mean 'gpu'"):
        calibrate(1, "gpus")
    with pytest.raises(UsageError, match="4000 GPUs"):
        calibrate(4000, "gpu")
