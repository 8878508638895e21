"""Runs whose prices are those of kernels; a clock that tells what it is asked to stands for the machine's."""

import json

import pytest

from pase_mtf.calibration.cache import kernels_path
from pase_mtf.calibration.meter import REFERENCES
from pase_mtf.launch.__main__ import main
from pase_mtf.machine.kernel_file import load_times

_RUN = ["--model=rnnlm", "--preset=tiny", "--mesh=2", "--devices=cpu", "--prices=measured", "--search_only",
        "--compare=data_parallel,search"]


@pytest.mark.slow
def test_a_run_by_measured_kernels(cache_dir, timed_kernels, tmp_path, capsys):
    assert main([*_RUN, f"--output_dir={tmp_path / 'first'}"]) == 0
    captured = capsys.readouterr()
    assert "round 1: " in captured.err
    assert "kernels measured on" in captured.out
    summary = json.loads((tmp_path / "first" / "summary.json").read_text(encoding="utf-8"))
    strategy = json.loads((tmp_path / "first" / "strategy.json").read_text(encoding="utf-8"))
    kernels = strategy["search"]["kernels"]
    assert kernels["of_strategy"] == kernels["measured_of_strategy"] > 20
    times = load_times(kernels_path(2))
    assert times.damaged == 0
    assert len(times) == len(set(timed_kernels))
    # A second run measures nothing but the reference kernels, and finds the same.
    timed_kernels.clear()
    assert main([*_RUN, f"--output_dir={tmp_path / 'second'}"]) == 0
    assert "round 1: " not in capsys.readouterr().err
    assert set(timed_kernels) == set(REFERENCES)
    again = json.loads((tmp_path / "second" / "summary.json").read_text(encoding="utf-8"))
    for name, arm in again["arms"].items():  # what is kept has four digits
        if arm["predicted_ms"] is not None:  # as of stock Mesh-TensorFlow
            assert arm["predicted_ms"] == pytest.approx(summary["arms"][name]["predicted_ms"], rel=1e-3)


def test_not_for_gpus(monkeypatch, capsys):
    monkeypatch.setattr("pase_mtf.runtime.gpu_names", lambda: ["a GPU"] * 2)
    assert main([*_RUN, "--devices=gpu"]) == 2
    assert "--prices=measured: prices the kernels of CPUs only" in capsys.readouterr().err
