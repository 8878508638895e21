"""mtf.Graph -> ComputationGraph: what the cost model and the searches need to know, without TensorFlow."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pase_mtf.arguments import checked_arguments
from pase_mtf.compat import mtf
from pase_mtf.export.grouping import group_operations
from pase_mtf.export.lifetimes import lifetimes
from pase_mtf.export.pending_sums import pending_sums
from pase_mtf.export.phases import FORWARD, phases_of
from pase_mtf.export.steps import is_cut_in_place
from pase_mtf.export.sums_again import sums_again
from pase_mtf.garbage import uncollected
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.operations.alike import Alike
from pase_mtf.operations.facts import ASSUMED_TRIPS, OperationFacts, read_operations
from pase_mtf.operations.flow import Flow, all_operations
from pase_mtf.operations.lowering_key import held_by
from pase_mtf.operations.nodes import Nodes

__all__ = ["export_as", "export_for_stock", "export_graph", "is_export_of"]

_MADE: weakref.WeakKeyDictionary[mtf.Graph, weakref.ref[ComputationGraph]] = weakref.WeakKeyDictionary()
"""What was made of graphs last, with their updates in the layers of their weights."""


@checked_arguments
def export_graph(graph: mtf.Graph, *, name: str = "model", meta: dict[str, object] | None = None,
                 alike: Alike | None = None, sharded_updates: bool = False, turns: bool = False) -> ComputationGraph:
    """Exports a Mesh-TensorFlow graph: its layers with their dims, operations and variables, and the edges.

    Every operation of the graph lands in exactly one layer, forward, gradient and optimizer operations alike. The
    graph is read only; exporting the same program again gives the same hash.

    Args:
      graph: any mtf.Graph, with or without gradients and optimizer operations, before it is lowered by
        `mtf.Lowering` (which may rewrite it).
      name: for people: tables and plots show it.
      meta: anything JSON can hold that should travel with the graph (batch, preset, ...).
      alike: numbers of operations that are alike, for who needs them for something else as well.
      sharded_updates: make what the optimizer does with the weights of a layer a layer beside it, with a configuration
        of its own: then weights that are replicated can be updated in shards, and the optimizer's slots kept so.
      turns: it is a microbatch of a pipeline: the backward pass begins when the forward pass is over. Only what is said
        of memory and of what is found again depends on that, and not the hash.

    Returns:
      The computation graph. Where it rests on something that the Mesh-TensorFlow graph does not tell (how often a loop
      runs whose condition depends on data), `meta["assumed"]` says so, a sentence each.
    """
    made = _export(graph, name, meta or {}, alike, sharded_updates, turns, stock=False)
    if not sharded_updates:
        _MADE[graph] = weakref.ref(made)
    return made


def export_for_stock(graph: mtf.Graph, *, name: str, alike: Alike | None = None) -> ComputationGraph:
    """`export_graph`, with layers that split what stock `mtf.Lowering` splits under a layout under which it lowers:
    layouts are priced by it. Strategies are of layers that split what our lowering can.

    Args:
      graph, name, alike: of `export_graph`.
    """
    return _export(graph, name, {}, alike, sharded_updates=False, turns=False, stock=True)


def _export(graph: mtf.Graph, name: str, meta: Mapping[str, object], alike: Alike | None, sharded_updates: bool,
            turns: bool, *, stock: bool) -> ComputationGraph:
    with uncollected():
        flow = Flow(graph)
        facts = read_operations(graph, flow, alike, stock=stock)
        phases = phases_of(graph, facts)
        exporter = _Exporter(graph, facts, phases, flow, sharded_updates, turns)
        return ComputationGraph(name=name, layers=exporter.layers(), edges=exporter.edges(),
                                operations=len(facts), meta={**meta, **_assumed(facts)})


def export_as(graph: mtf.Graph, graph_hash: str) -> ComputationGraph:
    """`export_graph`, with updates as layers or without: as that which has this hash; where neither has it, without.

    Args:
      graph: any mtf.Graph.
      graph_hash: of what was exported of it.
    """
    found = export_graph(graph)
    if found.hash != graph_hash:
        beside = export_graph(graph, sharded_updates=True)
        found = beside if beside.hash == graph_hash else found
    return found


def is_export_of(exported: ComputationGraph, graph: mtf.Graph) -> bool:
    """Whether this is what `export_graph` makes of a graph as it is now, by the hash, with the updates of weights in
    their layers. Where it was made of this very graph, nothing is exported again to see that.

    Args:
      exported: what is said to be that.
      graph: any mtf.Graph.
    """
    made = _MADE.get(graph)
    if made is not None and made() is exported and exported.operations == len(all_operations(graph)):
        return True
    return exported.hash == export_graph(graph).hash


def _assumed(facts: Sequence[OperationFacts]) -> dict[str, list[str]]:
    """What `export_graph` adds to meta."""
    unknown = [fact.name for fact in facts if fact.iterations is None]
    return {"assumed": [f"how often loop {name} runs is not in the graph: predictions are of {ASSUMED_TRIPS} iteration"
                        for name in unknown]} if unknown else {}


class _Content(NamedTuple):
    """Fields of `LayerOperation` that operations which are alike have in common in layers that name dims alike."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    dims: tuple[str, ...]
    shift: tuple[str, int] | tuple[()]
    role: str


