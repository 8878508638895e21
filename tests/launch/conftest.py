"""Runs of the launcher in this process, on a model small enough for seconds."""

import json

import pytest

from pase_mtf.launch.__main__ import main


@pytest.fixture
def preset(tmp_path):
    """A file with sizes of alexnet: one convolution, two narrow layers."""
    path = tmp_path / "micro.json"
    path.write_text(json.dumps({
        "preset": "tiny", "image": 12, "fully_connected": [32, 16], "batch": 8, "learning_rate": 0.05,
        "convolutions": [{"channels": 8, "kernel": 3, "stride": 2, "pool": 2}]}))
    return str(path)


@pytest.fixture
def launch(preset, tmp_path, capsys):
    """Runs the launcher and returns (exit code, output folder, stdout, stderr)."""
    def run(*flags, output="run"):
        folder = tmp_path / output
        defaults = ["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=4",
                    "--warmup=1", "--log_every=1", f"--output_dir={folder}"]
        given = {flag.split("=")[0] for flag in flags}
        if "--resume" in given:
            given |= {"--model", "--preset", "--mesh", "--devices", "--machine", "--steps", "--warmup", "--log_every"}
        code = main([*(flag for flag in defaults if flag.split("=")[0] not in given), *flags])
        return code, folder, *capsys.readouterr()
    return run
