"""What the cost of a layer depends on: its operations, without names.

Layers that are alike have equal signatures, and are priced once. Everything is read off the operations' facts (kind,
role, dims, shapes): what Mesh-TF calls them is not known here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from pase_mtf.cost.moves import Move, move_of
from pase_mtf.cost.rows import RowSum, row_sum_of
from pase_mtf.cost.tables import dim_positions, positions_of
from pase_mtf.graph.all_reduces import ITEMSIZE, at_once
from pase_mtf.graph.computation_graph import ADDED, TOP_K, Layer, LayerOperation, Operand
from pase_mtf.graph.layer_operation import DRAWN, REPEAT, SUM

__all__ = ["FILTER_GRADIENT", "MULTIPLYING", "PRODUCTS", "OperationSignature", "TensorBytes", "counted",
           "layer_signature", "layer_signatures", "nameless", "waiting_bytes"]

PRODUCTS = ("matmul", "batched matmul")
"""Kinds of operation that are matrix products."""
FILTER_GRADIENT = "filter gradient"
"""The kind of the gradient of a convolution's filter, where it has a rate of its own: its kernels start slowly."""

MULTIPLYING = (*PRODUCTS, "convolution", FILTER_GRADIENT)
"""Kinds of operation that multiply matrices, as convolutions do, too."""

TensorBytes = tuple[tuple[int, ...], float]
"""A tensor: the columns of the dims that may be split, and its unsplit bytes."""

PartialSums = tuple[tuple[int, ...], tuple[TensorBytes, ...]]
"""What an all-reduce sums: the columns of the dims whose split leaves partial sums, and outputs of an operation."""


class OperationSignature(NamedTuple):
    """What the cost of an operation depends on.

    Attributes:
      phase, flops, nodes, traffic: of `LayerOperation`.
      kind: of `LayerOperation`, with "batched matmul" and `FILTER_GRADIENT` told apart.
      dims: columns of the dims whose split divides the work.
      inputs, outputs: its tensors.
      sums: (columns of the dims whose split leaves partial sums, outputs of which) for every all-reduce.
      gradients: for every entry of `sums`, whether it is of gradients of weights: only the update waits for them, and
        they for each other. What an update adds up to them is one, too.
      pending: for every entry of `sums`, whether its sums go over an edge as they are.
      added: for every entry of `sums`, whether its sums are added to partial sums of another layer.
      row_sum: of an operation whose one entry of `sums` is of rows that were looked up, that sum; where it is added
        into another first, that one.
      again: how often stock Mesh-TensorFlow makes its `sums` besides.
      gathered: its `sums` are no sums: devices get what the others have found, and choose among it.
      transposed: of a matrix product, the tensors whose dims have to be brought into another order.
      move: what it moves between devices where its two ends are sharded differently.
      weights: for every input, how many variables of the layer look like it; 0 where it is none of them. Empty for
        updates.
      narrow: it multiplies numbers of two bytes.
      wide: it multiplies numbers of eight bytes.
      trips: of `LayerOperation`; the same operation run as often as another layer repeats it costs the same.
      after_loop: its `sums` are of what a loop has added up: they are made when all of the loop has ended.
      passed_on: a device that has as many elements of its output as of its input takes them as they are.
      itemsize: bytes per element of its `sums`.
      itemsizes: of its inputs.
      turned: of what does nothing but bring the dims of a tensor into another order, of each dim in that order: its
        column, its size, and its place before.
      drawn: it draws random numbers.
    """

    phase: str
    kind: str
    flops: float
    dims: tuple[int, ...]
    inputs: tuple[TensorBytes, ...]
    outputs: tuple[TensorBytes, ...]
    sums: tuple[PartialSums, ...]
    transposed: tuple[TensorBytes, ...]
    move: Move | None = None
    weights: tuple[int, ...] = ()
    nodes: int = 1
    traffic: float = 1.0
    narrow: bool = False
    wide: bool = False
    trips: int = 1
    gradients: tuple[bool, ...] = ()
    pending: tuple[bool, ...] = ()
    row_sum: RowSum | None = None
    gathered: bool = False
    added: tuple[bool, ...] = ()
    again: int = 0
    after_loop: bool = False
    passed_on: bool = False
    itemsize: int = ITEMSIZE
    itemsizes: tuple[int, ...] = ()
    turned: tuple[tuple[int, int, int], ...] = ()
    drawn: bool = False

    def sums_within(self, *, on_edges: bool, added_on_edges: bool) -> tuple[tuple[PartialSums, bool], ...]:
        """Those of `sums` that the layer pays for as such, and whether they are of gradients of weights.

        Args:
          on_edges: edges pay for what stays pending, and moves for what is summed on the way.
          added_on_edges: edges pay at least for what is added to partial sums of another layer.
        """
        each = zip(self.sums, self.gradients, self.pending, self.added, strict=True)
        on_the_way = self.move is not None and bool(self.move.summed)
        return tuple((entry, gradient) for entry, gradient, pending, added in each
                     if not (on_edges and (pending or on_the_way)) and not (added_on_edges and added))


