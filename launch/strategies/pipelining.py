"""The pipeline of a run: searched for its model, machine and devices, to be compared with strategies."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from pase_mtf.errors import InfeasibleError, MismatchError, OutOfMemoryError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.pipelined import PipelinedProgram
from pase_mtf.launch.arms.recipe import microbatch_of
from pase_mtf.launch.console import Stage
from pase_mtf.launch.flag_values import PIPELINE, ArmName
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.possible import counts_of_microbatches, why_left_out
from pase_mtf.launch.strategies.finding import MAIN_SHARE, share_of, too_large
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.find import NoPipelineError, evaluate_pipeline, find_measured_pipeline, find_pipeline
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.by_kernels import Telling, kernels_of
from pase_mtf.strategy.measured import MeasuredPrices

__all__ = ["check_pipelines", "find_pipelines"]


def check_pipelines(plan: Plan) -> None:
    """Refuses files of pipelines of another program before anything is searched, which may take minutes.

    Raises:
      MismatchError: one is for another model, another batch, or another number of microbatches.
    """
    for arm in plan.options.arms[1:]:  # a first one is the first that is looked at
        if arm.method == PIPELINE and arm.argument and not why_left_out(arm, plan.options, plan.config):
            _kept(arm.argument, plan)


def find_pipelines(plan: Plan, arms: Sequence[ArmName], machine: Machine, prices: MeasuredPrices | None,
                   seconds: float) -> tuple[dict[str, Pipeline], dict[str, str]]:
    """Finds the pipeline of every arm that is one.

    Args:
      plan: of the run.
      arms: all of it.
      machine: whose rates and links count.
      prices: those of the other arms by measured kernels, whose times count in their stead.
      seconds: how long kernels may be measured, for all of these arms.

    Returns:
      Arm -> pipeline, and arm -> why there is none.

    Raises:
      InfeasibleError: the arm of --strategy is one, and there is none.
      OutOfMemoryError: it is of a file, and needs more than --memory_limit.
      MismatchError: a file is for another model, another batch, or another number of devices.
    """
    found: dict[str, Pipeline] = {}
    left_out: dict[str, str] = {}
    staged, end = [arm for arm in arms if arm.method == PIPELINE], time.monotonic() + seconds
    for left, arm in zip(range(len(staged), 0, -1), staged, strict=True):
        # What is trained gets the most of it, as among strategies.
        share = share_of(end, MAIN_SHARE if left > 1 and arm == arms[0] else 1.0 / left)
        until = time.monotonic() + share
        try:
            if reason := why_left_out(arm, plan.options, plan.config):
                raise InfeasibleError(reason)
            pipeline = (_load(arm.argument, plan, machine, prices, until) if arm.argument
                        else _find(plan, machine, prices, until))
            if arm != arms[0] and (problem := too_large(pipeline, plan.options.bytes_of_compared(machine))):
                raise InfeasibleError(problem)
            found[arm.name] = pipeline
        except InfeasibleError as error:
            if arm == arms[0]:
                raise
            left_out[arm.name] = str(error)
    return found, left_out


def _find(plan: Plan, machine: Machine, prices: MeasuredPrices | None, until: float) -> Pipeline:
    """The pipeline that is searched; kernels are measured until then, by `time.monotonic`."""
    limit = plan.options.bytes_per_device(machine)
    within = None if math.isinf(limit) else limit
    with Stage("pipeline"):
        programs = {count: microbatch_of(plan, count) for count in counts_of_microbatches(plan.options)}
        graphs = {count: graph for count, (_, graph) in programs.items()}
        try:
            if prices is None:
                return find_pipeline(graphs, plan.devices.count, machine, schedule=plan.options.schedule,
                                     memory_limit=within)
            sources = {count: kernels_of(one.graph, graph, turns=True) for count, (one, graph) in programs.items()}
            return find_measured_pipeline(graphs, sources, prices.meter, schedule=plan.options.schedule,
                                          memory_limit=within, seconds=share_of(until, 1.0), progress=Telling())
        except NoPipelineError as error:
            most = max(graphs) if error.splits else 0
            advice = _to_fit(plan, machine, most) if error.limited else "leave out pipeline"
            raise InfeasibleError(f"{error.reason}; {advice}", proven=error.proven) from error


def _to_fit(plan: Plan, machine: Machine, most: int) -> str:
    """What to do where no pipeline keeps to the limit, as flags: more microbatches than so many, if any, among it."""
    more = f"more --microbatches than {most}, " if 0 < most < plan.options.batch else ""
    limit, allowed = plan.options.memory_limit, plan.options.may_allow_more(machine)
    larger = f"a larger --memory_limit than {limit}, " if allowed else ""
    return f"take {larger}{more}a smaller --batch or --preset, or more devices"


def _kept(path: str, plan: Plan) -> tuple[Pipeline, PipelinedProgram, ComputationGraph]:
    """The pipeline of a file, a microbatch of this run, and its graph, which is the pipeline's."""
    kept, options = Pipeline.load(path), plan.options
    if options.batch % kept.microbatches:
        raise MismatchError(f"{path}: a pipeline of {kept.microbatches} microbatches, --batch={options.batch} does not "
                            "split so; take another, or search anew")
    if plan.microbatches not in (1, kept.microbatches):  # of --microbatches=auto nobody gave it
        raise MismatchError(f"{path}: a pipeline of {kept.microbatches} microbatches, this run has "
                            f"{plan.microbatches}; take --microbatches={kept.microbatches}, or search anew")
    one, graph = microbatch_of(plan, kept.microbatches)
    if graph.hash != kept.graph_hash:
        raise MismatchError(f"{path}: made for graph {kept.graph_hash} of {kept.graph_name}, a microbatch of this "
                            f"run is {graph.hash}; take the flags of that run, or search anew")
    if kept.layer_names != tuple(layer.name for layer in graph.layers):
        raise MismatchError(f"{path}: lists other layers than graph {graph.hash} has, which it says it is made for; it "
                            "was changed, search anew")
    return kept, one, graph


def _load(path: str, plan: Plan, machine: Machine, prices: MeasuredPrices | None, until: float) -> Pipeline:
    """The pipeline of a file, priced for this run; kernels are measured until then, by `time.monotonic`."""
    options = plan.options
    with Stage("pipeline"):
        kept, one, graph = _kept(path, plan)
        measured = None if prices is None else (kernels_of(one.graph, graph, turns=True), prices.meter)
        found = evaluate_pipeline(graph, kept.laid(), kept.microbatches, kept.schedule, machine, measured,
                                  seconds=share_of(until, 1.0), progress=Telling())
    problem = too_large(found, options.bytes_per_device(machine))
    if problem and path == options.arms[0].argument:
        raise OutOfMemoryError(f"{path}: {problem}; take --strategy={PIPELINE}, which keeps to the limit")
    return dataclasses.replace(found, devices=kept.devices)
