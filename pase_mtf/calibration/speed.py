"""How fast a machine is while something else is timed on it: one that is shared changes its speed within minutes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.machine.kernels import TINY, Kernel

if TYPE_CHECKING:
    from pase_mtf.calibration.kernels import KernelWatch

__all__ = ["SpeedWatch", "speed_note"]

_SHARE = 0.05
"""Of the time, that looking may take."""
_KERNELS, _LOOK_SECONDS, _LOOK_BYTES = 96, 3.0, 1 << 29
"""What one look may have: kernels, about how long, and what their tensors take on all devices."""
_LEAST_SHARE = 0.3
"""Of the steps, that has to be looked at for a look to tell anything of them."""
_LEAST_SECONDS, _RUNS = 0.03, 12
"""What a look takes for one kernel: so long at least, and so many runs."""
_TOLD = 0.15
"""How far from what the prices say is worth a word."""


class SpeedWatch:
    """Times some kernels of a meter again, from time to time, against what its prices say that they take: by the clock,
    as steps are timed. Prices leave out what kernels wait for others that use the cores.

    Which kernels matters: what makes a machine slower for a while (memory that others use, a clock that is lower) does
    not make all of them slower by as much, and what has a share of the steps that are timed tells what became of these.
    """

    def __init__(self, meter: KernelMeter | None, shares: Mapping[Kernel, float]) -> None:
        """Times nothing yet.

        Args:
          meter: started; of the devices that are watched. None: prices are of another machine, and nothing is watched.
          shares: of the time of the steps that are looked at, by kernel. Those with the largest shares are timed, as
            far as a look stays short; none where these are too little of a step.
        """
        self._meter, self._shares = meter, shares
        self._watch: KernelWatch | None = None
        self._watched: tuple[Kernel, ...] = _worth_watching(meter, shares) if meter else ()
        self._begin, self._spent = time.perf_counter(), 0.0

    def look(self) -> float | None:
        """How many times what prices say the kernels take now, in the mean by their shares; None where looking has
        taken a twentieth of the time since the watch began, and where no kernel was measured."""
        now = time.perf_counter()
        if not self._meter or not self._watched or self._spent > _SHARE * (now - self._begin):
            return None
        if self._watch is None:
            from pase_mtf.calibration.kernels import KernelWatch  # TensorFlow takes seconds to import
            tiny = self._meter.times.get(TINY)
            self._watch = KernelWatch(self._watched, self._meter.devices, self._meter.kind, waiting=True,
                                      tiny=tiny.seconds if tiny else None)
            now = self._begin = time.perf_counter()  # to open it is no part of looking
        found, kept = self._watch.seconds(), self._meter.times
        self._spent += time.perf_counter() - now
        ratios, shares = zip(*((found[kernel] / timing.seconds, self._shares[kernel]) for kernel in self._watched
                               if (timing := kept.get(kernel))), strict=True)
        return float(np.average(ratios, weights=shares))

    def close(self) -> None:
        """Ends what it holds."""
        if self._watch is not None:
            self._watch.close()


def _worth_watching(meter: KernelMeter, shares: Mapping[Kernel, float]) -> tuple[Kernel, ...]:
    """The measured kernels with the largest shares that one look has time and memory for."""
    found, seconds, nbytes = list[Kernel](), 0.0, 0
    for kernel in sorted(shares, key=lambda kernel: -shares[kernel]):
        if (timing := meter.times.get(kernel)) is None or shares[kernel] <= 0.0:
            continue
        takes = max(_LEAST_SECONDS, _RUNS * timing.seconds * meter.devices)
        if seconds + takes > _LOOK_SECONDS or nbytes + kernel.nbytes * meter.devices > _LOOK_BYTES:
            continue
        found.append(kernel)
        seconds, nbytes = seconds + takes, nbytes + kernel.nbytes * meter.devices
        if len(found) == _KERNELS:
            break
    return tuple(found) if sum(shares[kernel] for kernel in found) >= _LEAST_SHARE else ()


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
    return (f"while steps were timed this machine took {median:.2f} times as long as prices say for what these steps "
            f"run most ({low:.2f} to {high:.2f}, looks: {len(found)}); steps may differ as much from what is predicted")

