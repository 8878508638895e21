"""The computation graph: layers with named dims, the operations they cover, and the tensors between them.

A pure data type (no TensorFlow): `export` makes it, `cost` prices it, `lowering` finds the operations of a layer in it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pase_mtf.errors import FormatError, shortened
from pase_mtf.files import check_schema, read_json, write_atomically
from pase_mtf.garbage import uncollected
from pase_mtf.graph.fields import EdgeFields, GraphFields, LayerFields, OperandFields
from pase_mtf.graph.layer_operation import DRAWN, PHASES, ROLES, TOP_K, LayerOperation, Operand
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.graph.plain import from_plain, keys_of, once, to_plain, unhashed_keys
from pase_mtf.graph.spans import Held, HeldCopy, read_spans

__all__ = ["ADDED", "ROLES", "TOP_K", "ComputationGraph", "Edge", "Layer", "LayerOperation", "Operand", "Variable"]

FORMAT = "pase_mtf.graph"
VERSION = 3
ADDED = -1
"""`LayerOperation.index` of what stands in no program: what adds a microbatch's gradient to those before."""
_MOST_MOMENTS = 10 ** 7
_ENDS = {"rename": ((1, 1), (1, 1)), "shift": ((1, 1), (1, 1)), DRAWN: ((0, math.inf), (1, 1)),
         TOP_K: ((1, math.inf), (1, math.inf)),
         **dict.fromkeys(("filter gradient", "image gradient", "transposed convolution"),
                         ((2, math.inf), (1, math.inf)))}
"""Role -> how many tensors an operation of it reads, and how many it makes: least and most."""
_MOST_TIMES = 2 ** 53
"""What a float tells apart: nothing happens more often in a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A variable a layer owns: a weight, or an optimizer slot (not trainable).

    Attributes:
      name: of the variable.
      operand: as the layer sees it.
      trainable: whether it is a weight.
      updated_by: the name of the layer that computes its new value, where that is another than its own. Files leave
        it out where it is empty.
    """

    name: str
    operand: Operand
    trainable: bool
    updated_by: str = dataclasses.field(default="", metadata={"optional": True})


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A vertex of the graph: one configuration holds for everything in it.

    Attributes:
      name: unique in the graph; the name of the operation that anchors the layer.
      kind: "matmul", "convolution", "pool", "normalize" (reductions and what follows them: softmax, layer norm),
        "gather", "pointwise", "loop", "update" (what computes the new values of another layer's weights), "other".
      dims: dim name -> size, in the order of the iteration space, outermost first. Where one name appears with several
        sizes, the gcd of the sizes.
      splittable: the dims that may be split: every operation of the layer supports it.
      operations: what the layer covers, in graph order. A grouped Assign stands in every layer whose variables it sets.
      variables: the weights and optimizer slots it owns.
      aliases: other dim names that are laid out like one of `dims` (name -> dim): a rename gives one dim two names.
    """

    name: str
    kind: str
    dims: dict[str, int]
    splittable: tuple[str, ...]
    operations: tuple[LayerOperation, ...]
    variables: tuple[Variable, ...]
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.kind, tuple(self.dims.items()), self.splittable))


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one layer makes and another uses.

    Attributes:
      source, target: indices of the layers. A gradient runs from the consumer of a tensor back to its maker.
      tensor: the tensor's name, for people.
      phase: "forward", "backward" or "update".
      shape, itemsize: its unsplit size, bytes per element.
      source_dims, target_dims: for every dim of the tensor, its name in the source and in the target layer ("" where
        that side never splits it). They differ where a rename stands between the two.
      trips: how often a step moves it: what goes from layer to layer in a loop moves in every iteration, what is read
        from outside of the loop once. Files leave it out where it is 1.
      pending: the dims of the source layer whose split makes it partial sums, which nobody but the target needs: they
        are summed on the way. No part of the graph's hash.
      added_to: the dims of the target layer whose split makes partial sums of what the target adds such a tensor to.
        Where both are parts over the same devices, these are added as they are, and summed with what they are added to;
        else what is summed is added to one of those parts. No part of the graph's hash.
      held: when a copy of it is there, where the target holds other parts than the source. No part of the graph's hash.
      looked_up: what the partial sums consist of, where they are of rows that were looked up. No part of the graph's
        hash.
    """

    source: int
    target: int
    tensor: str
    phase: str
    shape: tuple[int, ...]
    itemsize: int
    source_dims: tuple[str, ...]
    target_dims: tuple[str, ...]
    trips: int = dataclasses.field(default=1, metadata={"optional": True})
    pending: tuple[str, ...] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})
    added_to: tuple[str, ...] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})
    held: tuple[HeldCopy, ...] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})
    looked_up: LookedUp | tuple[()] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})


