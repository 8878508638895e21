"""What a program looks at of a layout while it builds its graph.

A program that takes `mesh_shape` and `layout` may build another graph for another layout; few do, and those look at few
dims: into how many parts the batch goes, or the experts. The two strings that a program is given here answer to
everything that strings do, and what Mesh-TF makes of them (a Shape, LayoutRules) answers as they would; all of them
note what was asked. Two layouts with the same answers to what was asked have the same graph.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pase_mtf.compat import mtf, placement_mesh_impl
from pase_mtf.layout.space import MeshShape
from pase_mtf.replaced import replaced

__all__ = ["Reads", "watched"]

_ops = mtf.ops
_MESH, _RULES = "mesh_shape", "layout"
# The module of Mesh-TF whose attention splits its inputs as the layout says; programs without attention never load it.
_ATTENTION = "mesh_tensorflow.transformer.attention"
_RESHAPE = "maybe_reshape_attention_input_for_2d_sharding"
# What Python itself asks of an object, whatever the program does.
_UNSEEN = {"__new__", "__init__", "__class__", "__getattribute__", "__init_subclass__", "__subclasshook__", "__dir__",
           "__setattr__", "__delattr__", "__doc__", "__sizeof__", "__getstate__", "__bool__"}


_Tensors: TypeAlias = "Sequence[mtf.Tensor | None]"


class Reads:
    """What was asked about a layout, and what the answers were.

    Attributes:
      answers: question -> answer.
    """

    def __init__(self, mesh: MeshShape, rules: Mapping[str, str], texts: tuple[str, str]) -> None:
        """Nothing has been asked yet.

        Args:
          mesh, rules: the layout.
          texts: as the program is given it.
        """
        self._layout = mesh, dict(rules), texts
        self._paused = 0
        self.answers: dict[tuple[str, Hashable], Hashable] = {}

    def ask(self, kind: str, about: Hashable) -> None:
        """Notes a question: "text" or "given" about one of the arguments, "axis" or "parts" about the name of a dim,
        "name" or "size" about the number of an axis of the mesh, "axes" about how many there are, "attention" about
        the inputs of an attention (see `_attention_shapes`)."""
        if not self._paused:
            self.answers[kind, about] = _answer(kind, about, *self._layout)

    def parts(self, dim: str) -> int:
        """Into how many parts a dim goes under the layout."""
        found = _answer("parts", dim, *self._layout)
        assert isinstance(found, int)
        return found

    def close(self) -> None:
        """The graph is built: who asks now (its lowering) makes no difference to it."""
        self._paused += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is noted: what is asked there makes no difference to the graph."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def same_for(self, mesh: MeshShape, rules: Mapping[str, str], texts: tuple[str, str]) -> bool:
        """Whether another layout has the same answers."""
        return all(_answer(*question, mesh, rules, texts) == answer for question, answer in self.answers.items())


def _answer(kind: str, about: Any, mesh: MeshShape, rules: Mapping[str, str], texts: tuple[str, str]) -> Hashable:
    text = texts[about == _RULES]
    if kind == "text":
        return text
    if kind == "given":
        return bool(text)
    if kind == "axes":
        return len(mesh.axes)
    if kind == "axis":  # of a dim: which one, and its size
        axis = rules.get(about)
        return None if axis is None else (mesh.names.index(axis), dict(mesh.axes)[axis])
    if kind == "attention":
        return _attention_shapes(*about, *texts)
    if kind == "parts":  # into how many a dim goes, on whichever axis
        return dict(mesh.axes)[rules[about]] if about in rules else 1
    if about >= len(mesh.axes):
        return None
    return mesh.axes[about][kind == "size"]


@functools.lru_cache(maxsize=4096)
def _attention_shapes(reshape: Callable[..., _Tensors], inputs: tuple[tuple[mtf.Dimension, ...] | None, ...],
                      kept: tuple[mtf.Dimension, ...], mesh_shape: str, rules: str) -> Hashable:
    """What Mesh-TF's attention makes of its inputs under a layout: it splits a dim of them further where an axis of the
    mesh is left. It looks at all axes and rules for that, and nearly always leaves them as they are.

    Args:
      reshape: Mesh-TF's own function.
      inputs: the dims of queries, keys, values, bias.
      kept: dims that are not to be split.
      mesh_shape, rules: the layout.
    """
    mesh = mtf.Mesh(mtf.Graph(), "attention")
    tensors = [None if dims is None else mtf.zeros(mesh, mtf.Shape(dims)) for dims in inputs]
    context = types.SimpleNamespace(model=types.SimpleNamespace(mesh_shape=mesh_shape, layout=rules))
    try:
        made = reshape(context, *tensors, list(kept))
    except Exception as error:  # what it refuses under one layout it may take under another
        return type(error).__name__
    return tuple(None if tensor is None else tuple(tensor.shape.dims) for tensor in made)


def _noting(base: type, ask: Callable[[Any], None]) -> dict[str, Callable[..., object]]:
    """All methods of a class, each of which notes that it was called."""
    def method(name: str) -> Callable[..., object]:
        original = getattr(base, name)

        def call(self: object, *args: object, **kwargs: object) -> object:
            ask(self)
            return original(self, *args, **kwargs)
        return call
    return {name: method(name) for name in dir(base) if name not in _UNSEEN and callable(getattr(base, name))}


class _Text(str):
    """The mesh shape or the layout rules, as a string."""

    reads: Reads
    argument: str

    def __bool__(self) -> bool:
        self.reads.ask("given", self.argument)
        with self.reads.paused():
            return len(self) > 0

    def __radd__(self, other: str) -> str:
        return other + str(self)


class _Axis(mtf.Dimension):
    """A dimension of the mesh."""

    reads: Reads
    number: int

    @property
    def name(self) -> str:
        """Its name."""
        self.reads.ask("name", self.number)
        return tuple.__getitem__(self, 0)

    @property
    def size(self) -> int:
        """Its number of devices."""
        self.reads.ask("size", self.number)
        return tuple.__getitem__(self, 1)


def _ask_for_axis(axis: _Axis) -> None:
    axis.reads.ask("name", axis.number)
    axis.reads.ask("size", axis.number)


class _Axes(list[mtf.Dimension]):
    """The dimensions of a mesh; whoever does anything but take one of them sees how many there are."""

    reads: Reads

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice) or which < 0:
            self.reads.ask("axes", None)
        return list.__getitem__(self, which)


for _class, _base, _ask in ((_Text, str, lambda text: text.reads.ask("text", text.argument)),
                            (_Axis, tuple, _ask_for_axis), (_Axes, list, lambda axes: axes.reads.ask("axes", None))):
    for _name, _method in _noting(_base, _ask).items():
        if _name not in vars(_class):
            setattr(_class, _name, _method)


class _MeshOfAxes(mtf.Shape):
    """The mesh shape, as Mesh-TF reads it."""

    reads: Reads

    @property
    def dims(self) -> _Axes:
        """Its dimensions."""
        return self._dims

    @property
    def size(self) -> int:
        """The number of devices, which all layouts have in common."""
        with self.reads.paused():
            return super().size


class _Rules(mtf.LayoutRules):
    """The layout rules, as Mesh-TF reads them."""

    reads: Reads

    @property
    def _pairs(self) -> set[tuple[str, str]]:
        self.reads.ask("text", _RULES)
        return self.__dict__["pairs"]

    @_pairs.setter
    def _pairs(self, pairs: set[tuple[str, str]]) -> None:
        self.__dict__["pairs"] = pairs

    def tensor_dimension_to_mesh_axis(self, tensor_dimension: mtf.Dimension, mesh_shape: mtf.Shape) -> int | None:
        """As Mesh-TF's."""
        if getattr(mesh_shape, "reads", None) is not self.reads:  # another mesh than that of the layout
            return super().tensor_dimension_to_mesh_axis(tensor_dimension, mesh_shape)
        self.reads.ask("axis", tensor_dimension.name)
        with self.reads.paused():
            return super().tensor_dimension_to_mesh_axis(tensor_dimension, mesh_shape)


