"""Tries an operation of a class that nobody described: on small tensors, split and unsplit, comparing values.

A copy of the operation with small sizes is lowered by stock mtf.Lowering on one device, and on virtual devices with a
dim split into 2 and into 4 shards and into as many as it has elements, on a mesh with other axes, with two dims split,
and with inputs that are pending sums. Every slice on every device is compared with what one device computes. What comes
out right is taken as what the class can split.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

import numpy as np

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.operations.copying import (
    CannotCopyError,
    Pair,
    copy_operation,
    numbers_that_may_be_sizes,
    places_of,
    shrunk,
    shrunk_in_order,
    shrunk_together,
)
from pase_mtf.operations.lowering_key import content_of, lowering_key
from pase_mtf.operations.protocols import LaidOut
from pase_mtf.replaced import replaced

__all__ = ["Trial", "try_operation"]

# Elements that the tensors of an operation may have together, where it has to be tried at some of its own sizes.
_MOST_ELEMENTS = 2**22
_DEVICE = "/device:CPU:0"
_SUMMED = "_tried_sum"
# Dims of which pairs are tried.
_MOST_DIMS = 6
# Shards into which a dim is split at most.
_MOST_PARTS = 32
# Operations and lists within each other whose arrays are looked at: as deep as `lowering_key` takes values apart.
_DEEPEST = 7
_WRONG = "tried, it gives wrong values"


@dataclasses.dataclass(frozen=True)
class Trial:
    """What trying an operation showed.

    Attributes:
      splits: names of the dims that may be split.
      whole: dim name -> why it may not.
      apart: pairs of dims, of different tensors, that may not be on one mesh axis.
      contracted: for every output, the dims that are split rightly and that it does not have.
      pending: for every output, the dims whose split leaves it a pending sum.
      passed: output -> input, by number: where this is a pending sum, so is that.
      reduced: numbers of the inputs that may not be pending sums.
      untried: why it could not be tried; "" where it could.
      alone: those of `whole` that come out right where the mesh has no other axis.
    """

    splits: tuple[str, ...] = ()
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apart: tuple[tuple[str, str], ...] = ()
    contracted: tuple[tuple[str, ...], ...] = ()
    pending: tuple[tuple[str, ...], ...] = ()
    passed: Mapping[int, int] = dataclasses.field(default_factory=dict)
    reduced: tuple[int, ...] = ()
    untried: str = ""
    alone: tuple[str, ...] = ()


class _CannotTryError(Exception):
    """Why the values of an operation cannot be compared."""


_TRIED: weakref.WeakKeyDictionary[mtf.Graph, dict[Hashable, Trial]] = weakref.WeakKeyDictionary()


def try_operation(operation: mtf.Operation) -> Trial:
    """What an operation can split; operations of a graph that are alike are tried once.

    Args:
      operation: of any class; it is left as it is.
    """
    tried = _TRIED.setdefault(operation.graph, {})
    # A `lowering_key` has the shapes of floating point arrays: what they hold makes a difference to values only.
    key = lowering_key(operation), tuple(_arrays(operation))
    if key not in tried:
        try:
            tried[key] = _Trying(_bench(operation)).trial()
        except (_CannotTryError, CannotCopyError) as error:
            tried[key] = Trial(untried=str(error))
    return tried[key]


def _arrays(value: object, depth: int = 0) -> Iterator[bytes]:
    """What the arrays hold that an operation has, or what it keeps: operations, collections, functions."""
    if isinstance(value, np.ndarray):
        yield value.tobytes()
    elif depth < _DEEPEST:
        for inner in _kept_in(value):
            yield from _arrays(inner, depth + 1)


def _kept_in(value: object) -> Collection[object]:
    """What a value that is copied with an operation (`copying`) holds itself."""
    if isinstance(value, mtf.Operation):
        return vars(value).values()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        return (*map(content_of, value.__closure__ or ()), *(value.__defaults__ or ()),
                *(value.__kwdefaults__ or {}).values())
    return ()


def _told(error: Exception) -> str:
    if isinstance(error, tf.errors.OpError):  # its text is the place in the graph
        return f"{type(error).__name__} when it is run"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _pairs(operation: mtf.Operation) -> list[Pair]:
    tensors = (*operation.inputs, *operation.outputs)
    return list(dict.fromkeys((dim.name, dim.size) for tensor in tensors for dim in tensor.shape.dims))


def _attempts(operation: mtf.Operation) -> Iterator[dict[Pair, int]]:
    """Sizes to try an operation with, smallest first: of some dims their own, in the end of all."""
    pairs = _pairs(operation)
    numbers = numbers_that_may_be_sizes(operation)
    base = {pair for pair in pairs if numbers and pair[1] >= min(numbers)}
    by_name = [{pair for pair in pairs if pair[0] == name} for name in dict.fromkeys(name for name, _ in pairs)]
    kept = (*({*base, pair} for pair in pairs if pair not in base), *(base | alike for alike in by_name), set(pairs))
    seen: list[dict[Pair, int]] = []
    places = places_of(operation)
    # Of many sizes all in order may be too large: then those that are beyond a place.
    in_order = [shrunk_in_order(pairs, base, marks)
                for marks in ({size for _, size in pairs}, places)] if places else []
    for sizes in (*in_order, shrunk(pairs, base), *shrunk_together(pairs, base), *(
            shrunk(pairs, keep) for keep in kept)):
        elements = sum(math.prod(sizes[dim.name, dim.size] for dim in tensor.shape.dims)
                       for tensor in (*operation.inputs, *operation.outputs))
        if sizes not in seen and elements <= _MOST_ELEMENTS:
            seen.append(sizes)
            yield sizes


def _bench(operation: mtf.Operation) -> _Bench:
    """The operation at the smallest sizes at which it lowers on one device."""
    if not operation.outputs:
        raise _CannotTryError("it has no outputs, so that no values can be compared")
    for tensor in operation.inputs:
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise _CannotTryError(f"nothing is known of values of dtype {tensor.dtype.name}")
    failure = ""
    for sizes in _attempts(operation):
        for below in dict.fromkeys((max(sizes.values(), default=2), min(sizes.values(), default=2), 2)):
            try:
                return _Bench(operation, sizes, below)
            except (CannotCopyError, _CannotTryError) as error:
                failure = failure or str(error)
            except Exception as error:  # whatever its lowering raises
                failure = failure or f"with small sizes it does not lower ({_told(error)})"
    numbers = sorted(numbers_that_may_be_sizes(operation))
    if not failure and numbers:
        failure = f"it holds the number {numbers[0]}, which may be a size"
    raise _CannotTryError(f"{failure or 'it has too many dims'}; it is too large to be tried with its own sizes")


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What one layout gave.

    Attributes:
      problem: what went wrong; "" if nothing did.
      pending: the outputs that were pending sums.
    """

    problem: str
    pending: frozenset[int] = frozenset()


