"""Kernels that are timed; how long they take is no test's business."""

import contextlib
import math

import pytest
from some_kernels import ADD, KERNELS, NONE, WRONG, floats

from pase_mtf.calibration import kernels as timing
from pase_mtf.calibration.kernels import KernelTimer
from pase_mtf.calibration.nodes import Nodes
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing, send_kernel, sum_kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.machine.references import PROBES, REFERENCES
from pase_mtf.runtime import Devices


def test_kernels_of_all_kinds_are_timed():
    timer, done = KernelTimer(2), []
    found = {}
    for batch in timer.time([*KERNELS, NONE, WRONG], progress=done.append):
        found.update(batch)
    assert set(found) == set(KERNELS)
    assert all(0.0 < timing.seconds < math.inf and timing.runs >= 2 for timing in found.values())
    assert set(timer.failed) == {NONE, WRONG}
    assert "NoSuchOperation" in timer.failed[NONE]
    assert sum(done) == len(KERNELS) + 2


def test_what_is_too_large_or_too_late_is_not_timed():
    timer = KernelTimer(2)
    huge = Kernel("Exp", (floats(1 << 40),), (floats(1 << 40),))
    assert list(timer.time([huge])) == []
    assert "GB" in timer.failed[huge]
    assert list(timer.time([ADD], seconds=0.0)) == []


_PRODUCT, _MEMORY = PROBES
_NARROW = REFERENCES[1]  # a product
_LARGE = Kernel("AddV2", (floats(1 << 18),) * 2, (floats(1 << 18),))


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
    large_product = Kernel("Einsum", (floats(512, 512),) * 2, (floats(512, 512),), (("equation", "ab,bc->ac"),))
    kernels, left = [_LARGE, large_product, ADD], iter(tries)

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


def test_a_slow_start_of_a_run_makes_no_kernel_short(monkeypatch):
    """What is taken off belongs to the session: the less disturbed one counts, and not the shorter difference."""
    monkeypatch.setattr(timing, "_dispatches", {Devices.first(2, "cpu"): [0.0] * timing._SESSIONS})
    monkeypatch.setattr(timing, "_probed_seconds", {})
    tries = iter([(3e-4, 2.0), (1e-4, 1.0)])  # what starting takes, how slow the probes are

    @contextlib.contextmanager
    def opened(bench, kernels):
        start, slow = next(tries)
        looked = dict.fromkeys((timing._IDLE_AGAIN, timing._IN_A_ROW, timing._BESIDE), Timing(1e-4))
        looked |= {kernel: Timing(1e-4 + slow * 1e-3 * bench._runs(bench._repeats(kernel))) for kernel in PROBES}
        looked |= {timing._IDLE: Timing(start), _NARROW: Timing(4e-4)}
        yield lambda: looked

    monkeypatch.setattr(timing._Bench, "opened", opened)
    (batch,) = KernelTimer(2, best=dict.fromkeys(PROBES, 1e-3)).time([_NARROW])
    bench = timing._Bench(Devices.first(2, "cpu"), True, {})
    assert batch[_NARROW].seconds == pytest.approx(3e-4 / bench._runs(bench._repeats(_NARROW)))
    assert batch[_NARROW].probed == pytest.approx((1e-3, 1e-3))


