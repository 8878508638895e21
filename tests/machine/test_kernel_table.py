"""Kernel times that travel in one file: what is written is read again, and everything else is answered in one line."""

import copy
import json
import threading
import time

import pytest

from pase_mtf.calibration.cache import KERNEL_VERSION, fingerprint_of_kernels
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.machine import kernel_table
from pase_mtf.machine.kernel_file import line_of, read_entry
from pase_mtf.machine.kernel_table import is_table, load_tables, save_tables, table_for
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing, sum_kernel

_PRODUCT = Kernel("Einsum", (Block("float32", (2, 3)), Block("float32", (3, 5))), (Block("float32", (2, 5)),),
                  (("equation", "ab,bc->ac"),))
_REDUCTION = Kernel("Sum", (Block("float32", (4, 6)), Block("int32", (1,), (1,))), (Block("float32", (4,)),))
_TIMES = {_PRODUCT: Timing(2.5e-5, 0.031, 17), sum_kernel(4, 100, 4): Timing(1e-6), _REDUCTION: Timing(3e-6)}


def _of(devices, timings=None, **on):
    return KernelTimes({**fingerprint_of_kernels(devices), **on}, _TIMES if timings is None else timings)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.json"
    save_tables(path, [_of(8), _of(4, {_PRODUCT: Timing(5e-5)})])
    return path


def test_what_is_saved_is_read_again(path):
    assert is_table(path)
    four, eight = load_tables(path)
    assert dict(eight.items()) == _TIMES
    assert eight.on == fingerprint_of_kernels(8)
    assert table_for(path, 4).get(_PRODUCT) == Timing(5e-5)
    assert len(four) == 1
    lines = path.read_text(encoding="utf-8").splitlines()  # for people: a line per kernel, with its text
    assert sum("Einsum(float32[2,3], float32[3,5]) -> float32[2,5]" in line for line in lines) == 2
    with pytest.raises(UsageError, match="holds kernels of 4 and of 8 devices, not of 16"):
        table_for(path, 16)


@pytest.mark.parametrize("changed", [{"version": KERNEL_VERSION - 1}, {"memory": 1 << 30}])
def test_what_differs_between_machines_of_one_name_is_said(tmp_path, changed):
    save_tables(tmp_path / "mine.json", [_of(8, **changed)])
    with pytest.raises(UsageError, match=rf"\(another {next(iter(changed))}\); choose another name"):
        save_tables(tmp_path / "mine.json", [_of(8)])


def test_kernels_that_were_timed_in_another_way_are_told(tmp_path):
    for version in (KERNEL_VERSION, KERNEL_VERSION - 1):
        file = tmp_path / f"{version}.json"
        save_tables(file, [_of(8, version=version)])
        notes = SavedKernels(file, 8).notes
        assert [f"version {version}" in note and str(file) in note for note in notes] == [True] * (
            version != KERNEL_VERSION)


def test_gpus_are_not_priced(tmp_path):
    save_tables(tmp_path / "gpus.json", [_of(2, kind="gpu", gpus=["a GPU"] * 2)])
    with pytest.raises(UsageError, match="kernels of GPUs"):
        table_for(tmp_path / "gpus.json", 2)


def test_a_file_grows_by_other_numbers_of_devices_of_its_machine(path):
    save_tables(path, [_of(8, {_PRODUCT: Timing(7e-5)}), _of(2)])
    assert [times.on["devices"] for times in load_tables(path)] == [2, 4, 8]
    assert dict(table_for(path, 8).items()) == {_PRODUCT: Timing(7e-5)}


def test_a_file_in_which_nothing_is_takes_them(tmp_path):
    """As `mktemp` makes them."""
    path = tmp_path / "made.json"
    path.touch()
    save_tables(path, [_of(8)])
    assert dict(table_for(path, 8).items()) == _TIMES


@pytest.mark.parametrize("content", [b"\n", b"precious", b'{"format": "pase_mtf.machine", "version": 1}',
                                     b'{"format": "pase_mtf.kernels", "version": 1, "tables": [{'])
def test_a_file_that_is_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="choose another name"):
        save_tables(path, [_of(8)])
    assert path.read_bytes() == content


