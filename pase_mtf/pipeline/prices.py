"""What layers of a microbatch, and what travels between its stages, take: by the rates and links of a machine, or by
kernels that are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pase_mtf.cost.build import PricedNetwork, build_network, network_of
from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.kernels import KernelSource, KnownKernels
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.slicing import copying
from pase_mtf.cost.tables import DistinctShardings
from pase_mtf.graph.computation_graph import ComputationGraph, Edge
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition
from pase_mtf.machine.kernels import Kernel
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.blocks import part_of_graph
from pase_mtf.search.network import NetworkEdge
from pase_mtf.simulator.transfers import transfers

__all__ = ["KernelPrices", "RatePrices", "StagePrices"]


class StagePrices(Protocol):
    """Prices stages of one graph."""

    @property
    def machine(self) -> Machine:
        """The devices."""

    def group(self, devices: int) -> PricedNetwork:
        """All layers on a group of so many devices, in every configuration."""

    def stage(self, first: int, stop: int, devices: int, configurations: Sequence[Configuration]) -> PricedNetwork:
        """The layers from `first` to before `stop`, in one configuration each."""

    def between(self, edge: Edge, source: Partition, target: Partition) -> float:
        """Seconds in which the tensor of an edge gets from one stage to another, each with devices of its own."""


class RatePrices:
    """Prices by the rates and links of a machine.

    Attributes:
      machine: whose.
    """

    def __init__(self, graph: ComputationGraph, machine: Machine) -> None:
        """Prices nothing yet.

        Args:
          graph: of one microbatch.
          machine: whose numbers count.
        """
        self._graph, self.machine = graph, machine
        self._reshardings = Reshardings(machine)

    def group(self, devices: int) -> PricedNetwork:
        """All layers on a group of so many devices, in every configuration."""
        return build_network(self._graph, self.machine, devices)

    def stage(self, first: int, stop: int, devices: int, configurations: Sequence[Configuration]) -> PricedNetwork:
        """The layers from `first` to before `stop`, in one configuration each."""
        return build_network(part_of_graph(self._graph, first, stop), self.machine, devices,
                             [[chosen] for chosen in configurations])

    def between(self, edge: Edge, source: Partition, target: Partition) -> float:
        """Seconds in which the tensor of an edge gets from one stage to another: of the device that sends or receives
        longest, and what is sliced for others and put together. Where devices share cores, of all that is copied."""
        ends, nbytes = (_sharded(source), _sharded(target)), float(math.prod(edge.shape) * edge.itemsize)
        if self.machine.shared_cores:
            here, there = (DistinctShardings(*end, np.zeros(1, np.int32)) for end in ends)
            return edge.trips * float(self._reshardings.seconds(
                here, there, edge.shape, edge.itemsize, elsewhere=True)[0, 0])
        before, after = copying(*ends).seconds(nbytes, self.machine)
        moved = transfers(source, target, edge.shape, self.machine.links)
        bandwidth, latency = (np.array([getattr(link, name) for link in self.machine.links])[moved.level]
                              for name in ("bandwidth", "latency"))
        seconds = edge.trips * (moved.elements * edge.itemsize / bandwidth + moved.messages * latency)
        busiest = max((float(np.bincount(devices, seconds).max(initial=0.0)) for devices in (
            moved.sender, moved.receiver) if len(devices)), default=0.0)
        return busiest + edge.trips * float(before[0, 0] + after[0, 0])


def _sharded(partition: Partition) -> Sharded:
    shards = np.array([partition.shards], np.int64).reshape(1, -1, 2).transpose(2, 0, 1)
    return Sharded(np.array([len(partition.devices)]), *shards)


class KernelPrices:
    """Prices by what kernels take on devices that share cores.

    Attributes:
      machine: the devices, at rates that no kernel beats: what nothing else is known of is estimated by them.
    """

    def __init__(self, graph: ComputationGraph, known: KnownKernels, source: KernelSource, machine: Machine,
                 price: Callable[[Kernel], float]) -> None:
        """Prices nothing yet.

        Args:
          graph: of one microbatch.
          known: which of its kernels are.
          source: tells what a move between stages runs.
          machine: see above.
          price: seconds of a kernel.
        """
        self._graph, self._known, self._source, self.machine, self._price = graph, known, source, machine, price
        self._groups: dict[int, PricedNetwork] = {}

    def group(self, devices: int) -> PricedNetwork:
        """All layers on a group of so many devices, in every configuration."""
        if devices not in self._groups:
            base = build_network(self._graph, self.machine, devices)
            self._groups[devices] = self._known.applied(base, self._price, scaled=True)
        return self._groups[devices]

    def stage(self, first: int, stop: int, devices: int, configurations: Sequence[Configuration]) -> PricedNetwork:
        """The layers from `first` to before `stop`, in one configuration each: one of those of `group`."""
        priced, part = self.group(devices), part_of_graph(self._graph, first, stop)
        chosen = [priced.index(first + number, configuration) for number, configuration in enumerate(configurations)]
        parts = tuple(priced.parts[first + number][:, [choice]] for number, choice in enumerate(chosen))
        within = (number for number, edge in enumerate(self._graph.edges)
                  if first <= edge.source < stop and first <= edge.target < stop)
        edges = tuple(NetworkEdge(edge.source, edge.target, np.array([[priced.edge_cost(
            number, chosen[edge.source], chosen[edge.target])]]), np.zeros(1, np.int64), np.zeros(1, np.int64))
            for number, edge in zip(within, part.edges, strict=True))
        return PricedNetwork(part, self.machine, devices, priced.model, tuple((one,) for one in configurations),
                             network_of(part, parts, edges), priced.part_names, parts, edges)

    def between(self, edge: Edge, source: Partition, target: Partition) -> float:
        """Seconds in which the tensor of an edge gets from one stage to another: of all devices, which share cores."""
        moved = self._source.move(source, target, edge.shape, edge.itemsize)
        return edge.trips * math.fsum(self._price(kernel) * times for kernel, times in moved.items())
