"""Whether strategies compute the same, settled in float64: every arm once more for a few steps, against one device.

In float64 rounding stays below one in 10^9 for as long as this takes, so that what differs is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from pase_mtf.compat import mtf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.arm import Arm, build_arm
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.arms.program import Program, program_of
from pase_mtf.launch.arms.recipe import recipe_of
from pase_mtf.launch.cluster.board import Board
from pase_mtf.launch.data import Batch
from pase_mtf.launch.judging.losses import first_difference, largest_update, updates_of
from pase_mtf.launch.plan import Plan
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import uniform_plan
from pase_mtf.runtime import Devices
from pase_mtf.strategy.strategy import Strategy

__all__ = ["STEPS", "Settled", "settle"]

STEPS = 3

# Relative, of losses. Mesh-TensorFlow's Adam and Adafactor compute in float32 whatever the model's type is.
_LOSS = {"sgd": 1e-9}
_LOSS_OTHERWISE = 1e-6
_UPDATE = {"sgd": 1e-6}
_UPDATE_OTHERWISE = 1e-3
_PRECISION = {"sgd": 1e-12}
_PRECISION_OTHERWISE = 1e-7


@dataclasses.dataclass(frozen=True)
class Settled:
    """What float64 says.

    Attributes:
      wrong: arm -> how it differs from one device; empty where all are right.
      first_loss: of the first step, on one device.
      steps: that were compared.
      losses: of these, on one device.
    """

    wrong: dict[str, str]
    first_loss: float
    steps: int
    losses: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class _Course:
    """The first steps of an arm: the loss of every one, the variables before and after the first, and the replicas."""

    losses: list[float]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    differing_replicas: str | None


def settle(plan: Plan, chosen: Mapping[str, Chosen], names: Sequence[str], batches: Sequence[Batch],
           board: Board | None = None) -> Settled:
    """Runs the first steps in float64, of the program on one device and under every strategy, from the run's values.

    Args:
      plan: of the run.
      chosen: arm -> strategy or pipeline; an arm without either is stock data parallelism, of which the first loss is
        compared only: stock Mesh-TensorFlow reads a variable before or after its update, as it happens.
      names: the arms to judge.
      batches: of the first steps of the run.
      board: on which the ranks tell each other what they do, where every process has a graph of its own.

    Raises:
      OutOfMemoryError: the program does not fit a second time.
      MismatchError: in float64 the program has other layers.
    """
    exact = dataclasses.replace(plan, config=dataclasses.replace(plan.config, dtype="float64"))
    alone = Devices.first(1, "cpu")
    exported: list[ComputationGraph] = []

    def on_one_device(program: Program) -> mtf.Lowering:
        exported.append(export_graph(program.graph, sharded_updates=plan.options.sharded_updates))
        return PlanLowering(program.graph, uniform_plan(program.graph, "one:1", "", alone.names), alone.names,
                            program.global_step.read_value())

    expected = _course(Arm("one device", functools.partial(program_of, exact), on_one_device, alone, plan.checkpoint,
                           cast=True), batches)
    graph, = exported
    wrong = {}
    for name in names:
        mine = chosen.get(name)
        if isinstance(mine, Strategy) and tuple(layer.name for layer in graph.layers) != mine.layer_names:
            raise MismatchError(f"{graph.name}: other layers in float64 than in {plan.options.model}'s own type")
        recipe = recipe_of(name, mine, graph.hash, "float64", cast=True)
        found = _course(build_arm(exact, recipe, board, graph), batches[:None if mine else 1])
        difference = _difference(name, found, expected, plan.options.optimizer, mine is not None)
        if difference:
            wrong[name] = difference
    return Settled(wrong, expected.losses[0], len(batches), expected.losses)


def _course(arm: Arm, batches: Sequence[Batch]) -> _Course:
    try:
        before = dict(arm.values(up_to_date=False))
        losses = [arm.step(batches[0])[0]]
        after = dict(arm.values())
        replicas = arm.differing_replicas()
        losses += [arm.step(batch)[0] for batch in batches[1:]]
    finally:
        arm.close()
    return _Course(losses, before, after, replicas)


def _difference(name: str, found: _Course, expected: _Course, optimizer: str, ours: bool) -> str | None:
    difference = first_difference({"one device": expected.losses, name: found.losses},
                                  first=_LOSS.get(optimizer, _LOSS_OTHERWISE))
    if difference or not ours:
        return difference
    if found.differing_replicas:
        return f"after a step {found.differing_replicas} is not the same on all devices that hold it"
    return largest_update(
        updates_of(expected.before, expected.after, found.after),
        _PRECISION.get(optimizer, _PRECISION_OTHERWISE), _UPDATE.get(optimizer, _UPDATE_OTHERWISE))
