"""Lets Mesh-TensorFlow build the same graph in every process."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["mend"]


def mend(mesh_tensorflow: Any) -> None:
    """Puts what a function of `mtf.custom_gradient` (so of `mtf.recompute_grad`) reads from outside in the order in
    which it reads it.

    Mesh-TensorFlow takes it from a set, in the order of addresses. Where several such functions share tensors, their
    gradients would be added up in another order, by other operations, in every process.

    Args:
      mesh_tensorflow: the package, once it has been imported; more than once does no harm.
    """
    operation = mesh_tensorflow.ops.CustomGradientOperation
    made = operation.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def init(self: Any, explicit_inputs: list[Any], all_inputs: list[Any], fn_outputs: list[Any], grad_fn: Any,
             forward_operations: list[Any], name: str | None = None) -> None:
        read = [tensor for each in forward_operations for tensor in each.inputs]
        place = {tensor: number for number, tensor in reversed(list(enumerate(read)))}
        outside = sorted(all_inputs[len(explicit_inputs):], key=lambda tensor: place.get(tensor, len(read)))
        made(self, explicit_inputs, [*explicit_inputs, *outside], fn_outputs, grad_fn, forward_operations, name)

    operation.__init__ = init
