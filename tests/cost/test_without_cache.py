"""Where nothing can be cached (a read-only install, no home), kernels are compiled anew instead of failing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PRICE = """
import numba.core.caching, pase_mtf.strategy.find
from pase_mtf.cost.build import build_network
from pase_mtf.cost.critical_path import _pair_lines
from pase_mtf.machine.machine import Machine
from pase_mtf.search.messages import message_passes
from small_graphs import perceptron
for kernel in (_pair_lines, message_passes):
    assert isinstance(kernel._cache, numba.core.caching.NullCache), "there is a cache: this tests nothing"
print(len(build_network(perceptron(), Machine.load("1080ti"), 2).network.edges))
"""


def _read_only_copy(folder):
    """A copy of the package beside which nothing can be written, not even by root: __pycache__ is a file."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pase_mtf", folder / "pase_mtf", ignore=ignored)
    shutil.copytree(ROOT / "configs", folder / "pase_mtf" / "configs", ignore=ignored, dirs_exist_ok=True)
    for inner in [path for path in (folder / "pase_mtf").rglob("*") if path.is_dir()]:
        (inner / "__pycache__").touch()
    (folder / "pase_mtf" / "__pycache__").touch()
    (folder / "home").touch()


@pytest.mark.slow
@pytest.mark.first
def test_nothing_needs_a_cache(tmp_path):
    _read_only_copy(tmp_path)
    places = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1",
                    "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT / "tests")))}
    found = subprocess.run([sys.executable, "-c", _PRICE], cwd=tmp_path, env=environment, capture_output=True,
                           text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 0
