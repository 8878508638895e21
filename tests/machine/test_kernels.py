"""Kernels and their times: what they compute and move, what is known of those not measured, and their file."""

import concurrent.futures
import errno
import json
import pathlib
import random

import numpy as np
import pytest

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.machine.kernel_file import append_times, begun, line_of, load_times
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing, send_kernel, sum_kernel
from pase_mtf.machine.references import REFERENCES

_RECORDED = pathlib.Path(__file__).parents[1] / "data" / "kernels.jsonl"


def _floats(*shape):
    return Block("float32", shape)


def _product(rows, inner, columns):
    return Kernel("Einsum", (_floats(rows, inner), _floats(inner, columns)), (_floats(rows, columns),),
                  (("equation", "ab,bc->ac"),))


def _elementwise(operation, *shape):
    return Kernel(operation, (_floats(*shape), _floats(*shape)), (_floats(*shape),))


_CONVOLUTION = Kernel("Conv2D", (_floats(8, 14, 14, 64), _floats(3, 3, 64, 128)), (_floats(8, 7, 7, 128),),
                      (("padding", "SAME"), ("strides", (1, 2, 2, 1))))
_SUM = Kernel("Sum", (_floats(4, 6), Block("int32", (1,), (1,))), (_floats(4),))


@pytest.mark.parametrize(("kernel", "flops", "nbytes"), [
    (_product(2, 3, 5), 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)),
    (_CONVOLUTION, 2 * 8 * 7 * 7 * 128 * 9 * 64, 4 * (8 * 14 * 14 * 64 + 9 * 64 * 128 + 8 * 7 * 7 * 128)),
    (Kernel("Conv2DBackpropInput", (Block("int32", (4,), (8, 14, 14, 64)), _floats(3, 3, 64, 128),
                                    _floats(8, 7, 7, 128)), (_floats(8, 14, 14, 64),)),
     2 * 8 * 7 * 7 * 128 * 9 * 64, _CONVOLUTION.nbytes),
    (Kernel("Conv2DBackpropFilter", (_floats(8, 14, 14, 64), Block("int32", (4,), (3, 3, 64, 128)),
                                     _floats(8, 7, 7, 128)), (_floats(3, 3, 64, 128),)),
     2 * 8 * 7 * 7 * 128 * 9 * 64, _CONVOLUTION.nbytes),
    (Kernel("BatchMatMulV2", (_floats(7, 2, 3), _floats(7, 3, 5)), (_floats(7, 2, 5),)), 2 * 7 * 2 * 3 * 5, 4 * 7 * 31),
    (_SUM, 24, 4 * 28), (_SUM._replace(again=True), 24, 4 * 28), (sum_kernel(4, 100, 2), 100, 2 * 500),
    (Kernel("AssignSubVariableOp", (Block("resource", (6,)), _floats(6)), ()), 6, 4 * 18)])
def test_what_a_kernel_computes_and_moves(kernel, flops, nbytes):
    assert kernel.flops == pytest.approx(flops)
    assert kernel.nbytes == nbytes
    assert Kernel.from_json(json.loads(json.dumps(kernel.to_json()))) == kernel


def test_what_is_sent_is_of_few_sizes():
    assert {elements: send_kernel(elements, 4).inputs[0].elements for elements in (0, 1, 2, 3, 4, 5, 1000)} == {
        0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 1000: 1024}
    assert send_kernel(5, 2).inputs == send_kernel(5, 2).outputs == (Block("bfloat16", (8,)),)
    assert send_kernel(8, 4).apart
    assert send_kernel(8, 4).by_reference


def test_text():
    assert str(_product(2, 3, 5)) == "Einsum(float32[2,3], float32[3,5]) -> float32[2,5]; equation=ab,bc->ac"
    assert str(_SUM) == "Sum(float32[4,6], int32[1]=1) -> float32[4]"
    assert "from other devices" in str(sum_kernel(2, 8, 4))
    assert "once more" in str(_SUM._replace(again=True))


