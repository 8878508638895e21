"""Kernel times of the devices at hand: those that were kept, and those that are measured now. Measuring needs
TensorFlow, reading does not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from pase_mtf.calibration.cache import check_request, fingerprint_of_kernels, kernels_path, measuring_alone
from pase_mtf.errors import UsageError
from pase_mtf.host import memory_bytes
from pase_mtf.machine.kernel_file import append_times, begun, load_times
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import TINY, Kernel, Timing
from pase_mtf.machine.references import REFERENCES

__all__ = ["KernelMeter"]

_DRIFT = 0.15
_AGREEING = 1.5  # between the quartiles of what reference kernels take, against what was kept
_TELLING = 2e-5  # seconds: the time of a shorter kernel varies by more than is looked for
_BUSY = 0.5  # of the cores, that others keep busy
_LOOKS = 5  # at kernels that seem to take another time than what is kept
_PAUSE = 0.4  # seconds between two looks: who shares a machine comes and goes


class KernelMeter:
    """The kernel times of one number of devices of this machine.

    Attributes:
      times: all that is known.
      path: of the file that keeps them.
      spent: seconds that measuring took.
      measured: how many kernels were measured here.
      disturbed: how many of them while others slowed the machine.
      notes: what people should know of the numbers, a sentence each; of what has been found out so far.
      failed: kernels that cannot be timed, and why.
    """

    def __init__(self, devices: int, kind: str = "cpu", *, path: str | os.PathLike[str] | None = None,
                 again: bool = False, note: Callable[[str], object] = lambda text: None) -> None:
        """Reads what is kept.

        Args:
          devices: how many.
          kind: "cpu" (virtual devices of one process) or "gpu".
          path: of the file that keeps the times; by default in the user's cache folder.
          again: begin with nothing, and measure all that is needed once more; the file that there was is renamed
            (".old") when the first new times are kept.
          note: is called with each of the notes once, when it is found out.
        """
        check_request(devices, kind)
        self.path = pathlib.Path(path) if path is not None else kernels_path(devices, kind)
        self._begun = begun(self.path)
        self.times = KernelTimes() if again else load_times(self.path)
        self.times.on.update(fingerprint_of_kernels(devices, kind))
        self.devices, self.kind = devices, kind
        self.spent, self.measured = 0.0, 0
        self._again, self._drift, self.disturbed = again, 1.0, 0
        self.notes: list[str] = []
        self._tell = note
        self.failed: dict[Kernel, str] = {}
        self._timed_again = set[Kernel]()
        self._unkept: dict[Kernel, Timing] = {}  # at the speed of the file
        if self.times.damaged:
            self._note(f"{self.path}: {self.times.damaged} lines are damaged; what they told is measured again")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._tell(text)

    @property
    def unkept(self) -> int:
        """How many kernels were measured here that the file does not hold, as it could not be written."""
        return len(self._unkept)

    def times_to_save(self) -> KernelTimes:
        """All that is known, at the speed of the file that keeps it: what that holds by now (other runs may
        have added to it), and what is known here, also where it could not be written."""
        found = KernelTimes(self.times.on)
        if not self._again:  # else it still holds what does not count any more
            found.update(dict(load_times(self.path).items()))
        found.update(dict(self.times.scaled(1.0 / self._kept_drift).items()))
        return found

    @property
    def memory_per_device(self) -> float:
        """Bytes that one of the devices may hold, of those that share this computer's memory."""
        return memory_bytes() / self.devices

    def start(self, seconds: float = np.inf, progress: Callable[[int], object] = lambda count: None) -> bool:
        """Times the reference kernels: for the first time, or to see whether what is kept still holds.

        Where they agree that they are off, by more than 15 % in the median, and go on to say so for a few seconds, the
        times of this run are scaled by as much, and what it measures is kept as what it would have taken before: all
        that a file holds is of one and the same speed. Where they disagree, or one look with the next, somebody else
        uses the machine, and what is kept holds.

        Args:
          seconds: nothing more is begun after so many. Half of them are left for what is not kept yet, so that the next
            run, which may have as few, gets on from there.
          progress: called with the number of kernels that are done with.

        Returns:
          Whether all are known that can be.
        """
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        host = os.cpu_count() or 1  # the load is that of all its cores, of which this process may have a few
        if load > _BUSY * host:
            self._note(f"the machine is busy (load {load:.1f} on {host} cores): times may be too long")
        begin, share = time.perf_counter(), seconds / 2 if self.missing(REFERENCES) else seconds
        found = self._look(share, progress)
        # References that were timed in a disturbed moment tell nothing of what was timed after it.
        wrong = set(self.times.disturbed(REFERENCES))
        self._compare({kernel: found[kernel].seconds for kernel in self._telling
                       if kernel in found and kernel not in wrong})
        self._replace({kernel: found[kernel] for kernel in wrong if kernel in found})
        self.measure(REFERENCES, max(seconds / 2, seconds - (time.perf_counter() - begin)), progress)
        return not self.missing(REFERENCES)

    def _compare(self, found: dict[Kernel, float]) -> None:
        """Scales what is kept by how much longer the reference kernels take now, where they agree on that."""
        ratios = self._ratios(found)
        if not ratios or not _is_off(float(np.median(ratios))):
            return
        low, high = map(float, np.percentile(ratios, (25, 75)))
        if high > _AGREEING * low:
            self._note(f"the machine is not steady: half of the reference kernels take {low:.2f} to {high:.2f} times "
                       f"what was kept in {self.path}, which is used as it is")
            return
        drifts = [float(np.median(ratios)), *self._looks(tuple(found))]
        if not (all(map(_is_off, drifts)) and len({drift > 1.0 for drift in drifts}) == 1):
            self._note(f"the machine is not steady: within seconds reference kernels take {min(drifts):.2f} to "
                       f"{max(drifts):.2f} times what was kept in {self.path}, which is used as it is")
            return
        drift = float(np.median(drifts))
        self._drift *= drift
        self.times = self.times.scaled(drift)
        self._note(f"reference kernels take {drift:.2f} times what was kept in {self.path}: the kept times are scaled "
                   "by that; --recalibrate measures them again")

    def _ratios(self, found: Mapping[Kernel, float]) -> list[float]:
        """How many times what is kept some reference kernels take."""
        kept = self._telling
        return [seconds / kept[kernel] for kernel, seconds in found.items() if kernel in kept]

    def _looks(self, kernels: Sequence[Kernel]) -> list[float]:
        """How many times what is kept reference kernels take in the median, a few times over."""
        from pase_mtf.calibration.kernels import KernelWatch  # TensorFlow takes seconds to import
        found = []
        tiny = self.times.get(TINY)
        with contextlib.closing(KernelWatch(kernels, self.devices, self.kind,
                                            tiny=tiny.seconds if tiny else None)) as watch:
            for _ in range(_LOOKS):
                time.sleep(_PAUSE)
                found.append(float(np.median(self._ratios(watch.seconds()))))
        return found

    @property
    def _telling(self) -> dict[Kernel, float]:
        """Seconds of the reference kernels that take long enough to tell how fast the machine is."""
        return {kernel: timing.seconds for kernel in REFERENCES
                if (timing := self.times.get(kernel)) and timing.seconds >= _TELLING}

    def missing(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Those that are not measured and can be."""
        return [kernel for kernel in kernels if kernel not in self.times and kernel not in self.failed]

    def measure(self, kernels: Sequence[Kernel], seconds: float = np.inf,
                progress: Callable[[int], object] = lambda count: None) -> int:
        """Times what is missing of some kernels, and keeps it.

        Args:
          kernels: the most important ones first.
          seconds: nothing more is begun after so many.
          progress: called with the number of kernels that are done with.

        Returns:
          How many were measured.
        """
        wanted, count = self.missing(kernels), 0
        with contextlib.closing(self._time(wanted, seconds, progress)) as batches:
            for batch in batches:
                self.times.update(batch)  # each batch at once: who interrupts the next keeps it
                self._keep(batch)
                self.measured += len(batch)
                count += len(batch)
        return count

    def measure_again(self, kernels: Sequence[Kernel], seconds: float = np.inf,
                      progress: Callable[[int], object] = lambda count: None) -> int:
        """Times those once more, and once in a run, that were timed while others slowed the machine: they would seem to
        take too long for good. Of the two times the one of the calmer session counts.

        Args:
          kernels: the most important ones first.
          seconds, progress: of `measure`.

        Returns:
          How many were timed.
        """
        wanted, count = [kernel for kernel in self.times.disturbed(kernels) if kernel not in self._timed_again], 0
        with contextlib.closing(self._time(wanted, seconds, progress, known=True)) as batches:
            for batch in batches:
                self._timed_again.update(batch)
                self._replace(batch)
                count += len(batch)
        return count

    def _replace(self, timings: Mapping[Kernel, Timing]) -> None:
        """Takes what was timed in a calmer session than before."""
        calmer = {kernel: timing for kernel, timing in timings.items()
                  if (before := self.times.get(kernel)) is None
                  or self.times.slowed(timing) < self.times.slowed(before)}
        if calmer:  # else all that is known is what it was
            self.times.update(calmer)
            self._keep(calmer)

    def _look(self, seconds: float, progress: Callable[[int], object]) -> dict[Kernel, Timing]:
        """What the reference kernels take now that are kept, those first that tell how fast the machine is."""
        found, telling = dict[Kernel, Timing](), self._telling
        kept = sorted(filter(self.times.__contains__, REFERENCES), key=lambda kernel: kernel not in telling)
        with contextlib.closing(self._time(kept, seconds, progress, known=True, compared=False)) as batches:
            for batch in batches:
                found.update(batch)
        return found

    def _time(self, kernels: Sequence[Kernel], seconds: float, progress: Callable[[int], object], *,
              known: bool = False, compared: bool = True) -> Generator[dict[Kernel, Timing], None, None]:
        """Times kernels, batch by batch: what is missing of them, or also those that are known; as long as probes take
        longer than what is kept of them once more, unless that is what is to be found out."""
        if not kernels:
            return
        from pase_mtf.calibration.kernels import KernelTimer  # TensorFlow takes seconds to import
        asked = time.perf_counter()
        with measuring_alone(lambda: print("kernels are timed by another run, which is waited for",
                                           file=sys.stderr)) as waited:
            begin, wanted = time.perf_counter(), kernels
            if waited and not self._again:
                if compared or begun(self.path) == self._begun:  # else that is of now, and what is compared of before
                    self._read_again()
                if not known:
                    wanted = self.missing(kernels)
                    progress(len(kernels) - len(wanted))
            if not wanted:
                return
            # By all that is known now, also of what was waited for.
            expected = self.times.estimate if self.kind == "gpu" and len(self.times) else None
            # One of a disturbed moment would be found to take as long again: what is dispatched takes what it tells.
            tiny = None if self.times.disturbed([TINY]) else self.times.get(TINY)
            best = (self.times.calm or self._telling) if compared else {}
            timer = KernelTimer(self.devices, self.kind, expected, tiny=tiny.seconds if tiny else None, best=best)
            try:
                yield from timer.time(wanted, seconds - (begin - asked), progress)
            finally:
                self.failed.update(timer.failed)
                self.disturbed += timer.disturbed
                self.spent += time.perf_counter() - begin

    def _read_again(self) -> None:
        """Takes in what another run has measured meanwhile, as this run's prices are scaled."""
        if not len(self.times):
            self._begun = begun(self.path)  # of a file that there was not yet
        self.times.update({kernel: timing for kernel, timing in load_times(self.path).scaled(self._kept_drift).items()
                           if kernel not in self.times})

    @property
    def _kept_drift(self) -> float:
        """How many times what is kept kernels take now: of a file that was begun anew since this run read the one
        before, nothing is known but that it is of now."""
        return self._drift if begun(self.path) == self._begun else 1.0

    def _keep(self, timings: Mapping[Kernel, Timing]) -> None:
        """Appends times to the file, as they would have been before: all that it holds is of one speed. What cannot be
        written is tried again with what comes next: somebody may have freed space meanwhile."""
        drift = self._kept_drift
        self._unkept.update({kernel: timing.scaled(1.0 / drift) for kernel, timing in timings.items()})
        try:
            if self._unkept:
                begins = self._again or self._begun is None
                append_times(self.path, self._unkept, self.times.on, anew=self._again)
                if begins:  # its own: what is found out of the machine's speed later is told against this file
                    self._begun = begun(self.path)
                self._again = False
                self._unkept.clear()
        except UsageError as error:  # not being able to keep the numbers does not make them wrong
            self._note(f"what is measured is not kept: {error}")


def _is_off(drift: float) -> bool:
    """Whether kernels that take so many times what they took are worth a word."""
    return abs(drift - 1.0) > _DRIFT
