"""mtf.Graph -> ComputationGraph: what the cost model and the searches need to know, without TensorFlow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pase_mtf.compat import mtf
from pase_mtf.export.grouping import Group, group_operations
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand, Variable
from pase_mtf.operations.facts import (
    flops_of,
    is_handed_over,
    is_lazy_sum,
    kind_of,
    needed_for_updates,
    passes_lazy_sums,
    reduced_dims,
    tensors_in,
)
from pase_mtf.operations.nodes import Nodes, nodes_of

__all__ = ["export_graph"]

_ROLES: dict[type, str] = {
    mtf.Conv2dOperation: "convolution",
    mtf.Conv3dOperation: "convolution",
    mtf.Conv2dTransposeOperation: "transposed convolution",
    mtf.Conv3dTransposeOperation: "transposed convolution",
    mtf.Conv2or3dBackpropFilterOperation: "filter gradient",
    mtf.Conv2or3dBackpropInputOperation: "image gradient",
    mtf.ReshapeOperation: "rename",
    mtf.ShiftOperation: "shift",
}
"""`LayerOperation.role` by class; that of all others, which cost what their kind says, is ""."""


def export_graph(graph: mtf.Graph, *, name: str = "model", meta: dict[str, Any] | None = None) -> ComputationGraph:
    """Exports a Mesh-TensorFlow graph: its layers with their dims, operations and variables, and the edges.

    Every operation of the graph lands in exactly one layer, forward, gradient and optimizer operations alike. The
    graph is read only; exporting the same program again gives the same hash.

    Args:
      graph: any mtf.Graph, with or without gradients and optimizer operations, before it is lowered by
        `mtf.Lowering` (which may rewrite it).
      name: for people: tables and plots show it.
      meta: anything JSON can hold that should travel with the graph (batch, preset, ...).

    Returns:
      The computation graph.
    """
    groups, phases = group_operations(graph)
    exporter = _Exporter(graph, groups, phases)
    return ComputationGraph(name=name, layers=exporter.layers(), edges=exporter.edges(),
                            operations=len(graph.operations), meta=dict(meta or {}))


class _Exporter:

    def __init__(self, graph: mtf.Graph, groups: list[Group], phases: list[str]):
        self._operations = graph.operations
        self._groups = groups
        self._phases = phases
        self._traced: dict[Any, Nodes | None] = {}
        self._group_of = {id(self._operations[index]): number
                          for number, group in enumerate(groups) for index in group.members}
        self._dims = [group.dims() for group in groups]
        self._splittable = [
            tuple(dim for dim, size in dims.items() if dim in group.legal and size > 1)
            for group, dims in zip(groups, self._dims, strict=True)]
        self._unused = self._find_unused()
        self._pending = self._unfinished_sums()

    def _find_unused(self) -> set[int]:
        """Indices of gradients that no assignment needs (that of the input image, say): TensorFlow never runs them."""
        needed = needed_for_updates(self._operations)
        return {index for index, phase in enumerate(self._phases) if phase != "forward" and not needed[index]}

    def _names(self, group: int, tensor: mtf.Tensor) -> tuple[str, ...]:
        """The layer's names for the tensor's dims; "" for what it never splits."""
        splittable = self._splittable[group]
        names = (self._groups[group].resolve(dim.name) for dim in tensor.shape.dims)
        return tuple(name if name in splittable else "" for name in names)

    def _operand(self, group: int, tensor: mtf.Tensor) -> Operand:
        return Operand(self._names(group, tensor), tuple(tensor.shape.to_integer_list), tensor.dtype.size)

    def _unfinished_sums(self) -> dict[int, tuple[str, ...]]:
        """id(operation) -> the dims whose split the all-reduce of its output has to finish.

        Mesh-TF's sums are lazy: an addition of sums over the same dims adds first and reduces once. The all-reduce is
        charged to the last operation of such a chain.
        """
        consumers: dict[mtf.Tensor, int] = {}
        used = [operation for index, operation in enumerate(self._operations) if index not in self._unused]
        for operation in used:
            for tensor in tensors_in(operation):
                consumers[tensor] = consumers.get(tensor, 0) + 1
        pending: dict[int, tuple[str, ...]] = {}
        lazy: dict[int, tuple[str, ...]] = {}
        for operation in used:
            group = self._group_of[id(operation)]
            dims = tuple(name for name in map(self._groups[group].resolve, reduced_dims(operation))
                         if name in self._splittable[group])
            if dims:
                pending[id(operation)] = dims
                if is_lazy_sum(operation):
                    lazy[id(operation)] = dims
            elif passes_lazy_sums(operation) and operation.outputs:
                sources = [tensor.operation for tensor in tensors_in(operation)]
                sums = {lazy.get(id(source)) for source in sources}
                same_layer = all(self._group_of.get(id(source)) == group for source in sources)
                if (sources and None not in sums and len(sums) == 1 and same_layer
                        and all(consumers[tensor] == 1 for tensor in tensors_in(operation))):
                    for source in sources:
                        pending.pop(id(source), None)
                        moved = lazy.pop(id(source))
                    pending[id(operation)] = lazy[id(operation)] = moved
        return pending

    def layers(self) -> tuple[Layer, ...]:
        """A Layer per group, with unique names."""
        used: set[str] = set()
        result = []
        assigns = self._assigns()
        for number, group in enumerate(self._groups):
            base = self._operations[group.founder].name
            name, suffix = base, 1
            while name in used:
                name, suffix = f"{base}_{suffix}", suffix + 1
            used.add(name)
            splittable = self._splittable[number]
            result.append(Layer(
                name=name, kind=group.kind, dims=self._dims[number], splittable=splittable,
                operations=tuple(self._operation(number, index) for index in sorted(
                    {*assigns.get(number, ()), *group.members})),
                variables=tuple(self._variable(number, index) for index in group.members
                                if isinstance(self._operations[index], mtf.Variable)),
                aliases={other: dim for other, dim in group.aliases.items() if dim in splittable}))
        return tuple(result)

    def _assigns(self) -> dict[int, set[int]]:
        """Group -> the Assign operations that set a variable of it: a grouped Assign sets those of many layers."""
        found: dict[int, set[int]] = {}
        for index, operation in enumerate(self._operations):
            if isinstance(operation, mtf.Assign):
                for variable in operation.variables:
                    if id(variable) in self._group_of:
                        found.setdefault(self._group_of[id(variable)], set()).add(index)
        return found

    def _operation(self, group: int, index: int) -> LayerOperation:
        operation = self._operations[index]
        inputs = tuple(self._operand(group, tensor) for tensor in self._inputs_in(group, operation))
        outputs = tuple(self._operand(group, tensor) for tensor in operation.outputs)
        dims = dict.fromkeys(name for operand in (*outputs, *inputs) for name in operand.dims if name)
        unused = index in self._unused
        nodes = None if unused else nodes_of(operation, self._traced)
        return LayerOperation(
            index=index, name=operation.name, type=type(operation).__name__, phase=self._phases[index],
            kind="none" if unused else kind_of(operation),
            flops=0.0 if unused else self._flops(operation, inputs), dims=tuple(dims), inputs=inputs, outputs=outputs,
            reduced=self._pending.get(id(operation), ()), shift=self._shift(group, operation),
            role=next((_ROLES[ancestor] for ancestor in type(operation).__mro__ if ancestor in _ROLES), ""),
            **({"nodes": nodes.count, "traffic": nodes.traffic, "rows": nodes.rows} if nodes else {}))

    def _shift(self, group: int, operation: mtf.Operation) -> tuple[str, int] | tuple[()]:
        if not isinstance(operation, mtf.ShiftOperation):
            return ()
        name = self._groups[group].resolve(operation._dim.name)
        return (name, operation._offset) if name in self._splittable[group] else ()

    def _inputs_in(self, group: int, operation: mtf.Operation) -> list[mtf.Tensor]:
        """What the operation reads as part of this layer: of a grouped Assign, the values for the layer's variables."""
        if isinstance(operation, mtf.Assign):
            return [value for variable, value in zip(operation.variables, operation.inputs, strict=True)
                    if self._group_of.get(id(variable)) == group]
        return tensors_in(operation)

    @staticmethod
    def _flops(operation: mtf.Operation, inputs: tuple[Operand, ...]) -> float:
        if isinstance(operation, mtf.Assign):
            return 0.0 if is_handed_over(operation) else float(sum(math.prod(operand.shape) for operand in inputs))
        return flops_of(operation)

    def _variable(self, group: int, index: int) -> Variable:
        variable = self._operations[index]
        # What a device keeps is of the slices' type; what the operation puts out, of the activations'.
        operand = dataclasses.replace(self._operand(group, variable.outputs[0]), itemsize=variable.slice_dtype.size)
        return Variable(variable.name, operand, bool(variable.trainable))

    def edges(self) -> tuple[Edge, ...]:
        """Every tensor of more than one element that crosses from one layer to another, once per way it is read."""
        found: dict[tuple, Edge] = {}
        for index, operation in enumerate(self._operations):
            if index in self._unused:
                continue
            for group, tensor in self._reads(operation):
                source = self._group_of.get(id(tensor.operation))
                if source is None or source == group or tensor.size <= 1:
                    continue
                names = self._names(group, tensor)
                key = (id(tensor), group, names)
                if key not in found:
                    found[key] = Edge(
                        source=source, target=group, tensor=tensor.name, phase=self._phases[index],
                        shape=tuple(tensor.shape.to_integer_list), itemsize=tensor.dtype.size,
                        source_dims=self._names(source, tensor), target_dims=names)
        return tuple(found.values())

    def _reads(self, operation: mtf.Operation) -> list[tuple[int, mtf.Tensor]]:
        """(layer that reads it, tensor): the layer is the operation's but for an Assign, which is its variable's."""
        if isinstance(operation, mtf.Assign):
            return [(self._group_of[id(variable)], value)
                    for variable, value in zip(operation.variables, operation.inputs, strict=True)
                    if id(variable) in self._group_of]
        group = self._group_of[id(operation)]
        tensors = list(tensors_in(operation))
        if isinstance(operation, mtf.WhileLoopOperation):  # its body reads from outside as well
            for inner in [*operation._cond_ops, *operation._body_ops]:
                tensors += [tensor for tensor in inner.inputs if id(tensor.operation) in self._group_of]
        return [(group, tensor) for tensor in tensors]
