"""Programs whose graph depends on the mesh or the layout: built anew for what was found, until nothing is better.

Every layout counts with the graph that is built for it. Graphs that are alike are searched once; each offers its
layouts in the order of their cost, and the cheapest offer of all is tried next: the graph is built for it, and if it is
alike to the one that made the offer, the price holds. Once no offer is below the best price, no layout of any graph
that was met is better.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pase_mtf.calibration.load import load_machine
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError, PaseError, UsageError
from pase_mtf.layout.capture import capture_graph
from pase_mtf.layout.graph import GraphSearch, LayoutCost
from pase_mtf.layout.layout import Layout, clean_fixed, compared_layouts
from pase_mtf.layout.space import mesh_and_devices, parse_mesh_shape, parse_rules, rules_text
from pase_mtf.layout.verify import Verifier
from pase_mtf.machine.machine import Machine

__all__ = ["find_layout_of_program"]

# Graphs that are built for what was proposed.
_BUILDS = 10
# Of what a graph proposes, how much is looked at.
_LOOKED_AT = 60
# Relative difference of costs within which a layout is like one that was tried.
_ALIKE = 2e-3

_Choice = tuple[str, str]
"""A mesh shape and layout rules."""


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


def _effect(choice: _Choice) -> tuple:
    """Equal for layouts that differ in the names of axes only."""
    mesh = parse_mesh_shape(choice[0])
    rules = parse_rules(choice[1], mesh)
    return mesh.sizes, frozenset((dim, mesh.names.index(axis)) for dim, axis in rules.items())


def _signature(graph: mtf.Graph) -> tuple:
    """Equal for graphs of the same operations on the same tensors, whatever they are called."""
    entries, number = [], {}
    for operation in graph.operations:
        # Offsets, dims it works along, and the like.
        settings = tuple((key, tuple(value.dims) if isinstance(value, mtf.Shape) else value)
                         for key, value in vars(operation).items()
                         if isinstance(value, (bool, int, float, str, mtf.Dimension, mtf.Shape)) and key != "_name")
        slices = getattr(operation, "_laid_out_tensor", None)
        entries.append((type(operation), settings, tuple(number.get(tensor, -1) for tensor in operation.inputs),
                        tuple((tuple(tensor.shape.dims), tensor.dtype) for tensor in operation.outputs),
                        slices and (len(slices.tensor_list), tuple(slices.slice_shape))))
        for tensor in operation.outputs:
            number[tensor] = len(number)
    return tuple(entries)


class _Family:
    """Graphs that are alike, searched once.

    Attributes:
      strict: layouts of such a graph as it is.
      problem: why no layouts are proposed; "" if some are.
      left: (mesh sizes, cost here) of layouts that were proposed and for which the program built another graph.
    """

    def __init__(self, graph: mtf.Graph, outputs: Sequence[mtf.Tensor], devices: int, machine: Machine,
                 options: Mapping[str, Any], fixed: Mapping[str, str | None], name: str, *, first: bool) -> None:
        self.problem, self._proposing = "", []
        self.left: list[tuple[list[int], float]] = []

        def prepare(**more: Any) -> GraphSearch:
            return GraphSearch(graph, devices, outputs, machine, name=name, **more)

        try:
            self.strict = prepare(fixed=fixed, **options)
            self._proposing.append(self.strict)
        except (InfeasibleError, UsageError) as error:
            # What is fixed is impossible in this graph, or no dim of it, but maybe not in another.
            if first and isinstance(error, UsageError):
                raise
            self.problem, self.strict = str(error), prepare()
        if any(isinstance(operation, mtf.ops.ImportLaidOutTensorOperation) for operation in graph.operations):
            with contextlib.suppress(InfeasibleError, UsageError):
                self._proposing.insert(0, prepare(fixed=fixed, rebuilt=True, exported=self.strict.exported, **options))

    def offers(self, known: set[tuple]) -> Iterator[tuple[float, _Choice, bool]]:
        """The cheapest layout that is not known yet, with its cost in this graph; and the cheapest that is not like one
        for which the program built another graph (True), if that is another.

        Layouts as good as one that changed the graph most likely change it too, as those do that only exchange axes.
        """
        for search in self._proposing:
            first = True
            for number in range(_LOOKED_AT):
                found = search.candidates(number + 1)
                if len(found) <= number:
                    break
                candidate = found[-1]
                choice = str(candidate.mesh), rules_text(candidate.rules)
                if _effect(choice) in known:
                    continue
                fresh = not any(sizes == sorted(candidate.mesh.sizes) and abs(cost - candidate.cost) <= _ALIKE * cost
                                for sizes, cost in self.left)
                if first or fresh:
                    yield candidate.cost, choice, fresh
                first = False
                if fresh:
                    break
        if not self.problem and not self._proposing[-1].candidates(1):
            self.problem = self._proposing[-1].why_nothing()


@dataclasses.dataclass
class _Evaluated:
    """A layout on the graph that is built for it: what it costs, the graph's family, and the graph (None: it is the
    one that its family was searched on)."""

    cost: LayoutCost
    family: _Family
    own: tuple[mtf.Graph, list[mtf.Tensor]] | None


def find_layout_of_program(build_graph: Callable[..., Any], *, devices: int | None = None, machine: Machine | str,
                           mesh_shape: Any = None, compare: Sequence[Any] = (), fixed: Mapping[str, str | None] | None
                           = None, memory_limit: float | None = None, alternatives: int = 3,
                           name: str = "program") -> Layout:
    """Finds the layout of the graph that a function builds.

    A function that takes `mesh_shape` or `layout` (strings) is called again with what was found, as the graph may
    depend on it (microbatches, expert groups, imported slices), until no layout is left that promises to be better.
    Data parallelism and the layouts to compare with are priced on graphs of their own as well, and compete.

    Args:
      build_graph: returns an mtf.Graph or (graph, outputs); or comes to mtf.Lowering, where it is stopped.
      devices, machine, mesh_shape, compare, fixed, memory_limit, alternatives, name: as for `find_layout`.

    Raises:
      UsageError: the function returns something else, or needs other arguments.
      InfeasibleError: no layout lowers.
    """
    from pase_mtf.layout.layout import find_layout
    accepted = _accepted(build_graph)
    mesh, devices = mesh_and_devices(mesh_shape, devices)
    machine = load_machine(machine, devices)
    if not accepted:
        with tf.Graph().as_default():
            graph, outputs = _build(build_graph, {})
            return find_layout(graph, devices, outputs, machine, mesh, memory_limit, fixed, compare=compare,
                               alternatives=alternatives, name=name)
    machine.check_devices(devices)
    return _Rebuilding(build_graph, accepted, devices, machine, {"mesh": mesh, "memory_limit": memory_limit},
                       clean_fixed(fixed), name).run(compare, alternatives)


class _Rebuilding:
    """Layouts, each on its own graph."""

    def __init__(self, build_graph: Callable[..., Any], accepted: Sequence[str], devices: int, machine: Machine,
                 options: Mapping[str, Any], fixed: Mapping[str, str | None], name: str) -> None:
        self.build_graph, self.accepted, self.devices, self.machine = build_graph, accepted, devices, machine
        self.options, self.fixed, self.name = options, fixed, name
        self.limit = _BUILDS
        self.evaluated: dict[_Choice, _Evaluated | InfeasibleError] = {}
        self.families: dict[tuple, _Family] = {}
        self.builds = 0

    def family(self, choice: _Choice | None) -> tuple[_Family, tuple[mtf.Graph, list[mtf.Tensor]] | None]:
        """Builds the graph for a layout: its family, and the graph if the family was searched on another."""
        arguments = dict(zip(("mesh_shape", "layout"), choice, strict=True)) if choice else {}
        with tf.Graph().as_default():
            self.builds += 1
            try:
                graph, outputs = _build(self.build_graph,
                                        {name: arguments[name] for name in self.accepted if name in arguments})
            except Exception as error:  # whatever a program says to a layout that it does not take
                if not self.families:
                    raise
                what = " ".join(str(error).split())[:300]
                what = what if isinstance(error, PaseError) else f"{type(error).__name__}: {what}"
                raise InfeasibleError(f"the program refuses it ({what})") from error
            signature = _signature(graph)
            if signature in self.families:
                return self.families[signature], (graph, outputs)
            self.families[signature] = _Family(graph, outputs, self.devices, self.machine, self.options, self.fixed,
                                               self.name, first=not self.families)
            return self.families[signature], None

    def evaluate(self, choice: _Choice) -> None:
        """Builds the graph for a layout and prices it there."""
        if choice in self.evaluated:
            return
        try:
            family, own = self.family(choice)
            mesh = parse_mesh_shape(choice[0])
            self.evaluated[choice] = _Evaluated(
                family.strict.given("given", mesh, parse_rules(choice[1], mesh)), family, own)
        except InfeasibleError as error:
            self.evaluated[choice] = error

    def cost_of(self, choice: _Choice, name: str) -> LayoutCost:
        """What a layout costs on its own graph."""
        entry = self.evaluated[choice]
        if isinstance(entry, _Evaluated):
            return dataclasses.replace(entry.cost, name=name)
        return LayoutCost(name, *choice, 0.0, {}, {}, str(entry))

    def eligible(self, choice: _Choice) -> bool:
        """Whether a layout lowers and keeps to what the caller asked for."""
        entry = self.evaluated[choice]
        if not isinstance(entry, _Evaluated) or entry.cost.problem:
            return False
        rules = parse_rules(choice[1], parse_mesh_shape(choice[0]))
        limit, wanted = self.options["memory_limit"], self.options["mesh"]
        return ((limit is None or entry.cost.memory_bytes <= limit)
                and (wanted is None or choice[0] == str(wanted))
                and all(rules.get(dim) == axis for dim, axis in self.fixed.items()))

    def usable(self) -> list[_Choice]:
        """The layouts that are eligible, cheapest first."""
        return sorted(filter(self.eligible, self.evaluated), key=lambda choice: self.evaluated[choice].cost.seconds)

    def lowers(self, choice: _Choice) -> bool:
        """Lowers the graph that was built for a layout, unless that has been done."""
        entry = self.evaluated[choice]
        if entry.own is not None:
            graph, outputs = entry.own
            mesh = parse_mesh_shape(choice[0])
            problem = Verifier(graph, outputs).problem(mesh, parse_rules(choice[1], mesh))
            entry.own, entry.cost = None, dataclasses.replace(entry.cost, problem=str(problem or ""))
        return not entry.cost.problem

    def propose(self) -> float:
        """Evaluates what the graphs propose, until nothing promises to be better; returns what no layout of a graph
        that was met can be below."""
        while True:
            known = set(map(_effect, self.evaluated))
            offers = [(cost, not fresh, number, choice) for number, family in enumerate(list(self.families.values()))
                      for cost, choice, fresh in family.offers(known)]
            best = next((self.evaluated[choice].cost.seconds for choice in self.usable() if self.lowers(choice)),
                        float("inf"))
            # Of equals the first is as good.
            offers = [offer for offer in offers if offer[0] < best * (1 - 1e-9)]
            if not offers or self.builds >= self.limit:
                return min([best, *(offer[0] for offer in offers)])
            cost, _, number, choice = min(offers, key=lambda offer: (offer[1], offer[0]))
            family = list(self.families.values())[number]
            self.evaluate(choice)
            entry = self.evaluated[choice]
            if not isinstance(entry, _Evaluated) or entry.family is not family:
                family.left.append((sorted(parse_mesh_shape(choice[0]).sizes), cost))

    def seeds(self, batch: str) -> list[_Choice]:
        """The batch on one of two axes: programs that count groups or microbatches by it build a graph for each."""
        mesh = self.options["mesh"]
        if mesh is not None:
            return [(str(mesh), f"{batch}:{axis}") for axis, size in mesh.axes if size > 1]
        return [(f"rows:{rows};cols:{self.devices // rows}", f"{batch}:rows") for rows in range(2, self.devices)
                if self.devices % rows == 0]

    def run(self, compare: Sequence[Any], alternatives: int) -> Layout:
        """The best layout of all that the graph was built for."""
        parameters = inspect.signature(self.build_graph).parameters
        defaults = all(name in parameters and parameters[name].default is not inspect.Parameter.empty
                       for name in self.accepted)
        compared = [(str(shape), rules_text(rules)) for shape, rules in compared_layouts(compare, self.devices)]
        first, _ = self.family(None if defaults else (str(self.options["mesh"] or f"rows:{self.devices}"), ""))
        parallel, data_parallel = first.strict.data_parallel(), None
        if parallel is not None:
            data_parallel = str(parallel[0]), rules_text(parallel[1])
        for choice in [*compared, *([data_parallel] if data_parallel else [])]:
            self.evaluate(choice)
        if len(self.families) > 1 and parallel is not None:
            for choice in self.seeds(next(iter(parallel[1]))):
                with contextlib.suppress(InfeasibleError):
                    self.family(choice)
        self.limit = self.builds + _BUILDS
        bound = self.propose()
        usable = [choice for choice in self.usable() if self.lowers(choice)]
        if not usable:
            if len(self.families) == 1 and first.problem:
                raise InfeasibleError(first.problem)
            raise InfeasibleError(f"{self.name}: every layout found changes the graph into one that does not lower "
                                  "under it; fix the mesh shape")
        best = usable[0]
        entry = self.evaluated[best]
        gap = max(0.0, entry.cost.seconds / bound - 1.0)
        notes: tuple[str, ...] = ()
        if gap > 1e-9:
            notes = (f"note: the graph depends on its layout; this is the best of {len(usable)} layouts whose graphs "
                     "were built",)
        search = entry.family.strict
        others = [dataclasses.replace(self.evaluated[choice].cost, name="") for choice in usable[1:]
                  if choice != data_parallel and choice not in compared]
        if len(self.families) == 1:
            known = {_effect(choice) for choice in usable}
            others += [search.cost("", candidate.mesh, candidate.rules)
                       for candidate in search.candidates(1 + alternatives)
                       if _effect((str(candidate.mesh), rules_text(candidate.rules))) not in known]
        others.sort(key=lambda cost: cost.seconds)
        return Layout(
            best=dataclasses.replace(entry.cost, name="best"), graph_name=self.name, devices=self.devices,
            machine_name=self.machine.name, machine_source=self.machine.source,
            data_parallel=self.cost_of(data_parallel, "data parallel") if data_parallel else None,
            compared=tuple(self.cost_of(choice, f"given {number}") for number, choice in enumerate(compared, 1)),
            alternatives=tuple(dataclasses.replace(cost, name=f"next best {number}")
                               for number, cost in enumerate(others[:max(0, alternatives)], 1)),
            search={"seconds": search.seconds, "export_seconds": entry.family.strict.export_seconds,
                    "optimal": gap <= 1e-9, "gap": gap, "builds": self.builds, "graphs": len(self.families),
                    **search.sizes()},
            notes=notes, _search=search.search)
