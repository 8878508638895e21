"""A strategy: a configuration for every layer, and what it costs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from typing_extensions import TypedDict

from pase_mtf.arguments import checked_arguments
from pase_mtf.calibration.load import GivenMachine, load_machine
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import FormatError, MismatchError, PaseError, UsageError, nearest, shortened
from pase_mtf.files import check_schema, read_json, write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import LOCAL
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.simulator.schedule import LONGEST
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.timeline import Timeline
from pase_mtf.strategy.devices import above_text, devices_text
from pase_mtf.strategy.experts import BY_HAND
from pase_mtf.strategy.judged_text import is_judged, is_trial, judged_text, trial_text
from pase_mtf.strategy.kernels_text import is_report, kernels_text
from pase_mtf.strategy.search_report import SearchReport, foreign_entry
from pase_mtf.strategy.simulated import is_simulated
from pase_mtf.strategy.tables import LayerSeconds, alternatives_table, difference_table, layers_table, seconds_by_kind
from pase_mtf.strategy.within import frontier_of

__all__ = ["FORMAT", "VERSION", "Strategy", "check_configurations", "evaluate_strategy", "price_assignment",
           "with_configurations"]

FORMAT = "pase_mtf.strategy"
VERSION = 2
"""Version 1, which is still read, charged what moves between two layers to the one that it moves to."""

_MOST_DEVICES = 2 ** 31 - 1
_SAME = 1e-9
"""Of two sums of the same numbers, relative."""
_OF_ANY_PRICES = frozenset({"useful_devices", "suggested_devices", "assumed"})
"""What is known of how a strategy was found that does not depend on prices."""


class _StrategyFields(TypedDict):
    """What a file holds; see Strategy."""

    format: str
    version: int
    name: str
    graph_name: str
    graph_hash: str
    devices: int
    machine_name: str
    machine_source: str
    layer_names: list[str]
    configurations: list[list[list[object]]]
    layer_parts: list[dict[str, float]]
    edge_parts: list[float]
    parts: dict[str, float]
    seconds: float
    memory: dict[str, float]
    search: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A configuration for every layer of one graph.

    Attributes:
      name: "exact", "data_parallel", "expert", ...: where it comes from.
      graph_name, graph_hash: the graph it was made for.
      devices: p.
      machine_name, machine_source: whose numbers `seconds` are, and where those come from.
      layer_names: as in the graph.
      configurations: per layer.
      layer_parts: per layer, part of the cost -> seconds.
      edge_parts: per layer, seconds of moving tensors to it from other layers and from it to them: half of what every
        edge takes is charged to either end, so that the layers add up to the step.
      parts: part of the cost -> seconds, over the whole step.
      seconds: predicted time of one training step.
      memory: part -> predicted bytes on the fullest device.
      search: how it was found.
    """

    name: str
    graph_name: str
    graph_hash: str
    devices: int
    machine_name: str
    machine_source: str
    layer_names: tuple[str, ...]
    configurations: tuple[Configuration, ...]
    layer_parts: tuple[dict[str, float], ...]
    edge_parts: tuple[float, ...]
    parts: dict[str, float]
    seconds: float
    memory: dict[str, float]
    search: SearchReport
    _priced: PricedNetwork | None = dataclasses.field(default=None, compare=False, repr=False)
    # Of prices by kernels: whether what tells one strategy from another is measured.
    _is_measured: Callable[[Sequence[Configuration], Sequence[Configuration]], bool] | None = dataclasses.field(
        default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.name, self.graph_hash, self.devices, self.machine_name, self.configurations, self.seconds))

    def __copy__(self) -> Strategy:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Strategy:
        """All but the prices, which nothing changes."""
        return dataclasses.replace(self, **copy.deepcopy(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}, memo))

    def __getstate__(self) -> dict[str, object]:
        """For `pickle`; prices by kernels, which ask the program and what measures it, stay in their process."""
        by_kernels = self._priced is not None and self._priced.again is not None
        return {**vars(self), "_is_measured": None, "_priced": None if by_kernels else self._priced}

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes on the fullest device."""
        return sum(self.memory.values())

    @property
    def layer_seconds(self) -> tuple[LayerSeconds, ...]:
        """Per layer, what it takes; resharding is that within it and half of that on its edges."""
        return tuple(map(seconds_by_kind, self.layer_parts, self.edge_parts))

    # -- for people --------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        return self.table()

    def table(self, group: bool = True) -> str:
        """The strategy as a table: layer, split, predicted milliseconds of computation and of communication.

        Collectives combine partial sums; resharding moves a tensor, within a layer or between two of them, to either of
        which half is charged.

        Args:
          group: show layers of the same repeated block (equal names but for numbers, equal splits) as one row.
        """
        table = layers_table(self.layer_names, self.configurations, self.layer_seconds, group)
        return (f"{self.name}: {self.graph_name} on {self.devices} devices ({self.machine_name}), "
                f"predicted {1e3 * self.seconds:.3f} ms a step, {self.verdict}{self._useful()}\n{table}\n"
                f"memory on the fullest device: {self.memory_bytes / 1e6:.1f} MB ("
                + ", ".join(f"{part} {size / 1e6:.1f}" for part, size in self.memory.items()) + ")"
                + "".join(f"\nnote: {assumed}" for assumed in self.search.get("assumed", ())))

    @property
    def verdict(self) -> str:
        """How good it is, as far as that is known, for people: proven optimal, or at most so far from it; and what its
        prices rest on."""
        if self.name in BY_HAND or "optimal" not in self.search:
            return "written by hand" if self.name in BY_HAND else "given"
        return "; ".join(filter(None, (self._proof(), judged_text(self.search), kernels_text(self.search),
                                        trial_text(self.search))))

    def _proof(self) -> str:
        if self.search["optimal"]:
            return "proven optimal" + (", unless kernels that were not timed are faster than any that were"
                                       if self.search.get("kernels") else "")
        return above_text(self.search, self.seconds)

    def _useful(self) -> str:
        if "useful_devices" not in self.search:
            return ""
        text = devices_text(self.devices, self.search["useful_devices"], self.search.get("suggested_devices"))
        return f"; {text}" if text else ""

    @checked_arguments
    def explain(self, layer: str | int, most: int = 10) -> str:
        """Why a layer is split the way it is: its alternatives with all else as it is, and what each would cost.

        What moves to the layer and from it counts in full: all of it depends on how this layer is split.

        Args:
          layer: name or index.
          most: how many alternatives to show, best first.

        Raises:
          UsageError: there is no such layer, there are fewer than one to show, or the strategy was loaded without its
            graph.
        """
        if most < 1:
            raise UsageError(f"most={most}: give how many alternatives to show, at least 1")
        priced = self._need_prices()
        number, assignment = self._layer_index(layer), self._assignment(priced)
        return alternatives_table(priced, number, assignment, most,
                                  lambda choice: self._why_not(priced, assignment, number, choice))

    def _why_not(self, priced: PricedNetwork, assignment: Sequence[int], layer: int, choice: int) -> str:
        """Why a configuration of a layer was not taken that seems to cost no more than the one that was; empty: for no
        reason that is known."""
        beside, configurations = [*assignment], [*self.configurations]
        beside[layer], configurations[layer] = choice, priced.configurations[layer][choice]
        if self._is_measured is not None and not self._is_measured(configurations, self.configurations):
            return "not measured"
        limit = self.search.get("memory_limit")
        if limit is not None and priced.peak_memory(beside)[0] > limit:
            return "beyond the memory limit"
        return "chosen by simulated steps" if self.search.get("simulated_rank", 1) > 1 else ""

    def diff(self, other: Strategy) -> str:
        """The layers that two strategies of one graph split differently, and the predicted times.

        Raises:
          UsageError: the other is no strategy.
          MismatchError: the strategies were made for different graphs.
        """
        if not isinstance(other, Strategy):
            raise UsageError(f"cannot compare with {shortened(other)}; give a Strategy")
        if other.graph_hash != self.graph_hash:
            raise MismatchError(f"strategies of different graphs: {self.graph_name} ({self.graph_hash}) and "
                                f"{other.graph_name} ({other.graph_hash}); compare strategies of one graph")
        mine, theirs = ([*zip(strategy.configurations, strategy.layer_seconds, strict=True)]
                        for strategy in (self, other))
        same = sum(one == two for one, two in zip(self.configurations, other.configurations, strict=True))
        warning = ""
        if (self.machine_name, self.machine_source) != (other.machine_name, other.machine_source):
            warning = (f"predicted for different machines, {self.machine_name} and {other.machine_name}: the times do "
                       "not compare\n")
        if self.devices != other.devices:
            warning += f"for {self.devices} and for {other.devices} devices\n"
        return (f"{warning}{self.name} {1e3 * self.seconds:.3f} ms, {other.name} {1e3 * other.seconds:.3f} ms; "
                f"{same} of {len(self.layer_names)} layers are split alike\n"
                + difference_table(self.layer_names, mine, theirs, (self.name, other.name)))

    @checked_arguments
    def memory_frontier(self, points: int = 8, time_limit: float = 0.5) -> tuple[FrontierPoint, ...]:
        """What memory buys: the least predicted time of a step within limits from what the lightest needs that is found
        to what the fastest needs.

        Args:
          points: how many limits.
          time_limit: seconds of search for each of them.

        Raises:
          UsageError: the strategy was loaded without a machine, or fewer than two points.
          InfeasibleError: no strategy was found in that time.
        """
        return frontier_of(self._need_prices(), points, time_limit)

    def frontier_configurations(self, points: int = 8) -> tuple[tuple[Configuration, ...], ...]:
        """The strategies of `memory_frontier`, a configuration per layer each, from the lowest limit to the highest.

        Args:
          points: how many limits.

        Raises:
          UsageError, InfeasibleError: of `memory_frontier`.
        """
        choices = self._need_prices().configurations
        return tuple(tuple(layer[index] for layer, index in zip(choices, point.solution.assignment, strict=True))
                     for point in self.memory_frontier(points))

    def timeline(self) -> Timeline:
        """What each device does when, in a simulated step: kernels, all-reduces, and what devices send to each other.

        Where devices have cores of their own, what one does overlaps with what others do and with what is sent, and two
        that send over one link wait for each other: the step may take less or more than `seconds`, which is a sum.

        Raises:
          UsageError: the strategy was loaded without a machine.
        """
        priced = self._need_prices()
        return Simulator(priced).timeline(self._assignment(priced), f"{self.name}: {self.graph_name} on {self.devices} "
                                                                    f"devices ({self.machine_name})")

    @functools.cached_property
    def simulated_seconds(self) -> float | None:
        """How long a simulated step takes (`timeline`); None where none is simulated unless it is asked for: the
        devices share cores (then it is `seconds`) or are too many, the step is too long, or the strategy was loaded
        without a machine."""
        if self._priced is None or not is_simulated(self._priced.machine, self.devices) or self.seconds > LONGEST:
            return None
        return Simulator(self._priced).seconds(self._assignment(self._priced))

    def _assignment(self, priced: PricedNetwork) -> list[int]:
        return [priced.index(number, configuration) for number, configuration in enumerate(self.configurations)]

    def _need_prices(self) -> PricedNetwork:
        if self._priced is None:
            raise UsageError("this strategy knows no prices; load it with its graph and machine: "
                             "Strategy.load(path, graph, machine)")
        return self._priced

    def _layer_index(self, layer: str | int) -> int:
        if isinstance(layer, int):
            if not 0 <= layer < len(self.layer_names):
                raise UsageError(f"layer {layer}: the graph has layers 0 to {len(self.layer_names) - 1}")
            return layer
        if not isinstance(layer, str) or layer not in self.layer_names:
            raise UsageError(f"unknown layer {shortened(layer)}; {nearest(layer, self.layer_names)}")
        return self.layer_names.index(layer)

    # -- files -------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the strategy as JSON, whole or not at all (UsageError: the file cannot be written)."""
        data: dict[str, object] = {"format": FORMAT, "version": VERSION}
        for field in dataclasses.fields(self):
            if not field.name.startswith("_") and field.name != "configurations":
                data[field.name] = getattr(self, field.name)
        data["configurations"] = [[list(axis) for axis in configuration.axes] for configuration in self.configurations]
        write_atomically(path, json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: ComputationGraph | None = None,
             machine: GivenMachine = None) -> Strategy:
        """Reads a strategy that `save` wrote.

        Args:
          path: the file.
          graph: the graph it is to be used on; it must be the one it was made for.
          machine: price it anew on this machine, which `explain` needs, and which takes the graph; None: not at all.
            Where the prices are others than those that it was found by, nothing is said any more of how good it is.

        Raises:
          FormatError: missing, truncated or foreign file, of the strategy or of the machine.
          MismatchError: the strategy was made for another graph.
          UsageError: an unknown machine, a machine without a graph, or what is no graph.
        """
        if machine is not None and graph is None:
            raise UsageError(f"machine={shortened(machine)}: a strategy is priced with its graph; give that, too")
        data = read_json(path, FORMAT, VERSION)
        check_schema(path, data, _StrategyFields)
        try:
            configurations = tuple(Configuration(tuple(map(tuple, axes))) for axes in data["configurations"])
        except PaseError as error:
            raise FormatError(f"{path}: {error}") from error
        values = {field.name: data[field.name] for field in dataclasses.fields(cls)
                  if not field.name.startswith("_") and field.name != "configurations"}
        for name in ("layer_names", "layer_parts", "edge_parts"):
            values[name] = tuple(values[name])
        strategy = cls(configurations=configurations, **values)
        problem = strategy._problem()
        if problem:
            raise FormatError(f"{path}: not a complete strategy file ({problem}); search again")
        if graph is not None:
            strategy.check_graph(graph, path)
            if machine is not None:
                return strategy._priced_again(graph, machine)
        return strategy

    def _priced_again(self, graph: ComputationGraph, machine: GivenMachine) -> Strategy:
        again = evaluate_strategy(graph, self.configurations, self.devices, machine, name=self.name, search=self.search)
        if again.machine_name == self.machine_name and math.isclose(again.seconds, self.seconds, rel_tol=_SAME):
            return again
        kept = {name: value for name, value in again.search.items() if name in _OF_ANY_PRICES}
        return dataclasses.replace(again, search=cast(SearchReport, kept))

    def _problem(self) -> str:
        """What is wrong with what a file held; empty where nothing is."""
        if len({len(self.configurations), *map(len, (self.layer_names, self.layer_parts, self.edge_parts))}) > 1:
            return "lists of unequal length"
        if not 1 <= self.devices <= _MOST_DEVICES:
            return f"{shortened(self.devices)} devices"
        useful, suggested = self.search.get("useful_devices", 1.0), self.search.get("suggested_devices")
        if not (type(useful) in (int, float) and 0 <= useful <= self.devices * (1 + _SAME)
                and (suggested is None or (type(suggested) is int and 0 < suggested <= self.devices))):
            return f"useful devices of {shortened(useful)}, {shortened(suggested)}"
        if not self.search.keys().isdisjoint(("optimal", "simpler")) and not (
                isinstance(self.search.get("optimal"), bool) and isinstance(self.search.get("gap"), float)):
            return f"a search of {shortened(self.search)}"
        if "kernels" in self.search and not is_report(self.search["kernels"]):
            return f"kernels of {shortened(self.search['kernels'])}"
        if not is_judged(self.search):
            return f"simulated steps of {shortened(self.search)}"
        if "trial" in self.search and not is_trial(self.search["trial"]):
            return f"steps that were tried of {shortened(self.search['trial'])}"
        if foreign := foreign_entry(self.search):
            return foreign
        for name, configuration in zip(self.layer_names, self.configurations, strict=True):
            if configuration.devices > self.devices:
                return f"layer {shortened(name)} is split over more than {self.devices} devices"
        return ""

    def check_graph(self, graph: ComputationGraph, path: str | os.PathLike[str] | None = None) -> None:
        """Refuses a graph that the strategy was not made for.

        Raises:
          MismatchError: the hashes differ.
          UsageError: it is no exported graph.
        """
        if not isinstance(graph, ComputationGraph):
            raise UsageError(f"a {type(graph).__name__} is no ComputationGraph; give what export_graph(…) makes of it")
        if graph.hash != self.graph_hash:
            where = f"{path}: " if path is not None else ""
            raise MismatchError(
                f"{where}made for {self.graph_name} with {len(self.layer_names)} layers (hash {self.graph_hash}), "
                f"this is {graph.name} with {len(graph.layers)} layers (hash {graph.hash}); search again for this one")


