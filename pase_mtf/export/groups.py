"""The operations of a layer while it is put together, and all such groups of a graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from pase_mtf.compat import mtf
from pase_mtf.operations.facts import OperationFacts

__all__ = ["Group", "Groups", "corresponding_dims"]


@dataclasses.dataclass
class Group:
    """The operations of one layer while it is being put together.

    Attributes:
      kind: as in `graph.Layer`.
      anchor: index of the operation that gives the layer its name.
      members: indices of its operations.
      sizes: dim name -> every size it appears with, in the order of the iteration space.
      legal: the dims that every forward operation so far can split.
      aliases: as in `graph.Layer`.
      updates: of a layer that computes the new values of another layer's weights, the indices of these variables.
    """

    kind: str
    anchor: int
    members: list[int] = dataclasses.field(default_factory=list)
    sizes: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    legal: set[str] = dataclasses.field(default_factory=set)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    updates: tuple[int, ...] = ()

    def resolve(self, name: str) -> str:
        """The layer's own name for a dim."""
        return self.aliases.get(name, name)

    def covers(self, fact: OperationFacts) -> bool:
        """Whether the operation's dims are all the layer's, and it can split whatever the layer can."""
        names = {self.resolve(dim.name) for dim in fact.dims}
        return (names <= set(self.sizes) and not (names & self.legal) - {self.resolve(n) for n in fact.splittable}
                and not self._confused(fact) and not self._moved(fact) & self.legal)

    def _moved(self, fact: OperationFacts) -> set[str]:
        """The layer's names for dims whose splits a reshape cannot keep where they are: under one configuration what
        it reads and what it makes would lie on devices in two ways. A rename moves as a whole, and is priced so."""
        if fact.role != "rename":
            return set()
        x, y = fact.operation.inputs[0].shape, fact.operation.outputs[0].shape
        if x.to_integer_list == y.to_integer_list:
            return set()
        kept = {self.resolve(old.name) for old, new in corresponding_dims(x, y)
                if self.resolve(old.name) == self.resolve(new.name)}
        return {self.resolve(dim.name) for dim in (*x.dims, *y.dims) if dim.size > 1} - kept

    def _confused(self, fact: OperationFacts) -> set[str]:
        """The layer's names that are two dims of one tensor: they are not laid out alike, as aliases have it."""
        if not self.aliases:
            return set()
        found: set[str] = set()
        for tensor in (*fact.reads, *fact.outputs):
            names = [self.resolve(dim.name) for dim in tensor.shape.dims]
            found |= {name for name in names if names.count(name) > 1}
        return found

    def add(self, fact: OperationFacts) -> None:
        """Takes the operation in, whether or not it is covered: its dims and limits become the layer's."""
        self.members.append(fact.index)
        legal = {self.resolve(name) for name in fact.splittable}
        for dim in fact.dims:
            name = self.resolve(dim.name)
            if name not in self.sizes:
                self.sizes[name] = set()
                self.legal.add(name)
            self.sizes[name].add(dim.size)
            if name not in legal:
                self.legal.discard(name)
        self.legal -= self._confused(fact) | self._moved(fact)

    def take_over(self, other: Group) -> None:
        """Takes in all of another group."""
        for name, sizes in other.sizes.items():
            known = name in self.sizes
            self.sizes.setdefault(name, set()).update(sizes)
            if not known:
                self.legal |= {name} & other.legal
            elif name not in other.legal:
                self.legal.discard(name)
        self.members += other.members
        # A name that is a dim of one and an alias in the other cannot be both.
        self.aliases = {name: dim for name, dim in {**other.aliases, **self.aliases}.items() if name not in self.sizes}

    def keep_to(self, facts: Iterable[OperationFacts]) -> None:
        """Gives up the splits that its operations cannot keep by the names that their dims have now."""
        for fact in facts:
            for dim in fact.dims:
                self.sizes.setdefault(self.resolve(dim.name), set()).add(dim.size)
            names = {self.resolve(dim.name) for dim in fact.dims}
            self.legal -= (names - {self.resolve(name) for name in fact.splittable}
                           | self._confused(fact) | self._moved(fact))

    def dims(self) -> dict[str, int]:
        """Dim name -> the gcd of its sizes."""
        return {name: math.gcd(*sizes) for name, sizes in self.sizes.items()}


class Groups:
    """All groups of a graph; two of them may be merged (union-find), and every operation is in one at most."""

    def __init__(self, facts: Sequence[OperationFacts]) -> None:
        self._facts = facts
        self._groups: list[Group] = []
        self._parent: list[int] = []
        self._group_of: list[int | None] = [None] * len(facts)

    def __getitem__(self, group: int) -> Group:
        return self._groups[self.find(group)]

    def find(self, group: int) -> int:
        """The number of the group that a group has become part of."""
        while self._parent[group] != group:
            self._parent[group] = self._parent[self._parent[group]]
            group = self._parent[group]
        return group

    def has(self, index: int) -> bool:
        """Whether the operation is in a group."""
        return self._group_of[index] is not None

    def owner(self, index: int) -> int:
        """The group of an operation, which is in one."""
        group = self._group_of[index]
        if group is None:
            raise LookupError(f"operation {index} is in no group")
        return self.find(group)

    def owners(self, indices: Iterable[int]) -> list[int]:
        """The groups of those operations that are in one, in their order."""
        return [self.owner(index) for index in indices if self.has(index)]

    def open(self, index: int, kind: str = "") -> int:
        """A new, empty group that this operation anchors, of the kind that it opens unless another is given."""
        fact = self._facts[index]
        self._groups.append(Group(kind or fact.layer, index, aliases=dict(fact.together)))
        self._parent.append(len(self._groups) - 1)
        return len(self._groups) - 1

    def put(self, index: int, group: int) -> None:
        """Puts an operation into a group, whose iteration space grows by its dims."""
        self._group_of[index] = group
        self[group].add(self._facts[index])

    def put_as_is(self, index: int, group: int) -> None:
        """Puts an operation into a group without a say in the group's dims."""
        self._group_of[index] = group
        self[group].members.append(index)

    def merge(self, one: int, other: int) -> None:
        """Makes two groups one."""
        kept, gone = sorted((self.find(one), self.find(other)))
        if kept != gone:
            self._parent[gone] = kept
            group, other_group = self._groups[kept], self._groups[gone]
            before = [group.aliases, other_group.aliases]
            group.take_over(other_group)
            if any(aliases.items() - group.aliases.items() for aliases in before):
                group.keep_to([self._facts[index] for index in group.members])

    def result(self) -> list[Group]:
        """The groups in the order of their anchors, one that updates weights right behind the one that has them; every
        operation in exactly one."""
        found = [group for number, group in enumerate(self._groups) if self.find(number) == number]
        for group in found:
            group.members.sort()
        return sorted(found, key=lambda group: (self._groups[self.owner(group.updates[0])].anchor, 1)
                      if group.updates else (group.anchor, 0))


def corresponding_dims(old: mtf.Shape, new: mtf.Shape) -> list[tuple[mtf.Dimension, mtf.Dimension]]:
    """Pairs of dims of two shapes of equal size whose shards coincide: the outermost dims of every matching run; none
    of tensors without elements."""
    if not old.size:
        return []
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
