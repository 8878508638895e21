"""LSTM layers side by side: all layers of a stack do one time step each in every wave.

In wave w layer l does time step w - l: its input is what layer l - 1 put out in the wave before. So the layers of a
stack are a dim like any other: a wave is one product of [layers, batch, inputs] with the weights of all layers, and a
stack of L layers takes T + L - 1 waves for T time steps. Split that dim, and every device works on its own layer in
every wave; only what one layer sends to the next travels. All waves read the same variable, so the whole stack, however
long, is one layer of the computation graph.

A layer that has not begun keeps a state of zeros. One that has seen its last time step computes on, and nobody looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.export.layer_marks import one_layer
from pase_mtf.models import layers as _layers
from pase_mtf.models.presets import TextConfig

__all__ = ["Recurrence", "begun", "fill", "last_outputs", "local", "lstm_stack", "one_of", "residual", "stacked",
           "weighted"]

_FORGET_BIAS = 1.0


def stacked(tensors: Sequence[mtf.Tensor], dim: str, axis: int) -> mtf.Tensor:
    """What the backward pass has left behind, the last wave's first, stacked in the order of time."""
    return mtf.stack(list(reversed(tensors)), dim, axis, name=f"stack_{dim}")


class _Product(mtf.EinsumOperation):
    """One wave's product with weights that all waves share.

    The gradient of the weights is one product over all waves, made when the backward pass reaches the first of them:
    a sum of one product per wave would write, read and add the whole weights in every wave.
    """

    def __init__(self, x: mtf.Tensor, weights: mtf.Tensor, output_shape: mtf.Shape,
                 passed: list[tuple[mtf.Tensor, mtf.Tensor]], first: bool, name: str) -> None:
        super().__init__([x, weights], output_shape, name=name)
        self._passed, self._first = passed, first

    def gradient(self, grad_ys: Sequence[mtf.Tensor]) -> list[mtf.Tensor | None]:
        x, weights = self.inputs
        self._passed.append((x, grad_ys[0]))
        dx = mtf.einsum([grad_ys[0], weights], output_shape=x.shape, name="input_grad")
        if not self._first:
            return [dx, None]
        xs, dys = (stacked(tensors, "wave", 1) for tensors in zip(*self._passed, strict=True))
        self._passed.clear()
        return [dx, mtf.einsum([xs, dys], output_shape=weights.shape, name="weights_grad")]


def weighted(x: mtf.Tensor, weights: mtf.Tensor, output_shape: mtf.Shape, passed: list, first: bool,
             name: str) -> mtf.Tensor:
    """One wave's product of x with what all waves share, whose gradient is made for all of them at once.

    Args:
      x: of this wave; at least two dims.
      weights: the same in all waves.
      output_shape: dims of the two that it lacks are summed over.
      passed: one list for all waves.
      first: whether this is the first wave, which the backward pass reaches last.
      name: of the operation.
    """
    return _Product(x, weights, output_shape, passed, first, name).outputs[0]


def _expand(mask: tf.Tensor, rank: int = 3) -> tf.Tensor:
    """[layers] or [layers, batch] -> such that it multiplies [layers, batch, ...] of that rank."""
    for axis in range(len(mask.shape), rank):
        mask = tf.expand_dims(mask, axis)
    return mask


def _activations(gates: tf.Tensor, bias: tf.Tensor) -> list[tf.Tensor]:
    """Input, forget and output gate, and the candidate."""
    i, f, o, g = tf.unstack(gates + tf.expand_dims(bias, 1), axis=2)
    return [tf.sigmoid(i), tf.sigmoid(f + tf.constant(_FORGET_BIAS, f.dtype)), tf.sigmoid(o), tf.tanh(g)]


