"""Lets a program `import mesh_tensorflow` by itself, on a TensorFlow that lacks names which Mesh-TensorFlow reads.

`import pase_mtf` registers a finder that looks after one package, mesh_tensorflow: before its code runs, `_tensorflow`
puts the names back, and after it `_same_graphs` mends what it leaves to chance. An installation registers it when
Python starts (pase_mtf-mesh-tensorflow.pth), so that the order of the two imports does not matter. No TensorFlow here:
it is imported with mesh_tensorflow and not before.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

__all__ = ["MeshTensorFlowFinder", "find_spec", "register"]

_PACKAGE = "mesh_tensorflow"
_asking = threading.local()


def find_spec(name: str, path: Sequence[str] | None = None,
              target: types.ModuleType | None = None) -> ModuleSpec | None:
    """What the other finders know of mesh_tensorflow, with the names put back before its code runs.

    None for any other module, and while the other finders are asked (this one stands among them).
    """
    if name != _PACKAGE or getattr(_asking, "now", False):
        return None
    _asking.now = True
    try:
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each is not None), None)
    finally:
        _asking.now = False
    if spec is not None and spec.loader is not None:
        loader, execute = spec.loader, spec.loader.exec_module

        def prepare_and_execute(module: types.ModuleType) -> None:
            if module.__name__ != _PACKAGE:  # a zip file has one loader for all modules in it
                execute(module)
                return
            importlib.import_module("pase_mtf._tensorflow")
            execute(module)
            importlib.import_module("pase_mtf._same_graphs").mend(module)

        # Of this one loader, which stays what it is to those who ask it for source or resources.
        vars(loader)["exec_module"] = prepare_and_execute
    return spec


class MeshTensorFlowFinder:
    """Stands in sys.meta_path for `find_spec`."""

    find_spec = staticmethod(find_spec)


def register() -> None:
    """Puts the finder before all others; once in a process."""
    if not any(isinstance(finder, MeshTensorFlowFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MeshTensorFlowFinder())
