"""One training step of a strategy as tasks: kernels, all-reduces, and what devices send to each other.

A device has a stream for its kernels, and per level of the links a port that sends and one that receives. What moves
between two devices takes the port of either, an all-reduce those of all of its group, of the levels that it crosses:
whoever shares a link waits. Within a layer a phase is a task of kernels per device, all-reduces, and moves. Those of
weights' gradients wait for the kernels only, and only the update waits for them: they overlap the backward pass. Where
the devices share cores everything takes the cores, one after the other. A sum that one other layer alone needs is made
on the edge to it: the devices send each other pieces, as its all-reduce. What is sent is sliced out before, added up
and concatenated after, among the kernels of the devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.slicing import copying
from pase_mtf.cost.tables import ConfigurationTable
from pase_mtf.graph.computation_graph import Edge
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.graph.looked_up import LookedUp, summed_as_rows
from pase_mtf.graph.partition import Partition, groups, scattered_sum, with_partial_sums
from pase_mtf.simulator.slots import KINDS, Copies, Slot, SlotBuilder, transfer_slot
from pase_mtf.simulator.stages import LayerStages, Stages, first_operations
from pase_mtf.simulator.summing import SummingTasks
from pase_mtf.simulator.transfers import Transfers, link_level, transfers

__all__ = ["Step"]

_KERNELS, _SUM, _GRADIENT, _MOVE, _TRANSFER, _COPYING = range(len(KINDS))


class _Exchange(NamedTuple):
    """What devices send each other on an edge.

    Attributes:
      kind: of the tasks, index into `KINDS`.
      source, target: partitions of a tensor.
      shape, itemsize: its unsplit size, bytes per element.
      parts: of so many dims, the last ones, the elements are added up.
    """

    kind: int
    source: Partition
    target: Partition
    shape: tuple[int, ...]
    itemsize: int
    parts: int = 0


class Step:
    """Makes the tasks of a step under any strategy of a priced network; what layers and edges need is made once."""

    def __init__(self, priced: PricedNetwork, *, gradients: bool = True) -> None:
        """Knows no task yet.

        Args:
          priced: the layers, their configurations, the machine; in seconds.
          gradients: whether they are summed over devices.
        """
        self._priced, self._graph, self._machine = priced, priced.graph, priced.machine
        self._stages = Stages(priced, gradients=gradients)
        self._streams = np.array([self._stream(device) for device in range(priced.devices)])
        # The forward pass goes from layer to layer: weights may be made long before what reads them. Where operations
        # have no numbers of their own, a gradient goes from later layers to earlier ones.
        self._positions = [[(0 if phase == "forward" else first, -number if phase == "backward" else number)
                            for phase, first in zip(PHASES, first_operations(layer), strict=True)]
                           for number, layer in enumerate(priced.graph.layers)]
        self._layers: dict[tuple[int, int], Slot] = {}
        self._alike: dict[tuple[int, int], Slot] = {}
        self._group_ports: dict[tuple[int, ...], list[int]] = {}
        self._edges: dict[tuple[int, int, int], Slot] = {}
        self._edges_of: list[list[int]] = [[] for _ in priced.graph.layers]
        for number, edge in enumerate(priced.graph.edges):
            for layer in {edge.source, edge.target}:
                self._edges_of[layer].append(number)
        self._moved: dict[tuple[Partition, Partition, tuple[int, ...]], Transfers] = {}

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
        """All ports of a group, of the levels that join any of its members."""
        key = tuple(group)
        if key not in self._group_ports:
            # Of devices in ascending order neighbours tell: one of every node leaves the links within nodes to others.
            levels = {link_level(self._machine.links, *pair) for pair in itertools.pairwise(key)} or {0}
            self._group_ports[key] = sorted({port for level in levels for port in self._ports(level, group, group)})
        return self._group_ports[key]

    # -- layers ------------------------------------------------------------------------------------------------------
    def _layer(self, layer: int, choice: int) -> Slot:
        slot = self._layers.get((layer, choice))
        if slot is None:
            key = self._stages.alike(layer), choice
            if key not in self._alike:
                self._alike[key] = self._layer_slot(layer, self._stages.of(layer, choice))
            slot = self._layers[layer, choice] = self._alike[key].of_layer(layer)
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
                for group, seconds in ((group, seconds) for members, seconds in sums for group in members):
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
        phase, reads = PHASES.index(edge.phase), self._reads(edge)
        source, target = self._layer(edge.source, source_choice), self._layer(edge.target, target_choice)
        parts = self._parts(edge, source_choice)
        if parts and not self._added_as_parts(edge, parts, source_choice, target_choice):
            return self._summing_slot(edge, source_choice, target_choice, parts).build(
                None if reads is None else target.first[reads].tolist())
        exchange = _Exchange(_TRANSFER, *self._ends_of(edge, source_choice, target_choice), edge.shape, edge.itemsize)
        moved = self._moves(exchange)
        seconds = self._seconds(moved, edge, self._priced.edge_cost(number, source_choice, target_choice),
                                edge.itemsize)
        return transfer_slot(moved, seconds, self._ports_of_transfers(moved), (_TRANSFER, phase, edge.target),
                             source.last[phase], None if reads is None else target.first[reads],
                             Copies(_COPYING, *self._copying(exchange, edge.trips), self._streams))

    def _ports_of_transfers(self, moved: Transfers) -> np.ndarray:
        """What each needs all of at once, int64 [N, ...]."""
        if self._machine.shared_cores:
            return np.zeros((len(moved.sender), 1), np.int64)
        first = self._priced.devices * (1 + 2 * moved.level)
        return np.stack((first + moved.sender, first + self._priced.devices + moved.receiver), axis=1)

    def _parts(self, edge: Edge, source_choice: int) -> tuple[tuple[int, int], ...]:
        """(size, stride) of what leaves the tensor of an edge as partial sums that are summed on the way."""
        if self._machine.shared_cores or not edge.pending:
            return ()
        held = self._priced.configurations[edge.source][source_choice].placed(
            self._graph.layers[edge.source], tuple(dict.fromkeys(edge.pending)))
        return tuple(split for split in held.shards if split[0] > 1)

    def _added_as_parts(self, edge: Edge, parts: tuple[tuple[int, int], ...], source_choice: int, target_choice: int,
                        ) -> bool:
        """Whether the target adds the parts to the same parts of its own."""
        source, target = self._ends_of(edge, source_choice, target_choice)
        held = self._priced.configurations[edge.target][target_choice].placed(
            self._graph.layers[edge.target], edge.added_to)
        return source == target and sorted(parts) == sorted(split for split in held.shards if split[0] > 1)

    def _summing_slot(self, edge: Edge, source_choice: int, target_choice: int,
                      parts: tuple[tuple[int, int], ...]) -> SummingTasks:
        """Rows and a move, a reduce-scatter, or an all-reduce and a move: what the lowering makes of them."""
        source, target = self._ends_of(edge, source_choice, target_choice)
        phase = PHASES.index(edge.phase)
        tasks = SummingTasks(self._layer(edge.source, source_choice).last[phase].tolist(), (phase, edge.target))
        sums = scattered_sum(source, target, edge.shape)
        on_the_way = _Exchange(_TRANSFER, source, target, edge.shape, edge.itemsize)
        if edge.looked_up and summed_as_rows(edge.looked_up, source, parts, target, edge.shape):
            exchanges = [*self._rows(edge, edge.looked_up, source, parts), on_the_way]
        elif sums is None:
            table = ConfigurationTable(np.array([len(source.devices)]), *np.array([parts], np.int64).transpose(2, 0, 1))
            nbytes = np.array([math.prod(source.block_shape(edge.shape)) * edge.itemsize])
            waiting = self._stages.waiting(edge) * nbytes / max(1, math.prod(edge.shape) * edge.itemsize)
            seconds = edge.trips * float(allreduce_seconds(
                nbytes, group_sizes(table, range(len(parts)), self._machine), table.devices, self._machine,
                waiting=waiting if source == target else 0.0, itemsize=edge.itemsize)[0])
            for group in groups(len(source.devices), parts):
                tasks.reduce(_SUM, group, seconds, self._ports_of_group(group))
            exchanges = [on_the_way]
        else:
            held = with_partial_sums(source, parts)
            shape = (*edge.shape, *(count for count, _ in held.shards[len(edge.shape):]))
            needed = Partition(sums.devices, (*sums.shards, *[(1, 1)] * len(parts)))
            exchanges = [_Exchange(_SUM, held, needed, shape, edge.itemsize, len(parts)),
                         _Exchange(_SUM, sums, target, edge.shape, edge.itemsize)]
        for exchange in exchanges:
            moved, (slicing, joining) = self._moves(exchange), self._copying(exchange, edge.trips)
            tasks.copy(_COPYING, slicing, self._streams.tolist())
            tasks.send(exchange.kind, moved, self._seconds(moved, edge, 0.0, exchange.itemsize),
                       self._ports_of_transfers(moved))
            tasks.copy(_COPYING, joining, self._streams.tolist())
        return tasks

    def _rows(self, edge: Edge, looked_up: LookedUp, source: Partition, parts: tuple[tuple[int, int], ...],
              ) -> list[_Exchange]:
        """What devices give each other of rows, and of their indices."""
        row = [dim for dim in range(len(edge.shape)) if dim != looked_up.dim]
        # However many dims the indices have: those that are split, with as many indices among them.
        sizes = [count for count, _ in parts]
        sizes[0] = looked_up.indices // math.prod(sizes[1:])
        found = []
        for dims, itemsize in ((row, edge.itemsize), ([], looked_up.itemsize)):
            shape = (*sizes, *(edge.shape[dim] for dim in dims))
            shards = tuple(source.shards[dim] for dim in dims)
            held, needed = (Partition(source.devices, (*ends, *shards)) for ends in (parts, ((1, 1),) * len(parts)))
            found.append(_Exchange(_SUM, held, needed, shape, itemsize))
        return found

    def _ends_of(self, edge: Edge, source_choice: int, target_choice: int) -> tuple[Partition, Partition]:
        """How its tensor is held at either end."""
        source, target = (self._priced.configurations[layer][choice].placed(self._graph.layers[layer], dims)
                          for layer, choice, dims in ((edge.source, source_choice, edge.source_dims),
                                                      (edge.target, target_choice, edge.target_dims)))
        return source, target

    def _moves(self, exchange: _Exchange) -> Transfers:
        key = exchange.source, exchange.target, exchange.shape
        if key not in self._moved:
            self._moved[key] = transfers(*key, self._machine.links)
        return self._moved[key]

    def _copying(self, exchange: _Exchange, trips: int) -> tuple[float, float]:
        """Seconds in which a device slices what it sends, and puts together what it receives. Where devices share cores
        the price of the move has that."""
        if self._machine.shared_cores:
            return 0.0, 0.0
        source, target = (Sharded(np.array([len(end.devices)]), *np.array([end.shards], np.int64).reshape(
            1, -1, 2).transpose(2, 0, 1)) for end in (exchange.source, exchange.target))
        found = copying(source, target, exchange.parts).seconds(
            float(math.prod(exchange.shape) * exchange.itemsize), self._machine)
        before, after = (trips * float(seconds[0, 0]) for seconds in found)
        return before, after

    def _seconds(self, moved: Transfers, edge: Edge, cost: float, itemsize: int) -> np.ndarray:
        """What each transfer of an edge takes; `cost` is the price of all of them, where devices share cores."""
        sent = moved.elements > 0
        if self._machine.shared_cores:
            # Blocks may have to be sliced where nothing is sent.
            busy = sent if sent.any() else np.ones(len(sent), bool)
            return np.where(busy, cost / max(1, busy.sum()), 0.0)
        bandwidth, latency = (np.array([getattr(link, name) for link in self._machine.links])[moved.level]
                              for name in ("bandwidth", "latency"))
        seconds: np.ndarray = np.where(sent, edge.trips * (moved.elements * itemsize / bandwidth
                                                           + moved.messages * latency), 0.0)
        return seconds

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
