"""Kernel times that are kept, looked at again, and measured again where they have to be."""

import contextlib
import math

import pytest
from some_kernels import ADD, KERNELS, MULTIPLY, NONE, WRONG

from pase_mtf.calibration import cache
from pase_mtf.calibration import kernels as timing
from pase_mtf.calibration import meter as metering
from pase_mtf.calibration.cache import cache_path, fingerprint, fingerprint_of_kernels, kernels_path
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.errors import UsageError
from pase_mtf.machine.kernel_file import append_times, load_times
from pase_mtf.machine.kernels import TINY, Timing
from pase_mtf.machine.references import PROBES, REFERENCES


def test_a_meter_of_gpus_tells_how_fast_they_are(cache_dir, timed, monkeypatch):
    monkeypatch.setattr(cache, "gpu_names", lambda: ["a GPU"] * 2)
    told = []

    class Timer:
        disturbed = 0

        def __init__(self, devices, kind, expected=None, tiny=None, best=None):
            told.append(expected and expected(ADD))
            self.failed = {}

        def time(self, kernels, limit=math.inf, progress=None):
            yield {kernel: Timing(1e-6) for kernel in kernels}

    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelTimer", Timer)
    meter = KernelMeter(2, "gpu")
    meter.start()
    meter.measure([ADD])
    assert told[0] is None  # nothing is known of them
    assert 1e-7 < told[-1] < 1e-5  # as the reference kernels took


@pytest.fixture
def timed(monkeypatch):
    """Seconds that stand for those that a clock would tell, and the kernels that were asked for."""
    seconds, asked = dict.fromkeys(REFERENCES, 1e-3), []

    class Timer:
        def __init__(self, devices, kind, expected=None, tiny=None, best=None):
            Timer.tiny, Timer.best = tiny, best
            self.failed = {NONE: "there is none"}
            self.disturbed = 0

        def time(self, kernels, limit=math.inf, progress=None):
            asked.extend(kernels)
            yield {kernel: Timing(seconds.get(kernel, 2e-3)) for kernel in kernels if kernel != NONE}

    class Watch:
        """Looks again, and finds what was found; or, of each look, what is set for it."""

        factors = iter(())

        def __init__(self, kernels, devices, kind, tiny=None):
            self._kernels = kernels
            Watch.tiny = tiny

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
    assert first.measure([*KERNELS, NONE]) == len(KERNELS)
    assert set(PROBES) <= set(timing.KernelTimer.best) <= set(REFERENCES)
    assert timing.KernelTimer.tiny == 1e-3  # all of a table is handed from thread to thread as fast
    assert first.missing([*KERNELS, NONE]) == []
    asked.clear()
    second = KernelMeter(4)
    second.start()
    assert set(asked) == set(REFERENCES)  # only these, to see whether the others still hold
    assert second.measure(KERNELS) == 0
    assert not second.notes
    assert len(load_times(first.path)) == len(KERNELS) + len(REFERENCES)
    assert len(KernelMeter(2).times) == 0  # other devices
    assert len(KernelMeter(4, again=True).times) == 0
    with pytest.raises(UsageError, match="at least one"):
        KernelMeter(0)


def test_a_machine_that_became_slower(cache_dir, timed):
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure([ADD])
    seconds.update(dict.fromkeys(REFERENCES, 1.1e-3))
    within = KernelMeter(4)
    within.start()
    assert within.times.get(ADD).seconds == 2e-3
    assert not within.notes
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    slower = KernelMeter(4)
    slower.start()
    assert slower.times.get(ADD).seconds == pytest.approx(4e-3)
    assert "2.00 times" in slower.notes[0]
    slower.measure([MULTIPLY])
    kept = KernelMeter(4).times
    assert kept.get(ADD).seconds == 2e-3  # what is kept stays what was measured,
    assert kept.get(MULTIPLY).seconds == pytest.approx(1e-3)  # or would have been then
    assert slower.times.get(MULTIPLY).seconds == 2e-3
    saved = slower.times_to_save()
    assert [saved.get(kernel).seconds for kernel in (ADD, MULTIPLY)] == pytest.approx([2e-3, 1e-3])


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
    first.measure([ADD])
    seconds.update({kernel: (1 + number) * 1e-3 for number, kernel in enumerate(REFERENCES)})
    within = KernelMeter(4)
    within.start()
    assert "not steady" in within.notes[0]
    assert within.times.get(ADD).seconds == 2e-3


