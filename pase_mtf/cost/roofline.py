"""A machine that no kernel beats: the best rates that any measured kernel has reached."""

from __future__ import annotations

from collections.abc import Iterable

from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Kernel, Timing
from pase_mtf.machine.machine import LOCAL, Link, Machine

__all__ = ["roofline_machine", "still_true"]


def _best(timings: Iterable[tuple[Kernel, Timing]], *, flops: bool) -> float:
    return max(((kernel.flops if flops else kernel.nbytes) / timing.seconds for kernel, timing in timings), default=1.0)


def roofline_machine(times: KernelTimes, devices: int, memory_bytes: float, source: str = "") -> Machine:
    """Devices that share cores, at the best rates of all kernels that were measured on them.

    A layer that is priced on it costs no more than its kernels do: every one of them reads what it works on and writes
    what it makes, at no better a rate, and none is shorter than the shortest. Messages cost nothing besides.

    Args:
      times: of some kernels of each kind at least.
      devices: how many share the cores.
      memory_bytes: of one device.
      source: where the numbers come from, for people.
    """
    copying = [(kernel, timing) for kernel, timing in times.items() if not kernel.by_reference]
    best = {family: _best([entry for entry in copying if entry[0].family == family], flops=True)
            for family in ("matmul", "convolution", "filter gradient", "pointwise")}
    rate = max(best.values())
    rates = {kind: best[kind] if best[kind] > 1.0 else rate
             for kind in ("matmul", "convolution", "filter gradient", "pointwise")}
    least = min((timing.seconds for _, timing in times.items()), default=1e-9)
    # What is looked up or sliced is copied once; a reduction does as much arithmetic as it reads elements.
    rates |= {"reduction": rates["pointwise"], "gather": rate, "batched matmul": rates["matmul"]}
    bandwidth = _best(copying, flops=False)
    unfolds = times.on.get("kind") == "cpu" and not times.on.get("onednn", True)
    return Machine(name=LOCAL, rates=rates, memory_bandwidth=bandwidth, memory_bytes=memory_bytes, overhead=least,
                   overhead_within=True, links=(Link(max(devices, 1), bandwidth, 0.0),), shared_cores=True,
                   source=source, unfolding_threads=times.on["threads"] if unfolds else 0)


def still_true(before: Machine, now: Machine) -> float:
    """What fraction of a price on one roofline machine is still a bound once more kernels are known: those may have
    been faster than any before.

    Args:
      before, now: `roofline_machine` of fewer kernels, and of more.

    Returns:
      above 0, at most 1.
    """
    ratios = [rate / now.rates[kind] for kind, rate in before.rates.items()]
    if before.overhead > 0.0:
        ratios.append(now.overhead / before.overhead)
    return min(1.0, before.memory_bandwidth / now.memory_bandwidth, *ratios)