@dataclasses.dataclass(frozen=True)
class ComputationGraph:
    """Layers and the tensors between them.

    Attributes:
      name: of the model, for people.
      layers: in the order of the operations that anchor them.
      edges: every (tensor, target layer, target_dims) once.
      operations: number of operations of the Mesh-TF graph that was exported, those in its loops counted.
      meta: what the exporter wants to pass on (optimizer, batch, preset, ...); not part of the hash. "assumed": what
        predictions rest on that is not known of the graph, a sentence each.
    """

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    operations: int
    meta: dict[str, object] = dataclasses.field(default_factory=dict, compare=False)

    def waits(self, edge: Edge) -> bool:
        """Whether an edge takes partial sums to an update: gradients, which wait for each other."""
        return bool(edge.pending) and self.layers[edge.target].kind == "update"

    @functools.cached_property
    def hash(self) -> str:
        """16 hex digits that agree for graphs with the same layers, operations and edges."""
        return _hash(to_plain(self, Operand))

    @property
    def assumed(self) -> tuple[str, ...]:
        """What predictions rest on that is not known of the graph, a sentence each (`meta`)."""
        return tuple(cast(Sequence[str], self.meta.get("assumed", ())))

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        total = 0
        for layer in self.layers:
            for variable in layer.variables:
                if variable.trainable:
                    size = 1
                    for extent in variable.operand.shape:
                        size *= extent
                    total += size
        return total

    @property
    def flops(self) -> float:
        """Floating point operations of one step on one device."""
        return sum(operation.flops * operation.trips for layer in self.layers for operation in layer.operations)

    @uncollected()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph as JSON, whole or not at all (UsageError: the file cannot be written)."""
        plain = to_plain(self, Operand)
        vars(self).setdefault("hash", _hash(plain))  # where the property keeps it: to ask that would convert all anew
        data = {"format": FORMAT, "version": VERSION, "hash": self.hash, **plain}
        write_atomically(path, json.dumps(data))

    @classmethod
    @uncollected()
    def load(cls, path: str | os.PathLike[str]) -> ComputationGraph:
        """Reads a graph that `save` wrote.

        Raises:
          FormatError: the file is missing, truncated, something else, or was written by an earlier version.
        """
        data = read_json(path, FORMAT, VERSION)
        if data["version"] < VERSION:
            raise FormatError(f"{path}: {FORMAT} version {data['version']}, written by an earlier version of this "
                              "program; export the graph again")
        check_schema(path, data, GraphFields)
        # Of what was read, not of what is made of it: half the time of a large graph.
        if _hash(data) != data["hash"]:
            raise FormatError(
                f"{path}: contents do not match their hash; the file was changed, export the graph again")
        known: dict[object, object] = {}
        try:
            graph = cls(
                name=data["name"], layers=tuple(_layer(entry, known) for entry in data["layers"]),
                edges=tuple(_edge(entry, known) for entry in data["edges"]),
                operations=data["operations"], meta=data["meta"])
        except ValueError as error:
            raise FormatError(f"{path}: not a graph ({error}); export the graph again") from error
        problem = _problem(graph)
        if problem:
            raise FormatError(f"{path}: not a graph ({problem}); export the graph again")
        return graph

    def to_dot(self) -> str:
        """The graph in Graphviz's language: a box per layer with its dims, an arrow per edge with its shape."""
        lines = [f'digraph "{_escaped(self.name)}" {{', "  node [shape=box, fontname=Helvetica];"]
        for number, layer in enumerate(self.layers):
            dims = ", ".join(f"{name}={size}" for name, size in layer.dims.items())
            lines.append(f'  n{number} [label="{_escaped(layer.name)}\\n{layer.kind}\\n{_escaped(dims)}"];')
        for edge in self.edges:
            if edge.phase == "forward":
                shape = ",".join(map(str, edge.shape))
                lines.append(f'  n{edge.source} -> n{edge.target} [label="{shape}"];')
        return "\n".join([*lines, "}", ""])


