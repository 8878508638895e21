"""What a run takes from the one that it continues."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, get_type_hints

from typing_extensions import TypedDict

from pase_mtf.errors import FormatError, UsageError, shortened
from pase_mtf.files import check_schema
from pase_mtf.launch.options import Options, ResolvedOptions
from pase_mtf.launch.run_folder import AUTO, has_checkpoint, load_run_config
from pase_mtf.models.presets import ModelConfig, config_of, load_config

__all__ = ["contradiction", "resumed"]

# What decides the numbers of a training: a resumed run must agree with the one it resumes.
_TRAINING = ("model", "preset", "batch", "data", "optimizer", "learning_rate", "dtype", "seed")
_ELSEWHERE = ("data", "preset")
"""Of these, what may lie elsewhere than it did, and on every host elsewhere: those of rank 0 count."""

# What runs of earlier versions do not tell: the default holds.
_ADDED = ("checkpoint_every", "dtype", "measure_seconds", "memory_limit", "microbatches", "recompute", "schedule",
          "sharded_updates", "trial")

# What config.json tells of them; those of earlier versions do not tell all, and those of later ones more.
_WRITTEN = TypedDict("_WRITTEN", get_type_hints(Options), total=False)  # type: ignore[misc]


def resumed(options: Options, given: set[str]) -> Options:
    """The options with what --resume's run was started with, where the command line does not say otherwise.

    Args:
      options: from the command line.
      given: names of the flags on the command line.

    Raises:
      FormatError: the folder holds no run of ours.
      UsageError: a flag contradicts what the training was started with.
    """
    folder, rank = options.resume, options.cluster_flag.rank if options.cluster_flag else None
    if folder == AUTO:  # one command for the first start and all others: it says the rest itself
        folder = None if rank else options.output_dir
        folder = folder if folder and has_checkpoint(folder) else None
    if not folder:
        return options
    config = load_run_config(folder)
    earlier = config["options"]
    known = [field.name for field in dataclasses.fields(Options)]
    check_schema(os.path.join(folder, "config.json"),
                 {name: earlier[name] for name in known if name in earlier}, _WRITTEN)
    preset = str(options.preset if "preset" in given else earlier.get("preset"))
    if not rank and preset == earlier.get("preset") and _has_changed(preset, config):
        raise UsageError(f"--preset={preset}: has other sizes than the run in {folder} was trained with, which its "
                         "config.json tells (model_config); give --preset=a file with those, or start anew")
    for name in (name for name in _TRAINING if name in given and name in earlier):
        if not (rank and name in _ELSEWHERE) and _is_another(name, getattr(options, name), config):
            told = "synthetic data" if name == "data" and earlier[name] is None else earlier[name]
            raise UsageError(f"--{name}={getattr(options, name)}: the run in {folder} was trained with {told}; leave "
                             "the flag out to continue it, or start anew")
    inherited = _TRAINING if options.resume == AUTO else (
        *_TRAINING, *_ADDED, "mesh", "devices", "machine", "strategy", "compare", "steps", "warmup", "log_every")
    earlier = {**{name: getattr(Options, name) for name in _ADDED}, **earlier}
    if not options.checkpoint:
        earlier["checkpoint_every"] = None
    try:
        _ = earlier["strategy"]  # by which the losses of that run are found (`judging.judge`)
        return dataclasses.replace(options, **{name: earlier[name] for name in inherited if name not in given})
    except KeyError as error:
        raise FormatError(f"{folder}/config.json: lacks {error}; it is truncated or foreign") from error


def _is_another(name: str, value: object, config: Mapping[str, Any]) -> bool:
    """Whether a flag asks for another training than that of config.json, as far as that is told before data is read.

    Raises:
      UsageError: there is no such preset.
    """
    before = config["options"][name]
    if name == "data" and value is not None and before is not None:
        return False  # whether the same lies there now, losses tell (`judging.judge`)
    return value != before and not (name == "preset" and _has_same_sizes(str(value), config))


def _has_same_sizes(preset: str, config: Mapping[str, Any]) -> bool:
    """Whether a preset, by whatever name, has the sizes that config.json tells.

    Raises:
      UsageError: there is no such preset.
    """
    before = _sizes_before(config)
    if before is None:
        return False
    flags = {name: getattr(before, name) for name in ("batch", "dtype", "optimizer", "learning_rate")}
    found = load_config(config["options"]["model"], preset, **flags)
    return dataclasses.replace(found, preset=before.preset, seed=before.seed) == before


def _has_changed(preset: str, config: Mapping[str, Any]) -> bool:
    """Whether the file of a preset has other sizes by now than config.json tells, where that tells any."""
    return os.path.isfile(preset) and _sizes_before(config) is not None and not _has_same_sizes(preset, config)


def _sizes_before(config: Mapping[str, Any]) -> ModelConfig | None:
    """The sizes that config.json tells; None where it was changed by hand and tells none."""
    try:
        return config_of(config["options"]["model"], config["model_config"])
    except (KeyError, TypeError, UsageError):
        return None


def contradiction(options: ResolvedOptions, config: Mapping[str, Any]) -> str | None:
    """In what an earlier run, with this config.json, was another training than the one that is asked for: the flag as
    it was then; None where that is so in nothing that both tell. Data and preset may lie elsewhere by now, as where a
    resumed run names them.

    Raises:
      UsageError: there is no such preset.
    """
    earlier = config["options"]
    for name in _TRAINING:
        if name in earlier and _is_another(name, getattr(options, name), config):
            return f"no --{name}" if earlier[name] is None else f"--{name}={shortened(earlier[name], quoted=False)}"
    # The file of a preset may have been edited since, under the name that it had.
    changed = options.preset == earlier.get("preset") and _has_changed(options.preset, config)
    return f"other sizes in --preset={shortened(options.preset, quoted=False)}" if changed else None
