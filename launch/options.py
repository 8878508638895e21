"""The options of a run: the flags, their defaults, and config.json, which keeps them for --resume."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

from typing_extensions import Self

from pase_mtf.amounts import parse_bytes
from pase_mtf.calibration.load import are_measured, is_kernel_file
from pase_mtf.errors import UsageError, nearest, shortened
from pase_mtf.flag_text import check_not_empty
from pase_mtf.launch.cluster.flag import ClusterFlag, parse_cluster
from pase_mtf.launch.flag_values import (
    BY_BATCH,
    PIPELINE,
    ArmName,
    MeshFlag,
    fitting_arms,
    largest_divisor,
    parse_arms,
    parse_mesh,
)
from pase_mtf.launch.run_folder import (
    AUTO,
    CONFIG_FORMAT,
    CONFIG_VERSION,
    check_folder_taken_up,
    check_new_folder,
    check_no_training,
    check_whole_path,
)
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.models.checks import DTYPES
from pase_mtf.models.presets import BATCH_STATISTICS, ModelConfig
from pase_mtf.pipeline.schedule import SCHEDULES

__all__ = ["CLIENTS", "OPTIMIZERS", "Options", "ResolvedOptions", "learning_rate_of", "run_config"]

# The rate where the user names an optimizer that is not the preset's and no rate; None: Adafactor's own schedule.
OPTIMIZERS = {"sgd": 0.01, "adam": 0.001, "adafactor": None}

CLIENTS = ("one", "ranks")
"""Values of --clients."""

_NAMED = {"resume": "name a folder", "preset": "name a preset or a file", "data": "name a file or a folder",
          "machine": "name one or a file"}
"""Flags whose value is refused where it is empty, as that of a variable that is not set, and what to do instead."""

# Steps, seeds and sizes are fed to the models as 32-bit integers.
_MOST = 2 ** 31 - 1


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, by their names; None where the default depends on the model or the devices."""

    model: str | None = None
    preset: str | None = None
    mesh: str = "8"
    devices: str = "auto"
    batch: int | None = None
    steps: int = 30
    warmup: int = 3
    data: str | None = None
    strategy: str = "search"
    compare: str = "data_parallel,expert,search"
    machine: str = "local"
    prices: str | None = None
    measure_seconds: int = 60
    trial: bool = True
    recalibrate: bool = False
    memory_limit: str = "device"
    microbatches: str = "1"
    schedule: str = "1f1b"
    recompute: str = "none"
    sharded_updates: bool = False
    optimizer: str | None = None
    learning_rate: float | None = None
    dtype: str | None = None
    output_dir: str | None = None
    search_only: bool = False
    resume: str | None = None
    seed: int = 0
    print_config: bool = False
    log_every: int = 5
    checkpoint: bool = True
    checkpoint_every: int | None = None
    cluster: str | None = None
    clients: str = "one"
    task: int | None = None
    max_restarts: int = 0

    @property
    def model_name(self) -> str:
        """--model, which has no default (UsageError where it is missing)."""
        if not self.model:
            raise UsageError("--model is missing; for example --model=transformer or --model=alexnet")
        return self.model

    @property
    def mesh_flag(self) -> MeshFlag:
        """--mesh, parsed."""
        return parse_mesh(self.mesh)

    @property
    def cluster_flag(self) -> ClusterFlag | None:
        """--cluster and --task, parsed; None: one process."""
        return None if self.cluster is None else parse_cluster(self.cluster, self.task)

    @property
    def searches_alone(self) -> bool:
        """Whether one process is enough: nothing is trained, and no machine of several processes is to be measured."""
        return self.search_only and not self.recalibrate

    @property
    def in_place(self) -> bool:
        """Whether the run goes on in the folder of the one that it continues, or begins anew in it."""
        return self.resume == AUTO or bool(self.resume and self.output_dir and (
            os.path.realpath(self.resume) == os.path.realpath(self.output_dir)))

    @property
    def arms(self) -> tuple[ArmName, ...]:
        """The arms to measure, the one of --strategy first."""
        return parse_arms(self.strategy, self.compare)

    @property
    def microbatch_count(self) -> int | None:
        """--microbatches; None: auto.

        Raises:
          UsageError: neither a positive number nor auto.
        """
        if self.microbatches == "auto":
            return None
        digits = self.microbatches.lstrip("0")
        if not (digits.isdecimal() and len(digits) <= len(str(_MOST)) and 1 <= int(digits) <= _MOST):
            raise UsageError(f"--microbatches={shortened(self.microbatches, quoted=False)}: give a number that divides "
                             f"the batch, or {self._searched}")
        return int(digits)

    @property
    def _searched(self) -> str:
        """What to do where no number is given, and the best is to be found: a pipeline is searched for its own."""
        return "leave it out" if self.arms[0].method == PIPELINE else "auto"

    @property
    def recomputed(self) -> tuple[str, ...] | None:
        """--recompute: names of blocks, or `ALL`; None: auto.

        Raises:
          UsageError: a name is empty, or stands beside none, all or auto.
        """
        names = tuple(dict.fromkeys(self.recompute.split(",")))
        if "" in names or (len(names) > 1 and {"none", "all", "auto"} & set(names)):
            raise UsageError(f"--recompute={shortened(self.recompute, quoted=False)}: give none, all, auto, or names "
                             "of blocks separated by commas")
        return None if names == ("auto",) else () if names == ("none",) else names

    @property
    def _measures_kernels(self) -> bool:
        """Whether --prices asks for kernels of the machine at hand: not those of a file, which need be on the host of
        rank 0 alone."""
        another = bool(self.cluster_flag and self.cluster_flag.rank)
        of_file = is_kernel_file(self.machine) or (another and (
            self.machine.endswith(".json") or os.sep in self.machine))
        return self.prices == "measured" and not of_file

    def may_allow_more(self, machine: Machine) -> bool:
        """Whether a larger --memory_limit may help: no more is trained than a device of the machine holds."""
        return self.search_only or self.bytes_per_device(machine) < machine.memory_bytes

    def bytes_per_device(self, machine: Machine) -> float:
        """--memory_limit in bytes."""
        limit = parse_bytes(self.memory_limit)
        return machine.memory_bytes if limit is None else limit

    def bytes_of_compared(self, machine: Machine) -> float:
        """What a strategy to compare with may need per device: what is trained has to fit that, whatever the limit."""
        limit = self.bytes_per_device(machine)
        return limit if self.search_only else min(limit, machine.memory_bytes)

    def check(self) -> None:
        """Refuses values that cannot be meant, and folders that cannot be used, before anything is loaded.

        Raises:
          UsageError: names the flag, its value and the remedy.
        """
        self.check_values()
        # The files of a run are those of rank 0, whose folder others may see, and see made.
        if self.cluster_flag and self.cluster_flag.rank:
            return
        if self.resume == AUTO:
            check_folder_taken_up(self.output_dir)
        elif not self.in_place:
            check_new_folder(self.output_dir)
        if self.search_only and self.in_place:
            check_no_training(self.output_dir)
        if self.in_place:
            self._check_replaces_none()
        if self.clients == "ranks" and not self.search_only:
            if self.checkpoint or self.resume == AUTO:  # else no checkpoint is written or looked for there
                check_whole_path("--output_dir", self.output_dir or "outputs")
            if self.resume and self.resume != AUTO:
                check_whole_path("--resume", self.resume)

    def pipeline_file(self, arm: ArmName) -> str:
        """The name in the folder of the run under which the pipeline of an arm is kept."""
        first = self.arms[0]
        return "searched_pipeline.json" if arm != first and first.method == PIPELINE else "pipeline.json"

    def _check_replaces_none(self) -> None:
        """Raises UsageError where a run in its own folder would write over a file that it trains or compares with."""
        first, *others = self.arms
        own = {self.pipeline_file(first) if first.method == PIPELINE else "strategy.json"}
        beside = {self.pipeline_file(arm) for arm in others if arm.method == PIPELINE and not arm.argument}
        # What is trained is written to its own file again, as it is.
        for flag, arm, written in (("strategy", first, beside), *(("compare", arm, own | beside) for arm in others)):
            places = {os.path.realpath(os.path.join(self.output_dir or "", name)) for name in written}
            if arm.method in ("file", PIPELINE) and arm.argument and os.path.realpath(arm.argument) in places:
                raise UsageError(f"--{flag}={arm.argument}: this run replaces it, as it goes on in that folder; copy "
                                 "it elsewhere first, or name another --output_dir")

    def check_values(self) -> None:
        """`check`, of a command that writes no files of a run.

        Raises:
          UsageError: as of `check`.
        """
        for name, instead in _NAMED.items():
            check_not_empty(f"--{name}", getattr(self, name), instead)
        _ = self.model_name, self.mesh_flag, self.arms, parse_bytes(self.memory_limit), self.microbatch_count
        _ = self.recomputed
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--schedule={self.schedule}: unknown; {nearest(self.schedule, SCHEDULES)}")
        searched = any(arm.method == PIPELINE and not arm.argument for arm in self.arms)
        # A run that is continued hands its own on; auto says all of it itself.
        if self.schedule != Options.schedule and not searched and self.resume in (None, AUTO):
            raise UsageError(f"--schedule={self.schedule}: is for a pipeline that is searched; name {PIPELINE} in "
                             "--strategy or --compare")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype={self.dtype}: unknown; {nearest(self.dtype, DTYPES)}")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer={self.optimizer}: unknown; {nearest(self.optimizer, OPTIMIZERS)}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning_rate={self.learning_rate}: give a positive number, such as 0.01")
        are_measured(self.prices, self.machine, "--prices")
        measuring = {"recalibrate": self.recalibrate,
                     "prices": self._measures_kernels}
        for name in (name for name, asked in measuring.items() if asked and self.machine != LOCAL):
            raise UsageError(f"--{name} is for the machine at hand; leave it out, or leave out "
                             f"--machine={self.machine}")
        least_steps = 0 if self.resume not in (None, AUTO) else 1  # `going_on`
        for name, least in (("batch", 1), ("measure_seconds", 1), ("steps", least_steps), ("warmup", 1),
                            ("log_every", 1), ("seed", 0), ("checkpoint_every", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name}={value}: must be at least {least}")
            if value is not None and value > _MOST:
                raise UsageError(f"--{name}={shortened(value)}: must be at most {_MOST}")
        if self.checkpoint_every is not None and not self.checkpoint:
            raise UsageError(f"--checkpoint_every={self.checkpoint_every}: with --nocheckpoint there are none; leave "
                             "one of the two out")
        self._check_cluster()

    def _check_cluster(self) -> None:
        flag, devices = self.cluster_flag, self.mesh_flag.devices
        if flag is None:
            for name in ("task", "clients", "max_restarts"):
                if getattr(self, name) != getattr(Options, name):
                    raise UsageError(f"--{name}={getattr(self, name)}: is for a run over processes; give --cluster "
                                     "(--cluster=local:1 watches a single one)")
            return
        if devices % flag.processes:
            near = flag.processes * max(1, round(devices / flag.processes))
            raise UsageError(f"--mesh={self.mesh}: {devices} devices do not split over the {flag.processes} processes "
                             f"of --cluster={self.cluster}; take --mesh={near}")
        if self.clients not in CLIENTS:
            raise UsageError(f"--clients={self.clients}: unknown; {nearest(self.clients, CLIENTS)}")
        if self.devices not in ("auto", "cpu", "gpu"):
            raise UsageError(f"--devices={self.devices}: over processes every one takes its first; give auto, cpu or "
                             "gpu")
        if self._measures_kernels:
            raise UsageError(f"--prices={self.prices}: kernels are measured in one process; leave it out, or leave "
                             f"out --cluster={self.cluster}")

    def resolved(self, config: ModelConfig, preset: str) -> ResolvedOptions:
        """The same with what the flags leave open filled in: from the model's sizes, and a new output directory.

        Args:
          config: of `pase_mtf.models.load_config`.
          preset: its name.

        Raises:
          UsageError: data parallelism is to be trained, with sharded updates or without, and the batch does not split
            over the devices; or it does not divide by the number of microbatches, or must not be divided.
        """
        batch, pieces = self.batch or config.batch, self.microbatch_count or 1
        if batch % pieces:
            raise UsageError(f"--microbatches={self.microbatches}: a batch of {batch} does not split so; take "
                             f"--microbatches={largest_divisor(batch, min(pieces, batch))}, or {self._searched}")
        if pieces > 1 and self.model in BATCH_STATISTICS:
            raise UsageError(f"--microbatches={self.microbatches}: {self.model} normalises over the batch, so that "
                             "pieces of it are another model; leave it out")
        optimizer = self.optimizer or config.optimizer
        rate = self.learning_rate
        if rate is None:
            rate = learning_rate_of(optimizer, config)
        devices = self.mesh_flag.devices
        if batch % (pieces * devices) and self.arms[0].method in BY_BATCH:
            whole = f"--batch={batch}" + (f" in {pieces} microbatches" if pieces > 1 else "")
            near = max(1, round(batch / (pieces * devices))) * pieces * devices
            processes = self.cluster_flag.processes if self.cluster_flag else 1
            fewer = [f"--mesh={count}" for count in range(devices, 0, -1)
                     if batch // pieces % count == 0 and count % processes == 0][:1]
            other = [f"--batch={near}"] if self.resume in (None, AUTO) else []  # a run goes on with its own
            take = "".join(f"{flag}, " for flag in (*other, *fewer))
            raise UsageError(f"--strategy={self.strategy}: {whole} does not split over {devices} devices; take {take}"
                             f"{'or ' if take else ''}--strategy=search")
        return ResolvedOptions(**{**self.to_json(), "preset": preset, "batch": batch, "optimizer": optimizer,
                                  "learning_rate": rate, "dtype": config.dtype,
                                  "output_dir": self.output_dir or self._new_output_dir()})

    def _new_output_dir(self) -> str:
        """A folder that does not exist, named by model, mesh, time and process: it is made seconds later, and another
        run that begins in this second must not choose the same."""
        stem = os.path.join("outputs", f"{self.model}-{self.mesh_flag.file_name}-"
                                       f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        name, number = stem, 1
        while os.path.lexists(name):
            number += 1
            name = f"{stem}-{number}"
        return name

    def going_on(self, folder: str, left: int) -> Self:
        """The same from the last checkpoint in a folder, for so many steps; one is the least that a run does, which is
        its warm-up."""
        warmup = max(1, min(self.warmup, left - 1))
        return dataclasses.replace(self, resume=folder, warmup=warmup, steps=max(0, left - warmup))

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return dataclasses.asdict(self)

    def to_arguments(self) -> list[str]:
        """As a command line."""
        return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
                for name, value in self.to_json().items() if value is not None]


@dataclasses.dataclass(frozen=True)
class ResolvedOptions(Options):
    """Options with every default filled in (a learning rate of None is Adafactor's own schedule)."""

    model: str = ""
    preset: str = ""
    batch: int = 0
    optimizer: str = ""
    dtype: str = ""
    output_dir: str = ""

    @property
    def arms(self) -> tuple[ArmName, ...]:
        """The arms to measure, the one of --strategy first; of data parallelism, what the batch allows."""
        return fitting_arms(parse_arms(self.strategy, self.compare), self.together, self.mesh_flag.devices)

    @property
    def together(self) -> int:
        """Examples that are computed together: those of a microbatch."""
        return self.batch // (self.microbatch_count or 1)

    @property
    def parallel_devices(self) -> int:
        """How many devices data parallelism runs on; the others idle."""
        return largest_divisor(self.together, self.mesh_flag.devices)

    @property
    def uneven(self) -> str:
        """What becomes of data parallelism where the batch does not split over the devices; empty where it does."""
        devices = self.mesh_flag.devices
        if self.together % devices == 0 or not any(
                arm.method in BY_BATCH for arm in parse_arms(self.strategy, self.compare)):
            return ""
        count, name = self.parallel_devices, "batch" if self.together == self.batch else "microbatch"
        return f"a {name} of {self.together} does not split over {devices} devices: " + (
            f"over {count} of them, {devices - count} idle" if count > 1 else "left out")


def learning_rate_of(optimizer: str, preset: ModelConfig) -> float | None:
    """The rate of a preset; of another optimizer than its own the usual one of that. None: it has none."""
    return preset.learning_rate if optimizer == preset.optimizer else OPTIMIZERS[optimizer]


def run_config(options: ResolvedOptions, **more: object) -> str:
    """The text of config.json: the resolved options and what else decides the run."""
    return json.dumps({"format": CONFIG_FORMAT, "version": CONFIG_VERSION, "options": options.to_json(), **more},
                      indent=2) + "\n"
