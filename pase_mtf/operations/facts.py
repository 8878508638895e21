"""The operations of a graph, each read once: what the export, the lowering and the layouts need to know of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.alike import Alike
from pase_mtf.operations.flow import Flow, all_operations
from pase_mtf.operations.nodes import Nodes, broadcast_runs
from pase_mtf.operations.registry import Rule, elements, read_by, rule_of, splittable_dims

__all__ = ["ASSUMED_TRIPS", "OperationFacts", "fed_by", "needed_for_updates", "read_operations", "trains"]

ASSUMED_TRIPS = 1
"""Iterations of a loop whose condition only running the program tells."""

_LAYER_OF_KIND = {"matmul": "matmul", "convolution": "convolution", "gather": "gather", "reduction": "normalize"}


@dataclasses.dataclass(eq=False)  # frozen ones take three times as long to make, and there are tens of thousands
class OperationFacts:
    """What is known of one operation of a graph; fields that are not explained are those of `registry.Rule`.

    Attributes:
      operation: itself.
      name: its name, which need not be unique.
      index: its position in `all_operations`: that in `mtf.Graph.operations`, if no loop stands before it.
      rule: of its class.
      is_needed: whether an assignment needs it, or the program that the graph is of (`needed_for_updates`).
      outputs: what it makes.
      sources: what it reads, by the tensors that operations before it made (`Flow.origin`).
      makers: of each of `sources`, the index of the operation that makes it; -1 where none of the graph does.
      loops: the loops that it is in, outermost first.
      trips: how often a step runs it: the product of the iterations of its loops, `ASSUMED_TRIPS` of those that are
        not known.
      iterations: of a loop; None where they are not known. 1 of anything else.
      dims: its iteration space, outputs first, then what is reduced away; anonymous dims left out.
      splittable: names of the dims that our lowering, or stock Mesh-TF, can split.
      together: dims that stock Mesh-TF has on one axis; empty where our lowering is meant.
      layer: the kind of layer that it opens.
      is_anchor: whether it always opens a layer of its own.
      like: the first of the operations that are alike; None where there is none before it.
    """

    operation: mtf.Operation
    name: str
    index: int
    rule: Rule
    is_needed: bool
    kind: str
    outputs: tuple[mtf.Tensor, ...]
    reads: tuple[mtf.Tensor, ...]
    sources: tuple[mtf.Tensor, ...]
    makers: tuple[int, ...]
    loops: tuple[mtf.Operation, ...]
    trips: int
    iterations: int | None
    assigns: tuple[tuple[mtf.Operation, mtf.Tensor], ...]
    contracted: tuple[tuple[str, ...], ...]
    dims: tuple[mtf.Dimension, ...]
    splittable: frozenset[str]
    together: Mapping[str, str]
    layer: str
    is_anchor: bool
    traced: dict[Hashable, Nodes] = dataclasses.field(repr=False)
    like: OperationFacts | None = dataclasses.field(default=None, repr=False)

    @property
    def role(self) -> str:
        """Of `registry.Rule`."""
        return self.rule.role(self.operation)

    @functools.cached_property
    def flops(self) -> float:
        """Of the whole, unsplit operation."""
        if self.like is not None:
            return self.like.flops
        if self.kind == "none" or (self.rule.nodes is not None and self.rule.flops is elements
                                   and not self.nodes.traffic):  # a function that hands on what it is given
            return 0.0
        return self.rule.flops(self.operation) + self._multiplied

    @property
    def _multiplied(self) -> float:
        """FLOPs of what a function of slices multiplies; 0 where somebody has told what it computes."""
        return self.nodes.flops if self.rule.nodes is not None and self.rule.flops is elements else 0.0

    @functools.cached_property
    def computes(self) -> str:
        """What it is on a device: its kind; of a function of slices that of its products, where they are the most of
        it."""
        most = self.kind == "pointwise" and 2.0 * self._multiplied > self.flops
        return self.nodes.multiplies if most else self.kind

    @functools.cached_property
    def nodes(self) -> Nodes:
        """What it becomes on a device. A function of slices is traced for it, once per text and shapes."""
        if self.like is not None:
            return self.like.nodes
        if self.rule.nodes is not None:
            return self.rule.nodes(self.operation, self.traced)
        if self.kind == "pointwise" and self.outputs:
            return Nodes(broadcast_runs=broadcast_runs(self.outputs[0], self.operation.inputs))
        return Nodes()

    @property
    def starts(self) -> tuple[mtf.Tensor, ...]:
        """What a loop begins with, which it needs whole; empty of anything else."""
        loop = self.rule.loop(self.operation)
        return tuple([variable.start for variable in loop.variables]) if loop else ()

    @property
    def contracts(self) -> bool:
        """Whether a split of some dim leaves partial sums."""
        return any(self.contracted)

    @property
    def sum_is_pending(self) -> bool:
        """Of `registry.Rule`."""
        return self.rule.sum_is_pending(self.operation)


def read_operations(graph: mtf.Graph, flow: Flow | None = None, alike: Alike | None = None, *,
                    stock: bool = False) -> list[OperationFacts]:
    """Reads every operation of a graph, in its order, those in a loop before the loop.

    Args:
      graph: of Mesh-TF.
      flow: of the graph, if it is at hand.
      alike: numbers of its operations, if some are at hand.
      stock: what stock Mesh-TF can split counts, under layouts under which it lowers, not what our lowering can.
    """
    flow = flow or Flow(graph)
    operations = all_operations(graph)
    reader = _Reader(flow, alike or Alike(), stock)
    return [reader.read(operation, index, is_needed) for index, (operation, is_needed)
            in enumerate(zip(operations, needed_for_updates(operations), strict=True))]


class _Reader:
    """Reads operations; what was found out for one is known for the next."""

    def __init__(self, flow: Flow, alike: Alike, stock: bool) -> None:
        self._flow, self._alike, self._stock = flow, alike, stock
        self._traced: dict[Hashable, Nodes] = {}
        self._iterations: dict[mtf.Operation, int | None] = {}  # of loops
        self._maker: dict[mtf.Tensor, int] = {}
        # By the number that operations which are alike have in common.
        self._known: dict[int, tuple[OperationFacts, _Common]] = {}

    def _iterations_of(self, loop: mtf.Operation) -> int | None:
        if loop not in self._iterations:
            self._iterations[loop] = rule_of(loop).trips(loop)
        return self._iterations[loop]

    def _trips_of(self, loop: mtf.Operation) -> int:
        iterations = self._iterations_of(loop)
        return ASSUMED_TRIPS if iterations is None else iterations

    def read(self, operation: mtf.Operation, index: int, is_needed: bool) -> OperationFacts:
        """The facts of an operation; of one that is like another before it, most are those of the other."""
        number = self._alike.number(operation)
        like, common = self._known.get(number, (None, None)) if number is not None else (None, None)
        rule = rule_of(operation) if like is None else like.rule
        outputs, reads, loops = tuple(operation.outputs), tuple(rule.reads(operation)), self._flow.loops_of[operation]
        common = common or _common(operation, rule, outputs, reads, self._stock)
        sources = tuple(map(self._flow.origin, reads))
        self._maker.update(dict.fromkeys(outputs, index))
        fact = OperationFacts(
            operation=operation, name=str(operation.name), index=index, rule=rule, is_needed=is_needed,
            outputs=outputs, reads=reads, sources=sources, loops=loops,
            makers=tuple([self._maker.get(source, -1) for source in sources]),
            trips=math.prod([self._trips_of(loop) for loop in loops]) if loops else 1,
            iterations=self._iterations_of(operation) if rule.loop(operation) else 1,
            assigns=tuple(rule.assigns(operation)), traced=self._traced, like=like, kind=common.kind,
            contracted=common.contracted, dims=common.dims, splittable=common.splittable,
            together=common.together, layer=common.layer, is_anchor=common.is_anchor)
        if number is not None:
            self._known.setdefault(number, (fact, common))
        return fact


class _Common(NamedTuple):
    """Fields of `OperationFacts` that operations which are alike have in common."""

    kind: str
    contracted: tuple[tuple[str, ...], ...]
    dims: tuple[mtf.Dimension, ...]
    splittable: frozenset[str]
    together: Mapping[str, str]
    layer: str
    is_anchor: bool


def _common(operation: mtf.Operation, rule: Rule, outputs: Sequence[mtf.Tensor],
            reads: Sequence[mtf.Tensor], stock: bool) -> _Common:
    kind = rule.kind(operation)
    # What goes round in a loop and comes out of it is laid out as those lay it out that make it, not by the loop.
    tensors = () if rule.loop(operation) else (*outputs, *reads)
    dims = {(dim.name, dim.size): dim for tensor in tensors for dim in tensor.shape.dims
            if not dim.name.startswith("_anonymous_")}
    splittable = splittable_dims(operation, stock=stock)
    return _Common(kind, tuple(rule.contracted(operation)), tuple(dims.values()), splittable,
                   rule.together(operation) if stock else {}, rule.layer or _LAYER_OF_KIND.get(kind, "pointwise"),
                   rule.is_anchor or kind in ("matmul", "convolution"))


def trains(operations: Sequence[mtf.Operation]) -> bool:
    """Whether an assignment sets a variable that is trained. Where none does (moving averages, a count of steps),
    gradients, if there are any, are for somebody outside of the graph.

    Args:
      operations: of a graph, those in its loops, too.
    """
    trained = set(map(id, operations[0].graph.trainable_variables)) if operations else set()
    return any(id(variable) in trained for operation in operations
               for variable, _ in rule_of(operation).assigns(operation))


def needed_for_updates(operations: Sequence[mtf.Operation]) -> list[bool]:
    """What the assignments of a graph need; the gradient of the input image, say, is needed by none.

    Args:
      operations: of the graph, in its order, those in a loop before the loop.

    Returns:
      Per operation whether an assignment needs it; all, where none sets what is trained (`trains`).
    """
    if not trains(operations):
        return [True] * len(operations)
    rules = [rule_of(operation) for operation in operations]
    assigns = [bool(rule.assigns(operation)) for rule, operation in zip(rules, operations, strict=True)]
    needed: set[int] = set()
    found = []
    for operation, rule, is_assignment in zip(reversed(operations), reversed(rules), reversed(assigns), strict=True):
        found.append(is_assignment or any(id(tensor) in needed for tensor in operation.outputs)
                     or _assigns_within(operation))
        if found[-1]:
            # A copied function with a gradient of its own lists as inputs what was computed again, and reads none.
            read = read_by(operation)
            loop = rule.loop(operation)
            read += [tensor for tensor, _ in loop.accumulators] if loop else []
            for dependency in rule.waits_for(operation):
                read += dependency.outputs if isinstance(dependency, mtf.Operation) else [dependency]
            needed.update(map(id, read))
    return found[::-1]


def _assigns_within(operation: mtf.Operation) -> bool:
    """Whether a loop, or one in it, has an assignment in it."""
    return any(bool(rule_of(inner).assigns(inner)) or _assigns_within(inner)
               for inner in rule_of(operation).body(operation))


def fed_by(facts: Sequence[OperationFacts], step: tf.Tensor | None = None) -> dict[mtf.Operation, int]:
    """Operation -> what steps may be fed that it is made of, a bit each: imported tensors, slices and scalars that are
    made of more than constants; and the assignments that it waits for. What functions of slices hold besides is not
    known.

    Args:
      facts: of the operations of a graph.
      step: on which the random numbers outside of loops depend, if there is one.
    """
    found: dict[mtf.Operation, int] = {}
    bit_of: dict[object, int] = {}  # of a tensor, whoever reads it: gradients multiply by a scalar once more
    for fact in facts:
        slices, loop = fact.rule.imported_slices(fact.operation), fact.rule.loop(fact.operation)
        given = (fact.rule.imported(fact.operation), step if fact.rule.is_random and not fact.loops else None,
                 *(getattr(fact.operation, name, None) for name in ("_scalar", "_on_value", "_off_value")),
                 *(getattr(fact.operation, "_kwargs", {}).values() if fact.rule.is_random else ()),
                 *(slices.to_laid_out_tensor().tensor_list if slices is not None else ()))
        bits = 0
        for x in given:
            if isinstance(x, tf.Tensor) and _may_be_fed(x):
                bits |= bit_of.setdefault(x.ref(), 1 << len(bit_of))
        behind = [facts[maker].operation for maker in fact.makers if maker >= 0]
        behind += [tensor.operation for tensor, _ in loop.accumulators] if loop else []
        for other in fact.rule.waits_for(fact.operation):
            if isinstance(other, mtf.Operation):  # an assignment: who runs what waits for it runs it, too
                bits |= bit_of.setdefault(other, 1 << len(bit_of))
            behind.append(other if isinstance(other, mtf.Operation) else other.operation)
        for operation in behind:
            bits |= found.get(operation, 0)
        found[fact.operation] = bits
    return found


def _may_be_fed(x: object) -> bool:
    """Whether a value may be made of something that steps are fed. (`tf.get_static_value` would tell TensorFlow that
    nobody may feed the constant.)"""
    nodes, seen = [x.op] if isinstance(x, tf.Tensor) else [], set[tf.Operation]()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if not node.inputs and node.type != "Const":
                return True
            nodes += [tensor.op for tensor in node.inputs]
    return False
