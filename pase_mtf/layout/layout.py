"""What a search for a layout found: mesh shape and layout rules, what they cost, and the tables that people read."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection

from tabulate import tabulate

from pase_mtf.amounts import bytes_text, gap_text, needed_text
from pase_mtf.arguments import checked_arguments
from pase_mtf.errors import UsageError, nearest, shortened
from pase_mtf.layout.formats import format_layout
from pase_mtf.layout.search import Search
from pase_mtf.layout.space import parse_mesh_shape, parse_rules, rules_text
from pase_mtf.strategy.kernels_text import kernels_text, untraced_text
from pase_mtf.strategy.search_report import PricedByKernels

__all__ = ["NOT_BY_KERNELS", "Layout", "LayoutCost", "LayoutReport", "check_explained", "gap_above"]


NOT_BY_KERNELS = ("explain is for roofline prices: kernels are measured of few layouts; take those, and a machine with "
                  "rates")
"""Why layouts that were priced by kernels are not explained."""


def gap_above(bound: float, seconds: float) -> float:
    """By which fraction of a bound a layout takes more; infinite above a bound of nothing.

    Args:
      bound: seconds that no layout is below.
      seconds: what the layout takes.
    """
    if seconds <= bound:
        return 0.0
    return seconds / bound - 1.0 if bound > 0.0 else math.inf


def check_explained(dim: str, known: Collection[str]) -> None:
    """Refuses to explain what is no dim.

    Args:
      dim: the name.
      known: those of the graph's dims.

    Raises:
      UsageError: it is none of them.
    """
    if dim not in known:
        raise UsageError(f"unknown dim {dim!r}; {nearest(dim, [name for name in known if not name.startswith('_')])}")


@dataclasses.dataclass(frozen=True)
class LayoutCost:
    """What one layout is predicted to cost.

    Attributes:
      name: what it is, for people.
      mesh_shape, layout_rules: as Mesh-TF parses them.
      seconds: of a training step.
      parts: part of the cost -> seconds.
      memory: part -> bytes on the fullest device.
      problem: why it does not lower; "" if it does. Then the prediction is of nothing that can be run.
      doubt: what our rules do not know to be right about a layout that lowers; "" where they do.
      known: whether that is certain; else nobody knows what an Operation class of the program's own does.
    """

    name: str
    mesh_shape: str
    layout_rules: str
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    problem: str = ""
    doubt: str = ""
    known: bool = True

    def __hash__(self) -> int:
        return hash((self.name, self.mesh_shape, self.layout_rules, self.seconds))

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest device."""
        return sum(self.memory.values())

    def memory_text(self, device_bytes: float) -> str:
        """One line: what is needed of what a device holds, and for what."""
        parts = ", ".join(f"{part} {bytes_text(amount)}" for part, amount in self.memory.items() if amount > 0)
        return (f"memory per device: {bytes_text(self.memory_bytes)} of {bytes_text(device_bytes)} at the predicted "
                f"peak ({parts or 'nothing'})")

    def row(self) -> list[str]:
        """The cells of a table for people: name, layout, milliseconds (all, compute, collectives, resharding), MiB."""
        names = [self.name, self.mesh_shape, self.layout_rules or "(none)"]
        if self.problem:
            return [*names, "does not lower" if self.known else "not known to be legal", "", "", "", ""]
        collectives = sum(seconds for part, seconds in self.parts.items() if "all-reduce" in part)
        resharding = sum(seconds for part, seconds in self.parts.items() if part.startswith("resharding"))
        split = (self.seconds, self.seconds - collectives - resharding, collectives, resharding)
        return [*names, *(f"{1e3 * seconds:.3f}" for seconds in split), f"{self.memory_bytes / 2**20:.1f}"]


