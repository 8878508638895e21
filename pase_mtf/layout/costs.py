"""What one layout for a whole graph costs.

A layer's configuration follows from the dims it has and the layout rules, so that layers with the same dims have the
same configuration under every layout: they are one group, costed at once. A tensor between two groups costs something
only where a layout may shard it differently at its ends: where it is renamed on the way, or where one of the layers has
another dim on the same axis.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.memory import MemoryModel
from pase_mtf.cost.pending import pending_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import OperationSignature, layer_signature, nameless
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings, dim_positions
from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.layout.legality import StockLegality
from pase_mtf.layout.space import MeshShape
from pase_mtf.machine.machine import Machine

__all__ = ["AxisDims", "Group", "LayoutCosts", "Resharding", "configuration_of", "shardings_of"]

Group = tuple[str, ...]
"""The dims that the layers of a group have, of those whose layout matters, in the order in which a layer takes them."""

AxisDims = tuple[str, ...]
"""Per mesh axis the dim of a layer that it splits, "" where the layer is replicated over it."""


def _axis_dims(group: Group, axis_of: Mapping[str, int], axes: int) -> AxisDims:
    """What a layout makes of the layers of a group: an axis splits the first of their dims that is laid out on it."""
    result = [""] * axes
    for name in group:
        if name in axis_of and not result[axis_of[name]]:
            result[axis_of[name]] = name
    return tuple(result)


def configuration_of(axis_dims: AxisDims, sizes: Sequence[int]) -> Configuration:
    """The configuration of a layer; neighbouring axes that only replicate become one, so that equal partitions are
    equal configurations."""
    axes: list[tuple[str, int]] = []
    for name, size in zip(axis_dims, sizes, strict=True):
        if size == 1:
            continue
        if axes and not name and not axes[-1][0]:
            axes[-1] = "", axes[-1][1] * size
        else:
            axes.append((name, size))
    return Configuration(tuple(axes))


def shardings_of(configurations: Sequence[Configuration], dims: Sequence[str]) -> DistinctShardings:
    """The distinct shardings of a tensor whose dims have these names in the configurations ("": never split)."""
    position = {name: number for number, name in enumerate(dims) if name}
    restricted = [Configuration(tuple((name if name in position else "", parts) for name, parts in entry.axes))
                  for entry in configurations]
    return ConfigurationTable.build(restricted, position, len(dims)).shardings(range(len(dims)))


@dataclasses.dataclass(frozen=True)
class Resharding:
    """A tensor that the layers at its ends may shard differently, or that one of them adds to another, which may be
    partial sums as it may.

    Attributes:
      phase: of the training step.
      source, target: the groups of the layers at either end.
      source_dims, target_dims: the tensor's dims as named there; "" where that end never splits it. Behind these, of
        what is added, those whose split leaves it as partial sums, and what it is added to.
      shape, itemsize: of the tensor.
    """

    phase: str
    source: Group
    target: Group
    source_dims: tuple[str, ...]
    target_dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int


_LayerKind = tuple[tuple[OperationSignature, ...], tuple[int, ...], int]
"""What the cost of a layer depends on: its signature, the columns of the group's dims in it, the number of its dims."""


