"""The pipeline of a run: searched for its model, machine and devices, to be compared with strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase_mtf import models
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.launch.arms.recipe import microbatch_of
from pase_mtf.launch.console import Stage
from pase_mtf.launch.flag_values import PIPELINE, ArmName
from pase_mtf.launch.plan import Plan
from pase_mtf.lowering.kernels import GraphKernels
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.find import find_measured_pipeline, find_pipeline
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.by_kernels import Telling
from pase_mtf.strategy.measured import MeasuredPrices

__all__ = ["check_trained", "counts_of_microbatches", "find_pipelines"]

_LONGEST = 2
"""Most microbatches, for every device: with as many, stages idle for a third of the step at most."""


def check_trained(plan: Plan) -> None:
    """Refuses --strategy=pipeline where the run can have none.

    Args:
      plan: of the run, nothing of which has been built.

    Raises:
      UsageError: why, and what to do.
    """
    if plan.options.arms[0].method == PIPELINE and (reason := _impossible(plan)):
        raise UsageError(f"--strategy={PIPELINE}: {reason}")


def find_pipelines(plan: Plan, arms: Sequence[ArmName], machine: Machine, prices: MeasuredPrices | None,
                   seconds: float) -> tuple[dict[str, Pipeline], dict[str, str]]:
    """Finds the pipeline of every arm that is one.

    Args:
      plan: of the run.
      arms: all of it.
      machine: whose rates and links count.
      prices: those of the other arms by measured kernels, whose times count in their stead.
      seconds: how long kernels may be measured.

    Returns:
      Arm -> pipeline, and arm -> why there is none.

    Raises:
      InfeasibleError: the arm of --strategy is one, and there is none.
    """
    found: dict[str, Pipeline] = {}
    left_out: dict[str, str] = {}
    for arm in (arm for arm in arms if arm.method == PIPELINE):
        try:
            found[arm.name] = _find(plan, machine, prices, seconds)
        except InfeasibleError as error:
            if arm == arms[0]:
                raise
            left_out[arm.name] = str(error)
    return found, left_out


def _find(plan: Plan, machine: Machine, prices: MeasuredPrices | None, seconds: float) -> Pipeline:
    if reason := _impossible(plan):
        raise InfeasibleError(reason)
    limit = plan.options.bytes_per_device(machine)
    within = None if math.isinf(limit) else limit
    with Stage("pipeline"):
        programs = {count: microbatch_of(plan, count) for count in counts_of_microbatches(plan)}
        graphs = {count: graph for count, (_, graph) in programs.items()}
        if prices is None:
            return find_pipeline(graphs, plan.devices.count, machine, memory_limit=within)
        sources = {count: GraphKernels(one.graph, graph) for count, (one, graph) in programs.items()}
        return find_measured_pipeline(graphs, sources, prices.meter, memory_limit=within, seconds=seconds,
                                      progress=Telling())


def _impossible(plan: Plan) -> str:
    """Why a run can have no pipeline, and what to do; empty where it can."""
    options, model = plan.options, models.get(plan.options.model)
    trained = options.arms[0].method == PIPELINE  # to compare with it leaves these flags to the others
    reasons = {
        f"stages need two devices; take a larger --mesh than {options.mesh}": plan.devices.count < 2,
        f"{model.name} normalises over the batch, so that microbatches are another model; leave out pipeline": (
            model.batch_statistics),
        "its updates are not sharded; leave out --sharded_updates": options.sharded_updates,
        f"it computes no block again; leave out --recompute={options.recompute}": trained and options.recomputed != (),
        "it is searched for its number of microbatches; leave out --microbatches=auto, or give a number":
            trained and options.microbatch_count is None,
        f"--batch={options.batch} does not split into microbatches; take one that has small divisors":
            not counts_of_microbatches(plan),
        "every microbatch draws a dropout mask of its own, and losses could not be compared; give --microbatches, so "
        "that all arms draw the same": plan.config.dropout > 0.0 and plan.microbatches == 1}
    return next((reason for reason, holds in reasons.items() if holds), "")


def counts_of_microbatches(plan: Plan) -> list[int]:
    """The numbers of microbatches that a pipeline is searched for: that of --microbatches, or a few divisors of the
    batch, each at least twice the one before.
    """
    if plan.microbatches > 1:
        return [plan.microbatches]
    found: list[int] = []
    for count in range(2, min(plan.options.batch, _LONGEST * plan.devices.count) + 1):
        if plan.options.batch % count == 0 and count >= 2 * (found[-1] if found else 1):
            found.append(count)
    return found
