"""Kernels that are timed, kept, and looked at again; how long they take is no test's business."""

import contextlib
import math

import pytest

from pase_mtf.calibration import cache
from pase_mtf.calibration import kernels as timing
from pase_mtf.calibration import meter as metering
from pase_mtf.calibration.cache import cache_path, fingerprint, fingerprint_of_kernels, kernels_path
from pase_mtf.calibration.kernels import KernelTimer
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.references import PROBES, REFERENCES
from pase_mtf.errors import UsageError
from pase_mtf.machine.kernel_file import append_times, load_times
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing, send_kernel, sum_kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import Devices


def _floats(*shape):
    return Block("float32", shape)


_ADD = Kernel("AddV2", (_floats(8, 4), _floats(4)), (_floats(8, 4),))
_KERNELS = (
    _ADD, sum_kernel(2, 64, 4), sum_kernel(2, 64, 2), send_kernel(64, 4), send_kernel(1, 1),
    Kernel("Einsum", (_floats(8, 4), _floats(4, 16)), (_floats(8, 16),), (("equation", "ab,bc->ac"),)),
    Kernel("Conv2D", (_floats(2, 4, 4, 3), _floats(3, 3, 3, 2)), (_floats(2, 2, 2, 2),),
           (("padding", "SAME"), ("strides", (1, 2, 2, 1)))),
    Kernel("AssignSubVariableOp", (Block("resource", (8,)), _floats(8)), ()),
    Kernel("OneHot", (Block("int32", (8,)), Block("int32", (), (4,)), _floats(), _floats()), (_floats(8, 4),)),
    Kernel("Split", (Block("int32", (), (1,)), _floats(8, 4)), (_floats(8, 2), _floats(8, 2)), (("num_split", 2),)),
    Kernel("ConcatV2", (_floats(8, 2), _floats(8, 2), Block("int32", (), (1,))), (_floats(8, 4),), apart=True),
    Kernel("Einsum", (_floats(8, 4), _floats(4, 16)), (_floats(8, 16),), (("equation", "ab,bc->ac"),), again=True),
    Kernel("Cast", (_floats(8),), (Block("bfloat16", (8,)),), (("DstT", "bfloat16"),)),
    Kernel("GatherV2", (_floats(8, 2), Block("int32", (5000,)), Block("int32", (), (0,))), (_floats(5000, 2),)))
_MULTIPLY = Kernel("Mul", (_floats(8, 4), _floats(4)), (_floats(8, 4),))
_NONE = Kernel("NoSuchOperation", (_floats(8),), (_floats(8),))
_WRONG = Kernel("Einsum", (_floats(8, 4), _floats(5, 16)), (_floats(8, 16),), (("equation", "ab,bc->ac"),))


def test_kernels_of_all_kinds_are_timed():
    timer, done = KernelTimer(2), []
    found = {}
    for batch in timer.time([*_KERNELS, _NONE, _WRONG], progress=done.append):
        found.update(batch)
    assert set(found) == set(_KERNELS)
    assert all(0.0 < timing.seconds < math.inf and timing.runs >= 2 for timing in found.values())
    assert set(timer.failed) == {_NONE, _WRONG}
    assert "NoSuchOperation" in timer.failed[_NONE]
    assert sum(done) == len(_KERNELS) + 2


def test_what_is_too_large_or_too_late_is_not_timed():
    timer = KernelTimer(2)
    huge = Kernel("Exp", (_floats(1 << 40),), (_floats(1 << 40),))
    assert list(timer.time([huge])) == []
    assert "GB" in timer.failed[huge]
    assert list(timer.time([_ADD], seconds=0.0)) == []


_PRODUCT, _MEMORY = PROBES
_LARGE = Kernel("AddV2", (_floats(1 << 18),) * 2, (_floats(1 << 18),))


@pytest.mark.parametrize(("tries", "found", "disturbed"), [
    ([(1.0, 1.0)], 8.0, 0),  # thousandths of a second
    ([(1.2, 1.2)], 9.6, 0),  # within what differs from session to session
    ([(1.0, 2.0), (1.0, 1.0)], 8.0, 0),  # a moment
    ([(1.0, 2.0), (1.0, 2.0)], 16.0, 3),
    ([(4.0, 1.0), (4.0, 1.0)], 8.0, 3),
    ([(1.0, 2.0), (1.0, 4.0)], 16.0, 3)])  # the less disturbed counts
