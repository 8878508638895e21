"""Random numbers that are the same under every plan."""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.layer_operation import DRAWN
from pase_mtf.graph.partition import Partition, cover
from pase_mtf.operations.protocols import Emitter, Lowering, Mesh
from pase_mtf.operations.registry import Rule, add_rules, always

_ops = mtf.ops

# So many chunks along a dim, or as many as divide both: 24 can be split by most numbers of devices. Fixed, because the
# numbers depend on it.
_CHUNKS = 24
# Along the first dim: that is the batch, which is split most. And along others, the largest first, as long as a chunk
# has so many elements and there are no more chunks than that: each is some nodes on every device that makes it.
_SMALL, _MOST = 1 << 16, 64


def _lower(op: mtf.ops.RandomOperation, lowering: Lowering) -> None:
    """The same numbers under every plan: a fixed grid of chunks, each with its own seed for a stateless generator."""
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    shape, target = tuple(output.shape.to_integer_list), impl.partition(output.shape)
    generate = _generator(op)
    if generate is None:
        # A function we know nothing of: run it once, with a seed of its own, and split the result.
        seed = zlib.crc32(op.name.encode()) & 0x7fffffff
        total = lowering.emitter.run_on(impl.devices[0], lambda: op._tf_fn(list(shape), seed=seed, **op._kwargs))
        source = Partition(impl.spec.devices[:1], ((1, 1),) * len(shape))
        lowering.set_tensor_lowering(output, impl.LaidOutTensor(lowering.move([total], source, target, shape)))
        return
    chunks = _Chunks(op, lowering, shape, generate)
    make = chunks.shared if lowering.emitter.shared else chunks.local
    lowering.set_tensor_lowering(output, impl.LaidOutTensor(make(impl, target)))


class _Chunks:
    """The chunks of one random tensor, made where they are wanted, once per device."""

    def __init__(self, op: mtf.ops.RandomOperation, lowering: Lowering, shape: tuple[int, ...],
                 generate: Callable[..., tf.Tensor]) -> None:
        self._op, self._lowering, self._shape, self._generate = op, lowering, shape, generate
        counts = _cuts(shape)
        self._count = math.prod(counts)
        self._grid = tuple((count, math.prod(counts[dim + 1:])) for dim, count in enumerate(counts))
        self._size = tuple(size // count for size, count in zip(shape, counts, strict=True))
        self._made: dict[tuple[str, int], tf.Tensor] = {}

    def _chunk(self, device: str, number: int, seed: tf.Tensor) -> tf.Tensor:
        if (device, number) not in self._made:
            emitter = self._lowering.emitter
            key = zlib.crc32(f"{self._op.name}/{number}".encode()) & 0x7fffffff
            with tf.device(device):
                seed = tf.add(seed, emitter.constant(device, (key, 0)))
                self._made[device, number] = self._generate(
                    device, emitter, emitter.constant(device, self._size), seed)
        return self._made[device, number]

    def shared(self, impl: Mesh, target: Partition) -> list[tf.Tensor]:
        """The blocks of the target where devices share a memory: every chunk is made once."""
        names = self._lowering.emitter.devices
        owners = [impl.spec.devices[number * impl.size // self._count] for number in range(self._count)]
        seed = self._lowering.random_seed()
        tensors = [self._chunk(names[owner], number, seed) for number, owner in enumerate(owners)]
        return self._lowering.move(tensors, Partition(tuple(owners), self._grid), target, self._shape)

    def local(self, impl: Mesh, target: Partition) -> list[tf.Tensor]:
        """The blocks of the target, made where they are used: cheaper than sending them."""
        emitter, source = self._lowering.emitter, Partition(tuple(range(self._count)), self._grid)

        def block(device: str, position: int, seed: tf.Tensor) -> tf.Tensor:
            counts, pieces = cover(source, target, self._shape, target.block(position))
            cells = []
            for piece in pieces:
                number = sum(place * stride for place, (_, stride) in zip(piece.block, self._grid, strict=True))
                cell = self._chunk(device, number, seed)
                cells.append(cell if piece.size == self._size else
                             emitter.slice(device, cell, piece.begin, piece.size))
            return self._lowering.assemble(cells, counts, device)

        return emitter.per_device(impl.devices, block, [range(impl.size), [self._lowering.random_seed()] * impl.size])


def _cuts(shape: tuple[int, ...]) -> list[int]:
    """Into how many chunks every dim is cut; a device that has a part of the tensor makes the chunks of that only."""
    counts, of_all = [1] * len(shape), min(_MOST, math.prod(shape) // _SMALL)
    for dim in sorted(range(len(shape)), key=lambda dim: (dim > 0, -shape[dim])):
        most = of_all // math.prod(counts) if dim else _CHUNKS
        divisors = (count for count in range(1, most + 1) if math.gcd(shape[dim], _CHUNKS) % count == 0)
        counts[dim] = max(divisors, default=1)
    return counts


def _generator(op: mtf.ops.RandomOperation) -> Callable | None:
    """A function (device, emitter, shape, seed) for the distributions that have a stateless generator."""
    options = {key: value for key, value in op._kwargs.items() if key not in ("name", "dtype")}
    dtype = op.outputs[0].dtype
    if not dtype.is_floating or any(not isinstance(value, numbers.Real) for value in options.values()):
        return None
    if op._tf_fn is tf.random.uniform and set(options) <= {"minval", "maxval"}:
        emit, low = tf.raw_ops.StatelessRandomUniform, float(options.get("minval", 0.0))
        scale = float(options.get("maxval", 1.0)) - low
    elif op._tf_fn is tf.random.normal and set(options) <= {"mean", "stddev"}:
        emit, low = tf.raw_ops.StatelessRandomNormal, float(options.get("mean", 0.0))
        scale = float(options.get("stddev", 1.0))
    else:
        return None

    def generate(device: str, emitter: Emitter, shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        numbers_ = emit(shape=shape, seed=seed, dtype=dtype)
        if scale != 1.0:
            numbers_ = tf.multiply(numbers_, emitter.constant(device, scale, dtype))
        return tf.add(numbers_, emitter.constant(device, low, dtype)) if low else numbers_

    return generate


add_rules({_ops.RandomOperation: Rule(role=always(DRAWN), lower=_lower, is_random=True)})
