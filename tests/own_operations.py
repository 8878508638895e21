"""Operation classes as programs define them: by no rule known, some right when split and some not."""

from __future__ import annotations

from pase_mtf.compat import mtf, tf

PLACE = 20


class Same(mtf.Operation):
    """An output like the input."""

    def __init__(self, x: mtf.Tensor, name: str = "own"):
        super().__init__([x], name=name)
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def _set(self, lowering: mtf.Lowering, function) -> None:
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            function, lowering.tensors[self.inputs[0]]))


class Doubled(Same):
    """Right however it is split."""

    def lower(self, lowering):
        self._set(lowering, lambda t: 2.0 * t)


class SumOver(mtf.Operation):
    """Sums over a dim, and leaves the sum pending where that is split."""

    def __init__(self, x: mtf.Tensor, dim: mtf.Dimension):
        super().__init__([x], name="sum_over")
        self._dim = dim
        self._outputs = [mtf.Tensor(self, x.shape - dim, x.dtype)]

    def gradient(self, grad_ys):
        return [mtf.broadcast(grad_ys[0], self.inputs[0].shape)]

    def lower(self, lowering):
        x, impl = self.inputs[0], lowering.mesh_impl(self)
        y = impl.slicewise(lambda t: tf.reduce_sum(t, x.shape.dims.index(self._dim)), lowering.tensors[x])
        axis = impl.tensor_dimension_to_mesh_axis(self._dim)
        if axis is not None:
            y = mtf.ops.LazyAllreduceSum(impl, y, [axis])
        lowering.set_tensor_lowering(self.outputs[0], y)


class CustomPad(mtf.Operation):
    """Pads one dim; its gradient is a class of its own."""

    def __init__(self, x: mtf.Tensor, dim: mtf.Dimension, padding: tuple[int, int]):
        super().__init__([x], name="custom_pad")
        self._place, self._padding = x.shape.dims.index(dim), padding
        dims = list(x.shape.dims)
        dims[self._place] = mtf.Dimension(dim.name, dim.size + sum(padding))
        self._outputs = [mtf.Tensor(self, mtf.Shape(dims), x.dtype)]

    def gradient(self, grad_ys):
        return CustomPadGradient(self, grad_ys[0]).outputs

    def lower(self, lowering):
        paddings = [list(self._padding) if place == self._place else [0, 0]
                    for place in range(self.inputs[0].shape.ndims)]
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            lambda t: tf.pad(t, paddings), lowering.tensors[self.inputs[0]]))


class CustomPadGradient(mtf.Operation):
    """Holds the operation that it is the gradient of."""

    def __init__(self, forward: CustomPad, dy: mtf.Tensor):
        super().__init__([*forward.inputs, *forward.outputs, dy], name="custom_pad_gradient")
        self._forward = forward
        self._outputs = [mtf.Tensor(self, forward.inputs[0].shape, dy.dtype)]

    def lower(self, lowering):
        x, place, before = self._forward.inputs[0], self._forward._place, self._forward._padding[0]
        impl = lowering.mesh_impl(self)
        size = impl.slice_shape(x.shape)[place]
        lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(
            lambda t: tf.gather(t, tf.range(before, before + size), axis=place), lowering.tensors[self.inputs[2]]))


class ScalarNote(Same):
    """A scalar summary that reads slices: it cannot do with a pending sum."""

    def gradient(self, grad_ys):
        return grad_ys

    def lower(self, lowering):
        laid_out = lowering.tensors[self.inputs[0]]
        tf.add_to_collection("scalar_notes", (self.name, laid_out.tensor_list[0]))
        lowering.set_tensor_lowering(self.outputs[0], laid_out)


class Centred(Same):
    """Subtracts the mean over the last dim: of a slice, where that is split. It lowers all the same."""

    def lower(self, lowering):
        self._set(lowering, lambda t: t - tf.reduce_mean(t, -1, keepdims=True))


class FixedSize(Same):
    """Takes slices of which it can make so many rows."""

    def __init__(self, x: mtf.Tensor, rows: int = 64):
        super().__init__(x, "fixed_size")
        self._rows = rows

    def lower(self, lowering):
        self._set(lowering, lambda t: tf.reshape(tf.reshape(t, [self._rows, -1]) * 2.0, t.shape))


class Masked(Same):
    """Sets what is beyond a place to 0, counted from the beginning of the slice: wrong where the dim is split."""

    def __init__(self, x: mtf.Tensor, end: int):
        super().__init__(x, "masked")
        self._end = end

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < self._end, t.dtype))


class Noisy(Same):
    """Draws random numbers."""

    def lower(self, lowering):
        self._set(lowering, lambda t: t + tf.random.normal(t.shape))


class Silent(mtf.Operation):
    """Has no outputs."""

    def __init__(self, x: mtf.Tensor):
        super().__init__([x], name="silent")

    def lower(self, lowering):
        lowering.operations[self] = tf.group(lowering.tensors[self.inputs[0]].to_laid_out_tensor().tensor_list)
