"""Pooling of images: maximum and average over windows, and average over the whole image.

`mtf.PoolOperation` knows only windows that tile the image, and gives the gradient of a maximum to every element that
equals it. Here is TensorFlow's own pooling, forward and backward, slice by slice: batch and channels may be split,
height and width may not (their windows overlap).
"""

from __future__ import annotations

from pase_mtf.compat import mtf, tf
from pase_mtf.models.layers import local

__all__ = ["average_pool", "global_average_pool", "max_pool", "windows"]


def windows(size: int, window: int, stride: int, padding: str) -> int:
    """How many windows fit on a line, as TensorFlow counts them.

    Args:
      size: of the line.
      window, stride: of the pooling or convolution.
      padding: "SAME" or "VALID".
    """
    return -(-(size if padding == "SAME" else size - window + 1) // stride)


def _pooled(x: mtf.Tensor, window: int, stride: int, padding: str) -> tuple[mtf.Shape, tuple[str, str], dict]:
    """The shape after pooling, the names of height and width, and the arguments of TensorFlow's operations."""
    *batch, height, width, channels = x.shape.dims
    pooled = [mtf.Dimension(dim.name, windows(dim.size, window, stride, padding)) for dim in (height, width)]
    sizes = {"ksize": [1, window, window, 1], "strides": [1, stride, stride, 1], "padding": padding}
    return mtf.Shape([*batch, *pooled, channels]), (height.name, width.name), sizes


def max_pool(x: mtf.Tensor, window: int, stride: int, padding: str = "VALID", name: str = "pool") -> mtf.Tensor:
    """Max pooling over the two dims before the last; windows may overlap.

    Args:
      x: [batch, height, width, channels].
      window, stride: of the pooling, in both directions.
      padding: "SAME" or "VALID", as TensorFlow means it.
      name: of the operation.

    Returns:
      [batch, windows that fit, the same of the width, channels], dims of the same names.
    """
    shape, whole, sizes = _pooled(x, window, stride, padding)

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor]:
        return [local(lambda x, y, dy: tf.raw_ops.MaxPoolGrad(orig_input=x, orig_output=y, grad=dy, **sizes),
                      [*operation.inputs, operation.outputs[0], dy], x.shape, whole, name="pool_grad")]

    return local(lambda x: tf.raw_ops.MaxPool(input=x, **sizes), [x], shape, whole, gradient, name)


def average_pool(x: mtf.Tensor, window: int, stride: int, padding: str = "VALID", name: str = "pool") -> mtf.Tensor:
    """Average pooling over the two dims before the last; what is padded does not count.

    Args:
      x: [batch, height, width, channels].
      window, stride: of the pooling, in both directions.
      padding: "SAME" or "VALID", as TensorFlow means it.
      name: of the operation.

    Returns:
      [batch, windows that fit, the same of the width, channels], dims of the same names.
    """
    shape, whole, sizes = _pooled(x, window, stride, padding)
    height, width = (dim.size for dim in x.shape.dims[-3:-1])

    def backward(dy: tf.Tensor) -> tf.Tensor:
        batch, *_, channels = dy.shape.as_list()  # of the slice
        return tf.raw_ops.AvgPoolGrad(orig_input_shape=[batch, height, width, channels], grad=dy, **sizes)

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor]:
        return [local(backward, [dy], x.shape, whole, name="pool_grad")]

    return local(lambda x: tf.raw_ops.AvgPool(value=x, **sizes), [x], shape, whole, gradient, name)


def global_average_pool(x: mtf.Tensor, name: str = "global_pool") -> mtf.Tensor:
    """The mean over the two dims before the last.

    Args:
      x: [..., height, width, channels].
      name: of the operation.

    Returns:
      [..., channels].
    """
    with tf.variable_scope(name):
        return mtf.reduce_mean(x, output_shape=mtf.Shape([*x.shape.dims[:-3], x.shape.dims[-1]]))