@functools.lru_cache(maxsize=4096)
def layer_signature(layer: Layer) -> tuple[OperationSignature, ...]:
    """What the cost of a layer depends on: equal for layers that differ in names only."""
    position = dim_positions(layer)
    variables = collections.Counter((variable.operand.dims, variable.operand.shape)
                                    for variable in layer.variables if variable.trainable)
    # What a loop adds up is two entries of one index: the addition of every iteration, and the sum after the loop.
    entries = collections.Counter(operation.index for operation in layer.operations)
    # Rows of a table's gradient are kept, those of all microbatches, and added up once: nothing is added before that.
    rows = {operation.outputs[0]: row_sum for operation in layer.operations
            if operation.looked_up and operation.reduced and not any(operation.sums_pending)
            and variables[operation.outputs[0].dims, operation.outputs[0].shape] == 1
            and (row_sum := row_sum_of(operation, position)) is not None}
    found = []
    for operation in layer.operations:
        move = move_of(operation, position)
        if operation.kind != "none" or operation.sums or move:
            after_loop = operation.kind == "none" and bool(operation.sums) and entries[operation.index] > 1
            entry = _operation_signature(operation, move, variables, position, after_loop=after_loop)
            if operation.index == ADDED and operation.outputs[0] in rows:
                entry = entry._replace(row_sum=rows[operation.outputs[0]]._replace(is_last=False))
            found.append(entry)
    return tuple(found)


# Of `LayerOperation`, all but its place in the graph and in the backward pass, and what it is called.
_content = operator.attrgetter(*(field.name for field in dataclasses.fields(LayerOperation)
                                 if field.name not in ("index", "name", "type", "held")))


def nameless(layer: Layer) -> Hashable:
    """Equal for layers that differ at most in their names, those of their operations and variables, and the moments in
    which they hold what is computed again: whatever they cost, or hold in memory all the time, is the same."""
    return (tuple(layer.dims.items()), layer.splittable, tuple(sorted(layer.aliases.items())),
            tuple((variable.operand, variable.trainable, bool(variable.updated_by)) for variable in layer.variables),
            tuple(map(_content, layer.operations)))


def layer_signatures(layers: Iterable[Layer]) -> list[tuple[OperationSignature, ...]]:
    """`layer_signature` of every layer; found once for those that differ in names only."""
    known: dict[Hashable, tuple[OperationSignature, ...]] = {}
    found = []
    for layer in layers:
        key = nameless(layer)
        signature = known.get(key)
        if signature is None:
            signature = known[key] = layer_signature(layer)
        found.append(signature)
    return found


def counted(signature: Iterable[OperationSignature]) -> collections.Counter[OperationSignature]:
    """The distinct operations of a layer as run once, and how often a step runs each."""
    found: collections.Counter[OperationSignature] = collections.Counter()
    for entry in signature:
        found[entry if entry.trips == 1 else entry._replace(trips=1)] += entry.trips
    return found


def _operation_signature(operation: LayerOperation, move: Move | None,
                         variables: collections.Counter[tuple[tuple[str, ...], tuple[int, ...]]],
                         position: dict[str, int], *, after_loop: bool) -> OperationSignature:

    def tensor(operand: Operand) -> TensorBytes:
        columns = sorted(column for column in positions_of(operand.dims, position) if column >= 0)
        return tuple(columns), math.prod(operand.shape) * operand.itemsize

    kind = "none" if operation.repeats else operation.kind
    transposed: list[Operand] = []
    if kind == "matmul" and len(operation.inputs) == 2 and operation.nodes == 1:  # else it is a function of slices
        batched, transposed = _product_order(operation)
        kind = "batched matmul" if batched else kind
    elif operation.role == "filter gradient" and kind != "none":
        kind = FILTER_GRADIENT
    weights = tuple(variables[operand.dims, operand.shape] for operand in operation.inputs)
    return OperationSignature(
        phase=operation.phase, kind=kind, flops=operation.flops, dims=positions_of(operation.dims, position),
        inputs=tuple(tensor(operand) for operand in operation.inputs),
        outputs=tuple(tensor(operand) for operand in operation.outputs),
        sums=tuple((positions_of(dims, position), tuple(tensor(operand) for operand in outputs))
                   for dims, outputs in operation.sums),
        transposed=tuple(tensor(operand) for operand in transposed), move=move,
        weights=weights if operation.phase != "update" else (), nodes=operation.nodes,
        traffic=operation.traffic, trips=operation.trips,
        gradients=tuple(_adds_gradients(operation) and all(variables[one.dims, one.shape] for one in summed)
                        for _, summed in operation.sums),
        pending=operation.sums_pending, added=operation.sums_added, row_sum=row_sum_of(operation, position),
        gathered=operation.role == TOP_K, again=operation.summed_again, after_loop=after_loop,
        passed_on=_may_be_passed_on(operation), turned=_turned(operation, position),
        drawn=operation.role == DRAWN,
        narrow=kind in MULTIPLYING and all(operand.itemsize == 2 for operand in operation.inputs),
        wide=kind in MULTIPLYING and all(operand.itemsize == 8 for operand in operation.inputs),
        itemsize=next((operand.itemsize for _, summed in operation.sums for operand in summed), ITEMSIZE),
        itemsizes=tuple(operand.itemsize for operand in operation.inputs))