class _Observing(mtf.Lowering):
    """Takes outputs of whatever shape, and keeps it."""

    def __init__(self, graph: mtf.Graph, mesh_to_impl: dict[mtf.Mesh, mtf.MeshImpl]) -> None:
        self.shapes: dict[mtf.Tensor, list[int]] = {}
        super().__init__(graph, mesh_to_impl, autostack=False)

    def verify_slice_shapes(self, tensor: mtf.Tensor, laid_out_tensor: LaidOut) -> None:
        """Keeps the shape."""
        self.shapes[tensor] = list(laid_out_tensor.slice_shape)


class _Bench:
    """An operation at sizes at which its values can be computed.

    Attributes:
      operation: the original.
      sizes: (name, size) of its dims -> size here.
      reference: the values of its outputs on one device.
    """

    def __init__(self, operation: mtf.Operation, sizes: Mapping[Pair, int], below: int) -> None:
        """Computes the reference.

        Args:
          operation: of any class.
          sizes: of the inputs' dims; those that only outputs have follow.
          below: integers of the inputs are below it.

        Raises:
          CannotCopyError: there is no copy of these sizes.
          _CannotTryError: two runs differ.
        """
        self.operation, self.sizes = operation, dict(sizes)
        self._graph = tf.Graph()
        self._session = tf.Session(graph=self._graph, config=tf.ConfigProto(
            device_count={"CPU": 1, "GPU": 0}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=1))
        for scale, shift in ((1.0, 0.0), (0.1, 1.0)):  # logarithms and roots want what is above zero
            self._values = [self._draw(number, tensor, below, scale, shift)
                            for number, tensor in enumerate(operation.inputs)]
            self._follow_outputs()
            self.reference = self._reference()
            if all(np.isfinite(value).all() for value in self.reference if value.dtype.kind == "f"):
                break
        for first, second in zip(self.reference, self._reference(), strict=True):
            if not np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
                raise _CannotTryError("two runs of it differ: it draws random numbers")

    def _draw(self, number: int, tensor: mtf.Tensor, below: int, scale: float, shift: float) -> np.ndarray:
        rng = np.random.default_rng(number)
        shape = [self.sizes[dim.name, dim.size] for dim in tensor.shape.dims]
        if tensor.dtype.is_floating:
            return rng.standard_normal(shape) * scale + shift
        return rng.integers(0, 2 if tensor.dtype.is_bool else below, shape)

    def _input(self, mesh: mtf.Mesh, number: int, *, pending: bool) -> mtf.Tensor:
        original, value = self.operation.inputs[number], self._values[number]
        shape = mtf.Shape([mtf.Dimension(dim.name, self.sizes[dim.name, dim.size]) for dim in original.shape.dims])
        if not pending:
            return mtf.import_tf_tensor(mesh, tf.constant(value, original.dtype), shape)
        summed = mtf.Dimension(_SUMMED, 2)
        parts = np.stack([0.25 * value, 0.75 * value])
        whole = mtf.import_tf_tensor(mesh, tf.constant(parts, original.dtype), mtf.Shape([summed, *shape.dims]))
        return mtf.reduce_sum(whole, reduced_dim=summed)

    def _lowered(self, rules: Mapping[str, int], parts: Sequence[int], pending: Collection[int],
                 lowering: Callable[[mtf.Graph, dict[mtf.Mesh, mtf.MeshImpl]], mtf.Lowering],
                 ) -> tuple[mtf.Operation, mtf.MeshImpl, mtf.Lowering]:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "tried")
        inputs = [self._input(mesh, number, pending=number in pending) for number in range(len(self._values))]
        made = copy_operation(self.operation, inputs, self.sizes, mesh)
        shape = mtf.Shape([mtf.Dimension(f"axis{axis}", size) for axis, size in enumerate(parts)])
        impl = placement_mesh_impl.PlacementMeshImpl(
            shape, mtf.LayoutRules([(name, f"axis{axis}") for name, axis in rules.items()]), [_DEVICE] * shape.size)
        with replaced(mtf.Lowering, "__init__", None):  # whoever asks may be where it is swapped
            return made, impl, lowering(graph, {mesh: impl})

    def _follow_outputs(self) -> None:
        """Gives dims that only outputs have the sizes that come out, where these differ."""
        given = {(dim.name, dim.size) for tensor in self.operation.inputs for dim in tensor.shape.dims}
        with self._graph.as_default():
            made, _, lowering = self._lowered({}, (), (), _Observing)
        for original, tensor in zip(self.operation.outputs, made.outputs, strict=True):
            shape = lowering.shapes.get(tensor, [])
            if len(shape) != len(original.shape.dims) or None in shape:
                raise _CannotTryError(f"its output {original.name} has another shape with small sizes: {shape}")
            for dim, size in zip(original.shape.dims, shape, strict=True):
                if (dim.name, dim.size) not in given:
                    self.sizes[dim.name, dim.size] = size

    def _reference(self) -> list[np.ndarray]:
        with self._graph.as_default():
            made, _, lowering = self._lowered({}, (), (), _strict)
            fetches = [lowering.tensors[tensor].to_laid_out_tensor().tensor_list[0] for tensor in made.outputs]
        return [np.asarray(value) for value in self._session.run(fetches)]

    def outcome(self, rules: Mapping[str, int], parts: Sequence[int], pending: Collection[int] = ()) -> _Outcome:
        """What a layout gives.

        Args:
          rules: dim name -> number of its mesh axis.
          parts: sizes of the mesh axes.
          pending: numbers of the inputs that are pending sums, over the last axis.
        """
        rules = {**rules, **({_SUMMED: len(parts) - 1} if pending else {})}
        try:
            with self._graph.as_default():
                made, impl, lowering = self._lowered(rules, parts, pending, _strict)
                laid_out = [lowering.tensors[tensor] for tensor in made.outputs]
                sums = frozenset(number for number, entry in enumerate(laid_out)
                                 if isinstance(entry, mtf.ops.LazyAllreduceSum))
                slices = [entry.to_laid_out_tensor().all_slices for entry in laid_out]
            values = self._session.run(slices)
        except Exception as error:  # whatever its lowering raises, when it is built and when it is run
            return _Outcome(_told(error))
        for tensor, whole, found in zip(made.outputs, self.reference, values, strict=True):
            size = impl.slice_shape(tensor.shape)
            for device, value in enumerate(found):
                begin = impl.slice_begin(tensor.shape, device)
                want = whole[tuple(slice(start, start + length) for start, length in zip(begin, size, strict=True))]
                if not _same(np.asarray(value), want):
                    return _Outcome(_WRONG)
        return _Outcome("", sums)


