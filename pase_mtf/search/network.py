"""The cost network: what a search minimises. A cost vector per layer, a class-compressed cost matrix per edge.

What an edge costs depends only on how the tensor is partitioned at either end, so an edge holds a small matrix over the
distinct partitions, and the class of every configuration of its two layers. Edges that look alike share one matrix.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence

import numpy as np

from pase_mtf.errors import FormatError, InfeasibleError, PaseError, UsageError
from pase_mtf.files import write_atomically
from pase_mtf.search.arrays import NetworkArrays, NetworkEdge, collect
from pase_mtf.search.budget import Budget
from pase_mtf.search.checks import check
from pase_mtf.search.network_file import network_bytes, read_network
from pase_mtf.search.normal_form import normalize

__all__ = ["CostNetwork", "NetworkEdge"]


class CostNetwork:
    """A sum of costs: one vector per layer, one matrix per edge.

    Attributes:
      arrays: all numbers, those that edges share once; not to be changed.
      vectors: per layer, float64 [configurations]; +inf forbids a configuration. Read-only.
      kinds: a word per layer, for people ("" where unknown).
      memory: per layer, bytes per device of every configuration; None where unknown. A memory limit needs it.

    Example:
      >>> network = CostNetwork([[1., 0.], [0., 3.]], [NetworkEdge(0, 1, [[0., 5.], [5., 0.]], [0, 1], [0, 1])])
      >>> network.cost((0, 0))
      1.0
    """

    def __init__(self, vectors: Sequence[np.ndarray], edges: Sequence[NetworkEdge], kinds: Sequence[str] = ()) -> None:
        """Takes the parts; matrices and class vectors of equal contents become one. `validate` checks what they hold.

        A matrix that is float64 and contiguous is not copied, and must not be changed from then on.

        Raises:
          UsageError: a part that is not an array of numbers, or of another number of dimensions.
        """
        if not isinstance(kinds, (tuple, list)):
            raise UsageError(f"kinds of {kinds!r}; give a word per layer, or none")
        try:
            arrays = collect(vectors, edges)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"cost network: {error}; give arrays of numbers, and a NetworkEdge per edge") from error
        self._take(arrays, kinds)

    @classmethod
    def of_arrays(cls, arrays: NetworkArrays, kinds: Sequence[str] = ()) -> CostNetwork:
        """The network of arrays that fit each other. They are not copied."""
        network = cls.__new__(cls)
        network._take(arrays, kinds)
        return network

    def _take(self, arrays: NetworkArrays, kinds: Sequence[str]) -> None:
        self.arrays = arrays
        self.vectors = tuple(arrays.vectors())
        self.kinds = tuple(str(kind) for kind in kinds) or ("",) * len(self.vectors)
        self.memory: tuple[np.ndarray, ...] | None = None
        self._normal: CostNetwork | None = None

    def __repr__(self) -> str:
        return (f"CostNetwork({len(self.vectors)} layers, {len(self.arrays.edge_matrix)} edges, "
                f"{len(self.arrays.unary)} configurations, {self.distinct_matrices} distinct matrices)")

    @functools.cached_property
    def edges(self) -> tuple[NetworkEdge, ...]:
        """Every edge with its arrays (read-only); parallel edges and edges from a layer to itself are allowed."""
        matrices, classes = self.arrays.matrices(), self.arrays.class_vectors()
        return tuple(NetworkEdge(source, target, matrices[matrix], classes[rows], classes[columns])
                     for source, target, matrix, rows, columns in self.arrays.edges())

    @functools.cached_property
    def extremes(self) -> tuple[float, float]:
        """The least and the greatest of all costs, of layers and of edges; (inf, -inf) of a network without any."""
        costs = [self.arrays.unary, *self.arrays.values]
        return (min((float(array.min(initial=math.inf)) for array in costs), default=math.inf),
                max((float(array.max(initial=-math.inf)) for array in costs), default=-math.inf))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of configurations per layer."""
        return tuple(np.diff(self.arrays.first).tolist())

    @property
    def distinct_matrices(self) -> int:
        """How many different matrices the edges share."""
        return len(self.arrays.matrix_at)

    def cost(self, assignment: Sequence[int]) -> float:
        """The total cost of a configuration index per layer, rounded once (the sum itself is exact).

        Raises:
          UsageError: the assignment does not fit the network.
        """
        if not isinstance(assignment, (tuple, list, np.ndarray)) or not all(
                isinstance(choice, (int, np.integer)) for choice in assignment):
            raise UsageError(f"assignment of {str(assignment)[:60]!r}; give one configuration index per layer")
        if len(assignment) != len(self.vectors):
            raise UsageError(f"assignment for {len(assignment)} layers, the network has {len(self.vectors)}; "
                             "give one configuration index per layer")
        for layer, (choice, vector) in enumerate(zip(assignment, self.vectors, strict=True)):
            if not 0 <= choice < len(vector):
                raise UsageError(f"layer {layer}: configuration {choice} of {len(vector)}; indices start at 0")
        terms = self.arrays.terms(np.array(assignment, np.int64))
        return math.inf if math.inf in terms else math.fsum(terms)

    def validate(self) -> None:
        """Checks everything a search relies on; a network that keeps its normal form has been checked.

        Raises:
          UsageError: an empty domain, a NaN, -inf or a cost too large to add up, an index out of range, arrays that do
            not fit each other.
          InfeasibleError: a layer or an edge that has no finite entry, so that no assignment is finite.
        """
        if self._normal is not None:
            return
        if len(self.kinds) != len(self.vectors):
            raise UsageError(f"{len(self.kinds)} kinds for {len(self.vectors)} layers; give one each, or none")
        check(self.arrays)

    def normalized(self, *, keep: bool = False, budget: Budget | None = None) -> CostNetwork:
        """An equal network: every edge from a lower to a higher layer, no edge from a layer to itself, no class that
        is unused or repeats another, and parallel edges summed (wherever that does not cost more memory).

        Configurations keep their indices and every assignment its cost, up to rounding.

        Args:
          keep: check the network and remember the result, so that every search of it finds it.
          budget: time and memory that it may take; no limit if not given.

        Raises:
          UsageError, InfeasibleError: with `keep`, as `validate`.
          TimeoutError, UsageError: the time is over, or the result is larger than the memory.
        """
        if self._normal is not None:
            return self._normal
        if keep:
            self.validate()
        normal = CostNetwork.of_arrays(normalize(self.arrays, budget or Budget(memory=math.inf)), self.kinds)
        if keep:
            self._normal = normal
            normal.extremes  # noqa: B018 (read once, for every search to come)
        return normal

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the network as npz (see network_file), whole or not at all.

        Raises:
          UsageError: the file cannot be written.
        """
        if len(self.kinds) != len(self.vectors):
            raise UsageError(f"{len(self.kinds)} kinds for {len(self.vectors)} layers; give one each, or none")
        memory = None
        if self.memory is not None:
            try:  # as a search takes them: numbers that are objects, or of another precision, but no words
                held = collect(self.memory, ())
                memory = held.unary if np.array_equal(held.first, self.arrays.first) else None
            except (TypeError, ValueError, OverflowError):
                memory = None
            if memory is None or not ((memory >= 0) & (memory < math.inf)).all():
                raise UsageError("memory that no file holds; give finite bytes of at least 0, one per configuration")
        write_atomically(path, network_bytes(self.arrays, self.kinds, memory))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostNetwork:
        """Reads a network that `save` wrote.

        Raises:
          FormatError: the file is missing, truncated or something else, or holds a network that is not valid.
          InfeasibleError: the network has no finite assignment.
        """
        arrays, kinds, memory = read_network(path)
        network = cls.of_arrays(arrays, kinds)
        if memory is not None:
            network.memory = tuple(np.split(memory, arrays.first[1:-1]))[:len(network.vectors)]  # of no layer none
        try:
            network.validate()
        except InfeasibleError:
            raise
        except PaseError as error:
            raise FormatError(f"{path}: {error}") from error
        return network
