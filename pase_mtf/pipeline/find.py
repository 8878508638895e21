"""Finds the pipeline whose simulated step is shortest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from pase_mtf.amounts import bytes_text, needed_text
from pase_mtf.arguments import as_float, checked_arguments
from pase_mtf.calibration.load import GivenMachine, load_machine
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.cost.build import build_network
from pase_mtf.cost.kernels import KernelSource
from pase_mtf.errors import InfeasibleError, UsageError, shortened
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.pipeline.blocks import BLOCKS, find_blocks, of_microbatch, part_of_graph, summed_within
from pase_mtf.pipeline.cutting import Cutting, cut_stages, least_of_largest
from pase_mtf.pipeline.measured import PATIENCE, WORTH, KernelsOfStages
from pase_mtf.pipeline.pipeline import Pipeline, PipelineReport, Stage
from pase_mtf.pipeline.prices import RatePrices, StagePrices
from pase_mtf.pipeline.schedule import check_schedule, in_flight
from pase_mtf.pipeline.shortest import Cuts, Simulated, shortest_steps
from pase_mtf.pipeline.simulate import Laid, Step, simulate_step
from pase_mtf.pipeline.stage_costs import StageCosts
from pase_mtf.pipeline.stage_memory import StageMemory
from pase_mtf.strategy.choosing import gap_above

__all__ = ["NoPipelineError", "evaluate_pipeline", "find_measured_pipeline", "find_pipeline"]


_SECONDS = 10.0
"""For the proof that no other cut's step is shorter."""

_SECONDS_OF_LEAST = 5.0
"""To find out what some device holds at least, where no pipeline keeps to the memory."""


class NoPipelineError(InfeasibleError):
    """No pipeline was found.

    Attributes:
      reason: why, without what to do.
      limited: whether there are some that need more memory.
      splits: whether more microbatches are worth a try.
    """

    def __init__(self, reason: str, advice: str, *, proven: bool, limited: bool, splits: bool = False) -> None:
        """Takes what is told."""
        super().__init__(f"{reason}; {advice}", proven=proven)
        self.reason, self.limited, self.splits = reason, limited, splits


@checked_arguments
def find_pipeline(graphs: Mapping[int, ComputationGraph], devices: int = 8, machine: GivenMachine = LOCAL, *,
                  schedule: str = "1f1b", stages: int | None = None, blocks: int = BLOCKS,
                  memory_limit: float | None = None) -> Pipeline:
    """Finds stages, the strategy of each, and how many microbatches go through them.

    Layers are made into blocks, and these are cut into stages on groups of devices so that the sum over the stages, and
    K - 1 times the bottleneck, is least; what a stage takes comes from the exact search, or is bounded by those of its
    blocks where no more needs to be known; the best cuts into every number of stages are simulated, with what travels
    between stages, then those that may be shorter, until none may, or the time for it is over. The one whose step is
    shortest is returned, or one of fewer stages that takes hardly longer.
    Groups are of consecutive devices, of a size that divides p, and begin at a multiple of it; the last devices may
    idle.

    Args:
      graphs: number of microbatches K -> the training step of one of them (a batch of 1/K of the examples).
      devices: p.
      machine: as of `find_strategy`.
      schedule: "1f1b" or "gpipe".
      stages: how many there are to be; None: two or more, what is fastest.
      blocks: into how many the layers are made at most.
      memory_limit: bytes that a device may hold.

    Returns:
      The pipeline. Its search says "blocks", "pairs" (runs of blocks on groups of devices), "searched" (exact searches,
      of blocks and of stages that matter), "optimal" (whether all of these are proven), "microbatches" (the numbers
      that were tried), "simulated", "lower_bound" (seconds that no step is shorter than), "gap" (by what fraction its
      simulated step is above the shortest, at most), and "seconds" of all of it.

    Raises:
      UsageError: no graph, or a number that makes no sense.
      NoPipelineError: none keeps to the memory, or the layers cannot be cut so often.
    """
    _check(graphs, devices, schedule, stages, blocks, memory_limit)
    start = time.perf_counter()
    loaded = load_machine(machine, devices)
    loaded.check_devices(devices)  # before they are cut into groups, which takes long of many
    search = _Search(graphs, devices, loaded, schedule, stages, blocks, memory_limit)
    best, told = search.best({count: RatePrices(made.graph, search.machine) for count, made in search.blocks.items()},
                             _SECONDS)
    best = search.in_stages(best)
    # The bound is of blocks that hand on whole sums; what is told is the step that is lowered.
    told["gap"] = max(told["gap"], gap_above(best.step.seconds, told["lower_bound"]))
    told["seconds"] = time.perf_counter() - start
    return search.pipeline(best, search.machine, told)


