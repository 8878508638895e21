"""Measures the machine this runs on, through the code that training uses, with all devices busy at once.

Virtual CPU devices (the default) share the cores of one process: what is measured there is the rate of all of them
together. It takes about ten seconds; the numbers are kept in the user's cache directory until what they were measured
on changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from pase_mtf.compat import mtf, tf
from pase_mtf.cost.collectives import allreduce_seconds
from pase_mtf.cost.compute import PRODUCTS
from pase_mtf.emit import Emitter
from pase_mtf.errors import FormatError, UsageError, nearest
from pase_mtf.export import export_graph
from pase_mtf.lowering import PlanLowering, uniform_plan
from pase_mtf.machine import KINDS, LOCAL, Link, Machine
from pase_mtf.mesh import DeviceMeshImpl, MeshSpec
from pase_mtf.partition import Partition
from pase_mtf.reshard import move

__all__ = ["VERSION", "cache_path", "calibrate", "fingerprint", "load_local"]

VERSION = 6
"""Of the way of measuring; cached numbers of another version are measured again."""

_REPEATS = 5
_SECONDS = 0.01  # of one run of a sample, if its node takes about as long as expected
_LONG = 0.05  # all runs of a sample together take at least so long
_NODES = 24  # at most, of one sample and device: making a node takes longer than running it


@dataclasses.dataclass(frozen=True)
class _Sample:
    """One measurement.

    Attributes:
      flops, nbytes: work of one node, tensors it reads and writes.
      read: of these bytes, those it reads.
      seconds: that each node took while all devices were busy (of shared cores: its share).
    """

    flops: float
    nbytes: float
    read: float
    seconds: float


def fingerprint(devices: int, kind: str = "cpu") -> dict[str, Any]:
    """What a measurement depends on: measured again when any of it changes."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return {"version": VERSION, "kind": kind, "devices": devices, "processor": model, "cores": _cores(),
            "memory": _memory_bytes(), "tensorflow": tf.__version__, "host": platform.node()}


def _cores() -> float:
    """Cores this process may keep busy: those of the machine, or fewer by its affinity or its control group's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_path(devices: int, kind: str = "cpu") -> pathlib.Path:
    """Where the measured machine is kept: in $XDG_CACHE_HOME/pase_mtf (default ~/.cache/pase_mtf)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    key = hashlib.sha256(json.dumps(fingerprint(devices, kind), sort_keys=True).encode()).hexdigest()[:12]
    return pathlib.Path(root) / "pase_mtf" / f"machine-{kind}-{devices}-{key}.json"


