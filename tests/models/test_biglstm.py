"""biglstm: against LSTM layers with a projection written step by step in plain TensorFlow, and under strategies."""

import dataclasses

import harness
import pipelines
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.machine.machine import Machine
from pase_mtf.models.recurrent_presets import BiglstmConfig
from pase_mtf.strategy.find import find_strategy

CONFIG = BiglstmConfig(preset="test", layers=2, units=16, projection=8, length=3, vocab=16, batch=8, optimizer="sgd",
                       learning_rate=0.1, dtype="float64")
DEEP = dataclasses.replace(CONFIG, layers=3, length=2)


def plain(features, parameters, config):
    """One time step after the other, one layer after the other, one matrix product per source and gate."""
    x = tf.nn.embedding_lookup(parameters["embedding/table"], features["tokens"])
    weights, bias = parameters["lstm/weights"], parameters["lstm/bias"]
    sequence = [x[:, step] for step in range(config.length)]
    for layer in range(config.layers):
        c = tf.zeros([config.batch, config.units], x.dtype)
        h = tf.zeros([config.batch, config.projection], x.dtype)
        for step, below in enumerate(sequence):
            i, f, o, g = (below @ weights[layer, 0, :, gate] + h @ weights[layer, 1, :, gate] + bias[layer, gate]
                          for gate in range(4))
            c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
            h = (tf.sigmoid(o) * tf.tanh(c)) @ parameters["lstm/projection"][layer]
            sequence[step] = h
    logits = tf.stack(sequence, 1) @ parameters["output/weights"] + parameters["output/bias"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=features["targets"]))


@pytest.mark.parametrize("config", [CONFIG, DEEP], ids=["", "deep"])
def test_equals_plain_tensorflow(config):
    harness.assert_same(*harness.against_plain("biglstm", config, plain))


@pytest.mark.parametrize("rule", pipelines.rules("exact", "random", "pipeline, units"))
def test_trains_under_strategies_as_on_one_device(rule):
    harness.assert_trains_as_one_device("biglstm", CONFIG, pipelines.RULES[rule])


@pytest.mark.parametrize("preset", harness.presets("biglstm"))
def test_one_layer_for_the_whole_stack(preset):
    config = models.load_config("biglstm", preset)
    graph = harness.export_model("biglstm", config)
    assert [layer.name for layer in graph.layers] == [
        "embedding/einsum", "lstm/gates", "output/logits", "loss/reduce_max", "loss/chosen"]
    assert set(graph.layers[1].splittable) == {"layers", "batch", "inputs", "units"}
    # Cells read two sources of q channels; d of them are projected to q.
    d, q, v = config.units, config.projection, config.vocab
    assert graph.parameters == v * q + config.layers * (2 * q * 4 * d + 4 * d + d * q) + q * v + v


@pytest.mark.slow
def test_paper_size():
    graph = harness.export_model("biglstm", models.load_config("biglstm", "big"))
    assert graph.parameters == 1_777_146_880
    assert graph.parameters == pytest.approx(1.8e9, rel=0.02)  # Jozefowicz et al. 2016, table 1: BIG LSTM
    # The two layers are a pipeline on one node; over eight of them more shards of the units are worth more than that.
    for devices, pipelined in ((8, 2), (64, 1)):
        strategy = find_strategy(graph, devices, Machine.load("1080ti"), simulate=0)
        assert strategy.search["optimal"]
        lstm = strategy.configurations[1]
        assert (lstm.shards("layers"), lstm.devices) == (pipelined, devices)