def test_a_kernel_goes_from_thread_to_thread(monkeypatch):
    monkeypatch.setattr(timing, "_dispatches", {})
    bench, gpus = (timing._Bench(Devices.first(2, kind), kind == "cpu", {}) for kind in ("cpu", "gpu"))
    nodes, kernels = 2 * timing._TINY_REPEATS, 2 * bench._repeats(_NARROW)

    def looked(dispatch):
        return {_NARROW: Timing(3e-4 + kernels * 5e-6), timing._IDLE: Timing(3e-4), timing._IDLE_AGAIN: Timing(1e-4),
                timing._IN_A_ROW: Timing(2e-4), timing._BESIDE: Timing(2e-4 + nodes * dispatch)}

    first = bench.of_one(looked(3e-6))
    assert set(first) == {_NARROW}
    assert first[_NARROW].seconds == pytest.approx(5e-6 + 3e-6)
    monkeypatch.setattr(timing, "_dispatches", {Devices.first(2, "cpu"): [3e-6]})
    assert bench.of_one(looked(9e-6))[_NARROW].seconds == pytest.approx(5e-6 + 4.5e-6)  # the quartile of both sessions
    monkeypatch.setattr(timing, "_dispatches", {})
    assert bench.of_one(looked(-3e-6))[_NARROW].seconds == pytest.approx(5e-6)  # less than none it is not
    short = {**looked(3e-6), _NARROW: Timing(3e-4 + kernels * 1e-7)}
    monkeypatch.setattr(timing, "_dispatches", {})
    assert bench.of_one(short)[_NARROW].seconds == pytest.approx(1e-7 + 3e-6)  # as the share that one core has of all
    # Of a table that knows a tiny kernel, what was measured with it counts for all that comes later.
    table = timing._Bench(Devices.first(2, "cpu"), True, {}, tiny=1e-4 / nodes + 4e-6)
    assert table.of_one(looked(9e-6))[_NARROW].seconds == pytest.approx(5e-6 + 4e-6)
    alone = {_NARROW: Timing(1e-4 + gpus._repeats(_NARROW) * 5e-6), timing._IDLE: Timing(1e-4)}
    assert gpus.of_one(alone)[_NARROW].seconds == pytest.approx(5e-6)


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
    with bench.opened([total, send, ADD]) as look:
        assert set(look()) == {*looked, ADD}


def test_what_is_timed_after_others_reads_what_was_not_just_made():
    """Weights, tables, and what a kernel like it has just read."""
    rows = Kernel("GatherV2", (floats(64, 8), Block("int32", (4,)), Block("int32", (), (0,))), (floats(4, 8),))
    assigned = Kernel("AssignSubVariableOp", (Block("resource", (4, 8)), floats(4, 8)), ())
    bench = timing._Bench(Devices.first(2, "cpu"), True, {})
    total, again, product = sum_kernel(2, 64, 4), ADD._replace(again=True), _NARROW._replace(apart=True)
    kernels = [ADD, assigned, total, rows, _NARROW, product, again, *PROBES]
    assert list(filter(bench._is_half_cold, kernels)) == [rows, _NARROW, product, again]
    with bench.opened(kernels):  # what making them takes is timed as they are
        assert bench._after_others == {timing._IDLE, rows, _NARROW, product, timing._making(product), again}


def test_what_belongs_to_another_kernel_reads_what_that_made(monkeypatch):
    """As in a step: oneDNN goes another way then, for the gradient of a maximum in a sixth of the time."""
    monkeypatch.setattr(timing, "_dispatches", {})
    image, small = floats(2, 8, 8, 4), floats(2, 4, 4, 4)
    gradient = Kernel("MaxPoolGrad", (image, small, small), (image,),
                      (("ksize", (1, 2, 2, 1)), ("padding", "SAME"), ("strides", (1, 2, 2, 1))))
    bench, nodes = timing._Bench(Devices.first(2, "cpu"), True, {}), Nodes(Devices.first(2, "cpu"))
    nodes.kernel(gradient, 3)
    made = {node.name: node for node in nodes.definition.node}
    gradients = [node for node in made.values() if node.op == "MaxPoolGrad"]
    pools = [made[node.input[1]] for node in gradients]
    assert [node.op for node in pools] == ["MaxPool"] * 6
    assert len({node.name for node in pools}) == 2  # one on every device
    assert all(pool.input[0] == node.input[0] for node, pool in zip(gradients, pools, strict=True))
    with bench.opened([gradient]) as look:
        looked = look()
    assert timing._making(gradient) in looked  # what the maximum takes is taken off
    assert set(bench.of_one(looked)) == {gradient}


