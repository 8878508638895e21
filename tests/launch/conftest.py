"""Runs of the launcher in this process, on a model small enough for seconds."""

import json

import pytest

from pase_mtf.launch.__main__ import main
from pase_mtf.launch.summary import read_summary


@pytest.fixture(scope="session")
def preset(tmp_path_factory):
    """A file with sizes of alexnet: one convolution, two narrow layers."""
    path = tmp_path_factory.mktemp("presets") / "micro.json"
    path.write_text(json.dumps({
        "preset": "tiny", "image": 12, "fully_connected": [32, 16], "batch": 8, "learning_rate": 0.05,
        "convolutions": [{"channels": 8, "kernel": 3, "stride": 2, "pool": 2}]}))
    return str(path)


def _main(preset, folder, *flags):
    defaults = ["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=4",
                "--warmup=1", "--log_every=1", f"--output_dir={folder}"]
    given = {flag.split("=")[0] for flag in flags}
    if "--resume" in given:
        given |= {"--model", "--preset", "--mesh", "--devices", "--machine", "--steps", "--warmup", "--log_every"}
    return main([*(flag for flag in defaults if flag.split("=")[0] not in given), *flags])


@pytest.fixture
def launch(preset, tmp_path, capsys):
    """Runs the launcher and returns (exit code, output folder, stdout, stderr)."""
    def run(*flags, output="run"):
        folder = tmp_path / output
        code = _main(preset, folder, *flags)
        if (folder / "summary.json").exists():
            read_summary(folder / "summary.json")  # what every run writes fits its own schema
        return code, folder, *capsys.readouterr()
    return run


@pytest.fixture(scope="session")
def finished(preset, tmp_path_factory):
    """The output folder of a run of three steps, which nobody changes."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert _main(preset, folder, "--compare=none", "--steps=2") == 0
    return folder
