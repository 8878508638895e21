"""The cheapest legal layouts over all mesh shapes, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from pase_mtf.errors import InfeasibleError
from pase_mtf.layout.costs import LayoutCosts
from pase_mtf.layout.legality import Problem
from pase_mtf.layout.network import MeshNetwork
from pase_mtf.layout.space import MeshShape
from pase_mtf.search.budget import Budget
from pase_mtf.search.k_best import cheapest
from pase_mtf.search.memory import least_memory
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.peak import minimise_within_peak
from pase_mtf.search.registry import Solution

__all__ = ["Candidate", "Search"]

# Layouts that turn out not to lower, or assignments beyond a memory limit, before the search of a mesh shape gives up.
_PATIENCE = 2000
# Layouts in a row that differ from earlier ones in rules without effect only, before the search of a mesh shape ends.
_REPEATED = 200
# For looking on within a memory limit where nothing is proven at once: of every mesh shape, and its layouts follow.
_SECONDS_WITHIN = 0.5
# Of sums of bytes, relative: of what devices hold, no whole byte (as `search.looking_on.ROUNDING`).
_ROUNDING = 1e-12


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

    @property
    def effect(self) -> tuple[tuple[frozenset[str], int], ...]:
        """Equal for layouts that place every tensor alike: names of axes and factors of unused ones make no difference.
        """
        axes: list[tuple[frozenset[str], int]] = []
        for axis, size in enumerate(self.mesh.sizes):
            dims = frozenset(name for name, other in self.axis_of.items() if other == axis)
            if axes and not dims and not axes[-1][0]:
                axes[-1] = dims, axes[-1][1] * size
            elif size > 1:
                axes.append((dims, size))
        return tuple(axes)


@dataclasses.dataclass
class _Stream:
    """The layouts of one mesh shape, as far as they have been asked for.

    Attributes:
      mesh: the mesh shape.
      layouts: yields them, cheapest first, and now and then what none that is to come is below, in seconds; is sent
        what makes the last one impossible to lower (None: nothing does).
      bound: what none of those that have not been looked at is below, in seconds.
      next: the cheapest of these; None while there is only the bound.
    """

    mesh: MeshShape
    layouts: Generator[Candidate | float, dict[str, int] | None, None]
    bound: float
    next: Candidate | None = None

    def advance(self, cause: dict[str, int] | None) -> bool:
        """Finds the next layout, or a higher bound; False where there is none."""
        self.next = None
        try:
            found = self.layouts.send(cause)
        except StopIteration:
            return False
        if isinstance(found, Candidate):
            self.next, self.bound = found, found.cost
        else:
            self.bound = max(self.bound, found)
        return True

    def passed(self) -> None:
        """The next layout has been looked at."""
        self.next = None


class Search:
    """Goes through the layouts of several mesh shapes, cheapest first.

    Attributes:
      costs: of the graph's layouts.
      meshes, fixed, memory_limit: what they have to satisfy; bytes per device, infinite without a limit.
      verify: lowers a layout, and says what goes wrong.
      budget: time, after which what was found is all there is.
      bound: where time or patience was over before all layouts were gone through, or none within the memory is proven
        to be the cheapest: none that is missing costs less, in seconds.
      rejected: layouts that were cheaper but do not lower, and why.
      networks: per mesh shape that was looked into, vertices and configurations of its network.
      lightest: where no layout of a mesh shape was within the limit: the bytes per device that the lightest needs, its
        mesh shape, and dim name -> index of its axis.
    """

    def __init__(self, costs: LayoutCosts, meshes: Sequence[MeshShape], fixed: Mapping[str, str | None],
                 memory_limit: float, verify: Callable[[MeshShape, dict[str, str]], Problem | None],
                 budget: Budget | None = None) -> None:
        self.costs, self.meshes, self.fixed = costs, meshes, fixed
        self.memory_limit, self.verify, self.budget = memory_limit, verify, budget or Budget()
        self.bound = math.inf
        self.rejected: list[tuple[Candidate, Problem]] = []
        self.networks: dict[MeshShape, tuple[int, int]] = {}
        self.lightest: tuple[float, MeshShape, dict[str, int]] | None = None
        # (cost, whether it is that of a layout and not a bound, number of axes, for ties, the mesh shape's stream)
        self._heap: list[tuple[float, bool, int, int, _Stream]] | None = None  # None: nobody has asked
        self._number = itertools.count()
        self._given: _Stream | None = None  # whose layout was the last answer
        self._seen: set[tuple[tuple[frozenset[str], int], ...]] = set()

    def _fixed_axes(self, mesh: MeshShape) -> dict[str, int | None]:
        """The fixed dims by index of the axis."""
        return {dim: None if axis is None else mesh.names.index(axis) for dim, axis in self.fixed.items()}

    def __iter__(self) -> Iterator[Candidate]:
        """Legal layouts that lower, cheapest first, each once but for names of axes and rules without effect."""
        while (candidate := self.next_below(math.inf)) is not None:
            yield candidate

    def next_below(self, limit: float) -> Candidate | None:
        """The next of the legal layouts that lower, cheapest first, each once but for names of axes and rules without
        effect; None where there is none, or none that costs less than the limit (seconds).

        What costs as much is neither looked for nor lowered; with a higher limit it still comes.
        """
        if self._heap is None:
            self._heap = []
            for mesh in self.meshes:
                network = self._network(mesh, ())
                if network is not None:
                    self._push(_Stream(mesh, self._layouts(mesh, network), network.bound()))
        if self._given is not None:  # what comes after it costs as much at least, and may never be asked for
            given, self._given = self._given, None
            given.passed()
            self._push(given)
        while self._heap and self._heap[0][0] < limit:
            if self.budget.over:
                self.bound = min(self.bound, self._heap[0][0])
                return None
            *_, stream = heapq.heappop(self._heap)
            candidate = stream.next
            if candidate is None:  # only bounded so far
                self._advance(stream)
                continue
            effect = candidate.effect
            if effect in self._seen:
                self._advance(stream)
                continue
            self._seen.add(effect)
            problem = self.verify(stream.mesh, candidate.rules)
            if problem is None:
                self._given = stream
                return candidate
            self.rejected.append((candidate, problem))
            cause = {name: candidate.axis_of[name] for name in problem.dims if name in candidate.axis_of}
            if problem.depends or not cause:  # other splits may lift it: what has these splits is not left out
                self._advance(stream)
            elif not set(cause) <= set(self.fixed):  # else no other layout avoids it
                self._advance(stream, cause)
        return None

    def _push(self, stream: _Stream) -> None:
        assert self._heap is not None
        # Sums of the same numbers in another order are the same: then fewer axes come first.
        cost = stream.bound if stream.next is None else float(f"{stream.bound:.12g}")
        heapq.heappush(self._heap, (cost, stream.next is not None, len(stream.mesh.axes), next(self._number), stream))

    def _advance(self, stream: _Stream, cause: dict[str, int] | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            if not stream.advance(cause):
                return
        self._push(stream)

    def _network(self, mesh: MeshShape, forbidden: Sequence[Mapping[str, int]]) -> MeshNetwork | None:
        network = MeshNetwork(self.costs, mesh, self._fixed_axes(mesh), forbidden)
        if network.infeasible or any(not len(vector) for vector in network.network.vectors):
            return None
        self.networks[mesh] = (len(network.network.vectors), sum(network.network.sizes))
        return network

    def _layouts(self, mesh: MeshShape,
                 network: MeshNetwork | None) -> Generator[Candidate | float, dict[str, int] | None, None]:
        """The legal layouts of a mesh shape, cheapest first, and bounds of those to come, in seconds. What is sent in
        does not lower: it is left out, with everything that has it."""
        forbidden: list[dict[str, int]] = []
        done: set[tuple[tuple[str, int], ...]] = set()
        repeated = 0
        while network is not None:
            for axis_of in self._assignments(network):
                if isinstance(axis_of, float):
                    yield axis_of
                    continue
                candidate = Candidate(self.costs.total(mesh, axis_of), mesh, axis_of)
                trimmed = self.trim(candidate)
                if self.costs.legality.problem(trimmed.axis_of, mesh.sizes) is None:
                    candidate = trimmed
                key = tuple(sorted(candidate.axis_of.items()))
                if key in done:
                    repeated += 1
                    if repeated > _REPEATED:
                        self._give_up(candidate.cost)
                        return
                    continue
                repeated = 0
                done.add(key)
                problem = self.costs.legality.problem(candidate.axis_of, mesh.sizes)
                cause: dict[str, int] | None
                if problem is None:
                    cause = yield candidate
                else:
                    self.rejected.append((candidate, problem))
                    cause = None  # where other splits may lift it, what has these splits is not left out
                    if not problem.depends:
                        cause = {name: axis for name, axis in candidate.axis_of.items() if name in problem.dims}
                        if set(cause) <= set(self.fixed):
                            return  # no other layout avoids it
                if cause and len(cause) <= 2:
                    forbidden.append(cause)
                    network = self._network(mesh, forbidden)
                    break
            else:
                return

    def _assignments(self, network: MeshNetwork) -> Iterator[dict[str, int] | float]:
        """Layouts within the memory limit, cheapest first, and bounds of those to come; the first may come twice."""
        with contextlib.suppress(InfeasibleError):
            for number, (cost, assignment) in enumerate(cheapest(network.network, self.budget)):
                axis_of = network.layout(assignment)
                if self.fits(network.mesh, axis_of):
                    yield axis_of
                elif not number:
                    # The cheapest that fits may come late in this order: it is searched for by itself, if the cheapest
                    # of all does not cost too much.
                    yield cost
                    yield from self._assignments_within_memory(network, cost)
                    return
                if number > _PATIENCE:
                    self._give_up(cost)
                    return

    def _assignments_within_memory(self, network: MeshNetwork, least: float) -> Iterator[dict[str, int] | float]:
        """As `_assignments`, where the cheapest (of cost `least`) does not fit: in the order of what they cost with a
        charge for what they hold, which is below what those cost that fit, and close to it near the limit."""
        solution = self._cheapest_within_memory(network, least)
        if solution is None:
            return
        best = network.layout(solution.assignment)
        yield best
        moment = self.costs.peak_memory(network.mesh, best)[1]
        charge = float(solution.statistics.get("multiplier", 0.0))
        charged = CostNetwork([seconds + charge * nbytes for seconds, nbytes in zip(
            network.network.vectors, network.memory_vectors(moment), strict=True)], network.network.edges)
        waiting: list[tuple[float, int, dict[str, int]]] = []
        for number, (cost, assignment) in enumerate(cheapest(charged, self.budget)):
            bound = cost - charge * self.memory_limit * (1 + _ROUNDING)
            while waiting and waiting[0][0] <= bound:
                yield heapq.heappop(waiting)[2]
            yield bound
            axis_of = network.layout(assignment)
            if self.fits(network.mesh, axis_of):
                heapq.heappush(waiting, (self.costs.total(network.mesh, axis_of), number, axis_of))
            if number > _PATIENCE:
                self._give_up(bound)
                break
        while waiting:
            yield heapq.heappop(waiting)[2]

    def _give_up(self, least: float) -> None:
        """Leaves layouts of a mesh shape unseen, none of which costs less than this (seconds)."""
        self.bound = min(self.bound, least)

    def fits(self, mesh: MeshShape, axis_of: Mapping[str, int]) -> bool:
        """Whether a layout is within the memory limit."""
        return math.isinf(self.memory_limit) or (
            self.costs.peak_memory(mesh, axis_of)[0] <= (1 + _ROUNDING) * self.memory_limit)

    def _cheapest_within_memory(self, network: MeshNetwork, least: float) -> Solution | None:
        """None where none fits, or is found; then `lightest` is told what the lightest needs. None costs below
        `least`."""
        memory = functools.cache(network.memory_vectors)

        def peak(assignment: Sequence[int]) -> tuple[float, int]:
            return self.costs.peak_memory(network.mesh, network.layout(assignment))

        try:
            # Half of the time, for other mesh shapes.
            found = minimise_within_peak(network.network, memory, peak, self.memory_limit,
                                         time_limit=self.budget.time_limit(0.5), patience=_SECONDS_WITHIN)
        except InfeasibleError as error:
            if not error.proven:
                self.bound = min(self.bound, least)
            with contextlib.suppress(InfeasibleError):  # not found in time
                nbytes, lightest = least_memory(network.network, memory(self.costs.fullest_moment), self.budget)
                nbytes = max(nbytes, peak(lightest)[0])
                if self.lightest is None or nbytes < self.lightest[0]:
                    self.lightest = nbytes, network.mesh, network.layout(lightest)
            return None
        if not found.optimal:
            self.bound = min(self.bound, max(found.lower_bound, least))
        return found

    def cheapest_with(self, mesh: MeshShape, dim: str, axis: int | None) -> Candidate | None:
        """The cheapest legal layout of a mesh shape with a dim on an axis (None: on none) that lowers and is within the
        memory limit, without needless rules."""
        fixed = {**self.fixed, dim: None if axis is None else mesh.names[axis]}
        return Search(self.costs, [mesh], fixed, self.memory_limit, self.verify).next_below(math.inf)

    def trim(self, candidate: Candidate) -> Candidate:
        """The same layout without the rules that change nothing."""
        axis_of = dict(candidate.axis_of)
        needed = {*self.fixed, *self.costs.legality.shards, *itertools.chain(*self.costs.legality.together)}
        for name in sorted(axis_of):
            if name in needed:
                continue
            without = {other: axis for other, axis in axis_of.items() if other != name}
            cost = self.costs.total(candidate.mesh, without)
            if abs(cost - candidate.cost) <= 1e-12 * candidate.cost and self.fits(candidate.mesh, without):
                axis_of = without
        order = {name: number for number, name in enumerate(self.costs.legality.sizes)}
        axis_of = dict(sorted(axis_of.items(), key=lambda item: (item[1], order.get(item[0], 0))))
        return Candidate(self.costs.total(candidate.mesh, axis_of), candidate.mesh, axis_of)
