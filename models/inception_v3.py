"""Inception-v3 (Szegedy et al. 2016), all modules: A to E of the usual naming, and the auxiliary classifier.

Dims of channels: `stem1`, `stem2`, ... for the convolutions before the modules; `mixed` for what a module reads and
returns; inside a module `inner1`, `inner2`, ... along a branch, and `branch` for what a branch ends with. Height and
width cannot be split in Mesh-TF's convolution, nor the channels where branches are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.models import Model
from pase_mtf.models.blocks import block
from pase_mtf.models.convolutional import classify, concatenate, convolve_norm, image_features, images
from pase_mtf.models.convolutional_presets import InceptionConfig
from pase_mtf.models.pooling import average_pool, max_pool

__all__ = ["MODEL", "loss"]

_EPSILON = 1e-3
# What a branch is made of: (channels, kernel) or (channels, kernel, stride); stride 2 goes without padding.
_Step = tuple


def _chain(x: mtf.Tensor, name: str, steps: Sequence[_Step], config: InceptionConfig,
           last: str = "branch") -> mtf.Tensor:
    """Convolutions one after the other; `last` names the channels of the last one."""
    for number, (channels, kernel, *stride) in enumerate(steps, 1):
        output = mtf.Dimension(last if number == len(steps) else f"inner{number}", config.narrowed(channels))
        x = convolve_norm(x, output, kernel, config, f"{name}_{number}", epsilon=_EPSILON,
                          **({"stride": stride[0], "padding": "VALID"} if stride else {}))
    return x


def _average(x: mtf.Tensor) -> mtf.Tensor:
    return average_pool(x, 3, 1, "SAME")


def _module_a(x: mtf.Tensor, pooled: int, config: InceptionConfig) -> mtf.Tensor:
    return concatenate([
        _chain(x, "one", [(64, 1)], config),
        _chain(x, "five", [(48, 1), (64, 5)], config),
        _chain(x, "three", [(64, 1), (96, 3), (96, 3)], config),
        _chain(_average(x), "pool", [(pooled, 1)], config)], "mixed")


def _module_b(x: mtf.Tensor, config: InceptionConfig) -> mtf.Tensor:
    """Halves height and width."""
    return concatenate([
        _chain(x, "three", [(384, 3, 2)], config),
        _chain(x, "double", [(64, 1), (96, 3), (96, 3, 2)], config),
        max_pool(x, 3, 2)], "mixed")


def _module_c(x: mtf.Tensor, inner: int, config: InceptionConfig) -> mtf.Tensor:
    row, column = (1, 7), (7, 1)
    return concatenate([
        _chain(x, "one", [(192, 1)], config),
        _chain(x, "seven", [(inner, 1), (inner, row), (192, column)], config),
        _chain(x, "double", [(inner, 1), (inner, column), (inner, row), (inner, column), (192, row)], config),
        _chain(_average(x), "pool", [(192, 1)], config)], "mixed")


def _module_d(x: mtf.Tensor, config: InceptionConfig) -> mtf.Tensor:
    """Halves height and width."""
    return concatenate([
        _chain(x, "three", [(192, 1), (320, 3, 2)], config),
        _chain(x, "seven", [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)], config),
        max_pool(x, 3, 2)], "mixed")


def _module_e(x: mtf.Tensor, config: InceptionConfig) -> mtf.Tensor:
    three = _chain(x, "three", [(384, 1)], config, "inner1")
    double = _chain(x, "double", [(448, 1), (384, 3)], config, "inner2")
    return concatenate([
        _chain(x, "one", [(320, 1)], config),
        _chain(three, "three_row", [(384, (1, 3))], config),
        _chain(three, "three_column", [(384, (3, 1))], config),
        _chain(double, "double_row", [(384, (1, 3))], config),
        _chain(double, "double_column", [(384, (3, 1))], config),
        _chain(_average(x), "pool", [(192, 1)], config)], "mixed")


def _stem(x: mtf.Tensor, config: InceptionConfig) -> mtf.Tensor:
    for number, convolution in enumerate(config.stem, 1):
        x = convolve_norm(x, mtf.Dimension(f"stem{number}", convolution.channels), convolution.kernel, config,
                          f"stem{number}", convolution.stride, convolution.padding, epsilon=_EPSILON)
        if convolution.pool:
            x = max_pool(x, convolution.pool, convolution.pool_stride)
    return x


def _auxiliary(x: mtf.Tensor, features: dict[str, mtf.Tensor], config: InceptionConfig) -> mtf.Tensor:
    """The loss of a classifier on what the C modules return (after a 5x5 pooling of stride 3)."""
    x = average_pool(x, 5, 3)
    # The second convolution takes in all that is left of the image: 5x5 at the published size.
    x = _chain(x, "reduce", [(128, 1)], config, "inner1")
    output = mtf.Dimension("inner2", config.narrowed(768))
    height, width = (dim.size for dim in x.shape.dims[-3:-1])
    x = convolve_norm(x, output, (height, width), config, "whole", padding="VALID", epsilon=_EPSILON)
    return classify(x, features, config, number=1)


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: InceptionConfig) -> mtf.Tensor:
    """Mean cross-entropy of the labels in nats, with `config.auxiliary` times that of the auxiliary classifier."""
    x = _stem(images(features, config), config)
    modules: list[tuple[Callable[..., mtf.Tensor], tuple[int, ...]]] = [
        *((_module_a, (pooled,)) for pooled in config.pooled), (_module_b, ()),
        *((_module_c, (inner,)) for inner in config.inner)]
    for number, (module, sizes) in enumerate(modules, 1):
        with tf.variable_scope(f"mixed{number}"):
            x = block(f"mixed{number}", lambda x, module=module, sizes=sizes: module(x, *sizes, config), [x])
    extra = None
    if config.auxiliary:
        with tf.variable_scope("auxiliary"):
            extra = _auxiliary(x, features, config) * config.auxiliary
    for number, module in enumerate([_module_d, *[_module_e] * config.last], len(modules) + 1):
        with tf.variable_scope(f"mixed{number}"):
            x = block(f"mixed{number}", lambda x, module=module: module(x, config), [x])
    total = classify(x, features, config)
    return total if extra is None else total + extra


MODEL = Model("inception_v3", "images", image_features, loss)
