"""Measures the machine this runs on: what a roofline needs to know of it, by a few kernels of every kind.

That prices a graph of which nothing but its shapes is known. Where the program itself is at hand, its own kernels are
measured instead (`strategy.measured`). The kernels are timed as those are, on all devices at once; virtual CPU devices
(the default) share the cores of one process, and the rate of all of them together is what is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tqdm import tqdm

from pase_mtf.calibration.cache import check_request, fingerprint
from pase_mtf.calibration.kernels import KernelTimer
from pase_mtf.calibration.links import between_processes, measure_links
from pase_mtf.compat import tf
from pase_mtf.errors import PaseError, UsageError
from pase_mtf.host import memory_bytes
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Block, Kernel, Timing, sum_kernel
from pase_mtf.machine.machine import KINDS, LOCAL, Link, Machine
from pase_mtf.runtime import Devices, gpu_bytes, unfolding_threads

__all__ = ["calibrate", "calibrate_processes", "machine_of_samples", "samples"]

_EVERY = 3.0
"""Seconds from one line to the next that says how far it is."""
_LEAST = 1e-9
"""Seconds: of a message that costs nothing beyond what it carries."""
_LARGE, _SMALL = "all-reduce", "message"
_GPU_SCALE = 4
"""A GPU is through with tensors of the sizes that tell a CPU's speed before it has begun."""
_GPU_LOOKS = 2
"""At GPUs, which differ by orders of magnitude: the first tells how often a kernel is repeated in a run of the second,
so that the clock reads it, and not what starting a run takes."""


def _block(*shape: int, dtype: str = "float32") -> Block:
    return Block(dtype, shape)


def _constant(*values: int) -> Block:
    return Block("int32", (len(values),), values)


def _product(equation: str, *shapes: tuple[int, ...]) -> Kernel:
    *operands, made = (_block(*shape) for shape in shapes)
    return Kernel("Einsum", tuple(operands), (made,), (("equation", equation),))


def _convolutions(batch: int, size: int, channels: int, made: int) -> tuple[Kernel, Kernel, Kernel]:
    """A 3x3 convolution, and the gradients of its image and of its filter."""
    image, result, filters = (batch, size, size, channels), (batch, size, size, made), (3, 3, channels, made)
    how = (("padding", "SAME"), ("strides", (1, 1, 1, 1)))
    read, held, made_of = _block(*image), _block(*filters), _block(*result)
    return (Kernel("Conv2D", (read, held), (made_of,), how),
            Kernel("Conv2DBackpropInput", (_constant(*image), held, made_of), (read,), how),
            Kernel("Conv2DBackpropFilter", (read, _constant(*filters), made_of), (held,), how))


def _elementwise(elements: int) -> Kernel:
    return Kernel("Mul", (_block(elements), _block(elements)), (_block(elements),))


