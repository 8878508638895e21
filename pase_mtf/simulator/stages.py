"""What a layer does in each phase: its kernels, then the all-reduces of its groups, and what moves within it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.cost.build import PricedNetwork
from pase_mtf.cost.compute import PARTS, sum_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import OperationSignature, counted, layer_signature, waiting_bytes
from pase_mtf.cost.tables import ConfigurationTable, dim_positions
from pase_mtf.graph.computation_graph import ADDED, Edge, Layer
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.graph.partition import groups

__all__ = ["LayerStages", "Stage", "Stages", "first_operations", "gradient_seconds", "nodes_by_phase"]

_OVERHEAD = PARTS.index("overhead")
_ROWS = tuple(tuple(PARTS.index(name) for name in (phase, f"all-reduce {phase}", f"resharding {phase}"))
              for phase in PHASES)
"""Per phase, the rows of a layer's parts that tell its kernels (without overhead), all-reduces and moves."""

Groups = tuple[tuple[int, ...], ...]


class Stage(NamedTuple):
    """What a layer does in one phase under one configuration, on each of its devices.

    Attributes:
      kernels: seconds of its kernels, on each device.
      sums: (groups of devices, seconds of an all-reduce in each of them) of partial sums that what follows waits for.
      moves: seconds in which something moves between all of its devices.
      gradients: like `sums`, of the gradients of weights: only the update waits for them.
    """

    kernels: float
    sums: tuple[tuple[Groups, float], ...]
    moves: float
    gradients: tuple[tuple[Groups, float], ...]


@dataclasses.dataclass(frozen=True)
class LayerStages:
    """What a layer does under one configuration.

    Attributes:
      devices: on how many devices, 0, 1, ....
      stages: one per phase of `PHASES`.
    """

    devices: int
    stages: tuple[Stage, ...]


def first_operations(layer: Layer) -> tuple[int, ...]:
    """Per phase, where in the graph the layer's operations of that phase begin; without any, where those of the next
    phase do. What adds up the gradients of microbatches stands nowhere in it."""
    found = []
    program = [operation for operation in layer.operations if operation.index != ADDED]
    for number, _ in enumerate(PHASES):
        later = [operation.index for operation in program if operation.phase in PHASES[number:]]
        found.append(min(later, default=program[-1].index if program else 0))
    return tuple(found)


class Stages:
    """What the layers of a priced network do; found once for those that are priced as one."""

    def __init__(self, priced: PricedNetwork, *, gradients: bool = True) -> None:
        """Has looked at no layer.

        Args:
          priced: in seconds.
          gradients: whether they are summed over devices.
        """
        self._priced, self._gradients = priced, gradients
        self._reshardings = _reshardings(priced)
        self._signatures: dict[int, tuple[OperationSignature, ...]] = {}
        self._found: dict[tuple[int, int], LayerStages] = {}

    def alike(self, layer: int) -> int:
        """Equal for layers that do the same under configurations of the same index."""
        return id(self._priced.parts[layer])  # which are one object for layers that cost the same

    def waiting(self, edge: Edge) -> float:
        """Unsplit bytes of what is summed together with partial sums that go over an edge; 0: they do not wait."""
        return self._reshardings.waiting if self._priced.graph.waits(edge) else 0.0

    def of(self, layer: int, choice: int) -> LayerStages:
        """What a layer does under the configuration with that index. All of it adds up to what the layer costs, but for
        what the price says to be hidden of all-reduces.

        Where the devices share cores, every stage takes its share of all devices' work.
        """
        key = self.alike(layer), choice
        if key not in self._found:
            self._found[key] = self._stages(layer, choice)
        return self._found[key]

    def _stages(self, layer: int, choice: int) -> LayerStages:
        priced, alike = self._priced, self.alike(layer)
        if alike not in self._signatures:
            self._signatures[alike] = layer_signature(priced.graph.layers[layer])
        table = _table(priced.graph.layers[layer], priced, layer, choice)
        devices, parts = int(table.devices[0]), priced.parts[layer][:, choice]
        nodes = nodes_by_phase(self._signatures[alike])
        stages = []
        for phase, (kernels, summed, moved) in zip(PHASES, _ROWS, strict=True):
            overhead = parts[_OVERHEAD] * (nodes[phase] / max(1, sum(nodes.values())))
            sums = _sums([entry for entry in self._signatures[alike] if entry.phase == phase], table,
                         self._reshardings, float(parts[summed]))
            stages.append(Stage(
                float(parts[kernels] + overhead) / (devices if priced.machine.shared_cores else 1),
                sums[False], float(parts[moved]), sums[True] if self._gradients else ()))
        return LayerStages(devices, tuple(stages))


def _reshardings(priced: PricedNetwork) -> Reshardings:
    return Reshardings(priced.machine, waiting=waiting_bytes(priced.graph.layers))


