"""Which kernels the stages of a pipeline run, and what of them is measured."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence

from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.cost.kernels import KernelSource, KnownKernels
from pase_mtf.cost.roofline import roofline_machine
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.kernels import Kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.prices import KernelPrices
from pase_mtf.pipeline.simulate import Laid, crossings
from pase_mtf.strategy.kernels_text import origin_text
from pase_mtf.strategy.measuring import measure, missing_of
from pase_mtf.strategy.search_report import KernelsReport

__all__ = ["PATIENCE", "WORTH", "KernelsOfStages"]

WORTH = 0.02
"""Of a step, that estimates have to promise for a further round to be worth it: they are not better than that."""
PATIENCE = 3
"""Rounds in a row that did not promise it: of many pipelines some are always estimated too low."""


class KernelsOfStages:
    """The kernels of microbatches, as far as pipelines were looked at."""

    def __init__(self, sources: Mapping[int, KernelSource], meter: KernelMeter | SavedKernels,
                 progress: Callable[[str], object]) -> None:
        """Has looked at nothing.

        Args:
          sources: number of microbatches -> which kernels the graph of one runs.
          meter: what is measured, and measures more.
          progress: called with what is being done, a line.
        """
        self._sources, self._meter, self._progress = sources, meter, progress
        self._graphs: Mapping[int, ComputationGraph] = {}
        self._known: dict[int, KnownKernels] = {}
        self._seen: set[Kernel] = set()  # between stages, and of graphs before
        self._rounds = 0

    def begin(self, graphs: Mapping[int, ComputationGraph]) -> None:
        """Takes the graphs, by the number of microbatches, that pipelines are of from now on."""
        self._seen = self._all()
        self._graphs = graphs
        self._known = {count: KnownKernels(graph, self._sources[count]) for count, graph in graphs.items()}

    @property
    def machine(self) -> Machine:
        """The devices, at the best rates of all kernels that are known."""
        times, meter = self._meter.times, self._meter
        return roofline_machine(times, meter.devices, meter.memory_per_device, origin_text(times.on))

    def prices(self) -> dict[int, KernelPrices]:
        """By what is known now: number of microbatches -> prices."""
        times, machine = self._meter.times, self.machine
        seconds: dict[Kernel, float] = {}

        def price(kernel: Kernel) -> float:
            if kernel not in seconds:
                seconds[kernel] = times.estimate(kernel)
            return seconds[kernel]

        return {count: KernelPrices(graph, self._known[count], self._sources[count], machine, price)
                for count, graph in self._graphs.items()}

    def known(self, count: int, stages: Sequence[Laid]) -> bool:
        """Whether nothing about a pipeline is new, and all of its kernels are measured, or cannot be."""
        graph, configurations = self._graphs[count], _configurations(stages)
        new = self._known[count].look(configurations, _within(graph, stages))
        return not new and not self._meter.missing(list(self._kernels(count, stages)))

    def measure(self, count: int, stages: Sequence[Laid], end: float) -> bool:
        """Measures what is missing of a pipeline that was looked at, what matters most first.

        Args:
          count: of microbatches.
          stages: of the pipeline.
          end: of the time for that, by `time.perf_counter`.

        Returns:
          Whether there is more to come: time is left, and what was asked for could be measured.
        """
        missing = missing_of(self._meter, self._kernels(count, stages))
        if missing and time.perf_counter() < end:
            self._rounds += 1
            measure(self._meter, missing, end, f"pipeline, round {self._rounds}", self._progress)
        return time.perf_counter() < end and not self._meter.missing(missing)

    def report(self, count: int, stages: Sequence[Laid]) -> KernelsReport:
        """What of a pipeline's price was measured, for its `search`."""
        run, times = self._kernels(count, stages), self._meter.times
        seen = self._all()
        found: KernelsReport = {
            "of_strategy": len(run), "measured_of_strategy": sum(kernel in times for kernel in run), "seen": len(seen),
            "measured": sum(kernel in times for kernel in seen), "rounds": self._rounds,
            "seconds": round(self._meter.spent, 1)}
        untraced = [*self._sources[count].untraced,
                    *(f"{kernel}: {why}" for kernel, why in self._meter.failed.items() if kernel in run)]
        if untraced:
            found["untraced"] = untraced
        return found

    def _all(self) -> set[Kernel]:
        """The kernels of all that was looked at."""
        return self._seen.union(*(known.all_kernels() for known in self._known.values()))

    def _kernels(self, count: int, stages: Sequence[Laid]) -> collections.Counter[Kernel]:
        """What a microbatch runs in all stages, and between them."""
        graph = self._graphs[count]
        found = self._known[count].kernels(_configurations(stages), _within(graph, stages))
        for edge, _, _, held, needed in crossings(graph, stages):
            moved = self._sources[count].move(held, needed, edge.shape, edge.itemsize)
            self._seen.update(moved)
            found.update({kernel: times * edge.trips for kernel, times in moved.items()})
        return found


def _configurations(stages: Sequence[Laid]) -> list[Configuration]:
    return [chosen for stage in stages for chosen in stage.configurations]


def _within(graph: ComputationGraph, stages: Sequence[Laid]) -> list[int]:
    """The edges that stay within a stage."""
    return [number for number, edge in enumerate(graph.edges)
            if any(stage.first <= edge.source < stage.stop and stage.first <= edge.target < stage.stop
                   for stage in stages)]
