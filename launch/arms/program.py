"""The Mesh-TensorFlow program that every arm trains: the model, its loss, and Mesh-TF's own optimizer.

Nothing here knows of a strategy; all arms build it alike, with the same seeds, and so start from the same values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator

from pase_mtf import models
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import MismatchError, UsageError
from pase_mtf.export.exporter import export_as, export_graph
from pase_mtf.garbage import uncollected
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo
from pase_mtf.launch.console import Stage
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import Plan
from pase_mtf.layout.scopes import quick_scopes
from pase_mtf.models import Model
from pase_mtf.models.blocks import ALL, blocks_of, check_blocks, choices_of, recomputing, sets_of
from pase_mtf.models.checks import DTYPES
from pase_mtf.models.microbatches import import_features, loss_and_gradients
from pase_mtf.models.presets import BATCH_STATISTICS, ModelConfig
from pase_mtf.operations.registry import rule_of

__all__ = ["Program", "build_program", "export_with_program", "exported", "flags_of", "mesh_graph", "optimizer_of",
           "program_of", "variables_by_name"]

_MOST_PROGRAMS = 64
"""That are built to find out which one a file is of."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step, not yet lowered.

    Attributes:
      graph, mesh: Mesh-TF's.
      placeholders: feature name -> what a batch is fed into.
      loss: a scalar mtf.Tensor.
      updates: the optimizer's operations.
      global_step: number of steps done; Adafactor's schedules read it.
    """

    graph: mtf.Graph
    mesh: mtf.Mesh
    placeholders: dict[str, tf.Tensor]
    loss: mtf.Tensor
    updates: list[mtf.Operation]
    global_step: tf.Variable

    def imports(self) -> list[list[mtf.Operation]] | None:
        """The operations that import the examples of a batch: of K lists number k has every K-th from the k-th on, in
        front of every tensor. None where something is imported that was made of them before."""
        fed = {id(placeholder) for placeholder in self.placeholders.values() if placeholder.shape.rank}
        found = [operation for operation in self.graph.operations if id(rule_of(operation).imported(operation)) in fed]
        return [found] if fed == {id(rule_of(operation).imported(operation)) for operation in found} else None


@uncollected()
@quick_scopes()
def build_program(model: Model, config: ModelConfig, batch: int, optimizer: str, learning_rate: float | None,
                  seed: int, microbatches: int = 1, recompute: Collection[str] = ()) -> Program:
    """Builds the training step in the current tf.Graph (which must be new, so that seeds agree).

    Args:
      model: whose loss is minimised.
      config: its sizes.
      batch: examples per step.
      optimizer: "sgd", "adam" or "adafactor".
      learning_rate: None: Adafactor's own schedule.
      seed: of initial values and dropout.
      microbatches: in how many pieces the batch is computed, one after the other.
      recompute: names of blocks that are computed once more in the backward pass (`models.blocks`).

    Raises:
      UsageError: the batch or the model cannot be computed in so many pieces, or has no such block.
    """
    tf.set_random_seed(seed)
    random.seed(seed)  # Mesh-TF draws from it while lowering
    global_step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    recomputing(graph, recompute)
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    placeholders, features = import_features(model, config, mesh, batch, microbatches)
    loss, gradients = loss_and_gradients(model, config, mesh, features, batch, microbatches)
    check_blocks(graph, model.name)
    updates = optimizer_of(optimizer, learning_rate).apply_grads(gradients, graph.trainable_variables)
    return Program(graph, mesh, placeholders, loss, updates, global_step)


@dataclasses.dataclass(frozen=True)
class _Named:
    """What stands for a TensorFlow variable where nothing but its name is asked for."""

    name: str


@contextlib.contextmanager
def variables_by_name() -> Iterator[None]:
    """Programs that are built in this context are for the export alone: their variables have a name and nothing else.

    To make the TensorFlow variables, which an export never looks at, takes most of the time that a deep model's
    program takes.
    """
    def name_only(getter: Callable[..., tf.Variable], name: str, collections: Collection[str] | None = None,
                  **settings: object) -> tf.Variable | _Named:
        if tf.GraphKeys.GLOBAL_STEP in (collections or ()):  # which optimizers compute with
            return getter(name, collections=collections, **settings)
        return _Named(f"{name}:0")

    with tf.variable_scope(tf.get_variable_scope(), custom_getter=name_only, auxiliary_name_scope=False):
        yield


def optimizer_of(name: str, learning_rate: float | None) -> mtf.optimize.Optimizer:
    """Mesh-TensorFlow's own of that name ("sgd", "adam" or "adafactor"); learning_rate of None: its own schedule."""
    if name == "sgd":
        return mtf.optimize.SgdOptimizer(learning_rate)
    if name == "adam":
        return mtf.optimize.AdamWeightDecayOptimizer(learning_rate)
    return mtf.optimize.AdafactorOptimizer(learning_rate=learning_rate)


def program_of(plan: Plan) -> Program:
    """The training step that every arm of a run lowers, built in the current tf.Graph."""
    options = plan.options
    return build_program(models.get(options.model), plan.config, options.batch, options.optimizer,
                         options.learning_rate, options.seed, plan.microbatches, plan.recomputed)