_Pairs: TypeAlias = "list[tuple[str, str | int]]"


class _Parsed(list[tuple[str, str | int]]):
    """What Mesh-TF's parser makes of one of the two strings."""

    reads: Reads


def _parse(reads: Reads, original: Callable[[str, bool], _Pairs]) -> Callable[..., _Pairs]:
    def parse(text: str, seconds_to_int: bool = False) -> _Pairs:
        if not isinstance(text, _Text) or text.reads is not reads:
            return original(text, seconds_to_int)
        with reads.paused():
            parsed = _Parsed(original(str.__str__(text), seconds_to_int))
        if (text.argument == _MESH) is not seconds_to_int:  # the one read as the other
            reads.ask("text", text.argument)
        else:
            parsed.reads = reads
        return parsed
    return parse


def _are_of(reads: Reads, layout: object, mesh_shape: object) -> bool:
    """Whether these are the layout and the mesh shape that the program was given, as text or as Mesh-TF reads them."""
    return isinstance(layout, (_Text, _Rules)) and isinstance(mesh_shape, (_Text, _MeshOfAxes)) and (
        layout.reads is reads is mesh_shape.reads and getattr(layout, "argument", _RULES) == _RULES
        and getattr(mesh_shape, "argument", _MESH) == _MESH)


def _attention(reads: Reads, original: Callable[..., _Tensors]) -> Callable[..., _Tensors]:
    """Of Mesh-TF's attention, what it makes of its inputs, not all that it looks at for that."""
    def reshape(context: object, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, bias: mtf.Tensor | None,
                unsplittable_dims: list[mtf.Dimension]) -> _Tensors:
        model = getattr(context, "model", None)
        if not _are_of(reads, getattr(model, "layout", None), getattr(model, "mesh_shape", None)):
            return original(context, q, k, v, bias, unsplittable_dims)
        inputs = tuple(None if tensor is None else tuple(tensor.shape.dims) for tensor in (q, k, v, bias))
        reads.ask("attention", (original, inputs, tuple(unsplittable_dims)))
        with reads.paused():
            return original(context, q, k, v, bias, unsplittable_dims)
    return reshape


