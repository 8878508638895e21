"""Training all arms side by side, interleaved in blocks on the same batches, and what was measured of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from pase_mtf.launch.data import Batch

__all__ = ["BLOCK", "History", "Record", "Timing", "Trainable", "train"]

BLOCK = 5
"""Steps that an arm does in a row: enough that its working set is back in the caches, few enough that noise from
outside (other processes, the clock rate) affects all arms alike."""


_LEVEL_SECONDS = 5.0
"""How long after the wish to end arms may still begin steps to catch up: some kill 10 seconds after they have asked
(`docker stop`), and there are files to write."""


class Trainable(Protocol):
    """What `train` asks of an arm.

    Attributes:
      name: of the arm.
    """

    name: str

    def step(self, batch: Batch, trace: bool = False) -> tuple[float, float]:
        """One training step: (loss before the update, seconds)."""
        ...


@dataclasses.dataclass(frozen=True)
class Timing:
    """Step times of one arm, in seconds.

    Attributes:
      median: of the measured steps.
      lower, upper: quartiles.
      steps: how many were measured.
    """

    median: float
    lower: float
    upper: float
    steps: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles: the "±" of a table."""
        return (self.upper - self.lower) / 2

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing | None:
        """The statistics of these step times; None where there are none."""
        if not len(seconds):
            return None
        lower, median, upper = np.percentile(seconds, (25, 50, 75))
        return cls(float(median), float(lower), float(upper), len(seconds))


@dataclasses.dataclass(frozen=True)
class Record:
    """One step of one arm.

    Attributes:
      arm: its name.
      step: counted from the start of the training.
      loss: before the step's update.
      seconds: wall-clock.
      timed: whether it counts (no warm-up).
    """

    arm: str
    step: int
    loss: float
    seconds: float
    timed: bool


@dataclasses.dataclass
class History:
    """What was measured.

    Attributes:
      first_step: number of the first step of this run.
      records: arm -> its steps in order.
      disagreement: why an arm is known to be wrong, where one is.
      diverged: a step at which the loss of the first arm is not finite.
      interrupted: somebody wanted the run to end (Ctrl-C, SIGTERM), or it had to.
      stopped: why it had to: data that cannot be read.
      unwritten: why the last checkpoint could not be written.
      note: what looked wrong and was found to be right.
      slowness: how many times what prices say the machine took for what steps run most, before the turns that count.
      compared: whether the arms were compared, with each other and with a run before.
    """

    first_step: int
    records: dict[str, list[Record]]
    disagreement: str | None = None
    diverged: int | None = None
    interrupted: bool = False
    stopped: Exception | None = None
    unwritten: Exception | None = None
    note: str | None = None
    slowness: list[float] = dataclasses.field(default_factory=list)
    compared: bool = False

    def timing(self, arm: str) -> Timing | None:
        """Statistics of the timed steps; None before the first."""
        return Timing.of([record.seconds for record in self.records.get(arm, ()) if record.timed])

    @property
    def measured(self) -> bool:
        """Whether any arm has done a step."""
        return any(self.records.values())

    def losses(self, arm: str, since: int = 0) -> list[float]:
        """Loss per step, without so many of the first."""
        return [record.loss for record in self.records.get(arm, [])[since:]]


def train(arms: Sequence[Trainable], batches: Iterable[Batch], *, warmup: int, steps: int, first_step: int = 0,
          watchers: Sequence[Callable[[Record], object]] = (), asked: Callable[[], bool] = lambda: False,
          insisted: Callable[[], bool] = lambda: False,
          check: Callable[[History], str | None] = lambda history: None,
          look: Callable[[], float | None] = lambda: None, block: int = BLOCK,
          ends_with: tuple[type[Exception], ...] = (), clock: Callable[[], float] = time.monotonic) -> History:
    """Trains every arm for warmup + steps steps.

    The first step is a turn of its own, so that all can be compared after it; then the arms take turns of at most
    `block` steps each, of the warm-up or of what is timed, the turn starting with another arm every time. After every
    turn the arms are compared, and training ends where one is wrong or the loss is not finite any more. It ends between
    two steps where that is asked for, with what was measured so far: a step that was done was recorded and told to all
    watchers.
    Before it ends, the other arms do the steps of the turn that one of them has done, so that a run which goes on after
    the last step of one does so after that of all; but not where that would take long, or is insisted on. It is looked
    at before every step how long the others would still take: steps may be slower than they were.

    Args:
      arms: things with a name and `step(batch, trace) -> (loss, seconds)`.
      batches: the training data, from `first_step` on; every arm sees the same.
      warmup, steps: untimed and timed steps; the very first is traced for its memory, the last untimed one for what
        the devices do in it.
      first_step: number of the first step.
      watchers: called after every step of every arm.
      asked: whether somebody wants the training to end; it stays so.
      insisted: whether they want it to end at once.
      check: compares the arms: why one is wrong, or None.
      look: how many times what prices say the machine takes now, or None; called before a turn that counts.
      block: steps per turn.
      ends_with: errors of the data with which training ends as it does where that is asked for.
      clock: seconds.
    """
    history = History(first_step, {arm.name: [] for arm in arms})
    wished = math.inf
    source = iter(batches)
    sizes = itertools.chain([1], _turns(warmup - 1, block), _turns(steps, block))
    start = 0
    for turn, size in enumerate(sizes):
        try:
            held = list(itertools.islice(source, size))
        except ends_with as error:
            history.interrupted, history.stopped = True, error
            return history
        if start >= warmup and (slowness := look()) is not None:
            history.slowness.append(slowness)
        ahead = 0
        for arm in (*arms[turn % len(arms):], *arms[:turn % len(arms)]):
            for number, batch in enumerate(held):
                if asked():
                    history.interrupted, now = True, clock()
                    wished = min(wished, now)
                    if insisted() or now - wished + _to_level(history, start + ahead) > _LEVEL_SECONDS:
                        return history
                    if number >= ahead:
                        break
                loss, seconds = arm.step(batch, trace=start + number in (0, warmup - 1))
                record = Record(arm.name, first_step + start + number, loss, seconds, timed=start >= warmup)
                history.records[arm.name].append(record)
                for watcher in watchers:
                    watcher(record)
                ahead = max(ahead, number + 1)
        start += size
        if history.interrupted and (ahead < size or start < warmup + steps):
            return history
        history.interrupted = False  # all arms have done all that was asked for: nothing was cut short
        history.disagreement, history.compared = check(history), True
        last = history.records[arms[0].name][-1]
        history.diverged = None if math.isfinite(last.loss) else last.step
        if history.disagreement or history.diverged is not None:
            break
    return history


def _turns(steps: int, block: int) -> Iterator[int]:
    """The sizes of the turns of so many steps."""
    return (min(block, steps - done) for done in range(0, steps, block))


def _to_level(history: History, steps: int) -> float:
    """About how many seconds it takes until every arm has done so many steps: an arm is judged by its median, and one
    that has done none by the slowest of the others. Of two steps the faster one counts: the first is slow for once."""
    medians = {name: statistics.median_low(record.seconds for record in records)
               for name, records in history.records.items() if records}
    slowest = max(medians.values(), default=0.0)
    return sum((steps - len(records)) * medians.get(name, slowest) for name, records in history.records.items())
