"""Programs whose graph depends on the mesh or the layout: built anew with what was found, until that is stable."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.layout import Layout, find_layout
from pase_mtf.layout_capture import capture_graph
from pase_mtf.layout_space import parse_mesh_shape, parse_rules

__all__ = ["find_layout_of_program"]

_ROUNDS = 5


def _accepted(build_graph: Callable[..., Any]) -> tuple[str, ...]:
    """Which of mesh_shape and layout the function takes."""
    try:
        parameters = inspect.signature(build_graph).parameters
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "mesh_shape", "layout"
    needed = [name for name, parameter in parameters.items() if name not in ("mesh_shape", "layout")
              and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL]
    if needed:
        raise UsageError(f"{getattr(build_graph, '__name__', build_graph)} needs arguments ({', '.join(needed)}); "
                         "give a function that takes none but mesh_shape and layout")
    return tuple(name for name in ("mesh_shape", "layout") if name in parameters)


def _build(build_graph: Callable[..., Any], arguments: dict[str, str]) -> tuple[mtf.Graph, list[mtf.Tensor]]:
    """Calls the function; where it goes on to lower its graph, it is stopped there."""
    result = None
    with capture_graph() as captured:
        result = build_graph(**arguments)
    if captured.found:
        return captured.graph, []
    outputs: Iterable[mtf.Tensor] = ()
    if isinstance(result, tuple) and len(result) == 2:
        result, outputs = result
    if isinstance(outputs, mtf.Tensor):
        outputs = [outputs]
    if not isinstance(result, mtf.Graph):
        raise UsageError(f"{getattr(build_graph, '__name__', build_graph)} returned {type(result).__name__}; "
                         "return an mtf.Graph, or (graph, outputs)")
    return result, list(outputs)


def find_layout_of_program(build_graph: Callable[..., Any], *, devices: int | None = None,
                           mesh_shape: str | None = None, **options: Any) -> Layout:
    """Finds the layout of the graph that a function builds.

    A function that takes `mesh_shape` or `layout` (strings) is called again with what was found, as the graph may
    depend on it (microbatches, expert groups), until it finds the layout that it was built with. Where it never does,
    the best of the layouts that were searched is taken, each priced on the graph that is built for it.

    Args:
      build_graph: returns an mtf.Graph or (graph, outputs); or comes to mtf.Lowering, where it is stopped.
      devices, mesh_shape, **options: as for `find_layout`.

    Raises:
      UsageError: the function returns something else, or needs other arguments.
      InfeasibleError: no layout lowers.
    """
    accepted = _accepted(build_graph)

    def search(choice: tuple[str, str] | None, **more: Any) -> Layout:
        given = dict(zip(("mesh_shape", "layout"), choice or (), strict=False))
        with tf.Graph().as_default():
            graph, outputs = _build(build_graph, {name: given[name] for name in accepted if name in given})
            return find_layout(graph, outputs=outputs, **{**dict(devices=devices, mesh_shape=mesh_shape), **options,
                                                         **more})

    if not accepted:
        return search(None)
    parameters = inspect.signature(build_graph).parameters
    defaults = all(name in parameters and parameters[name].default is not inspect.Parameter.empty
                   for name in accepted)
    size = devices or (parse_mesh_shape(mesh_shape).devices if mesh_shape else 8)
    choice = None if defaults else (mesh_shape or f"rows:{size}", "")
    tried: dict[tuple[str, str], Layout | None] = {}
    for _ in range(_ROUNDS):
        found = search(choice)
        result = found.mesh_shape, found.layout_rules
        if result == choice:
            return found
        if result in tried:
            break
        # What it costs on the graph that is built for it.
        mesh = parse_mesh_shape(result[0])
        try:
            tried[result] = search(result, devices=mesh.devices, mesh_shape=result[0],
                                   fixed={**(options.get("fixed") or {}), **parse_rules(result[1], mesh)})
        except InfeasibleError:
            tried[result] = None
        choice = result
    usable = [layout for layout in tried.values() if layout is not None]
    if not usable:
        raise InfeasibleError(f"{getattr(build_graph, '__name__', build_graph)}: every layout found changes the graph "
                              "into one that does not lower under it; fix the mesh shape")
    best = min(usable, key=lambda layout: layout.seconds)
    note = (f"note: the graph depends on its layout and no choice was stable in {_ROUNDS} rounds; this is the best of "
            f"{len(usable)}, each priced on the graph built for it")
    return dataclasses.replace(best, notes=(*best.notes, note))
