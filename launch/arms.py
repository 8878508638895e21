"""The arms of a run: the program lowered under one strategy each, in a graph and a session of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from more_itertools import constrained_batches

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import ClusterError, OutOfMemoryError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo, restore
from pase_mtf.launch.console import Stage, summarize_error
from pase_mtf.launch.data import Batch
from pase_mtf.launch.memory import peak_bytes_per_device, short_device, variable_bytes_per_device
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.program import Program, program_of
from pase_mtf.launch.traced import Work, traced_step, works_of
from pase_mtf.lowering.lowering import lower
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.runtime import Devices, session_config
from pase_mtf.simulator.timeline import Timeline
from pase_mtf.strategy.experts import batch_dim
from pase_mtf.strategy.strategy import Strategy

__all__ = ["Arm", "build_arms", "lower_stock_data_parallel"]

_LAUNCHER_TELLS_WITHIN = 20.0
"""Seconds."""
_ELEMENTS_AT_A_TIME = 1 << 26


def lower_stock_data_parallel(program: Program, devices: Sequence[str], batch_dim: str) -> mtf.Lowering:
    """Data parallelism as Mesh-TensorFlow does it by itself: what a user has today."""
    implementation = placement_mesh_impl.PlacementMeshImpl(f"all:{len(devices)}", f"{batch_dim}:all", list(devices))
    return mtf.Lowering(program.graph, {program.mesh: implementation})


class Arm:
    """A lowered program that can be stepped.

    Attributes:
      name: in tables and files.
      build_seconds: time to build, lower and set initial values.
      nodes: TensorFlow nodes of the graph.
      measured_bytes: the most one device held during the traced steps, None before.
      timeline: what the devices did in the last step that was traced, None before.
    """

    def __init__(self, name: str, build: Callable[[], Program], lower: Callable[[Program], mtf.Lowering],
                 devices: Devices, checkpoint: CheckpointInfo | None = None, *, cast: bool = False,
                 works: Callable[[Program, mtf.Lowering], Mapping[str, Work]] | None = None):
        """Builds and lowers the program and sets the initial values.

        Args:
          name: of the arm.
          build: builds the program in the current tf.Graph.
          lower: lowers it.
          devices: of the run.
          checkpoint: where the values come from; None: initial values by the seed.
          cast: the checkpoint's values may be of another type than the program's variables.
          works: what nodes are made for (`traced.works_of`); None: there will be no timeline.

        Raises:
          OutOfMemoryError: the variables do not fit.
          FormatError: the checkpoint is damaged, or of another program.
        """
        self.name = name
        self.measured_bytes: int | None = None
        self.timeline: Timeline | None = None
        self._numbers = {short_device(name): number for number, name in enumerate(devices.names)}
        start = time.perf_counter()
        self._graph = tf.Graph()
        # What names no process belongs to the one that feeds and fetches.
        with self._graph.as_default(), tf.device(devices.client or None):
            program = build()
            lowering = lower(program)
            self._works = works(program, lowering) if works else {}
            self._placeholders = program.placeholders
            self._loss = lowering.export_to_tf_tensor(program.loss)
            updates = [lowering.lowered_operation(operation) for operation in program.updates]
            with tf.control_dependencies([*updates, self._loss]):
                self._train = tf.assign_add(program.global_step, 1).op
            self._global_step = program.global_step
            to_slices, self._to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
            self._masters = {variable.op.name: variable for variable in tf.global_variables()}
            self._saver = tf.train.Saver(tf.global_variables(), max_to_keep=1)
            self._copies = {variable.name: copies for variable, laid_out in lowering.variables.items()
                            if (copies := _copies(variable, laid_out))}
            initialize = tf.global_variables_initializer()
            self._held = variable_bytes_per_device(self._graph)
        self.nodes = len(self._graph.get_operations())
        self._graph.finalize()
        self._session = tf.Session(devices.target, graph=self._graph, config=session_config(devices))
        self._run(initialize)
        if checkpoint:
            with self._graph.as_default():
                restore(checkpoint, self._load_cast if cast else self._load)
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
          trace: record the memory and what devices do as well; such a step takes longer than others.

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
            nbytes = max(peak_bytes_per_device(metadata, self._held).values(), default=0)
            self.measured_bytes = max(nbytes, self.measured_bytes or 0)
            if self._works:
                self.timeline = traced_step(metadata, self._works, self._numbers, f"{self.name}, traced")
        else:
            loss, _ = self._run([self._loss, self._train], feed)
        return float(loss), time.perf_counter() - start

    def loss(self, batch: Batch) -> float:
        """The loss of a batch, without a training step."""
        return float(self._run(self._loss, {placeholder: batch[name]
                                            for name, placeholder in self._placeholders.items()}))

    def values(self, up_to_date: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """The name and value of every master variable (but the number of the step), one after another.

        Args:
          up_to_date: bring the masters up to date first; else they are as at the start, or as they were last saved.
        """
        if up_to_date:
            self._run(self._to_masters)
        masters = {name: variable for name, variable in self._masters.items() if variable is not self._global_step}
        for names in _few_at_a_time({name: variable.shape.num_elements() for name, variable in masters.items()}):
            yield from self._run({name: masters[name] for name in names}).items()

    def differing_copies(self) -> str | None:
        """The name of a variable of which not all devices that hold the same part hold the same; None: there is none.

        Equal up to rounding: what devices sum by themselves, each may sum in another order.
        """
        sizes = {name: sum(len(group) * group[0].shape.num_elements() for group in copies)
                 for name, copies in self._copies.items()}
        for names in _few_at_a_time(sizes):
            for name, copies in self._run({name: self._copies[name] for name in names}).items():
                if any(_differ(first, other) for first, *others in copies for other in others):
                    return name
        return None

    def save(self, prefix: str) -> None:
        """Writes the master variables, brought up to date, to files that begin with `prefix`."""
        self._run(self._to_masters)
        with self._graph.as_default():  # the Saver asks the current context, not its own graph, whether it is eager
            self._saver.save(self._session, prefix, write_meta_graph=False, write_state=False)

    def close(self) -> None:
        """Frees what the arm holds."""
        self._session.close()

    def _load(self, prefix: str) -> None:
        self._saver.restore(self._session, prefix)

    def _load_cast(self, prefix: str) -> None:
        reader = tf.train.load_checkpoint(prefix)
        for name, variable in self._masters.items():
            self._run(variable.initializer, {variable.initializer.inputs[1]: reader.get_tensor(name)})

    def _run(self, *arguments: object) -> Any:
        try:
            return self._session.run(*arguments)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            raise OutOfMemoryError(f"arm {self.name}: out of memory ({summarize_error(error)}); take a smaller --batch "
                                   "or --preset, or fewer arms in --compare") from error
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError) as error:
            # The launcher, which sees all processes, knows better whose fault it is, and ends this one in a moment.
            time.sleep(_LAUNCHER_TELLS_WITHIN)
            raise ClusterError(f"arm {self.name}: a process was lost ({summarize_error(error)})") from error


def _copies(variable: mtf.Variable, laid_out: Any) -> list[list[tf.Tensor]]:
    """The reads of the slices of a variable that hold the same part of it; none of a lowering that is not ours."""
    mesh_impl = getattr(laid_out, "_mesh_impl", None)
    if not isinstance(mesh_impl, DeviceMeshImpl) or laid_out.slice_is_master:
        return []
    slices = laid_out.laid_out_tensor.all_slices
    groups = mesh_impl.partition(variable.shape).holders.values()
    return [[slices[position]._graph_element for position in group] for group in groups if len(group) > 1]


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    difference = np.abs(other - one).max(initial=0.0)
    return bool(np.isfinite(difference) and difference > 1e3 * np.finfo(one.dtype).eps * np.abs(one).max(initial=0.0))


def _few_at_a_time(sizes: Mapping[str, int]) -> Iterator[Sequence[str]]:
    """Names in groups of so many elements as fit into memory: every group costs a look through the graph."""
    return constrained_batches(sizes, _ELEMENTS_AT_A_TIME, get_len=sizes.__getitem__, strict=False)


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
        return lower_stock_data_parallel(program, plan.devices.names[:plan.options.parallel_devices],
                                         batch_dim(graph))

    arms: list[Arm] = []
    try:
        for name in names:
            with Stage(f"lowering {name}"):
                arms.append(Arm(name, functools.partial(program_of, plan), functools.partial(lowered, name),
                                plan.devices, plan.checkpoint,
                                works=lambda program, lowering: works_of(graph, program.graph, lowering)))
    except BaseException:
        for arm in arms:
            arm.close()
        raise
    return arms
