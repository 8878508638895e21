"""Batch normalisation over the whole batch, however it is split, with the gradient written out.

Mean and variance are sums over batch, height and width: where these are split, Mesh-TF all-reduces a vector of a number
per channel. Every device then normalises with the statistics of the whole batch, so that a strategy does not change
the mathematics (TensorFlow's own replicated batch normalisation takes those of each device's part).

Training statistics only: moving averages, which nothing but evaluation reads, are not kept.
"""

from __future__ import annotations

from pase_mtf.compat import mtf, tf
from pase_mtf.models import layers
from pase_mtf.models.presets import ModelConfig

__all__ = ["batch_norm"]


def batch_norm(x: mtf.Tensor, config: ModelConfig, name: str = "norm", relu: bool = False,
               residual: mtf.Tensor | None = None, epsilon: float = 1e-5) -> mtf.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + offset, per channel, and what usually follows it.

    The gradient is written out, in five operations: every one becomes at least p TensorFlow nodes, and those of the
    size of x a pass over memory. The rectifier and the sum with a residual are done in the pass that normalises.

    Args:
      x: [..., channels]; every dim may be split.
      config: `dtype` and `seed` of the variables.
      name: of the variable scope.
      relu: take the maximum with 0 at the end.
      residual: of the shape of x, added before the rectifier.
      epsilon: added to the variance.

    Returns:
      The shape of x. Variables: "scale" (starts as ones) and "offset" (as zeros).
    """
    channels = x.shape.dims[-1]
    vector = mtf.Shape([channels])
    share = 1 / (x.shape.size // channels.size)  # of one element in a mean

    def inverse(squares: tf.Tensor) -> tf.Tensor:
        return tf.math.rsqrt(squares * tf.constant(share, squares.dtype) + tf.constant(epsilon, squares.dtype))

    def normalize(centered: tf.Tensor, squares: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor,
                  *residual: tf.Tensor) -> tf.Tensor:
        y = centered * (inverse(squares) * scale) + offset
        for other in residual:
            y += other
        return tf.nn.relu(y) if relu else y

    def backward(dz: tf.Tensor, centered: tf.Tensor, squares: tf.Tensor, scale: tf.Tensor, total: tf.Tensor,
                 product: tf.Tensor) -> tf.Tensor:
        deviation = inverse(squares)
        mean = tf.constant(share, dz.dtype)
        return (dz - total * mean - centered * (product * mean * deviation * deviation)) * (deviation * scale)

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
        centered, squares, scale = operation.inputs[:3]
        dz = dy
        if relu:
            dz = layers.local(lambda dy, y: tf.raw_ops.ReluGrad(gradients=dy, features=y), [dy, operation.outputs[0]],
                              x.shape, name="relu_grad")
        total = mtf.reduce_sum(dz, output_shape=vector)
        product = mtf.einsum([dz, centered], output_shape=vector, name="product_grad")
        d_scale = layers.local(lambda product, squares: product * inverse(squares), [product, squares], vector,
                               name="scale_grad")
        # The gradient for x, through the statistics as well: nothing is left for them, and `center` passes it on.
        dx = layers.local(backward, [dz, centered, squares, scale, total, product], x.shape, name="normalize_grad")
        return [dx, None, d_scale, total, dz][:len(operation.inputs)]

    with tf.variable_scope(name):
        scale = layers.ones(x.mesh, "scale", [channels], config)
        offset = layers.zeros(x.mesh, "offset", [channels], config)
        total = mtf.reduce_sum(x, output_shape=vector)
        # Centred before it is squared: the variance would drown in the square of a large mean.
        centered = layers.local(lambda x, total: x - total * tf.constant(share, x.dtype), [x, total], x.shape,
                                gradient=lambda operation, dy: [dy, None], name="center")
        squares = mtf.einsum([centered, centered], output_shape=vector, name="squares")
        return layers.local(normalize, [centered, squares, scale, offset, *([] if residual is None else [residual])],
                            x.shape, gradient=gradient, name="normalize")
