"""A strategy: a configuration for every layer, what it costs, and how it was found."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.cost.memory import layer_memory, strategy_memory
from pase_mtf.errors import FormatError, InfeasibleError, MismatchError, UsageError, nearest
from pase_mtf.files import read_json, write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.search import methods, solve
from pase_mtf.strategy.experts import data_parallel, expert

__all__ = ["BY_HAND", "Strategy", "evaluate_strategy", "find_strategy"]

FORMAT = "pase_mtf.strategy"
VERSION = 1

BY_HAND = ("data_parallel", "expert")
"""The strategies that are written down, not searched for."""


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
      edge_parts: per layer, seconds spent on moving what other layers made into it, and out of it again.
      parts: part of the cost -> seconds, over the whole step.
      seconds: predicted time of one training step.
      memory: part -> predicted bytes on the fullest device.
      search: "seconds", "optimal", "gap", "lower_bound", "layers", "configurations", "build_seconds".
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
    search: dict[str, Any]
    _priced: PricedNetwork | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes on the fullest device."""
        return sum(self.memory.values())

    # -- for people --------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        return self.table()

    def table(self, group: bool = True) -> str:
        """The strategy as a table: layer, split, predicted milliseconds of computation and of communication.

        Args:
          group: show layers of the same repeated block (equal names but for numbers, equal splits) as one row.
        """
        rows: dict[tuple[str, str], list[float]] = {}
        for number, (name, configuration) in enumerate(zip(self.layer_names, self.configurations, strict=True)):
            key = (_without_numbers(name) if group else name, str(configuration))
            if not group:
                key = (f"{name}\0{number}", str(configuration))
            row = rows.setdefault(key, [0, 0.0, 0.0, 0.0])
            row[0] += 1
            parts = self.layer_parts[number]
            moved = sum(seconds for part, seconds in parts.items() if _is_communication(part))
            row[1] += sum(parts.values()) - moved
            row[2] += moved
            row[3] += self.edge_parts[number]
        body = [[name.split("\0")[0], str(int(count)) if count > 1 else "", split,
                 f"{1e3 * compute:.3f}", f"{1e3 * inside:.3f}", f"{1e3 * between:.3f}"]
                for (name, split), (count, compute, inside, between) in rows.items()]
        head = ["layer", "times", "split", "compute ms", "collectives ms", "resharding ms"]
        table = tabulate(body, head, disable_numparse=True,
                         colalign=("left", "right", "left", "right", "right", "right"))
        return (f"{self.name}: {self.graph_name} on {self.devices} devices ({self.machine_name}), "
                f"predicted {1e3 * self.seconds:.3f} ms a step, {self._verdict()}\n{table}\n"
                f"memory on the fullest device: {self.memory_bytes / 1e6:.1f} MB ("
                + ", ".join(f"{part} {size / 1e6:.1f}" for part, size in self.memory.items()) + ")")

    def _verdict(self) -> str:
        if self.name in BY_HAND or "optimal" not in self.search:
            return "written by hand" if self.name in BY_HAND else "given"
        if self.search["optimal"]:
            return "proven optimal"
        if not math.isfinite(self.search["gap"]):
            return "without a bound"
        return f"at most {100 * self.search['gap']:.2f} % above the optimum"

    def explain(self, layer: str | int, most: int = 10) -> str:
        """Why a layer is split the way it is: its alternatives with all else as it is, and what each would cost.

        Args:
          layer: name or index.
          most: how many alternatives to show, best first.

        Raises:
          UsageError: there is no such layer, or the strategy was loaded without its graph.
        """
        priced = self._need_prices()
        number = self._layer_index(layer)
        choices = [priced.index(other, configuration) for other, configuration in enumerate(self.configurations)]
        graph = priced.graph
        touching = [(index, edge) for index, edge in enumerate(graph.edges) if number in (edge.source, edge.target)]
        rows = []
        for choice, configuration in enumerate(priced.configurations[number]):
            parts = priced.layer_parts(number, choice)
            moved = sum(seconds for part, seconds in parts.items() if _is_communication(part))
            between = sum(priced.edge_cost(
                index, choice if edge.source == number else choices[edge.source],
                choice if edge.target == number else choices[edge.target]) for index, edge in touching)
            inside = sum(parts.values()) - moved
            rows.append((inside + moved + between, choice != choices[number], inside, moved, between, configuration))
        rows.sort(key=lambda row: row[:2])
        own = next(row for row in rows if not row[1])
        shown = rows[:most] if own in rows[:most] else [*rows[:most - 1], own]
        body = []
        for total, other, inside, moved, between, configuration in shown:
            names = ("compute", "collectives", "resharding")
            worse = [(mine - theirs, name) for mine, theirs, name in
                     zip((inside, moved, between), own[2:5], names, strict=True)]
            reason = "chosen" if not other else "" if total <= own[0] else f"loses on {max(worse)[1]}"
            body.append([str(configuration), f"{1e3 * total:.4f}", f"{1e3 * inside:.4f}", f"{1e3 * moved:.4f}",
                         f"{1e3 * between:.4f}", f"{1e3 * (total - own[0]):+.4f}", reason])
        head = ["split", "total ms", "compute", "collectives", "resharding", "difference", "why"]
        found = graph.layers[number]
        dims = ", ".join(f"{name}={size}" for name, size in found.dims.items())
        return (f"{found.name} ({found.kind}; {dims}): {len(rows)} configurations, the rest of the strategy as it is\n"
                + tabulate(body, head, disable_numparse=True, colalign=("left", *["right"] * 5, "left")))

    def diff(self, other: Strategy) -> str:
        """The layers that two strategies of one graph split differently, and the predicted times.

        Raises:
          MismatchError: the strategies were made for different graphs.
        """
        if other.graph_hash != self.graph_hash:
            raise MismatchError(f"strategies of different graphs: {self.graph_name} ({self.graph_hash}) and "
                                f"{other.graph_name} ({other.graph_hash}); compare strategies of one graph")
        body = []
        for number, name in enumerate(self.layer_names):
            mine, theirs = self.configurations[number], other.configurations[number]
            if mine != theirs:
                change = 1e3 * (sum(other.layer_parts[number].values()) + other.edge_parts[number]
                                - sum(self.layer_parts[number].values()) - self.edge_parts[number])
                body.append([name, str(mine), str(theirs), f"{change:+.3f}"])
        head = ["layer", self.name, other.name, "difference ms"]
        same = len(self.layer_names) - len(body)
        return (f"{self.name} {1e3 * self.seconds:.3f} ms, {other.name} {1e3 * other.seconds:.3f} ms; "
                f"{same} of {len(self.layer_names)} layers are split alike\n"
                + (tabulate(body, head, disable_numparse=True, colalign=(*["left"] * 3, "right")) if body else ""))

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
        if layer not in self.layer_names:
            raise UsageError(f"unknown layer {layer!r}: {nearest(layer, self.layer_names)}")
        return self.layer_names.index(layer)

    # -- files -------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike) -> None:
        """Writes the strategy as JSON, whole or not at all."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for field in dataclasses.fields(self):
            if not field.name.startswith("_") and field.name != "configurations":
                data[field.name] = getattr(self, field.name)
        data["configurations"] = [[list(axis) for axis in configuration.axes] for configuration in self.configurations]
        write_atomically(path, json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike, graph: ComputationGraph | None = None,
             machine: Machine | None = None) -> Strategy:
        """Reads a strategy that `save` wrote.

        Args:
          path: the file.
          graph: the graph it is to be used on; it must be the one it was made for.
          machine: price it anew on this machine, which `explain` needs.

        Raises:
          FormatError: missing, truncated or foreign file.
          MismatchError: the strategy was made for another graph.
        """
        data = read_json(path, FORMAT, VERSION)
        try:
            configurations = tuple(
                Configuration(tuple((name, parts) for name, parts in axes)) for axes in data["configurations"])
            values = {field.name: data[field.name] for field in dataclasses.fields(cls)
                      if not field.name.startswith("_") and field.name != "configurations"}
            for name in ("layer_names", "layer_parts", "edge_parts"):
                values[name] = tuple(values[name])
            strategy = cls(configurations=configurations, **values)
            if not len(configurations) == len(strategy.layer_names) == len(strategy.layer_parts):
                raise ValueError("lists of unequal length")
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}: not a complete strategy file ({error}); search again") from error
        if graph is not None:
            strategy.check_graph(graph, path)
            if machine is not None:
                return evaluate_strategy(graph, configurations, strategy.devices, machine, name=strategy.name,
                                         search=strategy.search)
        return strategy

    def check_graph(self, graph: ComputationGraph, path: str | os.PathLike | None = None) -> None:
        """Refuses a graph that the strategy was not made for.

        Raises:
          MismatchError: the hashes differ.
        """
        if graph.hash != self.graph_hash:
            where = f"{path}: " if path is not None else ""
            raise MismatchError(
                f"{where}made for {self.graph_name} with {len(self.layer_names)} layers (hash {self.graph_hash}), "
                f"this is {graph.name} with {len(graph.layers)} layers (hash {graph.hash}); search again for this one")


def _is_communication(part: str) -> bool:
    return any(word in part for word in ("all-reduce", "collective", "resharding", "moves"))


def _without_numbers(name: str) -> str:
    return "".join("*" if character.isdigit() else character for character in name)


def evaluate_strategy(graph: ComputationGraph, configurations: Sequence[Configuration], devices: int,
                      machine: Machine, *, name: str = "given", search: dict[str, Any] | None = None) -> Strategy:
    """A Strategy out of a configuration per layer, whoever chose them.

    Args:
      graph: the graph.
      configurations: one per layer.
      devices: p.
      machine: whose numbers to price it with.
      name: what to call it.
      search: how it was found.

    Raises:
      UsageError: not one configuration per layer, or one that its layer does not allow.
    """
    if len(configurations) != len(graph.layers):
        raise UsageError(f"{len(configurations)} configurations for {len(graph.layers)} layers; give one per layer")
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        for dim, parts in configuration.splits.items():
            if dim not in layer.splittable or layer.dims[dim] % parts:
                raise UsageError(f"layer {layer.name!r}: {dim} cannot be split into {parts}; "
                                 f"it allows {', '.join(layer.splittable) or 'no split'} (sizes {layer.dims})")
        if configuration.devices > devices:
            raise UsageError(f"layer {layer.name!r}: {configuration} needs {configuration.devices} devices, "
                             f"there are {devices}")
    # The alternatives are priced as well, so that `explain` can show them.
    priced, assignment = _priced_with(build_network(graph, machine, devices), configurations)
    return _strategy(name, priced, assignment, search or {})


def _priced_with(priced: PricedNetwork, configurations: Sequence[Configuration]) -> tuple[PricedNetwork, list[int]]:
    """The network, with these configurations among those offered, and their indices in it."""
    offered = [choices if configuration in set(choices) else (*choices, configuration)
               for choices, configuration in zip(priced.configurations, configurations, strict=True)]
    if any(len(choices) != len(known) for choices, known in zip(offered, priced.configurations, strict=True)):
        priced = build_network(priced.graph, priced.machine, priced.devices, configurations=offered)
    return priced, [priced.index(number, configuration) for number, configuration in enumerate(configurations)]


def _strategy(name: str, priced: PricedNetwork, assignment: Sequence[int], search: dict[str, Any]) -> Strategy:
    graph, machine = priced.graph, priced.machine
    configurations = tuple(choices[index] for choices, index in zip(priced.configurations, assignment, strict=True))
    breakdown = priced.breakdown(assignment)
    moved = [0.0] * len(graph.layers)
    for edge, seconds in zip(graph.edges, breakdown.edges, strict=True):
        moved[edge.target] += seconds
    return Strategy(
        name=name, graph_name=graph.name, graph_hash=graph.hash, devices=priced.devices, machine_name=machine.name,
        machine_source=machine.source, layer_names=tuple(layer.name for layer in graph.layers),
        configurations=configurations, layer_parts=breakdown.layers, edge_parts=tuple(moved), parts=breakdown.parts,
        seconds=breakdown.total, memory=strategy_memory(graph, configurations), search=search, _priced=priced)


def find_strategy(graph: ComputationGraph, devices: int = 8, machine: Machine | str = "1080ti",
                  method: str = "exact", *, mesh: Sequence[tuple[str, int]] | None = None, idle: bool = False,
                  start_from: str | None = None, memory_limit: float | None = None, simple_within: float = 0.0,
                  **options: Any) -> Strategy:
    """Finds the cheapest strategy for a graph on p devices.

    Args:
      graph: a ComputationGraph, or an mtf.Graph (then it is exported first).
      devices: p.
      machine: a Machine or the name of one.
      method: a search method ("exact" by default), "data_parallel" or "expert".
      mesh: axes (name, size) for "expert" (default: what the paper's experts used).
      idle: let layers run on fewer than p devices while the rest idle.
      start_from: "data_parallel" or "expert": where a search that improves a strategy ("mcmc") begins.
      memory_limit: bytes that a device may hold (weights, optimizer slots, gradients, kept activations, communication
        buffers), for "exact".
      simple_within: take data parallelism where it is predicted slower than what a search found by no more than this
        fraction: predictions do not tell such strategies apart, and people do not have to read the other. Then the
        strategy's search says "simpler": "data_parallel", and how far it is from the optimum.
      **options: handed to the search (time_limit, gap, progress, ...).

    Returns:
      The strategy, with its predicted cost by part.

    Raises:
      UsageError: an unknown method or machine, fewer than one device, or a `simple_within` below 0.
      InfeasibleError: no strategy satisfies the constraints.
    """
    if devices < 1:
        raise UsageError(f"devices={devices}: there must be at least one device")
    if not simple_within >= 0.0:
        raise UsageError(f"simple_within={simple_within}: give a fraction of at least 0, such as 0.01")
    if not isinstance(graph, ComputationGraph):
        from pase_mtf.export.exporter import export_graph
        graph = export_graph(graph)
    if isinstance(machine, str):
        machine = Machine.load(machine)
    if method == "data_parallel":
        return evaluate_strategy(graph, data_parallel(graph, devices), devices, machine, name=method)
    if method == "expert":
        return evaluate_strategy(graph, expert(graph, devices, mesh), devices, machine, name=method)
    if method not in methods():
        raise UsageError(f"unknown method {method!r}: {nearest(method, [*methods(), *BY_HAND])}")
    if not graph.layers:
        raise InfeasibleError(f"{graph.name}: the graph has no layers; build the model before searching")
    start = time.perf_counter()
    priced = build_network(graph, machine, devices, idle=idle)
    built = time.perf_counter()
    if start_from is not None:
        if start_from not in BY_HAND:
            raise UsageError(f"unknown start {start_from!r}: {nearest(start_from, BY_HAND)}")
        by_hand = data_parallel(graph, devices) if start_from == "data_parallel" else expert(graph, devices, mesh)
        priced, options["initial"] = _priced_with(priced, by_hand)
    if memory_limit is not None:
        options["memory"] = [layer_memory(layer, choices).sum(axis=0)
                             for layer, choices in zip(graph.layers, priced.configurations, strict=True)]
        options["memory_limit"] = memory_limit
    if method == "exact":
        options.setdefault("certificate", False)  # as slow as the search itself; ask for it to have it checked
    solution = solve(priced.network, method, **options)
    search = {
        "seconds": time.perf_counter() - start, "build_seconds": built - start, "optimal": solution.optimal,
        "gap": solution.gap, "lower_bound": solution.lower_bound, "layers": len(graph.layers),
        "configurations": sum(map(len, priced.configurations)), "method": method}
    found = _strategy(method, priced, solution.assignment, search)
    return _simpler(found, priced, memory_limit, simple_within) if simple_within > 0.0 else found


def _simpler(found: Strategy, priced: PricedNetwork, memory_limit: float | None, within: float) -> Strategy:
    """Data parallelism if it is as good within a fraction and keeps the limit, else what was found."""
    simple = _strategy(found.name, *_priced_with(priced, data_parallel(priced.graph, priced.devices)), found.search)
    if simple.configurations == found.configurations or simple.seconds > (1.0 + within) * found.seconds or (
            memory_limit is not None and simple.memory_bytes > memory_limit):
        return found
    bound = found.search["lower_bound"]
    return dataclasses.replace(simple, search={
        **found.search, "optimal": False, "gap": simple.seconds / bound - 1.0 if bound > 0.0 else math.inf,
        "simpler": "data_parallel", "best_seconds": found.seconds})
