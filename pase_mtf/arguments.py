"""What the callers of public functions give, checked by the types that these functions declare."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
import textwrap
import types
import typing
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from pase_mtf.errors import UsageError, shortened

__all__ = ["as_float", "checked_arguments"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_DEPTH = 4  # of collections in collections


def checked_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: an argument of another type than the one declared ends in one line that names it.

    Of a collection all items are looked at; a string is no collection. NumPy's numbers count as Python's.

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
                plain = _plain(value)
                _check(function.__name__, name, plain, hints[name])
                given.arguments[name] = plain
        return function(*given.args, **given.kwargs)
    return checked


@functools.cache
def _hints(function: Callable[..., object]) -> dict[str, object]:
    return typing.get_type_hints(function)


def _plain(value: object, depth: int = _DEPTH) -> object:
    """The same with Python's numbers in place of NumPy's, in lists, tuples and dicts, too; itself where there are none.
    """
    if isinstance(value, np.generic):
        return value.item()
    if depth and type(value) in (list, tuple):
        before = cast("list[object] | tuple[object, ...]", value)
        items = [_plain(item, depth - 1) for item in before]
        return type(before)(items) if any(map(operator.is_not, items, before)) else value
    if depth and type(value) is dict:
        entries = {_plain(key): _plain(item, depth - 1) for key, item in value.items()}
        return entries if any(map(operator.is_not, (*entries, *entries.values()), (*value, *value.values()))) else value
    return value


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
    # Python 3.10 makes a typing.Union of what is None unless it is given.
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    # Python 3.10 takes list[str] for a type of its own, which nothing can be seen to be an instance of.
    seen = [option for option in options if isinstance(option, type) and typing.get_origin(option) is None
            and getattr(option, "_is_runtime_protocol", True)]
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


def as_float(value: object) -> float:
    """A number that somebody gave as a float: infinite where it is larger than any, NaN of what is none (or a truth
    value).

    Args:
      value: of any type; NumPy's numbers and fractions are numbers.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # integers and fractions have no end
        return -math.inf if value < 0 else math.inf


def _holds_letters(option: object) -> bool:
    """Whether Python takes a string for a collection of this type: of its letters, which nobody means."""
    origin = typing.get_origin(option)
    return isinstance(origin, type) and issubclass(str, origin)


def _problem(value: object, hint: object) -> str:
    """What is wrong with a collection or a function, looked into; empty: nothing."""
    from typeguard import CollectionCheckStrategy, TypeCheckError, check_type  # a tenth of a second
    try:
        check_type(value, hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError as error:
        return shortened(_in_a_line(str(error)), 160, quoted=False)
    return ""


def _in_a_line(problem: str) -> str:
    """What typeguard says is wrong. Where something can be one of several, that says at length why it is none of them:
    which these are, or where it is a collection of the right kind, what is wrong in it."""
    place, of_several, reasons = problem.partition(" did not match any element in the union:\n")
    if not of_several:
        return problem
    place = place if " " in place else ""  # else it is what was given itself
    told = [reason.partition(": ") for reason in re.split(r"\n(?=\S)", textwrap.dedent(reasons))]
    for _, _, inside in told:
        if re.match("(item|key|value of key|has wrong number) ", inside):
            return f"{place}: {_in_a_line(inside)}".removeprefix(": ")
    return f"{place} is no {' or '.join(_name(option) for option, _, _ in told)}".lstrip()


def _name(option: object) -> str:
    """Of a type, or of how typeguard writes it, for people."""
    name = str(getattr(option, "__name__", option)).partition("[")[0].rpartition(".")[2]
    return {"Callable": "function", "NoneType": "None"}.get(name, name.lstrip("_"))