def load_local(devices: int = 8, kind: str = "cpu", *, again: bool = False, progress: bool = True) -> Machine:
    """The machine this runs on: from the cache, or measured now.

    Args:
      devices: number of (virtual) devices.
      kind: "cpu" (virtual devices of one process) or "gpu".
      again: measure even if there are cached numbers.
      progress: show a progress bar while measuring.
    """
    path = cache_path(devices, kind)
    if not again and path.is_file():
        try:
            machine = Machine.load(path)
            if machine.measured.get("on") == fingerprint(devices, kind):
                return machine
        except FormatError:
            pass  # a truncated cache is no reason to fail: measure again
    machine = calibrate(devices, kind, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except (OSError, UsageError):
        pass  # not being able to keep the numbers does not make them wrong
    return machine


class _Bench:
    """Runs nodes on all devices at once, in one graph and session: first all are emitted, then all are measured."""

    def __init__(self, devices: int, kind: str) -> None:
        self.names = tuple(f"/device:{kind.upper()}:{number}" for number in range(devices))
        self.shared = kind == "cpu"
        self.graph = tf.Graph()
        self.emitter = Emitter(self.names)
        self._config = tf.ConfigProto(device_count={"CPU": devices} if self.shared else None)
        # As in training; and equal nodes are not to be merged into one.
        self._config.graph_options.rewrite_options.disable_meta_optimizer = True
        self._config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        self._variables: dict[tuple, Any] = {}
        self._pending: list[tuple[str, tf.Operation, Callable[[float], Any]]] = []

    def tensor(self, device: str, shape: Sequence[int], copy: int = 0) -> tf.Tensor:
        """A tensor that lies on a device, filled with numbers about 1."""
        key = device, tuple(map(int, shape)), copy
        if key not in self._variables:
            with tf.device(device):
                variable = tf.Variable(tf.random.stateless_uniform(key[1], [1, copy], 0.5, 1.5), use_resource=True,
                                       trainable=False, name=f"tensor{len(self._variables)}")
            self._variables[key] = variable
        return self._variables[key]._graph_element

    def add(self, name: str, nodes: Sequence[Any], result: Callable[[float], Any]) -> None:
        """Registers nodes to be run together; `result` makes a sample of their seconds."""
        with self.graph.as_default():
            self._pending.append((name, tf.group(nodes), result))

    def sample(self, name: str, emit: Callable[..., Any], shapes: Sequence[Sequence[int]], flops: float,
               moved: float, nodes: int = 1) -> None:
        """Registers a node that is emitted on every device several times.

        Args:
          name: what it is a sample of.
          emit: makes the node, from tensors of these shapes.
          shapes: of its inputs.
          flops: of one node.
          moved: elements it reads and writes.
          nodes: how many such nodes `emit` makes.
        """
        times = int(np.clip(_SECONDS / len(self.names) / (flops / 5e11 + 4.0 * moved / 3e10) / nodes, 1, _NODES))
        made = []
        for device in self.names:
            tensors = [self.tensor(device, shape, copy) for copy, shape in enumerate(shapes)]
            with tf.device(device):
                made += [emit(*tensors) for _ in range(times)]
        count = times * nodes * (len(self.names) if self.shared else 1)
        self.add(name, made, lambda seconds: _Sample(
            float(flops), 4.0 * float(moved), 4.0 * float(sum(map(math.prod, shapes))), seconds / count))

    def measure(self, progress: Callable[[], None]) -> dict[str, list]:
        """Runs all that is registered.

        Returns:
          Name -> samples; for virtual devices their seconds are those of all cores together.
        """
        with self.graph.as_default():
            nothing = []
            for device in self.names:
                with tf.device(device):
                    nothing.append(tf.no_op())
            start = tf.group(nothing)
            initializer = tf.group([variable.initializer for variable in self._variables.values()])
        samples: dict[str, list] = {}
        with tf.Session(graph=self.graph, config=self._config) as session:
            session.run(initializer)
            idle = _seconds(session, start, self.shared)
            for name, target, result in self._pending:
                seconds = _seconds(session, target, self.shared)
                if seconds > 2.0 * idle:  # else it says more about starting a run
                    samples.setdefault(name, []).append(result(seconds - idle))
                progress()
        return samples

    def __len__(self) -> int:
        return len(self._pending)


def _seconds(session: tf.Session, target: tf.Operation, shared: bool) -> float:
    """Seconds of a run: the least of several.

    Of devices that share cores: the time all cores worked on it, divided by their number, on the average of enough runs
    for a coarse clock. Others who use the same cores make a run longer, but (but for the caches) not its work.
    """
    run = session.make_callable(target)
    run()
    least, runs = np.inf, 0
    begin, begin_work = time.perf_counter(), time.process_time()
    while runs < _REPEATS or time.perf_counter() - begin < _LONG:
        started = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - started)
        runs += 1
    work = (time.process_time() - begin_work) / runs / _cores()
    return work if shared else least


def _add_products(bench: _Bench) -> None:
    """Matrix products of several shapes, and batches of small ones."""
    def add(name: str, equation: str, *shapes: tuple[int, ...]) -> None:
        sizes = {dim: size for dims, shape in zip(equation.split("->")[0].split(","), shapes, strict=True)
                 for dim, size in zip(dims, shape, strict=True)}
        output = math.prod(sizes[dim] for dim in equation.split("->")[1])
        bench.sample(name, lambda *xs: tf.raw_ops.Einsum(inputs=list(xs), equation=equation), shapes,
                     2.0 * math.prod(sizes.values()), sum(map(math.prod, shapes)) + output)

    for m, k, n in ((512, 512, 512), (64, 512, 512), (128, 128, 512), (64, 128, 1024), (8, 2048, 2048),
                    (16, 2048, 1024), (256, 1024, 64), (64, 64, 64), (8, 128, 512)):
        add("matmul", "ab,bc->ac", (m, k), (k, n))
    for m, k, n in ((512, 64, 512), (1024, 16, 1024)):
        add("matmul", "ba,bc->ac", (k, m), (k, n))
    for m, k, n in ((64, 512, 512), (16, 1024, 1024)):
        add("matmul", "ab,cb->ac", (m, k), (n, k))
    for b, h, m, n, k in ((8, 8, 32, 32, 16), (2, 8, 32, 32, 16), (2, 4, 128, 128, 64), (4, 4, 64, 64, 32)):
        add("batched matmul", "abcd,abed->abce", (b, h, m, k), (b, h, n, k))


