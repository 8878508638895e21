"""gnmt: against the same network written step by step in plain TensorFlow, and against itself under strategies."""

import dataclasses
import functools

import harness
import numpy as np
import pipelines
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.models.recurrent_presets import GnmtConfig
from pase_mtf.strategy.experts import expert
from pase_mtf.strategy.find import find_strategy

# Two layers above the bidirectional one, four in the decoder: both have layers with and without residuals.
CONFIG = GnmtConfig(preset="test", layers=4, units=8, length=5, vocab=16, batch=8, optimizer="sgd", learning_rate=0.1,
                    dtype="float64")
FLAT = dataclasses.replace(CONFIG, layers=2, length=3)
# Two layers in the encoder's stack, three in the decoder.
SMALL = dataclasses.replace(CONFIG, layers=3, length=3)


def plain(features, parameters, config, kept=1.0):
    """One time step after the other, one layer after the other, one matrix product per source and gate; cells read what
    comes from below times `kept`."""
    words = tf.cast(features["source"] > 0, tf.as_dtype(config.dtype))

    def cell(weights, bias, sources, state):
        c, h = state
        i, f, o, g = (sum(source @ weights[number, :, gate] for number, source in enumerate([*sources, h])) + bias[gate]
                      for gate in range(4))
        c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
        return c, tf.sigmoid(o) * tf.tanh(c)

    zero = tf.zeros([config.batch, config.units], words.dtype)

    def run(weights, bias, sequence, keep=None, backwards=False):
        """The state stays where it is at time steps that are not kept."""
        state, outputs = (zero, zero), [None] * len(sequence)
        for step in reversed(range(len(sequence))) if backwards else range(len(sequence)):
            new = cell(weights, bias, [kept * sequence[step]], state)
            state = new if keep is None else tuple(
                tf.where_v2(keep[:, step, None] > 0, one, other) for one, other in zip(new, state, strict=True))
            outputs[step] = state[1]
        return outputs

    x = tf.unstack(tf.nn.embedding_lookup(parameters["source_embedding/table"], features["source"]), axis=1)
    weights, bias = parameters["encoder_first/weights"], parameters["encoder_first/bias"]
    ahead, back = (run(weights[number], bias[number], x, words, number == 1) for number in range(2))
    # Where there is only padding the forward direction goes on with what it had, which nobody may notice.
    x = [one * words[:, step, None] for step, one in enumerate(ahead)]
    both = [tf.concat([one, other], 1) for one, other in zip(x, back, strict=True)]
    weights, bias = parameters["encoder/weights"], parameters["encoder/bias"]
    for layer in range(config.layers - 1):
        if layer == 0:  # reads both directions: a matrix of twice the rows
            rows = tf.concat([weights[0, 0], parameters["encoder_second/weights"]], 0)
            state, outputs = (zero, zero), []
            for source in both:
                c, h = state
                source = kept * source
                i, f, o, g = (source @ rows[:, gate] + h @ weights[0, 1, :, gate] + bias[0, gate] for gate in range(4))
                c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
                state = c, tf.sigmoid(o) * tf.tanh(c)
                outputs.append(state[1])
            x = outputs
        else:
            x = [one + other for one, other in zip(run(weights[layer], bias[layer], x), x, strict=True)]
    memory = tf.stack(x, 1)
    keys = memory @ parameters["attention/keys"]

    def attend(state):
        hidden = tf.tanh((state @ parameters["decoder/query"])[:, None] + keys)
        scores = tf.linalg.matvec(hidden, parameters["decoder/vector"])
        fit = tf.nn.softmax(tf.where_v2(words > 0, scores, tf.constant(-np.inf, scores.dtype)))
        return tf.linalg.matvec(memory, fit, transpose_a=True)

    weights, bias = parameters["decoder/weights"], parameters["decoder/bias"]
    embedded = tf.nn.embedding_lookup(parameters["target_embedding/table"], features["decoder_input"])
    states, outputs = [(zero, zero)] * config.layers, []
    for step in range(config.length):
        context, y = attend(states[0][1]), embedded[:, step]
        for layer in range(config.layers):
            states[layer] = cell(weights[layer], bias[layer], [kept * y, context], states[layer])
            y = states[layer][1] + (y if layer >= 2 else 0)
        outputs.append(y)
    logits = tf.stack(outputs, 1) @ parameters["output/weights"] + parameters["output/bias"]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=features["target"])
    seen = tf.cast(features["target"] > 0, losses.dtype)
    return tf.reduce_sum(losses * seen) / tf.reduce_sum(seen)