@pytest.mark.parametrize(("factors", "scaled"), [
    ((1.0, 0.9, 1.2, 1.0, 1.1), 2.0), ((1.0, 1.0, 0.55, 1.0, 1.0), None), ((1.0, 1.0, 1.0, 1.0, 0.4), None),
    ((0.8, 0.8, 0.7, 0.8, 0.8), 1.6)])
def test_a_moment_is_no_drift(cache_dir, timed, factors, scaled):
    """Only what all looks agree on: a kernel that was slow once, or now, says nothing of all the others."""
    seconds, asked = timed
    first = KernelMeter(4)
    first.start()
    first.measure([ADD])
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    timing.KernelWatch.factors = iter(factors)
    later = KernelMeter(4)
    later.start()
    assert asked[-1] == "closed"
    assert timing.KernelWatch.tiny == 1e-3  # what is compared with the table is dispatched as it is there
    assert later.times.get(ADD).seconds == pytest.approx((scaled or 1.0) * 2e-3)
    assert ("not steady" in later.notes[0]) is (scaled is None)


_SESSIONS = {kernel: Timing(2e-3, probed=(1e-3 + 1e-6 * number, 1e-3)) for number, kernel in enumerate(KERNELS)}
"""Kernels that were timed while nobody disturbed them, each in a session of its own."""


def test_references_of_a_disturbed_moment_scale_nothing(cache_dir, timed):
    kept = dict.fromkeys(REFERENCES, Timing(1.6e-3, probed=(1.6e-3, 1.6e-3))) | _SESSIONS
    append_times(kernels_path(4), kept, fingerprint_of_kernels(4))
    meter = KernelMeter(4)
    meter.start()  # the references take 1 ms now
    assert not meter.notes
    for found in (meter.times, KernelMeter(4).times):
        assert found.get(ADD).seconds == 2e-3
        assert found.get(REFERENCES[0]).seconds == 1e-3


@pytest.mark.parametrize(("probed", "counts"), [((1e-3, 1e-3), True), ((1.2e-3, 1.5e-3), True),
                                                ((1e-3, 2e-3), False)])
def test_what_was_timed_in_a_disturbed_moment_is_timed_once_more(cache_dir, timed, monkeypatch, probed, counts):
    _, asked = timed
    append_times(kernels_path(4), _SESSIONS | {MULTIPLY: Timing(5e-3, probed=(1e-3, 1.6e-3)), WRONG: Timing(7e-3)},
                 fingerprint_of_kernels(4))
    meter = KernelMeter(4)
    everything = [*KERNELS, MULTIPLY, WRONG, NONE]

    def time(self, kernels, limit=math.inf, progress=None):
        asked.extend(kernels)
        yield {kernel: Timing(2e-3, probed=probed) for kernel in kernels}

    monkeypatch.setattr(timing.KernelTimer, "time", time)
    updates = meter.times.updates
    assert meter.measure_again(everything) == 1
    assert asked == [MULTIPLY]  # of the others one was in calm sessions, of one nobody knows, and one is not known
    assert timing.KernelTimer.best == pytest.approx(dict(zip(PROBES, (1e-3, 1e-3), strict=True)), rel=0.01)
    assert (meter.times.updates > updates) == counts
    for found in (meter.times, KernelMeter(4).times):
        assert found.get(MULTIPLY).seconds == (2e-3 if counts else 5e-3)
    assert meter.measure_again(everything) == 0
    assert KernelMeter(4).measure_again(everything) == (0 if probed == (1e-3, 1e-3) else 1)  # the next run's


