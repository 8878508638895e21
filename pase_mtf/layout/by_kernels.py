"""The layout of one graph whose kernels take least: layouts in the order of a price that none is below, each lowered by
Mesh-TensorFlow's own code and priced by what its kernels were measured to take, until no other can be better."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence

from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.compat import tf
from pase_mtf.cost.roofline import roofline_machine, still_true
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.layout.exports import Exports
from pase_mtf.layout.graph import GraphSearch
from pase_mtf.layout.kernels import LayoutKernels, layout_kernels
from pase_mtf.layout.layout import Layout, LayoutCost, gap_above
from pase_mtf.layout.program import BuiltGraph
from pase_mtf.layout.request import Request
from pase_mtf.layout.search import Candidate
from pase_mtf.layout.space import parse_mesh_shape, parse_rules
from pase_mtf.layout.verify import tf_graph_of
from pase_mtf.machine.kernels import Kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.operations.registry import rule_of
from pase_mtf.strategy.by_kernels import Telling
from pase_mtf.strategy.kernels_text import origin_text
from pase_mtf.strategy.measuring import measure, missing_of
from pase_mtf.strategy.search_report import KernelsReport
from pase_mtf.strategy.warm import ready

__all__ = ["check_program", "find_layout_by_kernels", "machine_of_kernels"]

_MOST = 12
"""Layouts that are lowered and priced, besides those that are asked for."""
_CERTAIN = 1e-9

_RATES = "take roofline prices, and a machine with rates, such as local or h100"
"""What to do where prices by kernels will not do: of a file of kernel times there are no others."""


def machine_of_kernels(kernels: KernelMeter | SavedKernels) -> Machine:
    """The devices, at the best rates of all kernels that are known."""
    return roofline_machine(kernels.times, kernels.devices, kernels.memory_per_device, origin_text(kernels.times.on))


def check_program(built: BuiltGraph, arguments: tuple[str, ...], name: str) -> None:
    """Refuses programs whose layouts cannot be priced by kernels.

    Raises:
      UsageError: it has loops, or its graph may depend on the layout.
    """
    if arguments:
        raise UsageError(f"{name}: its graph may depend on the layout ({', '.join(arguments)}), and measured prices "
                         f"are for one graph; {_RATES}")
    for operation in built.graph.operations:
        if rule_of(operation).loop(operation):
            raise UsageError(f"{name}: {operation.name} is a loop, whose kernels nobody knows; {_RATES}")


@contextlib.contextmanager
def _lent(graph: tf.Graph) -> Iterator[None]:
    """Makes a tf.Graph the current one, for nodes that its owner is to see nothing of: its collections, such as that of
    all variables, stay as they are."""
    kept = {name: graph.get_collection(name) for name in graph.collections}
    with graph.as_default():
        try:
            yield
        finally:
            for name in graph.collections:
                graph.get_collection_ref(name)[:] = kept.get(name, [])


class _Judge:
    """Prices layouts by their kernels, which are measured as far as the seconds go.

    Attributes:
      unknown: types of nodes whose kernels nobody knows.
      rounds: how often something was measured.
    """

    def __init__(self, built: BuiltGraph, request: Request, kernels: KernelMeter | SavedKernels, end: float) -> None:
        self._built, self._request, self._kernels, self._end = built, request, kernels, end
        self._lowered: dict[Hashable, LayoutKernels] = {}
        self._tell = Telling(request.name)
        self.unknown: set[str] = set()
        self.rounds = 0

    def expired(self) -> bool:
        """Whether nothing more is to be lowered or measured."""
        return time.perf_counter() >= self._end or self._request.expired()

    @property
    def still_true(self) -> float:
        """What fraction of a price by the request's machine is a bound by all that is known now."""
        return still_true(self._request.machine, machine_of_kernels(self._kernels))

    def effect(self, cost: LayoutCost) -> Hashable:
        """Equal for layouts that place every tensor alike."""
        mesh = parse_mesh_shape(cost.mesh_shape)
        rules = parse_rules(cost.layout_rules, mesh)
        return Candidate(0.0, mesh, {dim: mesh.names.index(axis) for dim, axis in rules.items()}).effect

    def _run(self, cost: LayoutCost) -> LayoutKernels:
        mesh, key = parse_mesh_shape(cost.mesh_shape), self.effect(cost)
        if key not in self._lowered:
            self._request.say(f"lowering {mesh}, {cost.layout_rules or 'no rules'}")
            with _lent(tf_graph_of(self._built.graph)):
                self._lowered[key] = layout_kernels(self._built.graph, self._built.outputs, mesh,
                                                    parse_rules(cost.layout_rules, mesh))
            self.unknown |= self._lowered[key].unknown
        return self._lowered[key]

    def measure(self, cost: LayoutCost) -> None:
        """Measures what is missing of the kernels of a layout, what matters most first; nothing of one that does not
        lower."""
        if cost.problem or self.expired():
            return
        counts = collections.Counter[Kernel]()
        for part in self._run(cost).parts.values():
            counts.update(part)
        missing = missing_of(self._kernels, counts)
        if not missing:
            return
        self.rounds += 1
        self._request.say(f"measuring {len(missing)} kernels")
        measure(self._kernels, missing, self._end, f"round {self.rounds}", self._tell)

    def is_measured(self, cost: LayoutCost) -> bool:
        """Whether nothing of its price is an estimate."""
        return bool(cost.problem) or all(kernel in self._kernels.times for kernel in _kernels_of([self._run(cost)]))

    def cost(self, cost: LayoutCost) -> LayoutCost:
        """The same with seconds by its kernels, as they are known now; as it is where it does not lower."""
        if cost.problem:
            return cost
        price = self._kernels.times.estimate
        parts = {part: sum(price(kernel) * count for kernel, count in counts.items())
                 for part, counts in self._run(cost).parts.items()}
        return dataclasses.replace(cost, seconds=sum(parts.values()), parts=parts)

    def report(self, best: LayoutCost) -> KernelsReport:
        """How many kernels are measured, as a strategy's search tells it."""
        times = self._kernels.times
        run, seen = _kernels_of([self._run(best)]), _kernels_of(self._lowered.values())
        failed = [f"{kernel}: {why}" for kernel, why in self._kernels.failed.items() if kernel in run]
        untraced = [*failed, *(f"{name}: its sizes are known when it runs" for name in sorted(self.unknown))]
        told: KernelsReport = {
            "of_strategy": len(run), "measured_of_strategy": sum(kernel in times for kernel in run),
            "seen": len(seen), "measured": sum(kernel in times for kernel in seen), "rounds": self.rounds,
            "seconds": round(self._kernels.spent, 1)}
        if untraced:
            told["untraced"] = untraced
        return told


