"""The strategy of every arm."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pase_mtf.amounts import bytes_text, needed_text
from pase_mtf.errors import InfeasibleError, MismatchError, OutOfMemoryError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.launch.arms.program import flags_of
from pase_mtf.launch.console import Stage
from pase_mtf.launch.flag_values import PIPELINE, ArmName, is_called
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.possible import why_left_out
from pase_mtf.launch.strategies.auto_mtf import auto_mtf_layout, auto_mtf_mesh
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.choosing import simple_configurations
from pase_mtf.strategy.experts import (
    BY_HAND,
    configurations_of_layout,
    data_parallel,
    expert,
    expert_axes,
    most_devices,
    start_by_hand,
    zero,
)
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.simulated import is_simulated
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

__all__ = ["MAIN_SHARE", "SIMPLE_WITHIN", "Found", "as_stock", "changed_configurations", "check_files", "duplicates",
           "find_strategies", "possible_arms", "random_configurations", "share_of", "strategy_by_hand", "too_large"]

SIMPLE_WITHIN = 0.01
"""Data parallelism is trained where the best strategy is predicted faster by no more than this fraction: a promise so
small is not kept in a measurement, and its layout is one more thing to understand."""


MAIN_SHARE = 2 / 3
"""Of the time for measuring, for what is trained."""
_LATER_SHARE = 1 / 30
"""Of the time for measuring, that a search takes in later runs of a program: who trains again wants to train."""

_OF_BEST = ("changed", "within")
"""Arms that are made of the best strategy, or of its prices."""
_PROPOSALS, _MCMC_SECONDS = 10_000, 20.0
"""What a chain on simulated steps may use: the first ends it for small graphs, always with the same strategy."""


class Found(NamedTuple):
    """The strategies of a run.

    Attributes:
      strategies: arm -> strategy, the one of --strategy first; stock Mesh-TF has none, nor has a pipeline.
      left_out: arm -> why there is none to compare with.
    """

    strategies: dict[str, Strategy]
    left_out: dict[str, str]


def possible_arms(plan: Plan, graph: ComputationGraph) -> tuple[ArmName, ...]:
    """The arms of a run, the one of --strategy first: where an expert to compare with has no strategy for all devices,
    it is an arm of its own name over as many as it has one for, while the others idle."""
    main, *others = plan.options.arms
    return (main, *(_fitting_expert(arm, plan, graph) if arm.method == "expert" else arm for arm in others))


def _fitting_expert(arm: ArmName, plan: Plan, graph: ComputationGraph) -> ArmName:
    mesh = plan.options.mesh_flag
    try:
        expert(graph, mesh.devices, expert_axes(graph, mesh.axes))
    except InfeasibleError:
        count = most_devices(expert, graph, mesh.devices)
        if count > 1:  # over all devices where it fails on the axes of --mesh alone
            name = f"{arm.name}_{count}" if count < mesh.devices else arm.name
            return dataclasses.replace(arm, name=name, argument=str(count))
    return arm


def find_strategies(plan: Plan, graph: ComputationGraph, machine: Machine,
                    prices: MeasuredPrices | None = None, seconds: float | None = None,
                    known: Sequence[Configuration] | None = None) -> Found:
    """Finds or loads the strategy of every arm that has one; one to compare with that cannot be is left out.

    Args:
      plan: of the run: arms, devices and seed.
      graph: of the program.
      machine: whose numbers count.
      prices: the prices of measured kernels, which count in their stead.
      seconds: how long kernels may be measured; None: as long as all of the run may.
      known: a strategy within --memory_limit, which a search within it begins with.

    Raises:
      InfeasibleError: the arm of --strategy: no strategy satisfies the constraints.
      OutOfMemoryError: it needs more memory than --memory_limit.
      MismatchError: a strategy file is for another graph, or for another number of devices.
      FormatError: a strategy file is truncated or foreign.
    """
    arms = possible_arms(plan, graph)
    main, *_ = arms
    left_out = {arm.name: reason for arm in arms if arm.method != PIPELINE and (
        reason := why_left_out(arm, plan.options, plan.config))}
    others = [arm for arm in arms[main.method != PIPELINE:]
              if arm.method not in ("stock", PIPELINE) and arm.name not in left_out]
    end = time.monotonic() + (plan.options.measure_seconds if seconds is None else seconds)
    found, limit = Found({}, left_out), plan.options.bytes_per_device(machine)
    room = plan.options.bytes_of_compared(machine)
    if main.method != PIPELINE:
        # What is trained gets the most of it; what it does not need is left to the others.
        share = share_of(end, MAIN_SHARE if others else 1.0)
        found.strategies[main.name] = _find(main, plan, graph, machine, prices, share, known)
        if problem := too_large(found.strategies[main.name], limit):
            raise OutOfMemoryError(f"arm {main.name}: {problem}; take a smaller --batch or --preset, more devices, or "
                                   "--strategy=search, which keeps to the limit")
    for number, arm in enumerate(others):
        try:
            strategy = _find(arm, plan, graph, machine, prices, share_of(end, 1.0 / (len(others) - number)), known)
        except InfeasibleError as error:
            found.left_out[arm.name] = str(error)
            continue
        if problem := too_large(strategy, room):
            found.left_out[arm.name] = problem
        else:
            found.strategies[arm.name] = strategy
    if prices is not None and found.strategies:
        _price_alike(found.strategies, arms, prices, simple_configurations(graph, plan.options.mesh_flag.devices))
    for arm in arms:
        if arm.method == "stock" and arm.name not in left_out and (
                problem := _why_no_stock(arm, plan, graph, machine, found, room)):
            found.left_out[arm.name] = problem
    return found


def _why_no_stock(arm: ArmName, plan: Plan, graph: ComputationGraph, machine: Machine, found: Found,
                  limit: float) -> str:
    """Why stock Mesh-TensorFlow cannot be compared with: why our own data parallelism cannot, or could not; empty where
    it can."""
    ours = next((name for name in found.left_out if is_called(name, "data_parallel")), "")
    if ours:
        return found.left_out[ours]
    try:
        return too_large(as_stock(arm, plan, graph, machine, found.strategies), limit)
    except InfeasibleError as error:
        return str(error)


def as_stock(arm: ArmName, plan: Plan, graph: ComputationGraph, machine: Machine,
             strategies: Mapping[str, Strategy]) -> Strategy:
    """Our own data parallelism over as many devices as an arm of stock Mesh-TensorFlow has: it needs as much memory.

    Args:
      arm: of stock Mesh-TensorFlow.
      plan, graph, machine: of the run.
      strategies: arm -> strategy, among which it is perhaps.

    Raises:
      InfeasibleError: there is none over so many.
    """
    options, ours = plan.options, arm.name.removeprefix("stock_")
    if ours in strategies:
        return strategies[ours]
    return evaluate_strategy(graph, data_parallel(graph, options.parallel_devices), options.mesh_flag.devices, machine,
                             name=arm.name)


def strategy_by_hand(plan: Plan, graph: ComputationGraph, machine: Machine) -> Strategy | None:
    """The strategy of --strategy where people have written it; None where one is searched, or is in a file."""
    arm = plan.options.arms[0]
    return _find(arm, plan, graph, machine, None, 0.0) if arm.method in BY_HAND else None


def _price_alike(strategies: dict[str, Strategy], arms: Sequence[ArmName], prices: MeasuredPrices,
                 simple: Sequence[Configuration] | None) -> None:
    """Prices all arms by the same kernel times: those of later ones were measured after the first were priced. Where
    one is cheaper than what the search found, trained or to compare with, the search takes it; data parallelism
    (`simple`) where that is no more than `SIMPLE_WITHIN` behind, as in the search itself."""
    for name, strategy in strategies.items():
        strategies[name] = prices.again(strategy)
    seconds = {name: prices.wary_seconds(strategy.configurations) for name, strategy in strategies.items()}
    least = min(seconds.values())
    as_good = [name for name, strategy in strategies.items()
               if strategy.configurations == simple and seconds[name] <= (1.0 + SIMPLE_WITHIN) * least]
    best = as_good[0] if as_good else min(seconds, key=seconds.__getitem__)
    for arm in arms:
        if arm.method == "search" and least < seconds.get(arm.name, 0.0):
            strategies[arm.name] = prices.again(strategies[arm.name], strategies[best].configurations)


def share_of(end: float, share: float) -> float:
    """Seconds that one arm may measure for, of those that are left."""
    return share * max(0.0, end - time.monotonic())


def too_large(strategy: Strategy | Pipeline, limit: float) -> str:
    """What a strategy needs beyond a limit of bytes per device; empty where it keeps to it."""
    if strategy.memory_bytes <= limit:
        return ""
    return f"needs {needed_text(strategy.memory_bytes, limit)} per device, {bytes_text(limit)} are allowed"


def _find(arm: ArmName, plan: Plan, graph: ComputationGraph, machine: Machine, prices: MeasuredPrices | None,
          seconds: float, known: Sequence[Configuration] | None = None) -> Strategy:
    mesh, seed, limit = plan.options.mesh_flag, plan.options.seed, plan.options.bytes_per_device(machine)
    # Without a limit a search begins nowhere.
    within: dict[str, Any] = {} if math.isinf(limit) else {"memory_limit": limit, "known": known}
    if prices is not None and arm.method == "search":
        return prices.find(seconds=seconds, later_seconds=_LATER_SHARE * seconds, simple_within=SIMPLE_WITHIN, **within)
    if prices is not None and arm.method.startswith("mcmc"):
        begin = start_by_hand(graph, mesh.devices, *_start_of(arm, plan, graph))
        return prices.improve(begin, "mcmc", seconds=seconds, seed=seed)
    if prices is not None:
        end = time.monotonic() + seconds
        configurations = (
            _of_best(arm, prices.find(seconds=seconds, later_seconds=_LATER_SHARE * seconds), graph, seed)
            if arm.method in _OF_BEST else _find(arm, plan, graph, machine, None, 0.0).configurations)
        # Of the same share as the search for what it is made of.
        return prices.evaluate(configurations, arm.method if arm.method == "expert" and not arm.argument else arm.name,
                               seconds=share_of(end, 1.0))
    find = functools.partial(find_strategy, graph, mesh.devices, machine)
    given = functools.partial(evaluate_strategy, graph, devices=mesh.devices, machine=machine, name=arm.name)
    match arm.method:
        case "search":
            return find(method="exact", simple_within=SIMPLE_WITHIN, **within)
        case "data_parallel":
            return given(data_parallel(graph, int(arm.argument or mesh.devices)))
        case "zero":
            return given(zero(graph, int(arm.argument or mesh.devices)))
        case "expert" if arm.argument:
            return given(expert(graph, int(arm.argument)))
        case "expert":
            return find(method="expert", mesh=expert_axes(graph, mesh.axes))
        case "mcmc" | "mcmc_expert":
            # FlexFlow's search, from either of its two starts.
            start, axes = _start_of(arm, plan, graph)
            budget: dict[str, Any] = ({"simulate": 1, "proposals": _PROPOSALS, "time_limit": _MCMC_SECONDS}
                      if is_simulated(machine, mesh.devices) else {})
            return find(method="mcmc", mesh=axes, start_from=start, seed=seed, **budget)
        case "random":
            return given(random_configurations(graph, mesh.devices, int(arm.argument), seed))
        case "changed" | "within":
            return given(_of_best(arm, find(method="exact"), graph, seed))
        case "auto_mtf":
            return given(_auto_mtf(plan, graph))
    return _load(arm.argument, plan, graph, machine)


def _of_best(arm: ArmName, best: Strategy, graph: ComputationGraph, seed: int) -> tuple[Configuration, ...]:
    """What an arm of `_OF_BEST` makes of the best strategy."""
    if arm.method == "within":
        number, count = map(int, arm.argument.split("/"))
        return best.frontier_configurations(count + 1)[number]  # the last one is the best itself
    number = int(arm.argument)
    other = random_configurations(graph, best.devices, number, seed)
    return changed_configurations(best.configurations, other, number, seed)


def _start_of(arm: ArmName, plan: Plan, graph: ComputationGraph) -> tuple[str, Sequence[tuple[str, int]] | None]:
    """Where a chain begins: the strategy by hand, and the mesh for it."""
    return (("expert", expert_axes(graph, plan.options.mesh_flag.axes)) if arm.method == "mcmc_expert" else
            ("data_parallel", None))


def check_files(plan: Plan, graph: ComputationGraph) -> None:
    """Refuses strategy files of another program before anything is searched, which may take a minute.

    Raises:
      MismatchError: one is; names the flags that it is for, where some are.
    """
    for arm in plan.options.arms:
        if arm.method == "file":
            _load(arm.argument, plan, graph)


def _load(path: str, plan: Plan, graph: ComputationGraph, machine: Machine | None = None) -> Strategy:
    try:
        return Strategy.load(path, graph, machine)
    except MismatchError:
        found = Strategy.load(path)
        flags = flags_of(found.graph_hash, plan) if found.graph_name == graph.name else ""
        if not flags:
            raise
        raise MismatchError(f"{path}: this strategy is for a run with {flags}; add that, or search anew") from None


def _auto_mtf(plan: Plan, graph: ComputationGraph) -> tuple[Configuration, ...]:
    """What Mesh-TF's own optimiser chooses for the program of a run."""
    options = plan.options
    mesh = auto_mtf_mesh(options.mesh_flag.devices, options.mesh_flag.axes)
    with Stage("auto_mtf"):
        # Of a microbatch: a rule that splits the whole batch alone would leave those of the run whole.
        rules = auto_mtf_layout(options.model, plan.config, options.together, options.optimizer, mesh)
    return configurations_of_layout(graph, mesh, rules)


