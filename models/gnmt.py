"""Translation by LSTM layers with attention (Wu et al. 2016, GNMT).

The encoder's first layer runs in both directions, the second reads both; the decoder's layers all read what its first
one attends to. From the third layer on, a layer adds its input to its output. Departures: source and target have an
embedding each; the attention's scores are those of Bahdanau et al. 2015 (as in the paper), not normalised further.
Token 0 is padding, and padding stands at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from pase_mtf.compat import mtf, tf
from pase_mtf.export.layer_marks import one_layer
from pase_mtf.models import Model, layers, lstm, transformer
from pase_mtf.models.blocks import block
from pase_mtf.models.dropout import dropout
from pase_mtf.models.recurrent_presets import GnmtConfig

__all__ = ["MODEL", "features", "loss"]

_Drop = Callable[[mtf.Tensor], mtf.Tensor]


def features(config: GnmtConfig, batch: int) -> dict[str, tuple[mtf.Shape, tf.DType]]:
    """Token ids: the source, what the decoder sees (the target moved right by one), and what it has to say."""
    return transformer.features(config, batch)


def _embed(tokens: mtf.Tensor, vocab: mtf.Dimension, inputs: mtf.Dimension, config: GnmtConfig) -> mtf.Tensor:
    table = layers.variable(tokens.mesh, "table", [vocab, inputs], config, stddev=1.0)
    return mtf.gather(table, tokens, vocab)


def _both_ways(sequence: mtf.Tensor, ahead: mtf.Tensor, back: mtf.Tensor, step: int, passed: list[mtf.Tensor] | None,
               ) -> mtf.Tensor:
    """[batch, length, ...] -> [directions, batch, ...]: this time step, and that as far from the end.

    Args:
      sequence: the sequence.
      ahead, back: [directions], 1 for the one direction.
      step: which time step.
      passed: as in `lstm.fill`; None where the sequence has no gradient.
    """
    batch, length, *rest = sequence.shape.dims

    def function(sequence: tf.Tensor, ahead: tf.Tensor, back: tf.Tensor) -> tf.Tensor:
        shape = [-1] + [1] * (len(sequence.shape) - 1)
        return (tf.reshape(ahead, shape) * sequence[:, step]
                + tf.reshape(back, shape) * sequence[:, length.size - 1 - step])

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
        assert passed is not None  # the sequence has a gradient
        passed.append(dy)
        dsequence = None
        if step == 0:
            _, ahead, back = operation.inputs
            dsequence = _from_both_ways(lstm.stacked(passed, length.name, 2), ahead, back, mtf.add)
            passed.clear()
        return [dsequence, None, None]

    shape = mtf.Shape([*ahead.shape.dims, batch, *rest])
    return lstm.local(function, [sequence, ahead, back], [shape], (length.name,), gradient if passed is not None else
                      None, "both_ways")[0]


def _from_both_ways(x: mtf.Tensor, ahead: mtf.Tensor, back: mtf.Tensor,
                    combine: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor]) -> mtf.Tensor:
    """[directions, batch, length, channels] -> both directions [batch, length, channels] in the order of time."""
    _, batch, length, channels = x.shape.dims
    shape = mtf.Shape([batch, length, channels])
    return combine(mtf.einsum([x, ahead], output_shape=shape, name="ahead"),
                   _reverse(mtf.einsum([x, back], output_shape=shape, name="back"), length))


def _reverse(x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
    return lstm.local(lambda x: tf.reverse(x, [1]), [x], [x.shape], (dim.name,),
                      lambda operation, dy: [_reverse(dy, dim)], "reverse")[0]


def _bidirectional(sequence: mtf.Tensor, words: mtf.Tensor, units: mtf.Dimension, config: GnmtConfig, drop: _Drop,
                   ) -> tuple[mtf.Tensor, mtf.Tensor]:
    """What the two directions of a layer put out, each [batch, length, units]: side by side in every wave."""
    mesh, (batch, length, inputs) = sequence.mesh, sequence.shape.dims
    directions = mtf.Dimension("directions", 2)
    with one_layer(mesh.graph):
        stack = lstm.Recurrence(batch, directions, 2, inputs, units, config, mesh)
        ahead, back = (lstm.one_of(mesh, directions, [number], config, name)
                       for number, name in enumerate(("ahead", "back")))
        outputs: list[mtf.Tensor] = []
        passed: list[mtf.Tensor] = []
        for step in range(length.size):
            x = drop(_both_ways(sequence, ahead, back, step, passed))
            # Backwards, padding comes first: the state stays zeros until there is a word.
            outputs.append(stack.advance([x], _both_ways(words, ahead, back, step, None)))
        return _from_both_ways(mtf.stack(outputs, length.name, 2, name="outputs"), ahead, back, lambda x, y: (x, y))


def _encode(source: mtf.Tensor, vocab: mtf.Dimension, inputs: mtf.Dimension, units: mtf.Dimension, config: GnmtConfig,
            drop: _Drop) -> mtf.Tensor:
    """[batch, length] -> [batch, length, inputs]."""
    mesh, (batch, length) = source.mesh, source.shape.dims
    with tf.variable_scope("source_embedding"):
        x = _embed(source, vocab, inputs, config)
    with tf.variable_scope("encoder_first"):
        ahead, back = block("encoder_first", lambda x: _bidirectional(
            x, transformer.words(source, config), units, config, drop), [x])
        as_input = mtf.Shape([batch, length, inputs])
        ahead, back = mtf.reshape(ahead, as_input, name="ahead_input"), mtf.reshape(back, as_input, name="back_input")
    with tf.variable_scope("encoder_second"):
        # The stack's first layer reads one direction as its input; the other comes in by way of its gates.
        gates = mtf.Dimension("gates", 4)
        weights = layers.variable(mesh, "weights", [inputs, gates, units], config, stddev=inputs.size ** -0.5)
        more = mtf.einsum([drop(back), weights], output_shape=mtf.Shape([batch, length, gates, units]), name="gates")
    with tf.variable_scope("encoder"):
        dim = mtf.Dimension("layers", config.layers - 1)
        return block("encoder", lambda ahead, more: lstm.lstm_stack(
            ahead, dim, units, config, drop=drop, residuals=range(1, dim.size), gates=more), [ahead, more])


def _scores(query: tf.Tensor, keys: tf.Tensor, vector: tf.Tensor, visible: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(hidden [batch, memory_length, attention], softmax of the scores [batch, memory_length])."""
    hidden = tf.tanh(tf.expand_dims(query, 1) + keys)
    scores = tf.reduce_sum(hidden * vector, -1)
    return hidden, tf.nn.softmax(tf.where_v2(visible, scores, tf.constant(-1e9, scores.dtype)))


