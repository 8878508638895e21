"""Prices of a program by kernels: which of them it runs, and where what they take comes from.

Either the devices at hand measure them, when a search asks, or a file tells what they took on another machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time

from pase_mtf.calibration.cache import code_version, traces_path
from pase_mtf.calibration.load import GivenMachine, is_kernel_file, is_local
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.cost.kernels import KernelSource
from pase_mtf.errors import UsageError, shortened
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.references import REFERENCES
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.warm import ready

__all__ = ["Telling", "kernel_times", "kernels_of", "prices_by_kernels", "time_references"]

_EVERY = 3.0  # seconds


class Telling:
    """Says on the standard error what is being done: what begins, and every few seconds how far it is."""

    def __init__(self, name: str = "") -> None:
        """Says nothing yet; every line begins with the name."""
        self._name, self._last, self._what = f"{name}: " if name else "", 0.0, ""

    def __call__(self, text: str) -> None:
        """Says a line. Where it says no more than how far something is (what it is stands before the first colon), only
        if nothing was said for a while."""
        what, now = text.partition(":")[0], time.monotonic()
        if what != self._what or now - self._last >= _EVERY:
            self._what, self._last = what, now
            print(f"{self._name}{text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Says what people should know."""
        print(f"{self._name}note: {text}", file=sys.stderr, flush=True)


def kernel_times(machine: GivenMachine, devices: int, kind: str = "cpu", *, again: bool = False,
                 tell: Telling | None = None) -> KernelMeter | SavedKernels:
    """The kernel times that prices are made of; of the machine at hand the reference kernels are timed first.

    Args:
      machine: "local" (None is the same), or the path of a file of kernel times.
      devices: how many.
      kind: of the machine at hand's devices.
      again: begin with nothing of what is kept.
      tell: is told what is being done, and what people should know of the times, also of those that are measured later.

    Raises:
      UsageError: another machine; a file that tells of other numbers of devices; GPUs.
      FormatError: a file that is truncated or foreign.
    """
    tell = tell or Telling()
    if is_kernel_file(machine):
        saved = SavedKernels(machine, devices)
        tell(f"kernels: {len(saved.times)} are known, from {os.fspath(machine)}; none is measured here")
        for note in saved.notes:
            tell.note(note)
        return saved
    if not is_local(machine):
        raise UsageError(f"measured prices are of the machine at hand, or of a file that python -m "
                         f"pase_mtf.calibration --save wrote; {shortened(machine)} is neither")
    if kind != "cpu":
        raise UsageError("measured prices are those of CPUs only; take roofline prices, or devices of kind cpu")
    meter = KernelMeter(devices, kind, again=again, note=tell.note)
    time_references(meter, tell)
    return meter


def time_references(meter: KernelMeter, tell: Telling, seconds: float = math.inf) -> bool:
    """Times the reference kernels of the machine at hand.

    Args:
      meter: that keeps them.
      tell: is told so.
      seconds: of `KernelMeter.start`.

    Returns:
      Whether all are known that can be.
    """
    tell(f"kernels: {len(meter.times)} are known, kept in {meter.path}")
    tell(f"reference kernels: {len(REFERENCES)} are timed")
    return meter.start(seconds)


def kernels_of(program: object, graph: ComputationGraph, *, turns: bool = False) -> KernelSource:
    """Which kernels a program runs; what its operations become is kept for the next process that asks.

    Args:
      program: an mtf.Graph.
      graph: what `export_graph` made of it.
      turns: of `export_graph`.
    """
    # Which kernels an operation becomes is told by lowering it, which takes TensorFlow.
    from pase_mtf.lowering.kept_traces import KeptTraces
    from pase_mtf.lowering.kernels import GraphKernels
    code = code_version()
    kept: KeptTraces | None = None
    with contextlib.suppress(UsageError):  # without a home folder nothing is kept; times of a file need no place
        kept = KeptTraces(traces_path(), code) if code else None
    return GraphKernels(program, graph, kept, turns=turns)


def prices_by_kernels(program: object, graph: ComputationGraph, kernels: KernelMeter | SavedKernels,
                      tell: Telling | None = None) -> MeasuredPrices:
    """The prices of a program's strategies; what a search needs is compiled first where nobody has yet.

    Args:
      program: an mtf.Graph.
      graph: what `export_graph` made of it.
      kernels: what they are made of.
      tell: is told what is being done.
    """
    ready(tell := tell or Telling())
    return MeasuredPrices(graph, kernels_of(program, graph), kernels, tell)