def check_configurations(graph: ComputationGraph, configurations: Sequence[Configuration], devices: int) -> None:
    """Refuses configurations that a graph on p devices cannot have.

    Args:
      graph: the graph.
      configurations: one per layer.
      devices: p.

    Raises:
      UsageError: not one configuration per layer, or one that its layer does not allow, or that needs more devices.
    """
    if len(configurations) != len(graph.layers):
        raise UsageError(f"{len(configurations)} configurations for {len(graph.layers)} layers; give one per layer")
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        for dim, shards in configuration.splits.items():
            if dim not in layer.splittable or layer.dims[dim] % shards:
                raise UsageError(f"layer {layer.name!r}: {dim} cannot be split into {shards}; "
                                 f"it allows {', '.join(layer.splittable) or 'no split'} (sizes {layer.dims})")
        if configuration.devices > devices:
            raise UsageError(f"layer {layer.name!r}: {configuration} needs {configuration.devices} devices, "
                             f"there are {devices}")


@checked_arguments
def evaluate_strategy(graph: ComputationGraph, configurations: Sequence[Configuration], devices: int,
                      machine: GivenMachine = LOCAL, *, name: str = "given",
                      search: Mapping[str, object] | None = None) -> Strategy:
    """A Strategy out of a configuration per layer, whoever chose them.

    Args:
      graph: the graph.
      configurations: one per layer.
      devices: p.
      machine: whose numbers to price it with: a Machine, the name of one, the path of its file, or "local" (None is the
        same): the devices at hand, measured once (`pase_mtf.calibration.load`).
      name: what to call it.
      search: how it was found.

    Raises:
      UsageError: not one configuration per layer, or one that its layer does not allow; an unknown machine; a `search`
        that says what no search does.
      FormatError: the file of the machine is missing, truncated or foreign.
    """
    if not isinstance(graph, ComputationGraph):
        raise UsageError(f"cannot price {shortened(graph)}; give a ComputationGraph, such as export_graph makes")
    if not isinstance(configurations, (tuple, list)) or not all(
            isinstance(entry, Configuration) for entry in configurations):
        raise UsageError(f"configurations={shortened(configurations)}: give a Configuration per layer")
    if type(devices) is not int or devices < 1:
        raise UsageError(f"devices={shortened(devices)}: there must be at least one device")
    check_configurations(graph, configurations, devices)
    # The alternatives are priced as well, so that `explain` can show them.
    priced = build_network(graph, load_machine(machine, devices), devices)
    found = price_assignment(name, *with_configurations(priced, configurations), cast(SearchReport, search or {}))
    if search and (problem := found._problem()):  # no file could hold it, and no table tell it
        raise UsageError(f"evaluate_strategy: search={shortened(search)}: {problem} is nothing that a search tells; "
                         "give the `search` of a strategy, or leave it out")
    return found


