"""Where nothing can be cached (a read-only install, no home), kernels are compiled anew instead of failing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# All kernels can be imported, and none has a cache; one that calls another is compiled.
_KERNELS = """
import importlib, pkgutil
import numba.core.caching, numpy as np
import pase_mtf.cost, pase_mtf.search, pase_mtf.simulator
from pase_mtf.cost.resharding import _slices_and_concatenations_of_all
kernels = [value for package in (pase_mtf.cost, pase_mtf.search, pase_mtf.simulator)
           for entry in pkgutil.iter_modules(package.__path__, package.__name__ + ".") if entry.name[-8:] != "__main__"
           for value in vars(importlib.import_module(entry.name)).values() if hasattr(value, "py_func")]
for kernel in kernels:
    assert isinstance(kernel._cache, numba.core.caching.NullCache), "there is a cache: this tests nothing"
copied, nodes, joined = _slices_and_concatenations_of_all(
    np.array([[2, 1]]), np.array([[1, 2], [2, 1]]), np.ones((1, 2), bool), np.ones((1, 2), bool))
print(len(kernels), *(copied > 0).ravel())
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


def test_nothing_needs_a_cache(tmp_path):
    _read_only_copy(tmp_path)
    places = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", _KERNELS], cwd=tmp_path, env=environment, capture_output=True,
                           text=True, check=False)
    assert found.returncode == 0, found.stderr
    count, *moved = found.stdout.split()
    assert int(count) > 50
    assert moved == ["True", "False"]
