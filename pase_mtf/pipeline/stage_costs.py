"""What a stage costs a microbatch at best: the exact search for some blocks of layers on a group of devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.compute import PARTS
from pase_mtf.cost.memory import MemoryModel
from pase_mtf.cost.signature import layer_signature
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.pipeline.blocks import Blocks, transfer
from pase_mtf.pipeline.prices import StagePrices
from pase_mtf.pipeline.stage_memory import StageMemory
from pase_mtf.search import Solution, solve
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.peak import minimise_within_peak
from pase_mtf.simulator.stages import gradient_seconds, nodes_by_phase
from pase_mtf.simulator.transfers import link_level

__all__ = ["Quickest", "StageChoice", "StageCosts"]

_KERNELS = [PARTS.index(phase) for phase in PHASES]
_OF_UPDATE = [PARTS.index(name) for name in ("update", "all-reduce update", "resharding update")]


class StageChoice(NamedTuple):
    """The best strategy of a stage.

    Attributes:
      seconds: of a microbatch, its share of the update and what the stage receives among it; inf where none keeps to
        the memory, or none was found that does.
      configurations: per layer.
      proven: whether no other takes less, or none keeps to the memory.
      lower_bound: seconds that none takes less than, without what the stage receives; inf where none keeps to the
        memory.
    """

    seconds: float
    configurations: tuple[Configuration, ...]
    proven: bool = True
    lower_bound: float = 0.0


class Quickest(NamedTuple):
    """Seconds that a stage takes at least when it is simulated by itself.

    Attributes:
      forward: a microbatch.
      both: a microbatch, forward and backward.
      whole: the same and the update.
    """

    forward: float
    both: float
    whole: float


_SECONDS = 1.0
"""Of the search for one stage within a limit of memory."""


class _Found(NamedTuple):
    """What a search found.

    Attributes:
      solution: None: nothing.
      lower_bound: that nothing costs less than; inf: there is nothing.
      proven: whether nothing costs less than the solution, or there is nothing.
    """

    solution: Solution | None
    lower_bound: float
    proven: bool


class _Group:
    """Prices on so many devices, of a microbatch."""

    def __init__(self, blocks: Blocks, prices: StagePrices, devices: int, microbatches: int) -> None:
        priced = prices.group(devices)
        self.configurations = priced.configurations
        vectors: dict[int, np.ndarray] = {}
        kernels: dict[int, np.ndarray] = {}
        for layer, parts, gradients in zip(blocks.graph.layers, priced.parts, gradient_seconds(priced), strict=True):
            if id(parts) not in vectors:
                nodes = nodes_by_phase(layer_signature(layer))
                share = nodes[PHASES[-1]] / max(1, sum(nodes.values()))
                once = parts[_OF_UPDATE].sum(axis=0) + share * parts[PARTS.index("overhead")] + gradients
                vectors[id(parts)] = parts.sum(axis=0) - once * (1.0 - 1.0 / microbatches)
                overhead = np.array([nodes[phase] for phase in PHASES]) / max(1, sum(nodes.values()))
                kernels[id(parts)] = np.cumsum(parts[_KERNELS] + np.outer(overhead, parts[PARTS.index("overhead")]),
                                               axis=0).min(axis=1)
        self._vectors = [vectors[id(parts)] for parts in priced.parts]
        self._upto = np.cumsum([np.zeros(len(PHASES)), *(kernels[id(parts)] for parts in priced.parts)], axis=0)
        self._edges = _edges(priced, microbatches)
        self._ends = np.array([(edge.source, edge.target) for edge in self._edges], np.int64).reshape(-1, 2)

    def _within(self, begin: int, end: int) -> Iterator[NetworkEdge]:
        """The edges between some layers that are counted from 0."""
        for number in np.flatnonzero((begin <= self._ends).all(axis=1) & (self._ends < end).all(axis=1)).tolist():
            edge = self._edges[number]
            yield NetworkEdge(edge.source - begin, edge.target - begin, edge.matrix, edge.rows, edge.columns)

    def network(self, begin: int, end: int) -> CostNetwork:
        """What some layers cost a microbatch."""
        return CostNetwork(self._vectors[begin:end], list(self._within(begin, end)))

    def kernels(self, begin: int, end: int) -> np.ndarray:
        """Seconds of a device's kernels of some layers at least: forward, with backward, with the update."""
        found: np.ndarray = self._upto[end] - self._upto[begin]
        return found

    def key(self, begin: int, end: int) -> Hashable:
        """Layers that cost alike have it in common."""
        # All arrays live as long as their group does.
        return (*(id(vector) for vector in self._vectors[begin:end]),
                *((edge.source, edge.target, id(edge.matrix), id(edge.rows), id(edge.columns))
                  for edge in self._within(begin, end)))


