"""The operations of a graph by numbers: what is the same of them in every order in which they may run.

Steps and tensors are numbered, so that what depends on the order (`export.lives`) is found in arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.compat import mtf
from pase_mtf.export.phases import BACKWARD, UPDATE
from pase_mtf.operations.einsum import product_of
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.flow import Flow, Loops
from pase_mtf.operations.registry import rule_of
from pase_mtf.operations.tracing import MadeEarly, made_early

__all__ = ["Copies", "Early", "Over", "Steps", "Tensors", "TurningLoop", "is_cut_in_place"]


class Tensors:
    """The tensors that steps make and read, by numbers.

    Attributes:
      number: tensor -> its number.
      step: of each, the step of its operation; -1 where that does not run.
      output: of each, which output of its operation it is.
      layer: of each, the number of the layer that makes it; -1 where none does. A sum that a loop makes is of the layer
        whose outputs it adds up.
      nbytes: of each, whole.
      alike: of each, a number that tensors of one shape and type have in common.
      maker: of each, the operation that makes it, or what a loop adds up to it; None of what goes round in a loop by a
        name that the loop gives.
    """

    def __init__(self, running: Sequence[OperationFacts], facts: Sequence[OperationFacts],
                 flow: Flow, layers: dict[int, int]) -> None:
        self._flow = flow
        self._maker = {tensor: fact for fact in facts for tensor in fact.outputs}
        self._layers = layers
        self.step_of = {fact.operation: step for step, fact in enumerate(running)}
        self._kinds: dict[Hashable, int] = {}
        self.number: dict[mtf.Tensor, int] = {}
        self.step: list[int] = []
        self.output: list[int] = []
        self.layer: list[int] = []
        self.nbytes: list[float] = []
        self.alike: list[int] = []
        self.maker: list[OperationFacts | None] = []

    def of(self, tensor: mtf.Tensor) -> int:
        """The number of a tensor."""
        found = self.number.get(tensor)
        return self._add(tensor) if found is None else found

    def _add(self, tensor: mtf.Tensor) -> int:
        number = self.number[tensor] = len(self.step)
        operation, dims, dtype = tensor.operation, tensor.shape.dims, tensor.dtype
        outputs = operation.outputs
        self.step.append(self.step_of.get(operation, -1))
        self.output.append(outputs.index(tensor) if len(outputs) > 1 and tensor in outputs else 0)
        added = tensor in self._flow.sums
        self.layer.append(self._layers.get(id(self._flow.owner(tensor).operation if added else operation), -1))
        self.nbytes.append(float(math.prod([dim.size for dim in dims]) * dtype.size))
        self.alike.append(self._kinds.setdefault((dtype, tuple(dims)), len(self._kinds)))
        self.maker.append(self._maker.get(self._flow.origin(tensor) if added else tensor))
        return number


class Early(NamedTuple):
    """What a gradient makes of the forward pass's tensors before gradients come.

    Attributes:
      step: the gradient.
      tensor: its first output.
      awaited: the steps whose outputs it needs for it.
      times: how many of the first output it takes.
      read: which of `Steps.reads` it is done with by then.
    """

    step: int
    tensor: int
    awaited: tuple[int, ...]
    times: float
    read: tuple[int, ...]


class Over(NamedTuple):
    """What an elementwise operation may write its output over, where nobody reads that any more.

    Attributes:
      step: of the operation.
      output: its output.
      own: what its own layer makes, in this order.
    """

    step: int
    output: int
    own: tuple[int, ...]


class Copies(NamedTuple):
    """What is read, by every name for it and every layer that reads it: arrays of one length.

    Attributes:
      name: the tensor.
      layer: the number of the layer.
    """

    name: np.ndarray
    layer: np.ndarray


class TurningLoop(NamedTuple):
    """A loop.

    Attributes:
      step: its own; -1 where it does not run.
      members: the steps in it, its own among them.
      handed_on: what goes round in it, as the tensor that it lies in.
      added_up: (what an iteration adds, as the tensor that it lies in; the sum).
    """

    step: int
    members: list[int]
    handed_on: list[int]
    added_up: list[tuple[int, int]]


class Steps:
    """What is the same of all operations in every order, by numbers of steps and tensors; arrays of columns.

    Attributes:
      tensors: their numbers.
      count: of the steps.
      is_backward, is_update: of each step, whether it makes gradients, or updates of variables.
      makes: (step, tensor): all outputs that take memory.
      reads: (step, source, leaves): what is read, by the tensor that it lies in, and which of `leaves` it is read in.
      leaves: the loops around a reader in which what it reads is not made: that is there until they have ended.
      names: (read, copy): the names that one of `reads` knows it by, as places in `copies`.
      copies: see there.
      assigned: (variable, step, what its new value lies in).
      waiting: of each tensor, whether it is a gradient, of which devices may hold the sum that is to be made until
        there are all.
      of_waiting: of each tensor, whether an update makes it of such a gradient.
      is_shown: of each tensor, whether another shows it, or may do so: what loops hand on.
      shows: (tensor, copy): a tensor that shows what its layer has of another, and that, as its place in `copies`; in
        the order of the steps.
      is_variable: of each tensor, whether it is what a variable holds.
      products: (step, source): the product that a reduction makes may be written over what its own layer has made.
      over: see there.
      over_shared: (step, output, source, copy): the same of what other layers make as well, which lies in a source and
        is read as a copy.
      early: see there.
      loops: loop -> see there.
    """

    def __init__(self, running: Sequence[OperationFacts], facts: Sequence[OperationFacts], phases: Sequence[str],
                 flow: Flow, layers: dict[int, int]) -> None:
        """Reads all operations.

        Args:
          running: those that run, in an order in which they can.
          facts, phases: of all operations of the graph, by index.
          flow: of the graph.
          layers: id of an operation -> the number of its layer.
        """
        self._phases, self._flow, self._layers = phases, flow, layers
        self._traced: dict[Hashable, MadeEarly] = {}
        self._views: dict[int, int] = {}
        self._same: dict[int, int] = {}
        self.products: list[tuple[int, int]] = []
        self._made: set[int] = set()
        self._copies: dict[tuple[int, int], int] = {}
        self._leaves: dict[Loops, int] = {(): 0}
        makes: list[tuple[int, int]] = []
        self._reads: list[tuple[int, int, int]] = []
        self._names: list[tuple[int, int]] = []
        self._over_shared: list[tuple[int, int, int, int]] = []
        self._waiting: set[int] = set()
        self._of_waiting: set[int] = set()
        self.tensors, self.count = Tensors(running, facts, flow, layers), len(running)
        self.assigned: list[tuple[mtf.Operation, int, int]] = []
        self.early: list[Early] = []
        self.over: list[Over] = []
        self.shows: list[tuple[int, int]] = []
        for step, fact in enumerate(running):
            makes += [(step, tensor) for tensor in self._step(step, fact)]
        self.loops = self._turning_loops(running)
        self.leaves = list(self._leaves)
        self.is_backward = np.array([phases[fact.index] == BACKWARD for fact in running], bool)
        self.is_update = np.array([phases[fact.index] == UPDATE for fact in running], bool)
        self.makes, self.reads = _columns(makes, 2), _columns(self._reads, 3)
        self.names, self.over_shared = _columns(self._names, 2), _columns(self._over_shared, 4)
        self.copies = Copies(*_columns(list(self._copies), 2))
        self.waiting, self.of_waiting = self._marked(self._waiting), self._marked(self._of_waiting)
        makers = self.tensors.maker
        self.is_variable = np.array([fact is not None and fact.rule.is_variable for fact in makers], bool)
        self.is_shown = self._marked(self._views.values()) | np.array(
            [fact is not None and bool(fact.loops) for fact in makers], bool)

    def _marked(self, chosen: Iterable[int]) -> np.ndarray:
        found = np.zeros(len(self.tensors.step), bool)
        found[list(chosen)] = True
        return found

    def _lies_in(self, tensor: mtf.Tensor) -> int:
        """The tensor that it shows; itself where it shows none."""
        number = self.tensors.of(tensor)
        return self._views.get(number, number)

    def same(self, tensor: int) -> int:
        """The tensor whose slices lowering takes for those of this one: itself, unless one is handed on as it is."""
        return self._same.get(tensor, tensor)

    def _is_gradient(self, tensor: int) -> bool:
        maker = self.tensors.maker[tensor]
        return maker is not None and self._phases[maker.index] == BACKWARD

    def _sources(self, fact: OperationFacts) -> Sequence[mtf.Tensor]:
        """What it reads, as the tensors that are there."""
        return tuple(map(self._flow.made, fact.reads)) if self._flow.sums else fact.sources

    def _step(self, step: int, fact: OperationFacts) -> Sequence[int]:
        """Reads an operation; returns those of its outputs that take memory."""
        phase, first, first_read = self._phases[fact.index], len(self._names), len(self._reads)
        sources = [] if fact.operation in self._flow.parts else list(map(self._lies_in, self._sources(fact)))
        if sources:
            self._read(step, fact, sources)
        makes = self._makes(fact)
        self.assigned += [(variable, step, self._lies_in(self._flow.made(value))) for variable, value in fact.assigns]
        if phase == UPDATE:
            waiting = [source for source in sources if source in self._made and self._is_gradient(source)]
            self._waiting.update(waiting)
            if waiting or not self._of_waiting.isdisjoint(sources):
                self._of_waiting.update(makes)
        if makes and not fact.assigns and fact.computes == "pointwise" and not fact.nodes.makes_anew:
            # Of what is read in another shape, rows that are cut out of it say, nothing is as large as the output.
            alike, tensors = self.tensors.alike, map(self.tensors.of, self._sources(fact))
            other = {source for source, read in zip(sources, tensors, strict=False) if alike[read] != alike[source]}
            own = [source for source in sources if source not in other]
            self._write_over(step, makes[0], own, self._names[first:])
        if makes and (whole := product_of(fact.operation)) >= 0:
            self._multiply(step, makes[0], sources, sources[whole])
        if makes and phase == BACKWARD:
            self._make_early(step, fact, makes[0], first_read)
        self._made.update(makes)
        return makes

    def _read(self, step: int, fact: OperationFacts, sources: Sequence[int]) -> None:
        layer, leaves = self._layers.get(id(fact.operation), -1), 0
        updated = {id(value): variable for variable, value in fact.assigns}
        for source, origin, tensor in zip(sources, self._sources(fact), fact.reads, strict=True):
            if fact.loops:
                maker = self.tensors.maker[source]
                left = tuple([loop for loop in fact.loops if maker is None or loop not in maker.loops])
                leaves = self._leaves.setdefault(left, len(self._leaves))
            reader = self._layers.get(id(updated[id(tensor)]), -1) if id(tensor) in updated else layer
            names = (tensor,) if origin is tensor else (origin, tensor)
            self._names += [(len(self._reads), self._copies.setdefault((self.same(self.tensors.of(name)), reader),
                                                                       len(self._copies))) for name in names]
            self._reads.append((step, source, leaves))

    def _makes(self, fact: OperationFacts) -> Sequence[int]:
        operation = fact.operation
        outputs = operation.outputs
        if rule_of(variable := fact.rule.leader(operation)).is_variable and (
                fact.rule.is_variable or variable.slice_dtype.size != variable.activation_dtype.size):
            # Read as it lies, or converted to another type: once more by what reads it once more.
            outputs = [tensor for tensor in outputs if tensor.dtype.size != variable.slice_dtype.size]
        elif operation in self._flow.parts:
            outputs = [tensor for tensor in outputs if tensor in self._flow.sums]
        elif fact.rule.is_constant or (not fact.reads and fact.rule.leader(operation) is not operation):
            outputs = []
        elif (fact.kind == "none" or is_cut_in_place(fact)) and (sources := self._sources(fact)):
            for number, tensor in enumerate(outputs):
                source = sources[min(number, len(sources) - 1)]
                self._views[self.tensors.of(tensor)] = self._lies_in(source)
                if fact.rule.is_same:
                    self._same[self.tensors.of(tensor)] = self.same(self.tensors.of(source))
                else:
                    copy = self.same(self.tensors.of(source)), self._layers.get(id(operation), -1)
                    self.shows.append((self.tensors.of(tensor), self._copies[copy]))
            outputs = []
        return [self.tensors.of(tensor) for tensor in outputs]

    def _write_over(self, step: int, output: int, sources: Sequence[int], names: Sequence[tuple[int, int]]) -> None:
        alike = self.tensors.alike
        over = {source for source in sources if source in self._made and alike[source] == alike[output]}
        if not over:
            return
        self._over_shared += [(step, output, self._reads[read][1], copy) for read, copy in names
                              if self._reads[read][1] in over]
        own = [source for source in sources if source in over and self._is_own(source, output)]
        if own:
            self.over.append(Over(step, output, tuple(own)))

    def _is_own(self, source: int, output: int) -> bool:
        maker, layer = self.tensors.maker[source], self.tensors.layer
        return layer[source] == layer[output] and maker is not None and maker.rule.imported(maker.operation) is None

    def _multiply(self, step: int, output: int, sources: Sequence[int], whole: int) -> None:
        """A reduction makes a product like `whole`: where something like it lies that nobody reads any more."""
        alike, maker = self.tensors.alike, self.tensors.maker
        for source in sources:
            fact = maker[source]
            if (fact is not None and not fact.contracts and source in self._made and alike[source] == alike[whole]
                    and sources.count(source) == 1 and self._is_own(source, output)):
                self.products.append((step, source))

    def _make_early(self, step: int, fact: OperationFacts, first: int, first_read: int) -> None:
        late = [self._is_gradient(self.tensors.of(tensor)) for tensor in fact.sources]
        if all(late) or not any(late):
            return
        made = made_early(fact.operation, late, self._traced)
        done = tuple(first_read + number for number, still in enumerate(made.still_read) if not still)
        if made.nbytes or done:
            steps = (self.tensors.step[self.tensors.of(tensor)]
                     for tensor, is_late in zip(fact.sources, late, strict=True) if not is_late)
            self.early.append(Early(step, first, tuple(steps),
                                    made.nbytes / max(self.tensors.nbytes[first], 1.0), done))

    def _turning_loops(self, running: Sequence[OperationFacts]) -> dict[mtf.Operation, TurningLoop]:
        found = {}
        for loop, parts in self._flow.parts.items():
            step = self.tensors.step_of.get(loop, -1)
            handed_on = [self._lies_in(self._flow.made(variable.next)) for variable in parts.variables]
            added_up = [(self._lies_in(self._flow.made(inside)), self.tensors.of(output))
                        for inside, output in parts.accumulators] if step >= 0 else []
            self._waiting.update(inside for inside, total in added_up if total in self._waiting)
            found[loop] = TurningLoop(step, [], handed_on, added_up)
        for step, fact in enumerate(running):
            if fact.loops or fact.operation in found:
                for loop in (*fact.loops, *([fact.operation] if fact.operation in found else [])):
                    found[loop].members.append(step)
        return found


def is_cut_in_place(fact: OperationFacts) -> bool:
    """Whether it cuts rows that lie as they are needed: TensorFlow copies nothing, and any of them keeps the whole."""
    return fact.kind == "gather" and not fact.nodes.traffic


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64, width * len(rows)).reshape(-1, width).T
