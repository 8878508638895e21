"""Watches whether all arms compute the same, and says so only where float64 confirms that they do not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
from tqdm import tqdm

from pase_mtf.compat import tf
from pase_mtf.errors import DataError, FormatError, MismatchError, OutOfMemoryError
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.cluster.board import Board
from pase_mtf.launch.console import Stage
from pase_mtf.launch.data import ORDER, Data
from pase_mtf.launch.flag_values import trained_name
from pase_mtf.launch.judging.losses import FIRST, FIRST_NARROW, Comparison, agree, largest_update, updates_of
from pase_mtf.launch.judging.settling import STEPS, Settled, settle
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.run_folder import METRICS
from pase_mtf.launch.training import History
from pase_mtf.models.checks import kept_dtype

__all__ = ["RUN_BEFORE", "Judge", "data_note", "losses_before"]

RUN_BEFORE = "the run before"

# Relative, of an update: float32 sums in another order, and the maxima and ReLUs that tip over by them.
_UPDATE = 0.02
_UPDATE_NARROW = 0.2
_FIRST_LOSS = 1e-3
"""Relative, of the loss at a checkpoint: float32 there, float64 here."""
_LEAST_LOSS = 1e-2
"""A smaller loss is compared as one of this: it is a difference of logits, and rounded as these, however small."""


class Judge:
    """Compares the arms of a run: variables after the first step, losses after every turn.

    What looks wrong is settled in float64, once; where that finds nothing wrong the rest of the run is silent.

    Attributes:
      note: what was settled as rounding, for people; None where nothing was.
    """

    def __init__(self, plan: Plan, chosen: Mapping[str, Chosen], arms: Sequence[Arm], data: Data,
                 board: Board | None = None):
        """To be made before the first step.

        Args:
          plan: of the run.
          chosen: arm -> strategy or pipeline; an arm without either is stock data parallelism.
          arms: that are trained; the first one is what the others are compared with.
          data: what they are trained on.
          board: see Arm.
        """
        self.note: str | None = None
        self._plan, self._chosen, self._arms, self._data = plan, chosen, arms, data
        self._board, self._before = board, losses_before(plan)  # of steps that are done anew from the first on
        if note := data_note(plan, self._before):
            tqdm.write(f"note: {note}")
        ours = [arm for arm in arms if arm.name in chosen]
        self._start: dict[str, np.ndarray] = dict(arms[0].values(up_to_date=False)) if len(ours) > 1 else {}
        self._settled = self._looked = False
        rounds = plan.config.dtype == "bfloat16" or (
            plan.devices.kind == "gpu" and tf.config.experimental.tensor_float_32_execution_enabled())
        self._first, self._update = (FIRST_NARROW, _UPDATE_NARROW) if rounds else (FIRST, _UPDATE)
        self._comparison = Comparison(plan.first_step, self._first)

    def check(self, history: History) -> str | None:
        """To be called after every turn: which arm is wrong, and why; None while none is known to be."""
        if self._settled:
            return None
        done = self._comparison.steps
        # Stock Mesh-TF reads a variable before or after its update, as it happens: only its first loss is certain.
        losses = {arm.name: history.losses(arm.name, done)[:None if arm.name in self._chosen else max(0, 1 - done)]
                  for arm in self._arms}
        suspicion = self._comparison.go_on({**losses, RUN_BEFORE: self._before[done:]})
        if not self._looked:
            suspicion = suspicion or self._first_updates()
            self._looked, self._start = True, {}
        if not suspicion:
            return None
        self._settled = True
        try:
            with Stage("settling in float64"):
                batches = list(itertools.islice(self._data.batches(history.first_step), STEPS))
                found = settle(self._plan, self._chosen, list(losses), batches, self._board)
        except (OutOfMemoryError, MismatchError, DataError, FormatError) as error:  # or what it began with is gone
            return f"{suspicion}; it cannot be settled in float64 ({error}); these numbers must not be used"
        return self._verdict(suspicion, found)

    def _verdict(self, suspicion: str, found: Settled) -> str | None:
        if found.wrong:
            arm, how = next(iter(found.wrong.items()))
            return (f"{suspicion}; in float64 {arm} computes something else than one device does ({how}): its numbers "
                    "must not be used, please report it")
        allowed = max(_FIRST_LOSS, self._first) * max(abs(found.first_loss), _LEAST_LOSS)
        if self._before and not agree(found.first_loss, self._before[0], allowed):
            return (f"{suspicion}; in float64 every arm of this run is right, and the loss at the checkpoint is "
                    f"{found.first_loss:.7g}: the data is not what {RUN_BEFORE} had, or its strategy was wrong")
        # Of the run before nothing but its losses is known, and later ones may be those of other data, too.
        other = next((step for step, (loss, had) in enumerate(zip(found.losses, self._before, strict=False))
                      if not agree(loss, had, 2.0 ** step * max(_FIRST_LOSS, self._first) * max(
                          abs(loss), abs(found.first_loss), _LEAST_LOSS))), None)
        what = "rounding, no error" if other is None else (
            f"by step {self._plan.first_step + other} {RUN_BEFORE} had other data, or its strategy was wrong")
        self.note = f"{suspicion}: {what}; in float64 all arms compute what one device does ({found.steps} steps)"
        tqdm.write(f"note: {self.note}")
        return None

    def _first_updates(self) -> str | None:
        """Whether the first step changed the variables of all arms alike, and on all devices."""
        ours = [arm for arm in self._arms if arm.name in self._chosen]
        for arm in ours:
            name = arm.differing_replicas()
            if name:
                return f"after the first step of {arm.name} not all devices hold the same {name}"
        if not self._start:
            return None
        reference, *others = ours
        expected = dict(reference.values())
        precision = float(np.finfo(kept_dtype(self._plan.config.dtype)).eps)
        for arm in others:
            difference = largest_update(updates_of(self._start, expected, dict(arm.values())), precision, self._update)
            if difference:
                return f"{difference} under {arm.name} than under {reference.name}"
        return None


def data_note(plan: Plan, before: Sequence[float]) -> str | None:
    """What is to be said where the data of a run that is resumed was named otherwise, and may be other data; None where
    it was not.

    Args:
      plan: of the run.
      before: `losses_before` of it.
    """
    if plan.checkpoint is None:
        return None
    given, earlier = plan.options.data, plan.earlier.get("data")
    if given == earlier:
        return None
    told = ("the loss at the checkpoint, which has to be the same, is compared" if before else
            "there is no loss at the checkpoint to compare, so that nothing tells whether it is the same")
    return f"--data={given}: {RUN_BEFORE} had --data={earlier}; {told}"


def losses_before(plan: Plan) -> list[float]:
    """The losses that the run which is resumed had from the checkpoint on: one at least where the checkpoint tells it.

    They are those of the arm that was kept; how far they go depends on when the run was ended. A run that goes on in
    the same folder removes them there.
    """
    if plan.checkpoint is None or plan.options.resume is None:
        return []
    if plan.checkpoint.order != ORDER:
        return []  # an earlier version took the examples in another order
    name = trained_name(plan.earlier["strategy"])
    told = dataclasses.replace(plan.options, microbatches=plan.earlier.get("microbatches", "1")).microbatch_count
    known: dict[int, float] = {}
    if _has_masks_of(plan, told):
        known = _metrics(os.path.join(plan.options.resume, METRICS), name)
    if plan.checkpoint.next_loss is not None and _has_masks_of(plan, plan.checkpoint.microbatches or told):
        # The metrics are of whoever went on there last, perhaps with other data than those that wrote the checkpoint.
        known = known if plan.earlier.get("data") == plan.options.data else {}
        known[plan.first_step] = plan.checkpoint.next_loss
    found: list[float] = []
    while plan.first_step + len(found) in known:
        found.append(known[plan.first_step + len(found)])
    return found


def _has_masks_of(plan: Plan, microbatches: int | None) -> bool:
    """Whether a run draws the dropout masks of one in so many microbatches, as each draws its own: other masks, other
    losses."""
    return plan.config.dropout == 0.0 or microbatches == plan.microbatches


def _metrics(path: str, arm: str) -> dict[int, float]:
    """Step -> loss of an arm, as far as the file tells."""
    found: dict[int, float] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    if entry["arm"] == arm:
                        found[int(entry["step"])] = float(entry["loss"])
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    continue  # cut off by a kill, or changed
    except OSError:
        pass  # then there is only what the checkpoint tells
    return found
