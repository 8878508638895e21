"""AlexNet: convolutions with pooling, then fully connected layers (Krizhevsky et al. 2012, without its two-GPU groups
and local response normalisation).

Every layer's channels have a dim of their own: a layer's input and output channels can be split differently, and a
layout rule can name one layer. Height and width cannot be split in Mesh-TF's convolution.
"""

from __future__ import annotations

import functools
import math

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model, layers
from pase_mtf.models.blocks import block
from pase_mtf.models.convolutional import image_features, images
from pase_mtf.models.dropout import dropout
from pase_mtf.models.pooling import max_pool
from pase_mtf.models.presets import AlexnetConfig, Convolution

__all__ = ["MODEL", "loss"]


def _convolve(number: int, convolution: Convolution, config: AlexnetConfig, x: mtf.Tensor) -> mtf.Tensor:
    size, channels = x.shape.dims[-2].size, x.shape.dims[-1]
    kernel, stride = convolution.kernel, convolution.stride
    # Mesh-TF says a convolution's output has size // stride rows, TensorFlow rounds up. Zeros make the two agree: with
    # "VALID" at the far end, where no window but those TensorFlow would use anyway sees them; with "SAME" at the near
    # end as many as TensorFlow then puts there too few: half of what it adds in all is to be there.
    same = convolution.padding == "SAME"
    more = -(size if same else size - kernel + 1) % stride
    if more:
        near = max(kernel - stride + more, 0) // 2 - max(kernel - stride, 0) // 2 if same else 0
        for name in ("height", "width"):
            x = mtf.pad(x, [near, more - near], name)
    output = mtf.Dimension(f"conv{number}", convolution.channels)
    filters = layers.variable(
        x.mesh, "filters", [mtf.Dimension("kernel_height", kernel), mtf.Dimension("kernel_width", kernel), channels,
                            output], config, stddev=math.sqrt(2 / (kernel * kernel * channels.size)))
    bias = layers.zeros(x.mesh, "bias", [output], config)
    x = mtf.Conv2dOperation(x, filters, [1, stride, stride, 1], convolution.padding, name="conv").outputs[0]
    x = layers.relu(x, bias)
    if convolution.pool:
        x = max_pool(x, convolution.pool, convolution.pool_stride)
    return x


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: AlexnetConfig) -> mtf.Tensor:
    """Mean cross-entropy of the labels, in nats."""
    x = images(features, config)
    batch_dim = x.shape.dims[0]
    for number, convolution in enumerate(config.convolutions, 1):
        with tf.variable_scope(f"conv{number}"):
            x = block(f"conv{number}", functools.partial(_convolve, number, convolution, config), [x])
    widths = [*((f"fc{number}", width) for number, width in enumerate(config.fully_connected, 1)),
              ("classes", config.classes)]
    for number, (name, width) in enumerate(widths, 1):
        with tf.variable_scope(f"fc{number}"):
            output = mtf.Dimension(name, width)
            # The first one contracts height, width and channels at once: flattening would need a reshape.
            inputs = x.shape.dims[1:]
            hidden = name != "classes"
            fan_in = math.prod(dim.size for dim in inputs)
            weights = layers.variable(mesh, "weights", [*inputs, output], config,
                                      stddev=math.sqrt((2 if hidden else 1) / fan_in))
            bias = layers.zeros(mesh, "bias", [output], config)
            x = mtf.einsum([x, weights], output_shape=mtf.Shape([batch_dim, output]), name="product")
            if hidden:
                x = layers.relu(x, bias)
                if config.dropout:
                    x = dropout(x, config.dropout, features["step"], config.seed * 1000 + number)
            else:
                x = x + bias
    return layers.cross_entropy(x, features["labels"], x.shape.dims[-1])


MODEL = Model("alexnet", "images", image_features, loss)
