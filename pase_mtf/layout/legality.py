"""Which layouts an unchanged program really lowers under, by stock `mtf.Lowering`, to the values of one device.

What stock Mesh-TF 0.1.21 does to a split differs from what an operation declares, and from what our own lowering can
do (`legality`): it cannot move a dim between mesh axes in a reshape, differentiate an unfinished sum, or sum what a
generic gradient leaves in parts. Here every operation says which dims stay whole, which may not share an axis, and
which sums may not be unfinished when it reads them.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from pase_mtf.compat import mtf
from pase_mtf.layout.reshape import reshape_problem
from pase_mtf.layout.space import expressible
from pase_mtf.operations.legality import rule_of

__all__ = ["Problem", "StockLegality"]

_ops = mtf.ops
_Dims = tuple[tuple[str, int], ...]

_CONVOLUTIONS = (_ops.Conv2dOperation, _ops.Conv3dOperation, _ops.Conv2dTransposeOperation,
                 _ops.Conv3dTransposeOperation)
_CONVOLUTION_GRADIENTS = (_ops.Conv2or3dBackpropInputOperation, _ops.Conv2or3dBackpropFilterOperation)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why a layout does not lower, or not to right values.

    Attributes:
      operation: the name of the Mesh-TF operation.
      dims: the dims whose splits cause it.
      reason: for people.
    """

    operation: str
    dims: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"operation {self.operation}, dim {' and '.join(self.dims)}: {self.reason}"


def _dims(shape: mtf.Shape) -> _Dims:
    return tuple((dim.name, dim.size) for dim in shape.dims)


class _Sum(abc.ABC):
    """When a tensor is an unfinished sum (mtf.ops.LazyAllreduceSum), as a function of the layout."""

    @abc.abstractmethod
    def names(self) -> frozenset[str]:
        """Dims without whose splits it never is."""

    @abc.abstractmethod
    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        """The mesh axes it is still to be summed over; () if it is no unfinished sum."""


@dataclasses.dataclass(frozen=True)
class _Reduced(_Sum):
    """Made by an operation that sums over dims."""

    dims: tuple[str, ...]

    def names(self) -> frozenset[str]:
        return frozenset(self.dims)

    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(axis_of[name] for name in self.dims if name in axis_of)


@dataclasses.dataclass(frozen=True)
class _Added(_Sum):
    """The sum of two tensors stays unfinished where both are, over the same axes."""

    first: _Sum
    second: _Sum

    def names(self) -> frozenset[str]:
        return self.first.names() | self.second.names()

    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        one = self.first.axes(axis_of, sizes)
        return one if one == self.second.axes(axis_of, sizes) else ()


@dataclasses.dataclass(frozen=True)
class _Reshaped(_Sum):
    """A reshape that moves no slices hands an unfinished sum on."""

    source: _Sum
    old: _Dims
    new: _Dims

    def names(self) -> frozenset[str]:
        return self.source.names()

    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        axes = self.source.axes(axis_of, sizes)
        return () if not axes or reshape_problem(self.old, self.new, axis_of, sizes)[1] else axes