@pytest.mark.parametrize("config", harness.some_slow([SMALL], [FLAT, CONFIG]),
                         ids=["three layers", "two layers", "four layers"])
def test_equals_plain_tensorflow(config):
    harness.assert_same(*harness.against_plain("gnmt", config, plain))


def test_dropout_is_of_what_cells_read_and_not_of_residuals(monkeypatch):
    """In place of a mask everything is halved: a residual passes whole."""
    monkeypatch.setattr("pase_mtf.models.gnmt.dropout", lambda x, rate, step, seed: x * 0.5)
    config = dataclasses.replace(SMALL, dropout=0.5)
    harness.assert_same(*harness.against_plain("gnmt", config, functools.partial(plain, kept=0.5)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", pipelines.rules("exact"))
def test_trains_under_strategies_as_on_one_device(rule):
    harness.assert_trains_as_one_device("gnmt", SMALL, pipelines.RULES[rule])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "pipeline, units, 8 devices"])
def test_four_layers_train_as_on_one_device(rule):
    harness.assert_trains_as_one_device("gnmt", CONFIG, pipelines.RULES[rule])


@pytest.mark.parametrize("preset", harness.presets("gnmt"))
def test_layers_and_parameters(preset):
    config = models.load_config("gnmt", preset)
    graph = harness.export_model("gnmt", config)
    assert [layer.name for layer in graph.layers] == [
        "source_embedding/einsum", "encoder_first/gates", "encoder_second/gates", "encoder/gates", "as_memory",
        "as_memory_1", "attention/keys", "target_embedding/einsum", "decoder/query", "output/logits",
        "loss/reduce_max", "loss/chosen"]
    stacks = {layer.name: set(layer.splittable) for layer in graph.layers if "decoder" in layer.name
              or "encoder" in layer.name}
    assert stacks["encoder_first/gates"] == {"directions", "batch", "inputs", "units"}
    assert stacks["encoder/gates"] == stacks["decoder/query"] == {"layers", "batch", "inputs", "units"}
    # Cells read two sources, the encoder's second layer and the decoder's three; d channels everywhere.
    d, n, v = config.units, config.layers, config.vocab
    lstm = {sources: sources * d * 4 * d + 4 * d for sources in (2, 3)}
    encoder = 2 * lstm[2] + lstm[3] + (n - 2) * lstm[2]
    attention = 2 * d * d + d
    assert graph.parameters == 2 * v * d + encoder + attention + n * lstm[3] + d * v + v


@pytest.mark.slow
def test_dropout_differs_by_step_and_not_by_strategy():
    config = dataclasses.replace(FLAT, dropout=0.3)
    harness.assert_trains_as_one_device("gnmt", config, harness.under_strategy("random1"))
    one, other = harness.losses_of_one_batch("gnmt", config)
    assert abs(one - other) > 1e-3


@pytest.mark.parametrize(("changes", "message"), [
    ({"layers": 1}, "layers=1: it has to be at least 2"), ({"length": 1}, "length=1: it has to be at least 2"),
    ({"vocab": 4}, "vocab=4: it has to be at least 8"), ({"units": 0}, "units=0: it has to be at least 1")])
def test_sizes_that_make_no_network(changes, message):
    with pytest.raises(UsageError, match=message):
        models.load_config("gnmt", "tiny", **changes)


def test_expert_gives_every_layer_its_devices():
    graph = harness.export_model("gnmt", models.load_config("gnmt", "big"))
    chosen = dict(zip((layer.name for layer in graph.layers), expert(graph, 16), strict=True))
    assert chosen["decoder/query"] == Configuration((("batch", 2), ("layers", 8)))
    assert chosen["encoder_first/gates"] == Configuration((("batch", 8), ("directions", 2)))
    assert chosen["output/logits"] == Configuration((("batch", 16),))


@pytest.mark.slow
def test_paper_size():
    graph = harness.export_model("gnmt", models.load_config("gnmt", "big"))
    assert graph.parameters == 283_218_944
    for devices in (8, 64):
        strategy = find_strategy(graph, devices, Machine.load("1080ti"), simulate=0)
        assert strategy.search["optimal"]