def _strict(graph: mtf.Graph, mesh_to_impl: dict[mtf.Mesh, mtf.MeshImpl]) -> mtf.Lowering:
    return mtf.Lowering(graph, mesh_to_impl, autostack=False)


def _same(value: np.ndarray, want: np.ndarray) -> bool:
    if value.shape != want.shape:
        return False
    if want.dtype.kind not in "fV":
        return bool(np.array_equal(value, want))
    value, want = value.astype(np.float64), want.astype(np.float64)
    scale = np.max(np.abs(want), initial=0.0, where=np.isfinite(want))
    return bool(np.allclose(value, want, rtol=1e-3, atol=1e-4 * scale, equal_nan=True))


class _Trying:
    """The splits of an operation, tried one after another."""

    def __init__(self, bench: _Bench) -> None:
        self._bench = bench
        operation = bench.operation
        self._tensors = [*operation.inputs, *operation.outputs]
        self._shapes = [tensor.shape.dimension_names for tensor in self._tensors]
        self._names = [name for name in dict.fromkeys(itertools.chain.from_iterable(self._shapes))
                       if not name.startswith("_anonymous_") and all(shape.count(name) < 2 for shape in self._shapes)]

    def _common(self, name: str) -> int:
        """What divides every size that a dim has here."""
        return math.gcd(*(size for (other, _), size in self._bench.sizes.items() if other == name))

    def _parts(self, name: str) -> list[int]:
        """Into how many shards a dim can be split here: 2 and 4, or else its size."""
        common = self._common(name)
        return [shards for shards in (2, 4) if common % shards == 0] or [common][:common > 1]

    def _most_parts(self, name: str) -> int:
        """Into how many shards a dim is split at most: of one element each, where these are not too many."""
        common = self._common(name)
        return max(count for count in range(1, min(common, _MOST_PARTS) + 1) if common % count == 0)

    def _split_alone(self, name: str) -> _Outcome:
        """What splitting a dim gives on a mesh of one axis."""
        outcomes = [self._bench.outcome({name: 0}, (count,)) for count in self._parts(name)]
        if not outcomes:
            return _Outcome("its sizes have no divisor that it could be tried with")
        if wrong := next((outcome for outcome in outcomes if outcome.problem), None):
            return wrong
        # Larger shards of a small dim all begin at an even place. What raises here is seen at its own sizes, too.
        single = self._bench.outcome({name: 0}, (self._most_parts(name),))
        return single if single.problem == _WRONG else outcomes[0]

    def trial(self) -> Trial:
        """All of it."""
        operation, bench = self._bench.operation, self._bench
        splits, whole, alone = [], dict[str, str](), []
        pending: list[list[str]] = [[] for _ in operation.outputs]
        for name in self._names:
            first = self._split_alone(name)
            if first.problem:
                whole[name] = first.problem
                continue
            # Here the devices are more than the shards, and a device has another number than its shard.
            problem = bench.outcome({name: 1}, (2, self._parts(name)[0], 2)).problem
            if problem:
                whole[name] = f"where the mesh has other axes: {problem}"
                alone.append(name)
                continue
            splits.append(name)
            for number in first.pending:
                pending[number].append(name)
        apart = self._try_pairs(splits, whole)
        passed, reduced = self._try_sums()
        inputs = dict.fromkeys(itertools.chain.from_iterable(self._shapes[:len(operation.inputs)]))
        contracted = tuple(tuple(name for name in inputs if name in splits and name not in tensor.shape.dimension_names)
                           for tensor in operation.outputs)
        return Trial(tuple(splits), whole, apart, contracted,
                     tuple(tuple(name for name in names if name in splits) for names in pending), passed, reduced,
                     alone=tuple(alone))

    def _try_pairs(self, splits: list[str], whole: dict[str, str]) -> tuple[tuple[str, str], ...]:
        """Two dims at a time: those that fail together stay whole, but the first; returns those that cannot share an
        axis."""
        for name in splits[_MOST_DIMS:]:
            whole[name] = "it has more dims than are tried together"
            splits.remove(name)
        apart = []
        for one, other in itertools.combinations(list(splits), 2):
            if one not in splits or other not in splits:
                continue
            outcome = self._bench.outcome({one: 0, other: 1}, (self._parts(one)[0], self._parts(other)[0]))
            if outcome.problem:
                whole[other] = f"together with {one}: {outcome.problem}"
                splits.remove(other)
            elif not any(one in shape and other in shape for shape in self._shapes):
                common = set(self._parts(one)) & set(self._parts(other))
                if not common or self._bench.outcome({one: 0, other: 0}, (min(common),)).problem:
                    apart.append((one, other))
        return tuple(apart)

    def _try_sums(self) -> tuple[dict[int, int], tuple[int, ...]]:
        """Which outputs are pending sums where an input is, and which inputs may not be."""
        floats = [number for number, tensor in enumerate(self._bench.operation.inputs) if tensor.dtype.is_floating]
        passed: dict[int, int] = {}
        reduced = []
        for number in floats:
            outcome = self._bench.outcome({}, (2,), [number])
            if outcome.problem:
                reduced.append(number)
            else:
                passed.update(dict.fromkeys(outcome.pending, number))
        if len(floats) > 1 and len(reduced) < len(floats) and self._bench.outcome({}, (2,), floats).problem:
            reduced = floats
        return passed, tuple(reduced)
