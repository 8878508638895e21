"""Where the prices of a run come from: rates of a machine, or kernels that are measured for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pase_mtf.calibration import load
from pase_mtf.calibration.cache import read_cached
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.calibration.saved import SavedKernels
from pase_mtf.calibration.speed import SpeedWatch
from pase_mtf.compat import mtf
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.cluster.lost import LOST, lost_process
from pase_mtf.launch.plan import Plan
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.by_kernels import Telling, kernel_times, prices_by_kernels
from pase_mtf.strategy.kernels_text import untraced_note
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.strategy import Strategy

__all__ = ["machine_of", "prices_of", "tell_untraced", "watch_of"]


def prices_of(plan: Plan, graph: ComputationGraph, program: mtf.Graph,
              kernels: KernelMeter | SavedKernels | None = None) -> MeasuredPrices | None:
    """Prices by the kernels of a run's program, where they are measured or in a file; else None.

    Args:
      plan: of the run.
      graph: of its program.
      program: what that was exported from.
      kernels: of these devices, as another program of the run was priced by; None: they are read, or begun to be timed.
    """
    options = plan.options
    if options.prices != "measured":
        return None
    tell = Telling()
    if kernels is None:
        kernels = kernel_times(options.machine, plan.devices.count, plan.devices.kind, again=options.recalibrate,
                               tell=tell)
    return prices_by_kernels(program, graph, kernels, tell)


def watch_of(prices: MeasuredPrices | None, chosen: Iterable[Chosen]) -> SpeedWatch:
    """What tells how fast the machine is while the arms step, where its kernels are what prices are made of: those of
    their strategies."""
    if prices is None or not isinstance(prices.meter, KernelMeter):
        return SpeedWatch(None, {})
    return SpeedWatch(prices.meter, prices.shares(
        [one.configurations for one in chosen if isinstance(one, Strategy)]))


def machine_of(plan: Plan, prices: MeasuredPrices | None, *, joined: bool = False) -> Machine:
    """The machine of a run: one that is given, or the rates of the one at hand: measured, or the best of the
    kernels that are known.

    Args:
      plan: of the run.
      prices: of measured kernels, if these count.
      joined: whether the servers of all processes answer, so that they can be measured together. Where they do not,
        what is kept of such a measurement counts, or else those devices in one process.

    Raises:
      ClusterError: a process was lost.
      PaseError: as `load_machine`.
    """
    if prices is not None:
        return prices.machine
    devices, again = plan.devices, plan.options.recalibrate
    over = None
    if devices.kind == "gpu" and not devices.tasks:
        over = devices  # maybe of a list: others than the first
    elif joined or (devices.tasks and not again and read_cached(devices.count, devices.kind, devices)):
        # One client asks all servers, also where every rank has a graph of its own afterwards.
        over = dataclasses.replace(devices, rank=None)
    try:
        return load.load_machine(plan.machine, devices.count, devices.kind, again=again, over=over)
    except LOST as error:
        raise lost_process(error, "rank 0") from error


def tell_untraced(chosen: Iterable[Chosen]) -> None:
    """Says once, of all strategies and pipelines together, which operations have no measured kernels and why."""
    found = dict.fromkeys(entry for one in chosen if "kernels" in one.search
                          for entry in one.search["kernels"].get("untraced", ()))
    if text := untraced_note(list(found)):
        Telling().note(text)
