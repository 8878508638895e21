"""The operations of a graph, each read once: what the export, the lowering and the layouts need to know of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

from pase_mtf.compat import mtf
from pase_mtf.operations.nodes import Nodes, broadcast_runs
from pase_mtf.operations.registry import Rule, rule_of, splittable_dims

__all__ = ["OperationFacts", "needed_for_updates", "read_operations"]

_LAYER_OF_KIND = {"matmul": "matmul", "convolution": "convolution", "gather": "gather", "reduction": "normalize"}


@dataclasses.dataclass(frozen=True, eq=False)
class OperationFacts:
    """What is known of one operation of a graph; fields that are not explained are those of `registry.Rule`.

    Attributes:
      operation: itself.
      index: its position in `mtf.Graph.operations`.
      rule: of its class.
      is_needed: whether an assignment needs it; of a graph without assignments all are needed.
      dims: its iteration space, outputs first, then what is reduced away; anonymous dims left out.
      splittable: names of the dims that our lowering can split.
      layer: the kind of layer that it opens.
      is_anchor: whether it always opens a layer of its own.
    """

    operation: mtf.Operation
    index: int
    rule: Rule
    is_needed: bool
    kind: str
    reads: tuple[mtf.Tensor, ...]
    captures: tuple[mtf.Tensor, ...]
    assigns: tuple[tuple[mtf.Operation, mtf.Tensor], ...]
    contracted: tuple[tuple[str, ...], ...]
    dims: tuple[mtf.Dimension, ...]
    splittable: frozenset[str]
    layer: str
    is_anchor: bool
    traced: dict[Hashable, Nodes] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The operation's name, which need not be unique."""
        return str(self.operation.name)

    @property
    def role(self) -> str:
        """Of `registry.Rule`."""
        return self.rule.role(self.operation)

    @functools.cached_property
    def flops(self) -> float:
        """Of the whole, unsplit operation."""
        return 0.0 if self.kind == "none" else self.rule.flops(self.operation)

    @functools.cached_property
    def nodes(self) -> Nodes:
        """What it becomes on a device. A function of slices is traced for it, once per text and shapes."""
        if self.rule.nodes is not None:
            return self.rule.nodes(self.operation, self.traced)
        if self.kind == "pointwise" and self.operation.outputs:
            return Nodes(broadcast_runs=broadcast_runs(self.operation.outputs[0], self.operation.inputs))
        return Nodes()

    @property
    def contracts(self) -> bool:
        """Whether a split of some dim leaves partial sums."""
        return any(self.contracted)

    @property
    def sum_is_pending(self) -> bool:
        """Of `registry.Rule`."""
        return self.rule.sum_is_pending(self.operation)


def read_operations(graph: mtf.Graph) -> list[OperationFacts]:
    """Reads every operation of a graph, in its order."""
    traced: dict[Hashable, Nodes] = {}
    needed = needed_for_updates(graph.operations)
    return [_read(operation, index, is_needed, traced)
            for index, (operation, is_needed) in enumerate(zip(graph.operations, needed, strict=True))]


def _read(operation: mtf.Operation, index: int, is_needed: bool, traced: dict[Hashable, Nodes]) -> OperationFacts:
    rule = rule_of(operation)
    kind, reads = rule.kind(operation), tuple(rule.reads(operation))
    dims = {(dim.name, dim.size): dim for tensor in (*operation.outputs, *reads) for dim in tensor.shape.dims
            if not dim.name.startswith("_anonymous_")}
    return OperationFacts(
        operation=operation, index=index, rule=rule, is_needed=is_needed, kind=kind, reads=reads,
        captures=tuple(rule.captures(operation)), assigns=tuple(rule.assigns(operation)),
        contracted=tuple(rule.contracted(operation)), dims=tuple(dims.values()),
        splittable=splittable_dims(operation), layer=rule.layer or _LAYER_OF_KIND.get(kind, "pointwise"),
        is_anchor=rule.is_anchor or kind in ("matmul", "convolution"), traced=traced)


def needed_for_updates(operations: Sequence[mtf.Operation]) -> list[bool]:
    """What the assignments of a graph need; the gradient of the input image, say, is needed by none.

    Args:
      operations: of the graph, in its order.

    Returns:
      Per operation whether an assignment needs it; of a graph without assignments all are needed.
    """
    rules = [rule_of(operation) for operation in operations]
    assigns = [bool(rule.assigns(operation)) for rule, operation in zip(rules, operations, strict=True)]
    if not any(assigns):
        return [True] * len(operations)
    needed: set[int] = set()
    found = []
    for operation, rule, is_assignment in zip(reversed(operations), reversed(rules), reversed(assigns), strict=True):
        found.append(is_assignment or any(id(tensor) in needed for tensor in operation.outputs))
        if found[-1]:
            read = [*operation.inputs, *rule.reads(operation), *rule.captures(operation)]
            for dependency in rule.waits_for(operation):
                read += dependency.outputs if isinstance(dependency, mtf.Operation) else [dependency]
            needed.update(map(id, read))
    return found[::-1]
