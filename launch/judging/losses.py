"""Do all arms compute the same? A strategy changes where work is done, never what is computed.

In float32 that can only be told in the first steps: sums in another order differ in the last bits, and training
amplifies that, until two right strategies have losses that part by a tenth. So what is found here is a suspicion and no
verdict; `settling` settles it in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

__all__ = ["FIRST", "FIRST_NARROW", "STRICT_STEPS", "Comparison", "Update", "agree", "first_difference",
           "largest_update", "relative_tolerance", "slot_of", "updates_of"]

STRICT_STEPS = 6
"""Steps whose rounding can be bounded; after them only what is grossly different is suspicious."""

GROSS = 0.5
"""Of the loss: beyond all that was ever seen of two right strategies (9 % in 30 steps), short of what is senseless."""

DIVERGED = 2.0
"""Times the first loss: from there on rounding decides where a training goes."""

_SMALL = 1.0
"""A first loss below this (in nats) counts as this: of a training that is resumed late, the next batch may well have
several times the loss of the first."""

FIRST, FIRST_NARROW = 1e-5, 1e-2
"""Relative difference of first losses that is rounding: of float32, and of products whose operands have few bits after
the point: ten in TF32 (NVIDIA, "Accelerating AI Training with NVIDIA TF32 Tensor Cores", 2021), seven in bfloat16,
where float32 has 23. Strategies of the tiny models differed by up to 1e-3 of the first loss in bfloat16."""

_SIGNS = 2.0  # times its change, by which an element changes otherwise that takes the other sign
_NOTHING = 1e-6  # a loss below this is none


def relative_tolerance(steps: int, first: float = FIRST) -> float:
    """Difference allowed after this many steps from common values, relative to the size of the loss.

    float32 sums in another order differ by 1e-7, and training multiplies that by about two per step. Measured, AlexNet
    on Fashion-MNIST under three strategies: below 2e-7 for five steps, 5e-4 at step 9.

    Args:
      steps: done before the loss was computed.
      first: the tolerance at the first.
    """
    return min(first * 2.0 ** steps, GROSS) if steps <= STRICT_STEPS else GROSS


class Comparison:
    """Compares series of losses with the first one, step by step, as they grow.

    Differences are measured against the loss or, where that has fallen below it, the loss of the first step: late in a
    training the loss of a single batch may be next to nothing. Where all diverge nothing is compared any more.

    Attributes:
      steps: how many have been compared.
    """

    def __init__(self, first_step: int = 0, first: float = FIRST):
        """Begins.

        Args:
          first_step: number of the first step.
          first: see `relative_tolerance`.
        """
        self.steps = 0
        self._first_step, self._first = first_step, first
        self._start: float | None = None
        self._diverged = False

    def go_on(self, losses: Mapping[str, Sequence[float]]) -> str | None:
        """Compares the steps that have come.

        Args:
          losses: arm -> loss of each step that was not compared yet; the first arm is the reference, others may have
            fewer.

        Returns:
          Where two first differ by more than is allowed, for people; None where all agree.
        """
        reference, *others = losses
        for position, expected in enumerate(losses[reference]):
            if self._diverged:
                self.steps += 1
                continue
            if self._start is None:
                self._start = abs(expected)
            found = {arm: losses[arm][position] for arm in others if position < len(losses[arm])}
            start, step = self._start, self.steps
            self.steps += 1
            beyond = DIVERGED * max(start, _SMALL)
            self._diverged = step > 0 and not any(abs(loss) <= beyond for loss in (expected, *found.values()))
            if self._diverged:
                continue
            for arm, loss in found.items():
                scales = (start, min(abs(loss), abs(expected)))
                scale = max([value for value in scales if math.isfinite(value)], default=0.0)
                allowed = relative_tolerance(step, self._first) * max(scale, _NOTHING)
                if not agree(loss, expected, allowed):
                    finite = math.isfinite(loss) and math.isfinite(expected)
                    how = f"difference {abs(loss - expected):.1e}, allowed {allowed:.1e}" if finite else "not finite"
                    return (f"losses differ at step {self._first_step + step}: {arm} {loss:.7g}, {reference} "
                            f"{expected:.7g} ({how})")
        return None


def first_difference(losses: Mapping[str, Sequence[float]], first_step: int = 0, first: float = FIRST) -> str | None:
    """Compares series of losses that are known as a whole: see `Comparison`."""
    return Comparison(first_step, first).go_on(losses)


def agree(loss: float, expected: float, allowed: float) -> bool:
    """Whether two losses are the same up to a difference; two that both diverged (NaN) are."""
    if math.isnan(loss) or math.isnan(expected):
        return math.isnan(loss) and math.isnan(expected)
    if math.isinf(loss) or math.isinf(expected):
        return loss == expected
    return abs(loss - expected) <= allowed


@dataclasses.dataclass(frozen=True)
class Update:
    """What the first step did to a variable under two strategies, as root mean squares over its elements.

    Attributes:
      name: of the variable.
      kind: "" for a trainable variable, else which of the optimizer's slots it is: updates of a kind are of one scale.
      size: of the value before the step.
      change: by the step, under the reference.
      difference: between the values after it.
    """

    name: str
    kind: str
    size: float
    change: float
    difference: float

    @classmethod
    def of(cls, name: str, kind: str, before: np.ndarray, expected: np.ndarray, found: np.ndarray,
           slots: Iterable[tuple[np.ndarray, np.ndarray]] = ()) -> Update:
        """The update of a variable.

        Args:
          name, kind: of the variable.
          before, expected, found: its values before the step, after it under the reference, and after it under another.
          slots: of each slot of the variable's shape the values after the step, under the reference and the other. An
            optimizer that divides a gradient by its size (Adam) changes an element with next to no gradient by what
            rounding made of that. Where slots differ, an element may change otherwise by twice as large a part of its
            change, which it does where a gradient takes the other sign; the slots themselves are compared as well.
        """
        before, expected, found = (np.asarray(value, np.float64) for value in (before, expected, found))
        change, difference = expected - before, np.abs(found - expected)
        for pair in slots:
            reference, other = (np.asarray(value, np.float64) for value in pair)
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.nan_to_num(np.abs(other - reference) / np.abs(reference), nan=0.0, posinf=_SIGNS)
            difference = np.maximum(difference - np.minimum(2.0 * share, _SIGNS) * np.abs(change), 0.0)
        return cls(name, kind, *(_root_mean_square(value) for value in (before, change, difference)))


def updates_of(before: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray],
               found: Mapping[str, np.ndarray]) -> Iterator[Update]:
    """The updates of all variables: their values before a step, after it under a reference, and after it under another.
    """
    kinds = slot_of(before)
    slots: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        if kind:
            slots.setdefault(name.removesuffix(kind), []).append(name)
    for name, value in found.items():
        yield Update.of(name, kinds[name], before[name], expected[name], value, (
            (expected[slot], found[slot]) for slot in slots.get(name, ()) if found[slot].shape == value.shape))


def slot_of(names: Iterable[str]) -> dict[str, str]:
    """Variable -> "" for a variable of the model, else what its optimizer calls this slot of it.

    Mesh-TensorFlow names a slot after its variable: "conv1/filters/adam_m", "conv1/filters_slot_vr".
    """
    known = set(names)
    found = {}
    for name in known:
        ends = [end for end in range(1, len(name)) if name[:end] in known and name[end] in "/_"]
        found[name] = name[max(ends):] if ends else ""
    return found


def largest_update(updates: Iterable[Update], precision: float, tolerance: float) -> str | None:
    """The update that differs most between two strategies, if that is more than rounding explains.

    A loss hides a wrong gradient of a small variable among all others for many steps; its update shows it at once.

    Args:
      updates: of all variables.
      precision: relative, of the numbers that are computed with.
      tolerance: for the difference of an update, relative to the update.

    Returns:
      Which and by how much, for people; None where all agree.
    """
    updates = list(updates)
    scales = {kind: max((update.change for update in updates if update.kind == kind and math.isfinite(update.change)),
                        default=0.0) for kind in {update.kind for update in updates}}
    worst, excess = None, 1.0
    for update in updates:
        if not math.isfinite(update.change):
            continue  # diverged: the losses tell
        # A variable is stored in the precision of its own size; and one whose gradient is nothing but the rounding of
        # sums that cancel (it has no influence on the loss) is compared at the scale of the others.
        allowed = tolerance * update.change + 4 * precision * update.size + 1e3 * precision * scales[update.kind]
        ratio = update.difference / allowed if allowed else math.inf if update.difference else 0.0
        if not (math.isnan(excess) or ratio <= excess):  # beyond what is no number there is nothing
            worst, excess = update, ratio
    if worst is None:
        return None
    share = worst.difference / worst.change if worst.change else math.inf
    return f"the first step changes {worst.name} otherwise (by {100 * share:.2g} % of the change)"


def _root_mean_square(value: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(value)))) if value.size else 0.0
