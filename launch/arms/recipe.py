"""What an arm trains with: a strategy, a pipeline, or data parallelism by stock Mesh-TensorFlow; and what a process has
to know of that to build the arm.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pase_mtf import models
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_as, export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.arms.pipelined import PipelinedProgram, build_pipelined, lower_pipeline, works_of_pipeline
from pase_mtf.launch.arms.program import Program, program_of, variables_by_name
from pase_mtf.launch.arms.traced import Work, works_of
from pase_mtf.launch.plan import Plan
from pase_mtf.lowering.lowering import lower
from pase_mtf.lowering.ranks import Rank
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.experts import batch_dim

__all__ = ["Making", "Recipe", "lower_stock_data_parallel", "making_of", "microbatch_of", "recipe_of"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a process has to know of an arm, besides the plan of the run, to build it: a strategy in place.

    Attributes:
      name: of the arm.
      configurations: of its strategy, one per layer; empty: it has none.
      graph_hash: of the graph that the strategy is for.
      dtype: the type that the program computes in.
      cast: the checkpoint's values may be of another.
      traced: what its nodes are made for is known, so that there will be a timeline.
      pipeline: in stead of a strategy; without either it is stock data parallelism.
    """

    name: str
    configurations: tuple[Configuration, ...]
    graph_hash: str
    dtype: str
    cast: bool = False
    traced: bool = False
    pipeline: Pipeline | None = None

    def to_json(self) -> dict[str, object]:
        """All of it, as `json` takes it."""
        return {**dataclasses.asdict(self), "pipeline": self.pipeline and self.pipeline.to_json()}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Recipe:
        """Of what `json` made of `to_json`."""
        axes, pipeline = found["configurations"], found["pipeline"]
        return cls(**{**found, "configurations": tuple(
            Configuration(tuple(map(tuple, configuration["axes"]))) for configuration in axes),
            "pipeline": pipeline and Pipeline.of_json(pipeline)})


def recipe_of(name: str, chosen: Chosen | None, graph_hash: str, dtype: str, *, cast: bool = False) -> Recipe:
    """The recipe of an arm.

    Args:
      name: of the arm.
      chosen: what it trains with; None: stock data parallelism.
      graph_hash: of the program's graph.
      dtype: the type that the program computes in.
      cast: see Recipe.
    """
    if isinstance(chosen, Pipeline):
        return Recipe(name, (), graph_hash, dtype, cast, pipeline=chosen)
    return Recipe(name, chosen.configurations if chosen else (), graph_hash, dtype, cast)


class Making(NamedTuple):
    """How the program of an arm is made.

    Attributes:
      build: builds it, in the current tf.Graph.
      lower: lowers it.
      works: tells what nodes are made for.
    """

    build: Callable[[], Program]
    lower: Callable[[Program], mtf.Lowering]
    works: Callable[[Program, mtf.Lowering], Mapping[str, Work]]


def making_of(plan: Plan, recipe: Recipe, rank: Rank | None = None, graph: ComputationGraph | None = None) -> Making:
    """How an arm is made.

    Args:
      plan: of the run, in the type of the recipe.
      recipe: of the arm.
      rank: of this process, where every process has a graph of its own.
      graph: exported from the program, where it is known already.
    """
    devices = list(plan.devices.names)

    def by_strategy(program: Program) -> mtf.Lowering:
        return lower(program.graph, recipe, devices, step=program.global_step.read_value(), rank=rank)

    def by_stock(program: Program) -> mtf.Lowering:
        return lower_stock_data_parallel(program, devices[:plan.options.parallel_devices],
                                         batch_dim(graph or export_graph(program.graph)))

    def works(program: Program, lowering: mtf.Lowering) -> Mapping[str, Work]:
        return works_of(graph or export_as(program.graph, recipe.graph_hash), program.graph, lowering)

    if recipe.pipeline is not None:
        return Making(functools.partial(_pipelined, plan, plan.options.batch, recipe.pipeline.microbatches),
                      functools.partial(_by_pipeline, plan, recipe.pipeline, devices, rank), works_of_pipeline)
    return Making(functools.partial(program_of, plan), by_strategy if recipe.configurations else by_stock, works)


def lower_stock_data_parallel(program: Program, devices: Sequence[str], batch_dim: str) -> mtf.Lowering:
    """Data parallelism as Mesh-TensorFlow does it by itself: what a user has today."""
    implementation = placement_mesh_impl.PlacementMeshImpl(f"all:{len(devices)}", f"{batch_dim}:all", list(devices))
    return mtf.Lowering(program.graph, {program.mesh: implementation})


def microbatch_of(plan: Plan, count: int) -> tuple[PipelinedProgram, ComputationGraph]:
    """One of so many microbatches of a run, for looking at, and the graph that a pipeline is searched in."""
    with tf.Graph().as_default(), variables_by_name():
        one = _pipelined(plan, plan.options.batch // count, 1)
    graph = export_graph(one.graph, name=f"{plan.options.model}-{plan.options.preset}, a microbatch of {count}",
                         turns=True, sharded_updates=plan.options.sharded_updates)
    return one, graph


def _pipelined(plan: Plan, batch: int, microbatches: int) -> PipelinedProgram:
    options = plan.options
    return build_pipelined(models.get(options.model), plan.config, batch, options.optimizer, options.learning_rate,
                           options.seed, microbatches)


def _by_pipeline(plan: Plan, pipeline: Pipeline, devices: Sequence[str], rank: Rank | None, program: Program,
                 ) -> mtf.Lowering:
    assert isinstance(program, PipelinedProgram)
    one, graph = microbatch_of(plan, pipeline.microbatches)
    if tuple(layer.name for layer in graph.layers) != pipeline.layer_names:
        raise MismatchError(f"{graph.name}: has other layers in {plan.config.dtype} than those that the pipeline was "
                            "found for; leave the arm out")
    # In another type it is another graph, whose layers may be split alike.
    in_this_type = dataclasses.replace(pipeline, graph_hash=graph.hash)
    return lower_pipeline(program, one, in_this_type, devices, program.global_step.read_value(), rank, graph)