def _add_convolutions(bench: _Bench) -> None:
    """Convolutions and both their gradients."""
    for batch, size, inputs, window, outputs in (
            (8, 14, 64, 3, 128), (8, 7, 192, 3, 192), (8, 28, 16, 5, 64), (2, 7, 64, 3, 64)):
        image, filters = (batch, size, size, inputs), (window, window, inputs, outputs)
        gradient = (batch, size, size, outputs)
        options = {"strides": [1, 1, 1, 1], "padding": "SAME"}
        flops = 2.0 * math.prod(gradient) * window * window * inputs
        moved = math.prod(image) + math.prod(filters) + math.prod(gradient)
        with tf.device(None):
            image_sizes, filter_sizes = tf.constant(image), tf.constant(filters)
        for emit, shapes in (
                (lambda x, f, o=options: tf.raw_ops.Conv2D(input=x, filter=f, **o), (image, filters)),
                (lambda f, dy, s=image_sizes, o=options: tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=s, filter=f, out_backprop=dy, **o), (filters, gradient)),
                (lambda x, dy, s=filter_sizes, o=options: tf.raw_ops.Conv2DBackpropFilter(
                    input=x, filter_sizes=s, out_backprop=dy, **o), (image, gradient))):
            bench.sample("convolution", emit, shapes, flops, moved)


