"""Puts the prices of all layers and edges together: a cost network, whose parts can still be looked at."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.memory import MemoryModel
from pase_mtf.cost.paper import PAPER_PARTS, paper_edge, paper_parts
from pase_mtf.cost.pending import pending_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import OperationSignature, layer_signatures, waiting_bytes
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings, dim_positions, positions_of
from pase_mtf.errors import UsageError, nearest
from pase_mtf.graph.computation_graph import ComputationGraph, Edge
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.search.network import CostNetwork, NetworkEdge

__all__ = ["MODELS", "Breakdown", "PricedNetwork", "build_network", "network_of"]

MODELS = ("seconds", "pase")
"""The cost models: seconds on the machine, or the paper's FLOP."""

_FEW_DEVICES = 16


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """What a strategy costs, by part.

    Attributes:
      layers: per layer, part -> cost.
      edges: per edge of the graph, the cost of moving it (resharding).
      phases: per edge, "forward", "backward" or "update".
    """

    layers: tuple[dict[str, float], ...]
    edges: tuple[float, ...]
    phases: tuple[str, ...]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(sum(parts.values()) for parts in self.layers) + sum(self.edges)

    @property
    def parts(self) -> dict[str, float]:
        """Part -> cost of all layers together; the edges are parts of their own, named "resharding PHASE"."""
        result: dict[str, float] = {}
        for parts in self.layers:
            for name, cost in parts.items():
                result[name] = result.get(name, 0.0) + cost
        for phase, cost in zip(self.phases, self.edges, strict=True):
            result[f"resharding {phase}"] = result.get(f"resharding {phase}", 0.0) + cost
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class PricedNetwork:
    """A cost network and where its numbers come from.

    Attributes:
      graph, machine, devices, model: what was priced.
      configurations: per layer, what its indices mean.
      network: vectors and matrices for a search; edges that never cost anything are left out.
      part_names: names of the rows of `parts`.
      parts: per layer, float64 [len(part_names), K]; its vector is their sum.
      edge_matrices: per edge of the graph, the NetworkEdge that prices it.
      again: prices other configurations (one list per layer) in the same way; None: `build_network` does.
    """

    graph: ComputationGraph
    machine: Machine
    devices: int
    model: str
    configurations: tuple[tuple[Configuration, ...], ...]
    network: CostNetwork
    part_names: tuple[str, ...]
    parts: tuple[np.ndarray, ...]
    edge_matrices: tuple[NetworkEdge, ...]
    again: Callable[[Sequence[Sequence[Configuration]]], PricedNetwork] | None = None

    @functools.cached_property
    def _indices(self) -> dict[int, dict[Configuration, int]]:
        return {}

    @functools.cached_property
    def memory_model(self) -> MemoryModel:
        """What devices hold, moment by moment."""
        return MemoryModel(self.graph, self.machine.shared_cores, self.machine.unfolding_threads)

    @functools.cached_property
    def memory(self) -> tuple[np.ndarray, ...]:
        """Per layer, bytes per device of each configuration; they add up. `network.memory` takes it into a file.

        Of what is there from one moment to another, at the moment at which most is there while nothing is split, and
        without what depends on two layers (`MemoryModel.layer`): a strategy needs that or more (`peak_memory` tells).
        """
        return self.memory_with(self.memory_model.fullest)

    def memory_with(self, moment: int) -> tuple[np.ndarray, ...]:
        """`memory`, at another moment of the step."""
        return tuple(self.memory_model.layer(number, choices, moment)
                     for number, choices in enumerate(self.configurations))

    def copies_at(self, assignment: Sequence[int], moment: int) -> list[np.ndarray]:
        """What comes on top of `memory_with` for copies, per layer and configuration, were all other layers to stay as
        they are in this assignment (`MemoryModel.copies_at`)."""
        return self.memory_model.copies_at(self._chosen(assignment), moment, self.configurations)

    def memory_parts(self, assignment: Sequence[int]) -> dict[str, float]:
        """Bytes on the fullest device under a strategy, when it holds most, by `cost.held.MEMORY_PARTS`."""
        return self.memory_model.peak(self._chosen(assignment))[0]

    def peak_memory(self, assignment: Sequence[int]) -> tuple[float, int]:
        """Bytes on the fullest device under a strategy, given as a configuration index per layer, and the moment at
        which it holds them."""
        parts, moment = self.memory_model.peak(self._chosen(assignment))
        return sum(parts.values()), moment

    def _chosen(self, assignment: Sequence[int]) -> list[Configuration]:
        return [choices[choice] for choices, choice in zip(self.configurations, assignment, strict=True)]

    def index(self, layer: int, configuration: Configuration) -> int:
        """The index of a configuration of a layer.

        Raises:
          UsageError: it is not among those offered.
        """
        found = self.find(layer, configuration)
        if found is None:
            raise UsageError(f"layer {self.graph.layers[layer].name!r} cannot be split as {configuration}; choose one "
                             f"of its {len(self.configurations[layer])} configurations")
        return found

    def find(self, layer: int, configuration: Configuration) -> int | None:
        """The index of a configuration of a layer; None where it is not among those offered."""
        known = self._indices.get(layer)
        if known is None:
            known = {offered: number for number, offered in enumerate(self.configurations[layer])}
            self._indices[layer] = known
        return known.get(configuration)

    def offering(self, configurations: Sequence[Sequence[Configuration]]) -> PricedNetwork:
        """The same graph on the same devices, other configurations offered (a list per layer)."""
        if self.again is not None:
            return self.again(configurations)
        return build_network(self.graph, self.machine, self.devices, configurations, self.model)

    def layer_parts(self, layer: int, choice: int) -> dict[str, float]:
        """Part -> cost of a layer under the configuration with that index."""
        return {name: float(cost) for name, cost in zip(self.part_names, self.parts[layer][:, choice], strict=True)}

    def edge_cost(self, edge: int, source_choice: int, target_choice: int) -> float:
        """What it costs to move the tensor of an edge of the graph."""
        priced = self.edge_matrices[edge]
        return float(priced.matrix[priced.rows[source_choice], priced.columns[target_choice]])

    def breakdown(self, assignment: Sequence[int]) -> Breakdown:
        """What a strategy costs, by part, given as a configuration index per layer."""
        if len(assignment) != len(self.configurations):
            raise UsageError(f"a strategy of {len(assignment)} layers for a graph of {len(self.configurations)}; "
                             "give one configuration per layer")
        layers = tuple(self.layer_parts(layer, choice) for layer, choice in enumerate(assignment))
        edges = tuple(self.edge_cost(number, assignment[edge.source], assignment[edge.target])
                      for number, edge in enumerate(self.graph.edges))
        return Breakdown(layers, edges, tuple(edge.phase for edge in self.graph.edges))


