"""Dataclasses as the plain values of JSON: the keys of their fields in files, and which of them count for a hash."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["from_plain", "keys_of", "once", "to_plain", "unhashed_keys"]

_T = TypeVar("_T")

_SCALARS = frozenset({str, int, float, bool})
_NEVER = object()


@functools.cache
def keys_of(cls: type[DataclassInstance]) -> dict[str, str]:
    """Name of every field of a dataclass -> the key it has in files, which stays where a field is renamed."""
    return {field.name: field.metadata.get("key", field.name) for field in dataclasses.fields(cls)}


@functools.cache
def _written(cls: type[DataclassInstance]) -> tuple[tuple[str, str, object], ...]:
    """Name and key of every field of a dataclass, and the value that files leave out (_NEVER: none)."""
    return tuple((field.name, keys_of(cls)[field.name], field.default if field.metadata.get("optional") else _NEVER)
                 for field in dataclasses.fields(cls))


@functools.cache
def unhashed_keys(cls: type[DataclassInstance]) -> frozenset[str]:
    """The keys of what files hold and hashes leave out: of the fields that say `hashed=False`."""
    return frozenset(keys_of(cls)[field.name] for field in dataclasses.fields(cls)
                     if not field.metadata.get("hashed", True))


def to_plain(value: object, shared: type, known: dict[int, dict[str, object]] | None = None) -> Any:
    """`dataclasses.asdict` without its deep copies (tens of thousands of operations).

    Args:
      value: anything JSON can hold, with dataclasses, all live until this returns.
      shared: a dataclass of which many hold the same objects; what becomes of one is shared as well.
      known: id of such an object that has been met -> what became of it.
    """
    known = {} if known is None else known
    cls: Any = type(value)
    if cls in _SCALARS:
        return value
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SCALARS else to_plain(item, shared, known) for item in value]
    if not hasattr(cls, "__dataclass_fields__"):
        return value
    plain = known.get(id(value))
    if plain is None:
        plain = {}
        for name, key, left_out in _written(cls):
            item = getattr(value, name)
            if left_out is _NEVER or item != left_out:
                plain[key] = item if type(item) in _SCALARS else to_plain(item, shared, known) if item != () else []
        if cls is shared:
            known[id(value)] = plain
    return plain


def once(value: object, known: dict[object, object]) -> object:
    """A tuple of a list; equal ones are one object, since the operations of a graph repeat each other's shapes."""
    if isinstance(value, list):
        value = tuple(value)
        return known.setdefault(value, value)
    return value


def from_plain(cls: Callable[..., _T], data: Mapping[str, object], known: dict[object, object]) -> _T:
    """An object of a class of the fields that a file holds.

    Args:
      cls: its class.
      data: field -> value.
      known: tuples that have been met.
    """
    return cls(**{name: once(item, known) for name, item in data.items()})