def _escaped(text: str) -> str:
    """As it stands between quotes in Graphviz's language."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _problem(graph: ComputationGraph) -> str:
    """What is wrong with the numbers of a graph that was read; empty where nothing is."""
    names = [layer.name for layer in graph.layers]
    if len(set(names)) != len(names):
        return "two layers of one name"
    assumed = graph.meta.get("assumed", [])  # which the hash does not cover
    if not (isinstance(assumed, list) and all(isinstance(sentence, str) for sentence in assumed)):
        return f"it rests on {shortened(assumed)}, which are no sentences"
    operands: dict[Operand, None] = {}
    for layer in graph.layers:
        if min(layer.dims.values(), default=0) < 0:
            return f"layer {shortened(layer.name)} has dims {shortened(layer.dims)}"
        if not set(layer.splittable) <= set(layer.dims) or not set(layer.aliases.values()) <= set(layer.dims):
            return f"layer {shortened(layer.name)} splits dims that it does not have"
        for variable in layer.variables:
            operands[variable.operand] = None
            if variable.updated_by and variable.updated_by not in names:
                return f"variable {shortened(variable.name)} is updated by layer {shortened(variable.updated_by)}"
        for operation in layer.operations:
            operands.update(dict.fromkeys((*operation.inputs, *operation.outputs)))
            problem = _problem_of_operation(operation)
            if problem:
                return problem
    for edge in graph.edges:
        if not (0 <= edge.source < len(names) and 0 <= edge.target < len(names)):
            return f"an edge from layer {shortened(edge.source)} to {shortened(edge.target)} of {len(names)}"
        if edge.phase not in PHASES:
            return f"tensor {shortened(edge.tensor)} moves in phase {shortened(edge.phase)}"
        if not 0 <= edge.trips <= _MOST_TIMES:
            return f"tensor {shortened(edge.tensor)} moves {shortened(edge.trips)} times"
        if not set(edge.pending) <= set(graph.layers[edge.source].splittable):
            return f"tensor {shortened(edge.tensor)} is summed over {shortened(edge.pending)}, which are not split"
        if len({*edge.pending, *edge.source_dims}) < len(edge.pending) + len(set(edge.source_dims)):
            return f"tensor {shortened(edge.tensor)} of dims {shortened(edge.source_dims)} is summed over one of them"
        if edge.added_to and not (edge.pending and set(edge.added_to) <= set(graph.layers[edge.target].splittable)
                                  and len({*edge.added_to, *edge.target_dims})
                                  == len(edge.added_to) + len(set(edge.target_dims))):
            return f"tensor {shortened(edge.tensor)} is added to partial sums over {shortened(edge.added_to)}"
        if edge.looked_up and not (edge.pending and _is_looked_up(edge.looked_up, edge.shape)):
            return f"tensor {shortened(edge.tensor)} consists of rows {shortened(tuple(edge.looked_up))}"
        operands.update(dict.fromkeys(Operand(dims, edge.shape, edge.itemsize)
                                      for dims in (edge.source_dims, edge.target_dims)))
    for operand in operands:
        if len(operand.dims) != len(operand.shape) or not _is_size((*operand.shape, operand.itemsize)):
            return f"a tensor of dims {shortened(operand.dims)} and shape {shortened(operand.shape)}"
        split = list(filter(None, operand.dims))
        if len(set(split)) < len(split):
            return f"a tensor of dims {shortened(operand.dims)}, one of them twice"
    left = Counter((number, operation.partial_sums[output] if operation.partial_sums else operation.reduced,
                    output in operation.added_outputs)
                   for number, layer in enumerate(graph.layers) for operation in layer.operations
                   for output in operation.pending_outputs)
    taken = Counter((edge.source, edge.pending, bool(edge.added_to)) for edge in graph.edges if edge.pending)
    for key in (left - taken) + (taken - left):
        return (f"layer {shortened(names[key[0]])} leaves {left[key]} sums pending over {shortened(key[1])}, "
                f"and edges take {taken[key]}{' to be added' if key[2] else ''}")
    return ""


def _problem_of_operation(operation: LayerOperation) -> str:
    name = f"operation {shortened(operation.name)}"
    if not 0 <= operation.trips <= _MOST_TIMES:
        return f"{name} runs {shortened(operation.trips)} times"
    if operation.nodes > _MOST_TIMES:
        return f"{name} becomes {shortened(operation.nodes)} nodes"
    if min(operation.flops, operation.nodes, operation.traffic, operation.broadcast_runs,
           operation.summed_again + 1) < 0:
        return f"{name} has less than no work"
    if operation.phase not in PHASES:
        return f"{name} is of phase {shortened(operation.phase)}"
    inputs, outputs = _ENDS.get(operation.role, ((0, math.inf), (0, math.inf)))
    if not (inputs[0] <= len(operation.inputs) <= inputs[1] and outputs[0] <= len(operation.outputs) <= outputs[1]):
        return f"{name} is a {operation.role} of {len(operation.inputs)} tensors to {len(operation.outputs)}"
    if operation.index == ADDED and len(operation.outputs) != 1:
        return f"{name} adds up {len(operation.outputs)} tensors"
    if operation.kind == "gather" and not operation.traffic and not operation.inputs:
        return f"{name} cuts rows out of nothing"
    if operation.kind == "matmul" and not operation.outputs:
        return f"{name} is a product that makes nothing"
    if operation.shift and not (tuple(map(type, operation.shift)) == (str, int)
                                and abs(operation.shift[1]) <= _MOST_TIMES):
        return f"{name} shifts by {shortened(operation.shift)}"
    if operation.partial_sums and len(operation.partial_sums) != len(operation.outputs):
        return f"{name} has {len(operation.outputs)} outputs and sums of {len(operation.partial_sums)}"
    for held in operation.held:
        if not (-len(operation.inputs) <= held.output < len(operation.outputs) and held.times >= 0
                and 0 <= held.begin < _MOST_MOMENTS
                and max(held[2], *held[4:]) < _MOST_MOMENTS):
            return f"{name} holds {shortened(tuple(held))}"
    if not set(operation.added_outputs) <= set(operation.pending_outputs) <= set(range(len(operation.outputs))):
        return (f"{name} leaves sums of outputs {shortened(operation.pending_outputs)} of {len(operation.outputs)} "
                f"pending, and {shortened(operation.added_outputs)} of these are added")
    if not all(set(operation.broadcast_after) <= set(range(len(output.shape))) for output in operation.outputs):
        return f"{name} broadcasts along dims {shortened(operation.broadcast_after)}, which its outputs do not have"
    if operation.looked_up and not (not operation.partial_sums and len(operation.outputs) == 1
                                    and _is_looked_up(operation.looked_up, operation.outputs[0].shape)):
        return f"{name} sums rows {shortened(tuple(operation.looked_up))}"
    return ""


def _is_looked_up(found: LookedUp, shape: Sequence[int]) -> bool:
    return 0 <= found.dim < len(shape) and shape[found.dim] > 0 and _is_size((found.indices, found.itemsize))


def _is_size(extents: Sequence[int]) -> bool:
    """Whether they can be the extents of a tensor: none is negative, and their product can be a number of bytes."""
    return min(extents) >= 0 and math.prod(extents) < 2 ** 63


def _hash(data: Mapping[str, Any]) -> str:
    """Of what `to_plain` makes of a graph, or `save` wrote; without the fields that say `hashed=False`."""
    def hashed(entries: list[dict[str, object]], unhashed: frozenset[str]) -> list[dict[str, object]]:
        return [{name: value for name, value in entry.items() if name not in unhashed} for entry in entries]

    layers = [{**layer, "operations": hashed(layer["operations"], unhashed_keys(LayerOperation))}
              for layer in data["layers"]]
    counts = {"layers": layers, "edges": hashed(data["edges"], unhashed_keys(Edge)), "operations": data["operations"]}
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()[:16]


def _looked_up(data: Mapping[str, Any]) -> LookedUp | tuple[()]:
    found = data.get("looked_up", ())
    if len(found) not in (0, len(LookedUp._fields)):
        raise ValueError(f"looked up: {found}")
    return LookedUp(*found) if found else ()


def _edge(data: EdgeFields, known: dict[object, object]) -> Edge:
    held = read_spans(HeldCopy, data.get("held", ()))
    for span in held:
        if span.begin < 0 or max(span) >= _MOST_MOMENTS:
            raise ValueError(f"held: {shortened(tuple(span))}")
    return from_plain(Edge, {**data, "held": held, "looked_up": _looked_up(data)}, known)


def _operand(data: OperandFields, known: dict[object, object]) -> Operand:
    found = from_plain(Operand, data, known)
    return cast(Operand, known.setdefault(found, found))


def _operation(data: Mapping[str, Any], known: dict[object, object]) -> LayerOperation:
    if data["role"] not in ROLES:  # which the hash does not cover
        raise ValueError(f"unknown role {data['role']!r}")
    name_of = {key: name for name, key in keys_of(LayerOperation).items()}
    return LayerOperation(**{
        **{name_of[key]: value for key, value in data.items()},
        **{name: once(data[name], known) for name in ("dims", "reduced", "shift")},
        "partial_sums": tuple(once(dims, known) for dims in data["partial_sums"]),
        "pending_outputs": tuple(data.get("handed_on", ())), "added_outputs": tuple(data.get("added_on", ())),
        "looked_up": _looked_up(data), "broadcast_after": tuple(data.get("broadcast_after", ())),
        "held": tuple(read_spans(Held, data.get("held", ()))),
        "inputs": tuple(_operand(item, known) for item in data["inputs"]),
        "outputs": tuple(_operand(item, known) for item in data["outputs"])})


def _layer(data: LayerFields, known: dict[object, object]) -> Layer:
    operations = tuple(_operation(entry, known) for entry in data["operations"])
    variables = tuple(
        Variable(entry["name"], _operand(entry["operand"], known), entry["trainable"], entry.get("updated_by", ""))
        for entry in data["variables"])
    return Layer(data["name"], data["kind"], dict(data["dims"]), tuple(data["splittable"]), operations, variables,
                 dict(data["aliases"]))
