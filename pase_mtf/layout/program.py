"""Functions that build a graph: what they take, what they return, and when two graphs are of one structure."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError, shortened
from pase_mtf.garbage import uncollected
from pase_mtf.layout.capture import capture_graph
from pase_mtf.layout.masters import placeholder_masters
from pase_mtf.layout.reads import Reads, watched
from pase_mtf.layout.scalars import shared_scalars
from pase_mtf.layout.scopes import quick_scopes
from pase_mtf.layout.space import MeshShape, parse_layout, rules_text
from pase_mtf.operations.flow import all_operations
from pase_mtf.operations.registry import rule_of

__all__ = ["BuiltGraph", "Program"]

_ARGUMENTS = ("mesh_shape", "layout")
# What operations hold that says what they do: offsets, dims they work along, those that may be split, and the like.
_SETTINGS = (bool, int, float, str, frozenset, mtf.Dimension, mtf.Shape)


@dataclasses.dataclass(frozen=True)
class BuiltGraph:
    """A graph that a program built, before it is lowered.

    Attributes:
      graph: of Mesh-TF.
      outputs: the tensors that the program exports, as far as it says.
      reads: what the program asked about the layout; None where nobody could see.
      own: the layout that the program was about to lower it with, if it came to that.
    """

    graph: mtf.Graph
    outputs: list[mtf.Tensor]
    reads: Reads | None = None
    own: tuple[MeshShape, dict[str, str]] | None = None

    def __post_init__(self) -> None:
        """Checks the outputs.

        Raises:
          UsageError: one is no tensor of the graph.
        """
        for number, tensor in enumerate(self.outputs):
            if not isinstance(tensor, mtf.Tensor) or tensor.graph is not self.graph:
                raise UsageError(f"output {number} is {shortened(tensor)}, no tensor of this graph; give mtf.Tensors")

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the dims that its tensors have, in loops, too."""
        return tuple(dict.fromkeys(name for operation in all_operations(self.graph)
                                   for tensor in (*operation.inputs, *operation.outputs)
                                   for name in tensor.shape.dimension_names))

    def has_structure_of(self, other: BuiltGraph) -> bool:
        """Whether the other graph has the same operations on the same tensors, whatever they are called.

        Two graphs that differ nearly always do so at once, in what they import: they are not read any further.
        """
        one, two = (_structure(built.graph.operations, {}) for built in (self, other))
        return all(entry == beside for entry, beside in itertools.zip_longest(one, two))


def _structure(operations: Iterable[mtf.Operation], number: dict[mtf.Tensor, int]) -> Iterator[Hashable]:
    """What operations do to which tensors, one after another; a loop is followed by its body, and an end."""
    for operation in operations:
        settings = tuple([(key, tuple(value.dims) if isinstance(value, mtf.Shape) else value)
                          for key, value in vars(operation).items() if isinstance(value, _SETTINGS) and key != "_name"])
        slices = getattr(operation, "_laid_out_tensor", None)
        # A loop's variables have no operation in it.
        inputs = tuple([number.setdefault(tensor, len(number)) for tensor in operation.inputs])
        outputs = operation.outputs
        yield (type(operation), settings, inputs,
               tuple([(tuple(tensor.shape.dims), tensor.dtype) for tensor in outputs]),
               slices and (len(slices.tensor_list), tuple(slices.slice_shape)))
        body = rule_of(operation).body(operation)
        if body:
            yield from _structure(body, number)
            yield None
        for tensor in outputs:
            number.setdefault(tensor, len(number))


def _may_be_given_more(function: object) -> bool:
    """Whether a decorator stands between a function and who calls it, which may give it what it needs (as
    `gin.configurable` does): calling it tells. What `layout.named` puts around a function gives it nothing."""
    inner = getattr(function, "__wrapped__", None)
    if getattr(function, "__globals__", {}).get("__name__") == "pase_mtf.layout.named":
        return _may_be_given_more(inner)
    return inner is not None