def test_a_tiny_kernel_of_a_disturbed_moment_tells_not_how_it_is_dispatched(cache_dir, timed):
    append_times(kernels_path(4), _SESSIONS | {TINY: Timing(9e-6, probed=(1e-3, 1.6e-3))}, fingerprint_of_kernels(4))
    assert KernelMeter(4).measure_again([TINY]) == 1
    assert timing.KernelTimer.tiny is None


def test_of_few_sessions_nobody_can_tell_which_was_disturbed(cache_dir, timed):
    append_times(kernels_path(4), {ADD: Timing(1e-3, probed=(1e-3, 1e-3)),
                                   MULTIPLY: Timing(5e-3, probed=(9e-3, 9e-3))}, fingerprint_of_kernels(4))
    assert KernelMeter(4).measure_again([ADD, MULTIPLY]) == 0


def test_measured_anew(cache_dir, timed):
    first = KernelMeter(4)
    first.start()
    first.measure([ADD])
    KernelMeter(4, again=True).start()
    assert KernelMeter(4).missing([ADD]) == [ADD]
    assert ADD in load_times(f"{first.path}.old")


def test_measured_again_nothing_of_before_counts(cache_dir, timed):
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure(KERNELS)
    seconds.update(dict.fromkeys(REFERENCES, 3e-3))
    again = KernelMeter(4, again=True)
    assert len(load_times(again.path)) == len(KERNELS) + len(REFERENCES)  # until something is measured in its stead
    again.start()
    again.measure([ADD])
    kept = load_times(again.path)
    assert {kernel for kernel, _ in kept.items()} == {*REFERENCES, ADD}
    assert all(kept.get(kernel).seconds == 3e-3 for kernel in REFERENCES)
    assert kept.on == again.times.on


def test_a_file_that_another_run_begins_anew_is_of_the_speed_of_now(cache_dir, timed):
    seconds, _ = timed
    first = KernelMeter(4)
    first.start()
    first.measure([ADD])
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    slower = KernelMeter(4)
    slower.start()
    KernelMeter(4, again=True).start()
    slower.measure([MULTIPLY])
    assert KernelMeter(4).times.get(MULTIPLY).seconds == 2e-3  # and not what it would have taken before


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
        append_times(meter.path, {ADD: Timing(5e-3)}, meter.times.on)
        yield True

    def time(self, kernels, limit=math.inf, progress=None):
        asked.extend(kernels)
        spent.append(limit)
        yield {kernel: Timing(2e-3) for kernel in kernels}

    monkeypatch.setattr(metering, "measuring_alone", after_another)
    monkeypatch.setattr(timing.KernelTimer, "time", time)
    assert meter.measure([ADD, MULTIPLY], 60.0, counts.append) == (2 if again else 1)
    assert asked == [*([ADD] if again else []), MULTIPLY]
    assert meter.times.get(ADD).seconds == (2e-3 if again else 5e-3)
    assert spent[0] < 60.0  # waiting counts
    assert sum(counts) == (0 if again else 1)


def test_what_cannot_be_kept_is_said_once_and_written_once_it_can_be(timed, tmp_path):
    (tmp_path / "full").write_text("no folder")
    told = []
    meter = KernelMeter(4, path=tmp_path / "full" / "times.jsonl", note=told.append)
    meter.start()
    for kernel in KERNELS[:-1]:
        meter.measure([kernel])
    assert [note.startswith(f"what is measured is not kept: cannot write {meter.path}: ") for note in told] == [True]
    assert meter.notes == told
    assert meter.unkept == len(meter.times) == len(REFERENCES) + len(KERNELS) - 1
    assert dict(meter.times_to_save().items()) == dict(meter.times.items())
    (tmp_path / "full").unlink()
    meter.measure(KERNELS)
    assert meter.unkept == 0
    assert len(load_times(meter.path)) == len(REFERENCES) + len(KERNELS)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_saved_is_all_that_counts(cache_dir, timed, monkeypatch, again):
    """Of a table that cannot be written to: what it holds, unless that is measured again, and what was measured."""
    append_times(kernels_path(4), {ADD: Timing(1e-3)}, fingerprint_of_kernels(4))
    meter = KernelMeter(4, again=again)

    def full(*_, **__):
        raise UsageError("cannot write it: the disk is full; free space")

    with monkeypatch.context() as while_full:
        while_full.setattr(metering, "append_times", full)
        meter.measure([MULTIPLY])
    append_times(kernels_path(4), {KERNELS[1]: Timing(1e-3)}, fingerprint_of_kernels(4))  # by another run, since
    saved = meter.times_to_save()
    assert {kernel for kernel, _ in saved.items()} == {MULTIPLY} | (set() if again else {ADD, KERNELS[1]})
    assert saved.on == fingerprint_of_kernels(4)