def _edges(priced: PricedNetwork, microbatches: int) -> list[NetworkEdge]:
    """The edges of a microbatch that cost anything; what moves for the update moves once a step."""
    scaled: dict[int, np.ndarray] = {}
    found = []
    for edge, matrix in zip(priced.graph.edges, priced.edge_matrices, strict=True):
        key = id(matrix.matrix)
        if edge.phase == PHASES[-1]:
            if key not in scaled:
                scaled[key] = matrix.matrix / microbatches
            matrix = dataclasses.replace(matrix, matrix=scaled[key])
        if matrix.matrix.any():
            found.append(matrix)
    return found


class StageCosts:
    """Searches the strategies of stages; blocks that are alike are searched once.

    Attributes:
      searched: how many exact searches were run, of blocks and of stages.
      pairs: of how many stages on groups it was asked what they take at least.
      optimal: whether all that was found is proven: to be optimal, or that nothing fits.
    """

    def __init__(self, blocks: Blocks, prices: StagePrices, microbatches: int, memory: StageMemory | None = None,
                 memory_limit: float | None = None) -> None:
        """Has searched nothing.

        Args:
          blocks: that stages consist of, of one microbatch.
          prices: of their graph.
          microbatches: K.
          memory: of the stages of the graph; needed where there is a limit.
          memory_limit: bytes that a device may hold; None: any.
        """
        self._blocks, self._prices, self._microbatches = blocks, prices, microbatches
        self._memory, self._limit = memory, math.inf if memory_limit is None or memory is None else memory_limit
        self._groups: dict[int, _Group] = {}
        self._found: dict[Hashable, _Found] = {}
        self.searched, self.optimal = 0, True
        self._asked: set[tuple[int, int, int]] = set()
        self._within, self._of_block = functools.cache(self._kept), functools.cache(self._least_of_block)

    @property
    def pairs(self) -> int:
        """Of how many stages on groups it was asked what they take at least; of how many follow them is no matter."""
        return len(self._asked)

    def least(self, first: int, stop: int, devices: int) -> float:
        """Seconds that no strategy of a stage takes less than, whatever it holds: those of its blocks, each by itself.

        Args:
          first, stop, devices: as of `best`.
        """
        self._asked.add((first, stop, devices))
        return sum(self._of_block(block, devices) for block in range(first, stop)) + self._received(
            *self._layers(first, stop), devices)

    def quickest(self, first: int, stop: int, devices: int) -> Quickest:
        """Seconds that no strategy of a stage takes less than when it is simulated.

        Where devices share cores a simulation adds up all that is priced, of K microbatches what `least` knows.

        Args:
          first, stop, devices: as of `best`.
        """
        if self._prices.machine.shared_cores:
            seconds = sum(self._of_block(block, devices) for block in range(first, stop))
            return Quickest(seconds, seconds, seconds)
        return Quickest(*self._group(devices).kernels(*self._layers(first, stop)).tolist())

    def best(self, first: int, stop: int, devices: int, in_flight: int) -> StageChoice:
        """The cheapest strategy of a stage.

        Args:
          first, stop: its blocks, the last excluded.
          devices: of its group.
          in_flight: of how many microbatches it keeps the activations.
        """
        begin, end = self._layers(first, stop)
        if self._memory is None or math.isinf(self._limit):
            found = self._free(begin, end, devices)
        else:
            found = self._within(self._memory.model(begin, end, in_flight), begin, end, devices)
        if found.solution is None:
            return StageChoice(math.inf, (), found.proven, found.lower_bound)
        offered = self._group(devices).configurations[begin:end]
        return StageChoice(found.solution.cost + self._received(begin, end, devices), tuple(
            choices[choice] for choices, choice in zip(offered, found.solution.assignment, strict=True)), found.proven,
            found.lower_bound)

    def least_memory(self, first: int, stop: int, devices: int, in_flight: int) -> float:
        """Bytes that every strategy of a stage holds at least at one of two moments: that at which it holds most while
        nothing is split, and that at which the lightest does that there is for it; 0 where no memory was given.

        Args:
          first, stop, devices, in_flight: as of `best`.
        """
        if self._memory is None:
            return 0.0
        begin, end = self._layers(first, stop)
        model, offered = self._memory.model(begin, end, in_flight), self._group(devices).configurations[begin:end]
        least, moment = 0.0, model.fullest
        for _ in range(2):
            held = [model.layer(number, choices, moment) for number, choices in enumerate(offered)]
            least = max(least, math.fsum(float(vector.min()) for vector in held))
            lightest = [choices[int(vector.argmin())] for choices, vector in zip(offered, held, strict=True)]
            moment = model.peak(lightest)[1]
        return least

    def _layers(self, first: int, stop: int) -> tuple[int, int]:
        return self._blocks.starts[first], self._blocks.starts[stop]

    def _group(self, devices: int) -> _Group:
        if devices not in self._groups:
            self._groups[devices] = _Group(self._blocks, self._prices, devices, self._microbatches)
        return self._groups[devices]

    def _least_of_block(self, block: int, devices: int) -> float:
        """Seconds that no strategy of a block takes less than."""
        return self._free(*self._layers(block, block + 1), devices).lower_bound

    def _free(self, begin: int, end: int, devices: int) -> _Found:
        """The best strategy of some layers, whatever it holds."""
        group = self._group(devices)
        key = group.key(begin, end)
        if key not in self._found:
            self._found[key] = self._searched(lambda: solve(group.network(begin, end), certificate=False))
        return self._found[key]

    def _kept(self, model: MemoryModel, begin: int, end: int, devices: int) -> _Found:
        """The best strategy of some layers that keeps to the limit."""
        group = self._group(devices)
        offered = group.configurations[begin:end]

        def peak(assignment: Sequence[int]) -> tuple[float, int]:
            parts, moment = model.peak([choices[choice] for choices, choice in zip(offered, assignment, strict=True)])
            return sum(parts.values()), moment

        @functools.cache
        def memory(moment: int) -> tuple[np.ndarray, ...]:
            return tuple(model.layer(number, choices, moment) for number, choices in enumerate(offered))

        return self._searched(lambda: minimise_within_peak(
            group.network(begin, end), memory, peak, self._limit, time_limit=_SECONDS, patience=0.0,
            certificate=False))

    def _searched(self, search: Callable[[], Solution]) -> _Found:
        """What a search finds; of costs nothing is below 0, whatever it proves."""
        self.searched += 1
        try:
            solution = search()
            found = _Found(solution, max(0.0, solution.lower_bound), solution.optimal)
        except InfeasibleError as error:
            found = _Found(None, max(0.0, error.lower_bound), error.proven)
        self.optimal &= found.proven
        return found

    def _received(self, begin: int, end: int, devices: int) -> float:
        """Seconds in which what other stages made arrives: every device takes its share, over the link to the next
        group."""
        links = self._prices.machine.links
        link = links[link_level(links, devices - 1, devices)]
        arriving = {transfer(edge): edge for edge in self._blocks.graph.edges
                    if edge.phase != PHASES[-1] and begin <= edge.target < end and not begin <= edge.source < end}
        return sum(edge.trips * (math.prod(edge.shape) * edge.itemsize / devices / link.bandwidth + link.latency)
                   for edge in arriving.values())
