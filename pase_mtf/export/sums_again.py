"""Sums that stock Mesh-TensorFlow makes more than once: of views of a pending sum, each by itself."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Sequence

from pase_mtf.compat import mtf
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.stock_sums import PendingSum

__all__ = ["sums_again"]


def sums_again(facts: Iterable[OperationFacts], due: Collection[mtf.Tensor]) -> dict[mtf.Tensor, int]:
    """How often stock Mesh-TF sums the parts of a tensor besides the once that is due.

    Its LazyAllreduceSum remembers the sum, but an operation that works on parts (a reshape, an addition) makes another
    one of the parts, whether or not they are summed already. All of these have as many elements, and are counted where
    the first is due. What an operation does depends on the layout, and what sums more is counted: a reshape works on
    parts where it moves no slices (here all do but such as make a dim that the sum is over); an addition of sums over
    other dims, which may not be split all, works on those parts that its sum is charged for, and needs others whole.

    Args:
      facts: of the operations that are run.
      due: the tensors whose sums are due (`pending_sums.PendingSums`).

    Returns:
      Of the tensors of which that is so, how often; -1 of those that are only added to other parts, and summed there.
    """
    parts = _Parts(facts)
    counted = {parts.same.get(tensor, tensor) for tensor in due}
    made: collections.Counter[mtf.Tensor] = collections.Counter()
    for tensor in reversed(parts.sums):
        made[tensor] += parts.is_needed(tensor) * parts.turns(tensor)
        payer = parts.payer(tensor)
        if payer is not None and tensor not in counted:
            made[payer] += made[tensor]
    again = {tensor: made[parts.same.get(tensor, tensor)] - 1 for tensor in due}
    return {tensor: times for tensor, times in again.items()
            if times > 0 or (times < 0 and parts.is_left(parts.same.get(tensor, tensor)))}


class _Parts:
    """What may be parts of a sum under stock Mesh-TF.

    Attributes:
      same: another name of one of them -> its first one: they share one sum.
    """

    def __init__(self, facts: Iterable[OperationFacts]) -> None:
        self.same: dict[mtf.Tensor, mtf.Tensor] = {}
        self._passed: dict[mtf.Tensor, list[mtf.Tensor]] = {}  # -> the parts that it is made of
        self._readers: collections.Counter[mtf.Tensor] = collections.Counter()
        self._passing: collections.Counter[mtf.Tensor] = collections.Counter()
        self._mixed: set[mtf.Tensor] = set()  # added to sums over other dims: a layout may need each by itself
        # (loops, how often a step runs them) in which it is made; those in which it is read.
        self._made_in: dict[mtf.Tensor, tuple[tuple[mtf.Operation, ...], int]] = {}
        self._read_in: dict[mtf.Tensor, set[tuple[tuple[mtf.Operation, ...], int]]] = {}
        stock: dict[mtf.Tensor, PendingSum] = {}
        for fact in facts:
            reads = [self.same.get(tensor, tensor) for tensor in fact.reads]
            made = fact.rule.stock_sums(fact.operation, stock)
            if fact.rule.is_same:
                self.same.update(zip(fact.outputs, reads, strict=True))
                stock.update(made)
                continue
            passed = {output: sum_ for output, sum_ in made.items() if _is_pending(fact, output, sum_)}
            stock.update(passed)
            sources = [] if fact.contracts else [tensor for tensor in dict.fromkeys(reads) if tensor in stock]
            self._passed.update(dict.fromkeys(passed, sources))
            readers = {*reads, *(self.same.get(start, start) for start in fact.starts)}
            self._readers.update(readers)
            here = fact.loops, fact.trips
            self._made_in.update(dict.fromkeys(passed, here))
            for tensor in readers:
                self._read_in.setdefault(tensor, set()).add(here)
        for output, sources in self._passed.items():
            payer = self.payer(output)
            if payer is not None:
                alike = len({stock[tensor].names() for tensor in sources}) == 1
                self._passing.update(sources if alike else [payer])
                self._mixed.update(() if alike else [payer])

    @property
    def sums(self) -> Sequence[mtf.Tensor]:
        """In the order of the graph."""
        return list(self._passed)

    def is_needed(self, tensor: mtf.Tensor) -> bool:
        """Whether somebody needs the sum itself: one that does not pass the parts on, or who has the tensor fetched."""
        return not self._passing[tensor] or self._readers[tensor] > self._passing[tensor]

    def turns(self, tensor: mtf.Tensor) -> int:
        """How often a sum is made for once that its parts are: where one loop alone reads it, in every iteration."""
        loops, trips = self._made_in[tensor]
        read_in = list(self._read_in.get(tensor, ()))
        if len(read_in) != 1 or read_in[0][0] == loops:
            return 1
        return max(1, read_in[0][1] // max(trips, 1))

    def is_left(self, tensor: mtf.Tensor) -> bool:
        """Whether a sum that nobody needs by itself is not made: its parts are summed with those they are added to."""
        return tensor in self._passed and tensor not in self._mixed

    def payer(self, tensor: mtf.Tensor) -> mtf.Tensor | None:
        """The one of the parts that a tensor is made of whose sum is charged for its own: one that nobody else reads,
        which is never summed by itself, where there is such. None: it is made of no parts."""
        sources = self._passed[tensor]
        return next((source for source in sources if self._readers[source] == 1), sources[0] if sources else None)


def _is_pending(fact: OperationFacts, output: mtf.Tensor, found: PendingSum) -> bool:
    """Whether it is in parts under some layout. Where a view makes a dim that the sum is over, and that is split, its
    slices move, and are summed before."""
    over = found.names()
    return bool(over) and not (fact.rule.is_view and not over.isdisjoint(output.shape.dimension_names))
