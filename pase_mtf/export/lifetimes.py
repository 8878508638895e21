"""From when to when a device holds each tensor of a step: what memory predictions rest on.

TensorFlow runs an operation as soon as its last input is there: what waits for nothing (one-hots of labels, the
gradient of a mean) at the very start, an update as soon as its gradient is known, what `mtf.recompute_grad` makes once
more when the gradient that it waits for is there. Of several that are ready, any may be next: two orders are looked at,
first come, first served, and that of the program, and the one in which more is held counts. A tensor is there until its
last reader is done, by when the operation after that may have begun: a device runs what is ready, not one by one. What
is moved is copied as soon as it is made, of a variable at the start. The moments of a step are numbered from 0, as
many as make a difference.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.export.moments import Found, Interval, moments
from pase_mtf.export.orders import awaited_by, ordered, runs_at_once
from pase_mtf.export.phases import BACKWARD, UPDATE
from pase_mtf.graph.computation_graph import Held, HeldCopy
from pase_mtf.operations.einsum import product_of
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.flow import Flow
from pase_mtf.operations.tracing import early_bytes

__all__ = ["Lifetimes", "lifetimes"]


class Lifetimes:
    """From which moment to which tensors are there, in several orders: the moments of one follow those of another."""

    def __init__(self, orders: Sequence[Found]) -> None:
        """Numbers the moments.

        Args:
          orders: of the operations, and when tensors are there in each.
        """
        self._held: dict[mtf.Operation, list[Held]] = collections.defaultdict(list)
        self._orders, self._moment_of, first = orders, list[list[int]](), 0
        tensors = {interval.tensor for order in orders for interval in order.intervals}
        tensors |= {tensor for order in orders for tensor in order.layers}
        nbytes = {tensor: float(_bytes(tensor)) for tensor in tensors}
        for order in orders:
            moment_of = [first + moment for moment in moments(order, nbytes)]
            self._moment_of.append(moment_of)
            first = moment_of[-1] + 1
            for interval in order.intervals:
                operation = interval.tensor.operation
                outputs = operation.outputs
                waits = moment_of[interval.waits_until] if interval.waits_until >= 0 else -1
                self._held[operation].append(Held(
                    outputs.index(interval.tensor) if len(outputs) > 1 else 0, moment_of[interval.begin],
                    moment_of[interval.end], interval.times, waits,
                    *(moment_of[place] if place >= 0 else -1
                      for place in (interval.shared_until, interval.own_until))))

    def of_outputs(self, operation: mtf.Operation) -> tuple[Held, ...]:
        """When what the operation makes is there."""
        return (*self._held.get(operation, ()), *self._of_product(operation))

    def _of_product(self, operation: mtf.Operation) -> tuple[Held, ...]:
        """When a product is there of which the operation makes a sum."""
        number = product_of(operation)
        if number < 0:
            return ()
        begins = {held.begin for held in self._held.get(operation, ())}
        return tuple(Held(-1 - number, begin, begin) for begin in sorted(begins))

    def of_copy(self, tensor: mtf.Tensor, layer: int) -> tuple[HeldCopy, ...]:
        """From when to when a copy of a tensor is there, in the layout of a layer that reads it, in every order."""
        return self._spans([order.reads.get((tensor, layer)) for order in self._orders])

    def of_update(self, variable: mtf.Operation) -> tuple[HeldCopy, ...]:
        """From when to when the new value of a variable is there that another layer made, in every order."""
        places = [order.updated.get(variable) for order in self._orders]
        return self._spans([None if place is None else (place, max(place, order.last_gradient))
                            for place, order in zip(places, self._orders, strict=True)])

    def of_old(self, variable: mtf.Operation) -> tuple[HeldCopy, ...]:
        """From when to when the value that another layer makes the new one of is there, in every order: it is copied at
        the start."""
        return self._spans([None if variable not in order.updated else (
            0, max(order.updated[variable], order.last_gradient)) for order in self._orders])

    def _spans(self, places: Sequence[tuple[int, ...] | None]) -> tuple[HeldCopy, ...]:
        return tuple(HeldCopy(*(moment_of[place] if place >= 0 else -1 for place in span))
                     for moment_of, span in zip(self._moment_of, places, strict=True) if span is not None)


def lifetimes(facts: Sequence[OperationFacts], phases: Sequence[str], flow: Flow,
              layers: dict[int, int]) -> Lifetimes:
    """When tensors are there.

    Args:
      facts: of all operations of a graph.
      phases: of all operations.
      flow: of the graph.
      layers: id of an operation -> the number of its layer.
    """
    maker = {tensor: fact for fact in facts for tensor in fact.operation.outputs}
    # Gradients that no assignment needs never run.
    running = [fact for fact in facts if fact.is_needed or phases[fact.index] not in (BACKWARD, UPDATE)]
    awaited = {fact.index: awaited_by(fact, maker, flow) for fact in running}
    orders = [ordered(running, awaited, at_once) for at_once in (None, runs_at_once(running, awaited, phases))]
    steps = _Steps(orders[0], phases, flow, layers, maker)
    return Lifetimes([_Lives([steps.of[fact.index] for fact in order], steps, flow).found() for order in orders])


class _Read(NamedTuple):
    """A tensor that an operation reads.

    Attributes:
      source: what it lies in, if it shows another.
      names: it, and what an operation has made of which it is a later name.
      layer: that reads it.
      leaves: the loops around the reader in which the source is not made: it is there until they have ended.
      waits: whether it is a gradient, of which devices may hold the sum that is to be made until there are all.
    """

    source: mtf.Tensor
    names: frozenset[mtf.Tensor]
    layer: int
    leaves: tuple[mtf.Operation, ...]
    waits: bool


class _Step(NamedTuple):
    """What is the same of an operation in every order.

    Attributes:
      fact: of it.
      is_backward, is_update: whether it makes gradients, or updates of variables.
      reads: what it reads.
      assigned: variable -> what its new value lies in.
      makes: those of its outputs that take memory.
      early: the operations whose outputs it needs for what it makes before gradients come, and how many of its first
        output that takes; None where there is none.
      over: what its output may be written over where nobody reads that any more, in this order.
      over_shared: the same, of what other layers make as well.
    """

    fact: OperationFacts
    is_backward: bool
    is_update: bool
    reads: tuple[_Read, ...]
    assigned: dict[mtf.Operation, mtf.Tensor]
    makes: tuple[mtf.Tensor, ...]
    early: tuple[tuple[mtf.Operation, ...], float] | None
    over: tuple[mtf.Tensor, ...]
    over_shared: tuple[_Read, ...]


class _Steps:
    """What is the same of all operations in every order.

    Attributes:
      of: index of an operation -> the step.
    """

    def __init__(self, order: Sequence[OperationFacts], phases: Sequence[str], flow: Flow, layers: dict[int, int],
                 maker: dict[mtf.Tensor, OperationFacts]) -> None:
        """Reads all operations.

        Args:
          order: those that run, in an order in which they can.
          phases, flow, layers: of `lifetimes`.
          maker: tensor -> the operation that makes it.
        """
        self._phases, self._flow, self._layers, self._maker = phases, flow, layers, maker
        self._traced: dict[Hashable, int] = {}
        self._views: dict[mtf.Tensor, mtf.Tensor] = {}
        self._made: set[mtf.Tensor] = set()
        self.of = {fact.index: self._step(fact) for fact in order}
        self._shown = set(self._views.values())

    def lies_in(self, tensor: mtf.Tensor) -> mtf.Tensor:
        """The tensor that it shows; itself where it shows none."""
        return self._views.get(tensor, tensor)

    def layer_of(self, tensor: mtf.Tensor) -> int:
        """The number of the layer that makes it; -1 where none does."""
        return self._layers.get(id(tensor.operation), -1)

    def is_of_variable(self, tensor: mtf.Tensor) -> bool:
        """Whether it is what a variable holds."""
        return tensor in self._maker and self._maker[tensor].rule.is_variable

    def is_shown(self, tensor: mtf.Tensor) -> bool:
        """Whether another tensor shows it, or may do so: what loops hand on."""
        return tensor in self._shown or bool(self._maker[tensor].loops)

    def _is_gradient(self, tensor: mtf.Tensor) -> bool:
        return tensor in self._maker and self._phases[self._maker[tensor].index] == BACKWARD

    def _step(self, fact: OperationFacts) -> _Step:
        outputs = tuple(fact.operation.outputs)
        reads, makes = self._reads(fact), self._makes(fact, outputs)
        assigned = {variable: self.lies_in(self._flow.origin(value)) for variable, value in fact.assigns}
        over: tuple[mtf.Tensor, ...] = ()
        over_shared: tuple[_Read, ...] = ()
        if makes and fact.kind == "pointwise" and not fact.assigns:
            over = tuple([read.source for read in reads if self._can_take_over(read.source, outputs[0])])
            over_shared = tuple([read for read in reads if self._is_like(read.source, outputs[0])])
        early = self._early(fact, outputs[0]) if makes and self._phases[fact.index] == BACKWARD else None
        self._made.update(makes)
        phase = self._phases[fact.index]
        return _Step(fact, phase == BACKWARD, phase == UPDATE, reads, assigned, makes, early, over,
                     over_shared)

    def _reads(self, fact: OperationFacts) -> tuple[_Read, ...]:
        if fact.operation in self._flow.parts:
            return ()
        updated = {id(value): variable for variable, value in fact.assigns}
        updates, found = self._phases[fact.index] == UPDATE, []
        for origin, tensor in zip(fact.sources, fact.reads, strict=True):
            source = self.lies_in(origin)
            # What is made outside of a loop is there until the loop has ended.
            around = self._maker[source].loops if source in self._maker else ()
            found.append(_Read(
                source, frozenset((origin, tensor)),
                self._layers.get(id(updated.get(id(tensor), fact.operation)), -1),
                tuple([loop for loop in fact.loops if loop not in around]) if fact.loops else (),
                updates and source in self._made and self._is_gradient(source)))
        return tuple(found)

    def _makes(self, fact: OperationFacts, outputs: tuple[mtf.Tensor, ...]) -> tuple[mtf.Tensor, ...]:
        operation = fact.operation
        if fact.rule.is_variable:  # read as it lies, or converted to another type
            return tuple([tensor for tensor in outputs if tensor.dtype.size != operation.slice_dtype.size])
        if fact.rule.is_constant or operation in self._flow.parts or (
                not fact.reads and fact.rule.leader(operation) is not operation):
            return ()
        if fact.kind == "none" and fact.sources:
            for number, tensor in enumerate(outputs):
                self._views[tensor] = self.lies_in(fact.sources[min(number, len(fact.sources) - 1)])
            return ()
        return outputs

    def _early(self, fact: OperationFacts, first: mtf.Tensor) -> tuple[tuple[mtf.Operation, ...], float] | None:
        """What a gradient makes of the forward pass's tensors, before gradients come, is there until they do."""
        late = [self._is_gradient(source) for source in fact.sources]
        nbytes = early_bytes(fact.operation, late, self._traced) if any(late) and not all(late) else 0
        if not nbytes:
            return None
        return (tuple([source.operation for source, is_late in zip(fact.sources, late, strict=True) if not is_late]),
                nbytes / (first.size * first.dtype.size))

    def _can_take_over(self, source: mtf.Tensor, output: mtf.Tensor) -> bool:
        """Whether the one may lie where the other does; so may then what lies there in its place."""
        return (self._is_like(source, output)
                and self._layers.get(id(source.operation)) == self._layers.get(id(output.operation))
                and self._maker[source].rule.imported(source.operation) is None)

    def _is_like(self, source: mtf.Tensor, output: mtf.Tensor) -> bool:
        return source in self._made and source.dtype == output.dtype and source.shape == output.shape


