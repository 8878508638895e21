"""ResNet with bottleneck blocks (He et al. 2016; the stride is on the 3x3 convolution, as in version 1.5).

Dims of channels: `stem`; `stage1`, `stage2`, ... for the residual stream; `inner1` and `inner2` for the outputs of the
1x1 and 3x3 convolutions of a block. Height and width cannot be split in Mesh-TF's convolution.

Where the padding of a stride is uneven, TensorFlow's "SAME" puts the odd row at the end.
"""

from __future__ import annotations

import functools

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model
from pase_mtf.models.blocks import block
from pase_mtf.models.convolutional import classify, convolve_norm, image_features, images
from pase_mtf.models.convolutional_presets import ResnetConfig
from pase_mtf.models.pooling import max_pool

__all__ = ["MODEL", "loss"]


def _block(width: int, output: mtf.Dimension, stride: int, config: ResnetConfig, x: mtf.Tensor) -> mtf.Tensor:
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is a convolution where the shape changes."""
    shortcut = x
    if x.shape.dims[-1] != output or stride > 1:
        shortcut = convolve_norm(x, output, 1, config, "shortcut", stride, relu=False)
    y = convolve_norm(x, mtf.Dimension("inner1", width), 1, config, "reduce")
    y = convolve_norm(y, mtf.Dimension("inner2", width), 3, config, "middle", stride)
    return convolve_norm(y, output, 1, config, "expand", residual=shortcut)


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: ResnetConfig) -> mtf.Tensor:
    """Mean cross-entropy of the labels, in nats."""
    stem = mtf.Dimension("stem", config.stem)
    x = convolve_norm(images(features, config), stem, config.stem_kernel, config, "stem", config.stem_stride)
    if config.stem_pool:
        x = max_pool(x, config.stem_pool, 2, "SAME")
    for stage, (count, width) in enumerate(zip(config.blocks, config.widths, strict=True), 1):
        output = mtf.Dimension(f"stage{stage}", config.expansion * width)
        for number in range(1, count + 1):
            with tf.variable_scope(f"stage{stage}_block{number}"):
                stride = 2 if stage > 1 and number == 1 else 1
                x = block(f"stage{stage}_block{number}", functools.partial(_block, width, output, stride, config), [x])
    return classify(x, features, config)


MODEL = Model("resnet101", "images", image_features, loss)
