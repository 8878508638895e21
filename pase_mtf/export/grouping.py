"""Which operations of an mtf.Graph belong to one layer, and in which phase of a step each of them runs."""

from __future__ import annotations

import collections
import dataclasses
import math

from pase_mtf.compat import mtf
from pase_mtf.export.layer_marks import layer_mark
from pase_mtf.operations.facts import is_reshape, kind_of, reduced_dims, tensors_in
from pase_mtf.operations.legality import splittable_dims

__all__ = ["Group", "group_operations", "phases"]

_FORWARD, _BACKWARD, _UPDATE = "forward", "backward", "update"


def phases(graph: mtf.Graph) -> list[str]:
    """The phase of every operation: "forward", "backward" or "update".

    Gradient operations carry the name of their forward operation and "/gradients/". What stands between gradients
    (recomputed forward operations) is backward too; what nothing but assignments uses is update.
    """
    operations = graph.operations
    number = {id(operation): index for index, operation in enumerate(operations)}
    names = {operation.name for operation in operations}
    named = [_forward_name(operation.name, names, graph) is not None for operation in operations]
    sources = [sorted({number[id(tensor.operation)] for tensor in tensors_in(operation)
                       if id(tensor.operation) in number}) for operation in operations]
    consumers: list[list[int]] = [[] for _ in operations]
    after = list(named)
    for index, inputs in enumerate(sources):
        for source in inputs:
            consumers[source].append(index)
            after[index] |= after[source]
    before = list(named)  # leads to a gradient
    updates = [isinstance(operation, mtf.Assign) for operation in operations]
    for index in range(len(operations) - 1, -1, -1):
        before[index] |= any(before[consumer] for consumer in consumers[index])
        if consumers[index] and not named[index]:
            updates[index] |= all(updates[consumer] for consumer in consumers[index])
    result = []
    for index, operation in enumerate(operations):
        if named[index] or (after[index] and before[index]):
            phase = _BACKWARD
        elif updates[index] or after[index]:
            phase = _UPDATE
        elif not sources[index] and consumers[index] and not isinstance(operation, mtf.Variable) and all(
                named[consumer] for consumer in consumers[index]):
            phase = _BACKWARD  # the gradient of the loss with respect to itself
        else:
            phase = _FORWARD
        result.append(phase)
    return result


def _forward_name(name: str, names: set[str], graph: mtf.Graph) -> str | None:
    """The forward operation that a gradient operation was made for, or None if it is no gradient operation."""
    scope = graph.captured_variable_scope.name
    while "/gradients/" in name:
        name = name.rsplit("/gradients/", 1)[0]
        if name in names:
            return name
        if scope and name.startswith(scope + "/") and name[len(scope) + 1:] in names:
            return name[len(scope) + 1:]
    return None


@dataclasses.dataclass
class Group:
    """The operations of one layer while it is being put together.

    Attributes:
      kind: as in `graph.Layer`.
      members: indices of its operations.
      sizes: dim name -> every size it appears with, in the order of the iteration space.
      legal: the dims that every forward operation so far can split.
      aliases: as in `graph.Layer`.
      founder: index of the operation that gives the layer its name.
    """

    kind: str
    founder: int
    members: list[int] = dataclasses.field(default_factory=list)
    sizes: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    legal: set[str] = dataclasses.field(default_factory=set)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)

    def resolve(self, name: str) -> str:
        """The layer's own name for a dim."""
        return self.aliases.get(name, name)

    def covers(self, operation: mtf.Operation) -> bool:
        """Whether the operation's dims are all the layer's, and it can split whatever the layer can."""
        names = {self.resolve(dim.name) for dim in _dims_of(operation)}
        return names <= set(self.sizes) and not (names & self.legal) - {self.resolve(n) for n in _legal(operation)}

    def add(self, index: int, operation: mtf.Operation) -> None:
        """Takes the operation in, whether or not it is covered: its dims and limits become the layer's."""
        self.members.append(index)
        legal = {self.resolve(name) for name in _legal(operation)}
        for dim in _dims_of(operation):
            name = self.resolve(dim.name)
            if name not in self.sizes:
                self.sizes[name] = set()
                self.legal.add(name)
            self.sizes[name].add(dim.size)
            if name not in legal:
                self.legal.discard(name)

    def dims(self) -> dict[str, int]:
        """Dim name -> the gcd of its sizes."""
        return {name: math.gcd(*sizes) for name, sizes in self.sizes.items()}


