"""Which operations compute the new values of a layer's weights: they are a layer of their own where that is wanted.

Then the gradient of a weight goes over an edge as the partial sums that it is (a reduce-scatter where its update is
split), the optimizer's slots lie as the update is split, and the new weight is gathered by who holds it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from pase_mtf.export.groups import Groups
from pase_mtf.export.phases import UPDATE
from pase_mtf.operations.facts import OperationFacts

__all__ = ["UPDATE_LAYER", "open_update_layers"]

UPDATE_LAYER = "update"
"""The kind of such layers."""


def open_update_layers(facts: Sequence[OperationFacts], phases: Sequence[str], groups: Groups) -> None:
    """Opens a layer for every layer with weights that are updated: what leads to the weights of that layer alone, and
    the slots of the optimizer that take part in it.

    What leads to the weights of several layers (a learning rate, the norm of all gradients) stays outside; and so do
    weights whose new value no operation of the optimizer computes, or that several assignments change in one step: what
    comes back from such a layer is the whole new value, which would undo the others.

    Args:
      facts: of the operations of a graph.
      phases: of its operations.
      groups: those of the forward and the backward pass are placed.
    """
    number = {id(fact.operation): fact.index for fact in facts}
    changes = collections.Counter(id(variable) for fact in facts for variable, _ in fact.assigns)
    updated: dict[int, list[int]] = {}  # group of a layer -> its weights that are updated
    for fact in facts:
        for variable, _ in fact.assigns:
            index = number.get(id(variable))
            if (index is not None and variable.trainable and variable.shape.size > 1 and groups.has(index)
                    and changes[id(variable)] == 1):
                updated.setdefault(groups.owner(index), []).append(index)
    owners = {index: owner for owner, indices in updated.items() for index in indices}
    members: dict[int, list[int]] = {}
    for index, leads_to in _led_to(facts, phases, groups, number, owners).items():
        if len(leads_to) == 1:
            members.setdefault(min(leads_to), []).append(index)
    beside: dict[int, int] = {}  # weight -> the group that updates it
    for owner, indices in sorted(members.items()):
        group = groups.open(indices[0], UPDATE_LAYER)
        beside.update(dict.fromkeys(updated[owner], group))
        groups[group].updates = tuple(updated[owner])
        groups[group].aliases = dict(groups[owner].aliases)
        for index in indices:
            # A read of a variable of its own is made where the variable lies.
            leader = number.get(id(facts[index].rule.leader(facts[index].operation)), index)
            groups.put(index, owner if leader != index and groups.has(leader) else group)
    for fact in facts:
        first = number.get(id(fact.assigns[0][0]), -1) if fact.assigns and not groups.has(fact.index) else -1
        if first in beside:
            groups.put_as_is(fact.index, beside[first])


def _led_to(facts: Sequence[OperationFacts], phases: Sequence[str], groups: Groups, number: dict[int, int],
            owners: dict[int, int]) -> dict[int, set[int]]:
    """Operation -> the groups to whose weights it leads, over slots too, of operations of the update that are placed
    nowhere; by their index, in the order of the graph.

    Args:
      facts, phases, groups: of `open_update_layers`.
      number: id of an operation -> its index.
      owners: weight -> its group.
    """
    found: dict[int, set[int]] = {fact.index: set() for fact in facts if phases[fact.index] == UPDATE
                                  and not groups.has(fact.index) and not fact.loops and not fact.assigns}
    known = dict(owners)  # and those of slots, as they are found
    while True:
        for fact in facts:
            for variable, value in fact.assigns:
                owner, maker = known.get(number.get(id(variable), -1)), number.get(id(value.operation))
                if owner is not None and maker in found:
                    found[maker].add(owner)
        for index in reversed(found):
            for source in facts[index].sources:
                maker = number.get(id(source.operation))
                if maker in found:
                    found[maker] |= found[index]
        slots = {index: min(leads_to) for index, leads_to in found.items()
                 if facts[index].rule.is_variable and len(leads_to) == 1 and index not in known}
        if not slots:
            return found
        known.update(slots)
