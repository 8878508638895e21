"""Finds, for a Mesh-TensorFlow model and p devices, the provably best way to split every layer.

    graph = pase_mtf.export_graph(mtf_graph)
    strategy = pase_mtf.find_strategy(graph, devices=8, machine="h100")
    lowering = pase_mtf.lower(mtf_graph, strategy, devices)    # in place of mtf.Lowering(graph, {mesh: impl})
    layout = pase_mtf.find_layout(mtf_graph, devices=8)        # layout rules for mtf.Lowering itself

Names that need TensorFlow are loaded when they are first used (PEP 562): a search alone starts in a fraction of a
second.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pase_mtf.configurations import Configuration
from pase_mtf.errors import PaseError
from pase_mtf.graph import ComputationGraph
from pase_mtf.layer_marks import one_layer
from pase_mtf.machine import Machine
from pase_mtf.network import CostNetwork

if TYPE_CHECKING:
    from pase_mtf.export import export_graph
    from pase_mtf.layout import Layout, find_layout
    from pase_mtf.layout_capture import capture_graph, swap_lowering
    from pase_mtf.legality import register_splittable
    from pase_mtf.lowering import lower
    from pase_mtf.search import Solution, solve
    from pase_mtf.strategy import Strategy, evaluate_strategy, find_strategy

__all__ = ["ComputationGraph", "Configuration", "CostNetwork", "Layout", "Machine", "PaseError", "Solution", "Strategy",
           "capture_graph", "evaluate_strategy", "export_graph", "find_layout", "find_strategy", "lower",
           "one_layer", "register_splittable", "solve", "swap_lowering"]

_LATER = {"export_graph": "export", "lower": "lowering", "Layout": "layout", "find_layout": "layout",
          "capture_graph": "layout_capture", "swap_lowering": "layout_capture", "register_splittable": "legality",
          "Strategy": "strategy", "find_strategy": "strategy",
          "evaluate_strategy": "strategy", "Solution": "search", "solve": "search"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pase_mtf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pase_mtf.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