class _Lives:
    """When tensors are there, in one order of the operations."""

    def __init__(self, order: Sequence[_Step], steps: _Steps, flow: Flow) -> None:
        self._order, self._steps, self._flow = order, steps, flow
        self._place = {step.fact.operation: place for place, step in enumerate(order)}
        self._loop_begins, self._loop_ends = self._spans_of_loops()
        self._begin: dict[mtf.Tensor, int] = {}
        self._end: dict[mtf.Tensor, int] = {}
        self._reads: dict[tuple[mtf.Tensor, int], tuple[int, int]] = {}
        self._updated: dict[mtf.Operation, int] = {}
        self._waiting: set[mtf.Tensor] = set()
        self._of_waiting: set[mtf.Tensor] = set()
        self._more: list[Interval] = []

    def found(self) -> Found:
        """All of it."""
        for place, step in enumerate(self._order):
            self._read(step, place)
            for tensor in step.makes:
                self._begin[tensor] = self._end[tensor] = place
            if step.early:
                self._made_early(step.makes[0], *step.early, place)
        last_gradient = max((place for place, step in enumerate(self._order) if step.is_backward), default=-1)
        taken, copies_taken = self._shared_taken_over()
        lies_in = self._merge_taken_over()
        self._overlap(last_gradient)
        settled = len(self._order)

        def until(output: mtf.Tensor | None) -> int:
            return -1 if output is None else self._end.get(lies_in.get(output, output), -1)

        def waits_until(tensor: mtf.Tensor) -> int:
            if tensor in self._waiting:
                return max(last_gradient, self._end[tensor])
            return settled if tensor in self._of_waiting else -1

        own = self._own_until(lies_in)
        intervals = [Interval(tensor, begin, self._end[tensor], 1.0, waits_until(tensor), until(taken.get(tensor)),
                              own.get(tensor, -1))
                     for tensor, begin in self._begin.items()]
        reads = {(tensor, layer): (self._copied_from(tensor, first), last, until(copies_taken.get((tensor, layer))),
                                   self._begin.get(lies_in.get(tensor, tensor), -1))
                 for (tensor, layer), (first, last) in self._reads.items()}
        return Found([*intervals, *self._more, *self._of_loops()], reads, self._updated, settled + 1,
                      {tensor: self._steps.layer_of(tensor) for tensor, _ in self._reads}, last_gradient)

    def _overlap(self, last_gradient: int) -> None:
        """Lets all last until the next operation has begun; a gradient, until others have made as many bytes, for its
        update runs beside these; and what updates make, until the backward pass is over, for an update waits for its
        gradient, which may wait for other devices that long."""
        after = [min(place + 1, len(self._order) - 1) for place in range(len(self._order))]
        updating = {tensor for step in self._order if step.is_update for tensor in step.makes}
        made = [0, *itertools.accumulate(sum(_bytes(tensor) for tensor in step.makes) for step in self._order)]
        for tensor, begin in self._begin.items():
            if tensor in updating:
                self._end[tensor] = max(self._end[tensor], last_gradient)
            elif tensor in self._waiting:
                end = self._end[tensor]
                beside = bisect.bisect_left(made, made[end + 1] + _bytes(tensor), end + 1)
                self._end[tensor] = min(max(end, beside - 1), max(end, last_gradient))
            if begin <= self._end[tensor]:
                self._end[tensor] = after[self._end[tensor]]
        self._reads = {key: (begin, after[end]) for key, (begin, end) in self._reads.items()}

    def _spans_of_loops(self) -> tuple[dict[mtf.Operation, int], dict[mtf.Operation, int]]:
        """Loop -> the places at which the first of its operations begins and the last is done."""
        begins: dict[mtf.Operation, int] = {}
        ends: dict[mtf.Operation, int] = {}
        for place, step in enumerate(self._order):
            fact = step.fact
            if fact.loops or fact.operation in self._flow.parts:
                for loop in (*fact.loops, fact.operation):
                    begins.setdefault(loop, place)
                    ends[loop] = place
        return begins, ends

    def _read(self, step: _Step, place: int) -> None:
        begin, end, reads = self._begin, self._end, self._reads
        for variable, source in step.assigned.items():
            self._updated[variable] = begin.get(source, place)
        for source, names, layer, leaves, waits in step.reads:
            done = place
            if step.is_update and (waits or source in self._of_waiting):
                self._of_waiting.update(step.makes)
            if step.assigned:
                # A grouped assignment changes every variable as soon as its value is known.
                done = begin.get(source, place)
            elif leaves:
                done = max(place, *[self._loop_ends[loop] for loop in leaves])
            if waits:
                self._waiting.add(source)
            if source in end and end[source] < done:
                end[source] = done
            for name in names:
                first, last = reads.get((name, layer), (place, place))
                copied = 0 if self._steps.is_of_variable(name) else place
                reads[name, layer] = min(first, copied), max(last, place, done)

    def _made_early(self, first: mtf.Tensor, awaited: Sequence[mtf.Operation], times: float, place: int) -> None:
        begin = max(self._place.get(operation, 0) for operation in awaited)
        self._more.append(Interval(first, min(begin, place), place, times))

    def _copied_from(self, tensor: mtf.Tensor, first: int) -> int:
        """The place from which a copy is there of what is first read at a place: it is made as soon as the tensor is,
        but of a gradient, when that has been summed."""
        return first if tensor in self._waiting else min(first, self._place.get(tensor.operation, first))

    def _own_until(self, lies_in: dict[mtf.Tensor, mtf.Tensor]) -> dict[mtf.Tensor, int]:
        """Tensor -> the last place at which its own layer needs it, of those of which all is known: what others read
        otherwise than it lies they have as copies."""
        waiting = self._waiting | self._of_waiting
        last = {tensor: begin for tensor, begin in self._begin.items()
                if tensor not in waiting and not self._steps.is_shown(tensor)}
        for output, source in lies_in.items():
            if source in last:
                last[source] = max(last[source], self._place[output.operation] + 1)
        for (tensor, layer), (_, end) in self._reads.items():
            root = lies_in.get(tensor, tensor)
            if root in last and layer in (self._steps.layer_of(root), -1):
                last[root] = max(last[root], end)
        return {tensor: min(end, self._end[tensor]) for tensor, end in last.items()}

    def _shared_taken_over(self) -> tuple[dict[mtf.Tensor, mtf.Tensor], dict[tuple[mtf.Tensor, int], mtf.Tensor]]:
        """Where one device makes a sum, or a copy, for several, the last of them writes its output there, and the
        others, the one that made it among them, have theirs besides.

        Returns:
          Tensor -> the output of its last reader, where that may lie in its place; and the same of (tensor, layer).
        """
        taken: dict[mtf.Tensor, mtf.Tensor] = {}
        copies: dict[tuple[mtf.Tensor, int], mtf.Tensor] = {}
        for place, step in enumerate(self._order):
            for read in step.over_shared:
                if self._end.get(read.source) == place:
                    taken[read.source] = step.makes[0]
                for name in read.names:
                    if self._reads[name, read.layer][1] == place:
                        copies[name, read.layer] = step.makes[0]
        return taken, copies

    def _merge_taken_over(self) -> dict[mtf.Tensor, mtf.Tensor]:
        """An elementwise operation writes its output where an input lies of which it is the last reader: then that is
        there for as long as the output, which takes nothing.

        Returns:
          Output -> the tensor in whose place it lies.
        """
        lies_in: dict[mtf.Tensor, mtf.Tensor] = {}
        for place, step in enumerate(self._order):
            for source in step.over:
                output, source = step.makes[0], lies_in.get(source, source)
                if self._begin.get(source, place) < place and self._end[source] == place:
                    lies_in[output] = source
                    self._end[source] = self._end.pop(output)
                    del self._begin[output]
                    self._waiting |= {source} if output in self._waiting else set()
                    break
        return lies_in

    def _of_loops(self) -> list[Interval]:
        """What loops hold besides: what goes round, of the iteration before as well; what they add up so far."""
        found = []
        for loop, parts in self._flow.parts.items():
            if loop not in self._loop_ends or loop not in self._place:
                continue
            begin, end = self._loop_begins[loop], self._loop_ends[loop]
            handed_on = [variable.next for variable in parts.variables]
            for tensor in [*handed_on, *(inner for inner, _ in parts.accumulators)]:
                origin = self._steps.lies_in(self._flow.origin(tensor))
                if origin in self._begin:
                    found.append(Interval(origin, begin, end, waits_until=end if origin in self._waiting else -1))
        return found


def _bytes(tensor: mtf.Tensor) -> int:
    return int(tensor.size) * int(tensor.dtype.size)
