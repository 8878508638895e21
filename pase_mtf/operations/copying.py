"""Copies of an operation with other sizes: the same class and settings on smaller tensors, in a graph of its own.

An operation keeps what its constructor was given: dims, shapes, numbers, functions that hold them. In a copy, dims and
what is made of them have the new sizes. A number that is no dim's size may be one all the same (the end of a mask,
say), so dims that are at least as large keep theirs.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.lowering_key import content_of, is_of_package, names_in

__all__ = [
    "SMALL",
    "CannotCopyError",
    "Pair",
    "copy_operation",
    "numbers_that_may_be_sizes",
    "places_of",
    "shrunk",
    "shrunk_in_order",
    "shrunk_together",
]

SMALL = 8
"""The size that a larger dim has in a copy."""

Pair: TypeAlias = "tuple[str, int]"
"""Name and size of a dim of the original."""

# What the constructor of mtf.Operation sets, and a copy has of its own.
_OWN = {"_inputs", "_outputs", "_mesh", "_name"}
# In which nobody writes down the sizes of a program.
_NO_PROGRAMS = sys.stdlib_module_names | {"absl"}


class CannotCopyError(Exception):
    """Why there is no copy."""


def _class_values(operation: mtf.Operation) -> Iterator[object]:
    """What an operation's class and those that it inherits from hold, Mesh-TF's own left out: functions, numbers."""
    for cls in type(operation).__mro__:
        if cls.__module__ != mtf.ops.__name__:
            for name, value in vars(cls).items():
                # Of Python's own names functions alone: `__firstlineno__` is a number that no program wrote.
                if name not in ("__init__", "gradient") and (
                        isinstance(value, types.FunctionType) or not name.startswith("__")):
                    yield getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _is_of_program(module: str) -> bool:
    """Whether numbers in a module may be sizes: that `re` keeps 512 patterns says nothing of an operation."""
    return not is_of_package(module) and module.split(".")[0] not in _NO_PROGRAMS


def _found_by_name(function: types.FunctionType) -> Iterator[object]:
    """What a function finds by the names of its module, and in modules and classes of programs that stand there."""
    names, seen = names_in(function.__code__), set[int]()
    left: list[Any] = [function.__globals__[name] for name in sorted(names & function.__globals__.keys())]
    while left:
        value = left.pop()
        if not isinstance(value, (types.ModuleType, type)):
            yield value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        elif id(value) not in seen:
            seen.add(id(value))
            for home in value.__mro__ if isinstance(value, type) else (value,):
                if _is_of_program(str(home.__module__ if isinstance(home, type) else home.__name__)):
                    left += [vars(home)[name] for name in sorted(names & vars(home).keys())]


class _Kept(int):
    """A number in an object of a program, in the text of a function or in an array: a copy of the operation has the
    very same, whatever its sizes are."""


class _SizeOf(int):
    """The size of a dim: a copy of the operation has another one where the dim is one of the operation's tensors."""

    pair: Pair


def _size_of(dim: mtf.Dimension) -> _SizeOf:
    size = _SizeOf(dim.size)
    size.pair = dim.name, dim.size
    return size


def _stays(number: int, pairs: Collection[Pair]) -> bool:
    """Whether a copy of an operation with these dims has the very same number, whatever its sizes are."""
    if isinstance(number, _SizeOf):
        return number.pair not in pairs
    return isinstance(number, _Kept) or number not in {size for _, size in pairs}


def _settings(value: object) -> Iterator[object]:
    """What an object of a program holds, by itself, in slots or by its classes, and their functions: any of them may be
    called."""
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        for name, found in vars(cls).items() if _is_of_program(cls.__module__) else ():
            if isinstance(found, types.MemberDescriptorType):
                yield getattr(value, name, None)
            elif name == "__call__" or (not name.startswith("__") and isinstance(
                    found, (int, float, np.number, np.ndarray, list, tuple, set, frozenset, dict, types.FunctionType,
                            functools.cached_property))):
                yield found
            elif isinstance(found, (staticmethod, classmethod)):
                yield found.__func__
            elif isinstance(found, property):
                yield found.fget


