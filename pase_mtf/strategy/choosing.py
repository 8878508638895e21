"""Whether another strategy is taken instead of what was found: data parallelism, where it is as good, or one that
turned out to be faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.simulator.schedule import LONGEST
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.strategy.devices import fuller_devices, useful_devices
from pase_mtf.strategy.experts import data_parallel, most_devices
from pase_mtf.strategy.search_report import SearchReport
from pase_mtf.strategy.strategy import Strategy, price_assignment, with_configurations

__all__ = ["gap_above", "outdone", "simple_configurations", "simpler"]

_OF_WHAT_WAS_FOUND = ("simpler", "best_seconds", "overlap", "simulated", "simulated_rank", "simulated_seconds",
                      "cheapest_simulated_seconds", "shortest_simulated_seconds", "first_simulated_seconds")
"""What a search says of the one strategy that it found, beside what is found out anew."""


def gap_above(seconds: float, bound: float) -> float:
    """By what fraction a step of so many seconds is above those that no step takes less than; inf where these are not
    known (0 or less)."""
    return max(0.0, seconds / bound - 1.0) if bound > 0.0 else math.inf


def simple_configurations(graph: ComputationGraph, devices: int) -> tuple[Configuration, ...] | None:
    """Data parallelism over as many devices as the batch splits over, while the others idle; None where that is one of
    several.

    Args:
      graph: of the program.
      devices: p.
    """
    try:
        count = most_devices(data_parallel, graph, devices)
        return data_parallel(graph, count) if count > 1 or devices == 1 else None
    except InfeasibleError:
        return None  # no dim can be split at all


def simpler(found: Strategy, priced: PricedNetwork, memory_limit: float | None, within: float) -> Strategy:
    """Data parallelism (`simple_configurations`) if it is as good within a fraction and keeps the limit, else what was
    found. Where simulated steps judged what was found, they judge that too."""
    by_hand = simple_configurations(priced.graph, priced.devices)
    if by_hand is None:
        return found
    own: SearchReport = {"useful_devices": useful_devices(priced.graph, by_hand),
                         "suggested_devices": fuller_devices(priced.graph, priced.devices, by_hand)}
    priced, assignment = with_configurations(priced, by_hand)
    simple = price_assignment(found.name, priced, assignment, {**found.search, **own})
    if simple.configurations == found.configurations or (
            memory_limit is not None and simple.memory_bytes > memory_limit):
        return found
    judged = "simulated" in found.search
    if judged and simple.seconds > LONGEST:  # too long to be simulated, which what was found is not
        return found
    taken, least = ((Simulator(priced).seconds(assignment), found.search["simulated_seconds"]) if judged
                    else (simple.seconds, found.seconds))
    if taken > (1.0 + within) * least:
        return found
    told: SearchReport = {
        **simple.search, "optimal": False, "gap": gap_above(simple.seconds, found.search["lower_bound"]),
        "simpler": "data_parallel", "best_seconds": found.seconds}
    if judged:
        # One that idles devices is not among those that were simulated, and may be shorter than all of them.
        told.update({"simulated_seconds": taken, "shortest_simulated_seconds": min(
            taken, found.search.get("shortest_simulated_seconds", least))})
        told.pop("simulated_rank", None)  # those of what was found
        told.pop("cheapest_simulated_seconds", None)
    return dataclasses.replace(simple, search=told)


def outdone(search: SearchReport, graph: ComputationGraph, devices: int, configurations: Sequence[Configuration],
            seconds: float) -> SearchReport:
    """What a search has to say of a strategy that is taken in place of what it found.

    Args:
      search: of what it found.
      graph: of the program.
      devices: p.
      configurations: of the other strategy.
      seconds: predicted of its step.
    """
    told: SearchReport = {**search, "optimal": False,
                          "gap": gap_above(seconds, search.get("lower_bound", -math.inf)),
                          "useful_devices": useful_devices(graph, configurations),
                          "suggested_devices": fuller_devices(graph, devices, configurations)}
    for name in _OF_WHAT_WAS_FOUND:
        told.pop(name, None)  # type: ignore[misc]
    return told
