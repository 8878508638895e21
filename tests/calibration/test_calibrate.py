"""Calibration: the fits find what samples were made from; the cache is used, and redone when it has to be."""

import dataclasses
import itertools

import numpy as np
import pytest
from small_graphs import perceptron

from pase_mtf.calibration import calibrate as module
from pase_mtf.calibration import sampling, training_steps
from pase_mtf.calibration.cache import fingerprint
from pase_mtf.calibration.calibrate import calibrate
from pase_mtf.cost.build import price_strategy
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.errors import UsageError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import KINDS, Link, Machine

TRUE = Machine("true", {**dict.fromkeys(KINDS, 2e10), "matmul": 3e11, "convolution": 2e11, "batched matmul": 5e10},
               3e10, 1e9, 2e-6, (Link(8, 2e10, 5e-6),), shared_cores=True, cache_bytes=2.0**21, cache_bandwidth=1.2e11,
               operand_packing=1.5, writeback=1.0, overheads={"matmul": 2e-5, "batched matmul": 1e-5})

RING = Link(8, 4e10, 3e-6)


def _samples(machine, noise=0.0):
    rng = np.random.default_rng(0)

    def measured(seconds):
        return float(seconds * np.exp(noise * rng.standard_normal()))

    samples = {"traffic": [
        sampling.Sample(0.0, nbytes, nbytes, measured(machine.traffic_seconds(nbytes)))
        for nbytes in np.geomspace(1e5, 1e8, 9)]}
    for kind, intensities in {**dict.fromkeys(KINDS, (0.1, 1, 10)), "matmul": (0.1, 2, 8, 20, 80, 320),
                              "batched matmul": (0.1, 2, 8, 20)}.items():
        samples[kind] = []
        for nbytes, intensity in itertools.product((2e4, 5e5, 8e6), intensities):
            flops, read = nbytes * intensity, nbytes * (0.8 if intensity < 20 else 0.2)
            seconds = max(flops / machine.rates[kind], machine.traffic_seconds(nbytes))
            if "matmul" in kind:
                seconds += machine.traffic_seconds(machine.operand_packing * read + machine.writeback * (nbytes - read))
            seconds += machine.overheads.get(kind, 0.0)
            samples[kind].append(sampling.Sample(flops, nbytes, read, measured(seconds)))
    samples["all-reduce"] = [
        sampling.Collective(group, nbytes, measured(allreduce_seconds(
            np.array([nbytes]), np.array([[float(group)]]), np.array([8]), machine)[0]))
        for group in (2, 4, 8) for nbytes in (1e3, 1e5, 1e6, 1e7)]
    ring = dataclasses.replace(machine, ring=True, ring_link=RING)
    samples["ring"] = [
        sampling.Collective(group, nbytes, measured(allreduce_seconds(
            np.array([nbytes]), np.array([[float(group)]]), np.array([8]), ring)[0]))
        for group in (2, 4, 8) for nbytes in (1e3, 1e5, 1e6)]
    return samples


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.1), (0.05, 0.35)])
def test_fits_find_the_machine(noise, tolerance):
    found = module._fit(_samples(dataclasses.replace(TRUE, overhead=0.0), noise), 8, "cpu")
    assert found.memory_bandwidth == pytest.approx(TRUE.memory_bandwidth, rel=tolerance)
    assert found.cache_bandwidth == pytest.approx(TRUE.cache_bandwidth, rel=2 * tolerance)
    for kind in ("matmul", "convolution", "pointwise", "reduction", "gather", "batched matmul"):
        assert found.rates[kind] == pytest.approx(TRUE.rates[kind], rel=tolerance), kind
    assert found.operand_packing == pytest.approx(TRUE.operand_packing, abs=0.5)
    assert found.writeback == pytest.approx(TRUE.writeback, abs=0.5)
    assert found.links[0].bandwidth == pytest.approx(TRUE.links[0].bandwidth, rel=tolerance)
    assert found.links[0].latency == pytest.approx(TRUE.links[0].latency, rel=2 * tolerance)
    assert found.ring_link.latency == pytest.approx(RING.latency, rel=2 * tolerance)
    assert found.ring_link.bandwidth == pytest.approx(RING.bandwidth, rel=2 * tolerance)
    assert found.overheads["matmul"] == pytest.approx(2e-5, rel=0.5)
    assert found.overheads["batched matmul"] == pytest.approx(1e-5, rel=0.5)
    assert found.shared_cores


