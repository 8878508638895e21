"""A mesh shape and layout rules as programs take them: flags, gin, JSON, and the words of JAX and of DTensor.

No TensorFlow here: the command line reads the names of the formats before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from pase_mtf.errors import UsageError, nearest

__all__ = ["FORMATS", "Axes", "Rules", "Variables", "format_layout"]

Axes: TypeAlias = Sequence[tuple[str, int]]
"""(name, size) of the axes of a mesh, outermost first."""

Rules: TypeAlias = Mapping[str, str]
"""Dim name -> axis name."""

Variables: TypeAlias = Mapping[str, tuple[str, ...]]
"""Name of a variable -> the names of its dims, in order."""


def _strings(axes: Axes, rules: Rules) -> tuple[str, str]:
    """Mesh shape and layout rules as Mesh-TF parses them."""
    return ";".join(f"{name}:{size}" for name, size in axes), ";".join(f"{dim}:{axis}" for dim, axis in rules.items())


def _flags(axes: Axes, rules: Rules, _: Variables) -> str:
    """As the flags of Mesh-TF's examples (`--mesh_shape=... --layout=...`)."""
    return "--mesh_shape='{}' --layout='{}'\n".format(*_strings(axes, rules))


def _gin(axes: Axes, rules: Rules, _: Variables) -> str:
    """As mesh_tensorflow.transformer takes them."""
    return 'utils.run.mesh_shape = "{}"\nutils.run.layout_rules = "{}"\n'.format(*_strings(axes, rules))


def _json(axes: Axes, rules: Rules, _: Variables) -> str:
    """As the keys of a config file."""
    return json.dumps(dict(zip(("mesh_shape", "layout"), _strings(axes, rules), strict=True)), indent=2) + "\n"


def _jax(axes: Axes, rules: Rules, variables: Variables) -> str:
    """A mesh, a PartitionSpec per variable, and the rules by dim, which activations follow (flax calls them logical
    axis rules)."""
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return "".join([
        "import jax\nfrom jax.sharding import PartitionSpec\n\n",
        f"mesh = jax.make_mesh({sizes!r}, {names!r})\n",
        "logical_axis_rules = (\n", *(f"    ({dim!r}, {axis!r}),\n" for dim, axis in rules.items()), ")\n",
        "partition_specs = {\n",
        *(f"    {name!r}: PartitionSpec({', '.join(repr(rules.get(dim)) for dim in dims)}),\n"
          for name, dims in variables.items()), "}\n"])


def _dtensor(axes: Axes, rules: Rules, variables: Variables) -> str:
    """A mesh and a Layout per variable, as TensorFlow's DTensor takes them."""
    def spec(dim: str) -> str:
        return repr(rules[dim]) if dim in rules else "dtensor.UNSHARDED"

    return "".join([
        "from tensorflow.experimental import dtensor\n\n",
        f"mesh = dtensor.create_mesh({list(axes)!r})\n",
        "layouts = {\n",
        *(f"    {name!r}: dtensor.Layout([{', '.join(map(spec, dims))}], mesh),\n" for name, dims in variables.items()),
        "}\n"])


FORMATS: dict[str, Callable[[Axes, Rules, Variables], str]] = {
    "flags": _flags, "gin": _gin, "json": _json, "jax": _jax, "dtensor": _dtensor}
"""Name -> function of axes, layout rules and variables that returns the text, ending with a line break."""


def format_layout(axes: Axes, rules: Rules, style: str, variables: Variables) -> str:
    """The text that a program takes.

    Args:
      axes: of the mesh.
      rules: of the layout.
      style: "flags", "gin" or "json": what a Mesh-TF program takes; "jax" or "dtensor": Python text with a mesh and how
        each variable is sharded, for a program that is ported.
      variables: of the program.

    Raises:
      UsageError: an unknown style.
    """
    if style not in FORMATS:
        raise UsageError(f"unknown format {style!r}; {nearest(style, FORMATS)}")
    return FORMATS[style](axes, rules, variables)
