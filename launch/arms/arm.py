"""The arms of a run: the program lowered under one strategy each, in a graph and a session of its own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import DataError, OutOfMemoryError, UsageError
from pase_mtf.garbage import uncollected
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.arms.masters import PassingMasters, few_at_a_time, load_values
from pase_mtf.launch.arms.memory import peak_bytes_per_device, short_device, variable_bytes_per_device
from pase_mtf.launch.arms.program import Program
from pase_mtf.launch.arms.recipe import Recipe, making_of, recipe_of
from pase_mtf.launch.arms.replicas import Sketch, differ, sketch, sketched, sketches_differ
from pase_mtf.launch.arms.traced import Work, fallen_to_cpu, timeline_of, traced_slices
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo, FileEntry, entry_of, restore
from pase_mtf.launch.checkpoints.shards import ShardWriter, data_file, merge_shards, shard_prefix
from pase_mtf.launch.cluster.board import Board
from pase_mtf.launch.cluster.lost import LOST, lost_process
from pase_mtf.launch.console import Stage, summarize_error
from pase_mtf.launch.data import Batch, number_of
from pase_mtf.launch.plan import Plan
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.ranks import Rank, run_options
from pase_mtf.runtime import Devices, session_config
from pase_mtf.simulator.timeline import Slice, Timeline

__all__ = ["Arm", "build_arm", "build_arms", "rows_of", "rows_read"]

_AGREES_WITHIN = 600.0
"""Seconds between the first rank that has lowered a program and the last. A rank that is lost is found by the launcher;
one that is not may have less of a processor for itself."""
_CLOSES_WITHIN = 5.0
"""Seconds, where an arm is closed because something went wrong: the others may not hear any more."""


class Arm:
    """A lowered program that can be stepped.

    Where every process of a run has a graph of its own, each has an arm of it, and they do everything together: what is
    asked of that of rank 0 the others hear from the board, and are then asked for the same (`cluster.follower`).

    Attributes:
      name: in tables and files.
      build_seconds: time to build, lower and set initial values.
      nodes: TensorFlow nodes of the graph, of this process.
      rows: the rows of a batch that devices of this process read; None: all, or it is not known.
      measured_bytes: the most one device held during the traced steps, None before.
      timeline: what the devices did in the last step that was traced, None before.
      fallen: types of operations that ran on a CPU in that step, where they should have run on GPUs.
    """

    def __init__(self, name: str, build: Callable[[], Program], lower: Callable[[Program], mtf.Lowering],
                 devices: Devices, checkpoint: CheckpointInfo | None = None, *, cast: bool = False,
                 works: Callable[[Program, mtf.Lowering], Mapping[str, Work]] | None = None,
                 board: Board | None = None):
        """Builds and lowers the program and sets the initial values.

        Args:
          name: of the arm.
          build: builds the program in the current tf.Graph.
          lower: lowers it.
          devices: of the run.
          checkpoint: where the values come from; None: initial values by the seed.
          cast: the checkpoint's values may be of another type than the program's variables.
          works: what nodes are made for (`traced.works_of`); None: there will be no timeline.
          board: on which the ranks tell each other what they do; None: there is one process, or one client of all.

        Raises:
          OutOfMemoryError: the variables do not fit.
          FormatError: the checkpoint is damaged, or of another program.
          MismatchError: the ranks lowered different programs.
          ClusterError: a process was lost before they compared them.
        """
        self.name = name
        self.measured_bytes: int | None = None
        self.timeline: Timeline | None = None
        self.fallen: list[str] = []
        self._board, self._number = board, next(board.arms) if board else 0
        self._apart = not Emitter(devices.names).shared
        self._numbers = {short_device(name): number for number, name in enumerate(devices.names)}
        start = time.perf_counter()
        self._graph = tf.Graph()
        # What names no process belongs to the one that feeds and fetches.
        with self._graph.as_default(), tf.device(devices.client or None), uncollected():
            program = build()
            lowering = lower(program)
            self._works = works(program, lowering) if works else {}
            self._placeholders = program.placeholders
            self.rows = rows_read(program, lowering) if board and isinstance(lowering, PlanLowering) else None
            self._loss = lowering.export_to_tf_tensor(program.loss)
            updates = [lowering.lowered_operation(operation) for operation in program.updates]
            with tf.control_dependencies([*updates, self._loss]):
                self._train = tf.assign_add(program.global_step, 1).op
            self._global_step = program.global_step
            passing = (PassingMasters(lowering, tf.global_variables())
                       if board and not board.leads and isinstance(lowering, PlanLowering) else None)
            to_slices = None if passing else lowering.copy_masters_to_slices()
            self._to_masters = lowering.copy_slices_to_masters()
            self._masters = {variable.op.name: variable for variable in tf.global_variables()}
            self._saver = tf.train.Saver(tf.global_variables(), max_to_keep=1)
            self._replicas = {variable.name: replicas for variable, laid_out in lowering.variables.items()
                            if (replicas := _replicas(variable, laid_out))}
            self._sketched = not board and len(devices.tasks) > 1  # one client need not fetch what others hold
            if self._sketched:
                self._replicas = {name: [[sketched(held) for held in group] for group in replicas]
                                  for name, replicas in self._replicas.items()}
            self._shards = self._own_shards(lowering) if board and isinstance(lowering, PlanLowering) else None
            initialize = tf.global_variables_initializer()
            self._held = variable_bytes_per_device(self._graph, [self._train])
            agreement = lowering.agreement() if board and isinstance(lowering, PlanLowering) else None
        self.nodes = len(self._graph.get_operations())
        self._graph.finalize()
        self._open = functools.partial(tf.Session, devices.target, graph=self._graph, config=session_config(devices))
        self._begin = functools.partial(self._fill, passing, to_slices, initialize, checkpoint, cast)
        self._session = self._open()
        if agreement:
            try:
                agreement.check(self._session, _AGREES_WITHIN)
            except LOST as error:  # the others have ended, or were ended, before they compared
                raise lost_process(error, f"arm {name}") from error
        self._begin()
        self.build_seconds = time.perf_counter() - start

    def restart(self) -> None:
        """Goes back to where it began, whatever steps it has done since."""
        self._tell("restart")
        self._session.close()
        self._session = self._open()  # in which random numbers begin anew, too
        self._begin()

    def _fill(self, passing: PassingMasters | None, to_slices: tf.Operation | None, initialize: tf.Operation,
              checkpoint: CheckpointInfo | None, cast: bool) -> None:
        """Gives all variables their first values."""
        with self._graph.as_default():
            if passing and checkpoint:
                restore(checkpoint, functools.partial(passing.fill, self._run))
            elif passing:
                passing.fill(self._run, None)
            else:
                self._run(initialize)
                if checkpoint:
                    load = functools.partial(load_values, self._run, self._masters) if cast else self._load
                    restore(checkpoint, load)
                self._run(to_slices)

    def step(self, batch: Batch, trace: bool = False) -> tuple[float, float]:
        """One training step.

        Args:
          batch: feature name -> values.
          trace: record the memory and what devices do as well; such a step takes longer than others.

        Returns:
          (loss before the update, seconds).

        Raises:
          OutOfMemoryError: a device ran out of memory.
        """
        self._tell("step", batch=number_of(batch), trace=trace)
        feed = {placeholder: batch[name] for name, placeholder in self._placeholders.items()}
        start = time.perf_counter()
        if trace:
            metadata, began = tf.RunMetadata(), time.time_ns()
            loss, _ = self._run([self._loss, self._train], feed, metadata, together=True)
            self._look_at(metadata, began)
        else:
            loss, _ = self._run([self._loss, self._train], feed, together=True)
        return float(loss), time.perf_counter() - start

    def _look_at(self, metadata: tf.RunMetadata, began: int) -> None:
        """What a traced step tells of memory and time, on the devices of all ranks: by the clock of each, from when it
        began."""
        nbytes = max(peak_bytes_per_device(metadata, self._held).values(), default=0)
        slices = (traced_slices(metadata, self._works, self._numbers, apart=self._apart, since=began)
                  if self._works else [])
        self.fallen = fallen_to_cpu(metadata, self._graph)
        if self._board:
            found = self._board.gather([nbytes, slices, self.fallen])
            nbytes = max(of_rank[0] for of_rank in found)
            slices = [Slice(*one) for of_rank in found for one in of_rank[1]]
            self.fallen = sorted({kind for of_rank in found for kind in of_rank[2]})
        self.measured_bytes = max(nbytes, self.measured_bytes or 0)
        if self._works:
            self.timeline = timeline_of(slices, len(self._numbers), f"{self.name}, traced")

    def loss(self, batch: Batch | None) -> float:
        """The loss of a batch, without a training step.

        Args:
          batch: feature name -> values; None: this rank cannot read it.

        Raises:
          DataError: a rank cannot read it.
        """
        self._tell("loss", batch=number_of(batch) if batch else None)
        read = all(self._board.gather(batch is not None)) if self._board else True
        if batch is None or not read:
            raise DataError(f"arm {self.name}: a rank cannot read its rows of this batch")
        feed = {placeholder: batch[name] for name, placeholder in self._placeholders.items()}
        return float(self._run(self._loss, feed, together=True))

    def values(self, up_to_date: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """The name and value of every master variable (but the number of the step), one after another.

        Args:
          up_to_date: bring the masters up to date first; else they are as at the start, or as they were last saved.
        """
        if up_to_date:
            self.collect()
        masters = {name: variable for name, variable in self._masters.items() if variable is not self._global_step}
        for names in few_at_a_time({name: variable.shape.num_elements() for name, variable in masters.items()}):
            yield from self._run({name: masters[name] for name in names}).items()

    def collect(self) -> None:
        """Brings the masters up to date; of several ranks, those of rank 0."""
        self._tell("collect")
        self._run(self._to_masters, together=True)

    def differing_replicas(self) -> str | None:
        """The name of a variable of which not all devices that hold the same part hold the same; None: there is none.

        Equal up to rounding: what devices sum by themselves, each may sum in another order. Of devices of several
        processes not the values are compared but sketches of them (`replicas`).
        """
        self._tell("differing_replicas")
        sizes = {name: sum(len(group) * group[0].shape.num_elements() for group in replicas)
                 for name, replicas in self._replicas.items()}
        sketches: list[list[Sketch]] = []
        differing = None
        for names in few_at_a_time(sizes):
            own = {name: [[held for held in group if isinstance(held, tf.Tensor)] for group in self._replicas[name]]
                   for name in names}
            found = self._run(own)
            differs = sketches_differ if self._sketched else differ
            differing = differing or next((name for name in names if any(map(differs, found[name]))), None)
            if self._board:
                sketches += [[sketch(value) for value in group[:1]] for name in names for group in found[name]]
        if not self._board:
            return differing
        of_ranks = self._board.gather([differing, sketches])
        if told := next((name for name, _ in of_ranks if name), None):
            return str(told)
        groups = [name for name in itertools.chain(*few_at_a_time(sizes)) for _ in self._replicas[name]]
        return next((name for name, *rows in zip(groups, *(theirs for _, theirs in of_ranks), strict=True)
                     if sketches_differ([entry for row in rows for entry in row])), None)

    def save(self, prefix: str) -> dict[str, FileEntry]:
        """Writes the variables as they are now to files that begin with `prefix`; every rank those that it keeps.

        Returns:
          Name -> entry of the files whose hashes the ranks that wrote them have told.

        Raises:
          UsageError: a rank cannot write.
        """
        if self._board and self._shards:
            return self._save_shards(os.path.abspath(prefix), self._board, self._shards)
        self.collect()
        with self._graph.as_default():  # the Saver asks the current context, not its own graph, whether it is eager
            self._saver.save(self._session, prefix, write_meta_graph=False, write_state=False)
        return {}

    def _save_shards(self, prefix: str, board: Board, shards: ShardWriter) -> dict[str, FileEntry]:
        self._tell("save", prefix=prefix)
        problem, mine, entry = "", shard_prefix(prefix, board.rank), None
        try:
            self._session.run(shards.write, {shards.prefix: mine})
            entry = None if shards.empty else entry_of(data_file(mine))
        except tf.errors.OpError as error:
            problem = summarize_error(error)
        except OSError as error:
            problem = error.strerror or str(error)
        found = board.gather([problem, entry])
        if not board.leads:
            return {}
        for rank, (problem, _) in enumerate(found):
            if problem:
                raise UsageError(f"cannot write {prefix}: rank {rank}: {problem}; free space or choose another place")
        entries = {rank: entry for rank, (_, entry) in enumerate(found) if entry}
        return dict(zip(merge_shards(prefix, list(entries)), entries.values(), strict=True))

    def _own_shards(self, lowering: PlanLowering) -> ShardWriter:
        parts = {variable.get_master().op.name: (variable.shape.to_integer_list, laid_out.shards())
                 for variable, laid_out in lowering.variables.items()}
        others = {name: variable for name, variable in self._masters.items() if name not in parts}
        return ShardWriter(others if self._board and self._board.leads else {}, parts)

    def close(self) -> None:
        """Frees what the arm holds."""
        # Else they hear it when they have done what they were told before, however long that takes: a message that
        # only some have heard is the last one that any of them understands.
        self._tell("close", within=_CLOSES_WITHIN if sys.exc_info()[0] else None)
        self._session.close()

    def _tell(self, do: str, within: float | None = None, **how: object) -> None:
        """Tells the other ranks what this one is about to do."""
        if self._board:
            self._board.tell(within=within, do=do, arm=self._number, **how)

    def _load(self, prefix: str) -> None:
        self._saver.restore(self._session, prefix)

    def _run(self, fetches: Any, feed: Mapping[Any, Any] | None = None, metadata: tf.RunMetadata | None = None, *,
             together: bool = False) -> Any:
        """Runs the graph; with metadata, traced.

        Args:
          fetches, feed: of `tf.Session.run`.
          metadata: filled with what a trace tells.
          together: this is a run of all ranks at once.
        """
        settings = {"trace_level": tf.RunOptions.FULL_TRACE} if metadata else {}
        make = run_options if self._board and together else tf.RunOptions
        try:
            return self._session.run(fetches, feed, make(**settings) if settings or make is run_options else None,
                                     metadata)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise OutOfMemoryError(f"arm {self.name}: out of memory ({summarize_error(error)}); take a smaller --batch "
                                   "or --preset, or fewer arms in --compare") from error
        except LOST as error:
            raise lost_process(error, f"arm {self.name}") from error


def _replicas(variable: mtf.Variable, laid_out: mtf.MeshImpl.LaidOutVariable) -> list[list[tf.Tensor]]:
    """The reads of the slices of a variable that hold the same part of it (on devices of other ranks, stand-ins); none
    of a lowering that is not ours."""
    mesh_impl = getattr(laid_out, "_mesh_impl", None)
    if not isinstance(mesh_impl, DeviceMeshImpl) or laid_out.slice_is_master:
        return []
    slices = laid_out.laid_out_tensor.all_slices
    groups = mesh_impl.partition(variable.shape).holders.values()
    return [[slices[position]._graph_element for position in group] for group in groups if len(group) > 1]


def rows_read(program: Program, lowering: PlanLowering) -> frozenset[int] | None:
    """The rows of a batch that devices of this process read; None: that is not known.

    Args:
      program: whose features, but single numbers, have the rows in front.
      lowering: of it, for the devices of this process.
    """
    parts = program.imports()
    if parts is None:
        return None
    return frozenset(number + len(parts) * row for number, operations in enumerate(parts) for operation in operations
                     for region in lowering.regions(operation.outputs[0]) if region
                     for row in range(region[0][0], sum(region[0])))


def rows_of(arms: Iterable[Arm]) -> tuple[int, ...] | None:
    """The rows of every batch that these arms read in this process (the first, where none does); None: all."""
    rows = [arm.rows for arm in arms]
    known = [mine for mine in rows if mine is not None]
    return (tuple(sorted(frozenset().union(*known))) or (0,)) if len(known) == len(rows) else None


def build_arm(plan: Plan, recipe: Recipe, board: Board | None = None, graph: ComputationGraph | None = None) -> Arm:
    """Lowers the program of a run; every rank, which the others hear from rank 0.

    Args:
      plan: of the run.
      recipe: of the arm.
      board: see Arm.
      graph: exported from the program, where it is known already.

    Raises:
      OutOfMemoryError: the variables do not fit.
      FormatError: the checkpoint to resume from is damaged.
    """
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, dtype=recipe.dtype))
    if board:
        board.tell(do="build", recipe=recipe.to_json())
    making = making_of(plan, recipe, _rank(plan.devices), graph)
    return Arm(recipe.name, making.build, making.lower, plan.devices, plan.checkpoint, cast=recipe.cast,
               works=making.works if recipe.traced else None, board=board)


def _rank(devices: Devices) -> Rank | None:
    """The rank of this process, where every process has a graph of its own; with a GPU each, NCCL is between them."""
    if devices.rank is None:
        return None
    nccl = devices.kind == "gpu" and len(devices.tasks) > 1
    return Rank.of(devices.names, devices.rank, communication_hint="nccl" if nccl else "auto")


def build_arms(plan: Plan, graph: ComputationGraph, chosen: Mapping[str, Chosen], names: Sequence[str],
               board: Board | None = None) -> list[Arm]:
    """Lowers the program once per arm, each in a graph and session of its own, all from the same initial values.

    Args:
      plan: of the run.
      graph: its computation graph.
      chosen: arm -> strategy or pipeline; an arm without either is stock data parallelism.
      names: the arms to build, in order.
      board: see Arm.

    Raises:
      OutOfMemoryError: the variables do not fit.
      FormatError: the checkpoint to resume from is damaged.
    """
    arms: list[Arm] = []
    try:
        for name in names:
            recipe = recipe_of(name, chosen.get(name), graph.hash, plan.config.dtype)
            with Stage(f"lowering {name}"):
                arms.append(build_arm(plan, dataclasses.replace(recipe, traced=True), board, graph))
    except BaseException:
        for arm in arms:
            arm.close()
        raise
    return arms
