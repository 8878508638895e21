"""Finds the cheapest strategy for a graph, or makes one that experts would write."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pase_mtf.arguments import as_float, checked_arguments
from pase_mtf.calibration.load import GivenMachine, are_measured, is_local, load_machine
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import InfeasibleError, UsageError, nearest, shortened
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.search import Solution, methods, solve
from pase_mtf.search.budget import SEARCH_MEMORY, Budget
from pase_mtf.strategy.by_kernels import Telling, kernel_times, prices_by_kernels
from pase_mtf.strategy.choosing import gap_above, simpler
from pase_mtf.strategy.devices import fuller_devices, useful_devices
from pase_mtf.strategy.experts import BY_HAND, by_hand, start_by_hand
from pase_mtf.strategy.kernels_text import untraced_text
from pase_mtf.strategy.search_report import SearchReport
from pase_mtf.strategy.simulated import shortest_simulated, walk_simulated, worth_simulating
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy, price_assignment, with_configurations
from pase_mtf.strategy.within import solve_within

__all__ = ["find_strategy", "least_seconds", "simpler", "solve_within"]


@checked_arguments
def find_strategy(graph: ComputationGraph | Any, devices: int = 8, machine: GivenMachine = LOCAL,
                  method: str = "exact", *, mesh: Sequence[tuple[str, int]] | None = None, idle: bool = False,
                  start_from: str | None = None, memory_limit: float | None = None, simple_within: float = 0.0,
                  simulate: int | None = None, prices: str | None = None, measure_seconds: float = 60.0,
                  sharded_updates: bool = False, known: Sequence[Configuration] | None = None,
                  **options: Any) -> Strategy:
    """Finds the cheapest strategy for a graph on p devices.

    Args:
      graph: a ComputationGraph, or an mtf.Graph (then it is exported first).
      devices: p.
      machine: a Machine, the name of one, the path of its file, or "local" (None is the same): the devices at hand,
        which are measured once (`pase_mtf.calibration.load`). Or the path of a file of kernel times that
        `python -m pase_mtf.calibration --save` wrote where they were measured: then the strategy is the best there, and
        nothing is measured here.
      method: a search method ("exact" by default), "data_parallel", "expert", or "zero": data parallelism with sharded
        updates.
      mesh: two axes (name, size) for "expert", as method or start, of a graph with attention heads (default: what the
        paper's experts used).
      idle: let layers run on fewer than p devices while the rest idle.
      start_from: "data_parallel", "expert" or "zero": where a search that improves a strategy ("mcmc") begins; over
        fewer devices where there is none for all of them.
      memory_limit: bytes that a device may hold (weights, optimizer slots, gradients, kept activations, communication
        buffers), for "exact".
      simple_within: take data parallelism (where the batch does not split over all devices: over the most that it
        splits over, while the others idle) where it is predicted slower than what a search found by no more than this
        fraction: predictions do not tell such strategies apart, and people do not have to read the other. Then the
        strategy's search says "simpler": "data_parallel", and how far it is from the optimum.
      simulate: how many of the cheapest strategies (as far as they are found in ten seconds) to simulate a step of,
        for "exact": costs add up, while on devices of their own kernels overlap with what is sent. Simulated as well
        are those that are cheapest where the backward pass hides gradients' all-reduces, and data parallelism; the one
        whose step is shortest is returned, or the cheapest of those that take longer by a thousandth at most. The
        strategy's search says how many ("simulated"), how long ("simulated_seconds"), and the place by cost
        ("simulated_rank"). For "mcmc": walk on simulated steps, not on
        costs, if it is not 0. By default "exact" simulates up to ten (fewer of a large network) where the machine's
        devices have cores of their own and are no more than 64; 0: the cheapest is returned.
      prices: "roofline": by the rates of the machine; "measured": by the TensorFlow kernels that strategies run on the
        CPUs at hand, each timed once, when a strategy that may be the best runs it, and kept (docs/launcher.md). For an
        mtf.Graph, and "exact", "mcmc" or a method written by hand. The strategy's search says how many "kernels" it
        consists of, and of how many the times are measured; those of the others are estimated. None: "measured" where
        the machine is a file of kernel times, else "roofline".
      measure_seconds: with measured prices, how long to look and to measure.
      sharded_updates: of an mtf.Graph, make the updates of every layer's weights a layer beside it, which may be split
        in another way: devices that hold the same weights then need not all update all of them, nor keep all of the
        optimizer's slots. (Of a ComputationGraph `export_graph` decides that.)
      known: a strategy, a configuration per layer, for "exact" with a memory limit that it keeps: what the search finds
        costs no more.
      **options: passed to the search (`progress`, and those of the method). `gap`: by what fraction it may cost more
        than the cheapest. `time_limit`: seconds for all that is searched and simulated once the costs are there. "mcmc"
        on simulated steps takes `initial`, `proposals`, `time_limit`, `seed` and `beta` only, measured prices `seed`
        only, a method written by hand none.

    Returns:
      The strategy, with its predicted cost by part.

    Raises:
      UsageError: an unknown method or machine, fewer than one device, a `simple_within` below 0, an argument or option
        of a wrong type, or one that the method, simulated steps or measured prices do not take.
      InfeasibleError: no strategy satisfies the constraints.
      FormatError: the file of the machine, or of kernel times, is missing, truncated or foreign.
    """
    _check(devices, method, mesh, start_from, memory_limit, simple_within, simulate, measure_seconds, known, options)
    memory_limit = None if memory_limit is None else as_float(memory_limit)
    simple_within, measure_seconds = as_float(simple_within), as_float(measure_seconds)
    measured = are_measured(prices, machine)
    if sharded_updates and isinstance(graph, ComputationGraph):
        raise UsageError(f"sharded_updates=True: {shortened(graph.name)} is exported already; give its mtf.Graph, or "
                         "export_graph(..., sharded_updates=True)")
    if measured:
        refused = {"simulate": simulate, "idle": idle, **options}
        refused.pop("seed", None)
        for name in (name for name, value in refused.items() if value):
            raise UsageError(f"{name} is for roofline prices; leave it out, or take those and a data sheet")
        return _by_measured_kernels(graph, devices, machine, method, mesh, start_from, memory_limit, simple_within,
                                    measure_seconds, options.get("seed", 0), sharded_updates, known)
    if not isinstance(graph, ComputationGraph):
        # Exporting needs TensorFlow, which a search alone does not.
        from pase_mtf.export.exporter import export_graph
        graph = export_graph(graph, sharded_updates=sharded_updates)
    machine = load_machine(machine, devices)
    machine.check_devices(devices)  # before all meshes of so many are tried
    if method in BY_HAND:
        return evaluate_strategy(graph, by_hand(graph, devices, method, mesh), devices, machine, name=method)
    if not graph.layers:
        raise InfeasibleError(f"{graph.name}: the graph has no layers; build the model before searching")
    start = time.perf_counter()
    priced = build_network(graph, machine, devices, idle=idle)
    built = time.perf_counter()
    if start_from is not None:
        priced, options["initial"] = with_configurations(priced, start_by_hand(graph, devices, start_from, mesh))
    solution, simulated = _solved(priced, method, memory_limit, simulate, known, options)
    found = price_assignment(method, priced, solution.assignment, {
        "seconds": time.perf_counter() - start, "build_seconds": built - start, "optimal": solution.optimal,
        "gap": 0.0 if solution.optimal else gap_above(solution.cost, solution.lower_bound),
        "lower_bound": solution.lower_bound, "layers": len(graph.layers),
        "configurations": sum(map(len, priced.configurations)), "method": method, **simulated})
    found.search.update({"useful_devices": useful_devices(graph, found.configurations),
                         "suggested_devices": fuller_devices(graph, devices, found.configurations)})
    if memory_limit is not None and math.isfinite(memory_limit):
        found.search["memory_limit"] = memory_limit  # which `explain` names
    return simpler(found, priced, memory_limit, simple_within) if simple_within > 0.0 else found


def _check(devices: int, method: str, mesh: Sequence[tuple[str, int]] | None, start_from: str | None,
           memory_limit: float | None, simple_within: float, simulate: int | None, measure_seconds: float,
           known: object, options: Mapping[str, object]) -> None:
    """Raises UsageError for the first argument of `find_strategy` that is none, or that goes with no other."""
    if type(devices) is not int or devices < 1:
        raise UsageError(f"devices={shortened(devices)}: there must be at least one device")
    if not as_float(simple_within) >= 0.0:
        raise UsageError(f"simple_within={shortened(simple_within)}: give a fraction of at least 0, such as 0.01")
    if not (memory_limit is None or as_float(memory_limit) >= 0.0):
        raise UsageError(f"memory_limit={shortened(memory_limit)}: give a number of bytes, or None")
    if not (mesh is None or (isinstance(mesh, (tuple, list)) and all(
            isinstance(axis, (tuple, list)) and list(map(type, axis)) == [str, int] and axis[1] > 0 for axis in mesh))):
        raise UsageError(f"mesh={shortened(mesh)}: give pairs of a name and a size, such as [(\"rows\", 2)]")
    if not (simulate is None or (type(simulate) is int and simulate >= 0)):
        raise UsageError(f"simulate={shortened(simulate)}: give how many strategies to simulate, or 0")
    if simulate and method not in ("exact", "mcmc"):
        raise UsageError(f"method {method!r} finds no strategies to simulate; take \"exact\"")
    if method not in (*methods(), *BY_HAND):
        raise UsageError(f"unknown method {method!r}; {nearest(method, [*methods(), *BY_HAND])}")
    if start_from is not None and start_from not in BY_HAND:
        raise UsageError(f"unknown start {start_from!r}; {nearest(start_from, BY_HAND)}")
    if start_from is not None and method in ("exact", *BY_HAND):
        raise UsageError(f"start_from={start_from!r}: method {method!r} begins nowhere; take \"mcmc\", or leave it out")
    if mesh is not None and "expert" not in (method, start_from):
        raise UsageError(f"mesh={shortened(mesh)} is for \"expert\", as method or start; method {method!r} does not "
                         "use it: leave it out")
    for name in options if method in BY_HAND else ():
        raise UsageError(f"method {method!r} searches nothing and has no option {name!r}; leave it out")
    if memory_limit is not None and method != "exact":
        raise UsageError(f"method {method!r} keeps to no memory limit; take \"exact\"")
    if memory_limit is None and known is not None:
        raise UsageError("known: only a search within a memory limit begins with a strategy; leave it out, or give "
                         "memory_limit")
    if not measure_seconds > 0.0:
        raise UsageError(f"measure_seconds={shortened(measure_seconds)}: give seconds, such as 60")


def _solved(priced: PricedNetwork, method: str, memory_limit: float | None, simulate: int | None,
            known: Sequence[Configuration] | None, options: dict[str, Any]) -> tuple[Solution, SearchReport]:
    """The assignment that a method finds, and what is to be said of simulated steps."""
    if (above := as_float(options.get("gap"))) >= 0.0:  # the search says what is wrong with another
        options["gap"] = _of_the_cost(above)
    if method == "mcmc" and simulate:
        return walk_simulated(priced, **options)
    if method != "exact":
        return solve(priced.network, method, **options), {}
    options.setdefault("certificate", False)  # as slow as the search itself; ask for it to have it checked
    budget = Budget.of(options.get("time_limit"), options.get("search_memory", SEARCH_MEMORY))
    solution = solve_within(priced, memory_limit, options, known=known)
    most = worth_simulating(priced) if simulate is None else simulate
    if not most:
        return solution, {}
    return shortest_simulated(priced, solution, most, memory_limit, budget)


def _by_measured_kernels(graph: object, devices: int, machine: GivenMachine, method: str,
                         mesh: Sequence[tuple[str, int]] | None, start_from: str | None, memory_limit: float | None,
                         simple_within: float, seconds: float, seed: int, sharded_updates: bool,
                         known: Sequence[Configuration] | None) -> Strategy:
    """`find_strategy` by what the kernels of a program take."""
    if isinstance(graph, ComputationGraph):
        raise UsageError(f"measured prices take the program itself, an mtf.Graph; the exported {shortened(graph.name)} "
                         "does not tell its kernels: give what it was exported from, or take roofline prices")
    if method not in ("exact", "mcmc", *BY_HAND):
        raise UsageError(f"method {method!r} is for roofline prices; take \"exact\"")
    tell = Telling()
    # A wrong file is told before TensorFlow is loaded; what cannot be written by hand, before anything is measured.
    early = method == "exact" or not is_local(machine)
    kernels = kernel_times(machine, devices, tell=tell) if early else None
    # Exporting needs TensorFlow, which a search alone does not.
    from pase_mtf.export.exporter import export_graph
    exported = export_graph(graph, sharded_updates=sharded_updates)
    given: tuple[Configuration, ...] = ()
    if method in BY_HAND:
        given = by_hand(exported, devices, method, mesh)
    elif method == "mcmc":
        given = start_by_hand(exported, devices, start_from or "data_parallel", mesh)
    prices = prices_by_kernels(graph, exported, kernels or kernel_times(machine, devices, tell=tell), tell)
    if method in BY_HAND:
        found = prices.evaluate(given, method, seconds=seconds)
    elif method == "mcmc":
        found = prices.improve(given, method, seconds=seconds, seed=seed)
    else:
        found = prices.find(seconds=seconds, memory_limit=memory_limit, simple_within=simple_within,
                            known=known)
    if note := untraced_text(found.search):
        tell.note(note)
    return found


def _of_the_cost(gap: float) -> float:
    """A gap above the least as searches count it, of the cost: what is 25 % above the least is a fifth of the cost."""
    return gap / (1.0 + gap) if gap < math.inf else gap


def least_seconds(graph: ComputationGraph, devices: int, machine: Machine, memory_limit: float | None = None,
                  gap: float = 0.0) -> float:
    """What a step of the cheapest strategy takes: `find_strategy(...).seconds`, without the strategy itself.

    Args:
      graph, devices, machine, memory_limit: as of `find_strategy`.
      gap: by what fraction it may cost more than the cheapest.

    Raises:
      InfeasibleError: no strategy satisfies the limit.
    """
    priced, options = build_network(graph, machine, devices), {"certificate": False, "gap": _of_the_cost(gap)}
    return priced.breakdown(solve_within(priced, memory_limit, options, patience=1.0).assignment).total