def samples(devices: int, scale: int = 1) -> dict[str, tuple[Kernel, ...]]:
    """The kernels that tell a machine's rates, by what they tell.

    Args:
      devices: how many there are; what passes between devices is only measured where there are two.
      scale: of the sizes of their tensors.

    Returns:
      name -> kernels: the kinds of `Machine.rates`, "traffic" (bytes/s of tensors that no cache holds), "overhead" (of
      any operation) and, of two devices or more, "message" and "all-reduce".
    """
    rows, width = 256 * scale, 512 * scale
    small, large = _convolutions(8, 14, 64 * scale, 128 * scale), _convolutions(8, 28, 32 * scale, 32 * scale)
    rows_of, indices = _block(4 * width, width), Block("int32", (rows,))
    found = {
        "matmul": (_product("ab,bc->ac", (rows, width), (width, width), (rows, width)),
                   _product("ab,bc->ac", (width, 2 * width), (2 * width, width), (width, width))),
        "batched matmul": (_product("abc,acd->abd", (16, rows // 4, 64), (16, 64, rows // 4),
                                    (16, rows // 4, rows // 4)),),
        "convolution": (small[0], large[0], small[1], large[1]),
        "filter gradient": (small[2], large[2]),
        "pointwise": (_elementwise(1 << 13), _elementwise(1 << 15)),
        "reduction": (Kernel("Sum", (_block(rows, width), _constant(1)), (_block(rows),)),),
        "gather": (Kernel("GatherV2", (rows_of, indices, Block("int32", (), (0,))), (_block(rows, width),)),),
        "copy": (Kernel("ConcatV2", (_block(rows, width), _block(rows, width), Block("int32", (), (1,))),
                        (_block(rows, 2 * width),)),),
        "traffic": (_elementwise(scale * scale << 21),),
        "overhead": (Kernel("AddV2", (_block(16), _block(16)), (_block(16),)),)}
    if devices > 1:
        found |= {_SMALL: (sum_kernel(2, 16, 4),), _LARGE: (sum_kernel(2, scale * scale << 18, 4),)}
    return found


def machine_of_samples(named: Mapping[str, tuple[Kernel, ...]], timings: Mapping[Kernel, Timing], devices: int,
                       shared: bool, memory: float) -> Machine:
    """The machine whose kernels took so long.

    A rate is the best that a kernel of its kind reached: what keeps others from it is no property of the machine.

    Args:
      named: of `samples`.
      timings: of those that could be timed.
      devices: how many there are.
      shared: they share cores and memory.
      memory: bytes that one of them can hold.

    Raises:
      PaseError: no kernel of a kind that every program has could be timed.
    """
    overhead = min((timings[kernel].seconds for kernel in named["overhead"] if kernel in timings), default=0.0)

    def rate(name: str) -> float:
        found = [(_work(name, kernel), timings[kernel].seconds) for kernel in named[name] if kernel in timings]
        if not found:
            raise PaseError(f"no kernel of kind {name} could be timed on this machine, such as {named[name][0]}; name "
                            "a data sheet with --machine, or look whether TensorFlow runs here")
        # Of a kernel that is as short as starting one, no more than half is taken for that.
        return max(work / max(seconds - overhead, 0.5 * seconds) for work, seconds in found)

    bandwidth = rate("traffic")
    link = Link(max(devices, 1), bandwidth, 0.0 if shared else _LEAST)
    if _LARGE in named:
        small, = named[_SMALL]
        message = max((timings[small].seconds - overhead) / 2.0, _LEAST) if small in timings else _LEAST
        # A sum of two reads two blocks, makes one, and sends it back.
        link = Link(devices, rate(_LARGE), message)
    rates = {name: rate(name) for name in (*KINDS, "batched matmul", "filter gradient", "copy")}
    return Machine(LOCAL, rates, bandwidth, memory, overhead, (link,), shared_cores=shared)


def _work(name: str, kernel: Kernel) -> float:
    """What a rate counts: bytes, or elements that are copied, or FLOP."""
    if name in ("traffic", _LARGE):
        return float(kernel.nbytes)
    return float(kernel.outputs[0].elements) if name == "copy" else kernel.flops


@contextlib.contextmanager
def _shown(what: str, total: int, progress: bool) -> Iterator[Callable[[int], object]]:
    """Shows how much is done, as it is told: a bar; where the output is no terminal, a line every few seconds."""
    done, last = 0, time.monotonic()
    with tqdm(total=total, desc=what, disable=None if progress else True, leave=False) as bar:
        def told(count: int) -> None:
            nonlocal done, last
            bar.update(count)
            done += count
            if progress and bar.disable and time.monotonic() - last >= _EVERY:
                last = time.monotonic()
                print(f"{what}: {done} of {total} kernels and links are measured, {total - done} are left",
                      file=sys.stderr, flush=True)
        yield told


def _looks(kind: str) -> int:
    """How often kernels are timed."""
    return _GPU_LOOKS if kind == "gpu" else 1


def _timed(kernels: Sequence[Kernel], devices: int, kind: str, over: Devices | None,
           told: Callable[[int], object]) -> dict[Kernel, Timing]:
    """What kernels take, by the last look at them.

    Args:
      kernels: which.
      devices, kind, over: of `KernelTimer`.
      told: called with how many are done with, in each of the looks.
    """
    found = dict[Kernel, Timing]()
    for _ in range(_looks(kind)):
        timer = KernelTimer(devices, kind, KernelTimes(timings=found).estimate if found else None, over)
        for batch in timer.time(kernels, progress=told):
            found |= batch
    return found


def calibrate(devices: int = 8, kind: str = "cpu", *, progress: bool = True, over: Devices | None = None) -> Machine:
    """Measures the devices of this machine, which takes some seconds.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices of one process, which share its cores) or "gpu".
      progress: show a progress bar, or, where the output is no terminal, say now and then how far it is.
      over: the same devices, where they are GPUs of this process, but not the first.

    Returns:
      The machine "local"; `measured` holds what it was measured on and the time of every kernel.

    Raises:
      UsageError: not that many devices of that kind.
      PaseError: a kind of operation cannot be timed here.
    """
    check_request(devices, kind)
    if kind == "gpu" and len(tf.config.list_physical_devices("GPU")) < devices:
        raise UsageError(f"{devices} GPUs: this machine has {len(tf.config.list_physical_devices('GPU'))}; "
                         "use fewer, or virtual CPU devices")
    named = samples(devices, _GPU_SCALE if kind == "gpu" else 1)
    kernels = [kernel for entries in named.values() for kernel in entries]
    with _shown("measuring this machine", _looks(kind) * len(kernels), progress) as told:
        timings = _timed(kernels, devices, kind, over, told)
    shared, where = kind == "cpu", fingerprint(devices, kind, over)
    source = (f"measured here on {where['cores']:g} cores of {where['processor']}, {devices} {kind} devices, "
              f"TensorFlow {where['tensorflow']}")
    memory = memory_bytes() / devices if shared else gpu_bytes(over or Devices.first(devices, kind))
    machine = machine_of_samples(named, timings, devices, shared, memory)
    return dataclasses.replace(machine, source=source, unfolding_threads=unfolding_threads(devices) if shared else 0,
                               measured={"on": where, "kernels": _seconds(timings)})


def _seconds(timings: Mapping[Kernel, Timing]) -> dict[str, float]:
    return {str(kernel): timing.seconds for kernel, timing in timings.items()}


def calibrate_processes(devices: Devices, *, progress: bool = True) -> Machine:
    """Measures devices of several processes, through their servers: what a kernel takes on each while all are busy, and
    the links between the processes.

    Such a machine has no cores that are shared: what each device gets of those of its host is its own rate.

    Args:
      devices: of two processes or more, whose servers answer.
      progress: show a progress bar, or, where the output is no terminal, say now and then how far it is.

    Returns:
      The machine "local", with a level of links for the devices of a process, of a host, and between hosts, as far as
      there are such.

    Raises:
      PaseError: a kind of operation cannot be timed here.
    """
    gpus, each = devices.kind == "gpu", devices.count // len(devices.tasks)
    named = samples(each, _GPU_SCALE if gpus else 1)
    kernels = [kernel for entries in named.values() for kernel in entries]
    levels = between_processes(devices)
    with _shown("measuring these machines", _looks(devices.kind) * len(kernels) + len(levels), progress) as told:
        timings = _timed(kernels, devices.count, devices.kind, devices, told)
        links = measure_links(devices, told)
    memory = gpu_bytes(devices) if gpus else memory_bytes() / devices.on_one_host
    machine = machine_of_samples(named, timings, each, False, memory)
    where = fingerprint(devices.count, devices.kind, devices)
    hosts = len(set(devices.hosts))
    source = (f"measured here over {len(devices.tasks)} processes on {hosts} host{'s' * (hosts > 1)}, "
              f"{where['cores']:g} cores of {where['processor']}, {devices.count} {devices.kind} devices, TensorFlow "
              f"{where['tensorflow']}; " + ", ".join(
                  f"a link of {joined} devices: {link.bandwidth / 1e6:.3g} MB/s each, {1e3 * link.latency:.2g} ms a "
                  "message" for (_, joined), link in zip(levels, links, strict=True)))
    return dataclasses.replace(machine, links=(*(machine.links if each > 1 else ()), *links), source=source,
                               unfolding_threads=0 if gpus else unfolding_threads(devices.on_one_host),
                               measured={"on": where, "kernels": _seconds(timings)})
