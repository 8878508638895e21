"""ResNet-101 against the same network in plain TensorFlow, the published size, and itself under strategies."""

import dataclasses
import functools

import image_models
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.models.convolutional_presets import ResnetConfig
from pase_mtf.strategy.find import find_strategy

# Odd sizes: 19 and 5 do not divide by their strides.
SMALL = ResnetConfig(
    preset="test", image=19, image_channels=3, stem=8, stem_kernel=5, stem_stride=2, stem_pool=3, blocks=(2, 1),
    widths=(8, 16), expansion=2, classes=8, batch=8, optimizer="sgd", learning_rate=0.1, dtype="float64")


def _plain(features, parameters, config):
    def convolve_norm(x, name, stride=1):
        x = image_models.convolution(x, parameters[f"{name}/conv_filters"], stride)
        return image_models.normalization(x, parameters, f"{name}/norm")

    x = tf.nn.relu(convolve_norm(features["images"], "stem", config.stem_stride))
    x = tf.nn.max_pool2d(x, config.stem_pool, 2, "SAME")
    for stage, count in enumerate(config.blocks, 1):
        for number in range(1, count + 1):
            name = f"stage{stage}_block{number}"
            stride = 2 if stage > 1 and number == 1 else 1
            shortcut = convolve_norm(x, f"{name}/shortcut", stride) if number == 1 else x
            x = tf.nn.relu(convolve_norm(x, f"{name}/reduce"))
            x = tf.nn.relu(convolve_norm(x, f"{name}/middle", stride))
            x = tf.nn.relu(convolve_norm(x, f"{name}/expand") + shortcut)
    return image_models.classification(x, parameters, features["labels"])


def test_equals_plain_tensorflow():
    image_models.same(*image_models.values("resnet101", SMALL, reference=_plain))


_DROPPING = dataclasses.replace(SMALL, dropout=0.2)


@functools.cache
def _one_device():
    return image_models.values("resnet101", _DROPPING)[0]


@pytest.mark.parametrize("kind", image_models.KINDS)
def test_a_strategy_gives_the_loss_and_gradients_of_one_device(kind):
    image_models.same(image_models.values("resnet101", _DROPPING, kind)[0], _one_device())


@pytest.mark.parametrize(("mesh_shape", "layout"), [
    ("rows:2;cols:4", "batch:rows;inner1:cols"), ("rows:2;cols:4", "stage1:rows;inner2:cols")])
def test_plain_mesh_tensorflow_gives_the_same_with_channels_split(mesh_shape, layout):
    image_models.same(image_models.values("resnet101", _DROPPING, (mesh_shape, layout))[0], _one_device())


def test_has_the_published_number_of_parameters():
    # torchvision's resnet101: no moving averages, no biases of convolutions (Keras' has these: 44,601,832).
    assert image_models.parameters("resnet101", models.load_config("resnet101", "big")) == 44_549_160


@pytest.mark.parametrize("devices", [8, 64])
def test_the_best_strategy_of_the_published_size_is_found_and_proven(devices):
    graph = image_models.export("resnet101", models.load_config("resnet101", "big"))
    strategy = find_strategy(graph, devices, "1080ti")
    assert strategy.search["optimal"]
    assert strategy.seconds < find_strategy(graph, devices, "1080ti", "data_parallel").seconds
    splittable = {name for layer in graph.layers for name in layer.splittable}
    assert splittable == {"batch", "height", "width", "image_channels", "stem", "inner1", "inner2", "stage1",
                          "stage2", "stage3", "stage4", "classes"}
    assert not any({"height", "width"} & set(layer.splittable) for layer in graph.layers if layer.kind == "convolution")


def test_every_stage_has_a_width():
    with pytest.raises(UsageError, match=r"widths=\[16\]: give one for each of the 2 stages"):
        models.load_config("resnet101", "tiny", widths=[16])
