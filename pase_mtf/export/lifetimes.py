"""From when to when a device holds each tensor of a step: what memory predictions rest on.

TensorFlow runs an operation as soon as its last input is there: what waits for nothing (one-hots of labels, the
gradient of a mean) at the very start, an update as soon as its gradient is known, what `mtf.recompute_grad` makes once
more when the gradient that it waits for is there. Of several that are ready, any may be next: two orders are looked at,
first come, first served, with the gradients of biases last, and that of the program; the one in which more is held
counts. A tensor is there until its last reader is done, by when the operation after that may have begun: a device runs
what is ready, not one by one. What is moved is copied as soon as it is made, of a variable at the start. The moments of
a step are numbered from 0, as many as make a difference.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import numpy as np

from pase_mtf.compat import mtf
from pase_mtf.export.lives import Found, lives
from pase_mtf.export.moments import moments
from pase_mtf.export.orders import awaited_by, in_turns, late_sums, ordered, runs_at_once
from pase_mtf.export.phases import BACKWARD, UPDATE
from pase_mtf.export.steps import Steps
from pase_mtf.graph.spans import Held, HeldCopy
from pase_mtf.operations.einsum import largest_besides, product_of
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.flow import Flow
from pase_mtf.operations.registry import rule_of

__all__ = ["Lifetimes", "lifetimes"]


class Lifetimes:
    """From which moment to which tensors are there, in several orders: the moments of one follow those of another."""

    def __init__(self, steps: Steps, orders: Sequence[Found]) -> None:
        """Numbers the moments.

        Args:
          steps: of the graph.
          orders: when tensors are there in each order of the operations.
        """
        self._steps, self._orders, self._last, first = steps, orders, 0, 0
        self._held: dict[int, list[Held]] = collections.defaultdict(list)
        self._moment_of: list[np.ndarray] = []
        self._first_read: dict[tuple[int, int], mtf.Tensor] = {}
        self._in_place: set[tuple[int, int]] = set()
        for order in orders:
            # No place, -1, is no moment.
            moment_of = np.append(first + moments(order, steps), -1)
            self._moment_of.append(moment_of)
            first = int(moment_of[-2]) + 1
            self._last = first - 1
            held = order.intervals
            columns = (moment_of[held.begin], moment_of[held.end], held.times, moment_of[held.waits_until],
                       moment_of[held.shared_until], moment_of[held.own_until], moment_of[held.shared_from])
            self._in_place.update((step, int(moment_of[place])) for step, place in order.in_place.items())
            for tensor, *row in zip(held.tensor.tolist(), *(column.tolist() for column in columns), strict=True):
                self._held[steps.tensors.step[tensor]].append(Held(steps.tensors.output[tensor], *row))
        # What a gradient takes of what a function of slices makes besides is there from then on until the gradient is.
        makers = ((early, steps.tensors.maker[early.tensor]) for early in steps.early)
        self._kept = {maker.rule.differentiates(maker.operation): early.times * steps.tensors.nbytes[early.tensor]
                      for early, maker in makers if maker is not None}
        copies = zip(steps.copies.name.tolist(), steps.copies.layer.tolist(), strict=True)
        self._spans = dict(zip(copies, zip(*(
            itertools.starmap(HeldCopy, zip(*(moment_of[places].tolist() for places in order.copies), strict=True))
            for order, moment_of in zip(orders, self._moment_of, strict=True)), strict=True), strict=True))
        self._read_as = collections.defaultdict[int, list[tuple[HeldCopy, ...]]](list)  # tensor -> of every reader
        for (name, _), spans in self._spans.items():
            self._read_as[name].append(spans)

    def of_outputs(self, operation: mtf.Operation, inner: float = 0.0) -> tuple[Held, ...]:
        """When what the operation makes is there.

        Args:
          operation: of the graph.
          inner: of a function of slices, unsplit bytes of the largest tensor that it makes besides (`Nodes.besides`).
        """
        step = self._steps.tensors.step_of.get(operation, -1)
        if step >= 0 and rule_of(operation).is_constant:  # made with the session, which keeps it
            return tuple(Held(number, 0, self._last) for number in range(len(operation.outputs)))
        held, number = self._held.get(step, ()), product_of(operation)
        # What it makes besides: the product of which it makes a sum, or, of another shape, the largest of several.
        begins = sorted({entry.begin for entry in held})
        if number >= 0:
            products = (Held(-1 - number, begin, begin) for begin in begins if (step, begin) not in self._in_place)
            return (*held, *products)
        besides = float(largest_besides(operation) * operation.outputs[0].dtype.size) if operation.outputs else 0.0
        tensors = [(-1 - number, tensor) for number, tensor in enumerate(operation.inputs)]
        if inner > self._kept.get(operation, 0.0):
            besides, tensors = inner, [*tensors, *enumerate(operation.outputs)]
        if not besides:
            return tuple(held)
        # Told by the largest tensor: who splits that splits what is made of it, or it of.
        number, tensor = max(tensors, key=lambda entry: entry[1].size * entry[1].dtype.size)
        times = besides / max(tensor.size * tensor.dtype.size, 1)
        return (*held, *(Held(number, begin, begin, times) for begin in begins))

    def of_shown(self, operation: mtf.Operation) -> tuple[Held, ...]:
        """When a block of what a reshape makes, or rows that are cut out in place, would be there, were they moved or
        copied: until their last reader is done, in every order."""
        return tuple(Held(number, min(span.begin for span in spans), max(span.end for span in spans))
                     for number, tensor in enumerate(operation.outputs)
                     for spans in zip(*self._read_as.get(self._steps.tensors.number.get(tensor, -1), ()), strict=True))

    def of_sum(self, total: mtf.Tensor) -> tuple[Held, ...]:
        """When what a loop adds up is there, as the output of an operation of its own."""
        return tuple(held._replace(output=0) for held in self.of_outputs(total.operation)
                     if total.operation.outputs[held.output] is total)

    def of_copy(self, tensor: mtf.Tensor, layer: int) -> tuple[HeldCopy, ...]:
        """From when to when a copy of a tensor is there, in the layout of a layer that reads it, in every order. Of
        tensors that are the same to lowering, the first that is asked for has it, the others have none."""
        number = self._steps.same(self._steps.tensors.number.get(tensor, -1))
        is_first = self._first_read.setdefault((number, layer), tensor) is tensor
        return self._spans.get((number, layer), ()) if is_first else ()

    def of_update(self, variable: mtf.Operation) -> tuple[HeldCopy, ...]:
        """From when to when the new value of a variable is there that another layer made, in every order."""
        return self._until_last_gradient(variable, old=False)

    def of_old(self, variable: mtf.Operation) -> tuple[HeldCopy, ...]:
        """From when to when the value that another layer makes the new one of is there, in every order: it is copied at
        the start."""
        return self._until_last_gradient(variable, old=True)

    def of_converted(self, values: Sequence[tuple[mtf.Operation, mtf.Tensor]]) -> tuple[Held, ...]:
        """When what values are converted to on the way to their variables is there, where these are kept in another
        type: told by the values, (variable, value) each, as what their assignment reads."""
        steps, found = self._steps, list[Held]()
        for number, (variable, value) in enumerate(values):
            known = steps.tensors.number.get(value, -1)
            waits = known >= 0 and bool(steps.waiting[known] or steps.of_waiting[known])
            for order, moment_of in zip(self._orders, self._moment_of, strict=True):
                if value.dtype != variable.slice_dtype and variable in order.updated:
                    place = order.updated[variable]
                    begin, end = (int(moment_of[min(at, len(moment_of) - 3)]) for at in (place, place + 1))
                    found.append(Held(-1 - number, begin, end, variable.slice_dtype.size / value.dtype.size,
                                      int(moment_of[-2]) if waits else -1))
        return tuple(found)

    def _until_last_gradient(self, variable: mtf.Operation, *, old: bool) -> tuple[HeldCopy, ...]:
        return tuple(
            HeldCopy(int(moment_of[0 if old else order.updated[variable]]),
                     int(moment_of[max(order.updated[variable], order.last_gradient)]))
            for order, moment_of in zip(self._orders, self._moment_of, strict=True) if variable in order.updated)


def lifetimes(facts: Sequence[OperationFacts], phases: Sequence[str], flow: Flow,
              layers: dict[int, int], turns: bool = False) -> Lifetimes:
    """When tensors are there.

    Args:
      facts: of all operations of a graph.
      phases: of all operations.
      flow: of the graph.
      layers: id of an operation -> the number of its layer.
      turns: of a microbatch in a pipeline (`orders.in_turns`).
    """
    maker = {tensor: fact.index for fact in facts for tensor in fact.outputs}
    # Gradients that no assignment needs never run.
    running = [fact for fact in facts if fact.is_needed or phases[fact.index] not in (BACKWARD, UPDATE)]
    awaited = {fact.index: awaited_by(fact, maker, flow) for fact in running}
    orders = [ordered(running, awaited, None, late_sums(running, awaited, phases)),
              ordered(running, awaited, runs_at_once(running, awaited, phases))]
    if turns:
        orders = [in_turns(order, awaited, phases) for order in orders]
    steps = Steps(orders[0], facts, phases, flow, layers)
    return Lifetimes(steps, [lives(steps, _places(order, orders[0])) for order in orders])


def _places(order: Sequence[OperationFacts], steps: Sequence[OperationFacts]) -> np.ndarray:
    """The place in an order of every step."""
    place = {fact.index: number for number, fact in enumerate(order)}
    return np.array([place[fact.index] for fact in steps], np.int64)