def _scores_gradient(query: tf.Tensor, keys: tf.Tensor, vector: tf.Tensor, visible: tf.Tensor, dy: tf.Tensor,
                     ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The gradients of query and keys, and the batch's parts of that of the vector."""
    hidden, y = _scores(query, keys, vector, visible)
    dscores = tf.expand_dims(y * (dy - tf.reduce_sum(y * dy, -1, keepdims=True)), -1)
    dkeys = dscores * vector * (1 - hidden * hidden)
    return tf.reduce_sum(dkeys, 1), dkeys, tf.reduce_sum(dscores * hidden, 1)


class _Attention:
    """Attention to a memory, wave by wave."""

    def __init__(self, memory: mtf.Tensor, visible: mtf.Tensor, keys: mtf.Tensor, config: GnmtConfig) -> None:
        inputs, self._attention = memory.shape.dims[-1], keys.shape.dims[-1]
        self._memory, self._visible, self._keys = memory, visible, keys
        self._query = layers.variable(memory.mesh, "query", [inputs, self._attention], config,
                                      stddev=inputs.size ** -0.5)
        self._vector = layers.variable(memory.mesh, "vector", [self._attention], config,
                                       stddev=self._attention.size ** -0.5)
        self._passed: tuple[list, list, list] = ([], [], [])
        self._first = True

    def __call__(self, state: mtf.Tensor) -> mtf.Tensor:
        """[batch, inputs] -> [batch, inputs]: the mean of the memory, weighted by its fit to the state."""
        of_query, of_vector, of_memory = self._passed
        first, self._first = self._first, False
        batch = state.shape.dims[0]
        query = lstm.weighted(state, self._query, mtf.Shape([batch, self._attention]), of_query, first, "query")
        length = self._memory.shape.dims[1]
        whole = (length.name, self._attention.name)
        inputs = [query, self._keys, self._vector, self._visible]

        def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
            dquery, dkeys, dvector = lstm.local(
                _scores_gradient, [*operation.inputs, dy], [query.shape, self._keys.shape, query.shape], whole, None,
                "fit_grad")
            of_vector.append(dvector)
            total = None
            if first:
                total = mtf.reduce_sum(lstm.stacked(of_vector, "wave", 1), output_shape=self._vector.shape)
                of_vector.clear()
            return [dquery, dkeys, total, None]

        fit = lstm.local(lambda *xs: _scores(*xs)[1], inputs, [mtf.Shape([batch, length])], whole, gradient, "fit")[0]
        return lstm.weighted(fit, self._memory, state.shape, of_memory, first, "context")


def _decode(x: mtf.Tensor, memory: mtf.Tensor, visible: mtf.Tensor, keys: mtf.Tensor, units: mtf.Dimension,
            config: GnmtConfig, drop: _Drop) -> mtf.Tensor:
    """[batch, decoder_length, inputs] -> the same: a stack of layers with attention, wave by wave."""
    mesh, (batch, length, inputs) = x.mesh, x.shape.dims
    dim = mtf.Dimension("layers", config.layers)
    with one_layer(mesh.graph):
        stack = lstm.Recurrence(batch, dim, 3, inputs, units, config, mesh)
        attend = _Attention(memory, visible, keys, config)
        first = lstm.one_of(mesh, dim, [0], config, "first")
        last = lstm.one_of(mesh, dim, [dim.size - 1], config, "last")
        residuals = lstm.one_of(mesh, dim, range(2, dim.size), config, "residuals")
        below, context = stack.h, stack.h
        outputs: list[mtf.Tensor] = []
        of_sequence: list[mtf.Tensor] = []
        for wave in range(length.size + dim.size - 1):
            # What the first layer attended to goes up with the time step it belongs to.
            context = mtf.shift(context, 1, dim, wrap=False, name="hand_on_context")
            read = mtf.shift(below, 1, dim, wrap=False, name="hand_on")
            if wave < length.size:
                # By the first layer's output of the time step before: other layers' states do not count.
                state = mtf.einsum([stack.h, first], output_shape=mtf.Shape([batch, inputs]), name="first_layer")
                context = context + mtf.einsum([attend(state), first], output_shape=context.shape, name="new_context")
                read = lstm.fill(read, x, first, wave, of_sequence)
            stack.advance([drop(read), context], lstm.begun(mesh, dim, wave, config))  # no dropout on residuals
            below = lstm.residual(stack.h, read, residuals)
            if wave >= dim.size - 1:
                outputs.append(below)
        return lstm.last_outputs(outputs, last, length)


def loss(mesh: mtf.Mesh, features: dict[str, mtf.Tensor], config: GnmtConfig) -> mtf.Tensor:
    """Mean cross-entropy of the target's tokens, padding aside, in nats."""
    source, target = features["source"], features["target"]
    vocab = mtf.Dimension("vocab", config.vocab)
    inputs, units, attention = (mtf.Dimension(name, config.units) for name in ("inputs", "units", "attention"))
    seeds = itertools.count(config.seed * 1000)

    def drop(x: mtf.Tensor) -> mtf.Tensor:
        return dropout(x, config.dropout, features["step"], next(seeds)) if config.dropout else x

    memory = _encode(source, vocab, inputs, units, config, drop)
    batch, length = source.shape.dims
    memory_length = mtf.Dimension("memory_length", length.size)
    memory = mtf.reshape(memory, mtf.Shape([batch, memory_length, inputs]), name="as_memory")
    visible = mtf.cast(mtf.reshape(source, mtf.Shape([batch, memory_length]), name="as_memory"), tf.bool,
                       name="visible")
    with tf.variable_scope("attention"):
        weights = layers.variable(mesh, "keys", [inputs, attention], config, stddev=inputs.size ** -0.5)
        keys = mtf.einsum([memory, weights], output_shape=mtf.Shape([batch, memory_length, attention]), name="keys")
    with tf.variable_scope("target_embedding"):
        x = _embed(features["decoder_input"], vocab, inputs, config)
    with tf.variable_scope("decoder"):
        x = block("decoder", lambda x, memory, keys: _decode(x, memory, visible, keys, units, config, drop),
                  [x, memory, keys])
    with tf.variable_scope("output"):
        weights = layers.variable(mesh, "weights", [inputs, vocab], config, stddev=inputs.size ** -0.5)
        bias = layers.zeros(mesh, "bias", [vocab], config)
        logits = mtf.einsum([x, weights], output_shape=mtf.Shape([*x.shape.dims[:2], vocab]), name="logits") + bias
    return layers.cross_entropy(logits, target, vocab, transformer.words(target, config))


MODEL = Model("gnmt", "parallel_text", features, loss, transformer.target_words)
