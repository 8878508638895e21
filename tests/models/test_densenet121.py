"""DenseNet-121 against the same network in plain TensorFlow, the published size, and itself under strategies."""

import dataclasses

import harness
import plain_images
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.models.convolutional_presets import DensenetConfig
from pase_mtf.strategy.find import find_strategy

# Odd sizes: 19 and 5 do not divide by their strides.
SMALL = DensenetConfig(
    preset="test", image=19, image_channels=3, stem=8, stem_kernel=5, stem_stride=2, stem_pool=3, blocks=(2, 1),
    growth=8, bottleneck=2, classes=8, batch=8, optimizer="sgd", learning_rate=0.1, dtype="float64")


def _plain(features, parameters, config):
    def activate(x, name):
        return tf.nn.relu(plain_images.normalization(x, parameters, name))

    x = plain_images.convolution(features["images"], parameters["stem/conv_filters"], config.stem_stride)
    x = tf.nn.max_pool2d(activate(x, "stem/norm"), config.stem_pool, 2, "SAME")
    for block, count in enumerate(config.blocks, 1):
        outputs = [x]
        for number in range(1, count + 1):
            name = f"block{block}_layer{number}"
            y = activate(tf.concat(outputs, 3), f"{name}/norm")
            y = activate(plain_images.convolution(y, parameters[f"{name}/inner/conv_filters"]), f"{name}/inner/norm")
            outputs.append(plain_images.convolution(y, parameters[f"{name}/conv_filters"]))
        x = tf.concat(outputs, 3)
        if block < len(config.blocks):
            name = f"transition{block}"
            x = plain_images.convolution(activate(x, f"{name}/norm"), parameters[f"{name}/conv_filters"])
            x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
    return plain_images.classification(activate(x, "norm"), parameters, features["labels"])


def test_equals_plain_tensorflow():
    harness.assert_same(*harness.against_plain("densenet121", SMALL, _plain), tolerance=1e-7)


_DROPPING = dataclasses.replace(SMALL, dropout=0.2)


@pytest.mark.parametrize("kind", harness.some_slow(["random0"], ["data_parallel", "random3"]))
def test_trains_under_strategies_as_on_one_device(kind):
    harness.assert_trains_as_one_device("densenet121", _DROPPING, harness.under_strategy(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "expert", "random0"])
def test_trains_on_eight_devices_as_on_one(kind):
    harness.assert_trains_as_one_device("densenet121", _DROPPING, harness.under_strategy(kind, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_shape", "layout"), [
    ("rows:2;cols:2", "batch:rows;bottleneck:cols"), ("rows:4", "bottleneck:rows")])
def test_plain_mesh_tensorflow_gives_the_same_with_channels_split(mesh_shape, layout):
    harness.assert_trains_as_one_device("densenet121", _DROPPING, harness.stock(mesh_shape, layout))


def test_has_the_published_number_of_parameters():
    # torchvision's densenet121, and Keras' trainable ones: no moving averages, no biases of convolutions.
    assert harness.parameters("densenet121", models.load_config("densenet121", "big")) == 7_978_856


@pytest.mark.slow
def test_the_best_strategy_of_the_published_size_is_found_and_proven():
    graph = harness.export_model("densenet121", models.load_config("densenet121", "big"))
    for devices in (8, 64):
        strategy = find_strategy(graph, devices, "1080ti", simulate=0)
        assert strategy.search["optimal"]
        assert strategy.seconds < find_strategy(graph, devices, "1080ti", "data_parallel").seconds
    # Channels of concatenations can be split where they are convolved or normalised, height and width where normalised.
    splittable = {name for layer in graph.layers for name in layer.splittable}
    assert splittable == {"batch", "height", "width", "image_channels", "stem", "features", "bottleneck",
                          "growth", "transition", "classes"}
    assert not any({"height", "width"} & set(layer.splittable) for layer in graph.layers if layer.kind == "convolution")


def test_what_the_image_is_too_small_for():
    with pytest.raises(UsageError, match="image=5: nothing is left of it after 3 blocks"):
        models.load_config("densenet121", "tiny", image=5, blocks=[1, 1, 1])
    with pytest.raises(UsageError, match="stem_pool=-1"):
        models.load_config("densenet121", "tiny", stem_pool=-1)
    with pytest.raises(UsageError, match=r"blocks=\[2, 0\]"):
        models.load_config("densenet121", "tiny", blocks=[2, 0])
