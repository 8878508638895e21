"""Where the prices of a run come from: a model that was fitted to a machine, or kernels that are measured for it."""

from __future__ import annotations

import sys

from pase_mtf.calibration import load
from pase_mtf.calibration.meter import REFERENCES, KernelMeter
from pase_mtf.compat import mtf
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.console import Stage
from pase_mtf.launch.plan import Plan
from pase_mtf.lowering.kernels import GraphKernels
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.measured import MeasuredPrices

__all__ = ["machine_of", "prices_of"]


def prices_of(plan: Plan, graph: ComputationGraph, program: mtf.Graph) -> MeasuredPrices | None:
    """With --prices=measured, prices by the kernels of a run's program; else None.

    Args:
      plan: of the run.
      graph: of its program.
      program: what that was exported from.
    """
    options = plan.options
    if options.prices != "measured":
        return None
    meter = KernelMeter(plan.devices.count, plan.devices.kind, again=options.recalibrate)
    _tell(f"kernels: {len(meter.times)} are known, kept in {meter.path}")
    with Stage(f"{len(REFERENCES)} reference kernels"):
        meter.start()
    for note in meter.notes:
        _tell(f"note: {note}")
    return MeasuredPrices(graph, GraphKernels(program, graph), meter, _tell)


def machine_of(plan: Plan, prices: MeasuredPrices | None) -> Machine:
    """The machine of a run: one that is given, one that was fitted, or the best rates of the kernels that are known."""
    if prices is not None:
        return prices.machine
    return load.load_machine(plan.machine, plan.devices.count, plan.devices.kind, again=plan.options.recalibrate)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
