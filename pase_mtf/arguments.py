"""What the callers of public functions give, checked by the types that these functions declare."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from pase_mtf.errors import UsageError, shortened

__all__ = ["checked_arguments"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: an argument of another type than the one declared ends in one line that names it.

    Of a collection the first item is looked at; a string is no collection. NumPy's numbers count as Python's.

    Raises (when the function is called):
      UsageError: an argument has another type.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = signature.bind(*args, **kwargs)
        hints = _hints(function)
        for name, value in given.arguments.items():
            if name in hints and signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                plain = value.item() if isinstance(value, np.generic) else value
                _check(function.__name__, name, plain, hints[name])
                given.arguments[name] = plain
        return function(*given.args, **given.kwargs)
    return checked


@functools.cache
def _hints(function: Callable[..., object]) -> dict[str, object]:
    return typing.get_type_hints(function)


class _Expected(NamedTuple):
    """What a type that a function declares comes to.

    Attributes:
      options: the types of which it is one.
      classes: those that an object is seen to be an instance of.
      looked_into: whether it can be something else, too.
      numbers: whether it can be a number, but no truth value, which Python takes for one.
    """

    options: tuple[object, ...]
    classes: tuple[type, ...]
    looked_into: bool
    numbers: bool


@functools.cache
def _expected(hint: object) -> _Expected:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    seen = [option for option in options if isinstance(option, type) and getattr(option, "_is_runtime_protocol", True)]
    classes = (object,) if Any in options else (*seen, *([int] if float in seen else []))
    numbers = bool not in options and not {int, float}.isdisjoint(options)
    return _Expected(options, classes, len(seen) < len(options), numbers)


def _check(function: str, name: str, value: object, hint: object) -> None:
    options, classes, looked_into, numbers = _expected(hint)
    if numbers and isinstance(value, bool):
        problem = "is a truth value, not a number"
    elif isinstance(value, classes):
        return
    elif isinstance(value, (str, bytes)) and any(map(_holds_letters, options)):
        problem = f"is one {type(value).__name__}; give a list"
    elif looked_into:
        problem = _problem(value, hint)
    else:
        problem = f"is no {' or '.join(_name(option) for option in options)}"
    if problem:
        raise UsageError(f"{function}: {name}={shortened(value)}: {problem}")


def _holds_letters(option: object) -> bool:
    """Whether Python takes a string for a collection of this type: of its letters, which nobody means."""
    origin = typing.get_origin(option)
    return isinstance(origin, type) and issubclass(str, origin)


def _problem(value: object, hint: object) -> str:
    """What is wrong with a collection or a function, looked into; empty: nothing."""
    from typeguard import CollectionCheckStrategy, TypeCheckError, check_type  # a tenth of a second
    try:
        check_type(value, hint, collection_check_strategy=CollectionCheckStrategy.FIRST_ITEM)
    except TypeCheckError as error:
        if isinstance(hint, types.UnionType):  # of these it tells at length why each is none
            return f"is no {' or '.join(_name(option) for option in typing.get_args(hint))}"
        return shortened(str(error), 160, quoted=False)
    return ""


def _name(option: object) -> str:
    return str(getattr(option, "__name__", option)).lstrip("_").replace("Callable", "function")
