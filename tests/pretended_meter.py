"""A meter that measures nothing: what kernels take follows from what they are."""

import math
import zlib

from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing


class PretendedMeter:
    """A machine of four devices whose kernels take what their text tells, and no less than their arithmetic and
    traffic."""

    devices, notes = 4, ()
    memory_per_device, spent, disturbed = 1e12, 0.0, 0

    def __init__(self, limit=math.inf):
        self.times = KernelTimes({"cores": 2, "processor": "none", "devices": self.devices, "kind": "cpu",
                                  "tensorflow": "none"})
        self._left, self.failed = math.inf, {}
        self.asked = []
        for shape in ((4096, 4096), (1, 1)):  # the best rates, and the shortest kernel
            self.measure([Kernel(name, (Block("float32", shape),) * 2, (Block("float32", shape),))
                          for name in ("MatMul", "Sub", "ConcatV2", "AddN")], factor=1.0)
        self._left = limit
        self.asked.clear()

    def measure_again(self, kernels, seconds=math.inf, progress=None):
        return 0

    def missing(self, kernels):
        return [kernel for kernel in kernels if kernel not in self.times]

    def measure(self, kernels, seconds=math.inf, progress=None, factor=None):
        new = self.missing(kernels)[:int(min(self._left, 1e9))]
        self._left -= len(new)
        self.asked += new
        self.times.update({kernel: Timing(
            (1e-6 + 1e-11 * kernel.flops + 1e-10 * kernel.nbytes)
            * (factor or 1.0 + zlib.crc32(str(kernel).encode()) % 1000 / 400)) for kernel in new})
        return len(new)
