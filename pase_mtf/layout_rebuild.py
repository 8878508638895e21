"""Programs whose graph depends on the mesh or the layout: built anew with what was found, until that is stable."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.layout import Layout, LayoutCost, find_layout
from pase_mtf.layout_capture import capture_graph
from pase_mtf.layout_space import mesh_and_devices, parse_layout, parse_mesh_shape, parse_rules, rules_text

__all__ = ["find_layout_of_program"]

# Graphs that are built for what was proposed.
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


@dataclasses.dataclass(frozen=True)
class _Evaluated:
    """A layout on the graph that is built for it.

    Attributes:
      cost: what it costs there.
      found: what the search proposes there.
    """

    cost: LayoutCost
    found: Layout

    @property
    def stable(self) -> bool:
        """Whether the search proposes what the graph was built for."""
        best = self.found.best
        return _effect((self.cost.mesh_shape, self.cost.layout_rules)) == _effect((best.mesh_shape, best.layout_rules))


def _effect(choice: tuple[str, str]) -> tuple:
    """Equal for layouts that differ in the names of axes only."""
    mesh = parse_mesh_shape(choice[0])
    rules = parse_rules(choice[1], mesh)
    return mesh.sizes, frozenset((dim, mesh.names.index(axis)) for dim, axis in rules.items())


def find_layout_of_program(build_graph: Callable[..., Any], *, devices: int | None = None,
                           mesh_shape: Any = None, compare: Sequence[Any] = (), fixed: Mapping[str, str | None] | None
                           = None, memory_limit: float | None = None, **options: Any) -> Layout:
    """Finds the layout of the graph that a function builds.

    A function that takes `mesh_shape` or `layout` (strings) is called again with what was found, as the graph may
    depend on it (microbatches, expert groups), until it finds the layout that it was built with. Data parallelism and
    the layouts to compare with are priced on graphs of their own as well, and compete. Where nothing is stable, the
    best of the layouts that were built for is taken.

    Args:
      build_graph: returns an mtf.Graph or (graph, outputs); or comes to mtf.Lowering, where it is stopped.
      devices, mesh_shape, compare, fixed, memory_limit, **options: as for `find_layout`.

    Raises:
      UsageError: the function returns something else, or needs other arguments.
      InfeasibleError: no layout lowers.
    """
    accepted = _accepted(build_graph)
    given: dict[str, Any] = dict(devices=devices, mesh_shape=mesh_shape, fixed=fixed, memory_limit=memory_limit)

    def search(choice: tuple[str, str] | None, others: Sequence[Any]) -> Layout:
        arguments = dict(zip(("mesh_shape", "layout"), choice, strict=True)) if choice else {}
        with tf.Graph().as_default():
            graph, outputs = _build(build_graph, {name: arguments[name] for name in accepted if name in arguments})
            return find_layout(graph, outputs=outputs, compare=others, **given, **options)

    if not accepted:
        return search(None, compare)
    return _Rebuilding(search, given, accepted, build_graph).run(compare)


class _Rebuilding:
    """Layouts, each on its own graph."""

    def __init__(self, search: Callable[..., Layout], given: Mapping[str, Any], accepted: Sequence[str],
                 build_graph: Callable[..., Any]) -> None:
        self.search, self.given = search, given
        self.name = getattr(build_graph, "__name__", str(build_graph))
        self.evaluated: dict[tuple[str, str], _Evaluated | InfeasibleError] = {}
        parameters = inspect.signature(build_graph).parameters
        self.defaults = all(name in parameters and parameters[name].default is not inspect.Parameter.empty
                            for name in accepted)

    def evaluate(self, choice: tuple[str, str]) -> None:
        """Builds the graph for a layout and prices it there."""
        if choice in self.evaluated:
            return
        try:
            found = self.search(choice, [choice])
            self.evaluated[choice] = _Evaluated(found.compared[0], found)
        except InfeasibleError as error:
            self.evaluated[choice] = error

    def cost_of(self, choice: tuple[str, str], name: str) -> LayoutCost:
        """What a layout costs on its own graph."""
        entry = self.evaluated[choice]
        if isinstance(entry, _Evaluated):
            return dataclasses.replace(entry.cost, name=name)
        return LayoutCost(name, *choice, 0.0, {}, {}, str(entry))

    def eligible(self, choice: tuple[str, str]) -> bool:
        """Whether a layout lowers and keeps to what the caller asked for."""
        entry = self.evaluated[choice]
        if not isinstance(entry, _Evaluated) or entry.cost.problem:
            return False
        mesh = parse_mesh_shape(choice[0])
        rules = parse_rules(choice[1], mesh)
        limit, wanted = self.given["memory_limit"], self.given["mesh_shape"]
        return ((limit is None or entry.cost.memory_bytes <= limit)
                and (wanted is None or choice[0] == str(mesh_and_devices(wanted, None)[0]))
                and all(rules.get(dim) == (axis or None) for dim, axis in (self.given["fixed"] or {}).items()))

    def run(self, compare: Sequence[Any]) -> Layout:
        """The best layout of all that the graph was built for."""
        mesh, devices = mesh_and_devices(self.given["mesh_shape"], self.given["devices"])
        start = str(mesh or f"rows:{devices}"), ""
        first = self.search(None if self.defaults else start, ())
        proposals = [(first.mesh_shape, first.layout_rules)]
        compared = [(str(shape), rules_text(rules)) for shape, rules in map(parse_layout, compare)]
        data_parallel = None
        if first.data_parallel is not None:
            data_parallel = first.data_parallel.mesh_shape, first.data_parallel.layout_rules
        for choice in [*compared, *([data_parallel] if data_parallel else [])]:
            self.evaluate(choice)
        proposals += [(entry.found.mesh_shape, entry.found.layout_rules) for entry in self.evaluated.values()
                      if isinstance(entry, _Evaluated)]
        for _ in range(_ROUNDS):
            known = set(map(_effect, self.evaluated))
            new = [choice for choice in dict.fromkeys(proposals) if _effect(choice) not in known]
            if not new:
                break
            self.evaluate(new[0])
            entry = self.evaluated[new[0]]
            if isinstance(entry, _Evaluated):
                proposals.append((entry.found.mesh_shape, entry.found.layout_rules))
        usable = [choice for choice in self.evaluated if self.eligible(choice)]
        if not usable:
            raise InfeasibleError(f"{self.name}: every layout found changes the graph into one that does not lower "
                                  "under it; fix the mesh shape")
        # Of equals, one that the search itself comes to.
        best = min(usable, key=lambda choice: (self.evaluated[choice].cost.seconds, not self.evaluated[choice].stable))
        entry = self.evaluated[best]
        notes = entry.found.notes
        if not entry.stable:
            notes = (*notes, "note: the graph depends on its layout, and the one built for this layout would rather "
                             f"have another; this is the best of {len(usable)}, each priced on its own graph")
        return dataclasses.replace(
            entry.found, best=dataclasses.replace(entry.cost, name="best"), notes=notes,
            search={**entry.found.search, "builds": 1 + len(self.evaluated)},
            data_parallel=self.cost_of(data_parallel, "data parallel") if data_parallel else None,
            compared=tuple(self.cost_of(choice, f"given {number}") for number, choice in enumerate(compared, 1)))
