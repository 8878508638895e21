"""Programs whose graph depends on the mesh or the layout: a limited number of candidates, each on a graph of its own.

A layout costs what it costs on the graph that the program builds for it. Every graph that is built is searched, too
(graphs of one structure once): its layouts in the order of their cost there are candidates, since most of them do not
change the graph. The cheapest candidate of all graphs is tried next: the graph for it is built, and the layout costed
and lowered there. Once no candidate is below the cheapest layout tried, no layout of any graph that was met is better.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from pase_mtf.compat import tf
from pase_mtf.errors import InfeasibleError, PaseError, UsageError
from pase_mtf.layout.graph import GraphSearch
from pase_mtf.layout.layout import Layout, LayoutCost, gap_above
from pase_mtf.layout.program import BuiltGraph, Program
from pase_mtf.layout.request import Request
from pase_mtf.layout.space import MeshShape, expressible, parse_mesh_shape, parse_rules, rules_text
from pase_mtf.layout.verify import Verifier
from pase_mtf.operations.registry import rule_of

__all__ = ["find_layout_of_program"]

# Graphs that are built for candidates, after those for the starting points; and candidates tried on graphs at hand.
_CANDIDATES = 10
_TRIALS = 200


class _Strings(NamedTuple):
    """A layout as programs take it."""

    mesh_shape: str
    rules: str

    @classmethod
    def of(cls, mesh: MeshShape, rules: dict[str, str]) -> _Strings:
        return cls(str(mesh), rules_text(rules))

    def parsed(self) -> tuple[MeshShape, dict[str, str]]:
        mesh = parse_mesh_shape(self.mesh_shape)
        return mesh, parse_rules(self.rules, mesh)

    def effect(self) -> Hashable:
        """Equal for layouts that differ in the names of axes only."""
        mesh, rules = self.parsed()
        return mesh.sizes, frozenset((dim, mesh.names.index(axis)) for dim, axis in rules.items())


class _SearchedGraph:
    """A graph that the program built, searched; it stands for all of its structure.

    Attributes:
      built: the graph.
      search: the layouts of the graph as it is.
      problem: why it has no candidates; "" where it may have some.
    """

    def __init__(self, built: BuiltGraph, request: Request, *, first: bool) -> None:
        """Prepares the search.

        Raises:
          UsageError: of the first graph only: what is fixed is no dim of it. Another graph may well have other dims.
        """
        self.built, self.problem = built, ""
        self._proposing: list[GraphSearch] = []
        try:
            self.search = GraphSearch(built.graph, built.outputs, request, elsewhere=self._is_built_elsewhere)
            self._proposing.append(self.search)
        except (InfeasibleError, UsageError) as error:
            if first and isinstance(error, UsageError):
                raise
            self.problem = str(error)
            self.search = GraphSearch(built.graph, built.outputs, request.unconstrained())
        if any(rule_of(operation).imported_slices(operation) is not None
               for operation in built.graph.operations):
            # The slices it imports were laid out for one layout; they will be laid out for another.
            with contextlib.suppress(InfeasibleError, UsageError):
                self._proposing.append(GraphSearch(built.graph, built.outputs, request, rebuilt=True,
                                                   exports=self.search.exports))

    def _is_built_elsewhere(self, mesh: MeshShape, rules: Mapping[str, str]) -> bool:
        """Whether the program has to be called for a layout, as it may see something else there."""
        reads = self.built.reads
        return reads is None or not reads.same_for(mesh, rules, (str(mesh), rules_text(rules)))

    def candidates(self, tried: set[Hashable], limit: float) -> Iterator[tuple[float, _Strings]]:
        """The cheapest layouts here that have not been tried and cost less than the limit, with what they cost here."""
        for search in self._proposing:
            for candidate in search.below(limit):
                layout = _Strings.of(candidate.mesh, candidate.rules)
                if layout not in tried and layout.effect() not in tried:
                    yield candidate.cost, layout
                    break

    def bound(self) -> float:
        """Seconds that no layout is below that is missing because time was over."""
        return min((search.search.bound for search in self._proposing), default=math.inf)

    def why_nothing(self) -> str:
        """Why no layout of this graph lowers; "" where one does."""
        if not self.problem and next(iter(self._proposing[0]), None) is None:
            return self._proposing[0].why_nothing()
        return self.problem


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A layout on the graph that the program built for it.

    Attributes:
      cost: what it costs there; its `problem` says why it does not lower.
      graph: of that structure; None where the program refuses the layout.
    """

    cost: LayoutCost
    graph: _SearchedGraph | None


