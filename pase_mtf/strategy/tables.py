"""Strategies as tables, for people: the whole of one, the alternatives of a layer, and how two differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tabulate import tabulate

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.graph.configurations import Configuration

__all__ = ["LayerSeconds", "alternatives_table", "difference_table", "layers_table", "seconds_by_kind"]

_ALIKE = "(layers split alike)"


class LayerSeconds(NamedTuple):
    """What a layer takes: computing, all-reduces of partial sums, and moving tensors, within it and between layers."""

    compute: float
    collectives: float
    resharding: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.collectives + self.resharding


def seconds_by_kind(parts: Mapping[str, float], between: float) -> LayerSeconds:
    """Sorts the parts of a layer's cost; every table here goes by this.

    Args:
      parts: part of the cost -> seconds, of the layer by itself; its "resharding forward" and so on moves within it.
      between: seconds of moving tensors to it and from it.
    """
    inside = sum(seconds for part, seconds in parts.items() if part.startswith("resharding"))
    collectives = sum(seconds for part, seconds in parts.items() if part.startswith("all-reduce"))
    return LayerSeconds(sum(parts.values()) - inside - collectives, collectives, inside + between)


def layers_table(names: Sequence[str], configurations: Sequence[Configuration], costs: Sequence[LayerSeconds],
                 group: bool) -> str:
    """A row per layer; of layers with equal names but for numbers, and equal splits, one row where `group` is set."""
    rows: dict[tuple[str | int, str], list[tuple[str, LayerSeconds]]] = {}
    for number, (name, configuration, cost) in enumerate(zip(names, configurations, costs, strict=True)):
        key = _without_numbers(name) if group else number
        rows.setdefault((key, str(configuration)), []).append((name, cost))
    # A layer that has a row to itself keeps its number: which one "fc*" is nobody could tell.
    body = [[_without_numbers(found[0][0]) if len(found) > 1 else found[0][0],
             str(len(found)) if len(found) > 1 else "", split,
             *(f"{1e3 * sum(seconds):.3f}" for seconds in zip(*(cost for _, cost in found), strict=True))]
            for (_, split), found in rows.items()]
    head = ["layer", "times", "split", "compute ms", "collectives ms", "resharding ms"]
    return _table(head, body, "lrlrrr")


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def alternatives_table(priced: PricedNetwork, layer: int, assignment: Sequence[int], most: int,
                       why_not: Callable[[int], str]) -> str:
    """The configurations of a layer and what each would cost, with those of all other layers as they are.

    Args:
      priced: the network that offers them.
      layer: which one.
      assignment: index of the chosen configuration of every layer.
      most: how many to show, best first; the chosen one is always among them.
      why_not: says why one that seems to cost no more than the chosen one was not taken, by its index.
    """
    near = [number for number, edge in enumerate(priced.graph.edges) if layer in (edge.source, edge.target)]
    rows = [(_cost_of_choice(priced, layer, choice, assignment, near), choice)
            for choice in range(len(priced.configurations[layer]))]
    rows.sort(key=lambda row: (row[0].total, row[1] != assignment[layer]))
    own = next(row for row in rows if row[1] == assignment[layer])
    shown = rows[:most] if own in rows[:most] else [*rows[:most - 1], own]
    body = [[str(priced.configurations[layer][choice]),
             *(f"{1e3 * seconds:.4f}" for seconds in (cost.total, *cost)),
             f"{1e3 * (cost.total - own[0].total):+.4f}",
             "chosen" if choice == own[1] else _lost_on(cost, own[0]) or why_not(choice)]
            for cost, choice in shown]
    head = ["split", "total ms", "compute", "collectives", "resharding", "difference", "why"]
    found = priced.graph.layers[layer]
    dims = ", ".join(f"{name}={size}" for name, size in found.dims.items())
    return (f"{found.name} ({found.kind}; {dims}): {len(rows)} configurations, the rest of the strategy as it is\n"
            + _table(head, body, "lrrrrrl"))


def _cost_of_choice(priced: PricedNetwork, layer: int, choice: int, assignment: Sequence[int],
                    near: Sequence[int]) -> LayerSeconds:
    """What a layer costs under a configuration, together with all that moves to it and from it, over these edges."""
    chosen = [*assignment]
    chosen[layer] = choice
    ends = ((number, priced.graph.edges[number]) for number in near)
    between = sum(priced.edge_cost(number, chosen[edge.source], chosen[edge.target]) for number, edge in ends)
    return seconds_by_kind(priced.layer_parts(layer, choice), between)


def _lost_on(cost: LayerSeconds, chosen: LayerSeconds) -> str:
    """On what an alternative loses most against what was chosen; empty where it does not lose."""
    if cost.total <= chosen.total:
        return ""
    worse = [(mine - theirs, name) for mine, theirs, name in zip(cost, chosen, LayerSeconds._fields, strict=True)]
    return f"loses on {max(worse)[1]}"


def difference_table(names: Sequence[str], mine: Sequence[tuple[Configuration, LayerSeconds]],
                     theirs: Sequence[tuple[Configuration, LayerSeconds]], heads: tuple[str, str]) -> str:
    """The layers that two strategies split differently, and how much longer each takes in the second; empty for none.

    What the others take longer, to and from which more moves, is the last row: all rows together are the difference of
    the two strategies.

    Args:
      names: of the layers.
      mine, theirs: per layer its configuration and what it costs.
      heads: names of the two strategies.
    """
    body, alike = [], 0.0
    for name, (split, cost), (other_split, other_cost) in zip(names, mine, theirs, strict=True):
        difference = other_cost.total - cost.total
        if split == other_split:
            alike += difference
        else:
            body.append([name, str(split), str(other_split), _signed(difference)])
    if body and float(_signed(alike)):
        body.append([_ALIKE, "", "", _signed(alike)])
    return _table(["layer", *heads, "difference ms"], body, "lllr") if body else ""


def _table(head: Sequence[str], body: Sequence[Sequence[str]], columns: str) -> str:
    """Cells as they are, in columns that are flush left ("l") or right ("r")."""
    sides = ["left" if side == "l" else "right" for side in columns]
    return tabulate(body, head, disable_numparse=True, colalign=sides)


def _signed(seconds: float) -> str:
    return f"{1e3 * seconds:+.3f}" if math.isfinite(seconds) else str(seconds)