def test_no_measured_kernel_beats_its_bound():
    rng = np.random.default_rng(0)
    kernels = [_product(*map(int, rng.integers(1, 500, 3))) for _ in range(40)]
    kernels += [_elementwise(operation, int(size)) for operation in ("Mul", "Exp") for size in rng.integers(1, 1e5, 20)]
    times = KernelTimes(timings={kernel: Timing(float(seconds)) for kernel, seconds in zip(
        kernels, 10.0 ** rng.uniform(-6, -2, len(kernels)), strict=True)})
    for kernel, timing in times.items():
        assert times.bound(kernel) <= timing.seconds * (1 + 1e-12)
        assert times.estimate(kernel) == timing.seconds


@pytest.mark.parametrize("one_of", [2, 10])
@pytest.mark.parametrize("seed", range(4))
def test_few_kernels_beat_the_bounds_of_others(one_of, seed):
    """Of 400 kernels that a machine took (two cores of an AMD EPYC, four devices), some are known, as are those that
    every run begins with, and the others are held against what these tell of them."""
    draw, recorded = random.Random(seed), load_times(_RECORDED)
    known = {kernel: timing for kernel, timing in recorded.items()
             if kernel in REFERENCES or not draw.randrange(one_of)}
    times = KernelTimes(timings=known)
    bounds, seconds = np.array([(times.bound(kernel), timing.seconds) for kernel, timing in recorded.items()
                                if kernel not in known]).T
    assert len(seconds) > 150
    assert (bounds > 1.001 * seconds).mean() < 0.1
    assert (bounds > 1.1 * seconds).mean() < 0.075
    assert (bounds < 5.0 * seconds).all()
    assert np.maximum(bounds - seconds, 0.0).sum() < 0.075 * seconds.sum()
    assert bounds.sum() > 0.5 * seconds.sum()  # or it would be no use


def test_bounds_and_estimates_of_what_was_not_measured():
    times = KernelTimes(timings={
        _elementwise("Mul", 1000): Timing(1e-6), _elementwise("Mul", 2000): Timing(8e-6),
        _elementwise("Mul", 4000): Timing(16e-6)})
    assert times.bound(_elementwise("Mul", 20000)) == pytest.approx(20e-6)
    assert times.bound(_elementwise("Mul", 10000)) == pytest.approx(16e-6)  # no less than of 4000 elements
    assert times.bound(_elementwise("Mul", 10)) == pytest.approx(1e-6)  # nothing was shorter
    assert times.estimate(_elementwise("Mul", 20000)) == pytest.approx(80e-6)  # four times as long, in the median
    assert times.estimate(_elementwise("Mul", 20000), 0.0) == pytest.approx(20e-6)  # as the best of them
    assert times.bound(_elementwise("Tanh", 10000)) == pytest.approx(10e-6)  # no kernel of its own
    assert times.scaled(2.0).bound(_elementwise("Mul", 20000)) == pytest.approx(40e-6)
    assert KernelTimes().bound(_elementwise("Mul", 10000)) == 0.0
    times.update({_elementwise("Mul", 10000): Timing(5e-6)})
    assert times.bound(_elementwise("Mul", 20000)) == pytest.approx(10e-6)
    assert times.bound(_elementwise("Mul", 3000)) == pytest.approx(5e-6)  # one that is larger took no longer


def test_narrow_products_are_not_held_to_the_rate_of_wide_ones():
    wide = [_product(256, 256, 100 + number) for number in range(16)]
    narrow = [_product(1024, 4, 200 + number) for number in range(16)]
    copies = [_elementwise("Mul", 50000 * number) for number in range(1, 17)]
    times = KernelTimes(timings={**{kernel: Timing(kernel.flops / 1e13) for kernel in wide},
                                 **{kernel: Timing(kernel.flops / 1e11) for kernel in narrow},
                                 **{kernel: Timing(kernel.nbytes / 1e13) for kernel in copies}})
    for width, rate in ((2, 1e11), (4, 1e11), (128, 1e13), (512, 1e13)):
        kernel = _product(512, width, 300)
        assert times.bound(kernel) == pytest.approx(kernel.flops / rate)
    times = KernelTimes(timings={kernel: timing for kernel, timing in times.items() if kernel != narrow[0]})
    kernel = _product(512, 4, 300)  # fifteen do not tell what such can do
    assert times.bound(kernel) == pytest.approx(kernel.flops / 1e13)


