"""Which of the nodes that were emitted TensorFlow runs: of equal ones, the first.

Before a graph is run, TensorFlow merges nodes on one device that do the same to the same tensors
(`optimizer_cse.cc`, at the optimizer level L1 that sessions have by default). So the backward pass of an LSTM cell,
which computes its gates once more, finds those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from pase_mtf.compat import tf

__all__ = ["EqualNodes", "Value", "doing_of", "first_of_equal"]


class Value(NamedTuple):
    """What a node makes.

    Attributes:
      node: its number.
      output: which of its outputs; -1: that it has run.
    """

    node: int
    output: int


class EqualNodes:
    """Numbers nodes, equal ones alike."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, doing: Hashable, reads: Sequence[Value] = ()) -> tuple[int, bool]:
        """The number of a node, and whether it is the first of that number.

        Args:
          doing: what it does, and where; None: it is like no other.
          reads: what it reads and waits for; the others of its graph.
        """
        before = len(self._numbers)
        number = self._numbers.setdefault(before if doing is None else (doing, tuple(reads)), before)
        return number, number == before


def doing_of(node: tf.Operation) -> tuple[Hashable, bool]:
    """What a node does: equal for nodes that make the same of the same inputs, and None where it has a state or its
    value comes from outside; and whether it makes the same of its inputs in any order."""
    definition = node.op_def
    if definition.is_stateful or node.type.startswith("Placeholder"):
        return None, False
    attributes = tuple((name, value.SerializeToString(deterministic=True))
                       for name, value in sorted(node.node_def.attr.items()))
    return (node.type, attributes), definition.is_commutative


def first_of_equal(nodes: Iterable[tf.Operation]) -> list[tf.Operation]:
    """The nodes that are run of these.

    Args:
      nodes: of a graph, with all that they read and wait for, in an order in which they can run; what reads something
        of the iteration before it, in a loop, is like no other.
    """
    equal, numbers, found = EqualNodes(), dict[tf.Operation, int](), list[tf.Operation]()
    for node in nodes:
        doing, any_order = doing_of(node)
        if doing is None or not all(other in numbers for other in (*(x.op for x in node.inputs), *node.control_inputs)):
            numbers[node], first = equal.number(None)
        else:
            reads = [Value(numbers[tensor.op], tensor.value_index) for tensor in node.inputs]
            waits = sorted(Value(numbers[other], -1) for other in node.control_inputs)
            reads = [*(sorted(reads) if any_order else reads), *waits]
            numbers[node], first = equal.number((node.device, doing), reads)
        if first:
            found.append(node)
    return found