def _cell(gates: tf.Tensor, bias: tf.Tensor, c: tf.Tensor, *mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(c, h) after a time step (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000)."""
    i, f, o, g = _activations(gates, bias)
    c = f * c + i * g
    if mask:
        c = c * _expand(mask[0])
    return c, o * tf.tanh(c)


def _cell_gradient(gates: tf.Tensor, bias: tf.Tensor, before: tf.Tensor, after: tf.Tensor, dh: tf.Tensor,
                   *rest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(dgates, dc before), from the gradients of h and (where somebody read it) c; rest: the mask, dc after."""
    i, f, o, g = _activations(gates, bias)
    out = tf.tanh(after)
    dc = dh * o * (1 - out * out)
    for other in rest:
        dc = dc + other if other.shape == dc.shape else dc * _expand(other)
    dgates = tf.stack([dc * g * i * (1 - i), dc * before * f * (1 - f), dh * out * o * (1 - o), dc * i * (1 - g * g)],
                      axis=2)
    return dgates, dc * f


def local(function: Callable, inputs: Sequence[mtf.Tensor], outputs: Sequence[mtf.Shape], whole: Sequence[str],
          gradient: Callable | None, name: str) -> list[mtf.Tensor]:
    """An operation on slices with several outputs; every dim may be split but those named in `whole`.

    Args:
      function: of a tf.Tensor per input; the results in a tuple where there are several.
      inputs, outputs: the tensors read, the shapes made (of the type of the first input).
      whole: dims that cannot be split.
      gradient: of (operation, a gradient per output, None where there is none) to a gradient (or None) per input;
        None: no gradients.
      name: of the operation.
    """
    dims = {dim.name: dim for shape in [*(x.shape for x in inputs), *outputs] for dim in shape.dims}
    return mtf.SlicewiseOperation(
        function, list(inputs), list(outputs), [inputs[0].dtype] * len(outputs),
        [dim for dim in dims.values() if dim.name not in whole], 0 if gradient is None else gradient, name=name).outputs


class Recurrence:
    """The weights and the state of LSTM layers that advance wave by wave.

    Attributes:
      dim: of the layers.
      h: [dim, batch, inputs], what each layer put out in the last wave, as the next wave reads it.
      c: [dim, batch, units], the cells.
    """

    def __init__(self, batch: mtf.Dimension, dim: mtf.Dimension, sources: int, inputs: mtf.Dimension,
                 units: mtf.Dimension, config: TextConfig, mesh: mtf.Mesh, projected: bool = False) -> None:
        """Makes the variables in the current variable scope; all states are zeros.

        Args:
          batch: of the sequences.
          dim: the layers.
          sources: how many vectors of the size of `inputs` a cell reads, its own last output among them.
          inputs: the size of each of them, and of what a layer puts out.
          units: cells per layer. Without a projection as many as inputs.
          config: `dtype` and `seed` are used.
          mesh: of the graph that is being built.
          projected: a matrix stands between the cells' output and what the layer puts out (Sak et al. 2014).
        """
        if not projected and inputs.size != units.size:
            raise ValueError(f"{inputs} and {units} differ; without a projection they have to be of one size")
        self.dim = dim
        self._batch, self._inputs, self._units, self._mesh = batch, inputs, units, mesh
        self._source, gates = mtf.Dimension("source", sources), mtf.Dimension("gates", 4)
        dtype = tf.as_dtype(config.dtype)
        self._weights = _layers.variable(mesh, "weights", [dim, self._source, inputs, gates, units], config,
                                         stddev=1 / math.sqrt(sources * inputs.size))
        self._bias = _layers.zeros(mesh, "bias", [dim, gates, units], config)
        self._projection = _layers.variable(mesh, "projection", [dim, units, inputs], config,
                                            stddev=1 / math.sqrt(units.size)) if projected else None
        self._gates = mtf.Shape([dim, batch, gates, units])
        self.c = mtf.zeros(mesh, mtf.Shape([dim, batch, units]), dtype)
        self.h = mtf.zeros(mesh, mtf.Shape([dim, batch, inputs]), dtype)
        self._waves = 0
        self._passed: tuple[list, list, list] = ([], [], [])

    def advance(self, sources: Sequence[mtf.Tensor], mask: mtf.Tensor | None = None,
                change: Callable[[mtf.Tensor], mtf.Tensor] = lambda gates: gates) -> mtf.Tensor:
        """One wave.

        Args:
          sources: what the cells read besides their own last output, each [dim, batch, inputs].
          mask: [dim] or [dim, batch]: 0 where the state is to be zeros after this wave, else 1.
          change: what is done to the gates, [dim, batch, gates, units], before they are used.

        Returns:
          What the layers put out: [dim, batch, units], or [dim, batch, inputs] where there is a projection.
        """
        first = self._waves == 0
        self._waves += 1
        of_weights, of_bias, of_projection = self._passed
        read = mtf.stack([*sources, self.h], self._source.name, 2, name="read")
        gates = change(weighted(read, self._weights, self._gates, of_weights, first, "gates"))
        masks = [] if mask is None else [mask]

        def gradient(operation: mtf.Operation, dc: mtf.Tensor | None, dh: mtf.Tensor | None) -> list:
            gates, bias, before = operation.inputs[:3]
            after = operation.outputs[0]
            if dh is None:
                dh = mtf.zeros_like(after)
            # The mask comes last: it applies to the sum of both gradients of c.
            rest = [*([] if dc is None else [dc]), *operation.inputs[3:]]
            dgates, dbefore = local(_cell_gradient, [gates, bias, before, after, dh, *rest],
                                         [gates.shape, before.shape], ("gates",), None, "cell_grad")
            of_bias.append(dgates)
            dbias = None
            if first:
                dbias = mtf.reduce_sum(stacked(of_bias, "wave", 1), output_shape=bias.shape)
                of_bias.clear()
            return [dgates, dbias, dbefore, *([None] * len(masks))]

        self.c, h = local(_cell, [gates, self._bias, self.c, *masks], [self.c.shape, self.c.shape], ("gates",),
                               gradient, "cell")
        if self._projection is None:
            self.h = mtf.reshape(h, self.h.shape, name="as_input")
        else:
            h = self.h = weighted(h, self._projection, self.h.shape, of_projection, first, "project")
        return h


def one_of(mesh: mtf.Mesh, dim: mtf.Dimension, chosen: Sequence[int], config: TextConfig, name: str) -> mtf.Tensor:
    """[dim], 1 at the chosen places and 0 elsewhere."""
    values = [float(number in chosen) for number in range(dim.size)]
    return mtf.import_tf_tensor(mesh, tf.constant(values, tf.as_dtype(config.dtype)), mtf.Shape([dim]), name=name)


def fill(x: mtf.Tensor, sequence: mtf.Tensor, first: mtf.Tensor, step: int, passed: list[mtf.Tensor]) -> mtf.Tensor:
    """Adds a time step of a sequence to the first layer's place.

    Args:
      x: [layers, batch, ...].
      sequence: [batch, length, ...].
      first: [layers], `one_of` the first.
      step: which time step.
      passed: one list for all steps of the sequence, all of which have to be used, from step 0 on: the sequence gets
        its gradient as a whole, when the backward pass has come to step 0.
    """
    length = sequence.shape.dims[1]

    def function(x: tf.Tensor, sequence: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        return x + _expand(first, len(x.shape)) * sequence[:, step]

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
        passed.append(dy)
        dsequence = None
        if step == 0:
            dsequence = mtf.einsum([stacked(passed, length.name, 2), operation.inputs[2]],
                                   output_shape=sequence.shape, name="sequence_grad")
            passed.clear()
        return [dy, dsequence, None]

    return local(function, [x, sequence, first], [x.shape], (length.name,), gradient, "fill")[0]


def last_outputs(outputs: Sequence[mtf.Tensor], last: mtf.Tensor, length: mtf.Dimension) -> mtf.Tensor:
    """What the last layer put out at all time steps.

    Args:
      outputs: per time step, [layers, batch, channels].
      last: [layers], `one_of` the last.
      length: the time steps.

    Returns:
      [batch, length, channels].
    """
    _, batch, channels = outputs[0].shape.dims
    together = mtf.stack(list(outputs), length.name, 2, name="outputs")
    return mtf.einsum([together, last], output_shape=mtf.Shape([batch, length, channels]), name="last_layer")


def residual(h: mtf.Tensor, x: mtf.Tensor, passing: mtf.Tensor) -> mtf.Tensor:
    """h + x in the layers where `passing`, [layers], is 1; h where it is 0. Both are [layers, batch, inputs]."""
    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
        return [dy, local(lambda dy, passing: dy * _expand(passing), [dy, operation.inputs[2]], [dy.shape], (), None,
                          "residual_grad")[0], None]

    return local(lambda h, x, passing: h + _expand(passing) * x, [h, x, passing], [h.shape], (), gradient,
                 "residual")[0]


def lstm_stack(sequence: mtf.Tensor, dim: mtf.Dimension, units: mtf.Dimension, config: TextConfig, *,
               projected: bool = False, drop: Callable[[mtf.Tensor], mtf.Tensor] = lambda x: x,
               residuals: Sequence[int] | None = None, gates: mtf.Tensor | None = None) -> mtf.Tensor:
    """LSTM layers on top of each other, run over a sequence from a state of zeros.

    Args:
      sequence: [batch, length, inputs].
      dim: the layers.
      units: cells per layer.
      config: `dtype` and `seed` are used.
      projected: see `Recurrence`.
      drop: the dropout on the input of every layer (not on the recurrence: Zaremba et al. 2014).
      residuals: the layers that add their input to their output (an empty list: none of them); None: this is no
        network with residuals.
      gates: [batch, length, gates, units], added to the gates of the first layer at every time step.

    Returns:
      What the last layer puts out: [batch, length, units], or [batch, length, inputs] where there are projections or
      residuals.
    """
    with one_layer(sequence.mesh.graph):
        return _unrolled(sequence, dim, units, config, projected, drop, residuals, gates)


def _unrolled(sequence: mtf.Tensor, dim: mtf.Dimension, units: mtf.Dimension, config: TextConfig, projected: bool,
              drop: Callable[[mtf.Tensor], mtf.Tensor], residuals: Sequence[int] | None,
              gates: mtf.Tensor | None) -> mtf.Tensor:
    mesh, (batch, length, inputs) = sequence.mesh, sequence.shape.dims
    stack = Recurrence(batch, dim, 2, inputs, units, config, mesh, projected)
    first = one_of(mesh, dim, [0], config, "first")
    last = one_of(mesh, dim, [dim.size - 1], config, "last")
    passing = None if residuals is None else one_of(mesh, dim, residuals, config, "residuals")
    outputs: list[mtf.Tensor] = []
    of_sequence: list[mtf.Tensor] = []
    of_gates: list[mtf.Tensor] = []
    below = stack.h
    for wave in range(length.size + dim.size - 1):
        x = mtf.shift(below, 1, dim, wrap=False, name="hand_on")
        change = {}
        if wave < length.size:
            x = fill(x, sequence, first, wave, of_sequence)
            if gates is not None:
                change["change"] = lambda made, wave=wave: fill(made, gates, first, wave, of_gates)
        # The cells read what dropout leaves; a residual passes it by, or what goes up would be dropped in every layer.
        h = stack.advance([drop(x)], begun(mesh, dim, wave, config), **change)
        below = stack.h
        if passing is not None:
            h = below = residual(below, x, passing)
        if wave >= dim.size - 1:
            outputs.append(h)
    return last_outputs(outputs, last, length)


def begun(mesh: mtf.Mesh, dim: mtf.Dimension, wave: int, config: TextConfig) -> mtf.Tensor | None:
    """[dim], 1 for the layers that have begun by this wave; None when all have."""
    return one_of(mesh, dim, range(wave + 1), config, "begun") if wave < dim.size - 1 else None
