"""The cheapest legal layouts over all mesh shapes, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from pase_mtf.errors import InfeasibleError
from pase_mtf.layout.legality import Problem
from pase_mtf.layout.network import LayoutPrices, MeshNetwork
from pase_mtf.layout.space import MeshShape
from pase_mtf.search import solve
from pase_mtf.search.k_best import cheapest

__all__ = ["Candidate", "Search"]

# Layouts that turn out not to lower, or assignments beyond a memory limit, before the search of a mesh shape gives up.
_PATIENCE = 2000
# Layouts in a row that differ from earlier ones in rules without effect only, before a mesh shape has no more to offer.
_REPEATED = 200


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that the search proposes.

    Attributes:
      cost: seconds.
      mesh: its mesh shape.
      axis_of: dim name -> index of its axis.
    """

    cost: float
    mesh: MeshShape
    axis_of: dict[str, int]

    @property
    def rules(self) -> dict[str, str]:
        """Dim name -> axis name."""
        return {name: self.mesh.names[axis] for name, axis in self.axis_of.items()}


def _effect(candidate: Candidate) -> tuple:
    """Equal for layouts that place every tensor alike: names of axes and how unused ones are cut do not matter."""
    axes: list[tuple[frozenset[str], int]] = []
    for axis, size in enumerate(candidate.mesh.sizes):
        dims = frozenset(name for name, other in candidate.axis_of.items() if other == axis)
        if axes and not dims and not axes[-1][0]:
            axes[-1] = dims, axes[-1][1] * size
        elif size > 1:
            axes.append((dims, size))
    return tuple(axes)