class LayoutCosts:
    """Costs of every layer of a graph under every configuration that layouts give it, computed when first asked for.

    Attributes:
      graph, machine: what runs and on what.
      legality: what the graph's operations demand of a layout.
      dims: the dims whose layout matters: they can be split, and some layer's cost depends on it.
      groups: group -> the numbers of its layers.
      reshardings: tensor between two groups -> how many times the graph has it.
    """

    def __init__(self, graph: ComputationGraph, machine: Machine, legality: StockLegality) -> None:
        self.graph, self.machine, self.legality = graph, machine, legality
        possible = set(legality.dims())
        used = {name for layer in graph.layers for name in layer.splittable}
        self.dims = tuple(name for name in legality.sizes if name in possible and name in used)
        known = set(self.dims)
        self._group_of = [tuple(name for name in layer.splittable if name in known) for layer in graph.layers]
        self.groups: dict[Group, list[int]] = {}
        for number, group in enumerate(self._group_of):
            self.groups.setdefault(group, []).append(number)
        self.reshardings = self._find_reshardings()
        self._layers = {group: self._alike(numbers) for group, numbers in self.groups.items()}
        self._kinds = {group: self._layer_kinds(group) for group in self.groups}
        self._seconds: dict[tuple[Group, Configuration], np.ndarray] = {}
        self._memory = MemoryModel(graph, machine.shared_cores, machine.unfolding_threads)
        self._reshard_seconds: dict[Hashable, float] = {}
        self._priced = Reshardings(machine, stock=True)

    def never_share_an_axis(self, dims: Sequence[str]) -> bool:
        """Whether no two of the dims can be on one axis, so that each is split exactly where its rule says."""
        return all(frozenset(pair) in self.legality.apart for pair in itertools.combinations(dims, 2))

    def _find_reshardings(self) -> dict[Resharding, int]:
        known = set(self.dims)
        found: collections.Counter[Resharding] = collections.Counter()
        plain = {group: self.never_share_an_axis(group) for group in self.groups}
        for edge in self.graph.edges:
            source, target = self._group_of[edge.source], self._group_of[edge.target]
            parts = (edge.pending, edge.added_to) if edge.added_to else ((), ())
            source_dims, target_dims = (
                tuple(name if name in known else "" for name in dims)
                for dims in ((*edge.source_dims, *parts[0]), (*edge.target_dims, *parts[1])))
            if source_dims == target_dims and (source == target or (plain[source] and plain[target])):
                continue  # every layout shards both ends alike
            resharding = Resharding(edge.phase, source, target, source_dims, target_dims, edge.shape, edge.itemsize)
            found[resharding] += edge.trips
        return dict(found)

    def _alike(self, numbers: Iterable[int]) -> list[tuple[Layer, int]]:
        """Of layers that differ in names only one, and how many there are."""
        first: dict[Hashable, Layer] = {}
        counts: collections.Counter[Hashable] = collections.Counter()
        for number in numbers:
            key = nameless(self.graph.layers[number])
            first.setdefault(key, self.graph.layers[number])
            counts[key] += 1
        return [(layer, counts[key]) for key, layer in first.items()]

    def _layer_kinds(self, group: Group) -> dict[_LayerKind, int]:
        """The distinct layers of a group, and how many there are of each."""
        kinds: collections.Counter[_LayerKind] = collections.Counter()
        for layer, count in self._layers[group]:
            position = dim_positions(layer)
            kinds[layer_signature(layer), tuple(position[name] for name in group), len(layer.dims)] += count
        return kinds

    # -- groups of layers --------------------------------------------------------------------------------------------
    def seconds(self, group: Group, configurations: Sequence[Configuration]) -> np.ndarray:
        """Seconds of all layers of a group, float64 [configurations]."""
        self._compute_seconds(group, configurations)
        return np.array([self._seconds[group, configuration].sum() for configuration in configurations])

    def bytes(self, group: Group, configurations: Sequence[Configuration], moment: int) -> np.ndarray:
        """Bytes per device of all layers of a group at a moment, float64 [configurations]."""
        return sum((self._memory.layer(number, configurations, moment) for number in self.groups[group]),
                   np.zeros(len(configurations)))

    def _compute_seconds(self, group: Group, configurations: Sequence[Configuration]) -> None:
        new = [configuration for configuration in dict.fromkeys(configurations)
               if (group, configuration) not in self._seconds]
        if not new:
            return
        total = np.zeros((len(PARTS), len(new)))
        tables: dict[tuple[tuple[int, ...], int], ConfigurationTable] = {}
        for (signature, positions, width), count in self._kinds[group].items():
            if (positions, width) not in tables:
                tables[positions, width] = ConfigurationTable.build(
                    new, dict(zip(group, positions, strict=True)), width)
            total += count * layer_parts(signature, tables[positions, width], self._priced)
        for column, configuration in enumerate(new):
            self._seconds[group, configuration] = total[:, column]

    # -- one layout --------------------------------------------------------------------------------------------------
    def parts(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> dict[str, float]:
        """Seconds of a training step under one layout, by part."""
        total = np.zeros(len(PARTS))
        configurations = self._configurations(mesh, axis_of)
        for group, configuration in configurations.items():
            self._compute_seconds(group, [configuration])
            total += self._seconds[group, configuration]
        result = dict(zip(PARTS, map(float, total), strict=True))
        for resharding, count in self.reshardings.items():
            seconds = count * self.reshard_seconds(
                resharding, configurations[resharding.source], configurations[resharding.target])
            name = f"resharding {resharding.phase}"
            result[name] = result.get(name, 0.0) + seconds
        return result

    def total(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> float:
        """Seconds of a training step under one layout."""
        return sum(self.parts(mesh, axis_of).values())

    @functools.cached_property
    def fullest_moment(self) -> int:
        """The moment at which a device holds most while nothing is split."""
        return self._memory.fullest

    def memory(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> dict[str, float]:
        """Bytes on the fullest device under one layout, by part."""
        return self._memory.peak(self.of_layers(mesh, axis_of))[0]

    def peak_memory(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> tuple[float, int]:
        """Bytes on the fullest device under one layout, and the moment at which it holds them."""
        parts, moment = self._memory.peak(self.of_layers(mesh, axis_of))
        return sum(parts.values()), moment

    def of_layers(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> list[Configuration]:
        """The configuration of every layer under one layout."""
        found = self._configurations(mesh, axis_of)
        return [found[group] for group in self._group_of]

    def _configurations(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> dict[Group, Configuration]:
        return {group: configuration_of(_axis_dims(group, axis_of, len(mesh.sizes)), mesh.sizes)
                for group in self.groups}

    def reshard_matrix(self, resharding: Resharding, source: DistinctShardings,
                       target: DistinctShardings) -> np.ndarray:
        """Seconds of moving a tensor once, for every pair of shardings of it; and of its sum, where it is added."""
        if source.shards.shape[1] > len(resharding.shape):
            return pending_seconds(source, target, resharding.shape, resharding.itemsize, self._priced)
        return self._priced.seconds(source, target, resharding.shape, resharding.itemsize)

    def reshard_seconds(self, resharding: Resharding, source: Configuration, target: Configuration) -> float:
        """Seconds of moving a tensor once between two configurations."""
        ends = source.partition(resharding.source_dims), target.partition(resharding.target_dims)
        if ends[0] == ends[1]:
            return 0.0
        key = ends, resharding.shape, resharding.itemsize
        if key not in self._reshard_seconds:
            self._reshard_seconds[key] = float(self.reshard_matrix(
                resharding, shardings_of([source], resharding.source_dims),
                shardings_of([target], resharding.target_dims))[0, 0])
        return self._reshard_seconds[key]
