"""Finds the cheapest strategy for a graph, or makes one that experts would write."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from numbers import Real
from typing import Any

from pase_mtf.arguments import checked_arguments
from pase_mtf.calibration.load import load_machine
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import InfeasibleError, UsageError, nearest, shortened
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.search import Solution, methods, solve
from pase_mtf.search.peak import minimise_within_peak
from pase_mtf.strategy.devices import fuller_devices, useful_devices
from pase_mtf.strategy.experts import BY_HAND, data_parallel, expert
from pase_mtf.strategy.simulated import shortest_simulated
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy, price_assignment, with_configurations

__all__ = ["find_strategy", "least_seconds", "simpler", "solve_within"]


@checked_arguments
def find_strategy(graph: ComputationGraph | Any, devices: int = 8, machine: Machine | str = LOCAL,
                  method: str = "exact", *, mesh: Sequence[tuple[str, int]] | None = None, idle: bool = False,
                  start_from: str | None = None, memory_limit: float | None = None, simple_within: float = 0.0,
                  simulate: int = 0,
                  **options: Any) -> Strategy:
    """Finds the cheapest strategy for a graph on p devices.

    Args:
      graph: a ComputationGraph, or an mtf.Graph (then it is exported first).
      devices: p.
      machine: a Machine, the name of one, or the path of its file; by default the devices at hand, which are measured
        once (`pase_mtf.calibration.load`).
      method: a search method ("exact" by default), "data_parallel" or "expert".
      mesh: axes (name, size) for "expert" (default: what the paper's experts used).
      idle: let layers run on fewer than p devices while the rest idle.
      start_from: "data_parallel" or "expert": where a search that improves a strategy ("mcmc") begins.
      memory_limit: bytes that a device may hold (weights, optimizer slots, gradients, kept activations, communication
        buffers), for "exact".
      simple_within: take data parallelism where it is predicted slower than what a search found by no more than this
        fraction: predictions do not tell such strategies apart, and people do not have to read the other. Then the
        strategy's search says "simpler": "data_parallel", and how far it is from the optimum.
      simulate: simulate a step of so many of the cheapest strategies (as far as they are found in ten seconds), of
        those that are cheapest where the backward pass hides gradients' all-reduces, and of data parallelism, and
        return the one whose step is shortest, for "exact": costs add up, while on devices of their own kernels overlap
        with what is sent. The strategy's search says how many ("simulated"), how long ("simulated_seconds"), and the
        place by cost ("simulated_rank").
      **options: passed to the search (time_limit, gap, progress, ...).

    Returns:
      The strategy, with its predicted cost by part.

    Raises:
      UsageError: an unknown method or machine, fewer than one device, or a `simple_within` below 0.
      InfeasibleError: no strategy satisfies the constraints.
    """
    if type(devices) is not int or devices < 1:
        raise UsageError(f"devices={shortened(devices)}: there must be at least one device")
    if not (isinstance(simple_within, Real) and simple_within >= 0.0):
        raise UsageError(f"simple_within={shortened(simple_within)}: give a fraction of at least 0, such as 0.01")
    if not (memory_limit is None or (isinstance(memory_limit, Real) and memory_limit >= 0.0)):
        raise UsageError(f"memory_limit={shortened(memory_limit)}: give a number of bytes, or None")
    if not (mesh is None or (isinstance(mesh, (tuple, list)) and all(
            isinstance(axis, (tuple, list)) and list(map(type, axis)) == [str, int] for axis in mesh))):
        raise UsageError(f"mesh={shortened(mesh)}: give pairs of a name and a size, such as [(\"rows\", 2)]")
    if type(simulate) is not int or simulate < 0:
        raise UsageError(f"simulate={shortened(simulate)}: give how many strategies to simulate, or 0")
    if simulate and method != "exact":
        raise UsageError(f"method {method!r} finds no strategies to simulate; take \"exact\"")
    if method not in (*methods(), *BY_HAND):
        raise UsageError(f"unknown method {method!r}; {nearest(method, [*methods(), *BY_HAND])}")
    if start_from is not None and start_from not in BY_HAND:
        raise UsageError(f"unknown start {start_from!r}; {nearest(start_from, BY_HAND)}")
    if not isinstance(graph, ComputationGraph):
        # Exporting needs TensorFlow, which a search alone does not.
        from pase_mtf.export.exporter import export_graph
        graph = export_graph(graph)
    machine = load_machine(machine, devices)
    if method in BY_HAND:
        return evaluate_strategy(graph, _by_hand(graph, devices, method, mesh), devices, machine, name=method)
    if not graph.layers:
        raise InfeasibleError(f"{graph.name}: the graph has no layers; build the model before searching")
    start = time.perf_counter()
    priced = build_network(graph, machine, devices, idle=idle)
    built = time.perf_counter()
    if start_from is not None:
        priced, options["initial"] = with_configurations(priced, _by_hand(graph, devices, start_from, mesh))
    if method == "exact":
        options.setdefault("certificate", False)  # as slow as the search itself; ask for it to have it checked
    if memory_limit is not None and method == "exact":
        solution = solve_within(priced, memory_limit, options)
    elif memory_limit is not None:
        raise UsageError(f"method {method!r} keeps to no memory limit; take \"exact\"")
    else:
        solution = solve(priced.network, method, **options)
    simulated: dict[str, Any] = {}
    if simulate:
        solution, simulated = shortest_simulated(priced, solution, simulate, memory_limit)
    found = price_assignment(method, priced, solution.assignment, {
        "seconds": time.perf_counter() - start, "build_seconds": built - start, "optimal": solution.optimal,
        "gap": solution.gap, "lower_bound": solution.lower_bound, "layers": len(graph.layers),
        "configurations": sum(map(len, priced.configurations)), "method": method, **simulated})
    found.search.update(useful_devices=useful_devices(graph, found.configurations),
                        suggested_devices=fuller_devices(graph, devices, found.configurations))
    return simpler(found, priced, memory_limit, simple_within) if simple_within > 0.0 else found


def least_seconds(graph: ComputationGraph, devices: int, machine: Machine, memory_limit: float | None = None) -> float:
    """What a step of the cheapest strategy takes: `find_strategy(...).seconds`, without the strategy itself.

    Args:
      graph, devices, machine, memory_limit: as of `find_strategy`.

    Raises:
      InfeasibleError: no strategy satisfies the limit.
    """
    priced, options = build_network(graph, machine, devices), {"certificate": False}
    return priced.breakdown(solve_within(priced, memory_limit, options).assignment).total


def solve_within(priced: PricedNetwork, memory_limit: float | None, options: dict[str, Any]) -> Solution:
    """The cheapest assignment that needs no more than so many bytes per device (None: however many)."""
    if memory_limit is None:
        return solve(priced.network, "exact", **options)
    return minimise_within_peak(priced.network, functools.cache(priced.memory_with), priced.peak_memory, memory_limit,
                                **options)


def _by_hand(graph: ComputationGraph, devices: int, name: str,
             mesh: Sequence[tuple[str, int]] | None) -> tuple[Configuration, ...]:
    """One of `BY_HAND`, a configuration per layer."""
    return data_parallel(graph, devices) if name == "data_parallel" else expert(graph, devices, mesh)


def simpler(found: Strategy, priced: PricedNetwork, memory_limit: float | None, within: float) -> Strategy:
    """Data parallelism if it is as good within a fraction and keeps the limit, else what was found."""
    try:
        by_hand = data_parallel(priced.graph, priced.devices)
    except InfeasibleError:
        return found  # the batch does not divide by so many devices
    useful = {"useful_devices": useful_devices(priced.graph, by_hand)}
    simple = price_assignment(found.name, *with_configurations(priced, by_hand), {**found.search, **useful})
    if simple.configurations == found.configurations or simple.seconds > (1.0 + within) * found.seconds or (
            memory_limit is not None and simple.memory_bytes > memory_limit):
        return found
    bound = found.search["lower_bound"]
    return dataclasses.replace(simple, search={
        **simple.search, "optimal": False, "gap": simple.seconds / bound - 1.0 if bound > 0.0 else math.inf,
        "simpler": "data_parallel", "best_seconds": found.seconds})