class Program:
    """A function that builds a graph.

    Attributes:
      arguments: which of "mesh_shape" and "layout" it takes: its graph may depend on them.
      has_defaults: whether it can be called without them.
    """

    def __init__(self, build_graph: Callable[..., object]) -> None:
        """Looks at what the function takes.

        Raises:
          UsageError: it is no function, or it needs other arguments.
        """
        self._build_graph = build_graph
        self._masters: Callable[[], contextlib.AbstractContextManager[None]] = placeholder_masters
        self._name = getattr(build_graph, "__name__", str(build_graph))
        if not callable(build_graph):
            raise UsageError(f"{str(build_graph)[:60]!r} is no graph and no function that builds one; "
                             "give an mtf.Graph or a function")
        parameters: Mapping[str, inspect.Parameter] = {}
        with contextlib.suppress(TypeError, ValueError):  # of some callables Python does not know it
            parameters = inspect.signature(build_graph).parameters
        self.arguments = tuple(name for name in _ARGUMENTS if name in parameters)
        # Who takes anything may hand it on to a function that takes none.
        self._guessed = not self.arguments
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self.arguments = _ARGUMENTS
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty
                    and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
        self._lacking = [name for name in required if name not in _ARGUMENTS]
        if self._lacking and not _may_be_given_more(build_graph):
            raise self._needs()
        self.has_defaults = all(name in parameters and name not in required for name in self.arguments)
        self._defaults = {name: parameters[name].default for name in self.arguments if name in parameters}

    def _needs(self) -> UsageError:
        return UsageError(f"{self._name} needs arguments ({', '.join(self._lacking)}); "
                          "give a function that takes none but mesh_shape and layout")

    def build_first(self, mesh: MeshShape | None, devices: int) -> tuple[BuiltGraph, tf.Graph]:
        """The graph for the layout that its arguments have by default, which is priced in any case; where they name
        none of this mesh, for a mesh over which nothing is split; where the function does not take that, or takes
        nothing, as it builds it by default. And the tf.Graph that it stands in, a new one."""
        try:
            return self._build_first(mesh, devices)
        except Exception:
            # It may do with its variables what no placeholder can stand for: save them, say.
            self._masters = contextlib.nullcontext
            with contextlib.suppress(Exception):
                return self._build_first(mesh, devices)
            raise

    def _build_first(self, mesh: MeshShape | None, devices: int) -> tuple[BuiltGraph, tf.Graph]:
        whole: tuple[MeshShape, dict[str, str]] = mesh or MeshShape((("rows", devices),)), {}
        named = self._named_layout()
        if named is not None and (named[0] == mesh if mesh else named[0].devices == devices):
            first = [named, whole]
        else:
            first = [whole]
        if self.arguments and self.has_defaults:
            for layout in first:
                # Whatever it says to what it is not made for; what it had built by then is no part of the next.
                with contextlib.suppress(Exception), tf.Graph().as_default() as tf_graph:
                    return self.build(layout), tf_graph
        with tf.Graph().as_default() as tf_graph:
            return self.build(whole if self.arguments and not self.has_defaults else None), tf_graph

    def _named_layout(self) -> tuple[MeshShape, dict[str, str]] | None:
        """The layout that the defaults of its arguments are; None where they are none."""
        mesh_shape, rules = (self._defaults.get(name) for name in _ARGUMENTS)
        if isinstance(mesh_shape, (str, mtf.Shape)) and isinstance(rules, (str, mtf.LayoutRules)) and mesh_shape:
            with contextlib.suppress(UsageError):
                # Rules of a whole project name axes of other meshes, too, of which Mesh-TF takes no notice.
                return parse_layout((mesh_shape, rules), foreign=True)
        return None

    def own_layout(self, first: BuiltGraph) -> tuple[MeshShape, dict[str, str]] | None:
        """The layout that the program itself names: that of its own lowering, or the defaults of its arguments.

        Args:
          first: what it built first.
        """
        if not self.arguments:
            return first.own
        if not self.has_defaults:
            return None
        named = self._named_layout()
        if named is not None:
            return named
        if first.own is None or first.reads is None:  # then it was called without arguments
            return first.own
        # What it lowers with where nobody says anything stands in its flags, perhaps.
        with tf.Graph().as_default(), contextlib.suppress(Exception):
            return self.build(None).own
        return None

    def build(self, layout: tuple[MeshShape, dict[str, str]] | None) -> BuiltGraph:
        """Calls the function in the current tf.Graph; where it goes on to lower its graph, it is stopped there.

        Args:
          layout: mesh shape and layout rules, of which it gets what it takes; None: it is called without arguments.

        Raises:
          UsageError: it returns something else than a graph.
        """
        if layout is None:
            return self._call({}, None)
        mesh, rules = layout
        with watched(mesh, rules, (str(mesh), rules_text(rules))) as (reads, given):
            try:
                return self._call({name: given[name] for name in self.arguments}, reads)
            except (TypeError, UsageError) as error:
                cause = error if isinstance(error, TypeError) else error.__cause__
                if not (self._guessed and isinstance(cause, TypeError) and self.arguments
                        and any(f"unexpected keyword argument '{name}'" in str(cause) for name in _ARGUMENTS)):
                    raise
        self.arguments, self.has_defaults = (), True
        return self._call({}, None)

    def _call(self, given: Mapping[str, str], reads: Reads | None) -> BuiltGraph:
        result = None
        with capture_graph() as captured, self._masters(), shared_scalars(), quick_scopes(), uncollected():
            try:
                result = self._build_graph(**given)
            except (TypeError, UsageError) as error:  # its decorator gives it nothing, either
                cause = error if isinstance(error, TypeError) else error.__cause__  # as `layout.named` has it
                if isinstance(cause, TypeError) and " missing " in str(cause) and any(
                        repr(name) in str(cause) for name in self._lacking):
                    raise self._needs() from error
                raise
        if captured.found:
            with contextlib.nullcontext() if reads is None else reads.paused():
                return BuiltGraph(captured.graph, [], reads, captured.own)
        outputs: Iterable[mtf.Tensor] = ()
        if isinstance(result, tuple) and len(result) == 2:
            result, outputs = result
        if isinstance(outputs, mtf.Tensor):
            outputs = [outputs]
        if not isinstance(result, mtf.Graph):
            raise UsageError(f"{self._name} returned {type(result).__name__}; return an mtf.Graph, or (graph, outputs)")
        if not isinstance(outputs, Iterable):
            raise UsageError(f"{self._name} returned (graph, {shortened(outputs)}); return an mtf.Graph, or "
                             "(graph, outputs) with a list of mtf.Tensors")
        return BuiltGraph(result, list(outputs), reads)
