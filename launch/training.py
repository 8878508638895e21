"""Training all arms side by side: interleaved in blocks, on the same batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pase_mtf.launch.losses import Disagreement, first_disagreement
from pase_mtf.launch.measuring import Timing

__all__ = ["BLOCK", "History", "Record", "train"]

# Long enough that an arm's working set is back in the caches, short enough that all arms see the same weather.
BLOCK = 5


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
      disagreement: set when the losses of two arms differ.
      diverged: a step at which the loss is not finite, in every arm.
      interrupted: the user pressed Ctrl-C.
    """

    first_step: int
    records: dict[str, list[Record]]
    disagreement: Disagreement | None = None
    diverged: int | None = None
    interrupted: bool = False

    def timing(self, arm: str) -> Timing | None:
        """Statistics of the timed steps; None before the first."""
        return Timing.of([record.seconds for record in self.records.get(arm, ()) if record.timed])

    def losses(self, arm: str) -> list[float]:
        """Loss per step."""
        return [record.loss for record in self.records.get(arm, ())]


@contextlib.contextmanager
def _lasting_interrupts() -> Iterator[list[int]]:
    """Within the block Ctrl-C raises as always, and is remembered in the list as well.

    Python drops a KeyboardInterrupt that strikes within a destructor or a callback of the C++ library; remembered, it
    ends the training at the next step all the same.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may set handlers, and only it is interrupted
        return

    def remember(number: int, frame: Any) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def train(arms: Sequence[Any], batches: Iterable[Any], *, warmup: int, steps: int, first_step: int = 0,
          watchers: Sequence[Callable[[Record], object]] = (), block: int = BLOCK) -> History:
    """Trains every arm for warmup + steps steps.

    The warm-up is a block of its own; then the arms take turns, `block` steps each, the turn starting with another arm
    every time. After every turn the losses are compared, and training ends where they disagree or are not finite any
    more. Ctrl-C ends it with what was measured so far.

    Args:
      arms: things with a name and `step(batch, trace) -> (loss, seconds)`.
      batches: the training data, from `first_step` on; every arm sees the same.
      warmup, steps: untimed and timed steps; the very first is traced for its memory.
      first_step: number of the first step.
      watchers: called after every step of every arm.
      block: steps per turn.
    """
    history = History(first_step, {arm.name: [] for arm in arms})
    source = iter(batches)
    sizes = [warmup, *(min(block, steps - done) for done in range(0, steps, block))]
    start = 0
    try:
        with _lasting_interrupts() as asked:
            for turn, size in enumerate(sizes):
                held = list(itertools.islice(source, size))
                for arm in (*arms[turn % len(arms):], *arms[:turn % len(arms)]):
                    for number, batch in enumerate(held):
                        if asked:
                            raise KeyboardInterrupt
                        loss, seconds = arm.step(batch, trace=turn == 0 and number == 0)
                        record = Record(arm.name, first_step + start + number, loss, seconds, timed=turn > 0)
                        history.records[arm.name].append(record)
                        for watcher in watchers:
                            watcher(record)
                start += size
                history.disagreement = first_disagreement(
                    {arm.name: history.losses(arm.name) for arm in arms}, first_step)
                last = history.records[arms[0].name][-1]
                history.diverged = None if math.isfinite(last.loss) else last.step
                if history.disagreement or history.diverged is not None:
                    break
    except KeyboardInterrupt:
        history.interrupted = True
    return history