def _kernels_of(lowered: Iterable[LayoutKernels]) -> set[Kernel]:
    return {kernel for found in lowered for counts in found.parts.values() for kernel in counts}


def find_layout_by_kernels(built: BuiltGraph, exported: ComputationGraph | None, request: Request,
                           kernels: KernelMeter | SavedKernels, seconds: float) -> Layout:
    """The layout of a graph whose kernels take least, of those that were looked at.

    Args:
      built: the graph, in the current tf.Graph.
      exported: what export_graph made of it, if it is at hand.
      request: what is asked for; its machine is `machine_of_kernels`.
      kernels: what kernels take; started.
      seconds: how long to lower and to measure.

    Raises:
      InfeasibleError: no layout lowers.
    """
    one = GraphSearch(built.graph, built.outputs, request, exports=Exports(built.graph, request, exported))
    ready(Telling(request.name))  # or what a first search compiles would be of these seconds
    judge = _Judge(built, request, kernels, time.perf_counter() + seconds)
    parallel = one.data_parallel()
    own = None if request.own is None else one.judge_own(*request.own)
    data_parallel = None if parallel is None else one.judge("data parallel", *parallel)
    compared = [one.judge(f"given {number}", *entry) for number, entry in enumerate(request.compare, 1)]
    asked = [cost for cost in (own, data_parallel, *compared) if cost is not None]
    usable, bound = _candidates(one, judge, [cost for cost in asked if request.allows(cost)],
                                asked)
    if not usable and math.isfinite(one.search.bound):
        # Time or patience was over before one was found: what is fixed, and nothing else, may be the answer.
        fixed = one.judge("fixed", one.meshes[0], {
            dim: axis for dim, axis in request.fixed.items() if axis is not None})
        if request.allows(fixed):
            judge.measure(fixed)
            usable = [judge.cost(fixed)]
    if not usable:
        raise InfeasibleError(one.why_nothing())
    best = usable[0]
    one.check_split(best)
    # Rules that do not lower may not even be legible.
    shown = {judge.effect(cost) for cost in (best, *asked) if not cost.problem}
    others = [cost for cost in usable if judge.effect(cost) not in shown]
    bound = min(bound, judge.still_true * one.search.bound) if request.searched(best) else 0.0
    gap = gap_above(bound, best.seconds)
    report = judge.report(best)
    return Layout(
        best=dataclasses.replace(best, name="best"), graph_name=request.name, devices=request.devices,
        machine_name=request.machine.name, machine_source=request.machine.source,
        device_bytes=request.machine.memory_bytes, data_parallel=data_parallel and judge.cost(data_parallel),
        own=own and judge.cost(own), compared=tuple(map(judge.cost, compared)),
        alternatives=tuple(dataclasses.replace(cost, name=f"next best {number}")
                           for number, cost in enumerate(others[:request.alternatives], 1)),
        search={"seconds": one.seconds, "export_seconds": one.export_seconds, "gap": gap,
                "optimal": gap <= _CERTAIN and report["of_strategy"] == report["measured_of_strategy"],
                "priced": len(usable), **one.sizes(), "kernels": report},
        notes=(*one.assumptions(), *one.of_program([*asked]), *one.idle(best),
               *(f"note: {note}" for entry in request.compare for note in one.unknown_dims(*entry))),
        variables=one.variables, _search=one.search)


