"""Lowers a graph under a layout for its shapes only: every operation's own `lower`, one device, nothing kept.

Where `legality` says what should lower, this sees that it does, operations of users included. It lowers with Mesh-TF's
own code for every operation, on a mesh implementation that holds one slice for all (they are all of one shape), in a
scratch graph. Operations that lower alike (the layers of a stack) are lowered once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from pase_mtf.compat import func_graph, mtf, tf
from pase_mtf.layout.alike import lowering_key
from pase_mtf.layout.legality import Problem
from pase_mtf.layout.shapes import ShapeMeshImpl, ShapeVariable, Slices
from pase_mtf.layout.space import MeshShape

__all__ = ["Verifier"]

_ops = mtf.ops


class _LoweringError(Exception):
    def __init__(self, operation: mtf.Operation, cause: Exception) -> None:
        super().__init__(str(cause))
        self.operation, self.cause = operation, cause


# They have side effects or a body, or pass on the very object that they are given: always lowered.
_ALWAYS = (_ops.ReadVariable, mtf.Assign, _ops.Depend, _ops.WhileLoopOperation, _ops.CustomGradientOperation,
           _ops.StopGradient, _ops.ScalarSummaryOperation)


class _Lowered(NamedTuple):
    """What lowering an operation made."""

    tensors: list[Slices | mtf.ops.LazyAllreduceSum]
    variable: ShapeVariable | None


class _Known:
    """What lowering one graph under several layouts has in common.

    Attributes:
      results: (key that operations have in common, axes of their dims, mesh, state of their inputs) -> what lowering
        one of them made.
    """

    def __init__(self) -> None:
        self.results: dict[Hashable, _Lowered] = {}
        self._keys: dict[mtf.Operation, tuple[int, tuple[str, ...]] | None] = {}
        self._numbers: dict[Hashable, int] = {}

    def key(self, operation: mtf.Operation) -> tuple[int, tuple[str, ...]] | None:
        """A number that the operations which lower alike have in common, and the names of its dims; None where it has
        to be lowered every time."""
        if operation not in self._keys:
            entry = None
            if not isinstance(operation, _ALWAYS) and type(operation).lower.__module__ == _ops.__name__:
                shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
                names = tuple(dict.fromkeys(name for shape in shapes for name in shape.dimension_names))
                entry = self._numbers.setdefault(lowering_key(operation), len(self._numbers)), names
            self._keys[operation] = entry
        return self._keys[operation]


class _ShapeLowering(mtf.Lowering):
    """mtf.Lowering without its logging and its rewriting of the graph; operations that lower alike are lowered once."""

    def __init__(self, graph: mtf.Graph, impl: ShapeMeshImpl, known: _Known) -> None:
        # Not super().__init__: it rewrites the graph.
        self.graph, self._impl, self._known = graph, impl, known
        self._counters: list[tuple[str, int]] = []
        self.tensors: dict[mtf.Tensor, Slices | mtf.ops.LazyAllreduceSum] = {}
        self.operations: dict[mtf.Operation, tf.Operation] = {}
        self.variables: dict[mtf.Variable, ShapeVariable] = {}
        for operation in graph.operations:
            try:
                self._lower(operation)
            except Exception as error:  # whatever an operation's lowering raises is the answer
                raise _LoweringError(operation, error) from error

    def mesh_impl(self, m: mtf.Mesh | mtf.Tensor | mtf.Operation) -> ShapeMeshImpl:
        """The one implementation, whatever the mesh."""
        return self._impl

    def add_counter(self, key: str, value: int) -> None:
        """Counts nothing."""

    def _state(self, tensor: mtf.Tensor) -> tuple[tuple[int, ...], bool] | None:
        """Of a partial sum: the mesh axes it is still to be reduced over, and whether nobody has done so yet."""
        laid_out = self.tensors[tensor]
        if isinstance(laid_out, _ops.LazyAllreduceSum):
            return tuple(laid_out.mesh_axes), laid_out._reduced is None
        return None

    def _lower(self, operation: mtf.Operation) -> None:
        entry = self._known.key(operation)
        if entry is None:
            self._lower_anew(operation)
            return
        number, names = entry
        key = (number, tuple([self._impl.axis_of(name) for name in names]), self._impl.sizes,
               tuple([self._state(tensor) for tensor in operation.inputs]))
        if key not in self._known.results:
            self._lower_anew(operation)
            self._known.results[key] = _Lowered([self.tensors[output] for output in operation.outputs],
                                                self.variables.get(operation))
            return
        lowered = self._known.results[key]
        self.tensors.update(zip(operation.outputs, lowered.tensors, strict=True))
        if lowered.variable is not None:
            self.variables[operation] = lowered.variable

    def _lower_anew(self, operation: mtf.Operation) -> None:
        if isinstance(operation, _ops.ImportLaidOutTensorOperation):
            self.set_tensor_lowering(operation.outputs[0], Slices(operation._laid_out_tensor.tensor_list[:1]))
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
                names = tuple(rules) if isinstance(operation, _ops.WhileLoopOperation) else tuple(dict.fromkeys(
                    name for tensor in (*operation.inputs, *operation.outputs)
                    for name in tensor.shape.dimension_names if name in rules))
                text = " ".join(str(failure.cause).split())[:300]
                return Problem(operation.name, names, f"{type(failure.cause).__name__}: {text}")
        return None