def _dims_of(operation: mtf.Operation) -> list[mtf.Dimension]:
    """The iteration space: outputs first, then what is reduced away; anonymous dims are nobody's."""
    found = {}
    for tensor in [*operation.outputs, *tensors_in(operation)]:
        for dim in tensor.shape.dims:
            found.setdefault((dim.name, dim.size), dim)
    return [dim for dim in found.values() if not dim.name.startswith("_anonymous_")]


def _legal(operation: mtf.Operation) -> frozenset[str]:
    return splittable_dims(operation)


def _kind_of_new_layer(operation: mtf.Operation) -> str:
    kind = kind_of(operation)
    if kind in ("matmul", "convolution"):
        return kind
    if isinstance(operation, mtf.PoolOperation):
        return "pool"
    if isinstance(operation, mtf.WhileLoopOperation):
        return "loop"
    if isinstance(operation, mtf.TopKOperation) or kind == "gather":
        return "gather"
    if kind == "reduction":
        return "normalize"
    return "pointwise"


def _founds(operation: mtf.Operation) -> bool:
    """Whether the operation always opens a layer of its own."""
    return (kind_of(operation) in ("matmul", "convolution")
            or isinstance(operation, (mtf.PoolOperation, mtf.WhileLoopOperation, mtf.TopKOperation)))


