"""rnnlm: against LSTM layers written step by step in plain TensorFlow, and against itself under strategies."""

import dataclasses

import harness
import pipelines
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.models.recurrent_presets import RnnlmConfig
from pase_mtf.strategy.find import find_strategy

CONFIG = RnnlmConfig(preset="test", layers=2, units=8, length=3, vocab=16, batch=8, optimizer="sgd",
                     learning_rate=0.1, dtype="float64")
# More layers than time steps: in no wave do all layers work.
DEEP = dataclasses.replace(CONFIG, layers=4, length=3)


def plain(features, parameters, config):
    """One time step after the other, one layer after the other, one matrix product per source and gate."""
    x = tf.nn.embedding_lookup(parameters["embedding/table"], features["tokens"])
    weights, bias = parameters["lstm/weights"], parameters["lstm/bias"]
    sequence = [x[:, step] for step in range(config.length)]
    for layer in range(config.layers):
        c = h = tf.zeros([config.batch, config.units], x.dtype)
        for step, below in enumerate(sequence):
            i, f, o, g = (below @ weights[layer, 0, :, gate] + h @ weights[layer, 1, :, gate] + bias[layer, gate]
                          for gate in range(4))
            c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
            h = tf.sigmoid(o) * tf.tanh(c)
            sequence[step] = h
    logits = tf.stack(sequence, 1) @ parameters["output/weights"] + parameters["output/bias"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=features["targets"]))


@pytest.mark.parametrize("config", harness.some_slow(
    [CONFIG], [DEEP, dataclasses.replace(CONFIG, layers=1)]), ids=["", "deep", "single"])
def test_equals_plain_tensorflow(config):
    harness.assert_same(*harness.against_plain("rnnlm", config, plain))


@pytest.mark.parametrize("rule", pipelines.rules("exact", "pipeline, units"))
def test_trains_under_strategies_as_on_one_device(rule):
    harness.assert_trains_as_one_device("rnnlm", CONFIG, pipelines.RULES[rule])


@pytest.mark.parametrize(("parts", "devices"), harness.some_slow([(2, 4)], [(2, 8), (4, 8)]))
def test_blocks_of_layers(parts, devices):
    """A block of several layers hands one of them on, and keeps the others."""
    split = Configuration((("layers", parts), ("batch", devices // parts)))
    rule = harness.under_strategy(harness.random_with(0, devices, layers=split), devices)
    harness.assert_trains_as_one_device("rnnlm", DEEP, rule)


@pytest.mark.parametrize("preset", harness.presets("rnnlm"))
def test_one_layer_for_the_whole_stack(preset):
    config = models.load_config("rnnlm", preset)
    graph = harness.export_model("rnnlm", config)
    assert [layer.name for layer in graph.layers] == [
        "embedding/einsum", "lstm/gates", "output/logits", "loss/reduce_max", "loss/chosen"]
    stack = graph.layers[1]
    assert set(stack.splittable) == {"layers", "batch", "inputs", "units"}
    # Of the formula for d units, v words and l layers: embedding, gates of two sources, softmax.
    d, v = config.units, config.vocab
    assert graph.parameters == v * d + config.layers * (2 * d * 4 * d + 4 * d) + d * v + v
    # The products of the stack: every wave does a step of every layer, and has one forward and two backward.
    products = sum(operation.flops for operation in stack.operations if operation.kind == "matmul")
    waves = config.length + config.layers - 1
    assert products == 3 * 2 * waves * config.layers * config.batch * 2 * d * 4 * d


@pytest.mark.slow
def test_paper_size():
    graph = harness.export_model("rnnlm", models.load_config("rnnlm", "big"))
    assert graph.parameters == 478_267_392
    for devices in (8, 64):
        strategy = find_strategy(graph, devices, Machine.load("1080ti"), simulate=0)
        assert strategy.search["optimal"]


def test_dropout_differs_by_step_and_not_by_strategy():
    config = dataclasses.replace(CONFIG, dropout=0.5)
    harness.assert_trains_as_one_device("rnnlm", config, harness.under_strategy("random1"))
    one, other = harness.losses_of_one_batch("rnnlm", config)
    assert abs(one - other) > 1e-3
