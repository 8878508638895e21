"""A layout costs what the strategy costs that gives every layer the configuration which the layout makes of it."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
from prices import price_strategy

from pase_mtf.compat import mtf
from pase_mtf.cost import build
from pase_mtf.cost.memory import strategy_memory
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.graph import all_reduces
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.layout.costs import LayoutCosts
from pase_mtf.layout.legality import StockLegality
from pase_mtf.layout.space import MeshShape
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import configurations_of_layout


class _AsStock(Reshardings):
    """Sums and moves as Mesh-TF itself makes them, charged where strategies charge them."""

    def __init__(self, machine: Machine, **_: float) -> None:
        super().__init__(machine, stock=True)

    @property
    def sums_on_edges(self) -> bool:
        """Of `Reshardings`."""
        return not self.machine.shared_cores


def _summed_where_made(graph: ComputationGraph) -> ComputationGraph:
    """The graph as Mesh-TF itself lowers it: no partial sum goes over an edge but to be added to another, and none is
    made of rows."""
    layers = [dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, pending_outputs=operation.added_outputs, looked_up=())
        for operation in layer.operations)) for layer in graph.layers]
    return dataclasses.replace(graph, layers=tuple(layers), edges=tuple(
        dataclasses.replace(edge, pending=edge.pending if edge.added_to else (), looked_up=()) for edge in graph.edges))


def _summed_once(graph: ComputationGraph) -> ComputationGraph:
    """The graph without the sums that Mesh-TF makes of views."""
    return dataclasses.replace(graph, layers=tuple(dataclasses.replace(layer, operations=tuple(
        dataclasses.replace(operation, summed_again=0) for operation in layer.operations)) for layer in graph.layers))


def layouts_and_uniform_strategies_agree(graph: mtf.Graph, exported: ComputationGraph, machine: Machine, *,
                                         most: int = 12, own: tuple[MeshShape, dict[str, str]] | None = None) -> int:
    """Compares seconds, parts and bytes under random legal layouts on four devices; how many it compared.

    Args:
      graph, exported: of one program.
      machine: prices both; no library sums for layouts, which Mesh-TF itself lowers, so here for neither, and every
        gradient is summed by itself; views of a sum are summed again for none.
      most: how many to compare.
      own: a layout to compare besides, where it is legal.
    """
    rng, mesh = np.random.default_rng(2), MeshShape((("a", 2), ("b", 2)))
    legality = StockLegality(graph, (), mesh.devices)
    names = [name for name in legality.dims() if not name.startswith("_")]
    drawn = ({str(name): int(rng.integers(2)) for name in rng.permutation(names)[:rng.integers(4)]} for _ in range(300))
    layouts = itertools.islice((
        (mesh, axis_of) for axis_of in drawn if legality.problem(axis_of, mesh.sizes) is None), most)
    if own is not None:
        axes = {name: own[0].names.index(axis) for name, axis in own[1].items() if name in legality.sizes}
        legal = StockLegality(graph, (), own[0].devices).problem(axes, own[0].sizes) is None
        layouts = itertools.chain(layouts, [(own[0], axes)] if legal else [])
    costs, checked = LayoutCosts(_summed_once(exported), machine, legality), 0
    without_library = dataclasses.replace(machine, sums_by_trees=False)
    # What a reshape renames to the dim that it is a sum over, Mesh-TF sums whole, and our lowering in parts.
    renamed = {name for layer in exported.layers for operation in layer.operations if operation.sums_inputs
               for name in operation.reduced}
    for shape, axis_of in layouts:
        if renamed & axis_of.keys():
            continue
        # Dims that are not among the layers' splittable ones make no difference.
        configurations = configurations_of_layout(
            exported, shape.axes, {name: shape.names[axis] for name, axis in axis_of.items()})
        with mock.patch.object(all_reduces, "_BUCKET", 0), mock.patch.object(build, "Reshardings", _AsStock):
            ordinary = price_strategy(_summed_once(_summed_where_made(exported)), without_library, shape.devices,
                                      configurations)
        assert costs.total(shape, axis_of) == pytest.approx(ordinary.total, rel=1e-9), (shape, axis_of)
        parts = costs.parts(shape, axis_of)
        for part, seconds in ordinary.parts.items():
            assert parts.get(part, 0.0) == pytest.approx(seconds, rel=1e-9, abs=1e-15), (part, shape, axis_of)
        assert costs.memory(shape, axis_of) == pytest.approx(strategy_memory(
            exported, configurations, machine.shared_cores)), axis_of
        checked += 1
    return checked
