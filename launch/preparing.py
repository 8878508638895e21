"""The stages between the command line and the first step: data, machine, graph, arms."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch import checkpoint
from pase_mtf.launch.arm import Arm, lower_stock_data_parallel
from pase_mtf.launch.auto_mtf import auto_mtf_layout, auto_mtf_mesh
from pase_mtf.launch.console import Stage
from pase_mtf.launch.data import Data, open_data
from pase_mtf.launch.program import Program, build_program
from pase_mtf.launch.settle import Plan
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import batch_dim

__all__ = ["ask_auto_mtf", "build_arms", "describe_run", "export_program", "open_run_data"]


def open_run_data(plan: Plan) -> Data:
    """Opens the data of a run.

    Raises:
      DataError: it is missing, malformed, or does not fit the model.
    """
    options = plan.options
    return open_data(options.data, models.get(options.model), plan.config, options.batch, options.seed)


def _build(plan: Plan) -> Program:
    options = plan.options
    return build_program(models.get(options.model), plan.config, options.batch, options.optimizer,
                         options.learning_rate, options.seed)


def export_program(plan: Plan) -> ComputationGraph:
    """The computation graph of the program that every arm trains.

    Raises:
      MismatchError: the checkpoint to resume from is of another program.
    """
    options = plan.options
    with Stage("export"), tf.Graph().as_default():
        graph = export_graph(_build(plan).graph, name=f"{options.model}-{options.preset}",
                             meta={"batch": options.batch, "optimizer": options.optimizer, "preset": options.preset})
    if plan.checkpoint and plan.checkpoint.graph_hash != graph.hash:
        raise MismatchError(f"--resume={options.resume}: the checkpoint is of graph {plan.checkpoint.graph_hash}, this "
                            f"program is {graph.hash}; resume with the version of pase_mtf that wrote it")
    return graph


def ask_auto_mtf(plan: Plan) -> Callable[[], dict[str, str]]:
    """What asks Mesh-TF's own optimiser for the layout rules of the program, when an arm wants them."""
    options = plan.options

    def ask() -> dict[str, str]:
        mesh = auto_mtf_mesh(options.mesh_flag.devices, options.mesh_flag.axes)
        with Stage("auto_mtf"):
            return auto_mtf_layout(options.model, plan.config, options.batch, options.optimizer, mesh)
    return ask


def build_arms(plan: Plan, graph: ComputationGraph, strategies: Mapping[str, Any], names: Sequence[str]) -> list[Arm]:
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
    def lowered(name: str) -> Any:
        if name in strategies:
            return lambda program: lower(program.graph, strategies[name], list(plan.devices.names),
                                         step=program.global_step.read_value())
        return lambda program: lower_stock_data_parallel(program, plan.devices, batch_dim(graph))

    restore = (lambda load: checkpoint.restore(plan.checkpoint, load)) if plan.checkpoint else None
    arms: list[Arm] = []
    try:
        for name in names:
            with Stage(f"lowering {name}"):
                arms.append(Arm(name, lambda: _build(plan), lowered(name), plan.devices, restore))
    except BaseException:
        for arm in arms:
            arm.close()
        raise
    return arms


def describe_run(plan: Plan, data: Data, machine: Machine, graph: ComputationGraph) -> dict[str, str]:
    """The header of a run: what it runs, on what, and where its numbers come from."""
    options = plan.options
    rate = "its own schedule" if options.learning_rate is None else f"{options.learning_rate:g}"
    facts = {
        "versions": f"pase_mtf {_version('pase_mtf')}, TensorFlow {tf.__version__}, Mesh-TensorFlow "
                    f"{_version('mesh-tensorflow')}, Python {platform.python_version()}",
        "devices": str(plan.devices),
        "machine": f"{machine.name}: {machine.source}" + (
            "; NOT the devices of this run: predicted and measured times do not compare" if plan.machine else ""),
        "model": f"{options.model}, preset {options.preset}, {graph.parameters:,} parameters, "
                 f"{graph.flops / 1e9:.2f} GFLOP a step",
        "training": f"batch {options.batch}, {options.optimizer}, learning rate {rate}, seed {options.seed}, "
                    f"{options.warmup} warm-up + {options.steps} steps",
        "data": data.describe(),
        "arms": ", ".join(arm.name for arm in options.arms),
        "output": os.path.abspath(options.output_dir),
    }
    if plan.checkpoint:
        facts["resumes"] = f"{options.resume} at step {plan.first_step}"
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