@dataclasses.dataclass
class _Build:
    """A graph that the program built, which stands for all layouts about which it would see the same.

    Attributes:
      built: the graph.
      graph: of its structure.
      verifier: lowers it; None where `graph` is of this very build.
    """

    built: BuiltGraph
    graph: _SearchedGraph
    verifier: Verifier | None


class _Trials:
    """Layouts, each tried on its own graph.

    Attributes:
      trials: what was tried.
      graphs: the first graph of every structure.
      builds: how often the program was called.
    """

    def __init__(self, program: Program, first: BuiltGraph, request: Request) -> None:
        self.program, self.request = program, request
        self.trials: dict[_Strings, _Trial] = {}
        graph = _SearchedGraph(first, request, first=True)
        self.graphs = [graph]
        self._built = [_Build(first, graph, None)]
        self.builds = 1

    def _build(self, layout: _Strings) -> _Build:
        """The graph for a layout: one at hand, if the program saw nothing else there; otherwise the program is called,
        and the search of its graph prepared if it is of a new structure.

        Raises:
          InfeasibleError: the program refuses the layout.
        """
        parsed = layout.parsed()
        for known in self._built:
            if known.built.reads is not None and known.built.reads.same_for(*parsed, layout):
                return known
        self.builds += 1
        self.request.say(f"building the graph for {layout.mesh_shape}")
        try:
            built = self.program.build(parsed)
        except Exception as error:  # whatever a program says to a layout that it does not take
            what = " ".join(str(error).split())[:300]
            what = what if isinstance(error, PaseError) else f"{type(error).__name__}: {what}"
            raise InfeasibleError(f"the program refuses it ({what})") from error
        graph = next((graph for graph in self.graphs if graph.built.has_structure_of(built)), None)
        if graph is None:
            graph = _SearchedGraph(built, self.request, first=False)
            self.graphs.append(graph)
        build = _Build(built, graph, None if graph.built is built
                       else Verifier(built.graph, built.outputs, self.request.memo))
        self._built.append(build)
        return build

    def try_layout(self, layout: _Strings, *, own: bool = False, given: bool = False) -> None:
        """Costs a layout on the graph that is built for it, and lowers it there.

        Args:
          layout: the layout.
          own: it is the program's own.
          given: the caller wrote it.

        Raises:
          UsageError: of one that is given: it names no dim of that graph. Others do not lower then.
        """
        if layout in self.trials:
            return
        try:
            layout.parsed()
        except UsageError:  # no string gives it, and programs are called with strings
            self.trials[layout] = _Trial(LayoutCost(
                "", *layout, 0.0, {}, {}, "layout rules cannot mention the name of one of its dims"), None)
            return
        try:
            with tf.Graph().as_default():
                build = self._build(layout)
                search = build.graph.search
                cost = (search.judge_own(*layout.parsed(), build.verifier) if own
                        else search.judge("", *layout.parsed(), build.verifier))
                # What an own layout says of dims that no tensor has is left out, unless the program looks at it.
                told, reads = _Strings(cost.mesh_shape, cost.layout_rules), build.built.reads
                if reads is not None and not reads.same_for(*told.parsed(), told):
                    cost = dataclasses.replace(cost, layout_rules=layout.rules)
                self.trials[layout] = _Trial(cost, build.graph)
        except (InfeasibleError, UsageError) as error:
            if given and isinstance(error, UsageError):
                raise
            self.trials[layout] = _Trial(LayoutCost("", *layout, 0.0, {}, {}, str(error)), None)

    def cost(self, layout: _Strings, name: str) -> LayoutCost:
        """What a layout that was tried costs."""
        return dataclasses.replace(self.trials[layout].cost, name=name)

    def _satisfies(self, layout: _Strings) -> bool:
        """Whether a layout lowers and is what the caller asked for."""
        return self.request.allows(self.trials[layout].cost)

    def why_too_large(self) -> str:
        """What the lightest of the layouts needs that lower but do not fit the memory; "" without any."""
        lowering = [trial.cost for trial in self.trials.values() if not trial.cost.problem]
        if not lowering:
            return ""
        least = min(lowering, key=lambda cost: cost.memory_bytes)
        problem = self.request.too_large(least.memory_bytes)
        return problem and (f"{self.request.name}: {problem}, the least of the {len(lowering)} layouts that were tried "
                            f"({least.mesh_shape}, {least.layout_rules or 'no rules'}); take more devices, a smaller "
                            "batch, or a higher memory limit (none lifts it)")

    def usable(self) -> list[_Strings]:
        """The layouts that satisfy the caller, cheapest first."""
        return sorted(filter(self._satisfies, self.trials), key=lambda layout: self.trials[layout].cost.seconds)

    def best(self) -> float:
        """Seconds of the cheapest layout that satisfies the caller; infinite without one."""
        return min((self.trials[layout].cost.seconds for layout in self.usable()), default=math.inf)

    def promises(self, layout: _Strings) -> bool:
        """Whether a layout costs less than the best one on any of the graphs at hand."""
        best = self.best() * (1 - 1e-9)
        return any(graph.search.seconds_of(*layout.parsed()) < best for graph in self.graphs)

    def cheapest_candidate(self, limit: float) -> tuple[float, _Strings] | None:
        """The cheapest layout of any graph that was not tried, if it costs less than the limit there."""
        # With other names of its axes a layout that was of no use may be what the caller wants, or the program takes.
        tried: set[Hashable] = {*self.trials, *(layout.effect() for layout in self.usable())}
        return min((candidate for graph in self.graphs for candidate in graph.candidates(tried, limit)),
                   key=lambda candidate: candidate[0], default=None)

    def try_candidates(self) -> float:
        """Tries candidates until none promises to be better; returns what no layout of a graph that was built can be
        below."""
        last, most = self.builds + _CANDIDATES, len(self.trials) + _TRIALS
        while True:
            best = self.best()
            # Of equals the first is as good.
            candidate = self.cheapest_candidate(best * (1 - 1e-9))
            missing = min(graph.bound() for graph in self.graphs)
            if candidate is None:
                return min(best, missing)
            if self.builds >= last or len(self.trials) >= most or self.request.expired():
                return min(candidate[0], missing)
            self.try_layout(candidate[1])


