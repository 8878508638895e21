"""Graphs that are only looked at need each number once: a constant of TensorFlow takes longer than the operation it is
for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

from pase_mtf.compat import mtf, tf
from pase_mtf.replaced import replaced

__all__ = ["shared_scalars"]

_ops = mtf.ops
_Pair: TypeAlias = tuple[mtf.Tensor, mtf.Tensor]


@contextlib.contextmanager
def shared_scalars() -> Iterator[None]:
    """Within the block equal numbers in binary operations (`mtf.maximum(x, 1e-3)`) are one constant of TensorFlow.

    Optimizers are full of them. The operations of the Mesh-TF graph are as ever.
    """
    constants: dict[Hashable, tf.Tensor] = {}

    def shared(value: object, other: object) -> object:
        if type(value) not in (int, float) or not isinstance(other, mtf.Tensor):
            return value
        key = tf.get_default_graph(), other.dtype, type(value), repr(value)
        if key not in constants:
            with tf.control_dependencies(None):  # nor in a loop of TensorFlow
                constants[key] = tf.convert_to_tensor(value, dtype=other.dtype)
        return constants[key]

    def sharing(original: Callable[..., _Pair]) -> Callable[..., _Pair]:
        return lambda x1, x2: original(shared(x1, x2), shared(x2, x1))

    with replaced(_ops, "binary_arguments_to_tensors", sharing):
        yield
