"""Random numbers that are the same under every plan."""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.partition import Partition, cover
from pase_mtf.lowering.reshard import assemble, move

if TYPE_CHECKING:
    from pase_mtf.lowering.lowering import PlanLowering

__all__ = ["lower_random"]

def lower_random(op: mtf.ops.RandomOperation, lowering: PlanLowering) -> None:
    """The same numbers under every plan: a fixed grid of chunks, each with its own seed for a stateless generator."""
    impl, output, emitter = lowering.mesh_impl(op), op.outputs[0], lowering.emitter
    shape, target = tuple(output.shape.to_integer_list), impl.partition(output.shape)
    generate = _generator(op)
    if generate is None:
        # A function we know nothing of: run it once, with a seed of its own, and cut the result.
        with tf.device(impl.devices[0]):
            total = op._tf_fn(list(shape), seed=zlib.crc32(op.name.encode()) & 0x7fffffff, **op._kwargs)
        source = Partition(impl.spec.devices[:1], ((1, 1),) * len(shape))
        lowering.set_tensor_lowering(output, impl.LaidOutTensor(move([total], source, target, shape, emitter)))
        return
    chunks = math.gcd(shape[0], _CHUNKS) if shape else 1
    grid = ((chunks, 1), *((1, 1),) * (len(shape) - 1)) if shape else ()
    size = (shape[0] // chunks, *shape[1:]) if shape else ()
    made: dict[tuple[str, int], tf.Tensor] = {}

    def chunk(device: str, number: int) -> tf.Tensor:
        if (device, number) not in made:
            key = zlib.crc32(f"{op.name}/{number}".encode()) & 0x7fffffff
            with tf.device(device):
                seed = tf.add(lowering.random_seed(), emitter.constant(device, (key, 0)))
                made[device, number] = generate(device, emitter, emitter.constant(device, size), seed)
        return made[device, number]

    if emitter.shared:
        homes = [impl.spec.devices[number * impl.size // chunks] for number in range(chunks)]
        tensors = [chunk(emitter.devices[home], number) for number, home in enumerate(homes)]
        result = move(tensors, Partition(tuple(homes), grid), target, shape, emitter)
    else:
        # Made where they are used: cheaper than sending them.
        source, result = Partition(tuple(range(chunks)), grid), []
        for position, device in enumerate(impl.devices):
            counts, pieces = cover(source, target, shape, target.parts(position))
            cells = []
            for piece in pieces:
                cell = chunk(device, piece.parts[0] if shape else 0)
                cells.append(cell if piece.size == size else emitter.slice(device, cell, piece.begin, piece.size))
            result.append(assemble(cells, counts, device, emitter))
    lowering.set_tensor_lowering(output, impl.LaidOutTensor(result))


# So many chunks, where the first dim has them: it is the batch, and the batch is what is split most. Fixed, because
# the numbers depend on it.
_CHUNKS = 8


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

    def generate(device: str, emitter: Any, shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        numbers_ = emit(shape=shape, seed=seed, dtype=dtype)
        if scale != 1.0:
            numbers_ = tf.multiply(numbers_, emitter.constant(device, scale, dtype))
        return tf.add(numbers_, emitter.constant(device, low, dtype)) if low else numbers_

    return generate