def _check(graphs: Mapping[int, ComputationGraph], devices: int, schedule: str, stages: int | None,
           blocks: int, memory_limit: float | None) -> None:
    """Raises UsageError where the numbers make no sense."""
    check_schedule(schedule)
    if not graphs or any(type(count) is not int or count < 1 for count in graphs):
        raise UsageError(f"graphs of {shortened(list(graphs))} microbatches; give a graph per positive number")
    if type(devices) is not int or devices < 1:
        raise UsageError(f"devices={shortened(devices)}: there must be at least one device")
    if stages is None and devices < 2:
        raise UsageError(f"devices={devices}: two stages or more need a device each; give more devices, or stages=1")
    if stages is not None and not 1 <= stages <= devices:
        raise UsageError(f"stages={shortened(stages)}: give a number from 1 to {devices}, the devices")
    if blocks < 1:
        raise UsageError(f"blocks={shortened(blocks)}: give a positive number")
    if not (memory_limit is None or as_float(memory_limit) >= 0.0):
        raise UsageError(f"memory_limit={shortened(memory_limit)}: give a number of bytes, or None")


class _Search:
    """Looks for the pipeline of the shortest simulated step, by one set of prices after the other.

    Attributes:
      machine: whose rates the blocks are made by.
      blocks: number of microbatches -> the blocks of one.
    """

    def __init__(self, graphs: Mapping[int, ComputationGraph], devices: int, machine: Machine, schedule: str,
                 stages: int | None, blocks: int, memory_limit: float | None) -> None:
        """Has searched nothing; the arguments are those of `find_pipeline`."""
        self.machine, self._graphs, self._devices, self._schedule = machine, graphs, devices, schedule
        self._stages, self._limit = stages, None if memory_limit is None else as_float(memory_limit)
        self._numbers = range(2, devices + 1) if stages is None else range(stages, stages + 1)
        self.blocks = {count: find_blocks(of_microbatch(graph, count), _work(graph, machine), blocks)
                       for count, graph in sorted(graphs.items())}
        self._memory = {count: StageMemory(graph, count, shared=machine.shared_cores,
                                           unfolding_threads=machine.unfolding_threads)
                        for count, graph in graphs.items()}

    def best(self, prices: Mapping[int, StagePrices], seconds: float) -> tuple[Simulated, PipelineReport]:
        """The pipeline of the shortest step, and what was searched (without the seconds).

        Args:
          prices: number of microbatches -> those of the graph of its blocks.
          seconds: for steps that are shorter than those of the best cuts, and the proof that there are no others.

        Raises:
          NoPipelineError: there is none.
        """
        told: PipelineReport = {"blocks": 0, "pairs": 0, "searched": 0, "optimal": True,
                                "microbatches": sorted(self._graphs), "simulated": 0}
        found: list[Simulated] = []
        all_costs: dict[int, StageCosts] = {}
        all_cuts: dict[int, Cuts] = {}
        numbers = self._numbers
        if self._stages is not None:
            told["stages"] = self._stages
        for count, made in self.blocks.items():
            costs = StageCosts(made, prices[count], count, self._memory[count], self._limit)
            cuts = all_cuts[count] = Cuts(made, costs, prices[count], count, self._devices, self._schedule)
            best = cut_stages(costs, made.count, self._devices, count, self._schedule, numbers=numbers,
                              shared_cores=self.machine.shared_cores, nodes=self.machine.nodes)
            found += filter(None, (cuts.simulate(cut.placed) for cut in best.values()))
            all_costs[count] = costs
            told.update({"blocks": max(told["blocks"], made.count), "pairs": told["pairs"] + costs.pairs})
        if not found:
            raise self._none(all_costs)
        shorter, least = shortest_steps(all_cuts, numbers, min(one.step.seconds for one in found), seconds)
        chosen = _simplest([*found, *shorter])
        told.update({"searched": sum(costs.searched for costs in all_costs.values()),
                     "optimal": all(costs.optimal for costs in all_costs.values()),
                     "simulated": sum(cuts.simulated for cuts in all_cuts.values()),
                     "lower_bound": float(least), "gap": gap_above(float(chosen.step.seconds), float(least))})
        return chosen, told

    def _none(self, costs: Mapping[int, StageCosts]) -> NoPipelineError:
        """What is raised where none was found by these, of every number of microbatches."""
        name, blocks = next(iter(self._graphs.values())).name, max(made.count for made in self.blocks.values())
        which = f"pipeline of {self._stages or 'two or more'} stages on {self._devices} devices"
        limit = None if blocks < self._numbers[0] else self._limit
        bounds = [] if limit is None else [self._least_memory(count, one) for count, one in costs.items()]
        least, lightest = map(min, zip(*bounds, strict=True)) if bounds else (-math.inf, -math.inf)
        above = limit is not None and limit < least < math.inf
        proven = above or all(one.optimal for one in costs.values())
        reason = f"{name}: {'no' if proven else 'found no'} {which}"
        if limit is None:
            return NoPipelineError(f"{reason}; the layers make {blocks} block{'s' * (blocks != 1)}",
                                   "take fewer stages" if self._stages else "leave them in one piece",
                                   proven=proven, limited=False)
        needs = [f"every one needs at least {needed_text(least, limit)}"] if above else []
        if max(limit, least) < lightest:
            needs.append(f"the lightest that was looked at {'' if above else 'needs at least '}"
                         f"{needed_text(lightest, limit)}")
        splits = _falls_to({count: light for count, (_, light) in zip(costs, bounds, strict=True)}, limit)
        remedy = f"raise the limit, {'take more microbatches, or' if splits else 'or take'} more devices"
        return NoPipelineError(f"{reason} within {bytes_text(limit)} each{'; ' * bool(needs)}{', '.join(needs)}",
                               remedy, proven=proven, limited=True, splits=splits)

    def _least_memory(self, count: int, costs: StageCosts) -> tuple[float, float]:
        """Bytes that some device of every pipeline of so many microbatches holds at least, and of the lightest that was
        looked at."""
        cutting = Cutting(self.blocks[count].count, self._devices, count, shared_cores=self.machine.shared_cores,
                          nodes=self.machine.nodes)
        return least_of_largest(cutting, lambda place: costs.least_memory(
            place.first, place.stop, place.devices, in_flight(self._schedule, place.left, count)), self._numbers,
            _SECONDS_OF_LEAST / len(self._graphs))

    def step(self, candidate: Simulated, prices: Mapping[int, StagePrices]) -> Simulated:
        """The same pipeline by other prices."""
        count = candidate.microbatches
        return candidate._replace(step=simulate_step(self.blocks[count].graph, candidate.stages, count, self._schedule,
                                                     prices[count]))

    def in_stages(self, candidate: Simulated, kernels: KernelsOfStages | None = None, end: float = math.inf,
                  ) -> Simulated:
        """What was found, as one that is given is priced: blocks of a stage may hand sums to each other."""
        graph, count = self._graphs[candidate.microbatches], candidate.microbatches
        return candidate._replace(step=_step(_in_stages(graph, candidate.stages, count), candidate.stages, count,
                                             self._schedule, self.machine, kernels, end))

    def pipeline(self, candidate: Simulated, machine: Machine, told: PipelineReport) -> Pipeline:
        """What was found, for the program."""
        count = candidate.microbatches
        return _pipeline(self._graphs[count], candidate.stages, count, self._schedule, machine, self._devices,
                         candidate.step, told, self._memory[count])