def find_layout_of_program(program: Program, first: BuiltGraph, request: Request) -> Layout:
    """Finds the layout of a program whose graph may depend on it (microbatches, expert groups, imported slices).

    The layouts to compare with, data parallelism, and where these have different graphs the batch on one of two axes,
    if that costs less than the best so far on any of the graphs at hand, and dims of blocks over the axes, are the
    starting points; candidates follow (see above). The best of all is returned.

    Args:
      program: builds a graph for a layout.
      first: what it built first, for its own layout or for none.
      request: what the caller asks for.

    Raises:
      InfeasibleError: no layout lowers.
    """
    trials = _Trials(program, first, request)
    (first_graph,) = trials.graphs
    compared = [_Strings.of(*layout) for layout in request.compare]
    parallel = first_graph.search.data_parallel()
    data_parallel = None if parallel is None else _Strings.of(*parallel)
    own = None if request.own is None else _Strings.of(*request.own)
    if own is not None:
        trials.try_layout(own, own=True)
    for layout in compared:
        trials.try_layout(layout, given=True)
    if data_parallel is not None:
        trials.try_layout(data_parallel)
    if len(trials.graphs) > 1 and parallel is not None and not request.expired():
        for layout in _batch_on_one_of_two_axes(next(iter(parallel[1])), request):
            if trials.promises(layout):
                trials.try_layout(layout)
    for layout in _blocks_over_axes(first_graph.search, first, request):
        if request.expired() or trials.builds >= _CANDIDATES:
            break
        trials.try_layout(layout)
    bound = trials.try_candidates()
    if not trials.usable() and math.isfinite(bound):
        # Time or patience was over before one was found: what is fixed, and nothing else, may be the answer.
        trials.try_layout(_Strings.of(first_graph.search.meshes[0], {
            dim: axis for dim, axis in request.fixed.items() if axis is not None}))
        bound = trials.try_candidates()
    usable = trials.usable()
    if not usable:
        if request.expired():
            raise InfeasibleError(f"{request.name}: no layout was found within the time limit; give more")
        alone = len(trials.graphs) == 1 or all(graph.problem for graph in trials.graphs)
        why = (first_graph.why_nothing() if alone else "") or trials.why_too_large()
        raise InfeasibleError(why or f"{request.name}: every layout found changes the graph into one that does not "
                                     "lower under it; fix the mesh shape")
    best = trials.trials[usable[0]]
    assert best.graph is not None  # it lowers there
    if first.reads is not None and not first.reads.answers and not first_graph.problem:
        first_graph.search.check_split(best.cost)  # of other graphs, built or not, other dims may divide
    gap = gap_above(bound if request.searched(best.cost) else 0.0, best.cost.seconds)
    notes = (f"note: the graph depends on its layout; this is the best of {len(usable)} layouts whose graphs were "
             "built",) if gap > 1e-9 else ()
    unknown = [f"note: {note}" for (shape, rules), layout in zip(request.compare, compared, strict=True)
               for note in (trials.trials[layout].graph or first_graph).search.unknown_dims(shape, rules)]
    given = tuple(trials.cost(layout, f"given {number}") for number, layout in enumerate(compared, 1))
    named = ((data_parallel, "data parallel"), (own, "own"))
    asked = [*(trials.cost(layout, name) for layout, name in named if layout), *given]
    return Layout(
        best=trials.cost(usable[0], "best"), graph_name=request.name, devices=request.devices,
        machine_name=request.machine.name, machine_source=request.machine.source,
        device_bytes=request.machine.memory_bytes,
        data_parallel=trials.cost(data_parallel, "data parallel") if data_parallel else None,
        own=trials.cost(own, "own") if own else None,
        compared=given,
        alternatives=_alternatives(trials, {usable[0], *compared, *filter(None, (own, data_parallel))}),
        search={"seconds": best.graph.search.seconds, "export_seconds": best.graph.search.export_seconds,
                "optimal": gap <= 1e-9, "gap": gap, "builds": trials.builds, "graphs": len(trials.graphs),
                **best.graph.search.sizes()},
        notes=(*notes, *best.graph.search.assumptions(), *best.graph.search.of_program(asked),
               *best.graph.search.idle(best.cost), *best.graph.search.per_layer(best.cost), *unknown),
        variables=best.graph.search.variables, _search=best.graph.search.search)


