"""Operation classes as owners of programs write them: they say nothing to pase_mtf and know nothing of it."""

from __future__ import annotations

from typing import Any

from pase_mtf.compat import mtf, tf

__all__ = ["fourier_parts", "quantize", "sum_of_squares", "watch", "wrap_pad"]


class _SumOfSquares(mtf.Operation):
    """The sum of squares over one dim."""

    def __init__(self, x: mtf.Tensor, dim: mtf.Dimension) -> None:
        super().__init__([x], name="sum_of_squares")
        self._dim = dim
        self._outputs = [mtf.Tensor(self, x.shape - dim, x.dtype)]

    def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
        (x,) = self.inputs
        return [2.0 * x * mtf.broadcast(grad_ys[0], x.shape)]

    def lower(self, lowering: mtf.Lowering) -> None:
        (x,) = self.inputs
        impl = lowering.mesh_impl(self)
        place = x.shape.dims.index(self._dim)
        total = impl.slicewise(lambda t: tf.reduce_sum(tf.square(t), axis=place), lowering.tensors[x])
        axis = impl.tensor_dimension_to_mesh_axis(self._dim)
        if axis is not None:
            total = impl.allreduce(total, [axis], "SUM")
        lowering.set_tensor_lowering(self.outputs[0], total)


def sum_of_squares(x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
    """The sum of squares over a dim, which may be split."""
    return _SumOfSquares(x, dim).outputs[0]


class _WrapPad(mtf.Operation):
    """Pads a dim with what stands at its other end."""

    def __init__(self, x: mtf.Tensor, dim: mtf.Dimension, margin: int) -> None:
        super().__init__([x], name="wrap_pad")
        self._dim, self._margin = dim, margin
        padded = mtf.Dimension(dim.name, dim.size + 2 * margin)
        shape = mtf.Shape([padded if other == dim else other for other in x.shape.dims])
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]

    def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
        return [_WrapPadGradient(grad_ys[0], self.inputs[0].shape, self._dim, self._margin).outputs[0]]

    def lower(self, lowering: mtf.Lowering) -> None:
        (x,) = self.inputs
        impl, place, margin = lowering.mesh_impl(self), x.shape.dims.index(self._dim), self._margin
        if impl.tensor_dimension_to_mesh_axis(self._dim) is not None:
            raise ValueError(f"the padded dim {self._dim.name} may not be split")

        def pad(t: tf.Tensor) -> tf.Tensor:
            first = tf.gather(t, tf.range(self._dim.size - margin, self._dim.size), axis=place)
            last = tf.gather(t, tf.range(margin), axis=place)
            return tf.concat([first, t, last], axis=place)

        lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(pad, lowering.tensors[x]))


class _WrapPadGradient(mtf.Operation):
    """Adds the margins to where they came from."""

    def __init__(self, dy: mtf.Tensor, shape: mtf.Shape, dim: mtf.Dimension, margin: int) -> None:
        super().__init__([dy], name="wrap_pad_gradient")
        self._dim, self._margin = dim, margin
        self._outputs = [mtf.Tensor(self, shape, dy.dtype)]

    def lower(self, lowering: mtf.Lowering) -> None:
        (dy,) = self.inputs
        place = [dim.name for dim in dy.shape.dims].index(self._dim.name)
        size, margin = self._dim.size, self._margin

        def fold(t: tf.Tensor) -> tf.Tensor:
            first, inner, last = tf.split(t, [margin, size, margin], axis=place)
            rest = [dim if number != place else size - margin for number, dim in enumerate(inner.shape.as_list())]
            return (inner + tf.concat([last, tf.zeros(rest, t.dtype)], axis=place)
                    + tf.concat([tf.zeros(rest, t.dtype), first], axis=place))

        impl = lowering.mesh_impl(self)
        lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(fold, lowering.tensors[dy]))


def wrap_pad(x: mtf.Tensor, dim: mtf.Dimension, margin: int) -> mtf.Tensor:
    """The tensor with a periodic margin on both sides of a dim, which stays whole."""
    return _WrapPad(x, dim, margin).outputs[0]


class _Quantize(mtf.Operation):
    """Rounds to multiples of a step within a range."""

    def __init__(self, x: mtf.Tensor, step: float, most: float) -> None:
        super().__init__([x], name="quantize")
        self._step, self._most = step, most
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
        within = mtf.cast(mtf.less(mtf.abs(self.inputs[0]), self._most), grad_ys[0].dtype)
        return [grad_ys[0] * within]

    def lower(self, lowering: mtf.Lowering) -> None:
        step, most = self._step, self._most
        rounded = lowering.mesh_impl(self).slicewise(
            lambda t: tf.clip_by_value(tf.round(t / step) * step, -most, most), lowering.tensors[self.inputs[0]])
        lowering.set_tensor_lowering(self.outputs[0], rounded)


def quantize(x: mtf.Tensor, step: float = 1 / 64, most: float = 2.0) -> mtf.Tensor:
    """The tensor in few bits; gradients pass where nothing is clipped."""
    return _Quantize(x, step, most).outputs[0]


class _Watch(mtf.Operation):
    """Passes a tensor on, and writes its mean to the summaries."""

    def __init__(self, x: mtf.Tensor) -> None:
        super().__init__([x], name="watch")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: list[mtf.Tensor]) -> list[mtf.Tensor]:
        return list(grad_ys)

    def lower(self, lowering: mtf.Lowering) -> None:
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        tf.summary.scalar("watched", tf.reduce_mean(x.tensor_list[0]))
        lowering.set_tensor_lowering(self.outputs[0], x)


def watch(x: mtf.Tensor) -> mtf.Tensor:
    """The tensor itself, seen by a summary."""
    return _Watch(x).outputs[0]


def fourier_parts(real: Any, imaginary: Any) -> tuple[Any, Any]:
    """Real and imaginary part of the Fourier transform along the last dim."""
    transformed = tf.signal.fft(tf.complex(real, imaginary))
    return tf.math.real(transformed), tf.math.imag(transformed)
