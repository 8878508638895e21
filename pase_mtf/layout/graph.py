"""The layouts of one graph: in order of their cost, and what any of them costs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from pase_mtf.compat import mtf
from pase_mtf.errors import InfeasibleError, UsageError, nearest
from pase_mtf.layout.costs import LayoutCosts
from pase_mtf.layout.exports import Exports
from pase_mtf.layout.layout import LayoutCost, LayoutReport
from pase_mtf.layout.legality import Problem, StockLegality
from pase_mtf.layout.own_classes import own_class_notes
from pase_mtf.layout.request import Request
from pase_mtf.layout.search import Candidate, Search
from pase_mtf.layout.space import MeshShape, expressible, mesh_shapes, parse_mesh_shape, parse_rules, rules_text
from pase_mtf.layout.verify import Verifier
from pase_mtf.operations.registry import rule_of
from pase_mtf.search.budget import Budget
from pase_mtf.strategy.devices import devices_text, fuller_devices, useful_devices
from pase_mtf.strategy.experts import batch_dim
from pase_mtf.strategy.find import least_seconds

__all__ = ["GraphSearch"]

_UNKNOWN = "is not known to be legal"
# Of a number that is told in a note: within a memory limit, what is left of the gap can take longer than all the rest.
_NOTE_GAP = 0.04


class GraphSearch:
    """The layouts of one graph.

    Attributes:
      exports: what the graph is exported as.
      exported: that with what stock Mesh-TF can split.
      variables: name -> the names of its dims, of every variable of the graph.
      search: goes through its layouts.
      meshes: the mesh shapes that compete.
      export_seconds, seconds: what exporting and searching (so far) took.
    """

    def __init__(self, graph: mtf.Graph, outputs: Iterable[mtf.Tensor], request: Request, *,
                 exports: Exports | None = None, rebuilt: bool = False,
                 elsewhere: Callable[[MeshShape, Mapping[str, str]], bool] = lambda shape, rules: False) -> None:
        """Exports the graph and prepares its search.

        Args:
          graph: of Mesh-TF.
          outputs: tensors that the program exports.
          request: what the layouts have to satisfy.
          exports: what the graph is exported as, if some of it is at hand.
          rebuilt: what is found is a candidate for which the graph will be built anew: slices that it imports will be
            laid out as the layout says, and whether it lowers will be seen then.
          elsewhere: says of a layout that another graph will be built for it: whether it lowers will be seen there.

        Raises:
          UsageError: what is fixed does not fit the graph or the mesh.
          InfeasibleError: what is fixed does not lower.
        """
        start = time.perf_counter()
        if not graph.operations:
            raise InfeasibleError(f"{request.name}: the graph has no operations; build the model before searching")
        self.request = request
        self.variables = {variable.name: tuple(variable.shape.dimension_names) for variable in graph.all_variables}
        request.say(f"export of {len(graph.operations):,} operations")
        self.exports = exports or Exports(graph, request)
        self.exported = self.exports.stock
        self.export_seconds = time.perf_counter() - start
        self._random = list(_random_operations(graph.operations))
        start = time.perf_counter()
        outputs = list(outputs)
        request.say("which layouts are legal")
        self._legality = StockLegality(graph, outputs, request.devices, rebuilt=rebuilt,
                                       alike=request.memo.alike)
        _keep_together(self._legality, request)
        costs = LayoutCosts(self.exported, request.machine, self._legality)
        named = tuple(dict.fromkeys(axis for axis in request.fixed.values() if axis is not None))
        meshes = (request.mesh,) if request.mesh else mesh_shapes(
            request.devices, request.machine, named, ordered=self._legality.order_tells)
        self.meshes = _meshes_for_fixed(meshes, request.fixed, self._legality)
        self._verifier = Verifier(graph, outputs, request.memo)
        self._verified: dict[Hashable, Problem | None] = {}
        self.search = Search(
            costs, self.meshes, request.fixed, request.memory_limit,
            lambda shape, rules: None if rebuilt or elsewhere(shape, rules) else self._verify(shape, rules),
            Budget(request.deadline))
        self._found: list[Candidate] = []
        self.seconds = time.perf_counter() - start

    def __iter__(self) -> Iterator[Candidate]:
        """The layouts that lower, cheapest first; they are searched for as far as they are asked for."""
        return self.below(math.inf)

    def below(self, limit: float) -> Iterator[Candidate]:
        """Those that cost less than the limit, in seconds; costlier ones are not even lowered."""
        for number in itertools.count():
            if len(self._found) <= number:
                start = time.perf_counter()
                found = self.search.next_below(limit)
                self.seconds += time.perf_counter() - start
                if found is None:
                    return
                self._found.append(found)
            if self._found[number].cost >= limit:
                return
            yield self._found[number]

    def candidates(self, count: int) -> list[Candidate]:
        """The `count` cheapest layouts, cheapest first; fewer where there are no more."""
        return list(itertools.islice(self, count))

    def _verify(self, shape: MeshShape, rules: Mapping[str, str]) -> Problem | None:
        """What goes wrong when the graph is lowered under a layout, None if nothing does."""
        # The names of axes make no difference.
        key = shape.sizes, tuple(sorted((dim, shape.names.index(axis)) for dim, axis in rules.items()))
        if key not in self._verified:
            self.request.say(f"lowering {shape}, to see")
            self._verified[key] = self._verifier.problem(shape, rules)
            self.request.say("search")
        return self._verified[key]

    def cost(self, label: str, shape: MeshShape, rules: Mapping[str, str], problem: str = "") -> LayoutCost:
        """What a layout costs."""
        costs, axis_of = self.search.costs, {dim: shape.names.index(axis) for dim, axis in rules.items()}
        parts = costs.parts(shape, axis_of)
        return LayoutCost(label, str(shape), rules_text(rules), sum(parts.values()), parts,
                          costs.memory(shape, axis_of), problem)

    def seconds_of(self, shape: MeshShape, rules: Mapping[str, str]) -> float:
        """What a layout costs, in seconds a step."""
        return self.search.costs.total(shape, {dim: shape.names.index(axis) for dim, axis in rules.items()})

    def check_given(self, shape: MeshShape, rules: Mapping[str, str]) -> None:
        """Refuses a layout none of whose rules is for a dim of the graph.

        Raises:
          UsageError: names the first of them.
        """
        unknown = self.unknown_dims(shape, rules)
        if unknown and len(unknown) == len(rules):
            raise UsageError(unknown[0])

    def judge(self, label: str, shape: MeshShape, rules: Mapping[str, str],
              verifier: Verifier | None = None) -> LayoutCost:
        """What any layout costs, and why it does not lower if it does not.

        Args:
          label: what it is, for people.
          shape, rules: the layout.
          verifier: lowers another graph of the same structure, and that one is what has to lower.

        Raises:
          UsageError: the rules name no dim that the graph has.
        """
        self.check_given(shape, rules)
        # What no string can say of dims that are not there stands in a note (`unknown_dims`).
        rules = {dim: axis for dim, axis in rules.items() if dim in self._legality.sizes or expressible(dim)}
        axis_of = {dim: shape.names.index(axis) for dim, axis in rules.items() if dim in self._legality.sizes}
        problem = self._legality.problem(axis_of, shape.sizes) or (
            self._verify(shape, rules) if verifier is None else verifier.problem(shape, rules))
        cost = self.cost(label, shape, rules, str(problem or ""))
        return dataclasses.replace(cost, known=problem is None or problem.known)

    def judge_own(self, shape: MeshShape, rules: Mapping[str, str], verifier: Verifier | None = None) -> LayoutCost:
        """What the program's own layout costs. It is lowered before anybody calls it illegal: where our rules know too
        little of an operation class to allow it, and it lowers, it stands, and `doubt` says what is not known.

        Args:
          shape, rules: the layout; what it says about dims of other models is left out.
          verifier: as in `judge`.
        """
        rules = {dim: axis for dim, axis in rules.items() if dim in self._legality.sizes}
        cost = self.judge("own", shape, rules, verifier)
        if not cost.problem:
            return cost
        problem = self._verify(shape, rules) if verifier is None else verifier.problem(shape, rules)
        if problem is not None:
            return dataclasses.replace(cost, problem=str(problem), known=True)
        known = self._problem_of_known_classes({dim: shape.names.index(axis) for dim, axis in rules.items()}, shape)
        if known is not None:
            # What the caller wants of two dims is no operation's demand, and says nothing of values.
            why = f"it lowers, but not to the values of one device: {known}" if known.operation else str(known)
            return dataclasses.replace(cost, problem=why, known=True)
        return dataclasses.replace(cost, problem="", doubt=cost.problem)

    def _problem_of_known_classes(self, axis_of: Mapping[str, int], shape: MeshShape) -> Problem | None:
        """Why a layout is not legal, but for what only the rules of unknown operation classes forbid."""
        everything = self._legality.whole
        self._legality.whole = {dim: problem for dim, problem in everything.items()
                                if problem.known}
        try:
            return self._legality.problem(axis_of, shape.sizes)
        finally:
            self._legality.whole = everything

    def unknown_dims(self, shape: MeshShape, rules: Mapping[str, str]) -> list[str]:
        """Of every rule that names no dim of the graph, what a person should know. Rules of a whole project name dims
        of many models."""
        known = [name for name in self._legality.sizes if not name.startswith("_")]
        return [f"layout {shape};{rules_text(rules)}: {dim!r} is no dim of the graph; {nearest(dim, known)}"
                for dim in rules if dim not in self._legality.sizes]

    def data_parallel(self) -> tuple[MeshShape, dict[str, str]] | None:
        """The batch over all devices; None where no dim can be called the batch."""
        try:
            return MeshShape((("all", self.request.devices),)), {batch_dim(self.exported): "all"}
        except InfeasibleError:
            return None

    def dims_of_size(self, size: Callable[[str], int], *, alone: bool = True) -> list[str]:
        """Names of the dims that have the size which is given for their name, as their only one, or (not `alone`) among
        others."""
        return [name for name, sizes in self._legality.sizes.items() if not name.startswith("_")
                and (set(sizes) == {size(name)} if alone else size(name) in sizes)]

    def sizes(self) -> LayoutReport:
        """Of the search, for people."""
        networks = self.search.networks.values()
        return {"mesh_shapes": len(self.meshes), "dims": len(self.search.costs.dims),
                "layers": len(self.exported.layers), "vertices": max((size for size, _ in networks), default=0),
                "configurations": max((count for _, count in networks), default=0)}

    # -- why not -----------------------------------------------------------------------------------------------------
    def why_nothing(self) -> str:
        """Why there is no layout."""
        search, legality, name = self.search, self._legality, self.request.name
        if legality.hopeless:
            return (f"{name}: no layout lowers: {legality.hopeless[0]}; build the graph for {self.request.devices} "
                    "devices")
        if math.isfinite(search.bound) and self.request.expired():  # of what was not looked at nobody knows
            return f"{name}: no layout was found within the time limit; give more"
        if search.lightest is not None:
            least, mesh, axis_of = search.lightest
            rules = {dim: mesh.names[axis] for dim, axis in axis_of.items()}
            return (f"{name}: {self.request.too_large(least)}, the least that any layout needs ({mesh}, "
                    f"{rules_text(rules) or 'no rules'}); take more devices, a smaller batch, or a higher memory limit "
                    "(none lifts it)")
        if search.rejected and (unsplit := self._verify(self.meshes[0], {})) is not None:
            return (f"{name}: no layout lowers, not even where nothing is split: operation {unsplit.operation}: "
                    f"{unsplit.reason}; change the operation")
        if search.rejected and math.isfinite(search.bound):
            return (f"{name}: none of the {len(search.rejected):,} layouts that were tried lowers, and there are more: "
                    f"{search.rejected[0][1]}; change the operation or fix dims")
        if search.rejected:
            return f"{name}: no layout lowers: {search.rejected[0][1]}; change the operation or fix other dims"
        for dim, (parts, operation, reason) in legality.shards.items():
            return (f"{name}: no layout lowers: operation {operation}, dim {dim}: {reason}; give a mesh shape with an "
                    f"axis of {parts}")
        return f"{name}: no layout lowers over {self.request.devices} devices with what is fixed; fix fewer dims"

    def why_no_split(self) -> str:
        """Why no dim can be split by any axis of any mesh shape; "" if one can."""
        reasons = []
        for dim in self._legality.sizes:
            problems = [self._legality.problem_of(dim, axis, mesh.sizes) for mesh in self.meshes
                        for axis, size in enumerate(mesh.sizes) if size > 1]
            if not all(problems) and dim in self.search.costs.dims:
                return ""
            if all(problems) and not dim.startswith("_"):
                reasons.append(str(problems[-1]))
        return "; ".join(reasons[:5]) or "name the dims of its tensors"

    def check_split(self, best: LayoutCost) -> None:
        """Refuses an answer that splits nothing where nothing can be split: it is no choice.

        Raises:
          InfeasibleError: names dims, and why they cannot be split.
        """
        if self.request.devices > 1 and not best.layout_rules and (problem := self.why_no_split()):
            raise InfeasibleError(f"{self.request.name}: no dim can be split over {self.request.devices} devices; "
                                  f"{problem}")

    def of_program(self, costs: Iterable[LayoutCost]) -> tuple[str, ...]:
        """What trying the program's own Operation classes showed, which of these layouts were kept out by those that
        could not be tried, and whether the losses of two layouts, and those of our lowering, can be compared."""
        return (*own_class_notes(self._legality.unknown, costs), *_noise_note(self._random),
                *_twice_note(self._legality.twice))

    def notes(self, best: Candidate) -> tuple[str, ...]:
        """Cheaper layouts that do not lower, and what is assumed of the graph."""
        notes: dict[tuple[str, tuple[str, ...]], str] = {}
        for candidate, problem in self.search.rejected:
            if candidate.cost <= best.cost * (1 + 1e-9):
                notes.setdefault((problem.operation, problem.dims), (
                    f"note: {candidate.mesh} with {rules_text(candidate.rules)} came first "
                    f"({1e3 * candidate.cost:.3f} ms) but {'does not lower' if problem.known else _UNKNOWN}: "
                    f"{problem}; this is the next best"))
        return (*tuple(notes.values())[:3], *self.assumptions())

    def idle(self, best: LayoutCost) -> tuple[str, ...]:
        """How many devices do work of their own under a layout, and how many could; nothing where all of them do."""
        mesh = parse_mesh_shape(best.mesh_shape)
        rules = parse_rules(best.layout_rules, mesh)
        configurations = self.search.costs.of_layers(
            mesh, {dim: mesh.names.index(axis) for dim, axis in rules.items()})
        text = devices_text(mesh.devices, useful_devices(self.exported, configurations),
                            fuller_devices(self.exported, mesh.devices, configurations))
        return (f"note: {text}",) if text else ()

    def per_layer(self, best: LayoutCost) -> tuple[str, ...]:
        """Of a program with loops, what a layout per layer gains: stock Mesh-TF gives the whole body of a loop one, our
        lowering does not. Nothing for other programs, or when time is over."""
        loops = bool(self.exported.assumed) or any(  # one of unknown length is taken to run once
            operation.trips > 1 for layer in self.exported.layers for operation in layer.operations)
        if not loops or self.request.expired():
            return ()
        self.request.say("pricing loops layer by layer")
        limit = None if math.isinf(self.request.memory_limit) else self.request.memory_limit
        try:
            seconds = least_seconds(self.exports.own, self.request.devices, self.request.machine, limit, _NOTE_GAP)
        except InfeasibleError:
            return ()
        gained = best.seconds / seconds
        told = f"at least {gained:.2f} times as fast" if gained > 1.0 + _NOTE_GAP else "about as fast"
        return ("note: stock Mesh-TensorFlow gives the body of a loop one layout; with one per layer (pase_mtf.lower) "
                f"a step is predicted {1e3 * seconds:.3f} ms or less, {told}",)

    def assumptions(self) -> tuple[str, ...]:
        """What predictions rest on that is not known of the graph."""
        return tuple(f"note: {sentence}" for sentence in self.exported.assumed)


def _keep_together(legality: StockLegality, request: Request) -> None:
    """Tells the legality of a graph which dims the caller wants on one axis."""
    for names in request.together:
        for dim in names:
            if dim not in legality.sizes:
                known = [name for name in legality.sizes if not name.startswith("_")]
                raise UsageError(f"fixed {'='.join(names)}: {dim!r} is no dim of the graph; {nearest(dim, known)}")
        legality.keep_together(names, Problem("", names, "they are to share an axis"))


def _random_operations(operations: Iterable[mtf.Operation]) -> Iterator[str]:
    """Names of the operations that draw random numbers, those in loops too."""
    for operation in operations:
        rule = rule_of(operation)
        if rule.is_random:
            yield operation.name
        yield from _random_operations(rule.body(operation))


def _noise_note(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return (f"note: the program draws random numbers ({which}): stock Mesh-TensorFlow draws others under another "
            "layout, so that losses of two layouts differ by noise; pase_mtf.lower draws the same under every one",)


def _meshes_for_fixed(meshes: Sequence[MeshShape], fixed: Mapping[str, str | None],
                      legality: StockLegality) -> list[MeshShape]:
    """The mesh shapes under which what is fixed is legal by itself."""
    for dim, axis in fixed.items():
        if dim not in legality.sizes:
            known = [name for name in legality.sizes if not name.startswith("_")]
            raise UsageError(f"fixed dim {dim!r} is no dim of the graph; {nearest(dim, known)}")
        if axis is not None and not any(axis in mesh.names for mesh in meshes):
            raise UsageError(f"fixed {dim}:{axis}: no axis {axis!r} in mesh {', '.join(map(str, meshes))}")
    kept, problems = [], []
    for mesh in meshes:
        axis_of = {dim: mesh.names.index(axis) for dim, axis in fixed.items() if axis in mesh.names}
        alone = (legality.problem_of(dim, axis_of[dim], mesh.sizes) for dim in axis_of)
        in_pairs = (legality.problem_of_pair(one, axis_of[one], other, axis_of[other], mesh.sizes)
                    for one, other in itertools.combinations(axis_of, 2))
        problem = next(filter(None, itertools.chain(alone, in_pairs)), None)
        if problem is None:
            kept.append(mesh)
        else:
            problems.append(problem)
    if not kept:
        rules = ";".join(f"{dim}:{axis}" for dim, axis in fixed.items())
        raise InfeasibleError(f"what is fixed ({rules}) does not lower: {problems[0]}; fix it otherwise")
    return kept


def _twice_note(twice: Mapping[str, str]) -> tuple[str, ...]:
    if not twice:
        return ()
    (operation, through), *others = twice.items()
    more = f" (and of {len(others)} more)" if others else ""
    what = (f"an input of {operation} is made of another one, through {through}" if through
            else f"{operation} has one input twice")
    return (f"note: {what}: stock Mesh-TensorFlow counts "
            f"that way twice in its gradient{more}, on one device, too, pase_mtf.lower once; give the function a "
            "grad_function",)