def _batch_on_one_of_two_axes(batch: str, request: Request) -> list[_Strings]:
    """Starting points: programs that count groups or microbatches by the batch's axis build a graph for each."""
    if not expressible(batch):
        return []
    if request.mesh is not None:
        return [_Strings(str(request.mesh), f"{batch}:{axis}") for axis, size in request.mesh.axes if size > 1]
    return [_Strings(f"rows:{rows};cols:{request.devices // rows}", f"{batch}:rows")
            for rows in range(2, request.devices) if request.devices % rows == 0]


def _blocks_over_axes(search: GraphSearch, first: BuiltGraph, request: Request) -> list[_Strings]:
    """Starting points: a dim that the program looks at, of size 1 where it is not split, may be of as many blocks as
    there are devices for them. No graph at hand has a layout that splits it otherwise.

    Args:
      search: of the first graph.
      first: that graph.
      request: what the caller asks for.
    """
    if first.reads is None:
        return []
    units = set(search.dims_of_size(first.reads.parts))
    looked_at = {about for kind, about in first.reads.answers if kind in ("axis", "parts")}
    everything = ("text", "layout") in first.reads.answers
    # Beside its whole size, too: beam search has the vocabulary in as many parts as it is split.
    dims = [dim for dim in search.dims_of_size(first.reads.parts, alone=False)
            if dim in looked_at or (everything and dim in units)]
    meshes = [request.mesh] if request.mesh else [
        MeshShape((("rows", rows), ("cols", request.devices // rows))) if rows < request.devices
        else MeshShape((("rows", rows),)) for rows in range(2, request.devices + 1) if request.devices % rows == 0]
    found: list[_Strings] = []
    for mesh in sorted(meshes, key=lambda mesh: len(mesh.axes)):
        axes = [axis for axis, size in mesh.axes if size > 1]
        for chosen in itertools.combinations(dims, min(len(axes), len(dims))):
            found.append(_Strings.of(mesh, dict(zip(chosen, axes, strict=False))))
    return found if dims else []


def _alternatives(trials: _Trials, shown: set[_Strings]) -> tuple[LayoutCost, ...]:
    """The next best layouts that were tried; of a graph that depends on no layout also those that were not."""
    usable = trials.usable()
    others = [trials.trials[layout].cost for layout in usable if layout not in shown]
    if len(trials.graphs) == 1:
        (graph,) = trials.graphs
        known = {layout.effect() for layout in usable}
        more = (graph.search.judge("", candidate.mesh, candidate.rules)
                for candidate in graph.search.candidates(1 + trials.request.alternatives)
                if _Strings.of(candidate.mesh, candidate.rules).effect() not in known)
        others += [cost for cost in more if not cost.problem]
    others.sort(key=lambda cost: cost.seconds)
    return tuple(dataclasses.replace(cost, name=f"next best {number}")
                 for number, cost in enumerate(others[:trials.request.alternatives], 1))
