"""Which operations of a graph are alike: a number per operation, equal where class, settings and shapes are.

What is known of one of them, or what lowering it makes, holds for all.
"""

from __future__ import annotations

from collections.abc import Hashable

from pase_mtf.compat import mtf
from pase_mtf.operations.lowering_key import lowering_key
from pase_mtf.operations.registry import rule_of

__all__ = ["Alike"]


class Alike:
    """Numbers for the operations of one graph or of several: those that are alike have one number.

    An operation is looked at once: it may not change afterwards.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[mtf.Operation, int] = {}

    def lowering(self, operation: mtf.Operation) -> int:
        """The number that stands for the operation's `lowering_key`."""
        number = self._known.get(operation)
        if number is None:
            number = self._known[operation] = self._numbers.setdefault(lowering_key(operation), len(self._numbers))
        return number

    def number(self, operation: mtf.Operation) -> int | None:
        """The number of an operation. None of one that has to be looked at by itself: of a class that is not
        Mesh-TF's own, or that reads what is no input of it."""
        if rule_of(operation).holds_others or type(operation).__module__ != mtf.ops.__name__:
            return None
        return self.lowering(operation)
