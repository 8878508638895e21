"""A step of a pipeline, simulated: every stage computes its microbatches in the order of the schedule, what it needs of
other stages travels between their groups of devices meanwhile.

What a stage takes forward, backward and for the update is simulated by itself, device by device, with all-reduces that
kernels hide; gradients are summed over the microbatches on every device, and between devices once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.compute import PARTS
from pase_mtf.cost.signature import layer_signature
from pase_mtf.graph.computation_graph import ComputationGraph, Edge
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.graph.partition import Partition
from pase_mtf.pipeline.blocks import transfer
from pase_mtf.pipeline.prices import StagePrices
from pase_mtf.pipeline.schedule import Task, tasks_in_order
from pase_mtf.simulator.schedule import PICOSECONDS, Schedule, Tasks, picoseconds, schedule
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.stages import nodes_by_phase

__all__ = ["Crossing", "Doing", "Laid", "Sending", "StageSeconds", "Step", "crossings", "doings", "simulate_step",
           "stage_seconds"]


class Laid(NamedTuple):
    """A stage of a graph.

    Attributes:
      first, stop: its layers, the last excluded.
      offset, devices: where its group begins, and how many devices that has.
      configurations: one per layer.
    """

    first: int
    stop: int
    offset: int
    devices: int
    configurations: tuple[Configuration, ...]


class StageSeconds(NamedTuple):
    """What a stage takes: of a microbatch forward and backward, and once a step."""

    forward: float
    backward: float
    update: float


class Sending(NamedTuple):
    """What one microbatch sends from a stage to another.

    Attributes:
      phase: in which it does.
      source, target: the numbers of the stages.
      seconds: that it takes.
    """

    phase: str
    source: int
    target: int
    seconds: float


class Doing(NamedTuple):
    """Something that happens in a step.

    Attributes:
      phase: "forward", "backward" or "update".
      stage: whose devices do it.
      target: the stage that something is sent to; that of `stage` where it computes.
      microbatch: counted from 0; 0 in an update.
      begin, end: seconds from the start of the step.
    """

    phase: str
    stage: int
    target: int
    microbatch: int
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
      seconds: when all is done.
      stages: what each takes.
      idle: of every stage, the fraction of the step in which its devices compute nothing.
      sent: what a microbatch sends from stage to stage.
    """

    seconds: float
    stages: tuple[StageSeconds, ...]
    idle: tuple[float, ...]
    sent: tuple[Sending, ...]


def stage_seconds(stage: Laid, prices: StagePrices) -> StageSeconds:
    """What a stage takes by itself.

    Args:
      stage: of a graph.
      prices: of the graph.
    """
    priced = prices.stage(stage.first, stage.stop, stage.devices, stage.configurations)
    # Updates run between the backward passes of layers, and gradients are summed, but not in every microbatch.
    whole, alone = (simulator.timeline([0] * len(stage.configurations)) for simulator in (
        Simulator(priced), Simulator(_without_update(priced), gradients=False)))
    ends = [max((one.end for one in alone.slices if one.phase in PHASES[:number + 1]), default=0.0)
            for number in range(2)]
    return StageSeconds(ends[0], ends[1] - ends[0], max(0.0, whole.seconds - ends[1]))


def _without_update(priced: PricedNetwork) -> PricedNetwork:
    """What a microbatch takes that is not the last."""
    layers, parts = [], []
    for layer, of_layer in zip(priced.graph.layers, priced.parts, strict=True):
        nodes, left = nodes_by_phase(layer_signature(layer)), of_layer.copy()
        left[[PARTS.index(name) for name in ("update", "all-reduce update", "resharding update")]] = 0.0
        left[PARTS.index("overhead")] *= 1.0 - nodes[PHASES[-1]] / max(1, sum(nodes.values()))
        layers.append(dataclasses.replace(layer, operations=tuple(
            operation for operation in layer.operations if operation.phase != PHASES[-1])))
        parts.append(left)
    kept = [number for number, edge in enumerate(priced.graph.edges) if edge.phase != PHASES[-1]]
    graph = dataclasses.replace(priced.graph, layers=tuple(layers),
                                edges=tuple(priced.graph.edges[number] for number in kept))
    return dataclasses.replace(priced, graph=graph, parts=tuple(parts),
                               edge_matrices=tuple(priced.edge_matrices[number] for number in kept))


def _held(graph: ComputationGraph, stages: Sequence[Laid], layer: int, dims: Sequence[str]) -> Partition:
    """How the devices of its stage hold a tensor of a layer."""
    stage = next(stage for stage in stages if stage.first <= layer < stage.stop)
    placed = stage.configurations[layer - stage.first].placed(graph.layers[layer], dims)
    return Partition(tuple(device + stage.offset for device in placed.devices), placed.shards)


class Crossing(NamedTuple):
    """A tensor that goes from one stage to another.

    Attributes:
      edge: of the graph, one of those to layers that need the same parts of it.
      source, target: the numbers of the two stages.
      held, needed: how the devices of either hold it.
    """

    edge: Edge
    source: int
    target: int
    held: Partition
    needed: Partition


