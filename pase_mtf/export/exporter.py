"""mtf.Graph -> ComputationGraph: what the cost model and the searches need to know, without TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from pase_mtf.arguments import checked_arguments
from pase_mtf.compat import mtf
from pase_mtf.export.grouping import group_operations
from pase_mtf.export.groups import Group
from pase_mtf.export.pending_sums import pending_sums
from pase_mtf.export.phases import FORWARD, phases_of
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand, Variable
from pase_mtf.operations.facts import OperationFacts, read_operations
from pase_mtf.operations.nodes import Nodes

__all__ = ["export_graph"]


@checked_arguments
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
    facts = read_operations(graph)
    phases = phases_of(graph, facts)
    exporter = _Exporter(facts, phases, group_operations(graph, facts, phases))
    return ComputationGraph(name=name, layers=exporter.layers(), edges=exporter.edges(),
                            operations=len(facts), meta=dict(meta or {}))


class _Exporter:

    def __init__(self, facts: list[OperationFacts], phases: list[str], groups: list[Group]) -> None:
        self._facts, self._phases, self._groups = facts, phases, groups
        self._group_of = {id(facts[index].operation): number
                          for number, group in enumerate(groups) for index in group.members}
        self._dims = [group.dims() for group in groups]
        self._splittable = [
            tuple(dim for dim, size in dims.items() if dim in group.legal and size > 1)
            for group, dims in zip(groups, self._dims, strict=True)]
        # Most tensors of a layer have a shape that the layer has seen before: they are one object.
        self._operands: dict[tuple[int, tuple[mtf.Dimension, ...], int], Operand] = {}
        self._assigned = self._assigned_values()
        # Gradients that no assignment needs (that of the input image, say): TensorFlow never runs them.
        self._unused = {fact.index for fact, phase in zip(facts, phases, strict=True)
                        if phase != FORWARD and not fact.is_needed}
        self._sums = pending_sums((fact for fact in facts if fact.index not in self._unused),
                                  lambda operation: self._group_of.get(id(operation)), self._split_names)

    def _split_names(self, group: int, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that the layer can split, by the names that it gives them."""
        found = map(self._groups[group].resolve, names)
        return tuple(name for name in found if name in self._splittable[group])

    def _operand(self, group: int, tensor: mtf.Tensor) -> Operand:
        """The tensor by the layer's names for its dims; "" for what the layer never splits."""
        dims, itemsize = tuple(tensor.shape.dims), tensor.dtype.size
        if (group, dims, itemsize) not in self._operands:
            splittable, resolve = self._splittable[group], self._groups[group].resolve
            names = (resolve(dim.name) for dim in dims)
            self._operands[group, dims, itemsize] = Operand(
                tuple(name if name in splittable else "" for name in names), tuple(dim.size for dim in dims), itemsize)
        return self._operands[group, dims, itemsize]

    def layers(self) -> tuple[Layer, ...]:
        """A Layer per group, with unique names."""
        used: set[str] = set()
        result = []
        assignments: dict[int, set[int]] = {}
        for index, owner in self._assigned:
            assignments.setdefault(owner, set()).add(index)
        for number, group in enumerate(self._groups):
            base = self._facts[group.anchor].name
            name, suffix = base, 1
            while name in used:
                name, suffix = f"{base}_{suffix}", suffix + 1
            used.add(name)
            splittable = self._splittable[number]
            members = sorted({*assignments.get(number, ()), *group.members})
            result.append(Layer(
                name=name, kind=group.kind, dims=self._dims[number], splittable=splittable,
                operations=tuple(self._operation(number, self._facts[index]) for index in members),
                variables=tuple(self._variable(number, self._facts[index].operation) for index in group.members
                                if self._facts[index].rule.is_variable),
                aliases={other: dim for other, dim in group.aliases.items() if dim in splittable}))
        return tuple(result)

    def _assigned_values(self) -> dict[tuple[int, int], list[mtf.Tensor]]:
        """(assignment, layer) -> its values for the layer's variables: a grouped Assign sets those of many layers."""
        found: dict[tuple[int, int], list[mtf.Tensor]] = {}
        for fact in self._facts:
            for variable, value in fact.assigns:
                if id(variable) in self._group_of:
                    found.setdefault((fact.index, self._group_of[id(variable)]), []).append(value)
        return found

    def _operation(self, group: int, fact: OperationFacts) -> LayerOperation:
        reads, operation = self._reads_in(group, fact), fact.operation
        inputs = tuple(self._operand(group, tensor) for tensor in reads)
        outputs = tuple(self._operand(group, tensor) for tensor in operation.outputs)
        dims = dict.fromkeys(name for operand in (*outputs, *inputs) for name in operand.dims if name)
        runs = fact.index not in self._unused
        flops = fact.flops if runs else 0.0
        if fact.assigns and flops:  # of a grouped assignment, the values for this layer's variables
            flops = float(sum(tensor.size for tensor in reads))
        sums = tuple(self._sums.get(tensor, ()) for tensor in operation.outputs)
        nodes = fact.nodes if runs else Nodes()
        return LayerOperation(
            index=fact.index, name=fact.name, type=type(operation).__name__, phase=self._phases[fact.index],
            kind=fact.kind if runs else "none", flops=flops, dims=tuple(dims), inputs=inputs, outputs=outputs,
            reduced=sums[0] if len(set(sums)) == 1 else (),
            partial_sums=sums if len(set(sums)) > 1 else (), shift=self._shift(group, fact), role=fact.role,
            nodes=nodes.count, traffic=nodes.traffic, broadcast_runs=nodes.broadcast_runs)

    def _shift(self, group: int, fact: OperationFacts) -> tuple[str, int] | tuple[()]:
        shift = fact.rule.shift(fact.operation)
        if shift is None:
            return ()
        name = self._groups[group].resolve(shift[0])
        return (name, shift[1]) if name in self._splittable[group] else ()

    def _reads_in(self, group: int, fact: OperationFacts) -> list[mtf.Tensor]:
        """What the operation reads as part of this layer: of an assignment, the values for the layer's variables."""
        if fact.assigns:
            return self._assigned.get((fact.index, group), [])
        return list(fact.reads)

    def _variable(self, group: int, variable: mtf.Variable) -> Variable:
        # What a device keeps is of the slices' type; what the operation puts out, of the activations'.
        operand = dataclasses.replace(self._operand(group, variable.outputs[0]), itemsize=variable.slice_dtype.size)
        return Variable(variable.name, operand, bool(variable.trainable))

    def edges(self) -> tuple[Edge, ...]:
        """Every tensor of more than one element that crosses from one layer to another, once per way it is read."""
        found: dict[tuple[int, int, tuple[str, ...]], Edge] = {}
        for fact in self._facts:
            if fact.index in self._unused:
                continue
            for group, tensor in self._reads(fact):
                source = self._group_of.get(id(tensor.operation))
                if source is None or source == group or tensor.size <= 1:
                    continue
                names = self._operand(group, tensor).dims
                key = (id(tensor), group, names)
                if key not in found:
                    found[key] = Edge(
                        source=source, target=group, tensor=tensor.name, phase=self._phases[fact.index],
                        shape=tuple(tensor.shape.to_integer_list), itemsize=tensor.dtype.size,
                        source_dims=self._operand(source, tensor).dims, target_dims=names)
        return tuple(found.values())

    def _reads(self, fact: OperationFacts) -> list[tuple[int, mtf.Tensor]]:
        """(layer that reads it, tensor): the layer is the operation's, of an assignment its variable's."""
        if fact.assigns:
            return [(self._group_of[id(variable)], value) for variable, value in fact.assigns
                    if id(variable) in self._group_of]
        group = self._group_of[id(fact.operation)]
        outside = [tensor for tensor in fact.captures if id(tensor.operation) in self._group_of]
        return [(group, tensor) for tensor in (*fact.reads, *outside)]