def _flops(fact: OperationFacts, content: _Content) -> float:
    """Of an assignment, of the values that a layer has for variables."""
    if fact.assigns and fact.flops:
        return float(sum(math.prod(operand.shape) for operand in content.inputs))
    return fact.flops


class _Exporter:

    def __init__(self, graph: mtf.Graph, facts: list[OperationFacts], phases: list[str], flow: Flow,
                 sharded_updates: bool, turns: bool) -> None:
        groups = group_operations(graph, facts, phases, sharded_updates=sharded_updates)
        self._facts, self._phases, self._groups, self._flow = facts, phases, groups, flow
        self._group_of = {id(facts[index].operation): number
                          for number, group in enumerate(groups) for index in group.members}
        self._index_of = {id(fact.operation): fact.index for fact in facts}
        # Another name of a tensor, in its layer and its loops -> its first one: lowering moves one object, once.
        self._first_name: dict[mtf.Tensor, mtf.Tensor] = {}
        for fact in facts:
            for made, read in zip(fact.outputs, fact.reads, strict=False) if fact.rule.is_same else ():
                source = self._group_of.get(id(flow.owner(read).operation))
                if source == self._group_of[id(fact.operation)] and flow.loops_around(read) == fact.loops:
                    self._first_name[made] = self._first_name.get(read, read)
        # Weights whose new values a layer beside their own computes -> that layer.
        self._updated_in = {id(facts[index].operation): number for number, group in enumerate(groups)
                            for index in group.updates}
        readers = {**self._group_of, **{id(variable): self._assigning(variable) for fact in facts
                                        for variable, _ in fact.assigns if id(variable) in self._group_of}}
        self._dims = [group.dims() for group in groups]
        self._splittable = [
            tuple(dim for dim, size in dims.items() if dim in group.legal and size > 1)
            for group, dims in zip(groups, self._dims, strict=True)]
        self._trips = {fact.loops: fact.trips for fact in facts}
        # The layers of a stack repeat each other: what layers that call and split dims alike have in common is found
        # once. They have one number here.
        numbers: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], int] = {}
        self._naming = [numbers.setdefault((splittable, tuple(sorted(group.aliases.items()))), len(numbers))
                        for group, splittable in zip(groups, self._splittable, strict=True)]
        self._operands: dict[tuple[int, tuple[mtf.Dimension, ...], int], Operand] = {}
        self._content: dict[tuple[int, OperationFacts], _Content] = {}
        self._assigned = self._assigned_values()
        # Gradients that no assignment needs (that of the input image, say): TensorFlow never runs them.
        self._unused = {fact.index for fact, phase in zip(facts, phases, strict=True)
                        if phase != FORWARD and not fact.is_needed}
        self._sums = pending_sums((fact for fact in facts if fact.index not in self._unused),
                                  lambda operation: self._group_of.get(id(operation)), self._split_names,
                                  {output: inside for parts in flow.parts.values()
                                   for inside, output in parts.accumulators})
        self._again = sums_again((fact for fact in facts if fact.index not in self._unused), self._sums.due)
        self._pending_on_edges = self._taken_by_one_edge()
        self._repeats = self._found_again(turns)
        self._lifetimes = lifetimes(facts, phases, flow, readers, turns)

    def _found_again(self, turns: bool) -> frozenset[int]:
        """The operations that do the same to the same tensors as one before them in their layer (the gradient of
        x * x makes dy * x twice): TensorFlow runs the first for both (`lowering.equal_nodes`). In turns what the
        backward pass does waits for the forward pass, and is not what that has done (`lowering.turns`)."""
        seen, found = dict[Hashable, OperationFacts](), set[int]()
        same = dict[tuple[int, mtf.Tensor], mtf.Tensor]()  # (layer, tensor) -> the one that was made before it
        for fact in self._facts:
            rule = fact.rule
            if (fact.index in self._unused or not fact.reads or fact.assigns or rule.has_effects or rule.is_random
                    or rule.holds_others or (fact.like or fact).nodes.is_stateful):
                continue
            group = self._group_of[id(fact.operation)]
            reads = [self._first_name.get(tensor, tensor) for tensor in fact.reads]
            key = (group, fact.loops, id(fact.like or fact),
                   self._phases[fact.index] if turns else "", tuple(map(id, held_by(fact.operation))),
                   tuple([same.get((group, tensor), tensor) for tensor in reads]))
            first = seen.setdefault(key, fact)
            if first is not fact:
                found.add(fact.index)
                if not any(map(self._sums.due.get, (*fact.outputs, *first.outputs))):  # else each is summed by itself
                    same.update({(group, tensor): made for tensor, made in zip(
                        fact.outputs, first.outputs, strict=True)})
        return frozenset(found)

    def _taken_by_one_edge(self) -> frozenset[mtf.Tensor]:
        """Those of the pending sums that nobody reads but one other layer, as often as they are made: one operation of
        it, or several that need the same of them, which a reshape may not."""
        loops = {id(fact.operation): fact.loops for fact in self._facts}
        kept = {tensor for loop in self._running_loops() for variable in self._flow.parts[loop.operation].variables
                for tensor in (variable.start, variable.next)}
        readers: dict[mtf.Tensor, set[tuple[int, tuple[mtf.Operation, ...], mtf.Operation | None]]] = {
            tensor: set() for tensor in self._sums.pending - kept if tensor.size > 1}
        for fact in self._facts:
            if fact.index not in self._unused:
                reshape = fact.operation if fact.role == "rename" else None
                for group, tensor, _ in self._reads(fact):
                    for read in {tensor, self._flow.owner(tensor)} & readers.keys():
                        readers[read].add((group, fact.loops, reshape))
        return frozenset(tensor for tensor, found in readers.items() if len(found) == 1 and all(
            group != self._maker(tensor) and around == loops[id(tensor.operation)] for group, around, _ in found))

    def _maker(self, tensor: mtf.Tensor) -> int:
        """The layer that makes a tensor, or what a loop hands on or adds up under that name."""
        return self._group_of[id(self._flow.owner(tensor).operation)]

    def _split_names(self, group: int, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that the layer can split, by the names that it gives them."""
        found = map(self._groups[group].resolve, names)
        return tuple(name for name in found if name in self._splittable[group])

    def _operand(self, group: int, tensor: mtf.Tensor, named: mtf.Tensor | None = None) -> Operand:
        """The tensor by the layer's names for its dims, or for those of another tensor where its own do not count; ""
        for what the layer never splits."""
        key = self._naming[group], tuple((named or tensor).shape.dims), tensor.dtype.size
        found = self._operands.get(key)
        if found is None:
            splittable, resolve = self._splittable[group], self._groups[group].resolve
            names = (resolve(dim.name) for dim in key[1])
            found = self._operands[key] = Operand(
                tuple(name if name in splittable else "" for name in names), tuple(dim.size for dim in key[1]), key[2])
        return found

    def layers(self) -> tuple[Layer, ...]:
        """A Layer per group, with unique names."""
        names = self._layer_names()
        result = []
        accumulated = self._accumulated()
        assignments: dict[int, set[int]] = {}
        for index, owner in self._assigned:
            assignments.setdefault(owner, set()).add(index)
        for number, group in enumerate(self._groups):
            splittable = self._splittable[number]
            members = sorted({*assignments.get(number, ()), *group.members})
            operations = [self._operation(number, self._facts[index]) for index in members]
            operations = sorted([*operations, *accumulated.get(number, ())], key=lambda operation: operation.index)
            result.append(Layer(
                name=names[number], kind=group.kind, dims=self._dims[number], splittable=splittable,
                operations=tuple(operations),
                variables=tuple(self._variable(number, self._facts[index].operation, names) for index in group.members
                                if self._facts[index].rule.is_variable),
                aliases={other: dim for other, dim in group.aliases.items() if dim in splittable}))
        return tuple(result)

    def _layer_names(self) -> list[str]:
        """Unique names: of the operations that found the layers, or of the layers whose weights they update."""
        used: dict[str, None] = {}
        for group in self._groups:
            base = self._facts[group.anchor].name
            if group.updates:
                owner = self._groups[self._group_of[id(self._facts[group.updates[0]].operation)]]
                base = f"{self._facts[owner.anchor].name}/update"
            name, suffix = base, 1
            while name in used:
                name, suffix = f"{base}_{suffix}", suffix + 1
            used[name] = None
        return list(used)

    def _assigned_values(self) -> dict[tuple[int, int], list[tuple[mtf.Tensor, mtf.Tensor]]]:
        """(assignment, layer) -> the values that the layer has for variables, and whose names their dims have there: a
        grouped Assign sets those of many layers."""
        found: dict[tuple[int, int], list[tuple[mtf.Tensor, mtf.Tensor]]] = {}
        for fact in self._facts:
            for variable, value in fact.assigns:
                if id(variable) in self._group_of:
                    found.setdefault((fact.index, self._assigning(variable)), []).append(
                        (value, variable.outputs[0]))
        return found

    def _assigning(self, variable: mtf.Variable) -> int:
        """The layer that computes the new value of a variable."""
        return self._updated_in.get(id(variable), self._group_of[id(variable)])

    def _operation(self, group: int, fact: OperationFacts) -> LayerOperation:
        runs = fact.index not in self._unused
        if fact.assigns:  # of a grouped assignment, the values that this layer has for variables
            content = self._read_content(group, fact, tuple(
                self._operand(group, *read) for read in self._assigned.get((fact.index, group), [])))
        else:
            key = self._naming[group], fact.like or fact
            if key not in self._content:
                self._content[key] = self._read_content(
                    group, fact, tuple(self._operand(group, tensor) for tensor in fact.reads))
            content = self._content[key]
        # What a loop adds up is in the layer that makes it (_accumulated).
        loop = fact.operation in self._flow.parts
        sums = () if loop else tuple([self._sums.due.get(tensor, ()) for tensor in fact.outputs])
        nodes = (fact.like or fact).nodes if runs else Nodes()
        return LayerOperation(
            index=fact.index, name=fact.name, type=type(fact.operation).__name__, phase=self._phases[fact.index],
            kind=fact.computes if runs else "none", flops=_flops(fact, content) if runs else 0.0, dims=content.dims,
            inputs=content.inputs, outputs=content.outputs, reduced=sums[0] if len(set(sums)) == 1 else (),
            partial_sums=sums if len(set(sums)) > 1 else (), shift=content.shift, role=content.role if runs else "",
            nodes=nodes.count, traffic=nodes.traffic, broadcast_runs=nodes.broadcast_runs, trips=fact.trips,
            held=() if loop else self._lifetimes.of_shown(fact.operation) if (
                fact.role == "rename" or is_cut_in_place(fact)) else (
                self._lifetimes.of_outputs(fact.operation, nodes.besides)) if not fact.assigns else (
                self._lifetimes.of_converted([(shown.operation, value) for value, shown in self._assigned.get(
                    (fact.index, group), ())])),
            pending_outputs=() if loop else tuple([number for number, tensor in enumerate(fact.outputs)
                                                   if tensor in self._pending_on_edges]),
            added_outputs=() if loop else tuple([number for number, tensor in enumerate(fact.outputs)
                                                 if tensor in self._pending_on_edges & self._sums.added_to.keys()]),
            looked_up=self._looked_up(fact.outputs[0]) if fact.outputs else (),
            broadcast_after=fact.rule.broadcast_after(fact.operation) if any(sums) else (),
            summed_again=0 if loop else max([self._again.get(tensor, 0) for tensor in fact.outputs], default=0),
            repeats=fact.index in self._repeats)

    def _looked_up(self, output: mtf.Tensor) -> LookedUp | tuple[()]:
        """What an output consists of, or what it is added into, where that is summed in the layer of both."""
        whole = self._sums.added_into.get(output)
        if whole is None:
            return self._sums.looked_up.get(output, ())
        return () if whole in self._pending_on_edges else self._sums.looked_up[whole]

    def _read_content(self, group: int, fact: OperationFacts, inputs: tuple[Operand, ...]) -> _Content:
        outputs = tuple(self._operand(group, tensor) for tensor in fact.outputs)
        return _Content(inputs, outputs,
                        tuple(dict.fromkeys(name for operand in (*outputs, *inputs) for name in operand.dims if name)),
                        self._shift(group, fact), fact.role)

    def _accumulated(self) -> dict[int, list[LayerOperation]]:
        """What loops add up, by the layer that makes it: an addition in every iteration, and what is due after all."""
        found: dict[int, list[LayerOperation]] = {}
        for fact in self._running_loops():
            for inside, output in self._flow.parts[fact.operation].accumulators:
                maker = self._flow.owner(inside).operation
                group = self._group_of[id(maker)]
                operand, sums = self._operand(group, output), self._sums.due.get(output, ())
                adding = LayerOperation(
                    index=fact.index, name=fact.name, type=type(fact.operation).__name__,
                    phase=self._phases[self._index_of[id(maker)]], kind="pointwise", flops=float(output.size),
                    dims=tuple(dict.fromkeys(filter(None, operand.dims))), inputs=(operand, operand),
                    outputs=(operand,), trips=self._trips_in(fact))
                each = [adding]
                if sums:
                    each.append(dataclasses.replace(
                        adding, kind="none", flops=0.0, inputs=(operand,), reduced=sums, trips=fact.trips,
                        summed_again=self._again.get(output, 0),
                        pending_outputs=(0,) if output in self._pending_on_edges else ()))
                each[-1] = dataclasses.replace(each[-1], held=self._lifetimes.of_sum(output))
                found.setdefault(group, []).extend(each)
        return found

    def _running_loops(self) -> list[OperationFacts]:
        return [fact for fact in self._facts if fact.operation in self._flow.parts and fact.index not in self._unused]

    def _trips_in(self, loop: OperationFacts) -> int:
        return self._trips.get((*loop.loops, loop.operation), loop.trips)

    def _shift(self, group: int, fact: OperationFacts) -> tuple[str, int] | tuple[()]:
        shift = fact.rule.shift(fact.operation)
        if shift is None:
            return ()
        name = self._groups[group].resolve(shift[0])
        return (name, int(shift[1])) if name in self._splittable[group] else ()  # numpy's are no JSON

    def _variable(self, group: int, variable: mtf.Variable, names: Sequence[str]) -> Variable:
        # What a device keeps is of the slices' type; what the operation puts out, of the activations'.
        operand = dataclasses.replace(self._operand(group, variable.outputs[0]), itemsize=variable.slice_dtype.size)
        updating = self._updated_in.get(id(variable))
        return Variable(variable.name, operand, bool(variable.trainable), "" if updating is None else names[updating])

    def edges(self) -> tuple[Edge, ...]:
        """Every tensor of more than one element that crosses from one layer to another, once per way it is read."""
        found: dict[tuple[int, int, tuple[str, ...]], Edge] = {}

        def add(tensor: mtf.Tensor, group: int, phase: str, trips: int, named: mtf.Tensor | None = None) -> None:
            source = self._group_of.get(id(self._flow.owner(tensor).operation))
            if source is None or source == group or tensor.size <= 1:
                return
            dims = self._operand(group, tensor, named).dims
            key = (id(self._first_name.get(tensor, tensor)), group, dims)
            if key not in found:
                pending = self._sums.due[tensor] if tensor in self._pending_on_edges else ()
                looked_up, added_to = (of.get(tensor, ()) if pending else ()
                                       for of in (self._sums.looked_up, self._sums.added_to))
                found[key] = self._edge(source, group, tensor, phase, trips, target_dims=dims, pending=pending,
                                        looked_up=looked_up, added_to=added_to)

        for fact in self._facts:
            if fact.index in self._unused:
                continue
            for group, tensor, named in self._reads(fact):
                # What is made outside of a loop is moved before the loop starts.
                trips = self._trips.get(self._flow.loops_around(tensor), fact.trips)
                add(tensor, group, self._phases[fact.index], trips, named)
        for loop in self._running_loops():
            for variable in self._flow.parts[loop.operation].variables:
                maker = self._flow.owner(variable.output).operation
                group, phase = self._group_of[id(maker)], self._phases[self._index_of[id(maker)]]
                add(variable.start, group, phase, loop.trips)
                add(variable.next, group, phase, self._trips_in(loop))
        updates = self._edges_of_updates(found)
        return (*found.values(), *updates)

    def _edge(self, source: int, target: int, tensor: mtf.Tensor, phase: str, trips: int, **others: Any) -> Edge:
        return Edge(**{
            "source": source, "target": target, "tensor": tensor.name, "phase": phase, "trips": trips,
            "shape": tuple(tensor.shape.to_integer_list), "itemsize": tensor.dtype.size,
            "source_dims": self._operand(source, tensor).dims, "target_dims": self._operand(target, tensor).dims,
            "held": self._lifetimes.of_copy(tensor, target), **others})

    def _edges_of_updates(self, moved: dict[tuple[int, int, tuple[str, ...]], Edge]) -> list[Edge]:
        """Weights to the layers that compute their new values, where these are sums with the old ones; and back. Those
        that the update reads besides (a decay, say) are in `moved`: they are moved once, and there for both."""
        found = []
        for fact in self._facts:
            for variable, _ in fact.assigns:
                updating = self._updated_in.get(id(variable))
                if updating is None:
                    continue
                owner = self._group_of[id(variable)]
                old, new = (self._edge(*ends, variable.outputs[0], self._phases[fact.index], fact.trips,
                                       itemsize=variable.slice_dtype.size)
                            for ends in ((owner, updating), (updating, owner)))
                old = dataclasses.replace(old, held=self._lifetimes.of_old(variable))
                key = id(variable.outputs[0]), updating, old.target_dims
                if (fact.flops and key in moved and moved[key].trips == fact.trips
                        and variable.activation_dtype == variable.slice_dtype):
                    moved[key] = dataclasses.replace(moved[key], held=old.held)
                elif fact.flops:
                    found.append(old)
                found.append(dataclasses.replace(new, tensor=f"{variable.name} updated",
                                                 held=self._lifetimes.of_update(variable)))
        return found

    def _reads(self, fact: OperationFacts) -> list[tuple[int, mtf.Tensor, mtf.Tensor]]:
        """(layer that reads it, tensor, whose names count there): the layer is the operation's, of an assignment that
        which makes the new value. The value may name its dims otherwise than the variable, whose places they take.

        What goes round in a loop is read by nobody before it is used.
        """
        if fact.operation in self._flow.parts:
            return []
        if fact.assigns:
            return [(self._assigning(variable), value, variable.outputs[0]) for variable, value in fact.assigns
                    if id(variable) in self._group_of]
        group = self._group_of[id(fact.operation)]
        return [(group, tensor, tensor) for tensor in fact.reads]
