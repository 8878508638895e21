"""The options of a run: the flags, their defaults, and config.json, which keeps them for --resume."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from typing_extensions import Self

from pase_mtf import models
from pase_mtf.amounts import parse_bytes
from pase_mtf.calibration.load import PRICES, is_kernel_file
from pase_mtf.errors import FormatError, UsageError, nearest, shortened
from pase_mtf.flag_text import flag_text
from pase_mtf.launch.cluster.flag import ClusterFlag, parse_cluster
from pase_mtf.launch.flag_values import (
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
    has_checkpoint,
    load_run_config,
)
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.models.checks import DTYPES
from pase_mtf.models.presets import ModelConfig
from pase_mtf.pipeline.schedule import SCHEDULES

__all__ = [
    "CLIENTS",
    "OPTIMIZERS",
    "HelpRequested",
    "Options",
    "ResolvedOptions",
    "parse_command_line",
    "run_config",
]

# The rate where the user names an optimizer that is not the preset's and no rate; None: Adafactor's own schedule.
OPTIMIZERS = {"sgd": 0.01, "adam": 0.001, "adafactor": None}

CLIENTS = ("one", "ranks")
"""Values of --clients."""

# Steps, seeds and sizes are fed to the models as 32-bit integers.
_MOST = 2 ** 31 - 1

# What decides the numbers of a training: a resumed run must agree with the one it resumes.
_TRAINING = ("model", "preset", "batch", "data", "optimizer", "learning_rate", "dtype", "seed")

# What runs of earlier versions do not tell: the default holds.
_ADDED = ("checkpoint_every", "dtype", "measure_seconds", "memory_limit", "microbatches", "recompute", "schedule",
          "sharded_updates", "trial")


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
            os.path.abspath(self.resume) == os.path.abspath(self.output_dir)))

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
        if not (self.microbatches.isdecimal() and 1 <= int(self.microbatches[:11]) <= _MOST):
            raise UsageError(f"--microbatches={shortened(self.microbatches, quoted=False)}: give a number that divides "
                             "the batch, or auto")
        return int(self.microbatches)

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

    def bytes_per_device(self, machine: Machine) -> float:
        """--memory_limit in bytes."""
        limit = parse_bytes(self.memory_limit)
        return machine.memory_bytes if limit is None else limit

    def check(self) -> None:
        """Refuses values that cannot be meant, before anything is loaded.

        Raises:
          UsageError: names the flag, its value and the remedy.
        """
        _ = self.model_name, self.mesh_flag, self.arms, parse_bytes(self.memory_limit), self.microbatch_count
        _ = self.recomputed
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--schedule={self.schedule}: unknown; {nearest(self.schedule, SCHEDULES)}")
        searched = any(arm.method == PIPELINE and not arm.argument for arm in self.arms)
        if self.schedule != Options.schedule and not searched and not self.resume:
            raise UsageError(f"--schedule={self.schedule}: is for a pipeline that is searched; name {PIPELINE} in "
                             "--strategy or --compare")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype={self.dtype}: unknown; {nearest(self.dtype, DTYPES)}")
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer={self.optimizer}: unknown; {nearest(self.optimizer, OPTIMIZERS)}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning_rate={self.learning_rate}: give a positive number, such as 0.01")
        if self.prices is not None and self.prices not in PRICES:
            raise UsageError(f"--prices={self.prices}: unknown; {nearest(self.prices, PRICES)}")
        measuring = {"recalibrate": self.recalibrate,
                     "prices": self.prices == "measured" and not is_kernel_file(self.machine)}
        for name in (name for name, asked in measuring.items() if asked and self.machine != LOCAL):
            raise UsageError(f"--{name} is for the machine at hand; leave it out, or leave out "
                             f"--machine={self.machine}")
        for name, least in (("batch", 1), ("measure_seconds", 1), ("steps", 1), ("warmup", 1), ("log_every", 1),
                            ("seed", 0), ("checkpoint_every", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name}={value}: must be at least {least}")
            if value is not None and value > _MOST:
                raise UsageError(f"--{name}={shortened(value)}: must be at most {_MOST}")
        self._check_cluster()
        # The files of a run are those of rank 0, whose folder others may see, and see made.
        if self.cluster_flag and self.cluster_flag.rank:
            return
        if self.resume == AUTO:
            check_folder_taken_up(self.output_dir)
        elif not self.in_place:
            check_new_folder(self.output_dir)

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
        if self.prices == "measured":
            raise UsageError(f"--prices={self.prices}: kernels are measured in one process; leave it out, or leave "
                             f"out --cluster={self.cluster}")

    def resolved(self, config: ModelConfig, preset: str) -> ResolvedOptions:
        """The same with what the flags leave open filled in: from the model's sizes, and a new output directory.

        Args:
          config: of `pase_mtf.models.load_config`.
          preset: its name.

        Raises:
          UsageError: data parallelism is to be trained, and the batch does not divide by the number of devices; or it
            does not divide by that of microbatches.
        """
        batch, pieces = self.batch or config.batch, self.microbatch_count or 1
        if batch % pieces:
            raise UsageError(f"--microbatches={self.microbatches}: a batch of {batch} does not split so; take "
                             f"--microbatches={largest_divisor(batch, min(pieces, batch))}, or auto")
        optimizer = self.optimizer or config.optimizer
        rate = self.learning_rate
        if rate is None:
            rate = config.learning_rate if optimizer == config.optimizer else OPTIMIZERS[optimizer]
        devices = self.mesh_flag.devices
        if batch % (pieces * devices) and self.arms[0].method == "data_parallel":
            whole = f"--batch={batch}" + (f" in {pieces} microbatches" if pieces > 1 else "")
            near = max(1, round(batch / (pieces * devices))) * pieces * devices
            raise UsageError(f"--strategy=data_parallel: {whole} does not split over {devices} devices; take "
                             f"--batch={near}, --mesh={largest_divisor(batch // pieces, devices)}, or "
                             "--strategy=search")
        return ResolvedOptions(**{**self.to_json(), "preset": preset, "batch": batch, "optimizer": optimizer,
                                  "learning_rate": rate, "dtype": config.dtype,
                                  "output_dir": self.output_dir or self._new_output_dir()})

    def _new_output_dir(self) -> str:
        """A folder that does not exist, named by model, mesh and time."""
        stem = os.path.join("outputs", f"{self.model}-{self.mesh_flag.file_name}-{time.strftime('%Y%m%d-%H%M%S')}")
        name, number = stem, 1
        while os.path.lexists(name):
            number += 1
            name = f"{stem}-{number}"
        return name

    def resumed(self, given: set[str]) -> Options:
        """The same with what --resume's run was started with, where the command line does not say otherwise.

        Args:
          given: names of the flags on the command line.

        Raises:
          FormatError: the folder holds no run of ours.
          UsageError: a flag contradicts what the training was started with.
        """
        folder = self.resume
        if folder == AUTO:  # one command for the first start and all others: it says the rest itself
            folder = None if self.cluster_flag and self.cluster_flag.rank else self.output_dir
            folder = folder if folder and has_checkpoint(folder) else None
        if not folder:
            return self
        earlier = load_run_config(folder)["options"]
        for name in _TRAINING:
            if name in given and name in earlier and getattr(self, name) != earlier[name]:
                raise UsageError(f"--{name}={getattr(self, name)}: the run in {folder} was trained with "
                                 f"{earlier[name]}; leave the flag out to continue it, or start anew")
        inherited = _TRAINING if self.resume == AUTO else (
            *_TRAINING, *_ADDED, "mesh", "devices", "machine", "strategy", "compare", "steps", "warmup", "log_every")
        earlier = {**{name: getattr(Options, name) for name in _ADDED}, **earlier}
        try:
            return dataclasses.replace(
                self, **{name: earlier[name] for name in inherited if name not in given})
        except KeyError as error:
            raise FormatError(f"{folder}/config.json: lacks {error}; it is truncated or foreign") from error

    def going_on(self, folder: str, left: int) -> Self:
        """The same from the last checkpoint in a folder, for so many steps; two are the least that a run does."""
        warmup = max(1, min(self.warmup, left - 1))
        return dataclasses.replace(self, resume=folder, warmup=warmup, steps=max(1, left - warmup))

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
                arm.method in ("stock", "data_parallel") for arm in parse_arms(self.strategy, self.compare)):
            return ""
        count, name = self.parallel_devices, "batch" if self.together == self.batch else "microbatch"
        return f"a {name} of {self.together} does not split over {devices} devices: " + (
            f"over {count} of them, {devices - count} idle" if count > 1 else "left out")


def run_config(options: ResolvedOptions, **more: object) -> str:
    """The text of config.json: the resolved options and what else decides the run."""
    return json.dumps({"format": CONFIG_FORMAT, "version": CONFIG_VERSION, "options": options.to_json(), **more},
                      indent=2) + "\n"


_USAGE = """\
Finds the cheapest way to split every layer of a Mesh-TensorFlow model over the devices, trains with it, and shows the
measured speedup over data parallelism.

  python -m pase_mtf.launch --model=transformer --mesh=8

