"""The pipeline of a run: searched for its model, machine and devices, to be compared with strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase_mtf import models
from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.arms.recipe import microbatch_of
from pase_mtf.launch.console import Stage
from pase_mtf.launch.flag_values import PIPELINE, ArmName
from pase_mtf.launch.plan import Plan
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.find import find_pipeline
from pase_mtf.pipeline.pipeline import Pipeline

__all__ = ["BY_RATES", "counts_of_microbatches", "find_pipelines"]

BY_RATES = ("is predicted by the best rates of all kernels that are known, the other arms by the kernels themselves: "
            "compare what is measured")
"""What a pipeline says where kernels are measured."""

_LONGEST = 2
"""Most microbatches, for every device: with as many, stages idle for a third of the step at most."""


def find_pipelines(plan: Plan, arms: Sequence[ArmName], machine: Machine,
                   ) -> tuple[dict[str, Pipeline], dict[str, str]]:
    """Finds the pipeline of every arm that is one.

    Args:
      plan: of the run.
      arms: all of it.
      machine: whose rates and links count, also where other arms are priced by measured kernels.

    Returns:
      Arm -> pipeline, and arm -> why there is none.
    """
    found: dict[str, Pipeline] = {}
    left_out: dict[str, str] = {}
    for arm in (arm for arm in arms if arm.method == PIPELINE):
        try:
            found[arm.name] = _find(plan, machine)
        except InfeasibleError as error:
            left_out[arm.name] = str(error)
    return found, left_out


def _find(plan: Plan, machine: Machine) -> Pipeline:
    if reason := _impossible(plan):
        raise InfeasibleError(reason)
    limit = plan.options.bytes_per_device(machine)
    with Stage("pipeline"):
        graphs = {count: microbatch_of(plan, count)[1] for count in counts_of_microbatches(plan)}
        return find_pipeline(graphs, plan.devices.count, machine, memory_limit=None if math.isinf(limit) else limit)


def _impossible(plan: Plan) -> str:
    """Why a run can have no pipeline, and what to do; empty where it can."""
    options, model = plan.options, models.get(plan.options.model)
    reasons = {
        f"stages need two devices; take a larger --mesh than {options.mesh}": plan.devices.count < 2,
        f"{model.name} normalises over the batch, so that microbatches are another model": model.batch_statistics,
        "its updates are not sharded; leave out --sharded_updates": options.sharded_updates,
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
