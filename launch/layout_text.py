"""layout.txt: what to hand to plain Mesh-TensorFlow (mesh shape and layout rules) where one mesh can express it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration

__all__ = ["layout_text", "single_mesh"]

_Mesh = list[tuple[str, int]]


def single_mesh(graph: ComputationGraph, configurations: Sequence[Configuration],
                devices: int) -> tuple[_Mesh, dict[str, str]] | None:
    """The one mesh shape and the one set of layout rules that put every tensor where this strategy puts it.

    Plain Mesh-TF splits a dim of a given name wherever it occurs, by the one axis its rule names, so the layers have to
    agree: the same cuts of the devices, the same axis per dim name, and no layer that leaves a ruled dim whole.

    Args:
      graph, configurations: the strategy.
      devices: p.

    Returns:
      (mesh as (axis name, size), outermost first; dim name -> axis name), or None where the layers do not agree.
    """
    # A mesh axis is an interval of strides: from how many devices share a part, to how many a whole round takes.
    boundaries = {1, devices}
    splits: list[dict[str, tuple[int, int]]] = []
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        if configuration.devices != devices:
            return None
        strides = configuration.strides
        split = {dim: (strides[dim], strides[dim] * parts) for dim, parts in configuration.splits.items()}
        # A renamed dim is laid out like the one it was renamed from: its name needs the same rule.
        split.update({other: split[dim] for other, dim in layer.aliases.items() if dim in split})
        splits.append(split)
        boundaries.update(*splits[-1].values())
    cuts = sorted(boundaries)
    if any(high % low for low, high in itertools.pairwise(cuts)):
        return None
    axes = {(low, high): f"axis_{number}"
            for number, (low, high) in enumerate(reversed(list(itertools.pairwise(cuts))))}
    rules: dict[str, str] = {}
    for split in splits:
        for dim, interval in split.items():
            if interval not in axes or rules.setdefault(dim, axes[interval]) != axes[interval]:
                return None
    for layer, split in zip(graph.layers, splits, strict=True):
        if any(dim in rules and dim not in split for dim in (*layer.dims, *layer.aliases)):
            return None
    return [(name, high // low) for (low, high), name in axes.items()], rules


def layout_text(graph: ComputationGraph, configurations: Sequence[Configuration], devices: int, name: str) -> str:
    """The text of layout.txt.

    Args:
      graph, configurations: the strategy.
      devices: p.
      name: of the strategy, for people.
    """
    head = f"# strategy {name}, {devices} devices, graph {graph.name} ({graph.hash})\n"
    found = single_mesh(graph, configurations, devices)
    if found:
        mesh, rules = found
        return (head + "# One mesh expresses it; hand these to mtf.placement_mesh_impl.PlacementMeshImpl.\n"
                f"mesh_shape = {_join(mesh)}\nlayout = {_join(sorted(rules.items()))}\n")
    lines = [head + "# No single mesh expresses it: every layer has its own (pase_mtf.lower puts them together).\n"
             "# Axes are numbered per layer, outermost first; devices 0..n-1 lie row-major over them."]
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        mesh = [(f"axis_{number}", parts) for number, (_, parts) in enumerate(configuration.axes)]
        rules_here = [(name, axis) for (dim, _), (axis, _) in zip(configuration.axes, mesh, strict=True) if dim
                      for name in (dim, *(other for other, same in layer.aliases.items() if same == dim))]
        lines.append(f"{layer.name}: mesh_shape = {_join(mesh)}  layout = {_join(rules_here)}")
    return "\n".join(lines) + "\n"


def _join(pairs: Sequence[tuple[str, object]]) -> str:
    return ";".join(f"{first}:{second}" for first, second in pairs) or '""'
