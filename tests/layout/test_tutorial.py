"""The tutorial of docs/layout.md, typed in as it stands there."""

import os
import re
import subprocess
import sys

import pytest


def blocks(text):
    """Name -> the code under that comment."""
    return dict(re.findall(r"<!-- (\w+) -->\n```\w*\n(.*?)```", text, re.S))


@pytest.fixture
def tutorial(repository):
    return blocks((repository / "docs" / "layout.md").read_text())


def test_it_is_short(tutorial):
    typed = [line for name in ("command", "rules", "strategies") for line in tutorial[name].splitlines() if line]
    assert len(typed) < 30


@pytest.mark.slow
def test_it_runs(tutorial, tmp_path):
    """Both commands as a person types them; the one that finds a layout prints it and nothing else."""
    (tmp_path / "train.py").write_text(tutorial["program"])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done

    _, *command = tutorial["command"].replace("\\\n", " ").split()
    done = run(*command)
    assert re.fullmatch(r"--mesh_shape='\S+' --layout='\S+'\n", done.stdout)
    assert "Traceback" not in done.stderr
    assert "hidden (size 8192)" in done.stderr
    (tmp_path / "tutorial.py").write_text(tutorial["rules"] + tutorial["strategies"])
    lines = run("tutorial.py").stdout.splitlines()
    assert any("proven optimal among the layouts that lower" in line for line in lines)
    losses = [float(line) for line in lines[-3:]]
    assert losses == sorted(losses, reverse=True)  # it trains
