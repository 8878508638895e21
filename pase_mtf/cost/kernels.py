"""Prices by measured kernels: what a layer under a configuration, or a move between two, runs, and what that takes.

Which kernels that are is known of those configurations that were looked at; all others keep the price of a model, which
is a bound (at the best rates that kernels reached) or an estimate. So a search tells which configurations to look at,
and which kernels to measure.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from pase_mtf.cost.build import PricedNetwork, network_of
from pase_mtf.cost.compute import PARTS
from pase_mtf.cost.moves import move_of
from pase_mtf.cost.tables import dim_positions
from pase_mtf.graph.computation_graph import ADDED, TOP_K, ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.partition import Partition
from pase_mtf.machine.kernels import Kernel, sum_kernel
from pase_mtf.search.network import NetworkEdge

__all__ = ["KernelSource", "KnownKernels"]

Counts = Mapping[Kernel, int]
"""Kernels, and how often a step runs them on all devices together."""

_Places = tuple[tuple[int, int], ...]
"""Which of its dims, by their place among these, a layer splits into how many parts, axis by axis."""


class KernelSource(Protocol):
    """Knows which kernels a graph runs (`lowering.kernels.GraphKernels`)."""

    @property
    def untraced(self) -> Mapping[str, None]:
        """Of which operations it does not know them, and why, a sentence each; additions stand for them."""

    def layer(self, number: int, configuration: Configuration) -> Mapping[str, Mapping[Kernel, float]]:
        """Phase -> kernels of a layer on each of its devices; of what these share in, each has an equal part."""

    def alike(self, number: int) -> Hashable:
        """Equal for layers that run the same kernels where the same places of their dims are split."""

    def move(self, source: Partition, target: Partition, shape: Sequence[int], itemsize: int) -> Mapping[Kernel, int]:
        """The kernels that move a tensor from one partition to another, on all devices together."""


class KnownKernels:
    """Which kernels run, of those configurations of a graph's layers that were looked at, on devices that share cores.

    What partial sums and moves within a layer run is told by the operations' facts, as everywhere in this package.
    """

    def __init__(self, graph: ComputationGraph, source: KernelSource) -> None:
        """Looks at nothing yet."""
        self._graph, self._source = graph, source
        # Numbers in place of what layers have in common: to look that up takes long.
        numbers: dict[Hashable, int] = {}
        self._alike = [numbers.setdefault(source.alike(number), len(numbers)) for number in range(len(graph.layers))]
        self._tally = _Tally()
        # (what layers have in common, which places of their dims are split) -> part -> row of the tally.
        self._layers: dict[tuple[int, _Places], dict[str, int]] = {}
        self._edges: dict[tuple[int, Configuration, Configuration], int] = {}  # (edge, its ends) -> row of the tally
        # What the configurations offered to a layer split, by the identity of these, which are held on to.
        self._offered: dict[tuple[int, int], tuple[Sequence[Configuration], list[_Places]]] = {}

    def _places(self, number: int, configurations: Iterable[Configuration]) -> list[_Places]:
        """Which places of a layer's dims configurations split."""
        places = {name: place for place, name in enumerate(self._graph.layers[number].dims)}
        return [tuple([(places.get(name, -1), parts) for name, parts in configuration.axes])
                for configuration in configurations]

    def _key(self, number: int, configuration: Configuration) -> tuple[int, _Places]:
        return self._alike[number], self._places(number, [configuration])[0]

    def look(self, configurations: Sequence[Configuration], edges: Iterable[int] | None = None) -> int:
        """Finds out which kernels a strategy runs; returns how much of that was new: layers and edges.

        Args:
          configurations: one per layer.
          edges: the numbers of those that move as between layers of one strategy; None: all.
        """
        before = len(self._layers) + len(self._edges)
        for number, configuration in enumerate(configurations):
            key = self._key(number, configuration)
            if key not in self._layers:
                self._layers[key] = {part: self._tally.add(counts)
                                     for part, counts in self._parts(number, configuration).items()}
        for number in range(len(self._graph.edges)) if edges is None else edges:
            edge = self._graph.edges[number]
            ends = number, configurations[edge.source], configurations[edge.target]
            if ends not in self._edges:
                source, target = (choice.placed(self._graph.layers[layer], dims) for layer, choice, dims in (
                    (edge.source, ends[1], edge.source_dims), (edge.target, ends[2], edge.target_dims)))
                moved = self._source.move(source, target, edge.shape, edge.itemsize)
                self._edges[ends] = self._tally.add({kernel: times * edge.trips for kernel, times in moved.items()})
        return len(self._layers) + len(self._edges) - before

    def kernels(self, configurations: Sequence[Configuration],
                edges: Iterable[int] | None = None) -> collections.Counter[Kernel]:
        """What a strategy that was looked at runs, on all devices together.

        Args:
          configurations, edges: as they were looked at.
        """
        rows = [row for number, configuration in enumerate(configurations)
                for row in self._layers[self._key(number, configuration)].values()]
        for number in range(len(self._graph.edges)) if edges is None else edges:
            edge = self._graph.edges[number]
            rows.append(self._edges[number, configurations[edge.source], configurations[edge.target]])
        return self._tally.together(rows)

    def all_kernels(self) -> set[Kernel]:
        """Those of all configurations that were looked at."""
        return self._tally.kernels

    # -- one layer ----------------------------------------------------------------------------------------------------
    def _parts(self, number: int, configuration: Configuration) -> dict[str, Counts]:
        layer, found = self._graph.layers[number], dict[str, collections.Counter[Kernel]]()
        for phase, counts in self._source.layer(number, configuration).items():
            found[phase] = collections.Counter(
                {kernel: round(times * configuration.devices) for kernel, times in counts.items()})
        for part, kernel, times in (*_sums(layer, configuration), *_added_up(layer, configuration),
                                    *self._moves(layer, configuration)):
            found.setdefault(part, collections.Counter())[kernel] += times
        return dict(found)

    def _moves(self, layer: Layer, configuration: Configuration) -> Iterator[tuple[str, Kernel, int]]:
        position = dim_positions(layer)
        for operation in layer.operations:
            move = move_of(operation, position)
            if move is None or move.shifted:  # the kernels of a shift are its own
                continue
            source, target = (configuration.placed(layer, operand.dims)
                              for operand in (operation.inputs[0], operation.outputs[0]))
            for kernel, times in self._source.move(source, target, move.shape, move.itemsize).items():
                yield f"resharding {operation.phase}", kernel, times * operation.trips

    # -- all layers ---------------------------------------------------------------------------------------------------
    def applied(self, priced: PricedNetwork, price: Callable[[Kernel], float], *, scaled: bool) -> PricedNetwork:
        """A priced network in which what is known is priced by its kernels.

        Args:
          priced: by a model.
          price: seconds of a kernel.
          scaled: scale the prices of the model, where nothing else is known, by what those of the known ones turned
            out to be, per kind of layer (an estimate); or leave them (a bound).
        """
        totals = self._tally.totals(price)
        parts = self._applied_to_layers(priced, totals, scaled)
        edges = self._applied_to_edges(priced, totals, scaled)
        return dataclasses.replace(
            priced, parts=parts, edge_matrices=edges, network=network_of(priced.graph, parts, edges),
            again=lambda configurations: self.applied(priced.offering(configurations), price, scaled=scaled))

    def _applied_to_layers(self, priced: PricedNetwork, totals: np.ndarray, scaled: bool) -> tuple[np.ndarray, ...]:
        keys = [(self._alike[number], id(matrix)) for number, matrix in enumerate(priced.parts)]
        known = collections.defaultdict[int, dict[_Places, np.ndarray]](dict)
        for (alike, places), rows in self._layers.items():
            known[alike][places] = np.array([totals[rows[part]] if part in rows else 0.0 for part in PARTS])
        columns: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        ratios = _Ratios()
        for number, (key, matrix, choices) in enumerate(zip(keys, priced.parts, priced.configurations, strict=True)):
            if key not in columns:
                found = known[key[0]]
                columns[key] = {column: found[places] for column, places in enumerate(self._split(number, choices))
                                if places in found}
                for column, entry in columns[key].items():
                    ratios.add(self._graph.layers[number].kind, float(matrix[:, column].sum()), float(entry.sum()))
        made: dict[tuple[int, int], np.ndarray] = {}
        for number, (key, matrix) in enumerate(zip(keys, priced.parts, strict=True)):
            if key not in made:
                made[key] = matrix * (ratios.of(self._graph.layers[number].kind) if scaled else 1.0)
                for column, entry in columns[key].items():
                    made[key][:, column] = entry
        return tuple(made[key] for key in keys)

    def _split(self, number: int, offered: Sequence[Configuration]) -> list[_Places]:
        """`_places` of all that is offered to a layer, found once: the same is priced again and again."""
        key = number, id(offered)
        if key not in self._offered:
            self._offered[key] = offered, self._places(number, offered)
        return self._offered[key][1]

    def _applied_to_edges(self, priced: PricedNetwork, totals: np.ndarray, scaled: bool) -> tuple[NetworkEdge, ...]:
        # Edges of one matrix move tensors of one shape between the same shardings.
        cells: dict[int, dict[tuple[int, int], float]] = {}
        ratios = _Ratios()
        for (number, source, target), row in self._edges.items():
            edge, matrix = self._graph.edges[number], priced.edge_matrices[number]
            ends = priced.find(edge.source, source), priced.find(edge.target, target)
            if ends[0] is None or ends[1] is None:
                continue
            cell = int(matrix.rows[ends[0]]), int(matrix.columns[ends[1]])
            if cell not in cells.setdefault(id(matrix.matrix), {}):
                cells[id(matrix.matrix)][cell] = float(totals[row])
                ratios.add("", float(matrix.matrix[cell]), cells[id(matrix.matrix)][cell])
        made: dict[int, np.ndarray] = {}
        for entry in priced.edge_matrices:
            if id(entry.matrix) not in made:
                made[id(entry.matrix)] = entry.matrix * (ratios.of("") if scaled else 1.0)
                for cell, seconds in cells.get(id(entry.matrix), {}).items():
                    made[id(entry.matrix)][cell] = seconds
        return tuple(dataclasses.replace(entry, matrix=made[id(entry.matrix)]) for entry in priced.edge_matrices)