def test_convolutions_of_few_channels_tell_the_lanes():
    machine = dataclasses.replace(TRUE, overhead=0.0, simd_width=16.0)
    samples = _samples(machine)
    samples["convolution"] += [
        sampling.Sample(1e9, 1e5, 1e5, 1e9 * max(1.0, 16.0 / channels) / TRUE.rates["convolution"], channels)
        for channels in (2, 4, 8, 16, 64)]
    found = module._fit(samples, 8, "cpu")
    assert (found.simd_width, found.stride_inflation) == (16.0, 0.0)
    assert found.rates["convolution"] == pytest.approx(TRUE.rates["convolution"], rel=0.1)


def test_gradients_with_stride_tell_the_dilation():
    samples = _samples(dataclasses.replace(TRUE, overhead=0.0))
    samples["convolution"] += [
        sampling.Sample(flops, 1e5, 1e5, flops * gaps**0.75 / TRUE.rates["convolution"], 64, gaps)
        for flops in (1e8, 1e9) for gaps in (1.0, 4.0, 9.0)]
    found = module._fit(samples, 8, "cpu")
    assert found.stride_inflation == 0.75
    assert found.rates["convolution"] == pytest.approx(TRUE.rates["convolution"], rel=0.1)


def test_convolutions_of_many_pixels_tell_what_a_pixel_takes():
    samples = _samples(dataclasses.replace(TRUE, overhead=0.0))
    seconds = TRUE.rates["convolution"]
    samples["convolution"] += [
        sampling.Sample(flops, nbytes, nbytes, flops / seconds + 1e-9 * rows + 1.5 * TRUE.traffic_seconds(nbytes), 64,
                        rows=rows)
        for flops in (1e8, 1e9) for nbytes in (1e6, 2e7) for rows in (1e5, 3e6)]
    # Those that come with the samples take no such passes.
    samples["convolution"] = [sample for sample in samples["convolution"] if sample.rows]
    found = module._fit(samples, 8, "cpu")
    assert found.tap_seconds == pytest.approx(1e-9, rel=0.3)
    assert found.layout_conversion == pytest.approx(1.5, abs=0.5)


def test_smaller_tensors_that_are_spread_tell_what_a_row_takes():
    samples = _samples(dataclasses.replace(TRUE, overhead=0.0))
    samples["node"] = [sampling.Sample(16.0, 128.0, 64.0, 1e-6)]
    samples["spread"] = [
        sampling.Sample(flops, 8 * flops, 4 * flops, 1e-6 + 4e-9 * rows + max(
            flops / TRUE.rates["pointwise"], TRUE.traffic_seconds(8 * flops)), rows=rows)
        for rows in (1000, 5000) for flops in (rows * 4.0, rows * 16.0)]
    assert module._fit(samples, 8, "cpu").broadcast_run_seconds == pytest.approx(4e-9, rel=0.2)


@pytest.mark.parametrize(("kind", "devices"), [("cpu", 8), ("gpu", 1)])
def test_products_over_again_tell_what_stays_in_a_cache(kind, devices):
    samples = _samples(dataclasses.replace(TRUE, overhead=0.0))
    samples["read"] = [sampling.Sample(1e6, nbytes, nbytes, 2e-5 + nbytes / 1e10) for nbytes in (1e6, 4e6, 8e6, 2e7)]
    samples["cached read"] = [sampling.Sample(1e6, nbytes, nbytes, 2e-5 + times * nbytes / 1e10)
                         for nbytes, times in ((1e6, 0.6), (4e6, 0.55), (8e6, 0.65), (2e7, 1.02))]
    found = module._fit(samples, 8, kind)
    assert found.cache_hit_cost_ratio == pytest.approx(0.6, abs=0.07)
    # Devices that share cores share the caches.
    assert found.cache_capacity == 8e6 * devices
    samples["cached read"] = samples["read"]
    found = module._fit(samples, 8, kind)
    assert (found.cache_hit_cost_ratio, found.cache_capacity) == (1.0, 0.0)


def test_nodes_in_a_row_tell_the_overhead():
    samples = _samples(dataclasses.replace(TRUE, overhead=0.0))
    samples["node"] = [sampling.Sample(16.0, 128.0, 64.0, seconds) for seconds in (1e-6, 3e-6, 2e-6)]
    found = module._fit(samples, 8, "cpu")
    assert found.overhead == 2e-6
    # What a product takes to start holds that of its node.
    assert found.overheads["matmul"] == pytest.approx(2e-5 - 2e-6, rel=0.5)


