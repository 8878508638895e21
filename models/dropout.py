"""Dropout whose mask depends on the step, the seed and the place of an element in the whole tensor, on nothing else.

`mtf.dropout` draws a mask per slice, so that every mesh and layout trains on other masks and no two strategies can be
compared loss by loss. Here an element's bit is a hash of its global index: slices compute their part of one mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from pase_mtf.compat import mtf, tf

__all__ = ["dropout"]

_WORD = 0xFFFFFFFF


def _mix(x: tf.Tensor) -> tf.Tensor:
    """The 32-bit integer hash "lowbias32" (Chris Wellons, public domain), on int64 that hold 32-bit words.

    int64 because TensorFlow multiplies int32 on the host even when it runs on a GPU. The low 32 bits of a product are
    right whatever overflows above them.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.int64)))
        x = tf.bitwise.bitwise_and(x * tf.constant(factor, tf.int64), tf.constant(_WORD, tf.int64))
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(16, tf.int64)))


def dropout(x: mtf.Tensor, rate: float, step: mtf.Tensor, seed: int,
            noise_dims: Sequence[mtf.Dimension] | None = None) -> mtf.Tensor:
    """Sets a part of the elements to zero and scales up the rest.

    Args:
      x: any shape, floating.
      rate: the part to drop, 0 <= rate < 1; 0 adds nothing to the graph.
      step: scalar integer tensor: every training step draws another mask.
      seed: give every call in a model another one.
      noise_dims: the dims along which the mask varies (elements that differ only in others share their fate); all.

    Returns:
      x times the mask / (1 - rate).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate}: it has to be at least 0 and less than 1")
    if rate == 0:
        return x
    shape = x.shape if noise_dims is None else mtf.Shape([dim for dim in x.shape.dims if dim in noise_dims])
    threshold = round(rate * 2 ** 32)

    def mask(step: tf.Tensor, *places: tf.Tensor) -> tf.Tensor:
        # Step and seed are hashed first: neighbouring steps must not see shifted copies of one mask.
        key = _mix(tf.bitwise.bitwise_and(tf.cast(step, tf.int64), tf.constant(_WORD, tf.int64)))
        key = _mix(tf.bitwise.bitwise_xor(key, tf.constant(seed & _WORD, tf.int64)))
        index, stride = tf.zeros([], tf.int64), 1
        for axis in reversed(range(shape.ndims)):
            place = tf.reshape(places[axis], [-1] + [1] * (shape.ndims - 1 - axis))
            index = index + tf.cast(place, tf.int64) * tf.constant(stride, tf.int64)
            stride *= shape.dims[axis].size
        high = tf.bitwise.right_shift(index, tf.constant(32, tf.int64))
        low = tf.bitwise.bitwise_and(index, tf.constant(_WORD, tf.int64))
        # A tensor of more than 2^32 elements must not repeat its mask.
        drawn = _mix(tf.bitwise.bitwise_xor(_mix(tf.bitwise.bitwise_xor(low, key)), high))
        return tf.cast(drawn >= tf.constant(threshold, tf.int64), x.dtype) * tf.constant(1 / (1 - rate), x.dtype)

    with tf.variable_scope("dropout"):
        places = [mtf.range(x.mesh, dim, tf.int32) for dim in shape.dims]
        factors = mtf.slicewise(mask, [step, *places], output_shape=shape, output_dtype=x.dtype,
                                splittable_dims=shape.dims, grad_function=0, name="mask")
        return mtf.multiply(x, factors, output_shape=x.shape)
