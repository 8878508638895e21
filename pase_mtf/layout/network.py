"""What one layout for a whole graph costs, and the cost network whose assignments are the layouts of a mesh shape.

A variable per dim name says which mesh axis it is on, if any. A layer's configuration follows from the dims it has, so
layers with the same dims are one vertex, tied to these variables by costs of zero and infinity; a layer whose dims are
among another vertex's joins it. Tensors cost something only where a rename gives one dim two names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from pase_mtf.cost.compute import PARTS, layer_parts
from pase_mtf.cost.memory import MEMORY_PARTS, layer_memory
from pase_mtf.cost.resharding import resharding_seconds
from pase_mtf.cost.signature import layer_signature
from pase_mtf.cost.tables import ConfigurationTable, dim_positions
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.layout.legality import StockLegality
from pase_mtf.layout.space import MeshShape
from pase_mtf.machine.machine import Machine
from pase_mtf.search.network import CostNetwork, NetworkEdge

__all__ = ["LayoutPrices", "MeshNetwork", "holders_of"]

_Holders = tuple[str, ...]
"""Per mesh axis the dim of a layer that it splits, "" where it replicates."""


def holders_of(dims: Sequence[str], axis_of: Mapping[str, int], axes: int) -> _Holders:
    """What a layout makes of a layer with these dims: an axis splits the first of them that is laid out on it."""
    result = [""] * axes
    for name in dims:
        if name in axis_of and not result[axis_of[name]]:
            result[axis_of[name]] = name
    return tuple(result)


def _configuration(holders: _Holders, sizes: Sequence[int]) -> Configuration:
    """Neighbouring axes that only replicate are one: equal partitions are equal configurations."""
    axes: list[tuple[str, int]] = []
    for name, size in zip(holders, sizes, strict=True):
        if size == 1:
            continue
        if axes and not name and not axes[-1][0]:
            axes[-1] = "", axes[-1][1] * size
        else:
            axes.append((name, size))
    return Configuration(tuple(axes))


@dataclasses.dataclass(frozen=True)
class _Moved:
    """A tensor that two groups of layers may cut differently, `times` times.

    Attributes:
      source, target: the dims of the layers at either end, in order.
      source_dims, target_dims: the tensor's dims as named there; "" where that end never splits it.
    """

    phase: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    source_dims: tuple[str, ...]
    target_dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int


class LayoutPrices:
    """Prices every layer of a graph under every configuration that layouts give it.

    Attributes:
      dims: the dims whose layout matters: they can be split, and some layer is the cheaper or dearer for it.
    """

    def __init__(self, graph: ComputationGraph, machine: Machine, legality: StockLegality) -> None:
        # A layout is lowered by Mesh-TF itself.
        self.graph, self.machine, self.legality = graph, dataclasses.replace(machine, ring=True), legality
        possible = set(legality.dims())
        used = {name for layer in graph.layers for name in layer.splittable}
        self.dims = tuple(name for name in legality.sizes if name in possible and name in used)
        known = set(self.dims)
        self._dims_of = [tuple(name for name in layer.splittable if name in known) for layer in graph.layers]
        self._layers: dict[tuple[str, ...], list[int]] = {}
        for number, dims in enumerate(self._dims_of):
            self._layers.setdefault(dims, []).append(number)
        self._moved = self._find_moved()
        # (signature, positions of the dims in the layer, number of its dims) -> times, per group of layers
        self._kinds: dict[tuple[str, ...], collections.Counter] = {}
        signatures: dict[tuple, tuple] = {}
        for dims, layers in self._layers.items():
            kinds = self._kinds.setdefault(dims, collections.Counter())
            for number in layers:
                layer = graph.layers[number]
                position = dim_positions(layer)
                signature = layer_signature(layer)
                signature = signatures.setdefault(signature, signature)
                kinds[signature, tuple(position[name] for name in dims), len(layer.dims)] += 1
        self._parts: dict[tuple[tuple[str, ...], Configuration], np.ndarray] = {}
        self._memory: dict[tuple[tuple[str, ...], Configuration], np.ndarray] = {}
        self._moving: dict[tuple, float] = {}

    def _clique(self, dims: Sequence[str]) -> bool:
        """Whether no two of the dims can share an axis, so that each is where its rule says."""
        return all(frozenset(pair) in self.legality.apart for pair in itertools.combinations(dims, 2))

    def _find_moved(self) -> dict[_Moved, int]:
        known, found = set(self.dims), collections.Counter()
        safe = {dims: self._clique(dims) for dims in self._layers}
        for edge in self.graph.edges:
            source, target = self._dims_of[edge.source], self._dims_of[edge.target]
            ends = [tuple(name if name in known else "" for name in dims)
                    for dims in (edge.source_dims, edge.target_dims)]
            if ends[0] == ends[1] and (source == target or (safe[source] and safe[target])):
                continue  # cut alike by every layout
            found[_Moved(edge.phase, source, target, *ends, edge.shape, edge.itemsize)] += 1
        return dict(found)

    # -- layers ------------------------------------------------------------------------------------------------------
    def price(self, wanted: Mapping[tuple[str, ...], set[Configuration]]) -> None:
        """Prices configurations of groups of layers, all at once."""
        for dims, configurations in wanted.items():
            new = [configuration for configuration in configurations if (dims, configuration) not in self._parts]
            if not new:
                continue
            total = np.zeros((len(PARTS), len(new)))
            tables: dict[tuple, ConfigurationTable] = {}
            for (signature, positions, width), times in self._kinds[dims].items():
                if (positions, width) not in tables:
                    tables[positions, width] = ConfigurationTable.build(
                        new, dict(zip(dims, positions, strict=True)), width)
                total += times * layer_parts(signature, tables[positions, width], self.machine)
            for column, configuration in enumerate(new):
                self._parts[dims, configuration] = total[:, column]

    def _weigh(self, dims: tuple[str, ...], configurations: Sequence[Configuration]) -> None:
        new = [configuration for configuration in dict.fromkeys(configurations)
               if (dims, configuration) not in self._memory]
        if new:
            total = np.zeros((len(MEMORY_PARTS), len(new)))
            for number in self._layers[dims]:
                total += layer_memory(self.graph.layers[number], new)
            for column, configuration in enumerate(new):
                self._memory[dims, configuration] = total[:, column]

    def vector(self, dims: tuple[str, ...], configurations: Sequence[Configuration]) -> np.ndarray:
        """Seconds of all layers with these dims, per configuration."""
        self.price({dims: set(configurations)})
        return np.array([self._parts[dims, configuration].sum() for configuration in configurations])

    def memory_vector(self, dims: tuple[str, ...], configurations: Sequence[Configuration]) -> np.ndarray:
        """Bytes per device of all layers with these dims, per configuration."""
        self._weigh(dims, configurations)
        return np.array([self._memory[dims, configuration].sum() for configuration in configurations])

    # -- one layout --------------------------------------------------------------------------------------------------
    def parts(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> dict[str, float]:
        """Seconds of a training step under one layout, by part."""
        sizes, total = mesh.sizes, np.zeros(len(PARTS))
        made = {dims: _configuration(holders_of(dims, axis_of, len(sizes)), sizes) for dims in self._layers}
        for dims, configuration in made.items():
            self.price({dims: {configuration}})
            total += self._parts[dims, configuration]
        result = dict(zip(PARTS, map(float, total), strict=True))
        for moved, times in self._moved.items():
            seconds = times * self._move(moved, made[moved.source], made[moved.target])
            name = f"resharding {moved.phase}"
            result[name] = result.get(name, 0.0) + seconds
        return result

    def total(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> float:
        """Seconds of a training step under one layout."""
        return sum(self.parts(mesh, axis_of).values())

    def _move(self, moved: _Moved, source: Configuration, target: Configuration) -> float:
        ends = source.partition(moved.source_dims), target.partition(moved.target_dims)
        if ends[0] == ends[1]:
            return 0.0
        key = ends, moved.shape, moved.itemsize
        if key not in self._moving:
            classes = [_table([end], dims).shardings(range(len(dims))) for end, dims in (
                (source, moved.source_dims), (target, moved.target_dims))]
            self._moving[key] = float(resharding_seconds(*classes, moved.shape, moved.itemsize, self.machine)[0, 0])
        return self._moving[key]

    def memory(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> dict[str, float]:
        """Bytes on the fullest device under one layout, by part."""
        total = np.zeros(len(MEMORY_PARTS))
        for dims in self._layers:
            configuration = _configuration(holders_of(dims, axis_of, len(mesh.sizes)), mesh.sizes)
            self._weigh(dims, [configuration])
            total += self._memory[dims, configuration]
        return dict(zip(MEMORY_PARTS, map(float, total), strict=True))


def _table(configurations: Sequence[Configuration], dims: Sequence[str]) -> ConfigurationTable:
    """Configurations as arrays whose columns are a tensor's dims."""
    position = {name: number for number, name in enumerate(dims) if name}
    cut = [Configuration(tuple((name if name in position else "", parts) for name, parts in entry.axes))
           for entry in configurations]
    return ConfigurationTable.build(cut, position, len(dims))


