"""What a stage costs a microbatch at best: the exact search for every block of layers on every group of devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.compute import PARTS
from pase_mtf.cost.memory import MEMORY_PARTS, layer_memory
from pase_mtf.cost.signature import PHASES, layer_signature
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.pipeline.blocks import Blocks
from pase_mtf.pipeline.prices import StagePrices
from pase_mtf.search import solve
from pase_mtf.search.memory import minimise_within
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.simulator.stages import gradient_seconds, nodes_by_phase
from pase_mtf.simulator.transfers import link_level

__all__ = ["StageChoice", "StageCosts"]

_OF_UPDATE = [PARTS.index(name) for name in ("update", "all-reduce update", "resharding update")]
_ACTIVATIONS = MEMORY_PARTS.index("activations")


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
        self._memory: dict[int, np.ndarray] = {}

    def memory(self, layer: int) -> np.ndarray:
        """float64 [2, K]: bytes that are there once, and those of every microbatch in flight."""
        if layer not in self._memory:
            found = layer_memory(self.priced.graph.layers[layer], self.configurations[layer])
            kept = found[_ACTIVATIONS]
            self._memory[layer] = np.stack((found.sum(axis=0) - kept, kept))
        return self._memory[layer]


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

    def __init__(self, blocks: Blocks, prices: StagePrices, microbatches: int,
                 memory_limit: float | None = None) -> None:
        """Has searched nothing.

        Args:
          blocks: that stages consist of, of one microbatch.
          prices: of their graph.
          microbatches: K.
          memory_limit: bytes that a device may hold; None: any.
        """
        self._blocks, self._prices, self._microbatches, self._limit = blocks, prices, microbatches, memory_limit
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
        seconds, assignment = self._searched(group, begin, end, None)
        if self._limit is not None and assignment and self._bytes(group, begin, assignment, in_flight) > self._limit:
            seconds, assignment = self._searched(group, begin, end, in_flight)
        if not assignment:
            return _NONE
        chosen = tuple(group.configurations[begin + number][choice] for number, choice in enumerate(assignment))
        return StageChoice(seconds + self._received(begin, end, devices), chosen)

    def _bytes(self, group: _Group, begin: int, assignment: tuple[int, ...], in_flight: int) -> float:
        return sum(float(once[choice] + in_flight * each[choice]) for (once, each), choice in (
            (group.memory(begin + number), choice) for number, choice in enumerate(assignment)))

    def _searched(self, group: _Group, begin: int, end: int, in_flight: int | None) -> tuple[float, tuple[int, ...]]:
        """(seconds, assignment) of the best strategy of some layers; in_flight: within the limit of memory."""
        edges = [edge for edge in group.edges if begin <= edge.source < end and begin <= edge.target < end]
        memory = None if in_flight is None else [
            once + in_flight * each for once, each in map(group.memory, range(begin, end))]
        # All arrays live as long as their group does.
        key = (*(id(vector) for vector in group.vectors[begin:end]),
               *((edge.source - begin, edge.target - begin, id(edge.matrix), id(edge.rows), id(edge.columns))
                 for edge in edges), *(() if memory is None else (vector.tobytes() for vector in memory)))
        if key not in self._found:
            network = CostNetwork(group.vectors[begin:end], [
                dataclasses.replace(edge, source=edge.source - begin, target=edge.target - begin)
                for edge in edges if edge.matrix.any()])
            self.searched += 1
            try:
                found = (solve(network, certificate=False) if memory is None else
                         minimise_within(network, memory, self._limit or 0.0, time_limit=_SECONDS))
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
