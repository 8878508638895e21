"""In how many microbatches a run computes its batch: as few as let a strategy keep to the memory."""

from __future__ import annotations

import math

from pase_mtf import models
from pase_mtf.amounts import bytes_text
from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.arms.program import export_with_program
from pase_mtf.launch.plan import Plan
from pase_mtf.machine.machine import Machine
from pase_mtf.models.blocks import ALL
from pase_mtf.strategy.find import least_seconds

__all__ = ["fitting_microbatches"]


def fitting_microbatches(plan: Plan, machine: Machine) -> int:
    """The least number of microbatches under which some strategy keeps to --memory_limit, by a search of each program.

    Args:
      plan: of the run.
      machine: the devices.

    Raises:
      InfeasibleError: there is none, however many.
    """
    limit, batch = plan.options.bytes_per_device(machine), plan.options.batch
    if math.isinf(limit):
        return 1
    most = 1 if models.get(plan.options.model).batch_statistics else batch
    if plan.options.arms[0].method == "data_parallel":  # every microbatch is to split over all devices
        most, batch = min(most, batch // plan.devices.count), batch // plan.devices.count
    for count in (count for count in range(1, most + 1) if batch % count == 0):
        if any(_fits(again.in_microbatches(count), machine, limit) for again in _recomputing(plan)):
            return count
    raise InfeasibleError(f"--microbatches=auto: no strategy keeps to {bytes_text(limit)} per device in up to {most} "
                          "microbatches; take a smaller --preset, more devices, or a larger --memory_limit")


def _recomputing(plan: Plan) -> list[Plan]:
    """With --recompute=auto, the run with no block computed again, and with all; else as it is."""
    return [plan] if plan.options.recomputed is not None else [plan.recomputing(names) for names in ((), (ALL,))]


def _fits(plan: Plan, machine: Machine, limit: float) -> bool:
    """Whether some strategy of a run's program keeps to a limit."""
    graph, _ = export_with_program(plan)
    try:
        least_seconds(graph, plan.devices.count, machine, limit, gap=math.inf)
    except InfeasibleError:
        return False
    return True
