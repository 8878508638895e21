"""The cost network whose assignments are the layouts of one mesh shape.

A vertex per dim name says which mesh axis the dim is on, if any. Layers follow from these: a vertex stands for a group
of layers with the same dims, and is tied to the vertices of its dims by costs of zero and infinity; a group whose dims
are among another vertex's is decided by that one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from pase_mtf.graph.configurations import Configuration
from pase_mtf.layout.costs import AxisDims, Group, LayoutCosts, configuration_of, shardings_of
from pase_mtf.layout.space import MeshShape
from pase_mtf.search.network import CostNetwork, NetworkEdge

__all__ = ["MeshNetwork"]


@dataclasses.dataclass(frozen=True)
class _Vertex:
    """Layers that one choice decides: those with these dims and those with some of them.

    Attributes:
      dims: in the order in which a layer takes them.
      choices: per choice, what every axis splits.
    """

    dims: Group
    choices: tuple[AxisDims, ...]


class MeshNetwork:
    """The layouts of one mesh shape, as a cost network.

    Attributes:
      costs: of the graph.
      mesh: the mesh shape.
      values: dim name -> the axes it may be on, None first where it may be on none.
    """

    def __init__(self, costs: LayoutCosts, mesh: MeshShape, fixed: Mapping[str, int | None] | None = None,
                 forbidden: Sequence[Mapping[str, int]] = ()) -> None:
        """Finds what the mesh allows.

        Args:
          costs: of the graph.
          mesh: its axes.
          fixed: dims that have to be on an axis, or (None) on none.
          forbidden: layouts of one or two dims that are known not to lower.
        """
        self.costs, self.mesh = costs, mesh
        self._legality, self._sizes = costs.legality, mesh.sizes
        self._fixed, self._forbidden = dict(fixed or {}), forbidden
        self.values = self._find_values()
        self._number_of = {name: number for number, name in enumerate(self.values)}
        self._vertices, self._vertex_of = self._find_vertices()

    def _find_values(self) -> dict[str, tuple[int | None, ...]]:
        banned = {next(iter(entry.items())) for entry in self._forbidden if len(entry) == 1}
        result = {}
        tied = itertools.chain(*map(sorted, self._legality.together))
        for name in dict.fromkeys((*self.costs.dims, *self._fixed, *tied)):
            free = [axis for axis, size in enumerate(self._sizes)
                    if size > 1 and (name, axis) not in banned
                    and self._legality.problem_of(name, axis, self._sizes) is None]
            choices: tuple[int | None, ...] = (None, *free)
            if name in self._legality.shards:
                choices = tuple(free)
            if name in self._fixed:
                # What is fixed is taken as it is: whether it is legal has been checked.
                choices = (self._fixed[name],)
            if choices != (None,):
                result[name] = choices
        return result

    @property
    def infeasible(self) -> bool:
        """Whether a dim has no value left."""
        return any(not choices for choices in self.values.values())

    def _together(self, one: str, axis: int | None, other: str, other_axis: int | None) -> bool:
        """Whether two dims may be on these axes at the same time."""
        if axis is None or other_axis is None:
            return axis == other_axis or frozenset((one, other)) not in self._legality.together
        if any(len(entry) == 2 and entry.get(one, -1) == axis and entry.get(other, -1) == other_axis
               for entry in self._forbidden):
            return False
        return self._legality.problem_of_pair(one, axis, other, other_axis, self._sizes) is None

    def _find_vertices(self) -> tuple[list[_Vertex], dict[Group, int]]:
        """The vertices, and for every group of layers the number of the vertex that decides its configuration."""
        variable = {group: tuple(name for name in group if name in self.values) for group in self.costs.groups}

        def decides(other: Group, dims: Group) -> bool:
            return dims == other or (set(dims) <= set(other) and self.costs.never_share_an_axis(other))

        maximal: list[Group] = []
        for dims in sorted(dict.fromkeys(variable.values()), key=lambda entry: (-len(entry), entry)):
            if not any(decides(other, dims) for other in maximal):
                maximal.append(dims)
        vertex_of = {group: next(number for number, other in enumerate(maximal) if decides(other, dims))
                     for group, dims in variable.items()}
        return [_Vertex(dims, self._choices(dims)) for dims in maximal], vertex_of

    def _choices(self, dims: Group) -> tuple[AxisDims, ...]:
        partial: list[AxisDims] = [()]
        for axis in range(len(self._sizes)):
            fitting = ["", *(name for name in dims if axis in self.values[name])]
            grown = []
            for chosen in partial:
                for name in fitting:
                    if name and (name in chosen or not all(self._together(name, axis, other, number)
                                                           for number, other in enumerate(chosen) if other)):
                        continue
                    grown.append((*chosen, name))
            partial = grown
        # A dim that has to be on an axis is split by it, unless a dim before it is.
        must = [name for name in dims if None not in self.values[name]]
        return tuple(chosen for chosen in partial if all(
            name in chosen or any(chosen[axis] and dims.index(chosen[axis]) < dims.index(name)
                                  for axis in self.values[name] if axis is not None) for name in must))

    # -- the network -------------------------------------------------------------------------------------------------
    @functools.cached_property
    def network(self) -> CostNetwork:
        """The vertices are the dims of `values`, in order, then the groups of layers; seconds."""
        first = len(self.values)
        configurations = self._group_configurations()
        vectors = self._vectors({group: self.costs.seconds(group, entries)
                                 for group, entries in configurations.items()})
        edges = [*self._exclusion_edges(), *self._consistency_edges()]
        within: dict[int, np.ndarray] = {}
        for resharding, count in self.costs.reshardings.items():
            source, target = (self._vertex_of[group] for group in (resharding.source, resharding.target))
            ends = (shardings_of(configurations[resharding.source], resharding.source_dims),
                    shardings_of(configurations[resharding.target], resharding.target_dims))
            matrix = count * self.costs.reshard_matrix(resharding, *ends)
            if source == target:
                within[source] = within.get(source, 0.0) + matrix[ends[0].index, ends[1].index]
                continue
            if matrix.any():
                edges.append(_edge(first + source, first + target, matrix, ends[0].index, ends[1].index))
        for vertex, seconds in within.items():
            vectors[first + vertex] = vectors[first + vertex] + seconds
        return CostNetwork(vectors, edges)

    def memory_vectors(self, moment: int) -> list[np.ndarray]:
        """Bytes per device of every choice of every vertex, at one moment of those at which most of what is computed
        once more may be there."""
        return self._vectors({group: self.costs.bytes(group, entries, moment)
                              for group, entries in self._group_configurations().items()})

    def _group_configurations(self) -> dict[Group, list[Configuration]]:
        """For every group of layers, its configuration under each choice of its vertex."""
        result = {}
        for group, vertex in self._vertex_of.items():
            mine = set(group)
            result[group] = [configuration_of(tuple(name if name in mine else "" for name in chosen), self._sizes)
                             for chosen in self._vertices[vertex].choices]
        return result

    def _vectors(self, of_groups: Mapping[Group, np.ndarray]) -> list[np.ndarray]:
        """Sums of what the groups cost, per vertex; a dim by itself costs nothing."""
        vectors = [np.zeros(len(choices)) for choices in self.values.values()]
        vectors += [np.zeros(len(vertex.choices)) for vertex in self._vertices]
        for group, vector in of_groups.items():
            number = len(self.values) + self._vertex_of[group]
            vectors[number] = vectors[number] + vector
        return vectors

    def _exclusion_edges(self) -> list[NetworkEdge]:
        """Infinite costs for dims that cannot be split together."""
        edges = []
        for one, other in itertools.combinations(self.values, 2):
            matrix = np.array([[0.0 if self._together(one, axis, other, other_axis) else np.inf
                                for other_axis in self.values[other]] for axis in self.values[one]])
            if matrix.any():
                edges.append(_edge(self._number_of[one], self._number_of[other], matrix,
                                   np.arange(matrix.shape[0]), np.arange(matrix.shape[1])))
        return edges

    def _consistency_edges(self) -> list[NetworkEdge]:
        """Infinite costs where the choice of a group of layers contradicts the axis of one of its dims."""
        edges = []
        for number, vertex in enumerate(self._vertices):
            for place, name in enumerate(vertex.dims):
                # The axes that the dim may be on under a choice: the one that splits it; else none, or one that splits
                # an earlier dim.
                allowed: list[tuple[int | None, ...]] = []
                for chosen in vertex.choices:
                    if name in chosen:
                        allowed.append((chosen.index(name),))
                    else:
                        hidden = [axis for axis, other in enumerate(chosen)
                                  if other and vertex.dims.index(other) < place]
                        allowed.append((None, *hidden))
                classes = {entry: index for index, entry in enumerate(dict.fromkeys(allowed))}
                matrix = np.array([[0.0 if axis in entry else np.inf for entry in classes]
                                   for axis in self.values[name]])
                edges.append(_edge(self._number_of[name], len(self.values) + number, matrix,
                                   np.arange(len(matrix)), np.array([classes[entry] for entry in allowed])))
        return edges

    # -- its solutions -----------------------------------------------------------------------------------------------
    def layout(self, assignment: Sequence[int]) -> dict[str, int]:
        """Dim name -> axis, of an assignment of the network."""
        chosen = {name: choices[choice] for (name, choices), choice in
                  zip(self.values.items(), assignment[:len(self.values)], strict=True)}
        return {name: axis for name, axis in chosen.items() if axis is not None}

    def bound(self) -> float:
        """No layout of this mesh shape costs less."""
        return sum(float(vector.min()) for vector in self.network.vectors)


def _edge(source: int, target: int, matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> NetworkEdge:
    return NetworkEdge(source, target, matrix, rows.astype(np.int32), columns.astype(np.int32))