class StockLegality:
    """What the operations of a graph, those in loops too, demand of a layout.

    Attributes:
      sizes: dim name -> size -> the first operation that has it with that size.
      whole: dim name -> the problem that any split of it causes.
      apart: pairs of dims that may not share a mesh axis -> the problem.
      parts: dim name -> (number of parts it must have, operation): slices that were laid out beforehand.
      reshapes: (dims before, dims after) -> operation.
    """

    def __init__(self, graph: mtf.Graph, outputs: Iterable[mtf.Tensor] = (), devices: int = 0, *,
                 rebuilt: bool = False) -> None:
        """Looks at every operation.

        Args:
          graph: any Mesh-TF graph.
          outputs: tensors that are fetched besides those that operations read.
          devices: p, to which slices that were laid out beforehand must fit (0: not checked).
          rebuilt: the graph will be built anew for the layout: such slices will be what the layout makes of them.
        """
        self.sizes: dict[str, dict[int, str]] = {}
        self.whole: dict[str, Problem] = {}
        self.apart: dict[frozenset[str], Problem] = {}
        self.parts: dict[str, tuple[int, str]] = {}
        self.reshapes: dict[tuple[_Dims, _Dims], str] = {}
        self.hopeless: list[Problem] = []
        self._finished: dict[tuple[_Sum, str], Problem] = {}  # sums that may not be unfinished
        self._sums: dict[mtf.Tensor, _Sum] = {}
        self._used: set[mtf.Tensor] = set(outputs)
        self._spaces: set[_Dims] = set()
        self._devices, self._rebuilt = devices, rebuilt
        self._reshape_cache: dict[tuple, tuple[str, bool]] = {}
        self._using: dict[str, list[tuple[frozenset[str], _Dims, _Dims, str]]] = {}  # dim name -> reshapes
        for operation in _with_bodies(graph.operations):
            self._used.update(operation.inputs)
        self._read: set[mtf.Tensor] = set()  # by an operation that finishes sums
        for operation in graph.operations:
            self._scan(operation)
        for name in self.sizes:
            if name == "stacked":
                self._keep_whole(next(iter(self.sizes[name].values())), [name],
                                 "mtf.Lowering stacks variables under this name")
            elif not expressible(name):
                self._keep_whole(next(iter(self.sizes[name].values())), [name],
                                 "layout rules cannot mention this name")

    # -- what single operations demand -------------------------------------------------------------------------------
    def _keep_whole(self, operation: str, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.whole.setdefault(name, Problem(operation, (name,), reason))

    def _keep_apart(self, operation: str, dims: _Dims, what: str) -> None:
        """Dims that one tensor (or iteration space) has: none twice, no two of them on one axis."""
        if dims in self._spaces:
            return
        self._spaces.add(dims)
        names = [name for name, _ in dims]
        for name, size in dims:
            self.sizes.setdefault(name, {}).setdefault(size, operation)
            if names.count(name) > 1:
                self._keep_whole(operation, [name], f"it stands twice in {what}")
        for one, other in itertools.combinations(sorted(set(names)), 2):
            pair = frozenset((one, other))
            if pair not in self.apart:
                self.apart[pair] = Problem(operation, (one, other), f"both are in {what}, on one mesh axis")

    def _need_finished(self, operation: mtf.Operation, tensor: mtf.Tensor, reason: str) -> None:
        lazy = self._sums.get(tensor)
        if lazy is not None:
            self._finished.setdefault(
                (lazy, reason), Problem(operation.name, tuple(sorted(lazy.names())), reason))

    def _scan(self, operation: mtf.Operation, inside: frozenset[mtf.Tensor] | None = None) -> None:
        name = operation.name
        for tensor in (*operation.inputs, *operation.outputs):
            self._keep_apart(name, _dims(tensor.shape), "one tensor")
        rule = rule_of(operation)
        if rule is None:
            self._keep_whole(name, _names(operation),
                             f"{type(operation).__name__} is unknown; tell with register_splittable what it can split")
        elif not _is_stock(operation):
            self._keep_whole(name, _names(operation) - set(rule(operation)),
                             f"{type(operation).__name__} is registered as unable to split it")
        else:
            self._scan_stock(operation)
        if inside is not None:
            self._check_captured(operation, inside)
        if not isinstance(operation, (_ops.StopGradient, _ops.CustomGradientOperation, _ops.ReshapeOperation)):
            self._read.update(operation.inputs)
        if isinstance(operation, _ops.WhileLoopOperation) and _is_stock(operation):
            self._scan_loop(operation)
        elif rule is not None:
            self._track_sums(operation)

    def _scan_stock(self, operation: mtf.Operation) -> None:
        name, names = operation.name, _names(operation)
        if isinstance(operation, _ops.SlicewiseOperation):
            self._keep_whole(name, names - set(operation.splittable_dims), "it is not declared splittable")
            given = {dim for tensor in operation.inputs for dim in tensor.shape.dimension_names}
            made = [set(tensor.shape.dimension_names) for tensor in operation.outputs]
            self._keep_whole(name, names - set.intersection(given, *made),
                             "a function of slices cannot make or sum up a split dim")
        elif isinstance(operation, _ops.GenericGradOperation):
            self._scan_generic_gradient(operation)
        elif isinstance(operation, (_ops.ConcatOperation, _ops.SplitOperation, _ops.StackOperation,
                                    _ops.UnstackOperation, _ops.SliceOperation, _ops.PadOperation)):
            self._keep_whole(name, operation.unsplittable_dims,
                             f"{type(operation).__name__} works along it")
        elif isinstance(operation, (_ops.PoolOperation, _ops.PoolBackPropOperation)):
            spatial = operation.inputs[0].shape.dims[-1 - len(operation._ksize):-1]
            self._keep_whole(name, [dim.name for dim, window in zip(spatial, operation._ksize, strict=True)
                                    if dim.size % window], "windows do not divide it")
        elif isinstance(operation, _CONVOLUTIONS + _CONVOLUTION_GRADIENTS):
            self._keep_whole(name, names - set(rule_of(operation)(operation)), "a convolution cannot split it")
            self._keep_apart(name, _union(operation), "one convolution")
        elif isinstance(operation, _ops.EinsumOperation):
            dims = dict.fromkeys(dim for tensor in operation.inputs for dim in _dims(tensor.shape))
            self._keep_apart(name, tuple(dims), "one einsum")
        elif isinstance(operation, _ops.TopKOperation):
            self._keep_whole(name, [operation._k_dim.name], "top-k makes it")
        elif isinstance(operation, _ops.OneHotOperation):
            if operation.inputs[0].dtype.name != "int32":
                self._keep_whole(name, [operation._output_dim.name],
                                 f"one-hot of {operation.inputs[0].dtype.name} indices makes it")
        elif isinstance(operation, _ops.ImportLaidOutTensorOperation):
            if not self._rebuilt:
                self._scan_laid_out(operation)
        elif isinstance(operation, _ops.Constant):
            if getattr(operation._value, "shape", None) or isinstance(operation._value, (list, tuple)):
                self._keep_whole(name, names, "its constant is one tensor")
        elif isinstance(operation, _ops.ReshapeOperation):
            old, new = _dims(operation.inputs[0].shape), _dims(operation.outputs[0].shape)
            if (old, new) not in self.reshapes:
                self.reshapes[old, new] = name
                names_here = frozenset(dim for dim, _ in (*old, *new))
                for dim in names_here:
                    self._using.setdefault(dim, []).append((names_here, old, new, name))
        elif isinstance(operation, _ops.Depend):
            for tensor in operation._dependencies:
                if isinstance(tensor, mtf.Tensor):
                    self._need_finished(operation, tensor, "a dependency on an unfinished sum")
        elif isinstance(operation, _ops.Assign):
            for variable, value in zip(operation.variables, operation.inputs, strict=True):
                for one, other in zip(_dims(variable.shape), _dims(value.shape), strict=False):
                    if one != other:
                        self._keep_whole(name, {one[0], other[0]}, "variable and value name it differently")

    def _scan_generic_gradient(self, operation: mtf.ops.GenericGradOperation) -> None:
        forward = operation._forward_op
        for tensor in (*forward.inputs, *forward.outputs, *operation._grad_ys):
            self._need_finished(operation, tensor, "the gradient of a slicewise function of an unfinished sum")
        made = {dim for tensor in forward.outputs for dim in tensor.shape.dimension_names}
        for tensor, gradient in zip(forward.inputs, operation.outputs, strict=True):
            if gradient in self._used and tensor.dtype.is_floating:
                self._keep_whole(operation.name, made - set(tensor.shape.dimension_names),
                                 f"every part of it has a part of the gradient of {tensor.name}")

    def _scan_laid_out(self, operation: mtf.ops.ImportLaidOutTensorOperation) -> None:
        slices, output = operation._laid_out_tensor, operation.outputs[0]
        if self._devices and len(slices.tensor_list) != self._devices and "simd" not in type(slices).__module__:
            self.hopeless.append(Problem(
                operation.name, tuple(output.shape.dimension_names) or ("(none)",),
                f"it imports {len(slices.tensor_list)} slices, the mesh has {self._devices} devices"))
        for dim, size in zip(output.shape.dims, slices.slice_shape, strict=True):
            if size is None or size == dim.size:
                self._keep_whole(operation.name, [dim.name], "its slices, laid out beforehand, are whole there")
            elif dim.size % size:
                self.hopeless.append(Problem(operation.name, (dim.name,), f"slices of {size} do not make {dim}"))
            else:
                self.parts.setdefault(dim.name, (dim.size // size, operation.name))

    def _scan_loop(self, loop: mtf.ops.WhileLoopOperation) -> None:
        inner = {tensor for op in (*loop._cond_ops, *loop._body_ops) for tensor in op.outputs}
        inner |= {*loop._cond_inputs, *loop._body_inputs}
        for operation in (*loop._cond_ops, *loop._body_ops):
            self._scan(operation, frozenset(inner))
        for number, tensor in enumerate(loop._body_outputs):
            if number < len(loop.inputs):
                self._need_finished(loop, tensor, "a loop variable that is an unfinished sum in the next iteration")
            elif tensor in self._sums:
                self._sums[loop.outputs[number]] = self._sums[tensor]

    def _check_captured(self, operation: mtf.Operation, inside: frozenset[mtf.Tensor]) -> None:
        """A sum that is finished in a loop exists nowhere else: it has to be finished by somebody before."""
        for tensor in operation.inputs:
            if tensor not in inside and tensor not in self._read:
                self._need_finished(operation, tensor, "a sum that a loop finishes cannot be used after it")

    def _track_sums(self, operation: mtf.Operation) -> None:
        """Which outputs may be unfinished sums."""
        lazy = None
        if isinstance(operation, _ops.EinsumOperation):
            made = {dim.name for dim in operation.outputs[0].shape.dims}
            given = {dim for tensor in operation.inputs for dim in tensor.shape.dims}
            # Dims that the output has and no input: it is broadcast, which finishes the sum.
            if all(dim in given for dim in operation.outputs[0].shape.dims):
                # In the order in which Mesh-TF finds them, which decides whether two sums can be added.
                lazy = _Reduced(tuple(name for name, _ in self._einsum_order(operation) if name not in made))
        elif isinstance(operation, _ops.ReduceOperation):
            if operation._reduction_fn_string == "SUM":
                kept = operation.outputs[0].shape.dims
                lazy = _Reduced(tuple(dim.name for dim in operation.inputs[0].shape.dims if dim not in kept))
        elif isinstance(operation, (*_CONVOLUTIONS, _ops.Conv2or3dBackpropInputOperation)):
            lazy = _Reduced((operation.inputs[0].shape.dims[-1].name,))
        elif isinstance(operation, _ops.Conv2or3dBackpropFilterOperation):
            lazy = _Reduced(tuple(dim.name for dim in operation.inputs[1].shape.dims[:-operation._num_nonbatch_dims]))
        elif isinstance(operation, _ops.AddOperation):
            sums = [self._sums.get(tensor) for tensor in operation.inputs]
            if None not in sums and all(t.shape == operation.outputs[0].shape for t in operation.inputs):
                lazy = sums[0] if sums[0] == sums[1] else _Added(*sums)
        elif isinstance(operation, _ops.ReshapeOperation):
            source = self._sums.get(operation.inputs[0])
            if source is not None:
                lazy = _Reshaped(source, _dims(operation.inputs[0].shape), _dims(operation.outputs[0].shape))
        elif isinstance(operation, _ops.StopGradient):
            lazy = self._sums.get(operation.inputs[0])
        elif isinstance(operation, _ops.CustomGradientOperation):
            for made, tensor in zip(operation.outputs, operation._fn_outputs, strict=True):
                if tensor in self._sums:
                    self._sums[made] = self._sums[tensor]
            return
        if lazy is not None and lazy.names():
            self._sums[operation.outputs[0]] = lazy

    @staticmethod
    def _einsum_order(operation: mtf.ops.EinsumOperation) -> _Dims:
        shapes = [tensor.shape for tensor in operation.inputs]
        union = sorted({dim for shape in shapes for dim in shape.dims})
        full = next((shape for shape in (*shapes, operation.outputs[0].shape) if shape.ndims == len(union)), None)
        return _dims(full) if full is not None else tuple((dim.name, dim.size) for dim in union)

    # -- questions ---------------------------------------------------------------------------------------------------
    def dims(self) -> tuple[str, ...]:
        """The dims that may be split at all, in the order of the graph."""
        return tuple(name for name in self.sizes if name not in self.whole)

    def divisor(self, name: str) -> int:
        """What every size of the dim divides by."""
        return math.gcd(*self.sizes[name])

    def problem_of(self, name: str, axis: int, sizes: Sequence[int]) -> Problem | None:
        """Why a dim alone cannot be split by an axis."""
        if name not in self.sizes:
            return Problem("(none)", (name,), "no tensor has this dim")
        if name in self.whole:
            return self.whole[name]
        for size, operation in self.sizes[name].items():
            if size % sizes[axis]:
                return Problem(operation, (name,), f"size {size} does not divide by {sizes[axis]}")
        if name in self.parts and self.parts[name][0] != sizes[axis]:
            parts, operation = self.parts[name]
            return Problem(operation, (name,), f"its slices were laid out beforehand in {parts} parts")
        return self._sums_and_reshapes({name: axis}, sizes)

    def problem_of_pair(self, one: str, axis: int, other: str, other_axis: int,
                        sizes: Sequence[int]) -> Problem | None:
        """Why two dims, each of which can be split so alone, cannot be both."""
        if axis == other_axis and frozenset((one, other)) in self.apart:
            return self.apart[frozenset((one, other))]
        return self._reshape_problems({one: axis, other: other_axis}, sizes)

    def problem(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> Problem | None:
        """Why a layout does not lower or gives wrong values: the first problem found, None if it is legal.

        Args:
          axis_of: dim name -> index of its mesh axis, for the dims that have a rule.
          sizes: of the mesh axes.
        """
        if self.hopeless:
            return self.hopeless[0]
        axis_of = {name: axis for name, axis in axis_of.items() if name in self.sizes}
        for name, (parts, operation) in self.parts.items():
            if name not in axis_of:
                return Problem(operation, (name,), f"its slices were laid out beforehand in {parts} parts")
        for name, axis in axis_of.items():
            problem = self.problem_of(name, axis, sizes)
            if problem is not None:
                return problem
        for one, other in itertools.combinations(axis_of, 2):
            problem = self.problem_of_pair(one, axis_of[one], other, axis_of[other], sizes)
            if problem is not None:
                return problem
        return self._sums_and_reshapes(axis_of, sizes)

    def _sums_and_reshapes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> Problem | None:
        for (lazy, _), problem in self._finished.items():
            if lazy.axes(axis_of, sizes):
                split = tuple(name for name in problem.dims if name in axis_of)
                return dataclasses.replace(problem, dims=split)
        return self._reshape_problems(axis_of, sizes)

    def _reshape_problems(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> Problem | None:
        """Of the reshapes that have all these dims (any of them, where there are more than two)."""
        for names, old, new, operation in self._reshapes_with(axis_of):
            mine = {name: axis_of[name] for name in axis_of if name in names}
            key = old, new, tuple(mine.items()), tuple(sizes)
            if key not in self._reshape_cache:
                self._reshape_cache[key] = reshape_problem(old, new, mine, sizes)
            reason = self._reshape_cache[key][0]
            if reason:
                before = ", ".join(f"{name}={size}" for name, size in old)
                after = ", ".join(f"{name}={size}" for name, size in new)
                return Problem(operation, tuple(mine), f"reshape [{before}] to [{after}]: {reason}")
        return None

    def _reshapes_with(self, wanted: Iterable[str]) -> Iterable[tuple[frozenset[str], _Dims, _Dims, str]]:
        wanted = list(wanted)
        if len(wanted) <= 2:
            for entry in self._using.get(wanted[0], ()) if wanted else ():
                if wanted[-1] in entry[0]:
                    yield entry
            return
        seen = set()
        for name in wanted:
            for entry in self._using.get(name, ()):
                if entry[1:3] not in seen:
                    seen.add(entry[1:3])
                    yield entry


def _with_bodies(operations: Iterable[mtf.Operation]) -> Iterable[mtf.Operation]:
    for operation in operations:
        yield operation
        if isinstance(operation, _ops.WhileLoopOperation):
            yield from _with_bodies((*operation._cond_ops, *operation._body_ops))


def _names(operation: mtf.Operation) -> set[str]:
    return {name for tensor in (*operation.inputs, *operation.outputs) for name in tensor.shape.dimension_names}


def _is_stock(operation: mtf.Operation) -> bool:
    """Whether the class is Mesh-TF's own; a subclass that keeps its `lower` counts as it."""
    return operation.lower.__func__.__module__ == _ops.__name__


def _union(operation: mtf.Operation) -> _Dims:
    """The dims over which a convolution or its gradient counts its work: those of the filter and of the output."""
    backward_filter = isinstance(operation, _ops.Conv2or3dBackpropFilterOperation)
    kernel = operation.outputs[0] if backward_filter else operation.inputs[1]
    if backward_filter:
        other = operation.inputs[1]
    elif isinstance(operation, _ops.Conv2or3dBackpropInputOperation):
        other = operation.inputs[0]
    else:
        other = operation.outputs[0]
    return tuple(dict.fromkeys((*_dims(kernel.shape), *_dims(other.shape))))