def export_with_program(plan: Plan) -> tuple[ComputationGraph, mtf.Graph]:
    """The computation graph of the program that every arm trains, and what it was exported from: for looking at, not
    for training.

    Raises:
      UsageError: the program cannot be computed in as many microbatches.
      MismatchError: the checkpoint to resume from is of another program.
    """
    options = plan.options
    with Stage("export"):
        graph, program = exported(plan)
        known = plan.checkpoint is None or _is_of(plan.checkpoint, plan, program, graph)
    if plan.checkpoint and not known:
        raise MismatchError(f"--resume={options.resume}: the checkpoint is of graph {plan.checkpoint.graph_hash}, this "
                            f"program is {graph.hash}; resume with the version of pase_mtf that wrote it")
    return graph, program


def exported(plan: Plan) -> tuple[ComputationGraph, mtf.Graph]:
    """`export_with_program` of a run that does not begin with it: nothing is told, and no checkpoint looked at."""
    options, program = plan.options, mesh_graph(plan)
    return export_graph(program, name=f"{options.model}-{options.preset}",
                        meta={"batch": options.batch, "optimizer": options.optimizer, "preset": options.preset},
                        sharded_updates=options.sharded_updates), program


def mesh_graph(plan: Plan) -> mtf.Graph:
    """The Mesh-TensorFlow graph of a run, made to be looked at or exported, not to be lowered."""
    with tf.Graph().as_default(), variables_by_name():
        return program_of(plan).graph


def flags_of(graph_hash: str, plan: Plan) -> str:
    """The flags that a run lacks for its program to have a graph with this hash: of the type of activations, of the
    number of microbatches, of blocks that are computed again, of sharded updates. Empty where none of these helps."""
    for flag, other in itertools.chain([("", plan)], _in_other_types(plan), _in_other_pieces(plan),
                                       _in_other_blocks(plan)):
        program = mesh_graph(other)
        for sharded in (False, True):
            if export_graph(program, sharded_updates=sharded).hash == graph_hash:
                beside = "" if sharded == plan.options.sharded_updates else f"--{'no' * (not sharded)}sharded_updates"
                return " ".join(filter(None, (flag, beside)))
    return ""


def _in_other_types(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The run with every other type of activations, and the flag that asks for it."""
    for dtype in DTYPES:
        if dtype != plan.config.dtype:
            yield f"--dtype={dtype}", dataclasses.replace(plan, config=dataclasses.replace(plan.config, dtype=dtype))


def _in_other_pieces(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The run in every other number of microbatches, and the flag that asks for it."""
    most = 1 if plan.options.model in BATCH_STATISTICS else plan.options.batch
    for count in range(1, most + 1):
        if plan.options.batch % count == 0 and count != plan.microbatches:
            yield f"--microbatches={count}", plan.in_microbatches(count)


def _in_other_blocks(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The run with every other set of blocks computed again that a search is offered, if these are not too many, or
    none, all, and those of the run that it resumes; and the flag that asks for it."""
    blocks = blocks_of(mesh_graph(plan))
    known: list[tuple[str, ...]] = [(), (ALL,)]
    if plan.checkpoint:
        earlier = plan.earlier.get("recompute", "none")
        known.append(dataclasses.replace(plan.options, recompute=earlier).recomputed or ())
    if math.prod(len(choice) + 1 for choice in choices_of(blocks)) <= _MOST_PROGRAMS:
        known += sets_of(choices_of(blocks))
    for names in dict.fromkeys(known):
        if names != plan.recomputed:
            yield f"--recompute={','.join(names) or 'none'}", plan.recomputing(names)


def _is_of(checkpoint: CheckpointInfo, plan: Plan, program: mtf.Graph, graph: ComputationGraph) -> bool:
    """Whether a checkpoint is of this program: it holds whole variables, whatever layer updates them, in however many
    pieces the batch was computed, and whatever was computed again."""
    sought = checkpoint.graph_hash
    return sought in (graph.hash, export_as(program, sought).hash) or any(
        _is_program_of(sought, other) for other in _programs_that_wrote(checkpoint, plan))


def _is_program_of(graph_hash: str, plan: Plan) -> bool:
    """Whether the program of a run has a graph with this hash."""
    try:
        return export_as(mesh_graph(plan), graph_hash).hash == graph_hash
    except UsageError:  # what an earlier run tells of its blocks may be of another version's model
        return False


def _programs_that_wrote(checkpoint: CheckpointInfo, plan: Plan) -> Iterator[Plan]:
    """The run as those may have computed it that wrote its checkpoint: the one that this tells; of those that do not
    tell yet, first as the run was started that it continues, then all others, each of which takes seconds to build."""
    if checkpoint.microbatches is not None and checkpoint.recompute is not None:
        yield plan.in_microbatches(checkpoint.microbatches).recomputing(checkpoint.recompute)
        return
    earlier = dataclasses.replace(plan.options, **{
        name: plan.earlier.get(name, getattr(Options, name)) for name in ("microbatches", "recompute")})
    yield plan.in_microbatches(earlier.microbatch_count or 1).recomputing(earlier.recomputed or ())
    in_pieces = [plan, *(other for _, other in _in_other_pieces(plan))]
    yield from in_pieces[1:]
    yield from (again for one in in_pieces for _, again in _in_other_blocks(one))
