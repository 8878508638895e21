"""Lowers a graph under a layout for its shapes only: every operation's own `lower`, one device, nothing kept.

Where `layout_legality` says what should lower, this sees that it does, operations of users included. It lowers with
Mesh-TF's own code for every operation, on a mesh implementation that holds one slice for all (they are all of one
shape), in a scratch graph. Operations that are alike (the layers of a stack) are lowered once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from pase_mtf.compat import func_graph, mtf, tf
from pase_mtf.layout.legality import Problem
from pase_mtf.layout.space import MeshShape

__all__ = ["ShapeMeshImpl", "Verifier", "lowering_problem"]

_ops = mtf.ops


class _Slices:
    """One slice that stands for those of all devices."""

    def __init__(self, tensor_list: list[Any]) -> None:
        self.tensor_list = tensor_list

    @classmethod
    def from_tensor_list(cls, tensor_list: list[Any]) -> _Slices:
        """As mtf's LaidOutTensor."""
        return cls(tensor_list)

    @property
    def all_slices(self) -> list[Any]:
        """The one slice."""
        return self.tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """Its shape."""
        return self.tensor_list[0].shape.as_list()

    def to_laid_out_tensor(self) -> _Slices:
        """Itself."""
        return self


class _Variable:
    """A variable's slice: a placeholder, never a variable."""

    def __init__(self, variable: mtf.Variable, mesh_impl: ShapeMeshImpl) -> None:
        self._shape = mesh_impl.slice_shape(variable.outputs[0].shape)
        self._done = mesh_impl.done
        self.laid_out_tensor = _Slices([tf.placeholder(variable.slice_dtype, self._shape)])
        self.copy_master_to_slices = self.copy_slices_to_master = None

    def assign_to_slices(self, assign_fn: Callable, values: list[Any]) -> tf.Operation:
        """Checks what would be assigned."""
        del assign_fn
        for value in values:
            if not value.shape.is_compatible_with(self._shape):
                raise ValueError(f"a slice of shape {value.shape} is assigned to one of {self._shape}")
        return self._done()


class ShapeMeshImpl(mtf.MeshImpl):
    """A mesh implementation that computes the shapes of slices, as strictly as PlacementMeshImpl does."""

    LaidOutTensor = _Slices
    LaidOutVariable = _Variable

    def __init__(self, shape: Any, layout_rules: Any) -> None:
        super().__init__(shape, layout_rules)
        self._shapes: dict[tuple, list[int]] = {}
        self._layouts: dict[tuple, Any] = {}
        self._axes: dict[str, int | None] = {}
        self.sizes = tuple(self.shape.to_integer_list)
        self._done: dict[Any, tf.Operation] = {}

    # Unfinished sums can be added if their mesh implementations are equal: those of other layouts are reused here.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeMeshImpl)

    def __hash__(self) -> int:
        return 0

    def done(self) -> tf.Operation:
        """An operation that does nothing: one for all assignments."""
        graph = tf.get_default_graph()
        if graph not in self._done:
            self._done[graph] = tf.no_op()
        return self._done[graph]

    def axis_of(self, name: str) -> int | None:
        """The mesh axis of a dim."""
        if name not in self._axes:
            self._axes[name] = self.tensor_dimension_to_mesh_axis(mtf.Dimension(name, 0))
        return self._axes[name]

    def tensor_layout(self, arg: Any) -> Any:
        """As the parent's, remembered."""
        key = tuple((arg.shape if isinstance(arg, mtf.Tensor) else arg).dims)
        if key not in self._layouts:
            self._layouts[key] = super().tensor_layout(arg)
        return self._layouts[key]

    def slice_shape(self, tensor_shape: mtf.Shape) -> list[int]:
        """As the parent's, remembered."""
        key = tuple(tensor_shape.dims)
        if key not in self._shapes:
            self._shapes[key] = super().slice_shape(tensor_shape)
        return list(self._shapes[key])

    def slicewise(self, fn: Callable, *inputs: Any) -> Any:
        """Calls the function on the one slice."""
        inputs = [x.tensor_list[0] if isinstance(x, _Slices) else x
                  for x in _ops.convert_args_to_laid_out_tensors(inputs)]
        result = fn(*inputs)
        if isinstance(result, tuple):
            return tuple(_Slices([value]) for value in result)
        return _Slices([result])

    def Print(self, x: Any, data: Any, message: str, **kwargs: Any) -> Any:  # noqa: N802 (Mesh-TF's name)
        """Prints nothing."""
        del data, message, kwargs
        return x.to_laid_out_tensor()

    def allreduce(self, x: Any, mesh_axes: list[int], reduction_fn_string: str) -> Any:
        """The shape stays."""
        _ops.binary_reduction_fn(reduction_fn_string)
        return _Slices([tf.identity(x.to_laid_out_tensor().tensor_list[0])]) if mesh_axes else x

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> Any:
        """Joins as many slices as the axis has devices."""
        (tensor,) = x.to_laid_out_tensor().tensor_list
        return _Slices([tf.concat([tensor] * self.shape[mesh_axis].size, concat_axis)])

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> Any:
        """Cuts, and joins as many."""
        (tensor,) = x.to_laid_out_tensor().tensor_list
        pieces = tf.split(tensor, self.shape[mesh_axis].size, axis=split_axis)
        return _Slices([tf.concat(pieces, concat_axis)])

    def receive(self, x: Any, mesh_axis: int, source_pcoord: list[int | None]) -> Any:
        """The shape stays."""
        del mesh_axis, source_pcoord
        return _Slices([tf.identity(x.to_laid_out_tensor().tensor_list[0])])

    def laid_out_pnum(self) -> Any:
        """The number of the device."""
        return _Slices([tf.constant(0)])

    def random(self, shape: mtf.Shape, tf_fn: Callable, kwargs: Mapping[str, Any]) -> Any:
        """Random numbers for one slice."""
        return _Slices([tf_fn(self.slice_shape(shape), seed=1, **kwargs)])

    def import_tf_tensor(self, x: mtf.Tensor, tf_x: Any) -> Any:
        """A slice of what would be imported."""
        return _Slices([tf.placeholder(tf.convert_to_tensor(tf_x).dtype, self.slice_shape(x.shape))])

    def export_to_tf_tensor(self, x: mtf.Tensor, laid_out_x: Any) -> tf.Tensor:
        """A tensor of the whole shape."""
        return tf.placeholder(laid_out_x.tensor_list[0].dtype, x.shape.to_integer_list)