def find_measured_pipeline(graphs: Mapping[int, ComputationGraph], sources: Mapping[int, KernelSource],
                           meter: KernelMeter | SavedKernels, *, schedule: str = "1f1b", stages: int | None = None,
                           blocks: int = BLOCKS, memory_limit: float | None = None, seconds: float = math.inf,
                           progress: Callable[[str], object] = lambda text: None) -> Pipeline:
    """Finds a pipeline as `find_pipeline` does, priced by kernels that are measured when they are needed.

    The best by what is known has its kernels measured, and is searched again by what is known then, until it consists
    of measured kernels, or estimates do not promise much more than the best so far kept, or the time is over.

    Args:
      graphs: as of `find_pipeline`.
      sources: number of microbatches -> which kernels the graph of one runs.
      meter: what is measured of the p devices, and measures more; or what was measured elsewhere.
      schedule, stages, blocks, memory_limit: as of `find_pipeline`.
      seconds: how long to search and to measure.
      progress: called with what is being done, a line.

    Returns:
      The pipeline. Its search says, besides, how many of its "kernels" are measured.

    Raises:
      UsageError, InfeasibleError: as of `find_pipeline`.
    """
    _check(graphs, meter.devices, schedule, stages, blocks, memory_limit)
    begin = time.perf_counter()
    kernels = KernelsOfStages(sources, meter, progress)
    search = _Search(graphs, meter.devices, kernels.machine, schedule, stages, blocks, memory_limit)
    kernels.begin({count: made.graph for count, made in search.blocks.items()})
    kept: list[Simulated] = []
    idle = 0
    while True:
        prices = kernels.prices()
        try:
            found, told = search.best(prices, 0.0)
        except NoPipelineError:
            if not kept:
                raise
            break  # the search of a stage within a limit has a second; what was found before fits all the same
        kept = [search.step(candidate, prices) for candidate in kept]
        least = min((candidate.step.seconds for candidate in kept), default=math.inf)
        idle = idle + 1 if found.step.seconds > (1.0 - WORTH) * least else 0
        done = kernels.known(found.microbatches, found.stages)
        kept.append(found)
        if done or idle == PATIENCE or not kernels.measure(found.microbatches, found.stages, begin + seconds):
            break
    prices = kernels.prices()
    best = _simplest([search.step(candidate, prices) for candidate in kept])
    try:
        _, told = search.best(prices, _SECONDS)
    except NoPipelineError:  # as above: nothing is known of other cuts by these prices
        told.update({"optimal": False, "lower_bound": 0.0})
    told["gap"] = gap_above(best.step.seconds, told["lower_bound"])
    best = search.in_stages(best, kernels, begin + seconds)
    told["gap"] = max(told["gap"], gap_above(best.step.seconds, told["lower_bound"]))
    told["seconds"] = time.perf_counter() - begin
    told["kernels"] = kernels.report(best.microbatches, best.stages)
    return search.pipeline(best, kernels.machine, told)


