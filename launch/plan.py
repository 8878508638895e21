"""What a run is to do, resolved before TensorFlow is loaded: names, sizes, devices, files."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pase_mtf import models
from pase_mtf.calibration.cache import fingerprint_of_kernels
from pase_mtf.calibration.load import is_kernel_file
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.errors import MismatchError, UsageError
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo, find_checkpoint
from pase_mtf.launch.cluster.membership import Membership, processes_here
from pase_mtf.launch.cluster.slurm import slurm_tasks
from pase_mtf.launch.flag_values import PIPELINE
from pase_mtf.launch.options import Options, ResolvedOptions, run_config
from pase_mtf.launch.possible import check_trained_pipeline
from pase_mtf.launch.resumption import contradiction
from pase_mtf.launch.run_folder import (
    AUTO,
    has_checkpoint,
    has_ended,
    has_results,
    load_run_config,
    newest_checkpoint,
    steps_done,
)
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.models.presets import ModelConfig
from pase_mtf.runtime import Devices, choose_devices

__all__ = ["Plan", "check_packages", "default_preset", "member_of", "resolve"]

_PACKAGES = {"jinja2": "jinja2", "matplotlib": "matplotlib", "PIL": "pillow", "tokenizers": "tokenizers"}
"""Modules that the extra "launch" of setup.py installs -> their packages."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Attributes:
      options: with every default filled in.
      devices: what it runs on.
      config: the model's sizes.
      machine: whose numbers the search takes; None: this one, measured later, or a file's kernel times.
      checkpoint: what it continues; None: from the start.
      kernels: the kernel times that the search takes, where a file tells them.
      done: where there is nothing left to do, the steps that the run has done which this one was to go on with; else 0.
      earlier: the options of the run that it continues, as that was started: where this one goes on in its folder, they
        are not there any more later on.
      newest: the step of the newest checkpoint, whole or not, that lay in the folder in which it goes on, before that
        was looked into; None: none did.
      asked: the options before a checkpoint was taken up: who takes it up later may find another. None: as `options`.
    """

    options: ResolvedOptions
    devices: Devices
    config: ModelConfig
    machine: Machine | None
    checkpoint: CheckpointInfo | None
    kernels: SavedKernels | None = None
    done: int = 0
    earlier: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    newest: int | None = None
    asked: ResolvedOptions | None = None

    @property
    def first_step(self) -> int:
        """Number of the first training step."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def microbatches(self) -> int:
        """In how many pieces a batch is computed; 1 while --microbatches=auto is not resolved."""
        return self.options.microbatch_count or 1

    def in_microbatches(self, count: int) -> Plan:
        """The same with the batch computed in so many pieces."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, microbatches=str(count)))

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The blocks that are computed again in the backward pass; none while --recompute=auto is not resolved."""
        return self.options.recomputed or ()

    def recomputing(self, names: Sequence[str]) -> Plan:
        """The same with these blocks computed again, and no others."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options,
                                                                     recompute=",".join(names) or "none"))

    @property
    def elsewhere(self) -> bool:
        """Whether the numbers that the search takes are not those of the devices of the run."""
        return self.options.machine != LOCAL and not (
            self.kernels is not None
            and self.kernels.times.on == fingerprint_of_kernels(self.devices.count, self.devices.kind))

    def config_json(self) -> str:
        """The text of config.json: who resumes this run begins with the steps that were asked for, not with what was
        left of them when it was taken up or started again."""
        member, asked = Membership.of_environment(), self.asked or self.options
        warmup, steps = member.asked if member and member.asked else (asked.warmup, asked.steps)
        return run_config(dataclasses.replace(self.options, warmup=warmup, steps=steps),
                          devices=list(self.devices.names), model_config=dataclasses.asdict(self.config))


def check_packages() -> None:
    """Refuses to start without what the extra "launch" installs, rather than to fail after the training.

    Raises:
      UsageError: names what is missing and how to install it.
    """
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f"the launcher needs {', '.join(missing)}; pip install 'pase_mtf[launch]'")


def default_preset(devices: Devices, known: Iterable[str]) -> str:
    """The preset that fits the devices: `tiny` on virtual CPU devices, `small` on GPUs."""
    wanted = "tiny" if devices.kind == "cpu" else "small"
    names = sorted(known)
    return wanted if wanted in names else names[0]


def _devices(options: Options) -> Devices:
    """The devices of a run: over processes, those that the launcher told this one, or will tell those that it starts.

    Raises:
      UsageError: they are not there.
    """
    count, flag, member = options.mesh_flag.devices, options.cluster_flag, Membership.of_environment()
    if member is not None:
        # Of the kind that is there for all: here may be GPUs for this process, and not for the others.
        mine = choose_devices(member.kind, count // len(member.tasks))
        return Devices.over_tasks(count, mine.kind, member.tasks, mine.models,
                                  member.rank if member.clients == "ranks" else None)
    if flag is None:
        return choose_devices(options.devices, count)
    each = count // flag.processes
    seen = len(processes_here(flag.tasks, flag.rank or 0, each)) if flag.tasks else 1
    sharing = flag.processes if flag.kind == "local" else seen
    here = choose_devices(options.devices, each * sharing, sharing, flag.processes)
    if options.clients == "ranks" and each > 1 and here.kind == "gpu":
        raise UsageError(f"--clients=ranks --mesh={options.mesh}: NCCL takes one GPU per process, and there are "
                         f"{flag.processes} processes; take --mesh={flag.processes}, or --clients=one")
    tasks = flag.tasks or tuple(f"127.0.0.1:{rank}" for rank in range(flag.processes))
    if flag.kind == "slurm" and options.searches_alone:  # no process is started that would be told; that takes seconds
        tasks, _ = slurm_tasks(flag.processes)
    return Devices.over_tasks(count, here.kind, tasks, here.models)


def member_of(options: Options) -> Membership:
    """Which process of --cluster this command is to start, and where all of them are.

    Nothing but that is looked at: the files of a run are those of rank 0. With local:N that is rank 0 of no addresses:
    it starts all.

    Raises:
      UsageError: it has no such devices; a job of Slurm's that cannot be understood.
    """
    flag = options.cluster_flag
    assert flag is not None
    devices = _devices(options)
    if flag.kind == "slurm":
        tasks, rank = slurm_tasks(flag.processes)
        return Membership(tasks, rank, devices.count, devices.kind, options.clients)
    return Membership(flag.tasks, flag.rank or 0, devices.count, devices.kind, options.clients)


def _prices(options: Options, devices: Devices, kernels: SavedKernels | None) -> str:
    """--prices, or what is known best of the machine: its kernels where they can be measured."""
    here = options.machine == LOCAL and devices.kind == "cpu" and options.cluster is None
    if kernels is not None:  # those of a file, whatever the devices: nothing is measured here
        return "measured"
    if options.prices == "measured" and devices.kind != "cpu":
        raise UsageError("--prices=measured: prices the kernels of CPUs only; leave it out, or take --devices=cpu")
    return options.prices or ("measured" if here else "roofline")


def _taken_up(options: Options) -> tuple[Options, CheckpointInfo | None, int]:
    """The options of what is left to do, the checkpoint that this begins with, and, where nothing is left, the steps
    that were done.

    Raises:
      FormatError: there is no whole checkpoint where there is to be one.
    """
    if options.resume != AUTO:
        return options, find_checkpoint(options.resume) if options.resume else None, 0
    folder, steps = options.output_dir, options.warmup + options.steps
    if folder is None or not has_checkpoint(folder):
        return options, None, 0
    checkpoint = find_checkpoint(folder)
    left, done = steps - checkpoint.step, steps_done(folder)
    # Steps behind the last checkpoint are done anew where they were to be kept, and not otherwise.
    over = left <= 0 or not options.checkpoint
    return options.going_on(folder, left), checkpoint, done if over and done >= steps else 0


def _done_before(options: ResolvedOptions) -> int:
    """How many steps a run has done that has ended in the folder where --resume=auto found no checkpoint: all that are
    asked for, whatever of it was kept, as where a scheduler starts the same command again; 0: one is to begin there.

    Raises:
      UsageError: another training lies there, or it has ended, and did fewer steps.
    """
    folder = options.output_dir
    if options.resume != AUTO or (options.cluster_flag and options.cluster_flag.rank) or not has_results(folder):
        return 0
    other, ended = contradiction(options, load_run_config(folder)), has_ended(folder)
    if ended and other is None and (done := steps_done(folder)) >= options.warmup + options.steps:
        return done
    if ended or other is not None:
        what = "that has ended" if ended else f"with {other}"
        raise UsageError(f"--output_dir={folder}: holds a run {what}, and no checkpoint to go on with; name another, "
                         "or remove it")
    return 0


def _check_arms(options: Options) -> None:
    """Whether there can be the arms that are named, and the files of those that are files.

    Raises:
      UsageError: the updates of weights are to be split, and are no layers.
      FormatError: a strategy or pipeline file that is truncated or foreign.
      MismatchError: one for another number of devices.
    """
    for arm in options.arms:
        if arm.method == "zero" and not options.sharded_updates:
            raise UsageError("arm zero: splits the updates of weights, which are no layers of their own; add "
                             "--sharded_updates, or leave the arm out")
        if arm.method == "file":
            from pase_mtf.strategy.strategy import Strategy  # loads numba: only where there is a file to check
            _check_devices(arm.argument, "strategy", Strategy.load(arm.argument).devices, options)
        if arm.method == PIPELINE and arm.argument:
            from pase_mtf.pipeline.pipeline import Pipeline  # as above
            _check_devices(arm.argument, "pipeline", Pipeline.load(arm.argument).devices, options)


def _check_devices(path: str, what: str, devices: int, options: Options) -> None:
    """Raises MismatchError where a file is for another number of devices than the run has."""
    mesh = options.mesh_flag
    if devices != mesh.devices:
        raise MismatchError(f"{path}: a {what} for {devices} devices, --mesh={mesh.text} has {mesh.devices}; use "
                            f"--mesh={devices}, or search anew")


def _if_missing(flag: str, value: str, earlier: Mapping[str, Any]) -> str | None:
    """What to do where the file that a flag names is not there, and a run is resumed, with these options; None: none
    is."""
    if not earlier:
        return None
    return (f"it was that of the run that is resumed; give --{flag}=where it is now" if value == earlier.get(flag) else
            "check the path")


def resolve(options: Options) -> Plan:
    """Fills in the defaults and checks all that can be checked without building anything.

    Args:
      options: from the command line.

    Raises:
      UsageError: an unknown model, preset or machine; devices that are not there; a batch that does not split; a model
        that cannot be computed in microbatches, or in stages, where it is to be; a folder in which another training
        lies, or one that has ended.
      DataError: data that is missing, malformed or does not fit the model.
      FormatError: a strategy, pipeline, checkpoint or machine file that is truncated or foreign.
    """
    model = options.model_name
    known = models.presets(model)
    mesh = options.mesh_flag
    newest = newest_checkpoint(options.output_dir) if options.in_place and options.output_dir else None
    asked = options
    options, checkpoint, done = _taken_up(options)
    earlier = load_run_config(options.resume)["options"] if checkpoint and options.resume else {}
    kernels = SavedKernels(options.machine, mesh.devices) if is_kernel_file(options.machine) else None
    machine = None if options.machine == LOCAL or kernels else Machine.load(options.machine)
    if machine:
        machine.check_devices(mesh.devices)
    _check_arms(options)
    if options.data is not None:
        from pase_mtf.launch.data import check_data  # numpy and what reads images: only where there are any
    devices = _devices(options)
    options = dataclasses.replace(options, prices=_prices(options, devices, kernels))
    preset = options.preset or default_preset(devices, known)
    if preset not in known and not os.path.exists(preset) and (told := _if_missing("preset", preset, earlier)):
        raise UsageError(f"--preset={preset}: no such file; {told}")
    config = models.load_config(model, preset, batch=options.batch, dtype=options.dtype)
    if config.seed not in (0, options.seed):
        raise UsageError(f"--preset={preset}: seed {config.seed} there, {options.seed} here; leave it out there, and "
                         f"give the launcher --seed={config.seed}")
    config = dataclasses.replace(config, seed=options.seed)
    resolved = options.resolved(config, preset)
    done = done or _done_before(resolved)
    check_trained_pipeline(resolved, config)
    if options.data is not None:
        check_data(options.data, config, _if_missing("data", options.data, earlier))
    rate = config.learning_rate if resolved.learning_rate is None else resolved.learning_rate
    config = dataclasses.replace(config, optimizer=resolved.optimizer, learning_rate=rate)
    before = dataclasses.replace(resolved, resume=asked.resume, warmup=asked.warmup, steps=asked.steps)
    return Plan(resolved, devices, config, machine, checkpoint, kernels, done, earlier, newest, before)