def with_configurations(priced: PricedNetwork,
                        configurations: Sequence[Configuration]) -> tuple[PricedNetwork, list[int]]:
    """The network, with these configurations (one per layer) among those offered, and their indices in it."""
    offered = [choices if configuration in set(choices) else (*choices, configuration)
               for choices, configuration in zip(priced.configurations, configurations, strict=True)]
    if any(len(choices) != len(known) for choices, known in zip(offered, priced.configurations, strict=True)):
        priced = priced.offering(offered)
    return priced, [priced.index(number, configuration) for number, configuration in enumerate(configurations)]


def price_assignment(name: str, priced: PricedNetwork, assignment: Sequence[int],
                     search: SearchReport) -> Strategy:
    """The Strategy of a configuration index per layer of a priced network.

    Args:
      name: what to call it.
      priced: what the indices mean, and what they cost.
      assignment: index of the configuration of every layer.
      search: how it was found.
    """
    graph, machine = priced.graph, priced.machine
    configurations = tuple(choices[index] for choices, index in zip(priced.configurations, assignment, strict=True))
    breakdown = priced.breakdown(assignment)
    moved = [0.0] * len(graph.layers)
    for edge, seconds in zip(graph.edges, breakdown.edges, strict=True):
        for end in (edge.source, edge.target):
            moved[end] += 0.5 * seconds
    return Strategy(
        name=name, graph_name=graph.name, graph_hash=graph.hash, devices=priced.devices, machine_name=machine.name,
        machine_source=machine.source, layer_names=tuple(layer.name for layer in graph.layers),
        configurations=configurations, layer_parts=breakdown.layers, edge_parts=tuple(moved), parts=breakdown.parts,
        seconds=breakdown.total, memory=priced.memory_parts(assignment),
        search={**search, **_assumptions(graph)}, _priced=priced)


def _assumptions(graph: ComputationGraph) -> SearchReport:
    """What the predictions rest on, for the strategy's search; empty where nothing is assumed."""
    return {"assumed": list(graph.assumed)} if graph.assumed else {}
