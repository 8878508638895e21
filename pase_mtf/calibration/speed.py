"""How fast a machine is while something else is timed on it: one that is shared changes its speed within minutes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pase_mtf.calibration.meter import KernelMeter

if TYPE_CHECKING:
    from pase_mtf.calibration.kernels import KernelWatch

__all__ = ["SpeedWatch", "speed_note"]

_SHARE = 0.05
"""Of the time, that looking may take."""
_TOLD = 0.15
"""How far from what the prices say is worth a word."""


class SpeedWatch:
    """Times the reference kernels of a meter again, from time to time, against what its prices say that they take: by
    the clock, as steps are timed. Prices leave out what kernels wait for others that use the cores."""

    def __init__(self, meter: KernelMeter | None) -> None:
        """Times nothing yet.

        Args:
          meter: started; of the devices that are watched. None: prices are of another machine, and nothing is watched.
        """
        self._meter = meter
        self._watch: KernelWatch | None = None
        self._begin, self._spent = time.perf_counter(), 0.0

    def look(self) -> float | None:
        """How many times what prices say the reference kernels take now, in the median of them; None where looking has
        taken a twentieth of the time since the watch began, and where no reference kernel is known."""
        kept, now = self._meter.telling if self._meter else {}, time.perf_counter()
        if not self._meter or not kept or self._spent > _SHARE * (now - self._begin):
            return None
        if self._watch is None:
            from pase_mtf.calibration.kernels import KernelWatch  # TensorFlow takes seconds to import
            self._watch = KernelWatch(tuple(kept), self._meter.devices, self._meter.kind, waiting=True)
            now = self._begin = time.perf_counter()  # to open it is no part of looking
        found = self._watch.seconds()
        self._spent += time.perf_counter() - now
        return float(np.median([found[kernel] / seconds for kernel, seconds in kept.items()]))

    def close(self) -> None:
        """Ends what it holds."""
        if self._watch is not None:
            self._watch.close()


def speed_note(ratios: Iterable[float]) -> str:
    """A sentence about how fast the machine was, by what `look` told; empty where it was as fast as the prices say.

    Args:
      ratios: what the looks told.
    """
    found = list(ratios)
    if not found:
        return ""
    low, median, high = np.percentile(found, (0, 50, 100))
    if abs(median - 1.0) <= _TOLD:
        return ""
    return (f"while steps were timed this machine took {median:.2f} times as long for the reference kernels as "
            f"prices say ({low:.2f} to {high:.2f}, looks: {len(found)}); steps differ as much from what is predicted")

