"""What this process runs on: the cores it may use, and the threads that TensorFlow gets of them."""

from __future__ import annotations

import os
import pathlib
import platform

__all__ = ["cores", "operation_threads", "processor_name"]


def cores() -> float:
    """Cores this process may keep busy: those of the machine, or fewer by its affinity or its control group's quota."""
    number = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return number if quota == "max" else min(number, int(quota) / int(period))
    except (OSError, ValueError):
        return number


def operation_threads(devices: int) -> int:
    """Threads within one operation on virtual devices: what the cores leave for each device when all are busy.

    More make a training step slower (on 2 cores and 8 devices by a third): the operations of the devices keep all cores
    busy, and those that are spread over several threads wait for them. TensorFlow has one pool of such threads in a
    process, made with the first session.
    """
    return max(1, int(cores() // devices))


def processor_name() -> str:
    """What the system calls its processor, as in "Xeon Gold 6130"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