class _Tally:
    """Kernels and how often they are run, row by row; the prices of all rows are found together."""

    def __init__(self) -> None:
        self._numbers: dict[Kernel, int] = {}
        self._rows: list[Counts] = []
        # Of every kernel of every row, one after another: the row, the kernel's number, how often it is run.
        self._row, self._kernel, self._times = array.array("q"), array.array("q"), array.array("d")

    @property
    def kernels(self) -> set[Kernel]:
        """Those of all rows."""
        return set(self._numbers)

    def add(self, counts: Counts) -> int:
        """The number of a new row."""
        for kernel, times in counts.items():
            self._row.append(len(self._rows))
            self._kernel.append(self._numbers.setdefault(kernel, len(self._numbers)))
            self._times.append(times)
        self._rows.append(counts)
        return len(self._rows) - 1

    def together(self, rows: Iterable[int]) -> collections.Counter[Kernel]:
        """What some rows run."""
        found: collections.Counter[Kernel] = collections.Counter()
        for row in rows:
            found.update(self._rows[row])
        return found

    def totals(self, price: Callable[[Kernel], float]) -> np.ndarray:
        """Seconds of all that every row runs, float64 [rows], added up in the order of its kernels.

        Args:
          price: seconds of one run of a kernel.
        """
        prices = np.array([price(kernel) for kernel in self._numbers])
        if not len(prices):
            return np.zeros(len(self._rows))
        return np.bincount(np.array(self._row), np.array(self._times) * prices[np.array(self._kernel)],
                           minlength=len(self._rows))


