"""What the devices of a stage hold in a step of a pipeline: the stage as a graph, for `cost.memory.MemoryModel`.

A graph of one microbatch says when its tensors are there while it runs by itself. A stage runs K of them, and holds
most while it computes one of three:

- The last, with the update, and no other in flight. Gradients of those before have been added up.
- The first, when as many are in flight as ever, and what its backward pass makes is kept, to be added to.
- The second, as one of those in the middle: no update, all gradients added up so far, others in flight.

They stand one after the other, as the moments of a step whose peak is the largest of all. Of a microbatch in flight a
stage holds what is there when its forward pass is over. Partial sums of gradients are added up as they are: devices sum
them once, in the last. What is fed is there for all microbatches from the start.

What comes from another stage is a copy on the devices that need it, of those in flight and, in 1F1B, of one that was
sent ahead. Where devices share a host a tensor that is needed as it lies stays where it was made, until the other stage
has read it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pase_mtf.cost.memory import MemoryModel
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation
from pase_mtf.graph.spans import Held, HeldCopy
from pase_mtf.pipeline.blocks import added_up, part_of_graph

__all__ = ["StageMemory"]

_NEVER = HeldCopy(10 ** 9, -1)
"""Stands for no copy: those of one tensor are told by their place among those of an edge."""


class _Order(NamedTuple):
    """An order of the operations of a microbatch.

    Attributes:
      first, last: its moments.
      forward, gradients: those at which the forward pass, and the backward pass, are over.
    """

    first: int
    last: int
    forward: int
    gradients: int


class _Run(NamedTuple):
    """A microbatch while a stage computes it.

    Attributes:
      offset: what is added to its moments.
      others: microbatches that are in flight besides.
      fed: those that are not done with what was fed to them.
      added: whether there are gradients of those before.
      last: whether the update follows.
    """

    offset: int
    others: int
    fed: int
    added: bool
    last: bool


class StageMemory:
    """The stages of one graph, as memory models."""

    def __init__(self, graph: ComputationGraph, microbatches: int, *, shared: bool, unfolding_threads: int = 0) -> None:
        """Looks at the graph.

        Args:
          graph: of one microbatch.
          microbatches: K.
          shared: whether the devices are processors of one host.
          unfolding_threads: of the machine.
        """
        self._graph, self._count, self._shared = graph, microbatches, shared
        self._threads = unfolding_threads
        held = [entry for layer in graph.layers for operation in layer.operations for entry in operation.held]
        self._moments = 1 + max([0, *(max(*entry[1:3], *entry[4:]) for entry in held),
                                 *(max(copy[:3]) for edge in graph.edges for copy in edge.held)])
        self._orders = _orders(graph, self._moments)
        self._made = sorted({held.begin for layer in graph.layers for _, held in _gradients(layer)})
        self.model = functools.cache(self._model)
        self._of_layer = functools.cache(lambda number, runs: self._layer(graph.layers[number], runs))

    def _model(self, first: int, stop: int, flying: int) -> MemoryModel:
        """What the devices of a stage hold, under configurations of its layers.

        Args:
          first, stop: its layers, the last excluded.
          flying: of how many microbatches it keeps the activations.
        """
        if self._count == 1:
            runs = [_Run(0, 0, 0, False, last=True)]
        else:
            count, moments = self._count, self._moments
            runs = [_Run(0, 0, 0, True, last=True),
                    _Run(moments, flying - 1, count - 1, False, last=False)]
            if count > 2:
                runs.append(_Run(2 * moments, min(flying, count - 1) - 1, count - 2, True, last=False))
        layers = tuple(self._of_layer(number, tuple(runs)) for number in range(first, stop))
        edges = [dataclasses.replace(edge, held=tuple(self._copies(edge, runs)))
                 for edge in part_of_graph(self._graph, first, stop).edges]
        edges += self._crossing(first, stop, runs, ahead=int(flying < self._count))
        return MemoryModel(dataclasses.replace(self._graph, layers=layers, edges=tuple(edges)), self._shared,
                           self._threads)

    def _order(self, begin: int) -> _Order:
        return next(order for order in self._orders if begin <= order.last)

    def _layer(self, layer: Layer, runs: Sequence[_Run]) -> Layer:
        operations: list[LayerOperation] = []
        variables = {variable.name for variable in layer.variables}
        for operation in layer.operations:
            if operation.held:
                operations += self._operation(operation, runs, converts=operation.name in variables)
        if self._count > 1:
            operations += self._added(layer, runs)
        return dataclasses.replace(layer, operations=tuple(operations))

    def _operation(self, operation: LayerOperation, runs: Sequence[_Run], *,
                   converts: bool) -> Iterator[LayerOperation]:
        """What an operation makes: as in a step by itself; gradients that nobody sums; and of others in flight. A
        variable is converted to another type once, for all microbatches."""
        alone, gradients, kept = list[Held](), list[Held](), list[Held]()
        for run in runs:
            for held in operation.held:
                moved = _moved(held, run.offset)
                if operation.phase == "update":  # after the backward pass it is one update after the other
                    late = held.begin > self._order(held.begin).gradients
                    alone += [moved._replace(waits_until=-1) if late else moved] if run.last else []
                elif converts:
                    order = self._order(held.begin)
                    alone.append(moved if run.last else moved._replace(
                        begin=run.offset + order.first, end=run.offset + order.last, own_until=-1))
                elif held.waits_until >= 0 and not run.last:
                    gradients.append(moved._replace(waits_until=-1, shared_until=-1))
                else:
                    alone.append(moved)
                    kept += self._kept(held, run, fed=operation.kind == "none" and not operation.inputs)
        rows = operation.looked_up  # those of all microbatches travel once, as they are priced
        yield dataclasses.replace(operation, held=tuple(alone), looked_up=rows and rows._replace(
            indices=self._count * rows.indices))
        whole = dataclasses.replace(operation, reduced=(), partial_sums=(), pending_outputs=(), added_outputs=())
        if gradients:
            yield dataclasses.replace(whole, phase="update", held=tuple(gradients))
        if kept:
            role = operation.role if operation.role == "rename" else ""  # it is there, no kernel runs
            yield dataclasses.replace(whole, role=role, held=tuple(kept))

    def _kept(self, held: Held, run: _Run, *, fed: bool) -> list[Held]:
        """What the others in flight hold of it."""
        order = self._order(held.begin)
        if held.end > order.last:  # in all orders: a constant, of which a stage has one
            return []
        if held.waits_until >= 0 or not (fed or held.begin <= order.forward <= held.end):
            return []
        first, last = run.offset + order.first, run.offset + order.last
        own = -1 if held.own_until < 0 or fed else last if held.own_until >= order.forward else first - 1
        return [Held(held.output, first, last, held.times, own_until=own)] * (run.fed if fed else run.others)

    def _added(self, layer: Layer, runs: Sequence[_Run]) -> Iterator[LayerOperation]:
        """The gradients of weights, added up over microbatches."""
        for variable in filter(lambda variable: variable.trainable, layer.variables):
            size, found = math.prod(variable.operand.shape), []
            mine = [held for nbytes, held in _gradients(layer) if nbytes == size] or [
                held for _, held in _gradients(layer)]
            for run in runs:
                for order in self._orders:
                    spans = [(held.begin, held.end) for held in mine if self._order(held.begin) == order]
                    begin, end = order.first, order.last
                    if spans and run.last:  # it is added to while the next is made
                        made = max(begin for begin, _ in spans)
                        end = next((other for other in self._made if made < other <= order.last), order.last)
                    elif spans and not run.added:
                        begin = min(done for _, done in spans) + 1
                    found.append(Held(0, run.offset + begin, run.offset + end))
            yield added_up(variable, 1, tuple(found))

    def _copies(self, edge: Edge, runs: list[_Run], *, always: bool = False, ahead: int = 0) -> Iterator[HeldCopy]:
        """When copies of a tensor are there: always: of all in flight; ahead: of so many more."""
        for run in runs:
            for copy in edge.held:
                yield _NEVER if edge.phase == "update" and not run.last else HeldCopy(*(
                    moment + run.offset if moment >= 0 else moment for moment in copy))
                order = self._order(copy.begin)
                first, last = run.offset + order.first, run.offset + order.last
                is_kept = edge.phase != "update" and (always or copy.begin <= order.forward <= copy.end)
                kept = HeldCopy(first, last, made=first if copy.made >= 0 else -1) if is_kept else _NEVER
                yield from [kept] * run.others
                yield from [HeldCopy(first, last)] * (0 if run.last else ahead)

    def _crossing(self, first: int, stop: int, runs: list[_Run], ahead: int) -> Iterator[Edge]:
        """What comes from other stages, of which the devices hold nothing without a copy; and, where devices share a
        host, what others read where it lies."""
        readers = collections.defaultdict[tuple[int, str], list[Edge]](list)
        for edge in self._graph.edges:
            source, target = first <= edge.source < stop, first <= edge.target < stop
            if target and not source:
                readers[edge.source, edge.tensor].append(edge)
            elif source and not target and self._shared:
                here = edge.source - first
                yield dataclasses.replace(edge, source=here, target=here, target_dims=edge.source_dims, pending=(),
                                          held=tuple(self._copies(edge, runs)))
        for edges in readers.values():
            here = min(edge.target for edge in edges) - first
            for edge in edges:
                sent = [copy._replace(made=-1) for copy in edge.held]
                edge = dataclasses.replace(edge, source=here, target=edge.target - first, source_dims=(), pending=(),
                                           held=tuple(sent))
                yield dataclasses.replace(edge, held=tuple(self._copies(
                    edge, runs, always=True, ahead=ahead * (edge.phase == "forward"))))


def _gradients(layer: Layer) -> Iterator[tuple[int, Held]]:
    """(elements, when it is there) of the gradients of a layer's weights."""
    return ((math.prod(operation.outputs[held.output].shape), held) for operation in layer.operations
            if operation.phase != "update" for held in operation.held if held.waits_until >= 0 and held.output >= 0)