@pytest.mark.parametrize(("name", "value"), [
    ("processor_name", "another processor"), ("cores", 4097.0), ("operation_threads", 4097), ("memory_bytes", 1 << 60),
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
    append_times(kernels_path(4), {ADD: Timing(1e-3)})
    with open(kernels_path(4), "a", encoding="utf-8") as file:
        file.write("{")
    monkeypatch.setattr(metering.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(metering.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    meter = KernelMeter(4)
    meter.start()
    assert [note for note in meter.notes if "damaged" in note]
    assert [note for note in meter.notes if "busy (load 100.0" in note]


def test_a_host_of_which_others_use_a_few_cores_is_not_busy(cache_dir, timed, monkeypatch):
    """Of 64 cores, of which this process may have two."""
    monkeypatch.setattr(metering.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(metering.os, "getloadavg", lambda: (20.0, 0.0, 0.0))
    meter = KernelMeter(4)
    meter.start()
    assert not meter.notes


def test_a_file_that_is_begun_anew_while_it_is_waited_for_is_not_scaled(cache_dir, timed, monkeypatch):
    seconds, _ = timed
    KernelMeter(4).start()
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    meter = KernelMeter(4)

    @contextlib.contextmanager
    def after_another(wait):
        append_times(meter.path, dict.fromkeys(REFERENCES, Timing(2e-3)) | {ADD: Timing(5e-3)}, meter.times.on,
                     anew=True)
        yield True

    monkeypatch.setattr(metering, "measuring_alone", after_another)
    meter.start()
    meter.measure([ADD])
    assert meter.times.get(REFERENCES[0]).seconds == pytest.approx(2e-3)
    assert [found.get(ADD).seconds for found in (meter.times, meter.times_to_save())] == [5e-3, 5e-3]


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_a_run_began_is_of_one_speed_when_it_starts_once_more(cache_dir, timed, again):
    """As for the next program, where the time for the first was over before all reference kernels were timed."""
    seconds, _ = timed
    if again:
        KernelMeter(4).start()
    meter = KernelMeter(4, again=again)
    meter.start()
    seconds.update(dict.fromkeys(REFERENCES, 2e-3))
    meter.start()
    meter.measure([ADD])
    assert meter.times.get(ADD).seconds == 2e-3
    assert KernelMeter(4).times.get(ADD).seconds == pytest.approx(1e-3)
    saved = meter.times_to_save()
    assert [saved.get(kernel).seconds for kernel in (REFERENCES[0], ADD)] == pytest.approx([1e-3, 1e-3])


def test_what_another_run_measured_meanwhile_tells_how_nodes_are_dispatched(cache_dir, timed, monkeypatch):
    """Of a machine of which nothing was known before; where all is known then, nothing is begun."""
    begun, time = [], timing.KernelTimer.time

    @contextlib.contextmanager
    def after_another(wait):
        append_times(kernels_path(4), dict.fromkeys(REFERENCES, Timing(1e-3)), fingerprint_of_kernels(4))
        yield True

    def noted(self, kernels, *given):
        begun.append([*kernels])
        return time(self, kernels, *given)

    monkeypatch.setattr(metering, "measuring_alone", after_another)
    monkeypatch.setattr(timing.KernelTimer, "time", noted)
    assert KernelMeter(4).measure([*REFERENCES, ADD]) == 1
    assert timing.KernelTimer.tiny == 1e-3
    kernels_path(4).unlink()
    assert KernelMeter(4).measure(REFERENCES) == 0
    assert begun == [[ADD]]
