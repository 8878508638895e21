"""How fast the machine is while steps are timed, against what prices say."""

import contextlib
from types import SimpleNamespace

import pytest

from pase_mtf.calibration import kernels as timing
from pase_mtf.calibration import speed
from pase_mtf.calibration.kernels import KernelWatch
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.speed import SpeedWatch, speed_note
from pase_mtf.machine.kernels import TINY, Block, Kernel, Timing
from pase_mtf.machine.references import REFERENCES
from pase_mtf.runtime import Devices

_SHARES = {REFERENCES[0]: 0.25, REFERENCES[1]: 0.5, REFERENCES[2]: 0.25}


@pytest.fixture
def meter(tmp_path):
    """One that knows two of the three kernels that steps are made of, and one that no step has."""
    meter = KernelMeter(2, path=tmp_path / "kernels.jsonl")
    meter.times.update({REFERENCES[0]: Timing(1e-3), REFERENCES[1]: Timing(4e-3), REFERENCES[7]: Timing(1e-6)})
    return meter


class _Watch:
    """Takes the place of the session: kernels take what is set."""

    factors, opened, closed = (1.0, 1.0), 0, 0

    def __init__(self, kernels, devices, kind, waiting, tiny):
        assert (kernels, devices, kind, waiting) == ((REFERENCES[1], REFERENCES[0]), 2, "cpu", True)
        assert tiny == 1e-6  # what a node takes to dispatch is that of the prices
        type(self).opened += 1

    def seconds(self):
        return dict(zip(REFERENCES, (1e-3 * self.factors[0], 4e-3 * self.factors[1]), strict=False))

    def close(self):
        type(self).closed += 1


def test_ratio_to_what_prices_say_by_shares_of_steps(meter, monkeypatch):
    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelWatch", watch := type("_Own", (_Watch,), {}))
    monkeypatch.setattr(speed, "_SHARE", 2.0)
    looks = SpeedWatch(meter, _SHARES)
    assert looks.look() == pytest.approx(1.0)
    watch.factors = (1.6, 1.0)
    assert looks.look() == pytest.approx(1.2)
    watch.factors = (1.0, 1.6)  # of what steps take twice as long for
    assert looks.look() == pytest.approx(1.4)
    meter.times = meter.times.scaled(2.0)  # prices follow the drift that a start finds
    assert looks.look() == pytest.approx(0.7)
    looks.close()
    assert (watch.opened, watch.closed) == (1, 1)


def test_looking_takes_little_of_the_time(meter, monkeypatch):
    clock = [0.0]

    class _Slow(_Watch):
        def seconds(self):
            clock[0] += 1.0
            return super().seconds()

    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelWatch", _Slow)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    looks = SpeedWatch(meter, _SHARES)
    found = []
    for _ in range(100):
        found.append(looks.look())
        clock[0] += 1.0
    assert found[0] == 1.0
    assert 4 <= sum(look is not None for look in found) <= 6


def test_a_look_stays_short(meter, monkeypatch):
    seen = []

    class _Noted(_Watch):
        def __init__(self, kernels, *unused, **settings):
            seen.append(kernels)

        def seconds(self):
            return dict.fromkeys(REFERENCES, 1e-3)

    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelWatch", _Noted)
    meter.times.update({REFERENCES[1]: Timing(0.5)})  # of which one run on every device takes longer than a look may
    SpeedWatch(meter, {REFERENCES[0]: 0.4, REFERENCES[1]: 0.6}).look()
    assert seen == [(REFERENCES[0],)]
    looks = SpeedWatch(meter, {REFERENCES[0]: 0.2, REFERENCES[1]: 0.8})
    assert looks.look() is None  # a fifth of a step tells little of it
    meter.times.update({kernel: Timing(1e-5) for kernel in REFERENCES})
    monkeypatch.setattr(speed, "_KERNELS", 4)
    SpeedWatch(meter, {kernel: number + 1.0 for number, kernel in enumerate(REFERENCES)}).look()
    assert seen[1] == REFERENCES[:-5:-1]
    monkeypatch.setattr(speed, "_LOOK_BYTES", 2 * REFERENCES[6].nbytes - 1)  # of two devices
    SpeedWatch(meter, {REFERENCES[6]: 0.6, REFERENCES[5]: 0.4}).look()
    assert seen[2] == (REFERENCES[5],)


def test_nothing_is_watched_where_prices_are_of_elsewhere(tmp_path):
    for looks in (SpeedWatch(None, {}), SpeedWatch(KernelMeter(2, path=tmp_path / "empty.jsonl"), _SHARES)):
        assert looks.look() is None
        looks.close()


def test_reference_kernels_are_timed_again():
    kernels = REFERENCES[5:7]
    watch = KernelWatch(kernels, 2)
    first, second = watch.seconds(), watch.seconds()
    watch.close()
    assert set(first) == set(second) == set(kernels)
    few, many = ([one[kernel] for one in (first, second)] for kernel in kernels)
    assert 0 < min(few) < max(many)  # of 64 times as many numbers, whatever else the machine did meanwhile


def test_note():
    assert speed_note([]) == ""
    assert speed_note([0.9, 1.1, 1.0]) == ""
    assert "took 1.50 times as long as prices say for what these steps run most (1.00 to 2.00, looks: 3)" in speed_note(
        [2.0, 1.0, 1.5])


