"""The options of a run: what the flags say, with defaults filled in and checked as far as words alone allow."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

from pase_mtf.errors import FormatError, UsageError, nearest
from pase_mtf.files import read_json
from pase_mtf.launch.arm_names import ArmName, parse_arms
from pase_mtf.launch.mesh_flag import MeshFlag, parse_mesh

__all__ = ["CONFIG_FORMAT", "CONFIG_VERSION", "OPTIMIZERS", "Options", "load_run_config", "run_config"]

CONFIG_FORMAT = "pase_mtf.run"
CONFIG_VERSION = 1

# The rate where the user names an optimizer that is not the preset's and no rate; None: Adafactor's own schedule.
OPTIMIZERS = {"sgd": 0.01, "adam": 0.001, "adafactor": None}

# What decides the numbers of a training: a resumed run must agree with the one it resumes.
_TRAINING = ("model", "preset", "batch", "data", "optimizer", "learning_rate", "seed")


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
    optimizer: str | None = None
    learning_rate: float | None = None
    output_dir: str | None = None
    search_only: bool = False
    resume: str | None = None
    seed: int = 0
    print_config: bool = False
    log_every: int = 5
    checkpoint: bool = True

    @property
    def mesh_flag(self) -> MeshFlag:
        """--mesh, parsed."""
        return parse_mesh(self.mesh)

    @property
    def arms(self) -> tuple[ArmName, ...]:
        """The arms to measure, the one of --strategy first."""
        return parse_arms(self.strategy, self.compare)

    def check(self) -> None:
        """Refuses values that cannot be meant, before anything is loaded.

        Raises:
          UsageError: names the flag, its value and the remedy.
        """
        if not self.model:
            raise UsageError("--model is missing; for example --model=transformer or --model=alexnet")
        _ = self.mesh_flag, self.arms
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer={self.optimizer}: unknown; {nearest(self.optimizer, OPTIMIZERS)}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning_rate={self.learning_rate}: give a positive number, such as 0.01")
        for name, least in (("batch", 1), ("steps", 1), ("warmup", 1), ("log_every", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name}={value}: must be at least {least}")
        if self.output_dir and os.path.lexists(self.output_dir):
            raise UsageError(f"--output_dir={self.output_dir}: exists and is never overwritten; name a new one")

    def with_sizes(self, config: Any, preset: str) -> Options:
        """The same with what the flags leave open taken from the model's sizes.

        Args:
          config: of `pase_mtf.models.load_config`.
          preset: its name.

        Raises:
          UsageError: data parallelism is asked for, and the batch does not divide by the number of devices.
        """
        batch = self.batch or config.batch
        optimizer = self.optimizer or config.optimizer
        rate = self.learning_rate
        if rate is None:
            rate = config.learning_rate if optimizer == config.optimizer else OPTIMIZERS[optimizer]
        devices = self.mesh_flag.devices
        if batch % devices and any(arm.method in ("stock", "data_parallel") for arm in self.arms):
            near = max(devices, round(batch / devices) * devices)
            raise UsageError(f"--batch={batch}: does not split over {devices} devices, as data parallelism must; take "
                             f"--batch={near}, or leave data_parallel out with --compare=search")
        return dataclasses.replace(self, preset=preset, batch=batch, optimizer=optimizer, learning_rate=rate)

    def with_output_dir(self) -> Options:
        """The same with the output directory named, by model, mesh and time where the user named none."""
        if self.output_dir:
            return self
        stem = os.path.join("outputs", f"{self.model}-{self.mesh_flag.file_name}-{time.strftime('%Y%m%d-%H%M%S')}")
        name, number = stem, 1
        while os.path.lexists(name):
            number += 1
            name = f"{stem}-{number}"
        return dataclasses.replace(self, output_dir=name)

    def resumed(self, given: set[str]) -> Options:
        """The same with what --resume's run was started with, where the command line does not say otherwise.

        Args:
          given: names of the flags on the command line.

        Raises:
          FormatError: the folder holds no run of ours.
          UsageError: a flag contradicts what the training was started with.
        """
        if not self.resume:
            return self
        earlier = load_run_config(self.resume)["options"]
        for name in _TRAINING:
            if name in given and getattr(self, name) != earlier.get(name):
                raise UsageError(f"--{name}={getattr(self, name)}: the run in {self.resume} was trained with "
                                 f"{earlier.get(name)}; leave the flag out to continue it, or start anew")
        inherited = (*_TRAINING, "mesh", "devices", "machine", "strategy", "compare", "steps", "warmup", "log_every")
        try:
            return dataclasses.replace(
                self, **{name: earlier[name] for name in inherited if name not in given})
        except KeyError as error:
            raise FormatError(f"{self.resume}/config.json: lacks {error}; it is truncated or foreign") from error

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return dataclasses.asdict(self)


def load_run_config(folder: str) -> dict[str, Any]:
    """Reads config.json of an earlier run.

    Raises:
      FormatError: there is none, or it is none of ours.
    """
    if not os.path.isdir(folder):
        raise FormatError(f"--resume={folder}: no such folder; name the output directory of an earlier run")
    data = read_json(os.path.join(folder, "config.json"), CONFIG_FORMAT, CONFIG_VERSION)
    if not isinstance(data.get("options"), dict):
        raise FormatError(f"{folder}/config.json: has no options; it is truncated or foreign")
    return data


def run_config(options: Options, **more: Any) -> str:
    """The text of config.json: the resolved options and what else decides the run."""
    return json.dumps({"format": CONFIG_FORMAT, "version": CONFIG_VERSION, "options": options.to_json(), **more},
                      indent=2) + "\n"