def test_what_others_slow_for_long_is_told(monkeypatch, tries, found, disturbed):
    monkeypatch.setattr(timing, "_dispatches", {Devices.first(2, "cpu"): [0.0] * timing._SESSIONS})
    monkeypatch.setattr(timing, "_probed_seconds", {})
    large_product = Kernel("Einsum", (_floats(512, 512),) * 2, (_floats(512, 512),), (("equation", "ab,bc->ac"),))
    kernels, left = [_LARGE, large_product, _ADD], iter(tries)

    def measure(bench, batch):
        assert set(batch) == {*kernels, *PROBES}
        product, memory = next(left)
        return {_PRODUCT: Timing(product * 1e-3), _MEMORY: Timing(memory * 1e-3),
                **dict.fromkeys(kernels, Timing(memory * 8e-3))}

    monkeypatch.setattr(timing._Bench, "measure", measure)
    timer = KernelTimer(2, best=dict.fromkeys(PROBES, 1e-3))
    (batch,) = timer.time(kernels)
    assert [1e3 * batch[kernel].seconds for kernel in kernels] == pytest.approx([found] * 3)
    assert timer.disturbed == disturbed
    assert list(left) == []


def test_a_kernel_goes_from_thread_to_thread(monkeypatch):
    monkeypatch.setattr(timing, "_dispatches", {})
    bench, gpus = (timing._Bench(Devices.first(2, kind), kind == "cpu", {}) for kind in ("cpu", "gpu"))
    nodes, kernels = 2 * timing._TINY_REPEATS, 2 * bench._repeats(_ADD)

    def looked(dispatch):
        return {_ADD: Timing(3e-4 + kernels * 5e-6), timing._IDLE: Timing(3e-4), timing._IDLE_AGAIN: Timing(1e-4),
                timing._IN_A_ROW: Timing(2e-4), timing._BESIDE: Timing(2e-4 + nodes * dispatch)}

    first = bench.of_one(looked(3e-6))
    assert set(first) == {_ADD}
    assert first[_ADD].seconds == pytest.approx(5e-6 + 3e-6)
    monkeypatch.setattr(timing, "_dispatches", {Devices.first(2, "cpu"): [3e-6]})
    assert bench.of_one(looked(9e-6))[_ADD].seconds == pytest.approx(5e-6 + 4.5e-6)  # the quartile of both sessions
    monkeypatch.setattr(timing, "_dispatches", {})
    assert bench.of_one(looked(-3e-6))[_ADD].seconds == pytest.approx(5e-6)  # less than none it is not
    # Of a table that knows a tiny kernel, what was measured with it counts for all that comes later.
    table = timing._Bench(Devices.first(2, "cpu"), True, {}, tiny=1e-4 / nodes + 4e-6)
    assert table.of_one(looked(9e-6))[_ADD].seconds == pytest.approx(5e-6 + 4e-6)
    alone = {_ADD: Timing(1e-4 + gpus._repeats(_ADD) * 5e-6), timing._IDLE: Timing(1e-4)}
    assert gpus.of_one(alone)[_ADD].seconds == pytest.approx(5e-6)


def test_what_comes_from_other_devices_is_made_for_every_run(monkeypatch):
    monkeypatch.setattr(timing, "_dispatches", {})
    total, send = sum_kernel(2, 64, 4), send_kernel(64, 4)
    bench, alone, gpus = (timing._Bench(Devices.first(count, kind), kind == "cpu", {})
                          for count, kind in ((2, "cpu"), (1, "cpu"), (2, "gpu")))
    runs = {kernel: 2 * bench._repeats(kernel) for kernel in (total, send)}
    looked = {total: Timing(3e-4 + runs[total] * 9e-6), timing._making(total): Timing(3e-4),
              send: Timing(4e-4 + runs[send] * 5e-6), timing._making(send): Timing(4e-4), timing._IDLE: Timing(1e-4),
              timing._IDLE_AGAIN: Timing(1e-4), timing._IN_A_ROW: Timing(2e-4),
              timing._BESIDE: Timing(2e-4 + 2 * timing._TINY_REPEATS * 2e-6)}
    found = bench.of_one(looked)
    assert set(found) == {total, send}
    assert found[total].seconds == pytest.approx(9e-6 + 2e-6)
    assert found[send].seconds == pytest.approx(5e-6)  # no node
    for other in (alone, gpus):  # nothing is sent, or what is sent is no work of cores that all share
        assert not other._is_fresh(total)
    with bench.opened([total, send, _ADD]) as look:
        assert set(look()) == {*looked, _ADD}


