"""A program lowered as a pipeline: every layer on the devices of its stage, every microbatch when its turn is."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_as
from pase_mtf.garbage import uncollected
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.program import Program, optimizer_of
from pase_mtf.launch.arms.traced import Work
from pase_mtf.layout.scopes import quick_scopes
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec, specs_of_layers
from pase_mtf.lowering.ranks import Rank
from pase_mtf.lowering.turns import Turn
from pase_mtf.models import Model
from pase_mtf.models.microbatches import WrittenOut, write_out
from pase_mtf.models.presets import ModelConfig
from pase_mtf.operations.facts import needed_for_updates
from pase_mtf.operations.flow import all_operations
from pase_mtf.operations.registry import rule_of
from pase_mtf.pipeline.pipeline import Pipeline, task_text
from pase_mtf.pipeline.schedule import tasks_in_order

__all__ = ["PipelinedProgram", "build_pipelined", "lower_pipeline", "works_of_pipeline"]


@dataclasses.dataclass(frozen=True)
class PipelinedProgram(Program):
    """A training step whose microbatches stand in the graph one by one.

    Attributes:
      written: which operations do what.
      applied: those of the optimizer.
    """

    written: WrittenOut
    applied: list[mtf.Operation]

    def imports(self) -> list[list[mtf.Operation]]:
        """As of every program: of each microbatch (`write_out`)."""
        return [[operation for operation in operations if operation.outputs[0].shape.dims]
                for operations in self.written.imports]


@uncollected()
@quick_scopes()
def build_pipelined(model: Model, config: ModelConfig, batch: int, optimizer: str, learning_rate: float | None,
                    seed: int, microbatches: int) -> PipelinedProgram:
    """Builds the training step in the current tf.Graph (which must be new, so that seeds agree).

    With a single microbatch it is the program that a pipeline is searched for: of one microbatch of another.

    Args:
      model, config, batch, optimizer, learning_rate, seed: of `build_program`.
      microbatches: K.

    Raises:
      UsageError: the batch or the model cannot be computed in so many pieces.
    """
    tf.set_random_seed(seed)
    random.seed(seed)
    global_step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    written = write_out(model, config, mesh, batch, microbatches)
    before = len(graph.operations)
    updates = optimizer_of(optimizer, learning_rate).apply_grads(written.gradients, graph.trainable_variables)
    return PipelinedProgram(graph, mesh, written.placeholders, written.loss, updates, global_step, written,
                            graph.operations[before:])


def lower_pipeline(program: PipelinedProgram, one: PipelinedProgram, pipeline: Pipeline, devices: Sequence[str],
                   step: tf.Tensor | None = None, rank: Rank | None = None,
                   graph: ComputationGraph | None = None) -> PlanLowering:
    """Lowers a program as a pipeline.

    Args:
      program: of all microbatches, in the current tf.Graph.
      one: the same of a single microbatch, which the pipeline was found for; it is looked at only.
      pipeline: its stages.
      devices: names of the devices.
      step, rank: see PlanLowering.
      graph: exported from `one`, where it is known already.

    Raises:
      MismatchError: the pipeline was found for another graph, or for another number of microbatches.
    """
    graph = graph or export_as(one.graph, pipeline.graph_hash)
    if graph.hash != pipeline.graph_hash:
        raise MismatchError(f"the pipeline was found for graph {pipeline.graph_hash}, a microbatch of this one is "
                            f"{graph.hash}; search again for this model, its sizes and its optimizer")
    if len(program.written.forward) != pipeline.microbatches:
        raise MismatchError(f"a pipeline of {pipeline.microbatches} microbatches for a program of "
                            f"{len(program.written.forward)}; build it with as many")
    layers = _layers(program, one, graph)
    groups = [range(stage.offset, stage.offset + stage.devices) for stage in map(
        pipeline.stages.__getitem__, map(pipeline.stage_of, range(len(graph.layers))))]
    specs = specs_of_layers(graph, pipeline.configurations, *groups)
    plan: Mapping[mtf.Operation, MeshSpec] = {operation: specs[layer] for operation, layer in layers.items()}
    stages = {operation: pipeline.stage_of(layer) for operation, layer in layers.items()}
    # Who updates a part computes the new value of that part, as it is priced; else all would subtract the whole.
    spec_of = {layer.name: spec for layer, spec in zip(graph.layers, specs, strict=True)}
    updated_by = {variable.name: variable.updated_by for layer in graph.layers for variable in layer.variables}
    updates = {variable: spec_of[updated_by[variable.name]] for variable in program.graph.all_variables
               if updated_by.get(variable.name)}
    return PlanLowering(program.graph, plan, devices, step, rank=rank, updates=updates,
                        turns=_turns(program, pipeline, stages))


def works_of_pipeline(program: Program, lowering: mtf.Lowering) -> dict[str, Work]:
    """Name scope, without its "/" -> the microbatch and the phase that the nodes in it are for; which stage, the device
    tells.

    Args:
      program: of `build_pipelined`.
      lowering: of `lower_pipeline`.
    """
    assert isinstance(program, PipelinedProgram)
    assert isinstance(lowering, PlanLowering)
    works = dict.fromkeys(program.applied, Work(task_text("update", 0), "update"))
    for phase, parts, first in (("forward", program.written.forward, 0), ("backward", program.written.backward, 0),
                                ("backward", program.written.added, 1)):
        for number, operations in enumerate(parts, first):
            works.update(dict.fromkeys(operations, Work(task_text(phase, number), phase)))
    return {scope.rstrip("/"): works[operation] for scope, operation in lowering.scopes.items() if operation in works}


def _layers(program: PipelinedProgram, one: PipelinedProgram, graph: ComputationGraph) -> dict[mtf.Operation, int]:
    """The layer of every operation: that of the operation of the single microbatch that does the same."""
    operations = all_operations(one.graph)
    known = {operations[operation.index]: number for number, layer in enumerate(graph.layers)
             for operation in layer.operations}
    by_name = {variable.name: known[variable] for variable in one.graph.all_variables}
    found = {variable: by_name[variable.name] for variable in program.graph.all_variables}
    mine, theirs = program.written, one.written
    alike = [(one.applied, program.applied)]
    for parts, (part,) in ((mine.imports, theirs.imports), (mine.forward, theirs.forward),
                           (mine.backward, theirs.backward)):
        alike += [(part, mine_of_one) for mine_of_one in parts]
    for part, operations in alike:
        pairs = [_without_variables(part), _without_variables(operations)]
        if [type(other) for other in pairs[0]] != [type(other) for other in pairs[1]]:
            raise MismatchError("a microbatch consists of other operations than the program that the pipeline was "
                                "found for; take a model whose graph does not depend on the batch")
        found.update({operation: known[other] for other, operation in zip(*pairs, strict=True)})
    of_loss = known[theirs.loss.operation]
    found.update(dict.fromkeys((*mine.shares, *mine.losses), of_loss))
    for added in mine.added:
        found.update({operation: found[variable] for operation, variable in zip(
            added, program.graph.trainable_variables, strict=True)})
    return found


def _without_variables(operations: Iterable[mtf.Operation]) -> list[mtf.Operation]:
    return [operation for operation in operations if not rule_of(operation).is_variable]


def _turns(program: PipelinedProgram, pipeline: Pipeline, stages: Mapping[mtf.Operation, int]) -> list[Turn]:
    """The turns of all devices: what is read, then the tasks of the schedule, then the update.

    Gradients that no update needs (of one-hot vectors, for instance) are of a last turn: if others waited for them,
    every step would compute them.
    """
    written, unneeded, spare = program.written, _unneeded(program), list[mtf.Operation]()
    of_task: dict[tuple[str, int, int], list[mtf.Operation]] = collections.defaultdict(list)
    for phase, parts in (("forward", written.forward), ("backward", written.backward)):
        for number, operations in enumerate(parts):
            for operation in _without_variables(operations):
                is_spare = phase == "backward" and operation in unneeded
                (spare if is_spare else of_task[phase, stages[operation], number]).append(operation)
    for number, operations in enumerate(written.added, 1):
        for operation in operations:
            of_task["backward", stages[operation], number].append(operation)
    turns = [Turn([*program.graph.all_variables, *(operation for operations in written.imports
                                                  for operation in operations), *written.shares])]
    latest: dict[int, int] = {}
    for task in tasks_in_order(pipeline.schedule, len(pipeline.stages), pipeline.microbatches):
        before = (latest[task.stage],) if task.stage in latest else ()
        latest[task.stage] = len(turns)
        turns.append(Turn(of_task[task.phase, task.stage, task.microbatch], before))
    turns.append(Turn(written.losses))
    # What an update makes without its gradient would be there from the start; of one variable after the other it is
    # there for a moment.
    for (stage, needs), entries in itertools.groupby(
            _by_need(program), lambda entry: (stages[entry[0]], entry[1])):
        turns.append(Turn([operation for operation, _ in entries], () if needs else (latest[stage],)))
        if needs:
            latest[stage] = len(turns) - 1
    return [*turns, Turn(spare)]


def _unneeded(program: PipelinedProgram) -> set[mtf.Operation]:
    """What no update needs; of it what belongs to the forward pass may be fetched, as the loss is."""
    operations = all_operations(program.graph)
    return {operation for operation, needed in zip(operations, needed_for_updates(operations), strict=True)
            if not needed}


def _by_need(program: PipelinedProgram) -> Iterator[tuple[mtf.Operation, bool]]:
    """The operations of the update, and whether they need a gradient."""
    needing = set(program.written.gradients)
    for operation in _without_variables(program.applied):
        needs = not needing.isdisjoint(operation.inputs)
        needing.update(operation.outputs if needs else ())
        yield operation, needs
