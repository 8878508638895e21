"""Kernel times that were measured on another machine and brought here in a file: a search by them measures nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from pase_mtf.calibration.cache import KERNEL_VERSION, check_request
from pase_mtf.machine.kernel_table import table_for
from pase_mtf.machine.kernels import Kernel

__all__ = ["SavedKernels"]


class SavedKernels:
    """What `KernelMeter` is for the devices at hand, for those of a file.

    Attributes:
      times: all that the file tells.
      devices: how many.
      spent: seconds that measuring took: none.
      disturbed: how many kernels were timed while others slowed the machine: none.
      notes: what people should know of the numbers, a sentence each.
      failed: kernels that cannot be timed here, and why: none was tried.
    """

    spent = 0.0
    disturbed = 0

    def __init__(self, path: str | os.PathLike[str], devices: int) -> None:
        """Reads the file.

        Args:
          path: of the file (`machine.kernel_table`).
          devices: how many.

        Raises:
          FormatError: the file is missing, truncated or something else.
          UsageError: it tells of other numbers of devices.
        """
        check_request(devices, "cpu")
        self.times, self.devices = table_for(path, devices), devices
        self.notes: list[str] = []
        if self.times.on["version"] != KERNEL_VERSION:
            self.notes.append(f"{path}: its kernels were timed in another way (version {self.times.on['version']}, "
                              f"today's is {KERNEL_VERSION}): predictions may be off; measure them again there "
                              "(python -m pase_mtf.calibration --save)")
        self.failed: dict[Kernel, str] = {}

    @property
    def memory_per_device(self) -> float:
        """Bytes that one of the devices may hold, of those that share the memory of their computer."""
        return float(self.times.on["memory"]) / self.devices

    def missing(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Those that are not measured and can be: none can."""
        return []

    def measure(self, kernels: Sequence[Kernel], seconds: float = np.inf,
                progress: Callable[[int], object] = lambda count: None) -> int:
        """Measures nothing; returns how many that were."""
        return 0

    def measure_again(self, kernels: Sequence[Kernel], seconds: float = np.inf,
                      progress: Callable[[int], object] = lambda count: None) -> int:
        """Measures nothing; returns how many that were."""
        return 0