class _Grouping:
    """One pass over the operations; groups are merged through `_find` when they share a variable."""

    def __init__(self, graph: mtf.Graph):
        self.graph = graph
        self.operations = graph.operations
        self.phase = phases(graph)
        self.number = {id(operation): index for index, operation in enumerate(self.operations)}
        self.groups: list[Group] = []
        self.parent: list[int] = []
        self.group_of: list[int | None] = [None] * len(self.operations)
        self.normalizing: dict[int, int] = {}  # id(tensor) -> the group that was opened to reduce it
        self.marked: dict[object, int] = {}  # what `one_layer` holds together -> its group

    # -- groups ------------------------------------------------------------------------------------------------------
    def _find(self, group: int) -> int:
        while self.parent[group] != group:
            self.parent[group] = self.parent[self.parent[group]]
            group = self.parent[group]
        return group

    def _home(self, index: int) -> int | None:
        group = self.group_of[index]
        return None if group is None else self._find(group)

    def _new(self, index: int, kind: str) -> int:
        self.groups.append(Group(kind, index))
        self.parent.append(len(self.groups) - 1)
        return len(self.groups) - 1

    def _put(self, index: int, group: int) -> None:
        self.group_of[index] = group
        self.groups[group].add(index, self.operations[index])

    def _merge(self, kept: int, other: int) -> None:
        kept, other = sorted((self._find(kept), self._find(other)))
        if kept == other:
            return
        target, source = self.groups[kept], self.groups[other]
        self.parent[other] = kept
        for name, sizes in source.sizes.items():
            known = name in target.sizes
            target.sizes.setdefault(name, set()).update(sizes)
            if not known:
                target.legal |= {name} & source.legal
            elif name not in source.legal:
                target.legal.discard(name)
        target.members += source.members
        # A name that is a dim of one and an alias in the other cannot be both.
        for name, dim in source.aliases.items():
            if name not in target.sizes:
                target.aliases.setdefault(name, dim)

    def _sources(self, index: int) -> list[int]:
        """The operations whose outputs this one reads, biggest tensor first."""
        tensors = sorted(tensors_in(self.operations[index]), key=lambda tensor: -tensor.size)
        return [self.number[id(tensor.operation)] for tensor in tensors if id(tensor.operation) in self.number]

    # -- forward -----------------------------------------------------------------------------------------------------
    def forward(self) -> None:
        """Places the forward operations; those made of constants and feeds alone wait for who needs them."""
        for index, operation in enumerate(self.operations):
            if self.phase[index] != _FORWARD:
                continue
            if layer_mark(operation) is not None:
                self._put(index, self._marked_group(index, operation))
                self._settle(index)
                continue
            placed = [source for source in self._sources(index) if self._home(source) is not None]
            if not placed and not _founds(operation):
                continue  # waits, see _settle
            group = self._forward_group(index, operation, placed)
            if self.group_of[index] is None:
                self._put(index, group)
            self._settle(index)
        for index in range(len(self.operations)):
            if self.phase[index] == _FORWARD and self.group_of[index] is None:
                self._put(index, self._orphan_group(index))

    def _marked_group(self, index: int, operation: mtf.Operation) -> int:
        mark = layer_mark(operation)
        if mark not in self.marked:
            self.marked[mark] = self._new(index, _kind_of_new_layer(operation))
        home = self._find(self.marked[mark])
        group = self.groups[home]
        # It is called after the first of its operations that would have been a layer anyway.
        if _founds(operation) and not _founds(self.operations[group.founder]):
            group.founder, group.kind = index, _kind_of_new_layer(operation)
        return home

    def _forward_group(self, index: int, operation: mtf.Operation, placed: list[int]) -> int:
        if _founds(operation):
            return self._new(index, _kind_of_new_layer(operation))
        if is_reshape(operation):
            return self._reshape_group(index, operation, placed)
        reduces = kind_of(operation) == "reduction" and reduced_dims(operation)
        for home in self._followed(operation, placed):
            group = self.groups[home]
            if group.covers(operation) and (not reduces or group.kind == "normalize"):
                return home
        if not reduces:
            return self._new(index, _kind_of_new_layer(operation))
        # Several reductions of one tensor (its maximum, its sum, the chosen element) are one normalisation.
        biggest = max(tensor.size for tensor in tensors_in(operation))
        read = [id(tensor) for tensor in tensors_in(operation) if tensor.size == biggest]
        for tensor in read:
            sibling = self.normalizing.get(tensor)
            if sibling is not None and self.groups[self._find(sibling)].covers(operation):
                return self._find(sibling)
        new = self._new(index, _kind_of_new_layer(operation))
        self.normalizing.update(dict.fromkeys(read, new))
        return new

    def _followed(self, operation: mtf.Operation, placed: list[int]) -> list[int]:
        """The layers an operation may follow: the newest that it reads from, then those of its biggest inputs.

        Not every layer it reads from: the mask that all attention layers share would join them into one.
        """
        newest = max((self._home(source) for source in placed), key=lambda home: self.groups[home].founder)
        biggest = max(tensor.size for source in placed for tensor in self.operations[source].outputs)
        homes = [self._home(source) for source in placed
                 if any(tensor.size == biggest for tensor in self.operations[source].outputs)]
        return list(dict.fromkeys([newest, *sorted(homes, key=lambda home: -self.groups[home].founder)]))

    def _reshape_group(self, index: int, operation: mtf.Operation, placed: list[int]) -> int:
        for source in placed:
            home = self._home(source)
            if self.groups[home].covers(operation):
                return home
        home = self._new(index, "pointwise")
        group = self.groups[home]
        output = operation.outputs[0].shape
        pairs = _corresponding_dims(operation.inputs[0].shape, output)
        for inner, outer in pairs:
            if inner.name != outer.name and inner.name not in output.dimension_names:
                group.aliases[inner.name] = outer.name
        self._put(index, home)
        # What is merged away or split up is laid out by no axis of this layer.
        kept = {outer.name for _, outer in pairs}
        group.legal &= kept
        for name in [name for name in group.sizes if name not in output.dimension_names]:
            group.legal.discard(name)
        return home

    def _settle(self, index: int) -> None:
        """Brings the waiting operations that this one reads (variables, feeds, constants, masks) into its layer."""
        stack = [index]
        while stack:
            current = stack.pop()
            home = self._home(current)
            for source in self._sources(current):
                operation = self.operations[source]
                if self.phase[source] != _FORWARD:
                    continue
                if isinstance(operation, mtf.Variable) and self.group_of[source] is not None:
                    if operation.shape.size > 1:
                        self._merge(self._home(source), home)
                    continue
                if self.group_of[source] is not None:
                    continue
                if self.groups[home].covers(operation):
                    self._put(source, home)
                else:
                    self._put(source, self._orphan_group(source))
                stack.append(source)

    def _orphan_group(self, index: int) -> int:
        return self._new(index, _kind_of_new_layer(self.operations[index]))

    # -- backward and update -----------------------------------------------------------------------------------------
    def backward(self) -> None:
        """Gradient operations belong to the layer of their forward operation; recomputed ones to their original's."""
        names = {operation.name for operation in self.operations}
        by_name: dict[str, int] = {}
        for index, operation in enumerate(self.operations):
            if self.phase[index] == _FORWARD:
                by_name.setdefault(operation.name, index)
        waiting = []
        for index, operation in enumerate(self.operations):
            if self.phase[index] != _BACKWARD:
                continue
            name = _forward_name(operation.name, names, self.graph)
            while name is not None and name not in by_name:  # the gradient of a gradient operation
                name = _forward_name(name, names, self.graph)
            if name is None:
                name = operation.name  # a recomputed operation carries its original's name
            if name in by_name:
                self._put(index, self._home(by_name[name]))
            else:
                waiting.append(index)
        self._place_by_neighbours(waiting)

    def update(self) -> None:
        """Optimizer operations lead back from their Assign to a variable: its layer is theirs."""
        rest = []
        for index, operation in enumerate(self.operations):
            if self.group_of[index] is not None:
                continue
            if isinstance(operation, mtf.Assign):
                home = self._home(self.number[id(operation.variables[0])])
                if home is not None:
                    self.group_of[index] = home
                    self.groups[home].members.append(index)
                    continue
            rest.append(index)
        self._place_by_neighbours(rest)

    def _place_by_neighbours(self, rest: list[int]) -> None:
        """Each operation goes to the layer of the biggest tensor it reads, else to its first consumer's."""
        consumers = collections.defaultdict(list)
        for index in range(len(self.operations)):
            for source in self._sources(index):
                consumers[source].append(index)
        assigned = collections.defaultdict(list)
        for operation in self.operations:
            if isinstance(operation, mtf.Assign):
                for variable, value in zip(operation.variables, operation.inputs, strict=True):
                    if id(variable) in self.number:
                        assigned[self.number[id(value.operation)]].append(self.number[id(variable)])
        while rest:
            left = []
            for index in rest:
                homes = [self._home(near) for near in self._sources(index)]
                homes = [home for home in homes if home is not None]
                if not homes:
                    left.append(index)
                    continue
                self._join_update(index, homes)
            if len(left) == len(rest):
                progress = []
                for index in left:
                    near = [*consumers[index], *assigned[index]]
                    homes = [self._home(other) for other in near if self._home(other) is not None]
                    if homes:
                        self._join_update(index, homes)
                    else:
                        progress.append(index)
                if len(progress) == len(left):
                    for index in progress:
                        self._put(index, self._orphan_group(index))
                    progress = []
                left = progress
            rest = left

    def _join_update(self, index: int, homes: list[int]) -> None:
        operation = self.operations[index]
        for home in homes:
            if self.groups[home].covers(operation):
                self._put(index, home)
                return
        if isinstance(operation, mtf.Assign):
            self.group_of[index] = homes[0]
            self.groups[homes[0]].members.append(index)
            return
        self._put(index, self._orphan_group(index))

    # -- loops -------------------------------------------------------------------------------------------------------
    def loops(self) -> None:
        """A loop's body shares the loop's layout: variables it reads belong to the loop's layer."""
        for index, operation in enumerate(self.operations):
            if not isinstance(operation, mtf.WhileLoopOperation):
                continue
            for inner in [*operation._cond_ops, *operation._body_ops]:
                for tensor in inner.inputs:
                    source = self.number.get(id(tensor.operation))
                    if source is not None and isinstance(tensor.operation, mtf.Variable) and tensor.size > 1:
                        self._merge(self._home(source), self._home(index))

    def result(self) -> list[Group]:
        """The groups in the order of the operations that founded them, every operation in exactly one."""
        alive = [group for number, group in enumerate(self.groups) if self._find(number) == number]
        for group in alive:
            group.members.sort()
        return sorted(alive, key=lambda group: group.founder)


