"""What a run can have, as far as its flags and sizes tell: known before TensorFlow is loaded."""

from __future__ import annotations

import importlib.util

from pase_mtf.errors import UsageError
from pase_mtf.launch.flag_values import PIPELINE, ArmName
from pase_mtf.launch.options import ResolvedOptions
from pase_mtf.launch.run_folder import AUTO
from pase_mtf.models.presets import BATCH_STATISTICS, ModelConfig

__all__ = ["check_trained_pipeline", "counts_of_microbatches", "why_left_out"]

_LONGEST = 2
"""Most microbatches, for every device: with as many, stages idle for a third of the step at most."""


def check_trained_pipeline(options: ResolvedOptions, config: ModelConfig) -> None:
    """Refuses --strategy=pipeline, or one of a file, where the run can have none.

    Args:
      options: of the run.
      config: the model's sizes.

    Raises:
      UsageError: why, and what to do.
    """
    if options.arms[0].method == PIPELINE and (
            reason := _why_no_pipeline(options.arms[0], options, config)):
        raise UsageError(f"--strategy={options.strategy}: {reason}")


def why_left_out(arm: ArmName, options: ResolvedOptions, config: ModelConfig) -> str:
    """Why a run cannot have an arm, and what to do; empty where it can, as far as is known.

    Args:
      arm: of the run.
      options: of the run.
      config: the model's sizes.
    """
    if arm.method == PIPELINE:
        return _why_no_pipeline(arm, options, config)
    if arm.method == "stock" and options.clients == "ranks":
        return "stock Mesh-TensorFlow has one graph for all processes; --clients=one trains it"
    if arm.method == "auto_mtf" and importlib.util.find_spec("ortools") is None:
        return "mesh_tensorflow.auto_mtf needs ortools; pip install 'ortools>=9.12,<10'"
    return ""


def _why_no_pipeline(arm: ArmName, options: ResolvedOptions, config: ModelConfig) -> str:
    trained = options.arms[0].method == PIPELINE  # to compare with it leaves these flags to the others
    # A run that is continued hands its own on, which nobody can leave out.
    other = "leave out" if options.resume in (None, AUTO) else "give --recompute=none instead of"
    reasons = {
        f"stages need two devices; take a larger --mesh than {options.mesh}": options.mesh_flag.devices < 2,
        f"{options.model} normalises over the batch, so that microbatches are another model; leave out pipeline": (
            options.model in BATCH_STATISTICS),
        f"it computes no block again; {other} --recompute={options.recompute}": trained and options.recomputed != (),
        "it is searched for its number of microbatches; leave out --microbatches=auto, or give a number":
            trained and options.microbatch_count is None,
        f"--batch={options.batch} does not split into microbatches; take one that has small divisors":
            not arm.argument and not counts_of_microbatches(options),  # that of a file has a number of its own
        "every microbatch draws a dropout mask of its own, and losses could not be compared; give --microbatches, so "
        "that all arms draw the same": config.dropout > 0.0 and (options.microbatch_count or 1) == 1}
    return next((reason for reason, holds in reasons.items() if holds), "")


def counts_of_microbatches(options: ResolvedOptions) -> list[int]:
    """The numbers of microbatches that a pipeline is searched for: that of --microbatches, or a few divisors of the
    batch, each at least twice the one before.

    Args:
      options: of the run.
    """
    given = options.microbatch_count or 1
    if given > 1:
        return [given]
    found: list[int] = []
    for count in range(2, min(options.batch, _LONGEST * options.mesh_flag.devices) + 1):
        if options.batch % count == 0 and count >= 2 * (found[-1] if found else 1):
            found.append(count)
    return found
