"""What is compiled before clocks begin."""

import subprocess
import sys

_UNCALLED = """
import importlib, pkgutil, sys
import pase_mtf.cost, pase_mtf.search, pase_mtf.simulator
from pase_mtf.strategy import warm
for package in (pase_mtf.cost, pase_mtf.search, pase_mtf.simulator):
    for entry in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not entry.name.endswith("__main__"):
            importlib.import_module(entry.name)
warm.compile_kernels()
compiled = {function for name, module in sys.modules.items() if name.startswith("pase_mtf")
            for function in vars(module).values() if hasattr(function, "py_func")}
called = {name for function in compiled for name in function.py_func.__code__.co_names}
assert len(compiled) > 50
print(*sorted(function.__name__ for function in compiled
              if not function.signatures and function.__name__ not in called))
"""


def test_all_compiled_code_is_called_before_clocks_begin():
    """Or a first search would compile while its time goes by. What compiled code calls comes with its callers."""
    done = subprocess.run([sys.executable, "-c", _UNCALLED], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.split() == []