class LayoutReport(PricedByKernels, total=False):
    """How a layout was found.

    Attributes:
      seconds, export_seconds: of all of it, and of exporting the graph.
      optimal: whether the cost is proven to be the least.
      gap: fraction by which the cost may be above the least.
      mesh_shapes, dims, layers, vertices, configurations: sizes of what was searched.
      builds, graphs: of a graph that depends on its layout, how often it was built, and how many different ones.
      priced: of one priced by kernels, how many layouts were.
    """

    seconds: float
    export_seconds: float
    optimal: bool
    gap: float
    mesh_shapes: int
    dims: int
    layers: int
    vertices: int
    configurations: int
    builds: int
    graphs: int
    priced: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The cheapest layout of a graph.

    Attributes:
      best: what it costs.
      graph_name: of the graph.
      devices: p.
      machine_name, machine_source: whose numbers the predictions are.
      device_bytes: what a device of that machine holds.
      memory_limit: bytes per device that the answer keeps to; infinite: however many.
      data_parallel: the batch over all devices; None where no dim could be called the batch.
      own: the layout that the program itself names; None where it names none for so many devices.
      compared: the layouts that were given for comparison, in order.
      alternatives: the next best, cheapest first.
      search: how it was found (`LayoutReport`).
      notes: what a person should know: cheaper layouts that do not lower, and why.
      variables: name -> the names of its dims, of every variable of the program.
    """

    best: LayoutCost
    graph_name: str
    devices: int
    machine_name: str
    machine_source: str
    device_bytes: float
    data_parallel: LayoutCost | None
    own: LayoutCost | None
    compared: tuple[LayoutCost, ...]
    alternatives: tuple[LayoutCost, ...]
    search: LayoutReport
    notes: tuple[str, ...]
    variables: dict[str, tuple[str, ...]]
    _search: Search | None = dataclasses.field(compare=False, repr=False)
    memory_limit: float = math.inf

    def __hash__(self) -> int:
        return hash((self.best, self.graph_name, self.devices, self.machine_name))

    def __copy__(self) -> Layout:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        """All but the search, which is that of the program's live graph."""
        return dataclasses.replace(self, **copy.deepcopy(
            {name: value for name, value in vars(self).items() if name != "_search"}, memo))

    def __getstate__(self) -> dict[str, object]:
        """For `pickle`, without the search: a graph of TensorFlow stays in its process."""
        return {**vars(self), "_search": None}

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

    @checked_arguments
    def format(self, style: str = "flags") -> str:
        """The layout as a program takes it: "flags", "gin" or "json"; "jax" or "dtensor" for a program that is ported.

        Raises:
          UsageError: an unknown style.
        """
        mesh = parse_mesh_shape(self.mesh_shape)
        return format_layout(mesh.axes, parse_rules(self.layout_rules, mesh), style, self.variables)

    def __str__(self) -> str:
        entries = [self.best, *(entry for entry in (self.own, self.data_parallel) if entry), *self.compared,
                   *self.alternatives]
        head = ["layout", "mesh shape", "layout rules", "ms a step", "compute", "collectives", "resharding", "MiB"]
        verdict = ("proven optimal" if self.search["optimal"]
                   else gap_text(self.search["gap"]))
        if kernels := kernels_text(self.search):
            verdict += f" ({self.search['priced']} were lowered and priced; {kernels})"
        text = (f"{self.graph_name} on {self.devices} devices ({self.machine_name}): predicted "
                f"{1e3 * self.seconds:.3f} ms a step, {verdict} among the layouts that lower\n"
                + tabulate([entry.row() for entry in entries], head, disable_numparse=True,
                           colalign=(*["left"] * 3, *["right"] * 5)))
        if untraced := untraced_text(self.search):
            text += f"\nnote: {untraced}"
        problems = [f"{entry.name}: {entry.problem}" for entry in entries if entry.problem]
        problems += [f"{entry.name}: it lowers; not known to be right, and priced with those dims whole: {entry.doubt}"
                     for entry in entries if entry.doubt]
        most = min(self.memory_limit, self.device_bytes)
        holder = f"{self.machine_name} holds" if most == self.device_bytes else "the limit is"
        problems += [f"{entry.name}: needs {needed_text(entry.memory_bytes, most)} per device, "
                     f"{holder} {bytes_text(most)}"
                     for entry in entries if not entry.problem and entry.memory_bytes > most]
        replicated = []
        if self.devices > 1 and not self.best.layout_rules:
            why = ("which is faster here than what splitting it would send" if self.search["optimal"]
                   else "and nobody has looked yet at all layouts that could be faster; give it more time")
            replicated = [f"note: no dim is split: every device does all of the work, {why}"]
        return "\n".join([text, self.best.memory_text(self.device_bytes), *problems, *self.notes, *replicated])

    @checked_arguments
    def explain(self, dim: str) -> str:
        """What every axis would cost for a dim: with the other rules as they are, and with all others chosen anew.

        Raises:
          UsageError: no tensor has such a dim, the layout was priced by kernels, or it was unpickled.
        """
        if "kernels" in self.search:
            raise UsageError(NOT_BY_KERNELS)
        search = self._search
        if search is None:
            raise UsageError(f"explain({shortened(dim)}): a layout that was unpickled does not have its graph any "
                             "more; explain it where find_layout found it")
        costs, legality = search.costs, search.costs.legality
        check_explained(dim, legality.sizes)
        mesh = parse_mesh_shape(self.mesh_shape)
        axis_of = {name: mesh.names.index(axis) for name, axis in parse_rules(self.layout_rules, mesh).items()}
        body = []
        for axis in (None, *(number for number, size in enumerate(mesh.sizes) if size > 1)):
            changed = {name: other for name, other in axis_of.items() if name != dim}
            if axis is not None:
                changed[dim] = axis
            problem = legality.problem(changed, mesh.sizes) or search.verify(
                mesh, {name: mesh.names[other] for name, other in changed.items()})
            alone = legality.problem_of(dim, axis, mesh.sizes) if axis is not None else None
            as_it_is = f"{1e3 * costs.total(mesh, changed):.4f}" if problem is None else "-"
            anew, rules = "-", ""
            found = search.cheapest_with(mesh, dim, axis) if alone is None else None
            if found is not None:
                anew, rules = f"{1e3 * found.cost:.4f}", rules_text(found.rules)
            heavy = "" if problem or search.fits(mesh, changed) else "the rest as it is, beyond the memory limit"
            why = "chosen" if axis_of.get(dim) == axis else str(alone or problem or heavy)
            label = "(none)" if axis is None else f"{mesh.names[axis]}:{mesh.sizes[axis]}"
            body.append([label, as_it_is, anew, rules, why])
        sizes = ", ".join(map(str, sorted(legality.sizes[dim])))
        return (f"{dim} (size {sizes}) on mesh {mesh}\n" + tabulate(
            body, ["axis", "ms, the rest as it is", "ms, the rest anew", "rules then", "why"], disable_numparse=True,
            colalign=("left", "right", "right", "left", "left")))
