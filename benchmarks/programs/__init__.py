"""Programs that people have: code of the mesh-tensorflow package as it is, at full size and reduced, and examples/.

Three tables: PROGRAMS (with layouts written by hand, trained and measured), the transformers of `zoo` through the
package's gin files, and the programs of our own in `small`. `tables()` names all of them.

    program = programs.build("bert", "reduced")      # in the current tf.Graph
    exported = pase_mtf.export_graph(program.graph)

Full sizes are built, exported and searched, not run; reduced ones train in seconds. A program's loss does not depend
on mesh or layout: reduced ones are without dropout, since Mesh-TF's random numbers depend on the slicing.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.programs.program import Program
from pase_mtf.compat import tf

__all__ = ["PROGRAMS", "REBUILT", "Program", "build", "own_layout", "tables"]

PROGRAMS: dict[str, tuple[str, str]] = {
    "bert": ("bert", ""),
    "bert_moe": ("bert", "_moe"),
    "lm": ("lm", ""),
    "translation": ("lm", "_translation"),
    "lm_moe": ("lm", "_moe"),
    "unet_2d": ("unet", "_2d"),
    "unet_3d": ("unet", "_3d"),
    "digits": ("examples", "_digits"),
    "toy": ("examples", "_toy"),
}
"""Program -> module and the suffix of its presets."""

REBUILT = ("bert_moe", "lm", "translation", "lm_moe", "unet_2d", "unet_3d")
"""Programs whose graph depends on mesh and layout."""


_TABLES = {"zoo": "ZOO", "small": "SMALL"}


def tables() -> dict[str, tuple[str, ...]]:
    """Table ("package", "zoo", "small") -> the names of its programs."""
    return {"package": tuple(PROGRAMS),
            **{module: tuple(getattr(importlib.import_module(f"benchmarks.programs.{module}"), table))
               for module, table in _TABLES.items()}}


def _table_of(name: str) -> tuple[Any, Any]:
    """The module of a program that is a row of a table, and the row."""
    for module, table in _TABLES.items():
        found = importlib.import_module(f"benchmarks.programs.{module}")
        if name in getattr(found, table):
            return found, getattr(found, table)[name]
    raise KeyError(name)


def own_layout(name: str, devices: int) -> tuple[str, str] | None:
    """Mesh shape and layout rules that a program's owner runs it with on so many devices; None: nobody says."""
    if name in PROGRAMS:
        return None
    module, entry = _table_of(name)
    return module.own_layout(entry, devices)


def build(name: str, size: str = "reduced", mesh_shape: Any = None, layout: Any = None, seed: int = 1) -> Program:
    """Builds a program's training step in the current tf.Graph, which must be new.

    Args:
      name: of one of the tables.
      size: "full" or "reduced".
      mesh_shape, layout: for the programs that look at them.
      seed: of the initial values.
    """
    tf.set_random_seed(seed)
    if name not in PROGRAMS:
        return _table_of(name)[0].build(name, size, mesh_shape, layout)
    module, suffix = PROGRAMS[name]
    builder = importlib.import_module(f"benchmarks.programs.{module}")
    return builder.build(size + suffix, mesh_shape, layout)
