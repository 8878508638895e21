"""One arm: the program lowered under one strategy, in a graph and a session of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import OutOfMemoryError
from pase_mtf.launch.error_text import what_happened
from pase_mtf.launch.measuring import peak_bytes_per_device
from pase_mtf.launch.program import Program
from pase_mtf.runtime import Devices, session_config

__all__ = ["Arm", "lower_stock_data_parallel"]


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

    def __init__(self, name: str, build: Callable[[], Program], lower: Callable[[Program], Any], devices: Devices,
                 restore: Callable[[Callable[[str], Any]], Any] | None = None):
        """Builds and lowers the program and sets the initial values.

        Args:
          name: of the arm.
          build: builds the program in the current tf.Graph.
          lower: lowers it.
          devices: of the run.
          restore: given a function that loads a checkpoint's prefix, calls it; None: initial values by the seed.

        Raises:
          OutOfMemoryError: the variables do not fit.
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
            self._held = _held_bytes(self._graph)
        self.nodes = len(self._graph.get_operations())
        self._graph.finalize()
        self._session = tf.Session(graph=self._graph, config=session_config(devices))
        self._run(initialize)
        if restore:
            with self._graph.as_default():
                restore(lambda prefix: self._saver.restore(self._session, prefix))
        self._run(to_slices)
        self.build_seconds = time.perf_counter() - start

    @property
    def steps_done(self) -> int:
        """Training steps done since the training began (in an earlier run, perhaps)."""
        return int(self._run(self._global_step))

    def step(self, batch: Mapping[str, np.ndarray], trace: bool = False) -> tuple[float, float]:
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
            self.measured_bytes = max(peak_bytes_per_device(metadata.step_stats, self._held).values(), default=0)
        else:
            loss, _ = self._run([self._loss, self._train], feed)
        return float(loss), time.perf_counter() - start

    def save(self, prefix: str) -> None:
        """Writes the master variables, brought up to date, to files that begin with `prefix`."""
        self._run(self._to_masters)
        with self._graph.as_default():  # the Saver asks the current context, not its own graph, whether it is eager
            self._saver.save(self._session, prefix, write_meta_graph=False, write_state=False)

    def close(self) -> None:
        """Frees what the arm holds."""
        self._session.close()

    def _run(self, *arguments: Any) -> Any:
        try:
            return self._session.run(*arguments)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise OutOfMemoryError(f"arm {self.name}: out of memory ({what_happened(error)}); take a smaller --batch "
                                   "or --preset, or fewer arms in --compare") from error


def _held_bytes(graph: tf.Graph) -> dict[str, int]:
    """Bytes of the variables on each device, without the masters (a host's copy that no step touches)."""
    masters = {variable.op.name for variable in tf.global_variables()}
    held: dict[str, int] = {}
    for operation in graph.get_operations():
        if operation.type in ("VarHandleOp", "VariableV2") and operation.name not in masters:
            shape, dtype = operation.get_attr("shape"), tf.as_dtype(operation.get_attr("dtype"))
            elements = np.prod([dim.size for dim in shape.dim], dtype=np.int64)
            held[operation.device] = held.get(operation.device, 0) + int(elements) * dtype.size
    return held
