"""The time to a trained model: seconds of a step, steps of an epoch, epochs (Pal et al., IEEE Micro 2019).

On N devices N/M workers with M devices each see a global batch of N/M worker batches. One such mix trains for
T(N/M, M) / (N/M) * E(N/M worker batches) seconds, times the examples of an epoch by those of a worker's batch, which
are the same for all mixes. So it is as many times as fast as one device as Pal et al. say, SU_M * SE_N * N * E_1 / E_N,
and ahead of data parallelism alone, M = 1, once SU_M exceeds M * (SE_MN / SE_N) * (E_N / E_MN).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pase_mtf.arguments import checked_arguments
from pase_mtf.epochs.curve import EpochCurve, Epochs
from pase_mtf.epochs.step_times import StepTime, StepTimes
from pase_mtf.errors import UsageError, shortened

__all__ = ["Mix", "Point", "Projection", "Ratio", "project_training"]

_MOST_DEVICES = 2 ** 31 - 1


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as fast something is.

    Attributes:
      value: by the medians of the epochs.
      low, high: at worst and at best, by the runs' spread at both batches.
      at_least, at_most: the rival, or the thing itself, did not reach the target: the truth is not below, or above.
      low_at_most, high_at_least: a run of the thing itself, or of the rival, did not: the worst is not above `low`, or
        the best not below `high`.
    """

    value: float
    low: float
    high: float
    at_least: bool = False
    at_most: bool = False
    low_at_most: bool = False
    high_at_least: bool = False

    @property
    def is_known(self) -> bool:
        """Whether it tells anything: of two that did not reach the target nothing is."""
        return not (self.at_least and self.at_most)

    @property
    def is_ahead(self) -> bool | None:
        """Whether it is faster; None where the side that the truth may lie on leaves that open."""
        open_side = self.at_most if self.value > 1.0 else self.at_least
        return None if open_side else self.value > 1.0


@dataclasses.dataclass(frozen=True)
class Mix:
    """N/M workers with M devices each.

    Attributes:
      workers: N/M.
      ways: M, devices to a worker.
      batch: global, in examples.
      step: seconds of a step.
      epochs: to the target.
    """

    workers: int
    ways: int
    batch: int
    step: StepTime
    epochs: Epochs

    @property
    def seconds_per_example(self) -> float:
        """Seconds to the target, by the examples of an epoch."""
        return self.step.seconds * self.epochs.median / self.batch

    def ahead_of(self, other: Mix) -> Ratio:
        """How many times as fast as another mix this one comes to the target."""
        value = other.seconds_per_example / self.seconds_per_example
        mine, theirs = self.epochs, other.epochs
        if self.batch == other.batch:  # the same runs on both sides, whose spread cancels out
            return Ratio(value, value, value, theirs.at_least, mine.at_least)
        scale = value * mine.median / theirs.median
        return Ratio(value, scale * theirs.low / mine.high, scale * theirs.high / mine.low, theirs.at_least,
                     mine.at_least, mine.high_at_least, theirs.high_at_least)


@dataclasses.dataclass(frozen=True)
class Point:
    """What so many devices can do.

    Attributes:
      devices: N.
      mixes: those of which step and epochs are known, by ways; of those not reaching the target the least time.
      unknown: ways -> why a mix is not known.
      outside: ways -> the batch of a mix, where that is why: the curve does not tell its epochs.
    """

    devices: int
    mixes: tuple[Mix, ...]
    unknown: dict[int, str]
    outside: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Mix | None:
        """The mix that is done first, of those that reach the target if any does; None where none is known."""
        return min(self.mixes, key=lambda mix: (mix.epochs.at_least, mix.seconds_per_example, mix.ways), default=None)

    @property
    def data_parallel(self) -> Mix | None:
        """One device to a worker; None where it is not known."""
        return next((mix for mix in self.mixes if mix.ways == 1), None)

    @property
    def gain(self) -> Ratio | None:
        """How many times as fast as data parallelism alone the best mix is; None where that is not known."""
        best, alone = self.best, self.data_parallel
        return best.ahead_of(alone) if best and alone else None

    @property
    def hybrid(self) -> bool | None:
        """Whether a mix of several devices to a worker is ahead of data parallelism alone.

        None where that is not known: of several devices no mix but that is known, or a mix that reaches the target is
        preferred to one that does not, though that may be done first.
        """
        alone = self.data_parallel
        if alone is not None and self.devices > 1 and len(self.mixes) == 1:
            return None  # it would be compared with itself: no other mix is known, or none divides so many devices
        if alone is not None and self.best is alone and not alone.epochs.at_least and any(
                mix.epochs.at_least and mix.seconds_per_example < alone.seconds_per_example for mix in self.mixes):
            return None
        return self.gain.is_ahead if self.gain else None


