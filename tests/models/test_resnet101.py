"""ResNet-101 against the same network in plain TensorFlow, the published size, and itself under strategies."""

import dataclasses

import harness
import plain_images
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
        x = plain_images.convolution(x, parameters[f"{name}/conv_filters"], stride)
        return plain_images.normalization(x, parameters, f"{name}/norm")

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
    return plain_images.classification(x, parameters, features["labels"])


def test_equals_plain_tensorflow():
    harness.assert_same(*harness.against_plain("resnet101", SMALL, _plain), tolerance=1e-7)


_DROPPING = dataclasses.replace(SMALL, dropout=0.2)


@pytest.mark.parametrize("kind", harness.some_slow(["random0"], ["data_parallel", "random3"]))
def test_trains_under_strategies_as_on_one_device(kind):
    harness.assert_trains_as_one_device("resnet101", _DROPPING, harness.under_strategy(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "expert", "random0"])
def test_trains_on_eight_devices_as_on_one(kind):
    harness.assert_trains_as_one_device("resnet101", _DROPPING, harness.under_strategy(kind, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_shape", "layout"), [
    ("rows:2;cols:2", "batch:rows;inner1:cols"), ("rows:2;cols:4", "stage1:rows;inner2:cols")])
def test_plain_mesh_tensorflow_gives_the_same_with_channels_split(mesh_shape, layout):
    harness.assert_trains_as_one_device("resnet101", _DROPPING, harness.stock(mesh_shape, layout))


def test_has_the_published_number_of_parameters():
    # torchvision's resnet101: no moving averages, no biases of convolutions (Keras' has these: 44,601,832).
    assert harness.parameters("resnet101", models.load_config("resnet101", "big")) == 44_549_160


def test_the_best_strategy_of_a_small_size_beats_data_parallelism():
    graph = harness.export_model("resnet101", models.load_config("resnet101", "tiny"))
    strategy = harness.find("exact", graph, 8)
    assert strategy.search["optimal"]
    assert strategy.seconds < harness.find("data_parallel", graph, 8).seconds


@pytest.mark.slow
def test_the_best_strategy_of_the_published_size_is_found_and_proven():
    graph = harness.export_model("resnet101", models.load_config("resnet101", "big"))
    for devices in (8, 64):
        strategy = find_strategy(graph, devices, "1080ti", simulate=0)
        assert strategy.search["optimal"]
        assert strategy.seconds < find_strategy(graph, devices, "1080ti", "data_parallel").seconds
    splittable = {name for layer in graph.layers for name in layer.splittable}
    assert splittable == {"batch", "height", "width", "image_channels", "stem", "inner1", "inner2", "stage1",
                          "stage2", "stage3", "stage4", "classes"}
    assert not any({"height", "width"} & set(layer.splittable) for layer in graph.layers if layer.kind == "convolution")


def test_every_stage_has_a_width():
    with pytest.raises(UsageError, match=r"widths=\[16\]: give one for each of the 2 stages"):
        models.load_config("resnet101", "tiny", widths=[16])
