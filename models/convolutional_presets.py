"""Sizes of the models made of convolutions: typed and checked; `presets` reads them."""

from __future__ import annotations

import dataclasses
import math

from pase_mtf.errors import UsageError
from pase_mtf.models.checks import among, check_run, positive

__all__ = ["AlexnetConfig", "Convolution", "DensenetConfig", "InceptionConfig", "ResnetConfig"]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """One convolution of AlexNet, with the pooling that follows it.

    Attributes:
      channels: output channels.
      kernel: height and width of the filter.
      stride: in both directions.
      padding: "SAME" or "VALID", as TensorFlow means it.
      pool, pool_stride: window and stride of the max pooling after it; pool 0: none.
    """

    channels: int
    kernel: int
    stride: int = 1
    padding: str = "SAME"
    pool: int = 0
    pool_stride: int = 2

    def _check(self) -> None:
        positive(self, "channels", "kernel", "stride", "pool_stride")
        among(self, "padding", ("SAME", "VALID"))
        if self.pool < 0:
            raise UsageError(f"pool={self.pool}: give the window of the pooling, or 0 for none")


@dataclasses.dataclass(frozen=True)
class AlexnetConfig:
    """Sizes of `alexnet`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      image: height and width of the (square) images.
      image_channels: 3 for colour, 1 for grey.
      convolutions: the five of them, or however many.
      fully_connected: widths of the hidden fully connected layers.
      classes: number of labels.
      dropout: rate after each hidden fully connected layer.
      batch, optimizer, learning_rate: defaults of a run.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    image: int
    image_channels: int
    convolutions: tuple[Convolution, ...]
    fully_connected: tuple[int, ...]
    classes: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "image", "image_channels", "classes")
        check_run(self)
        if self.fully_connected:
            positive(self, "fully_connected")
        _size_after(self.image, self.convolutions, "convolutions")


@dataclasses.dataclass(frozen=True)
class DensenetConfig:
    """Sizes of `densenet121`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      image: height and width of the (square) images.
      image_channels: 3 for colour, 1 for grey.
      stem, stem_kernel, stem_stride: channels, filter and stride of the first convolution.
      stem_pool: window of the max pooling of stride 2 after it; 0: none.
      blocks: layers per block; between two blocks channels, height and width are halved.
      growth: channels that a layer adds.
      bottleneck: times the growth: channels between the two convolutions of a layer.
      classes: number of labels.
      batch, optimizer, learning_rate: defaults of a run.
      dropout: rate before the classifier.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    image: int
    image_channels: int
    stem: int
    stem_kernel: int
    stem_stride: int
    stem_pool: int
    blocks: tuple[int, ...]
    growth: int
    bottleneck: int
    classes: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "image", "image_channels", "stem", "stem_kernel", "stem_stride", "blocks", "growth",
                 "bottleneck", "classes")
        _check_stem_pool(self)
        check_run(self)
        size = -(-self.image // self.stem_stride)
        size = -(-size // 2) if self.stem_pool else size
        if size < 2 ** (len(self.blocks) - 1):
            raise UsageError(f"image={self.image}: nothing is left of it after {len(self.blocks)} blocks; use larger "
                             "images, or fewer blocks")


@dataclasses.dataclass(frozen=True)
class ResnetConfig:
    """Sizes of `resnet101`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      image: height and width of the (square) images.
      image_channels: 3 for colour, 1 for grey.
      stem, stem_kernel, stem_stride: channels, filter and stride of the first convolution.
      stem_pool: window of the max pooling of stride 2 after it; 0: none.
      blocks: blocks per stage; every stage but the first halves height and width.
      widths: channels inside the blocks, per stage.
      expansion: times the width: channels of the residual stream.
      classes: number of labels.
      batch, optimizer, learning_rate: defaults of a run.
      dropout: rate before the classifier.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    image: int
    image_channels: int
    stem: int
    stem_kernel: int
    stem_stride: int
    stem_pool: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    expansion: int
    classes: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "image", "image_channels", "stem", "stem_kernel", "stem_stride", "blocks", "widths",
                 "expansion", "classes")
        _check_stem_pool(self)
        check_run(self)
        if len(self.blocks) != len(self.widths):
            raise UsageError(f"widths={list(self.widths)}: give one for each of the {len(self.blocks)} stages "
                             "in blocks")


@dataclasses.dataclass(frozen=True)
class InceptionConfig:
    """Sizes of `inception_v3`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      image: height and width of the (square) images.
      image_channels: 3 for colour, 1 for grey.
      stem: the convolutions before the first module.
      pooled: for each of the modules A, channels of the branch that pools.
      inner: for each of the modules C, channels inside its branches.
      last: how many modules E there are.
      narrow: what the channels of all modules are divided by (rounded up to a multiple of 8).
      classes: number of labels.
      batch, optimizer, learning_rate: defaults of a run.
      auxiliary: weight of the auxiliary classifier's loss; 0: without it.
      dropout: rate before the classifiers.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    image: int
    image_channels: int
    stem: tuple[Convolution, ...]
    pooled: tuple[int, ...]
    inner: tuple[int, ...]
    last: int
    narrow: int
    classes: int
    batch: int
    optimizer: str
    learning_rate: float
    auxiliary: float = 0.0
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def narrowed(self, channels: int) -> int:
        """The published number of channels divided by `narrow`, rounded up to a multiple of 8."""
        return -(-channels // (8 * self.narrow)) * 8

    def _check(self) -> None:
        positive(self, "image", "image_channels", "pooled", "inner", "last", "narrow", "classes")
        check_run(self)
        if not 0 <= self.auxiliary < math.inf:
            raise UsageError(f"auxiliary={self.auxiliary}: give the weight of a loss, or 0 for none")
        size = _size_after(self.image, self.stem, "stem")
        # Modules B and D halve the image; the auxiliary classifier pools 5x5 between them.
        half = (size - 3) // 2 + 1
        if half < 3 or (self.auxiliary and half < 5):
            raise UsageError(f"image={self.image}: {size}x{size} is left of it after the stem; the modules need 7x7 "
                             "(11x11 with the auxiliary classifier): use larger images or fewer strides and pools")


def _check_stem_pool(config: DensenetConfig | ResnetConfig) -> None:
    if config.stem_pool < 0:
        raise UsageError(f"stem_pool={config.stem_pool}: give the window of the pooling, or 0 for none")


def _size_after(image: int, convolutions: tuple[Convolution, ...], name: str) -> int:
    """What is left of an image's height after these convolutions, which are checked."""
    for convolution in convolutions:
        convolution._check()
    if not convolutions:
        raise UsageError(f"{name}=[]: give at least one")
    size = image
    for number, convolution in enumerate(convolutions, 1):
        size = (size if convolution.padding == "SAME" else size - convolution.kernel + 1)
        size = -(-size // convolution.stride)
        if convolution.pool:
            size = (size - convolution.pool) // convolution.pool_stride + 1
        if size < 1:
            raise UsageError(f"image={image}: nothing is left of it after convolution {number}; "
                             "use larger images or smaller kernels, strides and pools")
    return size
