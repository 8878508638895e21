"""What a graph is exported as where layouts are priced: as stock Mesh-TensorFlow splits it, and as our lowering can."""

from __future__ import annotations

import functools

from pase_mtf.compat import mtf
from pase_mtf.export.exporter import export_for_stock, export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.layout.request import Request
from pase_mtf.operations.flow import all_operations
from pase_mtf.operations.registry import rule_of, splittable_dims

__all__ = ["Exports"]


class Exports:
    """The exports of one graph, each made when it is first asked for."""

    def __init__(self, graph: mtf.Graph, request: Request, own: ComputationGraph | None = None) -> None:
        """Exports nothing yet.

        Args:
          graph: of Mesh-TF.
          request: the name of the program, and numbers of operations that are alike.
          own: what export_graph made of the graph, if it is at hand.
        """
        self._graph, self._request, self._own = graph, request, own

    @property
    def own(self) -> ComputationGraph:
        """With what our lowering can split: what strategies are of."""
        if self._own is None:
            self._own = export_graph(self._graph, name=self._request.name, alike=self._request.memo.alike)
        return self._own

    @functools.cached_property
    def stock(self) -> ComputationGraph:
        """With what stock Mesh-TensorFlow splits under a layout under which it lowers; of most graphs that is `own`."""
        if all(splittable_dims(operation, stock=True) == splittable_dims(operation)
               for operation in all_operations(self._graph) if rule_of(operation).stock_splittable):
            return self.own
        return export_for_stock(self._graph, name=self._request.name, alike=self._request.memo.alike)