Exit codes: 0 done; 2 bad usage; 3 no feasible strategy; 4 out of memory; 5 the strategy does not fit the graph;
6 the losses of the arms disagree; 7 a process of --cluster is missing or was lost; 130 (Ctrl-C) and 143 (SIGTERM)
interrupted: what was measured so far is written.
"""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """--help was given; the text is the message."""


def _flag_values() -> flags.FlagValues:
    """Own flags, apart from absl's global ones, so that tests and programs can parse as often as they like."""
    values = flags.FlagValues()
    default = Options()

    def text(name: str, help_text: str) -> None:
        flags.DEFINE_string(name, getattr(default, name), help_text, flag_values=values)

    def number(name: str, help_text: str) -> None:
        flags.DEFINE_integer(name, getattr(default, name), help_text, flag_values=values)

    def switch(name: str, help_text: str) -> None:
        flags.DEFINE_boolean(name, getattr(default, name), help_text, flag_values=values)

    text("model", f"The model: {', '.join(models.names())}.")
    text("preset", "Its sizes (configs/models/*.json); default: tiny on virtual CPU devices, small on GPUs.")
    text("mesh", "A number of devices, or a mesh shape such as 'rows:2;cols:4': that many devices, and the expert "
         "strategy lays the model out on exactly these axes; the search is free to use others.")
    text("devices", "auto (GPUs where there are enough, else virtual CPU devices), cpu, gpu, or a list of TensorFlow "
         "device names separated by commas.")
    number("batch", "Examples per step; default: the preset's.")
    number("steps", "Measured training steps.")
    number("warmup", "Training steps before those, not timed; the first of them is traced for its memory.")
    text("data", "Files to train on: an IDX image file or folder, a folder of images with labels, a text file, or "
         "source.txt,target.txt; default: synthetic data.")
    text("strategy", "search, data_parallel, expert, zero, pipeline, or a file of a strategy or pipeline: what is "
         "trained, kept and resumed.")
    text("compare", "The arms to measure beside it, separated by commas: data_parallel (through stock mtf.Lowering and "
         "through ours), expert, search, zero (with --sharded_updates: data parallelism in which every device updates "
         "a part of the weights), stock_data_parallel, pipeline (stages of layers on groups of devices), mcmc and "
         "mcmc_expert (FlexFlow's search from data parallelism and from the expert strategy), auto_mtf (Mesh-TF's own "
         "layout optimiser), random:N, changed:N (the searched strategy with some layers as in a random one), strategy "
         "files, or none.")
    text("machine", "Where the search's numbers come from: local (measured here, then cached), a name of "
         "configs/machines, or a file: of a machine, or of kernel times (python -m pase_mtf.calibration --save).")
    text("prices", "How the machine at hand is priced: measured (the kernels of the strategies themselves, timed when "
         "they are needed and kept; the default for CPUs of one process) or roofline (by its rates and links).")
    number("measure_seconds", "With measured prices: how long a run may measure kernels, for all its strategies; "
           "trial steps take a fifth of it.")
    switch("trial", "With prices of the devices of the run: of the arms whose steps are predicted to take about as "
           "long as that of the search, a few steps of each decide which strategy the search takes.")
    switch("recalibrate", "Measure the machine at hand again, whatever is kept of it.")
    text("memory_limit", "What a strategy may hold per device: bytes, 11GB, 10.5GiB, device (what the machine says), "
         "or none.")
    text("microbatches", "In how many pieces a batch is computed, one after the other, with one update: less memory, "
         "the same losses. A number that divides the batch, or auto: that with which the fastest strategy within "
         "--memory_limit is fastest.")
    text("schedule", f"The order of a pipeline that is searched: {' or '.join(SCHEDULES)} (docs/pipelines.md).")
    text("recompute", "Which blocks of the model (layers of a transformer, ...) are computed once more in the backward "
         "pass, and not kept until then: none, all, names separated by commas, or auto: those with which the fastest "
         "strategy within --memory_limit is fastest.")
    switch("sharded_updates", "Make the update of every layer's weights a layer of its own: devices that hold the same "
           "weights may update a part each, and keep the optimizer's slots of that part alone.")
    text("optimizer", f"Mesh-TensorFlow's own: {', '.join(OPTIMIZERS)}; default: the preset's.")
    flags.DEFINE_float("learning_rate", None, "Default: the preset's, or for another optimizer " + ", ".join(
        f"{rate if rate else 'its own schedule'} ({name})" for name, rate in OPTIMIZERS.items()) + ".",
        flag_values=values)
    text("dtype", f"Of activations: {', '.join(DTYPES)}; default: the preset's. With bfloat16 variables and their "
         "updates stay float32.")
    text("output_dir", "Where the run's files go; must not exist, but to go on there (--resume); default "
         "outputs/<model>-<mesh>-<time>.")
    switch("search_only", "Find and print the strategy and write its files; train nothing.")
    text("resume", "Output directory of an earlier run: continue its training. Or auto: begin in --output_dir, or go "
         "on there from the last checkpoint, to the step where this command ends a run that it begins.")
    number("seed", "Of initial values, synthetic data, dropout, and strategies that are drawn.")
    switch("print_config", "Print the resolved configuration as JSON and exit.")
    number("log_every", "Print a line every so many steps.")
    switch("checkpoint", "Write checkpoint/, every now and then and at the end.")
    number("checkpoint_every", "Write a checkpoint every so many steps; default: every five minutes. The last two are "
           "kept.")
    text("cluster", "Over which processes the devices of --mesh are spread: local:4 (four on this computer), slurm, "
         "tf_config, or host1:port,host2:port (docs/cluster.md); default: this one.")
    text("clients", "With --cluster: one (the first process builds the graph of all devices, and feeds it) or ranks "
         "(every process builds that of its own devices, reads its own rows of the data, and runs in step with the "
         "others).")
    number("task", "With a --cluster that lists its hosts: which of them this command is started on, 0 for the first.")
    number("max_restarts", "With --cluster: how often the run is started again, from its last checkpoint, after a "
           "process was lost.")
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=values)
    return values


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Reads the flags.

    Args:
      arguments: without the program's name.

    Raises:
      UsageError: an unknown flag, a value that does not parse, a leftover word, or a value that cannot be meant.
      HelpRequested: --help; holds the text.
    """
    values = _flag_values()
    try:
        rest = values(["pase_mtf.launch", *arguments])[1:]
    except flags.Error as error:
        raise UsageError(f"{flag_text(error, values)}; --help lists the flags") from error
    if values["help"].value:
        raise HelpRequested(f"{_USAGE}\nFlags:{values.get_help()}")
    if rest:
        raise UsageError(f"{rest[0]!r} is no flag; write --name=value (--help lists the flags)")
    given = {name for name in values if values[name].present}
    chosen: dict[str, Any] = {field.name: values[field.name].value for field in dataclasses.fields(Options)}
    options = Options(**chosen).resumed(given)
    options.check()
    return options
