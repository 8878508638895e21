"""A strategy never changes the mathematics: model, export, strategy, lowering, training, against one device."""

import dataclasses

import harness
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.lowering.lowering import lower
from pase_mtf.strategy.find import find_strategy


def _config(name, devices=4, **changes):
    """Small, and in double precision: what differs is wrong, not rounded."""
    config = models.load_config(name, "tiny")
    if name == "transformer":
        sizes = {"layers": 1, "d_model": 16, "heads": devices, "d_k": 8, "d_ff": 32, "length": 8, "vocab": 64}
    else:
        narrow = tuple(dataclasses.replace(layer, channels=8 * number)
                       for number, layer in enumerate(config.convolutions, start=1))
        sizes = {"fully_connected": (64, 32), "convolutions": narrow}
    return dataclasses.replace(
        config, **{"dtype": "float64", "batch": 8, "learning_rate": 0.001, **sizes, **changes})


@pytest.mark.parametrize(("name", "optimizer", "kind"), [
    pytest.param("transformer", "adafactor", "random0", marks=pytest.mark.slow), ("alexnet", "adam", "random3")])
def test_trains_as_on_one_device(name, optimizer, kind):
    """Every optimizer; with SGD every model: tests/models."""
    # Adam magnifies rounding.
    harness.assert_trains_as_one_device(name, _config(name), harness.under_strategy(kind), optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("transformer", "adafactor"), ("alexnet", "sgd")])
def test_trains_on_eight_devices_as_on_one(name, optimizer):
    harness.assert_trains_as_one_device(
        name, _config(name, 8), harness.under_strategy("random0", 8), optimizer, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "alexnet"])
def test_trains_with_idle_devices(name):
    rule = harness.under_strategy(lambda graph: harness.find("exact", graph, 8, idle=True), 8)
    harness.assert_trains_as_one_device(name, _config(name, 8), rule)


def test_a_strategy_for_another_graph_is_refused():
    with tf.Graph().as_default():
        program = harness.model_program("alexnet", _config("alexnet"), "sgd")
        strategy = find_strategy(export_graph(program.graph), 4, "1080ti")
    with tf.Graph().as_default():
        other = harness.model_program("alexnet", _config("alexnet"), "adam")
        with pytest.raises(MismatchError, match="search again"):
            lower(other.graph, strategy, harness.device_names())
