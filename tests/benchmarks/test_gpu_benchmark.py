"""python -m benchmarks.gpu: what it makes of the clock's times. The clock itself needs a GPU."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from markdown_cells import rows

from benchmarks import gpu, gpu_fit
from pase_mtf.machine.kernels import Block, Kernel
from pase_mtf.machine.machine import Machine

_ROW = {"model": "alexnet", "dtype": "float32"}
_SIZES = (16, 64, 256, 1024, 4096)


def _product(size, dtype="float32"):
    return Kernel("Einsum", (Block(dtype, (size, size)),) * 2, (Block(dtype, (size, size)),),
                  (("equation", "ab,bc->ac"),))


def _sum(elements, dtype="float32"):
    return Kernel("AddV2", (Block(dtype, (elements,)),) * 2, (Block(dtype, (elements,)),))


def test_rates_that_made_the_times_are_found_again():
    slower = dataclasses.replace(Machine.load("h100"), memory_bandwidth=2e12, efficiency=(
        (0.0, 0.02), (1e8, 0.05), (1e9, 0.3), (1e10, 0.6), (1e11, 1.0)))
    slower.rates["matmul"] *= 0.6
    slower.rates["matmul bfloat16"] *= 0.8
    kernels = [*map(_product, _SIZES), *(_product(size, "bfloat16") for size in _SIZES), _sum(16), _sum(1 << 27)]
    seconds = gpu_fit.rooflines(kernels, slower) + 1e-12
    found = gpu_fit.fitted(kernels, seconds, np.ones(len(kernels)), Machine.load("h100"))
    assert found.memory_bandwidth == pytest.approx(2e12, rel=1e-3)
    assert gpu_fit.rooflines(kernels, found) == pytest.approx(seconds, rel=0.05)
    assert gpu_fit.rooflines(kernels, Machine.load("h100"))[3] < 0.7 * seconds[3]


def test_strategies_and_kinds_by_the_clock():
    machine = Machine.load("h100")
    moved = 12 * 2**20 / machine.memory_bandwidth
    told = gpu.summary(
        [_product(1024), _sum(1 << 20), _sum(1 << 20, "bfloat16")],
        [{**_ROW, "strategy": "search", "counts": {"0": 2, "1": 3}},
         {**_ROW, "strategy": "expert", "counts": {"1": 1, "2": 1}}],
        np.array([1e-5, 2 * moved, np.nan]), machine)
    search, expert = told["strategies"]
    assert search["measured"] == pytest.approx(2e-5 + 6 * moved)
    assert (expert["measured"], expert["sheet"]) == pytest.approx((2 * moved, moved))  # the third was not timed
    kinds = {row["kind"]: row["measured"] / row["sheet"] for row in told["kinds"]}
    assert set(kinds) == {"matmul", "pointwise"}
    assert kinds["pointwise"] == pytest.approx(2.0)
    (product,) = told["products"]
    assert product["reached"] == pytest.approx([2 * 1024**3 / 1e-5 / machine.rates["matmul"]] * 4)


def test_kernels_of_a_model_are_written_once_each_and_told_per_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_PRESET", "tiny")
    path, times = tmp_path / "kernels.json", tmp_path / "times.json"
    assert gpu.main([f"--kernels={path}", "--models=alexnet", "--devices=2"]) == 0
    data = json.loads(path.read_text())
    kernels = [Kernel.from_json(kernel) for kernel in data["kernels"]]
    assert len(set(kernels)) == len(kernels)
    assert {row["strategy"] for row in data["rows"]} == {"search", "data parallel", "expert", "random 1", "random 2",
                                                         "random 3"}
    # Activations in bfloat16 run other kernels.
    assert any(block.dtype == "bfloat16" for kernel in kernels for block in kernel.inputs)
    seconds = gpu_fit.rooflines(kernels, Machine.load("h100")) + 1e-6
    for name, known in (("G", len(kernels)), ("H", len(kernels) - 1)):
        clock = {"gpu": name, "torch": "T", "cuda": "U", "seconds": seconds[:known].tolist()}
        times.write_text(json.dumps(clock))
        assert gpu.main([f"--kernels={path}", f"--times={times}", f"--output={tmp_path}"]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: len(found["strategies"]) for name, found in results["gpus"].items()} == {"G": 9, "H": 9}
    page = (tmp_path / "gpu.md").read_text()
    assert rows(page)[1][:3] == ["alexnet", "float32", "6"]
    assert "## G" in page
    assert "## H" in page
    times.write_text(json.dumps(clock | {"seconds": [1e-6] * (len(kernels) + 1)}))
    assert gpu.main([f"--kernels={path}", f"--times={times}", f"--output={tmp_path}"]) == 2


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_files_that_are_none_are_named_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "kernels.json"
    if content is not None:
        path.write_text(content)
    assert gpu.main([f"--kernels={path}", f"--times={path}"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert "--help" in line


def test_the_clock_without_pytorch_says_so(repository, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    done = subprocess.run([sys.executable, repository / "benchmarks" / "gpu_clock.py", "kernels.json"],
                          capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: PyTorch is not installed here; run this where it is, on a computer with a GPU"]


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_what_was_measured_is_below_the_data_sheet(name):
    sheet, measured = Machine.load(name), Machine.load(f"{name}_measured")
    assert measured.links == sheet.links
    assert measured.memory_bandwidth < sheet.memory_bandwidth
    assert all(rate <= sheet.rates.get(kind, sheet.rates["convolution"]) for kind, rate in measured.rates.items())
    assert "docs/benchmarks/gpu.md" in measured.source


def test_a_gpu_that_is_added_says_nothing_of_those_before(tmp_path, capsys):
    path, times = tmp_path / "kernels.json", tmp_path / "times.json"
    kernels = [kernel.to_json() for kernel in (_product(1024), _sum(1 << 20))]
    for name, commit, devices, code in (("G", "abc", 8, 0), ("H", "bcd", 8, 0), ("I", "cde", 4, 2)):
        path.write_text(json.dumps({
            "facts": {"machine": "Chip", "versions": "Python 9", "commit": commit}, "devices": devices,
            "kernels": kernels, "rows": [{**_ROW, "strategy": "search", "counts": {"0": 2, "1": 3}}]}))
        times.write_text(json.dumps({"gpu": name, "torch": "T", "cuda": "U", "seconds": [1e-5, 1e-4]}))
        assert gpu.main([f"--kernels={path}", f"--times={times}", f"--output={tmp_path}"]) == code
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "on 8 devices" in page
    assert "Kernels written on: Chip; Python 9; commits abc, bcd. Reproduce" in page
    assert "is of 4 devices" in capsys.readouterr().err


@pytest.mark.parametrize(("kernels", "models", "seconds", "code"), [
    ([_product(1024), _sum(1 << 20)], ["alexnet"], [1e-5], 0),
    ([_product(1024), _sum(1 << 27), _sum(16)], ["alexnet", "rnnlm"], [1e-5, 1e-3], 2)])
def test_kernels_that_there_was_no_time_for(tmp_path, capsys, kernels, models, seconds, code):
    """Those that take least are timed last: a kind without times was divided by 0, and nothing fitted nan."""
    path, times = tmp_path / "kernels.json", tmp_path / "times.json"
    counts = {str(number): 1 for number in range(len(kernels))}
    path.write_text(json.dumps({
        "facts": {"machine": "Chip", "versions": "Python 9", "commit": "abc"}, "devices": 8,
        "kernels": [kernel.to_json() for kernel in kernels],
        "rows": [{"model": model, "dtype": "float32", "strategy": "search", "counts": counts} for model in models]}))
    times.write_text(json.dumps({"gpu": "G", "torch": "T", "cuda": "U", "seconds": seconds}))
    assert gpu.main([f"--kernels={path}", f"--times={times}", f"--output={tmp_path}"]) == code
    assert ("2 of 3 kernels were timed, and of the smallest none" in capsys.readouterr().err) == (code == 2)


def test_a_strategy_of_which_nothing_was_timed_is_left_out(tmp_path):
    """It was 0 divided by 0, and the row of its model nan."""
    path, times = tmp_path / "kernels.json", tmp_path / "times.json"
    path.write_text(json.dumps({
        "facts": {"machine": "Chip", "versions": "Python 9", "commit": "abc"}, "devices": 8,
        "kernels": [kernel.to_json() for kernel in (_product(1024), _sum(1 << 20))],
        "rows": [{**_ROW, "strategy": name, "counts": {str(number): 1}}
                 for number, name in enumerate(("search", "expert"))]}))
    times.write_text(json.dumps({"gpu": "G", "torch": "T", "cuda": "U", "seconds": [1e-5]}))
    assert gpu.main([f"--kernels={path}", f"--times={times}", f"--output={tmp_path}"]) == 0
    row = rows((tmp_path / "gpu.md").read_text())[1]
    assert row[:3] == ["alexnet", "float32", "1"]
    assert "nan" not in " ".join(row)