def crossings(graph: ComputationGraph, stages: Sequence[Laid]) -> Iterator[Crossing]:
    """What a microbatch sends from stage to stage.

    Args:
      graph: of one microbatch.
      stages: all of it.
    """
    number = [next(place for place, stage in enumerate(stages) if stage.first <= layer < stage.stop)
              for layer in range(len(graph.layers))]
    sent: set[Hashable] = set()
    for edge in graph.edges:
        source, target = number[edge.source], number[edge.target]
        if source != target and edge.phase != PHASES[-1]:
            needed = _held(graph, stages, edge.target, edge.target_dims)
            if transfer(edge, needed) not in sent:
                sent.add(transfer(edge, needed))
                yield Crossing(edge, source, target, _held(graph, stages, edge.source, edge.source_dims), needed)


def _between(graph: ComputationGraph, stages: Sequence[Laid], prices: StagePrices) -> tuple[Sending, ...]:
    """What one microbatch sends from stage to stage."""
    found: dict[tuple[str, int, int], float] = {}
    for edge, source, target, held, needed in crossings(graph, stages):
        key = edge.phase, source, target
        found[key] = found.get(key, 0.0) + prices.between(edge, held, needed)
    return tuple(Sending(*key, seconds) for key, seconds in found.items())


def simulate_step(graph: ComputationGraph, stages: Sequence[Laid], microbatches: int, order: str,
                  prices: StagePrices, taken: Sequence[StageSeconds] | None = None) -> Step:
    """Simulates a step.

    Args:
      graph: of one microbatch.
      stages: all of it.
      microbatches: K.
      order: one of `schedule.SCHEDULES`.
      prices: of the graph.
      taken: what each stage takes, where that is known.
    """
    taken = taken or [stage_seconds(stage, prices) for stage in stages]
    between = _between(graph, stages, prices)
    total = _scheduled(taken, between, microbatches, order, shared_cores=prices.machine.shared_cores)[1].seconds
    busy = [microbatches * (of_stage.forward + of_stage.backward) + of_stage.update for of_stage in taken]
    idle = tuple(max(0.0, 1.0 - time / total) if total else 0.0 for time in busy)
    return Step(total, tuple(taken), idle, between)


def doings(taken: Sequence[StageSeconds], sent: Sequence[Sending], microbatches: int, order: str, *,
           shared_cores: bool) -> list[Doing]:
    """All that happens in a step, by when it begins.

    Args:
      taken: what each stage takes.
      sent: what a microbatch sends from stage to stage.
      microbatches: K.
      order: one of `schedule.SCHEDULES`.
      shared_cores: whether the devices share cores, and one thing happens after the other.
    """
    what, times = _scheduled(taken, sent, microbatches, order, shared_cores=shared_cores)
    return sorted((Doing(*one, int(begin) / PICOSECONDS, int(end) / PICOSECONDS)
                   for one, begin, end in zip(what, times.start, times.end, strict=True)), key=lambda one: one.begin)


def _scheduled(taken: Sequence[StageSeconds], sent: Sequence[Sending], microbatches: int, order: str, *,
               shared_cores: bool) -> tuple[list[tuple[str, int, int, int]], Schedule]:
    """(phase, stage, target, microbatch) of all that happens in a step, as in `Doing`, and when it does."""
    stages = len(taken)
    what: list[tuple[str, int, int, int]] = []
    seconds: list[float] = []
    needs: list[tuple[int, ...]] = []
    waits: list[tuple[int, int]] = []

    def add(doing: tuple[str, int, int, int], duration: float, resources: Iterable[int], before: Iterable[int]) -> int:
        what.append(doing)
        seconds.append(duration)
        needs.append((0,) if shared_cores else tuple(resources))
        waits.extend((other, len(seconds) - 1) for other in before)
        return len(seconds) - 1

    def ports(source: int, target: int) -> tuple[int, int]:
        return stages + source, stages * 2 + target

    latest: dict[int, int] = {}  # stage -> its last task
    arrives: dict[tuple[str, int, int], list[int]] = {}  # (phase, stage, microbatch) -> what sends to it
    for task in tasks_in_order(order, stages, microbatches):
        before = [*arrives.get(task, ()), *([latest[task.stage]] if task.stage in latest else [])]
        phase, stage, microbatch = task
        number = add((phase, stage, stage, microbatch), getattr(taken[stage], phase), (stage,), before)
        latest[stage] = number
        for sending in sent:
            if (sending.phase, sending.source) == (phase, stage):
                arrived = add((phase, stage, sending.target, microbatch), sending.seconds,
                              ports(stage, sending.target), [number])
                arrives.setdefault(Task(phase, sending.target, microbatch), []).append(arrived)
    for stage, of_stage in enumerate(taken):
        add((PHASES[-1], stage, stage, 0), of_stage.update, (stage,), [latest[stage]])
    return what, schedule(_tasks(seconds, needs, waits, 3 * stages))


def _tasks(seconds: Sequence[float], needs: Sequence[tuple[int, ...]], waits: Sequence[tuple[int, int]],
           resources: int) -> Tasks:
    at = np.zeros(len(seconds) + 1, np.int64)
    np.cumsum([len(entry) for entry in needs], out=at[1:])
    before, after = np.array(waits, np.int64).reshape(-1, 2).T
    return Tasks(picoseconds(np.array(seconds)), np.arange(len(seconds)), at,
                 np.fromiter(itertools.chain.from_iterable(needs), np.int64, int(at[-1])), before, after, resources)

