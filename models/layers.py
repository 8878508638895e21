"""What the models share, in few Mesh-TF operations: every one of them becomes at least p TensorFlow nodes.

`mtf.layers` builds softmax and its gradient from some thirty operations, and `mtf.relu`'s gradient from four. Where a
computation is local to a slice, one `mtf.slicewise` with its gradient written out does the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.models.checks import kept_dtype
from pase_mtf.models.presets import ModelConfig

__all__ = ["cross_entropy", "layer_norm", "local", "masked_softmax", "ones", "relu", "variable", "widened",
           "zeros"]


def variable(mesh: mtf.Mesh, name: str, dims: Sequence[mtf.Dimension], config: ModelConfig,
             stddev: float | None = None, fill: float = 0.0) -> mtf.Tensor:
    """A trainable variable whose initial value depends on its name, its shape and `config.seed` only.

    TensorFlow's own initializers draw by the number of operations made before them; two graphs of the same model
    would start from different values.

    Args:
      mesh: of the graph that is being built.
      name: within the current variable scope.
      dims: its shape.
      config: `dtype` and `seed` are used.
      stddev: of the normal distribution (cut at two deviations) to draw from; None: constant.
      fill: the constant.
    """
    scope = tf.get_variable_scope().name
    key = zlib.crc32(f"{scope}/{name}".encode())

    def initializer(shape: Sequence[int], dtype: tf.DType = tf.float32, **_: object) -> tf.Tensor:
        if stddev is None:
            return tf.fill(shape, tf.constant(fill, dtype))
        # Drawn in float32 so that a float64 run starts from the same values.
        drawn = tf.random.stateless_truncated_normal(shape, seed=[config.seed, key & 0x7FFFFFFF], stddev=stddev)
        return tf.cast(drawn, dtype)

    kept = tf.as_dtype(kept_dtype(config.dtype))
    return mtf.get_variable(mesh, name, mtf.Shape(list(dims)), initializer=initializer,
                            dtype=mtf.VariableDType(kept, kept, tf.as_dtype(config.dtype)))


def widened(x: mtf.Tensor) -> mtf.Tensor:
    """The tensor in the type in which a loss is computed (see `kept_dtype`)."""
    wide = tf.as_dtype(kept_dtype(x.dtype.name))
    return x if x.dtype == wide else mtf.cast(x, wide)


def zeros(mesh: mtf.Mesh, name: str, dims: Sequence[mtf.Dimension], config: ModelConfig) -> mtf.Tensor:
    """A trainable variable that starts as zeros."""
    return variable(mesh, name, dims, config)


def ones(mesh: mtf.Mesh, name: str, dims: Sequence[mtf.Dimension], config: ModelConfig) -> mtf.Tensor:
    """A trainable variable that starts as ones."""
    return variable(mesh, name, dims, config, fill=1.0)


def local(function: Callable, inputs: Sequence[mtf.Tensor], shape: mtf.Shape, whole: Collection[str] = (),
          gradient: Callable | None = None, name: str | None = None, dtype: tf.DType | None = None) -> mtf.Tensor:
    """A function of slices, where every dim may be split but those named in `whole` (`mtf.slicewise`).

    Args:
      function: takes the slices of the inputs, returns that of the output (TensorFlow).
      inputs: Mesh-TF tensors.
      shape: of the output.
      whole: names of dims that cannot be split.
      gradient: `gradient(operation, dy)` returns a Mesh-TF tensor or None per input; None: it has no gradient.
      name: of the operation.
      dtype: of the output; that of the first input.
    """
    dims = {dim.name: dim for tensor in inputs for dim in tensor.shape.dims}
    dims.update({dim.name: dim for dim in shape.dims})
    return mtf.slicewise(
        function, list(inputs), output_shape=shape, output_dtype=dtype or inputs[0].dtype,
        splittable_dims=[dim for dim in dims.values() if dim.name not in whole],
        grad_function=0 if gradient is None else gradient, name=name)


def relu(x: mtf.Tensor, bias: mtf.Tensor | None = None, name: str = "relu") -> mtf.Tensor:
    """max(x + bias, 0); the bias has the last dim of x."""
    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor]:
        dx = local(lambda dy, y: tf.raw_ops.ReluGrad(gradients=dy, features=y), [dy, operation.outputs[0]], x.shape,
                   name="relu_grad")
        return [dx] if bias is None else [dx, mtf.reduce_sum(dx, output_shape=bias.shape)]

    if bias is None:
        return local(tf.nn.relu, [x], x.shape, gradient=gradient, name=name)
    return local(lambda x, bias: tf.nn.relu(x + bias), [x, bias], x.shape, gradient=gradient, name=name)


def masked_softmax(logits: mtf.Tensor, visible: mtf.Tensor, dim: mtf.Dimension, scale: float = 1.0,
                   name: str = "softmax") -> mtf.Tensor:
    """Softmax of scale * logits over `dim`, with zero (to float precision) where `visible` is false.

    Where nothing is visible (of a sentence something always is) the result is uniform, and its gradient, which does not
    look at `visible`, that of a softmax of everything. `dim` cannot be split here.

    Args:
      logits: any shape that ends in `dim`.
      visible: booleans, some of the dims of the logits in their order.
      dim: the dim to normalise over.
      scale: multiplies the logits first.
      name: of the operation.
    """
    if logits.shape.dims[-1] != dim:
        raise ValueError(f"{dim} is not the last dim of {logits.shape}")
    axes = [i for i, other in enumerate(logits.shape.dims) if other not in visible.shape.dims]

    def forward(logits: tf.Tensor, visible: tf.Tensor) -> tf.Tensor:
        for axis in axes:
            visible = tf.expand_dims(visible, axis)
        return tf.nn.softmax(tf.where_v2(visible, logits * tf.constant(scale, logits.dtype),
                                         tf.constant(-1e9, logits.dtype)))

    def backward(y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        product = y * dy
        return (product - y * tf.reduce_sum(product, -1, keepdims=True)) * tf.constant(scale, y.dtype)

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor | None]:
        return [local(backward, [operation.outputs[0], dy], logits.shape, (dim.name,), name="softmax_grad"), None]

    return local(forward, [logits, visible], logits.shape, (dim.name,), gradient, name)


def layer_norm(x: mtf.Tensor, dim: mtf.Dimension, config: ModelConfig, name: str, epsilon: float = 1e-6) -> mtf.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale over `dim`, which may be split.

    No bias: what follows is linear and has none either. (With Adam on 8 devices every variable, however small, costs
    some 700 TensorFlow nodes.)
    """
    def inverse(total: tf.Tensor) -> tf.Tensor:
        return tf.math.rsqrt(total * tf.constant(1 / dim.size, total.dtype) + tf.constant(epsilon, total.dtype))

    def gradient(operation: mtf.Operation, dy: mtf.Tensor) -> list[mtf.Tensor]:
        return [local(lambda y, dy: dy * y * y * y * tf.constant(-0.5 / dim.size, y.dtype),
                       [operation.outputs[0], dy], dy.shape, name="inverse_grad")]

    with tf.variable_scope(name):
        scale = ones(x.mesh, "scale", [dim], config)
        reduced = x.shape - dim
        minus_mean = mtf.reduce_sum(x, output_shape=reduced) * (-1 / dim.size)
        centered = x + minus_mean
        total = mtf.einsum([centered, centered], output_shape=reduced, name="sum_of_squares")
        deviation = local(inverse, [total], reduced, gradient=gradient, name="inverse_deviation")
        return mtf.einsum([centered, deviation, scale], output_shape=x.shape, name="normalize")


