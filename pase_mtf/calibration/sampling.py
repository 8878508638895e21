"""Samples of a machine: operations run on all devices at once, through the code that training uses, and timed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pase_mtf.calibration.samples import CollectiveSample, OperationSample, Samples
from pase_mtf.compat import placement_mesh_impl, tf
from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.lowering.reshard import move
from pase_mtf.runtime import Devices, cores, session_config

__all__ = ["Bench", "benches", "seconds_of"]

_REPEATS = 5
_SECONDS = 0.01  # of one run of a sample, if its node takes about as long as expected
_LONG = 0.04  # all runs of a sample together take at least so long
_NODES = 16  # at most, of one sample and device: making a node takes longer than running it
_NODES_IN_ROWS = 512  # at least, on all devices, where next to no work is measured
_SETS = 6  # of operands that take turns on a device, to be out of the innermost caches when their turn comes


class Bench:
    """Runs nodes on all devices at once, in one graph and session: first all are emitted, then all are measured."""

    def __init__(self, devices: int, kind: str) -> None:
        chosen = Devices.first(devices, kind)
        self.names = chosen.names
        self.shared = kind == "cpu"
        self.graph = tf.Graph()
        self.emitter = Emitter(self.names)
        self._config = session_config(chosen)
        # Equal nodes are not to be merged into one.
        self._config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        self._variables: dict[tuple[str, tuple[int, ...], int], tf.Variable] = {}
        self._pending: list[tuple[str, tf.Operation, Callable[[float], OperationSample | CollectiveSample]]] = []

    def tensor(self, device: str, shape: Sequence[int], copy: int = 0) -> tf.Tensor:
        """A tensor that lies on a device, filled with numbers about 1."""
        key = device, tuple(map(int, shape)), copy
        if key not in self._variables:
            with tf.device(device):
                variable = tf.Variable(tf.random.stateless_uniform(key[1], [1, copy], 0.5, 1.5), use_resource=True,
                                       trainable=False, name=f"tensor{len(self._variables)}")
            self._variables[key] = variable
        return self._variables[key]._graph_element

    def add(self, name: str, nodes: Sequence[tf.Tensor | tf.Operation],
            result: Callable[[float], OperationSample | CollectiveSample]) -> None:
        """Registers nodes to be run together; `result` makes a sample of their seconds."""
        with self.graph.as_default():
            self._pending.append((name, tf.group(nodes), result))

    def times(self, flops: float, moved: float) -> int:
        """How often a node of so many FLOP and elements is emitted on every device."""
        return int(np.clip(_SECONDS / len(self.names) / (flops / 5e11 + 4.0 * moved / 3e10), 1, _NODES))

    def sample(self, name: str, emit: Callable[..., tf.Tensor], shapes: Sequence[Sequence[int]], flops: float,
               moved: float, nodes: int = 1, cold: bool = False, channels: int = 0, image_ratio: float = 1.0,
               taps: float = 0.0, broadcast_runs: float = 0.0) -> None:
        """Registers a node that is emitted on every device several times.

        Args:
          name: what it is a sample of.
          emit: makes the node, from tensors of these shapes.
          shapes: of its inputs.
          flops: of one node.
          moved: elements it reads and writes.
          nodes: how many such nodes `emit` makes.
          channels, image_ratio, taps, broadcast_runs: see `OperationSample`.
          cold: nodes take turns with several sets of tensors and find them where those of a training step are, not in
            the innermost cache.
        """
        times = self.times(flops * nodes, moved * nodes)
        made = []
        for device in self.names:
            for turn in range(times):
                # Copies of their own: nothing is in a cache that another node just read.
                first = turn % _SETS * len(shapes) if cold else 0
                tensors = [self.tensor(device, shape, first + copy) for copy, shape in enumerate(shapes)]
                with tf.device(device):
                    made.append(emit(*tensors))
        count = times * nodes * (len(self.names) if self.shared else 1)
        self.add(name, made, lambda seconds: OperationSample(
            float(flops), 4.0 * float(moved), 4.0 * float(sum(map(math.prod, shapes))), seconds / count, channels,
            float(image_ratio), float(taps), float(broadcast_runs)))

    def measure(self, progress: Callable[[], object]) -> Samples:
        """Runs all that is registered; for virtual devices the seconds are those of all cores together."""
        with self.graph.as_default():
            nothing = []
            for device in self.names:
                with tf.device(device):
                    nothing.append(tf.no_op())
            start = tf.group(nothing)
            initializer = tf.group([variable.initializer for variable in self._variables.values()])
        samples = Samples()
        with tf.Session(graph=self.graph, config=self._config) as session:
            session.run(initializer)
            idle = min(seconds_of(session, start, self.shared) for _ in range(2))
            short = []
            for name, target, result in self._pending:
                seconds = seconds_of(session, target, self.shared)
                if seconds > 2.0 * idle:
                    samples.add(name, result(seconds - idle))
                else:  # it says more about starting a run
                    short.append((name, result(0.5 * seconds)))
                progress()
        # Of what nothing longer is known, the most that it can take is better than nothing.
        known = {*samples.operations, *samples.collectives}
        for name, sample in short:
            if name not in known:
                samples.add(name, sample)
        return samples

    def __len__(self) -> int:
        return len(self._pending)


def seconds_of(session: tf.Session, target: tf.Operation, shared: bool) -> float:
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
    work = (time.process_time() - begin_work) / runs / cores()
    return work if shared else least


def _add_products(bench: Bench) -> None:
    """Matrix products of several shapes, and batches of small ones."""
    def add(name: str, equation: str, *shapes: tuple[int, ...]) -> None:
        sizes = {dim: size for dims, shape in zip(equation.split("->")[0].split(","), shapes, strict=True)
                 for dim, size in zip(dims, shape, strict=True)}
        output = math.prod(sizes[dim] for dim in equation.split("->")[1])
        bench.sample(name, lambda *xs: tf.raw_ops.Einsum(inputs=list(xs), equation=equation), shapes,
                     2.0 * math.prod(sizes.values()), sum(map(math.prod, shapes)) + output, cold=True)

    for m, k, n in ((512, 512, 512), (64, 512, 512), (128, 128, 512), (64, 128, 1024), (8, 2048, 2048),
                    (16, 2048, 1024), (256, 1024, 64), (64, 64, 64), (8, 128, 512)):
        add("matmul", "ab,bc->ac", (m, k), (k, n))
    for m, k, n in ((512, 64, 512), (1024, 16, 1024), (2048, 8, 2048), (512, 8, 512), (1024, 64, 1024)):
        add("matmul", "ba,bc->ac", (k, m), (k, n))
    for m, k, n in ((64, 512, 512), (16, 1024, 1024)):
        add("matmul", "ab,cb->ac", (m, k), (n, k))
    for b, h, m, n, k in ((8, 8, 32, 32, 16), (2, 8, 32, 32, 16), (2, 4, 128, 128, 64), (4, 4, 64, 64, 32)):
        add("batched matmul", "abcd,abed->abce", (b, h, m, k), (b, h, n, k))


def _add_readings(bench: Bench) -> None:
    """Products of few rows, which take what it takes to read their weights: for the first time, and over again."""
    for nbytes in _WEIGHTS:
        columns = nbytes // len(bench.names) // (4 * _DEPTH)
        for name, cold in (("read", True), ("cached read", False)):
            bench.sample(name, lambda x, y: tf.raw_ops.Einsum(inputs=[x, y], equation="ab,bc->ac"),
                         [(_FEW, _DEPTH), (_DEPTH, columns)], 2.0 * _FEW * _DEPTH * columns,
                         _FEW * _DEPTH + _DEPTH * columns + _FEW * columns, cold=cold)


_WEIGHTS = tuple(mebibytes << 20 for mebibytes in (8, 16, 32, 64, 128))  # of all devices together
_FEW, _DEPTH = 4, 512


def _add_convolutions(bench: Bench) -> None:
    """Convolutions and both their gradients: of many channels, of few, of next to no work, and with stride."""
    for batch, size, inputs, window, outputs, stride in (
            (8, 14, 64, 3, 128, 1), (8, 7, 192, 3, 192, 1), (8, 28, 16, 5, 64, 1), (2, 7, 64, 3, 64, 1),
            (8, 14, 16, 3, 16, 1), (8, 14, 64, 1, 16, 1), (16, 14, 64, 3, 4, 1), (16, 14, 4, 3, 64, 1),
            (8, 28, 2, 3, 32, 1), (8, 14, 32, 3, 64, 2), (8, 14, 64, 1, 128, 2), (8, 28, 16, 3, 32, 2),
            (64, 14, 2, 3, 16, 1), (64, 14, 64, 1, 8, 1), (8, 28, 16, 1, 64, 1), (64, 14, 64, 1, 16, 2)):
        image, filters = (batch, size, size, inputs), (window, window, inputs, outputs)
        gradient = (batch, size // stride, size // stride, outputs)
        options = {"strides": [1, stride, stride, 1], "padding": "SAME"}
        flops = 2.0 * math.prod(gradient) * window * window * inputs
        moved = math.prod(image) + math.prod(filters) + math.prod(gradient)
        with tf.device(None):
            image_sizes, filter_sizes = tf.constant(image), tf.constant(filters)
        pixels, image_pixels = (window * window * math.prod(shape[:-1]) for shape in (gradient, image))
        for name, channels, ratio, taps, emit, shapes in (
                ("convolution", outputs, 1, pixels, lambda x, f, o=options: tf.raw_ops.Conv2D(
                    input=x, filter=f, **o), (image, filters)),
                ("convolution", inputs, stride**2, image_pixels, lambda f, dy, s=image_sizes, o=options:
                    tf.raw_ops.Conv2DBackpropInput(input_sizes=s, filter=f, out_backprop=dy, **o), (filters, gradient)),
                ("filter gradient", outputs, 1, 0, lambda x, dy, s=filter_sizes, o=options:
                    tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=s, out_backprop=dy, **o),
                    (image, gradient))):
            bench.sample(name, emit, shapes, flops, moved, channels=channels, image_ratio=ratio, taps=taps, cold=True)


def _add_traffic(bench: Bench) -> None:
    """Elementwise operations in a row, nothing but memory traffic: as in an optimizer, most write where they read."""
    def emit(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        product = tf.raw_ops.Mul(x=tf.raw_ops.Mul(x=x, y=y), y=half)
        return tf.raw_ops.AddV2(x=product, y=x)

    half = tf.constant(0.5)
    for size in (1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23):
        bench.sample("traffic", emit, [(size,), (size,)], size, 8 * size / 3, nodes=3, cold=True)


def _add_nodes(bench: Bench) -> None:
    """Nodes in a row with next to no work: what every node costs."""
    def emit(x: tf.Tensor) -> tf.Tensor:
        for _ in range(row):
            x = tf.raw_ops.AddV2(x=x, y=x)
        return x

    # Enough of them to take several times as long as starting a run does; samples that do not are dropped.
    row = max(6, -(-_NODES_IN_ROWS // (bench.times(256, 512) * len(bench.names))))
    for size in (16, 64, 256):
        bench.sample("node", emit, [(size,)], size, 2 * size, nodes=row)


def _add_broadcasts(bench: Bench) -> None:
    """Elementwise operations of a tensor and one of fewer dims, as with an offset per channel."""
    for runs, channels in ((1568, 8), (1568, 32), (6272, 2), (6272, 16), (392, 32), (4096, 16)):
        for inner, smaller in ((True, (channels,)), (False, (runs, 1))):
            if inner or channels > 8:
                bench.sample("broadcast", lambda x, y: tf.raw_ops.Mul(x=x, y=y), [(runs, channels), smaller],
                             runs * channels, 2 * runs * channels + math.prod(smaller), broadcast_runs=runs, cold=True)


def _add_others(bench: Bench) -> None:
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


def _add_copies(bench: Bench) -> None:
    """Tensors moved between two splits, through the resharding of training: split in one dim, joined in another."""
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
        # Every device splits once and joins once, and each time copies what it holds.
        bench.add("copy", made, functools.partial(_copied, elements / devices,
                                                  times * (2 * devices if bench.shared else 2)))


def _copied(elements: float, times: int, seconds: float) -> OperationSample:
    return OperationSample(elements, 8.0 * elements, 4.0 * elements, seconds / times)


def _summed(group: int, elements: int, times: int, seconds: float) -> CollectiveSample:
    return CollectiveSample(group, 4.0 * elements, seconds / times)


def _add_allreduces(bench: Bench) -> None:
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
            bench.add("all-reduce", nodes, functools.partial(_summed, group, elements, times))


def _add_rings(bench: Bench) -> None:
    """Mesh-TF's own all-reduces, for layouts that stock `mtf.Lowering` lowers."""
    if not bench.shared:
        return
    devices = len(bench.names)
    for group in (size for size in range(2, devices + 1) if devices % size == 0):
        shape = f"others:{devices // group};group:{group}" if group < devices else f"group:{group}"
        impl = placement_mesh_impl.PlacementMeshImpl(shape, [], list(bench.names))
        for elements in (1 << 6, 1 << 12, 1 << 15, 1 << 18):
            slices = impl.LaidOutTensor([bench.tensor(device, (elements,)) for device in bench.names])
            nodes = []
            for _ in range(2):
                result = impl.allreduce(slices, [int(group < devices)], "SUM")
                for device, tensor in zip(bench.names, result.to_laid_out_tensor().tensor_list, strict=True):
                    with tf.device(device):
                        nodes.append(tf.raw_ops.Identity(input=tensor))
            bench.add("ring", nodes, functools.partial(_summed, group, elements, 2))


def benches(devices: int, kind: str) -> Iterator[Bench]:
    """Everything that is measured of a machine, in a few benches: TensorFlow looks through a whole graph at the first
    run of every node that is asked for.

    Args:
      devices: how many.
      kind: "cpu" (virtual devices) or "gpu".

    Yields:
      A bench with its samples registered; `measure` it before the next is made.
    """
    for sections in _SECTIONS:
        bench = Bench(devices, kind)
        with bench.graph.as_default():
            for section in sections:
                if devices > 1 or section not in _BETWEEN_DEVICES:
                    section(bench)
        if len(bench):
            yield bench


_SECTIONS = ((_add_products, _add_readings), (_add_convolutions,),
             (_add_nodes, _add_traffic, _add_broadcasts, _add_others), (_add_copies, _add_allreduces, _add_rings))
_BETWEEN_DEVICES = _SECTIONS[-1]