class _Builder:
    """Prices layers and edges, each shape once."""

    def __init__(self, graph: ComputationGraph, machine: Machine, model: str) -> None:
        self._graph, self._model = graph, model
        self._reshardings = Reshardings(machine, waiting=waiting_bytes(graph.layers))
        # By the identity of what `table` and `_shardings` return, which live as long as the builder.
        self._tables: dict[tuple[int, tuple[tuple[str, int], ...]], ConfigurationTable] = {}
        self._parts: dict[tuple[tuple[OperationSignature, ...], int], np.ndarray] = {}
        self._shardings: dict[tuple[int, tuple[int, ...]], DistinctShardings] = {}
        self._matrices: dict[Hashable, np.ndarray] = {}
        # By contents.
        self._equal_tables: dict[tuple[bytes, bytes, tuple[int, ...]], ConfigurationTable] = {}
        self._equal_shardings: dict[tuple[bytes, bytes, bytes, tuple[int, ...]], DistinctShardings] = {}

    def table(self, configurations: tuple[Configuration, ...], position: dict[str, int],
              dims: int) -> ConfigurationTable:
        """The one table object for these contents."""
        # The tuples live as long as the builder's caller holds them, so that identity is safe for a key.
        key = id(configurations), tuple(position.items())
        if key not in self._tables:
            table = ConfigurationTable.build(configurations, position, dims)
            self._tables[key] = self._equal_tables.setdefault(table.key, table)
        return self._tables[key]

    def parts(self, signature: tuple[OperationSignature, ...], table: ConfigurationTable) -> np.ndarray:
        """The parts of a layer's cost under each of its configurations."""
        key = signature, id(table)
        if key not in self._parts:
            price = layer_parts if self._model == "seconds" else paper_parts
            self._parts[key] = price(signature, table, self._reshardings)
        return self._parts[key]

    def edge(self, edge: Edge, tables: Sequence[ConfigurationTable],
             positions: Sequence[dict[str, int]]) -> NetworkEdge:
        """The cost matrix of an edge, by the tables and dim positions of all layers."""
        source_dims, target_dims = edge.source_dims, edge.target_dims
        # In the paper's model the gradient's way back is part of the forward edge's price; its own edge is free.
        free = self._model == "pase" and edge.phase != "forward"
        if free:
            source_dims = target_dims = ()
        held = positions_of(source_dims, positions[edge.source])
        parts = self._columns_of_parts(edge.pending, positions[edge.source])
        added_to = self._columns_of_parts(edge.added_to, positions[edge.target])
        source = self._sharding(tables[edge.source], (*held, *parts))
        target = self._sharding(tables[edge.target], (*positions_of(target_dims, positions[edge.target]), *added_to))
        matrix = (np.zeros((len(source.devices), len(target.devices))) if free
                  else self._matrix(source, target, edge))
        return NetworkEdge(edge.source, edge.target, matrix, source.index, target.index)

    def _columns_of_parts(self, dims: Sequence[str], position: dict[str, int]) -> tuple[int, ...]:
        """The columns of dims whose split makes a tensor partial sums, where edges pay for these."""
        if self._model != "seconds" or not self._reshardings.sums_on_edges:
            return ()
        return tuple(sorted({column for column in positions_of(dims, position) if column >= 0}))

    def _sharding(self, table: ConfigurationTable, positions: tuple[int, ...]) -> DistinctShardings:
        key = id(table), positions
        if key not in self._shardings:
            # Layers of different kinds shard a tensor alike: what is the same is one object, and priced once.
            found = table.shardings(positions)
            same = self._equal_shardings.setdefault(found.key, found)
            self._shardings[key] = dataclasses.replace(same, index=found.index)
        return self._shardings[key]

    def _matrix(self, source: DistinctShardings, target: DistinctShardings, edge: Edge) -> np.ndarray:
        # Arrays of equal contents are one object (see `_sharding`).
        shards = id(source.shards), id(target.shards)
        waits = self._graph.waits(edge)
        key = (*shards, edge.shape, edge.itemsize, edge.looked_up, edge.trips, waits)
        if key in self._matrices:
            return self._matrices[key]
        if edge.trips != 1:
            matrix = edge.trips * self._matrix(source, target, dataclasses.replace(edge, trips=1))
        elif source.shards.shape[1] > len(edge.shape):
            matrix = pending_seconds(source, target, edge.shape, edge.itemsize, self._reshardings, edge.looked_up,
                                     waits=waits)
        elif self._model == "seconds":
            matrix = self._reshardings.seconds(source, target, edge.shape, edge.itemsize)
        else:
            matrix = paper_edge(source, target, edge.shape, self._reshardings)
        self._matrices[key] = matrix
        return matrix