@dataclasses.dataclass(frozen=True)
class _Vertex:
    """Layers that one choice decides: those with these dims and those with some of them.

    Attributes:
      dims: in the order in which a layer takes them.
      choices: per choice, the holder of every axis.
    """

    dims: tuple[str, ...]
    choices: tuple[_Holders, ...]


class MeshNetwork:
    """The layouts of one mesh shape, as a cost network.

    Attributes:
      mesh: the mesh shape.
      values: dim name -> the axes it may be on, None first where it may be on none.
      network: the vertices are the dims of `values`, in order, then the groups of layers.
      memory: per vertex, bytes per device.
    """

    def __init__(self, prices: LayoutPrices, mesh: MeshShape, fixed: Mapping[str, int | None] | None = None,
                 forbidden: Sequence[Mapping[str, int]] = ()) -> None:
        """Prices what the mesh allows.

        Args:
          prices: of the graph.
          mesh: its axes.
          fixed: dims that have to be on an axis, or (None) on none.
          forbidden: layouts of one or two dims that are known not to lower.
        """
        self.prices, self.mesh = prices, mesh
        self._legality, self._sizes = prices.legality, mesh.sizes
        self._fixed, self._forbidden = dict(fixed or {}), forbidden
        self.values = self._find_values()
        self.numbers = {name: number for number, name in enumerate(self.values)}
        self._vertices, self._home = self._find_vertices()
        self.memory: tuple[np.ndarray, ...] | None = None

    def _find_values(self) -> dict[str, tuple[int | None, ...]]:
        banned = {next(iter(entry.items())) for entry in self._forbidden if len(entry) == 1}
        result = {}
        for name in dict.fromkeys((*self.prices.dims, *self._fixed)):
            free = [axis for axis, size in enumerate(self._sizes)
                    if size > 1 and (name, axis) not in banned
                    and self._legality.problem_of(name, axis, self._sizes) is None]
            choices: tuple[int | None, ...] = (None, *free)
            if name in self._legality.parts:
                choices = tuple(free)
            if name in self._fixed:
                # What is fixed is taken as it is: whether it is legal has been checked.
                choices = (self._fixed[name],)
            if choices != (None,):
                result[name] = choices
        return result

    @functools.cached_property
    def dead(self) -> bool:
        """Whether a dim has no value left."""
        return any(not choices for choices in self.values.values())

    def _together(self, one: str, axis: int | None, other: str, other_axis: int | None) -> bool:
        if axis is None or other_axis is None:
            return True
        if any(len(entry) == 2 and entry.get(one, -1) == axis and entry.get(other, -1) == other_axis
               for entry in self._forbidden):
            return False
        return self._legality.problem_of_pair(one, axis, other, other_axis, self._sizes) is None

    def _find_vertices(self) -> tuple[list[_Vertex], dict[tuple[str, ...], int]]:
        """The vertices, and for the dims of every group of layers the number of its vertex."""
        active = {dims: tuple(name for name in dims if name in self.values) for dims in self.prices._layers}
        maximal: list[tuple[str, ...]] = []
        for dims in sorted(dict.fromkeys(active.values()), key=lambda entry: (-len(entry), entry)):
            if not any(dims == other or (set(dims) <= set(other) and self.prices._clique(other))
                       for other in maximal):
                maximal.append(dims)
        home = {}
        for dims, mine in active.items():
            home[dims] = next(number for number, other in enumerate(maximal)
                              if mine == other or (set(mine) <= set(other) and self.prices._clique(other)))
        return [_Vertex(dims, self._choices(dims)) for dims in maximal], home

    def _choices(self, dims: tuple[str, ...]) -> tuple[_Holders, ...]:
        partial: list[tuple[str, ...]] = [()]
        for axis in range(len(self._sizes)):
            fitting = ["", *(name for name in dims if axis in self.values[name])]
            grown = []
            for holders in partial:
                for name in fitting:
                    if name and (name in holders or not all(
                            self._together(name, axis, other, number)
                            for number, other in enumerate(holders) if other)):
                        continue
                    grown.append((*holders, name))
            partial = grown
        # A dim that has to be on an axis is held there, or hidden by one before it.
        must = [name for name in dims if None not in self.values[name]]
        return tuple(holders for holders in partial if all(
            name in holders or any(holders[axis] and dims.index(holders[axis]) < dims.index(name)
                                   for axis in self.values[name]) for name in must))

    @functools.cached_property
    def network(self) -> CostNetwork:
        """Dims, groups of layers, what ties them, and what is moved between them."""
        first = len(self.values)
        vectors = [np.zeros(len(choices)) for choices in self.values.values()]
        restricted = self._restrictions()
        for number, vertex in enumerate(self._vertices):
            total = np.zeros(len(vertex.choices))
            for dims, home in self._home.items():
                if home == number:
                    total = total + self.prices.vector(dims, restricted[dims])
            vectors.append(total)
        edges = [*self._pairs(), *self._ties()]
        for (source, target), table in self._resharding(restricted).items():
            if source == target:
                vectors[first + source] = vectors[first + source] + table
            else:
                matrix, rows, columns = table
                edges.append(NetworkEdge(first + source, first + target, matrix, rows, columns))
        edges += self._resharding_between(restricted, first)
        return CostNetwork(vectors, edges)

    def _restrictions(self) -> dict[tuple[str, ...], list[Configuration]]:
        """For every group of layers, its configuration under each choice of its vertex."""
        result, wanted = {}, {}
        for dims, home in self._home.items():
            mine = set(dims)
            result[dims] = [_configuration(tuple(name if name in mine else "" for name in holders), self._sizes)
                            for holders in self._vertices[home].choices]
            wanted[dims] = set(result[dims])
        self.prices.price(wanted)
        return result

    def memory_vectors(self) -> list[np.ndarray]:
        """Bytes per device of every choice of every vertex."""
        restricted = self._restrictions()
        vectors = [np.zeros(len(choices)) for choices in self.values.values()]
        for number, vertex in enumerate(self._vertices):
            total = np.zeros(len(vertex.choices))
            for dims, home in self._home.items():
                if home == number:
                    total = total + self.prices.memory_vector(dims, restricted[dims])
            vectors.append(total)
        return vectors

    def _pairs(self) -> list[NetworkEdge]:
        """Dims that cannot be split together."""
        edges = []
        for one, other in itertools.combinations(self.values, 2):
            matrix = np.array([[0.0 if self._together(one, axis, other, other_axis) else np.inf
                                for other_axis in self.values[other]] for axis in self.values[one]])
            if matrix.any():
                edges.append(self._edge(self.numbers[one], self.numbers[other], matrix,
                                        np.arange(matrix.shape[0]), np.arange(matrix.shape[1])))
        return edges

    @staticmethod
    def _edge(source: int, target: int, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> NetworkEdge:
        return NetworkEdge(source, target, matrix, rows.astype(np.int32), columns.astype(np.int32))

    def _ties(self) -> list[NetworkEdge]:
        """What the configuration of a group of layers says about each of its dims."""
        edges = []
        for number, vertex in enumerate(self._vertices):
            for place, name in enumerate(vertex.dims):
                # Which axes the dim may be on under a choice: the one it holds; else those that an earlier dim holds.
                allowed = []
                for holders in vertex.choices:
                    if name in holders:
                        allowed.append((holders.index(name),))
                    else:
                        hidden = [axis for axis, holder in enumerate(holders)
                                  if holder and vertex.dims.index(holder) < place]
                        allowed.append((None, *hidden))
                classes = {entry: index for index, entry in enumerate(dict.fromkeys(allowed))}
                matrix = np.array([[0.0 if axis in entry else np.inf for entry in classes]
                                   for axis in self.values[name]])
                edges.append(self._edge(self.numbers[name], len(self.values) + number, matrix,
                                        np.arange(len(matrix)), np.array([classes[entry] for entry in allowed])))
        return edges

    def _resharding(self, restricted: Mapping[tuple[str, ...], list[Configuration]]) -> dict:
        """Seconds of moving what stays within one vertex, per choice."""
        result: dict[tuple[int, int], np.ndarray] = {}
        for moved, times in self.prices._moved.items():
            home = self._home[moved.source]
            if home == self._home[moved.target]:
                seconds = np.array([self.prices._move(moved, one, other) for one, other in zip(
                    restricted[moved.source], restricted[moved.target], strict=True)])
                result[home, home] = result.get((home, home), 0.0) + times * seconds
        return result

    def _resharding_between(self, restricted: Mapping[tuple[str, ...], list[Configuration]],
                            first: int) -> list[NetworkEdge]:
        edges = []
        for moved, times in self.prices._moved.items():
            source, target = self._home[moved.source], self._home[moved.target]
            if source == target:
                continue
            ends = [_table(restricted[dims], names).shardings(range(len(names))) for dims, names in (
                (moved.source, moved.source_dims), (moved.target, moved.target_dims))]
            matrix = times * resharding_seconds(*ends, moved.shape, moved.itemsize, self.prices.machine)
            if matrix.any():
                edges.append(self._edge(first + source, first + target, matrix, ends[0].index, ends[1].index))
        return edges

    def layout(self, assignment: Sequence[int]) -> dict[str, int]:
        """Dim name -> axis, of an assignment of the network."""
        return {name: choices[choice] for (name, choices), choice in
                zip(self.values.items(), assignment[:len(self.values)], strict=True) if choices[choice] is not None}

    def bound(self) -> float:
        """No layout of this mesh shape costs less."""
        return sum(float(vector.min()) for vector in self.network.vectors)
