"""Mesh shapes and layout rules: their strings, and all the mesh shapes that compete for a number of devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pase_mtf.compat import mtf
from pase_mtf.errors import UsageError, shortened
from pase_mtf.machine.machine import Machine

__all__ = ["MAX_AXES", "GivenLayout", "GivenShape", "MeshShape", "expressible", "mesh_and_devices", "mesh_shapes",
           "order_matters", "parse_layout", "parse_mesh_shape", "parse_rules", "rules_text"]

MAX_AXES = 3
"""Most axes of a mesh shape that the search considers."""

_DEFAULT_NAMES = ("rows", "cols", "tubes")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The axes of a mesh, outermost first.

    Attributes:
      axes: (name, size) per axis.
    """

    axes: tuple[tuple[str, int], ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ";".join(f"{name}:{size}" for name, size in self.axes)


GivenShape: TypeAlias = str | MeshShape | mtf.Shape
"""What callers give as a mesh shape."""

GivenLayout: TypeAlias = str | tuple[GivenShape, str | Mapping[str, str] | mtf.LayoutRules]
"""What callers give as a layout: mesh shape and layout rules, in one string or as a pair."""


def expressible(name: str) -> bool:
    """Whether Mesh-TF can parse layout rules that mention this dim or axis."""
    return bool(name) and not re.search(r"[\s,.;:]", name)


def _pairs(text: str, what: str) -> list[tuple[str, str]]:
    pairs = []
    for part in re.sub(r"[,.;]", " ", text).split():
        first, colon, second = part.partition(":")
        if not colon or not first or not second or ":" in second:
            raise UsageError(f"{what} {text!r}: {part!r} is not a pair with a colon; write it as in "
                             + ("rows:2;cols:4" if what == "mesh shape" else "batch:rows;d_ff:cols"))
        pairs.append((first, second))
    return pairs


def parse_mesh_shape(text: GivenShape) -> MeshShape:
    """Reads a mesh shape such as "rows:2;cols:4", as Mesh-TF does.

    Raises:
      UsageError: it does not parse, repeats an axis, or has an axis of fewer than one device.
    """
    if isinstance(text, MeshShape):
        return text
    if isinstance(text, mtf.Shape):
        axes = [(dim.name, dim.size) for dim in text.dims]
        if len({name for name, _ in axes}) != len(axes):
            raise UsageError(f"mesh shape {text}: an axis stands twice; give every axis a name of its own")
        return MeshShape(tuple(axes))
    axes = []
    for name, size in _pairs(str(text), "mesh shape"):
        if not re.fullmatch("[0-9]{1,9}", size) or int(size) < 1:
            raise UsageError(f"mesh shape {shortened(text)}: axis {name} has size {shortened(size)}; give a positive "
                             "number")
        axes.append((name, int(size)))
    if len({name for name, _ in axes}) != len(axes):
        raise UsageError(f"mesh shape {text!r}: an axis stands twice; give every axis a name of its own")
    return MeshShape(tuple(axes))


def parse_rules(text: str | Mapping[str, str], mesh: MeshShape, *, foreign: bool = False) -> dict[str, str]:
    """Reads layout rules such as "batch:rows;d_ff:cols".

    Args:
      text: the rules.
      mesh: whose axes they are.
      foreign: leave out rules for axes that the mesh does not have, as Mesh-TF does.

    Raises:
      UsageError: they do not parse, map one dim to two axes of the mesh, or to an axis that it does not have.
    """
    pairs = list(text.items()) if isinstance(text, Mapping) else _pairs(str(text), "layout rules")
    return _rules_of(pairs, mesh, foreign)


def _rules_of(pairs: Iterable[tuple[str, str]], mesh: MeshShape, foreign: bool) -> dict[str, str]:
    rules: dict[str, str] = {}
    for dim, axis in pairs:
        if foreign and axis not in mesh.names:
            continue
        if axis not in mesh.names:
            raise UsageError(f"layout rule {dim}:{axis}: the mesh {mesh} has no axis {axis!r}; "
                             f"use {', '.join(mesh.names) or 'a mesh with axes'}")
        if rules.setdefault(dim, axis) != axis:
            raise UsageError(f"layout rules map {dim} to {rules[dim]} and to {axis}; a dim has one axis")
    return rules


def mesh_and_devices(mesh_shape: GivenShape | None, devices: int | None) -> tuple[MeshShape | None, int]:
    """The mesh shape that the caller wants, if any, and the number of devices.

    Args:
      mesh_shape: text, a MeshShape, an mtf.Shape, or None.
      devices: p; None: that of the mesh shape, else 8.

    Raises:
      UsageError: it does not parse, or the two do not agree.
    """
    mesh = None if mesh_shape is None else parse_mesh_shape(mesh_shape)
    if devices is None:
        devices = mesh.devices if mesh else 8
    if devices < 1:
        raise UsageError(f"devices={devices}: there must be at least one device")
    if mesh and mesh.devices != devices:
        raise UsageError(f"mesh shape {mesh} has {mesh.devices} devices, not {devices}; make them agree")
    return mesh, devices


def parse_layout(entry: GivenLayout, *, foreign: bool = False) -> tuple[MeshShape, dict[str, str]]:
    """Mesh shape and layout rules in one string (sizes are numbers, axes are not), or a pair of the two.

    Args:
      entry: the layout.
      foreign: of a pair, leave out rules for axes that the mesh does not have.

    Raises:
      UsageError: it does not parse.
    """
    if isinstance(entry, str):
        pairs = [part for part in re.sub(r"[,.;]", " ", entry).split() if part]
        sizes = [part for part in pairs if part.rpartition(":")[2].isdigit()]
        mesh = parse_mesh_shape(";".join(sizes))
        return mesh, parse_rules(";".join(part for part in pairs if part not in sizes), mesh)
    shape, rules = entry
    mesh = parse_mesh_shape(shape)
    if isinstance(rules, mtf.LayoutRules):
        # They may mention axes that this mesh does not have, and a dim twice; of what is no pair (the keys of a dict
        # that a program gave, say) Mesh-TF takes no notice.
        legible = [pair for pair in rules._pairs if isinstance(pair, tuple) and len(pair) == 2]
        return mesh, _rules_of(sorted(legible), mesh, foreign=True)
    return mesh, parse_rules(rules, mesh, foreign=foreign)


def rules_text(rules: Mapping[str, str]) -> str:
    """Layout rules as Mesh-TF parses them."""
    return ";".join(f"{dim}:{axis}" for dim, axis in rules.items())


def _factorizations(number: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ascending product of factors of at least `least`."""
    if number >= least:
        yield (number,)
    for first in range(least, math.isqrt(number) + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, first):
                yield (first, *rest)


def order_matters(machine: Machine, devices: int) -> bool:
    """Whether devices are nearer to some than to others, so that it counts which axis is the outer one."""
    return any(1 < link.devices < devices for link in machine.links[:-1])


def mesh_shapes(devices: int, machine: Machine, axis_names: Sequence[str] = (), *,
                ordered: bool = False) -> tuple[MeshShape, ...]:
    """All mesh shapes of up to three axes for so many devices.

    Axes are listed in every order that the machine's links tell apart. Where the caller names axes (as the axes that
    dims are fixed to), every mesh shape has them, with every size that they can have.

    Args:
      devices: p.
      machine: its links.
      axis_names: names that must be among the axes.
      ordered: in every order, whatever the machine's links.

    Raises:
      UsageError: more names than axes.
    """
    if len(axis_names) > MAX_AXES:
        raise UsageError(f"dims fixed to {len(axis_names)} axes ({', '.join(axis_names)}); mesh shapes of at most "
                         f"{MAX_AXES} axes are searched: give mesh_shape to use more")
    if devices == 1:
        return (MeshShape(tuple((name, 1) for name in (axis_names or _DEFAULT_NAMES[:1]))),)
    ordered = ordered or order_matters(machine, devices)
    spare = [name for name in _DEFAULT_NAMES if name not in axis_names]
    found: dict[MeshShape, None] = {}
    for factors in _factorizations(devices):
        if len(factors) > MAX_AXES:
            continue
        # Axes that are named but have nothing to split.
        padded = factors + (1,) * (len(axis_names) - len(factors))
        names = (*axis_names, *spare)[:len(padded)]
        for sizes in sorted(set(itertools.permutations(padded))) if ordered or axis_names else [padded]:
            for order in sorted(itertools.permutations(names)) if ordered and axis_names else [names]:
                found.setdefault(MeshShape(tuple(zip(order, sizes, strict=True))))
    return tuple(found)