def evaluate_pipeline(graph: ComputationGraph, stages: tuple[Laid, ...], microbatches: int, schedule: str,
                      machine: Machine, measured: tuple[KernelSource, KernelMeter | SavedKernels] | None = None, *,
                      seconds: float = math.inf, progress: Callable[[str], object] = lambda text: None) -> Pipeline:
    """The pipeline of stages that are given.

    Args:
      graph: of one microbatch.
      stages: all of it, on consecutive groups of devices.
      microbatches: K.
      schedule: "1f1b" or "gpipe".
      machine: whose numbers count.
      measured: which kernels a microbatch runs, and what is measured of them, which counts in its stead.
      seconds, progress: as of `find_measured_pipeline`.

    Raises:
      UsageError: a configuration that its layer cannot have, or a stage that reaches into another node.
    """
    check_schedule(schedule)
    summed = _in_stages(graph, stages, microbatches)
    _check_configurations(summed, stages, machine)
    kernels = None if measured is None else KernelsOfStages({microbatches: measured[0]}, measured[1], progress)
    step = _step(summed, stages, microbatches, schedule, machine, kernels, time.perf_counter() + seconds)
    machine = machine if kernels is None else kernels.machine
    devices = stages[-1].offset + stages[-1].devices
    told: PipelineReport = {"blocks": len(stages), "pairs": 0, "searched": 0, "optimal": False,
                            "microbatches": [microbatches], "simulated": 1, "seconds": 0.0}
    if kernels is not None:
        told["kernels"] = kernels.report(microbatches, stages)
    return _pipeline(graph, stages, microbatches, schedule, machine, devices, step, told,
                     StageMemory(graph, microbatches, shared=machine.shared_cores,
                                 unfolding_threads=machine.unfolding_threads))


