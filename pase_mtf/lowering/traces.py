"""What an operation becomes on a device: nodes, and what they read."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.errors import FormatError, shortened
from pase_mtf.lowering.equal_nodes import EqualNodes, Value
from pase_mtf.machine.kernels import Kernel

__all__ = ["Merging", "Place", "Trace", "TracedNode"]

Place = tuple[int, int]
"""What a node of an operation reads: a node of its own and which output of that, or -1 - an input of the operation and
which slice of that."""


class TracedNode(NamedTuple):
    """A node of an operation on a device.

    Attributes:
      kernel: None: it takes no time.
      doing: a digest of `equal_nodes.doing_of` it.
      any_order: it makes the same of what it reads in any order.
      reads: tensors; None: something else.
      waits: for which nodes.
    """

    kernel: Kernel | None
    doing: str | None
    any_order: bool
    reads: Sequence[Place | None]
    waits: Sequence[Place | None]


class Trace(NamedTuple):
    """What an operation becomes on a device.

    Attributes:
      nodes: in an order in which they can run.
      made: the first slice of every output; None: it is not made by one of these nodes.
      lasting: whether it is the same in every process: functions of a graph have names of their own in each.
    """

    nodes: Sequence[TracedNode]
    made: Sequence[Place | None]
    lasting: bool = True

    def to_json(self) -> list[Any]:
        """As plain values, which `from_json` takes back."""
        return [[[node.kernel and node.kernel.to_json(), *node[1:]] for node in self.nodes], self.made]

    @classmethod
    def from_json(cls, data: Any) -> Trace:
        """The reverse of `to_json`.

        Raises:
          FormatError: no trace.
        """
        try:
            nodes, made = data
            return cls([TracedNode(None if kernel is None else Kernel.from_json(kernel),
                                   None if doing is None else str(doing), bool(any_order), _places(reads),
                                   _places(waits)) for kernel, doing, any_order, reads, waits in nodes], _places(made))
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise FormatError(f"no trace of an operation: {shortened(data)}; leave it out") from error


def _places(data: Any) -> list[Place | None]:
    return [None if place is None else (int(place[0]), int(place[1])) for place in data]


class Merging:
    """Which nodes of a layer are run: of equal ones, the first."""

    def __init__(self) -> None:
        self._equal = EqualNodes()
        self._values: dict[tuple[mtf.Tensor, int], Value] = {}  # slices of tensors

    def run(self, operation: mtf.Operation, loops: Hashable, trace: Trace, turn: str = "", held: Hashable = (),
            ) -> collections.Counter[Kernel]:
        """What is run for the next operation of a layer.

        Args:
          operation: which.
          loops: that it is in. Each has nodes of its own, and another one may turn as often.
          trace: of it, or of one that is alike.
          turn: nodes of another one are not equal to its own: they wait for something else.
          held: the arrays that it holds: constants of one that is alike and holds others may be other numbers.
        """
        found, numbers = collections.Counter[Kernel](), list[int]()

        def value(place: Place | None) -> Value:
            if place is None:
                return Value(self._equal.number(None)[0], 0)
            node, output = place
            if node >= 0:
                return Value(numbers[node], output)
            held = operation.inputs[-1 - node], output
            if held not in self._values:
                self._values[held] = value(None)
            return self._values[held]

        for node in trace.nodes:
            reads = [value(place) for place in node.reads]
            waits = sorted(value(place) for place in node.waits)
            doing = None if node.doing is None else (turn, loops, node.doing, () if reads else held)
            number, first = self._equal.number(doing, (*(sorted(reads) if node.any_order else reads), *waits))
            numbers.append(number)
            if first and node.kernel is not None:
                found[node.kernel] += 1
        for tensor, place in zip(operation.outputs, trace.made, strict=True):
            if place is not None:
                self._values[tensor, 0] = value(place)
        return found
