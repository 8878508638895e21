"""Who reads what: which pending sums are made at once for all readers, whichever of them comes first."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from pase_mtf.compat import mtf
from pase_mtf.export.phases import FORWARD
from pase_mtf.graph.partition import Partition, before_reshape
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.registry import read_by, rule_of

__all__ = ["Readers"]


class Readers:
    """The operations that read the tensors of a lowering."""

    def __init__(self, facts: Sequence[OperationFacts], phases: Sequence[str],
                 impl_of: Callable[[mtf.Operation], DeviceMeshImpl], updating: Mapping[mtf.Variable, DeviceMeshImpl]):
        """Looks at a graph.

        Args:
          facts: of its operations.
          phases: of each.
          impl_of: the mesh implementation of an operation.
          updating: of variables whose new value is computed in another layout than their own, that one.
        """
        self._impl_of, self._updating = impl_of, updating
        # Gradients that no assignment needs. What else none needs may be fetched, as the loss is.
        self._idle = {fact.operation for fact, phase in zip(facts, phases, strict=True)
                      if phase != FORWARD and not fact.is_needed}
        self._of: dict[mtf.Tensor, list[mtf.Operation]] = collections.defaultdict(list)
        for fact in facts:
            for tensor in read_by(fact.operation):
                self._of[tensor].append(fact.operation)

    def of(self, tensor: mtf.Tensor) -> Sequence[mtf.Operation]:
        """Those that read a tensor, in the order of the graph."""
        return self._of.get(tensor, ())

    def need_whole(self, tensor: mtf.Tensor, source: Partition) -> bool:
        """Whether a pending sum is made where its parts are before anybody reads it: several do, not all of which need
        the same pieces of it elsewhere. One of them may then need the whole sum, and the others cut what they need out
        of that; and views of the parts would be summed once more each. So it is priced (`export.pending_sums`).

        Args:
          tensor: that is held in part.
          source: how the parts are split.
        """
        readers = [reader for reader in self.of(tensor) if reader not in self._idle]
        places = {place for reader in readers for place in self._places(reader, tensor, source)}
        return len(places) > 1 or (len(readers) > 1 and source in places)

    def _places(self, reader: mtf.Operation, tensor: mtf.Tensor, source: Partition) -> set[Partition | None]:
        """How a reader needs a tensor: a grouped assignment as all variables do that it gives it to."""
        given: set[Partition | None] = {
            self._updating.get(variable, self._impl_of(variable)).partition(variable.shape)
            for variable, value in rule_of(reader).assigns(reader) if value is tensor}
        return given or {self._place(reader, tensor, source)}

    def _place(self, reader: mtf.Operation, tensor: mtf.Tensor, source: Partition) -> Partition | None:
        """How a reader that assigns it to nothing needs a tensor; None: as what is in it does, or what comes out of
        it."""
        rule = rule_of(reader)
        if rule.loop(reader):
            return None
        if rule.role(reader) == "rename":
            output, = reader.outputs
            old, new = (tuple(each.shape.to_integer_list) for each in (tensor, output))
            return before_reshape(source, self._impl_of(reader).partition(output.shape), old, new)[0]
        return self._impl_of(reader).partition(tensor.shape)