class Search:
    """Goes through the layouts of several mesh shapes, cheapest first.

    Attributes:
      rejected: layouts that were cheaper but do not lower, and why.
      networks: per mesh shape that was looked into, sizes of its network.
      least: per mesh shape, the cost of its cheapest layout, or a bound where that was enough to rule it out.
    """

    def __init__(self, prices: LayoutPrices, meshes: Sequence[MeshShape], fixed: Mapping[str, str | None],
                 memory_limit: float | None, verify: Callable[[MeshShape, dict[str, str]], Problem | None]) -> None:
        self.prices, self.meshes, self.fixed = prices, meshes, fixed
        self.memory_limit, self.verify = memory_limit, verify
        self.rejected: list[tuple[Candidate, Problem]] = []
        self.networks: dict[MeshShape, tuple[int, int]] = {}
        self.least: dict[MeshShape, float] = {}
        self.least_memory = math.inf

    def fixed_axes(self, mesh: MeshShape) -> dict[str, int | None]:
        """The fixed dims by index of the axis."""
        return {dim: None if axis is None else mesh.names.index(axis) for dim, axis in self.fixed.items()}

    def __iter__(self) -> Iterator[Candidate]:
        """Legal layouts that lower, cheapest first, each once but for names of axes and rules without effect."""
        heap: list[tuple[float, int, int, int, Any, MeshShape]] = []
        number = itertools.count()

        def push(layouts: Generator, mesh: MeshShape, cause: dict[str, int] | None = None) -> None:
            with contextlib.suppress(StopIteration):
                found = layouts.send(cause)
                # Sums of the same numbers in another order are the same: then fewer axes come first.
                heapq.heappush(heap, (float(f"{found.cost:.12g}"), 1, len(mesh.axes), next(number),
                                      (found, layouts), mesh))

        seen: set[tuple] = set()
        for mesh in self.meshes:
            network = self._network(mesh, ())
            if network is not None:
                self.least[mesh] = network.bound()
                heapq.heappush(heap, (self.least[mesh], 0, len(mesh.axes), next(number), network, mesh))
        opened: set[MeshShape] = set()
        while heap:
            cost, _, _, _, item, mesh = heapq.heappop(heap)
            if isinstance(item, MeshNetwork):  # only bounded so far
                push(self._layouts(mesh, item), mesh)
                continue
            candidate, layouts = item
            if mesh not in opened:
                opened.add(mesh)
                self.least[mesh] = cost
            effect = _effect(candidate)
            if effect in seen:
                push(layouts, mesh)
                continue
            seen.add(effect)
            problem = self.verify(mesh, candidate.rules)
            if problem is None:
                yield candidate
                push(layouts, mesh)
                continue
            self.rejected.append((candidate, problem))
            cause = {name: candidate.axis_of[name] for name in problem.dims if name in candidate.axis_of}
            if not set(cause) <= set(self.fixed):  # else no other layout avoids it
                push(layouts, mesh, cause)

    def _network(self, mesh: MeshShape, forbidden: Sequence[Mapping[str, int]]) -> MeshNetwork | None:
        network = MeshNetwork(self.prices, mesh, self.fixed_axes(mesh), forbidden)
        if network.dead or any(not len(vector) for vector in network.network.vectors):
            return None
        self.networks[mesh] = (len(network.network.vectors), sum(network.network.sizes))
        return network

    def _layouts(self, mesh: MeshShape, network: MeshNetwork | None) -> Generator:
        """The legal layouts of a mesh shape, cheapest first. What is sent in does not lower: it is left out, with
        everything that has it."""
        forbidden: list[dict[str, int]] = []
        done: set[tuple] = set()
        repeated = 0
        while network is not None:
            for axis_of in self._assignments(network):
                candidate = Candidate(self.prices.total(mesh, axis_of), mesh, axis_of)
                trimmed = self.trim(candidate)
                if self.prices.legality.problem(trimmed.axis_of, mesh.sizes) is None:
                    candidate = trimmed
                key = tuple(sorted(candidate.axis_of.items()))
                if key in done:
                    repeated += 1
                    if repeated > _REPEATED:
                        return
                    continue
                repeated = 0
                done.add(key)
                problem = self.prices.legality.problem(candidate.axis_of, mesh.sizes)
                if problem is None:
                    cause = yield candidate
                else:
                    self.rejected.append((candidate, problem))
                    cause = {name: candidate.axis_of[name] for name in problem.dims if name in candidate.axis_of}
                    if set(cause) <= set(self.fixed):
                        return  # no other layout avoids it
                if cause and len(cause) <= 2:
                    forbidden.append(cause)
                    network = self._network(mesh, forbidden)
                    break
            else:
                return

    def _assignments(self, network: MeshNetwork) -> Iterator[dict[str, int]]:
        count = itertools.count()
        try:
            if self.memory_limit is not None:
                solution = self._within(network)
                if solution is None:
                    return
                yield network.layout(solution)
            for _, assignment in cheapest(network.network):
                axis_of = network.layout(assignment)
                if self.memory_limit is None or sum(
                        self.prices.memory(network.mesh, axis_of).values()) <= self.memory_limit:
                    yield axis_of
                if next(count) > _PATIENCE:
                    return
        except InfeasibleError:
            return

    def _within(self, network: MeshNetwork) -> tuple[int, ...] | None:
        memory = network.memory_vectors()
        try:
            return solve(network.network, memory=memory, memory_limit=self.memory_limit).assignment
        except InfeasibleError:
            from pase_mtf.search.memory import least_memory
            self.least_memory = min(self.least_memory, least_memory(network.network, memory)[0])
            return None

    def trim(self, candidate: Candidate) -> Candidate:
        """The same layout without the rules that change nothing."""
        axis_of = dict(candidate.axis_of)
        needed = {*self.fixed, *self.prices.legality.parts}
        for name in sorted(axis_of):
            if name in needed:
                continue
            without = {other: axis for other, axis in axis_of.items() if other != name}
            cost = self.prices.total(candidate.mesh, without)
            if abs(cost - candidate.cost) <= 1e-12 * candidate.cost and (
                    self.memory_limit is None
                    or sum(self.prices.memory(candidate.mesh, without).values()) <= self.memory_limit):
                axis_of = without
        order = {name: number for number, name in enumerate(self.prices.legality.sizes)}
        axis_of = dict(sorted(axis_of.items(), key=lambda item: (item[1], order.get(item[0], 0))))
        return Candidate(self.prices.total(candidate.mesh, axis_of), candidate.mesh, axis_of)
