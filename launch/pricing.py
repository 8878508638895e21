"""Where the prices of a run come from: a model that was fitted to a machine, or kernels that are measured for it."""

from __future__ import annotations

from collections.abc import Iterable

from pase_mtf.calibration import load
from pase_mtf.compat import mtf
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.plan import Plan
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.by_kernels import Telling, kernel_times, prices_by_kernels
from pase_mtf.strategy.kernels_text import untraced_text
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.strategy import Strategy

__all__ = ["machine_of", "prices_of", "tell_untraced"]


def prices_of(plan: Plan, graph: ComputationGraph, program: mtf.Graph) -> MeasuredPrices | None:
    """With --prices=measured, or kernel times from a file, prices by the kernels of a run's program; else None.

    Args:
      plan: of the run.
      graph: of its program.
      program: what that was exported from.
    """
    options = plan.options
    if options.prices != "measured":
        return None
    tell = Telling()
    kernels = kernel_times(options.machine, plan.devices.count, plan.devices.kind, again=options.recalibrate, tell=tell)
    return prices_by_kernels(program, graph, kernels, tell)


def machine_of(plan: Plan, prices: MeasuredPrices | None) -> Machine:
    """The machine of a run: one that is given, one that was fitted, or the best rates of the kernels that are known."""
    if prices is not None:
        return prices.machine
    return load.load_machine(plan.machine, plan.devices.count, plan.devices.kind, again=plan.options.recalibrate)


def tell_untraced(strategies: Iterable[Strategy]) -> None:
    """Says once, of all strategies together, which operations have no measured kernels and why."""
    found = dict.fromkeys(entry for strategy in strategies
                          for entry in (strategy.search.get("kernels") or {}).get("untraced", ()))
    if text := untraced_text({"kernels": {"untraced": list(found)}}):
        Telling().note(text)
