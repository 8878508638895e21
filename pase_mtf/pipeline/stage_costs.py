"""What a stage costs a microbatch at best: the exact search for every block of layers on every group of devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.compute import PARTS
from pase_mtf.cost.signature import PHASES, layer_signature
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.pipeline.blocks import Blocks
from pase_mtf.pipeline.prices import StagePrices
from pase_mtf.pipeline.stage_memory import StageMemory
from pase_mtf.search import Solution, solve
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.peak import minimise_within_peak
from pase_mtf.simulator.stages import gradient_seconds, nodes_by_phase
from pase_mtf.simulator.transfers import link_level

__all__ = ["StageChoice", "StageCosts"]

_OF_UPDATE = [PARTS.index(name) for name in ("update", "all-reduce update", "resharding update")]


class StageChoice(NamedTuple):
    """The best strategy of a stage.

    Attributes:
      seconds: of a microbatch, its share of the update and what the stage receives among it; inf where none keeps to
        the memory.
      configurations: per layer.
    """

    seconds: float
    configurations: tuple[Configuration, ...]


_SECONDS = 1.0
"""Of the search for one stage within a limit of memory."""

_NONE = StageChoice(math.inf, ())


class _Group:
    """Prices on so many devices, of a microbatch."""

    def __init__(self, blocks: Blocks, prices: StagePrices, devices: int, microbatches: int) -> None:
        priced = prices.group(devices)
        self.configurations = priced.configurations
        vectors: dict[int, np.ndarray] = {}
        for layer, parts, gradients in zip(blocks.graph.layers, priced.parts, gradient_seconds(priced), strict=True):
            if id(parts) not in vectors:
                nodes = nodes_by_phase(layer_signature(layer))
                share = nodes[PHASES[-1]] / max(1, sum(nodes.values()))
                once = parts[_OF_UPDATE].sum(axis=0) + share * parts[PARTS.index("overhead")] + gradients
                vectors[id(parts)] = parts.sum(axis=0) - once * (1.0 - 1.0 / microbatches)
        self.vectors = [vectors[id(parts)] for parts in priced.parts]
        self.edges = _edges(priced, microbatches)
        self.priced = priced


def _edges(priced: PricedNetwork, microbatches: int) -> list[NetworkEdge]:
    """The edges of a microbatch; what moves for the update moves once a step."""
    scaled: dict[int, np.ndarray] = {}
    found = []
    for edge, matrix in zip(priced.graph.edges, priced.edge_matrices, strict=True):
        if edge.phase == PHASES[-1]:
            key = id(matrix.matrix)
            if key not in scaled:
                scaled[key] = matrix.matrix / microbatches
            matrix = dataclasses.replace(matrix, matrix=scaled[key])
        found.append(matrix)
    return found


class StageCosts:
    """Searches the strategies of stages; stages that are alike are searched once.

    Attributes:
      searched: how many exact searches were run.
      pairs: how many stages on groups were asked for.
      optimal: whether all are proven optimal.
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
        self._found: dict[Hashable, tuple[float, tuple[int, ...]]] = {}
        self.searched, self.pairs, self.optimal = 0, 0, True

    def best(self, first: int, stop: int, devices: int, in_flight: int) -> StageChoice:
        """The cheapest strategy of a stage.

        Args:
          first, stop: its blocks, the last excluded.
          devices: of its group.
          in_flight: of how many microbatches it keeps the activations.
        """
        begin, end = self._blocks.starts[first], self._blocks.starts[stop]
        if devices not in self._groups:
            self._groups[devices] = _Group(self._blocks, self._prices, devices, self._microbatches)
        group = self._groups[devices]
        self.pairs += 1
        seconds, assignment = self._searched(group, begin, end, in_flight)
        if not assignment:
            return _NONE
        chosen = tuple(group.configurations[begin + number][choice] for number, choice in enumerate(assignment))
        return StageChoice(seconds + self._received(begin, end, devices), chosen)

    def _searched(self, group: _Group, begin: int, end: int, in_flight: int) -> tuple[float, tuple[int, ...]]:
        """(seconds, assignment) of the best strategy of some layers that keeps to the limit of memory."""
        edges = [edge for edge in group.edges if begin <= edge.source < end and begin <= edge.target < end]
        # All arrays live as long as their group does.
        key = (*(id(vector) for vector in group.vectors[begin:end]),
               *((edge.source - begin, edge.target - begin, id(edge.matrix), id(edge.rows), id(edge.columns))
                 for edge in edges))
        network = CostNetwork(group.vectors[begin:end], [
            dataclasses.replace(edge, source=edge.source - begin, target=edge.target - begin)
            for edge in edges if edge.matrix.any()])
        found = self._once(key, lambda: solve(network, certificate=False))
        if self._memory is None or math.isinf(self._limit):
            return found
        model, offered = self._memory.model(begin, end, in_flight), group.configurations[begin:end]

        def peak(assignment: Sequence[int]) -> tuple[float, int]:
            parts, moment = model.peak([choices[choice] for choices, choice in zip(offered, assignment, strict=True)])
            return sum(parts.values()), moment

        @functools.cache
        def memory(moment: int) -> tuple[np.ndarray, ...]:
            return tuple(model.layer(number, choices, moment) for number, choices in enumerate(offered))

        if not found[1] or peak(found[1])[0] <= self._limit:
            return found
        # Stages that cost alike, and hold alike when most is there, are taken to be alike.
        key = (*key, *(vector.tobytes() for vector in memory(model.fullest)))
        found = self._once(key, lambda: minimise_within_peak(
            network, memory, peak, self._limit, time_limit=_SECONDS, certificate=False))
        return found if found[1] and peak(found[1])[0] <= self._limit else (math.inf, ())

    def _once(self, key: Hashable, search: Callable[[], Solution]) -> tuple[float, tuple[int, ...]]:
        """What a search finds, or has found; (inf, ()): nothing that fits."""
        if key not in self._found:
            self.searched += 1
            try:
                found = search()
                self.optimal &= found.optimal
                self._found[key] = found.cost, tuple(found.assignment)
            except InfeasibleError:
                self._found[key] = math.inf, ()
        return self._found[key]

    def _received(self, begin: int, end: int, devices: int) -> float:
        """Seconds in which what other stages made arrives: every device takes its share, over the link to the next
        group."""
        links = self._prices.machine.links
        link = links[link_level(links, devices - 1, devices)]
        arriving = [edge for edge in self._blocks.graph.edges
                    if edge.phase != PHASES[-1] and begin <= edge.target < end and not begin <= edge.source < end]
        return sum(edge.trips * (math.prod(edge.shape) * edge.itemsize / devices / link.bandwidth + link.latency)
                   for edge in arriving)
