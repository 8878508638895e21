"""Measuring: what is measured and what is made of it, not how fast it is; no number here depends on the machine."""

import pytest

from pase_mtf.calibration.cache import fingerprint
from pase_mtf.calibration.calibrate import calibrate, machine_of_samples, samples
from pase_mtf.errors import PaseError, UsageError
from pase_mtf.machine.kernels import Timing
from pase_mtf.machine.machine import KINDS, Machine

_RATES = {*KINDS, "batched matmul", "filter gradient", "copy"}


def _timed(named, seconds):
    return {kernel: Timing(seconds(name, kernel)) for name, kernels in named.items() for kernel in kernels}


def test_rates_are_found_again():
    """Of a machine that takes a microsecond for a node, 1e-10 s for a FLOP and 1e-9 s for a byte that passes between
    devices or memories."""
    named = samples(8)

    def seconds(name, kernel):
        if name in ("traffic", "message", "all-reduce"):
            return 1e-6 + 1e-9 * kernel.nbytes + (2e-7 if name == "message" else 0.0)
        return 1e-6 if name == "overhead" else 1e-6 + 1e-10 * kernel.flops

    machine = machine_of_samples(named, _timed(named, seconds), 8, True, 1e9)
    assert set(machine.rates) == _RATES
    for kind in _RATES - {"copy"}:
        assert machine.rates[kind] == pytest.approx(1e10), kind
    # A concatenation makes as many elements as its largest tensor has.
    assert machine.rates["copy"] == pytest.approx(1e10)
    assert machine.memory_bandwidth == pytest.approx(1e9)
    assert machine.overhead == pytest.approx(1e-6)
    link, = machine.links
    assert (link.devices, link.bandwidth) == (8, pytest.approx(1e9))
    # Two messages go with a sum of two, and 192 bytes.
    assert link.latency == pytest.approx((2e-7 + 192e-9) / 2)
    assert machine.shared_cores


def test_the_best_of_a_kind_counts():
    named = samples(2)
    slow = named["matmul"][0]
    machine = machine_of_samples(named, _timed(named, lambda name, kernel: (
        1e-7 if name == "overhead" else kernel.flops * (1e-9 if kernel == slow else 1e-11) + 1e-7)), 2, False, 1e9)
    assert machine.rates["matmul"] == pytest.approx(1e11)
    assert not machine.shared_cores


def test_no_kernel_is_as_short_as_starting_one():
    """Clocks err: where all kernels seem to be, no rate is infinite or below 0, nor more than twice what was seen."""
    named = samples(2)
    machine = machine_of_samples(named, _timed(named, lambda name, kernel: 1e-6), 2, True, 1e9)
    assert machine.overhead == 1e-6
    assert machine.rates["matmul"] == pytest.approx(2 * max(kernel.flops for kernel in named["matmul"]) / 1e-6)
    assert machine.links[0].latency > 0.0
    tiny = _timed(named, lambda name, kernel: 2e-6 if name == "overhead" else 1e-6)
    assert machine_of_samples(named, tiny, 2, True, 1e9).rates == machine.rates


def test_kernels_that_cannot_be_timed():
    """Another of its kind tells the rate; where there is none, an error does."""
    named = samples(1)
    timings = _timed(named, lambda name, kernel: 1e-6 + 1e-9 * kernel.nbytes)
    del timings[named["convolution"][0]], timings[named["overhead"][0]]
    machine = machine_of_samples(named, timings, 1, True, 1e9)
    machine.check_devices(1)
    del timings[named["gather"][0]]
    with pytest.raises(PaseError, match=r"no kernel of kind gather could be timed.*GatherV2.*--machine"):
        machine_of_samples(named, timings, 1, True, 1e9)


def test_gpus_are_measured_by_larger_tensors_and_hold_what_they_have(monkeypatch):
    """Recorded numbers stand for the device: none of them is of this computer. Runs of the second look are as long as
    the first one tells: no guess at how fast a processor is makes them."""
    asked, guesses = [], []

    class Timer:
        def __init__(self, devices, kind, expected, over):
            asked.append((devices, kind))
            guesses.append(expected)

        def time(self, kernels, progress):
            if guesses[-1] is None:  # the runs are too short for the clock
                yield dict.fromkeys(kernels, Timing(1e-3))
                return
            asked.extend(kernels)
            yield {kernel: Timing(5e-6 + 1e-13 * kernel.flops + 1e-12 * kernel.nbytes) for kernel in kernels}

    monkeypatch.setattr("pase_mtf.calibration.calibrate.KernelTimer", Timer)
    monkeypatch.setattr("pase_mtf.calibration.calibrate.gpu_bytes", lambda devices: 24e9)
    monkeypatch.setattr("pase_mtf.compat.tf.config.list_physical_devices", lambda kind: [kind] * 2)
    machine = calibrate(2, "gpu", progress=False)
    assert asked[:2] == [(2, "gpu")] * 2
    first, second = guesses
    assert first is None
    assert {second(kernel) for kernel in asked[2:]} == {1e-3}
    assert not machine.shared_cores
    assert machine.memory_bytes == 24e9
    assert 1e11 < machine.memory_bandwidth < 1e12
    assert machine.overhead == pytest.approx(5e-6, rel=1e-3)
    by_cpus = [kernel for kernels in samples(2).values() for kernel in kernels]
    assert sum(kernel.nbytes for kernel in asked[2:]) > 4 * sum(kernel.nbytes for kernel in by_cpus)


@pytest.mark.parametrize("progress", [True, False])
def test_how_far_it_is_is_said_where_there_is_no_terminal(monkeypatch, capsys, progress):
    now = [0.0]

    class Timer:
        def __init__(self, devices, kind, expected, over):
            pass

        def time(self, kernels, progress):
            for kernel in kernels:
                now[0] += 1.0
                progress(1)
                yield {kernel: Timing(5e-6 + 1e-11 * kernel.flops + 1e-10 * kernel.nbytes)}

    monkeypatch.setattr("pase_mtf.calibration.calibrate.KernelTimer", Timer)
    monkeypatch.setattr("pase_mtf.calibration.calibrate.time.monotonic", lambda: now[0])
    calibrate(2, progress=progress)
    lines = [line for line in capsys.readouterr().err.splitlines() if "are left" in line]
    total = sum(map(len, samples(2).values()))
    assert lines == [
        f"measuring this machine: {done} of {total} kernels and links are measured, {total - done} are left"
        for done in range(3, total + 1, 3) if progress]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_everything_is_measured(tmp_path, devices):
    machine = calibrate(devices, progress=False)
    assert machine.name == "local"
    assert machine.shared_cores
    assert set(machine.rates) == _RATES
    machine.check_devices(devices)
    assert machine.overhead > 0  # that the other numbers are positive and finite, a Machine checks
    assert machine.measured["on"] == fingerprint(devices)
    asked = {str(kernel) for kernels in samples(devices).values() for kernel in kernels}
    assert set(machine.measured["kernels"]) == asked
    machine.save(tmp_path / "local.json")
    assert Machine.load(tmp_path / "local.json") == machine


def test_errors():
    with pytest.raises(UsageError, match="at least one"):
        calibrate(0)
    with pytest.raises(UsageError, match="did you mean 'gpu'"):
        calibrate(1, "gpus")
    with pytest.raises(UsageError, match="4000 GPUs"):
        calibrate(4000, "gpu")