def _steps(machine):
    """Steps of a small network that hand over little and much, as long as their price."""
    graph, split = perceptron(), [Configuration((("batch", 8),))] * 3
    moved = [split[0], Configuration((("width2", 8),)), split[2]]
    return [training_steps.Step(graph, tuple(chosen), price_strategy(graph, machine, 8, chosen).total)
            for chosen in (split, moved)]


def test_whole_steps_tell_how_much_slower_they_are():
    slower = training_steps._slower(TRUE, 1.5)
    found = training_steps.fit_steps(TRUE, 8, _steps(slower))
    for step in _steps(slower):
        assert price_strategy(step.graph, found, 8, step.configurations).total == pytest.approx(step.seconds, rel=0.05)
    assert found.rates["matmul"] < TRUE.rates["matmul"]
    # Faster than the sum of its parts: nothing becomes negative.
    fast = [dataclasses.replace(step, seconds=0.0001 * step.seconds) for step in _steps(TRUE)]
    assert training_steps.fit_steps(TRUE, 8, fast) == TRUE


def test_whole_steps_tell_overhead_and_latency(monkeypatch):
    monkeypatch.setattr(training_steps, "_MOST", 1.0)
    dear = dataclasses.replace(TRUE, overhead=TRUE.overhead + 4e-6, links=tuple(
        dataclasses.replace(link, latency=link.latency + 3e-5) for link in TRUE.links))
    # Next to nothing is handed over in so small a network: the latency would have to be much larger to be believed.
    found = training_steps.fit_steps(TRUE, 8, _steps(dear))
    assert TRUE.links[-1].latency <= found.links[-1].latency < TRUE.links[-1].latency + 2e-5
    monkeypatch.setattr(training_steps, "_PRICE_ERROR", 1e-6)
    found = training_steps.fit_steps(TRUE, 8, _steps(dear))
    assert found.overhead == pytest.approx(dear.overhead, rel=0.1)
    assert found.links[-1].latency == pytest.approx(dear.links[-1].latency, rel=0.1)


def test_measured_strategies_differ_in_what_they_hand_over():
    graph = perceptron()
    assert len(training_steps.strategies_to_measure(graph, 1)) == 1
    strategies = training_steps.strategies_to_measure(graph, 8)
    assert len(strategies) == len(set(strategies)) == 2
    moved = [sum(price_strategy(graph, TRUE, 8, chosen).edges) for chosen in strategies]
    assert moved[0] < min(moved[1:])


def test_least_relative_errors_stay_positive():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    found, error = module._least_relative(rows, rows @ [2.0, 3.0])
    np.testing.assert_allclose(found, [2, 3])
    assert error == pytest.approx(0)
    found, _ = module._least_relative(rows, np.array([4.0, 3.0, 1.0]))
    assert found.min() >= 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_measures(monkeypatch, tmp_path, devices):
    monkeypatch.setattr(sampling, "_SECONDS", 1e-3)
    monkeypatch.setattr(sampling, "_NODES", 4)
    monkeypatch.setattr(sampling, "_LONG", 0.02)
    machine = calibrate(devices, progress=False)
    assert machine.name == "local"
    assert machine.shared_cores
    assert set(machine.rates) == {*KINDS, "batched matmul", "filter gradient"} | ({"copy"} if devices > 1 else set())
    machine.check_devices(devices)
    # No number that no computer has: between a very slow core and a large server.
    assert 1e8 < machine.rates["matmul"] < 1e14
    assert 1e8 < machine.memory_bandwidth <= machine.cache_bandwidth < 1e13
    assert 1e-7 <= machine.overhead < 1e-2
    assert machine.measured["on"] == fingerprint(devices)
    assert len(machine.measured["samples"]["convolution"]) > 8
    assert len(machine.measured["samples"]["filter gradient"]) > 4
    machine.save(tmp_path / "local.json")
    assert Machine.load(tmp_path / "local.json") == machine


def test_errors():
    with pytest.raises(UsageError, match="at least one"):
        calibrate(0)
    with pytest.raises(UsageError, match="did you mean 'gpu'"):
        calibrate(1, "gpus")
    with pytest.raises(UsageError, match="4000 GPUs"):
        calibrate(4000, "gpu")
