"""The strategy of every arm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pase_mtf.errors import MismatchError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.launch.arm_names import ArmName
from pase_mtf.launch.auto_mtf import auto_mtf_mesh
from pase_mtf.launch.mesh_flag import MeshFlag
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import configurations_of_layout
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy, find_strategy

__all__ = ["TOLD_APART", "changed_configurations", "duplicates", "find_strategies", "random_configurations"]


TOLD_APART = 0.01
"""Data parallelism is trained where the best strategy is predicted faster by no more than this fraction: a promise so
small is not kept in a measurement, and its layout is one more thing to understand."""


def find_strategies(arms: Sequence[ArmName], graph: ComputationGraph, mesh: MeshFlag, machine: Machine, seed: int,
                    auto_mtf: Callable[[], dict[str, str]] | None = None) -> dict[str, Strategy]:
    """Finds or loads the strategy of every arm; stock Mesh-TF has none.

    Args:
      arms: of the run.
      graph: of the program.
      mesh: how many devices, and the axes for the expert strategy where the user named some.
      machine: whose numbers count.
      seed: of the strategies that are drawn.
      auto_mtf: asks Mesh-TF's own optimiser for layout rules, for an arm of that name.

    Raises:
      InfeasibleError: no strategy satisfies the constraints.
      MismatchError: a strategy file is for another graph, or for another number of devices.
      FormatError: a strategy file is truncated or foreign.
    """
    found = {}
    for arm in arms:
        if arm.method == "auto_mtf" and auto_mtf is not None:
            configurations = configurations_of_layout(graph, auto_mtf_mesh(mesh.devices, mesh.axes), auto_mtf())
            found[arm.name] = evaluate_strategy(graph, configurations, mesh.devices, machine, name=arm.name)
        elif arm.method != "stock":
            found[arm.name] = _find(arm, graph, mesh, machine, seed)
    return found


def _find(arm: ArmName, graph: ComputationGraph, mesh: MeshFlag, machine: Machine, seed: int) -> Strategy:
    if arm.method == "search":
        return find_strategy(graph, mesh.devices, machine, method="exact", simple_within=TOLD_APART)
    if arm.method == "file":
        strategy = Strategy.load(arm.argument, graph, machine)
        if strategy.devices != mesh.devices:
            raise MismatchError(f"{arm.argument}: a strategy for {strategy.devices} devices, --mesh={mesh.text} has "
                                f"{mesh.devices}; use --mesh={strategy.devices}, or search anew")
        return strategy
    if arm.method in ("random", "changed"):
        configurations = random_configurations(graph, mesh.devices, int(arm.argument), seed)
        if arm.method == "changed":
            best = find_strategy(graph, mesh.devices, machine, method="exact").configurations
            configurations = changed_configurations(best, configurations, int(arm.argument), seed)
        return evaluate_strategy(graph, configurations, mesh.devices, machine, name=arm.name)
    if arm.method in ("mcmc", "mcmc_expert"):
        # FlexFlow's search, from either of its two starts.
        start = "expert" if arm.method == "mcmc_expert" else "data_parallel"
        return find_strategy(graph, mesh.devices, machine, method="mcmc", mesh=mesh.axes or None, start_from=start,
                             seed=seed)
    if arm.method == "expert" and mesh.axes:
        return find_strategy(graph, mesh.devices, machine, method="expert", mesh=mesh.axes)
    return find_strategy(graph, mesh.devices, machine, method=arm.method)


def random_configurations(graph: ComputationGraph, devices: int, number: int, seed: int) -> tuple[Configuration, ...]:
    """A configuration per layer, drawn so that strategies of very different cost come out.

    Neighbouring layers keep one taste (which dims to prefer) for a while: drawn independently, all random strategies
    would be equally bad, drowned in resharding.

    Args:
      graph: of the program.
      devices: p.
      number: of the random strategy; every fourth changes its taste at every layer.
      seed: of all of them.
    """
    generator = random.Random(f"{seed}/{number}")
    keep = (0.95, 0.85, 0.6, 0.0)[number % 4]
    result: list[Configuration] = []
    taste: dict[str, float] = {}
    for layer in graph.layers:
        if generator.random() >= keep:
            taste = {}
        choices = enumerate_configurations(layer, devices, max_axes=2)
        for choice in choices:
            for dim, _ in choice.axes:
                taste.setdefault(dim, generator.random())
        # Most mass on configurations of the preferred dims; replicating is one dim among others.
        weights = [min((taste[dim] ** 4 for dim, _ in choice.axes), default=1.0) for choice in choices]
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


def duplicates(strategies: dict[str, Strategy]) -> dict[str, str]:
    """Arm -> the earlier arm with the very same configurations: the same program, which need not be trained twice."""
    first: dict[Any, str] = {}
    same = {}
    for name, strategy in strategies.items():
        earlier = first.setdefault(tuple(strategy.configurations), name)
        if earlier != name:
            same[name] = earlier
    return same
