"""A cast to a type of more digits, which partial sums pass: what they add up to does not depend on when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.registry import Rule, add_rules
from pase_mtf.operations.stock_sums import PendingSum

__all__ = ["widened"]


def widened(x: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """The same numbers in another type, which holds all of those of x.

    As `mtf.cast`, but that a sum over devices that is still to be made stays so: gradients in bfloat16, which a loop
    adds up in float32, are summed over devices once, after the loop, and in float32.

    Args:
      x: of a floating type.
      dtype: of at least as many digits; x itself is returned where it has that.
    """
    return x if x.dtype == dtype else _Widen(x, dtype).outputs[0]


class _Widen(mtf.Operation):
    """See `widened`."""

    def __init__(self, x: mtf.Tensor, dtype: tf.DType) -> None:
        super().__init__([x], name="widen")
        self._dtype = dtype
        self._outputs = [mtf.Tensor(self, x.shape, dtype)]
        self._splittable_dims, self._unsplittable_dims = self._initialize_all_dimensions_as_splittable()

    def gradient(self, grad_ys: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
        return [mtf.cast(grad_ys[0], self.inputs[0].dtype)]

    def lower(self, lowering: mtf.Lowering) -> None:
        dtype = self._dtype
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise_delay_allreduce(
            lambda part: tf.cast(part, dtype), lowering.tensors[self.inputs[0]]))


def _sums(operation: mtf.Operation, sums: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    (x,), (output,) = operation.inputs, operation.outputs
    return {output: sums[x]} if x in sums else {}


add_rules({_Widen: Rule(forwards_sums=True, stock_sums=_sums)})