def _parts(reads: Reads, original: Callable[..., int]) -> Callable[..., int]:
    """Of `tensor_dim_to_mesh_dim_size`, which looks for an axis and tells its size only."""
    def parts(layout: object, mesh_shape: object, tensor_dim: mtf.Dimension) -> int:
        if not _are_of(reads, layout, mesh_shape):
            return original(layout, mesh_shape, tensor_dim)
        reads.ask("parts", tensor_dim.name)
        with reads.paused():
            return original(layout, mesh_shape, tensor_dim)
    return parts


def _new_shape(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: mtf.Shape, dims: object) -> None:
        original(self, dims)
        if isinstance(dims, _Parsed) and hasattr(dims, "reads") and type(self) is mtf.Shape:
            axes = _Axes(_Axis(name, size) for name, size in dims)
            for number, axis in enumerate(list.__iter__(axes)):
                axis.reads, axis.number = dims.reads, number
            self.__class__ = _MeshOfAxes
            self._dims = axes
            self.reads = axes.reads = dims.reads
    return init


def _new_rules(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: mtf.LayoutRules, pairs: object) -> None:
        original(self, pairs)
        if isinstance(pairs, _Parsed) and hasattr(pairs, "reads") and type(self) is mtf.LayoutRules:
            known = self.__dict__.pop("_pairs")
            self.__class__ = _Rules
            self.reads = pairs.reads
            self._pairs = known
    return init


def _unnoted(reads: Reads, original: Callable[..., None]) -> Callable[..., None]:
    def init(*args: object, **kwargs: object) -> None:
        with reads.paused():
            original(*args, **kwargs)
    return init


def _in_patterns(original: Callable[..., object]) -> Callable[..., object]:
    """A function of `re`, whose compiled code asks its strings nothing."""
    def search(*args: object, **kwargs: object) -> object:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, _Text):
                argument.reads.ask("text", argument.argument)
        return original(*args, **kwargs)
    return search


@contextlib.contextmanager
def watched(mesh: MeshShape, rules: Mapping[str, str], texts: tuple[str, str]) -> Iterator[
        tuple[Reads, dict[str, str]]]:
    """The arguments of a program, whose use is noted within the block.

    Patterns that a program has compiled beforehand, `str.join` and `io.StringIO` read a string without its knowledge,
    and so do patterns in threads that the program starts; everything else is seen.

    Args:
      mesh, rules: the layout.
      texts: the same as mesh shape and layout rules for the program.

    Yields:
      (what is asked, argument -> string).
    """
    reads = Reads(mesh, rules, texts)
    given: dict[str, str] = {}
    for argument, text in zip((_MESH, _RULES), texts, strict=True):
        given[argument] = noted = _Text(text)
        noted.reads, noted.argument = reads, argument
    impl = placement_mesh_impl.PlacementMeshImpl
    attention = sys.modules.get(_ATTENTION)
    noting: list[tuple[object, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
        (_ops, "_parse_string_to_list_of_pairs", functools.partial(_parse, reads)),
        *((holder, "tensor_dim_to_mesh_dim_size", functools.partial(_parts, reads)) for holder in (_ops, mtf)),
        (mtf.Shape, "__init__", _new_shape), (mtf.LayoutRules, "__init__", _new_rules),
        *([(attention, _RESHAPE, functools.partial(_attention, reads))] if attention else []),
        (impl, "__init__", functools.partial(_unnoted, reads)),  # it counts its devices
        *((re, name, _in_patterns) for name in ("search", "match", "fullmatch", "split", "findall", "finditer", "sub",
                                                "subn"))]
    with contextlib.ExitStack() as stack:
        for holder, name, make in noting:
            stack.enter_context(replaced(holder, name, make))
        try:
            yield reads, given
        finally:
            reads.close()