def _may_be_passed_on(operation: LayerOperation) -> bool:
    """Whether it is a sum, of which TensorFlow passes on a single element, or repeats a tensor along dims behind its
    first, where once is a view of it (`lowering.mesh`)."""
    if len(operation.inputs) != 1 or len(operation.outputs) != 1:
        return False
    given, made = (list(zip(end.dims, end.shape, strict=True)) for end in (*operation.inputs, *operation.outputs))
    if operation.role == SUM:  # what is left in another order is brought into it, what nobody gave is repeated
        given, made = made, given
    left = iter(made)
    in_order = all(dim in left for dim in given)
    return in_order and (operation.role == SUM or (operation.role == REPEAT and given[:1] == made[:1]))


def _turned(operation: LayerOperation, position: dict[str, int]) -> tuple[tuple[int, int, int], ...]:
    """`OperationSignature.turned`; empty of all else: one node that makes what it reads in another order."""
    if operation.kind != "pointwise" or operation.nodes != 1 or (
            len(operation.inputs) != 1 or len(operation.outputs) != 1):
        return ()
    given, made = (list(zip(end.dims, end.shape, strict=True)) for end in (*operation.inputs, *operation.outputs))
    if given == made or sorted(given) != sorted(made) or len(set(given)) < len(given):
        return ()
    return tuple((position.get(name, -1), size, given.index((name, size))) for name, size in made)


def _adds_gradients(operation: LayerOperation) -> bool:
    """Whether what it leaves to be summed may be the gradient of a weight: what an update sums besides, such as the
    means of Adafactor, it reads at once, and what is to be broadcast is summed at once."""
    return (operation.phase == "backward" and not operation.broadcast_after) or (
        operation.phase == "update" and operation.kind == "pointwise")


def waiting_bytes(layers: Iterable[Layer]) -> float:
    """Unsplit bytes of the gradients of a program that may be summed together: of those no larger than a bucket."""
    sizes = ((nbytes, entry.itemsize) for signature in layer_signatures(layers) for entry in signature
             for (_, outputs), gradient in zip(entry.sums, entry.gradients, strict=True) if gradient
             for _, nbytes in outputs)
    return sum(nbytes for nbytes, itemsize in sizes if at_once(nbytes / itemsize) == 1.0)


def _product_order(operation: LayerOperation) -> tuple[bool, list[Operand]]:
    """Whether an einsum is many matrix products, and which of its tensors have to be transposed for (or after) it.

    A matrix product takes its operands as [batch, free, contracted] or [batch, contracted, free] dims, and makes
    [batch, free of the first, free of the second].
    """
    # A dim without a name is known by its size.
    first, second, output = ([name or str(size) for name, size in zip(operand.dims, operand.shape, strict=True)]
                             for operand in (*operation.inputs, operation.outputs[0]))
    lead = next((name for name in output if (name in first) != (name in second)), None)
    operands = [(first, operation.inputs[0]), (second, operation.inputs[1])]
    if lead in second:
        operands.reverse()
    (first, _), (second, _) = operands
    batch = [name for name in first if name in second and name in output]
    contracted = [name for name in first if name in second and name not in output]
    transposed, made = [], list(batch)
    for names, operand in operands:
        free = [name for name in names if name not in batch and name not in contracted]
        made += free
        if names not in ([*batch, *free, *contracted], [*batch, *contracted, *free]):
            transposed.append(operand)
    if output != made:
        transposed.append(operation.outputs[0])
    return bool(batch), transposed