def test_a_file_of_another_machine_is_left_alone(path):
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"kernel times of .*, these are of another processor"):
        save_tables(path, [_of(2, processor="another processor")])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["mine.json"]


@pytest.mark.parametrize(("where", "value"), [
    (("tables",), []), (("tables",), {}), (("tables", 0), []), (("surprise",), 1), (("tables", 1, "on"), None),
    (("tables", 1, "on", "devices"), 4), (("tables", 1, "on", "devices"), 0), (("tables", 1, "on", "cores"), "2"),
    (("tables", 1, "on", "cores"), -1.0), (("tables", 1, "on", "memory"), 0), (("tables", 1, "on", "more"), 0),
    (("tables", 1, "kernels"), []), (("tables", 1, "kernels", 0, "seconds"), -1.0),
    (("tables", 1, "kernels", 0, "seconds"), 0.0), (("tables", 1, "kernels", 0, "seconds"), "1e-6"),
    (("tables", 1, "kernels", 0, "seconds"), 1e9), (("tables", 1, "kernels", 0, "runs"), 1.5),
    (("tables", 1, "kernels", 0, "kernel"), {}), (("tables", 1, "kernels", 0, "kernel", "inputs"), []),
    (("tables", 1, "kernels", 0, "kernel", "inputs", 0, 1), [10 ** 400, 3]),
    (("tables", 1, "kernels", 0, "kernel", "inputs", 0, 1), [-2, 3]),
    (("tables", 1, "kernels", 0, "kernel", "inputs", 0, 1), "23x"),
    (("tables", 1, "kernels", 0, "kernel", "inputs", 0, 0), "float" + "9" * 1000),
    (("tables", 1, "kernels", 0, "kernel", "inputs", 0, 1), [1 << 60, 2]),
    (("tables", 1, "kernels", 0, "kernel", "attributes"), {"equation": {}}),
    (("tables", 1, "kernels", 0, "kernel", "outputs"), 5), (("version",), 2), (("format",), "pase_mtf.machine")])
def test_changed_files_are_refused_in_one_line(path, where, value):
    data = json.loads(path.read_text(encoding="utf-8"))
    place = copy.copy(data)
    data = place
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    if value == [] and where[-1] == "inputs":  # a product of nothing
        place["operation"] = "Conv2D"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FormatError, match=r"mine\.json") as caught:
        load_tables(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("equation", ["[[[[", "ab,bzq->az", "", 5])
def test_products_of_something_else(equation):
    data = json.loads(line_of(_PRODUCT, Timing(5e-5)))
    data["kernel"]["attributes"]["equation"] = equation
    with pytest.raises(FormatError, match="leave it out"):
        read_entry(data)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "NaN", "\0"])
def test_no_file_of_ours(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert not is_table(path)
    with pytest.raises(FormatError, match=r"mine\.json"):
        load_tables(path)


def test_what_is_no_file(tmp_path):
    assert not is_table(tmp_path)
    assert not is_table(tmp_path / "none.json")
    assert not is_table("no\0path")
    assert not is_table(None)
    with pytest.raises(FormatError, match="cannot read"):
        load_tables(tmp_path / "none.json")


def test_two_that_save_at_once_lose_nothing(path, cache_dir, monkeypatch):
    def slowly(*arguments, real=kernel_table.check_target):
        found = real(*arguments)
        time.sleep(0.3)
        return found
    monkeypatch.setattr(kernel_table, "check_target", slowly)
    both = [threading.Thread(target=save_tables, args=(path, [_of(devices)])) for devices in (2, 16)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [times.on["devices"] for times in load_tables(path)] == [2, 4, 8, 16]


@pytest.mark.parametrize(("where", "value"), [
    (("kernels", 0, "kernel", "inputs", 0, 1), [1 << 64, 0]), (("kernels", 0, "kernel", "inputs", 0, 1), [0, 10 ** 30]),
    (("on", "memory"), 1 << 70), (("on", "memory"), 10 ** 400)])
def test_numbers_that_no_array_holds_are_refused(path, where, value):
    """Beside a dim of none the product of a shape tells nothing."""
    data = json.loads(path.read_text(encoding="utf-8"))
    place = data["tables"][1]
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FormatError, match=r"mine\.json") as caught:
        load_tables(path)
    assert "\n" not in str(caught.value)