def cross_entropy(logits: mtf.Tensor, targets: mtf.Tensor, dim: mtf.Dimension,
                  weights: mtf.Tensor | None = None) -> mtf.Tensor:
    """Mean cross-entropy of integer targets, in nats; `dim`, the classes, may be split.

    Args:
      logits: [..., dim].
      targets: [...], integers below dim.size.
      dim: the classes.
      weights: [...], of the type of the logits; the mean counts every target with its weight. None: all ones.

    Returns:
      A scalar; 0 where all weights are 0.
    """
    with tf.variable_scope("loss"):
        logits, weights = widened(logits), None if weights is None else widened(weights)
        reduced = logits.shape - dim
        highest = mtf.reduce_max(mtf.stop_gradient(logits), output_shape=reduced)
        powers = local(
            lambda x, highest: tf.exp(x - tf.expand_dims(highest, -1)), [logits, highest], logits.shape, name="exp",
            gradient=lambda operation, dy: [mtf.multiply(dy, operation.outputs[0]), None])
        total = mtf.reduce_sum(powers, output_shape=reduced)
        hot = mtf.one_hot(targets, dim, dtype=logits.dtype)
        chosen = mtf.einsum([logits, hot], output_shape=reduced, name="chosen")
        log_total = local(
            lambda total, highest: tf.math.log(total) + highest, [total, highest], reduced, name="log",
            gradient=lambda operation, dy: [
                local(lambda dy, total: dy / total, [dy, total], reduced, name="log_grad"), None])
        losses = log_total - chosen
        if weights is None:
            return mtf.reduce_mean(losses)
        count = mtf.reduce_sum(weights)
        return mtf.einsum([losses, weights], output_shape=mtf.Shape([])) / local(
            lambda count: tf.maximum(count, tf.ones_like(count)), [count], count.shape, name="at_least_one")