def build_network(graph: ComputationGraph, machine: Machine, devices: int,
                  configurations: Sequence[Sequence[Configuration]] | None = None,
                  model: str = "seconds", *, idle: bool = False) -> PricedNetwork:
    """Prices every configuration of every layer, and every pair of shardings of every edge.

    Args:
      graph: what to price. Costs are of one training step where the graph holds one, else of the forward pass.
      machine: on which devices.
      devices: how many of them.
      configurations: per layer, those to price. By default all that use all devices, replicating where the splits do
        not fill them.
      model: "seconds", or "pase" for the paper's formulas in FLOP.
      idle: offer configurations that leave devices idle as well. On virtual devices, which share the cores, leaving
        most of them idle is cheap, as it is on no real machine: it has to be asked for.

    Returns:
      The cost network and its parts; `network.vectors` are seconds (or FLOP). A network of all configurations already
      holds its normal form, which searches start from: its arrays must not be changed.

    Raises:
      UsageError: an unknown model, more devices than the machine links, configurations that do not fit the graph.
    """
    if model not in MODELS:
        raise UsageError(f"unknown cost model {model!r}; {nearest(model, MODELS)}")
    machine.check_devices(devices)
    offered = _offered(graph, machine, devices, configurations, idle)
    builder = _Builder(graph, machine, model)
    positions = [dim_positions(layer) for layer in graph.layers]
    tables = []
    for layer, choices, position in zip(graph.layers, offered, positions, strict=True):
        try:
            tables.append(builder.table(choices, position, len(layer.dims)))
        except ValueError as error:
            raise UsageError(f"layer {layer.name!r}: {error}; choose from {', '.join(layer.dims)}") from error
    parts = tuple(builder.parts(signature, table)
                  for signature, table in zip(layer_signatures(graph.layers), tables, strict=True))
    edges = tuple(builder.edge(edge, tables, positions) for edge in graph.edges)
    network = network_of(graph, parts, edges)
    if configurations is None:  # it is going to be searched, maybe more than once
        network.normalized(keep=True)
    return PricedNetwork(graph, machine, devices, model, offered, network,
                         PARTS if model == "seconds" else PAPER_PARTS, parts, edges)


def _offered(graph: ComputationGraph, machine: Machine, devices: int,
             configurations: Sequence[Sequence[Configuration]] | None,
             idle: bool) -> tuple[tuple[Configuration, ...], ...]:
    """The configurations to price, per layer."""
    if configurations is None:
        # Many virtual devices gain nothing from a third axis.
        axes = 2 if machine.shared_cores and devices > _FEW_DEVICES else 3
        return tuple(enumerate_configurations(layer, devices, idle=idle, max_axes=axes) for layer in graph.layers)
    if len(configurations) != len(graph.layers):
        raise UsageError(f"configurations for {len(configurations)} layers, the graph has {len(graph.layers)}; "
                         "give one list per layer")
    for layer, choices in zip(graph.layers, configurations, strict=True):
        for choice in choices:
            if choice.devices > devices:
                raise UsageError(f"layer {layer.name}: {choice} needs {choice.devices} devices, there are {devices}")
    return tuple(tuple(choices) for choices in configurations)


def network_of(graph: ComputationGraph, parts: Sequence[np.ndarray], edges: Sequence[NetworkEdge]) -> CostNetwork:
    """Layers with equal parts share one vector; edges that never cost anything are left out."""
    vectors: dict[int, np.ndarray] = {}
    for layer in parts:
        if id(layer) not in vectors:
            vectors[id(layer)] = layer.sum(axis=0)
    costly = {number: matrix.any() for number, matrix in {id(edge.matrix): edge.matrix for edge in edges}.items()}
    return CostNetwork([vectors[id(layer)] for layer in parts],
                       [edge for edge in edges if costly[id(edge.matrix)]], [layer.kind for layer in graph.layers])