def _table(layer: Layer, priced: PricedNetwork, number: int, choice: int) -> ConfigurationTable:
    return ConfigurationTable.build([priced.configurations[number][choice]], dim_positions(layer), len(layer.dims))


def nodes_by_phase(signature: Iterable[OperationSignature]) -> dict[str, int]:
    """Phase -> how many nodes a layer's operations become on a device: each has its overhead."""
    found = dict.fromkeys(PHASES, 0)
    for entry in signature:
        if entry.kind != "none":
            found[entry.phase] += entry.nodes * entry.trips
    return found


def _sums(entries: Sequence[OperationSignature], table: ConfigurationTable, reshardings: Reshardings,
          priced: float) -> dict[bool, tuple[tuple[Groups, float], ...]]:
    """The all-reduces of some operations of a layer: whether they are of weights' gradients -> those; those over the
    same groups as one.

    Args:
      entries: the operations.
      table: of the layer's one configuration.
      reshardings: price what moves, on the machine whose numbers count.
      priced: what these all-reduces are priced at, by a model or by measured kernels.
    """
    taken_by = _sum_seconds(entries, table, reshardings)
    seconds = {key: float(taken[0]) for key, taken in taken_by.items() if taken[0] > 0.0}
    modelled = sum(taken for _, taken in seconds.items())
    found: dict[bool, list[tuple[Groups, float]]] = {False: [], True: []}
    for (gradient, columns), taken in seconds.items():
        members = tuple(groups(int(table.devices[0]), [(int(table.shards[0, column]), int(table.strides[0, column]))
                                                       for column in columns if column >= 0]))
        # Where devices share cores prices may be of measured kernels.
        scale = priced / modelled / len(members) if reshardings.machine.shared_cores else 1.0
        found[gradient].append((members, taken * scale))
    return {gradient: tuple(entries) for gradient, entries in found.items()}


def gradient_seconds(priced: PricedNetwork) -> list[np.ndarray]:
    """What the all-reduces of weights' gradients take, per layer under each of its configurations, float64 [K]: what
    the backward pass of other layers may hide. Layers that are priced as one share one array.

    Where devices share cores prices may be of measured kernels: it is a share of what all-reduces are priced at.
    """
    found: dict[int, np.ndarray] = {}
    machine, reshardings = priced.machine, _reshardings(priced)
    for layer, choices, parts in zip(priced.graph.layers, priced.configurations, priced.parts, strict=True):
        if id(parts) not in found:
            signature = [entry for entry in layer_signature(layer) if any(entry.gradients)]
            found[id(parts)] = np.zeros(len(choices))
            if signature:
                table = ConfigurationTable.build(choices, dim_positions(layer), len(layer.dims))
                for phase, (_, summed, _) in zip(PHASES, _ROWS, strict=True):
                    taken = _gradient_seconds([entry for entry in signature if entry.phase == phase], table,
                                              reshardings)
                    if machine.shared_cores and taken.any():
                        taken *= _ratio(parts[summed], sum(_sum_seconds(
                            [entry for entry in layer_signature(layer) if entry.phase == phase], table,
                            reshardings).values(), np.zeros(len(choices))))
                    found[id(parts)] += taken
    return [found[id(parts)] for parts in priced.parts]


def _gradient_seconds(signature: Sequence[OperationSignature], table: ConfigurationTable,
                      reshardings: Reshardings) -> np.ndarray:
    """Seconds of the all-reduces of weights' gradients alone, float64 [K]."""
    total = np.zeros(len(table.devices))
    for (gradient, _), taken in _sum_seconds(signature, table, reshardings).items():
        total += taken if gradient else 0.0
    return total


def _ratio(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """One by the other, 0 where there is nothing of that."""
    found: np.ndarray = np.divide(one, other, out=np.zeros(len(one)), where=other > 0.0)
    return found


def _sum_seconds(signature: Sequence[OperationSignature], table: ConfigurationTable,
                 reshardings: Reshardings) -> dict[tuple[bool, tuple[int, ...]], np.ndarray]:
    """(whether of weights' gradients, columns of the dims whose split leaves partial sums) -> seconds of all-reduces,
    float64 [K]."""
    seconds: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}
    for entry, times in counted(signature).items():
        for (columns, outputs), gradient in entry.sums_within(
                on_edges=reshardings.sums_on_edges, added_on_edges=reshardings.adds_on_edges):
            taken = sum_seconds(entry, columns, outputs, table, reshardings, gradient=gradient)
            # What is summed in the update, the update waits for; and nothing hides what is summed after a loop.
            key = gradient and entry.phase == "backward" and not entry.after_loop, tuple(sorted(set(columns)))
            seconds[key] = seconds.get(key, 0.0) + times * taken
    return seconds
