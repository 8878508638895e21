"""What the networks of convolutions share: features, convolution, concatenation, and the classifier at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.models import layers
from pase_mtf.models.batch_norm import batch_norm
from pase_mtf.models.checks import kept_dtype
from pase_mtf.models.dropout import dropout
from pase_mtf.models.pooling import global_average_pool, windows
from pase_mtf.models.presets import ImageConfig

__all__ = ["classify", "concatenate", "convolve", "convolve_norm", "image_features", "images"]


def image_features(config: ImageConfig, batch: int) -> dict[str, tuple[mtf.Shape, tf.DType]]:
    """Images with channels last, and a label for each (`Model.features`)."""
    batch_dim, dtype = mtf.Dimension("batch", batch), tf.as_dtype(kept_dtype(config.dtype))
    found = {
        "images": (mtf.Shape([batch_dim, mtf.Dimension("height", config.image), mtf.Dimension("width", config.image),
                              mtf.Dimension("image_channels", config.image_channels)]), dtype),
        "labels": (mtf.Shape([batch_dim]), tf.int32)}
    if config.dropout:
        found["step"] = (mtf.Shape([]), tf.int32)
    return found


def images(features: dict[str, mtf.Tensor], config: ImageConfig) -> mtf.Tensor:
    """The images of `image_features` in the type that the model computes in."""
    found, dtype = features["images"], tf.as_dtype(config.dtype)
    return found if found.dtype == dtype else mtf.cast(found, dtype)


class _Convolution(mtf.Conv2dOperation):
    """Mesh-TF says that a convolution's output has size // stride rows; TensorFlow rounds up, and so does this one."""

    def __init__(self, x: mtf.Tensor, filters: mtf.Tensor, stride: int, padding: str, name: str):
        super().__init__(x, filters, [1, stride, stride, 1], padding, name=name)
        height, width = (
            mtf.Dimension(image.name, windows(image.size, kernel.size, stride, padding))
            for image, kernel in zip(x.shape.dims[-3:-1], filters.shape.dims[:2], strict=True))
        self._out_h_dim, self._out_w_dim = height, width
        shape = mtf.Shape([*x.shape.dims[:-3], height, width, filters.shape.dims[-1]])
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]


def convolve(x: mtf.Tensor, channels: mtf.Dimension, kernel: int | tuple[int, int], config: ImageConfig,
             stride: int = 1, padding: str = "SAME", name: str = "conv") -> mtf.Tensor:
    """A convolution without a bias.

    Args:
      x: [batch, height, width, in-channels]; batch and channels may be split, height and width may not.
      channels: of the output; its name has to differ from that of the in-channels.
      kernel: size of the filter, or its height and width.
      config: `dtype` and `seed` of the variable.
      stride: in both directions.
      padding: "SAME" or "VALID", as TensorFlow means it.
      name: of the operation and, followed by "_filters", of the variable.

    Returns:
      [batch, windows that fit, the same of the width, channels].
    """
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    dims = [mtf.Dimension("kernel_height", kernel[0]), mtf.Dimension("kernel_width", kernel[1]), x.shape.dims[-1],
            channels]
    filters = layers.variable(x.mesh, f"{name}_filters", dims, config,
                              stddev=math.sqrt(2 / math.prod(dim.size for dim in dims[:-1])))
    return _Convolution(x, filters, stride, padding, name).outputs[0]


def convolve_norm(x: mtf.Tensor, channels: mtf.Dimension, kernel: int | tuple[int, int], config: ImageConfig, name: str,
                  stride: int = 1, padding: str = "SAME", relu: bool = True, residual: mtf.Tensor | None = None,
                  epsilon: float = 1e-5) -> mtf.Tensor:
    """Convolution, batch normalisation, and a rectifier if wanted, in a variable scope of that name.

    See `convolve` and `batch_norm` for the arguments.
    """
    with tf.variable_scope(name):
        x = convolve(x, channels, kernel, config, stride, padding)
        return batch_norm(x, config, relu=relu, residual=residual, epsilon=epsilon)


def concatenate(xs: Sequence[mtf.Tensor], name: str) -> mtf.Tensor:
    """Tensors side by side along their last dims, whatever these are called.

    `mtf.concat` wants one name for them, and one rename before and after it for whoever would split the channels
    elsewhere: here it is one operation. The channels stay whole in it; the layers around it may split them.

    Args:
      xs: [..., channels], equal but for the last dim.
      name: of the last dim of the output.
    """
    if len(xs) == 1:
        raise ValueError("one tensor is no concatenation")
    sizes = [x.shape.dims[-1].size for x in xs]
    whole = {name, *(x.shape.dims[-1].name for x in xs)}
    shape = mtf.Shape([*xs[0].shape.dims[:-1], mtf.Dimension(name, sum(sizes))])

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor]:
        return list(mtf.slicewise(
            lambda dy: tuple(tf.split(dy, sizes, -1)), [dy], output_shape=[x.shape for x in xs],
            output_dtype=[x.dtype for x in xs], splittable_dims=shape.dims[:-1], grad_function=0, name="split"))

    return layers.local(lambda *xs: tf.concat(xs, -1), xs, shape, whole, gradient, "concat")


def classify(x: mtf.Tensor, features: dict[str, mtf.Tensor], config: ImageConfig, number: int = 0) -> mtf.Tensor:
    """The end of a network: the mean over the image, dropout, one fully connected layer, cross-entropy.

    Args:
      x: [batch, height, width, channels].
      features: the labels and, with dropout, the step.
      config: `classes`, `dropout`, and `dtype` and `seed` of the variables.
      number: of this end, where a network has several: each drops others.

    Returns:
      The mean cross-entropy in nats, a scalar.
    """
    x = global_average_pool(x)
    channels, classes = x.shape.dims[-1], mtf.Dimension("classes", config.classes)
    if config.dropout:
        x = dropout(x, config.dropout, features["step"], config.seed * 1000 + number)
    with tf.variable_scope("classifier"):
        weights = layers.variable(x.mesh, "weights", [channels, classes], config, stddev=math.sqrt(1 / channels.size))
        bias = layers.zeros(x.mesh, "bias", [classes], config)
        logits = mtf.einsum([x, weights], output_shape=mtf.Shape([*x.shape.dims[:-1], classes]), name="product") + bias
    return layers.cross_entropy(logits, features["labels"], classes)
