"""Puts the prices of all layers and edges together: a cost network, whose parts can still be looked at."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.compute import PARTS, Collective, collectives_of, layer_parts, layer_signature
from pase_mtf.cost.paper import PAPER_PARTS, paper_edge, paper_parts
from pase_mtf.cost.resharding import resharding_seconds
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings, dim_positions, positions_of
from pase_mtf.errors import UsageError, nearest
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.search.network import CostNetwork, NetworkEdge

__all__ = ["MODELS", "Breakdown", "PricedNetwork", "build_network", "price_strategy"]

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

    @functools.cached_property
    def _indices(self) -> dict[int, dict[Configuration, int]]:
        return {}

    def index(self, layer: int, configuration: Configuration) -> int:
        """The index of a configuration of a layer.

        Raises:
          UsageError: it is not among those offered.
        """
        known = self._indices.get(layer)
        if known is None:
            known = {offered: number for number, offered in enumerate(self.configurations[layer])}
            self._indices[layer] = known
        if configuration not in known:
            raise UsageError(f"layer {self.graph.layers[layer].name!r} cannot be split as {configuration}; choose one "
                             f"of its {len(known)} configurations")
        return known[configuration]

    def layer_parts(self, layer: int, choice: int) -> dict[str, float]:
        """Part -> cost of a layer under the configuration with that index."""
        return {name: float(cost) for name, cost in zip(self.part_names, self.parts[layer][:, choice], strict=True)}

    def edge_cost(self, edge: int, source_choice: int, target_choice: int) -> float:
        """What it costs to move the tensor of an edge of the graph."""
        priced = self.edge_matrices[edge]
        return float(priced.matrix[priced.rows[source_choice], priced.columns[target_choice]])

    def collectives(self, layer: int, choice: int) -> list[Collective]:
        """Every all-reduce inside a layer under a configuration, with its seconds on the machine."""
        found = self.graph.layers[layer]
        table = ConfigurationTable.build(
            [self.configurations[layer][choice]], dim_positions(found), len(found.dims))
        return collectives_of(found, table, self.machine)

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

    def __init__(self, machine: Machine, model: str) -> None:
        self._machine, self._model = machine, model
        self._tables: dict[tuple, ConfigurationTable] = {}
        self._interned: dict[tuple, ConfigurationTable] = {}
        self._parts: dict[tuple, np.ndarray] = {}
        self._classes: dict[tuple, DistinctShardings] = {}
        self._contents: dict[tuple, DistinctShardings] = {}
        self._matrices: dict[tuple, np.ndarray] = {}

    def table(self, configurations: tuple[Configuration, ...], position: dict[str, int],
              dims: int) -> ConfigurationTable:
        """The one table object for these contents."""
        # The tuples live as long as the builder's caller holds them, so that identity is safe for a key.
        key = id(configurations), tuple(position.items())
        if key not in self._tables:
            table = ConfigurationTable.build(configurations, position, dims)
            self._tables[key] = self._interned.setdefault(table.key, table)
        return self._tables[key]

    def parts(self, signature: tuple, table: ConfigurationTable) -> np.ndarray:
        key = signature, id(table)
        if key not in self._parts:
            price = layer_parts if self._model == "seconds" else paper_parts
            self._parts[key] = price(signature, table, self._machine)
        return self._parts[key]

    def classes(self, table: ConfigurationTable, positions: tuple[int, ...]) -> DistinctShardings:
        key = id(table), positions
        if key not in self._classes:
            # Layers of different kinds cut a tensor alike: what is the same is one object, and priced once.
            found = table.classes(positions)
            same = self._contents.setdefault(found.key, found)
            self._classes[key] = dataclasses.replace(same, index=found.index)
        return self._classes[key]

    def matrix(self, source: DistinctShardings, target: DistinctShardings, shape: tuple[int, ...],
               itemsize: int) -> np.ndarray:
        # Arrays of equal contents are one object (see `classes`); they live as long as the builder.
        key = id(source.parts), id(target.parts), shape, itemsize
        if key not in self._matrices:
            if self._model == "seconds":
                matrix = resharding_seconds(source, target, shape, itemsize, self._machine)
            else:
                matrix = paper_edge(source, target, shape, self._machine)
            self._matrices[key] = matrix
        return self._matrices[key]


def build_network(graph: ComputationGraph, machine: Machine, devices: int,
                  configurations: Sequence[Sequence[Configuration]] | None = None,
                  model: str = "seconds", *, idle: bool = False) -> PricedNetwork:
    """Prices every configuration of every layer, and every pair of partitions of every edge.

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
        raise UsageError(f"unknown cost model {model!r}: {nearest(model, MODELS)}")
    machine.check_devices(devices)
    if configurations is None:
        # Many virtual devices gain nothing from a third axis.
        axes = 2 if machine.shared_cores and devices > _FEW_DEVICES else 3
        offered = tuple(enumerate_configurations(layer, devices, idle=idle, max_axes=axes) for layer in graph.layers)
    else:
        offered = tuple(tuple(choices) for choices in configurations)
        if len(offered) != len(graph.layers):
            raise UsageError(f"configurations for {len(offered)} layers, the graph has {len(graph.layers)}; "
                             "give one list per layer")
    builder = _Builder(machine, model)
    tables, positions, parts = [], [], []
    for layer, choices in zip(graph.layers, offered, strict=True):
        position = dim_positions(layer)
        try:
            table = builder.table(choices, position, len(layer.dims))
        except ValueError as error:
            raise UsageError(f"layer {layer.name!r}: {error}; choose from {', '.join(layer.dims)}") from error
        tables.append(table)
        positions.append(position)
        parts.append(builder.parts(layer_signature(layer), table))
    edges = []
    for edge in graph.edges:
        if model == "pase" and edge.phase != "forward":
            # The gradient's way back is part of the forward edge's price; this edge costs nothing.
            sides = [builder.classes(tables[end], ()) for end in (edge.source, edge.target)]
            matrix = np.zeros((len(sides[0].devices), len(sides[1].devices)))
        else:
            sides = [builder.classes(tables[edge.source], positions_of(edge.source_dims, positions[edge.source])),
                     builder.classes(tables[edge.target], positions_of(edge.target_dims, positions[edge.target]))]
            matrix = builder.matrix(sides[0], sides[1], edge.shape, edge.itemsize)
        edges.append(NetworkEdge(edge.source, edge.target, matrix, sides[0].index, sides[1].index))
    vectors: dict[int, np.ndarray] = {}
    for layer in parts:
        if id(layer) not in vectors:
            vectors[id(layer)] = layer.sum(axis=0)
    costly = {number: matrix.any() for number, matrix in {id(edge.matrix): edge.matrix for edge in edges}.items()}
    network = CostNetwork([vectors[id(layer)] for layer in parts],
                          [edge for edge in edges if costly[id(edge.matrix)]], [layer.kind for layer in graph.layers])
    if configurations is None:  # it is going to be searched, maybe more than once
        network.normalized(keep=True)
    return PricedNetwork(graph, machine, devices, model, offered, network,
                         PARTS if model == "seconds" else PAPER_PARTS, tuple(parts), tuple(edges))


def price_strategy(graph: ComputationGraph, machine: Machine, devices: int, configurations: Sequence[Configuration],
                   model: str = "seconds") -> Breakdown:
    """What any given strategy costs, by part.

    Args:
      graph, machine, devices, model: as for `build_network`.
      configurations: one per layer; it need not be among those that a search is offered.

    Raises:
      UsageError: the number of configurations is not that of the layers, or one splits a dim its layer does not have.
    """
    priced = build_network(graph, machine, devices, [(configuration,) for configuration in configurations], model)
    return priced.breakdown([0] * len(graph.layers))
