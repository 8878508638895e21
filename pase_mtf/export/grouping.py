"""Which operations of an mtf.Graph belong to one layer."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

from pase_mtf.compat import mtf
from pase_mtf.export.groups import Group, Groups, corresponding_dims
from pase_mtf.export.layer_marks import layer_mark
from pase_mtf.export.phases import BACKWARD, FORWARD, forward_name
from pase_mtf.export.update_layers import open_update_layers
from pase_mtf.operations.facts import OperationFacts

__all__ = ["group_operations"]


class _Grouping:
    """One pass over the operations; groups are merged when they share a variable."""

    def __init__(self, graph: mtf.Graph, facts: Sequence[OperationFacts], phases: Sequence[str]) -> None:
        self.graph, self.facts, self.phases = graph, facts, phases
        self.number = {id(fact.operation): fact.index for fact in facts}
        self.groups = Groups(facts)
        self.normalizing: dict[int, int] = {}  # id(tensor) -> the group that was opened to reduce it
        self.marked: dict[object, int] = {}  # what `one_layer` holds together -> its group
        self.sources = [self._sources(fact) for fact in facts]

    def _sources(self, fact: OperationFacts) -> list[int]:
        """The operations whose outputs this one reads, biggest tensor first."""
        makers: Iterable[int] = fact.makers
        if len(fact.makers) > 1:
            sizes = [tensor.size for tensor in fact.sources]
            makers = [fact.makers[place] for place in sorted(range(len(sizes)), key=lambda place: -sizes[place])]
        return [maker for maker in makers if maker >= 0]

    # -- forward -----------------------------------------------------------------------------------------------------
    def forward(self) -> None:
        """Places the forward operations; those made of constants and feeds alone wait for who needs them."""
        for fact in self.facts:
            if self.phases[fact.index] != FORWARD:
                continue
            if _mark_of(fact) is not None:
                self.groups.put(fact.index, self._marked_group(fact))
                self._absorb(fact.index)
                continue
            placed = [source for source in self.sources[fact.index] if self.groups.has(source)]
            if not placed and not fact.is_anchor:
                continue  # waits, see _absorb
            group = self._forward_group(fact, placed)
            if not self.groups.has(fact.index):
                self.groups.put(fact.index, group)
            self._absorb(fact.index)
        for index, phase in enumerate(self.phases):
            if phase == FORWARD and not self.groups.has(index):
                self.groups.put(index, self.groups.open(index))

    def _marked_group(self, fact: OperationFacts) -> int:
        mark = _mark_of(fact)
        if mark not in self.marked:
            self.marked[mark] = self.groups.open(fact.index)
        owner = self.groups.find(self.marked[mark])
        group = self.groups[owner]
        # It is called after the first of its operations that would have been a layer anyway.
        if fact.is_anchor and not self.facts[group.anchor].is_anchor:
            group.anchor, group.kind = fact.index, fact.layer
        return owner

    def _forward_group(self, fact: OperationFacts, placed: list[int]) -> int:
        if fact.is_anchor:
            return self.groups.open(fact.index)
        if fact.role == "rename":
            return self._reshape_group(fact, placed)
        reduces = fact.kind == "reduction" and fact.contracts
        for owner in self._followed(placed):
            group = self.groups[owner]
            if group.covers(fact) and (not reduces or group.kind == "normalize"):
                return owner
        if not reduces:
            return self.groups.open(fact.index)
        # Several reductions of one tensor (its maximum, its sum, the chosen element) are one normalisation.
        biggest = max(tensor.size for tensor in fact.reads)
        read = [id(tensor) for tensor in fact.reads if tensor.size == biggest]
        for tensor in read:
            sibling = self.normalizing.get(tensor)
            if sibling is not None and self.groups[sibling].covers(fact):
                return self.groups.find(sibling)
        new = self.groups.open(fact.index)
        self.normalizing.update(dict.fromkeys(read, new))
        return new

    def _followed(self, placed: list[int]) -> list[int]:
        """The layers an operation may follow: the newest that it reads from, then those of its biggest inputs.

        Not every layer it reads from: the mask that all attention layers share would join them into one.
        """
        def size(source: int) -> int:
            return max((tensor.size for tensor in self.facts[source].outputs), default=0)

        def anchor(owner: int) -> int:
            return self.groups[owner].anchor

        newest = max(self.groups.owners(placed), key=anchor)
        biggest = max(map(size, placed))
        owners = self.groups.owners(source for source in placed if any(
            tensor.size == biggest for tensor in self.facts[source].outputs))
        return list(dict.fromkeys([newest, *sorted(owners, key=lambda owner: -anchor(owner))]))

    def _reshape_group(self, fact: OperationFacts, placed: list[int]) -> int:
        output = fact.outputs[0].shape
        # What is made without names (`mtf.anonymize`) is lowered whole, whatever the layer calls like it: tensors that
        # have nothing to do with each other share these names.
        hidden = {name for name in output.dimension_names if name.startswith("_anonymous_")}
        for owner in self.groups.owners(placed):
            if self.groups[owner].covers(fact) and hidden.isdisjoint(self.groups[owner].aliases):
                return owner
        owner = self.groups.open(fact.index)
        group = self.groups[owner]
        pairs = [(inner, outer) for inner, outer in corresponding_dims(fact.operation.inputs[0].shape, output)
                 if outer.name not in hidden]
        for inner, outer in pairs:
            if inner.name != outer.name and inner.name not in output.dimension_names:
                group.aliases[inner.name] = outer.name
        self.groups.put(fact.index, owner)
        for inner, _ in pairs:
            # A dim without a name (`mtf.anonymize`) is none of the operation's dims, but is split like its alias.
            if group.resolve(inner.name) in group.sizes:
                group.sizes[group.resolve(inner.name)].add(inner.size)
        # What is merged away or split up is laid out by no axis of this layer.
        group.legal &= {outer.name for _, outer in pairs}
        for name in [name for name in group.sizes if name not in output.dimension_names]:
            group.legal.discard(name)
        return owner

    def _absorb(self, index: int) -> None:
        """Brings the waiting operations that this one reads (variables, feeds, constants, masks) into its layer."""
        stack = [index]
        while stack:
            current = stack.pop()
            owner = self.groups.owner(current)
            for source in self.sources[current]:
                fact = self.facts[source]
                if self.phases[source] != FORWARD:
                    continue
                if fact.rule.is_variable and self.groups.has(source):
                    if fact.operation.shape.size > 1:
                        self.groups.merge(self.groups.owner(source), owner)
                    continue
                if self.groups.has(source):
                    continue
                self.groups.put(source, owner if self.groups[owner].covers(fact) else self.groups.open(source))
                stack.append(source)

    # -- backward and update -----------------------------------------------------------------------------------------
    def backward(self) -> None:
        """Gradient operations belong to the layer of their forward operation; recomputed ones to their original's."""
        names = {fact.name for fact in self.facts}
        by_name: dict[str, int] = {}
        for fact in self.facts:
            if self.phases[fact.index] == FORWARD:
                by_name.setdefault(fact.name, fact.index)
        waiting = []
        for fact in self.facts:
            if self.phases[fact.index] != BACKWARD:
                continue
            name = forward_name(fact.name, names, self.graph)
            while name is not None and name not in by_name:  # the gradient of a gradient operation
                name = forward_name(name, names, self.graph)
            if name is None:
                name = fact.name  # a recomputed operation carries its original's name
            if name in by_name:
                self.groups.put(fact.index, self.groups.owner(by_name[name]))
            else:
                waiting.append(fact.index)
        self._place_by_neighbours(waiting)

    def update(self) -> None:
        """Optimizer operations lead back from their assignment to a variable: its layer is theirs."""
        rest = []
        for fact in self.facts:
            if self.groups.has(fact.index):
                continue
            variables = [self.number[id(variable)] for variable, _ in fact.assigns[:1]]
            owners = self.groups.owners(variables)
            if owners:
                self.groups.put_as_is(fact.index, owners[0])
            else:
                rest.append(fact.index)
        self._place_by_neighbours(rest)

    def _place_by_neighbours(self, rest: list[int]) -> None:
        """Each operation goes to the layer of the biggest tensor it reads, else to its first consumer's."""
        after: dict[int, list[int]] = collections.defaultdict(list)  # consumers, and variables that are assigned
        for fact in self.facts:
            for source in self.sources[fact.index]:
                after[source].append(fact.index)
        for fact in self.facts:
            for variable, value in fact.assigns:
                if id(variable) in self.number:
                    after[self.number[id(value.operation)]].append(self.number[id(variable)])
        while rest:
            left = self._join_some(rest, self.sources.__getitem__)
            if len(left) == len(rest):
                left = self._join_some(left, lambda index: after[index])
                if len(left) == len(rest):
                    for index in left:
                        self.groups.put(index, self.groups.open(index))
                    left = []
            rest = left

    def _join_some(self, indices: list[int], neighbours: Callable[[int], list[int]]) -> list[int]:
        """Puts those operations that have a placed neighbour into its layer, and returns the others."""
        left = []
        for index in indices:
            owners = self.groups.owners(neighbours(index))
            if owners:
                self._join(self.facts[index], owners)
            else:
                left.append(index)
        return left

    def _join(self, fact: OperationFacts, owners: list[int]) -> None:
        for owner in owners:
            if self.groups[owner].covers(fact):
                self.groups.put(fact.index, owner)
                return
        if fact.assigns:
            self.groups.put_as_is(fact.index, owners[0])
        else:
            self.groups.put(fact.index, self.groups.open(fact.index))


