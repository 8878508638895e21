"""Pooling and its gradient, over windows that do not overlap."""

from __future__ import annotations

import math

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.operations.protocols import Lowering, StockDemands
from pase_mtf.operations.registry import Rule, add_rules, always, names_of

_ops = mtf.ops


def _splittable(operation: mtf.Operation) -> set[str]:
    """The spatial dims stay whole; the gradient declares them splittable, and they are not."""
    spatial = 2 if "2D" in operation._pool_fn_string else 3
    return names_of(operation) - set(operation.inputs[0].shape.dimension_names[-1 - spatial:-1])


def _demands(operation: mtf.Operation, demands: StockDemands) -> None:
    spatial = operation.inputs[0].shape.dims[-1 - len(operation._ksize):-1]
    demands.keep_whole(operation, [dim.name for dim, window in zip(spatial, operation._ksize, strict=True)
                                   if dim.size % window], "windows do not divide it")


def _lower_gradient(op: mtf.ops.PoolBackPropOperation, lowering: Lowering) -> None:
    """By broadcasting over the windows. As in Mesh-TF, every element of a window that equals its maximum receives the
    whole gradient."""
    if len(op._ksize) == 3:
        # TensorFlow broadcasts over five dims at most.
        op.lower(lowering)
        return
    impl, (x, _, _), window = lowering.mesh_impl(op), op.inputs, op._ksize
    shape, emitter, rank = impl.slice_shape(x.shape), lowering.emitter, len(op._ksize)
    lead, spatial, channels = shape[:-1 - rank], shape[-1 - rank:-1], shape[-1:]
    if any(size % extent for size, extent in zip(spatial, window, strict=True)):
        raise UsageError(f"{op.name}: pooling windows {tuple(window)} do not divide {x.shape}; pad the image")
    fine, coarse = list(lead), list(lead)
    for size, extent in zip(spatial, window, strict=True):
        fine += [size // extent, extent]
        coarse += [size // extent, 1]
    fine, coarse = fine + channels, coarse + channels

    def tf_fn(device: str, x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        dy = emitter.reshape(device, dy, coarse)
        if op._pool_fn_string.startswith("MAX"):
            chosen = tf.equal(emitter.reshape(device, x, fine), emitter.reshape(device, y, coarse))
            dx = tf.multiply(tf.cast(chosen, dy.dtype), dy)
        else:
            scale = emitter.constant(device, 1.0 / math.prod(window), dy.dtype)
            dx = emitter.broadcast(device, tf.multiply(dy, scale), fine)
        return emitter.reshape(device, dx, shape)

    columns = [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in op.inputs]
    lowering.set_tensor_lowering(op.outputs[0], impl.per_device(tf_fn, *columns))


add_rules({
    _ops.PoolOperation: Rule(kind=always("reduction"), splittable=_splittable, stock_splittable=names_of, layer="pool",
                             is_anchor=True, stock_demands=_demands),
    _ops.PoolBackPropOperation: Rule(kind=always("reduction"), splittable=_splittable, stock_splittable=names_of,
                                     lower=_lower_gradient, stock_demands=_demands),
})