def test_kernels_that_compute_nothing_tell_no_rate():
    """They were all that a damaged file held."""
    times = KernelTimes(timings={_elementwise("Mul", 0): Timing(1e-5)})
    for kernel in (_elementwise("Mul", 0), _product(2, 3, 4)):
        assert times.estimate(kernel) >= 1e-5


def test_a_sum_of_nothing_is_no_kernel(tmp_path):
    path = tmp_path / "kernels.jsonl"
    path.write_text(line_of(_product(2, 3, 4)._replace(operation="Sum", inputs=()), Timing(1e-5)) + "\n")
    times = load_times(path)
    assert times.damaged == 1
    assert times.estimate(_product(2, 3, 4)) == 0


def test_what_leaves_the_caches_is_not_held_to_the_rate_of_what_stays():
    small = {_elementwise("Mul", 1000 + number): Timing(12 * (1000 + number) / 1e11) for number in range(16)}
    large = {_elementwise("Mul", 1000000 + number): Timing(12 * (1000000 + number) / 1e10) for number in range(16)}
    times = KernelTimes(timings={**small, **large})
    assert times.bound(_elementwise("Mul", 1200000)) == pytest.approx(12 * 1200000 / 1e10)
    assert times.bound(_elementwise("Mul", 400000)) == pytest.approx(12 * 400000 / 1e11)  # the next that had it easier
    assert times.bound(_elementwise("Tanh", 1200000)) == pytest.approx(12 * 1200000 / 1e10)


@pytest.mark.parametrize(("kernel", "width"), [
    (_product(2, 3, 5), 2), (_product(7, 3, 5), 3), (_CONVOLUTION, 64), (_elementwise("Mul", 8, 8), 1),
    (Kernel("Einsum", (_floats(7, 6, 3), _floats(7, 3, 5)), (_floats(7, 6, 5),), (("equation", "bij,bjk->bik"),)), 3),
    (Kernel("BatchMatMulV2", (_floats(7, 6, 3), _floats(7, 3, 5)), (_floats(7, 6, 5),)), 3),
    (Kernel("Conv2DBackpropFilter", (_floats(8, 14, 14, 64), Block("int32", (4,), (3, 3, 64, 32)),
                                     _floats(8, 7, 7, 32)), (_floats(3, 3, 64, 32),)), 32)])
def test_width(kernel, width):
    assert kernel.width == width


def test_a_sum_over_one_element_forwards_its_tensor():
    alone = Kernel("Sum", (_floats(1, 6), Block("int32", (1,), (0,))), (_floats(6),))
    assert alone.by_reference
    assert not _SUM.by_reference


def test_what_forwards_its_tensor_has_a_rate_of_its_own():
    shape = Block("int32", (2,), (1 << 10, 1 << 10))
    reshape = Kernel("Reshape", (_floats(1 << 20), shape), (_floats(1 << 10, 1 << 10),))
    times = KernelTimes(timings={_elementwise("Mul", 1000): Timing(1e-6), reshape: Timing(2e-6)})
    assert times.bound(_elementwise("Mul", 1 << 20)) == pytest.approx((1 << 20) * 1e-9)
    larger = Kernel("Reshape", (_floats(1 << 24), shape), (_floats(1 << 12, 1 << 12),))
    assert times.bound(larger) == 1e-6  # it may forward it, whatever its size
    times = KernelTimes(timings={_elementwise("Mul", 1 << 20): Timing(1e-4), send_kernel(16, 4): Timing(1e-6)})
    assert times.estimate(send_kernel(1 << 20, 4)) <= 1e-4  # one that is small tells nothing of how fast they are


