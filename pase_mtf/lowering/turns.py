"""Operations in turns: what the devices compute one after the other, where the graph alone would leave it open."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering.emit import on

__all__ = ["Turn", "TurnTaking"]

_SOURCES = frozenset(("Const", "VarHandleOp", "VariableV2", "ReadVariableOp", "Placeholder"))
"""Nodes that wait for nothing: other turns use them, too."""


class Turn(NamedTuple):
    """Operations that are lowered together.

    Attributes:
      operations: in an order in which each stands behind what it reads.
      after: numbers of earlier turns; every device does what it has to do in these before it begins with this one.
    """

    operations: Sequence[mtf.Operation]
    after: tuple[int, ...] = ()


class TurnTaking:
    """Adds to the current tf.Graph what makes devices keep to turns."""

    def __init__(self) -> None:
        self._made: list[list[tf.Operation]] = []
        self._ends: dict[int, dict[str, list[tf.Operation]]] = {}
        self._barriers: dict[tuple[int, str], tf.Operation] = {}

    @contextlib.contextmanager
    def turn(self, turn: Turn) -> Iterator[None]:
        """The nodes made in this context are of this turn."""
        graph = tf.get_default_graph()
        barriers: dict[str, list[tf.Operation]] = collections.defaultdict(list)
        for number in turn.after:
            for device in self._ends_of(number):
                barriers[device].append(self._barrier(number, device))
        begun = len(graph.get_operations())
        yield
        made = graph.get_operations()[begun:]
        for node in _entries(made) if barriers else ():
            if node.device in barriers:
                node._add_control_inputs(barriers[node.device])
        self._made.append(made)

    def _ends_of(self, number: int) -> dict[str, list[tf.Operation]]:
        if number not in self._ends:
            self._ends[number] = _ends(self._made[number])
        return self._ends[number]

    def _barrier(self, number: int, device: str) -> tf.Operation:
        """A node behind all that a device does in a turn."""
        key = number, device
        if key not in self._barriers:
            with (tf.name_scope("turn"), tf.control_dependencies(None), on(device),
                  tf.control_dependencies(self._ends_of(number)[device])):
                self._barriers[key] = tf.no_op()
        return self._barriers[key]


def _entries(nodes: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Those that read something, and of the others on their device nothing but what waits for nothing: what another
    device slices for them, perhaps one of another stage, does not wait for what theirs did before."""
    inside = {node for node in nodes if node.type not in _SOURCES}
    return [node for node in nodes if node in inside and node._get_control_flow_context() is None and node.inputs
            and not any(tensor.op in inside and tensor.op.device == node.device for tensor in node.inputs)]


def _ends(nodes: Sequence[tf.Operation]) -> dict[str, list[tf.Operation]]:
    """Device -> the nodes on it that none of the others reads."""
    read = {tensor.op for node in nodes for tensor in node.inputs}
    found: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    for node in nodes:
        if node not in read and node.type not in _SOURCES and node._get_control_flow_context() is None:
            found[node.device].append(node)
    return dict(found)
