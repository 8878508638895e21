"""Machines: every file of ours is sound, and what is not is refused in one line."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.machine.machine import KINDS, Link, Machine

NAMED = [name for name in Machine.names() if name != "local"]


def _machine(**changes):
    values = {"name": "test", "rates": dict.fromkeys(KINDS, 1e12), "memory_bandwidth": 1e11, "memory_bytes": 1e10,
              "overhead": 1e-6, "links": (Link(8, 1e10, 1e-5),), **changes}
    return Machine(**values)


def test_names():
    assert {"1080ti", "2080ti", "a100", "h100", "h200", "local"} <= set(Machine.names())


@pytest.mark.parametrize("name", NAMED)
def test_files(name):
    machine = Machine.load(name)
    assert machine.name == name
    assert not machine.shared_cores
    assert "data sheet" in machine.source or "docs/benchmarks/gpu.md" in machine.source
    assert machine.links[0].devices == 8
    # Nearer is faster, and arithmetic outruns memory.
    assert machine.links[0].bandwidth > machine.links[-1].bandwidth
    assert machine.memory_bandwidth > machine.links[0].bandwidth
    assert machine.rates["matmul"] > machine.memory_bandwidth
    machine.check_devices(1024)


def test_what_is_known_of_the_machines():
    old, new = Machine.load("1080ti"), Machine.load("2080ti")
    # Without peer-to-peer copies there is far less bandwidth per FLOP (PASE.md).
    assert new.rates["matmul"] / new.links[0].bandwidth > 3 * old.rates["matmul"] / old.links[0].bandwidth
    assert Machine.load("h200").memory_bandwidth > Machine.load("h100").memory_bandwidth


@pytest.mark.parametrize("changes", [
    {}, {"efficiency": ((0.0, 0.1), (1e9, 0.5))}, {"shared_cores": True, "measured": {"on": {"cores": 2}}},
    {"rates": {**dict.fromkeys(KINDS, 1e12), "copy": 1e9, "batched matmul": 2e9, "filter gradient": 3e9}}])
def test_round_trip(tmp_path, changes):
    machine = _machine(**changes)
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


def _earlier(version, **fields):
    return json.dumps({
        "format": "pase_mtf.machine", "version": version, "name": "old", "rates": dict.fromkeys(KINDS, 1e12),
        "memory_bandwidth": 1e11, "memory_bytes": 1e10, "overhead": 1e-6,
        "links": [{"devices": 8, "bandwidth": 1e10, "latency": 1e-5}], "shared_cores": True, "source": "by hand",
        "measured": {}, **fields})


@pytest.mark.parametrize(("version", "fields"), [
    (1, {"packing": 0.0, "lanes": 0, "reread": 1.0, "overheads": {}, "ring": False, "ring_link": None}),
    (2, {"operand_packing": 0.0, "cache_hit_cost_ratio": 1.0, "ring": False})])
def test_sheets_of_earlier_versions(tmp_path, version, fields):
    """Written by hand with the names of those versions."""
    (tmp_path / "old.json").write_text(_earlier(version, **fields))
    found = Machine.load(tmp_path / "old.json")
    assert found == _machine(name="old", shared_cores=True, source="by hand")
    found.save(tmp_path / "new.json")
    written = json.loads((tmp_path / "new.json").read_text())
    assert written["version"] == 3
    # The third version knows the names of today only.
    (tmp_path / "new.json").write_text(json.dumps({**written, "packing": 0.0}))
    with pytest.raises(FormatError, match="packing"):
        Machine.load(tmp_path / "new.json")


@pytest.mark.parametrize(("version", "field", "value"), [
    (1, "packing", 1.5), (1, "reread", 0.7), (2, "overheads", {"matmul": 2e-5}), (2, "cache_bytes", 1e6),
    (2, "ring_link", {"devices": 8, "bandwidth": 1e9, "latency": 1e-6})])
def test_fits_of_earlier_versions_are_refused(tmp_path, version, field, value):
    (tmp_path / "old.json").write_text(_earlier(version, **{field: value}))
    with pytest.raises(FormatError, match=rf"old\.json: an earlier version fitted this machine \({field}\).*again"):
        Machine.load(tmp_path / "old.json")


def test_unknown_name():
    with pytest.raises(UsageError, match=r"h10.*did you mean 'h100'"):
        Machine.load("h10")


def test_local_is_measured():
    with pytest.raises(UsageError, match="load_machine"):
        Machine.load("local")


@pytest.mark.parametrize("content", [
    "", "{", "[]", "{}", '{"format": "pase_mtf.machine"}', '{"format": "pase_mtf.machine", "version": 1}',
    '{"format": "pase_mtf.strategy", "version": 1}', '{"format": "pase_mtf.machine", "version": 99}', "\x00\x01"])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=r"machine\.json") as error:
        Machine.load(path)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(FormatError, match="check the path"):
        Machine.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(("field", "value"), [
    ("memory_bandwidth", 0), ("memory_bandwidth", "fast"), ("overhead", -1), ("rates", {"matmul": 1}), ("rates", 5),
    ("links", []), ("links", [{"devices": 8}]), ("links", [{"devices": 8, "bandwidth": 0, "latency": 0}]),
    ("memory_bytes", float("nan")), ("surprise", 1), ("efficiency", [[1, 0.5, 2]]),
    ("efficiency", [[0, 0.5], [0, 0.6]]), ("efficiency", [[0, 0.5], [1, 0.4]]),
    ("efficiency", [[0, 0]]), ("efficiency", [[0, 1.1]]), ("efficiency", 1),
    ("links", [{"devices": 8, "bandwidth": 1, "latency": 0}, {"devices": 12, "bandwidth": 1, "latency": 0}])])
def test_impossible_numbers(tmp_path, field, value):
    path = tmp_path / "machine.json"
    _machine().save(path)
    data = json.loads(path.read_text())
    data[field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"machine\.json"):
        Machine.load(path)


def test_truncated_file(tmp_path):
    path = tmp_path / "machine.json"
    _machine().save(path)
    text = path.read_text()
    for length in range(0, len(text) - 2, 40):
        path.write_text(text[:length])
        with pytest.raises(FormatError):
            Machine.load(path)


def test_too_many_devices():
    with pytest.raises(UsageError, match=r"16 devices.*at most 8"):
        _machine().check_devices(16)
    with pytest.raises(UsageError, match="at least one"):
        _machine().check_devices(0)


def test_balance_is_that_of_the_weakest_link():
    machine = _machine(links=(Link(8, 1e10, 0), Link(64, 1e9, 0)))
    assert math.isclose(machine.balance, 1e3)
    assert dataclasses.replace(machine, links=machine.links[:1]).balance == 100


def test_without_tensorflow():
    code = ("import sys, pase_mtf.machine.machine, pase_mtf.cost.build, pase_mtf.cost.memory; "
            "pase_mtf.machine.machine.Machine.load('h100'); assert 'tensorflow' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_numbers_of_numpy_are_saved(tmp_path):
    machine = _machine(memory_bytes=np.int64(8 << 30), memory_bandwidth=np.float32(2 ** 36), shared_cores=np.True_,
                       links=(Link(8, np.float32(2 ** 33), 1e-5),))
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_products_in_float32_where_tf32_is_left_out(name):
    machine = Machine.load(name).without_tf32()
    assert machine.rates["matmul"] == machine.rates["convolution"] == machine.rates["pointwise"]
    assert machine.rates["matmul bfloat16"] == Machine.load(name).rates["matmul bfloat16"]


def test_tf32_that_cannot_be_left_out():
    with pytest.raises(UsageError, match="no rates of matmul float32"):
        Machine.load("h100_measured").without_tf32()
    assert Machine.load("1080ti").without_tf32() == Machine.load("1080ti")


@pytest.mark.parametrize(("name", "slower"), [("1080ti", 32), ("2080ti", 32), ("a100", 1), ("h100", 1), ("h200", 1),
                                              ("h100_measured", 1), ("h200_measured", 1)])
def test_products_in_float64_have_a_rate_of_their_own(name, slower):
    rates = Machine.load(name).rates
    assert rates["matmul float64"] == pytest.approx(rates["pointwise"] / slower, rel=0.01)
    assert rates["convolution float64"] <= rates["matmul float64"]


def test_a_name_that_no_file_can_have():
    for name in ("h" * 300, '{"name": "mine", "rates": {}}' * 20):
        with pytest.raises(UsageError, match=r"unknown machine .*known: ") as caught:
            Machine.load(name)
        assert len(str(caught.value)) < 400