def _in_stages(graph: ComputationGraph, stages: Sequence[Laid], microbatches: int) -> ComputationGraph:
    """A microbatch whose partial sums are summed before they leave a stage."""
    return summed_within(of_microbatch(graph, microbatches), (0, *(stage.stop for stage in stages))).graph


def _step(graph: ComputationGraph, stages: Sequence[Laid], microbatches: int, schedule: str, machine: Machine,
          kernels: KernelsOfStages | None, end: float) -> Step:
    """The step of stages, by the rates of a machine, or by kernels, of which those that are missing are measured until
    the time is over."""
    prices: StagePrices = RatePrices(graph, machine)
    if kernels is not None:
        kernels.begin({microbatches: graph})
        while not kernels.known(microbatches, stages) and kernels.measure(microbatches, stages, end):
            pass
        prices = kernels.prices()[microbatches]
    return simulate_step(graph, stages, microbatches, schedule, prices)


def _check_configurations(graph: ComputationGraph, stages: Sequence[Laid], machine: Machine) -> None:
    """Raises UsageError where a layer is split as it cannot be, or a stage lies across nodes."""
    for stage in stages:
        first, last = stage.offset, stage.offset + stage.devices - 1
        if any(first % node and first // node != last // node for node in machine.nodes):  # priced as the first devices
            raise UsageError(f"a stage on devices {first} to {last}: they reach into another node of {machine.name!r} "
                             "and do not begin with one; search anew for this machine")
        offered = build_network(part_of_graph(graph, stage.first, stage.stop), machine, stage.devices)
        for number, configuration in enumerate(stage.configurations):
            offered.index(number, configuration)


def _falls_to(needed: Mapping[int, float], limit: float) -> bool:
    """Whether more microbatches than these may keep to a limit: by the last two, a pipeline needs a + b / microbatches.

    Args:
      needed: number of microbatches, ascending -> bytes of the lightest pipeline.
      limit: bytes.
    """
    if len(needed) < 2:
        return False  # nothing tells how it falls
    (fewer, before), (more, after) = list(needed.items())[-2:]
    return (more * after - fewer * before) / (more - fewer) <= limit


def _simplest(found: Sequence[Simulated]) -> Simulated:
    """The shortest step; where fewer stages, or fewer devices, are predicted to take no more than `WORTH` longer,
    theirs: a stage that does next to nothing is not worth what predictions cannot tell."""
    enough = (1.0 + WORTH) * min(candidate.step.seconds for candidate in found)
    return min((candidate for candidate in found if candidate.step.seconds <= enough), key=lambda candidate: (
        len(candidate.stages), sum(stage.devices for stage in candidate.stages), candidate.step.seconds))


def _work(graph: ComputationGraph, machine: Machine) -> list[float]:
    """Seconds of every layer on one device."""
    priced = build_network(graph, machine, 1)
    return [float(vector.min()) for vector in priced.network.vectors]


def _pipeline(graph: ComputationGraph, stages: tuple[Laid, ...], microbatches: int, schedule: str, machine: Machine,
              devices: int, step: Step, told: PipelineReport, memory: StageMemory) -> Pipeline:
    made = []
    for number, (stage, taken, idle) in enumerate(zip(stages, step.stages, step.idle, strict=True)):
        flying = in_flight(schedule, len(stages) - number, microbatches)
        held = memory.model(stage.first, stage.stop, flying).peak(stage.configurations)[0]
        made.append(Stage(stage.first, stage.stop, stage.offset, stage.devices, *taken, idle, flying, held))
    return Pipeline(graph.name, graph.hash, devices, machine.name, microbatches, schedule,
                    tuple(layer.name for layer in graph.layers),
                    tuple(chosen for stage in stages for chosen in stage.configurations), tuple(made), step.seconds,
                    {**told}, step.sent, machine.shared_cores)
