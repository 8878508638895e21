"""One mesh shape and one global map from dim names to mesh axes, for programs that call mtf.Lowering themselves.

    layout = pase_mtf.find_layout(mtf_graph, devices=8, outputs=[loss], machine="h100")
    layout.mesh_shape, layout.layout_rules     # "rows:2;cols:4", "batch:rows;d_ff:cols"

The command line is `python -m pase_mtf.layout --graph=my_project.train:build_graph --mesh=8`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pase_mtf.calibration.load import load_machine
from pase_mtf.compat import mtf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.layout.formats import format_layout
from pase_mtf.layout.graph import GraphSearch, LayoutCost
from pase_mtf.layout.network import MeshNetwork
from pase_mtf.layout.search import Candidate, Search
from pase_mtf.layout.space import (
    MeshShape,
    mesh_and_devices,
    parse_layout,
    parse_mesh_shape,
    parse_rules,
    rules_text,
)
from pase_mtf.machine.machine import Machine
from pase_mtf.search.k_best import cheapest
from pase_mtf.tables import format_table

__all__ = ["Layout", "LayoutCost", "clean_fixed", "compared_layouts", "find_layout"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The cheapest layout of a graph.

    Attributes:
      best: what it costs.
      graph_name: of the graph.
      devices: p.
      machine_name, machine_source: whose numbers the predictions are.
      data_parallel: the batch over all devices; None where no dim could be called the batch.
      compared: the layouts that were given for comparison, in order.
      alternatives: the next best, cheapest first.
      search: "seconds", "export_seconds", "optimal", "gap", "mesh_shapes", "dims", "vertices", "configurations".
      notes: what a person should know: cheaper layouts that do not lower, and why.
    """

    best: LayoutCost
    graph_name: str
    devices: int
    machine_name: str
    machine_source: str
    data_parallel: LayoutCost | None
    compared: tuple[LayoutCost, ...]
    alternatives: tuple[LayoutCost, ...]
    search: dict[str, Any]
    notes: tuple[str, ...] = ()
    _search: Search | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def mesh_shape(self) -> str:
        """The mesh shape, as mtf.convert_to_shape parses it."""
        return self.best.mesh_shape

    @property
    def layout_rules(self) -> str:
        """The layout rules, as mtf.convert_to_layout_rules parses them."""
        return self.best.layout_rules

    @property
    def seconds(self) -> float:
        """Predicted time of one training step."""
        return self.best.seconds

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes on the fullest device."""
        return self.best.memory_bytes

    def format(self, style: str = "flags") -> str:
        """The layout as a program takes it: "flags", "gin" or "json".

        Raises:
          UsageError: an unknown style.
        """
        return format_layout(self.mesh_shape, self.layout_rules, style)

    def __str__(self) -> str:
        rows = [self.best, *([self.data_parallel] if self.data_parallel else []), *self.compared, *self.alternatives]
        body = []
        for entry in rows:
            total = f"{1e3 * entry.seconds:.3f}" if not entry.problem else "does not lower"
            moved = sum(seconds for part, seconds in entry.parts.items() if "all-reduce" in part)
            between = sum(seconds for part, seconds in entry.parts.items() if part.startswith("resharding"))
            split = [f"{1e3 * seconds:.3f}" if not entry.problem else ""
                     for seconds in (entry.seconds - moved - between, moved, between)]
            body.append([entry.name, entry.mesh_shape, entry.layout_rules or "(none)", total, *split,
                         f"{entry.memory_bytes / 2**20:.1f}" if not entry.problem else ""])
        head = ["layout", "mesh shape", "layout rules", "ms a step", "compute", "collectives", "resharding", "MiB"]
        verdict = ("proven optimal" if self.search["optimal"]
                   else f"at most {100 * self.search['gap']:.2f} % above the optimum")
        text = (f"{self.graph_name} on {self.devices} devices ({self.machine_name}): predicted "
                f"{1e3 * self.seconds:.3f} ms a step, {verdict} among the layouts that lower\n"
                + format_table(head, body, right=(3, 4, 5, 6, 7)))
        problems = [f"{entry.name}: {entry.problem}" for entry in rows if entry.problem]
        copies = (["note: no dim is split: every device does all of the work, which is faster here than what splitting "
                   "it would send"] if self.devices > 1 and not self.best.layout_rules else [])
        return "\n".join([text, *problems, *self.notes, *copies])

    def explain(self, dim: str) -> str:
        """What every axis would cost for a dim: with the other rules as they are, and with all others chosen anew.

        Raises:
          UsageError: no tensor has such a dim.
        """
        search = self._search
        legality = search.prices.legality
        if dim not in legality.sizes:
            from pase_mtf.errors import nearest
            raise UsageError(f"unknown dim {dim!r}: {nearest(dim, [n for n in legality.sizes if n[0] != '_'])}")
        mesh = parse_mesh_shape(self.mesh_shape)
        axis_of = {name: mesh.names.index(axis) for name, axis in parse_rules(self.layout_rules, mesh).items()}
        body = []
        for axis in (None, *(number for number, size in enumerate(mesh.sizes) if size > 1)):
            changed = {name: other for name, other in axis_of.items() if name != dim}
            if axis is not None:
                changed[dim] = axis
            chosen = axis_of.get(dim) == axis
            problem = legality.problem(changed, mesh.sizes)
            alone = legality.problem_of(dim, axis, mesh.sizes) if axis is not None else None
            here = f"{1e3 * search.prices.total(mesh, changed):.4f}" if problem is None else "-"
            anew, rules = "-", ""
            if alone is None:
                found = _cheapest_with(search, mesh, dim, axis)
                if found is not None:
                    anew, rules = f"{1e3 * found.cost:.4f}", rules_text(search.trim(found).rules)
            why = "chosen" if chosen else str(alone or problem or "")
            label = "(none)" if axis is None else f"{mesh.names[axis]}:{mesh.sizes[axis]}"
            body.append([label, here, anew, rules, why])
        sizes = ", ".join(map(str, sorted(legality.sizes[dim])))
        return (f"{dim} (size {sizes}) on mesh {mesh}\n" + format_table(
            ["axis", "ms, the rest as it is", "ms, the rest anew", "rules then", "why"], body, right=(1, 2)))


def _cheapest_with(search: Search, mesh: MeshShape, dim: str, axis: int | None) -> Candidate | None:
    """The cheapest layout of a mesh shape with a dim on an axis, of those that are legal."""
    network = MeshNetwork(search.prices, mesh, {**search.fixed_axes(mesh), dim: axis})
    if network.dead:
        return None
    try:
        for _, assignment in itertools.islice(cheapest(network.network), 100):
            axis_of = network.layout(assignment)
            if search.prices.legality.problem(axis_of, mesh.sizes) is None:
                return Candidate(search.prices.total(mesh, axis_of), mesh, axis_of)
    except InfeasibleError:
        pass
    return None


def find_layout(graph: mtf.Graph | Callable[..., Any], devices: int | None = None,
                outputs: Iterable[mtf.Tensor] = (), machine: Machine | str = "1080ti",
                mesh_shape: str | MeshShape | mtf.Shape | None = None, memory_limit: float | None = None,
                fixed: Mapping[str, str | None] | None = None, *, compare: Sequence[Any] = (),
                alternatives: int = 3, exported: ComputationGraph | None = None, name: str = "program") -> Layout:
    """Finds the mesh shape and the layout rules under which an unchanged program runs fastest.

    Every factorisation of p into at most three axes competes (in every order that the machine's links tell apart), with
    every map from dims to axes under which stock mtf.Lowering lowers the graph to the values of one device. What is
    returned has been lowered, for its shapes.

    Args:
      graph: an mtf.Graph, before it is lowered; or a function that builds one (see
        `layout_rebuild.find_layout_of_program`).
      devices: p (default: that of mesh_shape, else 8).
      outputs: tensors that the program exports.
      machine: a Machine, the name of one, or "local", which is measured.
      mesh_shape: only this one, as "rows:2;cols:4"; otherwise the search chooses.
      memory_limit: bytes per device.
      fixed: dim name -> axis name for dims whose axis is given, None for those that stay whole. Axes named here are
        among those of the mesh shape.
      compare: layouts to price too, as "mesh shape;layout rules" ("rows:2;cols:4;batch:rows"), or pairs of the two.
      alternatives: how many of the next best layouts to return.
      exported: what export_graph made of the graph, if it is at hand.
      name: of the program, for people.

    Returns:
      The layout, with its predicted cost and that of data parallelism and of the layouts to compare with.

    Raises:
      UsageError: arguments that do not parse or do not fit each other.
      InfeasibleError: no layout satisfies the constraints or lowers; names operation and dim.
    """
    if callable(graph) and not isinstance(graph, mtf.Graph):
        from pase_mtf.layout.rebuild import find_layout_of_program
        return find_layout_of_program(graph, devices=devices, machine=machine, mesh_shape=mesh_shape,
                                      memory_limit=memory_limit, fixed=fixed, compare=compare,
                                      alternatives=alternatives, name=name)
    mesh, devices = mesh_and_devices(mesh_shape, devices)
    machine = load_machine(machine, devices)
    machine.check_devices(devices)
    given = compared_layouts(compare, devices)
    one = GraphSearch(graph, devices, outputs, machine, mesh, memory_limit, clean_fixed(fixed), exported=exported,
                      name=name)
    found = one.candidates(1 + max(0, alternatives))
    if not found:
        raise InfeasibleError(one.why_nothing())
    if devices > 1 and not any(candidate.axis_of for candidate in found):
        problem = one.why_no_split()
        if problem:
            raise InfeasibleError(f"{name}: no dim can be split over {devices} devices; {problem}")
    best = found[0]
    data_parallel = one.data_parallel()
    return Layout(
        best=one.cost("best", best.mesh, best.rules), graph_name=name, devices=devices, machine_name=machine.name,
        machine_source=machine.source,
        data_parallel=one.given("data parallel", *data_parallel) if data_parallel else None,
        compared=tuple(one.given(f"given {number}", *entry) for number, entry in enumerate(given, 1)),
        alternatives=tuple(one.cost(f"next best {number}", candidate.mesh, candidate.rules)
                           for number, candidate in enumerate(found[1:], 1)),
        search={"seconds": one.seconds, "export_seconds": one.export_seconds, "optimal": True, "gap": 0.0,
                **one.sizes()},
        notes=one.notes(best), _search=one.search)


def clean_fixed(fixed: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Dim name -> axis name, None where it stays whole ("" too)."""
    return {dim: axis or None for dim, axis in (fixed or {}).items()}


def compared_layouts(compare: Sequence[Any], devices: int) -> list[tuple[MeshShape, dict[str, str]]]:
    """The layouts to compare with.

    Raises:
      UsageError: one does not parse, or is of another number of devices.
    """
    found = [parse_layout(entry) for entry in compare]
    for shape, _ in found:
        if shape.devices != devices:
            raise UsageError(f"layout to compare with has mesh {shape} of {shape.devices} devices, not {devices}; "
                             "compare meshes of one size")
    return found