def test_what_is_read_again_is_read_several_times_in_a_row():
    bench = timing._Bench(Devices.first(8, "cpu"), True, {})
    products = [Kernel("Einsum", (_floats(2, size), _floats(size, size)), (_floats(2, size),),
                       (("equation", "ab,bc->ac"),)) for size in (64, 1024, 1 << 14)]
    cold, warm = ([bench._repeats(product._replace(again=again)) for product in products] for again in (False, True))
    assert cold[1:] == [1, 1]
    assert all(one >= max(2, other) for one, other in zip(warm, cold, strict=True))
    assert warm[1] > 2  # a run that is not too long


@pytest.mark.parametrize("name", ["1080ti", "2080ti", "a100", "h200"])
def test_how_often_a_gpu_repeats_a_kernel_follows_its_speed(name):
    machine = Machine.load(name)

    def seconds(kernel):
        return kernel.flops / machine.rates["matmul"] + kernel.nbytes / machine.memory_bandwidth + machine.overhead

    sizes = [64, 512, 2048, 8192, 16384]
    kernels = [Kernel("Einsum", (_floats(size, size),) * 2, (_floats(size, size),), (("equation", "ab,bc->ac"),))
               for size in sizes]
    # Of what was timed on the device, all but the largest; and with nothing known, in no more runs than on a CPU.
    known = KernelTimes(timings={kernel: Timing(seconds(kernel)) for kernel in kernels[:-1]})
    bench = timing._Bench(Devices.first(1, "gpu"), False, {}, known.estimate)
    repeats = [bench._repeats(kernel) for kernel in kernels]
    assert repeats == sorted(repeats, reverse=True)
    assert repeats[0] == timing._REPEATS_ALONE
    assert repeats[-1] == 1
    for kernel, times in zip(kernels[:-1], repeats[:-1], strict=True):
        # A run takes what it is meant to, but for kernels so short or so long that it cannot.
        assert times in (1, timing._REPEATS_ALONE) or (
            0.5 * timing._RUN_SECONDS <= times * seconds(kernel) <= timing._RUN_SECONDS)
    unknown = timing._Bench(Devices.first(1, "gpu"), False, {})
    assert all(1 <= unknown._repeats(kernel) <= timing._REPEATS for kernel in kernels)


def test_a_meter_of_gpus_tells_how_fast_they_are(cache_dir, timed, monkeypatch):
    monkeypatch.setattr(cache, "gpu_names", lambda: ["a GPU"] * 2)
    told = []

    class Timer:
        disturbed = 0

        def __init__(self, devices, kind, expected=None, tiny=None, best=None):
            told.append(expected and expected(_ADD))
            self.failed = {}

        def time(self, kernels, limit=math.inf, progress=None):
            yield {kernel: Timing(1e-6) for kernel in kernels}

    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelTimer", Timer)
    meter = KernelMeter(2, "gpu")
    meter.start()
    meter.measure([_ADD])
    assert told[0] is None  # nothing is known of them
    assert 1e-7 < told[-1] < 1e-5  # as the reference kernels took


