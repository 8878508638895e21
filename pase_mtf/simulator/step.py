"""One training step of a strategy as tasks: kernels, all-reduces, and what devices send to each other.

A device has a stream for its kernels, and per level of the links a port that sends and one that receives. What moves
between two devices takes the port of either, an all-reduce those of all of its group: whoever shares a link waits for
it. Within a layer a phase is one task of kernels per device, then its all-reduces, then what moves in it. Those of
weights' gradients wait for the kernels only, and only the update waits for them: they overlap the backward pass. Where
the devices share cores everything takes the cores, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import PHASES
from pase_mtf.graph.computation_graph import Edge
from pase_mtf.graph.partition import Partition
from pase_mtf.simulator.slots import KINDS, Slot, SlotBuilder
from pase_mtf.simulator.stages import LayerStages, first_operations, layer_stages
from pase_mtf.simulator.transfers import Transfer, link_level, transfers

__all__ = ["Step"]

_KERNELS, _SUM, _GRADIENT, _MOVE, _TRANSFER = range(len(KINDS))


class Step:
    """Makes the tasks of a step under any strategy of a priced network; what layers and edges need is made once."""

    def __init__(self, priced: PricedNetwork) -> None:
        """Knows no task yet.

        Args:
          priced: the layers, their configurations, the machine; in seconds.
        """
        self._priced, self._graph, self._machine = priced, priced.graph, priced.machine
        self._reshardings = Reshardings(priced.machine)
        # Where operations have no numbers of their own, a gradient goes from later layers to earlier ones.
        self._positions = [[(first, -number if phase == "backward" else number)
                            for phase, first in zip(PHASES, first_operations(layer), strict=True)]
                           for number, layer in enumerate(priced.graph.layers)]
        self._layers: dict[tuple[int, int], Slot] = {}
        self._edges: dict[tuple[int, int, int], Slot] = {}
        self._edges_of: list[list[int]] = [[] for _ in priced.graph.layers]
        for number, edge in enumerate(priced.graph.edges):
            for layer in {edge.source, edge.target}:
                self._edges_of[layer].append(number)
        self._moved: dict[tuple[Partition, Partition, tuple[int, ...]], list[Transfer]] = {}

    # -- resources ---------------------------------------------------------------------------------------------------
    @property
    def resources(self) -> int:
        """How many there are."""
        return 1 if self._machine.shared_cores else self._priced.devices * (1 + 2 * len(self._machine.links))

    def _stream(self, device: int) -> int:
        return 0 if self._machine.shared_cores else device

    def _ports(self, level: int, senders: Sequence[int], receivers: Sequence[int]) -> list[int]:
        if self._machine.shared_cores:
            return [0]
        begin = self._priced.devices * (1 + 2 * level)
        return [*(begin + device for device in senders),
                *(begin + self._priced.devices + device for device in receivers)]

    def _ports_of_group(self, group: Sequence[int]) -> list[int]:
        """All ports of a group up to the level that joins it."""
        level = link_level(self._machine.links, group[0], group[-1])
        return sorted({port for below in range(level + 1) for port in self._ports(below, group, group)})

    # -- layers ------------------------------------------------------------------------------------------------------
    def _layer(self, layer: int, choice: int) -> Slot:
        slot = self._layers.get((layer, choice))
        if slot is None:
            (stages,) = layer_stages(self._graph.layers[layer], [self._priced.configurations[layer][choice]],
                                     self._reshardings)
            slot = self._layers[layer, choice] = self._layer_slot(layer, stages)
        return slot

    def _layer_slot(self, layer: int, stages: LayerStages) -> Slot:
        slot, devices = SlotBuilder(), range(stages.devices)
        first: list[list[int]] = []
        last: list[list[int]] = []
        waits: list[list[int]] = [[] for _ in devices]
        for phase, stage in enumerate(stages.stages):
            kernels = [slot.add(stage.kernels, [self._stream(device)], [device], (_KERNELS, phase, layer, -1),
                                waits[device]) for device in devices]
            done = list(kernels)
            # Only the update waits for gradients.
            waits = [[] for _ in devices]
            for kind, sums in ((_SUM, stage.sums), (_GRADIENT, stage.gradients)):
                for group, seconds in ((group, seconds) for groups, seconds in sums for group in groups):
                    before = kernels if kind == _GRADIENT else done
                    number = slot.add(seconds, self._ports_of_group(group), group, (kind, phase, layer, -1),
                                      [before[device] for device in group])
                    for device in group:
                        if kind == _GRADIENT:
                            waits[device].append(number)
                        else:
                            done[device] = number
            if stage.moves > 0.0:
                done = [slot.add(stage.moves, self._ports_of_group(devices), devices, (_MOVE, phase, layer, -1),
                                 sorted(set(done)))] * len(devices)
            for device in devices:
                waits[device].append(done[device])
            first.append(kernels)
            last.append(done)
        return slot.build(first, last)

    # -- edges -------------------------------------------------------------------------------------------------------
    def _edge(self, number: int, source: int, target: int) -> Slot:
        edge = self._graph.edges[number]
        key = (number, source, target)
        slot = self._edges.get(key)
        if slot is None:
            slot = self._edges[key] = self._edge_slot(number, edge, source, target)
        return slot

    def _reads(self, edge: Edge) -> int | None:
        """The phase of the target layer that waits for the tensor; None: none. One that the layer's first operations of
        the same phase stand before is read by a later one."""
        phase = PHASES.index(edge.phase)
        if self._positions[edge.source][phase] < self._positions[edge.target][phase]:
            return phase
        return phase + 1 if phase + 1 < len(PHASES) else None

    def _edge_slot(self, number: int, edge: Edge, source_choice: int, target_choice: int) -> Slot:
        slot, phase, reads = SlotBuilder(), PHASES.index(edge.phase), self._reads(edge)
        source, target = self._layer(edge.source, source_choice), self._layer(edge.target, target_choice)
        begins: list[tuple[int, int]] = []
        ends: list[tuple[int, int]] = []
        direct: list[tuple[int, int]] = []
        for one, seconds in self._sent(number, edge, source_choice, target_choice):
            made = int(source.last[phase][one.sender])
            wanted = None if reads is None else int(target.first[reads][one.receiver])
            if seconds > 0.0:
                own = slot.add(seconds, self._ports(one.level, [one.sender], [one.receiver]), [one.sender],
                               (_TRANSFER, phase, edge.target, one.receiver))
                begins.append((made, own))
                if wanted is not None:
                    ends.append((own, wanted))
            elif wanted is not None:
                direct.append((made, wanted))
        return slot.build(begins=begins, ends=ends, direct=direct)

    def _sent(self, number: int, edge: Edge, source_choice: int, target_choice: int) -> list[tuple[Transfer, float]]:
        """What devices send to each other for an edge, with the seconds that it takes."""
        machine, configurations = self._machine, self._priced.configurations
        source, target = (
            configurations[layer][choice].placed(self._graph.layers[layer], dims) for layer, choice, dims in (
                (edge.source, source_choice, edge.source_dims), (edge.target, target_choice, edge.target_dims)))
        key = source, target, edge.shape
        if key not in self._moved:
            self._moved[key] = transfers(source, target, edge.shape, machine.links)
        moved = self._moved[key]
        if machine.shared_cores:
            # Blocks may have to be cut where nothing is sent.
            busy = {one for one in moved if one.elements} or set(moved)
            share = self._priced.edge_cost(number, source_choice, target_choice) / len(busy)
            return [(one, share if one in busy else 0.0) for one in moved]
        links = machine.links
        return [(one, edge.trips * (one.elements * edge.itemsize / links[one.level].bandwidth
                                    + one.messages * links[one.level].latency) if one.elements else 0.0)
                for one in moved]

    # -- a step ------------------------------------------------------------------------------------------------------
    def slots(self, assignment: Sequence[int]) -> list[Slot]:
        """The tasks of every layer, then of every edge, by the index of every layer's configuration."""
        return [*(self._layer(layer, choice) for layer, choice in enumerate(assignment)),
                *(self._edge(number, assignment[edge.source], assignment[edge.target])
                  for number, edge in enumerate(self._graph.edges))]

    def changed_slots(self, assignment: Sequence[int], layer: int) -> dict[int, Slot]:
        """Number -> slot, of those that depend on how a layer is split."""
        edges = self._graph.edges
        return {layer: self._layer(layer, assignment[layer]),
                **{len(self._graph.layers) + number: self._edge(number, assignment[edges[number].source],
                                                               assignment[edges[number].target])
                   for number in self._edges_of[layer]}}