def _numbers(value: object, depth: int = 0, seen: set[int] | None = None) -> Iterator[int]:
    """The integers that a value holds, and of other numbers the next integers away from 0: a place is below 7.5 where
    it is below 8. What functions find by name is looked at anew, however deep they lie, once for every function
    (`seen`)."""
    seen = set() if seen is None else seen
    if depth > 5 or isinstance(value, (bool, str, bytes, mtf.Tensor)):
        return
    inner: Iterable[object] = ()
    if isinstance(value, mtf.Dimension):
        yield _size_of(value)
    elif isinstance(value, mtf.Shape):
        inner = value.dims
    elif isinstance(value, mtf.Operation):  # that which it is the gradient of, say
        if id(value) not in seen:
            seen.add(id(value))
            inner = [held for name, held in vars(value).items() if name not in _OWN]
    elif isinstance(value, (int, np.integer)):
        yield int(value)
    elif isinstance(value, (float, np.floating)):
        if math.isfinite(value):  # places are compared with such numbers, too
            yield _Kept(math.ceil(abs(float(value))))
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "iuf":
            finite = value[np.isfinite(value)]
            yield from map(_Kept, np.unique(np.ceil(np.abs(finite)) if value.dtype.kind == "f" else finite).tolist())
    elif isinstance(value, (slice, range)):
        yield from map(_Kept, _numbers((value.start, value.stop, value.step), depth + 1, seen))
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, functools.partial):
        inner = (*value.args, *value.keywords.values(), value.func)
    elif isinstance(value, types.CodeType):
        inner = value.co_consts
    elif isinstance(value, types.FunctionType):
        inner = (value.__defaults__, value.__kwdefaults__, *map(content_of, value.__closure__ or ()))
        yield from map(_Kept, _numbers(value.__code__, depth + 1, seen))
        if id(value) not in seen and _is_of_program(str(value.__globals__.get("__name__", ""))):
            seen.add(id(value))
            for found in _found_by_name(value):
                yield from map(_Kept, _numbers(found, 0, seen))
    elif isinstance(value, types.MethodType):
        inner = (value.__self__,)
        yield from map(_Kept, _numbers(value.__func__, depth + 1, seen))
    # Of a function or a property that is cached, or one of TensorFlow's, the function.
    elif type(value).__module__ == "functools" or "__wrapped__" in getattr(value, "__dict__", {}):
        for name in ("__wrapped__", "func", "args", "keywords"):
            yield from map(_Kept, _numbers(getattr(value, name, None), depth + 1, seen))
    elif id(value) not in seen and (
            isinstance(value, types.SimpleNamespace) or _is_of_program(str(type(value).__module__))):
        seen.add(id(value))
        for found in _settings(value):
            yield from map(_Kept, _numbers(found, depth + 1, seen))
    for item in inner:
        yield from _numbers(item, depth + 1, seen)


def numbers_that_may_be_sizes(operation: mtf.Operation) -> set[int]:
    """The numbers from `SMALL` on, or as far below 0, that an operation holds and that are no size of its dims, or that
    stand in the text of its class or beside it: what it finds by the names of its module."""
    pairs = {(dim.name, dim.size) for tensor in (*operation.inputs, *operation.outputs) for dim in tensor.shape.dims}
    held = [number for name, value in vars(operation).items() if name not in _OWN for number in _numbers(value)]
    written = {number for value in _class_values(operation) for number in _numbers(value)}
    written |= {number for number in held if _stays(number, pairs)}
    return {abs(int(number)) for number in written if abs(number) >= SMALL}


class _Copying:
    """Values of an operation, and what becomes of them in its copy."""

    def __init__(self, sizes: Mapping[Pair, int], tensors: Mapping[mtf.Tensor, mtf.Tensor], mesh: mtf.Mesh) -> None:
        self._sizes, self._tensors, self._mesh = sizes, dict(tensors), mesh
        self._operations: dict[mtf.Operation, mtf.Operation] = {}
        of_size: dict[int, set[int]] = {}
        for (_, size), small in sizes.items():
            of_size.setdefault(size, set()).add(small)
        self._numbers = {size: next(iter(small)) for size, small in of_size.items() if size > SMALL and len(small) == 1}
        self._ambiguous = {size for size, small in of_size.items() if size > SMALL and len(small) > 1}

    def dim(self, dim: mtf.Dimension) -> mtf.Dimension:
        return mtf.Dimension(dim.name, self._sizes.get((dim.name, dim.size), dim.size))

    def shape(self, shape: mtf.Shape) -> mtf.Shape:
        return mtf.Shape([self.dim(dim) for dim in shape.dims])

    def value(self, value: object, depth: int = 0) -> Any:
        """What stands in the copy in the place of a value.

        Raises:
          CannotCopyError: it depends on sizes in a way that cannot be followed.
        """
        if depth > 8:
            return value
        if isinstance(value, mtf.Dimension):
            return self.dim(value)
        if isinstance(value, mtf.Shape):
            return self.shape(value)
        if isinstance(value, mtf.Tensor):
            if value not in self._tensors:
                raise CannotCopyError(f"it holds tensor {value.name}, which is none of its inputs")
            return self._tensors[value]
        if isinstance(value, mtf.Mesh):
            return self._mesh
        if isinstance(value, mtf.Graph):
            return self._mesh.graph
        if isinstance(value, mtf.Operation):
            return self.operation(value, depth + 1)
        if isinstance(value, (bool, str, bytes, float, complex, type)) or value is None:
            return value
        if isinstance(value, (int, np.integer)):
            if value in self._ambiguous:
                raise CannotCopyError(f"it holds {value}, which is the size of several dims")
            return self._numbers[int(value)] if value in self._numbers else value
        if isinstance(value, (np.ndarray, tf.Tensor)):
            if any((size or 0) > SMALL for size in np.shape(value)):
                raise CannotCopyError(f"it holds an array of shape {tuple(np.shape(value))}")
            return value
        return self._container(value, depth + 1)

    def _container(self, value: object, depth: int) -> object:
        if isinstance(value, (list, set, frozenset)):
            return type(value)([self.value(item, depth) for item in value])
        if isinstance(value, tuple):
            items = [self.value(item, depth) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            made = copy.copy(value)
            made.update({name: self.value(item, depth) for name, item in value.items()})
            return made
        if isinstance(value, functools.partial):
            return functools.partial(self.value(value.func, depth), *self.value(value.args, depth),
                                     **self.value(value.keywords, depth))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.value(value.__self__, depth))
        if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return self._function(value, depth)
        return value

    def _function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        if str(function.__module__).startswith("tensorflow."):
            return function
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(types.CellType(self.value(cell.cell_contents, depth)))
            except ValueError:  # not bound yet
                cells.append(cell)
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__,
                                  self.value(function.__defaults__, depth), tuple(cells) or None)
        made.__kwdefaults__ = self.value(function.__kwdefaults__, depth)
        made.__dict__.update(function.__dict__)
        return made

    def operation(self, original: mtf.Operation, depth: int = 0) -> mtf.Operation:
        """The copy of an operation whose inputs were copied; its outputs are, too, from now on."""
        if original not in self._operations:
            made = self._operations[original] = copy.copy(original)
            made._mesh, made._name = self._mesh, self._mesh.graph.unique_name("tried")
            made._inputs = [self.value(tensor, depth) for tensor in original.inputs]
            made._outputs = []
            for number, tensor in enumerate(original.outputs):
                if tensor not in self._tensors:
                    self._tensors[tensor] = mtf.Tensor(made, self.shape(tensor.shape), tensor.dtype, index=number)
                made._outputs.append(self._tensors[tensor])
            for name, value in vars(original).items():
                if name not in _OWN:
                    setattr(made, name, self.value(value, depth + 1))
        return self._operations[original]


