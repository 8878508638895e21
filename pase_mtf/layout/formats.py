"""A mesh shape and layout rules as programs take them: flags, gin, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from pase_mtf.errors import UsageError, nearest

__all__ = ["FORMATS", "format_layout"]


def _flags(mesh_shape: str, layout_rules: str) -> str:
    """As the flags of Mesh-TF's examples (`--mesh_shape=... --layout=...`)."""
    return f"--mesh_shape='{mesh_shape}' --layout='{layout_rules}'\n"


def _gin(mesh_shape: str, layout_rules: str) -> str:
    """As mesh_tensorflow.transformer takes them."""
    return f'utils.run.mesh_shape = "{mesh_shape}"\nutils.run.layout_rules = "{layout_rules}"\n'


def _json(mesh_shape: str, layout_rules: str) -> str:
    """As the keys of a config file."""
    return json.dumps({"mesh_shape": mesh_shape, "layout": layout_rules}, indent=2) + "\n"


FORMATS: dict[str, Callable[[str, str], str]] = {"flags": _flags, "gin": _gin, "json": _json}
"""Name -> function of mesh shape and layout rules that returns the text, ending with a line break."""


def format_layout(mesh_shape: str, layout_rules: str, style: str) -> str:
    """The text that a program takes.

    Args:
      mesh_shape: such as "rows:2;cols:4".
      layout_rules: such as "batch:rows;d_ff:cols".
      style: "flags", "gin" or "json".

    Raises:
      UsageError: an unknown style.
    """
    if style not in FORMATS:
        raise UsageError(f"unknown format {style!r}: {nearest(style, FORMATS)}")
    return FORMATS[style](mesh_shape, layout_rules)
