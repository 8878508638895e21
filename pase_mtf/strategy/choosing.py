"""Whether data parallelism is taken instead of what was found: where it is as good."""

from __future__ import annotations

import dataclasses
import math

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import InfeasibleError
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.strategy.devices import useful_devices
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.search_report import SearchReport
from pase_mtf.strategy.strategy import Strategy, price_assignment, with_configurations

__all__ = ["simpler"]


def simpler(found: Strategy, priced: PricedNetwork, memory_limit: float | None, within: float) -> Strategy:
    """Data parallelism if it is as good within a fraction and keeps the limit, else what was found. Where simulated
    steps judged what was found, they judge that too."""
    try:
        by_hand = data_parallel(priced.graph, priced.devices)
    except InfeasibleError:
        return found  # the batch does not divide by so many devices
    useful = useful_devices(priced.graph, by_hand)
    priced, assignment = with_configurations(priced, by_hand)
    simple = price_assignment(found.name, priced, assignment, {**found.search, "useful_devices": useful})
    if simple.configurations == found.configurations or (
            memory_limit is not None and simple.memory_bytes > memory_limit):
        return found
    judged = "simulated" in found.search
    taken, least = ((Simulator(priced).seconds(assignment), found.search["simulated_seconds"]) if judged
                    else (simple.seconds, found.seconds))
    if taken > (1.0 + within) * least:
        return found
    bound = found.search["lower_bound"]
    told: SearchReport = {
        **simple.search, "optimal": False, "gap": simple.seconds / bound - 1.0 if bound > 0.0 else math.inf,
        "simpler": "data_parallel", "best_seconds": found.seconds}
    if judged:
        told.update({"simulated_seconds": taken, "shortest_simulated_seconds": least})
    return dataclasses.replace(simple, search=told)
