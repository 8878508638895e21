"""A key per operation, equal for operations that lower alike: their class, settings and shapes.

The layers of a stack repeat each other, in operations that differ in names and in the numbers they compute with only:
what lowering one of them makes holds for all.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from pase_mtf.compat import mtf, tf

__all__ = ["content_of", "function_key", "held_by", "is_of_package", "is_versioned", "lasting_text", "lowering_key",
           "names_in", "text_key"]

# Attributes of operations that say who they are, not what they do.
_SKIPPED = {"_inputs", "_outputs", "_mesh", "_name", "_unsplittable_dims"}
_MARK = "_pase_mtf_"
"""How the attributes begin that say which layer or block of its model an operation belongs to."""
_DEEPEST = 6
# Elements of an array of whole numbers that are compared.
_FEW = 64
# Of these, equal ones are alike.
_PLAIN = frozenset({str, int, float, bool, type(None), frozenset})
# These last as long as the process, and hold no graph. Functions are TensorFlow's: those of others are taken apart.
_LIBRARIES = frozenset({"tensorflow", "mesh_tensorflow", "numpy", "math", "functools", "itertools", "operator"})
_BY_STATEMENT = 1 << 9
"""Of the flags of a type, that a program made it: of Python's own many stand in no module under their name."""
_VERSIONED = _LIBRARIES | {"builtins", "pase_mtf"}
"""Packages whose code is the same where their versions are."""
_LASTING = (*_PLAIN, type, types.CodeType, types.FunctionType, types.BuiltinFunctionType, np.dtype, tf.DType)


class _Itself:
    """A value of which nobody can say whether another one is alike: it is like no other."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def lowering_key(operation: mtf.Operation) -> Hashable:
    """Equal for operations that lower alike where their dims are laid out alike and their inputs are in one state.

    What an operation holds and cannot be compared is alike where it is the very same.
    """
    if isinstance(operation, mtf.Variable):
        return type(operation), _key(operation.shape), operation.slice_dtype, operation.activation_dtype
    return _operation_key(operation, 0)


def function_key(function: Callable) -> Hashable | None:
    """Equal for functions that make the same of slices of the same shapes, whatever graph they are of and whenever that
    is. None where nobody can say, or where a key would hold on to more than code and settings."""
    found = list(_globals(function))
    # A key has no more than the shape of most arrays; where one holds a rate of 0, a function draws no numbers.
    if any(isinstance(held, np.ndarray) and not _is_compared(held)
           for value in (function, *(value for _, value in found)) for held in held_by(value)):
        return None
    key = _key(function), tuple([(name, _library(value) if isinstance(value, types.ModuleType) else _key(value))
                                 for name, value in found])
    return key if _lasts(key) else None


def text_key(function: Callable) -> Hashable:
    """Equal for functions of one text that hold alike, but for floating point numbers: made anew for every operation,
    they compute with others (a rate, a slope), and make the same nodes. What their modules hold is not looked at."""
    return _without_floats(_key(function))


def _without_floats(key: Hashable) -> Hashable:
    if type(key) is not tuple:
        return key
    if len(key) == 2 and isinstance(key[0], type) and issubclass(key[0], (float, np.floating)):
        # At nothing, or at all, functions leave nodes out: tf.nn.dropout draws no numbers at a rate of 0.
        return key if key[1] in (0.0, 1.0) else float
    return tuple(map(_without_floats, key))


def lasting_text(key: Hashable) -> str | None:
    """A key as text, which another process finds for what is alike, with the same versions of all packages.

    Args:
      key: a `lowering_key`, or a tuple with some in it.

    Returns:
      None: it holds something that only this process can compare, or code that no version tells.
    """
    if isinstance(key, tuple):
        match key:
            case "function", str(module), types.CodeType() as code, cells, defaults:
                told = ("function", module, _told(code), cells, defaults)
                return lasting_text(told) if is_of_package(module) else None
        texts = [lasting_text(entry) for entry in key]
        return None if None in texts else f"({','.join(map(str, texts))})"
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(map(repr, key)))}}}"
    if type(key) in _PLAIN:
        return repr(key)
    if isinstance(key, (tf.DType, np.dtype)):
        return f"{type(key).__name__} {key.name}"
    if isinstance(key, (type, types.BuiltinFunctionType, types.FunctionType)):
        return f"{key.__module__}.{key.__qualname__}" if _is_known_by_name(key) else None
    return None


def is_versioned(function: Callable) -> bool:
    """Whether a function's code is that of a package whose version tells it, whatever name it has taken on."""
    module = _home(function) if isinstance(function, types.FunctionType) else getattr(function, "__module__", "")
    return is_of_package(str(module))


def _home(function: types.FunctionType) -> str:
    """The module whose code a function is: a wrapper may have the name and the module of what it wraps."""
    return str(function.__globals__.get("__name__", ""))