def copy_operation(operation: mtf.Operation, inputs: Sequence[mtf.Tensor], sizes: Mapping[Pair, int], mesh: mtf.Mesh,
                   ) -> mtf.Operation:
    """A copy of an operation, the last of its graph's operations.

    Args:
      operation: is left as it is.
      inputs: of the copy.
      sizes: (name, size) of the original's dims -> size in the copy; those that are not there keep theirs.
      mesh: of the copy.

    Raises:
      CannotCopyError: what it holds cannot be copied.
    """
    copying = _Copying(sizes, dict(zip(operation.inputs, inputs, strict=True)), mesh)
    made = copying.operation(operation)
    made.graph.operations.append(made)
    return made


def shrunk(pairs: Collection[Pair], kept: Collection[Pair]) -> dict[Pair, int]:
    """Small sizes for all dims but those that keep theirs."""
    return {pair: pair[1] if pair in kept else min(pair[1], SMALL) for pair in pairs}


def places_of(operation: mtf.Operation) -> set[int]:
    """The numbers that an operation holds, each the size of one of its dims and less than that of another: it may as
    well be a place in that one."""
    sizes = {size for tensor in (*operation.inputs, *operation.outputs) for size in tensor.shape.to_integer_list}
    held = {number for name, value in vars(operation).items() if name not in _OWN for number in _numbers(value)
            if not isinstance(number, _SizeOf)}
    return {int(number) for number in held & sizes if SMALL <= number < max(sizes)}


def shrunk_in_order(pairs: Collection[Pair], kept: Collection[Pair], marks: Collection[int]) -> dict[Pair, int]:
    """As `shrunk`, but dims that are larger than one of these numbers stay larger than a dim of that size: what is a
    place in the original is one in the copy."""
    # By steps that 2 and 4 divide: twice as large each, five dims were too large to be tried.
    return {pair: min(pair[1], SMALL + 4 * sum(SMALL <= mark < pair[1] for mark in marks))
            if pair not in kept and pair[1] > SMALL else size for pair, size in shrunk(pairs, kept).items()}


def shrunk_together(pairs: Collection[Pair], kept: Collection[Pair]) -> Iterator[dict[Pair, int]]:
    """As `shrunk`, where a dim has several sizes (before and after it is padded, say): as far apart as they are, and in
    the same ratio."""
    sizes = shrunk(pairs, kept)
    least: dict[str, int] = {}
    for name, size in pairs:
        least[name] = min(size, least.get(name, size))
    open_pairs = [pair for pair in pairs if pair not in kept and least[pair[0]] > SMALL]
    yield {**sizes, **{(name, size): SMALL + size - least[name] for name, size in open_pairs}}
    yield {**sizes, **{(name, size): max(1, SMALL * size // least[name]) for name, size in open_pairs}}
