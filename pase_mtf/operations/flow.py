"""The operations of a graph with those in its loops, where the tensors that go round in loops come from, and the ways
by which tensors are made of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pase_mtf.compat import mtf
from pase_mtf.operations.registry import LoopParts, rule_of

__all__ = ["Flow", "Ways", "all_operations"]

Loops = tuple[mtf.Operation, ...]


def _with_loops(operations: Iterable[mtf.Operation], outside: Loops = ()) -> Iterator[tuple[mtf.Operation, Loops]]:
    """(operation, the loops that it is in, outermost first); those in a loop stand before it."""
    for operation in operations:
        body = rule_of(operation).body(operation)
        if body:
            yield from _with_loops(body, (*outside, operation))
        yield operation, outside


def all_operations(graph: mtf.Graph) -> list[mtf.Operation]:
    """The operations of a graph in its order, those in a loop before the loop."""
    return [operation for operation, _ in _with_loops(graph.operations)]


class Ways:
    """The ways by which tensors are made of others, as gradients take them: through floating point numbers."""

    def __init__(self, position: Mapping[mtf.Operation, int]) -> None:
        """Knows none.

        Args:
          position: of all operations, in an order in which they can run.
        """
        self._position = position
        # Of those that were looked at, whether they make something of a tensor: many ways begin with the same one.
        self._of: dict[mtf.Tensor, dict[mtf.Operation, bool]] = {}

    def between(self, source: mtf.Tensor, targets: Iterable[mtf.Tensor],
                ) -> list[tuple[mtf.Operation, mtf.Tensor]]:
        """The operations on the ways from one tensor to others that were not told of it before, and the last ones.

        Args:
          source: of floating point numbers.
          targets: what the ways end with.

        Returns:
          In an order in which they can run, each with what it reads there; one that reads several as often.
        """
        known, begin = self._of.setdefault(source, {}), self._position.get(source.operation, -1)
        last = {target.operation for target in targets if target is not source}
        waiting, behind = list(last), set[mtf.Operation]()
        while waiting:
            operation = waiting.pop()
            if operation not in behind and operation not in known and self._position.get(operation, -1) > begin:
                behind.add(operation)
                waiting += [tensor.operation for tensor in _floats(operation)]
        told = [*sorted(behind, key=self._position.__getitem__), *(last & known.keys())]
        found = list[tuple[mtf.Operation, mtf.Tensor]]()
        for operation in told:
            read = [tensor for tensor in _floats(operation) if tensor is source or known.get(tensor.operation, False)]
            known[operation] = bool(read)
            found += [(operation, tensor) for tensor in read]
        return found


def _floats(operation: mtf.Operation) -> Iterator[mtf.Tensor]:
    """What it reads of floating point numbers."""
    return (tensor for tensor in rule_of(operation).reads(operation) if tensor.dtype.is_floating)


class Flow:
    """Where the tensors of a graph come from.

    A loop gives names of its own to what goes round in it, and to what comes out of it: none of these is made by an
    operation with a layout.

    Attributes:
      loops_of: operation -> the loops that it is in, outermost first.
      parts: loop -> its variables and accumulators.
      sums: what comes out of a loop that adds it up -> what every iteration adds.
    """

    def __init__(self, graph: mtf.Graph) -> None:
        self.loops_of: dict[mtf.Operation, Loops] = dict(_with_loops(graph.operations))
        self.parts: dict[mtf.Operation, LoopParts] = {}
        self.sums: dict[mtf.Tensor, mtf.Tensor] = {}
        self._seen: set[mtf.Tensor] = set()  # anew in every iteration
        self._before: dict[mtf.Tensor, mtf.Tensor] = {}  # made in this step, in the order of the graph
        self._after: dict[mtf.Tensor, mtf.Tensor] = {}  # made by the iteration before
        self._starts: dict[mtf.Tensor, mtf.Tensor] = {}  # what comes out of a loop -> what goes in
        for operation in self.loops_of:
            parts = rule_of(operation).loop(operation)
            if parts is None:
                continue
            self.parts[operation] = parts
            for variable in parts.variables:
                self._before[variable.output] = self._after[variable.output] = variable.next
                self._starts[variable.output] = variable.start
                self._seen.update(variable.seen)
                for seen in variable.seen:
                    self._before[seen], self._after[seen] = variable.start, variable.next
            for inside, output in parts.accumulators:
                self.sums[output] = self._before[output] = self._after[output] = inside
        self._owners: dict[mtf.Tensor, mtf.Tensor] = {}

    def origin(self, tensor: mtf.Tensor) -> mtf.Tensor:
        """The tensor that an operation before has made, of which this one is a later name or value."""
        while tensor in self._before:
            tensor = self._before[tensor]
        return tensor

    def made(self, tensor: mtf.Tensor) -> mtf.Tensor:
        """The tensor that takes memory under this name: the origin, but of what a loop adds up, the sum."""
        while tensor in self._before and tensor not in self.sums:
            tensor = self._before[tensor]
        return tensor

    def owner(self, tensor: mtf.Tensor) -> mtf.Tensor:
        """The tensor whose layout this one has: what an iteration makes goes into the next as it lies.

        Two loop variables that change places have the layouts that they start with, each its own.
        """
        if tensor not in self._after:
            return tensor
        if tensor not in self._owners:
            passed = {tensor}
            found = self._after[tensor]
            while found in self._after and found not in passed:
                passed.add(found)
                found = self._after[found]
            self._owners[tensor] = self.origin(self._starts.get(tensor, tensor)) if found in passed else found
        return self._owners[tensor]

    def carried(self) -> Iterable[mtf.Tensor]:
        """What loops give names of their own."""
        return self._after.keys()

    def loops_around(self, tensor: mtf.Tensor) -> Loops:
        """The loops in every iteration of which the tensor has another value."""
        loops = self.loops_of.get(tensor.operation, ())
        return (*loops, tensor.operation) if tensor in self._seen else loops
