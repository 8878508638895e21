"""How many devices do work of their own under a strategy, and how many could."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pase_mtf.amounts import gap_text
from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration

__all__ = ["above_text", "devices_text", "fuller_devices", "is_below_bound", "useful_devices"]

_MORE = 1.01
"""How much more useful work other numbers of devices have to promise to be suggested."""
_BELOW = 1.0 - 1e-9
"""Of a bound: what is less is below it by more than rounding."""


def is_below_bound(search: Mapping[str, Any], seconds: float) -> bool:
    """Whether a step takes less, by more than rounding, than the bound of the search of its strategy: as only one that
    leaves devices idle can.

    Args:
      search: of a strategy.
      seconds: predicted of its step.
    """
    return bool(seconds < _BELOW * search.get("lower_bound", 0.0))


def above_text(search: Mapping[str, Any], seconds: float) -> str:
    """How far a step is above the optimum at most, for people. One that leaves devices idle may take less than any
    over all of them, which are what a search bounds: then nothing is known of others that leave some idle.

    Args:
      search: of a strategy; it tells a "gap".
      seconds: predicted of its step.
    """
    if is_below_bound(search, seconds):
        return "predicted faster than any strategy over all devices"
    return gap_text(search["gap"])


def useful_devices(graph: ComputationGraph, configurations: Sequence[Configuration]) -> float:
    """How many devices do distinct work: all the work there is, by the part of it that one device does.

    Where a layer is split into fewer shards than there are devices the others repeat the work, or idle.

    Args:
      graph: whose FLOP are the work.
      configurations: one per layer.

    Returns:
      from 1 to p; 1 where there is no work.
    """
    return _useful(graph, [math.prod(configuration.splits.values()) for configuration in configurations])


def _useful(graph: ComputationGraph, shards: Sequence[int]) -> float:
    work = [math.fsum(operation.flops * operation.trips for operation in layer.operations) for layer in graph.layers]
    mine = math.fsum(flops / count for flops, count in zip(work, shards, strict=True))
    # Where all is split alike a quotient of sums may be above that by their rounding.
    return min(math.fsum(work) / mine, float(max(shards))) if mine > 0.0 else 1.0


def fuller_devices(graph: ComputationGraph, devices: int, configurations: Sequence[Configuration]) -> int | None:
    """Fewer devices that could all together do more distinct work than a strategy makes p of them do.

    Args:
      graph: of the model.
      devices: p.
      configurations: of the strategy, one per layer.

    Returns:
      the number below p with the most useful work if every layer is split as far as it can be (of equals the least);
      None where it is no more than that of the strategy, and where the strategy leaves whole what p could split: then
      splitting does not pay, over however many.
    """
    own = useful_devices(graph, configurations)
    best, found = own * _MORE, None
    if best >= devices - 1:
        return None
    kinds: dict[tuple[tuple[str, int], ...], list[Layer]] = {}
    for layer in graph.layers:
        kinds.setdefault(tuple((name, layer.dims[name]) for name in layer.splittable), []).append(layer)

    def most_useful(count: int) -> float:
        shards = {id(layer): most for layers in kinds.values()
                  for most in [_most_shards(layers[0], count)] for layer in layers}
        return _useful(graph, [shards[id(layer)] for layer in graph.layers])

    if own < _MORE < most_useful(devices):
        return None
    for count in range(1, devices):
        useful = most_useful(count)
        if useful > best:
            best, found = useful * _MORE, count
    return found


def _most_shards(layer: Layer, devices: int) -> int:
    """Into how many shards a layer can be split over so many devices."""
    reached = {1}
    for name in layer.splittable:
        common = math.gcd(layer.dims[name], devices)
        factors = [n for n in range(1, common + 1) if common % n == 0]
        reached = {have * n for have in reached for n in factors if devices % (have * n) == 0}
        if devices in reached:
            return devices
    return max(reached)


def devices_text(devices: int, useful: float, suggested: int | None) -> str:
    """What people are told where not all devices do distinct work; empty where they do.

    Args:
      devices: p.
      useful: of `useful_devices`.
      suggested: of `fuller_devices`.
    """
    if useful > 0.995 * devices:
        return ""
    text = f"{useful:.3g} of {devices} devices do useful work (the others repeat it or idle)"
    return f"{text}; leave some idle: try --mesh={suggested}" if suggested else text