def _mark_of(fact: OperationFacts) -> object | None:
    """The mark of an operation, or of the outermost loop that it is in and that has one."""
    return next((mark for operation in (*fact.loops, fact.operation) if (mark := layer_mark(operation)) is not None),
                None)


def group_operations(graph: mtf.Graph, facts: Sequence[OperationFacts], phases: Sequence[str], *,
                     sharded_updates: bool = False) -> list[Group]:
    """Groups the operations of a Mesh-TF graph into layers.

    Einsums, convolutions, poolings, reductions (with the softmax or normalisation built on them) and gathers open
    layers, those in a loop too (the loop itself holds no more than what counts its iterations); pointwise operations,
    broadcasts and renames join the layer they follow when its iteration space covers theirs. Operations that read the
    same variable belong to one layer, and so do those that the model itself holds together (`one_layer`). Gradients
    follow their forward operation, the optimizer follows the variable, or is a layer beside the variable's.

    Args:
      graph: any mtf.Graph.
      facts: of its operations.
      phases: of its operations.
      sharded_updates: open layers of their own for updates (`update_layers`).
    """
    grouping = _Grouping(graph, facts, phases)
    grouping.forward()
    grouping.backward()
    if sharded_updates:
        open_update_layers(facts, phases, grouping.groups)
    grouping.update()
    return grouping.groups.result()
