"""A model's word that some of its operations are one layer, where the export cannot know.

Operations that read the same variable are one layer without saying so. What stands between them in an unrolled
recurrence (the cell, the handing on of states, attention in the loop) is not: without a word, every time step would
leave its own fragments in the computation graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pase_mtf.errors import UsageError, shortened

if TYPE_CHECKING:
    from pase_mtf.compat import mtf

__all__ = ["layer_mark", "one_layer"]

_ATTRIBUTE = "_pase_mtf_layer"


@contextlib.contextmanager
def one_layer(graph: mtf.Graph) -> Iterator[None]:
    """Everything that is added to the graph within the context is one layer of the exported computation graph.

    The layer can split what all of these operations can. Their gradients follow them, as everywhere. Of contexts within
    one another the outermost holds.

    Args:
      graph: an mtf.Graph.

    Example:
      with one_layer(mesh.graph):
        for step in range(length):
          state = cell(inputs[step], state)

    Raises:
      UsageError: that is no mtf.Graph.
    """
    if not isinstance(getattr(graph, "operations", None), list):  # not by its class: models mark layers, loads no more
        raise UsageError(f"one_layer: graph={shortened(graph)}: is not an mtf.Graph (a mesh has one: mesh.graph)")
    before = len(graph.operations)
    yield
    mark = object()
    for operation in graph.operations[before:]:
        setattr(operation, _ATTRIBUTE, mark)


def layer_mark(operation: mtf.Operation) -> object | None:
    """What the operations of one layer have in common; None for those that no `one_layer` holds."""
    return getattr(operation, _ATTRIBUTE, None)