def test_what_is_read_again_is_read_several_times_in_a_row(monkeypatch):
    monkeypatch.setattr(timing, "cores", lambda: 2.0)  # however many this machine has
    bench = timing._Bench(Devices.first(8, "cpu"), True, {})
    products = [Kernel("Einsum", (floats(2, size), floats(size, size)), (floats(2, size),),
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
    kernels = [Kernel("Einsum", (floats(size, size),) * 2, (floats(size, size),), (("equation", "ab,bc->ac"),))
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
    # To start a run of several processes takes longer: so do the runs.
    over = timing._Bench(Devices.over_tasks(2, "gpu", ("a:1", "b:1")), False, {}, lambda kernel: 1e-3)
    assert over._repeats(kernels[0]) == round(timing._RUN_SECONDS_OVER_PROCESSES / 1e-3)


def test_a_clock_that_has_run_out_begins_nothing(monkeypatch):
    """Of a thousand devices each look takes seconds, also those at what it takes to dispatch a node."""
    looked = []
    monkeypatch.setattr(timing._Bench, "measure", lambda self, kernels: looked.append(kernels) or {})
    monkeypatch.setattr(timing, "_dispatches", {})
    assert not list(timing.KernelTimer(3).time(REFERENCES, 0.0))
    assert not looked
    assert len(list(timing.KernelTimer(3).time(REFERENCES))) == 1
    assert len(looked) > 1


def test_what_reads_text_is_not_timed():
    text = Kernel("StringLower", (Block("string", (8,)),), (Block("string", (8,)),))
    timer, found = KernelTimer(2), {}
    for batch in timer.time([ADD, text]):
        found.update(batch)
    assert set(found) == {ADD}
    assert set(timer.failed) == {text}


def test_gpus_of_which_nothing_is_known_repeat_what_takes_them_microseconds():
    """It is devices that share cores whose caches a run of several finds full."""
    kernel = next(kernel for kernel in REFERENCES if kernel.operation == "Sum")
    assert timing._Bench(Devices.first(1, "gpu"), False, {})._repeats(kernel) == timing._REPEATS


def test_what_takes_devices_that_share_cores_long_stands_once_on_each(monkeypatch):
    """As in a step; what takes microseconds is repeated, for the sake of the clock."""
    monkeypatch.setattr(timing, "cores", lambda: 2.0)
    bench = timing._Bench(Devices.first(8, "cpu"), True, {})
    small, large = (Kernel("Mul", (Block("float32", (size,)),) * 2, (Block("float32", (size,)),))
                    for size in (64, 1 << 20))
    assert bench._repeats(small) == timing._REPEATS
    assert bench._repeats(large) == 1


def test_a_product_is_timed_after_every_other_kernel_of_its_session():
    """Also after what computes element by element, and the probes, which are themselves timed in a row."""
    bench, order = timing._Bench(Devices.first(2, "cpu"), True, {}), []
    bench._after_others = {timing._IDLE, _NARROW}
    bench._look({kernel: lambda kernel=kernel: order.append(kernel)
                 for kernel in (*PROBES, _NARROW, ADD, _LARGE, timing._IDLE, timing._IDLE_AGAIN)})
    first, second = [place for place, kernel in enumerate(order) if kernel == _NARROW][:2]
    assert {*PROBES, ADD, _LARGE} <= {*order[first:second]}


def test_what_cannot_be_timed_leaves_the_others_together(monkeypatch):
    """Alone none of them would follow others."""
    sessions, failed, opened = [], {}, timing._Bench.opened

    @contextlib.contextmanager
    def noted(bench, kernels):
        with opened(bench, kernels) as look:
            sessions.append({*kernels})
            yield look

    monkeypatch.setattr(timing, "_dispatches", {})
    monkeypatch.setattr(timing._Bench, "opened", noted)
    found = timing._Bench(Devices.first(2, "cpu"), True, failed).measure([ADD, _NARROW, WRONG])
    assert set(found) == {ADD, _NARROW}
    assert set(failed) == {WRONG}
    assert {ADD, _NARROW} in sessions
