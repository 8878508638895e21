"""Which tensors a split leaves as partial sums on every device, and where their all-reduce is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.graph.computation_graph import TOP_K
from pase_mtf.graph.looked_up import LookedUp, together
from pase_mtf.operations.facts import OperationFacts

__all__ = ["PendingSums", "pending_sums"]


class PendingSums(NamedTuple):
    """The dims whose split leaves a tensor as partial sums.

    Attributes:
      due: of the tensors that are summed, wherever.
      pending: those of them that may leave the layer that makes them as they are, to be summed on the way.
      added_to: those of them that another layer adds to partial sums of its own -> the dims whose split leaves these.
      looked_up: those of them that are sums of rows which were looked up: what these consist of.
      added_into: products of one-hot vectors that are not summed by themselves -> the one of `looked_up` that they are
        added into.
    """

    due: dict[mtf.Tensor, tuple[str, ...]]
    pending: frozenset[mtf.Tensor]
    added_to: dict[mtf.Tensor, tuple[str, ...]]
    looked_up: dict[mtf.Tensor, LookedUp]
    added_into: dict[mtf.Tensor, mtf.Tensor]


def pending_sums(facts: Iterable[OperationFacts], layer_of: Callable[[mtf.Operation], int | None],
                 dims_in: Callable[[int, Iterable[str]], tuple[str, ...]],
                 accumulated: Mapping[mtf.Tensor, mtf.Tensor]) -> PendingSums:
    """Which tensors a split leaves as partial sums, which have to be summed.

    Mesh-TF's sums are pending until somebody needs them: an addition of sums over the same dims adds first and reduces
    once. The all-reduce is charged to the last tensor of such a chain. Where one of what is added comes from another
    layer, it is charged to the sum in the layer that adds, and the edge has what is to be done where the parts are not
    the same (`Edge.added_to`). That is so for one edge as for several only while all of them are over dims of one name:
    a chain with others ends after the first. What a loop accumulates is pending until the
    loop has ended, even if the loop itself needs the sum of every iteration, too, and may leave the layer so.

    Args:
      facts: of the operations that are run.
      layer_of: the number of the layer that an operation is in, None for one of another graph.
      dims_in: given a layer and dim names, those that the layer can split, by its own names.
      accumulated: what comes out of a loop -> what every iteration adds to it.
    """
    facts = list(facts)
    consumers = Counter(tensor for fact in facts for tensor in fact.reads)
    consumers.update(accumulated.values())
    consumers.update(start for fact in facts for start in fact.starts)
    # Who waits for a sum has it made where its parts are.
    awaited = [tensor for fact in facts for tensor in fact.rule.waits_for(fact.operation)
               if isinstance(tensor, mtf.Tensor)]
    consumers.update(awaited)
    due: dict[mtf.Tensor, tuple[str, ...]] = {}
    pending: dict[mtf.Tensor, tuple[str, ...]] = {}
    added_to: dict[mtf.Tensor, tuple[str, ...]] = {}
    mixed: set[mtf.Tensor] = set()  # sums of parts over dims of several names
    rows = _Rows()
    loops = {tensor: fact.loops for fact in facts for tensor in fact.outputs}
    for fact in facts:
        if not (fact.contracts or fact.rule.forwards_sums):
            continue
        layer = layer_of(fact.operation)
        if layer is None:
            continue
        outputs = fact.outputs
        # Of several outputs only those that somebody reads are combined, and of a top-k what it chooses by, the first.
        found = {output: dims for number, (output, contracted) in enumerate(zip(outputs, fact.contracted, strict=False))
                 if (dims := dims_in(layer, contracted)) and (
                     len(outputs) == 1 or consumers[output] or (fact.role == TOP_K and not number))}
        due.update(found)
        if found:
            rows.made_by(fact)
        if found and fact.sum_is_pending:
            pending.update(found)
        if found or not fact.rule.forwards_sums or not fact.reads:
            continue
        here = [tensor for tensor in fact.reads if layer_of(tensor.operation) == layer]
        elsewhere = [tensor for tensor in fact.reads if layer_of(tensor.operation) != layer]
        # Of several only such of one shape are added before they are summed over devices: others are broadcast.
        alike = fact.rule.is_view or all(tensor.shape == outputs[0].shape for tensor in fact.reads)
        over = {frozenset(pending[tensor]) if tensor in pending else None for tensor in here}  # in any order
        # What a loop reads from outside of it is summed there, once, before it turns.
        if (not alike or len(over) != 1 or any(
                tensor not in pending or consumers[tensor] != 1 or loops[tensor] != fact.loops for tensor in fact.reads)
                or (elsewhere and (fact.rule.is_view or any(
                    tensor in mixed or tensor in rows.looked_up for tensor in fact.reads)))):
            continue
        passed = pending[here[0]]
        if any(tensor in mixed for tensor in here) or any({*pending[tensor]} != {*passed} for tensor in elsewhere):
            mixed.update(outputs)
        for tensor in here:
            del due[tensor], pending[tensor]
        added_to.update(dict.fromkeys(elsewhere, passed))
        due.update(dict.fromkeys(outputs, passed))
        # A dim whose split leaves parts may be one of the output's, too, as after a rename: then each device has a
        # part of the sum, and the chain ends.
        if not set(passed) & {name for output in outputs for name in dims_in(layer, output.shape.dimension_names)}:
            pending.update(dict.fromkeys(outputs, passed))
            rows.passed_by(fact)
    added = Counter(accumulated.values())
    for output, inside in accumulated.items():
        if inside in pending:
            due[output] = pending[output] = pending[inside]
            if consumers[inside] == added[inside]:  # nobody else needs it, however often it is added up
                due.pop(inside, None)
    return PendingSums(
        due, frozenset(pending.keys() & due.keys() - {*accumulated.values(), *awaited}), added_to,
        {tensor: looked_up for tensor, looked_up in rows.looked_up.items() if tensor in due}, rows.added_into(due))


class _Rows:
    """Finds what sums of rows that were looked up consist of, as it is told of operations one after the other.

    Attributes:
      looked_up: what the sums so far consist of.
    """

    def __init__(self) -> None:
        self.looked_up: dict[mtf.Tensor, LookedUp] = {}
        self._products: dict[mtf.Tensor, list[mtf.Tensor]] = {}

    def made_by(self, fact: OperationFacts) -> None:
        """Its outputs are sums."""
        found = fact.rule.looks_up(fact.operation)
        if found is not None:
            self.looked_up[found.output], self._products[found.output] = found.looked_up, [found.output]

    def passed_by(self, fact: OperationFacts) -> None:
        """It leaves the sums that it reads to be summed after it: the rows of both, where it adds one to another."""
        output, *others = fact.outputs
        if fact.rule.is_view or others or len(fact.reads) != 2 or any(
                tensor not in self.looked_up or tensor.shape != output.shape for tensor in fact.reads):
            return
        both = together(*(self.looked_up[tensor] for tensor in fact.reads))
        if both is not None:
            self.looked_up[output] = both
            self._products[output] = [product for tensor in fact.reads for product in self._products[tensor]]

    def added_into(self, due: Collection[mtf.Tensor]) -> dict[mtf.Tensor, mtf.Tensor]:
        """The products of one-hot vectors that are no sums of `due` -> the one there that they are added into."""
        return {product: tensor for tensor, products in self._products.items() if tensor in due
                for product in products if product is not tensor}
