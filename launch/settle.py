"""Settling what a run is to do, before TensorFlow is loaded: names, sizes, devices, files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pase_mtf import models
from pase_mtf.errors import OutOfMemoryError
from pase_mtf.files import read_json
from pase_mtf.launch.checkpoint import CheckpointInfo, find_checkpoint
from pase_mtf.launch.options import Options, run_config
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.runtime import Devices, available_bytes, choose_devices

__all__ = ["Plan", "check_memory", "default_preset", "settle"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Attributes:
      options: with every default filled in.
      devices: what it runs on.
      config: the model's sizes.
      machine: whose numbers the search takes; None: measured later.
      checkpoint: what it continues; None: from the start.
    """

    options: Options
    devices: Devices
    config: Any
    machine: Machine | None
    checkpoint: CheckpointInfo | None

    @property
    def first_step(self) -> int:
        """Number of the first training step."""
        return self.checkpoint.step if self.checkpoint else 0

    def config_json(self) -> str:
        """The text of config.json."""
        return run_config(self.options, devices=list(self.devices.names), model_config=dataclasses.asdict(self.config))


def default_preset(devices: Devices, known: Any) -> str:
    """The preset that fits the devices: `tiny` on virtual CPU devices, `small` on GPUs."""
    wanted = "tiny" if devices.kind == "cpu" else "small"
    return wanted if wanted in known else sorted(known)[0]


def settle(options: Options) -> Plan:
    """Fills in the defaults and checks all that can be checked without building anything.

    Args:
      options: from the command line.

    Raises:
      UsageError: an unknown model, preset or machine; devices that are not there; a batch that does not split.
      FormatError: a strategy, checkpoint or machine file that is truncated or foreign.
    """
    known = models.presets(options.model)
    mesh = options.mesh_flag
    checkpoint = find_checkpoint(options.resume) if options.resume else None
    machine = None if options.machine == LOCAL else Machine.load(options.machine)
    if machine:
        machine.check_devices(mesh.devices)
    for arm in options.arms:
        if arm.method == "file":
            from pase_mtf.strategy import strategy
            read_json(arm.argument, strategy.FORMAT, strategy.VERSION)
    devices = choose_devices(options.devices, mesh.devices)
    preset = options.preset or default_preset(devices, known)
    config = models.load_config(options.model, preset, batch=options.batch, seed=options.seed)
    options = options.with_sizes(config, preset).with_output_dir()
    config = dataclasses.replace(config, optimizer=options.optimizer, learning_rate=options.learning_rate
                                 if options.learning_rate is not None else config.learning_rate)
    return Plan(options, devices, config, machine, checkpoint)


def check_memory(plan: Plan, strategies: Mapping[str, Any], trained: Sequence[str], machine: Machine) -> None:
    """Refuses what cannot fit, before anything is allocated: Linux does not say no, it kills.

    Args:
      plan: of the run.
      strategies: arm -> strategy; an arm without one (stock) needs what our own data parallelism does.
      trained: the arms that are built.
      machine: the devices.

    Raises:
      OutOfMemoryError: names the arm, what it needs, and the remedy.
    """
    stock = strategies.get("data_parallel")
    needs = {arm: strategies.get(arm, stock).memory_bytes for arm in trained if strategies.get(arm, stock)}
    remedy = "take a smaller --batch or --preset, more devices, or fewer arms in --compare"
    for arm, need in needs.items():
        if need > machine.memory_bytes:
            raise OutOfMemoryError(f"arm {arm}: needs {need / 2**30:.3g} GiB per device, a device of machine "
                                   f"{machine.name} has {machine.memory_bytes / 2**30:.3g} GiB; {remedy}")
    available = available_bytes()
    if plan.devices.kind == "cpu" and available is not None and needs:
        # All arms keep their variables, with a master of each; one at a time computes.
        held = {arm: _held(strategies.get(arm, stock)) for arm in needs}
        working = max(needs[arm] - held[arm] for arm in needs)
        total = (plan.devices.count + 1) * sum(held.values()) + plan.devices.count * working
        if total > available:
            raise OutOfMemoryError(f"all arms together need {total / 2**30:.1f} GiB on {plan.devices.count} virtual "
                                   f"devices, {available / 2**30:.1f} GiB are free; {remedy}")


def _held(strategy: Any) -> float:
    """Bytes on the fullest device that live from step to step."""
    return sum(size for part, size in strategy.memory.items() if part in ("weights", "optimizer slots"))
