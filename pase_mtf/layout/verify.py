"""Lowers a graph under a layout for its shapes only: every operation's own `lower`, one device, nothing kept.

Where `legality` says what should lower, this sees that it does, operations of users included. It lowers with Mesh-TF's
own code for every operation, on a mesh implementation that holds one slice for all (they are all of one shape), in a
scratch graph.

What lowering an operation makes depends on its class and settings, the shapes of its tensors, the axes that their dims
are on, and which of its inputs are partial sums. Operations that have all of this in common (the layers of a stack, in
a loop or not, under this layout or another) are lowered once; of the others the result is remembered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pase_mtf.compat import func_graph, mtf, placement_mesh_impl, tf
from pase_mtf.layout.legality import Problem
from pase_mtf.layout.shapes import ShapeMeshImpl, ShapeVariable, Slices
from pase_mtf.layout.space import MeshShape
from pase_mtf.layout.stacking import Stacking
from pase_mtf.operations.alike import Alike
from pase_mtf.operations.registry import LoopParts, rule_of

__all__ = ["Memo", "Verifier"]

_ops = mtf.ops


class _LoweringError(Exception):
    """What lowering an operation raised.

    Attributes:
      operation, cause: which, and what.
      axes: the mesh axes that its inputs are still to be summed over.
    """

    def __init__(self, operation: mtf.Operation, cause: Exception, axes: frozenset[int]) -> None:
        super().__init__(str(cause))
        self.operation, self.cause, self.axes = operation, cause, axes


_CONDITION, _BODY = range(2)  # of `LoopParts.stages`

_Scope: TypeAlias = "tuple[Hashable, ...]"
"""The loops that an operation stands in, outermost first."""

_Axes: TypeAlias = "tuple[int, ...] | None"
"""The mesh axes that a partial sum is still to be summed over; None of other tensors."""


class _Made(NamedTuple):
    """What lowering an operation made: of every output dtype, shape of the slices, axes; and the numbers of the inputs
    whose sums it finished."""

    outputs: tuple[tuple[tf.DType, tuple[int, ...], _Axes], ...]
    finished: tuple[int, ...]


class _Read(NamedTuple):
    """An operation, read once for all layouts.

    Attributes:
      number: what it has in common with the operations that lower alike; None where it has to be lowered every time.
      names: of its dims.
      inputs, outputs: its tensors.
      reads: the tensors whose values it reads.
    """

    number: int | None
    names: tuple[str, ...]
    inputs: tuple[mtf.Tensor, ...]
    outputs: tuple[mtf.Tensor, ...]
    reads: tuple[mtf.Tensor, ...]


class Memo:
    """What was lowered before, under any layout, of this graph or of another.

    Attributes:
      made: (number that operations which lower alike have in common, axes of their dims, state of their inputs) -> what
        lowering one of them made.
      alike: these numbers.
      names: number -> the names of the dims of such operations.
    """

    def __init__(self) -> None:
        self.made: dict[Hashable, _Made] = {}
        self.alike = Alike()
        self.names: dict[int, tuple[str, ...]] = {}

    def number(self, operation: mtf.Operation) -> int | None:
        """A number that the operations which lower alike have in common; None where it has to be lowered every time."""
        rule = rule_of(operation)
        if rule.holds_others or rule.has_effects or rule.is_same or type(operation).lower.__module__ != _ops.__name__:
            return None
        return self.alike.lowering(operation)


class _PendingSum(mtf.ops.LazyAllreduceSum):
    """A partial sum that knows in which loop it was finished: outside of it the sum does not exist."""

    def __init__(self, lowering: _ShapeLowering, slices: Slices, axes: Sequence[int]) -> None:
        super().__init__(lowering.impl, slices, list(axes))
        self._lowering = lowering
        self.finished_in: _Scope | None = None

    @property
    def usable(self) -> bool:
        """Whether it can be finished, or has been where its sum can be read."""
        return self.finished_in is None or self._lowering.is_within(self.finished_in)

    def to_laid_out_tensor(self) -> Slices:
        """Finishes it."""
        if self.finished_in is None:
            self.finished_in = self._lowering.scope
        elif not self.usable:
            raise ValueError("a sum that a loop finishes cannot be used after it")
        return self.laid_out_input


class _InLoop:
    """Stands for an operation in the body of a loop while Mesh-TF lowers the loop."""

    def __init__(self, operation: mtf.Operation, scope: _Scope) -> None:
        self._operation, self._scope, self.name = operation, scope, operation.name

    def lower(self, lowering: _ShapeLowering) -> None:
        """As all operations are."""
        lowering.lower_operation(self._operation, self._scope)


class _ShapeLowering(mtf.Lowering):
    """mtf.Lowering without its logging and its rewriting of the graph; operations that lower alike are lowered once.

    Attributes:
      impl: the mesh implementation.
      scope: of the operation that is being lowered.
    """

    def __init__(self, verifier: Verifier, impl: ShapeMeshImpl) -> None:
        # Not super().__init__: it rewrites the graph.
        self.graph, self.impl = verifier.graph, impl
        self.scope: _Scope = ()
        self._verifier, self._memo = verifier, verifier.memo
        self._inside: dict[mtf.Tensor, _Scope] = {}  # tensors that are made in loops
        self._axes: dict[tuple[str, ...], tuple[tuple[int, int] | None, ...]] = {}  # of the dims of an operation
        self._counters: list[tuple[str, int]] = []
        self.tensors: dict[mtf.Tensor, Slices | mtf.ops.LazyAllreduceSum] = {}
        self.operations: dict[mtf.Operation, tf.Operation] = {}
        self.variables: dict[mtf.Variable, ShapeVariable] = {}
        for operation in verifier.graph.operations:
            self.lower_operation(operation, ())

    def mesh_impl(self, m: mtf.Mesh | mtf.Tensor | mtf.Operation) -> ShapeMeshImpl:
        """The one implementation, whatever the mesh."""
        return self.impl

    def add_counter(self, key: str, value: int) -> None:
        """Counts nothing."""

    def is_within(self, scope: _Scope) -> bool:
        """Whether what is being lowered stands in these loops."""
        return self.scope[:len(scope)] == scope

    def export(self, tensor: mtf.Tensor) -> None:
        """Fetches an output, outside of all loops.

        Raises:
          _LoweringError: there is no such tensor outside of them.
        """
        self.scope = ()
        try:
            self.export_to_tf_tensor(tensor)
        except Exception as error:
            laid_out = self.tensors.get(tensor)
            axes = frozenset[int](laid_out.mesh_axes if isinstance(laid_out, _PendingSum) else ())
            raise _LoweringError(tensor.operation, error, axes) from error

    def lower_operation(self, operation: mtf.Operation, scope: _Scope) -> None:
        """Lowers an operation that stands in these loops.

        Raises:
          _LoweringError: whatever its lowering raised.
        """
        self.scope = scope
        try:
            read = self._verifier.read(operation)
            if self._inside:
                for tensor in read.reads:
                    made_in = self._inside.get(tensor)
                    if made_in is not None and not self.is_within(made_in):
                        raise ValueError(f"{tensor.name} is made in a loop and cannot be read outside of it")
            self._lower(operation, read)
        except _LoweringError:
            raise
        except Exception as error:  # whatever an operation's lowering raises is the answer
            sums = (self.tensors.get(tensor) for tensor in operation.inputs)
            axes = frozenset(axis for laid_out in sums if isinstance(laid_out, _PendingSum)
                             for axis in laid_out.mesh_axes)
            raise _LoweringError(operation, error, axes) from error
        if scope:
            self._inside.update(dict.fromkeys(read.outputs, scope))

    def _lower(self, operation: mtf.Operation, read: _Read) -> None:
        if read.number is None:
            self._lower_anew(operation)
            return
        axes = self._axes.get(read.names)
        if axes is None:
            axes = self._axes[read.names] = tuple([self.impl.axis_of(name) for name in read.names])
        key = read.number, axes, tuple([None if type(laid_out) is Slices else _state(laid_out)
                                        for laid_out in map(self.tensors.__getitem__, read.inputs)])
        made = self._memo.made.get(key)
        if made is None:
            self._memo.made[key] = self._lower_anew(operation)
            return
        for position in made.finished:
            self.tensors[read.inputs[position]].to_laid_out_tensor()
        if rule_of(operation).is_variable:
            self.variables[operation] = ShapeVariable(operation, self.impl)
        for output, (dtype, shape, summed) in zip(read.outputs, made.outputs, strict=True):
            self.tensors[output] = self._laid_out(dtype, shape, summed)

    def _laid_out(self, dtype: tf.DType, shape: tuple[int, ...], axes: _Axes) -> Slices | _PendingSum:
        slices = self.impl.slices(dtype, shape)
        return slices if axes is None else _PendingSum(self, slices, axes)

    def _lower_anew(self, operation: mtf.Operation) -> _Made:
        """Lowers an operation by its own code, and puts slices of the same shapes in the place of what it made."""
        pending = [(number, laid_out) for number, laid_out in enumerate(map(self.tensors.get, operation.inputs))
                      if isinstance(laid_out, _PendingSum) and laid_out.finished_in is None]
        rule = rule_of(operation)
        if (slices := rule.imported_slices(operation)) is not None:
            self.set_tensor_lowering(operation.outputs[0], Slices(slices.tensor_list[:1]))
        elif (parts := rule.loop(operation)) is not None:
            self._lower_loop(operation, parts)
        elif (forward := rule.differentiates(operation)) is not None:
            self._lower_gradient(operation, forward)
        else:
            self._lower_by_itself(operation)
        outputs = []
        for output in operation.outputs:
            self.laid_out_size(output)
            laid_out = slices = self.tensors[output]
            axes: _Axes = None
            if isinstance(laid_out, _ops.LazyAllreduceSum):
                axes, slices = tuple(laid_out.mesh_axes), laid_out.laid_out_input
            outputs.append((slices.tensor_list[0].dtype, tuple(slices.slice_shape), axes))
            if not isinstance(laid_out, _PendingSum):
                self.tensors[output] = self._laid_out(*outputs[-1])
        finished = tuple(number for number, laid_out in pending if laid_out.finished_in is not None)
        return _Made(tuple(outputs), finished)

    def _lower_by_itself(self, operation: mtf.Operation) -> None:
        """By its own code. That of a program's class may go through devices and slices one by one, of which there is
        one here: where it fails, it is given all of them."""
        try:
            operation.lower(self)
        except Exception:  # what it raises with all of them is the answer
            if type(operation).lower.__module__ == _ops.__name__:
                raise
            self._lower_on_all_devices(operation)

    def _lower_on_all_devices(self, operation: mtf.Operation) -> None:
        shapes, given = self.impl, {tensor: self.tensors[tensor] for tensor in operation.inputs}
        impl = placement_mesh_impl.PlacementMeshImpl(shapes.shape, shapes.layout_rules, [""] * shapes.size)

        def of_all(slices: Slices) -> Any:
            return impl.LaidOutTensor(slices.tensor_list[:1] * impl.size)
        for tensor, laid_out in given.items():
            self.tensors[tensor] = (_ops.LazyAllreduceSum(impl, of_all(laid_out.laid_out_input), laid_out.mesh_axes)
                                    if isinstance(laid_out, _ops.LazyAllreduceSum) else of_all(laid_out))
        self.impl = impl
        try:
            operation.lower(self)
            finished = [tensor for tensor in given if getattr(self.tensors[tensor], "_reduced", None) is not None]
        finally:
            self.impl = shapes
            self.tensors.update(given)
        for tensor in finished:
            given[tensor].to_laid_out_tensor()

    def _lower_loop(self, loop: mtf.Operation, parts: LoopParts) -> None:
        """As Mesh-TF's own code does, but for TensorFlow's loop around it: condition and body are lowered once, and
        what goes round has to keep its shape."""
        if not parts.is_plain:
            self._lower_loop_in_tensorflow(loop, parts)
            return
        starts = [self.tensors[variable.start].to_laid_out_tensor() for variable in parts.variables]
        starts += [self.impl.slices(tensor.dtype, self.impl.slice_shape(tensor.shape))
                   for tensor, _ in parts.accumulators]
        self._lower_stage(loop, parts, _CONDITION, starts)
        made = self._lower_stage(loop, parts, _BODY, starts)
        for start, (slices, axes), inner, output in zip(starts, made, parts.stages[_BODY].outputs, loop.outputs,
                                                        strict=True):
            before, after = start.tensor_list[0], slices.tensor_list[0]
            if before.dtype != after.dtype or not before.shape.is_compatible_with(after.shape):
                raise ValueError(f"{inner.name} enters an iteration with {before.dtype.name} slices of shape "
                                 f"{before.shape}, and leaves it with {after.dtype.name} slices of shape {after.shape}")
            self.set_tensor_lowering(output, slices if axes is None else _PendingSum(self, slices, axes))

    def _lower_stage(self, loop: mtf.Operation, parts: LoopParts, number: int, starts: Sequence[Slices],
                     ) -> list[tuple[Slices, _Axes]]:
        """Lowers the condition or the body of a loop; of what comes out, the slices and the axes of partial sums."""
        outer, stage = self.scope, parts.stages[number]
        scope = (*outer, (loop, number))
        self._inside.update(dict.fromkeys(stage.inputs, scope))
        self.tensors.update(zip(stage.inputs, starts, strict=False))
        for operation in stage.operations:
            self.lower_operation(operation, scope)
        self.scope = scope
        made: list[tuple[Slices, _Axes]] = []
        for tensor in stage.outputs:
            laid_out = self.tensors[tensor]
            if number == _BODY and isinstance(laid_out, _ops.LazyAllreduceSum):  # is reduced after the loop
                made.append((laid_out.laid_out_input, tuple(laid_out.mesh_axes)))
            else:
                made.append((laid_out.to_laid_out_tensor(), None))
        self.scope = outer
        return made

    def _lower_loop_in_tensorflow(self, loop: mtf.Operation, parts: LoopParts) -> None:
        """By its own code, which lowers the operations of its body by ours."""
        outer, inside = self.scope, []
        for number, stage in enumerate(parts.stages):
            scope = (*outer, (loop, number))
            inside.append([_InLoop(operation, scope) for operation in stage.operations])
            self._inside.update(dict.fromkeys(stage.inputs, scope))
        parts.with_operations(*inside).lower(self)
        self.scope = outer

    def _lower_gradient(self, gradient: mtf.Operation, forward: mtf.Operation) -> None:
        """With its function, whose outputs it differentiates by its inputs: those at hand are shapes only."""
        kept = {tensor: self.tensors[tensor] for tensor in (*forward.inputs, *forward.outputs)}
        pending = any(isinstance(laid_out, _PendingSum) for laid_out in kept.values())
        if not pending:  # else it fails by itself
            for tensor in dict.fromkeys(forward.inputs):
                slices = kept[tensor]
                self.tensors[tensor] = Slices([tf.placeholder(slices.tensor_list[0].dtype, slices.slice_shape)])
            forward.lower(self)
        gradient.lower(self)
        self.tensors.update(kept)


def _state(laid_out: Slices | mtf.ops.LazyAllreduceSum) -> Hashable:
    """Of a partial sum: the mesh axes it is to be summed over, whether nobody has done so yet, and whether it is of
    use."""
    if isinstance(laid_out, _PendingSum):
        return tuple(laid_out.mesh_axes), laid_out.finished_in is None, laid_out.usable
    return None


def tf_graph_of(graph: mtf.Graph) -> tf.Graph:
    """The tf.Graph that a Mesh-TF graph was built in: that of its variables and of what it imports; the current one
    where it has neither."""
    for operation in graph.operations:
        rule = rule_of(operation)
        own = getattr(operation, "_master", None) if rule.is_variable else rule.imported(operation)
        if own is not None:
            return own.graph
    return tf.get_default_graph()


class Verifier:
    """Lowers one graph under layouts, for shapes only, in a TensorFlow graph that is thrown away.

    Attributes:
      graph: the Mesh-TF graph; it is left as it is.
      outputs: tensors that will be exported.
      memo: what was lowered before.
    """

    def __init__(self, graph: mtf.Graph, outputs: Iterable[mtf.Tensor] = (), memo: Memo | None = None) -> None:
        self.graph, self.outputs = graph, list(outputs)
        self.memo = Memo() if memo is None else memo
        self._reads: dict[mtf.Operation, _Read] = {}
        self._outer, self._stacking = tf_graph_of(graph), Stacking(graph)
        # A function's graph reads the tensors of the user's graph as if they were its inputs.
        with self._outer.as_default():
            self._scratch = func_graph.FuncGraph("layout")
        self._placeholders: dict[tuple[tf.DType, tuple[int, ...]], Slices] = {}

    def read(self, operation: mtf.Operation) -> _Read:
        """What is the same of an operation under all layouts."""
        found = self._reads.get(operation)
        if found is None:
            number, inputs, outputs = self.memo.number(operation), tuple(operation.inputs), tuple(operation.outputs)
            names = None if number is None else self.memo.names.get(number)
            if names is None:
                names = tuple(dict.fromkeys(
                    dim.name for tensor in (*inputs, *outputs) for dim in tensor.shape.dims))
                if number is not None:
                    self.memo.names[number] = names
            found = self._reads[operation] = _Read(number, names, inputs, outputs,
                                                   tuple(rule_of(operation).reads(operation)))
        return found

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
        with self._outer.as_default(), self._scratch.as_default():
            impl = ShapeMeshImpl(shape, mtf.LayoutRules(rules.items()), self._placeholders)
            try:
                stacked = self._stacking.problem(impl)
            except ValueError:  # the layout gives no slices of a variable: lowering that says why
                stacked = None
            if stacked is not None:
                return Problem(stacked[0], tuple(rules), stacked[1])
            try:
                lowering = _ShapeLowering(self, impl)
                for output in self.outputs:
                    lowering.export(output)
            except _LoweringError as failure:
                operation = failure.operation
                names = dict.fromkeys(name for tensor in (*operation.inputs, *operation.outputs)
                                      for name in tensor.shape.dimension_names if name in rules)
                names.update(dict.fromkeys(name for name in rules if impl.axis_number(name) in failure.axes))
                text = " ".join(str(failure.cause).split())[:300]
                # What is imported has none of the split dims, and a split of one of its own may lift it.
                depends = not names and rule_of(operation).imported(operation) is not None
                return Problem(operation.name, tuple(names or rules), f"{type(failure.cause).__name__}: {text}",
                               depends=depends)
        return None
