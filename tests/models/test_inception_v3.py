"""Inception-v3 against the same network in plain TensorFlow, the published size, and itself under strategies."""

import dataclasses

import harness
import plain_images
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.models.convolutional_presets import Convolution, InceptionConfig
from pase_mtf.strategy.find import find_strategy

# Every kind of module; 11x11 after the stem, 5x5 after module B, 2x2 after module D.
SMALL = InceptionConfig(
    preset="test", image=25, image_channels=3, stem=(Convolution(8, 4, 2, "VALID"),), pooled=(64,), inner=(192,),
    last=1, narrow=24, classes=8, batch=8, optimizer="sgd", learning_rate=0.1, dtype="float64", auxiliary=0.4)


def _plain(features, parameters, config):
    """Branch by branch, each written as a string of its convolutions' names."""
    def unit(x, name, stride=1, padding="SAME"):
        x = plain_images.convolution(x, parameters[f"{name}/conv_filters"], stride, padding)
        return tf.nn.relu(plain_images.normalization(x, parameters, f"{name}/norm", 1e-3))

    def units(x, scope, branch, count, reduces=False):
        for number in range(1, count + 1):
            last = reduces and number == count
            x = unit(x, f"{scope}/{branch}_{number}", *((2, "VALID") if last else ()))
        return x

    def average(x):
        return tf.nn.avg_pool2d(x, 3, 1, "SAME")

    def classes(x, scope=""):
        return plain_images.classification(x, parameters, features["labels"], f"{scope}classifier")

    x = unit(features["images"], "stem1", config.stem[0].stride, config.stem[0].padding)
    a, b, c, d, e = (f"mixed{number}" for number in range(1, 6))
    x = tf.concat([units(x, a, "one", 1), units(x, a, "five", 2), units(x, a, "three", 3),
                   units(average(x), a, "pool", 1)], 3)
    x = tf.concat([units(x, b, "three", 1, True), units(x, b, "double", 3, True),
                   tf.nn.max_pool2d(x, 3, 2, "VALID")], 3)
    x = tf.concat([units(x, c, "one", 1), units(x, c, "seven", 3), units(x, c, "double", 5),
                   units(average(x), c, "pool", 1)], 3)
    y = unit(tf.nn.avg_pool2d(x, 5, 3, "VALID"), "auxiliary/reduce_1")
    extra = classes(unit(y, "auxiliary/whole", 1, "VALID"), "auxiliary/")
    x = tf.concat([units(x, d, "three", 2, True), units(x, d, "seven", 4, True),
                   tf.nn.max_pool2d(x, 3, 2, "VALID")], 3)
    three, double = units(x, e, "three", 1), units(x, e, "double", 2)
    x = tf.concat([units(x, e, "one", 1), unit(three, f"{e}/three_row_1"), unit(three, f"{e}/three_column_1"),
                   unit(double, f"{e}/double_row_1"), unit(double, f"{e}/double_column_1"),
                   units(average(x), e, "pool", 1)], 3)
    return classes(x) + config.auxiliary * extra


@pytest.mark.slow
def test_equals_plain_tensorflow():
    harness.assert_same(*harness.against_plain("inception_v3", SMALL, _plain), tolerance=1e-7)


_DROPPING = dataclasses.replace(SMALL, dropout=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random0", "exact", "expert"])
def test_trains_under_strategies_as_on_one_device(kind):
    harness.assert_trains_as_one_device("inception_v3", _DROPPING, harness.under_strategy(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random0"])
def test_trains_on_eight_devices_as_on_one(kind):
    harness.assert_trains_as_one_device("inception_v3", _DROPPING, harness.under_strategy(kind, 8))


@pytest.mark.slow
def test_plain_mesh_tensorflow_gives_the_same_with_channels_split():
    rule = harness.stock("rows:2;cols:2", "inner2:rows;inner1:cols")
    harness.assert_trains_as_one_device("inception_v3", _DROPPING, rule)


def test_the_auxiliary_classifier_drops_what_the_other_does_not(monkeypatch):
    seeds = []
    monkeypatch.setattr("pase_mtf.models.convolutional.dropout", lambda x, rate, step, seed: seeds.append(seed) or x)
    harness.export_model("inception_v3", dataclasses.replace(SMALL, dropout=0.2, auxiliary=0.4))
    assert len(seeds) == len(set(seeds)) == 2


@pytest.mark.parametrize(("auxiliary", "count"), [(0.0, 23_834_568), (0.4, 27_161_264)])
def test_has_the_published_number_of_parameters(auxiliary, count):
    # torchvision's inception_v3, without and with its auxiliary classifier: no moving averages. Keras' has 23,817,352
    # trainable ones: it leaves out the 17,216 scales of the batch normalisations.
    config = models.load_config("inception_v3", "big", auxiliary=auxiliary)
    assert harness.parameters("inception_v3", config) == count


@pytest.mark.slow
def test_the_filters_are_those_of_keras():
    """Convolution by convolution: as many with the same height, width, in- and out-channels (Keras 3, no weights)."""
    keras = pytest.importorskip("keras")
    theirs = keras.applications.InceptionV3(weights=None)
    wanted = sorted(tuple(weight.shape) for weight in theirs.trainable_weights if len(weight.shape) == 4)
    shapes = harness.model_variables("inception_v3", models.load_config("inception_v3", "big")).values()
    found = sorted(tuple(shape) for shape in shapes if len(shape) == 4)
    assert found == wanted


@pytest.mark.slow
def test_the_best_strategy_of_the_published_size_is_found_and_proven():
    graph = harness.export_model("inception_v3", models.load_config("inception_v3", "big"))
    for devices in (8, 64):
        strategy = find_strategy(graph, devices, "1080ti", simulate=0)
        assert strategy.search["optimal"]
        assert strategy.seconds < find_strategy(graph, devices, "1080ti", "data_parallel").seconds
    splittable = {name for layer in graph.layers for name in layer.splittable}
    assert splittable == {"batch", "height", "width", "image_channels", "mixed", "branch", "classes",
                          *(f"stem{number}" for number in range(1, 6)), *(f"inner{number}" for number in range(1, 5))}
    assert not any({"height", "width"} & set(layer.splittable) for layer in graph.layers if layer.kind == "convolution")


def test_what_the_image_is_too_small_for():
    config = models.load_config("inception_v3", "tiny")
    with pytest.raises(UsageError, match="image=12: 6x6 is left"):
        models.load_config("inception_v3", "tiny", image=12)
    with pytest.raises(UsageError, match="image=20"):
        models.load_config("inception_v3", "tiny", image=20, auxiliary=0.4)
    assert models.load_config("inception_v3", "tiny", auxiliary=0.4) == dataclasses.replace(config, auxiliary=0.4)