def _candidates(one: GraphSearch, judge: _Judge, allowed: Sequence[LayoutCost], asked: Sequence[LayoutCost],
                ) -> tuple[list[LayoutCost], float]:
    """The layouts that were priced, cheapest first, and seconds that no layout is below.

    The first candidate is measured first, then what is asked for, then the others.

    Args:
      one: proposes layouts, in the order of what they take at least.
      judge: prices them.
      allowed: of those that are asked for, what may be the answer.
      asked: all that is asked for.
    """
    found, least = list[LayoutCost](), list[float]()
    bound = math.inf
    for candidate in one:
        best = min((judge.cost(cost).seconds for cost in found), default=math.inf)
        if found and (judge.still_true * candidate.cost >= best or len(found) >= _MOST or judge.expired()):
            bound = judge.still_true * candidate.cost
            break
        cost = one.cost("candidate", candidate.mesh, candidate.rules)
        judge.measure(cost)
        if not found:
            for other in asked:
                judge.measure(other)
        found.append(cost)
        least.append(candidate.cost)
    if not found:
        for other in asked:
            judge.measure(other)
    # What is estimated may turn out to take no more than its bound.
    bound = min([bound, *(judge.still_true * seconds for cost, seconds in zip(found, least, strict=True)
                          if not judge.is_measured(cost))])
    # Rates and efficiencies are known better now than when the first was priced.
    priced = {judge.effect(cost): judge.cost(cost) for cost in (*allowed, *found)}
    usable = sorted(priced.values(), key=lambda cost: cost.seconds)
    return usable, min(bound, usable[0].seconds) if usable else bound
