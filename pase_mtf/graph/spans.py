"""From when to when what an operation makes, or a copy of it, is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from pase_mtf.errors import shortened

__all__ = ["Held", "HeldCopy", "read_spans"]


class Held(NamedTuple):
    """What an operation makes, while a device holds it. Moments of a step are numbered from 0.

    Attributes:
      output: the number of the output; -1 - n: what it makes besides, split as its input n.
      begin, end: the moments from which and until which it is there, both included; never, where `end` is before.
      times: so many times the bytes of the output, or of that input: what is made besides has no shape here.
      waits_until: where devices have to sum it, the moment until which it may be there: one device waits for the
        others. Of what an update makes of a gradient, where devices have to sum that: the moment at which it is there
        instead. -1: as `end` says.
      shared_until: where it is a sum that one device makes for several of one host, the moment until which that may be
        there besides what is made of it: the last of them writes in its place. -1: no longer than while it is made.
      shared_from: the moment from which it may be there besides, as that is made of it.
      own_until: the moment until which its layer needs it, though other layers read it until `end`: those that need it
        as it lies (`HeldCopy.made`), or have copies. -1: until `end`.
    """

    output: int
    begin: int
    end: int
    times: float = 1.0
    waits_until: int = -1
    shared_until: int = -1
    own_until: int = -1
    shared_from: int = -1


class HeldCopy(NamedTuple):
    """A copy of a tensor, in the parts that another layer reads, while a device holds it.

    Attributes:
      begin, end: the moments between which it is there, both included.
      shared_until: where one device makes it for several of one host, the moment until which it is there; -1: `end`.
      made: the `Held.begin` of what it is a copy of; that is there until `end` where no copy is needed. -1: unknown.
      taken: where its last reader writes what it makes in its place, the moment at which that is made. -1: it does not.
    """

    begin: int
    end: int
    shared_until: int = -1
    made: int = -1
    taken: int = -1


_Span = TypeVar("_Span", Held, HeldCopy)


def read_spans(kind: type[_Span], rows: Iterable[Sequence[float]]) -> list[_Span]:
    """The spans in rows of numbers, as a file has them: whole ones but `times`.

    Args:
      kind: Held or HeldCopy.
      rows: the values of its fields in their order, those with a default perhaps left out.

    Raises:
      ValueError: a row of another length, or of numbers that are not whole.
    """
    fewest, found = len(kind._fields) - len(kind._field_defaults), []
    for row in rows:
        if not fewest <= len(row) <= len(kind._fields) or any(
                type(value) is not int for name, value in zip(kind._fields, row, strict=False) if name != "times"):
            raise ValueError(f"held: {shortened(row)}")
        found.append(kind(*row))  # type: ignore[arg-type]
    return found
