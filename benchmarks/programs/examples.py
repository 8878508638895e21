"""The two small programs of examples/, in the form of the others."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.programs.program import Feature, Program
from pase_mtf.compat import tf

__all__ = ["PRESETS", "build"]

PRESETS: dict[str, str] = {f"{size}_{name}": name for name in ("digits", "toy") for size in ("full", "reduced")}
"""They are small: their full size is the reduced one."""


def build(preset: str = "reduced_toy", mesh_shape: Any = None, layout: Any = None) -> Program:
    """The training step, in the current tf.Graph; it does not depend on mesh or layout."""
    name = PRESETS[preset]
    mesh, feeds, loss, updates = importlib.import_module(f"examples.{name}").build()
    features = {key: Feature(tuple(tensor.shape.as_list()), tensor.dtype, 10 if tensor.dtype.is_integer else None)
                for key, tensor in feeds.items()}
    return Program(name, mesh.graph, mesh, feeds, features, loss, updates, tf.train.get_or_create_global_step())