def _is_known_by_name(value: type | types.BuiltinFunctionType | types.FunctionType) -> bool:
    """Whether its name tells what it is, in a package whose version tells its code. Of a function within a function it
    does not, nor where a package's code has taken on the name of a program's, or a program's that of a package's."""
    if isinstance(value, types.FunctionType):
        return is_of_package(value.__module__) and is_versioned(value) and "<locals>" not in value.__qualname__
    if isinstance(value, type) and not value.__flags__ & _BY_STATEMENT and value.__module__ == "builtins":
        return True
    found: object = sys.modules.get(str(value.__module__))
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value and is_versioned(value)


def is_of_package(module: str) -> bool:
    """Whether a module is one of a package whose version tells its code."""
    return str(module).split(".")[0] in _VERSIONED


def _told(code: types.CodeType) -> Hashable:
    """What tells code from other code of its module."""
    return code.co_name, code.co_firstlineno, code.co_code.hex(), code.co_names, tuple(
        _told(part) if isinstance(part, types.CodeType) else part if isinstance(part, frozenset) else repr(part)
        for part in code.co_consts)


def _globals(function: Callable) -> Iterator[tuple[str, object]]:
    """What a function finds by the names of its module, and the functions that it calls do: others may stand there
    tomorrow."""
    left: list[object] = [function]
    seen = set[int]()
    while left:
        value = left.pop()
        if isinstance(value, functools.partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (list, tuple)):
            left += value
        elif isinstance(value, types.FunctionType) and not _of_tensorflow(value) and id(value) not in seen:
            seen.add(id(value))
            left += [*map(content_of, value.__closure__ or ()), *(value.__defaults__ or ()),
                     *(value.__kwdefaults__ or {}).values()]
            for name in sorted(names_in(value.__code__) & value.__globals__.keys()):
                yield name, value.__globals__[name]
                left.append(value.__globals__[name])


def names_in(code: types.CodeType) -> set[str]:
    """The names that code looks up, with the functions that are made in it."""
    return set(code.co_names).union(*[names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)])


def _library(module: types.ModuleType) -> Hashable:
    """A module by name, if it stays as it is."""
    return module.__name__ if module.__name__.split(".")[0] in _LIBRARIES else _Itself(module)


def _of_tensorflow(function: types.FunctionType) -> bool:
    return _home(function).startswith("tensorflow.")


def _lasts(key: object) -> bool:
    return all(map(_lasts, key)) if type(key) is tuple else isinstance(key, _LASTING)


def _operation_key(operation: mtf.Operation, depth: int) -> Hashable:
    attributes = tuple([(name, _key(value, depth + 1)) for name, value in vars(operation).items()
                        if name not in _SKIPPED and not name.startswith(_MARK)])
    tensors = tuple([("mtf", ("shape", tuple(tensor.shape.dims)), tensor.dtype)
                     for tensor in (*operation.inputs, *operation.outputs)])
    return type(operation), tensors, attributes


def held_by(value: object, depth: int = 0) -> Iterator[object]:
    """The tensors and arrays in an operation that its `lowering_key` knows by shape and type alone: of operations that
    have one key, those that hold the very same do the same."""
    if isinstance(value, (tf.Tensor, np.ndarray)):
        yield value
        return
    parts: list[object] = []
    if isinstance(value, (list, tuple)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = [value[name] for name in sorted(value, key=str)]
    elif isinstance(value, types.FunctionType) and not _of_tensorflow(value):
        parts = [*map(content_of, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, mtf.Operation):
        parts = [held for name, held in vars(value).items() if name not in _SKIPPED and not name.startswith(_MARK)]
    for part in parts if depth <= _DEEPEST else ():
        yield from held_by(part, depth + 1)


def _key(value: object, depth: int = 0) -> Hashable:
    """Equal for values that make no difference to a lowering. Large arrays and tensors count by shape and dtype."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, mtf.Dimension):
        return "dim", value.name, value.size
    if isinstance(value, mtf.Shape):
        return "shape", tuple(value.dims)
    if isinstance(value, mtf.Tensor):
        return "mtf", _key(value.shape), value.dtype
    if isinstance(value, tf.Tensor):
        return "tf", value.dtype, str(value.shape)
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), tuple(value.ravel().tolist()) if _is_compared(value) else ()
    if depth > _DEEPEST:
        return _Itself(value)
    if isinstance(value, (list, tuple)):
        return "list", tuple(_key(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((name, _key(value[name], depth + 1)) for name in sorted(value, key=str))
    if isinstance(value, types.FunctionType) and not _of_tensorflow(value):
        cells = tuple(_key(content_of(cell), depth + 1) for cell in value.__closure__ or ())
        defaults = _key(value.__defaults__, depth + 1), _key(value.__kwdefaults__, depth + 1)
        return "function", _home(value), value.__code__, cells, defaults
    if isinstance(value, functools.partial):
        return "partial", _key(value.func, depth + 1), _key(value.args, depth + 1), _key(value.keywords, depth + 1)
    if isinstance(value, mtf.Operation):
        return _operation_key(value, depth + 1)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return type(value), value


def _is_compared(array: np.ndarray) -> bool:
    """Few whole numbers are axes, an order of dims, paddings: what is made depends on them."""
    return array.dtype.kind in "biu" and array.size <= _FEW


def content_of(cell: types.CellType) -> object:
    """What a function has of its surroundings; the cell itself where that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell
