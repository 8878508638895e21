"""A pipeline: stages of consecutive layers, each with devices and a strategy of its own, and what a step takes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tabulate import tabulate
from typing_extensions import NotRequired, TypedDict

from pase_mtf.amounts import bytes_text, gap_text
from pase_mtf.errors import FormatError, PaseError, UsageError
from pase_mtf.files import check_schema, read_json, write_atomically
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.pipeline.schedule import SCHEDULES
from pase_mtf.pipeline.simulate import Doing, Laid, Sending, StageSeconds, doings
from pase_mtf.simulator.timeline import Slice, Timeline
from pase_mtf.strategy.kernels_text import is_report, kernels_text
from pase_mtf.strategy.search_report import KernelsReport

__all__ = ["FORMAT", "VERSION", "Pipeline", "PipelineReport", "Stage", "distance_text", "task_text"]

FORMAT = "pase_mtf.pipeline"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Stage:
    """Consecutive layers on a group of devices.

    Attributes:
      first, stop: its layers, the last excluded.
      offset, devices: where its group of devices begins, and how many they are.
      forward, backward, update: seconds of a microbatch forward and backward, and of the update of a step.
      idle: the fraction of a step in which its devices compute nothing.
      in_flight: of how many microbatches it keeps the activations at most.
      memory: part -> predicted bytes per device, the activations of all microbatches in flight.
    """

    first: int
    stop: int
    offset: int
    devices: int
    forward: float
    backward: float
    update: float
    idle: float
    in_flight: int
    memory: dict[str, float]

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes on each of its devices."""
        return sum(self.memory.values())


class _StageFields(TypedDict):
    first: int
    stop: int
    offset: int
    devices: int
    forward: float
    backward: float
    update: float
    idle: float
    in_flight: int
    memory: dict[str, float]


class _SendingFields(TypedDict):
    phase: str
    source: int
    target: int
    seconds: float


class PipelineReport(TypedDict, total=False):
    """What was searched.

    Attributes:
      blocks: of layers, that stages are made of.
      pairs: of a stage and a group of devices.
      searched: so many exact searches, of blocks and of those stages that may be in a best cut.
      optimal: whether what all of them found is proven.
      microbatches: the numbers that were tried.
      simulated: how many cuts were.
      stages: the number of stages that was asked for; without it every number was looked at.
      lower_bound: seconds that no simulated step is shorter than of any cut of these blocks whose stages have their
        cheapest strategies, found or not; of a pipeline that is given nothing is known. Files of earlier versions lack
        it.
      gap: by what fraction its simulated step is longer than that at most. In files of earlier versions what searches
        found counts as the cheapest strategy, proven or not.
      seconds: of all of it.
      kernels: those that prices are made of, where these are measured.
    """

    blocks: int
    pairs: int
    searched: int
    optimal: bool
    microbatches: list[int]
    simulated: int
    stages: int
    lower_bound: float
    gap: float
    seconds: float
    kernels: KernelsReport


# Where nothing bounds the steps of other cuts the gap is infinite.
PipelineReport.__pydantic_config__ = {"strict": True, "extra": "forbid"}  # type: ignore[attr-defined]

_TOLD = {"blocks", "pairs", "searched", "optimal", "microbatches", "simulated"}
"""What `Pipeline.statement` reads of a report."""


class _PipelineFields(TypedDict):
    format: str
    version: int
    graph_name: str
    graph_hash: str
    devices: int
    machine_name: str
    microbatches: int
    schedule: str
    layer_names: list[str]
    configurations: list[list[list[object]]]
    stages: list[_StageFields]
    seconds: float
    search: PipelineReport
    sent: NotRequired[list[_SendingFields]]
    shared_cores: NotRequired[bool]


def task_text(phase: str, microbatch: int) -> str:
    """What a stage does, for people: for which microbatch, or the update.

    Args:
      phase: one of `graph.layer_operation.PHASES`.
      microbatch: counted from 0; of an update it does not matter.
    """
    return PHASES[-1] if phase == PHASES[-1] else f"microbatch {microbatch + 1}"


def distance_text(found: PipelineReport) -> str:
    """How much shorter the step of another cut may be, behind a comma; empty where an earlier version does not say.

    Where no bound holds for all cuts it is said of those that were searched.

    Args:
      found: the report of a search.
    """
    if "gap" not in found:
        return ""
    bounded = math.isfinite(found["gap"]) and (found["optimal"] or "lower_bound" in found)
    least = "the shortest of all" if bounded else "the shortest of those that were searched"
    if math.isfinite(found["gap"]) and found["gap"] > 0.0:
        return f", {gap_text(found['gap'], least)}"
    return f", {'proven to be ' if bounded else ''}{least}"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How a program is computed in stages.

    Attributes:
      graph_name, graph_hash: of one microbatch.
      devices: p.
      machine_name: whose numbers `seconds` are.
      microbatches: K.
      schedule: one of `schedule.SCHEDULES`.
      layer_names: as in the graph.
      configurations: one per layer, on the devices of its stage.
      stages: in their order.
      seconds: predicted time of a step, simulated.
      search: what was searched (`find.find_pipeline`).
      sent: what a microbatch sends from stage to stage; None: a file of an earlier version does not say.
      shared_cores: whether the devices of that machine do one thing after the other.
    """

    graph_name: str
    graph_hash: str
    devices: int
    machine_name: str
    microbatches: int
    schedule: str
    layer_names: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    stages: tuple[Stage, ...]
    seconds: float
    search: PipelineReport
    sent: tuple[Sending, ...] | None = None
    shared_cores: bool = False

    @property
    def memory(self) -> dict[str, float]:
        """Part -> predicted bytes on the fullest device."""
        return max(self.stages, key=lambda stage: stage.memory_bytes).memory

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes on the fullest device."""
        return sum(self.memory.values())

    def stage_of(self, layer: int) -> int:
        """The number of the stage of a layer."""
        return next(number for number, stage in enumerate(self.stages) if stage.first <= layer < stage.stop)

    def laid(self) -> tuple[Laid, ...]:
        """The stages, as they are simulated."""
        return tuple(Laid(stage.first, stage.stop, stage.offset, stage.devices,
                          self.configurations[stage.first:stage.stop]) for stage in self.stages)

    def timeline(self) -> Timeline:
        """What each device does when, in the simulated step.

        Raises:
          UsageError: it was read from a file of an earlier version, which does not hold what stages send.
        """
        if self.sent is None:
            raise UsageError("a pipeline of an earlier version does not say what its stages send; evaluate it again")
        taken = [StageSeconds(stage.forward, stage.backward, stage.update) for stage in self.stages]
        found = doings(taken, self.sent, self.microbatches, self.schedule, shared_cores=self.shared_cores)
        return Timeline(f"{self.graph_name} in {len(self.stages)} stages, simulated", self.devices, self.seconds,
                        tuple(one for doing in found if doing.end > doing.begin for one in self._slices(doing)))

    def _slices(self, doing: Doing) -> Iterator[Slice]:
        """What a stage does, on each of its devices; of what it sends, each device sends a part to one of the other
        stage."""
        stage, target = self.stages[doing.stage], self.stages[doing.target]
        kind = "kernels" if doing.stage == doing.target else "transfer"
        for number in range(stage.devices):
            device = stage.offset + number
            receiver = device if kind == "kernels" else target.offset + number % target.devices
            yield Slice(kind, doing.phase, task_text(doing.phase, doing.microbatch), device, receiver, doing.begin,
                        doing.end)

    def table(self) -> str:
        """The stages as a table: their layers, devices, milliseconds, idle time and memory."""
        rows = [[number, f"{self.layer_names[stage.first]} .. {self.layer_names[stage.stop - 1]}",
                 f"{stage.offset}-{stage.offset + stage.devices - 1}" if stage.devices > 1 else f"{stage.offset}",
                 f"{1e3 * stage.forward:.3f}", f"{1e3 * stage.backward:.3f}", f"{1e3 * stage.update:.3f}",
                 f"{100 * stage.idle:.0f} %", stage.in_flight, bytes_text(stage.memory_bytes)]
                for number, stage in enumerate(self.stages, 1)]
        table = tabulate(rows, ["stage", "layers", "devices", "forward ms", "backward ms", "update ms", "idle",
                                "in flight", "memory"], disable_numparse=True)
        return (f"pipeline: {self.graph_name} on {self.devices} devices ({self.machine_name}), "
                f"{len(self.stages)} stages, {self.microbatches} microbatches, {self.schedule}, "
                f"predicted {1e3 * self.seconds:.3f} ms a step; "
                f"{self.statement}\n{table}")

    @property
    def statement(self) -> str:
        """What was searched, and what is proven of the answer."""
        found = self.search
        proof = "each proven" if found["optimal"] else "not all proven"
        counts = " or ".join(map(str, found["microbatches"]))
        numbers = (f"{found['stages']} stage{'s' * (found['stages'] != 1)}" if "stages" in found
                   else "every number of stages")
        kernels = kernels_text({"kernels": found["kernels"]}) if "kernels" in found else ""
        if not found["pairs"]:
            return "given, not searched" + (f"; prices: {kernels}" if kernels else "")
        return (f"{found['pairs']} stages on groups of devices ({found['blocks']} blocks, {found['searched']} "
                f"searches, {proof}); {counts} microbatches and {numbers}, {found['simulated']} cuts "
                f"simulated{distance_text(found)}" + (f"; prices: {kernels}" if kernels else ""))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the pipeline as JSON, whole or not at all (UsageError: the file cannot be written)."""
        write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, **self.to_json()}, indent=1))

    def to_json(self) -> dict[str, object]:
        """All of it, as `json` takes it."""
        configurations = [[list(axis) for axis in configuration.axes] for configuration in self.configurations]
        sent = {} if self.sent is None else {"sent": [sending._asdict() for sending in self.sent]}
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "sent"}
        return {**fields, "configurations": configurations, **sent}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Pipeline:
        """Of what `json` made of `to_json`.

        Raises:
          PaseError: a configuration that is none.
        """
        configurations = tuple(Configuration(tuple(map(tuple, axes))) for axes in data["configurations"])
        stages = tuple(Stage(**stage) for stage in data["stages"])
        sent = tuple(Sending(**sending) for sending in data["sent"]) if "sent" in data else None
        return cls(**{**{field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data},
                      "configurations": configurations, "layer_names": tuple(data["layer_names"]), "stages": stages,
                      "sent": sent})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Pipeline:
        """Reads a pipeline that `save` wrote.

        Raises:
          FormatError: missing, truncated or foreign file.
        """
        data = read_json(path, FORMAT, VERSION)
        check_schema(path, data, _PipelineFields)
        try:
            found = cls.of_json(data)
        except PaseError as error:
            raise FormatError(f"{path}: {error}") from error
        if problem := found._problem():
            raise FormatError(f"{path}: not a complete pipeline ({problem}); search again")
        return found

    def _problem(self) -> str:
        """What is wrong with what a file held; empty where nothing is."""
        if len(self.configurations) != len(self.layer_names):
            return "lists of unequal length"
        if "kernels" in self.search and not is_report(self.search["kernels"]):
            return "no counts of kernels"
        if not self.search.keys() >= _TOLD or any(isinstance(value, float) and math.isnan(value)
                                                  for value in self.search.values()):
            return "not all that is to be said of the search"
        if self.schedule not in SCHEDULES or self.microbatches < 1:
            return f"{self.microbatches} microbatches in the order {self.schedule!r}"
        begins = [(0, 0), *((stage.stop, stage.offset + stage.devices) for stage in self.stages)]
        if begins[-1][0] != len(self.layer_names) or not 0 < begins[-1][1] <= self.devices or any(
                (stage.first, stage.offset) != begin or stage.stop <= stage.first or stage.devices < 1
                for stage, begin in zip(self.stages, begins, strict=False)):
            return "stages that leave out layers, or take devices that there are not"
        numbers = range(len(self.stages))
        if not all(sending.phase in PHASES[:2] and sending.source in numbers and sending.target in numbers
                   and 0.0 <= sending.seconds < math.inf for sending in self.sent or ()):
            return "something that is sent between stages that there are not, or never arrives"
        if any(configuration.devices > stage.devices for stage in self.stages
               for configuration in self.configurations[stage.first:stage.stop]):
            return "a layer on more devices than its stage has"
        return ""