@dataclasses.dataclass(frozen=True)
class Projection:
    """What a range of numbers of devices can do.

    Attributes:
      curve: epochs by batch.
      steps: seconds of steps.
      points: by devices, ascending.
      extrapolate: whether it was to go on beyond the batches of the curve.
    """

    curve: EpochCurve
    steps: StepTimes
    points: tuple[Point, ...]
    extrapolate: bool = False

    @property
    def decided(self) -> tuple[Point, ...]:
        """The numbers of devices of which it is known whether hybrid is ahead."""
        return tuple(point for point in self.points if point.hybrid is not None)

    @property
    def hybrid_from(self) -> int | None:
        """The least number of devices from which on hybrid is ahead of data parallelism alone, wherever that is known;
        None where it is not at the largest of these."""
        found = None
        for point in reversed(self.decided):
            if not point.hybrid:
                break
            found = point.devices
        return found

    @property
    def best_alone(self) -> Point | None:
        """The number of devices on which data parallelism alone, reaching the target, is done first; None: none is."""
        return min((point for point in self.points if (mix := point.data_parallel) and not mix.epochs.at_least),
                   key=_alone, default=None)

    @property
    def alone_still_gains(self) -> bool:
        """Whether data parallelism alone might do better on other devices than those that it is done first on: these
        are the most it is known on, or of others, which missed the target, the least time is below theirs."""
        known = [point for point in self.points if point.data_parallel]
        alone = self.best_alone
        return alone is not None and len(known) > 1 and (
            alone.devices == known[-1].devices or any(_alone(point)[0] < _alone(alone)[0] for point in known))

    @property
    def best_of_all(self) -> Point | None:
        """The number of devices on which any mix that reaches the target is done first; None: none is."""
        return min((point for point in self.points if (mix := point.best) and not mix.epochs.at_least),
                   key=_any, default=None)

    @property
    def gain_at_scale(self) -> Ratio | None:
        """How many times as fast as data parallelism at its best number of devices the best mix at its own is."""
        alone, best = self.best_alone, self.best_of_all
        if alone is None or best is None or alone.data_parallel is None or best.best is None:
            return None
        return best.best.ahead_of(alone.data_parallel)

    def to_json(self, examples: int | None = None) -> dict[str, object]:
        """All of it, for files.

        Args:
          examples: of an epoch: then the hours of every mix are told.
        """
        def mix_json(mix: Mix) -> dict[str, object]:
            row = {"workers": mix.workers, "ways": mix.ways, "batch": mix.batch, "step_seconds": mix.step.seconds,
                   "step_source": mix.step.source, "epochs": dataclasses.asdict(mix.epochs),
                   "seconds_per_example": mix.seconds_per_example}
            return row if examples is None else {**row, "hours": mix.seconds_per_example * examples / 3600}

        points = [{"devices": point.devices, "mixes": [mix_json(mix) for mix in point.mixes],
                   "unknown": {str(ways): reason for ways, reason in point.unknown.items()},
                   "best_ways": point.best.ways if point.best else None,
                   "gain": dataclasses.asdict(point.gain) if point.gain else None} for point in self.points]
        scale = self.gain_at_scale
        return {"curve": self.curve.name, "runs": [dataclasses.asdict(run) for run in self.curve.runs],
                "worker_batch": self.steps.worker_batch, "steps": self.steps.source, "points": points,
                "hybrid_from": self.hybrid_from, "gain_at_scale": dataclasses.asdict(scale) if scale else None}


def _alone(point: Point) -> tuple[float, int]:
    mix = point.data_parallel
    return (mix.seconds_per_example if mix else math.inf), point.devices


def _any(point: Point) -> tuple[float, int]:
    mix = point.best
    return (mix.seconds_per_example if mix else math.inf), point.devices


@checked_arguments
def project_training(curve: EpochCurve, steps: StepTimes, devices: Sequence[int], ways: Sequence[int] = (1, 2, 4, 8), *,
                     extrapolate: bool = False) -> Projection:
    """The best mix of N/M workers with M-way strategies for every number N of devices.

    Args:
      curve: epochs to the target by global batch.
      steps: seconds of a step by workers and ways, and the batch of a worker.
      devices: numbers N.
      ways: numbers M; those that divide N count, and data parallelism alone, M = 1, always does.
      extrapolate: beyond the batches of the curve, go on with the slope of its outermost two; by default such mixes are
        not known, and a point says so.

    Raises:
      UsageError: a number that is not above 0, more devices than anybody has, or none.
    """
    for name, numbers in (("devices", devices), ("ways", ways)):
        if isinstance(numbers, (bytes, str)) or not numbers or not all(
                type(number) is int and 1 <= number <= _MOST_DEVICES for number in numbers):
            raise UsageError(f"project_training: {name}={shortened(numbers)}: give whole numbers from 1 to "
                             f"{_MOST_DEVICES}")
    choices = sorted({1, *ways})
    return Projection(curve, steps, tuple(_point(curve, steps, number, choices, extrapolate)
                                          for number in sorted(set(devices))), extrapolate)


def _point(curve: EpochCurve, steps: StepTimes, devices: int, ways: Sequence[int], extrapolate: bool) -> Point:
    mixes, unknown, outside = [], {}, {}
    for each in ways:
        if devices % each:
            continue
        workers = devices // each
        batch = workers * steps.worker_batch
        step, epochs = steps.at(workers, each), curve.at(batch, extrapolate=extrapolate)
        if epochs is None:
            outside[each] = batch
            unknown[each] = f"batch {batch} is outside of {curve.batches[0]} to {curve.batches[-1]}"
        elif step is None:
            unknown[each] = f"no step of {workers} workers with {each} devices each"
        else:
            mixes.append(Mix(workers, each, batch, step, epochs))
    return Point(devices, tuple(mixes), unknown, outside)
