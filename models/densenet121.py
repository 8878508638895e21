"""DenseNet (Huang et al. 2017, DenseNet-BC): every layer of a block reads the outputs of all layers before it.

Dims of channels: `stem`; `features` for everything that a block has gathered so far; `bottleneck` and `growth` for the
two convolutions of a layer; `transition` between blocks. Height and width cannot be split in Mesh-TF's convolution.

Where the padding of a stride is uneven, TensorFlow's "SAME" puts the odd row at the end.
"""

from __future__ import annotations

import functools

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model
from pase_mtf.models.batch_norm import batch_norm
from pase_mtf.models.blocks import block
from pase_mtf.models.convolutional import classify, concatenate, convolve, convolve_norm, image_features, images
from pase_mtf.models.convolutional_presets import DensenetConfig
from pase_mtf.models.pooling import average_pool, max_pool

__all__ = ["MODEL", "loss"]


def _layer(config: DensenetConfig, x: mtf.Tensor) -> mtf.Tensor:
    """What one layer adds: normalised first, then 1x1 and 3x3 convolutions."""
    growth = mtf.Dimension("growth", config.growth)
    bottleneck = mtf.Dimension("bottleneck", config.bottleneck * config.growth)
    y = batch_norm(x, config, "norm", relu=True)
    y = convolve_norm(y, bottleneck, 1, config, "inner")
    return concatenate([x, convolve(y, growth, 3, config)], "features")


def _transition(x: mtf.Tensor, config: DensenetConfig) -> mtf.Tensor:
    """Half as many channels, half the height and width."""
    half = mtf.Dimension("transition", x.shape.dims[-1].size // 2)
    return average_pool(convolve(batch_norm(x, config, relu=True), half, 1, config), 2, 2)


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: DensenetConfig) -> mtf.Tensor:
    """Mean cross-entropy of the labels, in nats."""
    stem = mtf.Dimension("stem", config.stem)
    x = convolve_norm(images(features, config), stem, config.stem_kernel, config, "stem", config.stem_stride)
    if config.stem_pool:
        x = max_pool(x, config.stem_pool, 2, "SAME")
    for stage, count in enumerate(config.blocks, 1):
        for number in range(1, count + 1):
            with tf.variable_scope(f"block{stage}_layer{number}"):
                x = block(f"block{stage}_layer{number}", functools.partial(_layer, config), [x])
        if stage < len(config.blocks):
            with tf.variable_scope(f"transition{stage}"):
                x = _transition(x, config)
    return classify(batch_norm(x, config, "norm", relu=True), features, config)


MODEL = Model("densenet121", "images", image_features, loss)
