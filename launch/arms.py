"""The arms of a run: the program lowered under one strategy each, in a graph and a session of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import OutOfMemoryError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.checkpoint import CheckpointInfo, restore
from pase_mtf.launch.console import Stage, summarize_error
from pase_mtf.launch.data import Batch
from pase_mtf.launch.memory import peak_bytes_per_device, variable_bytes_per_device
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.program import Program, program_of
from pase_mtf.lowering.lowering import lower
from pase_mtf.runtime import Devices, session_config
from pase_mtf.strategy.experts import batch_dim
from pase_mtf.strategy.strategy import Strategy

__all__ = ["Arm", "build_arms", "lower_stock_data_parallel"]


def lower_stock_data_parallel(program: Program, devices: Devices, batch_dim: str) -> mtf.Lowering:
    """Data parallelism as Mesh-TensorFlow does it by itself: what a user has today."""
    implementation = placement_mesh_impl.PlacementMeshImpl(
        f"all:{devices.count}", f"{batch_dim}:all", list(devices.names))
    return mtf.Lowering(program.graph, {program.mesh: implementation})


class Arm:
    """A lowered program that can be stepped.

    Attributes:
      name: in tables and files.
      build_seconds: time to build, lower and set initial values.
      nodes: TensorFlow nodes of the graph.
      measured_bytes: the most one device held during the traced step, None before.
    """

    def __init__(self, name: str, build: Callable[[], Program], lower: Callable[[Program], mtf.Lowering],
                 devices: Devices, checkpoint: CheckpointInfo | None = None):
        """Builds and lowers the program and sets the initial values.

        Args:
          name: of the arm.
          build: builds the program in the current tf.Graph.
          lower: lowers it.
          devices: of the run.
          checkpoint: where the values come from; None: initial values by the seed.

        Raises:
          OutOfMemoryError: the variables do not fit.
          FormatError: the checkpoint is damaged, or of another program.
        """
        self.name = name
        self.measured_bytes: int | None = None
        start = time.perf_counter()
        self._graph = tf.Graph()
        with self._graph.as_default():
            program = build()
            lowering = lower(program)
            self._placeholders = program.placeholders
            self._loss = lowering.export_to_tf_tensor(program.loss)
            updates = [lowering.lowered_operation(operation) for operation in program.updates]
            with tf.control_dependencies([*updates, self._loss]):
                self._train = tf.assign_add(program.global_step, 1).op
            self._global_step = program.global_step
            to_slices, self._to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
            self._saver = tf.train.Saver(tf.global_variables(), max_to_keep=1)
            initialize = tf.global_variables_initializer()
            self._held = variable_bytes_per_device(self._graph)
        self.nodes = len(self._graph.get_operations())
        self._graph.finalize()
        self._session = tf.Session(graph=self._graph, config=session_config(devices))
        self._run(initialize)
        if checkpoint:
            with self._graph.as_default():
                restore(checkpoint, lambda prefix: self._saver.restore(self._session, prefix))
        self._run(to_slices)
        self.build_seconds = time.perf_counter() - start

    @property
    def steps_done(self) -> int:
        """Training steps done since the training began (in an earlier run, perhaps)."""
        return int(self._run(self._global_step))

    def step(self, batch: Batch, trace: bool = False) -> tuple[float, float]:
        """One training step.

        Args:
          batch: feature name -> values.
          trace: record the memory as well; the time of such a step means nothing.

        Returns:
          (loss before the update, seconds).

        Raises:
          OutOfMemoryError: a device ran out of memory.
        """
        feed = {placeholder: batch[name] for name, placeholder in self._placeholders.items()}
        start = time.perf_counter()
        if trace:
            metadata = tf.RunMetadata()
            loss, _ = self._run([self._loss, self._train], feed,
                                tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
            self.measured_bytes = max(peak_bytes_per_device(metadata, self._held).values(), default=0)
        else:
            loss, _ = self._run([self._loss, self._train], feed)
        return float(loss), time.perf_counter() - start

    def loss(self, batch: Batch) -> float:
        """The loss of a batch, without a training step."""
        return float(self._run(self._loss, {placeholder: batch[name]
                                            for name, placeholder in self._placeholders.items()}))

    def save(self, prefix: str) -> None:
        """Writes the master variables, brought up to date, to files that begin with `prefix`."""
        self._run(self._to_masters)
        with self._graph.as_default():  # the Saver asks the current context, not its own graph, whether it is eager
            self._saver.save(self._session, prefix, write_meta_graph=False, write_state=False)

    def close(self) -> None:
        """Frees what the arm holds."""
        self._session.close()

    def _run(self, *arguments: object) -> Any:
        try:
            return self._session.run(*arguments)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise OutOfMemoryError(f"arm {self.name}: out of memory ({summarize_error(error)}); take a smaller --batch "
                                   "or --preset, or fewer arms in --compare") from error


def build_arms(plan: Plan, graph: ComputationGraph, strategies: Mapping[str, Strategy],
               names: Sequence[str]) -> list[Arm]:
    """Lowers the program once per arm, each in a graph and session of its own, all from the same initial values.

    Args:
      plan: of the run.
      graph: its computation graph.
      strategies: arm -> strategy; an arm without one is stock data parallelism.
      names: the arms to build, in order.

    Raises:
      OutOfMemoryError: the variables do not fit.
      FormatError: the checkpoint to resume from is damaged.
    """
    def lowered(name: str, program: Program) -> mtf.Lowering:
        if name in strategies:
            return lower(program.graph, strategies[name], list(plan.devices.names),
                         step=program.global_step.read_value())
        return lower_stock_data_parallel(program, plan.devices, batch_dim(graph))

    arms: list[Arm] = []
    try:
        for name in names:
            with Stage(f"lowering {name}"):
                arms.append(Arm(name, functools.partial(program_of, plan), functools.partial(lowered, name),
                                plan.devices, plan.checkpoint))
    except BaseException:
        for arm in arms:
            arm.close()
        raise
    return arms