def random_configurations(graph: ComputationGraph, devices: int, number: int, seed: int) -> tuple[Configuration, ...]:
    """A configuration per layer, drawn so that strategies of very different cost come out.

    Neighbouring layers share a preference (which dims to split) for a while: with independent draws all random
    strategies would be equally bad, dominated by resharding.

    Args:
      graph: of the program.
      devices: p.
      number: of the random strategy; every fourth draws a new preference for every layer.
      seed: of all of them.
    """
    generator = random.Random(f"{seed}/{number}")
    keep = (0.95, 0.85, 0.6, 0.0)[number % 4]
    result: list[Configuration] = []
    preference: dict[str, float] = {}
    for layer in graph.layers:
        if generator.random() >= keep:
            preference = {}
        choices = enumerate_configurations(layer, devices, max_axes=2)
        for choice in choices:
            for dim, _ in choice.axes:
                preference.setdefault(dim, generator.random())
        # Most mass on configurations of the preferred dims; replicating is one dim among others.
        weights = [min((preference[dim] ** 4 for dim, _ in choice.axes), default=1.0) for choice in choices]
        result.append(generator.choices(choices, [weight + 1e-9 for weight in weights])[0])
    return tuple(result)


def changed_configurations(best: Sequence[Configuration], other: Sequence[Configuration], number: int, seed: int,
                           ) -> tuple[Configuration, ...]:
    """A strategy between the best and another one: some of its layers as in the other.

    Args:
      best, other: configurations of all layers.
      number: of the changed strategy; four in a row change 9, 2.5, 1 and 5 of ten layers.
      seed: of all of them.
    """
    generator = random.Random(f"{seed}/{number}/changed")
    share = (0.9, 0.25, 0.1, 0.5)[number % 4]
    return tuple(new if generator.random() < share else old for old, new in zip(best, other, strict=True))


def duplicates(strategies: Mapping[str, Strategy]) -> dict[str, str]:
    """Arm -> the earlier arm with the very same configurations: the same program, which need not be trained twice."""
    first: dict[tuple[Configuration, ...], str] = {}
    same = {}
    for name, strategy in strategies.items():
        earlier = first.setdefault(strategy.configurations, name)
        if earlier != name:
            same[name] = earlier
    return same