class _Busy:
    """Takes the place of a session, and of its clocks: of all that is run the first thing, the kernel, is ten times the
    work of the others, and everything takes some times as long as its work, which is on all cores at once."""

    wall, work, factor = 0.0, 0.0, 1.0

    def __init__(self, *unused, **settings):
        self._targets = []

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass

    def run(self, target):
        pass

    def make_callable(self, target):
        if target not in self._targets:
            self._targets.append(target)
        seconds = 1e-2 if target is self._targets[0] else 1e-3

        def run():
            _Busy.wall += self.factor * seconds
            _Busy.work += timing.cores() * seconds
        return run


@pytest.mark.parametrize("waiting", [False, True])
def test_what_kernels_wait_for_others_is_told_of_a_busy_machine(monkeypatch, waiting):
    """Everything takes ten times as long, while the work of the cores stays what it is. Prices grow by no more than
    steps wait."""
    monkeypatch.setattr(timing, "cores", lambda: 2.0)  # however many this machine has
    monkeypatch.setattr(timing, "_dispatches", {})
    monkeypatch.setattr(timing.tf, "Session", _Busy)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: _Busy.wall))
    monkeypatch.setattr(timing, "thread_seconds", lambda: {1: _Busy.work})
    seconds = {}
    for factor in (1.0, 10.0):
        monkeypatch.setattr(_Busy, "factor", factor)
        with contextlib.closing(KernelWatch(REFERENCES[6:7], 2, waiting=waiting)) as watch:
            seconds[factor], = watch.seconds().values()
    assert seconds[10.0] / seconds[1.0] == pytest.approx(10.0 if waiting else timing._WAITING)


class _Single(_Busy):
    """Each of two devices keeps one core busy."""

    devices = 2

    def make_callable(self, target):
        if target not in self._targets:
            self._targets.append(target)
        seconds = 1e-2 if target is self._targets[0] else 1e-3

        def run():
            _Busy.wall += seconds
            _Busy.work += self.devices * seconds
        return run


class _Bursts(_Single):
    """Each of eight devices does, until the quota of the container is used up."""

    devices = 8


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize(("runnable", "factor"), [(16, 4.0), (2, 1.0)])
def test_a_run_that_no_quota_has_stopped_yet_takes_what_it_does_in_a_step(monkeypatch, waiting, runnable, factor):
    """Two cores in the long run, of the sixteen that a short one may have."""
    monkeypatch.setattr(timing, "_dispatches", {})
    monkeypatch.setattr(timing.tf, "Session", _Bursts)
    monkeypatch.setattr(timing, "cores", lambda: 2.0)
    monkeypatch.setattr(timing, "runnable_cores", lambda: runnable)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: _Busy.wall))
    monkeypatch.setattr(timing, "thread_seconds", lambda: {1: _Busy.work})
    bench, kernel = timing._Bench(Devices.first(8, "cpu"), True, {}, waiting=waiting), REFERENCES[5]
    assert bench.measure([kernel])[kernel].seconds == pytest.approx(
        factor * 9e-3 / bench._runs(bench._repeats(kernel)))


def test_cores_without_work_are_not_taken_by_others(monkeypatch):
    monkeypatch.setattr(timing, "_dispatches", {})
    monkeypatch.setattr(timing.tf, "Session", _Single)
    monkeypatch.setattr(timing, "cores", lambda: 16.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: _Busy.wall))
    monkeypatch.setattr(timing, "thread_seconds", lambda: {1: _Busy.work})
    bench, kernel = timing._Bench(Devices.first(2, "cpu"), True, {}), REFERENCES[5]
    assert bench.measure([kernel])[kernel].seconds == pytest.approx(9e-3 / bench._runs(bench._repeats(kernel)))


class _Caches(_Busy):
    """A machine on which whatever has not been run just before takes three times as long."""

    last = None

    def make_callable(self, target):
        if target not in self._targets:
            self._targets.append(target)
        seconds = 1e-2 if target is self._targets[0] else 1e-3

        def run():
            cold = _Caches.last is not target
            _Caches.last = target
            _Busy.wall += (3 if cold else 1) * seconds
            _Busy.work += timing.cores() * (3 if cold else 1) * seconds
        return run


def test_half_of_what_a_product_reads_is_in_the_caches(monkeypatch):
    monkeypatch.setattr(timing, "_dispatches", {})
    monkeypatch.setattr(timing.tf, "Session", _Caches)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: _Busy.wall))
    monkeypatch.setattr(timing, "thread_seconds", lambda: {1: _Busy.work})
    (product, added), bench = REFERENCES[1:6:4], timing._Bench(Devices.first(2, "cpu"), True, {})
    # A run of it alone takes 10 ms, of nothing 1 ms; three times as much after others.
    assert bench.measure([product])[product].seconds == pytest.approx(
        (20e-3 - 2e-3) / bench._runs(bench._repeats(product)))
    # What computes element by element finds what it reads in the caches.
    assert bench.measure([added])[added].seconds == pytest.approx((10e-3 - 1e-3) / bench._runs(bench._repeats(added)))
    # A tiny kernel tells how it is dispatched, not how threads are woken.
    assert bench.measure([TINY])[TINY].seconds == pytest.approx((10e-3 - 1e-3) / bench._runs(bench._repeats(TINY)))


def test_a_look_has_as_many_kernels_as_it_may_where_they_are_short(tmp_path):
    """Of many arms fewer are no third of the steps."""
    blocks = [Block("float32", (size,)) for size in range(1, 101)]
    kernels = [Kernel("AddV2", (block, block), (block,)) for block in blocks]
    meter = KernelMeter(2, path=tmp_path / "kernels.jsonl")
    meter.times.update(dict.fromkeys(kernels, Timing(1e-5)))
    assert len(SpeedWatch(meter, dict.fromkeys(kernels, 0.004))._watched) == speed._KERNELS