def _corresponding_dims(old: mtf.Shape, new: mtf.Shape) -> list[tuple[mtf.Dimension, mtf.Dimension]]:
    """Pairs of dims of two shapes of equal size whose cuts coincide: the outermost dims of every matching run."""
    olds, news = ([dim for dim in shape.dims if dim.size > 1] for shape in (old, new))
    pairs = []
    i = j = 0
    while i < len(olds) and j < len(news):
        pairs.append((olds[i], news[j]))
        left, right = olds[i].size, news[j].size
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * olds[i].size, i + 1
            else:
                right, j = right * news[j].size, j + 1
    return pairs


def group_operations(graph: mtf.Graph) -> tuple[list[Group], list[str]]:
    """Groups the operations of a Mesh-TF graph into layers.

    Einsums, convolutions, poolings, reductions (with the softmax or normalisation built on them), loops and gathers
    open layers; pointwise operations, broadcasts and renames join the layer they follow when its iteration space
    covers theirs. Operations that read the same variable belong to one layer, and so do those that the model itself
    holds together (`one_layer`). Gradients follow their forward operation, the optimizer follows the variable.

    Args:
      graph: any mtf.Graph.

    Returns:
      The groups, and the phase of every operation.
    """
    grouping = _Grouping(graph)
    grouping.forward()
    grouping.backward()
    grouping.update()
    grouping.loops()
    return grouping.result(), grouping.phase