@pytest.fixture
def timed(monkeypatch):
    """Seconds that stand for those that a clock would tell, and the kernels that were asked for."""
    seconds, asked = dict.fromkeys(REFERENCES, 1e-3), []

    class Timer:
        def __init__(self, devices, kind, expected=None, tiny=None, best=None):
            Timer.tiny, Timer.best = tiny, best
            self.failed = {_NONE: "there is none"}
            self.disturbed = 0

        def time(self, kernels, limit=math.inf, progress=None):
            asked.extend(kernels)
            yield {kernel: Timing(seconds.get(kernel, 2e-3)) for kernel in kernels if kernel != _NONE}

    class Watch:
        """Looks again, and finds what was found; or, of each look, what is set for it."""

        factors = iter(())

        def __init__(self, kernels, devices, kind):
            self._kernels = kernels

        def seconds(self):
            factor = next(Watch.factors, 1.0)
            return {kernel: factor * seconds[kernel] for kernel in self._kernels}

        def close(self):
            asked.append("closed")

    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelTimer", Timer)
    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelWatch", Watch)
    monkeypatch.setattr(metering.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(metering, "_PAUSE", 0.0)
    return seconds, asked


def test_kernels_are_measured_once_and_kept(cache_dir, timed):
    _, asked = timed
    first = KernelMeter(4)
    assert first.path == kernels_path(4)
    first.start()
    assert timing.KernelTimer.tiny is None
    assert timing.KernelTimer.best == {}  # what tells how fast the machine is now
    assert first.measure([*_KERNELS, _NONE]) == len(_KERNELS)
    assert set(PROBES) <= set(timing.KernelTimer.best) <= set(REFERENCES)
    assert timing.KernelTimer.tiny == 1e-3  # all of a table is handed from thread to thread as fast
    assert first.missing([*_KERNELS, _NONE]) == []
    asked.clear()
    second = KernelMeter(4)
    second.start()
    assert set(asked) == set(REFERENCES)  # only these, to see whether the others still hold
    assert second.measure(_KERNELS) == 0
    assert not second.notes
    assert len(load_times(first.path)) == len(_KERNELS) + len(REFERENCES)
    assert len(KernelMeter(2).times) == 0  # other devices
    assert len(KernelMeter(4, again=True).times) == 0
    with pytest.raises(UsageError, match="at least one"):
        KernelMeter(0)


def test_a_clock_that_has_run_out_begins_nothing(monkeypatch):
    """Of a thousand devices each look takes seconds, also those at what it takes to dispatch a node."""
    looked = []
    monkeypatch.setattr(timing._Bench, "measure", lambda self, kernels: looked.append(kernels) or {})
    monkeypatch.setattr(timing, "_dispatches", {})
    assert not list(timing.KernelTimer(3).time(REFERENCES, 0.0))
    assert not looked
    assert len(list(timing.KernelTimer(3).time(REFERENCES))) == 1
    assert len(looked) > 1


def test_a_machine_that_became_slower(cache_dir, timed):
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure([_ADD])
    seconds.update(dict.fromkeys(REFERENCES, 1.1e-3))
    within = KernelMeter(4)
    within.start()
    assert within.times.get(_ADD).seconds == 2e-3
    assert not within.notes
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    slower = KernelMeter(4)
    slower.start()
    assert slower.times.get(_ADD).seconds == pytest.approx(4e-3)
    assert "2.00 times" in slower.notes[0]
    slower.measure([_MULTIPLY])
    kept = KernelMeter(4).times
    assert kept.get(_ADD).seconds == 2e-3  # what is kept stays what was measured,
    assert kept.get(_MULTIPLY).seconds == pytest.approx(1e-3)  # or would have been then
    assert slower.times.get(_MULTIPLY).seconds == 2e-3
    saved = slower.times_to_save()
    assert [saved.get(kernel).seconds for kernel in (_ADD, _MULTIPLY)] == pytest.approx([2e-3, 1e-3])


def test_a_reference_kernel_that_a_table_lacks_is_kept_at_its_speed(cache_dir, timed):
    """As one that a later version adds, or that could not be read."""
    seconds, _ = timed
    new = REFERENCES[-1]
    append_times(kernels_path(4), dict.fromkeys(REFERENCES[:-1], Timing(1e-3)), fingerprint_of_kernels(4, "cpu"))
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    slower = KernelMeter(4)
    slower.start()
    assert slower.times.get(new).seconds == 2e-3
    assert KernelMeter(4).times.get(new).seconds == pytest.approx(1e-3)


def test_reference_kernels_are_kept_at_once_however_often_they_are_interrupted(cache_dir, timed, monkeypatch):
    """At the speed of the file, also where the machine is another by now."""
    seconds, asked = timed

    def time(self, kernels, limit=math.inf, progress=None):
        limits.append(limit)
        new = not set(kernels) <= set(asked)
        asked.extend(kernels[:3] if new else kernels)
        yield {kernel: Timing(seconds[kernel]) for kernel in (kernels[:3] if new else kernels)}
        if new:
            raise KeyboardInterrupt

    monkeypatch.setattr(timing.KernelTimer, "time", time)
    for factor, count in ((1e-3, 3), (2e-3, 6), (2e-3, 9)):
        seconds.update(dict.fromkeys(REFERENCES, factor))
        limits, meter = [], KernelMeter(4)
        with pytest.raises(KeyboardInterrupt):
            meter.start(60.0)
        assert meter.measured == 3
        assert [limit <= 30.0 for limit in limits] == [True, False][count == 3:]  # half of them for what is missing
        kept = load_times(meter.path)
        assert len(kept) == count
        assert {timing.seconds for _, timing in kept.items()} == {1e-3}


def test_a_machine_that_is_not_steady(cache_dir, timed):
    """Others use it: a few kernels say that it became slower, others that it did not."""
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure([_ADD])
    seconds.update({kernel: (1 + number) * 1e-3 for number, kernel in enumerate(REFERENCES)})
    within = KernelMeter(4)
    within.start()
    assert "not steady" in within.notes[0]
    assert within.times.get(_ADD).seconds == 2e-3


@pytest.mark.parametrize(("factors", "scaled"), [
    ((1.0, 0.9, 1.2, 1.0, 1.1), 2.0), ((1.0, 1.0, 0.55, 1.0, 1.0), None), ((1.0, 1.0, 1.0, 1.0, 0.4), None),
    ((0.8, 0.8, 0.7, 0.8, 0.8), 1.6)])
def test_a_moment_is_no_drift(cache_dir, timed, factors, scaled):
    """Only what all looks agree on: a kernel that was slow once, or now, says nothing of all the others."""
    seconds, asked = timed
    first = KernelMeter(4)
    first.start()
    first.measure([_ADD])
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    timing.KernelWatch.factors = iter(factors)
    later = KernelMeter(4)
    later.start()
    assert asked[-1] == "closed"
    assert later.times.get(_ADD).seconds == pytest.approx((scaled or 1.0) * 2e-3)
    assert ("not steady" in later.notes[0]) is (scaled is None)


def test_measured_anew(cache_dir, timed):
    first = KernelMeter(4)
    first.start()
    first.measure([_ADD])
    KernelMeter(4, again=True).start()
    assert KernelMeter(4).missing([_ADD]) == [_ADD]
    assert _ADD in load_times(f"{first.path}.old")


def test_measured_again_nothing_of_before_counts(cache_dir, timed):
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure(_KERNELS)
    seconds.update(dict.fromkeys(REFERENCES, 3e-3))
    again = KernelMeter(4, again=True)
    assert len(load_times(again.path)) == len(_KERNELS) + len(REFERENCES)  # until something is measured in its stead
    again.start()
    again.measure([_ADD])
    kept = load_times(again.path)
    assert {kernel for kernel, _ in kept.items()} == {*REFERENCES, _ADD}
    assert all(kept.get(kernel).seconds == 3e-3 for kernel in REFERENCES)
    assert kept.on == again.times.on


def test_a_file_that_another_run_begins_anew_is_of_the_speed_of_now(cache_dir, timed):
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure([_ADD])
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    slower = KernelMeter(4)
    slower.start()
    KernelMeter(4, again=True).start()
    slower.measure([_MULTIPLY])
    assert KernelMeter(4).times.get(_MULTIPLY).seconds == 2e-3  # and not what it would have taken before


@pytest.mark.parametrize("again", [False, True])
def test_what_another_run_measured_meanwhile_is_not_measured_again(cache_dir, timed, monkeypatch, again):
    """But where all is to be measured anew, until the file of before is replaced."""
    _, asked = timed
    KernelMeter(4).start()
    meter = KernelMeter(4, again=again)
    if not again:
        meter.start()
    asked.clear()
    spent, counts = [], []

    @contextlib.contextmanager
    def after_another(wait):
        append_times(meter.path, {_ADD: Timing(5e-3)}, meter.times.on)
        yield True

    def time(self, kernels, limit=math.inf, progress=None):
        asked.extend(kernels)
        spent.append(limit)
        yield {kernel: Timing(2e-3) for kernel in kernels}

    monkeypatch.setattr(metering, "measuring_alone", after_another)
    monkeypatch.setattr(timing.KernelTimer, "time", time)
    assert meter.measure([_ADD, _MULTIPLY], 60.0, counts.append) == (2 if again else 1)
    assert asked == [*([_ADD] if again else []), _MULTIPLY]
    assert meter.times.get(_ADD).seconds == (2e-3 if again else 5e-3)
    assert spent[0] < 60.0  # waiting counts
    assert sum(counts) == (0 if again else 1)


def test_what_cannot_be_kept_is_said_once_and_written_once_it_can_be(timed, tmp_path):
    (tmp_path / "full").write_text("no folder")
    told = []
    meter = KernelMeter(4, path=tmp_path / "full" / "times.jsonl", note=told.append)
    meter.start()
    for kernel in _KERNELS[:-1]:
        meter.measure([kernel])
    assert [note.startswith(f"what is measured is not kept: cannot write {meter.path}: ") for note in told] == [True]
    assert meter.notes == told
    assert meter.unkept == len(meter.times) == len(REFERENCES) + len(_KERNELS) - 1
    assert dict(meter.times_to_save().items()) == dict(meter.times.items())
    (tmp_path / "full").unlink()
    meter.measure(_KERNELS)
    assert meter.unkept == 0
    assert len(load_times(meter.path)) == len(REFERENCES) + len(_KERNELS)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_saved_is_all_that_counts(cache_dir, timed, monkeypatch, again):
    """Of a table that cannot be written to: what it holds, unless that is measured again, and what was measured."""
    append_times(kernels_path(4), {_ADD: Timing(1e-3)}, fingerprint_of_kernels(4))
    meter = KernelMeter(4, again=again)

    def full(*_, **__):
        raise UsageError("cannot write it: the disk is full; free space")

    with monkeypatch.context() as while_full:
        while_full.setattr(metering, "append_times", full)
        meter.measure([_MULTIPLY])
    append_times(kernels_path(4), {_KERNELS[1]: Timing(1e-3)}, fingerprint_of_kernels(4))  # by another run, since
    saved = meter.times_to_save()
    assert {kernel for kernel, _ in saved.items()} == {_MULTIPLY} | (set() if again else {_ADD, _KERNELS[1]})
    assert saved.on == fingerprint_of_kernels(4)


@pytest.mark.parametrize(("name", "value"), [
    ("processor_name", "another processor"), ("cores", 64.0), ("operation_threads", 7), ("memory_bytes", 1 << 40),
    ("tensorflow_version", "0.0"), ("tensorflow_build", "tensorflow-rocm")])
def test_what_kernel_times_depend_on(cache_dir, monkeypatch, name, value):
    before = kernels_path(4), cache_path(4)
    monkeypatch.setattr(cache, name, lambda *_: value)
    assert value in fingerprint_of_kernels(4).values()
    assert (kernels_path(4) != before[0], cache_path(4) != before[1]) == (True, True)


def test_kernel_times_depend_on_the_code_of_kernels_and_on_gpus(cache_dir, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    before, machine = kernels_path(4), cache_path(4)
    assert fingerprint_of_kernels(4)["onednn"]
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert not fingerprint_of_kernels(4)["onednn"]
    assert kernels_path(4) != before
    assert cache_path(4) != machine
    paths = set()
    for names in (["H100"] * 8, ["A100"] * 8, ["H100"] * 4 + ["A100"] * 4):
        monkeypatch.setattr(cache, "gpu_names", lambda names=names: names)
        assert fingerprint_of_kernels(8, "gpu")["gpus"] == fingerprint(8, "gpu")["gpus"] == names
        assert fingerprint_of_kernels(8)["gpus"] == []
        paths |= {kernels_path(8, "gpu"), cache_path(8, "gpu")}
    assert len(paths) == 6


def test_a_busy_machine_and_a_damaged_file_are_said(cache_dir, timed, monkeypatch):
    append_times(kernels_path(4), {_ADD: Timing(1e-3)})
    with open(kernels_path(4), "a", encoding="utf-8") as file:
        file.write("{")
    monkeypatch.setattr(metering.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    meter = KernelMeter(4)
    meter.start()
    assert [note for note in meter.notes if "damaged" in note]
    assert [note for note in meter.notes if "busy (load 100.0" in note]
