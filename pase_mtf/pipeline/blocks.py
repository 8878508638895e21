"""Where the layers of a graph can be cut into stages, and the blocks of consecutive layers that stages are made of."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence

from pase_mtf.graph.computation_graph import ADDED, ComputationGraph, Edge, Layer, LayerOperation, Variable
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.graph.partition import Partition
from pase_mtf.graph.spans import Held

__all__ = ["BLOCKS", "Blocks", "added_up", "find_blocks", "of_microbatch", "part_of_graph", "summed_within", "transfer"]

BLOCKS = 16
"""Most blocks that a graph is made into."""

_UNEVEN = 1.5
"""How many times the work of even blocks, or of the least that so many need to hold, a block may have."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Consecutive layers of a graph, block by block.

    Attributes:
      graph: no sum is left to an edge between two blocks.
      starts: the first layer of every block, and behind the last the number of layers.
    """

    graph: ComputationGraph
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    def of_layer(self, layer: int) -> int:
        """The block of a layer."""
        return bisect.bisect_right(self.starts, layer) - 1

    def linked(self) -> frozenset[int]:
        """The blocks that need something of the block before, and send that gradients."""
        ways = {(edge.phase, self.of_layer(edge.source), self.of_layer(edge.target)) for edge in self.graph.edges}
        return frozenset(block for block in range(1, self.count)
                         if {("forward", block - 1, block), ("backward", block, block - 1)} <= ways)


def of_microbatch(graph: ComputationGraph, microbatches: int) -> ComputationGraph:
    """A graph as one of so many microbatches runs it: gradients are added up over the microbatches; what sums of rows
    add up to consists of the rows of all, which travel once where they are less than parts.

    Args:
      graph: of a microbatch.
      microbatches: K.
    """
    if microbatches == 1:
        return graph
    layers = tuple(dataclasses.replace(layer, operations=(
        *(dataclasses.replace(operation, looked_up=_of_all(operation.looked_up, microbatches))
          if operation.looked_up else operation for operation in layer.operations),
        *(added_up(variable, microbatches - 1) for variable in layer.variables if variable.trainable)))
        for layer in graph.layers)
    edges = tuple(dataclasses.replace(edge, looked_up=_of_all(edge.looked_up, microbatches))
                  if edge.looked_up else edge for edge in graph.edges)
    return dataclasses.replace(graph, layers=layers, edges=edges)


def _of_all(looked_up: LookedUp, microbatches: int) -> LookedUp:
    return looked_up._replace(indices=microbatches * looked_up.indices)


def added_up(variable: Variable, times: int, held: tuple[Held, ...] = ()) -> LayerOperation:
    """What adds a microbatch's gradient of a weight to those before: no operation of the program that was exported.

    Args:
      variable: the weight.
      times: how often in a step, which is where it counts: with the update.
      held: when the sum is there.
    """
    operand = variable.operand
    return LayerOperation(
        index=ADDED, name=f"{variable.name} gradients added up", type="added up", phase="update", kind="pointwise",
        flops=float(math.prod(operand.shape)), dims=tuple(dict.fromkeys(filter(None, operand.dims))),
        inputs=(operand, operand), outputs=(operand,), trips=times, held=held)


def find_blocks(graph: ComputationGraph, work: Sequence[float], most: int = BLOCKS) -> Blocks:
    """Makes a graph into blocks of about equal work, at cuts that the fewest bytes cross.

    A cut is possible where every tensor of the forward pass crosses it upwards and every gradient downwards, and no
    layer is parted from the one that updates its weights.

    Args:
      graph: of one microbatch.
      work: per layer, in any unit.
      most: blocks.
    """
    cuts = _possible_cuts(graph)
    crossing = _bytes_across(graph)
    ends = [0, *cuts, len(graph.layers)]
    upto = [0.0, *itertools.accumulate(work)]
    allowed = _UNEVEN * upto[-1] / most
    while _fewest([upto[end] for end in ends], allowed) > most:
        allowed *= _UNEVEN
    # least[b][e]: bytes over the cuts of what stands before ends[e] in b blocks.
    least: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * (len(ends) - 1)]
    for _ in range(min(most, len(ends) - 1)):
        row = [(math.inf, 0)]
        for end in range(1, len(ends)):
            cut = 0.0 if end == len(ends) - 1 else crossing[ends[end]]
            row.append(min(((least[-1][begin][0] + cut, begin) for begin in range(end)
                            if upto[ends[end]] - upto[ends[begin]] <= allowed * (1.0 + 1e-9)),
                           default=(math.inf, 0)))
        least.append(row)
    # As many blocks as there may be: what a stage needs fewer of, it joins.
    count = max(number for number, row in enumerate(least) if number and row[-1][0] < math.inf)
    starts, place = [len(graph.layers)], len(ends) - 1
    for number in range(count, 0, -1):
        place = least[number][place][1]
        starts.append(ends[place])
    return summed_within(graph, tuple(reversed(starts)))


def _fewest(upto: Sequence[float], allowed: float) -> float:
    """How many blocks of no more than this work there must be, inf where a piece has more; given the work before every
    cut."""
    count, begin = 1, 0
    for number in range(1, len(upto)):
        if upto[number] - upto[begin] > allowed:
            count, begin = count + 1, number - 1
        if upto[number] - upto[number - 1] > allowed:
            return math.inf
    return count


def _possible_cuts(graph: ComputationGraph) -> list[int]:
    """The layers before which the graph can be cut: not before a layer that updates the weights of the one before."""
    closed: set[int] = set()
    updating = {number for number, layer in enumerate(graph.layers) if layer.kind == "update"}
    for edge in graph.edges:
        low, high = sorted((edge.source, edge.target))
        upwards, beside = edge.source == low, high in updating
        if low != high and (beside if edge.phase == "update" else upwards != (edge.phase == "forward")):
            closed.update(range(low + 1, high + 1))
    return [layer for layer in range(1, len(graph.layers)) if layer not in closed]


def transfer(edge: Edge, needed: Partition | None = None) -> Hashable:
    """What edges to layers of one other stage have in common that one transfer serves: the lowering moves a tensor once
    to wherever it is needed in the same parts.

    Args:
      edge: from one stage to another.
      needed: in which parts, on which devices; None where that is not known: at least once.
    """
    return edge.source, edge.tensor, needed


def _bytes_across(graph: ComputationGraph) -> list[float]:
    """Bytes that cross a cut before every layer."""
    changes = [0.0] * (len(graph.layers) + 1)
    reaching: dict[Hashable, tuple[int, int, int]] = {}  # transfer -> the first and the last layer, bytes
    for edge in graph.edges:
        low, high, nbytes = reaching.get(transfer(edge), (edge.source, edge.source, 0))
        reaching[transfer(edge)] = (min(low, edge.target), max(high, edge.target),
                                    max(nbytes, edge.trips * math.prod(edge.shape) * edge.itemsize))
    for low, high, nbytes in reaching.values():
        changes[low + 1] += nbytes
        changes[high + 1 if high < len(graph.layers) else high] -= nbytes
    return list(itertools.accumulate(changes))


def summed_within(graph: ComputationGraph, starts: tuple[int, ...]) -> Blocks:
    """The blocks that begin at these layers, of the graph whose partial sums are summed before they leave a block."""
    blocks = Blocks(graph, starts)
    crossing = {(edge.source, edge.pending) for edge in graph.edges
                if edge.pending and blocks.of_layer(edge.source) != blocks.of_layer(edge.target)}
    if not crossing:
        return blocks
    edges = tuple(dataclasses.replace(edge, pending=(), added_to=())
                  if (edge.source, edge.pending) in crossing else edge for edge in graph.edges)
    layers = [_keeping(layer, {dims for source, dims in crossing if source == number})
              for number, layer in enumerate(graph.layers)]
    return Blocks(dataclasses.replace(graph, layers=tuple(layers), edges=edges), starts)


def _keeping(layer: Layer, kept: set[tuple[str, ...]]) -> Layer:
    """A layer that leaves no sums over these dims pending."""
    if not kept:
        return layer
    operations = []
    for operation in layer.operations:
        pending, added = (tuple(
            output for output in outputs
            if (operation.partial_sums[output] if operation.partial_sums else operation.reduced) not in kept)
            for outputs in (operation.pending_outputs, operation.added_outputs))
        operations.append(dataclasses.replace(operation, pending_outputs=pending, added_outputs=added))
    return dataclasses.replace(layer, operations=tuple(operations))


def part_of_graph(graph: ComputationGraph, first: int, stop: int) -> ComputationGraph:
    """The layers from `first` to before `stop`, and the edges between them."""
    edges = tuple(dataclasses.replace(edge, source=edge.source - first, target=edge.target - first)
                  for edge in graph.edges if _within(edge, first, stop))
    return dataclasses.replace(graph, layers=graph.layers[first:stop], edges=edges)


def _within(edge: Edge, first: int, stop: int) -> bool:
    return first <= edge.source < stop and first <= edge.target < stop