def _moved(held: Held, offset: int) -> Held:
    begin, end, *others = (moment + offset if moment >= 0 else moment for moment in (*held[1:3], *held[4:]))
    return Held(held.output, begin, end, held.times, *others)


def _orders(graph: ComputationGraph, moments: int) -> tuple[_Order, ...]:
    """The orders of the operations that the moments of a graph are of: in each the forward pass is made first, and what
    is fed at the earliest."""
    operations = sorted((operation for layer in graph.layers for operation in layer.operations if operation.held),
                        key=lambda operation: operation.index)
    waits = sorted({held.waits_until for operation in operations for held in operation.held
                    if operation.phase == "backward" and held.waits_until >= 0})
    backward = min((operation.index for operation in operations if operation.phase == "backward"), default=0)
    forward = [operation for operation in operations if operation.index < backward]
    begins = sorted({held.begin for operation in forward for held in operation.held if held.output >= 0})
    # The forward pass of the second begins behind the gradients of the first.
    split = next((later for later in begins if waits and later > waits[0]), moments)
    found = []
    for first, end in ((0, split), (split, moments)):
        if first < end:
            over = max((begin for begin in begins if first <= begin < end), default=end - 1)
            found.append(_Order(first, end - 1, over, min((wait for wait in waits if first <= wait < end),
                                                          default=end - 1)))
    return tuple(found)
