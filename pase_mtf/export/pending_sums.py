"""Which tensors a split leaves as partial sums on every device, and where their all-reduce is due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.operations.facts import OperationFacts

__all__ = ["PendingSums", "pending_sums"]


class PendingSums(NamedTuple):
    """The dims whose split leaves a tensor as partial sums.

    Attributes:
      due: of the tensors that are summed, wherever.
      pending: those of them that may leave the layer that makes them as they are, to be summed on the way.
      looked_up: those of them that are sums of rows which were looked up, and by whose layer: what these consist of.
    """

    due: dict[mtf.Tensor, tuple[str, ...]]
    pending: frozenset[mtf.Tensor]
    looked_up: dict[mtf.Tensor, LookedUp]


def pending_sums(facts: Iterable[OperationFacts], layer_of: Callable[[mtf.Operation], int | None],
                 dims_in: Callable[[int, Iterable[str]], tuple[str, ...]],
                 accumulated: Mapping[mtf.Tensor, mtf.Tensor]) -> PendingSums:
    """Which tensors a split leaves as partial sums, which have to be summed.

    Mesh-TF's sums are pending until somebody needs them: an addition of sums over the same dims adds first and reduces
    once. The all-reduce is charged to the last tensor of such a chain. What a loop accumulates is pending until the
    loop has ended, even if the loop itself needs the sum of every iteration, too.

    Args:
      facts: of the operations that are run.
      layer_of: the number of the layer that an operation is in, None for one of another graph.
      dims_in: given a layer and dim names, those that the layer can split, by its own names.
      accumulated: what comes out of a loop -> what every iteration adds to it.
    """
    facts = list(facts)
    consumers = Counter(tensor for fact in facts for tensor in fact.reads)
    consumers.update(accumulated.values())
    due: dict[mtf.Tensor, tuple[str, ...]] = {}
    pending: dict[mtf.Tensor, tuple[str, ...]] = {}
    for fact in facts:
        if not (fact.contracts or fact.rule.forwards_sums):
            continue
        layer = layer_of(fact.operation)
        if layer is None:
            continue
        outputs = fact.outputs
        found = {output: dims for output, contracted in zip(outputs, fact.contracted, strict=False)
                 if (dims := dims_in(layer, contracted)) and (len(outputs) == 1 or consumers[output])}
        due.update(found)
        if found and fact.sum_is_pending:
            pending.update(found)
        if found or not fact.rule.forwards_sums or not fact.reads:
            continue
        sums = {pending.get(tensor) for tensor in fact.reads}
        if (len(sums) == 1 and None not in sums and all(
                layer_of(tensor.operation) == layer and consumers[tensor] == 1 for tensor in fact.reads)):
            for tensor in fact.reads:
                del due[tensor]
                passed = pending.pop(tensor)
            due.update(dict.fromkeys(outputs, passed))
            pending.update(dict.fromkeys(outputs, passed))
    for output, inside in accumulated.items():
        if inside in pending:
            due[output] = pending[inside]
            if consumers[inside] == 1:
                del due[inside]
    rows = (fact.rule.looks_up(fact.operation) for fact in facts if due.keys() & set(fact.outputs))
    return PendingSums(due, frozenset(
        tensor for tensor in pending.keys() & due.keys() - set(accumulated.values())
        if not _splits_parts(tensor, due[tensor], layer_of(tensor.operation), dims_in)),
        {found.output: found.looked_up for found in rows
         if found is not None and layer_of(found.one_hot) == layer_of(found.output.operation)})


def _splits_parts(tensor: mtf.Tensor, dims: Iterable[str], layer: int | None,
                  dims_in: Callable[[int, Iterable[str]], tuple[str, ...]]) -> bool:
    """Whether a dim whose split leaves partial sums is one of the tensor's, too, as after a rename."""
    return layer is not None and bool(set(dims) & set(dims_in(layer, (dim.name for dim in tensor.shape.dims))))