class _LoweringError(Exception):
    def __init__(self, operation: mtf.Operation, cause: Exception) -> None:
        super().__init__(str(cause))
        self.operation, self.cause = operation, cause


_SKIPPED = {"_inputs", "_outputs", "_mesh", "_name", "_splittable_dims", "_unsplittable_dims"}


def _freeze(value: Any, depth: int = 0) -> Any:
    """Something hashable that is equal for values that lower alike; unknown things are equal to themselves only."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, tf.DType)):
        return type(value), value
    if isinstance(value, mtf.Dimension):
        return "dim", value.name, value.size
    if isinstance(value, mtf.Shape):
        return "shape", tuple((dim.name, dim.size) for dim in value.dims)
    if depth > 6:
        return "object", id(value)
    if isinstance(value, (list, tuple)):
        return "list", tuple(_freeze(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return "dict", tuple(sorted((str(key), repr(_freeze(item, depth + 1))) for key, item in value.items()))
    if isinstance(value, np.generic):
        return type(value), value.item()
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype)
    if isinstance(value, mtf.Tensor):
        return "mtf", _freeze(value.shape), value.dtype
    if isinstance(value, tf.Tensor):
        return "tf", value.dtype, str(value.shape)
    if isinstance(value, types.FunctionType):
        cells = tuple(_freeze(cell.cell_contents, depth + 1) for cell in value.__closure__ or ())
        return "function", value.__code__, cells, _freeze(value.__defaults__, depth + 1)
    if isinstance(value, mtf.Operation):
        return _freeze_operation(value, depth + 1)
    return "object", id(value)


def _freeze_operation(operation: mtf.Operation, depth: int = 0) -> Any:
    attributes = tuple((name, _freeze(value, depth + 1)) for name, value in sorted(operation.__dict__.items())
                       if name not in _SKIPPED)
    return type(operation), tuple(_freeze(t) for t in (*operation.inputs, *operation.outputs)), attributes


# They have side effects or a body, or hand on the very object that they are given: always lowered.
_ALWAYS = (_ops.ReadVariable, mtf.Assign, _ops.Depend, _ops.WhileLoopOperation, _ops.CustomGradientOperation,
           _ops.StopGradient, _ops.ScalarSummaryOperation)


class _Known:
    """What lowering one graph under several layouts has in common.

    Attributes:
      frozen: operation -> (what it has in common with its likes, the names of its dims), None if it has no likes.
      results: (what operations have in common, axes of their dims, state of their inputs) -> what lowering them made.
    """

    def __init__(self) -> None:
        self.frozen: dict[mtf.Operation, tuple[int, tuple[str, ...]] | None] = {}
        self.results: dict[Any, tuple[list[Any], Any]] = {}
        self._numbers: dict[Any, int] = {}

    def of(self, operation: mtf.Operation) -> tuple[int, tuple[str, ...]] | None:
        """The entry of `frozen`."""
        if operation not in self.frozen:
            entry = None
            if not isinstance(operation, _ALWAYS) and type(operation).lower.__module__ == _ops.__name__:
                shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
                names = tuple(dict.fromkeys(name for shape in shapes for name in shape.dimension_names))
                if isinstance(operation, mtf.Variable):
                    key = (mtf.Variable, _freeze(operation.shape), operation.slice_dtype, operation.activation_dtype)
                else:
                    key = _freeze_operation(operation)
                entry = self._numbers.setdefault(key, len(self._numbers)), names
            self.frozen[operation] = entry
        return self.frozen[operation]


class _ShapeLowering(mtf.Lowering):
    """mtf.Lowering without its logging and its rewriting of the graph, alike operations lowered once."""

    def __init__(self, graph: mtf.Graph, impl: ShapeMeshImpl, known: _Known) -> None:
        # Not super().__init__: it rewrites the graph.
        self.graph, self._impl, self._known = graph, impl, known
        self._counters: list = []
        self.tensors, self.operations, self.variables = {}, {}, {}
        for operation in graph.operations:
            try:
                self._lower(operation)
            except Exception as error:  # whatever an operation's lowering raises is the answer
                raise _LoweringError(operation, error) from error

    def mesh_impl(self, m: Any) -> ShapeMeshImpl:
        """The one implementation, whatever the mesh."""
        return self._impl

    def add_counter(self, key: str, value: int) -> None:
        """Counts nothing."""

    def _state(self, tensor: mtf.Tensor) -> Any:
        laid_out = self.tensors[tensor]
        if isinstance(laid_out, _ops.LazyAllreduceSum):
            return tuple(laid_out.mesh_axes), laid_out._reduced is None
        return None

    def _lower(self, operation: mtf.Operation) -> None:
        entry = self._known.of(operation)
        if entry is None:
            self._really_lower(operation)
            return
        number, names = entry
        key = (number, tuple([self._impl.axis_of(name) for name in names]), self._impl.sizes,
               tuple([self._state(tensor) for tensor in operation.inputs]))
        if key not in self._known.results:
            self._really_lower(operation)
            self._known.results[key] = ([self.tensors[output] for output in operation.outputs],
                                        self.variables.get(operation))
            return
        tensors, variable = self._known.results[key]
        for output, laid_out in zip(operation.outputs, tensors, strict=True):
            self.tensors[output] = laid_out
        if variable is not None:
            self.variables[operation] = variable

    def _really_lower(self, operation: mtf.Operation) -> None:
        if isinstance(operation, _ops.ImportLaidOutTensorOperation):
            self.set_tensor_lowering(operation.outputs[0], _Slices(operation._laid_out_tensor.tensor_list[:1]))
        else:
            operation.lower(self)
        for output in operation.outputs:
            self.laid_out_size(output)


class Verifier:
    """Lowers one graph under layouts, for shapes only, in a TensorFlow graph that is thrown away.

    Attributes:
      graph: the Mesh-TF graph; it is left as it is.
      outputs: tensors that will be exported.
    """

    def __init__(self, graph: mtf.Graph, outputs: Iterable[mtf.Tensor] = ()) -> None:
        self.graph, self.outputs = graph, list(outputs)
        self._known = _Known()
        self._outer = tf.get_default_graph()
        for operation in graph.operations:
            if isinstance(operation, mtf.Variable) and hasattr(operation, "_master"):
                self._outer = operation._master.graph
                break
            if isinstance(operation, _ops.ImportOperation):
                self._outer = operation._tf_tensor.graph
                break
        # A function's graph reads the tensors of the user's graph as if they were its inputs.
        with self._outer.as_default():
            self._scratch = func_graph.FuncGraph("layout")

    def problem(self, mesh: MeshShape, rules: Mapping[str, str]) -> Problem | None:
        """Lowers the graph under a layout.

        Args:
          mesh: the mesh shape.
          rules: dim name -> axis name.

        Returns:
          What did not lower, or None. Of the dims of the operation, the one that fails by itself, if one does.
        """
        problem = self._problem(mesh, rules)
        if problem is not None and len(problem.dims) > 1:
            for name in problem.dims:
                alone = self._problem(mesh, {name: rules[name]})
                if alone is not None and alone.operation == problem.operation:
                    return alone
        return problem

    def _problem(self, mesh: MeshShape, rules: Mapping[str, str]) -> Problem | None:
        shape = mtf.Shape([mtf.Dimension(name, size) for name, size in mesh.axes])
        impl = ShapeMeshImpl(shape, mtf.LayoutRules(rules.items()))
        with self._outer.as_default(), self._scratch.as_default():
            try:
                lowering = _ShapeLowering(self.graph, impl, self._known)
                for output in self.outputs:
                    lowering.export_to_tf_tensor(output)
            except _LoweringError as failure:
                operation = failure.operation
                names = dict.fromkeys(name for tensor in (*operation.inputs, *operation.outputs)
                                      for name in tensor.shape.dimension_names if name in rules)
                if isinstance(operation, _ops.WhileLoopOperation):
                    names = rules
                text = " ".join(str(failure.cause).split())[:300]
                return Problem(operation.name, tuple(names), f"{type(failure.cause).__name__}: {text}")
        return None


def lowering_problem(graph: mtf.Graph, mesh: MeshShape, rules: Mapping[str, str],
                     outputs: Iterable[mtf.Tensor] = ()) -> Problem | None:
    """What does not lower under one layout, or None: `Verifier` for a single layout."""
    return Verifier(graph, outputs).problem(mesh, rules)
