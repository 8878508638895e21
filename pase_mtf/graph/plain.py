"""Dataclasses as what JSON can hold, and back, without the deep copies of the standard library."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["from_plain", "keys_of", "once", "to_plain", "unhashed_keys"]

_T = TypeVar("_T")

_SCALARS = frozenset({str, int, float, bool})


@functools.cache
def keys_of(cls: Any) -> dict[str, str]:
    """Name of every field of a dataclass -> the key it has in files, which stays where a field is renamed."""
    return {field.name: field.metadata.get("key", field.name) for field in dataclasses.fields(cls)}


_NEVER = object()


@functools.cache
def _written(cls: Any) -> tuple[tuple[str, str, Any], ...]:
    """Name and key of every field of a dataclass, and the value that files leave out (_NEVER: none)."""
    return tuple((field.name, keys_of(cls)[field.name], field.default if field.metadata.get("optional") else _NEVER)
                 for field in dataclasses.fields(cls))


@functools.cache
def unhashed_keys(cls: Any) -> frozenset[str]:
    """The keys of what files hold and hashes leave out."""
    return frozenset(keys_of(cls)[field.name] for field in dataclasses.fields(cls)
                     if not field.metadata.get("hashed", True))


def to_plain(value: Any, repeated: type, known: dict[int, Any] | None = None) -> Any:
    """`dataclasses.asdict` without its deep copies (tens of thousands of operations).

    Args:
      value: anything JSON can hold, with dataclasses, all alive until this returns.
      repeated: a class whose objects stand in many places.
      known: id of such an object that has been met -> what became of it.
    """
    known = {} if known is None else known
    cls: Any = type(value)
    if cls in _SCALARS:
        return value
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SCALARS else to_plain(item, repeated, known) for item in value]
    if not hasattr(cls, "__dataclass_fields__"):
        return value
    plain = known.get(id(value))
    if plain is None:
        plain = {}
        for name, key, left_out in _written(cls):
            item = getattr(value, name)
            if left_out is _NEVER or item != left_out:
                plain[key] = item if type(item) in _SCALARS else to_plain(item, repeated, known) if item != () else []
        if cls is repeated:
            known[id(value)] = plain
    return plain


def once(value: Any, known: dict[Any, Any]) -> Any:
    """A tuple of a list; equal ones are one object, since the operations of a graph repeat each other's shapes."""
    if isinstance(value, list):
        value = tuple(value)
        return known.setdefault(value, value)
    return value


def from_plain(cls: Callable[..., _T], data: dict[str, Any], known: dict[Any, Any]) -> _T:
    """An object of a class of the fields that a file holds.

    Args:
      cls: its class.
      data: field -> value.
      known: tuples that have been met.
    """
    return cls(**{name: once(item, known) for name, item in data.items()})