class _Ratios:
    """How far a model's prices are from those by kernels, per kind and over all kinds."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, kind: str, modelled: float, seconds: float) -> None:
        """Takes in the two prices of one thing."""
        for name in (f" {kind}", ""):
            found = self._sums.setdefault(name, [0.0, 0.0])
            found[0] += modelled
            found[1] += seconds

    def of(self, kind: str) -> float:
        """The ratio of a kind, of all where nothing is known of it; 1 where nothing is known at all."""
        for name in (f" {kind}", ""):
            modelled, seconds = self._sums.get(name, (0.0, 0.0))
            if modelled > 0.0 and seconds > 0.0:
                return seconds / modelled
        return 1.0


def _added_up(layer: Layer, configuration: Configuration) -> Iterator[tuple[str, Kernel, int]]:
    """What adds the gradients of a microbatch to those before."""
    for operation in layer.operations:
        if operation.index == ADDED:
            (output,) = operation.outputs
            held = math.prod(output.shape) // math.prod(configuration.shards(dim) for dim in output.dims if dim)
            yield operation.phase, sum_kernel(2, held, output.itemsize), configuration.devices * operation.trips


def _sums(layer: Layer, configuration: Configuration) -> Iterator[tuple[str, Kernel, int]]:
    """What adds up the partial sums of a layer."""
    for operation in layer.operations:
        if operation.role == TOP_K:  # puts together what devices have found by kernels of its own
            continue
        for dims, outputs in operation.sums:
            members = math.prod(configuration.shards(dim) for dim in set(dims))
            if members > 1:
                for output in outputs:
                    held = math.prod(output.shape) // math.prod(configuration.shards(dim) for dim in output.dims if dim)
                    yield (f"all-reduce {operation.phase}", sum_kernel(members, held, output.itemsize),
                           configuration.devices // members * operation.trips)
