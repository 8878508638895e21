"""Finds, for a Mesh-TensorFlow model and p devices, the provably best way to split every layer.

    graph = pase_mtf.export_graph(mtf_graph)
    strategy = pase_mtf.find_strategy(graph, devices=8, machine="h100")
    lowering = pase_mtf.lower(mtf_graph, strategy, devices)    # in place of mtf.Lowering(graph, {mesh: impl})
    layout = pase_mtf.find_layout(mtf_graph, devices=8)        # layout rules for mtf.Lowering itself

Names that need TensorFlow are loaded when they are first used (PEP 562): a search alone starts in a fraction of a
second.
"""

import importlib
from typing import TYPE_CHECKING

from pase_mtf import _early_signals, _import_hook  # noqa: F401 - the first takes the signals when it is imported
from pase_mtf.errors import PaseError
from pase_mtf.export.layer_marks import one_layer
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine

if TYPE_CHECKING:
    from pase_mtf.epochs.curve import EpochCurve
    from pase_mtf.epochs.projection import project_training
    from pase_mtf.epochs.step_times import StepTimes
    from pase_mtf.export.exporter import export_graph
    from pase_mtf.layout.capture import capture_graph, swap_lowering
    from pase_mtf.layout.find import find_layout
    from pase_mtf.layout.layout import Layout
    from pase_mtf.lowering.lowering import lower
    from pase_mtf.operations.registry import register_operation
    from pase_mtf.search import Solution, solve
    from pase_mtf.search.network import CostNetwork
    from pase_mtf.strategy.find import find_strategy
    from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

_import_hook.register()

__all__ = ["ComputationGraph", "Configuration", "CostNetwork", "EpochCurve", "Layout", "Machine", "PaseError",
           "Solution", "StepTimes", "Strategy", "capture_graph", "evaluate_strategy", "export_graph", "find_layout",
           "find_strategy", "lower", "one_layer", "project_training", "register_operation", "solve", "swap_lowering"]

_LATER = {"export_graph": "export.exporter", "lower": "lowering.lowering", "Layout": "layout.layout",
          "find_layout": "layout.find", "capture_graph": "layout.capture", "swap_lowering": "layout.capture",
          "register_operation": "operations.registry", "CostNetwork": "search.network",
          "Strategy": "strategy.strategy", "find_strategy": "strategy.find",
          "evaluate_strategy": "strategy.strategy", "Solution": "search", "solve": "search",
          "EpochCurve": "epochs.curve", "StepTimes": "epochs.step_times", "project_training": "epochs.projection"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'pase_mtf' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"pase_mtf.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