def _add_traffic(bench: _Bench) -> None:
    """Elementwise operations in a row, nothing but memory traffic: as in an optimizer, most write where they read."""
    def emit(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        product = tf.raw_ops.Mul(x=tf.raw_ops.Mul(x=x, y=y), y=half)
        return tf.raw_ops.AddV2(x=product, y=x)

    half = tf.constant(0.5)
    for size in (1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23):
        bench.sample("traffic", emit, [(size,), (size,)], size, 8 * size / 3, nodes=3)


def _add_others(bench: _Bench) -> None:
    """Elementwise operations of optimizers and activations, reductions, concatenations and slices."""
    for size in (1 << 18, 1 << 20):
        for emit in (lambda x: tf.raw_ops.Sqrt(x=x), lambda x: tf.raw_ops.Square(x=x),
                     lambda x: tf.raw_ops.Reciprocal(x=x), lambda x: tf.raw_ops.Relu(features=x),
                     lambda x: tf.raw_ops.Exp(x=x)):
            bench.sample("pointwise", emit, [(size,)], size, 2 * size)
    axes = [tf.constant([axis]) for axis in range(2)]
    zero, begin = tf.constant(1), tf.constant([0, 64])
    for rows in (512, 2048):
        for axis in axes:
            for emit in (tf.raw_ops.Sum, tf.raw_ops.Max):
                bench.sample("reduction", lambda x, a=axis, f=emit: f(input=x, axis=a), [(rows, 512)], rows * 512,
                             rows * 512)
        bench.sample("gather", lambda x, y: tf.raw_ops.ConcatV2(values=[x, y], axis=zero), [(rows, 256), (rows, 256)],
                     rows * 512, rows * 1024)
        size = tf.constant([rows, 256])
        bench.sample("gather", lambda x, s=size: tf.raw_ops.Slice(input=x, begin=begin, size=s), [(rows, 512)],
                     rows * 256, rows * 512)


def _add_copies(bench: _Bench) -> None:
    """Tensors moved between two splits, through the resharding of training: cut in one dim, joined in another."""
    devices = len(bench.names)
    numbers = tuple(range(devices))
    for shape, cut in (((2 * devices, 64, 16 * devices), 2), ((4 * devices, 128, 16 * devices), 2),
                       ((devices, 16 * devices, 64), 1), ((8 * devices, 16 * devices, 64), 1)):
        source, target = (Partition(numbers, tuple((devices if dim == split else 1, 1) for dim in range(3)))
                          for split in (0, cut))
        tensors = [bench.tensor(device, source.block_shape(shape)) for device in bench.names]
        elements, times, made = math.prod(shape), 4, []
        for _ in range(times):
            # A move is made once: another tensor for every time.
            blocks = move([tf.identity(tensor) for tensor in tensors], source, target, shape, bench.emitter)
            for device, block in zip(bench.names, blocks, strict=True):
                with tf.device(device):
                    made.append(tf.raw_ops.Identity(input=block))
        # Every device cuts once and joins once, and each time copies what it holds.
        bench.add("copy", made, lambda seconds, n=elements, t=times: _Sample(
            n / devices, 8.0 * n / devices, 4.0 * n / devices, seconds / t / (2 * devices if bench.shared else 2)))


def _add_allreduces(bench: _Bench) -> None:
    """All-reduces of several sizes in groups of several sizes, through the mesh implementation of training."""
    devices = len(bench.names)
    for group in (size for size in range(2, devices + 1) if devices % size == 0):
        axes = [(frozenset({"group"}), group)]
        if group < devices:
            axes.insert(0, (frozenset(), devices // group))
        impl = DeviceMeshImpl(MeshSpec(tuple(axes), tuple(range(devices))), bench.emitter)
        for elements in (1 << 12, 1 << 15, 1 << 17, 1 << 20):
            times = int(np.clip(_SECONDS / (4.0 * elements * devices / 1e10), 1, _NODES))
            slices = impl.LaidOutTensor([bench.tensor(device, (elements,)) for device in bench.names])
            nodes = []
            for _ in range(times):
                result = impl.allreduce(slices, [len(axes) - 1], "SUM")
                # Somebody needs the result on every device.
                for device, tensor in zip(bench.names, result.to_laid_out_tensor().tensor_list, strict=True):
                    with tf.device(device):
                        nodes.append(tf.raw_ops.Identity(input=tensor))
            bench.add("all-reduce", nodes, lambda seconds, g=group, n=elements, t=times: _Collective(
                g, 4.0 * n, seconds / t))


def _overhead(devices: int, kind: str) -> float:
    """Seconds per operation and device of a training step whose tensors are so small that little else counts."""
    names = [f"/device:{kind.upper()}:{number}" for number in range(devices)]
    with tf.Graph().as_default() as tf_graph:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, width, other = mtf.Dimension("batch", devices), mtf.Dimension("width", 32), mtf.Dimension("other", 32)
        x = mtf.import_tf_tensor(mesh, tf.ones([devices, 32]), mtf.Shape([batch, width]))
        for number in range(6):
            weights = [mtf.get_variable(mesh, f"w{number}{i}", mtf.Shape(dims), initializer=tf.ones_initializer())
                       for i, dims in enumerate(([width, other], [other], [width]))]
            # Without matrix products, which have an overhead of their own.
            hidden = mtf.relu(mtf.reduce_sum(mtf.multiply(x, weights[0], output_shape=[batch, width, other]),
                                             output_shape=[batch, other]) + weights[1])
            hidden = mtf.rename_dimension(hidden, "other", "width")
            x = mtf.layers.layer_norm(x + hidden * weights[2], width)
        loss = mtf.reduce_mean(mtf.square(x))
        gradients = mtf.gradients([loss], [variable.outputs[0] for variable in graph.trainable_variables])
        updates = mtf.optimize.AdamWeightDecayOptimizer(1e-3).apply_grads(gradients, graph.trainable_variables)
        exported = export_graph(graph)
        lowering = PlanLowering(graph, uniform_plan(graph, f"all:{devices}", "batch:all", names), names)
        step = tf.group([lowering.lowered_operation(update) for update in updates])
        config = tf.ConfigProto(device_count={"CPU": devices} if kind == "cpu" else None)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        initializer, fill = tf.global_variables_initializer(), lowering.copy_masters_to_slices()
        with tf.Session(graph=tf_graph, config=config) as session:
            session.run(initializer)
            session.run(fill)
            seconds = _seconds(session, step, kind == "cpu")
    operations = sum(operation.kind != "none" for layer in exported.layers for operation in layer.operations)
    return seconds / operations / (devices if kind == "cpu" else 1)


@dataclasses.dataclass(frozen=True)
class _Collective:
    """An all-reduce that was measured: group size, bytes per device, seconds of all groups together."""

    group: int
    nbytes: float
    seconds: float


def calibrate(devices: int = 8, kind: str = "cpu", *, progress: bool = True) -> Machine:
    """Measures the devices of this machine.

    Matrix products, convolutions, memory traffic, reductions, resharding and all-reduces of several sizes, with all
    devices busy at once, and the cost of an operation however small; about ten seconds. Of virtual devices the work of
    the cores is measured, so that others who use the same cores disturb it little.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices of one process, which share its cores) or "gpu".
      progress: show a progress bar.

    Returns:
      The machine "local"; `measured` holds what it was measured on and every sample.

    Raises:
      UsageError: not that many devices of that kind.
    """
    if devices < 1:
        raise UsageError(f"{devices} devices: at least one is needed")
    if kind not in ("cpu", "gpu"):
        raise UsageError(f"unknown kind of device {kind!r}: {nearest(kind, ('cpu', 'gpu'))}")
    if kind == "gpu" and len(tf.config.list_physical_devices("GPU")) < devices:
        raise UsageError(f"{devices} GPUs: this machine has {len(tf.config.list_physical_devices('GPU'))}; "
                         "use fewer, or virtual CPU devices")
    bench = _Bench(devices, kind)
    with tqdm(total=1, desc="measuring this machine", disable=None if progress else True, leave=False) as bar:
        with bench.graph.as_default():
            _add_products(bench)
            _add_convolutions(bench)
            _add_traffic(bench)
            _add_others(bench)
            if devices > 1:
                _add_copies(bench)
                _add_allreduces(bench)
        bar.total = len(bench) + 1
        bar.refresh()
        samples = bench.measure(bar.update)
        overhead = _overhead(devices, kind)
        bar.update()
    return _fit(samples, overhead, devices, kind)


def _fit(samples: dict[str, list], overhead: float, devices: int, kind: str) -> Machine:
    """The machine whose predictions have the least relative errors."""
    shared = kind == "cpu"
    memory_bandwidth, cache_bytes, cache_bandwidth = _fit_traffic(samples["traffic"])
    machine = Machine(
        LOCAL, dict.fromkeys(KINDS, 1e12), memory_bandwidth, _memory_bytes() / (devices if shared else 1), overhead,
        (Link(max(devices, 2), memory_bandwidth, overhead),), shared, cache_bytes, cache_bandwidth)
    rates = {name: _fit_rate(samples[name], machine)[0] for name in ("pointwise", "reduction", "gather")}
    overheads = {}
    rates["convolution"], overheads["convolution"], _ = _fit_rate(samples["convolution"], machine, starts=True)
    if samples.get("copy"):
        rates["copy"], overheads["copy"], _ = _fit_rate(samples["copy"], machine, starts=True)
    machine = dataclasses.replace(machine, packing=_fit_packing(samples["matmul"], machine))
    for name in PRODUCTS:
        rates[name], overheads[name], _ = _fit_rate(samples[name], machine, starts=True)
    links = machine.links
    if samples.get("all-reduce"):
        links = (_fit_link(samples["all-reduce"], machine, devices),)
    where = fingerprint(devices, kind)
    return dataclasses.replace(
        machine, rates=rates, overheads=overheads, links=links,
        source=f"measured here on {where['cores']:g} cores of {where['processor']}, {devices} {kind} devices, "
               f"TensorFlow {where['tensorflow']}",
        measured={"on": where, "samples": {
            name: [dataclasses.asdict(sample) for sample in found] for name, found in samples.items()}})


def _least_relative(rows: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Nonnegative x with the least sum of squares of (rows @ x - seconds) / seconds: (x, that sum)."""
    scaled, unknowns = rows / seconds[:, None], rows.shape[1]
    best = np.zeros(unknowns), np.inf
    # Few unknowns: try every set of those that are not zero.
    for chosen in itertools.product((False, True), repeat=unknowns):
        found = np.zeros(unknowns)
        if any(chosen):
            found[list(chosen)] = np.linalg.lstsq(scaled[:, list(chosen)], np.ones(len(seconds)), rcond=None)[0]
        error = float(np.square(scaled @ found - 1.0).sum())
        if found.min() >= 0 and error < best[1]:
            best = found, error
    return best


def _fit_traffic(samples: Sequence[_Sample]) -> tuple[float, float, float]:
    """Memory bandwidth, bytes an operation may move at the cache's bandwidth, and that bandwidth."""
    nbytes = np.array([sample.nbytes for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    cache_bytes, bandwidth, times = (axis.ravel() for axis in np.meshgrid(
        np.geomspace(1 << 19, 1 << 25, 13), np.geomspace(1e9, 1e13, 121), np.geomspace(1, 16, 33)))
    # Few samples, some of them disturbed: the least sum of relative errors, not of their squares.
    errors = np.zeros(len(bandwidth))
    for moved, measured in zip(nbytes, seconds, strict=True):
        predicted = (np.minimum(moved, cache_bytes) / times + np.maximum(moved - cache_bytes, 0)) / bandwidth
        errors += np.abs(np.log(predicted / measured))
    best = int(np.argmin(errors))
    return float(bandwidth[best]), float(cache_bytes[best]), float(bandwidth[best] * times[best])


_OVERHEADS = np.concatenate([[0.0], np.geomspace(1e-6, 1e-4, 25)])


def _fit_rate(samples: Sequence[_Sample], machine: Machine, *, starts: bool = False) -> tuple[float, float, float]:
    """What fits best to the longer of arithmetic and traffic, and the packing of operands.

    Args:
      samples: of one kind of operation.
      machine: its traffic and packing.
      starts: whether the kind may have an overhead of its own.

    Returns:
      (FLOP/s, overhead, the error that is left).
    """
    flops, nbytes, read, seconds = (np.array([getattr(sample, name) for sample in samples])
                                    for name in ("flops", "nbytes", "read", "seconds"))
    traffic, packing = machine.traffic_seconds(nbytes), machine.traffic_seconds(machine.packing * read)
    rates = np.geomspace(1e8, 1e15, 701)
    best = np.inf, 0.0, 0.0
    for overhead in _OVERHEADS if starts else _OVERHEADS[:1]:
        predicted = np.maximum(flops / rates[:, None], traffic) + packing + overhead
        errors = np.abs(np.log(predicted / seconds)).sum(axis=1)
        index = int(np.argmin(errors))
        if errors[index] < best[0]:
            best = float(errors[index]), float(rates[index]), float(overhead)
    return best[1], best[2], best[0]


def _fit_packing(samples: Sequence[_Sample], machine: Machine) -> float:
    """How often the operands of a matrix product are read again, at the rate and overhead that fit best with it."""
    choices = np.linspace(0.0, 8.0, 33)
    errors = [_fit_rate(samples, dataclasses.replace(machine, packing=float(choice)), starts=True)[2]
              for choice in choices]
    return float(choices[int(np.argmin(errors))])


def _fit_link(samples: Sequence[_Collective], machine: Machine, devices: int) -> Link:
    """Latency and bandwidth with which `allreduce_seconds` comes nearest to what was measured."""
    seconds = np.array([sample.seconds for sample in samples])
    rows = []
    for sample in samples:
        groups = np.array([[float(sample.group)]])
        count, nbytes = np.array([devices]), np.array([sample.nbytes])

        def price(latency: float, inverse_bandwidth: float, groups: Any = groups, count: Any = count,
                  nbytes: Any = nbytes) -> float:
            link = Link(max(devices, 2), 1.0 / inverse_bandwidth, latency)
            return float(allreduce_seconds(nbytes, groups, count, dataclasses.replace(machine, links=(link,)))[0])

        # The price is linear in both.
        base = price(0.0, 1e-30)
        rows.append([price(1.0, 1e-30) - base, price(0.0, 1.0) - base, base])
    rows = np.array(rows)
    found, _ = _least_relative(rows[:, :2], np.maximum(seconds - rows[:, 2], 0.2 * seconds))
    return Link(max(devices, 2), float(1.0 / max(found[1], 1e-13)), float(found[0]))