@pytest.mark.parametrize(("operation", "alike"), [("Sum", False), ("BroadcastTo", True)])
def test_only_axes_make_kernels_others(operation, alike):
    one, other = (Kernel(operation, (_floats(4, 4), Block("int32", (1,), (value,))), (_floats(4),)) for value in (0, 1))
    times = KernelTimes(timings={_elementwise("Mul", 1): Timing(1e-9), _elementwise("Mul", 1 << 20): Timing(1e-6),
                                 one: Timing(1e-6)})
    assert (times.bound(other) == pytest.approx(1e-6)) == alike


def test_where_nothing_can_be_locked(tmp_path, monkeypatch):
    for number, error in enumerate((NotImplementedError(), OSError(errno.ENOLCK, "No locks available")), 1):
        monkeypatch.setattr("filelock.FileLock.acquire", lambda self, error=error: (_ for _ in ()).throw(error))
        append_times(tmp_path / "kernels.jsonl", {_product(number, 2, 3): Timing(1e-6)})
        assert len(load_times(tmp_path / "kernels.jsonl")) == number


def test_file_that_many_append_to(tmp_path):
    path = tmp_path / "cache" / "kernels.jsonl"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: append_times(path, {
            _product(number, 2, 3): Timing(1e-6 * number, 0.02, 9)}), range(1, 33)))
    times = load_times(path)
    assert len(times) == 32
    assert times.damaged == 0
    assert times.get(_product(7, 2, 3)) == Timing(7e-6, 0.02, 9)
    append_times(path, {_product(7, 2, 3): Timing(5e-6, probed=(1e-3, 2e-3))})
    assert load_times(path).get(_product(7, 2, 3)) == Timing(5e-6, probed=(1e-3, 2e-3))


@pytest.mark.parametrize("damage", [
    b"{", b"\xff\xfe\n", b"[1]\n", b'{"seconds": -1.0, "kernel": {}}\n', b"\x00" * 50,
    line_of(_SUM, Timing(1.0)).encode()[:-20], line_of(_SUM, Timing(1.0, probed=(1.0,) * 3)).encode() + b"\n",
    line_of(_SUM, Timing(1.0, probed=(1.0, -1.0))).encode() + b"\n"])
def test_damaged_lines_are_passed_over(tmp_path, damage):
    path = tmp_path / "kernels.jsonl"
    append_times(path, {_product(1, 2, 3): Timing(1e-6)})
    path.write_bytes(path.read_bytes() + damage)
    append_times(path, {_product(2, 2, 3): Timing(2e-6)})
    times = load_times(path)
    assert {kernel for kernel, _ in times.items()} == {_product(1, 2, 3), _product(2, 2, 3)}
    assert times.damaged == 1


def test_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        append_times(tmp_path / "file" / "kernels.jsonl", {_SUM: Timing(1.0)})
    assert len(load_times(tmp_path / "none.jsonl")) == 0


def test_no_kernel():
    with pytest.raises(FormatError, match="no kernel"):
        Kernel.from_json({"operation": "Mul", "inputs": [["float32"]], "outputs": []})


@pytest.mark.parametrize("told", ["1" + "0" * 400, '"now"', "null"])
def test_a_file_may_tell_anything_of_when_it_was_begun(tmp_path, told):
    (tmp_path / "kernels.jsonl").write_text(f'{{"on": {{}}, "begun": {told}}}\n')
    assert begun(tmp_path / "kernels.jsonl") is None


@pytest.mark.parametrize(("shape", "axes", "free"), [
    ((1, 20, 64), (1, 0, 2), True), ((8, 1, 1, 64), (0, 2, 3, 1), True), ((2, 20, 64), (1, 0, 2), False),
    ((4, 1, 600), (2, 1, 0), False)])
def test_a_transpose_that_moves_single_elements_alone_forwards_its_tensor(shape, axes, free):
    kernel = Kernel("Transpose", (_floats(*shape), Block("int32", (len(axes),), axes)),
                    (_floats(*(shape[axis] for axis in axes)),))
    times = KernelTimes(timings={_elementwise("Mul", 1 << 16): Timing(1e-4), _elementwise("Mul", 16): Timing(1e-9)})
    assert kernel.by_reference == free
    assert (times.bound(kernel) == pytest.approx(1e-9)) == free
